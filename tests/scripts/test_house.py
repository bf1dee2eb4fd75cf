"""What keeps the scripts one project: blocks they share letter for letter, commands that work, sections in order."""

import ast
import re
import shlex
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn as nn
import tyro

import dqn_mario_async
import dqn_snake
import dqn_snake_sb3_compat
import ppo_metta
import ppo_snake

ROOT = Path(__file__).parents[2]
SCRIPTS = {
    "dqn_snake.py": dqn_snake,
    "ppo_snake.py": ppo_snake,
    "dqn_snake_sb3_compat.py": dqn_snake_sb3_compat,
    "ppo_metta.py": ppo_metta,
    "dqn_mario_async.py": dqn_mario_async,
}
PAGES = ["README.md", "benchmarks.md"]
PAGES += [f"benchmarks/pages/{path.name}" for path in ROOT.glob("benchmarks/pages/*.md")]
SHARED = "fail first_line say check_memory pick_device matmuls_per_second pick_threads bf16_speedup pick_precision "
SHARED += "try_compile CUDAGraphStep PhaseTimer Interrupts restore_process make_run_folder write_json write_scalars "
SHARED += "save_checkpoint find_checkpoint load_checkpoint saved_flags layout check_layout "
SHARED += "peak_memory_gib is_out_of_memory"
OF_RANKS = "RankLost join_ranks one_of_ranks mean_over_ranks average_gradients sync restarted_run"
OF_SNAKE = "check_ranges rules_of make_envs wilson_interval parse_args"


@cache
def blocks(script: str) -> dict[str, str]:
    """Source of every top-level function and class."""
    source = (ROOT / script).read_text()
    nodes = [node for node in ast.parse(source).body if isinstance(node, (ast.FunctionDef, ast.ClassDef))]
    return {node.name: ast.get_source_segment(source, node) for node in nodes}


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("name", SHARED.split())
def test_shared_blocks_are_the_same_letter_for_letter(script: str, name: str) -> None:
    assert blocks(script)[name] == blocks("dqn_snake.py")[name]


@pytest.mark.parametrize("script", ["ppo_snake.py", "ppo_metta.py", "dqn_mario_async.py"])
@pytest.mark.parametrize("name", ["copy_tensors", "init_adam"])
def test_blocks_of_those_that_use_pytorchs_adam(script: str, name: str) -> None:
    assert blocks(script)[name] == blocks("dqn_snake.py")[name]


@pytest.mark.parametrize("script", ["ppo_snake.py", "ppo_metta.py", "dqn_mario_async.py"])
@pytest.mark.parametrize("name", OF_RANKS.split())
def test_blocks_of_those_that_torchrun_starts(script: str, name: str) -> None:
    assert blocks(script)[name] == blocks("dqn_snake.py")[name]


@pytest.mark.parametrize("script", ["ppo_snake.py", "dqn_mario_async.py"])
def test_what_flags_say_of_all_ranks_is_dealt_out_alike(script: str) -> None:
    assert blocks(script)["rank_share"] == blocks("dqn_snake.py")["rank_share"]


@pytest.mark.parametrize("name", OF_SNAKE.split())
def test_blocks_of_those_that_play_snake(name: str) -> None:
    assert blocks("ppo_snake.py")[name] == blocks("dqn_snake.py")[name]


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_imports_no_other_script(script: str) -> None:
    imported = set()
    for node in ast.walk(ast.parse((ROOT / script).read_text())):
        if isinstance(node, ast.Import):
            imported |= {alias.name.split(".")[0] for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            imported.add(node.module.split(".")[0])
    assert not imported & {Path(other).stem for other in SCRIPTS}


@pytest.mark.parametrize("script", SCRIPTS)
def test_sections_stand_in_order(script: str) -> None:
    source = (ROOT / script).read_text()
    maths = ["def td_target", "class Replay"]
    if script.startswith("ppo"):
        maths = ["def gae", "class Rollout"]
    order = ["class Args", "def make_envs", "(nn.Module)", *maths, "def evaluate"]
    order += ["def fail", "def main", "# 1 act and step", "# 3 learn", "# 4 log, evaluate, save", "if __name__"]
    places = [source.index(mark) for mark in order]
    assert places == sorted(places)


class NoStream:
    def wait_stream(self, stream: object) -> None:
        pass


class NoGraph:
    def register_generator_state(self, generator: torch.Generator) -> None:
        pass

    def replay(self) -> None:
        raise AssertionError("nothing was captured")


def generator() -> SimpleNamespace:
    states = []
    return SimpleNamespace(clone_state=lambda: "fresh", graphsafe_set_state=states.append, states=states)


@pytest.fixture
def capture_fails(monkeypatch) -> None:
    """Streams that do nothing, and a capture that ends as one of an operation that waits does."""

    def graph(*args: object, **kwargs: object) -> nullcontext:
        raise RuntimeError("operation not permitted when stream is capturing\nand more lines")

    for name, stub in {"Stream": NoStream, "current_stream": NoStream, "CUDAGraph": NoGraph, "graph": graph}.items():
        monkeypatch.setattr(torch.cuda, name, stub)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "default_generators", [generator()])


def test_a_failed_capture_says_so_and_the_loop_goes_on(capture_fails, capsys, recwarn) -> None:
    calls = []

    def function() -> None:
        calls.append(1)
        if len(calls) <= 3:
            warnings.warn("Adam's, about being capturable", stacklevel=2)

    timer = dqn_snake.PhaseTimer(torch.device("cpu"))
    ours = generator()
    graphed = dqn_snake.CUDAGraphStep(function, ours, timer)
    for number in range(1, 8):
        graphed()
        assert len(calls) == number
    assert graphed.graph is None
    assert ours.states == torch.cuda.default_generators[0].states == ["fresh"]
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 1 and said[0].startswith(
        "--cudagraph: failed (operation not permitted when stream is capturing)"
    )
    assert not recwarn.list


@pytest.mark.parametrize("fails_in", ["clip_grad_norm_", "step", "update"])
def test_a_failed_capture_leaves_a_scaler_that_goes_on(capture_fails, monkeypatch, fails_in: str) -> None:
    """A capture runs a part of an update, and the scaler would remember it: it unscales once before each of its own."""
    weight = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    places = []

    def update() -> None:
        optimizer.zero_grad()
        scaler.scale(weight.sum()).backward()
        scaler.unscale_(optimizer)
        if places == ["clip_grad_norm_"]:
            raise RuntimeError("operation not permitted when stream is capturing")
        scaler.step(optimizer)
        if places == ["step"]:
            raise RuntimeError("operation not permitted when stream is capturing")
        scaler.update()

    @contextmanager
    def graph(*args: object, **kwargs: object) -> Iterator[None]:
        before = weight.detach().clone()  # nothing that is captured has an effect yet
        places.append(fails_in)
        try:
            yield
            raise RuntimeError("operation not permitted when stream is capturing")
        finally:
            places.clear()
            weight.data.copy_(before)

    monkeypatch.setattr(torch.cuda, "graph", graph)
    timer = dqn_snake.PhaseTimer(torch.device("cpu"))
    graphed = dqn_snake.CUDAGraphStep(update, generator(), timer, scaler)
    for number in range(1, 8):
        graphed()
        assert weight.tolist() == pytest.approx(3 * [1 - 0.1 * number])
    assert scaler.get_scale() == 1024


@pytest.mark.parametrize("tf32", [False, True])
def test_tf32_is_used_only_when_asked_for(tf32: bool) -> None:
    """Convolutions and recurrent layers have a switch of their own, which PyTorch leaves on."""
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32

    @dqn_snake.restore_process()
    def run() -> tuple[bool, str]:
        dqn_snake.pick_precision(False, False, tf32, torch.device("cuda"))
        return torch.backends.cudnn.allow_tf32, torch.get_float32_matmul_precision()

    assert run() == ((True, "high") if tf32 else (False, "highest"))
    assert (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32) == before


@pytest.mark.parametrize("page", [*PAGES, *SCRIPTS])
def test_every_command_that_is_shown_is_understood(page: str) -> None:
    shown = re.findall(r"python (\w+\.py)([^\n`&|]*)", (ROOT / page).read_text())
    for script, flags in shown:
        if script in SCRIPTS and "--help" not in flags:
            tyro.cli(SCRIPTS[script].Args, args=shlex.split(flags, comments=True))
        else:
            assert (ROOT / script).exists()


def test_ci_runs_the_test_command_of_the_readme() -> None:
    command = "pip install -r requirements-dev.txt -r requirements-games.txt && "
    command += "pip install --no-deps gym-super-mario-bros==7.4.0 && ruff check && ruff format --check && "
    command += "python -m pytest -n auto"
    assert command in (ROOT / "README.md").read_text()
    assert command in (ROOT / ".ci" / "run").read_text().replace(" --quiet", "")

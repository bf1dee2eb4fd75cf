"""A run with --cudagraph ends bit for bit where one without it does: with graphs that are tapes, see tape.py."""

import importlib.util
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from tape import Cuda, Refused, install

import dqn_mario_async
import dqn_snake
import dqn_snake_sb3_compat
import envs.metta.actions
import envs.metta.batch
import envs.metta.maps
import envs.metta.tables
import envs.metta.tokens
import envs.metta.view
import envs.snake.batch
import envs.snake.view
import envs.workers
import ppo_metta
import ppo_snake

ROOT = Path(__file__).parent.parent
ALL = dict(device="cuda", eval_every=0, log_every=1e-9, video=False, threads=1)  # logs in every round
SNAKE = dict(
    board="6x6", num_envs=8, batch_size=16, buffer_size=100, learning_starts=16, total_timesteps=200, hidden_size=16,
    exploration_fraction=1.0, checkpoint_replay=True,
)  # fmt: skip
PPO = dict(
    board="6x6", num_envs=8, num_steps=4, num_minibatches=2, total_timesteps=400, hidden_size=16,
)  # fmt: skip
COMPAT = dict(
    env_id="SnakeOneHot-v0", board="6x6", num_envs=2, batch_size=8, buffer_size=100, learning_starts=8,
    total_timesteps=120, train_freq=2, target_update_interval=8, learning_rate=1e-3, lr_schedule="cosine",
    exploration_fraction=1.0, checkpoint_replay=True,
)  # fmt: skip
METTA = dict(
    num_envs=2, size=10, agents=2, num_steps=4, num_minibatches=2, bptt_horizon=2, total_timesteps=16 * 7,
    rnn="mingru", hidden_size=8, ent_coef=0.1,
)  # fmt: skip
MARIO = dict(
    num_collectors=0, envs_per_collector=6, ring_blocks=4, size=48, channels=4, hidden_size=16, batch_size=8,
    buffer_size=400, learning_starts=48, total_timesteps=240, replay_ratio=1.0, exploration_fraction=1.0,
    checkpoint_replay=True,
)  # fmt: skip
SCRIPTS = {  # flags of every run, and the number of graphs
    dqn_snake: (SNAKE, 2),
    ppo_snake: (PPO, 3),
    dqn_snake_sb3_compat: (COMPAT, 1),
    ppo_metta: (METTA, 4),
    dqn_mario_async: (MARIO, 1),
}
HALF = [{"bf16": True}, {"fp16": True}, {"tf32": True}]
COMBINATIONS = {
    dqn_snake: [
        {}, *HALF, {"network": "attention"}, {"network": "attention", "bf16": True}, {"double": False},
        {"anneal_lr": False, "tau": 1.0},
    ],
    ppo_snake: [{}, *HALF, {"anneal_lr": False, "ent_coef": 0.0}],
    dqn_snake_sb3_compat: [
        {}, *HALF, {"gradient_steps": -1}, {"policy": "transformer"}, {"policy": "transformer", "bf16": True},
    ],
    ppo_metta: [
        {}, *HALF, {"rnn": "none"}, {"rnn": "none", "bf16": True}, {"muon_learning_rate": 0.0},
        {"network": "box-cnn"}, {"network": "token-attention", "rnn": "none"},
        {"network": "token-attention", "bf16": True}, {"rnn": "lstm", "fp16": True, "update_epochs": 2},
    ],
    dqn_mario_async: [
        {}, *HALF, {"accumulate": 2}, {"alpha": 0.0}, {"accumulate": 2, "bf16": True, "dueling": False, "n_step": 1},
        {"target_network_frequency": 2, "double": False},
    ],
}  # fmt: skip
EVERY_ONE = [
    pytest.param(script, flags, marks=pytest.mark.slow if flags else [])
    for script, every in COMBINATIONS.items()
    for flags in every
]
GAMES = [envs.snake.batch, envs.snake.view, envs.metta.batch, envs.metta.actions, envs.metta.maps]
GAMES += [envs.metta.tables, envs.metta.tokens, envs.metta.view, envs.workers, envs.workers]
TIMES = "args elapsed collected"  # parts of a checkpoint that tell of the run's name and of the clock


@pytest.fixture(autouse=True)
def short(monkeypatch) -> None:
    """Episodes that end during a run, and no evaluation after it."""
    for rules in ppo_metta.VARIANTS.values():
        monkeypatch.setitem(rules, "max_steps", 12)
    for script in SCRIPTS:
        monkeypatch.setattr(script, "evaluate", lambda *_: {})


def leaves(prefix: str, value: Any) -> dict[str, Any]:
    """The parts of nested dicts with dotted names: q_network.head.bias."""
    if not isinstance(value, dict):
        return {prefix: value}
    return {name: leaf for key in value for name, leaf in leaves(f"{prefix}.{key}", value[key]).items()}


def train(monkeypatch, script: ModuleType, folder: Path, **flags: Any) -> tuple[dict, dict, Cuda]:
    """Train for a moment; gives the summary, all that is saved and logged but times, and the graphs of the run."""
    ours, _ = next(SCRIPTS[known] for known in SCRIPTS if known.__name__ == script.__name__)
    flags = ALL | ours | {"run_dir": str(folder), "run_name": "graphs" if flags.get("cudagraph") else "eager"} | flags
    logged = []

    def add_scalar(writer: Any, tag: str, value: float, step: int) -> None:
        if re.match("losses/|train/|charts/(epsilon|score|episodic)|rollout/", tag):
            logged.append((step, tag, repr(value)))

    with monkeypatch.context() as patch:
        patch.setattr(script.SummaryWriter, "add_scalar", add_scalar)
        cuda = install(patch, script, *GAMES)
        summary = script.main(script.Args(**flags))
    saved = torch.load(folder / flags["run_name"] / "checkpoint.pt", weights_only=True)
    saved["optimizer"].pop("param_groups", None)  # it says whether it is capturable
    state = leaves("", {name: part for name, part in saved.items() if name not in TIMES.split()})
    return summary, state | {f"log {number}": line for number, line in enumerate(logged)}, cuda


def different(eager: dict[str, Any], graphs: dict[str, Any]) -> list[str]:
    """Names of what is not the same in both, to the bit."""
    names = []
    for name in eager.keys() | graphs.keys():
        value, other = eager.get(name), graphs.get(name)
        if isinstance(value, torch.Tensor):
            same = value.dtype == other.dtype and torch.equal(value, other)
        else:
            same = value == other
        if not same:
            names.append(name)
    return names


@pytest.mark.parametrize("script, flags", EVERY_ONE, ids=lambda value: getattr(value, "__name__", str(value)))
def test_graphs_lead_where_the_loop_leads(monkeypatch, tmp_path, script, flags) -> None:
    _, eager, cuda = train(monkeypatch, script, tmp_path, **flags)
    assert not cuda.graphs
    summary, graphs, cuda = train(monkeypatch, script, tmp_path, cudagraph=True, **flags)
    assert summary["cudagraph"] and len(cuda.graphs) == SCRIPTS[script][1]
    assert all(graph.replays >= 4 for graph in cuda.graphs)
    precision = "bfloat16" if flags.get("bf16") else "float16" if flags.get("fp16") else "float32"
    assert summary["precision"] == precision
    if precision == "float16" and script is not dqn_snake_sb3_compat:  # which scales in its own way
        updates = graphs.get(".updates")
        if updates is None:
            updates = summary["env_steps"] * summary["updates_per_second"] / summary["env_steps_per_second"]
        skipped = updates - graphs.get(".optimizer.state.0.step", graphs.get(".optimizer.0.step"))
        assert 3 < skipped < updates, "not only of the three updates before the capture"
    assert not different(eager, graphs)


@pytest.mark.parametrize(
    "script", [dqn_snake, ppo_snake, ppo_metta, dqn_mario_async], ids=lambda script: script.__name__
)
def test_an_update_that_cannot_be_captured_is_refused(monkeypatch, tmp_path, capsys, script) -> None:
    """In float16: the capture fails where the scaler has unscaled the gradients, and knows it."""
    clip = torch.nn.utils.clip_grad_norm_

    def fail_in_capture(*args: Any) -> torch.Tensor:
        if script.torch.cuda.recorder is not None:
            raise RuntimeError("operation not permitted when stream is capturing")
        return clip(*args)

    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", fail_in_capture)
    with pytest.raises(SystemExit) as ended:
        train(monkeypatch, script, tmp_path, fp16=True, cudagraph=True)
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "--cudagraph: capture failed (operation not permitted" in said


# ------------------------------------------------------------------------------------------- broken on purpose


BROKEN = {  # code of ppo_snake.py, what replaces it, and why that is refused: None if it is captured
    "learning rate as a float": (
        "learning_rate.fill_(args.learning_rate * (1 - progress))",
        'optimizer.param_groups[0]["lr"] = args.learning_rate * (1 - progress)',
        None,
    ),
    "entropy bonus as a float": (
        "ent_coef.fill_(args.ent_coef * (1 - progress))",
        "ent_coef = np.float64(args.ent_coef * (1 - progress))",
        None,
    ),
    "a tensor with new memory": ("advantages.copy_(gae(", "advantages.data = (gae(", None),
    "mask in the loop": ("values[step] = value", "values[step] = value[~terminated].mean()", "a mask as an index"),
    "number by index": ("values[step] = value", "values[step] = torch.tensor(0.0)", "a number from the host"),
    "branch on a tensor": (
        "nn.utils.clip_grad_norm_(weights",
        "loss > 0 and nn.utils.clip_grad_norm_(weights",
        "_local_scalar_dense",
    ),
    "number to the host": ("loss_sum.add_(means)", "loss_sum.add_(means.tolist()[0])", "tolist"),
    "optimizer": ("fused=True, capturable=args.cudagraph", "fused=True, capturable=False", "Adam is not capturable"),
    "generator": ("exponential_(generator=generator)", "exponential_(generator=other_generator)", "not registered"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_broken_is_caught(monkeypatch, tmp_path, name) -> None:
    script = ppo_snake
    old, new, reason = BROKEN[name]
    source = (ROOT / f"{script.__name__}.py").read_text()
    assert source.count(old) == 1, "the script has changed: this test has to follow"
    path = tmp_path / f"{script.__name__}.py"
    path.write_text(source.replace(old, new))
    spec = importlib.util.spec_from_file_location(script.__name__, path)
    broken = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(broken)
    broken.evaluate = lambda *_: {}
    broken.np = np
    broken.other_generator = torch.Generator().manual_seed(5)

    _, eager, _ = train(monkeypatch, broken, tmp_path)
    if reason is None:
        _, graphs, _ = train(monkeypatch, broken, tmp_path, cudagraph=True)
        assert different(eager, graphs)
    else:
        with pytest.raises(Refused, match=reason):
            train(monkeypatch, broken, tmp_path, cudagraph=True)

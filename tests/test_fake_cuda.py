"""The scripts on a GPU that is not there: what a GPU would refuse, wait for and launch, seen without one."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._inductor.scheduler import NopKernelSchedulerNode, Scheduler

from envs.snake.batch import SnakeBatch

ROOT = Path(__file__).parent.parent
NO_FAKE = "a fake CUDA needs Linux, g++ and a PyTorch without CUDA"
CAN_FAKE = sys.platform == "linux" and shutil.which("g++") is not None and torch.version.cuda is None
COMMON = "--threads 1 --log-every 0.001 --eval-every 0 --checkpoint-every 0"
FLAGS = {
    "ppo_metta": "--agents 6 --num-envs 2 --num-steps 8 --bptt-horizon 8 --num-minibatches 2 --rnn mingru"
    " --hidden-size 16 --eval-episodes 6",
    "dqn_snake": "--board 4x4 --num-envs 8 --batch-size 16 --learning-starts 8 --buffer-size 800 --hidden-size 16"
    " --exploration-fraction 1 --eval-episodes 8",
    "ppo_snake": "--board 4x4 --num-envs 8 --num-steps 4 --num-minibatches 2 --hidden-size 16 --eval-episodes 8",
    "dqn_snake_sb3_compat": "--board 8x8 --num-envs 2 --batch-size 8 --learning-starts 4 --buffer-size 400"
    " --train-freq 1 --target-update-interval 8 --exploration-fraction 0.01 --eval-episodes 2",
    "dqn_mario_async": "--num-collectors 0 --envs-per-collector 2 --ring-blocks 4 --buffer-size 600 --batch-size 4"
    " --learning-starts 40 --channels 2 --hidden-size 16 --size 48 --eval-episodes 2",
}
STEPS = {"dqn_snake": 80, "ppo_snake": 320, "dqn_snake_sb3_compat": 24, "ppo_metta": 6 * 96, "dqn_mario_async": 64}
ROUND = {"dqn_snake": 8, "ppo_snake": 32, "dqn_snake_sb3_compat": 2, "ppo_metta": 96, "dqn_mario_async": 2}
# At most so many launches for a step of all games (of a ring that is read), and for an update.
LAUNCHES = {
    "dqn_snake": (305, 165),
    "ppo_snake": (330, 150),
    "dqn_snake_sb3_compat": (13, 82),
    "ppo_metta": (1_620, 510),
    "dqn_mario_async": (30, 210),
}
# Where the training loop may wait, and how often for each step (or ring that is read): these games are on the CPU.
WAITS = {"dqn_snake": 0, "ppo_snake": 0, "ppo_metta": 0, "dqn_snake_sb3_compat": 8, "dqn_mario_async": 1}


def seen(script: str, tmp_path: Path, *runs: str) -> list[dict[str, Any]]:
    """What the tool reports of these runs, all in one process."""
    if not CAN_FAKE:
        pytest.skip(NO_FAKE)
    report = tmp_path / "report.json"
    command = [sys.executable, "tests/fake_cuda.py", str(report), script, *runs]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(report.read_text())


ONE_BY_ONE = """
import fake_cuda
import torch

fake_cuda.install()
fake_cuda.MODE.__enter__()
x = torch.zeros(4, device="cuda")
index = torch.tensor([1, 2], device="cuda")
host, pinned = torch.ones(4), torch.ones(4, pin_memory=True)
known, unknown = torch.Generator("cuda"), torch.Generator("cuda")


def put(key, value):
    x[key] = value


for line, what in {
    "a number": lambda: x.fill_(2.0),
    "a number by mask": lambda: put(x > 0, 1.0),
    "a tensor by index": lambda: put(index, x[0] + 1),
    "a draw": lambda: torch.rand(3, generator=known, device="cuda"),
    "a copy from pinned memory": lambda: x.copy_(pinned, non_blocking=True),
    "item": lambda: x[0].item(),
    "nonzero": lambda: x.nonzero(),
    "a mask": lambda: x[x > 0],
    "a number by index": lambda: put(index, 1.0),
    "an index of the CPU": lambda: x[torch.tensor([1, 2])],
    "a new tensor of numbers": lambda: torch.tensor([1.0], device="cuda"),
    "a copy": lambda: x.copy_(host),
    "a copy from memory that is not pinned": lambda: x.copy_(host, non_blocking=True),
    "a copy to the CPU": lambda: x.cpu(),
    "another generator": lambda: torch.rand(3, generator=unknown, device="cuda"),
    "synchronize": lambda: torch.cuda.synchronize(),
    "two devices": lambda: x + host,
}.items():
    graph = torch.cuda.CUDAGraph()
    graph.register_generator_state(known)
    try:
        with torch.cuda.graph(graph):
            what()
        print(line)
    except RuntimeError as error:
        print(line, "refused" if "capturing" in str(error) else "fails")
"""


def test_what_a_capture_refuses() -> None:
    if not CAN_FAKE:
        pytest.skip(NO_FAKE)
    command = [sys.executable, "-c", ONE_BY_ONE]
    done = subprocess.run(command, cwd=ROOT / "tests", capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[:5] == [
        "a number",
        "a number by mask",
        "a tensor by index",
        "a draw",
        "a copy from pinned memory",
    ]
    assert len(lines) == 17 and all(line.endswith(" refused") for line in lines[5:-1])
    assert lines[-1] == "two devices fails"


def same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[name], other[name]) for name in one)
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    return one == other


@pytest.mark.slow
@pytest.mark.parametrize("script", FLAGS)
def test_a_script_on_a_gpu(script: str, tmp_path: Path) -> None:
    """Eager, in graphs, in half precision, a CPU's checkpoint gone on with, evaluations and GIFs."""
    flags = f"{COMMON} {FLAGS[script]} --run-dir {tmp_path}"
    steps = STEPS[script]
    eager, graphs, half, _, resumed, shown = seen(
        script,
        tmp_path,
        f"{flags} --device cuda --total-timesteps {steps} --run-name eager",
        f"{flags} --device cuda --total-timesteps {steps} --run-name graphs --cudagraph --no-video",
        f"{flags} --device cuda --total-timesteps {steps} --run-name half --cudagraph --fp16 --no-video",
        f"{flags} --device cpu --total-timesteps {steps - ROUND[script]} --run-name resumed --no-video",
        f"{COMMON} --device cuda --total-timesteps {steps + ROUND[script]} --bf16 --resume {tmp_path / 'resumed'}",
        f"--device cuda --evaluate {tmp_path / 'resumed'}",
    )
    on_gpu = eager, graphs, half, resumed, shown
    assert [run["refused"] for run in on_gpu] == 5 * [{}]
    for run in (graphs, half):
        assert run["summary"]["cudagraph"] and all(nodes > 0 for nodes in run["graphs"])
    for run in ("eager", "resumed"):
        assert list((tmp_path / run / "videos").glob("*.gif"))

    saved = {run: torch.load(tmp_path / run / "checkpoint.pt", weights_only=True) for run in ("eager", "graphs")}
    assert saved["eager"]["updates"] > 4
    differ = [name for name, value in saved["eager"].items() if not same(value, saved["graphs"][name])]
    assert set(differ) <= {"args", "elapsed"}

    rounds = eager["marks"]["rollout" if script == "dqn_mario_async" else "store"]
    assert sum(eager["waits"].values()) <= WAITS[script] * rounds, eager["waits"]
    if not WAITS[script]:
        assert [run["waits"] for run in on_gpu] == 5 * [{}]
    launches = {phase: sum(numbers.values()) for phase, numbers in eager["launches"].items()}
    per_step = sum(launches.get(phase, 0) for phase in ("act", "env", "store", "rollout")) / rounds
    per_update = launches["learn"] / saved["eager"]["updates"]
    most_per_step, most_per_update = LAUNCHES[script]
    assert 0 < per_step <= most_per_step
    assert 0 < per_update <= most_per_update


@pytest.mark.slow
def test_a_compiled_step_of_snake_launches_a_fifth(monkeypatch) -> None:
    """What inductor has fused the step into; on CUDA each part is a kernel. None of them is built here."""
    kernels = []

    def count(scheduler: Scheduler) -> None:
        kernels.append(sum(not isinstance(node, NopKernelSchedulerNode) for node in scheduler.nodes))
        raise NotImplementedError("counted")

    monkeypatch.setattr(Scheduler, "codegen", count)
    batch = SnakeBatch(8)
    batch.fixed_shapes = True
    batch.reset()
    torch._dynamo.reset()
    with torch._inductor.config.patch(force_disable_caches=True), pytest.raises(Exception, match="counted"):
        torch.compile(batch.step, fullgraph=True)(torch.zeros(8, dtype=torch.int64))
    assert kernels[0] <= 45

"""The scripts on a GPU that is not there: what a GPU would refuse, wait for and launch, seen without one."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parent.parent
NO_FAKE = "a fake CUDA needs Linux, g++ and a PyTorch without CUDA"
CAN_FAKE = sys.platform == "linux" and shutil.which("g++") is not None and torch.version.cuda is None
COMMON = "--threads 1 --log-every 0.001 --eval-every 0 --checkpoint-every 0"
FLAGS = {
    "dqn_snake": "--board 4x4 --num-envs 8 --batch-size 16 --learning-starts 8 --buffer-size 800 --hidden-size 16"
    " --eval-episodes 8",
    "dqn_snake_sb3_compat": "--board 8x8 --num-envs 2 --batch-size 8 --learning-starts 4 --buffer-size 400"
    " --train-freq 1 --target-update-interval 8 --exploration-fraction 0.01 --eval-episodes 2",
    "ppo_metta": "--agents 6 --num-envs 2 --num-steps 8 --bptt-horizon 8 --num-minibatches 2 --hidden-size 16"
    " --eval-episodes 6",
    "dqn_mario_async": "--num-collectors 0 --envs-per-collector 2 --ring-blocks 4 --buffer-size 600 --batch-size 4"
    " --learning-starts 40 --channels 2 --hidden-size 16 --size 48 --eval-episodes 2",
}
STEPS = {"dqn_snake": 96, "dqn_snake_sb3_compat": 24, "ppo_metta": 12 * 8 * 6, "dqn_mario_async": 72}


def seen(script: str, tmp_path: Path, *runs: str) -> list[dict[str, Any]]:
    """What the tool reports of these runs, all in one process."""
    if not CAN_FAKE:
        pytest.skip(NO_FAKE)
    report = tmp_path / "report.json"
    command = [sys.executable, "tests/fake_cuda.py", str(report), script, *runs]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(report.read_text())


def same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[name], other[name]) for name in one)
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    return one == other


@pytest.mark.slow
@pytest.mark.parametrize("script", FLAGS)
def test_a_script_on_a_gpu(script: str, tmp_path: Path) -> None:
    """Eager, in graphs, a CPU's checkpoint gone on with, and an evaluation; three of them with a GIF at the end."""
    flags = f"{COMMON} {FLAGS[script]} --run-dir {tmp_path}"
    steps = STEPS[script]
    eager, graphs, _, resumed, shown = seen(
        script,
        tmp_path,
        f"{flags} --device cuda --total-timesteps {steps} --run-name eager",
        f"{flags} --device cuda --total-timesteps {steps} --run-name graphs --cudagraph --no-video",
        f"{flags} --device cpu --total-timesteps {steps} --run-name resumed --no-video",
        f"{COMMON} --device cuda --total-timesteps {2 * steps} --resume {tmp_path / 'resumed'}",
        f"--device cuda --evaluate {tmp_path / 'resumed'}",
    )
    assert all(run["refused"] == {} for run in (eager, graphs, resumed, shown))
    assert graphs["summary"]["cudagraph"] and all(nodes > 0 for nodes in graphs["graphs"])
    for run in ("eager", "resumed"):
        assert list((tmp_path / run / "videos").glob("*.gif"))
    if script in ("dqn_snake", "ppo_metta"):
        for run in (eager, graphs, resumed):
            assert run["waits"] == {}

    saved = [torch.load(tmp_path / run / "checkpoint.pt", weights_only=True) for run in ("eager", "graphs")]
    for state in saved:
        del state["args"], state["elapsed"]
    assert saved[0].keys() == saved[1].keys()
    differ = [name for name in saved[0] if not same(saved[0][name], saved[1][name])]
    assert differ == []

"""The lowest versions that are said to work are those that are tested, and a small run of Snake goes all the way."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def versions(name: str) -> dict[str, str]:
    """Package -> version, or lowest version."""
    return dict(re.findall(r"^([\w-]+)(?:==|>=|~=)([\d.]+)", (ROOT / name).read_text(), re.MULTILINE))


def test_the_lowest_versions_are_those_that_the_requirements_allow() -> None:
    lowest = versions("constraints-lowest.txt")
    for package, version in versions("requirements.txt").items():
        assert package == "torch" or lowest[package] == version


@pytest.mark.slow
def test_a_small_run_trains_saves_evaluates_and_goes_on(tmp_path) -> None:
    """From the command line, as it is read by the tyro that is installed."""

    def run(*flags: str) -> dict[str, float]:
        command = [sys.executable, "dqn_snake.py", "--run-dir", str(tmp_path), "--threads", "1", *flags]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr
        return json.loads((tmp_path / "small" / "summary.json").read_text())

    sizes = ["--num-envs", "32", "--batch-size", "64", "--learning-starts", "500", "--eval-episodes", "20"]
    summary = run("--run-name", "small", "--total-timesteps", "3000", *sizes)
    assert summary["env_steps"] >= 3000 and summary["eval_episodes"] == 20 and summary["env_steps_per_second"] > 0
    assert (tmp_path / "small" / "videos" / "snake.gif").stat().st_size > 1000
    assert run("--resume", "latest", "--total-timesteps", "4000")["env_steps"] >= 4000

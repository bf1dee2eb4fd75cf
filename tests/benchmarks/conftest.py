"""Nothing that a test of the benchmark does is written into the project."""

import shutil

import pytest
import torch
from benchmark_helpers import PROJECT

import dqn_mario_async
import dqn_snake
import dqn_snake_sb3_compat
import ppo_metta
from benchmarks import harness


@pytest.fixture(autouse=True)
def threads_as_before():
    """Parts of runs that are measured in this process set their number of threads."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def quiet_machine(monkeypatch) -> None:
    """No other program is busy: to try that out takes half a second for every command line that is understood."""
    for script in (dqn_snake, dqn_snake_sb3_compat, ppo_metta, dqn_mario_async):
        monkeypatch.setattr(script, "matmuls_per_second", float)


@pytest.fixture(autouse=True)
def empty_project(threads_as_before, monkeypatch, tmp_path) -> None:
    """A folder with a copy of the pages, no results, no settings around it, and no run that is real."""
    for name in dqn_snake_sb3_compat.SETTINGS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(harness, "ROOT", tmp_path)
    shutil.copytree(PROJECT / "benchmarks" / "pages", tmp_path / "benchmarks" / "pages")

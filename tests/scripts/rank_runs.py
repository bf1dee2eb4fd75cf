"""Starts scripts as the ranks of a torchrun job, directly or by torchrun, and looks after processes."""

import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from small_runs import COMMON, ROOT, SMALL, command_line

RANKED = [name for name in SMALL if name != "dqn_snake_sb3_compat"]
ONE_FAST = [name if name == "ppo_snake" else pytest.param(name, marks=pytest.mark.slow) for name in RANKED]
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}

RANK_SCRIPT = """
import importlib, json, os, sys, time
import torch

script = importlib.import_module({name!r})
{before}
if __name__ == "__main__":  # processes of collectors import this file
    summary = script.main(script.Args(**{flags!r}))
    {after}
    if getattr(script, "RANKS", 1) > 1:  # as at the end of the scripts
        sys.stdout.flush()
        os._exit(0)
"""

KEEP_NETWORK = """
networks = []
first_weights = []
network_class = getattr(script, "Agent", None) or script.QNetwork
init = network_class.__init__

def keep(self, *given):
    init(self, *given)
    networks.append(self)
    first_weights.append({part: value.clone() for part, value in self.state_dict().items()})

network_class.__init__ = keep
"""
WHOLE_SCRIPT = """
import runpy

sys.argv = {argv!r}
runpy.run_path(sys.argv[0], run_name="__main__")
"""
SAVE_NETWORK = 'torch.save([networks[0].state_dict(), summary["env_steps"], first_weights[0]], f"rank{script.RANK}.pt")'


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return free.getsockname()[1]


def small_flags(name: str, **flags: Any) -> dict[str, Any]:
    """A run of two ranks without an end."""
    small = COMMON | SMALL[name] | {"run_name": "run", "total_timesteps": None, "log_every": 0.05}
    if name == "ppo_metta":
        small["size"] = 20
    return small | flags


def start_ranks(
    folder: Path, name: str, flags: dict[str, Any], before: str = "", after: str = "", ranks: int = 2
) -> list[subprocess.Popen]:
    """The ranks of a job, each with code `before` and `after` its run. They start in `folder`."""
    (folder / "ranks.py").write_text(RANK_SCRIPT.format(name=name, flags=flags, before=before, after=after or "pass"))
    job = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    job |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())}
    started = []
    for rank in range(ranks):
        environment = ENVIRONMENT | job | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        process = subprocess.Popen(
            [sys.executable, "ranks.py"],
            env=environment,
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
    return started


def torchrun(folder: Path, name: str, flags: dict[str, Any], *options: object) -> subprocess.Popen:
    """A torchrun of a script, in `folder`."""
    launcher = [sys.executable, "-m", "torch.distributed.run", *map(str, options)]
    return subprocess.Popen(
        [*launcher, str(ROOT / f"{name}.py"), *command_line(flags)],
        cwd=folder,
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def descendants(pid: int) -> set[int]:
    """Processes that a process has started, and theirs."""
    found = set()
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, task.read_text().split()):
            found |= {child} | descendants(child)
    return found


def is_alive(pid: int) -> bool:
    try:
        state = re.search(r"^State:\s+(\S)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)[1]
    except OSError:
        return False
    return state != "Z"


def wait_until_gone(processes: set[int], seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while left := {pid for pid in processes if is_alive(pid)}:
        assert time.monotonic() < end, f"processes {left} live on"
        time.sleep(0.05)


def wait_until_removed(shared_before: set[str], seconds: float = 20) -> None:
    """Other tests make semaphores at the same time, which have a name for a moment."""
    end = time.monotonic() + seconds
    while left := set(os.listdir("/dev/shm")) - shared_before:
        assert time.monotonic() < end, f"shared memory {left} is left"
        time.sleep(0.05)

"""Runs that are killed at any moment, and their processes."""

import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from rank_runs import descendants, wait_until_gone, wait_until_removed
from small_runs import ROOT, Script, load

pytestmark = pytest.mark.slow
WITH_PROCESSES = {
    "ppo_metta": dict(vec_env="subproc", num_workers=2, size=20),
    "dqn_mario_async": dict(num_collectors=2, buffer_size=4000),
}
STREAMS = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def start(script: Script, **flags: object) -> subprocess.Popen:
    flags = WITH_PROCESSES.get(script.name, {}) | flags
    command = [sys.executable, "-u", f"{script.name}.py", *script.words(**flags)]
    return subprocess.Popen(command, cwd=ROOT, **STREAMS)


def wait_for_log(run: subprocess.Popen) -> None:
    line = run.stdout.readline()
    while "SPS" not in line and "updates/s" not in line and "[TRAIN]" not in line:
        assert line, run.stderr.read()
        line = run.stdout.readline()


def test_a_run_that_is_killed_at_any_moment_goes_on(script, tries) -> None:
    """It saves nearly all the time, so many are killed in the middle of that."""
    moments = random.Random(script.name)
    folder = None
    shared_before = set(os.listdir("/dev/shm"))
    endless = dict(total_timesteps=10**9, checkpoint_every=0.01, log_every=0.02)
    steps = []
    for number in range(tries(3, 50)):
        goes_on = dict(resume=folder) if steps else dict(run_name=f"run-{number}")
        run = start(script, **endless, **goes_on)
        wait_for_log(run)
        time.sleep(moments.uniform(0, 0.5))
        processes = descendants(run.pid)
        run.kill()
        run.communicate()
        wait_until_gone(processes)
        wait_until_removed(shared_before)
        if not steps:
            folder = script.folder / f"run-{number}"
        if (folder / "checkpoint.pt").exists():
            steps.append(load(folder)["global_step"])
    assert steps == sorted(steps) and steps[-1] > 0
    last = start(script, **endless | dict(total_timesteps=steps[-1] + 500), resume=folder)
    _, err = last.communicate(timeout=120)
    assert last.returncode == 0, err
    assert load(folder)["global_step"] >= steps[-1] + 500
    assert not list(folder.glob("*.tmp"))


@pytest.mark.parametrize("script", ["dqn_mario_async"], indirect=True)
def test_the_counts_hold_while_collectors_are_killed_and_stopped(script, tries) -> None:
    """What was produced is stored, in a ring or lost, at every log line; a stopped collector holds up nothing."""
    moments = random.Random(0)
    run = start(script, total_timesteps=10**9, log_every=0.2, run_name="run")
    wait_for_log(run)
    lines = []  # read all the time, since the run would wait for a pipe that is full
    reader = threading.Thread(target=lambda: lines.extend(run.stdout), daemon=True)
    reader.start()
    for number in range(tries(4, 40)):
        while not (collectors := sorted(pid for pid in descendants(run.pid) if "spawn_main" in command_of(pid))):
            assert run.poll() is None, run.stderr.read()
            time.sleep(0.1)
        victim = min(collectors)  # the oldest has played: three in a row that have not end the run
        if number % 2:
            os.kill(victim, signal.SIGSTOP)
            time.sleep(1.0)
            os.kill(victim, signal.SIGCONT)
        else:
            os.kill(victim, signal.SIGKILL)
        time.sleep(moments.uniform(1.0, 3.0))
    run.send_signal(signal.SIGTERM)
    run.wait(timeout=60)
    assert run.returncode == 0, run.stderr.read()
    reader.join()
    in_rings, lost = 12 * (16 + 1), 6 * number  # at most: two full rings, and with those that were killed
    for line in filter(lambda line: line.startswith("[COLLECT]"), lines):
        counts = [re.search(rf"{name} ([\d,]+)", line)[1] for name in ("produced", "stored")]
        produced, stored = [int(number.replace(",", "")) for number in counts]
        assert 0 <= produced - stored <= in_rings + lost
    assert (script.folder / "run" / "checkpoint.pt").exists()


def command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


@pytest.mark.parametrize("script", ["ppo_metta"], indirect=True)
def test_a_worker_that_is_lost_ends_the_run_with_a_checkpoint_and_one_line(script) -> None:
    run = start(script, total_timesteps=10**9, log_every=0.2, run_name="run")
    wait_for_log(run)
    workers = [pid for pid in descendants(run.pid) if "spawn_main" in command_of(pid)]
    os.kill(workers[0], signal.SIGKILL)
    _, err = run.communicate(timeout=60)
    assert run.returncode == 2 and err.count("\n") == 1, err
    assert load(script.folder / "run")["global_step"] > 0
    wait_until_gone(set(workers))

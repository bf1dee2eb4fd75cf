"""The options of the benchmark, and how it runs scripts, parts of them and their peers, and takes the time."""

import json
import math
import os
import platform
import re
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal, NoReturn

import numpy as np
import torch

ROOT = Path(__file__).parent.parent
SPEED_RUN = "--eval-every 0 --eval-episodes 1"  # flags of runs that are measured for speed
SUITES = {
    "snake": ["env", "act", "train", "update"],
    "sb3": ["sb3-speed", "sb3-learn", "sweep"],
    "metta": ["metta-env", "metta-hearts", "metta-speed", "metta-peer", "metta-subproc", "metta-presets"],
    "metta-learn": ["metta-learn-arena", "metta-learn-navigation", "metta-learn-real"],
    "mario": ["mario-env", "mario-async", "mario-switches"],
    "bf16": ["bf16"],
    "busy": ["busy"],
    "diagnose": ["diagnose"],
    "mario-levels": ["mario-learn", "mario-learn-1", "mario-learn-2"],
    "mario-real": ["mario-real"],
    "switches": ["switches"],
    "scaling": ["scaling"],
    "learn": ["learn"],
    "ppo-snake": ["ppo-snake-learn", "ppo-snake-learn-600", "ppo-snake-6x6", "ppo-snake-20x20", "ppo-snake-speed"],
    "ranks": ["ranks"],
    "time-to-score": ["time-to-score"],
    "time-to-score-ppo": ["time-to-score-ppo"],
    "time-to-hearts": ["time-to-hearts"],
    "time-to-distance": ["time-to-distance"],
}
SUITES["all"] = [name for names in SUITES.values() for name in names]
SUITES["gpu"] = ["gpu"]
SINGLE_TABLES = [name for name in SUITES["all"] if name not in SUITES]


@dataclass
class Options:
    suite: Literal[(*SUITES, *SINGLE_TABLES)] = "snake"
    """what to measure: a suite, or one of its tables"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """where"""
    repeats: int | None = None
    """counted rounds, and seeds, of which there are three at most (None: 5, with --fast 2)"""
    fast: bool = False
    """fewer rows and shorter runs, to see whether everything works"""
    json: str | None = None
    """also write everything that was measured into this file"""
    compare: str | None = None
    """a file that --json wrote, or one of benchmarks/results/*.json: exit code 1 if the median of a ratio to a peer
    fell below that there by more than 10 %, or cannot be compared. No page and no result is written then"""
    seconds: int | None = None
    """wall-clock budget of each run of metta-presets (None: 300, with --fast 20)"""
    write_env: bool = False
    """after the sweep, put the settings with the most samples/s into .env, for dqn_snake_sb3_compat.py"""

    @property
    def rounds(self) -> int:
        if self.repeats is not None:
            return self.repeats
        return 2 if self.fast else 5

    @property
    def seeds(self) -> range:
        number = 1 if self.fast else min(self.rounds, 3)
        return range(1, 1 + number)


def fail(message: str) -> NoReturn:
    """End with one line about what the user asked for, and exit code 2."""
    print(f"benchmark.py: {message}", file=sys.stderr)
    raise SystemExit(2)


# ------------------------------------------------------------------------------------------------ the machine


def machine(device: torch.device) -> dict[str, Any]:
    """What a result depends on besides the command."""
    if device.type == "cuda":
        chip = torch.cuda.get_device_name()
    else:
        info = Path("/proc/cpuinfo")
        names = re.findall(r"model name\s*: (.*)", info.read_text()) if info.exists() else [platform.processor()]
        chip = f"{torch.get_num_threads()} cores of {names[0]}, {torch.backends.cpu.get_cpu_capability()}"
    versions = {"Python": platform.python_version()}
    for package in ("torch", "numpy", "gymnasium", "stable-baselines3", "jumanji", "jax"):
        with suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    return {"commit": commit(), "date": time.strftime("%Y-%m-%d"), "hardware": chip, "versions": versions}


def commit() -> str:
    """Short hash of the code that is measured; "unknown" without git, or outside a repository."""
    command = ["git", "rev-parse", "--short", "HEAD"]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    except OSError:
        return "unknown"
    return done.stdout.strip() or "unknown"


def free_gib(device: torch.device) -> float:
    if device.type == "cuda":
        return torch.cuda.mem_get_info()[0] / 2**30
    meminfo = Path("/proc/meminfo")
    found = re.search(r"MemAvailable:\s+(\d+) kB", meminfo.read_text()) if meminfo.exists() else None
    return int(found[1]) / 2**20 if found else math.inf


# ------------------------------------------------------------------------------------------------ running things

PLAIN_SETTINGS = {  # of dqn_snake_sb3_compat.py while it is measured, so that a .env changes nothing
    "OPTIMAL_BATCH_SIZE": "32",
    "USE_TORCH_COMPILE": "false",
    "USE_FLASH_ATTENTION": "false",
    "USE_BF16": "false",
}


def run(flags: str, options: Options, script: str = "dqn_snake.py", ranks: int = 1) -> dict:
    """Summary of one run of the real script. MemoryError where it did not fit, the end of it all for other failures."""
    name = f"benchmark-{os.getpid()}-{time.time_ns()}"  # a name that exists is refused
    launcher = []
    if ranks > 1:
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command = [sys.executable, *launcher, script, "--device", options.device, "--no-video", "--run-name", name]
    command += shlex.split(flags)
    environment = os.environ | PLAIN_SETTINGS
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    refused = done.returncode == 2 and re.search("out of memory|would take .* GiB", done.stderr)
    killed = done.returncode == -9  # by Linux, out of memory itself
    if refused or killed:
        raise MemoryError(f"{script} {flags}: out of memory")
    if done.returncode:
        sys.exit(f"{script} {flags} failed:\n{done.stderr}")
    print(f"  {script} {flags}", flush=True)
    summary = json.loads((run_folder(name) / "summary.json").read_text())
    return summary | {"flags": flags, "run": name}


def run_folder(name: str) -> Path:
    return ROOT / "runs" / name


ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


def in_subprocess(function: Callable, one_core: bool = False, **arguments: Any) -> Any:
    """What `function` returns in a process of its own: no peer shares threads or memory with another."""
    environment = os.environ | (ONE_THREAD if one_core else {})
    module = function.__module__
    code = f"import json, {module}; print(json.dumps({module}.{function.__name__}(**{arguments!r})))"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if done.returncode:
        missing = re.search("No module named '([^']+)'", done.stderr)
        if missing:
            fail(f"{missing[1]} is not installed; pip install -r requirements-dev.txt has all peers")
        sys.exit(f"{function.__name__} failed:\n{done.stderr}")
    print(f"  {function.__name__} {' '.join(f'{name}={value}' for name, value in arguments.items())}", flush=True)
    return json.loads(done.stdout.splitlines()[-1])


def alternate(options: Options, calls: dict[Any, Callable[[], Any]]) -> dict[Any, list]:
    """What every call returned, round by round (A B A B ...), without the first round, which warms the machine up."""
    rounds = [{name: call() for name, call in calls.items()} for _ in range(options.rounds + 1)]
    return {name: [results[name] for results in rounds[1:]] for name in calls}


def measure_rate(work: Callable[[], Any], amount: float, seconds: float, device: str = "cpu") -> float:
    """What `work` does per second if a call does `amount` of it; the first call does not count."""

    def finish() -> None:
        work()
        if device == "cuda":
            torch.cuda.synchronize()

    finish()
    calls = 0
    start = time.perf_counter()
    while time.perf_counter() - start < seconds:
        finish()
        calls += 1
    return calls * amount / (time.perf_counter() - start)


# ------------------------------------------------------------------------------------------------ numbers


def column(runs: list[dict], key: str) -> list[float]:
    return [one[key] for one in runs]


def median(runs: list[dict], key: str) -> float:
    return statistics.median(column(runs, key))


def ratios(ours: list[float], peers: list[float]) -> list[float]:
    """How many times the peer's rate ours is, round by round."""
    return [our / peer if peer else math.inf for our, peer in zip(ours, peers)]


# ------------------------------------------------------------------------------------------------ what a run logged


def read_scalars(folder: Path) -> dict[str, list]:
    """The points of every scalar in the TensorBoard files of a run, by its tag."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    return {tag: events.Scalars(tag) for tag in events.Tags()["scalars"]}


def mean_scalars(folder: Path) -> dict[str, float]:
    """Mean over a run of every scalar, a value counted by the steps since the one before."""
    means = {}
    for tag, points in read_scalars(folder).items():
        values = [point.value for point in points]
        weights = np.diff([point.step for point in points], prepend=0)
        means[tag] = float(np.average(values, weights=weights) if weights.any() else values[-1])
    return means


def median_scalars(folder: Path) -> dict[str, float]:
    """Median over a run of every scalar, without its first value if there are more: a GPU warms up in it."""
    medians = {}
    for tag, points in read_scalars(folder).items():
        values = [point.value for point in points]
        medians[tag] = statistics.median(values[1:] or values)
    return medians


def eval_curve(folder: Path, tag: str = "eval/score_mean") -> list[list[float]]:
    """[seconds, value] of every evaluation of a run.

    The seconds are those that the loop counts: warm-up, evaluations and checkpoints stop the clock.
    """
    scalars = read_scalars(folder)
    steps = [0]
    seconds = [0.0]
    for point in scalars["charts/SPS"]:
        if point.step > steps[-1]:
            seconds.append(seconds[-1] + (point.step - steps[-1]) / point.value)
            steps.append(point.step)
    return [[float(np.interp(point.step, steps, seconds)), point.value] for point in scalars[tag]]


def wall_clock_curve(folder: Path, tag: str) -> list[list[float]]:
    """[seconds since the start, value] of every reading: the clock runs on, as the collectors of Mario do."""
    scalars = read_scalars(folder)
    warmup = scalars["perf/warmup_s"][0]
    return [[point.wall_time - warmup.wall_time + warmup.value, point.value] for point in scalars[tag]]

"""Options of the benchmark, and tools to run scripts and peers and to read their results."""

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
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
PEAK_MEMORY = Path(__file__).with_name("peak_memory.py")
SPEED_RUN = "--eval-every 0 --eval-episodes 1"  # flags of speed runs
SUITES = {
    "snake": ["env", "act", "train", "update"],
    "sb3": ["sb3-speed", "sb3-learn", "sweep"],
    "metta": ["metta-env", "metta-hearts", "metta-speed", "metta-peer", "metta-subproc", "metta-presets"],
    "metta-learn": [
        "metta-learn-arena",
        "metta-learn-cores",
        "metta-learn-navigation",
        "metta-learn-memory",
        "metta-learn-real",
    ],
    "mario": ["mario-env", "mario-async", "mario-switches"],
    "smoke": ["smoke"],
    "bf16": ["bf16"],
    "busy": ["busy"],
    "diagnose": ["diagnose"],
    "mario-levels": ["mario-learn", "mario-learn-1", "mario-learn-2", "mario-learn-3"],
    "mario-real": ["mario-real"],
    "switches": ["switches"],
    "scaling": ["scaling"],
    "learn": ["learn"],
    "ppo-snake": ["ppo-snake-learn", "ppo-snake-learn-600", "ppo-snake-6x6", "ppo-snake-20x20", "ppo-snake-speed"],
    "snake-recipes": ["snake-recipe", "snake-peer", "snake-peer-600", "snake-peer-steps"],
    "ranks": ["ranks"],
    "time-to-score": ["time-to-score"],
    "time-to-score-ppo": ["time-to-score-ppo"],
    "time-to-hearts": ["time-to-hearts"],
    "time-to-distance": ["time-to-distance"],
    "time-to-points": ["time-to-points"],
}
SUITES["all"] = [name for names in SUITES.values() for name in names]
SUITES["headline"] = [
    "ppo-snake-learn",
    "ppo-snake-learn-600",
    "snake-peer",
    "snake-peer-600",
    "learn",
    "sb3-speed",
    "metta-peer",
    "metta-learn-arena",
    "metta-learn-real",
    "mario-async",
    "mario-learn",
    "mario-real",
]
SUITES["gpu"] = ["gpu"]
SINGLE_TABLES = [name for name in SUITES["all"] if name not in SUITES]


@dataclass
class Options:
    suite: Literal[(*SUITES, *SINGLE_TABLES)] = "snake"
    """a suite, or a single table"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """device of ours and of the peers"""
    repeats: int | None = None
    """rounds that count, and number of seeds, at most 3 (None: 5, with --fast 2)"""
    fast: bool = False
    """fewer rows and shorter runs, as a smoke test"""
    json: str | None = None
    """also write all raw results to this file"""
    compare: str | None = None
    """a file written by --json, or one of benchmarks/results/*.json: exit code 1 if the median of a ratio to a peer is
    more than 10 % lower than in that file, or cannot be compared. Pages and results are not written"""
    seconds: int | None = None
    """wall-clock budget of each run of metta-presets (None: 300, with --fast 20)"""
    write_env: bool = False
    """after the sweep, write the settings with the most samples/s to .env, for dqn_snake_sb3_compat.py"""

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
    """Exit with one line and exit code 2."""
    print(f"benchmark.py: {message}", file=sys.stderr)
    raise SystemExit(2)


# ------------------------------------------------------------------------------------------------ the machine


def machine(device: torch.device) -> dict[str, Any]:
    """Commit, date, hardware and versions of a result."""
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
    """Short commit hash; "unknown" without git or outside a repository."""
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

PLAIN_SETTINGS = {  # override a .env of dqn_snake_sb3_compat.py
    "OPTIMAL_BATCH_SIZE": "32",
    "USE_TORCH_COMPILE": "false",
    "USE_FLASH_ATTENTION": "false",
    "USE_BF16": "false",
}


def run(flags: str, options: Options, script: str = "dqn_snake.py", ranks: int = 1) -> dict:
    """Summary of one run of a script. MemoryError if it ran out of memory; any other failure ends the benchmark."""
    name = f"benchmark-{os.getpid()}-{time.time_ns()}"  # scripts refuse an existing name
    launcher = [sys.executable]
    if ranks > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command = [sys.executable, str(PEAK_MEMORY), *launcher, script]
    command += ["--device", options.device, "--no-video", "--run-name", name]
    command += shlex.split(flags)
    environment = os.environ | PLAIN_SETTINGS | {"PYTHONPATH": str(ROOT)}  # copies of scripts import envs
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    refused = done.returncode == 2 and re.search("out of memory|allocate memory|would take .* GiB", done.stderr)
    killed = done.returncode in (-9, 137)  # by the kernel, out of memory
    if refused or killed:
        raise MemoryError(f"{script} {flags}: out of memory")
    if done.returncode:
        sys.exit(f"{script} {flags} failed:\n{done.stderr}")
    print(f"  {script} {flags}", flush=True)
    summary = json.loads((run_folder(name) / "summary.json").read_text())
    summary["flags"] = flags
    summary["train_fraction"] = 1 - summary["rollout_fraction"]
    summary["run"] = name
    if options.device == "cpu" or not torch.cuda.is_available():
        summary["peak_memory_gib"] = float(done.stdout.splitlines()[-1])
    else:
        summary.setdefault("peak_memory_gib", None)  # GPU memory cannot be measured from outside
    return summary


def run_folder(name: str) -> Path:
    return ROOT / "runs" / name


ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


def in_subprocess(function: Callable, one_core: bool = False, **arguments: Any) -> Any:
    """Call `function` in a new process, so that peers share neither threads nor memory."""
    environment = os.environ | PLAIN_SETTINGS | (ONE_THREAD if one_core else {})
    module = function.__module__
    code = f"import json, {module}; print(json.dumps({module}.{function.__name__}(**{arguments!r})))"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if done.returncode:
        missing = re.search("No module named '([^']+)'", done.stderr)
        if missing:
            fail(f"{missing[1]} is not installed; pip install -r requirements-games.txt installs the peers")
        sys.exit(f"{function.__name__} failed:\n{done.stderr}")
    print(f"  {function.__name__} {' '.join(f'{name}={value}' for name, value in arguments.items())}", flush=True)
    return json.loads(done.stdout.splitlines()[-1])


def alternate(options: Options, calls: dict[Any, Callable[[], Any]]) -> dict[Any, list]:
    """Results of every call, round by round (A B A B ...); the first round is a warm-up and is dropped."""
    rounds = [{name: call() for name, call in calls.items()} for _ in range(options.rounds + 1)]
    return {name: [results[name] for results in rounds[1:]] for name in calls}


def measure_rate(work: Callable[[], Any], amount: float, seconds: float, device: str = "cpu") -> float:
    """Amount of work per second, where one call of `work` does `amount`; the first call is not counted."""

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


def million_steps(runs: list[dict]) -> str:
    """Cell with the env steps of each run."""
    return " · ".join(f"{one['env_steps'] / 1e6:.2f}" for one in runs)


def median(runs: list[dict], key: str) -> float:
    return statistics.median(column(runs, key))


def ratios(ours: list[float], peers: list[float]) -> list[float]:
    """Our rate divided by the peer's, round by round."""
    return [our / peer if peer else math.inf for our, peer in zip(ours, peers)]


# ------------------------------------------------------------------------------------------------ TensorBoard logs


def read_scalars(folder: Path) -> dict[str, list]:
    """All points of every scalar in the TensorBoard files of a run, by tag."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    return {tag: events.Scalars(tag) for tag in events.Tags()["scalars"]}


def mean_scalars(folder: Path) -> dict[str, float]:
    """Mean of every scalar over a run, weighted by the steps since the previous point."""
    means = {}
    for tag, points in read_scalars(folder).items():
        values = [point.value for point in points]
        weights = np.diff([point.step for point in points], prepend=0)
        means[tag] = values[-1]
        if weights.any():
            means[tag] = float(np.average(values, weights=weights))
    return means


def median_scalars(folder: Path) -> dict[str, float]:
    """Median of every scalar over a run, without the first of several points: the GPU is warming up."""
    medians = {}
    for tag, points in read_scalars(folder).items():
        values = [point.value for point in points]
        medians[tag] = statistics.median(values[1:] or values)
    return medians


def eval_curve(folder: Path, tag: str = "eval/score_mean") -> list[list[float]]:
    """[seconds, value] of every evaluation of a run.

    The clock is that of the training loop: it stops during warm-up, evaluation and checkpoints.
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
    """[seconds since the start, value] of every point, evaluation included: Mario's collectors run during it."""
    scalars = read_scalars(folder)
    warmup = scalars["perf/warmup_s"][0]
    return [[point.wall_time - warmup.wall_time + warmup.value, point.value] for point in scalars[tag]]

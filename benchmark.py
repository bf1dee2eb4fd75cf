"""Measures what the scripts do, by running them, and writes benchmarks.md.

    python benchmark.py                         # --suite env, update and switches: 20 minutes on two cores
    python benchmark.py --suite learn           # learning: three seeds of 60, 120 and 600 seconds
    python benchmark.py --suite learn --fast    # one seed of 60 seconds
    python benchmark.py --suite sb3             # dqn_snake_sb3_compat.py beside Stable-Baselines3

Every suite replaces its own section of benchmarks.md and leaves the rest alone; raw results go to benchmarks/*.json.
Commands that are compared take turns (A B A B ...), medians are over `--repeats` runs after one that does not count.
"""

import json
import os
import platform
import re
import shlex
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import tyro
from gymnasium.utils.performance import benchmark_vector_step
from gymnasium.vector import SyncVectorEnv

from envs.snake import SnakeBatch, SnakeEnv, SnakeVectorEnv

ROOT = Path(__file__).parent


@dataclass
class Options:
    suite: Literal["default", "env", "update", "switches", "learn", "sb3", "all"] = "default"
    """what to measure; default is env, update and switches"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """where"""
    repeats: int = 5
    """counted runs per row"""
    fast: bool = False
    """fewer rows and shorter runs, to see whether everything works"""


def machine(device: torch.device) -> str:
    if device.type == "cuda":
        chip = torch.cuda.get_device_name()
    else:
        info = Path("/proc/cpuinfo")
        names = re.findall(r"model name\s*: (.*)", info.read_text()) if info.exists() else [platform.processor()]
        chip = f"{torch.get_num_threads()} cores of {names[0]}, {torch.backends.cpu.get_cpu_capability()}"
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout
    python = platform.python_version()
    return f"{chip}; torch {torch.__version__}, Python {python}; {time.strftime('%Y-%m-%d')}, commit {commit.strip()}"


def spread(values: list[float], digits: int = 0) -> str:
    """Median with min and max."""
    return f"{statistics.median(values):,.{digits}f} ({min(values):,.{digits}f}–{max(values):,.{digits}f})"


def table(header: str, rows: list[list]) -> str:
    columns = header.split(" | ")
    lines = [f"| {header} |", "|" + " --- |" * len(columns)]
    return "\n".join(lines + ["| " + " | ".join(map(str, row)) + " |" for row in rows])


def run(flags: str, options: Options, script: str = "dqn_snake.py") -> dict:
    """Summary of one run of the real script."""
    folder = ROOT / "runs" / f"benchmark-{os.getpid()}-{time.monotonic_ns()}"
    command = [sys.executable, script, "--device", options.device, "--no-video", "--run-name", folder.name]
    done = subprocess.run([*command, *shlex.split(flags)], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{script} {flags} failed:\n{done.stderr}")
    print(f"  {script} {flags}", flush=True)
    return json.loads((folder / "summary.json").read_text()) | {"flags": flags, "run": folder.name}


def alternate(flags: list[str], options: Options) -> list[list[dict]]:
    """Summaries of every command, in turn; the first round warms the machine up."""
    rounds = [[run(one, options) for one in flags] for _ in range(options.repeats + 1)]
    return [list(column) for column in zip(*rounds[1:])]


def suite_env(options: Options, device: torch.device) -> tuple[str, dict]:
    """Steps per second of the game alone under random actions, beside Gymnasium's own measure of the same game."""
    rows, raw = [], {}
    widths = (128, 4096, 16384) if options.fast else (1, 128, 1024, 4096, 16384, 65536)
    for width in widths:
        envs = SnakeBatch(width, device, seed=1)
        envs.reset()
        actions = [torch.randint(4, (width,), device=device) for _ in range(16)]
        rates = []
        for _ in range(options.repeats + 1):
            steps, start = 0, time.perf_counter()
            while time.perf_counter() - start < (0.3 if options.fast else 1.5):
                for action in actions:
                    envs.step(action)
                steps += 16 * width
                if device.type == "cuda":
                    torch.cuda.synchronize()
            rates.append(steps / (time.perf_counter() - start))
        raw[width] = rates[1:]
        rows.append([f"{width:,}", spread(rates[1:])])
    seconds = 0.5 if options.fast else 3
    book = benchmark_vector_step(SyncVectorEnv([SnakeEnv] * 64), seconds, seed=1)
    ours = benchmark_vector_step(SnakeVectorEnv(4096), seconds, seed=1)
    raw |= {"rule book in SyncVectorEnv(64)": book, "SnakeVectorEnv(4096)": ours}
    rows.append(["Gymnasium's `benchmark_vector_step`, `SnakeVectorEnv` of 4,096 (NumPy in and out)", f"{ours:,.0f}"])
    rows.append(["the same, rule book in `SyncVectorEnv` of 64", f"{book:,.0f}"])
    return table("games at once | env steps/s, median (min–max)", rows), raw


def matmul_seconds(batch: int, checkpoint: Path, device: torch.device) -> float:
    """Time that the matmuls of one update take alone: three forward passes, and the backward pass of one."""
    weights, timings = torch.load(checkpoint, weights_only=True)["q_network"], []
    shapes = [
        tensor.shape
        for name, tensor in weights.items()
        if name.endswith(".weight") and tensor.ndim == 2 and ".food." not in name
    ]
    layers = [[torch.randn(*shape, device=device) for shape in ((batch, n), (m, n), (batch, m))] for m, n in shapes]
    for _ in range(22):
        start = time.perf_counter()
        for i, (x, weight, y) in enumerate(layers):
            for _ in range(3):
                x @ weight.T
            y.T @ x
            if i:  # nothing is learned below the first layer
                y @ weight
        if device.type == "cuda":
            torch.cuda.synchronize()
        timings.append(time.perf_counter() - start)
    return statistics.median(timings[2:])


def suite_update(options: Options, device: torch.device) -> tuple[str, dict]:
    """Transitions per second through the learner by batch size, and the share of an update that its matmuls take."""
    batches = (256, 8192) if options.fast else (32, 128, 256, 512, 2048, 8192, 16384)
    rows, raw = [], {}
    for batch in batches:
        flags = f"--batch-size {batch} --replay-ratio 64 --max-seconds {5 if options.fast else 8} --eval-every 0 "
        flags += "--eval-episodes 1 --learning-starts 2000 --log-every 1"
        runs = [run(flags, options) for _ in range(min(options.repeats, 3))]
        update = statistics.median(one["train_fraction"] / one["updates_per_second"] for one in runs)
        floor = matmul_seconds(batch, ROOT / "runs" / runs[0]["run"] / "checkpoint.pt", device)
        samples = [one["updates_per_second"] * batch / one["train_fraction"] for one in runs]
        raw[batch] = {"runs": runs, "update_seconds": update, "matmul_seconds": floor}
        rows.append(
            [f"{batch:,}", spread(samples), f"{1000 * update:.2f}", f"{1000 * floor:.2f}", f"{floor / update:.0%}"]
        )
    return table("batch | samples/s while learning | ms per update | ms of its matmuls alone | share", rows), raw


def suite_switches(options: Options, device: torch.device) -> tuple[str, dict]:
    """End-to-end steps per second of each switch beside the default, in turn, at the same replay ratio."""
    base = "--max-seconds 8 --eval-every 0 --eval-episodes 1"
    switches = ["", "--threads 1", "--bf16", "--compile --max-seconds 45", "--num-envs 512", "--batch-size 1024"]
    switches += ["--network attention"]
    if device.type == "cuda":
        switches += ["--tf32", "--fp16", "--cudagraph", "--cudagraph --bf16", "--cudagraph --compile --bf16"]
    columns = alternate([f"{base} {switch}" for switch in switches], options)
    default = statistics.median(one["env_steps_per_second"] for one in columns[0])
    rows = []
    for switch, runs in zip(switches, columns):
        rates = [one["env_steps_per_second"] for one in runs]
        name = f"`{switch}`" if switch else "default"
        ratio, replay = statistics.median(rates) / default, statistics.median(one["replay_ratio"] for one in runs)
        rows.append([name, spread(rates), f"{ratio:.2f}×", f"{replay:.2f}", runs[0]["precision"]])
    return table("flags | env steps/s end to end | to default | replay ratio | precision", rows), {"runs": columns}


def suite_learn(options: Options, device: torch.device) -> tuple[str, dict]:
    """Mean food over 1,000 greedy games after a wall-clock budget, per seed."""
    seeds = (1,) if options.fast else (1, 2, 3)
    settings = [(60, "", seeds), (120, "", seeds), (600, "", seeds)]
    settings += [(600, extra, seeds[:1]) for extra in ("--batch-size 8192 --bf16", "--network attention")]
    rows, raw = [], []
    for seconds, extra, seeds in settings[: 1 if options.fast else None]:
        flags = f"--max-seconds {seconds} {extra}".strip()
        runs = [run(f"{flags} --seed {seed}", options) for seed in seeds]
        raw += runs
        scores = [one["eval_score_mean"] for one in runs]
        best = max(one["eval_score_max"] for one in runs)
        rows.append([f"`{flags}`", " · ".join(f"{score:.1f}" for score in scores), f"{statistics.mean(scores):.1f}",
                     f"{best:.0f}", spread([one["env_steps_per_second"] for one in runs])])  # fmt: skip
    return table("flags | mean food, seeds 1 · 2 · 3 | mean | best game | env steps/s", rows), {"runs": raw}


def sb3(env_id: str, num_envs: int, threads: int, seconds: float) -> None:
    """Print the env steps per second of Stable-Baselines3's DQN at its defaults; runs in a process of its own."""
    import gymnasium
    from stable_baselines3 import DQN
    from stable_baselines3.common.vec_env import DummyVecEnv

    import envs  # noqa: F401  (registers the games)

    torch.set_num_threads(threads)
    games = DummyVecEnv([lambda: gymnasium.make(env_id, disable_env_checker=True) for _ in range(num_envs)])
    model = DQN("MlpPolicy", games, exploration_initial_eps=0.05, exploration_final_eps=0.05, device="cpu", seed=1)
    start = time.perf_counter()
    model.learn(10**7, callback=lambda *_: time.perf_counter() - start < seconds)
    print(json.dumps(model.num_timesteps / (time.perf_counter() - start)))


def suite_sb3(options: Options, device: torch.device) -> tuple[str, dict]:
    """`dqn_snake_sb3_compat.py` beside Stable-Baselines3, in turn: same game, network, batch 32, train_freq 4."""
    cases = [("CartPole-v1", 1), ("CartPole-v1", 8), ("Snake-v0", 1), ("Snake-v0", 8)]
    rows, raw, seconds = [], {}, 2 if options.fast else 5
    for env_id, num_envs in cases:
        flags = f"--env-id {env_id} --num-envs {num_envs} --max-seconds {seconds} --exploration-initial-eps 0.05 "
        flags += "--eval-every 0 --eval-episodes 1"
        rates = {"ours": [], "SB3, 1 thread": [], "SB3, all threads": []}
        for _ in range(options.repeats + 1):
            one = run(flags, options, "dqn_snake_sb3_compat.py")
            rates["ours"].append(one["env_steps_per_second"])
            for name, threads in (("SB3, 1 thread", 1), ("SB3, all threads", torch.get_num_threads())):
                code = f"import benchmark; benchmark.sb3({env_id!r}, {num_envs}, {threads}, {seconds})"
                done = subprocess.run(
                    [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
                )
                rates[name].append(json.loads(done.stdout.splitlines()[-1]))
        rates = {name: values[1:] for name, values in rates.items()}
        raw[f"{env_id} x {num_envs}"] = rates
        ours, *peers = (statistics.median(values) for values in rates.values())
        rows.append([f"{env_id}, {num_envs}", *map(spread, rates.values()), f"{ours / max(peers):.1f}×"])
    return table("game, how many | " + " | ".join(rates) + " | to the faster SB3", rows), raw


SUITES = {"env": suite_env, "update": suite_update, "switches": suite_switches, "learn": suite_learn, "sb3": suite_sb3}


def draw() -> None:
    """benchmarks/snake.png: score over time, and speed over width, from the JSON files and the runs' TensorBoard."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
    learn, env = (ROOT / "benchmarks" / f"{name}.json" for name in ("learn", "env"))
    if learn.exists():
        longest = max(one["wall_seconds"] for one in json.loads(learn.read_text())["runs"])
        for one in json.loads(learn.read_text())["runs"]:
            folder = ROOT / "runs" / one["run"]
            if one["wall_seconds"] > 0.9 * longest and folder.exists():
                events = EventAccumulator(str(folder)).Reload()
                points = events.Scalars("eval/score_mean")
                color = "#c2410c" if "8192" in one["flags"] else "#6b7280" if "attention" in one["flags"] else "#15803d"
                left.plot([point.wall_time - events.FirstEventTimestamp() for point in points],
                          [point.value for point in points], color=color, alpha=0.8)  # fmt: skip
        left.set(
            xlabel="seconds", ylabel="food per greedy game", title="learning (red: --batch-size 8192, grey: attention)"
        )
    if env.exists():
        rates = {int(width): rates for width, rates in json.loads(env.read_text()).items() if width.isdecimal()}
        right.plot(list(rates), [statistics.median(value) for value in rates.values()], "o-", color="#1d4ed8")
        right.set(xscale="log", yscale="log", xlabel="games at once", ylabel="env steps/s", title="the game alone")
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(ROOT / "benchmarks" / "snake.png", dpi=110)


def main(options: Options) -> None:
    cuda = options.device != "cpu" and torch.cuda.is_available()
    device, page = torch.device("cuda" if cuda else "cpu"), ROOT / "benchmarks.md"
    (ROOT / "benchmarks").mkdir(exist_ok=True)
    names = {"default": ["env", "update", "switches"], "all": list(SUITES)}.get(options.suite, [options.suite])
    for name in names:
        print(f"{name}:", flush=True)
        text, raw = SUITES[name](options, device)
        command = f"python benchmark.py --suite {name}" + (" --fast" if options.fast else "")
        command += f" --repeats {options.repeats}" if options.repeats != Options.repeats else ""
        section = (
            f"<!-- {name} {device.type} -->\n{SUITES[name].__doc__}\n\n{text}\n\n`{command}` on {machine(device)}\n"
        )
        (ROOT / "benchmarks" / f"{name}.json").write_text(json.dumps(raw | {"command": command, "on": machine(device)}))
        pattern = re.compile(rf"<!-- {name} {device.type} -->.*?(?=\n<!-- end -->)", re.DOTALL)
        content = page.read_text()
        if not pattern.search(content):
            sys.exit(f"benchmarks.md has no section <!-- {name} {device.type} --> ... <!-- end -->")
        page.write_text(pattern.sub(lambda _, section=section: section.rstrip(), content))
        print(text)
    draw()


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))

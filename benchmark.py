"""Measures what the scripts do, by running them, and writes benchmarks.md.

    python benchmark.py                         # --suite env, update and switches: 20 minutes on two cores
    python benchmark.py --suite learn           # learning: three seeds of 60, 120 and 600 seconds
    python benchmark.py --suite learn --fast    # one seed of 60 seconds
    python benchmark.py --suite sb3             # dqn_snake_sb3_compat.py beside Stable-Baselines3, and the sweep
    python benchmark.py --suite sweep           # its transformer by switches and batch: 7 minutes on two cores
    python benchmark.py --suite sweep --write-env --fast  # fewer batches; the fastest settings go into .env

Every suite replaces its own section of benchmarks.md and leaves the rest alone; raw results go to benchmarks/*.json.
Commands that are compared take turns (A B A B ...), medians are over `--repeats` runs after one that does not count.
"""

import io
import json
import os
import platform
import re
import shlex
import shutil
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NoReturn

import torch
import tyro
from dotenv.parser import parse_stream
from gymnasium.utils.performance import benchmark_vector_step
from gymnasium.vector import SyncVectorEnv

from envs.snake import SnakeBatch, SnakeEnv, SnakeVectorEnv

ROOT = Path(__file__).parent
PLAIN = {"OPTIMAL_BATCH_SIZE": "32", "USE_TORCH_COMPILE": "false", "USE_FLASH_ATTENTION": "false", "USE_BF16": "false"}
# dqn_snake_sb3_compat.py's settings while it is measured, so that a .env changes nothing


@dataclass
class Options:
    suite: Literal["default", "env", "update", "switches", "learn", "sb3", "sweep", "all"] = "default"
    """what to measure; default is env, update and switches, and sb3 includes sweep"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """where"""
    repeats: int = 5
    """counted runs per row"""
    fast: bool = False
    """fewer rows and shorter runs, to see whether everything works"""
    write_env: bool = False
    """after the sweep, put the settings with the most samples/s into .env, for dqn_snake_sb3_compat.py"""


def refuse(message: str) -> NoReturn:
    """End with one line about what the user asked for, and exit code 2."""
    print(f"benchmark.py: {message}", file=sys.stderr)
    raise SystemExit(2)


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
    """Summary of one run of the real script. MemoryError where it did not fit, the end of it all for other failures."""
    folder = ROOT / "runs" / f"benchmark-{os.getpid()}-{time.monotonic_ns()}"
    command = [sys.executable, script, "--device", options.device, "--no-video", "--run-name", folder.name]
    command += shlex.split(flags)
    done = subprocess.run(command, cwd=ROOT, env=os.environ | PLAIN, capture_output=True, text=True)
    refused = done.returncode == 2 and re.search("out of memory|would take .* GiB", done.stderr)
    if refused or done.returncode == -9:  # or Linux, out of memory itself, killed it
        raise MemoryError(f"{script} {flags}: out of memory")
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
        flags = f"--env-id {env_id} --num-envs {num_envs} --exploration-initial-eps 0.05 --eval-every 0 "
        flags += "--eval-episodes 1"
        rates = {"ours": [], "ours, `--compile`": [], "SB3, 1 thread": [], "SB3, all threads": []}
        for _ in range(options.repeats + 1):
            for name, more in (("ours", ""), ("ours, `--compile`", "--compile")):
                budget = f"--max-seconds {seconds + 5 * bool(more)}"  # compiling takes five and is not counted
                one = run(f"{flags} {budget} {more}".strip(), options, "dqn_snake_sb3_compat.py")
                rates[name].append(one["env_steps_per_second"])
            for name, threads in (("SB3, 1 thread", 1), ("SB3, all threads", torch.get_num_threads())):
                code = f"import benchmark; benchmark.sb3({env_id!r}, {num_envs}, {threads}, {seconds})"
                done = subprocess.run(
                    [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
                )
                rates[name].append(json.loads(done.stdout.splitlines()[-1]))
        rates = {name: values[1:] for name, values in rates.items()}
        raw[f"{env_id} x {num_envs}"] = rates
        ours, compiled, *peers = (statistics.median(values) for values in rates.values())
        ratios = f"{ours / max(peers):.1f}× | {compiled / max(peers):.1f}×"
        rows.append([f"{env_id}, {num_envs}", *map(spread, rates.values()), ratios])
    return table("game, how many | " + " | ".join(rates) + " | to the faster SB3 | with `--compile`", rows), raw


SWEPT = {"fp32": "", "tf32": "--tf32", "bf16": "--bf16", "compile": "--compile"}  # flags by words of its rows' names
SWEPT |= {kernel: f"--sdpa {kernel}" for kernel in ("flash", "efficient", "math")}


def inactive(words: list[str], one: dict) -> dict[str, str]:
    """The switches among `words` that did not work in a run, and what ran instead."""
    ran = {"bf16": one["precision"].replace("bfloat", "bf"), "compile": "compile" if one["compiled"] else "eager mode"}
    ran |= dict.fromkeys(("flash", "efficient", "math"), one["sdpa"].removesuffix("_attention"))
    return {word: f"{word} not active, {ran[word]} instead" for word in words if ran.get(word, word) != word}


def suite_sweep(options: Options, device: torch.device) -> tuple[str, dict]:
    """The transformer of `dqn_snake_sb3_compat.py` on 20x20, train_freq 4, by switches and batch: one run a cell."""
    batches, off = (32, 64, 128), {"tf32": "needs CUDA", "efficient": "needs CUDA"}  # off: what cannot work, and why
    if device.type == "cuda":
        batches = (128, 256, 512, 1024, 2048, 4096, 8192, 16384)
        off = {} if torch.cuda.get_device_capability() >= (8, 0) else {"tf32": "needs a newer GPU"}
    batches = batches[:: 3 if options.fast else 1]
    cells, cross, more = [], [], ("flash", "efficient", "math", "compile", "compile + flash")
    for name in ("fp32", "tf32", "bf16", *(f"bf16 + {switches}" for switches in more)):
        if "bf16" in off and name != "bf16":
            name = name.replace("bf16", "fp32")  # where bf16 does nothing the other switches are measured without it
        words, row = name.split(" + "), [name]
        flags = "--policy transformer --board 20x20 --buffer-size 100000 --exploration-initial-eps 0.05 --log-every 1 "
        flags += "--eval-every 0 --eval-episodes 1 --checkpoint-every 0 --max-seconds "
        flags += (
            "15 " if "compile" not in words else "60 " if device.type == "cpu" else "90 "
        )  # to compile takes a part of it
        switches = " ".join(SWEPT[word] for word in words).strip()
        for batch in batches:
            cell, marks = {}, {word: off[word] for word in words if word in off}
            try:
                if not marks:
                    one = run(f"{flags}--batch-size {batch} {switches}".strip(), options, "dqn_snake_sb3_compat.py")
                    cell, marks = one, inactive(words, one)
                    off |= marks if batch == batches[0] else {}  # what the smallest batch does without, all do
                    marks |= {} if one["updates_per_second"] else {"time": "no update in time"}
            except MemoryError:
                marks = {"memory": "OOM"}
            cells.append({"configuration": name, "batch": batch, "mark": "; ".join(marks.values())} | cell)
            row.append(cells[-1]["mark"] or f"{cell['samples_per_second']:,.1f}")
        cross.append(row)

    ranked = sorted((cell for cell in cells if not cell["mark"]), key=lambda cell: -cell["samples_per_second"])
    best = next((cell for cell in ranked if not re.search("tf32|efficient|math", cell["configuration"])), None)
    if best is None:
        sys.exit("sweep: nothing that .env can set could be measured; a GPU or machine with more memory is needed")
    row = "{configuration} | {batch:,} | {samples_per_second:,.1f} | {updates_per_second:,.2f} | "
    row += "{env_steps_per_second:,.2f} | {replay_ratio:,g} | {peak_memory_gib:.2f}"
    rows = [[place, row.format(**cell)] for place, cell in enumerate(ranked[:20], 1)]
    says = "{configuration} at batch {batch:,}: {samples_per_second:,.1f} samples/s, {env_steps_per_second:,.2f} env "
    says += "steps/s, replay ratio {replay_ratio:g}"
    steps = max(ranked, key=lambda cell: cell["env_steps_per_second"])
    text = table("place | switches | batch | samples/s | updates/s | env steps/s | replay ratio | peak GiB", rows)
    text += "\n\nSamples/s:\n\n" + table("switches | " + " | ".join(f"batch {batch:,}" for batch in batches), cross)
    text += f"\n\nMost samples/s that .env can set: {says.format(**best)}. That is throughput, no promise of learning "
    text += f"sooner.\nMost env steps/s: {says.format(**steps)}."
    words = {"USE_TORCH_COMPILE": "compile", "USE_FLASH_ATTENTION": "flash", "USE_BF16": "bf16"}
    env = {name: str(word in best["configuration"]).lower() for name, word in words.items()}
    return text, {"cells": cells, "env": {"OPTIMAL_BATCH_SIZE": str(best["batch"])} | env}


def write_env(values: dict[str, str]) -> None:
    """Set `values` in .env and keep the rest letter for letter; without values, only see whether that would work.

    dotenv's own set_key drops `export`, and comments and blank lines next to what it changes.
    """
    path = Path(".env").resolve()  # where it is a link, the file behind it
    temporary, text, missing = path.with_name(f"{path.name}.tmp"), "", dict(values)
    try:
        old = path.read_bytes().decode() if path.exists() else ""
        for line in parse_stream(io.StringIO(old, newline="")):
            part = line.original.string
            if line.key in values:
                missing.pop(line.key, None)
                quoted_or_not = r"""(?:(?P<quote>['"]).*?\3(?=\s*(?:#|$))|[^\r\n]*?(?=\s+#|\s*$))"""
                found = re.search(rf"('?\b{line.key}\b'?)(\s*=[^\S\r\n]*)?{quoted_or_not}", part)
                quote = found["quote"] or ""
                new = f"{found[1]}{found[2] or '='}{quote}{values[line.key]}{quote}"
                part = part[: found.start()] + new + part[found.end() :]
            text += part
        text += "\n" if missing and text and not text.endswith("\n") else ""
        text += "".join(f"{name}={value}\n" for name, value in missing.items())
        temporary.touch(0o600)  # .env may hold secrets
        temporary.write_bytes(text.encode())
        if path.exists():
            shutil.copymode(path, temporary)
        if values:
            temporary.replace(path)
            print(f"{path}: " + " ".join(f"{name}={value}" for name, value in values.items()))
    except (OSError, ValueError) as error:
        refuse(f"--write-env: {path} cannot be changed ({error}); a text file in a folder that can be written works")
    finally:
        temporary.unlink(missing_ok=True)


SUITES = {"env": suite_env, "update": suite_update, "switches": suite_switches, "learn": suite_learn, "sb3": suite_sb3}
SUITES["sweep"] = suite_sweep


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
    groups = {"default": ["env", "update", "switches"], "sb3": ["sb3", "sweep"], "all": list(SUITES)}
    names = groups.get(options.suite, [options.suite])
    if options.write_env and "sweep" not in names:
        refuse(f"--write-env: --suite {options.suite} has nothing to write; with sweep, sb3 or all it works")
    if options.write_env:
        write_env({})  # what cannot be written is refused before anything is measured
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
        if not pattern.search(content):  # a device's first section stands below the CPU's
            below = rf"<!-- {name} cpu -->.*?\n<!-- end -->\n"
            new = f"\n<!-- {name} {device.type} -->\n<!-- end -->\n"
            content = re.sub(below, lambda found: found[0] + new, content, count=1, flags=re.DOTALL)
        page.write_text(pattern.sub(lambda _, section=section: section.rstrip(), content))
        print(text)
        if options.write_env and name == "sweep":
            write_env(raw["env"])
    if {"env", "learn"} & set(names):
        draw()


if __name__ == "__main__":
    try:
        main(tyro.cli(Options, description=__doc__))
    except MemoryError as error:
        sys.exit(str(error))

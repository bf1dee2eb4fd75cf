"""dqn_snake_sb3_compat.py compared with Stable-Baselines3, and the sweep of settings for .env."""

import re
import statistics
import sys
import time
from functools import partial
from pathlib import Path

import torch
from dotenv import set_key

from benchmarks import harness
from benchmarks.harness import SPEED_RUN, Options, column, fail, ratios
from benchmarks.report import markdown_table, median_min_max, peak_gib, percent_min_max, table
from benchmarks.sb3_peers import FOREVER, sb3_agent, sb3_rate

SCRIPT = "dqn_snake_sb3_compat.py"


@table(
    "sb3-speed",
    caption="""
    Env steps per second of `dqn_snake_sb3_compat.py` and Stable-Baselines3: same game, network, batch 32, train_freq 4.

    "×" is ours / the faster SB3, per round. Without updates the agent only plays and stores: a bound for `--compile`.
    """,
)
def sb3_speed(options: Options, device: torch.device) -> tuple[str, dict]:
    cases = [("CartPole-v1", 1), ("CartPole-v1", 8), ("Snake-v0", 1), ("Snake-v0", 8)]
    if options.fast:
        cases = cases[::3]
    seconds = 2 if options.fast else 5
    agent = {"name": "SB3's DQN, defaults", "device": device.type}
    header = "game, number | ours | ours, `--compile` | without updates | SB3, 1 thread | SB3, all threads"
    rows = []
    raw = {}
    compared = {}
    for env_id, num_envs in cases:
        base = f"{SPEED_RUN} --env-id {env_id} --num-envs {num_envs} --exploration-initial-eps 0.05"
        eager = f"{base} --max-seconds {seconds}"
        compiled = f"{base} --max-seconds {seconds + 5} --compile"  # compiling takes 5 s and is not counted
        playing = f"{eager} --learning-starts {FOREVER}"
        game = {"env_id": env_id, "num_envs": num_envs, "seconds": seconds}
        cores = torch.get_num_threads()
        calls = {
            "ours": partial(harness.run, eager, options, SCRIPT),
            "ours, `--compile`": partial(harness.run, compiled, options, SCRIPT),
            "without updates": partial(harness.run, playing, options, SCRIPT),
            "SB3, 1 thread": partial(harness.in_subprocess, sb3_rate, threads=1, **game, **agent),
            "SB3, all threads": partial(harness.in_subprocess, sb3_rate, threads=cores, **game, **agent),
        }
        measured = harness.alternate(options, calls)
        rates = {name: column(runs, "env_steps_per_second") for name, runs in measured.items()}
        fastest = list(map(max, rates["SB3, 1 thread"], rates["SB3, all threads"]))
        eager_times = ratios(rates["ours"], fastest)
        compiled_times = ratios(rates["ours, `--compile`"], fastest)
        case = f"{env_id}, {num_envs}"
        shares = ratios(rates["ours, `--compile`"], rates["without updates"])
        times = [median_min_max(eager_times, 1), median_min_max(compiled_times, 1), percent_min_max(shares)]
        rows.append([case, *map(median_min_max, rates.values()), *times])
        raw[case] = rates
        compared[case] = eager_times
        compared[f"{case}, --compile"] = compiled_times
    text = markdown_table(f"{header} | × | × with `--compile` | of the bound", rows)
    return text, {"rates": raw, "ratios": compared}


TUNED = {  # for CartPole-v1, from rl-baselines3-zoo
    "learning_rate": 2.3e-3,
    "batch_size": 64,
    "buffer_size": 100_000,
    "learning_starts": 1000,
    "target_update_interval": 10,
    "train_freq": 256,
    "gradient_steps": 128,
    "exploration_fraction": 0.16,
    "exploration_final_eps": 0.04,
}


def tuned_flags() -> str:
    """Of `dqn_snake_sb3_compat.py`."""
    flags = [f"--{name.replace('_', '-')} {value}" for name, value in TUNED.items()]
    return " ".join(["--env-id CartPole-v1 --total-timesteps 50000", *flags])


def sb3_learn_run(seed: int) -> list[float]:
    """Seconds and mean return over 100 games of SB3's DQN after 50,000 steps."""
    from stable_baselines3.common.evaluation import evaluate_policy

    start = time.perf_counter()
    model = sb3_agent("SB3's DQN, defaults", "cpu", 1, "CartPole-v1", seed, **TUNED).learn(50_000)
    seconds = time.perf_counter() - start
    return [seconds, float(evaluate_policy(model, model.get_env(), 100)[0])]


@table(
    "sb3-learn",
    caption="""
    CartPole-v1 for 50,000 steps with the same tuned hyperparameters: mean return, at most 500.

    The final DQN policy varies a lot between seeds here, hence ten seeds.
    """,
)
def sb3_learn(options: Options, device: torch.device) -> tuple[str, dict]:
    base = f"{tuned_flags()} --threads 1 --eval-every 0"
    raw = {"ours": [], "ours, `--compile`": [], "SB3": []}
    for seed in range(1, 3 if options.fast else 11):
        for name, switch in (("ours", ""), ("ours, `--compile`", " --compile")):
            one = harness.run(f"{base} --seed {seed}{switch}", options, SCRIPT)
            raw[name].append([one["wall_seconds"], one["eval_score_mean"]])
        raw["SB3"].append(harness.in_subprocess(sb3_learn_run, seed=seed))
    sb3_seconds = [seconds for seconds, _ in raw["SB3"]]
    rows = []
    compared = {}
    for name, found in raw.items():
        seconds = [one[0] for one in found]
        scores = [one[1] for one in found]
        times = ratios(sb3_seconds, seconds)
        if name != "SB3":
            compared[name] = times
        row = [
            name,
            " · ".join(f"{score:.0f}" for score in sorted(scores)),
            f"{statistics.mean(scores):.0f}",
            median_min_max(seconds, 1),
            median_min_max(times, 1),
        ]
        rows.append(row)
    header = "agent | mean return over 100 games, by seed (sorted) | mean | seconds | × SB3"
    return markdown_table(header, rows), {"runs": raw, "ratios": compared}


# ------------------------------------------------------------------------------------------------ the sweep

SWEPT = {  # flags by words of the rows' names
    "fp32": "",
    "tf32": "--tf32",
    "bf16": "--bf16",
    "compile": "--compile",
    "flash": "--sdpa flash",
    "efficient": "--sdpa efficient",
    "math": "--sdpa math",
}
CONFIGURATIONS = ["fp32", "tf32", "bf16", "bf16 + flash", "bf16 + efficient", "bf16 + math", "bf16 + compile"]
CONFIGURATIONS += ["bf16 + compile + flash"]


def inactive(words: list[str], one: dict) -> dict[str, str]:
    """Switches among `words` that were inactive in a run, and what ran instead."""
    ran = {
        "bf16": one["precision"].replace("bfloat", "bf"),
        "compile": "compile" if one["compiled"] else "eager mode",
    }
    return {word: f"{word} not active, {ran[word]} instead" for word in words if ran.get(word, word) != word}


def sweep_cells(options: Options, device: torch.device, batches: tuple[int, ...]) -> list[dict]:
    """One run per configuration and batch size, or the reason there is none."""
    unavailable = {"tf32": "needs CUDA", "efficient": "needs CUDA", "flash": "needs CUDA or no dropout"}
    if device.type == "cuda":
        unavailable = {}
        if torch.cuda.get_device_capability() < (8, 0):
            unavailable["tf32"] = "needs a newer GPU"
    base = "--policy transformer --board 20x20 --buffer-size 100000 --exploration-initial-eps 0.05 --log-every 1 "
    base += "--eval-every 0 --eval-episodes 1 --checkpoint-every 0"
    cells = []
    for name in CONFIGURATIONS:
        if "bf16" in unavailable and name != "bf16":
            name = name.replace("bf16", "fp32")  # without bf16 units the other rows use fp32
        words = name.split(" + ")
        seconds = 15
        if "compile" in words:  # includes compiling
            seconds = 60 if device.type == "cpu" else 90
        switches = " ".join(SWEPT[word] for word in words).strip()
        for batch in batches:
            cell = {}
            marks = {word: unavailable[word] for word in words if word in unavailable}
            flags = f"{base} --max-seconds {seconds} --batch-size {batch} {switches}".strip()
            try:
                if not marks:
                    cell = harness.run(flags, options, SCRIPT)
                    marks = inactive(words, cell)
                    if batch == batches[0]:  # then skip it for larger batches
                        unavailable |= marks
                    if not cell["updates_per_second"]:
                        marks["time"] = "no update in time"
            except MemoryError:
                marks = {"memory": "OOM"}
            cell["configuration"] = name
            cell["batch"] = batch
            cell["mark"] = "; ".join(marks.values())
            cells.append(cell)
    return cells


def sweep_tables(cells: list[dict], ranked: list[dict], best: dict, batches: tuple[int, ...]) -> str:
    rows = []
    for rank, cell in enumerate(ranked[:20], 1):
        row = [
            rank,
            cell["configuration"],
            f"{cell['batch']:,}",
            f"{cell['samples_per_second']:,.1f}",
            f"{cell['updates_per_second']:,.2f}",
            f"{cell['env_steps_per_second']:,.2f}",
            f"{cell['replay_ratio']:,g}",
            peak_gib([cell]),
        ]
        rows.append(row)
    by_configuration = {}
    for cell in cells:
        text = cell["mark"] or f"{cell['samples_per_second']:,.1f}"
        by_configuration.setdefault(cell["configuration"], []).append(text)
    header = "rank | switches | batch | samples/s | updates/s | env steps/s | replay ratio | peak GiB"
    text = markdown_table(header, rows) + "\n\nSamples/s:\n\n"
    header = " | ".join(["switches", *(f"batch {batch:,}" for batch in batches)])
    text += markdown_table(header, [[name, *texts] for name, texts in by_configuration.items()])
    line = "{configuration} at batch {batch:,}: {samples_per_second:,.1f} samples/s, {env_steps_per_second:,.2f} env "
    line += "steps/s, replay ratio {replay_ratio:g}"
    text += f"\n\nMost samples/s with settings of .env: {line.format(**best)}. Throughput does not imply faster "
    most_steps = max(ranked, key=lambda cell: cell["env_steps_per_second"])
    return text + f"learning.\nMost env steps/s: {line.format(**most_steps)}."


@table(
    "sweep",
    caption="""
    The transformer of `dqn_snake_sb3_compat.py` on 20x20, train_freq 4, by switches and batch size: one run per cell.
    """,
)
def sweep(options: Options, device: torch.device) -> tuple[str, dict]:
    batches = (32, 64, 128)
    if device.type == "cuda":
        batches = (128, 256, 512, 1024, 2048, 4096, 8192, 16384)
    if options.fast:
        batches = batches[::3]
    cells = sweep_cells(options, device, batches)
    ranked = [cell for cell in cells if not cell["mark"]]
    ranked.sort(key=lambda cell: -cell["samples_per_second"])
    for_env = [cell for cell in ranked if not re.search("tf32|efficient|math", cell["configuration"])]
    if not for_env:
        sys.exit("sweep: no setting of .env could be measured; use a GPU or a machine with more memory")
    best = for_env[0]
    env = {"OPTIMAL_BATCH_SIZE": str(best["batch"])}
    words = {"USE_TORCH_COMPILE": "compile", "USE_FLASH_ATTENTION": "flash", "USE_BF16": "bf16"}
    for name, word in words.items():
        env[name] = str(word in best["configuration"]).lower()
    return sweep_tables(cells, ranked, best, batches), {"cells": cells, "env": env}


def write_env(values: dict[str, str]) -> None:
    """Set `values` in .env."""
    path = Path(".env").resolve()  # follows a link
    print(f"{path}: " + " ".join(f"{name}={value}" for name, value in values.items()))
    try:
        for name, value in values.items():
            set_key(path, name, value, quote_mode="never")
    except (OSError, ValueError) as error:
        fail(f"--write-env: {path} cannot be changed ({error}); it must be a text file in a writable folder")

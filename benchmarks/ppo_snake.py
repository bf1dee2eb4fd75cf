"""Tables of ppo_snake.py: learning and speed."""

import math
import statistics
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch

from benchmarks import harness
from benchmarks.harness import SPEED_RUN, Options, column, million_steps
from benchmarks.report import markdown_table, median_min_max, table
from benchmarks.snake import ceiling, least_work, matmul_seconds, saved_weights


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def wilson_interval(share: float, trials: int) -> tuple[float, float]:
    """95 % confidence interval of a share of `trials` (Wilson 1927)."""
    z = 1.96
    scale = 1 + z**2 / trials
    middle = (share + z**2 / (2 * trials)) / scale
    margin = z * math.sqrt(share * (1 - share) / trials + (z / (2 * trials)) ** 2) / scale
    return max(middle - margin, 0.0), min(middle + margin, 1.0)


def interval(run: dict) -> str:
    low, high = wilson_interval(run["eval_full_boards"], run["eval_episodes"])
    return f"{100 * low:.1f}–{100 * high:.1f}"


def learning_table(flags: str, options: Options, at_once: int = 1) -> tuple[str, dict]:
    def run(seed: int) -> dict:
        return harness.run(f"{flags} --seed {seed}", options, "ppo_snake.py")

    with ThreadPoolExecutor(at_once) as pool:
        runs = list(pool.map(run, options.seeds))
    scores = column(runs, "eval_score_mean")
    full = column(runs, "eval_full_boards")
    row = [
        f"`{flags}`",
        " · ".join(f"{score:.1f}" for score in scores),
        f"{statistics.mean(scores):.1f}",
        " · ".join(percent(share) for share in full),
        " · ".join(interval(run) for run in runs),
        million_steps(runs),
        median_min_max(column(runs, "env_steps_per_second")),
    ]
    header = (
        "flags | mean food, seeds 1 · 2 · 3 | mean | full boards | 95 % intervals | million env steps | env steps/s"
    )
    curves = [one | {"curve": harness.eval_curve(harness.run_folder(one["run"]))} for one in runs]
    return markdown_table(header, [row]), {"runs": curves}


@table(
    "ppo-snake-learn",
    caption="""
    Mean food (of 97) and share of full boards over 1,000 greedy games after a wall-clock budget, per seed.

    The intervals cover the games of one seed; seeds differ by far more.
    """,
)
def ppo_snake_learn(options: Options, device: torch.device) -> tuple[str, dict]:
    return learning_table(f"--max-seconds {60 if options.fast else 120}", options)


@table(
    "ppo-snake-learn-600",
    caption="""
    As ppo-snake-learn, after ten minutes.
    """,
)
def ppo_snake_learn_600(options: Options, device: torch.device) -> tuple[str, dict]:
    return learning_table(f"--max-seconds {10 if options.fast else 600}", options)


@table(
    "ppo-snake-6x6",
    caption="""
    As ppo-snake-learn, on a 6x6 board (33 food fill it).
    """,
)
def ppo_snake_6x6(options: Options, device: torch.device) -> tuple[str, dict]:
    budget = 10 if options.fast else 120
    return learning_table(f"--board 6x6 --max-seconds {budget}", options)


@table(
    "ppo-snake-20x20",
    caption="""
    As ppo-snake-learn, on a 20x20 board (397 food fill it), after half an hour, over 200 games: a longer horizon, and a
    smaller share of the value loss.

    One core per run, two runs at once.
    """,
)
def ppo_snake_20x20(options: Options, device: torch.device) -> tuple[str, dict]:
    budget = 10 if options.fast else 1800
    flags = "--board 20x20 --gamma 0.999 --gae-lambda 0.98 --vf-coef 0.1 --threads 1 --eval-episodes 200"
    return learning_table(f"{flags} --max-seconds {budget}", options, at_once=2)


@table(
    "ppo-snake-speed",
    caption="""
    End-to-end training speed by number of parallel games; a minibatch is a sixteenth of a rollout.

    "matmuls" is the time of the update's matmuls alone, as a share of the update. The last column is the FLOP/s of an
    update, and its share of those of one large matmul.
    """,
)
def ppo_snake_speed(options: Options, device: torch.device) -> tuple[str, dict]:
    widths = (16, 128) if options.fast else (1, 16, 128, 1024, 4096)
    base = f"{SPEED_RUN} --max-seconds {5 if options.fast else 8}"
    calls = {width: partial(harness.run, f"{base} --num-envs {width}", options, "ppo_snake.py") for width in widths}
    seconds = 0.3 if options.fast else 1
    calls["ceiling"] = lambda: harness.in_subprocess(ceiling, device=device.type, seconds=seconds)
    measured = harness.alternate(options, calls)
    most_flops = statistics.median(flops for flops, _ in measured["ceiling"])
    rows = []
    raw = {}
    for width in widths:
        runs = measured[width]
        minibatch = 2 * width
        weights = saved_weights(harness.run_folder(runs[0]["run"]), "agent")
        seconds = statistics.median(one["train_fraction"] / one["updates_per_second"] for one in runs)
        alone = matmul_seconds(minibatch, weights, device, forward_passes=1)
        flops, _ = least_work(minibatch, weights, forward_passes=1)
        raw[width] = {"runs": runs, "update_seconds": seconds, "matmul_seconds": alone, "flops": flops}
        row = [
            f"{width:,}",
            median_min_max(column(runs, "env_steps_per_second")),
            f"{minibatch:,}",
            f"{1000 * seconds:.2f}",
            f"{alone / seconds:.0%}",
            f"{flops / seconds / 1e9:,.0f} ({flops / seconds / most_flops:.0%})",
        ]
        rows.append(row)
    text = markdown_table("games | env steps/s | minibatch | ms per update | matmuls | GFLOP/s", rows)
    text += f"\n\nCeiling: {most_flops / 1e9:,.0f} GFLOP/s (fp32 matmul)."
    return text, {"games": raw, "ceiling": measured["ceiling"]}

"""Tables of ppo_snake.py: what it learns."""

import statistics

import torch

from benchmarks import harness
from benchmarks.harness import Options, column
from benchmarks.report import markdown_table, median_min_max, table


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"


@table(
    "ppo-snake-learn",
    caption="""
    1,000 greedy games after a wall-clock budget, per seed: mean food of 97, and how many of them filled the board.

    Seeds differ by far more than the games of one seed: an interval of all games together would say too much.
    """,
)
def ppo_snake_learn(options: Options, device: torch.device) -> tuple[str, dict]:
    settings = ["--max-seconds 60", "--max-seconds 120"]
    if options.fast:
        settings = settings[:1]
    rows = []
    raw = []
    for flags in settings:
        runs = [harness.run(f"{flags} --seed {seed}", options, "ppo_snake.py") for seed in options.seeds]
        raw += runs
        scores = column(runs, "eval_score_mean")
        full = column(runs, "eval_full_boards")
        row = [
            f"`{flags}`",
            " · ".join(f"{score:.1f}" for score in scores),
            f"{statistics.mean(scores):.1f}",
            " · ".join(percent(share) for share in full),
            median_min_max(column(runs, "env_steps_per_second")),
        ]
        rows.append(row)
    header = "flags | mean food, seeds 1 · 2 · 3 | mean | boards filled | env steps/s"
    return markdown_table(header, rows), {"runs": raw}

"""Table of torchrun: the cost of an all-reduce, and two ranks on two cores."""

import os
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from benchmarks import harness
from benchmarks.harness import SPEED_RUN, Options, column, ratios
from benchmarks.report import markdown_table, median_min_max, table

NETWORKS = {  # name of the network in each checkpoint
    "ppo_snake.py": "agent",
    "dqn_snake.py": "q_network",
    "ppo_metta.py": "agent",
    "dqn_mario_async.py": "q_network",
}


def time_all_reduce(rank: int, ranks: int, store: str, sizes: list[int], rounds: int, results: str) -> None:
    """One rank: median seconds of an all-reduce for each of `sizes` (float32 numbers). Rank 0 writes them."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    medians = []
    for size in sizes:
        numbers = torch.ones(size)
        seconds = []
        for _ in range(rounds):
            dist.barrier()
            start = time.perf_counter()
            dist.all_reduce(numbers)
            seconds.append(time.perf_counter() - start)
        medians.append(statistics.median(seconds))
    if rank == 0:
        torch.save(medians, results)
    dist.destroy_process_group()


def all_reduce_seconds(ranks: int, sizes: list[int], rounds: int) -> list[float]:
    """Median seconds of an all-reduce of `sizes` float32 numbers over gloo, all ranks on this machine."""
    with tempfile.TemporaryDirectory() as folder:
        results = os.path.join(folder, "results")
        mp.spawn(time_all_reduce, (ranks, os.path.join(folder, "store"), sizes, rounds, results), nprocs=ranks)
        return torch.load(results)


def num_weights(folder: Path, network: str) -> int:
    saved = torch.load(folder / "checkpoint.pt", weights_only=True)[network]
    return sum(tensor.numel() for tensor in saved.values())


@table(
    "ranks",
    caption="""
    `torchrun` on one machine: size and time of the all-reduce, and end-to-end updates per second.

    Every update averages the gradients in one float32 all-reduce (gloo, one thread per rank). Games and batch are
    totals, so each of two ranks does half of the work. Env steps are tied to updates, except in Mario, whose collectors
    do not wait. "×" is two ranks / one process with two threads, per round.
    """,
)
def ranks(options: Options, device: torch.device) -> tuple[str, dict]:
    scripts = list(NETWORKS)[:1] if options.fast else list(NETWORKS)
    seconds = 5 if options.fast else 12
    calls = {}
    for script in scripts:
        base = f"{SPEED_RUN} --max-seconds {seconds}"
        calls[f"{script}, 1 thread"] = partial(harness.run, f"{base} --threads 1", options, script)
        calls[f"{script}, 2 threads"] = partial(harness.run, f"{base} --threads 2", options, script)
        calls[f"{script}, 2 ranks"] = partial(harness.run, f"{base} --threads 1", options, script, 2)
    measured = harness.alternate(options, calls)
    sizes = []
    for script in scripts:
        run = measured[f"{script}, 1 thread"][0]
        sizes.append(num_weights(harness.run_folder(run["run"]), NETWORKS[script]))
    reduce_seconds = {}
    for number in (2, 4):
        rounds = 20 if options.fast else 200
        reduce_seconds[number] = harness.in_subprocess(all_reduce_seconds, ranks=number, sizes=sizes, rounds=rounds)
    rows = []
    for i, script in enumerate(scripts):
        one = measured[f"{script}, 1 thread"]
        update_ms = [1000 * run["train_fraction"] / run["updates_per_second"] for run in one]
        rates = {}
        for how in ("1 thread", "2 threads", "2 ranks"):
            rates[how] = column(measured[f"{script}, {how}"], "updates_per_second")
        row = [f"`{script}`", f"{4 * sizes[i] / 1024:,.0f}", f"{statistics.median(update_ms):.1f}"]
        row += [f"{1000 * reduce_seconds[number][i]:.2f}" for number in (2, 4)]
        row += [median_min_max(rate, 1) for rate in rates.values()]
        row.append(median_min_max(ratios(rates["2 ranks"], rates["2 threads"]), 2))
        rows.append(row)
    header = "script | KiB per update | ms per update, 1 thread | all-reduce ms, 2 ranks | 4 ranks"
    header += " | updates/s, 1 thread | 2 threads | 2 ranks | ×"
    return markdown_table(header, rows), {"runs": measured, "sizes": sizes, "all_reduce": reduce_seconds}

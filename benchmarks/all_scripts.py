"""Tables over all scripts: a smoke test of speed, bf16, a busy machine, and scaling."""

import importlib
import math
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
import tyro

from benchmarks import harness
from benchmarks.harness import SPEED_RUN, Options, column, median, ratios
from benchmarks.report import MIN_ROUNDS, markdown_table, median_min_max, peak_gib, table

SMOKE_FLAGS = {
    "ppo_snake": "",
    "dqn_snake": "--learning-starts 1000",
    "dqn_snake_sb3_compat": "",
    "ppo_metta": "",
    "dqn_mario_async": "--learning-starts 1000",
}


def speed_of_all(seconds: float, device: str) -> dict[str, float]:
    """Env steps per second of every script on one thread, one after another in this process."""
    speed = {}
    for script, flags in SMOKE_FLAGS.items():
        words = f"--threads 1 --device {device} {SPEED_RUN} --no-video --max-seconds {seconds} {flags}".split()
        module = importlib.import_module(script)
        with tempfile.TemporaryDirectory() as folder:
            args = tyro.cli(module.Args, args=[*words, "--run-dir", folder])
            speed[script] = module.main(args)["env_steps_per_second"]
    return speed


@table(
    "smoke",
    caption="""
    End-to-end speed of every script on one thread, in runs of two seconds.

    With `--compare` and a file of the same kind of machine it says whether a script became 10 % slower, in two minutes.
    """,
)
def smoke(options: Options, device: torch.device) -> tuple[str, dict]:
    seconds = 1 if options.fast else 2
    call = partial(harness.in_subprocess, speed_of_all, seconds=seconds, device=device.type)
    measured = harness.alternate(replace(options, repeats=MIN_ROUNDS), {"all": call})
    rates = {f"{script}.py": column(measured["all"], script) for script in SMOKE_FLAGS}
    rows = [[f"`{script}`", median_min_max(values)] for script, values in rates.items()]
    return markdown_table("script | env steps/s", rows), {"runs": measured, "ratios": rates}


BF16_COMMANDS = [
    "dqn_snake.py",
    "dqn_snake_sb3_compat.py",
    "ppo_metta.py",
    "dqn_mario_async.py",
    "dqn_snake.py --batch-size 8192",
    "ppo_metta.py --rnn none",
    "dqn_mario_async.py --batch-size 128",
]


@table(
    "bf16",
    caption="""
    Every script with and without `--bf16`, in turn: end-to-end steps, and learning alone.
    """,
)
def bf16(options: Options, device: torch.device) -> tuple[str, dict]:
    commands = BF16_COMMANDS[:1] if options.fast else BF16_COMMANDS
    calls = {}
    for command in commands:
        script, _, flags = command.partition(" ")
        for switch in ("", "--bf16"):
            all_flags = f"{SPEED_RUN} --max-seconds {5 if options.fast else 10} {flags} {switch}".strip()
            calls[f"{command} {switch}".strip()] = partial(harness.run, all_flags, options, script)
    measured = harness.alternate(options, calls)

    def learning_rates(runs: list[dict]) -> list[float]:
        return [one["samples_per_second"] / (one["train_fraction"] or 1) for one in runs]

    rows = []
    for command in commands:
        fp32 = measured[command]
        bf16 = measured[f"{command} --bf16"]
        row = [f"`{command}`"]
        steps = [column(runs, "env_steps_per_second") for runs in (fp32, bf16)]
        learning = [learning_rates(runs) for runs in (fp32, bf16)]
        for without, with_it in (steps, learning):
            row += [median_min_max(without), median_min_max(with_it), median_min_max(ratios(with_it, without), 2)]
        rows.append([*row, bf16[0]["precision"]])
    header = "command | env steps/s | with `--bf16` | × | "
    header += "samples/s while learning | with `--bf16` | × | precision with `--bf16`"
    return markdown_table(header, rows), {"runs": measured}


def with_busy_process(work: Callable[[], dict]) -> dict:
    """Call `work` while another process keeps one core busy."""
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as other:
        try:
            return work()
        finally:
            other.kill()


@table(
    "busy",
    caption="""
    End-to-end steps per second on an idle machine and with another process that keeps one core busy, in turn.

    These two scripts use all cores by default; the others use one.
    """,
)
def busy(options: Options, device: torch.device) -> tuple[str, dict]:
    cores = torch.get_num_threads()
    scripts = ["dqn_snake.py"] if options.fast else ["dqn_snake.py", "ppo_metta.py"]
    calls = {}
    for script in scripts:
        for name, threads in (("default", ""), ("all threads", f"--threads {cores}")):
            flags = f"{SPEED_RUN} --max-seconds {5 if options.fast else 10} {threads}".strip()
            run = partial(harness.run, flags, options, script)
            calls[f"{script}, {name}, idle"] = run
            calls[f"{script}, {name}, busy"] = partial(with_busy_process, run)
    measured = harness.alternate(options, calls)
    rows = []
    for script in scripts:
        rates = {}
        for name in ("default, idle", "default, busy", "all threads, idle", "all threads, busy"):
            rates[name] = column(measured[f"{script}, {name}"], "env_steps_per_second")
        gain = ratios(rates["default, busy"], rates["all threads, busy"])
        rows.append([f"`{script}`", *map(median_min_max, rates.values()), median_min_max(gain, 1)])
    header = "env steps/s of | default, idle | default, busy | "
    header += f"`--threads {cores}`, idle | `--threads {cores}`, busy | × of default when busy"
    return markdown_table(header, rows), {"runs": measured}


SIZES = {  # values by command, smallest first
    "dqn_snake.py --num-envs": [1, 16, 256, 4096, 65536],
    "dqn_snake.py --batch-size": [32, 512, 8192, 65536],
    "dqn_snake.py --board": ["6x6", "10x10", "16x16", "32x32"],
    "ppo_metta.py --size 40 --num-envs 32 --agents": [6, 24, 96],
    "ppo_metta.py --num-envs": [1, 16, 256, 2048],
    "dqn_mario_async.py --envs-per-collector": [1, 8, 64],
}


def amount(value: int | str) -> int:
    """Amount of work of a value: the cells of a board, or the number itself."""
    return math.prod(map(int, str(value).split("x")))


@table(
    "scaling",
    caption="""
    End-to-end cost of a step as one flag grows.

    A step of `ppo_metta.py` is one agent step. A size is skipped if its extrapolated memory would not fit. Peak memory
    is that of the largest process; it is not measured on a GPU.
    """,
)
def scaling(options: Options, device: torch.device) -> tuple[str, dict]:
    rows = []
    raw = []
    for command, values in SIZES.items():
        script, flag = command.split(" ", 1)
        base = f"{SPEED_RUN} --max-seconds {5 if options.fast else 8}"
        if script != "ppo_metta.py":
            base += " --learning-starts 1000"
        if options.fast:
            values = values[::3]
        peaks = []
        for i, value in enumerate(values):
            run = partial(harness.run, f"{base} {flag} {value}", options, script)
            try:
                if peaks:
                    growth = (peaks[-1] - peaks[0]) * amount(value) / amount(values[i - 1])
                    if peaks[0] + growth > 0.8 * harness.free_gib(device):
                        raise MemoryError
                runs = harness.alternate(options, {value: run})[value]
            except MemoryError:
                rows.append([f"`{command} {value}`", "too little memory", "", "", "", ""])
                break
            peaks.append(max(peak or 0.0 for peak in column(runs, "peak_memory_gib")))  # None on a GPU
            raw.append({"script": script, "flag": flag, "value": value, "runs": runs})
            row = [
                f"`{command} {value}`",
                median_min_max(column(runs, "env_steps_per_second")),
                f"{median(runs, 'updates_per_second'):,.1f}",
                f"{median(runs, 'samples_per_second'):,.1f}",
                f"{median(runs, 'replay_ratio'):.2f}",
                peak_gib(runs),
            ]
            rows.append(row)
    header = "command | env steps/s | updates/s | samples/s | replay ratio | peak GiB"
    return markdown_table(header, rows), {"cells": raw}

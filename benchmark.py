"""Measures what the scripts do, by running them beside their peers, and writes the pages in benchmarks/pages.

    python benchmark.py                          # --suite snake: 12 minutes on two cores
    python benchmark.py --suite switches --fast  # fewer rows and shorter runs
    python benchmark.py --suite sweep --write-env  # the fastest settings of the transformer go into .env
    python benchmark.py --compare benchmarks/results/env.json --suite env  # exit code 1 if a ratio to a peer fell
    python benchmark.py --suite gpu              # all that is worth knowing of one GPU, in ten minutes
    python benchmark.py --suite gpu --device cpu --fast  # its code with tiny sizes, in 90 seconds; nothing is written

Suites, with their tables, and how long they take on two cores:

    snake: env, act, train, update: the game, with the network, learning, the learner   12 minutes
    sb3: sb3-speed, sb3-learn, sweep: dqn_snake_sb3_compat.py beside the original       30 minutes
    metta: metta-env, metta-hearts, metta-speed, metta-peer, metta-subproc: the arena alone, without learning,
        ppo_metta.py by network, beside SB3, with workers: 22 minutes; metta-presets: five minutes a run
                                                                                        52 minutes
    metta-learn: metta-learn-arena, metta-learn-navigation, metta-learn-real:
        hearts after ten minutes of the arena, navigation and MettaGrid                  2 hours
    diagnose: speed, latency and memory of ppo_metta.py before and after each switch    30 minutes
    mario: mario-env, mario-async, mario-switches: games, emulator and collectors; collecting beside learning;
        collectors, games, batches and weights of dqn_mario_async.py                    35 minutes
    mario-levels: mario-learn, mario-learn-1, mario-learn-2: flags after 1, 5 and 15 minutes, three seeds, also of
        harder levels                                                                  2.5 hours
    mario-real: how far the real 1-1 is played after up to 20 minutes, and how it ends  70 minutes
    bf16, busy: --bf16 in every script; every script beside one busy process            25 minutes
    switches: every switch alone and together                                           40 minutes
    scaling: cost as games, batch, board and agents grow                                30 minutes
    learn: score after one, two and ten minutes, three seeds                                1 hour
    ppo-snake: ppo-snake-learn, ppo-snake-learn-600, ppo-snake-6x6, ppo-snake-20x20, ppo-snake-speed:
        score and boards filled after one, two and ten minutes, on a small board and, after half an hour, on a large
        one, three seeds; speed by games                                               2.5 hours
    ranks: torchrun with two ranks beside one, and what an all-reduce costs             20 minutes
    time-to-score: seconds to 5, 10, 20, 30 food beside SB3, up to 20 minutes a run      70 minutes
    time-to-score-ppo: the same with ppo_snake.py and the two fastest                   10 minutes
    time-to-hearts, time-to-distance: the same in the arena and in Mario               2.5 hours
    all: all of them. --suite also takes the name of a single table
    gpu: not among them, since it needs CUDA: games alone, every switch, food, arena, transformer   10 minutes

A table replaces its own section of its page and leaves the rest alone; raw results go to benchmarks/results, and
pictures are drawn from those. What is compared takes turns (A B A B ...); medians are over `--repeats` rounds after one
that does not count. Ratios are taken within a round.
"""

import json
import sys
from pathlib import Path

import torch
import tyro

from benchmarks import (
    all_scripts,
    gpu,
    harness,
    mario,
    metta,
    metta_speed,
    plots,
    ppo_snake,
    ranks,
    report,
    sb3_compat,
    snake,
    time_to,
)
from benchmarks.harness import SUITES, Options, fail

TABLE_FILES = [
    snake,
    ppo_snake,
    sb3_compat,
    metta,
    metta_speed,
    mario,
    all_scripts,
    ranks,
    time_to,
    gpu,
]  # with their tables


def check_options(options: Options, names: list[str], device: torch.device) -> None:
    """Refuse in one line what cannot work."""
    if options.repeats is not None and options.repeats < 1:
        fail(f"--repeats {options.repeats}: must be at least 1")
    if options.seconds is not None and options.seconds < 1:
        fail(f"--seconds {options.seconds}: must be at least 1")
    if options.device == "cuda" and device.type != "cuda":
        fail("--device cuda: this PyTorch sees no CUDA device; cpu and auto work")
    if options.suite == "gpu" and device.type == "cpu" and not options.fast:
        fail("--suite gpu: needs CUDA; with --device cpu --fast its code is tried out, and nothing is written")
    if options.seconds and "metta-presets" not in names:
        fail(f"--seconds {options.seconds}: is of the runs of metta-presets, which --suite {options.suite} has not")
    if options.write_env and "sweep" not in names:
        fail(f"--write-env: --suite {options.suite} has nothing to write; with sweep, sb3 or all it works")


def main(options: Options) -> None:
    use_cuda = options.device != "cpu" and torch.cuda.is_available()
    device = torch.device("cuda" if use_cuda else "cpu")
    names = SUITES.get(options.suite, [options.suite])
    check_options(options, names, device)
    reference = report.read_reference(options, names, device)
    report.check_files(options, names, device)
    if options.write_env:
        sb3_compat.write_env({})  # what cannot be written is refused before anything is measured

    about = harness.machine(device)
    records = []
    for name in names:
        print(f"{name}:", flush=True)
        text, raw = report.TABLES[name].measure(options, device)
        record = report.make_record(name, options, device, about | raw)
        records.append(record)
        print(text)
        if options.json is not None:
            report.write_results(Path(options.json), json.dumps(records))
        report.write_table(options, device, record, text)
        if options.write_env and name == "sweep":
            sb3_compat.write_env(raw["env"])

    if reference:
        if not report.compare(reference, records):
            raise SystemExit(1)
    elif names != ["gpu"]:  # of which there are no pictures
        plots.draw_all(device)


if __name__ == "__main__":
    try:
        main(tyro.cli(Options, description=__doc__))
    except MemoryError as error:
        sys.exit(str(error))

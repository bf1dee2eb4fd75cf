"""Measures the scripts and their peers, and writes the tables on benchmarks/pages.

    python benchmark.py                          # --suite snake: 12 minutes on two cores
    python benchmark.py --suite switches --fast  # smoke test: fewer rows, shorter runs
    python benchmark.py --suite sweep --write-env  # writes the fastest settings of the transformer to .env
    python benchmark.py --compare benchmarks/results/env.json --suite env  # exit code 1 if a ratio is lower
    python benchmark.py --suite gpu              # one GPU in ten minutes
    python benchmark.py --suite gpu --device cpu --fast  # smoke test on a CPU, writes nothing

Suites, their tables, and their time on two cores:

    headline: the tables behind README's results                                       5.5 hours
    smoke: speed of every script; with --compare benchmarks/results/smoke.json, whether one lost 10 %  2 minutes
    snake: env, act, train, update: dqn_snake.py's game, network, training and learner  12 minutes
    sb3: sb3-speed, sb3-learn, sweep: dqn_snake_sb3_compat.py compared with SB3         30 minutes
    metta: metta-env, metta-hearts, metta-speed, metta-peer, metta-subproc, metta-presets: the arena alone, baseline
        players, ppo_metta.py by network, compared with SB3, with workers; presets     52 minutes
    metta-learn: metta-learn-arena, metta-learn-cores, metta-learn-navigation, metta-learn-memory, metta-learn-real:
        hearts after ten minutes of the arena, navigation and MettaGrid, three of a map to remember  2.5 hours
    diagnose: speed, latency and memory of ppo_metta.py by switch                       30 minutes
    mario: mario-env, mario-async, mario-switches: games, emulator and collectors; parallel collecting; switches
                                                                                        35 minutes
    mario-levels: mario-learn, mario-learn-1, mario-learn-2, mario-learn-3: flags after 1, 5 and 15 minutes at four
        difficulties                                                                     3 hours
    mario-real: distance and flags in the real 1-1 after up to 20 minutes               70 minutes
    bf16, busy: scripts with --bf16; scripts with one core kept busy                    25 minutes
    switches: every switch of dqn_snake.py                                              40 minutes
    scaling: cost of a step as games, batch, board and agents grow                      30 minutes
    learn: score of dqn_snake.py after two and ten minutes                             40 minutes
    ppo-snake: ppo-snake-learn, ppo-snake-learn-600, ppo-snake-6x6, ppo-snake-20x20, ppo-snake-speed: score and full
        boards of ppo_snake.py by time and board size; speed by number of games        2.5 hours
    snake-recipes: snake-recipe, snake-peer, snake-peer-600, snake-peer-steps: parts of ppo_snake.py's recipe left out,
        and all of them in SB3's PPO, after minutes and after steps                     90 minutes
    ranks: torchrun with two ranks, and the cost of an all-reduce                       20 minutes
    time-to-score: seconds to 5, 10, 20, 30 food, ours and SB3, up to 20 minutes a run  70 minutes
    time-to-score-ppo: the same with ppo_snake.py and the two fastest                   10 minutes
    time-to-hearts, time-to-distance: the same in the arena and in Mario               2.5 hours
    time-to-points: CartPole, dqn_snake_sb3_compat.py and copies of other scripts        5 minutes
    all: all of the above. --suite also accepts a single table
    gpu: needs CUDA, not part of all: games alone, switches, food, arena, transformer   10 minutes

A table replaces its own section of its page; raw results are written to benchmarks/results, and plots are drawn from
them. Compared rows run in turn (A B A B ...); medians are over `--repeats` rounds after one warm-up round. Ratios are
computed per round.
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
    snake_recipe,
    time_to,
)
from benchmarks.harness import SUITES, Options, fail

TABLE_FILES = [
    snake,
    ppo_snake,
    snake_recipe,
    sb3_compat,
    metta,
    metta_speed,
    mario,
    all_scripts,
    ranks,
    time_to,
    gpu,
]  # importing them registers their tables


def check_options(options: Options, names: list[str], device: torch.device) -> None:
    """Fail with one line on options that cannot work."""
    if options.repeats is not None and options.repeats < 1:
        fail(f"--repeats {options.repeats}: must be at least 1")
    if options.seconds is not None and options.seconds < 1:
        fail(f"--seconds {options.seconds}: must be at least 1")
    if options.device == "cuda" and device.type != "cuda":
        fail("--device cuda: no CUDA device; use cpu or auto")
    if options.suite == "gpu" and device.type == "cpu" and not options.fast:
        fail("--suite gpu: needs CUDA; use --device cpu --fast for a smoke test")
    if options.seconds and "metta-presets" not in names:
        fail(f"--seconds {options.seconds}: only applies to metta-presets, which is not in --suite {options.suite}")
    if options.write_env and "sweep" not in names:
        fail("--write-env: needs --suite sweep, sb3 or all")


def main(options: Options) -> None:
    use_cuda = options.device != "cpu" and torch.cuda.is_available()
    device = torch.device("cuda" if use_cuda else "cpu")
    names = SUITES.get(options.suite, [options.suite])
    check_options(options, names, device)
    reference = report.read_reference(options, names, device)

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
    elif names != ["gpu"]:  # has no plots
        plots.draw_all(device)


if __name__ == "__main__":
    try:
        main(tyro.cli(Options, description=__doc__))
    except MemoryError as error:
        sys.exit(str(error))

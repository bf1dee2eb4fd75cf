"""Tables of the arena: the games alone, baseline players, and learning with ppo_metta.py."""

import statistics
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib import util

import torch

import ppo_metta
from benchmarks import harness
from benchmarks.games import gymnasium_rates, rule_book_rate
from benchmarks.harness import Options, column, fail, median, ratios
from benchmarks.metta_parts import ARENAS, REAL_METTAGRID, metta_args, metta_env_rate
from benchmarks.players import ARENA_STEPS, arena_games, random_hearts, scripted_hearts
from benchmarks.report import code, markdown_table, median_min_max, peak_gib, table
from envs.metta.rules import Rules


@table(
    "metta-env",
    caption="""
    Agent steps per second of the arena alone, random actions, 6 agents each, by number of parallel arenas.

    Baseline: the rule book in Python, one arena after another. "×" is ours / rule book, per round. The column marked G
    is Gymnasium's `benchmark_vector_step`, which also samples the actions; `MettaVectorEnv` uses NumPy arrays.
    """,
)
def metta_env(options: Options, device: torch.device) -> tuple[str, dict]:
    widths = (1, 128) if options.fast else (1, 16, 128, 1024)
    seconds = 0.3 if options.fast else 1.0
    rules = ppo_metta.rules_of(metta_args("", device.type))
    num_agents = tuple(Rules(**rules).num_agents * width for width in widths)
    vector = {"game": "MettaVectorEnv", "widths": num_agents, "seconds": seconds}
    calls = {("G",): partial(harness.in_subprocess, gymnasium_rates, **vector, **rules)}
    for width in widths:
        batched = {"flags": f"--num-envs {width}", "seconds": seconds, "device": device.type}
        calls["ours", width] = partial(harness.in_subprocess, metta_env_rate, **batched)
        if width <= 128:
            book = {"num_envs": width, "seconds": seconds}
            calls["book", width] = partial(harness.in_subprocess, rule_book_rate, **book)
    measured = harness.alternate(options, calls)
    compared = {}
    rows = []
    for width, vectors in zip(widths, zip(*measured["G",])):
        ours = measured["ours", width]
        row = [f"{width:,}", median_min_max(ours), "", "", median_min_max(vectors)]
        if width <= 128:
            book = measured["book", width]
            times = ratios(ours, book)
            compared[f"rule book, {width:,} arenas"] = times
            row[2] = median_min_max(book)
            row[3] = median_min_max(times, 2)
        rows.append(row)
    rates = {", ".join(map(str, key)): found for key, found in measured.items()}
    text = markdown_table("arenas | batched | rule book | × | `MettaVectorEnv`, G", rows)
    return text, {"widths": widths, "rates": rates, "ratios": compared}


@table(
    "metta-hearts",
    caption="""
    Hearts per agent and episode of baseline players, over whole episodes.

    The scripted player takes the shortest path to the nearest useful object: in the arena from mine to generator to
    altar, in navigation to the nearest altar with a heart. MettaGrid is the real environment, mines and altars.
    """,
)
def metta_hearts(options: Options, device: torch.device) -> tuple[str, dict]:
    scripted_episodes = 24 if options.fast else 120
    random_episodes = 120 if options.fast else 2400
    games = dict(ARENAS)
    if util.find_spec("mettagrid"):
        games["MettaGrid"] = REAL_METTAGRID
    by_script = {}
    by_chance = {}
    with ThreadPoolExecutor(harness.CORES) as pool:  # nothing is timed here
        for name, flags in ARENAS.items():
            play = partial(harness.in_subprocess, scripted_hearts, flags=flags, agent_episodes=scripted_episodes)
            by_script[name] = pool.submit(play)
        for name, flags in games.items():
            play = partial(harness.in_subprocess, random_hearts, flags=flags, agent_episodes=random_episodes)
            by_chance[name] = pool.submit(play)
    hearts = {
        "random": {name: future.result() for name, future in by_chance.items()},
        "scripted": {name: future.result() for name, future in by_script.items()},
    }
    rows = []
    for name in games:
        row = [name, f"{hearts['random'][name]:.3f}", "–"]
        if name in hearts["scripted"]:
            row[2] = f"{hearts['scripted'][name]:.2f}"
        rows.append(row)
    header = f"game | random, {random_episodes:,} agent episodes | scripted, {scripted_episodes}"
    return markdown_table(header, rows), {"hearts": hearts}


def metta_run(flags: str, options: Options) -> dict:
    """Summary of a run of ppo_metta.py, with agent steps per second of rollout and of learning time."""
    one = harness.run(flags, options, "ppo_metta.py")
    for phase in ("rollout", "train"):
        one[f"{phase}_steps_per_second"] = one["env_steps_per_second"] / max(one[f"{phase}_fraction"], 1e-9)
    return one


def check_mettagrid(name: str) -> None:
    if util.find_spec("mettagrid") is None:
        fail(f"--suite {name}: mettagrid is not installed; pip install -r requirements-games.txt installs it")


@table(
    "metta-presets",
    caption="""
    Metta's presets at equal wall-clock time: hearts per agent and episode of the final evaluation, by seed.

    Both learn navigation with the same network; `ultra-fast` has more parallel games, larger batches and minibatches,
    and so fewer updates. It uses 16 workers if there are enough cores.
    """,
)
def metta_presets(options: Options, device: torch.device) -> tuple[str, dict]:
    seconds = 20 if options.fast else 300
    if options.seconds is not None:
        seconds = options.seconds
    rows = []
    raw = []
    for preset in ("original", "ultra-fast"):
        flags = f"--preset {preset} --max-seconds {seconds} --eval-every 0"
        if options.fast:
            flags += " --eval-episodes 24"
        runs = [metta_run(f"{flags} --seed {seed}", options) for seed in options.seeds]
        raw += runs
        scores = column(runs, "eval_score_mean")
        row = [
            f"`--preset {preset}`",
            metta_args(flags, device.type).num_workers,
            median_min_max(column(runs, "env_steps_per_second")),
            f"{median(runs, 'updates_per_second'):.2f}",
            f"{median(runs, 'replay_ratio'):.2f}",
            f"{median(runs, 'env_steps'):,.0f}",
            " · ".join(f"{score:.2f}" for score in scores),
            f"{statistics.mean(scores):.2f}",
            peak_gib(runs, digits=1),
        ]
        rows.append(row)
    header = "flags | workers | agent steps/s | updates/s | replay ratio | agent steps | hearts, seeds "
    header += f"{' · '.join(map(str, options.seeds))} | mean | peak GiB"
    return f"{markdown_table(header, rows)}\n\n{seconds} seconds per run.", {"runs": raw}


def metta_learn(options: Options, variants: list[str], game: str = "", seconds: int = 600) -> tuple[str, dict]:
    """Table of one game: final hearts by flags and seed, and of baseline players.

    Two variants of a seed run in parallel, one core each. A single one has all cores.
    """
    budget = f"--max-seconds {20 if options.fast else seconds} --eval-every 0"
    if len(variants) > 1:
        budget += " --threads 1"
    found = {flags: [] for flags in variants}
    for seed in options.seeds:
        with ThreadPoolExecutor(2) as pool:
            runs = pool.map(lambda flags: metta_run(" ".join([budget, flags, f"--seed {seed}"]), options), variants)
            for flags, run in zip(variants, runs):
                found[flags].append(run)
    by_chance = harness.in_subprocess(random_hearts, flags=game, agent_episodes=240)
    by_script = None
    if game != REAL_METTAGRID:
        by_script = harness.in_subprocess(scripted_hearts, flags=game, agent_episodes=120)
    rows = []
    for flags, runs in found.items():
        scores = column(runs, "eval_score_mean")
        mean = statistics.mean(scores)
        row = [
            code(flags),
            " · ".join(f"{score:.2f}" for score in scores),
            f"{mean:.2f}",
            f"{by_chance:.2f}",
            "–",
            "–",
            f"{median(runs, 'env_steps'):,.0f}",
            median_min_max(column(runs, "env_steps_per_second")),
        ]
        if by_script:
            row[4] = f"{by_script:.1f}"
            row[5] = f"{mean / by_script:.0%}"
        rows.append(row)
    header = f"flags | hearts, seeds {' · '.join(map(str, options.seeds))} | mean | random | scripted | of scripted"
    text = markdown_table(f"{header} | agent steps | agent steps/s", rows)
    return text, {"runs": found, "random": by_chance, "scripted": by_script}


@table(
    "metta-learn-arena",
    caption="""
    `ppo_metta.py`, ten minutes per seed on one core: mean hearts over 240 agent episodes at the end.

    Without memory (the default) and with a MinGRU, both runs of a seed in parallel. Baselines: random and scripted
    players, as in `--suite metta-hearts`. Target on two cores: 20 hearts.

    The second table: what an agent's step does, in games on the rule book.
    """,
)
def metta_learn_arena(options: Options, device: torch.device) -> tuple[str, dict]:
    text, raw = metta_learn(options, ["--rnn none", "--rnn mingru"])
    folders = {"scripted": [None]}
    for flags, runs in raw["runs"].items():
        folders[flags] = [str(harness.run_folder(one["run"])) for one in runs]
    play = partial(harness.in_subprocess, arena_games, flags="", games=2 if options.fast else 20)
    played = {who: [play(run=run) for run in runs] for who, runs in folders.items()}
    rows = []
    for who, games in played.items():
        row = [code(who) if who in raw["runs"] else who, f"{statistics.mean(column(games, 'hearts')):.2f}"]
        for step in ARENA_STEPS:
            row.append(f"{statistics.mean(one['steps'][step] for one in games):.0%}")
        rows.append(row)
    text += "\n\n" + markdown_table(" | ".join(["player", "hearts", *ARENA_STEPS]), rows)
    return text, raw | {"played": played}


@table(
    "metta-learn-cores",
    caption="""
    As metta-learn-arena, at the defaults, on all cores. Target: more than the scripted player, with every seed.

    The picture: where agents spend the 1,000 steps of one game on the rule book, seed 1 and the scripted player.
    """,
)
def metta_learn_cores(options: Options, device: torch.device) -> tuple[str, dict]:
    text, raw = metta_learn(options, [""])
    first, *_ = raw["runs"][""]
    play = partial(harness.in_subprocess, arena_games, flags="", games=1)
    learned = play(run=str(harness.run_folder(first["run"])))
    return text, raw | {"played": {"learned": [learned], "scripted": [play()]}}


@table(
    "metta-learn-navigation",
    caption="""
    As metta-learn-arena, in navigation. Target on two cores: 25 hearts.
    """,
)
def metta_learn_navigation(options: Options, device: torch.device) -> tuple[str, dict]:
    game = ARENAS["navigation"]
    return metta_learn(options, [f"{game} --rnn none", f"{game} --rnn mingru"], game)


@table(
    "metta-learn-memory",
    caption="""
    As metta-learn-arena, in `MettaMemory-v0`, three minutes per seed.

    The altar is at one of four ends, out of sight of the mines, and stays there for the episode. The scripted player
    sees the whole map.
    """,
)
def metta_learn_memory(options: Options, device: torch.device) -> tuple[str, dict]:
    game = "--env-id MettaMemory-v0"
    flags = f"{game} --num-steps 64 --bptt-horizon 64 --ent-coef 0.01"  # a round trip takes 19 to 50 steps
    return metta_learn(options, [f"{flags} --rnn {rnn}" for rnn in ("none", "mingru", "gru", "lstm")], game, 180)


@table(
    "metta-learn-real",
    caption="""
    As metta-learn-arena, in the real MettaGrid: mines and altars, without a scripted player.

    The games run in the learner process. Target: five times the hearts of random play.
    """,
)
def metta_learn_real(options: Options, device: torch.device) -> tuple[str, dict]:
    check_mettagrid("metta-learn-real")
    game = f"{REAL_METTAGRID} --num-workers 0"
    return metta_learn(options, [f"{game} --rnn none", f"{game} --rnn mingru"], REAL_METTAGRID)

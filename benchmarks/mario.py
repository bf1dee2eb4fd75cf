"""Tables of dqn_mario_async.py: games, collectors, switches and learning."""

from collections import Counter
from functools import partial

import numpy as np
import torch

import dqn_mario_async
from benchmarks import games, harness
from benchmarks.games import emulator_rate, gymnasium_rates, mario_rates
from benchmarks.harness import SPEED_RUN, Options, column, measure_rate, median, million_steps, ratios
from benchmarks.players import MARIO_PLAYERS, mario_games
from benchmarks.report import active_switches, code, markdown_table, median_min_max, table

SCRIPT = "dqn_mario_async.py"


def collector_rates(env_id: str, widths: tuple[int, ...], seconds: float) -> list[float]:
    """Agent steps per second of a collector of dqn_mario_async.py on one core, by its number of games.

    The ring is emptied at no cost, and new weights arrive every 25 steps, about as often as in a run.
    """
    script = dqn_mario_async
    cpu = torch.device("cpu")
    rates = []
    for width in widths:
        flags = {"env_id": env_id, "envs_per_collector": width, "num_collectors": 1, "noop_max": 0}
        args = script.fill_defaults(script.Args(device="cpu", **flags), cpu)
        weights = torch.cat([weight.detach().flatten() for weight in script.QNetwork(args).parameters()])
        ring = script.Ring(args.ring_blocks, script.block_fields(args))
        broadcast = script.Broadcast(weights)
        broadcast.progress.fill_(0.5)  # exploration at its final value
        collector = script.Collector(args, 0, 0, ring, broadcast)

        def work() -> None:
            broadcast.version.add_(2)  # as if new weights had arrived
            for _ in range(25):
                collector.step()
                ring.release(1)

        rates.append(measure_rate(work, 25 * width, seconds))
    return rates


def real_game_calls(options: Options) -> dict:
    """The real game: the emulator, a collector alone, and a run."""
    seconds = 1 if options.fast else 4
    budget = 12 if options.fast else 18
    flags = f"{SPEED_RUN} --max-seconds {budget} --num-collectors 1 --noop-max 0 --env-id SuperMarioBros"
    emulator = partial(harness.in_subprocess, emulator_rate, True, seconds=seconds)
    collector = partial(harness.in_subprocess, collector_rates, True, seconds=seconds)
    return {
        "bare emulator": partial(emulator, refresh=False),
        "bare emulator, its library refreshing the RAM": partial(emulator, refresh=True),
        "a collector": lambda: collector(env_id="SuperMarioBros", widths=(1,))[0],
        f"`{SCRIPT} {flags}`": lambda: harness.run(flags, options, SCRIPT)["env_steps_per_second"],
    }


@table(
    "mario-env",
    caption="""
    Speed of Mario on one core, in agent steps per second (4 frames each, 84x84 pictures).

    First our own game, by number of parallel games: with random actions, and played by a collector of
    `dqn_mario_async.py` (inference, exploration and the push into its ring included). Columns marked G use Gymnasium's
    `benchmark_vector_step`. Then baseline players. Then the real game: the bare emulator (picture and the required RAM
    bytes only), a collector alone, and the collector of a training run. "×" is relative to the bare emulator, per
    round.
    """,
)
def mario_env(options: Options, device: torch.device) -> tuple[str, dict]:
    widths = (16,) if options.fast else (1, 4, 16, 64)
    num_games = 50 if options.fast else 1000
    one_core = partial(harness.in_subprocess, one_core=True, widths=widths, seconds=0.5 if options.fast else 1.0)
    our_calls = {
        "game alone": lambda: one_core(mario_rates),
        "collector": lambda: one_core(collector_rates, env_id="MarioLike-v0"),
        "MarioVectorEnv": lambda: one_core(gymnasium_rates, game="MarioVectorEnv"),
        "MarioEnv": lambda: one_core(gymnasium_rates, game="MarioEnv"),
    }
    missing = games.missing_rom()
    real_calls = {} if missing else real_game_calls(options)
    calls = our_calls.copy()
    calls.update(real_calls)
    measured = harness.alternate(options, calls)

    columns = []
    for name in our_calls:
        columns.append([median_min_max(rates) for rates in zip(*measured[name])])
    rows = [[f"{width:,}", *row] for width, *row in zip(widths, *columns)]
    header = "games | game alone | with a collector | `MarioVectorEnv`, G | `MarioEnv` in `SyncVectorEnv`, G"
    tables = [markdown_table(header, rows)]

    players = {}
    for player in MARIO_PLAYERS:
        players[player] = harness.in_subprocess(mario_games, player=player, games=num_games)
    rows = [[player, f"{flags:.1%}", f"{distance:,.0f}"] for player, (flags, distance) in players.items()]
    header = f"{num_games:,} games on unseen levels, easiest difficulty | flags | mean distance, pixels"
    tables.append(markdown_table(header, rows))

    compared = {name: ratios(measured[name], measured["bare emulator"]) for name in real_calls}
    rows = [[name, median_min_max(measured[name]), median_min_max(times, 2)] for name, times in compared.items()]
    tables.append(missing or markdown_table("the real game, one core | agent steps/s | ×", rows))
    raw = {"widths": widths, "rates": measured, "players": players, "ratios": compared}
    return "\n\n".join(tables), raw


@table(
    "mario-async",
    caption="""
    Collecting and learning in parallel or in turn, at the replay ratio at which both cost the same.

    16 games; one collector process and one learner thread, or `--num-collectors 0` with one thread and with all. A
    learner that falls behind has a lower replay ratio than requested, so rows are compared by paid steps/s: env steps/s
    times the reached share of the requested replay ratio. "×" is parallel relative to the row, per round. Produced and
    stored are transitions, from the collectors and in the replay buffer; waiting is the mean time to push a step.
    """,
)
def mario_async(options: Options, device: torch.device) -> tuple[str, dict]:
    budget = 12 if options.fast else 18
    base = f"{SPEED_RUN} --max-seconds {budget} --learning-starts 1000 --envs-per-collector 16"
    flags = {"in parallel": "--num-collectors 1 --threads 1", "in turn": "--num-collectors 0 --threads 1"}
    threads = torch.get_num_threads()
    if threads > 1 and not options.fast:
        flags[f"in turn, {threads} threads"] = f"--num-collectors 0 --threads {threads}"
    trial = harness.run(f"{base} {flags['in turn']} --replay-ratio 1", options, SCRIPT)
    asked = float(f"{trial['replay_ratio'] * (1 / trial['train_fraction'] - 1):.2g}")
    calls = {}
    for who, how in flags.items():
        calls[who] = partial(harness.run, f"{base} {how} --replay-ratio {asked}", options, SCRIPT)
    measured = harness.alternate(options, calls)
    paid = {}
    for who, runs in measured.items():
        paid[who] = [one["env_steps_per_second"] * min(one["replay_ratio"] / asked, 1) for one in runs]
    compared = {who: ratios(paid["in parallel"], paid[who]) for who in paid if who != "in parallel"}
    rows = []
    for who, runs in measured.items():
        row = [
            who,
            median_min_max(column(runs, "env_steps_per_second")),
            f"{median(runs, 'replay_ratio'):.2f}",
            median_min_max(paid[who]),
            median_min_max(compared[who], 2) if who in compared else "",
            f"{median(runs, 'train_fraction'):.0%}",
            f"{median(runs, 'produced'):,.0f}",
            f"{median(runs, 'stored'):,.0f}",
            f"{median(runs, 'producer_wait_ms_mean'):.3f}",
        ]
        rows.append(row)
    header = "mode | env steps/s | replay ratio | paid steps/s | × | learning | produced | stored | waiting, ms"
    text = markdown_table(header, rows)
    commands = ", ".join(f"`{how}` ({who})" for who, how in flags.items())
    text += f"\n\nAll with `{SCRIPT} {base} --replay-ratio {asked}`, and {commands}."
    return text, {"asked": asked, "runs": measured, "ratios": compared}


@table(
    "mario-switches",
    caption="""
    `dqn_mario_async.py` by number of collectors and games, batch size and weight sync interval, in turn.

    "×" compares samples/s, the bottleneck, with the default, per round.
    """,
)
def mario_switches(options: Options, device: torch.device) -> tuple[str, dict]:
    switches = [
        "",
        "--num-collectors 0",
        "--num-collectors 2",
        "--num-collectors 4",
        "--envs-per-collector 4",
        "--envs-per-collector 64",
        "--batch-size 128",
        "--batch-size 128 --accumulate 4",
        "--sync-every 1",
        "--bf16",
        "--compile --max-seconds 60",
    ]
    if device.type == "cuda":
        switches += ["--tf32", "--fp16", "--cudagraph", "--cudagraph --bf16"]
    if options.fast:
        switches = switches[:2]
    base = f"{SPEED_RUN} --learning-starts 1000 --max-seconds {10 if options.fast else 14}"
    calls = {flags: partial(harness.run, f"{base} {flags}".strip(), options, SCRIPT) for flags in switches}
    measured = harness.alternate(options, calls)
    samples = {flags: column(runs, "samples_per_second") for flags, runs in measured.items()}
    rows = []
    for flags, runs in measured.items():
        row = [
            code(flags),
            median_min_max(column(runs, "env_steps_per_second")),
            median_min_max(samples[flags]),
            median_min_max(ratios(samples[flags], samples[""]), 2),
            f"{median(runs, 'replay_ratio'):.2f}",
            f"{median(runs, 'ring_fill'):.0%}",
            f"{median(runs, 'weight_age'):.1f}",
            active_switches(runs[0]),
        ]
        rows.append(row)
    header = "flags | env steps/s | samples/s | × | replay ratio | ring fill | weight age, updates"
    return markdown_table(f"{header} | active", rows), {"runs": measured}


# ------------------------------------------------------------------------------------------------ learning


def value_after(curve: list[list[float]], minutes: float) -> float:
    """Value of the first point after that time, or of the last point."""
    return next((value for seconds, value in curve if seconds >= 60 * minutes), curve[-1][1])


def learn_mario(options: Options, difficulty: int) -> tuple[str, dict]:
    flags = "--max-seconds 30 --eval-every 10" if options.fast else "--max-seconds 900"
    if difficulty:
        flags += f" --difficulty {difficulty}"
    rows = []
    raw = []
    for seed in options.seeds:
        one = harness.run(f"{flags} --seed {seed}", options, SCRIPT)
        folder = harness.run_folder(one["run"])
        curves = {tag: harness.wall_clock_curve(folder, tag) for tag in ("eval/flags", "charts/flags")}
        raw.append(one | {"curves": curves})
        row = [seed]
        for minutes in (1, 5):
            greedy = value_after(curves["eval/flags"], minutes)
            exploring = value_after(curves["charts/flags"], minutes)
            row.append(f"{greedy:.0%}, {exploring:.0%}")
        row.append(f"{one['eval_flags']:.0%}")
        row.append(f"{one['eval_distance_mean']:,.0f}")
        row.append(million_steps([one]))
        row.append(f"{one['env_steps_per_second']:,.0f}")
        row.append(f"{one['replay_ratio']:.2f}")
        row.append(f"{one['producer_wait_ms_mean']:.3f}")
        rows.append(row)
    random_flags, distance = harness.in_subprocess(mario_games, player="random", games=1000, difficulty=difficulty)
    rows.append(["random", *[f"{random_flags:.0%}"] * 3, f"{distance:,.0f}", *[""] * 4])
    header = "seed | after 1 minute: unseen, exploring | after 5 | end: unseen | distance, pixels | "
    text = markdown_table(f"{header}million env steps | env steps/s | replay ratio | waiting, ms", rows)
    return text, {"runs": raw, "random": [random_flags, distance]}


@table(
    "mario-learn",
    caption="""
    `dqn_mario_async.py` at its defaults, 15 minutes per seed: share of games that reach the flag.

    During training: the first evaluation after that time (10 greedy games on unseen levels), and the collectors'
    exploring games on training levels. At the end: 100 greedy games on unseen levels. Waiting is the mean time to push
    a step.
    """,
)
def mario_learn(options: Options, device: torch.device) -> tuple[str, dict]:
    return learn_mario(options, 0)


@table(
    "mario-learn-1",
    caption="""
    As mario-learn, with `--difficulty 1`: stairs, pipes of two heights, less flat ground.
    """,
)
def mario_learn_1(options: Options, device: torch.device) -> tuple[str, dict]:
    return learn_mario(options, 1)


@table(
    "mario-learn-2",
    caption="""
    As mario-learn, with `--difficulty 2`: one more gap, one more group of walkers, two walkers per group.
    """,
)
def mario_learn_2(options: Options, device: torch.device) -> tuple[str, dict]:
    return learn_mario(options, 2)


@table(
    "mario-learn-3",
    caption="""
    As mario-learn, with `--difficulty 3`: one more gap, gaps of up to five tiles, one more stairs, less flat ground.
    """,
)
def mario_learn_3(options: Options, device: torch.device) -> tuple[str, dict]:
    return learn_mario(options, 3)


def first_reading_above(curve: list[list[float]], limit: float) -> str:
    """Minutes to the first point above `limit`."""
    return next((f"{seconds / 60:.1f}" for seconds, value in curve if value > limit), "–")


@torch.no_grad()
def real_game_ends(run: str, games: int, sticky: float = 0.0) -> list[list]:
    """Greedy games of a trained agent: distance in pixels, and "flag", "dead" or "stuck".

    With probability `sticky` an action (of 4 frames) is replaced by the one before (Machado et al. 2018, section 5).
    """
    script = dqn_mario_async
    random = np.random.default_rng(script.EVAL_SEED)
    _, checkpoint = script.load_checkpoint(script.Args(evaluate=run))
    args = script.Args(**checkpoint["args"])
    q_network = script.QNetwork(args)
    q_network.load_state_dict(checkpoint["q_network"])
    envs = script.make_envs(args, 1, script.EVAL_SEED)
    obs = envs.reset()
    action = np.zeros(1, np.int64)
    ends = []
    while len(ends) < games:
        if random.random() >= sticky:
            action = q_network(torch.from_numpy(obs)).argmax(1).numpy()
        obs, _, terminated, truncated, info = envs.step(action)
        if terminated[0] or truncated[0]:
            end = "dead" if terminated[0] else "stuck"
            if info["flag"][0]:
                end = "flag"
            ends.append([int(info["distance"][0]), end])
            action = np.zeros(1, np.int64)
    return ends


def ends_by_place(ends: list[list], width: int = 400) -> str:
    """Number of games that end in each `width` pixels, by outcome."""
    rows = []
    for first in range(0, 1 + max(distance for distance, _ in ends), width):
        here = Counter(end for distance, end in ends if first <= distance < first + width)
        rows.append([f"{first:,} to {first + width - 1:,}", here["dead"], here["stuck"], here["flag"]])
    return markdown_table(f"end of {len(ends)} greedy games, pixels from the start | dead | stuck | flag", rows)


@table(
    "mario-real",
    caption="""
    The real level 1-1, 20 minutes per seed: mean distance in pixels over greedy games with no-op starts.

    10 games per evaluation, once a minute, and 100 at the end; 100 games for random play. The flag is 3,121 pixels from
    the start (at x = 3,161). Games start after 0 to 30 no-op frames, so the 100 games have only 30 different starts,
    the same as in training. Sticky actions were not in training: in 100 more games each action is replaced by the one
    before with probability 0.25. The second table has another 100 games of each final agent, without them; stuck means
    no progress for 40 steps.
    """,
)
def mario_real(options: Options, device: torch.device) -> tuple[str, dict]:
    missing = games.missing_rom()
    if missing:
        return missing, {}
    episodes = 5 if options.fast else 100
    times = (1,) if options.fast else (1, 5, 10)
    flags = f"--env-id SuperMarioBros --max-seconds {40 if options.fast else 1200} --eval-episodes {episodes}"
    by_chance = harness.in_subprocess(mario_games, True, player="random", games=episodes, real=True)
    random_flags, random_distance = by_chance
    ends = []
    rows = []
    raw = []
    for seed in options.seeds:
        one = harness.run(f"{flags} --seed {seed}", options, SCRIPT)
        folder = harness.run_folder(one["run"])
        curve = harness.wall_clock_curve(folder, "eval/distance_mean")
        flag_curve = harness.wall_clock_curve(folder, "eval/flags")
        play = partial(harness.in_subprocess, real_game_ends, True, run=str(folder), games=episodes)
        run_ends = play(sticky=0.0)
        sticky_ends = play(sticky=0.25)
        ends += run_ends
        sticky_flags = [end for _, end in sticky_ends].count("flag") / episodes
        raw.append(one | {"curve": curve, "flag_curve": flag_curve, "ends": run_ends, "sticky_ends": sticky_ends})
        distance = one["eval_distance_mean"]
        row = [
            seed,
            *(f"{value_after(curve, minutes):,.0f}" for minutes in times),
            first_reading_above(flag_curve, 0),
            f"{distance:,.0f}",
            f"{one['eval_flags']:.0%}",
            f"{sticky_flags:.0%}",
            f"{distance / random_distance:.1f}",
            million_steps([one]),
            f"{one['env_steps_per_second']:,.0f}",
            f"{one['replay_ratio']:.2f}",
        ]
        rows.append(row)
    rows.append(["random", *[""] * (len(times) + 1), f"{random_distance:,.0f}", f"{random_flags:.0%}", *[""] * 5])
    header = "seed"
    for minutes in times:
        header += f" | after {minutes} minute" + ("s" if minutes > 1 else "")
    header += " | first greedy flag, minutes | end | flags at the end | with sticky actions | × random"
    header += " | million env steps | env steps/s | replay ratio"
    text = f"{markdown_table(header, rows)}\n\n{ends_by_place(ends)}\n\n`{SCRIPT} {flags} --seed S`"
    return text, {"runs": raw, "random": by_chance}

"""Speed of ppo_metta.py: by network, against Stable-Baselines3's PPO, with workers, by switch."""

import math
import statistics
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch

import ppo_metta
from benchmarks import harness, metta
from benchmarks.harness import SPEED_RUN, Options, column, median, ratios
from benchmarks.metta import metta_run
from benchmarks.metta_parts import (
    REAL_METTAGRID,
    metta_args,
    metta_env_rate,
    metta_latency,
    metta_mflops,
    metta_parts,
)
from benchmarks.report import active_switches, code, markdown_table, median_min_max, peak_gib, percent_min_max, table
from benchmarks.sb3_peers import sb3_arena_rate


@table(
    "metta-speed",
    caption="""
    Agent steps per second of `ppo_metta.py` by memory and width of the network.

    "rollouts" divides the steps by the rollout time (games included), "learning" by the rest; epochs and batches are
    the defaults. MFLOP is one forward pass per agent; the recurrent network closest to 0.5 costs as much as the LSTM in
    PufferLib's figure (published.md). Targets on two cores, end to end: 10,000 at the defaults, 25,000 at 0.5 MFLOP.
    """,
)
def metta_speed(options: Options, device: torch.device) -> tuple[str, dict]:
    widths = [f"--rnn mingru --hidden-size {width}" for width in range(64, 401, 16)]
    others = ["", "--hidden-size 256", "--rnn mingru"]
    variants = [*others, *widths]
    found = harness.in_subprocess(metta_mflops, variants=variants, device=device.type)
    mflops = dict(zip(variants, found))
    half = min(widths, key=lambda flags: abs(mflops[flags] - 0.5))
    variants = ["", half] if options.fast else [*others, half]
    base = f"{SPEED_RUN} --max-seconds {5 if options.fast else 6}"
    calls = {flags: partial(metta_run, f"{base} {flags}".strip(), options) for flags in variants}
    seconds = 1 if options.fast else 2
    calls["games"] = lambda: harness.in_subprocess(metta_env_rate, flags="", seconds=seconds, device=device.type)
    measured = harness.alternate(options, calls)
    games = measured.pop("games")
    rows = []
    for flags, runs in measured.items():
        row = [
            code(flags),
            f"{mflops[flags]:.2f}",
            median_min_max(column(runs, "rollout_steps_per_second")),
            median_min_max(column(runs, "train_steps_per_second")),
            median_min_max(column(runs, "env_steps_per_second")),
            f"{median(runs, 'replay_ratio'):.2f}",
        ]
        rows.append(row)
    text = markdown_table("flags | MFLOP | rollouts | learning | end to end | replay ratio", rows)
    text += f"\n\nThe games alone, default number, random actions: {median_min_max(games)} agent steps/s."
    return text, {"runs": measured, "games": games, "mflop": mflops}


def metta_run_by_phase(flags: str, options: Options) -> dict:
    """Summary of a run, with the microseconds per agent step of games, other rollout time, and learning."""
    one = metta_run(flags, options)
    means = harness.mean_scalars(harness.run_folder(one["run"]))
    spent = {phase: means.get(f"perf/{phase}_ms", 0) for phase in ("act", "env", "store", "learn", "log")}
    scale = 1e6 / one["env_steps_per_second"] / sum(spent.values())
    one["games"] = scale * spent["env"]
    one["rollouts"] = scale * (spent["act"] + spent["store"] + spent["log"])
    one["learning"] = scale * spent["learn"]
    return one


@table(
    "metta-peer",
    caption="""
    `ppo_metta.py` and SB3's PPO in the arena: same number of games, network, batch, minibatch and epochs.

    Neither has memory. SB3 runs with our batched games (a `VecEnv` written for this table) and with the rule book in
    Python, one arena after another, as it usually would; with one thread or all, whichever is faster. "×" is ours /
    SB3, per round; the target is 5. Microseconds are per agent step; other rollout time is acting and storing.
    """,
)
def metta_peer(options: Options, device: torch.device) -> tuple[str, dict]:
    seconds = 3 if options.fast else 6
    peer = partial(harness.in_subprocess, sb3_arena_rate, flags="", seconds=seconds, device=device.type)
    trials = {}
    for threads in sorted({1, torch.get_num_threads()}):
        trials[threads] = peer(rule_book=False, threads=threads)
    threads = max(trials, key=lambda threads: trials[threads]["env_steps_per_second"])
    calls = {
        "ours": lambda: metta_run_by_phase(f"{SPEED_RUN} --max-seconds {seconds + 1}", options),
        "SB3's PPO, our batched arena": lambda: peer(rule_book=False, threads=threads),
        "SB3's PPO, the rule book": lambda: peer(rule_book=True, threads=threads),
    }
    measured = harness.alternate(options, calls)
    rates = {name: column(results, "env_steps_per_second") for name, results in measured.items()}
    compared = {name: ratios(rates["ours"], rates[name]) for name in rates if name != "ours"}
    rows = []
    for name, results in measured.items():
        row = [name, median_min_max(rates[name]), ""]
        row += [f"{median(results, part):.1f}" for part in ("games", "rollouts", "learning")]
        if name in compared:
            row[2] = median_min_max(compared[name], 1)
        else:
            row[0] = "`ppo_metta.py`"
        rows.append(row)
    text = markdown_table("agent | agent steps/s | × | µs: games | other rollout | learning", rows)
    text += f"\n\nThreads of SB3: {threads}."
    return text, {"runs": measured, "trials": trials, "ratios": compared}


def workers_alone(flags: str, seconds: float, device: torch.device) -> dict[str, float]:
    """Agent steps per second of the games in one process per worker, and of acting without games."""
    settings = {"flags": f"{REAL_METTAGRID} {flags}".strip(), "seconds": seconds, "device": device.type}
    num_workers = metta_args(settings["flags"], device.type).num_workers
    with ThreadPoolExecutor(num_workers) as pool:
        rates = pool.map(lambda _: harness.in_subprocess(metta_env_rate, **settings), range(num_workers))
        games = sum(rates)
    acting = harness.in_subprocess(metta_latency, **settings)
    return {"games": games, "acting": 1000 * acting["agents"] / acting["all"][0]}


def possible_rate(alone: dict[str, float], args: ppo_metta.Args, device: torch.device) -> float:
    """Upper bound for workers and trainer, which share the cores of a machine without a GPU."""
    possible = min(alone["games"], alone["acting"])
    if device.type == "cpu":
        seconds = args.num_workers / alone["games"] + args.threads / alone["acting"]
        possible = min(possible, harness.CORES / seconds)
    return possible


@table(
    "metta-subproc",
    caption="""
    `ppo_metta.py --env-id mettagrid`: speed of worker processes and batches in flight, relative to an upper bound.

    All numbers are agent steps per second. "games": one process per worker with its part of the games, random actions,
    no synchronization. "acting": network and action sampling for one batch in flight, without games or storage.
    "bound": the lower of the two, or C / (W / games + T / acting) if W workers and T threads share C cores. "rollouts":
    a run without updates (`--update-epochs 0`). The bound of end to end is 1 / (1 / rollouts + 1 / learning). Target:
    85 % of both bounds.
    """,
)
def metta_subproc(options: Options, device: torch.device) -> tuple[str, dict]:
    metta.check_mettagrid("metta-subproc")
    variants = [""] if options.fast else ["", "--async-factor 1"]
    base = f"{SPEED_RUN} --max-seconds 9 {REAL_METTAGRID}"
    calls = {}
    for flags in variants:
        calls["alone", flags] = partial(workers_alone, flags, 1 if options.fast else 2, device)
        calls["rollouts", flags] = partial(metta_run, f"{base} --update-epochs 0 {flags}".strip(), options)
        calls["both", flags] = partial(metta_run, f"{base} {flags}".strip(), options)
    measured = harness.alternate(options, calls)
    rows = []
    raw = {}
    compared = {}
    for flags in variants:
        args = metta_args(f"{REAL_METTAGRID} {flags}", device.type)
        alone = measured["alone", flags]
        rollouts = measured["rollouts", flags]
        both = measured["both", flags]
        possible = [possible_rate(one, args, device) for one in alone]
        playing = column(rollouts, "env_steps_per_second")
        learning = column(both, "train_steps_per_second")
        end_to_end = column(both, "env_steps_per_second")
        ideal = [1 / (1 / play + 1 / learn) for play, learn in zip(playing, learning)]
        shares = {"rollouts": ratios(playing, possible), "end to end": ratios(end_to_end, ideal)}
        raw[flags] = {"alone": alone, "rollouts": rollouts, "both": both, "possible": possible, "shares": shares}
        for what, share in shares.items():
            compared[f"{what}, {flags or 'default'}"] = share
        row = [
            code(flags),
            args.num_workers,
            args.threads,
            median_min_max(column(alone, "games")),
            median_min_max(column(alone, "acting")),
            median_min_max(possible),
            median_min_max(playing),
            percent_min_max(shares["rollouts"]),
            median_min_max(learning),
            median_min_max(end_to_end),
            percent_min_max(shares["end to end"]),
        ]
        rows.append(row)
    header = "flags | workers | threads | games | acting | bound | rollouts | of bound | learning | end to end"
    return markdown_table(f"{header} | of bound", rows), {"settings": raw, "ratios": compared}


def metta_switches(device: torch.device) -> list[str]:
    switches = [
        "",
        "--bf16",
        "--rnn mingru",
        "--hidden-size 256",
        "--network box-cnn",
        "--network token-attention --max-seconds 20",
        "--vec-env subproc --max-seconds 14",
        "--compile --max-seconds 60",  # mostly compiling, which is not counted
    ]
    if device.type == "cuda":
        switches += ["--tf32", "--fp16", "--cudagraph", "--cudagraph --bf16", "--cudagraph --compile --bf16"]
    elif torch.get_num_threads() > 1:
        switches.insert(1, "--threads 1")
    return switches


@table(
    "diagnose",
    caption="""
    Speed, latency and memory of `ppo_metta.py` for the default and each switch.

    End to end and games alone are agent steps per second; "×" is relative to the default, per round. Acting is network
    and action sampling, mean / 95th / 99th percentile, for one agent and for a whole batch. With subproc, games alone
    is one worker and a batch is one batch in flight. Peak memory is that of the largest process; it is not measured on
    a GPU.
    """,
)
def diagnose(options: Options, device: torch.device) -> tuple[str, dict]:
    switches = ["", "--rnn mingru"] if options.fast else metta_switches(device)
    base = f"{SPEED_RUN} --max-seconds {5 if options.fast else 8}"
    settings = {"seconds": 0.3 if options.fast else 1, "device": device.type}
    calls = {}
    for flags in switches:
        calls["run", flags] = partial(metta_run, f"{base} {flags}".strip(), options)
        calls["parts", flags] = partial(harness.in_subprocess, metta_parts, flags=flags, **settings)
    measured = harness.alternate(options, calls)
    default_rates = column(measured["run", ""], "env_steps_per_second")
    rows = []
    raw = {}
    for flags in switches:
        runs = measured["run", flags]
        parts = measured["parts", flags]
        raw[flags] = {"runs": runs, "parts": parts}
        rates = column(runs, "env_steps_per_second")
        row = [code(flags), median_min_max(rates), median_min_max(ratios(rates, default_rates), 2)]
        row.append(f"{median(parts, 'env_steps_per_second'):,.0f}")
        for batch in ("one", "all"):
            percentiles = zip(*column(parts, batch))
            row.append(" / ".join(f"{statistics.median(values):.2f}" for values in percentiles))
        if device.type == "cuda":
            scalars = [harness.mean_scalars(harness.run_folder(one["run"])) for one in runs]
            gpu_util = [means.get("perf/gpu_util", math.nan) for means in scalars]
            raw[flags]["gpu_util"] = gpu_util
            row.append(f"{statistics.median(gpu_util):.0f}%")
        rows.append([*row, peak_gib(runs, statistics.median), active_switches(runs[0])])
    header = "flags | end to end | × | games alone | acting, one agent, ms | acting, all agents, ms"
    if device.type == "cuda":
        header += " | GPU utilization"
    text = markdown_table(f"{header} | peak GiB | active", rows)
    text += f"\n\nAll agents: {measured['parts', ''][0]['agents']:,}."
    if device.type != "cuda":
        text += " GPU utilization and memory: not measured without a GPU."
    return text, {"switches": raw}

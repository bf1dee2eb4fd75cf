"""Tables of training time to a score, ours and Stable-Baselines3, in all three games and in CartPole."""

import tempfile
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat

import torch

from benchmarks import harness, sb3_peers
from benchmarks.harness import Options
from benchmarks.own_game import SB3_AGENTS, copied_script, page_flags, sb3_cartpole_curve
from benchmarks.report import markdown_table, median_min_max, table
from benchmarks.sb3_compat import tuned_flags
from benchmarks.sb3_peers import MARIO_AGENTS, SNAKE_AGENTS, sb3_arena_curve, sb3_curve, sb3_mario_curve


def seconds_to_goal(curve: list[list[float]], goal: float) -> float | None:
    """Seconds at the first evaluation that reached `goal`; None if none did."""
    return next((seconds for seconds, score in curve if score >= goal), None)


def needs_another_seed(curves: list, goals: tuple) -> bool:
    """An agent whose first seed misses the first goal gets no other seed."""
    return not curves or seconds_to_goal(curves[0], goals[0]) is not None


def time_to_goals(goals: tuple, unit: str, curves: dict[str, list], ends: dict[str, float]) -> tuple[str, dict]:
    """Tables of the seconds to each goal, and of the speedup of the first agent over the others.

    `curves` has one curve per agent and seed; `ends` is the time limit of runs that miss a goal.
    """
    seconds = {}  # by agent, goal and seed
    for name, runs in curves.items():
        seconds[name] = [[seconds_to_goal(curve, goal) for curve in runs] for goal in goals]
    rows = []
    for name, by_goal in seconds.items():
        row = [name]
        for found in by_goal:
            row.append(" · ".join(f"> {ends[name]:,.0f}" if at is None else f"{at:,.1f}" for at in found))
        rows.append(row)
    ours = next(iter(curves))
    speedups = []
    compared = {}
    for name in list(curves)[1:]:
        row = [name]
        for goal, found, own in zip(goals, seconds[name], seconds[ours]):
            if None in own:
                row.append("–")
                continue
            times = [(at or ends[name]) / our for at, our in zip(found, own)]
            compared[f"{name}, {goal} {unit}"] = times
            bound = "> " if None in found else ""
            row.append(bound + median_min_max(times, 1))
        speedups.append(row)
    header = " | ".join(f"{goal:,} {unit}" for goal in goals)
    text = markdown_table(f"seconds to | {header}", rows)
    text += "\n\n" + markdown_table(f"speedup of {ours} over | {header}", speedups)
    return text, compared


def commands(ours: str, plans: dict) -> str:
    """Commands below the tables."""
    threads = ", ".join(f"{plan['threads']} ({name})" for name, plan in plans.items())
    return f"\n\nOurs: `python {ours}`. Threads of SB3: {threads}."


@table(
    "time-to-score",
    caption="""
    Training time in seconds until an evaluation (100 greedy games) reaches a mean score, per seed.

    All agents learn `Snake-v0` and are evaluated on the same games: ours about every second, SB3's every second, later
    every twentieth of the time so far. Imports, setup and evaluation are not counted. ">": not reached within 20
    minutes at SB3's defaults, 10 with our settings; an agent that reaches no score has one seed. "ours" has half the
    width, no double DQN and a third of the exploration of its defaults, which helps in the first minute. SB3's agents:
    defaults; our view and gamma, with one or all threads, whichever is faster; DQN with as much of our recipe as SB3
    supports. DQN explores over a tenth of the steps of 20 minutes at its defaults, of 2 minutes with our view.
    """,
)
def time_to_score(options: Options, device: torch.device) -> tuple[str, dict]:
    goals = (5, 10, 20, 30)
    steps = 60_000 if options.fast else 600_000
    explored = 0.03
    agents = list(SNAKE_AGENTS)[1:3] if options.fast else SNAKE_AGENTS
    plans, ends = sb3_peers.plan_agents(agents, {"our view": 120}, 1200, sb3_peers.sb3_rate, 5, options, device)
    for name in agents:
        if "recipe" in name:
            plans[name] |= {"width": 256, "explored": round(explored * steps)}
    flags = f"--total-timesteps {steps} --eval-every 1.5 --log-every 1 --eval-episodes 1000 --checkpoint-every 0"
    variants = {
        "ours": f"{flags} --hidden-size 256 --no-double --exploration-fraction {explored}",
        "ours, defaults": flags,
    }
    curves = {name: [] for name in [*variants, *plans]}
    for seed in options.seeds:
        for name, flags in variants.items():
            one = harness.run(f"{flags} --seed {seed}", options)
            curves[name].append(harness.eval_curve(harness.run_folder(one["run"])))
        for name, plan in plans.items():
            limits = {"seconds": ends[name], "every": 1, "goal": goals[-1], "seed": seed, "device": device.type}
            if needs_another_seed(curves[name], goals):
                curves[name].append(harness.in_subprocess(sb3_curve, **plan, **limits))
    for name in variants:
        ends[name] = curves[name][0][-1][0]
    text, compared = time_to_goals(goals, "food", curves, ends)
    text += commands(f"dqn_snake.py {variants['ours']}", plans)
    return text, {"goals": goals, "curves": curves, "plans": plans, "ends": ends, "ratios": compared}


@table(
    "time-to-score-ppo",
    caption="""
    As time-to-score, with `ppo_snake.py` and the two fastest agents of that table.

    Evaluations are more frequent: every 0.7 seconds including the evaluation, SB3's every 0.5. `ppo_snake.py` anneals
    its learning rate over these 130,000 steps; the others keep it constant.
    """,
)
def time_to_score_ppo(options: Options, device: torch.device) -> tuple[str, dict]:
    goals = (5, 10, 20, 30)
    peer = "SB3's DQN, our recipe"
    threads = torch.get_num_threads()
    steps = 30_000 if options.fast else 100_000
    explored = 18_000
    flags = "--eval-every 0.7 --log-every 0.2 --eval-episodes 1000 --checkpoint-every 0"
    ppo = f"{flags} --total-timesteps {round(1.3 * steps)}"
    best = "--hidden-size 256 --learning-rate 1e-3 --num-steps 8 --num-minibatches 4"
    dqn = f"{flags} --total-timesteps {steps} --hidden-size 256 --no-double --no-anneal-lr"
    dqn += f" --exploration-fraction {explored / steps:g}"
    variants = {
        "ppo_snake.py, best settings": ("ppo_snake.py", f"{ppo} {best}"),
        "ppo_snake.py, defaults": ("ppo_snake.py", ppo),
        "dqn_snake.py, best settings": ("dqn_snake.py", dqn),
    }
    limits = {"seconds": 60, "every": 0.5, "goal": goals[-1], "device": device.type, "threads": threads}
    limits |= {"width": 256, "explored": explored}
    curves = {name: [] for name in [*variants, peer]}
    for seed in options.seeds:
        for name, (script, settings) in variants.items():
            one = harness.run(f"{settings} --seed {seed}", options, script)
            curves[name].append(harness.eval_curve(harness.run_folder(one["run"])))
        curves[peer].append(harness.in_subprocess(sb3_curve, name=peer, seed=seed, **limits))
    ends = {name: runs[0][-1][0] for name, runs in curves.items()}
    text, compared = time_to_goals(goals, "food", curves, ends)
    for name, (script, settings) in variants.items():
        text += f"\n\n{name}: `python {script} {settings}`."
    return text, {"goals": goals, "curves": curves, "ratios": compared}


@table(
    "time-to-hearts",
    caption="""
    Training time in seconds until an evaluation (48 agent episodes, every 20 seconds) reaches a number of hearts.

    As time-to-score, in the arena, up to 10 minutes, which for ours include evaluation; the runs of a seed run in
    parallel, one core each. "Our settings": our batched arenas, network, initialization, batch, minibatch, coefficients
    and learning rate (constant), without Muon. No agent has memory. At its defaults SB3's PPO plays one arena of the
    rule book.
    """,
)
def time_to_hearts(options: Options, device: torch.device) -> tuple[str, dict]:
    goals = (1, 5, 10, 15)
    every = 20
    budget = 40 if options.fast else 600
    flags = f"--max-seconds {budget} --eval-every {every} --log-every 1 --eval-episodes 480 --checkpoint-every 0"
    flags += " --threads 1"
    limits = {"seconds": budget, "every": every, "goal": goals[-1], "threads": 1, "device": device.type}
    is_tuned = {"SB3's PPO, our settings": True, "SB3's PPO, defaults": False}
    curves = {name: [] for name in ["ours", *is_tuned]}

    def learn(name: str, seed: int) -> list[list[float]]:
        if name == "ours":
            one = harness.run(f"{flags} --seed {seed}", options, "ppo_metta.py")
            return harness.eval_curve(harness.run_folder(one["run"]))
        arguments = limits | {"tuned": is_tuned[name], "seed": seed}
        return harness.in_subprocess(sb3_arena_curve, one_core=True, **arguments)

    for seed in options.seeds:
        names = [name for name in curves if needs_another_seed(curves[name], goals)]
        with ThreadPoolExecutor(2) as pool:
            for name, curve in zip(names, pool.map(learn, names, repeat(seed))):
                curves[name].append(curve)
    ends = dict.fromkeys(is_tuned, budget) | {"ours": curves["ours"][0][-1][0]}
    text, compared = time_to_goals(goals, "hearts", curves, ends)
    text += f"\n\nOurs: `python ppo_metta.py {flags}`."
    return text, {"goals": goals, "curves": curves, "ends": ends, "ratios": compared}


@table(
    "time-to-distance",
    caption="""
    Training time in seconds until an evaluation (20 greedy games, unseen levels, every 5 seconds) reaches a distance.

    As time-to-score, in `MarioLike-v0` at the easiest difficulty, up to 10 minutes; a scripted player reaches 1,076
    pixels. Evaluation counts for ours, since the collectors keep running, and not for SB3. "Our" SB3 agents have our
    network, 16 games, our gamma and the faster number of threads. SB3's DQN explores over a tenth of the steps of 10
    minutes at its defaults, of 2 minutes with our recipe.
    """,
)
def time_to_distance(options: Options, device: torch.device) -> tuple[str, dict]:
    goals = (400, 600, 800, 1000)
    every = 5
    agents = list(MARIO_AGENTS)[1:2] if options.fast else MARIO_AGENTS
    budget = 30 if options.fast else 120
    flags = f"--max-seconds {budget} --eval-every {every} --eval-episodes 200 --log-every 1 --checkpoint-every 0"
    rate = sb3_peers.sb3_mario_rate
    plans, ends = sb3_peers.plan_agents(agents, {"our recipe": 120}, 600, rate, 20, options, device)
    curves = {name: [] for name in ["ours", *plans]}
    for seed in options.seeds:
        one = harness.run(f"{flags} --seed {seed}", options, "dqn_mario_async.py")
        curves["ours"].append(harness.wall_clock_curve(harness.run_folder(one["run"]), "eval/distance_mean"))
        for name, plan in plans.items():
            limits = {"seconds": ends[name], "every": every, "goal": goals[-1], "seed": seed, "device": device.type}
            if needs_another_seed(curves[name], goals):
                curves[name].append(harness.in_subprocess(sb3_mario_curve, **plan, **limits))
    last = {"ours": curves["ours"][0][-1][0]}
    text, compared = time_to_goals(goals, "pixels", curves, ends | last)
    text += commands(f"dqn_mario_async.py {flags}", plans)
    return text, {"goals": goals, "curves": curves, "plans": plans, "ends": ends, "ratios": compared}


@table(
    "time-to-points",
    caption="""
    Training time in seconds until an evaluation (20 greedy games, every second) reaches a score in CartPole.

    `dqn_snake_sb3_compat.py` and SB3's DQN have the hyperparameters of sb3-learn. The other scripts are the copies that
    [your own game](own-game.md) makes, with its flags; SB3's PPO has the same hyperparameters. One thread each, SB3 for
    up to two minutes. Evaluations and compiling do not count.
    """,
)
def time_to_points(options: Options, device: torch.device) -> tuple[str, dict]:
    goals = (200, 450)
    compat = "dqn_snake_sb3_compat.py"
    copies = {"ppo_snake.py": "ppo", "dqn_snake.py": "dqn"}
    flags = "--threads 1 --eval-every 1 --log-every 0.1 --eval-episodes 200 --checkpoint-every 0"
    limits = {"seconds": 10 if options.fast else 120, "every": 1, "goal": goals[-1]}
    curves = {name: [] for name in [*copies, "SB3's PPO", compat, "SB3's DQN"]}

    def learn(name: str, seed: int) -> list[list[float]]:
        if name in SB3_AGENTS:
            return harness.in_subprocess(sb3_cartpole_curve, one_core=True, name=name, seed=seed, **limits)
        if name == compat:
            one = harness.run(f"{tuned_flags()} {flags} --compile --seed {seed}", options, compat)
        else:
            with tempfile.TemporaryDirectory() as folder:
                words = f"{page_flags(copies[name])} {flags} --seed {seed}"
                one = harness.run(words, options, copied_script(copies[name], folder))
        return harness.eval_curve(harness.run_folder(one["run"]))

    for seed in options.seeds:
        for name, runs in curves.items():
            runs.append(learn(name, seed))
    ends = {name: runs[0][-1][0] for name, runs in curves.items()}
    text, compared = time_to_goals(goals, "points", curves, ends)
    return text, {"goals": goals, "curves": curves, "ends": ends, "ratios": compared}

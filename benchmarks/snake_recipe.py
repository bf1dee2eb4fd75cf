"""Tables of the parts of ppo_snake.py's recipe: one left out at a time, and all of them in Stable-Baselines3's PPO."""

import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import gymnasium
import torch

import ppo_snake
from benchmarks import harness
from benchmarks.harness import ROOT, Options, column, million_steps
from benchmarks.report import markdown_table, table
from benchmarks.sb3_peers import FOREVER, SnakeView, greedy_score, sb3_agent

LEFT_OUT = {  # what a copy of the script has instead, and its flags; the values are SB3's defaults
    "nothing": ([], ""),
    "the egocentric view: one-hot cells, four directions": (
        [
            ("from envs.snake.view import EgocentricView", "from benchmarks.whole_board import WholeBoard"),
            ("view = EgocentricView(", "view = WholeBoard("),
            ("self.actor = nn.Linear(width, 3)", "self.actor = nn.Linear(width, 4)"),
        ],
        "",
    ),
    "what the snake can reach after a move": (
        [
            (
                "self.preprocess = view",
                "view.reached = lambda obs, head: torch.zeros(len(obs), 4, 3)\n        self.preprocess = view",
            )
        ],
        "",
    ),
    "the network: 64 wide, tanh": (
        [("F.relu_(x.add_", "torch.tanh(x.add_"), ("F.relu_(self.hidden", "torch.tanh(self.hidden")],
        "--hidden-size 64",
    ),
    "Adam's epsilon: 1e-5": ([("eps=1e-4", "eps=1e-5")], ""),
    "the batch of games: 16, minibatches as before": ([], "--num-envs 16 --num-minibatches 1"),
    "the horizon: gamma 0.99": ([], "--gamma 0.99"),
    "the schedules: constant step size and entropy": (
        [("ent_coef.fill_(args.ent_coef * (1 - progress))", "ent_coef.fill_(args.ent_coef)")],
        "--no-anneal-lr",
    ),
}


def changed_script(changes: list[tuple[str, str]], folder: Path) -> str:
    """Path of a copy of ppo_snake.py with other lines."""
    text = (ROOT / "ppo_snake.py").read_text()
    for old, new in changes:
        if text.count(old) != 1:
            raise ValueError(f"ppo_snake.py has {text.count(old)} times {old!r}")
        text = text.replace(old, new)
    folder.mkdir()
    script = folder / "ppo_snake.py"
    script.write_text(text)
    return str(script)


def two_at_once(calls: dict[str, Callable[[int], dict]], seeds: range) -> dict[str, list[dict]]:
    """Results of every call with every seed, two at a time."""
    jobs = [(name, seed) for name in calls for seed in seeds]
    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(lambda job: calls[job[0]](job[1]), jobs))
    found = {name: [] for name in calls}
    for (name, _), result in zip(jobs, results):
        found[name].append(result)
    return found


def score_table(first: str, runs: dict[str, list[dict]]) -> str:
    rows = []
    for name, results in runs.items():
        scores = column(results, "eval_score_mean")
        row = [
            name,
            " · ".join(f"{score:.1f}" for score in scores),
            f"{statistics.mean(scores):.1f}",
            million_steps(results),
        ]
        rows.append(row)
    return markdown_table(f"{first} | mean food, seeds 1 · 2 · 3 | mean | million env steps", rows)


def own_run(seed: int, options: Options, flags: str, every: int = 0, script: str = "ppo_snake.py") -> dict:
    result = harness.run(f"--threads 1 --eval-every {every} {flags} --seed {seed}", options, script)
    if every:
        result["curve"] = harness.eval_curve(harness.run_folder(result["run"]))
    return result


@table(
    "snake-recipe",
    caption="""
    What each part of the recipe of `ppo_snake.py` is worth: food of 97 after two minutes, with one part left out.

    Instead there is what Stable-Baselines3's PPO has by default. One thread each, two runs at once. Means of 1,000
    greedy games.
    """,
)
def snake_recipe(options: Options, device: torch.device) -> tuple[str, dict]:
    budget = 10 if options.fast else 120
    with tempfile.TemporaryDirectory() as folder:
        calls = {}
        for name, (changes, flags) in LEFT_OUT.items():
            script = changed_script(changes, Path(folder, str(len(calls))))
            calls[name] = partial(own_run, options=options, flags=f"--max-seconds {budget} {flags}", script=script)
        runs = two_at_once(calls, options.seeds)
    return score_table("left out", runs), {"runs": runs}


# ------------------------------------------------------------------------------------------------ SB3

PEERS = {  # what is as in ppo_snake.py beyond the hyperparameters
    "SB3's PPO": {"ortho_init": True},
    "SB3's PPO, our initial weights": {"ortho_init": False},
}


class SnakeLayers(SnakeView):
    """Features extractor for SB3: the hidden layers of ppo_snake.py, which are dqn_snake.py's without LayerNorm."""

    def __init__(self, space: gymnasium.spaces.Box, width: int, device: str) -> None:
        super().__init__(space, width, device)
        self.trunk.norm1 = self.trunk.norm2 = torch.nn.Identity()


def sb3_recipe_run(ortho_init: bool, seed: int, seconds: float, steps: int, every: float, episodes: int) -> dict:
    """Food and steps of SB3's PPO with the whole recipe of ppo_snake.py, one thread, until `seconds` or `steps`.

    With `every` also a curve: [seconds without evaluations, food of 100 games] after so many seconds each.
    """
    from stable_baselines3.common.callbacks import BaseCallback

    args = ppo_snake.fill_defaults(ppo_snake.Args(), torch.device("cpu"))
    model = sb3_agent(
        "SB3's PPO, our view and gamma",
        "cpu",
        threads=1,
        seed=seed,
        width=args.hidden_size,
        policy={
            "features_extractor_class": SnakeLayers,
            "optimizer_kwargs": {"eps": 1e-4},
            "ortho_init": ortho_init,
        },
        num_envs=args.num_envs,
        n_steps=args.num_steps,
        batch_size=args.num_envs * args.num_steps // args.num_minibatches,
        n_epochs=args.update_epochs,
        gamma=args.gamma,
        gae_lambda=args.gae_lambda,
        clip_range=args.clip_coef,
        vf_coef=args.vf_coef,
        max_grad_norm=args.max_grad_norm,
    )
    score = partial(greedy_score, model, relative_actions=True)
    curve = []
    evaluating = 0.0
    start = time.perf_counter()

    def progress() -> float:
        return max((time.perf_counter() - start) / seconds, model.num_timesteps / steps)

    class Schedule(BaseCallback):
        def _on_rollout_end(self) -> None:
            nonlocal evaluating
            elapsed = time.perf_counter() - start
            if every and elapsed >= every * (len(curve) + 1):
                curve.append([elapsed - evaluating, score(episodes=100)])
                evaluating += time.perf_counter() - start - elapsed
            model.ent_coef = args.ent_coef * max(1 - progress(), 0)

        def _on_step(self) -> bool:
            return progress() < 1

    model.lr_schedule = lambda _: args.learning_rate * max(1 - progress(), 0)
    model.learn(FOREVER, callback=Schedule())
    elapsed = time.perf_counter() - start
    food = score(episodes=episodes)
    return {"eval_score_mean": food, "env_steps": model.num_timesteps, "seconds": elapsed, "curve": curve}


def compare_at(options: Options, seconds: int, steps: int, peers: Iterable[str], every: int = 0) -> tuple[str, dict]:
    """Table of ours and `peers` after `seconds` or `steps`, whichever is first; evaluated `every` so many seconds."""
    flags = f"--max-seconds {seconds} --total-timesteps {steps}"
    calls = {"ppo_snake.py": partial(own_run, options=options, flags=flags, every=every)}
    episodes = 100 if options.fast else 1000
    for name in peers:
        settings = PEERS[name] | {"seconds": seconds, "steps": steps, "every": every, "episodes": episodes}
        calls[name] = partial(sb3_run, settings)
    runs = two_at_once(calls, options.seeds)
    return score_table("script", runs), {"runs": runs}


def sb3_run(settings: dict, seed: int) -> dict:
    return harness.in_subprocess(sb3_recipe_run, one_core=True, seed=seed, **settings)


@table(
    "snake-peer",
    caption="""
    Stable-Baselines3's PPO with the whole recipe of `ppo_snake.py`, after two minutes: food of 97.

    The recipe: view, network, 256 games, rollouts of 32 steps, minibatches of 512, two epochs, coefficients, Adam's
    epsilon, and a step size and entropy that fall by the clock. One thread each, two runs at once. Means of 1,000
    greedy games.
    """,
)
def snake_peer(options: Options, device: torch.device) -> tuple[str, dict]:
    return compare_at(options, 10 if options.fast else 120, FOREVER, ["SB3's PPO"])


@table(
    "snake-peer-600",
    caption="""
    As snake-peer, after ten minutes, evaluated once a minute.
    """,
)
def snake_peer_600(options: Options, device: torch.device) -> tuple[str, dict]:
    return compare_at(options, 10 if options.fast else 600, FOREVER, ["SB3's PPO"], every=5 if options.fast else 60)


@table(
    "snake-peer-steps",
    caption="""
    As snake-peer, after 640,000 env steps instead, also with our initial weights.
    """,
)
def snake_peer_steps(options: Options, device: torch.device) -> tuple[str, dict]:
    return compare_at(options, FOREVER, 20_000 if options.fast else 640_000, PEERS)

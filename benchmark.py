"""Measures what the scripts do, by running them beside their peers, and writes benchmarks.md.

    python benchmark.py                          # --suite snake: 12 minutes on two cores
    python benchmark.py --suite switches --fast  # fewer rows and shorter runs
    python benchmark.py --suite sweep --write-env  # the fastest settings of the transformer go into .env
    python benchmark.py --compare benchmarks/env.json --suite env  # exit code 1 if a ratio to a peer fell by over 10 %
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
    mario-learn: flags after 1, 5 and 15 minutes, three seeds                           50 minutes
    mario-real: how far the real 1-1 is played after up to 20 minutes of it             65 minutes
    bf16, busy: --bf16 in every script; every script beside one busy process            25 minutes
    switches: every switch alone and together                                           40 minutes
    scaling: cost as games, batch, board and agents grow                                30 minutes
    learn: score after one, two and ten minutes, three seeds                                1 hour
    time-to-score: seconds to 5, 10, 20, 30 food beside SB3, up to 20 minutes a run      70 minutes
    time-to-hearts, time-to-distance: the same in the arena and in Mario                 3 hours
    all: all of them. --suite also takes the name of a single table
    gpu: not among them, since it needs CUDA: games alone, every switch, food, arena, transformer   10 minutes

A table replaces its own section of benchmarks.md and leaves the rest alone; raw results go to benchmarks/*.json, and
pictures are drawn from those. What is compared takes turns (A B A B ...); medians are over `--repeats` rounds after one
that does not count. Ratios are taken within a round.
"""

import importlib
import inspect
import io
import json
import math
import multiprocessing
import os
import platform
import random
import re
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import asdict, dataclass
from functools import partial
from importlib import metadata, util
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal, NoReturn

import gymnasium
import numpy as np
import torch
import torch.nn.functional as F
import tyro
from dotenv.parser import parse_stream
from gymnasium.vector import SyncVectorEnv, VectorEnv
from torch.utils.flop_counter import FlopCounterMode

import dqn_mario_async
import dqn_snake
import ppo_metta
from envs import mario, mario_levels
from envs.gym_vector import MarioVectorEnv, MettaVectorEnv, SnakeVectorEnv
from envs.mario import UNSEEN_LEVELS, MarioGame
from envs.mario_batch import MarioBatch, MarioEnv
from envs.metta import MettaArena, Thing
from envs.metta_rules import CARRY, FORWARD, GET, ITEMS, MOVES, NOOP, PUT, ROTATE, Rules
from envs.smb import NesGame, SuperMarioBrosBatch
from envs.snake import SnakeEnv
from envs.snake_batch import SnakeBatch
from envs.streams import Stream

ROOT = Path(__file__).parent
PLAIN = {"OPTIMAL_BATCH_SIZE": "32", "USE_TORCH_COMPILE": "false", "USE_FLASH_ATTENTION": "false", "USE_BF16": "false"}
# dqn_snake_sb3_compat.py's settings while it is measured, so that a .env changes nothing
QUICK = "--eval-every 0 --eval-episodes 1"  # of runs that are measured for speed
SUITES = {"snake": ["env", "act", "train", "update"], "sb3": ["sb3-speed", "sb3-learn", "sweep"]}
SUITES |= {"metta": [f"metta-{table}" for table in ("env", "hearts", "speed", "peer", "subproc", "presets")]}
SUITES |= {"metta-learn": [f"metta-learn-{game}" for game in ("arena", "navigation", "real")]}
SUITES |= {"mario": ["mario-env", "mario-async", "mario-switches"]}
ALONE = "bf16 busy diagnose mario-learn mario-real switches scaling learn time-to-score time-to-hearts time-to-distance"
SUITES |= {name: [name] for name in ALONE.split()}
SUITES |= {"all": [table for tables in SUITES.values() for table in tables]}
SUITES |= {"gpu": ["gpu"]}


@dataclass
class Options:
    suite: Literal[(*SUITES, *(table for table in SUITES["all"] if table not in SUITES))] = "snake"
    """what to measure: a suite, or one of its tables"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """where"""
    repeats: int | None = None
    """counted rounds, and seeds, of which there are three at most (None: 5, with --fast 2)"""
    fast: bool = False
    """fewer rows and shorter runs, to see whether everything works"""
    json: str | None = None
    """also write everything that was measured into this file"""
    compare: str | None = None
    """a file that --json wrote, or one of benchmarks/*.json: exit code 1 if the median of a ratio to a peer fell below
    that there by more than 10 %, or cannot be compared. Neither benchmarks.md nor benchmarks/ is written then"""
    seconds: int | None = None
    """wall-clock budget of each run of metta-presets (None: 300, with --fast 20)"""
    write_env: bool = False
    """after the sweep, put the settings with the most samples/s into .env, for dqn_snake_sb3_compat.py"""

    @property
    def rounds(self) -> int:
        return self.repeats or (2 if self.fast else 5)

    @property
    def seeds(self) -> range:
        return range(1, 1 + (1 if self.fast else min(self.rounds, 3)))


def fail(message: str) -> NoReturn:
    """End with one line about what the user asked for, and exit code 2."""
    print(f"benchmark.py: {message}", file=sys.stderr)
    raise SystemExit(2)


def machine(device: torch.device) -> dict[str, Any]:
    """What a result depends on besides the command."""
    if device.type == "cuda":
        chip = torch.cuda.get_device_name()
    else:
        info = Path("/proc/cpuinfo")
        names = re.findall(r"model name\s*: (.*)", info.read_text()) if info.exists() else [platform.processor()]
        chip = f"{torch.get_num_threads()} cores of {names[0]}, {torch.backends.cpu.get_cpu_capability()}"
    versions = {"Python": platform.python_version()}
    for package in ("torch", "numpy", "gymnasium", "stable-baselines3", "jumanji", "jax"):
        with suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    return {"commit": commit(), "date": time.strftime("%Y-%m-%d"), "hardware": chip, "versions": versions}


def commit() -> str:
    """Short hash of the code that is measured; "unknown" without git, or outside a repository."""
    command = ["git", "rev-parse", "--short", "HEAD"]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    except OSError:
        return "unknown"
    return done.stdout.strip() or "unknown"


def spread(values: list[float], digits: int = 0) -> str:
    """Median with min and max."""
    return f"{statistics.median(values):,.{digits}f} ({min(values):,.{digits}f}–{max(values):,.{digits}f})"


def column(runs: list[dict], key: str) -> list[float]:
    return [one[key] for one in runs]


def middle(runs: list[dict], key: str) -> float:
    return statistics.median(column(runs, key))


def ratios(ours: list[float], peers: list[float]) -> list[float]:
    """How many times the peer's rate ours is, round by round."""
    return [our / peer if peer else math.inf for our, peer in zip(ours, peers)]


def table(header: str, rows: list[list]) -> str:
    columns = header.split(" | ")
    lines = [f"| {header} |", "|" + " --- |" * len(columns)]
    return "\n".join(lines + ["| " + " | ".join(map(str, row)) + " |" for row in rows])


# ------------------------------------------------------------------------------------------------ running things


def run(flags: str, options: Options, script: str = "dqn_snake.py") -> dict:
    """Summary of one run of the real script. MemoryError where it did not fit, the end of it all for other failures."""
    folder = ROOT / "runs" / f"benchmark-{os.getpid()}-{time.time_ns()}"  # a name that exists is refused
    command = [sys.executable, script, "--device", options.device, "--no-video", "--run-name", folder.name]
    command += shlex.split(flags)
    done = subprocess.run(command, cwd=ROOT, env=os.environ | PLAIN, capture_output=True, text=True)
    refused = done.returncode == 2 and re.search("out of memory|would take .* GiB", done.stderr)
    if refused or done.returncode == -9:  # or Linux, out of memory itself, killed it
        raise MemoryError(f"{script} {flags}: out of memory")
    if done.returncode:
        sys.exit(f"{script} {flags} failed:\n{done.stderr}")
    print(f"  {script} {flags}", flush=True)
    return json.loads((folder / "summary.json").read_text()) | {"flags": flags, "run": folder.name}


ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")


def apart(function: Callable, one_core: bool = False, **arguments: Any) -> Any:
    """What `function` of this file returns in a process of its own: no peer shares threads or memory with another."""
    env = os.environ | (ONE_THREAD if one_core else {})
    code = f"import json, benchmark; print(json.dumps(benchmark.{function.__name__}(**{arguments!r})))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True)
    if done.returncode:
        missing = re.search("No module named '([^']+)'", done.stderr)
        if missing:
            fail(f"{missing[1]} is not installed; pip install -r requirements-dev.txt has all peers")
        sys.exit(f"{function.__name__} failed:\n{done.stderr}")
    print(f"  {function.__name__} {' '.join(f'{name}={value}' for name, value in arguments.items())}", flush=True)
    return json.loads(done.stdout.splitlines()[-1])


def in_turn(options: Options, calls: dict[str, Callable[[], Any]]) -> dict[str, list]:
    """What every call returned, round by round (A B A B ...), without the first round, which warms the machine up."""
    rounds = [{name: call() for name, call in calls.items()} for _ in range(options.rounds + 1)]
    return {name: [results[name] for results in rounds[1:]] for name in calls}


def rate_of(work: Callable[[], Any], amount: float, seconds: float, device: str = "cpu") -> float:
    """What `work` does per second if a call does `amount` of it; the first call does not count."""

    def finish() -> None:
        work()
        if device == "cuda":
            torch.cuda.synchronize()

    finish()
    calls, start = 0, time.perf_counter()
    while time.perf_counter() - start < seconds:
        finish()
        calls += 1
    return calls * amount / (time.perf_counter() - start)


# ------------------------------------------------------------------------------------------------ Snake: the game


def snake_rates(widths: tuple[int, ...], seconds: float, device: str) -> list[float]:
    """Steps per second of `SnakeBatch` under random actions, by width."""
    rates = []
    for width in widths:
        envs = SnakeBatch(width, device, seed=1)
        envs.reset()
        actions = torch.randint(4, (16, width), device=device)
        rates.append(rate_of(lambda: [envs.step(action) for action in actions], 16 * width, seconds, device))
    return rates


GYMNASIUM = {kind.__name__: kind for kind in (SnakeEnv, SnakeVectorEnv, MettaVectorEnv, MarioEnv, MarioVectorEnv)}


def gymnasium_rates(game: str, widths: tuple[int, ...], seconds: float, **settings: Any) -> list[float]:
    """The same by Gymnasium's own measure: of a class for many games, or of one for one game in `SyncVectorEnv`."""
    from gymnasium.utils import performance  # since Gymnasium 1.4

    kind, rates = GYMNASIUM[game], []
    for width in widths:
        envs = kind(width, **settings) if issubclass(kind, VectorEnv) else SyncVectorEnv([kind] * width)
        rates.append(performance.benchmark_vector_step(envs, seconds, seed=1))
    return rates


def jumanji_rates(widths: tuple[int, ...], seconds: float) -> list[float]:
    """The same of jumanji's Snake-v1 on our board, jitted, 16 steps a call: its fastest way."""
    import jax
    from jumanji.environments import Snake
    from jumanji.wrappers import AutoResetWrapper, VmapWrapper

    envs = VmapWrapper(AutoResetWrapper(Snake(*dqn_snake.Rules().board)))

    @jax.jit
    def play(games: tuple, actions: jax.Array) -> tuple:
        return jax.lax.scan(lambda games, action: (envs.step(games[0], action), None), games, actions)[0]

    rates = []
    for width in widths:
        games = jax.jit(envs.reset)(jax.random.split(jax.random.PRNGKey(1), width))
        actions = jax.random.randint(jax.random.PRNGKey(2), (16, width), 0, 4)

        def work() -> None:
            nonlocal games
            games = jax.block_until_ready(play(games, actions))

        rates.append(rate_of(work, 16 * width, seconds))
    return rates


def table_env(options: Options, device: torch.device) -> tuple[str, dict]:
    """The game alone, 10x10, random actions, a finished game starts anew: env steps per second by games at once.

    jumanji's Snake-v1 has the same board, jitted, on the device JAX takes by itself (without jax[cuda] the CPU).
    Columns with a G are Gymnasium's own measure, `benchmark_vector_step`, which draws the actions too: `SnakeVectorEnv`
    takes and gives NumPy arrays, the rule book plays one game after the other in `SyncVectorEnv`. "×" is ours to the
    peer, within a round.
    """
    widths = (128, 4096) if options.fast else (1, 128, 1024, 4096, 16384, 65536)
    few, seconds = tuple(width for width in widths if width <= 1024), 0.2 if options.fast else 0.5
    calls = {
        "SnakeBatch": lambda: apart(snake_rates, widths=widths, seconds=seconds, device=device.type),
        "jumanji": lambda: apart(jumanji_rates, widths=widths, seconds=seconds),
        "SnakeVectorEnv, G": lambda: apart(gymnasium_rates, game="SnakeVectorEnv", widths=widths, seconds=seconds),
        "rule book, G": lambda: apart(gymnasium_rates, game="SnakeEnv", widths=few, seconds=seconds),
    }
    measured = in_turn(options, calls)
    ours, jumanji, vector, book = (list(zip(*rounds)) for rounds in measured.values())  # by width, then by round
    compared, rows = {"jumanji, best width of each": ratios(map(max, zip(*ours)), map(max, zip(*jumanji)))}, []
    for i, width in enumerate(widths):
        compared[f"jumanji, {width:,} games"] = ratios(ours[i], jumanji[i])
        row = [f"{width:,}", spread(ours[i]), spread(jumanji[i]), spread(compared[f"jumanji, {width:,} games"], 2)]
        row += [spread(vector[i]), "", ""]
        if width in few:
            compared[f"rule book, {width:,} games"] = ratios(vector[i], book[i])
            row[5:] = spread(book[i]), spread(compared[f"rule book, {width:,} games"], 2)
        rows.append(row)
    best = compared["jumanji, best width of each"]
    text = table("games | `SnakeBatch` | jumanji | × | `SnakeVectorEnv`, G | rule book, G | ×", rows)
    text += f"\n\nEach at its best width: {spread(best, 1)} times jumanji."
    return text, {"widths": widths, "rates": measured, "ratios": compared}


# ------------------------------------------------------------------------- Stable-Baselines3 on the same Snake


FOREVER = 10**9  # steps: time ends it
RECIPE = dict(  # dqn_snake.py's, as far as SB3 has it: no double target, no step size that falls
    view=True, width=512, num_envs=128, gamma=0.98, learning_rate=1e-3, buffer_size=500_000, learning_starts=5000,
    batch_size=256, train_freq=1, gradient_steps=1, tau=0.01, target_update_interval=128, exploration_final_eps=0.002,
)  # fmt: skip
AGENTS = {
    "SB3's DQN, defaults": dict(algorithm="DQN"),
    "SB3's DQN, our view and gamma": dict(algorithm="DQN", view=True, gamma=0.98),
    "SB3's DQN, our recipe": dict(algorithm="DQN") | RECIPE,
    "SB3's PPO, defaults": dict(algorithm="PPO"),
    "SB3's PPO, our view and gamma": dict(algorithm="PPO", view=True, gamma=0.98),
}


class Turns(gymnasium.ActionWrapper):
    """Left, ahead, right: the actions of those who see the board as the snake does."""

    def __init__(self, env: gymnasium.Env) -> None:
        super().__init__(env)
        self.action_space = gymnasium.spaces.Discrete(3)

    def action(self, action: int) -> int:
        return (self.unwrapped.heading + int(action) - 1) % 4


class SnakeView(torch.nn.Module):
    """What an SB3 policy sees of Snake's codes: dqn_snake.py's view, flat, or the hidden layers of its network on it.

    Built by SB3, hence the signature and `features_dim`. As in dqn_snake.py the view is made when the network needs it
    and of the whole batch, so the replay holds bytes.
    """

    def __init__(self, space: gymnasium.spaces.Box, width: int, device: str) -> None:
        super().__init__()
        self.view = dqn_snake.EgocentricView(space.shape, torch.device(device))
        self.trunk = dqn_snake.MLP(self.view, width, torch.device(device)) if width else None
        self.features_dim = width or 3 * self.view.num_features + self.view.side**2

    def forward(self, obs: torch.Tensor) -> torch.Tensor:
        _, seen, food = self.view.features(obs.byte())
        if self.trunk:
            return self.trunk(seen, food)
        return torch.cat([seen.flatten(1), F.one_hot(food, self.view.side**2)], 1)


def sb3_agent(
    name: str, device: str, threads: int, env_id: str = "Snake-v0", seed: int = 1, explored: int = 1, **changes: Any
) -> Any:
    """The agent of AGENTS, to learn for FOREVER; a DQN explores over its first `explored` steps."""
    import stable_baselines3
    from stable_baselines3.common.vec_env import DummyVecEnv

    import envs  # noqa: F401  (registers the games)

    torch.set_num_threads(threads)
    explores = {"exploration_fraction": explored / FOREVER} if AGENTS[name]["algorithm"] == "DQN" else {}
    settings = {"view": False, "width": 0, "num_envs": 1} | AGENTS[name] | explores | changes
    algorithm, view, width, num_envs = (settings.pop(name) for name in ("algorithm", "view", "width", "num_envs"))
    if view:
        layers = {"net_arch": []} if width else {}
        extractor = {"features_extractor_kwargs": {"width": width, "device": device}}
        settings["policy_kwargs"] = extractor | layers | {"features_extractor_class": SnakeView}

    def game() -> gymnasium.Env:
        env = gymnasium.make(env_id, disable_env_checker=True)
        return Turns(env) if view else env

    games = DummyVecEnv([game] * num_envs)
    return getattr(stable_baselines3, algorithm)("MlpPolicy", games, device=device, seed=seed, **settings)


def sb3_rate(seconds: float, **agent: Any) -> dict[str, float]:
    """Env steps per second while it learns, and transitions learned from per env step (DQN)."""
    model = sb3_agent(**agent)
    start = time.perf_counter()
    model.learn(FOREVER, callback=lambda *_: time.perf_counter() - start < seconds)
    steps = model.num_timesteps
    replay_ratio = model._n_updates * model.batch_size / steps
    return {"env_steps_per_second": steps / (time.perf_counter() - start), "replay_ratio": replay_ratio}


def sb3_act_rate(num_envs: int, seconds: float, device: str) -> float:
    """Env steps per second of dqn_snake.py's network playing in SB3's `DummyVecEnv`."""
    model = sb3_agent("SB3's DQN, our recipe", device, torch.get_num_threads(), num_envs=num_envs)
    games = model.get_env()
    obs = games.reset()

    def step() -> None:
        nonlocal obs
        obs = games.step(model.predict(obs, deterministic=True)[0])[0]

    return rate_of(step, num_envs, seconds)


def greedy_score(model: Any, turns: bool, episodes: int = 100) -> float:
    """Mean food of greedy games: those of dqn_snake.py's evaluations, played the same way."""
    envs = SnakeBatch(episodes, seed=dqn_snake.EVAL_SEED)
    obs, score, done = envs.reset(), torch.zeros(episodes), torch.zeros(episodes, dtype=torch.bool)
    while not done.all():
        action = torch.as_tensor(model.predict(obs.numpy(), deterministic=True)[0])
        obs, _, terminated, truncated, info = envs.step((envs.heading + action - 1) % 4 if turns else action)
        ends = (terminated | truncated) & ~done
        score, done = torch.where(ends, info["score"].float(), score), done | ends
    return score.mean().item()


def learning_curve(
    make: Callable[[], Any], test: Callable[[Any], float], seconds: float, every: float, goal: float
) -> list:
    """[seconds, what `test` says] of an SB3 agent that learns, until that is `goal`. Testing stops the clock.

    It is tested again after `every` seconds, and after a twentieth of those that it has learned for.
    """
    model = make()
    start, paused, curve = time.perf_counter(), 0.0, [[0.0, 0.0]]

    def look(*_) -> bool:
        nonlocal paused
        now = time.perf_counter() - start - paused
        if now >= curve[-1][0] + max(every, now / 20):
            curve.append([now, test(model)])
            paused = time.perf_counter() - start - now
        return now < seconds and curve[-1][1] < goal

    model.learn(FOREVER, callback=look)
    return curve


def sb3_curve(name: str, seconds: float, every: float, goal: float, **agent: Any) -> list:
    """`learning_curve` of an agent of AGENTS on Snake: mean food."""

    def test(model: Any) -> float:
        return greedy_score(model, "view" in AGENTS[name])

    return learning_curve(lambda: sb3_agent(name, **agent), test, seconds, every, goal)


# ------------------------------------------------------------------------------------------ Snake: the other tables


def act_rates(widths: tuple[int, ...], seconds: float, device: str) -> list[float]:
    """Steps per second of `SnakeBatch` played by dqn_snake.py's network, greedily, by width."""
    args, rates = dqn_snake.fill_defaults(dqn_snake.Args(), torch.device(device)), []
    torch.manual_seed(1)
    q_network = dqn_snake.QNetwork(args, torch.device(device)).requires_grad_(False)
    for width in widths:
        envs = SnakeBatch(width, device, seed=1)
        obs = envs.reset()  # a buffer that every step overwrites
        rates.append(rate_of(lambda: envs.step(q_network(obs).argmax(1)), width, seconds, device))
    return rates


def table_act(options: Options, device: torch.device) -> tuple[str, dict]:
    """The game played by the network (untrained, greedy), env steps per second by games at once.

    SB3 plays the same game with the same network: `DummyVecEnv`, `model.predict`. "×" is ours to it, within a round.
    """
    widths = (128,) if options.fast else (1, 128, 1024, 4096, 16384)
    few, seconds = tuple(width for width in widths if width <= 128), 0.5 if options.fast else 1.0
    calls = {"ours": lambda: apart(act_rates, widths=widths, seconds=seconds, device=device.type)}
    for width in few:
        calls[width] = lambda width=width: apart(sb3_act_rate, num_envs=width, seconds=seconds, device=device.type)
    measured = in_turn(options, calls)
    compared, rows = {}, []
    for width, ours in zip(widths, zip(*measured["ours"])):
        rows.append([f"{width:,}", spread(ours), "", ""])
        if width in few:
            compared[f"SB3, {width:,} games"] = ratios(ours, measured[width])
            rows[-1][2:] = spread(measured[width]), spread(compared[f"SB3, {width:,} games"], 1)
    text = table("games | ours | SB3, same network | ×", rows)
    return text, {"widths": widths, "rates": measured, "ratios": compared}


def table_train(options: Options, device: torch.device) -> tuple[str, dict]:
    """Games, network and learning together, beside SB3's DQN on the same game at the same replay ratio.

    "Our recipe" is SB3's DQN with our view, network, batch, number of games, and target network; "defaults" has a 64-64
    MLP on the board's codes, batch 32 and one game. "×" is ours in the row above to it, within a round.
    """
    seconds, threads = 5 if options.fast else 6, torch.get_num_threads()
    base = f"{QUICK} --max-seconds {seconds} --learning-starts 1000"
    pairs, calls, rows = {"": "SB3's DQN, our recipe", "--replay-ratio 8": "SB3's DQN, defaults"}, {}, []
    for flags, peer in pairs.items():
        agent = {"name": peer, "device": device.type, "threads": threads, "learning_starts": 1000}
        calls[flags] = lambda flags=flags: run(f"{base} {flags}".strip(), options)
        calls[peer] = lambda agent=agent: apart(sb3_rate, seconds=seconds, **agent)
    measured = in_turn(options, calls)
    rates = {name: column(results, "env_steps_per_second") for name, results in measured.items()}
    compared = {peer: ratios(rates[flags], rates[peer]) for flags, peer in pairs.items()}
    for name, results in measured.items():
        who = name if name in compared else f"`{f'dqn_snake.py {name}'.strip()}`"
        replay_ratio = middle(results, "replay_ratio")
        samples = [one["env_steps_per_second"] * one["replay_ratio"] for one in results]
        times = spread(compared[name], 1) if name in compared else ""
        rows.append([who, spread(rates[name]), f"{replay_ratio:.2f}", spread(samples), times])
    text = table("who | env steps/s | replay ratio | samples/s | ×", rows)
    return text, {"runs": measured, "ratios": compared}


def ceiling(device: str, seconds: float) -> list[float]:
    """Floating point operations per second of a large fp32 matmul, and bytes per second of a large copy."""
    side = 8192 if device == "cuda" else 2048
    x, y = torch.randn(2, side, side, device=device)
    source, target = torch.ones(2, 2**26, device=device)
    flops = rate_of(lambda: torch.mm(x, y), 2 * side**3, seconds, device)
    return [flops, rate_of(lambda: target.copy_(source), 2 * 4 * 2**26, seconds, device)]


def layer_shapes(weights: dict[str, torch.Tensor]) -> list[torch.Size]:
    """(outputs, inputs) of the layers that multiply matrices."""
    matrices = {name: tensor for name, tensor in weights.items() if name.endswith(".weight") and tensor.ndim == 2}
    return [tensor.shape for name, tensor in matrices.items() if ".food." not in name]


def matmul_seconds(batch: int, checkpoint: Path, device: torch.device) -> float:
    """Time that the matmuls of one update take alone: three forward passes, and the backward pass of one."""
    shapes, timings = layer_shapes(torch.load(checkpoint, weights_only=True)["q_network"]), []
    layers = [[torch.randn(*shape, device=device) for shape in ((batch, n), (m, n), (batch, m))] for m, n in shapes]
    for _ in range(22):
        start = time.perf_counter()
        for i, (x, weight, y) in enumerate(layers):
            for _ in range(3):
                x @ weight.T
            y.T @ x
            if i:  # nothing is learned below the first layer
                y @ weight
        if device.type == "cuda":
            torch.cuda.synchronize()
        timings.append(time.perf_counter() - start)
    return statistics.median(timings[2:])


def least_work(batch: int, checkpoint: Path) -> tuple[float, float]:
    """Operations of the matmuls of one update, and the bytes it cannot help reading and writing, in fp32.

    Bytes: what each matmul reads and writes, and ten passes over all weights: gradient, weight, Adam's two moments and
    target weight, each read once and written once.
    """
    weights = torch.load(checkpoint, weights_only=True)["q_network"]
    flops, numbers = 0, 10 * sum(tensor.numel() for tensor in weights.values())
    for i, (m, n) in enumerate(layer_shapes(weights)):
        passes = 5 if i else 4
        flops += 2 * passes * batch * m * n
        numbers += passes * (batch * n + m * n + batch * m)
    return flops, 4 * numbers


def table_update(options: Options, device: torch.device) -> tuple[str, dict]:
    """Transitions per second through the learner by batch size, and its share of what this machine can do at most.

    "Its matmuls" is the share of an update's time that they take when run alone. The rest compares an update with a
    large matmul and a large copy: its operations per second, and the bytes per second it cannot help moving.
    """
    batches = (256, 8192) if options.fast else (32, 256, 2048, 8192)
    flags = f"{QUICK} --replay-ratio 64 --learning-starts 2000 --log-every 1 --max-seconds {5 if options.fast else 6}"
    calls = {batch: lambda batch=batch: run(f"{flags} --batch-size {batch}", options) for batch in batches}
    calls["ceiling"] = lambda: apart(ceiling, device=device.type, seconds=0.3 if options.fast else 1)
    measured, rows, raw = in_turn(options, calls), [], {}
    flops, bandwidth = (statistics.median(values) for values in zip(*measured["ceiling"]))
    for batch in batches:
        runs = measured[batch]
        if not all(column(runs, "updates_per_second")):
            rows.append([f"{batch:,}", "no update in time", "", "", "", ""])
            continue
        checkpoint = ROOT / "runs" / runs[0]["run"] / "checkpoint.pt"
        seconds = statistics.median(one["train_fraction"] / one["updates_per_second"] for one in runs)
        floor, work = matmul_seconds(batch, checkpoint, device), least_work(batch, checkpoint)
        samples = [one["updates_per_second"] * batch / one["train_fraction"] for one in runs]
        raw[batch] = {"runs": runs, "update_seconds": seconds, "matmul_seconds": floor, "flops_and_bytes": work}
        row = [f"{batch:,}", spread(samples), f"{1000 * seconds:.2f}", f"{floor / seconds:.0%}"]
        for done, most in zip(work, (flops, bandwidth)):
            row.append(f"{done / seconds / 1e9:,.0f} ({done / seconds / most:.0%})")
        rows.append(row)
    text = table("batch | samples/s while learning | ms per update | its matmuls | GFLOP/s | GB/s at least", rows)
    text += f"\n\nCeiling: {flops / 1e9:,.0f} GFLOP/s (fp32 matmul), {bandwidth / 1e9:,.1f} GB/s (copy)."
    return text, {"batches": raw, "ceiling": measured["ceiling"]}


def table_switches(options: Options, device: torch.device) -> tuple[str, dict]:
    """End-to-end steps per second of each switch beside the run without it, in turn, at the same replay ratio."""
    larger, compiled = "--num-envs 512 --batch-size 1024", "--compile --max-seconds 60"
    switches = ["", *(f"--threads {2**i}" for i in range(min(torch.get_num_threads(), 8).bit_length() - 1))]
    switches += ["--bf16", *re.findall(r"--\S+ \d+", larger), larger, compiled, f"{compiled} {larger}"]
    switches += [f"{compiled} --compile-mode {mode}" for mode in ("reduce-overhead", "max-autotune")]
    kernels = ["math", "flash"]
    if device.type == "cuda":
        kernels += ["efficient", "cudnn"]
        switches += ["--tf32", "--fp16", "--cudagraph", "--cudagraph --bf16", "--cudagraph --compile --bf16"]
    attention = "--network attention"
    switches += [attention, *(f"{attention} --sdpa {kernel}" for kernel in kernels)]
    if options.fast:
        switches = ["", "--threads 1", larger]
    base = f"{QUICK} --max-seconds {5 if options.fast else 8}"
    measured = in_turn(options, {one: lambda one=one: run(f"{base} {one}".strip(), options) for one in switches})
    rates = {switch: column(runs, "env_steps_per_second") for switch, runs in measured.items()}
    rows = []
    for switch, runs in measured.items():
        gain = ratios(rates[switch], rates[attention if switch.startswith(f"{attention} ") else ""])
        active = [runs[0]["precision"], runs[0]["sdpa"], *(name for name in ("compiled", "cudagraph") if runs[0][name])]
        name = f"`{switch}`" if switch else "default"
        row = [name, spread(rates[switch]), spread(gain, 2), f"{middle(runs, 'replay_ratio'):.2f}"]
        rows.append([*row, ", ".join(filter(None, active))])
    text = table("flags | env steps/s end to end | × | replay ratio | what was active", rows)
    return text + f"\n\n× is to the default, of `--sdpa` to `{attention}`, within a round.", {"runs": measured}


DEFAULTS = ["dqn_snake.py", "dqn_snake_sb3_compat.py", "ppo_metta.py", "dqn_mario_async.py"]


def table_bf16(options: Options, device: torch.device) -> tuple[str, dict]:
    """Every script with `--bf16` beside itself without it, in turn: steps end to end, and learning alone."""
    cases = [
        *DEFAULTS,
        "dqn_snake.py --batch-size 8192",
        "ppo_metta.py --rnn none",
        "dqn_mario_async.py --batch-size 128",
    ]
    if options.fast:
        cases = cases[:1]
    calls = {}
    for case in cases:
        script, _, flags = case.partition(" ")
        for switch in ("", "--bf16"):
            flagged = f"{QUICK} --max-seconds {5 if options.fast else 10} {flags} {switch}".strip()
            calls[f"{case} {switch}".strip()] = partial(run, flagged, options, script)
    measured, rows = in_turn(options, calls), []
    for case in cases:
        full, half = measured[case], measured[f"{case} --bf16"]
        learning = [[one["samples_per_second"] / (one["train_fraction"] or 1) for one in runs] for runs in (full, half)]
        steps = [column(runs, "env_steps_per_second") for runs in (full, half)]
        row = [f"`{case}`"]
        for one, other in (steps, learning):
            row += [spread(one), spread(other), spread(ratios(other, one), 2)]
        rows.append([*row, half[0]["precision"]])
    header = (
        "command | env steps/s | with `--bf16` | × | learned from per second, while learning | with `--bf16` | × | "
    )
    return table(f"{header}precision with it", rows), {"runs": measured}


def beside_busy(work: Callable[[], dict]) -> dict:
    """What `work` returns while another process keeps a core busy."""
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as other:
        try:
            return work()
        finally:
            other.kill()


def table_busy(options: Options, device: torch.device) -> tuple[str, dict]:
    """Steps per second end to end on a quiet machine and beside one process that keeps a core busy, in turn.

    These two scripts take all cores by default, and fewer where they find them busy at the start; the others take one.
    """
    cores, calls = torch.get_num_threads(), {}
    scripts = ["dqn_snake.py", "ppo_metta.py"]
    for script in scripts[:1] if options.fast else scripts:
        for name, more in (("default", ""), ("all threads", f"--threads {cores}")):
            flags = f"{QUICK} --max-seconds {5 if options.fast else 10} {more}".strip()
            once = partial(run, flags, options, script)
            calls[f"{script}, {name}, quiet"] = once
            calls[f"{script}, {name}, busy"] = partial(beside_busy, once)
    measured, rows = in_turn(options, calls), []
    for script in scripts:
        if f"{script}, default, busy" in measured:
            names = "default, quiet", "default, busy", "all threads, quiet", "all threads, busy"
            rates = [column(measured[f"{script}, {name}"], "env_steps_per_second") for name in names]
            rows.append([f"`{script}`", *map(spread, rates), spread(ratios(rates[1], rates[3]), 1)])
    header = (
        f"env steps/s of | default, quiet | default, busy | `--threads {cores}`, quiet | `--threads {cores}`, busy | "
    )
    return table(f"{header}× of default while busy", rows), {"runs": measured}


def free_gib(device: torch.device) -> float:
    if device.type == "cuda":
        return torch.cuda.mem_get_info()[0] / 2**30
    meminfo = Path("/proc/meminfo")
    found = re.search(r"MemAvailable:\s+(\d+) kB", meminfo.read_text()) if meminfo.exists() else None
    return int(found[1]) / 2**20 if found else math.inf


def table_scaling(options: Options, device: torch.device) -> tuple[str, dict]:
    """What a step costs as work grows, end to end: a script with one flag changed, smallest first.

    A step of `ppo_metta.py` is one agent's. A size whose memory, judged by the growth so far, would not fit is not
    started.
    """
    sizes = {"dqn_snake.py --num-envs": [1, 16, 256, 4096, 65536]}
    sizes |= {"dqn_snake.py --batch-size": [32, 512, 8192, 65536]}
    sizes |= {"dqn_snake.py --board": ["6x6", "10x10", "16x16", "32x32"]}
    sizes |= {"ppo_metta.py --size 40 --num-envs 32 --agents": [6, 24, 96]}
    sizes |= {"ppo_metta.py --num-envs": [1, 16, 256, 2048]}
    sizes |= {f"{MARIO} --envs-per-collector": [1, 8, 64]}
    rows, raw = [], []
    for flag, values in sizes.items():
        script, flag = flag.split(" ", 1)
        base = f"{QUICK} --max-seconds {5 if options.fast else 8}"
        base += "" if "ppo" in script else " --learning-starts 1000"
        values, peaks = values[:: 3 if options.fast else 1], []
        for i, value in enumerate(values):
            work = [math.prod(map(int, str(value).split("x"))) for value in values[: i + 1]]
            try:
                if i and peaks[0] + (peaks[-1] - peaks[0]) * work[-1] / work[-2] > 0.8 * free_gib(device):
                    raise MemoryError
                runs = in_turn(options, {value: lambda: run(f"{base} {flag} {value}", options, script)})[value]
            except MemoryError:
                rows.append([f"`{script} {flag} {value}`", "too little memory", "", "", "", ""])
                break
            peaks.append(max(one["peak_memory_gib"] for one in runs))
            raw.append({"script": script, "flag": flag, "value": value, "runs": runs})
            row = [f"`{script} {flag} {value}`", spread(column(runs, "env_steps_per_second"))]
            row += [f"{middle(runs, f'{what}_per_second'):,.1f}" for what in ("updates", "samples")]
            rows.append([*row, f"{middle(runs, 'replay_ratio'):.2f}", f"{peaks[-1]:.2f}"])
    return table("command | env steps/s | updates/s | samples/s | replay ratio | peak GiB", rows), {"cells": raw}


# ------------------------------------------------------------------------------------------------ Snake: learning


def curve(folder: Path, tag: str = "eval/score_mean") -> list[list[float]]:
    """[seconds, value] of every evaluation of a run, from its TensorBoard files.

    The seconds are those that the loop counts: warm-up, evaluations and checkpoints stop the clock.
    """
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    steps, seconds = [0], [0.0]
    for point in events.Scalars("charts/SPS"):
        if point.step > steps[-1]:
            seconds.append(seconds[-1] + (point.step - steps[-1]) / point.value)
            steps.append(point.step)
    return [[float(np.interp(point.step, steps, seconds)), point.value] for point in events.Scalars(tag)]


def table_learn(options: Options, device: torch.device) -> tuple[str, dict]:
    """Mean food over 1,000 greedy games after a wall-clock budget, per seed."""
    settings = [(60, "", options.seeds), (120, "", options.seeds), (600, "", options.seeds)]
    settings += [(600, extra, [1]) for extra in ("--batch-size 8192 --bf16", "--network attention")]
    rows, raw = [], []
    for seconds, extra, seeds in settings[: 1 if options.fast else None]:
        flags = f"--max-seconds {seconds} {extra}".strip()
        runs = [run(f"{flags} --seed {seed}", options) for seed in seeds]
        raw += [one | {"curve": curve(ROOT / "runs" / one["run"])} for one in runs]
        scores = [one["eval_score_mean"] for one in runs]
        best = max(one["eval_score_max"] for one in runs)
        rows.append([f"`{flags}`", " · ".join(f"{score:.1f}" for score in scores), f"{statistics.mean(scores):.1f}",
                     f"{best:.0f}", spread(column(runs, "env_steps_per_second"))])  # fmt: skip
    return table("flags | mean food, seeds 1 · 2 · 3 | mean | best game | env steps/s", rows), {"runs": raw}


def reached(curve: list[list[float]], goal: float) -> float | None:
    """Seconds at the first evaluation that reached `goal`, None if none did."""
    return next((seconds for seconds, score in curve if score >= goal), None)


def moves(curves: list, goals: tuple) -> bool:
    """Whether another seed says more: not if the first one never came to the first goal."""
    return not curves or reached(curves[0], goals[0]) is not None


def seconds_to(goals: tuple, unit: str, curves: dict[str, list], ends: dict[str, float]) -> tuple[str, dict]:
    """Tables of the seconds to each goal, and of how many times sooner the first of `curves` is there than the others.

    `curves` has one per seed, by who learns; `ends` is when those were over that did not get there.
    """
    rows, sooner, compared, (us, *_) = [], [], {}, curves
    for name, runs in curves.items():
        found = [[reached(one, goal) for one in runs] for goal in goals]
        texts = [[f"> {ends[name]:,.0f}" if at is None else f"{at:,.1f}" for at in ats] for ats in found]
        rows.append([name, *map(" · ".join, texts)])
        if name == us:
            ours = found
            continue
        sooner.append([name])
        for goal, ats, own in zip(goals, found, ours):
            if None in own:
                sooner[-1].append("–")
            else:
                compared[f"{name}, {goal} {unit}"] = times = [(at or ends[name]) / mine for at, mine in zip(ats, own)]
                sooner[-1].append(("> " if None in ats else "") + spread(times, 1))
    header = " | ".join(f"{goal:,} {unit}" for goal in goals)
    text = table(f"seconds to | {header}", rows) + "\n\n" + table(f"{us} is sooner than | {header}", sooner)
    return text, compared


def sb3_plans(
    agents: Iterable[str], explored: dict[str, int], longest: int, rate: Callable, seconds: int, options: Options,
    device: torch.device,
) -> tuple[dict, dict]:  # fmt: skip
    """Settings of SB3 agents, the faster number of threads by `rate` among them, and after how many seconds each ends.

    That is `longest` at SB3's defaults, ten minutes with ours. A DQN explores over a tenth of what it can play until
    then, or in the seconds of the part of its name in `explored`.
    """
    plans, ends = {}, {}
    for name in agents:
        defaults, rates = "defaults" in name, {}
        for threads in {torch.get_num_threads()} | (set() if defaults else {1}):
            found = apart(rate, seconds=seconds, name=name, device=device.type, threads=threads)
            rates[threads] = found["env_steps_per_second"]
        ends[name], threads = 20 if options.fast else longest if defaults else 600, max(rates, key=rates.get)
        horizon = next((most for part, most in explored.items() if part in name), ends[name])
        steps = int(0.1 * min(horizon, ends[name]) * rates[threads])
        plans[name] = {"name": name, "threads": threads, "explored": steps}
    return plans, ends


def table_time_to_score(options: Options, device: torch.device) -> tuple[str, dict]:
    """Seconds of training until an evaluation (100 greedy games) reaches a mean score, per seed.

    All learn `Snake-v0` and are evaluated on the same games: ours about every second, SB3's every second, later every
    twentieth of the time so far. Importing, building and evaluating stop the clock for all. ">" is a run that did not
    get there: in 20 minutes at SB3's defaults, in 10 with our settings; who gets nowhere has one seed. "Ours" has half
    the width, a plain target and a third of the exploration of its defaults, which pays in the first minute. SB3's
    agents: at their defaults; with our view of the board, our gamma and the faster of one and all threads; and its DQN
    with all of our recipe that it can be told, width and exploration too. A DQN explores over a tenth of what it can
    play in 20 minutes at its defaults, in two with our view. The second table is how many times sooner ours is.
    """
    goals, steps, explored = (5, 10, 20, 30), 60_000 if options.fast else 600_000, 0.03
    agents = list(AGENTS)[1:3] if options.fast else AGENTS
    plans, ends = sb3_plans(agents, {"our view": 120}, 1200, sb3_rate, 5, options, device)
    for name in agents:
        if "recipe" in name:
            plans[name] |= {"width": 256, "explored": round(explored * steps)}
    flags = f"--total-timesteps {steps} --eval-every 1.5 --log-every 1 --eval-episodes 1000 --checkpoint-every 0"
    variants = {"ours": f"{flags} --hidden-size 256 --no-double --exploration-fraction {explored}"}
    variants |= {"ours, defaults": flags}
    curves = {name: [] for name in [*variants, *plans]}
    for seed in options.seeds:
        for name, flags in variants.items():
            one = run(f"{flags} --seed {seed}", options)
            curves[name].append(curve(ROOT / "runs" / one["run"]))
        for name, plan in plans.items():
            limits = {"seconds": ends[name], "every": 1, "goal": goals[-1], "seed": seed, "device": device.type}
            if moves(curves[name], goals):
                curves[name].append(apart(sb3_curve, **plan, **limits))
    ends |= {name: curves[name][0][-1][0] for name in variants}
    text, compared = seconds_to(goals, "food", curves, ends)
    text += f"\n\nOurs: `python dqn_snake.py {variants['ours']}`. Threads of SB3: "
    text += ", ".join(f"{plan['threads']} ({name})" for name, plan in plans.items()) + "."
    return text, {"goals": goals, "curves": curves, "plans": plans, "ends": ends, "ratios": compared}


# ------------------------------------------------------------------ dqn_snake_sb3_compat.py beside the original


def table_sb3_speed(options: Options, device: torch.device) -> tuple[str, dict]:
    """`dqn_snake_sb3_compat.py` beside Stable-Baselines3, in turn: same game, network, batch 32, train_freq 4.

    "×" is ours to the faster SB3, within a round.
    """
    cases = [("CartPole-v1", 1), ("CartPole-v1", 8), ("Snake-v0", 1), ("Snake-v0", 8)][:: 3 if options.fast else 1]
    rows, raw, compared, seconds = [], {}, {}, 2 if options.fast else 5

    def ours(more: str, seconds: int) -> dict:
        flags = f"{QUICK} --env-id {env_id} --num-envs {num_envs} --exploration-initial-eps 0.05"
        return run(f"{flags} --max-seconds {seconds} {more}".strip(), options, "dqn_snake_sb3_compat.py")

    def theirs(threads: int) -> dict:
        settings = {"env_id": env_id, "num_envs": num_envs, "threads": threads}
        return apart(sb3_rate, seconds=seconds, name="SB3's DQN, defaults", device=device.type, **settings)

    calls = {
        "ours": lambda: ours("", seconds),
        "ours, `--compile`": lambda: ours("--compile", seconds + 5),  # compiling takes five and is not counted
        "SB3, 1 thread": lambda: theirs(1),
        "SB3, all threads": lambda: theirs(torch.get_num_threads()),
    }
    for env_id, num_envs in cases:
        measured = in_turn(options, calls)
        rates = {name: column(runs, "env_steps_per_second") for name, runs in measured.items()}
        plain, compiled, *peers = rates.values()
        case, fastest = f"{env_id}, {num_envs}", list(map(max, *peers))
        both = {f"{case}": ratios(plain, fastest), f"{case}, --compile": ratios(compiled, fastest)}
        rows.append([case, *map(spread, rates.values()), *(spread(values, 1) for values in both.values())])
        raw[case] = rates
        compared |= both
    text = table("game, how many | " + " | ".join(calls) + " | × | × with `--compile`", rows)
    return text, {"rates": raw, "ratios": compared}


TUNED = dict(  # for CartPole-v1, from rl-baselines3-zoo
    learning_rate=2.3e-3, batch_size=64, buffer_size=100_000, learning_starts=1000, target_update_interval=10,
    train_freq=256, gradient_steps=128, exploration_fraction=0.16, exploration_final_eps=0.04,
)  # fmt: skip


def sb3_learn(seed: int) -> list[float]:
    """Seconds and mean return over 100 games of SB3's DQN after 50,000 steps."""
    from stable_baselines3.common.evaluation import evaluate_policy

    start = time.perf_counter()
    model = sb3_agent("SB3's DQN, defaults", "cpu", 1, "CartPole-v1", seed, **TUNED).learn(50_000)
    seconds = time.perf_counter() - start
    return [seconds, float(evaluate_policy(model, model.get_env(), 100)[0])]


def table_sb3_learn(options: Options, device: torch.device) -> tuple[str, dict]:
    """CartPole-v1 learned for 50,000 steps by both, with the same tuned hyperparameters: mean return, 500 at most.

    DQN's last policy is a lottery here, so there are ten tickets.
    """
    flags = "--env-id CartPole-v1 --total-timesteps 50000 --eval-every 0 --threads 1 "
    flags += " ".join(f"--{name.replace('_', '-')} {value}" for name, value in TUNED.items())
    rows, raw = [], {"ours": [], "ours, `--compile`": [], "SB3": []}
    seeds = range(1, 3 if options.fast else 11)
    for seed in seeds:
        for name, more in (("ours", ""), ("ours, `--compile`", " --compile")):
            one = run(f"{flags} --seed {seed}{more}", options, "dqn_snake_sb3_compat.py")
            raw[name].append([one["wall_seconds"], one["eval_score_mean"]])
        raw["SB3"].append(apart(sb3_learn, seed=seed))
    compared, peer = {}, [seconds for seconds, _ in raw["SB3"]]
    for name, found in raw.items():
        seconds, scores = map(list, zip(*found))
        compared[name] = ratios(peer, seconds)
        each = " · ".join(f"{score:.0f}" for score in sorted(scores))
        rows.append([name, each, f"{statistics.mean(scores):.0f}", spread(seconds, 1), spread(compared[name], 1)])
    del compared["SB3"]
    text = table("who | mean return of 100 games, a seed each | mean | seconds | SB3's seconds to these", rows)
    return text, {"runs": raw, "ratios": compared}


SWEPT = {"fp32": "", "tf32": "--tf32", "bf16": "--bf16", "compile": "--compile"}  # flags by words of its rows' names
SWEPT |= {kernel: f"--sdpa {kernel}" for kernel in ("flash", "efficient", "math")}


def inactive(words: list[str], one: dict) -> dict[str, str]:
    """The switches among `words` that did not work in a run, and what ran instead."""
    ran = {"bf16": one["precision"].replace("bfloat", "bf"), "compile": "compile" if one["compiled"] else "eager mode"}
    ran |= dict.fromkeys(("flash", "efficient", "math"), one["sdpa"].removesuffix("_attention"))
    return {word: f"{word} not active, {ran[word]} instead" for word in words if ran.get(word, word) != word}


def table_sweep(options: Options, device: torch.device) -> tuple[str, dict]:
    """The transformer of `dqn_snake_sb3_compat.py` on 20x20, train_freq 4, by switches and batch: one run a cell."""
    batches, off = (32, 64, 128), {"tf32": "needs CUDA", "efficient": "needs CUDA"}  # off: what cannot work, and why
    if device.type == "cuda":
        batches = (128, 256, 512, 1024, 2048, 4096, 8192, 16384)
        off = {} if torch.cuda.get_device_capability() >= (8, 0) else {"tf32": "needs a newer GPU"}
    batches = batches[:: 3 if options.fast else 1]
    cells, cross, more = [], [], ("flash", "efficient", "math", "compile", "compile + flash")
    for name in ("fp32", "tf32", "bf16", *(f"bf16 + {switches}" for switches in more)):
        if "bf16" in off and name != "bf16":
            name = name.replace("bf16", "fp32")  # where bf16 does nothing the other switches are measured without it
        words, row = name.split(" + "), [name]
        flags = "--policy transformer --board 20x20 --buffer-size 100000 --exploration-initial-eps 0.05 --log-every 1 "
        flags += "--eval-every 0 --eval-episodes 1 --checkpoint-every 0 --max-seconds "
        flags += (
            "15 " if "compile" not in words else "60 " if device.type == "cpu" else "90 "
        )  # to compile takes a part of it
        switches = " ".join(SWEPT[word] for word in words).strip()
        for batch in batches:
            cell, marks = {}, {word: off[word] for word in words if word in off}
            try:
                if not marks:
                    one = run(f"{flags}--batch-size {batch} {switches}".strip(), options, "dqn_snake_sb3_compat.py")
                    cell, marks = one, inactive(words, one)
                    off |= marks if batch == batches[0] else {}  # what the smallest batch does without, all do
                    marks |= {} if one["updates_per_second"] else {"time": "no update in time"}
            except MemoryError:
                marks = {"memory": "OOM"}
            cells.append({"configuration": name, "batch": batch, "mark": "; ".join(marks.values())} | cell)
            row.append(cells[-1]["mark"] or f"{cell['samples_per_second']:,.1f}")
        cross.append(row)

    ranked = sorted((cell for cell in cells if not cell["mark"]), key=lambda cell: -cell["samples_per_second"])
    best = next((cell for cell in ranked if not re.search("tf32|efficient|math", cell["configuration"])), None)
    if best is None:
        sys.exit("sweep: nothing that .env can set could be measured; a GPU or machine with more memory is needed")
    row = "{configuration} | {batch:,} | {samples_per_second:,.1f} | {updates_per_second:,.2f} | "
    row += "{env_steps_per_second:,.2f} | {replay_ratio:,g} | {peak_memory_gib:.2f}"
    rows = [[place, row.format(**cell)] for place, cell in enumerate(ranked[:20], 1)]
    says = "{configuration} at batch {batch:,}: {samples_per_second:,.1f} samples/s, {env_steps_per_second:,.2f} env "
    says += "steps/s, replay ratio {replay_ratio:g}"
    steps = max(ranked, key=lambda cell: cell["env_steps_per_second"])
    text = table("place | switches | batch | samples/s | updates/s | env steps/s | replay ratio | peak GiB", rows)
    text += "\n\nSamples/s:\n\n" + table("switches | " + " | ".join(f"batch {batch:,}" for batch in batches), cross)
    text += f"\n\nMost samples/s that .env can set: {says.format(**best)}. That is throughput, no promise of learning "
    text += f"sooner.\nMost env steps/s: {says.format(**steps)}."
    words = {"USE_TORCH_COMPILE": "compile", "USE_FLASH_ATTENTION": "flash", "USE_BF16": "bf16"}
    env = {name: str(word in best["configuration"]).lower() for name, word in words.items()}
    return text, {"cells": cells, "env": {"OPTIMAL_BATCH_SIZE": str(best["batch"])} | env}


def write_env(values: dict[str, str]) -> None:
    """Set `values` in .env and keep the rest letter for letter; without values, only see whether that would work.

    dotenv's own set_key drops `export`, and comments and blank lines next to what it changes.
    """
    path = Path(".env").resolve()  # where it is a link, the file behind it
    temporary, text, missing = path.with_name(f"{path.name}.tmp"), "", dict(values)
    try:
        old = path.read_bytes().decode() if path.exists() else ""
        for line in parse_stream(io.StringIO(old, newline="")):
            part = line.original.string
            if line.key in values:
                missing.pop(line.key, None)
                quoted_or_not = r"""(?:(?P<quote>['"]).*?\3(?=\s*(?:#|$))|[^\r\n]*?(?=\s+#|\s*$))"""
                found = re.search(rf"('?\b{line.key}\b'?)(\s*=[^\S\r\n]*)?{quoted_or_not}", part)
                quote = found["quote"] or ""
                new = f"{found[1]}{found[2] or '='}{quote}{values[line.key]}{quote}"
                part = part[: found.start()] + new + part[found.end() :]
            text += part
        text += "\n" if missing and text and not text.endswith("\n") else ""
        text += "".join(f"{name}={value}\n" for name, value in missing.items())
        temporary.touch(0o600)  # .env may hold secrets
        temporary.write_bytes(text.encode())
        if path.exists():
            shutil.copymode(path, temporary)
        if values:
            temporary.replace(path)
            print(f"{path}: " + " ".join(f"{name}={value}" for name, value in values.items()))
    except (OSError, ValueError) as error:
        fail(f"--write-env: {path} cannot be changed ({error}); a text file in a folder that can be written works")
    finally:
        temporary.unlink(missing_ok=True)


# ------------------------------------------------------------------------------------------------- the arena


def metta_errands(arena: MettaArena, body: Thing) -> dict[Thing, int]:
    """Converters that are of use to this agent now, and what to do there: hearts, batteries and ore, in or out."""
    errands = {}
    for converter in arena.converters:
        recipe = arena.rules.book[converter.name]
        if set(recipe.outputs) & {"heart", "battery_red", "ore_red"}:
            ready = [ITEMS.index(item) for item in recipe.outputs]
            needs = [(ITEMS.index(item), number) for item, number in recipe.inputs.items()]
            if any(converter.inventory[k] and body.inventory[k] < CARRY[k] for k in ready):
                errands[converter] = GET
            elif needs and all(body.inventory[k] >= n and converter.inventory[k] < 2 * n for k, n in needs):
                errands[converter] = PUT
    return errands


def metta_action(arena: MettaArena, body: Thing) -> int:
    """One action on the shortest way to the nearest errand; a random turn where there is none."""
    errands, grid, start = metta_errands(arena, body), arena.grid, (body.row, body.column)
    queue, first = deque([start]), {start: None}  # first step on the way to each cell
    while queue:
        row, column = queue.popleft()
        for direction, (down, across) in enumerate(MOVES):
            cell = row + down, column + across
            thing, step = grid[cell[0]][cell[1]], first[row, column]
            if thing in errands:
                if step is None:
                    return errands[thing] if body.heading == direction else ROTATE + direction
                return FORWARD if body.heading == step else ROTATE + step
            if thing is None and cell not in first:
                first[cell] = direction if step is None else step
                queue.append(cell)
    return random.choice([NOOP, FORWARD, *range(ROTATE, ROTATE + 4)])


ARENAS = {"arena, easy": "", "arena": "--no-easy", "navigation": "--env-id MettaNavigation-v0"}  # flags by name
REAL = "--env-id mettagrid --vec-env subproc"


def metta_args(flags: str, device: str) -> ppo_metta.Args:
    return ppo_metta.fill_defaults(ppo_metta.parse_args(shlex.split(flags)), torch.device(device))


def scripted_hearts(flags: str, agent_episodes: int) -> float:
    """Mean hearts per agent of whole episodes by the scripted player, on the rule book."""
    arena = MettaArena(random_first_length=False, **ppo_metta.rules_of(metta_args(flags, "cpu")))
    hearts, episodes = 0, -(-agent_episodes // arena.rules.num_agents)
    random.seed(0)
    for seed in range(episodes):
        arena.reset(seed=seed)
        while arena.agents:
            arena.step({name: metta_action(arena, body) for name, body in zip(arena.agents, arena.bodies)})
        hearts += sum(stats["heart.get"] for stats in arena.stats)
    return hearts / episodes / arena.rules.num_agents


def random_hearts(flags: str, agent_episodes: int) -> float:
    """The same by random actions, in the trainer's games."""
    args, cpu = metta_args(flags, "cpu"), torch.device("cpu")
    agents = len(ppo_metta.make_games(args, 1, cpu, 0).obs)
    games = ppo_metta.make_games(args, -(-agent_episodes // agents), cpu, 0, evaluation=True)
    torch.manual_seed(0)
    for _ in range(games.max_steps):
        *_, info = games.step(torch.randint(games.num_actions, (len(games.obs),)))
    return info["hearts"].float().mean().item()


def rule_book_rate(num_envs: int, seconds: float) -> float:
    """Agent steps per second under random actions of arenas of the rule book, one after another."""
    books = RuleBooks(metta_args(f"--num-envs {num_envs}", "cpu"))
    actions = torch.randint(books.num_actions, (len(books.obs),))
    return rate_of(lambda: books.step(actions), len(actions), seconds)


def table_metta_env(options: Options, device: torch.device) -> tuple[str, dict]:
    """The arena alone, random actions, 6 agents each: agent steps per second by arenas at once.

    Beside it the rule book in Python, one arena after another. "×" is ours to it, within a round. The column with a G
    is Gymnasium's own measure, which draws the actions too: `MettaVectorEnv` takes and gives NumPy arrays.
    """
    widths, seconds = ((1, 128), 0.3) if options.fast else ((1, 16, 128, 1024), 1.0)
    rules, calls = ppo_metta.rules_of(metta_args("", device.type)), {}
    lanes = tuple(Rules(**rules).num_agents * width for width in widths)
    vector = {"game": "MettaVectorEnv", "widths": lanes, "seconds": seconds}
    calls["G",] = lambda: apart(gymnasium_rates, **vector, **rules)
    for width in widths:
        batched = {"flags": f"--num-envs {width}", "seconds": seconds, "device": device.type}
        calls["ours", width] = lambda batched=batched: apart(metta_env_rate, **batched)
        if width <= 128:
            calls["book", width] = lambda width=width: apart(rule_book_rate, num_envs=width, seconds=seconds)
    measured, compared, rows = in_turn(options, calls), {}, []
    for width, vectors in zip(widths, zip(*measured["G",])):
        rows.append([f"{width:,}", spread(measured["ours", width]), "", "", spread(vectors)])
        if book := measured.get(("book", width)):
            compared[f"rule book, {width:,} arenas"] = times = ratios(measured["ours", width], book)
            rows[-1][2:4] = spread(book), spread(times, 2)
    rates = {", ".join(map(str, key)): found for key, found in measured.items()}
    text = table("arenas | batched | rule book | × | `MettaVectorEnv`, G", rows)
    return text, {"widths": widths, "rates": rates, "ratios": compared}


def table_metta_hearts(options: Options, device: torch.device) -> tuple[str, dict]:
    """Hearts per agent and episode by players that learn nothing, whole episodes.

    The scripted player walks the shortest way to the nearest thing of use: in the arena from mine to generator to
    altar, in navigation to the nearest altar that has its heart. MettaGrid is the real one, mines and altars.
    """
    scripted, by_chance = (24, 120) if options.fast else (120, 2400)
    games = ARENAS | ({"MettaGrid": REAL} if util.find_spec("mettagrid") else {})
    with ThreadPoolExecutor(ppo_metta.CORES) as pool:  # nothing is timed here
        scripts = {
            name: pool.submit(apart, scripted_hearts, flags=ARENAS[name], agent_episodes=scripted) for name in ARENAS
        }
        chances = {
            name: pool.submit(apart, random_hearts, flags=games[name], agent_episodes=by_chance) for name in games
        }
    rows, raw = [], {"random": {}, "scripted": {}}
    for name in games:
        raw["random"][name] = chances[name].result()
        rows.append([name, f"{raw['random'][name]:.3f}", "–"])
        if name in scripts:
            raw["scripted"][name] = scripts[name].result()
            rows[-1][2] = f"{raw['scripted'][name]:.2f}"
    header = f"game | random, {by_chance:,} episodes of agents | scripted, {scripted}"
    return table(header, rows), {"hearts": raw}


def metta_run(flags: str, options: Options) -> dict:
    """Summary of a run of ppo_metta.py, with its agent steps per second of the time in rollouts, and of learning."""
    one = run(flags, options, "ppo_metta.py")
    for phase in ("rollout", "train"):
        one[f"{phase}_steps_per_second"] = one["env_steps_per_second"] / max(one[f"{phase}_fraction"], 1e-9)
    return one


def logged(folder: Path) -> dict[str, float]:
    """Mean over a run of every scalar in its TensorBoard files, a value counted by the steps since the one before."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    means = {}
    for tag in events.Tags()["scalars"]:
        steps, values = zip(*((point.step, point.value) for point in events.Scalars(tag)))
        weights = np.diff(steps, prepend=0)
        means[tag] = float(np.average(values, weights=weights) if weights.any() else values[-1])
    return means


def metta_env_rate(flags: str, seconds: float, device: str) -> float:
    """Agent steps per second under random actions of the games that a run with `flags` plays in one process."""
    args = metta_args(flags, device)
    shared = args.vec_env == "subproc" and args.num_workers > 0  # then this is one of the workers
    groups = args.async_factor if shared else 1
    torch.set_num_threads(1 if shared else args.threads)
    where = torch.device(device if args.vec_env == "device" else "cpu")
    number = args.num_envs // (groups * args.num_workers if shared else 1)
    games = [ppo_metta.make_games(args, number, where, seed) for seed in range(groups)]
    actions = torch.randint(games[0].num_actions, (16, len(games[0].obs)), device=where)

    def work() -> None:
        for action in actions:
            for group in games:
                group.step(action)

    return rate_of(work, groups * actions.numel(), seconds, device)


def metta_agent(args: ppo_metta.Args, device: torch.device) -> tuple[ppo_metta.Agent, torch.Tensor]:
    """The network of a run, untrained, and what all agents that act together see after some random steps."""
    torch.set_num_threads(args.threads)
    torch.manual_seed(1)
    groups = args.async_factor if args.vec_env == "subproc" and args.num_workers else 1
    where = device if args.vec_env == "device" else torch.device("cpu")
    games = ppo_metta.make_games(args, args.num_envs // groups, where, 1)
    for _ in range(20):
        games.step(torch.randint(games.num_actions, (len(games.obs),), device=where))
    return metta_network(args, games, device), games.obs.to(device)


def metta_network(args: ppo_metta.Args, games: Any, device: torch.device) -> ppo_metta.Agent:
    """The network of a run, untrained."""
    return ppo_metta.Agent(args, games, device)


def rollout_sizes(args: ppo_metta.Args, num_agents: int) -> tuple[int, int]:
    """Steps of a rollout, and agent steps of a minibatch, of a run with so many agents."""
    return args.num_steps, args.num_steps * num_agents // args.num_minibatches


def metta_mflops(variants: list[str], device: str) -> list[float]:
    """Millions of floating point operations of one agent's decision: matmuls, convolutions and sums over bags."""

    def bag(table: torch.Size, row: torch.Size, *_: Any, **__: Any) -> int:
        return 2 * math.prod(row) * table[1]

    def lstm(x: torch.Size, input_weight: torch.Size, hidden_weight: torch.Size, *_: Any, **__: Any) -> int:
        return 2 * math.prod(x[:2]) * (math.prod(input_weight) + math.prod(hidden_weight))

    def cudnn_rnn(x: torch.Size, weights: list[torch.Size], *_: Any, **__: Any) -> int:
        return 2 * math.prod(x[:2]) * sum(math.prod(weight) for weight in weights if len(weight) == 2)

    aten, found = torch.ops.aten, []
    uncounted = {aten._embedding_bag: bag, aten._embedding_bag_forward_only: bag, aten.mkldnn_rnn_layer: lstm}
    uncounted[aten._cudnn_rnn] = cudnn_rnn
    for flags in variants:
        agent, obs = metta_agent(metta_args(flags, device), torch.device(device))
        state = torch.zeros(len(obs), agent.state_size, device=device)
        counter = FlopCounterMode(display=False, custom_mapping=uncounted)
        agent.requires_grad_(False)  # under no_grad the counter trips over views of weights
        with counter:
            agent(obs[None], state, torch.zeros(1, len(obs), dtype=torch.bool, device=device))
        found.append(counter.get_total_flops() / len(obs) / 1e6)
    return found


def table_metta_speed(options: Options, device: torch.device) -> tuple[str, dict]:
    """Agent steps per second of `ppo_metta.py` by memory and width of the network: rollouts, learning and both.

    A run does one after the other, so "rollouts" is its steps per second of the time spent on them, games included, and
    "learning" those of the rest of its time; epochs and batches are the defaults. MFLOP are those of one decision of an
    agent, the forward pass; the width closest to 0.5 costs what the LSTM of PufferLib's figure (below) does. Wanted on
    two cores, end to end: 10,000 at the defaults, 25,000 at 0.5 MFLOP.
    """
    variants = ["", *(f"--hidden-size {width}" for width in range(64, 321, 16)), "--rnn gru", "--rnn none"]
    mflops = dict(zip(variants, apart(metta_mflops, variants=variants, device=device.type)))
    half = min(variants[1:-2], key=lambda flags: abs(mflops[flags] - 0.5))
    others = [] if options.fast else ["--hidden-size 256", "--rnn gru", "--rnn none"]
    variants = ["", *dict.fromkeys([half, *others])]
    base, seconds = f"{QUICK} --max-seconds {5 if options.fast else 6}", 1 if options.fast else 2
    calls = {flags: lambda flags=flags: metta_run(f"{base} {flags}".strip(), options) for flags in variants}
    calls["games"] = lambda: apart(metta_env_rate, flags="", seconds=seconds, device=device.type)
    measured = in_turn(options, calls)
    games, rows = measured.pop("games"), []
    for flags, runs in measured.items():
        rates = [spread(column(runs, key)) for key in ("rollout_steps_per_second", "train_steps_per_second")]
        end_to_end = spread(column(runs, "env_steps_per_second"))
        replay_ratio = f"{middle(runs, 'replay_ratio'):.2f}"
        rows.append([f"`{flags}`" if flags else "default", f"{mflops[flags]:.2f}", *rates, end_to_end, replay_ratio])
    text = table("flags | MFLOP | rollouts | learning | end to end | replay ratio", rows)
    text += f"\n\nThe games alone, as many as by default, random actions: {spread(games)} agent steps/s."
    return text, {"runs": measured, "games": games, "mflop": mflops}


class MettaView(torch.nn.Module):
    """ppo_metta.py's network up to its heads, as what an SB3 policy makes of tokens. SB3 hands them over as floats."""

    def __init__(self, space: gymnasium.spaces.Box, flags: str, device: str) -> None:
        super().__init__()
        args = metta_args(flags, device)
        example = ppo_metta.make_games(args, 1, torch.device("cpu"), 1)
        self.encoder = metta_network(args, example, torch.device(device)).encoder
        self.features_dim = args.hidden_size

    def forward(self, obs: torch.Tensor) -> torch.Tensor:
        return self.encoder(obs.byte())


class RuleBooks:
    """Arenas of the rule book, one after another, called as `MettaBatch` is."""

    def __init__(self, args: ppo_metta.Args) -> None:
        self.arenas = [MettaArena(lane=lane, **ppo_metta.rules_of(args)) for lane in range(args.num_envs)]
        self.num_actions, self.obs = 25, self.stacked([arena.reset(seed=1)[0] for arena in self.arenas])

    def stacked(self, parts: list[dict]) -> torch.Tensor:
        """One tensor of what all agents of all arenas have."""
        return torch.as_tensor(np.stack([value for part in parts for value in part.values()]))

    def step(self, action: torch.Tensor):
        actions, results, starts = action.view(len(self.arenas), -1).tolist(), [], []
        for arena, chosen in zip(self.arenas, actions):
            results.append(arena.step(dict(zip(arena.agents, chosen))))
            starts.append(results[-1][0] if arena.agents else arena.reset()[0])
        final_obs, reward, terminated, truncated = (self.stacked(part) for part in list(zip(*results))[:4])
        return self.stacked(starts), reward.float(), terminated, truncated, {"final_obs": final_obs}


def sb3_lanes(args: ppo_metta.Args, rule_book: bool, device: torch.device) -> Any:
    """The agents of a run's arenas as the games of SB3's PPO."""
    from stable_baselines3.common.vec_env import VecEnv

    class Lanes(VecEnv):
        def __init__(self) -> None:
            self.seconds = 0.0  # that games took
            self.games = RuleBooks(args) if rule_book else ppo_metta.make_games(args, args.num_envs, device, 1)
            lanes, *shape = self.games.obs.shape
            space = gymnasium.spaces.Box(0, 255, tuple(shape), np.uint8)
            super().__init__(lanes, space, gymnasium.spaces.Discrete(self.games.num_actions))

        def reset(self) -> np.ndarray:
            return self.games.obs.cpu().numpy().copy()

        def step_async(self, actions: np.ndarray) -> None:
            self.actions = torch.as_tensor(actions, device=device)

        def step_wait(self):
            start = time.perf_counter()
            obs, reward, terminated, truncated, info = self.games.step(self.actions)
            self.seconds += time.perf_counter() - start
            infos = [{}] * self.num_envs  # one and the same: it is only read
            for lane in truncated.nonzero().flatten().tolist():
                cut = {"terminal_observation": info["final_obs"][lane].cpu().numpy(), "TimeLimit.truncated": True}
                infos[lane] = cut
            reward = (args.reward_scale * reward).cpu().numpy()
            return obs.cpu().numpy().copy(), reward, (terminated | truncated).cpu().numpy(), infos

        def get_attr(self, name: str, indices: Any = None) -> list:
            return [None] * self.num_envs  # the render mode: nothing else is asked for

        close = set_attr = env_method = env_is_wrapped = None  # a VecEnv must have them, PPO does without

    return Lanes()


def sb3_arena_agent(flags: str, games: Any, threads: int, device: str, seed: int = 1) -> Any:
    """SB3's PPO as a run with `flags` is: network, first weights, batch, minibatch, epochs, coefficients."""
    from stable_baselines3 import PPO

    args = metta_args(flags, device)
    num_steps, minibatch_size = rollout_sizes(args, games.num_envs)
    torch.set_num_threads(threads)
    encoder = {"features_extractor_class": MettaView, "features_extractor_kwargs": {"flags": flags, "device": device}}
    vf_coef = args.vf_coef / 2  # SB3's value loss is the mean of squares, ours half of that
    model = PPO(
        "MlpPolicy", games, args.learning_rate, num_steps, minibatch_size, args.update_epochs,
        args.gamma, args.gae_lambda, args.clip_coef, args.vf_clip_coef, args.norm_adv,
        args.ent_coef, vf_coef, args.max_grad_norm, policy_kwargs=encoder | {"net_arch": [], "ortho_init": False},
        device=device, seed=seed,
    )  # fmt: skip
    for head, gain in ((model.policy.action_net, 0.01), (model.policy.value_net, 1.0)):
        torch.nn.init.orthogonal_(head.weight, gain)
        torch.nn.init.zeros_(head.bias)
    return model


def sb3_arena_rate(flags: str, rule_book: bool, threads: int, seconds: float, device: str) -> dict[str, float]:
    """Agent steps per second of SB3's PPO in a run's arena with its network, batch, minibatch and epochs, and the
    microseconds of a step in games, the rest of rollouts, and learning. Whole iterations, without the first."""
    from stable_baselines3.common.callbacks import BaseCallback

    games = sb3_lanes(metta_args(flags, device), rule_book, torch.device(device))
    model = sb3_arena_agent(flags, games, threads, device)
    begins, ends = [], []

    class Marks(BaseCallback):
        def _on_rollout_start(self) -> None:
            begins.append((time.perf_counter(), games.seconds))

        def _on_rollout_end(self) -> None:
            ends.append(time.perf_counter())

        def _on_step(self) -> bool:
            return len(begins) < 3 or time.perf_counter() - begins[1][0] < seconds

    model.learn(FOREVER, callback=Marks())
    iterations = len(begins) - 2
    total, playing = (after - before for before, after in zip(begins[1], begins[-1]))
    learning = sum(begin - end for (begin, _), end in zip(begins[2:], ends[1:]))
    steps = iterations * model.n_steps * games.num_envs
    spent = {"games": playing, "rollouts": total - playing - learning, "learning": learning}
    return {"env_steps_per_second": steps / total} | {name: 1e6 * part / steps for name, part in spent.items()}


def table_metta_peer(options: Options, device: torch.device) -> tuple[str, dict]:
    """`ppo_metta.py` beside SB3's PPO in the arena: same games at once, network, batch, minibatch and epochs.

    No memory on either side, for SB3's PPO has none. SB3 gets the arena twice: as our batched games, in a `VecEnv` made
    for this table, and as it usually would, from the rule book in Python, one arena after another. It runs with the
    faster of one and all threads. "×" is ours to it, within a round; 5 is wanted. Microseconds are of one agent's step
    and say where the ratio comes from; the rest of rollouts is acting and storing.
    """
    flags, seconds = "--rnn none", 3 if options.fast else 6
    peers = {"SB3's PPO, our batched arena": False, "SB3's PPO, the rule book": True}

    def theirs(rule_book: bool, threads: int) -> dict:
        settings = {"flags": flags, "seconds": seconds, "device": device.type}
        return apart(sb3_arena_rate, rule_book=rule_book, threads=threads, **settings)

    trials = {threads: theirs(False, threads) for threads in sorted({1, torch.get_num_threads()})}
    threads = max(trials, key=lambda threads: trials[threads]["env_steps_per_second"])

    def ours() -> dict:
        one = metta_run(f"{QUICK} --max-seconds {seconds + 1} {flags}", options)
        means = logged(ROOT / "runs" / one["run"])
        spent = {phase: means.get(f"perf/{phase}_ms", 0) for phase in ("act", "env", "store", "learn", "log")}
        scale = 1e6 / one["env_steps_per_second"] / sum(spent.values())
        rollouts = spent["act"] + spent["store"] + spent["log"]
        return one | {"games": scale * spent["env"], "rollouts": scale * rollouts, "learning": scale * spent["learn"]}

    calls = {"ours": ours}
    for name, rule_book in peers.items():
        calls[name] = lambda rule_book=rule_book: theirs(rule_book, threads)
    measured = in_turn(options, calls)
    rates = {name: column(results, "env_steps_per_second") for name, results in measured.items()}
    compared, rows = {name: ratios(rates["ours"], rates[name]) for name in peers}, []
    for name, results in measured.items():
        parts = [f"{middle(results, part):.1f}" for part in ("games", "rollouts", "learning")]
        who, times = (name, spread(compared[name], 1)) if name in peers else (f"`ppo_metta.py {flags}`", "")
        rows.append([who, spread(rates[name]), times, *parts])
    text = table("who | agent steps/s | × | µs: games | rest of rollouts | learning", rows)
    text += f"\n\nThreads of SB3: {threads}."
    return text, {"runs": measured, "trials": trials, "ratios": compared}


def timings(work: Callable[[], Any], seconds: float, device: str) -> list[float]:
    """[mean, 95th and 99th percentile] of the milliseconds of a call; ten do not count."""
    spent = []
    while len(spent) < 60 or sum(spent) < seconds:
        start = time.perf_counter()
        work()
        if device == "cuda":
            torch.cuda.synchronize()
        spent.append(time.perf_counter() - start)
    counted = 1000 * np.array(spent[10:])
    return [float(counted.mean()), *map(float, np.percentile(counted, (95, 99)))]


def metta_latency(flags: str, seconds: float, device: str) -> dict[str, Any]:
    """`timings` of the network and the draw of actions, for one agent and for all that act together."""
    args, where = metta_args(flags, device), torch.device(device)
    agent, seen = metta_agent(args, where)
    dtype = ppo_metta.pick_precision(args.bf16, args.fp16, args.tf32, where)
    generator, found = torch.Generator(where).manual_seed(1), {"agents": len(seen)}

    @torch.no_grad()
    def policy(obs: torch.Tensor, state: torch.Tensor, reset: torch.Tensor) -> torch.Tensor:
        with torch.autocast(where.type, dtype, enabled=dtype != torch.float32, cache_enabled=False):
            return agent(obs[None], state, reset[None])[0][0]

    for name, batch in (("one", 1), ("all", len(seen))):
        state, reset = torch.zeros(batch, agent.state_size, device=where), torch.zeros(batch, device=where).bool()
        example, step = (seen[:batch].clone(), state, reset), policy
        if args.compile:
            torch.compiler.reset()  # or the second shape would be compiled as one of many
            step = ppo_metta.try_compile(policy, args.compile_mode, *example)

        def act() -> None:
            ppo_metta.sample(step(*example), generator)

        if args.cudagraph and device == "cuda":
            act = ppo_metta.CUDAGraphStep(act, generator, ppo_metta.PhaseTimer(where))
        found[name] = timings(act, seconds, device)
    return found


def needs_mettagrid(table: str) -> None:
    if util.find_spec("mettagrid") is None:
        fail(f"--suite {table}: mettagrid is not installed; pip install -r requirements-games.txt has it")


def table_metta_subproc(options: Options, device: torch.device) -> tuple[str, dict]:
    """`ppo_metta.py --env-id mettagrid`: what worker processes and batches in flight reach of what they could.

    "Games" are as many processes as there are workers, each with its share of the games and random actions, and nobody
    to wait for; "acting" is the network, and the draw of actions, on the agents of a batch in flight, with nothing
    stored and no games. "Possible" is the lower of the two, or less where W workers and T threads share C cores:
    C / (W / games + T / acting). Rollouts are those of a run that never learns (`--update-epochs 0`); end to end is
    compared with 1 / (1 / rollouts + 1 / learning). 85 % is wanted of both. All are agent steps per second.
    """
    needs_mettagrid("metta-subproc")
    cores = ppo_metta.CORES
    settings = ["", "--async-factor 1"][: 1 if options.fast else 2]
    base, seconds = f"{QUICK} --max-seconds 9 {REAL}", 1 if options.fast else 2

    def alone(flags: str) -> dict[str, float]:
        """Games and acting, each without the other."""
        measure = {"flags": f"{REAL} {flags}".strip(), "seconds": seconds, "device": device.type}
        number = metta_args(measure["flags"], device.type).num_workers
        with ThreadPoolExecutor(number) as pool:
            games = list(pool.map(lambda _: apart(metta_env_rate, **measure), range(number)))
        acting = apart(metta_latency, **measure)
        return {"games": sum(games), "acting": 1000 * acting["agents"] / acting["all"][0]}

    calls = {}
    for flags in settings:
        calls["alone", flags] = lambda flags=flags: alone(flags)
        calls["rollouts", flags] = lambda flags=flags: metta_run(f"{base} --update-epochs 0 {flags}".strip(), options)
        calls["both", flags] = lambda flags=flags: metta_run(f"{base} {flags}".strip(), options)
    measured, rows, raw = in_turn(options, calls), [], {}
    for flags in settings:
        args = metta_args(f"{REAL} {flags}", device.type)
        single, rollouts, both = (measured[what, flags] for what in ("alone", "rollouts", "both"))
        possible = []
        for one in single:
            possible.append(min(one["games"], one["acting"]))
            if device.type == "cpu":
                busy = args.num_workers / one["games"] + args.threads / one["acting"]
                possible[-1] = min(possible[-1], cores / busy)
        played, learned = column(rollouts, "env_steps_per_second"), column(both, "train_steps_per_second")
        ideal = [1 / (1 / play + 1 / learn) for play, learn in zip(played, learned)]
        ended = column(both, "env_steps_per_second")
        shares = {"rollouts": ratios(played, possible), "end to end": ratios(ended, ideal)}
        raw[flags] = {"alone": single, "rollouts": rollouts, "both": both, "possible": possible, "shares": shares}
        row = [f"`{flags}`" if flags else "default", args.num_workers, args.threads]
        row += [*(spread(column(single, part)) for part in ("games", "acting")), spread(possible), spread(played)]
        row += [percent(shares["rollouts"]), spread(learned), spread(ended), percent(shares["end to end"])]
        rows.append(row)
    header = "flags | workers | threads | games | acting | possible | rollouts | of possible | learning | end to end"
    compared = {f"{what}, {flags or 'default'}": raw[flags]["shares"][what] for flags in raw for what in shares}
    return table(f"{header} | of possible", rows), {"settings": raw, "ratios": compared}


def percent(shares: list[float]) -> str:
    return f"{statistics.median(shares):.0%} ({min(shares):.0%}–{max(shares):.0%})"


def table_metta_presets(options: Options, device: torch.device) -> tuple[str, dict]:
    """Metta's presets at equal wall clock: hearts per agent and episode of the final evaluation, by seed.

    Both learn navigation with the same network; `ultra-fast` has more games at once, larger batches and minibatches,
    and so fewer updates. Its 16 workers are fewer where there are not cores for so many.
    """
    seconds = options.seconds or (20 if options.fast else 300)
    rows, raw = [], []
    for preset in ("original", "ultra-fast"):
        flags = f"--preset {preset} --max-seconds {seconds} --eval-every 0"
        flags += " --eval-episodes 24" if options.fast else ""
        runs = [metta_run(f"{flags} --seed {seed}", options) for seed in options.seeds]
        raw += runs
        scores = [one["eval_score_mean"] for one in runs]
        args = metta_args(flags, device.type)
        row = [f"`--preset {preset}`", args.num_workers, spread(column(runs, "env_steps_per_second"))]
        row += [f"{middle(runs, 'updates_per_second'):.2f}", f"{middle(runs, 'replay_ratio'):.2f}"]
        row += [f"{middle(runs, 'env_steps'):,.0f}", " · ".join(f"{score:.2f}" for score in scores)]
        rows.append([*row, f"{statistics.mean(scores):.2f}", f"{max(one['peak_memory_gib'] for one in runs):.1f}"])
    header = "flags | workers | agent steps/s | updates/s | replay ratio | agent steps | hearts, seeds "
    header += f"{' · '.join(map(str, options.seeds))} | mean | trainer's peak GiB"
    return f"{table(header, rows)}\n\n{seconds} seconds each.", {"runs": raw}


def metta_learned(options: Options, flags: str, *more: str) -> tuple[str, dict]:
    """A table of one game: hearts at the end of each seed's run, with more flags too, and of players that do not learn.

    Runs with the same seed follow each other.
    """
    budget = f"--max-seconds {20 if options.fast else 600} --eval-every 0"
    variants = [flags, *(f"{flags} {extra}".strip() for extra in more)]
    found: dict[str, list] = {variant: [] for variant in variants}
    for seed in options.seeds:
        for variant, runs in found.items():
            runs.append(metta_run(" ".join([budget, *variant.split(), f"--seed {seed}"]), options))
    random_ = apart(random_hearts, flags=flags, agent_episodes=240)
    scripted = None if flags == REAL else apart(scripted_hearts, flags=flags, agent_episodes=120)
    rows = []
    for variant, runs in found.items():
        scores, rates = column(runs, "eval_score_mean"), column(runs, "env_steps_per_second")
        mean = statistics.mean(scores)
        row = [f"`{variant}`" if variant else "default", " · ".join(f"{score:.2f}" for score in scores)]
        row += [f"{mean:.2f}", f"{random_:.2f}"]
        row += [f"{scripted:.1f}", f"{mean / scripted:.0%}"] if scripted else ["–", "–"]
        rows.append([*row, f"{middle(runs, 'env_steps'):,.0f}", spread(rates)])
    header = f"flags | hearts, seeds {' · '.join(map(str, options.seeds))} | mean | random | scripted | of scripted"
    text = table(f"{header} | agent steps | agent steps/s", rows)
    return text, {"runs": found, "random": random_, "scripted": scripted}


def table_metta_learn_arena(options: Options, device: torch.device) -> tuple[str, dict]:
    """`ppo_metta.py` for ten minutes a seed, with and without memory: hearts in 240 episodes of agents at the end.

    Random and scripted players (those of `--suite metta-hearts`) stand beside it. Wanted: 30 % of the scripted one's.
    """
    return metta_learned(options, "", "--rnn none")


def table_metta_learn_navigation(options: Options, device: torch.device) -> tuple[str, dict]:
    """Navigation as in metta-learn-arena, at the defaults. Wanted: 80 % of the scripted one's hearts."""
    return metta_learned(options, ARENAS["navigation"])


def table_metta_learn_real(options: Options, device: torch.device) -> tuple[str, dict]:
    """The real MettaGrid as in metta-learn-arena, at the defaults: mines and altars, for which nobody wrote a script.

    Wanted: five times the hearts of random play.
    """
    needs_mettagrid("metta-learn-real")
    return metta_learned(options, REAL)


class Deciding:
    """An SB3 policy, called as `ppo_metta.evaluate` calls an agent. It has no memory."""

    state_size = 0

    def __init__(self, policy: torch.nn.Module) -> None:
        self.policy = policy

    def __call__(self, obs: torch.Tensor, state: torch.Tensor, reset: torch.Tensor) -> tuple:
        return self.policy.get_distribution(obs[0]).distribution.logits[None], None, state


def sb3_arena_curve(
    tuned: bool, seconds: float, every: float, goal: float, seed: int, threads: int, device: str
) -> list:
    """`learning_curve` of SB3's PPO in the arena: mean hearts."""
    from stable_baselines3 import PPO

    args, where = metta_args("--rnn none", device), torch.device(device)

    def make() -> Any:
        if tuned:
            return sb3_arena_agent("--rnn none", sb3_lanes(args, False, where), threads, device, seed)
        torch.set_num_threads(threads)
        lanes = sb3_lanes(metta_args("--num-envs 1 --reward-scale 1", device), True, where)
        return PPO("MlpPolicy", lanes, device=device, seed=seed)

    def test(model: Any) -> float:
        return ppo_metta.evaluate(Deciding(model.policy), args, 48, where)["eval_score_mean"]

    return learning_curve(make, test, seconds, every, goal)


def table_time_to_hearts(options: Options, device: torch.device) -> tuple[str, dict]:
    """Seconds of training until an evaluation (48 episodes of agents, every 20 seconds) has so many hearts, per seed.

    As in time-to-score, in the arena, up to 10 minutes, or 20 with "our settings": our batched arenas, network, first
    weights, batch, minibatch, coefficients and step size, which does not fall. SB3's PPO has no memory; at its defaults
    it plays one arena of the rule book.
    """
    goals, every, threads = (0.5, 1, 2, 5), 20, torch.get_num_threads()
    budget = 40 if options.fast else 600
    flags = f"--max-seconds {budget} --eval-every {every} --log-every 1 --eval-episodes 480 --checkpoint-every 0"
    variants = {"ours": "", "ours, no memory": "--rnn none"}
    peers = {"SB3's PPO, defaults": False, "SB3's PPO, our settings": True}
    ends = {name: budget * (1 + tuned) for name, tuned in peers.items()}
    curves = {name: [] for name in [*variants, *peers]}
    for seed in options.seeds:
        for name, more in variants.items():
            one = run(f"{flags} {more} --seed {seed}", options, "ppo_metta.py")
            curves[name].append(curve(ROOT / "runs" / one["run"]))
        for name, tuned in peers.items():
            limits = {"seconds": ends[name], "every": every, "goal": goals[-1], "seed": seed, "device": device.type}
            if moves(curves[name], goals):
                curves[name].append(apart(sb3_arena_curve, tuned=tuned, threads=threads, **limits))
    ends |= {name: curves[name][0][-1][0] for name in variants}
    text, compared = seconds_to(goals, "hearts", curves, ends)
    text += f"\n\nOurs: `python ppo_metta.py {flags}`. Threads of SB3: {threads}."
    return text, {"goals": goals, "curves": curves, "ends": ends, "ratios": compared}


def metta_parts(flags: str, seconds: float, device: str) -> dict[str, Any]:
    """Games alone and acting alone."""
    rate = metta_env_rate(flags, seconds, device)
    return {"env_steps_per_second": rate} | metta_latency(flags, seconds, device)


def table_diagnose(options: Options, device: torch.device) -> tuple[str, dict]:
    """Where the time of `ppo_metta.py` goes, before (default) and after each switch.

    End to end and games alone are agent steps per second; "×" is to the default, within a round. Acting is the network
    and the draw of actions, in milliseconds, mean / 95th / 99th percentile, for one agent and for all that act at once.
    With subproc the games are those of one worker, and all agents are those of a batch in flight. Memory is the GPU's,
    without one the process's.
    """
    compiled = "--compile --max-seconds 60"  # compiling takes most of it and is not counted
    switches = ["", "--bf16", "--rnn gru", "--rnn none", "--hidden-size 256", "--network box-cnn"]
    switches += ["--network token-attention --max-seconds 20", "--vec-env subproc --max-seconds 14", compiled]
    if device.type == "cuda":
        switches += ["--tf32", "--fp16", "--cudagraph", "--cudagraph --bf16", "--cudagraph --compile --bf16"]
    elif torch.get_num_threads() > 1:
        switches.insert(1, "--threads 1")
    if options.fast:
        switches = ["", "--rnn none"]
    base, seconds = f"{QUICK} --max-seconds {5 if options.fast else 8}", 0.3 if options.fast else 1
    calls = {}
    for flags in switches:
        calls["run", flags] = lambda flags=flags: metta_run(f"{base} {flags}".strip(), options)
        calls["parts", flags] = lambda flags=flags: apart(metta_parts, flags=flags, seconds=seconds, device=device.type)
    measured, rows, raw = in_turn(options, calls), [], {}
    for flags in switches:
        runs, parts = measured["run", flags], measured["parts", flags]
        raw[flags] = {"runs": runs, "parts": parts}
        rates = column(runs, "env_steps_per_second")
        row = [f"`{flags}`" if flags else "default", spread(rates)]
        row += [spread(ratios(rates, column(measured["run", ""], "env_steps_per_second")), 2)]
        row.append(f"{middle(parts, 'env_steps_per_second'):,.0f}")
        for batch in ("one", "all"):
            row.append(" / ".join(f"{statistics.median(times):.2f}" for times in zip(*column(parts, batch))))
        if device.type == "cuda":
            found = [logged(ROOT / "runs" / one["run"]).get("perf/gpu_util", math.nan) for one in runs]
            raw[flags]["gpu_util"] = found
            row.append(f"{statistics.median(found):.0f}%")
        active = [runs[0]["precision"], runs[0]["sdpa"], *(name for name in ("compiled", "cudagraph") if runs[0][name])]
        rows.append([*row, f"{middle(runs, 'peak_memory_gib'):.2f}", ", ".join(filter(None, active))])
    header = "flags | end to end | × | games alone | acting, one agent, ms | acting, all agents, ms"
    header += " | GPU busy" * (device.type == "cuda") + " | peak GiB | what was active"
    text = table(header, rows) + f"\n\nAll agents: {measured['parts', ''][0]['agents']:,}."
    if device.type != "cuda":
        text += " GPU utilisation and memory: not measured without a GPU."
    return text, {"switches": raw}


# ------------------------------------------------------------------------------------------------- Mario

MARIO = "dqn_mario_async.py"


def mario_jumper(game: MarioGame) -> int:
    """Run, jump before gaps, walls and walkers, hold to the top, brake before landing on the near side of a walker."""
    front, feet = game.x + mario.WIDTH, (game.y + mario.HEIGHT - 1) >> 8

    def ahead(tiles: float, row: int) -> int:
        return game.level.grid[(front + int(256 * tiles)) >> 8 << 4 | row]

    walkers = [x - game.x for x in game.visible() if x > game.x]
    if not game.grounded:
        if game.vy > 0 and game.vx > 8 and any(160 < distance < 900 for distance in walkers):
            return 6
        return 4 if game.held and game.vy < 0 else 3
    danger = any(ahead(tiles, mario_levels.GROUND) == mario_levels.ABYSS for tiles in (0, 0.5))
    danger |= any(ahead(tiles, feet) >= mario_levels.SOLID for tiles in (0, 1, 2))
    danger |= feet == mario_levels.GROUND - 1 and any(distance < 660 for distance in walkers)
    return 4 if danger and not game.held else 3


PLAYERS = {  # action by game; random ones are among the simple seven
    "random": lambda game: random.randrange(7),
    "right and run": lambda game: 3,
    "a scripted jumper": mario_jumper,
}


def mario_games(player: str, games: int, real: bool = False) -> list[float]:
    """Share of flags and mean distance in pixels over at least `games` games on unseen levels, or on the real 1-1."""
    random.seed(1)
    batch = SuperMarioBrosBatch(seed=1) if real else MarioBatch(10, seed=1, levels=UNSEEN_LEVELS)
    batch.reset()
    while batch.finished[0] < games:
        batch.step(np.array([PLAYERS[player](game) for game in batch.games]))
    finished, distance, flags = batch.finished[:3].tolist()
    return [flags / finished, distance / finished]


def mario_rates(widths: tuple[int, ...], seconds: float) -> list[float]:
    """Agent steps per second of `MarioBatch` under random actions, by width."""
    rates, rng = [], np.random.default_rng(1)
    for width in widths:
        envs, actions = MarioBatch(width, seed=1), rng.integers(7, size=(16, width))
        envs.reset()
        rates.append(rate_of(lambda: [envs.step(action) for action in actions], 16 * width, seconds))
    return rates


def bare_rate(seconds: float, refresh: bool) -> float:
    """Agent steps per second of the emulator and what a step needs of it: 4 frames, the picture, a few bytes of RAM.

    `refresh`: also the emulator library's own refresh of the whole RAM, by which one would usually get those bytes.
    """
    game, out, draw = NesGame(noop_max=0), np.zeros((84, 84), np.uint8), Stream(1, 0)
    game.start(draw)

    def step() -> None:
        game.play(mario.ACTIONS[draw(7)])
        if refresh:
            game.data.update_ram()
        game.picture(out)
        if game.dead or game.flag:
            game.start(draw)

    return rate_of(step, 1, seconds)


def collector_rates(env_id: str, widths: tuple[int, ...], seconds: float) -> list[float]:
    """Agent steps per second of a collector of dqn_mario_async.py on one core, by its number of games.

    A reader empties its ring at no cost, and new weights come every 25 steps, about as often as in a run.
    """
    script, rates, cpu = dqn_mario_async, [], torch.device("cpu")
    for width in widths:
        flags = {"env_id": env_id, "envs_per_collector": width, "num_collectors": 1, "noop_max": 0}
        args = script.fill_defaults(script.Args(device="cpu", **flags), cpu)
        weights = torch.cat([weight.detach().flatten() for weight in script.QNetwork(args, cpu).parameters()])
        ring, broadcast = script.Ring(args.ring_blocks, script.block_fields(args)), script.Broadcast(weights)
        broadcast.progress.fill_(0.5)  # exploration is what it is in the end
        collector = script.Collector(args, 0, 0, ring, broadcast)

        def work() -> None:
            broadcast.version.add_(2)  # as if the slot that it reads held new weights
            for _ in range(25):
                collector.step()
                ring.release(1)

        rates.append(rate_of(work, 25 * width, seconds))
    return rates


def no_real_game() -> str:
    """Why the real game cannot be played here; nothing where it can."""
    try:
        NesGame()  # an emulator is freed at once
        return ""
    except ValueError as error:
        return f"The real game: not measured ({error})."


def table_mario_env(options: Options, device: torch.device) -> tuple[str, dict]:
    """Games of Mario on one core: agent steps per second (4 frames each, 84x84 pictures).

    First our own game by games at once, under random actions, and played by a collector of `dqn_mario_async.py`:
    inference, exploration and pushing into its ring included; columns with a G are Gymnasium's own measure. Then what
    players reach that learn nothing. Then the real game: the emulator with the picture and the bytes of RAM that a step
    needs and nothing else, a collector alone, and the collector of a run beside learning. "×" is to the bare emulator,
    within a round.
    """
    widths, seconds, games = ((16,), 0.5, 50) if options.fast else ((1, 4, 16, 64), 1.0, 1000)
    calls = {
        "game alone": lambda: apart(mario_rates, True, widths=widths, seconds=seconds),
        "collector": lambda: apart(collector_rates, True, env_id="MarioLike-v0", widths=widths, seconds=seconds),
    }
    for game in ("MarioVectorEnv", "MarioEnv"):
        calls[game] = lambda game=game: apart(gymnasium_rates, True, game=game, widths=widths, seconds=seconds)
    real, long, missing = {}, 1 if options.fast else 4, no_real_game()
    if not missing:
        flags = f"{QUICK} --max-seconds {12 if options.fast else 18} --num-collectors 1 --noop-max 0 "
        flags += "--env-id SuperMarioBros"
        real = {
            "bare emulator": lambda: apart(bare_rate, True, seconds=long, refresh=False),
            "bare emulator, its library refreshing the RAM": lambda: apart(bare_rate, True, seconds=long, refresh=True),
            "a collector": lambda: apart(collector_rates, True, env_id="SuperMarioBros", widths=(1,), seconds=long)[0],
            f"`{MARIO} {flags}`": lambda: run(flags, options, MARIO)["experience_rate"],
        }
    measured = in_turn(options, calls | real)
    columns = [map(spread, zip(*measured[name])) for name in calls]  # by width
    header = "games | game alone | with a collector around it | `MarioVectorEnv`, G | `MarioEnv` in `SyncVectorEnv`, G"
    text = table(header, [[f"{width:,}", *row] for width, *row in zip(widths, *columns)]) + "\n\n"
    players = {player: apart(mario_games, player=player, games=games) for player in PLAYERS}
    rows = [[player, f"{flag:.1%}", f"{distance:,.0f}"] for player, (flag, distance) in players.items()]
    text += (
        table(f"{games:,} games on unseen levels, easiest difficulty | flags | mean distance, pixels", rows) + "\n\n"
    )
    compared = {name: ratios(measured[name], measured["bare emulator"]) for name in real}
    rows = [[name, spread(measured[name]), spread(compared[name], 2)] for name in real]
    text += table("the real game, one core | agent steps/s | ×", rows) if real else missing
    return text, {"widths": widths, "rates": measured, "players": players, "ratios": compared}


def table_mario_async(options: Options, device: torch.device) -> tuple[str, dict]:
    """Collecting beside learning, and the same work in turn, at the replay ratio at which both cost the same.

    16 games; one collector beside one thread that learns, or `--num-collectors 0` with one and with all threads. A
    learner that falls behind learns from less per step than it was asked to, so what is compared is the steps that were
    paid for: env steps/s, times the share of the asked replay ratio that was reached. "×" is how many times those of
    the row the collector beside the learner makes, within a round. Produced and stored are transitions, of the
    collectors and in the replay; waiting is what pushing a step cost a collector, mean.
    """
    base = f"{QUICK} --max-seconds {12 if options.fast else 18} --learning-starts 1000 --envs-per-collector 16"
    flags = {"beside each other": "--num-collectors 1 --threads 1", "in turn": "--num-collectors 0 --threads 1"}
    if (threads := torch.get_num_threads()) > 1 and not options.fast:
        flags[f"in turn, {threads} threads"] = f"--num-collectors 0 --threads {threads}"
    trial = run(f"{base} {flags['in turn']} --replay-ratio 1", options, MARIO)
    asked = float(f"{trial['replay_ratio'] * (1 / trial['train_fraction'] - 1):.2g}")
    calls = {
        who: lambda how=how: run(f"{base} {how} --replay-ratio {asked}", options, MARIO) for who, how in flags.items()
    }
    measured = in_turn(options, calls)
    paid = {
        who: [one["env_steps_per_second"] * min(one["replay_ratio"] / asked, 1) for one in runs]
        for who, runs in measured.items()
    }
    compared = {who: ratios(paid["beside each other"], rates) for who, rates in paid.items() if "turn" in who}
    rows = []
    for who, runs in measured.items():
        row = [who, spread(column(runs, "env_steps_per_second")), f"{middle(runs, 'replay_ratio'):.2f}"]
        row += [spread(paid[who]), spread(compared[who], 2) if who in compared else ""]
        row += [f"{middle(runs, 'train_fraction'):.0%}"]
        row += [f"{middle(runs, name):,.0f}" for name in ("produced", "stored")]
        row += [f"{middle(runs, 'producer_wait_ms_mean'):.3f}", f"{middle(runs, 'replay_kib_per_transition'):.2f}"]
        rows.append(row)
    header = "who | env steps/s | replay ratio | paid steps/s | × | learning | produced | stored | "
    text = table(f"{header}waiting, ms | KiB a transition", rows)
    text += f"\n\nAll with `{MARIO} {base} --replay-ratio {asked}`, and " + ", ".join(
        f"`{how}` ({who})" for who, how in flags.items()
    )
    return text + ".", {"asked": asked, "runs": measured, "ratios": compared}


def table_mario_switches(options: Options, device: torch.device) -> tuple[str, dict]:
    """`dqn_mario_async.py` by collectors, games, batches and how often weights go out, beside the default, in turn.

    "×" is of the transitions learned from per second, which is what the learner is short of, within a round.
    """
    switches = ["", *(f"--num-collectors {number}" for number in (0, 2, 4)), "--envs-per-collector 4"]
    switches += ["--envs-per-collector 64", "--batch-size 128", "--batch-size 128 --accumulate 4", "--sync-every 1"]
    switches += ["--bf16", "--compile --max-seconds 60"]
    if device.type == "cuda":
        switches += ["--tf32", "--fp16", "--cudagraph", "--cudagraph --bf16"]
    if options.fast:
        switches = ["", "--num-collectors 0"]
    base = f"{QUICK} --learning-starts 1000 --max-seconds {10 if options.fast else 14}"
    calls = {flags: lambda flags=flags: run(f"{base} {flags}".strip(), options, MARIO) for flags in switches}
    measured, rows = in_turn(options, calls), []
    samples = {flags: column(runs, "samples_per_second") for flags, runs in measured.items()}
    for flags, runs in measured.items():
        row = [f"`{flags}`" if flags else "default", spread(column(runs, "env_steps_per_second"))]
        row += [spread(samples[flags]), spread(ratios(samples[flags], samples[""]), 2)]
        row += [f"{middle(runs, 'replay_ratio'):.2f}", f"{middle(runs, 'ring_fill'):.0%}"]
        row += [f"{middle(runs, 'weight_age'):.1f}"]
        active = [runs[0]["precision"], *(name for name in ("compiled", "cudagraph") if runs[0][name])]
        rows.append([*row, ", ".join(active)])
    header = "flags | env steps/s | samples/s | × | replay ratio | ring filled | weights, updates old"
    return table(f"{header} | what was active", rows), {"runs": measured}


MARIO_AGENTS = {  # SB3's replay of a million would take 53 GiB
    "SB3's DQN, defaults": dict(algorithm="DQN", buffer_size=100_000),
    "SB3's DQN, our recipe": dict(
        algorithm="DQN", num_envs=16, gamma=0.97, learning_rate=5e-4, buffer_size=100_000, learning_starts=5000,
        train_freq=1, gradient_steps=1, tau=0.005, target_update_interval=16, exploration_final_eps=0.03,
    ),
    "SB3's PPO, defaults": dict(algorithm="PPO"),
    "SB3's PPO, our network and gamma": dict(algorithm="PPO", num_envs=16, gamma=0.97, n_steps=128, batch_size=256),
}  # fmt: skip


class MarioView(torch.nn.Module):
    """dqn_mario_async.py's network without its head, as what an SB3 policy makes of frames."""

    def __init__(self, space: gymnasium.spaces.Box) -> None:
        super().__init__()
        args = dqn_mario_async.Args(dueling=False, stack=space.shape[0], size=space.shape[1])
        self.trunk, self.features_dim = dqn_mario_async.QNetwork(args, torch.device("cpu")), args.hidden_size
        self.trunk.head = torch.nn.Identity()

    def forward(self, obs: torch.Tensor) -> torch.Tensor:
        return self.trunk(obs.byte())


def sb3_mario_agent(name: str, threads: int, seed: int, explored: int, device: str) -> Any:
    """The agent of MARIO_AGENTS on the trainer's levels; a DQN explores over its first `explored` steps."""
    import stable_baselines3
    from stable_baselines3.common.vec_env import DummyVecEnv

    torch.set_num_threads(threads)
    settings = {"num_envs": 1} | MARIO_AGENTS[name]
    algorithm, num_envs, policy = settings.pop("algorithm"), settings.pop("num_envs"), {}
    if "our" in name:
        policy = {"features_extractor_class": MarioView, "net_arch": [], "normalize_images": False}
    explores = {"exploration_fraction": explored / FOREVER} if algorithm == "DQN" else {}
    rules = dqn_mario_async.settings_of(dqn_mario_async.Args(), mario.TRAIN_LEVELS)
    games = DummyVecEnv([lambda: MarioEnv(**rules)] * num_envs)
    learns = getattr(stable_baselines3, algorithm)
    return learns("CnnPolicy", games, policy_kwargs=policy, device=device, seed=seed, **explores, **settings)


def sb3_mario_rate(seconds: float, **agent: Any) -> dict[str, float]:
    """Env steps per second while it learns."""
    model, start = sb3_mario_agent(seed=1, explored=1, **agent), time.perf_counter()
    model.learn(FOREVER, callback=lambda *_: time.perf_counter() - start < seconds)
    return {"env_steps_per_second": model.num_timesteps / (time.perf_counter() - start)}


def sb3_mario_curve(name: str, seconds: float, every: float, goal: float, device: str, **agent: Any) -> list:
    """`learning_curve` of an agent of MARIO_AGENTS: mean distance of greedy games on unseen levels, in pixels."""
    args, where = dqn_mario_async.Args(), torch.device(device)

    def test(model: Any) -> float:
        values = getattr(model, "q_net", lambda obs: model.policy.get_distribution(obs).distribution.logits)
        return dqn_mario_async.evaluate(values, args, 20, where)["eval_distance_mean"]

    return learning_curve(lambda: sb3_mario_agent(name, device=device, **agent), test, seconds, every, goal)


def table_time_to_distance(options: Options, device: torch.device) -> tuple[str, dict]:
    """Seconds of training until an evaluation (20 greedy games, unseen levels, every 5 seconds) goes so far, by seed.

    As in time-to-score, in `MarioLike-v0` at the easiest difficulty, up to 10 minutes; a scripted jumper goes 1,076
    pixels. Our clock runs on during evaluations, since collectors do, SB3's stops. With "our" SB3 has our network, 16
    games, our gamma and its faster number of threads; its DQN explores over a tenth of what it can play in 10 minutes
    at its defaults, and in two with our recipe.
    """
    goals, every = (400, 600, 800, 1000), 5
    agents = list(MARIO_AGENTS)[1:2] if options.fast else MARIO_AGENTS
    flags = f"--max-seconds {30 if options.fast else 120} --eval-every {every} --eval-episodes 200 --log-every 1"
    flags += " --checkpoint-every 0"
    plans, ends = sb3_plans(agents, {"our recipe": 120}, 600, sb3_mario_rate, 20, options, device)
    curves = {"ours": []} | {name: [] for name in plans}
    for seed in options.seeds:
        one = run(f"{flags} --seed {seed}", options, MARIO)
        curves["ours"].append(readings(one["run"], "eval/distance_mean"))
        for name, plan in plans.items():
            limits = {"seconds": ends[name], "every": every, "goal": goals[-1], "seed": seed, "device": device.type}
            if moves(curves[name], goals):
                curves[name].append(apart(sb3_mario_curve, **plan, **limits))
    text, compared = seconds_to(goals, "pixels", curves, ends | {"ours": curves["ours"][0][-1][0]})
    text += f"\n\nOurs: `python {MARIO} {flags}`. Threads of SB3: "
    text += ", ".join(f"{plan['threads']} ({name})" for name, plan in plans.items()) + "."
    return text, {"goals": goals, "curves": curves, "plans": plans, "ends": ends, "ratios": compared}


def readings(run: str, tag: str) -> list[list[float]]:
    """[seconds since the start, value] of what a run of dqn_mario_async.py wrote to TensorBoard under `tag`."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(ROOT / "runs" / run), size_guidance={"scalars": 0}).Reload()
    warm = events.Scalars("perf/warmup_s")[0]
    return [[point.wall_time - warm.wall_time + warm.value, point.value] for point in events.Scalars(tag)]


def first_after(curve: list[list[float]], minutes: float) -> float:
    """Value of the first reading after that time, or of the last."""
    return next((value for seconds, value in curve if seconds >= 60 * minutes), curve[-1][1])


def table_mario_learn(options: Options, device: torch.device) -> tuple[str, dict]:
    """`dqn_mario_async.py` at its defaults, 15 minutes a seed: share of greedy games that reach the flag.

    On the way: the first evaluation after that time, 10 games on unseen levels, and the collectors' own games on
    training levels at the same time, which explore. At the end: 100 greedy games on unseen levels. Waiting is what
    pushing a step cost a collector, mean.
    """
    flags = "--max-seconds 30 --eval-every 10" if options.fast else "--max-seconds 900"
    times, rows, raw = (1, 5), [], []
    for seed in options.seeds:
        one = run(f"{flags} --seed {seed}", options, MARIO)
        one["curves"] = {tag: readings(one["run"], tag) for tag in ("eval/flags", "charts/flags")}
        greedy, exploring = one["curves"].values()
        raw.append(one)
        row = [seed, *(f"{first_after(greedy, at):.0%}, {first_after(exploring, at):.0%}" for at in times)]
        row += [f"{one['eval_flags']:.0%}", f"{one['eval_distance_mean']:,.0f}"]
        row += [f"{one['env_steps_per_second']:,.0f}", f"{one['replay_ratio']:.2f}"]
        rows.append([*row, f"{one['producer_wait_ms_mean']:.3f}"])
    flag, distance = apart(mario_games, player="random", games=1000)
    rows.append(["random play", *[f"{flag:.0%}"] * 3, f"{distance:,.0f}", *[""] * 3])
    header = "seed | after 1 minute: unseen, exploring | after 5 | end: unseen | distance, pixels | "
    text = table(f"{header}env steps/s | replay ratio | waiting, ms", rows)
    return text, {"runs": raw, "random": [flag, distance]}


def table_mario_real(options: Options, device: torch.device) -> tuple[str, dict]:
    """The real level 1-1 for 20 minutes a seed: mean distance in pixels over greedy games with no-op starts.

    On the way 10 games each, at the end 100; random play over 100 beside it. The flag is 3,121 pixels from the start
    (at x = 3,161). A game begins after 0 to 30 frames of nothing, so the 100 games have only 30 different starts, and
    they are those of training: what is measured is this level, not how well it carries over.
    """
    if missing := no_real_game():
        return missing, {}
    games, times = (5, (1,)) if options.fast else (100, (1, 5, 10))
    flags = f"--env-id SuperMarioBros --max-seconds {40 if options.fast else 1200} --eval-episodes {games}"
    flag, distance = apart(mario_games, True, player="random", games=games, real=True)
    rows, raw = [], []
    for seed in options.seeds:
        one = run(f"{flags} --seed {seed}", options, MARIO)
        one["curve"] = readings(one["run"], "eval/distance_mean")
        raw.append(one)
        row = [seed, *(f"{first_after(one['curve'], at):,.0f}" for at in times), f"{one['eval_distance_mean']:,.0f}"]
        row += [f"{one['eval_flags']:.0%}", f"{one['eval_distance_mean'] / distance:.1f}"]
        rows.append([*row, f"{one['env_steps_per_second']:,.0f}", f"{one['replay_ratio']:.2f}"])
    rows.append(["random play", *[""] * len(times), f"{distance:,.0f}", f"{flag:.0%}", *[""] * 3])
    header = " | ".join(f"after {at} minute{'s' * (at > 1)}" for at in times)
    header = f"seed | {header} | end | flags at the end | × random play | env steps/s | replay ratio"
    text = f"{table(header, rows)}\n\n`{MARIO} {flags} --seed S`"
    return text, {"runs": raw, "random": [flag, distance]}


# ------------------------------------------------------------------------------------------------- one GPU


@dataclass
class GpuSizes:
    """What --suite gpu measures with."""

    total_seconds: float = 565.0
    """of all rows; to import PyTorch takes 15 more"""
    alone_seconds: float = 1.0
    """of a matmul, and of a game alone"""
    run_seconds: float = 4.0
    """of a run, from the beginning of its loop"""
    matmul_side: int = 8192
    snake_widths: tuple[int, ...] = (1024, 4096, 16384, 65536)
    """games"""
    arena_widths: tuple[int, ...] = (128, 1024, 4096)
    """arenas"""
    snake: str = "--batch-size 8192"
    learn: str = "--max-seconds 300 --eval-every 60"
    arena: str = ""
    transformer: str = "--policy transformer --buffer-size 20000 --exploration-initial-eps 0.05"
    batches: tuple[int, ...] = (8192, 16384)
    """of the transformer"""


GPU_SIZES = GpuSizes()
GPU_TRIAL = GpuSizes(  # --fast: the same rows in 90 seconds
    total_seconds=75.0,
    alone_seconds=0.1,
    run_seconds=0.5,
    matmul_side=256,
    snake_widths=(16, 64),
    arena_widths=(1, 2),
    snake="--board 5x5 --num-envs 64 --batch-size 64 --hidden-size 32 --buffer-size 2000 --learning-starts 200",
    learn="--max-seconds 4 --eval-every 1.5 --eval-episodes 20 --log-every 0.5",
    arena="--num-envs 2 --hidden-size 16 --num-steps 8 --bptt-horizon 8 --num-minibatches 2",
    transformer="--policy transformer --board 5x5 --buffer-size 500 --exploration-initial-eps 0.05",
    batches=(8, 16),
)
GPU_SWITCHES = {
    "snake": ["", "--bf16", "--fp16", "--tf32", "--cudagraph", "--bf16 --cudagraph"],
    "arena": ["", "--bf16", "--cudagraph", "--bf16 --cudagraph"],
    "transformer": ["", "--bf16"],
}
GPU_COMPILED = {"snake": ["--compile", "--bf16 --compile --cudagraph"], "arena": ["--bf16 --compile --cudagraph"]}
PRELOADED = ["torch", "torch._dynamo", "torch.utils.flop_counter", "torch.utils.tensorboard", "gymnasium.vector"]
PRELOADED += ["tyro", "tensorboard.backend.event_processing.event_accumulator"]  # by what rows are forked from


def in_fork(call: Callable[[], Any], limit: float) -> dict:
    """What `call` returns in a process of its own as "found", or in one line as "note" why it returns nothing.

    The process is forked from one that has imported PyTorch and never touched a GPU: it begins at once.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=fork_main, args=(sender, call))
    process.start()
    sender.close()  # with it open here, the end of the process would not be noticed
    try:
        if receiver.poll(limit):
            return receiver.recv()
        return {"note": f"failed: not done after {limit:.0f} s"}
    except EOFError:
        process.join()
        return {"note": f"failed: its process ended with exit code {process.exitcode}"}
    finally:
        process.kill()
        process.join()


def fork_main(sender: Connection, call: Callable[[], Any]) -> None:
    """The process of `in_fork`. What a script says of switches that are not active is sent along."""
    output = io.StringIO()
    errors = io.StringIO()
    try:
        with redirect_stdout(output), redirect_stderr(errors):
            result = {"found": call()}
    except ModuleNotFoundError as error:
        result = {"note": f"not measured: {error.name} is not installed"}
    except (Exception, SystemExit) as error:
        traceback.print_exc()
        reason = f"{type(error).__name__}: {error}"
        if isinstance(error, SystemExit):
            reason = errors.getvalue()
        if dqn_snake.is_out_of_memory(error):
            reason = "out of memory"
        line = " ".join(reason.split()).replace("|", "/")
        result = {"note": f"failed: {line[:150]}"}
    result["said"] = [line for line in output.getvalue().splitlines() if line.startswith("--")]
    sender.send(result)


def bf16_matmul_rate(side: int, seconds: float, device: str) -> float:
    """Floating point operations per second of a large matmul in bfloat16."""
    x = torch.randn(side, side, device=device).bfloat16()
    y = torch.randn(side, side, device=device).bfloat16()

    def work() -> None:
        for _ in range(8):
            torch.mm(x, y)

    return rate_of(work, 8 * 2 * side**3, seconds, device)


def run_here(script: str, flags: str, folder: str) -> dict:
    """Summary of a run of the real script, in this process and with nothing from .env."""
    module = importlib.import_module(script.removesuffix(".py"))
    command = [*shlex.split(flags), "--no-video", "--run-dir", folder, "--run-name", "run"]
    return module.main(tyro.cli(module.Args, args=command))


def speed_run(script: str, flags: str, seconds: float) -> dict:
    """Summary of a run that ends `seconds` after its loop began: to compile takes none of them, nor is it evaluated.

    "steady" has the median of every scalar over the log intervals, without the first, in which a GPU warms up.
    """
    module = importlib.import_module(script.removesuffix(".py"))
    write_scalars = module.write_scalars

    def write_and_start_clock(writer: Any, scalars: dict[str, float], step: int) -> None:
        write_scalars(writer, scalars, step)
        if "perf/warmup_s" in scalars:  # the last that is written before the loop
            signal.signal(signal.SIGALRM, signal.getsignal(signal.SIGTERM))
            signal.setitimer(signal.ITIMER_REAL, seconds)

    module.write_scalars = write_and_start_clock
    with tempfile.TemporaryDirectory() as folder:
        summary = run_here(script, flags, folder)
        run_folder = Path(folder) / "run"
        summary["steady"] = steady(run_folder)
        summary["args"] = json.loads((run_folder / "args.json").read_text())
        if script == "dqn_snake.py":
            summary["update_flops"] = least_work(summary["args"]["batch_size"], run_folder / "checkpoint.pt")[0]
    return summary


def steady(folder: Path) -> dict[str, float]:
    """Median over a run of every scalar in its TensorBoard files, without its first value if there are more."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    medians = {}
    for tag in events.Tags()["scalars"]:
        values = [point.value for point in events.Scalars(tag)]
        medians[tag] = statistics.median(values[1:] or values)
    return medians


def learning_run(flags: str) -> dict:
    """Summary of a run of dqn_snake.py with its evaluations, those on the way and the last."""
    with tempfile.TemporaryDirectory() as folder:
        summary = run_here("dqn_snake.py", flags, folder)
        return summary | {"curve": curve(Path(folder) / "run")}


def sb3_transformer(flags: str, seconds: float) -> dict:
    """What `speed_run` says, of SB3's DQN with the flags of dqn_snake_sb3_compat.py; from its second update on."""
    from stable_baselines3 import DQN

    compat = importlib.import_module("dqn_snake_sb3_compat")
    args = tyro.cli(compat.Args, args=shlex.split(flags))
    torch.set_num_threads(args.threads)
    names = f"{compat.PLAIN_HYPERPARAMETERS} learning_rate train_freq"
    settings = {name: getattr(args, name) for name in names.split()}
    network = {
        "features_extractor_class": compat.Transformer,
        "features_extractor_kwargs": {"dropout": args.dropout},
        "net_arch": [128],
    }
    game = compat.make_envs(args, 1)[0]
    model = DQN("MlpPolicy", game, policy_kwargs=network, device=args.device, seed=args.seed, **settings)
    update_ends = []

    def go_on(*_: Any) -> bool:
        if model._n_updates > len(update_ends):
            update_ends.append(time.perf_counter())
        return len(update_ends) < 3 or update_ends[-1] - update_ends[1] < seconds

    model.learn(FOREVER, callback=go_on)
    updates_per_second = (len(update_ends) - 2) / (update_ends[-1] - update_ends[1])
    rates = {
        "charts/updates_per_second": updates_per_second,
        "charts/samples_per_second": updates_per_second * args.batch_size,
    }
    memory = dqn_snake.peak_memory_gib(torch.device(args.device))
    active = {"precision": "float32", "sdpa": None, "compiled": False, "cudagraph": False}
    return {"steady": rates, "peak_memory_gib": memory} | active


def gpu_plan(sizes: GpuSizes, device: torch.device) -> list[tuple]:
    """(part, name, most seconds, what to call) of every row, in the order in which they are measured.

    What matters most comes first. About how many seconds they take on a GPU: matmul 4, switches of Snake 6 x 7, food
    313, Snake alone 4 x 4, switches of the arena 4 x 9, arena alone 3 x 6, transformer 6 x 9. That is 483 of
    `total_seconds`, 565, so 82 are left for what compiles, 3 x 27, which comes last: nobody knows how long it takes.
    """
    plan = []
    where = f"--device {device.type} --threads 1"
    base = f"{where} --eval-every 0 --checkpoint-every 0 --log-every 1 --max-seconds 600"
    scripts = {"snake": "dqn_snake.py", "arena": "ppo_metta.py"}
    flags = {"snake": f"{base} {sizes.snake}", "arena": f"{base} {sizes.arena}"}

    def add(part: str, name: Any, limit: float, function: Callable, **arguments: Any) -> None:
        plan.append((part, str(name), limit, partial(function, **arguments)))

    def add_run(part: str, switch: str, limit: float) -> None:
        command = f"{flags[part]} {switch}".strip()
        add(part, switch, limit, speed_run, script=scripts[part], flags=command, seconds=sizes.run_seconds)

    alone = {"seconds": sizes.alone_seconds, "device": device.type}
    add("matmul", sizes.matmul_side, 20, bf16_matmul_rate, side=sizes.matmul_side, **alone)
    for switch in GPU_SWITCHES["snake"]:
        add_run("snake", switch, 25)
    learn = f"{sizes.snake} {sizes.learn} --bf16 --cudagraph"
    add("food", learn, 345, learning_run, flags=f"{where} {learn}")
    for width in sizes.snake_widths:
        add("snake alone", width, 20, snake_rates, widths=(width,), **alone)
    for switch in GPU_SWITCHES["arena"]:
        add_run("arena", switch, 35)
    for width in sizes.arena_widths:
        add("arena alone", width, 30, metta_env_rate, flags=f"--num-envs {width} --threads 1", **alone)
    for batch in sizes.batches:
        sized = f"{base} {sizes.transformer} --batch-size {batch}"
        add("transformer", f"{batch}, SB3", 35, sb3_transformer, flags=sized, seconds=sizes.run_seconds)
        for switch in GPU_SWITCHES["transformer"]:
            name = f"{batch}, ours {switch}".strip()
            command = {"script": "dqn_snake_sb3_compat.py", "flags": f"{sized} {switch}".strip()}
            add("transformer", name, 35, speed_run, seconds=sizes.run_seconds, **command)
    for part, switches in GPU_COMPILED.items():
        for switch in switches:
            add_run(part, switch, 90)
    return plan


def gpu_tables(raw: dict) -> str:
    """The tables of what has been measured so far. A row of which nothing was found says why."""
    sizes, rows = raw["sizes"], raw["rows"]
    texts = []

    def add(header: str, part: str, cells: Callable[[str, Any], list]) -> None:
        if part not in rows:
            return
        blank = [""] * (header.count(" | ") - 1)
        lines = []
        for name, row in rows[part].items():
            label = f"`{name}`" if name.startswith("--") else name or "default"
            others = cells(name, row["found"]) if "found" in row else [row["note"], *blank]
            lines.append([label, *others])
        texts.append(table(header, lines))

    def times(one: dict, scalar: str, part: str, name: str) -> str:
        """How many times what the row `name` has."""
        other = rows[part].get(name, {}).get("found")
        if other is None or not other["steady"][scalar]:
            return "–"
        return f"{one['steady'][scalar] / other['steady'][scalar]:.2f}"

    def run_cells(one: dict) -> list:
        """What stands at the end of the row of a run."""
        active = [one["precision"], one["sdpa"], *(name for name in ("compiled", "cudagraph") if one[name])]
        return [f"{one['peak_memory_gib']:.2f}", ", ".join(filter(None, active))]

    def snake(name: str, one: dict) -> list:
        steady = one["steady"]
        learning = steady["charts/samples_per_second"] / max(1 - steady["perf/rollout_fraction"], 1e-9)
        flops = learning / one["args"]["batch_size"] * one["update_flops"]
        peak = rows["matmul"][str(sizes["matmul_side"])].get("found")
        return [
            f"{steady['charts/SPS']:,.0f}",
            times(one, "charts/SPS", "snake", ""),
            f"{steady['charts/samples_per_second']:,.0f}",
            f"{learning:,.0f}",
            f"{flops / 1e12:,.1f}",
            f"{flops / peak:.1%}" if peak else "–",
            f"{steady['charts/replay_ratio']:.2f}",
            *run_cells(one),
        ]

    def arena(name: str, one: dict) -> list:
        steady = one["steady"]
        return [
            f"{steady['charts/SPS']:,.0f}",
            times(one, "charts/SPS", "arena", ""),
            f"{steady['perf/rollout_fraction']:.0%}",
            f"{steady['charts/replay_ratio']:.2f}",
            *run_cells(one),
        ]

    def transformer(name: str, one: dict) -> list:
        batch = name.split(",")[0]
        return [
            f"{one['steady']['charts/samples_per_second']:,.0f}",
            times(one, "charts/samples_per_second", "transformer", f"{batch}, SB3"),
            f"{one['steady']['charts/updates_per_second']:.2f}",
            *run_cells(one),
        ]

    def food(name: str, one: dict) -> list:
        readings = [f"{score:.1f} after {seconds:.0f} s" for seconds, score in one["curve"]]
        return [" · ".join(readings), f"{one['eval_score_max']:.0f}", f"{one['env_steps_per_second']:,.0f}"]

    end = "peak GiB | what was active"
    header = f"`dqn_snake.py {sizes['snake']}` | env steps/s | × | samples/s | samples/s while learning"
    add("side of a bf16 matmul | TFLOP/s", "matmul", lambda name, rate: [f"{rate / 1e12:,.1f}"])
    add(f"{header} | TFLOP/s then | of the matmul's | replay ratio | {end}", "snake", snake)
    add("`dqn_snake.py` | mean food after so many seconds of training | best game | env steps/s", "food", food)
    add("games of Snake alone | env steps/s", "snake alone", lambda name, rates: [f"{rates[0]:,.0f}"])
    add(f"`ppo_metta.py` | agent steps/s | × | in rollouts | replay ratio | {end}", "arena", arena)
    add("arenas alone | agent steps/s", "arena alone", lambda name, rate: [f"{rate:,.0f}"])
    add(f"batch of the transformer | samples/s | × | updates/s | {end}", "transformer", transformer)
    return "\n\n".join(texts)


def table_gpu(options: Options, device: torch.device) -> tuple[str, dict]:
    """One GPU in ten minutes: a run of a few seconds for each row, in a process of its own, once.

    Rates are medians over the seconds of a run; to warm up and to compile takes none of that time. TFLOP/s are those
    of the matmuls in an update while it learns, beside those of one large matmul in bf16 on the same card. Food is the
    mean of 100 greedy games, at the end of 1,000; evaluations take a part of the run's time, but not of the seconds.
    Games alone play random actions, in eager mode. The transformer is that of `dqn_snake_sb3_compat.py`, "SB3" is
    Stable-Baselines3's DQN with the same one. "×" is to the default, or to SB3.
    """
    sizes = GPU_TRIAL if options.fast else GPU_SIZES
    about = machine(device)
    raw = {"sizes": asdict(sizes), "rows": {}}
    begin = time.perf_counter()
    for part, name, limit, call in gpu_plan(sizes, device):
        row_begin = time.perf_counter()
        left = begin + sizes.total_seconds - row_begin
        row = {"note": "not measured: no time left"}
        if left > 5:
            row = in_fork(call, min(limit, left))
        row["seconds"] = round(time.perf_counter() - row_begin, 1)
        raw["rows"].setdefault(part, {})[name] = row
        print(f"  {part} {name}: {row.get('note', 'done')}, {row['seconds']} s", flush=True)
        for line in row.get("said", []):
            print(f"    {line}")
        # A run that is cut off here has lost nothing of this row.
        record = record_of("gpu", options, device, about | raw)
        write_table(options, device, record, gpu_tables(raw))
        if options.json is not None:
            write_results(Path(options.json), json.dumps([record]))
    return gpu_tables(raw), raw


TABLES = {name: globals()[f"table_{name.replace('-', '_')}"] for name in SUITES["all"]}
GPU_TABLES = {"gpu": table_gpu}


# ------------------------------------------------------------------------------------------ pictures, files, gate


def raw_file(name: str, device: torch.device) -> Path:
    return ROOT / "benchmarks" / f"{name}{'' if device.type == 'cpu' else '-' + device.type}.json"


def draw(device: torch.device) -> None:
    """The pictures for which benchmarks/*.json has numbers."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import LogFormatter

    def measured(name: str) -> dict:
        path = raw_file(name, device)
        return json.loads(path.read_text()) if path.exists() else {}

    def picture(name: str, lines: list[tuple[str, list, list]], **settings: str) -> None:
        """One line per (label, x, y); lines of one label share its color."""
        figure, axes = plt.subplots(figsize=(10, 4.5), layout="constrained")
        colors = {label: f"C{i}" for i, label in enumerate(dict.fromkeys(label for label, *_ in lines))}
        for label, x, y in lines:
            axes.plot(x, y, ".-", color=colors[label], linewidth=1, markersize=4)
        axes.set(**settings)
        if settings.get("xscale") == "log":  # 20 and 30, not 2 x 10^1, which overlap
            axes.xaxis.set_minor_formatter(LogFormatter(minor_thresholds=(2, 0.5)))
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        samples = [plt.Line2D([], [], color=color) for color in colors.values()]
        figure.legend(samples, colors, loc="outside right upper", frameon=False)
        figure.savefig(raw_file(name, device).with_suffix(".png"), dpi=110)
        plt.close(figure)

    env, act, lines = measured("env"), measured("act"), []
    names = {"SnakeBatch": "game alone", "jumanji": "game alone: jumanji", "rule book, G": "game alone: plain Python"}
    for name in names if env else ():
        rates = [statistics.median(values) for values in zip(*env["rates"][name])]
        lines.append((names[name], env["widths"][: len(rates)], rates))
    if act:
        lines.append(("network plays", act["widths"], list(map(statistics.median, zip(*act["rates"].pop("ours"))))))
        peer = list(map(statistics.median, act["rates"].values()))
        lines.append(("network plays: Stable-Baselines3", [int(width) for width in act["rates"]], peer))
    cells = measured("scaling").get("cells", [])
    cells = [cell for cell in cells if (cell["script"], cell["flag"]) == ("dqn_snake.py", "--num-envs")]
    rates = [middle(cell["runs"], "env_steps_per_second") for cell in cells]
    lines += [("network plays and learns", [cell["value"] for cell in cells], rates)] if cells else []
    if lines:
        log = {"xscale": "log", "yscale": "log", "xlabel": "games at once", "ylabel": "env steps per second"}
        picture("throughput", lines, title="Snake: speed by number of games", **log)
    axes = {"xlabel": "seconds of training", "xscale": "log"}
    games = {"score": ("Snake", "food per greedy game"), "hearts": ("Arena", "hearts"), "distance": ("Mario", "pixels")}
    for goal, (game, score) in games.items():
        runs = measured(f"time-to-{goal}").get("curves", {})
        lines = [(who, *zip(*one)) for who, curves in runs.items() for one in curves]
        if lines:
            title = f"{game}: learning beside Stable-Baselines3, a line for every seed"
            picture(f"time-to-{goal}", lines, title=title, ylabel=f"mean {score}", **axes)
    longest = [one for one in measured("learn").get("runs", []) if "--max-seconds 600" in one["flags"]]
    flags = [one["flags"].split(" --seed")[0].replace("--max-seconds 600", "").strip() for one in longest]
    learned = [(flag or "defaults", *zip(*one["curve"])) for flag, one in zip(flags, longest)]
    if learned:
        axes = {"xlabel": "seconds of training", "ylabel": "mean food per greedy game"}
        picture("learning", learned, title="Snake: ten minutes of dqn_snake.py, a line for every seed", **axes)


def section(record: dict, text: str) -> str:
    """What stands in benchmarks.md between a table's marks: what it is, the table, and how it was measured."""
    versions = ", ".join(f"{package} {version}" for package, version in record["versions"].items())
    measured = f"`{record['command']}` on {record['hardware']}; {versions}; {record['date']}, commit {record['commit']}"
    function = (TABLES | GPU_TABLES)[record["table"]]
    return f"{inspect.getdoc(function)}\n\n{text}\n\n{measured}"


def write_section(name: str, device: torch.device, text: str) -> None:
    """Put `text` between the marks of its table in benchmarks.md."""
    page, mark = ROOT / "benchmarks.md", f"<!-- {name} {device.type} -->"
    content = page.read_text() if page.exists() else ""
    if mark not in content:  # a device's first section stands below the CPU's, a new table's at the end
        below, new = rf"<!-- {name} cpu -->.*?\n<!-- end -->\n", f"\n{mark}\n<!-- end -->\n"
        content, found = re.subn(below, lambda found: found[0] + new, content, count=1, flags=re.DOTALL)
        content += "" if found else f"\n## {name}\n{new}"
    own = re.compile(rf"{mark}.*?(?=\n<!-- end -->)", re.DOTALL)
    write_results(page, own.sub(lambda _: f"{mark}\n{text}", content))


def record_of(name: str, options: Options, device: torch.device, raw: dict) -> dict:
    """What a table found, and how it was asked."""
    command = f"python benchmark.py --suite {name}" + (" --fast" if options.fast else "")
    command += f" --repeats {options.repeats}" if options.repeats else ""
    command += f" --seconds {options.seconds}" if options.seconds and name == "metta-presets" else ""
    return {"table": name, "device": device.type, "command": command} | raw


def is_gpu_trial(options: Options) -> bool:
    """Whether this only tries the code of --suite gpu out: nothing that it finds is a result."""
    return options.suite == "gpu" and options.fast


def write_table(options: Options, device: torch.device, record: dict, text: str) -> None:
    """Into benchmarks/ and benchmarks.md. A comparison changes nothing that the next one compares with."""
    if options.compare is not None or is_gpu_trial(options):
        return
    write_results(raw_file(record["table"], device), json.dumps(record))
    write_section(record["table"], device, section(record, text))


MIN_ROUNDS = 3  # of a ratio, then and now: no single lucky round decides
LOWEST = 0.9  # a median below this part of the one before has fallen; on a quiet machine medians vary by a few percent


def read_reference(path: str, names: list[str], device: torch.device, fast: bool) -> dict[str, dict]:
    """What --compare compares with, by table; refused before anything is measured where that could not be compared."""
    try:
        found = json.loads(Path(path).read_text())
        records = [one for one in (found if isinstance(found, list) else [found]) if one.get("ratios")]
        reference = {one["table"]: one for one in records if one["table"] in names and one["device"] == device.type}
        for name, record in reference.items():
            if ("--fast" in record["command"]) != fast:
                reason = f"{name} was measured by {record['command']}"
                fail(f"--compare {path}: {reason}; with --fast in both or in neither it works")
            for label, values in record["ratios"].items():
                if len(values) < MIN_ROUNDS or not all(0 < value < math.inf for value in values):
                    reason = f"{name}, {label} has {len(values)} rounds, {values}"
                    fail(f"--compare {path}: {reason}; {MIN_ROUNDS} or more positive numbers work")
    except (OSError, ValueError, LookupError, AttributeError, TypeError) as error:
        reason = f"not a file of results ({type(error).__name__}: {error})"
        fail(f"--compare {path}: {reason}; one that --json wrote works")
    if not reference:
        reason = f"it has no ratios of {', '.join(names)} on {device.type}"
        fail(f"--compare {path}: {reason}; a file that --json wrote works")
    return reference


def verdict(then: list[float], now: list[float]) -> str:
    """What became of a ratio: "holds" is the only word that passes."""
    if not now:
        return "missing"
    if len(now) < MIN_ROUNDS:
        return f"{len(now)} rounds, {MIN_ROUNDS} needed"
    if not all(math.isfinite(value) for value in now):
        return "not a number"
    return "holds" if statistics.median(now) >= LOWEST * statistics.median(then) else "fell"


def compare(reference: dict[str, dict], records: list[dict]) -> bool:
    """Print every ratio then and now. Whether all that there were then are there, and none fell below LOWEST of it."""
    rows, passed = [], 0
    for record in records:
        name, now = record["table"], record.get("ratios", {})
        if name not in reference:
            print(f"not compared: {name}, of which there are no ratios there")
            continue
        for when, about in (("then", reference[name]), ("now", record)):
            print(f"{name}, {when}: {about.get('hardware')}, {about.get('date')}, commit {about.get('commit')}")
        for label, before in reference[name]["ratios"].items():
            after = now.get(label, [])
            change = f"{statistics.median(after) / statistics.median(before) - 1:+.0%}" if after else ""
            says = verdict(before, after)
            passed += says == "holds"
            rows.append([f"{name}, {label}", spread(before, 2), spread(after, 2) if after else "", change, says])
    print(table("ratio to | then | now | median | ", rows))
    print(
        f"{passed} of {len(rows)} ratios hold: at least {LOWEST:.0%} of the median then, in {MIN_ROUNDS} or more rounds"
    )
    return 0 < passed == len(rows)


def refuse_if_unwritable(what: str, path: Path) -> None:
    """Refuse before anything is measured what could not be written at the end."""
    try:
        new = not path.exists()
        with path.open("a"):
            pass
        if new:
            path.unlink()
    except OSError as error:
        fail(f"{what}: cannot be written ({error.strerror}); a file in a folder that can be written works")


def write_results(path: Path, text: str) -> None:
    """Write a file; where that fails print what would stand there, so that nothing measured is lost."""
    try:
        path.write_text(text)
    except OSError as error:
        print(f"benchmark.py: {path} cannot be written ({error.strerror}); it would be:\n{text}", flush=True)


def main(options: Options) -> None:
    if options.repeats is not None and options.repeats < 1:
        fail(f"--repeats {options.repeats}: must be at least 1")
    if options.seconds is not None and options.seconds < 1:
        fail(f"--seconds {options.seconds}: must be at least 1")
    if options.device == "cuda" and not torch.cuda.is_available():
        fail("--device cuda: this PyTorch sees no CUDA device; cpu and auto work")
    device = torch.device("cuda" if options.device != "cpu" and torch.cuda.is_available() else "cpu")
    names = SUITES.get(options.suite, [options.suite])
    if options.suite == "gpu" and device.type == "cpu" and not options.fast:
        fail("--suite gpu: needs CUDA; with --device cpu --fast its code is tried out, and nothing is written")
    if options.seconds and "metta-presets" not in names:
        fail(f"--seconds {options.seconds}: is of the runs of metta-presets, which --suite {options.suite} has not")
    if options.write_env and "sweep" not in names:
        fail(f"--write-env: --suite {options.suite} has nothing to write; with sweep, sb3 or all it works")
    reference = {}
    if options.compare is not None:
        if options.rounds < MIN_ROUNDS:
            fail(f"--compare: {options.rounds} rounds say too little; --repeats {MIN_ROUNDS} or more works")
        reference = read_reference(options.compare, names, device, options.fast)
    if options.json is not None:
        if options.compare is not None and Path(options.json).resolve() == Path(options.compare).resolve():
            fail(f"--json {options.json}: is what --compare compares with; another file works")
        refuse_if_unwritable(f"--json {options.json}", Path(options.json))
    if options.write_env:
        write_env({})  # what cannot be written is refused before anything is measured
    if not reference and not is_gpu_trial(options):
        with suppress(OSError):  # what is wrong is said of the files in it
            (ROOT / "benchmarks").mkdir(exist_ok=True)
        for path in (ROOT / "benchmarks.md", *(raw_file(name, device) for name in names)):
            refuse_if_unwritable(str(path), path)
    about, records = machine(device), []
    for name in names:
        print(f"{name}:", flush=True)
        text, raw = (TABLES | GPU_TABLES)[name](options, device)
        record = record_of(name, options, device, about | raw)
        records.append(record)
        print(text)
        if options.json is not None:
            write_results(Path(options.json), json.dumps(records))
        write_table(options, device, record, text)
        if options.write_env and name == "sweep":
            write_env(raw["env"])
    if reference and not compare(reference, records):
        raise SystemExit(1)
    if not reference and names != ["gpu"]:  # of which there are no pictures
        draw(device)


if __name__ == "__main__":
    try:
        main(tyro.cli(Options, description=__doc__))
    except MemoryError as error:
        sys.exit(str(error))

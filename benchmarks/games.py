"""Speed of the games alone, with random actions."""

from typing import Any

import numpy as np
import torch
from gymnasium.vector import SyncVectorEnv, VectorEnv

import dqn_snake
from benchmarks.harness import measure_rate
from benchmarks.metta_parts import RuleBooks, metta_args
from envs.mario import game as mario
from envs.mario.batch import MarioBatch, MarioEnv
from envs.mario.gym import MarioVectorEnv
from envs.mario.real import NesGame
from envs.metta.gym import MettaVectorEnv
from envs.snake.batch import SnakeBatch
from envs.snake.gym import SnakeVectorEnv
from envs.snake.rules import SnakeEnv
from envs.streams import Stream

GYMNASIUM_GAMES = {
    "SnakeEnv": SnakeEnv,
    "SnakeVectorEnv": SnakeVectorEnv,
    "MettaVectorEnv": MettaVectorEnv,
    "MarioEnv": MarioEnv,
    "MarioVectorEnv": MarioVectorEnv,
}


def snake_rates(widths: tuple[int, ...], seconds: float, device: str) -> list[float]:
    """Steps per second of `SnakeBatch`, by number of games."""
    rates = []
    for width in widths:
        envs = SnakeBatch(width, device, seed=1)
        envs.reset()
        actions = torch.randint(4, (16, width), device=device)
        rates.append(measure_rate(lambda: [envs.step(action) for action in actions], 16 * width, seconds, device))
    return rates


def gymnasium_rates(game: str, widths: tuple[int, ...], seconds: float, **settings: Any) -> list[float]:
    """Steps per second by Gymnasium's `benchmark_vector_step`; a single-game class runs in `SyncVectorEnv`."""
    from gymnasium.utils import performance  # since Gymnasium 1.4

    kind = GYMNASIUM_GAMES[game]
    rates = []
    for width in widths:
        if issubclass(kind, VectorEnv):
            envs = kind(width, **settings)
        else:
            envs = SyncVectorEnv([kind] * width)
        rates.append(performance.benchmark_vector_step(envs, seconds, seed=1))
    return rates


def jumanji_rates(widths: tuple[int, ...], seconds: float) -> list[float]:
    """Steps per second of jumanji's Snake-v1 on our board, jitted, 16 steps per call (its fastest mode)."""
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

        rates.append(measure_rate(work, 16 * width, seconds))
    return rates


def rule_book_rate(num_envs: int, seconds: float) -> float:
    """Agent steps per second of the rule book, arenas one after another."""
    books = RuleBooks(metta_args(f"--num-envs {num_envs}", "cpu"))
    actions = torch.randint(books.num_actions, (len(books.obs),))
    return measure_rate(lambda: books.step(actions), len(actions), seconds)


def mario_rates(widths: tuple[int, ...], seconds: float) -> list[float]:
    """Agent steps per second of `MarioBatch`, by number of games."""
    rng = np.random.default_rng(1)
    rates = []
    for width in widths:
        envs = MarioBatch(width, seed=1)
        actions = rng.integers(7, size=(16, width))
        envs.reset()
        rates.append(measure_rate(lambda: [envs.step(action) for action in actions], 16 * width, seconds))
    return rates


def emulator_rate(seconds: float, refresh: bool) -> float:
    """Agent steps per second of the emulator: 4 frames, the picture and a few bytes of RAM.

    `refresh`: also call the emulator library's refresh of the whole RAM, the usual way to read those bytes.
    """
    game = NesGame(noop_max=0)
    picture = np.zeros((84, 84), np.uint8)
    draw = Stream(1, 0)
    game.start(draw)

    def step() -> None:
        game.play(mario.ACTIONS[draw(7)])
        if refresh:
            game.data.update_ram()
        game.picture(picture)
        if game.dead or game.flag:
            game.start(draw)

    return measure_rate(step, 1, seconds)


def missing_rom() -> str:
    """Why the real game cannot run here; empty if it can."""
    try:
        NesGame()
        return ""
    except ValueError as error:
        return f"The real game: not measured ({error})."

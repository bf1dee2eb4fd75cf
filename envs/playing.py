"""One game, watched: its frames, in the terminal, or as a GIF."""

import time
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
from PIL import Image

MAX_GIF_FRAMES = 2_000  # a snake that goes in circles would have tens of thousands
MAX_GIF_SIDE = 640  # pixels; larger frames are shrunk


def play(env: gym.Env, policy: Callable[[np.ndarray], Any], seed: int) -> Iterator[np.ndarray | str | None]:
    """What `env.render()` returns at the start of a game and after every step of it."""
    obs, _ = env.reset(seed=seed)
    yield env.render()
    done = False
    while not done:
        obs, _, terminated, truncated, _ = env.step(policy(obs))
        done = terminated or truncated
        yield env.render()


def play_parallel(env: Any, policy: Callable[[np.ndarray], list[int]], seed: int) -> Iterator[np.ndarray | str]:
    """What `env.render()` returns before every step of a game of PettingZoo's parallel kind.

    `policy` gets the observations of all agents, stacked, and returns their actions.
    """
    observations, _ = env.reset(seed=seed)
    while env.agents:
        yield env.render()
        actions = policy(np.stack(list(observations.values())))
        observations, *_ = env.step(dict(zip(env.agents, actions)))


def write_gif(frames: Iterable[np.ndarray], path: Path, milliseconds: int = 80) -> None:
    """Write a GIF and print its path, or why it cannot be written. `milliseconds` is how long a frame is shown."""

    def images() -> Iterator[Image.Image]:
        for frame in islice(frames, MAX_GIF_FRAMES):
            image = Image.fromarray(frame)
            image.thumbnail((MAX_GIF_SIDE, MAX_GIF_SIDE))  # only ever shrinks
            yield image

    try:
        path.parent.mkdir(exist_ok=True)
        others = images()
        first = next(others)
        first.save(path, save_all=True, append_images=others, duration=milliseconds, loop=0)
        print(path)
    except OSError as error:
        print(f"--video: {path} cannot be written ({error})")


def show_in_terminal(frames: Iterable[str | None], fps: float) -> None:
    for frame in frames:
        if frame is not None:  # a game with a window draws into it
            print(f"\033[H\033[J{frame}", flush=True)  # from the top left corner of a cleared screen
        time.sleep(1 / fps)

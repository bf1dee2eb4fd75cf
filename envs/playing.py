"""Watching one game: its frames, in the terminal or as a GIF."""

import time
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
from PIL import Image

MAX_GIF_FRAMES = 2_000  # a snake that runs in circles would produce tens of thousands
MAX_GIF_SIDE = 640  # pixels; larger frames are shrunk


def play(env: gym.Env, policy: Callable[[np.ndarray], Any], seed: int) -> Iterator[np.ndarray | str | None]:
    """Plays one game and yields `env.render()` after the reset and after every step."""
    obs, _ = env.reset(seed=seed)
    yield env.render()
    done = False
    while not done:
        obs, _, terminated, truncated, _ = env.step(policy(obs))
        done = terminated or truncated
        yield env.render()


def play_parallel(env: Any, policy: Callable[[np.ndarray], list[int]], seed: int) -> Iterator[np.ndarray | str]:
    """Plays one game of a PettingZoo parallel environment and yields `env.render()` before every step.

    `policy` maps the stacked observations of all agents to a list of their actions.
    """
    observations, _ = env.reset(seed=seed)
    while env.agents:
        yield env.render()
        actions = policy(np.stack(list(observations.values())))
        actions_by_agent = dict(zip(env.agents, actions))
        observations, *_ = env.step(actions_by_agent)


def write_gif(frames: Iterable[np.ndarray], path: Path, milliseconds: int = 80) -> None:
    """Writes `frames`, each shown for `milliseconds`, or prints why it cannot."""
    print(f"writing {path}")

    def images() -> Iterator[Image.Image]:
        for frame in islice(frames, MAX_GIF_FRAMES):
            image = Image.fromarray(frame)
            image.thumbnail((MAX_GIF_SIDE, MAX_GIF_SIDE))  # shrinks, never enlarges
            yield image

    try:
        path.parent.mkdir(exist_ok=True)
        remaining_images = images()
        first_image = next(remaining_images)
        first_image.save(path, save_all=True, append_images=remaining_images, duration=milliseconds, loop=0)
    except OSError as error:
        print(f"--video: {path} cannot be written ({error})")


def show_in_terminal(frames: Iterable[str | None], fps: float) -> None:
    """Prints text frames in place. A frame is None if the environment draws to its own window."""
    for frame in frames:
        if frame is not None:
            print(f"\033[H\033[J{frame}", flush=True)  # clear the screen, start at the top left
        time.sleep(1 / fps)

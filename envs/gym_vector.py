"""Base class of the Gymnasium vector environments.

A finished game is reset within the same step (`AutoresetMode.SAME_STEP`). Infos have the layout of `SyncVectorEnv`.
"""

from collections.abc import Sequence

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

Seeds = int | Sequence[int | None] | None  # for all lanes, or one per lane; None continues the current streams


def with_masks(info: dict[str, np.ndarray], mask: np.ndarray) -> dict[str, np.ndarray]:
    """Adds a copy of `mask` under `_name` for each array, as `SyncVectorEnv` does."""
    result = {}
    for name, values in info.items():
        result[name] = values
        result[f"_{name}"] = mask.copy()
    return result


def running_info(info: dict[str, np.ndarray], done: np.ndarray) -> dict[str, np.ndarray]:
    """Info of the games after the step. A game that has just been reset has zeros."""
    current_info = {}
    for name, values in info.items():
        zeros = np.zeros_like(values)
        current_info[name] = np.where(done, zeros, values)
    return with_masks(current_info, np.ones_like(done))


def final_info(info: dict[str, np.ndarray], final_obs: np.ndarray, done: np.ndarray) -> dict:
    """Last observation and last info of the finished games."""
    last_obs = np.full(len(done), None, object)
    for lane in done.nonzero()[0]:
        last_obs[lane] = final_obs[lane].copy()
    last_info = {}
    for name, values in info.items():
        zeros = np.zeros_like(values)
        last_info[name] = np.where(done, values, zeros)
    return {
        "final_obs": last_obs,
        "_final_obs": done,
        "final_info": with_masks(last_info, done),
        "_final_info": done,
    }


class BatchVectorEnv(VectorEnv):
    """Spaces, seeding and action checks of the three games.

    Subclasses implement `start_streams(seed)`, which restarts the random streams of all lanes, and
    `start_stream(lane, seed)`, which restarts one of them (needed for a list of seeds).
    """

    metadata = {"render_modes": [], "autoreset_mode": AutoresetMode.SAME_STEP}

    def __init__(self, num_envs: int, render_mode: str | None, observation_space: gym.Space, num_actions: int) -> None:
        if render_mode is not None:
            raise ValueError(f"render_mode {render_mode}: a vector environment is not drawn; gymnasium.make is")
        self.num_envs = num_envs
        self.num_actions = num_actions
        self.render_mode = render_mode
        self.has_streams = False
        self.single_observation_space = observation_space
        self.single_action_space = gym.spaces.Discrete(num_actions)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)

    def seed_all(self, seed: int | None) -> None:
        """Restarts all streams. None continues them; on the first reset it draws a seed."""
        super().reset(seed=seed)
        if seed is None and not self.has_streams:
            seed = int(self.np_random.integers(2**32))
        if seed is not None:
            self.start_streams(seed)
            self.has_streams = True

    def seed_lanes(self, seeds: Seeds) -> None:
        """Like `seed_all`, or one seed per lane. Raises ValueError if their number is not `num_envs`."""
        if np.ndim(seeds) == 0:
            self.seed_all(seeds)
            return
        if len(seeds) != self.num_envs:
            raise ValueError(f"{len(seeds)} seeds for {self.num_envs} games: must be as many, or one for all")
        self.seed_all(None)
        for lane, lane_seed in enumerate(seeds):
            if lane_seed is not None:
                self.start_stream(lane, lane_seed)

    def check_actions(self, actions: np.ndarray) -> np.ndarray:
        """Raises ValueError unless they are (num_envs,) integers from 0 to num_actions - 1."""
        actions = np.asarray(actions)
        highest = self.num_actions - 1
        is_integers = actions.shape == (self.num_envs,) and actions.dtype.kind in "iu"
        if not is_integers or actions.min() < 0 or actions.max() > highest:
            raise ValueError(f"actions {actions}: must be {self.num_envs} whole numbers from 0 to {highest}")
        return actions

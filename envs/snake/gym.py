"""Snake as a Gymnasium vector environment."""

from typing import Any

import numpy as np
import torch

from envs.gym_vector import BatchVectorEnv, Seeds, final_info, running_info, with_masks
from envs.snake.batch import SnakeBatch
from envs.snake.rules import MOVES, Rules
from envs.streams import lane_key


class SnakeVectorEnv(BatchVectorEnv):
    """`SnakeBatch` with NumPy arrays.

    After `reset(seed=s)` lane i plays the game of `SnakeEnv(lane=i)` with seed s. With a list of seeds, lane i plays
    the game of `SnakeEnv()` with the i-th seed, as in `SyncVectorEnv`; None continues the lane's stream.
    """

    def __init__(self, num_envs: int = 1, render_mode: str | None = None, **rules: Any) -> None:
        self.rules = Rules(**rules)
        self.kwargs = rules
        self.batch = None
        num_actions = len(MOVES)
        observation_space = self.rules.observation_space
        super().__init__(num_envs, render_mode, observation_space, num_actions)

    def start_streams(self, seed: int) -> None:
        self.batch = SnakeBatch(self.num_envs, seed=seed, **self.kwargs)

    def start_stream(self, lane: int, seed: int) -> None:
        self.batch.key[lane] = lane_key(seed, 0)
        self.batch.draws[lane] = 0

    def reset(self, *, seed: Seeds = None, options: dict | None = None):
        self.seed_lanes(seed)
        codes = self.batch.reset()
        codes = codes.numpy()
        obs = self.rules.observe(codes)
        score = np.zeros(self.num_envs, int)
        won = np.zeros(self.num_envs, bool)
        info = {"score": score, "won": won}
        all_lanes = np.ones(self.num_envs, bool)
        return obs, with_masks(info, all_lanes)

    def step(self, actions: np.ndarray):
        actions = self.check_actions(actions)
        action = torch.as_tensor(actions, dtype=torch.int64)
        codes, reward, terminated, truncated, info = self.batch.step(action)
        terminated = terminated.numpy()
        truncated = truncated.numpy()
        done = terminated | truncated
        score = info["score"].numpy()
        won = info["won"].numpy()
        episode_info = {"score": score, "won": won}
        infos = running_info(episode_info, done)
        if done.any():
            final_codes = info["final_obs"].numpy()
            final_obs = self.rules.observe(final_codes)
            infos.update(final_info(episode_info, final_obs, done))
        codes = codes.numpy()
        obs = self.rules.observe(codes)
        reward = reward.double()
        reward = reward.numpy()
        return obs, reward, terminated, truncated, infos

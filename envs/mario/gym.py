"""The side-scroller as a Gymnasium vector environment."""

from typing import Any

import gymnasium as gym
import numpy as np

from envs.gym_vector import BatchVectorEnv, Seeds, final_info, running_info, with_masks
from envs.mario.batch import MarioBatch
from envs.streams import Stream


class MarioVectorEnv(BatchVectorEnv):
    """`MarioBatch`; seeds as `SnakeVectorEnv` has them, with `MarioEnv` as the single game."""

    def __init__(self, num_envs: int = 1, render_mode: str | None = None, **settings: Any) -> None:
        self.batch = MarioBatch(num_envs, **settings)
        shape = self.batch.obs.shape[1:]
        frames = gym.spaces.Box(0, 255, shape, np.uint8)
        super().__init__(num_envs, render_mode, frames, self.batch.num_actions)

    def start_streams(self, seed: int) -> None:
        self.batch.streams = [Stream(int(seed), lane) for lane in range(self.num_envs)]

    def start_stream(self, lane: int, seed: int) -> None:
        self.batch.streams[lane] = Stream(int(seed), 0)

    def reset(self, *, seed: Seeds = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        self.seed_lanes(seed)
        info = {}
        for name, values in self.batch.statistics.items():
            info[name] = np.zeros_like(values)
        all_lanes = np.ones(self.num_envs, bool)
        obs = self.batch.reset().copy()
        return obs, with_masks(info, all_lanes)

    def step(self, actions: np.ndarray):
        actions = self.check_actions(actions)
        obs, reward, terminated, truncated, info = self.batch.step(actions)
        final_obs = info.pop("final_obs")
        done = terminated | truncated
        infos = running_info(info, done)
        if done.any():
            infos.update(final_info(info, final_obs, done))
        reward = reward.astype(np.float64)
        return obs.copy(), reward, terminated, truncated, infos

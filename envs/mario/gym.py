"""The side-scroller as a Gymnasium vector environment."""

from typing import Any

import gymnasium as gym
import numpy as np

from envs.gym_vector import BatchVectorEnv, Seeds, final_info, running_info, with_masks
from envs.mario.batch import MarioBatch
from envs.streams import Stream


class MarioVectorEnv(BatchVectorEnv):
    """`MarioBatch` with the seeds of `SnakeVectorEnv`; the single game is `MarioEnv`."""

    def __init__(self, num_envs: int = 1, render_mode: str | None = None, **settings: Any) -> None:
        self.batch = MarioBatch(num_envs, **settings)
        shape = self.batch.obs.shape[1:]
        observation_space = gym.spaces.Box(0, 255, shape, np.uint8)
        num_actions = self.batch.num_actions
        super().__init__(num_envs, render_mode, observation_space, num_actions)

    def start_streams(self, seed: int) -> None:
        seed = int(seed)
        for lane in range(self.num_envs):
            self.batch.streams[lane] = Stream(seed, lane)

    def start_stream(self, lane: int, seed: int) -> None:
        seed = int(seed)
        self.batch.streams[lane] = Stream(seed, 0)

    def reset(self, *, seed: Seeds = None, options: dict | None = None):
        self.seed_lanes(seed)
        obs = self.batch.reset()
        obs = obs.copy()
        info = {}
        for name, values in self.batch.statistics.items():
            zeros = np.zeros_like(values)
            info[name] = zeros
        all_lanes = np.ones(self.num_envs, bool)
        info = with_masks(info, all_lanes)
        return obs, info

    def step(self, actions: np.ndarray):
        actions = self.check_actions(actions)
        obs, reward, terminated, truncated, info = self.batch.step(actions)
        obs = obs.copy()
        reward = reward.astype(np.float64)
        final_obs = info.pop("final_obs")
        done = terminated | truncated
        infos = running_info(info, done)
        if done.any():
            last_info = final_info(info, final_obs, done)
            infos.update(last_info)
        return obs, reward, terminated, truncated, infos

"""The MettaGrid arena as a Gymnasium vector environment."""

from typing import Any

import gymnasium as gym
import numpy as np
import torch

from envs.gym_vector import BatchVectorEnv, final_info
from envs.metta.batch import MettaBatch
from envs.metta.rules import ACTIONS, TOKENS, Rules


class MettaVectorEnv(BatchVectorEnv):
    """`MettaBatch` with NumPy arrays.

    Every agent is one of the `num_envs` environments. Raises ValueError if `num_envs` is not a multiple of the number
    of agents of an arena. For a single arena see `MettaArena`. `reset(seed=s)` takes one seed for all arenas.
    """

    def __init__(self, num_envs: int = 1, render_mode: str | None = None, **rules: Any) -> None:
        agents = Rules(**rules).num_agents
        if num_envs < 1 or num_envs % agents:
            nearest = max(agents, round(num_envs / agents) * agents)
            raise ValueError(f"num_envs {num_envs}: must be a multiple of {agents}, the agents of an arena ({nearest})")
        self.num_games = num_envs // agents
        self.kwargs = rules
        self.batch = None
        num_actions = len(ACTIONS)
        shape = (TOKENS, 3)
        observation_space = gym.spaces.Box(0, 255, shape, np.uint8)
        super().__init__(num_envs, render_mode, observation_space, num_actions)

    def start_streams(self, seed: int) -> None:
        self.batch = MettaBatch(self.num_games, seed=seed, **self.kwargs)

    def reset(self, *, seed: int | None = None, options: dict | None = None):
        self.seed_all(seed)
        obs = self.batch.reset().numpy()
        return obs.copy(), {}

    def step(self, actions: np.ndarray):
        actions = self.check_actions(actions)
        action = torch.as_tensor(actions, dtype=torch.int64)
        obs, reward, terminated, truncated, info = self.batch.step(action)
        done = truncated.numpy()
        infos = {}
        if done.any():
            episode_info = {}
            for name in ("hearts", "length", "return"):
                episode_info[name] = info[name].numpy()
            final_obs = info["final_obs"].numpy()
            infos = final_info(episode_info, final_obs, done)
        obs = obs.numpy().copy()
        reward = reward.double().numpy()
        terminated = terminated.numpy()
        return obs, reward, terminated, done, infos

"""Any Gymnasium game with discrete actions, played in a batch with the five names that a script uses."""

from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.vector import AutoresetMode
from torch import Tensor


class GymnasiumBatch:
    """`num_envs` = N games of `gymnasium.make_vec`, on the CPU; tensors are on `device`.

    - `reset() -> obs`: starts a new game in every lane. `obs` is (N, ...) float32.
    - `step(action) -> (obs, reward, terminated, truncated, info)`: `action` is (N,) int64, the others are (N,). A
      finished game is reset within the same step; `info` has `final_obs` (N, ...) from before that reset, and `score`
      (N,), the sum of the game's rewards so far.
    - `finished` (4,): number of finished games and the sums of their score, length and return.
    - `state_dict()` is empty: after a resume the games are new.

    `obs` and `final_obs` are buffers that the next step overwrites.
    """

    def __init__(self, env_id: str, num_envs: int, device: torch.device | str = "cpu", seed: int = 0) -> None:
        self.envs = gymnasium.make_vec(
            env_id,
            num_envs,
            vectorization_mode="sync",
            vector_kwargs={"autoreset_mode": AutoresetMode.SAME_STEP},
        )
        shape = self.envs.observation_space.shape
        self.seed = seed
        self.device = torch.device(device)
        self.obs = torch.zeros(shape, device=device)
        self.final_obs = torch.zeros(shape, device=device)
        self.score = np.zeros(num_envs)
        self.length = np.zeros(num_envs)
        self.finished = torch.zeros(4, device=device)

    def _floats(self, array: np.ndarray) -> Tensor:
        return torch.as_tensor(array, dtype=torch.float32, device=self.device)

    def reset(self) -> Tensor:
        obs, _ = self.envs.reset(seed=self.seed)
        self.obs.copy_(self._floats(obs))
        self.score[:] = 0
        self.length[:] = 0
        return self.obs

    def step(self, action: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, dict[str, Any]]:
        action = action.cpu().numpy()
        obs, reward, terminated, truncated, info = self.envs.step(action)
        self.obs.copy_(self._floats(obs))
        self.final_obs.copy_(self.obs)
        self.score += reward
        self.length += 1
        score = self._floats(self.score)
        reward = self._floats(reward)
        done = terminated | truncated
        if done.any():
            lanes = torch.as_tensor(done, device=self.device)
            final_obs = np.stack(info["final_obs"][done])
            self.final_obs[lanes] = self._floats(final_obs)
            num_games = done.sum()
            total_score = self.score @ done
            total_length = self.length @ done
            totals = np.array([num_games, total_score, total_length, total_score])
            self.finished += self._floats(totals)
            self.score[done] = 0
            self.length[done] = 0
        terminated = torch.as_tensor(terminated, device=self.device)
        truncated = torch.as_tensor(truncated, device=self.device)
        info = {"final_obs": self.final_obs, "score": score}
        return self.obs, reward, terminated, truncated, info

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing to load."""

"""The batched games for users of Gymnasium's vector API; a finished game starts anew in the same step.

Actions that are not (num_envs,) whole numbers of the action space raise ValueError. Infos are what `SyncVectorEnv`
makes of those of single games.
"""

from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from envs import metta_rules, snake
from envs.mario_batch import MarioBatch
from envs.metta_batch import MettaBatch
from envs.snake_batch import SnakeBatch
from envs.streams import Stream, lane_key

Seeds = int | Sequence[int | None] | None  # one for all lanes, or a list of one for each; None goes on


def with_masks(info: dict[str, np.ndarray], mask: np.ndarray) -> dict[str, np.ndarray]:
    """Beside each array, under `_name`, which lanes it is of."""
    masked = {}
    for name, values in info.items():
        masked[name] = values
        masked[f"_{name}"] = mask.copy()
    return masked


def running_info(info: dict[str, np.ndarray], done: np.ndarray) -> dict[str, np.ndarray]:
    """Info of all lanes: where a game has ended, zeros, for that is the info of the new one."""
    running = {}
    for name, values in info.items():
        zeros = np.zeros_like(values)
        running[name] = np.where(done, zeros, values)
    return with_masks(running, np.ones_like(done))


def final_info(info: dict[str, np.ndarray], final_obs: np.ndarray, done: np.ndarray) -> dict:
    """Last observation and last info of the games that have ended."""
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
    """What the three games have in common: spaces, seeds and checked actions.

    A game has `start_streams(seed)`, which begins the random streams of all lanes, and for a list of seeds
    `start_stream(lane, seed)`, which begins that of one lane.
    """

    metadata = {"render_modes": [], "autoreset_mode": AutoresetMode.SAME_STEP}

    def __init__(self, num_envs: int, render_mode: str | None, observation_space: gym.Space, num_actions: int) -> None:
        self.num_envs = num_envs
        self.num_actions = num_actions
        self.render_mode = render_mode
        self.has_streams = False
        self.single_observation_space = observation_space
        self.single_action_space = gym.spaces.Discrete(num_actions)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)

    def seed_all(self, seed: int | None) -> None:
        """None goes on with the streams, at the first reset with those of a seed drawn here."""
        super().reset(seed=seed)
        if seed is None and not self.has_streams:
            seed = int(self.np_random.integers(2**32))
        if seed is not None:
            self.start_streams(seed)
            self.has_streams = True

    def seed_lanes(self, seeds: Seeds) -> None:
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
        """Raises ValueError unless they are (num_envs,) whole numbers, 0 to num_actions - 1."""
        actions = np.asarray(actions)
        highest = self.num_actions - 1
        is_integers = actions.shape == (self.num_envs,) and actions.dtype.kind in "iu"
        if not is_integers or actions.min() < 0 or actions.max() > highest:
            raise ValueError(f"actions {actions}: must be {self.num_envs} whole numbers from 0 to {highest}")
        return actions


class SnakeVectorEnv(BatchVectorEnv):
    """`SnakeBatch` with NumPy in and out.

    Lane i plays what `SnakeEnv(lane=i)` plays with the seed of `reset`. A list of seeds is one for each lane: lane i
    then plays what a `SnakeEnv()` of its own, as `SyncVectorEnv` would have it, plays with seed i of the list, and goes
    on with its stream where that is None.
    """

    def __init__(self, num_envs: int = 1, render_mode: str | None = None, **rules: Any) -> None:
        self.rules = snake.Rules(**rules)
        self.kwargs = rules
        self.batch = None
        num_actions = len(snake.MOVES)
        super().__init__(num_envs, render_mode, self.rules.observation_space, num_actions)

    def start_streams(self, seed: int) -> None:
        self.batch = SnakeBatch(self.num_envs, seed=seed, **self.kwargs)

    def start_stream(self, lane: int, seed: int) -> None:
        self.batch.key[lane] = lane_key(seed, 0)
        self.batch.draws[lane] = 0

    def reset(self, *, seed: Seeds = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        self.seed_lanes(seed)
        codes = self.batch.reset().numpy()
        obs = self.rules.observe(codes)
        score = np.zeros(self.num_envs, int)
        won = np.zeros(self.num_envs, bool)
        info = {"score": score, "won": won}
        all_lanes = np.ones(self.num_envs, bool)
        return obs, with_masks(info, all_lanes)

    def step(self, actions: np.ndarray):
        actions = self.check_actions(actions)
        actions = torch.as_tensor(actions, dtype=torch.int64)
        codes, reward, terminated, truncated, info = self.batch.step(actions)
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
        obs = self.rules.observe(codes.numpy())
        reward = reward.double().numpy()
        return obs, reward, terminated, truncated, infos


class MettaVectorEnv(BatchVectorEnv):
    """`MettaBatch` with NumPy in and out.

    The lanes are agents, so `num_envs` is a multiple of the agents of an arena. There is no single-agent entry point:
    for one arena and all of its agents there is `MettaArena`. `reset(seed=s)` starts the arenas' streams of seed s.
    """

    def __init__(self, num_envs: int = 1, render_mode: str | None = None, **rules: Any) -> None:
        agents = metta_rules.Rules(**rules).num_agents
        if num_envs < 1 or num_envs % agents:
            nearest = max(agents, round(num_envs / agents) * agents)
            raise ValueError(f"num_envs {num_envs}: must be a multiple of {agents}, the agents of an arena ({nearest})")
        self.num_games = num_envs // agents
        self.kwargs = rules
        self.batch = None
        num_actions = len(metta_rules.ACTIONS)
        tokens = gym.spaces.Box(0, 255, (metta_rules.TOKENS, 3), np.uint8)
        super().__init__(num_envs, render_mode, tokens, num_actions)

    def start_streams(self, seed: int) -> None:
        self.batch = MettaBatch(self.num_games, seed=seed, **self.kwargs)

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        self.seed_all(seed)
        obs = self.batch.reset().numpy()
        return obs.copy(), {}

    def step(self, actions: np.ndarray):
        actions = self.check_actions(actions)
        actions = torch.as_tensor(actions, dtype=torch.int64)
        obs, reward, terminated, truncated, info = self.batch.step(actions)
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

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


def set_spaces(env: VectorEnv, observation_space: gym.Space, num_actions: int) -> None:
    env.single_observation_space = observation_space
    env.single_action_space = gym.spaces.Discrete(num_actions)
    env.observation_space = batch_space(observation_space, env.num_envs)
    env.action_space = batch_space(env.single_action_space, env.num_envs)


def check_actions(actions: np.ndarray, num_envs: int, num_actions: int) -> np.ndarray:
    """Raises ValueError unless they are (num_envs,) whole numbers, 0 to num_actions - 1."""
    actions = np.asarray(actions)
    is_integers = actions.shape == (num_envs,) and actions.dtype.kind in "iu"
    if not is_integers or actions.min() < 0 or actions.max() >= num_actions:
        raise ValueError(f"actions {actions}: must be {num_envs} whole numbers from 0 to {num_actions - 1}")
    return actions


def split_seed(seed: int | Sequence[int | None] | None, num_envs: int) -> tuple[int | None, Sequence[int | None]]:
    """A seed for all lanes, and one for each: one of the two is given, the other None."""
    if np.ndim(seed) == 0:
        return seed, [None] * num_envs
    if len(seed) != num_envs:
        raise ValueError(f"{len(seed)} seeds for {num_envs} games: must be as many, or one for all")
    return None, seed


def with_masks(info: dict[str, np.ndarray], mask: np.ndarray) -> dict[str, np.ndarray]:
    """Beside each array, under `_name`, which lanes it is of."""
    masked = {}
    for name, values in info.items():
        masked[name] = values
        masked[f"_{name}"] = mask.copy()
    return masked


def running_info(info: dict[str, np.ndarray], done: np.ndarray) -> dict[str, np.ndarray]:
    """Info of all lanes: where a game has ended, zeros, for that is the info of the new one."""
    running = {name: np.where(done, np.zeros_like(values), values) for name, values in info.items()}
    return with_masks(running, np.ones_like(done))


def final_info(info: dict[str, np.ndarray], final_obs: np.ndarray, done: np.ndarray) -> dict:
    """Last observation and last info of the games that have ended."""
    last_obs = np.full(len(done), None, object)
    for lane in done.nonzero()[0]:
        last_obs[lane] = final_obs[lane].copy()
    last_info = {name: np.where(done, values, np.zeros_like(values)) for name, values in info.items()}
    return {
        "final_obs": last_obs,
        "_final_obs": done,
        "final_info": with_masks(last_info, done),
        "_final_info": done,
    }


class SnakeVectorEnv(VectorEnv):
    """`SnakeBatch` with NumPy in and out.

    Lane i plays what `SnakeEnv(lane=i)` plays with the seed of `reset`. A list of seeds is one for each lane: lane i
    then plays what a `SnakeEnv()` of its own, as `SyncVectorEnv` would have it, plays with seed i of the list, and goes
    on with its stream where that is None.
    """

    metadata = {"render_modes": [], "autoreset_mode": AutoresetMode.SAME_STEP}

    def __init__(self, num_envs: int = 1, render_mode: str | None = None, **rules: Any) -> None:
        self.num_envs = num_envs
        self.render_mode = render_mode
        self.rules = snake.Rules(**rules)
        self.kwargs = rules
        self.batch = None
        set_spaces(self, self.rules.observation_space, 4)

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict | None = None
    ) -> tuple[np.ndarray, dict]:
        seed, lane_seeds = split_seed(seed, self.num_envs)
        super().reset(seed=seed)
        if seed is None and self.batch is None:
            seed = int(self.np_random.integers(2**32))
        if seed is not None:
            self.batch = SnakeBatch(self.num_envs, seed=seed, **self.kwargs)
        for lane, lane_seed in enumerate(lane_seeds):
            if lane_seed is not None:
                self.batch.key[lane] = lane_key(lane_seed, 0)
                self.batch.draws[lane] = 0
        obs = self.rules.observe(self.batch.reset().numpy())
        info = {"score": np.zeros(self.num_envs, int), "won": np.zeros(self.num_envs, bool)}
        return obs, with_masks(info, np.ones(self.num_envs, bool))

    def step(self, actions: np.ndarray):
        actions = check_actions(actions, self.num_envs, 4)
        obs, reward, terminated, truncated, info = self.batch.step(torch.as_tensor(actions, dtype=torch.int64))
        done = (terminated | truncated).numpy()
        episode_info = {"score": info["score"].numpy(), "won": info["won"].numpy()}
        infos = running_info(episode_info, done)
        if done.any():
            infos.update(final_info(episode_info, self.rules.observe(info["final_obs"].numpy()), done))
        obs = self.rules.observe(obs.numpy())
        return obs, reward.double().numpy(), terminated.numpy(), truncated.numpy(), infos


class MettaVectorEnv(VectorEnv):
    """`MettaBatch` with NumPy in and out.

    The lanes are agents, so `num_envs` is a multiple of the agents of an arena. There is no single-agent entry point:
    for one arena and all of its agents there is `MettaArena`. `reset(seed=s)` starts the arenas' streams of seed s.
    """

    metadata = {"render_modes": [], "autoreset_mode": AutoresetMode.SAME_STEP}

    def __init__(self, num_envs: int = 1, render_mode: str | None = None, **rules: Any) -> None:
        agents = metta_rules.Rules(**rules).num_agents
        if num_envs < 1 or num_envs % agents:
            nearest = max(agents, round(num_envs / agents) * agents)
            raise ValueError(f"num_envs {num_envs}: must be a multiple of {agents}, the agents of an arena ({nearest})")
        self.num_envs = num_envs
        self.num_games = num_envs // agents
        self.render_mode = render_mode
        self.kwargs = rules
        self.batch = None
        set_spaces(self, gym.spaces.Box(0, 255, (metta_rules.TOKENS, 3), np.uint8), len(metta_rules.ACTIONS))

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        if seed is None and self.batch is None:
            seed = int(self.np_random.integers(2**32))
        if seed is not None:
            self.batch = MettaBatch(self.num_games, seed=seed, **self.kwargs)
        return self.batch.reset().numpy().copy(), {}

    def step(self, actions: np.ndarray):
        actions = check_actions(actions, self.num_envs, len(metta_rules.ACTIONS))
        obs, reward, terminated, truncated, info = self.batch.step(torch.as_tensor(actions, dtype=torch.int64))
        done = truncated.numpy()
        episode_info = {name: info[name].numpy() for name in ("hearts", "length", "return")}
        infos = final_info(episode_info, info["final_obs"].numpy(), done) if done.any() else {}
        return obs.numpy().copy(), reward.double().numpy(), terminated.numpy(), done, infos


class MarioVectorEnv(VectorEnv):
    """`MarioBatch`; seeds as `SnakeVectorEnv` has them, with `MarioEnv` as the single game."""

    metadata = {"render_modes": [], "autoreset_mode": AutoresetMode.SAME_STEP}

    def __init__(self, num_envs: int = 1, render_mode: str | None = None, **settings: Any) -> None:
        self.num_envs = num_envs
        self.render_mode = render_mode
        self.batch = MarioBatch(num_envs, **settings)
        self.has_streams = False
        set_spaces(self, gym.spaces.Box(0, 255, self.batch.obs.shape[1:], np.uint8), self.batch.num_actions)

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict | None = None
    ) -> tuple[np.ndarray, dict]:
        seed, lane_seeds = split_seed(seed, self.num_envs)
        super().reset(seed=seed)
        if seed is None and not self.has_streams:
            seed = int(self.np_random.integers(2**32))
        if seed is not None:
            self.batch.streams = [Stream(int(seed), lane) for lane in range(self.num_envs)]
            self.has_streams = True
        for lane, lane_seed in enumerate(lane_seeds):
            if lane_seed is not None:
                self.batch.streams[lane] = Stream(int(lane_seed), 0)
        info = {name: np.zeros_like(values) for name, values in self.batch.statistics.items()}
        return self.batch.reset().copy(), with_masks(info, np.ones(self.num_envs, bool))

    def step(self, actions: np.ndarray):
        actions = check_actions(actions, self.num_envs, self.batch.num_actions)
        obs, reward, terminated, truncated, info = self.batch.step(actions)
        final_obs = info.pop("final_obs")
        done = terminated | truncated
        infos = running_info(info, done)
        if done.any():
            infos.update(final_info(info, final_obs, done))
        return obs.copy(), reward.astype(np.float64), terminated, truncated, infos

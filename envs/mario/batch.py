"""Many games of the side-scroller at once in NumPy, and one of them as a Gymnasium environment."""

from typing import Any

import gymnasium as gym
import numpy as np
import torch

from envs.mario.game import ACTIONS, Episode, MarioGame
from envs.streams import Stream


class MarioBatch:
    """`num_envs` games at once, all arrays NumPy; lane i of a seed plays the same game whatever the others do.

    `reset() -> obs` and `step(action) -> (obs, reward, terminated, truncated, info)`: `action` (N,) integers, `obs`
    (N, stack, size, size) uint8 with the newest frame last (`obs[:, -1]` is what a replay has to store), `reward`
    (N,) float32, the two ends (N,) bool. A finished game starts anew in the same step, its stack filled with its first
    frame; `info["final_obs"]` is what each game looked like before that, and `info` also holds `distance` (pixels),
    `flag`, `score`, `length` and `return` as of then, each (N,). Both observations are the environment's own buffers,
    overwritten by the next step. `actions` is 12 (all), 7 (simple) or 5 (only to the right); `first_lane` is the
    number of lane 0; other keywords are those of `MarioGame`.
    """

    game_class: Any = MarioGame

    def __init__(
        self,
        num_envs: int = 1,
        seed: int = 0,
        first_lane: int = 0,
        actions: int = 7,
        stack: int = 4,
        max_steps: int | None = None,
        **game: Any,
    ) -> None:
        self.max_steps = self.game_class.max_steps if max_steps is None else max_steps
        if num_envs < 1:
            raise ValueError(f"num_envs {num_envs}: must be at least 1")
        if actions not in (5, 7, 12):
            raise ValueError(f"actions {actions}: must be 5, 7 or 12")
        if stack < 1:
            raise ValueError(f"stack {stack}: must be at least 1")
        if self.max_steps < 1:
            raise ValueError(f"max_steps {max_steps}: must be at least 1")
        self.num_envs = num_envs
        self.num_actions = actions
        self.games = [self.game_class(**game) for _ in range(num_envs)]
        self.streams = [Stream(seed, first_lane + lane) for lane in range(num_envs)]
        self.episodes = [Episode(0, self.max_steps) for _ in range(num_envs)]
        size = self.games[0].size
        self.obs = np.zeros((num_envs, stack, size, size), np.uint8)
        self.final_obs = np.zeros_like(self.obs)
        self.reward = np.zeros(num_envs, np.float32)
        self.terminated = np.zeros(num_envs, bool)
        self.truncated = np.zeros(num_envs, bool)
        self.statistics = {
            "distance": np.zeros(num_envs, np.int64),
            "flag": np.zeros(num_envs, bool),
            "score": np.zeros(num_envs, np.int64),
            "length": np.zeros(num_envs, np.int64),
            "return": np.zeros(num_envs, np.float32),
        }
        # Games finished since the caller last zeroed this, and the sums of the five statistics over them.
        self.finished = np.zeros(6)

    def reset(self) -> np.ndarray:
        """Start a new game in every lane."""
        for lane in range(self.num_envs):
            self.start(lane)
        return self.obs

    def start(self, lane: int) -> None:
        """Start a new game in one lane."""
        game = self.games[lane]
        stack = self.obs[lane]
        game.start(self.streams[lane])
        self.episodes[lane] = Episode(game.where(), self.max_steps)
        game.picture(stack[0])
        stack[1:] = stack[0]

    def step(self, action: np.ndarray):
        terminated, truncated = self.play(action)
        self.obs[:] = self.final_obs
        done = terminated | truncated
        for lane in done.nonzero()[0]:
            self.start(lane)
        info = {name: values.copy() for name, values in self.statistics.items()}
        info["final_obs"] = self.final_obs
        return self.obs, self.reward.copy(), terminated.copy(), truncated.copy(), info

    def play(self, action: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """A step without the new starts: what it looks like is in `final_obs`."""
        self.final_obs[:, :-1] = self.obs[:, 1:]
        distance = self.statistics["distance"]
        flag = self.statistics["flag"]
        score = self.statistics["score"]
        length = self.statistics["length"]
        episode_return = self.statistics["return"]
        for lane, choice in enumerate(action.tolist()):
            game = self.games[lane]
            episode = self.episodes[lane]
            game.play(ACTIONS[choice])
            reward, terminated, truncated = episode.step(game.where(), game.dead, game.flag)
            self.reward[lane] = reward
            self.terminated[lane] = terminated
            self.truncated[lane] = truncated
            game.picture(self.final_obs[lane, -1])
            distance[lane] = episode.best - episode.start
            flag[lane] = episode.flag
            score[lane] = game.score
            length[lane] = episode.length
            episode_return[lane] = episode.total
            if terminated or truncated:
                final = [values[lane] for values in self.statistics.values()]
                self.finished += [1, *final]
        return self.terminated, self.truncated

    def state_dict(self) -> dict[str, Any]:
        """All that the games are, as tensors and plain values; the tensors share memory with the environment."""
        lanes = []
        for game, stream, episode in zip(self.games, self.streams, self.episodes):
            lane = {}
            lane["game"] = game.state()
            lane["stream"] = [stream.key, stream.draws]
            lane["episode"] = {name: getattr(episode, name) for name in Episode.__slots__}
            lanes.append(lane)
        state = {}
        state["lanes"] = lanes
        state["obs"] = torch.from_numpy(self.obs)
        state["finished"] = torch.from_numpy(self.finished)
        return state

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self.obs[:] = saved["obs"].numpy()
        self.finished[:] = saved["finished"].numpy()
        for game, stream, episode, lane in zip(self.games, self.streams, self.episodes, saved["lanes"]):
            game.restore(lane["game"])
            stream.key, stream.draws = lane["stream"]
            for name, value in lane["episode"].items():
                setattr(episode, name, value)


class MarioEnv(gym.Env):
    """One lane of the engine as a Gymnasium environment; keywords as `MarioBatch` has them.

    Observation: (stack, size, size) uint8. `info` holds `distance`, `flag`, `score`, `length` and `return`.
    """

    metadata = {"render_modes": ["rgb_array", "ansi"], "render_fps": 15}
    batch_class = MarioBatch

    def __init__(self, render_mode: str | None = None, lane: int = 0, **settings: Any) -> None:
        self.render_mode = render_mode
        self.lane = lane
        self.batch = self.batch_class(1, first_lane=lane, **settings)
        self.has_stream = False
        shape = self.batch.obs.shape[1:]
        self.observation_space = gym.spaces.Box(0, 255, shape, np.uint8)
        self.action_space = gym.spaces.Discrete(self.batch.num_actions)

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        if seed is None and not self.has_stream:
            seed = int(self.np_random.integers(2**32))
        if seed is not None:
            self.batch.streams = [Stream(seed, self.lane)]
            self.has_stream = True
        obs = self.batch.reset()[0]
        info = {"distance": 0, "flag": False, "score": 0, "length": 0, "return": 0.0}
        return obs.copy(), info

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict]:
        batch = self.batch
        if not self.action_space.contains(action):
            raise ValueError(f"action {action}: must be a whole number from 0 to {batch.num_actions - 1}")
        actions = np.array([action])
        terminated, truncated = batch.play(actions)
        batch.obs[:] = batch.final_obs
        obs = batch.obs[0].copy()
        reward = batch.reward[0].item()
        info = {name: values[0].item() for name, values in batch.statistics.items()}
        return obs, reward, terminated[0].item(), truncated[0].item(), info

    def render(self) -> np.ndarray | str | None:
        if self.render_mode == "ansi":
            return self.batch.games[0].ansi()
        if self.render_mode == "rgb_array":
            return self.batch.games[0].rgb()

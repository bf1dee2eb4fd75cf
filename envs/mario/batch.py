"""Batched side-scroller in NumPy, and a single game as a Gymnasium environment."""

from typing import Any

import gymnasium as gym
import numpy as np
import torch

from envs.mario.game import ACTIONS, Episode, MarioGame
from envs.streams import Stream


class MarioBatch:
    """`num_envs` = N games, one per lane. The game of a lane depends only on the seed and the lane's number.

    - `reset() -> obs`: starts a new game in every lane. `obs` is (N, stack, size, size) uint8, newest frame last. A
      replay needs to store only `obs[:, -1]`.
    - `step(action) -> (obs, reward, terminated, truncated, info)`: `action` is (N,) integers, `reward` (N,) float32,
      `terminated` and `truncated` (N,) bool. A finished game is reset within the same step, its stack filled with its
      first frame. `info` has the state before that reset: `final_obs` (N, stack, size, size), `distance` (pixels),
      `flag`, `score`, `length` and `return` (N,).
    - `state_dict()` and `load_state_dict(saved)`: the complete state of all games.
    - `finished` (6,) float64: number of finished games and the sums of their distance, flag, score, length and return,
      since the caller last zeroed it.

    `obs` and `final_obs` are buffers that the next step overwrites. `actions` is 12 (all), 7 (simple) or 5 (right
    only), `max_steps` the step limit (None: that of the game), `first_lane` the number of lane 0; other keywords are
    those of `MarioGame`. Raises ValueError for a setting out of range.
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
        self.games = []
        self.streams = []
        self.episodes = []
        for lane in range(num_envs):
            self.games.append(self.game_class(**game))
            self.streams.append(Stream(seed, first_lane + lane))
            self.episodes.append(Episode(0, self.max_steps))
        size = self.games[0].size
        shape = (num_envs, stack, size, size)
        self.obs = np.zeros(shape, np.uint8)
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
        self.finished = np.zeros(6)

    def reset(self) -> np.ndarray:
        """Starts a new game in every lane."""
        for lane in range(self.num_envs):
            self.start(lane)
        return self.obs

    def start(self, lane: int) -> None:
        """Starts a new game in one lane."""
        game = self.games[lane]
        stack = self.obs[lane]
        game.start(self.streams[lane])
        x = game.where()
        self.episodes[lane] = Episode(x, self.max_steps)
        game.picture(stack[0])
        stack[1:] = stack[0]

    def step(self, action: np.ndarray):
        terminated, truncated = self.play(action)
        self.obs[:] = self.final_obs
        done = terminated | truncated
        for lane in done.nonzero()[0]:
            self.start(lane)
        info = {"final_obs": self.final_obs}
        for name, values in self.statistics.items():
            info[name] = values.copy()
        reward = self.reward.copy()
        return self.obs, reward, terminated.copy(), truncated.copy(), info

    def play(self, action: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """A step without resets. Writes the observations to `final_obs`. Returns terminated and truncated."""
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
            x = game.where()
            reward, terminated, truncated = episode.step(x, game.dead, game.flag)
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
        """The complete state of all games, in tensors, lists and Python numbers. The tensors are not copies."""
        lanes = []
        for game, stream, episode in zip(self.games, self.streams, self.episodes):
            lane = {
                "game": game.state(),
                "stream": [stream.key, stream.draws],
                "episode": {name: getattr(episode, name) for name in Episode.__slots__},
            }
            lanes.append(lane)
        return {
            "lanes": lanes,
            "obs": torch.from_numpy(self.obs),
            "finished": torch.from_numpy(self.finished),
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self.obs[:] = saved["obs"].numpy()
        self.finished[:] = saved["finished"].numpy()
        for i, lane in enumerate(saved["lanes"]):
            self.games[i].restore(lane["game"])
            stream = self.streams[i]
            stream.key, stream.draws = lane["stream"]
            for name, value in lane["episode"].items():
                setattr(self.episodes[i], name, value)


class MarioEnv(gym.Env):
    """One lane of `MarioBatch`, with the same keywords, as a Gymnasium environment.

    Observation: (stack, size, size) uint8. `info` has `distance` (pixels), `flag`, `score`, `length` and `return`.
    Actions out of range raise ValueError.
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
        info = {
            "distance": 0,
            "flag": False,
            "score": 0,
            "length": 0,
            "return": 0.0,
        }
        return obs.copy(), info

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict]:
        batch = self.batch
        if not self.action_space.contains(action):
            raise ValueError(f"action {action}: must be a whole number from 0 to {batch.num_actions - 1}")
        actions = np.array([action])
        terminated, truncated = batch.play(actions)
        batch.obs[:] = batch.final_obs
        obs = batch.obs[0].copy()
        reward = batch.reward.item()
        info = {name: values.item() for name, values in batch.statistics.items()}
        return obs, reward, terminated.item(), truncated.item(), info

    def render(self) -> np.ndarray | str | None:
        if self.render_mode == "ansi":
            return self.batch.games[0].ansi()
        if self.render_mode == "rgb_array":
            return self.batch.games[0].rgb()

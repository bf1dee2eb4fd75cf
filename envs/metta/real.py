"""The real MettaGrid (pip install mettagrid==0.26.22) as a batched environment.

Its rules differ from those of envs/metta/arena.py, because they have changed since July 2025. A task is a
`MettaGridConfig`. The default one is "mines and altars": moving into a mine yields an ore (at most three can be
carried), moving into an altar with an ore yields a heart.
"""

import importlib
import logging
from typing import Any

import numpy as np
import torch

try:
    from mettagrid.config.action_config import ActionsConfig, ChangeVibeActionConfig, MoveActionConfig, NoopActionConfig
    from mettagrid.config.filter import actorHas
    from mettagrid.config.handler_config import Handler, updateActor
    from mettagrid.config.mettagrid_config import (
        AgentConfig,
        GameConfig,
        GridObjectConfig,
        InventoryConfig,
        MettaGridConfig,
        ResourceLimitsConfig,
        WallConfig,
    )
    from mettagrid.config.obs_config import ObsConfig
    from mettagrid.config.reward_config import inventoryReward
    from mettagrid.map_builder.random_map import RandomMapBuilder
    from mettagrid.simulator.simulator import Buffers, Simulator
except ImportError as error:
    raise ImportError(
        f"{error}: the real MettaGrid needs `pip install mettagrid==0.26.22` (Python 3.11 or 3.12)"
    ) from error

# Before raising an error it logs the whole configuration, which is pages long. The error itself is enough.
logging.getLogger("mettagrid.simulator.simulator").setLevel(logging.CRITICAL)


def mines_and_altars(agents: int = 8, side: int = 16, max_steps: int = 256) -> MettaGridConfig:
    """A room with six mines and four altars; the reward is 1 per heart."""
    mine_handler = Handler(mutations=[updateActor({"ore": 1})])
    altar_handler = Handler(
        filters=[actorHas({"ore": 1})],
        mutations=[updateActor({"ore": -1, "heart": 1})],
    )
    ore_limit = ResourceLimitsConfig(base=3, max=3, resources=["ore"])
    return MettaGridConfig(
        game=GameConfig(
            resource_names=["ore", "heart"],
            num_agents=agents,
            max_steps=max_steps,
            episode_truncates=True,
            obs=ObsConfig(width=11, height=11, num_tokens=100),
            actions=ActionsConfig(
                noop=NoopActionConfig(),
                move=MoveActionConfig(),
                change_vibe=ChangeVibeActionConfig(enabled=False),
            ),
            agent=AgentConfig(
                inventory=InventoryConfig(limits={"ore": ore_limit}),
                rewards={"heart": inventoryReward("heart")},
            ),
            objects={
                "wall": WallConfig(),
                "mine": GridObjectConfig(name="mine", on_use_handler=mine_handler),
                "altar": GridObjectConfig(name="altar", on_use_handler=altar_handler),
            },
            map_builder=RandomMapBuilder.Config(
                width=side,
                height=side,
                agents=agents,
                border_width=1,
                objects={"wall": 8, "mine": 6, "altar": 4},
            ),
        )
    )


def one_line(error: BaseException) -> str:
    """Type and message of an error on one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:200]}" if text else type(error).__name__


def load_config(path: str | None) -> MettaGridConfig:
    """The config at "package.module:attribute", which is a config or a function that returns one. None is the default.

    Raises ValueError with a message of one line if there is none or the code fails.
    """
    if path is None:
        return mines_and_altars()
    module, _, attribute = path.partition(":")
    if not module or not attribute:
        raise ValueError(f'config "{path}": must be package.module:attribute')
    try:
        target = getattr(importlib.import_module(module), attribute)
    except (Exception, SystemExit) as error:  # this runs code of the user
        raise ValueError(f'config "{path}": must be package.module:attribute ({one_line(error)})') from error
    try:
        config = target() if callable(target) else target
    except (Exception, SystemExit) as error:
        raise ValueError(f'config "{path}": calling it without arguments fails ({one_line(error)})') from error
    if not isinstance(config, MettaGridConfig):
        raise ValueError(f'config "{path}": must be a MettaGridConfig or return one, not {type(config).__name__}')
    return config


class RealMettaGrid:
    """`num_games` simulations of one config in NumPy, stepped one after another in this process.

    The N = num_games * agents of the config are ordered game by game.

    - `reset() -> obs`: restarts all simulations. `obs` is (N, tokens, 3) uint8.
    - `step(actions) -> (obs, rewards, terminals, truncations, info)`: `actions` is (N,) int32, `rewards` (N,) float32,
      `terminals` and `truncations` (N,) bool. A finished simulation is reset within the same step. `info` has the state
      before that reset: `final_obs` (N, tokens, 3) and `return` (N,) float32.

    `obs` and `final_obs` are buffers that the next step overwrites. The simulations write to `obs` directly; it can be
    passed in, for example in shared memory. `features` maps feature ids to (name, normalization). `max_steps` is the
    step limit of an episode, or None without a limit.

    Raises ValueError with a message of one line for a config without a valid game.
    """

    def __init__(
        self,
        num_games: int = 1,
        config: str | MettaGridConfig | None = None,
        seed: int = 0,
        random_first_length: bool = True,
        obs: np.ndarray | None = None,
    ) -> None:
        if num_games < 1:
            raise ValueError(f"num_games {num_games}: must be at least 1")
        self.config = config if isinstance(config, MettaGridConfig) else load_config(config)
        self.name = f'config "{config}"' if isinstance(config, str) else "config"
        self.num_games = num_games
        self.seed = seed
        self.random_first_length = random_first_length
        game = self.config.game
        agents = num_games * game.num_agents
        self.num_agents = agents
        self.num_tokens = game.obs.num_tokens
        self.window = (game.obs.height, game.obs.width)
        self.max_steps: int | None = game.max_steps or None
        try:
            self.action_names = [action.name for action in game.actions.actions()]
            features = game.id_map().features()
        except Exception as error:  # the package has many error types
            raise ValueError(f"{self.name}: not whole ({one_line(error)})") from error
        self.num_actions = len(self.action_names)
        self.features = {feature.id: (feature.name, feature.normalization) for feature in features}
        shape = (agents, game.obs.num_tokens, game.obs.token_dim)
        if obs is not None and (obs.shape != shape or obs.dtype != np.uint8 or not obs.flags.c_contiguous):
            raise ValueError(f"obs {obs.dtype} {obs.shape}: must be contiguous uint8 {shape}")
        self.obs = np.zeros(shape, np.uint8) if obs is None else obs
        self.final_obs = np.zeros(shape, np.uint8)
        self.actions = np.zeros(agents, np.int32)
        self.rewards = np.zeros(agents, np.float32)
        self.terminals = np.zeros(agents, bool)
        self.truncations = np.zeros(agents, bool)
        masks = np.ones(agents, bool)
        teacher_actions = np.zeros(agents, np.int32)  # unused
        self.buffers = []
        for i in range(num_games):
            first = i * game.num_agents
            lanes = slice(first, first + game.num_agents)
            buffers = Buffers(
                observations=self.obs[lanes],
                terminals=self.terminals[lanes],
                truncations=self.truncations[lanes],
                rewards=self.rewards[lanes],
                masks=masks[lanes],
                actions=self.actions[lanes],
                teacher_actions=teacher_actions[lanes],
            )
            self.buffers.append(buffers)
        self.simulations: list[Any] = [None] * num_games
        self.returns = np.zeros(agents, np.float32)
        self.reset()

    def reset(self) -> np.ndarray:
        """Restarts all simulations with the first maps of `seed`."""
        self.episodes = [0] * self.num_games
        self.returns[:] = 0
        for i in range(self.num_games):
            self._start(i)
        return self.obs

    def step(self, actions: np.ndarray):
        self.actions[:] = actions
        for simulation in self.simulations:
            simulation.step()
        self.returns += self.rewards
        rewards = self.rewards.copy()
        terminals = self.terminals.copy()
        truncations = self.truncations.copy()
        info = {"final_obs": self.final_obs, "return": self.returns.copy()}
        self.final_obs[:] = self.obs
        done = terminals | truncations
        game_done = done.reshape(self.num_games, -1).all(1)
        for i in range(self.num_games):
            if game_done[i]:
                self.episodes[i] += 1
                self.returns.reshape(self.num_games, -1)[i] = 0
                self._start(i)
        return self.obs, rewards, terminals, truncations, info

    def _start(self, i: int) -> None:
        """Starts the next episode of simulation i. Map and simulation have separate seeds in MettaGrid."""
        if self.simulations[i] is not None:
            self.simulations[i].close()
        config = self.config.model_copy(deep=True)
        draws = np.random.SeedSequence([self.seed, i, self.episodes[i]]).generate_state(3)
        if hasattr(config.game.map_builder, "seed"):
            config.game.map_builder.seed = int(draws[0] >> 1)
        if self.episodes[i] == 0 and self.random_first_length and config.game.max_steps:
            config.game.max_steps = 1 + int(draws[1]) % config.game.max_steps
        seed = int(draws[2] >> 1)
        try:
            self.simulations[i] = Simulator().new_simulation(config, seed, buffers=self.buffers[i])
        except Exception as error:
            raise ValueError(f"{self.name}: no game can be made of it ({one_line(error)})") from error

    def close(self) -> None:
        for simulation in self.simulations:
            simulation.close()


class TorchMettaGrid:
    """`RealMettaGrid` with tensors and the interface of `MettaBatch`. `hearts` is the return: 1 per heart.

    Raises ValueError with a message of one line also for a config without a step limit.
    """

    def __init__(self, num_games: int, config: str | None, seed: int, random_first_length: bool) -> None:
        self.games = RealMettaGrid(num_games, config, seed, random_first_length)
        self.num_agents = self.games.num_agents
        self.num_actions = self.games.num_actions
        self.view_shape = self.games.window
        self.features = {number: name for number, (name, _) in self.games.features.items()}
        self.max_steps = self.games.max_steps
        if self.max_steps is None:
            raise ValueError("has no step limit, so evaluations would not end; one with game.max_steps works")
        self.obs = torch.from_numpy(self.games.obs)
        self.length = torch.zeros(self.num_agents)
        self.finished = torch.zeros(4)

    def reset(self) -> torch.Tensor:
        self.games.reset()
        self.length.zero_()
        return self.obs

    def step(self, action: torch.Tensor):
        _, *results, info = self.games.step(action.numpy())
        reward, terminated, truncated = [torch.from_numpy(result) for result in results]
        episodic_return = torch.from_numpy(info["return"])
        final_obs = torch.from_numpy(info["final_obs"])
        done = terminated | truncated
        self.length += 1
        sums = [done, episodic_return * done, self.length * done, episodic_return * done]
        self.finished += torch.stack(sums).sum(1)
        self.length *= ~done
        info = {"final_obs": final_obs, "return": episodic_return, "hearts": episodic_return}
        return self.obs, reward, terminated, truncated, info

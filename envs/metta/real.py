"""The real MettaGrid (pip install mettagrid==0.26.22) in the shape the trainers use: NumPy, agents as lanes.

Its rules are not those of envs/metta/arena.py: they have changed since 2025. A task is a `MettaGridConfig`; this one
is mines and altars: walking into a mine digs one ore (three can be carried), into an altar with ore makes a heart.
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

# Before an error it prints the whole configuration, pages of it; what is wrong stands in the error.
logging.getLogger("mettagrid.simulator.simulator").setLevel(logging.CRITICAL)


def mines_and_altars(agents: int = 8, side: int = 16, max_steps: int = 256) -> MettaGridConfig:
    """Eight agents among six mines and four altars; a heart is worth 1."""
    dig = Handler(mutations=[updateActor({"ore": 1})])
    offer = Handler(filters=[actorHas({"ore": 1})], mutations=[updateActor({"ore": -1, "heart": 1})])
    return MettaGridConfig(
        game=GameConfig(
            resource_names=["ore", "heart"],
            num_agents=agents,
            max_steps=max_steps,
            episode_truncates=True,
            obs=ObsConfig(width=11, height=11, num_tokens=100),
            actions=ActionsConfig(
                noop=NoopActionConfig(), move=MoveActionConfig(), change_vibe=ChangeVibeActionConfig(enabled=False)
            ),
            agent=AgentConfig(
                inventory=InventoryConfig(limits={"ore": ResourceLimitsConfig(base=3, max=3, resources=["ore"])}),
                rewards={"heart": inventoryReward("heart")},
            ),
            objects={
                "wall": WallConfig(),
                "mine": GridObjectConfig(name="mine", on_use_handler=dig),
                "altar": GridObjectConfig(name="altar", on_use_handler=offer),
            },
            map_builder=RandomMapBuilder.Config(
                width=side, height=side, agents=agents, border_width=1, objects={"wall": 8, "mine": 6, "altar": 4}
            ),
        )
    )


def one_line(error: BaseException) -> str:
    """Kind and text of an error, whatever its number of lines."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:200]}" if text else type(error).__name__


def load_config(path: str | None) -> MettaGridConfig:
    """The config at "package.module:attribute", a config or a function without arguments that returns one.

    Raises ValueError, its message one line, if there is none, whatever the code there does.
    """
    if path is None:
        return mines_and_altars()
    module, _, attribute = path.partition(":")
    if not module or not attribute:
        raise ValueError(f'config "{path}": must be package.module:attribute')
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (Exception, SystemExit) as error:  # code of somebody else, which may do anything
        raise ValueError(f'config "{path}": must be package.module:attribute ({one_line(error)})') from error
    try:
        config = found() if callable(found) else found
    except (Exception, SystemExit) as error:
        raise ValueError(f'config "{path}": calling it without arguments fails ({one_line(error)})') from error
    if not isinstance(config, MettaGridConfig):
        raise ValueError(f'config "{path}": must be a MettaGridConfig or return one, not {type(config).__name__}')
    return config


class RealMettaGrid:
    """`num_games` simulations of one config, one after another in this process.

    With N = num_games * agents of the config: `reset() -> obs` and
    `step(actions) -> (obs, rewards, terminals, truncations, info)`, `actions` (N,) int32, `obs` (N, tokens, 3) uint8,
    `rewards` (N,) float32, the rest (N,) bool. A simulation that ends starts anew in the same step; `info["final_obs"]`
    is what its agents saw before. The simulations write to these arrays themselves; `obs` may be handed in (shared
    memory, say). All but `rewards`, `terminals` and `truncations` are overwritten by the next step.
    `num_actions`, `num_tokens` and `features` (id to name and normalization) come from the package. `max_steps` is the
    step limit of an episode, None where the config has none: such an episode may never end.

    Raises ValueError, its message one line, for a config that no game can be made of.
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
        self.num_games, self.seed, self.random_first_length = num_games, seed, random_first_length
        game = self.config.game
        agents = num_games * game.num_agents
        self.num_agents, self.num_tokens = agents, game.obs.num_tokens
        self.window = (game.obs.height, game.obs.width)
        self.max_steps: int | None = game.max_steps or None
        try:
            self.action_names = [action.name for action in game.actions.actions()]
            features = game.id_map().features()
        except Exception as error:  # each part of the package has errors of its own
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
        self.terminals, self.truncations, masks = np.zeros(agents, bool), np.zeros(agents, bool), np.ones(agents, bool)
        unused = np.zeros(agents, np.int32)
        self.buffers = [
            Buffers(
                observations=self.obs[part],
                terminals=self.terminals[part],
                truncations=self.truncations[part],
                rewards=self.rewards[part],
                masks=masks[part],
                actions=self.actions[part],
                teacher_actions=unused[part],
            )
            for part in (slice(i * game.num_agents, (i + 1) * game.num_agents) for i in range(num_games))
        ]
        self.simulations: list[Any] = [None] * num_games
        self.returns = np.zeros(agents, np.float32)
        self.reset()

    def reset(self) -> np.ndarray:
        """Start all simulations over, with the maps of `seed`."""
        self.episodes = [0] * self.num_games
        self.returns[:] = 0
        for i in range(self.num_games):
            self._start(i)
        return self.obs

    def step(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, dict]:
        self.actions[:] = actions
        for simulation in self.simulations:
            simulation.step()
        self.returns += self.rewards
        rewards, terminals, truncations = self.rewards.copy(), self.terminals.copy(), self.truncations.copy()
        done = terminals | truncations
        info = {"final_obs": self.final_obs, "return": self.returns.copy()}
        self.final_obs[:] = self.obs
        for i, ends in enumerate(done.reshape(self.num_games, -1).all(1)):
            if ends:
                self.episodes[i] += 1
                self.returns.reshape(self.num_games, -1)[i] = 0
                self._start(i)
        return self.obs, rewards, terminals, truncations, info

    def _start(self, i: int) -> None:
        """The seed of a simulation does not reach its map, so the map gets one of its own for each episode."""
        if self.simulations[i] is not None:
            self.simulations[i].close()
        config = self.config.model_copy(deep=True)
        draws = np.random.SeedSequence([self.seed, i, self.episodes[i]]).generate_state(3)
        if hasattr(config.game.map_builder, "seed"):
            config.game.map_builder.seed = int(draws[0] >> 1)
        if self.episodes[i] == 0 and self.random_first_length and config.game.max_steps:
            config.game.max_steps = 1 + int(draws[1]) % config.game.max_steps
        try:
            self.simulations[i] = Simulator().new_simulation(config, int(draws[2] >> 1), buffers=self.buffers[i])
        except Exception as error:
            raise ValueError(f"{self.name}: no game can be made of it ({one_line(error)})") from error

    def close(self) -> None:
        for simulation in self.simulations:
            simulation.close()


class TorchMettaGrid:
    """`RealMettaGrid` called as `MettaBatch` is, with tensors. A heart is a reward of 1 there.

    Raises ValueError, its message one line, also for a config without a step limit.
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
        self.finished = torch.zeros(4)  # agent-episodes, and sums of their hearts, length and return

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

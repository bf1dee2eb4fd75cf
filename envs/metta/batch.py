"""Batched MettaGrid arenas in PyTorch, on any device. The rules are those of envs/metta/rules.py.

envs/metta/maps.py draws the maps, envs/metta/actions.py executes actions, envs/metta/tokens.py writes observations.
"""

from typing import Any

import torch
from torch import Tensor

from envs.metta.actions import attack, move_and_use, paint_and_rotate, start_converting, thaw, tick
from envs.metta.maps import MapMaker, SpareMaps
from envs.metta.rules import ACTIONS, DRAW_LENGTH, DRAW_ORDER, FEATURES, HEADER, ITEMS, STATS, TOKENS, VIEW, Rules
from envs.metta.tables import RuleTables
from envs.metta.tokens import TokenTable
from envs.streams import integer_hash, lane_key


class MettaBatch:
    """`num_games` games on `device`, one per lane. Each matches `MettaArena` token for token.

    The N = num_games * `Rules.num_agents` agents are ordered game by game.

    - `reset() -> obs`: starts a new episode in every lane. `obs` is (N, 200, 3) uint8, see envs/metta/arena.py.
    - `step(action) -> (obs, reward, terminated, truncated, info)`: `action` is (N,) int64, `reward` (N,) float32,
      `terminated` (always False) and `truncated` (N,) bool. A truncated game is reset within the same step. `info` has
      the state before that reset: `final_obs` (N, 200, 3), `hearts` (taken from altars), `length`, `return` (N,) and
      `stats` (N, len(STATS)) int32.
    - `state_dict()` and `load_state_dict(saved)`: the complete state of all games.
    - `finished` (4,) float32: number of finished agent-episodes and the sums of their hearts, length and return, since
      the caller last zeroed it.

    `obs`, `final_obs` and `stats` are buffers that the next step overwrites. On CUDA a step never synchronizes and all
    shapes are fixed, so that a CUDA graph can capture it: the agents of a game act one after another. On CPU agents
    that do not interact act at the same time. `fixed_shapes = True` before the first reset selects the former on CPU.
    """

    features = dict(enumerate(FEATURES))  # feature names by number
    view_shape = (2 * VIEW + 1, 2 * VIEW + 1)  # rows and columns of an agent's window
    num_actions = len(ACTIONS)

    def __init__(self, num_games: int, device: torch.device | str = "cpu", seed: int = 0, **rules: Any) -> None:
        self.rules = Rules(**rules)
        if num_games < 1:
            raise ValueError(f"num_games {num_games}: must be at least 1")
        self.num_games = num_games
        self.num_agents = num_games * self.rules.num_agents
        self.max_steps = self.rules.max_steps
        self.device = torch.device(device)
        self.fixed_shapes = self.device.type != "cpu"
        self.first_agent = self.rules.first_agent
        self.num_codes = self.rules.num_codes
        self.num_rows = num_games * self.num_codes
        rows, columns = self.rules.shape
        self.cells = rows * columns
        self.tables = RuleTables(self.rules, self.device)
        self.maps = MapMaker(self.rules, self.device)
        self.tokens = TokenTable(self.rules, num_games, self.device)
        self._make_indices()
        self._make_state(seed)
        self._make_first_things()

    # --------------------------------------------------------------------------------------------------------- tables

    def _make_indices(self) -> None:
        """Indices of lanes, agents and things in the flat tensors.

        The map code of a thing is also its row within its lane. Agents, rows and cells are numbered over all lanes; a
        base is the first number of a lane.
        """
        agents = self.rules.num_agents
        self.lanes = torch.arange(self.num_games, device=self.device)
        self.agent_number = torch.arange(agents, device=self.device)  # in its lane
        self.agent_lane = self.lanes.repeat_interleave(agents)
        self.agent_base = self.agent_lane * agents
        agent_code = self.agent_number + self.first_agent
        self.agent_code = agent_code.repeat(self.num_games)
        self.row_base = self.agent_lane * self.num_codes
        self.agent_row = self.row_base + self.agent_code
        code = torch.arange(self.num_codes, device=self.device)
        self.row_code = code.repeat(self.num_games)

    # ---------------------------------------------------------------------------------------------------------- state

    def _zeros(self, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.zeros(*shape, dtype=dtype, device=self.device)

    def _make_state(self, seed: int) -> None:
        games = self.num_games
        agents = self.num_agents
        self.key = lane_key(seed, self.lanes)
        self.episode = self._zeros(games) - 1
        self.episode_key = self._zeros(games)
        self.clock = self._zeros(games)
        self.limit = self._zeros(games)
        self.grid = self._zeros(games, self.cells, dtype=torch.uint8)  # map codes
        self.cell = self._zeros(agents)
        self.heading = self._zeros(agents)
        self.color = self._zeros(agents)
        self.inventory = self._zeros(self.num_rows, len(ITEMS))
        self.timer = self._zeros(self.num_rows)
        self.value = self._zeros(agents)  # reward of the inventory, in hundredths
        self.work_reward = self._zeros(agents)  # reward for work in this step, in hundredths
        self.header = self._zeros(agents, HEADER, dtype=torch.uint8)
        self.stats = self._zeros(agents, len(STATS), dtype=torch.int32)
        self.final_stats = torch.zeros_like(self.stats)
        self.obs = self._zeros(agents, TOKENS, 3, dtype=torch.uint8)
        self.final_obs = torch.zeros_like(self.obs)
        self.dirty = self._zeros(self.num_rows, dtype=torch.bool)  # rows whose tokens are out of date
        self.spares = SpareMaps(self.maps, games, self.device)  # used with fixed shapes
        self.finished = torch.zeros(4, device=self.device)

    def _make_first_things(self) -> None:
        """State of the things of a lane at the start of an episode. `_start` copies it into lanes."""
        inventory = self.tables.initial.repeat(self.num_games, 1)
        all_rows = slice(None)
        mask = torch.ones_like(self.dirty)
        start_converting(self, all_rows, inventory, mask)
        self._write_things(all_rows)
        self.first_things = [state[0].clone() for state in self._things()]

    def _things(self) -> list[Tensor]:
        """Tensors with the state of all things, one row per lane."""
        token_table = self.tokens.table[:-TOKENS]
        states = [
            self.inventory,
            self.timer,
            token_table,
            self.tokens.count,
        ]
        return [self.by_game(state) for state in states]

    def state_dict(self) -> dict[str, Tensor]:
        """The complete state of all games. The tensors are not copies.

        Tokens and spare maps are computed from it when it is loaded, so it can be loaded on another kind of device.
        """
        return {
            "key": self.key,
            "episode": self.episode,
            "clock": self.clock,
            "limit": self.limit,
            "grid": self.grid,
            "cell": self.cell,
            "heading": self.heading,
            "color": self.color,
            "inventory": self.inventory,
            "timer": self.timer,
            "header": self.header,
            "stats": self.stats,
            "finished": self.finished,
        }

    def load_state_dict(self, saved: dict[str, Tensor]) -> None:
        """Raises KeyError or RuntimeError if `saved` comes from other games."""
        for name, tensor in self.state_dict().items():
            tensor.copy_(saved[name])
        episode_key = integer_hash(self.key + self.episode)
        self.episode_key.copy_(episode_key)
        self.value.copy_(self._inventory_value())
        self._write_things(slice(None))
        self.tokens.write_agents(self.heading, self.color)
        if self.fixed_shapes:
            self._make_spares(self.lanes)
        self._observe(slice(None), self.obs)

    # --------------------------------------------------------------------------------------------------------- a step

    def reset(self) -> Tensor:
        """Starts a new episode in every lane."""
        if self.fixed_shapes:
            self._make_spares(self.lanes)
        all_lanes = torch.ones_like(self.lanes, dtype=torch.bool)
        self._start(slice(None), all_lanes)
        if self.fixed_shapes:  # a first episode may end before its lane gets the next map
            self._make_spares(self.lanes)
        self._observe(slice(None), self.obs)
        return self.obs

    def step(self, action: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, dict]:
        self.clock.add_(1)
        self.dirty.zero_()
        tick(self)
        priority = self._priority()
        is_over, success = attack(self, action, priority)
        can_act = thaw(self, ~is_over)
        success |= paint_and_rotate(self, action, can_act)
        success |= move_and_use(self, action, can_act, priority)
        self.stat("success").add_(success)
        self.stat("failed").add_(~success)

        hundredths = self._reward(action)
        rows, _ = self.select(self.dirty)
        self._write_things(rows)
        self.tokens.write_agents(self.heading, self.color)
        num_tokens = self._observe(slice(None), self.final_obs)
        written = num_tokens.clamp(max=TOKENS)
        self.stat("tokens_written").add_(written)
        dropped = (num_tokens - TOKENS).clamp(min=0)
        self.stat("tokens_dropped").add_(dropped)

        done = self.clock >= self.limit
        truncated = done[self.agent_lane]
        info = self._final_info(truncated)
        self._start_next(done, truncated)
        reward = hundredths / 100
        terminated = torch.zeros_like(truncated)
        return self.obs, reward, terminated, truncated, info

    def _priority(self) -> Tensor:
        """(N,) random numbers. The agents of a game act in ascending order of them, attackers first."""
        step_key = integer_hash(self.episode_key + DRAW_ORDER + self.clock)
        priority = integer_hash(step_key[:, None] + self.agent_number)
        return priority.view(-1)

    def _reward(self, action: Tensor) -> Tensor:
        """Rewards (N,) in hundredths. Also writes the headers of the next observations."""
        value = self._inventory_value()
        hundredths = value - self.value
        if self.rules.rewards == "work":
            hundredths = hundredths + self.work_reward
        self.value.copy_(value)
        self.stat("hundredths").add_(hundredths)
        max_steps = self.rules.max_steps
        progress = torch.div(self.clock * 255, max_steps, rounding_mode="floor")
        self.header[:, 0] = progress[self.agent_lane]
        self.header[:, 1:3] = self.tables.header[action]
        self.header[:, 3] = hundredths.clamp(0, 255)
        return hundredths

    def _inventory_value(self) -> Tensor:
        """Rewards (N,) of the agents' inventories, in hundredths."""
        inventory = self.inventory[self.agent_row]
        number = torch.minimum(inventory, self.tables.reward_limit)
        value = number * self.tables.reward
        return value.sum(1)

    def stat(self, name: str) -> Tensor:
        """A view of one statistic, (N,)."""
        return self.stats[:, STATS.index(name)]

    def count(self, *parts: tuple[Tensor, Tensor, Tensor]) -> None:
        """Adds to the statistics. A part has agents (B,), columns (S,) and numbers (B, S)."""
        indices = []
        numbers = []
        for agent, columns, number in parts:
            index = agent[:, None] * len(STATS) + columns
            indices.append(index.view(-1))
            numbers.append(number.view(-1))
        index = torch.cat(indices)
        number = torch.cat(numbers).int()
        self.stats.view(-1).scatter_add_(0, index, number)

    def mark_dirty(self, rows: Tensor, mask: Tensor) -> None:
        """Marks the tokens of `rows` as out of date where `mask` is set. With fixed shapes all are always rewritten."""
        if not self.fixed_shapes:
            self.dirty[rows] |= mask

    def select(self, mask: Tensor) -> tuple[slice | Tensor, Tensor]:
        """Rows (or lanes) to update and their mask: on CPU only those in `mask`, with fixed shapes all."""
        if self.fixed_shapes:
            return slice(None), mask
        indices = mask.nonzero().squeeze(1)
        return indices, mask[indices]

    def by_game(self, tensor: Tensor) -> Tensor:
        """A view with one row per game."""
        return tensor.view(self.num_games, -1)

    def _write_things(self, rows: slice | Tensor) -> None:
        code = self.row_code[rows]
        inventory = self.inventory[rows]
        timer = self.timer[rows]
        self.tokens.write_things(rows, code, inventory, timer)

    def _observe(self, agents: slice | Tensor, out: Tensor) -> Tensor:
        """Writes the observations of `agents` to `out` (B, 200, 3) uint8. Returns their numbers of tokens (B,)."""
        cell = self.cell[agents]
        row_base = self.row_base[agents]
        header = self.header[agents]
        return self.tokens.observe(self.grid, cell, row_base, header, self.fixed_shapes, out)

    # --------------------------------------------------------------------------------------------- ends of episodes

    def _final_info(self, truncated: Tensor) -> dict[str, Tensor]:
        """Info of a step, before finished games are reset. Adds finished games to `finished`."""
        self.final_stats.copy_(self.stats)
        hearts = self.stat("heart.get").clone()
        length = self.clock[self.agent_lane]
        episode_return = self.stat("hundredths") / 100
        finished = [
            truncated,
            hearts * truncated,
            length * truncated,
            episode_return * truncated,
        ]
        finished = torch.stack(finished)
        self.finished.add_(finished.sum(1))
        return {
            "final_obs": self.final_obs,
            "hearts": hearts,
            "length": length,
            "return": episode_return,
            "stats": self.final_stats,
        }

    def _start_next(self, done: Tensor, truncated: Tensor) -> None:
        """Starts new episodes in lanes that ended (games,) and writes the observations of their agents (N,)."""
        self.obs.copy_(self.final_obs)
        if self.fixed_shapes:
            lanes = self.spares.next_lanes(self.lanes)
            self._make_spares(lanes)
            self._start(slice(None), done)
            self._observe(slice(None), self.obs)
        elif done.any():
            lanes = done.nonzero().squeeze(1)
            self._start(lanes, done[lanes])
            agents = truncated.nonzero().squeeze(1)
            obs = self.obs[agents]
            self._observe(agents, obs)
            self.obs[agents] = obs

    def _make_spares(self, lanes: Tensor) -> None:
        """Makes the maps of the next episodes of `lanes`."""
        next_episode = self.episode[lanes] + 1
        next_key = integer_hash(self.key[lanes] + next_episode)
        self.spares.make(lanes, next_key)

    def _start(self, lanes: slice | Tensor, mask: Tensor) -> None:
        """Starts the next episode in the lanes of `mask`."""
        rules = self.rules
        self.episode[lanes] += mask.long()
        episode = self.episode[lanes]
        key = integer_hash(self.key[lanes] + episode)
        if self.fixed_shapes:
            grid = self.spares.grid
            cell = self.spares.cell
        else:
            grid, cell = self.maps.make(key)
        limit = torch.full_like(key, rules.max_steps)
        if rules.random_first_length:
            draw = integer_hash(key + DRAW_LENGTH)
            first_limit = 1 + draw % rules.max_steps
            limit = torch.where(episode == 0, first_limit, limit)

        def write(state: Tensor, value: Tensor | int) -> None:
            lane_state = self.by_game(state)
            old_value = lane_state[lanes]
            lane_state[lanes] = torch.where(mask[:, None], value, old_value)

        write(self.grid, grid)
        first_cell = self.lanes[lanes, None] * self.cells
        write(self.cell, cell + first_cell)
        write(self.episode_key, key[:, None])
        write(self.limit, limit[:, None])
        for state, first_things in zip(self._things(), self.first_things):
            write(state, first_things)
        write(self.clock, 0)
        write(self.heading, 0)
        write(self.color, 0)
        write(self.value, 0)
        write(self.stats, 0)
        write(self.header, 0)

"""Many MettaGrid arenas at once in torch, on any device, by the rules of envs/metta/rules.py.

envs/metta/maps.py draws their maps, envs/metta/actions.py is what happens in a step, envs/metta/tokens.py writes the
observations.
"""

from typing import Any

import torch

from envs.metta.actions import attack, move_and_use, paint_and_rotate, start_converting, thaw, tick
from envs.metta.maps import MapMaker, SpareMaps
from envs.metta.rules import ACTIONS, DRAW_LENGTH, DRAW_ORDER, FEATURES, HEADER, ITEMS, STATS, TOKENS, VIEW, Rules
from envs.metta.tables import RuleTables
from envs.metta.tokens import TokenTable
from envs.streams import integer_hash, lane_key


class MettaBatch:
    """`num_games` games at once, every tensor on `device`; agrees with `MettaArena` token for token.

    With N = num_games * `Rules.num_agents` agents, game by game: `reset() -> obs` and
    `step(action) -> (obs, reward, terminated, truncated, info)`, `action` (N,) int64, `obs` (N, 200, 3) uint8,
    `reward` (N,) float32, the rest (N,) bool. Nothing terminates; a truncated game starts its next episode in the same
    step, and `info["final_obs"]` is what each agent saw before that. `info` also holds, as of then, each agent's
    `hearts` (got from altars), `length`, `return` and `stats` (N, len(STATS)) int32. Both observations and the
    statistics are buffers that the next step overwrites. On CUDA no step waits for the device and all shapes are fixed:
    a graph can capture it, and torch.compile makes one of it. There the agents of an arena act one after another; on
    CPU all that do not meet act at once. `fixed_shapes` decides it: set before the first reset, a CPU plays as CUDA
    does.
    """

    features = dict(enumerate(FEATURES))  # names of the numbers in tokens
    view_shape = (2 * VIEW + 1, 2 * VIEW + 1)  # rows and columns that an agent sees
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
        """Where lanes, agents and things stand in the flat tensors.

        The code of a thing in a cell of the map is also its row among those of its lane. Agents, rows and cells count
        through all lanes; a base is the first of a lane.
        """
        agents = self.rules.num_agents
        self.lanes = torch.arange(self.num_games, device=self.device)
        self.agent_number = torch.arange(agents, device=self.device)  # in its lane
        self.agent_lane = self.lanes.repeat_interleave(agents)
        self.agent_base = self.agent_lane * agents
        self.agent_code = self.agent_number.repeat(self.num_games) + self.first_agent
        self.row_base = self.agent_lane * self.num_codes
        self.agent_row = self.row_base + self.agent_code
        code = torch.arange(self.num_codes, device=self.device)
        self.row_code = code.repeat(self.num_games)

    # ---------------------------------------------------------------------------------------------------------- state

    def _zeros(self, *shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.zeros(*shape, dtype=dtype, device=self.device)

    def _make_state(self, seed: int) -> None:
        """What a step changes."""
        games = self.num_games
        agents = self.num_agents
        self.key = lane_key(seed, self.lanes)
        self.episode = self._zeros(games) - 1
        self.episode_key = self._zeros(games)
        self.clock = self._zeros(games)
        self.limit = self._zeros(games)
        self.grid = self._zeros(games, self.cells, dtype=torch.uint8)  # codes
        self.cell = self._zeros(agents)
        self.heading = self._zeros(agents)
        self.color = self._zeros(agents)
        self.inventory = self._zeros(self.num_rows, len(ITEMS))
        self.timer = self._zeros(self.num_rows)
        self.value = self._zeros(agents)  # hundredths that what an agent holds is worth
        self.work_reward = self._zeros(agents)  # hundredths that an agent has earned in this step
        self.header = self._zeros(agents, HEADER, dtype=torch.uint8)
        self.stats = self._zeros(agents, len(STATS), dtype=torch.int32)
        self.final_stats = torch.zeros_like(self.stats)
        self.obs = self._zeros(agents, TOKENS, 3, dtype=torch.uint8)
        self.final_obs = torch.zeros_like(self.obs)
        self.dirty = self._zeros(self.num_rows, dtype=torch.bool)  # rows whose tokens are out of date
        self.spares = SpareMaps(self.maps, games, self.device)  # used with fixed shapes
        # Agent-episodes finished since the caller last zeroed this, and the sums of their hearts, length and return.
        self.finished = torch.zeros(4, device=self.device)

    def _make_first_things(self) -> None:
        """The things of a lane at the start of an episode, to be copied into a lane that starts."""
        inventory = self.tables.initial.repeat(self.num_games, 1)
        all_rows = torch.ones_like(self.dirty)
        start_converting(self, slice(None), inventory, all_rows)
        self._write_things(slice(None))
        self.first_things = [state[0].clone() for state in self._things()]

    def _things(self) -> list[torch.Tensor]:
        """What is kept of things, lane by lane."""
        states = [self.inventory, self.timer, self.tokens.table[:-TOKENS], self.tokens.count]
        return [self.by_game(state) for state in states]

    def state_dict(self) -> dict[str, torch.Tensor]:
        """All that the games are, as the tensors themselves, not copies. What follows from these is made when they are
        loaded: tokens and spare maps too, so that games may go on on another kind of device."""
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

    def load_state_dict(self, saved: dict[str, torch.Tensor]) -> None:
        """Raises KeyError or RuntimeError if `saved` is of other games."""
        for name, tensor in self.state_dict().items():
            tensor.copy_(saved[name])
        self.episode_key.copy_(integer_hash(self.key + self.episode))
        self.value.copy_(self._inventory_value())
        self._write_things(slice(None))
        self.tokens.write_agents(self.heading, self.color)
        if self.fixed_shapes:
            self._make_spares(self.lanes)
        self._observe(slice(None), self.obs)

    # --------------------------------------------------------------------------------------------------------- a step

    def reset(self) -> torch.Tensor:
        """Start a new episode in every lane."""
        if self.fixed_shapes:
            self._make_spares(self.lanes)
        all_lanes = torch.ones_like(self.lanes, dtype=torch.bool)
        self._start(slice(None), all_lanes)
        if self.fixed_shapes:  # the first episode may end before its turn to be made comes
            self._make_spares(self.lanes)
        self._observe(slice(None), self.obs)
        return self.obs

    def step(self, action: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, dict]:
        self.clock.add_(1)
        self.dirty.zero_()
        tick(self)
        priority = self._priority()
        turn_over, success = attack(self, action, priority)
        acts = thaw(self, ~turn_over)
        success |= paint_and_rotate(self, action, acts)
        success |= move_and_use(self, action, acts, priority)
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

        ends = self.clock >= self.limit
        truncated = ends[self.agent_lane]
        info = self._final_info(truncated)
        self._start_next(ends, truncated)
        reward = hundredths / 100
        terminated = torch.zeros_like(truncated)
        return self.obs, reward, terminated, truncated, info

    def _priority(self) -> torch.Tensor:
        """Agents (N,) of a game act in the order of these numbers, those that attack first."""
        step_key = integer_hash(self.episode_key + DRAW_ORDER + self.clock)
        priority = integer_hash(step_key[:, None] + self.agent_number)
        return priority.view(-1)

    def _reward(self, action: torch.Tensor) -> torch.Tensor:
        """Hundredths of reward of all agents (N,), and the header of their next observation."""
        value = self._inventory_value()
        hundredths = value - self.value
        if self.rules.rewards == "work":
            hundredths = hundredths + self.work_reward
        self.value.copy_(value)
        self.stat("hundredths").add_(hundredths)
        progress = torch.div(self.clock * 255, self.rules.max_steps, rounding_mode="floor")
        self.header[:, 0] = progress[self.agent_lane]
        self.header[:, 1:3] = self.tables.header[action]
        self.header[:, 3] = hundredths.clamp(0, 255)
        return hundredths

    def _inventory_value(self) -> torch.Tensor:
        """Hundredths that what each agent holds is worth."""
        inventory = self.inventory[self.agent_row]
        number = torch.minimum(inventory, self.tables.rewarded)
        value = number * self.tables.reward
        return value.sum(1)

    def stat(self, name: str) -> torch.Tensor:
        return self.stats[:, STATS.index(name)]

    def count(self, *parts: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> None:
        """Add to statistics: each part is agents (B,), columns (S,) and numbers (B, S)."""
        indices = []
        numbers = []
        for agent, columns, number in parts:
            index = agent[:, None] * len(STATS) + columns
            indices.append(index.view(-1))
            numbers.append(number.view(-1))
        index = torch.cat(indices)
        number = torch.cat(numbers).int()
        self.stats.view(-1).scatter_add_(0, index, number)

    def mark_dirty(self, rows: torch.Tensor, mask: torch.Tensor) -> None:
        """The tokens of those rows that count are out of date; with fixed shapes all are written anyway."""
        if not self.fixed_shapes:
            self.dirty[rows] |= mask

    def select(self, mask: torch.Tensor) -> tuple[slice | torch.Tensor, torch.Tensor]:
        """Rows (or lanes) to work on and which of them count: on CPU only those that need it, on CUDA all."""
        if self.fixed_shapes:
            return slice(None), mask
        indices = mask.nonzero().squeeze(1)
        return indices, mask[indices]

    def by_game(self, tensor: torch.Tensor) -> torch.Tensor:
        """A view with a row for each game."""
        return tensor.view(self.num_games, -1)

    def _write_things(self, rows: slice | torch.Tensor) -> None:
        code = self.row_code[rows]
        inventory = self.inventory[rows]
        timer = self.timer[rows]
        self.tokens.write_things(rows, code, inventory, timer)

    def _observe(self, agents: slice | torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Write what `agents` see to `out` (B, 200, 3) uint8; returns (B,) how many tokens there were."""
        cell = self.cell[agents]
        row_base = self.row_base[agents]
        header = self.header[agents]
        return self.tokens.observe(self.grid, cell, row_base, header, self.fixed_shapes, out)

    # --------------------------------------------------------------------------------------------- ends of episodes

    def _final_info(self, truncated: torch.Tensor) -> dict[str, torch.Tensor]:
        """What a step says of the episodes before new ones start; finished ones are added up."""
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
        self.finished.add_(torch.stack(finished).sum(1))
        return {
            "final_obs": self.final_obs,
            "hearts": hearts,
            "length": length,
            "return": episode_return,
            "stats": self.final_stats,
        }

    def _start_next(self, ends: torch.Tensor, truncated: torch.Tensor) -> None:
        """New episodes in the lanes whose last one ended (games,), and what their agents (N,) see."""
        self.obs.copy_(self.final_obs)
        if self.fixed_shapes:
            lanes = self.spares.next_lanes(self.lanes)
            self._make_spares(lanes)
            self._start(slice(None), ends)
            self._observe(slice(None), self.obs)
        elif ends.any():
            lanes = ends.nonzero().squeeze(1)
            self._start(lanes, ends[lanes])
            agents = truncated.nonzero().squeeze(1)
            obs = self.obs[agents]
            self._observe(agents, obs)
            self.obs[agents] = obs

    def _make_spares(self, lanes: torch.Tensor) -> None:
        """Maps that these lanes will start with next."""
        next_key = integer_hash(self.key[lanes] + self.episode[lanes] + 1)
        self.spares.make(lanes, next_key)

    def _start(self, lanes: slice | torch.Tensor, mask: torch.Tensor) -> None:
        """Start the next episode in the lanes that count."""
        rules = self.rules
        self.episode[lanes] += mask.long()
        key = integer_hash(self.key[lanes] + self.episode[lanes])
        if self.fixed_shapes:
            grid = self.spares.grid
            cell = self.spares.cell
        else:
            grid, cell = self.maps.make(key)
        limit = torch.full_like(key, rules.max_steps)
        if rules.random_first_length:
            first_limit = 1 + integer_hash(key + DRAW_LENGTH) % rules.max_steps
            limit = torch.where(self.episode[lanes] == 0, first_limit, limit)

        def write(state: torch.Tensor, value: torch.Tensor | int) -> None:
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
        for state in (self.clock, self.heading, self.color, self.value, self.stats, self.header):
            write(state, 0)

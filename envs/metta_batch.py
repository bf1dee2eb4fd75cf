"""Many MettaGrid arenas at once in torch, on any device, by the rules of envs/metta_rules.py.

envs/metta_maps.py draws their maps, envs/metta_tokens.py writes their observations.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import torch

from envs.metta_maps import MapMaker, SpareMaps
from envs.metta_rules import (
    ARMOR,
    BACK,
    BLOCK,
    DRAW_LENGTH,
    DRAW_ORDER,
    EMPTY,
    FIRST_CONVERTER,
    FORWARD,
    GET,
    HEADER,
    ITEMS,
    LASER,
    NEAREST,
    NOOP,
    PAINT,
    PUT,
    ROTATE,
    STATS,
    SWAP,
    TOKENS,
    Rules,
)
from envs.metta_state import find_problem
from envs.metta_tables import RuleTables
from envs.metta_tokens import TokenTable
from envs.state import load_state
from envs.streams import integer_hash, lane_key


class Attack(NamedTuple):
    """What came of the turns of some agents, (B,) each."""

    agent: torch.Tensor
    victim: torch.Tensor
    """or the agent itself, where nobody was hit"""
    frozen: torch.Tensor
    shot: torch.Tensor
    hit: torch.Tensor
    blocked: torch.Tensor
    """by armor"""
    robbed: torch.Tensor
    loot: torch.Tensor
    """(B, items)"""


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

    def __init__(self, num_games: int, device: torch.device | str = "cpu", seed: int = 0, **rules: Any) -> None:
        self.rules = Rules(**rules)
        if num_games < 1:
            raise ValueError(f"num_games {num_games}: must be at least 1")
        self.num_games = num_games
        self.num_agents = num_games * self.rules.num_agents
        self.device = torch.device(device)
        self.fixed_shapes = self.device.type != "cpu"
        self.first_agent = self.rules.first_agent
        self.num_codes = self.rules.num_codes
        self.num_rows = num_games * self.num_codes
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
        self.row_code = torch.arange(self.num_codes, device=self.device).repeat(self.num_games)

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
        self.grid = self._zeros(games, self.maps.num_cells, dtype=torch.uint8)  # codes
        self.cell = self._zeros(agents)
        self.heading = self._zeros(agents)
        self.color = self._zeros(agents)
        self.inventory = self._zeros(self.num_rows, len(ITEMS))
        self.timer = self._zeros(self.num_rows)
        self.value = self._zeros(agents)  # hundredths that what an agent holds is worth
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
        self._start_converting(slice(None), inventory, torch.ones_like(self.dirty))
        self._write_things(slice(None))
        self.first_things = [state[0].clone() for state in self._things()]

    def _things(self) -> list[torch.Tensor]:
        """What is kept of things, lane by lane."""
        states = [self.inventory, self.timer, self.tokens.table[:-TOKENS], self.tokens.count]
        return [state.view(self.num_games, -1) for state in states]

    def state_dict(self) -> dict[str, torch.Tensor]:
        """All that the games are, as the tensors themselves, not copies. What follows from these is made when they are
        loaded: tokens and spare maps too, so that games may go on on another kind of device."""
        names = ["key", "episode", "clock", "limit", "grid", "cell", "heading", "color", "inventory", "timer", "header"]
        names += ["stats", "finished"]
        return {name: getattr(self, name) for name in names}

    def load_state_dict(self, saved: dict[str, torch.Tensor]) -> None:
        """Raises ValueError, before anything is changed, for values that no game has."""
        load_state(self.state_dict(), saved, partial(find_problem, self.rules))
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
        self._start(slice(None), torch.ones_like(self.lanes, dtype=torch.bool))
        if self.fixed_shapes:  # the first episode may end before its turn to be made comes
            self._make_spares(self.lanes)
        self._observe(slice(None), self.obs)
        return self.obs

    def step(self, action: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, dict]:
        self.clock.add_(1)
        self.dirty.zero_()
        self._tick()
        # Agents act in the order of their priority, those that attack first.
        step_key = integer_hash(self.episode_key + DRAW_ORDER + self.clock)
        priority = integer_hash(step_key[:, None] + self.agent_number).view(-1)
        success = torch.zeros_like(action, dtype=torch.bool)
        turn_over = self._attack(action, priority, success)
        acts = self._thaw(~turn_over)
        self._paint_and_rotate(action, acts, success)
        self._move_and_use(action, acts, priority, success)
        self._stat("success").add_(success)
        self._stat("failed").add_(~success)

        hundredths = self._reward(action)
        self._write_things(self._select_rows(self.dirty)[0])
        self.tokens.write_agents(self.heading, self.color)
        num_tokens = self._observe(slice(None), self.final_obs)
        self._stat("tokens_written").add_(num_tokens.clamp(max=TOKENS))
        self._stat("tokens_dropped").add_((num_tokens - TOKENS).clamp(min=0))

        ends = self.clock >= self.limit
        truncated = ends[self.agent_lane]
        info = self._final_info(truncated)
        self._start_next(ends, truncated)
        return self.obs, hundredths / 100, torch.zeros_like(truncated), truncated, info

    def _thaw(self, waits_or_acts: torch.Tensor) -> torch.Tensor:
        """A frozen agent (N,) loses its turn; returns (N,) who of the others may act."""
        frozen = waits_or_acts & (self.timer[self.agent_row] > 0)
        acts = waits_or_acts & ~frozen
        self.timer[self.agent_row] -= frozen.long()
        self._mark_dirty(self.agent_row, frozen)
        self._stat("frozen_ticks").add_(frozen)
        return acts

    def _paint_and_rotate(self, action: torch.Tensor, acts: torch.Tensor, success: torch.Tensor) -> None:
        """All actions (N,) that only concern the agent itself."""
        paints = acts & (action >= PAINT) & (action < GET)
        new_color = self.tables.painted[(action - PAINT).clamp(0, 3) * 256 + self.color]
        self.color.copy_(torch.where(paints, new_color, self.color))
        rotates = acts & (action >= ROTATE) & (action < SWAP)
        self.heading.copy_(torch.where(rotates, action - ROTATE, self.heading))
        success |= paints | rotates | (acts & (action == NOOP))

    def _reward(self, action: torch.Tensor) -> torch.Tensor:
        """Hundredths of reward of all agents (N,), and the header of their next observation."""
        value = self._inventory_value()
        hundredths = value - self.value
        self.value.copy_(value)
        self._stat("hundredths").add_(hundredths)
        progress = torch.div(self.clock * 255, self.rules.max_steps, rounding_mode="floor")
        self.header[:, 0] = progress[self.agent_lane]
        self.header[:, 1:3] = self.tables.header[action]
        self.header[:, 3] = hundredths.clamp(0, 255)
        return hundredths

    def _inventory_value(self) -> torch.Tensor:
        """Hundredths that what each agent holds is worth."""
        return (torch.minimum(self.inventory[self.agent_row], self.tables.rewarded) * self.tables.reward).sum(1)

    def _stat(self, name: str) -> torch.Tensor:
        return self.stats[:, STATS.index(name)]

    def _count(self, *parts: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> None:
        """Add numbers (B, S) to S columns of the statistics of B agents; a part is agents, columns, numbers."""
        index = [(agents[:, None] * len(STATS) + columns).view(-1) for agents, columns, _ in parts]
        numbers = [number.view(-1) for _, _, number in parts]
        self.stats.view(-1).scatter_add_(0, torch.cat(index), torch.cat(numbers).int())

    def _mark_dirty(self, rows: torch.Tensor, mask: torch.Tensor) -> None:
        """The tokens of those rows that count are out of date; with fixed shapes all are written anyway."""
        if not self.fixed_shapes:
            self.dirty[rows] |= mask

    def _select_rows(self, mask: torch.Tensor) -> tuple[slice | torch.Tensor, torch.Tensor]:
        """Rows (or lanes) to work on and which of them count: on CPU only those that need it, on CUDA all."""
        if self.fixed_shapes:
            return slice(None), mask
        rows = mask.nonzero().squeeze(1)
        return rows, mask[rows]

    def _write_things(self, rows: slice | torch.Tensor) -> None:
        self.tokens.write_things(rows, self.row_code[rows], self.inventory[rows], self.timer[rows])

    def _observe(self, agents: slice | torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Write what `agents` see to `out` (B, 200, 3) uint8; returns (B,) how many tokens there were."""
        cell = self.cell[agents]
        row_base = self.row_base[agents]
        return self.tokens.observe(self.grid, cell, row_base, self.header[agents], self.fixed_shapes, out)

    # ----------------------------------------------------------------------------------------------------- converters

    def _tick(self) -> None:
        """Converters work or rest for a tick: products come out after the work, the next begin after the rest."""
        converters = slice(FIRST_CONVERTER, self.first_agent)
        timer = self.timer.view(self.num_games, -1)[:, converters]
        runs = timer > 0
        timer -= runs.long()
        changes = torch.zeros_like(self.dirty).view(self.num_games, -1)
        changes[:, converters] = runs & ((timer == self.tables.cooldown[converters]) | (timer == 0))
        rows, mask = self._select_rows(changes.view(-1))
        code = self.row_code[rows]
        work_ends = mask & (self.timer[rows] == self.tables.cooldown[code])
        inventory = self.inventory[rows] + self.tables.outputs[code] * work_ends[:, None]
        self._start_converting(rows, inventory, mask)
        self._mark_dirty(rows, mask)

    def _start_converting(self, rows: slice | torch.Tensor, inventory: torch.Tensor, mask: torch.Tensor) -> None:
        """Let those rows that count begin to work if they can; `inventory` is what is in them from now on."""
        code = self.row_code[rows]
        inputs = self.tables.inputs[code]
        stock = (inventory * (self.tables.outputs[code] > 0)).sum(1)
        enough = (inventory >= inputs).all(1)
        starts = mask & (stock < self.tables.max_output[code]) & enough & (self.timer[rows] == 0)
        self.inventory[rows] = inventory - inputs * starts[:, None]
        self.timer[rows] = torch.where(starts, self.tables.cooldown[code] + 1, self.timer[rows])

    # -------------------------------------------------------------------------------------------------------- attacks

    def _attack(self, action: torch.Tensor, priority: torch.Tensor, success: torch.Tensor) -> torch.Tensor:
        """Attacks, one agent of an arena after another where anybody has a laser to fire.

        Sets `success` (N,) of those who hit, and returns (N,) whose turn is over with this.
        """
        attacks = action <= NEAREST
        has_laser = self.inventory[self.agent_row, LASER] > 0
        is_awake = self.timer[self.agent_row] == 0
        armed = attacks & (action > 0) & has_laser & is_awake
        lanes, mask = self._select_rows(armed.view(self.num_games, -1).any(1))
        has_turn = torch.zeros_like(attacks).view(self.num_games, -1)
        has_turn[lanes] = attacks.view(self.num_games, -1)[lanes] & mask[:, None]
        has_turn = has_turn.view(-1)
        # Those without a turn here sort behind; a CPU stops when only they are left.
        sort_key = priority + (~has_turn).long() * 2**32
        order = sort_key.view(self.num_games, -1)[lanes].argsort(1)
        num_turns = self.rules.num_agents
        if not self.fixed_shapes:
            num_turns = int(has_turn.view(self.num_games, -1).sum(1).max())
        order = order[:, :num_turns] + self.lanes[lanes, None] * self.rules.num_agents
        results = [self._attack_of(agent, action[agent], has_turn[agent]) for agent in order.unbind(1)]
        if results:
            self._count_attacks(results, success)
        # An attack without a laser in an arena where nobody fires fails; a frozen agent waits as any other.
        return has_turn | (attacks & (self.timer[self.agent_row] == 0))

    def _attack_of(self, agent: torch.Tensor, action: torch.Tensor, has_turn: torch.Tensor) -> Attack:
        """The attack of at most one agent of each arena, (B,).

        A laser is spent whether it hits or not. Armor stops it; without, the target freezes and loses all it has.
        """
        row = self.agent_row[agent]
        inventory = self.inventory[row]
        timer = self.timer[row]
        frozen = has_turn & (timer > 0)
        shot = has_turn & ~frozen & (action > 0) & (inventory[:, LASER] > 0)
        inventory = inventory - shot[:, None] * self.tables.one_laser

        code = self._target_code(agent, action)
        hit = shot & (code >= self.first_agent)
        target = self.row_base[agent] + torch.where(hit, code, EMPTY)  # row 0 is nothing, and nothing changes
        target_inventory = self.inventory[target]
        target_timer = self.timer[target]
        blocked = hit & (target_inventory[:, ARMOR] > 0)
        freezes = hit & ~blocked
        robbed = freezes & (target_timer == 0)
        loot = torch.minimum(target_inventory, self.tables.carry - inventory) * robbed[:, None]

        both = torch.stack([row, target])
        target_inventory = target_inventory - loot - blocked[:, None] * self.tables.one_armor
        self.inventory[both] = torch.stack([inventory + loot, target_inventory])
        target_timer = torch.where(freezes, self.rules.freeze, target_timer)
        self.timer[both] = torch.stack([timer - frozen.long(), target_timer])
        self._mark_dirty(row, shot | frozen)
        self._mark_dirty(target, hit)
        victim = torch.where(hit, self.agent_base[agent] + code - self.first_agent, agent)
        return Attack(agent, victim, frozen, shot, hit, blocked, robbed, loot)

    def _target_code(self, agent: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
        """Codes (B,) in the cells that these attacks aim at."""
        cells = self.cell[agent, None] + self.tables.reach[self.heading[agent]]
        codes = self.grid.view(-1)[cells].long()  # (B, 9)
        is_agent = codes >= self.first_agent
        nearest_rank = torch.where(is_agent, self.tables.nearest_rank, 8).amin(1)
        aim = torch.where(action == NEAREST, self.tables.nearest_first[nearest_rank], (action - 1).clamp(0, 8))
        return codes.gather(1, aim[:, None]).squeeze(1)

    def _count_attacks(self, results: list[Attack], success: torch.Tensor) -> None:
        agent, victim, frozen, shot, hit, blocked, robbed, loot = map(torch.cat, zip(*results))
        success[agent] = hit
        attacker_numbers = torch.cat([torch.stack([frozen, shot, robbed, blocked], 1), loot], 1)
        victim_numbers = torch.cat([torch.stack([blocked, robbed], 1), loot], 1)
        self._count(
            (agent, self.tables.attacker_stats, attacker_numbers), (victim, self.tables.victim_stats, victim_numbers)
        )

    # ------------------------------------------------------------------------------------------------- moving and using

    def _move_and_use(
        self, action: torch.Tensor, acts: torch.Tensor, priority: torch.Tensor, success: torch.Tensor
    ) -> None:
        """All actions (N,) that concern a neighbouring cell, in the order of priority where they meet."""
        moves = acts & ((action == FORWARD) | (action == BACK) | (action == SWAP))
        uses = acts & ((action == GET) | (action == PUT))
        target_cell = self.cell + self.tables.ahead[self.heading] * torch.where(action == BACK, -1, 1)
        move_results = []
        use_results = []
        for turn in self._rounds(moves | uses, priority, target_cell):
            agents, mask = self._select_agents(moves, turn)
            move_results.append(self._move(agents, mask, action[agents], target_cell[agents]))
            agents, mask = self._select_agents(uses, turn)
            use_results.append(self._use(agents, mask, action[agents], target_cell[agents]))
        if not move_results:
            return
        agents, can_move = map(torch.cat, zip(*move_results))
        success[agents] |= can_move
        agents, put, got = map(torch.cat, zip(*use_results))
        success[agents] |= (put + got > 0).any(1)
        self._count((agents, self.tables.use_stats, torch.cat([got, put, put], 1)))

    def _rounds(self, mask: torch.Tensor, priority: torch.Tensor, target_cell: torch.Tensor) -> Iterator[torch.Tensor]:
        """Who of `mask` acts when, in parts that follow each other.

        On CUDA the k-th agents of all arenas. On CPU a mask of all those for whom nobody with an earlier turn, still to
        act, stands on or reaches for the same cell: what they do cannot depend on each other.
        """
        priority = priority.view(self.num_games, -1)
        if self.fixed_shapes:
            for agent in priority.argsort(1).unbind(1):
                yield self.lanes * self.rules.num_agents + agent
            return
        pending = mask.view(self.num_games, -1)
        cells = torch.stack([self.cell, target_cell], 1).int().view(self.num_games, -1, 2)
        waits_for = torch.zeros_like(pending[:, :, None] & pending[:, None])  # (games, agent, other agent)
        for end in range(2):
            for other_end in range(2):
                waits_for |= cells[:, :, None, end] == cells[:, None, :, other_end]
        waits_for &= priority[:, :, None] > priority[:, None]
        while pending.any():
            turn = pending & ~(waits_for & pending[:, None]).any(2)
            yield turn.view(-1)
            pending = pending & ~turn

    def _select_agents(self, mask: torch.Tensor, turn: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Agents to work on and which of them count: on CPU only those that need it, on CUDA one of each arena."""
        if self.fixed_shapes:
            return turn, mask[turn]
        agents = (mask & turn).nonzero().squeeze(1)
        return agents, mask[agents]

    def _move(
        self, agents: torch.Tensor, mask: torch.Tensor, action: torch.Tensor, target_cell: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """To an empty cell, or swap with a block or a frozen agent; no two of `agents` (B,) touch the same cell.

        Returns `agents` and which of them went.
        """
        cell = self.cell[agents]
        code = self.agent_code[agents]
        target_code = self.grid.view(-1)[target_cell].long()
        is_frozen = self.timer[self.row_base[agents] + target_code] > 0
        is_agent = target_code >= self.first_agent
        is_swappable = (target_code == BLOCK) | (is_agent & is_frozen)
        can_move = mask & torch.where(action == SWAP, is_swappable, target_code == EMPTY)
        codes = torch.stack([code, target_code])
        swapped_codes = torch.stack([target_code, code])
        self.grid.view(-1)[torch.stack([cell, target_cell])] = torch.where(can_move, swapped_codes, codes).byte()

        swaps_agent = can_move & is_agent
        other = torch.where(swaps_agent, self.agent_base[agents] + target_code - self.first_agent, agents)
        new_cell = torch.where(can_move, target_cell, cell)
        other_cell = torch.where(swaps_agent, cell, new_cell)  # without another agent both are the agent itself
        self.cell[torch.stack([agents, other])] = torch.stack([new_cell, other_cell])
        return agents, can_move

    def _use(
        self, agents: torch.Tensor, mask: torch.Tensor, action: torch.Tensor, target_cell: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Put one recipe's inputs into the converter ahead or get its outputs; no two of `agents` face the same one.

        Returns `agents` (B,) and what each of them put and got (B, items).
        """
        puts = mask & (action == PUT)
        gets = mask & (action != PUT)
        code = self.grid.view(-1)[target_cell].long()
        rows = torch.stack([self.agent_row[agents], self.row_base[agents] + code]).view(-1)
        inventory, stock = self.inventory[rows].chunk(2)
        put = torch.minimum(torch.minimum(self.tables.inputs[code], inventory), 255 - stock) * puts[:, None]
        is_output = self.tables.outputs[code] > 0
        got = torch.minimum(stock, self.tables.carry - inventory) * (gets[:, None] & is_output)
        new_inventory = torch.stack([inventory - put + got, stock + put - got]).flatten(0, 1)
        mask = mask.repeat(2)
        self._start_converting(rows, new_inventory, mask)
        self._mark_dirty(rows, mask)
        return agents, put, got

    # --------------------------------------------------------------------------------------------- ends of episodes

    def _final_info(self, truncated: torch.Tensor) -> dict[str, torch.Tensor]:
        """What a step says of the episodes before new ones start; finished ones are added up."""
        self.final_stats.copy_(self.stats)
        hearts = self._stat("heart.get").clone()
        length = self.clock[self.agent_lane]
        episode_return = self._stat("hundredths") / 100
        sums = torch.stack([truncated, hearts * truncated, length * truncated, episode_return * truncated]).sum(1)
        self.finished.add_(sums)
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
            self._make_spares(self.spares.next_lanes(self.lanes))
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
            state = state.view(self.num_games, -1)
            state[lanes] = torch.where(mask[:, None], value, state[lanes])

        write(self.grid, grid)
        write(self.cell, cell + self.lanes[lanes, None] * self.maps.num_cells)
        write(self.episode_key, key[:, None])
        write(self.limit, limit[:, None])
        for state, first_things in zip(self._things(), self.first_things):
            write(state, first_things)
        for state in (self.clock, self.heading, self.color, self.value, self.stats, self.header):
            write(state, 0)

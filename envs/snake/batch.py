"""Many games of Snake at once in torch, on any device, by the rules of envs/snake/rules.py."""

from typing import Any

import torch

from envs.snake.rules import BODY, EMPTY, FOOD, HEAD, MOVES, Rules
from envs.streams import integer_hash, lane_key


class SnakeBatch:
    """`num_envs` games at once, every tensor on `device`; agrees with `SnakeEnv` step for step.

    Scripts use five names of a batched game:
    - `reset() -> obs`: a new game in every lane. `obs` (N, rows, columns) uint8 codes.
    - `step(action) -> (obs, reward, terminated, truncated, info)`: `action` (N,) int64, `reward` (N,) float32, the ends
      (N,) bool. A finished game restarts within the same step; `info["final_obs"]` is each game's observation before
      that, and `info` holds its `score`, `length`, `return` and `won` as of then.
    - `state_dict()` and `load_state_dict(saved)`: all there is to the games.
    - `finished` (4,): games finished since the caller last zeroed it, and the sums of their score, length and return.

    Both observations are the environment's own buffers, overwritten by the next step. No step waits for the device; on
    CUDA all shapes are fixed, so that a graph can capture it.
    """

    def __init__(self, num_envs: int, device: torch.device | str = "cpu", seed: int = 0, **rules: Any) -> None:
        self.rules = Rules(**rules)
        self.num_envs = num_envs
        self.device = torch.device(device)
        self.fixed_shapes = self.device.type != "cpu"  # see `_select`
        self.lanes = torch.arange(num_envs, device=device)
        self.key = lane_key(seed, self.lanes)
        self._make_indices()
        self._make_starts()
        self._make_state()

    def _make_indices(self) -> None:
        cells = self.rules.cells
        self.base = self.lanes * cells  # first cell of a lane in the flat (N * cells) tensors
        self.free_base = self.lanes * (cells + 1)
        neighbours = self._neighbours().flatten()
        self.neighbour = neighbours.to(self.device)
        # Numbers that are written by index: a plain one would be copied to the device first, and a graph cannot.
        self.no_slot = torch.tensor(cells, dtype=torch.int16, device=self.device)

    def _make_starts(self) -> None:
        """One new game per possible start, to be copied into a lane."""
        rules = self.rules
        cells = rules.cells
        self.start_head = torch.tensor(rules.start_heads, device=self.device)
        head = self.start_head[:, None]
        distance_to_head = torch.arange(rules.start_length, device=self.device)
        body = head - distance_to_head
        codes = self._zeros(len(body), cells, dtype=torch.uint8)
        codes.scatter_(1, body, BODY + 1)
        codes.scatter_(1, head, HEAD + 1)

        is_free = codes == EMPTY
        is_taken = ~is_free
        # A cell that is not free has slot `cells`: the spare column of `free`, where writes do no harm. That is what
        # makes a move need no masks there.
        free_slot = is_free.cumsum(1) - 1
        slot = torch.where(is_free, free_slot, cells)
        free_first = torch.argsort(is_taken.byte(), dim=1, stable=True)
        spare = torch.zeros_like(free_first[:, :1])
        free = torch.cat([free_first, spare], 1)
        self.start_codes = codes
        self.start_slot = slot.short()
        self.start_free = free.short()

    def _neighbours(self) -> torch.Tensor:
        """Cell that a move leads to, (cell, direction). Into a wall leads back to the cell itself, where the head is in
        the way."""
        rows, columns = self.rules.board
        cell = torch.arange(self.rules.cells)
        row = cell // columns
        column = cell % columns
        neighbours = []
        for row_step, column_step in MOVES:
            next_row = row + row_step
            next_column = column + column_step
            row_fits = (next_row >= 0) & (next_row < rows)
            column_fits = (next_column >= 0) & (next_column < columns)
            next_cell = next_row * columns + next_column
            neighbours.append(torch.where(row_fits & column_fits, next_cell, cell))
        return torch.stack(neighbours, 1)

    def _zeros(self, *shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.zeros(*shape, dtype=dtype, device=self.device)

    def _make_state(self) -> None:
        """What a step changes."""
        n = self.num_envs
        cells = self.rules.cells
        self.codes = self._zeros(n, cells, dtype=torch.uint8)
        self.final_codes = torch.zeros_like(self.codes)
        self.free = self._zeros(n, cells + 1, dtype=torch.int16)  # cells, the first `num_free` count
        self.slot = self._zeros(n, cells, dtype=torch.int16)  # where a cell stands in `free`
        self.num_free = self._zeros(n)
        self.head = self._zeros(n)
        self.tail = self._zeros(n)
        self.heading = self._zeros(n)
        self.draws = self._zeros(n)
        self.clock = self._zeros(n)
        self.length = self._zeros(n)
        self.score = self._zeros(n)
        self.episode_return = self._zeros(n, dtype=torch.float32)
        # Games finished since the caller last zeroed this, and the sums of their score, length and return.
        self.finished = self._zeros(4, dtype=torch.float32)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """All that the games are, as the tensors themselves, not copies."""
        return {
            "codes": self.codes.view(-1, *self.rules.board),  # so that another board does not fit
            "free": self.free,
            "slot": self.slot,
            "num_free": self.num_free,
            "head": self.head,
            "tail": self.tail,
            "heading": self.heading,
            "draws": self.draws,
            "clock": self.clock,
            "length": self.length,
            "score": self.score,
            "episode_return": self.episode_return,
            "finished": self.finished,
        }

    def load_state_dict(self, saved: dict[str, torch.Tensor]) -> None:
        """Raises KeyError or RuntimeError if `saved` is of other games."""
        for name, tensor in self.state_dict().items():
            tensor.copy_(saved[name])

    def reset(self) -> torch.Tensor:
        """Start a new game in every lane."""
        every_lane = torch.ones(self.num_envs, dtype=torch.bool, device=self.device)
        self._start(self.lanes, every_lane)
        return self.codes.view(-1, *self.rules.board)

    def step(self, action: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, dict]:
        rules = self.rules
        heading = action
        if rules.reversal_guard:
            is_reversal = action ^ 2 == self.heading
            heading = torch.where(is_reversal, self.heading, action)
        cell = self.neighbour[self.head * 4 + heading]
        code = self.codes.view(-1)[self.base + cell]
        eats = code == FOOD
        dead = code > FOOD
        if not rules.solid_tail:
            dead &= (cell != self.tail) | (cell == self.head)
        # A deadly move is not carried out.
        cell = torch.where(dead, self.head, cell)
        heading = torch.where(dead, self.heading, heading)
        self._move(cell, heading, tail_leaves=~(eats | dead))

        self.score += eats
        self.length += 1
        self.clock += 1
        if rules.hunger:
            self.clock *= ~eats
        won = eats & (self.num_free == 0)
        terminated = dead | won
        truncated = (self.clock >= rules.limit) & ~terminated
        food_reward = eats * (rules.food_reward - rules.step_reward)
        death_reward = dead * (rules.death_reward - rules.step_reward)
        reward = food_reward + death_reward
        reward += rules.step_reward
        self.episode_return += reward
        self._place_food(*self._select(eats & ~won))

        done = terminated | truncated
        info = self._final_info(done, won)
        self._start(*self._select(done))
        return self.codes.view(-1, *rules.board), reward, terminated, truncated, info

    def _final_info(self, done: torch.Tensor, won: torch.Tensor) -> dict[str, torch.Tensor]:
        """What a step says of the games before new ones start; finished ones are added up."""
        self.final_codes.copy_(self.codes)
        finished = [done, self.score * done, self.length * done, self.episode_return * done]
        self.finished += torch.stack(finished).sum(1)
        return {
            "final_obs": self.final_codes.view(-1, *self.rules.board),
            "score": self.score.clone(),
            "length": self.length.clone(),
            "return": self.episode_return.clone(),
            "won": won,
        }

    def _move(self, cell: torch.Tensor, heading: torch.Tensor, tail_leaves: torch.Tensor) -> None:
        """The body grows behind the head, the tail leaves, the head arrives: in this order, as they may be one cell."""
        codes = self.codes.view(-1)
        free = self.free.view(-1)
        slot = self.slot.view(-1)
        head_index = self.base + self.head
        tail_index = self.base + self.tail
        cell_index = self.base + cell
        codes[head_index] = (heading + BODY).byte()
        tail_code = codes[tail_index]
        codes[tail_index] = tail_code * ~tail_leaves
        codes[cell_index] = (heading + HEAD).byte()
        # The tail's cell takes the place of the head's in the list of free cells.
        freed_slot = slot[cell_index]
        free[self.free_base + freed_slot] = self.tail.short()
        slot[tail_index] = freed_slot
        slot[cell_index] = self.no_slot
        next_tail = self.neighbour[self.tail * 4 + tail_code.long() - BODY]
        tail = torch.where(tail_leaves, next_tail, self.tail)
        self.tail.copy_(tail)
        self.head.copy_(cell)
        self.heading.copy_(heading)

    def _select(self, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Lanes to work on and which of them count: on CPU only those that need it, on CUDA all (fixed shapes)."""
        if self.fixed_shapes:
            return self.lanes, mask
        lanes = mask.nonzero().squeeze(1)
        return lanes, mask[lanes]

    def _draw(self, lanes: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        self.draws[lanes] += mask
        number = self.key[lanes] + self.draws[lanes]
        return integer_hash(number)

    def _place_food(self, lanes: torch.Tensor, mask: torch.Tensor) -> None:
        """Food takes a free cell out of the list; the last of the list fills the gap."""
        codes = self.codes.view(-1)
        free = self.free.view(-1)
        slot = self.slot.view(-1)
        base = self.base[lanes]
        free_base = self.free_base[lanes]
        num_free = self.num_free[lanes]
        head = self.head[lanes]
        draw = self._draw(lanes, mask)
        pick = draw % num_free.clamp(min=1)
        last_slot = (num_free - 1).clamp(min=0)
        # Where the mask is off, the head stands in for both cells: it is not free, and what is written there is so too.
        cell = torch.where(mask, free[free_base + pick], head)
        last_cell = torch.where(mask, free[free_base + last_slot], head)
        pick = torch.where(mask, pick, self.rules.cells)
        free[free_base + pick] = last_cell.short()
        slot[base + last_cell] = pick.short()
        slot[base + cell] = self.no_slot
        codes[base + cell] = torch.where(mask, FOOD, codes[base + cell])
        self.num_free[lanes] -= mask.long()

    def _start(self, lanes: torch.Tensor, mask: torch.Tensor) -> None:
        """Copy a new game into the lanes that count, and its first food."""
        draw = self._draw(lanes, mask)
        start = draw % len(self.start_head)
        head = self.start_head[start]
        tail = head - self.rules.start_length + 1
        num_free = self.rules.max_score

        def write(state: torch.Tensor, value: torch.Tensor | float, mask: torch.Tensor = mask) -> None:
            state[lanes] = torch.where(mask, value, state[lanes])

        row_mask = mask[:, None]
        write(self.codes, self.start_codes[start], row_mask)
        write(self.free, self.start_free[start], row_mask)
        write(self.slot, self.start_slot[start], row_mask)
        write(self.num_free, num_free)
        write(self.head, head)
        write(self.tail, tail)
        write(self.heading, 1)
        write(self.clock, 0)
        write(self.length, 0)
        write(self.score, 0)
        write(self.episode_return, 0.0)
        self._place_food(lanes, mask)

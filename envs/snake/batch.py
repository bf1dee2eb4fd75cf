"""Batched Snake in PyTorch, on any device. The rules are those of envs/snake/rules.py."""

from typing import Any

import torch
from torch import Tensor

from envs.snake.rules import BODY, EMPTY, FOOD, HEAD, MOVES, Rules
from envs.streams import integer_hash, lane_key


class SnakeBatch:
    """`num_envs` = N games on `device`, one per lane. Each matches `SnakeEnv` step for step.

    - `reset() -> obs`: starts a new game in every lane. `obs` is (N, rows, columns) uint8 codes.
    - `step(action) -> (obs, reward, terminated, truncated, info)`: `action` is (N,) int64, `reward` (N,) float32,
      `terminated` and `truncated` (N,) bool. A finished game is reset within the same step. `info` has the state before
      that reset: `final_obs` (N, rows, columns) and `score`, `length`, `return`, `won` (N,).
    - `state_dict()` and `load_state_dict(saved)`: the complete state of all games.
    - `finished` (4,) float32: number of finished games and the sums of their score, length and return, since the
      caller last zeroed it.

    `obs` and `final_obs` are buffers that the next step overwrites. On CUDA a step never synchronizes and all shapes
    are fixed, so that a CUDA graph can capture it.
    """

    def __init__(self, num_envs: int, device: torch.device | str = "cpu", seed: int = 0, **rules: Any) -> None:
        self.rules = Rules(**rules)
        self.num_envs = num_envs
        self.device = torch.device(device)
        self.fixed_shapes = self.device.type != "cpu"
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
        # A tensor, because a Python number written by index is copied to the device, which a CUDA graph cannot do.
        self.no_slot = torch.tensor(cells, dtype=torch.int16, device=self.device)

    def _make_starts(self) -> None:
        """One new game for each possible start. `_start` copies them into lanes."""
        rules = self.rules
        cells = rules.cells
        start_heads = rules.start_heads
        self.start_head = torch.tensor(start_heads, device=self.device)
        head = self.start_head[:, None]
        distance_to_head = torch.arange(rules.start_length, device=self.device)
        body = head - distance_to_head
        num_starts = len(start_heads)
        codes = self._zeros(num_starts, cells, dtype=torch.uint8)
        codes.scatter_(1, body, BODY + 1)
        codes.scatter_(1, head, HEAD + 1)

        is_free = codes == EMPTY
        is_taken = ~is_free
        # Cells that are not free have slot `cells`, a spare column of `free`. Writes to it have no effect, so a move
        # needs no mask.
        free_slot = is_free.cumsum(1) - 1
        slot = torch.where(is_free, free_slot, cells)
        free_first = torch.argsort(is_taken.byte(), dim=1, stable=True)
        spare = torch.zeros_like(free_first[:, :1])
        free = torch.cat([free_first, spare], 1)
        self.start_codes = codes
        self.start_slot = slot.short()
        self.start_free = free.short()

    def _neighbours(self) -> Tensor:
        """(cells, 4): the cell that a move leads to. A move into a wall stays in place and so hits the head."""
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
            neighbour = torch.where(row_fits & column_fits, next_cell, cell)
            neighbours.append(neighbour)
        return torch.stack(neighbours, 1)

    def _zeros(self, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.zeros(*shape, dtype=dtype, device=self.device)

    def _make_state(self) -> None:
        n = self.num_envs
        cells = self.rules.cells
        self.codes = self._zeros(n, cells, dtype=torch.uint8)
        self.final_codes = torch.zeros_like(self.codes)
        self.free = self._zeros(n, cells + 1, dtype=torch.int16)  # the first `num_free` entries are the free cells
        self.slot = self._zeros(n, cells, dtype=torch.int16)  # index of a cell in `free`
        self.num_free = self._zeros(n)
        self.head = self._zeros(n)
        self.tail = self._zeros(n)
        self.heading = self._zeros(n)
        self.draws = self._zeros(n)
        self.clock = self._zeros(n)
        self.length = self._zeros(n)
        self.score = self._zeros(n)
        self.episode_return = self._zeros(n, dtype=torch.float32)
        self.finished = self._zeros(4, dtype=torch.float32)

    def state_dict(self) -> dict[str, Tensor]:
        """The complete state of all games. The tensors are not copies."""
        return {
            "codes": self._board(self.codes),  # so that a state with another board does not fit
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

    def load_state_dict(self, saved: dict[str, Tensor]) -> None:
        """Raises KeyError or RuntimeError if `saved` comes from other games."""
        for name, tensor in self.state_dict().items():
            tensor.copy_(saved[name])

    def _board(self, codes: Tensor) -> Tensor:
        """A view of (N, cells) as (N, rows, columns)."""
        return codes.view(-1, *self.rules.board)

    def reset(self) -> Tensor:
        """Starts a new game in every lane."""
        every_lane = torch.ones_like(self.lanes, dtype=torch.bool)
        self._start(self.lanes, every_lane)
        return self._board(self.codes)

    def step(self, action: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, dict]:
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
        # A snake that dies stays where it is.
        cell = torch.where(dead, self.head, cell)
        heading = torch.where(dead, self.heading, heading)
        tail_leaves = ~(eats | dead)
        self._move(cell, heading, tail_leaves)

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
        lanes, mask = self._select(eats & ~won)
        self._place_food(lanes, mask)

        done = terminated | truncated
        info = self._final_info(done, won)
        lanes, mask = self._select(done)
        self._start(lanes, mask)
        obs = self._board(self.codes)
        return obs, reward, terminated, truncated, info

    def _final_info(self, done: Tensor, won: Tensor) -> dict[str, Tensor]:
        """Info of a step, before finished games are reset. Adds finished games to `finished`."""
        self.final_codes.copy_(self.codes)
        finished = [
            done,
            self.score * done,
            self.length * done,
            self.episode_return * done,
        ]
        self.finished += torch.stack(finished).sum(1)
        return {
            "final_obs": self._board(self.final_codes),
            "score": self.score.clone(),
            "length": self.length.clone(),
            "return": self.episode_return.clone(),
            "won": won,
        }

    def _move(self, cell: Tensor, heading: Tensor, tail_leaves: Tensor) -> None:
        """Moves heads to `cell` (N,). Old head, tail and new head may be equal, so they are written in this order."""
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
        # In the list of free cells the old tail replaces the new head.
        free_slot = slot[cell_index]
        free[self.free_base + free_slot] = self.tail.short()
        slot[tail_index] = free_slot
        slot[cell_index] = self.no_slot
        tail_direction = tail_code.long() - BODY
        next_tail = self.neighbour[self.tail * 4 + tail_direction]
        tail = torch.where(tail_leaves, next_tail, self.tail)
        self.tail.copy_(tail)
        self.head.copy_(cell)
        self.heading.copy_(heading)

    def _select(self, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Lanes to update and their mask: on CPU only the lanes in `mask`, with fixed shapes all lanes."""
        if self.fixed_shapes:
            return self.lanes, mask
        lanes = mask.nonzero().squeeze(1)
        return lanes, mask[lanes]

    def _draw(self, lanes: Tensor, mask: Tensor) -> Tensor:
        self.draws[lanes] += mask
        number = self.key[lanes] + self.draws[lanes]
        return integer_hash(number)

    def _place_food(self, lanes: Tensor, mask: Tensor) -> None:
        """Places food on a random free cell. The last free cell takes its slot in the list."""
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
        # In lanes outside the mask both cells are the head. It is not free, so these writes change nothing.
        food_cell = free[free_base + pick]
        cell = torch.where(mask, food_cell, head)
        last_cell = free[free_base + last_slot]
        last_cell = torch.where(mask, last_cell, head)
        pick = torch.where(mask, pick, self.rules.cells)
        free[free_base + pick] = last_cell.short()
        slot[base + last_cell] = pick.short()
        cell_index = base + cell
        slot[cell_index] = self.no_slot
        codes[cell_index] = torch.where(mask, FOOD, codes[cell_index])
        self.num_free[lanes] -= mask.long()

    def _start(self, lanes: Tensor, mask: Tensor) -> None:
        """Starts a new game with its first food in the lanes of `mask`."""
        draw = self._draw(lanes, mask)
        start = draw % len(self.start_head)
        head = self.start_head[start]
        tail = head - self.rules.start_length + 1
        num_free = self.rules.max_score

        def write(state: Tensor, value: Tensor | float, mask: Tensor = mask) -> None:
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

"""Snake twice: the rule book (one game in plain Python) and the same rules for many games at once in torch.

Both play the same game: same actions and same (seed, lane) give the same trajectory, food by food. Every draw is a
hash of (seed, lane, number of draws so far), so a lane's game depends neither on the other lanes nor on the device.

A cell is one `uint8` code, and the codes of a board are the whole state of a game:

    0 empty · 1 food · 2 3 4 5 body · 6 7 8 9 head

A body code names the direction of the next cell toward the head, a head code the heading: up, right, down, left.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

EMPTY, FOOD, BODY, HEAD = 0, 1, 2, 6
MOVES = ((-1, 0), (0, 1), (1, 0), (0, -1))  # up, right, down, left as (row, column); action ^ 2 is the reverse


@dataclass(frozen=True)
class Rules:
    """Everything in which one Snake differs from another.

    Raises ValueError for rules that no game can be played by.
    """

    board: tuple[int, int] = (10, 10)
    """rows and columns, 4 to 64 each"""
    start_length: int = 3
    """cells of the snake at the start, in one row, heading right"""
    start_margin: int | None = None
    """None starts in the centre; m draws row and column of the head from [m, side - 1 - m)"""
    reversal_guard: bool = True
    """a reversal means keep going (otherwise it runs the snake into itself)"""
    solid_tail: bool = False
    """the tail cell kills even on the step on which it would move away"""
    food_reward: float = 1.0
    death_reward: float = -1.0
    step_reward: float = 0.0
    """reward of a step that neither eats nor dies"""
    step_limit: int | None = None
    """steps until truncation (None: 2 * rows * columns)"""
    hunger: bool = True
    """eating restarts the count toward `step_limit`"""
    observation: str = "codes"
    """"codes" (the ten above), "blocks" (0 empty, 1 body, 2 head, 3 food) or "onehot" (snake, food, empty planes)"""

    def __post_init__(self) -> None:
        if len(self.board) != 2:
            raise ValueError("a board has rows and columns")
        rows, columns = self.board
        if not (4 <= rows <= 64 and 4 <= columns <= 64):
            raise ValueError(f"board {rows}x{columns}: each side must be 4 to 64")
        margin = self.start_margin
        if margin is not None and min(rows, columns) - 1 - margin <= margin:
            raise ValueError(f"board {rows}x{columns} is too small for start_margin {margin}")
        room = 1 + (columns // 2 if margin is None else margin)
        if not 1 <= self.start_length <= room:
            raise ValueError(f"start_length {self.start_length} on board {rows}x{columns}: must be 1 to {room}")
        if self.step_limit is not None and self.step_limit < 1:
            raise ValueError(f"step_limit {self.step_limit}: must be at least 1")
        if self.observation not in ("codes", "blocks", "onehot"):
            raise ValueError(f'observation "{self.observation}": must be codes, blocks or onehot')

    @property
    def cells(self) -> int:
        return self.board[0] * self.board[1]

    @property
    def limit(self) -> int:
        return self.step_limit or 2 * self.cells

    @property
    def start_heads(self) -> list[int]:
        """Cells at which the head may start."""
        rows, columns = self.board
        if self.start_margin is None:
            return [rows // 2 * columns + columns // 2]
        rows, columns = (range(self.start_margin, side - 1 - self.start_margin) for side in self.board)
        return [row * self.board[1] + column for row in rows for column in columns]

    @property
    def observation_space(self) -> gym.spaces.Box:
        shape, high = {"codes": ((), 9), "blocks": ((), 3), "onehot": ((3,), 1)}[self.observation]
        return gym.spaces.Box(0, high, (*self.board, *shape), np.uint8)

    def observe(self, codes: np.ndarray) -> np.ndarray:
        """(..., rows, columns) codes -> an observation of `observation_space` (a copy)."""
        if self.observation == "codes":
            return codes.copy()
        table = {
            "blocks": np.array([0, 3, 1, 1, 1, 1, 2, 2, 2, 2]),
            "onehot": np.eye(3)[[2, 1, 0, 0, 0, 0, 0, 0, 0, 0]],
        }[self.observation]
        return table.astype(np.uint8)[codes]


VARIANTS: dict[str, dict[str, Any]] = {
    "Snake-v0": {},
    # A hand-written DQN's game: one step costs or earns 0.01 whatever else happens, the tail is solid.
    "SnakeBlocks-v0": dict(
        start_margin=3, solid_tail=True, hunger=False, observation="blocks",
        food_reward=15.01, death_reward=-999.99, step_reward=0.01,
    ),
    # A Stable-Baselines3 game: starts with the head alone, no reversal guard, 500 steps at most.
    "SnakeOneHot-v0": dict(
        board=(20, 20), start_length=1, reversal_guard=False, solid_tail=True, step_limit=500, hunger=False,
        observation="onehot", food_reward=10.0, death_reward=-10.0, step_reward=-0.01,
    ),
}  # fmt: skip


def _hash(x):
    """32-bit integer hash (xor-shift and multiply, twice); Python ints or int64 tensors, the same numbers."""
    x = ((x ^ (x >> 16)) * 0x21F0AAAD) & 0xFFFFFFFF
    x = ((x ^ (x >> 15)) * 0x735A2D97) & 0xFFFFFFFF
    return x ^ (x >> 15)


def _lane_key(seed: int, lane):
    """Start of the random stream of one lane; its n-th draw is `_hash(key + n)`."""
    return _hash(_hash(seed & 0xFFFFFFFF) ^ _hash(lane + 0x9E3779B9))


class SnakeEnv(gym.Env):
    """The rule book: one game, written to be read.

    `rules` are the fields of `Rules`. Observation: `Rules.observation_space`. Actions: 0 up, 1 right, 2 down, 3 left.
    Others raise ValueError. `info` holds `score` (food eaten) and `won`. `lane` picks the random stream, as lane i of
    `SnakeBatch` has it.
    """

    metadata = {"render_modes": ["rgb_array", "ansi"], "render_fps": 12}

    def __init__(self, render_mode: str | None = None, lane: int = 0, **rules: Any) -> None:
        self.rules = Rules(**rules)
        self.render_mode, self.lane = render_mode, lane
        self.observation_space = self.rules.observation_space
        self.action_space = gym.spaces.Discrete(4)
        self.key = None

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        if seed is None and self.key is None:
            seed = int(self.np_random.integers(2**32))
        if seed is not None:
            self.key, self.draws = _lane_key(seed, self.lane), 0
        heads = self.rules.start_heads
        head = heads[self._draw() % len(heads)]
        self.body = deque(head - i for i in reversed(range(self.rules.start_length)))  # tail first, head last
        self.heading = 1
        self.free = [cell for cell in range(self.rules.cells) if cell not in self.body]
        self.slot = {cell: i for i, cell in enumerate(self.free)}  # where a free cell stands in `free`
        self.score, self.clock, self.won = 0, 0, False
        self._place_food()
        return self._observation(), self._info()

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict]:
        rules = self.rules
        if action not in (0, 1, 2, 3):  # -1 would read the last direction of MOVES
            raise ValueError(f"action {action}: must be 0, 1, 2 or 3")
        action = int(action)
        if not (rules.reversal_guard and action ^ 2 == self.heading):
            heading = action
        else:
            heading = self.heading
        columns = rules.board[1]
        row, column = self.body[-1] // columns + MOVES[heading][0], self.body[-1] % columns + MOVES[heading][1]
        cell = row * columns + column
        self.clock += 1

        inside = 0 <= row < rules.board[0] and 0 <= column < columns
        tail_leaves = not rules.solid_tail and cell == self.body[0]
        dead = not inside or (cell in self.body and not tail_leaves)
        eats = not dead and cell == self.food
        if not dead:  # a deadly move is not carried out
            self.heading = heading
            if not eats:
                tail = self.body.popleft()
                if cell != tail:  # the tail's cell takes the place of the head's in the list of free cells
                    slot = self.slot[tail] = self.slot.pop(cell)
                    self.free[slot] = tail
            self.body.append(cell)
        if eats:
            self.score += 1
            self.clock = 0 if rules.hunger else self.clock
            self.food = None
            self.won = not self.free
            if not self.won:
                self._place_food()

        reward = rules.death_reward if dead else rules.food_reward if eats else rules.step_reward
        terminated = dead or self.won
        truncated = not terminated and self.clock >= rules.limit
        return self._observation(), reward, terminated, truncated, self._info()

    def state_dict(self) -> dict[str, Any]:
        """All there is to a game under way, in plain values."""
        names = "key draws heading free slot score clock won food".split()
        return {name: getattr(self, name) for name in names} | {"body": list(self.body)}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Raises ValueError, before anything is changed, for values that no game has."""
        problem = self._problem(saved)
        if problem:
            raise ValueError(f"not a game of Snake on this board: {problem}")
        vars(self).update(saved, body=deque(saved["body"]), free=list(saved["free"]), slot=dict(saved["slot"]))

    def _problem(self, saved: dict[str, Any]) -> str | None:
        """What is wrong with a `state_dict`, None if nothing is."""
        rules = self.rules
        kinds = dict.fromkeys("key draws heading score clock".split(), int)
        kinds |= {"won": bool, "body": list, "free": list, "slot": dict}
        if type(saved) is not dict or set(saved) != {*kinds, "food"}:
            return "other names"
        for name, kind in kinds.items():
            if type(saved[name]) is not kind:
                return f"{name} is not of type {kind.__name__}"
        food, body = saved["food"], saved["body"]
        taken = body if food is None else [*body, food]
        if not all(type(cell) is int and 0 <= cell < rules.cells for cell in [*taken, *saved["free"]]):
            return "a cell beside the board"
        if not body or len(set(taken)) < len(taken):
            return "things on top of each other"
        for cell, successor in zip(body, body[1:]):
            (row, column), (next_row, next_column) = divmod(cell, rules.board[1]), divmod(successor, rules.board[1])
            move = next_row - row, next_column - column
            if move not in MOVES:
                return "a body in pieces"
        if saved["heading"] not in range(4) or (len(body) > 1 and saved["heading"] != MOVES.index(move)):
            return "a head that looks elsewhere"
        if sorted(saved["free"]) != sorted(set(range(rules.cells)) - set(taken)):
            return "free cells that are not free"
        if saved["slot"] != {cell: i for i, cell in enumerate(saved["free"])}:
            return "slots of other cells"
        if saved["won"] != (food is None) or (saved["won"] and saved["free"]):
            return "a win before the board is full"
        if saved["score"] != len(body) - rules.start_length:
            return "a score that is not what was eaten"
        if not (0 <= saved["key"] < 2**32 and saved["draws"] >= 0 and 0 <= saved["clock"] <= rules.limit):
            return "a number out of range"
        return None

    def _draw(self) -> int:
        self.draws += 1
        return _hash(self.key + self.draws)

    def _place_food(self) -> None:
        """Food takes a free cell out of the list; the last of the list fills the gap."""
        slot = self._draw() % len(self.free)
        self.food, last = self.free[slot], self.free[-1]
        self.free[slot] = last
        self.slot[last] = slot
        self.free.pop()
        del self.slot[self.food]

    def _info(self) -> dict:
        return {"score": self.score, "won": self.won}

    def codes(self) -> np.ndarray:
        """(rows, columns) uint8 codes of the board, whatever the observation is."""
        codes = np.zeros(self.rules.cells, np.uint8)
        if self.food is not None:
            codes[self.food] = FOOD
        step = {row * self.rules.board[1] + column: i for i, (row, column) in enumerate(MOVES)}
        cells = list(self.body)
        for cell, successor in zip(cells, cells[1:]):
            codes[cell] = BODY + step[successor - cell]
        codes[cells[-1]] = HEAD + self.heading
        return codes.reshape(self.rules.board)

    def _observation(self) -> np.ndarray:
        return self.rules.observe(self.codes())

    def render(self) -> np.ndarray | str | None:
        if self.render_mode == "ansi":
            return render_ansi(self)
        if self.render_mode == "rgb_array":
            return render_rgb(self)


def render_ansi(env: SnakeEnv) -> str:
    """The board in text: @ food, arrows for the body and o for its tail, the head as ▲▶▼◀."""
    signs = np.array(list(" @^>v<▲▶▼◀"))[env.codes()]
    if len(env.body) > 1:
        signs.ravel()[env.body[0]] = "o"
    edge = "+" + "-" * (2 * env.rules.board[1] + 1) + "+"
    return "\n".join([f"score {env.score}", edge, *(f"| {' '.join(row)} |" for row in signs), edge])


def render_rgb(env: SnakeEnv) -> np.ndarray:
    """The board as (height, width, 3) uint8: the body fades toward the tail, the head looks ahead.

    A cell has 24 pixels, on boards with more than 20 cells along a side as few as keep that side within 480.
    """
    from PIL import Image, ImageDraw, ImageFont

    rows, columns = env.rules.board
    size, bar = 2 * min(24, 480 // max(rows, columns)), 64  # drawn twice as large and then halved, for smooth edges
    width = max(columns * size, 192)  # the score needs as much
    image = Image.new("RGB", (width, rows * size + bar), "#0f1420")
    draw = ImageDraw.Draw(image)

    def middle(cell: int) -> tuple[float, float]:
        return (cell % columns + 0.5) * size, (cell // columns + 0.5) * size + bar

    def disc(x: float, y: float, radius: float, color) -> None:
        draw.ellipse((x - radius, y - radius, x + radius, y + radius), fill=color)

    for cell in range(rows * columns):
        x, y = middle(cell)
        shade = "#1a2233" if (cell // columns + cell % columns) % 2 else "#1d2638"
        draw.rectangle((x - size / 2, y - size / 2, x + size / 2 - 1, y + size / 2 - 1), fill=shade)
    if env.food is not None:
        disc(*middle(env.food), 0.3 * size, "#ff5a5f")
    cells = list(env.body)
    for i, cell in enumerate(cells):
        fresh = (i + 1) / len(cells)
        color = tuple(int(old + (new - old) * fresh) for old, new in zip((32, 74, 82), (112, 224, 140)))
        disc(*middle(cell), 0.36 * size, color)
        if i:
            draw.line((middle(cells[i - 1]), middle(cell)), color, round(0.72 * size))
            disc(*middle(cells[i - 1]), 0.36 * size, color)
    (down, across), (x, y) = MOVES[env.heading], middle(cells[-1])
    disc(x, y, 0.42 * size, "#8df0a2")
    for side in (-1, 1):
        eye_x = x + (0.14 * across + 0.18 * side * down) * size
        eye_y = y + (0.14 * down + 0.18 * side * across) * size
        disc(eye_x, eye_y, 0.11 * size, "white")
        disc(eye_x + 0.04 * size * across, eye_y + 0.04 * size * down, 0.06 * size, "#0f1420")
    draw.text((size / 3, bar / 2), f"score {env.score}", "#e8edf7", ImageFont.load_default(bar * 0.6), anchor="lm")
    return np.asarray(image.resize((image.width // 2, image.height // 2), Image.Resampling.BOX))


class SnakeBatch:
    """`num_envs` games at once, every tensor on `device`; agrees with `SnakeEnv` step for step.

    `reset() -> obs` and `step(action) -> (obs, reward, terminated, truncated, info)`: `action` (N,) int64, `obs`
    (N, rows, columns) uint8 codes, `reward` (N,) float32, the rest (N,) bool. A finished game starts anew in the same
    step. `info["final_obs"]` is what each game looked like before that; `info` also holds its `score`, `length`,
    `return` and whether it was `won` as of then. Both observations are the environment's own buffers, overwritten by
    the next step. No step waits for the device; on CUDA all shapes are fixed, so that a graph can capture it.
    """

    def __init__(self, num_envs: int, device: torch.device | str = "cpu", seed: int = 0, **rules: Any) -> None:
        self.rules, self.num_envs, self.device = Rules(**rules), num_envs, torch.device(device)
        self.fixed_shapes = self.device.type != "cpu"  # see `_select`
        n, cells = num_envs, self.rules.cells
        self.key = _lane_key(seed, torch.arange(n, device=device))
        self.lanes = torch.arange(n, device=device)
        self.base = self.lanes * cells  # first cell of a lane in the flat (N * cells) tensors
        self.free_base = self.lanes * (cells + 1)

        # Cell reached from (cell, direction). Into a wall leads back to the cell itself, where the head is in the way.
        rows, columns = self.rules.board
        row, column = np.divmod(np.arange(cells), columns)
        reached = [
            np.where((0 <= row + i) & (row + i < rows) & (0 <= column + j) & (column + j < columns),
                     (row + i) * columns + column + j, np.arange(cells))
            for i, j in MOVES
        ]  # fmt: skip
        self.neighbour = torch.tensor(np.stack(reached, 1).ravel(), device=device)

        # One new game per possible start, to be copied into a lane. A cell that is not free has slot `cells`: the
        # spare column of `free`, where writes do no harm. That is what makes a move need no masks there.
        starts = len(self.rules.start_heads)
        self.start_head = torch.tensor(self.rules.start_heads, device=device)
        body = self.start_head[:, None] - torch.arange(self.rules.start_length, device=device)
        codes = torch.zeros(starts, cells, dtype=torch.uint8, device=device)
        codes.scatter_(1, body, BODY + 1)
        codes.scatter_(1, self.start_head[:, None], HEAD + 1)
        self.start_codes = codes
        slot = (codes == EMPTY).cumsum(1) - 1
        self.start_slot = torch.where(codes == EMPTY, slot, cells).short()
        free = torch.argsort((codes != EMPTY).byte(), dim=1, stable=True)
        self.start_free = torch.cat([free, torch.zeros_like(free[:, :1])], 1).short()

        def per_lane(dtype: torch.dtype = torch.int64, *shape: int) -> torch.Tensor:
            return torch.zeros(n, *shape, dtype=dtype, device=device)

        self.codes, self.final_codes = per_lane(torch.uint8, cells), per_lane(torch.uint8, cells)
        self.free, self.slot = per_lane(torch.int16, cells + 1), per_lane(torch.int16, cells)
        self.head, self.tail, self.heading, self.num_free = per_lane(), per_lane(), per_lane(), per_lane()
        self.draws, self.clock, self.length, self.score = per_lane(), per_lane(), per_lane(), per_lane()
        self.episode_return = per_lane(torch.float32)
        # Games finished since the caller last zeroed this, and the sums of their score, length and return.
        self.finished = torch.zeros(4, device=device)
        # Numbers that are written by index: a plain one would be copied to the device first, and a graph cannot.
        self.no_slot = torch.tensor(cells, dtype=torch.int16, device=device)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """All that the games are, as the tensors themselves, not copies."""
        names = "codes free slot head tail heading num_free draws clock length score episode_return finished"
        return {name: getattr(self, name) for name in names.split()}

    def load_state_dict(self, saved: dict[str, torch.Tensor]) -> None:
        """Raises ValueError, before anything is changed, for values that no game has."""
        state = self.state_dict()
        if set(saved) != set(state):
            raise ValueError(f"games must have {', '.join(state)}")
        for name, tensor in state.items():
            if saved[name].dtype != tensor.dtype or saved[name].shape != tensor.shape:
                raise ValueError(f"{name} must be {tensor.dtype} {list(tensor.shape)}")
        problem = self._problem(**{name: tensor.cpu() for name, tensor in saved.items()})
        if problem:
            raise ValueError(f"not games of Snake on this board: {problem}")
        for name, tensor in state.items():
            tensor.copy_(saved[name])

    def _problem(
        self, codes, free, slot, head, tail, heading, num_free, draws, clock, length, score, episode_return, finished
    ) -> str | None:
        """What is wrong with a `state_dict` on the CPU, None if nothing is.

        Every lane must have a whole snake, its head where it is said to be, one food, and a list of all other cells: a
        step follows codes, cells and slots without looking where they lead.
        """
        rules, cells = self.rules, self.rules.cells
        limits = {
            "codes": (codes, HEAD + 3),
            "free": (free, cells - 1),
            "slot": (slot, cells),
            "head": (head, cells - 1),
            "tail": (tail, cells - 1),
            "heading": (heading, 3),
            "num_free": (num_free, cells),
            "clock": (clock, rules.limit - 1),
            "draws": (draws, torch.iinfo(torch.int64).max),
            "length": (length, torch.iinfo(torch.int64).max),
        }
        for name, (values, highest) in limits.items():
            if values.min() < 0 or values.max() > highest:
                return f"{name} must be 0 to {highest}"
        if not (episode_return.isfinite().all() and finished.isfinite().all()):
            return "returns must be finite"

        free, slot, lanes = free.long(), slot.long(), torch.arange(self.num_envs)
        is_snake, is_free = codes >= BODY, codes == EMPTY
        if (codes[lanes, head] != HEAD + heading).any() or ((codes >= HEAD).sum(1) != 1).any():
            return "head and codes differ"
        if ((codes == FOOD).sum(1) != 1).any():
            return "not one food"
        if (is_snake.sum(1) - rules.start_length != score).any():
            return "score is not what was eaten"
        # From the tail, code by code, over every cell of the snake to the head.
        neighbour, cell = self.neighbour.cpu(), tail
        arrives = is_snake.sum(1) - 1
        for step in range(int(arrives.max()) + 1):
            if ((cell == head) != (step >= arrives)).any() or not is_snake[lanes, cell].all():
                return "a snake in pieces"
            before = cell
            direction = codes[lanes, cell].long() - BODY
            cell = torch.where(cell == head, head, neighbour[cell * 4 + direction.clamp(max=3)])
            if ((cell == head) & (before != head) & (direction != heading)).any():
                return "a head that looks elsewhere"
        slot_fits = torch.where(is_free, slot < num_free[:, None], slot == cells)
        if (is_free.sum(1) != num_free).any() or not slot_fits.all():
            return "num_free or slots are not those of the free cells"
        if (free.gather(1, slot) != torch.arange(cells))[is_free].any():
            return "free cells that are not free"
        return None

    def reset(self) -> torch.Tensor:
        """Start a new game in every lane."""
        self._start(self.lanes, torch.ones(self.num_envs, dtype=torch.bool, device=self.device))
        return self.codes.view(-1, *self.rules.board)

    def step(self, action: torch.Tensor):
        rules, codes, slot = self.rules, self.codes.view(-1), self.slot.view(-1)
        heading = torch.where(action ^ 2 == self.heading, self.heading, action) if rules.reversal_guard else action
        cell = self.neighbour[self.head * 4 + heading]
        found = codes[self.base + cell]
        eats, dead = found == FOOD, found > FOOD
        if not rules.solid_tail:
            dead &= (cell != self.tail) | (cell == self.head)
        moves = ~(eats | dead)
        cell = torch.where(dead, self.head, cell)  # a deadly move is not carried out
        heading = torch.where(dead, self.heading, heading)

        # The body grows behind the head, the tail leaves, the head arrives: in this order, as they may be one cell.
        codes[self.base + self.head] = (heading + BODY).byte()
        tail_at, cell_at = self.base + self.tail, self.base + cell
        toward = codes[tail_at]
        codes[tail_at] = toward * ~moves
        codes[cell_at] = (heading + HEAD).byte()
        place = slot[cell_at]
        self.free.view(-1)[self.free_base + place] = self.tail.short()
        slot[tail_at] = place
        slot[cell_at] = self.no_slot
        self.tail.copy_(torch.where(moves, self.neighbour[self.tail * 4 + toward.long() - BODY], self.tail))
        self.head.copy_(cell)
        self.heading.copy_(heading)

        self.score += eats
        self.length += 1
        self.clock += 1
        if rules.hunger:
            self.clock *= ~eats
        won = eats & (self.num_free == 0)
        terminated = dead | won
        truncated = (self.clock >= rules.limit) & ~terminated
        reward = eats * (rules.food_reward - rules.step_reward) + dead * (rules.death_reward - rules.step_reward)
        reward += rules.step_reward
        self.episode_return += reward
        self._place_food(*self._select(eats & ~won))

        self.final_codes.copy_(self.codes)
        info = {
            "final_obs": self.final_codes.view(-1, *rules.board),
            "score": self.score.clone(),
            "length": self.length.clone(),
            "return": self.episode_return.clone(),
            "won": won,
        }
        done = terminated | truncated
        self.finished += torch.stack([done, self.score * done, self.length * done, self.episode_return * done]).sum(1)
        self._start(*self._select(done))
        return self.codes.view(-1, *rules.board), reward, terminated, truncated, info

    def _select(self, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Lanes to work on and which of them count: on CPU only those that need it, on CUDA all (fixed shapes)."""
        if self.fixed_shapes:
            return self.lanes, mask
        lanes = mask.nonzero().squeeze(1)
        return lanes, mask[lanes]

    def _draw(self, lanes: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        self.draws[lanes] += mask
        return _hash(self.key[lanes] + self.draws[lanes])

    def _place_food(self, lanes: torch.Tensor, mask: torch.Tensor) -> None:
        """Food takes a free cell out of the list; the last of the list fills the gap."""
        codes, free, slot = self.codes.view(-1), self.free.view(-1), self.slot.view(-1)
        base, free_base = self.base[lanes], self.free_base[lanes]
        num_free, head = self.num_free[lanes], self.head[lanes]
        pick = self._draw(lanes, mask) % num_free.clamp(min=1)
        # Where the mask is off, the head stands in for both cells: it is not free, and what is written there is so too.
        cell = torch.where(mask, free[free_base + pick], head)
        last = torch.where(mask, free[free_base + (num_free - 1).clamp(min=0)], head)
        pick = torch.where(mask, pick, self.rules.cells)
        free[free_base + pick] = last.short()
        slot[base + last] = pick.short()
        slot[base + cell] = self.no_slot
        codes[base + cell] = torch.where(mask, FOOD, codes[base + cell])
        self.num_free[lanes] -= mask.long()

    def _start(self, lanes: torch.Tensor, mask: torch.Tensor) -> None:
        """Copy a new game into the lanes that count, and its first food."""
        start = self._draw(lanes, mask) % len(self.start_head)
        for state, new in (
            (self.codes, self.start_codes[start]),
            (self.free, self.start_free[start]),
            (self.slot, self.start_slot[start]),
        ):
            state[lanes] = torch.where(mask[:, None], new, state[lanes])
        head = self.start_head[start]
        for state, new in (
            (self.head, head),
            (self.tail, head - self.rules.start_length + 1),
            (self.heading, 1),
            (self.num_free, self.rules.cells - self.rules.start_length),
            (self.clock, 0),
            (self.length, 0),
            (self.score, 0),
            (self.episode_return, 0.0),
        ):
            state[lanes] = torch.where(mask, new, state[lanes])
        self._place_food(lanes, mask)


class SnakeVectorEnv(VectorEnv):
    """`SnakeBatch` for users of Gymnasium's vector API: NumPy in, NumPy out, finished games restart in the same step.

    `reset(seed=s)` starts the lanes' streams of seed s: lane i plays what `SnakeEnv(lane=i)` plays with that seed.
    A list of seeds is one for each lane: lane i then plays what a `SnakeEnv()` of its own, as `SyncVectorEnv` would
    have it, plays with seed i of the list, and goes on with its stream where that is None. `info` is what
    `SyncVectorEnv` makes of the rule book's. Actions other than (num_envs,) whole numbers 0 to 3 raise ValueError.
    """

    metadata = {"render_modes": [], "autoreset_mode": AutoresetMode.SAME_STEP}

    def __init__(self, num_envs: int = 1, render_mode: str | None = None, **rules: Any) -> None:
        self.num_envs, self.render_mode = num_envs, render_mode
        self.rules = Rules(**rules)
        self.single_observation_space = self.rules.observation_space
        self.single_action_space = gym.spaces.Discrete(4)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self.kwargs, self.batch = rules, None

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict | None = None
    ) -> tuple[np.ndarray, dict]:
        seeds = None
        if np.ndim(seed) > 0:  # one for each lane
            seeds, seed = seed, None
            if len(seeds) != self.num_envs:
                raise ValueError(f"{len(seeds)} seeds for {self.num_envs} games: must be as many, or one for all")
        super().reset(seed=seed)
        if seed is None and self.batch is None:
            seed = int(self.np_random.integers(2**32))
        if seed is not None:
            self.batch = SnakeBatch(self.num_envs, seed=seed, **self.kwargs)
        if seeds is not None:
            for lane, lane_seed in enumerate(seeds):
                if lane_seed is not None:
                    self.batch.key[lane] = _lane_key(lane_seed, 0)
                    self.batch.draws[lane] = 0
        obs = self.rules.observe(self.batch.reset().numpy())
        score, won = np.zeros(self.num_envs, int), np.zeros(self.num_envs, bool)
        return obs, self._info(score, won, np.ones(self.num_envs, bool))

    def step(self, actions: np.ndarray):
        actions = np.asarray(actions)
        if actions.shape != (self.num_envs,) or actions.dtype.kind not in "iu":
            raise ValueError(f"actions {actions}: must be {self.num_envs} whole numbers")
        if actions.min() < 0 or actions.max() > 3:
            raise ValueError(f"actions {actions}: must be 0, 1, 2 or 3 each")
        obs, reward, terminated, truncated, info = self.batch.step(torch.as_tensor(actions, dtype=torch.int64))
        done = (terminated | truncated).numpy()
        score, won = info["score"].numpy(), info["won"].numpy()
        # A game that has ended shows its last info beside its last observation; what is left is of the new game.
        infos = self._info(np.where(done, 0, score), won & ~done, np.ones(self.num_envs, bool))
        if done.any():
            final = np.full(self.num_envs, None, object)
            final_obs = self.rules.observe(info["final_obs"].numpy())
            for lane in done.nonzero()[0]:
                final[lane] = final_obs[lane]
            infos["final_obs"] = final
            infos["_final_obs"] = done
            infos["final_info"] = self._info(np.where(done, score, 0), won & done, done)
            infos["_final_info"] = done
        obs = self.rules.observe(obs.numpy())
        return obs, reward.double().numpy(), terminated.numpy(), truncated.numpy(), infos

    def _info(self, score: np.ndarray, won: np.ndarray, mask: np.ndarray) -> dict:
        """What `SnakeEnv` has in its info, and of which lanes."""
        return {"score": score, "_score": mask, "won": won, "_won": mask.copy()}

"""Snake, the rule book: one game in plain Python. envs/snake/batch.py plays many at once by the same rules.

Both play the same game: same actions and same (seed, lane) give the same trajectory, food by food. Every draw is a
hash of (seed, lane, number of draws so far), so a lane's game depends neither on the other lanes nor on the device.

A cell is one `uint8` code, and the codes of a board are the whole state of a game:

    0 empty · 1 food · 2 3 4 5 body · 6 7 8 9 head

A body code names the direction of the next cell toward the head, a head code the heading: up, right, down, left.
"""

from collections import deque
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np

from envs.drawing import Canvas
from envs.streams import integer_hash, lane_key

EMPTY = 0
FOOD = 1
BODY = 2
HEAD = 6
MOVES = ((-1, 0), (0, 1), (1, 0), (0, -1))  # up, right, down, left as (row, column); action ^ 2 is the reverse


def parse_board(text: str) -> tuple[int, int]:
    """Rows and columns of "10x10". Raises ValueError."""
    rows, columns = text.split("x")
    return int(rows), int(columns)


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
    def max_score(self) -> int:
        """Foods until the board is full."""
        return self.cells - self.start_length

    @property
    def limit(self) -> int:
        return self.step_limit or 2 * self.cells

    @property
    def start_heads(self) -> list[int]:
        """Cells at which the head may start."""
        rows, columns = self.board
        if self.start_margin is None:
            return [rows // 2 * columns + columns // 2]
        first = self.start_margin
        start_rows = range(first, rows - 1 - first)
        start_columns = range(first, columns - 1 - first)
        return [row * columns + column for row in start_rows for column in start_columns]

    @property
    def observation_space(self) -> gym.spaces.Box:
        if self.observation == "onehot":
            return gym.spaces.Box(0, 1, (*self.board, 3), np.uint8)
        highest = 9 if self.observation == "codes" else 3
        return gym.spaces.Box(0, highest, self.board, np.uint8)

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


class SnakeEnv(gym.Env):
    """The rule book: one game, written to be read.

    `rules` are the fields of `Rules`. Observation: `Rules.observation_space`. Actions: 0 up, 1 right, 2 down, 3 left.
    Others raise ValueError. `info` holds `score` (food eaten) and `won`. `lane` picks the random stream, as lane i of
    `SnakeBatch` has it.
    """

    metadata = {"render_modes": ["rgb_array", "ansi"], "render_fps": 12}

    def __init__(self, render_mode: str | None = None, lane: int = 0, **rules: Any) -> None:
        self.rules = Rules(**rules)
        self.render_mode = render_mode
        self.lane = lane
        self.observation_space = self.rules.observation_space
        self.action_space = gym.spaces.Discrete(4)
        self.key = None

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        if seed is None and self.key is None:
            seed = int(self.np_random.integers(2**32))
        if seed is not None:
            self.key = lane_key(seed, self.lane)
            self.draws = 0
        heads = self.rules.start_heads
        head = heads[self._draw() % len(heads)]
        self.body = deque(head - i for i in reversed(range(self.rules.start_length)))  # tail first, head last
        self.heading = 1
        self.free = [cell for cell in range(self.rules.cells) if cell not in self.body]
        self.slot = {cell: i for i, cell in enumerate(self.free)}  # where a free cell stands in `free`
        self.score = 0
        self.clock = 0
        self.won = False
        self._place_food()
        return self._observation(), self._info()

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict]:
        rules = self.rules
        if action not in (0, 1, 2, 3):  # -1 would read the last direction of MOVES
            raise ValueError(f"action {action}: must be 0, 1, 2 or 3")
        action = int(action)
        is_reversal = action ^ 2 == self.heading
        heading = self.heading if is_reversal and rules.reversal_guard else action
        rows, columns = rules.board
        head_row, head_column = divmod(self.body[-1], columns)
        row = head_row + MOVES[heading][0]
        column = head_column + MOVES[heading][1]
        cell = row * columns + column
        self.clock += 1

        inside = 0 <= row < rows and 0 <= column < columns
        tail_leaves = not rules.solid_tail and cell == self.body[0]
        dead = not inside or (cell in self.body and not tail_leaves)
        eats = not dead and cell == self.food
        if not dead:  # a deadly move is not carried out
            self.heading = heading
            if not eats:
                tail = self.body.popleft()
                if cell != tail:  # the tail's cell takes the place of the head's in the list of free cells
                    slot = self.slot.pop(cell)
                    self.slot[tail] = slot
                    self.free[slot] = tail
            self.body.append(cell)
        if eats:
            self.score += 1
            if rules.hunger:
                self.clock = 0
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
        names = ["key", "draws", "heading", "free", "slot", "score", "clock", "won", "food"]
        state = {name: getattr(self, name) for name in names}
        state["body"] = list(self.body)
        return state

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        vars(self).update(saved, body=deque(saved["body"]), free=list(saved["free"]), slot=dict(saved["slot"]))

    def _draw(self) -> int:
        self.draws += 1
        return integer_hash(self.key + self.draws)

    def _place_food(self) -> None:
        """Food takes a free cell out of the list; the last of the list fills the gap."""
        slot = self._draw() % len(self.free)
        self.food = self.free[slot]
        last = self.free[-1]
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
    rows, columns = env.rules.board
    size = 2 * min(24, 480 // max(rows, columns))
    bar = 64  # the line above the board
    width = max(columns * size, 192)  # the score needs as much
    canvas = Canvas(width, rows * size + bar, "#0f1420")

    def middle(cell: int) -> tuple[float, float]:
        return (cell % columns + 0.5) * size, (cell // columns + 0.5) * size + bar

    for cell in range(rows * columns):
        x, y = middle(cell)
        shade = "#1a2233" if (cell // columns + cell % columns) % 2 else "#1d2638"
        canvas.draw.rectangle((x - size / 2, y - size / 2, x + size / 2 - 1, y + size / 2 - 1), shade)
    if env.food is not None:
        canvas.disc(*middle(env.food), 0.3 * size, "#ff5a5f")
    cells = list(env.body)
    for i, cell in enumerate(cells):
        freshness = (i + 1) / len(cells)
        color = tuple(int(old + (new - old) * freshness) for old, new in zip((32, 74, 82), (112, 224, 140)))
        canvas.disc(*middle(cell), 0.36 * size, color)
        if i:
            previous = middle(cells[i - 1])
            canvas.draw.line((previous, middle(cell)), color, round(0.72 * size))
            canvas.disc(*previous, 0.36 * size, color)
    down, across = MOVES[env.heading]
    x, y = middle(cells[-1])
    canvas.disc(x, y, 0.42 * size, "#8df0a2")
    for side in (-1, 1):
        eye_x = x + (0.14 * across + 0.18 * side * down) * size
        eye_y = y + (0.14 * down + 0.18 * side * across) * size
        canvas.disc(eye_x, eye_y, 0.11 * size, "white")
        canvas.disc(eye_x + 0.04 * size * across, eye_y + 0.04 * size * down, 0.06 * size, "#0f1420")
    canvas.text(size / 3, bar / 2, f"score {env.score}", bar * 0.6, "#e8edf7")
    return canvas.pixels()

"""Reference implementation of Snake: one game in plain Python. envs/snake/batch.py is the batched version.

Both play the same game: equal actions and equal (seed, lane) lead to equal trajectories. Every random draw is a hash of
(seed, lane, number of draws so far), so a game depends neither on other lanes nor on the device.

An observation has one `uint8` code per cell:

    0 empty · 1 food · 2 3 4 5 body · 6 7 8 9 head

A body code is 2 + the direction of the next cell toward the head, a head code 6 + the heading. Directions: 0 up,
1 right, 2 down, 3 left.
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
MOVES = (  # (row, column) by action; action ^ 2 is the reverse
    (-1, 0),  # up
    (0, 1),  # right
    (1, 0),  # down
    (0, -1),  # left
)


def parse_board(text: str) -> tuple[int, int]:
    """Rows and columns of text like "10x10". Raises ValueError if it has another form."""
    rows, columns = text.split("x")
    return int(rows), int(columns)


@dataclass(frozen=True)
class Rules:
    """Settings of a game. Raises ValueError for settings without a valid game."""

    board: tuple[int, int] = (10, 10)
    """rows and columns, 4 to 64 each"""
    start_length: int = 3
    """cells of the snake at the start, in one row, heading right"""
    start_margin: int | None = None
    """None starts in the centre; m draws row and column of the head uniformly from [m, side - 1 - m)"""
    reversal_guard: bool = True
    """a reversal is ignored and the snake keeps its heading (otherwise it hits its own body)"""
    solid_tail: bool = False
    """moving onto the tail is a collision even if the tail moves away in the same step"""
    food_reward: float = 1.0
    death_reward: float = -1.0
    step_reward: float = 0.0
    """reward of a step without food or death"""
    step_limit: int | None = None
    """steps until truncation (None: 2 * rows * columns)"""
    hunger: bool = True
    """eating resets the step count for `step_limit`"""
    observation: str = "codes"
    """"codes" (see above), "blocks" (0 empty, 1 body, 2 head, 3 food) or "onehot" (channels snake, food, empty)"""

    def __post_init__(self) -> None:
        if len(self.board) != 2:
            raise ValueError("a board has rows and columns")
        rows, columns = self.board
        if not (4 <= rows <= 64 and 4 <= columns <= 64):
            raise ValueError(f"board {rows}x{columns}: each side must be 4 to 64")
        margin = self.start_margin
        if margin is not None:
            end = min(rows, columns) - 1 - margin
            if end <= margin:
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
        """Food until the board is full."""
        return self.cells - self.start_length

    @property
    def limit(self) -> int:
        return self.step_limit or 2 * self.cells

    @property
    def start_heads(self) -> list[int]:
        """Cells where the head can start."""
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
            shape = (*self.board, 3)
            return gym.spaces.Box(0, 1, shape, np.uint8)
        highest = 9 if self.observation == "codes" else 3
        return gym.spaces.Box(0, highest, self.board, np.uint8)

    def observe(self, codes: np.ndarray) -> np.ndarray:
        """Observation (..., *observation_space.shape) uint8 of codes (..., rows, columns). It is a copy."""
        if self.observation == "codes":
            return codes.copy()
        if self.observation == "blocks":
            table = np.array([0, 3, 1, 1, 1, 1, 2, 2, 2, 2], np.uint8)
        else:
            channel = [2, 1, 0, 0, 0, 0, 0, 0, 0, 0]
            table = np.eye(3, dtype=np.uint8)[channel]
        return table[codes]


VARIANTS: dict[str, dict[str, Any]] = {
    "Snake-v0": {},
    # The game of a hand-written DQN: every step has a reward of 0.01, added to that of food or death.
    "SnakeBlocks-v0": dict(
        start_margin=3,
        solid_tail=True,
        hunger=False,
        observation="blocks",
        food_reward=15.01,
        death_reward=-999.99,
        step_reward=0.01,
    ),
    # A game for Stable-Baselines3: no body at the start, no reversal guard, at most 500 steps.
    "SnakeOneHot-v0": dict(
        board=(20, 20),
        start_length=1,
        reversal_guard=False,
        solid_tail=True,
        step_limit=500,
        hunger=False,
        observation="onehot",
        food_reward=10.0,
        death_reward=-10.0,
        step_reward=-0.01,
    ),
}


class SnakeEnv(gym.Env):
    """One game, written for readability rather than speed.

    Observation: `Rules.observation_space`, uint8. Actions: 0 up, 1 right, 2 down, 3 left; others raise ValueError.
    `info` has `score` (food eaten) and `won`. `lane` selects the random stream: that of lane i in `SnakeBatch`.
    Other keywords are the fields of `Rules`.
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
        tail = head - self.rules.start_length + 1
        self.body = deque(range(tail, head + 1))  # from tail to head
        self.heading = 1
        all_cells = range(self.rules.cells)
        self.free = [cell for cell in all_cells if cell not in self.body]
        self.slot = {cell: i for i, cell in enumerate(self.free)}  # index of a free cell in `free`
        self.score = 0
        self.clock = 0
        self.won = False
        self._place_food()
        return self._observation(), self._info()

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict]:
        rules = self.rules
        if action not in (0, 1, 2, 3):  # -1 would be a valid index of MOVES
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
        if not dead:  # a snake that dies stays where it is
            self.heading = heading
            if not eats:
                tail = self.body.popleft()
                if cell != tail:  # in the list of free cells the old tail replaces the new head
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

        if dead:
            reward = rules.death_reward
        elif eats:
            reward = rules.food_reward
        else:
            reward = rules.step_reward
        terminated = dead or self.won
        truncated = not terminated and self.clock >= rules.limit
        return self._observation(), reward, terminated, truncated, self._info()

    def state_dict(self) -> dict[str, Any]:
        """The complete state of the game, in Python ints, lists and dicts."""
        return {
            "key": self.key,
            "draws": self.draws,
            "heading": self.heading,
            "body": list(self.body),
            "free": list(self.free),
            "slot": dict(self.slot),
            "score": self.score,
            "clock": self.clock,
            "won": self.won,
            "food": self.food,
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        vars(self).update(saved)
        self.body = deque(saved["body"])
        self.free = list(saved["free"])
        self.slot = dict(saved["slot"])

    def _draw(self) -> int:
        self.draws += 1
        return integer_hash(self.key + self.draws)

    def _place_food(self) -> None:
        """Places food on a random free cell. The last free cell takes its slot in the list."""
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
        """(rows, columns) uint8 codes of the board, for every kind of observation."""
        codes = np.zeros(self.rules.cells, np.uint8)
        if self.food is not None:
            codes[self.food] = FOOD
        columns = self.rules.board[1]
        direction = {row * columns + column: i for i, (row, column) in enumerate(MOVES)}
        cells = list(self.body)
        for cell, next_cell in zip(cells, cells[1:]):
            codes[cell] = BODY + direction[next_cell - cell]
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
    """The board as text: @ food, ^>v< body, o tail, ▲▶▼◀ head."""
    signs = np.array(list(" @^>v<▲▶▼◀"))[env.codes()]
    if len(env.body) > 1:
        signs.ravel()[env.body[0]] = "o"
    width = 2 * env.rules.board[1] + 1
    edge = "+" + "-" * width + "+"
    lines = [f"score {env.score}", edge]
    for row in signs:
        text = " ".join(row)
        lines.append(f"| {text} |")
    lines.append(edge)
    return "\n".join(lines)


def render_rgb(env: SnakeEnv) -> np.ndarray:
    """The board as (height, width, 3) uint8. The body fades toward the tail.

    Cells are 24 pixels wide, less on boards with sides of more than 20 cells: these sides have at most 480 pixels.
    """
    rows, columns = env.rules.board
    size = 2 * min(24, 480 // max(rows, columns))
    bar = 64  # height of the score line
    width = max(columns * size, 192)  # the score needs 192
    canvas = Canvas(width, rows * size + bar, "#0f1420")

    def center(cell: int) -> tuple[float, float]:
        row, column = divmod(cell, columns)
        x = (column + 0.5) * size
        y = (row + 0.5) * size + bar
        return x, y

    for cell in range(rows * columns):
        row, column = divmod(cell, columns)
        left = column * size
        top = row * size + bar
        shade = "#1a2233" if (row + column) % 2 else "#1d2638"
        canvas.draw.rectangle((left, top, left + size - 1, top + size - 1), shade)
    if env.food is not None:
        x, y = center(env.food)
        canvas.disc(x, y, 0.3 * size, "#ff5a5f")
    cells = list(env.body)
    for i, cell in enumerate(cells):
        brightness = (i + 1) / len(cells)
        red = int(32 + 80 * brightness)
        green = int(74 + 150 * brightness)
        blue = int(82 + 58 * brightness)
        color = (red, green, blue)
        x, y = center(cell)
        canvas.disc(x, y, 0.36 * size, color)
        if i:
            previous_x, previous_y = center(cells[i - 1])
            canvas.draw.line((previous_x, previous_y, x, y), color, round(0.72 * size))
            canvas.disc(previous_x, previous_y, 0.36 * size, color)
    down, across = MOVES[env.heading]
    x, y = center(cells[-1])
    canvas.disc(x, y, 0.42 * size, "#8df0a2")
    for side in (-1, 1):
        eye_x = x + (0.14 * across + 0.18 * side * down) * size
        eye_y = y + (0.14 * down + 0.18 * side * across) * size
        canvas.disc(eye_x, eye_y, 0.11 * size, "white")
        pupil_x = eye_x + 0.04 * size * across
        pupil_y = eye_y + 0.04 * size * down
        canvas.disc(pupil_x, pupil_y, 0.06 * size, "#0f1420")
    canvas.text(size / 3, bar / 2, f"score {env.score}", bar * 0.6, "#e8edf7")
    return canvas.pixels()

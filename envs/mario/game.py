"""A side-scroller of our own: run, jump, stomp, and reach the flag. Levels come from a seed, physics are integers.

`MarioGame` is the rule book, one game in plain Python integers; envs/mario/batch.py plays any number of them, draws
their pictures into one array, and makes Gymnasium environments of them. There is no second engine in array operations:
a frame costs a game 1.6 us here, while the 70 or so NumPy calls of a frame would cost 40 us however few games there
are, so arrays would pay above some 25 games, and a collector process, which has one core, plays 4 to 16.

Positions count 1/16 pixel, speeds 1/16 pixel per frame; x grows to the right, y downward. A tile is 16 pixels, the
screen 12 x 12 tiles. A level is a grid of tile codes, and what is painted is what is solid.
"""

from typing import Any

import numpy as np

from envs.mario.levels import (
    COIN,
    DIFFICULTIES,
    GROUND,
    SCREEN,
    SKY,
    SOLID,
    START,
    WALKER_SPEED,
    WALKER_WIDTH,
    Level,
    pace,
)
from envs.mario.pictures import gray_art, render_rgb
from envs.streams import Stream

# ---------------------------------------------------------------------------------------------------- buttons, rewards

RIGHT = 1  # bits of the buttons that are held
LEFT = 2
JUMP = 4
RUN = 8
DOWN = 16  # does nothing in this game, nor does up
UP = 32
ACTIONS = (
    0, RIGHT, RIGHT | JUMP, RIGHT | RUN, RIGHT | JUMP | RUN,  # the first 5 only go right
    JUMP, LEFT,  # the first 7 are the simple ones
    LEFT | JUMP, LEFT | RUN, LEFT | JUMP | RUN, DOWN, UP,
)  # fmt: skip

PROGRESS_REWARD = 0.01
"""per pixel of new ground: running earns 0.1 a step, so that with gamma 0.97 the way ahead is worth about 3, of the
size of a death and the flag, and no reward needs clipping"""
DEATH_REWARD = -1.0
FLAG_REWARD = 2.0
STUCK_REWARD = -0.5
PATIENCE = 40
"""agent steps without new ground after which a game is given up"""

TRAIN_LEVELS = (0, 1000)
"""range of level seeds that agents train on unless told otherwise"""
UNSEEN_LEVELS = (1_000_000, 2_000_000)
"""range of level seeds that only evaluation plays"""


class Episode:
    """What a step earns and when a game ends: here only, for our game and the real one."""

    __slots__ = ("start", "best", "idle", "length", "total", "flag", "max_steps")

    def __init__(self, x: int, max_steps: int) -> None:
        self.start = self.best = x  # pixels: where it began, and the furthest yet
        self.idle = 0  # agent steps without new ground
        self.length = 0
        self.total = 0.0
        self.flag = False
        self.max_steps = max_steps

    def step(self, x: int, dead: bool, flag: bool) -> tuple[float, bool, bool]:
        """Position in pixels after a step -> reward, terminated, truncated."""
        gain = max(x - self.best, 0)
        self.best += gain
        self.idle = 0 if gain else self.idle + 1
        self.length += 1
        self.flag = flag
        terminated = dead or flag
        stuck = self.idle >= PATIENCE and not terminated
        reward = PROGRESS_REWARD * gain + DEATH_REWARD * dead + FLAG_REWARD * flag + STUCK_REWARD * stuck
        self.total += reward
        return reward, terminated, not terminated and (stuck or self.length >= self.max_steps)


# ------------------------------------------------------------------------------------------------------- the rule book

WIDTH = 12 * 16
HEIGHT = 16 * 16
WALKER_HEIGHT = 14 * 16
WALK_SPEED = 24
RUN_SPEED = 40
FALL_SPEED = 72  # at most
JUMP_SPEED = -86
BOUNCE_SPEED = -48
RISE_GRAVITY = 4  # while the jump is held on the way up
GRAVITY = 10  # at all other times
TURN = 2  # speed lost per frame by pressing against it; gaining and coasting take 1
STOMP_DEPTH = 8 * 16  # how far below a walker's top feet may be and still stomp it
JUMP_AGAIN = 16  # frames on the ground after which a jump that is still held starts the next
LOOK_BACK = 4 * 256  # the camera keeps this much behind the furthest point, and never goes back
COIN_SCORE = 100
STOMP_SCORE = 200
FLAG_SCORE = 1000


class MarioGame:
    """The rule book: one game, a level per `start`.

    `levels` is the range of level seeds, end excluded; `size` the side of the picture in pixels; `skip` frames an
    agent step; each game begins with up to `noop_max` frames of nothing. `x` is in 1/16 pixel (`where()` in pixels).
    """

    max_steps = 500
    _STATE = [
        "seed",
        "x",
        "y",
        "vx",
        "vy",
        "camera",
        "clock",
        "held",
        "score",
        "grounded",
        "left_facing",
        "dead",
        "flag",
    ]

    def __init__(
        self,
        difficulty: int = 0,
        levels: tuple[int, int] = TRAIN_LEVELS,
        size: int = 84,
        skip: int = 4,
        noop_max: int = 30,
    ) -> None:
        if difficulty not in range(len(DIFFICULTIES)):
            raise ValueError(f"difficulty {difficulty}: must be 0 to {len(DIFFICULTIES) - 1}")
        if not 0 <= levels[0] < levels[1] <= 2**32:
            raise ValueError(f"levels {levels[0]}:{levels[1]}: must be first:end with 0 <= first < end <= 2**32")
        if size < 48 or size % SCREEN:
            raise ValueError(f"size {size}: must be a multiple of {SCREEN}, at least 48")
        check_timing(skip, noop_max)
        self.difficulty = difficulty
        self.levels = levels
        self.size = size
        self.skip = skip
        self.noop_max = noop_max
        self.tile = size // SCREEN
        self.art = gray_art(self.tile)

    def start(self, draw: Stream) -> None:
        """Begin a level drawn from the lane's stream."""
        first, end = self.levels
        self.enter(first + draw(end - first))
        self.play(0, draw(self.noop_max + 1))

    def enter(self, seed: int) -> None:
        """Stand at the start of the level of this seed."""
        self.seed = seed
        self.level = Level(seed, self.difficulty)
        self.x = START << 8
        self.y = (GROUND << 8) - HEIGHT
        self.vx = 0
        self.vy = 0
        self.camera = 0
        self.clock = 0
        self.held = 0
        self.score = 0
        self.grounded = True
        self.left_facing = False
        self.dead = False
        self.flag = False
        self.taken = []  # places of coins in the grid
        self.stomped = []  # indices of walkers
        codes = np.frombuffer(self.level.grid, np.uint8).reshape(-1, 16)[:, :SCREEN]
        self.strip = self.art[codes.T].transpose(0, 2, 1, 3).reshape(self.size, -1)  # the whole level, painted once

    def where(self) -> int:
        return self.x >> 4

    def play(self, buttons: int, frames: int | None = None) -> None:
        """Hold `buttons` for `frames` (None: `skip`), or until the game ends; a game that has ended stays as it is."""
        if self.dead or self.flag:
            return
        # Attributes are read and written once per agent step: each access costs as much as an addition.
        frames = self.skip if frames is None else frames
        grid = self.level.grid
        x = self.x
        y = self.y
        vx = self.vx
        vy = self.vy
        held = self.held
        grounded = self.grounded
        clock = self.clock
        camera = self.camera
        flag_at = self.level.flag - WIDTH
        reach = frames * (RUN_SPEED + WALKER_SPEED) + WIDTH
        near = [
            (i, walker)
            for i, walker in enumerate(self.level.walkers)
            if walker[0] - reach < x < walker[0] + walker[1] + reach + WALKER_WIDTH and i not in self.stomped
        ]
        push = (1 if buttons & RIGHT else 0) - (1 if buttons & LEFT else 0)
        top_speed = RUN_SPEED if buttons & RUN else WALK_SPEED
        jump = buttons & JUMP
        if push:
            self.left_facing = push < 0
        for _ in range(frames):
            clock += 1
            if push:
                ahead = vx * push
                if ahead < 0:
                    vx += TURN * push
                elif ahead < top_speed:
                    vx += push
                elif ahead > top_speed:
                    vx -= push
            elif grounded and vx:
                vx += 1 if vx < 0 else -1

            # `held` is the frames of standing until a held jump starts again; 0 once the button was up.
            if not jump:
                held = 0
            elif grounded:
                if held:
                    held -= 1
                else:
                    vy = JUMP_SPEED
                    held = JUMP_AGAIN
            vy += RISE_GRAVITY if held and vy < 0 else GRAVITY
            if vy > FALL_SPEED:
                vy = FALL_SPEED

            x += vx
            if vx > 0:
                column = (x + WIDTH - 1) >> 8
                if grid[column << 4 | y >> 8] >= SOLID or grid[column << 4 | (y + HEIGHT - 1) >> 8] >= SOLID:
                    x = (column << 8) - WIDTH
                    vx = 0
            elif vx < 0:
                column = x >> 8
                if x < camera:
                    x = camera
                    vx = 0
                elif grid[column << 4 | y >> 8] >= SOLID or grid[column << 4 | (y + HEIGHT - 1) >> 8] >= SOLID:
                    x = (column + 1) << 8
                    vx = 0

            y += vy
            back = x >> 8 << 4
            front = (x + WIDTH - 1) >> 8 << 4
            if vy > 0:
                row = (y + HEIGHT - 1) >> 8
                grounded = grid[back | row] >= SOLID or grid[front | row] >= SOLID
                if grounded:
                    y = (row << 8) - HEIGHT
                    vy = 0
                elif y >= SCREEN << 8:
                    self.dead = True
                    break
            else:
                grounded = False
                if y < 0:
                    y = 0
                    vy = 0
                elif grid[back | y >> 8] >= SOLID or grid[front | y >> 8] >= SOLID:
                    y = ((y >> 8) + 1) << 8
                    vy = 0

            for i, walker in near:
                gap = pace(walker, clock) - x
                depth = y + HEIGHT - (GROUND << 8) + WALKER_HEIGHT
                if -WALKER_WIDTH < gap < WIDTH and depth > 0:
                    if vy > 0 and depth <= STOMP_DEPTH:
                        vy = BOUNCE_SPEED
                        self.score += STOMP_SCORE
                        self.stomped.append(i)
                        near.remove((i, walker))
                    else:
                        self.dead = True
                    break
            if self.dead:
                break

            place = (x + WIDTH // 2) >> 8 << 4 | (y + HEIGHT // 2) >> 8
            if grid[place] == COIN:
                self.score += COIN_SCORE
                self._take(place)
            if x - LOOK_BACK > camera:
                camera = x - LOOK_BACK
            if x >= flag_at:
                self.flag = True
                self.score += FLAG_SCORE
                break
        self.x = x
        self.y = y
        self.vx = vx
        self.vy = vy
        self.held = held
        self.grounded = grounded
        self.clock = clock
        self.camera = camera

    def _take(self, place: int) -> None:
        """The coin at `place` of the grid is gone."""
        self.taken.append(place)
        self.level.grid[place] = SKY
        column = (place >> 4) * self.tile
        row = (place & 15) * self.tile
        self.strip[row : row + self.tile, column : column + self.tile] = self.art[SKY]

    def visible(self) -> list[int]:
        """x of the walkers on the screen."""
        near = self.camera - WALKER_WIDTH
        far = self.camera + (SCREEN << 8)
        places = [
            pace(walker, self.clock)
            for i, walker in enumerate(self.level.walkers)
            if walker[0] < far and walker[0] + walker[1] > near and i not in self.stomped
        ]
        return [x for x in places if near < x < far]

    def picture(self, out: np.ndarray) -> None:
        """Paint (size, size) uint8 gray: a window of the strip, and the few who move."""
        tile = self.tile
        shift = self.camera * tile >> 8
        out[:] = self.strip[:, shift : shift + self.size]
        side = tile * 14 >> 4
        eye = max(tile // 6, 1)
        top = GROUND * tile - side
        for x in self.visible():
            left = (x * tile >> 8) - shift
            out[top : GROUND * tile, max(left, 0) : max(left + side, 0)] = 0
            out[top + eye : top + 3 * eye, max(left + eye, 0) : max(left + side - eye, 0)] = 255
        # Who stands with the jump still held has to wait, and crouches: the picture tells what a press will do.
        crouch = tile // 3 if self.grounded and self.held else 0
        left = (self.x * tile >> 8) - shift
        bottom = (self.y * tile >> 8) + tile
        top = bottom - tile + crouch
        side = tile * 12 >> 4
        out[top:bottom, left : left + side] = 255
        look = left if self.left_facing else left + side - 2 * eye
        out[top + eye : top + 2 * eye, look : look + 2 * eye] = 0

    def state(self) -> dict[str, Any]:
        """All that this game is, in plain values."""
        state = {name: getattr(self, name) for name in self._STATE}
        state["taken"] = list(self.taken)
        state["stomped"] = list(self.stomped)
        return state

    def restore(self, state: dict[str, Any]) -> None:
        self.enter(state["seed"])
        for name in self._STATE:
            setattr(self, name, state[name])
        self.stomped = list(state["stomped"])
        for place in state["taken"]:
            self._take(place)

    def ansi(self) -> str:
        """The screen in text: o player, w walker, # solid, = pipe, * coin, | flag."""
        first = self.camera >> 8
        codes = np.frombuffer(self.level.grid, np.uint8).reshape(-1, 16)[first : first + SCREEN + 1, :SCREEN].T
        signs = np.array(list(" *|> ##==#"))[codes]
        for x in self.visible():
            signs[GROUND - 1, min(max((x + WALKER_WIDTH // 2 >> 8) - first, 0), SCREEN)] = "w"
        signs[min(self.y + HEIGHT // 2 >> 8, SCREEN - 1), (self.x + WIDTH // 2 >> 8) - first] = "o"
        title = f"score {self.score}  distance {self.where() - (START << 4)}"
        return "\n".join([title, *("".join(row) for row in signs)])

    def rgb(self) -> np.ndarray:
        return render_rgb(self)


def check_timing(skip: int, noop_max: int) -> None:
    if skip < 1:
        raise ValueError(f"skip {skip}: must be at least 1")
    if noop_max < 0:
        raise ValueError(f"noop_max {noop_max}: must be at least 0")

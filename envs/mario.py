"""A side-scroller of our own: run, jump, stomp, and reach the flag. Levels come from a seed, physics are integers.

`MarioGame` is the rule book, one game in plain Python integers; `MarioBatch` plays any number of them and draws their
pictures into one array; the Gymnasium `Env` is one lane of it. There is no second engine in array operations: a frame
costs a game 1.6 us here, while the 70 or so NumPy calls of a frame would cost 40 us however few games there are, so
arrays would pay above some 25 games, and a collector process, which has one core, plays 4 to 16.

Positions count 1/16 pixel, speeds 1/16 pixel per frame; x grows to the right, y downward. A tile is 16 pixels, the
screen 12 x 12 tiles. A level is a grid of tile codes, and what is painted is what is solid.
"""

from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

# ---------------------------------------------------------------------------------------------------- buttons, rewards

RIGHT, LEFT, JUMP, RUN, DOWN, UP = 1, 2, 4, 8, 16, 32  # bits of what is held; down and up do nothing in this game
ACTIONS = (
    0, RIGHT, RIGHT | JUMP, RIGHT | RUN, RIGHT | JUMP | RUN,  # the first 5 only go right
    JUMP, LEFT,  # the first 7 are the simple ones
    LEFT | JUMP, LEFT | RUN, LEFT | JUMP | RUN, DOWN, UP,
)  # fmt: skip

PROGRESS_REWARD = 0.01
"""per pixel of new ground: running earns 0.1 a step, so that with gamma 0.97 the way ahead is worth about 3, of the
size of a death and the flag, and no reward needs clipping"""
DEATH_REWARD, FLAG_REWARD, STUCK_REWARD = -1.0, 2.0, -0.5
PATIENCE = 40
"""agent steps without new ground after which a game is given up"""

TRAIN_LEVELS, UNSEEN_LEVELS = (0, 1000), (1_000_000, 2_000_000)
"""ranges of level seeds: what agents train on unless told otherwise, and what only evaluation plays"""


class Episode:
    """What a step earns and when a game ends: here only, for our game and the real one."""

    __slots__ = ("start", "best", "idle", "length", "total", "flag", "max_steps")

    def __init__(self, x: int, max_steps: int) -> None:
        self.start = self.best = x  # pixels: where it began, and the furthest yet
        self.idle, self.length, self.total, self.flag, self.max_steps = 0, 0, 0.0, False, max_steps

    def judge(self, x: int, dead: bool, flag: bool) -> tuple[float, bool, bool]:
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


def _hash(x: int) -> int:
    """32-bit integer hash: xor-shift and multiply, twice."""
    x = ((x ^ (x >> 16)) * 0x21F0AAAD) & 0xFFFFFFFF
    x = ((x ^ (x >> 15)) * 0x735A2D97) & 0xFFFFFFFF
    return x ^ (x >> 15)


class Stream:
    """Random numbers by counting: `stream(n)` is uniform in [0, n), and (key, draws) is all its state."""

    __slots__ = ("key", "draws")

    def __init__(self, seed: int, lane: int) -> None:
        self.key, self.draws = _hash(_hash(seed & 0xFFFFFFFF) ^ _hash(lane + 0x9E3779B9 & 0xFFFFFFFF)), 0

    def __call__(self, n: int) -> int:
        self.draws += 1
        return _hash(self.key + self.draws & 0xFFFFFFFF) % n


# -------------------------------------------------------------------------------------------------------------- levels

SKY, COIN, POLE, PENNANT, ABYSS, GRASS, SOIL, RIM, PIPE, BLOCK = range(10)
SOLID = GRASS  # this code and all above it block the way
SCREEN, GROUND = 12, 10  # tiles across and down the screen; first row of the ground
FLAT = bytes([SKY] * GROUND + [GRASS, SOIL] + [SKY] * 4)  # one column of a grid: 12 rows on the screen, 4 below it
GAP = bytes([SKY] * GROUND + [ABYSS, ABYSS] + [SKY] * 4)
START = 2  # column in which the player begins


@dataclass(frozen=True)
class Difficulty:
    """What levels are made of. A jump clears 3.4 tiles in height and, after a run-up of two tiles, 5 in width: walls
    of up to 3 and gaps of up to 5 make every level solvable. (low, high) are drawn, both ends included."""

    gaps: int
    pipes: int
    packs: int
    stairs: int
    gap_width: tuple[int, int]
    pipe_height: tuple[int, int]
    walkers: int
    """in each pack"""
    rest: tuple[int, int]
    """tiles of plain ground before each obstacle, at least 2"""


DIFFICULTIES = (
    Difficulty(gaps=3, pipes=2, packs=3, stairs=0, gap_width=(3, 4), pipe_height=(3, 3), walkers=1, rest=(3, 4)),
    Difficulty(gaps=3, pipes=3, packs=3, stairs=1, gap_width=(3, 4), pipe_height=(2, 3), walkers=1, rest=(2, 4)),
    Difficulty(gaps=4, pipes=3, packs=4, stairs=1, gap_width=(3, 4), pipe_height=(2, 3), walkers=2, rest=(2, 4)),
    Difficulty(gaps=5, pipes=3, packs=4, stairs=2, gap_width=(3, 5), pipe_height=(2, 3), walkers=2, rest=(2, 3)),
)


class Level:
    """One level, the same for the same (seed, difficulty).

    `grid`: tile codes, 16 bytes a column, so that the tile at (x, y) is `grid[x >> 8 << 4 | y >> 8]`.
    `walkers`: (left, span, phase) of those who pace `span` to and fro from `left`. `flag`: x of the pole.
    """

    def __init__(self, seed: int, difficulty: int) -> None:
        draw, rules = Stream(seed, -1), DIFFICULTIES[difficulty]
        grid, self.walkers = bytearray(FLAT * 6), []

        def between(low: int, high: int) -> int:
            return low + draw(high - low + 1)

        def pillar(height: int, top: int, code: int) -> None:
            """A column of ground with a wall on it."""
            column = bytearray(FLAT)
            column[GROUND - height : GROUND] = bytes([top] + [code] * (height - 1))
            grid.extend(column)

        obstacles = list("g" * rules.gaps + "p" * rules.pipes + "w" * rules.packs + "s" * rules.stairs)
        for last in range(len(obstacles) - 1, 0, -1):  # shuffled
            other = draw(last + 1)
            obstacles[last], obstacles[other] = obstacles[other], obstacles[last]
        for obstacle in obstacles:
            at, rest = len(grid), between(*rules.rest)
            grid.extend(FLAT * rest)
            coin_row = (GROUND - 4, GROUND - 1, 0)[draw(3)]
            if coin_row:
                grid[at + 16 + coin_row :: 16] = bytes([COIN]) * (rest - 1)
            if obstacle == "g":
                grid.extend(GAP * between(*rules.gap_width))
            elif obstacle == "p":
                height = between(*rules.pipe_height)
                pillar(height, RIM, PIPE)
                pillar(height, RIM, PIPE)
            elif obstacle == "s":
                for height in range(1, between(2, 3) + 1):
                    pillar(height, BLOCK, BLOCK)
            else:
                for _ in range(rules.walkers):
                    at, span = len(grid), 6 * 256 - WALKER_WIDTH
                    self.walkers.append((at << 4, span, draw(2 * span)))
                    grid.extend(FLAT * 6)
                    if difficulty and draw(2):  # something to stand on, coins above it
                        for column in (at + 32, at + 48):
                            grid[column + GROUND - 4], grid[column + GROUND - 5] = BLOCK, COIN
        grid.extend(FLAT * 4)
        self.flag = len(grid) << 4
        pole = bytearray(FLAT)
        pole[GROUND - 8 : GROUND] = bytes([PENNANT] + [POLE] * 7)
        grid.extend(pole)
        grid.extend(FLAT * SCREEN)
        self.grid = grid


# ------------------------------------------------------------------------------------------------------- the rule book

WIDTH, HEIGHT, WALKER_WIDTH, WALKER_HEIGHT = 12 * 16, 16 * 16, 14 * 16, 14 * 16
WALK_SPEED, RUN_SPEED, WALKER_SPEED, FALL_SPEED = 24, 40, 8, 72
JUMP_SPEED, BOUNCE_SPEED = -86, -48
RISE_GRAVITY, GRAVITY = 4, 10  # while the jump is held on the way up; at all other times
TURN = 2  # speed lost per frame by pressing against it; gaining and coasting take 1
STOMP_DEPTH = 8 * 16  # how far below a walker's top feet may be and still stomp it
JUMP_AGAIN = 16  # frames on the ground after which a jump that is still held starts the next
LOOK_BACK = 4 * 256  # the camera keeps this much behind the furthest point, and never goes back
COIN_SCORE, STOMP_SCORE, FLAG_SCORE = 100, 200, 1000


def pace(walker: tuple[int, int, int], clock: int) -> int:
    """x of a walker at a time in frames: a triangle wave, so that nobody far away costs anything."""
    left, span, phase = walker
    way = (clock * WALKER_SPEED + phase) % (2 * span)
    return left + min(way, 2 * span - way)


class MarioGame:
    """The rule book: one game, a level per `start`.

    `levels` is the range of level seeds, end excluded; `size` the side of the picture in pixels; `skip` frames an
    agent step; each game begins with up to `noop_max` frames of nothing. `x` is in 1/16 pixel (`where()` in pixels).
    """

    max_steps = 500
    _STATE = "seed x y vx vy camera clock held score grounded left_facing dead flag".split()

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
        self.difficulty, self.levels, self.size, self.skip, self.noop_max = difficulty, levels, size, skip, noop_max
        self.tile = size // SCREEN
        self.art = gray_art(self.tile)

    def start(self, draw: Stream) -> None:
        """Begin a level drawn from the lane's stream."""
        first, end = self.levels
        self.enter(first + draw(end - first))
        self.play(0, draw(self.noop_max + 1))

    def enter(self, seed: int) -> None:
        """Stand at the start of the level of this seed."""
        self.seed, self.level = seed, Level(seed, self.difficulty)
        self.x, self.y, self.vx, self.vy = START << 8, (GROUND << 8) - HEIGHT, 0, 0
        self.camera, self.clock, self.held, self.score = 0, 0, 0, 0
        self.grounded, self.left_facing, self.dead, self.flag = True, False, False, False
        self.taken, self.stomped = [], []  # places of coins in the grid, indices of walkers
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
        grid, walkers = self.level.grid, self.level.walkers
        x, y, vx, vy, held, grounded = self.x, self.y, self.vx, self.vy, self.held, self.grounded
        clock, camera, flag_at = self.clock, self.camera, self.level.flag - WIDTH
        reach = frames * (RUN_SPEED + WALKER_SPEED) + WIDTH
        near = [
            (i, walker)
            for i, walker in enumerate(walkers)
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
                    vy, held = JUMP_SPEED, JUMP_AGAIN
            vy += RISE_GRAVITY if held and vy < 0 else GRAVITY
            if vy > FALL_SPEED:
                vy = FALL_SPEED

            x += vx
            if vx > 0:
                column = (x + WIDTH - 1) >> 8
                if grid[column << 4 | y >> 8] >= SOLID or grid[column << 4 | (y + HEIGHT - 1) >> 8] >= SOLID:
                    x, vx = (column << 8) - WIDTH, 0
            elif vx < 0:
                column = x >> 8
                if x < camera:
                    x, vx = camera, 0
                elif grid[column << 4 | y >> 8] >= SOLID or grid[column << 4 | (y + HEIGHT - 1) >> 8] >= SOLID:
                    x, vx = (column + 1) << 8, 0

            y += vy
            back, front = x >> 8 << 4, (x + WIDTH - 1) >> 8 << 4
            if vy > 0:
                row = (y + HEIGHT - 1) >> 8
                grounded = grid[back | row] >= SOLID or grid[front | row] >= SOLID
                if grounded:
                    y, vy = (row << 8) - HEIGHT, 0
                elif y >= SCREEN << 8:
                    self.dead = True
                    break
            else:
                grounded = False
                if y < 0:
                    y, vy = 0, 0
                elif grid[back | y >> 8] >= SOLID or grid[front | y >> 8] >= SOLID:
                    y, vy = ((y >> 8) + 1) << 8, 0

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
        self.x, self.y, self.vx, self.vy, self.held, self.grounded = x, y, vx, vy, held, grounded
        self.clock, self.camera = clock, camera

    def _take(self, place: int) -> None:
        """The coin at `place` of the grid is gone."""
        self.taken.append(place)
        self.level.grid[place] = SKY
        column, row = (place >> 4) * self.tile, (place & 15) * self.tile
        self.strip[row : row + self.tile, column : column + self.tile] = self.art[SKY]

    def visible(self) -> list[int]:
        """x of the walkers on the screen."""
        near, far = self.camera - WALKER_WIDTH, self.camera + (SCREEN << 8)
        places = [
            pace(walker, self.clock)
            for i, walker in enumerate(self.level.walkers)
            if walker[0] < far and walker[0] + walker[1] > near and i not in self.stomped
        ]
        return [x for x in places if near < x < far]

    def picture(self, out: np.ndarray) -> None:
        """Paint (size, size) uint8 gray: a window of the strip, and the few who move."""
        tile, shift = self.tile, self.camera * self.tile >> 8
        out[:] = self.strip[:, shift : shift + self.size]
        side, eye = tile * 14 >> 4, max(tile // 6, 1)
        top = GROUND * tile - side
        for x in self.visible():
            left = (x * tile >> 8) - shift
            out[top : GROUND * tile, max(left, 0) : max(left + side, 0)] = 0
            out[top + eye : top + 3 * eye, max(left + eye, 0) : max(left + side - eye, 0)] = 255
        # Who stands with the jump still held has to wait, and crouches: the picture tells what a press will do.
        left, bottom = (self.x * tile >> 8) - shift, (self.y * tile >> 8) + tile
        top, side = bottom - tile + (tile // 3 if self.grounded and self.held else 0), tile * 12 >> 4
        out[top:bottom, left : left + side] = 255
        look = left if self.left_facing else left + side - 2 * eye
        out[top + eye : top + 2 * eye, look : look + 2 * eye] = 0

    def state(self) -> dict[str, Any]:
        """All that this game is, in plain values."""
        return {name: getattr(self, name) for name in self._STATE} | {
            "taken": [*self.taken],
            "stomped": [*self.stomped],
        }

    def restore(self, state: dict[str, Any]) -> None:
        self.enter(state["seed"])
        for name in self._STATE:
            setattr(self, name, state[name])
        self.stomped = [*state["stomped"]]
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
        return "\n".join(
            [f"score {self.score}  distance {self.where() - (START << 4)}", *("".join(row) for row in signs)]
        )

    def rgb(self) -> np.ndarray:
        return render_rgb(self)


def check_timing(skip: int, noop_max: int) -> None:
    if skip < 1:
        raise ValueError(f"skip {skip}: must be at least 1")
    if noop_max < 0:
        raise ValueError(f"noop_max {noop_max}: must be at least 0")


# ------------------------------------------------------------------------------------------------------------ pictures


def gray_art(tile: int) -> np.ndarray:
    """(codes, tile, tile) uint8: each tile in gray. What kills or carries differs most: the abyss is black, ground
    light, seams between tiles show speed."""
    art = np.full((10, tile, tile), 120, np.uint8)
    edge, middle = max(tile // 6, 1), slice(tile // 2 - tile // 6, tile // 2 + tile // 6 + 1)
    art[COIN, middle, middle] = 220
    art[POLE:ABYSS, :, middle] = 255
    art[PENNANT, : tile // 2] = 255
    art[ABYSS] = 0
    art[GRASS], art[SOIL], art[RIM], art[PIPE], art[BLOCK] = 200, 180, 40, 60, 90
    art[GRASS, : 2 * edge] = 235
    art[GRASS : SOIL + 1, :, -edge:] = 150
    art[RIM, :edge] = 150
    art[BLOCK, -edge:] = art[BLOCK, :, -edge:] = 50
    return art


# What people see: rounded rectangles (left, top, right, bottom, radius, color) in tiles from a corner of the thing.
DIRT = ((0, 0, 1, 1, 0, "#a9714b"), (0.2, 0.6, 0.36, 0.7, 0.05, "#8d5a3b"), (0.65, 0.75, 0.81, 0.85, 0.05, "#8d5a3b"))
STICK = ((0.44, 0, 0.56, 1, 0, "#f4f4f4"),)
LOOKS = {
    ABYSS: ((0, 0, 1, 1, 0, "#1e2742"),),
    GRASS: (*DIRT, (0, 0, 1, 0.26, 0, "#5fb84e"), (0, 0, 1, 0.1, 0, "#84d66b")),
    SOIL: DIRT,
    BLOCK: ((0.02, 0.02, 0.98, 0.98, 0.12, "#7d6bb3"), (0.14, 0.12, 0.86, 0.5, 0.1, "#9a8acb")),
    COIN: ((0.24, 0.16, 0.76, 0.84, 0.26, "#c98a12"), (0.3, 0.22, 0.7, 0.78, 0.2, "#f2b632")),
    POLE: STICK,
    PENNANT: (*STICK, (-0.5, 0.1, 0.5, 0.65, 0.08, "#e8554e"), (-0.4, 0.3, 0.1, 0.45, 0.07, "#ffd9d6")),
    RIM: ((0, 0, 2, 1, 0.1, "#2f8f83"), (0.15, 0.06, 0.5, 0.94, 0, "#5cc2b3")),  # both columns of a pipe at once
    PIPE: ((0.12, 0, 1.88, 1, 0, "#2f8f83"), (0.27, 0, 0.62, 1, 0, "#5cc2b3")),
    "cloud": ((0, 0.14, 0.56, 0.7, 0.28, "#f7fbff"), (0.3, -0.14, 1.14, 0.7, 0.4, "#f7fbff"),
              (0.9, 0.1, 1.5, 0.7, 0.28, "#f7fbff")),
    "hill": ((0, 0, 3.4, 4, 1.7, "#93c3a3"),),
    "walker": ((0.08, 0.75, 0.38, 1, 0.1, "#3a2a30"), (0.5, 0.75, 0.8, 1, 0.1, "#3a2a30"),
               (0, 0.13, 0.88, 0.85, 0.36, "#c0445a"), (0.18, 0.36, 0.38, 0.66, 0.1, "white"),
               (0.48, 0.36, 0.68, 0.66, 0.1, "white"), (0.2, 0.46, 0.3, 0.62, 0.05, "#1b1b2f"),
               (0.5, 0.46, 0.6, 0.62, 0.05, "#1b1b2f")),
    "feet": ((0.04, 0.8, 0.32, 1, 0.08, "#5a3d2b"), (0.43, 0.8, 0.71, 1, 0.08, "#5a3d2b")),
    "player": ((0.06, 0.44, 0.69, 0.92, 0.18, "#2f6fdb"), (0, 0.06, 0.75, 0.58, 0.24, "#ffd8b0"),
               (-0.04, -0.08, 0.79, 0.26, 0.17, "#f28a2e")),
    "left": ((-0.24, 0.18, 0.2, 0.26, 0.04, "#d96f17"), (0.1, 0.3, 0.22, 0.46, 0.06, "#1b1b2f")),
    "right": ((0.55, 0.18, 0.99, 0.26, 0.04, "#d96f17"), (0.53, 0.3, 0.65, 0.46, 0.06, "#1b1b2f")),
}  # fmt: skip


def render_rgb(game: MarioGame) -> np.ndarray:
    """The screen as (576, 576, 3) uint8, 48 pixels a tile, for people."""
    from PIL import Image, ImageDraw, ImageFont

    unit, side = 96, 96 * SCREEN  # a tile while drawing: twice as large and then halved, for smooth edges
    image = Image.new("RGB", (side, side))
    draw = ImageDraw.Draw(image)

    def put(look: Any, x: float, y: float) -> None:
        """One of `LOOKS` with its corner at (x, y), in tiles."""
        for left, top, right, bottom, radius, color in LOOKS[look]:
            corners = [round(unit * corner) for corner in (x + left, y + top, x + right, y + bottom)]
            draw.rounded_rectangle((corners[0], corners[1], corners[2] - 1, corners[3] - 1), radius * unit, color)

    for y in range(0, side, 8):
        draw.rectangle(
            (0, y, side, y + 8), tuple(low + rise * y // side for low, rise in ((86, 152), (156, 90), (214, 36)))
        )
    camera = game.camera / 256
    for i in range(5):  # what is far away moves more slowly
        put("cloud", i * 5 - camera / 8 % 5 - 2, 1 + 0.9 * (i % 2))
        put("hill", i * 5 - camera / 3 % 5 - 3, GROUND - 1 - 0.5 * (i % 2))
    codes = np.frombuffer(game.level.grid, np.uint8).reshape(-1, 16)
    for column in range(max(int(camera) - 1, 0), int(camera) + SCREEN + 1):
        for row in range(SCREEN):
            code = codes[column, row]
            if code in LOOKS and not (code in (RIM, PIPE) and codes[column - 1, row] == code):
                put(code, column - camera, row)
    for x in game.visible():
        put("walker", x / 256 - camera, GROUND - 1)
    x, y = game.x / 256 - camera, game.y / 256
    put("feet", x, y)
    crouch = 0.24 if game.grounded and game.held else 0
    put("player", x, y + crouch)
    put("left" if game.left_facing else "right", x, y + crouch)
    text = f"score {game.score}   distance {game.where() - (START << 4)}"
    draw.text((unit / 4, unit / 2), text, "#12324a", ImageFont.load_default(unit * 0.4), anchor="lm")
    return np.asarray(image.resize((side // 2, side // 2), Image.Resampling.BOX))


# -------------------------------------------------------------------------------------------------- many games at once


class MarioBatch:
    """`num_envs` games at once, all arrays NumPy; lane i of a seed plays the same game whatever the others do.

    `reset() -> obs` and `step(action) -> (obs, reward, terminated, truncated, info)`: `action` (N,) integers, `obs`
    (N, stack, size, size) uint8 with the newest frame last (`obs[:, -1]` is what a replay has to store), `reward`
    (N,) float32, the two ends (N,) bool. A finished game starts anew in the same step, its stack filled with its first
    frame; `info["final_obs"]` is what each game looked like before that, and `info` also holds `distance` (pixels),
    `flag`, `score`, `length` and `return` as of then, each (N,). Both observations are the environment's own buffers,
    overwritten by the next step. `actions` is 12 (all), 7 (simple) or 5 (only to the right); `first_lane` is the
    number of lane 0; other keywords are those of `MarioGame`.
    """

    game_class: Any = MarioGame

    def __init__(
        self,
        num_envs: int = 1,
        seed: int = 0,
        first_lane: int = 0,
        actions: int = 7,
        stack: int = 4,
        max_steps: int | None = None,
        **game: Any,
    ) -> None:
        self.max_steps = self.game_class.max_steps if max_steps is None else max_steps
        if num_envs < 1:
            raise ValueError(f"num_envs {num_envs}: must be at least 1")
        if actions not in (5, 7, 12):
            raise ValueError(f"actions {actions}: must be 5, 7 or 12")
        if stack < 1:
            raise ValueError(f"stack {stack}: must be at least 1")
        if self.max_steps < 1:
            raise ValueError(f"max_steps {max_steps}: must be at least 1")
        self.num_envs, self.num_actions = num_envs, actions
        self.games = [self.game_class(**game) for _ in range(num_envs)]
        self.streams = [Stream(seed, first_lane + lane) for lane in range(num_envs)]
        self.episodes = [Episode(0, self.max_steps) for _ in range(num_envs)]
        size = self.games[0].size
        self.obs = np.zeros((num_envs, stack, size, size), np.uint8)
        self.final_obs = np.zeros_like(self.obs)
        self.reward = np.zeros(num_envs, np.float32)
        self.terminated, self.truncated = np.zeros(num_envs, bool), np.zeros(num_envs, bool)
        self.statistics = {
            "distance": np.zeros(num_envs, np.int64),
            "flag": np.zeros(num_envs, bool),
            "score": np.zeros(num_envs, np.int64),
            "length": np.zeros(num_envs, np.int64),
            "return": np.zeros(num_envs, np.float32),
        }
        # Games finished since the caller last zeroed this, and the sums of the five statistics over them.
        self.finished = np.zeros(6)

    def reset(self) -> np.ndarray:
        """Start a new game in every lane."""
        for lane in range(self.num_envs):
            self.start(lane)
        return self.obs

    def start(self, lane: int) -> None:
        """Start a new game in one lane."""
        game = self.games[lane]
        game.start(self.streams[lane])
        self.episodes[lane] = Episode(game.where(), self.max_steps)
        game.picture(self.obs[lane, 0])
        self.obs[lane, 1:] = self.obs[lane, 0]

    def step(self, action: np.ndarray):
        terminated, truncated = self.play(action)
        self.obs[:] = self.final_obs
        for lane in (terminated | truncated).nonzero()[0]:
            self.start(lane)
        info = {name: values.copy() for name, values in self.statistics.items()} | {"final_obs": self.final_obs}
        return self.obs, self.reward.copy(), terminated.copy(), truncated.copy(), info

    def play(self, action: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """A step without the new starts: what it looks like is in `final_obs`."""
        self.final_obs[:, :-1] = self.obs[:, 1:]
        distance, flag, score, length, total = self.statistics.values()
        for lane, choice in enumerate(action.tolist()):
            game, episode = self.games[lane], self.episodes[lane]
            game.play(ACTIONS[choice])
            judged = episode.judge(game.where(), game.dead, game.flag)
            self.reward[lane], self.terminated[lane], self.truncated[lane] = judged
            game.picture(self.final_obs[lane, -1])
            distance[lane], flag[lane], score[lane] = episode.best - episode.start, episode.flag, game.score
            length[lane], total[lane] = episode.length, episode.total
            if self.terminated[lane] or self.truncated[lane]:
                self.finished += [1, *(values[lane] for values in self.statistics.values())]
        return self.terminated, self.truncated

    def state_dict(self) -> dict[str, Any]:
        """All that the games are, as tensors and plain values; the tensors share memory with the environment."""
        lanes = [
            {
                "game": game.state(),
                "stream": [stream.key, stream.draws],
                "episode": {name: getattr(episode, name) for name in Episode.__slots__},
            }
            for game, stream, episode in zip(self.games, self.streams, self.episodes)
        ]
        return {"lanes": lanes, "obs": torch.from_numpy(self.obs), "finished": torch.from_numpy(self.finished)}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self.obs[:], self.finished[:] = saved["obs"].numpy(), saved["finished"].numpy()
        for game, stream, episode, lane in zip(self.games, self.streams, self.episodes, saved["lanes"]):
            game.restore(lane["game"])
            stream.key, stream.draws = lane["stream"]
            for name, value in lane["episode"].items():
                setattr(episode, name, value)


class MarioEnv(gym.Env):
    """One lane of the engine as a Gymnasium environment; keywords as `MarioBatch` has them.

    Observation: (stack, size, size) uint8. `info` holds `distance`, `flag`, `score`, `length` and `return`.
    """

    metadata = {"render_modes": ["rgb_array", "ansi"], "render_fps": 15}
    batch_class = MarioBatch

    def __init__(self, render_mode: str | None = None, lane: int = 0, **settings: Any) -> None:
        self.render_mode, self.lane = render_mode, lane
        self.batch, self.seeded = self.batch_class(1, first_lane=lane, **settings), False
        self.observation_space = gym.spaces.Box(0, 255, self.batch.obs.shape[1:], np.uint8)
        self.action_space = gym.spaces.Discrete(self.batch.num_actions)

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        if seed is not None or not self.seeded:
            seed = int(self.np_random.integers(2**32)) if seed is None else seed
            self.batch.streams, self.seeded = [Stream(seed, self.lane)], True
        obs = self.batch.reset()[0].copy()
        return obs, {"distance": 0, "flag": False, "score": 0, "length": 0, "return": 0.0}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict]:
        batch = self.batch
        if not self.action_space.contains(action):
            raise ValueError(f"action {action}: must be a whole number from 0 to {batch.num_actions - 1}")
        (terminated,), (truncated,) = batch.play(np.array([action]))
        batch.obs[:] = batch.final_obs
        info = {name: values[0].item() for name, values in batch.statistics.items()}
        return batch.obs[0].copy(), float(batch.reward[0]), bool(terminated), bool(truncated), info

    def render(self) -> np.ndarray | str | None:
        if self.render_mode == "ansi":
            return self.batch.games[0].ansi()
        if self.render_mode == "rgb_array":
            return self.batch.games[0].rgb()


class MarioVectorEnv(VectorEnv):
    """`MarioBatch` for users of Gymnasium's vector API: finished games restart in the same step.

    `reset(seed=s)` starts the lanes' streams of seed s: lane i plays what `MarioEnv(lane=i)` plays with that seed.
    A list of seeds is one for each lane: lane i then plays what a `MarioEnv()` of its own plays with seed i of the
    list, and goes on with its stream where that is None.
    """

    metadata = {"render_modes": [], "autoreset_mode": AutoresetMode.SAME_STEP}

    def __init__(self, num_envs: int = 1, render_mode: str | None = None, **settings: Any) -> None:
        self.num_envs, self.render_mode = num_envs, render_mode
        self.batch, self.seeded = MarioBatch(num_envs, **settings), False
        self.single_observation_space = gym.spaces.Box(0, 255, self.batch.obs.shape[1:], np.uint8)
        self.single_action_space = gym.spaces.Discrete(self.batch.num_actions)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)

    def reset(
        self, *, seed: int | list[int | None] | None = None, options: dict | None = None
    ) -> tuple[np.ndarray, dict]:
        lanes = range(self.num_envs)
        same = np.ndim(seed) == 0  # one for all lanes
        if same:
            super().reset(seed=seed)
            seed = [seed] * self.num_envs
        if len(seed) != self.num_envs:
            raise ValueError(f"{len(seed)} seeds for {self.num_envs} games: must be as many, or one for all")
        if not self.seeded:
            drawn = int(self.np_random.integers(2**32))
            self.batch.streams, self.seeded = [Stream(drawn, lane) for lane in lanes], True
        for lane in lanes:
            if seed[lane] is not None:
                self.batch.streams[lane] = Stream(int(seed[lane]), lane if same else 0)
        infos = {name: np.zeros_like(values) for name, values in self.batch.statistics.items()}
        infos |= {f"_{name}": np.ones(self.num_envs, bool) for name in self.batch.statistics}
        return self.batch.reset().copy(), infos

    def step(self, actions: np.ndarray):
        actions, last = np.asarray(actions), self.batch.num_actions - 1
        whole = actions.shape == (self.num_envs,) and actions.dtype.kind in "iu"
        if not whole or actions.min() < 0 or actions.max() > last:
            raise ValueError(f"actions {actions}: must be {self.num_envs} whole numbers from 0 to {last}")
        obs, reward, terminated, truncated, info = self.batch.step(actions)
        final_obs, done = info.pop("final_obs"), terminated | truncated
        # A game that has ended shows its last info beside its last observation; what is left is of the new game.
        infos = {name: np.where(done, np.zeros_like(values), values) for name, values in info.items()}
        infos |= {f"_{name}": np.ones(self.num_envs, bool) for name in info}
        if done.any():
            final = np.full(self.num_envs, None, object)
            for lane in done.nonzero()[0]:
                final[lane] = final_obs[lane].copy()
            final_info = {name: np.where(done, values, np.zeros_like(values)) for name, values in info.items()}
            final_info |= {f"_{name}": done for name in info}
            infos |= {"final_obs": final, "_final_obs": done, "final_info": final_info, "_final_info": done}
        return obs.copy(), reward.astype(np.float64), terminated, truncated, infos

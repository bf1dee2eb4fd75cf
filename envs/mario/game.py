"""A side-scroller like Super Mario Bros.: run, jump, stomp on walkers, reach the flag. Levels are drawn from a seed.

`MarioGame` is one game in plain Python; envs/mario/batch.py steps many of them. There is no vectorized version, because
it would be slower: a frame costs 1.6 us per game here, and about 70 NumPy calls would cost 40 us for any number of
games. Arrays would be faster above 25 games, but a collector process, which has one core, plays 4 to 16.

All physics are integers. Positions are in 1/16 pixel, speeds in 1/16 pixel per frame; x is to the right, y down. A tile
is 16 pixels wide, the screen 12 x 12 tiles. A level is a grid of tile codes.
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

RIGHT = 1  # bits of the buttons that are pressed
LEFT = 2
JUMP = 4
RUN = 8
DOWN = 16  # no effect in this game
UP = 32  # no effect
ACTIONS = (
    0, RIGHT, RIGHT | JUMP, RIGHT | RUN, RIGHT | JUMP | RUN,  # `actions=5`: right only
    JUMP, LEFT,  # `actions=7`: simple
    LEFT | JUMP, LEFT | RUN, LEFT | JUMP | RUN, DOWN, UP,
)  # fmt: skip

PROGRESS_REWARD = 0.01
"""per pixel beyond the furthest position. Running earns 0.1 per step, which is a return of about 3 with gamma 0.97:
similar to death and flag, so rewards need no clipping."""
DEATH_REWARD = -1.0
FLAG_REWARD = 2.0
STUCK_REWARD = -0.5
PATIENCE = 40
"""agent steps without progress until a game is truncated"""

TRAIN_LEVELS = (0, 1000)
"""range of level seeds for training, end exclusive"""
UNSEEN_LEVELS = (1_000_000, 2_000_000)
"""range of level seeds for evaluation only"""


class Episode:
    """Rewards and ends of an episode, for `MarioGame` and the original game alike."""

    __slots__ = ("start", "best", "idle", "length", "total", "flag", "max_steps")

    def __init__(self, x: int, max_steps: int) -> None:
        self.start = x  # in pixels
        self.best = x  # the furthest position so far
        self.idle = 0  # agent steps without progress
        self.length = 0
        self.total = 0.0
        self.flag = False
        self.max_steps = max_steps

    def step(self, x: int, dead: bool, flag: bool) -> tuple[float, bool, bool]:
        """Reward, terminated and truncated of an agent step that ended at `x` (pixels)."""
        gain = max(x - self.best, 0)
        self.best += gain
        self.idle = 0 if gain else self.idle + 1
        self.length += 1
        self.flag = flag
        terminated = dead or flag
        is_stuck = self.idle >= PATIENCE and not terminated
        reward = PROGRESS_REWARD * gain + DEATH_REWARD * dead + FLAG_REWARD * flag + STUCK_REWARD * is_stuck
        self.total += reward
        is_over = is_stuck or self.length >= self.max_steps
        truncated = is_over and not terminated
        return reward, terminated, truncated


# ------------------------------------------------------------------------------------------------------------ the game

WIDTH = 12 * 16
HEIGHT = 16 * 16
WALKER_HEIGHT = 14 * 16
WALK_SPEED = 24
RUN_SPEED = 40
FALL_SPEED = 72  # maximum
JUMP_SPEED = -86
BOUNCE_SPEED = -48
RISE_GRAVITY = 4  # while rising with the jump button held
GRAVITY = 10  # otherwise
TURN = 2  # change of speed per frame when turning; it is 1 for accelerating and slowing down
STOMP_DEPTH = 8 * 16  # maximum distance of the feet below a walker's top that counts as a stomp
JUMP_AGAIN = 16  # frames on the ground until a held jump button starts another jump
LOOK_BACK = 4 * 256  # distance of the player from the left edge of the screen; the camera never moves back
COIN_SCORE = 100
STOMP_SCORE = 200
FLAG_SCORE = 1000


class MarioGame:
    """One game; every `start` draws a level.

    `levels` is the range of level seeds, end exclusive; `size` the side of the picture in pixels; `skip` the frames per
    agent step; `noop_max` the maximum number of no-op frames at the start. Raises ValueError for invalid settings.
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
        """Starts a level drawn from the lane's random stream."""
        first, end = self.levels
        self.enter(first + draw(end - first))
        self.play(0, draw(self.noop_max + 1))

    def enter(self, seed: int) -> None:
        """Puts the player at the start of the level with this seed."""
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
        self.taken = []  # grid indices of collected coins
        self.stomped = []  # indices of walkers
        codes = np.frombuffer(self.level.grid, np.uint8).reshape(-1, 16)
        tiles = self.art[codes[:, :SCREEN].T]  # (row, column, y, x)
        self.strip = tiles.transpose(0, 2, 1, 3).reshape(self.size, -1)  # picture of the whole level

    def where(self) -> int:
        """x of the player in pixels."""
        return self.x >> 4

    def play(self, buttons: int, frames: int | None = None) -> None:
        """Presses `buttons` for `frames` (None: `skip`) or until the game ends. No effect on a finished game."""
        if self.dead or self.flag:
            return
        # Local variables, because an attribute access costs as much as an addition.
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
        near_walkers = [
            (i, walker)
            for i, walker in enumerate(self.level.walkers)
            if walker[0] - reach < x < walker[0] + walker[1] + reach + WALKER_WIDTH and i not in self.stomped
        ]
        direction = (1 if buttons & RIGHT else 0) - (1 if buttons & LEFT else 0)
        top_speed = RUN_SPEED if buttons & RUN else WALK_SPEED
        jump = buttons & JUMP
        if direction:
            self.left_facing = direction < 0
        for _ in range(frames):
            clock += 1
            if direction:
                forward_speed = vx * direction
                if forward_speed < 0:
                    vx += TURN * direction
                elif forward_speed < top_speed:
                    vx += direction
                elif forward_speed > top_speed:
                    vx -= direction
            elif grounded and vx:
                vx += 1 if vx < 0 else -1

            # `held` is the number of frames on the ground until a held button jumps again; 0 after its release.
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
            left_column = x >> 8 << 4
            right_column = (x + WIDTH - 1) >> 8 << 4
            if vy > 0:
                row = (y + HEIGHT - 1) >> 8
                grounded = grid[left_column | row] >= SOLID or grid[right_column | row] >= SOLID
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
                elif grid[left_column | y >> 8] >= SOLID or grid[right_column | y >> 8] >= SOLID:
                    y = ((y >> 8) + 1) << 8
                    vy = 0

            for i, walker in near_walkers:
                gap = pace(walker, clock) - x
                depth = y + HEIGHT - (GROUND << 8) + WALKER_HEIGHT
                if -WALKER_WIDTH < gap < WIDTH and depth > 0:
                    if vy > 0 and depth <= STOMP_DEPTH:
                        vy = BOUNCE_SPEED
                        self.score += STOMP_SCORE
                        self.stomped.append(i)
                        near_walkers.remove((i, walker))
                    else:
                        self.dead = True
                    break
            if self.dead:
                break

            index = (x + WIDTH // 2) >> 8 << 4 | (y + HEIGHT // 2) >> 8
            if grid[index] == COIN:
                self.score += COIN_SCORE
                self._remove_coin(index)
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

    def _remove_coin(self, index: int) -> None:
        """Removes the coin at this index of the grid."""
        self.taken.append(index)
        self.level.grid[index] = SKY
        column = (index >> 4) * self.tile
        row = (index & 15) * self.tile
        self.strip[row : row + self.tile, column : column + self.tile] = self.art[SKY]

    def visible(self) -> list[int]:
        """x of the walkers on the screen, in 1/16 pixel."""
        left_edge = self.camera - WALKER_WIDTH
        right_edge = self.camera + (SCREEN << 8)
        positions = [
            pace(walker, self.clock)
            for i, walker in enumerate(self.level.walkers)
            if walker[0] < right_edge and walker[0] + walker[1] > left_edge and i not in self.stomped
        ]
        return [x for x in positions if left_edge < x < right_edge]

    def picture(self, out: np.ndarray) -> None:
        """Draws the screen to `out` (size, size) uint8 in gray: a window of the strip, walkers and the player."""
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
        # A player that holds the jump button on the ground crouches, so that the picture shows that it cannot jump yet.
        crouch = tile // 3 if self.grounded and self.held else 0
        left = (self.x * tile >> 8) - shift
        bottom = (self.y * tile >> 8) + tile
        top = bottom - tile + crouch
        side = tile * 12 >> 4
        out[top:bottom, left : left + side] = 255
        look = left if self.left_facing else left + side - 2 * eye
        out[top + eye : top + 2 * eye, look : look + 2 * eye] = 0

    def state(self) -> dict[str, Any]:
        """The complete state of the game, in Python numbers and lists."""
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
            self._remove_coin(place)

    def ansi(self) -> str:
        """The screen as text: o player, w walker, # solid, = pipe, * coin, | flag."""
        first = self.camera >> 8
        codes = np.frombuffer(self.level.grid, np.uint8).reshape(-1, 16)
        codes = codes[first : first + SCREEN + 1, :SCREEN]
        signs = np.array(list(" *|> ##==#"))[codes.T]
        for x in self.visible():
            column = (x + WALKER_WIDTH // 2 >> 8) - first
            column = min(max(column, 0), SCREEN)
            signs[GROUND - 1, column] = "w"
        row = min(self.y + HEIGHT // 2 >> 8, SCREEN - 1)
        column = (self.x + WIDTH // 2 >> 8) - first
        signs[row, column] = "o"
        distance = self.where() - (START << 4)
        lines = [f"score {self.score}  distance {distance}"]
        lines += ["".join(row) for row in signs]
        return "\n".join(lines)

    def rgb(self) -> np.ndarray:
        return render_rgb(self)


def check_timing(skip: int, noop_max: int) -> None:
    if skip < 1:
        raise ValueError(f"skip {skip}: must be at least 1")
    if noop_max < 0:
        raise ValueError(f"noop_max {noop_max}: must be at least 0")

"""Levels of the side-scroller, drawn from a seed: tiles, and the walkers who pace among them."""

from dataclasses import dataclass

from envs.streams import Stream

WALKER_WIDTH = 14 * 16  # in 1/16 pixel, as all lengths and speeds; a tile is 256
WALKER_SPEED = 8
SKY = 0
COIN = 1
POLE = 2
PENNANT = 3
ABYSS = 4
GRASS = 5
SOIL = 6
RIM = 7
PIPE = 8
BLOCK = 9
SOLID = GRASS  # this code and all above it block the way
SCREEN = 12  # tiles across and down the screen
GROUND = 10  # first row of the ground
FLAT = bytes([SKY] * GROUND + [GRASS, SOIL] + [SKY] * 4)  # one column of a grid: 12 rows on the screen, 4 below it
GAP = bytes([SKY] * GROUND + [ABYSS, ABYSS] + [SKY] * 4)
COLUMN = len(FLAT)
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
        self.draw = Stream(seed, -1)
        self.rules = DIFFICULTIES[difficulty]
        self.has_ledges = difficulty > 0
        self.grid = bytearray(FLAT * 6)
        self.walkers = []
        for obstacle in self._obstacles():
            self._add_rest()
            if obstacle == "gap":
                self.grid.extend(GAP * self._between(*self.rules.gap_width))
            elif obstacle == "pipe":
                height = self._between(*self.rules.pipe_height)
                self._add_pillar(height, RIM, PIPE)
                self._add_pillar(height, RIM, PIPE)
            elif obstacle == "stairs":
                for height in range(1, self._between(2, 3) + 1):
                    self._add_pillar(height, BLOCK, BLOCK)
            else:
                for _ in range(self.rules.walkers):
                    self._add_walker()
        self.grid.extend(FLAT * 4)
        self.flag = len(self.grid) << 4
        self._add_pillar(8, PENNANT, POLE)
        self.grid.extend(FLAT * SCREEN)

    def _between(self, low: int, high: int) -> int:
        return low + self.draw(high - low + 1)

    def _obstacles(self) -> list[str]:
        """In a random order."""
        rules = self.rules
        obstacles = ["gap"] * rules.gaps + ["pipe"] * rules.pipes + ["pack"] * rules.packs + ["stairs"] * rules.stairs
        for last in range(len(obstacles) - 1, 0, -1):
            other = self.draw(last + 1)
            obstacles[last], obstacles[other] = obstacles[other], obstacles[last]
        return obstacles

    def _add_pillar(self, height: int, top: int, code: int) -> None:
        """A column of ground with a wall on it."""
        column = bytearray(FLAT)
        column[GROUND - height : GROUND] = bytes([top] + [code] * (height - 1))
        self.grid.extend(column)

    def _add_rest(self) -> None:
        """Plain ground, coins above it perhaps."""
        width = self._between(*self.rules.rest)
        first_coin = len(self.grid) + COLUMN
        self.grid.extend(FLAT * width)
        coin_row = (GROUND - 4, GROUND - 1, None)[self.draw(3)]
        if coin_row is not None:
            self.grid[first_coin + coin_row :: COLUMN] = bytes([COIN]) * (width - 1)

    def _add_walker(self) -> None:
        """Six tiles to pace, perhaps with something to stand on and coins above it."""
        start = len(self.grid)
        span = 6 * 256 - WALKER_WIDTH
        self.walkers.append((start << 4, span, self.draw(2 * span)))
        self.grid.extend(FLAT * 6)
        if self.has_ledges and self.draw(2):
            for column in (start + 2 * COLUMN, start + 3 * COLUMN):
                self.grid[column + GROUND - 4] = BLOCK
                self.grid[column + GROUND - 5] = COIN


def pace(walker: tuple[int, int, int], clock: int) -> int:
    """x of a walker at a time in frames: a triangle wave, so that nobody far away costs anything."""
    left, span, phase = walker
    distance = (clock * WALKER_SPEED + phase) % (2 * span)
    return left + min(distance, 2 * span - distance)

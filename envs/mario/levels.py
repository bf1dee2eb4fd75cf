"""Random levels of the side-scroller: tiles and walkers (enemies). A level depends only on its seed and difficulty."""

from dataclasses import dataclass

from envs.streams import Stream

WALKER_WIDTH = 14 * 16  # lengths are in 1/16 pixel, speeds in 1/16 pixel per frame; a tile is 256 wide
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
SOLID = GRASS  # this code and all higher ones are solid
SCREEN = 12  # tiles across and down the screen
GROUND = 10  # first row of the ground
FLAT = bytes([SKY] * GROUND + [GRASS, SOIL] + [SKY] * 4)  # a column of a grid: 12 rows on the screen, 4 below it
GAP = bytes([SKY] * GROUND + [ABYSS, ABYSS] + [SKY] * 4)
COLUMN = len(FLAT)
START = 2  # column where the player starts


@dataclass(frozen=True)
class Difficulty:
    """Numbers and sizes of obstacles. Pairs are (low, high), drawn uniformly, inclusive.

    A jump is 3.4 tiles high and, after a run-up of two tiles, 5 tiles wide. So walls of up to 3 and gaps of up to 5
    tiles make every level solvable.
    """

    gaps: int
    pipes: int
    packs: int
    stairs: int
    gap_width: tuple[int, int]
    pipe_height: tuple[int, int]
    walkers: int
    """in each pack"""
    rest: tuple[int, int]
    """tiles of flat ground before each obstacle, at least 2"""


DIFFICULTIES = (
    # gaps, pipes, packs, stairs, gap_width, pipe_height, walkers, rest
    Difficulty(3, 2, 3, 0, (3, 4), (3, 3), 1, (3, 4)),
    Difficulty(3, 3, 3, 1, (3, 4), (2, 3), 1, (2, 4)),
    Difficulty(4, 3, 4, 1, (3, 4), (2, 3), 2, (2, 4)),
    Difficulty(5, 3, 4, 2, (3, 5), (2, 3), 2, (2, 3)),
)


class Level:
    """One level.

    `grid`: tile codes, 16 bytes per column. The tile at (x, y) is `grid[x >> 8 << 4 | y >> 8]`.
    `walkers`: (left, span, phase) of each. It walks from `left` to `left + span` and back, see `pace`.
    `flag`: x of the pole.
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
                self.grid.extend(GAP * self._randint(*self.rules.gap_width))
            elif obstacle == "pipe":
                height = self._randint(*self.rules.pipe_height)
                self._add_pillar(height, RIM, PIPE)
                self._add_pillar(height, RIM, PIPE)
            elif obstacle == "stairs":
                for height in range(1, self._randint(2, 3) + 1):
                    self._add_pillar(height, BLOCK, BLOCK)
            else:
                for _ in range(self.rules.walkers):
                    self._add_walker()
        self.grid.extend(FLAT * 4)
        self.flag = len(self.grid) << 4
        self._add_pillar(8, PENNANT, POLE)
        self.grid.extend(FLAT * SCREEN)

    def _randint(self, low: int, high: int) -> int:
        """Uniform in [low, high]."""
        return low + self.draw(high - low + 1)

    def _obstacles(self) -> list[str]:
        """The obstacles in random order (Fisher-Yates)."""
        rules = self.rules
        obstacles = ["gap"] * rules.gaps
        obstacles += ["pipe"] * rules.pipes
        obstacles += ["pack"] * rules.packs
        obstacles += ["stairs"] * rules.stairs
        for last in range(len(obstacles) - 1, 0, -1):
            other = self.draw(last + 1)
            obstacles[last], obstacles[other] = obstacles[other], obstacles[last]
        return obstacles

    def _add_pillar(self, height: int, top: int, code: int) -> None:
        """Adds a column of ground with a wall of `height` tiles."""
        column = bytearray(FLAT)
        wall = [top] + [code] * (height - 1)
        column[GROUND - height : GROUND] = bytes(wall)
        self.grid.extend(column)

    def _add_rest(self) -> None:
        """Adds flat ground, in two of three cases with a row of coins."""
        width = self._randint(*self.rules.rest)
        first_coin = len(self.grid) + COLUMN
        self.grid.extend(FLAT * width)
        coin_rows = (GROUND - 4, GROUND - 1, None)
        coin_row = coin_rows[self.draw(3)]
        if coin_row is not None:
            coins = bytes([COIN] * (width - 1))
            self.grid[first_coin + coin_row :: COLUMN] = coins

    def _add_walker(self) -> None:
        """Adds six tiles of ground with a walker, in higher difficulties at random with a ledge and coins."""
        start = len(self.grid)
        span = 6 * 256 - WALKER_WIDTH
        phase = self.draw(2 * span)
        self.walkers.append((start << 4, span, phase))
        self.grid.extend(FLAT * 6)
        if self.has_ledges and self.draw(2):
            for column in (start + 2 * COLUMN, start + 3 * COLUMN):
                self.grid[column + GROUND - 4] = BLOCK
                self.grid[column + GROUND - 5] = COIN


def pace(walker: tuple[int, int, int], clock: int) -> int:
    """x of a walker at time `clock` in frames. It is a triangle wave, so walkers out of sight need no updates."""
    left, span, phase = walker
    distance = (clock * WALKER_SPEED + phase) % (2 * span)
    return left + min(distance, 2 * span - distance)

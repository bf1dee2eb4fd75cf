"""Levels of the side-scroller, drawn from a seed: tiles, and the walkers who pace among them."""

from dataclasses import dataclass

from envs.streams import Stream

WALKER_WIDTH = 14 * 16  # in 1/16 pixel, as all lengths and speeds; a tile is 256
WALKER_SPEED = 8
SKY, COIN, POLE, PENNANT, ABYSS, GRASS, SOIL, RIM, PIPE, BLOCK = range(10)
SOLID = GRASS  # this code and all above it block the way
SCREEN = 12  # tiles across and down the screen
GROUND = 10  # first row of the ground
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
        draw = Stream(seed, -1)
        rules = DIFFICULTIES[difficulty]
        grid = bytearray(FLAT * 6)
        self.walkers = []

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
            at = len(grid)
            rest = between(*rules.rest)
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
                    at = len(grid)
                    span = 6 * 256 - WALKER_WIDTH
                    self.walkers.append((at << 4, span, draw(2 * span)))
                    grid.extend(FLAT * 6)
                    if difficulty and draw(2):  # something to stand on, coins above it
                        for column in (at + 32, at + 48):
                            grid[column + GROUND - 4] = BLOCK
                            grid[column + GROUND - 5] = COIN
        grid.extend(FLAT * 4)
        self.flag = len(grid) << 4
        pole = bytearray(FLAT)
        pole[GROUND - 8 : GROUND] = bytes([PENNANT] + [POLE] * 7)
        grid.extend(pole)
        grid.extend(FLAT * SCREEN)
        self.grid = grid


def pace(walker: tuple[int, int, int], clock: int) -> int:
    """x of a walker at a time in frames: a triangle wave, so that nobody far away costs anything."""
    left, span, phase = walker
    way = (clock * WALKER_SPEED + phase) % (2 * span)
    return left + min(way, 2 * span - way)

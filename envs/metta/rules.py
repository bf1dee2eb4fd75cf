"""The rules of a MettaGrid arena of July 2025: items, actions, tokens, converters, and in what arenas differ.

Agents dig ore from mines, turn it into batteries at generators and batteries into hearts at altars; an armory sells
armor and a lasery lasers, and a laser freezes another agent and takes all it carries.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

# ------------------------------------------------------------------------------------------------------ items, actions

COLORS = ("red", "blue", "green")
ITEMS = (
    "ore_red", "ore_blue", "ore_green",
    "battery_red", "battery_blue", "battery_green",
    "heart", "armor", "laser", "blueprint",
)  # fmt: skip
HEART = ITEMS.index("heart")
ARMOR = ITEMS.index("armor")
LASER = ITEMS.index("laser")
CARRY = tuple(255 if item == "heart" else 50 for item in ITEMS)  # most that an agent holds

ACTION_TYPES = {  # and the number of arguments of each
    "attack": 10,
    "attack_nearest": 1,
    "change_color": 4,
    "get_output": 1,
    "move": 2,
    "noop": 1,
    "put_recipe_items": 1,
    "rotate": 4,
    "swap": 1,
}
ACTIONS = tuple((kind, argument) for kind, number in enumerate(ACTION_TYPES.values()) for argument in range(number))
NEAREST = ACTIONS.index((1, 0))  # all before it are attacks, too
PAINT = ACTIONS.index((2, 0))  # the first of four: one up, one down, double, half
GET = ACTIONS.index((3, 0))
FORWARD = ACTIONS.index((4, 0))
BACK = ACTIONS.index((4, 1))
NOOP = ACTIONS.index((5, 0))
PUT = ACTIONS.index((6, 0))
ROTATE = ACTIONS.index((7, 0))  # the first of four, in the order of MOVES
SWAP = ACTIONS.index((8, 0))

MOVES = ((-1, 0), (1, 0), (0, -1), (0, 1))  # up, down, left, right as (row, column)
RIGHT_OF = (3, 2, 0, 1)  # the direction at an agent's right hand, by its heading
REACH = tuple((1 + n // 3, 1 - n % 3) for n in range(9))  # attack n + 1 hits (steps ahead, steps to the right)
NEAREST_FIRST = (1, 0, 2, 4, 3, 5, 7, 6, 8)  # order in which the nearest is looked for: the middle before the sides

# --------------------------------------------------------------------------------------------- observations, statistics

FEATURES = (
    "type", "group", "hp", "frozen", "orientation", "color", "busy", "swappable",
    "episode", "last_action", "last_argument", "last_reward", *ITEMS,
)  # fmt: skip
TYPE = FEATURES.index("type")
GROUP = FEATURES.index("group")
FROZEN = FEATURES.index("frozen")
ORIENTATION = FEATURES.index("orientation")
COLOR = FEATURES.index("color")
BUSY = FEATURES.index("busy")
SWAPPABLE = FEATURES.index("swappable")
EPISODE = FEATURES.index("episode")
FIRST_ITEM = FEATURES.index(ITEMS[0])

TOKENS = 200  # slots of an observation
HEADER = 4  # of them about the episode: its progress, the last action, its argument, the last reward
VIEW = 5  # how many cells an agent sees each way
CENTRE = VIEW << 4 | VIEW  # an agent's own cell in its window


def _by_distance(cell: tuple[int, int]) -> tuple:
    return abs(cell[0]) + abs(cell[1]), cell


_STEPS = range(-VIEW, VIEW + 1)
WINDOW = sorted(((row, column) for row in _STEPS for column in _STEPS), key=_by_distance)

STATS = tuple(f"{item}.{change}" for change in ("get", "put", "stolen", "lost") for item in ITEMS)
STATS += (
    "success", "failed",  # actions
    "attack.win", "attack.loss", "attack.blocked", "frozen_ticks",
    "tokens_written", "tokens_dropped",
    "hundredths",  # of reward
)  # fmt: skip

# ---------------------------------------------------------------------------------------------------------- converters


@dataclass(frozen=True)
class Recipe:
    """What a converter turns into what: one tick of work, then `cooldown` ticks of rest; it holds `max_output`."""

    type_id: int
    inputs: Mapping[str, int]
    outputs: Mapping[str, int]
    cooldown: int
    max_output: int = 5
    initial: int = 0
    """of each output at the start"""


TYPE_IDS = {"agent": 0, "wall": 1, "block": 14}
RECIPES = {
    "mine_red": Recipe(2, {}, {"ore_red": 1}, 50),
    "mine_blue": Recipe(3, {}, {"ore_blue": 1}, 50),
    "mine_green": Recipe(4, {}, {"ore_green": 1}, 50),
    "generator_red": Recipe(5, {"ore_red": 1}, {"battery_red": 1}, 25),
    "generator_blue": Recipe(6, {"ore_blue": 1}, {"battery_blue": 1}, 25),
    "generator_green": Recipe(7, {"ore_green": 1}, {"battery_green": 1}, 25),
    "altar": Recipe(8, {"battery_red": 3}, {"heart": 1}, 10),
    "armory": Recipe(9, {"ore_red": 3}, {"armor": 1}, 10),
    "lasery": Recipe(10, {"ore_red": 1, "battery_red": 2}, {"laser": 1}, 10),
    "lab": Recipe(11, {"ore_red": 3, "battery_red": 3}, {"blueprint": 1}, 5),
    "factory": Recipe(12, {"blueprint": 1, "ore_red": 5, "battery_red": 5}, {"armor": 5, "laser": 5}, 5),
    "temple": Recipe(13, {"heart": 1, "blueprint": 1}, {"heart": 5}, 5),
}
EASY_RECIPES = {
    "altar": Recipe(8, {"battery_red": 1}, {"heart": 1}, 10),
    "armory": Recipe(9, {"ore_red": 1}, {"armor": 1}, 10),
    "lasery": Recipe(10, {"ore_red": 1}, {"laser": 1}, 10),
}

REWARDS = {  # hundredths for each item held, and how many of it count
    "hearts": {"heart": (100, 1000)},
    "work": {},
    "shaped": {
        "ore_red": (10, 1),
        "ore_blue": (10, 1),
        "ore_green": (10, 1),
        "battery_red": (80, 1),
        "battery_blue": (80, 1),
        "battery_green": (80, 1),
        "laser": (50, 1),
        "armor": (50, 1),
        "blueprint": (50, 1),
        "heart": (100, 1000),
    },
}
# Hundredths for each item put into a converter, divided by 1 + those that wait there already, and for each got from it.
# What makes a converter work pays most, so that nobody does best by waiting for what others have put in. An altar pays
# as well as a generator: at 60, agents of one seed in three never brought a battery to one.
WORK_REWARDS = {
    "mine_red": (0, 10),
    "generator_red": (110, 10),
    "altar": (110, 10),
}

# -------------------------------------------------------------------------------------------------------------- arenas

# Codes in a cell of the batched map. From FIRST_CONVERTER on each converter has its own, then each agent.
EMPTY = 0
WALL = 1
BLOCK = 2
FIRST_CONVERTER = 3

# Where the draws of an episode begin: one for each ...
DRAW_CELL = 0
DRAW_COUNT = 1 << 15  # instance and kind of object
DRAW_ROOM = 1 << 16  # instance with terrain
DRAW_PILLAR = 1 << 17  # cell with terrain
DRAW_LENGTH = 1 << 19  # first episode
DRAW_ORDER = 1 << 20  # step

ARENA_OBJECTS = {
    "mine_red": 10,
    "generator_red": 5,
    "altar": 5,
    "lasery": 1,
    "armory": 1,
    "block": 20,
    "wall": 20,
}


@dataclass(frozen=True)
class Rules:
    """Everything in which one arena differs from another.

    Raises ValueError for rules that no game can be played by.
    """

    instances: int = 1
    """copies of the arena in one game, 1 to 4, side by side in rows of two"""
    size: int = 25
    """cells along a side of an instance, 5 to 60; walls five thick stand around, so that no window leaves the map"""
    agents: int = 6
    """agents of an instance"""
    objects: Mapping[str, int | tuple[int, int]] = field(default_factory=lambda: dict(ARENA_OBJECTS))
    """how many of each thing an instance holds: converters of `recipes`, "block", "wall"; (low, high) is drawn"""
    separate: bool = False
    """walls between the instances too, so that nobody sees or meets the others"""
    terrain: bool = False
    """each instance gets walls of its own pattern, from open field to labyrinth; all free cells stay connected"""
    easy: bool = False
    """altar, armory and lasery ask for one item only"""
    rewards: str = "hearts"
    """"hearts" (1 a heart), "shaped" (also 0.1 for ore, 0.8 for a battery, 0.5 for gear; the first of each kind) or
    "work" (`WORK_REWARDS`: all that is put and got on the way to a heart, whoever has the heart in the end)"""
    recipes: Mapping[str, Recipe] = field(default_factory=dict)
    """converters other than the usual ones"""
    freeze: int = 10
    """turns an agent hit by a laser loses"""
    max_steps: int = 1000
    """steps until truncation"""
    random_first_length: bool = True
    """cut the first episode of a stream somewhere at random, so that not all arenas end at once"""

    def __post_init__(self) -> None:
        if not 1 <= self.instances <= 4:
            raise ValueError(f"instances {self.instances}: must be 1 to 4")
        if not 5 <= self.size <= 60:
            raise ValueError(f"size {self.size}: must be 5 to 60")
        if self.agents < 1:
            raise ValueError(f"agents {self.agents}: must be at least 1")
        if self.rewards not in REWARDS:
            raise ValueError(f'rewards "{self.rewards}": must be {", ".join(REWARDS)}')
        if not 1 <= self.max_steps <= 30_000:
            raise ValueError(f"max_steps {self.max_steps}: must be 1 to 30,000")
        if not 1 <= self.freeze <= 30_000:
            raise ValueError(f"freeze {self.freeze}: must be 1 to 30,000")
        for name in self.objects:
            if name not in self.book and name not in ("block", "wall"):
                raise ValueError(f'objects "{name}": must be one of {", ".join([*self.book, "block", "wall"])}')
            low, high = self.span(name)
            if not 0 <= low <= high:
                raise ValueError(f"objects {name}={self.objects[name]}: must be a number or (low, high)")
        self._check_space()
        if self.num_codes > 256:
            number = self.num_codes - FIRST_CONVERTER
            raise ValueError(f"{number} converters and agents in all instances: must be 253 or less")

    def _check_space(self) -> None:
        pieces = self.agents + sum(self.span(name)[1] for name in self.objects)
        space = self.free_cells(self.size)
        if pieces > space:
            sizes = [size for size in range(5, 61) if pieces <= self.free_cells(size)]
            advice = f"size {sizes[0]} would do" if sizes else f"no size holds more than {self.free_cells(60)}"
            raise ValueError(f"size {self.size} has room for {space} agents and objects, not {pieces}: {advice}")

    @property
    def book(self) -> dict[str, Recipe]:
        """The recipe of every converter there may be, by its name."""
        book = dict(RECIPES)
        if self.easy:
            book.update(EASY_RECIPES)
        book.update(self.recipes)
        return book

    def span(self, name: str) -> tuple[int, int]:
        """Fewest and most things called `name` in an instance."""
        number = self.objects[name]
        return (number, number) if isinstance(number, int) else tuple(number)

    def free_cells(self, size: int) -> int:
        """Cells that are free in an instance whatever its terrain."""
        pillars = ((size - 1) // 2) ** 2 if self.terrain else 0
        return size**2 - 2 * pillars  # each has a wall beside it

    @property
    def converters(self) -> list[str]:
        """Names of the converters that one instance may hold."""
        return [name for name in self.objects if name in self.book for _ in range(self.span(name)[1])]

    @property
    def num_agents(self) -> int:
        """Agents of a game."""
        return self.instances * self.agents

    @property
    def first_agent(self) -> int:
        """Code of the first agent."""
        return FIRST_CONVERTER + self.instances * len(self.converters)

    @property
    def num_codes(self) -> int:
        return self.first_agent + self.num_agents

    @property
    def corners(self) -> list[tuple[int, int]]:
        """Row and column of each instance's first cell."""
        pitch = self.size + (VIEW if self.separate else 0)
        return [(VIEW + i // 2 * pitch, VIEW + i % 2 * pitch) for i in range(self.instances)]

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of the whole map."""
        last_row = max(row for row, _ in self.corners)
        last_column = max(column for _, column in self.corners)
        return last_row + self.size + VIEW, last_column + self.size + VIEW

    @property
    def item_rewards(self) -> list[tuple[int, int]]:
        """For each item, the hundredths of reward for holding one and how many of it count."""
        rewards = REWARDS[self.rewards]
        return [rewards.get(item, (0, 0)) for item in ITEMS]

    def work_reward(self, name: str) -> tuple[int, int]:
        """Hundredths for an item put into a converter and for one got from it."""
        return WORK_REWARDS.get(name, (0, 0)) if self.rewards == "work" else (0, 0)


VARIANTS: dict[str, dict[str, Any]] = {
    "MettaArena-v0": {},
    # As many altars as can be visited in time: each holds one heart, and nobody has batteries to make another.
    "MettaNavigation-v0": dict(
        instances=4,
        agents=1,
        separate=True,
        terrain=True,
        objects={"altar": (10, 50)},
        recipes={"altar": Recipe(8, {"battery_red": 3}, {"heart": 1}, cooldown=1000, initial=1)},
    ),
}

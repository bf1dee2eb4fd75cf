"""Rules of the MettaGrid arena (https://github.com/Metta-AI/mettagrid, July 2025): items, actions, tokens, converters.

Agents take ore from mines, turn it into batteries at generators, and batteries into hearts at altars. An armory makes
armor, a lasery lasers. A laser freezes another agent and takes its items; armor protects against it.
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

ACTION_TYPES = {  # number of arguments
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
NEAREST = ACTIONS.index((1, 0))  # the last attack; the actions before it attack a fixed cell
PAINT = ACTIONS.index((2, 0))  # the first of four: color + 1, color - 1, color * 2, color // 2
GET = ACTIONS.index((3, 0))
FORWARD = ACTIONS.index((4, 0))
BACK = ACTIONS.index((4, 1))
NOOP = ACTIONS.index((5, 0))
PUT = ACTIONS.index((6, 0))
ROTATE = ACTIONS.index((7, 0))  # the first of four, in the order of MOVES
SWAP = ACTIONS.index((8, 0))

MOVES = (  # (row, column) by heading
    (-1, 0),  # up
    (1, 0),  # down
    (0, -1),  # left
    (0, 1),  # right
)
RIGHT_OF = (3, 2, 0, 1)  # the heading after a right turn, by heading
REACH = tuple((1 + n // 3, 1 - n % 3) for n in range(9))  # target of attack n + 1: (steps ahead, steps to the right)
NEAREST_FIRST = (1, 0, 2, 4, 3, 5, 7, 6, 8)  # order of REACH in which "attack_nearest" searches for a target

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

TOKENS = 200  # tokens of an observation
HEADER = 4  # of them about the episode: progress, last action, its argument, last reward
VIEW = 5  # cells that an agent sees in each direction
CENTRE = VIEW << 4 | VIEW  # position of an agent's own cell in its window


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
    """Inputs and outputs of a converter. A conversion is one tick of work and `cooldown` ticks of rest."""

    type_id: int
    inputs: Mapping[str, int]
    outputs: Mapping[str, int]
    cooldown: int
    max_output: int = 5
    """no new conversion while this many outputs are in the converter"""
    initial: int = 0
    """number of each output at the start"""


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

REWARDS = {  # by item: hundredths of reward, and the maximum number that is rewarded
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
# Hundredths of reward for each item put into a converter, divided by 1 + inputs already there, and for each item taken
# out. Putting is rewarded most, so that it does not pay to wait for the inputs of others. An altar is worth as much as
# a generator: with 60, agents of one seed in three never brought a battery to an altar.
WORK_REWARDS = {
    "mine_red": (0, 10),
    "generator_red": (110, 10),
    "altar": (110, 10),
}

# -------------------------------------------------------------------------------------------------------------- arenas

# Cell codes of the batched map. Each converter has its own code, from FIRST_CONVERTER on, and after them each agent.
EMPTY = 0
WALL = 1
BLOCK = 2
FIRST_CONVERTER = 3

# First numbers of an episode's random draws. There is one draw for each ...
DRAW_CELL = 0  # cell
DRAW_COUNT = 1 << 15  # instance and kind of object
DRAW_ROOM = 1 << 16  # instance with terrain or a plan
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
    """Settings of a game. Raises ValueError for settings without a valid game."""

    instances: int = 1
    """copies of the arena in a game, 1 to 4, in rows of two"""
    size: int = 25
    """cells along a side of an instance, 5 to 60; around them are walls of 5 cells, so that no window leaves the map"""
    agents: int = 6
    """agents per instance"""
    objects: Mapping[str, int | tuple[int, int]] = field(default_factory=lambda: dict(ARENA_OBJECTS))
    """number of each object per instance: converters, "block" and "wall"; drawn uniformly if (low, high), inclusive"""
    separate: bool = False
    """walls between the instances, so that their agents cannot see or meet each other"""
    terrain: bool = False
    """random walls in each instance, from open field to labyrinth; all free cells are connected"""
    plan: tuple[str, ...] = ()
    """the map of an instance, mirrored at random, instead of random cells: "#" is a wall, "@" an agent, "." free, the
    first letter of an object's name that object"""
    view: int = VIEW
    """cells that an agent sees in each direction, at most 5"""
    carry: int = 50
    """most items of a kind that an agent can carry; of hearts 255"""
    easy: bool = False
    """altar, armory and lasery need only one item"""
    rewards: str = "hearts"
    """"hearts" (1 per heart), "shaped" (also, for the first of each kind, 0.1 for ore, 0.8 for a battery, 0.5 for
    other items) or "work" (`WORK_REWARDS`: for items put and taken on the way to a heart)"""
    recipes: Mapping[str, Recipe] = field(default_factory=dict)
    """recipes that replace or extend the standard ones"""
    freeze: int = 10
    """turns that an agent hit by a laser loses"""
    max_steps: int = 1000
    """steps until truncation"""
    random_first_length: bool = True
    """the first episode of a stream has a random length, so that arenas are truncated at different times"""

    def __post_init__(self) -> None:
        if not 1 <= self.instances <= 4:
            raise ValueError(f"instances {self.instances}: must be 1 to 4")
        if not 5 <= self.size <= 60:
            raise ValueError(f"size {self.size}: must be 5 to 60")
        if self.agents < 1:
            raise ValueError(f"agents {self.agents}: must be at least 1")
        if not 1 <= self.view <= VIEW:
            raise ValueError(f"view {self.view}: must be 1 to {VIEW}")
        if not 1 <= self.carry <= 255:
            raise ValueError(f"carry {self.carry}: must be 1 to 255")
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
        if self.plan:
            self._check_plan()
        self._check_space()
        if self.num_codes > 256:
            number = self.num_codes - FIRST_CONVERTER
            raise ValueError(f"{number} converters and agents in all instances: must be 253 or less")

    def _check_plan(self) -> None:
        text = "".join(self.plan)
        numbers = {"@": self.agents}
        for name in self.objects:
            if name[0] in numbers:
                raise ValueError(f'objects "{name}": another one in the plan begins with "{name[0]}" too')
            numbers[name[0]] = self.span(name)[1]
        if len(text) != self.size**2 or any(text.count(letter) != number for letter, number in numbers.items()):
            raise ValueError(f"size {self.size}, agents {self.agents}: not those of the plan")

    def _check_space(self) -> None:
        pieces = self.agents + sum(self.span(name)[1] for name in self.objects)
        space = self.free_cells(self.size)
        if pieces > space:
            sizes = [size for size in range(5, 61) if pieces <= self.free_cells(size)]
            advice = f"size {sizes[0]} would do" if sizes else f"no size holds more than {self.free_cells(60)}"
            raise ValueError(f"size {self.size} has room for {space} agents and objects, not {pieces}: {advice}")

    @property
    def book(self) -> dict[str, Recipe]:
        """Recipes of all converters by name."""
        book = dict(RECIPES)
        if self.easy:
            book.update(EASY_RECIPES)
        book.update(self.recipes)
        return book

    def span(self, name: str) -> tuple[int, int]:
        """Minimum and maximum number of objects `name` in an instance."""
        number = self.objects[name]
        return (number, number) if isinstance(number, int) else tuple(number)

    def free_cells(self, size: int) -> int:
        """Minimum number of free cells in an instance."""
        pillars = ((size - 1) // 2) ** 2 if self.terrain else 0
        return size**2 - 2 * pillars  # each pillar has one wall

    @property
    def plan_cells(self) -> list[int]:
        """Cells of the plan for agents, for each kind of object, and free ones."""
        text = "".join(self.plan)
        letters = ["@", *(name[0] for name in self.objects), "."]
        return [cell for letter in letters for cell in range(len(text)) if text[cell] == letter]

    @property
    def window(self) -> list[tuple[int, int]]:
        """Cells that an agent sees, as (row, column) from its own, nearest first."""
        return [cell for cell in WINDOW if max(map(abs, cell)) <= self.view]

    @property
    def capacity(self) -> list[int]:
        """By item: the maximum in an agent's inventory."""
        return [255 if item == "heart" else self.carry for item in ITEMS]

    @property
    def converters(self) -> list[str]:
        """Names of the converters of one instance, at their maximum numbers."""
        return [name for name in self.objects if name in self.book for _ in range(self.span(name)[1])]

    @property
    def num_agents(self) -> int:
        """Agents in a game."""
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
        """By item: hundredths of reward for each one held, and the maximum number that is rewarded."""
        rewards = REWARDS[self.rewards]
        return [rewards.get(item, (0, 0)) for item in ITEMS]

    def work_reward(self, name: str) -> tuple[int, int]:
        """Hundredths of reward for an item put into a converter and for one taken out."""
        return WORK_REWARDS.get(name, (0, 0)) if self.rewards == "work" else (0, 0)


MEMORY_PLAN = (
    "#a#####.#",
    "#.#####.#",
    "#.#####.#",
    "#.##m##.#",
    "#...@...#",
    "#.##m##.#",
    "#.#####.#",
    "#.#####.#",
    "#.#####.#",
)
VARIANTS: dict[str, dict[str, Any]] = {
    "MettaArena-v0": {},
    # Each altar has one heart, and there are no batteries to make another. So the score is the number of altars found.
    "MettaNavigation-v0": dict(
        instances=4,
        agents=1,
        separate=True,
        terrain=True,
        objects={"altar": (10, 50)},
        recipes={"altar": Recipe(8, {"battery_red": 3}, {"heart": 1}, cooldown=1000, initial=1)},
    ),
    # The altar is at one of four ends, out of sight, for the whole episode. An agent carries one piece of ore, so it
    # comes by again and again: it pays to remember which end it was.
    "MettaMemory-v0": dict(
        instances=4,
        agents=1,
        separate=True,
        size=9,
        view=1,
        carry=1,
        plan=MEMORY_PLAN,
        objects={"mine_red": 2, "altar": 1},
        recipes={
            "mine_red": Recipe(2, {}, {"ore_red": 1}, cooldown=0),
            "altar": Recipe(8, {"ore_red": 1}, {"heart": 1}, cooldown=0),
        },
    ),
}

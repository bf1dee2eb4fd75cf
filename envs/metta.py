"""A MettaGrid arena of July 2025 twice: the rule book (one arena in plain Python) and the same rules in torch, batched.

Agents dig ore from mines, turn it into batteries at generators and batteries into hearts at altars; an armory sells
armor and a lasery lasers, and a laser freezes another agent and takes all it carries. Both versions play the same game:
same actions and same (seed, lane) give the same tokens. Every draw is a hash of (seed, lane, episode, what for).

An observation is 200 tokens of three bytes, [row << 4 | column in the 11x11 window, feature, value], nearest first:
four about the agent's episode, then those of every thing in sight; 255 fills the rest. Rewards are in hundredths there.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

COLORS = ("red", "blue", "green")
ITEMS = tuple(f"{item}_{color}" for item in ("ore", "battery") for color in COLORS)
ITEMS += ("heart", "armor", "laser", "blueprint")
HEART, ARMOR, LASER = (ITEMS.index(item) for item in ("heart", "armor", "laser"))
FEATURES = ("type", "group", "hp", "frozen", "orientation", "color", "busy", "swappable", "episode", "last_action",
            "last_argument", "last_reward", *ITEMS)  # fmt: skip
TYPE, GROUP, FROZEN, ORIENTATION, COLOR, BUSY, SWAPPABLE, EPISODE = (
    FEATURES.index(feature)
    for feature in ("type", "group", "frozen", "orientation", "color", "busy", "swappable", "episode")
)
FIRST_ITEM = FEATURES.index(ITEMS[0])
ACTION_TYPES = {"attack": 10, "attack_nearest": 1, "change_color": 4, "get_output": 1, "move": 2, "noop": 1,
                "put_recipe_items": 1, "rotate": 4, "swap": 1}  # fmt: skip
ACTIONS = tuple((kind, argument) for kind, number in enumerate(ACTION_TYPES.values()) for argument in range(number))
NEAREST, PAINT, GET, FORWARD, BACK, NOOP, PUT, ROTATE, SWAP = 10, 11, 15, 16, 17, 18, 19, 20, 24
MOVES = ((-1, 0), (1, 0), (0, -1), (0, 1))  # up, down, left, right as (row, column)
RIGHT_OF = (3, 2, 0, 1)  # the direction at an agent's right hand, by its heading
# Attack n hits (steps ahead, steps to the right); the nearest is looked for in the middle before the sides.
REACH = tuple((1 + n // 3, 1 - n % 3) for n in range(9))
NEAREST_FIRST = (1, 0, 2, 4, 3, 5, 7, 6, 8)
TOKENS, VIEW = 200, 5  # slots of an observation, and how many cells an agent sees each way
WINDOW = sorted(
    ((row, column) for row in range(-VIEW, VIEW + 1) for column in range(-VIEW, VIEW + 1)),
    key=lambda cell: (abs(cell[0]) + abs(cell[1]), cell),
)
CENTRE = VIEW << 4 | VIEW
CARRY = tuple(255 if item == "heart" else 50 for item in ITEMS)  # most that an agent holds
STATS = tuple(f"{item}.{what}" for what in ("get", "put", "stolen", "lost") for item in ITEMS)
STATS += ("success", "failed", "attack.win", "attack.loss", "attack.blocked", "frozen_ticks", "tokens_written",
          "tokens_dropped", "hundredths")  # fmt: skip
# Those that are counted together.
ATTACKER_STATS = ("frozen_ticks", "laser.lost", "attack.win", "attack.blocked", *(f"{item}.stolen" for item in ITEMS))
VICTIM_STATS = ("armor.lost", "attack.loss", *(f"{item}.lost" for item in ITEMS))
TRADE_STATS = tuple(f"{item}.{what}" for what in ("get", "put", "lost") for item in ITEMS)
EMPTY, WALL, BLOCK, FIRST = 0, 1, 2, 3  # what a cell of the batched map holds; FIRST is the first converter
# Where the draws of an episode begin: one for each cell, kind of object, room, pillar, first length, order of a step.
DRAW_CELL, DRAW_COUNT, DRAW_ROOM, DRAW_PILLAR, DRAW_LENGTH, DRAW_ORDER = 0, 1 << 15, 1 << 16, 1 << 17, 1 << 19, 1 << 20


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


RECIPES = {
    f"mine_{color}": Recipe(2 + i, {}, {f"ore_{color}": 1}, 50) for i, color in enumerate(COLORS)
} | {
    f"generator_{color}": Recipe(5 + i, {f"ore_{color}": 1}, {f"battery_{color}": 1}, 25)
    for i, color in enumerate(COLORS)
} | {
    "altar": Recipe(8, {"battery_red": 3}, {"heart": 1}, 10),
    "armory": Recipe(9, {"ore_red": 3}, {"armor": 1}, 10),
    "lasery": Recipe(10, {"ore_red": 1, "battery_red": 2}, {"laser": 1}, 10),
    "lab": Recipe(11, {"ore_red": 3, "battery_red": 3}, {"blueprint": 1}, 5),
    "factory": Recipe(12, {"blueprint": 1, "ore_red": 5, "battery_red": 5}, {"armor": 5, "laser": 5}, 5),
    "temple": Recipe(13, {"heart": 1, "blueprint": 1}, {"heart": 5}, 5),
}  # fmt: skip
EASY = {
    "altar": Recipe(8, {"battery_red": 1}, {"heart": 1}, 10),
    "armory": Recipe(9, {"ore_red": 1}, {"armor": 1}, 10),
    "lasery": Recipe(10, {"ore_red": 1}, {"laser": 1}, 10),
}
TYPE_IDS = {"agent": 0, "wall": 1, "block": 14}
# Hundredths for each item held, and how many of it count.
REWARDS = {
    "hearts": {"heart": (100, 1000)},
    "shaped": {f"ore_{color}": (10, 1) for color in COLORS}
    | {f"battery_{color}": (80, 1) for color in COLORS}
    | {"laser": (50, 1), "armor": (50, 1), "blueprint": (50, 1), "heart": (100, 1000)},
}
ARENA = {"mine_red": 10, "generator_red": 5, "altar": 5, "lasery": 1, "armory": 1, "block": 20, "wall": 20}


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
    objects: Mapping[str, int | tuple[int, int]] = field(default_factory=lambda: dict(ARENA))
    """how many of each thing an instance holds: converters of `recipes`, "block", "wall"; (low, high) is drawn"""
    separate: bool = False
    """walls between the instances too, so that nobody sees or meets the others"""
    terrain: bool = False
    """each instance gets walls of its own pattern, from open field to labyrinth; all free cells stay connected"""
    easy: bool = False
    """altar, armory and lasery ask for one item only"""
    rewards: str = "hearts"
    """"hearts" (1 a heart) or "shaped" (also 0.1 for ore, 0.8 for a battery, 0.5 for gear; the first of each kind)"""
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
            raise ValueError(f'rewards "{self.rewards}": must be hearts or shaped')
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
        needed = self.agents + sum(self.span(name)[1] for name in self.objects)
        if needed > self.room(self.size):
            enough = next((size for size in range(5, 61) if needed <= self.room(size)), None)
            works = f"size {enough} would do" if enough else f"no size holds more than {self.room(60)}"
            raise ValueError(
                f"size {self.size} has room for {self.room(self.size)} agents and objects, not {needed}: {works}"
            )
        codes = FIRST + self.instances * (len(self.converters) + self.agents)
        if codes > 256:
            raise ValueError(f"{codes - FIRST} converters and agents in all instances: must be 253 or less")

    @property
    def book(self) -> dict[str, Recipe]:
        return RECIPES | (EASY if self.easy else {}) | dict(self.recipes)

    def span(self, name: str) -> tuple[int, int]:
        """Fewest and most things called `name` in an instance."""
        number = self.objects[name]
        return (number, number) if isinstance(number, int) else tuple(number)

    def room(self, size: int) -> int:
        """Cells that are free in an instance whatever its terrain."""
        return size**2 - (2 * ((size - 1) // 2) ** 2 if self.terrain else 0)

    @property
    def converters(self) -> list[str]:
        """Names of the converters that one instance may hold."""
        return [name for name in self.objects if name in self.book for _ in range(self.span(name)[1])]

    @property
    def num_agents(self) -> int:
        return self.instances * self.agents

    @property
    def corners(self) -> list[tuple[int, int]]:
        """Row and column of each instance's first cell."""
        pitch = self.size + (VIEW if self.separate else 0)
        return [(VIEW + i // 2 * pitch, VIEW + i % 2 * pitch) for i in range(self.instances)]

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of the whole map."""
        rows, columns = (max(corner[axis] for corner in self.corners) for axis in (0, 1))
        return rows + self.size + VIEW, columns + self.size + VIEW

    @property
    def worth(self) -> tuple[list[int], list[int]]:
        """For each item, the hundredths of reward for holding one and how many of it count."""
        table = REWARDS[self.rewards]
        return [table.get(item, (0, 0))[0] for item in ITEMS], [table.get(item, (0, 0))[1] for item in ITEMS]


VARIANTS: dict[str, dict[str, Any]] = {
    "MettaArena-v0": {},
    # As many altars as can be visited in time: each holds one heart, and nobody has batteries to make another.
    "MettaNavigation-v0": dict(
        instances=4, agents=1, separate=True, terrain=True, objects={"altar": (10, 50)},
        recipes={"altar": Recipe(8, {"battery_red": 3}, {"heart": 1}, cooldown=1000, initial=1)},
    ),
}  # fmt: skip


def _hash(x):
    """32-bit integer hash (xor-shift and multiply, twice); Python ints or int64 tensors, the same numbers."""
    x = ((x ^ (x >> 16)) * 0x21F0AAAD) & 0xFFFFFFFF
    x = ((x ^ (x >> 15)) * 0x735A2D97) & 0xFFFFFFFF
    return x ^ (x >> 15)


def _lane_key(seed: int, lane):
    """Start of the random stream of one lane; its n-th draw is `_hash(key + n)`."""
    return _hash(_hash(seed & 0xFFFFFFFF) ^ _hash(lane + 0x9E3779B9))


@dataclass(eq=False)
class Thing:
    """Whatever stands in a cell."""

    name: str
    row: int
    column: int
    inventory: list[int] = field(default_factory=lambda: [0] * len(ITEMS))
    timer: int = 0
    """a converter's ticks until it is idle, an agent's turns until it thaws"""
    heading: int = 0
    color: int = 0


class MettaArena:
    """The rule book: one arena, written to be read. It follows PettingZoo's parallel API.

    `rules` are the fields of `Rules`; `lane` picks the random stream, as lane i of `MettaBatch` has it. Observations
    are (200, 3) uint8, rewards float, actions 0 to 24 in the order of `ACTIONS`. When an episode is truncated, `agents`
    is empty until the next reset and each agent's info holds its statistics (`STATS`) under "episode".
    """

    metadata = {"render_modes": ["rgb_array", "ansi"], "name": "MettaArena-v0", "render_fps": 12}

    def __init__(self, render_mode: str | None = None, lane: int = 0, **rules: Any) -> None:
        self.rules = Rules(**rules)
        self.render_mode, self.lane, self.key = render_mode, lane, None
        self.possible_agents = [f"agent_{i}" for i in range(self.rules.num_agents)]
        self.agents: list[str] = []
        # Made once, so that whoever seeds a space samples from the one that was seeded.
        self.observation_spaces = {name: gym.spaces.Box(0, 255, (TOKENS, 3), np.uint8) for name in self.possible_agents}
        self.action_spaces = {name: gym.spaces.Discrete(len(ACTIONS)) for name in self.possible_agents}

    @property
    def unwrapped(self) -> "MettaArena":
        return self

    @property
    def num_agents(self) -> int:
        return len(self.agents)

    @property
    def max_num_agents(self) -> int:
        return len(self.possible_agents)

    def observation_space(self, agent: str) -> gym.spaces.Box:
        return self.observation_spaces[agent]

    def action_space(self, agent: str) -> gym.spaces.Discrete:
        return self.action_spaces[agent]

    def reset(self, seed: int | None = None, options: dict | None = None) -> tuple[dict, dict]:
        """Starts the stream of `seed`, or the next episode of the stream under way (without either: seed 0)."""
        if seed is not None or self.key is None:
            self.key, self.episode = _lane_key(seed or 0, self.lane), -1
        self.episode += 1
        self.episode_key = _hash(self.key + self.episode)
        self.clock, self.limit = 0, self.rules.max_steps
        if self.episode == 0 and self.rules.random_first_length:
            self.limit = 1 + self._draw(DRAW_LENGTH) % self.rules.max_steps
        self.agents = list(self.possible_agents)
        self._build_map()
        for converter in self.converters:
            self._start_converting(converter)
        self.last = [(0, 0)] * len(self.agents)  # action, hundredths of reward
        self.stats = [dict.fromkeys(STATS, 0) for _ in self.agents]
        return {name: self._observe(i) for i, name in enumerate(self.agents)}, {name: {} for name in self.agents}

    def _draw(self, number: int) -> int:
        return _hash(self.episode_key + number)

    def _build_map(self) -> None:
        """Walls, terrain, then agents and objects on the cells of each instance in a random order."""
        rules, size = self.rules, self.rules.size
        rows, columns = rules.shape
        self.grid: list[list[Thing | None]] = [
            [Thing("wall", row, column) for column in range(columns)] for row in range(rows)
        ]
        self.bodies: list[Thing] = []  # the agents
        self.converters: list[Thing] = []
        for i, corner in enumerate(rules.corners):
            walls = self._terrain(i) if rules.terrain else set()
            cells = [(row, column) for row in range(size) for column in range(size)]
            order = {cell: (cell in walls, self._draw(DRAW_CELL + i * size**2 + n)) for n, cell in enumerate(cells)}
            cells.sort(key=order.get)
            for row, column in cells[: size**2 - len(walls)]:
                self.grid[corner[0] + row][corner[1] + column] = None
            pieces = [("agent", True)] * rules.agents
            for kind, name in enumerate(rules.objects):
                low, high = rules.span(name)
                number = low + self._draw(DRAW_COUNT + i * 32 + kind) % (high - low + 1)
                pieces += [(name, n < number) for n in range(high)]
            for (name, exists), (row, column) in zip(pieces, cells):
                if not exists:
                    continue
                row, column = corner[0] + row, corner[1] + column
                thing = self.grid[row][column] = Thing(name, row, column)
                if name == "agent":
                    self.bodies.append(thing)
                elif name in rules.book:
                    self.converters.append(thing)
                    for item in rules.book[name].outputs:
                        thing.inventory[ITEMS.index(item)] = rules.book[name].initial

    def _terrain(self, instance: int) -> set[tuple[int, int]]:
        """Pillars on odd rows and columns, each with a wall thrown right or down, the whole perhaps mirrored.

        Chains of walls only ever grow right and down and touch the outer wall at most once: no cell gets cut off.
        """
        size, room = self.rules.size, self._draw(DRAW_ROOM + instance)
        walls = set()
        for row in range(1, size - 1, 2):
            for column in range(1, size - 1, 2):
                draw = self._draw(DRAW_PILLAR + instance * size**2 + row * size + column)
                if draw % 16 < room % 14:  # the share of pillars that stand is the room's own
                    right = draw >> 4 & 1
                    walls |= {(row, column), (row + 1 - right, column + right)}
        if room >> 8 & 1:
            walls = {(size - 1 - row, column) for row, column in walls}
        if room >> 9 & 1:
            walls = {(row, size - 1 - column) for row, column in walls}
        return walls

    def step(self, actions: Mapping[str, int]) -> tuple[dict, dict, dict, dict, dict]:
        for name in self.agents:
            if actions[name] not in range(len(ACTIONS)):
                raise ValueError(f"action {actions[name]} of {name}: must be a whole number, 0 to {len(ACTIONS) - 1}")
        chosen = [int(actions[name]) for name in self.agents]
        self.clock += 1
        for converter in self.converters:
            self._tick(converter)
        worth = [self._worth(body) for body in self.bodies]
        key = self._draw(DRAW_ORDER + self.clock)
        for i in sorted(range(len(chosen)), key=lambda i: (chosen[i] > NEAREST, _hash(key + i))):
            body, stats = self.bodies[i], self.stats[i]
            if body.timer:
                body.timer -= 1
                stats["frozen_ticks"] += 1
                success = False
            else:
                success = self._act(i, chosen[i])
            stats["success" if success else "failed"] += 1
        rewards = [self._worth(body) - before for body, before in zip(self.bodies, worth)]
        self.last = list(zip(chosen, rewards))
        observations = {name: self._observe(i) for i, name in enumerate(self.agents)}
        truncated = self.clock >= self.limit
        infos: dict[str, dict] = {name: {} for name in self.agents}
        for i, name in enumerate(self.agents):
            self.stats[i]["hundredths"] += rewards[i]
            if truncated:
                infos[name]["episode"] = self.stats[i]
        results = (
            observations,
            {name: reward / 100 for name, reward in zip(self.agents, rewards)},
            dict.fromkeys(self.agents, False),
            dict.fromkeys(self.agents, truncated),
            infos,
        )
        if truncated:
            self.agents = []
        return results

    def _worth(self, body: Thing) -> int:
        return sum(rate * min(held, most) for held, rate, most in zip(body.inventory, *self.rules.worth))

    def _tick(self, converter: Thing) -> None:
        if converter.timer:
            recipe = self.rules.book[converter.name]
            converter.timer -= 1
            if converter.timer == recipe.cooldown:
                for item, number in recipe.outputs.items():
                    converter.inventory[ITEMS.index(item)] += number
            if converter.timer == 0:
                self._start_converting(converter)

    def _start_converting(self, converter: Thing) -> None:
        recipe = self.rules.book[converter.name]
        full = sum(converter.inventory[ITEMS.index(item)] for item in recipe.outputs) >= recipe.max_output
        enough = all(converter.inventory[ITEMS.index(item)] >= number for item, number in recipe.inputs.items())
        if enough and not full and converter.timer == 0:
            for item, number in recipe.inputs.items():
                converter.inventory[ITEMS.index(item)] -= number
            converter.timer = recipe.cooldown + 1

    def _cell(self, body: Thing, ahead: int, right: int = 0) -> tuple[int, int]:
        down, across = MOVES[body.heading]
        right_down, right_across = MOVES[RIGHT_OF[body.heading]]
        return body.row + ahead * down + right * right_down, body.column + ahead * across + right * right_across

    def _act(self, i: int, action: int) -> bool:
        """Carry out what agent i does; False if it came to nothing."""
        body = self.bodies[i]
        if action <= NEAREST:
            return self._attack(i, action)
        if action < GET:  # one up, one down, double, half
            color, argument = body.color, action - PAINT
            body.color = (min(color + 1, 255), max(color - 1, 0), min(color * 2, 255), color // 2)[argument]
            return True
        if action == NOOP:
            return True
        if ROTATE <= action < SWAP:
            body.heading = action - ROTATE
            return True
        row, column = self._cell(body, -1 if action == BACK else 1)
        target = self.grid[row][column]
        if action in (FORWARD, BACK, SWAP):
            swappable = target and (target.name == "block" or (target.name == "agent" and target.timer))
            if not (swappable if action == SWAP else target is None):
                return False
            self.grid[body.row][body.column], self.grid[row][column] = target, body
            if target:
                target.row, target.column = body.row, body.column
            body.row, body.column = row, column
            return True
        if not target or target.name not in self.rules.book:
            return False
        recipe, moved = self.rules.book[target.name], 0
        if action == GET:
            for k in (ITEMS.index(item) for item in recipe.outputs):
                moved += self._give(target, body, k, target.inventory[k], CARRY[k], self.stats[i], "get")
        else:
            for item, number in recipe.inputs.items():
                k = ITEMS.index(item)
                number = self._give(body, target, k, min(number, body.inventory[k]), 255, self.stats[i], "put")
                self.stats[i][f"{item}.lost"] += number
                moved += number
        self._start_converting(target)
        return moved > 0

    def _give(self, giver: Thing, taker: Thing, item: int, number: int, most: int, stats: dict, what: str) -> int:
        number = min(number, most - taker.inventory[item])
        giver.inventory[item] -= number
        taker.inventory[item] += number
        stats[f"{ITEMS[item]}.{what}"] += number
        return number

    def _attack(self, i: int, action: int) -> bool:
        """A laser is spent whether it hits or not. Armor stops it; without, the target freezes and loses all it has."""
        body, stats = self.bodies[i], self.stats[i]
        if action == 0 or not body.inventory[LASER]:
            return False
        body.inventory[LASER] -= 1
        stats["laser.lost"] += 1
        for n in NEAREST_FIRST if action == NEAREST else (action - 1,):
            row, column = self._cell(body, *REACH[n])
            target = self.grid[row][column]
            if target and target.name == "agent":
                break
        else:
            return False
        victim = self.stats[self.bodies.index(target)]
        if target.inventory[ARMOR]:
            target.inventory[ARMOR] -= 1
            victim["armor.lost"] += 1
            stats["attack.blocked"] += 1
            return True
        if not target.timer:
            stats["attack.win"] += 1
            victim["attack.loss"] += 1
            for k, item in enumerate(ITEMS):
                victim[f"{item}.lost"] += self._give(target, body, k, target.inventory[k], CARRY[k], stats, "stolen")
        target.timer = self.rules.freeze
        return True

    def tokens_of(self, thing: Thing) -> list[tuple[int, int]]:
        """What one sees of a thing: (feature, value) in the order of the features."""
        if thing.name == "wall":
            return [(TYPE, TYPE_IDS["wall"])]
        if thing.name == "block":
            return [(TYPE, TYPE_IDS["block"]), (SWAPPABLE, 1)]
        if thing.name == "agent":
            tokens = [(TYPE, TYPE_IDS["agent"]), (GROUP, 0), (FROZEN, int(thing.timer > 0))]
            tokens += [(ORIENTATION, thing.heading), (COLOR, thing.color)]
        else:
            tokens = [(TYPE, self.rules.book[thing.name].type_id), (COLOR, 0), (BUSY, int(thing.timer > 0))]
        return tokens + [(FIRST_ITEM + k, held) for k, held in enumerate(thing.inventory) if held]

    def _observe(self, i: int) -> np.ndarray:
        body, (action, reward) = self.bodies[i], self.last[i]
        header = (self.clock * 255 // self.rules.max_steps, *ACTIONS[action], min(max(reward, 0), 255))
        tokens = [(CENTRE, EPISODE + n, value) for n, value in enumerate(header)]
        for row, column in WINDOW:
            thing = self.grid[body.row + row][body.column + column]
            if thing:
                place = (row + VIEW) << 4 | (column + VIEW)
                tokens += [(place, feature, value) for feature, value in self.tokens_of(thing)]
        if self.clock:
            self.stats[i]["tokens_written"] += min(len(tokens), TOKENS)
            self.stats[i]["tokens_dropped"] += max(len(tokens) - TOKENS, 0)
        observation = np.full((TOKENS, 3), 255, np.uint8)
        observation[: len(tokens)] = tokens[:TOKENS]
        return observation

    def render(self) -> np.ndarray | str | None:
        if self.render_mode == "ansi":
            return render_ansi(self)
        if self.render_mode == "rgb_array":
            return render_rgb(self)

    def close(self) -> None:
        """Nothing is held open."""


ITEM_COLORS = dict(zip(ITEMS, ("#c0763b", "#5b8def", "#57b26a", "#f2c14e", "#7fb2ff", "#8fdc9b", "#ff5a6e", "#b9c4d6",
                               "#5ee6f5", "#d58cff")))  # fmt: skip


def _label(index: int) -> str:
    """One sign for each agent: 0 to 9, a to z, then + for all others."""
    return "0123456789abcdefghijklmnopqrstuvwxyz"[index] if index < 36 else "+"


def _sign(converter: Thing) -> str:
    """Initial of its name; H for the altar, that makes hearts, B for the lab, that makes blueprints."""
    return {"altar": "H", "lab": "B"}.get(converter.name, converter.name[0].upper())


def _carried(body: Thing) -> dict[str, int]:
    return {item: held for item, held in zip(ITEMS, body.inventory) if held}


def render_ansi(arena: MettaArena) -> str:
    """The map in text, two signs a cell, and what each agent carries.

    An agent is an arrow (* while frozen) and its number, a converter its letter (`_sign`) and how
    many products wait in it (~ none yet, but at work or cooling), [] a block and ## a wall.
    """

    def signs(thing: Thing | None) -> str:
        if thing is None or thing.name in ("wall", "block"):
            return {None: " .", "wall": "##", "block": "[]"}[thing and thing.name]
        if thing.name == "agent":
            return ("*" if thing.timer else "▲▼◀▶"[thing.heading]) + _label(arena.bodies.index(thing))
        stock = sum(thing.inventory[ITEMS.index(item)] for item in arena.rules.book[thing.name].outputs)
        return _sign(thing) + (str(min(stock, 9)) if stock else "~" if thing.timer else "0")

    edge = VIEW - 1  # one ring of the outer wall is enough
    lines = ["".join(map(signs, row[edge:-edge])) for row in arena.grid[edge:-edge]]
    lines += [
        f"{_label(i)}: " + (", ".join(f"{held} {item}" for item, held in _carried(body).items()) or "nothing")
        for i, body in enumerate(arena.bodies)
    ]
    return "\n".join([f"step {arena.clock} of {arena.limit}", *lines])


def render_rgb(arena: MettaArena) -> np.ndarray:
    """The map as (height, width, 3) uint8, 20 pixels a cell, beside it what each agent carries.

    A converter has the color and initial of what it makes, waiting products as dots along its foot, what was put in
    along its top, and a bar that shrinks while it works and cools. An agent wears its number and looks where it faces;
    a ring of ice is melting around a frozen one, and its load lies under it.
    """
    from PIL import Image, ImageDraw, ImageFont

    size, edge = 40, VIEW - 1  # drawn twice as large and then halved, for smooth edges
    rows, columns = (side - 2 * edge for side in arena.rules.shape)
    height = max(rows, len(arena.bodies) + 2) * size
    image = Image.new("RGB", (columns * size + 9 * size, height), "#0f1420")
    draw = ImageDraw.Draw(image)
    font, small = (ImageFont.load_default(size * part) for part in (0.55, 0.45))

    def dots(items: Mapping[str, int], left: float, y: float) -> None:
        held = [item for item, number in items.items() for _ in range(number)]
        for i, item in enumerate(held[:5]):
            x = left + (i - (min(len(held), 5) - 1) / 2) * 0.2 * size
            draw.ellipse((x - 4.5, y - 4.5, x + 4.5, y + 4.5), ITEM_COLORS[item], "#0f1420")

    def agent(body: Thing, x: float, y: float, i: int) -> None:
        hue = f"hsl({i * 360 // len(arena.bodies)}, 65%, 62%)"
        (down, across), radius = MOVES[body.heading], 0.36 * size
        nose = (x + across * 0.5 * size, y + down * 0.5 * size)
        draw.polygon((nose, (x + down * radius, y + across * radius), (x - down * radius, y - across * radius)), hue)
        draw.ellipse((x - radius, y - radius, x + radius, y + radius), hue)
        if body.timer:
            box = (x - 0.46 * size, y - 0.46 * size, x + 0.46 * size, y + 0.46 * size)
            draw.arc(box, -90, -90 + 360 * body.timer / arena.rules.freeze, "#bff3ff", 5)
        draw.text((x, y), _label(i), "#0f1420", font, anchor="mm")

    for row in range(rows):
        for column in range(columns):
            thing, left, top = arena.grid[row + edge][column + edge], column * size, row * size
            x, y, foot = left + size / 2, top + size / 2, top + 0.88 * size
            draw.rectangle((left, top, left + size - 1, top + size - 1), "#1a2233" if (row + column) % 2 else "#1d2638")
            if thing is None or thing.name == "agent":
                continue
            if thing.name in ("wall", "block"):
                inset = 0 if thing.name == "wall" else 5
                box = (left + inset, top + inset, left + size - 1 - inset, top + size - 1 - inset)
                draw.rectangle(box, "#3a4459" if thing.name == "wall" else "#8a7358")
                continue
            recipe, held = arena.rules.book[thing.name], _carried(thing)
            color = ITEM_COLORS[next(iter(recipe.outputs))]
            draw.rounded_rectangle((left + 2, top + 2, left + size - 3, top + size - 3), 8, "#252f45", color, 3)
            draw.text((x, y - 1), _sign(thing), color, font, anchor="mm")
            dots({item: n for item, n in held.items() if item not in recipe.outputs}, x, top + 0.14 * size)
            dots({item: n for item, n in held.items() if item in recipe.outputs}, x, foot)
            rest = (size - 12) * thing.timer / (recipe.cooldown + 1)
            if rest:
                draw.rectangle((left + 6, top + 0.7 * size, left + 6 + rest, top + 0.75 * size), color)
    text = columns * size + size / 2
    draw.text((text, size), f"step {arena.clock} of {arena.limit}", "#e8edf7", font, anchor="lm")
    for i, body in enumerate(arena.bodies):
        x, y = (body.column - edge + 0.5) * size, (body.row - edge + 0.5) * size
        agent(body, x, y, i)
        dots(_carried(body), x, y + 0.4 * size)
        line = (i + 2.5) * size
        agent(body, text + size / 4, line, i)
        for slot, (item, held) in enumerate(_carried(body).items()):
            x = text + (1.2 + 1.25 * slot) * size
            draw.ellipse((x - 8, line - 8, x + 8, line + 8), ITEM_COLORS[item])
            draw.text((x + 12, line), str(held), "#e8edf7", small, anchor="lm")
    return np.asarray(image.resize((image.width // 2, image.height // 2), Image.Resampling.BOX))


class MettaBatch:
    """`num_games` games at once, every tensor on `device`; agrees with `MettaArena` token for token.

    With N = num_games * `Rules.num_agents` agents, game by game: `reset() -> obs` and
    `step(action) -> (obs, reward, terminated, truncated, info)`, `action` (N,) int64, `obs` (N, 200, 3) uint8,
    `reward` (N,) float32, the rest (N,) bool. Nothing terminates; a truncated game starts its next episode in the same
    step, and `info["final_obs"]` is what each agent saw before that. `info` also holds, as of then, each agent's
    `hearts` (got from altars), `length`, `return` and `stats` (N, len(STATS)) int32. Both observations and the
    statistics are buffers that the next step overwrites. On CUDA no step waits for the device and all shapes are fixed:
    a graph can capture it, and torch.compile makes one of it. There the agents of an arena act one after another; on
    CPU all that do not meet act at once. `fixed_shapes` decides it: set before the first reset, a CPU plays as CUDA
    does.
    """

    features = dict(enumerate(FEATURES))  # names of the numbers in tokens
    view_shape = (2 * VIEW + 1, 2 * VIEW + 1)  # rows and columns that an agent sees
    num_actions = len(ACTIONS)

    def __init__(self, num_games: int, device: torch.device | str = "cpu", seed: int = 0, **rules: Any) -> None:
        self.rules, self.num_games, self.device = Rules(**rules), num_games, torch.device(device)
        if num_games < 1:
            raise ValueError(f"num_games {num_games}: must be at least 1")
        self.num_agents = num_games * self.rules.num_agents
        self.max_steps = self.rules.max_steps
        self.fixed_shapes = self.device.type != "cpu"
        rules, lanes, agents = self.rules, num_games, self.num_agents
        names = rules.converters * rules.instances
        self.first_agent = FIRST + len(names)
        # A thing's code in a cell of the map is also its row among those of its lane.
        self.codes = self.first_agent + rules.num_agents
        self.cells = rules.shape[0] * rules.shape[1]

        def tensor(values: Any, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.tensor(values, dtype=dtype, device=device)

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        # What is known of each code: the recipe of converters, the limits, and where its tokens begin.
        def amounts(name: str, of: str) -> list[int]:
            return [getattr(rules.book[name], of).get(item, 0) for item in ITEMS]

        nothing, rest = [0] * len(ITEMS), self.codes - self.first_agent
        self.needs = tensor([nothing] * FIRST + [amounts(name, "inputs") for name in names] + [nothing] * rest)
        self.makes = tensor([nothing] * FIRST + [amounts(name, "outputs") for name in names] + [nothing] * rest)
        self.cooldown = tensor([0] * FIRST + [rules.book[name].cooldown for name in names] + [0] * rest)
        self.max_output = tensor([0] * FIRST + [rules.book[name].max_output for name in names] + [0] * rest)
        self.carry, self.rate, self.counted = tensor(CARRY), *map(tensor, rules.worth)
        self.one_laser = tensor([int(item == "laser") for item in ITEMS])
        self.one_armor = tensor([int(item == "armor") for item in ITEMS])
        self.head = tensor([0] * FIRST + [3] * len(names) + [5] * rest)  # tokens before the items
        self.state_feature = tensor([0] * FIRST + [BUSY << 8] * len(names) + [FROZEN << 8] * rest)
        self.item_feature = tensor([FIRST_ITEM + k << 8 for k in range(len(ITEMS))])
        color = range(256)
        self.painted = tensor([[min(c + 1, 255) for c in color], [max(c - 1, 0) for c in color],
                               [min(c * 2, 255) for c in color], [c // 2 for c in color]]).ravel()  # fmt: skip

        # Where things are. `at` counts cells through all lanes, `grid` holds codes; rows count through all lanes too.
        width = rules.shape[1]
        self.lanes = torch.arange(lanes, device=device)
        self.numbers = torch.arange(rules.num_agents, device=device)
        self.lane = self.lanes.repeat_interleave(rules.num_agents)
        self.code = self.numbers.repeat(lanes) + self.first_agent
        self.row_code = torch.arange(self.codes, device=device).repeat(lanes)  # of each row
        self.lane_row = self.lane * self.codes
        self.body = self.lane_row + self.code
        self.ahead = tensor([row * width + column for row, column in MOVES])
        right = self.ahead[list(RIGHT_OF)]
        self.reach = torch.stack([ahead * self.ahead + aside * right for ahead, aside in REACH], 1)
        self.window = tensor([row * width + column for row, column in WINDOW], torch.int32)
        self.nearest_rank = tensor([NEAREST_FIRST.index(n) for n in range(9)])
        self.nearest_first = tensor(NEAREST_FIRST)
        self.action_header = tensor(ACTIONS)
        self.attacker_stats = tensor([STATS.index(name) for name in ATTACKER_STATS])
        self.victim_stats = tensor([STATS.index(name) for name in VICTIM_STATS])
        self.trade_stats = tensor([STATS.index(name) for name in TRADE_STATS])

        # How a map is made: the cells of each instance, and what is put on them in the order that is drawn.
        size, kinds = rules.size, {"agent": rules.agents} | dict(rules.objects)
        limits = [(rules.agents, rules.agents), *(rules.span(name) for name in rules.objects)]
        corner = tensor([row * width + column for row, column in rules.corners])
        inside = torch.arange(size, device=device)
        self.rooms = corner[:, None] + (inside[:, None] * width + inside).ravel()
        self.room_cells = torch.arange(rules.instances * size**2, device=device).view(rules.instances, -1)
        self.low, self.high = tensor(limits).unbind(1)
        self.count_draws = DRAW_COUNT - 1 + 32 * torch.arange(rules.instances, device=device)[:, None]
        self.count_draws = self.count_draws + torch.arange(len(kinds), device=device)
        self.piece_kind = tensor([kind for kind, (_, high) in enumerate(limits) for _ in range(high)])
        self.piece_rank = tensor([rank for _, high in limits for rank in range(high)])
        codes, next_code = [], {"agent": self.first_agent, "converter": FIRST}
        for _ in range(rules.instances):
            for name, (_, high) in zip(kinds, limits):
                kind = "agent" if name == "agent" else "converter" if name in rules.book else None
                for _ in range(high):
                    codes.append(next_code[kind] if kind else {"wall": WALL, "block": BLOCK}[name])
                    if kind:
                        next_code[kind] += 1
        self.piece_code = tensor(codes, torch.uint8).view(rules.instances, -1)
        self.pillars = (inside % 2 == 1) & (inside < size - 1)
        self.pillars = self.pillars[:, None] & self.pillars

        # The state of the games. A thing's tokens are prepared in `table`: feature << 8 | value << 16, 16 to a row (the
        # last one takes what is not to be seen), and `shown` of them count. The end of `table` shows as empty.
        self.key = _lane_key(seed, self.lanes)
        self.episode, self.episode_key = zeros(lanes) - 1, zeros(lanes)
        self.clock, self.limit = zeros(lanes), zeros(lanes)
        self.grid = zeros(lanes, self.cells, dtype=torch.uint8)
        self.at, self.heading, self.color, self.worth = zeros(agents), zeros(agents), zeros(agents), zeros(agents)
        self.inventory, self.timer = zeros(lanes * self.codes, len(ITEMS)), zeros(lanes * self.codes)
        self.table = zeros(lanes * self.codes * 16 + TOKENS, dtype=torch.int32)
        self.shown = zeros(lanes * self.codes, dtype=torch.uint8)
        self.header = zeros(agents, 4, dtype=torch.uint8)
        self.stats, self.final_stats = (zeros(agents, len(STATS), dtype=torch.int32) for _ in range(2))
        self.spare_grid, self.spare_at, self.spare_turn = self.grid.clone(), zeros(lanes, rules.num_agents), zeros(1)
        # Agent-episodes finished since the caller last zeroed this, and the sums of their hearts, length and return.
        self.finished = torch.zeros(4, device=device)
        self.dirty = zeros(lanes * self.codes, dtype=torch.bool)  # rows whose tokens are out of date
        self.obs, self.final_obs = (zeros(agents, TOKENS, 3, dtype=torch.uint8) for _ in range(2))
        self.slots = torch.arange(TOKENS - 4, dtype=torch.int32, device=device)
        place = [(row + VIEW) << 4 | (column + VIEW) for row, column in WINDOW] + [0]
        self.places = tensor(place, torch.int32).repeat(agents)
        self.ones = torch.ones(agents, len(WINDOW), dtype=torch.int32, device=device)

        # Things at the start of an episode: one lane's rows, copied into a lane that starts.
        table = self.table[:-TOKENS].view(lanes, self.codes, 16)
        table[:, FIRST : self.first_agent, :2] = tensor([[TYPE << 8 | rules.book[name].type_id << 16, COLOR << 8]
                                                         for name in names], torch.int32).view(-1, 2)  # fmt: skip
        table[:, WALL, 0] = TYPE << 8 | TYPE_IDS["wall"] << 16
        table[:, BLOCK, :2] = tensor([TYPE << 8 | TYPE_IDS["block"] << 16, SWAPPABLE << 8 | 1 << 16], torch.int32)
        agent = [TYPE << 8 | TYPE_IDS["agent"] << 16, GROUP << 8, FROZEN << 8, ORIENTATION << 8, COLOR << 8]
        table[:, self.first_agent :, :5] = tensor(agent, torch.int32)
        self.table[-TOKENS:] = 0xFFFFFF
        initial = tensor([0] * FIRST + [rules.book[name].initial for name in names] + [0] * rest)
        self.inventory.view(lanes, self.codes, -1).copy_((self.makes > 0) * initial[:, None])
        self._start_converting(slice(None), self.inventory.clone(), torch.ones_like(self.dirty))
        self._write_tokens(slice(None))
        self.shown.view(lanes, -1)[:, :FIRST] = tensor([0, 1, 2], torch.uint8)
        self.fresh = [state[0].clone() for state in self._per_row()]

    def _per_row(self) -> list[torch.Tensor]:
        """What is kept of things, lane by lane."""
        states = (self.inventory, self.timer, self.table[:-TOKENS], self.shown)
        return [state.view(self.num_games, -1) for state in states]

    def state_dict(self) -> dict[str, torch.Tensor]:
        """All that the games are, as the tensors themselves, not copies. What follows from these is made when they are
        loaded: tokens and spare maps too, so that games may go on on another kind of device."""
        names = "key episode clock limit grid at heading color inventory timer header stats finished"
        return {name: getattr(self, name) for name in names.split()}

    def load_state_dict(self, saved: dict[str, torch.Tensor]) -> None:
        """Raises ValueError, before anything is changed, for values that no game has."""
        state = self.state_dict()
        if set(saved) != set(state):
            raise ValueError(f"games must have {', '.join(state)}")
        for name, tensor in state.items():
            if saved[name].dtype != tensor.dtype or saved[name].shape != tensor.shape:
                raise ValueError(f"{name} must be {tensor.dtype} {list(tensor.shape)}")
        problem = self._problem(**{name: tensor.cpu() for name, tensor in saved.items()})
        if problem:
            raise ValueError(f"not games of these rules: {problem}")
        for name, tensor in state.items():
            tensor.copy_(saved[name])

        self.episode_key.copy_(_hash(self.key + self.episode))
        self.worth.copy_(self._worth_of_agents())
        self._write_tokens(slice(None))
        self._write_looks()
        if self.fixed_shapes:
            self._make_spares(self.lanes)
        self._observe(slice(None), self.obs)

    def _problem(
        self, key, episode, clock, limit, grid, at, heading, color, inventory, timer, header, stats, finished
    ) -> str | None:
        """What is wrong with a `state_dict` on the CPU, None if nothing is.

        Every thing must stand where it is said to, within walls, and hold what it can: a step follows codes and cells
        without looking where they lead.
        """
        rules, lanes = self.rules, self.num_games
        rows, columns = rules.shape
        # The most that is held and the longest rest, by code.
        most_held = torch.zeros(self.codes, len(ITEMS), dtype=torch.int64)
        most_held[FIRST : self.first_agent] = 255  # of a byte
        most_held[self.first_agent :] = torch.tensor(CARRY)
        longest = torch.zeros(self.codes, dtype=torch.int64)
        longest[FIRST : self.first_agent] = self.cooldown[FIRST : self.first_agent].cpu() + 1
        longest[self.first_agent :] = rules.freeze
        place = at - self.lane.cpu() * self.cells
        row, column = place // columns, place % columns
        limits = {  # lowest and highest
            "key": (key, 0, 2**32 - 1),
            "episode": (episode, 0, 2**32),
            "limit": (limit, 1, rules.max_steps),
            "clock": (clock, 0, limit - 1),
            "grid": (grid, 0, self.codes - 1),
            "row": (row, VIEW, rows - VIEW - 1),
            "column": (column, VIEW, columns - VIEW - 1),
            "heading": (heading, 0, 3),
            "color": (color, 0, 255),
            "inventory": (inventory.view(lanes, self.codes, -1), 0, most_held),
            "timer": (timer.view(lanes, -1), 0, longest),
        }
        for name, (values, lowest, highest) in limits.items():
            if ((values < lowest) | (values > highest)).any():
                return f"{name} out of range"
        if not finished.isfinite().all():
            return "sums that are not finite"
        map_inside = torch.zeros(rows, columns, dtype=torch.bool)
        map_inside[VIEW:-VIEW, VIEW:-VIEW] = True
        if (grid.view(lanes, rows, columns)[:, ~map_inside] != WALL).any():
            return "a map without its outer wall"
        count = torch.zeros(lanes, self.codes, dtype=torch.int64)
        count.scatter_add_(1, grid.long(), torch.ones_like(grid, dtype=torch.int64))
        if (count[:, FIRST:] > 1).any() or (grid.view(-1)[at] != self.code.cpu()).any():
            return "agents and map differ"
        return None

    def reset(self) -> torch.Tensor:
        """Start a new episode in every lane."""
        if self.fixed_shapes:
            self._make_spares(self.lanes)
        self._start(slice(None), torch.ones_like(self.lanes, dtype=torch.bool))
        if self.fixed_shapes:  # the first episode may end before its turn to be made comes
            self._make_spares(self.lanes)
        self._observe(slice(None), self.obs)
        return self.obs

    def step(self, action: torch.Tensor):
        rules = self.rules
        self.clock.add_(1)
        self.dirty.zero_()
        self._tick()
        # Agents act in the order of `turn`, those that attack first. A frozen one loses its turn.
        turn = _hash(_hash(self.episode_key + DRAW_ORDER + self.clock)[:, None] + self.numbers).view(-1)
        attacked, success = self._attack_in_turn(action, turn)
        waits = ~attacked & (self.timer[self.body] > 0)
        acts = ~(attacked | waits)
        self.timer[self.body] -= waits.long()
        self._mark_dirty(self.body, waits)
        self._stat("frozen_ticks").add_(waits)

        paints = acts & (action >= PAINT) & (action < GET)
        color = self.painted[(action - PAINT).clamp(0, 3) * 256 + self.color]
        self.color.copy_(torch.where(paints, color, self.color))
        rotates = acts & (action >= ROTATE) & (action < SWAP)
        self.heading.copy_(torch.where(rotates, action - ROTATE, self.heading))
        success |= paints | rotates | (acts & (action == NOOP))
        moves = acts & ((action == FORWARD) | (action == BACK) | (action == SWAP))
        trades = acts & ((action == GET) | (action == PUT))
        there = self.at + self.ahead[self.heading] * torch.where(action == BACK, -1, 1)
        moved, traded = [], []
        for now in self._rounds(moves | trades, turn, there):
            moved.append(self._move(*self._select(moves, now), action, there))
            traded.append(self._trade(*self._select(trades, now), action, there))
        if moved:
            agents, goes = map(torch.cat, zip(*moved))
            success[agents] |= goes
            agents, gives, gets = map(torch.cat, zip(*traded))
            success[agents] |= (gives + gets > 0).any(1)
            self._count((agents, self.trade_stats, torch.cat([gets, gives, gives], 1)))
        self._stat("success").add_(success)
        self._stat("failed").add_(~success)

        worth = self._worth_of_agents()
        hundredths = worth - self.worth
        self.worth.copy_(worth)
        self._stat("hundredths").add_(hundredths)
        percent = torch.div(self.clock * 255, rules.max_steps, rounding_mode="floor")
        self.header[:, 0] = percent[self.lane]
        self.header[:, 1:3] = self.action_header[action]
        self.header[:, 3] = hundredths.clamp(0, 255)
        self._write_tokens(self._select_rows(self.dirty)[0])
        self._write_looks()
        tokens = self._observe(slice(None), self.final_obs)
        self._stat("tokens_written").add_(tokens.clamp(max=TOKENS))
        self._stat("tokens_dropped").add_((tokens - TOKENS).clamp(min=0))

        ends = self.clock >= self.limit
        truncated = ends[self.lane]
        self.final_stats.copy_(self.stats)
        hearts, returns = self._stat("heart.get").clone(), self._stat("hundredths") / 100
        info = {"final_obs": self.final_obs, "hearts": hearts, "length": self.clock[self.lane], "return": returns,
                "stats": self.final_stats}  # fmt: skip
        sums = [truncated, hearts * truncated, info["length"] * truncated, returns * truncated]
        self.finished.add_(torch.stack(sums).sum(1))
        self.obs.copy_(self.final_obs)
        if self.fixed_shapes:
            count = -(-self.num_games // min(64, rules.max_steps))
            self._make_spares((self.lanes[:count] + self.spare_turn * count) % self.num_games)
            self.spare_turn.add_(1)
            self._start(slice(None), ends)
            self._observe(slice(None), self.obs)
        elif ends.any():
            lanes = ends.nonzero().squeeze(1)
            self._start(lanes, ends[lanes])
            agents = truncated.nonzero().squeeze(1)
            obs = self.obs[agents]
            self._observe(agents, obs)
            self.obs[agents] = obs
        return self.obs, hundredths / 100, torch.zeros_like(truncated), truncated, info

    def _worth_of_agents(self) -> torch.Tensor:
        """Hundredths that what each agent holds is worth."""
        return (torch.minimum(self.inventory[self.body], self.counted) * self.rate).sum(1)

    def _stat(self, name: str) -> torch.Tensor:
        return self.stats[:, STATS.index(name)]

    def _count(self, *parts: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> None:
        """Add numbers (B, some) to some columns of the statistics of agents: (B,) agents, (some,) columns, numbers."""
        places = [(agents[:, None] * len(STATS) + columns).view(-1) for agents, columns, _ in parts]
        numbers = [number.view(-1) for _, _, number in parts]
        self.stats.view(-1).scatter_add_(0, torch.cat(places), torch.cat(numbers).int())

    def _mark_dirty(self, rows: torch.Tensor, mask: torch.Tensor) -> None:
        """The tokens of those rows that count are out of date; with fixed shapes all are written anyway."""
        if not self.fixed_shapes:
            self.dirty[rows] |= mask

    def _select(self, mask: torch.Tensor, now: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Agents to work on and which of them count: on CPU only those that need it, on CUDA one of each arena."""
        if self.fixed_shapes:
            return now, mask[now]
        agents = (mask & now).nonzero().squeeze(1)
        return agents, mask[agents]

    def _select_rows(self, mask: torch.Tensor) -> tuple[slice | torch.Tensor, torch.Tensor]:
        """Rows (or lanes) to work on and which of them count: on CPU only those that need it, on CUDA all."""
        if self.fixed_shapes:
            return slice(None), mask
        rows = mask.nonzero().squeeze(1)
        return rows, mask[rows]

    def _rounds(self, mask: torch.Tensor, turn: torch.Tensor, there: torch.Tensor):
        """Who of `mask` acts when, in parts that follow each other.

        On CUDA the k-th agents of all arenas. On CPU a mask of all those for whom nobody with an earlier turn, still to
        act, stands on or reaches for the same cell: what they do cannot depend on each other.
        """
        if self.fixed_shapes:
            for agent in turn.view(self.num_games, -1).argsort(1).unbind(1):
                yield self.lanes * self.rules.num_agents + agent
            return
        cells = torch.stack([self.at, there], 1).int().view(self.num_games, -1, 2)
        turn, pending = turn.view(self.num_games, -1), mask.view(self.num_games, -1)
        meets = torch.zeros_like(pending[:, :, None] & pending[:, None])
        for mine in range(2):
            for theirs in range(2):
                meets |= cells[:, :, None, mine] == cells[:, None, :, theirs]
        meets &= turn[:, :, None] > turn[:, None]
        while pending.any():
            now = pending & ~(meets & pending[:, None]).any(2)
            yield now.view(-1)
            pending = pending & ~now

    def _tick(self) -> None:
        """Converters work or rest for a tick: products come out after the work, the next begin after the rest."""
        converters = slice(FIRST, self.first_agent)
        timer = self.timer.view(self.num_games, -1)[:, converters]
        runs = timer > 0
        timer -= runs.long()
        happens = torch.zeros_like(self.dirty).view(self.num_games, -1)
        happens[:, converters] = runs & ((timer == self.cooldown[converters]) | (timer == 0))
        rows, mask = self._select_rows(happens.view(-1))
        code = self.row_code[rows]
        done = mask & (self.timer[rows] == self.cooldown[code])
        self._start_converting(rows, self.inventory[rows] + self.makes[code] * done[:, None], mask)
        self._mark_dirty(rows, mask)

    def _start_converting(self, rows: slice | torch.Tensor, held: torch.Tensor, mask: torch.Tensor) -> None:
        """Let those rows that count begin to work if they can; `held` is what is in them from now on."""
        code = self.row_code[rows]
        needs = self.needs[code]
        room = (held * (self.makes[code] > 0)).sum(1) < self.max_output[code]
        starts = mask & room & (held >= needs).all(1) & (self.timer[rows] == 0)
        self.inventory[rows] = held - needs * starts[:, None]
        self.timer[rows] = torch.where(starts, self.cooldown[code] + 1, self.timer[rows])

    def _attack_in_turn(self, action: torch.Tensor, turn: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Attacks, one agent of an arena after another where anybody has a laser to fire.

        Returns (N,) who had a turn in this and (N,) who hit.
        """
        attacks, success = action <= NEAREST, torch.zeros_like(action, dtype=torch.bool)
        armed = attacks & (action > 0) & (self.inventory[self.body, LASER] > 0) & (self.timer[self.body] == 0)
        lanes, mask = self._select_rows(armed.view(self.num_games, -1).any(1))
        had_turn = torch.zeros_like(attacks).view(self.num_games, -1)
        had_turn[lanes] = attacks.view(self.num_games, -1)[lanes] & mask[:, None]
        had_turn = had_turn.view(-1)
        # Those without a turn here sort behind; a CPU stops when only they are left.
        order = turn + (~had_turn).long() * 2**32
        order = order.view(self.num_games, -1)[lanes].argsort(1)
        most = self.rules.num_agents
        if not self.fixed_shapes:
            most = int(had_turn.view(self.num_games, -1).sum(1).max())
        order = order[:, :most] + self.lanes[lanes, None] * self.rules.num_agents
        results = []
        for agent in order.unbind(1):
            row, turns = self.body[agent], had_turn[agent]
            held, rest = self.inventory[row], self.timer[row]
            frozen = turns & (rest > 0)
            fires = turns & ~frozen & (action[agent] > 0) & (held[:, LASER] > 0)
            held = held - fires[:, None] * self.one_laser

            seen = self.grid.view(-1)[self.at[agent, None] + self.reach[self.heading[agent]]].long()
            is_agent = seen >= self.first_agent
            nearest = torch.where(is_agent, self.nearest_rank, 8).amin(1)
            aim = torch.where(action[agent] == NEAREST, self.nearest_first[nearest], (action[agent] - 1).clamp(0, 8))
            code = seen.gather(1, aim[:, None]).squeeze(1)
            hits = fires & (code >= self.first_agent)
            target = self.lane_row[agent] + torch.where(hits, code, EMPTY)  # nothing is there, and nothing changes
            victim = self.lane[agent] * self.rules.num_agents + code - self.first_agent
            victim = torch.where(hits, victim, agent)
            target_held, target_rest = self.inventory[target], self.timer[target]
            blocked = hits & (target_held[:, ARMOR] > 0)
            freezes = hits & ~blocked
            robs = freezes & (target_rest == 0)
            stolen = torch.minimum(target_held, self.carry - held) * robs[:, None]
            both = torch.stack([row, target])
            target_held = target_held - stolen - blocked[:, None] * self.one_armor
            self.inventory[both] = torch.stack([held + stolen, target_held])
            target_rest = torch.where(freezes, self.rules.freeze, target_rest)
            self.timer[both] = torch.stack([rest - frozen.long(), target_rest])
            results.append((agent, victim, frozen, fires, hits, robs, blocked, stolen))
            self._mark_dirty(row, fires | frozen)
            self._mark_dirty(target, hits)
        if results:
            agent, victim, frozen, fires, hits, robs, blocked, stolen = map(torch.cat, zip(*results))
            success[agent] = hits
            of_attacker = torch.cat([torch.stack([frozen, fires, robs, blocked], 1), stolen], 1)
            of_victim = torch.cat([torch.stack([blocked, robs], 1), stolen], 1)
            self._count((agent, self.attacker_stats, of_attacker), (victim, self.victim_stats, of_victim))
        # An attack without a laser in an arena where nobody fires fails; a frozen agent waits as any other.
        return had_turn | (attacks & (self.timer[self.body] == 0)), success

    def _move(self, agents, mask, action, there) -> tuple[torch.Tensor, torch.Tensor]:
        """To an empty cell, or swap with a block or a frozen agent; no two of `agents` touch the same cell.

        Returns `agents` and which of them went.
        """
        here, there, swap = self.at[agents], there[agents], action[agents] == SWAP
        met = self.grid.view(-1)[there].long()
        is_frozen = self.timer[self.lane_row[agents] + met] > 0
        is_agent = met >= self.first_agent
        goes = mask & torch.where(swap, (met == BLOCK) | (is_agent & is_frozen), met == EMPTY)
        own = self.code[agents]
        cells = torch.stack([here, there])
        self.grid.view(-1)[cells] = torch.where(goes, torch.stack([met, own]), torch.stack([own, met])).byte()
        pushes = goes & is_agent
        other = self.lane[agents] * self.rules.num_agents + met - self.first_agent
        both = torch.stack([agents, torch.where(pushes, other, agents)])  # who pushes nobody is there twice
        at = torch.where(goes, there, here)
        self.at[both] = torch.stack([at, torch.where(pushes, here, at)])
        return agents, goes

    def _trade(self, agents, mask, action, there) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Put one recipe's inputs into the converter ahead or get its outputs; no two of `agents` face the same one.

        Returns `agents` and what each of them gave and got.
        """
        put = (action[agents] == PUT)[:, None]
        code = self.grid.view(-1)[there[agents]].long()
        both = torch.stack([self.body[agents], self.lane_row[agents] + code]).view(-1)
        held, stock = self.inventory[both].chunk(2)
        gives = torch.minimum(torch.minimum(self.needs[code], held), 255 - stock) * (put & mask[:, None])
        gets = torch.minimum(stock, self.carry - held) * (~put & mask[:, None] & (self.makes[code] > 0))
        held = torch.stack([held - gives + gets, stock + gives - gets]).flatten(0, 1)
        mask = mask.repeat(2)
        self._start_converting(both, held, mask)
        self._mark_dirty(both, mask)
        return agents, gives, gets

    def _write_tokens(self, rows: slice | torch.Tensor) -> None:
        """Prepare the tokens of these rows: whether it is busy or frozen, and what it holds."""
        code, held = self.row_code[rows], self.inventory[rows]
        has, head = held > 0, self.head[code]
        table = self.table[:-TOKENS].view(-1, 16)
        tokens = table[rows]
        place = torch.where(has, head[:, None] + has.cumsum(1) - 1, 15)
        tokens.scatter_(1, place, (self.item_feature | held << 16).int())
        state = (self.state_feature[code] | (self.timer[rows] > 0).long() << 16).int()
        tokens[:, 2] = torch.where(head > 0, state, tokens[:, 2])
        table[rows] = tokens
        self.shown[rows] = torch.where(head > 0, (head + has.sum(1)).byte(), self.shown[rows])

    def _write_looks(self) -> None:
        """Prepare the tokens of the agents that say where they look and what color they have."""
        tokens = self.table[:-TOKENS].view(self.num_games, self.codes, 16)[:, self.first_agent :]
        tokens[:, :, 3] = (self.heading << 16 | ORIENTATION << 8).view(self.num_games, -1)
        tokens[:, :, 4] = (self.color << 16 | COLOR << 8).view(self.num_games, -1)

    def _observe(self, agents: slice | torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Write what `agents` see to `out` (B, 200, 3) uint8; returns (B,) how many tokens there were.

        From the number of tokens in each cell of the windows follows the slot at which a cell's tokens end; as many
        cells precede a slot as end at or before it: a histogram, summed up. No cell or token is looked at in turn.
        """
        count, cells, at = len(out), len(WINDOW), self.at[agents].int()
        codes = self.grid.view(-1).index_select(0, (at[:, None] + self.window).view(-1)).view(count, cells)
        rows = codes + self.lane_row[agents].int()[:, None]
        tokens = self.shown.index_select(0, rows.view(-1)).view(count, cells)
        end = tokens.cumsum(1, dtype=torch.int32)
        slots = len(self.slots)
        if not self.fixed_shapes:  # as far as any window reaches
            slots = min(slots, int(end[:, -1].max()))
        cell = torch.zeros(count, slots + 1, dtype=torch.int32, device=self.device)
        cell[:, 0] = torch.arange(count, dtype=torch.int32, device=self.device) * (cells + 1)
        cell.scatter_add_(1, end.clamp(max=slots).long(), self.ones[:count])
        cell = cell.cumsum(1, dtype=torch.int32)[:, :slots].reshape(-1)
        # Where a cell's tokens are in `table`, less the slot at which they begin.
        first = torch.empty(count, cells + 1, dtype=torch.int32, device=self.device)
        first[:, :-1] = (tokens - end).add_(rows, alpha=16)
        first[:, -1] = len(self.table) - TOKENS - end[:, -1]  # behind the last: empty
        source = first.view(-1).index_select(0, cell).view(count, slots).add_(self.slots[:slots])
        token = self.table.index_select(0, source.view(-1)).add_(self.places.index_select(0, cell))
        # Byte by byte out of the 32-bit words: twice as fast as shifting, or as all three at once.
        token = token.view(torch.uint8).view(count, slots, 4)
        out[:, :4, 0] = CENTRE
        out[:, :4, 1] = torch.arange(EPISODE, EPISODE + 4, device=self.device)
        out[:, :4, 2] = self.header[agents]
        for byte in range(3):
            out[:, 4 : 4 + slots, byte] = token[:, :, byte]
        out[:, 4 + slots :] = 255
        return end[:, -1] + 4

    def _make_maps(self, key: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Maps of the episodes with these keys (B,): (B, cells) codes and (B, agents) cells of the agents."""
        rules, size, key = self.rules, self.rules.size, key[:, None, None]
        draw = _hash(key + DRAW_CELL + self.room_cells)
        walls = torch.zeros_like(draw, dtype=torch.bool)
        if rules.terrain:
            room = _hash(key + DRAW_ROOM + self.numbers[: rules.instances, None])[..., None]
            pillar = _hash(key + DRAW_PILLAR + self.room_cells).view(-1, rules.instances, size, size)
            stands = self.pillars & (pillar % 16 < room % 14)
            right = (pillar >> 4 & 1).bool()
            wall = stands | (stands & right).roll(1, 3) | (stands & ~right).roll(1, 2)
            wall = torch.where((room >> 8 & 1).bool(), wall.flip(2), wall)
            walls = torch.where((room >> 9 & 1).bool(), wall.flip(3), wall).flatten(2)
        order = (draw + (walls.long() << 32)).argsort(dim=2, stable=True)[:, :, : self.piece_kind.numel()]
        number = self.low + _hash(key + self.count_draws) % (self.high - self.low + 1)
        codes = torch.where(self.piece_rank < number[:, :, self.piece_kind], self.piece_code, EMPTY)
        place = self.rooms.expand(len(key), -1, -1).gather(2, order)
        grid = torch.full((len(key), self.cells), WALL, dtype=torch.uint8, device=self.device)
        grid.scatter_(1, self.rooms.view(1, -1).expand(len(key), -1), walls.flatten(1).byte())
        grid.scatter_(1, place.flatten(1), codes.byte().flatten(1))
        return grid, place[:, :, : rules.agents].flatten(1)

    def _make_spares(self, lanes: torch.Tensor) -> None:
        """Maps that these lanes will start with next. A few lanes are made each step, for a step must not depend on
        whether an arena ends and a map costs more than a step; each is made anew well within an episode."""
        grid, at = self._make_maps(_hash(self.key[lanes] + self.episode[lanes] + 1))
        self.spare_grid[lanes], self.spare_at[lanes] = grid, at

    def _start(self, lanes: slice | torch.Tensor, mask: torch.Tensor) -> None:
        """Start the next episode in the lanes that count."""
        rules = self.rules
        self.episode[lanes] += mask.long()
        key = _hash(self.key[lanes] + self.episode[lanes])
        grid, at = (self.spare_grid, self.spare_at) if self.fixed_shapes else self._make_maps(key)
        limit = torch.full_like(key, rules.max_steps)
        if rules.random_first_length:
            limit = torch.where(self.episode[lanes] == 0, 1 + _hash(key + DRAW_LENGTH) % rules.max_steps, limit)
        at = at + self.lanes[lanes, None] * self.cells
        new = [(self.grid, grid), (self.at, at), (self.episode_key, key[:, None])]
        new += [(self.limit, limit[:, None]), (self.clock, 0), *zip(self._per_row(), self.fresh)]
        new += [(state, 0) for state in (self.heading, self.color, self.worth, self.stats, self.header)]
        for state, value in new:
            state = state.view(self.num_games, -1)
            state[lanes] = torch.where(mask[:, None], value, state[lanes])


class MettaVectorEnv(VectorEnv):
    """`MettaBatch` for users of Gymnasium's vector API: NumPy in, NumPy out, ended episodes restart in the same step.

    The lanes are agents, so `num_envs` is a multiple of the agents of an arena. There is no single-agent entry point:
    for one arena and all of its agents there is `MettaArena`. `reset(seed=s)` starts the arenas' streams of seed s.
    """

    metadata = {"render_modes": [], "autoreset_mode": AutoresetMode.SAME_STEP}

    def __init__(self, num_envs: int = 1, render_mode: str | None = None, **rules: Any) -> None:
        self.num_envs, self.render_mode, self.kwargs, self.batch = num_envs, render_mode, rules, None
        agents = Rules(**rules).num_agents
        if num_envs < 1 or num_envs % agents:
            nearest = max(agents, round(num_envs / agents) * agents)
            raise ValueError(f"num_envs {num_envs}: must be a multiple of {agents}, the agents of an arena ({nearest})")
        self.single_observation_space = gym.spaces.Box(0, 255, (TOKENS, 3), np.uint8)
        self.single_action_space = gym.spaces.Discrete(len(ACTIONS))
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        if seed is not None or self.batch is None:
            seed = int(self.np_random.integers(2**32)) if seed is None else seed
            self.batch = MettaBatch(self.num_envs // Rules(**self.kwargs).num_agents, seed=seed, **self.kwargs)
        return self.batch.reset().numpy().copy(), {}

    def step(self, actions: np.ndarray):
        actions = np.asarray(actions)
        if actions.shape != (self.num_envs,) or actions.dtype.kind not in "iu":
            raise ValueError(f"actions {actions}: must be {self.num_envs} whole numbers")
        if actions.min() < 0 or actions.max() >= len(ACTIONS):
            raise ValueError(f"actions {actions}: must be 0 to {len(ACTIONS) - 1} each")
        obs, reward, terminated, truncated, info = self.batch.step(torch.as_tensor(actions, dtype=torch.int64))
        done, infos = truncated.numpy(), {}
        if done.any():
            final = np.full(self.num_envs, None, object)
            for lane in done.nonzero()[0]:
                final[lane] = info["final_obs"][lane].numpy().copy()
            final_info = {name: np.where(done, info[name].numpy(), 0) for name in ("hearts", "length", "return")}
            final_info |= {f"_{name}": done for name in list(final_info)}
            infos = {"final_obs": final, "_final_obs": done, "final_info": final_info, "_final_info": done}
        return obs.numpy().copy(), reward.double().numpy(), terminated.numpy(), done, infos

"""Reference implementation of a MettaGrid arena, in plain Python. envs/metta/batch.py is the batched version.

Both play the same game: equal actions and equal (seed, lane) lead to equal observations. Every random draw is a hash of
(seed, lane, episode, purpose).

An observation is (200, 3) uint8. A token is [row << 4 | column in the 11x11 window, feature, value]. The first four are
about the episode (progress, last action, its argument, last reward in hundredths); those of all things in sight follow,
nearest first, and 255 fills the rest.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import gymnasium as gym
import numpy as np

from envs.metta.pictures import render_ansi, render_rgb
from envs.metta.rules import (
    ACTIONS,
    ARMOR,
    BACK,
    BUSY,
    CENTRE,
    COLOR,
    DRAW_CELL,
    DRAW_COUNT,
    DRAW_LENGTH,
    DRAW_ORDER,
    DRAW_PILLAR,
    DRAW_ROOM,
    EPISODE,
    FIRST_ITEM,
    FORWARD,
    FROZEN,
    GET,
    GROUP,
    ITEMS,
    LASER,
    MOVES,
    NEAREST,
    NEAREST_FIRST,
    ORIENTATION,
    PAINT,
    PUT,
    REACH,
    RIGHT_OF,
    ROTATE,
    STATS,
    SWAP,
    SWAPPABLE,
    TOKENS,
    TYPE,
    TYPE_IDS,
    VIEW,
    Rules,
)
from envs.streams import integer_hash, lane_key


@dataclass(eq=False)
class Thing:
    """An agent or object in a cell."""

    name: str
    row: int
    column: int
    inventory: list[int] = field(default_factory=lambda: [0] * len(ITEMS))
    timer: int = 0
    """ticks until a converter is idle, or turns until an agent thaws"""
    heading: int = 0
    color: int = 0


class MettaArena:
    """One arena as a PettingZoo parallel environment, written for readability rather than speed.

    Observations are (200, 3) uint8, rewards float, actions integers 0 to 24 (`ACTIONS`); others raise ValueError. When
    an episode is truncated, `agents` is empty until the next reset, and each agent's info has its statistics (`STATS`)
    under "episode". `lane` selects the random stream: that of lane i in `MettaBatch`. Other keywords are the fields of
    `Rules`.
    """

    metadata = {"render_modes": ["rgb_array", "ansi"], "name": "MettaArena-v0", "render_fps": 12}

    def __init__(self, render_mode: str | None = None, lane: int = 0, **rules: Any) -> None:
        if render_mode not in (None, "rgb_array", "ansi"):
            raise ValueError(f"render_mode {render_mode}: must be rgb_array or ansi")
        self.rules = Rules(**rules)
        self.window = self.rules.window
        self.render_mode = render_mode
        self.lane = lane
        self.key = None
        self.possible_agents = [f"agent_{i}" for i in range(self.rules.num_agents)]
        self.agents: list[str] = []
        # Made once, because PettingZoo requires the same space object at every call.
        self.observation_spaces = {}
        self.action_spaces = {}
        for name in self.possible_agents:
            self.observation_spaces[name] = gym.spaces.Box(0, 255, (TOKENS, 3), np.uint8)
            self.action_spaces[name] = gym.spaces.Discrete(len(ACTIONS))

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

    # -------------------------------------------------------------------------------------------- start of an episode

    def reset(self, seed: int | None = None, options: dict | None = None) -> tuple[dict, dict]:
        """Starts the stream of `seed`, or the next episode of the stream under way (without either: seed 0)."""
        if seed is not None or self.key is None:
            self.key = lane_key(seed or 0, self.lane)
            self.episode = -1
        self.episode += 1
        self.episode_key = integer_hash(self.key + self.episode)
        self.clock = 0
        self.limit = self.rules.max_steps
        if self.episode == 0 and self.rules.random_first_length:
            self.limit = 1 + self._draw(DRAW_LENGTH) % self.rules.max_steps
        self.agents = list(self.possible_agents)
        self._build_map()
        for converter in self.converters:
            self._start_converting(converter)
        self.last_action = [0] * len(self.agents)
        self.last_reward = [0] * len(self.agents)  # in hundredths
        self.stats = [dict.fromkeys(STATS, 0) for _ in self.agents]
        return self._observations(), {name: {} for name in self.agents}

    def _draw(self, number: int) -> int:
        return integer_hash(self.episode_key + number)

    def _build_map(self) -> None:
        """Fills the map with walls, then places agents and objects of each instance on its free cells at random."""
        rows, columns = self.rules.shape
        self.grid: list[list[Thing | None]] = [
            [Thing("wall", row, column) for column in range(columns)] for row in range(rows)
        ]
        self.bodies: list[Thing] = []  # the agents
        self.converters: list[Thing] = []
        for instance, (corner_row, corner_column) in enumerate(self.rules.corners):
            free_cells = self._free_cells(instance)
            for row, column in free_cells:
                self.grid[corner_row + row][corner_column + column] = None
            for name, (row, column) in zip(self._pieces(instance), free_cells):
                if name is not None:
                    self._place(name, corner_row + row, corner_column + column)

    def _free_cells(self, instance: int) -> list[tuple[int, int]]:
        """Cells (row, column) of an instance without terrain, in random order, or in that of the plan."""
        size = self.rules.size
        if self.rules.plan:
            cells = [divmod(cell, size) for cell in self.rules.plan_cells]
            return self._mirrored(cells, instance)
        walls = self._terrain(instance) if self.rules.terrain else set()
        first_draw = DRAW_CELL + instance * size**2
        priority = {}
        for row in range(size):
            for column in range(size):
                if (row, column) not in walls:
                    priority[row, column] = self._draw(first_draw + row * size + column)
        return sorted(priority, key=priority.get)

    def _pieces(self, instance: int) -> list[str | None]:
        """Names of the things on the first free cells. None keeps a cell empty, if a number below `high` was drawn."""
        pieces = ["agent"] * self.rules.agents
        for kind, name in enumerate(self.rules.objects):
            low, high = self.rules.span(name)
            draw = self._draw(DRAW_COUNT + instance * 32 + kind)
            number = low + draw % (high - low + 1)
            pieces += [name] * number
            pieces += [None] * (high - number)
        return pieces

    def _place(self, name: str, row: int, column: int) -> None:
        thing = Thing(name, row, column)
        self.grid[row][column] = thing
        if name == "agent":
            self.bodies.append(thing)
        elif name in self.rules.book:
            self.converters.append(thing)
            recipe = self.rules.book[name]
            for item in recipe.outputs:
                thing.inventory[ITEMS.index(item)] = recipe.initial

    def _terrain(self, instance: int) -> set[tuple[int, int]]:
        """Pillars on odd rows and columns, each with a wall to its right or below, mirrored at random.

        Chains of walls extend only right and down and so touch the outer wall at most once: all cells stay connected.
        """
        size = self.rules.size
        room = self._draw(DRAW_ROOM + instance)
        walls = []
        for row in range(1, size - 1, 2):
            for column in range(1, size - 1, 2):
                draw = self._draw(DRAW_PILLAR + instance * size**2 + row * size + column)
                if draw % 16 < room % 14:  # the density of pillars is random, too
                    right = draw >> 4 & 1
                    walls.append((row, column))
                    walls.append((row + 1 - right, column + right))
        return set(self._mirrored(walls, instance))

    def _mirrored(self, cells: list[tuple[int, int]], instance: int) -> list[tuple[int, int]]:
        """Cells (row, column) of an instance, mirrored at random."""
        last = self.rules.size - 1
        room = self._draw(DRAW_ROOM + instance)
        if room >> 8 & 1:
            cells = [(last - row, column) for row, column in cells]
        if room >> 9 & 1:
            cells = [(row, last - column) for row, column in cells]
        return cells

    # --------------------------------------------------------------------------------------------------------- a step

    def step(self, actions: Mapping[str, int]) -> tuple[dict, dict, dict, dict, dict]:
        if not self.agents:
            raise ValueError("step: no episode is running; call reset first")
        if set(actions) != set(self.agents):
            raise ValueError(f"actions of {sorted(actions)}: must be one for each of {self.agents}")
        for name in self.agents:
            if actions[name] not in range(len(ACTIONS)):
                raise ValueError(f"action {actions[name]} of {name}: must be a whole number, 0 to {len(ACTIONS) - 1}")
        self.last_action = [int(actions[name]) for name in self.agents]
        self.clock += 1
        for converter in self.converters:
            self._tick(converter)
        value_before = [self._value(body) for body in self.bodies]
        self.work_reward = [0] * len(self.agents)  # in hundredths
        for i in self._turn_order():
            success = self._take_turn(i)
            self.stats[i]["success" if success else "failed"] += 1
        self.last_reward = []
        for body, old_value, reward in zip(self.bodies, value_before, self.work_reward):
            reward += self._value(body) - old_value
            self.last_reward.append(reward)

        observations = self._observations()
        rewards = {name: reward / 100 for name, reward in zip(self.agents, self.last_reward)}
        truncated = self.clock >= self.limit
        infos: dict[str, dict] = {name: {} for name in self.agents}
        for name, stats, reward in zip(self.agents, self.stats, self.last_reward):
            stats["hundredths"] += reward
            if truncated:
                infos[name]["episode"] = stats
        terminations = dict.fromkeys(self.agents, False)
        truncations = dict.fromkeys(self.agents, truncated)
        if truncated:
            self.agents = []
        return observations, rewards, terminations, truncations, infos

    def _value(self, body: Thing) -> int:
        """Reward of an agent's inventory, in hundredths."""
        value = 0
        for number, (reward, limit) in zip(body.inventory, self.rules.item_rewards):
            value += reward * min(number, limit)
        return value

    def _turn_order(self) -> list[int]:
        """Agents in random order, attackers first."""
        key = self._draw(DRAW_ORDER + self.clock)

        def priority(i: int) -> tuple[bool, int]:
            is_attack = self.last_action[i] <= NEAREST
            return not is_attack, integer_hash(key + i)

        return sorted(range(len(self.agents)), key=priority)

    def _take_turn(self, i: int) -> bool:
        """Executes the action of agent i. Returns whether it succeeded; a frozen agent loses its turn."""
        body = self.bodies[i]
        action = self.last_action[i]
        if body.timer:
            body.timer -= 1
            self.stats[i]["frozen_ticks"] += 1
            return False
        if action <= NEAREST:
            return self._attack(i, action)
        if PAINT <= action < GET:
            self._paint(body, action - PAINT)
        if ROTATE <= action < SWAP:
            body.heading = action - ROTATE
        if action in (FORWARD, BACK):
            return self._move(body, 1 if action == FORWARD else -1)
        if action == SWAP:
            return self._swap(body)
        if action in (GET, PUT):
            return self._use(i, action)
        return True

    def _cell(self, body: Thing, ahead: int, right: int = 0) -> tuple[int, int]:
        """Row and column of the cell that is `ahead` steps ahead of an agent and `right` steps to its right."""
        down, across = MOVES[body.heading]
        right_down, right_across = MOVES[RIGHT_OF[body.heading]]
        row = body.row + ahead * down + right * right_down
        column = body.column + ahead * across + right * right_across
        return row, column

    def _paint(self, body: Thing, argument: int) -> None:
        colors = [body.color + 1, body.color - 1, body.color * 2, body.color // 2]
        body.color = min(max(colors[argument], 0), 255)

    def _move(self, body: Thing, ahead: int) -> bool:
        row, column = self._cell(body, ahead)
        if self.grid[row][column] is not None:
            return False
        self.grid[body.row][body.column] = None
        self.grid[row][column] = body
        body.row = row
        body.column = column
        return True

    def _swap(self, body: Thing) -> bool:
        """Swaps places with a block or a frozen agent."""
        row, column = self._cell(body, 1)
        target = self.grid[row][column]
        if target is None:
            return False
        is_frozen = target.name == "agent" and target.timer > 0
        if target.name != "block" and not is_frozen:
            return False
        self.grid[body.row][body.column] = target
        self.grid[row][column] = body
        target.row = body.row
        target.column = body.column
        body.row = row
        body.column = column
        return True

    def _give(self, giver: Thing, taker: Thing, item: int, number: int, limit: int) -> int:
        """Transfers up to `number` of an item, until the taker has `limit`. Returns the number transferred."""
        number = min(number, limit - taker.inventory[item])
        giver.inventory[item] -= number
        taker.inventory[item] += number
        return number

    # ----------------------------------------------------------------------------------------------------- converters

    def _use(self, i: int, action: int) -> bool:
        """Gets the outputs of the converter ahead, or puts one recipe's inputs into it."""
        body = self.bodies[i]
        stats = self.stats[i]
        row, column = self._cell(body, 1)
        converter = self.grid[row][column]
        if converter is None or converter.name not in self.rules.book:
            return False
        recipe = self.rules.book[converter.name]
        put_reward, get_reward = self.rules.work_reward(converter.name)
        input_stock = sum(converter.inventory[ITEMS.index(item)] for item in recipe.inputs)
        total = 0
        if action == GET:
            for item in recipe.outputs:
                k = ITEMS.index(item)
                number = self._give(converter, body, k, converter.inventory[k], self.rules.capacity[k])
                stats[f"{item}.get"] += number
                self.work_reward[i] += number * get_reward
                total += number
        else:
            for item, needed in recipe.inputs.items():
                k = ITEMS.index(item)
                number = self._give(body, converter, k, min(needed, body.inventory[k]), 255)
                stats[f"{item}.put"] += number
                stats[f"{item}.lost"] += number
                self.work_reward[i] += number * (put_reward // (1 + input_stock))
                total += number
        self._start_converting(converter)
        return total > 0

    def _tick(self, converter: Thing) -> None:
        """Advances a converter by a tick. Outputs appear when the work ends, new work starts after the cooldown."""
        if converter.timer:
            recipe = self.rules.book[converter.name]
            converter.timer -= 1
            if converter.timer == recipe.cooldown:
                for item, number in recipe.outputs.items():
                    converter.inventory[ITEMS.index(item)] += number
            if converter.timer == 0:
                self._start_converting(converter)

    def _start_converting(self, converter: Thing) -> None:
        """Starts work if the converter is idle, has its inputs and has space for outputs."""
        recipe = self.rules.book[converter.name]
        stock = sum(converter.inventory[ITEMS.index(item)] for item in recipe.outputs)
        has_inputs = all(converter.inventory[ITEMS.index(item)] >= number for item, number in recipe.inputs.items())
        if has_inputs and stock < recipe.max_output and converter.timer == 0:
            for item, number in recipe.inputs.items():
                converter.inventory[ITEMS.index(item)] -= number
            converter.timer = recipe.cooldown + 1

    # -------------------------------------------------------------------------------------------------------- attacks

    def _attack(self, i: int, action: int) -> bool:
        """A shot uses up a laser. A target with armor loses the armor, another one freezes and loses all its items."""
        body = self.bodies[i]
        stats = self.stats[i]
        if action == 0 or not body.inventory[LASER]:
            return False
        body.inventory[LASER] -= 1
        stats["laser.lost"] += 1
        target = self._target(body, NEAREST_FIRST if action == NEAREST else (action - 1,))
        if target is None:
            return False
        target_stats = self.stats[self.bodies.index(target)]
        if target.inventory[ARMOR]:
            target.inventory[ARMOR] -= 1
            target_stats["armor.lost"] += 1
            stats["attack.blocked"] += 1
            return True
        if not target.timer:
            stats["attack.win"] += 1
            target_stats["attack.loss"] += 1
            for k, item in enumerate(ITEMS):
                number = self._give(target, body, k, target.inventory[k], self.rules.capacity[k])
                stats[f"{item}.stolen"] += number
                target_stats[f"{item}.lost"] += number
        target.timer = self.rules.freeze
        return True

    def _target(self, body: Thing, cells: tuple[int, ...]) -> Thing | None:
        """The first agent in these cells, which are indices of REACH."""
        for n in cells:
            row, column = self._cell(body, *REACH[n])
            thing = self.grid[row][column]
            if thing and thing.name == "agent":
                return thing
        return None

    # --------------------------------------------------------------------------------------------------- observations

    def tokens_of(self, thing: Thing) -> list[tuple[int, int]]:
        """Tokens (feature, value) of a thing, ordered by feature."""
        if thing.name == "wall":
            return [(TYPE, TYPE_IDS["wall"])]
        if thing.name == "block":
            return [(TYPE, TYPE_IDS["block"]), (SWAPPABLE, 1)]
        if thing.name == "agent":
            tokens = [
                (TYPE, TYPE_IDS["agent"]),
                (GROUP, 0),
                (FROZEN, int(thing.timer > 0)),
                (ORIENTATION, thing.heading),
                (COLOR, thing.color),
            ]
        else:
            tokens = [
                (TYPE, self.rules.book[thing.name].type_id),
                (COLOR, 0),
                (BUSY, int(thing.timer > 0)),
            ]
        return tokens + [(FIRST_ITEM + k, number) for k, number in enumerate(thing.inventory) if number]

    def _observations(self) -> dict[str, np.ndarray]:
        return {name: self._observe(i) for i, name in enumerate(self.agents)}

    def _observe(self, i: int) -> np.ndarray:
        body = self.bodies[i]
        progress = self.clock * 255 // self.rules.max_steps
        reward = min(max(self.last_reward[i], 0), 255)
        header = (progress, *ACTIONS[self.last_action[i]], reward)
        tokens = [(CENTRE, EPISODE + n, value) for n, value in enumerate(header)]
        for row, column in self.window:
            thing = self.grid[body.row + row][body.column + column]
            if thing:
                position = (row + VIEW) << 4 | (column + VIEW)
                tokens += [(position, feature, value) for feature, value in self.tokens_of(thing)]
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
        """Part of the PettingZoo API; there is nothing to close."""

"""Lookup tables of the batched arena: recipes by map code, items, and actions."""

from typing import Any

import torch
from torch import Tensor

from envs.metta.rules import (
    ACTIONS,
    ARMOR,
    FIRST_CONVERTER,
    ITEMS,
    LASER,
    MOVES,
    NEAREST_FIRST,
    REACH,
    RIGHT_OF,
    STATS,
    Recipe,
    Rules,
)

GET_STATS = [f"{item}.get" for item in ITEMS]
PUT_STATS = [f"{item}.put" for item in ITEMS]
LOST_STATS = [f"{item}.lost" for item in ITEMS]
STOLEN_STATS = [f"{item}.stolen" for item in ITEMS]
# Statistics that are updated together.
ATTACKER_STATS = ["frozen_ticks", "laser.lost", "attack.win", "attack.blocked", *STOLEN_STATS]
VICTIM_STATS = ["armor.lost", "attack.loss", *LOST_STATS]
USE_STATS = GET_STATS + PUT_STATS + LOST_STATS


class RuleTables:
    """Lookup tables, int64 on `device`. They depend on the rules only."""

    def __init__(self, rules: Rules, device: torch.device) -> None:
        self.device = device
        self._make_recipes(rules)
        self._make_items(rules)
        self._make_actions(rules)
        self.attacker_stats = self._columns(ATTACKER_STATS)
        self.victim_stats = self._columns(VICTIM_STATS)
        self.use_stats = self._columns(USE_STATS)

    def _tensor(self, values: Any) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.device)

    def _columns(self, names: list[str]) -> Tensor:
        """Indices of these statistics in STATS."""
        columns = [STATS.index(name) for name in names]
        return self._tensor(columns)

    def _make_recipes(self, rules: Rules) -> None:
        """Items (codes, items) and numbers (codes,) by map code. Things that are not converters have zeros."""
        no_recipe = Recipe(type_id=0, inputs={}, outputs={}, cooldown=0, max_output=0)
        converters = rules.converters * rules.instances
        recipes = [no_recipe] * FIRST_CONVERTER
        recipes += [rules.book[name] for name in converters]
        recipes += [no_recipe] * rules.num_agents
        inputs = []
        outputs = []
        for recipe in recipes:
            inputs.append([recipe.inputs.get(item, 0) for item in ITEMS])
            outputs.append([recipe.outputs.get(item, 0) for item in ITEMS])
        self.inputs = self._tensor(inputs)
        self.outputs = self._tensor(outputs)
        self.cooldown = self._tensor([recipe.cooldown for recipe in recipes])
        self.max_output = self._tensor([recipe.max_output for recipe in recipes])
        initial = self._tensor([recipe.initial for recipe in recipes])
        self.initial = (self.outputs > 0) * initial[:, None]
        work_rewards = [(0, 0)] * FIRST_CONVERTER
        work_rewards += [rules.work_reward(name) for name in converters]
        work_rewards += [(0, 0)] * rules.num_agents
        work_rewards = self._tensor(work_rewards)
        self.put_reward, self.get_reward = work_rewards.unbind(1)

    def _make_items(self, rules: Rules) -> None:
        """Tables by item."""
        self.carry = self._tensor(rules.capacity)
        reward, limit = zip(*rules.item_rewards)
        self.reward = self._tensor(reward)
        self.reward_limit = self._tensor(limit)  # number of items that are rewarded
        one_of_each = torch.eye(len(ITEMS), dtype=torch.int64, device=self.device)
        self.one_laser = one_of_each[LASER]
        self.one_armor = one_of_each[ARMOR]

    def _make_actions(self, rules: Rules) -> None:
        """Steps as differences of map cells, attack targets, and new colors."""
        columns = rules.shape[1]
        ahead = [row * columns + column for row, column in MOVES]
        self.ahead = self._tensor(ahead)  # by heading
        right = self.ahead[list(RIGHT_OF)]
        reach = [forward * self.ahead + sideways * right for forward, sideways in REACH]
        self.reach = torch.stack(reach, 1)  # (heading, attack)
        nearest_rank = [NEAREST_FIRST.index(aim) for aim in range(len(REACH))]
        self.nearest_rank = self._tensor(nearest_rank)
        self.nearest_first = self._tensor(NEAREST_FIRST)
        self.header = self._tensor(ACTIONS)  # type and argument
        color = torch.arange(256, device=self.device)
        painted = [color + 1, color - 1, color * 2, color // 2]
        painted = torch.stack(painted).clamp(0, 255)
        self.painted = painted.ravel()  # index: argument * 256 + color

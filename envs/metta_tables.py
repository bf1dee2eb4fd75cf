"""What a batch of arenas looks up: the recipe of each code on the map, and where actions lead."""

from typing import Any

import torch

from envs.metta_rules import (
    ACTIONS,
    CARRY,
    FIRST_CONVERTER,
    ITEMS,
    MOVES,
    NEAREST_FIRST,
    REACH,
    RIGHT_OF,
    STATS,
    Recipe,
    Rules,
)

# Statistics that are counted together.
ATTACKER_STATS = ("frozen_ticks", "laser.lost", "attack.win", "attack.blocked", *(f"{item}.stolen" for item in ITEMS))
VICTIM_STATS = ("armor.lost", "attack.loss", *(f"{item}.lost" for item in ITEMS))
USE_STATS = tuple(f"{item}.{change}" for change in ("get", "put", "lost") for item in ITEMS)


class RuleTables:
    """Lookup tables on `device`, int64 all of them, that follow from the rules alone."""

    def __init__(self, rules: Rules, device: torch.device) -> None:
        self.device = device
        self._make_recipes(rules)
        self._make_items(rules)
        self._make_actions(rules)
        self.attacker_stats = self._tensor([STATS.index(name) for name in ATTACKER_STATS])
        self.victim_stats = self._tensor([STATS.index(name) for name in VICTIM_STATS])
        self.use_stats = self._tensor([STATS.index(name) for name in USE_STATS])

    def _tensor(self, values: Any) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.device)

    def _make_recipes(self, rules: Rules) -> None:
        """By code, items (codes, items) and numbers (codes,); what is no converter has a recipe of zeros."""
        no_recipe = Recipe(type_id=0, inputs={}, outputs={}, cooldown=0, max_output=0)
        recipes = [no_recipe] * FIRST_CONVERTER
        recipes += [rules.book[name] for name in rules.converters * rules.instances]
        recipes += [no_recipe] * rules.num_agents
        self.inputs = self._tensor([[recipe.inputs.get(item, 0) for item in ITEMS] for recipe in recipes])
        self.outputs = self._tensor([[recipe.outputs.get(item, 0) for item in ITEMS] for recipe in recipes])
        self.cooldown = self._tensor([recipe.cooldown for recipe in recipes])
        self.max_output = self._tensor([recipe.max_output for recipe in recipes])
        initial = self._tensor([recipe.initial for recipe in recipes])
        self.initial = (self.outputs > 0) * initial[:, None]

    def _make_items(self, rules: Rules) -> None:
        """By item."""
        self.carry = self._tensor(CARRY)
        self.reward = self._tensor([reward for reward, _ in rules.item_rewards])
        self.rewarded = self._tensor([number for _, number in rules.item_rewards])  # how many of it count
        self.one_laser = self._tensor([int(item == "laser") for item in ITEMS])
        self.one_armor = self._tensor([int(item == "armor") for item in ITEMS])

    def _make_actions(self, rules: Rules) -> None:
        """Steps as differences between cells of the map; what painting does to a color."""
        columns = rules.shape[1]
        self.ahead = self._tensor([row * columns + column for row, column in MOVES])  # by heading
        right = self.ahead[list(RIGHT_OF)]
        reach = [steps * self.ahead + aside * right for steps, aside in REACH]
        self.reach = torch.stack(reach, 1)  # (heading, attack)
        self.nearest_rank = self._tensor([NEAREST_FIRST.index(n) for n in range(len(REACH))])
        self.nearest_first = self._tensor(NEAREST_FIRST)
        self.header = self._tensor(ACTIONS)  # type and argument
        color = torch.arange(256, device=self.device)
        painted = torch.stack([color + 1, color - 1, color * 2, color // 2])
        self.painted = painted.clamp(0, 255).ravel()  # at argument * 256 + color

"""Scripted and random play of the MettaGrid arena's rule book: what a trained agent is compared with."""

import random
from collections import deque

from envs.metta import CARRY, FORWARD, GET, ITEMS, MOVES, NOOP, PUT, ROTATE, MettaArena, Thing


def metta_errands(arena: MettaArena, body: Thing) -> dict[Thing, int]:
    """Converters that are of use to this agent now, and what to do there: hearts, batteries and ore, in or out."""
    errands = {}
    for converter in arena.converters:
        recipe = arena.rules.book[converter.name]
        if set(recipe.outputs) & {"heart", "battery_red", "ore_red"}:
            ready = [ITEMS.index(item) for item in recipe.outputs]
            needs = [(ITEMS.index(item), number) for item, number in recipe.inputs.items()]
            if any(converter.inventory[k] and body.inventory[k] < CARRY[k] for k in ready):
                errands[converter] = GET
            elif needs and all(body.inventory[k] >= n and converter.inventory[k] < 2 * n for k, n in needs):
                errands[converter] = PUT
    return errands


def metta_action(arena: MettaArena, body: Thing) -> int:
    """One action on the shortest way to the nearest errand; a random turn where there is none."""
    errands, grid, start = metta_errands(arena, body), arena.grid, (body.row, body.column)
    queue, first = deque([start]), {start: None}  # first step on the way to each cell
    while queue:
        row, column = queue.popleft()
        for direction, (down, across) in enumerate(MOVES):
            cell = row + down, column + across
            thing, step = grid[cell[0]][cell[1]], first[row, column]
            if thing in errands:
                if step is None:
                    return errands[thing] if body.heading == direction else ROTATE + direction
                return FORWARD if body.heading == step else ROTATE + step
            if thing is None and cell not in first:
                first[cell] = direction if step is None else step
                queue.append(cell)
    return random.choice([NOOP, FORWARD, *range(ROTATE, ROTATE + 4)])


def metta_hearts(agent_episodes: int, scripted: bool, **rules) -> float:
    """Mean hearts per agent and episode of whole episodes."""
    arena, hearts, played = MettaArena(random_first_length=False, **rules), 0, 0
    random.seed(0)
    for seed in range(-(-agent_episodes // arena.rules.num_agents)):
        arena.reset(seed=seed)
        while arena.agents:
            actions = [metta_action(arena, body) if scripted else random.randrange(25) for body in arena.bodies]
            arena.step(dict(zip(arena.agents, actions)))
        hearts += sum(stats["heart.get"] for stats in arena.stats)
        played += len(arena.stats)
    return hearts / played

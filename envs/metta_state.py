"""Whether saved arenas can be: what `MettaBatch.load_state_dict` checks before it loads anything."""

import torch

from envs.metta_rules import CARRY, FIRST_CONVERTER, ITEMS, VIEW, WALL, Rules


def find_problem(
    rules: Rules, key, episode, clock, limit, grid, cell, heading, color, inventory, timer, header, stats, finished
) -> str | None:
    """What is wrong with a `state_dict` on the CPU, None if nothing is.

    Every thing must stand where it is said to, within walls, and hold what it can: a step follows codes and cells
    without looking where they lead.
    """
    rows, columns = rules.shape
    games = len(grid)
    agent_codes = torch.arange(rules.first_agent, rules.num_codes)
    first_cell = torch.arange(games)[:, None] * rows * columns
    cell = cell.view(games, -1) - first_cell  # within its own game
    row = cell // columns
    column = cell % columns
    inventory = inventory.view(games, rules.num_codes, -1)
    timer = timer.view(games, -1)
    max_inventory, max_timer = _code_limits(rules)
    limits = {  # lowest and highest
        "key": (key, 0, 2**32 - 1),
        "episode": (episode, 0, 2**32),
        "limit": (limit, 1, rules.max_steps),
        "clock": (clock, 0, limit - 1),
        "grid": (grid, 0, rules.num_codes - 1),
        "row": (row, VIEW, rows - VIEW - 1),
        "column": (column, VIEW, columns - VIEW - 1),
        "heading": (heading, 0, 3),
        "color": (color, 0, 255),
        "inventory": (inventory, 0, max_inventory),
        "timer": (timer, 0, max_timer),
    }
    for name, (values, lowest, highest) in limits.items():
        out_of_range = (values < lowest) | (values > highest)
        if out_of_range.any():
            return f"{name} out of range"
    if not finished.isfinite().all():
        return "sums that are not finite"

    inside = torch.zeros(rows, columns, dtype=torch.bool)
    inside[VIEW:-VIEW, VIEW:-VIEW] = True
    outer_wall = grid.view(-1, rows, columns)[:, ~inside]
    if (outer_wall != WALL).any():
        return "a map without its outer wall"
    cells_of_code = torch.zeros(games, rules.num_codes, dtype=torch.int64)
    cells_of_code.scatter_add_(1, grid.long(), torch.ones_like(grid, dtype=torch.int64))
    cells_of_thing = cells_of_code[:, FIRST_CONVERTER:]
    is_unique = (cells_of_thing <= 1).all()
    codes_at_agents = grid.gather(1, cell)
    if not is_unique or (codes_at_agents != agent_codes).any():
        return "agents and map differ"
    return None


def _code_limits(rules: Rules) -> tuple[torch.Tensor, torch.Tensor]:
    """By code, the most of each item that a thing holds (codes, items), and its longest timer (codes,)."""
    converters = rules.converters * rules.instances
    inventory = torch.zeros(rules.num_codes, len(ITEMS), dtype=torch.int64)
    inventory[FIRST_CONVERTER : rules.first_agent] = 255  # of a byte
    inventory[rules.first_agent :] = torch.tensor(CARRY)
    timer = [0] * FIRST_CONVERTER
    timer += [rules.book[name].cooldown + 1 for name in converters]
    timer += [rules.freeze] * rules.num_agents
    return inventory, torch.tensor(timer)

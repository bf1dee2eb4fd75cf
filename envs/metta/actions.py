"""The parts of a step of `MettaBatch`: converters work, then agents attack, move and use converters.

Shapes: G games, A agents per game, N = G * A agents. With fixed shapes a function computes all games and applies the
result where a mask is set; otherwise it computes only the games that need it.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from envs.metta.rules import (
    ARMOR,
    BACK,
    BLOCK,
    EMPTY,
    FIRST_CONVERTER,
    FORWARD,
    GET,
    LASER,
    NEAREST,
    NOOP,
    PAINT,
    PUT,
    ROTATE,
    SWAP,
)

if TYPE_CHECKING:
    from envs.metta.batch import MettaBatch

# ---------------------------------------------------------------------------------------------------------- converters


def tick(games: "MettaBatch") -> None:
    """Advances all converters by a tick. Outputs appear when the work ends, new work starts after the cooldown."""
    converters = slice(FIRST_CONVERTER, games.first_agent)
    cooldown = games.tables.cooldown
    timer = games.by_game(games.timer)[:, converters]
    is_running = timer > 0
    timer -= is_running.long()
    work_ends = is_running & (timer == cooldown[converters])
    cooldown_ends = is_running & (timer == 0)
    has_event = torch.zeros_like(games.dirty)
    games.by_game(has_event)[:, converters] = work_ends | cooldown_ends

    rows, mask = games.select(has_event)
    code = games.row_code[rows]
    timer = games.timer[rows]
    has_output = mask & (timer == cooldown[code])
    output = games.tables.outputs[code] * has_output[:, None]
    inventory = games.inventory[rows] + output
    start_converting(games, rows, inventory, mask)
    games.mark_dirty(rows, mask)


def start_converting(games: "MettaBatch", rows: slice | Tensor, inventory: Tensor, mask: Tensor) -> None:
    """Stores `inventory` (B, items) in `rows` (B,) and starts the converters of `mask` (B,) that can work."""
    tables = games.tables
    code = games.row_code[rows]
    inputs = tables.inputs[code]
    is_output = tables.outputs[code] > 0
    stock = (inventory * is_output).sum(1)
    has_space = stock < tables.max_output[code]
    has_inputs = (inventory >= inputs).all(1)
    timer = games.timer[rows]
    is_idle = timer == 0
    is_start = mask & has_space & has_inputs & is_idle
    used_inputs = inputs * is_start[:, None]
    games.inventory[rows] = inventory - used_inputs
    duration = tables.cooldown[code] + 1
    games.timer[rows] = torch.where(is_start, duration, timer)


# ------------------------------------------------------------------------------------------------------------- attacks


class Attack(NamedTuple):
    """Result of one agent's turn in each game, (B,); `loot` is (B, items)."""

    agent: Tensor
    victim: Tensor  # the agent itself if it hit nobody
    is_frozen: Tensor
    has_shot: Tensor
    has_hit: Tensor
    is_blocked: Tensor  # by armor
    is_robbed: Tensor
    loot: Tensor


def attack(games: "MettaBatch", action: Tensor, priority: Tensor) -> tuple[Tensor, Tensor]:
    """Attacks, one agent of a game after another, in games where an agent can shoot.

    `action` and `priority` are (N,). Returns masks (N,) of the agents whose turn is over and of those that hit.
    """
    is_attack = action <= NEAREST
    row = games.agent_row
    has_laser = games.inventory[row, LASER] > 0
    is_awake = games.timer[row] == 0
    can_shoot = is_attack & (action > 0) & has_laser & is_awake
    has_shooter = games.by_game(can_shoot).any(1)
    lanes, mask = games.select(has_shooter)
    has_turn = torch.zeros_like(is_attack)
    lane_attacks = games.by_game(is_attack)[lanes]
    lane_turns = lane_attacks & mask[:, None]
    games.by_game(has_turn)[lanes] = lane_turns

    success = torch.zeros_like(is_attack)
    results = []
    for agent in _attack_order(games, lanes, has_turn, priority):
        agent_action = action[agent]
        agent_has_turn = has_turn[agent]
        result = _attack_turn(games, agent, agent_action, agent_has_turn)
        results.append(result)
    if results:
        _count_attacks(games, results, success)
    # In games without a shooter an attack fails and uses up the turn, except that a frozen agent thaws as usual.
    is_awake = games.timer[row] == 0
    is_over = has_turn | (is_attack & is_awake)
    return is_over, success


def _attack_order(games: "MettaBatch", lanes: slice | Tensor, has_turn: Tensor, priority: Tensor) -> tuple[Tensor, ...]:
    """The agents of each turn, one of each game (B,). Agents without a turn come last; on CPU they are left out."""
    num_turns = games.rules.num_agents
    if not games.fixed_shapes:
        turns = games.by_game(has_turn).sum(1)
        num_turns = int(turns.max())
    is_last = ~has_turn
    sort_key = priority + is_last.long() * 2**32
    sort_key = games.by_game(sort_key)[lanes]
    order = sort_key.argsort(1)
    first_agent = games.lanes[lanes, None] * games.rules.num_agents
    agents = order[:, :num_turns] + first_agent
    return agents.unbind(1)


def _attack_turn(games: "MettaBatch", agent: Tensor, action: Tensor, has_turn: Tensor) -> Attack:
    """The attack of one agent of each game (B,), if it has a turn.

    A shot uses up a laser. A target with armor loses the armor; another target freezes and loses all its items.
    """
    row = games.agent_row[agent]
    inventory = games.inventory[row]
    timer = games.timer[row]
    is_frozen = has_turn & (timer > 0)
    is_attack = has_turn & ~is_frozen & (action > 0)
    has_shot = is_attack & (inventory[:, LASER] > 0)
    used_laser = has_shot[:, None] * games.tables.one_laser
    inventory = inventory - used_laser

    code = _target_code(games, agent, action)
    has_hit = has_shot & (code >= games.first_agent)
    row_base = games.row_base[agent]
    target = row_base + torch.where(has_hit, code, EMPTY)  # the row of EMPTY belongs to no thing
    target_inventory = games.inventory[target]
    target_timer = games.timer[target]
    is_blocked = has_hit & (target_inventory[:, ARMOR] > 0)
    is_effective = has_hit & ~is_blocked
    is_robbed = is_effective & (target_timer == 0)
    capacity = games.tables.carry - inventory
    loot = torch.minimum(target_inventory, capacity)
    loot = loot * is_robbed[:, None]

    inventory = inventory + loot
    used_armor = is_blocked[:, None] * games.tables.one_armor
    target_inventory = target_inventory - loot - used_armor
    timer = timer - is_frozen.long()
    target_timer = torch.where(is_effective, games.rules.freeze, target_timer)
    rows = torch.stack([row, target])
    inventories = torch.stack([inventory, target_inventory])
    timers = torch.stack([timer, target_timer])
    games.inventory[rows] = inventories
    games.timer[rows] = timers
    games.mark_dirty(row, has_shot | is_frozen)
    games.mark_dirty(target, has_hit)
    target_agent = games.agent_base[agent] + code - games.first_agent
    victim = torch.where(has_hit, target_agent, agent)
    return Attack(agent, victim, is_frozen, has_shot, has_hit, is_blocked, is_robbed, loot)


def _target_code(games: "MettaBatch", agent: Tensor, action: Tensor) -> Tensor:
    """Codes (B,) of the cells that the attacks of `agent` (B,) aim at."""
    tables = games.tables
    cell = games.cell[agent, None]
    heading = games.heading[agent]
    cells = cell + tables.reach[heading]
    codes = games.grid.view(-1)[cells]
    codes = codes.long()  # (B, 9)
    is_agent = codes >= games.first_agent
    rank = torch.where(is_agent, tables.nearest_rank, 8)
    nearest_rank = rank.amin(1)
    nearest = tables.nearest_first[nearest_rank]
    chosen = (action - 1).clamp(0, 8)
    aim = torch.where(action == NEAREST, nearest, chosen)
    target_code = codes.gather(1, aim[:, None])
    return target_code.squeeze(1)


def _count_attacks(games: "MettaBatch", attacks: list[Attack], success: Tensor) -> None:
    """Adds the attacks to the statistics and to `success` (N,)."""
    columns = map(torch.cat, zip(*attacks))
    agent, victim, is_frozen, has_shot, has_hit, is_blocked, is_robbed, loot = columns
    success[agent] = has_hit
    attacker_counts = torch.stack([is_frozen, has_shot, is_robbed, is_blocked], 1)
    victim_counts = torch.stack([is_blocked, is_robbed], 1)
    attacker_counts = torch.cat([attacker_counts, loot], 1)
    victim_counts = torch.cat([victim_counts, loot], 1)
    attacker_stats = (agent, games.tables.attacker_stats, attacker_counts)
    victim_stats = (victim, games.tables.victim_stats, victim_counts)
    games.count(attacker_stats, victim_stats)


# ------------------------------------------------------------------------------------------- the agent itself, its cell


def thaw(games: "MettaBatch", has_turn: Tensor) -> Tensor:
    """Frozen agents lose their turn. Returns a mask of the agents of `has_turn` (N,) that can act."""
    row = games.agent_row
    is_frozen = has_turn & (games.timer[row] > 0)
    games.timer[row] -= is_frozen.long()
    games.mark_dirty(row, is_frozen)
    games.stat("frozen_ticks").add_(is_frozen)
    return has_turn & ~is_frozen


def paint_and_rotate(games: "MettaBatch", action: Tensor, can_act: Tensor) -> Tensor:
    """Actions (N,) that affect only the agent itself. Returns the mask of agents that succeeded."""
    is_paint = can_act & (action >= PAINT) & (action < GET)
    argument = (action - PAINT).clamp(0, 3)
    new_color = games.tables.painted[argument * 256 + games.color]
    color = torch.where(is_paint, new_color, games.color)
    games.color.copy_(color)
    is_rotation = can_act & (action >= ROTATE) & (action < SWAP)
    heading = torch.where(is_rotation, action - ROTATE, games.heading)
    games.heading.copy_(heading)
    is_noop = can_act & (action == NOOP)
    return is_paint | is_rotation | is_noop


def move_and_use(games: "MettaBatch", action: Tensor, can_act: Tensor, priority: Tensor) -> Tensor:
    """Actions (N,) that affect a neighbouring cell, by priority where agents compete for a cell.

    Returns the mask of agents that succeeded.
    """
    is_step = (action == FORWARD) | (action == BACK)
    is_move = can_act & (is_step | (action == SWAP))
    is_use = can_act & ((action == GET) | (action == PUT))
    direction = torch.where(action == BACK, -1, 1)
    step = games.tables.ahead[games.heading] * direction
    target_cell = games.cell + step
    if games.rules.rewards == "work":
        games.work_reward.zero_()
    success = torch.zeros_like(can_act)
    move_results = []
    use_results = []
    for turn in _turns(games, is_move | is_use, priority, target_cell):
        agent, mask = _select_agents(games, is_move, turn)
        can_move = _move(games, agent, mask, action[agent], target_cell[agent])
        move_results.append((agent, can_move))
        agent, mask = _select_agents(games, is_use, turn)
        num_put, num_got = _use(games, agent, mask, action[agent], target_cell[agent])
        use_results.append((agent, num_put, num_got))
    if move_results:
        agent, can_move = map(torch.cat, zip(*move_results))
        success[agent] = can_move
        agent, num_put, num_got = map(torch.cat, zip(*use_results))
        has_use = num_put + num_got > 0
        success[agent] |= has_use.any(1)
        use_counts = torch.cat([num_got, num_put, num_put], 1)
        use_stats = (agent, games.tables.use_stats, use_counts)
        games.count(use_stats)
    return success


def _turns(games: "MettaBatch", mask: Tensor, priority: Tensor, target_cell: Tensor) -> Iterator[Tensor]:
    """Splits the agents of `mask` (N,) into turns, which are executed one after another.

    With fixed shapes a turn is one agent of each game (G,). Otherwise it is a mask (N,) of all agents whose cell and
    target cell differ from those of every agent of higher priority that has not had its turn.
    """
    priority = games.by_game(priority)
    if games.fixed_shapes:
        order = priority.argsort(1)
        for number in order.unbind(1):
            yield games.lanes * games.rules.num_agents + number
        return
    pending = games.by_game(mask)
    cells = torch.stack([games.cell, target_cell], 1).int()
    cells = cells.view(games.num_games, -1, 2)
    first_cells = cells[:, :, None]
    second_cells = cells[:, None]
    is_conflict = torch.zeros_like(pending[:, :, None] & pending[:, None])  # (G, agent, other agent)
    for first in range(2):
        for second in range(2):
            is_conflict |= first_cells[..., first] == second_cells[..., second]
    is_later = priority[:, :, None] > priority[:, None]
    has_to_wait = is_conflict & is_later
    while pending.any():
        is_waiting = has_to_wait & pending[:, None]
        turn = pending & ~is_waiting.any(2)
        yield turn.view(-1)
        pending = pending & ~turn


def _select_agents(games: "MettaBatch", mask: Tensor, turn: Tensor) -> tuple[Tensor, Tensor]:
    """Agents (B,) to update in this turn and their mask."""
    if games.fixed_shapes:
        return turn, mask[turn]
    agent = (mask & turn).nonzero().squeeze(1)
    return agent, mask[agent]


def _move(games: "MettaBatch", agent: Tensor, mask: Tensor, action: Tensor, target_cell: Tensor) -> Tensor:
    """Moves agents (B,) to an empty cell, or swaps them with a block or a frozen agent.

    The cells of these agents and their targets are distinct. Returns the mask of agents that moved.
    """
    grid = games.grid.view(-1)
    cell = games.cell[agent]
    code = games.agent_code[agent]
    target_code = grid[target_cell].long()
    is_agent = target_code >= games.first_agent
    target_row = games.row_base[agent] + target_code
    is_frozen = games.timer[target_row] > 0
    is_swappable = (target_code == BLOCK) | (is_agent & is_frozen)
    is_empty = target_code == EMPTY
    can_move = mask & torch.where(action == SWAP, is_swappable, is_empty)
    cells = torch.stack([cell, target_cell])
    codes = torch.stack([code, target_code])
    swapped_codes = torch.stack([target_code, code])
    new_codes = torch.where(can_move, swapped_codes, codes)
    grid[cells] = new_codes.byte()

    # Without a swap of agents `other` is the agent itself, and both writes are equal.
    is_agent_swap = can_move & is_agent
    other = games.agent_base[agent] + target_code - games.first_agent
    other = torch.where(is_agent_swap, other, agent)
    new_cell = torch.where(can_move, target_cell, cell)
    other_cell = torch.where(is_agent_swap, cell, new_cell)
    agents = torch.stack([agent, other])
    new_cells = torch.stack([new_cell, other_cell])
    games.cell[agents] = new_cells
    return can_move


def _use(
    games: "MettaBatch", agent: Tensor, mask: Tensor, action: Tensor, target_cell: Tensor
) -> tuple[Tensor, Tensor]:
    """Puts one recipe's inputs into the converter ahead or gets its outputs. These agents (B,) use distinct converters.

    Returns the items put and the items got, (B, items) each.
    """
    tables = games.tables
    code = games.grid.view(-1)[target_cell]
    code = code.long()
    row = games.agent_row[agent]
    converter_row = games.row_base[agent] + code
    rows = torch.cat([row, converter_row])
    inventory, stock = games.inventory[rows].chunk(2)
    inputs = tables.inputs[code]
    is_put = mask & (action == PUT)
    num_put = torch.minimum(inputs, inventory)
    num_put = torch.minimum(num_put, 255 - stock)
    num_put = num_put * is_put[:, None]
    is_get = mask & (action != PUT)
    is_output = tables.outputs[code] > 0
    capacity = tables.carry - inventory
    num_got = torch.minimum(stock, capacity)
    num_got = num_got * (is_get[:, None] & is_output)

    if games.rules.rewards == "work":
        input_stock = (stock * (inputs > 0)).sum(1)
        put_reward = tables.put_reward[code]
        put_reward = torch.div(put_reward, 1 + input_stock, rounding_mode="floor")
        get_reward = tables.get_reward[code]
        games.work_reward[agent] = num_put.sum(1) * put_reward + num_got.sum(1) * get_reward
    inventory = inventory - num_put + num_got
    stock = stock + num_put - num_got
    mask = mask.repeat(2)
    inventories = torch.cat([inventory, stock])
    start_converting(games, rows, inventories, mask)
    games.mark_dirty(rows, mask)
    return num_put, num_got

"""What happens in a step of `MettaBatch`: converters work, agents attack, move, and use converters.

Shapes: G games, A agents of a game, N = G * A agents. With fixed shapes each function works on all games, and a mask
says which of them count; else on those games only that need it.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import torch

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
    """Converters work or rest for a tick: products come out after the work, the next begin after the rest."""
    converters = slice(FIRST_CONVERTER, games.first_agent)
    cooldown = games.tables.cooldown
    timer = games.by_game(games.timer)[:, converters]
    runs = timer > 0
    timer -= runs.long()
    work_ends = runs & (timer == cooldown[converters])
    rest_ends = runs & (timer == 0)
    changes = torch.zeros_like(games.dirty)
    games.by_game(changes)[:, converters] = work_ends | rest_ends

    rows, mask = games.select(changes)
    code = games.row_code[rows]
    has_product = mask & (games.timer[rows] == cooldown[code])
    product = games.tables.outputs[code] * has_product[:, None]
    inventory = games.inventory[rows] + product
    start_converting(games, rows, inventory, mask)
    games.mark_dirty(rows, mask)


def start_converting(
    games: "MettaBatch", rows: slice | torch.Tensor, inventory: torch.Tensor, mask: torch.Tensor
) -> None:
    """Let those rows (B,) that count begin to work if they can; they hold `inventory` (B, items) from now on."""
    tables = games.tables
    code = games.row_code[rows]
    inputs = tables.inputs[code]
    is_output = tables.outputs[code] > 0
    stock = (inventory * is_output).sum(1)
    has_space = stock < tables.max_output[code]
    has_inputs = (inventory >= inputs).all(1)
    is_idle = games.timer[rows] == 0
    starts = mask & has_space & has_inputs & is_idle
    games.inventory[rows] = inventory - inputs * starts[:, None]
    games.timer[rows] = torch.where(starts, tables.cooldown[code] + 1, games.timer[rows])


# ------------------------------------------------------------------------------------------------------------- attacks


class Attack(NamedTuple):
    """What came of the turn of one agent of each game, (B,); `loot` is (B, items)."""

    agent: torch.Tensor
    victim: torch.Tensor  # the agent itself, where nobody was hit
    frozen: torch.Tensor
    shot: torch.Tensor
    hit: torch.Tensor
    blocked: torch.Tensor  # by armor
    robbed: torch.Tensor
    loot: torch.Tensor


def attack(games: "MettaBatch", action: torch.Tensor, priority: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """All attacks, one agent of a game after another, in the games where anybody has a laser to fire.

    From actions and priorities (N,); returns (N,) whose turn is over with this, and who hit.
    """
    attacks = action <= NEAREST
    has_laser = games.inventory[games.agent_row, LASER] > 0
    is_awake = games.timer[games.agent_row] == 0
    can_shoot = attacks & (action > 0) & has_laser & is_awake
    has_shooter = games.by_game(can_shoot).any(1)
    lanes, mask = games.select(has_shooter)
    has_turn = torch.zeros_like(attacks)
    lane_attacks = games.by_game(attacks)[lanes]
    games.by_game(has_turn)[lanes] = lane_attacks & mask[:, None]

    success = torch.zeros_like(attacks)
    attacks_in_order = []
    for agent in _attack_order(games, lanes, has_turn, priority):
        attacks_in_order.append(_attack_of(games, agent, action[agent], has_turn[agent]))
    if attacks_in_order:
        _count_attacks(games, attacks_in_order, success)
    # An attack without a laser in a game where nobody fires fails; a frozen agent waits as any other.
    is_awake = games.timer[games.agent_row] == 0
    return has_turn | (attacks & is_awake), success


def _attack_order(
    games: "MettaBatch", lanes: slice | torch.Tensor, has_turn: torch.Tensor, priority: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """One agent of each game (B,) at a time. Those without a turn come last; a CPU stops when only they are left."""
    num_turns = games.rules.num_agents
    if not games.fixed_shapes:
        turns = games.by_game(has_turn).sum(1)
        num_turns = int(turns.max())
    sort_key = priority + (~has_turn).long() * 2**32
    order = games.by_game(sort_key)[lanes].argsort(1)
    first_agent = games.lanes[lanes, None] * games.rules.num_agents
    agents = order[:, :num_turns] + first_agent
    return agents.unbind(1)


def _attack_of(games: "MettaBatch", agent: torch.Tensor, action: torch.Tensor, has_turn: torch.Tensor) -> Attack:
    """The attack of one agent of each game (B,), where it has a turn.

    A laser is spent whether it hits or not. Armor stops it; without, the target freezes and loses all it has.
    """
    row = games.agent_row[agent]
    inventory = games.inventory[row]
    timer = games.timer[row]
    frozen = has_turn & (timer > 0)
    shot = has_turn & ~frozen & (action > 0) & (inventory[:, LASER] > 0)
    inventory = inventory - shot[:, None] * games.tables.one_laser

    code = _target_code(games, agent, action)
    hit = shot & (code >= games.first_agent)
    row_base = games.row_base[agent]
    target = row_base + torch.where(hit, code, EMPTY)  # the row of EMPTY is nobody's
    target_inventory = games.inventory[target]
    target_timer = games.timer[target]
    blocked = hit & (target_inventory[:, ARMOR] > 0)
    freezes = hit & ~blocked
    robbed = freezes & (target_timer == 0)
    capacity = games.tables.carry - inventory
    loot = torch.minimum(target_inventory, capacity) * robbed[:, None]

    inventory = inventory + loot
    target_inventory = target_inventory - loot - blocked[:, None] * games.tables.one_armor
    timer = timer - frozen.long()
    target_timer = torch.where(freezes, games.rules.freeze, target_timer)
    rows = torch.stack([row, target])
    games.inventory[rows] = torch.stack([inventory, target_inventory])
    games.timer[rows] = torch.stack([timer, target_timer])
    games.mark_dirty(row, shot | frozen)
    games.mark_dirty(target, hit)
    hit_agent = games.agent_base[agent] + code - games.first_agent
    victim = torch.where(hit, hit_agent, agent)
    return Attack(agent, victim, frozen, shot, hit, blocked, robbed, loot)


def _target_code(games: "MettaBatch", agent: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
    """Codes (B,) in the cells that these attacks aim at."""
    tables = games.tables
    cell = games.cell[agent, None]
    heading = games.heading[agent]
    cells = cell + tables.reach[heading]
    codes = games.grid.view(-1)[cells].long()  # (B, 9)
    is_agent = codes >= games.first_agent
    nearest_rank = torch.where(is_agent, tables.nearest_rank, 8).amin(1)
    nearest = tables.nearest_first[nearest_rank]
    aim = torch.where(action == NEAREST, nearest, (action - 1).clamp(0, 8))
    target_code = codes.gather(1, aim[:, None])
    return target_code.squeeze(1)


def _count_attacks(games: "MettaBatch", attacks: list[Attack], success: torch.Tensor) -> None:
    agent, victim, frozen, shot, hit, blocked, robbed, loot = map(torch.cat, zip(*attacks))
    success[agent] = hit
    attacker_counts = torch.stack([frozen, shot, robbed, blocked], 1)
    victim_counts = torch.stack([blocked, robbed], 1)
    attacker_counts = torch.cat([attacker_counts, loot], 1)
    victim_counts = torch.cat([victim_counts, loot], 1)
    of_attackers = (agent, games.tables.attacker_stats, attacker_counts)
    of_victims = (victim, games.tables.victim_stats, victim_counts)
    games.count(of_attackers, of_victims)


# ------------------------------------------------------------------------------------------- the agent itself, its cell


def thaw(games: "MettaBatch", waiting: torch.Tensor) -> torch.Tensor:
    """A frozen agent loses its turn; returns who of those waiting for one (N,) may act."""
    frozen = waiting & (games.timer[games.agent_row] > 0)
    games.timer[games.agent_row] -= frozen.long()
    games.mark_dirty(games.agent_row, frozen)
    games.stat("frozen_ticks").add_(frozen)
    return waiting & ~frozen


def paint_and_rotate(games: "MettaBatch", action: torch.Tensor, acts: torch.Tensor) -> torch.Tensor:
    """Actions (N,) that concern nobody else, of those who may act; returns who succeeded."""
    paints = acts & (action >= PAINT) & (action < GET)
    argument = (action - PAINT).clamp(0, 3)
    painted = games.tables.painted[argument * 256 + games.color]
    color = torch.where(paints, painted, games.color)
    games.color.copy_(color)
    rotates = acts & (action >= ROTATE) & (action < SWAP)
    heading = torch.where(rotates, action - ROTATE, games.heading)
    games.heading.copy_(heading)
    rests = acts & (action == NOOP)
    return paints | rotates | rests


def move_and_use(games: "MettaBatch", action: torch.Tensor, acts: torch.Tensor, priority: torch.Tensor) -> torch.Tensor:
    """Actions (N,) that concern a neighbouring cell, in the order of priority where they meet.

    Returns who succeeded.
    """
    moves = acts & ((action == FORWARD) | (action == BACK) | (action == SWAP))
    uses = acts & ((action == GET) | (action == PUT))
    direction = torch.where(action == BACK, -1, 1)
    step = games.tables.ahead[games.heading] * direction
    target_cell = games.cell + step
    if games.rules.rewards == "work":
        games.work_reward.zero_()
    success = torch.zeros_like(acts)
    move_results = []
    use_results = []
    for turn in _rounds(games, moves | uses, priority, target_cell):
        agent, mask = _select_agents(games, moves, turn)
        can_move = _move(games, agent, mask, action[agent], target_cell[agent])
        move_results.append((agent, can_move))
        agent, mask = _select_agents(games, uses, turn)
        put, got = _use(games, agent, mask, action[agent], target_cell[agent])
        use_results.append((agent, put, got))
    if move_results:
        agent, can_move = map(torch.cat, zip(*move_results))
        success[agent] = can_move
        agent, put, got = map(torch.cat, zip(*use_results))
        success[agent] |= (put + got > 0).any(1)
        of_users = (agent, games.tables.use_stats, torch.cat([got, put, put], 1))
        games.count(of_users)
    return success


def _rounds(
    games: "MettaBatch", mask: torch.Tensor, priority: torch.Tensor, target_cell: torch.Tensor
) -> Iterator[torch.Tensor]:
    """Who of `mask` (N,) acts when, in parts that follow each other.

    With fixed shapes the k-th agents of all games (G,). Else a mask (N,) of all those for whom nobody with an earlier
    turn, still to act, stands on or reaches for the same cell: what they do cannot depend on each other.
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
    meets = torch.zeros_like(pending[:, :, None] & pending[:, None])  # (G, agent, other agent)
    for end in range(2):
        for other_end in range(2):
            meets |= cells[:, :, None, end] == cells[:, None, :, other_end]
    is_later = priority[:, :, None] > priority[:, None]
    waits_for = meets & is_later
    while pending.any():
        waits = (waits_for & pending[:, None]).any(2)
        turn = pending & ~waits
        yield turn.view(-1)
        pending = pending & ~turn


def _select_agents(games: "MettaBatch", mask: torch.Tensor, turn: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Agents of this turn (B,) to work on, and which of them count."""
    if games.fixed_shapes:
        return turn, mask[turn]
    agent = (mask & turn).nonzero().squeeze(1)
    return agent, mask[agent]


def _move(
    games: "MettaBatch", agent: torch.Tensor, mask: torch.Tensor, action: torch.Tensor, target_cell: torch.Tensor
) -> torch.Tensor:
    """To an empty cell, or swap with a block or a frozen agent; no two of these agents (B,) touch the same cell.

    Returns who moved.
    """
    grid = games.grid.view(-1)
    cell = games.cell[agent]
    code = games.agent_code[agent]
    target_code = grid[target_cell].long()
    is_agent = target_code >= games.first_agent
    target_row = games.row_base[agent] + target_code
    is_frozen = games.timer[target_row] > 0
    is_swappable = (target_code == BLOCK) | (is_agent & is_frozen)
    can_move = mask & torch.where(action == SWAP, is_swappable, target_code == EMPTY)
    cells = torch.stack([cell, target_cell])
    codes = torch.stack([code, target_code])
    swapped_codes = torch.stack([target_code, code])
    grid[cells] = torch.where(can_move, swapped_codes, codes).byte()

    # Where no other agent is moved, the other is the agent itself: both write the same cell.
    swaps_agent = can_move & is_agent
    other = games.agent_base[agent] + target_code - games.first_agent
    other = torch.where(swaps_agent, other, agent)
    new_cell = torch.where(can_move, target_cell, cell)
    other_cell = torch.where(swaps_agent, cell, new_cell)
    new_cells = torch.stack([new_cell, other_cell])
    games.cell[torch.stack([agent, other])] = new_cells
    return can_move


def _use(
    games: "MettaBatch", agent: torch.Tensor, mask: torch.Tensor, action: torch.Tensor, target_cell: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Put one recipe's inputs into the converter ahead or get its outputs; no two of these agents (B,) use the same.

    Returns what each of them put and got (B, items).
    """
    tables = games.tables
    code = games.grid.view(-1)[target_cell].long()
    row = games.agent_row[agent]
    converter_row = games.row_base[agent] + code
    rows = torch.cat([row, converter_row])
    inventory, stock = games.inventory[rows].chunk(2)
    puts = mask & (action == PUT)
    put = torch.minimum(tables.inputs[code], inventory)
    put = torch.minimum(put, 255 - stock) * puts[:, None]
    gets = mask & (action != PUT)
    is_output = tables.outputs[code] > 0
    capacity = tables.carry - inventory
    got = torch.minimum(stock, capacity) * (gets[:, None] & is_output)

    if games.rules.rewards == "work":
        waiting = (stock * (tables.inputs[code] > 0)).sum(1)
        put_reward = torch.div(tables.put_reward[code], 1 + waiting, rounding_mode="floor")
        games.work_reward[agent] = put.sum(1) * put_reward + got.sum(1) * tables.get_reward[code]
    inventory = inventory - put + got
    stock = stock + put - got
    mask = mask.repeat(2)
    inventories = torch.cat([inventory, stock])
    start_converting(games, rows, inventories, mask)
    games.mark_dirty(rows, mask)
    return put, got

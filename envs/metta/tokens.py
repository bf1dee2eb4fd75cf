"""Observations of the batched arena: a table with the tokens of every thing, gathered for the cells in sight."""

import torch
from torch import Tensor

from envs.metta.rules import (
    BUSY,
    CENTRE,
    COLOR,
    EPISODE,
    FIRST_ITEM,
    FROZEN,
    GROUP,
    HEADER,
    ITEMS,
    ORIENTATION,
    SWAPPABLE,
    TOKENS,
    TYPE,
    TYPE_IDS,
    VIEW,
    Rules,
)

WIDTH = 16  # tokens per thing in the table; the last one is a dummy that takes masked writes
STATE_TOKEN = 2  # index of the token for busy or frozen
HEADING_TOKEN = 3
COLOR_TOKEN = 4


def token(feature: int, value: int = 0) -> int:
    """A token in 32 bits. From the lowest byte: position (0 here), feature, value."""
    return feature << 8 | value << 16


def tokens_by_code(rules: Rules) -> list[list[int]]:
    """By map code: the tokens of a thing without those of its items."""
    wall = [token(TYPE, TYPE_IDS["wall"])]
    block = [token(TYPE, TYPE_IDS["block"]), token(SWAPPABLE, 1)]
    agent = [
        token(TYPE, TYPE_IDS["agent"]),
        token(GROUP),
        token(FROZEN),  # STATE_TOKEN
        token(ORIENTATION),  # HEADING_TOKEN
        token(COLOR),  # COLOR_TOKEN
    ]
    tokens = [[], wall, block]  # EMPTY, WALL, BLOCK
    for name in rules.converters * rules.instances:
        converter = [
            token(TYPE, rules.book[name].type_id),
            token(COLOR),
            token(BUSY),  # STATE_TOKEN
        ]
        tokens.append(converter)
    tokens += [agent] * rules.num_agents
    return tokens


class TokenTable:
    """The tokens of all things. Each has a row of WIDTH tokens in the flat `table`; the first `count` are valid.

    Each game has `rules.num_codes` rows. After the last row `table` has TOKENS empty tokens.
    """

    def __init__(self, rules: Rules, num_games: int, device: torch.device) -> None:
        self.num_games = num_games
        self.num_codes = rules.num_codes
        self.first_agent = rules.first_agent
        self._make_table(tokens_by_code(rules), device)
        self._make_window(rules, device)
        item_tokens = [token(FIRST_ITEM + item) for item in range(len(ITEMS))]
        self.item_token = torch.tensor(item_tokens, device=device)

    def _make_table(self, tokens: list[list[int]], device: torch.device) -> None:
        rows = []
        count = []
        # Number of tokens before the items and token of the state, for things that can change.
        fixed_tokens = []
        state_token = []
        for row in tokens:
            padding = [0] * (WIDTH - len(row))
            rows.append(row + padding)
            count.append(len(row))
            can_change = len(row) > STATE_TOKEN
            fixed_tokens.append(len(row) if can_change else 0)
            state_token.append(row[STATE_TOKEN] if can_change else 0)

        game_table = torch.tensor(rows, dtype=torch.int32, device=device).ravel()
        empty = torch.full((TOKENS,), 0xFFFFFF, dtype=torch.int32, device=device)
        self.table = torch.cat([game_table.repeat(self.num_games), empty])
        game_count = torch.tensor(count, dtype=torch.uint8, device=device)
        self.count = game_count.repeat(self.num_games)
        self.fixed_tokens = torch.tensor(fixed_tokens, device=device)  # by code
        self.state_token = torch.tensor(state_token, device=device)

    def _make_window(self, rules: Rules, device: torch.device) -> None:
        """Cells of the window relative to the agent's cell, and their position bytes."""
        num_agents = self.num_games * rules.num_agents
        columns = rules.shape[1]
        steps = []
        positions = []
        for row, column in rules.window:
            window_row = row + VIEW
            window_column = column + VIEW
            steps.append(row * columns + column)
            positions.append(window_row << 4 | window_column)
        positions.append(0)  # of empty tokens
        self.window = torch.tensor(steps, dtype=torch.int32, device=device)
        position = torch.tensor(positions, dtype=torch.int32, device=device)
        self.position = position.repeat(num_agents)
        self.slot = torch.arange(TOKENS - HEADER, dtype=torch.int32, device=device)
        self.ones = torch.ones(num_agents, len(rules.window), dtype=torch.int32, device=device)

    def write_things(self, rows: slice | Tensor, code: Tensor, inventory: Tensor, timer: Tensor) -> None:
        """Rewrites the tokens of `rows` (B,) for state (busy or frozen) and items.

        `code` (B,) are map codes, `inventory` (B, items) numbers of items, `timer` (B,) is above 0 if busy or frozen.
        """
        has_item = inventory > 0
        fixed_tokens = self.fixed_tokens[code]
        can_change = fixed_tokens > 0  # False for walls and blocks
        table = self.table[:-TOKENS].view(-1, WIDTH)
        tokens = table[rows]
        first_index = fixed_tokens[:, None]
        item_index = first_index + has_item.cumsum(1) - 1
        item_index = torch.where(has_item, item_index, WIDTH - 1)
        item_token = self.item_token | inventory << 16
        tokens.scatter_(1, item_index, item_token.int())

        state = (timer > 0).long()
        state_token = self.state_token[code] | state << 16
        old_state_token = tokens[:, STATE_TOKEN]
        tokens[:, STATE_TOKEN] = torch.where(can_change, state_token.int(), old_state_token)
        table[rows] = tokens

        num_items = has_item.sum(1)
        count = fixed_tokens + num_items
        self.count[rows] = torch.where(can_change, count.byte(), self.count[rows])

    def write_agents(self, heading: Tensor, color: Tensor) -> None:
        """Rewrites the tokens for heading and color of all agents, (N,) each."""
        rows = self.table[:-TOKENS].view(self.num_games, self.num_codes, WIDTH)
        agent_rows = rows[:, self.first_agent :]
        heading_token = heading << 16 | token(ORIENTATION)
        color_token = color << 16 | token(COLOR)
        agent_rows[:, :, HEADING_TOKEN] = heading_token.view(self.num_games, -1)
        agent_rows[:, :, COLOR_TOKEN] = color_token.view(self.num_games, -1)

    def observe(
        self,
        grid: Tensor,
        cell: Tensor,
        row_base: Tensor,
        header: Tensor,
        fixed_shapes: bool,
        out: Tensor,
    ) -> Tensor:
        """Writes the observations of agents in cells `cell` (B,) to `out` (B, 200, 3) uint8.

        `row_base` (B,) are the first rows of their lanes, `header` (B, 4) the values of the first tokens. Returns the
        numbers of tokens in sight (B,), which can exceed 200.

        A cumulative sum of the token counts is the slot where each cell's tokens end. The cell of a slot is the number
        of cells that end at or before it, which is a cumulative histogram. So there is no loop over cells or tokens.
        """
        batch = len(out)
        device = self.table.device
        agent_cell = cell.int()[:, None]
        window = agent_cell + self.window
        code = grid.view(-1).index_select(0, window.view(-1))
        row = code.view(batch, -1) + row_base.int()[:, None]
        count = self.count.index_select(0, row.view(-1))
        count = count.view(batch, -1)
        end = count.cumsum(1, dtype=torch.int32)
        num_tokens = end[:, -1]
        num_slots = len(self.slot)
        if not fixed_shapes:  # as many as the longest observation needs
            longest = int(num_tokens.max())
            num_slots = min(num_slots, longest)
        cell_of_slot = self._cell_of_slot(end, num_slots)

        # Index of a cell's first token in `table`, minus its slot in the observation.
        first_empty = len(self.table) - TOKENS
        offset = torch.empty(batch, len(self.window) + 1, dtype=torch.int32, device=device)
        offset[:, :-1] = (count - end).add_(row, alpha=WIDTH)
        offset[:, -1] = first_empty - num_tokens  # after the last cell: empty tokens
        source = offset.view(-1).index_select(0, cell_of_slot)
        source = source.view(batch, num_slots)
        source = source.add_(self.slot[:num_slots])
        position = self.position.index_select(0, cell_of_slot)
        tokens = self.table.index_select(0, source.view(-1))
        tokens = tokens.add_(position)

        # Copying one byte of all words at a time is twice as fast as shifts or as copying three bytes at once.
        token_bytes = tokens.view(torch.uint8).view(batch, num_slots, 4)
        end_slot = HEADER + num_slots
        out[:, :HEADER, 0] = CENTRE
        out[:, :HEADER, 1] = torch.arange(EPISODE, EPISODE + HEADER, device=device)
        out[:, :HEADER, 2] = header
        for byte in range(3):
            out[:, HEADER:end_slot, byte] = token_bytes[:, :, byte]
        out[:, end_slot:] = 255
        return num_tokens + HEADER

    def _cell_of_slot(self, end: Tensor, num_slots: int) -> Tensor:
        """Cell shown in each slot, (B * num_slots,), as an index into all windows (B, cells + 1)."""
        batch, num_cells = end.shape
        cell = torch.zeros(batch, num_slots + 1, dtype=torch.int32, device=end.device)
        window_number = torch.arange(batch, dtype=torch.int32, device=end.device)
        cell[:, 0] = window_number * (num_cells + 1)
        end_slot = end.clamp(max=num_slots).long()
        cell.scatter_add_(1, end_slot, self.ones[:batch])
        cell = cell.cumsum(1, dtype=torch.int32)
        return cell[:, :num_slots].reshape(-1)

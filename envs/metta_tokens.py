"""Observations of the batched arena: the tokens of every thing prepared, and gathered into what each agent sees."""

import torch

from envs.metta_rules import (
    BLOCK,
    BUSY,
    CENTRE,
    COLOR,
    EPISODE,
    FIRST_CONVERTER,
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
    WALL,
    WINDOW,
    Rules,
)

WIDTH = 16  # tokens prepared for a thing at most; the last of them takes what must not show
CONVERTER_TOKENS = 3  # type, color, busy: those before the items
AGENT_TOKENS = 5  # type, group, frozen, orientation, color
STATE_TOKEN = 2  # the one that says busy or frozen
HEADING_TOKEN = 3
COLOR_TOKEN = 4


def token(feature: int, value: int = 0) -> int:
    """A token in 32 bits: place in the window, feature, value, a byte each."""
    return feature << 8 | value << 16


class TokenTable:
    """The tokens of all things of all lanes.

    A thing has a row of `table`, of which the first `count` tokens show. Behind the last row are TOKENS empty ones.
    With N = lanes * agents of a game, and C = `rules.num_codes` rows to a lane.
    """

    def __init__(self, rules: Rules, num_games: int, device: torch.device) -> None:
        self.num_games = num_games
        self.num_codes = rules.num_codes
        self.first_agent = rules.first_agent
        num_agents = num_games * rules.num_agents
        converters = rules.converters * rules.instances

        def table(values: list, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.tensor(values, dtype=dtype, device=device)

        # What is known of each code, and of each item.
        fixed_tokens = [0] * FIRST_CONVERTER
        fixed_tokens += [CONVERTER_TOKENS] * len(converters)
        fixed_tokens += [AGENT_TOKENS] * rules.num_agents
        state_token = [0] * FIRST_CONVERTER
        state_token += [token(BUSY)] * len(converters)
        state_token += [token(FROZEN)] * rules.num_agents
        self.fixed_tokens = table(fixed_tokens, torch.int64)
        self.state_token = table(state_token, torch.int64)
        self.item_token = table([token(FIRST_ITEM + k) for k in range(len(ITEMS))], torch.int64)

        # The window: cells relative to the agent's, and the byte for the place of each.
        columns = rules.shape[1]
        places = [(row + VIEW) << 4 | (column + VIEW) for row, column in WINDOW]
        self.window = table([row * columns + column for row, column in WINDOW])
        self.place = table([*places, 0]).repeat(num_agents)
        self.slot = torch.arange(TOKENS - HEADER, dtype=torch.int32, device=device)
        self.ones = torch.ones(num_agents, len(WINDOW), dtype=torch.int32, device=device)

        self.table = torch.zeros(num_games * self.num_codes * WIDTH + TOKENS, dtype=torch.int32, device=device)
        self.count = torch.zeros(num_games * self.num_codes, dtype=torch.uint8, device=device)
        self.table[-TOKENS:] = 0xFFFFFF
        lanes = self.table[:-TOKENS].view(num_games, self.num_codes, WIDTH)
        lanes[:, WALL, 0] = token(TYPE, TYPE_IDS["wall"])
        lanes[:, BLOCK, :2] = table([token(TYPE, TYPE_IDS["block"]), token(SWAPPABLE, 1)])
        for code, name in enumerate(converters, FIRST_CONVERTER):
            lanes[:, code, :2] = table([token(TYPE, rules.book[name].type_id), token(COLOR)])
        agent_tokens = [token(TYPE, TYPE_IDS["agent"]), token(GROUP), token(FROZEN), token(ORIENTATION), token(COLOR)]
        lanes[:, self.first_agent :, :AGENT_TOKENS] = table(agent_tokens)
        self.count.view(num_games, -1)[:, WALL] = 1
        self.count.view(num_games, -1)[:, BLOCK] = 2

    def write_things(
        self, rows: slice | torch.Tensor, code: torch.Tensor, inventory: torch.Tensor, timer: torch.Tensor
    ) -> None:
        """Prepare anew what changes of these rows (B,): whether it is busy or frozen, and what it holds (B, items)."""
        has_item = inventory > 0
        fixed_tokens = self.fixed_tokens[code]
        has_tokens = fixed_tokens > 0  # walls and blocks stay as they are
        table = self.table[:-TOKENS].view(-1, WIDTH)
        tokens = table[rows]
        item_position = fixed_tokens[:, None] + has_item.cumsum(1) - 1
        item_position = torch.where(has_item, item_position, WIDTH - 1)
        tokens.scatter_(1, item_position, (self.item_token | inventory << 16).int())
        state = (self.state_token[code] | (timer > 0).long() << 16).int()
        tokens[:, STATE_TOKEN] = torch.where(has_tokens, state, tokens[:, STATE_TOKEN])
        table[rows] = tokens
        count = (fixed_tokens + has_item.sum(1)).byte()
        self.count[rows] = torch.where(has_tokens, count, self.count[rows])

    def write_agents(self, heading: torch.Tensor, color: torch.Tensor) -> None:
        """Prepare anew where all agents (N,) look and what color they have."""
        tokens = self.table[:-TOKENS].view(self.num_games, self.num_codes, WIDTH)[:, self.first_agent :]
        tokens[:, :, HEADING_TOKEN] = (heading << 16 | token(ORIENTATION)).view(self.num_games, -1)
        tokens[:, :, COLOR_TOKEN] = (color << 16 | token(COLOR)).view(self.num_games, -1)

    def observe(
        self,
        grid: torch.Tensor,
        cell: torch.Tensor,
        row_base: torch.Tensor,
        header: torch.Tensor,
        fixed_shapes: bool,
        out: torch.Tensor,
    ) -> torch.Tensor:
        """Write to `out` (B, 200, 3) uint8 what agents in these cells (B,) see; returns how many tokens that is (B,).

        `row_base` (B,) are the first rows of their lanes, `header` (B, 4) the values of the first tokens.
        From the number of tokens in each cell of the windows follows the slot at which a cell's tokens end; as many
        cells precede a slot as end at or before it: a histogram, summed up. No cell or token is looked at in turn.
        """
        batch = len(out)
        window = cell.int()[:, None] + self.window
        code = grid.view(-1).index_select(0, window.view(-1)).view(batch, -1)
        row = code + row_base.int()[:, None]
        count = self.count.index_select(0, row.view(-1)).view(batch, -1)
        end = count.cumsum(1, dtype=torch.int32)
        num_slots = len(self.slot)
        if not fixed_shapes:  # as far as any window reaches
            num_slots = min(num_slots, int(end[:, -1].max()))
        source_cell = self._cell_of_slot(end, num_slots)

        # Where a cell's tokens begin in `table`, less the slot at which they begin in the observation.
        source = torch.empty(batch, len(WINDOW) + 1, dtype=torch.int32, device=self.table.device)
        source[:, :-1] = (count - end).add_(row, alpha=WIDTH)
        source[:, -1] = len(self.table) - TOKENS - end[:, -1]  # behind the last cell: empty
        source = source.view(-1).index_select(0, source_cell).view(batch, num_slots).add_(self.slot[:num_slots])
        tokens = self.table.index_select(0, source.view(-1)).add_(self.place.index_select(0, source_cell))

        # Byte by byte out of the 32-bit words: twice as fast as shifting, or as all three at once.
        tokens = tokens.view(torch.uint8).view(batch, num_slots, 4)
        out[:, :HEADER, 0] = CENTRE
        out[:, :HEADER, 1] = torch.arange(EPISODE, EPISODE + HEADER, device=self.table.device)
        out[:, :HEADER, 2] = header
        for byte in range(3):
            out[:, HEADER : HEADER + num_slots, byte] = tokens[:, :, byte]
        out[:, HEADER + num_slots :] = 255
        return end[:, -1] + HEADER

    def _cell_of_slot(self, end: torch.Tensor, num_slots: int) -> torch.Tensor:
        """Which cell of its window each slot shows, (B * num_slots,), counted through all windows (B, cells + 1)."""
        batch, num_cells = end.shape
        cell = torch.zeros(batch, num_slots + 1, dtype=torch.int32, device=end.device)
        cell[:, 0] = torch.arange(batch, dtype=torch.int32, device=end.device) * (num_cells + 1)
        cell.scatter_add_(1, end.clamp(max=num_slots).long(), self.ones[:batch])
        return cell.cumsum(1, dtype=torch.int32)[:, :num_slots].reshape(-1)

"""Maps of the batched arena, drawn in torch; those of `MettaArena`, cell by cell."""

import torch

from envs.metta.rules import (
    BLOCK,
    DRAW_CELL,
    DRAW_COUNT,
    DRAW_PILLAR,
    DRAW_ROOM,
    EMPTY,
    FIRST_CONVERTER,
    WALL,
    Rules,
)
from envs.streams import integer_hash


class MapMaker:
    """Draws the maps of many episodes at once; here are the tables that this takes.

    Sizes below: R instances in a game, S = size**2 cells of an instance, P pieces at most that an instance holds.
    """

    def __init__(self, rules: Rules, device: torch.device) -> None:
        self.rules = rules
        rows, columns = rules.shape
        self.num_cells = rows * columns
        side = torch.arange(rules.size, device=device)
        instance_cells = (side[:, None] * columns + side).ravel()
        corners = [row * columns + column for row, column in rules.corners]
        first_cells = torch.tensor(corners, device=device)
        self.cells = first_cells[:, None] + instance_cells  # (R, S) on the whole map
        is_odd = (side % 2 == 1) & (side < rules.size - 1)
        self.pillar_cells = is_odd[:, None] & is_odd  # (size, size)
        # Numbers of the draws, as `MettaArena` counts them.
        self.instance = torch.arange(rules.instances, device=device)[:, None]
        cell_number = torch.arange(self.cells.numel(), device=device)
        self.cell_number = cell_number.view(rules.instances, -1)
        self._make_pieces(device)

    def _make_pieces(self, device: torch.device) -> None:
        """The pieces in the order in which they take the cells: agents, then the objects kind by kind."""
        rules = self.rules
        spans = [(rules.agents, rules.agents)]
        spans += [rules.span(name) for name in rules.objects]
        piece_kind = []
        piece_rank = []  # among those of its kind
        for kind, (_, highest) in enumerate(spans):
            piece_kind += [kind] * highest
            piece_rank += range(highest)
        self.piece_kind = torch.tensor(piece_kind, device=device)
        self.piece_rank = torch.tensor(piece_rank, device=device)
        self.piece_code = torch.tensor(self._codes(), dtype=torch.uint8, device=device)  # (R, P)
        lowest, highest = zip(*spans)
        self.lowest = torch.tensor(lowest, device=device)  # (kinds,)
        self.highest = torch.tensor(highest, device=device)
        kind = torch.arange(len(spans), device=device)
        self.count_number = DRAW_COUNT - 1 + 32 * self.instance + kind  # kind 0 are the agents, always as many

    def _codes(self) -> list[list[int]]:
        """What stands for each piece on the map; converters and agents count through all instances."""
        rules = self.rules
        converter = FIRST_CONVERTER
        agent = rules.first_agent
        codes = []
        for _ in range(rules.instances):
            row = list(range(agent, agent + rules.agents))
            agent += rules.agents
            for name in rules.objects:
                highest = rules.span(name)[1]
                if name in rules.book:
                    row += range(converter, converter + highest)
                    converter += highest
                elif name == "wall":
                    row += [WALL] * highest
                else:
                    row += [BLOCK] * highest
            codes.append(row)
        return codes

    def make(self, key: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Maps of the episodes with these keys (B,): codes (B, cells) uint8, and the agents' cells (B, agents)."""
        batch = len(key)
        key = key[:, None, None]
        draw = integer_hash(key + DRAW_CELL + self.cell_number)
        if self.rules.terrain:
            walls = self._terrain(key)
        else:
            walls = torch.zeros_like(draw, dtype=torch.bool)
        sort_key = draw + (walls.long() << 32)  # cells with a wall come last
        order = sort_key.argsort(dim=2, stable=True)
        piece_order = order[:, :, : self.piece_kind.numel()]
        cells = self.cells.expand(batch, -1, -1)
        piece_cell = cells.gather(2, piece_order)  # (B, R, P)

        draw = integer_hash(key + self.count_number)
        number = self.lowest + draw % (self.highest - self.lowest + 1)
        exists = self.piece_rank < number[:, :, self.piece_kind]
        codes = torch.where(exists, self.piece_code, EMPTY)
        grid = torch.full((batch, self.num_cells), WALL, dtype=torch.uint8, device=key.device)
        grid.scatter_(1, cells.flatten(1), walls.flatten(1).byte())
        grid.scatter_(1, piece_cell.flatten(1), codes.byte().flatten(1))
        agent_cell = piece_cell[:, :, : self.rules.agents]
        return grid, agent_cell.flatten(1)

    def _terrain(self, key: torch.Tensor) -> torch.Tensor:
        """(B, R, S) bool: pillars on odd rows and columns, each with a wall right or down, perhaps mirrored."""
        rules = self.rules
        room = integer_hash(key + DRAW_ROOM + self.instance)
        room = room[..., None]  # (B, R, 1, 1)
        draw = integer_hash(key + DRAW_PILLAR + self.cell_number)
        draw = draw.view(-1, rules.instances, rules.size, rules.size)
        has_pillar = draw % 16 < room % 14
        pillars = self.pillar_cells & has_pillar
        goes_right = (draw >> 4 & 1).bool()
        right_walls = (pillars & goes_right).roll(1, 3)
        down_walls = (pillars & ~goes_right).roll(1, 2)
        walls = pillars | right_walls | down_walls
        upside_down = (room >> 8 & 1).bool()
        mirrored = (room >> 9 & 1).bool()
        walls = torch.where(upside_down, walls.flip(2), walls)
        walls = torch.where(mirrored, walls.flip(3), walls)
        return walls.flatten(2)


class SpareMaps:
    """The map that each lane starts with next, made before it is needed, where all shapes are fixed.

    A few lanes get theirs each step, for a step must not depend on whether an arena ends, and a map costs more than a
    step. Each is made anew well within an episode.
    """

    def __init__(self, maps: MapMaker, num_games: int, device: torch.device) -> None:
        self.maps = maps
        self.grid = torch.zeros(num_games, maps.num_cells, dtype=torch.uint8, device=device)
        self.cell = torch.zeros(num_games, maps.rules.num_agents, dtype=torch.int64, device=device)
        self.round = torch.zeros(1, dtype=torch.int64, device=device)
        self.lanes_per_step = -(-num_games // min(64, maps.rules.max_steps))  # rounded up

    def make(self, lanes: torch.Tensor, key: torch.Tensor) -> None:
        """Maps for `lanes` (B,), whose next episodes have these keys (B,)."""
        grid, cell = self.maps.make(key)
        self.grid[lanes] = grid
        self.cell[lanes] = cell

    def next_lanes(self, lanes: torch.Tensor) -> torch.Tensor:
        """Those of all lanes whose turn it is."""
        first_lanes = lanes[: self.lanes_per_step]
        due = first_lanes + self.round * self.lanes_per_step
        due = due % len(lanes)
        self.round.add_(1)
        return due

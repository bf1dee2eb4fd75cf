"""Random maps of the batched arena in PyTorch. They are equal to those of `MettaArena`."""

import math

import torch
from torch import Tensor

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

NO_PIECE = 1 << 32  # sort key of a wall


class MapMaker:
    """Draws the maps of many episodes at once.

    Sizes: R instances in a game, S = size**2 cells and at most P pieces (agents and objects) in an instance.
    """

    def __init__(self, rules: Rules, device: torch.device) -> None:
        self.rules = rules
        rows, columns = rules.shape
        self.num_cells = rows * columns
        side = torch.arange(rules.size, device=device)
        row_start = side * columns
        instance_cells = row_start[:, None] + side
        corners = [row * columns + column for row, column in rules.corners]
        first_cells = torch.tensor(corners, device=device)
        self.cells = first_cells[:, None] + instance_cells.ravel()  # (R, S) on the whole map
        is_odd = side % 2 == 1
        is_odd &= side < rules.size - 1
        self.pillar_cells = is_odd[:, None] & is_odd  # (size, size)
        # Numbers of the random draws, the same as in `MettaArena`.
        self.instance = torch.arange(rules.instances, device=device)[:, None]
        cell_number = torch.arange(self.cells.numel(), device=device)
        self.cell_number = cell_number.view(rules.instances, -1)
        if rules.plan:
            plan = torch.full((rules.size**2,), NO_PIECE, device=device)
            cells = rules.plan_cells
            plan[cells] = torch.arange(len(cells), device=device)
            self.plan = plan.view(rules.size, rules.size)  # the order in which its cells get pieces
        self._make_pieces(device)

    def _make_pieces(self, device: torch.device) -> None:
        """Pieces in the order in which they are placed: agents, then the objects kind by kind."""
        rules = self.rules
        spans = [(rules.agents, rules.agents)]
        spans += [rules.span(name) for name in rules.objects]
        piece_kind = []
        piece_rank = []  # index among the pieces of its kind
        for kind, (_, highest) in enumerate(spans):
            piece_kind += [kind] * highest
            piece_rank += range(highest)
        self.piece_kind = torch.tensor(piece_kind, device=device)
        self.piece_rank = torch.tensor(piece_rank, device=device)
        piece_code = self._codes()
        self.piece_code = torch.tensor(piece_code, dtype=torch.uint8, device=device)  # (R, P)
        lowest, highest = zip(*spans)
        self.lowest = torch.tensor(lowest, device=device)  # (kinds,)
        self.highest = torch.tensor(highest, device=device)
        kind = torch.arange(len(spans), device=device)
        self.count_number = DRAW_COUNT - 1 + 32 * self.instance + kind  # kind 0, the agents, has a fixed number

    def _codes(self) -> list[list[int]]:
        """(R, P): the map code of each piece. Codes of converters and agents are unique within the game."""
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

    def make(self, key: Tensor) -> tuple[Tensor, Tensor]:
        """Maps of the episodes with these keys (B,): codes (B, cells) uint8 and the agents' cells (B, agents) int64."""
        batch = len(key)
        key = key[:, None, None]
        if self.rules.plan:
            sort_key = self._mirrored(self.plan, key)
            walls = sort_key == NO_PIECE
        else:
            sort_key = integer_hash(key + DRAW_CELL + self.cell_number)
            walls = torch.zeros_like(sort_key, dtype=torch.bool)
            if self.rules.terrain:
                walls = self._terrain(key)
            sort_key = sort_key + walls * NO_PIECE  # cells with a wall come last
        order = sort_key.argsort(dim=2, stable=True)
        num_pieces = len(self.piece_kind)
        piece_order = order[:, :, :num_pieces]
        cells = self.cells.expand(batch, -1, -1)
        piece_cell = cells.gather(2, piece_order)  # (B, R, P)

        draw = integer_hash(key + self.count_number)
        num_choices = self.highest - self.lowest + 1
        number = self.lowest + draw % num_choices
        is_present = self.piece_rank < number[:, :, self.piece_kind]
        codes = torch.where(is_present, self.piece_code, EMPTY)
        shape = (batch, self.num_cells)
        grid = torch.full(shape, WALL, dtype=torch.uint8, device=key.device)
        codes = codes.byte()
        walls = walls.byte()
        grid.scatter_(1, cells.flatten(1), walls.flatten(1))
        grid.scatter_(1, piece_cell.flatten(1), codes.flatten(1))
        agent_cell = piece_cell[:, :, : self.rules.agents]
        return grid, agent_cell.flatten(1)

    def _terrain(self, key: Tensor) -> Tensor:
        """(B, R, S) bool: walls of the terrain, see `MettaArena._terrain`."""
        rules = self.rules
        room = integer_hash(key + DRAW_ROOM + self.instance)
        room = room[..., None]  # (B, R, 1, 1)
        draw = integer_hash(key + DRAW_PILLAR + self.cell_number)
        draw = draw.view(-1, rules.instances, rules.size, rules.size)
        has_pillar = draw % 16 < room % 14
        pillars = self.pillar_cells & has_pillar
        is_right_wall = (draw >> 4 & 1).bool()
        right_walls = (pillars & is_right_wall).roll(1, 3)
        down_walls = (pillars & ~is_right_wall).roll(1, 2)
        return self._mirrored(pillars | right_walls | down_walls, key)

    def _mirrored(self, rooms: Tensor, key: Tensor) -> Tensor:
        """(B, R, S): the cells of `rooms` (..., size, size), mirrored at random."""
        room = integer_hash(key + DRAW_ROOM + self.instance)
        room = room[..., None]  # (B, R, 1, 1)
        flip_rows = (room >> 8 & 1).bool()
        flip_columns = (room >> 9 & 1).bool()
        rooms = torch.where(flip_rows, rooms.flip(-2), rooms)
        rooms = torch.where(flip_columns, rooms.flip(-1), rooms)
        return rooms.flatten(2)


class SpareMaps:
    """The next map of each lane, for fixed shapes.

    With fixed shapes a step does the same work whether or not an episode ends, and a map costs more than a step. So
    every step makes the next maps of a few lanes; each lane has its turn at least once in 64 steps.
    """

    def __init__(self, maps: MapMaker, num_games: int, device: torch.device) -> None:
        rules = maps.rules
        self.maps = maps
        self.grid = torch.zeros(num_games, maps.num_cells, dtype=torch.uint8, device=device)
        self.cell = torch.zeros(num_games, rules.num_agents, dtype=torch.int64, device=device)
        self.round = torch.zeros(1, dtype=torch.int64, device=device)
        num_steps = min(64, rules.max_steps)
        self.lanes_per_step = math.ceil(num_games / num_steps)

    def make(self, lanes: Tensor, key: Tensor) -> None:
        """Makes the maps of `lanes` (B,), whose next episodes have these keys (B,)."""
        grid, cell = self.maps.make(key)
        self.grid[lanes] = grid
        self.cell[lanes] = cell

    def next_lanes(self, lanes: Tensor) -> Tensor:
        """The lanes, out of all `lanes`, that get their maps in this step."""
        first_lanes = lanes[: self.lanes_per_step]
        number = first_lanes + self.round * self.lanes_per_step
        next_lanes = number % len(lanes)
        self.round.add_(1)
        return next_lanes

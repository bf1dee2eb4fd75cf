"""The board as the snake sees it: head in the centre, moving up, mirrored so that the food is on the right."""

import torch
import torch.nn.functional as F
from torch import Tensor

from envs.snake.rules import BODY, FOOD, HEAD, MOVES

NUM_CODES = 10
NUM_ORIENTATIONS = 8  # 2 * heading + is_mirrored
CELL_FEATURES = [  # (free, ahead, right) by code on the rotated board
    [1, 0, 0],  # empty
    [1, 0, 0],  # food
    [0, 1, 0],  # body, next cell toward the head: ahead
    [0, 0, 1],  # right
    [0, -1, 0],  # behind
    [0, 0, -1],  # left
    [0, 0, 0],  # head
    [0, 0, 0],
    [0, 0, 0],
    [0, 0, 0],
]


class EgocentricView:
    """Features of a board relative to the snake's head, from lookup tables without parameters.

    A position is the row-major index of a cell in the `side` x `side` square around the head. With
    side = 2 * max(rows, columns) - 1 the square covers the board for every position of the head.
    """

    NEAR = 4  # cells up to this distance from the head are features of their own
    BLOCK = 3  # over the whole board, features are sums over blocks of 3x3 cells

    def __init__(self, board: tuple[int, int], device: torch.device) -> None:
        rows, columns = board
        self.board = board
        self.reach = max(board) - 1
        self.side = 2 * self.reach + 1
        self.center = self.side**2 // 2
        self.cells = grid(range(rows), range(columns))  # (cells, 2)
        moves = torch.tensor(MOVES)
        back = -moves
        right = moves.roll(-1, 0)
        rotation = torch.stack([back, right], 1)
        mirror = torch.stack([back, -right], 1)
        axes = torch.stack([rotation, mirror], 1)
        self.axes = axes.flatten(0, 1)  # (orientation, 2, 2): axes of the rotated board as steps in row and column
        self._make_feature_source(device)
        self._make_rotations(device)
        self._make_padded_board(device)

    def _make_feature_source(self, device: torch.device) -> None:
        """(orientation, head cell, feature): the source of each feature: a cell, or a block by its center.

        Centers are up to two cells off the board. The first block, two cells off a corner, is empty.
        """
        span = range(-self.reach, self.reach + 1)
        offsets = grid(span, span)
        is_near = distance(offsets) <= self.NEAR
        is_block_center = (offsets % self.BLOCK == 0).all(1)
        cell_offsets = offsets[is_near]
        block_offsets = offsets[is_block_center]
        self.num_features = len(cell_offsets) + len(block_offsets) + 3  # those of `reached`

        first_block = len(self.cells)
        cell, is_cell = self._cell_at(cell_offsets, margin=0)
        block, is_block = self._cell_at(block_offsets, margin=2)
        cell_source = torch.where(is_cell, cell, first_block)
        block_source = torch.where(is_block, first_block + block, first_block)
        feature_source = torch.cat([cell_source, block_source], 2)
        feature_source = feature_source.short()
        self.feature_source = feature_source.to(device)

    def _cell_at(self, offsets: Tensor, margin: int) -> tuple[Tensor, Tensor]:
        """(orientation, head cell, offset): index in the board with a margin, and whether it is inside."""
        steps = offsets @ self.axes  # (orientation, offset, 2)
        heads = self.cells[:, None] + margin
        positions = heads + steps[:, None]
        row, column = positions.unbind(3)
        rows = self.board[0] + 2 * margin
        columns = self.board[1] + 2 * margin
        row_fits = (row >= 0) & (row < rows)
        column_fits = (column >= 0) & (column < columns)
        cell = row * columns + column
        is_inside = row_fits & column_fits
        return cell, is_inside

    def _make_rotations(self, device: torch.device) -> None:
        """Moves, codes, cell features and positions on the rotated board, by orientation."""
        orientation = torch.arange(NUM_ORIENTATIONS)[:, None]
        heading = orientation // 2
        is_mirrored = orientation % 2 == 1

        def turn(direction: Tensor) -> Tensor:
            quarters = direction - heading
            return torch.where(is_mirrored, -quarters, quarters) % 4

        moves = torch.arange(4)
        self.turn = turn(moves)  # (orientation, move): 0 ahead, 1 right, 2 back, 3 left
        move_of_turn = self.turn.argsort(1)
        left_ahead_right = [3, 0, 1]
        move = move_of_turn[:, left_ahead_right]
        self.move = move.to(device)  # (orientation, turn): 0 left, 1 ahead, 2 right
        code = torch.arange(NUM_CODES)
        direction = (code - BODY) % 4
        turned_direction = turn(direction)
        snake_code = code - direction + turned_direction
        turned_code = torch.where(code < BODY, code, snake_code)
        self.turned_code = turned_code.to(device)

        features_of_code = torch.tensor(CELL_FEATURES).float()
        cell_features = features_of_code[turned_code]
        cell_features = cell_features.flatten(0, 1)
        self.cell_features = cell_features.to(device)

        row_step, column_step = self.axes.unbind(1)
        index_step = self.side * row_step + column_step
        turned_index = index_step @ self.cells.T
        self.turned_index = turned_index.to(device)  # (orientation, cell)

    def _make_padded_board(self, device: torch.device) -> None:
        """Cells of the board with a border around it, and what each move adds to their numbers."""
        rows, columns = self.board
        row, column = self.cells.unbind(1)
        width = columns + 2
        padded_row = row + 1
        padded_column = column + 1
        padded_cell = padded_row * width + padded_column
        self.padded_cell = padded_cell.to(device)
        self.padded_steps = [row * width + column for row, column in MOVES]
        padded_step = torch.tensor(self.padded_steps, device=device)
        self.padded_step = padded_step[:, None]
        num_padded_cells = (rows + 2) * width
        is_inside = torch.zeros(num_padded_cells, 1, dtype=torch.int32)
        is_inside[padded_cell] = 1
        self.is_inside = is_inside.to(device)

    def locate(self, obs: Tensor) -> tuple[Tensor, ...]:
        """Codes (B, cells), orientation, head cell, position of cell 0, and position of the food (all (B,))."""
        codes = obs.flatten(1)
        # int, because torch.compile computes a wrong argmax of bytes on AVX2 (pytorch/pytorch#191499).
        is_head = codes >= HEAD
        head = is_head.int().argmax(1)
        is_food = codes == FOOD
        food = is_food.int().argmax(1)
        head_code = codes.gather(1, head[:, None])
        head_code = head_code.squeeze(1)
        heading = head_code.int() - HEAD
        orientation = 2 * heading
        food_index = self.turned_index[orientation, food]
        head_index = self.turned_index[orientation, head]
        food_step = food_index - head_index
        food_column = (self.center + food_step) % self.side
        orientation += food_column < self.reach
        origin = self.center - self.turned_index[orientation, head]
        food_position = origin + self.turned_index[orientation, food]
        return codes, orientation, head, origin, food_position

    def features(self, obs: Tensor) -> tuple[Tensor, ...]:
        """Orientation (B,), float32 features (B, 3, num_features), food position (B,) of `obs` (B, rows, columns)."""
        codes, orientation, head, _, food_position = self.locate(obs)
        first_row = NUM_CODES * orientation[:, None]
        cell_features = F.embedding(codes + first_row, self.cell_features)  # (B, cells, 3)
        board_features = cell_features.unflatten(1, self.board)
        border = (0, 0, 3, 3, 3, 3)
        padded = F.pad(board_features, border)
        row_sums = sums_of_three(padded, 1)
        block_sums = sums_of_three(row_sums, 2)
        block_features = block_sums.flatten(1, 2) / self.BLOCK
        source_features = torch.cat([cell_features, block_features], 1)
        num_boards, num_sources, _ = source_features.shape
        board_number = torch.arange(num_boards, device=obs.device)
        first_source = num_sources * board_number
        source = self.feature_source[orientation, head]
        source = source + first_source[:, None]
        source_rows = source_features.flatten(0, 1)
        features = F.embedding(source, source_rows)  # half the time of `gather`
        reached = self.reached(obs, head)
        move = self.move[orientation]
        move = move.unsqueeze(2).expand(-1, -1, 3)
        reached = reached.gather(1, move)
        all_features = torch.cat([features.mT, reached], 2)
        return orientation, all_features, food_position

    def reached(self, obs: Tensor, head: Tensor) -> Tensor:
        """(B, move, 3): what the snake can get to after each move. `head` (B,): cell of the head in `obs`.

        The share of the free cells, and whether its tail and the food are among them. The tail counts as free: it moves
        on, so a snake that can get to its tail is not trapped.
        """
        cells_first = obs.permute(1, 2, 0)
        border = (0, 0, 1, 1, 1, 1)
        padded = F.pad(cells_first, border)
        codes = padded.flatten(0, 1)  # (padded cells, B)
        is_followed = torch.zeros_like(codes, dtype=torch.bool)
        for move, step in enumerate(self.padded_steps):
            points_there = codes == BODY + move
            is_followed |= points_there.roll(step, 0)
        is_free = self.is_inside * ~is_followed  # the tail is the part of the snake that nothing points to
        label = self.connect(is_free)

        free = is_free.flatten()
        flat_label = label.flatten()
        size = torch.zeros_like(free)
        size.scatter_add_(0, flat_label.long(), free)
        head_cell = self.padded_cell[head]
        next_cell = head_cell + self.padded_step
        there = label.gather(0, next_cell)  # (move, B)
        share = size[there] / is_free.sum(0)
        is_snake = codes >= BODY
        is_food = codes == FOOD
        tail = (label * is_snake).amax(0)
        food = (label * is_food).amax(0)
        has_tail = there == tail
        has_food = there == food
        reached = torch.stack([share, has_tail, has_food], 2)
        return reached.transpose(0, 1)

    def connect(self, is_free: Tensor) -> Tensor:
        """int32 labels (padded cells, B): equal in free cells that are connected, 0 in the others.

        A label is the highest number of its cells, counted over all boards. `is_free`: int32 (padded cells, B).
        FastSV (Zhang et al. 2020) in a fixed number of rounds: to ask whether another is needed, a GPU would have to
        wait for the CPU. A labyrinth of one path takes as many.
        """
        num_boards = is_free.shape[1]
        width = self.board[1] + 2
        free = is_free.flatten()
        cell_number = torch.arange(len(free), dtype=torch.int32, device=free.device)
        label = cell_number * free
        num_rounds = len(self.cells).bit_length() - 1
        for _ in range(num_rounds):
            best = label.clone()
            for step in (num_boards, num_boards * width):
                best[step:].clamp_(min=label[:-step])
                best[:-step].clamp_(min=label[step:])
            best *= free
            label = label.scatter_reduce(0, label.long(), best, "amax")
            label = label.maximum(best)
            label = label.index_select(0, label)
        return label.view_as(is_free)

    def tokens(self, obs: Tensor) -> tuple[Tensor, ...]:
        """Orientation (B,), rotated codes and positions (B, cells), head cell (B,) and food position (B,) of `obs`."""
        codes, orientation, head, origin, food_position = self.locate(obs)
        board_orientation = orientation[:, None]
        codes = codes.int()
        turned_codes = self.turned_code[board_orientation, codes]
        positions = origin[:, None] + self.turned_index[orientation]
        return orientation, turned_codes, positions, head, food_position


def grid(rows: range, columns: range) -> Tensor:
    """(cells, 2): row and column of every cell, in row-major order."""
    row = torch.tensor(rows)
    column = torch.tensor(columns)
    return torch.cartesian_prod(row, column)


def distance(offsets: Tensor) -> Tensor:
    """Chebyshev distance of (..., 2) steps in row and column."""
    return offsets.abs().amax(-1)


def sums_of_three(values: Tensor, dim: int) -> Tensor:
    """Sums over three neighbors along `dim`, which becomes two shorter."""
    size = values.shape[dim] - 2
    first = values.narrow(dim, 0, size)
    second = values.narrow(dim, 1, size)
    third = values.narrow(dim, 2, size)
    sums = first + second
    sums += third
    return sums

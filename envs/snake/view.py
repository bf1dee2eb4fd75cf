"""The board as the snake sees it: turned until the snake heads up, mirrored if its food is on the left, and centred
on its head."""

import torch
import torch.nn.functional as F

from envs.snake.rules import BODY, FOOD, HEAD, MOVES

NUM_CODES = 10
NUM_ORIENTATIONS = 8  # 2 * heading, and 1 more on a mirrored board
CELL_FEATURES = [  # of a cell, by its code on the turned board: free, ahead, right
    [1, 0, 0],  # empty
    [1, 0, 0],  # food
    [0, 1, 0],  # body; the next cell toward the head lies ahead
    [0, 0, 1],  # to the right
    [0, -1, 0],  # behind
    [0, 0, -1],  # to the left
    [0, 0, 0],  # head
    [0, 0, 0],
    [0, 0, 0],
    [0, 0, 0],
]


class EgocentricView:
    """Features of a board relative to the snake's head. It has no parameters, only lookup tables.

    Positions are numbered row by row over the `side` x `side` square around the head, side = 2 * longest side - 1, so
    that every cell of the board has a position wherever the head is.
    """

    NEAR = 4  # up to this distance from the head, every cell is a feature of its own
    BLOCK = 3  # over the whole board, features are also summed over blocks of BLOCK x BLOCK cells

    def __init__(self, board: tuple[int, int], device: torch.device) -> None:
        rows, columns = board
        self.board = board
        self.reach = max(board) - 1
        self.side = 2 * self.reach + 1
        self.center = self.side**2 // 2
        self.cells = grid(range(rows), range(columns))  # (row, column) of each
        moves = torch.tensor(MOVES)
        back = -moves
        right = moves.roll(-1, 0)
        turned = torch.stack([back, right], 1)
        mirrored = torch.stack([back, -right], 1)
        axes = torch.stack([turned, mirrored], 1)
        self.axes = axes.flatten(0, 1)  # (orientation, 2, 2): the turned board's axes as steps in row and column
        self._make_sources(device)
        self._make_feature_source(device)
        self._make_turned(device)

    def _make_sources(self, device: torch.device) -> None:
        """A feature is a column of `sources`: one cell, the sum over a block / BLOCK, or nothing (off the board)."""
        rows, columns = self.board
        num_cells = len(self.cells)
        one_cell = torch.eye(num_cells)
        block_rows = range(-1, rows + 1)  # the outer blocks reach one cell of the board
        block_columns = range(-1, columns + 1)
        block_centers = grid(block_rows, block_columns)
        offsets = self.cells[:, None] - block_centers
        in_block = distance(offsets) <= self.BLOCK // 2
        block = in_block / self.BLOCK
        nothing = torch.zeros(num_cells, 1)
        sources = torch.cat([one_cell, block, nothing], 1)
        self.sources = sources.to(device)

    def _make_feature_source(self, device: torch.device) -> None:
        """Which column of `sources` a feature is, for (orientation, head cell, feature)."""
        span = range(-self.reach, self.reach + 1)
        offsets = grid(span, span)
        is_near = distance(offsets) <= self.NEAR
        is_block_center = (offsets % self.BLOCK == 0).all(1)
        near = offsets[is_near]
        far = offsets[is_block_center]
        self.num_features = len(near) + len(far)

        num_sources = self.sources.shape[1]
        off_board = num_sources - 1
        first_block = len(self.cells)
        cell, is_cell = self._cell_at(near, margin=0)
        block, is_block = self._cell_at(far, margin=1)
        near_source = torch.where(is_cell, cell, off_board)
        far_source = torch.where(is_block, first_block + block, off_board)
        feature_source = torch.cat([near_source, far_source], 2)
        self.feature_source = feature_source.short().to(device)

    def _cell_at(self, offsets: torch.Tensor, margin: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Cell of the board with a margin around it, for (orientation, head cell, offset), and whether there is one."""
        steps = offsets @ self.axes  # (orientation, offset, 2)
        heads = self.cells[:, None] + margin
        positions = heads + steps[:, None]
        row, column = positions.unbind(3)
        rows = self.board[0] + 2 * margin
        columns = self.board[1] + 2 * margin
        row_fits = (row >= 0) & (row < rows)
        column_fits = (column >= 0) & (column < columns)
        cell = row * columns + column
        return cell, row_fits & column_fits

    def _make_turned(self, device: torch.device) -> None:
        """Codes, their features, and positions on the turned board, by orientation."""
        orientation = torch.arange(NUM_ORIENTATIONS)[:, None]
        heading = orientation // 2
        is_mirrored = orientation % 2 == 1

        def turn(direction: torch.Tensor) -> torch.Tensor:
            quarters = direction - heading
            return torch.where(is_mirrored, -quarters, quarters) % 4

        self.turn = turn(torch.arange(4))  # (orientation, move): 0 ahead, 1 right, 2 back, 3 left
        move_of_turn = self.turn.argsort(1)
        self.move = move_of_turn[:, [3, 0, 1]].to(device)  # (orientation, 0 left, 1 ahead, 2 right): where that leads
        code = torch.arange(NUM_CODES)
        direction = (code - BODY) % 4
        turned_direction = turn(direction)
        turned_snake = code - direction + turned_direction
        turned_code = torch.where(code < BODY, code, turned_snake)
        self.turned_code = turned_code.to(device)

        cell_features = torch.tensor(CELL_FEATURES).float()[turned_code]
        cell_features = cell_features.view(NUM_ORIENTATIONS * NUM_CODES, 3)
        self.cell_features = cell_features.to(device)

        row_step, column_step = self.axes.unbind(1)
        index_step = self.side * row_step + column_step
        turned_index = index_step @ self.cells.T  # (orientation, cell)
        self.turned_index = turned_index.to(device)

    def locate(self, obs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Flat codes (B, cells), orientation, head cell, and the positions of cell 0 and of the food, (B,) each."""
        codes = obs.flatten(1)
        # Not bytes: on AVX2 torch.compile gets their argmax wrong (pytorch/pytorch#191499).
        is_head = codes >= HEAD
        head = is_head.int().argmax(1)
        is_food = codes == FOOD
        food = is_food.int().argmax(1)
        head_code = codes.gather(1, head[:, None]).squeeze(1)
        heading = head_code.int() - HEAD
        orientation = 2 * heading
        food_step = self.turned_index[orientation, food] - self.turned_index[orientation, head]
        food_column = (self.center + food_step) % self.side
        orientation += food_column < self.reach
        origin = self.center - self.turned_index[orientation, head]
        food_position = origin + self.turned_index[orientation, food]
        return codes, orientation, head, origin, food_position

    def features(self, obs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Orientation (B,), features (B, 3, num_features) and food position (B,), from codes (B, rows, columns)."""
        codes, orientation, head, _, food_position = self.locate(obs)
        first_row = NUM_CODES * orientation[:, None]
        cell_features = F.embedding(codes + first_row, self.cell_features)
        all_features = cell_features.mT @ self.sources
        source = self.feature_source[orientation, head].long()
        source = source[:, None].expand(-1, 3, -1)
        features = all_features.gather(2, source)
        return orientation, features, food_position

    def tokens(self, obs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Orientation (B,), turned codes and positions (B, cells), head cell (B,) and position of the food (B,)."""
        codes, orientation, head, origin, food_position = self.locate(obs)
        turned_codes = self.turned_code[orientation[:, None], codes.int()]
        positions = origin[:, None] + self.turned_index[orientation]
        return orientation, turned_codes, positions, head, food_position


def grid(rows: range, columns: range) -> torch.Tensor:
    """(row, column) of every cell, row by row."""
    row = torch.tensor(rows)
    column = torch.tensor(columns)
    return torch.cartesian_prod(row, column)


def distance(offsets: torch.Tensor) -> torch.Tensor:
    """In moves of a king, for (..., 2) steps in row and column."""
    return offsets.abs().amax(-1)

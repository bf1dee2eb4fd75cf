"""The board as the snake sees it: turned until the snake heads up, and centred on its head."""

import torch
import torch.nn.functional as F

from envs.snake import BODY, FOOD, HEAD, MOVES

NUM_CODES = 10
NUM_HEADINGS = 4
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
        self.axes = torch.stack([back, right], 1)  # (heading, 2, 2): the turned board's axes as steps in row and column
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
        """Which column of `sources` a feature is, for (heading, head cell, feature)."""
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
        """Cell of the board with a margin around it, for (heading, head cell, offset), and whether there is one."""
        steps = offsets @ self.axes  # (heading, offset, 2)
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
        """Codes, their features, and positions on the turned board, by heading."""
        code = torch.arange(NUM_CODES)
        heading = torch.arange(NUM_HEADINGS)[:, None]
        direction = (code - BODY) % 4
        turned_direction = (direction - heading) % 4
        turned_snake = code - direction + turned_direction
        turned_code = torch.where(code < BODY, code, turned_snake)
        self.turned_code = turned_code.to(device)

        code_features = torch.tensor(CELL_FEATURES).float()
        cell_features = code_features[turned_code]
        cell_features = cell_features.view(NUM_HEADINGS * NUM_CODES, 3)
        self.cell_features = cell_features.to(device)

        row_step, column_step = self.axes.unbind(1)
        index_step = self.side * row_step + column_step
        turned_index = index_step @ self.cells.T  # (heading, cell)
        self.turned_index = turned_index.to(device)

    def locate(self, obs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Flat codes (B, cells), heading, head cell, and the positions of cell 0 and of the food, (B,) each."""
        codes = obs.flatten(1)
        is_head = codes >= HEAD
        head = is_head.byte().argmax(1)
        is_food = codes == FOOD
        food = is_food.byte().argmax(1)
        head_code = codes.gather(1, head[:, None]).squeeze(1)
        heading = head_code.int() - HEAD
        origin = self.center - self.turned_index[heading, head]
        food_position = origin + self.turned_index[heading, food]
        return codes, heading, head, origin, food_position

    def features(self, obs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Heading (B,), features (B, 3, num_features) and position of the food (B,), from codes (B, rows, columns)."""
        codes, heading, head, _, food_position = self.locate(obs)
        first_row = NUM_CODES * heading[:, None]
        cell_features = F.embedding(codes + first_row, self.cell_features)
        all_features = cell_features.mT @ self.sources
        source = self.feature_source[heading, head].long()
        source = source[:, None].expand(-1, 3, -1)
        features = all_features.gather(2, source)
        return heading, features, food_position

    def tokens(self, obs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Heading (B,), turned codes (B, cells), positions (B, cells), head cell (B,) and position of the food (B,)."""
        codes, heading, head, origin, food_position = self.locate(obs)
        turned_codes = self.turned_code[heading[:, None], codes.int()]
        positions = origin[:, None] + self.turned_index[heading]
        return heading, turned_codes, positions, head, food_position


def grid(rows: range, columns: range) -> torch.Tensor:
    """(row, column) of every cell, row by row."""
    row = torch.tensor(rows)
    column = torch.tensor(columns)
    return torch.cartesian_prod(row, column)


def distance(offsets: torch.Tensor) -> torch.Tensor:
    """In moves of a king, for (..., 2) steps in row and column."""
    return offsets.abs().amax(-1)

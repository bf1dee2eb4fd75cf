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
        reach = max(board) - 1
        self.side = 2 * reach + 1
        self.center = self.side**2 // 2

        cells = grid(range(rows), range(columns))
        block_centers = grid(range(-1, rows + 1), range(-1, columns + 1))  # the outer ones reach one cell of the board
        offsets = grid(range(-reach, reach + 1), range(-reach, reach + 1))
        near = offsets[offsets.abs().amax(1) <= self.NEAR]
        far = offsets[(offsets % self.BLOCK == 0).all(1)]
        self.num_features = len(near) + len(far)

        moves = torch.tensor(MOVES)
        back = -moves
        right = moves.roll(-1, 0)
        axes = torch.stack([back, right], 1)  # (heading, 2, 2): the turned board's axes as steps in row and column

        # Every feature is a column of `sources`: one cell, the sum over a block / BLOCK, or nothing (off the board).
        distance = (cells[:, None] - block_centers).abs().amax(2)
        blocks = (distance <= self.BLOCK // 2) / self.BLOCK
        nothing = torch.zeros(len(cells), 1)
        self.sources = torch.cat([torch.eye(len(cells)), blocks, nothing], 1).to(device)
        off_board = self.sources.shape[1] - 1

        def source_of(offsets: torch.Tensor, margin: int, first: int) -> torch.Tensor:
            """Column of `sources` for (heading, head cell, offset), on a board with a margin."""
            row, column = (cells[:, None] + (offsets @ axes)[:, None] + margin).unbind(3)
            height = rows + 2 * margin
            width = columns + 2 * margin
            inside = (row >= 0) & (row < height) & (column >= 0) & (column < width)
            return torch.where(inside, first + row * width + column, off_board)

        near_sources = source_of(near, margin=0, first=0)
        far_sources = source_of(far, margin=1, first=len(cells))
        self.feature_source = torch.cat([near_sources, far_sources], 2).short().to(device)

        code = torch.arange(NUM_CODES)
        heading = torch.arange(NUM_HEADINGS)[:, None]
        turned_direction = (code - BODY - heading) % 4
        direction = (code - BODY) % 4
        turned_code = torch.where(code < BODY, code, code - direction + turned_direction)
        self.turned_code = turned_code.to(device)
        cell_features = torch.tensor(CELL_FEATURES).float()[turned_code]
        self.cell_features = cell_features.view(NUM_HEADINGS * NUM_CODES, 3).to(device)
        self.turned_index = ((self.side * axes[:, 0] + axes[:, 1]) @ cells.T).to(device)  # (heading, cell)

    def locate(self, obs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Flat codes (B, cells), heading, head cell, and the positions of cell 0 and of the food, (B,) each."""
        codes = obs.flatten(1)
        head = (codes >= HEAD).byte().argmax(1)
        food = (codes == FOOD).byte().argmax(1)
        heading = codes.gather(1, head[:, None]).squeeze(1).int() - HEAD
        origin = self.center - self.turned_index[heading, head]
        food_position = origin + self.turned_index[heading, food]
        return codes, heading, head, origin, food_position

    def features(self, obs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Heading (B,), features (B, 3, num_features) and position of the food (B,), from codes (B, rows, columns)."""
        codes, heading, head, _, food_position = self.locate(obs)
        cell_features = F.embedding(codes + NUM_CODES * heading[:, None], self.cell_features)
        all_features = cell_features.mT @ self.sources
        index = self.feature_source[heading, head].long()
        return heading, all_features.gather(2, index[:, None].expand(-1, 3, -1)), food_position

    def tokens(self, obs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Heading (B,), turned codes (B, cells), positions (B, cells), head cell (B,) and position of the food (B,)."""
        codes, heading, head, origin, food_position = self.locate(obs)
        turned_codes = self.turned_code[heading[:, None], codes.int()]
        positions = origin[:, None] + self.turned_index[heading]
        return heading, turned_codes, positions, head, food_position


def grid(rows: range, columns: range) -> torch.Tensor:
    """(row, column) of every cell, row by row."""
    return torch.cartesian_prod(torch.tensor(rows), torch.tensor(columns))

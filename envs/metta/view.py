"""MettaGrid tokens as features for a network."""

import torch
import torch.nn.functional as F
from torch import Tensor

from envs.metta.rules import ACTIONS, FEATURES, HEADER, MOVES, ROTATE


def as_seen(heading: int, down: Tensor | int, right: Tensor | int) -> tuple:
    """Rotates a step (down, right) so that an agent with this heading (index of MOVES) looks up."""
    ahead_down, ahead_right = MOVES[heading]
    seen_up = down * ahead_down + right * ahead_right
    seen_right = down * ahead_right - right * ahead_down
    return -seen_up, seen_right


class TokenView:
    """Channel, cell and weight of each token, from lookup tables without parameters.

    An observation is (tokens, 3) uint8: position, feature and value, empty tokens last. A position is
    row << 4 | column in the window around the agent.

    A categorical feature has 16 channels, one per value, and weight 1. Other features have one channel and weight
    log2(1 + value) / 2, so that the first ore matters more than the fiftieth. A cell is the row-major index in the
    window; the last cell is for tokens without a position.

    If agents have a heading, the window and the headings in it are rotated so that the agent looks up: the policy is
    the same for all four headings. `seen_action` (4, actions) maps actions accordingly, by heading: the first of the
    four rotations is then to keep the heading, not to face north.
    """

    GLOBAL = 254  # position of tokens about the agent or the game
    EMPTY = 255  # position of empty tokens, whose weight is 0
    UNORDERED = {"type", "orientation", "last_action", "tag", "vibe"}

    def __init__(self, features: dict[int, str], window: tuple[int, int], device: torch.device) -> None:
        """`features` are names by number; `window` is (rows, columns), a square if agents have a heading."""
        rows, columns = window
        last_cell = rows * columns
        self.window = window
        self.num_cells = last_cell + 1
        self.num_channels = 0
        center_row = rows // 2
        center_column = columns // 2
        self.center = center_row << 4 | center_column
        self.orientation = None  # number of the feature, None in games without headings
        num_headings = 1
        for feature, name in features.items():
            if name == "orientation":
                self.orientation = feature
                num_headings = len(MOVES)

        value = torch.arange(256)
        channel = torch.zeros(num_headings, 256, 256, dtype=torch.int32)  # (heading, feature, value)
        weight = torch.zeros(256, 256)  # (feature, value)
        for feature, name in features.items():
            if name in self.UNORDERED:
                channel[:, feature] = self.num_channels + value % 16
                weight[feature] = 1
                self.num_channels += 16
            else:
                channel[:, feature] = self.num_channels
                weight[feature] = (1 + value).log2() / 2
                self.num_channels += 1

        position = torch.arange(256)
        down = (position >> 4) - center_row
        right = (position & 15) - center_column
        cell = torch.zeros(num_headings, 256, dtype=torch.int32)  # (heading, position)
        action = torch.arange(len(ACTIONS))
        seen_action = action.repeat(num_headings, 1)
        for heading in range(num_headings):
            seen_down, seen_right = as_seen(heading, down, right)
            seen_row = center_row + seen_down
            seen_column = center_column + seen_right
            seen_cell = seen_row * columns + seen_column
            cell[heading] = seen_cell.clamp(0, last_cell - 1)
            if self.orientation is None:
                continue
            seen_moves = [as_seen(heading, *move) for move in MOVES]
            seen_direction = [MOVES.index(move) for move in seen_moves]
            seen_direction = torch.tensor(seen_direction)
            seen_action[heading, ROTATE : ROTATE + 4] = ROTATE + seen_direction
            directions = channel[heading, self.orientation, :4]
            directions.copy_(directions[seen_direction])
        cell[:, self.GLOBAL :] = last_cell

        self.channel = channel.view(-1).to(device)
        self.weight = weight.view(-1).to(device)
        self.cell = cell.view(-1).to(device)
        self.seen_action = seen_action.to(device)

    def is_token(self, tokens: Tensor) -> Tensor:
        """(B, tokens) bool: False for empty tokens."""
        return tokens[:, :, 0] < self.EMPTY

    def trim(self, tokens: Tensor) -> Tensor:
        """Cuts `tokens` (B, tokens, 3) to the length of the longest observation. Synchronizes."""
        length = self.is_token(tokens).sum(1)
        longest = int(length.max())
        return tokens[:, :longest]

    def heading(self, tokens: Tensor) -> Tensor:
        """(B,) int32: headings of the agents of `tokens` (B, tokens, 3), 0 in games without headings."""
        if self.orientation is None:
            return tokens.new_zeros(len(tokens), dtype=torch.int32)
        # Tokens are sorted by distance, so those of the agent's own cell follow the header.
        end = HEADER + len(FEATURES)
        position, feature, value = tokens[:, :end].unbind(2)
        is_own = position == self.center
        is_heading = feature == self.orientation
        heading = value * (is_own & is_heading)
        return heading.amax(1).int()

    def words(self, tokens: Tensor, heading: Tensor) -> Tensor:
        """(B, tokens) int32: `tokens` (B, tokens, 3) and the agents' `heading` (B,), packed for `lookup`."""
        position, feature, value = tokens.unbind(2)
        word = feature.int() << 16
        word |= position
        word |= value.int() << 8
        word |= heading[:, None] << 24
        return word

    def lookup(self, word: Tensor) -> tuple[Tensor, ...]:
        """Channel and cell (int32) and weight (float32) of words, all of the shape of `word`."""
        shape = word.shape
        word = word.flatten()
        position = word & 0xFF
        seen_position = (word >> 24 << 8) | position
        seen_token = word >> 8
        channel = self.channel.index_select(0, seen_token)
        cell = self.cell.index_select(0, seen_position)
        token = seen_token & 0xFFFF
        is_token = position < self.EMPTY
        weight = self.weight.index_select(0, token) * is_token
        return channel.view(shape), cell.view(shape), weight.view(shape)

    def bags(self, tokens: Tensor, heading: Tensor) -> tuple[Tensor, ...]:
        """`box` as a sparse matrix, with an entry for each of the T tokens that are not empty.

        Returns the entries' columns (T,) int32, the index of each row's first entry (B,) int32, and weights (T,).
        """
        is_token = self.is_token(tokens)
        length = is_token.sum(1)
        longest = int(length.max())
        word = self.words(tokens[:, :longest], heading)
        word = word.masked_select(is_token[:, :longest])
        channel, cell, weight = self.lookup(word)
        index = channel * self.num_cells + cell
        end = length.cumsum(0)
        start = F.pad(end[:-1], (1, 0))
        return index, start.int(), weight

    def box(self, tokens: Tensor, heading: Tensor) -> Tensor:
        """(B, channels * cells) float32: sum of the weights of tokens (B, tokens, 3) in each channel and cell."""
        word = self.words(tokens, heading)
        channel, cell, weight = self.lookup(word)
        index = channel * self.num_cells + cell
        size = self.num_channels * self.num_cells
        box = weight.new_zeros(len(tokens), size)
        return box.scatter_add_(1, index.long(), weight)

"""Tokens of an agent in a MettaGrid as features for a network."""

import torch
import torch.nn.functional as F

from envs.metta_rules import MOVES


class TokenView:
    """What a token says, where, and how much of it. It has no parameters, only lookup tables.

    An observation is (tokens, 3) uint8: position, feature and value, empty tokens behind all others. A position is
    row << 4 | column of the window around the agent.

    A channel is a feature, or one of 16 values of a feature that has no order. The weight of a token is 1 there, and
    half the logarithm of 1 + value elsewhere: the first ore matters more than the fiftieth. Cells number the window row
    by row; two more take tokens without a position, and those of the cell that an agent faces, whichever it is: what to
    do with what is in front does not depend on the heading.
    """

    FACED = 253  # position of what is in front, put in by `mark_faced`
    GLOBAL = 254  # of tokens about the agent or the game
    EMPTY = 255  # of tokens that say nothing: they weigh nothing
    UNORDERED = {"type", "orientation", "last_action", "tag", "vibe"}

    def __init__(self, features: dict[int, str], window: tuple[int, int], device: torch.device) -> None:
        """`features` are names by number, `window` is rows and columns."""
        rows, columns = window
        self.window = window
        self.num_cells = rows * columns + 2
        self.num_channels = 0
        center_row = rows // 2
        center_column = columns // 2
        self.center = center_row << 4 | center_column
        self.orientation = None  # number of the feature: some games have no headings

        value = torch.arange(256)
        channel = torch.zeros(256, 256, dtype=torch.int32)  # by feature and value
        weight = torch.zeros(256, 256)
        for feature, name in features.items():
            if name == "orientation":
                self.orientation = feature
            if name in self.UNORDERED:
                channel[feature] = self.num_channels + value % 16
                weight[feature] = 1
                self.num_channels += 16
            else:
                channel[feature] = self.num_channels
                weight[feature] = (1 + value).log2() / 2
                self.num_channels += 1

        position = torch.arange(256)
        row = position >> 4
        column = position & 15
        window_cells = rows * columns
        cell = row * columns + column  # by position
        cell = cell.clamp(max=window_cells - 1)
        cell[self.GLOBAL :] = window_cells
        cell[self.FACED] = window_cells + 1

        ahead = torch.full((256,), self.center)  # by heading
        for heading, (down, right) in enumerate(MOVES):
            ahead[heading] += 16 * down + right

        self.channel = channel.view(-1).to(device)
        self.weight = weight.view(-1).to(device)
        self.cell = cell.int().to(device)
        self.ahead = ahead.byte().to(device)

    def is_token(self, tokens: torch.Tensor) -> torch.Tensor:
        return tokens[:, :, 0] < self.EMPTY

    def trim(self, tokens: torch.Tensor) -> torch.Tensor:
        """As many `tokens` (B, tokens, 3) as any of them has, without what is empty in all."""
        longest = self.is_token(tokens).sum(1).max()
        return tokens[:, : int(longest)]

    def mark_faced(self, tokens: torch.Tensor) -> torch.Tensor:
        """`tokens` (B, tokens, 3), with a position of its own for what is in front of an agent that has a heading."""
        if self.orientation is None:
            return tokens
        position, feature, value = tokens.unbind(2)
        is_own = position == self.center
        is_heading = feature == self.orientation
        heading = (value * (is_own & is_heading)).amax(1)
        faced = self.ahead.index_select(0, heading.int())
        position = position.masked_fill(position == faced[:, None], self.FACED)
        return torch.stack([position, feature, value], 2)

    def lookup(self, tokens: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Channel, cell and weight of each of `tokens` (..., 3)."""
        shape = tokens.shape[:-1]
        position, feature, value = tokens.reshape(-1, 3).int().unbind(1)
        key = feature << 8 | value
        channel = self.channel.index_select(0, key)
        cell = self.cell.index_select(0, position)
        weight = self.weight.index_select(0, key) * (position < self.EMPTY)
        return channel.view(shape), cell.view(shape), weight.view(shape)

    def bags(self, tokens: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Only what is not empty of tokens (B, tokens, 3): index into channels * cells and weight of each, and where
        those of an agent begin, (B,)."""
        is_token = self.is_token(tokens)
        length = is_token.sum(1)
        longest = int(length.max())
        tokens = self.mark_faced(tokens[:, :longest])
        is_token = is_token[:, :longest]
        channel, cell, weight = self.lookup(tokens[is_token])
        index = channel * self.num_cells + cell
        start = F.pad(length.cumsum(0)[:-1], (1, 0))
        return index, start.int(), weight

    def box(self, tokens: torch.Tensor) -> torch.Tensor:
        """(B, channels * cells) float32: the weight of every token (B, tokens, 3) where it belongs."""
        tokens = self.mark_faced(tokens)
        channel, cell, weight = self.lookup(tokens)
        index = channel * self.num_cells + cell
        box = weight.new_zeros(len(tokens), self.num_channels * self.num_cells)
        return box.scatter_add_(1, index.long(), weight)

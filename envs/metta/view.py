"""Tokens of an agent in a MettaGrid as features for a network."""

import torch
import torch.nn.functional as F

from envs.metta.rules import ACTIONS, FEATURES, HEADER, MOVES, ROTATE


def as_seen(heading: int, down: torch.Tensor | int, right: torch.Tensor | int) -> tuple:
    """So many steps down and to the right, as an agent with this heading (see MOVES) sees them if ahead is up."""
    down_ahead, right_ahead = MOVES[heading]
    ahead = down * down_ahead + right * right_ahead
    to_its_right = down * right_ahead - right * down_ahead
    return -ahead, to_its_right


class TokenView:
    """What a token says, where, and how much of it. It has no parameters, only lookup tables.

    An observation is (tokens, 3) uint8: position, feature and value, empty tokens behind all others. A position is
    row << 4 | column of the window around the agent.

    A channel is a feature, or one of 16 values of a feature that has no order. The weight of a token is 1 there, and
    half the logarithm of 1 + value elsewhere: the first ore matters more than the fiftieth. Cells number the window row
    by row; one more takes tokens without a position.

    Where agents have a heading, the window is turned until its agent looks upwards, and so are the headings in it: what
    is learned facing one way holds for all four. Then `seen_action` (4, actions) is an action as an agent sees it, by
    heading: of the four rotations the first is to stay, not to turn north.
    """

    GLOBAL = 254  # position of tokens about the agent or the game
    EMPTY = 255  # of tokens that say nothing: they weigh nothing
    UNORDERED = {"type", "orientation", "last_action", "tag", "vibe"}

    def __init__(self, features: dict[int, str], window: tuple[int, int], device: torch.device) -> None:
        """`features` are names by number, `window` is rows and columns: as many of both if agents have a heading."""
        rows, columns = window
        self.window = window
        self.num_cells = rows * columns + 1
        self.num_channels = 0
        center_row = rows // 2
        center_column = columns // 2
        self.center = center_row << 4 | center_column
        self.orientation = None  # number of the feature: some games have no headings
        for feature, name in features.items():
            if name == "orientation":
                self.orientation = feature
        headings = range(1 if self.orientation is None else len(MOVES))

        value = torch.arange(256)
        channel = torch.zeros(len(headings), 256, 256, dtype=torch.int32)  # by heading, feature and value
        weight = torch.zeros(256, 256)  # by feature and value
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
        cell = torch.zeros(len(headings), 256, dtype=torch.int32)  # by heading and position
        seen_action = torch.arange(len(ACTIONS)).repeat(len(headings), 1)
        for heading in headings:
            seen_down, seen_right = as_seen(heading, down, right)
            seen_cell = (center_row + seen_down) * columns + center_column + seen_right
            cell[heading] = seen_cell.clamp(0, rows * columns - 1)
            if self.orientation is None:
                continue
            seen_direction = [MOVES.index(as_seen(heading, *move)) for move in MOVES]
            seen_direction = torch.tensor(seen_direction)
            seen_action[heading, ROTATE : ROTATE + 4] = ROTATE + seen_direction
            directions = channel[heading, self.orientation, :4]
            directions.copy_(directions[seen_direction])
        cell[:, self.GLOBAL :] = rows * columns

        self.channel = channel.view(-1).to(device)
        self.weight = weight.view(-1).to(device)
        self.cell = cell.view(-1).to(device)
        self.seen_action = seen_action.to(device)

    def is_token(self, tokens: torch.Tensor) -> torch.Tensor:
        return tokens[:, :, 0] < self.EMPTY

    def trim(self, tokens: torch.Tensor) -> torch.Tensor:
        """As many `tokens` (B, tokens, 3) as any of them has, without what is empty in all."""
        longest = self.is_token(tokens).sum(1).max()
        return tokens[:, : int(longest)]

    def heading(self, tokens: torch.Tensor) -> torch.Tensor:
        """(B,) int32: where the agents of `tokens` (B, tokens, 3) face, 0 in games without headings."""
        if self.orientation is None:
            return tokens.new_zeros(len(tokens), dtype=torch.int32)
        # An agent's own cell is the nearest to it, so its tokens are right behind the header.
        position, feature, value = tokens[:, : HEADER + len(FEATURES)].unbind(2)
        is_own = position == self.center
        is_heading = feature == self.orientation
        return (value * (is_own & is_heading)).amax(1).int()

    def words(self, tokens: torch.Tensor, heading: torch.Tensor) -> torch.Tensor:
        """(B, tokens) int32: all that `lookup` asks for of `tokens` (B, tokens, 3) of agents with this `heading`."""
        position, feature, value = tokens.unbind(2)
        word = feature.int() << 16
        word |= position
        word |= value.int() << 8
        word |= heading[:, None] << 24
        return word

    def lookup(self, word: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Channel, cell and weight of the tokens of these `words`, each of the shape that they have."""
        shape = word.shape
        word = word.flatten()
        position = word & 0xFF
        seen_position = (word >> 24 << 8) | position
        seen_token = word >> 8
        channel = self.channel.index_select(0, seen_token)
        cell = self.cell.index_select(0, seen_position)
        weight = self.weight.index_select(0, seen_token & 0xFFFF) * (position < self.EMPTY)
        return channel.view(shape), cell.view(shape), weight.view(shape)

    def bags(self, tokens: torch.Tensor, heading: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Only what is not empty of tokens (B, tokens, 3): index into channels * cells and weight of each, and where
        those of an agent begin, (B,)."""
        is_token = self.is_token(tokens)
        length = is_token.sum(1)
        longest = int(length.max())
        word = self.words(tokens[:, :longest], heading)
        channel, cell, weight = self.lookup(word.masked_select(is_token[:, :longest]))
        index = channel * self.num_cells + cell
        start = F.pad(length.cumsum(0)[:-1], (1, 0))
        return index, start.int(), weight

    def box(self, tokens: torch.Tensor, heading: torch.Tensor) -> torch.Tensor:
        """(B, channels * cells) float32: the weight of every token (B, tokens, 3) where it belongs."""
        channel, cell, weight = self.lookup(self.words(tokens, heading))
        index = channel * self.num_cells + cell
        box = weight.new_zeros(len(tokens), self.num_channels * self.num_cells)
        return box.scatter_add_(1, index.long(), weight)

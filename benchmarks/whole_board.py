"""The whole board as features, in place of the egocentric view."""

import torch
import torch.nn.functional as F
from torch import Tensor


class WholeBoard:
    """One-hot cells in the order of the board; actions are the four directions. Interface of EgocentricView."""

    side = 1

    def __init__(self, board: tuple[int, int], device: torch.device) -> None:
        rows, columns = board
        self.num_features = 4 * rows * columns  # times 3 are 12 numbers a cell, of which the codes use 10
        moves = torch.arange(4, device=device)
        self.move = moves[None]

    def features(self, obs: Tensor) -> tuple[Tensor, ...]:
        codes = obs.flatten(1)
        codes = codes.long()
        nowhere = torch.zeros_like(codes[:, 0])
        one_hot = F.one_hot(codes, 12)
        one_hot = one_hot.float()
        features = one_hot.view(len(obs), 3, -1)
        return nowhere, features, nowhere

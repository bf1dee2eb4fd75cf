"""What the networks of the arena get of an observation."""

import math

import numpy as np
import pytest
import torch

from envs.metta_batch import MettaBatch
from envs.metta_rules import FEATURES
from envs.metta_view import TokenView

CPU = torch.device("cpu")


def tokens(games: int = 4, steps: int = 20) -> torch.Tensor:
    """Observations (N, 200, 3) of games under way."""
    torch.manual_seed(0)
    envs = MettaBatch(games, easy=True)
    obs = envs.reset()
    for _ in range(steps):
        obs = envs.step(torch.randint(25, (len(obs),)))[0]
    return obs.clone()


def test_tokens_against_a_loop() -> None:
    view, obs = TokenView(dict(enumerate(FEATURES)), (11, 11), CPU), tokens()
    obs[0, 5, 0], obs[0, 5, 2] = 254, 7  # a token of no place, as the real game has them
    channel, cell, weight = view.lookup(view.mark_faced(obs))
    assert ((cell == 122) & (obs[:, :, 0] < 255)).any()  # somebody faces something
    for i in np.ndindex(len(obs), 200):
        place, feature, value = obs[i].tolist()
        if place == 255:
            assert weight[i] == 0
            continue
        kind = FEATURES[feature] in ("type", "orientation", "last_action")
        before = sum(16 if FEATURES[f] in TokenView.UNORDERED else 1 for f in range(feature))
        heading = obs[i[0], (obs[i[0], :, 0] == 0x55) & (obs[i[0], :, 1] == FEATURES.index("orientation")), 2].item()
        where = 121 if place == 254 else (place >> 4) * 11 + (place & 15)
        assert cell[i] == (122 if place == (0x45, 0x65, 0x54, 0x56)[heading] else where)
        if FEATURES[feature] in TokenView.UNORDERED:
            assert channel[i] == before + value % 16 and weight[i] == 1
        else:
            assert not kind
            assert channel[i] == before and weight[i].item() == pytest.approx(math.log2(1 + value) / 2)


def test_the_sparse_features_are_those_of_the_box() -> None:
    view, obs = TokenView(MettaBatch.features, MettaBatch.view_shape, CPU), tokens()[:5]
    obs[1] = 255  # an agent that has no tokens
    index, start, weight = view.bags(obs)
    ends = [*start[1:].tolist(), len(index)]
    box = torch.zeros(5, view.num_channels * view.num_cells)
    for agent, (first, end) in enumerate(zip(start.tolist(), ends)):
        for i in range(first, end):
            box[agent, index[i]] += weight[i]
    torch.testing.assert_close(view.box(obs), box)
    assert torch.equal(view.box(view.trim(obs)), view.box(obs)) and not box[1].any() and box[0].any()

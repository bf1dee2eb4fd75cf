"""What the networks of the arena get of an observation."""

import math

import numpy as np
import pytest
import torch

from envs.metta.batch import MettaBatch
from envs.metta.rules import ACTIONS, FEATURES, ROTATE
from envs.metta.view import TokenView

CPU = torch.device("cpu")


def tokens(games: int = 4, steps: int = 20) -> torch.Tensor:
    """Observations (N, 200, 3) of games under way."""
    envs = MettaBatch(games, easy=True)
    obs = envs.reset()
    for _ in range(steps):
        obs = envs.step(torch.randint(25, (len(obs),)))[0]
    return obs.clone()


CLOCKWISE = [0, 3, 1, 2]  # headings up, right, down, left


def as_seen(direction: int, heading: int) -> int:
    return CLOCKWISE[(CLOCKWISE.index(direction) - CLOCKWISE.index(heading)) % 4]


def test_tokens_against_a_loop() -> None:
    view, obs = TokenView(dict(enumerate(FEATURES)), (11, 11), CPU), tokens()
    obs[0, 5, 0], obs[0, 5, 2] = 254, 7  # a token of no place, as the real game has them
    headings = view.heading(obs)
    assert len(headings.unique()) == 4
    channel, cell, weight = view.lookup(view.words(obs, headings))
    for i in np.ndindex(len(obs), 200):
        place, feature, value = obs[i].tolist()
        if place == 255:
            assert weight[i] == 0
            continue
        before = sum(16 if FEATURES[f] in TokenView.UNORDERED else 1 for f in range(feature))
        heading = obs[i[0], (obs[i[0], :, 0] == 0x55) & (obs[i[0], :, 1] == FEATURES.index("orientation")), 2].item()
        assert headings[i[0]] == heading
        window = np.rot90(np.arange(121).reshape(11, 11), CLOCKWISE.index(heading))
        assert cell[i] == (121 if place == 254 else np.argwhere(window == (place >> 4) * 11 + (place & 15)) @ (11, 1))
        if FEATURES[feature] == "orientation":
            value = as_seen(value, heading)
        if FEATURES[feature] in TokenView.UNORDERED:
            assert channel[i] == before + value % 16 and weight[i] == 1
        else:
            assert channel[i] == before and weight[i].item() == pytest.approx(math.log2(1 + value) / 2)


def test_a_rotation_is_seen_from_the_heading_and_no_other_action() -> None:
    seen = TokenView(MettaBatch.features, MettaBatch.view_shape, CPU).seen_action
    assert seen.shape == (4, len(ACTIONS))
    for heading, action in np.ndindex(4, len(ACTIONS)):
        direction = action - ROTATE
        assert seen[heading, action] == (ROTATE + as_seen(direction, heading) if 0 <= direction < 4 else action)


def test_games_without_headings_are_not_turned() -> None:
    view, obs = TokenView({2: "type", 5: "hp"}, (11, 13), CPU), tokens()
    obs[:, :, 1] = 5
    heading = view.heading(obs)
    assert not heading.any() and len(heading) == len(obs)
    _, cell, _ = view.lookup(view.words(obs, heading))
    place = obs[:, :, 0].int()
    inside = place < 254
    assert torch.equal(cell[inside], ((place >> 4) * 13 + (place & 15))[inside])


def test_the_sparse_features_are_those_of_the_box() -> None:
    view, obs = TokenView(MettaBatch.features, MettaBatch.view_shape, CPU), tokens()[:5]
    obs[1] = 255  # an agent that has no tokens
    heading = view.heading(obs)
    index, start, weight = view.bags(obs, heading)
    ends = [*start[1:].tolist(), len(index)]
    box = torch.zeros(5, view.num_channels * view.num_cells)
    for agent, (first, end) in enumerate(zip(start.tolist(), ends)):
        for i in range(first, end):
            box[agent, index[i]] += weight[i]
    torch.testing.assert_close(view.box(obs, heading), box)
    trimmed = view.trim(obs)
    assert trimmed.shape[1] < 200 and torch.equal(view.box(trimmed, view.heading(trimmed)), view.box(obs, heading))
    assert not box[1].any() and box[0].any()

"""The egocentric view of Snake against a loop over cells."""

import numpy as np
import pytest
import torch
from test_snake_env import greedy_action

from envs.snake.rules import BODY, FOOD, HEAD, MOVES, SnakeEnv
from envs.snake.view import EgocentricView

CPU = torch.device("cpu")


def play(board: tuple[int, int], lane: int, steps: int) -> SnakeEnv:
    """A game after `steps` moves."""
    rng = np.random.default_rng(lane)
    env = SnakeEnv(lane=lane, board=board, start_length=2)
    env.reset(seed=0)
    for _ in range(steps):
        _, _, terminated, truncated, _ = env.step(greedy_action(env, rng))
        if terminated or truncated:
            env.reset()
    return env


def reached(env: SnakeEnv, step: np.ndarray) -> list[float]:
    """Share of the free cells that the snake gets to after a step, and whether tail and food are among them."""
    rows, columns = env.rules.board
    tail, *others = [divmod(cell, columns) for cell in env.body]
    free = {(row, column) for row in range(rows) for column in range(columns)} - set(others)
    found = set()
    waiting = [tuple(others[-1] + step)]
    while waiting:
        cell = waiting.pop()
        if cell in free - found:
            found.add(cell)
            waiting += [(cell[0] + row, cell[1] + column) for row, column in MOVES]
    return [len(found) / len(free), tail in found, divmod(env.food, columns) in found]


@pytest.mark.parametrize("board", [(10, 10), (4, 6), (7, 5)])
def test_view_against_a_loop_over_cells(board: tuple[int, int]) -> None:
    games = [play(board, lane, steps=8 * lane) for lane in range(60)]
    obs = torch.as_tensor(np.stack([env.codes() for env in games]))
    view = EgocentricView(board, CPU)
    orientation, features, food_position = view.features(obs)
    _, codes, position, head, _ = view.tokens(obs)
    assert len(orientation.unique()) == 8
    radius = max(board) - 1
    around = [(back, right) for back in range(-radius, radius + 1) for right in range(-radius, radius + 1)]
    near = [place for place in around if max(map(abs, place)) <= view.NEAR]
    far = [place for place in around if place[0] % 3 == place[1] % 3 == 0]
    for n, env in enumerate(games):
        grid = env.codes()
        row, column = divmod(env.body[-1], board[1])
        assert head[n] == env.body[-1]
        heading, is_mirrored = divmod(orientation[n].item(), 2)
        assert heading == env.heading
        ahead = np.array(MOVES[heading])
        right = np.array(MOVES[(heading + 1) % 4])
        food_step = np.array(divmod(env.food, board[1])) - (row, column)
        assert is_mirrored == (food_step @ right < 0)
        right *= 1 - 2 * is_mirrored
        cells = {}
        for number, (i, j) in enumerate(around):
            cell_row, cell_column = (row, column) - i * ahead + j * right
            if not (0 <= cell_row < board[0] and 0 <= cell_column < board[1]):
                continue
            cell = cell_row * board[1] + cell_column
            code = int(grid[cell_row, cell_column])
            assert position[n, cell] == number
            assert code != FOOD or food_position[n] == number
            toward = np.array(MOVES[(code - BODY) % 4]) if code >= BODY else np.zeros(2)
            turned = toward @ ahead, toward @ right
            if code >= HEAD:
                assert codes[n, cell] == HEAD
            elif code >= BODY:
                assert turned == [(1, 0), (0, 1), (-1, 0), (0, -1)][codes[n, cell] - BODY]
            else:
                assert codes[n, cell] == code
            goes_on = turned if BODY <= code < HEAD else (0, 0)
            cells[i, j] = np.array([code < BODY, *goes_on], float)
        nothing = np.zeros(3)
        blocks = []
        for i, j in far:
            block = [cells.get((i + a, j + b), nothing) for a in (-1, 0, 1) for b in (-1, 0, 1)]
            blocks.append(sum(block) / 3)
        turns = [reached(env, step) for step in (-right, ahead, right)]
        expected = np.stack([cells.get(place, nothing) for place in near] + blocks, 1)
        expected = np.concatenate([expected, turns], 1)
        np.testing.assert_allclose(features[n], expected, atol=1e-6)


def test_a_labyrinth_of_one_path_is_connected() -> None:
    free = torch.zeros(66, 66, dtype=torch.bool)
    free[1:-1:2, 1:-1] = True
    free[2:-1:4, -2] = True
    free[4:-1:4, 1] = True
    both = torch.stack([free.flatten(), free.T.flatten()], 1)
    labels = EgocentricView((64, 64), CPU).connect(both.int())
    assert [len(label[is_free].unique()) for label, is_free in zip(labels.T, both.T)] == [1, 1]
    assert labels[~both].eq(0).all()

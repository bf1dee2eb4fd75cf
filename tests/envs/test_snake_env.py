"""The Snake rule book, and the batched version against it."""

import copy

import gymnasium as gym
import numpy as np
import pytest
import torch

import envs  # noqa: F401  registers the ids
from envs.snake.batch import SnakeBatch
from envs.snake.rules import BODY, FOOD, MOVES, VARIANTS, Rules, SnakeEnv
from envs.streams import integer_hash

SETTINGS = {
    **VARIANTS,
    "SnakeOneHot-v0": VARIANTS["SnakeOneHot-v0"] | dict(board=(10, 10), step_limit=125),
    "one cell": dict(board=(4, 4), start_length=1),
    "random start": dict(board=(9, 6), start_length=2, start_margin=2, hunger=False, step_limit=40),
}


def greedy_action(env: SnakeEnv, rng: np.random.Generator) -> int:
    """Toward the food without dying in this step, sometimes at random: plays long enough to fill half a board."""
    if rng.random() < 0.02:
        return int(rng.integers(4))
    columns, best = env.rules.board[1], (10**6, int(rng.integers(4)))
    for action in rng.permutation(4):
        row, column = env.body[-1] // columns + MOVES[action][0], env.body[-1] % columns + MOVES[action][1]
        inside = 0 <= row < env.rules.board[0] and 0 <= column < columns
        if inside and row * columns + column not in env.body:
            best = min(best, (abs(row - env.food // columns) + abs(column - env.food % columns), int(action)))
    return best[1]


def two_paths(lanes: int, **rules) -> list[SnakeBatch]:
    batches = [SnakeBatch(lanes, seed=5, **rules) for _ in range(2)]
    batches[1].fixed_shapes = True
    return batches


@pytest.mark.parametrize("name", SETTINGS)
def test_batch_plays_by_the_rule_book(name: str) -> None:
    """Also along the path of CUDA, all of whose shapes are fixed, and half of the time in games that were loaded."""
    rules, lanes, steps, games = SETTINGS[name], 12, 800, 0
    batches = two_paths(lanes, **rules)
    books = [SnakeEnv(lane=lane, **rules) for lane in range(lanes)]
    rng = np.random.default_rng(0)
    for book in books:
        book.reset(seed=5)
    for batch in batches:
        np.testing.assert_array_equal([book.codes() for book in books], batch.reset())
    longest = 0
    for step in range(steps):
        if step == steps // 2:
            saved = [book.state_dict() for book in books]
            kept = copy.deepcopy(saved)
            books = [SnakeEnv(**rules) for _ in books]
            for book, state in zip(books, saved):
                book.load_state_dict(state)
            states = [batch.state_dict() for batch in batches]
            batches = two_paths(lanes, **rules)
            for batch, state in zip(batches, reversed(states)):
                batch.load_state_dict(state)
        actions = [greedy_action(book, rng) for book in books]
        _, rewards, terminated, truncated, infos = zip(*[book.step(action) for book, action in zip(books, actions)])
        final_obs = np.stack([book.codes() for book in books])
        scores = [info["score"] for info in infos]
        longest = max(longest, *scores)
        for lane, book in enumerate(books):
            if terminated[lane] or truncated[lane]:
                games += 1
                book.reset()
        obs = np.stack([book.codes() for book in books])
        for batch in batches:
            found = batch.step(torch.tensor(actions))
            np.testing.assert_array_equal(obs, found[0])
            np.testing.assert_allclose(rewards, found[1], atol=1e-4)
            np.testing.assert_array_equal((terminated, truncated), (found[2], found[3]))
            np.testing.assert_array_equal(scores, found[4]["score"])
            np.testing.assert_array_equal([info["won"] for info in infos], found[4]["won"])
            np.testing.assert_array_equal(final_obs, found[4]["final_obs"])
    assert games > 20 and longest >= 8
    assert saved == kept  # what was loaded is not the game's own
    for batch in batches:
        assert batch.finished[0] == games


def place(env: SnakeEnv, body: list[int], heading: int, food: int) -> None:
    """Put `env` into a position: `body` tail first."""
    env.reset(seed=0)
    env.body.clear()
    env.body.extend(body)
    env.heading, env.food = heading, food
    env.free = [cell for cell in range(env.rules.cells) if cell not in body and cell != food]
    env.slot = {cell: i for i, cell in enumerate(env.free)}


def test_the_leaving_tail_may_be_entered_unless_it_is_solid() -> None:
    square = [44, 54, 55, 45]  # the head at 45 is about to enter the tail at 44
    for solid, ends in ((False, False), (True, True)):
        env = SnakeEnv(solid_tail=solid)
        place(env, square, heading=0, food=0)
        _, reward, terminated, _, _ = env.step(3)
        assert terminated == ends and reward == (-1 if ends else 0)
        assert list(env.body) == (square if ends else [54, 55, 45, 44])  # a deadly move is not carried out


def test_a_full_board_is_a_win() -> None:
    env = SnakeEnv(board=(4, 4))
    place(env, [4, 0, 1, 2, 3, 7, 6, 5, 9, 10, 11, 15, 14, 13, 12], heading=3, food=8)
    obs, reward, terminated, truncated, info = env.step(0)
    assert (reward, terminated, truncated, info) == (1.0, True, False, {"score": 1, "won": True})
    assert (obs >= BODY).all()


def test_hunger_truncates_and_eating_feeds() -> None:
    env = SnakeEnv(board=(4, 4))
    place(env, [1, 0, 4], heading=2, food=15)  # goes round a 2x2 square for ever
    for step, action in enumerate([1, 0, 3, 2] * 8, start=1):
        _, _, terminated, truncated, _ = env.step(action)
        assert not terminated
        assert truncated == (step == 32)
    place(env, [0, 1], heading=1, food=2)
    env.clock = 31
    assert not env.step(1)[3] and env.clock == 0


@pytest.mark.parametrize(
    "env_id, board, eats, dies, moves",
    [
        ("Snake-v0", (10, 10), 1, -1, 0),
        ("SnakeBlocks-v0", (10, 10), 15.01, -999.99, 0.01),
        ("SnakeOneHot-v0", (20, 20), 10, -10, -0.01),
    ],
)
def test_variants_have_the_numbers_of_their_originals(env_id, board, eats, dies, moves) -> None:
    env = gym.make(env_id).unwrapped
    assert env.rules.board == board
    columns = board[1]
    place(env, [columns + 1, columns + 2, columns + 3], heading=1, food=columns + 4)
    assert env.step(1)[1] == pytest.approx(eats)
    assert env.step(0)[1] == pytest.approx(moves)
    _, reward, terminated, _, _ = env.step(0)
    assert terminated and reward == pytest.approx(dies)


def test_variants_end_as_their_originals() -> None:
    one_hot = gym.make("SnakeOneHot-v0").unwrapped
    obs, _ = one_hot.reset(seed=0)
    assert obs.shape == (20, 20, 3) and obs.sum() == 400 and obs[..., 0].sum() == 1 and obs[10, 10, 0] == 1
    place(one_hot, [0, 1], heading=1, food=399)
    assert one_hot.step(3)[2]  # a reversal runs into the body
    blocks = gym.make("SnakeBlocks-v0").unwrapped
    heads = {int(np.flatnonzero(blocks.reset(seed=seed)[0].ravel() == 2)[0]) for seed in range(200)}
    assert heads == {row * 10 + column for row in (3, 4, 5) for column in (3, 4, 5)}
    assert blocks.rules.limit == 200 and one_hot.rules.limit == 500
    blocks.clock = 199
    assert blocks.step(1)[3]


def chi_square(values: np.ndarray, bins: int) -> float:
    counts = np.bincount(values, minlength=bins)
    expected = len(values) / bins
    assert len(counts) == bins
    return ((counts - expected) ** 2 / expected).sum()


def test_the_first_food_is_uniform_over_free_cells() -> None:
    codes = SnakeBatch(20_000, seed=9).reset().flatten(1).numpy()
    assert ((codes == FOOD).sum(1) == 1).all()
    free = np.flatnonzero((codes < BODY).all(0))
    assert len(free) == 97
    number = np.searchsorted(free, (codes == FOOD).argmax(1))
    assert chi_square(number, 97) < 150  # 96 degrees of freedom: exceeded by chance once in 3,000 times


def test_the_food_after_a_meal_is_uniform_over_free_cells() -> None:
    env, foods = SnakeEnv(board=(6, 6)), []
    for key in range(3_000):
        place(env, [13, 14, 15], heading=1, food=19)
        env.key = integer_hash(key)
        for action in (2, 3, 3):
            env.step(action)
        foods.append(env.food)
    assert list(env.body) == [15, 21, 20, 19]
    free = sorted(set(range(36)) - {15, 21, 20, 19})
    assert set(foods) == set(free)
    assert chi_square(np.searchsorted(free, foods), 32) < 66  # 31 degrees of freedom: once in 3,000 times


def test_lanes_and_seeds_have_streams_of_their_own() -> None:
    obs = SnakeBatch(200, seed=9).reset().flatten(1)
    other = SnakeBatch(200, seed=10).reset().flatten(1)
    food, other_food = obs.eq(FOOD).byte().argmax(1), other.eq(FOOD).byte().argmax(1)
    assert len(food.unique()) > 70 and (food == other_food).sum() < 15  # by chance 85 and 2
    assert (food[1:] == other_food[:-1]).sum() < 15  # lane i of a seed is not lane i + 1 of another
    foods = [int((SnakeEnv(lane=lane).reset(seed=9)[0] == FOOD).argmax()) for lane in range(50)]
    assert foods == food[:50].tolist()


@pytest.mark.parametrize(
    "rules",
    [dict(board=(3, 10)), dict(board=(10, 65)), dict(board=(10,)), dict(start_length=7), dict(start_length=0),
     dict(board=(6, 6), start_margin=3), dict(step_limit=0), dict(observation="pixels")],
)  # fmt: skip
def test_rules_nobody_can_play_by_are_refused(rules) -> None:
    with pytest.raises(ValueError):
        Rules(**rules)


def test_renderings() -> None:
    env = SnakeEnv("ansi", board=(4, 5))
    place(env, [0, 1, 6], heading=2, food=19)
    assert env.render().splitlines()[2] == "| o v       |" and "▼" in env.render() and "@" in env.render()
    env.render_mode = "rgb_array"
    frame = env.render()
    assert frame.shape == (4 * 24 + 32, 5 * 24, 3) and frame.dtype == np.uint8
    head, tail, food, empty = (
        frame[32 + 24 * row + 6, 24 * column + 12] for row, column in ((1, 1), (0, 0), (3, 4), (2, 4))
    )
    assert head.sum() > tail.sum() > empty.sum() and food[0] > 200 > food[1]


@pytest.mark.parametrize("board, cell", [((20, 20), 24), ((4, 21), 22), ((64, 64), 7), ((64, 4), 7), ((32, 10), 15)])
def test_a_picture_of_a_large_board_has_smaller_cells(board: tuple[int, int], cell: int) -> None:
    env = SnakeEnv("rgb_array", board=board)
    env.reset(seed=1)
    frame = env.render()
    assert frame.shape == (board[0] * cell + 32, max(board[1] * cell, 96), 3) and max(frame.shape) <= 480 + 32
    row, column = env.food // board[1], env.food % board[1]
    food = frame[32 + row * cell + cell // 2, column * cell + cell // 2]
    assert food[0] > 200 > food[1]


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_step_as_on_cuda_compiles_into_one_graph(backend: str) -> None:
    eager, compiled = SnakeBatch(32, seed=1), SnakeBatch(32, seed=1)
    eager.fixed_shapes = compiled.fixed_shapes = True
    eager.reset()
    compiled.reset()
    step = torch.compile(compiled.step, fullgraph=True, dynamic=False, backend=backend)
    for _ in range(200):
        action = torch.randint(4, (32,))
        for ours, theirs in zip(eager.step(action)[:4], step(action)[:4], strict=True):
            assert torch.equal(ours, theirs)
    assert eager.finished[0] > 100
    for name, tensor in eager.state_dict().items():
        assert torch.equal(tensor, compiled.state_dict()[name]), name


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_cuda_plays_the_same_games() -> None:
    cpu, gpu = SnakeBatch(64, "cpu", 1), SnakeBatch(64, "cuda", 1)
    cpu.reset(), gpu.reset()
    rng = np.random.default_rng(0)
    for _ in range(500):
        action = torch.as_tensor(rng.integers(4, size=64))
        for ours, theirs in zip(cpu.step(action)[:4], gpu.step(action.cuda())[:4]):
            assert torch.equal(ours, theirs.cpu())

"""The Snake rule book, and the batched version against it."""

import warnings

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.utils.env_checker import check_env

import envs  # noqa: F401  registers the ids
from envs.snake import BODY, FOOD, HEAD, MOVES, VARIANTS, Rules, SnakeBatch, SnakeEnv, _hash, _lane_key

SETTINGS = {
    **VARIANTS,
    "tall": dict(board=(7, 4), start_length=2),
    "one cell": dict(board=(4, 4), start_length=1),
    "random start": dict(board=(6, 9), start_margin=2, hunger=False, step_limit=40),
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


@pytest.mark.parametrize("name", SETTINGS)
def test_batch_plays_by_the_rule_book(name: str) -> None:
    rules, lanes, steps, games = SETTINGS[name], 12, 1200, 0
    batch = SnakeBatch(lanes, seed=5, **rules)
    books = [SnakeEnv(lane=lane, **rules) for lane in range(lanes)]
    rng = np.random.default_rng(0)
    obs = batch.reset()
    for lane, book in enumerate(books):
        book.reset(seed=5)
        np.testing.assert_array_equal(book.codes(), obs[lane])
    longest = 0
    for _ in range(steps):
        actions = [greedy_action(book, rng) for book in books]
        obs, reward, terminated, truncated, info = batch.step(torch.tensor(actions))
        for lane, book in enumerate(books):
            _, book_reward, book_terminated, book_truncated, book_info = book.step(actions[lane])
            assert (book_terminated, book_truncated) == (bool(terminated[lane]), bool(truncated[lane]))
            assert reward[lane].item() == pytest.approx(book_reward, abs=1e-4)
            assert book_info["score"] == info["score"][lane] and book_info["won"] == bool(info["won"][lane])
            np.testing.assert_array_equal(book.codes(), info["final_obs"][lane])
            longest = max(longest, book_info["score"])
            if book_terminated or book_truncated:
                games += 1
                book.reset()
            np.testing.assert_array_equal(book.codes(), obs[lane])
    assert games > 20 and longest >= 8
    assert batch.finished[0] == games


def test_thousands_of_random_games_agree() -> None:
    lanes = 64
    batch, books = SnakeBatch(lanes, seed=11), [SnakeEnv(lane=lane) for lane in range(lanes)]
    batch.reset()
    for book in books:
        book.reset(seed=11)
    rng, games = np.random.default_rng(1), 0
    while games < 3000:
        actions = rng.integers(4, size=lanes)
        obs, *_ = batch.step(torch.as_tensor(actions))
        for lane, book in enumerate(books):
            _, _, terminated, truncated, _ = book.step(int(actions[lane]))
            if terminated or truncated:
                games += 1
                book.reset()
        if rng.random() < 0.05:
            np.testing.assert_array_equal(np.stack([book.codes() for book in books]), obs)


def test_a_lane_does_not_depend_on_the_others() -> None:
    few, many = SnakeBatch(3, seed=2), SnakeBatch(50, seed=2)
    few.reset(), many.reset()
    rng = np.random.default_rng(0)
    for _ in range(300):
        actions = torch.as_tensor(rng.integers(4, size=50))
        few_obs, many_obs = few.step(actions[:3])[0], many.step(actions)[0]
        assert torch.equal(few_obs, many_obs[:3])
    assert len({tuple(lane.flatten().tolist()) for lane in many_obs}) > 25  # and no two play the same game


def test_masked_fixed_shape_path_is_the_same() -> None:
    """CUDA works on all lanes with masks; forced here on the CPU it must give the same games."""
    plain, masked = SnakeBatch(40, seed=3, board=(5, 5)), SnakeBatch(40, seed=3, board=(5, 5))
    masked._select = lambda mask: (masked.lanes, mask)
    plain.reset(), masked.reset()
    rng = np.random.default_rng(0)
    for _ in range(400):
        action = torch.as_tensor(rng.integers(4, size=40))
        for ours, theirs in zip(plain.step(action)[:4], masked.step(action)[:4]):
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize("env_id", VARIANTS)
def test_gymnasium_finds_nothing_to_complain_about(env_id: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_env(gym.make(env_id).unwrapped)


def test_vector_env_is_numpy_and_same_step() -> None:
    vector = gym.make_vec("Snake-v0", num_envs=5)
    obs, _ = vector.reset(seed=7)
    singles = [SnakeEnv(lane=lane) for lane in range(5)]
    for lane, single in enumerate(singles):
        np.testing.assert_array_equal(single.reset(seed=7)[0], obs[lane])
    assert obs.dtype == np.uint8 and vector.observation_space.contains(obs)
    ended = 0
    for step in range(40):
        obs, reward, terminated, truncated, infos = vector.step(np.full(5, step % 2))
        for lane, single in enumerate(singles):
            final, single_reward, end, _, _ = single.step(step % 2)
            assert reward[lane] == single_reward and terminated[lane] == end
            if end:
                ended += 1
                np.testing.assert_array_equal(infos["final_obs"][lane], final)
                assert infos["_final_obs"][lane]
                final = single.reset()[0]
            np.testing.assert_array_equal(obs[lane], final)
    assert ended > 5
    again, _ = vector.reset(seed=7)
    np.testing.assert_array_equal(again[0], SnakeEnv(lane=0).reset(seed=7)[0])


def place(env: SnakeEnv, body: list[int], heading: int, food: int) -> None:
    """Put `env` into a position: `body` tail first."""
    env.reset(seed=0)
    env.body.clear()
    env.body.extend(body)
    env.heading, env.food = heading, food
    env.free = [cell for cell in range(env.rules.cells) if cell not in body and cell != food]
    env.slot = {cell: i for i, cell in enumerate(env.free)}


def test_codes_hold_body_order_heading_and_food() -> None:
    env = SnakeEnv(board=(4, 5))
    place(env, [0, 1, 6], heading=2, food=19)
    expected = np.zeros((4, 5), np.uint8)
    expected[0, 0], expected[0, 1], expected[1, 1], expected[3, 4] = BODY + 1, BODY + 2, HEAD + 2, FOOD
    np.testing.assert_array_equal(env.codes(), expected)


def test_a_reversal_keeps_going() -> None:
    env = SnakeEnv()
    place(env, [43, 44, 45], heading=1, food=99)
    env.step(3)
    assert list(env.body) == [44, 45, 46] and env.heading == 1


def test_the_leaving_tail_may_be_entered_unless_it_is_solid() -> None:
    square = [44, 54, 55, 45]  # the head at 45 is about to enter the tail at 44
    for solid, ends in ((False, False), (True, True)):
        env = SnakeEnv(solid_tail=solid)
        place(env, square, heading=0, food=0)
        _, reward, terminated, _, _ = env.step(3)
        assert terminated == ends and reward == (-1 if ends else 0)
        assert list(env.body) == (square if ends else [54, 55, 45, 44])  # a deadly move is not carried out


def test_eating_grows_scores_and_moves_the_food() -> None:
    env = SnakeEnv()
    place(env, [43, 44, 45], heading=1, food=46)
    _, reward, terminated, truncated, info = env.step(1)
    assert (reward, terminated, truncated, info["score"]) == (1.0, False, False, 1)
    assert list(env.body) == [43, 44, 45, 46] and env.food not in env.body


def test_a_full_board_is_a_win() -> None:
    cycle = {0: 1, 1: 1, 2: 1, 3: 2, 7: 3, 6: 3, 5: 2, 9: 1, 10: 1, 11: 2, 15: 3, 14: 3, 13: 3, 12: 0, 8: 0, 4: 0}
    batch, env = SnakeBatch(1, seed=4, board=(4, 4)), SnakeEnv(board=(4, 4))
    batch.reset()
    env.reset(seed=4)
    env_done = False
    for _ in range(400):
        action = cycle[env.body[-1]]
        _, reward, terminated, truncated, info = env.step(action)
        obs, batch_reward, batch_terminated, _, batch_info = batch.step(torch.tensor([action]))
        assert batch_reward.item() == reward and bool(batch_terminated) == terminated
        env_done = terminated or truncated
        if env_done:
            break
    assert terminated and not truncated and reward == 1.0
    assert info == {"score": 13, "won": True} and batch_info["won"].item() and batch_info["score"].item() == 13
    assert (batch_info["final_obs"] >= BODY).all() and obs.eq(FOOD).sum() == 1  # a new game has begun


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
    assert {blocks.reset(seed=seed)[0].argmax() for seed in range(40)} - {0}
    heads = {int(np.flatnonzero(blocks.reset(seed=seed)[0].ravel() == 2)[0]) for seed in range(200)}
    assert heads == {row * 10 + column for row in (3, 4, 5) for column in (3, 4, 5)}
    assert blocks.rules.limit == 200 and one_hot.rules.limit == 500
    blocks.clock = 199
    assert blocks.step(1)[3]


def test_food_is_uniform_over_free_cells() -> None:
    cells = [_hash(_lane_key(9, lane) + draw) % 97 for lane in range(200) for draw in range(100)]
    counts = np.bincount(cells, minlength=97)
    expected = len(cells) / 97
    chi_square = ((counts - expected) ** 2 / expected).sum()
    assert chi_square < 150  # 96 degrees of freedom: exceeded by chance once in 3,000 times


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

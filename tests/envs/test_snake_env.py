"""The Snake rule book, and the batched version against it."""

import ast
import subprocess
import sys
import warnings
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.utils.env_checker import check_env
from gymnasium.vector import AutoresetMode, SyncVectorEnv

import envs  # noqa: F401  registers the ids
from envs.snake.batch import SnakeBatch
from envs.snake.gym import SnakeVectorEnv
from envs.snake.rules import BODY, EMPTY, FOOD, HEAD, MOVES, VARIANTS, Rules, SnakeEnv

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
    """Also along the path of CUDA, all of whose shapes are fixed."""
    rules, lanes, steps, games = SETTINGS[name], 12, 1200, 0
    batches = [SnakeBatch(lanes, seed=5, **rules) for _ in range(2)]
    batches[1].fixed_shapes = True
    books = [SnakeEnv(lane=lane, **rules) for lane in range(lanes)]
    rng = np.random.default_rng(0)
    for book in books:
        book.reset(seed=5)
    for batch in batches:
        np.testing.assert_array_equal([book.codes() for book in books], batch.reset())
    longest = 0
    for _ in range(steps):
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
    for batch in batches:
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


def vector_and_singles(lanes: int, by_lane: bool, **rules) -> tuple[SnakeVectorEnv, SyncVectorEnv]:
    """The vector environment, and Gymnasium's own around the rule book, which must be the same."""
    makers = [lambda lane=lane: SnakeEnv(lane=lane * by_lane, **rules) for lane in range(lanes)]
    vector = gym.make_vec("Snake-v0", num_envs=lanes, **rules).unwrapped
    return vector, SyncVectorEnv(makers, autoreset_mode=AutoresetMode.SAME_STEP)


def assert_same(ours, theirs) -> None:
    """Arrays, tuples and dicts of them: same names, values, types."""
    assert type(ours) is type(theirs)
    if isinstance(ours, dict):
        assert set(ours) == set(theirs)
        for name in ours:
            assert_same(ours[name], theirs[name])
    elif isinstance(ours, tuple):
        for our, their in zip(ours, theirs, strict=True):
            assert_same(our, their)
    elif ours is not None:
        assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
        for our, their in zip(ours, theirs, strict=True):
            assert_same(our, their) if ours.dtype == object else np.testing.assert_array_equal(our, their)


@pytest.mark.parametrize("by_lane", [True, False], ids=["one seed", "a list of seeds"])
def test_vector_env_is_what_gymnasium_makes_of_the_rule_book(by_lane: bool) -> None:
    """Observations, rewards, ends and info of both; a board of 4x4 so that some games are won."""
    lanes, rng, won = 5, np.random.default_rng(0), 0
    vector, singles = vector_and_singles(lanes, by_lane, board=(4, 4))
    seeds = [31, 7, 7, 90, 2**31]
    if by_lane:
        ours, theirs = vector.reset(seed=7), singles.reset(seed=[7] * lanes)
    else:
        ours, theirs = vector.reset(seed=seeds), singles.reset(seed=seeds)
    assert_same(ours, theirs)
    assert ours[1]["score"].tolist() == [0] * lanes and ours[1]["_won"].all()
    assert by_lane == (ours[0][1] != ours[0][2]).any()  # the second and the third have the same seed
    assert vector.observation_space.contains(ours[0])
    cycle = {0: 1, 1: 1, 2: 1, 3: 2, 7: 3, 6: 3, 5: 2, 9: 1, 10: 1, 11: 2, 15: 3, 14: 3, 13: 3, 12: 0, 8: 0, 4: 0}
    for step in range(700):
        actions = np.array([cycle[env.body[-1]] for env in singles.envs])
        if step % 3 == 0:
            actions[-1] = rng.integers(4)
        results = vector.step(actions)
        assert_same(results, singles.step(actions))
        infos = results[-1]
        if "final_info" in infos:
            won += infos["final_info"]["won"].sum()
            assert not infos["won"].any() and not infos["score"][infos["_final_obs"]].any()
    assert won >= 4


def test_a_seed_may_be_left_out_of_a_list() -> None:
    vector, single = gym.make_vec("Snake-v0", num_envs=2).unwrapped, SnakeEnv()
    vector.reset(seed=[3, 4])
    first = vector.reset(seed=[3, None])[0]
    single.reset(seed=4)
    np.testing.assert_array_equal(first[0], SnakeEnv().reset(seed=3)[0])
    np.testing.assert_array_equal(first[1], single.reset()[0])  # the next game of its stream
    fresh = gym.make_vec("Snake-v0", num_envs=2).unwrapped.reset(seed=[3, None])[0]
    np.testing.assert_array_equal(fresh[0], SnakeEnv().reset(seed=3)[0])
    with pytest.raises(ValueError, match="3 seeds for 2 games"):
        vector.reset(seed=[1, 2, 3])


@pytest.mark.parametrize("action", [5, 4, -1, 2.7, None, float("nan")])
def test_an_action_that_does_not_exist_is_refused(action) -> None:
    env = SnakeEnv()
    env.reset(seed=1)
    before = env.codes()
    with pytest.raises(ValueError, match=f"action {action}: must be 0, 1, 2 or 3"):
        env.step(action)
    assert env.clock == 0 and (env.codes() == before).all()
    vector = gym.make_vec("Snake-v0", num_envs=2).unwrapped
    vector.reset(seed=1)
    for actions in ([action, 1], np.array([1, action]), action, [1], [[1, 1]]):
        with pytest.raises(ValueError, match="actions"):
            vector.step(actions)
    assert vector.batch.clock.eq(0).all()


@pytest.mark.parametrize("action", [1, 1.0, np.int64(1), np.array(1), torch.tensor(1)])
def test_actions_may_come_as_any_kind_of_whole_number(action) -> None:
    env = SnakeEnv()
    env.reset(seed=1)
    head = env.body[-1]
    env.step(action)
    assert env.body[-1] == head + 1 and type(env.heading) is int


# What is loaded


def played(lanes: int = 6, steps: int = 60, **rules) -> SnakeBatch:
    """Games under way, some of them long."""
    batch, books = SnakeBatch(lanes, seed=3, **rules), [SnakeEnv(lane=lane, **rules) for lane in range(lanes)]
    batch.reset()
    rng = np.random.default_rng(0)
    for book in books:
        book.reset(seed=3)
    for _ in range(steps):
        actions = [greedy_action(book, rng) for book in books]
        batch.step(torch.tensor(actions))
        for book, action in zip(books, actions):
            if any(book.step(action)[2:4]):
                book.reset()
    return batch


@pytest.mark.parametrize("name", SETTINGS)
def test_a_saved_game_goes_on(name: str) -> None:
    first, second = played(**SETTINGS[name]), SnakeBatch(6, seed=3, **SETTINGS[name])
    second.load_state_dict({name: tensor.clone() for name, tensor in first.state_dict().items()})
    actions = torch.as_tensor(np.random.default_rng(1).integers(4, size=(200, 6)))
    for action in actions:
        for ours, theirs in zip(first.step(action)[:4], second.step(action)[:4]):
            assert torch.equal(ours, theirs)
    for name, tensor in first.state_dict().items():
        assert torch.equal(tensor, second.state_dict()[name])


def played_single() -> SnakeEnv:
    env, rng = SnakeEnv(), np.random.default_rng(1)
    env.reset(seed=3)
    while env.score < 6:
        if any(env.step(greedy_action(env, rng))[2:4]):
            env.reset()
    return env


def test_a_saved_single_game_goes_on() -> None:
    first, second = played_single(), SnakeEnv()
    saved = first.state_dict()
    second.load_state_dict(saved)
    for action in np.random.default_rng(2).integers(4, size=200):
        results = first.step(action), second.step(action)
        np.testing.assert_array_equal(results[0][0], results[1][0])
        assert results[0][1:] == results[1][1:]
        if any(results[0][2:4]):
            np.testing.assert_array_equal(first.reset()[0], second.reset()[0])
    third = SnakeEnv()
    third.load_state_dict(third_state := played_single().state_dict())
    third.step(0)
    assert third_state == played_single().state_dict()  # what was loaded is not the game's own


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


def chi_square(values: np.ndarray, bins: int) -> float:
    counts = np.bincount(values, minlength=bins)
    expected = len(values) / bins
    assert len(counts) == bins
    return ((counts - expected) ** 2 / expected).sum()


@pytest.mark.parametrize("kind", ["rule book", "batch"])
def test_the_first_food_is_uniform_over_free_cells(kind: str) -> None:
    if kind == "batch":
        boards = SnakeBatch(20_000, seed=9).reset().numpy()
    else:
        env = SnakeEnv()
        boards = np.stack([env.reset(seed=9)[0], *(env.reset()[0] for _ in range(4_000))])
    codes = boards.reshape(len(boards), -1)
    assert ((codes == FOOD).sum(1) == 1).all()
    free = np.flatnonzero((codes < BODY).all(0))
    assert len(free) == 97
    number = np.searchsorted(free, (codes == FOOD).argmax(1))
    assert chi_square(number, 97) < 150  # 96 degrees of freedom: exceeded by chance once in 3,000 times


@pytest.mark.parametrize("kind", ["rule book", "batch"])
def test_the_food_after_a_meal_is_uniform_over_free_cells(kind: str) -> None:
    """Where it lies among the cells that it could lie in, counted row by row."""
    rng, shares = np.random.default_rng(0), []

    def note(before: np.ndarray, after: np.ndarray) -> None:
        places = np.flatnonzero(after.ravel() < BODY)
        assert (after == FOOD).sum() == 1 and before.ravel()[after.ravel() == FOOD] == EMPTY
        number = np.flatnonzero(after.ravel()[places] == FOOD)[0]
        shares.append((number + rng.random()) / len(places))

    if kind == "rule book":
        env = SnakeEnv(board=(6, 6))
        env.reset(seed=9)
        while len(shares) < 1_500:
            before, score = env.codes(), env.score
            _, _, terminated, truncated, _ = env.step(greedy_action(env, rng))
            if terminated or truncated:
                env.reset()
            elif env.score > score:
                note(before, env.codes())
    else:
        batch = SnakeBatch(300, seed=9, board=(6, 6))
        obs = batch.reset().numpy().copy()
        while len(shares) < 4_000:
            food, head = (obs.reshape(300, -1) == FOOD).argmax(1), batch.head.numpy()
            down, right = food // 6 - head // 6, food % 6 - head % 6
            toward_food = np.where(down == 0, np.where(right > 0, 1, 3), np.where(down > 0, 2, 0))
            actions = np.where(rng.random(300) < 0.1, rng.integers(4, size=300), toward_food)
            score = batch.score.clone()
            after, _, terminated, truncated, info = batch.step(torch.as_tensor(actions))
            ate = (info["score"] > score) & ~terminated & ~truncated
            for lane in ate.nonzero().squeeze(1).tolist():
                note(obs[lane], after[lane].numpy())
            obs = after.numpy().copy()
    assert chi_square((np.array(shares) * 10).astype(int), 10) < 30  # 9 degrees of freedom: once in 2,000 times


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
    row, column = env.body[-1] // board[1], env.body[-1] % board[1]
    food_row, food_column = env.food // board[1], env.food % board[1]
    head = frame[32 + row * cell : 32 + row * cell + cell, column * cell : column * cell + cell]
    food = frame[32 + food_row * cell + cell // 2, food_column * cell + cell // 2]
    assert head.max() > 200 and food[0] > 200 > food[1]


UNIX_ONLY = "fcntl grp posix pty pwd resource syslog termios tty".split()


def test_nothing_that_only_unix_has_is_needed() -> None:
    """Hidden after the packages have been imported, which may have ways of their own around it."""
    program = "import sys, gymnasium, gymnasium.vector, numpy, torch\n"
    program += f"for name in {UNIX_ONLY}:\n    sys.modules[name] = None\n"
    program += "import envs, envs.snake.batch, envs.metta.batch\n"
    program += "envs.snake.batch.SnakeBatch(2).reset(), envs.metta.batch.MettaBatch(1).reset()"
    subprocess.run([sys.executable, "-c", program], check=True, cwd=Path(__file__).parents[2])
    for path in (Path(__file__).parents[2] / "envs").glob("*.py"):
        imported = {
            name.name if isinstance(node, ast.Import) else node.module
            for node in ast.parse(path.read_text()).body
            if isinstance(node, (ast.Import, ast.ImportFrom))
            for name in node.names
        }
        assert not imported & set(UNIX_ONLY), path


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

"""The rules of MarioLike one by one, what steps earn, how games end, pictures, levels, and the interfaces to them."""

import heapq
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.utils.env_checker import check_env

import envs
from benchmarks.players import mario_jumper
from envs.mario import game as mario
from envs.mario.batch import MarioBatch, MarioEnv
from envs.mario.game import (
    ACTIONS,
    HEIGHT,
    JUMP,
    LEFT,
    PATIENCE,
    RIGHT,
    RUN,
    TRAIN_LEVELS,
    UNSEEN_LEVELS,
    WIDTH,
    Episode,
    MarioGame,
)
from envs.mario.levels import (
    ABYSS,
    BLOCK,
    COIN,
    DIFFICULTIES,
    FLAT,
    GAP,
    GRASS,
    GROUND,
    PIPE,
    RIM,
    SKY,
    SOLID,
    WALKER_WIDTH,
    Level,
    pace,
)
from envs.streams import Stream

FLOOR = (GROUND << 8) - HEIGHT  # y of a player on the ground


@pytest.fixture
def arena(monkeypatch):
    """Builds a game on flat ground with what is asked for: columns of a gap, (column, height) of walls, (column, row)
    of coins and blocks, walkers, the column of the flag."""

    def build(gap=(), walls=(), coins=(), blocks=(), walkers=(), flag=80, **settings) -> MarioGame:
        grid = bytearray(FLAT * (flag + 20))
        for column in gap:
            grid[16 * column : 16 * column + 16] = GAP
        for column, height in walls:
            grid[16 * column + GROUND - height : 16 * column + GROUND] = bytes([RIM] + [PIPE] * (height - 1))
        for code, places in ((COIN, coins), (BLOCK, blocks)):
            for column, row in places:
                grid[16 * column + row] = code
        level = SimpleNamespace(walkers=list(walkers), flag=flag << 8)
        monkeypatch.setattr(mario, "Level", lambda *_: SimpleNamespace(grid=bytearray(grid), **vars(level)))
        game = MarioGame(**settings)
        game.enter(0)
        return game

    return build


def in_batch(game: MarioGame, **settings) -> MarioBatch:
    """A batch whose only lane plays on with `game`."""
    batch = MarioBatch(1, actions=12, **settings)
    batch.games, batch.episodes = [game], [Episode(game.where(), batch.max_steps)]
    game.picture(batch.obs[0, -1])
    return batch


def hold(game: MarioGame, buttons: int, frames: int) -> list[tuple[int, int, int, int]]:
    """(x, y, vx, vy) after each frame."""
    path = []
    for _ in range(frames):
        game.play(buttons, 1)
        path.append((game.x, game.y, game.vx, game.vy))
    return path


# ------------------------------------------------------------------------------------------------------------- moving


@pytest.mark.parametrize("held, top", [(RIGHT, 24), (RIGHT | RUN, 40)])
def test_walking_and_running_gain_one_a_frame_up_to_their_speed(arena, held: int, top: int) -> None:
    game = arena()
    path = hold(game, held, 60)
    assert [vx for _, _, vx, _ in path] == [min(frame, top) for frame in range(1, 61)]
    assert game.x == 512 + sum(vx for _, _, vx, _ in path) and game.y == FLOOR


def test_letting_go_coasts_and_turning_brakes_twice_as_fast(arena) -> None:
    game = arena()
    hold(game, RIGHT | RUN, 40)
    assert [vx for _, _, vx, _ in hold(game, RIGHT, 20)][-1] == 24  # a runner who only walks slows down to that
    assert [vx for _, _, vx, _ in hold(game, 0, 30)] == [max(24 - frame, 0) for frame in range(1, 31)]
    hold(game, RIGHT | RUN, 40)
    speeds = [vx for _, _, vx, _ in hold(game, LEFT, 30)]
    assert speeds == [40 - 2 * frame for frame in range(1, 21)] + [-frame for frame in range(1, 11)]
    assert game.left_facing


def test_in_the_air_speed_is_kept(arena) -> None:
    game = arena()
    hold(game, RIGHT | RUN, 40)
    hold(game, RIGHT | RUN | JUMP, 1)
    assert [vx for _, _, vx, _ in hold(game, JUMP, 10)] == [40] * 10


def test_a_held_jump_rises_higher_than_a_tap(arena) -> None:
    tops = []
    for frames in (1, 4, 8, 12, 16, 30):
        game = arena()
        ys = [y for _, y, _, _ in hold(game, JUMP, frames) + hold(game, 0, 60)]
        tops.append(FLOOR - min(ys))
        assert game.y == FLOOR and game.grounded
    assert tops == sorted(tops) and tops[0] < 28 * 16 and tops[3] >= 48 * 16  # 12 frames clear three tiles
    assert tops[-1] == sum(86 - 4 * frame for frame in range(1, 22)) == 882


def test_gravity_is_capped(arena) -> None:
    game = arena(gap=range(2, 4))
    game.y = 0
    speeds = [vy for *_, vy in hold(game, 0, 30)]
    assert speeds == [min(10 * frame, 72) for frame in range(1, 31)]


def test_a_jump_that_stays_held_starts_again_after_sixteen_frames_and_a_new_press_at_once(arena) -> None:
    game = arena()
    grounded = []
    for _ in range(120):
        game.play(JUMP, 1)
        grounded.append(game.grounded)
    landed = grounded.index(True)
    assert grounded[landed : landed + 17] == [True] * 17 and not grounded[landed + 17]
    game = arena()
    hold(game, JUMP, landed + 1)
    assert game.grounded
    hold(game, 0, 1), hold(game, JUMP, 1)
    assert game.vy < 0


def test_no_jump_in_the_air(arena) -> None:
    game = arena()
    hold(game, JUMP, 5), hold(game, 0, 1)
    before = game.vy
    hold(game, JUMP, 1)
    assert game.vy == before + 10  # and full gravity: the rise cannot be prolonged any more


def test_a_block_overhead_stops_the_rise(arena) -> None:
    game = arena(blocks=[(2, GROUND - 4)])
    path = hold(game, JUMP, 20)
    assert min(y for _, y, _, _ in path) == (GROUND - 3) << 8 and game.y == FLOOR


def test_the_top_of_the_screen_is_a_ceiling(arena) -> None:
    game = arena(blocks=[(2, 2)])
    game.y = (2 << 8) - HEIGHT
    path = hold(game, JUMP, 40)
    assert min(y for _, y, _, _ in path) == 0 and path[-1][1] == (2 << 8) - HEIGHT


def test_a_wall_blocks_from_both_sides_and_three_tiles_can_be_jumped(arena) -> None:
    game = arena(walls=[(6, 3), (7, 3)])
    hold(game, RIGHT | RUN, 80)
    assert (game.x, game.vx) == ((6 << 8) - WIDTH, 0)
    hold(game, RIGHT | RUN | JUMP, 60)
    assert game.x > 8 << 8
    hold(game, LEFT | RUN, 200)
    assert (game.x, game.vx) == (8 << 8, 0)


def test_the_camera_never_goes_back_and_its_edge_is_a_wall(arena) -> None:
    game = arena()
    hold(game, RIGHT | RUN, 200), hold(game, 0, 40)
    camera = game.camera
    assert camera == game.x - (4 << 8)
    hold(game, LEFT | RUN, 200)
    assert game.camera == camera == game.x and game.vx == 0


def test_a_gap_kills_unless_it_is_jumped(arena) -> None:
    game = arena(gap=range(8, 11))
    hold(game, RIGHT | RUN, 200)
    assert game.dead and 0 <= game.y - (12 << 8) < 72 and not game.flag
    game = arena(gap=range(8, 11))
    hold(game, RIGHT | RUN, 41), hold(game, RIGHT | RUN | JUMP, 40)
    assert not game.dead and game.x > 11 << 8


@pytest.mark.parametrize("width", [3, 4, 5])
def test_gaps_up_to_five_are_jumped_from_a_run_up_of_two_tiles(arena, width: int) -> None:
    """From standing at the start of two tiles between gaps: what levels of the highest difficulty may ask for."""
    game = arena(gap=[*range(6, 10), *range(12, 12 + width)])
    game.x = 10 << 8
    while game.x < (12 << 8) - 40:
        game.play(RIGHT | RUN, 1)
    hold(game, RIGHT | RUN | JUMP, 60)
    assert not game.dead and game.x > (12 + width) << 8


# ----------------------------------------------------------------------------------------------------- walkers, coins


def test_walkers_pace_to_and_fro(arena) -> None:
    game = arena(walkers=[(20 << 8, 512, 0)])
    places = [pace(game.level.walkers[0], clock) for clock in range(200)]
    assert max(places) == (20 << 8) + 512 and min(places) == 20 << 8
    assert {abs(b - a) for a, b in zip(places, places[1:])} == {8}
    assert places[:64] == [(20 << 8) + 8 * clock for clock in range(64)] and places[128] == places[0]


def test_falling_on_a_walker_stomps_it(arena) -> None:
    game = arena(walkers=[(512, 1, 0)])
    game.y = FLOOR - 60 * 16
    path = hold(game, 0, 40)
    assert not game.dead and game.stomped == [0] and game.score == 200
    assert mario.BOUNCE_SPEED in [vy for *_, vy in path] and game.visible() == []
    hold(game, RIGHT, 60)
    assert not game.dead and game.score == 200


@pytest.mark.parametrize("buttons", [RIGHT, 0])
def test_a_walker_kills_from_the_side(arena, buttons: int) -> None:
    game = arena(walkers=[(512, 2048, 2048 + 1024)])  # comes from the right
    hold(game, buttons, 200)
    assert game.dead and game.score == 0 and game.stomped == []


def test_a_walker_kills_who_meets_it_too_low(arena) -> None:
    game = arena(walkers=[(512, 1, 0)])
    game.y = FLOOR - 14 * 16 + 8 * 16  # feet 8 pixels below its top
    game.play(0, 1)
    assert game.dead


def test_a_coin_counts_once_and_leaves_the_picture(arena) -> None:
    game = arena(coins=[(5, GROUND - 1), (6, GROUND - 1), (9, 2)])
    before, after = np.zeros((2, 84, 84), np.uint8)
    game.picture(before)
    hold(game, RIGHT, 150)
    game.picture(after)
    assert game.score == 200 and len(game.taken) == 2
    at = 5 * 7 + 3, (GROUND - 1) * 7 + 3
    assert before[at[1], at[0]] == 220 and (game.strip[at[1], at[0]], game.level.grid[5 * 16 + GROUND - 1]) == (
        120,
        SKY,
    )


def test_the_flag_ends_the_level(arena) -> None:
    game = arena(flag=8)
    hold(game, RIGHT, 200)
    assert game.flag and not game.dead and game.score == 1000 and game.x + WIDTH >= 8 << 8


# ---------------------------------------------------------------------------------------------------- rewards and ends


def test_only_new_ground_is_progress() -> None:
    episode = Episode(100, 500)
    assert episode.step(110, False, False) == (pytest.approx(0.1), False, False)
    assert episode.step(90, False, False) == (0, False, False)
    assert episode.step(112, False, False) == (pytest.approx(0.02), False, False)
    assert (episode.best - episode.start, episode.length, episode.total) == (12, 3, pytest.approx(0.12))


def test_each_end_has_its_reward() -> None:
    assert Episode(0, 500).step(0, True, False) == (-1, True, False)
    assert Episode(0, 500).step(5, False, True) == (pytest.approx(2.05), True, False)
    episode = Episode(0, 500)
    steps = [episode.step(0, False, False) for _ in range(PATIENCE)]
    assert steps[:-1] == [(0, False, False)] * 39 and steps[-1] == (-0.5, False, True)
    episode = Episode(0, 3)
    assert [episode.step(x, False, False)[1:] for x in (1, 2, 3)] == [(False, False), (False, False), (False, True)]
    assert Episode(0, 1).step(1, True, False)[1:] == (True, False)  # a death in the last step is a death


def test_patience_starts_again_with_new_ground() -> None:
    episode = Episode(0, 500)
    ends = [episode.step(step // 30, False, False)[2] for step in range(300)]
    assert not any(ends)
    assert [episode.step(0, False, False)[2] for _ in range(11)] == [False] * 10 + [True]


def test_rewards_reach_the_batch(arena) -> None:
    batch = in_batch(arena(gap=range(8, 11)))
    start, rewards, terminated = batch.games[0].where(), [], [False]
    while not terminated[0]:
        x = batch.games[0].where()
        _, reward, terminated, truncated, info = batch.step(np.array([3]))
        rewards.append(reward[0])
        if not terminated[0]:
            assert rewards[-1] == pytest.approx(0.01 * (batch.games[0].where() - x))
    assert -1 <= rewards[-1] < -0.85 and not truncated[0] and not info["flag"][0]
    assert info["return"][0] == pytest.approx(sum(rewards), abs=1e-5) and info["length"][0] == len(rewards)
    assert info["distance"][0] == round(100 * (sum(rewards) + 1)) > 90 and start == 32

    batch = in_batch(arena(flag=8))
    while not terminated[0] or info["length"][0] == 0 or not info["flag"][0]:
        _, reward, terminated, truncated, info = batch.step(np.array([1]))
    assert 2 <= reward[0] < 2.11 and not truncated[0] and info["score"][0] == 1000

    batch = in_batch(arena())
    steps = [batch.step(np.array([0])) for _ in range(PATIENCE)]
    assert [step[1][0] for step in steps] == [0] * 39 + [-0.5]
    assert [step[3][0] for step in steps] == [False] * 39 + [True] and not any(step[2][0] for step in steps)

    batch = in_batch(arena(), max_steps=7)
    assert [batch.step(np.array([1]))[3][0] for _ in range(7)] == [False] * 6 + [True]


def test_statistics_are_those_of_the_finished_games() -> None:
    batch, totals = MarioBatch(6, seed=1, actions=5), np.zeros(6)
    batch.reset()
    rng = np.random.default_rng(0)
    for _ in range(400):
        _, _, terminated, truncated, info = batch.step(rng.integers(5, size=6))
        for lane in (terminated | truncated).nonzero()[0]:
            totals += [1, *(info[name][lane] for name in ("distance", "flag", "score", "length", "return"))]
    assert totals[0] > 20
    np.testing.assert_allclose(batch.finished, totals)


# --------------------------------------------------------------------------------------------- frames, lanes, starts


def test_a_step_is_four_frames_of_the_same_buttons() -> None:
    four, one = MarioGame(), MarioGame(skip=1)
    four.enter(3), one.enter(3)
    for action in np.random.default_rng(0).integers(1, 5, 30):
        four.play(ACTIONS[action])
        for _ in range(4):
            one.play(ACTIONS[action])
        assert four.state() == one.state()


def test_the_stack_shifts_and_starts_full_of_the_first_frame() -> None:
    batch, ended = MarioBatch(8, seed=3, actions=5), 0
    last = batch.reset().copy()
    assert last.shape == (8, 4, 84, 84) and last.dtype == np.uint8
    assert (last == last[:, :1]).all()
    rng, alone = np.random.default_rng(0), np.zeros((84, 84), np.uint8)
    for _ in range(200):
        obs, _, terminated, truncated, info = batch.step(rng.integers(5, size=8))
        final, done = info["final_obs"], terminated | truncated
        np.testing.assert_array_equal(final[:, :-1], last[:, 1:])
        np.testing.assert_array_equal(obs[~done], final[~done])
        assert (obs[done] == obs[done][:, :1]).all()  # no frame of the old game in the new one's stack
        for lane in range(8):
            batch.games[lane].picture(alone)
            np.testing.assert_array_equal(obs[lane, -1], alone)
        ended += done.sum()
        last = obs.copy()
    assert ended > 10


def test_a_lane_does_not_depend_on_the_others() -> None:
    few, many, shifted = MarioBatch(2, seed=4), MarioBatch(9, seed=4), MarioBatch(3, seed=4, first_lane=1)
    few.reset(), many.reset(), shifted.reset()
    rng = np.random.default_rng(0)
    for _ in range(250):
        actions = rng.integers(7, size=9)
        some, all_lanes, three = few.step(actions[:2]), many.step(actions), shifted.step(actions[1:4])
        for a, b, c in zip(some[:4], all_lanes[:4], three[:4]):
            np.testing.assert_array_equal(a, b[:2])
            np.testing.assert_array_equal(c, b[1:4])
    assert len({game.seed for game in many.games}) == 9
    assert MarioBatch(1, seed=5).reset().tobytes() != MarioBatch(1, seed=4).reset().tobytes()


def test_games_begin_with_up_to_thirty_frames_of_nothing() -> None:
    game, draw = MarioGame(), Stream(0, 0)
    clocks = []
    for _ in range(300):
        game.start(draw)
        clocks.append(game.clock)
        assert (game.where(), game.vx, game.score, game.dead) == (32, 0, 0, False)
    assert set(clocks) == set(range(31))
    game = MarioGame(noop_max=0)
    game.start(draw)
    assert game.clock == 0


def test_state_dict_goes_through_a_file_and_plays_on(tmp_path) -> None:
    batch, other = MarioBatch(5, seed=6, difficulty=1), MarioBatch(5, seed=7, difficulty=1)
    batch.reset(), other.reset()
    actions = np.random.default_rng(0).choice([2, 3, 4, 4, 6], (300, 5))
    for action in actions[:150]:
        batch.step(action)
    assert any(game.taken for game in batch.games) and any(game.stomped for game in batch.games)
    torch.save(batch.state_dict(), tmp_path / "state.pt")
    other.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    for action in actions[150:]:
        for ours, theirs in zip(batch.step(action)[:4], other.step(action)[:4]):
            np.testing.assert_array_equal(ours, theirs)
    np.testing.assert_array_equal(batch.finished, other.finished)


# ------------------------------------------------------------------------------------------------------------ pictures


def test_the_picture_shows_what_matters(arena) -> None:
    game = arena(gap=[9, 10], walls=[(6, 3), (7, 3)], walkers=[(4 << 8, 1, 0)], coins=[(3, 2)])
    out = np.zeros((84, 84), np.uint8)
    game.picture(out)
    assert (out[GROUND * 7 - 1, 14:19] == 255).all()  # the player, white, standing on the ground
    assert (out[GROUND * 7 - 2, 28:34] == 0).all() and 255 in out[GROUND * 7 - 6 : GROUND * 7, 28:34]  # a walker
    assert (out[GROUND * 7 - 10 : GROUND * 7, 42:56] == 60).all()  # the pipe
    assert (out[GROUND * 7 :, 63:77] == 0).all()  # the abyss
    assert (out[GROUND * 7 + 3 :, :6] >= 180).all() and out[0, 0] == 120 and out[2 * 7 + 3, 3 * 7 + 3] == 220
    assert len({40, 60, 0, 255, 120, 180} & set(out.ravel())) == 6


def test_the_picture_follows_camera_pose_and_heading(arena) -> None:
    game = arena(walls=[(20, 2)])
    out, other = np.zeros((2, 84, 84), np.uint8)
    hold(game, RIGHT | RUN, 150)
    game.picture(out)
    shift = game.camera * 7 >> 8
    assert shift > 0
    np.testing.assert_array_equal(out[:28], game.strip[:28, shift : shift + 84])
    right = out == 255
    hold(game, LEFT, 1)
    game.picture(other)
    assert (right != (other == 255)).any()  # the eye looks the other way
    hold(game, JUMP, 40)
    assert game.grounded and game.held
    game.picture(other)
    assert (other == 255).sum() < (out == 255).sum()  # who has to wait for the next jump crouches


@pytest.mark.parametrize("size", [48, 84, 96, 132])
def test_sizes_and_stacks(size: int) -> None:
    batch = MarioBatch(2, size=size, stack=3, skip=2)
    assert batch.reset().shape == (2, 3, size, size)
    assert batch.step(np.array([1, 4]))[0].shape == (2, 3, size, size)
    assert 255 in batch.obs[0, -1] and 0 in batch.obs[0, -1]


def test_what_leaves_the_screen_is_clipped(arena) -> None:
    game = arena(walkers=[(8000, 1, 0)])
    out = np.zeros((84, 84), np.uint8)
    game.x, widths = 12000, []
    for game.camera in range(8000 - 3100, 8000 + 256, 16):
        game.picture(out)
        widths.append(int((out[GROUND * 7 - 1] == 0).sum()))  # its lowest row is black throughout
    middle = len(widths) // 2
    assert set(widths[:middle]) == set(widths[middle:]) == {0, 1, 2, 3, 4, 5, 6}
    assert (np.diff(widths[:middle]) >= 0).all() and (np.diff(widths[middle:]) <= 0).all()
    game.y = (12 << 8) + 60  # falling out below
    game.picture(out)
    assert (out[GROUND * 7 - 1] == 255).sum() == 0


# -------------------------------------------------------------------------------------------------------------- levels


def test_levels_come_from_their_seed() -> None:
    for difficulty in range(4):
        grids = [bytes(Level(seed, difficulty).grid) for seed in range(100)]
        assert grids == [bytes(Level(seed, difficulty).grid) for seed in range(100)]
        assert len(set(grids)) == 100
    assert Level(5, 1).walkers == Level(5, 1).walkers != Level(6, 1).walkers


def test_games_draw_from_their_range_of_levels() -> None:
    game, draw = MarioGame(levels=(7, 10)), Stream(0, 0)
    seen = set()
    for _ in range(60):
        game.start(draw)
        seen.add(game.seed)
    assert seen == {7, 8, 9}
    assert TRAIN_LEVELS[1] <= UNSEEN_LEVELS[0]


@pytest.mark.parametrize("difficulty", range(4))
def test_obstacles_are_within_reach_of_a_jump(difficulty: int) -> None:
    rules = DIFFICULTIES[difficulty]
    for seed in range(200):
        level = Level(seed, difficulty)
        columns = np.frombuffer(level.grid, np.uint8).reshape(-1, 16)
        gaps = "".join("_" if column[GROUND] == ABYSS else "#" for column in columns).replace("#", " ").split()
        assert len(gaps) == rules.gaps
        assert all(rules.gap_width[0] <= len(gap) <= rules.gap_width[1] <= 5 for gap in gaps)
        heights = [sum(code in (RIM, PIPE, BLOCK) for code in column[GROUND - 3 : GROUND]) for column in columns]
        assert max(heights) <= 3 and (columns[:, : GROUND - 5] < SOLID).all()
        assert heights.count(3) >= 2 or difficulty
        assert (columns == RIM).sum() == 2 * rules.pipes and len(level.walkers) == rules.packs * rules.walkers
        assert (columns[:6] == np.frombuffer(FLAT, np.uint8)).all()
        for left, span, _ in level.walkers:
            ground = columns[left >> 8 : (left + span + WALKER_WIDTH >> 8)]
            assert (ground[:, GROUND] == GRASS).all() and (ground[:, GROUND - 1] < SOLID).all()


def flags(choose, actions: int = 7, games: int = 200, **settings) -> float:
    """Share of games that reach the flag."""
    batch = MarioBatch(50, seed=11, actions=actions, levels=UNSEEN_LEVELS, **settings)
    batch.reset()
    while batch.finished[0] < games:
        batch.step(choose(batch))
    return batch.finished[2] / batch.finished[0]


def test_the_easiest_difficulty_is_no_walkover() -> None:
    rng = np.random.default_rng(0)
    assert flags(lambda batch: np.full(50, 3)) <= 0.05  # right and run
    assert flags(lambda batch: np.full(50, 4)) <= 0.15  # and jump
    for actions in (5, 7, 12):
        assert flags(lambda batch, n=actions: rng.integers(n, size=50), actions) == 0


def test_a_scripted_jumper_reaches_the_flag_at_the_easiest_difficulty() -> None:
    assert flags(lambda batch: np.array([mario_jumper(game) for game in batch.games]), games=400) >= 0.95


def solves(seed: int, difficulty: int, budget: int = 3000) -> bool:
    """Best-first search over short plans: does anything reach the flag?"""
    game = MarioGame(difficulty)
    game.enter(seed)
    queue, seen, order = [(-game.x, 0, game.state())], set(), 0
    plans = [[3] * 2, [6] * 3, [0] * 2, *([4] * held + [3] * 12 for held in (2, 4, 6)), [5] * 4 + [0] * 8]
    while queue and order < budget:
        state = heapq.heappop(queue)[2]
        for plan in plans:
            game.restore(state)
            for step, action in enumerate(plan):
                game.play(ACTIONS[action])
                if game.dead or game.flag or (step > 6 and game.grounded):
                    break
            if game.flag:
                return True
            key = game.x >> 7, game.y >> 8, game.vx >> 4, game.clock >> 5
            if not game.dead and key not in seen:
                seen.add(key)
                order += 1
                heapq.heappush(queue, (-game.x, order, game.state()))
    return False


@pytest.mark.parametrize("difficulty", range(4))
def test_levels_can_be_solved_at_every_difficulty(difficulty: int) -> None:
    assert all(solves(seed, difficulty) for seed in range(12))


# ---------------------------------------------------------------------------------------------------------- interfaces


def test_action_sets() -> None:
    assert len(ACTIONS) == 12 == len(set(ACTIONS))
    assert (
        all(not held & LEFT for held in ACTIONS[:5])
        and ACTIONS[6] == LEFT
        and not any(held & 48 for held in ACTIONS[:10])
    )
    assert sum(bool(held & JUMP) for held in ACTIONS) == 5
    for actions in (5, 7, 12):
        assert MarioEnv(actions=actions).action_space.n == actions


@pytest.mark.parametrize(
    "settings, names",
    [
        (dict(difficulty=4), "difficulty 4: must be 0 to 3"),
        (dict(levels=(5, 5)), "levels 5:5"),
        (dict(size=100), "size 100: must be a multiple of 12"),
        (dict(skip=0), "skip 0"),
        (dict(noop_max=-1), "noop_max -1"),
        (dict(actions=6), "actions 6: must be 5, 7 or 12"),
        (dict(stack=0), "stack 0"),
        (dict(max_steps=0), "max_steps 0"),
        (dict(num_envs=0), "num_envs 0"),
    ],
)
def test_settings_that_cannot_work_are_named(settings: dict, names: str) -> None:
    with pytest.raises(ValueError, match=names) as error:
        MarioBatch(**settings)
    assert "\n" not in str(error.value)


def test_gymnasium_finds_nothing_to_complain_about() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_env(gym.make("MarioLike-v0").unwrapped)
        check_env(gym.make("MarioLike-v0", actions=12, difficulty=2, size=96, stack=2).unwrapped)


def test_single_env_is_one_lane_of_the_batch() -> None:
    batch, singles = MarioBatch(4, seed=8), [MarioEnv(lane=lane) for lane in range(4)]
    obs, ended = batch.reset(), 0
    for lane, single in enumerate(singles):
        np.testing.assert_array_equal(single.reset(seed=8)[0], obs[lane])
    rng = np.random.default_rng(0)
    for _ in range(200):
        actions = rng.integers(7, size=4)
        obs, reward, terminated, truncated, info = batch.step(actions)
        for lane, single in enumerate(singles):
            final, single_reward, end, cut, single_info = single.step(int(actions[lane]))
            assert (single_reward, end, cut) == (reward[lane], terminated[lane], truncated[lane])
            np.testing.assert_array_equal(final, info["final_obs"][lane])
            assert single_info == {name: info[name][lane] for name in single_info}
            if end or cut:
                ended += 1
                final = single.reset()[0]
            np.testing.assert_array_equal(final, obs[lane])
    assert ended > 5


def test_vector_env_is_numpy_and_same_step() -> None:
    vector, batch = gym.make_vec("MarioLike-v0", num_envs=4, actions=5), MarioBatch(4, seed=9, actions=5)
    assert vector.metadata["autoreset_mode"] == gym.vector.AutoresetMode.SAME_STEP
    np.testing.assert_array_equal(vector.reset(seed=9)[0], batch.reset())
    rng, ended = np.random.default_rng(0), 0
    for _ in range(150):
        actions = rng.integers(5, size=4)
        obs, reward, terminated, truncated, infos = vector.step(actions)
        expected = batch.step(actions)
        for ours, theirs in zip((obs, reward, terminated, truncated), expected[:4]):
            np.testing.assert_array_equal(ours, theirs)
        assert vector.observation_space.contains(obs) and reward.dtype == np.float64
        for lane in (terminated | truncated).nonzero()[0]:
            ended += 1
            np.testing.assert_array_equal(infos["final_obs"][lane], expected[4]["final_obs"][lane])
            assert infos["final_info"]["distance"][lane] == expected[4]["distance"][lane]
            assert infos["distance"][lane] == infos["length"][lane] == 0  # of the new game
        for lane in (~(terminated | truncated)).nonzero()[0]:
            assert infos["distance"][lane] == expected[4]["distance"][lane]
    assert ended > 5


def test_vector_env_says_at_reset_what_the_single_env_says() -> None:
    vector, single = gym.make_vec("MarioLike-v0", num_envs=3), MarioEnv()
    vector.reset(seed=1), vector.step(np.full(3, 3))
    _, infos = vector.reset()
    _, info = single.reset(seed=1)
    assert set(infos) == set(info) | {f"_{name}" for name in info}
    for name, value in info.items():
        np.testing.assert_array_equal(infos[name], [value] * 3)
        np.testing.assert_array_equal(infos[f"_{name}"], [True] * 3)
    stepped = vector.step(np.full(3, 3))[4]
    assert {name: infos[name].dtype for name in infos} == {name: stepped[name].dtype for name in infos}


def test_vector_env_takes_a_seed_for_each_lane() -> None:
    vector = gym.make_vec("MarioLike-v0", num_envs=3)
    obs = vector.reset(seed=[5, None, 7])[0]
    for lane, seed in ((0, 5), (2, 7)):
        np.testing.assert_array_equal(obs[lane], MarioEnv().reset(seed=seed)[0])
    np.testing.assert_array_equal(vector.reset(seed=np.array([6, 5, 5]))[0][1], obs[0])
    again, once_more = (vector.reset(seed=[5, None, 8])[0] for _ in range(2))
    np.testing.assert_array_equal(again[0], obs[0])
    np.testing.assert_array_equal(again[2], once_more[2])
    assert (again[1] != once_more[1]).any()  # without a seed, the next game of its stream
    with pytest.raises(ValueError, match="2 seeds for 3 games: must be as many, or one for all"):
        vector.reset(seed=[1, 2])


@pytest.mark.parametrize("action", [-1, 7, 2.0, np.float64(2.7), None])
def test_actions_that_do_not_exist_are_refused(action) -> None:
    env = MarioEnv()
    env.reset(seed=0)
    with pytest.raises(ValueError, match="action .*: must be a whole number from 0 to 6"):
        env.step(action)
    vector = gym.make_vec("MarioLike-v0", num_envs=2)
    vector.reset(seed=0)
    with pytest.raises(ValueError, match="actions .*: must be 2 whole numbers from 0 to 6"):
        vector.step(np.array([0, action]))
    for actions in ([0], [0, 0, 0], [[0, 0]]):
        with pytest.raises(ValueError, match="must be 2 whole numbers"):
            vector.step(np.array(actions))
    assert vector.step([1, 2])[0].shape == (2, 4, 84, 84)


def test_rendering() -> None:
    env = gym.make("MarioLike-v0", render_mode="rgb_array")
    env.reset(seed=0)
    frame = env.render()
    assert (
        frame.shape == (576, 576, 3) and frame.dtype == np.uint8 and len(np.unique(frame.reshape(-1, 3), axis=0)) > 50
    )
    for _ in range(30):
        env.step(3)
    assert (env.render() != frame).any()
    env = MarioEnv(render_mode="ansi")
    env.reset(seed=0)
    text = env.render()
    assert "o" in text and "#" in text and text.startswith("score 0  distance 0") and len(text.splitlines()) == 13


def test_importing_envs_imports_nothing_optional() -> None:
    code = "import sys, envs; print([name for name in sys.modules if 'retro' in name or name == 'envs.mario.real'])"
    root = Path(envs.__file__).parent.parent
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"

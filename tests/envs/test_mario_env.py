"""The rules of MarioLike one by one, what steps earn, how games end, pictures, levels, and the interfaces to them."""

import heapq
from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks.players import mario_jumper
from envs.mario import game as mario
from envs.mario import levels
from envs.mario.batch import MarioBatch, MarioEnv
from envs.mario.game import ACTIONS, HEIGHT, JUMP, LEFT, PATIENCE, RIGHT, RUN, WIDTH, Episode, MarioGame
from envs.mario.levels import GROUND, PIPE, RIM, Level, pace
from envs.streams import Stream

FLOOR = (GROUND << 8) - HEIGHT  # y of a player on the ground


@pytest.fixture
def arena(monkeypatch):
    """Builds a game on flat ground with what is asked for: columns of a gap, (column, height) of walls, (column, row)
    of coins and blocks, walkers, the column of the flag."""

    def build(gap=(), walls=(), coins=(), blocks=(), walkers=(), flag=80) -> MarioGame:
        grid = bytearray(levels.FLAT * (flag + 20))
        for column in gap:
            grid[16 * column : 16 * column + 16] = levels.GAP
        for column, height in walls:
            grid[16 * column + GROUND - height : 16 * column + GROUND] = bytes([RIM] + [PIPE] * (height - 1))
        for code, places in ((levels.COIN, coins), (levels.BLOCK, blocks)):
            for column, row in places:
                grid[16 * column + row] = code
        level = SimpleNamespace(walkers=list(walkers), flag=flag << 8)
        monkeypatch.setattr(mario, "Level", lambda *_: SimpleNamespace(grid=bytearray(grid), **vars(level)))
        game = MarioGame()
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


def test_speed_changes_by_one_a_frame_and_by_two_when_turning(arena) -> None:
    for held, top in ((RIGHT, 24), (RIGHT | RUN, 40)):
        game = arena()
        path = hold(game, held, 60)
        assert [vx for _, _, vx, _ in path] == [min(frame, top) for frame in range(1, 61)]
        assert game.x == 512 + sum(vx for _, _, vx, _ in path) and game.y == FLOOR
    assert [vx for _, _, vx, _ in hold(game, RIGHT, 20)][-1] == 24  # a runner who only walks slows down to that
    assert [vx for _, _, vx, _ in hold(game, 0, 30)] == [max(24 - frame, 0) for frame in range(1, 31)]
    hold(game, RIGHT | RUN, 40)
    speeds = [vx for _, _, vx, _ in hold(game, LEFT, 30)]
    assert speeds == [40 - 2 * frame for frame in range(1, 21)] + [-frame for frame in range(1, 11)]
    assert game.left_facing


def test_in_the_air_speed_is_kept_and_there_is_no_second_jump(arena) -> None:
    game = arena()
    hold(game, RIGHT | RUN, 40), hold(game, RIGHT | RUN | JUMP, 5)
    assert [vx for _, _, vx, _ in hold(game, 0, 5)] == [40] * 5
    before = game.vy
    hold(game, JUMP, 1)
    assert game.vy == before + 10  # full gravity: the rise cannot be prolonged any more


def test_a_held_jump_rises_higher_than_a_tap(arena) -> None:
    tops = []
    for frames in (1, 4, 8, 12, 16, 30):
        game = arena()
        ys = [y for _, y, _, _ in hold(game, JUMP, frames) + hold(game, 0, 60)]
        tops.append(FLOOR - min(ys))
        assert game.y == FLOOR and game.grounded
    assert tops == sorted(tops) and tops[0] < 28 * 16 and tops[3] >= 48 * 16  # 12 frames clear three tiles
    assert tops[-1] == sum(86 - 4 * frame for frame in range(1, 22)) == 882


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


def test_a_block_overhead_and_the_top_of_the_screen_stop_the_rise(arena) -> None:
    game = arena(blocks=[(2, GROUND - 4)])
    path = hold(game, JUMP, 20)
    assert min(y for _, y, _, _ in path) == (GROUND - 3) << 8 and game.y == FLOOR
    game = arena(blocks=[(2, 2)])
    game.y = (2 << 8) - HEIGHT
    path = hold(game, JUMP, 40)
    assert min(y for _, y, _, _ in path) == 0 and game.y == (2 << 8) - HEIGHT


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
    camera = game.x - (4 << 8)
    assert game.camera == camera
    hold(game, LEFT | RUN, 200)
    assert game.camera == camera == game.x and game.vx == 0


def test_a_gap_kills_unless_it_is_jumped(arena) -> None:
    game = arena(gap=range(8, 11))
    path = hold(game, RIGHT | RUN, 200)
    assert max(vy for *_, vy in path) == 72  # as fast as anybody falls
    assert game.dead and 0 <= game.y - (12 << 8) < 72 and not game.flag
    game = arena(gap=range(8, 11))
    hold(game, RIGHT | RUN, 41), hold(game, RIGHT | RUN | JUMP, 40)
    assert not game.dead and game.x > 11 << 8


# ----------------------------------------------------------------------------------------------------- walkers, coins


def test_walkers_pace_to_and_fro(arena) -> None:
    game = arena(walkers=[(20 << 8, 512, 0)])
    places = [pace(game.level.walkers[0], clock) for clock in range(200)]
    assert max(places) == (20 << 8) + 512
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
    game = arena(walkers=[(512, 1, 0)])
    game.y = FLOOR - 14 * 16 + 8 * 16  # feet 8 pixels below its top
    game.play(buttons, 1)
    assert game.dead


def test_a_coin_counts_once_and_leaves_the_picture(arena) -> None:
    game = arena(coins=[(5, GROUND - 1), (6, GROUND - 1), (9, 2)])
    picture = np.zeros((84, 84), np.uint8)
    game.picture(picture)
    hold(game, RIGHT, 150)
    assert game.score == 200 and len(game.taken) == 2 and game.level.grid[5 * 16 + GROUND - 1] == levels.SKY
    x, y = 5 * 7 + 3, (GROUND - 1) * 7 + 3
    assert (picture[y, x], game.strip[y, x]) == (220, 120)


def test_the_flag_ends_the_level(arena) -> None:
    game = arena(flag=8)
    hold(game, RIGHT, 200)
    assert game.flag and not game.dead and game.score == 1000 and game.x + WIDTH >= 8 << 8


# ---------------------------------------------------------------------------------------------------- rewards and ends


def test_rewards_and_ends() -> None:
    episode = Episode(100, 500)
    assert episode.step(110, False, False) == (pytest.approx(0.1), False, False)
    assert episode.step(90, False, False) == (0, False, False)
    assert episode.step(112, False, False) == (pytest.approx(0.02), False, False)
    assert (episode.best - episode.start, episode.length, episode.total) == (12, 3, pytest.approx(0.12))
    steps = [episode.step(112, False, False) for _ in range(PATIENCE)]
    assert steps == [(0, False, False)] * 39 + [(-0.5, False, True)]
    assert Episode(0, 500).step(0, True, False) == (-1, True, False)
    assert Episode(0, 500).step(5, False, True) == (pytest.approx(2.05), True, False)
    episode = Episode(0, 3)
    assert [episode.step(x, False, False)[1:] for x in (1, 2, 3)] == [(False, False), (False, False), (False, True)]
    assert Episode(0, 1).step(1, True, False)[1:] == (True, False)  # a death in the last step is a death


def test_rewards_reach_the_batch(arena) -> None:
    rewards, x, terminated = [], 32, False
    batch = in_batch(arena(gap=range(8, 11)))
    while not terminated:
        _, reward, terminated, truncated, info = batch.step(np.array([3]))
        rewards.append(reward[0])
        if not terminated:
            assert reward[0] == pytest.approx(0.01 * (batch.games[0].where() - x))
        x = batch.games[0].where()
    assert -1 <= rewards[-1] < -0.85 and not truncated[0] and not info["flag"][0]
    assert info["return"][0] == pytest.approx(sum(rewards), abs=1e-5) and info["length"][0] == len(rewards)
    assert info["distance"][0] == round(100 * (sum(rewards) + 1)) > 90
    batch = in_batch(arena(flag=8))
    for _ in range(40):
        _, reward, terminated, truncated, info = batch.step(np.array([1]))
        if terminated[0]:
            break
    assert 2 <= reward[0] < 2.11 and info["flag"][0] and not truncated[0] and info["score"][0] == 1000
    batch = in_batch(arena(), max_steps=7)
    assert [batch.step(np.array([1]))[3][0] for _ in range(7)] == [False] * 6 + [True]


# --------------------------------------------------------------------------------------------- frames, lanes, starts


def test_a_step_is_four_frames_of_the_same_buttons() -> None:
    four, one = MarioGame(), MarioGame(skip=1)
    four.enter(3), one.enter(3)
    for action in np.random.default_rng(0).integers(1, 5, 30):
        four.play(ACTIONS[action])
        for _ in range(4):
            one.play(ACTIONS[action])
        assert four.state() == one.state()


def test_stacks_and_statistics_of_many_games() -> None:
    batch, totals = MarioBatch(8, seed=3, actions=5), np.zeros(6)
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
        for lane in done.nonzero()[0]:
            totals += [1, *(info[name][lane] for name in ("distance", "flag", "score", "length", "return"))]
        last = obs.copy()
    assert totals[0] > 10
    np.testing.assert_allclose(batch.finished, totals)


def test_games_begin_in_levels_of_their_range_with_up_to_thirty_frames_of_nothing() -> None:
    game, draw = MarioGame(levels=(7, 10)), Stream(0, 0)
    clocks, seeds = set(), set()
    for _ in range(300):
        game.start(draw)
        clocks.add(game.clock)
        seeds.add(game.seed)
        assert (game.where(), game.vx, game.score, game.dead) == (32, 0, 0, False)
    assert clocks == set(range(31)) and seeds == {7, 8, 9}
    game = MarioGame(noop_max=0)
    game.start(draw)
    assert game.clock == 0 and mario.TRAIN_LEVELS[1] <= mario.UNSEEN_LEVELS[0]


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
    np.testing.assert_array_equal(out[:28], game.strip[:28, shift : shift + 84])
    right = out == 255
    hold(game, LEFT, 1)
    game.picture(other)
    assert (right != (other == 255)).any()  # the eye looks the other way
    hold(game, JUMP, 40)
    assert game.grounded and game.held
    game.picture(other)
    assert (other == 255).sum() < (out == 255).sum()  # who has to wait for the next jump crouches


def test_what_leaves_the_screen_is_clipped(arena) -> None:
    game = arena(walkers=[(8000, 1, 0)])
    out = np.zeros((84, 84), np.uint8)
    game.x, widths = 12000, []
    for game.camera in range(8000 - 3100, 8000 + 256, 16):
        game.picture(out)
        widths.append(int((out[GROUND * 7 - 1] == 0).sum()))  # its lowest row is black throughout
    assert set(widths) == {0, 1, 2, 3, 4, 5, 6}
    assert (np.diff(widths[: len(widths) // 2]) >= 0).all()
    game.y = (12 << 8) + 60  # falling out below
    game.picture(out)
    assert (out[GROUND * 7 - 1] == 255).sum() == 0


# -------------------------------------------------------------------------------------------------------------- levels


@pytest.mark.parametrize("difficulty", range(4))
def test_obstacles_are_within_reach_of_a_jump(difficulty: int) -> None:
    rules, grids = levels.DIFFICULTIES[difficulty], set()
    for seed in range(200):
        level = Level(seed, difficulty)
        grids.add(bytes(level.grid))
        columns = np.frombuffer(level.grid, np.uint8).reshape(-1, 16)
        ground = "".join("_" if column[GROUND] == levels.ABYSS else " " for column in columns)
        gaps = [len(gap) for gap in ground.split()]
        assert len(gaps) == rules.gaps
        assert rules.gap_width[0] <= min(gaps, default=5) and max(gaps, default=0) <= rules.gap_width[1] <= 5
        assert (columns[:, : GROUND - 5] < levels.SOLID).all()
        assert (np.isin(columns, (RIM, PIPE, levels.BLOCK)).sum(1) <= 3).all()
        assert (columns == RIM).sum() == 2 * rules.pipes and len(level.walkers) == rules.packs * rules.walkers
        assert (columns[:6] == np.frombuffer(levels.FLAT, np.uint8)).all()
        for left, span, _ in level.walkers:
            under = columns[left >> 8 : (left + span + levels.WALKER_WIDTH >> 8)]
            assert (under[:, GROUND] == levels.GRASS).all() and (under[:, GROUND - 1] < levels.SOLID).all()
    assert len(grids) == 200


def flags(choose, actions: int = 7, games: int = 200, **settings) -> float:
    """Share of games that reach the flag."""
    batch = MarioBatch(50, seed=11, actions=actions, levels=mario.UNSEEN_LEVELS, **settings)
    batch.reset()
    while batch.finished[0] < games:
        batch.step(choose(batch))
    return batch.finished[2] / batch.finished[0]


def test_the_easiest_difficulty_is_no_walkover_but_a_script_can_play_it() -> None:
    rng = np.random.default_rng(0)
    assert flags(lambda batch: np.full(50, 3)) <= 0.05  # right and run
    assert flags(lambda batch: np.full(50, 4)) <= 0.15  # and jump
    assert flags(lambda batch: rng.integers(5, size=50), actions=5) == 0
    assert flags(lambda batch: np.array([mario_jumper(game) for game in batch.games])) >= 0.95


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


WRONG = dict(difficulty=4, size=100, skip=0, noop_max=-1, actions=6, stack=0, max_steps=0, num_envs=0)


@pytest.mark.parametrize("name", WRONG)
def test_settings_that_cannot_work_are_named(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} {WRONG[name]}: must be") as error:
        MarioBatch(**{name: WRONG[name]})
    assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match="levels 5:5"):
        MarioBatch(levels=(5, 5))


def test_renderings() -> None:
    env = MarioEnv(render_mode="rgb_array")
    env.reset(seed=0)
    frame = env.render()
    assert frame.shape == (576, 576, 3) and frame.dtype == np.uint8
    assert len(np.unique(frame.reshape(-1, 3), axis=0)) > 50
    env.step(3)
    assert (env.render() != frame).any()
    env = MarioEnv(render_mode="ansi")
    env.reset(seed=0)
    text = env.render()
    assert "o" in text and "#" in text and text.startswith("score 0  distance 0") and len(text.splitlines()) == 13

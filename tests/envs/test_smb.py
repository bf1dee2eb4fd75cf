"""The adapter to the real game: its errors anywhere, its behaviour where stable-retro and a ROM are installed."""

import copy
import hashlib
import importlib.util
import json
import subprocess
import sys
import warnings
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from envs.mario import real as smb
from envs.mario.game import RIGHT
from envs.mario.real import NesGame, SuperMarioBrosBatch, SuperMarioBrosEnv, find_rom
from envs.streams import Stream

ROOT = Path(__file__).parents[2]


@pytest.fixture
def emulator() -> None:
    pytest.importorskip("stable_retro")
    if importlib.util.find_spec("gym_super_mario_bros") is None:
        pytest.skip("needs a ROM")


def real(test):
    """Marks a test that needs the emulator and a ROM."""
    return pytest.mark.games(pytest.mark.usefixtures("emulator")(test))


def start(noop_max: int = 0, **settings) -> SuperMarioBrosBatch:
    batch = SuperMarioBrosBatch(actions=12, noop_max=noop_max, **settings)
    batch.reset()
    return batch


@real
def test_recorded_inputs_reach_the_flag() -> None:
    recorded = json.loads((ROOT / "tests/data/smb_1_1_inputs.json").read_text())
    batch, rewards = start(), []
    for step, choice in enumerate(recorded["inputs"], 1):
        _, reward, terminated, truncated, info = batch.step(np.array([choice + 1]))  # right is action 1 of ours
        rewards.append(reward[0])
        assert terminated[0] == info["flag"][0] == (step == recorded["ends_at_step"])
        assert not truncated[0]
    assert info["distance"][0] == recorded["ends_at_x"] - 40
    assert 2 <= reward[0] < 2.12 and sum(rewards) == pytest.approx(0.01 * info["distance"][0] + 2, abs=1e-3)
    assert batch.games[0].where() == 40 and batch.finished[0] == 1 and batch.finished[2] == 1  # a new game has begun


@real
def test_every_start_shows_the_same_pictures_in_another_process_too() -> None:
    """With one thread: NumPy's others would take the core of a collector."""
    code = "import os, hashlib, dqn_mario_async; from envs.mario.real import *; "
    code += "b = SuperMarioBrosBatch(noop_max=0, seed=1); b.reset(); [b.step(np.array([3])) for _ in range(20)]; "
    code += "print(hashlib.sha1(b.obs).hexdigest(), len(os.listdir('/proc/self/task')))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    batch = start(seed=1)
    for _ in range(2):
        batch.reset()
        pictures = {batch.step(np.array([3]))[0][0, -1].tobytes() for _ in range(20)}
        assert f"{hashlib.sha1(batch.obs).hexdigest()} 1" == done.stdout.strip()
        assert len(pictures) == 20


@real
def test_a_walker_kills() -> None:
    batch, terminated = start(), [False]
    while not terminated[0]:
        _, reward, terminated, truncated, info = batch.step(np.array([3]))
    assert -1 <= reward[0] < -0.85 and 250 < info["distance"][0] < 300 and not truncated[0] and not info["flag"][0]


@real
def test_a_is_let_go_for_one_frame_on_the_ground_and_stays_down_elsewhere(monkeypatch) -> None:
    """The game jumps only at a new press of A. Whether A is still down cannot be seen, so it must not matter."""
    masks, frame = [], NesGame._frame
    monkeypatch.setattr(NesGame, "_frame", lambda self, mask: masks.append(bool(mask[8])) or frame(self, mask))
    batch = start()
    masks.clear()
    for action in (5, 5, 4, 4, 0, 0):  # up, and on the way up to the right
        batch.step(np.array([action]))
    assert masks == [True] * 16 + [False] * 8
    del batch  # a process holds one emulator
    batch = start()
    for action in [5] * 11:  # on the ground again, the button of the jump still down
        batch.step(np.array([action]))
    masks.clear()
    for action in (4, 4, 1):
        batch.step(np.array([action]))
    assert masks == [False] + [True] * 7 + [False] * 4


@real
def test_a_gap_kills() -> None:
    game = NesGame()
    game.start(Stream(0, 0))
    ram, game.ram_at = bytearray(game.ram), 0
    for place, value, dead in ((smb.BELOW, 1, False), (smb.BELOW, 2, True), (smb.PLAYER, 0x0B, True)):
        ram[smb.BELOW], ram[smb.PLAYER], ram[place] = 1, 8, value
        game._read_ram(ram)
        assert game.dead == dead
    ram[smb.BELOW], ram[smb.PLAYER], ram[smb.MODE] = 1, 8, 2
    ram[smb.SCORE : smb.SCORE + 6] = bytes([0, 0, 1, 2, 3, 4])
    game._read_ram(ram)
    assert game.flag and game.score == 12340


@real
def test_games_begin_in_a_drawn_level_with_a_drawn_number_of_frames() -> None:
    game, draw = NesGame(stages="1-1,2-1"), Stream(0, 0)
    starts = Counter()
    for _ in range(200):
        game.start(draw)
        starts[game.ram[smb.WORLD], game.ram[0x09]] += 1  # the game's own frame counter
    assert game.where() == 40 and 50 < len(starts) <= 62 and {world for world, _ in starts} == {0, 1}


@real
def test_practice_starts_before_a_place_where_a_game_ended_along_the_one_that_got_furthest() -> None:
    batch, rng = SuperMarioBrosBatch(practice=1.0, stages="1-1,2-1"), np.random.default_rng(0)
    batch.reset()
    game, starts = batch.games[0], set()
    best, ends = 0, [[40], [40]]
    for _ in range(1500):  # right and run, now and then a jump
        level, best = game.level, max(best, game.where())
        *_, terminated, truncated, info = batch.step(rng.choice([3, 4, 4], 1))
        if terminated[0] or truncated[0]:
            ends[level].append(best)
            best, x, path = 0, game.where(), game.furthest[game.level]
            assert [game.visited[0], game.visited[-2]] == [path[0], path[len(game.visited) - 2]] and not game.dead
            assert (batch.obs[0, -1] != batch.final_obs[0, -1]).any()  # the new game's picture
            assert min(abs(end - x) for end in ends[game.level] if end > x - 20) < 350  # pixels in 32 steps
            starts.add((game.level, x))
    assert len(starts) > 5 and min(max(of_level) for of_level in ends) > 800
    assert [path[-1][0] for path in game.furthest] == pytest.approx([max(of_level) for of_level in ends], abs=20)


@real
def test_every_level_starts() -> None:
    pictures = set()
    for world in range(1, 9):
        for stage in range(1, 5):
            game = NesGame(stages=f"{world}-{stage}", noop_max=0)
            game.start(Stream(0, 0))
            game.play(RIGHT, 40)
            assert (game.ram[smb.WORLD], game.ram[smb.STAGE]) == (world - 1, stage - 1) and game.where() > 40
            picture = np.zeros((84, 84), np.uint8)
            game.picture(picture)
            pictures.add(picture[20:].tobytes())
            del game  # a process holds one emulator
    assert len(pictures) > 25  # some levels begin alike


@real
def test_the_picture_is_luma_averaged_over_areas() -> None:
    game = NesGame(noop_max=0)
    game.start(Stream(0, 0))
    picture = np.zeros((84, 84), np.uint8)
    game.picture(picture)
    gray = game.emulator.get_screen() @ np.array([0.299, 0.587, 0.114])
    fine = gray.repeat(3, 0).repeat(7, 1)  # whole numbers of pixels: 224 x 240 to 84 x 84
    np.testing.assert_allclose(picture, fine.reshape(84, 8, 84, 20).mean((1, 3)), atol=0.51)


@real
def test_state_dict_plays_on() -> None:
    batch = start()
    for _ in range(25):
        batch.step(np.array([4]))
    saved = copy.deepcopy(batch.state_dict())
    went = [batch.step(np.array([3]))[0].copy() for _ in range(10)]
    batch.load_state_dict(saved)
    again = [batch.step(np.array([3]))[0].copy() for _ in range(10)]
    np.testing.assert_array_equal(went, again)


@real
def test_gymnasium_finds_nothing_to_complain_about_and_people_see_the_screen() -> None:
    env = SuperMarioBrosEnv(render_mode="rgb_array", actions=7)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_env(env, skip_render_check=True)  # it would make a second emulator
    assert env.render().shape == (448, 480, 3) and env.action_space.n == 7
    env.render_mode = "ansi"
    assert {len(line) for line in env.render().splitlines()} == {42}
    with pytest.raises(ValueError, match="one only"):
        NesGame()


@real
def test_a_step_is_four_frames_one_screen_and_one_saved_state() -> None:
    batch = start()
    game = batch.games[0]
    emulator, calls = game.emulator, Counter()

    class Counting:
        def __getattr__(self, name: str):
            calls[name] += 1
            return getattr(emulator, name)

    game.emulator, game.data = Counting(), None  # its own refresh of the RAM takes 80 to 160 us
    batch.step(np.array([3]))
    assert calls == {"set_button_mask": 4, "step": 4, "get_screen": 1, "get_state": 1}


WRONG = dict(stages="1-1,1-5", size=300, skip=0, rom="nowhere/mario.nes", num_envs=2)


@pytest.mark.parametrize("name", WRONG)
def test_settings_that_cannot_work_are_named(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} {WRONG[name]}[:,] ") as error:
        SuperMarioBrosBatch(**{name: WRONG[name]})
    assert "\n" not in str(error.value)


def test_a_missing_rom_and_the_rom_of_another_game(tmp_path, monkeypatch) -> None:
    other = tmp_path / "other.nes"
    for data in (b"NES\x1a" + bytes(40972), b"", b"something else"):
        other.write_bytes(data)
        with pytest.raises(ValueError, match="other.nes: not Super Mario Bros"):
            find_rom(str(other))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="looked for gym_super_mario_bros/_roms/super-mario-bros.nes"):
        find_rom()
    monkeypatch.setattr(smb, "find_rom", lambda rom: other)
    with pytest.raises(ValueError, match="pip install -r requirements-games.txt"):
        NesGame()

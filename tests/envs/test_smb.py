"""The adapter to the real game: its errors anywhere, its behaviour where stable-retro and a ROM are installed."""

import hashlib
import importlib.util
import json
import subprocess
import sys
import warnings
from collections import Counter
from pathlib import Path
from types import FrameType

import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from envs.mario import real as smb
from envs.mario.game import ACTIONS, PATIENCE, RIGHT
from envs.mario.real import PRESSED, NesGame, SuperMarioBrosBatch, SuperMarioBrosEnv, area_weights, find_rom
from envs.streams import Stream

ROOT = Path(__file__).parents[2]
INSTALLED = all(importlib.util.find_spec(name) for name in ("stable_retro", "gym_super_mario_bros"))


def real(test):
    """Marks a test that needs the emulator and a ROM."""
    return pytest.mark.games(pytest.mark.skipif(not INSTALLED, reason="needs stable-retro and a ROM")(test))


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
        assert (
            terminated[0] == (step == recorded["ends_at_step"])
            and not truncated[0]
            and info["flag"][0] == terminated[0]
        )
    assert info["distance"][0] == recorded["ends_at_x"] - 40
    assert 2 <= reward[0] < 2.12 and sum(rewards) == pytest.approx(0.01 * info["distance"][0] + 2, abs=1e-3)
    assert batch.games[0].where() == 40 and batch.finished[0] == 1 and batch.finished[2] == 1  # a new game has begun


@real
def test_two_starts_show_the_same_pictures() -> None:
    batch = start()
    rounds = []
    for _ in range(2):
        pictures = [batch.reset().copy()] + [batch.step(np.array([4 - step // 4 % 2]))[0].copy() for step in range(20)]
        rounds.append(np.stack(pictures))
    np.testing.assert_array_equal(*rounds)
    assert len(np.unique(rounds[0][:, 0, -1].reshape(21, -1), axis=0)) == 21


@real
def test_another_process_shows_the_same_picture() -> None:
    code = "from envs.mario.real import *; b = SuperMarioBrosBatch(noop_max=0, seed=1); b.reset(); "
    code += "[b.step(np.array([3])) for _ in range(20)]; import hashlib; print(hashlib.sha1(b.obs).hexdigest())"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    batch = start(seed=1)
    for _ in range(20):
        batch.step(np.array([3]))
    assert done.stdout.strip() == hashlib.sha1(batch.obs).hexdigest()


@real
def test_a_walker_kills_and_patience_ends() -> None:
    batch, terminated = start(), [False]
    while not terminated[0]:
        _, reward, terminated, truncated, info = batch.step(np.array([3]))
    assert -1 <= reward[0] < -0.85 and 250 < info["distance"][0] < 300 and not truncated[0] and not info["flag"][0]
    steps = [batch.step(np.array([0])) for _ in range(PATIENCE)]
    assert [step[1][0] for step in steps] == [0] * 39 + [-0.5] and steps[-1][3][0] and not steps[-1][2][0]
    del batch  # a process holds one emulator
    batch = start(max_steps=3)
    assert [batch.step(np.array([1]))[3][0] for _ in range(3)] == [False, False, True]


def landed(held: bool) -> SuperMarioBrosBatch:
    """On the ground after a jump whose button is still down, or was let go just before."""
    batch = start()
    for action in [5] * 10 + [5 if held else 0]:
        batch.step(np.array([action]))
    return batch


@real
def test_what_a_jump_does_on_the_ground_is_in_the_picture() -> None:
    """The game jumps only at a new press of A. Whether A is still down cannot be seen, so it must not matter."""
    heights, stacks = [], []
    for held in (False, True):
        batch = landed(held)
        game = batch.games[0]
        assert bool(game.ram[smb.OLD_BUTTONS] & smb.A_BUTTON) == held and game.ram[smb.FLOAT] == 0
        stacks.append(batch.obs.copy())
        heights.append([])
        for _ in range(8):
            batch.step(np.array([5]))
            heights[-1].append(game.ram[0xCE])
        assert game.ram[smb.FLOAT] == 1
        del batch, game  # a process holds one emulator
    np.testing.assert_array_equal(*stacks)
    assert min(heights[0]) == min(heights[1]) < 120  # as high as each other, one frame apart
    assert max(abs(a - b) for a, b in zip(*heights)) <= 5


@real
def test_a_is_let_go_for_one_frame_on_the_ground_and_stays_down_elsewhere(monkeypatch) -> None:
    masks, frame = [], NesGame._frame
    monkeypatch.setattr(NesGame, "_frame", lambda self, mask: masks.append(bool(mask[8])) or frame(self, mask))
    batch = start()
    masks.clear()
    for action in (5, 5, 4, 4, 0, 0):  # up, and on the way up to the right
        batch.step(np.array([action]))
    assert masks == [True] * 16 + [False] * 8
    del batch  # a process holds one emulator
    batch = landed(True)
    masks.clear()
    for action in (4, 4, 1):
        batch.step(np.array([action]))
    assert masks == [False] + [True] * 7 + [False] * 4


@real
def test_a_gap_kills() -> None:
    game = NesGame()
    game.start(Stream(0, 0))
    game.ram = bytearray(game.ram)
    for place, value, dead in ((smb.BELOW, 1, False), (smb.BELOW, 2, True), (smb.PLAYER, 0x0B, True)):
        game.ram[smb.BELOW], game.ram[smb.PLAYER], game.ram[place] = 1, 8, value
        game._read_ram()
        assert game.dead == dead
    game.ram[smb.BELOW], game.ram[smb.PLAYER], game.ram[smb.MODE] = 1, 8, 2
    game.ram[smb.SCORE : smb.SCORE + 6] = bytes([0, 0, 1, 2, 3, 4])
    game._read_ram()
    assert game.flag and game.score == 12340


@real
def test_games_begin_with_a_drawn_number_of_frames() -> None:
    game, draw = NesGame(), Stream(0, 0)
    counters = set()
    for _ in range(60):
        game.start(draw)
        counters.add(game.ram[0x09])  # the game's own frame counter
        assert game.where() == 40
    assert 20 < len(counters) <= 31


@real
def test_every_level_starts() -> None:
    pictures = set()
    for world in range(1, 9):
        for stage in range(1, 5):
            game = NesGame(world=world, stage=stage, noop_max=0)
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
    game = NesGame(noop_max=0, size=56)
    game.start(Stream(0, 0))
    picture = np.zeros((56, 56), np.uint8)
    game.picture(picture)
    gray = game.emulator.get_screen() @ np.array([0.299, 0.587, 0.114])
    fine = gray.repeat(7, 1).reshape(56, 4, 56, 30).mean((1, 3))  # 240 columns to 56: 30 sevenths of a pixel each
    np.testing.assert_allclose(picture, fine, atol=0.51)
    assert area_weights(240, 84).sum(1) == pytest.approx(np.ones(84))
    np.testing.assert_allclose(area_weights(4, 2), [[0.5, 0.5, 0, 0], [0, 0, 0.5, 0.5]])


@real
def test_state_dict_plays_on() -> None:
    batch = start()
    for _ in range(25):
        batch.step(np.array([4]))
    saved, obs = batch.state_dict(), batch.obs.copy()
    went = [batch.step(np.array([3]))[0].copy() for _ in range(10)]
    saved["obs"][:] = saved["obs"].new_tensor(obs)  # state_dict shares memory
    batch.load_state_dict(saved)
    np.testing.assert_array_equal(batch.obs, obs)
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
def test_the_adapter_costs_little_beside_the_emulator() -> None:
    """Counted, since times swing: a step is four frames, one screen, one saved state and a few dozen other calls."""
    batch = start()
    game = batch.games[0]
    game.data = None  # its own refresh of the RAM takes 80 to 160 us
    calls = Counter()

    def count(frame: FrameType, event: str, what: object) -> None:
        name = what.__name__ if event == "c_call" else "other"
        calls[name if hasattr(game.emulator, name) else "other"] += event in ("call", "c_call")

    for action in range(5):
        calls.clear()
        sys.setprofile(count)
        batch.step(np.array([action]))
        sys.setprofile(None)
        assert 0 < calls.pop("other") < 90  # of about a tenth of a microsecond; a frame takes a millisecond
        assert calls == {"set_button_mask": 4, "step": 4, "get_screen": 1, "get_state": 1}


def test_buttons_are_in_the_order_of_the_core() -> None:
    assert PRESSED[RIGHT].tolist() == [0, 0, 0, 0, 0, 0, 0, 1, 0]
    assert PRESSED[ACTIONS[4]].tolist() == [1, 0, 0, 0, 0, 0, 0, 1, 1]
    assert [PRESSED[ACTIONS[i]].argmax() for i in (5, 6, 10, 11)] == [8, 6, 5, 4]


@pytest.mark.parametrize(
    "settings, names",
    [
        (dict(world=9), "world 9, stage 1: must be 1 to 8 and 1 to 4"),
        (dict(stage=0), "world 1, stage 0"),
        (dict(size=300), "size 300"),
        (dict(skip=0), "skip 0"),
        (dict(rom="nowhere/mario.nes"), "rom nowhere/mario.nes: no such .nes file"),
        (dict(num_envs=2), "num_envs 2: a process holds one emulator"),
    ],
)
def test_settings_that_cannot_work_are_named(settings: dict, names: str) -> None:
    with pytest.raises(ValueError, match=names) as error:
        SuperMarioBrosBatch(**settings)
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

"""The games as Gymnasium environments: spaces, seeds, infos and actions, one game and many."""

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
from envs.mario.batch import MarioEnv
from envs.metta.arena import MettaArena
from envs.snake.rules import VARIANTS, SnakeEnv

SINGLE = {"Snake-v0": SnakeEnv, "MarioLike-v0": MarioEnv}  # games of one player
# On a board of 4x4 this fills every cell: the action in each cell.
CYCLE = {0: 1, 1: 1, 2: 1, 3: 2, 7: 3, 6: 3, 5: 2, 9: 1, 10: 1, 11: 2, 15: 3, 14: 3, 13: 3, 12: 0, 8: 0, 4: 0}


SETTINGS = [*((env_id, {}) for env_id in VARIANTS), ("MarioLike-v0", {})]
SETTINGS += [("MarioLike-v0", dict(size=size, stack=3, skip=2)) for size in (48, 96, 132)]


@pytest.mark.parametrize("env_id, settings", SETTINGS)
def test_gymnasium_finds_nothing_to_complain_about(env_id: str, settings: dict) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_env(gym.make(env_id, **settings).unwrapped)


def assert_same(ours, theirs) -> None:
    """Arrays, tuples and dicts of them: same names, values and kinds of numbers."""
    assert type(ours) is type(theirs)
    if isinstance(ours, dict):
        assert set(ours) == set(theirs)
        for name in ours:
            assert_same(ours[name], theirs[name])
    elif isinstance(ours, tuple):
        for our, their in zip(ours, theirs, strict=True):
            assert_same(our, their)
    elif ours is not None:
        assert ours.dtype.kind == theirs.dtype.kind and ours.shape == theirs.shape
        for our, their in zip(ours, theirs, strict=True):
            assert_same(our, their) if ours.dtype == object else np.testing.assert_array_equal(our, their)


@pytest.mark.parametrize("by_lane", [True, False], ids=["one seed", "a list of seeds"])
@pytest.mark.parametrize("env_id", SINGLE)
def test_vector_env_is_what_gymnasium_makes_of_single_games(env_id: str, by_lane: bool, tmp_path) -> None:
    """Observations, rewards, ends and info of both; Snake wins some of its games."""
    settings = {"board": (4, 4)} if env_id == "Snake-v0" else {"difficulty": 1}
    lanes, rng, ends, loaded = 5, np.random.default_rng(0), 0, False
    single = SINGLE[env_id]
    makers = [lambda lane=lane: single(lane=lane * by_lane, **settings) for lane in range(lanes)]
    vector = gym.make_vec(env_id, num_envs=lanes, **settings).unwrapped
    singles = SyncVectorEnv(makers, autoreset_mode=AutoresetMode.SAME_STEP)
    assert vector.metadata["autoreset_mode"] == AutoresetMode.SAME_STEP
    seeds = [31, 7, 7, 90, 2**31]
    if by_lane:
        ours, theirs = vector.reset(seed=7), singles.reset(seed=[7] * lanes)
    else:
        ours, theirs = vector.reset(seed=seeds), singles.reset(seed=seeds)
    assert_same(ours, theirs)
    assert by_lane == (ours[0][1] != ours[0][2]).any()  # the second and the third have the same seed
    assert vector.observation_space.contains(ours[0])
    for step in range(700 if env_id == "Snake-v0" else 300):
        if env_id == "MarioLike-v0" and not loaded and any(game.taken and game.stomped for game in vector.batch.games):
            loaded = True  # goes on in other games
            torch.save(vector.batch.state_dict(), tmp_path / "state.pt")
            vector = gym.make_vec(env_id, num_envs=lanes, **settings).unwrapped
            vector.reset(seed=1)
            vector.batch.load_state_dict(torch.load(tmp_path / "state.pt"))
        actions = rng.choice([2, 3, 4, 4, 6] if env_id == "MarioLike-v0" else 4, lanes)
        if env_id == "Snake-v0":
            cycle = np.array([CYCLE[env.body[-1]] for env in singles.envs])
            actions[:-1] = cycle[:-1]
            if step % 3:
                actions[-1] = cycle[-1]
        ours = vector.step(actions)
        assert_same(ours, singles.step(actions))
        assert ours[1].dtype == np.float64
        infos = ours[-1]
        if "final_info" in infos:
            ends += infos["final_info"].get("won", infos["_final_info"]).sum()
    assert ends >= 4 and loaded == (env_id == "MarioLike-v0")


@pytest.mark.parametrize("env_id", SINGLE)
def test_a_seed_may_be_left_out_of_a_list(env_id: str) -> None:
    vector, single = gym.make_vec(env_id, num_envs=2).unwrapped, gym.make(env_id).unwrapped
    vector.reset(seed=[3, 4])
    again = vector.reset(seed=[3, None])[0]
    fresh = gym.make_vec(env_id, num_envs=2).unwrapped.reset(seed=[3, None])[0]
    first = single.reset(seed=3)[0]
    np.testing.assert_array_equal(again[0], first)
    np.testing.assert_array_equal(fresh[0], first)
    single.reset(seed=4)
    np.testing.assert_array_equal(again[1], single.reset()[0])  # the next game of its stream
    with pytest.raises(ValueError, match="3 seeds for 2 games: must be as many, or one for all"):
        vector.reset(seed=[1, 2, 3])


@pytest.mark.parametrize("action", ["too high", -1, 2.7, None, float("nan")])
@pytest.mark.parametrize("env_id", [*SINGLE, "MettaArena-v0"])
def test_an_action_that_does_not_exist_is_refused(env_id: str, action) -> None:
    vector, fresh = (gym.make_vec(env_id, num_envs=6).unwrapped for _ in range(2))
    vector.reset(seed=1), fresh.reset(seed=1)
    if action == "too high":
        action = vector.num_actions
    for actions in ([action] * 6, [1] * 5 + [action], action, [1], [[1] * 6]):
        with pytest.raises(ValueError, match="actions .*: must be 6 whole numbers from 0 to"):
            vector.step(actions)
    np.testing.assert_array_equal(vector.step([1] * 6)[0], fresh.step([1] * 6)[0])
    if env_id == "MettaArena-v0":
        env = MettaArena()
        actions = dict.fromkeys(env.possible_agents, action)
    else:
        env, actions = gym.make(env_id).unwrapped, action
    env.reset(seed=1)
    with pytest.raises(ValueError, match=f"action {action}.*: must be"):
        env.step(actions)


PROGRAM = """
import sys, gymnasium, gymnasium.vector, numpy, torch
for name in "fcntl grp posix pty pwd resource syslog termios tty".split():
    sys.modules[name] = None  # hidden after the packages, which may have ways of their own around it
import envs, envs.mario.batch, envs.metta.arena, envs.metta.batch, envs.snake.batch
envs.mario.batch.MarioBatch(2).reset()
envs.metta.batch.MettaBatch(1).reset()
envs.snake.batch.SnakeBatch(2).reset()
optional = ("mettagrid", "envs.metta.real", "stable_retro", "envs.mario.real")
assert not [name for name in sys.modules if name.startswith(optional)]
"""


def test_nothing_is_needed_that_is_optional_or_that_only_unix_has() -> None:
    subprocess.run([sys.executable, "-c", PROGRAM], check=True, cwd=Path(__file__).parents[2])

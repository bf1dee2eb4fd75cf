"""The adapter to the real MettaGrid; without the package only that importing `envs` does not ask for it."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest


def test_importing_envs_does_not_import_the_package() -> None:
    program = "import sys, envs, envs.metta; sys.exit(any(name.startswith('mettagrid') for name in sys.modules))"
    subprocess.run([sys.executable, "-c", program], check=True, cwd=Path(__file__).parent.parent)


@pytest.fixture(scope="module")
def real():
    pytest.importorskip("mettagrid")
    from envs import real_mettagrid

    return real_mettagrid


games = pytest.mark.games


def play(env, steps: int, seed: int = 0):
    rng = np.random.default_rng(seed)
    for _ in range(steps):
        yield env.step(rng.integers(env.num_actions, size=env.num_agents).astype(np.int32))


@games
def test_spaces_come_from_the_package(real) -> None:
    env = real.RealMettaGrid(2)
    assert (env.num_agents, env.num_tokens, env.window, env.obs.shape) == (16, 100, (11, 11), (16, 100, 3))
    assert env.action_names == ["noop", "move_north", "move_south", "move_west", "move_east"] and env.num_actions == 5
    assert {"last_reward", "inv:ore", "inv:heart"} <= {name for name, _ in env.features.values()}
    seen = set(env.obs[:, :, 1][env.obs[:, :, 0] != 255].tolist())
    assert seen <= set(env.features) and all(scale > 0 for _, scale in env.features.values())


@games
def test_it_writes_to_the_array_it_is_given(real) -> None:
    obs = np.zeros((8, 100, 3), np.uint8)
    env = real.RealMettaGrid(obs=obs)
    first = obs.copy()
    assert first.any() and env.reset() is obs
    for seen, rewards, terminals, truncations, info in play(env, 30):
        assert seen is obs and rewards.dtype == np.float32 and terminals.dtype == truncations.dtype == bool
        assert info["final_obs"].shape == obs.shape
    assert (obs != first).any()
    with pytest.raises(ValueError, match="obs"):
        real.RealMettaGrid(obs=np.zeros((7, 100, 3), np.uint8))


@games
def test_truncation_starts_anew_and_shows_what_was_before(real) -> None:
    env = real.RealMettaGrid(2, real.mines_and_altars(max_steps=20), seed=3)
    lengths, steps, last = [], [0, 0], env.obs.copy()
    percent = [id for id, (name, _) in env.features.items() if name == "episode_completion_pct"]
    for obs, _, terminals, truncations, info in play(env, 100):
        assert not terminals.any()
        for i in range(2):
            steps[i] += 1
            part = slice(8 * i, 8 * i + 8)
            if truncations[part].all():
                lengths.append(steps[i])
                steps[i] = 0
                assert (obs[part] != info["final_obs"][part]).any()
                assert obs[8 * i][obs[8 * i, :, 1] == percent][0, 2] == 0
            else:
                assert not truncations[part].any()
                np.testing.assert_array_equal(obs[part], info["final_obs"][part])
                assert (obs[part] != last[part]).any()
        last = obs.copy()
    assert lengths.count(20) >= 8 and 1 <= min(lengths) and max(lengths) == 20


@games
def test_maps_follow_the_seed_and_differ_between_episodes(real) -> None:
    def maps(seed: int) -> list[bytes]:
        env = real.RealMettaGrid(2, real.mines_and_altars(max_steps=4), seed, random_first_length=False)
        found = [env.obs.tobytes()]
        for obs, _, _, truncations, _ in play(env, 12):
            if truncations.any():
                found.append(obs.tobytes())
        return found

    first = maps(1)
    assert first == maps(1) and len(set(first)) == 4 == len(first) and not set(first) & set(maps(2))
    env = real.RealMettaGrid(2, seed=1)
    assert (env.obs[:8] != env.obs[8:]).any()


@games
def test_hearts_are_earned_from_ore(real) -> None:
    env = real.RealMettaGrid(4, seed=0, random_first_length=False)
    returns = np.concatenate([info["return"] for *_, truncations, info in play(env, 512) if truncations.all()])
    assert len(returns) == 64 and 0.2 < returns.mean() < 6 and (returns == returns.round()).all()


def small_config():
    from envs.real_mettagrid import mines_and_altars

    return mines_and_altars(agents=3, side=9)


@games
def test_configs_by_import_path(real, monkeypatch) -> None:
    assert real.RealMettaGrid(2, "tests.test_real_mettagrid:small_config").num_agents == 6
    monkeypatch.setattr(real, "fixed", small_config(), raising=False)
    assert real.RealMettaGrid(config="envs.real_mettagrid:fixed").num_agents == 3
    for path in ("nothing", "no.such.module:config", "envs.metta:missing", "envs.metta:ITEMS", "envs.metta:MettaArena"):
        with pytest.raises(ValueError, match="config"):
            real.load_config(path)
    with pytest.raises(ValueError, match="num_games 0"):
        real.RealMettaGrid(0)

"""The adapter to the real MettaGrid."""

import sys

import numpy as np
import pytest


@pytest.fixture(scope="module")
def real():
    pytest.importorskip("mettagrid")
    from envs.metta import real as real_mettagrid

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
def test_truncation_starts_anew_and_returns_are_the_sums_of_rewards(real) -> None:
    env = real.RealMettaGrid(2, real.mines_and_altars(max_steps=40), seed=3)
    lengths, steps, last = [], [0, 0], env.obs.copy()
    sums, best = np.zeros(16), 0
    percent = [id for id, (name, _) in env.features.items() if name == "episode_completion_pct"]
    for obs, rewards, terminals, truncations, info in play(env, 400):
        assert not terminals.any()
        sums += rewards
        best = max(best, sums.max())
        np.testing.assert_allclose(info["return"], sums)
        for i in range(2):
            steps[i] += 1
            part = slice(8 * i, 8 * i + 8)
            if truncations[part].all():
                lengths.append(steps[i])
                steps[i], sums[part] = 0, 0
                assert (obs[part] != info["final_obs"][part]).any()
                assert obs[8 * i][obs[8 * i, :, 1] == percent][0, 2] == 0
            else:
                assert not truncations[part].any()
                np.testing.assert_array_equal(obs[part], info["final_obs"][part])
                assert (obs[part] != last[part]).any()
        last = obs.copy()
    assert lengths.count(40) >= 16 and 1 <= min(lengths) and max(lengths) == 40 == env.max_steps
    assert best >= 1 and best == round(best)  # hearts, made of ore


@games
def test_maps_follow_the_seed_and_differ_between_episodes(real) -> None:
    def maps(seed: int) -> list[bytes]:
        env = real.RealMettaGrid(2, real.mines_and_altars(max_steps=4), seed, random_first_length=False)
        assert (env.obs[:8] != env.obs[8:]).any()
        found = [env.obs.tobytes()]
        for obs, _, _, truncations, _ in play(env, 12):
            if truncations.any():
                found.append(obs.tobytes())
        return found

    first = maps(1)
    assert first == maps(1) and len(set(first)) == 4 == len(first) and not set(first) & set(maps(2))


def endless_config():
    from envs.metta.real import mines_and_altars

    return mines_and_altars(agents=3, side=9, max_steps=0)


@games
def test_configs_by_import_path_and_without_a_step_limit(real, monkeypatch) -> None:
    env = real.RealMettaGrid(2, "tests.envs.test_real_mettagrid:endless_config")
    assert env.num_agents == 6 and env.max_steps is None
    assert not any(truncations.any() for _, _, _, truncations, _ in play(env, 50))
    monkeypatch.setattr(real, "fixed", endless_config(), raising=False)
    assert real.RealMettaGrid(config="envs.metta.real:fixed").num_agents == 3
    with pytest.raises(ValueError, match="num_games 0"):
        real.RealMettaGrid(0)


SOMEBODYS_CODE = """
import sys
from envs.metta.real import mines_and_altars

number = 3
def asks(for_more): return mines_and_altars()
def raises(): raise RuntimeError("two\\nlines")
def key(): return {}["x"]
def leaves(): sys.exit(3)
def negative(): return mines_and_altars(agents=-1)
def unlike(name, value):
    config = mines_and_altars()
    setattr(config.game, name, value)
    return config
def no_actions(): return unlike("actions", None)
def no_map(): return unlike("map_builder", None)
def nobody(): return unlike("num_agents", 0)
"""
BROKEN = {
    "raising": 'raise RuntimeError("two\nlines")', "syntax": "def (", "leaving": "import sys\nsys.exit(1)",
    "importing": "import no_such_package", "null": "\0",
}  # fmt: skip
BAD_PATHS = ["", ":", " ", "nothing", "nothing:", ":config", "no.such.module:config", "somebody", "somebody:",
             "somebody:missing", "somebody:number", "somebody:asks", "somebody:raises", "somebody:key",
             "somebody:leaves", "somebody:negative", "somebody:no_actions", "somebody:no_map", "somebody:nobody",
             "a b/c.py:config", "..somebody:number", ".:config", "x\0y:z", "a:b:c", "envs.metta.arena:MettaArena",
             *(f"{name}:config" for name in BROKEN)]  # fmt: skip


@games
@pytest.mark.parametrize("path", BAD_PATHS)
def test_a_config_that_cannot_be_is_one_line(real, path: str, tmp_path, monkeypatch, caplog) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "somebody.py").write_text(SOMEBODYS_CODE)
    for name, source in BROKEN.items():
        (tmp_path / f"{name}.py").write_text(source)
    try:
        with pytest.raises((ValueError, ImportError), match="config") as caught:
            real.RealMettaGrid(config=path)
    finally:
        for name in ("somebody", *BROKEN):  # the next test has a folder of its own
            sys.modules.pop(name, None)
    message = str(caught.value)
    assert len(message.splitlines()) == 1 and len(message) < 350 and f'config "{path}": ' in message
    assert not caplog.records

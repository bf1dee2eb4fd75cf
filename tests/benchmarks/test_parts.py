"""Games, players and parts of the scripts are measured, in a moment."""

import json

import pytest
from benchmark_helpers import PROJECT

import ppo_metta
from benchmarks import games, harness, mario, metta_parts, players, sb3_peers, snake


@pytest.mark.parametrize("game", games.GYMNASIUM_GAMES)
def test_gymnasium_measures_every_game(game: str) -> None:
    assert min(games.gymnasium_rates(game, (6, 12), 0.01)) > 10


def test_batched_games_and_networks() -> None:
    assert min(snake.act_rates((1, 8), 0.01, "cpu")) > 10
    assert min(games.snake_rates((8,), 0.01, "cpu")) > 10 and sb3_peers.sb3_act_rate(2, 0.01, "cpu") > 10
    assert min(games.mario_rates((1, 2), 0.01)) > 100
    assert min(mario.collector_rates("MarioLike-v0", (1, 2), 0.01)) > 10
    assert games.rule_book_rate(2, 0.1) > 100


def test_parts_of_the_arena_s_trainer() -> None:
    flags = "--num-envs 4 --hidden-size 16 --threads 1"
    found = metta_parts.metta_parts(flags, 0.1, "cpu")
    assert found["agents"] == 24 and found["env_steps_per_second"] > 0 and 0 < found["one"][0] < found["all"][2]
    workers = f"{flags} --vec-env subproc --num-workers 2 --async-factor 2"
    assert metta_parts.metta_latency(workers, 0.1, "cpu")["agents"] == 12
    assert metta_parts.metta_env_rate(workers, 0.1, "cpu") > 0


def test_scripted_players_beat_random_ones(monkeypatch) -> None:
    random_flags, random_distance = players.mario_games("random", 20)
    flags, distance = players.mario_games("a scripted jumper", 20)
    assert random_flags == 0 and flags > 0.8 and distance > 3 * random_distance > 0
    monkeypatch.setitem(ppo_metta.VARIANTS["MettaArena-v0"], "max_steps", 200)
    arena = metta_parts.ARENAS["arena, easy"]
    assert players.scripted_hearts(arena, 6) > 5 * players.random_hearts(arena, 24) + 1


@pytest.mark.games
def test_the_real_emulator_is_measured(monkeypatch, tmp_path) -> None:
    missing = games.missing_rom()
    if missing:
        pytest.skip(missing)
    monkeypatch.setattr(harness, "ROOT", PROJECT)
    monkeypatch.chdir(PROJECT)
    assert harness.in_subprocess(games.emulator_rate, True, seconds=0.1, refresh=True) > 50
    assert harness.in_subprocess(mario.collector_rates, True, env_id="SuperMarioBros", widths=(1,), seconds=0.1)[0] > 30
    assert harness.in_subprocess(players.mario_games, True, player="random", games=1, real=True)[1] > 0
    flags = f"--env-id SuperMarioBros --run-dir {tmp_path} --run-name a --max-seconds 8 --learning-starts 50"
    flags += " --device cpu --eval-every 0 --eval-episodes 1 --no-video --noop-max 0"
    harness.subprocess.run([harness.sys.executable, mario.SCRIPT, *flags.split()], check=True)
    summary = json.loads((tmp_path / "a" / "summary.json").read_text())
    ends = mario.real_game_ends(str(tmp_path / "a"), 2)
    assert [distance for distance, _ in ends] == 2 * [summary["eval_distance_mean"]]
    assert (ends[0][1] == "flag") == (summary["eval_flags"] == 1)

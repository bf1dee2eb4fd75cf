"""Games, players and parts of the scripts are measured, in a moment."""

import pytest

from benchmarks import games, mario, metta_parts, players, sb3_peers, snake


def test_games_and_networks() -> None:
    pytest.importorskip("gymnasium", "1.4")
    for game in games.GYMNASIUM_GAMES:
        assert min(games.gymnasium_rates(game, (6, 12), 0.01)) > 0
    assert min(snake.act_rates((1, 8), 0.01, "cpu")) > 0 and min(games.snake_rates((8,), 0.01, "cpu")) > 0
    assert sb3_peers.sb3_act_rate(2, 0.01, "cpu") > 0 and min(games.mario_rates((1, 2), 0.01)) > 0
    assert min(mario.collector_rates("MarioLike-v0", (1, 2), 0.01)) > 0
    assert games.rule_book_rate(2, 0.1) > 0
    played = players.arena_games("", games=1)
    assert played["hearts"] > 15 and sum(played["steps"].values()) == pytest.approx(1)
    assert sum(map(sum, played["places"])) == 6 * 1000  # agents x steps


def test_sb3_agents_are_trained_and_evaluated() -> None:
    for curve_of in (sb3_peers.sb3_curve, sb3_peers.sb3_mario_curve):
        curve = curve_of("SB3's DQN, our recipe", 0.3, 0.1, 1000, device="cpu", threads=1, seed=1, explored=100)
        assert curve[0] == [0.0, 0.0] and len(curve) > 1


def test_parts_of_the_arena_s_trainer() -> None:
    flags = "--num-envs 4 --hidden-size 16 --threads 1"
    found = metta_parts.metta_parts(flags, 0.1, "cpu")
    assert found["agents"] == 24 and found["env_steps_per_second"] > 0 and 0 < found["one"][0] < found["all"][2]
    workers = f"{flags} --vec-env subproc --num-workers 2 --async-factor 2"
    assert metta_parts.metta_latency(workers, 0.1, "cpu")["agents"] == 12
    assert metta_parts.metta_env_rate(workers, 0.1, "cpu") > 0

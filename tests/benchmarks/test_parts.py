"""Games, players and parts of the scripts are measured, in a moment."""

import ppo_metta
from benchmarks import games, mario, metta_parts, players, sb3_peers, snake


def test_games_and_networks() -> None:
    for game in games.GYMNASIUM_GAMES:
        assert min(games.gymnasium_rates(game, (6, 12), 0.01)) > 0
    assert min(snake.act_rates((1, 8), 0.01, "cpu")) > 0
    assert min(games.snake_rates((8,), 0.01, "cpu")) > 0 and sb3_peers.sb3_act_rate(2, 0.01, "cpu") > 0
    assert min(games.mario_rates((1, 2), 0.01)) > 0
    assert min(mario.collector_rates("MarioLike-v0", (1, 2), 0.01)) > 0
    assert games.rule_book_rate(2, 0.1) > 0


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

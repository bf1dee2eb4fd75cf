"""The tables of dqn_mario_async.py."""

import json

import pytest
import tyro
from benchmark_helpers import CPU, CUDA, PROJECT

import dqn_mario_async
from benchmarks import games, harness, mario, players
from benchmarks.harness import Options


def test_the_tables_of_mario_say_commands_that_the_script_understands(monkeypatch) -> None:
    """And what they make of the numbers, with none of them measured."""
    asked, calls = [], []
    summary = {"experience_rate": 450.0, "env_steps": 5000, "env_steps_per_second": 5000.0, "replay_ratio": 0.5}
    summary |= {"train_fraction": 0.25, "produced": 700, "stored": 690, "producer_wait_ms_mean": 0.05}
    summary |= {
        "replay_kib_per_transition": 7.0,
        "eval_flags": 0.9,
        "eval_distance_mean": 900.0,
        "samples_per_second": 2500.0,
        "ring_fill": 0.25,
        "weight_age": 2.0,
        "precision": "float32",
        "compiled": False,
        "cudagraph": True,
    }

    def run(flags: str, options: Options, script: str) -> dict:
        asked.append(flags)
        beside = "--num-collectors 1" in flags
        return summary | {"run": "none", "env_steps_per_second": 8000.0 if beside else 5000.0}

    def apart(function, one_core=False, **arguments):
        calls.append(function)
        rates = {games.emulator_rate: 500.0, players.mario_games: [0.25, 300.0]}
        rates[mario.real_game_ends] = [[3121, "flag"], [2799, "dead"], [2800, "stuck"], [0, "dead"]]
        return rates.get(function) or [100.0] * len(arguments["widths"])

    readings = {"eval/flags": [[65.0, 0.3], [310.0, 0.7], [900.0, 0.8]], "charts/flags": [[61.0, 0.1], [301.0, 0.6]]}
    readings["eval/distance_mean"] = [[65.0, 400.0], [1700.0, 600.0]]
    monkeypatch.setattr(harness, "run", run)
    monkeypatch.setattr(harness, "in_subprocess", apart)
    monkeypatch.setattr(harness, "wall_clock_curve", lambda folder, tag: readings[tag])
    monkeypatch.setattr(games, "missing_rom", lambda: "")
    options = Options(repeats=2)
    text, raw = mario.mario_env(options, CPU)
    assert "| a collector | 100 (100–100) | 0.20 (0.20–0.20) |" in text and "| random | 25.0% | 300 |" in text
    assert "| 16 |" + 4 * " 100 (100–100) |" in text and raw["ratios"]["a collector"] == [0.2, 0.2]
    text, raw = mario.mario_async(options, CPU)
    assert raw["asked"] == 1.5 and raw["ratios"]["in turn"] == [1.6, 1.6]
    assert "| beside each other | 8,000 (8,000–8,000) | 0.50 | 2,667 (2,667–2,667) |  | 25% |" in text
    assert "| in turn | 5,000 (5,000–5,000) | 0.50 | 1,667 (1,667–1,667) | 1.60 (1.60–1.60) | 25% | 700 |" in text
    for device in (CPU, CUDA):
        text, raw = mario.mario_switches(options, device)
    assert "| `--num-collectors 0` | 5,000 (5,000–5,000) | 2,500 (2,500–2,500) | 1.00 (1.00–1.00) | 0.50 |" in text
    text, raw = mario.mario_learn(options, CPU)
    assert "| 2 | 30%, 10% | 70%, 60% | 90% | 900 | 5,000 | 0.50 | 0.050 |" in text and len(raw["runs"]) == 2
    for difficulty, measure in enumerate((mario.mario_learn_1, mario.mario_learn_2), 1):
        measure(options, CPU)
        assert asked[-1] == f"--max-seconds 900 --difficulty {difficulty} --seed 2"
    text, raw = mario.mario_real(options, CPU)
    assert "| 2 | 400 | 600 | 600 | 1.1 | 900 | 90% | 3.0 | 5,000 | 0.50 |" in text and len(raw["runs"]) == 2
    assert "where 8 greedy games end" in text and "| 0 to 399 | 2 | 0 | 0 |" in text
    assert "| 2,400 to 2,799 | 2 | 0 | 0 |\n| 2,800 to 3,199 | 0 | 2 | 2 |" in text
    json.dumps(raw)
    for flags in asked:
        tyro.cli(dqn_mario_async.Args, args=flags.split())
    monkeypatch.setattr(games, "missing_rom", lambda: "The real game: not measured (no ROM).")
    calls.clear()
    assert mario.mario_env(options, CPU)[0].endswith("not measured (no ROM).")
    assert games.emulator_rate not in calls and mario.mario_real(options, CPU)[1] == {}


def test_games_of_mario_are_measured() -> None:
    assert games.mario_rates((1, 2), 0.01)[0] > 100
    assert mario.collector_rates("MarioLike-v0", (1, 2), 0.01)[1] > 10
    (random_flags, random_distance), (flags, distance) = (
        players.mario_games(player, 20) for player in ("random", "a scripted jumper")
    )
    assert random_flags == 0 and flags > 0.8 and distance > 3 * random_distance > 0
    assert players.mario_games("a scripted jumper", 20, difficulty=3)[0] < 0.6


@pytest.mark.games
def test_the_real_emulator_is_measured(monkeypatch) -> None:
    monkeypatch.setattr(harness, "ROOT", PROJECT)
    if missing := games.missing_rom():
        pytest.skip(missing)
    assert harness.in_subprocess(games.emulator_rate, True, seconds=0.1, refresh=True) > 50
    assert harness.in_subprocess(mario.collector_rates, True, env_id="SuperMarioBros", widths=(1,), seconds=0.1)[0] > 30
    assert harness.in_subprocess(players.mario_games, True, player="random", games=1, real=True)[1] > 0


@pytest.mark.games
def test_the_games_of_a_finished_run_end_as_they_do(monkeypatch, tmp_path) -> None:
    monkeypatch.chdir(PROJECT)
    if missing := games.missing_rom():
        pytest.skip(missing)
    flags = f"--env-id SuperMarioBros --run-dir {tmp_path} --run-name a --max-seconds 8 --learning-starts 50"
    flags += " --device cpu --eval-every 0 --eval-episodes 1 --no-video --noop-max 0"
    harness.subprocess.run([harness.sys.executable, mario.SCRIPT, *flags.split()], check=True)
    summary = json.loads((tmp_path / "a" / "summary.json").read_text())
    ends = mario.real_game_ends(str(tmp_path / "a"), 2)
    assert [distance for distance, _ in ends] == 2 * [summary["eval_distance_mean"]]
    assert ends[0] == ends[1]  # hardly trained, an agent dies or stands still; one of 40 gets to the flag
    assert (ends[0][1] == "flag") == (summary["eval_flags"] == 1)
    assert mario.first_reading_above([[30, 0.0], [90, 0.1], [150, 0.2]], 0) == "1.5"
    assert mario.first_reading_above([[30, 0.0]], 0) == "–"

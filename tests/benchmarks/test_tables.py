"""Every table runs with made-up numbers and with flags that its script accepts; the arithmetic behind the tables."""

import functools
import json
import time
from importlib.util import find_spec

import pytest
import torch
import tyro
from benchmark_helpers import CPU, CUDA, SCRIPTS, cells

from benchmarks import all_scripts, harness, mario, metta_parts, metta_speed, ppo_snake, report, snake, time_to
from benchmarks.harness import SUITES, Options

CURVES = ["sb3_curve", "sb3_arena_curve", "sb3_mario_curve"]
RATES = ["snake_rates", "mario_rates", "collector_rates", "gymnasium_rates", "jumanji_rates", "act_rates"]
LISTS = {
    "ceiling": [1e11, 1e10],
    "mario_games": [0.5, 300.0],
    "real_game_ends": [[3121, "flag"], [10, "dead"]],
    "sb3_learn_run": [10.0, 200.0],
}


class Summary(dict):
    """Summary of a run in which every number is 1."""

    def __missing__(self, key: str) -> float:
        return 1.0


def summary(**known) -> Summary:
    rates = dict.fromkeys(["env_steps_per_second", "samples_per_second", "replay_ratio"], 1.0)
    switches = {"precision": "float32", "sdpa": "math", "compiled": False, "cudagraph": False}
    return Summary(rates | switches | {"run": "none", "train_fraction": 0.5} | known)


def found_by(function, **arguments):
    """A made-up result of `harness.in_subprocess`."""
    name = function.__name__
    if name in RATES:
        return [1000.0] * len(arguments["widths"])
    if name in CURVES:
        return [[0.0, 0.0], [10.0, 2000.0]]
    if name == "metta_mflops":
        return [0.5] * len(arguments["variants"])
    if name == "all_reduce_seconds":
        return [0.1] * len(arguments["sizes"])
    if name in ("metta_latency", "metta_parts"):
        return Summary(agents=6, one=[1.0, 2.0, 3.0], all=[1.0, 2.0, 3.0])
    if name in ("sb3_rate", "sb3_arena_rate", "sb3_mario_rate"):
        return summary()
    return LISTS.get(name, 10.0)


@functools.cache
def parse(script: str, flags: str) -> None:
    tyro.cli(SCRIPTS[script].Args, args=flags.split())


@pytest.fixture
def commands(monkeypatch) -> set:
    """Nothing is measured; collects (script, flags) of all runs."""
    asked = set()

    def run(flags: str, options: Options, script: str = "dqn_snake.py", ranks: int = 1) -> Summary:
        asked.add((script, flags))
        return summary(flags=flags)

    def in_subprocess(function, one_core: bool = False, **arguments):
        flags = arguments.get("variants", [arguments.get("flags", "")])
        if function.__module__.endswith(("metta_parts", "players")):
            asked.update(("ppo_metta.py", one) for one in flags)
        return found_by(function, **arguments)

    curve = [[0.0, 0.0], [700.0, 2000.0]]
    monkeypatch.setattr(harness, "run", run)
    monkeypatch.setattr(harness, "in_subprocess", in_subprocess)
    monkeypatch.setattr(harness, "eval_curve", lambda folder: curve)
    monkeypatch.setattr(harness, "wall_clock_curve", lambda folder, tag: curve)
    monkeypatch.setattr(harness, "mean_scalars", lambda folder: Summary({"perf/act_ms": 1.0}))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (2**36, 2**36))
    for function in ("snake.saved_weights", "ppo_snake.saved_weights"):
        monkeypatch.setattr(f"benchmarks.{function}", lambda *_: {})
    for function in ("snake.matmul_seconds", "ppo_snake.matmul_seconds"):
        monkeypatch.setattr(f"benchmarks.{function}", lambda *_, **__: 1.0)
    monkeypatch.setattr("benchmarks.ranks.num_weights", lambda *_: 1000)
    monkeypatch.setattr("benchmarks.games.missing_rom", lambda: "")
    return asked


@pytest.mark.parametrize("device", [CPU, CUDA], ids=str)
@pytest.mark.parametrize("name", SUITES["all"])
def test_every_table_runs_with_flags_that_its_script_accepts(commands, name, device) -> None:
    if name in ("metta-subproc", "metta-learn-real") and find_spec("mettagrid") is None:
        pytest.skip("needs mettagrid")
    for options in (Options(name, fast=True), Options(name, repeats=1)):
        text, raw = report.TABLES[name].measure(options, device)
        json.dumps(raw)
        for block in text.split("\n\n"):
            columns = {line.count(" | ") for line in block.splitlines() if line.startswith("| ")}
            assert len(columns) <= 1, block
    for script, flags in commands:
        parse(script, flags)


def test_a_size_that_would_not_fit_is_not_started(monkeypatch) -> None:
    asked = []

    def run(flags: str, options: Options, script: str) -> dict:
        asked.append(flags)
        width = int(flags.split()[-1].split("x")[0])
        return summary(peak_memory_gib=1 + width / 1024)

    monkeypatch.setattr(harness, "run", run)
    monkeypatch.setattr(harness, "free_gib", lambda device: 10.0)
    rows = cells(all_scripts.scaling(Options(repeats=1), CPU)[0])
    assert rows["`dqn_snake.py --num-envs 65536`"][0] == "too little memory"
    assert rows["`dqn_snake.py --num-envs 4096`"][0] == "1 (1–1)"
    assert not any("envs 65536" in flags for flags in asked)


def test_seconds_to_a_goal() -> None:
    curve = [[0.0, 0.0], [2.0, 4.9], [4.1, 10.2], [6.0, 9.0], [8.2, 11.0]]
    assert [time_to.seconds_to_goal(curve, goal) for goal in (5, 10, 11, 12)] == [4.1, 4.1, 8.2, None]
    peer = [[50.0, 6.0], [100.0, 10.0]]
    curves = {"ours": [curve, curve], "peer": [peer, [[1199.0, 4.0]]]}
    text, compared = time_to.time_to_goals((5, 10), "food", curves, {"peer": 1200})
    assert compared["peer, 10 food"] == [100 / 4.1, 1200 / 4.1]
    first, second = (cells(block) for block in text.split("\n\n"))
    assert first["peer"] == ["50.0 · > 1,200", "100.0 · > 1,200"] and second["peer"][0].startswith("> ")


def test_values_of_a_curve() -> None:
    curve = [[64.0, 0.25], [124.0, 0.5]]
    assert [mario.value_after(curve, minutes) for minutes in (1, 2, 15)] == [0.25, 0.5, 0.5]
    assert mario.first_reading_above(curve, 0.25) == "2.1" and mario.first_reading_above(curve, 1) == "–"


@pytest.mark.parametrize("cores, bound", [(2, 40_000), (1, 1 / (1 / 50_000 + 1 / 40_000))])
def test_workers_and_trainer_share_the_cores(monkeypatch, cores, bound) -> None:
    monkeypatch.setattr(harness, "CORES", cores)
    args = metta_parts.metta_args("--vec-env subproc --num-workers 1 --threads 1", "cpu")
    alone = {"games": 50_000.0, "acting": 40_000.0}
    assert metta_speed.possible_rate(alone, args, CPU) == pytest.approx(bound)


def test_wilson_interval() -> None:
    assert ppo_snake.wilson_interval(81 / 263, 263) == pytest.approx((0.2553, 0.3662), abs=1e-4)
    assert ppo_snake.wilson_interval(0, 20) == pytest.approx((0, 0.1611), abs=1e-4)
    assert ppo_snake.wilson_interval(1, 20) == pytest.approx((0.8389, 1), abs=1e-4)


def test_operations_of_an_update() -> None:
    """The first layer has no gradient to pass down, and the embedding of the food is no matmul."""
    weights = {
        "features.weight": torch.zeros(7, 5),
        "food.weight": torch.zeros(9, 7),
        "actor.weight": torch.zeros(3, 7),
    }
    assert snake.least_work(10, weights)[0] == 2 * 10 * (4 * 35 + 5 * 21)
    assert snake.least_work(10, weights, forward_passes=1)[0] == 2 * 10 * (2 * 35 + 3 * 21)


def test_operations_of_the_arena_s_network() -> None:
    flags = ["--num-envs 2 --hidden-size 32 --rnn mingru", "--num-envs 2 --hidden-size 32", "--num-envs 2"]
    mingru, none, wide = metta_parts.metta_mflops(flags, "cpu")
    assert 1e6 * (mingru - none) == pytest.approx(2 * 32 * 32)
    tokens = (1e6 * none - 2 * 32 * (32 + 26)) / (2 * 32)  # the rest is the embedding bag
    assert 10 < tokens < 200 and 1e6 * wide == pytest.approx(2 * 128 * (tokens + 128 + 26))


def test_the_first_calls_are_no_part_of_a_latency() -> None:
    calls = []

    def work() -> None:
        time.sleep(0.1 if len(calls) < 3 else 0.001)
        calls.append(0)

    mean, p95, p99 = metta_parts.latency_percentiles(work, 0, "cpu")
    assert len(calls) == 60 and 1 <= mean <= p99 and p95 <= p99 < 50

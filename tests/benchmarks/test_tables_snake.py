"""The tables of dqn_snake.py and those over all scripts."""

import re

import pytest
import torch
import tyro
from benchmark_helpers import CPU, SCRIPTS

import dqn_snake
from benchmarks import all_scripts, games, harness, sb3_peers, snake
from benchmarks.harness import Options


def test_the_parts_of_a_snake_run_are_measured_alone() -> None:
    assert min(snake.act_rates((1, 8), 0.01, "cpu")) > 10
    assert sb3_peers.sb3_act_rate(2, 0.01, "cpu") > 10 and min(games.snake_rates((8,), 0.01, "cpu")) > 10


@pytest.mark.parametrize("game", games.GYMNASIUM_GAMES)
def test_gymnasium_measures_every_game(game: str) -> None:
    assert min(games.gymnasium_rates(game, (6, 12), 0.01)) > 10


def test_switches_are_flags_that_the_script_knows(monkeypatch) -> None:
    asked = []
    result = {name: 1.0 for name in "env_steps_per_second updates_per_second samples_per_second replay_ratio".split()}
    result |= {"precision": "float32", "sdpa": None, "compiled": True, "cudagraph": False, "peak_memory_gib": 1.0}

    def run(flags: str, options: Options, script: str = "dqn_snake.py") -> dict:
        asked.append((script, flags))
        return result

    monkeypatch.setattr(harness, "run", run)
    monkeypatch.setattr(harness, "free_gib", lambda device: 100)
    for device in (CPU, torch.device("cuda")):
        text, _ = snake.switches(Options(repeats=1), device)
        all_scripts.scaling(Options(repeats=1), device)
    assert "| `--compile --max-seconds 60` | 1 (1–1) | 1.00 (1.00–1.00) | 1.00 | float32, compiled |" in text
    assert {file for file, _ in asked} == set(SCRIPTS)
    for file, flags in set(asked):
        SCRIPTS[file].fill_defaults(tyro.cli(SCRIPTS[file].Args, args=flags.split()), CPU)


def test_what_would_not_fit_is_not_started(monkeypatch) -> None:
    asked = []

    def run(flags: str, options: Options, script: str) -> dict:
        asked.append(f"{script} {flags}")
        size = int(re.search(r"--(?:envs-per-collector|agents|num-envs|batch-size|board) (\d+)", flags)[1])
        keys = "env_steps_per_second updates_per_second samples_per_second replay_ratio".split()
        return dict.fromkeys(keys, 1.0) | {"peak_memory_gib": 1 + size / 1024}

    monkeypatch.setattr(harness, "run", run)
    monkeypatch.setattr(harness, "free_gib", lambda device: 10.0)
    text, _ = all_scripts.scaling(Options(repeats=1), CPU)
    assert "| `dqn_snake.py --num-envs 65536` | too little memory |" in text
    assert "| `dqn_snake.py --num-envs 4096` | 1 (1–1) |" in text and not any("envs 65536" in flags for flags in asked)


def test_the_benchmark_times_the_matmuls_of_an_update() -> None:
    torch.set_num_threads(1)  # two would wait for each other when other tests have a core
    args = dqn_snake.fill_defaults(dqn_snake.Args(device="cpu"), CPU)
    weights = dqn_snake.QNetwork(args, CPU).state_dict()
    seconds = [snake.matmul_seconds(batch, weights, CPU) for batch in (16, 1024)]
    assert 0 < 10 * seconds[0] < seconds[1]
    assert snake.matmul_seconds(1024, weights, CPU, forward_passes=1) < snake.matmul_seconds(1024, weights, CPU, 6)


def test_the_benchmark_counts_the_operations_of_an_update() -> None:
    """By hand: the first layer has no gradient to hand down, and the lookup of the food is no matmul."""
    weights = {"features.weight": torch.zeros(7, 5), "food.weight": torch.zeros(9, 7)}
    weights["actor.weight"] = torch.zeros(3, 7)
    of_dqn, _ = snake.least_work(10, weights)
    of_ppo, _ = snake.least_work(10, weights, forward_passes=1)
    assert of_dqn == 2 * 10 * (4 * 35 + 5 * 21)
    assert of_ppo == 2 * 10 * (2 * 35 + 3 * 21)

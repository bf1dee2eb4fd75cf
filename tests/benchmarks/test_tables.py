"""Every table's command lines are accepted by their scripts."""

from contextlib import suppress

import pytest
import torch
from benchmark_helpers import CPU, CUDA, NAMES, NEED_METTAGRID, parse

from benchmarks import harness, report
from benchmarks.harness import Options


class NotMeasured(Exception):
    """A table asked for something that only a real measurement can give."""


class Summary(dict):
    """Summary of a run in which every number is 1."""

    def __missing__(self, key: str) -> float:
        return 1.0


def run(flags: str, options: Options, script: str = "dqn_snake.py", ranks: int = 1) -> Summary:
    parse(script, flags)
    rates = dict.fromkeys(["env_steps_per_second", "samples_per_second", "replay_ratio"], 1.0)
    known = {"flags": flags, "run": "none", "precision": "float32", "sdpa": "math", "train_fraction": 0.5}
    return Summary(rates | known)


def in_subprocess(function, one_core: bool = False, **arguments):
    if function.__module__.endswith(("metta_parts", "players")):
        for flags in arguments.get("variants", [arguments.get("flags", "")]):
            parse("ppo_metta.py", flags)
    raise NotMeasured


def alternate(options: Options, calls: dict) -> dict:
    found = {}
    for name, call in calls.items():
        with suppress(NotMeasured):
            found[name] = [call()]
    if len(found) < len(calls):
        raise NotMeasured
    return found


def nothing(*_, **__):
    raise NotMeasured


@pytest.mark.parametrize("device", [CPU, CUDA], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_scripts_accept_the_flags_of_every_table(monkeypatch, name, device) -> None:
    if name in NEED_METTAGRID:
        pytest.importorskip("mettagrid")
    for function in (run, in_subprocess, alternate):
        monkeypatch.setattr(harness, function.__name__, function)
    for function in ("harness.mean_scalars", "snake.saved_weights", "ppo_snake.saved_weights", "ranks.num_weights"):
        monkeypatch.setattr(f"benchmarks.{function}", nothing)
    monkeypatch.setattr(harness, "eval_curve", lambda folder: [[0.0, 0.0]])
    monkeypatch.setattr(harness, "wall_clock_curve", lambda folder, tag: [[700.0, 2000.0]])
    monkeypatch.setattr(harness, "free_gib", lambda device: 1000.0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr("benchmarks.games.missing_rom", lambda: "")
    for options in (Options(name, fast=True), Options(name, repeats=1)):
        with suppress(NotMeasured):
            report.TABLES[name].measure(options, device)

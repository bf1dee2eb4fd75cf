"""The pages: every table and figure of README.md and benchmarks.md is made again from benchmarks/*.json.

    python tests/test_pages.py  # write the tables of benchmarks.md again, after a change of how they are written
"""

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import benchmark
import ppo_metta
from benchmark import Options

CPU, ROOT = torch.device("cpu"), Path(__file__).parent.parent


def results(name: str) -> dict[str, Any]:
    return json.loads((ROOT / "benchmarks" / f"{name}.json").read_text())


# ------------------------------------------------------------------------------------------------ the tables


def label(key: Any) -> str:
    """A key as it stands in a file of results."""
    return ", ".join(map(str, key)) if isinstance(key, tuple) else str(key)


def in_turn(*rounds: dict) -> Callable:
    """In place of `benchmark.in_turn`: what was measured then, one dict a call."""
    waiting = list(rounds)

    def recorded(options: Options, calls: dict) -> dict:
        keys = {label(key): key for key in calls}
        return {keys.get(key, key): values for key, values in waiting.pop(0).items()}

    return recorded


def runs(*summaries: dict) -> Callable:
    """In place of `benchmark.run`: the summary that the same flags had then."""
    by_flags = {" ".join(one["flags"].split()): one for one in summaries}
    return lambda flags, options, script="dqn_snake.py": by_flags[" ".join(flags.split())]


def curves(found: dict, ours: list[str], seeds: int) -> dict[str, Callable]:
    """In place of runs of ours and of SB3: the curves that they had then."""
    waiting = [found["curves"][name][seed] for seed in range(seeds) for name in ours]

    def theirs(function: Callable, seed: int, name: str = "", tuned: bool = False, **_: Any) -> list:
        name = name or f"SB3's PPO, {'our settings' if tuned else 'defaults'}"
        return found["curves"][name][seed - 1]

    def plans(*_: Any) -> tuple[dict, dict]:
        return found["plans"], {name: end for name, end in found["ends"].items() if name not in ours}

    return {
        "run": lambda *_: {"run": "none"},
        "curve": lambda folder: waiting.pop(0),
        "readings": lambda run, tag: waiting.pop(0),
        "sb3_plans": plans,
        "apart": theirs,
    }


def recorded(name: str, found: dict) -> dict[str, Callable]:
    """What takes the place of functions of benchmark.py, so that a table is made of what was measured then."""
    if name in ("env", "act", "metta-env"):
        return {"in_turn": in_turn(found["rates"])}
    if name in ("train", "switches", "mario-switches"):
        return {"in_turn": in_turn(found["runs"])}
    if name == "update":
        batches = found["batches"]
        rounds = {batch: one["runs"] for batch, one in batches.items()} | {"ceiling": found["ceiling"]}
        return {
            "in_turn": in_turn(rounds),
            "matmul_seconds": lambda batch, *_: batches[str(batch)]["matmul_seconds"],
            "least_work": lambda batch, *_: batches[str(batch)]["flops_and_bytes"],
        }
    if name == "scaling":
        rounds = [{str(cell["value"]): cell["runs"]} for cell in found["cells"]]
        return {"in_turn": in_turn(*rounds), "free_gib": lambda device: math.inf}
    if name == "learn":
        return {"run": runs(*found["runs"]), "curve": lambda folder: []}
    if name == "sb3-speed":
        cases = []
        for rates in found["rates"].values():
            cases.append({who: [{"env_steps_per_second": rate} for rate in each] for who, each in rates.items()})
        return {"in_turn": in_turn(*cases)}
    if name == "sb3-learn":
        ours = [one for pair in zip(found["runs"]["ours"], found["runs"]["ours, `--compile`"]) for one in pair]
        theirs = list(found["runs"]["SB3"])
        keys = "wall_seconds", "eval_score_mean"
        return {"run": lambda *_: dict(zip(keys, ours.pop(0))), "apart": lambda *_, **__: theirs.pop(0)}
    if name == "sweep":
        return {"run": runs(*(cell for cell in found["cells"] if "flags" in cell))}
    if name == "metta-hearts":
        games = {flags: game for game, flags in (benchmark.ARENAS | {"MettaGrid": benchmark.REAL}).items()}
        players = {benchmark.random_hearts: "random", benchmark.scripted_hearts: "scripted"}
        return {"apart": lambda player, flags, agent_episodes: found["hearts"][players[player]][games[flags]]}
    if name.startswith("metta-learn"):
        hearts = {benchmark.random_hearts: found["random"], benchmark.scripted_hearts: found["scripted"]}
        summaries = [one for each in found["runs"].values() for one in each]
        return {"run": runs(*summaries), "apart": lambda player, **_: hearts[player]}
    if name == "metta-speed":
        mflops = found["mflop"]
        rounds = in_turn(found["runs"] | {"games": found["games"]})
        return {"in_turn": rounds, "apart": lambda _, variants, device: [mflops[flags] for flags in variants]}
    if name == "metta-peer":
        return {"in_turn": in_turn(found["runs"]), "apart": lambda _, threads, **__: found["trials"][str(threads)]}
    if name == "metta-subproc":
        rounds = {}
        for flags, parts in found["settings"].items():
            rounds |= {f"{part}, {flags}": parts[part] for part in ("alone", "rollouts", "both")}
        return {"in_turn": in_turn(rounds), "needs_mettagrid": lambda table: None}
    if name == "metta-presets":
        return {"run": runs(*found["runs"])}
    if name == "diagnose":
        rounds = {}
        for flags, parts in found["switches"].items():
            rounds |= {f"run, {flags}": parts["runs"], f"parts, {flags}": parts["parts"]}
        return {"in_turn": in_turn(rounds)}
    if name == "mario-env":
        players = found["players"]
        return {"in_turn": in_turn(found["rates"]), "apart": lambda _, player, games: players[player]}
    if name == "mario-async":
        trial = {"replay_ratio": found["asked"], "train_fraction": 0.5}
        return {"in_turn": in_turn(found["runs"]), "run": lambda *_: trial}
    if name == "mario-learn":
        by_run = {one["run"]: one["curves"] for one in found["runs"]}
        readings = {"readings": lambda run, tag: by_run[run][tag]}
        return readings | {"run": runs(*found["runs"]), "apart": lambda *_, **__: found["random"]}
    if name == "mario-real":
        readings = {"readings": lambda run, tag: found["curve"]}
        return readings | {"run": runs(found["run"]), "apart": lambda *_, **__: found["random"]}
    seeds = {"time-to-score": 3, "time-to-hearts": 1, "time-to-distance": 1}[name]
    return curves(found, [who for who in found["curves"] if who.startswith("ours")], seeds)


def again(name: str, monkeypatch) -> str:
    """The section of a table, made of its file of results."""
    found = results(name)
    for function, stand_in in recorded(name, found).items():
        monkeypatch.setattr(benchmark, function, stand_in)
    monkeypatch.setattr(benchmark, "no_real_game", lambda: "")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(ppo_metta, "CORES", 2)
    numbers = dict(re.findall(r"--(repeats|seconds) (\d+)", found["command"]))
    options = Options(name, "cpu", **{flag: int(number) for flag, number in numbers.items()})
    text, _ = benchmark.TABLES[name](options, CPU)
    return benchmark.section(found, text)


NEEDS = {"metta-subproc": "mettagrid", "metta-learn-real": "mettagrid", "metta-hearts": "mettagrid"}


@pytest.mark.parametrize("name", benchmark.TABLES)
def test_every_table_is_what_its_results_say(name: str, monkeypatch) -> None:
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    page = (ROOT / "benchmarks.md").read_text()
    section = re.search(rf"<!-- {name} cpu -->\n(.*?)\n<!-- end -->", page, re.DOTALL)[1]
    assert section == again(name, monkeypatch)


if __name__ == "__main__":
    for table in benchmark.TABLES:
        with pytest.MonkeyPatch.context() as patch:
            section_again = again(table, patch)
        benchmark.write_section(table, CPU, section_again)

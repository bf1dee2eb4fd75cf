"""Every table is generated again from its result file, and every command on a page is valid.

PYTHONPATH=. python tests/benchmarks/test_pages.py  # writes the tables again after a change of their format
"""

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import tyro
from benchmark_helpers import CPU, NAMES, NEED_METTAGRID, PAGES, PROJECT, page_of, results

import benchmark
import ppo_metta
from benchmarks import report
from benchmarks.harness import SUITES, Options
from benchmarks.metta_parts import ARENAS, REAL_METTAGRID
from benchmarks.players import arena_games, random_hearts, scripted_hearts


def alternate(*rounds: dict) -> Callable:
    """Replaces `harness.alternate`: recorded results, one dict per call."""
    waiting = list(rounds)

    def recorded(options: Options, calls: dict) -> dict:
        keys = {", ".join(map(str, key)) if isinstance(key, tuple) else str(key): key for key in calls}
        return {keys.get(key, key): values for key, values in waiting.pop(0).items()}

    return recorded


def runs(*summaries: dict) -> Callable:
    """Replaces `harness.run`: the recorded summary of the same flags."""
    by_flags = {" ".join(one["flags"].split()): one for one in summaries}
    return lambda flags, options, script="dqn_snake.py": by_flags[" ".join(flags.split())]


def curves(found: dict, ours: list[str]) -> dict[str, Callable]:
    """Replaces runs of ours and of SB3: recorded curves."""
    seeds = zip(*(found["curves"][name] for name in ours))
    waiting = [curve for one_seed in seeds for curve in one_seed]

    def theirs(function: Callable, seed: int, name: str = "", tuned: bool = False, **_: Any) -> list:
        name = name or f"SB3's PPO, {'our settings' if tuned else 'defaults'}"
        return found["curves"][name][seed - 1]

    def plans(*_: Any) -> tuple[dict, dict]:
        return found.get("plans"), {name: end for name, end in found["ends"].items() if name not in ours}

    return {
        "harness.run": lambda *_: {"run": "none"},
        "harness.eval_curve": lambda folder: waiting.pop(0),
        "harness.wall_clock_curve": lambda folder, tag: waiting.pop(0),
        "sb3_peers.plan_agents": plans,
        "harness.in_subprocess": theirs,
    }


def recorded(name: str, found: dict) -> dict[str, Callable]:
    """Replacements of the benchmark's functions that return the recorded results of a table."""
    if name in ("env", "act", "metta-env"):
        return {"harness.alternate": alternate(found["rates"])}
    if name in ("smoke", "train", "bf16", "busy", "switches", "mario-switches"):
        return {"harness.alternate": alternate(found["runs"])}
    if name.startswith("snake-"):
        return {"snake_recipe.two_at_once": lambda *_: found["runs"]}
    if name == "update":
        batches = found["batches"]
        rounds = {batch: one["runs"] for batch, one in batches.items()} | {"ceiling": found["ceiling"]}
        return {
            "harness.alternate": alternate(rounds),
            "snake.saved_weights": lambda *_: {},
            "snake.matmul_seconds": lambda batch, *_: batches[str(batch)]["matmul_seconds"],
            "snake.least_work": lambda batch, *_: batches[str(batch)]["flops_and_bytes"],
        }
    if name == "scaling":
        rounds = [{str(cell["value"]): cell["runs"]} for cell in found["cells"]]
        return {"harness.alternate": alternate(*rounds), "harness.free_gib": lambda device: math.inf}
    if name in ("learn", "metta-presets", "ppo-snake-learn", "ppo-snake-learn-600", "ppo-snake-6x6", "ppo-snake-20x20"):
        return {"harness.run": runs(*found["runs"]), "harness.eval_curve": lambda folder: []}
    if name == "ppo-snake-speed":
        games = found["games"]
        rounds = {width: one["runs"] for width, one in games.items()} | {"ceiling": found["ceiling"]}
        by_minibatch = {2 * int(width): one for width, one in games.items()}
        return {
            "harness.alternate": alternate(rounds),
            "ppo_snake.saved_weights": lambda *_: {},
            "ppo_snake.matmul_seconds": lambda batch, *_, **__: by_minibatch[batch]["matmul_seconds"],
            "ppo_snake.least_work": lambda batch, *_, **__: (by_minibatch[batch]["flops"], 0),
        }
    if name == "ranks":
        sizes = list(found["sizes"])
        return {
            "harness.alternate": alternate(found["runs"]),
            "harness.in_subprocess": lambda _, ranks, **__: found["all_reduce"][str(ranks)],
            "ranks.num_weights": lambda folder, network: sizes.pop(0),
        }
    if name == "sb3-speed":
        cases = []
        for rates in found["rates"].values():
            cases.append({who: [{"env_steps_per_second": rate} for rate in each] for who, each in rates.items()})
        return {"harness.alternate": alternate(*cases)}
    if name == "sb3-learn":
        ours = [one for pair in zip(found["runs"]["ours"], found["runs"]["ours, `--compile`"]) for one in pair]
        theirs = list(found["runs"]["SB3"])
        keys = "wall_seconds", "eval_score_mean"
        return {
            "harness.run": lambda *_: dict(zip(keys, ours.pop(0))),
            "harness.in_subprocess": lambda *_, **__: theirs.pop(0),
        }
    if name == "sweep":
        return {"harness.run": runs(*(cell for cell in found["cells"] if "flags" in cell))}
    if name == "metta-hearts":
        games = {flags: game for game, flags in (ARENAS | {"MettaGrid": REAL_METTAGRID}).items()}
        hearts = {random_hearts: found["hearts"]["random"], scripted_hearts: found["hearts"]["scripted"]}
        return {"harness.in_subprocess": lambda player, flags, **_: hearts[player][games[flags]]}
    if name.startswith("metta-learn"):
        played = [one for games in found.get("played", {}).values() for one in games]
        hearts = {random_hearts: [found["random"]], scripted_hearts: [found["scripted"]], arena_games: played}
        summaries = [one for each in found["runs"].values() for one in each]
        return {"harness.run": runs(*summaries), "harness.in_subprocess": lambda player, **_: hearts[player].pop(0)}
    if name == "metta-speed":
        mflops = found["mflop"]
        return {
            "harness.alternate": alternate(found["runs"] | {"games": found["games"]}),
            "harness.in_subprocess": lambda _, variants, device: [mflops[flags] for flags in variants],
        }
    if name == "metta-peer":
        return {
            "harness.alternate": alternate(found["runs"]),
            "harness.in_subprocess": lambda _, threads, **__: found["trials"][str(threads)],
        }
    if name == "metta-subproc":
        rounds = {}
        for flags, parts in found["settings"].items():
            rounds |= {f"{part}, {flags}": parts[part] for part in ("alone", "rollouts", "both")}
        return {"harness.alternate": alternate(rounds), "metta.check_mettagrid": lambda table: None}
    if name == "diagnose":
        rounds = {}
        for flags, parts in found["switches"].items():
            rounds |= {f"run, {flags}": parts["runs"], f"parts, {flags}": parts["parts"]}
        return {"harness.alternate": alternate(rounds)}
    if name == "mario-env":
        players = found["players"]
        return {
            "harness.alternate": alternate(found["rates"]),
            "harness.in_subprocess": lambda _, player, games: players[player],
        }
    if name == "mario-async":
        trial = {"replay_ratio": found["asked"], "train_fraction": 0.5}
        return {"harness.alternate": alternate(found["runs"]), "harness.run": lambda *_: trial}
    if name.startswith("mario-learn"):
        by_run = {one["run"]: one["curves"] for one in found["runs"]}
        return {
            "harness.wall_clock_curve": lambda folder, tag: by_run[folder.name][tag],
            "harness.run": runs(*found["runs"]),
            "harness.in_subprocess": lambda *_, **__: found["random"],
        }
    if name == "mario-real":
        by_run = {one["run"]: one for one in found["runs"]}
        curve_of = {"eval/distance_mean": "curve", "eval/flags": "flag_curve"}
        return {
            "harness.run": runs(*found["runs"]),
            "harness.wall_clock_curve": lambda folder, tag: by_run[folder.name][curve_of[tag]],
            "harness.in_subprocess": lambda *_, run=None, sticky=0, **__: (
                by_run[Path(run).name]["sticky_ends" if sticky else "ends"] if run else found["random"]
            ),
        }
    return curves(found, [who for who in found["curves"] if not who.startswith("SB3")])


def again(name: str, monkeypatch) -> str:
    """The section of a table, from its result file."""
    found = results(name)
    for function, stand_in in recorded(name, found).items():
        monkeypatch.setattr(f"benchmarks.{function}", stand_in)
    monkeypatch.setattr("benchmarks.games.missing_rom", lambda: "")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(ppo_metta, "CORES", 2)
    monkeypatch.setattr("benchmarks.harness.CORES", 2)
    numbers = dict(re.findall(r"--(repeats|seconds) (\d+)", found["command"]))
    options = Options(name, "cpu", **{flag: int(number) for flag, number in numbers.items()})
    text, _ = report.TABLES[name].measure(options, CPU)
    return report.section(found, text)


@pytest.mark.parametrize("name", NAMES)
def test_every_table_is_that_of_its_results(name: str, monkeypatch) -> None:
    if name in NEED_METTAGRID:
        pytest.importorskip("mettagrid")
    section = re.search(rf"<!-- {name} cpu -->\n(.*?)\n<!-- end -->", page_of(name), re.DOTALL)[1]
    assert section == again(name, monkeypatch)


def test_the_commands_of_the_benchmark_are_valid() -> None:
    pages = benchmark.__doc__ + "".join(path.read_text() for path in PAGES)
    commands = re.findall(r"python benchmark\.py([^#`\n]*)", pages)
    assert len(commands) > 30
    for flags in commands:
        if "--help" not in flags:
            tyro.cli(Options, args=flags.split())


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_every_link_leads_to_a_file(path) -> None:
    for target in re.findall(r"\]\((?!https:)([^)#]+)\)", path.read_text()):
        assert (path.parent / target).exists(), target


def test_the_figures_of_why_it_is_fast_are_on_its_pages() -> None:
    """At most ten rows per script, and every number of a row is on the page it names."""
    text = (PROJECT / "benchmarks" / "pages" / "why-it-is-fast.md").read_text()
    for section in text.split("\n## ")[1:]:
        rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| ")][2:]
        assert 0 < len(rows) <= 10
        for _, measured, link, *_ in rows:
            page = (PROJECT / "benchmarks" / "pages" / re.search(r"\]\((.*)\)", link)[1]).read_text()
            for figure in re.findall(r"\d[\d,.]*", measured.replace("bf16", "").replace("fp32", "")):
                figure = figure.rstrip(",.")
                assert re.search(rf"(?<![\d,.]){re.escape(figure)}(?![\d]|,\d)", page), (figure, measured)


if __name__ == "__main__":
    for table in SUITES["all"]:
        with pytest.MonkeyPatch.context() as patch:
            section_again = again(table, patch)
        report.write_section(table, CPU, section_again)

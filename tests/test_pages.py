"""The pages: every table and figure of README.md and benchmarks.md is made again from benchmarks/*.json.

python tests/test_pages.py  # write the tables of benchmarks.md again, after a change of how they are written
"""

import json
import math
import re
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import tyro

import benchmark
import dqn_snake
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
    if name in ("train", "bf16", "busy", "switches", "mario-switches"):
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
        by_run = {one["run"]: one["curve"] for one in found["runs"]}
        readings = {"readings": lambda run, tag: by_run[run]}
        return readings | {"run": runs(*found["runs"]), "apart": lambda *_, **__: found["random"]}
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


# ------------------------------------------------------------------------------------------------ the figures


def median(runs: list[dict], key: str = "env_steps_per_second") -> float:
    return statistics.median(one[key] for one in runs)


def hearts(runs: list[dict]) -> float:
    return statistics.mean(one["eval_score_mean"] for one in runs)


def hundreds(value: float) -> str:
    return f"{100 * round(value / 100):,}"


def low_to_high(values: list[float], digits: int = 0) -> str:
    return f"{min(values):.{digits}f} to {max(values):.{digits}f}"


def seconds_to(table: str, who: str, goal: float) -> list[float]:
    return [benchmark.reached(curve, goal) for curve in results(table)["curves"][who]]


def best(table: str, who: str) -> float:
    """The best evaluation of anybody's runs."""
    return max(value for curve in results(table)["curves"][who] for _, value in curve)


def ratio(table: str, to: str) -> float:
    return statistics.median(results(table)["ratios"][to])


def gain(runs: dict[str, list[dict]], switch: str, beside: str) -> float:
    """How many times the transitions learned from per second, within a round."""
    rates = [[one["samples_per_second"] for one in runs[name]] for name in (switch, beside)]
    return statistics.median(benchmark.ratios(*rates))


def snake_figures() -> list[str]:
    """What README.md says of Snake, each phrase made of results."""
    phrases = []
    learned = {
        "1 minute": "--max-seconds 60",
        "2 minutes": "--max-seconds 120",
        "10 minutes": "--max-seconds 600",
    }
    best_games = {}
    for after, flags in learned.items():
        runs = [one for one in results("learn")["runs"] if one["flags"].split(" --seed")[0] == flags]
        assert len(runs) == 3 and {one["precision"] for one in runs} == {"float32"}
        best_games[after] = {one["eval_score_max"] for one in runs}
        phrases.append(f"| {after} | {hearts(runs):.1f} food")
        if after == "2 minutes":
            phrases.append(f"| `dqn_snake.py`, playing and learning | {hundreds(median(runs))} env steps/s |")
    assert best_games["10 minutes"] == {97}
    phrases.append(" of 97 |")
    assert max(best("time-to-score", f"SB3's {who}, defaults") for who in ("DQN", "PPO")) < 5
    seconds = results("time-to-score")["ends"]["SB3's PPO, defaults"]
    phrases.append(f"Stable-Baselines3's DQN and PPO: below 5 after {seconds // 60} minutes")
    speeds = {name: statistics.median(values) for name, values in results("sb3-speed")["ratios"].items()}
    one = low_to_high([times for name, times in speeds.items() if ", 1, --compile" in name], 1)
    phrases.append(f"one game | {one} times Stable-Baselines3's DQN |")
    widest = statistics.median(list(zip(*results("env")["rates"]["SnakeBatch"]))[-1])
    width = results("env")["widths"][-1]
    phrases.append(f"Snake alone, {width:,} games at once | {widest / 1e6:.1f} million env steps/s |")
    return phrases


def machine_figures() -> list[str]:
    """What README.md says of bf16."""
    runs = results("bf16")["runs"]
    assert "AMD EPYC" in results("bf16")["hardware"]
    rates = []
    for case in ("dqn_snake.py --bf16", "dqn_snake.py"):
        rates.append([one["samples_per_second"] / one["train_fraction"] for one in runs[case]])
    return [f"bf16 units | {statistics.median(benchmark.ratios(*rates)):.2f} times the samples/s |"]


def metta_figures() -> list[str]:
    """What README.md says of the arena."""
    phrases = []
    rows = {
        "--rnn none": ("arena", "--rnn none"),
        "--env-id MettaNavigation-v0": ("navigation", benchmark.ARENAS["navigation"]),
        "--env-id mettagrid": ("real", benchmark.REAL),
    }
    for flags, (name, key) in rows.items():
        found = results(f"metta-learn-{name}")
        runs = found["runs"][key] if isinstance(found["runs"], dict) else found["runs"]
        assert len(runs) == 3
        others = f"a scripted player {found['scripted']:.1f}, " if found["scripted"] else ""
        others += f"random play {found['random']:.1f}"
        phrases.append(f"| `python ppo_metta.py {flags}` | 10 minutes | {hearts(runs):.1f} hearts | {others} |")
    ours, batched, book = (hundreds(median(runs)) for runs in results("metta-peer")["runs"].values())
    phrases.append(f"| {ours} agent steps/s | Stable-Baselines3's PPO: {book}, and {batched} with our arena |")
    return phrases


def mario_figures() -> list[str]:
    """What README.md says of Mario."""
    learned = results("mario-learn")
    assert {one["flags"].split(" --seed")[0] for one in learned["runs"]} == {"--max-seconds 900"}
    assert len(learned["runs"]) == 3
    assert {(one["eval_flags"], one["eval_episodes"]) for one in learned["runs"]} == {(1.0, 100)}
    assert learned["random"][0] == 0
    real = results("mario-real")
    assert {one["flags"].split(" --eval")[0] for one in real["runs"]} == {"--env-id SuperMarioBros --max-seconds 1200"}
    assert len(real["runs"]) == 3 and real["random"][0] == 0
    reached = low_to_high([100 * one["eval_flags"] for one in real["runs"]])
    return [
        "| 15 minutes | the flag in 100 % of unseen levels | random play 0 % |",
        f"| 20 minutes | the flag of the real 1-1 in {reached} % of games | random play 0 % |",
        f"| {ratio('mario-async', 'in turn'):.2f} times one thread in turn |",
    ]


def benchmark_figures() -> list[str]:
    """What the text around the tables of benchmarks.md says."""
    phrases = []
    env, xeon = results("env"), results("env-xeon")
    milliseconds = {}
    for who in ("SnakeBatch", "jumanji"):
        rates = zip(*env["rates"][who])
        milliseconds[who] = [1000 * width / statistics.median(found) for width, found in zip(env["widths"], rates)]
    one, few, many = milliseconds["SnakeBatch"][:3]
    phrases.append(f"which take {one:.2f} ms for one game, {few:.2f} ms for 128 and {many:.2f} ms for 1,024")
    one, few = milliseconds["jumanji"][:2]
    phrases.append(f"one compiled function, {one:.2f} ms for one game and {few:.2f} ms for 128")
    five = min(width for width in env["widths"] if ratio("env", f"jumanji, {width:,} games") >= 5)
    phrases.append(f"Five times jumanji is reached from {five:,} games on")
    widest = statistics.median(list(zip(*xeon["rates"]["SnakeBatch"]))[-1])
    times = benchmark.spread(xeon["ratios"]["jumanji, best width of each"], 1)
    phrases.append(
        f"{widest / 1e6:.1f} million steps per second of `SnakeBatch` at 65,536 games, at its best width {times} "
    )

    train = results("train")["runs"][""]
    step = 128_000 / median(train)
    update = step * median(train, "train_fraction")
    phrases.append(f"of the {step:.1f} ms that 128 steps of ours take, {update:.1f} are the update")
    recipe, defaults = (ratio("train-xeon", f"SB3's DQN, {settings}") for settings in ("our recipe", "defaults"))
    phrases.append(f"{recipe:.1f} times SB3 with our recipe, and {defaults:.1f} times SB3 at its defaults")

    switches, larger = results("switches")["runs"], "--num-envs 512 --batch-size 1024"
    compiled = [name for name in switches if name.startswith("--compile") and larger not in name]
    gains = [gain(switches, name, "") for name in compiled]
    large = gain(switches, f"--compile --max-seconds 60 {larger}", larger)
    phrases.append(
        f"they make {low_to_high(gains, 2)} times the default's ({large:.2f} with the larger games and batch)"
    )
    learn = {one["flags"]: one["samples_per_second"] for one in results("learn")["runs"]}
    times = learn["--max-seconds 600 --seed 1"] / learn["--max-seconds 600 --network attention --seed 1"]
    phrases.append(f"it learns from one transition where the MLP learns from {times:.0f} (first table)")

    cells = {(cell["script"], cell["flag"], cell["value"]): cell["runs"] for cell in results("scaling")["cells"]}
    games = [median(cells["dqn_snake.py", "--num-envs", number]) for number in (1, 256)]
    batches = [median(cells["dqn_snake.py", "--batch-size", batch]) for batch in (32, 512)]
    phrases.append(
        f"from 1 to 256 games Snake gets {games[1] / games[0]:.0f} times as many steps, from batch 32 to 512 "
    )
    phrases.append(f"{batches[1] / batches[0]:.1f} times")
    wide = [
        ("--num-envs", 256),
        ("--num-envs", 4096),
        ("--num-envs", 65536),
        ("--batch-size", 512),
        ("--batch-size", 8192),
    ]
    limits = [median(cells["dqn_snake.py", *cell], "samples_per_second") for cell in wide]
    phrases.append(f"the limit, {hundreds(min(limits))} to {hundreds(max(limits))} transitions per second at any width")
    huge = median(cells["dqn_snake.py", "--batch-size", 65536], "samples_per_second")
    phrases.append(f"batch 65,536 makes {huge / limits[-1]:.2f} times as many as 8,192")
    small, large = (median(cells["dqn_snake.py", "--board", board]) for board in ("10x10", "32x32"))
    phrases.append(
        f"32x32 has {32 * 32 / 100:.0f} times the cells of 10x10 and costs {small / large:.0f} times as much"
    )
    arenas = max(median(runs) for (_, flag, _), runs in cells.items() if "--agents" in flag)
    phrases.append(f"up to {round(arenas, -3):,.0f} agent steps per second")

    dqn, ppo = (best("time-to-score", f"SB3's {who}, defaults") for who in ("DQN", "PPO"))
    sooner = ratio("time-to-score", "SB3's DQN, defaults, 10 food")
    phrases.append(f"comes to 5 food in 20 minutes (their best evaluations are {dqn:.1f} and {ppo:.1f})")
    phrases.append(f"at 10 food more than {math.floor(sooner)} times sooner")
    tuned = {}
    for goal in (10, 20, 30):
        names = [f"SB3's {who}, our view and gamma, {goal} food" for who in ("DQN", "PPO")]
        tuned[goal] = [ratio("time-to-score", name) for name in names]
    assert max(tuned[10]) < 5 < min(tuned[20] + tuned[30])
    phrases.append("five times sooner is reached at 20 and 30 food, not at 10**")
    phrases.append(f"({tuned[10][0]:.1f} and {tuned[10][1]:.1f}), where ours is after four or five seconds")

    scores = [[score for _, score in runs] for runs in results("sb3-learn")["runs"].values()]
    means, errors = (
        [statistics.mean(each) for each in scores],
        [statistics.variance(each) / len(each) for each in scores],
    )
    apart = [abs(means[i] - means[j]) / (errors[i] + errors[j]) ** 0.5 for i, j in ((0, 1), (0, 2), (1, 2))]
    phrases.append(
        f"Eager's mean is {apart[0]:.1f} and {apart[1]:.1f} standard errors of the difference above the others, theirs "
        f"{apart[2]:.1f} apart"
    )
    rates = {
        (cell["configuration"], cell["batch"]): cell.get("samples_per_second") for cell in results("sweep")["cells"]
    }
    gains = [100 * (rates["fp32 + compile", batch] / rates["fp32", batch] - 1) for batch in (32, 64, 128)]
    phrases.append(f"`--compile` makes {low_to_high(gains)} % more of every batch")

    arena = results("metta-learn-arena")["runs"]
    phrases.append(f"Without memory it makes {median(arena['--rnn none']) / median(arena['']):.2f} times the steps")
    assert all(a["eval_score_mean"] < b["eval_score_mean"] for a, b in zip(arena[""], arena["--rnn none"]))
    found = results("metta-learn-arena-xeon")
    each = "{:.2f}, {:.2f} and {:.2f}".format(*(one["eval_score_mean"] for one in found["runs"]))
    rate = f"{median(found['runs']):,.0f} agent steps per second"
    phrases.append(f"the default made {rate} and had {hearts(found['runs']):.2f} hearts ({each};")
    phrases.append(f"commit {found['commit']})")
    times = ratio("metta-peer", "SB3's PPO, our batched arena")
    phrases.append(f"ours is only {times:.1f} times as fast as SB3's PPO")
    book = results("metta-peer")["runs"]["SB3's PPO, the rule book"]
    spent = [median(book, part) for part in ("games", "rollouts", "learning")]
    phrases.append(f"takes {spent[0]:.0f} of its {sum(spent):.0f} µs")

    xeon = results("mario-real-xeon")
    assert xeon["run"]["eval_flags"] == 0 and xeon["run"]["flags"].split()[3] == "1800"
    assert xeon["run"]["eval_episodes"] == 100 and "2 cores of Intel(R) Xeon(R)" in xeon["hardware"]
    phrases.append(f"reached {xeon['run']['eval_distance_mean']:,.0f} pixels and no flag in 100 games")
    phrases.append(f"(one seed, commit {xeon['commit']})")

    most = best("time-to-hearts", "SB3's PPO, defaults")
    phrases.append(f"never has more than {most:.1f} hearts in ten minutes")
    theirs, none = (
        round(*seconds_to("time-to-hearts", who, 5)) for who in ("SB3's PPO, our settings", "ours, no memory")
    )
    phrases.append(f"({theirs} seconds to 5 hearts, ours {none}, tested every 20)")
    lstm, none = (results("time-to-hearts")["curves"][who][0][-1][1] for who in ("ours", "ours, no memory"))
    phrases.append("later at everything from 2 hearts on")
    phrases.append(f"ends at {lstm:.1f} hearts where `--rnn none` ends at {none:.1f}")

    presets = results("metta-presets")["runs"]
    original, fast = presets[:3], presets[3:]
    assert all("original" in one["flags"] for one in original) and all("ultra-fast" in one["flags"] for one in fast)
    phrases.append(
        f"So {median(fast) / median(original):.2f} times the steps per second are no speed-up here: one update for "
        f"every {median(original, 'updates_per_second') / median(fast, 'updates_per_second'):.0f} of the other, and "
        f"{100 * hearts(fast) / hearts(original):.0f} % of the hearts"
    )

    beside = results("mario-async")
    turns = [beside["ratios"][who] for who in ("in turn", "in turn, 2 threads")]
    phrases.append(f"does {statistics.median(turns[0]):.2f} times the work of one thread that takes turns")
    phrases.append(f"in PyTorch's hands do {statistics.median(benchmark.ratios(*turns)):.2f} times that work")
    phrases.append(f"so beside these the gain is {statistics.median(turns[1]):.2f}")
    busy = median(beside["runs"]["beside each other"], "train_fraction")
    phrases.append(f"The learner is busy for {100 * busy:.0f} % of the run")

    mario = results("mario-switches")["runs"]
    assert max(one["ring_fill"] for runs in mario.values() for one in runs) < 0.25
    assert {one["dropped"] for one in mario["--on-full drop"]} == {0}
    alone = median(mario["--num-collectors 0"]) / median(mario[""])
    phrases.append(f"it learns most, from {100 * alone:.0f} % of the steps")
    phrases.append(f"`--compile` brings {100 * (gain(mario, '--compile --max-seconds 60', '') - 1):.0f} %")

    agents = "DQN, our recipe", "PPO, our network and gamma", "DQN, defaults"
    times = [ratio("time-to-distance", f"SB3's {who}, 1000 pixels") for who in agents]
    phrases.append(
        f"takes {times[0]:.1f} and {times[1]:.1f} times as long to 1,000 pixels, at its defaults {times[2]:.1f} times"
    )
    phrases.append("to the first 400 its PPO is sooner")
    ours = {round(seconds): value for seconds, value in results("time-to-distance")["curves"]["ours"][0]}
    phrases.append(f"({ours[42]:,.0f} after 42 seconds, between {ours[37]:,.0f} and {ours[47]:,.0f})")
    swings = results("time-to-distance")["curves"]["SB3's DQN, our recipe"][0]
    swings = {round(seconds): value for seconds, value in swings}
    phrases.append(f"is at {swings[55]:.0f} after 55 seconds and at {swings[60]:.0f} after 60")
    return phrases


FIGURES = {
    "README.md": [snake_figures, machine_figures, metta_figures, mario_figures],
    "benchmarks.md": [benchmark_figures],
}
SETTINGS = {  # phrases with numbers that nobody measured
    "README.md": [
        "an evaluation over 1,000 games",
        "returning (B, 4)",
        "PyTorch 2.13 and Python 3.11 to 3.13",
    ],
    "benchmarks.md": [
        "batch 512 learned no sooner, see what was tried",
        "Attention has 100 tokens to compare",
        "the view, the 128 games, the batch",
        "eager and SB3 take the same 5,000 actions in the tests",
        "One update asks for 400 tokens of every sample",
        "batches go from 128 to 16,384",
        "it is asked for a replay ratio of 8",
        "## Mario: learning the real 1-1",
    ],
}


def prose(page: str) -> str:
    """A page without what `benchmark.py` wrote, what says that it was typed by hand, and code. Line ends are spaces."""
    text = (ROOT / page).read_text()
    text = re.sub(r"<!-- [\w-]+ (?:cpu|cuda) -->.*?<!-- end -->", "", text, flags=re.DOTALL)
    text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    text = re.sub(r"\*\*By hand, all of this section:\*\*.*?(?=\n## |\Z)", "", text, flags=re.DOTALL)
    kept, by_hand = [], False
    for block in re.split(r"\n\n+", text):
        by_hand = block.startswith("**By hand:**") or (by_hand and block.startswith("|"))
        if not by_hand:
            kept.append(block)
    return " ".join(" ".join(kept).split())


def test_every_table_is_written_by_the_benchmark_or_by_hand() -> None:
    assert "| --- |" not in prose("benchmarks.md")


@pytest.mark.parametrize("page", FIGURES)
def test_every_figure_is_what_its_results_say(page: str) -> None:
    text = prose(page)
    phrases = [phrase for figures in FIGURES[page] for phrase in figures()]
    for phrase in phrases:
        assert phrase in text, phrase
    for phrase in sorted([*phrases, *SETTINGS[page]], key=len, reverse=True):
        assert phrase in text, phrase
        text = text.replace(phrase, " … ")
    text = re.sub(r"`[^`]*`|\]\([^)]*\)|(Python|PyTorch|newer than) \d+\.\d+", " ", text)
    left = re.findall(r"[^.;:|]{,40}(?<![\w-])\d[^.;:|]{,30}", text)
    assert not left, f"no results are named for these; test them, or say that they are by hand: {left}"


# ------------------------------------------------------------------------------------------------ the commands


def test_the_commands_of_the_benchmark_are_understood() -> None:
    pages = benchmark.__doc__ + (ROOT / "README.md").read_text() + (ROOT / "benchmarks.md").read_text()
    commands = re.findall(r"python benchmark\.py([^#`\n]*)", pages)
    assert len(commands) > 30
    for flags in commands:
        tyro.cli(Options, args=flags.split())


def test_the_profile_of_the_readme_runs(monkeypatch, capsys) -> None:
    code = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[1]
    asked = []
    monkeypatch.setattr(
        dqn_snake, "main", lambda args: asked.append(dqn_snake.fill_defaults(args, CPU)) or torch.ones(9).sum()
    )
    exec(code, {})
    assert asked and "aten::sum" in capsys.readouterr().out


if __name__ == "__main__":
    for table in benchmark.TABLES:
        with pytest.MonkeyPatch.context() as patch:
            section_again = again(table, patch)
        benchmark.write_section(table, CPU, section_again)

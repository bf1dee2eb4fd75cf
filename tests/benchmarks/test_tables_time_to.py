"""The tables of seconds to a score."""

import json

import torch
import tyro
from benchmark_helpers import CPU, SCRIPTS

from benchmarks import harness, sb3_peers, time_to
from benchmarks.harness import Options


def test_a_score_is_reached_at_the_first_evaluation_that_has_it() -> None:
    curve = [[0.0, 0.0], [2.0, 4.9], [4.1, 10.2], [6.0, 9.0], [8.2, 11.0]]
    assert [time_to.seconds_to_goal(curve, goal) for goal in (5, 10, 11, 12)] == [4.1, 4.1, 8.2, None]


def test_time_to_score_gives_bounds_where_a_score_was_not_reached(monkeypatch) -> None:
    seeds, recipe = [], {}

    def apart(function, **arguments):
        if function is sb3_peers.sb3_rate:
            return {"env_steps_per_second": 1000.0 * arguments["threads"]}
        assert function is sb3_peers.sb3_curve
        seeds.append((arguments["name"], arguments["seed"]))
        recipe.update(arguments if "recipe" in arguments["name"] else {})
        if "PPO" in arguments["name"]:
            return [[0.0, 0.0], [599.0, 4.0]]
        return [[0.0, 0.0], [50.0, 6.0], [100.0 * arguments["seed"], 10.0], [1199.0, 12.0]]

    ours = [[2.0, 5.0], [4.0, 10.0], [10.0, 25.0], [41.0, 29.0]]
    monkeypatch.setattr(harness, "in_subprocess", apart)
    monkeypatch.setattr(harness, "run", lambda flags, options: {"run": "none"})
    monkeypatch.setattr(harness, "eval_curve", lambda folder: ours)
    text, raw = time_to.time_to_score(Options(repeats=2), CPU)
    rows = {}
    for line in text.splitlines():
        if line.startswith("| "):
            name, *cells = line.strip("| ").split(" | ")
            rows.setdefault(name, []).append(cells)
    assert rows["ours"] == [["2.0 · 2.0", "4.0 · 4.0", "10.0 · 10.0", "> 41 · > 41"]]
    dqn, ppo = rows["SB3's DQN, defaults"], rows["SB3's PPO, our view and gamma"]
    assert dqn[0] == ["50.0 · 50.0", "100.0 · 200.0", "> 1,200 · > 1,200", "> 1,200 · > 1,200"]
    assert dqn[1] == ["25.0 (25.0–25.0)", "37.5 (25.0–50.0)", "> 120.0 (120.0–120.0)", "–"]
    assert seeds.count(("SB3's PPO, defaults", 2)) == 0 and seeds.count(("SB3's DQN, defaults", 2)) == 1
    assert ppo[0][0] == "> 600" and ppo[1][0] == "> 300.0 (300.0–300.0)" and ppo[1][3] == "–"
    assert raw["ratios"]["SB3's DQN, defaults, 10 food"] == [25.0, 50.0]
    assert raw["plans"]["SB3's DQN, defaults"]["explored"] == 120 * 1000 * torch.get_num_threads()
    assert recipe["explored"] == 18_000 and recipe["width"] == 256  # as "ours" has them
    json.dumps(raw)


def test_time_to_hearts_and_distance_compare_with_the_first_row(monkeypatch) -> None:
    asked, curves = [], {True: [[0.0, 0.0], [40.0, 700.0]], False: [[0.0, 0.0], [800.0, 100.0]]}

    def apart(function, **arguments):
        if function is sb3_peers.sb3_mario_rate:
            return {"env_steps_per_second": 1000.0 / arguments["threads"]}
        return curves[arguments.get("tuned", "our" in arguments.get("name", ""))]

    monkeypatch.setattr(harness, "in_subprocess", apart)
    monkeypatch.setattr(harness, "run", lambda flags, options, script: asked.append((script, flags)) or {"run": "x"})
    monkeypatch.setattr(harness, "eval_curve", lambda folder: [[20.0, 1.5], [100.0, 6.0], [600.0, 16.0]])
    monkeypatch.setattr(harness, "wall_clock_curve", lambda run, tag: [[10.0, 650.0], [20.0, 1050.0], [120.0, 1060.0]])
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    text, raw = time_to.time_to_hearts(Options(repeats=1), CPU)
    assert "| SB3's PPO, defaults | 800.0 | 800.0 | 800.0 | 800.0 |" in text
    assert "| SB3's PPO, our settings | 2.0 (2.0–2.0) | 0.4 (0.4–0.4) | 0.1 (0.1–0.1) | 0.1 (0.1–0.1) |" in text
    text, raw = time_to.time_to_distance(Options(repeats=1), CPU)
    assert "| ours | 10.0 | 10.0 | 20.0 | 20.0 |" in text
    assert "| SB3's DQN, our recipe | 40.0 | 40.0 | > 600 | > 600 |" in text
    assert "| SB3's PPO, defaults | > 60.0 (60.0–60.0) |" in text
    assert raw["plans"]["SB3's DQN, our recipe"]["threads"] == 1
    json.dumps(raw)
    for file, flags in asked:
        tyro.cli(SCRIPTS[file].Args, args=flags.split())
    assert len(asked) == 2

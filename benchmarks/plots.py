"""Plots of the files in benchmarks/results."""

import json
import statistics
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from benchmarks.harness import median
from benchmarks.report import image_file, results_file
from envs.metta.pictures import EDGE, converter_sign

Line = tuple[str, list, list]  # label, x, y
GAMES = {
    "score": ("Snake", "food per greedy game", "dqn_snake.py"),
    "hearts": ("Arena", "hearts", "ppo_metta.py"),
    "distance": ("Mario", "pixels", "dqn_mario_async.py"),
    "points": ("CartPole", "points", "our scripts"),
}
GAMES_ALONE = {
    "SnakeBatch": "game alone",
    "jumanji": "game alone: jumanji",
    "rule book, G": "game alone: plain Python",
}


def draw_all(device: torch.device) -> None:
    draw_throughput(device)
    for goal in GAMES:
        draw_time_to(goal, device)
    draw_learning(device)
    draw_same_recipe(device)
    draw_arena(device)
    draw_places(device)


def read_results(name: str, device: torch.device) -> dict:
    path = results_file(name, device)
    return json.loads(path.read_text()) if path.exists() else {}


def medians(columns: Iterable) -> list[float]:
    return [statistics.median(values) for values in columns]


def draw_throughput(device: torch.device) -> None:
    lines = []
    env = read_results("env", device)
    if env:
        for name, label in GAMES_ALONE.items():
            rounds = env["rates"][name]
            rates = medians(zip(*rounds))
            widths = env["widths"][: len(rates)]
            lines.append((label, widths, rates))
    act = read_results("act", device)
    if act:
        ours = act["rates"].pop("ours")
        ours_by_width = zip(*ours)
        rates = medians(ours_by_width)
        lines.append(("game and network", act["widths"], rates))
        widths = [int(width) for width in act["rates"]]
        rates = medians(act["rates"].values())
        lines.append(("game and network: Stable-Baselines3", widths, rates))
    widths = []
    rates = []
    for cell in read_results("scaling", device).get("cells", []):
        if cell["script"] == "dqn_snake.py" and cell["flag"] == "--num-envs":
            rate = median(cell["runs"], "env_steps_per_second")
            widths.append(cell["value"])
            rates.append(rate)
    if rates:
        lines.append(("training", widths, rates))
    axes = {
        "xscale": "log",
        "yscale": "log",
        "xlabel": "parallel games",
        "ylabel": "env steps per second",
    }
    save_plot("throughput", device, lines, title="Snake: speed by number of games", **axes)


def draw_time_to(goal: str, device: torch.device) -> None:
    game, score, script = GAMES[goal]
    lines = []
    results = read_results(f"time-to-{goal}", device)
    for label, curves in results.get("curves", {}).items():
        label = label.replace("ours", script)
        for curve in curves:
            seconds, scores = zip(*curve)
            lines.append((label, seconds, scores))
    title = f"{game}: {script} and Stable-Baselines3, median and range"
    axes = {"xlabel": "seconds of training", "xscale": "log", "ylabel": f"mean {score}"}
    save_plot(f"time-to-{goal}", device, lines, title=title, **axes)


def draw_learning(device: torch.device) -> None:
    """Both scripts and Stable-Baselines3 at its defaults."""
    lines = []
    for table, label in ("ppo-snake-learn-600", "ppo_snake.py"), ("learn", "dqn_snake.py"):
        results = read_results(table, device)
        for one in results.get("runs", []):
            if "--max-seconds 600 --seed" in one["flags"]:
                seconds, scores = zip(*one["curve"])
                lines.append((label, seconds, scores))
    results = read_results("time-to-score", device)
    for label, curves in results.get("curves", {}).items():
        if label in ("SB3's DQN, defaults", "SB3's PPO, defaults"):
            points = [point for point in curves[0] if point[0] <= 600]
            seconds, scores = zip(*points)
            lines.append((label, seconds, scores))
    axes = {"xlabel": "seconds of training", "ylabel": "mean food per greedy game"}
    save_plot("learning", device, lines, title="Snake: food by training time, median and range", **axes)


def draw_same_recipe(device: torch.device) -> None:
    lines = []
    results = read_results("snake-peer-600", device)
    for label, runs in results.get("runs", {}).items():
        for one in runs:
            seconds, scores = zip(*one["curve"])
            lines.append((label, seconds, scores))
    title = "Snake: ppo_snake.py and Stable-Baselines3's PPO with the same recipe, median and range"
    axes = {"xlabel": "seconds of training", "ylabel": "mean food per greedy game"}
    save_plot("same-recipe", device, lines, title=title, **axes)


def draw_arena(device: torch.device) -> None:
    """Hearts over an episode, by the trained agents and by the scripted player."""
    results = read_results("metta-learn-arena", device)
    percent = list(range(5, 100, 10))
    lines = []
    for label, games in results.get("played", {}).items():
        lines += [(f"ppo_metta.py {label}" if "--" in label else label, percent, one["tenths"]) for one in games]
    axes = {"xlabel": "percent of an episode", "ylabel": "hearts per agent in a tenth of an episode"}
    save_plot("arena", device, lines, title="Arena: hearts over an episode, median and range of three seeds", **axes)


def draw_places(device: torch.device) -> None:
    """Agents' steps in each cell of one map of the arena, learned and scripted. Objects have the signs of the game."""
    played = read_results("metta-learn-cores", device).get("played")
    if not played:
        return
    plt = pyplot()
    colors = plt.get_cmap("inferno").with_extremes(bad="grey")
    figure, panels = plt.subplots(1, 2, figsize=(10, 5), layout="constrained")
    for axes, (who, games) in zip(panels, played.items()):
        game = games[0]
        places = np.array(game["places"], float)
        places **= 0.5  # shows rarely visited cells, too
        for name, row, column in game["things"]:
            if name in ("wall", "block"):
                places[row, column] = np.nan
            elif name != "agent":
                sign = converter_sign(name)
                axes.text(column, row, sign, color="white", weight="bold", ha="center", va="center")
        axes.imshow(places, cmap=colors)
        last = len(places) - EDGE - 0.5
        axes.set_xlim(EDGE - 0.5, last)
        axes.set_ylim(last, EDGE - 0.5)
        axes.set_axis_off()
        axes.set_title(f"{who}: {game['hearts']:.1f} hearts")
    save_figure(figure, "arena-places", device)


def save_plot(name: str, device: torch.device, lines: list[Line], **settings: str) -> None:
    """Of lines with the same label, the median and the range. Writes nothing without lines."""
    if not lines:
        return
    plt = pyplot()
    from matplotlib.ticker import LogFormatter

    figure, axes = plt.subplots(figsize=(10, 4.5), layout="constrained")
    for label in dict.fromkeys(label for label, _, _ in lines):
        curves = [(x, y) for name, x, y in lines if name == label]
        places = max((x for x, _ in curves), key=lambda x: x[-1])  # of the longest; the others keep their last value
        values = np.stack([np.interp(places, x, y) for x, y in curves])
        axes.plot(places, np.median(values, 0), ".-", linewidth=1, markersize=4, label=label)
        axes.fill_between(places, values.min(0), values.max(0), alpha=0.2)
    axes.set(**settings)
    if settings.get("xscale") == "log":  # 20 and 30, not 2 x 10^1, which overlap
        axes.xaxis.set_minor_formatter(LogFormatter(minor_thresholds=(2, 0.5)))
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside right upper", frameon=False)
    save_figure(figure, name, device)


def pyplot() -> Any:
    import matplotlib  # not needed on a GPU machine

    matplotlib.use("Agg")  # no display needed
    import matplotlib.pyplot

    return matplotlib.pyplot


def save_figure(figure: Any, name: str, device: torch.device) -> None:
    path = image_file(name, device)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot().close(figure)

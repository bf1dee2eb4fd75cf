"""Every figure in README.md is computed again from the result files, and no page has a table without results."""

import re
import statistics
from pathlib import Path

from benchmark_helpers import PAGES, results

from benchmarks.harness import SUITES


def score(runs: list[dict], words: str) -> str:
    return f"{statistics.mean(one['eval_score_mean'] for one in runs):.1f} {words} {steps(runs)}"


def steps(runs: list[dict]) -> str:
    return f"({statistics.mean(one['env_steps'] for one in runs) / 1e6:.1f} M steps)"


def speed(runs: list[dict]) -> str:
    median = statistics.median(one["env_steps_per_second"] for one in runs)
    return f"{100 * round(median / 100):,}"


def low_to_high(values: list[float], digits: int = 0) -> str:
    return f"{min(values):.{digits}f} to {max(values):.{digits}f}"


def snake_figures(runs: list[dict]) -> list[str]:
    phrases = []
    for seconds, time in (120, "after 2 minutes"), (600, "after 10 minutes"):
        found = [one for one in runs if one["flags"].split(" --seed")[0] == f"--max-seconds {seconds}"]
        assert len(found) == 3
        phrases.append(score(found, f"food {time}"))
        if seconds == 120:
            phrases.append(f"{speed(found)} env steps/s")
        filled = [100 * one.get("eval_full_boards", 0) for one in found]
        if max(filled) > 5:
            phrases.append(f"{low_to_high(filled)} % of the boards filled")
    return phrases


def figures() -> list[str]:
    phrases = snake_figures(results("ppo-snake-learn")["runs"] + results("ppo-snake-learn-600")["runs"])
    phrases += snake_figures(results("learn")["runs"])
    peers = results("time-to-score")
    sb3 = [peers["curves"][f"SB3's {who}, defaults"] for who in ("DQN", "PPO")]
    assert max(value for seeds in sb3 for curve in seeds for _, value in curve) < 5
    seconds = peers["ends"]["SB3's PPO, defaults"]
    phrases.append(f"below 5 after {seconds // 60} minutes")
    for name, minutes in {"snake-peer": 2, "snake-peer-600": 10}.items():
        phrases += [score(runs, f"food after {minutes} minutes") for runs in results(name)["runs"].values()]
    ratios = results("sb3-speed")["ratios"].items()
    times = [statistics.median(values) for name, values in ratios if ", 1, --compile" in name]
    phrases.append(f"{low_to_high(times, 1)} times Stable-Baselines3's DQN")
    for name in ("arena", "real"):
        found = results(f"metta-learn-{name}")
        default, _ = found["runs"].values()
        players = f"a scripted player {found['scripted']:.1f}, " if found["scripted"] else ""
        players += f"random play {found['random']:.1f}"
        phrases.append(f"{score(default, 'hearts after 10 minutes on one core')} | {players}")
    ours, on_ours, in_python = map(speed, results("metta-peer")["runs"].values())
    peer = f"Stable-Baselines3's PPO {in_python} with the game in Python, {on_ours} with ours |"
    phrases.append(f"{ours} agent steps/s; {peer}")
    one, two = (f"{statistics.median(ratios):.2f}" for ratios in results("mario-async")["ratios"].values())
    phrases.append(f"{one} times one thread in turn, {two} times two")
    learned = results("mario-learn")["runs"]
    assert {one["eval_flags"] for one in learned} == {1.0}
    phrases.append(f"in 100 % of unseen levels after 15 minutes {steps(learned)} | random play 0 %")
    ppo_snake = {name for name in SUITES["headline"] if name.startswith(("ppo-snake", "snake-peer"))}
    for tables in ppo_snake, {*SUITES["headline"]} - ppo_snake:
        ((commit, machine),) = {(results(name)["commit"], results(name)["hardware"]) for name in tables}
        phrases.append(f"commit {commit} on {machine}")
    learned = results("mario-real")["runs"]
    flags = low_to_high([100 * one["eval_flags"] for one in learned])
    phrases.append(f"the real 1-1 in {flags} % of games after 20 minutes {steps(learned)} | random play 0 %")
    return phrases


def prose(path: Path) -> str:
    """Text of a page without code, generated tables and manual measurements."""
    text = re.sub(r"<!-- [\w-]+ (?:cpu|cuda) -->.*?<!-- end -->", "", path.read_text(), flags=re.DOTALL)
    text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    text = re.sub(r"\*\*[^*]* \(whole section\):\*\*.*?(?=\n## |\Z)", "", text, flags=re.DOTALL)
    text = re.sub(r"\*\*Measured manually:\*\*.*?\n\n(\|.*?\n\n)*", "", text + "\n\n", flags=re.DOTALL)
    return "" if "(whole page):**" in text else " ".join(text.split())


def test_every_table_is_generated_or_marked() -> None:
    for path in PAGES[2:]:
        assert "| --- |" not in prose(path) or path.stem == "why-it-is-fast", path


def test_every_figure_is_that_of_its_results() -> None:
    text = prose(PAGES[0]).split("## Results")[1].split("## ")[0]
    for phrase in sorted(figures(), key=len, reverse=True):
        assert phrase in text, phrase
        text = text.replace(phrase, " … ")
    text = text.replace("97 food fill the board", " … ")  # no measurement
    text = re.sub(r"`[^`]*`|\]\([^)]*\)|(Python|PyTorch|newer than) \d+\.\d+", " ", text)
    left = re.findall(r"[^.;:|]{,40}(?<![\w-])\d[^.;:|]{,30}", text)
    assert not left, f"without results: {left}"

"""Every figure in the text of README.md and the pages is computed again from the result files."""

import math
import re
import statistics
from pathlib import Path

import pytest
from benchmark_helpers import PAGES, results

import dqn_mario_async
from benchmarks.harness import ratios
from benchmarks.report import median_min_max
from benchmarks.time_to import seconds_to_goal


def median(runs: list[dict], key: str = "env_steps_per_second") -> float:
    return statistics.median(one[key] for one in runs)


def hearts(runs: list[dict]) -> float:
    return statistics.mean(one["eval_score_mean"] for one in runs)


def hundreds(value: float) -> str:
    return f"{100 * round(value / 100):,}"


def low_to_high(values: list[float], digits: int = 0) -> str:
    return f"{min(values):.{digits}f} to {max(values):.{digits}f}"


def best(table: str, who: str) -> float:
    """Best evaluation of an agent."""
    return max(value for curve in results(table)["curves"][who] for _, value in curve)


def ratio(table: str, to: str) -> float:
    return statistics.median(results(table)["ratios"][to])


def gain(runs: dict[str, list[dict]], switch: str, baseline: str) -> float:
    """Ratio of samples/s, per round."""
    rates = [[one["samples_per_second"] for one in runs[name]] for name in (switch, baseline)]
    return statistics.median(ratios(*rates))


def learned_food() -> dict[str, list[dict]]:
    """Runs of dqn_snake.py at its defaults, by time limit."""
    learned = {}
    for seconds in ("60", "120", "600"):
        flags = f"--max-seconds {seconds}"
        runs = [one for one in results("learn")["runs"] if one["flags"].split(" --seed")[0] == flags]
        assert len(runs) == 3 and {one["precision"] for one in runs} == {"float32"}
        learned[seconds] = runs
    assert {one["eval_score_max"] for one in learned["600"]} == {97}
    return learned


def filled_boards() -> dict[str, list[dict]]:
    """Runs of ppo_snake.py at its defaults, by time limit."""
    learned = {}
    found = results("ppo-snake-learn")["runs"] + results("ppo-snake-learn-600")["runs"]
    for seconds in ("60", "120", "600"):
        flags = f"--max-seconds {seconds}"
        runs = [one for one in found if one["flags"].split(" --seed")[0] == flags]
        assert len(runs) == 3 and {one["precision"] for one in runs} == {"float32"}
        learned[seconds] = runs
    return learned


def share_filled(runs: list[dict]) -> str:
    return f"{low_to_high([100 * one['eval_full_boards'] for one in runs])} % of the boards filled"


def sb3_food() -> str:
    """Score of SB3's agents at their defaults."""
    assert max(best("time-to-score", f"SB3's {who}, defaults") for who in ("DQN", "PPO")) < 5
    seconds = results("time-to-score")["ends"]["SB3's PPO, defaults"]
    return f"Stable-Baselines3's DQN and PPO: below 5 after {seconds // 60} minutes"


def compat_times() -> str:
    speeds = {name: statistics.median(values) for name, values in results("sb3-speed")["ratios"].items()}
    times = low_to_high([times for name, times in speeds.items() if ", 1, --compile" in name], 1)
    return f"{times} times Stable-Baselines3's DQN"


def learned_hearts() -> dict[str, tuple[str, str]]:
    """Mean hearts, and those of baseline players, by flags."""
    games = {"": "arena", " --env-id MettaNavigation-v0": "navigation", " --env-id mettagrid": "real"}
    learned = {}
    for flags, name in games.items():
        found = results(f"metta-learn-{name}")
        default, with_memory = found["runs"].values()
        assert len(default) == len(with_memory) == 3 and hearts(default) > hearts(with_memory)
        assert all("--threads 1" in one["flags"] and "--rnn none" in one["flags"] for one in default)
        others = f"a scripted player {found['scripted']:.1f}, " if found["scripted"] else ""
        others += f"random play {found['random']:.1f}"
        learned[flags] = f"{hearts(default):.1f} hearts", others
    return learned


def reached_flags() -> str:
    """Percentage of flags in the real 1-1; in our own game it is 100."""
    learned = results("mario-learn")
    assert {one["flags"].split(" --seed")[0] for one in learned["runs"]} == {"--max-seconds 900"}
    assert len(learned["runs"]) == 3
    assert {(one["eval_flags"], one["eval_episodes"]) for one in learned["runs"]} == {(1.0, 100)}
    assert learned["random"][0] == 0
    real = results("mario-real")
    assert {one["flags"].split(" --eval")[0] for one in real["runs"]} == {"--env-id SuperMarioBros --max-seconds 1200"}
    assert len(real["runs"]) == 3 and real["random"][0] == 0
    return low_to_high([100 * one["eval_flags"] for one in real["runs"]])


def readme() -> list[str]:
    """Figures of README.md."""
    food = learned_food()
    in_turn = f"{ratio('mario-async', 'in turn'):.2f} times one thread in turn"
    peer = results("metta-peer")["runs"]
    ours, sb3 = hundreds(median(peer["ours"])), hundreds(median(peer["SB3's PPO, the rule book"]))
    ppo = filled_boards()
    ppo_speed = f"{hundreds(median(ppo['120']))} env steps/s"
    phrases = [
        f"| `ppo_snake.py --max-seconds 60` | {hearts(ppo['60']):.1f} food of 97 after 1 minute |",
        f"| `ppo_snake.py` | {hearts(ppo['120']):.1f} food after 2 minutes, {share_filled(ppo['120'])} | | {ppo_speed}",
        f"| {hearts(ppo['600']):.1f} food after 10 minutes, {share_filled(ppo['600'])} |",
        f"| `dqn_snake.py --max-seconds 60` | {hearts(food['60']):.1f} food of 97 after 1 minute | {sb3_food()} | |",
        f"| `dqn_snake.py` | {hearts(food['120']):.1f} food after 2 minutes | | {hundreds(median(food['120']))} env",
        f"| {hearts(food['600']):.1f} food after 10 minutes, best games fill the board |",
        f"| {compat_times()}, one game |",
        f"{ours} agent steps/s; Stable-Baselines3's PPO {sb3} |",
        f"| the flag in 100 % of unseen levels after 15 minutes | random play 0 % | {in_turn} |",
        f"| the flag of the real 1-1 in {reached_flags()} % of games after 20 minutes | random play 0 % |",
    ]
    for flags, (ours, others) in learned_hearts().items():
        phrases.append(f"| `ppo_metta.py{flags}` | {ours} after 10 minutes on one core | {others} |")
    return phrases


def snake_page() -> list[str]:
    phrases = []
    env = results("env")
    xeon = results("env-xeon")
    five = min(width for width in env["widths"] if ratio("env", f"jumanji, {width:,} games") >= 5)
    phrases.append(f"five times jumanji from {five:,} games on")
    widest = statistics.median(list(zip(*xeon["rates"]["SnakeBatch"]))[-1])
    times = median_min_max(xeon["ratios"]["jumanji, best width of each"], 1)
    phrases.append(f"{widest / 1e6:.1f} million steps per second at 65,536 games, at its best width {times} times")

    train = results("train")["runs"][""]
    step = 128_000 / median(train)
    update = step * median(train, "train_fraction")
    phrases.append(f"of the {step:.1f} ms of 128 of our steps, {update:.1f} are the update")
    recipe, defaults = (ratio("train-xeon", f"SB3's DQN, {settings}") for settings in ("our recipe", "defaults"))
    phrases.append(f"{recipe:.1f} times SB3 with our recipe, and {defaults:.1f} times SB3 at its defaults")

    switches, larger = results("switches")["runs"], "--num-envs 512 --batch-size 1024"
    compiled = [name for name in switches if name.startswith("--compile") and larger not in name]
    gains = [gain(switches, name, "") for name in compiled]
    large = gain(switches, f"--compile --max-seconds 60 {larger}", larger)
    phrases.append(
        f"{low_to_high(gains, 2)} times the default's samples/s ({large:.2f} with more games and a larger batch)"
    )
    learn = {one["flags"]: one["samples_per_second"] for one in results("learn")["runs"]}
    times = learn["--max-seconds 600 --seed 1"] / learn["--max-seconds 600 --network attention --seed 1"]
    phrases.append(f"the MLP gets {times:.0f} times its samples")
    return phrases


def time_to_page() -> list[str]:
    phrases = []
    tuned = {}
    for goal in (10, 20, 30):
        names = [f"SB3's {who}, our view and gamma, {goal} food" for who in ("DQN", "PPO")]
        tuned[goal] = [ratio("time-to-score", name) for name in names]
    assert max(tuned[10]) < 5 < min(tuned[20] + tuned[30])
    phrases.append("a factor of five is reached at 20 and 30 food, not at 10**")
    phrases.append(f"({tuned[10][0]:.1f} and {tuned[10][1]:.1f})")

    tuned = "SB3's PPO, our settings"
    assert all(min(results("time-to-hearts")["ratios"][f"{tuned}, {goal} hearts"]) > 1 for goal in (1, 5, 10, 15))
    peers = [name for name in results("time-to-distance")["curves"] if name != "ours"]
    for goal in (600, 800):
        assert min(ratio("time-to-distance", f"{name}, {goal} pixels") for name in peers) > 1
    phrases.append("To 600 and 800 pixels ours is the fastest")
    phrases.append("too short for 1,000 pixels on this machine")
    phrases.append("The first 400 pixels are luck")
    curves = results("time-to-distance")["curves"]
    tops = sorted(max(value for _, value in curve) for curve in curves["ours"])
    assert tops[1] < 1000 <= tops[2]
    phrases.append(f"the best evaluations of the others are {tops[0]:.0f} and {tops[1]:.0f}")
    before, swing, after = curves["SB3's DQN, our recipe"][0][-3:]
    phrases.append(
        f"seed 1 of SB3's DQN with our recipe is at {swing[1]:.0f} after {swing[0]:.0f} seconds, "
        f"between {before[1]:.0f} and {after[1]:,.0f}"
    )
    return phrases


def sb3_compat_page() -> list[str]:
    phrases = []
    scores = [[score for _, score in runs] for runs in results("sb3-learn")["runs"].values()]
    means, errors = (
        [statistics.mean(each) for each in scores],
        [statistics.variance(each) / len(each) for each in scores],
    )
    apart = [abs(means[i] - means[j]) / (errors[i] + errors[j]) ** 0.5 for i, j in ((0, 1), (0, 2), (1, 2))]
    phrases.append(
        f"Eager's mean is {apart[0]:.1f} and {apart[1]:.1f} standard errors of the difference above the others, "
        f"which are {apart[2]:.1f} apart"
    )
    rates = {
        (cell["configuration"], cell["batch"]): cell.get("samples_per_second") for cell in results("sweep")["cells"]
    }
    gains = [100 * (rates["fp32 + compile", batch] / rates["fp32", batch] - 1) for batch in (32, 64, 128)]
    phrases.append(f"`--compile` has {low_to_high(gains)} % more samples/s")
    return phrases


def metta_page() -> list[str]:
    phrases = []
    none, mingru = results("metta-learn-arena")["runs"].values()
    phrases.append(f"Without memory it makes {median(none) / median(mingru):.2f} times the steps")

    presets = results("metta-presets")["runs"]
    original, fast = presets[:3], presets[3:]
    assert all("original" in one["flags"] for one in original) and all("ultra-fast" in one["flags"] for one in fast)
    phrases.append(
        f"makes {median(fast) / median(original):.2f} times the steps per second, but one update for every "
        f"{median(original, 'updates_per_second') / median(fast, 'updates_per_second'):.0f} of `original`, and gets "
        f"{100 * hearts(fast) / hearts(original):.0f} % of the hearts"
    )
    return phrases


def mario_page() -> list[str]:
    phrases = []
    mario = results("mario-switches")["runs"]
    assert max(one["ring_fill"] for runs in mario.values() for one in runs) < 0.25
    assert {one["dropped"] for one in mario["--on-full drop"]} == {0}
    xeon = results("mario-real-xeon")
    assert xeon["run"]["eval_flags"] == 0 and xeon["run"]["flags"].split()[3] == "1800"
    assert xeon["run"]["eval_episodes"] == 100 and "2 cores of Intel(R) Xeon(R)" in xeon["hardware"]
    phrases.append(f"reached {xeon['run']['eval_distance_mean']:,.0f} pixels and no flag in 100 games")
    phrases.append(f"(one seed, commit {xeon['commit']})")
    runs = results("mario-real")["runs"]
    minutes = []
    for share in (0.1, 0.5):  # of games that reach the flag
        minutes.append(math.ceil(max(seconds_to_goal(one["flag_curve"], share) for one in runs) / 60))
    phrases.append(
        f"within {minutes[0]} minutes with every seed; within {minutes[1]} minutes there is an evaluation in which half"
    )
    ends = [end for one in runs for end in one["ends"]]
    assert "stuck" not in {how for _, how in ends}
    died = sum(how == "dead" for _, how in ends)
    places = [distance for distance, how in runs[1]["ends"] if how == "dead"]
    phrases.append(f"Of the {died} deaths, {len(places)} are those of seed 2")
    phrases.append(f"all between {min(places):,} and {max(places):,} pixels")
    return phrases


FIGURES = {  # other pages only have figures that were measured manually
    "README": readme,
    "snake": snake_page,
    "time-to": time_to_page,
    "sb3-compat": sb3_compat_page,
    "metta": metta_page,
    "mario": mario_page,
}
SETTINGS = {  # phrases with numbers that are no measurements
    "README": [
        "an evaluation over 1,000 games",
        "on 8 processes is 2,048 games each",
        "some 400 mutations",
        "Rank 0 writes, evaluates and prints",
        "PyTorch 2.13 and Python 3.11 to 3.13",
    ],
    "benchmarks": ["in the real 1-1, games and emulator"],
    "snake": [
        "(batch 512 learned no sooner, see [what did not help](trials.md))",
        "Attention compares 100 tokens",
    ],
    "sb3-compat": [
        "eager and SB3 take the same 5,000 actions in the tests",
        "One update processes 400 tokens per sample",
        "batches go from 128 to 16,384",
    ],
    "mario": [
        "its requested replay ratio is 8",
        "## Learning the real 1-1",
        "the agent of seed 1",
        "four minutes during seed 1",
    ],
}
TEXTS = [path for path in PAGES if path.stem != "why-it-is-fast"]  # test_pages.py looks up its figures


def prose(path: Path) -> str:
    """Text of a page without generated tables, manual measurements and code, on one line."""
    text = path.read_text()
    if "(whole page):**" in text:
        return ""
    text = re.sub(r"<!-- [\w-]+ (?:cpu|cuda) -->.*?<!-- end -->", "", text, flags=re.DOTALL)
    text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    text = re.sub(r"\*\*[^*]* \(whole section\):\*\*.*?(?=\n## |\Z)", "", text, flags=re.DOTALL)
    kept = []
    is_manual = False
    for block in re.split(r"\n\n+", text):
        is_manual = block.startswith("**Measured manually:**") or (is_manual and block.startswith("|"))
        if not is_manual:
            kept.append(block)
    return " ".join(" ".join(kept).split())


def test_the_result_in_the_docstring_of_dqn_mario_async() -> None:
    assert f"{reached_flags()} %" in " ".join(dqn_mario_async.__doc__.split())


@pytest.mark.parametrize("path", [path for path in TEXTS if path in PAGES[2:]], ids=lambda path: path.stem)
def test_every_table_is_generated_or_marked(path: Path) -> None:
    assert "| --- |" not in prose(path)


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.stem)
def test_every_figure_is_that_of_its_results(path: Path) -> None:
    text = prose(path)
    phrases = FIGURES[path.stem]() if path.stem in FIGURES else []
    for phrase in phrases:
        assert phrase in text, phrase
    for phrase in sorted([*phrases, *SETTINGS.get(path.stem, [])], key=len, reverse=True):
        assert phrase in text, phrase
        text = text.replace(phrase, " … ")
    text = re.sub(r"`[^`]*`|\]\([^)]*\)|(Python|PyTorch|newer than) \d+\.\d+", " ", text)
    left = re.findall(r"[^.;:|]{,40}(?<![\w-])\d[^.;:|]{,30}", text)
    assert not left, f"without results; test these figures or mark them as measured manually: {left}"

"""How scripts and peers are run, and what is read of a run."""

import json
import subprocess
import time

import pytest
import torch
import tyro
from benchmark_helpers import fake_table, page_of

import dqn_snake
import ppo_metta
from benchmark import main
from benchmarks import games, harness, mario, report
from benchmarks.harness import Options


@pytest.mark.parametrize(
    "code, stderr, failure",
    [
        (2, "out of memory: a smaller --batch-size works", MemoryError),
        (2, "--buffer-size: would take 9.1 GiB and there are 2.0", MemoryError),
        (-9, "", MemoryError),
        (2, "--batch-size 0: must be above 0", SystemExit),
        (1, "CUDA out of memory", SystemExit),
    ],
)
def test_only_memory_is_forgiven_and_no_setting_is_inherited(monkeypatch, code, stderr, failure) -> None:
    def run(command, env, **_) -> subprocess.CompletedProcess:
        assert {name: env[name] for name in harness.PLAIN_SETTINGS} == harness.PLAIN_SETTINGS
        return subprocess.CompletedProcess(command, code, "", stderr)

    monkeypatch.setenv("USE_BF16", "1")
    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(failure):
        harness.run("--bf16", Options(), "dqn_snake_sb3_compat.py")


@pytest.mark.parametrize("stderr, code", [("ModuleNotFoundError: No module named 'jumanji'", 2), ("a bug", None)])
def test_a_peer_that_is_not_installed_is_named(monkeypatch, capsys, stderr, code) -> None:
    monkeypatch.setattr(subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, 1, "", stderr))
    with pytest.raises(SystemExit) as stop:
        harness.in_subprocess(games.jumanji_rates, widths=(1,), seconds=1)
    if code:
        assert stop.value.code == code and "jumanji is not installed; pip install" in capsys.readouterr().err
    else:
        assert stop.value.code == "jumanji_rates failed:\na bug"


@pytest.mark.parametrize("git", [None, "exit 128", "echo abc1234"])
def test_the_commit_is_optional(tmp_path, monkeypatch, git) -> None:
    """Without git, and outside a repository."""
    if git:
        (tmp_path / "git").write_text(f"#!/bin/sh\n{git}\n")
        (tmp_path / "git").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    fake_table(monkeypatch, "train", lambda options, device: ("the table", {"ratios": {"peer": [1.0]}}))
    main(Options("train", "cpu"))
    commit = "abc1234" if git == "echo abc1234" else "unknown"
    assert json.loads((tmp_path / "benchmarks" / "results" / "train.json").read_text())["commit"] == commit
    assert f", commit {commit}\n<!-- end -->" in page_of("train")


def test_every_run_has_a_name_of_its_own(monkeypatch, tmp_path) -> None:
    """A name that exists is refused by the scripts."""
    names = []

    def run(command, **_) -> subprocess.CompletedProcess:
        names.append(command[command.index("--run-name") + 1])
        (tmp_path / "runs" / names[-1]).mkdir(parents=True)
        (tmp_path / "runs" / names[-1] / "summary.json").write_text("{}")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(time, "monotonic_ns", lambda: 1)  # as after a restart
    for _ in range(3):
        harness.run("", Options())
    assert len(set(names)) == 3


def test_medians_have_their_spread_and_the_first_round_does_not_count() -> None:
    assert report.median_min_max([3.0, 1.0, 2000.0]) == "3 (1–2,000)"
    assert report.median_min_max([1.25], 1) == "1.2 (1.2–1.2)"
    assert harness.ratios([6.0, 8.0], [2.0, 4.0]) == [3.0, 2.0]
    order = []
    calls = {name: lambda name=name: (order.append(name), len(order))[1] for name in "AB"}
    assert harness.alternate(Options(repeats=2), calls) == {"A": [3, 5], "B": [4, 6]}
    assert "".join(order) == "ABABAB"
    assert list(Options(repeats=9).seeds) == [1, 2, 3] and list(Options(fast=True).seeds) == [1]


def test_work_on_a_gpu_is_over_when_its_time_is_taken(monkeypatch) -> None:
    """Of the first call too, which does not count: launching it takes no time, and waiting for it does."""
    now = [0.0]
    queued = [0.0]

    def work() -> None:
        queued[0] += 1.0

    def synchronize() -> None:
        now[0] += queued[0]
        queued[0] = 0.0

    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    assert harness.measure_rate(work, 10, 4.0, "cuda") == 10.0


def test_the_clock_of_a_run_stops_while_it_is_evaluated(tmp_path, monkeypatch) -> None:
    evaluate = dqn_snake.evaluate
    monkeypatch.setattr(dqn_snake, "evaluate", lambda *args: (time.sleep(0.1), evaluate(*args))[1])
    flags = "--device cpu --threads 1 --board 5x5 --num-envs 64 --hidden-size 16 --learning-starts 100 --no-video "
    flags += "--total-timesteps 1280 --log-every 1e-6 --eval-every 1e-6 --eval-episodes 50 --run-name short"
    args = tyro.cli(dqn_snake.Args, args=flags.split())
    summary = dqn_snake.main(args)
    found = harness.eval_curve(tmp_path / "runs" / "short")
    seconds, scores = zip(*found)
    assert list(seconds) == sorted(seconds) and scores[-1] == pytest.approx(summary["eval_score_mean"])
    assert seconds[-1] == pytest.approx(summary["env_steps"] / summary["env_steps_per_second"], rel=0.2)
    assert len(found) == 21 and seconds[-1] + 0.1 * 20 < summary["wall_seconds"]


def test_scalars_of_a_run_are_weighed_by_its_steps(tmp_path) -> None:
    with ppo_metta.SummaryWriter(tmp_path) as writer:
        for step, value in ((10, 1.0), (40, 3.0)):
            writer.add_scalar("perf/act_ms", value, step)
        writer.add_scalar("perf/warmup_s", 7.0, 0)
    assert harness.mean_scalars(tmp_path) == {"perf/act_ms": 2.5, "perf/warmup_s": 7.0}


def test_readings_of_a_run_are_in_seconds_since_its_start(tmp_path, monkeypatch) -> None:
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(tmp_path / "runs" / "one") as writer:
        writer.add_scalar("perf/warmup_s", 4.0, 0, walltime=1000.0)
        for minute, value in ((1, 0.25), (2, 0.5)):
            writer.add_scalar("eval/flags", value, minute, walltime=1000.0 + 60 * minute)
    curve = harness.wall_clock_curve(harness.run_folder("one"), "eval/flags")
    assert curve == [[64.0, 0.25], [124.0, 0.5]]
    assert [mario.value_after(curve, minutes) for minutes in (1, 2, 15)] == [0.25, 0.5, 0.5]

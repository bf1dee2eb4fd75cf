"""How scripts and peers are run, and how their logs are read."""

import subprocess
import sys
import time

import pytest
import torch
import tyro
from benchmark_helpers import PROJECT

import dqn_snake
from benchmarks import games, harness, report
from benchmarks.harness import Options


@pytest.mark.parametrize(
    "code, stderr, failure",
    [
        (2, "out of memory: a smaller --batch-size works", MemoryError),
        (137, "", MemoryError),
        (2, "--batch-size 0: must be above 0", SystemExit),
        (1, "CUDA out of memory", SystemExit),
    ],
)
def test_only_out_of_memory_is_no_failure(monkeypatch, code, stderr, failure) -> None:
    def run(command, env, **_) -> subprocess.CompletedProcess:
        assert {name: env[name] for name in harness.PLAIN_SETTINGS} == harness.PLAIN_SETTINGS
        return subprocess.CompletedProcess(command, code, "", stderr)

    monkeypatch.setenv("USE_BF16", "1")
    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(failure):
        harness.run("--bf16", Options(), "dqn_snake_sb3_compat.py")


def test_runs_have_names_of_their_own_and_their_peak_memory(monkeypatch, tmp_path) -> None:
    names = []

    def run(command, **_) -> subprocess.CompletedProcess:
        names.append(command[command.index("--run-name") + 1])
        folder = tmp_path / "runs" / names[-1]
        folder.mkdir(parents=True)
        (folder / "summary.json").write_text('{"rollout_fraction": 0.25}')
        return subprocess.CompletedProcess(command, 0, "a line of the script\n1.5\n", "")

    monkeypatch.setattr(subprocess, "run", run)
    found = [harness.run("", Options(device="cpu")) for _ in range(3)]
    assert len(set(names)) == 3 and {one["peak_memory_gib"] for one in found} == {1.5}
    assert found[0]["train_fraction"] == 0.75
    assert report.peak_gib(found) == "1.50" and report.peak_gib([{"peak_memory_gib": None}]) == "–"


@pytest.mark.parametrize("end, code", [("", 0), ("; sys.exit(2)", 2), ("; os.kill(os.getpid(), 9)", 137)])
def test_peak_memory_is_that_of_the_command(end, code) -> None:
    work = f"import os, sys; x = bytes(200 * 2**20); y = bytearray(x){end}"
    command = [sys.executable, str(harness.PEAK_MEMORY), sys.executable, "-c", work]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == code and 0.19 < float(done.stdout.splitlines()[-1]) < 0.5


@pytest.mark.parametrize("stderr, code", [("ModuleNotFoundError: No module named 'jumanji'", 2), ("a bug", None)])
def test_a_peer_that_is_not_installed_is_named(monkeypatch, capsys, stderr, code) -> None:
    monkeypatch.setattr(subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, 1, "", stderr))
    with pytest.raises(SystemExit) as stop:
        harness.in_subprocess(games.jumanji_rates, widths=(1,), seconds=1)
    if code:
        assert stop.value.code == code and "jumanji is not installed" in capsys.readouterr().err
    else:
        assert stop.value.code == "jumanji_rates failed:\na bug"


@pytest.mark.parametrize("git", [None, "exit 128", "echo abc1234"])
def test_the_commit_is_optional(tmp_path, monkeypatch, git) -> None:
    if git:
        (tmp_path / "git").write_text(f"#!/bin/sh\n{git}\n")
        (tmp_path / "git").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert harness.commit() == ("abc1234" if git == "echo abc1234" else "unknown")


def test_medians_have_their_range_and_the_first_round_is_dropped() -> None:
    assert report.median_min_max([3.0, 1.0, 2000.0]) == "3 (1–2,000)"
    assert harness.ratios([6.0, 8.0], [2.0, 4.0]) == [3.0, 2.0]
    order = []
    calls = {name: lambda name=name: (order.append(name), len(order))[1] for name in "AB"}
    assert harness.alternate(Options(repeats=2), calls) == {"A": [3, 5], "B": [4, 6]}
    assert "".join(order) == "ABABAB"
    assert list(Options(repeats=9).seeds) == [1, 2, 3] and list(Options(fast=True).seeds) == [1]


def test_a_rate_waits_for_the_gpu(monkeypatch) -> None:
    """Also for the first call, which is not counted: a launch takes no time, the work does."""
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


def test_evaluation_stops_the_clock_of_a_run(tmp_path, monkeypatch) -> None:
    evaluate = dqn_snake.evaluate
    monkeypatch.setattr(dqn_snake, "evaluate", lambda *args: (time.sleep(0.1), evaluate(*args))[1])
    flags = "--device cpu --threads 1 --board 5x5 --num-envs 64 --hidden-size 16 --learning-starts 100 --no-video "
    flags += "--total-timesteps 1280 --log-every 1e-6 --eval-every 1e-6 --eval-episodes 50 --run-name short"
    summary = dqn_snake.main(tyro.cli(dqn_snake.Args, args=flags.split()))
    found = harness.eval_curve(tmp_path / "runs" / "short")
    seconds = [at for at, _ in found]
    assert seconds == sorted(seconds) and found[-1][1] == pytest.approx(summary["eval_score_mean"])
    assert len(found) == 20
    assert seconds[-1] == pytest.approx(summary["env_steps"] / summary["env_steps_per_second"], rel=0.2)


def test_scalars_of_a_run(tmp_path) -> None:
    """Means are weighted by steps; curves are in seconds since the start."""
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(tmp_path) as writer:
        writer.add_scalar("perf/warmup_s", 4.0, 0, walltime=1000.0)
        for step, value in ((10, 1.0), (40, 3.0)):
            writer.add_scalar("perf/act_ms", value, step, walltime=1000.0 + step)
    assert harness.mean_scalars(tmp_path) == {"perf/act_ms": 2.5, "perf/warmup_s": 4.0}
    assert harness.wall_clock_curve(tmp_path, "perf/act_ms") == [[14.0, 1.0], [44.0, 3.0]]


def test_a_real_run_is_measured(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(harness, "ROOT", PROJECT)
    monkeypatch.setattr(harness, "run_folder", lambda name: tmp_path / name)
    flags = f"--run-dir {tmp_path} --board 5x5 --num-envs 8 --total-timesteps 512 --num-steps 8 --num-minibatches 2"
    one = harness.run(f"{flags} --eval-every 0 --eval-episodes 1 --threads 1", Options(device="cpu"), "ppo_snake.py")
    assert one["env_steps"] == 512 and 0.1 < one["peak_memory_gib"] < 4

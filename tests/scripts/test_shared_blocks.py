"""Blocks that all scripts share letter for letter (test_house.py), tested once, on dqn_snake.py."""

import re
import subprocess
import sys

import pytest
import torch
from small_runs import ROOT

import dqn_snake


def test_threads_are_fewer_beside_busy_programs(monkeypatch, capsys) -> None:
    rates = {8: 40, 7: 300, 4: 200, 1: 100}
    monkeypatch.setattr(dqn_snake, "matmuls_per_second", rates.__getitem__)
    assert dqn_snake.pick_threads(16) == 7
    assert "7 of 8 threads are faster" in capsys.readouterr().out
    rates[8] = 290
    assert dqn_snake.pick_threads(16) == 8
    assert capsys.readouterr().out == ""
    assert dqn_snake.pick_threads(1) == 1


def test_bf16_asks_the_hardware(capsys) -> None:
    dtype = dqn_snake.pick_precision(True, False, False, torch.device("cpu"))
    said = capsys.readouterr().out
    if dtype == torch.bfloat16:
        assert said == ""
    else:
        assert re.fullmatch(r"--bf16: matmuls take \d+ times .*\n", said)


def test_output_that_nobody_reads_stops_and_saves(tmp_path) -> None:
    flags = f"--run-dir {tmp_path} --run-name run --threads 1 --log-every 0.2"
    shell = ["bash", "-o", "pipefail", "-c", f"{sys.executable} dqn_snake.py {flags} | head -n 1"]
    done = subprocess.run(shell, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0
    assert done.stderr == ""
    assert (tmp_path / "run" / "checkpoint.pt").exists()
    assert (tmp_path / "run" / "summary.json").exists()


@pytest.mark.skipif(sys.platform != "linux", reason="limits memory as Linux does")
def test_running_out_of_memory_is_one_line(tmp_path) -> None:
    """The error that PyTorch really raises; for each script see test_common_runs.py."""
    flags = f"--batch-size 4000000 --max-seconds 60 --learning-starts 0 --device cpu --threads 1 --run-dir {tmp_path}"
    command = f"ulimit -v 8000000; exec {sys.executable} dqn_snake.py {flags} --replay-ratio 1e6"
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert done.stderr.endswith("--num-envs or --eval-episodes works\n")
    assert "Traceback" not in done.stderr

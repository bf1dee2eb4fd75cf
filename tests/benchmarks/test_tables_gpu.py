"""The table of one GPU."""

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial

import pytest
import torch
import tyro
from benchmark_helpers import ABOUT, CUDA, SCRIPTS, cells, page_of

import dqn_snake
from benchmark import main
from benchmarks import games, gpu, harness, metta_parts, report
from benchmarks.harness import Options


@pytest.mark.parametrize("sizes", [gpu.GPU_SIZES, gpu.GPU_TRIAL], ids=["whole", "trial"])
def test_every_row_has_valid_flags_and_compiled_rows_are_last(sizes) -> None:
    plan = gpu.gpu_plan(sizes, CUDA)
    assert len({(part, name) for part, name, *_ in plan}) == len(plan)
    for _, _, _, call in plan:
        if call.func in (gpu.speed_run, gpu.sb3_transformer, gpu.learning_run):
            module = SCRIPTS[call.keywords.get("script", "dqn_snake.py")]
            if call.func is gpu.sb3_transformer:
                module = SCRIPTS["dqn_snake_sb3_compat.py"]
            args = tyro.cli(module.Args, args=call.keywords["flags"].split())
            assert args.device == "cuda" and args.threads == 1
    compiles = ["--compile" in name for _, name, *_ in plan]
    assert compiles == sorted(compiles) and sum(compiles) == 3


STEADY = {"charts/SPS": 2e6, "charts/samples_per_second": 4e6, "charts/updates_per_second": 500.0}
STEADY |= {"charts/replay_ratio": 2.0, "perf/rollout_fraction": 0.75}


@pytest.fixture
def fake_gpu(monkeypatch):
    """A made-up GPU, twice as fast with --bf16, without --fp16 and SB3. Returns the time limits of the rows."""
    limits = []

    def in_fork(call, limit: float) -> dict:
        limits.append(limit)
        flags = call.keywords.get("flags", "")
        if call.func is gpu.bf16_matmul_rate:
            return {"found": 8e14}
        if call.func is games.snake_rates:
            return {"found": [3e6]}
        if call.func is metta_parts.metta_env_rate:
            return {"found": 1e6}
        if call.func is gpu.learning_run:
            curve = [[55.0, 40.0], [280.0, 61.5]]
            return {"found": {"curve": curve, "eval_score_max": 97.0, "env_steps_per_second": 2e6}}
        if call.func is gpu.sb3_transformer:
            return {"note": "not measured: stable_baselines3 is not installed"}
        if "--fp16" in flags:
            return {"note": "failed: out of memory"}
        faster = 2 if "--bf16" in flags else 1
        one = {"steady": {tag: faster * value for tag, value in STEADY.items() if tag.startswith("charts")}}
        one["steady"]["perf/rollout_fraction"] = 0.75
        one |= {"args": {"batch_size": 8192}, "update_flops": 2e11, "peak_memory_gib": 1.5, "sdpa": None}
        one |= {"precision": "bfloat16" if "--bf16" in flags else "float32", "compiled": False, "cudagraph": False}
        return {"found": one}

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(harness, "machine", lambda device: ABOUT)
    monkeypatch.setattr(gpu, "in_fork", in_fork)
    return limits


def test_a_gpu_has_a_section_with_every_row_and_reasons_for_empty_rows(tmp_path, fake_gpu) -> None:
    before = page_of("gpu")
    main(Options("gpu", "cuda", json="all.json"))
    page = page_of("gpu")
    section = page.split("<!-- gpu cuda -->")[1].split("<!-- end -->")[0]
    rows = cells(section)
    assert page.startswith(before.split("<!-- gpu cuda -->")[0])
    assert "`python benchmark.py --suite gpu` on a GPU" in section
    assert rows["8192"] == ["800.0"] and rows["4096"] == ["1,000,000"] and rows["65536"] == ["3,000,000"]
    # 16 million samples/s while learning are 1,953 updates of 200 GFLOP
    default = "| default | 2,000,000 | 1.00 | 4,000,000 | 16,000,000 | 390.6 | 48.8% | 2.00 | 1.50 | float32 |"
    half = "| `--bf16` | 4,000,000 | 2.00 | 8,000,000 | 32,000,000 | 781.2 | 97.7% | 4.00 | 1.50 | bfloat16 |"
    assert default in section and half in section
    assert rows["`--fp16`"] == ["failed: out of memory"]
    assert "| 40.0 after 55 s · 61.5 after 280 s | 97 | 2,000,000 |" in section
    assert rows["16384, SB3"][0] == "not measured: stable_baselines3 is not installed"
    assert rows["16384, ours --bf16"] == ["8,000,000", "–", "1000.00", "1.50", "bfloat16"]
    raw = json.loads((tmp_path / "benchmarks" / "results" / "gpu-cuda.json").read_text())
    assert [raw] == json.loads((tmp_path / "all.json").read_text()) and raw["commit"] == "abc"
    assert report.section(raw, gpu.gpu_tables(raw)) in page


def test_an_interrupted_suite_keeps_its_rows(tmp_path, fake_gpu, monkeypatch) -> None:
    whole = gpu.in_fork

    def in_fork(call, limit: float) -> dict:
        if len(fake_gpu) == 4:
            raise KeyboardInterrupt
        return whole(call, limit)

    monkeypatch.setattr(gpu, "in_fork", in_fork)
    with pytest.raises(KeyboardInterrupt):
        main(Options("gpu", "cuda", json="all.json"))
    for file in ("benchmarks/results/gpu-cuda.json", "all.json"):
        raw = json.loads((tmp_path / file).read_text())
        raw = raw[0] if file == "all.json" else raw
        assert list(raw["rows"]) == ["matmul", "snake"] and list(raw["rows"]["snake"]) == ["", "--bf16", "--fp16"]
    assert "| `--fp16` | failed: out of memory |" in page_of("gpu")


def test_rows_stop_at_their_time_limit_and_that_of_the_suite(fake_gpu, monkeypatch) -> None:
    now = [0.0]
    whole = gpu.in_fork

    def in_fork(call, limit: float) -> dict:
        now[0] += limit  # every row takes all it may
        return whole(call, limit)

    monkeypatch.setattr(gpu, "in_fork", in_fork)
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    text, raw = gpu.gpu(Options("gpu"), CUDA)
    assert sum(fake_gpu) <= gpu.GPU_SIZES.total_seconds == now[0]
    assert "food" in raw["rows"] and "found" in next(iter(raw["rows"]["food"].values()))
    assert cells(text)["`--bf16 --compile --cudagraph`"][0] == "not measured: no time left"


@pytest.mark.parametrize(
    "call, note",
    [
        (partial(int, "a | b"), "failed: ValueError: invalid literal for int() with base 10: 'a / b'"),
        (partial(exec, "raise MemoryError"), "failed: out of memory"),
        (partial(dqn_snake.fail, "--x 1: must be 2"), "failed: dqn_snake.py: --x 1: must be 2"),
        (partial(os._exit, 3), "failed: exit code 3"),
        (partial(__import__, "no_such_package"), "not measured: no_such_package is not installed"),
        (partial(time.sleep, 60), "failed: not done after 2 s"),
    ],
    ids=["exception", "memory", "refused", "exit", "package", "time"],
)
def test_a_failed_row_has_its_reason(call, note) -> None:
    assert gpu.in_fork(call, 2.0 if call.func is time.sleep else 60.0).get("note") == note


def test_preloaded_modules_do_not_touch_the_gpu() -> None:
    """CUDA would fail in all forked processes."""
    code = f"""
import importlib, torch
for name in ("is_available", "device_count", "_lazy_init", "init", "current_device", "get_device_properties"):
    setattr(torch.cuda, name, None)  # to call it would be an error
for name in {gpu.PRELOADED}:
    importlib.import_module(name)
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_a_forked_row_can_use_the_gpu() -> None:
    torch.cuda.get_device_name()
    row = gpu.in_fork(partial(gpu.bf16_matmul_rate, side=256, seconds=0.1, device="cuda"), 60.0)
    assert row.get("found", 0) > 1e9, row


def test_the_suite_runs_on_a_cpu_and_writes_no_page(tmp_path, monkeypatch) -> None:
    page = page_of("gpu")
    tiny = {"snake_widths": (4,), "arena_widths": (1,), "batches": (4,), "alone_seconds": 0.01, "run_seconds": 0.2}
    learn = "--max-seconds 2 --eval-every 0.5 --eval-episodes 10 --log-every 0.1"
    monkeypatch.setattr(gpu, "GPU_TRIAL", replace(gpu.GPU_TRIAL, learn=learn, **tiny))
    monkeypatch.setattr(gpu, "GPU_SWITCHES", {"snake": [""], "arena": [""], "transformer": [""]})
    monkeypatch.setattr(gpu, "GPU_COMPILED", {})
    main(Options("gpu", "cpu", fast=True, json="all.json"))
    (raw,) = json.loads((tmp_path / "all.json").read_text())
    parts = "matmul, snake, food, snake alone, arena, arena alone, transformer"
    assert list(raw["rows"]) == parts.split(", ") and list(raw["rows"]["transformer"]) == ["4, SB3", "4, ours"]
    for rows in raw["rows"].values():
        for row in rows.values():
            assert "note" not in row, row
    snake = raw["rows"]["snake"][""]["found"]
    assert snake["steady"]["charts/samples_per_second"] > 100 and snake["update_flops"] > 1e5
    assert snake["wall_seconds"] < 10 and "eval_score_mean" not in snake
    (food,) = raw["rows"]["food"].values()
    assert len(food["found"]["curve"]) > 1 and food["found"]["eval_score_max"] >= 0
    assert page_of("gpu") == page and not (tmp_path / "benchmarks" / "results").exists()
    assert not (tmp_path / "runs").exists()

"""The table of one GPU."""

import json
from dataclasses import replace
from functools import partial

import pytest
import torch
from benchmark_helpers import ABOUT, CUDA, page_of, parse

from benchmark import main
from benchmarks import gpu, harness
from benchmarks.harness import Options


@pytest.mark.parametrize("sizes", [gpu.GPU_SIZES, gpu.GPU_TRIAL], ids=["whole", "trial"])
def test_every_row_has_valid_flags_and_compiled_rows_are_last(sizes) -> None:
    plan = gpu.gpu_plan(sizes, CUDA)
    assert len({(part, name) for part, name, *_ in plan}) == len(plan)
    for _, _, _, call in plan:
        if call.func in (gpu.speed_run, gpu.sb3_transformer, gpu.learning_run):
            default = "dqn_snake_sb3_compat.py" if call.func is gpu.sb3_transformer else "dqn_snake.py"
            args = parse(call.keywords.get("script", default), call.keywords["flags"])
            assert args.device == "cuda" and args.threads == 1
    compiles = ["--compile" in name for _, name, *_ in plan]
    assert compiles == sorted(compiles) and sum(compiles) == 3


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_a_forked_row_can_use_the_gpu() -> None:
    torch.cuda.get_device_name()
    row = gpu.in_fork(partial(gpu.bf16_matmul_rate, side=256, seconds=0.1, device="cuda"), 60.0)
    assert row.get("found", 0) > 1e9, row


@pytest.mark.slow
def test_a_trial_on_a_cpu_writes_no_page(tmp_path, monkeypatch) -> None:
    page = page_of("gpu")
    tiny = {"snake_widths": (4,), "arena_widths": (1,), "batches": (4,), "alone_seconds": 0.01, "run_seconds": 0.2}
    learn = "--max-seconds 2 --eval-every 0.5 --eval-episodes 10 --log-every 0.1"
    monkeypatch.setattr(gpu, "GPU_TRIAL", replace(gpu.GPU_TRIAL, learn=learn, **tiny))
    monkeypatch.setattr(gpu, "GPU_SWITCHES", {"snake": [""], "arena": [""], "transformer": [""]})
    monkeypatch.setattr(gpu, "GPU_COMPILED", {})
    main(Options("gpu", "cpu", fast=True, json="all.json"))
    (raw,) = json.loads((tmp_path / "all.json").read_text())
    assert list(raw["rows"]) == "matmul, snake, food, snake alone, arena, arena alone, transformer".split(", ")
    notes = [row.get("note") for rows in raw["rows"].values() for row in rows.values()]
    assert not any(notes)
    assert page_of("gpu") == page and not (tmp_path / "benchmarks" / "results").exists()


def test_an_interrupted_suite_keeps_its_rows(tmp_path, monkeypatch) -> None:
    rows = [{"note": "failed: a bug"}] * 3

    def in_fork(call, limit: float) -> dict:
        if not rows:
            raise KeyboardInterrupt
        return rows.pop()

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(harness, "machine", lambda device: ABOUT)
    monkeypatch.setattr(gpu, "in_fork", in_fork)
    with pytest.raises(KeyboardInterrupt):
        main(Options("gpu", "cuda"))
    raw = json.loads((tmp_path / "benchmarks" / "results" / "gpu-cuda.json").read_text())
    assert [len(part) for part in raw["rows"].values()] == [1, 2]
    assert "failed: a bug" in page_of("gpu")

"""The tables of dqn_snake_sb3_compat.py: the sweep, and what it writes into .env."""

import json
import re

import pytest
import torch
from benchmark_helpers import CPU

import dqn_snake_sb3_compat as script
from benchmark import main
from benchmarks import harness, sb3_compat
from benchmarks.harness import Options

ENV = {"OPTIMAL_BATCH_SIZE": "8192", "USE_TORCH_COMPILE": "false", "USE_FLASH_ATTENTION": "true", "USE_BF16": "true"}


@pytest.fixture
def machine(monkeypatch):
    """A made-up machine. Returns the flags of all runs."""

    def start(bf16: bool = False, kernels: str = "math", compiles: bool = True, memory=10**6, slow=10**6) -> list[str]:
        asked = []

        def run(flags: str, options: Options, script: str) -> dict:
            asked.append(flags)
            batch = int(re.search(r"--batch-size (\d+)", flags)[1])
            if batch > memory:
                raise MemoryError
            if batch > slow:
                return {"precision": "float32", "compiled": False, "sdpa": "math", "updates_per_second": 0.0, "run": ""}
            wanted = re.search(r"--sdpa (\w+)", flags)
            kernel = wanted[1] if wanted and wanted[1] in kernels else kernels.split()[0]
            half, compiled = bf16 and "--bf16" in flags, compiles and "--compile" in flags
            speed = 100 * batch**0.5 * (1 + half) * (1 + compiled) / (2 if kernel == "math" else 1)
            return {
                "precision": "bfloat16" if half else "float32",
                "compiled": compiled,
                "sdpa": kernel if kernel == "math" else f"{kernel}_attention",
                "samples_per_second": speed,
                "updates_per_second": speed / batch,
                "env_steps_per_second": 4 * speed / batch,
                "replay_ratio": batch / 4,
                "peak_memory_gib": batch / 100,
                "run": "none",
            }

        monkeypatch.setattr(harness, "run", run)
        return asked

    return start


def cross(text: str) -> dict[str, list[str]]:
    rows = [line.strip("| ").split(" | ") for line in text.split("Samples/s:")[1].splitlines() if line.startswith("|")]
    return {name: values for name, *values in rows}


def test_cells_out_of_memory_are_marked_and_the_others_ranked(machine) -> None:
    machine(memory=64)
    text, raw = sb3_compat.sweep(Options(), CPU)
    assert cross(text)["fp32"] == ["282.8", "400.0", "OOM"]
    assert [row.split(" | ")[1:3] for row in text.splitlines() if re.match(r"\| \d", row)] == [
        ["fp32 + compile", "64"], ["fp32 + compile", "32"], ["fp32", "64"], ["fp32 + math", "64"],
        ["fp32", "32"], ["fp32 + math", "32"],
    ]  # fmt: skip
    assert raw["env"] == {
        "OPTIMAL_BATCH_SIZE": "64",
        "USE_TORCH_COMPILE": "true",
        "USE_FLASH_ATTENTION": "false",
        "USE_BF16": "false",
    }
    assert "800.0 samples/s, 50.00 env steps/s, replay ratio 16" in text
    json.dumps(raw)


def test_a_run_that_was_over_before_its_first_update_has_no_speed(machine) -> None:
    machine(slow=64)
    assert cross(sb3_compat.sweep(Options(), CPU)[0])["fp32"] == ["282.8", "400.0", "no update in time"]


def test_an_inactive_switch_is_marked_and_not_tried_again(machine) -> None:
    asked = machine(compiles=False)
    text, raw = sb3_compat.sweep(Options(), CPU)
    rows = cross(text)
    assert set(rows["bf16"]) == {"bf16 not active, float32 instead"}
    assert set(rows["fp32 + flash"]) == {"flash not active, math instead"}
    assert set(rows["fp32 + compile"]) == {"compile not active, eager mode instead"}
    assert set(rows["fp32 + compile + flash"]) == {
        "compile not active, eager mode instead; flash not active, math instead"
    }
    assert set(rows["tf32"]) == set(rows["fp32 + efficient"]) == {"needs CUDA"}
    assert not any("tf32" in flags or "efficient" in flags for flags in asked)
    assert [sum(word in flags for flags in asked) for word in ("--bf16", "flash", "--compile", "")] == [1, 1, 1, 9]
    assert {cell["configuration"] for cell in raw["cells"] if not cell["mark"]} == {"fp32", "fp32 + math"}


def test_every_switch_has_its_row_and_the_best_can_be_set_in_env(machine, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    machine(bf16=True, kernels="flash efficient math", memory=8192)
    text, raw = sb3_compat.sweep(Options(), torch.device("cuda"))
    names = "fp32, tf32, bf16, bf16 + flash, bf16 + efficient, bf16 + math, bf16 + compile, bf16 + compile + flash"
    assert list(cross(text))[2:] == names.split(", ")
    assert [cell["batch"] for cell in raw["cells"][:8]] == [2**power for power in range(7, 15)]
    assert {cell["mark"] for cell in raw["cells"]} == {"", "OOM"}
    assert raw["env"] == ENV | {"USE_TORCH_COMPILE": "true", "USE_FLASH_ATTENTION": "false"}


@pytest.mark.parametrize("old", [None, "FOO=1", "export USE_BF16='no'\nFOO=1\n"])
def test_the_script_reads_the_new_env(tmp_path, old) -> None:
    if old is not None:
        (tmp_path / ".env").write_text(old)
    sb3_compat.write_env(ENV)
    assert script.settings() == {"batch_size": 8192, "compile": False, "flash_attention": True, "bf16": True}
    assert old is None or "FOO=1" in (tmp_path / ".env").read_text().splitlines()


def test_an_env_that_cannot_be_written_is_one_line(tmp_path, capsys) -> None:
    (tmp_path / ".env").write_bytes(b"\xff\xfe")
    with pytest.raises(SystemExit) as stop:
        sb3_compat.write_env(ENV)
    assert stop.value.code == 2 and "--write-env: " in capsys.readouterr().err


def test_the_sweep_writes_env(machine) -> None:
    machine()
    main(Options("sweep", "cpu", fast=True, write_env=True))
    assert script.settings() == {"batch_size": 32, "compile": True, "flash_attention": False, "bf16": False}

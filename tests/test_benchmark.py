"""The benchmark without measuring: what it makes of numbers, what it writes where, and what it refuses."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
import torch

import benchmark
import dqn_mario_async
import dqn_snake_sb3_compat as script
import ppo_metta
from benchmark import Options, main, write_env

GAMES = "score", "hearts", "distance"
SCRIPTS = {"dqn_snake.py": benchmark.dqn_snake, "ppo_metta.py": ppo_metta, "dqn_mario_async.py": dqn_mario_async}
CPU, CUDA, ROOT = torch.device("cpu"), torch.device("cuda"), Path(__file__).parent.parent
REAL = pytest.mark.skipif(importlib.util.find_spec("mettagrid") is None, reason="needs mettagrid")
ABOUT = {"commit": "abc", "date": "2026-01-01", "hardware": "a GPU", "versions": {"torch": "2"}}
ENV = {"OPTIMAL_BATCH_SIZE": "8192", "USE_TORCH_COMPILE": "false", "USE_FLASH_ATTENTION": "true", "USE_BF16": "true"}


@pytest.fixture(autouse=True)
def threads_as_before():
    """Parts of runs that are measured in this process set their number of threads."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def nowhere_else(threads_as_before, monkeypatch, tmp_path) -> None:
    """A folder with a copy of benchmarks.md, no settings around it, and no run that is real."""
    for name in script.SETTINGS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(benchmark, "ROOT", tmp_path)
    shutil.copy(ROOT / "benchmarks.md", tmp_path)


@pytest.fixture
def machine(monkeypatch):
    """A made-up machine: what the script would answer to the sweep's flags. Gives the flags it was asked for."""

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

        monkeypatch.setattr(benchmark, "run", run)
        return asked

    return start


def cross(text: str) -> dict[str, list[str]]:
    rows = [line.strip("| ").split(" | ") for line in text.split("Samples/s:")[1].splitlines() if line.startswith("|")]
    return {name: values for name, *values in rows}


def test_a_cell_that_is_out_of_memory_is_marked_and_the_others_are_ranked(machine) -> None:
    machine(memory=64)
    text, raw = benchmark.table_sweep(Options(), CPU)
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
    assert cross(benchmark.table_sweep(Options(), CPU)[0])["fp32"] == ["282.8", "400.0", "no update in time"]


def test_where_nothing_fits_the_sweep_says_so(machine) -> None:
    machine(memory=1)
    with pytest.raises(SystemExit, match="nothing that .env can set could be measured"):
        benchmark.table_sweep(Options(), CPU)


def test_a_switch_that_is_not_active_is_marked_and_not_tried_again(machine) -> None:
    asked = machine(compiles=False)
    text, raw = benchmark.table_sweep(Options(), CPU)
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


def test_every_switch_has_its_row_and_the_winner_is_one_that_env_can_say(machine, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    machine(bf16=True, kernels="flash efficient math", memory=8192)
    text, raw = benchmark.table_sweep(Options(), torch.device("cuda"))
    names = "fp32, tf32, bf16, bf16 + flash, bf16 + efficient, bf16 + math, bf16 + compile, bf16 + compile + flash"
    assert list(cross(text))[2:] == names.split(", ")
    assert [cell["batch"] for cell in raw["cells"][:8]] == [2**power for power in range(7, 15)]
    assert {cell["mark"] for cell in raw["cells"]} == {"", "OOM"}
    assert raw["env"] == ENV | {"USE_TORCH_COMPILE": "true", "USE_FLASH_ATTENTION": "false"}


def test_every_command_of_the_sweep_is_understood(machine, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    asked = machine(bf16=True, kernels="flash efficient math")
    benchmark.table_sweep(Options(fast=True), CPU)
    benchmark.table_sweep(Options(fast=True), torch.device("cuda"))
    for flags in asked:
        script.fill_defaults(script.tyro.cli(script.Args, args=flags.split()), CPU)


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
        assert {name: env[name] for name in ENV} == benchmark.PLAIN
        return subprocess.CompletedProcess(command, code, "", stderr)

    monkeypatch.setenv("USE_BF16", "1")
    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(failure):
        benchmark.run("--bf16", Options(), "dqn_snake_sb3_compat.py")


@pytest.mark.parametrize("stderr, code", [("ModuleNotFoundError: No module named 'jumanji'", 2), ("a bug", None)])
def test_a_peer_that_is_not_installed_is_named(monkeypatch, capsys, stderr, code) -> None:
    monkeypatch.setattr(subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, 1, "", stderr))
    with pytest.raises(SystemExit) as stop:
        benchmark.apart(benchmark.jumanji_rates, widths=(1,), seconds=1)
    if code:
        assert stop.value.code == code and "jumanji is not installed; pip install" in capsys.readouterr().err
    else:
        assert stop.value.code == "jumanji_rates failed:\na bug"


OLD = """# mine
export  WANDB_API_KEY = 'a # b'

export USE_BF16=0   # slow on my laptop
OPTIMAL_BATCH_SIZE = "32"# tuned
NOTE="two lines
USE_BF16=keep
"
no assignment here
USE_TORCH_COMPILE
LAST=32#1"""
NEW = """# mine
export  WANDB_API_KEY = 'a # b'

export USE_BF16=true   # slow on my laptop
OPTIMAL_BATCH_SIZE = "8192"# tuned
NOTE="two lines
USE_BF16=keep
"
no assignment here
USE_TORCH_COMPILE=false
LAST=32#1
USE_FLASH_ATTENTION=true
"""


@pytest.mark.parametrize("line_end", ["\n", "\r\n"])
def test_env_keeps_what_is_not_replaced(tmp_path, line_end) -> None:
    old, new = OLD.replace("\n", line_end), NEW.replace("\n", line_end)
    (tmp_path / ".env").write_bytes(old.encode())
    (tmp_path / ".env").chmod(0o640)
    write_env(ENV)
    assert (tmp_path / ".env").read_bytes().decode().splitlines() == new.splitlines()
    assert (tmp_path / ".env").stat().st_mode & 0o777 == 0o640
    write_env(ENV)  # again: nothing changes any more
    assert (tmp_path / ".env").read_bytes().decode().splitlines() == new.splitlines()
    assert os.listdir(tmp_path).count(".env.tmp") == 0


@pytest.mark.parametrize("old", [None, "", "FOO=1", "USE_BF16='no'", "USE_BF16=1\nUSE_BF16=0\n", "USE_BF16 = # off\n"])
def test_the_script_reads_what_was_written(tmp_path, old) -> None:
    if old is not None:
        (tmp_path / ".env").write_text(old)
    write_env(ENV)
    values, sources = script.settings()
    assert values == {"batch_size": 8192, "compile": False, "flash_attention": True, "bf16": True}
    assert set(sources.values()) == {f"{name} in .env" for name in ENV}


def test_an_env_behind_a_link_is_changed_where_it_is(tmp_path) -> None:
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared" / "env").write_text("A=1\n")
    (tmp_path / ".env").symlink_to(tmp_path / "shared" / "env")
    write_env({"USE_BF16": "true"})
    assert (tmp_path / ".env").is_symlink()
    assert (tmp_path / "shared" / "env").read_text() == "A=1\nUSE_BF16=true\n"


@pytest.mark.parametrize("flags", [dict(suite="env"), dict(suite="sweep")])
def test_an_env_that_cannot_be_written_is_refused_before_the_sweep(tmp_path, capsys, machine, flags) -> None:
    asked = machine()
    (tmp_path / ".env").write_bytes(b"\xff\xfe")
    with pytest.raises(SystemExit) as stop:
        main(Options(device="cpu", write_env=True, **flags))
    assert stop.value.code == 2
    assert re.fullmatch(r"benchmark.py: --write-env: .* works\n", capsys.readouterr().err)
    assert not asked


def test_the_sweep_replaces_its_own_section_and_writes_env(tmp_path, machine, capsys) -> None:
    def split() -> list[str]:
        page = (tmp_path / "benchmarks.md").read_text()
        return re.split(r"(?s)(?<=<!-- sweep cpu -->)(.*?)(?=<!-- end -->)", page, maxsplit=1)

    machine()
    before, _, after = split()
    for _ in range(2):
        main(Options("sweep", "cpu", fast=True, write_env=True))
    now, section, behind = split()
    assert (now, behind) == (before, after)
    assert "`python benchmark.py --suite sweep --fast` on" in section and section.count("| fp32 | 282.8 |") == 1
    assert len(json.loads((tmp_path / "benchmarks" / "sweep.json").read_text())["cells"]) == 8
    assert script.settings()[0] == {"batch_size": 32, "compile": True, "flash_attention": False, "bf16": False}
    assert "OPTIMAL_BATCH_SIZE=32 USE_TORCH_COMPILE=true" in capsys.readouterr().out


def test_a_device_that_was_never_measured_gets_a_section_below_the_cpu_s(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(benchmark, "machine", lambda device: ABOUT)
    monkeypatch.setitem(benchmark.TABLES, "sweep", lambda options, device: ("the table", {}))
    before = (tmp_path / "benchmarks.md").read_text()
    main(Options("sweep", "cuda"))
    after = (tmp_path / "benchmarks.md").read_text()
    new = re.search(r"\n<!-- sweep cuda -->.*?the table.*?\n<!-- end -->\n", after, re.S)[0]
    assert after.replace(new, "", 1) == before
    assert after.index("<!-- sweep cpu -->") < after.index(new)


def test_suite_sb3_has_the_side_by_side_first_and_the_sweep_last(monkeypatch) -> None:
    ran = []
    for name in benchmark.TABLES:
        monkeypatch.setitem(benchmark.TABLES, name, lambda options, device, name=name: (ran.append(name), ("", {}))[1])
    main(Options("sb3", "cpu"))
    assert ran == ["sb3-speed", "sb3-learn", "sweep"]


@pytest.fixture
def measures(monkeypatch):
    """Lets --suite train find these ratios to a peer."""

    def start(**ratios: list[float]) -> None:
        monkeypatch.setitem(benchmark.TABLES, "train", lambda options, device: ("the table", {"ratios": ratios}))

    return start


def then(tmp_path, **ratios: list[float]) -> str:
    """A file to compare with: what --suite train measured before."""
    about = {"table": "train", "device": "cpu", "command": "python benchmark.py --suite train"}
    (tmp_path / "then.json").write_text(json.dumps(about | {"commit": "abc", "hardware": "a laptop", "ratios": ratios}))
    return "then.json"


@pytest.mark.parametrize(
    "now, says",
    [
        ([5.0, 6.0, 7.0], "holds"),
        ([6.9, 5.5, 5.4], "holds"),
        ([5.1, 5.1, 9.9], "fell"),  # 15 % lower, whatever its rounds are apart
        ([3.9, 4.0, 4.1], "fell"),
        ([5.3, 5.3, 9.0, 9.0, 5.3], "fell"),
        ([9.0], "1 rounds, 3 needed"),
        ([9.0, 9.0], "2 rounds, 3 needed"),
        ([6.0, 6.0, float("nan")], "not a number"),
        ([9.0, 9.0, float("inf")], "not a number"),
        ([], "missing"),
        (None, "missing"),
    ],
)
def test_compare_fails_where_a_median_fell_or_cannot_be_compared(tmp_path, capsys, measures, now, says) -> None:
    old = then(tmp_path, peer=[5.0, 6.0, 7.0], other=[1.0, 1.0, 1.0])
    measures(**{"other": [1.0, 1.1, 1.2], "new": [0.1]} | ({} if now is None else {"peer": now}))
    if says == "holds":
        main(Options("train", "cpu", compare=old))
    else:
        with pytest.raises(SystemExit) as stop:
            main(Options("train", "cpu", compare=old))
        assert stop.value.code == 1
    out = capsys.readouterr().out
    row = re.search(r"\| train, peer \| 6.00 \(5.00–7.00\) \| (.*) \|", out)[1]
    assert row.split(" | ")[-1] == says
    assert "| train, other | 1.00 (1.00–1.00) | 1.10 (1.00–1.20) | +10% | holds |" in out
    assert "train, then: a laptop" in out and f"{1 + (says == 'holds')} of 2 ratios hold" in out


def test_a_comparison_that_fails_fails_again(tmp_path, measures) -> None:
    """It writes nothing that the next one compares with."""
    measures(peer=[6.0, 6.0, 6.0])
    main(Options("train", "cpu"))
    folder, page = tmp_path / "benchmarks", (tmp_path / "benchmarks.md").read_text()
    measures(peer=[4.0, 4.0, 4.0])
    for _ in range(2):
        with pytest.raises(SystemExit) as stop:
            main(Options("train", "cpu", compare="benchmarks/train.json", json="now.json"))
        assert stop.value.code == 1
        assert json.loads((folder / "train.json").read_text())["ratios"] == {"peer": [6.0, 6.0, 6.0]}
        assert json.loads((tmp_path / "now.json").read_text())[0]["ratios"] == {"peer": [4.0, 4.0, 4.0]}
    assert (tmp_path / "benchmarks.md").read_text() == page and "| peer" not in page


def test_compare_reads_one_table_or_a_list_and_says_what_was_not_compared(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(benchmark, "draw", lambda device: None)
    for name in ("env", "act", "train", "update"):
        raw = {"ratios": {"peer": [2.0, 2.0, 2.0]}} if name in ("env", "train") else {}
        monkeypatch.setitem(benchmark.TABLES, name, lambda options, device, raw=raw: ("the table", raw))
    main(Options("snake", "cpu", json="all.json"))
    for file, compared, not_compared in (("all.json", 2, 2), ("benchmarks/train.json", 1, 3)):
        capsys.readouterr()
        main(Options("snake", "cpu", compare=file))
        out = capsys.readouterr().out
        assert f"{compared} of {compared} ratios hold" in out and out.count("not compared: ") == not_compared


ONE = '{"table": "train", "device": "cpu", "command": "b", "ratios": {"peer": [1, 1, 1]}}'


@pytest.mark.parametrize(
    "flags, file, named",
    [
        (dict(compare="then.json"), None, "--compare then.json: not a file of results (FileNotFoundError"),
        (dict(compare="then.json"), "{", "--compare then.json: not a file of results (JSONDecodeError"),
        (dict(compare="then.json"), "[1]", "--compare then.json: not a file of results (AttributeError"),
        (dict(compare="then.json"), '{"command": "x"}', "--compare then.json: it has no ratios of train on cpu"),
        (dict(compare="then.json"), '{"table": "env", "device": "cpu", "ratios": {"a": [1]}}', "no ratios of train"),
        (dict(compare=""), None, "--compare : not a file of results"),
        (dict(compare="then.json"), ONE.replace("[1, 1, 1]", "[1, 1]"), "peer has 2 rounds, [1, 1]; 3 or more"),
        (dict(compare="then.json"), ONE.replace("[1, 1, 1]", "[1, 0, 1]"), "peer has 3 rounds, [1, 0, 1]; 3 or more"),
        (dict(compare="then.json"), ONE.replace("[1, 1, 1]", "1"), "not a file of results (TypeError"),
        (dict(compare="then.json"), ONE.replace('"command"', '"x"'), "not a file of results (KeyError: 'command'"),
        (dict(compare="then.json", fast=True, repeats=3), ONE, "train was measured by b; with --fast in both or"),
        (dict(compare="then.json"), ONE.replace('"b"', '"b --fast"'), "train was measured by b --fast; with --fast"),
        (dict(compare="then.json", repeats=2), ONE, "--compare: 2 rounds say too little; --repeats 3 or more works"),
        (dict(compare="then.json", json="./then.json"), ONE, "--json ./then.json: is what --compare compares with"),
        (dict(json="nowhere/file.json"), None, "--json nowhere/file.json: cannot be written (No such file"),
        (dict(json="."), None, "--json .: cannot be written (Is a directory)"),
        (dict(json=""), None, "--json : cannot be written"),
        (dict(repeats=0), None, "--repeats 0: must be at least 1"),
        (dict(suite="metta", seconds=0), None, "--seconds 0: must be at least 1"),
        (dict(seconds=60), None, "--seconds 60: is of the runs of metta-presets"),
        (dict(device="cuda"), None, "--device cuda: "),
        (dict(suite="gpu"), None, "--suite gpu: needs CUDA; with --device cpu --fast its code is tried out"),
        (dict(suite="gpu", device="auto"), None, "--suite gpu: needs CUDA; with --device cpu --fast its code"),
    ],
)  # fmt: skip
def test_what_cannot_work_is_refused_in_one_line_before_anything_runs(
    tmp_path, capsys, monkeypatch, flags, file, named
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setitem(benchmark.TABLES, "train", None)
    if file:
        (tmp_path / "then.json").write_text(file)
    with pytest.raises(SystemExit) as stop:
        main(Options(**{"suite": "train", "device": "cpu"} | flags))
    error = capsys.readouterr().err
    assert stop.value.code == 2 and error.count("\n") == 1 and named in error


@pytest.mark.parametrize("where", ["benchmarks", "benchmarks/train.json"])
def test_a_place_for_results_that_cannot_be_written_is_refused_before_anything_runs(
    tmp_path, capsys, monkeypatch, where
) -> None:
    monkeypatch.setitem(benchmark.TABLES, "train", None)
    (tmp_path / "benchmarks").mkdir()
    if where == "benchmarks":
        (tmp_path / "benchmarks").rmdir()
        (tmp_path / "benchmarks").write_text("a file where a folder should be")
    else:
        (tmp_path / "benchmarks" / "train.json").mkdir()
    with pytest.raises(SystemExit) as stop:
        main(Options("train", "cpu"))
    error = capsys.readouterr().err
    assert stop.value.code == 2 and error.count("\n") == 1 and "benchmarks/train.json: cannot be written" in error


def test_what_could_not_be_written_after_all_is_printed(tmp_path, capsys, monkeypatch) -> None:
    """As on a full disk: the next table is still measured, and the numbers are not lost."""

    def table_train(options: Options, device: torch.device) -> tuple[str, dict]:
        monkeypatch.setattr(Path, "write_text", full)
        return "the table", {"ratios": {"peer": [1.25]}}

    def full(self, text: str) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setitem(benchmark.TABLES, "train", table_train)
    main(Options("train", "cpu", json="all.json"))
    out = capsys.readouterr().out
    assert out.count("cannot be written (No space left on device)") == 3  # --json, benchmarks/train.json, benchmarks.md
    assert "the table" in out and out.count('"ratios": {"peer": [1.25]}') == 2


@pytest.mark.parametrize("git", [None, "exit 128", "echo abc1234"])
def test_the_commit_is_optional(tmp_path, monkeypatch, measures, git) -> None:
    """Without git, and outside a repository."""
    if git:
        (tmp_path / "git").write_text(f"#!/bin/sh\n{git}\n")
        (tmp_path / "git").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    measures(peer=[1.0])
    main(Options("train", "cpu"))
    commit = "abc1234" if git == "echo abc1234" else "unknown"
    assert json.loads((tmp_path / "benchmarks" / "train.json").read_text())["commit"] == commit
    assert f", commit {commit}\n<!-- end -->" in (tmp_path / "benchmarks.md").read_text()


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
        benchmark.run("", Options())
    assert len(set(names)) == 3


def test_json_says_how_and_where_it_was_measured(tmp_path, measures) -> None:
    measures(peer=[1.0])
    main(Options("train", "cpu", repeats=3, json=str(tmp_path / "all.json")))
    single = json.loads((tmp_path / "benchmarks" / "train.json").read_text())
    assert json.loads((tmp_path / "all.json").read_text()) == [single]
    assert single["command"] == "python benchmark.py --suite train --repeats 3"
    assert single["table"] == "train" and single["device"] == "cpu" and single["ratios"] == {"peer": [1.0]}
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", single["date"]) and "commit" in single and "cores of" in single["hardware"]
    assert single["versions"]["torch"] == torch.__version__ and single["versions"]["stable-baselines3"]


def test_every_table_has_its_section_and_replaces_nothing_else(tmp_path, monkeypatch) -> None:
    def sections() -> dict[str, str]:
        parts = re.split(r"(<!-- [\w-]+ cpu -->|<!-- end -->)", (tmp_path / "benchmarks.md").read_text())
        return {f"{i} {part}": behind for i, (part, behind) in enumerate(zip(["", *parts[1::2]], parts[::2]))}

    before = sections()
    monkeypatch.setattr(benchmark, "draw", lambda device: None)
    for name in benchmark.TABLES:
        monkeypatch.setitem(benchmark.TABLES, name, lambda options, device: ("the table", {}))
        main(Options(name, "cpu"))
        after = sections()
        changed = [part for part, behind in after.items() if before[part] != behind]
        assert [part.split(maxsplit=1)[1] for part in changed] == [f"<!-- {name} cpu -->"]
        assert "the table" in after[changed[0]] and f"--suite {name}`" in after[changed[0]]
        before = after


def test_a_table_without_a_section_gets_one_at_the_end(tmp_path) -> None:
    before = (tmp_path / "benchmarks.md").read_text()
    for text in ("first", "second"):
        benchmark.write_section("other", CPU, text)
        section = f"\n## other\n\n<!-- other cpu -->\n{text}\n<!-- end -->\n"
        assert (tmp_path / "benchmarks.md").read_text() == before + section


def test_help_names_every_suite_and_table() -> None:
    with pytest.raises(SystemExit):
        benchmark.tyro.cli(Options, args=["--suite", "nonsense"])
    for name in (*benchmark.SUITES, *benchmark.TABLES):
        assert benchmark.tyro.cli(Options, args=["--suite", name]).suite == name
        assert re.search(rf"\b{name}\b", benchmark.__doc__), name
    assert Options().suite == "snake"


def test_medians_have_their_spread_and_the_first_round_does_not_count() -> None:
    assert benchmark.spread([3.0, 1.0, 2000.0]) == "3 (1–2,000)"
    assert benchmark.spread([1.25], 1) == "1.2 (1.2–1.2)"
    assert benchmark.ratios([6.0, 8.0], [2.0, 4.0]) == [3.0, 2.0]
    order = []
    calls = {name: lambda name=name: (order.append(name), len(order))[1] for name in "AB"}
    assert benchmark.in_turn(Options(repeats=2), calls) == {"A": [3, 5], "B": [4, 6]}
    assert "".join(order) == "ABABAB"
    assert list(Options(repeats=9).seeds) == [1, 2, 3] and list(Options(fast=True).seeds) == [1]


def test_a_score_is_reached_at_the_first_evaluation_that_has_it() -> None:
    curve = [[0.0, 0.0], [2.0, 4.9], [4.1, 10.2], [6.0, 9.0], [8.2, 11.0]]
    assert [benchmark.reached(curve, goal) for goal in (5, 10, 11, 12)] == [4.1, 4.1, 8.2, None]


def test_time_to_score_gives_bounds_where_a_score_was_not_reached(monkeypatch) -> None:
    seeds, recipe = [], {}

    def apart(function, **arguments):
        if function is benchmark.sb3_rate:
            return {"env_steps_per_second": 1000.0 * arguments["threads"]}
        assert function is benchmark.sb3_curve
        seeds.append((arguments["name"], arguments["seed"]))
        recipe.update(arguments if "recipe" in arguments["name"] else {})
        if "PPO" in arguments["name"]:
            return [[0.0, 0.0], [599.0, 4.0]]
        return [[0.0, 0.0], [50.0, 6.0], [100.0 * arguments["seed"], 10.0], [1199.0, 12.0]]

    ours = [[2.0, 5.0], [4.0, 10.0], [10.0, 25.0], [41.0, 29.0]]
    monkeypatch.setattr(benchmark, "apart", apart)
    monkeypatch.setattr(benchmark, "run", lambda flags, options: {"run": "none"})
    monkeypatch.setattr(benchmark, "curve", lambda folder: ours)
    text, raw = benchmark.table_time_to_score(Options(repeats=2), CPU)
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


def test_who_learns_is_tested_after_a_while_and_after_a_twentieth_of_its_time(monkeypatch) -> None:
    now = [0.0]

    class Model:
        def learn(self, steps, callback):
            while callback():
                now[0] += 0.25

    def test(model) -> float:
        now[0] += 100.0  # stops the clock
        return now[0] > 10_000

    monkeypatch.setattr(benchmark.time, "perf_counter", lambda: now[0])
    seconds = [at for at, _ in benchmark.learning_curve(Model, test, 60, 1, 1)]
    assert seconds[:21] == [*range(21)] and 55 < seconds[-1] <= 60
    assert all(0 <= after - before - max(1, after / 20) < 0.3 for before, after in pairwise(seconds))


def test_time_to_hearts_and_distance_compare_with_the_first_row(monkeypatch) -> None:
    asked, curves = [], {True: [[0.0, 0.0], [40.0, 700.0]], False: [[0.0, 0.0], [800.0, 100.0]]}

    def apart(function, **arguments):
        if function is benchmark.sb3_mario_rate:
            return {"env_steps_per_second": 1000.0 / arguments["threads"]}
        return curves[arguments.get("tuned", "our" in arguments.get("name", ""))]

    monkeypatch.setattr(benchmark, "apart", apart)
    monkeypatch.setattr(benchmark, "run", lambda flags, options, script: asked.append((script, flags)) or {"run": "x"})
    monkeypatch.setattr(benchmark, "curve", lambda folder: [[20.0, 1.5], [100.0, 6.0], [600.0, 9.0]])
    monkeypatch.setattr(benchmark, "readings", lambda run, tag: [[10.0, 650.0], [20.0, 1050.0], [120.0, 1060.0]])
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    text, raw = benchmark.table_time_to_hearts(Options(repeats=1), CPU)
    assert "| SB3's PPO, defaults | 800.0 | 800.0 | 800.0 | 800.0 |" in text
    assert "| SB3's PPO, our settings | 2.0 (2.0–2.0) | 2.0 (2.0–2.0) | 0.4 (0.4–0.4) | 0.4 (0.4–0.4) |" in text
    assert "| ours, no memory | 1.0 (1.0–1.0)" in text
    text, raw = benchmark.table_time_to_distance(Options(repeats=1), CPU)
    assert "| ours | 10.0 | 10.0 | 20.0 | 20.0 |" in text
    assert "| SB3's DQN, our recipe | 40.0 | 40.0 | > 600 | > 600 |" in text
    assert "| SB3's PPO, defaults | > 60.0 (60.0–60.0) |" in text
    assert raw["plans"]["SB3's DQN, our recipe"]["threads"] == 1
    json.dumps(raw)
    for file, flags in asked:
        benchmark.tyro.cli(SCRIPTS[file].Args, args=flags.split())
    assert len(asked) == 3


def test_the_clock_of_a_run_stops_while_it_is_evaluated(tmp_path, monkeypatch) -> None:
    evaluate = benchmark.dqn_snake.evaluate
    monkeypatch.setattr(benchmark.dqn_snake, "evaluate", lambda *args: (time.sleep(0.1), evaluate(*args))[1])
    flags = "--device cpu --threads 1 --board 5x5 --num-envs 64 --hidden-size 16 --learning-starts 100 --no-video "
    flags += "--total-timesteps 1280 --log-every 1e-6 --eval-every 1e-6 --eval-episodes 50 --run-name short"
    args = benchmark.tyro.cli(benchmark.dqn_snake.Args, args=flags.split())
    summary = benchmark.dqn_snake.main(args)
    found = benchmark.curve(tmp_path / "runs" / "short")
    seconds, scores = zip(*found)
    assert list(seconds) == sorted(seconds) and scores[-1] == pytest.approx(summary["eval_score_mean"])
    assert seconds[-1] == pytest.approx(summary["env_steps"] / summary["env_steps_per_second"], rel=0.2)
    assert len(found) == 21 and seconds[-1] + 0.1 * 20 < summary["wall_seconds"]


def test_the_parts_of_a_snake_run_are_measured_alone() -> None:
    assert min(benchmark.act_rates((1, 8), 0.01, "cpu")) > 10
    assert benchmark.sb3_act_rate(2, 0.01, "cpu") > 10 and min(benchmark.snake_rates((8,), 0.01, "cpu")) > 10


def test_sb3_sees_and_moves_as_ours_does() -> None:
    env = benchmark.Turns(benchmark.SnakeEnv())
    env.reset(seed=1)
    for action, heading in ((0, 0), (1, 0), (2, 1), (2, 2), (0, 1)):  # left of right is up, ahead, right again ...
        env.step(action)
        assert env.unwrapped.heading == heading
    flat = benchmark.SnakeView(env.observation_space, 0, "cpu")
    obs = torch.as_tensor(env.unwrapped.codes())[None]
    _, seen, food = flat.view.features(obs)
    features = flat(obs.float())
    assert features.shape == (1, flat.features_dim) and features[0, seen[0].numel() :].argmax() == food
    assert torch.equal(features[0, : seen[0].numel()], seen[0].flatten())
    assert benchmark.SnakeView(env.observation_space, 32, "cpu")(obs.float()).shape == (1, 32)


@pytest.mark.parametrize("name", benchmark.AGENTS)
def test_every_agent_of_sb3_learns_and_is_evaluated(name: str) -> None:
    found = benchmark.sb3_curve(name, 0.3, 0.1, 30, device="cpu", threads=1, seed=1, explored=100)
    assert found[0] == [0.0, 0.0] and len(found) > 1
    assert 0.1 <= found[1][0] < 10 and 0 <= found[1][1] < 30


@pytest.mark.parametrize("name", benchmark.MARIO_AGENTS)
def test_every_agent_of_sb3_learns_mario_and_is_evaluated(name: str) -> None:
    found = benchmark.sb3_mario_curve(name, 0.3, 0.1, 1000, device="cpu", threads=1, seed=1, explored=100)
    assert found[0] == [0.0, 0.0] and len(found) > 1 and 0 < found[1][1] < 1100
    assert benchmark.sb3_mario_rate(0.2, name=name, threads=1, device="cpu")["env_steps_per_second"] > 10


def test_sb3_s_mario_network_is_ours_without_its_head() -> None:
    torch.manual_seed(1)
    args = dqn_mario_async.Args(dueling=False)
    ours, space = dqn_mario_async.QNetwork(args, CPU), benchmark.gymnasium.spaces.Box(0, 255, (4, 84, 84), "uint8")
    theirs = benchmark.MarioView(space)
    theirs.trunk.load_state_dict({k: v for k, v in ours.state_dict().items() if "head" not in k})
    obs = torch.randint(256, (2, 4, 84, 84), dtype=torch.uint8)
    seen = obs.float()
    assert torch.equal(ours.head(theirs(seen)), ours(obs)) and torch.equal(seen, obs.float())


@pytest.mark.parametrize("tuned", [True, False])
def test_sb3_s_ppo_learns_in_the_arena_and_is_evaluated(tuned: bool, monkeypatch) -> None:
    args = benchmark.metta_args
    monkeypatch.setattr(benchmark, "metta_args", lambda flags, device: args(f"--num-envs 2 {flags}", device))
    evaluate = ppo_metta.evaluate
    monkeypatch.setattr(ppo_metta, "evaluate", lambda agent, args, episodes, device: evaluate(agent, args, 6, device))
    found = benchmark.sb3_arena_curve(tuned, seconds=0.5, every=0.2, goal=1, seed=1, threads=1, device="cpu")
    assert found[0] == [0.0, 0.0] and len(found) > 1 and 0.2 <= found[1][0] < 10 and 0 <= found[1][1] < 1


def test_switches_are_flags_that_the_script_knows(monkeypatch) -> None:
    asked = []
    result = {name: 1.0 for name in "env_steps_per_second updates_per_second samples_per_second replay_ratio".split()}
    result |= {"precision": "float32", "sdpa": None, "compiled": True, "cudagraph": False, "peak_memory_gib": 1.0}

    def run(flags: str, options: Options, script: str = "dqn_snake.py") -> dict:
        asked.append((script, flags))
        return result

    monkeypatch.setattr(benchmark, "run", run)
    monkeypatch.setattr(benchmark, "free_gib", lambda device: 100)
    for device in (CPU, torch.device("cuda")):
        text, _ = benchmark.table_switches(Options(repeats=1), device)
        benchmark.table_scaling(Options(repeats=1), device)
    assert "| `--compile --max-seconds 60` | 1 (1–1) | 1.00 (1.00–1.00) | 1.00 | float32, compiled |" in text
    assert {file for file, _ in asked} == set(SCRIPTS)
    for file, flags in asked:
        SCRIPTS[file].fill_defaults(benchmark.tyro.cli(SCRIPTS[file].Args, args=flags.split()), CPU)


def test_what_would_not_fit_is_not_started(monkeypatch) -> None:
    asked = []

    def run(flags: str, options: Options, script: str) -> dict:
        asked.append(f"{script} {flags}")
        size = int(re.search(r"--(?:envs-per-collector|agents|num-envs|batch-size|board) (\d+)", flags)[1])
        keys = "env_steps_per_second updates_per_second samples_per_second replay_ratio".split()
        return dict.fromkeys(keys, 1.0) | {"peak_memory_gib": 1 + size / 1024}

    monkeypatch.setattr(benchmark, "run", run)
    monkeypatch.setattr(benchmark, "free_gib", lambda device: 10.0)
    text, _ = benchmark.table_scaling(Options(repeats=1), CPU)
    assert "| `dqn_snake.py --num-envs 65536` | too little memory |" in text
    assert "| `dqn_snake.py --num-envs 4096` | 1 (1–1) |" in text and not any("envs 65536" in flags for flags in asked)


def test_pictures_are_drawn_from_the_files(tmp_path) -> None:
    folder = tmp_path / "benchmarks"
    folder.mkdir()
    benchmark.draw(CPU)
    assert not list(folder.iterdir())
    rates = {"SnakeBatch": [[1, 9]], "jumanji": [[2, 3]], "rule book, G": [[1]]}
    (folder / "env.json").write_text(json.dumps({"widths": [1, 128], "rates": rates}))
    (folder / "act.json").write_text(json.dumps({"widths": [1, 128], "rates": {"ours": [[1, 9]], "1": [1.0]}}))
    cells = [{"script": script, "flag": "--num-envs", "value": 8} for script in ("dqn_snake.py", "ppo_metta.py")]
    cells[0]["runs"] = [{"env_steps_per_second": 7.0}]
    (folder / "scaling.json").write_text(json.dumps({"cells": cells}))
    for game in GAMES:
        (folder / f"time-to-{game}.json").write_text(json.dumps({"curves": {"ours": [[[1, 2], [3, 4]]]}}))
    (folder / "learn.json").write_text(json.dumps({"runs": [{"flags": "--max-seconds 600", "curve": [[1, 2]]}]}))
    benchmark.draw(CPU)
    pictures = {"throughput.png", "learning.png", *(f"time-to-{game}.png" for game in GAMES)}
    assert {path.name for path in folder.glob("*.png")} == pictures


def test_the_tables_of_mario_say_commands_that_the_script_understands(monkeypatch) -> None:
    """And what they make of the numbers, with none of them measured."""
    asked, calls = [], []
    summary = {"experience_rate": 450.0, "env_steps": 5000, "env_steps_per_second": 5000.0, "replay_ratio": 0.5}
    summary |= {"train_fraction": 0.25, "produced": 700, "stored": 690, "producer_wait_ms_mean": 0.05}
    summary |= {
        "replay_kib_per_transition": 7.0,
        "eval_flags": 0.9,
        "eval_distance_mean": 900.0,
        "samples_per_second": 2500.0,
        "ring_fill": 0.25,
        "weight_age": 2.0,
        "precision": "float32",
        "compiled": False,
        "cudagraph": True,
    }

    def run(flags: str, options: Options, script: str) -> dict:
        asked.append(flags)
        beside = "--num-collectors 1" in flags
        return summary | {"run": "none", "env_steps_per_second": 8000.0 if beside else 5000.0}

    def apart(function, one_core=False, **arguments):
        calls.append(function)
        rates = {benchmark.bare_rate: 500.0, benchmark.mario_games: [0.25, 300.0]}
        return rates.get(function) or [100.0] * len(arguments["widths"])

    readings = {"eval/flags": [[65.0, 0.3], [310.0, 0.7], [900.0, 0.8]], "charts/flags": [[61.0, 0.1], [301.0, 0.6]]}
    readings["eval/distance_mean"] = [[65.0, 400.0], [1700.0, 600.0]]
    monkeypatch.setattr(benchmark, "run", run)
    monkeypatch.setattr(benchmark, "apart", apart)
    monkeypatch.setattr(benchmark, "readings", lambda run, tag: readings[tag])
    monkeypatch.setattr(benchmark, "no_real_game", lambda: "")
    options = Options(repeats=2)
    text, raw = benchmark.table_mario_env(options, CPU)
    assert "| a collector | 100 (100–100) | 0.20 (0.20–0.20) |" in text and "| random | 25.0% | 300 |" in text
    assert "| 16 |" + 4 * " 100 (100–100) |" in text and raw["ratios"]["a collector"] == [0.2, 0.2]
    text, raw = benchmark.table_mario_async(options, CPU)
    assert raw["asked"] == 1.5 and raw["ratios"]["in turn"] == [1.6, 1.6]
    assert "| beside each other | 8,000 (8,000–8,000) | 0.50 | 2,667 (2,667–2,667) |  | 25% |" in text
    assert "| in turn | 5,000 (5,000–5,000) | 0.50 | 1,667 (1,667–1,667) | 1.60 (1.60–1.60) | 25% | 700 |" in text
    for device in (CPU, CUDA):
        text, raw = benchmark.table_mario_switches(options, device)
    assert "| `--num-collectors 0` | 5,000 (5,000–5,000) | 2,500 (2,500–2,500) | 1.00 (1.00–1.00) | 0.50 |" in text
    text, raw = benchmark.table_mario_learn(options, CPU)
    assert "| 2 | 30%, 10% | 70%, 60% | 90% | 900 | 5,000 | 0.50 | 0.050 |" in text and len(raw["runs"]) == 2
    text, raw = benchmark.table_mario_real(options, CPU)
    assert "| 2 | 400 | 600 | 600 | 900 | 90% | 3.0 | 5,000 | 0.50 |" in text and len(raw["runs"]) == 2
    json.dumps(raw)
    for flags in asked:
        benchmark.tyro.cli(dqn_mario_async.Args, args=flags.split())
    monkeypatch.setattr(benchmark, "no_real_game", lambda: "The real game: not measured (no ROM).")
    calls.clear()
    assert benchmark.table_mario_env(options, CPU)[0].endswith("not measured (no ROM).")
    assert benchmark.bare_rate not in calls and benchmark.table_mario_real(options, CPU)[1] == {}


@pytest.mark.parametrize("game", benchmark.GYMNASIUM)
def test_gymnasium_measures_every_game(game: str) -> None:
    assert min(benchmark.gymnasium_rates(game, (6, 12), 0.01)) > 10


def test_games_of_mario_are_measured() -> None:
    assert benchmark.mario_rates((1, 2), 0.01)[0] > 100
    assert benchmark.collector_rates("MarioLike-v0", (1, 2), 0.01)[1] > 10
    (random_flags, random_distance), (flags, distance) = (
        benchmark.mario_games(player, 20) for player in ("random", "a scripted jumper")
    )
    assert random_flags == 0 and flags > 0.8 and distance > 3 * random_distance > 0


@pytest.mark.games
def test_the_real_emulator_is_measured(monkeypatch) -> None:
    monkeypatch.setattr(benchmark, "ROOT", ROOT)
    if missing := benchmark.no_real_game():
        pytest.skip(missing)
    assert benchmark.apart(benchmark.bare_rate, True, seconds=0.1, refresh=True) > 50
    assert benchmark.apart(benchmark.collector_rates, True, env_id="SuperMarioBros", widths=(1,), seconds=0.1)[0] > 30
    assert benchmark.apart(benchmark.mario_games, True, player="random", games=1, real=True)[1] > 0


def test_readings_of_a_run_are_in_seconds_since_its_start(tmp_path, monkeypatch) -> None:
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(tmp_path / "runs" / "one") as writer:
        writer.add_scalar("perf/warmup_s", 4.0, 0, walltime=1000.0)
        for minute, value in ((1, 0.25), (2, 0.5)):
            writer.add_scalar("eval/flags", value, minute, walltime=1000.0 + 60 * minute)
    curve = benchmark.readings("one", "eval/flags")
    assert curve == [[64.0, 0.25], [124.0, 0.5]]
    assert [benchmark.first_after(curve, minutes) for minutes in (1, 2, 15)] == [0.25, 0.5, 0.5]


# ------------------------------------------------------------------------------------------------ one GPU


def test_work_on_a_gpu_is_over_when_its_time_is_taken(monkeypatch) -> None:
    """Of the first call too, which does not count: launching it takes no time, and waiting for it does."""
    now = [0.0]
    queued = [0.0]

    def work() -> None:
        queued[0] += 1.0

    def synchronize() -> None:
        now[0] += queued[0]
        queued[0] = 0.0

    monkeypatch.setattr(benchmark.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    assert benchmark.rate_of(work, 10, 4.0, "cuda") == 10.0


SCRIPTS_ON_GPU = SCRIPTS | {"dqn_snake_sb3_compat.py": script}


@pytest.mark.parametrize("sizes", [benchmark.GPU_SIZES, benchmark.GPU_TRIAL], ids=["whole", "trial"])
def test_every_row_of_a_gpu_is_understood_and_what_compiles_comes_last(sizes) -> None:
    plan = benchmark.gpu_plan(sizes, CUDA)
    assert len({(part, name) for part, name, *_ in plan}) == len(plan)
    for _, _, _, call in plan:
        if call.func in (benchmark.speed_run, benchmark.sb3_transformer, benchmark.learning_run):
            module = SCRIPTS_ON_GPU[call.keywords.get("script", "dqn_snake.py")]
            if call.func is benchmark.sb3_transformer:
                module = script
            args = benchmark.tyro.cli(module.Args, args=call.keywords["flags"].split())
            assert args.device == "cuda" and args.threads == 1
            module.fill_defaults(args, CUDA)
    compiles = ["--compile" in name for _, name, *_ in plan]
    assert compiles == sorted(compiles) and sum(compiles) == 3


STEADY = {"charts/SPS": 2e6, "charts/samples_per_second": 4e6, "charts/updates_per_second": 500.0}
STEADY |= {"charts/replay_ratio": 2.0, "perf/rollout_fraction": 0.75}


@pytest.fixture
def gpu(monkeypatch):
    """A made-up GPU, twice as fast with --bf16, without --fp16 and SB3. Gives the limits of its rows."""
    limits = []

    def in_fork(call, limit: float) -> dict:
        limits.append(limit)
        flags = call.keywords.get("flags", "")
        if call.func is benchmark.bf16_matmul_rate:
            return {"found": 8e14}
        if call.func is benchmark.snake_rates:
            return {"found": [3e6]}
        if call.func is benchmark.metta_env_rate:
            return {"found": 1e6}
        if call.func is benchmark.learning_run:
            curve = [[55.0, 40.0], [280.0, 61.5]]
            return {"found": {"curve": curve, "eval_score_max": 97.0, "env_steps_per_second": 2e6}}
        if call.func is benchmark.sb3_transformer:
            return {"note": "not measured: stable_baselines3 is not installed"}
        if "--fp16" in flags:
            return {"note": "failed: out of memory"}
        faster = 2 if "--bf16" in flags else 1
        one = {"steady": {tag: faster * value for tag, value in STEADY.items() if tag.startswith("charts")}}
        one["steady"]["perf/rollout_fraction"] = 0.75
        one |= {"args": {"batch_size": 8192}, "update_flops": 2e11, "peak_memory_gib": 1.5, "sdpa": None}
        one |= {"precision": "bfloat16" if "--bf16" in flags else "float32", "compiled": False, "cudagraph": False}
        return {"found": one, "said": ["--cudagraph: failed"] if "--cudagraph" in flags else []}

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(benchmark, "machine", lambda device: ABOUT)
    monkeypatch.setattr(benchmark, "in_fork", in_fork)
    return limits


def test_a_gpu_has_a_section_with_every_row_and_why_one_is_empty(tmp_path, gpu, capsys) -> None:
    before = (tmp_path / "benchmarks.md").read_text()
    main(Options("gpu", "cuda", json="all.json"))
    page = (tmp_path / "benchmarks.md").read_text()
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
    for block in section.split("\n\n"):
        if block.startswith("|"):
            assert len({line.count(" | ") for line in block.splitlines() if "---" not in line}) == 1
    assert capsys.readouterr().out.count("    --cudagraph: failed") == 6
    raw = json.loads((tmp_path / "benchmarks" / "gpu-cuda.json").read_text())
    assert [raw] == json.loads((tmp_path / "all.json").read_text()) and raw["commit"] == "abc"
    assert benchmark.section(raw, benchmark.gpu_tables(raw)) in page


def test_a_run_on_a_gpu_that_is_cut_off_has_lost_nothing(tmp_path, gpu, monkeypatch) -> None:
    whole = benchmark.in_fork

    def in_fork(call, limit: float) -> dict:
        if len(gpu) == 4:
            raise KeyboardInterrupt
        return whole(call, limit)

    monkeypatch.setattr(benchmark, "in_fork", in_fork)
    with pytest.raises(KeyboardInterrupt):
        main(Options("gpu", "cuda", json="all.json"))
    for file in ("benchmarks/gpu-cuda.json", "all.json"):
        raw = json.loads((tmp_path / file).read_text())
        raw = raw[0] if file == "all.json" else raw
        assert list(raw["rows"]) == ["matmul", "snake"] and list(raw["rows"]["snake"]) == ["", "--bf16", "--fp16"]
    assert "| `--fp16` | failed: out of memory |" in (tmp_path / "benchmarks.md").read_text()


def test_rows_on_a_gpu_end_when_their_time_or_that_of_all_is_over(gpu, monkeypatch) -> None:
    now = [0.0]
    whole = benchmark.in_fork

    def in_fork(call, limit: float) -> dict:
        now[0] += limit  # every row takes all it may
        return whole(call, limit)

    monkeypatch.setattr(benchmark, "in_fork", in_fork)
    monkeypatch.setattr(benchmark.time, "perf_counter", lambda: now[0])
    text, raw = benchmark.table_gpu(Options("gpu"), CUDA)
    assert sum(gpu) <= benchmark.GPU_SIZES.total_seconds == now[0]
    assert "food" in raw["rows"] and "found" in next(iter(raw["rows"]["food"].values()))
    assert cells(text)["`--bf16 --compile --cudagraph`"][0] == "not measured: no time left"


@pytest.mark.parametrize(
    "call, note",
    [
        (partial(int, "a | b"), "failed: ValueError: invalid literal for int() with base 10: 'a / b'"),
        (partial(exec, "raise MemoryError"), "failed: out of memory"),
        (partial(benchmark.dqn_snake.fail, "--x 1: must be 2"), "failed: dqn_snake.py: --x 1: must be 2"),
        (partial(os._exit, 3), "failed: its process ended with exit code 3"),
        (partial(os.abort), "failed: its process ended with exit code -6"),
        (partial(__import__, "no_such_package"), "not measured: no_such_package is not installed"),
        (partial(time.sleep, 60), "failed: not done after 2 s"),
    ],
    ids=["exception", "memory", "refused", "exit", "crash", "package", "time"],
)
def test_a_row_that_fails_costs_only_itself(call, note) -> None:
    assert benchmark.in_fork(call, 2.0 if call.func is time.sleep else 60.0).get("note") == note


def test_what_rows_are_forked_from_has_not_asked_for_a_gpu() -> None:
    """Or CUDA would refuse to work in all of them."""
    code = f"""
import importlib, torch
for name in ("is_available", "device_count", "_lazy_init", "init", "current_device", "get_device_properties"):
    setattr(torch.cuda, name, None)  # to call it would be an error
for name in {benchmark.PRELOADED}:
    importlib.import_module(name)
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_a_row_uses_the_gpu_that_the_benchmark_has_asked_about() -> None:
    torch.cuda.get_device_name()
    row = benchmark.in_fork(partial(benchmark.bf16_matmul_rate, side=256, seconds=0.1, device="cuda"), 60.0)
    assert row.get("found", 0) > 1e9, row


def test_what_a_script_says_of_its_switches_comes_with_the_row() -> None:
    row = benchmark.in_fork(partial(print, "a run\n--fp16: needs CUDA"), 60.0)
    assert row == {"found": None, "said": ["--fp16: needs CUDA"]}


def test_a_gpu_suite_is_tried_out_on_a_cpu_and_no_page_is_written(tmp_path, monkeypatch) -> None:
    page = (tmp_path / "benchmarks.md").read_text()
    tiny = {"snake_widths": (4,), "arena_widths": (1,), "batches": (4,), "alone_seconds": 0.01, "run_seconds": 0.2}
    learn = "--max-seconds 2 --eval-every 0.5 --eval-episodes 10 --log-every 0.1"
    monkeypatch.setattr(benchmark, "GPU_TRIAL", replace(benchmark.GPU_TRIAL, learn=learn, **tiny))
    monkeypatch.setattr(benchmark, "GPU_SWITCHES", {"snake": ["--cudagraph"], "arena": [""], "transformer": [""]})
    monkeypatch.setattr(benchmark, "GPU_COMPILED", {})
    main(Options("gpu", "cpu", fast=True, json="all.json"))
    (raw,) = json.loads((tmp_path / "all.json").read_text())
    parts = "matmul, snake, food, snake alone, arena, arena alone, transformer"
    assert list(raw["rows"]) == parts.split(", ") and list(raw["rows"]["transformer"]) == ["4, SB3", "4, ours"]
    for rows in raw["rows"].values():
        for row in rows.values():
            assert "note" not in row, row
    assert raw["rows"]["snake"]["--cudagraph"]["said"] == ["--cudagraph: needs CUDA; the loop runs without graphs"]
    snake = raw["rows"]["snake"]["--cudagraph"]["found"]
    assert snake["steady"]["charts/samples_per_second"] > 100 and snake["update_flops"] > 1e5
    assert snake["wall_seconds"] < 10 and "eval_score_mean" not in snake
    (food,) = raw["rows"]["food"].values()
    assert len(food["found"]["curve"]) > 1 and food["found"]["eval_score_max"] >= 0
    assert (tmp_path / "benchmarks.md").read_text() == page and not (tmp_path / "benchmarks").exists()
    assert not (tmp_path / "runs").exists()


# ------------------------------------------------------------------------------------------------ the arena


@pytest.fixture
def arena(monkeypatch):
    """A made-up machine of two cores: what runs of ppo_metta.py and parts of it would give. The flags it was asked for.

    Games make 50,000 steps/s in a process and the network 40,000 on a thread, rollouts 30,000, both together 12,000.
    """
    asked = []

    def run(flags: str, options: Options, script: str) -> dict:
        asked.append(flags)
        rate = 30_000.0 if "--update-epochs 0" in flags else 12_000.0
        one = {"env_steps_per_second": rate, "rollout_fraction": 0.5, "train_fraction": 0.5, "env_steps": 10**6}
        one |= {"updates_per_second": 2.0, "samples_per_second": rate, "replay_ratio": 1.0, "peak_memory_gib": 1.5}
        one |= {"precision": "float32", "sdpa": None, "compiled": "--compile" in flags, "cudagraph": False}
        return one | {"eval_score_mean": float(len(asked)), "run": "none"}

    def apart(function, **arguments):
        asked.extend(arguments.get("variants", [arguments.get("flags", "")]))
        if function is benchmark.metta_mflops:
            return [int((re.findall("--hidden-size (.*)", flags) or [128])[0]) / 320 for flags in arguments["variants"]]
        if function in (benchmark.metta_env_rate, benchmark.rule_book_rate):
            return 50_000.0
        if function is benchmark.gymnasium_rates:
            return [40_000.0] * len(arguments["widths"])
        if function is benchmark.sb3_arena_rate:
            rate = (2000.0 if arguments["rule_book"] else 4000.0) / arguments["threads"]
            return {"env_steps_per_second": rate, "games": 100.0, "rollouts": 60.0, "learning": 90.0}
        acting = benchmark.metta_args(arguments["flags"], arguments["device"]).threads * 40_000
        times = {"agents": 384, "one": [0.2, 0.3, 0.4], "all": [384_000 / acting, 10.0, 11.0]}
        return times | {"env_steps_per_second": 50_000.0}

    monkeypatch.setattr(benchmark, "run", run)
    monkeypatch.setattr(benchmark, "apart", apart)
    monkeypatch.setattr(benchmark, "logged", lambda folder: dict.fromkeys(PHASES, 2.0) | {"perf/gpu_util": 70.0})
    monkeypatch.setattr(ppo_metta, "CORES", 2)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    return asked


PHASES = [f"perf/{phase}_ms" for phase in ("act", "env", "store", "learn", "log")]
METTA = ["metta-env", "metta-speed", "metta-peer", "metta-presets", "diagnose"]


def cells(text: str) -> dict[str, list[str]]:
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("|")]
    return {name: values for name, *values in rows}


@pytest.mark.parametrize("device", [CPU, CUDA], ids=str)
@pytest.mark.parametrize("name", [*METTA, pytest.param("metta-subproc", marks=REAL)])
def test_every_command_of_the_arena_is_understood(arena, name, device) -> None:
    for fast in (True, False):
        text, raw = benchmark.TABLES[name](Options(name, fast=fast, repeats=1), device)
        json.dumps(raw)
    assert text.count("\n|") > 2 and len({line.count(" | ") for line in text.splitlines() if line[:1] == "|"}) == 1
    for flags in arena:
        benchmark.metta_args(flags, device.type)


def test_the_width_of_half_a_megaflop_is_found(arena) -> None:
    text, _ = benchmark.table_metta_speed(Options(fast=True), CPU)
    assert cells(text)["default"][0] == "0.40" and cells(text)["`--hidden-size 160`"][0] == "0.50"
    assert cells(text)["default"][1:4] == ["24,000 (24,000–24,000)", "24,000 (24,000–24,000)", "12,000 (12,000–12,000)"]


def test_sb3_s_ppo_runs_with_its_faster_threads(arena) -> None:
    text, raw = benchmark.table_metta_peer(Options(fast=True), CPU)
    rows = cells(text)
    assert rows["SB3's PPO, our batched arena"][:2] == ["4,000 (4,000–4,000)", "3.0 (3.0–3.0)"]
    assert rows["SB3's PPO, the rule book"][1:] == ["6.0 (6.0–6.0)", "100.0", "60.0", "90.0"]
    assert rows["`ppo_metta.py --rnn none`"][1:] == ["", "16.7", "50.0", "16.7"]
    assert text.endswith("Threads of SB3: 1.") and raw["ratios"]["SB3's PPO, the rule book"] == [6.0, 6.0]


@REAL
@pytest.mark.parametrize("cores, most", [(2, 40_000), (1, 1 / (1 / 50_000 + 1 / 40_000))])
def test_what_a_worker_and_a_thread_could_reach_at_most(arena, monkeypatch, cores, most) -> None:
    """On two cores what the slower of them makes alone, on one core what they make in turn."""
    monkeypatch.setattr(ppo_metta, "CORES", cores)
    text, raw = benchmark.table_metta_subproc(Options(repeats=1), CPU)
    found = raw["settings"][""]
    assert found["possible"] == [pytest.approx(most)] and found["shares"]["rollouts"] == [pytest.approx(30_000 / most)]
    assert found["shares"]["end to end"] == [pytest.approx(12_000 * (1 / 30_000 + 1 / 24_000))]
    assert cells(text)["default"][:2] == ["1", "1"] and cells(text)["default"][-1] == "90% (90%–90%)"


def test_presets_run_for_as_long_as_was_asked(arena, tmp_path) -> None:
    main(Options("metta-presets", "cpu", repeats=2, seconds=60))
    assert all("--max-seconds 60 " in flags for flags in arena) and len(arena) == 4
    section = (tmp_path / "benchmarks.md").read_text().split("<!-- metta-presets cpu -->")[1].split("<!-- end -->")[0]
    assert cells(section)["`--preset ultra-fast`"][0] == "1" and "3.00 · 4.00 | 3.50" in section
    assert "`python benchmark.py --suite metta-presets --repeats 2 --seconds 60` on" in section


def test_diagnosis_has_every_switch_and_what_a_gpu_does(arena) -> None:
    text, _ = benchmark.table_diagnose(Options(repeats=1), CPU)
    assert cells(text)["`--threads 1`"][3:5] == ["0.20 / 0.30 / 0.40", "9.60 / 10.00 / 11.00"]
    assert "not measured without a GPU" in text and "GPU busy" not in text
    text, raw = benchmark.table_diagnose(Options(repeats=1), CUDA)
    assert cells(text)["`--cudagraph`"][5] == "70%" and raw["switches"][""]["gpu_util"] == [70.0]


def test_scalars_of_a_run_are_weighed_by_its_steps(tmp_path) -> None:
    with ppo_metta.SummaryWriter(tmp_path) as writer:
        for step, value in ((10, 1.0), (40, 3.0)):
            writer.add_scalar("perf/act_ms", value, step)
        writer.add_scalar("perf/warmup_s", 7.0, 0)
    assert benchmark.logged(tmp_path) == {"perf/act_ms": 2.5, "perf/warmup_s": 7.0}


def test_percentiles_are_of_the_calls_that_count() -> None:
    calls = []
    mean, p95, p99 = benchmark.timings(
        lambda: time.sleep(0.1 if len(calls) < 3 else 0.001) or calls.append(0), 0, "cpu"
    )
    assert len(calls) == 60 and 1 <= mean <= p99 and p95 <= p99 < 50


def test_operations_are_those_of_the_layers() -> None:
    others = [f"--num-envs 2 --network {network}" for network in ("box-cnn", "token-attention")]
    assert min(benchmark.metta_mflops(others, "cpu")) > 1
    lstm, none, wide = benchmark.metta_mflops(
        [f"--num-envs 2 {flags}" for flags in ("--hidden-size 32", "--hidden-size 32 --rnn none", "--rnn none")], "cpu"
    )
    assert 1e6 * (lstm - none) == pytest.approx(2 * 4 * 32 * 64)
    tokens = (1e6 * none - 2 * 32 * (32 + 26)) / (2 * 32)  # what is left is the bag's
    assert 10 < tokens < 200 and 1e6 * wide == pytest.approx(2 * 128 * (tokens + 128 + 26))


def test_the_rule_book_is_measured() -> None:
    assert benchmark.rule_book_rate(2, 0.1) > 100


def test_the_arenas_of_sb3_are_those_of_the_trainer() -> None:
    args = benchmark.metta_args("--num-envs 3", "cpu")
    book, batch = (benchmark.sb3_lanes(args, rule_book, CPU) for rule_book in (True, False))
    assert (book.reset() == batch.reset()).all() and book.num_envs == batch.num_envs == 18
    torch.manual_seed(0)
    cut = set()
    for _ in range(1000):
        actions = torch.randint(25, (18,)).numpy()
        found, expected = (games.step(actions) for games in (book, batch))
        for mine, theirs in zip(found[:3], expected[:3]):
            assert (mine == theirs).all() and mine.dtype == theirs.dtype
        ends = [lane for lane, info in enumerate(found[3]) if info]
        assert ends == found[2].nonzero()[0].tolist() == [lane for lane, info in enumerate(expected[3]) if info]
        for lane in ends:
            ours, other = (infos[lane]["terminal_observation"] for infos in (found[3], expected[3]))
            assert (ours == other).all() and found[3][lane]["TimeLimit.truncated"]
        cut |= set(ends)
    assert cut == set(range(18))


@pytest.mark.parametrize("rule_book", [False, True])
def test_sb3_s_ppo_learns_in_the_arena(rule_book) -> None:
    found = benchmark.sb3_arena_rate("--rnn none --num-envs 2 --hidden-size 16", rule_book, 1, 0.1, "cpu")
    parts = found["games"] + found["rollouts"] + found["learning"]
    assert parts == pytest.approx(1e6 / found["env_steps_per_second"]) and min(found.values()) > 0


def test_sb3_in_the_arena_has_our_loss_of_our_network() -> None:
    flags = "--rnn none --num-envs 2 --num-steps 8 --bptt-horizon 8 --num-minibatches 1 --hidden-size 16"
    args = benchmark.metta_args(flags, "cpu")
    games = benchmark.sb3_lanes(args, False, CPU)
    model = benchmark.sb3_arena_agent(flags, games, 1, "cpu")
    ours, theirs = benchmark.metta_network(args, ppo_metta.make_games(args, 1, CPU, 1), CPU), model.policy
    start = [float(head.weight.detach().norm()) for head in (ours.heads, theirs.action_net, theirs.value_net)]
    assert start[0] == pytest.approx((start[1] ** 2 + start[2] ** 2) ** 0.5)
    start = [float(of.hidden.weight.detach().std()) for of in (ours.encoder, theirs.features_extractor.encoder)]
    assert start[0] == pytest.approx(start[1], rel=0.2)
    ours.encoder.load_state_dict(theirs.features_extractor.encoder.state_dict())
    with torch.no_grad():
        ours.heads.weight.copy_(torch.cat([theirs.action_net.weight, theirs.value_net.weight]))

    model.learn(96)  # one update, whose gradients stay
    b = model.rollout_buffer
    obs, action, logprob, advantage, value, returns = (
        torch.as_tensor(part).flatten(1).squeeze(1) if part.ndim < 3 else torch.as_tensor(part)
        for part in (b.observations, b.actions, b.log_probs, b.advantages, b.values, b.returns)
    )
    logits, new_value, _ = ours(obs[None].byte(), torch.zeros(96, 0), torch.zeros(1, 96, dtype=torch.bool))
    logp = logits[0].log_softmax(1)
    new_logprob, entropy = logp.gather(1, action.long()[:, None]).squeeze(1), -(logp.exp() * logp).sum(1)
    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    coefs = args.clip_coef, args.vf_clip_coef, args.ent_coef, args.vf_coef
    ppo_metta.ppo_loss(new_logprob, logprob, advantage, entropy, new_value[0], value, returns, *coefs)[0].backward()
    torch.nn.utils.clip_grad_norm_(ours.parameters(), args.max_grad_norm)
    grad = torch.cat([theirs.action_net.weight.grad, theirs.value_net.weight.grad])
    torch.testing.assert_close(ours.heads.weight.grad, grad, rtol=1e-3, atol=1e-5)
    grad = theirs.features_extractor.encoder.table.grad
    torch.testing.assert_close(ours.encoder.table.grad, grad, rtol=1e-3, atol=1e-5)
    assert ours.encoder.table.grad.abs().max() > 1e-3


def test_parts_of_the_trainer_run_alone() -> None:
    flags = "--num-envs 4 --hidden-size 16 --threads 1"
    found = benchmark.metta_parts(flags, 0.1, "cpu")
    assert found["agents"] == 24 and found["env_steps_per_second"] > 0 and 0 < found["one"][0] < found["all"][2]
    workers = f"{flags} --vec-env subproc --num-workers 2 --async-factor 2"
    assert benchmark.metta_latency(workers, 0.1, "cpu")["agents"] == 12
    assert benchmark.metta_env_rate(workers, 0.1, "cpu") > 0


def test_a_scripted_player_gets_more_hearts_than_chance(monkeypatch) -> None:
    monkeypatch.setitem(ppo_metta.VARIANTS["MettaArena-v0"], "max_steps", 200)
    easy = benchmark.ARENAS["arena, easy"]
    assert benchmark.scripted_hearts(easy, 6) > 5 * benchmark.random_hearts(easy, 24) + 1


@pytest.mark.games
@REAL
def test_chance_gets_some_hearts_of_the_real_mettagrid() -> None:
    assert 0.5 < benchmark.random_hearts(benchmark.REAL, 32) < 5


def test_hearts_of_all_players_stand_side_by_side(monkeypatch) -> None:
    monkeypatch.setattr(benchmark, "apart", lambda function, **_: 3.0 if function is benchmark.scripted_hearts else 0.5)
    monkeypatch.setattr(benchmark.util, "find_spec", lambda name: True)
    text, raw = benchmark.table_metta_hearts(Options(), CPU)
    assert cells(text)["arena, easy"] == ["0.500", "3.00"] and cells(text)["MettaGrid"] == ["0.500", "–"]
    json.dumps(raw)


def test_what_ppo_learns_stands_beside_players_that_do_not(arena, monkeypatch) -> None:
    hearts = {benchmark.random_hearts: 0.5, benchmark.scripted_hearts: 12.0}
    monkeypatch.setattr(benchmark, "apart", lambda function, **_: hearts[function])
    monkeypatch.setattr(benchmark.util, "find_spec", lambda name: True)
    text, raw = benchmark.table_metta_learn_arena(Options(repeats=2), CPU)
    assert cells(text)["default"][:5] == ["1.00 · 3.00", "2.00", "0.50", "12.0", "17%"]
    assert cells(text)["`--rnn none`"][:5] == ["2.00 · 4.00", "3.00", "0.50", "12.0", "25%"]
    text, raw = benchmark.table_metta_learn_real(Options(repeats=2), CPU)
    assert cells(text)[f"`{benchmark.REAL}`"][:5] == ["5.00 · 6.00", "5.50", "0.50", "–", "–"]
    json.dumps(raw)
    for flags in arena:
        ppo_metta.parse_args(flags.split())

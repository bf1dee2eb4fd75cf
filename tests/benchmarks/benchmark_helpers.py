"""What several tests of the benchmark need."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import benchmark  # noqa: F401  (its tables are registered)
import dqn_mario_async
import dqn_snake
import ppo_metta
from benchmarks import report

PROJECT = Path(__file__).parent.parent.parent
PAGES = [PROJECT / "README.md", PROJECT / "benchmarks.md", *sorted((PROJECT / "benchmarks" / "pages").glob("*.md"))]
CPU = torch.device("cpu")
CUDA = torch.device("cuda")
SCRIPTS = {"dqn_snake.py": dqn_snake, "ppo_metta.py": ppo_metta, "dqn_mario_async.py": dqn_mario_async}
ABOUT = {"commit": "abc", "date": "2026-01-01", "hardware": "a GPU", "versions": {"torch": "2"}}


def fake_table(monkeypatch, name: str, measure: Callable | None) -> None:
    """Let `measure` stand in for what measures a table."""
    monkeypatch.setitem(report.TABLES, name, replace(report.TABLES[name], measure=measure))


def page_of(name: str) -> str:
    """The page of a table, as it is now."""
    return report.page_file(name).read_text()


def results(name: str) -> dict[str, Any]:
    """What was measured of a table."""
    return json.loads((PROJECT / "benchmarks" / "results" / f"{name}.json").read_text())


def cells(text: str) -> dict[str, list[str]]:
    """The cells of each row of a table, by the first one."""
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("|")]
    return {name: values for name, *values in rows}

"""Shared helpers of the benchmark's tests."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import benchmark  # noqa: F401  (registers the tables)
import dqn_mario_async
import dqn_snake
import dqn_snake_sb3_compat
import ppo_metta
import ppo_snake
from benchmarks import report

PROJECT = Path(__file__).parent.parent.parent
PAGES = [PROJECT / "README.md", PROJECT / "benchmarks.md", *sorted((PROJECT / "benchmarks" / "pages").glob("*.md"))]
CPU = torch.device("cpu")
CUDA = torch.device("cuda")
SCRIPTS = {
    "ppo_snake.py": ppo_snake,
    "dqn_snake.py": dqn_snake,
    "dqn_snake_sb3_compat.py": dqn_snake_sb3_compat,
    "ppo_metta.py": ppo_metta,
    "dqn_mario_async.py": dqn_mario_async,
}
ABOUT = {"commit": "abc", "date": "2026-01-01", "hardware": "a GPU", "versions": {"torch": "2"}}


def fake_table(monkeypatch, name: str, measure: Callable | None) -> None:
    """Replace the function that measures a table."""
    monkeypatch.setitem(report.TABLES, name, replace(report.TABLES[name], measure=measure))


def page_of(name: str) -> str:
    """Text of the page of a table."""
    return report.page_file(name).read_text()


def results(name: str) -> dict[str, Any]:
    """Result file of a table."""
    return json.loads((PROJECT / "benchmarks" / "results" / f"{name}.json").read_text())

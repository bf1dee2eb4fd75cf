"""Shared helpers of the benchmark's tests."""

import importlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import tyro

import benchmark  # noqa: F401  (registers the tables)
from benchmarks import harness, report

PROJECT = Path(__file__).parent.parent.parent
PAGES = [PROJECT / "README.md", PROJECT / "benchmarks.md", *sorted((PROJECT / "benchmarks" / "pages").glob("*.md"))]
CPU = torch.device("cpu")
CUDA = torch.device("cuda")
NEED_METTAGRID = ["metta-subproc", "metta-learn-real", "metta-hearts"]
NAMES = [
    pytest.param(name, marks=pytest.mark.games) if name in NEED_METTAGRID else name for name in harness.SUITES["all"]
]
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


def parse(script: str, flags: str) -> Any:
    """Arguments of a script; exits if it refuses the flags."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend((PROJECT / script).parent)
        module = importlib.import_module(Path(script).stem)
    return tyro.cli(module.Args, args=flags.split())

"""Tests of the benchmark write nothing into the project."""

import shutil

import pytest
from benchmark_helpers import PROJECT

import dqn_snake_sb3_compat
from benchmarks import harness


@pytest.fixture(autouse=True)
def empty_project(monkeypatch, tmp_path) -> None:
    """A folder with a copy of the pages, without results, settings and runs."""
    for name in dqn_snake_sb3_compat.SETTINGS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(harness, "ROOT", tmp_path)
    shutil.copytree(PROJECT / "benchmarks" / "pages", tmp_path / "benchmarks" / "pages")

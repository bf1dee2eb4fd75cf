"""Tests of the benchmark write nothing into the project."""

import shutil

import pytest
from benchmark_helpers import PROJECT, SCRIPTS

import dqn_snake_sb3_compat
from benchmarks import harness


@pytest.fixture(autouse=True)
def idle_machine(monkeypatch) -> None:
    """Skip the scripts' test for busy cores, which takes half a second for every command line."""
    for script in SCRIPTS.values():
        monkeypatch.setattr(script, "matmuls_per_second", float, raising=False)


@pytest.fixture(autouse=True)
def empty_project(monkeypatch, tmp_path) -> None:
    """A folder with a copy of the pages, without results, settings and runs."""
    for name in dqn_snake_sb3_compat.SETTINGS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(harness, "ROOT", tmp_path)
    shutil.copytree(PROJECT / "benchmarks" / "pages", tmp_path / "benchmarks" / "pages")

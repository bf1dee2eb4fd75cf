"""`script`: each script in turn. `trained`: a copy of the folder of a finished run of it."""

import importlib
import itertools
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from small_runs import SMALL, Script


@pytest.fixture(params=SMALL)
def script(request, tmp_path, monkeypatch) -> Script:
    script = Script(request.param, tmp_path)
    if script.name == "ppo_metta":
        for rules in script.module.VARIANTS.values():
            monkeypatch.setitem(rules, "max_steps", 100)  # an episode of the arena has 1,000
    return script


@pytest.fixture(scope="session")
def trained_once() -> dict[str, Path]:
    """Run folders by script, filled as they are asked for."""
    return {}


@pytest.fixture
def trained(script, trained_once, tmp_path_factory) -> Path:
    """Its checkpoint holds all that one can hold."""
    if script.name not in trained_once:
        once = Script(script.name, tmp_path_factory.mktemp(script.name))
        replay = {"checkpoint_replay": True} if script.has_replay else {}
        trained_once[script.name] = once.run(**replay)[1]
    return Path(shutil.copytree(trained_once[script.name], script.folder / "run"))


@pytest.fixture
def run(request, tmp_path) -> Callable[..., tuple[dict, Path]]:
    """Trains for a moment with QUICK of the file, into a folder of its own; gives the summary and the run folder."""
    tests = request.module
    script = importlib.import_module(tests.__name__.removeprefix("test_"))
    numbers = itertools.count(2)

    def start(**flags) -> tuple[dict, Path]:
        name = f"run{next(numbers)}" if (tmp_path / "run").exists() and "resume" not in flags else "run"
        flags = tests.QUICK | {"run_dir": str(tmp_path), "run_name": name} | flags
        return script.main(script.Args(**flags)), tmp_path / flags["run_name"]

    return start

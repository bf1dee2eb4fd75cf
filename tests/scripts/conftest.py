"""`script`: each script in turn. `trained`: a copy of the folder of a finished run of it."""

import shutil
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

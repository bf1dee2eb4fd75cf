"""Every flag changes what it says. A script's tests have another value of it, and where that shows, in FLAGS."""

import dataclasses
import importlib
from pathlib import Path

import pytest

NAMES = ["dqn_snake", "ppo_snake", "dqn_snake_sb3_compat"]
SCRIPTS = {name: importlib.import_module(name) for name in NAMES}
TESTS = {name: importlib.import_module(f"test_{name}") for name in NAMES}
MORE = {  # what else a flag needs
    "env_id": {"board": "9x9"},
    "policy": {"env_id": "SnakeOneHot-v0"},
    "threads": {"total_timesteps": 240, "learning_starts": 240},  # two are slow on a busy machine
    "eval_every": {"total_timesteps": 480},
}


def run(name: str, folder: Path, **flags) -> tuple[dict, Path]:
    flags = TESTS[name].QUICK | {"run_dir": str(folder), "run_name": "run"} | flags
    return SCRIPTS[name].main(SCRIPTS[name].Args(**flags)), folder / flags["run_name"]


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> dict[str, tuple[dict, Path]]:
    return {name: run(name, tmp_path_factory.mktemp(name)) for name in TESTS}


@pytest.mark.parametrize("name", NAMES)
def test_no_flag_is_without_a_test(name) -> None:
    tests = TESTS[name]
    assert {field.name for field in dataclasses.fields(SCRIPTS[name].Args)} == set(tests.FLAGS) | tests.ELSEWHERE


ALL_FLAGS = [
    pytest.param(name, flag, marks=[] if name == "ppo_snake" else pytest.mark.slow)
    for name, tests in TESTS.items()
    for flag in tests.FLAGS
]


@pytest.mark.parametrize("name, flag", ALL_FLAGS)
def test_every_flag_changes_what_it_says(tmp_path, plain, name, flag) -> None:
    value, look = TESTS[name].FLAGS[flag]
    more = {other: x for other, x in MORE.get(flag, {}).items() if hasattr(SCRIPTS[name].Args, other)}
    assert look(*run(name, tmp_path, **{flag: value} | more)) != look(*plain[name])

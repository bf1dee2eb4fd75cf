"""What keeps the scripts one project: independence, sections in order, functions of a readable length, commands."""

import ast
import re
import shlex
from pathlib import Path

import pytest
import tyro

import dqn_mario_async
import dqn_snake
import dqn_snake_sb3_compat
import ppo_metta
import ppo_snake

ROOT = Path(__file__).parents[2]
SCRIPTS = {
    "dqn_snake.py": dqn_snake,
    "ppo_snake.py": ppo_snake,
    "dqn_snake_sb3_compat.py": dqn_snake_sb3_compat,
    "ppo_metta.py": ppo_metta,
    "dqn_mario_async.py": dqn_mario_async,
}
PAGES = ["README.md", "benchmarks.md"]
PAGES += [f"benchmarks/pages/{path.name}" for path in ROOT.glob("benchmarks/pages/*.md")]
ORDER = ["class Args", "def fill_defaults", "def make_envs", "(nn.Module)", "MATHS", "def evaluate", "def fail"]
ORDER += ["def pick_precision", "class PhaseTimer", "def save_checkpoint", "def parse_args", "def main", "def train"]
ORDER += ["# 1 act and step", "# 3 learn", "# 4 log, evaluate, save", "if __name__"]


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_imports_no_other_script(script: str) -> None:
    imported = set()
    for node in ast.walk(ast.parse((ROOT / script).read_text())):
        if isinstance(node, ast.Import):
            imported |= {alias.name.split(".")[0] for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            imported.add(node.module.split(".")[0])
    assert not imported & {Path(other).stem for other in SCRIPTS}


@pytest.mark.parametrize("script", SCRIPTS)
def test_sections_are_in_order(script: str) -> None:
    source = (ROOT / script).read_text()
    maths = "def gae" if script.startswith("ppo") else "def td_target"
    places = [source.index(mark.replace("MATHS", maths)) for mark in ORDER]
    assert places == sorted(places)


@pytest.mark.parametrize("script", SCRIPTS)
def test_no_function_is_longer_than_320_lines(script: str) -> None:
    for node in ast.walk(ast.parse((ROOT / script).read_text())):
        if isinstance(node, ast.FunctionDef):
            assert node.end_lineno - node.lineno < 320, node.name


@pytest.mark.parametrize("page", [*PAGES, *SCRIPTS])
def test_every_command_that_is_shown_is_understood(page: str) -> None:
    shown = re.findall(r"python (\w+\.py)([^\n`&|]*)", (ROOT / page).read_text())
    for script, flags in shown:
        if script in SCRIPTS and "--help" not in flags:
            tyro.cli(SCRIPTS[script].Args, args=shlex.split(flags, comments=True))
        else:
            assert (ROOT / script).exists() or script.startswith("my_")

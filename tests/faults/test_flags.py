"""Every flag with values that nobody thought of: one line (or tyro's box) and exit code 2, or a normal start."""

import dataclasses
import math
import resource
import runpy
import sys
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from small_runs import ROOT

pytestmark = pytest.mark.slow
NUMBERS = [0, -0.0, -1, 1, 2, 7, 1e-300, 0.5, math.nan, math.inf, -math.inf, 2**31, 2**63, 10**30, 1e308]
WORDS = ["", " ", "-", "--", "0", "1e", "٣", "½", "ä", "🐍", "\x01", "a\nb", "x" * 5000, "../..", "10x10", "None"]
NOT_HERE = {"wandb", "rom", "render", "compile", "cudagraph"}  # which open, show or compile something
VALUES = st.one_of(
    st.sampled_from(NUMBERS),
    st.sampled_from(WORDS),
    st.integers(-(10**40), 10**40),
    st.floats(),
    st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=20),
)


def test_any_value_of_any_flag_is_refused_in_one_line_or_starts(script, tries, monkeypatch, capsys, started) -> None:
    monkeypatch.chdir(script.folder)

    def start(*arguments: Any, **options: Any) -> None:
        raise started

    monkeypatch.setattr("torch.utils.tensorboard.SummaryWriter", start)
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (16 * 2**30, limits[1]))  # a million games do not fill the machine's memory
    flags = [field.name for field in dataclasses.fields(script.module.Args) if field.name not in NOT_HERE]
    outcomes = {"refused": 0, "started": 0}

    @settings(
        max_examples=tries(100, 3000),
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.sampled_from(flags), VALUES)
    def check(name: str, value: Any) -> None:
        flag = f"--{name.replace('_', '-')}"
        words = script.words(total_timesteps=10)
        monkeypatch.setattr(sys, "argv", [f"{script.name}.py", *words, f"{flag}={value}"])
        capsys.readouterr()
        try:
            runpy.run_path(str(ROOT / f"{script.name}.py"), run_name="__main__")
        except started:
            outcomes["started"] += 1
        except SystemExit as end:
            said = capsys.readouterr()
            if end.code in (0, None):  # --evaluate and --render of nothing
                return
            assert end.code == 2, (flag, value, said.err)
            assert "Traceback" not in said.err
            is_tyros = "For full helptext" in said.err  # a box that names the flag and what it takes
            assert said.err.count("\n") == 1 or is_tyros, (flag, value, said.err)
            outcomes["refused"] += 1
        finally:
            torch.set_flush_denormal(False)  # hypothesis draws such numbers

    try:
        check()
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
    assert outcomes["refused"] > 20 and outcomes["started"] > 5

"""Switches, over the scripts that are not rewritten yet: precision, compiling, losses that are not finite."""

import shutil

import pytest
import torch
from small_runs import load, network_of, weights_of

COMPILER = pytest.mark.skipif(
    shutil.which("g++") is None and shutil.which("clang++") is None, reason="needs a C++ compiler"
)
DQN = ["dqn_snake", "dqn_mario_async"]  # the compat script follows SB3 and has tests of its own


# ------------------------------------------------------------------------------------------------ switches


@pytest.mark.skipif(torch.cuda.is_available(), reason="these are active on CUDA")
def test_switches_that_cannot_be_active_say_so_in_one_line(script, capsys) -> None:
    summary, _ = script.run(fp16=True, tf32=True, cudagraph=True)
    lines = capsys.readouterr().out.splitlines()
    for flag in ("--fp16", "--tf32", "--cudagraph"):
        (line,) = [line for line in lines if line.startswith(flag)]
        assert "needs CUDA" in line
    assert summary["precision"] == "float32"
    assert not summary["cudagraph"]


WITH_BF16_ADVICE = ["dqn_snake", "ppo_snake", "ppo_metta", "dqn_mario_async"]


@pytest.mark.parametrize("speedup, bf16, says", [(2.0, False, True), (1.0, False, False), (2.0, True, False)])
@pytest.mark.parametrize("script", WITH_BF16_ADVICE, indirect=True)
def test_a_run_says_where_bf16_would_be_faster(script, monkeypatch, capsys, speedup, bf16, says) -> None:
    monkeypatch.setattr(script.module, "bf16_speedup", lambda: speedup)
    monkeypatch.setattr(script.module, "evaluate", lambda *_: {})
    script.run(bf16=bf16, total_timesteps=60)
    assert ("--bf16 learns faster here" in capsys.readouterr().out) == says


@pytest.mark.parametrize("script", [*DQN, "ppo_snake"], indirect=True)
def test_bf16_is_close_to_fp32_and_learns_otherwise(script, monkeypatch) -> None:
    fp32 = weights_of(script.run(run_name="fp32")[1])
    monkeypatch.setattr(script.module, "pick_precision", lambda *_: torch.bfloat16)
    summary, folder = script.run(run_name="bf16")
    bf16 = weights_of(folder)
    assert summary["precision"] == "bfloat16"
    assert not torch.equal(bf16, fp32)
    assert (bf16 - fp32).norm() < 0.3 * fp32.norm()


COMPILED = {  # flags, and how far the weights of both runs may lie apart: absolute and relative
    "dqn_snake": ({}, 1e-3, 1e-3),
    "ppo_snake": ({}, 1e-3, 1e-3),
    "ppo_metta": (dict(bptt_horizon=4, total_timesteps=2 * 384), 1e-4, 1e-3),
    "dqn_mario_async": (dict(total_timesteps=500), 2e-3, 2e-3),
}


@COMPILER
@pytest.mark.parametrize("script", COMPILED, indirect=True)
def test_compiled_learns_what_eager_learns(script) -> None:
    flags, atol, rtol = COMPILED[script.name]
    _, eager = script.run(run_name="eager", **flags)
    summary, compiled = script.run(run_name="compiled", compile=True, **flags)
    assert summary["compiled"]
    assert set(network_of(load(compiled))) == set(network_of(load(eager)))  # no `_orig_mod.` either
    torch.testing.assert_close(weights_of(compiled), weights_of(eager), atol=atol, rtol=rtol)


def test_a_failing_compiler_means_eager_and_one_line(script, monkeypatch, capsys) -> None:
    def compile_later(function, options):
        def fail(*_):
            raise RuntimeError("no compiler here\nand a long story")

        return fail

    monkeypatch.setattr(torch, "compile", compile_later)
    summary, _ = script.run(compile=True)
    said = {line for line in capsys.readouterr().out.splitlines() if line.startswith("--compile")}
    assert said == {"--compile: failed (no compiler here); eager mode is used instead"}
    assert not summary["compiled"]

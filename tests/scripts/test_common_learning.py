"""Learning and its switches, over all scripts: precision, compiling, attention kernels, target network, bad losses."""

import shutil

import numpy as np
import pytest
import torch
from small_runs import load, network_of, weights_of

COMPILER = pytest.mark.skipif(
    shutil.which("g++") is None and shutil.which("clang++") is None, reason="needs a C++ compiler"
)
DQN = ["dqn_snake", "dqn_mario_async"]  # the compat script follows SB3 and has tests of its own


@pytest.mark.parametrize("script", ["dqn_snake", "dqn_snake_sb3_compat"], indirect=True)
def test_epsilon_reaches_both_ends(script) -> None:
    linear_schedule = script.module.linear_schedule
    assert linear_schedule(1, 0.05, 0.1, progress=0) == 1
    assert linear_schedule(1, 0.05, 0.1, progress=0.05) == pytest.approx(0.525)
    assert linear_schedule(1, 0.05, 0.1, progress=0.1) == pytest.approx(0.05)
    assert linear_schedule(1, 0.05, 0.1, progress=0.2) == 0.05
    assert linear_schedule(1, 0.05, 0, progress=0.2) == 0.05


@pytest.mark.parametrize("script", DQN, indirect=True)
def test_td_target_is_double_and_stops_at_termination(script) -> None:
    rng = np.random.default_rng(0)
    reward = rng.normal(size=50)
    discount = rng.choice([0, 0.9], size=50)
    target = rng.normal(size=(50, 4))
    online = rng.normal(size=(50, 4))
    expected = [r + d * t[np.argmax(o)] for r, d, t, o in zip(reward, discount, target, online)]
    tensors = [torch.tensor(values) for values in (reward, discount, target, online)]
    np.testing.assert_allclose(script.module.td_target(*tensors), expected)


@pytest.mark.parametrize("log_every", [1e-9, 1e9], ids=["seen by a log", "seen by a checkpoint"])
def test_a_loss_that_is_not_finite_ends_the_run_and_is_not_saved(script, capsys, log_every) -> None:
    """The step size is far too large. The first update alone leaves finite weights."""
    one_update = dict(num_minibatches=1, update_epochs=1) if script.name.startswith("ppo") else {}
    if script.name == "ppo_metta":
        one_update["rnn"] = "none"  # the gates of a memory saturate, and its weights stay finite
    capsys.readouterr()
    with pytest.raises(SystemExit) as error:
        script.run(learning_rate=1e18, log_every=log_every, checkpoint_every=1e-9, **one_update)
    said = capsys.readouterr().err.splitlines()
    assert error.value.code == 2
    assert f"{script.name}.py: --learning-rate 1e+18: the loss is " in said[-1]
    assert "a lower one works" in said[-1]
    assert set(said[:-1]) <= {f"{script.folder / 'run'}: the weights are not finite and were not saved"}
    if script.name != "dqn_snake_sb3_compat":  # which makes no update of a gradient that is not finite
        assert (len(said) > 1) == (log_every == 1e9)
    saved = load(script.folder / "run")
    assert log_every == 1e9 or saved["global_step"] < script.flags["total_timesteps"]
    assert all(weight.isfinite().all() for weight in network_of(saved).values())


@pytest.mark.parametrize("script", DQN, indirect=True)
def test_the_target_network_copies_or_follows(script) -> None:
    def distance(tau: float) -> float:
        _, folder = script.run(tau=tau, run_name=str(tau))
        saved = load(folder)
        target = saved["target_network"]
        return sum((weight - target[name]).abs().sum().item() for name, weight in saved["q_network"].items())

    assert distance(1.0) == 0
    assert distance(1e-6) > distance(0.5) > 0


@pytest.mark.parametrize("script", [*DQN, "dqn_snake_sb3_compat"], indirect=True)
def test_the_target_network_has_no_gradients(script, monkeypatch) -> None:
    """Each update would lengthen the graph that leads to it, for ever."""
    networks = []
    init = script.module.QNetwork.__init__

    def keep(self, *arguments) -> None:
        networks.append(self)
        init(self, *arguments)

    monkeypatch.setattr(script.module.QNetwork, "__init__", keep)
    script.run()
    target_network = networks[1]
    weights = list(target_network.parameters())
    assert weights
    assert not any(weight.requires_grad for weight in weights)


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


ATTENTION = {
    "dqn_snake": dict(network="attention", total_timesteps=600),
    "dqn_snake_sb3_compat": dict(policy="transformer", env_id="SnakeOneHot-v0", total_timesteps=60),
    "ppo_metta": dict(network="token-attention", total_timesteps=384),
}


@pytest.mark.parametrize("script", ATTENTION, indirect=True)
def test_sdpa_says_which_kernel_runs(script, capsys) -> None:
    flags = ATTENTION[script.name]
    for sdpa in ("math", "cudnn"):
        summary, _ = script.run(sdpa=sdpa, run_name=sdpa, **flags)
        said = capsys.readouterr().out
        assert summary["sdpa"] == "math"
        assert "attention runs in math" in said
        assert ("--sdpa cudnn: does not run here" in said) == (sdpa == "cudnn")

"""Learning, over all scripts: exploration, targets, the target network, attention kernels."""

import numpy as np
import pytest
import torch
from small_runs import load, refusal

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


ATTENTION = {
    "dqn_snake": dict(network="attention", total_timesteps=600),
    "dqn_snake_sb3_compat": dict(policy="transformer", env_id="SnakeOneHot-v0", total_timesteps=60),
    "ppo_metta": dict(network="token-attention", total_timesteps=384),
}


@pytest.mark.parametrize("script", ATTENTION, indirect=True)
def test_a_kernel_that_does_not_run_is_refused(script, capsys) -> None:
    flags = ATTENTION[script.name]
    summary, _ = script.run(sdpa="math", run_name="math", **flags)
    assert summary["sdpa"] == "math"
    capsys.readouterr()
    assert "--sdpa" in refusal(capsys, script.program, *script.words(sdpa="cudnn", run_name="cudnn", **flags))

"""The Metta trainer: its maths, its switches, what it leaves behind, and what it refuses."""

import dataclasses
import functools
import importlib.util
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from rank_runs import KEEP_NETWORK, small_flags, start_ranks
from small_runs import checkpoint, load, scalars
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.tensorboard import SummaryWriter

import ppo_metta
from envs.metta.batch import MettaBatch
from envs.metta.rules import ACTIONS, FEATURES, ROTATE
from envs.workers import LocalEnvs, SubprocEnvs, WorkerLost, worker_main
from ppo_metta import (
    PRESETS,
    Agent,
    Args,
    Learner,
    fill_defaults,
    gae,
    main,
    make_games,
    ppo_loss,
    sample,
)

CPU = torch.device("cpu")
CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
REAL = pytest.mark.skipif(importlib.util.find_spec("mettagrid") is None, reason="needs mettagrid")
ROOT = Path(__file__).parents[2]
QUICK = dict(
    device="cpu", num_envs=4, num_steps=16, num_minibatches=4, bptt_horizon=8, total_timesteps=384 * 4,
    rnn="mingru", hidden_size=16, eval_episodes=6, eval_every=0.0, log_every=1e-3, video=False, threads=1,
    num_workers=2,
)  # fmt: skip


@pytest.fixture(autouse=True)
def short_episodes(monkeypatch):
    """Arenas of 100 steps instead of 1,000."""
    for rules in ppo_metta.VARIANTS.values():
        monkeypatch.setitem(rules, "max_steps", 100)


@pytest.fixture(autouse=True)
def process_as_before():
    """A run sets these for its whole process."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    threads = torch.get_num_threads()
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)
    torch.set_num_threads(threads)
    torch.set_flush_denormal(False)


@pytest.fixture
def run(tmp_path):
    """Train for a moment; gives the summary and the run folder."""

    def start(**flags) -> tuple[dict, Path]:
        flags = QUICK | {"run_dir": str(tmp_path), "run_name": "run"} | flags
        return main(Args(**flags)), tmp_path / flags["run_name"]

    return start


def parse(*words: str) -> Args:
    """The flags of a command line."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["ppo_metta.py", *words])
        return ppo_metta.parse_args()


def tokens(games: int = 4, steps: int = 20) -> torch.Tensor:
    """Observations (N, 200, 3) of games under way."""
    torch.manual_seed(0)
    envs = MettaBatch(games, easy=True)
    obs = envs.reset()
    for _ in range(steps):
        obs = envs.step(torch.randint(25, (len(obs),)))[0]
    return obs.clone()


def agent_of(**flags) -> Agent:
    args = fill_defaults(Args(**(QUICK | flags)), CPU)
    torch.manual_seed(0)
    return Agent(args, make_games(args, 1, CPU, 0), CPU)


# ------------------------------------------------------------------------------------------------ maths


def transitions(steps: int = 12, lanes: int = 5, seed: int = 0) -> dict[str, np.ndarray]:
    """Random rollouts."""
    rng = np.random.default_rng(seed)
    x = {name: rng.normal(size=(steps, lanes)) for name in ("reward", "value")}
    x["value"] = np.concatenate([x["value"], rng.normal(size=(1, lanes))])
    x["done"] = rng.random((steps, lanes)) < 0.1
    return x | {"ratio": rng.uniform(0.3, 2, size=(steps, lanes))}


def slow_gae(reward, value, done, ratio, gamma, lam, rho, c) -> np.ndarray:
    advantage, (steps, lanes) = np.zeros_like(reward), reward.shape
    for lane in range(lanes):
        for t in reversed(range(steps)):
            following = 0 if done[t, lane] else value[t + 1, lane]
            advantage[t, lane] = min(ratio[t, lane], rho) * (reward[t, lane] + gamma * following - value[t, lane])
            if t + 1 < steps and not done[t, lane]:
                advantage[t, lane] += gamma * lam * min(ratio[t, lane], c) * advantage[t + 1, lane]
    return advantage


@pytest.mark.parametrize("rho, c", [(1, 1), (1.5, 0.7), (10, 10)])
def test_advantages_against_numpy(rho: float, c: float) -> None:
    x = transitions()
    got = gae(*(torch.tensor(part) for part in x.values()), 0.9, 0.8, rho, c)
    np.testing.assert_allclose(got, slow_gae(*x.values(), 0.9, 0.8, rho, c))


def test_on_policy_advantages_with_lambda_1_are_returns_less_values() -> None:
    x = transitions(lanes=1) | {"ratio": np.ones((12, 1))}
    x["done"][:] = False
    advantage = gae(*(torch.tensor(part) for part in x.values()), 0.9, 1.0, 1, 1)
    returns = sum(0.9**t * r for t, r in enumerate(x["reward"][:, 0])) + 0.9**12 * x["value"][12, 0]
    assert advantage[0, 0].item() == pytest.approx(returns - x["value"][0, 0])


def test_loss_against_numpy() -> None:
    rng = np.random.default_rng(0)
    logits, action = rng.normal(size=(6, 7, 5)), rng.integers(5, size=(6, 7))
    names = ("value", "old_logprob", "old_value", "advantage", "returns")
    x = {name: rng.normal(scale=0.5, size=(6, 7)) for name in names}
    x["old_logprob"] -= 1.5
    given = [x["value"], action, *list(x.values())[1:]]
    loss, means, ratios = ppo_loss(*map(torch.tensor, [logits, *given]), 0.2, 0.1, 0.5, torch.tensor(0.01))
    policy = value = kl = entropy = 0.0
    for i in np.ndindex(6, 7):
        probabilities = np.exp(logits[i]) / np.exp(logits[i]).sum()
        entropy -= (probabilities * np.log(probabilities)).sum() / 42
        ratio = probabilities[action[i]] / math.exp(x["old_logprob"][i])
        assert ratios[i].item() == pytest.approx(ratio)
        policy -= min(ratio * x["advantage"][i], min(max(ratio, 0.8), 1.2) * x["advantage"][i]) / 42
        near = x["old_value"][i] + min(max(x["value"][i] - x["old_value"][i], -0.1), 0.1)
        value += max((x["value"][i] - x["returns"][i]) ** 2, (near - x["returns"][i]) ** 2) / 84
        kl += (ratio - 1 - math.log(ratio)) / 42
    np.testing.assert_allclose(means, [policy, value, entropy, kl])
    assert loss.item() == pytest.approx(policy - 0.01 * entropy + 0.5 * value)


def test_sampled_actions_follow_the_logits() -> None:
    logits = torch.tensor([0.0, 1.0, -1.0, 2.0])
    generator = torch.Generator().manual_seed(0)
    drawn = sample(logits.expand(200_000, 4), generator).bincount(minlength=4) / 200_000
    torch.testing.assert_close(drawn, logits.softmax(0), atol=5e-3, rtol=0)


def test_segments_index_every_step_of_every_lane_once() -> None:
    args = fill_defaults(Args(**(QUICK | dict(num_steps=32))), CPU)
    obs = torch.zeros(5, 200, 3, dtype=torch.uint8)
    learner = Learner(args, make_games(args, 1, CPU, 0), obs, torch.Generator(), CPU, torch.float32)
    lane, time = torch.arange(5).expand(32, 5), torch.arange(32)[:, None].expand(32, 5)
    learner.segments = torch.arange(4 * 5)
    index = learner.index()
    assert sorted(index.flatten().tolist()) == list(range(160))
    assert (lane.flatten()[index] == torch.arange(20) % 5).all()
    assert (time.flatten()[index] == torch.arange(20) // 5 * 8 + torch.arange(8)[:, None]).all()


# ------------------------------------------------------------------------------------------------ networks


def test_a_bag_of_tokens_is_a_linear_layer_on_the_box() -> None:
    encoder, obs = agent_of().encoder, tokens()
    obs[3] = 255  # an agent that sees nothing
    obs[0, 5, 0], obs[0, 5, 2] = 254, 7  # a token of no place, as the real game has them
    heading, outs, grads = encoder.view.heading(obs), [], []
    for layer in (encoder.sparse, encoder.dense):
        encoder.zero_grad()
        out = layer(obs, heading)
        out.square().sum().backward()
        outs.append(out.detach())
        grads.append(encoder.table.grad.clone())
    torch.testing.assert_close(*outs)
    torch.testing.assert_close(*grads, atol=1e-4, rtol=1e-4)


def test_attention_kernels_agree_with_the_one_in_plain_operations() -> None:
    obs = tokens()
    math, flash = (agent_of(sdpa=sdpa, network="token-attention").encoder for sdpa in ("math", "flash"))
    heading = math.view.heading(obs)
    torch.testing.assert_close(math(obs, heading), flash(obs, heading), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_kernel_that_does_not_run_is_named_and_leaves_no_run_folder(run, capsys, tmp_path, compiled) -> None:
    with pytest.raises(SystemExit) as error:
        run(run_name="refused", network="token-attention", sdpa="cudnn", compile=compiled)
    message = capsys.readouterr().err
    assert error.value.code == 2 and message.count("\n") == 1 and "--sdpa cudnn: does not run here" in message
    assert not list(tmp_path.rglob("refused*"))


def test_evaluation_needs_no_kernel_of_training() -> None:
    agent, obs = agent_of(network="token-attention", sdpa="cudnn"), tokens()
    other = agent_of(network="token-attention")
    act, act_as_usual = (ppo_metta.make_player(each, len(obs), CPU) for each in (agent, other))
    assert torch.equal(act(obs), act_as_usual(obs))
    with pytest.raises(RuntimeError):  # the next update uses the kernel that --sdpa names
        agent(obs[None], torch.zeros(len(obs), agent.state_size), torch.zeros(1, len(obs), dtype=torch.bool))


@pytest.mark.parametrize("network", ["token-bag", "box-cnn", "token-attention"])
def test_networks_ignore_padding_and_order_but_not_places(network: str) -> None:
    agent, obs = agent_of(network=network), tokens()
    heading = agent.view.heading(obs)
    out = agent.encoder(obs, heading)
    shuffled = obs.clone()
    for row in shuffled:
        n = int((row[:, 0] < 255).sum())
        row[:n] = row[torch.randperm(n)]
    torch.testing.assert_close(agent.encoder(shuffled, heading), out, atol=1e-4, rtol=1e-4)
    longer = torch.cat([obs, torch.full_like(obs[:1], 255)])  # more padding for nobody, another agent in the batch
    longer_heading = agent.view.heading(longer)
    torch.testing.assert_close(agent.encoder(longer, longer_heading)[:-1], out, atol=1e-4, rtol=1e-4)
    moved = obs.clone()
    moved[0, 4, 0] ^= 1
    assert not torch.allclose(agent.encoder(moved, heading)[0], out[0], atol=1e-6)


def turned_world(obs: torch.Tensor) -> torch.Tensor:
    """What agents see after a quarter turn of everything to the left: of all places, of all headings."""
    obs = obs.clone()
    place, feature, value = obs.unbind(2)
    inside = place < 254
    row, column = place >> 4, place & 15
    place[inside] = ((10 - column) << 4 | row)[inside]
    is_heading = feature == FEATURES.index("orientation")
    value[is_heading] = torch.tensor([2, 3, 1, 0], dtype=torch.uint8)[value[is_heading].int()]
    return obs


@pytest.mark.parametrize("network", ["token-bag", "box-cnn", "token-attention"])
def test_what_an_agent_does_and_expects_turns_with_the_world(network: str) -> None:
    agent, obs = agent_of(network=network, rnn="none"), tokens(8)
    assert len(agent.view.heading(obs).unique()) == 4
    never = torch.zeros(1, len(obs), dtype=torch.bool)
    state = torch.zeros(len(obs), 0)
    logits, value, _ = agent(obs[None], state, never)
    turned_logits, turned_value, _ = agent(turned_world(obs)[None], state, never)
    torch.testing.assert_close(turned_value, value, atol=1e-4, rtol=1e-4)
    order = torch.arange(len(ACTIONS))
    order[ROTATE : ROTATE + 4] = ROTATE + torch.tensor([3, 2, 0, 1])  # what was up is to the left now, ...
    error = (turned_logits - logits[..., order]).abs().max()
    assert error < 1e-5 and (turned_logits - logits).abs().max() > 100 * error


def slow_mingru(x: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    """States (T, B, width) in float64, one number at a time."""
    gate, candidate = (part.double().numpy() for part in x.chunk(2, 2))
    states = np.concatenate([state.double().numpy()[None], np.zeros(gate.shape)])
    for t, lane, n in np.ndindex(gate.shape):
        z = 1 / (1 + math.exp(-gate[t, lane, n]))
        new = candidate[t, lane, n]
        new = new + 0.5 if new >= 0 else 1 / (1 + math.exp(-new))
        states[t + 1, lane, n] = (1 - z) * states[t, lane, n] + z * new
    return torch.tensor(states[1:])


@pytest.mark.parametrize("rnn", ["mingru", "none"])
def test_memory_against_slow_code_and_reset_at_the_start_of_episodes(rnn: str) -> None:
    agent, obs = agent_of(rnn=rnn), torch.stack([tokens(2, steps) for steps in range(5, 11)])
    state, never = torch.rand(12, agent.state_size), torch.zeros(6, 12, dtype=torch.bool)
    logits, value, after = agent(obs, state, never)
    if rnn == "mingru":
        heading = agent.view.heading(obs.flatten(0, 1))
        x = agent.hidden(agent.encoder(obs.flatten(0, 1), heading)).unflatten(0, (6, 12)).detach()
        states = slow_mingru(x, state)
        torch.testing.assert_close(after.double(), states[-1], atol=1e-5, rtol=1e-5)
        expected_logits, expected_value = agent.heads(states.float()).split([25, 1], 2)
        expected_logits = expected_logits.gather(2, agent.view.seen_action[heading].view(6, 12, 25))
        torch.testing.assert_close(logits, expected_logits, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(value, expected_value.squeeze(2), atol=1e-5, rtol=1e-5)
    # In two parts it is the same; with a reset, nothing of before is left in that lane, all of it in the others.
    half = agent(obs[:3], state, never[:3])[2]
    torch.testing.assert_close(agent(obs[3:], half, never[3:])[0], logits[3:], atol=1e-5, rtol=1e-5)
    reset = never.clone()
    reset[3, 4] = True
    fresh = agent(obs[3:], torch.zeros_like(state), never[3:])[0]
    got = agent(obs, state, reset)[0]
    torch.testing.assert_close(got[3:, 4], fresh[:, 4], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(got[:, :4], logits[:, :4])
    assert (rnn == "none") == torch.allclose(got[3:, 4], logits[3:, 4], atol=1e-6)


class Operations(TorchDispatchMode):
    """Names of what runs, and the dtypes of what it gives."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, torch.dtype]] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        results = function(*args, **(kwargs or {}))
        tensors = results if isinstance(results, (tuple, list)) else [results]
        self.found += [(function.overloadpacket.__name__, t.dtype) for t in tensors if isinstance(t, torch.Tensor)]
        return results


def test_half_precision_of_the_memory_is_that_of_autocast_and_of_matmuls_only() -> None:
    agent, reset = agent_of(), torch.zeros(6, 5, dtype=torch.bool)
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False), Operations() as operations:
        hidden, state = ppo_metta.mingru(agent.hidden(torch.randn(6, 5, 16)), torch.rand(5, 16), reset)
    names = [name for name, _ in operations.found]
    assert [dtype for name, dtype in operations.found if name in ("mm", "addmm")] == [torch.bfloat16]
    in_memory = operations.found[names.index("addmm") + 1 :]
    assert {dtype for name, dtype in in_memory if name in ("sigmoid", "addcmul", "stack")} == {torch.float32}
    assert hidden.dtype == state.dtype == torch.float32


# ------------------------------------------------------------------------------------------------ rollouts


@pytest.fixture
def recorded(monkeypatch) -> dict:
    """What `gae` was first asked, and the rollout."""
    seen, gae_of, learner_of = {}, ppo_metta.gae, ppo_metta.Learner

    def recording_gae(*given):
        names = "reward value done ratio".split()
        seen.setdefault("gae", dict(zip(names, (part.clone() for part in given[:4]))))
        return gae_of(*given)

    def recording_learner(*given):
        seen["rollout"] = learner_of(*given)
        return seen["rollout"]

    monkeypatch.setattr(ppo_metta, "gae", recording_gae)
    monkeypatch.setattr(ppo_metta, "Learner", recording_learner)
    return seen


LONG = dict(num_steps=96, num_minibatches=12, total_timesteps=24 * 96, reward_scale=2.0)
LONG |= dict(learning_rate=1e-12, muon_learning_rate=0.0)  # weights stay


@pytest.mark.parametrize("rnn", ["mingru", "none"])
def test_a_rollout_against_a_loop_with_one_lane_at_a_time_in_mind(run, recorded, rnn) -> None:
    """Values, log-probabilities and bootstraps, from a loop that resets the memory and looks at the last observation of
    every episode as it ends. Truncation must bootstrap from what the agent saw last, with what it remembered then."""
    _, folder = run(rnn=rnn, **LONG)
    agent = agent_of(rnn=rnn)
    agent.load_state_dict(load(folder)["agent"])
    rollout, asked = recorded["rollout"], recorded["gae"]
    envs = MettaBatch(4, seed=1, easy=True, rewards="work", max_steps=100)
    obs, state, never = envs.reset().clone(), torch.zeros(24, agent.state_size), torch.zeros(1, 24, dtype=torch.bool)
    cut = 0
    with torch.no_grad():
        for t in range(96):
            logits, value, state = agent(obs[None], state, never)
            logprob = logits[0].log_softmax(1).gather(1, rollout.action[t, :, None])[:, 0]
            torch.testing.assert_close(rollout.logprob[t], logprob)
            torch.testing.assert_close(asked["value"][t], value[0])
            assert torch.equal(rollout.obs[t], obs)
            obs, reward, terminated, truncated, info = envs.step(rollout.action[t])
            final_value = agent(info["final_obs"][None], state, never)[1][0]
            assert not terminated.any() and torch.equal(asked["done"][t], truncated)
            torch.testing.assert_close(asked["reward"][t], 2 * reward + 0.97 * truncated * final_value)
            cut += int(truncated.sum())
            state, obs = state * ~truncated[:, None], obs.clone()
        torch.testing.assert_close(asked["value"][96], agent(obs[None], state, never)[1][0])
    assert cut >= 12 and (asked["ratio"] == 1).all()


@pytest.mark.parametrize(
    "flags",
    [{"rnn": "mingru"}, {"rnn": "none"}, {"network": "box-cnn"}, {"network": "token-attention"},
     {"vec_env": "subproc", "num_workers": 2}, {"vec_env": "subproc", "num_workers": 0}],
    ids=str,
)  # fmt: skip
def test_learning_sees_what_acting_saw(run, monkeypatch, flags) -> None:
    """With weights that do not move the policy ratio stays 1, whatever memory was carried or lost on the way.

    With heads as a new agent has them, all actions are nearly as likely whatever it remembers: here they are larger.
    """
    largest, ppo_loss_of, init = [], ppo_metta.ppo_loss, Agent.__init__

    def recording(*given):
        results = ppo_loss_of(*given)
        largest.append((results[2] - 1).abs().max().item())
        return results

    def with_large_heads(self, *given):
        init(self, *given)
        torch.nn.init.orthogonal_(self.heads.weight, 3)

    monkeypatch.setattr(ppo_metta, "ppo_loss", recording)
    monkeypatch.setattr(Agent, "__init__", with_large_heads)
    run(**LONG | {"num_steps": 32, "num_minibatches": 4, "total_timesteps": 24 * 32 * 4} | flags)
    assert len(largest) == 16 and max(largest) < 3e-5, max(largest)


def test_workers_play_the_same_games(run, monkeypatch) -> None:
    monkeypatch.delitem(ppo_metta.VARIANTS["MettaArena-v0"], "max_steps")  # other processes know of no short ones
    plain = checkpoint(run(run_name="plain")[1])
    for name, workers in (("here", 0), ("there", 1)):
        flags = dict(vec_env="subproc", num_workers=workers, async_factor=1)
        other = checkpoint(run(run_name=name, **flags)[1])
        assert all(torch.equal(value, other[key]) for key, value in plain.items() if key.startswith("agent"))


# ------------------------------------------------------------------------------------------------ learning


def agent_weights(folder: Path) -> torch.Tensor:
    return torch.cat([value.flatten() for name, value in checkpoint(folder).items() if name.startswith("agent")])


def test_minibatches_take_every_segment_once_an_epoch(run, monkeypatch) -> None:
    asked, index = [], Learner.index
    monkeypatch.setattr(Learner, "index", lambda b: asked.append(b.segments.tolist()) or index(b))
    run(update_epochs=2, total_timesteps=384)
    assert len(asked) == 2 * 4
    for epoch in (asked[:4], asked[4:]):
        assert sorted(sum(epoch, [])) == list(range(48))


@pytest.mark.parametrize("flags, each_update", [({"bptt_horizon": 16}, 0), ({}, 1), ({"prio_alpha": 0.5}, 1)], ids=str)
def test_advantages_are_those_of_now_with_as_few_calls_as_will_do(run, monkeypatch, flags, each_update) -> None:
    """An update changes values and ratios; where no later one of the epoch can see them, once an epoch is enough."""
    calls, moved, gae_of, index_of = [], [], ppo_metta.gae, Learner.index

    def recording(*given):
        calls.append((given, gae_of(*given)))
        return calls[-1][1]

    def comparing(b):
        given, advantage = calls[-1]
        now = gae_of(*given)  # of the same tensors as they are by now
        moved.append(not torch.equal(now, advantage))
        index = index_of(b)
        assert torch.equal(now.flatten()[index], advantage.flatten()[index])
        return index

    monkeypatch.setattr(ppo_metta, "gae", recording)
    monkeypatch.setattr(Learner, "index", comparing)
    run(update_epochs=2, log_every=1e9, **flags)
    assert len(moved) == 4 * 2 * 4 and any(moved) == (not each_update)
    assert len(calls) == 4 * 2 * (4 if each_update else 1)


def test_prioritised_segments_are_those_with_large_advantages(run, monkeypatch) -> None:
    asked, index = [], Learner.index
    monkeypatch.setattr(Learner, "index", lambda b: asked.append(b.segments.tolist()) or index(b))

    def advantage(reward, *_):  # of segment k of lane n: 100 in one lane, 1 in the others
        return torch.where(torch.arange(reward.shape[1]) == 5, 100.0, 1.0).expand_as(reward)

    monkeypatch.setattr(ppo_metta, "gae", advantage)
    run(prio_alpha=1.0, norm_adv=False)
    assert all(len(set(segments)) == 12 for segments in asked)
    assert np.mean([{5, 29} <= set(segments) for segments in asked]) > 0.9


@pytest.mark.parametrize("lanes_with_advantages", [0, 1])
def test_segments_without_advantages_can_be_drawn(run, monkeypatch, lanes_with_advantages) -> None:
    """As where nothing is rewarded. Their importance weights must not be infinite."""

    def advantage(reward, *_):
        return (torch.arange(reward.shape[1]) < lanes_with_advantages).float().expand_as(reward)

    monkeypatch.setattr(ppo_metta, "gae", advantage)
    _, folder = run(prio_alpha=0.5)
    assert all(weight.isfinite().all() for weight in load(folder)["agent"].values())
    assert math.isfinite(scalars(folder)["losses/pg_loss"][-1])


def test_without_epochs_the_agents_only_play(run) -> None:
    short, first = run(update_epochs=0)
    long, second = run(update_epochs=0, total_timesteps=384 * 8, run_name="second")
    assert (short["env_steps"], long["env_steps"]) == (384 * 4, 384 * 8)
    assert long["updates_per_second"] == long["replay_ratio"] == 0 and long["rollout_fraction"] > 0.9
    assert heads(short, first) == heads(long, second) and not any(scalars(second)["losses/pg_loss"])


def slow_muon(update: torch.Tensor) -> torch.Tensor:
    """Its singular values brought near 1 by five rounds of a polynomial, times the root of its sides' ratio."""
    u, s, v = torch.linalg.svd(update.double(), full_matrices=False)
    s = s / s.norm()
    for _ in range(5):
        s = 3.4445 * s - 4.775 * s**3 + 2.0315 * s**5
    rows, columns = update.shape
    return (u * s @ v).float() * max(1, rows / columns) ** 0.5


def test_a_whole_rollout_is_learned_from_as_independent_code_does(run, recorded, monkeypatch) -> None:
    """Every update of a rollout: V-trace with the values and ratios that the updates before left, segments weighed by
    how likely they were drawn, both losses, the entropy bonus, schedules, clipping, Adam, and Muon."""
    segments_of, index_of, agents, firsts = [], Learner.index, [], []
    init = Agent.__init__

    def keep(self, *given):
        init(self, *given)
        torch.nn.init.orthogonal_(self.heads.weight, 1)  # so that more than the values moves
        agents.append(self)
        firsts.append({name: value.clone() for name, value in self.state_dict().items()})

    monkeypatch.setattr(Agent, "__init__", keep)
    monkeypatch.setattr(Learner, "index", lambda b: segments_of.append(b.segments.clone()) or index_of(b))
    interrupt_after(monkeypatch, 1)  # one rollout is learned from
    flags = dict(prio_alpha=0.7, prio_beta0=0.4, learning_rate=0.02, ent_coef=0.3, end_ent_coef=0.1, update_epochs=2)
    flags |= dict(muon_learning_rate=1e-3)
    flags |= dict(clip_coef=0.1, vf_clip_coef=0.2, vf_coef=0.7, gamma=0.9, gae_lambda=0.8, rho_clip=0.9, c_clip=0.8)
    # Clipped this much, gradients are small next to Adam's epsilon; otherwise their scale would not matter.
    _, folder = run(max_grad_norm=1e-3, **flags)
    trained = load(folder)["agent"]
    assert len(segments_of) == 8 and load(folder)["global_step"] == 384

    rollout, asked = recorded["rollout"], {name: part.numpy().copy() for name, part in recorded["gae"].items()}
    agent = agents[0]
    agent.load_state_dict(firsts[0])
    weights = list(agent.parameters())
    moments = [(torch.zeros_like(w), torch.zeros_like(w)) for w in weights]
    left, ent_coef, beta = 0.5 * (1 + math.cos(math.pi / 4)), 0.3 - 0.2 / 4, 0.4 + 0.6 / 4
    for number, segments in enumerate(segments_of):
        advantage = slow_gae(*asked.values(), 0.9, 0.8, 0.9, 0.8)
        size = np.abs(advantage.reshape(2, 8, 24)).sum(1).ravel()
        priority = (size + 0.01 * size.mean()) ** 0.7
        share = torch.tensor(priority / priority.sum())
        steps = [[(n // 24 * 8 + t, n % 24) for n in segments.tolist()] for t in range(8)]
        at = tuple(torch.tensor(steps).unbind(2))

        def of(stored, at=at) -> torch.Tensor:
            return torch.as_tensor(stored)[at]

        adv, old_value = of(advantage), of(asked["value"])
        returns = adv + old_value
        adv = (adv - adv.mean()) / (((adv - adv.mean()) ** 2).mean().sqrt() + 1e-8)
        adv = adv * (48 * share[segments]) ** -beta
        state = rollout.state[segments // 24, segments % 24]
        logits, value, _ = agent(rollout.obs[at], state, rollout.episode_start[at])
        policy = torch.distributions.Categorical(logits=logits)
        ratio = (policy.log_prob(rollout.action[at]) - rollout.logprob[at]).exp()
        pg_loss = -torch.min(ratio * adv, ratio.clip(0.9, 1.1) * adv).mean()
        near = old_value + (value - old_value).clip(-0.2, 0.2)
        v_loss = 0.5 * torch.max((value - returns) ** 2, (near - returns) ** 2).mean()
        loss = pg_loss - ent_coef * policy.entropy().mean() + 0.7 * v_loss
        grads = torch.autograd.grad(loss, weights)
        norm = torch.stack([grad.norm() for grad in grads]).norm()
        for weight, grad, (mean, square) in zip(weights, grads, moments):
            grad = grad * min(1, 1e-3 / (norm.item() + 1e-6))
            if weight is agent.hidden.weight:
                mean.lerp_(grad, 0.05)
                weight.data -= 1e-3 * left * slow_muon(0.05 * grad + 0.95 * mean)
                continue
            mean.lerp_(grad, 0.1)
            square.lerp_(grad**2, 0.001)
            unbiased = (square / (1 - 0.999 ** (number + 1))).sqrt() + 1e-5
            weight.data -= 0.02 * left * mean / (1 - 0.9 ** (number + 1)) / unbiased
        asked["value"][at], asked["ratio"][at] = value.detach().numpy(), ratio.detach().numpy()
    for name, value in agent.state_dict().items():
        moved = (trained[name] - firsts[0][name]).norm()
        assert moved > 1e-3 and (value - trained[name]).norm() < 2e-3 * moved, name


def test_values_that_are_not_finite_are_not_stored(run, monkeypatch, capsys) -> None:
    """They would reach the advantages of every later update of the rollout, also of those that float16 skips."""
    asked, gae_of, forward, learns = [], ppo_metta.gae, Agent.forward, []

    def overflowing(self, tokens, *given):
        logits, value, state = forward(self, tokens, *given)
        if len(tokens) > 1:
            learns.append(0)
            if len(learns) == 2:
                value = value * torch.tensor([math.inf, math.nan, 1.0]).repeat(4)
        return logits, value, state

    monkeypatch.setattr(Agent, "forward", overflowing)
    monkeypatch.setattr(ppo_metta, "gae", lambda r, v, *a: asked.append((v.clone(), a[1].clone())) or gae_of(r, v, *a))
    with pytest.raises(SystemExit):
        run(total_timesteps=384)
    assert "the loss is nan" in capsys.readouterr().err
    assert len(asked) == 4 and all(part.isfinite().all() for parts in asked for part in parts)


class StagedGames:
    """Four agents whose episodes end at different steps, and again after that. An observation is the step."""

    first_lengths = 3, 5, 2, 7

    def __init__(self, args, num_games, device, seed, evaluation=False) -> None:
        self.lengths = self.first_lengths if evaluation else (1, 1, 1, 1)  # only then are first episodes whole
        assert seed == ppo_metta.EVAL_SEED
        self.clock, self.actions = 0, []
        self.obs = self.view()

    def view(self) -> torch.Tensor:
        return torch.full((4, 1, 3), self.clock, dtype=torch.uint8)

    def step(self, action: torch.Tensor):
        self.clock += 1
        self.actions.append(action)
        ends = torch.tensor([self.clock % length == 0 for length in self.lengths])
        terminated = ends & torch.tensor([True, False, True, False])
        hearts = torch.arange(4) + 10 * self.clock
        return self.view(), torch.zeros(4), terminated, ends & ~terminated, {"hearts": hearts}


def test_evaluation_counts_the_first_whole_episode_of_every_agent(monkeypatch) -> None:
    played, memories = [], []

    def make_games(*given, **more) -> StagedGames:
        played.append(StagedGames(*given, **more))
        return played[-1]

    def agent(obs, state, reset):
        assert not reset.any() and (obs == played[-1].clock).all()
        memories.append(state.clone())
        return torch.tensor([0.0, 1.0]).expand(1, 4, 2), torch.zeros(1, 4), state + 1

    agent.state_size = 1
    agent.eval = agent.train = lambda: None
    monkeypatch.setattr(ppo_metta, "make_games", make_games)
    scores = ppo_metta.evaluate(agent, Args(), 4, CPU)
    hearts = [10 * length + n for n, length in enumerate(StagedGames.first_lengths)]
    assert scores["eval_score_mean"] == np.mean(hearts) and scores["eval_score_max"] == max(hearts)
    assert scores["eval_score_median"] == sorted(hearts)[1] and scores["eval_episodes"] == 4
    assert [memory[3].item() for memory in memories] == list(range(7))
    drawn = torch.cat(played[-1].actions).float().mean().item()
    assert 0.5 < drawn < 0.95  # drawn from the policy, not its likeliest action


def test_whole_episodes_are_evaluated_and_half_ones_are_trained_on() -> None:
    args = fill_defaults(Args(**QUICK), CPU)
    limits = [make_games(args, 8, CPU, 0, evaluation=evaluation).limit for evaluation in (False, True)]
    assert limits[0].min() < 100 and (limits[1] == 100).all()


# ------------------------------------------------------------------------------------------------ resume


def interrupt_after(monkeypatch, rollouts: int, number: int = signal.SIGTERM) -> None:
    """At the last step of a rollout, which is still learned from."""
    made, original = [], ppo_metta.sample

    def counting(*given):
        made.append(0)
        if len(made) == rollouts * QUICK["num_steps"]:
            os.kill(os.getpid(), number)
        return original(*given)

    monkeypatch.setattr(ppo_metta, "sample", counting)


@pytest.mark.parametrize("rnn", ["mingru", "none"])
def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(run, monkeypatch, rnn, capsys) -> None:
    flags = dict(rnn=rnn, total_timesteps=384 * 12)
    whole = checkpoint(run(run_name="whole", **flags)[1])
    with monkeypatch.context() as patch:
        interrupt_after(patch, 3)
        _, folder = run(run_name="half", **flags)
    assert "--resume" in capsys.readouterr().out and checkpoint(folder)["global_step"] < 384 * 12
    run(run_name="half", resume=str(folder), **flags)
    got = checkpoint(folder)
    for name, value in whole.items():
        if torch.is_tensor(value):
            assert torch.equal(value, got[name]), name
    assert got["global_step"] == whole["global_step"]


def resized(name: str, *where: str):
    """A change to a checkpoint: the tensor at `where` is of another shape."""

    def change(saved: dict) -> None:
        for key in where:
            saved = saved[key]
        saved[name] = torch.cat([saved[name], saved[name]])

    return change


def replaced(name: str, value):
    def change(saved: dict) -> None:
        saved[name] = value

    return change


SPOILED = {  # what only this script saves; what all of them do: test_promises.py
    "an optimizer of other shapes": lambda saved: resized("exp_avg", 0)(saved["optimizer"]),
    "Muon of another shape": resized("muon"),
    "games of another number": resized("clock", "envs"),
    "games without a part": lambda saved: saved["envs"].pop("grid"),
    "other lanes that remember": resized("state"),
    "no generator's state": replaced("generator", torch.ones_like(torch.Generator().get_state())),
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """The checkpoint of a short run."""
    folder = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patch:
        for rules in ppo_metta.VARIANTS.values():
            patch.setitem(rules, "max_steps", 100)
        main(Args(**QUICK | {"run_dir": str(folder), "run_name": "run", "total_timesteps": 384}))
    return folder / "run" / "checkpoint.pt"


@pytest.mark.parametrize("what", SPOILED)
def test_a_checkpoint_that_does_not_fit_is_refused_before_anything_changes(tmp_path, trained, capsys, what) -> None:
    saved = torch.load(trained, weights_only=True)
    SPOILED[what](saved)
    (tmp_path / "args.json").write_text("{}")
    torch.save(saved, tmp_path / "checkpoint.pt")
    with pytest.raises(SystemExit) as error:
        main(Args(**QUICK | {"resume": str(tmp_path)}))
    said = capsys.readouterr().err
    assert error.value.code == 2 and said.count("\n") == 1 and f"--resume {tmp_path}" in said, said
    assert (tmp_path / "args.json").read_text() == "{}" and len(list(tmp_path.iterdir())) == 2


def test_a_run_goes_on_with_its_games_in_workers(tmp_path, trained, capsys) -> None:
    """Those have no state that a checkpoint could hold; nor has a run that played there."""
    shutil.copy(trained, tmp_path)
    for more, where in ((2, dict(vec_env="subproc", num_workers=0)), (3, {})):
        (tmp_path / "args.json").unlink(missing_ok=True)
        main(Args(**QUICK | {"resume": str(tmp_path), "total_timesteps": 384 * more} | where))
        assert load(tmp_path)["global_step"] == 384 * more
    assert "new games" not in capsys.readouterr().out.split(str(tmp_path))[-1]


def test_flags_that_name_code_or_are_not_the_runs_own_stay_on_the_command_line(tmp_path, trained, capsys) -> None:
    saved = torch.load(trained, weights_only=True)
    saved["args"] |= {"env_id": "mettagrid", "env_config": "antigravity:fly", "wandb": True}
    torch.save(saved, tmp_path / "checkpoint.pt")
    with pytest.raises(SystemExit) as error:
        parse("--resume", str(tmp_path))
    assert error.value.code == 2 and "--env-config antigravity:fly" in capsys.readouterr().err
    args = parse("--resume", str(tmp_path), "--env-config", "mine:config")
    assert args.env_config == "mine:config" and not args.wandb
    with pytest.raises(SystemExit) as error:
        parse("--resume", str(trained), "--preset", "original")
    said = capsys.readouterr().err
    assert error.value.code == 2 and said.count("\n") == 1 and "--preset original" in said


# ------------------------------------------------------------------------------------------------ workers


@pytest.mark.parametrize(
    "number, said", [(signal.SIGKILL, "died with exit code -9"), (signal.SIGSTOP, "has not answe")]
)
def test_a_lost_worker_is_named_and_the_checkpoint_saved(tmp_path, number, said) -> None:
    flags = "--vec-env subproc --num-workers 2 --async-factor 2 --num-envs 8 --num-minibatches 4 "
    flags += f"--device cpu --threads 1 --log-every 0.01 --run-name run --run-dir {tmp_path}"
    command = [sys.executable, "ppo_metta.py", *flags.split()]
    streams = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    with subprocess.Popen(command, cwd=ROOT, env=os.environ | {"PYTHONUNBUFFERED": "1"}, **streams) as process:
        while "SPS" not in process.stdout.readline():
            pass
        tasks = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        workers = [pid for pid in tasks if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        os.kill(int(workers[1]), number)
        struck = time.monotonic()
        err = process.communicate(timeout=60)[1]
    assert process.returncode == 2 and f"worker 1 (process {workers[1]}) {said}" in err, err
    assert time.monotonic() - struck < 20 and "Traceback" not in err
    assert (tmp_path / "run" / "checkpoint.pt").exists()
    time.sleep(0.5)
    assert not [pid for pid in workers if Path(f"/proc/{pid}").exists()]


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_workers_end_when_the_trainer_is_killed(tmp_path) -> None:
    flags = "--vec-env subproc --num-workers 2 --num-envs 8 --num-minibatches 4 --device cpu --threads 1 "
    flags += f"--log-every 0.1 --run-dir {tmp_path}"
    command = [sys.executable, "ppo_metta.py", *flags.split()]
    streams = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    with subprocess.Popen(command, cwd=ROOT, env=os.environ | {"PYTHONUNBUFFERED": "1"}, **streams) as process:
        while "SPS" not in process.stdout.readline():
            pass
        tasks = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        workers = [pid for pid in tasks if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        process.kill()
        err = process.communicate(timeout=30)[1]  # when no worker holds the pipe any more
    assert len(workers) == 2 and not err


def test_every_group_of_every_worker_plays_games_of_its_own(monkeypatch) -> None:
    monkeypatch.delitem(ppo_metta.VARIANTS["MettaArena-v0"], "max_steps")
    args = fill_defaults(Args(**QUICK | dict(vec_env="subproc")), CPU)
    envs = ppo_metta.make_envs(args, CPU, global_step=0, obs_shape=(6, 200, 3))
    try:
        parts = envs.obs.unflatten(0, (4, 6))
        assert (parts[:, :, :, 0] < 255).any(2).all()
        assert not any(torch.equal(parts[i], parts[j]) for i in range(4) for j in range(i))
    finally:
        envs.close()
    assert not any(process.is_alive() for process in envs.processes)


def test_no_two_streams_have_one_seed(monkeypatch) -> None:
    seeds = set()
    for rank in range(3):
        monkeypatch.setattr(ppo_metta, "RANK", rank)
        streams = np.ndindex(5, 3, 4, 2)
        seeds |= {ppo_metta.games_seed(*map(int, which)) for which in streams}
    assert len(seeds) == 3 * 5 * 3 * 4 * 2 and max(seeds) < ppo_metta.EVAL_SEED


def test_a_resumed_run_does_not_begin_its_streams_again(run, monkeypatch) -> None:
    asked, seed_of = [], ppo_metta.games_seed
    monkeypatch.setattr(ppo_metta, "games_seed", lambda *a: asked.append((a, seed_of(*a))) or asked[-1][1])
    flags = dict(vec_env="subproc", num_workers=0)
    _, folder = run(**flags)
    for rollouts in (4, 5):
        del asked[:]
        run(resume=str(folder), total_timesteps=384 * (rollouts + 1), **flags)
        assert {given for given, _ in asked} == {(1, 384 * rollouts)} and asked[0][1] != 1


def test_a_worker_that_fails_says_why_in_one_line(run, monkeypatch) -> None:
    pipe, child_pipe = torch.multiprocessing.Pipe()
    args = fill_defaults(Args(**QUICK), CPU)
    no_games = functools.partial(make_games, args, 0, CPU)  # that raises
    worker_main(no_games, [1], child_pipe, [torch.zeros(1)] * 7)
    lost = object.__new__(SubprocEnvs)
    lost.pipes, lost.processes = [pipe], [types.SimpleNamespace(pid=1)]
    monkeypatch.setattr(ppo_metta, "make_envs", lambda *_: lost.wait(1))
    with pytest.raises(WorkerLost, match=r"worker 0 \(process 1\) failed: ValueError num_games 0"):
        run()


# ------------------------------------------------------------------------------------------------ several ranks


ONE_ROLLOUT = """
import sys, torch, ppo_metta
from ppo_metta import RANK, RANKS, Args, main
torch.manual_seed(0)
steps, lanes = 16, 8
obs = torch.randint(0, 25, (steps + 1, lanes, 200, 3), dtype=torch.uint8)
reward, truncated = torch.randn(steps, lanes), torch.arange(steps)[:, None] == torch.randint(30, (lanes,))
action = torch.randint(25, (steps, lanes))
mine = slice(RANK * lanes // RANKS, (RANK + 1) * lanes // RANKS)
class Recorded(ppo_metta.LocalEnvs):
    def __init__(self, args, device, *more):
        super().__init__(ppo_metta.make_games(args, 1, device, 0))
        self.obs, self.step_number = obs[0, mine].clone(), 0
    def send(self, group, action):
        t, self.step_number = self.step_number, self.step_number + 1
        cut = truncated[t, mine]
        self.results = obs[t + 1, mine], reward[t, mine], torch.zeros_like(cut), cut, obs[t, mine]
drawn = iter(range(steps))
ppo_metta.sample = lambda logits, generator: action[next(drawn), mine]
ppo_metta.make_envs = Recorded
ppo_metta.evaluate = lambda *given: {}
flags = dict(num_steps=steps, num_minibatches=1, bptt_horizon=8, update_epochs=50, total_timesteps=steps * lanes,
             num_envs=2, agents=4, hidden_size=16, video=False, threads=1, run_dir=sys.argv[1], run_name=sys.argv[2],
             device="cpu", anneal_lr=False, log_every=1e-3)
main(Args(**flags))
"""


def run_ranks(ranks: int, *command: str) -> subprocess.CompletedProcess:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--master-port", "0"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    kinds = dict(cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)
    return subprocess.run([*launcher, "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", *command], **kinds)


def test_two_ranks_learn_what_one_learns(tmp_path) -> None:
    (tmp_path / "one_rollout.py").write_text(ONE_ROLLOUT)
    for ranks in (1, 2):
        done = run_ranks(ranks, str(tmp_path / "one_rollout.py"), str(tmp_path), str(ranks))
        assert done.returncode == 0, done.stderr
    one, two = (agent_weights(tmp_path / str(ranks)) for ranks in (1, 2))
    for ranks in ("1", "2"):
        saved = checkpoint(tmp_path / ranks)
        assert (saved["global_step"], saved["optimizer.0.step"].item()) == (128, 50)
    torch.testing.assert_close(one, two, atol=1e-5, rtol=0)
    for tag in ("losses/approx_kl", "losses/pg_loss", "losses/v_loss", "losses/entropy"):
        np.testing.assert_allclose(scalars(tmp_path / "1")[tag], scalars(tmp_path / "2")[tag], atol=1e-4)


def test_ranks_play_different_games_and_one_writes(tmp_path) -> None:
    flags = "--num-envs 4 --num-steps 16 --num-minibatches 4 --bptt-horizon 8 --hidden-size 16 --eval-episodes 6 "
    flags += f"--total-timesteps 3072 --run-dir {tmp_path} --run-name run --no-video --log-every 0.001 --device cpu"
    done = run_ranks(2, "ppo_metta.py", *flags.split())
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("eval_score_mean") == 1 and "on 2 x cpu" in done.stdout
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["env_steps"] == 3072 and summary["replay_ratio"] == pytest.approx(1)
    saved = checkpoint(tmp_path / "run")
    assert (saved["global_step"], saved["optimizer.0.step"].item()) == (3072, 32)


def test_ranks_play_games_of_their_own_with_noise_of_their_own(tmp_path) -> None:
    before = """
first_obs, seeds = [], set()
learner_init, sample = script.Learner.__init__, script.sample

def keep_obs(self, args, game, obs, *given):
    first_obs.append(obs.clone())
    learner_init(self, args, game, obs, *given)

def keep_seed(logits, generator):
    seeds.add(generator.initial_seed())
    return sample(logits, generator)

script.Learner.__init__, script.sample = keep_obs, keep_seed
"""
    after = """
    stdout = sys.stdout
    seeds.discard(script.EVAL_SEED)
    torch.save([first_obs[0], sorted(seeds)], f"rank{script.RANK}.pt")
"""
    ranks = start_ranks(tmp_path, "ppo_metta", small_flags("ppo_metta", total_timesteps=1536), before, after.strip())
    said = [rank.communicate(timeout=100) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], said
    (obs, seeds), (other_obs, other_seeds) = (torch.load(tmp_path / f"rank{rank}.pt") for rank in range(2))
    assert not torch.equal(obs, other_obs)
    assert len(seeds) == len(other_seeds) == 1 and seeds != other_seeds


OVERFLOW = """
optimizers, scalers, losses = [], [], []
ppo_loss, adam, scaler_of = script.ppo_loss, torch.optim.Adam, torch.amp.GradScaler

def keep_optimizer(*given, **more):
    optimizers.append(adam(*given, **more))
    return optimizers[-1]

def keep_scaler(*given, **more):
    scalers.append(scaler_of(*given, **more))
    return scalers[-1]

def overflowing(*given):
    losses.append(0)
    loss, means, ratio = ppo_loss(*given)
    return loss * (1e36 if script.RANK == 1 and len(losses) == 2 else 1), means, ratio

torch.optim.Adam, torch.amp.GradScaler = keep_optimizer, keep_scaler
script.ppo_loss, script.evaluate = overflowing, lambda *given: {}
script.pick_precision = lambda *given: torch.float16
"""
SAVE_OVERFLOW = """
    steps = optimizers[0].state_dict()["state"][0]["step"].item()
    torch.save([networks[0].state_dict(), scalers[0].get_scale(), steps, len(losses)], f"rank{script.RANK}.pt")
"""


def test_all_ranks_skip_an_update_that_overflows_on_one(tmp_path) -> None:
    """With gradient scaling as --fp16 has it on CUDA: what one rank steps with and another does not would be NaN."""
    flags = small_flags("ppo_metta", num_envs=4, num_steps=8, num_minibatches=2, total_timesteps=4 * 6 * 8 * 3)
    flags["rnn"] = "none"
    ranks = start_ranks(tmp_path, "ppo_metta", flags, KEEP_NETWORK + OVERFLOW, SAVE_OVERFLOW.strip())
    said = [rank.communicate(timeout=100) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], said
    (weights, scale, steps, updates), other = (torch.load(tmp_path / f"rank{rank}.pt") for rank in range(2))
    assert all(value.isfinite().all() for value in weights.values())
    assert all(torch.equal(value, other[0][name]) for name, value in weights.items())
    assert (updates, steps, scale) == (6, 5, 2**15) == (other[3], other[2], other[1])


# ------------------------------------------------------------------------------------------------ switches


def test_bf16_moves_the_weights_as_fp32_does(run, monkeypatch) -> None:
    first = agent_weights(run(run_name="first", update_epochs=0)[1])
    exact = agent_weights(run(run_name="exact")[1]) - first
    monkeypatch.setattr(ppo_metta, "pick_precision", lambda *_: torch.bfloat16)
    summary, folder = run(run_name="half")
    half = agent_weights(folder) - first
    assert summary["precision"] == "bfloat16" and not torch.equal(half, exact)
    assert exact.norm() > 0.1 and (half - exact).norm() < 0.5 * exact.norm()


@pytest.mark.skipif(shutil.which("g++") is None and shutil.which("clang++") is None, reason="needs a C++ compiler")
def test_the_loop_compiles_nothing_that_the_warm_up_has_not(run, monkeypatch) -> None:
    """Also nothing backward, which PyTorch compiles at its first use."""
    counts, write = [], SummaryWriter.add_scalar

    def compilations() -> tuple[int, int]:
        counters = torch._dynamo.utils.counters
        return counters["stats"]["unique_graphs"], counters["inductor"]["fxgraph_cache_miss"] + (
            counters["inductor"]["fxgraph_cache_hit"] + counters["inductor"]["fxgraph_cache_bypass"]
        )

    def counting(writer, tag, *given):
        if tag in ("perf/warmup_s", "charts/SPS"):
            counts.append(compilations())
        return write(writer, tag, *given)

    monkeypatch.setattr(SummaryWriter, "add_scalar", counting)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    run(compile=True, rnn="mingru", log_every=1e9)
    assert len(counts) == 2 and counts[0][0] > 0 and counts[0][1] > 0
    assert counts[0] == counts[1]


def heads(summary: dict, folder: Path) -> list[float]:
    return checkpoint(folder)["agent.heads.bias"].tolist()


FLAGS = {  # another value than QUICK's, and where it shows
    "seed": (2, heads),
    "total_timesteps": (768, lambda s, f: s["env_steps"]),
    "run_name": ("other", lambda s, f: f.name),
    "env_id": ("MettaNavigation-v0", lambda s, f: checkpoint(f)["episode_start"].shape),
    "instances": (2, lambda s, f: checkpoint(f)["episode_start"].shape),
    "size": (30, lambda s, f: checkpoint(f)["envs.grid"].shape),
    "agents": (12, lambda s, f: checkpoint(f)["episode_start"].shape),
    "num_envs": (8, lambda s, f: checkpoint(f)["episode_start"].shape),
    "network": ("box-cnn", lambda s, f: "agent.encoder.conv1.weight" in checkpoint(f)),
    "rnn": ("none", lambda s, f: checkpoint(f)["agent.hidden.weight"].shape),
    "hidden_size": (24, lambda s, f: checkpoint(f)["agent.heads.weight"].shape),
    "learning_rate": (1e-2, heads),
    "muon_learning_rate": (0.1, heads),
    "anneal_lr": (False, lambda s, f: round(scalars(f)["losses/learning_rate"][-1], 6)),
    "num_steps": (32, lambda s, f: checkpoint(f)["agent.encoder.bias"].tolist()),
    "num_minibatches": (2, heads),
    "bptt_horizon": (4, heads),
    "update_epochs": (2, lambda s, f: s["replay_ratio"]),
    "gamma": (0.5, heads),
    "gae_lambda": (0.5, heads),
    "rho_clip": (0.5, heads),
    "c_clip": (0.5, heads),
    "norm_adv": (False, heads),
    "clip_coef": (1e-4, heads),
    "vf_clip_coef": (1e-4, heads),
    "ent_coef": (0.5, heads),
    "end_ent_coef": (0.005, heads),
    "vf_coef": (5.0, heads),
    "max_grad_norm": (1e-3, heads),
    "prio_alpha": (0.7, heads),
    "threads": (2, lambda s, f: s["device"]),
    "log_every": (1e9, lambda s, f: len(scalars(f)["charts/SPS"])),
    "eval_every": (0.005, lambda s, f: len(scalars(f)["eval/score_mean"]) > 1),
    "eval_episodes": (12, lambda s, f: s["eval_episodes"]),
    "video": (True, lambda s, f: (f / "videos" / "metta.gif").exists()),
}
ELSEWHERE = {  # have a test of their own
    "easy", "rewards", "reward_scale", "device", "max_seconds", "run_dir", "preset", "env_config", "vec_env",
    "num_workers", "async_factor",
    "prio_beta0", "bf16", "fp16", "tf32", "compile", "compile_mode", "cudagraph",
    "sdpa", "checkpoint_every", "resume", "evaluate", "render", "wandb",
}  # fmt: skip


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> tuple[dict, Path]:
    folder = tmp_path_factory.mktemp("plain")
    with pytest.MonkeyPatch.context() as patch:
        for rules in ppo_metta.VARIANTS.values():
            patch.setitem(rules, "max_steps", 100)
        return main(Args(**QUICK | {"run_dir": str(folder), "run_name": "run"})), folder / "run"


def test_no_flag_is_without_a_test() -> None:
    assert {field.name for field in dataclasses.fields(Args)} == set(FLAGS) | ELSEWHERE


@pytest.mark.parametrize("flag", FLAGS)
def test_every_flag_changes_what_it_says(run, plain, flag) -> None:
    value, look = FLAGS[flag]
    assert look(*run(**{flag: value})) != look(*plain)


METTA_SIZES = {"original": (64, 16_384, 512, 64, 1), "ultra-fast": (512, 262_144, 32_768, 32, 8)}


@pytest.mark.parametrize("preset", METTA_SIZES)
def test_presets_have_mettas_sizes_and_flags_override_them(preset) -> None:
    args = fill_defaults(parse("--device", "cpu", "--preset", preset), CPU)
    assert args.env_id == "MettaNavigation-v0" and args.preset == preset and args.learning_rate == 3e-4
    batch_size = args.num_envs * 4 * args.num_steps
    sizes = batch_size, batch_size // args.num_minibatches, args.bptt_horizon, args.async_factor
    assert (args.num_envs, *sizes) == METTA_SIZES[preset]
    assert parse(f"--preset={preset}", "--learning-rate", "1").learning_rate == 1


def sizes_fit(args: Args, agents: int, max_steps: int) -> bool:
    segments = args.num_steps // args.bptt_horizon * agents * args.num_envs
    return args.num_steps <= max_steps and segments % args.num_minibatches == 0


@pytest.mark.parametrize("game, agents, max_steps", [("MettaArena-v0", 6, 1000), ("mettagrid", 8, 256)])
@pytest.mark.parametrize("preset", PRESETS)
def test_presets_work_with_any_game(preset, game, agents, max_steps) -> None:
    args = fill_defaults(parse("--device", "cpu", "--preset", preset, "--env-id", game), CPU)
    assert sizes_fit(args, agents, max_steps)


@pytest.mark.parametrize(
    "cores, flags, workers, threads",
    [
        (1, {}, 1, 1), (2, {}, 1, 1), (12, {}, 4, 8), (48, {}, 16, 8), (96, {}, 32, 8), (7, {"num_envs": 30}, 3, 4),
        (8, {"num_envs": 2}, 1, 7), (32, {"num_envs": 512, "async_factor": 8}, 16, 8),
        (64, {"num_workers": 1}, 1, 8), (2, {"num_workers": 2}, 2, 1), (4, {"vec_env": "device"}, 2, 4),
    ],
)  # fmt: skip
def test_workers_divide_the_games_and_leave_cores_on_any_machine(monkeypatch, cores, flags, workers, threads) -> None:
    monkeypatch.setattr(ppo_metta, "CORES", cores)
    args = fill_defaults(Args(**{"device": "cpu", "vec_env": "subproc"} | flags), CPU)
    assert (args.num_workers, args.threads) == (workers, threads)


@pytest.mark.parametrize("flags, workers, threads", [({}, 2, 4), ({"vec_env": "subproc"}, 2, 2)])
def test_ranks_share_the_cores_of_a_machine(monkeypatch, flags, workers, threads) -> None:
    monkeypatch.setattr(ppo_metta, "CORES", 16)
    monkeypatch.setattr(ppo_metta, "LOCAL_RANKS", 4)
    args = fill_defaults(Args(device="cpu", **flags), CPU)
    assert (args.num_workers, args.threads) == (workers, threads)
    monkeypatch.setattr(ppo_metta, "LOCAL_RANKS", 99)
    assert fill_defaults(Args(device="cpu"), CPU).threads == 1


def test_defaults_follow_the_game_unless_a_flag_or_preset_says_otherwise() -> None:
    games = "MettaArena-v0", "MettaNavigation-v0", "mettagrid"
    chosen = [fill_defaults(Args(device="cpu", env_id=game), CPU) for game in games]
    assert [args.gamma for args in chosen] == [0.97, 0.95, 0.9]
    assert [args.muon_learning_rate for args in chosen] == [0.02, 0.02, 0.0]
    assert [args.num_envs for args in chosen] == [128, 128, 32]
    assert [args.num_minibatches for args in chosen] == [16, 16, 16]
    assert [args.vec_env for args in chosen] == ["device", "device", "subproc"]
    assert [args.ent_coef for args in chosen] == [0.005, 0.005, 0.001]
    assert fill_defaults(Args(device="cpu", env_id="mettagrid", num_envs=64), CPU).num_envs == 64
    assert fill_defaults(dataclasses.replace(PRESETS["original"], env_id="mettagrid"), CPU).gamma == 0.99


@pytest.mark.parametrize("game, agents, games, parts", [
    ("MettaArena-v0", 6, 8192, 32), ("MettaNavigation-v0", 4, 8192, 32), ("mettagrid", 8, 32, 16)
])  # fmt: skip
def test_a_gpu_gets_thousands_of_games(game, agents, games, parts) -> None:
    args = fill_defaults(Args(env_id=game), torch.device("cuda"))
    assert (args.num_envs, args.num_minibatches) == (games, parts)
    assert sizes_fit(args, agents, 256)


def test_rules_reach_the_games() -> None:
    args = fill_defaults(Args(**(QUICK | dict(easy=False, rewards="hearts"))), CPU)
    easy, hard = (make_games(args, 1, CPU, 0).rules for args in (fill_defaults(Args(device="cpu"), CPU), args))
    assert (easy.easy, easy.rewards, hard.easy, hard.rewards) == (True, "work", False, "hearts")
    assert fill_defaults(Args(env_id="MettaNavigation-v0"), CPU).rewards == "shaped"


# ------------------------------------------------------------------------------------------------ the real game


@pytest.mark.games
@REAL
def test_the_real_mettagrid_learns_in_workers_and_here(run, capsys) -> None:
    flags = dict(env_id="mettagrid", num_envs=4)
    for workers in (0, 2):
        flags |= {"run_name": str(workers), "video": True}  # of which there is no picture
        summary, folder = run(num_workers=workers, **flags | {"total_timesteps": 32 * 16 * 20})
        assert summary["env_steps"] == 32 * 16 * 20 and checkpoint(folder)["agent.heads.bias"].shape == (6,)
        assert scalars(folder)["charts/score"][-1] > 0 and max(scalars(folder)["charts/episodic_length"]) <= 256
        assert not (folder / "videos").exists()
    capsys.readouterr()
    with pytest.raises(SystemExit):
        run(env_config="nowhere:nothing", **flags)
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "nowhere" in said


@pytest.mark.games
@REAL
def test_episodes_of_the_real_mettagrid_are_counted_once() -> None:
    games = make_games(fill_defaults(Args(**QUICK | {"env_id": "mettagrid"}), CPU), 2, CPU, 0)
    envs = LocalEnvs(games)
    returns, length, expected = torch.zeros(16), torch.zeros(16), torch.zeros(4)
    torch.manual_seed(0)
    for _ in range(600):
        _, reward, terminated, truncated, info = games.step(torch.randint(games.num_actions, (16,)))
        returns, length = returns + reward, length + 1
        for lane in (terminated | truncated).nonzero().flatten().tolist():
            assert info["hearts"][lane] == returns[lane]
            expected += torch.tensor([1, returns[lane], length[lane], returns[lane]])
            returns[lane] = length[lane] = 0
    assert torch.equal(envs.read_finished(), expected) and expected[0] > 16 and expected[1] > 0
    assert not envs.read_finished().any()


@pytest.mark.games
@REAL
@pytest.mark.parametrize("what", ["no limit", "raises", "wants more", "is none"])
def test_a_configuration_that_cannot_work_is_one_line(monkeypatch, capsys, what) -> None:
    from envs.metta.real import mines_and_altars

    def broken():
        raise KeyError("ore")

    configs = {"raises": broken, "wants more": lambda agents: None, "is none": 3}
    config = configs.get(what, lambda: mines_and_altars(max_steps=0))
    monkeypatch.setitem(sys.modules, "strange", types.SimpleNamespace(config=config))
    with pytest.raises(SystemExit) as error:
        main(Args(**QUICK | {"env_id": "mettagrid", "env_config": "strange:config"}))
    said = capsys.readouterr().err
    assert error.value.code == 2 and said.count("\n") == 1 and "--env-config strange:config" in said, said
    assert what != "no limit" or "has no step limit" in said


def test_the_real_mettagrid_missing_is_one_line(run, monkeypatch, capsys) -> None:
    monkeypatch.setitem(sys.modules, "mettagrid.config.action_config", None)
    monkeypatch.delitem(sys.modules, "envs.metta.real", raising=False)
    with pytest.raises(SystemExit):
        run(env_id="mettagrid", num_workers=0)
    assert "pip install mettagrid" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------ what a run leaves


def test_a_picture_that_cannot_be_written_is_one_line(run, capsys, monkeypatch) -> None:
    monkeypatch.setattr(ppo_metta, "GIF_FRAMES", 3)
    summary, folder = run(video=True)
    with Image.open(folder / "videos" / "metta.gif") as gif:
        assert gif.n_frames == 3
    shutil.rmtree(folder / "videos")
    (folder / "videos").write_text("a file")
    summary = main(Args(**QUICK | {"evaluate": str(folder), "video": True}))
    assert "--video: " in capsys.readouterr().out and "eval_score_mean" in summary


@pytest.mark.parametrize("vec_env, number", [("device", signal.SIGINT), ("subproc", signal.SIGTERM)])
def test_a_signal_to_all_processes_saves_and_exits_0(tmp_path, vec_env, number) -> None:
    command = [sys.executable, "ppo_metta.py", "--run-dir", str(tmp_path), "--run-name", "run", "--device", "cpu"]
    command += f"--num-envs 16 --num-minibatches 2 --threads 1 --vec-env {vec_env}".split()
    command += "--num-workers 2 --log-every 0.1".split()
    streams = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
    with subprocess.Popen(command, cwd=ROOT, env=os.environ | {"PYTHONUNBUFFERED": "1"}, **streams) as process:
        while "SPS" not in process.stdout.readline():
            pass
        os.killpg(process.pid, number)  # as terminals and batch systems do it: workers too
        out, err = process.communicate(timeout=60)
    assert process.returncode == 0 and not err, err
    assert f"--resume {tmp_path / 'run'}" in out and (tmp_path / "run/checkpoint.pt").exists()


# ------------------------------------------------------------------------------------------------ bad input


@pytest.mark.parametrize(
    "flags, expected",
    [
        (dict(num_steps=72, bptt_horizon=32), "--bptt-horizon 32: must divide --num-steps 72"),
        (dict(num_steps=128), "--num-steps 128: must be at most 100"),
        (dict(num_minibatches=100), "--num-minibatches 100: must divide the 48 segments"),
        (dict(sdpa="math"), "--sdpa math: needs --network token-attention"),
    ],
)
def test_sizes_that_do_not_divide_are_one_line(run, tmp_path, capsys, flags, expected) -> None:
    with pytest.raises(SystemExit):
        run(**flags)
    said = capsys.readouterr().err
    assert expected in said and said.count("\n") == 1, said
    assert not list(tmp_path.iterdir())


# ------------------------------------------------------------------------------------------------ learning


@pytest.mark.slow
def test_it_learns_in_a_minute(tmp_path, monkeypatch) -> None:
    """A random player visits 0.85 altars of an episode of the whole length, this one nearly 3 after 300,000 steps."""
    monkeypatch.delitem(ppo_metta.VARIANTS["MettaNavigation-v0"], "max_steps")
    quick = dict(total_timesteps=300_000, eval_episodes=64, eval_every=0, video=False, device="cpu", threads=1)
    assert main(Args(env_id="MettaNavigation-v0", run_dir=str(tmp_path), **quick))["eval_score_mean"] > 1.7


# ------------------------------------------------------------------------------------------------ CUDA


GPU_FLAGS = [
    {}, {"bf16": True}, {"fp16": True}, {"tf32": True}, {"rnn": "none"}, {"network": "box-cnn"}, {"prio_alpha": 0.6},
    {"network": "token-attention", "bf16": True},
]  # fmt: skip


@pytest.mark.gpu
@CUDA
@pytest.mark.parametrize("flags", GPU_FLAGS, ids=str)
def test_graphs_learn_what_eager_learns(run, monkeypatch, flags) -> None:
    """Also catches numbers frozen at capture. A step size or entropy bonus that stays, or no value loss, moves the
    weights 15 to 74 % of their way elsewhere with these flags and heads; half precision is compared with itself."""
    init = Agent.__init__

    def with_large_heads(self, *given):
        init(self, *given)
        torch.nn.init.orthogonal_(self.heads.weight, 2)

    monkeypatch.setattr(Agent, "__init__", with_large_heads)
    flags = dict(device="cuda", total_timesteps=384 * 8, ent_coef=5.0, end_ent_coef=0.0, vf_coef=1.0) | flags
    first = agent_weights(run(run_name="first", update_epochs=0, **flags)[1])
    summary, graphs = run(run_name="graphs", cudagraph=True, **flags)
    assert summary["cudagraph"]
    eager = run(run_name="eager", **flags)[1]
    assert torch.equal(checkpoint(eager)["generator"], checkpoint(graphs)["generator"])
    moved, difference = agent_weights(eager) - first, agent_weights(graphs) - agent_weights(eager)
    assert moved.norm() > 0.3 and difference.norm() < 0.05 * moved.norm()


@pytest.mark.gpu
@CUDA
def test_workers_feed_a_gpu(run) -> None:
    """Pinned memory, copies that nothing waits for: with weights that do not move the policy ratio stays 1."""
    flags = dict(vec_env="subproc", num_workers=2, async_factor=2, ent_coef=0.0)
    flags |= dict(learning_rate=1e-12, muon_learning_rate=0.0)
    read = scalars(run(device="cuda", **flags)[1])
    assert len(read["charts/SPS"]) == 4 and max(map(abs, read["losses/approx_kl"])) < 1e-5

"""The Metta trainer: its maths, its switches, what it leaves behind, and what it refuses."""

import importlib.util
import math
import os
import shutil
import signal
import subprocess
import sys
from contextlib import closing
from copy import deepcopy
from pathlib import Path

import numpy as np
import pytest
import torch
from rank_runs import descendants, small_flags, start_ranks, wait_until_gone
from small_runs import COMMON, ROOT, SMALL, Script, checkpoint, command_line, load, refusal, scalars, weights_of
from torch.utils.tensorboard import SummaryWriter

import ppo_metta
from envs.metta.batch import MettaBatch
from envs.metta.rules import ACTIONS, FEATURES, ROTATE
from envs.workers import LocalEnvs
from ppo_metta import PRESETS, Agent, Args, Learner, fill_defaults, gae, games_seed, main, make_games, ppo_loss, sample

CPU = torch.device("cpu")
CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
REAL = pytest.mark.skipif(importlib.util.find_spec("mettagrid") is None, reason="needs mettagrid")
NETWORKS = ["token-bag", "box-cnn", "token-attention"]
QUICK = COMMON | SMALL["ppo_metta"] | dict(log_every=1e-3, num_workers=2)
parse = Script("ppo_metta", ROOT / "runs").parse


@pytest.fixture(scope="module", autouse=True)
def short_episodes():
    """Arenas of 100 steps instead of 1,000."""
    with pytest.MonkeyPatch.context() as patch:
        for rules in ppo_metta.VARIANTS.values():
            patch.setitem(rules, "max_steps", 100)
        yield


@pytest.fixture
def run(tmp_path):
    """Train for a moment; gives the summary and the run folder."""

    def start(**flags) -> tuple[dict, Path]:
        flags = QUICK | {"run_dir": str(tmp_path), "run_name": "run"} | flags
        return main(Args(**flags)), tmp_path / flags["run_name"]

    return start


@pytest.fixture
def large_heads(monkeypatch) -> None:
    """With those of a new agent all actions are nearly as likely, whatever it sees and remembers."""
    init = Agent.__init__

    def with_large_heads(self, *given):
        init(self, *given)
        torch.nn.init.orthogonal_(self.heads.weight, 2)

    monkeypatch.setattr(Agent, "__init__", with_large_heads)


@pytest.fixture
def recorded(monkeypatch) -> dict:
    """The learner, its first weights, and what `gae` was first asked."""
    seen = {}
    gae_of = ppo_metta.gae
    learner_of = ppo_metta.Learner

    def recording_gae(*given):
        parts = [part.clone() for part in given[:4]]
        seen.setdefault("gae", dict(zip(["reward", "value", "done", "ratio"], parts)))
        return gae_of(*given)

    def recording_learner(*given):
        seen["rollout"] = learner_of(*given)
        seen["weights"] = deepcopy(seen["rollout"].agent.state_dict())
        return seen["rollout"]

    monkeypatch.setattr(ppo_metta, "gae", recording_gae)
    monkeypatch.setattr(ppo_metta, "Learner", recording_learner)
    return seen


@pytest.fixture
def drawn(monkeypatch) -> list[list[int]]:
    """The segments of every update."""
    segments = []
    index = Learner.index

    def record(learner):
        segments.append(learner.segments.tolist())
        return index(learner)

    monkeypatch.setattr(Learner, "index", record)
    return segments


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


def slow_gae(reward, value, done, ratio, gamma, lam, rho, c) -> np.ndarray:
    advantage = np.zeros_like(reward)
    carried = 0
    for t in reversed(range(len(reward))):
        following = np.where(done[t], 0, value[t + 1])
        error = reward[t] + gamma * following - value[t]
        advantage[t] = np.minimum(ratio[t], rho) * error
        advantage[t] += gamma * lam * np.minimum(ratio[t], c) * np.where(done[t], 0, carried)
        carried = advantage[t]
    return advantage


@pytest.mark.parametrize("rho, c", [(1, 1), (1.5, 0.7), (10, 10)])
def test_advantages_against_numpy(rho: float, c: float) -> None:
    rng = np.random.default_rng(0)
    reward = rng.normal(size=(12, 5))
    value = rng.normal(size=(13, 5))
    done = rng.random((12, 5)) < 0.1
    ratio = rng.uniform(0.3, 2, size=(12, 5))
    x = [reward, value, done, ratio]
    got = gae(*map(torch.tensor, x), 0.9, 0.8, rho, c)
    np.testing.assert_allclose(got, slow_gae(*x, 0.9, 0.8, rho, c))


def test_loss_against_numpy() -> None:
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(6, 7, 5))
    action = rng.integers(5, size=(6, 7))
    value, old_logprob, old_value, advantage, returns = rng.normal(scale=0.5, size=(5, 6, 7))
    old_logprob -= 1.5
    given = [logits, value, action, old_logprob, old_value, advantage, returns]
    loss, means, ratios = ppo_loss(*map(torch.tensor, given), 0.2, 0.1, 0.5, torch.tensor(0.01))

    probability = np.exp(logits) / np.exp(logits).sum(2, keepdims=True)
    ratio = np.take_along_axis(probability, action[..., None], 2)[..., 0] / np.exp(old_logprob)
    pg_loss = -np.minimum(ratio * advantage, ratio.clip(0.8, 1.2) * advantage).mean()
    near = old_value + (value - old_value).clip(-0.1, 0.1)
    v_loss = np.maximum((value - returns) ** 2, (near - returns) ** 2).mean() / 2
    entropy = -(probability * np.log(probability)).sum(2).mean()
    kl = (ratio - 1 - np.log(ratio)).mean()
    np.testing.assert_allclose(ratios, ratio)
    np.testing.assert_allclose(means, [pg_loss, v_loss, entropy, kl])
    assert loss.item() == pytest.approx(pg_loss - 0.01 * entropy + 0.5 * v_loss)


def test_sampled_actions_follow_the_logits() -> None:
    logits = torch.tensor([0.0, 1.0, -1.0, 2.0])
    generator = torch.Generator().manual_seed(0)
    actions = sample(logits.expand(200_000, 4), generator)
    share = actions.bincount(minlength=4) / 200_000
    torch.testing.assert_close(share, logits.softmax(0), atol=5e-3, rtol=0)


# ------------------------------------------------------------------------------------------------ networks


def test_a_bag_of_tokens_is_a_linear_layer_on_the_box() -> None:
    encoder = agent_of().encoder
    obs = tokens()
    obs[3] = 255  # an agent that sees nothing
    obs[0, 5, 0], obs[0, 5, 2] = 254, 7  # a token of no place, as the real game has them
    heading = encoder.view.heading(obs)
    outs, grads = [], []
    for layer in (encoder.sparse, encoder.dense):
        encoder.zero_grad()
        out = layer(obs, heading)
        out.square().sum().backward()
        outs.append(out.detach())
        grads.append(encoder.table.grad.clone())
    torch.testing.assert_close(*outs)
    torch.testing.assert_close(*grads, atol=1e-4, rtol=1e-4)


def test_evaluation_needs_no_kernel_of_training() -> None:
    agent = agent_of(network="token-attention", sdpa="cudnn")
    other = agent_of(network="token-attention")
    obs = tokens()
    act, act_as_usual = (ppo_metta.make_player(each, len(obs), CPU) for each in (agent, other))
    assert torch.equal(act(obs), act_as_usual(obs))
    with pytest.raises(RuntimeError):  # the next update uses the kernel that --sdpa names
        agent(obs[None], torch.zeros(len(obs), agent.state_size), torch.zeros(1, len(obs), dtype=torch.bool))


@pytest.mark.parametrize("network", NETWORKS)
def test_networks_ignore_padding_and_order_but_not_places(network: str) -> None:
    agent = agent_of(network=network)
    obs = tokens()
    heading = agent.view.heading(obs)
    out = agent.encoder(obs, heading)
    longer = torch.cat([obs, torch.full_like(obs[:1], 255)])  # with an agent that has no tokens
    longer_out = agent.encoder(longer, agent.view.heading(longer))
    torch.testing.assert_close(longer_out[:-1], out, atol=1e-4, rtol=1e-4)
    shuffled = obs.clone()
    for row in shuffled:
        n = int((row[:, 0] < 255).sum())
        row[:n] = row[torch.randperm(n)]
    torch.testing.assert_close(agent.encoder(shuffled, heading), out, atol=1e-4, rtol=1e-4)
    obs[0, 4, 0] ^= 1
    assert not torch.allclose(agent.encoder(obs, heading)[0], out[0], atol=1e-6)


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


@pytest.mark.parametrize("network", NETWORKS)
def test_what_an_agent_does_and_expects_turns_with_the_world(network: str) -> None:
    agent = agent_of(network=network, rnn="none")
    obs = tokens(8)
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_memory_against_slow_code_also_in_half_precision(dtype: torch.dtype) -> None:
    """The memory itself is never in half precision."""
    x = torch.randn(6, 5, 32).to(dtype)
    state = torch.rand(5, 16)
    reset = torch.rand(6, 5) < 0.2
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype != torch.float32):
        states, last = ppo_metta.mingru(x, state, reset)

    gate, candidate = np.split(x.double().numpy(), 2, axis=2)
    expected = [state.numpy()]
    for t in range(6):
        z = 1 / (1 + np.exp(-gate[t]))
        new = np.where(candidate[t] >= 0, candidate[t] + 0.5, 1 / (1 + np.exp(-candidate[t])))
        before = np.where(reset[t, :, None], 0, expected[t])
        expected.append((1 - z) * before + z * new)
    np.testing.assert_allclose(states, expected[1:], atol=1e-5)
    assert states.dtype == torch.float32 and torch.equal(last, states[-1])


@pytest.mark.parametrize("rnn", ["gru", "lstm"])
def test_memory_is_that_of_pytorch_and_starts_with_each_episode(rnn: str) -> None:
    cell = agent_of(rnn=rnn).cell
    reference = getattr(torch.nn, rnn.upper())(cell.input_size, cell.hidden_size)
    for name, weight in cell.named_parameters():
        getattr(reference, f"{name}_l0").data.copy_(weight)
    x = torch.randn(6, 1, cell.input_size)
    state = torch.randn(1, cell.hidden_size * (2 if rnn == "lstm" else 1))  # of the episode before
    start = torch.tensor([True, False, True, False, False, False])[:, None]
    outputs, last = ppo_metta.unroll(cell, x, state, start)
    torch.testing.assert_close(outputs, torch.cat([reference(x[:2])[0], reference(x[2:])[0]]))
    _, halfway = ppo_metta.unroll(cell, x[:4], state, start[:4])
    torch.testing.assert_close(ppo_metta.unroll(cell, x[4:], halfway, start[4:])[1], last)


# ------------------------------------------------------------------------------------------------ learning

WEIGHTS_STAY = dict(learning_rate=1e-12, muon_learning_rate=0.0)


def test_a_rollout_against_a_loop_with_one_lane_at_a_time_in_mind(run, recorded) -> None:
    """Values, log-probabilities and bootstraps, which come from what an agent saw last and remembered then."""
    run(num_steps=96, num_minibatches=12, total_timesteps=24 * 96, reward_scale=2.0, **WEIGHTS_STAY)
    rollout, asked = recorded["rollout"], recorded["gae"]
    agent = rollout.agent
    envs = MettaBatch(4, seed=1, easy=True, rewards="work", max_steps=100)
    obs = envs.reset().clone()
    state = torch.zeros(24, agent.state_size)
    never = torch.zeros(1, 24, dtype=torch.bool)
    cut = 0
    with torch.no_grad():
        for t in range(96):
            logits, value, state = agent(obs[None], state, never)
            logprob = logits[0].log_softmax(1).gather(1, rollout.action[t, :, None])[:, 0]
            torch.testing.assert_close(rollout.logprob[t], logprob)
            torch.testing.assert_close(asked["value"][t], value[0])
            assert torch.equal(rollout.obs[t], obs)
            obs, reward, _, truncated, info = envs.step(rollout.action[t])
            final_value = agent(info["final_obs"][None], state, never)[1][0]
            assert torch.equal(asked["done"][t], truncated)
            torch.testing.assert_close(asked["reward"][t], 2 * reward + 0.97 * truncated * final_value)
            cut += int(truncated.sum())
            state = state * ~truncated[:, None]
            obs = obs.clone()
        torch.testing.assert_close(asked["value"][96], agent(obs[None], state, never)[1][0])
    assert cut >= 12 and (asked["ratio"] == 1).all()


@pytest.mark.parametrize(
    "flags",
    [{"rnn": "mingru"}, {"rnn": "none"}, {"rnn": "gru"}, {"rnn": "lstm"}, {"network": "box-cnn"},
     {"network": "token-attention"},
     pytest.param({"vec_env": "subproc"}, marks=pytest.mark.slow), {"vec_env": "subproc", "num_workers": 0}],
    ids=str,
)  # fmt: skip
def test_learning_sees_what_acting_saw(run, large_heads, flags) -> None:
    """With weights that do not move the policy ratio stays 1, whatever memory was carried or lost on the way."""
    _, folder = run(num_steps=32, total_timesteps=24 * 32 * 4, **WEIGHTS_STAY, **flags)
    kl = scalars(folder)["losses/approx_kl"]
    assert len(kl) == 4 and max(map(abs, kl)) < 1e-7


def test_minibatches_take_every_segment_once_an_epoch(run, drawn) -> None:
    run(update_epochs=2, total_timesteps=384)
    assert len(drawn) == 2 * 4
    for epoch in (drawn[:4], drawn[4:]):
        assert sorted(sum(epoch, [])) == list(range(48))


@pytest.mark.parametrize("bptt_horizon", [8, 16])
def test_advantages_are_those_of_now(run, monkeypatch, bptt_horizon) -> None:
    """An update changes values and ratios. Where no later one of the epoch can see them, they may be older."""
    index_of = Learner.index

    def comparing(b):
        index = index_of(b)
        coefs = b.args.gamma, b.args.gae_lambda, b.args.rho_clip, b.args.c_clip
        now = gae(b.reward, b.value, b.done, b.ratio, *coefs)
        assert torch.equal(now.flatten()[index], b.advantage.flatten()[index])
        return index

    monkeypatch.setattr(Learner, "index", comparing)
    run(update_epochs=2, bptt_horizon=bptt_horizon)


def test_without_epochs_the_agents_only_play(run) -> None:
    summary, folder = run(update_epochs=0)
    assert summary["updates_per_second"] == summary["replay_ratio"] == 0
    assert load(folder)["optimizer"] == {}


def slow_muon(update: torch.Tensor) -> torch.Tensor:
    """Its singular values brought near 1 by five rounds of a polynomial, times the root of its sides' ratio."""
    u, s, v = torch.linalg.svd(update.double(), full_matrices=False)
    s = s / s.norm()
    for _ in range(5):
        s = 3.4445 * s - 4.775 * s**3 + 2.0315 * s**5
    rows, columns = update.shape
    return (u * s @ v).float() * max(1, rows / columns) ** 0.5


def test_a_whole_rollout_is_learned_as_by_independent_code(run, recorded, drawn, large_heads, monkeypatch) -> None:
    """Every update of a rollout: V-trace with the latest values and ratios, losses, schedules, clipping, Adam, Muon."""
    monkeypatch.setattr(ppo_metta, "catch_signals", lambda: [signal.SIGTERM])  # it ends after the first rollout
    flags = dict(learning_rate=0.02, muon_learning_rate=1e-3, update_epochs=2)
    flags |= dict(clip_coef=0.1, vf_clip_coef=0.2, vf_coef=0.7, ent_coef=0.3, end_ent_coef=0.1)
    flags |= dict(gamma=0.9, gae_lambda=0.8, rho_clip=0.9, c_clip=0.8)
    # Clipped this much, gradients are small next to Adam's epsilon; otherwise their scale would not matter.
    run(max_grad_norm=1e-3, **flags)
    assert len(drawn) == 8

    rollout = recorded["rollout"]
    asked = {name: part.numpy() for name, part in recorded["gae"].items()}
    agent = rollout.agent
    trained = deepcopy(agent.state_dict())
    agent.load_state_dict(recorded["weights"])
    weights = list(agent.parameters())
    moments = [(torch.zeros_like(w), torch.zeros_like(w)) for w in weights]
    left = 0.5 * (1 + math.cos(math.pi / 4))  # of the step sizes
    ent_coef = 0.3 - 0.2 / 4
    for number, segments in enumerate(drawn):
        advantage = slow_gae(*asked.values(), 0.9, 0.8, 0.9, 0.8)
        lane = torch.tensor(segments) % 24
        first_step = torch.tensor(segments) // 24 * 8
        at = (first_step + torch.arange(8)[:, None], lane.expand(8, -1))

        adv = torch.tensor(advantage)[at]
        old_value = torch.tensor(asked["value"])[at]
        returns = adv + old_value
        adv = adv - adv.mean()
        adv = adv / (adv.square().mean().sqrt() + 1e-8)
        state = rollout.state[first_step // 8, lane]
        logits, value, _ = agent(rollout.obs[at], state, rollout.episode_start[at])
        old = rollout.action[at], rollout.logprob[at], old_value
        loss, _, ratio = ppo_loss(logits, value, *old, adv, returns, 0.1, 0.2, 0.7, ent_coef)
        grads = torch.autograd.grad(loss, weights)
        norm = torch.stack([grad.norm() for grad in grads]).norm().item()
        for weight, grad, (mean, square) in zip(weights, grads, moments):
            grad = grad * min(1, 1e-3 / (norm + 1e-6))
            if weight is agent.hidden.weight:
                mean.lerp_(grad, 0.05)
                weight.data -= 1e-3 * left * slow_muon(0.05 * grad + 0.95 * mean)
                continue
            mean.lerp_(grad, 0.1)
            square.lerp_(grad**2, 0.001)
            unbiased = (square / (1 - 0.999 ** (number + 1))).sqrt() + 1e-5
            weight.data -= 0.02 * left * mean / (1 - 0.9 ** (number + 1)) / unbiased
        asked["value"][at] = value.detach()
        asked["ratio"][at] = ratio
    for name, value in agent.state_dict().items():
        moved = (trained[name] - recorded["weights"][name]).norm()
        assert moved > 1e-3, name
        assert (value - trained[name]).norm() < 2e-3 * moved, name


def test_values_that_are_not_finite_are_not_stored(run, monkeypatch, capsys) -> None:
    """They would reach the advantages of every later update of the rollout, also of those that float16 skips."""
    updates = []
    loss_of = Learner.minibatch_loss

    def overflowing(*given):
        updates.append(0)
        results = loss_of(*given)
        return [math.inf * part for part in results] if len(updates) == 2 else results

    def checked(reward, value, done, ratio, *coefs):
        assert value.isfinite().all() and ratio.isfinite().all()
        return gae(reward, value, done, ratio, *coefs)

    monkeypatch.setattr(Learner, "minibatch_loss", overflowing)
    monkeypatch.setattr(ppo_metta, "gae", checked)
    assert "the loss is nan" in refusal(capsys, run, total_timesteps=384)
    assert len(updates) == 4


class StagedGames:
    """Four agents whose episodes end at different steps, and again after that. An observation is the step."""

    def __init__(self, args, num_games, device, seed, evaluation=False) -> None:
        assert seed == ppo_metta.EVAL_SEED
        self.lengths = [3, 5, 2, 7] if evaluation else [1, 1, 1, 1]  # only then are first episodes whole
        self.clock = 0
        self.actions = []
        self.obs = torch.zeros(4, 1, 3, dtype=torch.uint8)

    def step(self, action: torch.Tensor):
        self.clock += 1
        assert self.clock <= 7  # when the last episode ends
        self.actions.append(action)
        ends = torch.tensor([self.clock % length == 0 for length in self.lengths])
        terminated = ends & torch.tensor([True, False, True, False])
        hearts = torch.arange(4) + 10 * self.clock
        return self.obs + self.clock, torch.zeros(4), terminated, ends & ~terminated, {"hearts": hearts}


def test_evaluation_counts_the_first_whole_episode_of_every_agent(monkeypatch) -> None:
    played, memories = [], []

    def make_games(*given, **more) -> StagedGames:
        played.append(StagedGames(*given, **more))
        return played[-1]

    def agent(obs, state, reset):
        assert not reset.any() and (obs == played[-1].clock).all()
        memories.append(state[3].item())
        return torch.tensor([0.0, 1.0]).expand(1, 4, 2), torch.zeros(1, 4), state + 1

    agent.state_size = 1
    agent.eval = agent.train = lambda: None
    monkeypatch.setattr(ppo_metta, "make_games", make_games)
    scores = ppo_metta.evaluate(agent, Args(), 4, CPU)
    assert list(scores.values()) == [np.mean([30, 51, 22, 73]), 73, 4]
    assert memories == list(range(7))
    drawn = torch.cat(played[-1].actions).float().mean().item()
    assert 0.5 < drawn < 0.95  # drawn from the policy, not its likeliest action


def test_whole_episodes_are_evaluated_and_half_ones_are_trained_on() -> None:
    args = fill_defaults(Args(**QUICK), CPU)
    assert make_games(args, 8, CPU, 0).limit.min() < 100
    assert (make_games(args, 8, CPU, 0, evaluation=True).limit == 100).all()


@pytest.mark.slow
def test_it_learns_in_a_minute(tmp_path, monkeypatch) -> None:
    """A random player visits 0.85 altars of an episode of the whole length, this one nearly 3 after 300,000 steps."""
    monkeypatch.delitem(ppo_metta.VARIANTS["MettaNavigation-v0"], "max_steps")
    quick = dict(total_timesteps=300_000, eval_episodes=64, eval_every=0, video=False, device="cpu", threads=1)
    assert main(Args(env_id="MettaNavigation-v0", run_dir=str(tmp_path), **quick))["eval_score_mean"] > 1.7


# ------------------------------------------------------------------------------------------------ resume


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """The checkpoint of a short run."""
    folder = tmp_path_factory.mktemp("trained")
    main(Args(**QUICK | {"run_dir": str(folder), "run_name": "run", "total_timesteps": 384}))
    return folder / "run" / "checkpoint.pt"


# What only this script saves. What all of them do is in test_promises.py.
@pytest.mark.parametrize("name", ["muon", "envs.clock", "state", "generator"])
def test_a_checkpoint_of_other_shapes_is_refused_before_anything_changes(tmp_path, trained, capsys, name) -> None:
    saved = part = torch.load(trained, weights_only=True)
    *where, name = name.split(".")
    for key in where:
        part = part[key]
    part[name] = torch.cat([part[name], part[name]])
    (tmp_path / "args.json").write_text("{}")
    torch.save(saved, tmp_path / "checkpoint.pt")
    assert f"--resume {tmp_path}" in refusal(capsys, main, Args(**QUICK | {"resume": str(tmp_path)}))
    assert (tmp_path / "args.json").read_text() == "{}"
    assert len(list(tmp_path.iterdir())) == 2


def test_a_run_goes_on_with_its_games_in_workers(tmp_path, trained, capsys) -> None:
    """Those have no state that a checkpoint could hold; nor has a run that played there."""
    shutil.copy(trained, tmp_path)
    for rollouts, where in ((2, dict(vec_env="subproc", num_workers=0)), (3, {})):
        main(Args(**QUICK | {"resume": str(tmp_path), "total_timesteps": 384 * rollouts} | where))
        assert load(tmp_path)["global_step"] == 384 * rollouts
        assert "new games" in capsys.readouterr().out


def test_flags_that_name_code_or_are_not_the_runs_own_stay_on_the_command_line(tmp_path, trained, capsys) -> None:
    saved = torch.load(trained, weights_only=True)
    saved["args"] |= {"env_id": "mettagrid", "env_config": "antigravity:fly"}
    torch.save(saved, tmp_path / "checkpoint.pt")
    resume = ["--resume", str(tmp_path)]
    assert "--env-config antigravity:fly" in refusal(capsys, parse, *resume)
    assert parse(*resume, "--env-config", "mine:config").env_config == "mine:config"
    assert "--preset original" in refusal(capsys, parse, "--resume", str(trained), "--preset", "original")


# ------------------------------------------------------------------------------------------------ workers


@pytest.fixture
def busy_run(tmp_path):
    """A run with two worker processes that has logged once, and the processes."""
    if sys.platform != "linux":
        pytest.skip("looks into /proc")
    flags = dict(vec_env="subproc", num_workers=2, num_envs=8, num_minibatches=4)
    flags |= dict(run_dir=str(tmp_path), run_name="run")
    command = [sys.executable, "-u", "ppo_metta.py", *command_line(COMMON | flags)]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    with subprocess.Popen(command, cwd=ROOT, start_new_session=True, **pipes) as run:
        while "SPS" not in (line := run.stdout.readline()):
            assert line, run.stderr.read()
        children = descendants(run.pid)
        yield run, [pid for pid in children if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        run.kill()
    wait_until_gone(children)


@pytest.mark.slow
@pytest.mark.parametrize("number, said", [(signal.SIGKILL, "died with exit code -9"), (signal.SIGSTOP, "not answered")])
def test_a_lost_worker_is_named_and_the_checkpoint_saved(tmp_path, busy_run, number, said) -> None:
    run, workers = busy_run
    os.kill(workers[1], number)
    _, err = run.communicate(timeout=60)
    assert run.returncode == 2 and err.count("\n") == 1 and f"(process {workers[1]}) " in err and said in err, err
    assert (tmp_path / "run" / "checkpoint.pt").exists()


@pytest.mark.slow
def test_workers_end_when_the_trainer_is_killed(busy_run) -> None:
    run, workers = busy_run
    assert len(workers) == 2
    run.kill()
    _, err = run.communicate(timeout=60)  # when no worker holds the pipe any more
    assert not err


@pytest.mark.slow
def test_a_signal_to_all_processes_saves_and_exits_0(tmp_path, busy_run) -> None:
    """As terminals and batch systems send it: to workers too."""
    run, _ = busy_run
    os.killpg(run.pid, signal.SIGTERM)
    out, err = run.communicate(timeout=60)
    assert (run.returncode, err) == (0, "")
    assert f"--resume {tmp_path / 'run'}" in out
    assert (tmp_path / "run" / "checkpoint.pt").exists()


def test_every_group_of_every_worker_plays_games_of_its_own(monkeypatch) -> None:
    monkeypatch.delitem(ppo_metta.VARIANTS["MettaArena-v0"], "max_steps")
    args = fill_defaults(Args(**QUICK | dict(vec_env="subproc")), CPU)
    with closing(ppo_metta.make_envs(args, CPU, global_step=0, obs_shape=(6, 200, 3))) as envs:
        parts = envs.obs.unflatten(0, (4, 6))
        assert (parts[:, :, :, 0] < 255).any(2).all()
        assert not any(torch.equal(parts[i], parts[j]) for i in range(4) for j in range(i))


def test_no_two_streams_have_one_seed(monkeypatch) -> None:
    seeds = set()
    for rank in range(3):
        monkeypatch.setattr(ppo_metta, "RANK", rank)
        seeds |= {ppo_metta.games_seed(*map(int, stream)) for stream in np.ndindex(5, 3, 4, 2)}
    assert len(seeds) == 3 * 5 * 3 * 4 * 2 and max(seeds) < ppo_metta.EVAL_SEED


def test_neither_a_resumed_run_nor_another_rank_repeats_games_or_noise(run, recorded, monkeypatch) -> None:
    seeds = []
    monkeypatch.setattr(ppo_metta, "games_seed", lambda *stream: seeds.append(games_seed(*stream)) or seeds[-1])
    flags = dict(vec_env="subproc", num_workers=0)
    _, folder = run(total_timesteps=384, **flags)
    first = recorded["rollout"].obs[0]
    run(total_timesteps=768, resume=str(folder), **flags)
    resumed = recorded["rollout"].obs[0]
    monkeypatch.setattr(ppo_metta, "RANK", 1)
    run(total_timesteps=384, **flags)
    assert len(set(seeds)) == 3 and not resumed.equal(first) and not recorded["rollout"].obs[0].equal(first)


# ------------------------------------------------------------------------------------------------ several ranks


def train_ranks(folder: Path, flags: dict, before: str, after: str = "", ranks: int = 2) -> None:
    folder.mkdir(exist_ok=True)
    started = start_ranks(folder, "ppo_metta", small_flags("ppo_metta", rnn="none", **flags), before, after, ranks)
    said = [rank.communicate(timeout=240) for rank in started]
    assert [rank.returncode for rank in started] == [0] * ranks, said


ONE_ROLLOUT = """
# Of two games with four agents each: a rank has its part of them.
torch.manual_seed(0)
obs = torch.randint(25, (17, 8, 200, 3), dtype=torch.uint8)
reward = torch.randn(16, 8)
truncated = torch.arange(16)[:, None] == torch.randint(30, (8,))
action = torch.randint(25, (16, 8))
mine = slice(script.RANK * 8 // script.RANKS, (script.RANK + 1) * 8 // script.RANKS)

class Recorded(script.LocalEnvs):
    def __init__(self, args, device, *more):
        super().__init__(script.make_games(args, 1, device, 0))
        self.obs = obs[0, mine].clone()
        self.steps = iter(range(16))

    def send(self, group, action):
        t = next(self.steps)
        cut = truncated[t, mine]
        self.results = obs[t + 1, mine], reward[t, mine], torch.zeros_like(cut), cut, obs[t, mine]

steps = iter(range(16))
script.sample = lambda logits, generator: action[next(steps), mine]
script.make_envs = Recorded
script.evaluate = lambda *given: {}
"""


@pytest.mark.slow
def test_two_ranks_learn_what_one_learns(tmp_path) -> None:
    flags = dict(num_envs=2, agents=4, num_minibatches=1, update_epochs=50, total_timesteps=128, anneal_lr=False)
    for ranks in (1, 2):
        train_ranks(tmp_path / str(ranks), flags, ONE_ROLLOUT, ranks=ranks)
    one, two = (tmp_path / ranks / "runs" / "run" for ranks in "12")
    for folder in (one, two):
        saved = checkpoint(folder)
        assert (saved["global_step"], saved["optimizer.0.step"].item()) == (128, 50)
    torch.testing.assert_close(weights_of(one), weights_of(two), atol=1e-5, rtol=0)
    for name in ppo_metta.LOSSES:
        np.testing.assert_allclose(scalars(one)[f"losses/{name}"], scalars(two)[f"losses/{name}"], atol=1e-4)


OVERFLOW = """
losses = []
learners = []
ppo_loss = script.ppo_loss
init = script.Learner.__init__

def keep(self, *given):
    init(self, *given)
    learners.append(self)

def overflowing(*given):
    losses.append(0)
    loss, means, ratio = ppo_loss(*given)
    return loss * (1e36 if script.RANK == 1 and len(losses) == 2 else 1), means, ratio

def save_learner():
    (learner,) = learners
    steps = learner.adam.state_dict()["state"][0]["step"].item()
    counts = [len(losses), steps, learner.scaler.get_scale()]
    torch.save([learner.agent.state_dict(), counts], f"rank{script.RANK}.pt")

script.Learner.__init__ = keep
script.ppo_loss = overflowing
script.evaluate = lambda *given: {}
script.pick_precision = lambda *given: torch.float16
"""


@pytest.mark.slow
def test_all_ranks_skip_an_update_that_overflows_on_one(tmp_path) -> None:
    """With gradient scaling as --fp16 has it on CUDA: what one rank steps with and another does not would be NaN."""
    flags = dict(num_steps=8, num_minibatches=2, total_timesteps=4 * 6 * 8 * 3)
    train_ranks(tmp_path, flags, OVERFLOW, "save_learner()")
    (weights, counts), (other_weights, other_counts) = (torch.load(tmp_path / f"rank{rank}.pt") for rank in range(2))
    assert all(value.isfinite().all() for value in weights.values())
    assert all(torch.equal(value, other_weights[name]) for name, value in weights.items())
    assert counts == other_counts == [6, 5, 2**15]


# ------------------------------------------------------------------------------------------------ switches


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None and shutil.which("clang++") is None, reason="needs a C++ compiler")
def test_the_loop_compiles_nothing_that_the_warm_up_has_not(run, monkeypatch) -> None:
    """Also nothing backward, which PyTorch compiles at its first use."""
    counts = []
    write = SummaryWriter.add_scalar
    counters = torch._dynamo.utils.counters

    def counting(writer, tag, *given):
        if tag in ("perf/warmup_s", "charts/SPS"):
            counts.append(deepcopy([counters["stats"], counters["inductor"]]))
        return write(writer, tag, *given)

    monkeypatch.setattr(SummaryWriter, "add_scalar", counting)
    torch._dynamo.reset()
    counters.clear()
    run(compile=True, log_every=1e9, num_steps=4, bptt_horizon=4, num_minibatches=2, total_timesteps=24 * 4 * 2)
    before, after = counts
    assert before == after and all(before)


def test_flags_change_what_is_learned(run) -> None:
    _, plain = run(run_name="plain")
    for name, value in {"seed": 2, "norm_adv": False, "anneal_lr": False}.items():
        _, folder = run(run_name=name, **{name: value})
        assert not torch.equal(weights_of(folder), weights_of(plain)), name
    assert len(set(scalars(folder)["losses/learning_rate"])) == 1


def test_flags_of_the_game_reach_it() -> None:
    rules = dict(instances=2, size=30, agents=3, easy=False, rewards="hearts")
    args = fill_defaults(Args(env_id="MettaNavigation-v0", **rules), CPU)
    games = make_games(args, 5, CPU, 0)
    assert {name: getattr(games.rules, name) for name in rules} == rules


@pytest.mark.parametrize("game, agents, max_steps", [("MettaArena-v0", 6, 1000), ("mettagrid", 8, 256)])
@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_presets_work_with_any_game(device, preset, game, agents, max_steps) -> None:
    args = fill_defaults(parse("--preset", preset, "--env-id", game), torch.device(device))
    segments = args.num_steps // args.bptt_horizon * agents * args.num_envs
    assert args.num_steps <= max_steps and segments % args.num_minibatches == 0


SHARES = [  # cores, ranks of this machine, flags, and what each rank gets: workers, threads
    (1, 1, {}, 1, 1),
    (96, 1, {}, 32, 8),
    (7, 1, {"num_envs": 30}, 3, 4),
    (2, 1, {"num_workers": 2}, 2, 1),
    (4, 1, {"vec_env": "device"}, 2, 4),
    (16, 4, {}, 2, 2),
    (16, 4, {"vec_env": "device"}, 2, 4),
    (16, 99, {"vec_env": "device"}, 1, 1),
]


@pytest.mark.parametrize("cores, ranks, flags, workers, threads", SHARES)
def test_workers_and_ranks_share_the_cores(monkeypatch, cores, ranks, flags, workers, threads) -> None:
    monkeypatch.setattr(ppo_metta, "CORES", cores)
    monkeypatch.setattr(ppo_metta, "LOCAL_RANKS", ranks)
    args = fill_defaults(Args(**{"vec_env": "subproc"} | flags), CPU)
    assert (args.num_workers, args.threads) == (workers, threads)


def test_defaults_follow_the_game_unless_a_flag_or_preset_says_otherwise() -> None:
    chosen = [fill_defaults(Args(env_id=game), CPU) for game in ppo_metta.COLUMNS]
    assert [args.gamma for args in chosen] == [0.97, 0.95, 0.97, 0.9]
    assert [args.vec_env for args in chosen] == ["device", "device", "device", "subproc"]
    assert [args.rewards for args in chosen] == ["work", "shaped", "work", "shaped"]
    assert fill_defaults(Args(env_id="mettagrid", gamma=0.5), CPU).gamma == 0.5
    args = parse("--preset=original", "--env-id=mettagrid", "--learning-rate=1")
    assert fill_defaults(args, CPU).gamma == 0.99
    assert (args.learning_rate, args.bptt_horizon) == (1, 64)


def test_a_kernel_that_cannot_be_is_refused_before_there_is_a_run_folder(run, tmp_path, capsys) -> None:
    assert "--sdpa math: needs --network" in refusal(capsys, run, sdpa="math")
    assert "--sdpa cudnn: does not run" in refusal(capsys, run, sdpa="cudnn", network="token-attention")
    assert not list(tmp_path.iterdir())


# ------------------------------------------------------------------------------------------------ the real game


@pytest.mark.games
@REAL
def test_the_real_mettagrid_learns_in_workers_and_here(run, monkeypatch, capsys) -> None:
    from envs.metta import real

    steps = 32 * 16 * 20
    for workers in (0, 2):
        flags = dict(env_id="mettagrid", run_name=str(workers), num_workers=workers, video=True)
        summary, folder = run(total_timesteps=steps, **flags)
        assert summary["env_steps"] == steps
        assert checkpoint(folder)["agent.heads.bias"].shape == (6,)
        logged = scalars(folder)
        assert logged["charts/score"][-1] > 0 and max(logged["charts/episodic_length"]) <= 256
        assert not (folder / "videos").exists()  # there is no picture of it
    assert "nowhere" in refusal(capsys, run, env_id="mettagrid", env_config="nowhere:nothing")
    monkeypatch.setattr(real, "endless", real.mines_and_altars(max_steps=0), raising=False)
    assert "no step limit" in refusal(capsys, run, env_id="mettagrid", env_config="envs.metta.real:endless")


@pytest.mark.games
@REAL
def test_episodes_of_the_real_mettagrid_are_counted_once() -> None:
    games = make_games(fill_defaults(Args(**QUICK | {"env_id": "mettagrid"}), CPU), 2, CPU, 0)
    envs = LocalEnvs(games)
    returns, length, expected = torch.zeros(16), torch.zeros(16), torch.zeros(4)
    for _ in range(600):
        _, reward, terminated, truncated, info = games.step(torch.randint(games.num_actions, (16,)))
        returns += reward
        length += 1
        for lane in (terminated | truncated).nonzero().flatten().tolist():
            assert info["hearts"][lane] == returns[lane]
            expected += torch.tensor([1, returns[lane], length[lane], returns[lane]])
            returns[lane] = length[lane] = 0
    assert torch.equal(envs.read_finished(), expected)
    assert expected[0] > 16 and expected[1] > 0
    assert not envs.read_finished().any()


def test_the_real_mettagrid_missing_is_one_line(run, monkeypatch, capsys) -> None:
    monkeypatch.setitem(sys.modules, "mettagrid.config.action_config", None)
    monkeypatch.delitem(sys.modules, "envs.metta.real", raising=False)
    assert "pip install mettagrid" in refusal(capsys, run, env_id="mettagrid", num_workers=0)


# ------------------------------------------------------------------------------------------------ CUDA


GPU_FLAGS = [
    {}, {"bf16": True}, {"fp16": True}, {"tf32": True}, {"rnn": "none"}, {"network": "box-cnn"}, {"rnn": "lstm"},
    {"network": "token-attention", "bf16": True},
]  # fmt: skip


@pytest.mark.gpu
@CUDA
@pytest.mark.parametrize("flags", GPU_FLAGS, ids=str)
def test_graphs_learn_what_eager_learns(run, large_heads, flags) -> None:
    """Also catches numbers frozen at capture. A step size or entropy bonus that stays, or no value loss, moves the
    weights 15 to 74 % of their way elsewhere with these flags and heads; half precision is compared with itself."""
    flags = dict(device="cuda", total_timesteps=384 * 8, ent_coef=5.0, end_ent_coef=0.0, vf_coef=1.0) | flags
    _, first = run(run_name="first", update_epochs=0, **flags)
    _, eager = run(run_name="eager", **flags)
    summary, graphs = run(run_name="graphs", cudagraph=True, **flags)
    assert summary["cudagraph"]
    assert torch.equal(checkpoint(eager)["generator"], checkpoint(graphs)["generator"])
    moved = weights_of(eager) - weights_of(first)
    difference = weights_of(graphs) - weights_of(eager)
    assert moved.norm() > 0.3 and difference.norm() < 0.05 * moved.norm()


@pytest.mark.gpu
@CUDA
def test_workers_feed_a_gpu(run) -> None:
    """Pinned memory, copies that nothing waits for: with weights that do not move the policy ratio stays 1."""
    flags = dict(vec_env="subproc", async_factor=2, ent_coef=0.0, **WEIGHTS_STAY)
    read = scalars(run(device="cuda", **flags)[1])
    assert len(read["charts/SPS"]) == 4 and max(map(abs, read["losses/approx_kl"])) < 1e-5

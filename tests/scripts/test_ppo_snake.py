"""PPO on Snake: its advantages, its rollout, its updates, and its flags."""

import copy
import itertools
import math
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from small_runs import checkpoint, load, scalars

import ppo_snake
from envs.snake.batch import SnakeBatch
from envs.snake.rules import HEAD
from ppo_snake import Agent, Args, fill_defaults, gae, ppo_loss

CPU = torch.device("cpu")
QUICK = dict(
    device="cpu", board="6x6", num_envs=24, num_steps=5, num_minibatches=4, total_timesteps=3000, hidden_size=32,
    eval_episodes=10, eval_every=0, log_every=1e9, video=False, threads=1,
)  # fmt: skip


def agent(**flags) -> Agent:
    args = fill_defaults(Args(**(QUICK | flags)), CPU)
    return Agent(args, CPU)


def boards(n: int, steps: int = 30) -> torch.Tensor:
    """Codes (n, 6, 6) of games under way."""
    envs = SnakeBatch(n, board=(6, 6))
    obs = envs.reset()
    for _ in range(steps):
        obs = envs.step(torch.randint(4, (n,)))[0]
    return obs.clone()


# ------------------------------------------------------------------------------------------------ the algorithm


@pytest.mark.parametrize("gae_lambda", [0.0, 0.6, 1.0])
def test_advantages_against_sums_of_td_errors(gae_lambda: float) -> None:
    """Forward, game by game: the sum of (gamma * lambda)^n * TD error, up to the end of the game."""
    rng = np.random.default_rng(0)
    gamma, steps, games = 0.9, 12, 40
    value = rng.normal(size=(steps + 1, games))
    final_value = rng.normal(size=(steps, games))
    reward = rng.normal(size=(steps, games))
    ending = rng.choice(["none", "terminated", "truncated"], p=[0.8, 0.1, 0.1], size=(steps, games))
    expected = np.zeros((steps, games))
    for game in range(games):
        for start in range(steps):
            weight = 1.0
            for step in range(start, steps):
                next_value = {"none": value[step + 1, game], "terminated": 0, "truncated": final_value[step, game]}
                target = reward[step, game] + gamma * next_value[ending[step, game]]
                expected[start, game] += weight * (target - value[step, game])
                weight *= gamma * gae_lambda
                if ending[step, game] != "none":
                    break
    reward += gamma * final_value * (ending == "truncated")
    tensors = [torch.tensor(x) for x in (reward, value, ending != "none")]
    np.testing.assert_allclose(gae(*tensors, gamma, gae_lambda), expected, atol=1e-6)


def test_the_clipped_objective() -> None:
    logratio = torch.tensor([0.0, 0.5, 0.5, -0.5, -0.5])
    advantage = torch.tensor([2.0, 2.0, -2.0, 2.0, -2.0])
    up, down = math.exp(0.5), math.exp(-0.5)
    expected = [-2.0, -2 * 1.2, 2 * up, -2 * down, 2 * 0.8]  # the more pessimistic of both
    zero, action = torch.zeros(1), torch.zeros(1, dtype=torch.int64)
    for ratio, each, objective in zip(logratio, advantage, expected):
        old_logprob = torch.tensor([0.5]).log() - ratio
        loss, means = ppo_loss(torch.zeros(1, 2), zero, action, old_logprob, each[None], zero, 0.2, 0.5, zero)
        assert loss.item() == pytest.approx(objective) == means[1].item()
        assert means[4].item() == pytest.approx(ratio.exp().item() - 1 - ratio.item(), abs=1e-6)


# ------------------------------------------------------------------------------------------------ the agent


def test_moves_are_left_ahead_and_right_of_the_heading() -> None:
    network, obs = agent(), boards(60)
    orientation, _, _ = network.preprocess(obs)
    heading = obs.flatten(1).max(1).values.int() - HEAD
    left, ahead, right = network.move[orientation].unbind(1)
    is_mirrored = orientation % 2 == 1
    assert is_mirrored.any() and not is_mirrored.all()
    assert torch.equal(ahead.int(), heading)
    assert torch.equal(left.int(), torch.where(is_mirrored, heading + 1, heading - 1) % 4)
    assert torch.equal(right.int(), torch.where(is_mirrored, heading - 1, heading + 1) % 4)


# ------------------------------------------------------------------------------------------------ the loop


@pytest.fixture
def seen(monkeypatch) -> SimpleNamespace:
    """What a run stores, rollout by rollout, and what each of its updates learns from."""
    seen = SimpleNamespace(rollouts=[], batches=[], orders=[])
    gae_of, loss_of, forward, permute = ppo_snake.gae, ppo_snake.ppo_loss, Agent.forward, torch.randperm
    names = "logits value action old_logprob advantage returns".split()

    def watched_gae(reward, value, done, *numbers):
        advantage = gae_of(reward, value, done, *numbers)
        seen.rollouts.append([tensor.clone() for tensor in (reward, value, done, advantage)])
        return advantage

    def watched_forward(self, features, food_position):
        if torch.is_grad_enabled():
            seen.batches.append({"features": features.clone(), "food_position": food_position.clone()})
        return forward(self, features, food_position)

    def watched_loss(*arguments):
        seen.batches[-1].update(zip(names, [tensor.detach().clone() for tensor in arguments[:6]]))
        return loss_of(*arguments)

    def watched_randperm(n, **options):
        seen.orders.append(permute(n, **options))
        return seen.orders[-1]

    monkeypatch.setattr(ppo_snake, "gae", watched_gae)
    monkeypatch.setattr(ppo_snake, "ppo_loss", watched_loss)
    monkeypatch.setattr(Agent, "forward", watched_forward)
    monkeypatch.setattr(torch, "randperm", watched_randperm)
    monkeypatch.setattr(ppo_snake, "evaluate", lambda *_: {})
    return seen


@pytest.mark.parametrize("num_envs, num_minibatches, update_epochs", [(7, 5, 2), (24, 3, 1), (64, 16, 4)])
def test_counters_hold_for_any_width(run, seen, num_envs, num_minibatches, update_epochs) -> None:
    summary, _ = run(num_envs=num_envs, num_minibatches=num_minibatches, update_epochs=update_epochs)
    rollouts = math.ceil(3000 / (5 * num_envs))
    assert summary["env_steps"] == rollouts * 5 * num_envs
    assert summary["replay_ratio"] == pytest.approx(update_epochs)
    assert len(seen.rollouts) == rollouts
    assert len(seen.batches) == rollouts * num_minibatches * update_epochs
    assert len(seen.orders) == rollouts * update_epochs  # each epoch has a new order
    assert summary["samples_per_second"] / summary["env_steps_per_second"] == pytest.approx(update_epochs)


def test_what_is_stored_is_what_was_played(run, seen, monkeypatch) -> None:
    """Rollouts and minibatches against the games: views, probabilities, values, rewards, ends and final values."""
    played, step = [], SnakeBatch.step

    def watched_step(self, action):
        before = self.codes.clone().view(-1, 6, 6)
        result = step(self, action)
        played.append([before, action, *(tensor.clone() for tensor in (*result[1:4], result[4]["final_obs"]))])
        return result

    monkeypatch.setattr(SnakeBatch, "step", watched_step)
    monkeypatch.setattr(torch, "randperm", lambda n, **_: torch.arange(n))
    monkeypatch.setattr(ppo_snake, "Rules", partial(ppo_snake.Rules, step_limit=12))
    torch.manual_seed(4)
    network = agent()
    run(seed=4, learning_rate=1e-30, total_timesteps=24 * 40, update_epochs=1, gamma=0.9)
    assert len(seen.rollouts) == 8 and len(played) == 40
    obs, moves, reward, terminated, truncated, final_obs = (torch.cat(parts) for parts in zip(*played))
    rewards, dones, advantages = (torch.cat([one[part].flatten() for one in seen.rollouts]) for part in (0, 2, 3))
    assert terminated.any() and truncated.any()
    assert torch.equal(dones, terminated | truncated)

    def look(obs):
        orientation, features, food_position = network.preprocess(obs)
        with torch.no_grad():
            return orientation, features, food_position, *network(features, food_position)

    *_, final_value = look(final_obs)
    torch.testing.assert_close(rewards, reward + 0.9 * truncated * final_value)
    orientation, features, food_position, logits, value = look(obs)
    torch.testing.assert_close(torch.cat([one[1][:-1].flatten() for one in seen.rollouts]), value)
    for one, following in itertools.pairwise(seen.rollouts):
        torch.testing.assert_close(one[1][-1], following[1][0])

    learned = {name: torch.cat([batch[name] for batch in seen.batches]) for name in seen.batches[0]}
    assert torch.equal(learned["features"], features.flatten(1))
    assert torch.equal(learned["food_position"], food_position)
    assert torch.equal(network.move[orientation, learned["action"]], moves)
    logprob = logits.log_softmax(1).gather(1, learned["action"][:, None]).squeeze(1)
    torch.testing.assert_close(learned["old_logprob"], logprob)
    torch.testing.assert_close(learned["returns"], advantages + value)


def test_actions_are_drawn_from_the_policy_for_every_game(run, seen, monkeypatch) -> None:
    probability = torch.tensor([0.2, 0.7, 0.1])

    def forward(self, features, food_position):
        n = len(features)
        if torch.is_grad_enabled():
            seen.batches.append({})
        return self.actor.bias.sum() * 0 + probability.log().expand(n, 3), self.critic.bias.expand(n) * 1

    monkeypatch.setattr(Agent, "forward", forward)
    monkeypatch.setattr(torch, "randperm", lambda n, **_: torch.arange(n))
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", lambda *_: None)
    monkeypatch.setattr(ppo_snake, "average_gradients", lambda _: None)
    run(num_envs=200, num_minibatches=5, update_epochs=1, total_timesteps=20_000)
    drawn = torch.stack([batch["action"] for batch in seen.batches])  # by step
    counts = torch.bincount(drawn.flatten(), minlength=3) / drawn.numel()
    torch.testing.assert_close(counts, probability, atol=0.015, rtol=0)
    shares = (drawn == 1).float().mean(1)  # never all or none of the games
    assert 0.5 < shares.min() and shares.max() < 0.9


def test_whole_updates_against_a_loop(run, seen) -> None:
    """What six updates leave, from the rollouts they saw: the loss, Adam, clipping, annealing of both kinds."""
    flags = dict(learning_rate=0.02, max_grad_norm=0.05, seed=3, num_steps=10, num_minibatches=2, update_epochs=1)
    _, folder = run(**flags, total_timesteps=24 * 30, ent_coef=0.3, vf_coef=0.7, clip_coef=0.05)
    assert len(seen.batches) == 6
    torch.manual_seed(3)
    network = agent()
    weights = list(network.parameters())
    mean = [torch.zeros_like(weight) for weight in weights]
    square = [torch.zeros_like(weight) for weight in weights]
    clipped = 0
    for number, batch in enumerate(seen.batches[:], 1):
        rollout = (number - 1) // 2
        progress = rollout / 3
        index = seen.orders[rollout].split(120)[(number - 1) % 2]
        _, values, _, advantages = seen.rollouts[rollout]
        advantage = advantages.flatten()[index]
        returns = advantage + values.flatten()[index]
        advantage = (advantage - advantage.mean()) / advantage.std()
        loss = 0
        for i in range(120):
            logits, value = network(batch["features"][i : i + 1], batch["food_position"][i : i + 1])
            logprobs = logits[0].log_softmax(0)
            ratio = (logprobs[batch["action"][i]] - batch["old_logprob"][i]).exp()
            clipped += not 0.95 < ratio < 1.05
            objective = min(ratio * advantage[i], ratio.clamp(0.95, 1.05) * advantage[i])
            v_loss = (value[0] - returns[i]) ** 2
            entropy = -(logprobs.exp() * logprobs).sum()
            loss = loss + (-objective + 0.7 * v_loss - 0.3 * (1 - progress) * entropy) / 120
        grads = torch.autograd.grad(loss, weights)
        norm = sum((grad**2).sum() for grad in grads).sqrt()
        assert norm > 0.05  # or clipping would not be seen
        step_size = 0.02 * (1 - progress)
        with torch.no_grad():
            for weight, grad, m, v in zip(weights, grads, mean, square):
                grad = grad * 0.05 / norm
                m.mul_(0.9).add_(0.1 * grad)
                v.mul_(0.999).add_(0.001 * grad**2)
                root = (v / (1 - 0.999**number)).sqrt()
                weight -= step_size * m / (1 - 0.9**number) / (root + 1e-4)
    assert clipped > 5
    saved = load(folder)["agent"]
    for key, value in network.state_dict().items():
        torch.testing.assert_close(saved[key], value, atol=3e-4, rtol=3e-3)


def test_bf16_stores_and_learns_in_bf16_and_moves_every_weight(run, seen, monkeypatch) -> None:
    """One autocast context around many updates would keep the first weights."""
    networks, outputs, copies = [], [], []
    init = Agent.__init__
    monkeypatch.setattr(Agent, "__init__", lambda self, *a: networks.append(self) or init(self, *a))
    monkeypatch.setattr(ppo_snake, "pick_precision", lambda *_: torch.bfloat16)
    _, features, food_position = agent().preprocess(boards(4))
    networks.clear()

    class WatchedAdam(torch.optim.Adam):
        def step(self, *arguments):
            super().step(*arguments)
            gradients = [weight.grad for weight in self.param_groups[0]["params"]]
            assert all(gradient.dtype == torch.float32 and gradient.abs().sum() > 0 for gradient in gradients)
            with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
                outputs.append(networks[0](features, food_position)[0])
                fresh = copy.deepcopy(networks[0])  # new tensors: no cast of them can be an old one
                copies.append(fresh(features, food_position)[0])

    monkeypatch.setattr(torch.optim, "Adam", WatchedAdam)
    summary, _ = run(total_timesteps=1200, learning_rate=1e-2)
    assert summary["precision"] == "bfloat16" and len(outputs) > 20
    assert all(batch["features"].dtype == torch.bfloat16 for batch in seen.batches)
    assert not any(torch.equal(before, after) for before, after in zip(outputs[1:], outputs[2:]))
    assert all(torch.equal(*pair) for pair in zip(outputs, copies))


# ------------------------------------------------------------------------------------------------ flags


def critic(summary: dict, folder: Path) -> list[float]:
    return checkpoint(folder)["agent.critic.bias"].tolist()


FLAGS = {  # another value than QUICK's, and where it shows
    "seed": (2, critic),
    "total_timesteps": (1200, lambda s, f: s["env_steps"]),
    "run_name": ("other", lambda s, f: f.name),
    "board": ("5x7", lambda s, f: checkpoint(f)["envs.codes"].shape),
    "num_envs": (28, lambda s, f: checkpoint(f)["envs.head"].shape),
    "hidden_size": (40, lambda s, f: checkpoint(f)["agent.critic.weight"].shape),
    "learning_rate": (1e-2, critic),
    "anneal_lr": (False, lambda s, f: round(scalars(f)["losses/learning_rate"][-1], 6)),
    "num_steps": (8, lambda s, f: s["env_steps"]),
    "num_minibatches": (3, lambda s, f: round(s["updates_per_second"] / s["env_steps_per_second"], 6)),
    "update_epochs": (1, lambda s, f: s["replay_ratio"]),
    "gamma": (0.5, critic),
    "gae_lambda": (0.1, critic),
    "clip_coef": (1e-3, critic),
    "ent_coef": (0.5, critic),
    "vf_coef": (0.1, critic),
    "max_grad_norm": (1e-3, critic),
    "threads": (2, lambda s, f: s["device"]),
    "log_every": (1e-6, lambda s, f: len(scalars(f)["charts/SPS"]) > 20),
    "eval_every": (1e-6, lambda s, f: len(scalars(f)["eval/score_mean"]) > 1),
    "eval_episodes": (11, lambda s, f: s["eval_episodes"]),
    "video": (True, lambda s, f: (f / "videos" / "snake.gif").exists()),
}
ELSEWHERE = {  # are tested for all scripts
    "device", "max_seconds", "run_dir", "bf16", "fp16", "tf32", "compile", "compile_mode", "cudagraph",
    "checkpoint_every", "resume", "evaluate", "render", "wandb",
}  # fmt: skip

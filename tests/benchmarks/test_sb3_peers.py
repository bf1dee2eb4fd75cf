"""Stable-Baselines3's agents learn, with the same games, networks and losses as ours."""

import time
import types
from itertools import pairwise

import gymnasium
import pytest
import torch
from benchmark_helpers import CPU

import dqn_mario_async
import ppo_metta
from benchmarks import metta_parts, sb3_peers
from envs.snake.rules import SnakeEnv
from envs.snake.view import EgocentricView


def test_evaluations_stop_the_clock_and_become_rarer(monkeypatch) -> None:
    now = [0.0]

    class Model:
        def learn(self, steps, callback):
            while callback():
                now[0] += 0.25

    def test(model) -> float:
        now[0] += 100.0  # stops the clock
        return now[0] > 10_000

    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    seconds = [at for at, _ in sb3_peers.learning_curve(Model, test, 60, 1, 1)]
    assert seconds[:21] == [*range(21)] and 55 < seconds[-1] <= 60
    assert all(0 <= after - before - max(1, after / 20) < 0.3 for before, after in pairwise(seconds))


def test_view_and_actions_are_those_of_dqn_snake() -> None:
    env = sb3_peers.RelativeActions(SnakeEnv())
    env.reset(seed=1)
    game = env.unwrapped
    view = EgocentricView(game.rules.board, CPU)
    mirrored = set()
    for number in range(60):
        obs = torch.as_tensor(game.codes())[None]
        orientation = view.locate(obs)[1].item()
        is_mirrored = orientation % 2
        mirrored.add(is_mirrored)
        sign = -1 if is_mirrored else 1
        for action, turn in ((0, -sign), (1, 0), (2, sign)):  # left, ahead, right
            absolute = (game.heading + turn) % 4
            assert env.action(action) == absolute
            assert sb3_peers.absolute_actions(view, obs, torch.tensor([action])).item() == absolute
        _, _, terminated, _, _ = env.step(number % 3)
        if terminated:
            env.reset()
    assert mirrored == {0, 1}
    env.reset()
    flat = sb3_peers.SnakeView(env.observation_space, 0, "cpu")
    obs = torch.as_tensor(env.unwrapped.codes())[None]
    _, seen, food = flat.view.features(obs)
    features = flat(obs.float())
    assert features.shape == (1, flat.features_dim) and features[0, seen[0].numel() :].argmax() == food
    assert torch.equal(features[0, : seen[0].numel()], seen[0].flatten())
    assert sb3_peers.SnakeView(env.observation_space, 32, "cpu")(obs.float()).shape == (1, 32)


@pytest.mark.parametrize("name", sb3_peers.SNAKE_AGENTS)
def test_snake_agents_learn(name: str) -> None:
    found = sb3_peers.sb3_curve(name, 0.3, 0.1, 30, device="cpu", threads=1, seed=1, explored=100)
    assert found[0] == [0.0, 0.0] and len(found) > 1
    assert 0.1 <= found[1][0] < 10 and 0 <= found[1][1] < 30


@pytest.mark.parametrize("name", sb3_peers.MARIO_AGENTS)
def test_mario_agents_learn(name: str) -> None:
    found = sb3_peers.sb3_mario_curve(name, 0.3, 0.1, 1000, device="cpu", threads=1, seed=1, explored=100)
    assert found[0] == [0.0, 0.0] and len(found) > 1 and 0 < found[1][1] < 1100
    assert sb3_peers.sb3_mario_rate(0.2, name=name, threads=1, device="cpu")["env_steps_per_second"] > 10


def test_mario_network_is_ours_without_its_head() -> None:
    torch.manual_seed(1)
    args = dqn_mario_async.Args(dueling=False)
    ours, space = dqn_mario_async.QNetwork(args), gymnasium.spaces.Box(0, 255, (4, 84, 84), "uint8")
    theirs = sb3_peers.MarioView(space)
    theirs.trunk.load_state_dict({k: v for k, v in ours.state_dict().items() if "head" not in k})
    obs = torch.randint(256, (2, 4, 84, 84), dtype=torch.uint8)
    seen = obs.float()
    assert torch.equal(ours.head(theirs(seen)), ours(obs)) and torch.equal(seen, obs.float())


@pytest.mark.parametrize("tuned", [True, False])
def test_arena_agents_learn(tuned: bool, monkeypatch) -> None:
    args = metta_parts.metta_args
    monkeypatch.setattr(metta_parts, "metta_args", lambda flags, device: args(f"--num-envs 2 {flags}", device))
    evaluate = ppo_metta.evaluate
    monkeypatch.setattr(ppo_metta, "evaluate", lambda agent, args, episodes, device: evaluate(agent, args, 6, device))
    found = sb3_peers.sb3_arena_curve(tuned, seconds=0.5, every=0.2, goal=1, seed=1, threads=1, device="cpu")
    assert found[0] == [0.0, 0.0] and len(found) > 1 and 0.2 <= found[1][0] < 10 and 0 <= found[1][1] < 1


def test_both_arenas_are_the_same_game() -> None:
    args = metta_parts.metta_args("--num-envs 3", "cpu")
    book, batch = (sb3_peers.sb3_arena_envs(args, rule_book, CPU) for rule_book in (True, False))
    assert (book.reset() == batch.reset()).all() and book.num_envs == batch.num_envs == 18
    torch.manual_seed(0)
    cut = set()
    for _ in range(1000):
        actions = torch.randint(25, (18,)).numpy()
        found, expected = (games.step(actions) for games in (book, batch))
        for mine, theirs in zip(found[:3], expected[:3]):
            assert (mine == theirs).all() and mine.dtype == theirs.dtype
        ends = [lane for lane, info in enumerate(found[3]) if info]
        assert ends == found[2].nonzero()[0].tolist() == [lane for lane, info in enumerate(expected[3]) if info]
        for lane in ends:
            ours, other = (infos[lane]["terminal_observation"] for infos in (found[3], expected[3]))
            assert (ours == other).all() and found[3][lane]["TimeLimit.truncated"]
        cut |= set(ends)
    assert cut == set(range(18))


def test_arena_actions_are_relative_to_the_heading() -> None:
    args = metta_parts.metta_args("--num-envs 3", "cpu")
    plain, turned = (sb3_peers.sb3_arena_envs(args, False, CPU, seen_actions) for seen_actions in (False, True))
    view = sb3_peers.arena_view(args, CPU)
    head = torch.nn.Linear(1, 25)

    class Policy:
        def get_distribution(self, obs):
            logits = head(obs[:, 0, :1].float())
            return types.SimpleNamespace(distribution=types.SimpleNamespace(logits=logits))

    headings = set()
    with torch.no_grad():
        for _ in range(50):
            obs = plain.games.obs.clone()
            headings |= set(view.heading(obs).tolist())
            logits, _, _ = sb3_peers.PolicyAgent(Policy(), view)(obs[None], None, None)
            seen = torch.randint(25, (18,))
            is_taken = logits[0] == head(obs[:, 0, :1].float()).gather(1, seen[:, None])
            found, expected = turned.step(seen.numpy()), plain.step(is_taken.nonzero()[:, 1].numpy())
            assert (found[0] == expected[0]).all()
    assert headings == {0, 1, 2, 3}


@pytest.mark.parametrize("rule_book", [False, True])
def test_arena_speed_has_its_parts(rule_book) -> None:
    found = sb3_peers.sb3_arena_rate("--rnn none --num-envs 2 --hidden-size 16", rule_book, 1, 0.1, "cpu")
    parts = found["games"] + found["rollouts"] + found["learning"]
    assert parts == pytest.approx(1e6 / found["env_steps_per_second"]) and min(found.values()) > 0


def test_arena_gradients_are_ours() -> None:
    flags = "--rnn none --num-envs 2 --num-steps 8 --bptt-horizon 8 --num-minibatches 1 --hidden-size 16"
    args = metta_parts.metta_args(flags, "cpu")
    games = sb3_peers.sb3_arena_envs(args, False, CPU)
    model = sb3_peers.sb3_arena_agent(flags, games, 1, "cpu")
    ours, theirs = metta_parts.metta_network(args, ppo_metta.make_games(args, 1, CPU, 1), CPU), model.policy
    start = [float(head.weight.detach().norm()) for head in (ours.heads, theirs.action_net, theirs.value_net)]
    assert start[0] == pytest.approx((start[1] ** 2 + start[2] ** 2) ** 0.5)
    start = [float(of.hidden.weight.detach().std()) for of in (ours, theirs.features_extractor)]
    assert start[0] == pytest.approx(start[1], rel=0.2)
    ours.encoder.load_state_dict(theirs.features_extractor.encoder.state_dict())
    ours.hidden.load_state_dict(theirs.features_extractor.hidden.state_dict())
    with torch.no_grad():
        ours.heads.weight.copy_(torch.cat([theirs.action_net.weight, theirs.value_net.weight]))

    model.learn(96)  # one update, whose gradients stay
    b = model.rollout_buffer
    obs, action, logprob, advantage, value, returns = (
        torch.as_tensor(part).flatten(1).squeeze(1) if part.ndim < 3 else torch.as_tensor(part)
        for part in (b.observations, b.actions, b.log_probs, b.advantages, b.values, b.returns)
    )
    logits, new_value, _ = ours(obs[None].byte(), torch.zeros(96, 0), torch.zeros(1, 96, dtype=torch.bool))
    seen_action = ours.view.seen_action[ours.view.heading(obs.byte())]
    action = (seen_action == action.long()[:, None]).int().argmax(1)
    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    coefs = args.clip_coef, args.vf_clip_coef, args.vf_coef, args.ent_coef
    batch = [part[None] for part in (action, logprob, value, advantage, returns)]
    ppo_metta.ppo_loss(logits, new_value, *batch, *coefs)[0].backward()
    torch.nn.utils.clip_grad_norm_(ours.parameters(), args.max_grad_norm)
    grad = torch.cat([theirs.action_net.weight.grad, theirs.value_net.weight.grad])
    torch.testing.assert_close(ours.heads.weight.grad, grad, rtol=1e-3, atol=1e-5)
    grad = theirs.features_extractor.encoder.table.grad
    torch.testing.assert_close(ours.encoder.table.grad, grad, rtol=1e-3, atol=1e-5)
    assert ours.encoder.table.grad.abs().max() > 1e-3

"""Stable-Baselines3's agents learn, with the same games, networks and losses as ours."""

import pytest
import torch
from benchmark_helpers import CPU

import ppo_metta
from benchmarks import metta_parts, sb3_peers
from envs.snake.rules import SnakeEnv
from envs.snake.view import EgocentricView


def test_view_and_actions_are_those_of_dqn_snake() -> None:
    env = sb3_peers.RelativeActions(SnakeEnv())
    env.reset(seed=1)
    game = env.unwrapped
    view = EgocentricView(game.rules.board, CPU)
    mirrored = set()
    for number in range(60):
        obs = torch.as_tensor(game.codes())[None]
        is_mirrored = view.locate(obs)[1].item() % 2
        mirrored.add(is_mirrored)
        sign = -1 if is_mirrored else 1
        for action, turn in ((0, -sign), (1, 0), (2, sign)):  # left, ahead, right
            batched = sb3_peers.absolute_actions(view, obs, torch.tensor([action]))
            assert env.action(action) == batched.item() == (game.heading + turn) % 4
        _, _, terminated, _, _ = env.step(number % 3)
        if terminated:
            env.reset()
    assert mirrored == {0, 1}


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
    assert grad.abs().max() > 1e-3

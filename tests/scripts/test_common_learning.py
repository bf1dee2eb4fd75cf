"""Learning, over several scripts: exploration, targets, the target network, attention kernels, evaluation."""

import numpy as np
import pytest
import torch
from small_runs import load, refusal

from envs.snake.rules import BODY, FOOD, HEAD, MOVES, Rules, SnakeEnv

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


def toward_the_food(obs: torch.Tensor) -> torch.Tensor:
    """Moves (B,) of a player that goes straight to the food, around what is in the way of its next step."""
    moves = []
    for board in obs.numpy():
        (head,), food = np.argwhere(board >= HEAD), np.argwhere(board == FOOD)[0]
        costs = []
        for move in MOVES:
            row, column = head + move
            free = 0 <= row < len(board) and 0 <= column < len(board[0]) and board[row, column] < BODY
            costs.append(abs(row - food[0]) + abs(column - food[1]) if free else 1000)
        moves.append(int(np.argmin(costs)))
    return torch.tensor(moves)


class Player:
    greedy_move = staticmethod(toward_the_food)


@pytest.mark.parametrize("script", ["dqn_snake", "ppo_snake"], indirect=True)
@pytest.mark.parametrize("step_limit", [None, 60], ids=["none truncated", "some truncated"])
def test_evaluation_plays_every_game_once_to_its_end(script, monkeypatch, step_limit) -> None:
    """Against the rule book, with the same policy and the same food. What a later game scores does not count."""
    rules = dict(step_limit=step_limit, hunger=step_limit is None)
    monkeypatch.setattr(script.module, "Rules", lambda *board, **same: Rules(*board, **rules, **same))
    scores, ends = [], set()
    for lane in range(12):
        env = SnakeEnv(lane=lane, board=(6, 6), **rules)
        obs, done = env.reset(seed=2**31)[0], False
        while not done:
            obs, _, terminated, truncated, info = env.step(toward_the_food(torch.as_tensor(obs)[None]).item())
            done = terminated or truncated
        scores.append(info["score"])
        ends.add(terminated)
    assert len(set(scores)) > 2 and len(ends) == (1 if step_limit is None else 2)
    cpu = torch.device("cpu")
    args = script.module.fill_defaults(script.module.Args(**script.flags), cpu)
    result = script.module.evaluate(Player, args, 12, cpu)
    assert result["eval_score_mean"] == pytest.approx(np.mean(scores))
    assert result["eval_score_max"] == max(scores) and result["eval_episodes"] == 12


LEARNING = {  # steps, other flags, and more food than a random player eats
    "dqn_snake": (60_000, dict(hidden_size=128, batch_size=256), 2),
    "ppo_snake": (100_000, dict(hidden_size=128, num_minibatches=16), 4),
}


@pytest.mark.parametrize("script", LEARNING, indirect=True)
def test_it_learns(script) -> None:
    steps, flags, food = LEARNING[script.name]
    defaults = dict(device="cpu", threads=1, eval_every=0.0, video=False, eval_episodes=100, run_dir=str(script.folder))
    args = script.module.Args(total_timesteps=steps, **defaults | flags)
    assert script.module.main(args)["eval_score_mean"] > food

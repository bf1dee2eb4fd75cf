"""The Snake trainer: its maths, its switches, what it leaves behind, and what it refuses."""

import copy
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from small_runs import checkpoint, load, scalars

import dqn_snake
from dqn_snake import Args, QNetwork, ReplayBuffer, fill_defaults
from envs.snake.batch import SnakeBatch
from envs.snake.rules import BODY, FOOD, HEAD

CPU = torch.device("cpu")
CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
QUICK = dict(
    device="cpu", board="6x6", num_envs=24, batch_size=48, learning_starts=200, total_timesteps=3000, buffer_size=2000,
    hidden_size=32, eval_episodes=10, eval_every=0.0, log_every=1e9, video=False, threads=1,
)  # fmt: skip


def boards(n: int, board=(6, 6), steps=30, seed=0) -> torch.Tensor:
    """Codes (n, rows, columns) of games under way."""
    envs = SnakeBatch(n, seed=seed, board=board)
    obs = envs.reset()
    for _ in range(steps):
        obs = envs.step(torch.randint(4, (n,)))[0]
    return obs.clone()


def network(**flags) -> QNetwork:
    args = fill_defaults(Args(**(QUICK | flags)), CPU)
    return QNetwork(args, CPU)


# ------------------------------------------------------------------------------------------------ maths


def test_replay_holds_the_last_transitions_of_every_lane() -> None:
    """Random games with both endings and a ring that wraps."""
    gamma, lanes, steps, rows = 0.9, 5, 60, 16
    args = fill_defaults(Args(**(QUICK | dict(num_envs=lanes, buffer_size=rows * lanes, gamma=gamma))), CPU)
    replay, rng = ReplayBuffer(args, CPU), np.random.default_rng(1)
    history = []
    for _ in range(steps):
        obs, final_obs = (rng.integers(10, size=(lanes, 6, 6), dtype=np.uint8) for _ in range(2))
        action, reward = rng.integers(4, size=lanes), rng.normal(size=lanes).astype(np.float32)
        terminated = rng.random(lanes) < 0.15
        history.append((obs, action, reward, terminated, final_obs))
        replay.add(*(torch.as_tensor(x.copy()) for x in history[-1]))
    assert replay.size.item() == rows and replay.position.item() == steps % rows
    for step in range(steps - rows, steps):
        obs, action, reward, terminated, final_obs = history[step]
        row = step % rows
        np.testing.assert_array_equal(replay.obs[row], obs)
        np.testing.assert_array_equal(replay.action[row], action)
        np.testing.assert_array_equal(replay.reward[row], reward)
        np.testing.assert_allclose(replay.discount[row], gamma * ~terminated)
        np.testing.assert_array_equal(replay.next_obs[row], final_obs)


def test_replay_samples_only_what_it_holds() -> None:
    args = fill_defaults(Args(**(QUICK | dict(num_envs=4, buffer_size=400))), CPU)
    replay = ReplayBuffer(args, CPU)
    nothing = torch.zeros(4, 6, 6, dtype=torch.uint8)
    for step in range(3):
        ends = torch.zeros(4, dtype=torch.bool)
        replay.add(nothing, torch.zeros(4), torch.full((4,), step + 1.0), ends, nothing)
    reward = replay.sample(4000, torch.Generator().manual_seed(0))[2]
    counts = torch.bincount(reward.long(), minlength=4)
    assert counts[0] == 0 and counts[1:].min() > 1200


def test_truncation_bootstraps_and_termination_does_not(run, monkeypatch) -> None:
    monkeypatch.setitem(dqn_snake.VARIANTS["Snake-v0"], "step_limit", 4)
    _, folder = run(checkpoint_replay=True, gamma=0.5, board="4x4", total_timesteps=1920)
    saved = checkpoint(folder)
    size = saved["replay.size"].item()
    discount = saved["replay.discount"][:size]
    dies = saved["replay.reward"][:size] == -1
    goes_on = (saved["replay.next_obs"][: size - 1] == saved["replay.obs"][1:size]).flatten(2).all(2)
    is_truncated = ~goes_on & ~dies[:-1]
    assert dies.any() and (discount[dies] == 0).all()
    assert is_truncated.any() and (discount[~dies] == 0.5).all()


# ------------------------------------------------------------------------------------------------ networks


@pytest.mark.parametrize("kind", ["mlp", "attention"])
def test_turning_the_board_turns_the_values(kind: str) -> None:
    """The same position rotated by a quarter, codes and all, has the same values for the rotated actions."""
    q_network, obs = network(network=kind), boards(20)
    turned = obs.rot90(-1, (1, 2)).clone()  # clockwise: up becomes right
    for first in (BODY, HEAD):
        directed = (turned >= first) & (turned < first + 4)
        turned[directed] = (turned[directed] - first + 1) % 4 + first
    torch.testing.assert_close(q_network(turned), q_network(obs).roll(1, 1), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ["mlp", "attention"])
def test_mirroring_the_board_mirrors_the_values(kind: str) -> None:
    """Left for right, codes and all. Straight ahead and behind, food is on neither side: such boards have no twin."""
    q_network, obs = network(network=kind), boards(60)
    mirrored = obs.flip(2).clone()
    for first in (BODY, HEAD):
        for left, right in ((1, 3), (3, 1)):
            mirrored[obs.flip(2) == first + left] = first + right
    food, head = (obs == FOOD).nonzero(), (obs >= HEAD).nonzero()
    heading = (obs.flatten(1).max(1).values - HEAD) % 2
    sideways = torch.where(heading == 0, food[:, 2] != head[:, 2], food[:, 1] != head[:, 1])
    q, mirrored_q = q_network(obs[sideways]), q_network(mirrored[sideways])
    assert len(q) > 20
    torch.testing.assert_close(mirrored_q, q[:, [0, 3, 2, 1]], atol=1e-5, rtol=1e-5)


def test_attention_kernels_agree_with_attention_written_out(monkeypatch) -> None:
    def written_out(q, k, v):
        return (q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1) @ v

    obs, outputs = boards(8), []
    for sdpa in ("math", "flash", "written out"):
        torch.manual_seed(0)
        if sdpa == "written out":
            monkeypatch.setattr(dqn_snake.F, "scaled_dot_product_attention", written_out)
        with dqn_snake.sdpa_kernel(dqn_snake.SDPA_BACKENDS.get(sdpa, dqn_snake.SDPA_BACKENDS["auto"])):
            outputs.append(network(network="attention")(obs))
    for output in outputs[:2]:
        torch.testing.assert_close(output, outputs[2], atol=1e-5, rtol=1e-4)


# ------------------------------------------------------------------------------------------------ the loop


@pytest.mark.parametrize("num_envs, batch_size, replay_ratio", [(7, 32, 2.0), (24, 48, 0.5), (64, 16, 1.3)])
def test_counters_and_replay_ratio_hold_for_any_width(run, num_envs, batch_size, replay_ratio) -> None:
    summary, folder = run(num_envs=num_envs, batch_size=batch_size, replay_ratio=replay_ratio, learning_starts=0)
    steps = math.ceil(3000 / num_envs) * num_envs
    assert summary["env_steps"] == steps
    assert updates(summary, folder) == int(steps * replay_ratio / batch_size + 1e-6)


def test_exploration_is_drawn_for_every_lane(run, monkeypatch) -> None:
    actions, step = [], SnakeBatch.step
    monkeypatch.setattr(SnakeBatch, "step", lambda self, action: actions.append(action.clone()) or step(self, action))
    monkeypatch.setattr(dqn_snake.QNetwork, "forward", lambda self, obs: torch.eye(4)[torch.zeros(len(obs)).long()])
    monkeypatch.setattr(dqn_snake, "evaluate", lambda *_: {})
    run(num_envs=64, start_e=0.5, end_e=0.5, total_timesteps=6400, learning_starts=10**6)
    explored = (torch.stack(actions) != 0).float()  # 3 of 4 random actions differ from the greedy 0
    assert explored.mean().item() == pytest.approx(0.375, abs=0.03)
    assert 0.1 < explored.mean(1).min() and explored.mean(1).max() < 0.65  # never all or none of the lanes


@pytest.mark.parametrize("double", [True, False])
def test_whole_updates_against_a_loop(run, monkeypatch, double) -> None:
    """What five updates leave, from the batches they saw: the loss, Adam, clipping, annealing, the target network."""
    batches, sample = [], ReplayBuffer.sample
    monkeypatch.setattr(ReplayBuffer, "sample", lambda *a: batches.append(sample(*a)) or batches[-1])
    flags = dict(learning_rate=0.02, tau=0.3, gamma=0.9, max_grad_norm=0.05, seed=3, double=double, batch_size=40)
    steps = dict(total_timesteps=24 * 15, learning_starts=24 * 11, replay_ratio=40 / 24, start_e=1.0, end_e=1.0)
    _, folder = run(**flags, **steps)
    assert len(batches) == 5

    torch.manual_seed(3)
    online, target = network(), network()
    target.load_state_dict(online.state_dict())
    mean = [torch.zeros_like(weight) for weight in online.parameters()]
    square = [torch.zeros_like(weight) for weight in online.parameters()]
    for number, (obs, action, reward, discount, next_obs) in enumerate(batches, 1):
        assert set(discount.tolist()) <= {0.0, float(np.float32(0.9))}
        loss = 0
        for i in range(40):
            values = target(next_obs[i : i + 1])[0]
            best = (online if double else target)(next_obs[i : i + 1])[0].argmax()
            error = online(obs[i : i + 1])[0, int(action[i])] - (reward[i] + discount[i] * values[best]).detach()
            loss = loss + (error**2 / 2 if error.abs() < 1 else error.abs() - 0.5) / 40
        grads = torch.autograd.grad(loss, list(online.parameters()))
        norm = sum((grad**2).sum() for grad in grads).sqrt()
        assert norm > 0.05  # or clipping would not be seen
        step_size = 0.02 * 0.1 ** ((10 + number) / 15)
        with torch.no_grad():
            for weight, grad, m, v in zip(online.parameters(), grads, mean, square):
                grad = grad * 0.05 / norm
                m.mul_(0.9).add_(0.1 * grad)
                v.mul_(0.999).add_(0.001 * grad**2)
                root = (v / (1 - 0.999**number)).sqrt()
                weight -= step_size * m / (1 - 0.9**number) / (root + 1e-8)
            for slow, fast in zip(target.parameters(), online.parameters()):
                slow.copy_(0.7 * slow + 0.3 * fast)
    saved = load(folder)
    for expected, name in ((online, "q_network"), (target, "target_network")):
        for key, value in expected.state_dict().items():
            torch.testing.assert_close(saved[name][key], value, atol=3e-4, rtol=3e-3)


# ------------------------------------------------------------------------------------------------ switches


def test_bf16_moves_what_the_network_says_and_reaches_every_weight(run, monkeypatch) -> None:
    """One autocast context around many updates would go on with the first weights: outputs must change every time."""
    probe, said, copied, networks, gradients = boards(4), [], [], [], []
    init = QNetwork.__init__
    monkeypatch.setattr(QNetwork, "__init__", lambda self, *a: networks.append(self) or init(self, *a))
    monkeypatch.setattr(dqn_snake, "pick_precision", lambda *_: torch.bfloat16)

    class WatchedAdam(torch.optim.Adam):
        def step(self, *arguments):
            super().step(*arguments)
            gradients[:] = [weight.grad for weight in self.param_groups[0]["params"]]
            with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
                said.append(networks[0](probe))
                copied.append(copy.deepcopy(networks[0])(probe))  # new tensors: no cast of them can be an old one

    monkeypatch.setattr(torch.optim, "Adam", WatchedAdam)
    summary, _ = run(total_timesteps=1200, learning_rate=1e-2)
    assert summary["precision"] == "bfloat16" and len(said) > 20
    assert not any(torch.equal(before, after) for before, after in zip(said[1:], said[2:]))
    assert all(torch.equal(*pair) for pair in zip(said, copied))
    assert all(gradient.dtype == torch.float32 and gradient.abs().sum() > 0 for gradient in gradients)


def head(summary: dict, folder: Path) -> list[float]:
    return checkpoint(folder)["q_network.head.bias"].tolist()


def updates(summary: dict, folder: Path) -> int:
    return int(checkpoint(folder)["optimizer.state.0.step"])


FLAGS = {  # another value than QUICK's, and where it shows
    "seed": (2, head),
    "total_timesteps": (1200, lambda s, f: s["env_steps"]),
    "run_name": ("other", lambda s, f: f.name),
    "env_id": ("SnakeBlocks-v0", lambda s, f: scalars(f)["charts/episodic_return"][-1] < -100),
    "board": ("5x7", lambda s, f: checkpoint(f)["envs.codes"].shape),
    "num_envs": (25, lambda s, f: checkpoint(f)["envs.head"].shape),
    "network": ("attention", lambda s, f: s["sdpa"]),
    "hidden_size": (40, lambda s, f: checkpoint(f)["q_network.head.weight"].shape),
    "learning_rate": (1e-2, head),
    "anneal_lr": (False, lambda s, f: round(scalars(f)["losses/learning_rate"][-1], 6)),
    "buffer_size": (960, head),
    "gamma": (0.5, head),
    "double": (False, head),
    "batch_size": (96, updates),
    "replay_ratio": (1.0, updates),
    "learning_starts": (1000, updates),
    "start_e": (0.5, lambda s, f: checkpoint(f)["envs.codes"].tolist()),
    "end_e": (0.5, lambda s, f: scalars(f)["charts/epsilon"][-1]),
    "exploration_fraction": (1.0, lambda s, f: checkpoint(f)["envs.codes"].tolist()),
    "tau": (0.5, lambda s, f: checkpoint(f)["target_network.head.bias"].tolist()),
    "max_grad_norm": (1e-3, head),
    "threads": (2, lambda s, f: s["device"]),
    "log_every": (1e-6, lambda s, f: len(scalars(f)["charts/SPS"]) > 60),
    "eval_every": (1e-6, lambda s, f: len(scalars(f)["eval/score_mean"]) > 1),
    "eval_episodes": (11, lambda s, f: s["eval_episodes"]),
    "checkpoint_replay": (True, lambda s, f: "replay.obs" in checkpoint(f)),
    "video": (True, lambda s, f: (f / "videos" / "snake.gif").exists()),
}
ELSEWHERE = {  # have a test of their own
    "device", "max_seconds", "run_dir", "bf16", "fp16", "tf32", "compile", "compile_mode", "cudagraph",
    "sdpa", "checkpoint_every", "resume", "evaluate", "render", "wandb",
}  # fmt: skip


# ------------------------------------------------------------------------------------------------ CUDA


@pytest.mark.gpu
@CUDA
@pytest.mark.parametrize(
    "flags", [{}, {"bf16": True}, {"fp16": True}, {"tf32": True}, {"network": "attention", "bf16": True}], ids=str
)
def test_graphs_learn_what_eager_learns(run, flags) -> None:
    """Also catches numbers frozen at capture: epsilon and the learning rate change over the run."""
    _, eager = run(run_name="eager", **flags | {"device": "cuda"})
    summary, graphs = run(run_name="graphs", cudagraph=True, **flags | {"device": "cuda"})
    assert summary["cudagraph"]
    expected, got = checkpoint(eager), checkpoint(graphs)
    assert torch.equal(expected["generator"], got["generator"])
    for name, value in expected.items():
        if name.startswith("q_network"):
            torch.testing.assert_close(got[name], value, atol=2e-2, rtol=2e-2)

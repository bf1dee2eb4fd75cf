"""The Snake trainer: its maths, its switches, what it leaves behind, and what it refuses."""

import copy
import dataclasses
import itertools
import json
import math
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import dqn_snake
from dqn_snake import Args, QNetwork, ReplayBuffer, fill_defaults, linear_schedule, main, td_target
from envs.snake import BODY, FOOD, HEAD, MOVES
from envs.snake_batch import SnakeBatch
from envs.snake_view import EgocentricView

CPU = torch.device("cpu")
CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
ROOT = Path(__file__).parent.parent
QUICK = dict(
    device="cpu", board="6x6", num_envs=24, batch_size=48, learning_starts=200, total_timesteps=3000, buffer_size=2000,
    hidden_size=32, eval_episodes=10, eval_every=0, log_every=0.1, video=False, threads=1,
)  # fmt: skip


@pytest.fixture
def run(tmp_path):
    """Train for a moment; gives the summary and the run folder."""
    numbers = itertools.count(2)

    def start(**flags) -> tuple[dict, Path]:
        name = f"run{next(numbers)}" if (tmp_path / "run").exists() and "resume" not in flags else "run"
        flags = QUICK | {"run_dir": str(tmp_path), "run_name": name} | flags
        return main(Args(**flags)), tmp_path / (flags["run_name"] or "")

    return start


def scalars(folder: Path) -> dict[str, list[float]]:
    events = EventAccumulator(str(folder))
    events.Reload()
    return {tag: [event.value for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def load(folder: Path) -> dict:
    return torch.load(folder / "checkpoint.pt", weights_only=True)


def checkpoint(folder: Path) -> dict:
    """The checkpoint with dotted names: q_network.head.bias."""

    def flat(prefix: str, value) -> dict:
        if not isinstance(value, dict):
            return {prefix: value}
        return {name: leaf for key in value for name, leaf in flat(f"{prefix}.{key}", value[key]).items()}

    return {name[1:]: leaf for name, leaf in flat("", load(folder)).items()}


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


def test_epsilon_reaches_both_ends() -> None:
    assert linear_schedule(1, 0.05, 0.1, progress=0) == 1
    assert linear_schedule(1, 0.05, 0.1, progress=0.05) == pytest.approx(0.525)
    assert linear_schedule(1, 0.05, 0.1, progress=0.1) == linear_schedule(1, 0.05, 0.1, progress=1) == 0.05
    assert linear_schedule(1, 0.05, 0, progress=0) == 0.05


def test_td_target_is_double_and_stops_at_termination() -> None:
    rng = np.random.default_rng(0)
    reward, discount = rng.normal(size=50), rng.choice([0, 0.9], size=50)
    target, online = rng.normal(size=(50, 4)), rng.normal(size=(50, 4))
    expected = [r + d * t[np.argmax(o)] for r, d, t, o in zip(reward, discount, target, online)]
    got = td_target(*(torch.tensor(x) for x in (reward, discount, target, online)))
    np.testing.assert_allclose(got, expected)


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


def test_truncation_bootstraps_and_termination_does_not(run) -> None:
    _, folder = run(checkpoint_replay=True, gamma=0.5, board="4x4", total_timesteps=4000)
    saved = checkpoint(folder)
    dies = saved["replay.reward"] == -1
    size = saved["replay.size"].item()
    assert dies[:size].any() and (saved["replay.discount"][:size][dies[:size]] == 0).all()
    assert (saved["replay.discount"][:size][~dies[:size]] == 0.5).all()


# ------------------------------------------------------------------------------------------------ networks


@pytest.mark.parametrize("board", [(10, 10), (4, 6), (7, 5)])
def test_view_against_a_loop_over_cells(board: tuple[int, int]) -> None:
    view, obs = EgocentricView(board, CPU), boards(24, board, steps=8)
    heading, seen, food = view.features(obs)
    _, codes, place, head, _ = view.tokens(obs)
    radius = max(board) - 1
    around = [(back, right) for back in range(-radius, radius + 1) for right in range(-radius, radius + 1)]
    near = [at for at in around if max(map(abs, at)) <= view.NEAR]
    far = [at for at in around if at[0] % 3 == at[1] % 3 == 0]
    for n, grid in enumerate(obs.numpy()):
        row, column = np.argwhere(grid >= HEAD)[0]
        assert head[n] == row * board[1] + column
        ahead, right = (np.array(MOVES[(heading[n] + turn) % 4]) for turn in (0, 1))
        sees = {}
        for number, (i, j) in enumerate(around):
            at_row, at_column = (row, column) - i * ahead + j * right
            if 0 <= at_row < board[0] and 0 <= at_column < board[1]:
                code, cell = grid[at_row, at_column], at_row * board[1] + at_column
                assert place[n, cell] == number
                assert code != FOOD or food[n] == number
                direction = (int(code) - BODY - heading[n].item()) % 4
                assert codes[n, cell] == (code if code < BODY else HEAD if code >= HEAD else BODY + direction)
                toward = np.array(MOVES[code - BODY]) if BODY <= code < HEAD else np.zeros(2)
                sees[i, j] = np.array([code < BODY, toward @ ahead, toward @ right], float)
        nothing = np.zeros(3)
        blocks = [sum(sees.get((i + a, j + b), nothing) for a in (-1, 0, 1) for b in (-1, 0, 1)) / 3 for i, j in far]
        expected = np.stack([sees.get(at, nothing) for at in near] + blocks, 1)
        np.testing.assert_allclose(seen[n], expected, atol=1e-6)


@pytest.mark.parametrize("kind", ["mlp", "attention"])
def test_turning_the_board_turns_the_values(kind: str) -> None:
    """The same position rotated by a quarter, codes and all, has the same values for the rotated actions."""
    q_network, obs = network(network=kind), boards(20)
    turned = obs.rot90(-1, (1, 2)).clone()  # clockwise: up becomes right
    for first in (BODY, HEAD):
        directed = (turned >= first) & (turned < first + 4)
        turned[directed] = (turned[directed] - first + 1) % 4 + first
    torch.testing.assert_close(q_network(turned), q_network(obs).roll(1, 1), atol=1e-5, rtol=1e-5)


def test_a_reversal_is_worth_what_going_ahead_is() -> None:
    q_network, obs = network(), boards(20)
    heading = (obs.flatten(1).max(1).values - HEAD).long()[:, None]
    q = q_network(obs)
    assert torch.equal(q.gather(1, heading), q.gather(1, (heading + 2) % 4))


def test_attention_kernels_agree_with_attention_written_out(monkeypatch) -> None:
    def written_out(q, k, v):
        return (q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1) @ v

    obs, outputs = boards(8), []
    for sdpa in ("math", "flash", "written out"):
        torch.manual_seed(0)
        if sdpa == "written out":
            monkeypatch.setattr(dqn_snake.F, "scaled_dot_product_attention", written_out)
        flags = {} if sdpa == "written out" else {"sdpa": sdpa}
        outputs.append(network(network="attention", **flags)(obs))
    for output in outputs[:2]:
        torch.testing.assert_close(output, outputs[2], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", ["mlp", "attention"])
def test_networks_see_where_the_body_lies(kind: str) -> None:
    q_network, obs = network(network=kind), boards(20)
    moved = obs.clone().flatten(1)
    for cells in moved:
        body, empty = ((cells >= BODY) & (cells < HEAD)).nonzero()[0], (cells == 0).nonzero()[0]
        cells[empty], cells[body] = cells[body].clone(), 0
    changes = (q_network(moved.view_as(obs)) - q_network(obs)).abs().amax(1)
    assert (changes > 1e-6).all()


# ------------------------------------------------------------------------------------------------ the loop


@pytest.mark.parametrize("num_envs, batch_size, replay_ratio", [(7, 32, 2.0), (24, 48, 0.5), (64, 16, 1.3)])
def test_counters_and_replay_ratio_hold_for_any_width(run, num_envs, batch_size, replay_ratio) -> None:
    summary, folder = run(num_envs=num_envs, batch_size=batch_size, replay_ratio=replay_ratio, learning_starts=0)
    steps = math.ceil(3000 / num_envs) * num_envs
    assert summary["env_steps"] == steps
    updates = checkpoint(folder)["updates"]
    assert updates == int(steps * replay_ratio / batch_size + 1e-6)


def test_exploration_is_drawn_for_every_lane(run, monkeypatch) -> None:
    actions, step = [], SnakeBatch.step
    monkeypatch.setattr(SnakeBatch, "step", lambda self, action: actions.append(action.clone()) or step(self, action))
    monkeypatch.setattr(dqn_snake.QNetwork, "forward", lambda self, obs: torch.eye(4)[torch.zeros(len(obs)).long()])
    monkeypatch.setattr(dqn_snake, "evaluate", lambda *_: {})
    run(num_envs=64, start_e=0.5, end_e=0.5, total_timesteps=6400, learning_starts=10**6)
    explored = (torch.stack(actions) != 0).float()  # 3 of 4 random actions differ from the greedy 0
    assert explored.mean().item() == pytest.approx(0.375, abs=0.03)
    assert 0.1 < explored.mean(1).min() and explored.mean(1).max() < 0.65  # never all or none of the lanes


def test_target_network_follows_tau(run) -> None:
    def distance(folder: Path) -> float:
        saved = checkpoint(folder)
        names = [name for name in saved if name.startswith("q_network.")]
        return sum((saved[name] - saved[name.replace("q_", "target_", 1)]).abs().sum().item() for name in names)

    assert distance(run(tau=1.0, run_name="copy")[1]) == 0
    assert distance(run(tau=1e-6, run_name="still")[1]) > distance(run(tau=0.5, run_name="soft")[1]) > 0


def toward_the_food(obs: torch.Tensor) -> torch.Tensor:
    """Values (B, 4) of a player that goes straight to the food, around what is in the way of its next step."""
    values = torch.zeros(len(obs), 4)
    for value, board in zip(values, obs.numpy()):
        (head,), food = np.argwhere(board >= HEAD), np.argwhere(board == FOOD)[0]
        for action, move in enumerate(MOVES):
            row, column = head + move
            free = 0 <= row < len(board) and 0 <= column < len(board[0]) and board[row, column] < BODY
            value[action] = -abs(row - food[0]) - abs(column - food[1]) if free else -1000
    return values


def test_evaluation_plays_every_game_once_to_its_end() -> None:
    """Against the rule book, with the same policy and the same food."""
    from envs.snake import SnakeEnv

    args = fill_defaults(Args(**QUICK), CPU)
    scores = []
    for lane in range(12):
        env = SnakeEnv(lane=lane, board=(6, 6))
        obs, done = env.reset(seed=2**31)[0], False
        while not done:
            obs, _, terminated, truncated, info = env.step(toward_the_food(torch.as_tensor(obs)[None]).argmax().item())
            done = terminated or truncated
        scores.append(info["score"])
    assert len(set(scores)) > 4
    result = dqn_snake.evaluate(toward_the_food, args, 12, CPU)
    assert result["eval_score_mean"] == pytest.approx(np.mean(scores)) and result["eval_score_max"] == max(scores)
    assert result["eval_score_median"] == torch.tensor(scores).median() and result["eval_episodes"] == 12


def test_a_loss_that_is_not_finite_ends_the_run_and_is_not_saved(run, monkeypatch, capsys, tmp_path) -> None:
    smooth_l1_loss, calls = F.smooth_l1_loss, []

    def infinite_from_31(q, target):
        calls.append(0)
        return smooth_l1_loss(q, target) * (math.inf if len(calls) > 30 else 1)

    monkeypatch.setattr(dqn_snake.F, "smooth_l1_loss", infinite_from_31)
    with pytest.raises(SystemExit) as error:
        run(log_every=1e-9, checkpoint_every=1e-9, total_timesteps=10**6)
    assert error.value.code == 2
    assert "--learning-rate" in capsys.readouterr().err.splitlines()[-1]
    saved = checkpoint(tmp_path / "run")
    assert saved["updates"] == 30
    assert all(value.isfinite().all() for name, value in saved.items() if "_network." in name)


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


# ------------------------------------------------------------------------------------------------ resuming


def interrupt_after(monkeypatch, calls: int, number: int = signal.SIGTERM) -> None:
    counted = []

    def epsilon(*arguments) -> float:
        counted.append(0)
        if len(counted) == calls:
            signal.raise_signal(number)
        return linear_schedule(*arguments)

    monkeypatch.setattr(dqn_snake, "linear_schedule", epsilon)


def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(run, monkeypatch, capsys) -> None:
    flags = dict(checkpoint_replay=True, anneal_lr=True)
    _, whole = run(run_name="whole", **flags)
    interrupt_after(monkeypatch, 60)
    _, halves = run(run_name="halves", **flags)
    assert f"--resume {halves}" in capsys.readouterr().out
    assert checkpoint(halves)["global_step"] == 60 * 24
    monkeypatch.undo()
    summary, _ = run(run_name="halves", resume=str(halves), **flags)
    expected, got = checkpoint(whole), checkpoint(halves)
    assert set(expected) == set(got)
    for name, value in expected.items():
        if isinstance(value, torch.Tensor) and name != "envs.finished":
            assert torch.equal(value, got[name]), name
    counters = "global_step", "updates", "samples_due"
    assert [got[name] for name in counters] == [expected[name] for name in counters]
    assert summary["env_steps"] == 3000


def test_speed_after_a_resume_counts_only_new_steps(run, capsys) -> None:
    _, folder = run()
    saved = load(folder)
    saved["global_step"] = 10**9  # as if very many steps had been made
    torch.save(saved, folder / "checkpoint.pt")
    summary, _ = run(resume="latest", total_timesteps=10**9 + 480)
    assert "the replay starts empty" in capsys.readouterr().out
    assert summary["env_steps"] == 10**9 + 480 and summary["env_steps_per_second"] < 10**6
    assert max(scalars(folder)["charts/SPS"]) < 10**6


def test_a_run_that_is_over_says_so_and_leaves_its_summary_alone(run, capsys) -> None:
    _, folder = run()
    before = (folder / "summary.json").read_text(), (folder / "args.json").read_text()
    saved = load(folder)
    saved["elapsed"] = 1000.0
    torch.save(saved, folder / "checkpoint.pt")
    for limits in (dict(total_timesteps=None, max_seconds=999.0), dict(total_timesteps=3000)):
        capsys.readouterr()
        with pytest.raises(SystemExit) as error:
            run(resume=str(folder / "checkpoint.pt"), **limits)
        said = capsys.readouterr().err
        assert error.value.code == 2 and said.count("\n") == 1 and "its run is over after 3,000 steps" in said
    assert before == ((folder / "summary.json").read_text(), (folder / "args.json").read_text())


def test_a_new_limit_takes_the_place_of_the_old_ones(run, monkeypatch) -> None:
    _, folder = run(total_timesteps=None, max_seconds=1.0)
    command = ["dqn_snake.py", "--resume", str(folder)]
    monkeypatch.setattr(sys, "argv", [*command, "--total-timesteps", "9000"])
    args = dqn_snake.parse_args()
    assert (args.total_timesteps, args.max_seconds) == (9000, None)
    monkeypatch.setattr(sys, "argv", command)
    args = dqn_snake.parse_args()
    assert (args.total_timesteps, args.max_seconds) == (None, 1.0)


def test_a_board_of_the_same_size_does_not_fit(run, capsys) -> None:
    _, folder = run(board="4x9")
    with pytest.raises(SystemExit) as error:
        run(board="9x4", resume=str(folder), total_timesteps=4000)
    assert error.value.code == 2 and "--board 9x4: must be 4x9" in capsys.readouterr().err


def test_a_refused_resume_changes_nothing(run, capsys) -> None:
    _, folder = run()
    before = {path: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    for flags in (dict(hidden_size=64), dict(num_envs=1), dict(num_envs=64), dict(network="attention")):
        with pytest.raises(SystemExit) as error:
            run(resume=str(folder), total_timesteps=4000, **flags)
        assert error.value.code == 2 and "must be as they were" in capsys.readouterr().err
    assert before == {path: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def test_latest_is_looked_up_once_and_only_among_our_runs(run, monkeypatch, tmp_path) -> None:
    _, first = run(run_name="first")
    for name, text in (("foreign", '{"script": "ppo_metta"}'), ("broken", "{"), ("list", "[1]"), ("binary", "\xff")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "args.json").write_bytes(text.encode("latin-1"))
        shutil.copy(first / "checkpoint.pt", tmp_path / name)
    (tmp_path / "empty").mkdir()
    shutil.copy(first / "checkpoint.pt", tmp_path / "empty")
    moved = tmp_path / "elsewhere"
    shutil.copytree(first, moved / "first")
    monkeypatch.setattr(sys, "argv", ["dqn_snake.py", "--resume", "latest", "--run-dir", str(moved)])
    args = dqn_snake.parse_args()
    assert (args.resume, args.run_dir) == (str(moved / "first" / "checkpoint.pt"), str(moved))
    assert dqn_snake.load_checkpoint("--resume", "latest", str(tmp_path))[0] == first / "checkpoint.pt"


def test_random_numbers_of_another_device_begin_anew(run, capsys) -> None:
    _, folder = run()
    saved = load(folder)
    saved |= {"device": "cuda", "generator": torch.zeros(16, dtype=torch.uint8)}
    torch.save(saved, folder / "checkpoint.pt")
    summary, _ = run(resume=str(folder), total_timesteps=4000)
    assert summary["env_steps"] > 3900 and "the random numbers begin anew" in capsys.readouterr().out


def test_the_next_start_clears_what_a_killed_run_left(run) -> None:
    _, folder = run()
    (folder / "checkpoint.12345.tmp").write_bytes(b"half")
    run(resume=str(folder), total_timesteps=4000)
    assert not list(folder.glob("*.tmp"))


def test_a_full_disk_leaves_the_old_checkpoint_whole(run, monkeypatch, capsys) -> None:
    _, folder = run()
    before = (folder / "checkpoint.pt").read_bytes()

    def fill(state, file) -> None:
        file.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", fill)
    run(resume=str(folder), total_timesteps=4000)
    assert "No space left" in capsys.readouterr().err
    assert (folder / "checkpoint.pt").read_bytes() == before and not list(folder.glob("*.tmp"))


@pytest.mark.parametrize("where", ["add_scalar", "close"])
def test_a_disk_too_full_to_log_ends_no_run(run, monkeypatch, capsys, where) -> None:
    def fill(*arguments) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(dqn_snake.SummaryWriter, where, fill)
    summary, folder = run()
    said = capsys.readouterr()
    assert summary["env_steps"] == 3000 and (folder / "checkpoint.pt").exists()
    assert json.loads((folder / "summary.json").read_text()) == summary
    assert ("the run goes on" in said.err) == (where == "add_scalar") and "Traceback" not in said.err


@pytest.mark.parametrize("what", ["evaluate", "play"])
def test_what_fails_after_the_training_loses_nothing(run, monkeypatch, tmp_path, what) -> None:
    def fail(*arguments) -> None:
        raise RuntimeError("something else")

    monkeypatch.setattr(dqn_snake, what, fail)
    with pytest.raises(RuntimeError, match="something else"):
        run(video=True)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["env_steps"] == 3000 and checkpoint(tmp_path / "run")["global_step"] == 3000
    assert ("eval_score_mean" in summary) == (what == "play")


def test_checkpoints_on_the_way(run, monkeypatch) -> None:
    saves, save = [], dqn_snake.save_checkpoint
    monkeypatch.setattr(dqn_snake, "save_checkpoint", lambda *a: saves.append(a) or save(*a))
    run(checkpoint_every=0)
    assert len(saves) == 1
    run(checkpoint_every=0.005, run_name="often")
    assert len(saves) > 4


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


def test_bf16_is_close_to_fp32(run, monkeypatch) -> None:
    _, full = run(run_name="full", total_timesteps=720)
    monkeypatch.setattr(dqn_snake, "pick_precision", lambda *_: torch.bfloat16)
    q_network, obs = network(), boards(50)
    with torch.autocast("cpu", torch.bfloat16):
        half = q_network(obs)
    torch.testing.assert_close(half, q_network(obs), atol=0.03, rtol=0.03)
    _, folder = run(run_name="half", total_timesteps=720)
    a, b = checkpoint(full)["q_network.head.weight"], checkpoint(folder)["q_network.head.weight"]
    assert not torch.equal(a, b) and (a - b).norm() < 0.3 * a.norm()


def test_bf16_asks_the_hardware(capsys) -> None:
    dtype = dqn_snake.pick_precision(True, False, False, CPU)
    said = capsys.readouterr().out
    assert (dtype == torch.bfloat16 and said == "") or re.fullmatch(r"--bf16: matmuls take \d+ times .*\n", said)


@pytest.mark.parametrize("speedup, bf16, says", [(2.0, False, True), (1.0, False, False), (2.0, True, False)])
def test_a_run_says_where_bf16_would_be_faster(run, monkeypatch, capsys, speedup, bf16, says) -> None:
    monkeypatch.setattr(dqn_snake, "bf16_speedup", lambda: speedup)
    run(bf16=bf16, total_timesteps=240)
    assert ("--bf16 learns faster here" in capsys.readouterr().out) == says


@pytest.mark.skipif(torch.cuda.is_available(), reason="these are active on CUDA")
@pytest.mark.parametrize("flag", ["fp16", "tf32", "cudagraph"])
def test_switches_that_cannot_be_active_say_so_in_one_line(run, capsys, flag) -> None:
    summary, _ = run(**{flag: True})
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith(f"--{flag}")]
    assert len(lines) == 1 and "needs CUDA" in lines[0]
    assert summary["precision"] == "float32" and not summary["cudagraph"]


@pytest.mark.skipif(shutil.which("g++") is None and shutil.which("clang++") is None, reason="needs a C++ compiler")
def test_compiled_learns_what_eager_learns(run) -> None:
    _, eager = run(run_name="eager", total_timesteps=1200)
    summary, compiled = run(run_name="compiled", total_timesteps=1200, compile=True)
    expected, got = checkpoint(eager), checkpoint(compiled)
    assert summary["compiled"] and set(expected) == set(got)  # no `_orig_mod.` either
    for name, value in expected.items():
        if name.startswith("q_network"):
            torch.testing.assert_close(got[name], value, atol=1e-3, rtol=1e-3)


def test_a_failing_compiler_means_eager_and_one_line(run, monkeypatch, capsys) -> None:
    def lazy(function, options):
        def fail(*_):
            raise RuntimeError("no compiler here\nand a long story")

        return fail

    monkeypatch.setattr(torch, "compile", lazy)
    summary, _ = run(compile=True, total_timesteps=600)
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("--compile")]
    assert not summary["compiled"] and set(said) == {"--compile: failed (no compiler here); eager mode is used instead"}


def test_sdpa_says_which_kernel_runs(run, capsys) -> None:
    assert run(network="attention", sdpa="math", total_timesteps=600)[0]["sdpa"] == "math"
    assert "attention runs in math\n" in capsys.readouterr().out
    assert run(network="attention", total_timesteps=600)[0]["sdpa"] == "flash_attention"
    assert run(network="attention", sdpa="efficient", total_timesteps=600)[0]["sdpa"] == "math"
    assert "--sdpa efficient: does not run here\nattention runs in math\n" in capsys.readouterr().out


def head(summary: dict, folder: Path) -> list[float]:
    return checkpoint(folder)["q_network.head.bias"].tolist()


def updates(summary: dict, folder: Path) -> int:
    return checkpoint(folder)["updates"]


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
    "eval_every": (0.02, lambda s, f: len(scalars(f)["eval/score_mean"]) > 1),
    "eval_episodes": (11, lambda s, f: s["eval_episodes"]),
    "checkpoint_replay": (True, lambda s, f: "replay.obs" in checkpoint(f)),
    "video": (True, lambda s, f: (f / "videos" / "snake.gif").exists()),
}
ELSEWHERE = {  # have a test of their own
    "device", "max_seconds", "run_dir", "bf16", "fp16", "tf32", "compile", "compile_mode", "cudagraph",
    "sdpa", "checkpoint_every", "resume", "evaluate", "render", "wandb",
}  # fmt: skip


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> tuple[dict, Path]:
    folder = tmp_path_factory.mktemp("plain")
    return main(Args(**QUICK | {"run_dir": str(folder), "run_name": "run"})), folder / "run"


def test_no_flag_is_without_a_test() -> None:
    assert {field.name for field in dataclasses.fields(Args)} == set(FLAGS) | ELSEWHERE


@pytest.mark.parametrize("flag", FLAGS)
def test_every_flag_changes_what_it_says(run, plain, flag) -> None:
    value, look = FLAGS[flag]
    more = {"board": "9x9"} if flag == "env_id" else {}
    assert look(*run(**{flag: value} | more)) != look(*plain)


# ------------------------------------------------------------------------------------------------ what a run leaves


def test_summary_and_tensorboard(run) -> None:
    summary, folder = run(eval_every=0.3, log_every=0.02)
    assert json.loads((folder / "summary.json").read_text()) == summary
    expected = "script device precision compiled cudagraph sdpa env_steps wall_seconds env_steps_per_second "
    expected += "updates_per_second samples_per_second replay_ratio rollout_fraction train_fraction peak_memory_gib "
    expected += "eval_score_mean eval_score_median eval_score_max eval_episodes"
    assert set(expected.split()) <= set(summary)
    assert json.loads((folder / "args.json").read_text())["num_envs"] == 24
    assert summary["replay_ratio"] == pytest.approx(2, rel=0.15)
    assert summary["rollout_fraction"] + summary["train_fraction"] == pytest.approx(1)
    expected = "charts/SPS charts/score charts/episodic_return charts/episodic_length charts/updates_per_second "
    expected += "charts/samples_per_second charts/replay_ratio losses/td_loss losses/q_values eval/score_mean "
    expected += "perf/act_ms perf/env_ms perf/store_ms perf/learn_ms perf/log_ms perf/rollout_fraction perf/warmup_s"
    read = scalars(folder)
    assert set(expected.split()) <= set(read)
    assert all(np.isfinite(values).all() for values in read.values())


def test_evaluation_does_not_count_into_speed(run, monkeypatch) -> None:
    fast = run(run_name="fast")[0]["env_steps_per_second"]
    evaluate = dqn_snake.evaluate
    monkeypatch.setattr(dqn_snake, "evaluate", lambda *a: time.sleep(0.02) or evaluate(*a))
    summary, _ = run(eval_every=1e-6)
    assert summary["env_steps_per_second"] > fast / 3 and summary["wall_seconds"] > 1


def test_the_target_network_has_no_gradients(run, monkeypatch) -> None:
    """Each update would lengthen the graph that leads to it, for ever."""
    lerp, requires_grad = torch._foreach_lerp_, []

    def watched(target_weights: list, weights: list, tau: float) -> None:
        lerp(target_weights, weights, tau)
        requires_grad.extend(weight.requires_grad for weight in target_weights)

    monkeypatch.setattr(torch, "_foreach_lerp_", watched)
    run(total_timesteps=300)
    assert requires_grad and not any(requires_grad)


def test_the_gif_moves(run) -> None:
    from PIL import Image

    _, folder = run(video=True)
    with Image.open(folder / "videos" / "snake.gif") as gif:
        assert gif.size == (6 * 24, 6 * 24 + 32) and gif.n_frames > 1


def test_a_game_without_end_makes_a_gif_with_an_end(run, monkeypatch) -> None:
    from PIL import Image

    play = dqn_snake.play
    monkeypatch.setattr("envs.playing.MAX_GIF_FRAMES", 7)
    monkeypatch.setattr(dqn_snake, "play", lambda *a: itertools.chain.from_iterable(play(*a) for _ in iter(int, 1)))
    _, folder = run(video=True)
    with Image.open(folder / "videos" / "snake.gif") as gif:
        assert gif.n_frames == 7


def test_two_runs_of_the_same_second_have_folders_of_their_own(run, monkeypatch, capsys) -> None:
    monkeypatch.setattr(time, "strftime", lambda _: "20000101-000000")
    first, second = (run(run_name=None, total_timesteps=600)[0] for _ in range(2))
    folders = re.findall(r"^(\S+) on cpu", capsys.readouterr().out, re.MULTILINE)
    assert folders[1] == f"{folders[0]}-2" and (Path(folders[0]) / "summary.json").exists()
    before = (Path(folders[0]) / "args.json").read_text()
    with pytest.raises(SystemExit) as error:
        run(run_name=Path(folders[0]).name, seed=5)
    said = capsys.readouterr().err
    assert error.value.code == 2 and said.count("\n") == 1 and "--run-name" in said
    assert (Path(folders[0]) / "args.json").read_text() == before


def test_main_puts_the_process_back(run) -> None:
    def state() -> list:
        denormal = (torch.full((1,), 1e-310, dtype=torch.float64) * 1).item()
        handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
        return [*handlers, torch.get_num_threads(), torch.get_float32_matmul_precision(), denormal]

    before = state()
    run(threads=3 - torch.get_num_threads() % 2)
    assert state() == before
    with pytest.raises(SystemExit):
        run(board="3x3")
    assert state() == before


def test_threads_are_fewer_beside_busy_programs(monkeypatch, capsys) -> None:
    rates = {8: 40, 7: 300, 4: 200, 1: 100}
    monkeypatch.setattr(dqn_snake, "matmuls_per_second", rates.__getitem__)
    assert dqn_snake.pick_threads(16) == 7 and "7 of 8 threads are faster" in capsys.readouterr().out
    rates[8] = 290
    assert dqn_snake.pick_threads(16) == 8 and capsys.readouterr().out == ""
    assert dqn_snake.pick_threads(1) == 1


def test_a_folder_that_cannot_be_written_is_no_reason_not_to_evaluate(run, capsys) -> None:
    summary, folder = run()
    (folder / "videos").write_text("a file where the folder should be")
    assert (
        main(Args(**QUICK | {"evaluate": str(folder), "video": True}))["eval_score_mean"] == summary["eval_score_mean"]
    )
    assert "--video: " in capsys.readouterr().out.splitlines()[-1]


def test_evaluate_and_render_play_the_checkpoint(run, capsys, monkeypatch) -> None:
    summary, folder = run()
    args = Args(**QUICK | {"evaluate": str(folder)})
    assert main(args)["eval_score_mean"] == summary["eval_score_mean"] and not (folder / "videos").exists()
    main(dataclasses.replace(args, video=True))
    assert (folder / "videos" / "snake.gif").exists()
    monkeypatch.setattr(time, "sleep", lambda _: None)
    main(dataclasses.replace(args, render=True))
    assert "score 0" in capsys.readouterr().out


def test_the_command_line_takes_over_the_flags_of_a_checkpoint(run, monkeypatch) -> None:
    _, folder = run()
    monkeypatch.setattr(sys, "argv", ["dqn_snake.py", "--resume", str(folder), "--total-timesteps", "4000"])
    args = dqn_snake.parse_args()
    assert (args.board, args.total_timesteps, args.resume) == ("6x6", 4000, str(folder / "checkpoint.pt"))


def test_a_copied_script_runs_alone(tmp_path) -> None:
    shutil.copytree(ROOT / "envs", tmp_path / "envs")
    shutil.copy(ROOT / "dqn_snake.py", tmp_path / "mine.py")
    command = "mine.py --max-seconds 4 --board 5x5 --eval-episodes 5 --device cpu --num-envs 32".split()
    done = subprocess.run([sys.executable, *command], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.glob("runs/mine__1__*/videos/snake.gif")) and "--evaluate runs/mine__1__" in done.stdout


def test_control_c_saves_and_exits_0(tmp_path) -> None:
    command = [sys.executable, "dqn_snake.py", "--run-dir", str(tmp_path), "--run-name", "run", "--device", "cpu"]
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, env=environment) as process:
        while "SPS" not in process.stdout.readline():
            pass
        process.send_signal(signal.SIGINT)
        out = process.communicate(timeout=60)[0]
    assert (
        process.returncode == 0 and f"--resume {tmp_path / 'run'}" in out and (tmp_path / "run/checkpoint.pt").exists()
    )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("when", ["on the way", "at the end"])
def test_an_interrupt_ends_an_evaluation_at_once(run, monkeypatch, capsys, number, when) -> None:
    evaluate = dqn_snake.evaluate

    def interrupted(q_network, args, episodes, device):
        if episodes == (1 if when == "on the way" else 10):
            signal.raise_signal(number)
            raise AssertionError("it went on")
        return evaluate(q_network, args, episodes, device)

    monkeypatch.setattr(dqn_snake, "evaluate", interrupted)
    summary, folder = run(eval_every=1e-6 if when == "on the way" else 0)
    assert summary["env_steps"] == (24 if when == "on the way" else 3000)
    assert json.loads((folder / "summary.json").read_text()) == summary
    assert checkpoint(folder)["global_step"] == summary["env_steps"]
    assert f"--resume {folder}" in capsys.readouterr().out


def test_control_c_ends_evaluate_and_render(run, monkeypatch) -> None:
    _, folder = run()

    def interrupted(*arguments):
        signal.raise_signal(signal.SIGINT)
        raise AssertionError("it went on")

    monkeypatch.setattr(dqn_snake, "evaluate", interrupted)
    monkeypatch.setattr(dqn_snake, "play", interrupted)
    for render in (False, True):
        assert main(Args(**QUICK | {"evaluate": str(folder), "render": render})) == {}


def test_output_that_nobody_reads_stops_and_saves(tmp_path) -> None:
    command = (
        f"{sys.executable} dqn_snake.py --run-dir {tmp_path} --run-name run --threads 1 --log-every 0.2 | head -n 1"
    )
    shell = ["bash", "-o", "pipefail", "-c", command]
    done = subprocess.run(shell, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    assert (tmp_path / "run" / "checkpoint.pt").exists() and (tmp_path / "run" / "summary.json").exists()


# ------------------------------------------------------------------------------------------------ bad input


BAD = [
    *({name: 0} for name in "num_envs batch_size buffer_size hidden_size threads log_every".split()),
    *({name: -1} for name in "total_timesteps max_seconds num_envs batch_size eval_every learning_starts seed".split()),
    *({name: 0.0} for name in "learning_rate replay_ratio tau".split()),
    *({name: 1.5} for name in "gamma tau start_e end_e exploration_fraction".split()),
    {"learning_rate": math.nan}, {"replay_ratio": math.inf}, {"learning_rate": -1e-3},
    {"board": "3x3"}, {"board": "10"}, {"board": "axb"}, {"board": "65x10"}, {"board": "10xfoox10"},
    {"board": "10x10x10"}, {"board": "10x-10"}, {"num_envs": 2001}, {"seed": 2**31}, {"threads": 100_000},
    {"eval_episodes": 3_000_000}, {"num_envs": 10**10, "buffer_size": 10**11}, {"resume": ""}, {"evaluate": ""},
    {"resume": "nowhere", "evaluate": "nowhere"},
    {"bf16": True, "fp16": True}, {"compile_mode": "max-autotune", "cudagraph": True, "compile": True},
    {"render": True}, {"hidden_size": 30, "network": "attention"}, {"buffer_size": 10**12},
    {"resume": "nowhere"}, {"evaluate": "nowhere"}, {"resume": "latest"}, {"run_dir": "/proc/nowhere"},
    pytest.param({"device": "cuda"}, marks=pytest.mark.skipif(torch.cuda.is_available(), reason="needs no CUDA")),
]  # fmt: skip


@pytest.mark.parametrize("flags", BAD, ids=str)
def test_bad_values_are_refused_in_one_line(flags, tmp_path, capsys) -> None:
    with pytest.raises(SystemExit) as error:
        main(Args(**QUICK | {"run_dir": str(tmp_path / "runs")} | flags))
    said = capsys.readouterr().err
    flag = next(iter(flags))
    assert error.value.code == 2 and said.count("\n") == 1 and f"--{flag.replace('_', '-')}" in said, said
    assert not list(tmp_path.glob("runs/*"))


class Malicious:
    def __reduce__(self):
        return Path.touch, (Path("executed"),)


@pytest.mark.parametrize("flag", ["resume", "evaluate"])
def test_broken_and_hostile_checkpoints_are_refused(run, capsys, tmp_path, monkeypatch, flag) -> None:
    monkeypatch.chdir(tmp_path)
    _, folder = run()
    whole = (folder / "checkpoint.pt").read_bytes()
    torch.save({"script": "ppo_metta"}, "foreign.pt")
    torch.save({"script": "dqn_snake", "args": Malicious()}, "hostile.pt")
    Path("pickle.pt").write_bytes(pickle.dumps(Malicious()))
    Path("truncated.pt").write_bytes(whole[: len(whole) // 2])
    Path("empty.pt").write_bytes(b"")
    Path("text.pt").write_text("hello")
    for name in ("foreign.pt", "hostile.pt", "pickle.pt", "truncated.pt", "empty.pt", "text.pt"):
        capsys.readouterr()
        with pytest.raises(SystemExit) as error:
            main(Args(**QUICK | {"run_dir": str(tmp_path), flag: name}))
        said = capsys.readouterr().err
        assert error.value.code == 2 and said.count("\n") == 1 and f"--{flag} {name}" in said, said
    assert not Path("executed").exists()
    with pytest.raises(SystemExit) as error:
        main(Args(**QUICK | {"run_dir": str(tmp_path), flag: str(folder), "hidden_size": 64}))
    assert error.value.code == 2 and "as they were" in capsys.readouterr().err


def change(path: str, new) -> Callable[[dict], None]:
    """Replace the part of a checkpoint at a path ([in brackets] a name with dots) by `new`, or by `new(part)`."""

    def apply(saved: dict) -> None:
        names = [one or other for one, other in re.findall(r"\[(.*?)\]|([^.]+)", path)]
        *names, last = (int(name) if name.isdecimal() else name for name in names)
        for name in names:
            saved = saved[name]
        saved[last] = new(saved[last]) if callable(new) else new

    return apply


def remove(name: str) -> Callable[[dict], None]:
    return lambda saved: saved.pop(name)


MOMENT = "optimizer.2.exp_avg"
MALFORMED = {
    **{f"no {name}": remove(name) for name in "q_network target_network optimizer envs generator samples_due".split()},
    "weights of another dtype": change("q_network.[trunk.hidden.weight]", lambda part: part.half()),
    "weights of another shape": change("q_network.[trunk.hidden.weight]", lambda part: part[:1]),
    "weights not finite": change("q_network.[head.bias]", lambda part: part * math.nan),
    "sparse weights": change("q_network.[trunk.hidden.weight]", lambda part: part.to_sparse()),
    "weights missing": change("q_network", lambda part: {k: v for k, v in part.items() if k != "head.bias"}),
    "more weights": change("q_network", lambda part: part | {"more": torch.zeros(1)}),
    "weights no dict": change("q_network", [1, 2]),
    "target of another shape": change("target_network", lambda part: part | {"head.bias": torch.zeros(4)}),
    "moments too small": change(MOMENT, torch.zeros(1)),
    "moments of another dtype": change(MOMENT, lambda part: part.double()),
    "moments not finite": change(MOMENT, lambda part: part * math.nan),
    "moments missing": change("optimizer", lambda part: {0: part[0]}),
    "steps as a number": change("optimizer.2.step", 3),
    "optimizer a list": change("optimizer", [1]),
    "generator too short": change("generator", lambda part: part[:-1]),
    "generator not one": change("generator", lambda part: torch.full_like(part, 255)),
    "generator a number": change("generator", 3),
    "games of another shape": change("envs.head", lambda part: part[:1]),
    "games of another dtype": change("envs.head", lambda part: part.float()),
    "games missing": change("envs", lambda part: {k: v for k, v in part.items() if k != "slot"}),
    "head off the board": change("envs.head", lambda part: part + 1000),
    "negative head": change("envs.head", lambda part: part - 1000),
    "codes that are none": change("envs.codes", lambda part: part + 100),
    "slots off the list": change("envs.slot", lambda part: part + 1000),
    "heading that is none": change("envs.heading", lambda part: part + 4),
    "replay off its end": change("replay.position", lambda part: part + 1000),
    "replay larger than it is": change("replay.size", lambda part: part + 1000),
    "actions that are none": change("replay.action", lambda part: part + 100),
    "boards that are none": change("replay.obs", lambda part: part + 100),
    "rewards not finite": change("replay.reward", lambda part: part * math.inf),
    "steps below 0": change("global_step", -5),
    "steps as text": change("global_step", "many"),
    "elapsed not a number": change("elapsed", math.nan),
    "args a list": change("args", [1, 2]),
    "script of another": change("script", "ppo_metta"),
    "made by another version": change("version", 1),
    "made before versions": remove("version"),
}  # fmt: skip


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    flags = {"run_dir": str(folder), "run_name": "run", "total_timesteps": 960, "checkpoint_replay": True}
    main(Args(**QUICK | flags))
    return folder / "run"


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_checkpoints_are_refused_before_anything_changes(whole, tmp_path, capsys, name) -> None:
    saved = load(whole)
    MALFORMED[name](saved)
    torch.save(saved, tmp_path / "checkpoint.pt")
    capsys.readouterr()
    with pytest.raises(SystemExit) as error:
        main(Args(**QUICK | {"resume": str(tmp_path), "checkpoint_replay": True, "run_dir": str(tmp_path)}))
    said = capsys.readouterr().err
    assert error.value.code == 2 and said.count("\n") == 1 and f"--resume {tmp_path}" in said, said
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint.pt"]


@pytest.mark.parametrize("name, value", [
    ("num_envs", "many"), ("num_envs", None), ("gamma", [1]), ("network", "none"), ("network", True), ("bf16", 1),
    ("more", 1), (7, 1),
])  # fmt: skip
@pytest.mark.parametrize("flag", ["resume", "evaluate"])
def test_flags_of_a_checkpoint_are_checked(whole, tmp_path, capsys, monkeypatch, flag, name, value) -> None:
    saved = load(whole)
    saved["args"][name] = value
    torch.save(saved, tmp_path / "checkpoint.pt")
    monkeypatch.setattr(sys, "argv", ["dqn_snake.py", f"--{flag}", str(tmp_path)])
    if value is None:
        assert dqn_snake.parse_args().num_envs is None  # as on the command line
        return
    with pytest.raises(SystemExit) as error:
        dqn_snake.parse_args()
    said = capsys.readouterr().err
    assert error.value.code == 2 and said.count("\n") == 1 and f"--{flag} {tmp_path}" in said, said


def test_a_checkpoint_names_no_files(whole, tmp_path, monkeypatch) -> None:
    saved = load(whole)
    saved["args"] |= {"run_dir": "/etc", "run_name": "x", "evaluate": "y", "resume": "z", "wandb": True}
    torch.save(saved, tmp_path / "checkpoint.pt")
    monkeypatch.setattr(sys, "argv", ["dqn_snake.py", "--resume", str(tmp_path)])
    args = dqn_snake.parse_args()
    assert (args.run_dir, args.run_name, args.evaluate, args.wandb) == ("runs", None, None, False)
    assert args.resume == str(tmp_path / "checkpoint.pt")


@pytest.mark.skipif(sys.platform != "linux", reason="limits memory as Linux does")
def test_running_out_of_memory_is_one_line(tmp_path) -> None:
    flags = f"--batch-size 4000000 --max-seconds 60 --learning-starts 0 --device cpu --threads 1 --run-dir {tmp_path}"
    command = f"ulimit -v 8000000; exec {sys.executable} dqn_snake.py {flags} --replay-ratio 1e6"
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and done.stderr.endswith("--num-envs or --eval-episodes works\n")
    assert "Traceback" not in done.stderr


def test_wandb_missing_is_one_line(run, monkeypatch, capsys) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(SystemExit):
        run(wandb=True)
    assert "pip install wandb" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------ learning


@pytest.mark.slow
def test_it_learns_in_a_minute(tmp_path) -> None:
    """A random player eats next to nothing. Counted in steps, so that a busy machine learns as much."""
    quick = dict(
        total_timesteps=400_000, eval_episodes=100, eval_every=0, video=False, device="cpu", run_dir=str(tmp_path)
    )
    assert main(Args(**quick))["eval_score_mean"] > 12


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


@pytest.mark.gpu
@CUDA
@pytest.mark.parametrize("mode", ["default", "reduce-overhead", "max-autotune"])
def test_compile_modes_on_cuda(run, mode) -> None:
    assert run(device="cuda", compile=True, compile_mode=mode, total_timesteps=1200)[0]["compiled"]

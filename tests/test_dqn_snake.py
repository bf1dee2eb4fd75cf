"""The Snake trainer: its maths, its switches, what it leaves behind, and what it refuses."""

import dataclasses
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
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.nn.attention import SDPBackend

import dqn_snake
from dqn_snake import Args, EgocentricView, QNetwork, Replay, epsilon_at, main, resolve, td_target
from envs.snake import BODY, FOOD, HEAD, MOVES, SnakeBatch

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

    def start(**flags) -> tuple[dict, Path]:
        flags = QUICK | {"run_dir": str(tmp_path), "run_name": "run"} | flags
        return main(Args(**flags)), tmp_path / flags["run_name"]

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
    args = resolve(Args(**(QUICK | flags)), CPU)
    return QNetwork(args, [SDPBackend.MATH], CPU)


# ------------------------------------------------------------------------------------------------ maths


def test_epsilon_reaches_both_ends() -> None:
    assert epsilon_at(0, 1, 0.05, 0.1) == 1
    assert epsilon_at(0.05, 1, 0.05, 0.1) == pytest.approx(0.525)
    assert epsilon_at(0.1, 1, 0.05, 0.1) == epsilon_at(1, 1, 0.05, 0.1) == 0.05
    assert epsilon_at(0, 1, 0.05, 0) == 0.05


def test_td_target_is_double_and_stops_at_termination() -> None:
    rng = np.random.default_rng(0)
    reward, discount = rng.normal(size=50), rng.choice([0, 0.9], size=50)
    target, online = rng.normal(size=(50, 4)), rng.normal(size=(50, 4))
    expected = [r + d * t[np.argmax(o)] for r, d, t, o in zip(reward, discount, target, online)]
    got = td_target(*(torch.tensor(x) for x in (reward, discount, target, online)))
    np.testing.assert_allclose(got, expected)


@pytest.mark.parametrize("n_step", [1, 3])
def test_replay_returns_against_numpy(n_step: int) -> None:
    """Random games with both endings, a ring that wraps: every stored transition against a slow sum over the future."""
    gamma, lanes, steps, rows = 0.9, 5, 60, 16
    args = resolve(Args(**(QUICK | dict(num_envs=lanes, buffer_size=rows * lanes, n_step=n_step, gamma=gamma))), CPU)
    replay, rng = Replay(args, SnakeBatch(lanes, board=(6, 6)), CPU), np.random.default_rng(1)
    history, length = [], np.zeros(lanes, int)
    for _ in range(steps):
        length += 1
        obs, final_obs = (rng.integers(10, size=(lanes, 6, 6), dtype=np.uint8) for _ in range(2))
        action, reward = rng.integers(4, size=lanes), rng.normal(size=lanes).astype(np.float32)
        terminated, truncated = rng.random(lanes) < 0.15, rng.random(lanes) < 0.15
        truncated &= ~terminated
        history.append((obs, action, reward, terminated, truncated, final_obs))
        tensors = (torch.as_tensor(x.copy()) for x in (obs, action, reward, terminated, length, final_obs))
        replay.store(*tensors)
        length[terminated | truncated] = 0
    assert replay.size.item() == rows and replay.row.item() == steps % rows
    for step in range(steps - rows, steps):
        for lane in range(lanes):
            expected, discount, at = 0.0, 1.0, step
            for at in range(step, min(step + n_step, steps)):
                _, _, reward, terminated, truncated, final_obs = history[at]
                expected += discount * reward[lane]
                discount *= gamma * (not terminated[lane])
                if terminated[lane] or truncated[lane]:
                    break
            row = step % rows
            assert replay.reward[row, lane].item() == pytest.approx(expected, abs=1e-5)
            assert replay.discount[row, lane].item() == pytest.approx(discount, abs=1e-6)
            np.testing.assert_array_equal(replay.next_obs[row, lane], history[at][5][lane])
            np.testing.assert_array_equal(replay.obs[row, lane], history[step][0][lane])
            assert replay.action[row, lane] == history[step][1][lane]


def test_replay_samples_only_what_it_holds() -> None:
    args = resolve(Args(**(QUICK | dict(num_envs=4, buffer_size=400))), CPU)
    replay = Replay(args, SnakeBatch(4, board=(6, 6)), CPU)
    nothing = torch.zeros(4, 6, 6, dtype=torch.uint8)
    for step in range(3):
        ends = torch.zeros(4, dtype=torch.bool)
        replay.store(nothing, torch.zeros(4), torch.full((4,), step + 1.0), ends, torch.ones(4), nothing)
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
    heading, seen, food = view.spots(obs)
    _, codes, place, head, _ = view.cells(obs)
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


@pytest.mark.parametrize("dueling", [False, True])
def test_a_reversal_is_worth_what_going_ahead_is(dueling: bool) -> None:
    q_network, obs = network(dueling=dueling), boards(20)
    heading = (obs.flatten(1).max(1).values - HEAD).long()[:, None]
    q = q_network(obs)
    assert torch.equal(q.gather(1, heading), q.gather(1, (heading + 2) % 4))


def test_attention_kernels_agree_with_the_written_out_one() -> None:
    obs, outputs = boards(8), []
    for backend in (SDPBackend.MATH, SDPBackend.FLASH_ATTENTION):
        torch.manual_seed(0)
        args = resolve(Args(**(QUICK | dict(network="attention"))), CPU)
        outputs.append(QNetwork(args, [backend], CPU)(obs))
    torch.testing.assert_close(*outputs, atol=1e-5, rtol=1e-4)


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
    updates = checkpoint(folder)["counters"][1]
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


def test_target_network_follows_tau_and_frequency(run) -> None:
    def distance(folder: Path) -> float:
        saved = checkpoint(folder)
        names = [name for name in saved if name.startswith("q_network.")]
        return sum((saved[name] - saved[name.replace("q_", "target_", 1)]).abs().sum().item() for name in names)

    assert distance(run(tau=1.0, run_name="copy")[1]) == 0
    assert distance(run(tau=1e-6, run_name="still")[1]) > distance(run(tau=0.5, run_name="soft")[1]) > 0
    assert distance(run(tau=1.0, target_network_frequency=10**6, run_name="never")[1]) > 0


def test_evaluation_plays_every_game_once_to_its_end() -> None:
    """Against the rule book, with the same greedy policy and the same food."""
    from envs.snake import SnakeEnv

    q_network, args = network(), resolve(Args(**QUICK), CPU)
    scores = []
    for lane in range(12):
        env = SnakeEnv(lane=lane, board=(6, 6))
        obs, done = env.reset(seed=2**31)[0], False
        while not done:
            obs, _, terminated, truncated, info = env.step(q_network(torch.as_tensor(obs)[None]).argmax().item())
            done = terminated or truncated
        scores.append(info["score"])
    result = dqn_snake.evaluate(q_network, args, 12, CPU)
    assert result["eval_score_mean"] == pytest.approx(np.mean(scores)) and result["eval_score_max"] == max(scores)
    assert result["eval_episodes"] == 12


def test_updates_that_are_not_finite_are_skipped_and_end_the_run(run, monkeypatch, capsys, tmp_path) -> None:
    smooth_l1_loss, calls = F.smooth_l1_loss, []

    def sometimes_infinite(q, target):
        calls.append(0)
        return smooth_l1_loss(q, target) * (math.inf if len(calls) in (3, 8) or len(calls) > 30 else 1)

    monkeypatch.setattr(dqn_snake.F, "smooth_l1_loss", sometimes_infinite)
    with pytest.raises(SystemExit) as error:
        run(log_every=1e-9, checkpoint_every=1e-9, total_timesteps=10**6)
    assert error.value.code == 2
    assert "from number 31 on" in capsys.readouterr().err
    assert all(value.isfinite().all() for name, value in checkpoint(tmp_path / "run").items() if "_network." in name)
    assert sum(scalars(tmp_path / "run")["losses/skipped_updates"]) == 12


# ------------------------------------------------------------------------------------------------ resuming


def interrupt_after(monkeypatch, calls: int, number: int = signal.SIGTERM) -> None:
    counted = []

    def epsilon(*arguments) -> float:
        counted.append(0)
        if len(counted) == calls:
            signal.raise_signal(number)
        return epsilon_at(*arguments)

    monkeypatch.setattr(dqn_snake, "epsilon_at", epsilon)


@pytest.mark.parametrize("n_step", [1, 3])
def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(run, monkeypatch, n_step, capsys) -> None:
    flags = dict(checkpoint_replay=True, n_step=n_step, anneal_lr=True)
    _, whole = run(run_name="whole", **flags)
    interrupt_after(monkeypatch, 60)
    _, halves = run(run_name="halves", **flags)
    assert f"--resume {halves}" in capsys.readouterr().out
    assert checkpoint(halves)["counters"][0] == 60 * 24
    monkeypatch.undo()
    summary, _ = run(run_name="halves", resume=str(halves), **flags)
    expected, got = checkpoint(whole), checkpoint(halves)
    assert set(expected) == set(got)
    for name, value in expected.items():
        if isinstance(value, torch.Tensor) and name != "envs.finished":
            assert torch.equal(value, got[name]), name
    assert got["counters"][:3] == expected["counters"][:3] and summary["env_steps"] == 3000


def test_speed_after_a_resume_counts_only_new_steps(run, capsys) -> None:
    _, folder = run()
    saved = load(folder)
    saved["counters"][0] = 10**9  # as if very many steps had been made
    torch.save(saved, folder / "checkpoint.pt")
    summary, _ = run(resume="latest", total_timesteps=10**9 + 480)
    assert "the replay starts empty" in capsys.readouterr().out
    assert summary["env_steps"] == 10**9 + 480 and summary["env_steps_per_second"] < 10**6
    assert max(scalars(folder)["charts/SPS"]) < 10**6


def test_elapsed_time_is_part_of_the_budget_after_a_resume(run) -> None:
    _, folder = run()
    saved = load(folder)
    saved["counters"][3] = 1000.0
    torch.save(saved, folder / "checkpoint.pt")
    summary, _ = run(resume=str(folder / "checkpoint.pt"), total_timesteps=None, max_seconds=999.0)
    assert summary["env_steps"] == 3000 and summary["wall_seconds"] > 1000


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
    probe, said, networks, gradients = boards(4), [], [], []
    init = QNetwork.__init__
    monkeypatch.setattr(QNetwork, "__init__", lambda self, *a: networks.append(self) or init(self, *a))
    monkeypatch.setattr(dqn_snake, "pick_precision", lambda *_: torch.bfloat16)

    class WatchedAdam(torch.optim.Adam):
        def step(self, *arguments):
            super().step(*arguments)
            gradients[:] = [weight.grad for weight in self.param_groups[0]["params"]]
            with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
                said.append(networks[0](probe))

    monkeypatch.setattr(torch.optim, "Adam", WatchedAdam)
    summary, _ = run(total_timesteps=1200, learning_rate=1e-2)
    assert summary["precision"] == "bfloat16" and len(said) > 20
    assert not any(torch.equal(before, after) for before, after in zip(said[1:], said[2:]))
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
    assert "as written out" in capsys.readouterr().out
    assert run(network="attention", sdpa="efficient", total_timesteps=600)[0]["sdpa"] == "flash_attention"
    assert "--sdpa efficient: does not run" in capsys.readouterr().out


def head(summary: dict, folder: Path) -> list[float]:
    return checkpoint(folder)["q_network.head.bias"].tolist()


def updates(summary: dict, folder: Path) -> int:
    return checkpoint(folder)["counters"][1]


FLAGS = {  # another value than QUICK's, and where it shows
    "seed": (2, head),
    "total_timesteps": (1200, lambda s, f: s["env_steps"]),
    "run_name": ("other", lambda s, f: f.name),
    "env_id": ("SnakeBlocks-v0", lambda s, f: scalars(f)["charts/episodic_return"][-1] < -100),
    "board": ("5x7", lambda s, f: checkpoint(f)["envs.codes"].shape),
    "start_length": (2, lambda s, f: checkpoint(f)["envs.num_free"].tolist()),
    "num_envs": (25, lambda s, f: checkpoint(f)["envs.head"].shape),
    "network": ("attention", lambda s, f: s["sdpa"]),
    "hidden_size": (40, lambda s, f: checkpoint(f)["q_network.head.weight"].shape),
    "learning_rate": (1e-2, head),
    "anneal_lr": (False, lambda s, f: round(scalars(f)["losses/learning_rate"][-1], 6)),
    "buffer_size": (960, head),
    "gamma": (0.5, head),
    "n_step": (3, head),
    "double": (False, head),
    "dueling": (True, lambda s, f: checkpoint(f)["q_network.head.weight"].shape),
    "batch_size": (96, updates),
    "replay_ratio": (1.0, updates),
    "learning_starts": (1000, updates),
    "start_e": (0.5, lambda s, f: checkpoint(f)["envs.codes"].tolist()),
    "end_e": (0.5, lambda s, f: scalars(f)["charts/epsilon"][-1]),
    "exploration_fraction": (1.0, lambda s, f: checkpoint(f)["envs.codes"].tolist()),
    "target_network_frequency": (3, lambda s, f: checkpoint(f)["target_network.head.bias"].tolist()),
    "tau": (0.5, lambda s, f: checkpoint(f)["target_network.head.bias"].tolist()),
    "max_grad_norm": (1e-3, head),
    "threads": (2, lambda s, f: s["device"]),
    "log_every": (1e-6, lambda s, f: len(scalars(f)["charts/SPS"]) > 60),
    "eval_every": (0.02, lambda s, f: len(scalars(f)["eval/score_mean"]) > 1),
    "eval_episodes": (11, lambda s, f: s["eval_episodes"]),
    "checkpoint_replay": (True, lambda s, f: "replay.obs" in checkpoint(f)),
    "video": (True, lambda s, f: (f / "videos" / "snake.gif").exists()),
    "profile": (True, lambda s, f: (f / "profile.json").exists()),
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
    expected += "eval_score_mean eval_score_median eval_score_max eval_episodes torch git_commit"
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


def test_the_gif_moves(run) -> None:
    from PIL import Image

    _, folder = run(video=True)
    with Image.open(folder / "videos" / "snake.gif") as gif:
        assert gif.size == (6 * 24, 6 * 24 + 32) and gif.n_frames > 1


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
    args = dqn_snake.parse()
    assert (args.board, args.total_timesteps, args.resume) == ("6x6", 4000, str(folder))


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


# ------------------------------------------------------------------------------------------------ bad input


BAD = [
    *({name: 0} for name in "num_envs batch_size buffer_size hidden_size threads n_step log_every".split()),
    *({name: -1} for name in "total_timesteps max_seconds num_envs batch_size eval_every learning_starts seed".split()),
    *({name: 0.0} for name in "learning_rate replay_ratio tau".split()),
    *({name: 1.5} for name in "gamma tau start_e end_e exploration_fraction".split()),
    {"learning_rate": math.nan}, {"replay_ratio": math.inf}, {"learning_rate": -1e-3},
    {"board": "3x3"}, {"board": "10"}, {"board": "axb"}, {"board": "65x10"}, {"board": "4x4", "start_length": 4},
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


@pytest.mark.skipif(sys.platform != "linux", reason="limits memory as Linux does")
def test_running_out_of_memory_is_one_line(tmp_path) -> None:
    flags = f"--batch-size 4000000 --max-seconds 60 --learning-starts 0 --device cpu --threads 1 --run-dir {tmp_path}"
    command = f"ulimit -v 8000000; exec {sys.executable} dqn_snake.py {flags} --replay-ratio 1e6"
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and done.stderr.endswith("a smaller --batch-size, --buffer-size or --num-envs works\n")
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

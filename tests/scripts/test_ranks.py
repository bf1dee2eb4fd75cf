"""Several ranks of a torchrun: what they do together, and how they end. For every script that can be several."""

import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch
from rank_runs import (
    KEEP_NETWORK,
    ONE_FAST,
    RANKED,
    SAVE_NETWORK,
    WHOLE_SCRIPT,
    free_port,
    small_flags,
    start_ranks,
    torchrun,
)
from small_runs import ROOT, Script, command_line, load, refusal

TWO_RANKS = " on 2 x "  # what a run of two ranks begins with


def finish(ranks: list[subprocess.Popen], seconds: float = 100) -> list[tuple[str, str]]:
    """What every rank said."""
    return [rank.communicate(timeout=seconds) for rank in ranks]


def wait_for_line(rank: subprocess.Popen, text: str) -> None:
    while text not in rank.stdout.readline():
        assert rank.poll() is None, rank.stderr.read()


def wait_for(condition, seconds: float = 100) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


# ------------------------------------------------------------------------------------------------ what they learn


def flat(weights: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([value.flatten() for value in weights.values()])


# A batch of the whole job, drawn by the number of its call: a rank gets its part of it.
WHOLE_BATCH = """
from itertools import count
from envs.snake.batch import SnakeBatch

calls = count()
games = SnakeBatch(64, seed=5, board=(6, 6))
seen = [games.reset().clone()]
for _ in range(5):
    seen.append(games.step(torch.randint(4, (64,), generator=torch.Generator().manual_seed(7)))[0].clone())
seen = torch.cat(seen)

def part_of_batch(size, make):
    generator = torch.Generator().manual_seed(next(calls))
    fields = make(size * script.RANKS, generator)
    part = slice(script.RANK * size, (script.RANK + 1) * size)
    return [field[part] for field in fields]
"""
BATCHES = {
    "dqn_snake": """
def make(size, generator):
    draw = lambda n: torch.randint(n, (size,), generator=generator)
    discount = 0.9 * draw(2).float()
    return [seen[draw(len(seen))], draw(4).to(torch.int8), torch.randn(size, generator=generator), discount,
            seen[draw(len(seen))]]

script.ReplayBuffer.sample = lambda self, batch_size, generator: part_of_batch(batch_size, make)
""",
    "ppo_snake": """
# The whole job has the same games, actions and minibatches, however many ranks it has: a rank has its part of them.
make_envs, exponential, calls = script.make_envs, torch.Tensor.exponential_, count()
orders = torch.Generator().manual_seed(3)

def part_of_games(args, num_envs, device, seed):
    games = make_envs(args, num_envs * script.RANKS, device, 1)
    lanes = slice(script.RANK * num_envs, (script.RANK + 1) * num_envs)
    keys = games.key[lanes].clone()
    games = make_envs(args, num_envs, device, 1)
    games.key.copy_(keys)
    return games

def part_of_noise(self, generator):
    games = len(self) * script.RANKS
    noise = exponential(self.new_empty(games, 3), generator=torch.Generator().manual_seed(next(calls)))
    return self.copy_(noise[script.RANK * len(self) : (script.RANK + 1) * len(self)])

def part_of_order(n, **options):
    halves = [torch.randperm_(60, generator=orders).view(4, 15) for _ in range(2)]  # of 5 steps of 12 games
    if script.RANKS == 2:
        return halves[script.RANK].flatten()
    whole = [half // 12 * 24 + half % 12 + 12 * number for number, half in enumerate(halves)]
    return torch.cat(whole, 1).flatten()

script.make_envs = part_of_games
torch.Tensor.exponential_ = part_of_noise
torch.randperm_, torch.randperm = torch.randperm, part_of_order
""",
    "dqn_mario_async": """
sample = script.ReplayBuffer.sample

def batch(self, batch_size, generator, beta):
    obs, *_, slot = sample(self, batch_size, generator, beta)

    def make(size, generator):
        draw = lambda n: torch.randint(n, (size,), generator=generator)
        frames = lambda: torch.randint(256, (size, *obs.shape[1:]), generator=generator, dtype=torch.uint8)
        importance = torch.rand(size, generator=generator)
        discount = 0.9 * draw(2).float()
        reward = torch.randn(size, generator=generator)
        return [frames(), draw(5).to(torch.int8), reward, discount, frames(), importance]

    return [*part_of_batch(batch_size, make), slot]

script.ReplayBuffer.sample = batch
""",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", BATCHES)
def test_two_ranks_with_half_the_batch_learn_what_one_learns_with_all_of_it(tmp_path, name) -> None:
    """50 updates and more. For ppo_metta.py the same is in test_ppo_metta.py, with rollouts that are alike."""
    steps = {"dqn_snake": 1440, "ppo_snake": 960, "dqn_mario_async": 660}[name]
    flags = small_flags(name, total_timesteps=steps, eval_episodes=2, anneal_lr=False, seed=1)
    weights = {}
    for ranks in (1, 2):
        folder = tmp_path / str(ranks)
        folder.mkdir()
        own = dict(flags)
        if name == "dqn_mario_async":  # whose games are counted by rank
            own["envs_per_collector"] = flags["envs_per_collector"] // ranks
        started = start_ranks(folder, name, own, KEEP_NETWORK + WHOLE_BATCH + BATCHES[name], SAVE_NETWORK, ranks)
        said = finish(started)
        assert [rank.returncode for rank in started] == [0] * ranks, said
        last_weights, env_steps, first_weights = torch.load(folder / "rank0.pt")
        assert env_steps == steps
        weights[ranks] = flat(last_weights)
    moved = weights[1] - flat(first_weights)
    # Adam makes whole steps of rounding errors where a gradient is nearly 0, so a few weights are farther apart.
    assert (weights[2] - weights[1]).norm() < 0.01 * moved.norm()


@pytest.mark.slow
@pytest.mark.parametrize("name", RANKED)
def test_ranks_end_with_the_same_weights(tmp_path, name) -> None:
    """Time decides what they do together: when they log, how large a step is, when they end."""
    flags = small_flags(name, eval_every=0.5, checkpoint_every=0.3)
    if name == "dqn_mario_async":
        flags["num_collectors"] = 1  # each rank has other steps to learn from, and at other times
        flags["learning_starts"] = 50
    least = 1000 if name == "ppo_metta" else 50  # a rollout has 384, and the step size of the last one is 0
    for seconds in (4.0, 60.0):  # a busy machine may not take a step in four
        shutil.rmtree(tmp_path / "runs", ignore_errors=True)
        ranks = start_ranks(tmp_path, name, flags | {"max_seconds": seconds}, KEEP_NETWORK, SAVE_NETWORK)
        said = finish(ranks, 200)
        assert [rank.returncode for rank in ranks] == [0, 0], said
        saved = [torch.load(tmp_path / f"rank{rank}.pt") for rank in range(2)]
        (weights, steps, _), (other_weights, other_steps, _) = saved
        assert steps == other_steps
        if steps > least:
            break
    assert steps > least
    for part, value in weights.items():
        assert torch.equal(value, other_weights[part])
    out, _ = said[0]
    assert out.count("eval_score_mean") == 1 and out.count(TWO_RANKS) == 1
    assert said[1] == ("", "")
    summary = json.loads((tmp_path / "runs/run/summary.json").read_text())
    assert summary["env_steps"] == load(tmp_path / "runs/run")["global_step"] == steps
    assert len(list((tmp_path / "runs").iterdir())) == 1


@pytest.mark.slow
@pytest.mark.parametrize("first_ranks", [1, 2])
@pytest.mark.parametrize("name", ["dqn_snake", "ppo_snake"])
def test_ranks_play_games_of_their_own_also_after_a_resume(tmp_path, name, first_ranks) -> None:
    record = """
made = []
make_envs = script.make_envs

def keep(args, num_envs, device, seed):
    made.append([num_envs, seed])
    return make_envs(args, num_envs, device, seed)

script.make_envs = keep
"""
    write = 'open(f"rank{script.RANK}.json", "w").write(json.dumps(made))'
    seeds = set()
    for resume, steps, number in ((None, 480, first_ranks), ("runs/run", 960, 2)):
        flags = small_flags(name, total_timesteps=steps, resume=resume)
        ranks = start_ranks(tmp_path, name, flags, record, write, number)
        said = finish(ranks)
        assert [rank.returncode for rank in ranks] == [0] * number, said
        for rank in range(number):
            made = json.loads((tmp_path / f"rank{rank}.json").read_text())
            num_envs, seed = [each for each in made if each[0] == 24 // number][-1]
            seeds.add(seed)
    assert "new games" in said[0][0]
    assert len(seeds) == first_ranks + 2 and 1 in seeds


# ------------------------------------------------------------------------------------------------ how they end


@pytest.mark.slow
@pytest.mark.parametrize("name", RANKED)
def test_control_c_during_the_evaluation_of_one_rank_ends_all(tmp_path, name) -> None:
    slow_evaluation = """
def evaluate(*given):
    assert script.RANK == 0
    print("evaluates", flush=True)
    time.sleep(2)
    return {}

script.evaluate = evaluate
"""
    ranks = start_ranks(tmp_path, name, small_flags(name, eval_every=0.1), slow_evaluation)
    wait_for_line(ranks[0], "evaluates")
    time.sleep(0.3)
    for rank in ranks:
        rank.send_signal(signal.SIGINT)
    (out, err), (other_out, other_err) = finish(ranks, 30)
    assert not other_out and not err and "Traceback" not in other_err
    assert [rank.returncode for rank in ranks] == [0, 0]
    assert "stopped" in out and (tmp_path / "runs/run/checkpoint.pt").exists()


@pytest.mark.parametrize("name", ONE_FAST)
def test_a_lost_rank_ends_the_others_with_one_line_and_a_checkpoint(tmp_path, name) -> None:
    argv = [str(ROOT / f"{name}.py"), *command_line(small_flags(name))]
    aborts = "import atexit\natexit.register(os.abort)  # as gloo's threads do in one exit of forty\n"
    ranks = start_ranks(tmp_path, name, small_flags(name), aborts + WHOLE_SCRIPT.format(argv=argv))
    wait_for_line(ranks[0], "SPS")
    ranks[1].kill()
    (_, err), _ = finish(ranks, 30)
    assert ranks[0].returncode == 2
    assert err.count("\n") == 1, err
    assert load(tmp_path / "runs/run")["global_step"] >= 0


REFUSED = {
    "dqn_snake": ({"num_envs": 25}, "--num-envs 25: must be a multiple of the 2 processes"),
    "ppo_snake": ({"num_envs": 1}, "--num-envs 1: must be a multiple of the 2 processes"),
    "ppo_metta": ({"num_envs": 5}, "--num-envs 5: must be a multiple of the 2 processes"),
    "dqn_mario_async": ({"batch_size": 9}, "--batch-size 9: must be a multiple of the 2 processes"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ONE_FAST)
def test_what_cannot_be_dealt_out_is_refused_by_all(tmp_path, name) -> None:
    flags, line = REFUSED[name]
    ranks = start_ranks(tmp_path, name, small_flags(name, **flags))
    for rank, (_, err) in zip(ranks, finish(ranks, 60)):
        assert rank.returncode == 2 and err == f"{name}.py: {line}\n"


@pytest.mark.parametrize("name", ["dqn_snake", "dqn_mario_async"])
def test_a_replay_of_several_ranks_is_in_no_checkpoint(tmp_path, name, monkeypatch, capsys) -> None:
    script = Script(name, tmp_path)
    monkeypatch.setattr(script.module, "RANKS", 2)
    args = script.module.Args(**script.flags | {"checkpoint_replay": True})
    assert "--checkpoint-replay: " in refusal(capsys, script.module.fill_defaults, args, torch.device("cpu"))


def test_sb3s_twin_is_one_process(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "torchrun: " in refusal(capsys, Script("dqn_snake_sb3_compat", tmp_path).run)


# ------------------------------------------------------------------------------------------------ torchrun itself


def children(process: subprocess.Popen) -> list[int]:
    return [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]


def ranks_of(job: subprocess.Popen) -> list[int]:
    """Processes that torchrun started which are ranks."""
    found = []
    for pid in children(job):
        environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        if any(variable.startswith(b"LOCAL_RANK=") for variable in environment):
            found.append(pid)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", RANKED)
def test_a_rank_that_is_killed_comes_back_and_goes_on_from_the_last_checkpoint(tmp_path, name) -> None:
    flags = small_flags(name, max_seconds=12.0, checkpoint_every=0.5)
    job = torchrun(tmp_path, name, flags, "--standalone", "--nproc-per-node", 2, "--max-restarts", 1)
    file = tmp_path / "runs/run/checkpoint.pt"
    wait_for(lambda: file.exists() and load(file.parent)["global_step"] > 0)
    first = ranks_of(job)
    steps_before = load(file.parent)["global_step"]
    os.kill(first[1], signal.SIGKILL)
    out, err = job.communicate(timeout=120)
    assert job.returncode == 0, err
    assert out.count(TWO_RANKS) == 2 and out.count("eval_score_mean") == 1
    assert out.count("starts empty" if name == "dqn_mario_async" else "new games") == 1
    assert load(file.parent)["global_step"] > steps_before
    assert len(list((tmp_path / "runs").iterdir())) == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ppo_metta", "dqn_mario_async"])  # what they share is the same letter for letter
def test_two_nodes_train_together_and_one_that_leaves_ends_the_other(tmp_path, name) -> None:
    """Two torchrun agents on one machine: both finish; then one is killed together with its rank."""
    endpoint = f"localhost:{free_port()}"
    options = ["--nnodes", 2, "--nproc-per-node", 1, "--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint]
    whole = small_flags(name, max_seconds=6.0)
    nodes = [torchrun(tmp_path, name, whole, *options, "--rdzv-id", "whole") for _ in range(2)]
    said = finish(nodes)
    assert [node.returncode for node in nodes] == [0, 0], said
    for text in (TWO_RANKS, "eval_score_mean"):
        assert sum(out.count(text) for out, _ in said) == 1

    endless = small_flags(name, run_name="endless")
    nodes = [torchrun(tmp_path, name, endless, *options, "--rdzv-id", "endless") for _ in range(2)]
    wait_for(lambda: (tmp_path / "runs/endless/checkpoint.pt").exists())
    for pid in (*ranks_of(nodes[1]), nodes[1].pid):
        os.kill(pid, signal.SIGKILL)
    start = time.monotonic()
    nodes[0].communicate(timeout=60)
    assert time.monotonic() - start < 60 and nodes[0].returncode != 0
    assert load(tmp_path / "runs/endless")["script"] == name
    nodes[1].communicate()

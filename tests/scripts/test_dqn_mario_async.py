"""The Mario trainer: its ring, its replay, its collectors, its switches, what it leaves behind and what it refuses."""

import dataclasses
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from small_runs import Script, load, refusal, scalars
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import dqn_mario_async as script
from dqn_mario_async import (
    Args,
    Broadcast,
    QNetwork,
    ReplayBuffer,
    Ring,
    block_fields,
    end_epsilons,
    fill_defaults,
    main,
)
from envs import workers as plumbing
from envs.workers import SPAWN

CPU = torch.device("cpu")
CUDA = torch.device("cuda")
META = torch.device("meta")  # in place of a GPU: what would wait for a GPU raises here
ROOT = Path(__file__).parents[2]
QUICK = dict(
    device="cpu", num_collectors=0, envs_per_collector=6, size=48, channels=4, hidden_size=16, batch_size=8,
    learning_starts=200, total_timesteps=1200, buffer_size=3000, ring_blocks=16, replay_ratio=1.0, eval_episodes=3,
    eval_every=0.0, log_every=0.2, video=False, threads=1,
)  # fmt: skip
MAX_NORM = 0.4  # clips some of the gradients of the first updates and leaves others as they are
SMALL = "--device cpu --size 48 --channels 4 --hidden-size 16 --batch-size 8 --buffer-size 5000 --ring-blocks 32 "
SMALL += "--learning-starts 200 --envs-per-collector 6 --eval-every 0 --log-every 0.3 --eval-episodes 3 --threads 1 "
SMALL += "--no-video"


def shm() -> set[str]:
    return set(os.listdir("/dev/shm")) if Path("/dev/shm").is_dir() else set()


def args_of(**flags) -> Args:
    return fill_defaults(Args(**QUICK | flags), CPU)


def make_ring(args: Args) -> Ring:
    return Ring(args.ring_blocks, block_fields(args))


@pytest.fixture
def run(tmp_path):
    """Train for a moment; gives the summary and the run folder."""

    def start(**flags) -> tuple[dict, Path]:
        flags = QUICK | {"run_dir": str(tmp_path), "run_name": "run"} | flags
        return main(Args(**flags)), tmp_path / flags["run_name"]

    return start


def add_up(counts: dict, starts: int) -> bool:
    """At the end nothing is lost but at most a step of six games for each start of a collector."""
    return 0 <= counts["produced"] - counts["stored"] <= 6 * starts


@pytest.fixture
def in_threads(monkeypatch) -> list:
    """Collectors as threads of this process, which are there at once. Gives the `Collectors` of the runs."""

    class Thread:
        def __init__(self, target, args, daemon) -> None:
            self.thread = threading.Thread(target=self.run, args=args, daemon=True)
            self.exitcode = None

        def run(self, make_collector, *arguments) -> None:
            collector = make_collector(*arguments)
            while not collector.broadcast.is_over():
                collector.step()

        def start(self) -> None:
            self.thread.start()

        def join(self, timeout=None) -> None:
            self.thread.join()

        def kill(self) -> None:
            pass

    collectors, init = [], script.Collectors.__init__
    monkeypatch.setattr(SPAWN, "Process", Thread)
    monkeypatch.setattr(script.Collectors, "__init__", lambda self, *a: collectors.append(self) or init(self, *a))
    return collectors


# ------------------------------------------------------------------------------------------------ the ring


def block_of(args: Args, value: int) -> dict:
    """A block every part of which tells its number."""
    games = args.envs_per_collector
    picture = np.full((games, args.size, args.size), value % 251, np.uint8)
    return {
        "frame": picture, "final_frame": picture, "action": np.full(games, value % 7), "reward": np.full(games, value),
        "end": np.zeros(games), "length": np.full(games, value), "counts": np.full(9, value),
    }  # fmt: skip


def test_ring_wraps_fills_and_empties() -> None:
    args = args_of(ring_blocks=4)
    ring, pushed, read, rng = make_ring(args), 0, 0, np.random.default_rng(0)
    for _ in range(400):
        for _ in range(rng.integers(6)):
            taken = ring.push(block_of(args, pushed))
            assert taken == (pushed - read < 4)
            pushed += taken
        for _ in range(rng.integers(3)):
            block = ring.read()
            numbers = block["length"][:, 0].tolist()
            assert numbers == list(range(read, read + len(numbers)))
            assert len(numbers) == min(pushed - read, 4 - read % 4)  # up to the edge
            for name in ("frame", "reward", "length", "counts"):
                values = block[name].double().flatten(1)
                assert all((row == (n % 251 if name == "frame" else n)).all() for row, n in zip(values, numbers))
            ring.release(len(numbers))
            read += len(numbers)
    assert pushed > 300


def test_a_block_is_invisible_until_its_index_moves() -> None:
    """What a producer that dies in the middle of a block leaves behind is no block."""
    args = args_of(ring_blocks=4)
    ring = make_ring(args)
    ring.push(block_of(args, 0))

    class Dies:
        def __array__(self, *_, **__):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ring.push(block_of(args, 1) | {"counts": Dies()})
    assert ring.read()["length"][:, 0].tolist() == [0]
    ring.push(block_of(args, 2))
    assert ring.read()["length"][:, 0].tolist() == [0, 2]


def push_many(args: Args, ring: Ring, count: int) -> None:
    """`Ring.push` with values that cost nothing to make."""
    frame, length = (ring.fields[name].numpy() for name in ("frame", "length"))
    head, tail = ring.head.numpy(), ring.tail.numpy()
    for value in range(count):
        while value - tail[0] == ring.num_blocks:
            time.sleep(0)
        frame[value % ring.num_blocks] = value % 251
        length[value % ring.num_blocks] = value
        head[0] = value + 1


@pytest.mark.parametrize("push, count", [("whole blocks", 10_000), ("raw", 300_000)])
def test_two_processes_and_very_many_slots(push: str, count: int) -> None:
    """No block torn, lost or seen twice, while both sides run freely."""
    args = args_of(ring_blocks=64, envs_per_collector=1, buffer_size=10_000)
    ring = make_ring(args)
    process = SPAWN.Process(target=push_all if push == "whole blocks" else push_many, args=(args, ring, count))
    process.start()
    expected = 0
    while expected < count:
        block = ring.read()
        if not len(block["length"]):
            assert process.is_alive() or ring.head.item() > expected
            continue
        numbers = torch.arange(expected, expected + len(block["length"]))
        assert torch.equal(block["length"].flatten(), numbers)
        assert (block["frame"].flatten(1) == (numbers % 251)[:, None]).all()
        expected += len(numbers)
        ring.release(len(numbers))
    process.join(10)
    assert process.exitcode == 0


def push_all(args: Args, ring: Ring, count: int) -> None:
    for value in range(count):
        while not ring.push(block_of(args, value)):
            time.sleep(0)


def publish_many(broadcast: Broadcast, count: int) -> None:
    weights = broadcast.slots[0].clone()
    for number in range(1, count):
        broadcast.publish(weights.fill_(number), number)


def test_weights_are_never_torn() -> None:
    broadcast = Broadcast(torch.zeros(30_000))
    process = SPAWN.Process(target=publish_many, args=(broadcast, 3000))
    process.start()
    got, seen = torch.zeros(30_000), set()
    alive = True
    while alive:
        alive = process.is_alive()
        version, updates = broadcast.fetch(got)
        assert version == updates and got[0] == updates and (got == got[0]).all()
        seen.add(version)
    assert max(seen) == 2999 and len(seen) > 5


def test_weights_of_a_gpu_are_handed_out_when_they_have_arrived(monkeypatch) -> None:
    """Not before, none twice, and those under way before the next ones."""

    class Event:
        arrived, waits = False, 0

        def record(self) -> None:
            self.arrived = False

        def query(self) -> bool:
            return self.arrived

        def synchronize(self) -> None:
            self.arrived = True
            self.waits += 1

    monkeypatch.setattr(torch.cuda, "Event", Event)
    broadcast, got = Broadcast(torch.zeros(3)), torch.zeros(3)
    publisher = script.Publisher(broadcast, asynchronous=True)
    publisher.publish(torch.full((3,), 1.0), 5)
    publisher.poll()
    assert broadcast.version == 0
    publisher.copy_event.arrived = True
    publisher.poll()
    publisher.poll()
    assert broadcast.fetch(got) == (1, 5) and (got == 1).all()
    publisher.publish(torch.full((3,), 2.0), 10)
    assert publisher.copy_event.waits == 0
    publisher.publish(torch.full((3,), 3.0), 15)
    assert publisher.copy_event.waits == 1
    assert broadcast.fetch(got) == (2, 10) and (got == 2).all()


def test_another_processor_gets_locks(run, monkeypatch, in_threads) -> None:
    monkeypatch.setattr(plumbing, "ORDERED", True)
    assert not hasattr(plumbing.make_fence(), "lock")
    monkeypatch.setattr(plumbing, "ORDERED", False)
    assert hasattr(make_ring(args_of()).fence, "lock")
    summary, _ = run(num_collectors=1)
    assert add_up(summary, 1)


def hold(fence: plumbing.Fence) -> None:
    fence.lock.acquire()
    os.kill(os.getpid(), signal.SIGKILL)


def test_who_is_killed_with_a_lock_stops_nobody(monkeypatch) -> None:
    monkeypatch.setattr(plumbing, "ORDERED", False)
    args = args_of()
    ring, broadcast = make_ring(args), Broadcast(torch.zeros(8))
    for fence in (ring.fence, broadcast.fence):
        process = SPAWN.Process(target=hold, args=(fence,))
        process.start()
        process.join()
        assert not fence.lock.acquire(block=False)
    began = time.monotonic()
    for value in range(3):
        assert ring.push(block_of(args, value))
        broadcast.publish(torch.full((8,), value), value)
    assert len(ring.read()["length"]) == 3 and broadcast.fetch(torch.zeros(8)) == (3, 2)
    assert 2 <= time.monotonic() - began < 20  # a second for each lock, once


def test_a_lock_may_be_freed_twice() -> None:
    """By its slow holder, and before that by who had waited long enough."""
    fence = plumbing.Fence()
    with fence:
        fence.lock.release()
    with fence:
        assert not fence.lock.acquire(block=False)
    assert fence.lock.acquire(block=False)


# ------------------------------------------------------------------------------------------------ the replay


def history_of(args: Args, steps: int, seed: int, crashes: bool = False) -> list[dict]:
    """Blocks of made-up games with both ends; with crashes, a new collector with new games takes over at times."""
    rng, games = np.random.default_rng(seed), args.envs_per_collector
    length, history = np.zeros(games, int), []
    for _ in range(steps):
        crashed = crashes and rng.random() < 0.1
        length[:] = 1 if crashed else length + 1
        end = rng.choice([0, 1, 2], p=[0.85, 0.07, 0.08], size=games)
        frame, final = (rng.integers(256, size=(games, args.size, args.size), dtype=np.uint8) for _ in range(2))
        # the newest frame before a step is the one after the step before, unless a game ended in between
        if history:
            frame = np.where((length > 1)[:, None, None], history[-1]["final_frame"], frame)
        block = {
            "frame": frame, "final_frame": final, "action": rng.integers(args.actions, size=games, dtype=np.int8),
            "reward": rng.normal(size=games).astype(np.float32), "end": end.astype(np.uint8), "length": length.copy(),
            "counts": np.zeros(9),
        }  # fmt: skip
        history.append(block | {"crashed": crashed})
        length[end > 0] = 0
    return history


def stack_blocks(blocks: list[dict]) -> dict[str, torch.Tensor]:
    return {name: torch.as_tensor(np.stack([b[name] for b in blocks])) for name in blocks[0] if name != "crashed"}


def stacked(history: list[dict], step: int, game: int, stack: int, final: bool = False) -> np.ndarray:
    """What a game looked like before (or, final, after) a step, put together the slow way."""
    frames = [history[step]["final_frame"][game]] if final else []
    at, frame = step, history[step]["frame"][game]
    while len(frames) < stack:
        frames.append(frame)
        if history[at]["length"][game] > 1:
            at -= 1
            frame = history[at]["frame"][game]
    return np.stack(frames[::-1])


@pytest.mark.parametrize("crashes", [False, True])
@pytest.mark.parametrize("n_step", [1, 3])
def test_frames_stored_once_against_whole_stacks(n_step: int, crashes: bool) -> None:
    """Every transition that can be drawn, number for number, after rings of two collectors have wrapped many times."""
    args = args_of(
        num_collectors=2, envs_per_collector=3, n_step=n_step, buffer_size=6 * 40, learning_starts=0, ring_blocks=8
    )
    replay, rng = ReplayBuffer(args, CPU), np.random.default_rng(1)
    histories = [history_of(args, 150, seed, crashes) for seed in range(2)]
    place = {}  # reward -> (collector, step, game): rewards are all different
    for number, history in enumerate(histories):
        for step, block in enumerate(history):
            place |= {float(block["reward"][game]): (number, step, game) for game in range(3)}
    sent = [0, 0]
    while min(sent) < 150:
        number = int(sent[1] < sent[0])
        count = int(rng.integers(1, 9))
        blocks = histories[number][sent[number] : sent[number] + count]
        sent[number] += count
        if blocks:
            replay.add(number * 3, stack_blocks(blocks))

    slots = replay.priority.nonzero().flatten()
    assert len(slots) > 120
    obs, action, _, discount, next_obs = replay.transitions_at(slots)
    reward = replay.transitions_at(slots)[2]
    drawn = Counter()
    for i, slot in enumerate(slots.tolist()):
        number, step, game = place[float(replay.reward[slot])]
        history = histories[number]
        drawn[number] += 1
        expected, factor, at = 0.0, 1.0, step
        for at in range(step, step + n_step):
            if at > step and history[at]["crashed"]:  # the game was cut off before this
                at -= 1
                break
            expected += factor * history[at]["reward"][game]
            factor *= args.gamma
            if history[at]["end"][game] == script.TERMINATED:
                factor = 0.0
            if history[at]["end"][game]:
                break
        if not history[at]["end"][game] and at + 1 < len(history) and history[at + 1]["crashed"]:
            # What followed the last step before a crash was lost, so the return ends one reward earlier.
            expected -= args.gamma ** (at - step) * history[at]["reward"][game]
            factor /= args.gamma
            at -= 1
        assert at >= step
        np.testing.assert_array_equal(obs[i], stacked(history, step, game, args.stack))
        np.testing.assert_array_equal(next_obs[i], stacked(history, at, game, args.stack, final=True))
        assert action[i] == history[step]["action"][game]
        assert reward[i].item() == pytest.approx(expected, abs=1e-5)
        assert discount[i].item() == pytest.approx(factor, abs=1e-6)
    if not crashes:  # all that is new enough, but the frames an older one needs and the newest without a successor
        assert min(drawn.values()) > 3 * 40 * 0.75 - 3 * (n_step + args.stack) - 3
    assert set(drawn) == {0, 1}


def test_what_the_environment_shows_is_what_comes_out_of_the_replay() -> None:
    """A real collector, its ring and the replay, against observations kept whole."""
    args = args_of(n_step=1, ring_blocks=32)
    broadcast = Broadcast(torch.cat([w.detach().flatten() for w in QNetwork(args).parameters()]))
    broadcast.publish(broadcast.slots[0].clone(), 0)
    ring, seen = make_ring(args), []
    collector = script.Collector(args, 0, 0, ring, broadcast)
    step = collector.envs.step

    def watched(action):
        before = collector.obs.copy()
        obs, reward, terminated, truncated, info = step(action)
        seen.append((before, action.copy(), reward.copy(), terminated.copy(), info["final_obs"].copy()))
        return obs, reward, terminated, truncated, info

    collector.envs.step = watched
    replay = ReplayBuffer(args, CPU)
    for _ in range(300):
        collector.step()
        if ring.head - ring.tail > 5:
            block = ring.read()
            replay.add(0, block)
            ring.release(len(block["length"]))
    games = args.envs_per_collector
    for game in range(games):
        first_slot = game * replay.capacity
        slots = torch.arange(first_slot, first_slot + int(replay.position[game]))
        slots = slots[replay.priority[slots] > 0]
        obs, action, reward, discount, next_obs = replay.transitions_at(slots)
        assert len(slots) > 280
        for i in range(len(slots)):
            before, acted, rewarded, terminated, final_obs = (part[game] for part in seen[i])
            np.testing.assert_array_equal(obs[i], before)
            np.testing.assert_array_equal(next_obs[i], final_obs)
            assert action[i] == acted and reward[i] == rewarded
            assert discount[i].item() == pytest.approx(0 if terminated else args.gamma)


def test_draws_follow_priorities() -> None:
    args = args_of(buffer_size=3000, learning_starts=0)
    replay, generator = ReplayBuffer(args, CPU), torch.Generator().manual_seed(0)
    replay.priority[[3, 300, 301, 2999]] = torch.tensor([1.0, 2.0, 3.0, 4.0])
    drawn = torch.cat([replay.sample_slots(50, generator) for _ in range(400)])
    counts = Counter(drawn.tolist())
    assert set(counts) == {3, 300, 301, 2999}
    for slot, share in ((3, 0.1), (300, 0.2), (301, 0.3), (2999, 0.4)):
        assert counts[slot] / 20_000 == pytest.approx(share, abs=0.01)


def test_importance_weights_and_priorities() -> None:
    args = args_of(alpha=0.6, learning_starts=0)
    replay, generator = ReplayBuffer(args, CPU), torch.Generator().manual_seed(0)
    priorities = torch.tensor([1.0, 2.0, 5.0])
    replay.priority[:3] = priorities
    *_, weight, slot = replay.sample(64, generator, torch.tensor(0.7))
    probability = (priorities / priorities.sum()).double().numpy()
    expected = (3 * probability) ** -0.7
    np.testing.assert_allclose(weight, (expected / expected.max())[slot], rtol=1e-5)
    replay.update_priorities(torch.tensor([0, 2]), torch.tensor([-3.0, math.nan]))
    assert replay.priority[0].item() == pytest.approx(3.001**0.6) and replay.priority[1] == 2
    assert replay.priority[2].item() == pytest.approx(0.001**0.6)
    assert replay.max_priority.item() == pytest.approx(3.001**0.6)


def test_new_transitions_enter_at_top_priority_and_alpha_0_is_uniform() -> None:
    args = args_of(num_collectors=1, n_step=1)
    for top in (1.0, 7.0):
        replay = ReplayBuffer(args, CPU)
        replay.max_priority.fill_(top)
        replay.add(0, stack_blocks(history_of(args, 30, 0)))
        assert set(replay.priority.tolist()) == {0.0, top}
    uniform = ReplayBuffer(args_of(alpha=0.0), CPU)
    uniform.update_priorities(torch.tensor([1, 2]), torch.tensor([0.1, 100.0]))
    assert uniform.priority[1] == uniform.priority[2] == 1


class Launches(TorchDispatchMode):
    """Operations on META, and copies between it and the CPU. Pinned memory is plain memory here.

    With `data`, what goes to META stays on the CPU instead.
    """

    def __init__(self, data: bool = False) -> None:
        super().__init__()
        self.data, self.launches, self.copies = data, [], []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = {name: value for name, value in (kwargs or {}).items() if name != "pin_memory"}
        if self.data and kwargs.get("device") == META:
            kwargs["device"] = CPU
        result = function(*args, **kwargs)
        tensors = [x for x in tree_leaves((args, kwargs, result)) if isinstance(x, torch.Tensor)]
        devices = {tensor.device for tensor in tensors}
        if META in devices and not function.is_view:
            self.launches.append(str(function))
        # x[index] = number: on CUDA it is put together on the CPU.
        number = META in devices and str(function) == "aten.scalar_tensor.default"
        if number or len(devices) > 1:
            self.copies.append((str(function), kwargs.get("non_blocking", False)))
        return result


def test_a_ring_read_is_one_copy_that_nobody_waits_for() -> None:
    """And after it neither storing nor drawing takes anything from the CPU, or waits."""
    args = args_of(num_collectors=1)
    replay = ReplayBuffer(args, META)
    blocks = stack_blocks(history_of(args, 40, 0, crashes=True))
    assert (blocks["end"] > 0).any() and (blocks["length"][1:] == 1).all(1).any()
    with Launches() as store:
        replay.add(0, blocks)
    assert store.copies == [("aten._to_copy.default", True)]
    assert len(store.launches) <= 28, store.launches
    generator, beta = torch.Generator(), torch.ones((), device=META)
    with Launches() as learn:
        *_, slot = replay.sample(8, generator, beta)
        replay.update_priorities(slot, torch.zeros(8, device=META))
    assert not learn.copies
    assert 0 < len(learn.launches) <= 90, learn.launches


def test_packed_for_a_gpu_or_not_the_replay_is_the_same(monkeypatch) -> None:
    args, to_device, packed = args_of(num_collectors=1), script.to_device, []

    def through_packing(tensors: dict, device: torch.device) -> dict:
        with Launches(data=True):
            packed.append(to_device(tensors, META))
        return packed[-1]

    plain, other = ReplayBuffer(args, CPU), ReplayBuffer(args, CPU)
    history = history_of(args, 90, 0, crashes=True)
    for first in range(0, 90, 9):
        plain.add(0, stack_blocks(history[first : first + 9]))
    monkeypatch.setattr(script, "to_device", through_packing)
    for first in range(0, 90, 9):
        other.add(0, stack_blocks(history[first : first + 9]))
    assert len(packed) == 10 and len({part.untyped_storage().data_ptr() for part in packed[-1].values()}) == 1
    for name, tensor in plain.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[name]), name


def test_replay_takes_less_than_8_kib_a_transition() -> None:
    args = args_of(size=84)
    replay = ReplayBuffer(args, CPU)
    tensors = [value for value in replay.state_dict().values()]
    held = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    assert held / (replay.num_games * replay.capacity) / 1024 < 7.1  # the frame alone is 6.9


# ------------------------------------------------------------------------------------------------ maths


def test_epsilons_spread_over_all_games() -> None:
    args = args_of(num_collectors=3, envs_per_collector=4, end_e=0.4, epsilon_alpha=7.0, buffer_size=10_000)
    ends = np.concatenate([end_epsilons(args, number, None) for number in range(3)])
    np.testing.assert_allclose(ends, [0.4 ** (1 + 7 * i / 11) for i in range(12)])
    np.testing.assert_allclose(script.linear_schedule(1.0, ends, 0.1, 0.0), np.ones(12))
    np.testing.assert_allclose(script.linear_schedule(1.0, ends, 0.1, 0.05), (1 + ends) / 2)
    np.testing.assert_allclose(script.linear_schedule(1.0, ends, 0.1, 0.5), ends)
    np.testing.assert_allclose(script.linear_schedule(1.0, ends, 0.0, 0.0), ends)


def test_a_lone_game_explores_like_all_of_them_one_episode_after_the_other() -> None:
    """With 20 % random actions for ever the real game's flag is out of reach."""
    for num_collectors in (1, 3):
        args, rng = args_of(num_collectors=num_collectors, envs_per_collector=1), np.random.default_rng(0)
        ends = np.concatenate([end_epsilons(args, num_collectors - 1, rng) for _ in range(5000)])
        places = np.sort((np.log(ends) / np.log(args.end_e) - 1) / args.epsilon_alpha)
        np.testing.assert_allclose(places, np.linspace(0, 1, 5000), atol=0.03)
    broadcast = Broadcast(torch.cat([w.detach().flatten() for w in QNetwork(args).parameters()]))
    broadcast.progress.fill_(1)
    ring, by_episode, episode = make_ring(args_of(envs_per_collector=1, ring_blocks=400, num_collectors=1)), {}, 0
    collector = script.Collector(args, 0, 0, ring, broadcast)
    for _ in range(400):
        by_episode.setdefault(episode, set()).add(collector.end_e.item())
        collector.step()
        episode += bool(ring.fields["end"][ring.head.item() - 1])
    assert len(by_episode) > 5 and all(len(shares) == 1 for shares in by_episode.values())
    assert len(set.union(*by_episode.values())) == len(by_episode)


def test_dueling_and_he_initialisation() -> None:
    args = args_of(size=84, channels=32, hidden_size=512)
    q_network = QNetwork(args)
    obs = torch.randint(256, (5, 4, 84, 84), dtype=torch.uint8)
    x = F.relu(q_network.conv1(obs.float() / 255))
    x = F.relu(q_network.norm(q_network.hidden(F.relu(q_network.conv3(F.relu(q_network.conv2(x)))).flatten(1))))
    out = q_network.head(x)
    torch.testing.assert_close(q_network(obs), out[:, -1:] + out[:, :-1] - out[:, :-1].mean(1, keepdim=True))
    assert q_network.hidden.in_features == 3136 and q_network(obs).shape == (5, 7)
    for layer in (q_network.conv1, q_network.conv2, q_network.conv3, q_network.hidden):
        assert layer.weight.std().item() == pytest.approx((2 / layer.weight[0].numel()) ** 0.5, rel=0.05)
        assert not layer.bias.any()


def test_accumulated_gradients_are_those_of_one_large_batch(run, monkeypatch) -> None:
    """Two gradients of 8 and one of 16 see the same number of transitions, and take updates equally often."""
    one, two = run(batch_size=16)[0], run(accumulate=2, run_name="two")[0]
    assert one["updates_per_second"] > 0 and two["replay_ratio"] == pytest.approx(one["replay_ratio"])
    sampled, sample = [], ReplayBuffer.sample
    monkeypatch.setattr(ReplayBuffer, "sample", lambda self, n, *rest: sampled.append(n) or sample(self, n, *rest))
    _, folder = run(accumulate=2, run_name="three")
    assert len(sampled) == 2 * load(folder)["updates"] and set(sampled) == {8}


def values_of(weights: dict[str, torch.Tensor], obs: torch.Tensor) -> torch.Tensor:
    """The network written out, in double precision."""
    x = obs.double() / 255
    for layer, stride in (("conv1", 4), ("conv2", 2), ("conv3", 1)):
        x = F.conv2d(x, weights[f"{layer}.weight"], weights[f"{layer}.bias"], stride).clamp(min=0)
    x = x.flatten(1) @ weights["hidden.weight"].T + weights["hidden.bias"]
    x = x - x.mean(1, keepdim=True)
    x = x / (x.square().mean(1, keepdim=True) + 1e-5).sqrt() * weights["norm.weight"] + weights["norm.bias"]
    x = x.clamp(min=0) @ weights["head.weight"].T + weights["head.bias"]
    return x[:, -1:] + x[:, :-1] - x[:, :-1].mean(1, keepdim=True)


@pytest.mark.parametrize("double", [True, False])
def test_the_whole_update_against_one_that_is_written_out(run, monkeypatch, double) -> None:
    """Loss, importance weights, annealing, accumulation, clipping, AdamW and target network, from the seed on."""
    drawn, td_errors, stored = [], [], [0]
    sample, update_priorities, add = ReplayBuffer.sample, ReplayBuffer.update_priorities, ReplayBuffer.add

    def watched_sample(self, size, generator, beta) -> list:
        priority = self.priority.clone()
        batch = sample(self, size, generator, beta)
        drawn.append((stored[0] / 240, priority, [part.clone() for part in batch]))
        return batch

    def watched_update(self, slot, td_error) -> None:
        td_errors.append(td_error.clone())
        update_priorities(self, slot, td_error)

    def watched_add(self, first_game, block) -> None:
        stored[0] += block["end"].numel()
        add(self, first_game, block)

    monkeypatch.setattr(ReplayBuffer, "sample", watched_sample)
    monkeypatch.setattr(ReplayBuffer, "update_priorities", watched_update)
    monkeypatch.setattr(ReplayBuffer, "add", watched_add)
    flags = dict(accumulate=2, n_step=2, learning_starts=100, total_timesteps=240, learning_rate=3e-3, weight_decay=0.1)
    flags |= dict(tau=0.3, target_network_frequency=2, max_grad_norm=MAX_NORM, alpha=0.6, beta=0.4, double=double)
    _, folder = run(**flags)

    args = args_of(**flags)
    torch.manual_seed(args.seed)
    weights = {name: w.detach().double() for name, w in QNetwork(args).named_parameters()}
    target = {name: w.clone() for name, w in weights.items()}
    first, second = ({name: torch.zeros_like(w) for name, w in weights.items()} for _ in range(2))
    norms = []
    for n in range(1, len(drawn) // 2 + 1):
        leaves = {name: w.clone().requires_grad_() for name, w in weights.items()}
        gradients = {name: 0 for name in weights}
        for (progress, priority, batch), td in zip(drawn[2 * n - 2 : 2 * n], td_errors[2 * n - 2 : 2 * n]):
            obs, action, reward, discount, next_obs, _, slot = batch
            chance = priority[slot].double() / priority.double().sum()
            importance = ((priority > 0).sum() * chance) ** -(0.4 + 0.6 * progress)
            next_q = values_of(target, next_obs)
            choice = (values_of(weights, next_obs) if double else next_q).argmax(1)
            returned = reward + discount * next_q[torch.arange(8), choice]
            error = values_of(leaves, obs)[torch.arange(8), action.long()] - returned
            np.testing.assert_allclose(td, error.detach(), atol=1e-4)
            huber = torch.where(error.abs() < 1, error.square() / 2, error.abs() - 0.5)
            loss = (importance / importance.max() * huber).sum() / 8
            for name, gradient in zip(leaves, torch.autograd.grad(loss, leaves.values())):
                gradients[name] += gradient / 2
        norms.append(math.sqrt(sum(gradient.square().sum() for gradient in gradients.values())))
        rate = 3e-3 * 0.1**progress
        for name, gradient in gradients.items():
            gradient = gradient * min(1, MAX_NORM / norms[-1])
            first[name] = 0.9 * first[name] + 0.1 * gradient
            second[name] = 0.999 * second[name] + 0.001 * gradient.square()
            step = first[name] / (1 - 0.9**n) / ((second[name] / (1 - 0.999**n)).sqrt() + 1e-8)
            weights[name] = weights[name] * (1 - rate * 0.1) - rate * step
            if n % 2 == 0:
                target[name] = 0.7 * target[name] + 0.3 * weights[name]
    assert len(norms) > 6 and sum(norm < MAX_NORM for norm in norms) in range(2, len(norms) - 1), norms
    saved = load(folder)
    for name in weights:
        np.testing.assert_allclose(saved["q_network"][name], weights[name], atol=1e-4, err_msg=name)
        np.testing.assert_allclose(saved["target_network"][name], target[name], atol=1e-4, err_msg=name)


@pytest.mark.parametrize("games", [1, 6])
def test_a_collector_plays_what_the_newest_weights_say(games: int) -> None:
    args = args_of(envs_per_collector=games, num_collectors=1, start_e=0.0, end_e=0.0)
    q_network = QNetwork(args).requires_grad_(False)
    broadcast, ring = Broadcast(torch.cat([w.flatten() for w in q_network.parameters()])), make_ring(args)
    collector = script.Collector(args, 0, 0, ring, broadcast)
    for version in range(1, 8):
        for weight in q_network.parameters():
            weight.add_(0.3 * torch.randn_like(weight))
        broadcast.publish(torch.cat([w.flatten() for w in q_network.parameters()]), 10 * version)
        expected = q_network(torch.from_numpy(collector.obs)).argmax(1)
        collector.step()
        assert torch.equal(ring.fields["action"][version - 1], expected.to(torch.int8))
        assert ring.fields["updates"][version - 1] == 10 * version


@pytest.mark.parametrize("games", [1, 6])
def test_exploring_asks_no_network(games: int) -> None:
    args = args_of(envs_per_collector=games, num_collectors=1, start_e=1.0, end_e=1.0)
    broadcast = Broadcast(torch.cat([w.detach().flatten() for w in QNetwork(args).parameters()]))
    ring = make_ring(args)
    collector = script.Collector(args, 0, 0, ring, broadcast)
    collector.q_network = None
    collector.version = broadcast.version.item()
    for _ in range(16):
        collector.step()
    assert len(ring.fields["action"].unique()) > 3


# ------------------------------------------------------------------------------------------------ collectors


def test_counters_are_exact_when_the_ring_is_full(run, monkeypatch, in_threads, capsys) -> None:
    """At every log and at the end, with a slow learner."""
    first_games, add = set(), ReplayBuffer.add

    def slow(self, first_game, block) -> None:
        first_games.add(first_game)
        time.sleep(0.05)
        add(self, first_game, block)

    monkeypatch.setattr(ReplayBuffer, "add", slow)
    summary, folder = run(num_collectors=2, ring_blocks=4, log_every=0.1, checkpoint_replay=True)
    logged = scalars(folder)
    unread = np.subtract(logged["collect/produced"], logged["collect/stored"])
    assert len(unread) > 3 and unread.max() > 0
    assert all(0 <= steps <= 2 * 6 * (4 + 1) for steps in unread)  # in two full rings of 4 blocks, and 1 in the making
    assert add_up(summary, 2)
    assert summary["stored"] == summary["env_steps"] == load(folder)["global_step"] >= 1200
    assert summary["producer_wait_ms_mean"] > 1
    waits = logged["collect/producer_wait_ms_mean"][1:]
    assert summary["producer_wait_ms_mean"] == pytest.approx(np.mean(waits), rel=0.5)
    position = load(folder)["replay"]["position"]
    assert first_games == {0, 6} and (position > 0).all()  # each collector has its own slots


@pytest.mark.parametrize("broken", ["lost", "twice"])
def test_counters_show_lost_steps(run, monkeypatch, in_threads, broken) -> None:
    """Blocks that vanish between collector and replay, or come out twice."""
    push = Ring.push

    def faulty(self, block) -> bool:
        if broken == "lost" and self.steps.item() > 20:
            return True
        return push(self, block) and (broken == "lost" or push(self, block))

    monkeypatch.setattr(Ring, "push", faulty)
    summary, _ = run(num_collectors=1, ring_blocks=64, total_timesteps=10**6, max_seconds=1.0, log_every=0.1)
    assert not add_up(summary, 1)


def test_each_collector_has_its_own_games_numbers_shares_and_ring(monkeypatch) -> None:
    class Process:
        made, exitcode = [], None

        def __init__(self, target, args, daemon) -> None:
            self.made.append(args)

        def start(self) -> None:
            pass

    monkeypatch.setattr(SPAWN, "Process", Process)
    args = args_of(num_collectors=3, buffer_size=5000)
    broadcast = Broadcast(torch.cat([w.detach().flatten() for w in QNetwork(args).parameters()]))
    rings = [make_ring(args) for _ in range(3)]
    processes = script.Collectors(partial(script.Collector, args), rings, broadcast)
    processes.starts = 5
    processes.start([signal.SIGINT])
    processes.processes[1].exitcode = -9
    processes.restart_dead()
    collectors = [make_collector(*arguments) for make_collector, *arguments in Process.made]
    assert [(a[1], a[2]) for a in Process.made] == [(0, 5), (1, 6), (2, 7), (1, 8)]
    assert [collector.ring for collector in collectors] == [*rings, rings[1]]
    assert len({stream.key for collector in collectors for stream in collector.envs.streams}) == 4 * 6
    assert len({collector.rng.random() for collector in collectors}) == 4
    ends = np.concatenate([collector.end_e for collector in collectors[:3]])
    np.testing.assert_allclose(ends, [0.2 ** (1 + 3 * i / 17) for i in range(18)])


def test_the_online_network_is_handed_out(run, monkeypatch) -> None:
    published, publish = [], Broadcast.publish
    monkeypatch.setattr(
        Broadcast, "publish", lambda self, w, n: published.append((w.clone(), n)) or publish(self, w, n)
    )
    _, folder = run(sync_every=1, tau=1e-3, total_timesteps=400)
    saved = load(folder)
    weights = torch.cat([weight.flatten() for weight in saved["q_network"].values()])
    assert published[-1][1] == saved["updates"] > 3 and torch.equal(published[-1][0], weights)
    target = torch.cat([weight.flatten() for weight in saved["target_network"].values()])
    assert not torch.equal(target, weights)


def test_a_learner_that_falls_behind_lets_go_of_the_rest(run) -> None:
    """At most 100 updates are due, of 750 that a step of six games would ask for."""
    _, folder = run(replay_ratio=1000.0, total_timesteps=216)
    saved = load(folder)
    rounds = (216 - 200) // 6 + 1
    assert 100 * (rounds - 1) < saved["updates"] <= 100 * rounds and saved["samples_due"] <= 100 * 8


def test_speeds_count_the_steps_of_their_seconds_only(run, monkeypatch, in_threads) -> None:
    """Collectors play on while an evaluation takes its time, which counts nowhere."""
    meanwhile, seconds = [], []
    evaluate, read = script.evaluate, script.PhaseTimer.read

    def slow(*arguments) -> dict:
        steps = in_threads[0].rings[0].steps
        before = steps.item()
        time.sleep(0.4)
        meanwhile.append(6 * (steps.item() - before))
        return evaluate(*arguments)

    def summed(self) -> Counter:
        got = read(self)
        seconds.append(sum(got.values()))
        return got

    monkeypatch.setattr(script, "evaluate", slow)
    monkeypatch.setattr(script.PhaseTimer, "read", summed)
    flags = dict(ring_blocks=400, buffer_size=6000, eval_every=0.1, total_timesteps=2500)
    summary, _ = run(num_collectors=1, **flags)
    timed = summary["env_steps_per_second"] * sum(seconds)
    assert sum(meanwhile) > 300
    assert 0 < timed <= summary["produced"] - sum(meanwhile) + 1e-6


def test_collectors_are_asked_to_end_before_they_are_killed(run) -> None:
    """And nothing is left of them."""
    torch.optim.AdamW([torch.zeros(1)])  # the first of a process sets an environment variable
    environment, before = dict(os.environ), shm()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    stop, codes = script.Collectors.stop, []

    def watched(self) -> None:
        stop(self)
        codes[:] = [process.exitcode for process in self.processes]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(script.Collectors, "stop", watched)
        summary, _ = run(num_collectors=1, total_timesteps=600, log_every=0.1)
    assert codes == [0] and add_up(summary, 1)
    assert dict(os.environ) == environment and shm() == before
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == mask and not SPAWN.active_children()


def born(queue) -> None:
    deaf = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    queue.put((os.environ["OMP_NUM_THREADS"], os.environ["MKL_NUM_THREADS"], signal.SIGTERM in deaf))


def test_a_collector_has_one_thread_and_is_deaf_from_its_birth_on(monkeypatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.delenv("MKL_NUM_THREADS", raising=False)
    queue = SPAWN.SimpleQueue()
    process = SPAWN.Process(target=born, args=(queue,))
    with plumbing.worker_environment():
        process.start()
    assert queue.get() == ("1", "1", True)
    assert os.environ["OMP_NUM_THREADS"] == "7" and "MKL_NUM_THREADS" not in os.environ
    process.join()


def test_a_killed_collector_is_replaced_and_what_it_committed_is_kept(tmp_path, monkeypatch, capfd) -> None:
    killed, add = [], ReplayBuffer.add

    def kill_once(self, *arguments):
        add(self, *arguments)
        if len(killed) < 2 and self.position.sum() > 500 * (len(killed) + 1):
            killed.append(SPAWN.active_children()[0].pid)
            os.kill(killed[-1], signal.SIGKILL)

    collectors, init = [], script.Collectors.__init__
    monkeypatch.setattr(script.Collectors, "__init__", lambda self, *a: collectors.append(self) or init(self, *a))
    monkeypatch.setattr(ReplayBuffer, "add", kill_once)
    flags = dict(num_collectors=1, total_timesteps=4000, run_dir=str(tmp_path), run_name="run")
    summary = main(Args(**QUICK | flags))
    assert collectors[0].starts == 3 and len(set(killed)) == 2 and add_up(summary, 3)
    assert summary["stored"] == 6 * sum(ring.tail.item() for ring in collectors[0].rings) == summary["env_steps"]
    assert capfd.readouterr().err.count("exit code -9 and is replaced") == 2


class NoCollector:
    def __init__(self, *arguments) -> None:
        raise ZeroDivisionError("no games\ntoday")


def test_collectors_that_cannot_play_end_the_run(tmp_path, monkeypatch, capfd) -> None:
    monkeypatch.setattr(script, "Collector", NoCollector)
    with pytest.raises(ChildProcessError, match="three collectors in a row ended before they played, see above"):
        main(Args(**QUICK | dict(num_collectors=1, run_dir=str(tmp_path))))
    said = capfd.readouterr().err
    assert "Traceback" not in said
    assert said.count("collector 0: ZeroDivisionError (no games today)") == 3
    assert not SPAWN.active_children() and not list(tmp_path.glob("*/checkpoint.pt"))


def test_what_was_learned_is_saved_when_no_collector_can_be_had(run, monkeypatch, in_threads, tmp_path, capsys) -> None:
    restart_dead, calls = script.Collectors.restart_dead, []

    def fail(self) -> None:
        calls.append(0)
        if self.broadcast.version.item() > 3:
            raise BlockingIOError("no more processes")
        restart_dead(self)

    monkeypatch.setattr(script.Collectors, "restart_dead", fail)
    with pytest.raises(SystemExit) as error:
        run(num_collectors=1, total_timesteps=10**6, log_every=100.0)
    assert error.value.code == 2 and "no more processes; --resume" in capsys.readouterr().err
    assert load(tmp_path / "run")["updates"] >= 10


def wait_for(process: subprocess.Popen, text: str) -> None:
    while text not in (line := process.stdout.readline()):
        assert line, "ended early"


def children(pid: int) -> list[int]:
    found = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True).stdout
    return [int(number) for number in found.split()]


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_no_orphans_and_no_shared_memory_left(tmp_path, number: int) -> None:
    """Ctrl-C reaches the whole process group, SIGKILL only the learner."""
    before = shm()
    command = [sys.executable, "dqn_mario_async.py", "--run-dir", str(tmp_path), "--run-name", "run", *SMALL.split()]
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        [*command, "--num-collectors", "2"], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=environment, start_new_session=True,
    ) as process:  # fmt: skip
        wait_for(process, "[TRAIN]")
        started = children(process.pid)
        assert len(started) >= 2
        began = time.monotonic()
        (os.kill if number == signal.SIGKILL else os.killpg)(process.pid, number)
        out, err = process.communicate(timeout=60)
        took = time.monotonic() - began
    while not all(map(gone, started)) and time.monotonic() - began < 10:
        time.sleep(0.05)
    assert all(map(gone, started)) and shm() <= before
    if number != signal.SIGKILL:
        assert process.returncode == 0 and took < 20 and "Traceback" not in err and "is replaced" not in err, err
        assert f"--resume {tmp_path / 'run'}" in out
        assert add_up(json.loads((tmp_path / "run" / "summary.json").read_text()), 2)


# ------------------------------------------------------------------------------------------------ resuming


@pytest.mark.parametrize("num_collectors", [0, 1])
def test_resuming_goes_on_counting(run, capsys, num_collectors, in_threads) -> None:
    first, folder = run(num_collectors=num_collectors)
    saved, total = load(folder), first["env_steps"] + 600
    saved["samples_due"] = 800.0  # a learner that had fallen behind must not learn from an empty replay
    torch.save(saved, folder / "checkpoint.pt")
    summary, _ = run(num_collectors=num_collectors, resume="latest", total_timesteps=total)
    assert "the replay starts empty" in capsys.readouterr().out
    assert add_up(summary, 2) and summary["produced"] >= summary["env_steps"] >= total


def test_a_resumed_run_has_what_was_saved(run, monkeypatch) -> None:
    """With an empty replay nothing is learned. In float16 the scaler has a state, too."""
    monkeypatch.setattr(script, "pick_precision", lambda *_: torch.float16)
    _, folder = run(total_timesteps=400, tau=0.01)
    before = load(folder)
    assert before["updates"] > 10 and before["scaler"]["_growth_tracker"] > 10
    run(resume=str(folder), total_timesteps=before["global_step"] + 60, tau=0.01)
    after = load(folder)
    assert after["global_step"] > before["global_step"] and after["updates"] == before["updates"]
    assert after["scaler"] == before["scaler"]
    for part in ("q_network", "target_network"):
        assert all(torch.equal(after[part][name], value) for name, value in before[part].items())
    for n, moments in before["optimizer"].items():
        assert all(torch.equal(after["optimizer"][n][name], value) for name, value in moments.items())
    assert not torch.equal(after["generator"], before["generator"])  # new numbers for new games


def test_after_a_resume_the_options_are_those_asked_for(run, monkeypatch) -> None:
    made, adamw = [], torch.optim.AdamW
    _, folder = run(total_timesteps=400)
    monkeypatch.setattr(torch.optim, "AdamW", lambda *a, **k: made.append(adamw(*a, **k)) or made[-1])
    run(resume=str(folder), total_timesteps=1000, learning_rate=2e-3, weight_decay=0.25)
    (options,) = made[0].param_groups
    assert options["weight_decay"] == 0.25 and load(folder)["updates"] > 60
    assert options["lr"].item() == pytest.approx(2e-3 * 0.1, rel=0.02)  # annealed to the end


def test_resuming_with_the_replay(run, capsys, in_threads) -> None:
    """Collectors start new games, and those of the replay are truncated."""
    _, folder = run(num_collectors=1, checkpoint_replay=True)
    before = load(folder)
    run(num_collectors=1, checkpoint_replay=True, resume=str(folder), total_timesteps=before["global_step"] + 60)
    assert "starts empty" not in capsys.readouterr().out
    after = load(folder)["replay"]
    position = int(before["replay"]["position"][0])
    assert after["position"][0] > position
    if position < QUICK["buffer_size"] // 6:
        assert torch.equal(after["frame"][: position - 3], before["replay"]["frame"][: position - 3])
    last = (position - 1) % (QUICK["buffer_size"] // 6)
    assert after["end"][last] == script.FINAL and after["end"][last - 1] > 0


def test_in_turn_the_same_seed_gives_the_same_run(run) -> None:
    one, two = (load(run(run_name=name)[1]) for name in ("one", "two"))
    assert all(torch.equal(one["q_network"][name], two["q_network"][name]) for name in one["q_network"])
    assert (one["global_step"], one["updates"]) == (two["global_step"], two["updates"])


# ------------------------------------------------------------------------------------------------ switches


def head(summary: dict, folder: Path) -> list[float]:
    return load(folder)["q_network"]["head.bias"].tolist()


def updates(summary: dict, folder: Path) -> int:
    return load(folder)["updates"]


def last(tag: str):
    return lambda summary, folder: scalars(folder)[tag][-1]


FLAGS = {  # another value than QUICK's, and where it shows
    "seed": (2, head),
    "total_timesteps": (600, lambda s, f: s["env_steps"]),
    "run_name": ("other", lambda s, f: f.name),
    "difficulty": (2, head),
    "actions": (12, lambda s, f: len(head(s, f))),
    "size": (60, lambda s, f: load(f)["q_network"]["hidden.weight"].shape),
    "stack": (3, lambda s, f: load(f)["q_network"]["conv1.weight"].shape),
    "skip": (6, head),
    "noop_max": (0, head),
    "envs_per_collector": (7, lambda s, f: s["env_steps"]),
    "sync_every": (3, lambda s, f: s["weight_age"]),
    "channels": (6, lambda s, f: load(f)["q_network"]["conv1.weight"].shape),
    "hidden_size": (24, lambda s, f: load(f)["q_network"]["head.weight"].shape),
    "learning_rate": (1e-2, head),
    "anneal_lr": (False, lambda s, f: round(scalars(f)["losses/learning_rate"][-1], 6)),
    "weight_decay": (0.5, head),
    "buffer_size": (1200, head),
    "gamma": (0.5, head),
    "n_step": (1, head),
    "double": (False, head),
    "dueling": (False, lambda s, f: load(f)["q_network"]["head.weight"].shape),
    "alpha": (0.0, head),
    "beta": (1.0, head),
    "batch_size": (16, updates),
    "accumulate": (2, updates),
    "replay_ratio": (0.5, updates),
    "learning_starts": (600, updates),
    "start_e": (0.5, head),
    "end_e": (0.5, head),
    "epsilon_alpha": (0.0, head),
    "exploration_fraction": (1.0, head),
    "target_network_frequency": (3, lambda s, f: load(f)["target_network"]["head.bias"].tolist()),
    "tau": (1.0, lambda s, f: load(f)["target_network"]["head.bias"].tolist()),
    "max_grad_norm": (1e-3, head),
    "threads": (2, lambda s, f: s["device"]),
    "log_every": (1e-6, lambda s, f: len(scalars(f)["charts/SPS"]) > 60),
    "eval_every": (0.02, lambda s, f: len(scalars(f)["eval/flags"]) > 1),
    "eval_episodes": (4, lambda s, f: s["eval_episodes"]),
    "checkpoint_replay": (True, lambda s, f: "replay" in load(f)),
    "video": (True, lambda s, f: (f / "videos" / "mario.gif").exists()),
}
ELSEWHERE = {  # have a test of their own
    "device", "max_seconds", "run_dir", "env_id", "rom", "world", "stage", "num_collectors", "ring_blocks", "bf16",
    "fp16", "tf32", "compile", "compile_mode", "cudagraph", "checkpoint_every", "resume", "evaluate", "render", "wandb",
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
    assert look(*run(**{flag: value})) != look(*plain)


def test_defaults_depend_on_the_device() -> None:
    on_cuda = fill_defaults(Args(), CUDA)
    assert (on_cuda.batch_size, on_cuda.buffer_size) == (512, 1_000_000)
    ours = fill_defaults(Args(device="cpu"), CPU)
    assert (ours.batch_size, ours.buffer_size, ours.max_seconds) == (32, 100_000, 900)
    assert ours.num_collectors + ours.threads <= max(script.CORES, 2)


def test_each_game_is_told_its_own_settings() -> None:
    flags = dict(actions=5, stack=3, size=60, skip=6, noop_max=7, difficulty=2, rom="my.nes", world=3, stage=4)
    ours = script.settings_of(Args(**flags), (5, 6))
    real = script.settings_of(Args(**flags, env_id="SuperMarioBros"), (5, 6))
    common = {name: flags[name] for name in "actions stack size skip noop_max".split()}
    assert ours == common | {"difficulty": 2, "levels": (5, 6)}
    assert real == common | {"rom": "my.nes", "world": 3, "stage": 4}


# ------------------------------------------------------------------------------------------------ what a run leaves


def test_the_learner_keeps_to_the_replay_ratio_and_lets_it_sink(run, monkeypatch) -> None:
    assert run(replay_ratio=0.5)[0]["replay_ratio"] == pytest.approx(0.5, rel=0.25)  # 200 steps come before learning
    summary = run(num_collectors=1, replay_ratio=1000.0, run_name="behind")[0]  # more than it can do
    assert summary["replay_ratio"] < 500


def test_the_console_lines(run, capsys) -> None:
    run(num_collectors=1)
    out = capsys.readouterr().out
    assert "[COLLECT] produced " in out and "[TRAIN] " in out and "updates old" in out


def test_evaluation_plays_every_game_once_to_its_end(monkeypatch) -> None:
    """Against single lanes played one after the other."""
    args = args_of()
    torch.manual_seed(5)  # weights that change
    q_network = QNetwork(args)
    distances = []
    for lane in range(5):
        envs = script.make_envs(args, 1, script.EVAL_SEED, lane, script.UNSEEN_LEVELS)
        obs, done = envs.reset(), False
        while not done:
            with torch.no_grad():
                obs, _, terminated, truncated, info = envs.step(q_network(torch.from_numpy(obs)).argmax(1).numpy())
            done = (terminated | truncated)[0]
        distances.append(info["distance"][0])
    assert len(set(distances)) > 2
    for lanes in (script.EVAL_LANES, 2):  # also when they do not all fit in at once
        monkeypatch.setattr(script, "EVAL_LANES", lanes)
        result = script.evaluate(q_network, args, 5, CPU)
        assert result["eval_distance_mean"] == pytest.approx(np.mean(distances)) and result["eval_episodes"] == 5


# ------------------------------------------------------------------------------------------------ bad input


def test_a_file_that_is_no_rom_is_refused(tmp_path, capsys) -> None:
    rom = tmp_path / "other.nes"
    rom.write_bytes(b"NES\x1a" + bytes(40_976))
    with pytest.raises(SystemExit) as error:
        main(Args(**QUICK | dict(env_id="SuperMarioBros", rom=str(rom), num_collectors=1, envs_per_collector=1)))
    said = capsys.readouterr().err
    assert error.value.code == 2 and said.count("\n") == 1 and f"--rom {rom}" in said and "not Super Mario Bros" in said


def test_too_little_shared_memory_is_one_line(tmp_path, monkeypatch, capsys) -> None:
    def refuse(*arguments) -> None:
        raise RuntimeError("unable to allocate shared memory(shm) for file </x>: No space left on device (28)")

    monkeypatch.setattr(torch.Tensor, "share_memory_", refuse)
    line = refusal(capsys, Script("dqn_mario_async", tmp_path).program, *SMALL.split())
    assert "No space left on device (28); a smaller --ring-blocks" in line


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> dict:
    """A checkpoint with everything in it."""
    folder = tmp_path_factory.mktemp("whole")
    main(Args(**QUICK | {"run_dir": str(folder), "run_name": "run", "checkpoint_replay": True}))
    return load(folder / "run")


BROKEN = [  # only of this script, the rest is in test_promises.py
    ("replay", {}), ("replay.position", lambda x: x[:1]), ("replay.frame", lambda x: x[:1]), ("samples_due", "much"),
    ("updates", None), ("target_network.head.bias", lambda x: x[:1]), ("generator", lambda x: x * 0 + 255),
    ("collector", {}), ("collector.rng", {}), ("collector.envs", None),
]  # fmt: skip


@pytest.mark.parametrize("path, value", BROKEN, ids=[f"{path}-{n}" for n, (path, _) in enumerate(BROKEN)])
def test_a_broken_checkpoint_is_one_line_and_nothing_is_written(whole, tmp_path, capsys, path, value) -> None:

    def broken(part: dict, path: str) -> dict:
        keys = {str(key): key for key in part}
        if path in keys and value is None:
            return {name: other for name, other in part.items() if name != keys[path]}
        if path in keys:
            return part | {keys[path]: value(part[keys[path]]) if callable(value) else value}
        first, rest = path.split(".", 1)
        return part | {keys[first]: broken(part[keys[first]], rest)}

    torch.save(broken(whole, path), tmp_path / "checkpoint.pt")
    (tmp_path / "args.json").write_text("{}")
    with pytest.raises(SystemExit) as error:
        main(Args(**QUICK | dict(resume=str(tmp_path), checkpoint_replay=True, total_timesteps=2000)))
    said = capsys.readouterr().err
    assert error.value.code == 2 and said.count("\n") == 1 and f"--resume {tmp_path}: " in said, said
    assert {file.name for file in tmp_path.iterdir()} == {"checkpoint.pt", "args.json"}
    assert (tmp_path / "args.json").read_text() == "{}"


def test_other_games_or_collectors_do_not_fit_a_saved_replay(run, capsys) -> None:
    """One game's counters would otherwise be those of all."""
    _, folder = run(envs_per_collector=1, checkpoint_replay=True, total_timesteps=250)
    with pytest.raises(SystemExit):
        run(envs_per_collector=6, checkpoint_replay=True, resume=str(folder), total_timesteps=1000)
    said = capsys.readouterr().err
    assert "needs the same --buffer-size, --num-collectors and --envs-per-collector" in said


def test_a_checkpoint_does_not_choose_the_rom(run, monkeypatch) -> None:
    _, folder = run()
    saved = load(folder)
    torch.save(saved | {"args": saved["args"] | dict(rom="/their.nes", size=60)}, folder / "checkpoint.pt")
    monkeypatch.setattr(sys, "argv", ["dqn_mario_async.py", "--resume", str(folder)])
    args = script.parse_args()
    assert (args.rom, args.size) == (None, 60)


# ------------------------------------------------------------------------------------------------ speed and learning


@pytest.mark.slow
def test_it_learns_in_minutes(tmp_path) -> None:
    """Random play gets about 150 pixels far, "right, run and jump" for ever 507, a level is 1,100 long."""
    flags = dict(max_seconds=150, eval_episodes=50, eval_every=0, video=False, device="cpu", run_dir=str(tmp_path))
    assert main(Args(**flags))["eval_distance_mean"] > 600


def two_cores_are_free() -> bool:
    seconds = []
    x = torch.ones(256, 256)
    before = torch.get_num_threads()
    for threads in (1, 2):
        torch.set_num_threads(threads)
        start = time.perf_counter()
        for _ in range(1000):
            x @ x
        seconds.append(time.perf_counter() - start)
    torch.set_num_threads(before)
    return seconds[0] > 1.5 * seconds[1]


@pytest.mark.slow
@pytest.mark.skipif(script.CORES < 2, reason="needs two cores")
def test_collecting_beside_learning_is_faster_than_in_turn(tmp_path) -> None:
    """At a replay ratio that both keep up with; the margin is wide, benchmarks.md has the number."""
    if not two_cores_are_free():
        pytest.skip("needs two cores that nobody else uses")
    flags = dict(max_seconds=25, replay_ratio=0.2, eval_every=0, eval_episodes=1, video=False, device="cpu", threads=1)
    rates = []
    for number in (0, 1):
        summary = main(Args(**flags | dict(num_collectors=number, run_dir=str(tmp_path), run_name=str(number))))
        rates.append(summary["env_steps_per_second"])
        assert summary["replay_ratio"] > 0.15
    if not two_cores_are_free():
        pytest.skip("somebody else has begun to use a core")
    assert rates[1] > 1.2 * rates[0]


# ------------------------------------------------------------------------------------------------ the real game


@pytest.mark.games
def test_the_real_game_trains_evaluates_and_makes_a_gif(tmp_path) -> None:
    pytest.importorskip("stable_retro")
    try:
        script.make_envs(Args(env_id="SuperMarioBros", num_collectors=1, envs_per_collector=1), 1)
    except ValueError as error:
        pytest.skip(str(error))
    flags = QUICK | dict(env_id="SuperMarioBros", num_collectors=2, envs_per_collector=1, total_timesteps=600)
    flags |= dict(run_dir=str(tmp_path), run_name="run", video=True, eval_episodes=2, world=1, stage=2)
    summary = main(Args(**flags))
    assert summary["stored"] >= 600 and add_up(summary, 2)
    assert summary["eval_episodes"] == 2 and summary["eval_distance_mean"] >= 0
    assert (tmp_path / "run" / "videos" / "mario.gif").exists()
    again = main(Args(**flags | dict(evaluate=str(tmp_path / "run"), video=False)))
    assert again["eval_distance_mean"] == summary["eval_distance_mean"]


# ------------------------------------------------------------------------------------------------ CUDA


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("flags", [{}, {"bf16": True}, {"fp16": True}, {"accumulate": 2}], ids=str)
def test_graphs_learn_what_eager_learns(run, flags) -> None:
    _, eager = run(run_name="eager", **flags | {"device": "cuda"})
    summary, graphs = run(run_name="graphs", cudagraph=True, **flags | {"device": "cuda"})
    assert summary["cudagraph"]
    expected, got = load(eager)["q_network"], load(graphs)["q_network"]
    for name, value in expected.items():
        torch.testing.assert_close(got[name], value, atol=2e-2, rtol=2e-2)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_between_two_logs_nothing_waits_for_the_gpu() -> None:
    args = dataclasses.replace(args_of(num_collectors=1), device="cuda")
    replay, history = ReplayBuffer(args, CUDA), history_of(args, 90, 0, crashes=True)
    generator, beta = torch.Generator(CUDA), torch.ones((), device=CUDA)
    publisher = script.Publisher(Broadcast(torch.zeros(1000)), asynchronous=True)
    weights = torch.ones(1000, device=CUDA)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for first in range(0, 90, 9):
            replay.add(0, stack_blocks(history[first : first + 9]))
            *_, slot = replay.sample(8, generator, beta)
            replay.update_priorities(slot, torch.zeros(8, device=CUDA))
        publisher.publish(weights, 1)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    plain = ReplayBuffer(args_of(num_collectors=1), CPU)
    for first in range(0, 90, 9):
        plain.add(0, stack_blocks(history[first : first + 9]))
    for name in ("frame", "action", "reward", "end"):
        assert torch.equal(getattr(replay, name).cpu(), getattr(plain, name)), name
    torch.cuda.synchronize()
    publisher.poll()
    assert publisher.broadcast.slots[1].eq(1).all()

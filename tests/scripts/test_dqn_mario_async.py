"""The Mario trainer: its ring, its replay, its collectors, its switches, what it leaves behind and what it refuses."""

import dataclasses
import math
import os
import signal
import sys
import threading
import time
from collections import Counter
from functools import partial
from itertools import count, cycle
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from small_runs import COMMON, SMALL, Script, load, refusal, scalars
from torch.nn.utils import parameters_to_vector
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import dqn_mario_async as script
from dqn_mario_async import Args, Broadcast, QNetwork, ReplayBuffer, Ring, main
from envs import workers as plumbing
from envs.workers import SPAWN

CPU = torch.device("cpu")
CUDA = torch.device("cuda")
META = torch.device("meta")  # in place of a GPU: what would wait for a GPU raises here
QUICK = COMMON | SMALL["dqn_mario_async"] | dict(total_timesteps=1200, buffer_size=3000, log_every=0.2)
MAX_NORM = 1.9  # clips some of the gradients of the first updates and leaves others as they are


def shm() -> set[str]:
    return set(os.listdir("/dev/shm")) if Path("/dev/shm").is_dir() else set()


def args_of(**flags) -> Args:
    return script.fill_defaults(Args(**QUICK | flags), CPU)


def make_ring(args: Args) -> Ring:
    return Ring(args.ring_blocks, script.block_fields(args))


def broadcast_of(args: Args) -> Broadcast:
    return Broadcast(parameters_to_vector(QNetwork(args).parameters()))


def collector_of(args: Args) -> script.Collector:
    return script.Collector(args, 0, 0, make_ring(args), broadcast_of(args))


def wait_for(condition) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


@pytest.fixture
def run(tmp_path):
    """Train for a moment; gives the summary and the run folder."""
    small = Script("dqn_mario_async", tmp_path)
    return lambda **flags: small.run(**QUICK | flags)


def add_up(counts: dict, starts: int) -> bool:
    """At the end nothing is lost but at most a step of six games for each start of a collector."""
    return 0 <= counts["produced"] - counts["stored"] <= 6 * starts


def keep_collectors(monkeypatch) -> list:
    """The `Collectors` of all runs that follow."""
    collectors = []
    init = script.Collectors.__init__

    def keep(self, *arguments) -> None:
        collectors.append(self)
        init(self, *arguments)

    monkeypatch.setattr(script.Collectors, "__init__", keep)
    return collectors


@pytest.fixture
def in_threads(monkeypatch) -> list:
    """Collectors as threads of this process, which are there at once. Gives the `Collectors` of the runs."""

    class Thread(threading.Thread):
        exitcode = None

        def run(self) -> None:
            make_collector, *arguments = self._args
            collector = make_collector(*arguments)
            while not collector.broadcast.is_over():
                collector.step()

        def join(self, timeout=None) -> None:
            super().join()

        def kill(self) -> None:
            pass

    monkeypatch.setattr(SPAWN, "Process", Thread)
    return keep_collectors(monkeypatch)


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
    """And a producer that dies in the middle of a block leaves no block behind."""
    args = args_of(ring_blocks=4)
    ring = make_ring(args)
    pushed = read = 0
    rng = np.random.default_rng(0)
    for _ in range(400):
        for _ in range(rng.integers(6)):
            taken = ring.push(block_of(args, pushed))
            assert taken == (pushed - read < 4)
            pushed += taken
        if pushed - read < 4:
            with pytest.raises(ValueError):
                ring.push(block_of(args, pushed) | {"counts": "no number"})
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


def test_weights_are_never_torn() -> None:
    """A copy is made again if new ones have arrived twice in the meantime."""
    broadcast, got = Broadcast(torch.zeros(8)), torch.zeros(8)

    class Copy:
        copies = 0

        def copy_(self, slot) -> None:
            self.copies += 1
            got[:4] = slot[:4]
            if self.copies == 1:
                for number in (1, 2):
                    broadcast.publish(torch.full((8,), number), number)
            got[4:] = slot[4:]

    assert broadcast.fetch(Copy()) == (2, 2) and (got == 2).all()


def test_weights_of_a_gpu_are_handed_out_when_they_have_arrived(monkeypatch) -> None:
    """Not before, none twice, and those under way before the next ones."""

    class Event:
        arrived = False

        def record(self) -> None:
            self.arrived = False

        def query(self) -> bool:
            return self.arrived

        def synchronize(self) -> None:
            self.arrived = True

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
    publisher.publish(torch.full((3,), 3.0), 15)
    assert broadcast.fetch(got) == (2, 10) and (got == 2).all()


def hold(fence: plumbing.Fence) -> None:
    fence.lock.acquire()
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
def test_who_is_killed_with_a_lock_stops_nobody(monkeypatch) -> None:
    """Where there are locks: on other processors than x86. A slow holder may find its lock freed."""
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
    assert time.monotonic() - began < 20  # a second for each lock, once
    with ring.fence:
        ring.fence.lock.release()
    assert ring.fence.lock.acquire(block=False)


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


def ends_of(history: list[dict]) -> np.ndarray:
    """Of each step and game. What follows the last step before a crash is lost: the game ends one step earlier."""
    end = np.stack([block["end"] for block in history])
    for step in range(2, len(history)):
        if history[step]["crashed"]:
            cut = (end[step - 1] == script.RUNNING) & (end[step - 2] == script.RUNNING)
            end[step - 2, cut] = script.TRUNCATED
    return end


@pytest.mark.parametrize("crashes", [False, True])
@pytest.mark.parametrize("n_step", [1, 3])
def test_frames_stored_once_against_whole_stacks(n_step: int, crashes: bool) -> None:
    """Every transition that can be drawn, number for number, after rings of two collectors have wrapped many times."""
    args = args_of(
        num_collectors=2, envs_per_collector=3, n_step=n_step, learning_starts=0, ring_blocks=8, buffer_size=240
    )
    replay, rng = ReplayBuffer(args, CPU), np.random.default_rng(1)
    histories = [history_of(args, 150, seed, crashes) for seed in range(2)]
    ends = [ends_of(history) for history in histories]
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
    obs, action, reward, discount, next_obs = replay.transitions_at(slots)
    for i, slot in enumerate(slots.tolist()):
        number, step, game = place[float(replay.reward[slot])]
        history, end = histories[number], ends[number][:, game]
        expected = 0.0
        for at in range(step, step + n_step):
            expected += args.gamma ** (at - step) * history[at]["reward"][game]
            if end[at]:
                break
        factor = args.gamma ** (at + 1 - step) * (end[at] != script.TERMINATED)
        np.testing.assert_array_equal(obs[i], stacked(history, step, game, args.stack))
        np.testing.assert_array_equal(next_obs[i], stacked(history, at, game, args.stack, final=True))
        assert action[i] == history[step]["action"][game]
        assert reward[i].item() == pytest.approx(expected, abs=1e-5)
        assert discount[i].item() == pytest.approx(factor, abs=1e-6)


def test_what_the_environment_shows_is_what_comes_out_of_the_replay() -> None:
    """A real collector, its ring and the replay, against observations kept whole."""
    args = args_of(envs_per_collector=1, n_step=1, ring_blocks=400)
    collector, replay, seen = collector_of(args), ReplayBuffer(args, CPU), []
    step = collector.envs.step

    def watched(action):
        before = collector.obs.copy()
        obs, reward, terminated, truncated, info = step(action)
        seen.append((before, action.copy(), reward.copy(), terminated.copy(), info["final_obs"].copy()))
        return obs, reward, terminated, truncated, info

    collector.envs.step = watched
    for _ in range(400):
        collector.step()
    replay.add(0, collector.ring.read())
    slots = replay.priority.nonzero().flatten()
    obs, action, reward, discount, next_obs = replay.transitions_at(slots)
    assert len(slots) >= 398 and (replay.end == script.TERMINATED).sum() > 1
    for i in range(len(slots)):
        before, acted, rewarded, terminated, final_obs = (part[0] for part in seen[i])
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


def test_priorities_of_learned_and_of_new_transitions() -> None:
    args = args_of(alpha=0.6, num_collectors=1, n_step=1)
    replay = ReplayBuffer(args, CPU)
    replay.update_priorities(torch.tensor([0, 2]), torch.tensor([-3.0, math.nan]))
    assert replay.priority[:3].tolist() == pytest.approx([3.001**0.6, 0, 0.001**0.6])
    assert replay.max_priority.item() == pytest.approx(3.001**0.6)
    replay.add(0, stack_blocks(history_of(args, 30, 0)))
    assert set(replay.priority.tolist()) == {0.0, replay.max_priority.item()}


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


def test_packed_for_a_gpu_values_stay_the_same() -> None:
    tensors = stack_blocks(history_of(args_of(envs_per_collector=3), 7, 0))
    with Launches(data=True):
        packed = script.to_device(tensors, META)
    assert len({part.untyped_storage().data_ptr() for part in packed.values()}) == 1
    for name, tensor in tensors.items():
        assert torch.equal(packed[name], tensor), name


def test_epsilon_decays_to_that_of_each_game() -> None:
    ends = np.array([0.4, 0.1])
    np.testing.assert_allclose(script.linear_schedule(1.0, ends, 0.1, 0.0), np.ones(2))
    np.testing.assert_allclose(script.linear_schedule(1.0, ends, 0.1, 0.05), (1 + ends) / 2)
    np.testing.assert_allclose(script.linear_schedule(1.0, ends, 0.1, 0.5), ends)
    np.testing.assert_allclose(script.linear_schedule(1.0, ends, 0.0, 0.0), ends)


def test_a_lone_game_explores_like_all_of_them_one_episode_after_the_other() -> None:
    """With 20 % random actions for ever the real game's flag is out of reach."""
    args, rng = args_of(num_collectors=3, envs_per_collector=1, ring_blocks=400), np.random.default_rng(0)
    ends = np.concatenate([script.end_epsilons(args, 2, rng) for _ in range(5000)])
    places = np.sort((np.log(ends) / np.log(args.end_e) - 1) / args.epsilon_alpha)
    np.testing.assert_allclose(places, np.linspace(0, 1, 5000), atol=0.03)
    collector, by_episode, episode = collector_of(args), {}, 0
    collector.broadcast.progress.fill_(1)
    for step in range(400):
        by_episode.setdefault(episode, set()).add(collector.end_e.item())
        collector.step()
        episode += bool(collector.ring.fields["end"][step])
    assert len(by_episode) > 5 and all(len(shares) == 1 for shares in by_episode.values())
    assert len(set.union(*by_episode.values())) == len(by_episode)


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
def test_the_whole_update_against_one_that_is_written_out(double) -> None:
    """Loss, importance weights, annealing, accumulation, clipping, AdamW and target network."""
    flags = dict(accumulate=2, n_step=2, learning_rate=3e-3, weight_decay=0.1, tau=0.3, target_network_frequency=2)
    args = args_of(**flags, max_grad_norm=MAX_NORM, alpha=0.6, beta=0.4, double=double)
    learner = script.Learner(args, 0, CPU, torch.float32)
    replay, drawn, td_errors = learner.replay, [], []
    replay.add(0, stack_blocks(history_of(args, 40, 0)))
    sample, update_priorities = replay.sample, replay.update_priorities

    def watched_sample(*arguments) -> list:
        priority = replay.priority.clone()
        batch = sample(*arguments)
        drawn.append((priority, batch))
        return batch

    def watched_update(slot, td_error) -> None:
        td_errors.append(td_error.clone())
        update_priorities(slot, td_error)

    replay.sample, replay.update_priorities = watched_sample, watched_update
    weights = {name: w.detach().double() for name, w in learner.q_network.named_parameters()}
    target = {name: w.clone() for name, w in weights.items()}
    first, second = ({name: torch.zeros_like(w) for name, w in weights.items()} for _ in range(2))
    norms = []
    for n in range(1, 11):
        progress = n / 12
        learner.learn(progress)
        leaves = {name: w.clone().requires_grad_() for name, w in weights.items()}
        gradients = {name: 0 for name in weights}
        for (priority, batch), td in zip(drawn[-2:], td_errors[-2:]):
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
    assert sum(norm < MAX_NORM for norm in norms) in range(2, len(norms) - 1), norms
    saved = learner.state_dict()
    for name in weights:
        np.testing.assert_allclose(saved["q_network"][name], weights[name], atol=1e-4, err_msg=name)
        np.testing.assert_allclose(saved["target_network"][name], target[name], atol=1e-4, err_msg=name)


@pytest.mark.parametrize("games", [1, 6])
def test_a_collector_plays_what_the_newest_weights_say_or_explores(games: int) -> None:
    """And asks no network where all explore."""
    args = args_of(envs_per_collector=games, num_collectors=1, start_e=0.0, end_e=0.0, ring_blocks=32)
    q_network, collector = QNetwork(args).requires_grad_(False), collector_of(args)
    fields = collector.ring.fields
    for version in range(1, 8):
        for weight in q_network.parameters():
            weight.add_(0.3 * torch.randn_like(weight))
        collector.broadcast.publish(parameters_to_vector(q_network.parameters()), 10 * version)
        expected = q_network(torch.from_numpy(collector.obs)).argmax(1)
        collector.step()
        assert torch.equal(fields["action"][version - 1], expected.to(torch.int8))
        assert fields["updates"][version - 1] == 10 * version
    collector.args = dataclasses.replace(args, start_e=1.0, end_e=1.0)
    collector.end_e[:] = 1
    collector.q_network = None
    for _ in range(16):
        collector.step()
    assert len(fields["action"][7:23].unique()) > 3


# ------------------------------------------------------------------------------------------------ collectors


def test_counters_are_exact_when_the_ring_is_full(run, monkeypatch, in_threads) -> None:
    """At every log and at the end, with a learner that lets each ring fill up, and waits."""
    first_games, add = set(), ReplayBuffer.add

    def slow(self, first_game, block) -> None:
        first_games.add(first_game)
        ring, broadcast = in_threads[0].rings[first_game // 6], in_threads[0].broadcast
        wait_for(lambda: ring.head - ring.tail == 4 or broadcast.is_over())
        time.sleep(0.01)
        add(self, first_game, block)

    monkeypatch.setattr(ReplayBuffer, "add", slow)
    summary, folder = run(num_collectors=2, ring_blocks=4, log_every=1e-9, checkpoint_replay=True)
    logged = scalars(folder)
    unread = np.subtract(logged["collect/produced"], logged["collect/stored"])
    assert len(unread) > 3 and unread.max() > 0
    assert all(0 <= steps <= 2 * 6 * (4 + 1) for steps in unread)  # in two full rings of 4 blocks, and 1 in the making
    assert add_up(summary, 2)
    assert summary["stored"] == summary["env_steps"] == load(folder)["global_step"] >= 1200
    assert summary["producer_wait_ms_mean"] > 1
    assert first_games == {0, 6} and (load(folder)["replay"]["position"] > 0).all()  # each collector has its own slots


def test_counters_show_lost_steps(run, monkeypatch) -> None:
    """Blocks that vanish between collector and replay."""
    push, calls = Ring.push, count()
    monkeypatch.setattr(Ring, "push", lambda self, block: next(calls) % 2 == 1 or push(self, block))
    assert not add_up(run()[0], 1)


def test_each_collector_has_its_own_games_numbers_shares_and_ring(monkeypatch) -> None:
    class Process:
        made, exitcode = [], None

        def __init__(self, target, args, daemon) -> None:
            self.made.append(args)

        def start(self) -> None:
            pass

    monkeypatch.setattr(SPAWN, "Process", Process)
    args = args_of(num_collectors=3, buffer_size=5000)
    rings = [make_ring(args) for _ in range(3)]
    processes = script.Collectors(partial(script.Collector, args), rings, broadcast_of(args))
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


def test_the_online_network_is_handed_out(run) -> None:
    _, folder = run(sync_every=1, tau=1e-3, total_timesteps=400, checkpoint_replay=True)
    saved = load(folder)
    weights, target = (parameters_to_vector(saved[name].values()) for name in ("q_network", "target_network"))
    assert saved["collector"]["updates"] == saved["updates"] > 3
    assert torch.equal(saved["collector"]["weights"], weights) and not torch.equal(target, weights)


def test_a_learner_keeps_to_its_ratio_or_falls_behind_and_lets_go_of_the_rest(run) -> None:
    for accumulate in (1, 2):
        _, folder = run(replay_ratio=0.5, accumulate=accumulate, run_name=f"{accumulate}")
        assert load(folder)["updates"] == pytest.approx(0.5 * 1000 / (8 * accumulate), abs=2)  # 200 steps come before
    _, folder = run(replay_ratio=1000.0, total_timesteps=216)  # a step of six games would ask for 750 updates
    saved = load(folder)
    rounds = (216 - 200) // 6 + 1
    assert 100 * (rounds - 1) < saved["updates"] <= 100 * rounds and saved["samples_due"] <= 100 * 8


def test_speeds_count_the_steps_of_their_seconds_only(run, monkeypatch, in_threads) -> None:
    """Collectors play on during an evaluation, which counts nowhere."""
    meanwhile, seconds = [], []
    read = script.PhaseTimer.read

    def slow(*arguments) -> dict:
        collectors = in_threads[0]
        steps = collectors.rings[0].steps
        before = steps.item()
        wait_for(lambda: steps >= before + 60 or collectors.broadcast.is_over())
        meanwhile.append(6 * (steps.item() - before))
        return {}

    def summed(self) -> Counter:
        got = read(self)
        seconds.append(sum(got.values()))
        return got

    monkeypatch.setattr(script, "evaluate", slow)
    monkeypatch.setattr(script.PhaseTimer, "read", summed)
    summary, _ = run(num_collectors=1, ring_blocks=400, buffer_size=6000, eval_every=1e-9, total_timesteps=2500)
    timed = summary["env_steps_per_second"] * sum(seconds)
    assert sum(meanwhile) >= 360
    assert 0 < timed <= summary["produced"] - sum(meanwhile) + 1e-6


def test_collectors_are_asked_to_end_before_they_are_killed(run, monkeypatch) -> None:
    """And nothing is left of them."""
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    torch.optim.AdamW([torch.zeros(1)])  # the first of a process sets an environment variable
    environment, before = dict(os.environ), shm()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    stop, codes = script.Collectors.stop, []

    def watched(self) -> None:
        patience = SimpleNamespace(monotonic=cycle([0, -58]).__next__)  # a minute, not two seconds
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(plumbing, "time", patience)
            stop(self)
        codes[:] = [process.exitcode for process in self.processes]

    monkeypatch.setattr(script.Collectors, "stop", watched)
    summary, _ = run(num_collectors=1, total_timesteps=600, log_every=0.1)
    assert codes == [0] and add_up(summary, 1)
    assert dict(os.environ) == environment and shm() == before
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == mask and not SPAWN.active_children()


def born(queue) -> None:
    deaf = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    queue.put((os.environ["OMP_NUM_THREADS"], os.environ["MKL_NUM_THREADS"], signal.SIGTERM in deaf))


def test_a_collector_has_one_thread_and_is_deaf_from_its_birth_on() -> None:
    queue = SPAWN.SimpleQueue()
    process = SPAWN.Process(target=born, args=(queue,))
    with plumbing.worker_environment():
        process.start()
    assert queue.get() == ("1", "1", True)
    process.join()


@pytest.mark.slow
def test_a_killed_collector_is_replaced_and_what_it_committed_is_kept(run, monkeypatch, capfd) -> None:
    killed, add = [], ReplayBuffer.add

    def kill_once(self, *arguments):
        add(self, *arguments)
        if len(killed) < 2 and self.position.sum() > 500 * (len(killed) + 1):
            killed.append(SPAWN.active_children()[0].pid)
            os.kill(killed[-1], signal.SIGKILL)

    monkeypatch.setattr(ReplayBuffer, "add", kill_once)
    collectors = keep_collectors(monkeypatch)
    summary, _ = run(num_collectors=1, total_timesteps=4000)
    assert collectors[0].starts == 3 and len(set(killed)) == 2 and add_up(summary, 3)
    assert summary["stored"] == 6 * sum(ring.tail.item() for ring in collectors[0].rings) == summary["env_steps"]
    assert capfd.readouterr().err.count("exit code -9 and is replaced") == 2


class NoCollector:
    def __init__(self, *arguments) -> None:
        raise ZeroDivisionError("no games\ntoday")


@pytest.mark.slow
def test_collectors_that_cannot_play_end_the_run(tmp_path, monkeypatch, capfd) -> None:
    monkeypatch.setattr(script, "Collector", NoCollector)
    with pytest.raises(ChildProcessError, match="three collectors in a row ended before they played, see above"):
        main(Args(**QUICK | dict(num_collectors=1, run_dir=str(tmp_path))))
    said = capfd.readouterr().err
    assert "Traceback" not in said
    assert said.count("collector 0: ZeroDivisionError (no games today)") == 3
    assert not SPAWN.active_children() and not list(tmp_path.glob("*/checkpoint.pt"))


def test_what_was_learned_is_saved_when_no_collector_can_be_had(run, monkeypatch, in_threads, tmp_path, capsys) -> None:
    restart_dead = script.Collectors.restart_dead

    def fail(self) -> None:
        if self.broadcast.version.item() > 3:
            raise BlockingIOError("no more processes")
        restart_dead(self)

    monkeypatch.setattr(script.Collectors, "restart_dead", fail)
    line = refusal(capsys, run, num_collectors=1, total_timesteps=10**6, log_every=100.0)
    assert "no more processes; --resume" in line
    assert load(tmp_path / "run")["updates"] >= 10


# ------------------------------------------------------------------------------------- resuming, flags, mistakes


@pytest.mark.parametrize("num_collectors", [0, 1])
def test_resuming_goes_on_counting(run, capsys, num_collectors, in_threads) -> None:
    first, folder = run(num_collectors=num_collectors)
    saved, total = load(folder), first["env_steps"] + 600
    saved["samples_due"] = 800.0  # a learner that had fallen behind must not learn from an empty replay
    torch.save(saved, folder / "checkpoint.pt")
    summary, _ = run(num_collectors=num_collectors, resume="latest", total_timesteps=total)
    assert "the replay starts empty" in capsys.readouterr().out
    assert add_up(summary, 2) and summary["produced"] >= summary["env_steps"] >= total


def test_a_resumed_run_has_the_scaler_and_new_noise(run, monkeypatch) -> None:
    """In float16. With an empty replay nothing is learned. The rest is in test_promises.py."""
    monkeypatch.setattr(script, "pick_precision", lambda *_: torch.float16)
    _, folder = run(total_timesteps=400)
    before = load(folder)
    assert before["updates"] > 10 and before["scaler"]["_growth_tracker"] > 10
    run(resume=str(folder), total_timesteps=before["global_step"] + 60)
    after = load(folder)
    assert after["global_step"] > before["global_step"] and after["updates"] == before["updates"]
    assert after["scaler"] == before["scaler"]
    assert not torch.equal(after["generator"], before["generator"])


def head(summary: dict, folder: Path) -> list[float]:
    return load(folder)["q_network"]["head.bias"].tolist()


FLAGS = {  # another value than QUICK's, and where it shows; what is not here has a test of its own
    "seed": (2, head),
    "difficulty": (2, head),
    "actions": (12, lambda s, f: len(head(s, f))),
    "size": (60, lambda s, f: load(f)["q_network"]["hidden.weight"].shape),
    "stack": (3, lambda s, f: load(f)["q_network"]["conv1.weight"].shape),
    "skip": (6, head),
    "noop_max": (0, head),
    "envs_per_collector": (7, lambda s, f: s["env_steps"]),
    "sync_every": (3, lambda s, f: s["weight_age"]),
    "anneal_lr": (False, lambda s, f: round(scalars(f)["losses/learning_rate"][-1], 6)),
    "buffer_size": (1200, head),
    "dueling": (False, lambda s, f: load(f)["q_network"]["head.weight"].shape),
    "learning_starts": (600, lambda s, f: load(f)["updates"]),
    "start_e": (0.5, head),
    "end_e": (0.5, head),
    "epsilon_alpha": (0.0, head),
    "exploration_fraction": (1.0, head),
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> tuple[dict, Path]:
    return Script("dqn_mario_async", tmp_path_factory.mktemp("plain")).run(**QUICK)


@pytest.mark.parametrize("flag", FLAGS)
def test_every_flag_changes_what_it_says(run, plain, flag) -> None:
    value, look = FLAGS[flag]
    assert look(*run(**{flag: value})) != look(*plain)


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


def test_too_little_shared_memory_is_one_line(tmp_path, monkeypatch, capsys) -> None:
    def refuse(*arguments) -> None:
        raise RuntimeError("unable to allocate shared memory(shm) for file </x>: No space left on device (28)")

    monkeypatch.setattr(torch.Tensor, "share_memory_", refuse)
    small = Script("dqn_mario_async", tmp_path)
    line = refusal(capsys, small.program, *small.words())
    assert "No space left on device (28); a smaller --ring-blocks" in line


def test_other_games_or_collectors_do_not_fit_a_saved_replay(run, capsys) -> None:
    """One game's counters would otherwise be those of all."""
    _, folder = run(envs_per_collector=1, checkpoint_replay=True, total_timesteps=250)
    line = refusal(capsys, run, checkpoint_replay=True, resume=str(folder))
    assert "needs the same --buffer-size, --num-collectors and --envs-per-collector" in line


def test_a_checkpoint_does_not_choose_the_rom(run, monkeypatch) -> None:
    _, folder = run()
    saved = load(folder)
    torch.save(saved | {"args": saved["args"] | dict(rom="/their.nes", size=60)}, folder / "checkpoint.pt")
    monkeypatch.setattr(sys, "argv", ["dqn_mario_async.py", "--resume", str(folder)])
    args = script.parse_args()
    assert (args.rom, args.size) == (None, 60)


# -------------------------------------------------------------------------------- learning, the real game, CUDA


@pytest.mark.slow
def test_it_learns(tmp_path) -> None:
    """Random play gets about 150 pixels far, "right, run and jump" for ever 507, a level is 1,100 long."""
    flags = dict(num_collectors=0, threads=1, total_timesteps=100_000, replay_ratio=1.0, eval_episodes=50, eval_every=0)
    flags |= dict(size=48, channels=8, hidden_size=128, learning_rate=1e-3, tau=0.01, learning_starts=2000)
    summary = main(Args(**flags, buffer_size=60_000, video=False, device="cpu", run_dir=str(tmp_path)))
    assert summary["eval_distance_mean"] > 507


def test_only_training_games_practice() -> None:
    args = Args(env_id="SuperMarioBros", practice=0.25)
    assert script.settings_of(args, script.TRAIN_LEVELS)["practice"] == 0.25
    assert script.settings_of(args, script.UNSEEN_LEVELS)["practice"] == 0


@pytest.mark.games
def test_the_real_game_trains_evaluates_and_makes_a_gif(tmp_path) -> None:
    pytest.importorskip("stable_retro")
    try:
        script.make_envs(Args(env_id="SuperMarioBros", num_collectors=1, envs_per_collector=1), 1)
    except ValueError as error:
        pytest.skip(str(error))
    flags = QUICK | dict(env_id="SuperMarioBros", num_collectors=2, envs_per_collector=1, total_timesteps=600)
    flags |= dict(run_dir=str(tmp_path), run_name="run", video=True, eval_episodes=2, stages="1-1,1-2", practice=0.5)
    summary = main(Args(**flags))
    assert summary["stored"] >= 600 and add_up(summary, 2)
    assert summary["eval_episodes"] == 2 and summary["eval_distance_mean"] >= 0
    assert (tmp_path / "run" / "videos" / "mario.gif").exists()
    again = main(Args(**flags | dict(evaluate=str(tmp_path / "run"), video=False)))
    assert again["eval_distance_mean"] == summary["eval_distance_mean"]


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
        replay.add(0, stack_blocks(history))
        *_, slot = replay.sample(8, generator, beta)
        replay.update_priorities(slot, torch.zeros(8, device=CUDA))
        publisher.publish(weights, 1)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    publisher.poll()
    assert publisher.broadcast.slots[1].eq(1).all()

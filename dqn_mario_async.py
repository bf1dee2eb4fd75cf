"""Double DQN on Mario: processes that collect and never wait, and one that learns.

    python dqn_mario_async.py                             # 15 minutes, then an evaluation and a GIF
    python dqn_mario_async.py --preset original           # batches of 512, four to an update, four collectors
    python dqn_mario_async.py --env-id SuperMarioBros     # the real game; the ROM is yours (envs/smb.py)
    python dqn_mario_async.py --evaluate latest --render  # watch the last agent play

On two CPU cores the agent then reached the flag in 100 % of 100 levels it had never seen, with each of three seeds
(45,000 updates on 32 of 6.5 million transitions). Half an hour of the real 1-1 brought it 2,163 pixels far, random play
502.

To read it: `Collector` plays, `Ring` hands over what it saw, `Broadcast` brings it new weights, `Replay` is what is
learned from, `td_target` what is learned, and the loop in `main` is when. The rest is switches and bookkeeping.
"""

import json
import math
import os
import platform
import resource
import shutil
import signal
import subprocess
import sys
import time
import timeit
import warnings
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any, Literal, NoReturn

import numpy as np
import torch
import torch.multiprocessing
import torch.nn as nn
import torch.nn.functional as F
import tyro
from PIL import Image
from torch.nn.utils import vector_to_parameters
from torch.utils.tensorboard import SummaryWriter

from envs.mario import TRAIN_LEVELS, UNSEEN_LEVELS, MarioBatch, MarioEnv
from envs.smb import SuperMarioBrosBatch, SuperMarioBrosEnv

SCRIPT = Path(__file__).stem
EVAL_SEED = 2**31


@dataclass
class Args:
    # Run
    seed: int = 1
    """seed of weights, games, exploration and sampling"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """where learning happens; auto takes CUDA where there is one. Collectors run on the CPU"""
    total_timesteps: int | None = None
    """environment transitions to train for (None: no limit)"""
    max_seconds: float | None = None
    """wall-clock budget, warm-up and evaluations on the way included (None: 900, or no limit with --total-timesteps)"""
    run_dir: str = "runs"
    """folder of all runs"""
    run_name: str | None = None
    """folder of this run inside it (None: script, seed and time)"""
    preset: Literal["none", "original"] = "none"
    """values for flags that are None: original learns from 4 x 512 at once, with 4 collectors and 50,000 frames"""

    # Environment
    env_id: Literal["MarioLike-v0", "SuperMarioBros"] = "MarioLike-v0"
    """our own game (envs/mario.py), or the real one (envs/smb.py, needs stable-retro and a ROM)"""
    difficulty: int = 0
    """of MarioLike's levels"""
    rom: str | None = None
    """the real game's .nes file (None: the one in an installed gym-super-mario-bros)"""
    world: int = 1
    """world of the real game"""
    stage: int = 1
    """its level"""
    actions: Literal[5, 7, 12] = 7
    """only to the right, the simple ones, or all"""
    size: int = 84
    """pixels across and down a frame"""
    stack: int = 4
    """frames seen at once"""
    skip: int = 4
    """game frames an action is held"""
    noop_max: int = 30
    """most game frames without action at the start of a game"""

    # Collection
    num_collectors: int | None = None
    """processes that play (None: one per core but one, 8 at most); 0 collects and learns in turn"""
    envs_per_collector: int | None = None
    """games each plays (None: 16; the real game: 1, which is also the most)"""
    ring_blocks: int = 256
    """steps of all its games that a collector can be ahead of the learner"""
    on_full: Literal["wait", "drop"] = "wait"
    """what a collector does then"""
    sync_every: int = 5
    """updates between two hand-outs of the weights"""
    hang_seconds: float = 60.0
    """a collector that does nothing for so long is replaced"""

    # Algorithm
    channels: int = 16
    """of the first convolution; the others have twice as many"""
    hidden_size: int = 256
    """width of the layer after them"""
    learning_rate: float = 5e-4
    """AdamW's step size"""
    anneal_lr: bool = True
    """let the step size fall tenfold over the run, exponentially"""
    weight_decay: float = 1e-5
    """AdamW's decay"""
    buffer_size: int | None = None
    """frames the replay holds (None: 100,000 on CPU, 1,000,000 on CUDA)"""
    gamma: float = 0.97
    """discount"""
    n_step: int = 3
    """rewards summed before the target network is asked"""
    double: bool = True
    """the online network picks the action the target network judges (van Hasselt et al. 2016)"""
    dueling: bool = True
    """value plus advantages instead of action values (Wang et al. 2016)"""
    alpha: float = 0.5
    """how much a TD error counts when transitions are drawn (Schaul et al. 2016); 0 draws uniformly"""
    beta: float = 0.4
    """how much of that bias the loss takes back at the start; all of it at the end"""
    batch_size: int | None = None
    """transitions per gradient (None: 32 on CPU, 512 on CUDA)"""
    accumulate: int | None = None
    """gradients added up for an update (None: 1)"""
    replay_ratio: float = 8.0
    """transitions learned from per environment step, at most; a learner that cannot keep up learns from fewer"""
    learning_starts: int = 5_000
    """frames in the replay before learning begins"""
    start_e: float = 1.0
    """share of random actions at the start"""
    end_e: float = 0.2
    """share of random actions at the end, in the first game of all; e in the others: see --spread"""
    spread: float = 3.0
    """the last game of all ends at end_e ** (1 + spread), those between in between (Horgan et al. 2018)"""
    exploration_fraction: float = 0.1
    """part of the run over which the shares fall, linearly"""
    target_network_frequency: int = 1
    """updates between two updates of the target network"""
    tau: float = 0.005
    """how far the target network moves then; 1 copies"""
    max_grad_norm: float = 10.0
    """gradients are clipped to this norm"""

    # Speed
    bf16: bool = False
    """forward passes of learning in bfloat16, where the hardware has it"""
    fp16: bool = False
    """forward passes of learning in float16 with gradient scaling (CUDA)"""
    tf32: bool = False
    """fp32 matmuls on tensor cores (CUDA)"""
    compile: bool = False
    """torch.compile the loss"""
    compile_mode: Literal["default", "reduce-overhead", "max-autotune"] = "default"
    """torch.compile's mode"""
    cudagraph: bool = False
    """capture the update as a CUDA graph"""
    threads: int | None = None
    """the learner's CPU threads (None: the cores that no collector takes, 8 at most)"""

    # Input and output
    log_every: float = 10.0
    """seconds between log lines"""
    eval_every: float = 60.0
    """seconds between evaluations on the way, of a tenth of --eval-episodes (0: none)"""
    eval_episodes: int = 100
    """games of the final evaluation"""
    checkpoint_every: float = 60.0
    """seconds between checkpoints (0: only the last)"""
    checkpoint_replay: bool = False
    """checkpoints hold the replay too"""
    resume: str | None = None
    """continue the run of this checkpoint, run folder, or "latest", with its flags"""
    evaluate: str | None = None
    """no training: play --eval-episodes games with this checkpoint, run folder, or "latest" """
    render: bool = False
    """with --evaluate: play one game in the terminal"""
    video: bool = True
    """write a GIF of a game at the end, or with --evaluate"""
    wandb: bool = False
    """mirror TensorBoard to Weights & Biases (pip install wandb)"""
    profile: bool = False
    """write a torch profiler trace of 20 rounds of the loop, and its longest operations, into the run folder"""


CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
DEFAULTS = {  # of flags that are None
    "cpu": {"batch_size": 32, "buffer_size": 100_000},
    "cuda": {"batch_size": 512, "buffer_size": 1_000_000},
    "none": {"num_collectors": min(max(CORES - 1, 1), 8), "accumulate": 1},
    "original": {"num_collectors": 4, "accumulate": 4, "batch_size": 512, "buffer_size": 50_000},
}


def resolve(args: Args, device: torch.device) -> Args:
    """`args` with nothing a run needs left None. Values that cannot work are refused here, before anything starts."""
    real = args.env_id == "SuperMarioBros"
    defaults = DEFAULTS[device.type] | {"envs_per_collector": 1 if real else 16} | DEFAULTS[args.preset]
    if args.total_timesteps is None:
        defaults["max_seconds"] = 900.0
    collectors = defaults["num_collectors"] if args.num_collectors is None else args.num_collectors
    defaults["threads"] = min(max(CORES - collectors, 1), 8)
    args = replace(args, **{name: value for name, value in defaults.items() if getattr(args, name) is None})

    shares = {"gamma", "tau", "start_e", "end_e", "exploration_fraction", "alpha", "beta"}
    may_be_0 = {"seed", "learning_starts", "eval_every", "checkpoint_every", *shares} - {"tau"}
    may_be_0 |= {"num_collectors", "difficulty", "noop_max", "spread", "weight_decay"}
    for name, value in vars(args).items():
        if type(value) in (int, float):
            highest = 1 if name in shares else sys.maxsize
            if not 0 <= value <= highest or (value == 0 and name not in may_be_0):
                lowest = "0 or more" if name in may_be_0 else "above 0"
                refuse(f"--{name.replace('_', '-')} {value}: must be {lowest} and at most {highest:g}")
    if args.bf16 and args.fp16:
        refuse("--bf16 --fp16: choose one of them")
    if args.cudagraph and args.compile and args.compile_mode != "default":
        refuse(f"--compile-mode {args.compile_mode}: captures graphs by itself; with --cudagraph only default works")
    if args.size < 36:
        refuse(f"--size {args.size}: the convolutions need at least 36 pixels")
    if real and args.envs_per_collector != 1:
        refuse(f"--envs-per-collector {args.envs_per_collector}: a process holds one emulator; use more collectors")
    if real and args.num_collectors == 0:
        refuse("--num-collectors 0: this process needs its only emulator for evaluations; 1 or more work")
    games = max(args.num_collectors, 1) * args.envs_per_collector
    least = games * (2 * args.ring_blocks + args.n_step + args.stack)  # what one read can bring, and its surroundings
    if args.buffer_size < least + args.learning_starts:
        refuse(f"--buffer-size {args.buffer_size}: at least {least + args.learning_starts} for {games} games")
    if Path("/dev/shm").is_dir() and not args.evaluate:
        needed, room = max(args.num_collectors, 1) * Ring.bytes(args), shutil.disk_usage("/dev/shm").free
        if needed > room:
            sizes = f"the rings take {needed / 2**20:.0f} MiB of shared memory, /dev/shm has {room / 2**20:.0f} left"
            refuse(f"--ring-blocks {args.ring_blocks}: {sizes}; fewer blocks or a larger /dev/shm work")
    if args.render and not args.evaluate:
        refuse("--render: shows a trained agent, so it needs --evaluate PATH")
    try:
        make_envs(args, 1)  # an emulator is freed at once
    except ValueError as error:  # which begins with the name of the setting
        flag = next((name for name in settings_of(args, TRAIN_LEVELS) if str(error).startswith(name)), "env_id")
        refuse(f"--{flag.replace('_', '-')} {getattr(args, flag)}: {error}")
    return replace(args, learning_starts=max(args.learning_starts, games * (args.n_step + 1)))


def settings_of(args: Args, levels: tuple[int, int]) -> dict[str, Any]:
    """What both games want to know, and what only the chosen one does."""
    common = {name: getattr(args, name) for name in "actions stack size skip noop_max".split()}
    if args.env_id == "SuperMarioBros":
        return common | {"rom": args.rom, "world": args.world, "stage": args.stage}
    return common | {"difficulty": args.difficulty, "levels": levels}


def make_envs(
    args: Args, num_envs: int, seed: int = 0, first_lane: int = 0, levels: tuple[int, int] = TRAIN_LEVELS
) -> MarioBatch:
    """`num_envs` games, each with its own stream of random numbers. One that ends starts anew within the same step."""
    batch = SuperMarioBrosBatch if args.env_id == "SuperMarioBros" else MarioBatch
    return batch(num_envs, seed=seed, first_lane=first_lane, **settings_of(args, levels))


# ----------------------------------------------------------------------------------------------------- network


SHAPES = "--channels, --hidden-size, --dueling, --actions, --stack and --size"  # flags that fix the network's


class QNetwork(nn.Module):
    """Values of the actions (B, actions), fp32, from frames (B, stack, size, size) uint8: `judge(see(obs))`.

    Convolutions as in Mnih et al. 2015. `see` has no parameters, so online and target network share what it makes of
    the next observations. LayerNorm, not BatchNorm, whose statistics would reach neither target network nor collectors.
    """

    def __init__(self, args: Args, device: torch.device) -> None:
        super().__init__()
        narrow, wide = args.channels, 2 * args.channels
        side = ((args.size - 4) // 4 - 2) // 2 - 2
        self.conv1 = nn.Conv2d(args.stack, narrow, 8, 4, device=device)
        self.conv2 = nn.Conv2d(narrow, wide, 4, 2, device=device)
        self.conv3 = nn.Conv2d(wide, wide, 3, device=device)
        self.hidden = nn.Linear(wide * side**2, args.hidden_size, device=device)
        self.norm = nn.LayerNorm(args.hidden_size, device=device)
        self.head = nn.Linear(args.hidden_size, args.actions + args.dueling, device=device)
        for layer in (self.conv1, self.conv2, self.conv3, self.hidden):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
            nn.init.zeros_(layer.bias)
        self.dueling = args.dueling

    @staticmethod
    def see(obs: torch.Tensor) -> torch.Tensor:
        # Channels last makes gradients faster (10 ms, not 15, for 32 on one core), and forward passes alone slower.
        layout = torch.channels_last if torch.is_grad_enabled() else torch.contiguous_format
        return obs.to(torch.float32, memory_format=layout).div_(255)

    def judge(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu_(self.conv3(F.relu_(self.conv2(F.relu_(self.conv1(x))))))
        q = self.head(F.relu_(self.norm(self.hidden(x.flatten(1))))).float()
        if self.dueling:  # advantages, then the value
            q = q[:, -1:] + q[:, :-1] - q[:, :-1].mean(1, keepdim=True)
        return q

    def forward(self, obs: torch.Tensor) -> torch.Tensor:
        return self.judge(self.see(obs))


class Actor:
    """`QNetwork` for one observation and one thread, in NumPy: less than half of PyTorch's price.

    PyTorch takes 0.57 ms beside an emulator that takes 1.2: it converts layouts, and a call finds nothing of its own in
    the caches. Here a convolution is a matrix product over all windows, channels last. The first works on cells of 4x4
    pixels, so that its windows are 2 cells wide and the four pixels of a row move as one 32-bit number. A batch of 16
    is faster in PyTorch.
    """

    def __init__(self, q_network: QNetwork, actions: int) -> None:
        self.weights = {name: weight.detach().numpy() for name, weight in q_network.named_parameters()}
        self.head = slice(actions)  # the value changes no choice
        self.prepare()

    def prepare(self) -> None:
        """After the network's weights have changed: lay out the small ones anew. The large layer is used as it lies."""
        q = self.weights
        narrow, stack = q["conv1.weight"].shape[:2]
        cells = q["conv1.weight"].reshape(narrow, stack, 2, 4, 2, 4).transpose(0, 1, 3, 5, 2, 4) / 255
        kernels = {"conv1": cells.reshape(narrow, -1, 2, 2), "conv2": q["conv2.weight"], "conv3": q["conv3.weight"]}
        self.layers = [
            (kernel.shape[2], stride, kernel.transpose(2, 3, 1, 0).reshape(-1, len(kernel)), q[f"{name}.bias"])
            for (name, kernel), stride in zip(kernels.items(), (1, 2, 1))
        ]

    def __call__(self, obs: np.ndarray) -> np.ndarray:
        """Values (actions,) of one observation (stack, size, size), all of them off by the same number."""
        q, side = self.weights, obs.shape[1] // 4
        x = obs[:, : 4 * side, : 4 * side].view(np.uint32).reshape(-1, side, 4, side)
        x = np.ascontiguousarray(x.transpose(1, 3, 0, 2)).view(np.uint8).reshape(side, side, -1)
        for width, stride, kernel, bias in self.layers:
            down, across, one = x.strides
            side = (len(x) - width) // stride + 1
            shape, strides = (side, side, width, width * x.shape[2]), (stride * down, stride * across, down, one)
            x = np.ndarray(shape, x.dtype, x, strides=strides).reshape(side * side, -1)
            x = x.astype(np.float32, copy=False) @ kernel + bias
            x = np.maximum(x, 0, out=x).reshape(side, side, -1)
        x = q["hidden.weight"] @ x.transpose(2, 0, 1).ravel() + q["hidden.bias"]
        x -= x.sum() / len(x)
        x = np.maximum(x / math.sqrt(x @ x / len(x) + 1e-5) * q["norm.weight"] + q["norm.bias"], 0)
        return q["head.weight"][self.head] @ x + q["head.bias"][self.head]


# ------------------------------------------------------------------------------------------------ the algorithm


def epsilon_at(progress: float, start_e: float, end_e: np.ndarray, exploration_fraction: float) -> np.ndarray:
    """Share of random actions of each game when `progress` (0 to 1) of the run is over; `end_e` is where it ends."""
    if progress >= exploration_fraction:
        return end_e
    return start_e + (end_e - start_e) * progress / exploration_fraction


def end_epsilons(args: Args, number: int) -> np.ndarray:
    """end_e ** (1 + spread * i / (games - 1)) of the games i of collector `number` (Horgan et al. 2018, section 4)."""
    games = max(args.num_collectors, 1) * args.envs_per_collector
    game = number * args.envs_per_collector + np.arange(args.envs_per_collector)
    return args.end_e ** (1 + args.spread * game / max(games - 1, 1))


def td_target(
    reward: torch.Tensor, discount: torch.Tensor, next_q_target: torch.Tensor, next_q_online: torch.Tensor
) -> torch.Tensor:
    """r + discount * Q_target(s', argmax_a Q_online(s', a)), all (B,) or (B, actions), fp32.

    `discount` is gamma^k after k rewards, 0 where the game was over (van Hasselt et al. 2016, equation 4). Plain DQN
    passes the target's values twice.
    """
    return reward + discount * next_q_target.gather(1, next_q_online.argmax(1, keepdim=True)).squeeze(1)


# ------------------------------------------------------------------------------------- from process to process

GOES_ON, TRUNCATED, TERMINATED = range(3)
EPISODE = "distance", "flag", "score", "length", "return"
COUNTS = "produced", "stored", "dropped", "in_flight"
SPAWN = torch.multiprocessing.get_context("spawn")


def shared(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Zeros in shared memory. Its name is gone from /dev/shm before this returns: whatever crashes, nothing is left."""
    return torch.zeros(shape, dtype=dtype).share_memory_()


ORDERED = platform.machine() in ("x86_64", "AMD64")  # stores reach other cores in the order in which they are made


def make_lock() -> Any:
    """A lock where one is needed to keep payload and index in order."""
    return nullcontext() if ORDERED else SPAWN.Lock()


class Ring:
    """Blocks in shared memory that one process pushes and another reads; a block is one step of a collector's games.

    Payload first, then `head`, one aligned 8-byte word: a block is there whole or not at all, and nobody holds a lock.
    head, dropped, failed and using are written by the collector, tail by the learner.
    """

    def __init__(self, args: Args) -> None:
        self.blocks, games = args.ring_blocks, args.envs_per_collector
        block = self.blocks, games
        self.fields = {
            "frame": shared(torch.uint8, *block, args.size, args.size),  # the newest before the step
            "final": shared(torch.uint8, *block, args.size, args.size),  # the newest after it, before a new start
            "action": shared(torch.int8, *block),
            "reward": shared(torch.float32, *block),
            "end": shared(torch.uint8, *block),
            "length": shared(torch.int64, *block),  # steps of the game, this one included
            "episode": shared(torch.float32, *block, 5),  # distance, flag, score, length and return so far
            "since": shared(torch.int64, self.blocks),  # blocks pushed since the last gap
            "seconds": shared(torch.float32, self.blocks, 3),  # waited to push, acted, played
        }
        self.head, self.tail, self.dropped, self.failed, self.using = (shared(torch.int64, 1) for _ in range(5))
        self.lock = make_lock()

    @staticmethod
    def bytes(args: Args) -> int:
        return args.ring_blocks * (args.envs_per_collector * (2 * args.size**2 + 34) + 20)

    def counts(self) -> tuple[int, ...]:
        """Blocks produced, stored, dropped and in flight. Each word is read once, so that they always add up."""
        head, tail, dropped = (word.item() for word in (self.head, self.tail, self.dropped))
        return head + dropped, tail, dropped, head - tail

    def push(self, block: dict[str, Any]) -> bool:
        """Commit a block, unless the ring is full."""
        head = self.head.item()
        with self.lock:
            if head - self.tail.item() == self.blocks:
                return False
        for name, value in block.items():
            self.fields[name].numpy()[head % self.blocks] = value
        with self.lock:
            self.head.numpy()[0] = head + 1
        return True

    def read(self) -> dict[str, torch.Tensor]:
        """What lies in the ring (blocks, ...), up to its edge, in place: `release` it after copying."""
        tail = self.tail.item()
        with self.lock:
            count = min(self.head.item() - tail, self.blocks - tail % self.blocks)
        return {name: field[tail % self.blocks :][:count] for name, field in self.fields.items()}

    def release(self, count: int) -> None:
        with self.lock:
            self.tail.numpy()[0] += count


class Broadcast:
    """What the learner tells all collectors: weights in two slots, how far the run is, and when to stop.

    New weights go to the slot that nobody starts to read, then the version moves on. Who reads looks at the version
    again after copying; only if it has moved may the slot have been overwritten.
    """

    def __init__(self, weights: torch.Tensor) -> None:
        self.slots, self.updates = shared(torch.float32, 2, len(weights)), shared(torch.int64, 2)
        self.version, self.progress, self.stop = (shared(kind, 1) for kind in (torch.int64, torch.float64, torch.int64))
        self.lock, self.learner = make_lock(), os.getpid()

    def over(self) -> bool:
        """Whether to stop: told to, or the learner is gone."""
        return bool(self.stop) or self.learner not in (os.getpid(), os.getppid())

    def publish(self, weights: torch.Tensor, updates: int) -> None:
        version = self.version.item() + 1
        self.slots[version % 2].copy_(weights)
        self.updates.numpy()[version % 2] = updates
        with self.lock:
            self.version.numpy()[0] = version

    def fetch(self, weights: torch.Tensor) -> tuple[int, int]:
        """Copy the newest into `weights`. Gives its version, and after how many updates it was published."""
        while True:
            with self.lock:
                version = self.version.item()
            weights.copy_(self.slots[version % 2])
            updates = self.updates[version % 2].item()
            with self.lock:
                if self.version.item() == version:
                    return version, updates


class Collector:
    """Plays the games of collector `number` with its own copy of the weights. `start` counts the starts of them all."""

    def __init__(self, args: Args, number: int, start: int, ring: Ring, broadcast: Broadcast) -> None:
        self.args, self.ring, self.broadcast = args, ring, broadcast
        self.envs = make_envs(args, args.envs_per_collector, args.seed, start * args.envs_per_collector)
        self.obs = self.envs.reset()
        self.q_network = QNetwork(args, torch.device("cpu")).requires_grad_(False)
        self.weights, self.version = broadcast.slots[0].clone(), -1
        vector_to_parameters(self.weights, self.q_network.parameters())  # which are now views of it
        self.actor = Actor(self.q_network, args.actions) if args.envs_per_collector == 1 else None
        self.end_e, self.rng = end_epsilons(args, number), np.random.default_rng((args.seed, start))
        self.since = 0

    def step(self) -> None:
        """One action in every game, and the block that tells of it."""
        args, ring, now = self.args, self.ring, time.perf_counter
        began = now()
        if self.broadcast.version.item() != self.version:
            self.version, ring.using.numpy()[0] = self.broadcast.fetch(self.weights)
            if self.actor:
                self.actor.prepare()
        epsilon = epsilon_at(self.broadcast.progress.item(), args.start_e, self.end_e, args.exploration_fraction)
        explores, action = self.rng.random((2, len(self.obs)))
        greedy, action = explores >= epsilon, (action * args.actions).astype(np.int64)
        if greedy.any():  # who explores needs no network
            if self.actor:
                action[0] = self.actor(self.obs[0]).argmax()
            else:
                with torch.no_grad():
                    action[greedy] = self.q_network(torch.from_numpy(self.obs[greedy])).argmax(1)
        frame, acted = self.obs[:, -1].copy(), now()
        _, reward, terminated, truncated, info = self.envs.step(action)
        played = now()
        block = {
            "frame": frame,
            "final": info["final_obs"][:, -1],
            "action": action,
            "reward": reward,
            "end": np.where(terminated, TERMINATED, np.where(truncated, TRUNCATED, GOES_ON)),
            "length": info["length"],
            "episode": np.array([info[name] for name in EPISODE]).T,
            "since": self.since,
        }
        self.since += 1
        first, waited = now(), 0.0
        while not ring.push(block | {"seconds": (waited, acted - began, played - acted)}):
            ring.failed += 1
            if args.on_full == "drop":
                ring.dropped += 1
                self.since = 0
                return
            if self.broadcast.over():
                return
            time.sleep(0.0002)
            waited = now() - first


def collect(*arguments: Any) -> None:
    """What a collector's process runs; arguments as `Collector` has them."""
    torch.set_num_threads(1)
    collector = Collector(*arguments)
    while not collector.broadcast.over():
        collector.step()


class Collectors:
    """The processes: started, replaced when they crash or hang, and stopped."""

    def __init__(self, args: Args, broadcast: Broadcast, starts: int) -> None:
        self.args, self.broadcast, self.starts = args, broadcast, starts + (args.num_collectors == 0)
        self.restarts, self.fruitless, self.next_look = 0, 0, 0.0
        self.rings = [Ring(args) for _ in range(max(args.num_collectors, 1))]
        self.began = [0] * args.num_collectors  # blocks in the ring when the process started
        self.signs = [(0, 0.0)] * args.num_collectors  # of life: pushes so far, in vain or not; when that changed
        self.processes = [self.start(number) for number in range(args.num_collectors)]

    def start(self, number: int) -> Any:
        ring = self.rings[number]
        ring.lock = make_lock()  # a crash may have left the other one locked
        self.began[number] = ring.head.item()
        self.signs[number] = ring.head.item() + ring.failed.item(), time.monotonic() + 60  # loading torch takes a while
        process = SPAWN.Process(
            target=collect, args=(self.args, number, self.starts, ring, self.broadcast), daemon=True
        )
        self.starts += 1
        # One thread each, known before torch loads. Ctrl-C is for the learner alone, which tells the others.
        os.environ |= dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
        resource_tracker.ensure_running()  # starting it unblocks signals
        before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        process.start()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return process

    def look_after(self) -> None:
        """Once a second: replace who crashed or hangs. What they had committed stays in their rings."""
        if time.monotonic() < self.next_look:
            return
        self.next_look = time.monotonic() + 1
        for number, (ring, process) in enumerate(zip(self.rings, self.processes)):
            pushes = ring.head.item() + ring.failed.item()
            if pushes != self.signs[number][0]:
                self.signs[number] = pushes, time.monotonic()
            hangs = self.signs[number][1] < time.monotonic() - self.args.hang_seconds
            if hangs or process.exitcode is not None:
                why = "does nothing" if hangs else f"ended with exit code {process.exitcode}"
                print(f"collector {number} {why} and is replaced", file=sys.stderr)
                process.kill()
                process.join()
                self.restarts += 1
                self.fruitless = 0 if ring.head.item() > self.began[number] else self.fruitless + 1
                if self.fruitless == 3:
                    refuse(f"--num-collectors {self.args.num_collectors}: three ended before they played, see above")
                self.processes[number] = self.start(number)

    def stop(self) -> None:
        self.broadcast.stop.fill_(1)
        deadline = time.monotonic() + 2
        for process in self.processes:
            process.join(max(deadline - time.monotonic(), 0))
            process.kill()
            process.join()


class Replay:
    """The last `buffer_size` frames of all games, each stored once, drawn by priority, with n-step returns.

    Every game of every collector has its own row of slots, written in time order and round and round. A slot is the
    newest frame before a step, its action, reward and end; the frame after the last step of a game gets a slot too,
    which no transition starts from. So the n-step successor of a slot lies at most n slots ahead, and its other frames
    lie just before it. A slot can be drawn once n more have followed and until the frames before it are overwritten:
    outside that time its priority is 0.
    """

    # Priorities are summed by blocks; drawing looks at the sums, then into one block. With 32 of 100,000 slots, drawing
    # and new priorities take 0.10 ms on one core; the 17 levels of a sum tree, one after the other, take 0.52.
    BLOCK = 256

    def __init__(self, args: Args, device: torch.device) -> None:
        self.games = max(args.num_collectors, 1) * args.envs_per_collector
        self.rows, self.stack, self.size = args.buffer_size // self.games, args.stack, args.size
        self.n_step, self.alpha = args.n_step, args.alpha
        slots = self.games * self.rows
        needed = slots * (args.size**2 + 12)
        if device.type == "cuda" and needed > 0.8 * torch.cuda.mem_get_info(device)[0]:
            print(f"the replay's {needed / 2**30:.1f} GiB do not fit the GPU; it lives in pinned host memory instead")
            device = torch.device("cpu")
        refuse_if_too_large("--buffer-size", args.buffer_size, args.size**2 + 12, device)
        pinned = device.type == "cpu" and torch.cuda.is_available() and args.device != "cpu"

        def ring(dtype: torch.dtype, *shape: int) -> torch.Tensor:
            return torch.zeros(slots, *shape, dtype=dtype, device=device, pin_memory=pinned)

        self.frame, self.action, self.reward = ring(torch.uint8, args.size**2), ring(torch.int8), ring(torch.float32)
        self.end, self.depth, self.starts = ring(torch.uint8), ring(torch.uint8), ring(torch.bool)
        self.priority = torch.zeros(-(-slots // self.BLOCK) * self.BLOCK, device=device)  # |TD error| ** alpha
        self.top = torch.ones((), device=device)
        self.written = np.zeros(self.games, np.int64)  # slots, by game
        self.device, self.kib = device, needed / slots / 1024
        self.back = torch.arange(args.stack - 1, -1, -1, device=device)
        self.ahead = torch.arange(args.n_step + 1, device=device)
        self.discounts = args.gamma ** self.ahead.float()

    def state_dict(self) -> dict[str, torch.Tensor]:
        names = "frame action reward end depth starts priority top".split()
        return {name: getattr(self, name) for name in names} | {"written": torch.from_numpy(self.written)}

    def load_state_dict(self, saved: dict[str, torch.Tensor]) -> None:
        for name, tensor in self.state_dict().items():
            tensor.copy_(saved[name])

    def store(self, first: int, block: dict[str, torch.Tensor]) -> None:
        """Blocks (blocks, games, ...) of the collector whose first game is `first`, as `Ring.fields` has them."""
        end, length, since = (block[name].numpy() for name in ("end", "length", "since"))
        over = end != GOES_ON
        game = first + np.broadcast_to(np.arange(end.shape[1]), end.shape)
        row = self.written[game] + np.arange(len(end))[:, None] + over.cumsum(0) - over
        depth = np.minimum(length - 1, self.stack - 1)
        starts = since[:, None] >= depth  # after a gap the frames before are not there at first

        def slot(game: np.ndarray, row: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(game * self.rows + row % self.rows).flatten().to(self.device)

        def put(ring: torch.Tensor, at: torch.Tensor, values: torch.Tensor | np.ndarray) -> None:
            ring[at] = torch.as_tensor(values).flatten().to(self.device, ring.dtype)

        at, last = slot(game, row), slot(game[over], row[over] + 1)
        self.frame[at] = block["frame"].flatten(2).flatten(0, 1).to(self.device)
        self.frame[last] = block["final"][torch.from_numpy(over)].flatten(1).to(self.device)
        put(self.action, at, block["action"])
        put(self.reward, at, block["reward"])
        put(self.end, at, end)
        put(self.depth, at, depth)
        put(self.starts, at, starts)
        self.end[last], self.starts[last] = GOES_ON, False
        put(self.depth, last, np.minimum(depth[over] + 1, self.stack - 1))
        gap = since == 0
        if gap.any():  # the slot before is an observation only, and the step that led there was cut off
            before = slot(game[gap], row[gap] - 1)
            self.starts[before] = False
            cut = slot(game[gap], row[gap] - 2)
            self.end[cut] = self.end[cut].clamp(min=TRUNCATED)

        games, rows = np.concatenate([game.ravel(), game[over]]), np.concatenate([row.ravel(), row[over] + 1])
        self.priority[slot(games, rows)] = 0
        self.priority[slot(games, rows + self.stack - 1)] = 0
        ready = slot(games, rows - self.n_step)
        self.priority[ready] = torch.where(self.starts[ready], self.top, 0)
        self.written[first : first + end.shape[1]] += len(end) + over.sum(0)

    def draw(self, batch_size: int, generator: torch.Generator) -> torch.Tensor:
        """`batch_size` slots, each with its share of the priorities, one from every part of their sum."""
        blocks = self.priority.view(-1, self.BLOCK)
        sums = blocks.sum(1).double()
        ends = sums.cumsum(0)
        parts = torch.arange(batch_size, device=self.device)
        parts = parts + torch.rand(batch_size, generator=generator, device=self.device, dtype=torch.float64)
        at = parts / batch_size * ends[-1] * (1 - 1e-12)
        block = torch.searchsorted(ends, at, right=True)
        inside = blocks[block].double().cumsum(1)
        rest = torch.minimum(at - ends[block] + sums[block], inside[:, -1] * (1 - 1e-12)).clamp(min=0)
        return block * self.BLOCK + (inside <= rest[:, None]).sum(1)

    def look(self, first: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
        """(B, stack, size, size): the frame at each row of the game whose slots begin at `first`, and those before."""
        depth = self.depth[first + row % self.rows][:, None].long()
        at = first[:, None] + (row[:, None] - self.back.minimum(depth)) % self.rows
        return self.frame.index_select(0, at.flatten()).view(-1, self.stack, self.size, self.size)

    def gather(self, slot: torch.Tensor) -> list[torch.Tensor]:
        """obs, action, reward, discount and next_obs of the transitions that start at these slots (B,)."""
        row = slot % self.rows
        first = slot - row
        ahead = first[:, None] + (row[:, None] + self.ahead[:-1]) % self.rows
        end = self.end[ahead]
        counts = F.pad((end == GOES_ON)[:, :-1].long().cumprod(1), (1, 0), value=1)
        steps = counts.sum(1)
        reward = (self.reward[ahead] * counts * self.discounts[:-1]).sum(1)
        discount = self.discounts[steps] * ~((end == TERMINATED) & (counts == 1)).any(1)
        return [self.look(first, row), self.action[slot], reward, discount, self.look(first, row + steps)]

    def sample(self, batch_size: int, generator: torch.Generator, beta: torch.Tensor) -> list[torch.Tensor]:
        """What `gather` gives, importance weights (Schaul et al. 2016, section 3.4; largest 1), and the slots."""
        slot = self.draw(batch_size, generator)
        priority = self.priority[slot]
        return [*self.gather(slot), (priority / priority.min()) ** -beta.to(self.device), slot]

    def judge(self, slot: torch.Tensor, td_error: torch.Tensor) -> None:
        """New priorities; the highest ever is what new transitions get."""
        priority = (td_error.abs().nan_to_num(0, 0).to(self.device) + 1e-3) ** self.alpha
        self.priority[slot] = priority
        self.top.copy_(torch.maximum(self.top, priority.max()))


@torch.no_grad()
def evaluate(
    q_network: QNetwork, args: Args, episodes: int, device: torch.device, levels: tuple[int, int] = UNSEEN_LEVELS
) -> dict[str, float]:
    """Play `episodes` greedy games with drawn no-op starts, one per lane, each to its end.

    The real game is played in this process too, whose emulator nobody else needs, one game after the other.
    """
    games, lanes = [], 1 if args.env_id == "SuperMarioBros" else episodes
    for first in range(0, episodes, lanes):
        envs = make_envs(args, lanes, EVAL_SEED, first, levels)
        obs, playing, action = envs.reset(), np.arange(lanes), np.zeros(lanes, np.int64)
        while len(playing):
            action[playing] = q_network(torch.from_numpy(obs[playing]).to(device)).argmax(1).cpu()
            obs, _, terminated, truncated, info = envs.step(action)
            done = (terminated | truncated)[playing]
            games += zip(*(info[name][playing[done]] for name in EPISODE))
            playing = playing[~done]
        del envs  # and with it the emulator: a process can hold one only
    distance, flag, score, _, returned = np.array(games, float).T
    return {
        "eval_score_mean": score.mean().item(),
        "eval_score_median": np.median(score).item(),
        "eval_score_max": score.max().item(),
        "eval_flags": flag.mean().item(),
        "eval_distance_mean": distance.mean().item(),
        "eval_return_mean": returned.mean().item(),
        "eval_episodes": episodes,
    }


@torch.no_grad()
def play(q_network: QNetwork, args: Args, device: torch.device, render_mode: str) -> Iterator[np.ndarray | str]:
    """Frames of one greedy game."""
    game = SuperMarioBrosEnv if args.env_id == "SuperMarioBros" else MarioEnv
    env, done = game(render_mode, **settings_of(args, UNSEEN_LEVELS)), False
    obs, _ = env.reset(seed=EVAL_SEED)
    yield env.render()
    while not done:
        action = q_network(torch.from_numpy(obs).to(device)[None]).argmax().item()
        obs, _, terminated, truncated, _ = env.step(action)
        done = terminated or truncated
        yield env.render()


def write_gif(q_network: QNetwork, args: Args, device: torch.device, folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    first, *others = (Image.fromarray(frame) for frame in play(q_network, args, device, "rgb_array"))
    first.save(folder / "mario.gif", save_all=True, append_images=others, duration=67, loop=0)
    return folder / "mario.gif"


def examine(q_network: QNetwork, args: Args, device: torch.device, folder: Path) -> dict[str, float]:
    """Scores on levels that no training run has seen, flags on those it trains on, and a GIF (--video)."""
    scores = evaluate(q_network, args, args.eval_episodes, device)
    if args.env_id == "MarioLike-v0":
        seen = evaluate(q_network, args, args.eval_episodes, device, TRAIN_LEVELS)
        scores["eval_flags_seen"] = seen["eval_flags"]
    print("  ".join(f"{name} {value:g}" for name, value in scores.items()))
    if args.video:
        print(write_gif(q_network, args, device, folder / "videos"))
    return scores


def show(q_network: QNetwork, args: Args, device: torch.device) -> dict[str, float]:
    """--evaluate: one game in the terminal (--render), or the scores of many."""
    path, saved = load_checkpoint("--evaluate", args.evaluate, args.run_dir)
    try:
        q_network.load_state_dict(saved["q_network"])
    except (KeyError, RuntimeError):
        refuse(f"--evaluate {args.evaluate}: {SHAPES} must be as they were")
    if args.render:
        for frame in play(q_network, args, device, "ansi"):
            print(f"\033[H\033[J{frame}", flush=True)
            time.sleep(1 / MarioEnv.metadata["render_fps"])
        return {}
    return examine(q_network, args, device, path.parent)


# --------------------------------------------------------------- blocks that all scripts share, letter for letter


def refuse(message: str) -> NoReturn:
    """End with one line about what the user asked for, and exit code 2."""
    print(f"{SCRIPT}.py: {message}", file=sys.stderr)
    raise SystemExit(2)


def refuse_if_too_large(flag: str, value: int, each: int, device: torch.device, fixed: int = 0, unit: int = 1) -> None:
    """Refuse storage of `value` * `each` + `fixed` bytes that does not fit; says which multiple of `unit` does."""
    if device.type == "cuda":
        room = torch.cuda.mem_get_info(device)[0]
    else:
        room = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else math.inf
    needed, most = value * each + fixed, (0.9 * room - fixed) // each // unit * unit
    if value > most:
        works = f"at most {most:.0f} works" if most > 0 else "fewer games work"
        refuse(f"{flag} {value}: would take {needed / 2**30:.1f} GiB and there are {room / 2**30:.1f}; {works}")


def pick_device(name: str) -> torch.device:
    if name == "cuda" and not torch.cuda.is_available():
        refuse("--device cuda: this PyTorch sees no CUDA device; cpu and auto work")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


def pick_precision(bf16: bool, fp16: bool, tf32: bool, device: torch.device) -> torch.dtype:
    """dtype of the forward passes. A switch that cannot be active here is answered with one line, and fp32 it is."""
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high" if tf32 else "highest")
        if bf16 and not torch.cuda.is_bf16_supported(including_emulation=False):
            print("--bf16: this GPU has no units for it; fp32 is used instead")
            return torch.float32
        return torch.bfloat16 if bf16 else torch.float16 if fp16 else torch.float32
    for flag, asked in (("--fp16", fp16), ("--tf32", tf32)):
        if asked:
            print(f"{flag}: needs CUDA; fp32 is used instead")
    if bf16:
        matrices = (torch.ones(256, 256, dtype=dtype) for dtype in (torch.bfloat16, torch.float32))
        half, full = (min(timeit.repeat(lambda: x @ x, number=1, repeat=5)) for x in matrices)
        if half < full:
            return torch.bfloat16
        print(f"--bf16: matmuls take {half / full:.0f} times as long as in fp32 on this CPU; fp32 is used instead")
    return torch.float32


def compiled(function: Callable, mode: str, *example: torch.Tensor, **options: Any) -> Callable:
    """`function` compiled, or as it is where that fails: compilation is lazy, so only running it here shows."""
    try:
        fast = torch.compile(function, options=torch._inductor.list_mode_options(mode) | options)
        fast(*example)
        return fast
    except Exception as error:
        print(f"--compile: failed ({str(error).strip().splitlines()[0][:120]}); eager mode is used instead")
        return function


class Graphed:
    """`function` without arguments or result, replayed as a CUDA graph. Every call has its effect exactly once.

    The first three calls run it as it is, which makes what it allocates only once. It may use nothing but tensors that
    live on, and numbers that never change.
    """

    def __init__(self, function: Callable[[], None], generator: torch.Generator, watch: "Stopwatch") -> None:
        self.function, self.generator, self.watch = function, generator, watch
        self.calls, self.graph = 0, torch.cuda.CUDAGraph()

    def __call__(self) -> None:
        self.calls += 1
        if self.calls <= 3:
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                self.function()
            torch.cuda.current_stream().wait_stream(stream)
            return
        if self.calls == 4:
            self.graph.register_generator_state(self.generator)
            with torch.cuda.graph(self.graph):
                self.function()
            self.watch.mark()  # capturing counts nowhere
        self.graph.replay()


class Stopwatch:
    """Seconds by phase. `mark(phase)` ends a phase that began at the mark before; without a name it counts nowhere.

    On CUDA marks are events in the stream: work is charged to the phase that queued it, and nothing waits.
    """

    def __init__(self, device: torch.device) -> None:
        self.cuda, self.marks, self.total = device.type == "cuda", [], Counter()

    def mark(self, phase: str = "") -> None:
        if not self.cuda:
            self.marks.append((phase, time.perf_counter()))
        elif not torch.cuda.is_current_stream_capturing():
            self.marks.append((phase, torch.cuda.Event(enable_timing=True)))
            self.marks[-1][1].record()

    def read(self) -> Counter:
        """Seconds by phase since the last read."""
        if self.cuda:
            torch.cuda.synchronize()  # sync: once per log interval
        seconds = Counter()
        for (_, start), (phase, end) in pairwise(self.marks):
            seconds[phase] += start.elapsed_time(end) / 1000 if self.cuda else end - start
        del seconds[""], self.marks[:-1]
        self.total += seconds
        return seconds


def save_checkpoint(path: Path, state: dict) -> None:
    """Write tensors and plain values to `path`. The file that was there stays whole until the new one is."""
    temporary = path.with_suffix(".tmp")
    try:
        with open(temporary, "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except (OSError, RuntimeError) as error:  # torch turns a full disk into a RuntimeError
        temporary.unlink(missing_ok=True)
        reason = str(error).strip().splitlines()[0]
        print(f"{path}: could not be saved ({reason}); the checkpoint before it is untouched", file=sys.stderr)


def load_checkpoint(flag: str, name: str, run_dir: str) -> tuple[Path, dict]:
    """The file, the run folder's or the "latest" checkpoint of this script. Nothing in the file is executed."""
    path = Path(name)
    if name == "latest":
        found = Path(run_dir).glob("*/checkpoint.pt")
        ours = [file for file in found if f'"script": "{SCRIPT}"' in (file.parent / "args.json").read_text()]
        path = max(ours, key=lambda file: file.stat().st_mtime, default=Path(run_dir))
    path = path / "checkpoint.pt" if path.is_dir() else path
    if not path.is_file():
        refuse(f"{flag} {name}: there is no {path}; a checkpoint, a run folder or latest works")
    try:
        with warnings.catch_warnings(action="ignore"):
            state = torch.load(path, map_location="cpu", weights_only=True)
        if state["script"] != SCRIPT:
            raise ValueError(f"it is one of {state['script']}.py")
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:120]
        refuse(f"{flag} {name}: not a whole checkpoint of {SCRIPT}.py ({reason})")
    return path, state


def machine(device: torch.device) -> dict[str, str | float]:
    """What a result depends on besides the flags."""
    commit = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    cuda, peak_kib = device.type == "cuda", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {
        "device": torch.cuda.get_device_name(device) if cuda else f"cpu, {torch.get_num_threads()} threads",
        "peak_memory_gib": (torch.cuda.max_memory_allocated(device) if cuda else 1024 * peak_kib) / 2**30,
        "torch": torch.__version__,
        "git_commit": subprocess.run(commit, capture_output=True, text=True).stdout.strip() or "unknown",
    }


def main(args: Args) -> dict:
    started = time.perf_counter()
    device = pick_device(args.device)
    args = resolve(args, device)
    torch.set_num_threads(args.threads)
    torch.set_flush_denormal(True)  # 7 % of AdamW's first moments were denormal: 1.6 ms a step, not 0.5
    torch.manual_seed(args.seed)
    dtype = pick_precision(args.bf16, args.fp16, args.tf32, device)
    q_network = QNetwork(args, device)
    if args.evaluate:
        return show(q_network, args, device)

    # --- what a run is made of ------------------------------------------------------------------------------------
    target_network = QNetwork(args, device).requires_grad_(False)
    target_network.load_state_dict(q_network.state_dict())
    weights, target_weights = list(q_network.parameters()), list(target_network.parameters())
    replay = Replay(args, device)
    graphs = args.cudagraph and device.type == "cuda" and replay.device == device
    learning_rate = torch.tensor(args.learning_rate, device=device)
    optimizer = torch.optim.AdamW(
        weights, lr=learning_rate, weight_decay=args.weight_decay, fused=True, capturable=graphs
    )
    scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)
    generator = torch.Generator(replay.device).manual_seed(args.seed)
    beta = torch.tensor(args.beta, device=device)
    learned = torch.zeros(4, device=device)  # since the last log: loss, q, updates skipped; and skipped in a row
    samples, games = args.batch_size * args.accumulate, args.envs_per_collector
    watch = Stopwatch(device)

    # --- run folder -----------------------------------------------------------------------------------------------
    folder = Path(args.run_dir) / (args.run_name or f"{SCRIPT}__{args.seed}__{time.strftime('%Y%m%d-%H%M%S')}")
    if args.resume:
        path, saved = load_checkpoint("--resume", args.resume, args.run_dir)
        folder = path.parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "args.json").write_text(json.dumps({"script": SCRIPT, **vars(args)}, indent=2))
    except OSError as error:
        refuse(f"--run-dir {args.run_dir}: cannot be written ({error.strerror}); another folder works")

    if args.wandb:
        try:
            import wandb
        except ImportError:
            refuse("--wandb: its package is missing; pip install wandb")
        wandb.init(project=SCRIPT, name=folder.name, config=vars(args), sync_tensorboard=True)
    profiler = None
    if args.profile:
        profiler = torch.profiler.profile(schedule=torch.profiler.schedule(wait=100, warmup=5, active=20, repeat=1))
        profiler.start()

    interrupts = []
    for number in (signal.SIGINT, signal.SIGTERM):  # the second one ends the program at once
        signal.signal(number, lambda number, _: (interrupts.append(number), signal.signal(number, signal.SIG_DFL)))

    # --- a new run, or the rest of one ----------------------------------------------------------------------------
    stateful = {"q_network": q_network, "target_network": target_network, "optimizer": optimizer, "scaler": scaler}
    stateful |= {"replay": replay} if args.checkpoint_replay else {}
    global_step, updates, owed, seconds_before, dropped_before, starts = 0, 0, 0.0, 0.0, 0, 0
    if args.resume:
        try:
            for name, part in stateful.items():
                part.load_state_dict(saved[name])
        except (KeyError, RuntimeError, ValueError):
            flags = f"{SHAPES} (with --checkpoint-replay also --buffer-size, --num-collectors and --envs-per-collector)"
            refuse(f"--resume {args.resume}: {flags} must be as they were")
        options = {"lr": learning_rate, "capturable": graphs, "weight_decay": args.weight_decay}
        optimizer.param_groups[0].update(options)  # loading put in the other run's
        generator.set_state(saved["generator"])
        global_step, updates, owed, seconds_before, dropped_before, starts = saved["counters"]
        if not args.checkpoint_replay:
            owed = 0.0  # nothing to pay it from
            print("the replay starts empty: without --checkpoint-replay a checkpoint does not hold it")
    first_step, scores, waits = global_step, {}, deque(maxlen=100_000)
    seen, seen_in_all = Counter(), Counter()  # since the last log, and until then
    writer = SummaryWriter(folder, purge_step=global_step)
    writer.add_text("args", "  \n".join(f"{name}: {value}" for name, value in vars(args).items()))
    precision = str(dtype).removeprefix("torch.")
    print(f"{folder} on {machine(device)['device']} in {precision}")
    if args.num_collectors > CORES:
        print(f"--num-collectors {args.num_collectors}: there are {CORES} cores, so they and the learner take turns")
    if not ORDERED:
        print(f"{platform.machine()} may reorder stores: unlike on x86-64, rings and weights are guarded by locks")
    plays = f"{games} games" + (f" in each of {args.num_collectors} collectors" if args.num_collectors else " in turn")
    every = f"every {samples / args.replay_ratio:g} steps or later (replay ratio {args.replay_ratio:g} or less)"
    print(f"{plays}; {every} an update on {samples} of the last {replay.games * replay.rows:,} frames")

    def elapsed() -> float:
        return seconds_before + time.perf_counter() - started

    def progress() -> float:
        share = max(global_step / (args.total_timesteps or math.inf), elapsed() / (args.max_seconds or math.inf))
        return min(share, 1)

    def due(what: str) -> bool:
        every = getattr(args, f"{what}_every")
        if every == 0 or elapsed() < last[what] + every:
            return False
        last[what] = elapsed()
        return True

    def collected(seen: Counter) -> dict[str, Any]:
        """What the collectors did, in transitions: produced = stored + dropped + in flight, at any moment."""
        by_collector = games * np.array([ring.counts() for ring in fleet.rings])
        produced, _, dropped, in_flight = by_collector.sum(0).tolist()
        return {
            "produced": first_step + dropped_before + produced,
            "stored": global_step,
            "dropped": dropped_before + dropped,
            "in_flight": in_flight,
            "by_collector": by_collector.tolist(),
            "producer_wait_ms_mean": 1000 * seen["wait"] / max(seen["blocks"], 1),
            "producer_wait_ms_p95": 1000 * float(np.percentile(waits or [0], 95)),  # of the last 100,000 blocks
            "failed_pushes": sum(ring.failed.item() for ring in fleet.rings),
            "ring_fill": seen["fill"] / max(seen["reads"], 1),
            "weight_age": seen["age"] / max(seen["reads"], 1),
            "restarts": fleet.restarts,
        }

    def save() -> None:
        if not all(weight.isfinite().all() for weight in weights):
            return print(f"{folder}: the weights are not finite and were not saved", file=sys.stderr)
        state = {name: part.state_dict() for name, part in stateful.items()} | {"generator": generator.get_state()}
        counts = collected(seen_in_all)
        counters = [global_step, updates, owed, elapsed(), counts["dropped"], fleet.starts]
        state |= {"script": SCRIPT, "args": vars(args), "counters": counters, "collected": counts}
        save_checkpoint(folder / "checkpoint.pt", state)

    def log() -> None:
        seconds = watch.read()
        steps, learns, wall = seen["blocks"] * games, seen["updates"], sum(seconds.values()) or math.inf
        counts, ended, blocks = collected(seen), max(seen["games"], 1), max(seen["blocks"], 1)
        distance, flags, score, length, returned = (seen[name] / ended for name in EPISODE)
        loss, q, skipped, in_a_row = learned.tolist()
        learned[:3] = 0
        scalars = {
            "charts/SPS": steps / wall,
            "charts/updates_per_second": learns / wall,
            "charts/samples_per_second": learns * samples / wall,
            "charts/replay_ratio": learns * samples / (steps or math.inf),
            "charts/epsilon": float(epsilon_at(progress(), args.start_e, args.end_e, args.exploration_fraction)),
            "losses/learning_rate": learning_rate.item(),
            "losses/skipped_updates": skipped,
            "perf/rollout_fraction": 1 - seconds["learn"] / wall,
            "perf/epoch_ms": 1000 * wall * args.sync_every / max(learns, 1),
            "perf/act_ms": 1000 * seen["act"] / blocks,
            "perf/env_ms": 1000 * seen["env"] / blocks,
        }
        for n, numbers in enumerate(counts.pop("by_collector")):
            counts |= {f"{name}_{n}": number for name, number in zip(COUNTS, numbers)}
        scalars |= {f"collect/{name}": value for name, value in counts.items()}
        scalars |= {f"perf/{phase}_ms": 1000 * spent * games / (steps or math.inf) for phase, spent in seconds.items()}
        if seen["games"]:
            scalars |= {"charts/score": score, "charts/episodic_length": length, "charts/episodic_return": returned}
            scalars |= {"charts/distance": distance, "charts/flags": flags}
        if learns:
            scalars |= {"losses/td_loss": loss / learns, "losses/q_values": q / learns}
        if device.type == "cuda":
            scalars["perf/gpu_mem_gib"] = torch.cuda.memory_allocated(device) / 2**30
            with suppress(ImportError, RuntimeError):  # without NVML
                scalars["perf/gpu_util"] = torch.cuda.utilization(device)
        for tag, value in scalars.items():
            writer.add_scalar(tag, value, global_step)
        line = "[COLLECT] " + "  ".join(f"{name.replace('_', ' ')} {counts[name]:,}" for name in COUNTS)
        line += f"  steps/s {steps / wall:,.0f}  wait p95 {counts['producer_wait_ms_p95']:.2f} ms  "
        line += f"ring {counts['ring_fill']:.0%}  weights {counts['weight_age']:.1f} updates old"
        print(f"{line}  games {seen['games']:.0f}  distance {distance:.0f}  flags {flags:.0%}  reward {returned:.2f}")
        line = f"[TRAIN]   {progress():4.0%}  updates {updates:,}  updates/s {learns / wall:.1f}  ratio "
        line += f"{scalars['charts/replay_ratio']:.2f}  loss {loss / max(learns, 1):.4f}  q {q / max(learns, 1):.2f}  "
        print(f"{line}epsilon {scalars['charts/epsilon']:.3f}  greedy flags {scores.get('eval_flags', math.nan):.0%}")
        sys.stdout.flush()
        seen_in_all.update(seen)
        seen.clear()
        if in_a_row >= 10:
            first = f"every update from number {updates - in_a_row + 1:.0f} on was not finite and was skipped"
            refuse(f"--learning-rate {args.learning_rate:g}: {first}; a lower one works")

    def write_scores() -> None:
        for name, value in scores.items():
            writer.add_scalar(name.replace("_", "/", 1), value, global_step)

    # --- storing and learning -------------------------------------------------------------------------------------
    def autocast() -> torch.autocast:
        # Fresh for each forward: one that lives longer goes on using the weights as they were cast at its start.
        return torch.autocast(device.type, dtype, enabled=dtype != torch.float32, cache_enabled=False)

    def loss_of(obs, action, reward, discount, next_obs, importance) -> tuple[torch.Tensor, ...]:
        with torch.no_grad():
            next_seen = q_network.see(next_obs)
            with autocast():
                next_q_target = target_network.judge(next_seen)
                next_q_online = q_network.judge(next_seen) if args.double else next_q_target
            target = td_target(reward, discount, next_q_target, next_q_online)
        with autocast():
            q = q_network(obs)
        q = q.gather(1, action.long()[:, None]).squeeze(1)
        loss = (importance * F.smooth_l1_loss(q, target, reduction="none")).mean()
        return loss, q.detach().mean(), q.detach() - target

    def store() -> int:
        """Whole blocks from every ring into the replay. Gives the number of transitions."""
        new = 0
        for number, ring in enumerate(fleet.rings):
            block = ring.read()
            blocks = len(block["since"])
            if not blocks:
                continue
            replay.store(number * games, block)
            ended = block["episode"][block["end"] != GOES_ON]
            wait, act, env = block["seconds"].sum(0).tolist()
            waits.extend(block["seconds"][:, 0].tolist())
            seen.update(dict(zip(EPISODE, ended.sum(0).tolist())), games=len(ended), blocks=blocks, reads=1)
            age = max(updates - ring.using.item(), 0)
            seen.update(wait=wait, act=act, env=env, fill=blocks / ring.blocks, age=age)
            ring.release(blocks)
            new += blocks * games
        return new

    def update() -> None:
        optimizer.zero_grad()
        for _ in range(args.accumulate):
            *batch, slot = replay.sample(args.batch_size, generator, beta)
            loss, q, td_error = loss_step(*(part.to(device, non_blocking=True) for part in batch))
            scaler.scale(loss / args.accumulate).backward()
            replay.judge(slot, td_error)
            learned[:2] += torch.stack([loss.detach().nan_to_num(0, 0, 0), q.nan_to_num(0, 0, 0)]) / args.accumulate
        scaler.unscale_(optimizer)
        finite = nn.utils.clip_grad_norm_(weights, args.max_grad_norm).isfinite()
        optimizer.found_inf = skipped = 1 - finite.float()  # at 1, fused AdamW leaves weights and moments as they are
        scaler.step(optimizer)
        scaler.update()
        learned[2] += skipped
        learned[3] = torch.where(finite & (learned[3] < 10), 0, learned[3] + 1)  # from ten on it only grows

    # --- switches: they wrap `loss_of` and `update` ---------------------------------------------------------------
    loss_step = loss_of
    if args.compile:
        some = torch.zeros(args.batch_size, args.stack, args.size, args.size, dtype=torch.uint8, device=device)
        zeros = torch.zeros(args.batch_size, device=device)
        loss_step = compiled(loss_of, args.compile_mode, some, zeros.to(torch.int8), zeros, zeros, some, zeros)
    if graphs:
        update = Graphed(update, generator, watch)
    elif args.cudagraph:
        print("--cudagraph: needs CUDA, and the replay on it; the loop runs without graphs")

    # --- the loop -------------------------------------------------------------------------------------------------
    def flat() -> torch.Tensor:
        return torch.cat([weight.detach().flatten() for weight in weights])

    broadcast = Broadcast(flat())
    broadcast.publish(flat(), updates)
    fleet = Collectors(args, broadcast, starts)
    in_turn = None if args.num_collectors else Collector(args, 0, starts, fleet.rings[0], broadcast)
    try:
        while fleet.processes and not all(ring.head for ring in fleet.rings) and not interrupts:
            time.sleep(0.01)  # until all of them play
            fleet.look_after()
        last = dict.fromkeys(("log", "eval", "checkpoint"), elapsed())
        writer.add_scalar("perf/warmup_s", time.perf_counter() - started, global_step)
        watch.mark()
        while progress() < 1 and not interrupts:
            # 1 act and step: the collectors do it meanwhile; without any, it is done here
            broadcast.progress.fill_(progress())
            if in_turn and owed < samples:
                in_turn.step()
                watch.mark("rollout")

            # 2 store
            fleet.look_after()
            new = store()
            global_step += new
            if replay.written.sum() >= args.learning_starts:
                # What a learner falls behind by more than 100 updates is let go.
                owed = min(owed + args.replay_ratio * new, 100 * samples)
            watch.mark("store")

            # 3 learn
            if owed >= samples:
                beta.fill_(args.beta + (1 - args.beta) * progress())
                if args.anneal_lr:
                    learning_rate.fill_(args.learning_rate * 0.1 ** progress())
                update()
                owed -= samples
                updates += 1
                seen["updates"] += 1
                if updates % args.target_network_frequency == 0:
                    torch._foreach_lerp_(target_weights, weights, args.tau)
                if updates % args.sync_every == 0:
                    broadcast.publish(flat(), updates)  # sync: on CUDA, weights go to the CPU
                watch.mark("learn")
            elif not new and not in_turn:
                time.sleep(0.001)
                watch.mark("wait")

            # 4 log, evaluate, save
            if due("log"):
                log()
                watch.mark("log")
            if due("eval"):
                scores = evaluate(q_network, args, max(args.eval_episodes // 10, 1), device)
                write_scores()
                watch.mark()
            if due("checkpoint"):
                save()
                watch.mark()
            if profiler:
                profiler.step()
    finally:
        fleet.stop()

    # --- the end --------------------------------------------------------------------------------------------------
    while new := store():
        global_step += new
    watch.mark("store")
    log()
    wall_seconds, busy = elapsed(), sum(watch.total.values()) or math.inf
    save()
    print()
    if interrupts:
        print(f"stopped; {folder / 'checkpoint.pt'} goes on with python {SCRIPT}.py --resume {folder}")
    else:
        scores = examine(q_network, args, device, folder)
        write_scores()
        print(f"watch it play: python {SCRIPT}.py --evaluate {folder} --render")
    if profiler:
        profiler.stop()
        profiler.export_chrome_trace(str(folder / "profile.json"))
        longest = profiler.key_averages().table(sort_by=f"self_{device.type}_time_total", row_limit=30)
        (folder / "profile.txt").write_text(longest)
    steps, learns = global_step - first_step, seen_in_all["updates"]
    summary = {
        "script": SCRIPT,
        **machine(device),
        "precision": precision,
        "compiled": loss_step is not loss_of,
        "cudagraph": graphs,
        "sdpa": None,
        "env_steps": global_step,
        "wall_seconds": wall_seconds,
        "env_steps_per_second": steps / busy,
        "updates_per_second": learns / busy,
        "samples_per_second": learns * samples / busy,
        "replay_ratio": learns * samples / max(steps, 1),
        "rollout_fraction": 1 - watch.total["learn"] / busy,
        "train_fraction": watch.total["learn"] / busy,
        "experience_rate": steps / busy,
        **collected(seen_in_all),
        "replay_kib_per_transition": replay.kib,
        **scores,
    }
    (folder / "summary.json").write_text(json.dumps(summary, indent=2))
    writer.close()
    return summary


def parse() -> Args:
    """The command line, with --resume and --evaluate on top of the flags of that run."""
    args = tyro.cli(Args, description=__doc__)
    name = args.resume or args.evaluate
    if name:
        saved = load_checkpoint("--resume" if args.resume else "--evaluate", name, args.run_dir)[1]["args"]
        try:
            args = tyro.cli(Args, default=Args(**saved), description=__doc__)
        except TypeError as error:
            refuse(f"{name}: made by another version of {SCRIPT}.py ({error})")
    return args


if __name__ == "__main__":
    try:
        main(parse())
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except RuntimeError as error:
        if "memory" not in str(error):
            raise
        refuse("out of memory: a smaller --batch-size, --buffer-size or --ring-blocks works")

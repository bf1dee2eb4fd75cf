"""Double DQN on Mario: processes that collect and never wait, and one that learns.

    python dqn_mario_async.py                             # 15 minutes, then an evaluation and a GIF
    python dqn_mario_async.py --preset original           # batches of 512, four to an update, four collectors
    python dqn_mario_async.py --env-id SuperMarioBros     # the real game; the ROM is yours (envs/smb.py)
    python dqn_mario_async.py --evaluate latest --render  # watch the last agent play

On two CPU cores the agent then reached the flag in 100 % of 100 levels it had never seen, with each of three seeds
(45,000 updates on 32 of 6.5 million transitions). After 20 minutes of the real 1-1 it reached the flag in 60 to 77 % of
100 games (three seeds); random play never does.

To read it: `Collector` plays, `Ring` hands over what it saw, `Broadcast` brings it new weights, `Replay` is what is
learned from, `td_target` what is learned, and the loop in `main` is when. The rest is switches and bookkeeping.
"""

import io
import json
import math
import os
import platform
import shutil
import signal
import sys
import threading
import time
import timeit
import warnings
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, redirect_stderr, suppress
from dataclasses import dataclass, replace
from itertools import count, pairwise
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any, Literal, NoReturn

import numpy as np
import torch
import torch.multiprocessing
import torch.nn as nn
import torch.nn.functional as F
import tyro
from torch.nn.utils import vector_to_parameters
from torch.utils.tensorboard import SummaryWriter

from envs.mario import TRAIN_LEVELS, UNSEEN_LEVELS
from envs.mario_batch import MarioBatch, MarioEnv
from envs.playing import play, show_in_terminal, write_gif
from envs.smb import SuperMarioBrosBatch, SuperMarioBrosEnv

SCRIPT = Path(__file__).stem
EVAL_SEED = 2**31  # above every --seed
CHECKPOINT_VERSION = 2
EVAL_LANES = 128  # games evaluated at once


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
    """steps of all its games that a collector can be ahead of the learner; then it waits"""
    sync_every: int = 5
    """updates between two hand-outs of the weights"""

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
    """frames the replay holds (None: 100,000 on CPU; 1,000,000 on CUDA, or what fits there)"""
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
    """the last game of all ends at end_e ** (1 + spread), those between in between (Horgan et al. 2018); a collector
    that plays one game draws its place between them for each episode"""
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
    """the learner's CPU threads (None: the cores that no collector takes, 8 at most; fewer where other programs keep
    them busy)"""

    # Input and output
    log_every: float = 10.0
    """seconds between log lines"""
    eval_every: float = 60.0
    """seconds between evaluations on the way, of a tenth of --eval-episodes (0: none)"""
    eval_episodes: int = 100
    """games of the final evaluation, on levels that training never plays; the real game has one level, and no more
    starts than --noop-max + 1 (0 to 30 frames of waiting), the same as in training"""
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


# Never from a checkpoint: what names files, or says what to do now.
COMMAND_LINE_ONLY = {"run_dir", "run_name", "resume", "evaluate", "render", "video", "wandb", "rom"}
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
DEFAULTS = {  # of flags that are None
    "cpu": {"batch_size": 32, "buffer_size": 100_000},
    "cuda": {"batch_size": 512, "buffer_size": 1_000_000},
    "none": {"num_collectors": min(max(CORES - 1, 1), 8), "accumulate": 1},
    "original": {"num_collectors": 4, "accumulate": 4, "batch_size": 512, "buffer_size": 50_000},
}


def fill_defaults(args: Args, device: torch.device) -> Args:
    """`args` with nothing a run needs left None. Values that cannot work are refused here, before anything starts."""
    real = args.env_id == "SuperMarioBros"
    defaults = DEFAULTS[device.type] | {"envs_per_collector": 1 if real else 16} | DEFAULTS[args.preset]
    if device.type == "cuda":
        room = 0.8 * torch.cuda.mem_get_info(device)[0]
        defaults["buffer_size"] = min(defaults["buffer_size"], int(room / Replay.slot_bytes(args)))
    if args.total_timesteps is None:
        defaults["max_seconds"] = 900.0
    collectors = defaults["num_collectors"] if args.num_collectors is None else args.num_collectors
    if args.threads is None:
        defaults["threads"] = pick_threads(max(CORES - collectors, 1))
    args = replace(args, **{name: value for name, value in defaults.items() if getattr(args, name) is None})

    shares = {"gamma", "tau", "start_e", "end_e", "exploration_fraction", "alpha", "beta"}
    may_be_0 = {"seed", "learning_starts", "eval_every", "checkpoint_every", *shares} - {"tau"}
    may_be_0 |= {"num_collectors", "difficulty", "noop_max", "spread", "weight_decay"}
    limits = dict.fromkeys(shares, 1) | {"seed": EVAL_SEED - 1, "threads": 256, "eval_episodes": 100_000}
    limits |= {"num_collectors": 256, "stack": 64, "skip": 60, "noop_max": 1_000, "size": 480, "n_step": 1_000}
    for name, value in vars(args).items():
        if type(value) in (int, float):
            highest = limits.get(name, sys.maxsize)
            if not 0 <= value <= highest or (value == 0 and name not in may_be_0):
                lowest = "0 or more" if name in may_be_0 else "above 0"
                fail(f"--{name.replace('_', '-')} {value}: must be {lowest} and at most {highest:g}")
    if args.bf16 and args.fp16:
        fail("--bf16 --fp16: choose one of them")
    if args.cudagraph and args.compile and args.compile_mode != "default":
        fail(f"--compile-mode {args.compile_mode}: captures graphs by itself; with --cudagraph only default works")
    if args.size < 36:
        fail(f"--size {args.size}: the convolutions need at least 36 pixels")
    if real and args.envs_per_collector != 1:
        fail(f"--envs-per-collector {args.envs_per_collector}: a process holds one emulator; use more collectors")
    if real and args.num_collectors == 0:
        fail("--num-collectors 0: this process needs its only emulator for evaluations; 1 or more work")
    games = max(args.num_collectors, 1) * args.envs_per_collector
    least = games * (2 * args.ring_blocks + args.n_step + args.stack)  # what one read can bring, and its surroundings
    if args.buffer_size < least + args.learning_starts:
        fail(f"--buffer-size {args.buffer_size}: at least {least + args.learning_starts} for {games} games")
    if Path("/dev/shm").is_dir() and args.evaluate is None:
        needed, room = max(args.num_collectors, 1) * Ring.bytes(args), shutil.disk_usage("/dev/shm").free
        if needed > room:
            sizes = f"the rings take {needed / 2**20:.0f} MiB of shared memory, /dev/shm has {room / 2**20:.0f} left"
            fail(f"--ring-blocks {args.ring_blocks}: {sizes}; fewer blocks or a larger /dev/shm work")
    if args.render and args.evaluate is None:
        fail("--render: shows a trained agent, so it needs --evaluate PATH")
    if args.resume is not None and args.evaluate is not None:
        fail("--resume --evaluate: choose one of them")
    try:
        make_envs(args, 1)  # an emulator is freed at once
    except ValueError as error:  # which begins with the name of the setting
        flag = next((name for name in settings_of(args, TRAIN_LEVELS) if str(error).startswith(name)), "env_id")
        fail(f"--{flag.replace('_', '-')} {getattr(args, flag)}: {error}")
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
        # On CUDA, channels last is the layout of the tensor cores. On a CPU it makes gradients faster (10 ms, not 15,
        # for 32 on one core), and forward passes alone slower.
        channels_last = obs.is_cuda or torch.is_grad_enabled()
        layout = torch.channels_last if channels_last else torch.contiguous_format
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


def end_epsilons(args: Args, number: int, rng: np.random.Generator) -> np.ndarray:
    """end_e ** (1 + spread * i / (games - 1)) of the games i of collector `number` (Horgan et al. 2018, section 4).

    The paper has hundreds of games, so what is learned from is a mixture of all these shares. With one game a collector
    there are too few for that, and its share would be the largest for ever: such a collector draws its place between
    the ends for each episode instead, so that the same mixture comes one after the other.
    """
    if args.envs_per_collector == 1:
        return args.end_e ** (1 + args.spread * rng.random(1))
    games = max(args.num_collectors, 1) * args.envs_per_collector
    game = number * args.envs_per_collector + np.arange(args.envs_per_collector)
    return args.end_e ** (1 + args.spread * game / (games - 1))


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
COUNTS = "produced", "stored", "in_flight"
SPAWN = torch.multiprocessing.get_context("spawn")


def shared(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Zeros in shared memory. Its name is gone from /dev/shm before this returns: whatever crashes, nothing is left."""
    return torch.zeros(shape, dtype=dtype).share_memory_()


ORDERED = platform.machine() in ("x86_64", "AMD64")  # stores reach other cores in the order in which they are made


class Fence:
    """A lock that keeps payload and index in order where the processor does not; it protects nothing else.

    So whoever has waited for a second, because the process that held it was killed, may go on, and frees it.
    """

    def __init__(self) -> None:
        self.lock = SPAWN.Lock()

    def __enter__(self) -> None:
        self.lock.acquire(timeout=1)

    def __exit__(self, *_: Any) -> None:
        with suppress(ValueError):  # somebody who had waited for a second has freed it
            self.lock.release()


def make_fence() -> Any:
    return nullcontext() if ORDERED else Fence()


class Ring:
    """Blocks in shared memory that one process pushes and another reads; a block is one step of a collector's games.

    Payload first, then `head`, one aligned 8-byte word: a block is there whole or not at all, and nobody holds a lock.
    The learner writes `tail`, the collector all else: `steps` that it has made, pushed or not; how often a push
    `failed`, because the ring was full; after how many updates the weights that it is `using` were published; the mean
    of its shares of random actions, `epsilon`.
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
            "seconds": shared(torch.float32, self.blocks, 3),  # waited to push, acted, played
        }
        self.head, self.tail, self.steps, self.failed, self.using = (shared(torch.int64, 1) for _ in range(5))
        self.epsilon = shared(torch.float64, 1)
        self.fence = make_fence()

    @staticmethod
    def bytes(args: Args) -> int:
        return args.ring_blocks * (args.envs_per_collector * (2 * args.size**2 + 34) + 12)

    def counts(self) -> tuple[int, int]:
        """Steps that its collectors have made, and blocks in flight, both at one moment."""
        while True:
            steps = self.steps.item()
            in_flight = self.head.item() - self.tail.item()
            if self.steps.item() == steps:
                return steps, in_flight

    def push(self, block: dict[str, Any]) -> bool:
        """Commit a block, unless the ring is full."""
        head = self.head.item()
        with self.fence:
            if head - self.tail.item() == self.blocks:
                return False
        for name, value in block.items():
            self.fields[name].numpy()[head % self.blocks] = value
        with self.fence:
            self.head.numpy()[0] = head + 1
        return True

    def read(self) -> dict[str, torch.Tensor]:
        """What lies in the ring (blocks, ...), up to its edge, in place: `release` it after copying."""
        tail = self.tail.item()
        with self.fence:
            count = min(self.head.item() - tail, self.blocks - tail % self.blocks)
        return {name: field[tail % self.blocks :][:count] for name, field in self.fields.items()}

    def release(self, count: int) -> None:
        with self.fence:
            self.tail.numpy()[0] += count


class Broadcast:
    """What the learner tells all collectors: weights in two slots, how far the run is, and when to stop.

    New weights go to the slot that nobody starts to read, then the version moves on. Who reads looks at the version
    again after copying; only if it has moved may the slot have been overwritten.
    """

    def __init__(self, weights: torch.Tensor) -> None:
        self.slots, self.updates = shared(torch.float32, 2, len(weights)), shared(torch.int64, 2)
        self.version, self.progress, self.stop = (shared(kind, 1) for kind in (torch.int64, torch.float64, torch.int64))
        self.fence, self.learner = make_fence(), os.getpid()

    def over(self) -> bool:
        """Whether to stop: told to, or the learner is gone."""
        return bool(self.stop) or self.learner not in (os.getpid(), os.getppid())

    def publish(self, weights: torch.Tensor, updates: int) -> None:
        version = self.version.item() + 1
        self.slots[version % 2].copy_(weights)
        self.updates.numpy()[version % 2] = updates
        with self.fence:
            self.version.numpy()[0] = version

    def fetch(self, weights: torch.Tensor) -> tuple[int, int]:
        """Copy the newest into `weights`. Gives its version, and after how many updates it was published."""
        while True:
            with self.fence:
                version = self.version.item()
            weights.copy_(self.slots[version % 2])
            updates = self.updates[version % 2].item()
            with self.fence:
                if self.version.item() == version:
                    return version, updates


class Publisher:
    """Brings the learner's weights to `broadcast`; from CUDA, if `asynchronous`, while it goes on learning.

    One copy is under way at most, so the CPU queues no more than two hand-outs' worth of updates ahead of the GPU.
    """

    def __init__(self, broadcast: Broadcast, asynchronous: bool) -> None:
        self.broadcast = broadcast
        self.copied = torch.cuda.Event() if asynchronous else None
        self.weights = None  # under way
        self.updates = 0  # after so many

    def publish(self, weights: torch.Tensor, updates: int) -> None:
        if self.copied is None:
            self.broadcast.publish(weights, updates)
            return
        if self.weights is not None:
            self.copied.synchronize()  # sync: learning is more than --sync-every updates behind
            self.poll()
        self.weights = weights.to("cpu", non_blocking=True)  # into pinned memory
        self.updates = updates
        self.copied.record()

    def poll(self) -> None:
        """Hand out weights that have arrived."""
        if self.weights is not None and self.copied.query():
            self.broadcast.publish(self.weights, self.updates)
            self.weights = None


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
        self.number, self.rng = number, np.random.default_rng((args.seed, start))
        self.end_e = end_epsilons(args, number, self.rng)

    def step(self) -> None:
        """One action in every game, and the block that tells of it."""
        args, ring, now = self.args, self.ring, time.perf_counter
        began = now()
        if self.broadcast.version.item() != self.version:
            self.version, ring.using.numpy()[0] = self.broadcast.fetch(self.weights)
            if self.actor:
                self.actor.prepare()
        epsilon = epsilon_at(self.broadcast.progress.item(), args.start_e, self.end_e, args.exploration_fraction)
        ring.epsilon.numpy()[0] = epsilon.mean()
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
        }
        ring.steps += 1
        if (terminated | truncated)[0]:
            self.end_e = end_epsilons(args, self.number, self.rng)  # another one only where it is drawn
        first, waited = now(), 0.0
        while not ring.push(block | {"seconds": (waited, acted - began, played - acted)}):
            ring.failed += 1
            if self.broadcast.over():
                return
            time.sleep(0.0002)
            waited = now() - first


@contextmanager
def born_a_collector() -> Iterator[None]:
    """What a process started in here inherits, and this one has only meanwhile: one thread for each library, known
    before it loads, and deafness to Ctrl-C and SIGTERM, which reach the whole group: the learner tells the others."""
    threads = "OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"
    before = {name: os.environ.get(name) for name in threads}
    mask = None
    try:
        os.environ.update(dict.fromkeys(threads, "1"))
        if hasattr(signal, "pthread_sigmask"):  # on Windows a collector is deaf only once it runs: see `collect`
            resource_tracker.ensure_running()  # starting it unblocks signals
            mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT, signal.SIGTERM])
        yield
    finally:
        if mask is not None:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value


def collect(args: Args, number: int, *others: Any) -> None:
    """What a collector's process runs; arguments as `Collector` has them."""
    for name in (signal.SIGINT, signal.SIGTERM):
        signal.signal(name, signal.SIG_IGN)
    torch.set_num_threads(1)
    try:
        collector = Collector(args, number, *others)
        while not collector.broadcast.over():
            collector.step()
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        print(f"collector {number}: {type(error).__name__} ({reason})", file=sys.stderr, flush=True)
        raise SystemExit(1) from None


class Collectors:
    """The processes: started, replaced when they end by themselves, and stopped."""

    def __init__(self, args: Args, broadcast: Broadcast, starts: int) -> None:
        self.args, self.broadcast, self.starts = args, broadcast, starts + (args.num_collectors == 0)
        self.restarts, self.fruitless, self.next_look = 0, 0, 0.0
        self.rings = [Ring(args) for _ in range(max(args.num_collectors, 1))]
        self.began = [0] * args.num_collectors  # blocks in the ring when the process started
        self.processes = []

    def start(self) -> None:
        for number in range(self.args.num_collectors):
            self.processes.append(self.process(number))

    def process(self, number: int) -> Any:
        """A new one. Who comes after a crash has a number of its own, `starts`, so that it plays other games."""
        ring = self.rings[number]
        self.began[number] = ring.head.item()
        process = SPAWN.Process(
            target=collect, args=(self.args, number, self.starts, ring, self.broadcast), daemon=True
        )
        self.starts += 1
        with born_a_collector():
            process.start()
        return process

    def look_after(self) -> None:
        """Once a second: replace who crashed. What they had committed stays in their rings.

        Raises ChildProcessError when three in a row ended before they played.
        """
        if time.monotonic() < self.next_look:
            return
        self.next_look = time.monotonic() + 1
        for number, (ring, process) in enumerate(zip(self.rings, self.processes)):
            if process.exitcode is None:
                continue
            print(f"collector {number} ended with exit code {process.exitcode} and is replaced", file=sys.stderr)
            self.restarts += 1
            self.fruitless = 0 if ring.head.item() > self.began[number] else self.fruitless + 1
            if self.fruitless == 3:
                raise ChildProcessError("three ended before they played, see above")
            self.processes[number] = self.process(number)

    def stop(self) -> None:
        """Ask them to end, which takes a step of their games; who has not after two seconds is killed."""
        self.broadcast.stop.fill_(1)
        deadline = time.monotonic() + 2
        for process in self.processes:
            process.join(max(deadline - time.monotonic(), 0))
            process.kill()
            process.join()


def to_device(tensors: dict[str, torch.Tensor], device: torch.device) -> dict[str, torch.Tensor]:
    """Tensors of the CPU on `device`: one copy for them all, which nobody waits for. For a CPU they stay as they are.

    They are packed into pinned memory, which PyTorch does not give to anybody else before it has been copied.
    """
    if device.type == "cpu":
        return tensors
    sizes = [-(-tensor.nbytes // 16) * 16 for tensor in tensors.values()]  # so that each begins where any dtype may

    def unpacked(packed: torch.Tensor) -> dict[str, torch.Tensor]:
        parts = zip(tensors.items(), packed.split(sizes))
        return {name: part[: x.nbytes].view(x.dtype).view(x.shape) for (name, x), part in parts}

    packed = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=True)
    for name, part in unpacked(packed).items():
        part.copy_(tensors[name])
    return unpacked(packed.to(device, non_blocking=True))


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
        self.n_step, self.alpha, self.actions = args.n_step, args.alpha, args.actions
        slots = self.games * self.rows
        check_memory("--buffer-size", args.buffer_size, self.slot_bytes(args), device)

        def ring(dtype: torch.dtype, *shape: int) -> torch.Tensor:
            return torch.zeros(slots, *shape, dtype=dtype, device=device)

        self.frame, self.action, self.reward = ring(torch.uint8, args.size**2), ring(torch.int8), ring(torch.float32)
        self.end, self.depth, self.starts = ring(torch.uint8), ring(torch.uint8), ring(torch.bool)
        self.priority = torch.zeros(-(-slots // self.BLOCK) * self.BLOCK, device=device)  # |TD error| ** alpha
        self.top = torch.ones((), device=device)
        self.written = np.zeros(self.games, np.int64)  # slots, by game
        self.device, self.kib = device, self.slot_bytes(args) / 1024
        self.back = torch.arange(args.stack - 1, -1, -1, device=device)
        self.ahead = torch.arange(args.n_step + 1, device=device)
        self.discounts = args.gamma ** self.ahead.float()

    @staticmethod
    def slot_bytes(args: Args) -> int:
        return args.size**2 + 12

    def state_dict(self) -> dict[str, torch.Tensor]:
        names = "frame action reward end depth starts priority top".split()
        return {name: getattr(self, name) for name in names} | {"written": torch.from_numpy(self.written)}

    def load_state_dict(self, saved: dict[str, torch.Tensor]) -> None:
        """Raises ValueError, before anything is changed, for values that no replay has."""
        priority, starts = saved["priority"], saved["starts"]
        for name, highest in (("action", self.actions - 1), ("end", TERMINATED), ("depth", self.stack - 1)):
            if not 0 <= int(saved[name].min()) <= int(saved[name].max()) <= highest:
                raise ValueError(f"{name} must be 0 to {highest}")
        if priority.min() < 0 or saved["top"] <= 0 or priority[: len(starts)][~starts].any():
            raise ValueError("priority must be above 0 where transitions start, else 0")
        if priority[len(starts) :].any() or saved["written"].min() < 0:
            raise ValueError("priority and written must be of slots that there are")
        for name, tensor in self.state_dict().items():
            tensor.copy_(saved[name])

    def store(self, first: int, block: dict[str, torch.Tensor]) -> None:
        """Blocks (blocks, games, ...) of the collector whose first game is `first`, as `Ring.fields` has them."""
        end, length = block["end"].numpy(), block["length"].numpy()
        over, begins = end != GOES_ON, length == 1
        game = first + np.broadcast_to(np.arange(end.shape[1]), end.shape)
        row = self.written[game] + np.arange(len(end))[:, None] + over.cumsum(0) - over
        depth = np.minimum(length - 1, self.stack - 1)
        # The slots of the steps, then those of the final frames.
        games = np.concatenate([game.ravel(), game[over]])
        rows = np.concatenate([row.ravel(), row[over] + 1])
        depths = np.concatenate([depth.ravel(), np.minimum(depth[over] + 1, self.stack - 1)])

        def slot(game: np.ndarray, row: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(game * self.rows + row % self.rows)

        new = {
            "frame": block["frame"].flatten(2).flatten(0, 1),
            "final": block["final"][torch.from_numpy(over)].flatten(1),
            "action": block["action"].flatten().to(self.action.dtype),
            "reward": block["reward"].flatten(),
            "end": block["end"].flatten().to(self.end.dtype),
            "depth": torch.from_numpy(depths.astype(np.uint8)),
            "slot": slot(games, rows),
            "incomplete": slot(games, rows + self.stack - 1),  # older frames of theirs are overwritten
            "ready": slot(games, rows - self.n_step),
            "newest": slot(game[begins], row[begins] - 1),
            "before": slot(game[begins], row[begins] - 2),
        }
        new = to_device(new, self.device)  # from here on nothing comes from the CPU: each copy would wait for the GPU
        at, last = new["slot"].split([end.size, int(over.sum())])
        self.frame[at] = new["frame"]
        self.frame[last] = new["final"]
        self.action[at] = new["action"]
        self.reward[at] = new["reward"]
        self.end[at] = new["end"]
        self.end.index_fill_(0, last, GOES_ON)
        self.depth[new["slot"]] = new["depth"]
        self.starts.index_fill_(0, at, True)
        self.starts.index_fill_(0, last, False)

        # A game whose collector died is cut off where the next one begins: its newest slot, which no final frame
        # follows, is an observation only, and the step that led there its last.
        newest, before = new["newest"], new["before"]
        cut = self.starts[newest] & (self.end[newest] == GOES_ON)
        self.starts[newest] = self.starts[newest] & ~cut
        self.end[before] = torch.where(cut, self.end[before].clamp(min=TRUNCATED), self.end[before])

        self.priority.index_fill_(0, new["slot"], 0)
        self.priority.index_fill_(0, new["incomplete"], 0)
        self.priority[new["ready"]] = self.top * self.starts[new["ready"]]
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
        frames = self.look(torch.cat([first, first]), torch.cat([row, row + steps]))
        obs, next_obs = frames.split(len(slot))
        return [obs, self.action[slot], reward, discount, next_obs]

    def sample(self, batch_size: int, generator: torch.Generator, beta: torch.Tensor) -> list[torch.Tensor]:
        """What `gather` gives, importance weights (Schaul et al. 2016, section 3.4; largest 1), and the slots."""
        slot = self.draw(batch_size, generator)
        priority = self.priority[slot]
        return [*self.gather(slot), (priority / priority.min()) ** -beta, slot]

    def judge(self, slot: torch.Tensor, td_error: torch.Tensor) -> None:
        """New priorities; the highest ever is what new transitions get."""
        priority = (td_error.abs().nan_to_num(0, 0) + 1e-3) ** self.alpha
        self.priority[slot] = priority
        self.top.copy_(torch.maximum(self.top, priority.max()))


@torch.no_grad()
def evaluate(q_network: QNetwork, args: Args, episodes: int, device: torch.device) -> dict[str, float]:
    """Play `episodes` greedy games on levels that no training has seen, one per lane, each to its end.

    The real game is played in this process too, whose emulator nobody else needs, one game after the other. It has only
    one level, and as many starts as frames without action at the beginning, --noop-max + 1, the same as in training:
    100 games of it are some 30 different ones.
    """
    games, most = [], 1 if args.env_id == "SuperMarioBros" else EVAL_LANES
    for first in range(0, episodes, most):
        lanes = min(most, episodes - first)
        envs = make_envs(args, lanes, EVAL_SEED, first, UNSEEN_LEVELS)
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


def watch_game(q_network: QNetwork, args: Args, device: torch.device, render_mode: str) -> Iterator:
    """Frames of one greedy game."""
    game = SuperMarioBrosEnv if args.env_id == "SuperMarioBros" else MarioEnv
    env = game(render_mode, **settings_of(args, UNSEEN_LEVELS))

    @torch.no_grad()
    def policy(obs: np.ndarray) -> int:
        return q_network(torch.from_numpy(obs).to(device)[None]).argmax().item()

    return play(env, policy, EVAL_SEED)


def save_gif(q_network: QNetwork, args: Args, device: torch.device, folder: Path) -> None:
    path = folder / "videos" / "mario.gif"
    try:
        write_gif(watch_game(q_network, args, device, "rgb_array"), path, milliseconds=67)
        say(str(path))
    except OSError as error:
        say(f"--video: {path} cannot be written ({error})")


def evaluate_run(q_network: QNetwork, args: Args, device: torch.device) -> dict[str, float]:
    """--evaluate: one game in the terminal (--render), or the scores of many games and a GIF (--video)."""
    path, checkpoint = load_checkpoint("--evaluate", args.evaluate, args.run_dir)
    expected = {"q_network": q_network.state_dict()}
    check_layout(f"--evaluate {args.evaluate}", checkpoint, expected, SHAPES)
    q_network.load_state_dict(checkpoint["q_network"])
    if args.render:
        show_in_terminal(watch_game(q_network, args, device, "ansi"), MarioEnv.metadata["render_fps"])
        return {}
    scores = evaluate(q_network, args, args.eval_episodes, device)
    say("  ".join(f"{name} {value:g}" for name, value in scores.items()))
    if args.video:
        save_gif(q_network, args, device, path.parent)
    return scores


# --------------------------------------------------------------- blocks that all scripts share, letter for letter


def fail(message: str) -> NoReturn:
    """End with one line about what the user asked for, and exit code 2."""
    print(f"{SCRIPT}.py: {message}", file=sys.stderr)
    raise SystemExit(2)


def say(line: str, end: str = "\n") -> None:
    """Print. When nobody reads any more (`| head`), the run ends as by SIGTERM: it saves, and is silent."""
    try:
        print(line, end=end, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        signal.raise_signal(signal.SIGTERM)


def check_memory(flag: str, value: int, bytes_each: int, device: torch.device, fixed: int = 0, unit: int = 1) -> None:
    """Refuse `value` * `bytes_each` + `fixed` bytes that do not fit, and name the multiple of `unit` that does."""
    if device.type == "cuda":
        available = torch.cuda.mem_get_info(device)[0]
    elif hasattr(os, "sysconf"):
        available = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    else:
        return
    needed = value * bytes_each + fixed
    most = int(0.9 * available - fixed) // bytes_each // unit * unit
    if value > most:
        advice = f"at most {most} works" if most > 0 else "smaller sizes of everything else might"
        fail(f"{flag} {value}: would take {needed / 2**30:.1f} GiB and there are {available / 2**30:.1f}; {advice}")


def pick_device(name: str) -> torch.device:
    if name == "cuda" and not torch.cuda.is_available():
        fail("--device cuda: this PyTorch sees no CUDA device; cpu and auto work")
    on_cuda = name != "cpu" and torch.cuda.is_available()
    return torch.device("cuda" if on_cuda else "cpu")


def matmuls_per_second(threads: int) -> float:
    """On so many threads, measured for 0.2 s: some turns of the scheduler."""
    torch.set_num_threads(threads)
    x = torch.ones(256, 256)
    matmuls = 0
    start = time.perf_counter()
    while time.perf_counter() < start + 0.2:
        torch.relu_(x @ x)
        matmuls += 1
    return matmuls / (time.perf_counter() - start)


def pick_threads(cores: int) -> int:
    """A thread for each core, 8 at most, or fewer where fewer are faster: when other programs are busy here.

    Threads wait for the slowest of them, spinning. Beside one busy process on two cores, two make 3,300 steps/s and
    one 5,700 (benchmarks.md); sleeping instead (OMP_WAIT_POLICY=passive) costs a third on a quiet machine.
    """
    most = min(cores, 8)
    rates = {}
    for threads in sorted({1, max(most // 2, 1), max(most - 1, 1), most}):
        rates[threads] = matmuls_per_second(threads)
    best = max(rates, key=rates.get)
    if rates[best] < 1.1 * rates[most]:
        return most
    say(f"other programs are busy here: {best} of {most} threads are faster (--threads decides)")
    return best


def bf16_speedup() -> float:
    """How many times as fast as in fp32 this CPU multiplies matrices in bfloat16."""
    seconds = {}
    for dtype in (torch.bfloat16, torch.float32):
        x = torch.ones(256, 256, dtype=dtype)
        seconds[dtype] = min(timeit.repeat(lambda x=x: x @ x, number=1, repeat=5))
    return seconds[torch.float32] / seconds[torch.bfloat16]


def pick_precision(bf16: bool, fp16: bool, tf32: bool, device: torch.device) -> torch.dtype:
    """dtype of the forward passes. A flag that has no effect here says so in one line, and fp32 it is."""
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high" if tf32 else "highest")
        torch.backends.cudnn.allow_tf32 = tf32  # of convolutions and recurrent layers, on by default
        if fp16:
            return torch.float16
        if bf16 and torch.cuda.is_bf16_supported(including_emulation=False):
            return torch.bfloat16
        if bf16:
            say("--bf16: this GPU has no units for it; fp32 is used instead")
        return torch.float32
    if fp16:
        say("--fp16: needs CUDA; fp32 is used instead")
    if tf32:
        say("--tf32: needs CUDA; fp32 is used instead")
    if bf16:
        speedup = bf16_speedup()
        if speedup > 1:
            return torch.bfloat16
        say(f"--bf16: matmuls take {1 / speedup:.0f} times as long as in fp32 on this CPU; fp32 is used instead")
    return torch.float32


def try_compile(function: Callable, mode: str, *example: torch.Tensor, **options: Any) -> Callable:
    """`function` compiled, or as it is where that fails: compilation is lazy, so only a call shows whether it works."""
    try:
        compiled = torch.compile(function, options=torch._inductor.list_mode_options(mode) | options)
        with torch._functorch.config.patch(force_non_lazy_backward_lowering=True):  # else it may fail in the loop
            compiled(*example)
        return compiled
    except Exception as error:
        reason = str(error).strip().splitlines()[0][:120]
        say(f"--compile: failed ({reason}); eager mode is used instead")
        return function


class CUDAGraphStep:
    """`function` without arguments or result, replayed as a CUDA graph. Every call has its effect exactly once.

    The first three calls run it as it is, which makes what it allocates only once. It may use nothing but tensors that
    live on, and numbers that never change. Where it cannot be captured, `graph` is None and it goes on as it is.
    """

    def __init__(
        self,
        function: Callable[[], None],
        generator: torch.Generator,
        timer: "PhaseTimer",
        scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        self.function = function
        self.generator = generator
        self.timer = timer
        self.scaler = scaler
        self.calls = 0
        self.graph = torch.cuda.CUDAGraph()
        self.stream = torch.cuda.Stream()

    def __call__(self) -> None:
        self.calls += 1
        if self.calls <= 3:
            self.warm_up()
            return
        if self.calls == 4:
            self.capture()
        if self.graph is None:
            self.function()
        else:
            self.graph.replay()

    def warm_up(self) -> None:
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream), warnings.catch_warnings(action="ignore"):  # Adam's: not captured yet
            self.function()
        torch.cuda.current_stream().wait_stream(self.stream)

    def capture(self) -> None:
        try:
            self.graph.register_generator_state(self.generator)
            with torch.cuda.graph(self.graph, stream=self.stream):
                self.function()
        except RuntimeError as error:
            reason = str(error).strip().splitlines()[0][:120]
            say(f"--cudagraph: failed ({reason}); the loop goes on without this graph")
            self.graph = None
            default_generator = torch.cuda.default_generators[torch.cuda.current_device()]
            for generator in (self.generator, default_generator):  # their old states still take part in the capture
                generator.graphsafe_set_state(generator.clone_state())
            if self.scaler is not None:
                self.scaler.update(self.scaler.get_scale())  # forgets that it has unscaled gradients
        self.timer.lap()


class PhaseTimer:
    """Seconds by phase. `lap(phase)` ends a phase that began at the lap before; what `lap()` ends counts nowhere.

    On CUDA laps are events in the stream: work is charged to the phase that queued it, and nothing waits.
    """

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self.laps = []
        self.total = Counter()

    def lap(self, phase: str = "") -> None:
        if not self.cuda:
            self.laps.append((phase, time.perf_counter()))
        elif not torch.cuda.is_current_stream_capturing():
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.laps.append((phase, event))

    def read(self) -> Counter:
        """Seconds by phase since the last read."""
        if self.cuda:
            torch.cuda.synchronize()  # sync: once per log interval
        seconds = Counter()
        for (_, start), (phase, end) in pairwise(self.laps):
            seconds[phase] += start.elapsed_time(end) / 1000 if self.cuda else end - start
        del seconds[""]
        del self.laps[:-1]
        self.total += seconds
        return seconds


class Interrupts:
    """Ctrl-C and SIGTERM. The first ends the loop after its round, or at once what runs `with interrupts.at_once()`.

    The second ends the program.
    """

    def __init__(self) -> None:
        self.count = 0
        self.raises = False
        signal.signal(signal.SIGINT, self.interrupt)
        signal.signal(signal.SIGTERM, self.interrupt)

    def __bool__(self) -> bool:
        return self.count > 0

    def interrupt(self, number: int, frame: Any) -> None:
        self.count += 1
        if self.raises or self.count > 1:
            raise KeyboardInterrupt

    @contextmanager
    def at_once(self) -> Iterator[None]:
        self.raises = True
        try:
            yield
        except KeyboardInterrupt:
            self.count = max(self.count, 1)
        finally:
            self.raises = False


@contextmanager
def restore_process() -> Iterator[None]:
    """At the end, put back what a run sets for its whole process."""
    on_interrupt = signal.getsignal(signal.SIGINT)
    on_terminate = signal.getsignal(signal.SIGTERM)
    threads = torch.get_num_threads()
    precision = torch.get_float32_matmul_precision()
    cudnn_tf32 = torch.backends.cudnn.allow_tf32
    excepthook = threading.excepthook

    def hook(what: Any) -> None:
        if not isinstance(what.exc_value, OSError):  # TensorBoard's thread on a full disk: `write_scalars` says it
            excepthook(what)

    threading.excepthook = hook
    try:
        yield
    finally:
        threading.excepthook = excepthook
        signal.signal(signal.SIGINT, on_interrupt)
        signal.signal(signal.SIGTERM, on_terminate)
        torch.set_num_threads(threads)
        torch.set_float32_matmul_precision(precision)
        torch.backends.cudnn.allow_tf32 = cudnn_tf32
        torch.set_flush_denormal(False)


def make_run_folder(args: Args) -> Path:
    """A folder that no other run has. Whoever creates args.json in it owns it, also of two that start at once."""
    name = args.run_name or f"{SCRIPT}__{args.seed}__{time.strftime('%Y%m%d-%H%M%S')}"
    for number in count(1):
        folder = Path(args.run_dir) / (name if number == 1 else f"{name}-{number}")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with open(folder / "args.json", "x") as file:
                json.dump({"script": SCRIPT, **vars(args)}, file, indent=2)
            return folder
        except FileExistsError:
            if args.run_name:
                fail(f"--run-name {args.run_name}: {folder} exists; another name or --resume {folder} works")
        except OSError as error:
            fail(f"--run-dir {args.run_dir}: cannot be written ({error.strerror}); another folder works")


def write_json(path: Path, values: dict) -> None:
    try:
        path.write_text(json.dumps(values, indent=2))
    except OSError as error:
        print(f"{path}: could not be written ({error.strerror})", file=sys.stderr)


def write_scalars(writer: SummaryWriter, scalars: dict[str, float], step: int) -> None:
    """Into TensorBoard. A disk that is full, or was for a moment, is no reason to end a run."""
    try:
        for tag, value in scalars.items():
            writer.add_scalar(tag, value, step)
    except OSError as error:
        print(f"{writer.log_dir}: could not be logged to ({error.strerror}); the run goes on", file=sys.stderr)


def save_checkpoint(path: Path, checkpoint: dict) -> None:
    """Write tensors and plain values to `path`. The file that was there stays whole until the new one is."""
    temporary = path.with_suffix(f".{os.getpid()}.tmp")  # of this process: two may write into one folder
    try:
        with open(temporary, "wb") as file:
            torch.save(checkpoint, file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except (OSError, RuntimeError) as error:  # torch turns a full disk into a RuntimeError
        with suppress(OSError):
            temporary.unlink()
        reason = str(error).strip().splitlines()[0]
        print(f"{path}: could not be saved ({reason}); the checkpoint before it is untouched", file=sys.stderr)


def find_checkpoint(flag: str, name: str, run_dir: str) -> Path:
    """The file `name`, the checkpoint of the run folder `name`, or the "latest" of this script."""

    def is_ours(path: Path) -> bool:
        with suppress(OSError, ValueError, TypeError, KeyError):
            return json.loads((path.parent / "args.json").read_text())["script"] == SCRIPT
        return False

    if not name:
        fail(f"{flag} '': names nothing; a checkpoint, a run folder or latest works")
    path = Path(name)
    if name == "latest":
        checkpoints = filter(is_ours, Path(run_dir).glob("*/checkpoint.pt"))
        path = max(checkpoints, key=lambda path: path.stat().st_mtime, default=Path(run_dir))
    if path.is_dir():
        path = path / "checkpoint.pt"
    if not path.is_file():
        fail(f"{flag} {name}: there is no {path}; a checkpoint, a run folder or latest works")
    return path


def load_checkpoint(flag: str, name: str, run_dir: str) -> tuple[Path, dict]:
    """Path and content of a checkpoint of this script. Nothing in the file is executed."""
    path = find_checkpoint(flag, name, run_dir)
    try:
        with warnings.catch_warnings(action="ignore"):
            checkpoint = torch.load(path, map_location="cpu", weights_only=True)
        if checkpoint["script"] != SCRIPT:
            raise ValueError(f"it is one of {checkpoint['script']}.py")
        if checkpoint.get("version") != CHECKPOINT_VERSION:
            raise ValueError("it was made by another version")
        other_flags = set(checkpoint["args"]) ^ set(vars(Args()))
        if other_flags:
            raise ValueError(f"it was made by another version, with other flags: {other_flags}")
    except Exception as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        fail(f"{flag} {name}: not a whole checkpoint of {SCRIPT}.py ({lines[0][:120]})")
    return path, checkpoint


def saved_flags(asked: str, saved_args: dict[str, Any]) -> list[str]:
    """The command line of a checkpoint's run, but for flags that name files or say what to do: they are the user's."""
    flags = []
    for name, value in saved_args.items():
        flag = name.replace("_", "-")
        if name in COMMAND_LINE_ONLY or value is None:
            continue
        if type(value) is bool:
            flags.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            flags.append(f"--{flag}={value}")
    try:
        with redirect_stderr(io.StringIO()):
            tyro.cli(Args, args=flags)
    except SystemExit:
        fail(f"{asked}: not a whole checkpoint of {SCRIPT}.py (its flags: {str(flags)[:2000]})")
    return flags


def layout(value: Any) -> Any:
    """Names, types, dtypes and shapes of what was saved; None for what no run saves, such as NaN or sparse tensors."""
    if isinstance(value, dict):
        return {name: layout(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [layout(part) for part in value]
    if isinstance(value, torch.Tensor):
        if value.layout != torch.strided:
            return None
        if value.is_floating_point() and not value.isfinite().all():
            return None
        return value.dtype, value.shape
    if type(value) is float and not math.isfinite(value):
        return None
    if type(value) is int and value < 0:
        return None
    return type(value)


def check_layout(asked: str, checkpoint: dict[str, Any], expected: dict[str, Any], flags: str) -> None:
    """Refuse a checkpoint with parts that are not laid out as `expected`; `flags` are those that decide it."""
    for name, part in expected.items():
        if name not in checkpoint or layout(checkpoint[name]) != layout(part):
            fail(f"{asked}: its {name} is missing, damaged or of another run; {flags} must be as they were")


# the tensor that the loop writes to, not a copy


def copy_tensors(target: dict[str, Any], saved: dict[str, Any]) -> None:
    """Into the tensors of `target`, which is laid out as `saved` is."""
    for name, value in target.items():
        if isinstance(value, dict):
            copy_tensors(value, saved[name])
        else:
            value.copy_(saved[name])


def init_adam(optimizer: torch.optim.Optimizer) -> None:
    """Adam's state as its first step would make it, so that a checkpoint can be copied into it."""
    for weight in optimizer.param_groups[0]["params"]:
        optimizer.state[weight] = {
            "step": torch.zeros((), device=weight.device),
            "exp_avg": torch.zeros_like(weight),
            "exp_avg_sq": torch.zeros_like(weight),
        }


def peak_memory_gib(device: torch.device) -> float | None:
    """The most that this run has taken: of the GPU, or of the machine (None on Windows, which does not tell)."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    try:
        import resource
    except ImportError:
        return None
    unit = 1 if sys.platform == "darwin" else 1024  # bytes there, KiB elsewhere
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30


def is_out_of_memory(error: BaseException) -> bool:
    kinds = (MemoryError, torch.OutOfMemoryError)
    return isinstance(error, kinds) or "DefaultCPUAllocator: can't allocate memory" in str(error)


@restore_process()
def main(args: Args) -> dict:
    started = time.perf_counter()
    interrupts = Interrupts()
    device = pick_device(args.device)
    args = fill_defaults(args, device)
    torch.set_num_threads(args.threads)
    torch.set_flush_denormal(True)  # 7 % of AdamW's first moments were denormal: 1.6 ms a step, not 0.5
    torch.manual_seed(args.seed)
    dtype = pick_precision(args.bf16, args.fp16, args.tf32, device)
    q_network = QNetwork(args, device)
    if args.evaluate is not None:
        with interrupts.at_once():
            return evaluate_run(q_network, args, device)
        return {}

    # --- what a run is made of ------------------------------------------------------------------------------------
    target_network = QNetwork(args, device).requires_grad_(False)
    target_network.load_state_dict(q_network.state_dict())
    weights, target_weights = list(q_network.parameters()), list(target_network.parameters())
    replay = Replay(args, device)
    graphs = args.cudagraph and device.type == "cuda"
    learning_rate = torch.tensor(args.learning_rate, device=device)
    optimizer = torch.optim.AdamW(
        weights, lr=learning_rate, weight_decay=args.weight_decay, fused=True, capturable=graphs
    )
    init_adam(optimizer)
    scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)
    generator = torch.Generator(device).manual_seed(args.seed)
    beta = torch.tensor(args.beta, device=device)
    learned = torch.zeros(2, device=device)  # sums of loss and q since the last log
    samples, games = args.batch_size * args.accumulate, args.envs_per_collector
    timer = PhaseTimer(device)

    # --- a new run, or the rest of one ----------------------------------------------------------------------------
    global_step, updates, owed, seconds_before, starts = 0, 0, 0.0, 0.0, 0
    fleet = None

    def elapsed() -> float:
        return seconds_before + time.perf_counter() - started

    def progress() -> float:
        share = max(global_step / (args.total_timesteps or math.inf), elapsed() / (args.max_seconds or math.inf))
        return min(share, 1)

    def run_state() -> dict[str, Any]:
        """All there is to a run but its games, as tensors and plain values."""
        state = {
            "q_network": q_network.state_dict(),
            "target_network": target_network.state_dict(),
            "optimizer": optimizer.state_dict()["state"],
            "scaler": scaler.state_dict(),
            "device": device.type,  # of the generator
            "generator": generator.get_state(),
            "global_step": global_step,
            "updates": updates,
            "owed": owed,
            "elapsed": elapsed(),
            "starts": fleet.starts if fleet else starts,  # of collectors: each plays other games
        }
        return state | ({"replay": replay.state_dict()} if args.checkpoint_replay else {})

    def load_run_state(saved: dict[str, Any]) -> None:
        """Checks everything first: what does not fit is refused before anything is changed."""
        nonlocal global_step, updates, owed, seconds_before, starts
        asked, expected = f"--resume {args.resume}", run_state()
        if args.checkpoint_replay and "replay" not in saved:
            del expected["replay"]
        if not (saved.get("scaler") and expected["scaler"]):  # only float16 has something there
            del expected["scaler"]
        same_device = saved.get("device") == device.type
        if not same_device:
            del expected["device"], expected["generator"]
        flags = SHAPES + (" and --buffer-size, --num-collectors, --envs-per-collector" if "replay" in expected else "")
        check_layout(asked, saved, expected, flags)
        try:
            if same_device:
                torch.Generator(device).set_state(saved["generator"])
            if "replay" in expected:
                replay.load_state_dict(saved["replay"])
        except (RuntimeError, ValueError) as error:
            fail(f"{asked}: not a whole checkpoint of {SCRIPT}.py ({error})")
        global_step = saved["global_step"]
        updates = saved["updates"]
        seconds_before = saved["elapsed"]
        starts = saved["starts"]
        if progress() >= 1:
            over = f"its run is over after {global_step:,} steps and {elapsed():.0f} s"
            fail(f"{asked}: {over}; a larger --total-timesteps or --max-seconds works")
        for name in ("q_network", "target_network", "optimizer"):
            copy_tensors(expected[name], saved[name])
        if "scaler" in expected:
            scaler.load_state_dict(saved["scaler"])
        if same_device:
            generator.set_state(saved["generator"])
        else:
            say("the random numbers begin anew: those of the checkpoint are of another kind of device")
        if "replay" in expected:
            owed = saved["owed"]
        else:  # and nothing is owed, as there is nothing to learn from
            say("the replay starts empty: without --checkpoint-replay a checkpoint does not hold it")

    folder = None
    if args.resume is not None:
        path, saved = load_checkpoint("--resume", args.resume, args.run_dir)
        load_run_state(saved)
        folder = path.parent
        write_json(folder / "args.json", {"script": SCRIPT, **vars(args)})
        for unfinished in folder.glob("checkpoint.*.tmp"):  # of a run that was killed while it saved
            unfinished.unlink(missing_ok=True)
    if args.wandb:
        try:
            import wandb
        except ImportError:
            fail("--wandb: its package is missing; pip install wandb")
    folder = folder or make_run_folder(args)
    if args.wandb:
        wandb.init(project=SCRIPT, name=folder.name, config=vars(args), sync_tensorboard=True)

    first_step, first_update, scores, waits = global_step, updates, {}, deque(maxlen=100_000)
    seen, seen_in_all = Counter(), Counter()  # since the last log, and until then
    stored = np.zeros(max(args.num_collectors, 1), np.int64)  # steps in the replay, by collector, of this part of a run
    writer = SummaryWriter(folder, purge_step=global_step)
    writer.add_text("args", "  \n".join(f"{name}: {value}" for name, value in vars(args).items()))
    precision = str(dtype).removeprefix("torch.")
    threads = f"cpu, {torch.get_num_threads()} threads"
    device_name = torch.cuda.get_device_name(device) if device.type == "cuda" else threads
    say(f"{folder} on {device_name} in {precision}")
    if not args.bf16 and device.type == "cpu" and bf16_speedup() > 1.2:
        say("this CPU multiplies matrices faster in bf16: --bf16 learns faster here (benchmarks.md)")
    if device.type == "cuda" and not (args.bf16 and args.cudagraph):
        say("on CUDA --bf16 and --cudagraph should make it faster; no GPU has measured it yet")
    if args.num_collectors > CORES:
        say(f"--num-collectors {args.num_collectors}: there are {CORES} cores, so they and the learner take turns")
    if not ORDERED:
        say(f"{platform.machine()} may reorder stores: unlike on x86-64, rings and weights are guarded by locks")
    plays = f"{games} games" + (f" in each of {args.num_collectors} collectors" if args.num_collectors else " in turn")
    every = f"every {samples / args.replay_ratio:g} steps or later (replay ratio {args.replay_ratio:g} or less)"
    say(f"{plays}; {every} an update on {samples} of the last {replay.games * replay.rows:,} frames")

    def due(what: str) -> bool:
        every = getattr(args, f"{what}_every")
        if every == 0 or elapsed() < last[what] + every:
            return False
        last[what] = elapsed()
        return True

    def collected(seen: Counter) -> dict[str, Any]:
        """What became of the collectors' steps. They count what they produce, the learner counts what it stores.

        A collector that ends between a step and its push loses that step, so `lost` is at most one for each start.
        """
        by_collector = []
        for number, ring in enumerate(fleet.rings):
            steps, in_flight = ring.counts()
            by_collector.append([games * steps, int(stored[number]), games * in_flight])
        produced, new, in_flight = np.sum(by_collector, 0).tolist()
        seconds = seen["wait"] + seen["act"] + seen["env"]
        return {
            "produced": first_step + produced,
            "stored": first_step + new,
            "in_flight": in_flight,
            "lost": produced - new - in_flight,
            "by_collector": by_collector,
            "wait_fraction": seen["wait"] / (seconds or math.inf),
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
        header = {"script": SCRIPT, "version": CHECKPOINT_VERSION, "args": vars(args)}
        state = {**header, "collected": collected(seen_in_all), **run_state()}
        save_checkpoint(folder / "checkpoint.pt", state)

    def count_steps(timed: bool) -> None:
        """Steps made since the last call count into speeds only if the seconds since then do."""
        nonlocal counted
        produced = games * sum(ring.steps.item() for ring in fleet.rings)
        seen["steps"] += timed * (produced - counted)
        counted = produced

    def log() -> None:
        count_steps(True)
        seconds = timer.read()
        steps, learns, wall = seen["steps"], seen["updates"], sum(seconds.values()) or math.inf
        counts, ended, blocks = collected(seen), max(seen["games"], 1), max(seen["blocks"], 1)
        distance, flags, score, length, returned = (seen[name] / ended for name in EPISODE)
        loss, q = learned.tolist()
        learned.zero_()
        scalars = {
            "charts/SPS": steps / wall,
            "charts/updates_per_second": learns / wall,
            "charts/samples_per_second": learns * samples / wall,
            "charts/replay_ratio": learns * samples / (seen["blocks"] * games or math.inf),
            "charts/epsilon": np.mean([ring.epsilon.item() for ring in fleet.rings]).item(),
            "losses/learning_rate": learning_rate.item(),
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
            with suppress(Exception):  # NVML missing, or an error of its own
                scalars["perf/gpu_util"] = torch.cuda.utilization(device)
        write_scalars(writer, scalars, global_step)
        line = "[COLLECT] " + "  ".join(f"{name.replace('_', ' ')} {counts[name]:,}" for name in COUNTS)
        line += f"  steps/s {steps / wall:,.0f}  waited {counts['wait_fraction']:.0%} of the time  "
        line += f"ring {counts['ring_fill']:.0%}  weights {counts['weight_age']:.1f} updates old"
        say(f"{line}  games {seen['games']:.0f}  distance {distance:.0f}  flags {flags:.0%}  reward {returned:.2f}")
        line = f"[TRAIN]   {progress():4.0%}  updates {updates:,}  updates/s {learns / wall:.1f}  ratio "
        line += f"{scalars['charts/replay_ratio']:.2f}  loss {loss / max(learns, 1):.4f}  q {q / max(learns, 1):.2f}  "
        say(f"{line}epsilon {scalars['charts/epsilon']:.3f}  greedy flags {scores.get('eval_flags', math.nan):.0%}")
        if not 0 <= counts["lost"] <= games * fleet.starts:
            starts_so_far = f"{counts['lost']:,} steps lost by {fleet.starts} collectors"
            print(f"{folder}: collectors and learner do not count the same: {starts_so_far}", file=sys.stderr)
        seen_in_all.update(seen)
        seen.clear()
        if not math.isfinite(loss):
            fail(f"--learning-rate {args.learning_rate:g}: the loss is {loss} since the last log; a lower one works")

    def test(episodes: int) -> dict[str, float]:
        scores = evaluate(q_network, args, episodes, device)
        write_scalars(writer, {name.replace("_", "/", 1): value for name, value in scores.items()}, global_step)
        return scores

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
            blocks = len(block["length"])
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
            stored[number] += blocks * games
            new += blocks * games
        return new

    def update() -> None:
        optimizer.zero_grad()
        for _ in range(args.accumulate):
            *batch, slot = replay.sample(args.batch_size, generator, beta)
            loss, q, td_error = loss_step(*batch)
            scaler.scale(loss / args.accumulate).backward()
            replay.judge(slot, td_error)
            learned.add_(torch.stack([loss.detach(), q]) / args.accumulate)
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(weights, args.max_grad_norm)
        scaler.step(optimizer)
        scaler.update()

    # --- switches: they wrap `loss_of` and `update` ---------------------------------------------------------------
    loss_step = loss_of
    if args.compile:
        example = replay.gather(torch.zeros(args.batch_size, dtype=torch.int64, device=device))
        importance = torch.zeros(args.batch_size, device=device)
        loss_step = try_compile(loss_of, args.compile_mode, *example, importance)
    if graphs:
        update = CUDAGraphStep(update, generator, timer, scaler)
    elif args.cudagraph:
        say("--cudagraph: needs CUDA; the loop runs without graphs")

    # --- the loop -------------------------------------------------------------------------------------------------
    def flat() -> torch.Tensor:
        return torch.cat([weight.detach().flatten() for weight in weights])

    def look_after() -> None:
        """What cannot be replaced ends the run, but not before it is saved."""
        try:
            fleet.look_after()
        except OSError as error:
            if updates > first_update:
                save()
            fail(f"--num-collectors {args.num_collectors}: {error}")

    broadcast = Broadcast(flat())
    broadcast.publish(flat(), updates)
    # In turn, what is played next must not depend on how long a copy takes: the seed decides all of the run.
    publisher = Publisher(broadcast, asynchronous=device.type == "cuda" and args.num_collectors > 0)
    fleet = Collectors(args, broadcast, starts)
    in_turn = None if args.num_collectors else Collector(args, 0, starts, fleet.rings[0], broadcast)
    counted = 0
    try:
        fleet.start()
        while fleet.processes and not all(ring.head for ring in fleet.rings) and not interrupts:
            time.sleep(0.01)  # until all of them play
            look_after()
        last = dict.fromkeys(("log", "eval", "checkpoint"), elapsed())
        write_scalars(writer, {"perf/warmup_s": time.perf_counter() - started}, global_step)
        count_steps(False)
        timer.lap()
        while progress() < 1 and not interrupts:
            # 1 act and step: the collectors do it meanwhile; without any, it is done here
            broadcast.progress.fill_(progress())
            if in_turn and owed < samples:
                in_turn.step()
                timer.lap("rollout")

            # 2 store
            look_after()
            new = store()
            global_step += new
            if replay.written.sum() >= args.learning_starts:
                # What a learner falls behind by more than 100 updates is let go.
                owed = min(owed + args.replay_ratio * new, 100.0 * samples)
            timer.lap("store")

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
                    with torch.no_grad():  # else each update would lengthen a graph that nobody needs, for ever
                        torch._foreach_lerp_(target_weights, weights, args.tau)
                if updates % args.sync_every == 0:
                    publisher.publish(flat(), updates)
                timer.lap("learn")
            elif not new and not in_turn:
                time.sleep(0.001)
                timer.lap("wait")
            publisher.poll()

            # 4 log, evaluate, save
            if due("log"):
                log()
                timer.lap("log")
            if due("eval"):
                count_steps(True)
                with interrupts.at_once():
                    scores = test(max(args.eval_episodes // 10, 1))
                count_steps(False)
                timer.lap()
            if due("checkpoint"):
                count_steps(True)
                save()
                count_steps(False)
                timer.lap()
        count_steps(True)
    finally:
        fleet.stop()

    # --- the end: what must not be lost first ---------------------------------------------------------------------
    count_steps(False)
    while new := store():
        global_step += new
    log()
    wall_seconds, busy = elapsed(), sum(timer.total.values()) or math.inf
    save()
    steps, learns = global_step - first_step, seen_in_all["updates"]
    summary = {
        "script": SCRIPT,
        "device": device_name,
        "peak_memory_gib": peak_memory_gib(device),
        "precision": precision,
        "compiled": loss_step is not loss_of,
        "cudagraph": graphs and update.graph is not None,
        "sdpa": None,
        "env_steps": global_step,
        "wall_seconds": wall_seconds,
        "env_steps_per_second": seen_in_all["steps"] / busy,
        "updates_per_second": learns / busy,
        "samples_per_second": learns * samples / busy,
        "replay_ratio": learns * samples / max(steps, 1),
        "rollout_fraction": 1 - timer.total["learn"] / busy,
        "train_fraction": timer.total["learn"] / busy,
        "experience_rate": seen_in_all["steps"] / busy,
        **collected(seen_in_all),
        "replay_kib_per_transition": replay.kib,
        **scores,
    }
    write_json(folder / "summary.json", summary)
    say("")
    rom = f" --rom {args.rom}" if args.rom else ""
    if not interrupts:
        with interrupts.at_once():
            summary |= test(args.eval_episodes)
            write_json(folder / "summary.json", summary)
            say("  ".join(f"{name} {value:g}" for name, value in summary.items() if name.startswith("eval")))
            if args.video:
                save_gif(q_network, args, device, folder)
            say(f"watch it play: python {SCRIPT}.py --evaluate {folder} --render{rom}")
    if interrupts:
        say(f"stopped; {folder / 'checkpoint.pt'} goes on with python {SCRIPT}.py --resume {folder}{rom}")
    with suppress(OSError):  # on a full disk
        writer.close()
    return summary


def parse_args() -> Args:
    """The command line. With --resume and --evaluate it stands on top of the flags of that run."""
    args = tyro.cli(Args, description=__doc__)
    option = "resume" if args.resume is not None else "evaluate"
    name = getattr(args, option)
    if name is None:
        return args
    path, checkpoint = load_checkpoint(f"--{option}", name, args.run_dir)
    saved_args = checkpoint["args"]
    if args.total_timesteps is not None or args.max_seconds is not None:  # a new limit replaces the old ones
        saved_args["total_timesteps"] = None
        saved_args["max_seconds"] = None
    flags = saved_flags(f"--{option} {name}", saved_args)
    args = tyro.cli(Args, args=flags + sys.argv[1:], description=__doc__)
    setattr(args, option, str(path))  # looked up once: the latest may soon be another one
    return args


if __name__ == "__main__":
    try:
        main(parse_args())
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except (OSError, MemoryError, RuntimeError) as error:
        if is_out_of_memory(error):
            fail("out of memory: a smaller --batch-size, --buffer-size, --ring-blocks or --hidden-size works")
        if not isinstance(error, OSError):
            raise
        fail(str(error))

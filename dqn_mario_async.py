"""Double DQN on Mario: processes that collect and never wait, and one that learns.

    python dqn_mario_async.py                             # 15 minutes, then an evaluation and a GIF
    python dqn_mario_async.py --preset original           # batches of 512, four to an update, four collectors
    python dqn_mario_async.py --env-id SuperMarioBros     # the real game; the ROM is yours (envs/mario/real.py)
    python dqn_mario_async.py --evaluate latest --render  # watch the last agent play

On two CPU cores the agent then reached the flag in 100 % of 100 levels it had never seen, with each of three seeds
(45,000 updates on 32 of 6.5 million transitions). After 20 minutes of the real 1-1 it reached the flag in 88 to 96 % of
100 games (three seeds); random play never does.

What to read: `Collector` plays, a `Ring` (envs/workers.py) hands its steps over, a `Broadcast` brings it new weights,
`ReplayBuffer` is what is learned from, `td_target` what is learned, and the loop at the end of `main` says when. The
rest is switches and bookkeeping.
"""

import io
import json
import math
import os
import shutil
import signal
import sys
import threading
import time
import timeit
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import count, pairwise
from pathlib import Path
from typing import Any, Literal, NoReturn

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
import tyro
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.utils.tensorboard import SummaryWriter

from envs.mario.batch import MarioBatch, MarioEnv
from envs.mario.game import TRAIN_LEVELS, UNSEEN_LEVELS
from envs.mario.real import SuperMarioBrosBatch, SuperMarioBrosEnv
from envs.playing import play, show_in_terminal, write_gif
from envs.streams import lane_key
from envs.workers import Broadcast, Collectors, Fields, Publisher, Ring, to_device

SCRIPT = Path(__file__).stem
EVAL_SEED = 2**31  # above every --seed
CHECKPOINT_VERSION = 3
RANK = int(os.environ.get("RANK", 0))  # these four are set by torchrun
RANKS = int(os.environ.get("WORLD_SIZE", 1))
LOCAL_RANKS = int(os.environ.get("LOCAL_WORLD_SIZE", 1))  # on this machine
RESTARTS = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
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
    """our own game (envs/mario/game.py), or the real one (envs/mario/real.py, needs stable-retro and a ROM)"""
    difficulty: int = 0
    """difficulty of MarioLike's levels"""
    rom: str | None = None
    """the real game's .nes file (None: the one in an installed gym-super-mario-bros)"""
    world: int = 1
    """world of the real game"""
    stage: int = 1
    """its level"""
    actions: Literal[5, 7, 12] = 7
    """size of the action set: only to the right, the simple ones, or all"""
    size: int = 84
    """height and width of a frame in pixels"""
    stack: int = 4
    """frames in an observation"""
    skip: int = 4
    """game frames per step"""
    noop_max: int = 30
    """maximum number of game frames without action at the start of a game"""

    # Collection
    num_collectors: int | None = None
    """processes that play (None: one per core but one, 8 at most); 0 collects and learns in turn"""
    envs_per_collector: int | None = None
    """games of each (None: 16; the real game: 1, which is also the most)"""
    ring_blocks: int = 256
    """steps of all its games that a collector can be ahead of the learner; then it waits"""
    sync_every: int = 5
    """updates between two broadcasts of the weights"""

    # Algorithm
    channels: int = 16
    """channels of the first convolution; the others have twice as many"""
    hidden_size: int = 256
    """width of the layer after the convolutions"""
    learning_rate: float = 5e-4
    """AdamW's learning rate"""
    anneal_lr: bool = True
    """let the learning rate fall tenfold over the run, exponentially"""
    weight_decay: float = 1e-5
    """AdamW's weight decay"""
    buffer_size: int | None = None
    """frames in the replay buffer (None: 100,000 on CPU; 1,000,000 on CUDA, or what fits there)"""
    gamma: float = 0.97
    """discount factor"""
    n_step: int = 3
    """n-step return length"""
    double: bool = True
    """double DQN: the online network picks the next action, the target network values it"""
    dueling: bool = True
    """value plus advantages instead of action values (Wang et al. 2016)"""
    alpha: float = 0.5
    """exponent of the priorities (Schaul et al. 2016); 0 samples uniformly"""
    beta: float = 0.4
    """initial exponent of the importance weights, which ends at 1"""
    batch_size: int | None = None
    """transitions per gradient (None: 32 on CPU, 512 on CUDA)"""
    accumulate: int | None = None
    """gradients per update (None: 1)"""
    replay_ratio: float = 8.0
    """transitions learned from per environment step, at most; a learner that cannot keep up learns from fewer"""
    learning_starts: int = 5_000
    """frames in the replay buffer before learning starts"""
    start_e: float = 1.0
    """initial epsilon"""
    end_e: float = 0.2
    """final epsilon of the first game; --epsilon-alpha gives that of the others"""
    epsilon_alpha: float = 3.0
    """final epsilon of game i of N is end_e ** (1 + epsilon_alpha * i / (N - 1)) (Horgan et al. 2018); a collector
    with one game draws i / (N - 1) for each episode"""
    exploration_fraction: float = 0.1
    """fraction of the run over which epsilon falls, linearly"""
    target_network_frequency: int = 1
    """updates between two updates of the target network"""
    tau: float = 0.005
    """target network update rate; 1 copies"""
    max_grad_norm: float = 10.0
    """maximum norm of the gradient"""

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
    """save the replay buffer in checkpoints too"""
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


CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
# Never from a checkpoint: flags that name files, or say what to do now.
COMMAND_LINE_ONLY = ["run_dir", "run_name", "resume", "evaluate", "render", "video", "wandb", "rom"]
ORIGINAL_PRESET = {
    "num_collectors": 4,
    "accumulate": 4,
    "batch_size": 512,
    "buffer_size": 50_000,
}
FRACTIONS = ["gamma", "tau", "start_e", "end_e", "exploration_fraction", "alpha", "beta"]
ZERO_WORKS = ["seed", "learning_starts", "eval_every", "checkpoint_every", "gamma", "start_e", "end_e"]
ZERO_WORKS += ["exploration_fraction", "alpha", "beta", "num_collectors", "difficulty", "noop_max"]
ZERO_WORKS += ["epsilon_alpha", "weight_decay"]
HIGHEST = {
    **dict.fromkeys(FRACTIONS, 1),
    "seed": EVAL_SEED - 1,
    "threads": 256,
    "eval_episodes": 100_000,
    "num_collectors": 256,
    "stack": 64,
    "skip": 60,
    "noop_max": 1_000,
    "size": 480,
    "n_step": 1_000,
}


def fill_defaults(args: Args, device: torch.device) -> Args:
    """A copy of `args` without None where a run needs a value. Flags that cannot work end the program here."""
    args = replace(args)
    on_cuda = device.type == "cuda"
    is_real = args.env_id == "SuperMarioBros"
    cores = max(CORES // LOCAL_RANKS, 1)
    if args.preset == "original":
        for name, value in ORIGINAL_PRESET.items():
            if getattr(args, name) is None:
                setattr(args, name, value)
    if args.num_collectors is None:
        args.num_collectors = min(max(cores - 1, 1), 8)
    if args.envs_per_collector is None:
        args.envs_per_collector = 1 if is_real else 16
    if args.batch_size is None:
        args.batch_size = 512 if on_cuda else 32
    if args.accumulate is None:
        args.accumulate = 1
    if args.buffer_size is None and on_cuda:
        free_bytes = torch.cuda.mem_get_info(device)[0]
        args.buffer_size = min(int(0.8 * free_bytes / ReplayBuffer.slot_bytes(args)), 1_000_000)
    if args.buffer_size is None:
        args.buffer_size = 100_000
    if args.threads is None:
        args.threads = pick_threads(max(cores - args.num_collectors, 1))
    if args.max_seconds is None and args.total_timesteps is None:
        args.max_seconds = 900.0
    check_ranges(args)

    if args.bf16 and args.fp16:
        fail("--bf16 --fp16: choose one of them")
    if args.cudagraph and args.compile and args.compile_mode != "default":
        fail(f"--compile-mode {args.compile_mode}: captures graphs by itself; with --cudagraph only default works")
    if args.size < 36:
        fail(f"--size {args.size}: the convolutions need at least 36 pixels")
    if is_real and args.envs_per_collector != 1:
        fail(f"--envs-per-collector {args.envs_per_collector}: a process holds one emulator; use more collectors")
    if is_real and args.num_collectors == 0:
        fail("--num-collectors 0: this process needs its only emulator for evaluations; 1 or more work")
    if args.render and args.evaluate is None:
        fail("--render: shows a trained agent, so it needs --evaluate PATH")
    if args.resume is not None and args.evaluate is not None:
        fail("--resume --evaluate: choose one of them")
    num_games = RANKS * max(args.num_collectors, 1) * args.envs_per_collector
    slots_of_a_game = 2 * args.ring_blocks + args.n_step + args.stack  # what one read can bring, and its surroundings
    lowest = num_games * slots_of_a_game + args.learning_starts
    if args.buffer_size < lowest:
        fail(f"--buffer-size {args.buffer_size}: at least {lowest} for {num_games} games")
    args.learning_starts = max(args.learning_starts, num_games * (args.n_step + 1))
    if args.checkpoint_replay and RANKS > 1:
        fail("--checkpoint-replay: a checkpoint cannot hold the replay of several ranks; without it it works")
    check_shared_memory(args)
    try:
        make_envs(args, 1)  # an emulator is freed at once
    except ValueError as error:  # which begins with the name of the setting
        settings = settings_of(args, TRAIN_LEVELS)
        flag = next((name for name in settings if str(error).startswith(name)), "env_id")
        fail(f"--{flag.replace('_', '-')} {getattr(args, flag)}: {error}")
    return args


def check_ranges(args: Args) -> None:
    for name, value in vars(args).items():
        if type(value) not in (int, float):
            continue
        highest = HIGHEST.get(name, sys.maxsize)
        zero_works = name in ZERO_WORKS
        too_low = value < 0 or (value == 0 and not zero_works)
        if too_low or not value <= highest:  # NaN is neither
            lowest = "0 or more" if zero_works else "above 0"
            fail(f"--{name.replace('_', '-')} {value}: must be {lowest} and at most {highest:g}")


def check_shared_memory(args: Args) -> None:
    if args.evaluate is not None or not Path("/dev/shm").is_dir():
        return
    needed = max(args.num_collectors, 1) * Ring.bytes(args.ring_blocks, block_fields(args))
    available = shutil.disk_usage("/dev/shm").free
    if needed > available:
        sizes = f"the rings take {needed / 2**20:.0f} MiB of shared memory, /dev/shm has {available / 2**20:.0f} left"
        fail(f"--ring-blocks {args.ring_blocks}: {sizes}; fewer blocks or a larger /dev/shm work")


def settings_of(args: Args, levels: tuple[int, int]) -> dict[str, Any]:
    """Keywords of the chosen game."""
    settings = {
        "actions": args.actions,
        "stack": args.stack,
        "size": args.size,
        "skip": args.skip,
        "noop_max": args.noop_max,
    }
    if args.env_id == "SuperMarioBros":
        settings["rom"] = args.rom
        settings["world"] = args.world
        settings["stage"] = args.stage
    else:
        settings["difficulty"] = args.difficulty
        settings["levels"] = levels
    return settings


def make_envs(
    args: Args, num_envs: int, seed: int = 0, first_lane: int = 0, levels: tuple[int, int] = TRAIN_LEVELS
) -> MarioBatch:
    """`num_envs` games, each with its own stream of random numbers. One that ends starts anew within the same step."""
    batch_class = SuperMarioBrosBatch if args.env_id == "SuperMarioBros" else MarioBatch
    return batch_class(num_envs, seed=seed, first_lane=first_lane, **settings_of(args, levels))


# ----------------------------------------------------------------------------------------------------- network


SHAPE_FLAGS = "--channels, --hidden-size, --dueling, --actions, --stack and --size"  # those of the weights


class QNetwork(nn.Module):
    """Q-values (B, actions), fp32, from frames (B, stack, size, size) uint8. Convolutions as in Mnih et al. 2015.

    `preprocess` has no parameters, so the online and the target network share its result. LayerNorm, not BatchNorm,
    whose statistics would reach neither target network nor collectors.
    """

    def __init__(self, args: Args, device: torch.device) -> None:
        super().__init__()
        self.dueling = args.dueling
        channels = args.channels
        side = ((args.size - 4) // 4 - 2) // 2 - 2  # of what the convolutions leave
        num_outputs = args.actions + 1 if args.dueling else args.actions
        self.conv1 = nn.Conv2d(args.stack, channels, 8, 4, device=device)
        self.conv2 = nn.Conv2d(channels, 2 * channels, 4, 2, device=device)
        self.conv3 = nn.Conv2d(2 * channels, 2 * channels, 3, device=device)
        self.hidden = nn.Linear(2 * channels * side**2, args.hidden_size, device=device)
        self.norm = nn.LayerNorm(args.hidden_size, device=device)
        self.head = nn.Linear(args.hidden_size, num_outputs, device=device)
        for layer in [self.conv1, self.conv2, self.conv3, self.hidden]:
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
            nn.init.zeros_(layer.bias)

    @staticmethod
    def preprocess(obs: torch.Tensor) -> torch.Tensor:
        # On CUDA, channels last is the layout of the tensor cores. On a CPU it makes gradients faster (10 ms, not 15,
        # for 32 on one core), and forward passes alone slower.
        channels_last = obs.is_cuda or torch.is_grad_enabled()
        memory_format = torch.channels_last if channels_last else torch.contiguous_format
        return obs.to(torch.float32, memory_format=memory_format).div_(255)

    def q_values(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu_(self.conv1(x))
        x = F.relu_(self.conv2(x))
        x = F.relu_(self.conv3(x))
        x = F.relu_(self.norm(self.hidden(x.flatten(1))))
        outputs = self.head(x).float()
        if not self.dueling:
            return outputs
        advantages = outputs[:, :-1]
        value = outputs[:, -1:]
        return value + advantages - advantages.mean(1, keepdim=True)

    def forward(self, obs: torch.Tensor) -> torch.Tensor:
        return self.q_values(self.preprocess(obs))


class Actor:
    """`QNetwork` for one observation and one thread, in NumPy: less than half of PyTorch's price.

    PyTorch takes 0.57 ms beside an emulator that takes 1.2: it converts layouts, and a call finds nothing of its own in
    the caches. Here a convolution is a matrix product over all windows, channels last, so that the pixels of a window's
    row lie side by side and move at once. A batch of 16 is faster in PyTorch.
    """

    def __init__(self, q_network: QNetwork, num_actions: int) -> None:
        self.weights = {name: weight.detach().numpy() for name, weight in q_network.named_parameters()}  # not copied
        self.num_actions = num_actions
        self.update_kernels()

    def update_kernels(self) -> None:
        """After the network's weights have changed: kernels as (width * width * inputs, outputs), channels last."""
        self.kernels = {}
        for name in ["conv1", "conv2", "conv3"]:
            kernel = self.weights[f"{name}.weight"]
            self.kernels[name] = kernel.transpose(2, 3, 1, 0).reshape(-1, len(kernel))
        self.kernels["conv1"] = self.kernels["conv1"] / 255

    def convolution(self, x: np.ndarray, name: str, width: int, stride: int) -> np.ndarray:
        """ReLU of a convolution over x (rows, columns, channels)."""
        side = (len(x) - width) // stride + 1
        row, column = x.strides[:2]
        shape = (side, side, width, width * x.shape[2])
        strides = (stride * row, stride * column, row, x.itemsize)
        windows = np.ndarray(shape, x.dtype, x, strides=strides).reshape(side * side, -1)
        x = windows.astype(np.float32, copy=False) @ self.kernels[name] + self.weights[f"{name}.bias"]
        return np.maximum(x, 0, out=x).reshape(side, side, -1)

    def __call__(self, obs: np.ndarray) -> np.ndarray:
        """Q-values (actions,) of one observation (stack, size, size), all of them off by the same number."""
        weights = self.weights
        x = np.ascontiguousarray(obs.transpose(1, 2, 0))
        x = self.convolution(x, "conv1", width=8, stride=4)
        x = self.convolution(x, "conv2", width=4, stride=2)
        x = self.convolution(x, "conv3", width=3, stride=1)
        x = weights["hidden.weight"] @ x.transpose(2, 0, 1).ravel() + weights["hidden.bias"]
        x -= x.sum() / len(x)
        x /= math.sqrt(x @ x / len(x) + 1e-5)
        x = np.maximum(x * weights["norm.weight"] + weights["norm.bias"], 0)
        q_values = weights["head.weight"] @ x + weights["head.bias"]
        return q_values[: self.num_actions]  # without the value, which changes no choice


# ------------------------------------------------------------------------------------------------ the algorithm


def linear_schedule(start_e: float, end_e: np.ndarray, fraction: float, progress: float) -> np.ndarray:
    """Epsilon of each game when `progress` (0 to 1) of the run is over: it falls over the first `fraction` of it."""
    if progress >= fraction:
        return end_e
    return start_e + (end_e - start_e) * progress / fraction


def end_epsilons(args: Args, number: int, rng: np.random.Generator) -> np.ndarray:
    """Final epsilon of each game of collector `number` (Horgan et al. 2018, section 4).

    The paper has hundreds of games, so what is learned from is a mixture of all these epsilons. With one game a
    collector there are too few for that, and its epsilon would be the largest for ever: such a collector draws one for
    each episode instead, so that the same mixture comes one after the other.
    """
    if args.envs_per_collector == 1:
        position = rng.random(1)
    else:
        num_games = max(args.num_collectors, 1) * args.envs_per_collector
        game = number * args.envs_per_collector + np.arange(args.envs_per_collector)
        position = game / (num_games - 1)
    return args.end_e ** (1 + args.epsilon_alpha * position)


def td_target(
    reward: torch.Tensor, discount: torch.Tensor, next_q_target: torch.Tensor, next_q_online: torch.Tensor
) -> torch.Tensor:
    """r + discount * Q_target(s', argmax_a Q_online(s', a)), all (B,) or (B, actions), fp32.

    `discount` is gamma^k after k rewards, 0 where the game terminated (van Hasselt et al. 2016, equation 4). Plain DQN
    passes the target's values twice.
    """
    next_action = next_q_online.argmax(1, keepdim=True)
    return reward + discount * next_q_target.gather(1, next_action).squeeze(1)


# --------------------------------------------------------------------------------------------------- collectors


RUNNING, TRUNCATED, TERMINATED, FINAL = range(4)  # the `end` of a step; FINAL: no step, but the frame after the last
STATISTICS = ["distance", "flag", "score", "length", "return"]  # of a game
COUNTED = ["steps", "blocks", "games", "reads", "ring_fill", "weight_age", "epsilon", *STATISTICS]  # by the learner
COUNTED += ["wait_seconds", "act_seconds", "env_seconds"]


def block_fields(args: Args) -> Fields:
    """What a collector hands over: one step of all its games."""
    games = args.envs_per_collector
    return {
        "frame": (torch.uint8, (games, args.size, args.size)),  # the newest before the step
        "final_frame": (torch.uint8, (games, args.size, args.size)),  # the newest after it, before a new start
        "action": (torch.int8, (games,)),
        "reward": (torch.float32, (games,)),
        "end": (torch.uint8, (games,)),
        "length": (torch.int64, (games,)),  # steps of the game, this one included
        "statistics": (torch.float32, (games, len(STATISTICS))),
        "seconds": (torch.float32, (3,)),  # waited to push, acted, played
        "epsilon": (torch.float32, ()),  # mean of the games
        "updates": (torch.int64, ()),  # after which the weights were published
    }


class Collector:
    """Plays the games of collector `number` with its own copy of the weights.

    `start` is its number among all that this run ever started, so that no two of them play the same games.
    """

    def __init__(self, args: Args, number: int, start: int, ring: Ring, broadcast: Broadcast) -> None:
        self.args = args
        self.number = number
        self.ring = ring
        self.broadcast = broadcast
        self.envs = make_envs(args, args.envs_per_collector, args.seed, start * args.envs_per_collector)
        self.obs = self.envs.reset()  # the environment's own buffer: every step overwrites it
        self.q_network = QNetwork(args, torch.device("cpu")).requires_grad_(False)
        self.weights = broadcast.slots[0].clone()
        vector_to_parameters(self.weights, self.q_network.parameters())  # which are now views of it
        self.actor = Actor(self.q_network, args.actions) if args.envs_per_collector == 1 else None
        self.version = -1  # of the weights
        self.updates = 0
        self.rng = np.random.default_rng((args.seed, start))
        self.end_e = end_epsilons(args, number, self.rng)

    def step(self) -> None:
        """One action in every game, and the block that tells of it."""
        args = self.args
        start_time = time.perf_counter()
        if self.broadcast.version.item() != self.version:
            self.version, self.updates = self.broadcast.fetch(self.weights)
            if self.actor is not None:
                self.actor.update_kernels()
        progress = self.broadcast.progress.item()
        epsilon = linear_schedule(args.start_e, self.end_e, args.exploration_fraction, progress)
        action = self.act(epsilon)
        frame = self.obs[:, -1].copy()
        act_time = time.perf_counter()
        _, reward, terminated, truncated, info = self.envs.step(action)
        env_time = time.perf_counter()
        self.ring.steps += 1

        end = np.full(len(action), RUNNING)
        end[truncated] = TRUNCATED
        end[terminated] = TERMINATED
        if args.envs_per_collector == 1 and end[0] != RUNNING:
            self.end_e = end_epsilons(args, self.number, self.rng)
        block = {
            "frame": frame,
            "final_frame": info["final_obs"][:, -1],
            "action": action,
            "reward": reward,
            "end": end,
            "length": info["length"],
            "statistics": np.array([info[name] for name in STATISTICS]).T,
            "epsilon": epsilon.mean(),
            "updates": self.updates,
        }
        self.push(block, act_time - start_time, env_time - act_time)

    def act(self, epsilon: np.ndarray) -> np.ndarray:
        explore, random_action = self.rng.random((2, len(self.obs)))
        greedy = explore >= epsilon
        action = (random_action * self.args.actions).astype(np.int64)
        if not greedy.any():  # then nobody needs the network
            return action
        if self.actor is not None:
            action[0] = self.actor(self.obs[0]).argmax()
        else:
            with torch.no_grad():
                action[greedy] = self.q_network(torch.from_numpy(self.obs[greedy])).argmax(1)
        return action

    def push(self, block: dict[str, Any], act_seconds: float, env_seconds: float) -> None:
        """Into the ring; waits while it is full."""
        start_time = time.perf_counter()
        block["seconds"] = (0.0, act_seconds, env_seconds)
        while not self.ring.push(block):
            if self.broadcast.is_over():
                return
            time.sleep(0.0002)
            block["seconds"] = (time.perf_counter() - start_time, act_seconds, env_seconds)


def collector_main(args: Args, number: int, start: int, ring: Ring, broadcast: Broadcast) -> None:
    """What a collector's process runs."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    torch.set_num_threads(1)
    try:
        collector = Collector(args, number, start, ring, broadcast)
        while not broadcast.is_over():
            collector.step()
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        print(f"collector {number}: {type(error).__name__} ({reason})", file=sys.stderr, flush=True)
        raise SystemExit(1) from None


# ------------------------------------------------------------------------------------------------------- replay


class ReplayBuffer:
    """The last `buffer_size` frames of all games, each stored once, sampled by priority, with n-step returns.

    Every game of every collector has `capacity` slots of its own, written in time order and round and round. A slot is
    the newest frame before a step, its action, reward and end; the frame after the last step of a game gets a slot too,
    with FINAL as its end. So the n-step successor of a slot lies at most n slots ahead, and the other frames of its
    stack lie just before it, back to a FINAL one. A slot can be sampled once n more have followed and until the frames
    before it are overwritten: outside that time its priority is 0.
    """

    # Priorities are summed by blocks; sampling searches the sums, then one block. With 32 of 100,000 slots, sampling
    # and new priorities take 0.10 ms on one core; the 17 levels of a sum tree, one after the other, take 0.52.
    BLOCK = 256

    def __init__(self, args: Args, device: torch.device) -> None:
        check_memory("--buffer-size", args.buffer_size, self.slot_bytes(args), device)
        self.num_games = max(args.num_collectors, 1) * args.envs_per_collector
        self.capacity = args.buffer_size // self.num_games
        self.stack = args.stack
        self.size = args.size
        self.n_step = args.n_step
        self.alpha = args.alpha
        self.num_actions = args.actions
        self.device = device
        slots = self.num_games * self.capacity
        num_blocks = math.ceil(slots / self.BLOCK)
        self.frame = torch.zeros(slots, args.size**2, dtype=torch.uint8, device=device)
        self.action = torch.zeros(slots, dtype=torch.int8, device=device)
        self.reward = torch.zeros(slots, device=device)
        self.end = torch.full((slots,), FINAL, dtype=torch.uint8, device=device)
        self.priority = torch.zeros(num_blocks * self.BLOCK, device=device)  # |TD error| ** alpha
        self.max_priority = torch.ones((), device=device)
        self.position = np.zeros(self.num_games, np.int64)  # slots ever written, by game
        self.frame_ages = torch.arange(args.stack, device=device)
        self.step_offsets = torch.arange(args.n_step, device=device)
        self.discounts = args.gamma ** torch.arange(args.n_step + 1, device=device).float()

    @staticmethod
    def slot_bytes(args: Args) -> int:
        return args.size**2 + 12

    def state_dict(self) -> dict[str, torch.Tensor]:
        names = ["frame", "action", "reward", "end", "priority", "max_priority"]
        state = {name: getattr(self, name) for name in names}
        state["position"] = torch.from_numpy(self.position)
        return state

    def load_state_dict(self, saved: dict[str, torch.Tensor]) -> None:
        """Raises ValueError, before anything is changed, for values that no replay buffer has."""
        if saved["action"].min() < 0 or saved["action"].max() >= self.num_actions:
            raise ValueError(f"actions must be 0 to {self.num_actions - 1}")
        if saved["end"].max() > FINAL:
            raise ValueError(f"ends must be 0 to {FINAL}")
        if saved["position"].min() < 0 or saved["priority"].min() < 0 or saved["max_priority"] <= 0:
            raise ValueError("positions and priorities must not be negative")
        num_slots = len(self.end)
        no_step = saved["end"] == FINAL
        if saved["priority"][:num_slots][no_step].any() or saved["priority"][num_slots:].any():
            raise ValueError("priorities must be 0 where no step is")
        for name, tensor in self.state_dict().items():
            tensor.copy_(saved[name])

    def slot(self, game: np.ndarray, position: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(game * self.capacity + position % self.capacity)

    def add(self, first_game: int, block: dict[str, torch.Tensor]) -> None:
        """Blocks (blocks, games, ...) of the collector whose first game is `first_game`."""
        end = block["end"].numpy()
        num_blocks, num_games = end.shape
        done = end != RUNNING
        is_first_step = block["length"].numpy() == 1
        finals_before = done.cumsum(0) - done  # a finished game took one slot more
        game = first_game + np.broadcast_to(np.arange(num_games), end.shape)
        position = self.position[game] + np.arange(num_blocks)[:, None] + finals_before
        slot_games = np.concatenate([game.ravel(), game[done]])  # of the steps, then of the final frames
        slot_positions = np.concatenate([position.ravel(), position[done] + 1])
        data = {
            "frame": block["frame"].flatten(2).flatten(0, 1),
            "final_frame": block["final_frame"][torch.from_numpy(done)].flatten(1),
            "action": block["action"].flatten(),
            "reward": block["reward"].flatten(),
            "end": block["end"].flatten(),
            "slot": self.slot(slot_games, slot_positions),
            "incomplete_slot": self.slot(slot_games, slot_positions + self.stack - 1),  # older frames are overwritten
            "complete_slot": self.slot(slot_games, slot_positions - self.n_step),  # the n-step successor is there
            "last_slot": self.slot(game[is_first_step], position[is_first_step] - 1),
            "second_last_slot": self.slot(game[is_first_step], position[is_first_step] - 2),
        }
        data = to_device(data, self.device)  # from here on nothing comes from the CPU: each copy would wait for the GPU
        step_slot, final_slot = data["slot"].split([end.size, int(done.sum())])
        self.frame[step_slot] = data["frame"]
        self.frame[final_slot] = data["final_frame"]
        self.action[step_slot] = data["action"]
        self.reward[step_slot] = data["reward"]
        self.end[step_slot] = data["end"]
        self.end.index_fill_(0, final_slot, FINAL)
        self.cut_games(data["last_slot"], data["second_last_slot"])
        self.priority.index_fill_(0, data["slot"], 0)
        self.priority.index_fill_(0, data["incomplete_slot"], 0)
        complete_slot = data["complete_slot"]
        self.priority[complete_slot] = self.max_priority * (self.end[complete_slot] != FINAL)
        self.position[first_game : first_game + num_games] += num_blocks + done.sum(0)

    def cut_games(self, last_slot: torch.Tensor, second_last_slot: torch.Tensor) -> None:
        """Truncate games whose collector died: their last step before a new game is RUNNING, and no frame follows it.

        So its frame becomes the final one, and the step before it the game's last.
        """
        last_end = self.end[last_slot]
        second_last_end = self.end[second_last_slot]
        is_cut = last_end == RUNNING
        self.end[last_slot] = last_end.masked_fill(is_cut, FINAL)
        self.end[second_last_slot] = torch.where(is_cut, second_last_end.clamp(min=TRUNCATED), second_last_end)

    def sample_slots(self, batch_size: int, generator: torch.Generator) -> torch.Tensor:
        """Slots in proportion to their priorities: one from each of `batch_size` equal parts of their sum."""
        blocks = self.priority.view(-1, self.BLOCK)
        block_sum = blocks.sum(1).double()
        block_end = block_sum.cumsum(0)
        part = torch.arange(batch_size, device=self.device)
        part = part + torch.rand(batch_size, generator=generator, device=self.device, dtype=torch.float64)
        target = part / batch_size * block_end[-1] * (1 - 1e-12)
        block = torch.searchsorted(block_end, target, right=True)
        slot_end = blocks[block].double().cumsum(1)
        target_in_block = target - block_end[block] + block_sum[block]
        target_in_block = torch.minimum(target_in_block, slot_end[:, -1] * (1 - 1e-12)).clamp(min=0)
        slot_in_block = (slot_end <= target_in_block[:, None]).sum(1)
        return block * self.BLOCK + slot_in_block

    def stack_frames(self, first_slot: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        """Observations (B, stack, size, size) at these positions of the games whose slots begin at `first_slot`."""
        older_slot = first_slot[:, None] + (position[:, None] - self.frame_ages[1:]) % self.capacity
        frames_before = (self.end[older_slot] != FINAL).cumprod(1).sum(1)  # of the same game
        age = self.frame_ages.minimum(frames_before[:, None]).flip(1)  # a new game's stack is filled with its first
        slot = first_slot[:, None] + (position[:, None] - age) % self.capacity
        frames = self.frame.index_select(0, slot.flatten())
        return frames.view(-1, self.stack, self.size, self.size)

    def transitions_at(self, slot: torch.Tensor) -> list[torch.Tensor]:
        """obs, action, reward, discount and next_obs of the n-step transitions that start at these slots (B,)."""
        position = slot % self.capacity
        first_slot = slot - position
        step_slot = first_slot[:, None] + (position[:, None] + self.step_offsets) % self.capacity  # (B, n)
        end = self.end[step_slot]
        is_running = (end == RUNNING)[:, :-1]
        in_return = F.pad(is_running.cumprod(1), (1, 0), value=1)  # 1 up to the first end
        num_steps = in_return.sum(1)
        reward = (self.reward[step_slot] * in_return * self.discounts[:-1]).sum(1)
        last_end = end.gather(1, num_steps[:, None] - 1).squeeze(1)
        discount = self.discounts[num_steps] * (last_end != TERMINATED)
        both_slots = torch.cat([first_slot, first_slot])
        both_positions = torch.cat([position, position + num_steps])
        obs, next_obs = self.stack_frames(both_slots, both_positions).split(len(slot))
        return [obs, self.action[slot], reward, discount, next_obs]

    def sample(self, batch_size: int, generator: torch.Generator, beta: torch.Tensor) -> list[torch.Tensor]:
        """`transitions_at`, importance weights (Schaul et al. 2016, section 3.4; the largest is 1), and the slots."""
        slot = self.sample_slots(batch_size, generator)
        priority = self.priority[slot]
        importance = (priority / priority.min()) ** -beta
        return [*self.transitions_at(slot), importance, slot]

    def update_priorities(self, slot: torch.Tensor, td_error: torch.Tensor) -> None:
        """New transitions get the highest priority so far."""
        priority = (td_error.abs().nan_to_num(0, 0) + 1e-3) ** self.alpha
        self.priority[slot] = priority
        self.max_priority.copy_(torch.maximum(self.max_priority, priority.max()))


@torch.no_grad()
def evaluate(q_network: QNetwork, args: Args, episodes: int, device: torch.device) -> dict[str, float]:
    """Play `episodes` greedy games on levels that no training has seen, one per lane, each to its end.

    The real game is played in this process too, whose emulator nobody else needs, one game after the other. It has only
    one level, and as many starts as frames without action at the beginning, --noop-max + 1, the same as in training:
    100 games of it are some 30 different ones.
    """
    lanes = 1 if args.env_id == "SuperMarioBros" else EVAL_LANES
    games = []
    for first in range(0, episodes, lanes):
        num_envs = min(lanes, episodes - first)
        envs = make_envs(args, num_envs, EVAL_SEED, first, UNSEEN_LEVELS)
        obs = envs.reset()
        action = np.zeros(num_envs, np.int64)
        playing = np.arange(num_envs)
        while len(playing):
            action[playing] = q_network(torch.from_numpy(obs[playing]).to(device)).argmax(1).cpu()
            obs, _, terminated, truncated, info = envs.step(action)
            done = (terminated | truncated)[playing]
            for lane in playing[done]:
                games.append([info[name][lane] for name in STATISTICS])
            playing = playing[~done]
        del envs  # and with it the emulator: a process can hold one only
    distance, flag, score, _, episodic_return = np.array(games, float).T
    return {
        "eval_score_mean": score.mean().item(),
        "eval_score_median": np.median(score).item(),
        "eval_score_max": score.max().item(),
        "eval_flags": flag.mean().item(),
        "eval_distance_mean": distance.mean().item(),
        "eval_return_mean": episodic_return.mean().item(),
        "eval_episodes": episodes,
    }


def watch_game(q_network: QNetwork, args: Args, device: torch.device, render_mode: str) -> Iterator:
    """Frames of one greedy game."""
    env_class = SuperMarioBrosEnv if args.env_id == "SuperMarioBros" else MarioEnv
    env = env_class(render_mode, **settings_of(args, UNSEEN_LEVELS))

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
    check_layout(f"--evaluate {args.evaluate}", checkpoint, expected, SHAPE_FLAGS)
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
    line = message.replace("\n", " ")  # which a flag may hold
    print(f"{SCRIPT}.py: {line}", file=sys.stderr)
    raise SystemExit(2)


def first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0][:120]


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
        say(f"--compile: failed ({first_line(error)}); eager mode is used instead")
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
            say(f"--cudagraph: failed ({first_line(error)}); the loop goes on without this graph")
            self.graph = None
            default_generator = torch.cuda.default_generators[torch.cuda.current_device()]
            for generator in (self.generator, default_generator):  # their old states still take part in the capture
                generator.graphsafe_set_state(generator.clone_state())
            if self.scaler is not None:
                self.scaler.update(self.scaler.get_scale())  # forgets that it has unscaled gradients
        self.timer.lap()  # capturing counts nowhere


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


class RankLost(RuntimeError):
    """Another rank of a torchrun is gone."""


def join_ranks() -> None:
    """Meet the others. A job on one machine that is started again must not find addresses of the one before in
    torchrun's store (pytorch issue 135712); agents of several machines count restarts differently."""
    try:
        store, _, _ = next(dist.rendezvous("env://"))
        if LOCAL_RANKS == RANKS:
            store = dist.PrefixStore(f"start {RESTARTS}", store)
        dist.init_process_group(store=store, rank=RANK, world_size=RANKS)
    except RuntimeError as error:
        raise RankLost(first_line(error)) from None


@contextmanager
def one_of_ranks() -> Iterator[None]:
    """Whatever torchrun starts several of. All but the first are silent."""
    if RANKS == 1:
        yield
        return
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    with open(os.devnull, "w") as silence, redirect_stdout(silence if RANK > 0 else sys.stdout):
        try:
            join_ranks()
            yield
        except RankLost as error:
            print(f"{SCRIPT}.py: rank {RANK} has lost another one ({error})", file=sys.stderr)
            raise SystemExit(1) from None


def mean_over_ranks(tensor: torch.Tensor) -> torch.Tensor:
    """In place. Where there is one rank it costs nothing."""
    if RANKS > 1:
        try:
            dist.all_reduce(tensor)
        except RuntimeError as error:
            raise RankLost(first_line(error)) from None
        tensor /= RANKS
    return tensor


def average_gradients(weights: list[torch.Tensor]) -> None:
    """Over all ranks, in one message."""
    if RANKS == 1:
        return
    flat_grad = mean_over_ranks(torch.cat([weight.grad.flatten() for weight in weights]))
    for weight, grad in zip(weights, flat_grad.split([weight.numel() for weight in weights])):
        weight.grad.copy_(grad.view_as(weight))


def sync(*values: float) -> list[float]:
    """Their means over all ranks, which decide together only by these: they are the same on all."""
    return mean_over_ranks(torch.tensor(values, dtype=torch.float64)).tolist()


def rank_share(args: Args, *names: str) -> Args:
    """`args` with this rank's part of what these flags say of all ranks."""
    share = replace(args)
    for name in names:
        value = getattr(args, name)
        if value % RANKS:
            advice = f"must be a multiple of the {RANKS} ranks; {max(value // RANKS, 1) * RANKS} works"
            fail(f"--{name.replace('_', '-')} {value}: {advice}")
        setattr(share, name, value // RANKS)
    return share


def restarted_run(args: Args) -> str | None:
    """Folder of the run that torchrun (--max-restarts) started again; only a --run-name says which one it is."""
    folder = Path(args.run_dir) / (args.run_name or "")
    if RESTARTS > 0 and args.run_name and (folder / "checkpoint.pt").is_file():
        return str(folder)
    return None


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
        print(
            f"{path}: could not be saved ({first_line(error)}); the checkpoint before it is untouched", file=sys.stderr
        )


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
        other_flags = checkpoint["args"].keys() ^ vars(Args()).keys()
        if other_flags:
            raise ValueError(f"it was made by another version, with other flags: {other_flags}")
        layout(checkpoint)  # an error in here too: of what is nested too deeply, or is no plain tensor
    except Exception as error:
        fail(f"{flag} {name}: not a whole checkpoint of {SCRIPT}.py ({first_line(error)})")
    return path, checkpoint


def saved_flags(asked: str, saved_args: dict[str, Any]) -> list[str]:
    """The command line of a checkpoint's run, but for flags that name files or say what to do: they are the user's."""
    flags = []
    for name, value in saved_args.items():
        flag = name.replace("_", "-")
        if name in COMMAND_LINE_ONLY or value is None:
            continue
        if type(value) not in (bool, int, float, str):
            fail(f"{asked}: not a whole checkpoint of {SCRIPT}.py (its --{flag} is a {type(value).__name__})")
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
        if value.layout != torch.strided or value.is_meta:
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


# ----------------------------------------------------------------------------------------------------- the run


@restore_process()
@one_of_ranks()
def main(args: Args) -> dict:
    start_time = time.perf_counter()
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
            return evaluate_run(q_network, args, device) if RANK == 0 else {}
        return {}

    # --- networks, replay and collectors --------------------------------------------------------------------------
    share = rank_share(args, "batch_size")
    share.buffer_size //= RANKS
    if RANK > 0:
        share.seed = lane_key(args.seed, RANK) % EVAL_SEED
    target_network = QNetwork(args, device).requires_grad_(False)
    target_network.load_state_dict(q_network.state_dict())
    weights = list(q_network.parameters())
    target_weights = list(target_network.parameters())
    replay = ReplayBuffer(share, device)
    use_graphs = args.cudagraph and device.type == "cuda" and RANKS == 1
    learning_rate = torch.tensor(args.learning_rate, device=device)
    optimizer = torch.optim.AdamW(
        weights, lr=learning_rate, weight_decay=args.weight_decay, fused=True, capturable=use_graphs
    )
    init_adam(optimizer)
    scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)
    generator = torch.Generator(device).manual_seed(share.seed)
    beta = torch.tensor(args.beta, device=device)
    loss_and_q_sum = torch.zeros(2, device=device)  # since the last log
    broadcast = Broadcast(parameters_to_vector(weights).detach())
    # In turn, what is played next must not depend on how long a copy takes: the seed decides all of the run.
    publisher = Publisher(broadcast, asynchronous=device.type == "cuda" and args.num_collectors > 0)
    rings = [Ring(args.ring_blocks, block_fields(args)) for _ in range(max(args.num_collectors, 1))]
    collectors = Collectors(partial(collector_main, share), rings[: args.num_collectors], broadcast)
    games = args.envs_per_collector
    samples_per_update = args.batch_size * args.accumulate
    timer = PhaseTimer(device)
    global_step = 0  # transitions stored
    updates = 0
    samples_due = 0.0  # that the replay ratio asks for and no update has used
    seconds_before = 0.0  # of the run that is resumed
    run_seconds = 0.0  # at the last `sync`

    def elapsed() -> float:
        return seconds_before + time.perf_counter() - start_time

    def progress() -> float:
        by_steps = global_step / args.total_timesteps if args.total_timesteps else 0
        by_seconds = run_seconds / args.max_seconds if args.max_seconds else 0
        return min(max(by_steps, by_seconds), 1)

    # --- checkpoints ----------------------------------------------------------------------------------------------
    def run_state() -> dict[str, Any]:
        """All there is to a run but its games, as tensors and plain values."""
        state = {
            "q_network": q_network.state_dict(),
            "target_network": target_network.state_dict(),
            "optimizer": optimizer.state_dict()["state"],
            "scaler": scaler.state_dict(),
            "device": device.type,
            "generator": generator.get_state(),
            "global_step": global_step,
            "updates": updates,
            "samples_due": samples_due,
            "elapsed": elapsed(),
            "starts": collectors.starts,
        }
        if args.checkpoint_replay:
            state["replay"] = replay.state_dict()
        return state

    def load_run_state(checkpoint: dict[str, Any]) -> None:
        """Checks everything first: what does not fit is refused before anything is changed."""
        nonlocal global_step, updates, samples_due, seconds_before, run_seconds
        asked = f"--resume {args.resume}"
        same_device = checkpoint.get("device") == device.type
        expected = run_state()
        if not expected["scaler"] or checkpoint.get("scaler") == {}:  # only float16 has something there
            del expected["scaler"]
        if not same_device:  # random numbers are of another kind there
            del expected["device"]
            del expected["generator"]
        if "replay" not in checkpoint:
            expected.pop("replay", None)
        flags = SHAPE_FLAGS
        if "replay" in expected:
            flags += " and --buffer-size, --num-collectors, --envs-per-collector"
        check_layout(asked, checkpoint, expected, flags)
        try:
            if same_device:
                torch.Generator(device).set_state(checkpoint["generator"])
            if "replay" in expected:
                replay.load_state_dict(checkpoint["replay"])
        except (RuntimeError, ValueError) as error:
            fail(f"{asked}: not a whole checkpoint of {SCRIPT}.py ({error})")

        global_step = checkpoint["global_step"]
        updates = checkpoint["updates"]
        seconds_before = run_seconds = checkpoint["elapsed"]
        collectors.starts = checkpoint["starts"]
        if progress() >= 1:
            advice = "a larger --total-timesteps or --max-seconds works"
            fail(f"{asked}: its run is over after {global_step:,} steps and {seconds_before:.0f} s; {advice}")
        for name in ("q_network", "target_network", "optimizer"):
            copy_tensors(expected[name], checkpoint[name])
        if "scaler" in expected:
            scaler.load_state_dict(checkpoint["scaler"])
        if same_device and RANK == 0:
            generator.set_state(checkpoint["generator"])
        if not same_device:
            say("the random numbers begin anew: those of the checkpoint are of another kind of device")
        if "replay" in expected:
            samples_due = checkpoint["samples_due"]
        else:  # no samples are due, as there is nothing to learn from
            say("the replay starts empty: without --checkpoint-replay a checkpoint does not hold it")

    folder = None
    writer = None  # of the first rank, the only one that writes
    if args.resume is not None:
        path, checkpoint = load_checkpoint("--resume", args.resume, args.run_dir)
        load_run_state(checkpoint)
        folder = path.parent
    if RANK == 0:
        if args.wandb:
            try:
                import wandb
            except ImportError:
                fail("--wandb: its package is missing; pip install wandb")
        if folder is None:
            folder = make_run_folder(args)
        else:
            write_json(folder / "args.json", {"script": SCRIPT, **vars(args)})
            for unfinished in folder.glob("checkpoint.*.tmp"):  # of a run that was killed while it saved
                unfinished.unlink(missing_ok=True)
        if args.wandb:
            wandb.init(project=SCRIPT, name=folder.name, config=vars(args), sync_tensorboard=True)
        writer = SummaryWriter(folder, purge_step=global_step)
        writer.add_text("args", "  \n".join(f"{name}: {value}" for name, value in vars(args).items()))

    # --- what the user is told at the start -----------------------------------------------------------------------
    precision = str(dtype).removeprefix("torch.")
    device_name = f"cpu, {torch.get_num_threads()} threads"
    if device.type == "cuda":
        device_name = torch.cuda.get_device_name(device)
    ranks = f", {RANKS} ranks" if RANKS > 1 else ""
    say(f"{folder} on {device_name} in {precision}{ranks}")
    if device.type == "cuda" and not (args.bf16 and args.cudagraph):
        say("on CUDA --bf16 and --cudagraph should make it faster; no GPU has measured it yet")
    if device.type == "cpu" and not args.bf16 and bf16_speedup() > 1.2:
        say("this CPU multiplies matrices faster in bf16: --bf16 learns faster here (benchmarks.md)")
    if args.num_collectors > CORES:
        say(f"--num-collectors {args.num_collectors}: there are {CORES} cores, so they and the learner take turns")
    players = f"{args.num_collectors} collectors with {games} games each"
    if args.num_collectors == 0:
        players = f"{games} games, in turn with learning"
    steps_per_update = samples_per_update / args.replay_ratio
    say(
        f"{players}; every {steps_per_update:g} steps or later (replay ratio {args.replay_ratio:g} or less) an update "
        f"on {samples_per_update} of the last {RANKS * replay.num_games * replay.capacity:,} frames"
    )

    # --- what the loop does, in its order -------------------------------------------------------------------------
    own_stats = Counter()  # of this rank, sums since the last log
    total_stats = Counter()  # of all ranks, sums until the last log
    steps_stored = [0] * len(rings)  # by collector, in this part of a run
    untimed_steps = 0

    def steps_collected() -> int:
        return games * sum(ring.steps.item() for ring in rings)

    @contextmanager
    def untimed() -> Iterator[None]:
        """What happens in here counts into no speed: neither its seconds nor the steps that are collected meanwhile."""
        nonlocal untimed_steps
        steps_before = steps_collected()
        yield
        untimed_steps += steps_collected() - steps_before
        timer.lap()

    def restart_dead() -> None:
        """Collectors that cannot be replaced end the run, but not before it is saved."""
        try:
            collectors.restart_dead()
        except OSError as error:
            if updates > first_update and RANKS == 1:  # of several, others do not know of it
                save()
            fail(f"--num-collectors {args.num_collectors}: {error}")

    def store() -> int:
        """Whole blocks from every ring into the replay. Gives the number of transitions."""
        new_steps = 0
        for number, ring in enumerate(rings):
            block = ring.read()
            blocks = len(block["end"])
            if blocks == 0:
                continue
            replay.add(number * games, block)
            count_block(block)
            own_stats["ring_fill"] += blocks / ring.num_blocks
            ring.release(blocks)
            steps_stored[number] += blocks * games
            new_steps += blocks * games
        return new_steps

    def count_block(block: dict[str, torch.Tensor]) -> None:
        done = block["end"] != RUNNING
        wait_seconds, act_seconds, env_seconds = block["seconds"].sum(0).tolist()
        own_stats["reads"] += 1
        own_stats["blocks"] += len(done)
        own_stats["wait_seconds"] += wait_seconds
        own_stats["act_seconds"] += act_seconds
        own_stats["env_seconds"] += env_seconds
        own_stats["epsilon"] += block["epsilon"].sum().item()
        own_stats["weight_age"] += updates - block["updates"][-1].item()
        own_stats["games"] += done.sum().item()
        for name, values in zip(STATISTICS, block["statistics"][done].T):
            own_stats[name] += values.sum().item()

    def autocast() -> torch.autocast:
        # Fresh for each forward: one that lives longer goes on using the weights as they were cast at its start.
        return torch.autocast(device.type, dtype, enabled=dtype != torch.float32, cache_enabled=False)

    def td_loss(obs, action, reward, discount, next_obs, importance) -> tuple[torch.Tensor, ...]:
        """Loss, the mean of the Q-values that it is about, and the TD errors."""
        with torch.no_grad():
            next_x = q_network.preprocess(next_obs)
            with autocast():
                next_q_target = target_network.q_values(next_x)
                next_q_online = q_network.q_values(next_x) if args.double else next_q_target
            target = td_target(reward, discount, next_q_target, next_q_online)
        with autocast():
            q = q_network(obs)
        q = q.gather(1, action.long()[:, None]).squeeze(1)
        loss = (importance * F.smooth_l1_loss(q, target, reduction="none")).mean()
        return loss, q.detach().mean(), q.detach() - target

    def update() -> None:
        optimizer.zero_grad()
        for _ in range(args.accumulate):
            *batch, slot = replay.sample(share.batch_size, generator, beta)
            loss, q, td_error = loss_step(*batch)
            scaler.scale(loss / args.accumulate).backward()
            replay.update_priorities(slot, td_error)
            loss_and_q_sum.add_(torch.stack([loss.detach(), q]) / args.accumulate)
        average_gradients(weights)  # before `unscale_`, so that all ranks skip an update that overflows in float16
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(weights, args.max_grad_norm)
        scaler.step(optimizer)
        scaler.update()

    def collection_summary(stats: Counter) -> dict[str, Any]:
        """What became of the collectors' steps. They count what they produce, the learner counts what it stores.

        A collector that dies between a step and its push loses that step, so `lost` is at most one for each start.
        """
        by_collector = []
        for number, ring in enumerate(rings):
            blocks_made, blocks_in_flight = ring.counts()
            by_collector.append([games * blocks_made, steps_stored[number], games * blocks_in_flight])
        counts = [*np.sum(by_collector, 0), collectors.starts, collectors.restarts]
        produced, stored, in_flight, starts, restarts = [round(RANKS * mean) for mean in sync(*counts)]
        seconds = stats["wait_seconds"] + stats["act_seconds"] + stats["env_seconds"]
        return {
            "produced": first_step + produced,
            "stored": first_step + stored,
            "in_flight": in_flight,
            "lost": produced - stored - in_flight,
            "by_collector": by_collector,
            "wait_fraction": stats["wait_seconds"] / (seconds or math.inf),
            "producer_wait_ms_mean": 1000 * stats["wait_seconds"] / max(stats["blocks"], 1),
            "ring_fill": stats["ring_fill"] / max(stats["reads"], 1),
            "weight_age": stats["weight_age"] / max(stats["reads"], 1),
            "starts": starts,
            "restarts": restarts,
        }

    def log() -> None:
        """On all ranks: what they count is summed up."""
        nonlocal logged_steps, logged_updates
        timed_steps = steps_collected() - untimed_steps
        own_stats["steps"] = timed_steps - logged_steps
        means = sync(*(own_stats[name] for name in COUNTED))
        stats = Counter({name: RANKS * mean for name, mean in zip(COUNTED, means)})
        seconds = timer.read()
        wall_seconds = sum(seconds.values()) or math.inf
        new_steps = stats["steps"]
        new_updates = updates - logged_updates
        logged_steps = timed_steps
        logged_updates = updates
        loss_sum, q_sum = mean_over_ranks(loss_and_q_sum).tolist()
        loss_and_q_sum.zero_()
        blocks = max(stats["blocks"], 1)
        finished = max(stats["games"], 1)
        epsilon = stats["epsilon"] / blocks
        replay_ratio = new_updates * samples_per_update / (stats["blocks"] * games or math.inf)
        scalars = {
            "charts/SPS": new_steps / wall_seconds,
            "charts/updates_per_second": new_updates / wall_seconds,
            "charts/samples_per_second": new_updates * samples_per_update / wall_seconds,
            "charts/replay_ratio": replay_ratio,
            "charts/epsilon": epsilon,
            "losses/learning_rate": learning_rate.item(),
            "perf/rollout_fraction": 1 - seconds["learn"] / wall_seconds,
            "perf/act_ms": 1000 * stats["act_seconds"] / blocks,
            "perf/env_ms": 1000 * stats["env_seconds"] / blocks,
        }
        for phase in seconds:
            scalars[f"perf/{phase}_ms"] = 1000 * seconds[phase] * games / (new_steps or math.inf)
        summary = collection_summary(stats)
        for name, value in summary.items():
            if name != "by_collector":
                scalars[f"collect/{name}"] = value
        if stats["games"]:
            scalars["charts/score"] = stats["score"] / finished
            scalars["charts/episodic_length"] = stats["length"] / finished
            scalars["charts/episodic_return"] = stats["return"] / finished
            scalars["charts/distance"] = stats["distance"] / finished
            scalars["charts/flags"] = stats["flag"] / finished
        if new_updates:
            scalars["losses/td_loss"] = loss_sum / new_updates
            scalars["losses/q_values"] = q_sum / new_updates
        if device.type == "cuda":
            scalars["perf/gpu_mem_gib"] = torch.cuda.memory_allocated(device) / 2**30
            with suppress(Exception):  # NVML is missing, or has an error of its own
                scalars["perf/gpu_util"] = torch.cuda.utilization(device)
        if RANK == 0:
            write_scalars(writer, scalars, global_step)
        line = f"[COLLECT] produced {summary['produced']:,}  stored {summary['stored']:,}"
        line += f"  in flight {summary['in_flight']:,}  steps/s {new_steps / wall_seconds:,.0f}"
        line += f"  waited {summary['wait_fraction']:.0%} of the time  ring {summary['ring_fill']:.0%}"
        line += f"  weights {summary['weight_age']:.1f} updates old  games {stats['games']:.0f}"
        line += f"  distance {stats['distance'] / finished:.0f}  flags {stats['flag'] / finished:.0%}"
        say(f"{line}  reward {stats['return'] / finished:.2f}")
        line = f"[TRAIN]   {progress():4.0%}  updates {updates:,}  updates/s {new_updates / wall_seconds:.1f}"
        line += f"  ratio {replay_ratio:.2f}  loss {loss_sum / max(new_updates, 1):.4f}"
        line += f"  q {q_sum / max(new_updates, 1):.2f}  epsilon {epsilon:.3f}"
        if "eval_flags" in scores:
            line += f"  greedy flags {scores['eval_flags']:.0%}"
        say(line)
        total_stats.update(stats)
        own_stats.clear()
        if not 0 <= summary["lost"] <= games * summary["starts"]:
            lost = f"{summary['lost']:,} steps lost by {summary['starts']} collectors"
            print(f"{folder}: collectors and learner do not count the same: {lost}", file=sys.stderr)
        if not math.isfinite(loss_sum):
            fail(
                f"--learning-rate {args.learning_rate:g}: the loss is {loss_sum} since the last log; a lower one works"
            )

    def evaluate_and_log(episodes: int) -> dict[str, float]:
        scores = evaluate(q_network, args, episodes, device)
        write_scalars(writer, {name.replace("_", "/", 1): score for name, score in scores.items()}, global_step)
        return scores

    def save() -> None:
        collected = collection_summary(total_stats)
        if RANK > 0:
            return
        if not all(weight.isfinite().all() for weight in weights):
            print(f"{folder}: the weights are not finite and were not saved", file=sys.stderr)
            return
        checkpoint = {"script": SCRIPT, "version": CHECKPOINT_VERSION, "args": vars(args)}
        checkpoint["collected"] = collected
        save_checkpoint(folder / "checkpoint.pt", checkpoint | run_state())

    # --- switches: --compile and --cudagraph ----------------------------------------------------------------------
    loss_step = td_loss
    if args.compile:
        example = replay.transitions_at(torch.zeros(share.batch_size, dtype=torch.int64, device=device))
        importance = torch.zeros(share.batch_size, device=device)
        loss_step = try_compile(td_loss, args.compile_mode, *example, importance)
    if use_graphs:
        update = CUDAGraphStep(update, generator, timer, scaler)
    elif args.cudagraph:
        say("--cudagraph: needs CUDA and one rank; the loop runs without graphs")

    # --- the loop -------------------------------------------------------------------------------------------------
    first_step = global_step
    first_update = logged_updates = updates
    logged_steps = 0
    scores = {}
    broadcast.publish(parameters_to_vector(weights).detach(), updates)
    local_collector = None
    if args.num_collectors == 0:
        local_collector = Collector(share, 0, collectors.starts, rings[0], broadcast)
        collectors.starts += 1
    try:
        with untimed():
            collectors.start()
            while not collectors.all_running() and not interrupts:
                time.sleep(0.01)
                restart_dead()
            run_seconds, stop = sync(elapsed(), bool(interrupts))
            if RANK == 0:
                write_scalars(writer, {"perf/warmup_s": time.perf_counter() - start_time}, global_step)
            if RANKS > 1:
                save()  # from the start torchrun can go on with it
        last_log = last_eval = last_checkpoint = run_seconds
        while progress() < 1 and not stop:
            # 1 act and step: the collectors do it meanwhile; without any, it is done here
            broadcast.progress.fill_(progress())
            if local_collector is not None and samples_due < samples_per_update:
                local_collector.step()
                timer.lap("rollout")

            # 2 store
            restart_dead()
            new_steps = store()
            can_learn = RANKS * replay.position.sum() >= args.learning_starts
            run_seconds, stop, new_steps, can_learn = sync(elapsed(), bool(interrupts), new_steps, can_learn)
            new_steps = round(RANKS * new_steps)
            global_step += new_steps
            if can_learn == 1:  # on all ranks
                samples_due += args.replay_ratio * new_steps
                samples_due = min(samples_due, 100.0 * samples_per_update)  # a learner that falls behind drops the rest
            timer.lap("store")

            # 3 learn
            if samples_due >= samples_per_update:
                beta.fill_(args.beta + (1 - args.beta) * progress())
                if args.anneal_lr:
                    learning_rate.fill_(args.learning_rate * 0.1 ** progress())
                update()
                updates += 1
                samples_due -= samples_per_update
                if updates % args.target_network_frequency == 0:
                    with torch.no_grad():  # else each update would lengthen a graph that nobody needs, for ever
                        torch._foreach_lerp_(target_weights, weights, args.tau)
                if updates % args.sync_every == 0:
                    publisher.publish(parameters_to_vector(weights).detach(), updates)
                timer.lap("learn")
            elif new_steps == 0 and local_collector is None:
                time.sleep(0.001)
                timer.lap("wait")
            publisher.poll()

            # 4 log, evaluate, save: at the same time on all ranks
            if run_seconds >= last_log + args.log_every:
                last_log = run_seconds
                log()
                timer.lap("log")
            if args.eval_every and run_seconds >= last_eval + args.eval_every:
                if RANK == 0:
                    with untimed(), interrupts.at_once():
                        scores = evaluate_and_log(max(args.eval_episodes // 10, 1))
                run_seconds, stop = sync(elapsed(), bool(interrupts))
                last_eval = run_seconds  # what it took is no part of the next interval
            if args.checkpoint_every and run_seconds >= last_checkpoint + args.checkpoint_every:
                last_checkpoint = run_seconds
                with untimed():
                    save()
    finally:
        with untimed():
            collectors.stop()

    # --- the end: what must not be lost comes first ---------------------------------------------------------------
    last_steps = 0
    while new_steps := store():
        last_steps += new_steps
    global_step += round(RANKS * sync(last_steps)[0])
    log()
    wall_seconds = elapsed()
    save()
    collected = collection_summary(total_stats)
    if RANKS > 1:
        dist.destroy_process_group()
    busy_seconds = sum(timer.total.values()) or math.inf
    new_steps = global_step - first_step
    new_updates = updates - first_update
    summary = {
        "script": SCRIPT,
        "device": device_name,
        "peak_memory_gib": peak_memory_gib(device),
        "precision": precision,
        "compiled": loss_step is not td_loss,
        "cudagraph": use_graphs and update.graph is not None,
        "sdpa": None,
        "env_steps": global_step,
        "wall_seconds": wall_seconds,
        "env_steps_per_second": total_stats["steps"] / busy_seconds,
        "updates_per_second": new_updates / busy_seconds,
        "samples_per_second": new_updates * samples_per_update / busy_seconds,
        "replay_ratio": new_updates * samples_per_update / max(new_steps, 1),
        "rollout_fraction": 1 - timer.total["learn"] / busy_seconds,
        "train_fraction": timer.total["learn"] / busy_seconds,
        "experience_rate": total_stats["steps"] / busy_seconds,
        "replay_kib_per_transition": replay.slot_bytes(args) / 1024,
        **collected,
        **scores,
    }
    if RANK > 0:
        return summary
    write_json(folder / "summary.json", summary)
    say("")
    rom = f" --rom {args.rom}" if args.rom else ""
    if not (stop or interrupts):
        with interrupts.at_once():
            summary |= evaluate_and_log(args.eval_episodes)
            write_json(folder / "summary.json", summary)
            say("  ".join(f"{name} {value:g}" for name, value in summary.items() if name.startswith("eval")))
            if args.video:
                save_gif(q_network, args, device, folder)
            say(f"watch it play: python {SCRIPT}.py --evaluate {folder} --render{rom}")
    if stop or interrupts:
        say(f"stopped; {folder / 'checkpoint.pt'} goes on with python {SCRIPT}.py --resume {folder}{rom}")
    with suppress(OSError):  # on a full disk
        writer.close()
    return summary


def parse_args() -> Args:
    """The command line. With --resume and --evaluate it stands on top of the flags of that run."""
    args = tyro.cli(Args, description=__doc__)
    if args.resume is None and args.evaluate is None:
        args.resume = restarted_run(args)
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
        sys.stdout.reconfigure(line_buffering=True)  # else the end of --help is written at exit
        main(parse_args())
        if RANKS > 1:  # gloo's threads abort one exit in forty, when all is done (PyTorch 2.13)
            sys.stdout.flush()
            os._exit(0)
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except BrokenPipeError:  # nobody reads --help any more (`| head`)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(141) from None
    except (OSError, MemoryError, RuntimeError) as error:
        if is_out_of_memory(error):
            fail("out of memory: a smaller --batch-size, --buffer-size, --ring-blocks or --hidden-size works")
        if not isinstance(error, OSError):
            raise
        fail(str(error))

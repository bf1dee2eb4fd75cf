"""Double DQN on Mario: collector processes play and never wait, this process learns.

    python dqn_mario_async.py                             # 15 minutes, then an evaluation and a GIF
    python dqn_mario_async.py --cudagraph --bf16          # on a GPU
    python dqn_mario_async.py --env-id SuperMarioBros     # the real game, with your own ROM (envs/mario/real.py)
    python dqn_mario_async.py --evaluate latest --render  # watch the last agent play

On two CPU cores the agent reaches the flag in 100 % of 100 unseen levels, with each of three seeds (45,000 updates on
6.1 million transitions). After 20 minutes of the real 1-1 it reaches the flag in 66 to 84 % of 100 games (three seeds);
random play never does.

How to read it: a `Collector` plays and pushes its steps into a `Ring` (envs/workers.py), a `Broadcast` brings it new
weights. `ReplayBuffer` stores the steps, `Learner` holds the networks and the update, and `train` runs it all from top
to bottom.
"""

import json
import math
import os
import re
import shlex
import signal
import sys
import threading
import time
import warnings
from collections import Counter
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Literal, NoReturn, get_args

# How long an idle thread spins. While another process keeps one of two cores busy, two threads are faster with this.
os.environ.setdefault("GOMP_SPINCOUNT", "4000")
# NumPy makes the real game's pictures. An evaluation beside a busy process takes 9 s with one thread, 23 with two.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
import tyro
from torch import Tensor
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.utils.tensorboard import SummaryWriter

from envs.mario.batch import MarioBatch, MarioEnv
from envs.mario.game import TRAIN_LEVELS, UNSEEN_LEVELS
from envs.mario.real import SuperMarioBrosBatch, SuperMarioBrosEnv
from envs.playing import play, show_in_terminal, write_gif
from envs.streams import lane_key
from envs.workers import Broadcast, Collectors, Fields, Publisher, Ring, to_device

SCRIPT = Path(__file__).stem
CHECKPOINT_VERSION = 6
EVAL_SEED = 2**31  # above every --seed
EVAL_LANES = 128  # games evaluated at once
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
RANK = int(os.environ.get("RANK", 0))  # torchrun sets these four
RANKS = int(os.environ.get("WORLD_SIZE", 1))
LOCAL_RANKS = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
RESTARTS = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))


@dataclass
class Args:
    # Run
    max_seconds: float | None = None
    """training time in seconds, with evaluations, without warm-up (None: 900, or no limit with --total-timesteps)"""
    total_timesteps: int | None = None
    """environment steps to train for (None: no limit)"""
    seed: int = 1
    """seed of weights, games, exploration and sampling"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """where to learn; auto uses CUDA if there is one. Collectors run on the CPU"""
    run_name: str | None = None
    """name of this run's folder (None: script, seed and time)"""
    run_dir: str = "runs"
    """folder of all runs"""

    # Environment
    env_id: Literal["MarioLike-v0", "SuperMarioBros"] = "MarioLike-v0"
    """our own game (envs/mario/game.py), or the real one (envs/mario/real.py, needs stable-retro and a ROM)"""
    rom: str | None = None
    """the real game's .nes file (None: the one in an installed gym-super-mario-bros)"""
    stages: str = "1-1"
    """levels of the real game, one drawn for each game: 1-1,1-2,2-1"""
    practice: float = 0.0
    """chance that a training game starts shortly before a place where a game was lost (the real game only)"""
    difficulty: int = 0
    """difficulty of MarioLike's levels"""
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
    """processes that play (None: all cores but one, 8 at most); 0 plays and learns in turn"""
    envs_per_collector: int | None = None
    """games per collector (None: 16; the real game: 1, which is also the maximum)"""
    ring_blocks: int = 256
    """steps that a collector can be ahead of the learner; then it waits"""
    sync_every: int = 5
    """updates between broadcasts of the weights"""

    # Algorithm
    learning_rate: float = 5e-4
    """AdamW's learning rate"""
    batch_size: int | None = None
    """samples per gradient, over all processes (None: 32 on a CPU, 512 on CUDA)"""
    replay_ratio: float = 8.0
    """maximum number of samples learned per environment step; a learner that cannot keep up learns fewer"""
    channels: int = 16
    """channels of the first convolution; the others have twice as many"""
    hidden_size: int = 256
    """width of the layer after the convolutions"""
    anneal_lr: bool = True
    """decay the learning rate exponentially to a tenth over the run"""
    weight_decay: float = 1e-5
    """AdamW's weight decay"""
    buffer_size: int | None = None
    """frames in the replay (None: 100,000 on a CPU, 1,000,000 on CUDA)"""
    gamma: float = 0.97
    """discount factor"""
    n_step: int = 3
    """steps of a return"""
    double: bool = True
    """double DQN: the online network chooses the next action, the target network evaluates it"""
    dueling: bool = True
    """value and advantages instead of action values (Wang et al. 2016)"""
    alpha: float = 0.5
    """exponent of the priorities (Schaul et al. 2016); 0 samples uniformly"""
    beta: float = 0.4
    """initial exponent of the importance weights, annealed to 1"""
    accumulate: int = 1
    """gradients per update"""
    learning_starts: int = 5_000
    """frames in the replay before learning starts"""
    start_e: float = 1.0
    """initial epsilon"""
    end_e: float = 0.2
    """final epsilon of the first game; see --epsilon-alpha"""
    epsilon_alpha: float = 3.0
    """final epsilon of game i of N is end_e ** (1 + epsilon_alpha * i / (N - 1)) (Horgan et al. 2018); a collector
    with one game draws i / (N - 1) for each episode"""
    exploration_fraction: float = 0.1
    """fraction of the run over which epsilon decays linearly"""
    target_network_frequency: int = 1
    """updates between updates of the target network"""
    tau: float = 0.005
    """target network update rate; 1 copies"""
    max_grad_norm: float = 10.0
    """maximum norm of the gradient"""

    # Speed
    bf16: bool = False
    """forward passes in bfloat16 (fp32 where the hardware has no bf16 units)"""
    fp16: bool = False
    """forward passes in float16 with gradient scaling (CUDA)"""
    tf32: bool = False
    """fp32 matmuls and convolutions on tensor cores (CUDA)"""
    compile: bool = False
    """torch.compile the loss"""
    compile_mode: Literal["default", "reduce-overhead", "max-autotune"] = "default"
    """mode of torch.compile"""
    cudagraph: bool = False
    """capture updates as a CUDA graph (one process)"""
    threads: int | None = None
    """the learner's CPU threads (None: the cores without a collector, 8 at most)"""

    # Input and output
    resume: str | None = None
    """continue a run, with its flags: a checkpoint, a run folder, or "latest" """
    evaluate: str | None = None
    """no training, play --eval-episodes games: with a checkpoint, a run folder, or "latest" """
    render: bool = False
    """with --evaluate: play one game in the terminal"""
    eval_every: float = 60.0
    """seconds between evaluations on a tenth of --eval-episodes (0: none)"""
    eval_episodes: int = 100
    """games of the final evaluation, on levels that training never plays; a level of the real game has
    only --noop-max + 1 different starts, the same as in training"""
    log_every: float = 10.0
    """seconds between log lines"""
    checkpoint_every: float = 60.0
    """seconds between checkpoints (0: only at the end)"""
    checkpoint_replay: bool = False
    """save the replay in checkpoints (one process)"""
    video: bool = True
    """write a GIF of one game after the final evaluation"""
    wandb: bool = False
    """mirror TensorBoard to Weights & Biases (pip install wandb)"""


NOT_RESUMED = ["run_dir", "run_name", "rom", "resume", "evaluate", "render", "video", "wandb"]
AT_MOST_1 = ["practice", "gamma", "tau", "start_e", "end_e", "exploration_fraction", "alpha", "beta"]
MAY_BE_0 = ["seed", "practice", "difficulty", "noop_max", "num_collectors", "weight_decay", "gamma", "alpha", "beta"]
MAY_BE_0 += ["learning_starts", "start_e", "end_e", "epsilon_alpha", "exploration_fraction"]
MAY_BE_0 += ["eval_every", "checkpoint_every"]
HIGHEST = dict.fromkeys(AT_MOST_1, 1) | {
    "seed": EVAL_SEED - 1,
    "threads": 256,
    "eval_episodes": 100_000,
    "stack": 64,
    "skip": 1_000,
    "noop_max": 10_000,
}


def fill_defaults(args: Args, device: torch.device) -> Args:
    """A copy of `args` with every default filled in. Ends the program if a flag cannot work."""
    args = replace(args)
    on_cuda = device.type == "cuda"
    is_real = args.env_id == "SuperMarioBros"
    cores = max(CORES // LOCAL_RANKS, 1)
    if args.num_collectors is None:
        args.num_collectors = min(max(cores - 1, 1), 8)
    if args.envs_per_collector is None:
        args.envs_per_collector = 1 if is_real else 16
    if args.batch_size is None:
        args.batch_size = 512 if on_cuda else 32
    if args.buffer_size is None:
        args.buffer_size = 1_000_000 if on_cuda else 100_000
    if args.threads is None:
        args.threads = min(max(cores - args.num_collectors, 1), 8)
    if args.max_seconds is None and args.total_timesteps is None:
        args.max_seconds = 900.0

    for name, value in vars(args).items():
        if type(value) not in (int, float):
            continue
        highest = HIGHEST.get(name, sys.maxsize)
        lowest = "0 or more" if name in MAY_BE_0 else "above 0"
        if not 0 <= value <= highest or (value == 0 and name not in MAY_BE_0):  # NaN fails, too
            fail(f"--{name.replace('_', '-')} {value}: must be {lowest} and at most {highest:,}")
    if args.batch_size % RANKS:
        fail(f"--batch-size {args.batch_size}: must be a multiple of the {RANKS} processes")
    if args.size < 36:
        fail(f"--size {args.size}: the convolutions need at least 36 pixels")
    if is_real and (args.envs_per_collector > 1 or args.num_collectors == 0):
        fail("--envs-per-collector, --num-collectors: one emulator per process, so 1 game, and 1 or more collectors")
    num_games = RANKS * max(args.num_collectors, 1) * args.envs_per_collector
    frames_per_game = 2 * args.ring_blocks + args.n_step + args.stack  # of one read, and the frames around it
    lowest = num_games * frames_per_game + args.learning_starts
    if args.buffer_size < lowest:
        fail(f"--buffer-size {args.buffer_size}: must be at least {lowest} for {num_games} games")
    args.learning_starts = max(args.learning_starts, num_games * (args.n_step + 1))
    for name in ("checkpoint_replay", "cudagraph"):
        if getattr(args, name) and RANKS > 1:
            fail(f"--{name.replace('_', '-')}: works with one process only; --no-{name.replace('_', '-')} works")
    if args.bf16 and args.fp16:
        fail("--bf16 --fp16: choose one of them")
    for name in ("fp16", "tf32", "cudagraph"):
        if getattr(args, name) and not on_cuda:
            fail(f"--{name}: needs CUDA; --no-{name} works")
    if args.cudagraph and args.compile and args.compile_mode != "default":
        fail(f"--compile-mode {args.compile_mode}: captures graphs by itself; with --cudagraph only default works")
    if "/" in (args.run_name or ""):
        fail(f"--run-name {args.run_name}: must be a name without /")
    if args.render and args.evaluate is None:
        fail("--render: needs --evaluate PATH")
    if args.resume is not None and args.evaluate is not None:
        fail("--resume --evaluate: choose one of them")
    try:
        make_envs(args, 1)  # an emulator is freed at once
    except ValueError as error:  # begins with the name of a setting
        name, _, problem = str(error).partition(" ")
        fail(f"--{name.replace('_', '-')} {problem}")
    return args


def settings_of(args: Args, levels: tuple[int, int]) -> dict:
    """Keywords of the chosen game."""
    settings = {name: getattr(args, name) for name in ("actions", "stack", "size", "skip", "noop_max")}
    if args.env_id == "SuperMarioBros":
        practice = args.practice if levels == TRAIN_LEVELS else 0.0
        settings.update(rom=args.rom, stages=args.stages, practice=practice)
    else:
        settings.update(difficulty=args.difficulty, levels=levels)
    return settings


def make_envs(
    args: Args, num_envs: int, seed: int = 0, first_lane: int = 0, levels: tuple[int, int] = TRAIN_LEVELS
) -> MarioBatch:
    """`num_envs` games, each with its own random numbers. A finished game restarts within the same step."""
    batch_class = SuperMarioBrosBatch if args.env_id == "SuperMarioBros" else MarioBatch
    return batch_class(num_envs, seed=seed, first_lane=first_lane, **settings_of(args, levels))


# ---------------------------------------------------------------------------------------------------- the network


class QNetwork(nn.Module):
    """Q-values (B, actions), fp32, of frames (B, stack, size, size) uint8. Convolutions as in Mnih et al. 2015.

    `preprocess` has no parameters, so the online and the target network share its result. LayerNorm, not BatchNorm,
    whose statistics would reach neither target network nor collectors.
    """

    def __init__(self, args: Args) -> None:
        super().__init__()
        self.dueling = args.dueling
        channels = args.channels
        side = ((args.size - 4) // 4 - 2) // 2 - 2  # of the last convolution's output
        num_outputs = args.actions + 1 if args.dueling else args.actions
        self.conv1 = nn.Conv2d(args.stack, channels, 8, 4)
        self.conv2 = nn.Conv2d(channels, 2 * channels, 4, 2)
        self.conv3 = nn.Conv2d(2 * channels, 2 * channels, 3)
        self.hidden = nn.Linear(2 * channels * side**2, args.hidden_size)
        self.norm = nn.LayerNorm(args.hidden_size)
        self.head = nn.Linear(args.hidden_size, num_outputs)
        for layer in [self.conv1, self.conv2, self.conv3, self.hidden]:
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
            nn.init.zeros_(layer.bias)

    @staticmethod
    def preprocess(obs: Tensor) -> Tensor:
        # On CUDA, channels last is the layout of the tensor cores. On a CPU it makes gradients faster (10 ms, not 15,
        # for 32 on one core), and forward passes alone slower.
        channels_last = obs.is_cuda or torch.is_grad_enabled()
        memory_format = torch.channels_last if channels_last else torch.contiguous_format
        return obs.to(torch.float32, memory_format=memory_format).div_(255)

    def q_values(self, x: Tensor) -> Tensor:
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

    def forward(self, obs: Tensor) -> Tensor:
        return self.q_values(self.preprocess(obs))

    @torch.no_grad()
    def greedy_action(self, obs: np.ndarray) -> np.ndarray:
        """Actions (B,) with the highest Q-values."""
        obs = torch.from_numpy(obs).to(self.head.weight.device)
        return self(obs).argmax(1).cpu().numpy()


# ------------------------------------------------------------------------------------------------ the algorithm


def linear_schedule(start_e: float, end_e: np.ndarray, fraction: float, progress: float) -> np.ndarray:
    """Epsilon of each game at `progress` (0 to 1) of the run: it decays over the first `fraction` of it."""
    if progress >= fraction:
        return end_e
    return start_e + (end_e - start_e) * progress / fraction


def end_epsilons(args: Args, number: int, rng: np.random.Generator) -> np.ndarray:
    """Final epsilon of each game of collector `number` (Horgan et al. 2018, section 4).

    The paper has hundreds of games, so its replay holds a mixture of all these epsilons. A collector with one game
    draws an epsilon for each episode instead: the same mixture, one after the other.
    """
    if args.envs_per_collector == 1:
        position = rng.random(1)
    else:
        num_collectors = max(args.num_collectors, 1)
        game = np.arange(num_collectors * args.envs_per_collector).reshape(num_collectors, -1)
        position = game[number] / (game.size - 1)
    return args.end_e ** (1 + args.epsilon_alpha * position)


def td_target(reward: Tensor, discount: Tensor, next_q_target: Tensor, next_q_online: Tensor) -> Tensor:
    """r + discount * Q_target(s', argmax_a Q_online(s', a)), all (B,) or (B, actions), fp32.

    `discount` is gamma^k after k rewards, 0 where the game terminated (van Hasselt et al. 2016, equation 4). Plain DQN
    passes the target's values twice.
    """
    next_action = next_q_online.argmax(1, keepdim=True)
    return reward + discount * next_q_target.gather(1, next_action).squeeze(1)


def progress_of(args: Args, global_step: int, seconds: float) -> float:
    """Fraction of the run that is done; 1 ends it."""
    by_steps = global_step / (args.total_timesteps or math.inf)
    by_seconds = seconds / (args.max_seconds or math.inf)
    return min(max(by_steps, by_seconds), 1)


# --------------------------------------------------------------------------------------------------- collectors


RUNNING, TRUNCATED, TERMINATED, FINAL = range(4)  # the `end` of a step; FINAL: no step, but the frame after the last
STATISTICS = {  # of a game, and their names in TensorBoard
    "distance": "charts/distance",
    "flag": "charts/flags",
    "score": "charts/score",
    "length": "charts/episodic_length",
    "return": "charts/episodic_return",
}
# What a collector tells of each step: the games that ended, their statistics, and how long it waited to push the step
# before, acted and played. And what the learner counts.
COLLECTED = ["games", *STATISTICS, "wait_seconds", "act_seconds", "env_seconds"]
COUNTED = [*COLLECTED, "blocks", "reads", "ring_fill", "weight_age", "steps"]


def block_fields(args: Args) -> Fields:
    """What a collector pushes: one step of all its games."""
    games = args.envs_per_collector
    return {
        "frame": (torch.uint8, (games, args.size, args.size)),  # the newest before the step
        "final_frame": (torch.uint8, (games, args.size, args.size)),  # the newest after it, before a restart
        "action": (torch.int8, (games,)),
        "reward": (torch.float32, (games,)),
        "end": (torch.uint8, (games,)),
        "length": (torch.int64, (games,)),  # steps of the game, with this one
        "counts": (torch.float64, (len(COLLECTED),)),
        "updates": (torch.int64, ()),  # before the weights were broadcast
    }


class Collector:
    """Plays the games of collector `number` with its own copy of the weights.

    `start` is its number among all collectors that this run has started, so that no two of them play the same games.
    """

    def __init__(self, args: Args, number: int, start: int, ring: Ring, broadcast: Broadcast) -> None:
        self.args = args
        self.number = number
        self.ring = ring
        self.broadcast = broadcast
        self.envs = make_envs(args, args.envs_per_collector, args.seed, start * args.envs_per_collector)
        self.obs = self.envs.reset()  # the environment's own buffer: every step overwrites it
        self.q_network = QNetwork(args).requires_grad_(False)
        self.weights = broadcast.slots[0].clone()
        vector_to_parameters(self.weights, self.q_network.parameters())  # which are now views of it
        self.version = -1  # of the weights
        self.updates = 0
        self.wait_seconds = 0.0  # of the last push
        self.rng = np.random.default_rng((args.seed, start))
        self.end_e = end_epsilons(args, number, self.rng)

    def state_dict(self) -> dict:
        self.fetch_weights()
        return {
            "envs": self.envs.state_dict(),
            "rng": self.rng.bit_generator.state,
            "end_e": self.end_e.tolist(),
            "weights": self.weights,
            "updates": self.updates,
        }

    def load_state_dict(self, saved: dict) -> None:
        self.envs.load_state_dict(saved["envs"])
        self.rng.bit_generator.state = saved["rng"]
        self.end_e[:] = saved["end_e"]
        self.broadcast.publish(saved["weights"], saved["updates"])

    def fetch_weights(self) -> None:
        if self.broadcast.version.item() != self.version:
            self.version, self.updates = self.broadcast.fetch(self.weights)

    def step(self) -> None:
        """One action in every game, and the block of it."""
        args = self.args
        start_time = time.perf_counter()
        self.fetch_weights()
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
            "counts": [*self.envs.finished, self.wait_seconds, act_time - start_time, env_time - act_time],
            "updates": self.updates,
        }
        self.envs.finished[:] = 0
        start_time = time.perf_counter()
        while not self.ring.push(block) and not self.broadcast.is_over():
            time.sleep(0.0002)
        self.wait_seconds = time.perf_counter() - start_time

    def act(self, epsilon: np.ndarray) -> np.ndarray:
        explore, random_action = self.rng.random((2, len(self.obs)))
        greedy = explore >= epsilon
        action = (random_action * self.args.actions).astype(np.int64)
        if greedy.any():
            action[greedy] = self.q_network.greedy_action(self.obs[greedy])
        return action


def collection_means(stats: dict) -> dict[str, float]:
    """Of the steps that `stats` counts."""
    reads = max(stats["reads"], 1)
    return {
        "producer_wait_ms_mean": 1000 * stats["wait_seconds"] / max(stats["blocks"], 1),
        "ring_fill": stats["ring_fill"] / reads,
        "weight_age": stats["weight_age"] / reads,  # in updates
    }


# --------------------------------------------------------------------------------------------------- the replay


class ReplayBuffer:
    """The last `buffer_size` frames of all games, each stored once, sampled by priority, with n-step returns.

    Every game has a ring of `capacity` slots. A slot holds the newest frame before a step, its action, reward and end;
    the frame after the last step of a game has a slot too, with FINAL as its end. So the n-step successor of a slot is
    at most n slots ahead, and the other frames of its stack are just before it, back to a FINAL one. A slot can be
    sampled from when n more have followed until the frames before it are overwritten; otherwise its priority is 0.
    """

    # Priorities are summed per block; sampling searches the sums, then one block. Sampling 32 of 100,000 slots and
    # updating their priorities takes 0.10 ms on one core; the 17 levels of a sum tree take 0.52.
    BLOCK = 256

    def __init__(self, args: Args, device: torch.device) -> None:
        self.args = args
        self.device = device
        self.num_games = max(args.num_collectors, 1) * args.envs_per_collector
        self.capacity = args.buffer_size // RANKS // self.num_games
        slots = self.num_games * self.capacity
        num_blocks = math.ceil(slots / self.BLOCK)
        self.position = torch.zeros(self.num_games, dtype=torch.int64)  # slots ever written, per game
        with device:
            self.frame = torch.zeros(slots, args.size, args.size, dtype=torch.uint8)
            self.action = torch.zeros(slots, dtype=torch.int8)
            self.reward = torch.zeros(slots)
            self.end = torch.full((slots,), FINAL, dtype=torch.uint8)
            self.priority = torch.zeros(num_blocks * self.BLOCK)  # |TD error| ** alpha
            self.max_priority = torch.ones(())
            self.frame_ages = torch.arange(args.stack)
            self.step_offsets = torch.arange(args.n_step)
            self.discounts = args.gamma ** torch.arange(args.n_step + 1).float()

    def state_dict(self) -> dict[str, Tensor]:
        names = ["frame", "action", "reward", "end", "priority", "max_priority", "position"]
        return {name: getattr(self, name) for name in names}

    def load_state_dict(self, saved: dict[str, Tensor]) -> None:
        for name, tensor in self.state_dict().items():
            if saved[name].shape != tensor.shape:
                raise ValueError("its replay needs the same --buffer-size, --num-collectors and --envs-per-collector")
            tensor.copy_(saved[name])

    def shift(self, slot: Tensor, steps: Tensor | int) -> Tensor:
        """Slots of the same game `steps` later."""
        position = slot % self.capacity
        return slot - position + (position + steps) % self.capacity

    def add(self, first_game: int, block: dict[str, Tensor]) -> None:
        """Blocks (blocks, games, ...) of the collector whose first game is `first_game`."""
        done = block["end"] != RUNNING
        num_blocks, num_games = done.shape
        game = torch.arange(first_game, first_game + num_games)
        finals_before = done.cumsum(0) - done.long()  # a finished game took one slot more
        position = self.position[game] + torch.arange(num_blocks)[:, None] + finals_before
        step_slot = game * self.capacity + position % self.capacity
        first_slot = step_slot[block["length"] == 1]  # of new games
        final_slot = self.shift(step_slot[done], 1)
        slot = torch.cat([step_slot.flatten(), final_slot])
        data = {
            "frame": block["frame"].flatten(0, 1),
            "final_frame": block["final_frame"][done],
            "action": block["action"].flatten(),
            "reward": block["reward"].flatten(),
            "end": block["end"].flatten(),
            "step_slot": step_slot.flatten(),
            "final_slot": final_slot,
            "incomplete_slot": self.shift(slot, self.args.stack - 1),  # older frames are overwritten
            "complete_slot": self.shift(slot, -self.args.n_step),  # the n-step successor is there
            "last_slot": self.shift(first_slot, -1),
            "second_last_slot": self.shift(first_slot, -2),
        }
        data = to_device(data, self.device)  # the only copy: each one would wait for the GPU
        step_slot = data["step_slot"]
        final_slot = data["final_slot"]
        self.frame[step_slot] = data["frame"]
        self.frame[final_slot] = data["final_frame"]
        self.action[step_slot] = data["action"]
        self.reward[step_slot] = data["reward"]
        self.end[step_slot] = data["end"]
        self.end.index_fill_(0, final_slot, FINAL)
        # Before a new game are the last step and the final frame of the one before, or, if its collector died, two
        # steps. Such a game is truncated: its last frame becomes the final one, the step before it the last step.
        self.end.index_fill_(0, data["last_slot"], FINAL)
        self.end[data["second_last_slot"]] = self.end[data["second_last_slot"]].clamp(min=TRUNCATED)
        self.priority.index_fill_(0, data["incomplete_slot"], 0)
        complete_slot = data["complete_slot"]
        self.priority[complete_slot] = self.max_priority * (self.end[complete_slot] != FINAL)
        self.position[game] += num_blocks + done.sum(0)

    def sample_slots(self, batch_size: int, generator: torch.Generator) -> Tensor:
        """Slots drawn by priority, one from each of `batch_size` equal parts of the sum of priorities."""
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

    def stack_frames(self, slot: Tensor) -> Tensor:
        """Observations (B, stack, size, size) whose newest frames are in these slots."""
        older_slot = self.shift(slot[:, None], -self.frame_ages[1:])
        frames_before = (self.end[older_slot] != FINAL).cumprod(1).sum(1)  # of the same game
        age = self.frame_ages.minimum(frames_before[:, None]).flip(1)  # a new game's stack is filled with its first
        slot = self.shift(slot[:, None], -age)
        frames = self.frame.index_select(0, slot.flatten())
        return frames.unflatten(0, slot.shape)

    def transitions_at(self, slot: Tensor) -> list[Tensor]:
        """obs, action, reward, discount and next_obs of the n-step transitions that start at these slots (B,)."""
        step_slot = self.shift(slot[:, None], self.step_offsets)  # (B, n)
        end = self.end[step_slot]
        is_running = (end == RUNNING)[:, :-1]
        in_return = F.pad(is_running.cumprod(1), (1, 0), value=1)  # 1 up to the first end
        num_steps = in_return.sum(1)
        reward = (self.reward[step_slot] * in_return * self.discounts[:-1]).sum(1)
        last_end = end.gather(1, num_steps[:, None] - 1).squeeze(1)
        discount = self.discounts[num_steps] * (last_end != TERMINATED)
        both_slots = torch.cat([slot, self.shift(slot, num_steps)])
        obs, next_obs = self.stack_frames(both_slots).split(len(slot))
        return [obs, self.action[slot], reward, discount, next_obs]

    def sample(self, batch_size: int, generator: torch.Generator, beta: Tensor) -> list[Tensor]:
        """`transitions_at`, importance weights (Schaul et al. 2016, section 3.4; the largest is 1), and the slots."""
        slot = self.sample_slots(batch_size, generator)
        priority = self.priority[slot]
        importance = (priority / priority.min()) ** -beta
        return [*self.transitions_at(slot), importance, slot]

    def update_priorities(self, slot: Tensor, td_error: Tensor) -> None:
        """New transitions get the highest priority so far."""
        priority = (td_error.abs().nan_to_num(0, 0) + 1e-3) ** self.args.alpha
        self.priority[slot] = priority
        self.max_priority.copy_(torch.maximum(self.max_priority, priority.max()))


# -------------------------------------------------------------------------------------------------- the learner


class Learner:
    """What is trained, and the update. All that an update changes is in tensors that a CUDA graph can capture."""

    def __init__(self, args: Args, seed: int, device: torch.device, dtype: torch.dtype) -> None:
        self.args = args
        self.batch_size = args.batch_size // RANKS
        self.q_network = QNetwork(args).to(device)
        self.target_network = deepcopy(self.q_network).requires_grad_(False)
        self.weights = list(self.q_network.parameters())
        self.target_weights = list(self.target_network.parameters())
        self.optimizer = torch.optim.AdamW(
            self.weights,
            lr=torch.tensor(args.learning_rate, device=device),
            weight_decay=args.weight_decay,
            fused=True,
            capturable=args.cudagraph,
        )
        # A fresh context for each forward pass: a longer one keeps using the weights as they were cast at its start.
        is_half = dtype != torch.float32
        self.autocast = partial(torch.autocast, device.type, dtype, enabled=is_half, cache_enabled=False)
        self.scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)
        self.replay = ReplayBuffer(args, device)
        self.generator = torch.Generator(device).manual_seed(seed)
        self.beta = torch.tensor(args.beta, device=device)
        self.loss_sum = torch.zeros(2, device=device)  # and of mean Q-values, since the last log
        self.updates = 0

    def state_dict(self) -> dict:
        return {
            "q_network": self.q_network.state_dict(),
            "target_network": self.target_network.state_dict(),
            "optimizer": self.optimizer.state_dict()["state"],
            "scaler": self.scaler.state_dict(),
            "updates": self.updates,
            "generator": self.generator.get_state(),
        }

    def load_state_dict(self, saved: dict) -> None:
        """Without the generator, whose numbers belong to the replay."""
        self.q_network.load_state_dict(saved["q_network"])
        self.target_network.load_state_dict(saved["target_network"])
        load_adam(self.optimizer, saved["optimizer"])
        self.scaler.load_state_dict(saved["scaler"])
        self.updates = saved["updates"]

    def flat_weights(self) -> Tensor:
        return parameters_to_vector(self.weights).detach()

    def td_loss(self, obs, action, reward, discount, next_obs, importance) -> tuple[Tensor, Tensor, Tensor]:
        """The loss, its value and the mean Q-value, and the TD errors."""
        with torch.no_grad():
            next_x = self.q_network.preprocess(next_obs)
            with self.autocast():
                next_q_target = self.target_network.q_values(next_x)
                next_q_online = self.q_network.q_values(next_x) if self.args.double else next_q_target
            target = td_target(reward, discount, next_q_target, next_q_online)
        with self.autocast():
            q = self.q_network(obs)
        q = q.gather(1, action.long()[:, None]).squeeze(1)
        loss = (importance * F.smooth_l1_loss(q, target, reduction="none")).mean()
        means = torch.stack([loss, q.mean()]).detach()
        return loss, means, q.detach() - target

    def update(self) -> None:
        accumulate = self.args.accumulate
        self.optimizer.zero_grad()
        for _ in range(accumulate):
            *batch, slot = self.replay.sample(self.batch_size, self.generator, self.beta)
            loss, means, td_error = self.td_loss(*batch)
            self.scaler.scale(loss / accumulate).backward()
            self.replay.update_priorities(slot, td_error)
            self.loss_sum.add_(means / accumulate)
        average_gradients(self.weights)  # before `unscale_`: all ranks skip an update that overflows in float16
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.weights, self.args.max_grad_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def learn(self, progress: float) -> None:
        """One update, with the schedules at `progress` (0 to 1)."""
        args = self.args
        self.beta.fill_(args.beta + (1 - args.beta) * progress)
        if args.anneal_lr:
            self.optimizer.param_groups[0]["lr"].fill_(args.learning_rate * 0.1**progress)
        self.update()
        self.updates += 1
        if self.updates % args.target_network_frequency == 0:
            with torch.no_grad():
                torch._foreach_lerp_(self.target_weights, self.weights, args.tau)

    def compile(self) -> None:
        """torch.compile, and one call here rather than in the timed loop."""
        self.td_loss = torch.compile(self.td_loss, mode=self.args.compile_mode)
        slot = torch.zeros(self.batch_size, dtype=torch.int64, device=self.replay.device)
        self.td_loss(*self.replay.transitions_at(slot), importance=slot.float())[0].backward()


# --------------------------------------------------------------------------------------------------- evaluation


def evaluate(q_network: QNetwork, args: Args, episodes: int, device: torch.device) -> dict:
    """Scores of `episodes` greedy games on levels that training never plays, one game per lane.

    The real game is played in this process too, one game after the other. A level has --noop-max + 1 starts, the same
    as in training, so 100 games of 1-1 are about 30 different ones.
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
            action[playing] = q_network.greedy_action(obs[playing])
            obs, _, terminated, truncated, info = envs.step(action)
            done = (terminated | truncated)[playing]
            for lane in playing[done]:
                games.append([info[name][lane] for name in ("distance", "flag", "score")])
            playing = playing[~done]
        del envs  # frees the emulator: a process can hold only one
    distance, flag, score = np.array(games, float).T
    return {
        "eval_score_mean": score.mean().item(),
        "eval_score_max": score.max().item(),
        "eval_flags": flag.mean().item(),
        "eval_distance_mean": distance.mean().item(),
        "eval_episodes": episodes,
    }


def watch_game(q_network: QNetwork, args: Args, render_mode: str):
    """Frames of one greedy game."""
    env_class = SuperMarioBrosEnv if args.env_id == "SuperMarioBros" else MarioEnv
    env = env_class(render_mode, **settings_of(args, UNSEEN_LEVELS))
    return play(env, lambda obs: q_network.greedy_action(obs[None]).item(), EVAL_SEED)


def report(q_network: QNetwork, args: Args, scores: dict, folder: Path) -> None:
    """Print the scores and write the GIF."""
    print("  ".join(f"{name} {value:g}" for name, value in scores.items()))
    if args.video:
        write_gif(watch_game(q_network, args, "rgb_array"), folder / "videos" / "mario.gif", milliseconds=67)


# -------------------------------------------------------------------------------------------------------- tools


def fail(message: str) -> NoReturn:
    """End the program with one line about what the user asked for, and exit code 2."""
    print(f"{SCRIPT}.py: {' '.join(message[:400].split())}", file=sys.stderr)
    raise SystemExit(2)


def pick_precision(args: Args, device: torch.device) -> torch.dtype:
    """dtype of the forward passes."""
    if args.fp16:
        return torch.float16
    if device.type == "cuda":
        has_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        capabilities = torch.cpu.get_capabilities()
        has_bf16 = capabilities.get("avx512_bf16") or capabilities.get("amx_bf16")
    if args.bf16 and not has_bf16:
        print(f"--bf16: this {device.type} has no bf16 units, so training is in fp32")
    return torch.bfloat16 if args.bf16 and has_bf16 else torch.float32


class CUDAGraphStep:
    """`function` without arguments or result, replayed as a CUDA graph.

    The first three calls run it eagerly, so that all memory it keeps is allocated. It may use only tensors that
    persist, and numbers that never change.
    """

    def __init__(self, function, generator) -> None:
        self.function = function
        self.calls = 0
        self.stream = torch.cuda.Stream()
        self.graph = torch.cuda.CUDAGraph()
        self.graph.register_generator_state(generator)

    def __call__(self) -> None:
        self.calls += 1
        if self.calls <= 3:
            self.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.stream), warnings.catch_warnings(action="ignore"):  # Adam's: not captured yet
                self.function()
            torch.cuda.current_stream().wait_stream(self.stream)
            return
        if self.calls == 4:
            try:
                with torch.cuda.graph(self.graph, stream=self.stream):
                    self.function()
            except RuntimeError as error:
                fail(f"--cudagraph: capture failed ({error}); --no-cudagraph works")
        self.graph.replay()


class PhaseTimer:
    """Seconds per phase. `lap(phase)` ends the phase that began at the lap before; `lap()` discards the time.

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
        """Seconds per phase since the last read."""
        if self.cuda:
            torch.cuda.synchronize()  # sync: once per log interval
        seconds = Counter()
        for (_, start), (phase, end) in pairwise(self.laps):
            seconds[phase] += start.elapsed_time(end) / 1000 if self.cuda else end - start
        del seconds[""]
        del self.laps[:-1]
        self.total += seconds
        return seconds


def throughput(env_steps: int, updates: float, batch_size: int, phases: Counter) -> dict[str, float]:
    """Rates of `env_steps` steps and `updates` on `batch_size` samples each, in the seconds of `phases`."""
    seconds = sum(phases.values()) or math.inf
    samples = updates * batch_size
    return {
        "env_steps_per_second": env_steps / seconds,
        "updates_per_second": updates / seconds,
        "samples_per_second": samples / seconds,
        "replay_ratio": samples / max(env_steps, 1),
        "rollout_fraction": 1 - phases["learn"] / seconds,
    }


def catch_signals() -> list[int]:
    """Ctrl-C and SIGTERM: the first is added to this list, the second ends the program."""
    signals = []

    def handle_signal(number, frame):
        if signals:
            raise KeyboardInterrupt
        signals.append(number)

    signal.signal(signal.SIGINT, handle_signal)
    signal.signal(signal.SIGTERM, handle_signal)
    return signals


def join_ranks() -> None:
    """Connect the processes of a torchrun job; only rank 0 prints."""
    if RANKS == 1:
        return
    if RANK > 0:
        sys.stdout = open(os.devnull, "w")
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    store, _, _ = next(dist.rendezvous("env://"))
    if LOCAL_RANKS == RANKS:  # a restarted job must not find the addresses of the one before (pytorch/pytorch#135712)
        store = dist.PrefixStore(f"start {RESTARTS}", store)
    dist.init_process_group(store=store, rank=RANK, world_size=RANKS)


def mean_over_ranks(tensor: Tensor) -> Tensor:
    """In place. Costs nothing with one process."""
    if RANKS > 1:
        dist.all_reduce(tensor)
        tensor /= RANKS
    return tensor


def average_gradients(weights: list[Tensor]) -> None:
    """Over all ranks, in one message."""
    if RANKS > 1:
        grads = [weight.grad for weight in weights]
        flat_grad = nn.utils.parameters_to_vector(grads)
        nn.utils.vector_to_parameters(mean_over_ranks(flat_grad), grads)


def open_run_folder(args: Args, folder: Path, global_step: int) -> SummaryWriter:
    if args.wandb:
        try:
            import wandb
        except ImportError:
            fail("--wandb: the package is missing; pip install wandb")
    try:
        folder.mkdir(parents=True, exist_ok=args.resume is not None)
    except FileExistsError:
        fail(f"--run-name {folder.name}: {folder} exists; another name or --resume {folder} works")
    args_json = json.dumps({"script": SCRIPT, **vars(args)}, indent=2)
    (folder / "args.json").write_text(args_json)
    if args.wandb:
        wandb.init(project=SCRIPT, name=folder.name, config=vars(args), sync_tensorboard=True)
    writer = SummaryWriter(folder, purge_step=global_step + 1)
    writer.add_text("args", f"```\n{args_json}\n```")
    return writer


def save_checkpoint(path: Path, checkpoint: dict) -> None:
    """The file on disk is the old checkpoint or the new one, whenever the program is killed."""
    temporary = path.with_suffix(".tmp")
    try:
        with open(temporary, "wb") as file:
            torch.save(checkpoint, file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except (OSError, RuntimeError) as error:  # PyTorch reports a full disk as a RuntimeError
        temporary.unlink(missing_ok=True)
        raise OSError(f"{path}: not saved ({error}); the checkpoint before is whole") from None


def load_checkpoint(args: Args) -> tuple:
    """Path and content of the checkpoint that --resume or --evaluate names. Nothing in it is executed."""
    flag = "resume" if args.evaluate is None else "evaluate"
    name = getattr(args, flag)
    path = Path(name)
    try:
        if name == "latest":
            files = Path(args.run_dir).glob("*/checkpoint.pt")
            ours = [file for file in files if f'"{SCRIPT}"' in file.with_name("args.json").read_text()]
            path = max(ours, key=os.path.getmtime, default=path)
        if path.is_dir():
            path /= "checkpoint.pt"
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
        made_by = [checkpoint["script"], checkpoint["version"]]
        if made_by != [SCRIPT, CHECKPOINT_VERSION] or checkpoint["args"].keys() != vars(args).keys():
            raise ValueError(f"made by another script or version, {made_by}")
        for field in fields(Args):
            value = checkpoint["args"][field.name]
            if value not in get_args(field.type) and not isinstance(value, field.type):
                raise ValueError(f"its {field.name} is {value}")
        if min(checkpoint[name] for name in ("global_step", "updates", "samples_due", "elapsed")) < 0:
            raise ValueError("its counters are negative")
    except Exception as error:
        problem = f"{path} cannot be loaded ({type(error).__name__}: {error})"
        fail(f"--{flag} {name}: {problem}; a checkpoint, a run folder or latest works")
    return path, checkpoint


def load_adam(optimizer: torch.optim.Adam, saved: dict) -> None:
    """Fused Adam would read moments of another shape past their end."""
    optimizer.load_state_dict({"state": saved, "param_groups": optimizer.state_dict()["param_groups"]})
    for weight, moments in optimizer.state.items():
        if not moments["exp_avg"].shape == moments["exp_avg_sq"].shape == weight.shape:
            raise ValueError("Adam's moments have other shapes than the weights")


def parse_args() -> Args:
    """The command line. With --resume and --evaluate the flags of the checkpoint are its defaults."""
    args = tyro.cli(Args, description=__doc__)
    checkpoint = Path(args.run_dir, args.run_name or "", "checkpoint.pt")
    if RESTARTS and checkpoint.exists():  # torchrun --max-restarts
        args.resume = str(checkpoint)
    if args.resume is None and args.evaluate is None:
        return args
    path, checkpoint = load_checkpoint(args)
    saved = Args(**checkpoint["args"])
    for name in NOT_RESUMED:
        setattr(saved, name, getattr(args, name))
    if args.total_timesteps or args.max_seconds:  # a new limit replaces both
        saved.total_timesteps = None
        saved.max_seconds = None
    args = tyro.cli(Args, default=saved, description=__doc__)
    if args.evaluate is None:
        args.resume = str(path)  # later, "latest" may be another one
    return args


# ------------------------------------------------------------------------------------------------------ the run


def main(args: Args) -> dict:
    """Train, or with --evaluate play. Returns what summary.json holds, or the scores."""
    has_cuda = torch.cuda.is_available()
    if args.device == "cuda" and not has_cuda:
        fail("--device cuda: this PyTorch sees no CUDA device; cpu and auto work")
    device = torch.device("cuda" if has_cuda and args.device != "cpu" else "cpu")
    args = fill_defaults(args, device)
    torch.set_num_threads(args.threads)
    torch.set_flush_denormal(True)  # with 7 % of AdamW's first moments denormal, a step took 1.6 ms, not 0.5
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high" if args.tf32 else "highest")
    torch.backends.cudnn.allow_tf32 = args.tf32  # of convolutions, on by default
    dtype = pick_precision(args, device)
    if args.evaluate is None:
        with ExitStack() as cleanup:  # no collector survives the run
            return train(args, device, dtype, cleanup)

    path, checkpoint = load_checkpoint(args)
    q_network = QNetwork(args).to(device)
    try:
        q_network.load_state_dict(checkpoint["q_network"])
    except Exception as error:
        fail(f"--evaluate {args.evaluate}: {type(error).__name__}: {error}")
    if RANK > 0:
        return {}
    if args.render:
        show_in_terminal(watch_game(q_network, args, "ansi"), MarioEnv.metadata["render_fps"])
        return {}
    print(f"evaluation: {args.eval_episodes:,} episodes")
    scores = evaluate(q_network, args, args.eval_episodes, device)
    report(q_network, args, scores, path.parent)
    return scores


def train(args: Args, device: torch.device, dtype: torch.dtype, cleanup: ExitStack) -> dict:
    start_time = time.perf_counter()
    join_ranks()
    signals = catch_signals()

    # --- learner and games, new or from a checkpoint --------------------------------------------------------------
    global_step = 0  # transitions in the replay, ever
    samples_due = 0.0  # by the replay ratio, and not yet learned
    seconds_before = 0.0  # of the run that is resumed
    same_games = False
    folder = Path(args.run_dir) / (args.run_name or f"{SCRIPT}__{args.seed}__{time.strftime('%Y%m%d-%H%M%S')}")
    if args.resume is not None:
        path, checkpoint = load_checkpoint(args)
        folder = path.parent
        global_step = checkpoint["global_step"]
        seconds_before = checkpoint["elapsed"]
        if args.checkpoint_replay and args.num_collectors == 0:
            same_games = checkpoint.get("games_on") == device.type
    progress = progress_of(args, global_step, seconds_before)
    if progress == 1:
        fail(f"--resume {args.resume}: the run is over; a larger --total-timesteps or --max-seconds works")

    seed = args.seed
    if not same_games and global_step + RANK > 0:
        seed = lane_key(seed, global_step + RANK) % EVAL_SEED  # games and noise that no process has had
    learner = Learner(args, seed, device, dtype)
    q_network = learner.q_network
    replay = learner.replay
    num_games = args.envs_per_collector
    samples_per_update = args.batch_size * args.accumulate
    rings = [Ring(args.ring_blocks, block_fields(args)) for _ in range(max(args.num_collectors, 1))]
    broadcast = Broadcast(learner.flat_weights())
    # Without collectors the next step must not depend on how long a copy takes.
    publisher = Publisher(broadcast, asynchronous=device.type == "cuda" and args.num_collectors > 0)
    worker_args = replace(args, seed=seed)
    collectors = Collectors(partial(Collector, worker_args), rings[: args.num_collectors], broadcast)
    cleanup.callback(collectors.stop)
    collector = None  # in this process
    if args.num_collectors == 0:
        collector = Collector(worker_args, 0, 0, rings[0], broadcast)
    if args.resume is not None:
        try:
            learner.load_state_dict(checkpoint)
            if args.checkpoint_replay and "replay" in checkpoint:
                replay.load_state_dict(checkpoint["replay"])
                samples_due = checkpoint["samples_due"]
            else:
                print("the replay starts empty: only --checkpoint-replay saves it")
            if same_games:
                learner.generator.set_state(checkpoint["generator"])
                collector.load_state_dict(checkpoint["collector"])
        except Exception as error:
            fail(f"--resume {args.resume}: {type(error).__name__}: {error}")
    if not same_games:
        broadcast.publish(learner.flat_weights(), learner.updates)

    # --- the run folder -------------------------------------------------------------------------------------------
    writer = open_run_folder(args, folder, global_step) if RANK == 0 else None
    device_name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu, {args.threads} threads"
    precision = str(dtype).removeprefix("torch.")
    print(f"{folder} on {RANKS} x {device_name} in {precision}")
    print(
        f"{RANKS * len(rings) * num_games} games, {RANKS * args.num_collectors} collectors; {samples_per_update} "
        f"samples learned every {samples_per_update / args.replay_ratio:g} steps or later (replay ratio "
        f"{args.replay_ratio:g} or less)"
    )

    # --- collecting -----------------------------------------------------------------------------------------------
    timer = PhaseTimer(device)
    stats = torch.zeros(len(COUNTED), dtype=torch.float64)  # of this process, since the last log
    total = Counter()  # over all processes, until the last log

    def produced():
        """Steps that the collectors of this process have made."""
        return num_games * sum(ring.steps.item() for ring in rings)

    def store():
        """Whole blocks from every ring into the replay. Returns the number of steps."""
        new_steps = 0
        for number, ring in enumerate(rings):
            block = ring.read()
            blocks = len(block["end"])
            if blocks == 0:
                continue
            replay.add(number * num_games, block)
            weight_age = learner.updates - block["updates"][-1]
            counts = [*block["counts"].sum(0), blocks, 1, blocks / args.ring_blocks, weight_age]
            stats[:-1] += torch.tensor(counts)
            ring.release(blocks)
            new_steps += blocks * num_games
        return new_steps

    # --- switches -------------------------------------------------------------------------------------------------
    if args.compile:
        learner.compile()
    if args.cudagraph:
        learner.update = CUDAGraphStep(learner.update, learner.generator)

    # --- the loop -------------------------------------------------------------------------------------------------
    def clock(*values):
        """Seconds, signals and `values`, as means over all ranks. Ranks decide from these alone, so they agree."""
        elapsed = seconds_before + time.perf_counter() - start_time
        return mean_over_ranks(torch.tensor([elapsed, len(signals), *values], dtype=torch.float64)).tolist()

    def save():
        if not all(weight.isfinite().all() for weight in learner.weights):
            fail(f"--learning-rate {args.learning_rate:g}: the weights are not finite and not saved; a lower one works")
        state = {
            "script": SCRIPT,
            "version": CHECKPOINT_VERSION,
            "args": vars(args),
            **learner.state_dict(),
            "global_step": global_step,
            "samples_due": samples_due,
            "elapsed": seconds,
        }
        if args.checkpoint_replay:
            state["replay"] = replay.state_dict()
            if collector is not None:
                state["collector"] = collector.state_dict()
                state["games_on"] = device.type
        if RANK == 0:
            save_checkpoint(folder / "checkpoint.pt", state)

    def log(scalars):
        if RANK == 0:
            for name, value in scalars.items():
                writer.add_scalar(name.replace("eval_", "eval/"), value, global_step)

    first_step = global_step
    first_update = logged_updates = learner.updates
    scores = {}
    collectors.start(signals)
    log({"perf/warmup_s": time.perf_counter() - start_time})
    start_time = time.perf_counter()  # the warm-up does not count
    seconds = last_log = last_eval = last_checkpoint = seconds_before
    if RANKS > 1:
        save()  # torchrun --max-restarts can resume from the start
    timer.lap()
    while True:
        # 1 act and step: collectors do it meanwhile; without any, this process does
        steps_before = produced()
        broadcast.progress.fill_(progress)
        if collector is not None and samples_due < samples_per_update:
            collector.step()
            timer.lap("rollout")

        # 2 store
        try:
            collectors.restart_dead()
        except OSError as error:
            save()
            fail(f"{error}; --resume {folder} works")
        new_steps = store()
        has_started = RANKS * replay.position.sum() >= args.learning_starts
        seconds, stop, new_steps, has_started = clock(new_steps, has_started)
        new_steps = round(RANKS * new_steps)
        global_step += new_steps
        progress = progress_of(args, global_step, seconds)
        if has_started == 1:  # on all ranks
            samples_due += args.replay_ratio * new_steps
            samples_due = min(samples_due, 100 * samples_per_update)  # a learner that falls behind drops the rest
        timer.lap("store")

        # 3 learn
        if samples_due >= samples_per_update:
            learner.learn(progress)
            samples_due -= samples_per_update
            if learner.updates % args.sync_every == 0:
                publisher.publish(learner.flat_weights(), learner.updates)
            timer.lap("learn")
        elif new_steps == 0 and collector is None:
            time.sleep(0.001)
            timer.lap("wait")
        publisher.poll()
        stats[-1] += produced() - steps_before  # those of evaluations do not count, as their seconds

        # 4 log, evaluate, save
        is_last = progress == 1 or stop
        if is_last:
            collectors.stop()
            _, _, last_steps = clock(store() + store())  # a ring is read up to its edge, then from its start
            global_step += round(RANKS * last_steps)
            timer.lap()
        if is_last or seconds >= last_log + args.log_every:
            last_log = seconds
            log_stats = dict(zip(COUNTED, (mean_over_ranks(stats) * RANKS).tolist()))
            total.update(log_stats)
            stats.zero_()
            phases = timer.read()
            new_updates = learner.updates - logged_updates
            logged_updates = learner.updates
            td_loss, q_values = (mean_over_ranks(learner.loss_sum) / max(new_updates, 1)).tolist()
            learner.loss_sum.zero_()
            rates = throughput(log_stats["steps"], new_updates, samples_per_update, phases)
            collected = collection_means(log_stats)
            collected["produced"] = first_step + round(clock(produced())[2] * RANKS)
            collected["stored"] = global_step
            blocks = max(log_stats["blocks"], 1)
            scalars = {
                "charts/SPS": rates["env_steps_per_second"],
                "charts/updates_per_second": rates["updates_per_second"],
                "charts/samples_per_second": rates["samples_per_second"],
                "charts/replay_ratio": rates["replay_ratio"],
                "losses/learning_rate": learner.optimizer.param_groups[0]["lr"].item(),
                "perf/rollout_fraction": rates["rollout_fraction"],
                "perf/act_ms": 1000 * log_stats["act_seconds"] / blocks,
                "perf/env_ms": 1000 * log_stats["env_seconds"] / blocks,
            }
            if log_stats["games"]:
                for name, tag in STATISTICS.items():
                    scalars[tag] = log_stats[name] / log_stats["games"]
            if new_updates:
                scalars["losses/td_loss"] = td_loss
                scalars["losses/q_values"] = q_values
            for phase, phase_seconds in phases.items():
                scalars[f"perf/{phase}_ms"] = 1000 * phase_seconds * num_games / max(log_stats["steps"], 1)
            for name, value in collected.items():
                scalars[f"collect/{name}"] = value
            log(scalars)
            print(
                f"[COLLECT] produced {collected['produced']:,}  stored {global_step:,}  "
                f"SPS {rates['env_steps_per_second']:,.0f}  waiting {collected['producer_wait_ms_mean']:.1f} ms  "
                f"weights {collected['weight_age']:.1f} updates old  "
                f"distance {scalars.get('charts/distance', math.nan):.0f}  "
                f"flags {scalars.get('charts/flags', math.nan):.0%}"
            )
            print(
                f"[TRAIN]   {progress:4.0%}  updates {learner.updates:,}  updates/s {rates['updates_per_second']:.1f}  "
                f"ratio {rates['replay_ratio']:.2f}  loss {td_loss:.4f}  q {q_values:.2f}  "
                f"greedy flags {scores.get('eval_flags', math.nan):.0%}"
            )
            if not math.isfinite(td_loss):
                fail(f"--learning-rate {args.learning_rate:g}: the loss is {td_loss}; a lower one works")
            timer.lap("log")
        if is_last:
            break
        if args.eval_every and seconds >= last_eval + args.eval_every:
            if RANK == 0:
                scores = evaluate(q_network, args, max(args.eval_episodes // 10, 1), device)
                log(scores)
            seconds, stop = clock()
            last_eval = seconds  # the interval is from the end of one to the start of the next
            timer.lap()
        if args.checkpoint_every and seconds >= last_checkpoint + args.checkpoint_every:
            last_checkpoint = seconds
            save()
            timer.lap()

    # --- the end: first what must not be lost ---------------------------------------------------------------------
    if learner.updates == first_update:
        print("nothing was learned: the run ended before --learning-starts")
    save()
    if RANKS > 1:
        dist.destroy_process_group()
    summary = {
        "script": SCRIPT,
        "device": device_name,
        "precision": precision,
        "compiled": args.compile,
        "cudagraph": args.cudagraph,
        "env_steps": global_step,
        "wall_seconds": seconds,
        **throughput(total["steps"], learner.updates - first_update, samples_per_update, timer.total),
        **collected,
        **collection_means(total),
        **scores,
    }
    if RANK > 0:
        return summary
    summary_file = folder / "summary.json"
    summary_file.write_text(json.dumps(summary, indent=2))
    signals.append(0)  # all is saved: from here on a signal ends the program
    script = shlex.quote(sys.argv[0])
    run = shlex.quote(str(folder))
    rom = f" --rom {shlex.quote(args.rom)}" if args.rom else ""
    if stop:
        print(f"stopped; python {script} --resume {run}{rom} continues from {folder / 'checkpoint.pt'}")
    else:
        print(f"evaluation: {args.eval_episodes:,} episodes")
        scores = evaluate(q_network, args, args.eval_episodes, device)
        log(scores)
        summary.update(scores)
        summary_file.write_text(json.dumps(summary, indent=2))
        report(q_network, args, scores, folder)
        print(f"watch it play: python {script} --evaluate {run} --render{rom}")
    writer.close()
    return summary


def run_script() -> None:
    """Ends with one line if there is something that the user can do."""
    try:
        main(parse_args())
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # the reader is gone (`| head`)
        os._exit(141)
    except (OSError, MemoryError, RuntimeError) as error:
        if re.search("MemoryError|allocate memory|size calculation overflowed", repr(error)):
            fail("out of memory: a smaller --batch-size, --buffer-size, --hidden-size or --size works")
        if type(error).__module__.startswith(("torch._dynamo", "torch._inductor")):
            fail(f"--compile: failed ({error}); --no-compile works")
        if isinstance(error, OSError) or RANKS > 1:  # in a torchrun job another process may have ended
            fail(str(error))
        raise


if __name__ == "__main__":
    threading.excepthook = lambda _: None  # TensorBoard's thread: its error is raised again in this one
    sys.stdout.reconfigure(line_buffering=True, errors="replace")
    try:
        run_script()
        raise SystemExit(0)
    except SystemExit as end:
        if RANKS > 1:  # gloo's threads abort one exit in forty, after all is done (PyTorch 2.13)
            os._exit(end.code)
        raise

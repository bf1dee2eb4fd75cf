"""Stable-Baselines3's DQN, number for number: same defaults, same order of events, same files.

    python dqn_snake_sb3_compat.py                                                # two minutes of Snake on 20 x 20
    python dqn_snake_sb3_compat.py --policy transformer --batch-size 8192 --bf16  # large batches on a GPU
    python dqn_snake_sb3_compat.py --env-id CartPole-v1 --compile                 # any Gymnasium id; fast on a CPU too
    python dqn_snake_sb3_compat.py --import-sb3 model.zip --export-sb3 more.zip   # continues SB3's training
    python dqn_snake_sb3_compat.py --evaluate latest --render                     # watch the last agent play

Without switches, weights and decisions equal SB3's to the bit until a gradient is clipped: SB3 sums its norm in
another order. `--compile` changes the last bits of an update, so its decisions differ sooner or later. On two CPU cores
it is 5.6 times as fast as SB3 on CartPole and Snake, without it twice as fast (benchmarks.md).
SB3's defaults do not learn Snake on 20 x 20 in two minutes, and neither does this script.

How to read it: `QNetwork` has SB3's layers and names, and the loop in `train` is SB3's `learn`, `collect_rollouts` and
`train` in one. tests/scripts/test_dqn_snake_sb3_compat.py compares both number for number.
"""

import base64
import copy
import json
import math
import os
import pickle
import pickletools
import re
import shlex
import signal
import sys
import threading
import time
import warnings
import zipfile
from collections import Counter, deque
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NoReturn, get_args

# How long an idle thread spins. While another process keeps one of two cores busy, two threads are faster with this.
os.environ.setdefault("GOMP_SPINCOUNT", "4000")

import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
import tyro
from dotenv import dotenv_values
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.tensorboard import SummaryWriter

from envs.playing import play, show_in_terminal, write_gif
from envs.snake.rules import VARIANTS, SnakeEnv

SCRIPT = Path(__file__).stem
CHECKPOINT_VERSION = 4
MAX_GAMES = 10_000  # of --num-envs and --eval-episodes
EVAL_SEED = 2**31 - MAX_GAMES  # above the seeds of all training games


@dataclass
class Args:
    # Run
    max_seconds: float | None = None
    """training time in seconds, with evaluations, without warm-up (None: 120, or no limit with another one)"""
    total_timesteps: int | None = None
    """environment transitions to train for (None: no limit)"""
    seed: int = 1
    """seed of weights, games, exploration and sampling, used where SB3 uses it"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto uses CUDA if there is one, but not for MlpPolicy"""
    run_name: str | None = None
    """name of this run's folder (None: script, seed and time)"""
    episodes: int | None = None
    """games to train for (None: no limit)"""
    run_dir: str = "runs"
    """folder of all runs"""

    # Environment
    env_id: str = "SnakeOneHot-v0"
    """any Gymnasium id with Box observations and Discrete actions"""
    board: str | None = None
    """rows x columns, for the Snake ids (None: as registered, 20x20 for SnakeOneHot-v0)"""
    num_envs: int = 1
    """games, stepped in turn"""

    # Algorithm: SB3's names and defaults
    policy: Literal["MlpPolicy", "CnnPolicy", "transformer"] = "MlpPolicy"
    """64-64 MLP, Nature CNN (images), or a two-layer transformer with a token for every cell of the board"""
    learning_rate: float = 1e-4
    """Adam's learning rate"""
    batch_size: int = 32
    """transitions per update (OPTIMAL_BATCH_SIZE)"""
    dropout: float = 0.1
    """dropout rate of the transformer"""
    lr_schedule: Literal["constant", "cosine"] = "constant"
    """cosine falls to --learning-rate-end over the run"""
    learning_rate_end: float = 1e-5
    """learning rate at the end of the cosine schedule"""
    buffer_size: int = 1_000_000
    """transitions in the replay buffer, split over the games"""
    learning_starts: int = 100
    """steps of random play before learning starts"""
    tau: float = 1.0
    """target network update rate; 1 copies"""
    gamma: float = 0.99
    """discount factor"""
    train_freq: int = 4
    """steps of every game between updates"""
    gradient_steps: int = 1
    """updates after them (-1: as many as there were transitions)"""
    target_update_interval: int = 10_000
    """transitions between two updates of the target network"""
    exploration_fraction: float = 0.1
    """fraction of the run over which epsilon falls, linearly"""
    exploration_initial_eps: float = 1.0
    """initial epsilon"""
    exploration_final_eps: float = 0.05
    """final epsilon"""
    max_grad_norm: float = 10.0
    """maximum norm of the gradient"""

    # Speed
    bf16: bool = False
    """forward passes in bfloat16, fp32 where the hardware has no bf16 units (USE_BF16)"""
    fp16: bool = False
    """forward passes in float16 with gradient scaling (CUDA)"""
    tf32: bool = False
    """fp32 matmuls on tensor cores (CUDA)"""
    compile: bool = False
    """torch.compile the update and the policy (USE_TORCH_COMPILE)"""
    compile_mode: Literal["default", "reduce-overhead", "max-autotune"] = "default"
    """mode of torch.compile"""
    cudagraph: bool = False
    """capture the update as a CUDA graph"""
    flash_attention: bool = False
    """the same as --sdpa flash (USE_FLASH_ATTENTION)"""
    sdpa: Literal["auto", "flash", "efficient", "cudnn", "math"] = "auto"
    """attention kernel (--policy transformer)"""
    threads: int | None = None
    """CPU threads (None: 1 for MlpPolicy with small batches, else all cores, 8 at most)"""

    # Input and output
    resume: str | None = None
    """continue a run, with its flags: a checkpoint, a run folder, or "latest" """
    evaluate: str | None = None
    """no training, play --eval-episodes games: with a checkpoint, a run folder, or "latest" """
    render: bool = False
    """with --evaluate: play one game in the terminal"""
    eval_every: float = 30.0
    """seconds between evaluations on a tenth of --eval-episodes (0: none)"""
    eval_episodes: int = 100
    """games of the final evaluation"""
    log_every: float = 2.0
    """seconds between log lines"""
    checkpoint_every: float = 60.0
    """seconds between checkpoints (0: only at the end)"""
    checkpoint_replay: bool = False
    """save the replay buffer in checkpoints too"""
    import_sb3: str | None = None
    """continue the training in a zip of Stable-Baselines3's DQN with its hyperparameters, for --total-timesteps more"""
    export_sb3: str | None = None
    """write a zip for stable_baselines3.DQN.load at the end"""
    video: bool = True
    """write a GIF of one game after the final evaluation"""
    wandb: bool = False
    """mirror TensorBoard to Weights & Biases (pip install wandb)"""


NOT_RESUMED = ["run_dir", "run_name", "resume", "evaluate", "import_sb3", "export_sb3", "render", "video", "wandb"]
FRACTIONS = ["gamma", "dropout", "exploration_fraction", "exploration_initial_eps", "exploration_final_eps"]
MAY_BE_0 = ["seed", "learning_starts", "learning_rate_end", "eval_every", "checkpoint_every", *FRACTIONS]
HIGHEST = dict.fromkeys(["tau", *FRACTIONS], 1)
HIGHEST |= {"seed": EVAL_SEED - MAX_GAMES, "num_envs": MAX_GAMES, "eval_episodes": MAX_GAMES, "threads": 256}
SETTINGS = {  # flags that can be set in the environment or in a file named .env
    "OPTIMAL_BATCH_SIZE": "batch_size",
    "USE_TORCH_COMPILE": "compile",
    "USE_FLASH_ATTENTION": "flash_attention",
    "USE_BF16": "bf16",
}
SWITCH = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}


def settings() -> dict:
    """Flags that are set in the environment, or else in .env."""
    try:
        texts = {**dotenv_values(".env"), **os.environ}
    except (OSError, ValueError) as error:
        fail(f".env: cannot be read ({error}); lines like USE_BF16=1 work")
    values = {}
    for name, flag in SETTINGS.items():
        if name not in texts:
            continue
        text = str(texts[name]).strip().lower()
        try:
            values[flag] = int(text) if flag == "batch_size" else SWITCH[text]
        except (KeyError, ValueError):
            works = "a number" if flag == "batch_size" else ", ".join(SWITCH)
            fail(f"{name}={text[:40]} (in the environment or .env): must be {works}")
    return values


def fill_defaults(args: Args, device: torch.device) -> Args:
    """A copy of `args` with every default filled in. Ends the program if a flag cannot work."""
    args = replace(args)
    if args.threads is None:
        is_small = args.policy == "MlpPolicy" and args.batch_size < 1024
        args.threads = 1 if is_small else min(torch.get_num_threads(), 8)
    if args.total_timesteps is None and args.episodes is None and args.max_seconds is None:
        args.max_seconds = 120.0
    if args.flash_attention and args.sdpa == "auto":
        args.sdpa = "flash"

    for name, value in vars(args).items():
        if type(value) not in (int, float) or (name == "gradient_steps" and value == -1):
            continue
        highest = HIGHEST.get(name, sys.maxsize)
        lowest = "0 or more" if name in MAY_BE_0 else "above 0"
        if not 0 <= value <= highest or (value == 0 and name not in MAY_BE_0):  # NaN fails, too
            fail(f"--{name.replace('_', '-')} {value}: must be {lowest} and at most {highest:,}")
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        fail("torchrun: Stable-Baselines3's DQN has one process; --nproc-per-node 1 works")
    if args.num_envs > args.buffer_size:
        fail(f"--num-envs {args.num_envs}: one step of every game must fit in --buffer-size {args.buffer_size}")
    if args.bf16 and args.fp16:
        fail("--bf16 --fp16: choose one of them")
    for name in ("fp16", "tf32", "cudagraph"):
        if getattr(args, name) and device.type != "cuda":
            fail(f"--{name}: needs CUDA; --no-{name} works")
    if args.cudagraph and args.compile and args.compile_mode != "default":
        fail(f"--compile-mode {args.compile_mode}: captures graphs by itself; with --cudagraph only default works")
    if "/" in (args.run_name or ""):
        fail(f"--run-name {args.run_name}: must be a name without /")
    if args.render and args.evaluate is None:
        fail("--render: needs --evaluate PATH")
    if [args.resume, args.evaluate, args.import_sb3].count(None) < 2:
        fail("--resume --evaluate --import-sb3: choose one of them")
    if args.export_sb3 is not None and args.evaluate is not None:
        fail("--export-sb3 --evaluate: a zip is written at the end of training; --resume works")
    if args.export_sb3 is not None:
        path = Path(args.export_sb3)
        if path.is_dir() or not os.access(path.parent, os.W_OK):  # at the end of a run it would be too late
            fail(f"--export-sb3 {args.export_sb3!r}: cannot be written; a zip in a folder that exists works")
    return args


def make_envs(args: Args, num_envs: int, **kwargs: Any) -> list[gym.Env]:
    """`num_envs` plain environments: with a few games a Python loop is faster than a batched one."""
    try:
        if args.board is not None:
            kwargs["board"] = tuple(int(side) for side in args.board.split("x"))
        envs = [gym.make(args.env_id, disable_env_checker=True, **kwargs) for _ in range(num_envs)]
    except Exception as error:  # a game's code may raise anything
        works = f"{', '.join(VARIANTS)} with --board 10x10, or Gymnasium's ids without --board work"
        fail(f"--env-id {args.env_id} --board {args.board}: {str(error)[:200]}; {works}")
    observations = envs[0].observation_space
    actions = envs[0].action_space
    is_box = isinstance(observations, gym.spaces.Box)
    if not is_box or not isinstance(actions, gym.spaces.Discrete) or actions.start:
        fail(f"--env-id {args.env_id}: needs Box observations and Discrete actions, not {observations} and {actions}")
    image = is_image(observations)
    shape = observations.shape
    fits = {
        "MlpPolicy": True,
        "CnnPolicy": image and sorted(shape)[1] >= 36,
        "transformer": len(shape) == 3 and not image,
    }
    if not fits[args.policy]:
        needs = f"CnnPolicy needs images of 36x36 or more, transformer a board of cells, not {observations}"
        fail(f"--policy {args.policy}: {needs}; MlpPolicy works")
    if image and np.argmin(shape) != 0:
        rows, columns, channels = shape
        turned = gym.spaces.Box(0, 255, (channels, rows, columns), np.uint8)
        envs = [gym.wrappers.TransformObservation(env, lambda obs: obs.transpose(2, 0, 1), turned) for env in envs]
    return envs


def is_image(space: gym.spaces.Box) -> bool:
    """Whether SB3 takes it for an image: divided by 255, with the channels (its shortest side) first."""
    return space.dtype == np.uint8 and len(space.shape) == 3 and (space.low == 0).all() and (space.high == 255).all()


# ---------------------------------------------------------------------------------------------------- networks


SDPA_BACKENDS = {
    "auto": [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH],
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}


class Transformer(nn.Module):
    """A token for every cell of a board (rows, columns, channels), two post-norm layers, and their mean (B, 128).

    SB3 builds it too when it loads an exported zip: hence the signature, `features_dim` and `__module__`.
    """

    __module__ = SCRIPT

    def __init__(self, observation_space: gym.spaces.Box, dropout: float = 0.1, sdpa: str = "auto") -> None:
        super().__init__()
        self.features_dim = 128
        width = 64
        rows, columns, channels = observation_space.shape
        self.attention = SDPA_BACKENDS[sdpa]
        self.embed = nn.Linear(channels, width)
        # Sinusoidal positions: half of the width for the row, half for the column.
        frequencies = 1e4 ** -torch.arange(0, 1, 4 / width)
        angles = torch.arange(max(rows, columns))[:, None] * frequencies
        waves = torch.cat([angles.sin(), angles.cos()], 1)
        by_row = waves[:rows].repeat_interleave(columns, 0)
        by_column = waves[:columns].repeat(rows, 1)
        position = torch.cat([by_row, by_column], 1)
        self.register_buffer("position", position, persistent=False)
        layers = [nn.TransformerEncoderLayer(width, 4, 128, dropout, batch_first=True) for _ in range(2)]
        self.layers = nn.Sequential(*layers)
        self.norm = nn.LayerNorm(width)
        self.out = nn.Sequential(nn.Linear(width, self.features_dim), nn.ReLU())

    def forward(self, obs: Tensor) -> Tensor:
        with sdpa_kernel(self.attention):
            x = self.layers(self.embed(obs.flatten(1, 2)) + self.position)
        return self.out(self.norm(x.mean(1)))


class NatureCNN(nn.Module):
    """Mnih et al. 2015."""

    def __init__(self, shape: tuple[int, int, int]) -> None:
        super().__init__()
        self.features_dim = 512
        self.cnn = nn.Sequential(
            nn.Conv2d(shape[0], 32, 8, 4),
            nn.ReLU(),
            nn.Conv2d(32, 64, 4, 2),
            nn.ReLU(),
            nn.Conv2d(64, 64, 3, 1),
            nn.ReLU(),
            nn.Flatten(),
        )
        num_outputs = self.cnn(torch.zeros(1, *shape)).shape[1]
        self.linear = nn.Sequential(nn.Linear(num_outputs, self.features_dim), nn.ReLU())

    def forward(self, obs: Tensor) -> Tensor:
        return self.linear(self.cnn(obs))


def flatten_parameters(module: nn.Module) -> Tensor:
    """One vector; the weights of `module` become views of it. Clipping, Adam and a copy then take one call each."""
    flat = nn.utils.parameters_to_vector(module.parameters()).detach()
    nn.utils.vector_to_parameters(flat, module.parameters())
    return flat


class QNetwork(nn.Module):
    """Q-values (B, actions), fp32, of observations. Layers, their names and the order of their draws are SB3's."""

    def __init__(self, args: Args, env: gym.Env) -> None:
        super().__init__()
        space = env.observation_space
        self.scale = 255 if is_image(space) else 1
        if args.policy == "transformer":
            self.features_extractor = Transformer(space, args.dropout, args.sdpa)
            sizes = [self.features_extractor.features_dim, 128]
        elif args.policy == "CnnPolicy":
            self.features_extractor = NatureCNN(space.shape)
            sizes = [self.features_extractor.features_dim]
        else:
            self.features_extractor = nn.Flatten()
            sizes = [math.prod(space.shape), 64, 64]
        layers = []
        for num_inputs, num_outputs in pairwise(sizes):
            layers.append(nn.Linear(num_inputs, num_outputs))
            layers.append(nn.ReLU())
        self.q_net = nn.Sequential(*layers, nn.Linear(sizes[-1], int(env.action_space.n)))

    def forward(self, obs: Tensor) -> Tensor:
        return self.q_net(self.features_extractor(obs.float() / self.scale)).float()


# ------------------------------------------------------------------------------------------------ the algorithm


def linear_schedule(start: float, end: float, fraction: float, progress: float) -> float:
    """Epsilon at `progress` (0 to 1): SB3's LinearSchedule."""
    if progress > fraction:
        return end
    return start + progress * (end - start) / max(fraction, 1e-9)


class Cosine:
    """Learning rate from `start` to `end` in SB3's form: a function of the remaining fraction of the run."""

    __module__ = SCRIPT

    def __init__(self, start: float, end: float) -> None:
        self.start = start
        self.end = end

    def __call__(self, remaining: float) -> float:
        return self.end + (self.start - self.end) * (1 + math.cos(math.pi * (1 - remaining))) / 2


def td_target(reward: Tensor, discount: Tensor, next_q_target: Tensor) -> Tensor:
    """r + discount * max_a Q_target(s', a), all (B,), fp32; `discount` is 0 if the game terminated, else gamma."""
    return reward + discount * next_q_target.max(1).values


def adam(
    weights: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    step: Tensor,
    learning_rate: Tensor,
    finite: Tensor,
) -> None:
    """One step of Adam (Kingma & Ba 2015) on vectors, in place, or none unless `finite`.

    `step` and `learning_rate` are (1,) and float64: the result equals torch.optim.Adam's to the bit.
    (torch.compile loses what is written into a float64 tensor of shape ().)
    """
    step.add_(finite)
    new_exp_avg = torch.lerp(exp_avg, grad, 0.1)
    new_exp_avg_sq = (exp_avg_sq * 0.999).addcmul_(grad, grad, value=1 - 0.999)
    step_size = (learning_rate / (1 - 0.9**step)).float()
    correction = (1 - 0.999**step).sqrt().float()
    new_weights = weights - new_exp_avg * step_size / (new_exp_avg_sq.sqrt() / correction + 1e-8)
    weights.copy_(torch.where(finite, new_weights, weights))
    exp_avg.copy_(torch.where(finite, new_exp_avg, exp_avg))
    exp_avg_sq.copy_(torch.where(finite, new_exp_avg_sq, exp_avg_sq))


class ReplayBuffer:
    """The last `buffer_size` transitions. Rows are steps, columns are games.

    On a CPU the tensors share memory with NumPy arrays: a row is written without a tensor operation.
    """

    NAMES = ["obs", "next_obs", "action", "reward", "discount"]

    def __init__(self, args: Args, space: gym.spaces.Box, device: torch.device) -> None:
        self.capacity = args.buffer_size // args.num_envs
        self.num_envs = args.num_envs
        self.steps = 0
        shape = (self.capacity, args.num_envs)
        arrays = [
            np.zeros(shape + space.shape, space.dtype),  # takes memory as it fills
            np.zeros(shape + space.shape, space.dtype),
            np.zeros(shape, np.int64),
            np.zeros(shape, np.float32),
            np.zeros(shape, np.float32),
        ]
        tensors = [torch.from_numpy(array).to(device) for array in arrays]
        self.rows = arrays if device.type == "cpu" else tensors
        self.transitions = [tensor.flatten(0, 1) for tensor in tensors]

    def state_dict(self) -> dict:
        return {**dict(zip(self.NAMES, self.transitions)), "steps": self.steps}

    def load_state_dict(self, saved: dict) -> None:
        for name, tensor in zip(self.NAMES, self.transitions):
            tensor.copy_(saved[name])
        self.steps = saved["steps"]

    def add(self, *step: np.ndarray) -> None:
        """One step of every game: obs, next_obs (final ones included), action, reward, discount."""
        position = self.steps % self.capacity
        for rows, values in zip(self.rows, step):
            rows[position] = values if isinstance(rows, np.ndarray) else torch.from_numpy(values)
        self.steps += 1

    def sample_index(self, index: Tensor) -> None:
        """Write random transition numbers into `index`, drawn in SB3's order."""
        row = np.random.randint(0, min(self.steps, self.capacity), size=len(index))
        row *= self.num_envs
        row += np.random.randint(0, self.num_envs, size=len(index))
        index.copy_(torch.from_numpy(row))

    def transitions_at(self, index: Tensor) -> list[Tensor]:
        return [tensor.index_select(0, index) for tensor in self.transitions]


class Learner:
    """The networks, Adam and the update. All state is in tensors that persist, so that a CUDA graph can capture it."""

    def __init__(
        self, args: Args, env: gym.Env, replay: ReplayBuffer, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.args = args
        self.replay = replay
        self.device = device
        self.dtype = dtype
        self.q_network = QNetwork(args, env).to(device)
        self.target_network = QNetwork(args, env).to(device).requires_grad_(False).eval()
        self.target_network.load_state_dict(self.q_network.state_dict())
        self.networks = nn.ModuleDict({"q_net": self.q_network, "q_net_target": self.target_network})  # SB3's names
        self.parameters = list(self.q_network.parameters())
        self.weights = flatten_parameters(self.q_network)
        self.target_weights = flatten_parameters(self.target_network)
        self.actor = copy.deepcopy(self.q_network).requires_grad_(False).eval()  # without dropout, on the same weights
        nn.utils.vector_to_parameters(self.weights, self.actor.parameters())
        step = torch.zeros(1, dtype=torch.float64, device=device)
        self.learning_rate = torch.full_like(step, args.learning_rate)
        self.adam = {
            "exp_avg": torch.zeros_like(self.weights),
            "exp_avg_sq": torch.zeros_like(self.weights),
            "step": step,
            "loss_scale": torch.tensor(2.0**16 if dtype == torch.float16 else 1.0, device=device),
        }
        self.index = torch.zeros(args.batch_size, dtype=torch.int64, device=device)  # of the batch, in the replay
        self.loss_sum = torch.zeros(1, device=device)  # since the last log
        self.numpy_layers = []
        if device.type == "cpu" and dtype == torch.float32 and args.policy == "MlpPolicy":
            # On the same weights, since calling PyTorch costs more than these matmuls: 8 us an action, not 31.
            for layer in self.actor.q_net[::2]:
                self.numpy_layers.append((layer.weight.numpy().T, layer.bias.numpy()))

    def autocast(self) -> torch.autocast:
        # A fresh context for each forward pass: a longer one keeps using the weights as they were cast at its start.
        return torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32, cache_enabled=False)

    @torch.inference_mode()
    def policy(self, obs: Tensor) -> Tensor:
        with self.autocast():
            return self.actor(obs).argmax(1)

    def greedy_action(self, obs: np.ndarray) -> np.ndarray:
        if not self.numpy_layers:
            return self.policy(torch.from_numpy(obs).to(self.device)).cpu().numpy()
        x = np.asarray(obs.reshape(len(obs), -1), np.float32) / self.actor.scale
        for weight, bias in self.numpy_layers:
            q = x @ weight + bias
            x = np.maximum(q, 0)
        return q.argmax(1)

    def td_loss(self, obs: Tensor, next_obs: Tensor, action: Tensor, reward: Tensor, discount: Tensor) -> Tensor:
        with torch.no_grad():
            with self.autocast():
                next_q_target = self.target_network(next_obs)
            target = td_target(reward, discount, next_q_target)
        with self.autocast():
            q = self.q_network(obs)
        return F.smooth_l1_loss(q.gather(1, action[:, None]).squeeze(1), target)

    def update(self) -> None:
        loss = self.td_loss(*self.replay.transitions_at(self.index))
        loss_scale = self.adam["loss_scale"]
        grads = torch.autograd.grad(loss * loss_scale, self.parameters)
        with torch.no_grad():
            grad = torch.cat([grad.flatten() for grad in grads]) / loss_scale
            norm = grad.norm()  # SB3 takes the norm of norms: other last bits, and compiled a fifth slower
            finite = norm.isfinite()
            grad *= (self.args.max_grad_norm / (norm + 1e-6)).clamp(max=1)
            moments = (self.adam["exp_avg"], self.adam["exp_avg_sq"], self.adam["step"])
            adam(self.weights, grad, *moments, self.learning_rate, finite)
            if self.dtype == torch.float16:  # doubles in 2,000 updates, halves after an overflow
                loss_scale.mul_(torch.where(finite, 2 ** (1 / 2000), 0.5))
            else:  # the log ends the run
                loss = torch.where(finite, loss, math.nan)
            self.loss_sum.add_(loss)

    def update_target(self) -> None:
        tau = self.args.tau
        self.target_weights.mul_(1 - tau).add_(self.weights, alpha=tau)  # rounds as SB3 does, unlike lerp_

    def compile(self, mode: str, obs: np.ndarray) -> None:
        """Compile the update and the policy here rather than in the timed loop."""
        torch.compiler.reset()  # of an earlier run in the same process
        state = [self.weights, self.target_weights, *self.adam.values(), self.loss_sum]
        before = [tensor.clone() for tensor in state]
        if self.device.type == "cuda":  # else reduce-overhead makes no graph, and does not say so
            for tensor in (*state, self.index, *self.replay.transitions):
                torch._dynamo.mark_static_address(tensor)
        options = {
            "triton.cudagraphs": mode != "default",
            "max_autotune": mode == "max-autotune",
            "coordinate_descent_tuning": mode == "max-autotune",
            "cpp_wrapper": self.device.type == "cpu",  # saves 30 us an update
            "guard_filter_fn": lambda guards: [False] * len(guards),  # only values could fail; 30 more
        }
        self.update = torch.compile(self.update, options=options)
        self.policy = torch.compile(self.policy, mode=mode)
        # One graph from the replay to the new weights.
        with torch._dynamo.config.patch(trace_autograd_ops=True), torch.random.fork_rng():
            self.update()
        for tensor, value in zip(state, before):
            tensor.copy_(value)
        self.greedy_action(obs)


class Games:
    """The environments, their last observations, and NumPy's random numbers, drawn in SB3's order."""

    def __init__(self, args: Args) -> None:
        self.envs = make_envs(args, args.num_envs)
        self.gamma = args.gamma
        self.action_space = self.envs[0].action_space
        self.action_space.seed(args.seed)
        self.obs = np.stack([env.reset(seed=args.seed + number)[0] for number, env in enumerate(self.envs)])
        self.last_obs = self.obs.copy()
        self.next_obs = self.obs.copy()
        self.reward = np.zeros(args.num_envs, np.float32)
        self.discount = np.zeros(args.num_envs, np.float32)
        self.returns = [0.0] * args.num_envs
        self.lengths = [0] * args.num_envs
        self.is_snake = isinstance(self.envs[0].unwrapped, SnakeEnv)  # other games cannot be restored

    def step(self, action: np.ndarray) -> list[tuple]:
        """Step every game and restart those that ended. Returns their return, length and score.

        The transitions are in `last_obs`, `next_obs` (final ones included), `reward` and `discount`.
        """
        self.last_obs[:] = self.obs
        episodes = []
        for number, env in enumerate(self.envs):
            obs, reward, terminated, truncated, info = env.step(action[number])
            self.next_obs[number] = obs
            self.reward[number] = reward
            self.discount[number] = 0 if terminated else self.gamma  # a truncated game is bootstrapped
            self.returns[number] += float(self.reward[number])
            self.lengths[number] += 1
            if terminated or truncated:
                episode_return = self.returns[number]
                episodes.append((episode_return, self.lengths[number], info.get("score", episode_return)))
                obs, _ = env.reset()
                self.returns[number] = 0
                self.lengths[number] = 0
            self.obs[number] = obs
        return episodes

    def state_dict(self) -> dict:
        _, numpy_key, numpy_position, *_ = np.random.get_state()
        return {
            "envs": [env.unwrapped.state_dict() for env in self.envs] if self.is_snake else None,
            "obs": torch.from_numpy(self.obs),
            "returns": self.returns,
            "lengths": self.lengths,
            "action_space": self.action_space.np_random.bit_generator.state,
            "numpy": [numpy_key.tolist(), numpy_position],
        }

    def load_state_dict(self, saved: dict) -> None:
        if len(saved["returns"]) != len(self.envs):
            raise ValueError("--num-envs must be as it was")
        np.random.set_state(("MT19937", *saved["numpy"]))
        self.action_space.np_random.bit_generator.state = saved["action_space"]
        if not self.is_snake:
            print("new games: only Snake's can be restored")
            return
        for env, state in zip(self.envs, saved["envs"]):
            env.unwrapped.load_state_dict(state)
        self.obs[:] = saved["obs"].numpy()
        self.returns = saved["returns"]
        self.lengths = saved["lengths"]


# --------------------------------------------------------------------------------------------------- evaluation


@torch.no_grad()
def evaluate(q_network: QNetwork, args: Args, episodes: int, device: torch.device) -> dict:
    """Scores of `episodes` greedy games, with seeds that training never uses.

    The score is the game's `info["score"]`, or the return if it has none.
    """
    envs = make_envs(args, episodes)
    obs = np.stack([env.reset(seed=EVAL_SEED + number)[0] for number, env in enumerate(envs)])
    scores = [0.0] * episodes
    playing = list(range(episodes))
    while playing:
        actions = q_network(torch.from_numpy(obs[playing]).to(device)).argmax(1).tolist()
        for number, action in zip(list(playing), actions):
            obs[number], reward, terminated, truncated, info = envs[number].step(action)
            scores[number] += reward
            if terminated or truncated:
                scores[number] = info.get("score", scores[number])
                playing.remove(number)
    return {
        "eval_score_mean": float(np.mean(scores)),
        "eval_score_max": float(max(scores)),
        "eval_episodes": episodes,
    }


def watch_game(q_network: QNetwork, args: Args, device: torch.device, render_mode: str):
    """Frames of one greedy game."""
    env = make_envs(args, 1, render_mode=render_mode)[0]
    return play(env, lambda obs: q_network(torch.as_tensor(obs, device=device)[None]).argmax().item(), EVAL_SEED)


def report(q_network: QNetwork, args: Args, device: torch.device, scores: dict, folder: Path) -> None:
    """Print the scores and write the GIF."""
    print("  ".join(f"{name} {value:g}" for name, value in scores.items()))
    if args.video:
        try:
            write_gif(watch_game(q_network, args, device, "rgb_array"), folder / "videos" / "game.gif")
        except (Exception, SystemExit) as error:  # a game's code may raise anything
            print(f"--video: no GIF of {args.env_id} ({type(error).__name__}: {' '.join(str(error).split())})")


# ------------------------------------------------------------------------------------ Stable-Baselines3's files


SAME_NAMES = [  # hyperparameters that have the same name in SB3
    "learning_rate",
    "buffer_size",
    "learning_starts",
    "batch_size",
    "tau",
    "gamma",
    "train_freq",
    "gradient_steps",
    "target_update_interval",
    "exploration_fraction",
    "exploration_initial_eps",
    "exploration_final_eps",
    "max_grad_norm",
    "seed",
]
COUNTERS = {  # in a checkpoint, and in a zip
    "global_step": "num_timesteps",
    "updates": "_n_updates",
    "calls": "_n_calls",
    "episodes": "_episode_num",
    "epsilon": "exploration_rate",
}
MOMENTS = ["exp_avg", "exp_avg_sq"]


def read_sb3(name: str) -> tuple:
    """Flags, counters, weights and Adam's state in a zip of SB3's DQN. Nothing in it is executed."""
    try:
        with zipfile.ZipFile(name) as archive, warnings.catch_warnings(action="ignore"):
            data = json.loads(archive.read("data"))
            weights = torch.load(archive.open("policy.pth"), map_location="cpu", weights_only=True)
            optimizer = torch.load(archive.open("policy.optimizer.pth"), map_location="cpu", weights_only=True)
        counters = {name: data[sb3_name] for name, sb3_name in COUNTERS.items()}
        if min(counters.values()) < 0:
            raise ValueError("its counters are negative")
        return sb3_flags(data), counters, weights, optimizer["state"]
    except Exception as error:
        fail(f"--import-sb3 {name}: cannot be loaded ({error}); a zip of stable_baselines3's DQN works")


def sb3_flags(data: dict) -> dict:
    """Flags for a zip's hyperparameters. Raises ValueError if one has no equal here."""
    flags = {name: data[name] for name in SAME_NAMES}
    flags["num_envs"] = data["n_envs"]
    if data["seed"] is None:
        del flags["seed"]
    rate = data["learning_rate"]
    if isinstance(rate, dict) and rate[":type:"].endswith(".Cosine'>"):
        flags["lr_schedule"] = "cosine"
        flags["learning_rate"] = rate["start"]
        flags["learning_rate_end"] = rate["end"]
    if type(data["train_freq"]) is not int:
        frequency = base64.b64decode(data["train_freq"][":serialized:"])
        if b"step" not in frequency.lower():  # some versions of Python write STEP
            raise ValueError("its train_freq is in episodes; only steps work")
        operations = pickletools.genops(frequency)  # a pickle is read, not executed
        (flags["train_freq"],) = [argument for opcode, argument, _ in operations if "INT" in opcode.name]

    others = dict(data["policy_kwargs"])
    for name in (":type:", ":serialized:", "net_arch"):
        others.pop(name, None)
    if others.get("features_extractor_class", "").endswith(".Transformer'>"):
        del others["features_extractor_class"]
        flags["policy"] = "transformer"
        flags["dropout"] = others.pop("features_extractor_kwargs")["dropout"]
    elif b"CnnPolicy" in base64.b64decode(data["policy_class"][":serialized:"]):
        flags["policy"] = "CnnPolicy"
    others["n_steps"] = data.get("n_steps")
    others["replay_buffer_kwargs"] = data.get("replay_buffer_kwargs")
    for name, value in others.items():
        if value not in (None, {}, 1, str(nn.ReLU)):
            raise ValueError(f"its {name} is {str(value)[:60]}; only the default works")
    for name, value in flags.items():
        kind = type(getattr(Args, name))
        if type(value) not in (int, kind):
            raise ValueError(f"its {name} is {str(value)[:60]}; only a plain number works")
        flags[name] = kind(value)
    return flags


def import_sb3(zip_name: str, learner: Learner) -> dict:
    """Load a zip's weights and Adam's moments. Returns its counters."""
    _, counters, weights, moments = read_sb3(zip_name)
    try:
        learner.networks.load_state_dict(weights)
        if moments:  # none before the first update
            for name in MOMENTS:
                vectors = [moments[number][name] for number in range(len(learner.parameters))]
                learner.adam[name].copy_(nn.utils.parameters_to_vector(vectors))
            learner.adam["step"].fill_(moments[0]["step"])
    except Exception as error:
        fail(f"--import-sb3 {zip_name}: does not fit ({error})")
    done = f"{counters['global_step']:,} steps and {counters['updates']:,} updates"
    print(f"{zip_name}: continues after {done}; the replay starts empty")
    return counters


def export_sb3(args: Args, env: gym.Env, learner: Learner, counters: dict) -> None:
    """Write a zip for `stable_baselines3.DQN.load`. SB3's classes are named in it, not imported."""

    def pickled(value, plain):
        text = base64.b64encode(pickle.dumps(value)).decode()
        return {":type:": str(type(value)), ":serialized:": text, **plain}

    sys.modules.setdefault(SCRIPT, sys.modules[__name__])  # pickle looks up Transformer and Cosine there
    data = {name: getattr(args, name) for name in SAME_NAMES}
    for name, sb3_name in COUNTERS.items():
        data[sb3_name] = counters[name]
    data["n_envs"] = args.num_envs
    data["verbose"] = 0
    policy = "CnnPolicy" if args.policy == "CnnPolicy" else "DQNPolicy"
    policy_class = f"cstable_baselines3.dqn.policies\n{policy}\n."  # its pickle
    data["policy_class"] = {":serialized:": base64.b64encode(policy_class.encode()).decode()}
    data["observation_space"] = pickled(env.observation_space, {})
    data["action_space"] = pickled(env.action_space, {})
    data["policy_kwargs"] = {}
    if args.policy == "transformer":
        kwargs = {"features_extractor_class": Transformer, "net_arch": [128]}
        kwargs["features_extractor_kwargs"] = {"dropout": args.dropout}
        data["policy_kwargs"] = pickled(kwargs, kwargs)
    if args.lr_schedule == "cosine":
        cosine = Cosine(args.learning_rate, args.learning_rate_end)
        data["learning_rate"] = pickled(cosine, vars(cosine))

    optimizer = torch.optim.Adam(learner.parameters, args.learning_rate)
    for parameter in learner.parameters:
        optimizer.state[parameter] = {name: torch.empty_like(parameter) for name in MOMENTS}
        optimizer.state[parameter]["step"] = learner.adam["step"][0].float()  # each has its own
    for name in MOMENTS:
        vectors = [state[name] for state in optimizer.state.values()]
        nn.utils.vector_to_parameters(learner.adam[name], vectors)
    temporary = Path(args.export_sb3).with_suffix(".tmp")
    try:
        with zipfile.ZipFile(temporary, "w") as archive:
            archive.writestr("data", json.dumps(data, default=str))
            with archive.open("policy.pth", "w") as file:
                torch.save(learner.networks.state_dict(), file)
            with archive.open("policy.optimizer.pth", "w") as file:
                torch.save(optimizer.state_dict(), file)
        temporary.replace(args.export_sb3)
    finally:
        temporary.unlink(missing_ok=True)


# -------------------------------------------------------------------------------------------------------- tools


def fail(message: str) -> NoReturn:
    """End the program with one line about what the user asked for, and exit code 2."""
    line = " ".join(message.split())
    print(f"{SCRIPT}.py: {line[:500]}", file=sys.stderr)
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

    def __init__(self, function) -> None:
        self.function = function
        self.calls = 0
        self.stream = torch.cuda.Stream()
        self.graph = torch.cuda.CUDAGraph()

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
            files = list(Path(args.run_dir).glob("*/checkpoint.pt"))
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
        if min(checkpoint["elapsed"], *(checkpoint[name] for name in COUNTERS)) < 0:
            raise ValueError("its counters are negative")
    except Exception as error:
        fail(f"--{flag} {name}: {path} cannot be loaded ({error}); a checkpoint, a run folder or latest works")
    return path, checkpoint


def parse_args() -> Args:
    """The command line. Its defaults come from a checkpoint (--resume, --evaluate), or from a zip and the settings."""
    values = settings()
    args = tyro.cli(Args, default=Args(**values), description=__doc__)
    if args.import_sb3 is not None:
        flags, _, _, _ = read_sb3(args.import_sb3)
        args = tyro.cli(Args, default=Args(**{**flags, **values}), description=__doc__)
    if args.resume is None and args.evaluate is None:
        return args
    path, checkpoint = load_checkpoint(args)
    saved = Args(**checkpoint["args"])
    if ":" in saved.env_id and args.env_id == Args.env_id:  # Gymnasium imports the module before the colon
        fail(f"{path}: imports no module by itself; --env-id {saved.env_id} works")
    for name in NOT_RESUMED:
        setattr(saved, name, getattr(args, name))
    limits = ["total_timesteps", "episodes", "max_seconds"]
    if any(getattr(args, name) is not None for name in limits):  # a new limit replaces all
        for name in limits:
            setattr(saved, name, None)
    args = tyro.cli(Args, default=saved, description=__doc__)
    if args.evaluate is None:
        args.resume = str(path)  # later, "latest" may be another one
    return args


# ------------------------------------------------------------------------------------------------------ the run


def main(args: Args) -> dict:
    """Train, or with --evaluate play. Returns what summary.json holds, or the scores."""
    if args.device == "cuda" and not torch.cuda.is_available():
        fail("--device cuda: this PyTorch sees no CUDA device; cpu and auto work")
    stays_on_cpu = args.device == "auto" and args.policy == "MlpPolicy"  # too small for a GPU
    on_cuda = args.device != "cpu" and torch.cuda.is_available() and not stays_on_cpu
    device = torch.device("cuda" if on_cuda else "cpu")
    args = fill_defaults(args, device)
    torch.set_num_threads(args.threads)
    np.random.seed(args.seed)
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high" if args.tf32 else "highest")
    torch.backends.cudnn.allow_tf32 = args.tf32  # convolutions, on by default
    dtype = pick_precision(args, device)
    if args.evaluate is None:
        return train(args, device, dtype)

    path, checkpoint = load_checkpoint(args)
    env = make_envs(args, 1)[0]
    q_network = QNetwork(args, env).to(device).eval()
    try:
        q_network.load_state_dict(checkpoint["q_net"])
    except Exception as error:
        fail(f"--evaluate {args.evaluate}: {error}")
    if args.render:
        mode = "ansi" if "ansi" in env.metadata.get("render_modes", []) else "human"  # in a window of its own
        try:
            show_in_terminal(watch_game(q_network, args, device, mode), fps=12)
        except Exception as error:  # a package is missing, or there is no screen
            fail(f"--render: {args.env_id} cannot be shown ({error})")
        return {}
    print(f"evaluation: {args.eval_episodes:,} episodes")
    scores = evaluate(q_network, args, args.eval_episodes, device)
    report(q_network, args, device, scores, path.parent)
    return scores


def train(args: Args, device: torch.device, dtype: torch.dtype) -> dict:
    start_time = time.perf_counter()
    signals = catch_signals()

    # --- networks, games and replay -------------------------------------------------------------------------------
    games = Games(args)
    replay = ReplayBuffer(args, games.envs[0].observation_space, device)
    learner = Learner(args, games.envs[0], replay, device, dtype)
    if args.policy == "transformer" and args.sdpa not in ("auto", "math"):
        q = torch.zeros(1, 4, 16, 16, dtype=dtype, device=device)
        try:
            with sdpa_kernel(SDPA_BACKENDS[args.sdpa]), warnings.catch_warnings(action="ignore"):
                F.scaled_dot_product_attention(q, q, q, dropout_p=args.dropout)
        except RuntimeError:
            fail(f"--sdpa {args.sdpa}: does not run with this --device and --dropout; --sdpa math works")
    last_episodes = deque(maxlen=100)  # return, length and score, as in SB3's curves

    # --- new, from a checkpoint, or from a zip --------------------------------------------------------------------
    folder = Path(args.run_dir) / (args.run_name or f"{SCRIPT}__{args.seed}__{time.strftime('%Y%m%d-%H%M%S')}")
    seconds_before = 0.0  # of the run that is resumed
    counters = dict.fromkeys(COUNTERS, 0)
    if args.resume is not None:
        path, checkpoint = load_checkpoint(args)
        folder = path.parent
        try:
            learner.q_network.load_state_dict(checkpoint["q_net"])
            learner.target_network.load_state_dict(checkpoint["q_net_target"])
            for name, tensor in learner.adam.items():
                tensor.copy_(checkpoint["optimizer"][name])
            torch.set_rng_state(checkpoint["torch"])
            games.load_state_dict(checkpoint)
            if args.checkpoint_replay and "replay" in checkpoint:
                replay.load_state_dict(checkpoint["replay"])
            else:
                print("the replay starts empty: only --checkpoint-replay saves it")
            counters = {name: checkpoint[name] for name in COUNTERS}
            seconds_before = checkpoint["elapsed"]
        except Exception as error:
            fail(f"--resume {args.resume}: {error}")
    if args.import_sb3 is not None:
        counters = import_sb3(args.import_sb3, learner)
        if args.total_timesteps is not None:  # the limits count from there, as in SB3's learn
            args.total_timesteps += counters["global_step"]
        if args.episodes is not None:
            args.episodes += counters["episodes"]
    global_step = counters["global_step"]
    updates = counters["updates"]
    calls = counters["calls"]  # of SB3's _on_step: one per step of all games
    episodes = counters["episodes"]
    epsilon = counters["epsilon"]

    def clock():
        return seconds_before + time.perf_counter() - start_time

    def progress():
        """Fraction of the run that is done; 1 or more ends it."""
        by_steps = global_step / (args.total_timesteps or math.inf)
        by_episodes = episodes / (args.episodes or math.inf)
        by_seconds = clock() / (args.max_seconds or math.inf)
        return max(by_steps, by_episodes, by_seconds)

    if progress() >= 1:
        works = "a larger --total-timesteps, --episodes or --max-seconds works"
        fail(f"--resume {args.resume}: the run is over; {works}")
    writer = open_run_folder(args, folder, global_step)
    device_name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu, {args.threads} threads"
    precision = str(dtype).removeprefix("torch.")
    active = f"{precision}, {'compiled' if args.compile else 'eager'}, batch size {args.batch_size}"
    print(f"{folder} on {device_name}: {active}")

    # --- switches -------------------------------------------------------------------------------------------------
    if args.compile:
        learner.compile(args.compile_mode, games.obs)
    update = CUDAGraphStep(learner.update) if args.cudagraph else learner.update

    # --- the loop: SB3's learn, collect_rollouts and train --------------------------------------------------------
    def save():
        if not learner.weights.isfinite().all():
            fail(f"--learning-rate {args.learning_rate:g}: the weights are not finite and not saved; a lower one works")
        state = {
            "script": SCRIPT,
            "version": CHECKPOINT_VERSION,
            "args": vars(args),
            "q_net": learner.q_network.state_dict(),
            "q_net_target": learner.target_network.state_dict(),
            "optimizer": learner.adam,
            **games.state_dict(),
            "torch": torch.get_rng_state(),
            "global_step": global_step,
            "updates": updates,
            "calls": calls,
            "episodes": episodes,
            "epsilon": epsilon,
            "elapsed": clock(),
        }
        if args.checkpoint_replay:
            state["replay"] = replay.state_dict()
        save_checkpoint(folder / "checkpoint.pt", state)
        return state

    def log(scalars):
        for name, value in scalars.items():
            writer.add_scalar(name.replace("eval_", "eval/"), value, global_step)

    cosine = Cosine(args.learning_rate, args.learning_rate_end)
    updates_per_round = args.gradient_steps
    if args.gradient_steps == -1:
        updates_per_round = args.train_freq * args.num_envs
    target_every = max(args.target_update_interval // args.num_envs, 1)
    first_step = logged_step = global_step
    first_update = logged_updates = updates
    scores = {}
    timer = PhaseTimer(device)
    log({"perf/warmup_s": time.perf_counter() - start_time})
    start_time = time.perf_counter()  # the warm-up does not count
    last_log = last_eval = last_checkpoint = seconds_before
    timer.lap()
    while True:
        # 1 act and step, 2 store
        for _ in range(args.train_freq):
            if global_step < args.learning_starts or np.random.rand() < epsilon:  # all games explore, or none
                action = np.array([games.action_space.sample() for _ in games.envs])
            else:
                action = learner.greedy_action(games.obs)
            timer.lap("act")
            ended = games.step(action)
            timer.lap("env")
            replay.add(games.last_obs, games.next_obs, action, games.reward, games.discount)
            last_episodes.extend(ended)
            episodes += len(ended)
            timer.lap("store")
            global_step += args.num_envs
            calls += 1
            if calls % target_every == 0:
                learner.update_target()
            epsilon = linear_schedule(
                args.exploration_initial_eps, args.exploration_final_eps, args.exploration_fraction, progress()
            )
        timer.lap("rollout")

        # 3 learn
        if global_step > args.learning_starts:
            if args.lr_schedule == "cosine":
                learner.learning_rate.fill_(cosine(1 - progress()))
            for _ in range(updates_per_round):
                replay.sample_index(learner.index)
                update()
            updates += updates_per_round
        timer.lap("learn")

        # 4 log, evaluate, save
        seconds = clock()
        is_last = progress() >= 1 or bool(signals)
        if is_last or seconds >= last_log + args.log_every:
            last_log = seconds
            phases = timer.read()
            new_steps = global_step - logged_step
            new_updates = updates - logged_updates
            logged_step = global_step
            logged_updates = updates
            loss = learner.loss_sum.item()
            learner.loss_sum.zero_()
            rates = throughput(new_steps, new_updates, args.batch_size, phases)
            scalars = {
                "charts/SPS": rates["env_steps_per_second"],
                "charts/updates_per_second": rates["updates_per_second"],
                "charts/samples_per_second": rates["samples_per_second"],
                "charts/replay_ratio": rates["replay_ratio"],
                "perf/rollout_fraction": rates["rollout_fraction"],
                "rollout/exploration_rate": epsilon,
                "train/learning_rate": learner.learning_rate.item(),
                "time/fps": (global_step - first_step) / sum(timer.total.values()),
            }
            episodic_return = score = math.nan
            if last_episodes:
                episodic_return, length, score = np.mean(last_episodes, 0)
                scalars["charts/episodic_return"] = episodic_return
                scalars["charts/episodic_length"] = length
                scalars["charts/score"] = score
                scalars["rollout/ep_rew_mean"] = episodic_return
                scalars["rollout/ep_len_mean"] = length
            if new_updates:
                scalars["losses/td_loss"] = loss / new_updates
                scalars["train/loss"] = loss / new_updates
            for phase, phase_seconds in phases.items():
                scalars[f"perf/{phase}_ms"] = 1000 * phase_seconds * args.num_envs / new_steps
            log(scalars)
            line = f"{min(progress(), 1):4.0%}  step {global_step:>11,}  SPS {rates['env_steps_per_second']:>9,.0f}"
            line += f"  updates/s {rates['updates_per_second']:>5.0f}"
            line += f"  epsilon {epsilon:.3f}  return {episodic_return:7.1f}  score {score:5.1f}"
            print(line)
            if not math.isfinite(loss):
                fail(f"--learning-rate {args.learning_rate:g}: the loss is {loss}; a lower one works")
            timer.lap("log")
        if is_last:
            break
        if args.eval_every and seconds >= last_eval + args.eval_every:
            scores = evaluate(learner.actor, args, max(args.eval_episodes // 10, 1), device)
            log(scores)
            last_eval = clock()  # the interval is from the end of one to the start of the next
            timer.lap()
        if args.checkpoint_every and seconds >= last_checkpoint + args.checkpoint_every:
            last_checkpoint = seconds
            save()
            timer.lap()

    # --- the end: first what must not be lost ---------------------------------------------------------------------
    if updates == first_update:
        print("nothing was learned: the run ended before --learning-starts")
    checkpoint = save()
    summary = {
        "script": SCRIPT,
        "device": device_name,
        "precision": precision,
        "compiled": args.compile,
        "cudagraph": args.cudagraph,
        "sdpa": args.sdpa if args.policy == "transformer" else None,
        "env_steps": global_step,
        "updates": updates,
        "episodes": episodes,
        "wall_seconds": clock(),
        **throughput(global_step - first_step, updates - first_update, args.batch_size, timer.total),
        **scores,
    }
    summary_file = folder / "summary.json"
    summary_file.write_text(json.dumps(summary, indent=2))
    if args.episodes:
        print(f"{episodes:,} games took {global_step:,} steps")
    if args.export_sb3 is not None:
        try:
            export_sb3(args, games.envs[0], learner, checkpoint)
            print(f"{args.export_sb3}: for stable_baselines3.DQN.load")
        except Exception as error:  # a full disk, or spaces that cannot be pickled
            print(f"--export-sb3 {args.export_sb3}: cannot be written ({error})", file=sys.stderr)
    stopped = len(signals) > 0
    signals.append(0)  # all is saved: from here on a signal ends the program
    script = shlex.quote(sys.argv[0])
    run = shlex.quote(str(folder))
    if stopped:
        print(f"stopped; python {script} --resume {run} continues from {folder / 'checkpoint.pt'}")
    else:
        print(f"evaluation: {args.eval_episodes:,} episodes")
        scores = evaluate(learner.actor, args, args.eval_episodes, device)
        log(scores)
        summary.update(scores)
        summary_file.write_text(json.dumps(summary, indent=2))
        report(learner.actor, args, device, scores, folder)
        print(f"watch it play: python {script} --evaluate {run} --render")
    writer.close()
    return summary


if __name__ == "__main__":
    threading.excepthook = lambda _: None  # TensorBoard's thread: its error is raised again in this one
    try:
        sys.stdout.reconfigure(line_buffering=True, errors="replace")
        main(parse_args())
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # the reader is gone (`| head`)
        os._exit(141)
    except (OSError, MemoryError, RuntimeError, ValueError) as error:
        if re.search("MemoryError|allocate memory|size calculation overflowed|array is too big", repr(error)):
            fail("out of memory: a smaller --batch-size, --buffer-size, --num-envs or --eval-episodes works")
        if type(error).__module__.startswith(("torch._dynamo", "torch._inductor")):
            fail(f"--compile: failed ({error}); --no-compile works")
        if isinstance(error, OSError):
            fail(str(error))
        raise

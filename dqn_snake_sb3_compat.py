"""Stable-Baselines3's DQN, number for number: same defaults, same order of events, same files.

    python dqn_snake_sb3_compat.py                                                # two minutes of Snake on 20 x 20
    python dqn_snake_sb3_compat.py --policy transformer --batch-size 8192 --bf16  # large batches, made for a GPU
    python dqn_snake_sb3_compat.py --env-id CartPole-v1 --compile                 # any Gymnasium id; fast on a CPU too
    python dqn_snake_sb3_compat.py --import-sb3 model.zip --export-sb3 more.zip   # goes on where SB3 stopped, and back
    python dqn_snake_sb3_compat.py --evaluate latest --render                     # watch the last agent play

Without switches weights and decisions are SB3's to the bit, until a gradient is clipped: SB3 sums its norm in another
order. `--compile` computes the same updates with other last bits, so decisions part from SB3's sooner or later. On two
CPU cores it makes 5.6 times SB3's steps per second on CartPole and Snake, without it 2 (benchmarks.md).
What SB3's defaults do not learn, this does not learn either: on 20 x 20 two minutes are too few for the first apple.

To read it: `QNetwork` has SB3's layers and names, and the loop in `main` is SB3's `learn`, `collect_rollouts` and
`train` in one piece. tests/scripts/test_dqn_snake_sb3_compat.py holds both side by side, number for number.
"""

import base64
import copy
import io
import json
import math
import os
import pickle
import pickletools
import signal
import sys
import threading
import time
import timeit
import warnings
import zipfile
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, redirect_stderr, suppress
from dataclasses import dataclass, replace
from itertools import chain, count, pairwise
from pathlib import Path
from typing import Any, Literal, NoReturn, get_type_hints

import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
import tyro
from dotenv import dotenv_values
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.tensorboard import SummaryWriter

from envs.playing import play, show_in_terminal, write_gif
from envs.snake.rules import VARIANTS, SnakeEnv

SCRIPT = Path(__file__).stem
MAX_GAMES = 10_000  # of an evaluation, and side by side
EVAL_SEED = 2**31 - MAX_GAMES  # the games of an evaluation have the seeds from here on, those of training lie below
CHECKPOINT_VERSION = 2


@dataclass
class Args:
    # Run
    seed: int = 1
    """seed of weights, games, exploration and sampling, used where SB3 uses it"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto takes CUDA where there is one, but not for MlpPolicy"""
    total_timesteps: int | None = None
    """environment transitions to train for (None: no limit)"""
    max_seconds: float | None = None
    """wall-clock budget, warm-up and evaluations on the way included (None: 120, or no limit with another end)"""
    episodes: int | None = None
    """games to train for (None: no limit)"""
    run_dir: str = "runs"
    """folder of all runs"""
    run_name: str | None = None
    """folder of this run inside it (None: script, seed and time)"""

    # Environment
    env_id: str = "SnakeOneHot-v0"
    """any Gymnasium id with Box observations and Discrete actions"""
    board: str | None = None
    """rows x columns, for the Snake ids (None: as registered, 20x20 for SnakeOneHot-v0)"""
    num_envs: int = 1
    """games, stepped one after the other"""

    # Algorithm: SB3's names and defaults
    policy: Literal["MlpPolicy", "CnnPolicy", "transformer"] = "MlpPolicy"
    """64-64 MLP, Nature CNN (images), or a two-layer transformer with a token for every cell of the board"""
    dropout: float = 0.1
    """of the transformer, while learning"""
    learning_rate: float = 1e-4
    """Adam's learning rate"""
    lr_schedule: Literal["constant", "cosine"] = "constant"
    """cosine falls to --learning-rate-end over the run"""
    learning_rate_end: float = 1e-5
    """learning rate at the end of the cosine schedule"""
    buffer_size: int = 1_000_000
    """transitions in the replay buffer, split over the games"""
    learning_starts: int = 100
    """steps of random play before learning starts"""
    batch_size: int = 32
    """transitions per update (OPTIMAL_BATCH_SIZE)"""
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
    """forward passes in bfloat16, where the hardware has it (USE_BF16)"""
    fp16: bool = False
    """forward passes in float16 with gradient scaling (CUDA)"""
    tf32: bool = False
    """fp32 matmuls on tensor cores (CUDA)"""
    compile: bool = False
    """torch.compile the update from the replay to the new weights, and acting (USE_TORCH_COMPILE)"""
    compile_mode: Literal["default", "reduce-overhead", "max-autotune"] = "default"
    """torch.compile's mode"""
    cudagraph: bool = False
    """capture the update as a CUDA graph"""
    flash_attention: bool = False
    """the same as --sdpa flash (USE_FLASH_ATTENTION)"""
    sdpa: Literal["auto", "flash", "efficient", "cudnn", "math"] = "auto"
    """attention kernel to try first (--policy transformer)"""
    threads: int | None = None
    """CPU threads (None: 1 for the MLP, else all cores, 8 at most; fewer where other programs keep them busy)"""

    # Input and output
    log_every: float = 2.0
    """seconds between log lines"""
    eval_every: float = 30.0
    """seconds between evaluations on the way, of a tenth of --eval-episodes (0: none)"""
    eval_episodes: int = 100
    """games of the final evaluation"""
    checkpoint_every: float = 60.0
    """seconds between checkpoints (0: only the last)"""
    checkpoint_replay: bool = False
    """save the replay buffer in checkpoints too"""
    resume: str | None = None
    """continue the run of this checkpoint, run folder, or "latest", with its flags"""
    evaluate: str | None = None
    """no training: play --eval-episodes games with this checkpoint, run folder, or "latest" """
    import_sb3: str | None = None
    """continue the training in this zip of Stable-Baselines3 with its hyperparameters, for the time given here"""
    export_sb3: str | None = None
    """write a zip for stable_baselines3.DQN.load at the end"""
    render: bool = False
    """with --evaluate: play one game in the terminal"""
    video: bool = True
    """write a GIF of a game at the end, or with --evaluate"""
    wandb: bool = False
    """mirror TensorBoard to Weights & Biases (pip install wandb)"""


CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
COMMAND_LINE_ONLY = ["run_dir", "run_name", "resume", "evaluate", "render", "video", "wandb"]
COMMAND_LINE_ONLY += ["import_sb3", "export_sb3"]  # never from a checkpoint; nor an env id that names a module, a:b
FRACTIONS = ["gamma", "tau", "dropout", "exploration_fraction", "exploration_initial_eps", "exploration_final_eps"]
ZERO_WORKS = ["seed", "learning_starts", "learning_rate_end", "eval_every", "checkpoint_every", "gamma", "dropout"]
ZERO_WORKS += ["exploration_fraction", "exploration_initial_eps", "exploration_final_eps"]
HIGHEST = dict.fromkeys(FRACTIONS, 1)
HIGHEST |= {"num_envs": MAX_GAMES, "eval_episodes": MAX_GAMES, "threads": 256}
SETTINGS = {  # flags that can be set in the environment or in a file named .env
    "OPTIMAL_BATCH_SIZE": "batch_size",
    "USE_TORCH_COMPILE": "compile",
    "USE_FLASH_ATTENTION": "flash_attention",
    "USE_BF16": "bf16",
}


def settings() -> tuple[dict[str, int | bool], dict[str, str]]:
    """Values by flag from the environment, or else from .env; and where each was found."""
    try:
        file = dotenv_values(".env") if Path(".env").exists() else {}
    except (OSError, ValueError) as error:
        fail(f".env: cannot be read ({error}); lines like USE_BF16=1 work")
    values, sources = {}, {}
    words = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}
    for name, flag in SETTINGS.items():
        place = "the environment" if name in os.environ else ".env"
        text = os.environ.get(name, file.get(name))
        if text is None:
            continue
        value = words.get(text.strip().lower())
        accepted = "true, 1, yes, on, false, 0, no or off"
        if flag == "batch_size":
            is_number = text.strip().isdecimal() and len(text) < 20 and int(text) > 0
            value = int(text) if is_number else None
            accepted = "a whole number above 0"
        if value is None:
            fail(f"{name}={text[:40]} (in {place}): must be {accepted}")
        values[flag] = value
        sources[flag] = f"{name} in {place}"
    return values, sources


def fill_defaults(args: Args, device: torch.device) -> Args:
    """A copy of `args` without None where a run needs a value. Flags that cannot work end the program here."""
    args = replace(args)
    if args.threads is None:
        is_small = args.policy == "MlpPolicy" and args.batch_size < 1024
        args.threads = 1 if is_small else pick_threads(CORES)
    if args.total_timesteps is None and args.episodes is None and args.max_seconds is None:
        args.max_seconds = 120.0
    if args.flash_attention and args.sdpa == "auto":
        args.sdpa = "flash"
    check_ranges(args)

    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        fail("torchrun: Stable-Baselines3's numbers are those of one process; --nproc-per-node 1 works")
    if args.bf16 and args.fp16:
        fail("--bf16 --fp16: choose one of them")
    if args.cudagraph and args.compile and args.compile_mode != "default":
        fail(f"--compile-mode {args.compile_mode}: captures graphs by itself; with --cudagraph only default works")
    if args.render and args.evaluate is None:
        fail("--render: shows a trained agent, so it needs --evaluate PATH")
    weights_from = [name for name in ("resume", "evaluate", "import_sb3") if getattr(args, name) is not None]
    if len(weights_from) > 1:
        flags = " ".join(f"--{name.replace('_', '-')}" for name in weights_from)
        fail(f"{flags}: each says where the weights come from; choose one of them")
    if args.num_envs > args.buffer_size:
        fail(f"--num-envs {args.num_envs}: one step of every game has to fit in --buffer-size {args.buffer_size}")
    if args.export_sb3 is not None and args.evaluate is not None:
        fail("--export-sb3 --evaluate: a zip is written at the end of a training; --resume works")
    if args.export_sb3 is not None:
        check_writable("--export-sb3", args.export_sb3)
    return args


def check_ranges(args: Args) -> None:
    for name, value in vars(args).items():
        if type(value) not in (int, float):
            continue
        if name == "gradient_steps" and value == -1:
            continue
        highest = HIGHEST.get(name, sys.maxsize)
        if name == "seed":  # every game has its own
            highest = EVAL_SEED - min(args.num_envs, MAX_GAMES)
        zero_works = name in ZERO_WORKS
        too_low = value < 0 or (value == 0 and not zero_works)
        if too_low or not value <= highest:  # NaN is neither
            lowest = "0 or more" if zero_works else "above 0"
            fail(f"--{name.replace('_', '-')} {value}: must be {lowest} and at most {highest:,}")


def check_writable(flag: str, name: str) -> None:
    """Found out by trying, and now: at the end of a run it would be too late."""
    path = Path(name)
    try:
        is_new = not path.exists()
        with open(path, "ab"):
            pass
        if is_new:
            path.unlink()
    except (OSError, ValueError) as error:  # ValueError: a null byte
        fail(f"{flag} {name!r}: cannot be written ({error}); the path of a zip in a folder that exists works")


def board_of(args: Args) -> tuple[int, ...]:
    sides = args.board.split("x")
    if len(sides) != 2 or not all(side.isdecimal() and len(side) < 4 for side in sides):
        fail(f"--env-id {args.env_id} --board {args.board}: must be rows x columns; 20x20 works")
    return tuple(int(side) for side in sides)


def make_envs(args: Args, num_envs: int, render_mode: str | None = None) -> list[gym.Env]:
    """`num_envs` games. They are plain environments: at a few games a Python loop is faster than a batched one."""
    kwargs: dict[str, Any] = {}
    if render_mode is not None:  # not every game has this parameter
        kwargs["render_mode"] = render_mode
    if args.board is not None:
        kwargs["board"] = board_of(args)
    try:
        envs = [gym.make(args.env_id, disable_env_checker=True, **kwargs) for _ in range(num_envs)]
    except Exception as error:  # whatever the code of a game raises
        board = "" if args.board is None else f" --board {args.board}"
        reason = " ".join(str(error).split())[:200]
        fail(f"--env-id {args.env_id}{board}: {reason}; {', '.join(VARIANTS)} and Gymnasium's ids work")
    observations = envs[0].observation_space
    actions = envs[0].action_space
    is_box = isinstance(observations, gym.spaces.Box) and len(observations.shape) > 0
    if not is_box or not isinstance(actions, gym.spaces.Discrete) or actions.start:
        fail(f"--env-id {args.env_id}: needs Box observations and Discrete actions, not {observations} and {actions}")
    image = is_image(observations)
    shape = observations.shape
    if args.policy == "CnnPolicy" and not (image and sorted(shape)[1] >= 36):
        fail(f"--policy CnnPolicy: needs images of 36x36 or more, {args.env_id} has {observations}; MlpPolicy works")
    if args.policy == "transformer" and (len(shape) != 3 or image):
        fail(f"--policy transformer: needs a board of cells, {args.env_id} has {observations}; MlpPolicy works")
    if image and np.argmin(shape) != 0:
        rows, columns, channels = shape
        turned = gym.spaces.Box(0, 255, (channels, rows, columns), np.uint8)
        envs = [gym.wrappers.TransformObservation(env, lambda obs: obs.transpose(2, 0, 1), turned) for env in envs]
    return envs


def is_image(space: gym.spaces.Box) -> bool:
    """What SB3 takes for an image: it divides it by 255 and puts its channels, the shortest side, first."""
    return space.dtype == np.uint8 and len(space.shape) == 3 and (space.low == 0).all() and (space.high == 255).all()


# ---------------------------------------------------------------------------------------------------- networks


SDPA_KERNELS = {  # by --sdpa, in the order in which PyTorch tries them; MATH always runs
    "auto": [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH],
    "flash": [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH],
    "efficient": [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH],
    "cudnn": [SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH],
    "math": [SDPBackend.MATH],
}


class Transformer(nn.Module):
    """A token for every cell of a board (rows, columns, channels), two post-norm layers, and their mean (B, 128).

    Built by SB3 too, when it loads an exported zip: hence the signature, `features_dim` and `__module__`.
    """

    __module__ = SCRIPT

    def __init__(self, observation_space: gym.spaces.Box, dropout: float = 0.1, sdpa: str = "auto") -> None:
        super().__init__()
        self.features_dim = 128
        width = 64
        rows, columns, channels = observation_space.shape
        self.kernels = SDPA_KERNELS[sdpa]
        self.embed = nn.Linear(channels, width)
        # Sinusoidal positions: half of the width for the row, half for the column.
        frequencies = 1e4 ** -torch.arange(0, 1, 4 / width)
        angles = torch.arange(max(rows, columns))[:, None] * frequencies
        waves = torch.cat([angles.sin(), angles.cos()], 1)
        row, column = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
        position = torch.cat([waves[row], waves[column]], 2).flatten(0, 1)
        self.register_buffer("position", position, persistent=False)
        layer1 = nn.TransformerEncoderLayer(width, 4, 128, dropout, batch_first=True)
        layer2 = nn.TransformerEncoderLayer(width, 4, 128, dropout, batch_first=True)
        self.layers = nn.Sequential(layer1, layer2)
        self.norm = nn.LayerNorm(width)
        self.out = nn.Sequential(nn.Linear(width, self.features_dim), nn.ReLU())

    def kernel(self, dtype: torch.dtype, device: torch.device) -> str:
        """Name of the kernel that PyTorch picks here."""
        q = torch.empty(1, 4, 16, 16, dtype=dtype, device=device)
        with sdpa_kernel(self.kernels, set_priority=True):
            return SDPBackend(torch._fused_sdp_choice(q, q, q, dropout_p=self.layers[0].dropout.p)).name.lower()

    def forward(self, obs: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(self.kernels, set_priority=True):
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

    def forward(self, obs: torch.Tensor) -> torch.Tensor:
        return self.linear(self.cnn(obs))


def flatten_parameters(module: nn.Module) -> torch.Tensor:
    """One vector that all weights of `module` become views of: to clip, to step and to copy costs one call each."""
    parameters = list(module.parameters())
    flat = nn.utils.parameters_to_vector(parameters).detach()
    sizes = [parameter.numel() for parameter in parameters]
    for parameter, values in zip(parameters, flat.split(sizes)):
        parameter.data = values.view_as(parameter)
    return flat


SHAPE_FLAGS = "--env-id, --board, --policy"  # those that the shapes of the weights follow from


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

    def forward(self, obs: torch.Tensor) -> torch.Tensor:
        obs = obs.float() if self.scale == 1 else obs.float() / self.scale
        return self.q_net(self.features_extractor(obs)).float()


# ------------------------------------------------------------------------------------------------ the algorithm


def linear_schedule(start: float, end: float, fraction: float, progress: float) -> float:
    """Epsilon when `progress` (0 to 1) of the run is over: SB3's LinearSchedule."""
    if progress > fraction:
        return end
    return start + progress * (end - start) / max(fraction, 1e-9)


class Cosine:
    """Learning rate from `start` to `end` as SB3 calls a schedule: with the part of the run that remains, 1 to 0."""

    __module__ = SCRIPT

    def __init__(self, start: float, end: float) -> None:
        self.start = start
        self.end = end

    def __call__(self, remaining: float) -> float:
        return self.end + (self.start - self.end) * (1 + math.cos(math.pi * (1 - remaining))) / 2


def td_target(reward: torch.Tensor, discount: torch.Tensor, next_q_target: torch.Tensor) -> torch.Tensor:
    """r + discount * max_a Q_target(s', a), all (B,), fp32; `discount` is 0 where the game was over, else gamma."""
    return reward + discount * next_q_target.max(1).values


def adam(
    weights: torch.Tensor, grad: torch.Tensor, exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor, step: torch.Tensor,
    learning_rate: torch.Tensor, finite: torch.Tensor,
) -> None:  # fmt: skip
    """One step of Adam (Kingma & Ba 2015) on vectors, in place, and none at all unless `finite`.

    `step` and `learning_rate` are (1,) and float64: every number is to the bit what torch.optim.Adam makes of SB3's.
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
    """The last `buffer_size` transitions, as many of every game. Rows are steps, columns are games.

    On a CPU the tensors share their memory with NumPy arrays: writing a row is then no tensor operation.
    """

    NAMES = ["obs", "next_obs", "action", "reward", "discount"]

    def __init__(self, args: Args, space: gym.spaces.Box, device: torch.device) -> None:
        self.capacity = args.buffer_size // args.num_envs
        self.num_envs = args.num_envs
        self.position = 0
        self.size = 0
        bytes_each = 2 * math.prod(space.shape) * space.dtype.itemsize + 16
        check_memory("--buffer-size", args.buffer_size, bytes_each, device)
        shape = (self.capacity, args.num_envs)
        arrays = [
            np.zeros(shape + space.shape, space.dtype),  # on a CPU memory is taken as it fills
            np.zeros(shape + space.shape, space.dtype),
            np.zeros(shape, np.int64),
            np.zeros(shape, np.float32),
            np.zeros(shape, np.float32),
        ]
        tensors = [torch.from_numpy(array).to(device) for array in arrays]
        self.rows = arrays if device.type == "cpu" else tensors
        self.transitions = [tensor.flatten(0, 1) for tensor in tensors]

    def state_dict(self) -> dict[str, Any]:
        return dict(zip(self.NAMES, self.transitions)) | {"position": self.position, "size": self.size}

    def load_state_dict(self, saved: dict[str, Any], num_actions: int) -> None:
        """Raises ValueError, before anything is changed, for values that no replay buffer has."""
        position = saved["position"]
        size = saved["size"]
        is_full = size == self.capacity
        if not position < self.capacity or not (position == size or is_full):
            raise ValueError(f"position {position} and size {size} of {self.capacity} rows")
        if saved["action"].min() < 0 or saved["action"].max() >= num_actions:
            raise ValueError(f"actions must be 0 to {num_actions - 1}")
        for name, tensor in zip(self.NAMES, self.transitions):
            tensor.copy_(saved[name])
        self.position = position
        self.size = size

    def add(self, *step: np.ndarray) -> None:
        """One step of every game: obs, next_obs (final ones included), action, reward, discount."""
        for rows, values in zip(self.rows, step):
            rows[self.position] = values if isinstance(rows, np.ndarray) else torch.from_numpy(values)
        self.position = (self.position + 1) % self.capacity
        self.size = min(self.size + 1, self.capacity)

    def sample_index(self, index: torch.Tensor) -> None:
        """Numbers of transitions into `index`, with NumPy's draws in SB3's order."""
        row = np.random.randint(0, self.size, size=len(index))
        row *= self.num_envs
        row += np.random.randint(0, self.num_envs, size=len(index))
        index.copy_(torch.from_numpy(row))

    def transitions_at(self, index: torch.Tensor) -> list[torch.Tensor]:
        return [tensor.index_select(0, index) for tensor in self.transitions]


@torch.no_grad()
def evaluate(q_network: QNetwork, args: Args, episodes: int, device: torch.device) -> dict[str, float]:
    """Play `episodes` greedy games to their ends, with seeds that training does not use.

    Score is what the game calls `score`, and the undiscounted return where it has none.
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
        "eval_score_median": float(np.median(scores)),
        "eval_score_max": float(np.max(scores)),
        "eval_episodes": episodes,
    }


def watch_game(q_network: QNetwork, args: Args, device: torch.device, render_mode: str) -> Iterator:
    """Frames of one greedy game."""
    env = make_envs(args, 1, render_mode)[0]

    @torch.no_grad()
    def policy(obs: np.ndarray) -> int:
        return q_network(torch.as_tensor(obs, device=device)[None]).argmax().item()

    return play(env, policy, EVAL_SEED)


def save_gif(q_network: QNetwork, args: Args, device: torch.device, folder: Path) -> None:
    path = folder / "videos" / "game.gif"
    try:
        write_gif(watch_game(q_network, args, device, "rgb_array"), path)
        say(str(path))
    except OSError as error:
        say(f"--video: {path} cannot be written ({error})")
    except Exception as error:  # a package is missing, or the game has no pictures, or what its code raises
        reason = " ".join(str(error).split())[:200]
        say(f"--video: {args.env_id} cannot be drawn ({type(error).__name__}: {reason})")


def render_game(q_network: QNetwork, args: Args, device: torch.device) -> None:
    """One game in the terminal, or in the window of a game that has one."""
    modes = make_envs(args, 1)[0].metadata.get("render_modes", [])
    frames = watch_game(q_network, args, device, "ansi" if "ansi" in modes else "human")
    try:
        first = next(frames)
    except Exception as error:  # a package is missing, or there is no screen
        reason = " ".join(str(error).split())[:200]
        fail(f"--render: {args.env_id} cannot be shown ({reason})")
    show_in_terminal(chain([first], frames), fps=12)


def evaluate_run(q_network: QNetwork, args: Args, device: torch.device) -> dict[str, float]:
    """--evaluate: one game in the terminal (--render), or the scores of many games and a GIF (--video)."""
    path, checkpoint = load_checkpoint("--evaluate", args.evaluate, args.run_dir)
    expected = {"q_net": q_network.state_dict()}
    check_layout(f"--evaluate {args.evaluate}", checkpoint, expected, SHAPE_FLAGS)
    q_network.load_state_dict(checkpoint["q_net"])
    q_network.eval()
    if args.render:
        render_game(q_network, args, device)
        return {}
    scores = evaluate(q_network, args, args.eval_episodes, device)
    say("  ".join(f"{name} {value:g}" for name, value in scores.items()))
    if args.video:
        save_gif(q_network, args, device, path.parent)
    return scores


def restore_game(env: SnakeEnv, state: dict[str, Any], obs: torch.Tensor) -> None:
    """Go on with a saved game. Raises one of MALFORMED for what is no game of this board that looks like `obs`."""
    env.load_state_dict(state)
    if not np.array_equal(env.rules.observe(env.codes()), obs.numpy()):
        raise ValueError("a game looks other than it is")


MALFORMED = (AttributeError, IndexError, KeyError, OverflowError, RuntimeError, TypeError, ValueError)


# ------------------------------------------------------------------------------------ Stable-Baselines3's files


PLAIN_HYPERPARAMETERS = "buffer_size learning_starts batch_size tau gamma gradient_steps target_update_interval "
PLAIN_HYPERPARAMETERS += "exploration_fraction exploration_initial_eps exploration_final_eps max_grad_norm"
# that SB3 writes as plain numbers, under the names they have here
POLICIES = {  # by features extractor and policy class
    ("Transformer", "DQNPolicy"): "transformer",
    ("NatureCNN", "DQNPolicy"): "CnnPolicy",
    ("NatureCNN", "CnnPolicy"): "CnnPolicy",
    ("FlattenExtractor", "DQNPolicy"): "MlpPolicy",
}
ADAM = {"betas": (0.9, 0.999), "eps": 1e-8}  # of its options, those that are on in PyTorch


class UnsupportedZip(ValueError):
    """A zip of SB3's DQN with hyperparameters that have no flag here."""


def read_sb3(path: str) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Flags, counters and state_dicts in a zip of SB3's DQN; refuses one that cannot be gone on with here.

    Pickled objects in it are left alone, nothing is executed: they are read as text, or as what their opcodes spell.
    """
    if not path:
        fail("--import-sb3 '': names nothing; a zip written by stable_baselines3's DQN works")
    try:
        with zipfile.ZipFile(path) as archive:
            data = json.loads(archive.read("data"))
            names = ("policy", "policy.optimizer")
            files = {name: io.BytesIO(archive.read(f"{name}.pth")) for name in names}
            with warnings.catch_warnings(action="ignore"):
                saved = {name: torch.load(file, map_location="cpu", weights_only=True) for name, file in files.items()}
        if not any(name.startswith("q_net_target.") for name in saved["policy"]):
            raise ValueError("it is of another algorithm")
        saved["observation_space"] = data["observation_space"]
        return sb3_flags(data, saved["policy.optimizer"]), sb3_counters(data), saved
    except FileNotFoundError:
        fail(f"--import-sb3 {path}: there is no such file; a zip written by stable_baselines3's DQN works")
    except UnsupportedZip as error:
        fail(f"--import-sb3 {path}: cannot be gone on with: {error}")
    except Exception as error:
        fail(f"--import-sb3 {path}: not a whole zip of stable_baselines3's DQN ({first_line(error)})")


def pickled_words(entry: dict[str, str]) -> list[str | int]:
    """Names, words and whole numbers in a pickled object, in order. It is read, not executed."""
    kinds = ("GLOBAL", "BINUNICODE", "SHORT_BINUNICODE", "UNICODE", "INT", "BININT", "BININT1", "BININT2")
    words = []
    for opcode, argument, _ in pickletools.genops(base64.b64decode(entry[":serialized:"])):
        if opcode.name in kinds:
            words += argument.split(" ") if opcode.name == "GLOBAL" else [argument]
    return words


def sb3_flags(data: dict[str, Any], optimizer: dict[str, Any]) -> dict[str, Any]:
    """Flags that say what a zip's hyperparameters say. UnsupportedZip, with the reason, where none does."""

    def number(name: str, value: Any, *kinds: type) -> int | float:
        if type(value) not in kinds:
            text = value.get(":type:") if isinstance(value, dict) else value
            kind = " or ".join(kind.__name__ for kind in kinds)
            raise UnsupportedZip(f"its {name} is {str(text)[:60]}; only a plain {kind} works here")
        return value

    def demand(name: str, found: Any, *works: Any) -> None:
        if found not in works:
            only = " or ".join(str(value) for value in works)
            raise UnsupportedZip(f"its {name} is {str(found)[:60]}; only {only} works here")

    hints = get_type_hints(Args)
    flags = {}
    for name in PLAIN_HYPERPARAMETERS.split():
        kinds = (float, int) if hints[name] is float else (int,)
        flags[name] = number(name, data[name], *kinds)
    flags["num_envs"] = number("n_envs", data["n_envs"], int)
    if data.get("seed") is not None:
        flags["seed"] = number("seed", data["seed"], int)

    rate = data["learning_rate"]
    if isinstance(rate, dict) and rate[":type:"].endswith(".Cosine'>"):
        flags["lr_schedule"] = "cosine"
        flags["learning_rate"] = number("learning_rate", rate["start"], float, int)
        flags["learning_rate_end"] = number("learning_rate", rate["end"], float, int)
    else:
        flags["learning_rate"] = number("learning_rate", rate, float, int)

    frequency = data["train_freq"]
    if type(frequency) is int:
        flags["train_freq"] = frequency
    else:
        words = pickled_words(frequency)
        (flags["train_freq"],) = (word for word in words if type(word) is int)
        demand("train_freq", words[-1].lower(), "step")  # some Pythons write the name of the enum's value, STEP

    policy = data["policy_kwargs"]
    extractor = policy.get("features_extractor_class", "FlattenExtractor").split(".")[-1].removesuffix("'>")
    module, policy_class = pickled_words(data["policy_class"])
    if policy_class == "CnnPolicy" and "features_extractor_class" not in policy:
        extractor = "NatureCNN"
    demand("policy_class", module, "stable_baselines3.dqn.policies")
    demand("features extractor and policy_class", (extractor, policy_class), *POLICIES)
    flags["policy"] = POLICIES[extractor, policy_class]
    options = policy.get("features_extractor_kwargs", {})
    if flags["policy"] == "transformer":
        flags["dropout"] = number("dropout", options.get("dropout", Args.dropout), float, int)
        demand("features_extractor_kwargs", sorted(options), [], ["dropout"])
    else:
        demand("features_extractor_kwargs", options, {})
    demand("activation_fn", policy.get("activation_fn", str(nn.ReLU)), str(nn.ReLU))
    demand("normalize_images", policy.get("normalize_images", True), True)
    demand("optimizer_class", policy.get("optimizer_class", str(torch.optim.Adam)), str(torch.optim.Adam))
    known = "features_extractor_class features_extractor_kwargs activation_fn normalize_images optimizer_class "
    known += "optimizer_kwargs net_arch :type: :serialized:"  # the latter two show in the optimizer and the weights
    demand("policy_kwargs", sorted(set(policy) - set(known.split())), [])

    (group,) = optimizer["param_groups"]
    for option in set(group) - set("lr initial_lr params foreach fused capturable differentiable".split()):
        value = tuple(group[option]) if option == "betas" else group[option]
        demand(f"optimizer's {option}", value, ADAM.get(option, False))
    demand("optimizer", set(ADAM) <= set(group), True)

    demand("n_steps", data.get("n_steps", 1), 1)
    demand("optimize_memory_usage", data.get("optimize_memory_usage", False), False)
    demand("replay_buffer_kwargs", data.get("replay_buffer_kwargs") or {}, {}, {"handle_timeout_termination": True})
    if data.get("replay_buffer_class") is not None:
        demand("replay_buffer_class", pickled_words(data["replay_buffer_class"])[-1], "ReplayBuffer")
    return flags


def sb3_counters(data: dict[str, Any]) -> dict[str, Any]:
    counters = {
        "global_step": data["num_timesteps"],
        "updates": data["_n_updates"],
        "calls": data["_n_calls"],
        "episodes": data["_episode_num"],
        "epsilon": float(data["exploration_rate"]),
    }
    if layout(counters) != {**dict.fromkeys(counters, int), "epsilon": float}:
        raise ValueError(f"its counters are {counters}")
    return counters


def import_sb3_zip(
    args: Args, space: gym.spaces.Box, networks: dict[str, QNetwork], optimizer: dict[str, torch.Tensor]
) -> dict[str, Any]:
    """Put a zip's weights and Adam's moments into ours, all checked before; gives its counters."""
    _, counters, saved = read_sb3(args.import_sb3)
    asked = f"--import-sb3 {args.import_sb3}"
    weights = {f"{name}.{key}": value for name, net in networks.items() for key, value in net.state_dict().items()}
    expected = {"policy": weights, "state": {}}
    moments = saved["policy.optimizer"].get("state")
    if moments:  # none before the first update
        expected["state"] = adam_state(list(networks["q_net"].parameters()))
    check_layout(asked, {"policy": saved["policy"], "state": moments}, expected, SHAPE_FLAGS)
    for name, ours in (("_shape", list(space.shape)), ("dtype", str(space.dtype))):
        theirs = saved["observation_space"].get(name, ours)
        if theirs != ours:
            fail(f"{asked}: does not fit (it sees {theirs}, --env-id {args.env_id} shows {ours})")
    for name, network in networks.items():
        network.load_state_dict({key: saved["policy"][f"{name}.{key}"] for key in network.state_dict()})
    if moments:
        steps = {moment["step"].item() for moment in moments.values()}
        if len(steps) > 1 or min(steps) < 1:
            fail(f"{asked}: does not fit (Adam has made {sorted(steps)} steps, as a number it has to be one)")
        for name in ("exp_avg", "exp_avg_sq"):
            optimizer[name].copy_(torch.cat([moments[number][name].flatten() for number in sorted(moments)]))
        optimizer["step"].fill_(steps.pop())
    done = f"{counters['global_step']:,} steps and {counters['updates']:,} updates"
    say(f"{args.import_sb3}: goes on after {done}; the replay starts empty")
    return counters


def write_sb3(
    path: str,
    args: Args,
    env: gym.Env,
    networks: dict[str, QNetwork],
    optimizer: dict[str, torch.Tensor],
    counters: dict[str, Any],
) -> None:
    """A zip that `stable_baselines3.DQN.load` understands. SB3 is named in it, not imported here."""

    def pickled(value: Any, **plain: Any) -> dict[str, Any]:
        """With what SB3 writes beside it in plain text."""
        serialized = base64.b64encode(pickle.dumps(value)).decode()
        return {":type:": str(type(value)), ":serialized:": serialized, **plain}

    def named(kind: str, text: str) -> dict[str, str]:
        """A pickle written by hand, of what is SB3's."""
        return {":type:": f"<class '{kind}'>", ":serialized:": base64.b64encode(text.encode()).decode()}

    sys.modules.setdefault(SCRIPT, sys.modules[__name__])  # what is pickled here is looked up there
    data = {name: getattr(args, name) for name in [*PLAIN_HYPERPARAMETERS.split(), "learning_rate", "seed"]} | counters
    policy = "CnnPolicy" if args.policy == "CnnPolicy" else "DQNPolicy"
    data["policy_class"] = named("abc.ABCMeta", f"cstable_baselines3.dqn.policies\n{policy}\n.")
    data["policy_kwargs"] = {}
    if args.policy == "transformer":
        options = {"dropout": args.dropout}
        kwargs = {"features_extractor_class": Transformer, "features_extractor_kwargs": options, "net_arch": [128]}
        plain = {"features_extractor_class": str(Transformer), "features_extractor_kwargs": options, "net_arch": [128]}
        data["policy_kwargs"] = pickled(kwargs, **plain)
    if args.lr_schedule == "cosine":
        cosine = Cosine(args.learning_rate, args.learning_rate_end)
        data["learning_rate"] = pickled(cosine, start=cosine.start, end=cosine.end)
    module = "stable_baselines3.common.type_aliases"
    unit = f"c{module}\nTrainFrequencyUnit\n(Vstep\ntR"
    data["train_freq"] = named(f"{module}.TrainFreq", f"c{module}\nTrainFreq\n(I{args.train_freq}\n{unit}tR.")
    space = env.observation_space
    data["observation_space"] = pickled(space, _shape=list(space.shape), dtype=str(space.dtype))
    data["action_space"] = pickled(env.action_space)
    data["n_envs"] = args.num_envs
    data["n_steps"] = 1
    data["verbose"] = 0

    weights = {f"{name}.{key}": value for name, net in networks.items() for key, value in net.state_dict().items()}
    weights = {name: weight.cpu() for name, weight in weights.items()}
    online = list(networks["q_net"].parameters())
    step = optimizer["step"].cpu().float().view(())
    sizes = [weight.numel() for weight in online]
    exp_avg = optimizer["exp_avg"].cpu().split(sizes)
    exp_avg_sq = optimizer["exp_avg_sq"].cpu().split(sizes)
    state = {}
    if step > 0:
        for number, weight in enumerate(online):
            moments = {"exp_avg": exp_avg[number].view_as(weight), "exp_avg_sq": exp_avg_sq[number].view_as(weight)}
            state[number] = {"step": step.clone(), **moments}
    group = torch.optim.Adam(online, args.learning_rate).state_dict()["param_groups"]

    temporary = Path(path).with_suffix(f".{os.getpid()}.tmp")
    try:
        with zipfile.ZipFile(temporary, "w") as archive:
            archive.writestr("data", json.dumps(data, indent=4))
            for name, part in (("policy", weights), ("policy.optimizer", {"state": state, "param_groups": group})):
                file = io.BytesIO()
                torch.save(part, file)
                archive.writestr(f"{name}.pth", file.getvalue())
            archive.writestr("_stable_baselines3_version", "2.9.2")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


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


def adam_state(weights: list[torch.Tensor]) -> dict[int, dict[str, torch.Tensor]]:
    """What Adam's state looks like after an update."""
    names = "exp_avg", "exp_avg_sq"
    return {n: {"step": torch.zeros(()), **dict.fromkeys(names, weight.detach())} for n, weight in enumerate(weights)}


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
def main(args: Args, sources: dict[str, str] | None = None) -> dict:
    start_time = time.perf_counter()
    interrupts = Interrupts()
    # A network of 64 units keeps no GPU busy, and its games run here.
    stays_on_cpu = args.device == "auto" and args.policy == "MlpPolicy"
    device = pick_device("cpu" if stays_on_cpu else args.device)
    args = fill_defaults(args, device)
    torch.set_num_threads(args.threads)
    np.random.seed(args.seed)
    torch.manual_seed(args.seed)
    dtype = pick_precision(args.bf16, args.fp16, args.tf32, device)
    envs = make_envs(args, args.num_envs)
    q_network = QNetwork(args, envs[0]).to(device)
    if args.evaluate is not None:
        with interrupts.at_once():
            return evaluate_run(q_network, args, device)
        return {}

    sdpa = None
    if args.policy == "transformer":
        sdpa = q_network.features_extractor.kernel(dtype, device)
        if args.sdpa != "auto" and args.sdpa != sdpa.split("_")[0]:
            say(f"--sdpa {args.sdpa}: does not run here")
        say(f"attention runs in {sdpa}")

    # --- networks, games and replay -------------------------------------------------------------------------------
    target_network = QNetwork(args, envs[0]).to(device).requires_grad_(False).eval()
    target_network.load_state_dict(q_network.state_dict())
    parameters = list(q_network.parameters())
    weights = flatten_parameters(q_network)
    target_weights = flatten_parameters(target_network)
    actor = copy.deepcopy(q_network).requires_grad_(False).eval()  # acts without dropout, with the weights that learn
    for mirror, parameter in zip(actor.parameters(), parameters):
        mirror.data = parameter.data
    use_graphs = args.cudagraph and device.type == "cuda"
    exp_avg = torch.zeros_like(weights)
    exp_avg_sq = torch.zeros_like(weights)
    adam_step = torch.zeros(1, dtype=torch.float64, device=device)
    learning_rate = torch.full_like(adam_step, args.learning_rate)
    loss_scale = torch.tensor(2.0**16 if dtype == torch.float16 else 1.0, device=device)
    cosine = Cosine(args.learning_rate, args.learning_rate_end)
    replay = ReplayBuffer(args, envs[0].observation_space, device)
    index = torch.zeros(args.batch_size, dtype=torch.int64, device=device)  # what the next update learns from
    loss_sum = torch.zeros(1, device=device)  # since the last log
    timer = PhaseTimer(device)

    action_space = envs[0].action_space
    action_space.seed(args.seed)
    obs = np.stack([env.reset(seed=args.seed + number)[0] for number, env in enumerate(envs)])
    next_obs = obs.copy()
    action = np.zeros(args.num_envs, np.int64)
    reward = np.zeros(args.num_envs, np.float32)
    discount = np.zeros(args.num_envs, np.float32)
    returns = np.zeros(args.num_envs)
    lengths = np.zeros(args.num_envs, np.int64)
    last_episodes = deque(maxlen=100)  # return, length and score, as in SB3's curves

    # --- checkpoints ----------------------------------------------------------------------------------------------
    networks = {"q_net": q_network, "q_net_target": target_network}
    optimizer = {"exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq, "step": adam_step, "loss_scale": loss_scale}
    global_step = 0
    updates = 0
    calls = 0  # of SB3's _on_step: one for a step of all games
    episodes = 0
    epsilon = 0.0
    seconds_before = 0.0  # of the run that is resumed
    imported_steps = 0  # of a zip: --total-timesteps and --episodes count from there
    imported_episodes = 0

    def elapsed() -> float:
        return seconds_before + time.perf_counter() - start_time

    def progress() -> float:
        by_steps = global_step / (imported_steps + args.total_timesteps) if args.total_timesteps else 0
        by_episodes = episodes / (imported_episodes + args.episodes) if args.episodes else 0
        by_seconds = elapsed() / args.max_seconds if args.max_seconds else 0
        return max(by_steps, by_episodes, by_seconds)

    def run_state() -> dict[str, Any]:
        """All there is to a run, as tensors and plain values. Of games, only Snake can be put back to where it was."""
        _, numpy_key, numpy_position, *_ = np.random.get_state()
        state = {
            "q_net": q_network.state_dict(),
            "q_net_target": target_network.state_dict(),
            "optimizer": optimizer,
            "envs": [env.unwrapped.state_dict() for env in envs] if isinstance(envs[0].unwrapped, SnakeEnv) else None,
            "obs": torch.from_numpy(obs.copy()),
            "returns": returns.tolist(),
            "lengths": lengths.tolist(),
            "action_space": action_space.np_random.bit_generator.state,
            "numpy_key": torch.from_numpy(numpy_key.astype(np.int64)),
            "numpy_position": numpy_position,
            "torch": torch.get_rng_state(),
            "global_step": global_step,
            "updates": updates,
            "calls": calls,
            "episodes": episodes,
            "epsilon": epsilon,
            "imported_steps": imported_steps,
            "imported_episodes": imported_episodes,
            "elapsed": elapsed(),
        }
        if args.checkpoint_replay:
            state["replay"] = replay.state_dict()
        return state

    def load_run_state(checkpoint: dict[str, Any]) -> None:
        """Checks everything first: what does not fit is refused before anything is changed."""
        nonlocal global_step, updates, calls, episodes, epsilon, imported_steps, imported_episodes, seconds_before
        asked = f"--resume {args.resume}"
        expected = run_state()
        del expected["envs"]
        if args.checkpoint_replay and "replay" not in checkpoint:
            del expected["replay"]
        check_layout(asked, checkpoint, expected, f"{SHAPE_FLAGS} and --num-envs")
        try:
            torch.Generator().set_state(checkpoint["torch"])
            np.random.PCG64().state = checkpoint["action_space"]
            if int(checkpoint["numpy_key"].max()) >= 2**32 or int(checkpoint["numpy_key"].min()) < 0:
                raise ValueError("NumPy's numbers are out of range")
            if checkpoint["numpy_position"] > len(checkpoint["numpy_key"]):
                raise ValueError(f"NumPy is at number {checkpoint['numpy_position']}")
            if checkpoint["envs"] is not None:
                for env, state, env_obs in zip(envs, checkpoint["envs"], checkpoint["obs"], strict=True):
                    restore_game(env.unwrapped, state, env_obs)
            if "replay" in expected:
                replay.load_state_dict(checkpoint["replay"], int(action_space.n))
        except MALFORMED as error:
            fail(f"{asked}: not a whole checkpoint of {SCRIPT}.py ({type(error).__name__}: {error})")
        for name, network in networks.items():
            network.load_state_dict(checkpoint[name])
        for name, tensor in optimizer.items():
            tensor.copy_(checkpoint["optimizer"][name])
        torch.set_rng_state(checkpoint["torch"])
        np.random.set_state(
            ("MT19937", checkpoint["numpy_key"].numpy().astype(np.uint32), checkpoint["numpy_position"])
        )
        action_space.np_random.bit_generator.state = checkpoint["action_space"]
        if checkpoint["envs"] is None:
            say("the games start anew: these cannot be put back to where they were")
        else:
            obs[:] = checkpoint["obs"].numpy()
            returns[:] = checkpoint["returns"]
            lengths[:] = checkpoint["lengths"]
        if "replay" not in expected:
            say("the replay starts empty: without --checkpoint-replay a checkpoint does not hold it")
        global_step = checkpoint["global_step"]
        updates = checkpoint["updates"]
        calls = checkpoint["calls"]
        episodes = checkpoint["episodes"]
        epsilon = checkpoint["epsilon"]
        imported_steps = checkpoint["imported_steps"]
        imported_episodes = checkpoint["imported_episodes"]
        seconds_before = checkpoint["elapsed"]

    folder = None
    if args.resume is not None:
        path, checkpoint = load_checkpoint("--resume", args.resume, args.run_dir)
        load_run_state(checkpoint)
        if progress() >= 1:
            over = f"its run is over after {global_step:,} steps, {episodes:,} games and {elapsed():.0f} s"
            works = "a larger --total-timesteps, --episodes or --max-seconds works"
            fail(f"--resume {args.resume}: {over}; {works}")
        folder = path.parent
        write_json(folder / "args.json", {"script": SCRIPT, **vars(args)})
        for unfinished in folder.glob("checkpoint.*.tmp"):  # of a run that was killed while it saved
            unfinished.unlink(missing_ok=True)
    if args.import_sb3 is not None:
        counters = import_sb3_zip(args, envs[0].observation_space, networks, optimizer)
        global_step = imported_steps = counters["global_step"]
        episodes = imported_episodes = counters["episodes"]
        updates = counters["updates"]
        calls = counters["calls"]
        epsilon = counters["epsilon"]
    if args.wandb:
        try:
            import wandb
        except ImportError:
            fail("--wandb: its package is missing; pip install wandb")
    if folder is None:
        folder = make_run_folder(args)
    if args.wandb:
        wandb.init(project=SCRIPT, name=folder.name, config=vars(args), sync_tensorboard=True)
    writer = SummaryWriter(folder, purge_step=global_step)
    writer.add_text("args", "  \n".join(f"{name}: {value}" for name, value in vars(args).items()))
    precision = str(dtype).removeprefix("torch.")
    device_name = f"cpu, {torch.get_num_threads()} threads"
    if device.type == "cuda":
        device_name = torch.cuda.get_device_name(device)
    say(f"{folder} on {device_name}")
    if device.type == "cuda" and not (args.bf16 and args.cudagraph):
        say("on CUDA --bf16 and --cudagraph should make it faster; no GPU has measured it yet")

    # --- what the loop does, in its order -------------------------------------------------------------------------
    def autocast() -> torch.autocast | nullcontext:
        # Fresh for each forward: one that lives longer goes on using the weights as they were cast at its start.
        return torch.autocast(device.type, dtype, cache_enabled=False) if dtype != torch.float32 else nullcontext()

    @torch.inference_mode()
    def policy(obs: torch.Tensor) -> torch.Tensor:
        with autocast():
            return actor(obs).argmax(1)

    def greedy_action(obs: np.ndarray) -> np.ndarray:
        if not numpy_layers:
            return policy(torch.from_numpy(obs).to(device)).cpu().numpy()
        x = np.asarray(obs.reshape(len(obs), -1), np.float32)
        if q_network.scale != 1:
            x = x / np.float32(q_network.scale)
        for weight, bias in numpy_layers[:-1]:
            x = np.maximum(x @ weight + bias, 0)
        weight, bias = numpy_layers[-1]
        return (x @ weight + bias).argmax(1)

    def act_step_and_store() -> None:
        """NumPy's and the action space's draws come in SB3's order; all games explore at once, or none."""
        nonlocal episodes
        if global_step < args.learning_starts or np.random.rand() < epsilon:
            action[:] = [action_space.sample() for _ in envs]
        else:
            action[:] = greedy_action(obs)
        timer.lap("act")
        ended = {}
        for number, env in enumerate(envs):
            next_obs[number], reward[number], terminated, truncated, info = env.step(action[number])
            discount[number] = 0 if terminated else args.gamma  # a truncated game still has a future
            if terminated or truncated:
                ended[number] = info
        timer.lap("env")
        replay.add(obs, next_obs, action, reward, discount)
        obs[:] = next_obs
        returns[:] = returns + reward
        lengths[:] = lengths + 1
        for number, info in ended.items():
            last_episodes.append((returns[number], lengths[number], info.get("score", returns[number])))
            obs[number], _ = envs[number].reset()
            returns[number] = 0
            lengths[number] = 0
        episodes += len(ended)
        timer.lap("store")

    def td_loss(obs, next_obs, action, reward, discount) -> torch.Tensor:
        with torch.no_grad():
            with autocast():
                next_q_target = target_network(next_obs)
            target = td_target(reward, discount, next_q_target)
        with autocast():
            q = q_network(obs)
        return F.smooth_l1_loss(q.gather(1, action[:, None]).squeeze(1), target)

    def update() -> None:
        loss = td_loss(*replay.transitions_at(index))
        grads = torch.autograd.grad(loss * loss_scale, parameters)
        with torch.no_grad():
            grad = torch.cat([grad.flatten() for grad in grads]) / loss_scale
            norm = grad.norm()  # SB3 takes the norm of norms: another last bit, and compiled a fifth slower
            finite = norm.isfinite()
            grad *= (args.max_grad_norm / (norm + 1e-6)).clamp(max=1)
            adam(weights, grad, exp_avg, exp_avg_sq, adam_step, learning_rate, finite)
            if dtype == torch.float16:  # doubles in 2,000 updates, halves when a gradient was too large for it
                loss_scale.mul_(torch.where(finite, 2 ** (1 / 2000), 0.5))
            else:  # elsewhere such a gradient is the end of learning: the log will say so
                loss = torch.where(finite, loss, math.nan)
            loss_sum.add_(loss)

    def log() -> None:
        seconds = timer.read()
        wall_seconds = sum(seconds.values())
        new_steps = global_step - logged_step
        new_updates = updates - logged_updates
        loss = loss_sum.item()
        loss_sum.zero_()
        scalars = {
            "charts/SPS": new_steps / wall_seconds,
            "charts/updates_per_second": new_updates / wall_seconds,
            "charts/samples_per_second": new_updates * args.batch_size / wall_seconds,
            "charts/replay_ratio": new_updates * args.batch_size / new_steps,
            "perf/rollout_fraction": 1 - seconds["learn"] / wall_seconds,
            "rollout/exploration_rate": epsilon,
            "train/learning_rate": learning_rate.item(),
            "time/fps": (global_step - first_step) / sum(timer.total.values()),
        }
        for phase in seconds:
            scalars[f"perf/{phase}_ms"] = 1000 * seconds[phase] * args.num_envs / new_steps
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
        if device.type == "cuda":
            scalars["perf/gpu_mem_gib"] = torch.cuda.memory_allocated(device) / 2**30
            with suppress(Exception):  # NVML is missing, or has an error of its own
                scalars["perf/gpu_util"] = torch.cuda.utilization(device)
        write_scalars(writer, scalars, global_step)
        line = f"{min(progress(), 1):4.0%}  step {global_step:>11,}"
        line += f"  SPS {new_steps / wall_seconds:>9,.0f}  updates/s {new_updates / wall_seconds:>5.0f}"
        line += f"  epsilon {epsilon:.3f}  return {episodic_return:7.1f}  score {score:5.1f}"
        say(line, end="\r" if sys.stdout.isatty() else "\n")
        if not math.isfinite(loss):
            fail(f"--learning-rate {args.learning_rate:g}: the loss is {loss} since the last log; a lower one works")

    def evaluate_and_log(games: int) -> dict[str, float]:
        scores = evaluate(actor, args, games, device)
        write_scalars(writer, {name.replace("_", "/", 1): score for name, score in scores.items()}, global_step)
        return scores

    def save() -> None:
        if not weights.isfinite().all():
            print(f"{folder}: the weights are not finite and were not saved", file=sys.stderr)
            return
        header = {"script": SCRIPT, "version": CHECKPOINT_VERSION, "args": vars(args)}
        save_checkpoint(folder / "checkpoint.pt", header | run_state())

    def export() -> None:
        counters = {
            "num_timesteps": global_step,
            "_n_updates": updates,
            "_n_calls": calls,
            "_episode_num": episodes,
            "exploration_rate": epsilon,
            "_current_progress_remaining": 1 - min(progress(), 1),
        }
        try:
            write_sb3(args.export_sb3, args, envs[0], networks, optimizer, counters)
            say(f"{args.export_sb3}: stable_baselines3.DQN.load reads it")
        except Exception as error:  # a full disk, or a game whose spaces cannot be pickled
            print(f"--export-sb3 {args.export_sb3}: could not be written ({error})", file=sys.stderr)

    # --- switches: NumPy's policy, --compile and --cudagraph ------------------------------------------------------
    eager_update = update
    numpy_layers = []
    if device.type == "cpu" and dtype == torch.float32 and args.policy == "MlpPolicy":
        # NumPy on the same weights, since calling PyTorch costs more than these matmuls: 8 us an action, not 31.
        numpy_layers = [(layer.weight.detach().numpy().T, layer.bias.detach().numpy()) for layer in actor.q_net[::2]]
    if args.compile:
        torch._dynamo.reset()  # of a run before this one in the same process
        if not numpy_layers:
            policy = try_compile(policy, args.compile_mode, torch.from_numpy(obs).to(device))
        state = [weights, target_weights, *optimizer.values(), loss_sum]
        before = [tensor.clone() for tensor in state]
        if device.type == "cuda":  # else reduce-overhead makes no graph, and does not say so
            for tensor in (*state, index, *replay.transitions):
                torch._dynamo.mark_static_address(tensor)
        # The C++ wrapper gains 30 us an update, and 30 more that nobody looks whether anything but values has changed.
        options = {"cpp_wrapper": device.type == "cpu", "guard_filter_fn": lambda guards: [False] * len(guards)}
        one_graph = torch._dynamo.config.patch(trace_autograd_ops=True)  # from the replay to the new weights
        with one_graph, torch.random.fork_rng():
            update = try_compile(update, args.compile_mode, **options)
        for tensor, value in zip(state, before):  # that was a trial
            tensor.copy_(value)
    is_compiled = update is not eager_update
    if use_graphs:
        update = CUDAGraphStep(update, torch.Generator(device), timer)
    elif args.cudagraph:
        say("--cudagraph: needs CUDA; the loop runs without graphs")
    active = [precision, "compiled" if is_compiled else "eager", f"batch size {args.batch_size}"]
    if sdpa is not None:
        active.append(sdpa)
    origins = [f"{flag} from {source}" for flag, source in (sources or {}).items()]
    say(f"active: {', '.join(active)}; settings: {', '.join(origins) or 'the defaults'}")

    # --- the loop: SB3's learn, collect_rollouts and train --------------------------------------------------------
    updates_per_round = args.gradient_steps
    if args.gradient_steps == -1:
        updates_per_round = args.train_freq * args.num_envs
    target_every = max(args.target_update_interval // args.num_envs, 1)
    first_step = logged_step = global_step
    first_update = logged_updates = updates
    scores = {}
    last_log = last_eval = last_checkpoint = elapsed()
    write_scalars(writer, {"perf/warmup_s": time.perf_counter() - start_time}, global_step)
    timer.lap()
    while progress() < 1 and not interrupts:
        # 1 act and step, 2 store
        for _ in range(args.train_freq):
            act_step_and_store()
            global_step += args.num_envs
            calls += 1
            if calls % target_every == 0:  # one call at a time: no threshold is jumped over
                target_weights.mul_(1 - args.tau).add_(weights, alpha=args.tau)  # rounds as SB3 does, unlike lerp_
            epsilon = linear_schedule(
                args.exploration_initial_eps, args.exploration_final_eps, args.exploration_fraction, progress()
            )
        timer.lap("rollout")

        # 3 learn
        if global_step > args.learning_starts:
            if args.lr_schedule == "cosine":
                learning_rate.fill_(cosine(1 - progress()))
            for _ in range(updates_per_round):
                replay.sample_index(index)
                update()
            updates += updates_per_round
        timer.lap("learn")

        # 4 log, evaluate, save
        if elapsed() >= last_log + args.log_every:
            last_log = elapsed()
            log()
            logged_step = global_step
            logged_updates = updates
            timer.lap("log")
        if args.eval_every and elapsed() >= last_eval + args.eval_every:
            with interrupts.at_once():
                scores = evaluate_and_log(max(args.eval_episodes // 10, 1))
            last_eval = elapsed()  # what it took is no part of the next interval
            timer.lap()
        if args.checkpoint_every and elapsed() >= last_checkpoint + args.checkpoint_every:
            last_checkpoint = elapsed()
            save()
            timer.lap()

    # --- the end: what must not be lost comes first -----------------------------------------------------------------
    if global_step > logged_step:
        log()
    wall_seconds = elapsed()
    save()
    busy_seconds = sum(timer.total.values()) or math.inf
    new_steps = global_step - first_step
    new_updates = updates - first_update
    summary = {
        "script": SCRIPT,
        "device": device_name,
        "peak_memory_gib": peak_memory_gib(device),
        "precision": precision,
        "compiled": is_compiled,
        "cudagraph": use_graphs and update.graph is not None,
        "sdpa": sdpa,
        "env_steps": global_step,
        "updates": updates,
        "episodes": episodes,
        "wall_seconds": wall_seconds,
        "env_steps_per_second": new_steps / busy_seconds,
        "updates_per_second": new_updates / busy_seconds,
        "samples_per_second": new_updates * args.batch_size / busy_seconds,
        "replay_ratio": new_updates * args.batch_size / max(new_steps, 1),
        "rollout_fraction": 1 - timer.total["learn"] / busy_seconds,
        "train_fraction": timer.total["learn"] / busy_seconds,
        **scores,
    }
    write_json(folder / "summary.json", summary)
    say("")
    if args.episodes:
        say(f"{episodes - imported_episodes} games took {global_step - imported_steps:,} steps")
    if args.export_sb3 is not None and weights.isfinite().all():
        export()
    if not interrupts:
        with interrupts.at_once():
            summary |= evaluate_and_log(args.eval_episodes)
            write_json(folder / "summary.json", summary)
            say("  ".join(f"{name} {value:g}" for name, value in summary.items() if name.startswith("eval")))
            if args.video:
                save_gif(actor, args, device, folder)
            say(f"watch it play: python {SCRIPT}.py --evaluate {folder} --render")
    if interrupts:
        say(f"stopped; {folder / 'checkpoint.pt'} goes on with python {SCRIPT}.py --resume {folder}")
    with suppress(OSError):  # on a full disk
        writer.close()
    return summary


def parse_args() -> tuple[Args, dict[str, str]]:
    """The command line on top of a checkpoint's flags, or of the environment, .env, a zip's flags and the defaults.

    Also says, by flag, where settings come from that are not the defaults.
    """
    values, sources = settings()
    args = tyro.cli(Args, default=Args(**values), description=__doc__)
    option = "resume" if args.resume is not None else "evaluate"
    name = getattr(args, option)
    if name is not None:
        path, checkpoint = load_checkpoint(f"--{option}", name, args.run_dir)
        saved_args = checkpoint["args"]
        env_id = str(saved_args["env_id"])
        if ":" in env_id and args.env_id == Args.env_id:
            works = f"with --env-id {env_id} on the command line it does"
            fail(f"--{option} {name}: does not choose by itself which module to import; {works}")
        limits = ["total_timesteps", "episodes", "max_seconds"]
        if any(getattr(args, limit) is not None for limit in limits):  # a new limit replaces the old ones
            saved_args |= dict.fromkeys(limits)
        sources = {setting: name for setting in SETTINGS.values() if saved_args[setting] != getattr(Args, setting)}
        flags = saved_flags(f"--{option} {name}", saved_args)
        args = tyro.cli(Args, args=flags + sys.argv[1:], description=__doc__)
        setattr(args, option, str(path))  # looked up once: the latest may soon be another one
    elif args.import_sb3 is not None:
        values = read_sb3(args.import_sb3)[0] | values
        if "batch_size" not in sources:
            sources["batch_size"] = args.import_sb3
        args = tyro.cli(Args, default=Args(**values), description=__doc__)
    given = {word.split("=")[0].lstrip("-").replace("-", "_").removeprefix("no_") for word in sys.argv[1:]}
    return args, sources | {flag: "the command line" for flag in SETTINGS.values() if flag in given}


if __name__ == "__main__":
    try:
        sys.stdout.reconfigure(line_buffering=True)  # else the end of --help is written at exit
        main(*parse_args())
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except BrokenPipeError:  # nobody reads --help any more (`| head`)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(141) from None
    except (OSError, MemoryError, RuntimeError) as error:
        if is_out_of_memory(error):
            fail("out of memory: a smaller --batch-size, --buffer-size, --num-envs or --eval-episodes works")
        if not isinstance(error, OSError):
            raise
        fail(str(error))

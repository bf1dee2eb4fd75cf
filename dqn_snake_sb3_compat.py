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
`train` in one piece. tests/test_dqn_snake_sb3_compat.py holds both side by side, number for number.
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
import types
import warnings
import zipfile
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from itertools import chain, count, islice, pairwise
from pathlib import Path
from typing import Any, Literal, NoReturn, Union, get_args, get_origin, get_type_hints

import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
import tyro
from dotenv import dotenv_values
from PIL import Image
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.tensorboard import SummaryWriter

from envs.snake import MOVES, VARIANTS, SnakeEnv

SCRIPT = Path(__file__).stem
MOST_GAMES = 10_000  # of an evaluation, and side by side
EVAL_SEED = 2**31 - MOST_GAMES  # the games of an evaluation have the seeds from here on, those of training lie below
GIF_FRAMES = 1_000
GIF_SIDE = 640  # pixels; larger frames are shrunk


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
    """Adam's step size"""
    lr_schedule: Literal["constant", "cosine"] = "constant"
    """cosine falls to --learning-rate-end over the run"""
    learning_rate_end: float = 1e-5
    """step size at the end of the cosine schedule"""
    buffer_size: int = 1_000_000
    """transitions the replay holds, split over the games"""
    learning_starts: int = 100
    """steps of random play before learning begins"""
    batch_size: int = 32
    """transitions per update (OPTIMAL_BATCH_SIZE)"""
    tau: float = 1.0
    """how far the target network moves at an update; 1 copies"""
    gamma: float = 0.99
    """discount"""
    train_freq: int = 4
    """steps of every game between learning"""
    gradient_steps: int = 1
    """updates then (-1: as many as there were transitions)"""
    target_update_interval: int = 10_000
    """transitions between two updates of the target network"""
    exploration_fraction: float = 0.1
    """part of the run over which exploration falls, linearly"""
    exploration_initial_eps: float = 1.0
    """share of random actions at the start"""
    exploration_final_eps: float = 0.05
    """share of random actions at the end"""
    max_grad_norm: float = 10.0
    """gradients are clipped to this norm"""

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
    """checkpoints hold the replay too"""
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
COMMAND_LINE_ONLY = {"run_dir", "run_name", "resume", "evaluate", "render", "video", "wandb"}
COMMAND_LINE_ONLY |= {"import_sb3", "export_sb3"}  # never from a checkpoint; nor an env id that names a module, a:b
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
        refuse(f".env: cannot be read ({error}); lines like USE_BF16=1 work")
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
            refuse(f"{name}={text[:40]} (in {place}): must be {accepted}")
        values[flag] = value
        sources[flag] = f"{name} in {place}"
    return values, sources


def resolve(args: Args, device: torch.device) -> Args:
    """`args` with nothing a run needs left None. Values that cannot work are refused here, before anything starts."""
    if args.threads is None:
        small = args.policy == "MlpPolicy" and args.batch_size < 1024
        args = replace(args, threads=1 if small else pick_threads(CORES))
    if args.total_timesteps is None and args.episodes is None and args.max_seconds is None:
        args = replace(args, max_seconds=120.0)
    if args.flash_attention and args.sdpa == "auto":
        args = replace(args, sdpa="flash")

    shares = {"gamma", "tau", "exploration_fraction", "exploration_initial_eps", "exploration_final_eps", "dropout"}
    may_be_0 = {"seed", "learning_starts", "learning_rate_end", "eval_every", "checkpoint_every", *shares} - {"tau"}
    limits = dict.fromkeys(shares, 1) | {"num_envs": MOST_GAMES, "eval_episodes": MOST_GAMES, "threads": 256}
    limits["seed"] = EVAL_SEED - min(args.num_envs, MOST_GAMES)  # each game has its own
    for name, value in vars(args).items():
        if type(value) in (int, float) and not (name == "gradient_steps" and value == -1):
            highest = limits.get(name, sys.maxsize)
            if not 0 <= value <= highest or (value == 0 and name not in may_be_0):
                lowest = "0 or more" if name in may_be_0 else "above 0"
                refuse(f"--{name.replace('_', '-')} {value}: must be {lowest} and at most {highest:,}")
    if args.bf16 and args.fp16:
        refuse("--bf16 --fp16: choose one of them")
    if args.cudagraph and args.compile and args.compile_mode != "default":
        refuse(f"--compile-mode {args.compile_mode}: captures graphs by itself; with --cudagraph only default works")
    if args.render and args.evaluate is None:
        refuse("--render: shows a trained agent, so it needs --evaluate PATH")
    sources = [name for name in ("resume", "evaluate", "import_sb3") if getattr(args, name) is not None]
    if len(sources) > 1:
        flags = " ".join(f"--{name.replace('_', '-')}" for name in sources)
        refuse(f"{flags}: each says where the weights come from; choose one of them")
    if args.num_envs > args.buffer_size:
        refuse(f"--num-envs {args.num_envs}: one step of every game has to fit in --buffer-size {args.buffer_size}")
    if args.export_sb3 is not None:
        if args.evaluate is not None:
            refuse("--export-sb3 --evaluate: a zip is written at the end of a training; --resume works")
        check_writable("--export-sb3", args.export_sb3)
    return args


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
        refuse(f"{flag} {name!r}: cannot be written ({error}); the path of a zip in a folder that exists works")


def board_of(args: Args) -> tuple[int, ...]:
    sides = args.board.split("x")
    if len(sides) != 2 or not all(side.isdecimal() and len(side) < 4 for side in sides):
        refuse(f"--env-id {args.env_id} --board {args.board}: must be rows x columns; 20x20 works")
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
        refuse(f"--env-id {args.env_id}{board}: {reason}; {', '.join(VARIANTS)} and Gymnasium's ids work")
    observations, actions = envs[0].observation_space, envs[0].action_space
    is_box = isinstance(observations, gym.spaces.Box) and len(observations.shape) > 0
    if not is_box or not isinstance(actions, gym.spaces.Discrete) or actions.start:
        refuse(f"--env-id {args.env_id}: needs Box observations and Discrete actions, not {observations} and {actions}")
    image, shape = is_image(observations), observations.shape
    if args.policy == "CnnPolicy" and not (image and sorted(shape)[1] >= 36):
        refuse(f"--policy CnnPolicy: needs images of 36x36 or more, {args.env_id} has {observations}; MlpPolicy works")
    if args.policy == "transformer" and (len(shape) != 3 or image):
        refuse(f"--policy transformer: needs a board of cells, {args.env_id} has {observations}; MlpPolicy works")
    if image and np.argmin(observations.shape) != 0:
        rows, columns, channels = shape
        turned = gym.spaces.Box(0, 255, (channels, rows, columns), np.uint8)
        envs = [gym.wrappers.TransformObservation(env, lambda obs: obs.transpose(2, 0, 1), turned) for env in envs]
    return envs


def is_image(space: gym.spaces.Box) -> bool:
    """What SB3 takes for an image: it divides it by 255 and puts its channels, the shortest side, first."""
    return space.dtype == np.uint8 and len(space.shape) == 3 and (space.low == 0).all() and (space.high == 255).all()


# ---------------------------------------------------------------------------------------------------- networks


FLASH, EFFICIENT, CUDNN = SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION
SDPA = {  # kernels to try, in this order
    "auto": [FLASH, EFFICIENT, CUDNN],
    "flash": [FLASH],
    "efficient": [EFFICIENT],
    "cudnn": [CUDNN],
    "math": [],
}


class Transformer(nn.Module):
    """A token for every cell of a board (rows, columns, channels), two post-norm layers, and their mean (B, 128).

    Built by SB3 too, when it loads an exported zip: hence the signature, `features_dim` and `__module__`.
    """

    __module__ = SCRIPT

    def __init__(self, observation_space: gym.spaces.Box, dropout: float = 0.1, sdpa: str = "auto") -> None:
        super().__init__()
        self.features_dim, width, (rows, columns, channels) = 128, 64, observation_space.shape
        self.backends = [*SDPA[sdpa], SDPBackend.MATH]  # the last always runs
        self.embed = nn.Linear(channels, width)
        angles = torch.arange(max(rows, columns))[:, None] * 1e4 ** -torch.arange(0, 1, 4 / width)
        waves = torch.cat([angles.sin(), angles.cos()], 1)  # half of the width for the row, half for the column
        row, column = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
        self.register_buffer("place", torch.cat([waves[row], waves[column]], 2).flatten(0, 1), persistent=False)
        layers = (nn.TransformerEncoderLayer(width, 4, 128, dropout, batch_first=True) for _ in range(2))
        self.layers, self.norm = nn.Sequential(*layers), nn.LayerNorm(width)
        self.out = nn.Sequential(nn.Linear(width, self.features_dim), nn.ReLU())

    def kernel(self, dtype: torch.dtype, device: torch.device) -> str:
        """Name of the kernel that PyTorch picks here."""
        q = torch.empty(1, 4, 16, 16, dtype=dtype, device=device)
        with sdpa_kernel(self.backends, set_priority=True):
            return SDPBackend(torch._fused_sdp_choice(q, q, q, dropout_p=self.layers[0].dropout.p)).name.lower()

    def forward(self, obs: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(self.backends, set_priority=True):
            x = self.layers(self.embed(obs.flatten(1, 2)) + self.place)
        return self.out(self.norm(x.mean(1)))


class NatureCNN(nn.Module):
    """Mnih et al. 2015."""

    def __init__(self, shape: tuple[int, int, int]) -> None:
        super().__init__()
        self.features_dim = 512
        convolutions = nn.Conv2d(shape[0], 32, 8, 4), nn.Conv2d(32, 64, 4, 2), nn.Conv2d(64, 64, 3, 1)
        self.cnn = nn.Sequential(*(layer for conv in convolutions for layer in (conv, nn.ReLU())), nn.Flatten())
        self.linear = nn.Sequential(nn.Linear(self.cnn(torch.zeros(1, *shape)).shape[1], self.features_dim), nn.ReLU())

    def forward(self, obs: torch.Tensor) -> torch.Tensor:
        return self.linear(self.cnn(obs))


def flat(module: nn.Module) -> torch.Tensor:
    """One vector that all weights of `module` become views of: to clip, to step and to copy costs one call each."""
    parts, sizes = list(module.parameters()), [weight.numel() for weight in module.parameters()]
    whole = nn.utils.parameters_to_vector(parts).detach()
    for weight, value in zip(parts, whole.split(sizes)):
        weight.data = value.view_as(weight)
    return whole


SHAPES = "--env-id, --board, --policy"  # what the shapes of its weights follow from


class QNetwork(nn.Module):
    """Values (B, actions), fp32, of observations. Layers, their names and the order of their draws are SB3's."""

    def __init__(self, args: Args, env: gym.Env) -> None:
        super().__init__()
        space, hidden = env.observation_space, []
        self.scale = 255 if is_image(space) else 1
        if args.policy == "transformer":
            self.features_extractor, hidden = Transformer(space, args.dropout, args.sdpa), [128]
        elif args.policy == "CnnPolicy":
            self.features_extractor = NatureCNN(space.shape)
        else:
            self.features_extractor, hidden = nn.Flatten(), [64, 64]
        sizes = [getattr(self.features_extractor, "features_dim", math.prod(space.shape)), *hidden]
        layers = [layer for pair in pairwise(sizes) for layer in (nn.Linear(*pair), nn.ReLU())]
        self.q_net = nn.Sequential(*layers, nn.Linear(sizes[-1], int(env.action_space.n)))

    def forward(self, obs: torch.Tensor) -> torch.Tensor:
        obs = obs.float() if self.scale == 1 else obs.float() / self.scale
        return self.q_net(self.features_extractor(obs)).float()


# ------------------------------------------------------------------------------------------------ the algorithm


def epsilon_at(progress: float, initial: float, final: float, fraction: float) -> float:
    """Share of random actions when `progress` (0 to 1) of the run is over: SB3's LinearSchedule."""
    return final if progress > fraction else initial + progress * (final - initial) / max(fraction, 1e-9)


class Cosine:
    """Step size from `start` to `end` as SB3 calls a schedule: with the part of the run that remains, 1 to 0."""

    __module__ = SCRIPT

    def __init__(self, start: float, end: float) -> None:
        self.start, self.end = start, end

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
    mean, square = torch.lerp(exp_avg, grad, 0.1), (exp_avg_sq * 0.999).addcmul_(grad, grad, value=1 - 0.999)
    size, root = (learning_rate / (1 - 0.9**step)).float(), (1 - 0.999**step).sqrt().float()
    moved = weights - mean * size / (square.sqrt() / root + 1e-8)
    for old, new in ((weights, moved), (exp_avg, mean), (exp_avg_sq, square)):
        old.copy_(torch.where(finite, new, old))


class Replay:
    """The last `buffer_size` transitions, as many of every game: obs, next_obs, action, reward and discount.

    On a CPU the rings are NumPy arrays that the tensors share: writing a row is then no tensor operation.
    """

    NAMES = "obs", "next_obs", "action", "reward", "discount"

    def __init__(self, args: Args, space: gym.spaces.Box, device: torch.device) -> None:
        self.rows = args.buffer_size // args.num_envs
        self.num_envs = args.num_envs
        self.row = 0
        self.held = 0
        shape = (self.rows, args.num_envs)
        obs = [(shape + space.shape, space.dtype)] * 2
        kinds = [*obs, (shape, np.dtype(np.int64)), (shape, np.dtype(np.float32)), (shape, np.dtype(np.float32))]
        each = 2 * math.prod(space.shape) * space.dtype.itemsize + 16
        refuse_if_too_large("--buffer-size", args.buffer_size, each, device)
        rings = [torch.from_numpy(np.zeros(*kind)).to(device) for kind in kinds]  # on a CPU memory is taken as it fills
        self.flat = [ring.flatten(0, 1) for ring in rings]
        self.rings = [ring.numpy() for ring in rings] if device.type == "cpu" else rings

    def state_dict(self) -> dict[str, Any]:
        return dict(zip(self.NAMES, self.flat)) | {"row": self.row, "held": self.held}

    def load_state_dict(self, saved: dict[str, Any], num_actions: int) -> None:
        """Raises ValueError, before anything is changed, for values that no replay has."""
        row, held = saved["row"], saved["held"]
        if not (row < self.rows and (row == held or held == self.rows)):
            raise ValueError(f"row {row} and {held} held of {self.rows} rows")
        if not 0 <= int(saved["action"].min()) <= int(saved["action"].max()) < num_actions:
            raise ValueError(f"actions must be 0 to {num_actions - 1}")
        for name, ring in zip(self.NAMES, self.flat):
            ring.copy_(saved[name])
        self.row = row
        self.held = held

    def store(self, *transition: np.ndarray) -> None:
        """One step of every game: obs, next_obs (final ones included), action, reward, discount."""
        for ring, values in zip(self.rings, transition):
            ring[self.row] = values if isinstance(ring, np.ndarray) else torch.from_numpy(values)
        self.row = (self.row + 1) % self.rows
        self.held = min(self.held + 1, self.rows)

    def draw(self, index: torch.Tensor) -> None:
        """Numbers of transitions into `index`, with NumPy's draws in SB3's order."""
        rows = np.random.randint(0, self.held, size=len(index))
        rows *= self.num_envs
        rows += np.random.randint(0, self.num_envs, size=len(index))
        index.copy_(torch.from_numpy(rows))

    def gather(self, index: torch.Tensor) -> list[torch.Tensor]:
        return [ring.index_select(0, index) for ring in self.flat]


@torch.no_grad()
def evaluate(q_network: QNetwork, args: Args, episodes: int, device: torch.device) -> dict[str, float]:
    """Play `episodes` greedy games to their ends, with seeds that training does not use.

    Score is what the game calls `score`, and the undiscounted return where it has none.
    """
    envs = make_envs(args, episodes)
    obs = np.stack([env.reset(seed=EVAL_SEED + lane)[0] for lane, env in enumerate(envs)])
    playing, scores = list(range(episodes)), [0.0] * episodes
    while playing:
        actions = q_network(torch.from_numpy(obs[playing]).to(device)).argmax(1).tolist()
        for lane, action in zip(list(playing), actions):
            obs[lane], reward, terminated, truncated, info = envs[lane].step(action)
            scores[lane] += reward
            if terminated or truncated:
                scores[lane] = info.get("score", scores[lane])
                playing.remove(lane)
    mean, median, highest = np.mean(scores), np.median(scores), np.max(scores)
    return {
        "eval_score_mean": float(mean),
        "eval_score_median": float(median),
        "eval_score_max": float(highest),
        "eval_episodes": episodes,
    }


@torch.no_grad()
def play(q_network: QNetwork, args: Args, device: torch.device, render_mode: str) -> Iterator[np.ndarray | str | None]:
    """Frames of one greedy game."""
    env = make_envs(args, 1, render_mode)[0]
    obs, done = env.reset(seed=EVAL_SEED)[0], False
    yield env.render()
    while not done:
        obs, _, terminated, truncated, _ = env.step(
            q_network(torch.as_tensor(obs, device=device)[None]).argmax().item()
        )
        done = terminated or truncated
        yield env.render()


def write_gif(q_network: QNetwork, args: Args, device: torch.device, folder: Path) -> None:
    def images() -> Iterator[Image.Image]:
        for frame in play(q_network, args, device, "rgb_array"):
            image = Image.fromarray(frame)
            image.thumbnail((GIF_SIDE, GIF_SIDE))  # only ever shrinks
            yield image

    frames = images()
    more = islice(frames, GIF_FRAMES - 1)  # a snake that goes in circles would have thousands
    try:
        folder.mkdir(exist_ok=True)
        next(frames).save(folder / "game.gif", save_all=True, append_images=more, duration=80, loop=0)
        say(str(folder / "game.gif"))
    except OSError as error:
        say(f"--video: {folder} cannot be written ({error})")
    except Exception as error:  # a package is missing, or the game has no pictures, or what its code raises
        say(f"--video: {args.env_id} cannot be drawn ({type(error).__name__}: {' '.join(str(error).split())[:200]})")


def show(q_network: QNetwork, args: Args, device: torch.device) -> dict[str, float]:
    """--evaluate: one game in the terminal (--render), or the scores of many and a GIF (--video)."""
    path, saved = load_checkpoint("--evaluate", args.evaluate, args.run_dir)
    expected = {"q_net": q_network.state_dict()}
    refuse_if_different(f"--evaluate {args.evaluate}", saved, expected, SHAPES)
    q_network.load_state_dict(saved["q_net"])
    q_network.eval()
    if args.render:
        mode = "ansi" if "ansi" in make_envs(args, 1)[0].metadata.get("render_modes", []) else "human"
        frames = play(q_network, args, device, mode)
        try:
            first = next(frames)
        except Exception as error:  # a package is missing, or there is no screen
            refuse(f"--render: {args.env_id} cannot be shown ({' '.join(str(error).split())[:200]})")
        for frame in chain([first], frames):
            if frame is not None:  # a game with a window draws into it
                say(f"\033[H\033[J{frame}")
                time.sleep(1 / 12)
        return {}
    scores = evaluate(q_network, args, args.eval_episodes, device)
    say("  ".join(f"{name} {value:g}" for name, value in scores.items()))
    if args.video:
        write_gif(q_network, args, device, path.parent / "videos")
    return scores


def put_back(env: SnakeEnv, state: dict[str, Any], obs: torch.Tensor) -> None:
    """Go on with a saved game. Raises one of MALFORMED for what is no game of this board, seen as `obs`."""
    plain = {name: value for name, value in env.state_dict().items() if name not in ("body", "free", "slot", "food")}
    fits = structure({name: state[name] for name in plain}) == structure(plain)
    if not fits or len(state) != len(plain) + 4 or not state["heading"] < len(MOVES):
        raise ValueError("other parts than a game has")
    cells = [*state["body"], *state["free"]]
    if state["food"] is not None:
        cells.append(state["food"])
    if any(type(cell) is not int for cell in cells) or sorted(cells) != list(range(env.rules.cells)):
        raise ValueError("snake, food and free cells do not make a board")
    slot = {cell: number for number, cell in enumerate(state["free"])}
    env.load_state_dict(state | {"slot": slot})
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
        refuse("--import-sb3 '': names nothing; a zip written by stable_baselines3's DQN works")
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
        refuse(f"--import-sb3 {path}: there is no such file; a zip written by stable_baselines3's DQN works")
    except UnsupportedZip as error:
        refuse(f"--import-sb3 {path}: cannot be gone on with: {error}")
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:120]
        refuse(f"--import-sb3 {path}: not a whole zip of stable_baselines3's DQN ({reason})")


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
        demand("train_freq", words[-1], "step")

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
    if structure(counters) != {**dict.fromkeys(counters, int), "epsilon": float}:
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
    refuse_if_different(asked, {"policy": saved["policy"], "state": moments}, expected, SHAPES)
    for name, ours in (("_shape", list(space.shape)), ("dtype", str(space.dtype))):
        theirs = saved["observation_space"].get(name, ours)
        if theirs != ours:
            refuse(f"{asked}: does not fit (it sees {theirs}, --env-id {args.env_id} shows {ours})")
    for name, network in networks.items():
        network.load_state_dict({key: saved["policy"][f"{name}.{key}"] for key in network.state_dict()})
    if moments:
        steps = {moment["step"].item() for moment in moments.values()}
        if len(steps) > 1 or min(steps) < 1:
            refuse(f"{asked}: does not fit (Adam has made {sorted(steps)} steps, as a number it has to be one)")
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


def refuse(message: str) -> NoReturn:
    """End with one line about what the user asked for, and exit code 2."""
    print(f"{SCRIPT}.py: {message}", file=sys.stderr)
    raise SystemExit(2)


def say(line: str, end: str = "\n") -> None:
    """Print. When nobody reads any more (`| head`), the run is stopped as by SIGTERM: it saves, and is silent."""
    try:
        print(line, end=end, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        signal.raise_signal(signal.SIGTERM)


def refuse_if_too_large(flag: str, value: int, each: int, device: torch.device, fixed: int = 0, unit: int = 1) -> None:
    """Refuse storage of `value` * `each` + `fixed` bytes that does not fit; says which multiple of `unit` does."""
    if device.type == "cuda":
        room = torch.cuda.mem_get_info(device)[0]
    else:
        room = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else math.inf
    needed, most = value * each + fixed, (0.9 * room - fixed) // each // unit * unit
    if value > most:
        works = f"at most {most:.0f} works" if most > 0 else "smaller sizes of everything else might"
        refuse(f"{flag} {value}: would take {needed / 2**30:.1f} GiB and there are {room / 2**30:.1f}; {works}")


def pick_device(name: str) -> torch.device:
    if name == "cuda" and not torch.cuda.is_available():
        refuse("--device cuda: this PyTorch sees no CUDA device; cpu and auto work")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


def matmul_rate(threads: int) -> float:
    """Matrix products per second on so many threads, over 0.2 s: some turns of the scheduler."""
    torch.set_num_threads(threads)
    x, products, started = torch.ones(256, 256), 0, time.perf_counter()
    while time.perf_counter() < started + 0.2:
        torch.relu_(x @ x)
        products += 1
    return products / (time.perf_counter() - started)


def pick_threads(cores: int) -> int:
    """A thread for each core, 8 at most, or fewer where fewer are faster: when other programs are busy here.

    Threads wait for the slowest of them, spinning. Beside one busy process on two cores, two make 3,300 steps/s and
    one 5,700 (benchmarks.md); sleeping instead (OMP_WAIT_POLICY=passive) costs a third on a quiet machine.
    """
    most = min(cores, 8)
    rates = {threads: matmul_rate(threads) for threads in sorted({most, max(most - 1, 1), max(most // 2, 1), 1})}
    best = max(rates, key=rates.get)
    if rates[best] < 1.1 * rates[most]:
        return most
    say(f"other programs are busy here: {best} of {most} threads are faster (--threads decides)")
    return best


def bf16_speedup() -> float:
    """How many times as fast as in fp32 this CPU multiplies matrices in bfloat16."""
    matrices = (torch.ones(256, 256, dtype=dtype) for dtype in (torch.bfloat16, torch.float32))
    half, full = (min(timeit.repeat(lambda: x @ x, number=1, repeat=5)) for x in matrices)
    return full / half


def pick_precision(bf16: bool, fp16: bool, tf32: bool, device: torch.device) -> torch.dtype:
    """dtype of the forward passes. A switch that cannot be active here is answered with one line, and fp32 it is."""
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high" if tf32 else "highest")
        torch.backends.cudnn.allow_tf32 = (
            tf32  # convolutions and recurrent layers have a switch of their own, on by default
        )
        if bf16 and not torch.cuda.is_bf16_supported(including_emulation=False):
            say("--bf16: this GPU has no units for it; fp32 is used instead")
            return torch.float32
        return torch.bfloat16 if bf16 else torch.float16 if fp16 else torch.float32
    for flag, asked in (("--fp16", fp16), ("--tf32", tf32)):
        if asked:
            say(f"{flag}: needs CUDA; fp32 is used instead")
    if bf16:
        speedup = bf16_speedup()
        if speedup > 1:
            return torch.bfloat16
        say(f"--bf16: matmuls take {1 / speedup:.0f} times as long as in fp32 on this CPU; fp32 is used instead")
    return torch.float32


def compiled(function: Callable, mode: str, *example: torch.Tensor, **options: Any) -> Callable:
    """`function` compiled, or as it is where that fails: compilation is lazy, so only running it here shows."""
    try:
        fast = torch.compile(function, options=torch._inductor.list_mode_options(mode) | options)
        fast(*example)
        return fast
    except Exception as error:
        say(f"--compile: failed ({str(error).strip().splitlines()[0][:120]}); eager mode is used instead")
        return function


class Graphed:
    """`function` without arguments or result, replayed as a CUDA graph. Every call has its effect exactly once.

    The first three calls run it as it is, which makes what it allocates only once. It may use nothing but tensors that
    live on, and numbers that never change. Where it cannot be captured, `graph` is None and it goes on as it is.
    """

    def __init__(self, function: Callable[[], None], generator: torch.Generator, watch: "Stopwatch") -> None:
        self.function = function
        self.generator = generator
        self.watch = watch
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
            say(
                f"--cudagraph: failed ({str(error).strip().splitlines()[0][:120]}); the loop goes on without this graph"
            )
            self.graph = None
            self.generator.graphsafe_set_state(
                self.generator.clone_state()
            )  # the old one still takes part in a capture
        self.watch.mark()


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


class Interrupts:
    """Ctrl-C and SIGTERM. The first ends the loop after its round, or at once what runs `with interrupts.at_once()`.

    The second ends the program.
    """

    def __init__(self) -> None:
        self.count, self.raises = 0, False
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self.interrupt)

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
def process_restored() -> Iterator[None]:
    """At the end, put back what a run sets for its whole process."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    threads, precision = torch.get_num_threads(), torch.get_float32_matmul_precision()
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
        for number, handler in handlers.items():
            signal.signal(number, handler)
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
                refuse(f"--run-name {args.run_name}: {folder} exists; another name or --resume {folder} works")
        except OSError as error:
            refuse(f"--run-dir {args.run_dir}: cannot be written ({error.strerror}); another folder works")


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


def save_checkpoint(path: Path, state: dict) -> None:
    """Write tensors and plain values to `path`. The file that was there stays whole until the new one is."""
    temporary = path.with_suffix(f".{os.getpid()}.tmp")  # of this process: two may write into one folder
    try:
        with open(temporary, "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except (OSError, RuntimeError) as error:  # torch turns a full disk into a RuntimeError
        with suppress(OSError):
            temporary.unlink()
        reason = str(error).strip().splitlines()[0]
        print(f"{path}: could not be saved ({reason}); the checkpoint before it is untouched", file=sys.stderr)


def load_checkpoint(flag: str, name: str, run_dir: str) -> tuple[Path, dict]:
    """The file, the run folder's or the "latest" checkpoint of this script. Nothing in the file is executed."""

    def is_ours(file: Path) -> bool:
        with suppress(OSError, ValueError, TypeError, KeyError):
            return json.loads((file.parent / "args.json").read_text())["script"] == SCRIPT
        return False

    if not name:
        refuse(f"{flag} '': names nothing; a checkpoint, a run folder or latest works")
    path = Path(name)
    if name == "latest":
        ours = filter(is_ours, Path(run_dir).glob("*/checkpoint.pt"))
        path = max(ours, key=lambda file: file.stat().st_mtime, default=Path(run_dir))
    path = path / "checkpoint.pt" if path.is_dir() else path
    if not path.is_file():
        refuse(f"{flag} {name}: there is no {path}; a checkpoint, a run folder or latest works")
    try:
        with warnings.catch_warnings(action="ignore"):
            state = torch.load(path, map_location="cpu", weights_only=True)
        if state["script"] != SCRIPT:
            raise ValueError(f"it is one of {state['script']}.py")
        if not isinstance(state["args"], dict):
            raise ValueError("its args are no dict")
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:120]
        refuse(f"{flag} {name}: not a whole checkpoint of {SCRIPT}.py ({reason})")
    return path, state


def saved_flags(flag: str, name: str, saved: dict[str, Any]) -> dict[str, Any]:
    """The flags of a checkpoint's run, but for those that name files or say what to do: they are the user's alone."""

    def is_a(value: Any, hint: Any) -> bool:
        if get_origin(hint) in (Union, types.UnionType):
            return any(is_a(value, part) for part in get_args(hint))
        if get_origin(hint) is Literal:
            return type(value) in (str, int) and value in get_args(hint)
        return type(value) is hint or (hint is float and type(value) is int)

    hints = get_type_hints(Args)
    if set(saved) != set(hints):
        names = ", ".join(sorted(str(name) for name in set(saved) ^ set(hints))[:5])
        refuse(f"{flag} {name}: made by another version of {SCRIPT}.py, with other flags ({names})")
    for key, value in saved.items():
        if not is_a(value, hints[key]):
            refuse(f"{flag} {name}: not a whole checkpoint of {SCRIPT}.py (its {key} is {str(value)[:40]!r})")
    return {key: value for key, value in saved.items() if key not in COMMAND_LINE_ONLY}


def structure(value: Any) -> Any:
    """Names, types, dtypes and shapes of what was saved; None for what no run saves, such as NaN or sparse tensors."""
    if isinstance(value, dict):
        return {name: structure(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [structure(part) for part in value]
    if isinstance(value, torch.Tensor):
        is_dense = value.layout == torch.strided
        is_finite = is_dense and (not value.is_floating_point() or bool(value.isfinite().all()))
        return (value.dtype, value.shape) if is_finite else None
    if type(value) in (int, float) and not -math.inf < value < math.inf or type(value) is int and value < 0:
        return None
    return type(value)


def refuse_if_different(asked: str, saved: dict[str, Any], expected: dict[str, Any], flags: str) -> None:
    """Refuse a checkpoint with parts that are not built as `expected`; `flags` are those that decide it."""
    for name, part in expected.items():
        if name not in saved or structure(saved[name]) != structure(part):
            refuse(f"{asked}: its {name} is missing, damaged or of another run; {flags} must be as they were")


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


@process_restored()
def main(args: Args, sources: dict[str, str] | None = None) -> dict:
    started = time.perf_counter()
    interrupts = Interrupts()
    # A network of 64 units keeps no GPU busy, and its games run here.
    stays_on_cpu = args.device == "auto" and args.policy == "MlpPolicy"
    device = pick_device("cpu" if stays_on_cpu else args.device)
    args = resolve(args, device)
    torch.set_num_threads(args.threads)
    np.random.seed(args.seed)
    torch.manual_seed(args.seed)
    dtype = pick_precision(args.bf16, args.fp16, args.tf32, device)
    envs = make_envs(args, args.num_envs)
    q_network = QNetwork(args, envs[0]).to(device)
    if args.evaluate is not None:
        with interrupts.at_once():
            return show(q_network, args, device)
        return {}

    sdpa = None
    if args.policy == "transformer":
        sdpa = q_network.features_extractor.kernel(dtype, device)
        asked = "" if args.sdpa in ("auto", sdpa.split("_")[0]) else f"--sdpa {args.sdpa}: does not run here; "
        say(f"{asked}attention runs in {sdpa}")

    # --- what a run is made of ------------------------------------------------------------------------------------
    target_network = QNetwork(args, envs[0]).to(device).requires_grad_(False).eval()
    target_network.load_state_dict(q_network.state_dict())
    parts, weights, target_weights = list(q_network.parameters()), flat(q_network), flat(target_network)
    actor = copy.deepcopy(q_network).requires_grad_(False).eval()  # acts without dropout, with the weights that learn
    for mirror, weight in zip(actor.parameters(), q_network.parameters()):
        mirror.data = weight.data
    graphs = args.cudagraph and device.type == "cuda"
    exp_avg, exp_avg_sq = torch.zeros_like(weights), torch.zeros_like(weights)
    adam_step = torch.zeros(1, dtype=torch.float64, device=device)
    learning_rate = torch.full_like(adam_step, args.learning_rate)
    loss_scale = torch.tensor(2.0**16 if dtype == torch.float16 else 1.0, device=device)
    cosine = Cosine(args.learning_rate, args.learning_rate_end)
    replay = Replay(args, envs[0].observation_space, device)
    index = torch.zeros(args.batch_size, dtype=torch.int64, device=device)  # what the next update learns from
    loss_sum = torch.zeros(1, device=device)  # since the last log
    watch = Stopwatch(device)

    actions = envs[0].action_space
    actions.seed(args.seed)
    obs = np.stack([env.reset(seed=args.seed + lane)[0] for lane, env in enumerate(envs)])
    next_obs, action = obs.copy(), np.zeros(args.num_envs, np.int64)
    reward, discount = np.zeros(args.num_envs, np.float32), np.zeros(args.num_envs, np.float32)
    returns, lengths = np.zeros(args.num_envs), np.zeros(args.num_envs, np.int64)
    finished = deque(maxlen=100)  # return, length and score of the last games, as in SB3's curves

    # --- a new run, or the rest of one ----------------------------------------------------------------------------
    networks = {"q_net": q_network, "q_net_target": target_network}
    optimizer = {"exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq, "step": adam_step, "loss_scale": loss_scale}
    global_step, updates, calls, episodes = 0, 0, 0, 0
    epsilon = 0.0
    seconds_before = 0.0
    imported_steps, imported_episodes = 0, 0  # of a zip: --total-timesteps and --episodes count from there

    def elapsed() -> float:
        return seconds_before + time.perf_counter() - started

    def progress() -> float:
        steps = global_step / (imported_steps + (args.total_timesteps or math.inf))
        games = episodes / (imported_episodes + (args.episodes or math.inf))
        return max(steps, games, elapsed() / (args.max_seconds or math.inf))

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
            "action_space": actions.np_random.bit_generator.state,
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

    def load_run_state(saved: dict[str, Any]) -> None:
        """Checks everything first: what does not fit is refused before anything is changed."""
        nonlocal global_step, updates, calls, episodes, epsilon, imported_steps, imported_episodes, seconds_before
        asked, expected = f"--resume {args.resume}", run_state()
        del expected["envs"]
        if args.checkpoint_replay and "replay" not in saved:
            del expected["replay"]
        refuse_if_different(asked, saved, expected, f"{SHAPES} and --num-envs")
        try:
            torch.Generator().set_state(saved["torch"])
            np.random.PCG64().state = saved["action_space"]
            if int(saved["numpy_key"].max()) >= 2**32 or int(saved["numpy_key"].min()) < 0:
                raise ValueError("NumPy's numbers are out of range")
            if saved["numpy_position"] > len(saved["numpy_key"]):
                raise ValueError(f"NumPy is at number {saved['numpy_position']}")
            if saved["envs"] is not None:
                for env, state, seen in zip(envs, saved["envs"], saved["obs"], strict=True):
                    put_back(env.unwrapped, state, seen)
            if "replay" in expected:
                replay.load_state_dict(saved["replay"], int(actions.n))
        except MALFORMED as error:
            refuse(f"{asked}: not a whole checkpoint of {SCRIPT}.py ({type(error).__name__}: {error})")
        for name, network in networks.items():
            network.load_state_dict(saved[name])
        for name, tensor in optimizer.items():
            tensor.copy_(saved["optimizer"][name])
        torch.set_rng_state(saved["torch"])
        np.random.set_state(("MT19937", saved["numpy_key"].numpy().astype(np.uint32), saved["numpy_position"]))
        actions.np_random.bit_generator.state = saved["action_space"]
        if saved["envs"] is None:
            say("the games start anew: these cannot be put back to where they were")
        else:
            obs[:] = saved["obs"].numpy()
            returns[:] = saved["returns"]
            lengths[:] = saved["lengths"]
        if "replay" not in expected:
            say("the replay starts empty: without --checkpoint-replay a checkpoint does not hold it")
        global_step = saved["global_step"]
        updates = saved["updates"]
        calls = saved["calls"]
        episodes = saved["episodes"]
        epsilon = saved["epsilon"]
        imported_steps = saved["imported_steps"]
        imported_episodes = saved["imported_episodes"]
        seconds_before = saved["elapsed"]

    folder = None
    if args.resume is not None:
        path, saved = load_checkpoint("--resume", args.resume, args.run_dir)
        load_run_state(saved)
        if progress() >= 1:
            over = f"its run is over after {global_step:,} steps, {episodes:,} games and {elapsed():.0f} s"
            works = "a larger --total-timesteps, --episodes or --max-seconds works"
            refuse(f"--resume {args.resume}: {over}; {works}")
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
            refuse("--wandb: its package is missing; pip install wandb")
    folder = folder or make_run_folder(args)
    if args.wandb:
        wandb.init(project=SCRIPT, name=folder.name, config=vars(args), sync_tensorboard=True)

    first_step = logged_step = global_step
    first_update = logged_update = updates
    scores, precision = {}, str(dtype).removeprefix("torch.")
    writer = SummaryWriter(folder, purge_step=global_step)
    writer.add_text("args", "  \n".join(f"{name}: {value}" for name, value in vars(args).items()))
    threads = f"cpu, {torch.get_num_threads()} threads"
    device_name = torch.cuda.get_device_name(device) if device.type == "cuda" else threads
    say(f"{folder} on {device_name}")

    def due(what: str) -> bool:
        every = getattr(args, f"{what}_every")
        if every == 0 or elapsed() < last[what] + every:
            return False
        last[what] = elapsed()
        return True

    def save() -> None:
        if not weights.isfinite().all():
            return print(f"{folder}: the weights are not finite and were not saved", file=sys.stderr)
        save_checkpoint(folder / "checkpoint.pt", {"script": SCRIPT, "args": vars(args), **run_state()})

    def export() -> None:
        state = {"num_timesteps": global_step, "_n_updates": updates, "_n_calls": calls, "_episode_num": episodes}
        state |= {"exploration_rate": epsilon, "_current_progress_remaining": 1 - min(progress(), 1)}
        try:
            write_sb3(args.export_sb3, args, envs[0], networks, optimizer, state)
            say(f"{args.export_sb3}: stable_baselines3.DQN.load reads it")
        except Exception as error:  # a full disk, or a game whose spaces cannot be pickled
            print(f"--export-sb3 {args.export_sb3}: could not be written ({error})", file=sys.stderr)

    def log() -> None:
        seconds = watch.read()
        steps, learns, wall = global_step - logged_step, updates - logged_update, sum(seconds.values())
        loss = loss_sum.item()
        loss_sum.zero_()
        scalars = {
            "charts/SPS": steps / wall,
            "charts/updates_per_second": learns / wall,
            "charts/samples_per_second": learns * args.batch_size / wall,
            "charts/replay_ratio": learns * args.batch_size / steps,
            "perf/rollout_fraction": 1 - seconds["learn"] / wall,
            "rollout/exploration_rate": epsilon,
            "train/learning_rate": learning_rate.item(),
            "time/fps": (global_step - first_step) / sum(watch.total.values()),
        }
        scalars |= {f"perf/{phase}_ms": 1000 * spent * args.num_envs / steps for phase, spent in seconds.items()}
        returned, length, score = np.mean(finished, 0) if finished else (math.nan,) * 3
        if finished:
            scalars |= {"charts/episodic_return": returned, "charts/episodic_length": length, "charts/score": score}
            scalars |= {"rollout/ep_rew_mean": returned, "rollout/ep_len_mean": length}
        if learns:
            scalars |= {"losses/td_loss": loss / learns, "train/loss": loss / learns}
        if device.type == "cuda":
            scalars["perf/gpu_mem_gib"] = torch.cuda.memory_allocated(device) / 2**30
            with suppress(Exception):  # NVML missing, or an error of its own
                scalars["perf/gpu_util"] = torch.cuda.utilization(device)
        write_scalars(writer, scalars, global_step)
        line = f"{min(progress(), 1):4.0%}  step {global_step:>11,}"
        line += f"  SPS {steps / wall:>9,.0f}  updates/s {learns / wall:>5.0f}"
        line += f"  epsilon {epsilon:.3f}  return {returned:7.1f}  score {score:5.1f}"
        say(line, end="\r" if sys.stdout.isatty() else "\n")
        if not math.isfinite(loss):
            refuse(f"--learning-rate {args.learning_rate:g}: the loss is {loss} since the last log; a lower one works")

    def test(games: int) -> dict[str, float]:
        scores = evaluate(actor, args, games, device)
        write_scalars(writer, {name.replace("_", "/", 1): value for name, value in scores.items()}, global_step)
        return scores

    # --- acting and learning --------------------------------------------------------------------------------------
    def autocast() -> torch.autocast | nullcontext:
        # Fresh for each forward: one that lives longer goes on using the weights as they were cast at its start.
        return torch.autocast(device.type, dtype, cache_enabled=False) if dtype != torch.float32 else nullcontext()

    @torch.inference_mode()
    def policy(obs: torch.Tensor) -> torch.Tensor:
        with autocast():
            return actor(obs).argmax(1)

    def greedy(obs: np.ndarray) -> np.ndarray:
        if not small:
            return policy(torch.from_numpy(obs).to(device)).cpu().numpy()
        x = np.asarray(obs.reshape(len(obs), -1), np.float32)
        x = x / np.float32(q_network.scale) if q_network.scale != 1 else x
        for weight, bias in small[:-1]:
            x = np.maximum(x @ weight + bias, 0)
        return (x @ small[-1][0] + small[-1][1]).argmax(1)

    def loss_of(obs, next_obs, action, reward, discount) -> torch.Tensor:
        with torch.no_grad():
            with autocast():
                next_q_target = target_network(next_obs)
            target = td_target(reward, discount, next_q_target)
        with autocast():
            q = q_network(obs)
        return F.smooth_l1_loss(q.gather(1, action[:, None]).squeeze(1), target)

    def rollout() -> None:
        nonlocal episodes
        # 1 act and step: NumPy's and the action space's draws in SB3's order; all games explore at once, or none
        if global_step < args.learning_starts or np.random.rand() < epsilon:
            action[:] = [actions.sample() for _ in envs]
        else:
            action[:] = greedy(obs)
        watch.mark("act")
        ended = []
        for lane, env in enumerate(envs):
            next_obs[lane], reward[lane], terminated, truncated, info = env.step(action[lane])
            discount[lane] = 0 if terminated else args.gamma  # a game that ran out of time goes on counting
            if terminated or truncated:
                ended.append((lane, info))
        watch.mark("env")
        # 2 store
        replay.store(obs, next_obs, action, reward, discount)
        obs[:], returns[:], lengths[:] = next_obs, returns + reward, lengths + 1
        for lane, info in ended:
            finished.append((returns[lane], lengths[lane], info.get("score", returns[lane])))
            obs[lane], returns[lane], lengths[lane] = envs[lane].reset()[0], 0, 0
        episodes += len(ended)
        watch.mark("store")

    def update() -> None:
        loss = loss_of(*replay.gather(index))
        grads = torch.autograd.grad(loss * loss_scale, parts)
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

    # --- switches: they wrap `policy` and `update` ----------------------------------------------------------------
    eager, small = update, []
    if device.type == "cpu" and dtype == torch.float32 and args.policy == "MlpPolicy":
        # NumPy on the same weights, since calling PyTorch costs more than these matmuls: 8 us an action, not 31.
        small = [(layer.weight.detach().numpy().T, layer.bias.detach().numpy()) for layer in actor.q_net[::2]]
    if args.compile:
        torch._dynamo.reset()  # of a run before this one in the same process
        policy = policy if small else compiled(policy, args.compile_mode, torch.from_numpy(obs).to(device))
        state = weights, target_weights, *optimizer.values(), loss_sum
        before = [tensor.clone() for tensor in state]
        if device.type == "cuda":  # else reduce-overhead makes no graph, and does not say so
            for tensor in (*state, index, *replay.flat):
                torch._dynamo.mark_static_address(tensor)
        # The C++ wrapper gains 30 us an update, and 30 more that nobody looks whether anything but values has changed.
        options = {"cpp_wrapper": device.type == "cpu", "guard_filter_fn": lambda guards: [False] * len(guards)}
        one_graph = torch._dynamo.config.patch(trace_autograd_ops=True)  # from the replay to the new weights
        with one_graph, torch.random.fork_rng():
            update = compiled(update, args.compile_mode, **options)
        for tensor, value in zip(state, before):  # that was a trial
            tensor.copy_(value)
    is_compiled = update is not eager
    if graphs:
        update = Graphed(update, torch.Generator(device), watch)
    elif args.cudagraph:
        say("--cudagraph: needs CUDA; the loop runs without graphs")
    active = [precision, "compiled" if is_compiled else "eager", f"batch size {args.batch_size}", *filter(None, [sdpa])]
    origins = [f"{flag} from {source}" for flag, source in (sources or {}).items()]
    say(f"active: {', '.join(active)}; settings: {', '.join(origins) or 'the defaults'}")

    # --- the loop: SB3's learn, collect_rollouts and train --------------------------------------------------------
    per_round = args.train_freq * args.num_envs if args.gradient_steps == -1 else args.gradient_steps
    target_every = max(args.target_update_interval // args.num_envs, 1)
    last = dict.fromkeys(("log", "eval", "checkpoint"), elapsed())
    write_scalars(writer, {"perf/warmup_s": time.perf_counter() - started}, global_step)
    watch.mark()
    while progress() < 1 and not interrupts:
        # 1 act and step, 2 store
        for _ in range(args.train_freq):
            rollout()
            global_step += args.num_envs
            calls += 1
            if calls % target_every == 0:  # one call at a time: no threshold is jumped over
                target_weights.mul_(1 - args.tau).add_(weights, alpha=args.tau)  # rounds as SB3 does, unlike lerp_
            epsilon = epsilon_at(progress(), args.exploration_initial_eps, args.exploration_final_eps,
                                 args.exploration_fraction)  # fmt: skip
        watch.mark("rollout")

        # 3 learn
        if global_step > args.learning_starts:
            if args.lr_schedule == "cosine":
                learning_rate.fill_(cosine(1 - progress()))
            for _ in range(per_round):
                replay.draw(index)
                update()
            updates += per_round
        watch.mark("learn")

        # 4 log, evaluate, save
        if due("log"):
            log()
            logged_step, logged_update = global_step, updates
            watch.mark("log")
        if due("eval"):
            with interrupts.at_once():
                scores = test(max(args.eval_episodes // 10, 1))
            watch.mark()
        if due("checkpoint"):
            save()
            watch.mark()

    # --- the end: what must not be lost first ---------------------------------------------------------------------
    if global_step > logged_step:
        log()
    wall_seconds, busy = elapsed(), sum(watch.total.values()) or math.inf
    save()
    steps, learns = global_step - first_step, updates - first_update
    summary = {
        "script": SCRIPT,
        "device": device_name,
        "peak_memory_gib": peak_memory_gib(device),
        "precision": precision,
        "compiled": is_compiled,
        "cudagraph": graphs and update.graph is not None,
        "sdpa": sdpa,
        "env_steps": global_step,
        "updates": updates,
        "episodes": episodes,
        "wall_seconds": wall_seconds,
        "env_steps_per_second": steps / busy,
        "updates_per_second": learns / busy,
        "samples_per_second": learns * args.batch_size / busy,
        "replay_ratio": learns * args.batch_size / max(steps, 1),
        "rollout_fraction": 1 - watch.total["learn"] / busy,
        "train_fraction": watch.total["learn"] / busy,
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
            summary |= test(args.eval_episodes)
            write_json(folder / "summary.json", summary)
            say("  ".join(f"{name} {value:g}" for name, value in summary.items() if name.startswith("eval")))
            if args.video:
                write_gif(actor, args, device, folder / "videos")
            say(f"watch it play: python {SCRIPT}.py --evaluate {folder} --render")
    if interrupts:
        say(f"stopped; {folder / 'checkpoint.pt'} goes on with python {SCRIPT}.py --resume {folder}")
    with suppress(OSError):  # on a full disk
        writer.close()
    return summary


def parse() -> tuple[Args, dict[str, str]]:
    """The command line on top of a checkpoint's flags, or of the environment, .env, a zip's flags and the defaults.

    Also says, by flag, where settings come from that are not the defaults.
    """
    values, sources = settings()
    args = tyro.cli(Args, default=Args(**values), description=__doc__)
    found = {}
    if args.resume is not None or args.evaluate is not None:
        flag = "resume" if args.resume is not None else "evaluate"
        name = getattr(args, flag)
        path, saved = load_checkpoint(f"--{flag}", name, args.run_dir)
        values = saved_flags(f"--{flag}", name, saved["args"])
        if ":" in values["env_id"] and args.env_id == Args.env_id:
            works = f"with --env-id {values['env_id']} on the command line it does"
            refuse(f"--{flag} {name}: does not choose by itself which module to import; {works}")
        limits = "total_timesteps", "episodes", "max_seconds"
        if any(getattr(args, limit) is not None for limit in limits):
            values |= dict.fromkeys(limits)  # a new limit takes the place of the old ones
        found = {flag: str(path)}  # looked up once: the latest may soon be another one
        sources = {setting: name for setting in SETTINGS.values() if values[setting] != getattr(Args, setting)}
    elif args.import_sb3 is not None:
        values = read_sb3(args.import_sb3)[0] | values
        if "batch_size" not in sources:
            sources["batch_size"] = args.import_sb3
    args = replace(tyro.cli(Args, default=Args(**values), description=__doc__), **found)
    given = {word.split("=")[0].lstrip("-").replace("-", "_").removeprefix("no_") for word in sys.argv[1:]}
    return args, sources | {flag: "the command line" for flag in SETTINGS.values() if flag in given}


if __name__ == "__main__":
    try:
        main(*parse())
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except (OSError, MemoryError, RuntimeError) as error:
        if is_out_of_memory(error):
            refuse("out of memory: a smaller --batch-size, --buffer-size, --num-envs or --eval-episodes works")
        if not isinstance(error, OSError):
            raise
        refuse(str(error))

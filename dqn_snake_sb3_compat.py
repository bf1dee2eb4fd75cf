"""Stable-Baselines3's DQN, number for number: same defaults, same order of events, same files.

    python dqn_snake_sb3_compat.py                                                # two minutes of Snake on 20 x 20
    python dqn_snake_sb3_compat.py --policy transformer --batch-size 8192 --bf16  # large batches, made for a GPU
    python dqn_snake_sb3_compat.py --env-id CartPole-v1 --compile                 # any Gymnasium id; fast on a CPU too
    python dqn_snake_sb3_compat.py --import-sb3 model.zip --export-sb3 more.zip   # goes on where SB3 stopped, and back
    python dqn_snake_sb3_compat.py --evaluate latest --render                     # watch the last agent play

On two CPU cores `--compile` makes 5.6 times SB3's steps per second on CartPole and Snake, without it 2 (benchmarks.md).
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
import resource
import signal
import subprocess
import sys
import time
import timeit
import warnings
import zipfile
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NoReturn

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

from envs.snake import VARIANTS

SCRIPT = Path(__file__).stem
EVAL_SEED = 2**31 - 1


@dataclass
class Args:
    # Run
    seed: int = 1
    """seed of weights, games, exploration and sampling, used where SB3 uses it"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto takes CUDA where there is one"""
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
    per_env_epsilon: bool = False
    """every game draws for itself whether it explores; SB3 draws once for all of them"""
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
    """CPU threads (None: 1 for the MLP, else all cores, 8 at most)"""

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
    """continue the training in this zip of Stable-Baselines3, with its hyperparameters where they are plain numbers"""
    export_sb3: str | None = None
    """write a zip for stable_baselines3.DQN.load at the end"""
    render: bool = False
    """with --evaluate: play one game in the terminal"""
    video: bool = True
    """write a GIF of a game at the end, or with --evaluate"""
    wandb: bool = False
    """mirror TensorBoard to Weights & Biases (pip install wandb)"""
    profile: bool = False
    """write a torch profiler trace of 20 rounds of the loop, and its longest operations, into the run folder"""


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
        value, accepted = words.get(text.strip().lower()), "true, 1, yes, on, false, 0, no or off"
        if flag == "batch_size":
            value, accepted = int(text) if text.strip().isdecimal() else None, "a whole number above 0"
        if value is None or value == 0 and flag == "batch_size":
            refuse(f"{name}={text} (in {place}): must be {accepted}")
        values[flag], sources[flag] = value, f"{name} in {place}"
    return values, sources


def resolve(args: Args, device: torch.device) -> Args:
    """`args` with nothing a run needs left None. Values that cannot work are refused here, before anything starts."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    if args.threads is None:
        args = replace(args, threads=1 if args.policy == "MlpPolicy" and args.batch_size < 1024 else min(cores, 8))
    if args.total_timesteps is None and args.episodes is None and args.max_seconds is None:
        args = replace(args, max_seconds=120.0)
    if args.flash_attention and args.sdpa == "auto":
        args = replace(args, sdpa="flash")

    shares = {"gamma", "tau", "exploration_fraction", "exploration_initial_eps", "exploration_final_eps", "dropout"}
    may_be_0 = {"seed", "learning_starts", "learning_rate_end", "eval_every", "checkpoint_every", *shares} - {"tau"}
    for name, value in vars(args).items():
        if type(value) in (int, float) and not (name == "gradient_steps" and value == -1):
            highest = 1 if name in shares else 2**32 - 1 if name == "seed" else sys.maxsize
            if not 0 <= value <= highest or (value == 0 and name not in may_be_0):
                lowest = "0 or more" if name in may_be_0 else "above 0"
                refuse(f"--{name.replace('_', '-')} {value}: must be {lowest} and at most {highest:g}")
    if args.bf16 and args.fp16:
        refuse("--bf16 --fp16: choose one of them")
    if args.cudagraph and args.compile and args.compile_mode != "default":
        refuse(f"--compile-mode {args.compile_mode}: captures graphs by itself; with --cudagraph only default works")
    if args.render and not args.evaluate:
        refuse("--render: shows a trained agent, so it needs --evaluate PATH")
    if args.export_sb3 and not os.access(Path(args.export_sb3).absolute().parent, os.W_OK):
        refuse(f"--export-sb3 {args.export_sb3}: its folder does not exist or cannot be written; another one works")
    if args.import_sb3 and args.resume:
        refuse("--import-sb3 --resume: both say where to go on; choose one of them")
    return args


def make_envs(args: Args, num_envs: int, render_mode: str | None = None) -> list[gym.Env]:
    """`num_envs` games. They are plain environments: at a few games a Python loop is faster than a batched one."""
    kwargs: dict[str, Any] = {"render_mode": render_mode}
    if args.board:
        kwargs["board"] = tuple(int(side) for side in args.board.split("x") if side.isdecimal())
    try:
        envs = [gym.make(args.env_id, disable_env_checker=True, **kwargs) for _ in range(num_envs)]
    except (gym.error.Error, ImportError, TypeError, ValueError) as error:
        board = f" --board {args.board}" if args.board else ""
        refuse(f"--env-id {args.env_id}{board}: {error}; {', '.join(VARIANTS)} and Gymnasium's ids work")
    observations, actions = envs[0].observation_space, envs[0].action_space
    if not isinstance(observations, gym.spaces.Box) or not isinstance(actions, gym.spaces.Discrete) or actions.start:
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


class Transformer(nn.Module):
    """A token for every cell of a board (rows, columns, channels), two post-norm layers, and their mean (B, 128).

    Built by SB3 too, when it loads an exported zip: hence the signature, `features_dim` and `__module__`.
    """

    __module__ = SCRIPT

    def __init__(self, observation_space: gym.spaces.Box, dropout: float = 0.1, sdpa: list | None = None) -> None:
        super().__init__()
        self.features_dim, width, (rows, columns, channels) = 128, 64, observation_space.shape
        self.sdpa = [*(sdpa or [SDPBackend.FLASH_ATTENTION]), SDPBackend.MATH]  # the last always runs
        self.embed = nn.Linear(channels, width)
        angles = torch.arange(max(rows, columns))[:, None] * 1e4 ** -torch.arange(0, 1, 4 / width)
        waves = torch.cat([angles.sin(), angles.cos()], 1)  # half of the width for the row, half for the column
        row, column = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
        self.register_buffer("place", torch.cat([waves[row], waves[column]], 2).flatten(0, 1), persistent=False)
        layers = (nn.TransformerEncoderLayer(width, 4, 128, dropout, batch_first=True) for _ in range(2))
        self.layers, self.norm = nn.Sequential(*layers), nn.LayerNorm(width)
        self.out = nn.Sequential(nn.Linear(width, self.features_dim), nn.ReLU())

    def forward(self, obs: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(self.sdpa):
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


def pick_sdpa(wanted: str, dtype: torch.dtype, device: torch.device, dropout: float = 0.0) -> list[SDPBackend]:
    """The attention kernel asked for where it runs, else the first that does. Says which."""
    names = {"flash": "FLASH_ATTENTION", "efficient": "EFFICIENT_ATTENTION", "cudnn": "CUDNN_ATTENTION", "math": "MATH"}
    q = torch.zeros(1, 1, 16, 16, dtype=dtype, device=device)
    for name in sorted(names, key=lambda name: name != wanted):
        backend = getattr(SDPBackend, names[name])
        try:
            with sdpa_kernel(backend), warnings.catch_warnings(action="ignore"):
                F.scaled_dot_product_attention(q, q, q, dropout_p=dropout)
        except RuntimeError:
            continue
        asked = "" if wanted in ("auto", name) else f"--sdpa {wanted}: does not run in {dtype} on {device.type}; "
        print(f"{asked}attention runs {'as written out' if name == 'math' else f'in the {name} kernel'}")
        return [backend]


def flat(module: nn.Module) -> torch.Tensor:
    """One vector that all weights of `module` become views of: to clip, to step and to copy costs one call each."""
    parts, sizes = list(module.parameters()), [weight.numel() for weight in module.parameters()]
    whole = nn.utils.parameters_to_vector(parts).detach()
    for weight, value in zip(parts, whole.split(sizes)):
        weight.data = value.view_as(weight)
    return whole


class QNetwork(nn.Module):
    """Values (B, actions), fp32, of observations. Layers, their names and the order of their draws are SB3's."""

    def __init__(self, args: Args, env: gym.Env, sdpa: list[SDPBackend] | None) -> None:
        super().__init__()
        space, hidden = env.observation_space, []
        self.scale = 255 if is_image(space) else 1
        if args.policy == "transformer":
            self.features_extractor, hidden = Transformer(space, args.dropout, sdpa), [128]
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

    def __init__(self, args: Args, space: gym.spaces.Box, device: torch.device) -> None:
        self.rows, self.num_envs, self.row, self.held = max(args.buffer_size // args.num_envs, 1), args.num_envs, 0, 0
        shape = (self.rows, args.num_envs)
        obs = [(shape + space.shape, space.dtype)] * 2
        kinds = [*obs, (shape, np.dtype(np.int64)), (shape, np.dtype(np.float32)), (shape, np.dtype(np.float32))]
        each = 2 * math.prod(space.shape) * space.dtype.itemsize + 16
        refuse_if_too_large("--buffer-size", args.buffer_size, each, device)
        rings = [torch.from_numpy(np.zeros(*kind)).to(device) for kind in kinds]  # on a CPU memory is taken as it fills
        self.flat = [ring.flatten(0, 1) for ring in rings]
        self.rings = [ring.numpy() for ring in rings] if device.type == "cpu" else rings

    def state_dict(self) -> dict[str, Any]:
        return {"rings": self.flat, "row": self.row, "held": self.held}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self.row, self.held = saved["row"], saved["held"]
        for ring, values in zip(self.flat, saved["rings"], strict=True):
            ring.copy_(values)

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
    obs = np.stack([env.reset(seed=EVAL_SEED - lane)[0] for lane, env in enumerate(envs)])
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


def write_gif(q_network: QNetwork, args: Args, device: torch.device, folder: Path) -> str:
    folder.mkdir(exist_ok=True)
    try:
        first, *others = (Image.fromarray(frame) for frame in play(q_network, args, device, "rgb_array"))
    except (gym.error.Error, AttributeError) as error:  # a package is missing, or the game has no pictures
        return f"--video: {args.env_id} cannot be drawn ({error})"
    first.save(folder / "game.gif", save_all=True, append_images=others, duration=80, loop=0)
    return str(folder / "game.gif")


def show(q_network: QNetwork, args: Args, device: torch.device) -> dict[str, float]:
    """--evaluate: one game in the terminal (--render), or the scores of many and a GIF (--video)."""
    path, saved = load_checkpoint("--evaluate", args.evaluate, args.run_dir)
    try:
        q_network.load_state_dict(saved["q_net"])
    except (KeyError, RuntimeError):
        refuse(f"--evaluate {args.evaluate}: --env-id, --board and --policy must be as they were")
    q_network.eval()
    if args.render:
        mode = "ansi" if "ansi" in make_envs(args, 1)[0].metadata["render_modes"] else "human"
        for frame in play(q_network, args, device, mode):
            if frame is not None:
                print(f"\033[H\033[J{frame}", flush=True)
                time.sleep(1 / 12)
        return {}
    scores = evaluate(q_network, args, args.eval_episodes, device)
    print("  ".join(f"{name} {value:g}" for name, value in scores.items()))
    if args.video:
        print(write_gif(q_network, args, device, path.parent / "videos"))
    return scores


def report(args: Args, sources: dict[str, str], active: dict[str, Any]) -> str:
    """What each setting asks for, where that comes from, and what is at work."""
    lines = [f"{'setting':18}{'asked':8}{'active':18}from"]
    for flag in SETTINGS.values():
        asked, source = getattr(args, flag), sources.get(flag, "the default")
        lines.append(f"{flag:18}{asked!s:8}{active[flag]!s:18}{source}")
    return "\n".join(lines)


def save_games(envs: list[gym.Env], obs: np.ndarray, returns: np.ndarray, lengths: np.ndarray) -> dict[str, Any]:
    """Games and random states in plain values and tensors. Only the embedded games can be put back as they were."""
    _, key, position, *_ = np.random.get_state()
    return {
        "envs": [env.unwrapped.state_dict() for env in envs] if hasattr(envs[0].unwrapped, "state_dict") else None,
        "obs": torch.from_numpy(obs.copy()),
        "returns": returns.tolist(),
        "lengths": lengths.tolist(),
        "actions": envs[0].action_space.np_random.bit_generator.state,
        "numpy": [key.tolist(), position],
        "torch": torch.get_rng_state(),
    }


def load_games(
    saved: dict[str, Any], envs: list[gym.Env], obs: np.ndarray, returns: np.ndarray, lengths: np.ndarray
) -> None:
    if saved["obs"].shape != obs.shape:
        refuse(f"--num-envs {len(envs)}: must be {len(saved['returns'])}, as it was")
    envs[0].action_space.np_random.bit_generator.state = saved["actions"]
    np.random.set_state(("MT19937", np.array(saved["numpy"][0], np.uint32), saved["numpy"][1]))
    torch.set_rng_state(saved["torch"])
    if saved["envs"] is None:
        return print("the games start anew: this one cannot be put back to where it was")
    for env, state in zip(envs, saved["envs"]):
        env.unwrapped.load_state_dict(state)
    obs[:], returns[:], lengths[:] = saved["obs"].numpy(), saved["returns"], saved["lengths"]


# ------------------------------------------------------------------------------------ Stable-Baselines3's files


PLAIN = "learning_rate buffer_size learning_starts batch_size tau gamma gradient_steps target_update_interval "
PLAIN += "exploration_fraction exploration_initial_eps exploration_final_eps max_grad_norm"
# hyperparameters that SB3 writes as plain numbers, under the names they have here


def read_sb3(path: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Plain data and state_dicts in a zip of SB3's DQN. Pickled objects in it are left alone, nothing is executed."""
    try:
        with zipfile.ZipFile(path) as archive:
            data = json.loads(archive.read("data"))
            names = ("policy", "policy.optimizer")
            files = {name: io.BytesIO(archive.read(f"{name}.pth")) for name in names}
            saved = {name: torch.load(file, map_location="cpu", weights_only=True) for name, file in files.items()}
        if not any(name.startswith("q_net_target.") for name in saved["policy"]):
            raise ValueError("it is of another algorithm")
    except FileNotFoundError:
        refuse(f"--import-sb3 {path}: there is no such file; a zip written by stable_baselines3's DQN works")
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:120]
        refuse(f"--import-sb3 {path}: not a whole zip of stable_baselines3's DQN ({reason})")
    return data, saved


def take_over(args: Args, networks: dict[str, QNetwork], optimizer: dict[str, torch.Tensor]) -> list[int | float]:
    """Put a zip's weights and Adam's moments into ours; gives its steps, updates, calls, episodes and epsilon."""
    data, saved = read_sb3(args.import_sb3)
    try:
        for name, network in networks.items():
            network.load_state_dict({key: saved["policy"][f"{name}.{key}"] for key in network.state_dict()})
        moments = saved["policy.optimizer"]["state"]
        for name in ("exp_avg", "exp_avg_sq") if moments else ():
            optimizer[name].copy_(torch.cat([moments[number][name].flatten() for number in sorted(moments)]))
            optimizer["step"].copy_(moments[0]["step"])
    except (KeyError, RuntimeError, ValueError) as error:
        reason = f"({str(error).strip().splitlines()[-1].strip()})"
        refuse(f"--import-sb3 {args.import_sb3}: does not fit --env-id {args.env_id} --policy {args.policy} {reason}")
    counters = [data.get(f"_{name}", 0) for name in ("n_updates", "n_calls", "episode_num")]
    counters = [data.get("num_timesteps", 0), *counters, data.get("exploration_rate", 0.0)]
    print(
        f"{args.import_sb3}: goes on after {counters[0]:,} steps and {counters[1]:,} updates; the replay starts empty"
    )
    return counters


def write_sb3(
    path: str,
    args: Args,
    env: gym.Env,
    networks: dict[str, QNetwork],
    optimizer: dict[str, torch.Tensor],
    counters: dict,
) -> None:
    """A zip that `stable_baselines3.DQN.load` understands. SB3 is named in it, not imported here."""

    def pickled(value: Any) -> dict[str, str]:
        return {":type:": str(type(value)), ":serialized:": base64.b64encode(pickle.dumps(value)).decode()}

    sys.modules.setdefault(SCRIPT, sys.modules[__name__])  # what is pickled here is looked up there
    policy = "CnnPolicy" if args.policy == "CnnPolicy" else "DQNPolicy"
    reference = base64.b64encode(f"cstable_baselines3.dqn.policies\n{policy}\n.".encode()).decode()
    extractor = {"features_extractor_class": Transformer, "features_extractor_kwargs": {"dropout": args.dropout}}
    data = {name: getattr(args, name) for name in [*PLAIN.split(), "train_freq", "seed"]} | counters
    data |= {
        "policy_class": {":type:": "<class 'abc.ABCMeta'>", ":serialized:": reference},
        "policy_kwargs": pickled(extractor | {"net_arch": [128]}) if args.policy == "transformer" else {},
        "observation_space": pickled(env.observation_space),
        "action_space": pickled(env.action_space),
        "n_envs": args.num_envs,
        "verbose": 0,
    }
    if args.lr_schedule == "cosine":
        data["learning_rate"] = pickled(Cosine(args.learning_rate, args.learning_rate_end))
    policy = {f"{name}.{key}": value.cpu() for name, net in networks.items() for key, value in net.state_dict().items()}
    weights, step = list(networks["q_net"].parameters()), optimizer["step"].cpu().float()
    parts = {name: optimizer[name].cpu().split([w.numel() for w in weights]) for name in ("exp_avg", "exp_avg_sq")}
    state = {
        number: {"step": step} | {name: part[number].view_as(weight) for name, part in parts.items()}
        for number, weight in enumerate(weights if step else [])
    }
    group = torch.optim.Adam(weights, args.learning_rate).state_dict()["param_groups"]
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("data", json.dumps(data, indent=4))
        for name, part in (("policy", policy), ("policy.optimizer", {"state": state, "param_groups": group})):
            file = io.BytesIO()
            torch.save(part, file)
            archive.writestr(f"{name}.pth", file.getvalue())
        archive.writestr("_stable_baselines3_version", "2.9.2")


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


def main(args: Args, sources: dict[str, str] | None = None) -> dict:
    started = time.perf_counter()
    device = pick_device(args.device)
    args = resolve(args, device)
    torch.set_num_threads(args.threads)
    np.random.seed(args.seed)
    torch.manual_seed(args.seed)
    dtype = pick_precision(args.bf16, args.fp16, args.tf32, device)
    dropout = args.dropout if args.policy == "transformer" else 0.0
    sdpa = pick_sdpa(args.sdpa, dtype, device, dropout) if args.policy == "transformer" else None
    envs = make_envs(args, args.num_envs)
    q_network = QNetwork(args, envs[0], sdpa).to(device)
    if args.evaluate:
        return show(q_network, args, device)

    # --- what a run is made of ------------------------------------------------------------------------------------
    target_network = QNetwork(args, envs[0], sdpa).to(device).requires_grad_(False).eval()
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
    learned = torch.zeros(3, device=device)
    loss_sum, skipped, streak = learned.unbind()  # since the last log, updates skipped too; updates skipped in a row
    watch = Stopwatch(device)

    actions = envs[0].action_space
    actions.seed(args.seed)
    obs = np.stack([env.reset(seed=args.seed + lane)[0] for lane, env in enumerate(envs)])
    next_obs, action = obs.copy(), np.zeros(args.num_envs, np.int64)
    reward, discount = np.zeros(args.num_envs, np.float32), np.zeros(args.num_envs, np.float32)
    returns, lengths = np.zeros(args.num_envs), np.zeros(args.num_envs, np.int64)
    finished = deque(maxlen=100)  # return, length and score of the last games, as in SB3's curves

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
    networks = {"q_net": q_network, "q_net_target": target_network}
    stateful = networks | ({"replay": replay} if args.checkpoint_replay else {})
    optimizer = {"exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq, "step": adam_step, "loss_scale": loss_scale}
    global_step, updates, calls, episodes, epsilon, seconds_before, earlier = 0, 0, 0, 0, 0.0, 0.0, 0
    if args.resume:
        try:
            for name, part in stateful.items():
                part.load_state_dict(saved[name])
            for name, tensor in optimizer.items():
                tensor.copy_(saved["optimizer"][name])
        except (KeyError, RuntimeError, ValueError):
            refuse(f"--resume {args.resume}: --env-id, --board, --policy and --checkpoint-replay must be as they were")
        if not args.checkpoint_replay:
            print("the replay starts empty: without --checkpoint-replay a checkpoint does not hold it")
        global_step, updates, calls, episodes, epsilon, seconds_before, earlier = saved["counters"]
        load_games(saved["games"], envs, obs, returns, lengths)
    elif args.import_sb3:
        global_step, updates, calls, episodes, epsilon = take_over(args, networks, optimizer)
        earlier = global_step
    first_step, first_update = logged_step, logged_update = global_step, updates
    scores, precision = {}, str(dtype).removeprefix("torch.")
    writer = SummaryWriter(folder, purge_step=global_step)
    writer.add_text("args", "  \n".join(f"{name}: {value}" for name, value in vars(args).items()))
    print(f"{folder} on {machine(device)['device']}")

    def elapsed() -> float:
        return seconds_before + time.perf_counter() - started

    def progress() -> float:
        done = global_step / (args.total_timesteps + earlier if args.total_timesteps else math.inf)
        return max(done, episodes / (args.episodes or math.inf), elapsed() / (args.max_seconds or math.inf))

    def due(what: str) -> bool:
        every = getattr(args, f"{what}_every")
        if every == 0 or elapsed() < last[what] + every:
            return False
        last[what] = elapsed()
        return True

    def save() -> None:
        if not weights.isfinite().all():
            return print(f"{folder}: the weights are not finite and were not saved", file=sys.stderr)
        state = {name: part.state_dict() for name, part in stateful.items()} | {"optimizer": optimizer}
        state |= {"script": SCRIPT, "args": vars(args), "games": save_games(envs, obs, returns, lengths)}
        state |= {"counters": [global_step, updates, calls, episodes, epsilon, elapsed(), earlier]}
        save_checkpoint(folder / "checkpoint.pt", state)

    def log() -> None:
        seconds = watch.read()
        steps, learns, wall = global_step - logged_step, updates - logged_update, sum(seconds.values())
        loss, lost, in_a_row = learned.tolist()
        learned[:2] = 0
        scalars = {
            "charts/SPS": steps / wall,
            "charts/updates_per_second": learns / wall,
            "charts/samples_per_second": learns * args.batch_size / wall,
            "charts/replay_ratio": learns * args.batch_size / steps,
            "losses/skipped_updates": lost,
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
            with suppress(ImportError, RuntimeError):  # without NVML
                scalars["perf/gpu_util"] = torch.cuda.utilization(device)
        for tag, value in scalars.items():
            writer.add_scalar(tag, value, global_step)
        line = f"{progress():4.0%}  step {global_step:>11,}  SPS {steps / wall:>9,.0f}  updates/s {learns / wall:>5.0f}"
        line += f"  epsilon {epsilon:.3f}  return {returned:7.1f}  score {score:5.1f}"
        print(line, end="\r" if sys.stdout.isatty() else "\n", flush=True)
        if in_a_row >= 10:
            first = f"every update from number {updates - in_a_row + 1:.0f} on was not finite and was skipped"
            refuse(f"--learning-rate {args.learning_rate:g}: {first}; a lower one works")

    def test(games: int) -> dict[str, float]:
        scores = evaluate(actor, args, games, device)
        for name, value in scores.items():
            writer.add_scalar(name.replace("_", "/", 1), value, global_step)
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
        # 1 act and step: NumPy's and the action space's draws in SB3's order, one for all games unless asked otherwise
        if global_step < args.learning_starts or (not args.per_env_epsilon and np.random.rand() < epsilon):
            action[:] = [actions.sample() for _ in envs]
        else:
            action[:] = greedy(obs)
            if args.per_env_epsilon:
                explores = np.random.rand(args.num_envs) < epsilon
                action[explores] = [actions.sample() for _ in range(explores.sum())]
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
            loss_sum.add_(loss.nan_to_num(0, 0, 0))
            skipped.add_(~finite)
            streak.copy_(torch.where(finite & (streak < 10), 0, streak + 1))  # from ten on it only grows

    # --- switches: they wrap `policy` and `update` ----------------------------------------------------------------
    eager, small = update, []
    if device.type == "cpu" and dtype == torch.float32 and args.policy == "MlpPolicy":
        # NumPy on the same weights, since calling PyTorch costs more than these matmuls: 8 us an action, not 31.
        small = [(layer.weight.detach().numpy().T, layer.bias.detach().numpy()) for layer in actor.q_net[::2]]
    if args.compile:
        torch._dynamo.reset()  # of a run before this one in the same process
        torch._dynamo.config.trace_autograd_ops = True  # one graph from the replay to the new weights
        policy = policy if small else compiled(policy, args.compile_mode, torch.from_numpy(obs).to(device))
        state = weights, target_weights, *optimizer.values(), learned
        before = [tensor.clone() for tensor in state]
        # The C++ wrapper gains 30 us an update, and 30 more that nobody looks whether anything but values has changed.
        options = {"cpp_wrapper": device.type == "cpu", "guard_filter_fn": lambda guards: [False] * len(guards)}
        with torch.random.fork_rng():
            update = compiled(update, args.compile_mode, **options)
        for tensor, value in zip(state, before):  # that was a trial
            tensor.copy_(value)
    is_compiled = update is not eager
    if graphs:
        update = Graphed(update, torch.Generator(device), watch)
    elif args.cudagraph:
        print("--cudagraph: needs CUDA; the loop runs without graphs")
    active = {"compile": is_compiled, "bf16": dtype == torch.bfloat16, "batch_size": args.batch_size}
    active["flash_attention"] = sdpa[0].name.lower() if sdpa else "no attention"
    print(report(args, sources or {}, active))
    if args.wandb:
        wandb.config.update({f"active_{name}": value for name, value in active.items()})

    # --- the loop: SB3's learn, collect_rollouts and train --------------------------------------------------------
    per_round = args.train_freq * args.num_envs if args.gradient_steps == -1 else args.gradient_steps
    target_every = max(args.target_update_interval // args.num_envs, 1)
    last = dict.fromkeys(("log", "eval", "checkpoint"), elapsed())
    writer.add_scalar("perf/warmup_s", time.perf_counter() - started, global_step)
    watch.mark()
    while progress() < 1 and not interrupts:
        # 1 act and step, 2 store
        for _ in range(args.train_freq):
            rollout()
            global_step += args.num_envs
            calls += 1
            if calls % target_every == 0:  # one call at a time: no threshold is jumped over
                target_weights.lerp_(weights, args.tau)
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
            scores = test(max(args.eval_episodes // 10, 1))
            watch.mark()
        if due("checkpoint"):
            save()
            watch.mark()
        if profiler:
            profiler.step()

    # --- the end --------------------------------------------------------------------------------------------------
    if global_step > logged_step:
        log()
    wall_seconds, busy = elapsed(), sum(watch.total.values()) or math.inf
    save()
    print()
    if args.episodes:
        print(f"{episodes} games took {global_step - earlier:,} steps")
    if args.export_sb3:
        state = {"num_timesteps": global_step, "_n_updates": updates, "_n_calls": calls, "_episode_num": episodes}
        state |= {"exploration_rate": epsilon, "_current_progress_remaining": 1 - min(progress(), 1)}
        write_sb3(args.export_sb3, args, envs[0], networks, optimizer, state)
        print(f"{args.export_sb3}: stable_baselines3.DQN.load reads it")
    if interrupts:
        print(f"stopped; {folder / 'checkpoint.pt'} goes on with python {SCRIPT}.py --resume {folder}")
    else:
        scores = test(args.eval_episodes)
        print("  ".join(f"{name} {value:g}" for name, value in scores.items()))
        if args.video:
            print(write_gif(actor, args, device, folder / "videos"))
        print(f"watch it play: python {SCRIPT}.py --evaluate {folder} --render")
    if profiler:
        profiler.stop()
        profiler.export_chrome_trace(str(folder / "profile.json"))
        longest = profiler.key_averages().table(sort_by=f"self_{device.type}_time_total", row_limit=30)
        (folder / "profile.txt").write_text(longest)
    steps, learns = global_step - first_step, updates - first_update
    summary = {
        "script": SCRIPT,
        **machine(device),
        "precision": precision,
        "compiled": is_compiled,
        "cudagraph": graphs,
        "sdpa": sdpa[0].name.lower() if sdpa else None,
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
    (folder / "summary.json").write_text(json.dumps(summary, indent=2))
    writer.close()
    return summary


def parse() -> tuple[Args, dict[str, str]]:
    """The command line on top of the checkpoint's or zip's flags, on top of the environment, .env and the defaults.

    Also says, by flag, where the settings come from.
    """
    values, sources = settings()
    args = tyro.cli(Args, default=Args(**values), description=__doc__)
    name = args.resume or args.evaluate
    if name:
        saved = load_checkpoint("--resume" if args.resume else "--evaluate", name, args.run_dir)[1]["args"]
        values, sources = saved, dict.fromkeys(SETTINGS.values(), name)
    elif args.import_sb3:
        data = read_sb3(args.import_sb3)[0]
        plain = {flag: data[flag] for flag in PLAIN.split() if type(data.get(flag)) in (int, float)}
        plain["num_envs"] = data.get("n_envs", 1)
        sources = {"batch_size": args.import_sb3} | sources
        values = plain | values
    try:
        args = tyro.cli(Args, default=Args(**values), description=__doc__)
    except TypeError as error:
        refuse(f"{name}: made by another version of {SCRIPT}.py ({error})")
    given = {word.split("=")[0].lstrip("-").replace("-", "_").removeprefix("no_") for word in sys.argv[1:]}
    return args, sources | {flag: "the command line" for flag in SETTINGS.values() if flag in given}


if __name__ == "__main__":
    try:
        main(*parse())
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except RuntimeError as error:
        if "memory" not in str(error):
            raise
        refuse("out of memory: a smaller --batch-size, --buffer-size or --num-envs works")

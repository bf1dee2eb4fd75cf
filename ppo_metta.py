"""PPO for many agents of a MettaGrid arena. Games run on the training device, or in worker processes.

    python ppo_metta.py                                        # ten minutes, then an evaluation and a GIF
    python ppo_metta.py --bf16 --cudagraph                     # on a GPU
    python ppo_metta.py --env-id mettagrid                     # the real MettaGrid, in worker processes
    python ppo_metta.py --env-id MettaMemory-v0 --rnn gru      # a map where a memory helps
    python ppo_metta.py --evaluate latest --render             # watch the last agents play
    torchrun --nproc-per-node 2 ppo_metta.py                   # two processes train one policy

How to read it: `Agent` is the network, `gae` and `ppo_loss` are the algorithm, `Learner` is what an update does, and
`train` runs it from top to bottom.
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
from copy import deepcopy
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, Literal, NoReturn, get_args

# How long an idle thread spins. While another process keeps one of two cores busy, two threads are 1.4 times as fast
# with this. On a quiet machine it costs nothing to 16 %, by machine (benchmarks/pages/trials.md).
os.environ.setdefault("GOMP_SPINCOUNT", "4000")

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
import tyro
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.tensorboard import SummaryWriter

from envs.metta.arena import MettaArena
from envs.metta.batch import MettaBatch
from envs.metta.rules import VARIANTS, Rules
from envs.metta.view import TokenView
from envs.playing import play_parallel, show_in_terminal, write_gif
from envs.workers import LocalEnvs, SubprocEnvs, WorkerLost

SCRIPT = Path(__file__).stem
CHECKPOINT_VERSION = 8
EVAL_SEED = 2**31  # above every --seed
GIF_FRAMES = 300
RANK = int(os.environ.get("RANK", 0))  # torchrun sets these four
RANKS = int(os.environ.get("WORLD_SIZE", 1))
LOCAL_RANKS = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
RESTARTS = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


@dataclass
class Args:
    # Run
    max_seconds: float | None = None
    """training time in seconds, with evaluations, without warm-up (None: 600, or no limit with --total-timesteps)"""
    preset: Literal["default", "original", "ultra-fast"] = "default"
    """defaults of the other flags: ours, or Metta's (navigation with MinGRU): original 64 games, ultra-fast 512"""
    total_timesteps: int | None = None
    """agent steps to train for (None: no limit)"""
    seed: int = 1
    """seed of weights, games, exploration and minibatches"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto uses CUDA if there is one"""
    run_name: str | None = None
    """name of this run's folder (None: script, seed and time)"""
    run_dir: str = "runs"
    """folder of all runs"""

    # Environment
    env_id: Literal["MettaArena-v0", "MettaNavigation-v0", "MettaMemory-v0", "mettagrid"] = "MettaArena-v0"
    """a game of envs/metta/arena.py, or the real MettaGrid"""
    num_envs: int | None = None
    """parallel games, over all processes (None: 128 on a CPU, 8192 on CUDA, 32 of the real MettaGrid)"""
    rewards: Literal["auto", "hearts", "shaped", "work"] = "auto"
    """what is rewarded: hearts, also the first ore, battery and gear (shaped), or every item put into or taken from
    mines, generators and altars, whoever gets the heart (work); auto: work in the arena, else shaped"""
    env_config: str | None = None
    """with --env-id mettagrid: package.module:attribute of a MettaGridConfig (None: mines and altars)"""
    easy: bool = True
    """altars, armories and laseries of the arena ask for one item only"""
    instances: int | None = None
    """copies of the arena in a game, 1 to 4 (None: as the env-id has it)"""
    size: int | None = None
    """cells along a side of an instance (None: 25)"""
    agents: int | None = None
    """agents of an instance (None: as the env-id has it)"""
    vec_env: Literal["auto", "device", "subproc"] = "auto"
    """games on the training device, or in worker processes; auto: workers for the real MettaGrid only"""
    num_workers: int | None = None
    """worker processes; 0 plays in this one (None: at most one per core, or per two cores if the CPU also learns)"""
    async_factor: int = 2
    """groups of games: workers play one while the policy acts for the next"""

    # Algorithm
    learning_rate: float = 3e-3
    """Adam's learning rate"""
    rnn: Literal["none", "mingru", "gru", "lstm"] = "none"
    """memory of an agent"""
    network: Literal["token-bag", "box-cnn", "token-attention"] = "token-bag"
    """a linear layer over all tokens, two convolutions over a box of them, or attention between them"""
    hidden_size: int = 128
    """width of the layers and of the memory"""
    num_steps: int = 32
    """steps per agent in a rollout"""
    muon_learning_rate: float | None = None
    """Muon's, for the hidden layer; 0: Adam learns it too (None: 0 in the real MettaGrid, else 0.02)"""
    anneal_lr: bool = True
    """decay the learning rates to zero over the run, as half a cosine"""
    num_minibatches: int | None = None
    """minibatches per epoch, of whole segments (None: 16, or 32 on CUDA except with the real MettaGrid)"""
    bptt_horizon: int = 32
    """steps of a segment; gradients flow through its memory and no further"""
    update_epochs: int | None = None
    """epochs over each rollout; 0: the agents only play (None: 2 in the real MettaGrid, else 1)"""
    reward_scale: float = 10.0
    """factor of all rewards: small ones drown in the noise that Adam's steps leave in the values"""
    gamma: float | None = None
    """discount factor (None: 0.97 in the arena, 0.95 in navigation, 0.9 in the real MettaGrid)"""
    gae_lambda: float = 0.95
    """lambda of generalized advantage estimation"""
    rho_clip: float = 1.0
    """V-trace: highest policy ratio in a TD error"""
    c_clip: float = 1.0
    """V-trace: highest policy ratio in the sum of later TD errors"""
    norm_adv: bool = True
    """normalise the advantages of each minibatch"""
    clip_coef: float = 0.2
    """clipping range of the probability ratio"""
    vf_clip_coef: float = 10.0
    """clipping range of values around those of the rollout"""
    ent_coef: float | None = None
    """initial entropy coefficient (None: 0.001 in the real MettaGrid, else 0.005)"""
    end_ent_coef: float | None = None
    """final entropy coefficient, reached linearly (None: 0.0001 in the real MettaGrid, else 0.001)"""
    vf_coef: float = 0.5
    """value loss coefficient"""
    max_grad_norm: float = 0.5
    """maximum norm of the gradient"""

    # Speed
    bf16: bool = False
    """forward passes in bfloat16 (fp32 where the hardware has no bf16 units)"""
    fp16: bool = False
    """forward passes in float16 with gradient scaling (CUDA)"""
    tf32: bool = False
    """fp32 matmuls on tensor cores (CUDA)"""
    compile: bool = False
    """torch.compile the policy, the advantages and the loss, and on CUDA the games"""
    compile_mode: Literal["default", "reduce-overhead", "max-autotune"] = "default"
    """mode of torch.compile"""
    cudagraph: bool = False
    """capture rollout steps and updates as CUDA graphs (one process, --vec-env device)"""
    sdpa: Literal["auto", "flash", "efficient", "cudnn", "math"] = "auto"
    """attention kernel (--network token-attention); auto: the fastest that works"""
    threads: int | None = None
    """CPU threads (None: all cores that workers and other processes leave, 8 at most)"""

    # Input and output
    resume: str | None = None
    """continue a run, with its flags: a checkpoint, a run folder, or "latest" """
    evaluate: str | None = None
    """no training, play --eval-episodes episodes: with a checkpoint, a run folder, or "latest" """
    render: bool = False
    """with --evaluate: play one game in the terminal"""
    eval_every: float = 120.0
    """seconds between evaluations on a tenth of --eval-episodes (0: none)"""
    eval_episodes: int = 240
    """episodes of the final evaluation; each agent's counts"""
    log_every: float = 5.0
    """seconds between log lines"""
    checkpoint_every: float = 120.0
    """seconds between checkpoints (0: only at the end)"""
    video: bool = True
    """write a GIF of one game after the final evaluation (not of the real MettaGrid)"""
    wandb: bool = False
    """mirror TensorBoard to Weights & Biases (pip install wandb)"""


NOT_RESUMED = ["run_dir", "run_name", "env_config", "resume", "evaluate", "render", "video", "wandb"]
MAY_BE_0 = ["seed", "eval_every", "checkpoint_every", "num_workers", "update_epochs", "gamma", "gae_lambda"]
MAY_BE_0 += ["ent_coef", "end_ent_coef", "muon_learning_rate"]
HIGHEST = {
    "gamma": 1,
    "gae_lambda": 1,
    "seed": EVAL_SEED - 1,
    "threads": 256,
    "num_workers": 1024,
    "eval_episodes": 100_000,
}
COLUMNS = {"MettaArena-v0": 0, "MettaNavigation-v0": 1, "MettaMemory-v0": 0, "mettagrid": 2}  # of DEFAULTS
DEFAULTS = {  # of flags that are None or auto
    "vec_env": ("device", "device", "subproc"),
    "rewards": ("work", "shaped", "shaped"),
    "num_envs": (128, 128, 32),
    "num_minibatches": (16, 16, 16),
    "update_epochs": (1, 1, 2),
    "muon_learning_rate": (0.02, 0.02, 0.0),
    "gamma": (0.97, 0.95, 0.9),  # a heart takes several errands in the arena, one in the others
    "ent_coef": (0.005, 0.005, 0.001),
    "end_ent_coef": (0.001, 0.001, 0.0001),
}
METTA = Args(
    env_id="MettaNavigation-v0",
    vec_env="subproc",
    rnn="mingru",
    muon_learning_rate=0.0,
    update_epochs=1,
    learning_rate=3e-4,
    reward_scale=1.0,
    gamma=0.99,
    clip_coef=0.1,
    vf_clip_coef=0.1,
    ent_coef=0.01,
    end_ent_coef=0.01,
    vf_coef=0.44,
)
PRESETS = {
    "default": Args(),
    "original": replace(
        METTA,
        preset="original",
        num_envs=64,
        num_workers=1,
        async_factor=1,
        num_steps=64,
        num_minibatches=32,
        bptt_horizon=64,
    ),
    "ultra-fast": replace(
        METTA,
        preset="ultra-fast",
        num_envs=512,
        async_factor=8,
        num_steps=128,
        num_minibatches=8,
    ),
}


def fill_defaults(args: Args, device: torch.device) -> Args:
    """A copy of `args` with every default filled in. Ends the program if a flag cannot work."""
    args = replace(args)
    is_real = args.env_id == "mettagrid"
    if device.type == "cuda" and not is_real:  # there a step of a thousand games takes about as long as one of one
        args.num_envs = 8192 if args.num_envs is None else args.num_envs
        args.num_minibatches = 32 if args.num_minibatches is None else args.num_minibatches
    for name, defaults in DEFAULTS.items():
        if getattr(args, name) in (None, "auto"):
            setattr(args, name, defaults[COLUMNS[args.env_id]])
    if args.max_seconds is None and args.total_timesteps is None:
        args.max_seconds = 600.0

    for name, value in vars(args).items():
        if type(value) not in (int, float):
            continue
        highest = HIGHEST.get(name, sys.maxsize)
        lowest = "0 or more" if name in MAY_BE_0 else "above 0"
        if not 0 <= value <= highest or (value == 0 and name not in MAY_BE_0):  # NaN fails, too
            fail(f"--{name.replace('_', '-')} {value}: must be {lowest} and at most {highest:,}")
    if args.num_envs % RANKS:
        fail(f"--num-envs {args.num_envs}: must be a multiple of the {RANKS} processes")
    num_envs = args.num_envs // RANKS
    cores = max(CORES // LOCAL_RANKS, 1)
    if args.num_workers is None:  # as many as the games can be dealt out to evenly
        args.num_workers = cores if device.type == "cuda" else max(cores // 2, 1)
        while args.num_workers > 1 and num_envs % (args.num_workers * args.async_factor):
            args.num_workers -= 1
    uses_workers = args.vec_env == "subproc" and args.num_workers > 0
    if args.threads is None:  # a thread that shares its core with a worker holds up all others
        args.threads = min(max(cores - args.num_workers * uses_workers, 1), 8)
    if uses_workers and num_envs % (args.num_workers * args.async_factor):
        fail(f"--num-envs {args.num_envs}: must be a multiple of {RANKS} processes x --num-workers x --async-factor")
    if args.vec_env == "device" and is_real:
        fail("--vec-env device: the real MettaGrid runs on the CPU; subproc works, also with --num-workers 0")
    if args.env_config is not None and not is_real:
        fail(f"--env-config {args.env_config}: needs --env-id mettagrid")
    if args.sdpa != "auto" and args.network != "token-attention":
        fail(f"--sdpa {args.sdpa}: needs --network token-attention")
    if args.network == "token-attention" and args.hidden_size % AttentionLayer.HEADS:
        fail(f"--hidden-size {args.hidden_size}: attention needs a multiple of {AttentionLayer.HEADS}")
    if args.num_steps % args.bptt_horizon:
        fail(f"--bptt-horizon {args.bptt_horizon}: must divide --num-steps {args.num_steps}")
    if args.bf16 and args.fp16:
        fail("--bf16 --fp16: choose one of them")
    for name in ("fp16", "tf32", "cudagraph"):
        if getattr(args, name) and device.type != "cuda":
            fail(f"--{name}: needs CUDA; --no-{name} works")
    if args.cudagraph and (RANKS > 1 or args.vec_env == "subproc"):
        fail("--cudagraph: needs one process and --vec-env device; --no-cudagraph works")
    if args.cudagraph and args.compile and args.compile_mode != "default":
        fail(f"--compile-mode {args.compile_mode}: captures graphs by itself; with --cudagraph only default works")
    if "/" in (args.run_name or ""):
        fail(f"--run-name {args.run_name}: must be a name without /")
    if args.render and (args.evaluate is None or is_real):
        fail("--render: needs --evaluate PATH, of a run in the embedded arena")
    if args.resume is not None and args.evaluate is not None:
        fail("--resume --evaluate: choose one of them")
    return args


def rules_of(args: Args) -> dict:
    """Rules of the embedded arena, as keywords."""
    rules = VARIANTS.get(args.env_id, {}).copy()
    for name in ("easy", "rewards", "size", "agents", "instances"):
        value = getattr(args, name)
        if value is not None:
            rules[name] = value
    try:
        Rules(**rules)
    except ValueError as error:
        fail(f"--size, --agents, --instances: {error}")
    return rules


def make_games(args: Args, num_games: int, device: torch.device | str, seed: int, evaluation: bool = False) -> Any:
    """A batch of games, reset: arenas on `device`, or real ones on the CPU.

    In training the first episodes are of any length, so that they do not all end together.
    """
    if args.env_id != "mettagrid":
        games = MettaBatch(num_games, device, seed, **rules_of(args), random_first_length=not evaluation)
        games.reset()
        return games
    try:
        from envs.metta.real import TorchMettaGrid

        return TorchMettaGrid(num_games, args.env_config, seed, random_first_length=not evaluation)
    except Exception as error:  # a configuration is the user's own code
        fail(f"--env-id mettagrid --env-config {args.env_config}: {error}")


def games_seed(seed: int, global_step: int, worker: int = 0, group: int = 0) -> int:
    """Seed of the games and noise of this process, or of one group of a worker, from `global_step` on.

    No two are the same, nor is one repeated after a resume. A single process starts with --seed itself.
    """
    stream = [RANK, global_step, worker, group]
    if any(stream):
        seed = int(np.random.SeedSequence([seed, *stream]).generate_state(1)[0]) % EVAL_SEED
    return seed


def make_envs(args: Args, device: torch.device, global_step: int, obs_shape: tuple) -> LocalEnvs | SubprocEnvs:
    """The games of this process. `obs_shape` is that of one game: agents, tokens, 3."""
    num_envs = args.num_envs // RANKS
    if args.vec_env == "device" or args.num_workers == 0:
        games_device = device if args.vec_env == "device" else "cpu"
        return LocalEnvs(make_games(args, num_envs, games_device, games_seed(args.seed, global_step)))
    num_games = num_envs // (args.num_workers * args.async_factor)
    num_agents, *token_shape = obs_shape
    seeds = []
    for worker in range(args.num_workers):
        seeds.append([games_seed(args.seed, global_step, worker, group) for group in range(args.async_factor)])
    factory = partial(make_games, args, num_games, "cpu")
    return SubprocEnvs(factory, seeds, (num_games * num_agents, *token_shape), pin_memory=device.type == "cuda")


# ---------------------------------------------------------------------------------------------------- networks


class SparseLinear(torch.autograd.Function):
    """Sum of `weight` times the rows of `table` that each bag names: a linear layer on inputs that are nearly all 0.

    Forward and backward are the same operation: a row of the gradient is a bag of rows of the output's gradient.
    PyTorch's own backward of embedding_bag takes twice as long on a CPU.
    """

    @staticmethod
    def forward(ctx, table, row, bag_start, weight):  # (rows, width), (tokens,), (B,) first token, (tokens,)
        ctx.save_for_backward(row, bag_start, weight)
        ctx.num_rows = len(table)
        return F.embedding_bag(row, table, bag_start, mode="sum", per_sample_weights=weight)

    @staticmethod
    def backward(ctx, grad):
        row, bag_start, weight = ctx.saved_tensors
        row, order = row.sort()
        bag_length = torch.diff(bag_start, append=bag_start.new_tensor([len(row)]))
        bag = torch.arange(len(bag_start), dtype=row.dtype).repeat_interleave(bag_length)
        row_start = torch.searchsorted(row, torch.arange(ctx.num_rows, dtype=row.dtype), out_int32=True)
        bag = bag.index_select(0, order)
        weight = weight.index_select(0, order)
        table_grad = F.embedding_bag(bag, grad.contiguous(), row_start, mode="sum", per_sample_weights=weight)
        return table_grad, None, None, None


class TokenBag(nn.Module):
    """A linear layer over all channels in all cells.

    On a CPU only tokens that an agent has are looked up, a hundredth of the inputs; a GPU multiplies all.
    """

    def __init__(self, view: TokenView, width: int) -> None:
        super().__init__()
        self.view = view
        table = torch.randn(view.num_channels * view.num_cells, width)
        self.table = nn.Parameter(table * 60**-0.5)  # as for a layer with as many inputs as an agent has tokens
        self.bias = nn.Parameter(torch.zeros(width))
        self.num_outputs = width

    def forward(self, tokens: Tensor, heading: Tensor) -> Tensor:
        return F.relu(self.sparse(tokens, heading) if tokens.device.type == "cpu" else self.dense(tokens, heading))

    def sparse(self, tokens: Tensor, heading: Tensor) -> Tensor:
        row, bag_start, weight = self.view.bags(tokens, heading)
        return SparseLinear.apply(self.table, row, bag_start, weight) + self.bias

    def dense(self, tokens: Tensor, heading: Tensor) -> Tensor:
        return F.linear(self.view.box(tokens, heading), self.table.T, self.bias)


class BoxCNN(nn.Module):
    """Two convolutions over a box with a plane for each channel, as Metta's own policy has them."""

    def __init__(self, view: TokenView) -> None:
        super().__init__()
        self.view = view
        self.conv1 = nn.Conv2d(view.num_channels, 64, 5, 3, padding=1)
        self.conv2 = nn.Conv2d(64, 64, 3, padding=1)
        rows, columns = view.window
        self.num_outputs = 64 * ((rows - 3) // 3 + 1) * ((columns - 3) // 3 + 1) + view.num_channels

    def forward(self, tokens: Tensor, heading: Tensor) -> Tensor:
        box = self.view.box(tokens, heading).unflatten(1, (self.view.num_channels, self.view.num_cells))
        planes = box[:, :, :-1].unflatten(2, self.view.window)
        x = F.relu(self.conv2(F.relu(self.conv1(planes))))
        return torch.cat([x.flatten(1), box[:, :, -1]], 1)  # the last cell has no place in the window


SDPA_KERNELS = {  # by --sdpa; the first that works is used
    "auto": [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH],
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}


class AttentionLayer(nn.Module):
    """Pre-norm transformer layer: `query` (B, queries, width) attends to x (B, tokens, width) where `mask` (B, tokens)
    is true."""

    HEADS = 4

    def __init__(self, width: int, sdpa: str) -> None:
        super().__init__()
        self.kernels = SDPA_KERNELS[sdpa]
        self.norm1 = nn.LayerNorm(width)
        self.q = nn.Linear(width, width)
        self.kv = nn.Linear(width, 2 * width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor, query: Tensor, mask: Tensor) -> Tensor:
        q = self.q(self.norm1(query)).unflatten(2, (self.HEADS, -1)).transpose(1, 2)
        k, v = self.kv(self.norm1(x)).unflatten(2, (2, self.HEADS, -1)).permute(2, 0, 3, 1, 4)
        # Evaluation is in fp32, for which flash and cuDNN have no kernel on CUDA.
        kernels = self.kernels if self.training else SDPA_KERNELS["auto"]
        with sdpa_kernel(kernels, set_priority=True):
            attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None, None])
        query = query + self.out(attended.transpose(1, 2).flatten(2))
        return query + self.down(F.relu(self.up(self.norm2(query))))


class TokenAttention(nn.Module):
    """A transformer layer between all tokens, then one query attends to them. A token is its channel plus its cell."""

    def __init__(self, view: TokenView, width: int, sdpa: str) -> None:
        super().__init__()
        self.view = view
        self.channel = nn.Embedding(view.num_channels, width)
        self.cell = nn.Embedding(view.num_cells, width)
        self.query = nn.Parameter(torch.randn(width))
        self.layer1 = AttentionLayer(width, sdpa)
        self.layer2 = AttentionLayer(width, sdpa)
        self.norm = nn.LayerNorm(width)
        self.num_outputs = width

    def forward(self, tokens: Tensor, heading: Tensor) -> Tensor:
        if tokens.device.type == "cpu":
            tokens = self.view.trim(tokens)
        mask = self.view.is_token(tokens)
        channel, cell, weight = self.view.lookup(self.view.words(tokens, heading))
        x = self.channel(channel) * weight[..., None] + self.cell(cell)
        x = self.layer1(x, x, mask)
        query = self.query.expand(len(x), 1, -1)
        return self.norm(self.layer2(x, query, mask)).squeeze(1)


def mingru(x: Tensor, state: Tensor, episode_start: Tensor) -> tuple[Tensor, Tensor]:
    """MinGRU (Feng et al. 2024, appendix B): its gates see only the inputs, so all of its matmuls come before it.

    x (T, B, 2 * width), state (B, width) before it, episode_start (T, B) bool -> states (T, B, width) and the last one.
    All in float32, under autocast too. A state is zero where an episode starts.
    """
    gate, candidate = x.float().chunk(2, 2)
    z = gate.sigmoid()
    new = z * torch.where(candidate >= 0, candidate + 0.5, candidate.sigmoid())
    keep = (1 - z) * ~episode_start[:, :, None]
    states = []
    for new_t, keep_t in zip(new.unbind(), keep.unbind()):
        state = torch.addcmul(new_t, keep_t, state)
        states.append(state)
    return torch.stack(states), state


def unroll(cell: nn.Module, x: Tensor, state: Tensor, episode_start: Tensor) -> tuple[Tensor, Tensor]:
    """An nn.GRUCell or nn.LSTMCell over x (T, B, width), as `mingru`. The state of an LSTM is (B, 2 * width)."""
    outputs = []
    for x_t, start in zip(x.unbind(), episode_start.unbind()):
        state = state * ~start[:, None]
        if isinstance(cell, nn.LSTMCell):
            output, memory = cell(x_t, state.chunk(2, 1))
            state = torch.cat([output, memory], 1)
        else:
            output = state = cell(x_t, state)
        outputs.append(output)
    return torch.stack(outputs), state


class Agent(nn.Module):
    """Policy and value of agents, with memory or without (then `state_size` is 0).

    tokens (T, B, tokens, 3) uint8, state (B, state_size) before them, episode_start (T, B) bool
    -> logits (T, B, actions) and value (T, B), both fp32, and state (B, state_size) after them.
    """

    def __init__(self, args: Args, games: Any, device: torch.device) -> None:
        super().__init__()
        view = TokenView(games.features, games.view_shape, device)
        self.view = view
        width = args.hidden_size
        if args.network == "token-bag":
            self.encoder = TokenBag(view, width)
            if args.compile:  # only then: the compiler takes seconds to import
                self.encoder.sparse = torch.compiler.disable(self.encoder.sparse)
        elif args.network == "box-cnn":
            self.encoder = BoxCNN(view)
        else:
            self.encoder = TokenAttention(view, width, args.sdpa)
        self.rnn = args.rnn
        self.state_size = {"none": 0, "mingru": width, "gru": width, "lstm": 2 * width}[args.rnn]
        self.hidden = nn.Linear(self.encoder.num_outputs, 2 * width if args.rnn == "mingru" else width)
        if args.rnn in ("gru", "lstm"):
            self.cell = (nn.GRUCell if args.rnn == "gru" else nn.LSTMCell)(width, width)
            nn.init.orthogonal_(self.cell.weight_ih)
            nn.init.orthogonal_(self.cell.weight_hh)
        self.heads = nn.Linear(width, games.num_actions + 1)  # the policy's logits, then the value
        nn.init.orthogonal_(self.heads.weight[:-1], 0.01)
        nn.init.orthogonal_(self.heads.weight[-1:], 1.0)
        nn.init.zeros_(self.heads.bias)
        self.to(device)

    def forward(self, tokens: Tensor, state: Tensor, episode_start: Tensor) -> tuple:
        steps_and_agents = tokens.shape[:2]
        tokens = tokens.flatten(0, 1)
        heading = self.view.heading(tokens)
        x = self.hidden(self.encoder(tokens, heading)).unflatten(0, steps_and_agents)
        if self.rnn == "mingru":  # x are the gate and the candidate
            x, state = mingru(x, state, episode_start)
        else:
            x = F.relu(x)
        if self.rnn in ("gru", "lstm"):
            with torch.autocast(x.device.type, enabled=False):
                x, state = unroll(self.cell, x.float(), state, episode_start)
        outputs = self.heads(x).float()
        logits = outputs[..., :-1]
        if self.view.orientation is not None:
            seen_action = self.view.seen_action[heading].unflatten(0, steps_and_agents)
            logits = logits.gather(2, seen_action)
        return logits, outputs[..., -1], state


# ------------------------------------------------------------------------------------------------ the algorithm


def gae(
    reward: Tensor,
    value: Tensor,
    done: Tensor,
    ratio: Tensor,
    gamma: float,
    gae_lambda: float,
    rho_clip: float,
    c_clip: float,
) -> Tensor:
    """Advantages (steps, agents), fp32: GAE (Schulman et al. 2016, equation 16) with V-trace's clipped ratios.

    delta_t = min(rho_clip, ratio_t) * (r_t + gamma V(s_t+1) - V(s_t)) and
    A_t = delta_t + gamma lambda min(c_clip, ratio_t) A_t+1 (Espeholt et al. 2018, section 4.1).

    `reward`, `done` and `ratio` are (steps, agents), `value` is (steps + 1, agents). Nothing is passed back over the
    end of an episode. If it was truncated, its last reward includes gamma times the value of its last observation.
    """
    delta = ratio.clamp(max=rho_clip) * (reward + gamma * value[1:] * ~done - value[:-1])
    discount = gamma * gae_lambda * ratio.clamp(max=c_clip) * ~done
    lastgaelam = torch.zeros_like(reward[0])
    advantages = []
    for step in reversed(range(len(reward))):
        lastgaelam = delta[step] + discount[step] * lastgaelam
        advantages.append(lastgaelam)
    return torch.stack(advantages[::-1])


LOSSES = ["pg_loss", "v_loss", "entropy", "approx_kl"]


def ppo_loss(
    logits: Tensor,
    value: Tensor,
    action: Tensor,
    old_logprob: Tensor,
    old_value: Tensor,
    advantage: Tensor,
    returns: Tensor,
    clip_coef: float,
    vf_clip_coef: float,
    vf_coef: float,
    ent_coef: Tensor,
) -> tuple:
    """PPO's loss (Schulman et al. 2017, equations 7 and 9) of `logits` (T, B, actions); the other tensors are (T, B).

    Values are clipped too. Also returns the means that LOSSES names, and the ratios (T, B); `approx_kl` is "k3" of
    Schulman 2020.
    """
    logprobs = F.log_softmax(logits, 2)
    logprob = logprobs.gather(2, action[..., None]).squeeze(2)
    logratio = logprob - old_logprob
    ratio = logratio.exp()
    clipped_ratio = ratio.clamp(1 - clip_coef, 1 + clip_coef)
    pg_loss = -torch.min(advantage * ratio, advantage * clipped_ratio).mean()
    clipped_value = old_value + (value - old_value).clamp(-vf_clip_coef, vf_clip_coef)
    v_loss = 0.5 * torch.max((value - returns) ** 2, (clipped_value - returns) ** 2).mean()
    entropy = -(logprobs.exp() * logprobs).sum(2).mean()
    loss = pg_loss - ent_coef * entropy + vf_coef * v_loss
    approx_kl = (ratio - 1 - logratio).mean()
    means = torch.stack([pg_loss, v_loss, entropy, approx_kl]).detach()
    return loss, means, ratio.detach()


def sample(logits: Tensor, generator: torch.Generator) -> Tensor:
    """An action for each row of logits (B, actions), by the Gumbel trick: no CUDA synchronisation."""
    noise = torch.empty_like(logits).exponential_(generator=generator)
    return (logits - noise.log()).argmax(1)


def progress_of(args: Args, global_step: int, seconds: float) -> float:
    """Fraction of the run that is done; 1 ends it."""
    by_steps = global_step / (args.total_timesteps or math.inf)
    by_seconds = seconds / (args.max_seconds or math.inf)
    return min(max(by_steps, by_seconds), 1)


class Muon(torch.optim.Optimizer):
    """Nesterov momentum, with steps brought near an orthogonal matrix (Jordan et al. 2024).

    torch.optim.Muon multiplies in bfloat16: on a CPU without units for that it took a quarter of a run. Its learning
    rate is a number, which a CUDA graph would freeze. Gradients that overflowed in float16 count as zero.
    """

    def __init__(self, weight: Tensor, lr: Tensor) -> None:
        super().__init__([weight], {})
        self.weight = weight
        self.lr = lr
        self.momentum = torch.zeros_like(weight)

    @torch.no_grad()
    def step(self) -> None:
        beta = 0.95
        grad = self.weight.grad.nan_to_num(0, 0, 0)
        self.momentum.lerp_(grad, 1 - beta)
        update = orthogonalize(grad.lerp(self.momentum, beta))
        rows, columns = self.weight.shape
        self.weight.sub_(self.lr * max(1, rows / columns) ** 0.5 * update)


def orthogonalize(matrix: Tensor) -> Tensor:
    """The matrix with singular values near 1, by five rounds of a polynomial (Newton-Schulz)."""
    rows, columns = matrix.shape
    if rows > columns:  # products of the shorter side are cheaper
        return orthogonalize(matrix.T).T
    x = matrix / (matrix.norm() + 1e-7)
    for _ in range(5):
        square = x @ x.T
        x = 3.4445 * x + (2.0315 * square @ square - 4.775 * square) @ x
    return x


class Learner:
    """What is trained, the rollout, and an update. All that an update changes is in tensors that a CUDA graph can keep.

    A rollout is `num_steps` steps of all agents, time first. A segment is `bptt_horizon` steps in a row of one agent.
    """

    def __init__(self, args: Args, game: Any, obs: Tensor, device: torch.device, dtype: torch.dtype) -> None:
        self.args = args
        # A fresh context for each forward pass: a longer one keeps using the weights as they were cast at its start.
        is_half = dtype != torch.float32
        self.autocast = partial(torch.autocast, device.type, dtype, enabled=is_half, cache_enabled=False)
        self.agent = Agent(args, game, device)
        self.weights = list(self.agent.parameters())
        hidden = self.agent.hidden.weight
        by_adam = [weight for weight in self.weights if weight is not hidden or not args.muon_learning_rate]
        self.muon = Muon(hidden, torch.tensor(args.muon_learning_rate, device=device))
        learning_rate = torch.tensor(args.learning_rate, device=device)
        self.adam = torch.optim.Adam(by_adam, lr=learning_rate, eps=1e-5, fused=True, capturable=args.cudagraph)
        self.scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)

        zeros = partial(torch.zeros, device=device)
        num_agents = len(obs)
        shape = (args.num_steps, num_agents)
        rows = args.num_steps // args.bptt_horizon + 1
        self.obs = zeros(args.num_steps, *obs.shape, dtype=torch.uint8)
        self.state = zeros(rows, num_agents, self.agent.state_size)  # memory before each segment; nobody reads the last
        self.episode_start = zeros(shape, dtype=torch.bool)
        self.action = zeros(shape, dtype=torch.int64)
        self.logprob = zeros(shape)
        self.value = zeros(args.num_steps + 1, num_agents)
        self.ratio = zeros(shape)
        self.reward = zeros(shape)
        self.done = zeros(shape, dtype=torch.bool)
        self.truncated = zeros(shape, dtype=torch.bool)  # each agent at most once
        self.final_obs = zeros(obs.shape, dtype=torch.uint8)  # of the truncated episode
        self.final_state = zeros(num_agents, self.agent.state_size)
        self.advantage = zeros(shape)
        self.segments = zeros((rows - 1) * num_agents // args.num_minibatches, dtype=torch.int64)  # of the minibatch
        self.ent_coef = torch.tensor(args.ent_coef, device=device)
        self.loss_sum = zeros(len(LOSSES))  # since the last log

    def index(self) -> Tensor:
        """(bptt_horizon, B): the steps of `segments` (B,), in the flat rollout."""
        horizon = self.args.bptt_horizon
        num_agents = self.obs.shape[1]
        agent = self.segments % num_agents
        step = self.segments // num_agents * horizon + torch.arange(horizon, device=agent.device)[:, None]
        return step * num_agents + agent

    def estimate_advantages(self) -> None:
        """With the values and ratios that the updates so far have left."""
        args = self.args
        coefs = (args.gamma, args.gae_lambda, args.rho_clip, args.c_clip)
        self.advantage.copy_(gae(self.reward, self.value, self.done, self.ratio, *coefs))

    def minibatch_loss(self, index: Tensor, advantage: Tensor) -> tuple:
        """Loss on `segments`, whose steps are at `index`; the means that LOSSES names; new values and ratios."""
        obs = self.obs.flatten(0, 1)[index]
        state = self.state.flatten(0, 1)[self.segments]
        with self.autocast():
            logits, value, _ = self.agent(obs, state, self.episode_start.flatten()[index])
        old_value = self.value.flatten()[index]
        loss, means, ratio = ppo_loss(
            logits,
            value,
            self.action.flatten()[index],
            self.logprob.flatten()[index],
            old_value,
            advantage,
            self.advantage.flatten()[index] + old_value,
            self.args.clip_coef,
            self.args.vf_clip_coef,
            self.args.vf_coef,
            self.ent_coef,
        )
        return loss, means, value.detach(), ratio

    def update(self) -> None:
        """On the minibatch `segments`."""
        args = self.args
        index = self.index()
        mb_advantage = self.advantage.flatten()[index]
        if args.norm_adv:
            mb_advantage = mb_advantage - mean_over_ranks(mb_advantage.mean())
            mb_advantage = mb_advantage / (mean_over_ranks(mb_advantage.square().mean()).sqrt() + 1e-8)
        loss, means, value, ratio = self.minibatch_loss(index, mb_advantage)
        finite = loss.isfinite()  # others would reach all advantages of this rollout
        for stored, new in ((self.value.view(-1), value), (self.ratio.view(-1), ratio)):
            stored[index] = torch.where(finite, new, stored[index])
        self.loss_sum.add_(means)
        self.agent.zero_grad()
        self.scaler.scale(loss).backward()
        average_gradients(self.weights)  # before `unscale_`: all ranks skip an update that overflows in float16
        self.scaler.unscale_(self.adam)
        if args.muon_learning_rate:
            self.scaler.unscale_(self.muon)
        nn.utils.clip_grad_norm_(self.weights, args.max_grad_norm)
        self.scaler.step(self.adam)
        if args.muon_learning_rate:
            self.muon.step()
        self.scaler.update()


# --------------------------------------------------------------------------------------------------- evaluation


def make_player(agent: Agent, num_agents: int, device: torch.device):
    """A policy that nobody learns from. It draws actions as in training: agents that always take the likeliest action
    get stuck in front of others of their kind."""
    generator = torch.Generator(device).manual_seed(EVAL_SEED)
    state = torch.zeros(num_agents, agent.state_size, device=device)
    no_start = torch.zeros(1, num_agents, dtype=torch.bool, device=device)

    @torch.no_grad()
    def act(obs):
        agent.eval()
        logits, _, next_state = agent(obs.to(device)[None], state, no_start)
        agent.train()
        state.copy_(next_state)
        return sample(logits[0], generator)

    return act


def evaluate(agent: Agent, args: Args, episodes: int, device: torch.device) -> dict:
    """Hearts of `episodes` agents, rounded up to whole games: whole episodes on maps that training never uses."""
    # On the CPU: there a step of few games takes less time than its launch on a GPU.
    agents_per_game = len(make_games(args, 1, "cpu", EVAL_SEED).obs)
    games = make_games(args, math.ceil(episodes / agents_per_game), "cpu", EVAL_SEED, evaluation=True)
    obs = games.obs
    num_agents = len(obs)
    act = make_player(agent, num_agents, device)
    hearts = torch.zeros(num_agents)
    playing = torch.ones(num_agents, dtype=torch.bool)
    while playing.any():
        obs, _, terminated, truncated, info = games.step(act(obs).cpu())
        first_end = (terminated | truncated) & playing
        hearts = torch.where(first_end, info["hearts"], hearts)
        playing &= ~first_end
    return {
        "eval_score_mean": hearts.mean().item(),
        "eval_score_max": hearts.max().item(),
        "eval_episodes": num_agents,
    }


def watch_game(agent: Agent, args: Args, device: torch.device, render_mode: str):
    """Frames of one game."""
    arena = MettaArena(render_mode, **rules_of(args), random_first_length=False)
    act = make_player(agent, arena.rules.num_agents, device)
    return play_parallel(arena, lambda obs: act(torch.as_tensor(obs)).tolist(), EVAL_SEED)


def report(agent: Agent, args: Args, device: torch.device, scores: dict, folder: Path) -> None:
    """Print the scores and write the GIF."""
    print("  ".join(f"{name} {value:g}" for name, value in scores.items()))
    if args.video and args.env_id != "mettagrid":  # the real MettaGrid cannot be drawn
        frames = islice(watch_game(agent, args, device, "rgb_array"), GIF_FRAMES)
        write_gif(frames, folder / "videos" / "metta.gif")


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
        if min(checkpoint["global_step"], checkpoint["elapsed"]) < 0:
            raise ValueError("its counters are negative")
    except Exception as error:
        problem = f"{path} cannot be loaded ({type(error).__name__}: {error})"
        fail(f"--{flag} {name}: {problem}; a checkpoint, a run folder or latest works")
    return path, checkpoint


def load_adam(optimizer: torch.optim.Adam, saved: dict) -> None:
    """Fused Adam would read moments of another shape past their end."""
    optimizer.load_state_dict({"state": saved, "param_groups": optimizer.state_dict()["param_groups"]})
    for weight in optimizer.param_groups[0]["params"] if saved else []:  # nothing is saved before the first update
        moments = optimizer.state[weight]
        if not moments["exp_avg"].shape == moments["exp_avg_sq"].shape == weight.shape:
            raise ValueError("Adam's moments have other shapes than the weights")


def parse_args() -> Args:
    """The command line. With --resume and --evaluate the flags of the checkpoint are its defaults."""
    args = tyro.cli(Args, description=__doc__)
    folder = Path(args.run_dir) / (args.run_name or "")
    if RESTARTS and args.run_name and (folder / "checkpoint.pt").exists():  # torchrun --max-restarts
        args.resume = str(folder)
    if args.resume is None and args.evaluate is None:
        return tyro.cli(Args, default=PRESETS[args.preset], description=__doc__)
    path, checkpoint = load_checkpoint(args)
    saved = Args(**checkpoint["args"])
    if args.preset not in ("default", saved.preset):
        fail(f"--preset {args.preset}: a new run only; this one has --preset {saved.preset}")
    if saved.env_config is not None and args.env_config is None:
        fail(f"{path}: needs --env-config {saved.env_config} on the command line, as a checkpoint does not choose code")
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
    torch.set_flush_denormal(True)  # denormal numbers cost a run two thirds of its updates/s
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high" if args.tf32 else "highest")
    torch.backends.cudnn.allow_tf32 = args.tf32  # of convolutions, on by default
    dtype = pick_precision(args, device)
    if args.evaluate is None:
        return train(args, device, dtype)

    path, checkpoint = load_checkpoint(args)
    agent = Agent(args, make_games(args, 1, "cpu", EVAL_SEED), device)
    try:
        agent.load_state_dict(checkpoint["agent"])
    except Exception as error:
        fail(f"--evaluate {args.evaluate}: {type(error).__name__}: {error}")
    if RANK > 0:
        return {}
    if args.render:
        show_in_terminal(watch_game(agent, args, device, "ansi"), MettaArena.metadata["render_fps"])
        return {}
    print(f"evaluation: {args.eval_episodes:,} episodes")
    scores = evaluate(agent, args, args.eval_episodes, device)
    report(agent, args, device, scores, path.parent)
    return scores


def train(args: Args, device: torch.device, dtype: torch.dtype) -> dict:
    start_time = time.perf_counter()
    if RANKS > 1:
        join_ranks()
    signals = catch_signals()

    # --- agents and games, new or from a checkpoint ---------------------------------------------------------------
    global_step = 0
    seconds_before = 0.0  # of the run that is resumed
    same_games = False
    can_save_games = args.vec_env == "device" and RANKS == 1
    games_of = [device.type, args.num_envs, can_save_games]
    folder = Path(args.run_dir) / (args.run_name or f"{SCRIPT}__{args.seed}__{time.strftime('%Y%m%d-%H%M%S')}")
    if args.resume is not None:
        path, checkpoint = load_checkpoint(args)
        folder = path.parent
        global_step = checkpoint["global_step"]
        seconds_before = checkpoint["elapsed"]
        same_games = can_save_games and checkpoint.get("games_of") == games_of
        if not same_games:
            print("new games: only those of one process, with the same --device and --num-envs, are in a checkpoint")
    progress = progress_of(args, global_step, seconds_before)
    if progress == 1:
        fail(f"--resume {args.resume}: the run is over; a larger --total-timesteps or --max-seconds works")

    game = make_games(args, 1, "cpu", EVAL_SEED)  # for the shapes
    num_agents = len(game.obs) * args.num_envs // RANKS
    num_segments = args.num_steps // args.bptt_horizon * num_agents
    if args.num_steps > game.max_steps:  # a rollout has room for one truncation of each agent
        fail(f"--num-steps {args.num_steps}: must be at most {game.max_steps}, the length of an episode")
    if num_segments % args.num_minibatches:
        fail(f"--num-minibatches {args.num_minibatches}: must divide the {num_segments} segments of a rollout")
    envs = make_envs(args, device, global_step, game.obs.shape)
    generator = torch.Generator(device).manual_seed(games_seed(args.seed, global_step))
    learner = Learner(args, game, envs.obs, device, dtype)
    agent = learner.agent
    state = torch.zeros_like(learner.final_state)
    episode_start = torch.zeros_like(learner.done[0])  # whether an episode starts with `obs`
    if args.resume is not None:
        try:
            agent.load_state_dict(checkpoint["agent"])
            load_adam(learner.adam, checkpoint["optimizer"])
            learner.muon.momentum.copy_(checkpoint["muon"])
            learner.scaler.load_state_dict(checkpoint["scaler"])
            if same_games:
                envs.games.load_state_dict(checkpoint["envs"])
                generator.set_state(checkpoint["generator"])
                state.copy_(checkpoint["state"])
                episode_start.copy_(checkpoint["episode_start"])
        except Exception as error:
            fail(f"--resume {args.resume}: {type(error).__name__}: {error}")
    learning_rate = learner.adam.param_groups[0]["lr"]  # a tensor, as all that changes in a CUDA graph
    obs = envs.obs.to(device, copy=True)  # what each agent acts on next

    @torch.no_grad()
    def policy(obs, state, episode_start):
        """Logits (B, actions), values (B,) and the next memory (B, state_size)."""
        with learner.autocast():
            logits, value, state = agent(obs[None], state, episode_start[None])
        return logits[0], value[0], state

    if args.sdpa != "auto":
        try:
            policy(obs[:1], state[:1], episode_start[:1])
        except RuntimeError as error:
            fail(f"--sdpa {args.sdpa}: does not run here in {dtype} ({error}); auto works")
    writer = open_run_folder(args, folder, global_step) if RANK == 0 else None
    device_name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu, {args.threads} threads"
    precision = str(dtype).removeprefix("torch.")
    rollout_size = args.num_steps * num_agents * RANKS
    batch_size = rollout_size // args.num_minibatches
    print(f"{folder}: {num_agents * RANKS} agents on {RANKS} x {device_name} in {precision}")

    # --- collecting -----------------------------------------------------------------------------------------------
    timer = PhaseTimer(device)
    group_size = num_agents // envs.num_groups
    current_step = torch.zeros(1, dtype=torch.int64, device=device)  # of the rollout, where a graph can read it

    def act(group, step):
        """Start a step of a group of games, and store what the actions were based on."""
        part = slice(group * group_size, (group + 1) * group_size)
        next_segment = (step + args.bptt_horizon - 1) // args.bptt_horizon
        learner.state[next_segment, part] = state[part]  # the last one to be written is that before the segment
        logits, value, next_state = policy(obs[part], state[part], episode_start[part])
        action = sample(logits, generator)
        learner.obs[step, part] = obs[part]
        learner.episode_start[step, part] = episode_start[part]
        learner.action[step, part] = action
        learner.value[step, part] = value
        learner.logprob[step, part] = logits.log_softmax(1).gather(1, action[:, None]).squeeze(1)
        state[part] = next_state
        timer.lap("act")
        envs.send(group, action)
        timer.lap("env")

    def receive_and_store(group, step):
        part = slice(group * group_size, (group + 1) * group_size)
        results = [result.to(device, non_blocking=True) for result in envs.recv(group)]
        obs[part], reward, terminated, truncated, final_obs = results
        timer.lap("env")
        learner.reward[step, part] = reward * args.reward_scale
        learner.done[step, part] = terminated | truncated
        learner.truncated[step, part] = truncated
        learner.final_obs[part] = torch.where(truncated[:, None, None], final_obs, learner.final_obs[part])
        learner.final_state[part] = torch.where(truncated[:, None], state[part], learner.final_state[part])
        episode_start[part] = terminated | truncated
        timer.lap("store")

    def act_step_and_store():
        act(0, current_step)
        receive_and_store(0, current_step)

    def collect_rollout():
        """`num_steps` steps of all agents. Workers play one group while the policy acts for the next one."""
        if envs.num_groups == 1:
            for step in range(args.num_steps):
                current_step.fill_(step)
                act_step_and_store()
            return
        for step in range(args.num_steps + 1):
            for group in range(envs.num_groups):
                if step > 0:
                    receive_and_store(group, step - 1)
                if step < args.num_steps:
                    act(group, step)

    def finish_rollout():
        """Values after the rollout, and of the last observations of truncated episodes."""
        learner.value[-1] = policy(obs, state, episode_start)[1]
        final_value = policy(learner.final_obs, learner.final_state, torch.zeros_like(episode_start))[1]
        learner.reward.add_(args.gamma * learner.truncated * final_value)
        learner.ratio.fill_(1)

    # --- switches -------------------------------------------------------------------------------------------------
    if args.compile:  # here rather than in the timed loop
        compiled = partial(torch.compile, mode=args.compile_mode)
        policy = compiled(policy)
        learner.estimate_advantages = compiled(learner.estimate_advantages)
        learner.minibatch_loss = compiled(learner.minibatch_loss)
        policy(obs[:group_size], state[:group_size], episode_start[:group_size])
        finish_rollout()
        learner.estimate_advantages()
        index = learner.index()
        learner.minibatch_loss(index, torch.zeros(index.shape, device=device))[0].backward()
        if device.type == "cuda" and args.vec_env == "device":  # on a CPU their shapes vary
            before = deepcopy(envs.games.state_dict())
            envs.step = compiled(envs.step)
            envs.step(torch.zeros_like(learner.action[0]))
            envs.games.load_state_dict(before)
    if args.cudagraph:
        act_step_and_store = CUDAGraphStep(act_step_and_store, generator)
        finish_rollout = CUDAGraphStep(finish_rollout, generator)
        learner.estimate_advantages = CUDAGraphStep(learner.estimate_advantages, generator)
        learner.update = CUDAGraphStep(learner.update, generator)

    # --- the loop -------------------------------------------------------------------------------------------------
    def clock():
        """Seconds and signals, as means over all ranks. Ranks decide from these alone, so they agree."""
        elapsed = seconds_before + time.perf_counter() - start_time
        return mean_over_ranks(torch.tensor([elapsed, len(signals)], dtype=torch.float64)).tolist()

    def save():
        if not all(weight.isfinite().all() for weight in learner.weights):
            fail(f"--learning-rate {args.learning_rate:g}: the weights are not finite and not saved; a lower one works")
        checkpoint = {
            "script": SCRIPT,
            "version": CHECKPOINT_VERSION,
            "args": vars(args),
            "agent": agent.state_dict(),
            "optimizer": learner.adam.state_dict()["state"],
            "muon": learner.muon.momentum,
            "scaler": learner.scaler.state_dict(),
            "global_step": global_step,
            "elapsed": seconds,
            "games_of": games_of,
            "generator": generator.get_state(),
            "state": state,
            "episode_start": episode_start,
        }
        if can_save_games:
            checkpoint["envs"] = envs.games.state_dict()
        if RANK == 0:
            save_checkpoint(folder / "checkpoint.pt", checkpoint)

    def log(scalars):
        if RANK == 0:
            for name, value in scalars.items():
                writer.add_scalar(name.replace("eval_", "eval/"), value, global_step)

    first_step = logged_step = global_step
    scores = {}
    log({"perf/warmup_s": time.perf_counter() - start_time})
    start_time = time.perf_counter()  # the warm-up does not count
    seconds = last_log = last_eval = last_checkpoint = seconds_before
    if RANKS > 1:
        save()  # torchrun --max-restarts can resume from the start
    while True:
        timer.lap()  # setup, evaluations and checkpoints do not count
        # 1 act and step, 2 store
        try:
            collect_rollout()
        except WorkerLost as error:
            save()
            fail(f"{error}; --resume {folder} works")
        global_step += rollout_size
        finish_rollout()
        timer.lap("act")

        # 3 learn
        seconds, stop = clock()
        progress = progress_of(args, global_step, seconds)
        if args.anneal_lr:
            decay = 0.5 * (1 + math.cos(math.pi * progress))
            learning_rate.fill_(args.learning_rate * decay)
            learner.muon.lr.fill_(args.muon_learning_rate * decay)
        learner.ent_coef.fill_(args.ent_coef + (args.end_ent_coef - args.ent_coef) * progress)
        for _ in range(args.update_epochs):
            order = torch.rand(num_segments, generator=generator, device=device).argsort()
            for number, minibatch in enumerate(order.split(len(learner.segments))):
                learner.segments.copy_(minibatch)
                # With one segment per agent, drawn once an epoch, an update changes no later minibatch's advantages.
                if number == 0 or args.bptt_horizon < args.num_steps:
                    learner.estimate_advantages()
                learner.update()
        timer.lap("learn")

        # 4 log, evaluate, save
        is_last = progress == 1 or stop
        if is_last or seconds >= last_log + args.log_every:
            last_log = seconds
            phases = timer.read()
            new_steps = global_step - logged_step
            new_updates = new_steps * args.update_epochs / batch_size
            rates = throughput(new_steps, new_updates, batch_size, phases)
            logged_step = global_step
            finished = mean_over_ranks(envs.read_finished().to(device)) * RANKS  # episodes, and sums over them
            episodes, hearts, length, episodic_return = (finished / finished[0].clamp(min=1)).tolist()
            losses = (mean_over_ranks(learner.loss_sum) / max(new_updates, 1)).tolist()
            learner.loss_sum.zero_()
            scalars = {
                "charts/SPS": rates["env_steps_per_second"],
                "charts/updates_per_second": rates["updates_per_second"],
                "charts/samples_per_second": rates["samples_per_second"],
                "charts/replay_ratio": rates["replay_ratio"],
                "perf/rollout_fraction": rates["rollout_fraction"],
                "losses/learning_rate": learning_rate.item(),
            }
            if episodes:
                scalars["charts/score"] = hearts
                scalars["charts/episodic_length"] = length
                scalars["charts/episodic_return"] = episodic_return
            for name, loss in zip(LOSSES, losses):
                scalars[f"losses/{name}"] = loss
            for phase, phase_seconds in phases.items():
                scalars[f"perf/{phase}_ms"] = 1000 * phase_seconds * num_agents * RANKS / new_steps
            log(scalars)
            line = f"{progress:4.0%}  step {global_step:>11,}  SPS {rates['env_steps_per_second']:>9,.0f}"
            line += f"  updates/s {rates['updates_per_second']:>5.1f}  entropy {losses[2]:4.2f}  kl {losses[3]:.4f}"
            line += f"  return {episodic_return:6.2f}  hearts {hearts:5.2f}"
            print(line)
            if not math.isfinite(sum(losses)):
                fail(f"--learning-rate {args.learning_rate:g}: the loss is {sum(losses)}; a lower one works")
            timer.lap("log")
        if is_last:
            break
        if args.eval_every and seconds >= last_eval + args.eval_every:
            if RANK == 0:
                scores = evaluate(agent, args, max(args.eval_episodes // 10, 1), device)
                log(scores)
            seconds, stop = clock()
            last_eval = seconds  # the interval is from the end of one to the start of the next
        if args.checkpoint_every and seconds >= last_checkpoint + args.checkpoint_every:
            last_checkpoint = seconds
            save()

    # --- the end: first what must not be lost ---------------------------------------------------------------------
    save()
    envs.close()
    if RANKS > 1:
        dist.destroy_process_group()
    new_steps = global_step - first_step
    summary = {
        "script": SCRIPT,
        "device": device_name,
        "precision": precision,
        "compiled": args.compile,
        "cudagraph": args.cudagraph,
        "sdpa": args.sdpa if args.network == "token-attention" else None,
        "env_steps": global_step,
        "wall_seconds": seconds,
        **throughput(new_steps, new_steps * args.update_epochs / batch_size, batch_size, timer.total),
        **scores,
    }
    if RANK > 0:
        return summary
    summary_file = folder / "summary.json"
    summary_file.write_text(json.dumps(summary, indent=2))
    signals.append(0)  # all is saved: from here on a signal ends the program
    script = shlex.quote(sys.argv[0])
    run = shlex.quote(str(folder))
    if stop:
        print(f"stopped; python {script} --resume {run} continues from {folder / 'checkpoint.pt'}")
    else:
        print(f"evaluation: {args.eval_episodes:,} episodes")
        scores = evaluate(agent, args, args.eval_episodes, device)
        log(scores)
        summary.update(scores)
        summary_file.write_text(json.dumps(summary, indent=2))
        report(agent, args, device, scores, folder)
        print(f"watch it play: python {script} --evaluate {run} --render")
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
            fail("out of memory: a smaller --num-envs, --num-steps or --hidden-size, or more --num-minibatches works")
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

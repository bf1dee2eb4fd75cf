"""PPO for many agents in a MettaGrid arena: games, acting and learning on one device, or games in workers.

    python ppo_metta.py                                        # ten minutes, then an evaluation and a GIF
    python ppo_metta.py --bf16 --cudagraph                     # made for a GPU
    python ppo_metta.py --env-id mettagrid                     # the real MettaGrid, in worker processes
    python ppo_metta.py --rnn mingru                           # agents with a memory: slower, and no better here
    torchrun --nproc-per-node 2 ppo_metta.py                   # two learners, one policy
    python ppo_metta.py --evaluate latest --render             # watch the last agents play

What to read: `Agent` is the network, `gae` and `ppo_loss` what it learns, `Rollout` what it learns from, `act` and
`update` in `run` are acting and learning, and the loop at the end of `run` says when. The rest is switches and
bookkeeping.
"""

import argparse
import io
import json
import math
import os
import signal
import sys
import threading
import time
import timeit
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import count, islice, pairwise
from pathlib import Path
from typing import Any, Literal, NoReturn

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
import tyro
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.tensorboard import SummaryWriter

from envs.metta.arena import MettaArena
from envs.metta.batch import MettaBatch
from envs.metta.rules import VARIANTS, Rules
from envs.metta.view import TokenView
from envs.playing import play_parallel, show_in_terminal, write_gif
from envs.workers import LocalEnvs, SubprocEnvs, WorkerLost

SCRIPT = Path(__file__).stem
EVAL_SEED = 2**31  # above every --seed
CHECKPOINT_VERSION = 5
GIF_FRAMES = 300
RANK = int(os.environ.get("RANK", 0))  # these four are set by torchrun
RANKS = int(os.environ.get("WORLD_SIZE", 1))
LOCAL_RANKS = int(os.environ.get("LOCAL_WORLD_SIZE", 1))  # on this machine
RESTARTS = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


@dataclass
class Args:
    # Run
    seed: int = 1
    """seed of weights, games, exploration and sampling"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto takes CUDA where there is one"""
    total_timesteps: int | None = None
    """agent steps to train for (None: no limit)"""
    max_seconds: float | None = None
    """wall-clock budget, warm-up and evaluations on the way included (None: 600, or no limit with --total-timesteps)"""
    run_dir: str = "runs"
    """folder of all runs"""
    run_name: str | None = None
    """folder of this run inside it (None: script, seed and time)"""
    preset: Literal["default", "original", "ultra-fast"] = "default"
    """defaults of all flags: ours, or those that Metta's demo and its "ultra fast" configuration had"""

    # Environment
    env_id: Literal["MettaArena-v0", "MettaNavigation-v0", "mettagrid"] = "MettaArena-v0"
    """arena or navigation of envs/metta/arena.py, or the real MettaGrid"""
    env_config: str | None = None
    """with --env-id mettagrid: package.module:attribute of a MettaGridConfig (None: mines and altars)"""
    easy: bool = True
    """altars, armories and laseries of the arena ask for one item only"""
    rewards: Literal["hearts", "shaped", "work"] | None = None
    """what is rewarded: hearts, also the first ore, battery and gear (shaped), or all that is put into and got from
    mines, generators and altars (work), whoever has the heart in the end (None: work in the arena, else shaped)"""
    instances: int | None = None
    """copies of the arena in a game, 1 to 4 (None: as the env-id has it)"""
    size: int | None = None
    """cells along a side of an instance (None: 25)"""
    agents: int | None = None
    """agents of an instance (None: as the env-id has it)"""
    num_envs: int | None = None
    """parallel games, each of several agents (None: 128 on CPU, 8192 on CUDA, 32 of the real MettaGrid)"""
    vec_env: Literal["auto", "device", "subproc"] = "auto"
    """games on the training device, or in worker processes; auto takes workers for the real MettaGrid only"""
    num_workers: int | None = None
    """processes of subproc; 0 plays in this one (None: up to one for each core, or for every second one if the CPU
    learns too, so that the games are dealt out evenly)"""
    async_factor: int = 2
    """groups of games: workers play some of them while the policy acts for another"""

    # Algorithm
    network: Literal["token-bag", "box-cnn", "token-attention"] = "token-bag"
    """one layer over all tokens, two convolutions over a box of them, or attention between them"""
    rnn: Literal["none", "mingru"] = "none"
    """memory of an agent"""
    hidden_size: int = 128
    """width of the layers and of the memory"""
    learning_rate: float = 3e-3
    """Adam's learning rate"""
    muon_learning_rate: float | None = None
    """Muon's, for the matrix of the hidden layer; 0: Adam learns it too (None: 0 in the real MettaGrid, else 0.02)"""
    anneal_lr: bool = True
    """let the learning rates fall to zero over the run, as half a cosine"""
    num_steps: int = 32
    """steps of every agent in a rollout"""
    num_minibatches: int | None = None
    """minibatches of a rollout, each of whole segments and one update (None: 16, or 32 for the many games on CUDA)"""
    grad_accumulation: int = 1
    """parts of a minibatch that go through the network one after another, for one update"""
    bptt_horizon: int = 32
    """steps of a segment; gradients flow through all of them and no further"""
    update_epochs: int | None = None
    """epochs over a rollout; 0: the agents only play (None: 2 in the real MettaGrid, else 1)"""
    reward_scale: float = 10.0
    """rewards are multiplied by this: Adam's steps leave a noise in the values that small ones drown in"""
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
    """policy ratios are clipped this far from 1"""
    vf_clip_coef: float = 10.0
    """values are clipped this far from those of the rollout"""
    ent_coef: float | None = None
    """initial weight of the entropy bonus (None: 0.001 in the real MettaGrid, else 0.005)"""
    end_ent_coef: float | None = None
    """final weight of it, reached linearly (None: 0.0001 in the real MettaGrid, else 0.001)"""
    vf_coef: float = 0.5
    """weight of the value loss"""
    max_grad_norm: float = 0.5
    """maximum norm of the gradient"""
    target_kl: float | None = None
    """no more updates on a rollout after one with a larger approximate KL (None: no limit)"""
    prio_alpha: float = 0.0
    """segments are drawn in proportion to the size of their advantages to this power (0: each once an epoch)"""
    prio_beta0: float = 0.6
    """initial exponent of the importance weights that undo this; 1 at the end"""

    # Speed
    bf16: bool = False
    """forward passes in bfloat16, where the hardware has it"""
    fp16: bool = False
    """forward passes in float16 with gradient scaling (CUDA)"""
    tf32: bool = False
    """fp32 matmuls on tensor cores (CUDA)"""
    compile: bool = False
    """torch.compile acting, advantages and the loss, and on CUDA the games"""
    compile_mode: Literal["default", "reduce-overhead", "max-autotune"] = "default"
    """torch.compile's mode"""
    cudagraph: bool = False
    """capture acting, stepping, storing and learning as CUDA graphs"""
    sdpa: Literal["auto", "flash", "efficient", "cudnn", "math"] = "auto"
    """attention kernel to try first (--network token-attention)"""
    threads: int | None = None
    """CPU threads (None: all cores that workers and other ranks leave, 8 at most; fewer where programs are busy)"""

    # Input and output
    log_every: float = 5.0
    """seconds between log lines"""
    eval_every: float = 120.0
    """seconds between evaluations on the way, of a tenth of --eval-episodes (0: none)"""
    eval_episodes: int = 240
    """episodes of the final evaluation, each agent's counted"""
    checkpoint_every: float = 120.0
    """seconds between checkpoints (0: only the last)"""
    resume: str | None = None
    """continue the run of this checkpoint, run folder, or "latest", with its flags"""
    evaluate: str | None = None
    """no training: play --eval-episodes episodes with this checkpoint, run folder, or "latest" """
    render: bool = False
    """with --evaluate: play one game in the terminal"""
    video: bool = True
    """write a GIF of a game at the end, or with --evaluate"""
    wandb: bool = False
    """mirror TensorBoard to Weights & Biases (pip install wandb)"""


COMMAND_LINE_ONLY = ["run_dir", "run_name", "env_config", "resume", "evaluate", "render", "video", "wandb"]
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
GAMMA = {
    "MettaArena-v0": 0.97,  # hearts take several errands
    "MettaNavigation-v0": 0.95,  # an altar is near
    "mettagrid": 0.9,  # and a mine is at hand as well
}
FRACTIONS = ["gamma", "gae_lambda", "prio_alpha", "prio_beta0"]
ZERO_WORKS = ["seed", "num_workers", "update_epochs", "ent_coef", "end_ent_coef", "eval_every"]
ZERO_WORKS += ["checkpoint_every", "muon_learning_rate", *FRACTIONS]
HIGHEST = {**dict.fromkeys(FRACTIONS, 1), "seed": EVAL_SEED - 1, "threads": 256, "num_workers": 1024}
HIGHEST["eval_episodes"] = 100_000


def fill_defaults(args: Args, device: torch.device) -> Args:
    """A copy of `args` without None where a run needs a value. Flags that cannot work end the program here."""
    args = replace(args)
    on_cuda = device.type == "cuda"
    is_real = args.env_id == "mettagrid"
    if args.vec_env == "auto":
        args.vec_env = "subproc" if is_real else "device"
    if args.num_envs is None and is_real:
        args.num_envs = 32
    if args.num_envs is None:
        args.num_envs = 8192 if on_cuda else 128  # on a GPU a step of a thousand games takes about as long as of one
    if args.num_minibatches is None:
        args.num_minibatches = 32 if on_cuda and not is_real else 16
    if args.rewards is None:
        args.rewards = "work" if args.env_id == "MettaArena-v0" else "shaped"
    if args.update_epochs is None:
        args.update_epochs = 2 if is_real else 1
    if args.muon_learning_rate is None:
        args.muon_learning_rate = 0.0 if is_real else 0.02
    if args.gamma is None:
        args.gamma = GAMMA[args.env_id]
    if args.ent_coef is None:
        args.ent_coef = 0.001 if is_real else 0.005
    if args.end_ent_coef is None:
        args.end_ent_coef = 0.0001 if is_real else 0.001
    if args.max_seconds is None and args.total_timesteps is None:
        args.max_seconds = 600.0
    check_ranges(args)

    if args.bf16 and args.fp16:
        fail("--bf16 --fp16: choose one of them")
    if args.cudagraph and args.compile and args.compile_mode != "default":
        fail(f"--compile-mode {args.compile_mode}: captures graphs by itself; with --cudagraph only default works")
    if args.network == "token-attention" and args.hidden_size % AttentionLayer.HEADS:
        fail(f"--hidden-size {args.hidden_size}: attention needs a multiple of {AttentionLayer.HEADS}")
    if args.render and (args.evaluate is None or is_real):
        fail("--render: shows trained agents in the embedded arena, so it needs --evaluate PATH of such a run")
    if args.resume is not None and args.evaluate is not None:
        fail("--resume --evaluate: choose one of them")
    if args.vec_env == "device" and is_real:
        fail("--vec-env device: the real MettaGrid plays on the CPU; subproc works, with --num-workers 0 too")
    if args.env_config is not None and not is_real:
        fail(f"--env-config {args.env_config}: is of --env-id mettagrid, not {args.env_id}")
    rules_of(args)

    if args.num_envs % RANKS:
        advice = f"must be a multiple of the {RANKS} ranks; {nearest(args.num_envs, RANKS)} works"
        fail(f"--num-envs {args.num_envs}: {advice}")
    num_envs = args.num_envs // RANKS
    cores = max(CORES // LOCAL_RANKS, 1)
    if args.num_workers is None:  # as many as the games can be dealt out to evenly
        limit = min(cores if on_cuda else max(cores // 2, 1), num_envs)
        counts = [n for n in range(1, limit + 1) if num_envs % (n * args.async_factor) == 0]
        args.num_workers = max(counts, default=1)
    if args.threads is None:  # all threads wait for one whose core a worker has
        busy_cores = args.num_workers if args.vec_env == "subproc" else 0
        args.threads = pick_threads(max(cores - busy_cores, 1))
    parts = args.num_workers * args.async_factor
    if args.vec_env == "subproc" and parts:
        if args.num_workers > num_envs:
            fail(f"--num-workers {args.num_workers}: more than games; at most {num_envs} works")
        if num_envs % parts:
            advice = f"--num-envs {nearest(num_envs, parts) * RANKS} or --async-factor 1 --num-workers 1 works"
            fail(f"--num-envs {args.num_envs}: --num-workers x --async-factor, {parts}, must divide it; {advice}")
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


def check_sizes(args: Args, num_agents: int, max_steps: int) -> None:
    """Refuse sizes that do not divide, now that the games are known: `num_agents` in all, episodes of `max_steps`."""
    num_steps = args.num_steps
    horizon = args.bptt_horizon
    parts = args.grad_accumulation
    if num_steps > max_steps:
        advice = f"--num-steps {max_steps // horizon * horizon}"
        if horizon > max_steps:
            advice = f"--num-steps {max_steps} --bptt-horizon {max_steps}"
        fail(f"--num-steps {num_steps}: a rollout would be longer than an episode, {max_steps}; {advice} works")
    if num_steps % horizon:
        advice = f"--num-steps {nearest(num_steps, horizon)}"
        fail(f"--bptt-horizon {horizon}: must divide --num-steps {num_steps}; {advice} works")
    segments_per_agent = num_steps // horizon
    segments = segments_per_agent * num_agents
    all_segments = f"the {segments} segments of a rollout (--num-envs {args.num_envs}: {num_agents} agents, "
    all_segments += f"{segments_per_agent} of each)"
    if segments % parts:
        fail(f"--grad-accumulation {parts}: must divide {all_segments}; 1 works")
    if segments % (args.num_minibatches * parts):
        counts = [n for n in range(1, segments // parts + 1) if segments % (n * parts) == 0]
        closest = min(counts, key=lambda n: abs(n - args.num_minibatches))
        multiples = f" into multiples of --grad-accumulation {parts}" if parts > 1 else ""
        advice = f"--num-minibatches {closest} works"
        fail(f"--num-minibatches {args.num_minibatches}: must divide {all_segments}{multiples}; {advice}")


def nearest(number: int, unit: int) -> int:
    """The multiple of `unit` closest to `number`, but not 0."""
    return max(unit, round(number / unit) * unit)


def rules_of(args: Args) -> dict[str, Any]:
    """Rules of the embedded arena, as keywords."""
    rules = {**VARIANTS.get(args.env_id, {}), "easy": args.easy, "rewards": args.rewards}
    for name in ("size", "agents", "instances"):
        if getattr(args, name) is not None:
            rules[name] = getattr(args, name)
    try:
        Rules(**rules)
    except ValueError as error:
        flags = " ".join(f"--{name} {rules[name]}" for name in ("size", "agents", "instances") if name in rules)
        fail(f"{flags}: {error}")
    return rules


def make_games(args: Args, num_games: int, device: torch.device, seed: int, evaluation: bool = False) -> Any:
    """Games that step together: of the arena on `device`, or real ones on the CPU. First episodes are of any length,
    but not in an evaluation."""
    if args.env_id != "mettagrid":
        games = MettaBatch(num_games, device, seed, **rules_of(args), random_first_length=not evaluation)
        games.reset()
        return games
    try:
        from envs.metta.real import TorchMettaGrid

        return TorchMettaGrid(num_games, args.env_config, seed, random_first_length=not evaluation)
    except Exception as error:  # a configuration is a user's own code: anything may happen in it
        if is_out_of_memory(error):
            raise
        flag = "--env-id mettagrid" if args.env_config is None else f"--env-config {args.env_config}"
        fail(f"{flag}: {first_line(error)}")


def games_seed(seed: int, starts: int, worker: int = 0, group: int = 0) -> int:
    """Seed of the games of this rank, or of one group of a worker, after so many starts of the run.

    None plays the games of another, nor its own again after a resume. Games of a lone process begin with --seed.
    """
    stream = [RANK, starts, worker, group]
    if not any(stream):
        return seed
    return int(np.random.SeedSequence([seed, *stream]).generate_state(1)[0]) % EVAL_SEED


def make_envs(args: Args, device: torch.device, starts: int, obs_shape: tuple[int, ...]) -> LocalEnvs | SubprocEnvs:
    """This rank's games where --vec-env wants them. `obs_shape` is that of one game: agents, tokens, 3."""
    num_envs = args.num_envs // RANKS
    games_device = device if args.vec_env == "device" else torch.device("cpu")
    if args.vec_env == "device" or args.num_workers == 0:
        return LocalEnvs(make_games(args, num_envs, games_device, games_seed(args.seed, starts)))
    num_games = num_envs // (args.num_workers * args.async_factor)
    num_agents, *token_shape = obs_shape
    seeds = []
    for worker in range(args.num_workers):
        seeds.append([games_seed(args.seed, starts, worker, group) for group in range(args.async_factor)])
    factory = partial(make_games, args, num_games, games_device)
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

    def __init__(self, view: TokenView, width: int, device: torch.device) -> None:
        super().__init__()
        self.view = view
        table = torch.randn(view.num_channels * view.num_cells, width, device=device)
        self.table = nn.Parameter(table * 60**-0.5)  # as for a layer with as many inputs as an agent has tokens
        self.bias = nn.Parameter(torch.zeros(width, device=device))
        self.num_outputs = width

    def forward(self, tokens: torch.Tensor, heading: torch.Tensor) -> torch.Tensor:
        return F.relu(self.sparse(tokens, heading) if tokens.device.type == "cpu" else self.dense(tokens, heading))

    def sparse(self, tokens: torch.Tensor, heading: torch.Tensor) -> torch.Tensor:
        row, bag_start, weight = self.view.bags(tokens, heading)
        return SparseLinear.apply(self.table, row, bag_start, weight) + self.bias

    def dense(self, tokens: torch.Tensor, heading: torch.Tensor) -> torch.Tensor:
        return F.linear(self.view.box(tokens, heading), self.table.T, self.bias)


class BoxCNN(nn.Module):
    """Two convolutions over a box with a plane for each channel, as Metta's own policy has them."""

    def __init__(self, view: TokenView, device: torch.device) -> None:
        super().__init__()
        self.view = view
        self.conv1 = nn.Conv2d(view.num_channels, 64, 5, 3, padding=1, device=device)
        self.conv2 = nn.Conv2d(64, 64, 3, padding=1, device=device)
        rows, columns = view.window
        self.num_outputs = 64 * ((rows - 3) // 3 + 1) * ((columns - 3) // 3 + 1) + view.num_channels

    def forward(self, tokens: torch.Tensor, heading: torch.Tensor) -> torch.Tensor:
        box = self.view.box(tokens, heading).unflatten(1, (self.view.num_channels, self.view.num_cells))
        planes = box[:, :, :-1].unflatten(2, self.view.window)
        x = F.relu(self.conv2(F.relu(self.conv1(planes))))
        return torch.cat([x.flatten(1), box[:, :, -1]], 1)  # the last cell has no place in the window


SDPA_KERNELS = {  # by --sdpa, in the order in which PyTorch tries them; MATH always runs
    "auto": [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH],
    "flash": [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH],
    "efficient": [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH],
    "cudnn": [SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH],
    "math": [SDPBackend.MATH],
}


class AttentionLayer(nn.Module):
    """Pre-norm transformer layer: `query` (B, queries, width) attends to x (B, tokens, width) where `mask` (B, tokens)
    is true."""

    HEADS = 4

    def __init__(self, width: int, sdpa: str, device: torch.device) -> None:
        super().__init__()
        self.kernels = SDPA_KERNELS[sdpa]
        self.norm1 = nn.LayerNorm(width, device=device)
        self.q = nn.Linear(width, width, device=device)
        self.kv = nn.Linear(width, 2 * width, device=device)
        self.out = nn.Linear(width, width, device=device)
        self.norm2 = nn.LayerNorm(width, device=device)
        self.up = nn.Linear(width, 2 * width, device=device)
        self.down = nn.Linear(2 * width, width, device=device)

    def kernel(self, dtype: torch.dtype, device: torch.device) -> str:
        """Name of the kernel that PyTorch picks here."""
        q = torch.empty(1, self.HEADS, 16, 16, dtype=dtype, device=device)
        mask = torch.ones(1, 1, 1, 16, dtype=torch.bool, device=device)
        with sdpa_kernel(self.kernels, set_priority=True):
            return SDPBackend(torch._fused_sdp_choice(q, q, q, attn_mask=mask)).name.lower()

    def forward(self, x: torch.Tensor, query: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        q = self.q(self.norm1(query)).unflatten(2, (self.HEADS, -1)).transpose(1, 2)
        k, v = self.kv(self.norm1(x)).unflatten(2, (2, self.HEADS, -1)).permute(2, 0, 3, 1, 4)
        with sdpa_kernel(self.kernels, set_priority=True):
            attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None, None])
        query = query + self.out(attended.transpose(1, 2).flatten(2))
        return query + self.down(F.relu(self.up(self.norm2(query))))


class TokenAttention(nn.Module):
    """A transformer layer between all tokens, then one query attends to them. A token is its channel plus its cell."""

    def __init__(self, view: TokenView, width: int, sdpa: str, device: torch.device) -> None:
        super().__init__()
        self.view = view
        self.channel = nn.Embedding(view.num_channels, width, device=device)
        self.cell = nn.Embedding(view.num_cells, width, device=device)
        self.query = nn.Parameter(torch.randn(width, device=device))
        self.layer1 = AttentionLayer(width, sdpa, device)
        self.layer2 = AttentionLayer(width, sdpa, device)
        self.norm = nn.LayerNorm(width, device=device)
        self.num_outputs = width

    def forward(self, tokens: torch.Tensor, heading: torch.Tensor) -> torch.Tensor:
        if tokens.device.type == "cpu":
            tokens = self.view.trim(tokens)
        mask = self.view.is_token(tokens)
        channel, cell, weight = self.view.lookup(self.view.words(tokens, heading))
        x = self.channel(channel) * weight[..., None] + self.cell(cell)
        x = self.layer1(x, x, mask)
        query = self.query.expand(len(x), 1, -1)
        return self.norm(self.layer2(x, query, mask)).squeeze(1)


def mingru(x: torch.Tensor, state: torch.Tensor, episode_start: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
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


SHAPE_FLAGS = "--env-id, --env-config, --network, --rnn, --hidden-size"  # those that the shapes of the weights follow


class Agent(nn.Module):
    """Policy and value of agents, with memory or without (then `state_size` is 0).

    tokens (T, B, tokens, 3) uint8, state (B, state_size) before them, episode_start (T, B) bool
    -> logits (T, B, actions) and value (T, B), both fp32, and state (B, state_size) after them.
    """

    def __init__(self, args: Args, games: Any, device: torch.device) -> None:
        super().__init__()
        self.view = TokenView(games.features, games.view_shape, device)
        view = self.view
        width = args.hidden_size
        if args.network == "token-bag":
            self.encoder = TokenBag(view, width, device)
            if args.compile:  # only then: the compiler takes seconds to import
                self.encoder.sparse = torch.compiler.disable(self.encoder.sparse)
        elif args.network == "box-cnn":
            self.encoder = BoxCNN(view, device)
        else:
            self.encoder = TokenAttention(view, width, args.sdpa, device)
        self.has_memory = args.rnn == "mingru"
        self.state_size = width if self.has_memory else 0
        self.hidden = nn.Linear(self.encoder.num_outputs, 2 * width if self.has_memory else width, device=device)
        self.num_actions = games.num_actions
        self.heads = nn.Linear(width, self.num_actions + 1, device=device)  # the policy's logits, then the value
        nn.init.orthogonal_(self.heads.weight[:-1], 0.01)
        nn.init.orthogonal_(self.heads.weight[-1:], 1.0)
        nn.init.zeros_(self.heads.bias)

    def forward(self, tokens: torch.Tensor, state: torch.Tensor, episode_start: torch.Tensor) -> tuple:
        steps_and_agents = tokens.shape[:2]
        tokens = tokens.flatten(0, 1)
        heading = self.view.heading(tokens)
        x = self.hidden(self.encoder(tokens, heading)).unflatten(0, steps_and_agents)
        if self.has_memory:
            x, state = mingru(x, state, episode_start)
        else:
            x = F.relu(x)
        logits, value = self.heads(x).float().split([self.num_actions, 1], 2)
        if self.view.orientation is not None:
            seen_action = self.view.seen_action[heading].unflatten(0, steps_and_agents)
            logits = logits.gather(2, seen_action)
        return logits, value.squeeze(2), state


# ------------------------------------------------------------------------------------------------ the algorithm


def gae(
    reward: torch.Tensor, value: torch.Tensor, next_value: torch.Tensor, final_value: torch.Tensor,
    terminated: torch.Tensor, truncated: torch.Tensor, ratio: torch.Tensor,
    gamma: float, gae_lambda: float, rho_clip: float, c_clip: float,
) -> torch.Tensor:  # fmt: skip
    """Advantages (T, N), fp32: GAE (Schulman et al. 2016, equation 16) with V-trace's clipped importance weights.

    delta_t = min(rho_clip, ratio_t) * (r_t + gamma V(s_t+1) - V(s_t)), A_t = delta_t + gamma lambda min(c_clip,
    ratio_t) A_t+1 (Espeholt et al. 2018, section 4.1). An episode that ends at t passes nothing back over it: V(s_t+1)
    is 0 if it terminated, and `final_value` (N,), of the observation it ended with, if it was truncated; that happens
    at most once to an agent in a rollout. `next_value` (N,) is of what follows the rollout.
    """
    next_values = torch.cat([value[1:], next_value[None]])
    next_values = torch.where(truncated, final_value, next_values) * ~terminated
    delta = ratio.clamp(max=rho_clip) * (reward + gamma * next_values - value)
    discount = gamma * gae_lambda * ratio.clamp(max=c_clip) * ~(terminated | truncated)
    lastgaelam = torch.zeros_like(next_value)
    advantages = []
    for t in reversed(range(len(delta))):
        lastgaelam = delta[t] + discount[t] * lastgaelam
        advantages.append(lastgaelam)
    return torch.stack(advantages[::-1])


def ppo_loss(
    logprob: torch.Tensor, old_logprob: torch.Tensor, advantage: torch.Tensor, entropy: torch.Tensor,
    value: torch.Tensor, old_value: torch.Tensor, returns: torch.Tensor,
    clip_coef: float, vf_clip_coef: float, ent_coef: torch.Tensor, vf_coef: float,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """PPO's loss (Schulman et al. 2017, equations 7 and 9; values clipped as the policy is), of tensors of one shape.

    Returns the loss and what it consists of: policy loss, value loss, entropy, approximate KL ("k3" of Schulman 2020)
    and share of ratios that are clipped.
    """
    logratio = logprob - old_logprob
    ratio = logratio.exp()
    clipped_ratio = ratio.clamp(1 - clip_coef, 1 + clip_coef)
    pg_loss = -torch.min(advantage * ratio, advantage * clipped_ratio).mean()
    clipped_value = old_value + (value - old_value).clamp(-vf_clip_coef, vf_clip_coef)
    v_loss = 0.5 * torch.max((value - returns) ** 2, (clipped_value - returns) ** 2).mean()
    entropy = entropy.mean()
    loss = pg_loss - ent_coef * entropy + vf_coef * v_loss
    approx_kl = (ratio - 1 - logratio).mean()
    clipfrac = ((ratio - 1).abs() > clip_coef).float().mean()
    return loss, torch.stack([pg_loss, v_loss, entropy, approx_kl, clipfrac]).detach()


def sample(logits: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """An action for each row of logits (B, actions), by the Gumbel trick: no CUDA synchronisation."""
    noise = torch.empty_like(logits).exponential_(generator=generator)
    return (logits - noise.log()).argmax(1)


class Rollout:
    """`num_steps` steps of all agents, time first. A segment is `bptt_horizon` steps of one agent in a row.

    `state` is the memory before each segment. `final_obs` and `final_state` are of the last step of an episode that
    was truncated in this rollout.
    """

    def __init__(self, args: Args, obs: torch.Tensor, state_size: int, device: torch.device) -> None:
        num_agents = len(obs)
        self.bptt_horizon = args.bptt_horizon
        step_bytes = obs.numel() + (40 + 4 * state_size // args.bptt_horizon) * num_agents
        check_memory("--num-steps", args.num_steps, step_bytes, device, 8 * obs.numel(), args.bptt_horizon)

        def zeros(dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.zeros(args.num_steps, num_agents, dtype=dtype, device=device)

        self.obs = torch.zeros(args.num_steps, *obs.shape, dtype=torch.uint8, device=device)
        self.state = torch.zeros(args.num_steps // args.bptt_horizon, num_agents, state_size, device=device)
        self.episode_start = zeros(torch.bool)
        self.action = zeros(torch.int64)
        self.logprob = zeros()
        self.value = zeros()
        self.ratio = zeros()
        self.reward = zeros()
        self.terminated = zeros(torch.bool)
        self.truncated = zeros(torch.bool)
        self.final_obs = torch.zeros_like(obs, device=device)
        self.final_state = torch.zeros(num_agents, state_size, device=device)

    def index(self, segments: torch.Tensor) -> torch.Tensor:
        """(bptt_horizon, B): where the steps of `segments` (B,) are, time and agents flattened."""
        num_agents = self.obs.shape[1]
        agent = segments % num_agents
        first_step = segments // num_agents * self.bptt_horizon
        step = first_step + torch.arange(self.bptt_horizon, device=segments.device)[:, None]
        return step * num_agents + agent

    def minibatch(self, segments: torch.Tensor, index: torch.Tensor) -> list[torch.Tensor]:
        """obs, state, episode_start, action and logprob of `segments` (B,), whose steps are at `index`."""
        obs = self.obs.flatten(0, 1)[index]
        state = self.state.flatten(0, 1)[segments]
        episode_start = self.episode_start.flatten()[index]
        action = self.action.flatten()[index]
        logprob = self.logprob.flatten()[index]
        return [obs, state, episode_start, action, logprob]


class Player:
    """Agents in games that nobody learns from. They draw actions as in training: a policy that always takes its
    likeliest action gets stuck in front of its own kind."""

    def __init__(self, agent: Agent, num_agents: int, device: torch.device) -> None:
        self.agent = agent
        self.device = device
        self.generator = torch.Generator(device).manual_seed(EVAL_SEED)
        self.state = torch.zeros(num_agents, agent.state_size, device=device)
        self.no_start = torch.zeros(1, num_agents, dtype=torch.bool, device=device)

    @torch.no_grad()
    def act(self, obs: torch.Tensor) -> torch.Tensor:
        logits, _, self.state = self.agent(obs.to(self.device)[None], self.state, self.no_start)
        return sample(logits[0], self.generator)


def evaluate(agent: Agent, args: Args, episodes: int, device: torch.device) -> dict[str, float]:
    """Hearts of `episodes` agents, rounded up to whole games: whole episodes with maps that no training seed has."""
    cpu = torch.device("cpu")  # of few games a step is over sooner there than a GPU has launched it
    agents_per_game = len(make_games(args, 1, cpu, EVAL_SEED).obs)
    num_games = math.ceil(episodes / agents_per_game)
    games = make_games(args, num_games, cpu, EVAL_SEED, evaluation=True)
    obs = games.obs
    num_agents = len(obs)
    player = Player(agent, num_agents, device)
    hearts = torch.zeros(num_agents)
    playing = torch.ones(num_agents, dtype=torch.bool)
    while playing.any():
        obs, _, terminated, truncated, info = games.step(player.act(obs).cpu())
        first_end = (terminated | truncated) & playing
        hearts = torch.where(first_end, info["hearts"].float(), hearts)
        playing &= ~first_end
    return {
        "eval_score_mean": hearts.mean().item(),
        "eval_score_median": hearts.median().item(),
        "eval_score_max": hearts.max().item(),
        "eval_episodes": num_agents,
    }


def watch_game(agent: Agent, args: Args, device: torch.device, render_mode: str) -> Iterator:
    """Frames of one game, played by the rule book."""
    arena = MettaArena(render_mode, **rules_of(args), random_first_length=False)
    player = Player(agent, arena.rules.num_agents, device)
    return play_parallel(arena, lambda obs: player.act(torch.as_tensor(obs)).tolist(), EVAL_SEED)


def save_gif(agent: Agent, args: Args, device: torch.device, folder: Path) -> None:
    if args.env_id == "mettagrid":
        say("--video: the real MettaGrid is not drawn here; no GIF was written")
        return
    path = folder / "videos" / "metta.gif"
    try:
        write_gif(islice(watch_game(agent, args, device, "rgb_array"), GIF_FRAMES), path)
        say(str(path))
    except OSError as error:
        say(f"--video: {path} cannot be written ({error})")


def evaluate_run(agent: Agent, args: Args, device: torch.device) -> dict[str, float]:
    """--evaluate: one game in the terminal (--render), or the hearts of many agents and a GIF (--video)."""
    path, checkpoint = load_checkpoint("--evaluate", args.evaluate, args.run_dir)
    check_layout(f"--evaluate {args.evaluate}", checkpoint, {"agent": agent.state_dict()}, SHAPE_FLAGS)
    agent.load_state_dict(checkpoint["agent"])
    if args.render:
        show_in_terminal(watch_game(agent, args, device, "ansi"), MettaArena.metadata["render_fps"])
        return {}
    scores = evaluate(agent, args, args.eval_episodes, device)
    say("  ".join(f"{name} {value:g}" for name, value in scores.items()))
    if args.video:
        save_gif(agent, args, device, path.parent)
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


class Muon(torch.optim.Optimizer):
    """Nesterov momentum, with steps brought near an orthogonal matrix (Jordan et al. 2024).

    torch.optim.Muon multiplies in bfloat16: on a CPU without units for that it took a quarter of a run. Its learning
    rate is a number, which a CUDA graph would freeze. Gradients that overflowed in float16 count as zero.
    """

    MOMENTUM = 0.95

    def __init__(self, weights: list[torch.Tensor], lr: torch.Tensor) -> None:
        super().__init__([{"params": weights}], {"lr": lr})
        for weight in weights:
            self.state[weight] = {"momentum_buffer": torch.zeros_like(weight)}

    @torch.no_grad()
    def step(self) -> None:
        for weight, state in self.state.items():
            grad = weight.grad.nan_to_num(0, 0, 0)
            momentum = state["momentum_buffer"]
            momentum.lerp_(grad, 1 - self.MOMENTUM)
            update = orthogonalize(grad.lerp(momentum, self.MOMENTUM))
            rows, columns = weight.shape
            weight.sub_(self.defaults["lr"] * max(1, rows / columns) ** 0.5 * update)


def orthogonalize(matrix: torch.Tensor) -> torch.Tensor:
    """The matrix with singular values near 1, by five rounds of a polynomial of theirs (Newton-Schulz)."""
    rows, columns = matrix.shape
    if rows > columns:  # products of the shorter side are cheaper
        return orthogonalize(matrix.T).T
    x = matrix / (matrix.norm() + 1e-7)
    for _ in range(5):
        square = x @ x.T
        x = 3.4445 * x + (2.0315 * square @ square - 4.775 * square) @ x
    return x


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
    """Train, or --evaluate. However it ends, no worker lives on."""
    with ExitStack() as cleanup:
        try:
            return run(args, cleanup)
        except WorkerLost as error:
            print(f"{SCRIPT}.py: {error}; the rest is ended", file=sys.stderr)
            raise SystemExit(1) from None


def run(args: Args, cleanup: ExitStack) -> dict:
    start_time = time.perf_counter()
    interrupts = Interrupts()
    device = pick_device(args.device)
    args = fill_defaults(args, device)
    torch.set_num_threads(args.threads)
    torch.set_flush_denormal(True)  # denormal numbers were seen to cost a run two thirds of its updates/s
    torch.manual_seed(args.seed)
    dtype = pick_precision(args.bf16, args.fp16, args.tf32, device)
    game = make_games(args, 1, torch.device("cpu"), EVAL_SEED)
    agents_per_game = len(game.obs)
    game_bytes = 4_000 * agents_per_game + 35 * game.cells  # about; measured in the arena and in navigation
    check_memory("--eval-episodes", args.eval_episodes, game_bytes // agents_per_game, torch.device("cpu"))
    agent = Agent(args, game, device)
    if args.evaluate is not None:
        with interrupts.at_once():
            return evaluate_run(agent, args, device) if RANK == 0 else {}
        return {}
    check_memory("--num-envs", args.num_envs, game_bytes, device)
    check_sizes(args, agents_per_game * args.num_envs // RANKS, game.max_steps)

    sdpa = None
    if args.network == "token-attention":
        sdpa = agent.encoder.layer1.kernel(dtype, device)
        if args.sdpa != "auto" and args.sdpa != sdpa.split("_")[0]:
            say(f"--sdpa {args.sdpa}: does not run here")
        say(f"attention runs in {sdpa}")
    starts = 0  # of this run before: each has random numbers of its own
    if args.resume is not None:
        checkpoint_path, checkpoint = load_checkpoint("--resume", args.resume, args.run_dir)
        check_layout(f"--resume {args.resume}", checkpoint, {"starts": 0}, SHAPE_FLAGS)
        starts = checkpoint["starts"] + 1

    # --- games, agent and rollout ---------------------------------------------------------------------------------
    envs = cleanup.enter_context(closing(make_envs(args, device, starts, game.obs.shape)))
    obs = envs.obs.to(device, copy=True)  # what each agent acts on next
    num_agents = len(obs)
    group_size = num_agents // envs.num_groups
    can_save_envs = args.env_id != "mettagrid" and isinstance(envs, LocalEnvs) and RANKS == 1
    weights = list(agent.parameters())
    use_graphs = args.cudagraph and device.type == "cuda" and args.vec_env == "device" and RANKS == 1
    by_muon = [agent.hidden.weight] if args.muon_learning_rate else []
    by_adam = [weight for weight in weights if not any(weight is other for other in by_muon)]
    muon_learning_rate = torch.tensor(args.muon_learning_rate, device=device)
    muon = Muon(by_muon, lr=muon_learning_rate)
    learning_rate = torch.tensor(args.learning_rate, device=device)
    optimizer = torch.optim.Adam(by_adam, lr=learning_rate, eps=1e-5, fused=True, capturable=use_graphs)
    init_adam(optimizer)
    scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)
    generator = torch.Generator(device).manual_seed(games_seed(args.seed, starts))
    rollout = Rollout(args, obs, agent.state_size, device)
    rollout_step = torch.zeros(envs.num_groups, 1, dtype=torch.int64, device=device)  # that each group is at
    state = torch.zeros(num_agents, agent.state_size, device=device)
    episode_start = torch.zeros(num_agents, dtype=torch.bool, device=device)  # whether an episode starts with `obs`
    next_value = torch.zeros(num_agents, device=device)
    final_value = torch.zeros(num_agents, device=device)
    advantage = torch.zeros(args.num_steps, num_agents, device=device)

    num_segments = args.num_steps // args.bptt_horizon * num_agents
    segments_per_minibatch = num_segments // args.num_minibatches
    minibatch_size = args.num_steps * num_agents // args.num_minibatches
    segments = torch.zeros(segments_per_minibatch, dtype=torch.int64, device=device)  # of the minibatch
    ent_coef = torch.tensor(args.ent_coef, device=device)
    prio_beta = torch.tensor(args.prio_beta0, device=device)
    approx_kl = torch.zeros((), device=device)
    part_losses = torch.zeros(args.grad_accumulation, 5, device=device)  # as `ppo_loss` returns them
    loss_sums = torch.zeros(5, device=device)  # the same, summed over the updates since the last log
    timer = PhaseTimer(device)
    global_step = 0
    updates = 0
    seconds_before = 0.0  # of the run that is resumed
    run_seconds = 0.0  # at the last `sync`

    def elapsed() -> float:
        return seconds_before + time.perf_counter() - start_time

    def progress() -> float:
        by_steps = global_step / args.total_timesteps if args.total_timesteps else 0
        by_seconds = run_seconds / args.max_seconds if args.max_seconds else 0
        return max(by_steps, by_seconds)

    # --- checkpoints ----------------------------------------------------------------------------------------------
    def run_state() -> dict[str, Any]:
        """All there is to a run, as tensors and plain values; of several ranks without games."""
        checkpoint = {
            "agent": agent.state_dict(),
            "optimizer": optimizer.state_dict()["state"],
            "muon": muon.state_dict()["state"],
            "scaler": scaler.state_dict(),
            "device": device.type,
            "generator": generator.get_state(),
            "starts": starts,
            "global_step": global_step,
            "updates": updates,
            "elapsed": elapsed(),
        }
        if can_save_envs:
            checkpoint["envs"] = envs.games.state_dict()
            checkpoint["obs"] = obs
            checkpoint["state"] = state
            checkpoint["episode_start"] = episode_start
        return checkpoint

    def load_run_state(checkpoint: dict[str, Any]) -> None:
        """Checks everything first: what does not fit is refused before anything is changed."""
        nonlocal global_step, updates, seconds_before, run_seconds
        asked = f"--resume {args.resume}"
        same_device = checkpoint.get("device") == device.type
        load_envs = can_save_envs and "envs" in checkpoint
        expected = run_state()
        if can_save_envs and not load_envs:
            for name in ("envs", "obs", "state", "episode_start"):
                del expected[name]
        if not expected["scaler"] or checkpoint.get("scaler") == {}:  # only float16 has something there
            del expected["scaler"]
        if not same_device:  # random numbers are of another kind there
            del expected["device"]
            del expected["generator"]
        flags = f"{SHAPE_FLAGS}, --muon-learning-rate, --instances, --size, --agents and --num-envs"
        check_layout(asked, checkpoint, expected, flags)
        try:
            if same_device:
                torch.Generator(device).set_state(checkpoint["generator"])
            if load_envs:
                envs.games.load_state_dict(checkpoint["envs"])
        except (RuntimeError, ValueError) as error:
            fail(f"{asked}: not a whole checkpoint of {SCRIPT}.py ({error})")

        global_step = checkpoint["global_step"]
        updates = checkpoint["updates"]
        seconds_before = run_seconds = checkpoint["elapsed"]
        if progress() >= 1:
            advice = "a larger --total-timesteps or --max-seconds works"
            fail(f"{asked}: its run is over after {global_step:,} steps and {seconds_before:.0f} s; {advice}")
        copy_tensors(expected["agent"], checkpoint["agent"])
        copy_tensors(expected["optimizer"], checkpoint["optimizer"])
        copy_tensors(expected["muon"], checkpoint["muon"])
        if "scaler" in expected:
            scaler.load_state_dict(checkpoint["scaler"])
        if load_envs:
            obs.copy_(checkpoint["obs"])
            state.copy_(checkpoint["state"])
            episode_start.copy_(checkpoint["episode_start"])
        if same_device and RANK == 0:
            generator.set_state(checkpoint["generator"])
        if not same_device:
            say("the random numbers begin anew: those of the checkpoint are of another kind of device")
        if not load_envs:
            say("the games start anew: only those of the embedded arena in this process are in a checkpoint")

    folder = None
    writer = None  # of the first rank, the only one that writes
    if args.resume is not None:
        load_run_state(checkpoint)
        folder = checkpoint_path.parent
        if RANK == 0:
            write_json(folder / "args.json", {"script": SCRIPT, **vars(args)})
            for unfinished in folder.glob("checkpoint.*.tmp"):  # of a run that was killed while it saved
                unfinished.unlink(missing_ok=True)
    if RANK == 0:
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

    # --- what the user is told at the start -----------------------------------------------------------------------
    precision = str(dtype).removeprefix("torch.")
    device_name = f"cpu, {torch.get_num_threads()} threads"
    if device.type == "cuda":
        device_name = torch.cuda.get_device_name(device)
    ranks = f", {RANKS} ranks" if RANKS > 1 else ""
    say(f"{folder} on {device_name} in {precision}{ranks}")
    if device.type == "cuda" and not ((args.bf16 or args.fp16) and args.cudagraph and args.compile):
        say("on CUDA --bf16, --cudagraph and --compile should make it faster; no GPU has measured it yet")
    if device.type == "cpu" and not args.bf16 and args.rnn != "none" and bf16_speedup() > 1.2:
        say("this CPU multiplies matrices faster in bf16: --bf16 learns faster here (benchmarks.md)")
    location = "in this process"
    if isinstance(envs, SubprocEnvs):
        location = f"in {args.num_workers} workers, {envs.num_groups} groups in flight"
    say(
        f"{num_agents} agents {location}; rollouts of {args.num_steps} steps, {args.update_epochs} x "
        f"{args.num_minibatches} updates on {segments_per_minibatch} segments of {args.bptt_horizon} (replay ratio "
        f"{args.update_epochs}); {sum(weight.numel() for weight in weights):,} weights"
    )

    # --- what the loop does, in its order -------------------------------------------------------------------------
    def autocast() -> torch.autocast:
        # Fresh for each forward: one that lives longer goes on using the weights as they were cast at its start.
        return torch.autocast(device.type, dtype, enabled=dtype != torch.float32, cache_enabled=False)

    @torch.no_grad()
    def policy(obs: torch.Tensor, state: torch.Tensor, episode_start: torch.Tensor) -> tuple[torch.Tensor, ...]:
        with autocast():
            logits, value, state = agent(obs[None], state, episode_start[None])
        return logits[0], value[0], state

    def act(group: int) -> None:
        """Start a step of a group of games, and store what it was decided on."""
        part = slice(group * group_size, (group + 1) * group_size)
        step = rollout_step[group]
        segment = step // args.bptt_horizon
        starts_segment = step % args.bptt_horizon == 0
        rollout.state[segment, part] = torch.where(starts_segment, state[part], rollout.state[segment, part])
        logits, value, next_state = policy_step(obs[part], state[part], episode_start[part])
        action = sample(logits, generator)
        rollout.obs[step, part] = obs[part]
        rollout.episode_start[step, part] = episode_start[part]
        rollout.action[step, part] = action
        rollout.value[step, part] = value
        rollout.logprob[step, part] = logits.log_softmax(1).gather(1, action[:, None]).squeeze(1)
        state[part] = next_state
        timer.lap("act")
        envs.send(group, action)
        timer.lap("env")

    def receive_and_store(group: int) -> None:
        """Store what that step led to."""
        part = slice(group * group_size, (group + 1) * group_size)
        step = rollout_step[group]
        results = [result.to(device, non_blocking=True) for result in envs.recv(group)]
        obs[part], reward, terminated, truncated, final_obs = results
        timer.lap("env")
        rollout.reward[step, part] = reward * args.reward_scale
        rollout.terminated[step, part] = terminated
        rollout.truncated[step, part] = truncated
        rollout.final_obs[part] = torch.where(truncated[:, None, None], final_obs, rollout.final_obs[part])
        rollout.final_state[part] = torch.where(truncated[:, None], state[part], rollout.final_state[part])
        episode_start[part] = terminated | truncated
        rollout_step[group] = (step + 1) % args.num_steps
        timer.lap("store")

    def act_step_and_store() -> None:
        """Of games in this process, which are one group."""
        act(0)
        receive_and_store(0)

    def collect_rollout() -> None:
        """`num_steps` steps of all agents. Workers play one group while the policy acts for the next one."""
        if isinstance(envs, LocalEnvs):
            for _ in range(args.num_steps):
                act_step_and_store()
            return
        for step in range(args.num_steps + 1):
            for group in range(envs.num_groups):
                if step > 0:
                    receive_and_store(group)
                if step < args.num_steps:
                    act(group)

    def bootstrap() -> None:
        """Values of what follows the rollout, and of what truncated episodes ended with."""
        next_value.copy_(policy_step(obs, state, episode_start)[1])
        no_start = torch.zeros_like(episode_start)
        final_value.copy_(policy_step(rollout.final_obs, rollout.final_state, no_start)[1])
        rollout.ratio.fill_(1)

    def estimate_advantages() -> None:
        """With the values and ratios that the updates before have left."""
        advantage.copy_(gae_step(*gae_inputs))

    def minibatch_loss(obs, state, episode_start, action, logprob, value, advantage, returns) -> tuple:
        """Loss, what it consists of, and the new values and policy ratios."""
        with autocast():
            logits, new_value, _ = agent(obs, state, episode_start)
        logp = logits.log_softmax(2)
        new_logprob = logp.gather(2, action[..., None]).squeeze(2)
        entropy = -(logp.exp() * logp).sum(2)
        coefs = (args.clip_coef, args.vf_clip_coef, ent_coef, args.vf_coef)
        loss, losses = ppo_loss(new_logprob, logprob, advantage, entropy, new_value, value, returns, *coefs)
        ratio = (new_logprob - logprob).detach().exp()
        return loss, losses, new_value.detach(), ratio

    def draw_segments() -> torch.Tensor:
        """Without replacement, by the size of their advantages. Returns the probability of every segment."""
        size = advantage.unflatten(0, (-1, args.bptt_horizon)).abs().sum(1).flatten()
        size = size + 0.01 * size.mean() + 1e-8  # a probability of 0 would make its importance weight infinite
        priority = size**args.prio_alpha
        probability = priority / priority.sum()
        noise = torch.empty_like(probability).exponential_(generator=generator)
        segments.copy_((probability / noise).topk(segments_per_minibatch).indices)
        return probability

    def update() -> None:
        if args.prio_alpha:
            probability = draw_segments()
        index = rollout.index(segments)
        mb_advantage = advantage.flatten()[index]
        mb_value = rollout.value.flatten()[index]
        mb_returns = mb_advantage + mb_value
        if args.norm_adv:
            mb_advantage = mb_advantage - mean_over_ranks(mb_advantage.mean())
            mb_advantage = mb_advantage / (mean_over_ranks(mb_advantage.square().mean()).sqrt() + 1e-8)
        if args.prio_alpha:
            mb_advantage = mb_advantage * (num_segments * probability[segments]) ** -prio_beta
        agent.zero_grad()
        for i in range(args.grad_accumulation):
            part = slice(i, None, args.grad_accumulation)
            part_index = index[:, part]
            inputs = rollout.minibatch(segments[part], part_index)
            targets = [mb_value[:, part], mb_advantage[:, part], mb_returns[:, part]]
            loss, losses, value, ratio = loss_step(*inputs, *targets)
            scaler.scale(loss / args.grad_accumulation).backward()
            finite = value.isfinite() & ratio.isfinite()  # others would reach all advantages of this rollout
            old_ratio = rollout.ratio.view(-1)[part_index]
            rollout.value.view(-1)[part_index] = torch.where(finite, value, mb_value[:, part])
            rollout.ratio.view(-1)[part_index] = torch.where(finite, ratio, old_ratio)
            part_losses[i] = losses
        average_gradients(weights)  # before `unscale_`, so that all ranks skip an update that overflows in float16
        scaler.unscale_(optimizer)
        scaler.unscale_(muon)
        nn.utils.clip_grad_norm_(weights, args.max_grad_norm)
        scaler.step(optimizer)
        muon.step()
        scaler.update()
        losses = mean_over_ranks(part_losses.mean(0))
        approx_kl.copy_(losses[3])
        loss_sums.add_(losses)

    def learn() -> None:
        """`update_epochs` times all minibatches, in an order that is drawn."""
        nonlocal updates
        for _ in range(args.update_epochs):
            order = torch.rand(num_segments, generator=generator, device=device).argsort()
            for minibatch, minibatch_segments in enumerate(order.view(args.num_minibatches, -1)):
                segments.copy_(minibatch_segments)
                # An update leaves new values and ratios in its segments, so new advantages in their agents' others.
                if minibatch == 0 or advantages_change:
                    estimate_advantages()
                update()
                updates += 1
                if args.target_kl and approx_kl.item() > args.target_kl:  # sync: of this flag
                    return

    def log() -> None:
        """On all ranks: what they count is summed up."""
        seconds = timer.read()
        wall_seconds = sum(seconds.values())
        new_steps = global_step - logged_step
        new_updates = updates - logged_updates
        new_samples = new_updates * minibatch_size * RANKS
        episodes, hearts, length, episodic_return = (mean_over_ranks(envs.read_finished().to(device)) * RANKS).tolist()
        pg_loss, v_loss, entropy, kl, clipfrac = (loss_sums / max(new_updates, 1)).tolist()
        loss_sums.zero_()
        estimate_advantages()
        returns = advantage + rollout.value
        scalars = {
            "charts/SPS": new_steps / wall_seconds,
            "charts/updates_per_second": new_updates / wall_seconds,
            "charts/samples_per_second": new_samples / wall_seconds,
            "charts/replay_ratio": new_samples / new_steps,
            "losses/learning_rate": learning_rate.item(),
            "losses/ent_coef": ent_coef.item(),
            "losses/explained_variance": 1 - (advantage.var() / returns.var()).item(),
            "perf/rollout_fraction": 1 - seconds["learn"] / wall_seconds,
        }
        for phase in seconds:
            scalars[f"perf/{phase}_ms"] = 1000 * seconds[phase] * num_agents * RANKS / new_steps
        if episodes:
            scalars["charts/score"] = hearts / episodes
            scalars["charts/episodic_length"] = length / episodes
            scalars["charts/episodic_return"] = episodic_return / episodes
        if new_updates:
            scalars["losses/pg_loss"] = pg_loss
            scalars["losses/v_loss"] = v_loss
            scalars["losses/entropy"] = entropy
            scalars["losses/approx_kl"] = kl
            scalars["losses/clipfrac"] = clipfrac
        if device.type == "cuda":
            scalars["perf/gpu_mem_gib"] = torch.cuda.memory_allocated(device) / 2**30
            with suppress(ImportError, RuntimeError):  # without NVML
                scalars["perf/gpu_util"] = torch.cuda.utilization(device)
        if RANK == 0:
            write_scalars(writer, scalars, global_step)
        line = f"{min(progress(), 1):4.0%}  step {global_step:>11,}"
        line += f"  SPS {new_steps / wall_seconds:>9,.0f}  updates/s {new_updates / wall_seconds:>5.1f}"
        line += f"  entropy {scalars.get('losses/entropy', math.nan):4.2f}  kl {kl:.4f}"
        line += f"  return {scalars.get('charts/episodic_return', math.nan):6.2f}"
        line += f"  hearts {scalars.get('charts/score', math.nan):5.2f}"
        say(line, end="\r" if sys.stdout.isatty() else "\n")
        loss = pg_loss + v_loss - entropy
        if not math.isfinite(loss):
            fail(f"--learning-rate {args.learning_rate:g}: the loss is {loss} since the last log; a lower one works")

    def evaluate_and_log(episodes: int) -> dict[str, float]:
        scores = evaluate(agent, args, episodes, device)
        write_scalars(writer, {name.replace("_", "/", 1): score for name, score in scores.items()}, global_step)
        return scores

    def save() -> None:
        if RANK > 0:
            return
        if not all(weight.isfinite().all() for weight in weights):
            print(f"{folder}: the weights are not finite and were not saved", file=sys.stderr)
            return
        header = {"script": SCRIPT, "version": CHECKPOINT_VERSION, "args": vars(args)}
        save_checkpoint(folder / "checkpoint.pt", header | run_state())

    # --- switches: --compile and --cudagraph ----------------------------------------------------------------------
    policy_step = policy
    gae_step = gae
    loss_step = minibatch_loss
    gae_inputs = [rollout.reward, rollout.value, next_value, final_value]
    gae_inputs += [rollout.terminated, rollout.truncated, rollout.ratio]
    gae_inputs += [args.gamma, args.gae_lambda, args.rho_clip, args.c_clip]
    # Where a segment is all that a rollout has of an agent and is drawn once, advantages of the start of an epoch do.
    advantages_change = args.bptt_horizon < args.num_steps or args.prio_alpha > 0
    if args.compile:  # with tensors of the shapes and strides that the loop has, and none twice: else it compiles again
        group = slice(group_size)
        policy_step = try_compile(policy, args.compile_mode, obs[group], state[group], episode_start[group])
        bootstrap()
        rollout.obs[:] = obs
        gae_step = try_compile(gae, args.compile_mode, *gae_inputs)
        part = slice(None, None, args.grad_accumulation)
        index = rollout.index(segments)
        targets = [torch.zeros_like(index, dtype=torch.float32)[:, part] for _ in range(3)]
        example = [*rollout.minibatch(segments[part], index[:, part]), *targets]
        loss_step = try_compile(minibatch_loss, args.compile_mode, *example)
        if can_save_envs and envs.games.fixed_shapes:  # on a CPU the games do less than what fixed shapes ask for
            before = {name: tensor.clone() for name, tensor in envs.games.state_dict().items()}
            no_action = torch.zeros(num_agents, dtype=torch.int64, device=device)
            envs.step = try_compile(envs.step, args.compile_mode, no_action)
            envs.games.load_state_dict(before)  # that was a trial
    is_compiled = loss_step is not minibatch_loss
    if use_graphs:
        act_step_and_store = CUDAGraphStep(act_step_and_store, generator, timer)
        bootstrap = CUDAGraphStep(bootstrap, generator, timer)
        estimate_advantages = CUDAGraphStep(estimate_advantages, generator, timer)
        update = CUDAGraphStep(update, generator, timer, scaler)
    elif args.cudagraph:
        say("--cudagraph: needs CUDA, --vec-env device and one rank; the loop runs without graphs")

    # --- the loop -------------------------------------------------------------------------------------------------
    first_step = logged_step = global_step
    first_update = logged_updates = updates
    scores = {}
    try:
        run_seconds, stop = sync(elapsed(), bool(interrupts))
        last_log = last_eval = last_checkpoint = run_seconds
        if RANK == 0:
            write_scalars(writer, {"perf/warmup_s": time.perf_counter() - start_time}, global_step)
        if RANKS > 1:
            save()  # from the start torchrun can go on with it
        timer.lap()
        while progress() < 1 and not stop:
            # 1 act and step, 2 store
            collect_rollout()
            global_step += args.num_steps * num_agents * RANKS
            bootstrap()
            timer.lap("act")

            # 3 learn
            run_fraction = min(progress(), 1)
            if args.anneal_lr:
                left = 0.5 * (1 + math.cos(math.pi * run_fraction))
                learning_rate.fill_(args.learning_rate * left)
                muon_learning_rate.fill_(args.muon_learning_rate * left)
            ent_coef.fill_(args.ent_coef + (args.end_ent_coef - args.ent_coef) * run_fraction)
            prio_beta.fill_(args.prio_beta0 + (1 - args.prio_beta0) * run_fraction)
            learn()
            timer.lap("learn")

            # 4 log, evaluate, save: at the same time on all ranks
            run_seconds, stop = sync(elapsed(), bool(interrupts))
            if run_seconds >= last_log + args.log_every:
                last_log = run_seconds
                log()
                logged_step = global_step
                logged_updates = updates
                timer.lap("log")
            if args.eval_every and run_seconds >= last_eval + args.eval_every:
                if RANK == 0:
                    with interrupts.at_once():
                        scores = evaluate_and_log(max(args.eval_episodes // 10, 1))
                run_seconds, stop = sync(elapsed(), bool(interrupts))
                last_eval = run_seconds  # what it took is no part of the next interval
                timer.lap()
            if args.checkpoint_every and run_seconds >= last_checkpoint + args.checkpoint_every:
                last_checkpoint = run_seconds
                save()
                timer.lap()
        if global_step > logged_step:
            log()
    except (WorkerLost, RankLost):
        save()
        raise

    # --- the end: what must not be lost comes first ---------------------------------------------------------------
    wall_seconds = elapsed()
    save()
    envs.close()
    if RANKS > 1:
        dist.destroy_process_group()
    busy_seconds = sum(timer.total.values()) or math.inf
    new_steps = global_step - first_step
    new_updates = updates - first_update
    new_samples = new_updates * minibatch_size * RANKS
    graphs = [act_step_and_store, bootstrap, estimate_advantages, update]
    summary = {
        "script": SCRIPT,
        "device": device_name,
        "peak_memory_gib": peak_memory_gib(device),
        "precision": precision,
        "compiled": is_compiled,
        "cudagraph": use_graphs and all(part.graph is not None for part in graphs),
        "sdpa": sdpa,
        "env_steps": global_step,
        "wall_seconds": wall_seconds,
        "env_steps_per_second": new_steps / busy_seconds,
        "updates_per_second": new_updates / busy_seconds,
        "samples_per_second": new_samples / busy_seconds,
        "replay_ratio": new_samples / max(new_steps, 1),
        "rollout_fraction": 1 - timer.total["learn"] / busy_seconds,
        "train_fraction": timer.total["learn"] / busy_seconds,
        **scores,
    }
    if RANK > 0:
        return summary
    write_json(folder / "summary.json", summary)
    say("")
    if not (stop or interrupts):
        with interrupts.at_once():
            summary |= evaluate_and_log(args.eval_episodes)
            write_json(folder / "summary.json", summary)
            say("  ".join(f"{name} {value:g}" for name, value in summary.items() if name.startswith("eval")))
            if args.video:
                save_gif(agent, args, device, folder)
            say(f"watch it play: python {SCRIPT}.py --evaluate {folder} --render")
    if stop or interrupts:
        say(f"stopped; {folder / 'checkpoint.pt'} goes on with python {SCRIPT}.py --resume {folder}")
    with suppress(OSError):  # on a full disk
        writer.close()
    return summary


def parse_args(command_line: list[str] | None = None) -> Args:
    """The command line (None: that of this process), on top of --preset, or of the flags of --resume or --evaluate."""
    if command_line is None:
        command_line = sys.argv[1:]
    preset_parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    preset_parser.add_argument("--preset", nargs="?")
    preset = preset_parser.parse_known_args(command_line)[0].preset
    args = tyro.cli(Args, args=command_line, default=PRESETS.get(preset, Args()), description=__doc__)
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
    args = tyro.cli(Args, args=flags + command_line, description=__doc__)
    if args.preset != saved_args["preset"]:
        fail(f"--preset {args.preset}: --{option} takes the flags of that run, of --preset {saved_args['preset']}")
    config = saved_args["env_config"]
    if config is not None and args.env_config is None:
        fail(f"--{option} {name}: played --env-config {config}; a checkpoint does not choose code: give this flag too")
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
            flags = "--num-envs, --num-steps or --eval-episodes, or more --num-minibatches or --grad-accumulation"
            fail(f"out of memory: a smaller {flags} works")
        if not isinstance(error, OSError):
            raise
        fail(str(error))

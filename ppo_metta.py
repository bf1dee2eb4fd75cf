"""Recurrent PPO for many agents in a MettaGrid arena: games, acting and learning on one device, or games in workers.

    python ppo_metta.py                                        # ten minutes, then an evaluation and a GIF
    python ppo_metta.py --bf16 --cudagraph                     # made for a GPU
    python ppo_metta.py --env-id mettagrid --vec-env subproc   # the real MettaGrid, in worker processes
    torchrun --nproc-per-node 2 ppo_metta.py                   # two learners, one policy
    python ppo_metta.py --evaluate latest --render             # watch the last agents play

To read it: `Tokens` and `Agent` are what learns, `gae` and `ppo_loss` are what it learns, `rollout` in `main` is what
from, and `update` in `main` is how. The rest is switches and bookkeeping.
"""

import json
import math
import os
import resource
import signal
import subprocess
import sys
import time
import timeit
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NoReturn

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn as nn
import torch.nn.functional as F
import tyro
from PIL import Image
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.tensorboard import SummaryWriter

from envs.metta import ACTIONS, FEATURES, MOVES, NOOP, VARIANTS, VIEW, MettaArena, MettaBatch, Rules

SCRIPT = Path(__file__).stem
EVAL_SEED = 2**31
RANK, RANKS = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))  # set by torchrun


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
    """values of the flags that are None: ours, or those Metta's demo and its "ultra fast" configuration had"""

    # Environment
    env_id: Literal["MettaArena-v0", "MettaNavigation-v0", "mettagrid"] | None = None
    """arena of envs/metta.py, or the real MettaGrid (None: by preset, MettaArena-v0 by default)"""
    env_config: str | None = None
    """with --env-id mettagrid: package.module:attribute of a MettaGridConfig (None: mines and altars)"""
    easy: bool = True
    """altars, armories and laseries of the arena ask for one item only"""
    rewards: Literal["hearts", "shaped"] = "shaped"
    """the arena rewards hearts only, or the first ore, battery and gear too"""
    instances: int | None = None
    """copies of the arena in a game, 1 to 4 (None: as the env-id has it)"""
    size: int | None = None
    """cells along a side of an instance (None: 25)"""
    agents: int | None = None
    """agents of an instance (None: as the env-id has it)"""
    num_envs: int | None = None
    """games played side by side, each of several agents (None: by preset and --env-id)"""
    action_repeat: int = 1
    """steps that an action lasts"""
    vec_env: Literal["device", "subproc"] | None = None
    """games on the training device, or in worker processes (None: by preset; the real MettaGrid takes workers)"""
    num_workers: int | None = None
    """processes of subproc; 0 plays in this one (None: by preset, at most one for each core, on a CPU for every second
    one, and as many as the games can be dealt out to)"""
    async_factor: int | None = None
    """parts of the games in flight: workers play some while the policy looks at another (None: by preset)"""

    # Algorithm
    network: Literal["token-bag", "box-cnn", "token-attention"] = "token-bag"
    """one layer over all tokens, two convolutions over a box of them, or attention between them"""
    rnn: Literal["lstm", "gru", "none"] = "lstm"
    """memory of an agent"""
    hidden_size: int = 128
    """width of the layers and of the memory"""
    learning_rate: float | None = None
    """Adam's step size (None: by preset)"""
    anneal_lr: bool = True
    """let the step size fall to nothing over the run, as half a cosine"""
    batch_size: int | None = None
    """agent decisions of a rollout, all agents together (None: by preset; one segment of every agent)"""
    minibatch_size: int | None = None
    """agent decisions of an update (None: by preset; a sixteenth of a rollout)"""
    grad_accumulation: int = 1
    """parts of a minibatch that go through the network one after another; the gradient is that of all"""
    bptt_horizon: int | None = None
    """steps of a segment, the unit of learning that gradients flow through (None: by preset)"""
    update_epochs: int | None = None
    """times that a rollout is learned from (0: the agents only play; None: by preset and --env-id)"""
    reward_scale: float | None = None
    """rewards are learned from times this: Adam's steps leave a noise in the values that small ones drown in (None: by
    preset)"""
    gamma: float | None = None
    """discount (None: by preset and --env-id)"""
    gae_lambda: float | None = None
    """how far advantages look ahead (None: by preset)"""
    rho_clip: float = 1.0
    """V-trace: most that a policy ratio counts in a TD error"""
    c_clip: float = 1.0
    """V-trace: most that it counts in what follows"""
    norm_adv: bool = True
    """normalise the advantages of each minibatch"""
    clip_coef: float | None = None
    """policy ratios are clipped this far from 1 (None: by preset)"""
    vf_clip_coef: float | None = None
    """values are clipped this far from what they were (None: by preset)"""
    ent_coef: float | None = None
    """weight of the entropy bonus (None: by preset and --env-id)"""
    end_ent_coef: float | None = None
    """weight it falls to, linearly, by the end of the run (None: by preset, Metta's let it stay)"""
    vf_coef: float | None = None
    """weight of the value loss (None: by preset)"""
    max_grad_norm: float = 0.5
    """gradients are clipped to this norm"""
    target_kl: float | None = None
    """the rest of an iteration's updates is left out when the policy has moved this far (None: never)"""
    prio_alpha: float = 0.0
    """segments are drawn in proportion to their advantages to this power (0: each once)"""
    prio_beta0: float = 0.6
    """how much of that is weighed against at the start; all of it at the end"""

    # Speed
    bf16: bool = False
    """forward passes in bfloat16, where the hardware has it"""
    fp16: bool = False
    """forward passes in float16 with gradient scaling (CUDA)"""
    tf32: bool = False
    """fp32 matmuls on tensor cores (CUDA)"""
    compile: bool = False
    """torch.compile acting and the loss"""
    compile_mode: Literal["default", "reduce-overhead", "max-autotune"] = "default"
    """torch.compile's mode"""
    cudagraph: bool = False
    """capture acting, stepping, storing and learning as CUDA graphs"""
    sdpa: Literal["auto", "flash", "efficient", "cudnn", "math"] = "auto"
    """attention kernel to try first (--network token-attention); math is the one with the padding mask written out"""
    threads: int | None = None
    """CPU threads (None: all cores that workers leave, 8 at most)"""

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
    profile: bool = False
    """write a torch profiler trace of an iteration, and its longest operations, into the run folder"""


CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
DEMO = dict(env_id="MettaNavigation-v0", vec_env="subproc", learning_rate=3e-4, gamma=0.99, gae_lambda=0.95)
DEMO |= dict(update_epochs=1, reward_scale=1.0, clip_coef=0.1, vf_clip_coef=0.1, ent_coef=0.01, vf_coef=0.44)
PRESETS = {  # of flags that are None
    "default": {
        "cpu": dict(num_envs=128),
        "cuda": dict(num_envs=4096),
        "both": dict(env_id="MettaArena-v0", vec_env="device", num_workers=CORES, async_factor=2, bptt_horizon=32,
                     update_epochs=1, learning_rate=3e-3, reward_scale=10.0, gamma=0.97, gae_lambda=0.95, clip_coef=0.2,
                     vf_clip_coef=10.0, ent_coef=0.005, end_ent_coef=0.001, vf_coef=0.5),
        # An altar is near, where the arena's hearts take several errands; in the real game a mine is at hand as well.
        "MettaNavigation-v0": dict(gamma=0.95),
        "mettagrid": dict(num_envs=32, gamma=0.9, ent_coef=0.001, end_ent_coef=0.0001, update_epochs=2),
    },
    "original": {"both": DEMO | dict(num_envs=64, batch_size=16_384, minibatch_size=512, bptt_horizon=64,
                                     num_workers=1, async_factor=1)},
    "ultra-fast": {"both": DEMO | dict(num_envs=512, batch_size=262_144, minibatch_size=32_768, bptt_horizon=32,
                                       num_workers=16, async_factor=8)},
}  # fmt: skip


def resolve(args: Args, device: torch.device) -> Args:
    """`args` with nothing a run needs left None. Values that cannot work are refused here, before anything starts."""
    preset = PRESETS[args.preset]
    defaults = preset["both"] | preset.get(device.type, {}) | preset.get(args.env_id, {})
    if args.env_id == "mettagrid":
        defaults["vec_env"] = "subproc"
    if args.total_timesteps is None:
        defaults["max_seconds"] = 600.0
    most_workers = min(defaults.pop("num_workers"), max(CORES // 2, 1) if device.type == "cpu" else CORES)
    args = replace(args, **{name: value for name, value in defaults.items() if getattr(args, name) is None})
    if args.end_ent_coef is None:
        args = replace(args, end_ent_coef=args.ent_coef)

    shares = {"gamma", "gae_lambda", "prio_beta0"}
    may_be_0 = shares | {"seed", "num_workers", "update_epochs", "ent_coef", "end_ent_coef", "prio_alpha"}
    may_be_0 |= {"eval_every", "checkpoint_every"}
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
    if args.network == "token-attention" and args.hidden_size % TokenAttention.HEADS:
        refuse(f"--hidden-size {args.hidden_size}: attention needs a multiple of {TokenAttention.HEADS}")
    if args.render and (not args.evaluate or args.env_id == "mettagrid"):
        refuse("--render: shows trained agents in the embedded arena, so it needs --evaluate PATH of such a run")
    if args.vec_env == "device" and args.env_id == "mettagrid":
        refuse("--vec-env device: the real MettaGrid plays on the CPU; subproc works, with --num-workers 0 too")
    if args.env_config and args.env_id != "mettagrid":
        refuse(f"--env-config {args.env_config}: is of --env-id mettagrid, not {args.env_id}")
    if args.num_workers is None:  # as many as the games can be dealt out to evenly, whatever number of cores there is
        counts = range(most_workers, 0, -1)
        most_workers = next((n for n in counts if args.num_envs % (n * args.async_factor) == 0), 1)
        args = replace(args, num_workers=most_workers)
    if args.threads is None:  # all threads wait for one whose core a worker has
        busy = args.num_workers if args.vec_env == "subproc" else 0
        args = replace(args, threads=min(max(CORES - busy, 1), 8))
    if args.vec_env == "subproc" and args.num_workers:
        if args.num_workers > args.num_envs:
            refuse(f"--num-workers {args.num_workers}: more than games; at most --num-envs {args.num_envs} works")
        if args.num_envs % (args.num_workers * args.async_factor):
            parts = args.num_workers * args.async_factor
            refuse(f"--num-envs {args.num_envs}: --num-workers x --async-factor is {parts}; "
                   f"{nearest(args.num_envs, parts)} works")  # fmt: skip
    rules_of(args)
    return args


def with_sizes(args: Args, num_agents: int, max_steps: int) -> Args:
    """`args` with batch sizes, for which the games have to be known. Sizes that do not divide are refused."""
    segment = num_agents * args.bptt_horizon
    batch_size = args.batch_size or segment
    if batch_size % segment:
        product = f"agents x --bptt-horizon, {num_agents} x {args.bptt_horizon}"
        refuse(f"--batch-size {batch_size}: must be a multiple of {product}; {nearest(batch_size, segment)} works")
    if batch_size // num_agents * args.action_repeat > max_steps:
        most = max_steps // args.action_repeat // args.bptt_horizon * segment
        refuse(f"--batch-size {batch_size}: a rollout would be longer than an episode; at most {most} works")
    segments, parts = batch_size // args.bptt_horizon, args.grad_accumulation
    sizes = [n * args.bptt_horizon for n in range(parts, segments + 1, parts) if segments % n == 0]
    closest = min(sizes, key=lambda size: abs(size - (args.minibatch_size or batch_size // 16)), default=None)
    minibatch_size = args.minibatch_size or closest
    if minibatch_size not in sizes:
        works = f"{closest} works" if closest else "another --grad-accumulation or --batch-size might"
        need = f"must divide --batch-size {batch_size} and hold {parts} or a multiple of it segments of "
        refuse(f"--minibatch-size {minibatch_size}: {need}{args.bptt_horizon}; {works}")
    return replace(args, batch_size=batch_size, minibatch_size=minibatch_size)


def nearest(number: int, unit: int) -> int:
    """The multiple of `unit` closest to `number`, but not 0."""
    return max(unit, round(number / unit) * unit)


def rules_of(args: Args) -> dict[str, Any]:
    """Rules of the embedded arena, as keywords."""
    rules = VARIANTS.get(args.env_id, {}) | {"easy": args.easy, "rewards": args.rewards}
    rules |= {name: getattr(args, name) for name in ("instances", "size", "agents") if getattr(args, name) is not None}
    try:
        Rules(**rules)
    except ValueError as error:
        flags = " ".join(f"--{name} {rules[name]}" for name in ("size", "agents", "instances") if name in rules)
        refuse(f"{flags}: {error}")
    return rules


class Games:
    """Games of one process: those of the arena on `device`, or real ones on the CPU. Agents are lanes.

    An action lasts `action_repeat` steps; an agent whose episode ends meanwhile does nothing for the rest of them.
    """

    def __init__(self, args: Args, num_games: int, device: torch.device, seed: int, evaluation: bool = False) -> None:
        self.repeat, self.groups, first = args.action_repeat, 1, not evaluation
        if args.env_id == "mettagrid":
            try:
                from envs.real_mettagrid import RealMettaGrid

                self.games = RealMettaGrid(num_games, args.env_config, seed, random_first_length=first)
            except (ImportError, ValueError) as error:
                refuse(f"--env-id mettagrid: {str(error).splitlines()[0]}")
            self.finished, self.length = torch.zeros(4), torch.zeros(self.games.num_agents)
            self.features = {id: name for id, (name, _) in self.games.features.items()}
            self.num_actions, self.window = self.games.num_actions, self.games.window
            names = self.games.action_names
            self.noop = names.index("noop") if "noop" in names else 0
            self.max_steps = self.games.config.game.max_steps or sys.maxsize
            self.step_once = self.step_real
            self.obs = torch.from_numpy(self.games.obs)
        else:
            self.games = MettaBatch(num_games, device, seed, **rules_of(args), random_first_length=first)
            self.finished, self.features = self.games.finished, dict(enumerate(FEATURES))
            self.num_actions, self.window, self.noop = len(ACTIONS), (2 * VIEW + 1, 2 * VIEW + 1), NOOP
            self.max_steps, self.step_once = self.games.rules.max_steps, self.games.step
            self.obs = self.games.reset()

    def step_real(self, action: torch.Tensor):
        """The real games with tensors around; a heart is a reward of 1 there."""
        obs, reward, terminated, truncated, info = map_tensors(self.games.step(action.numpy()))
        self.length += 1
        done = terminated | truncated
        sums = [done, info["return"] * done, self.length * done, info["return"] * done]
        self.finished += torch.stack(sums).sum(1)
        self.length *= ~done
        return obs, reward, terminated, truncated, info | {"hearts": info["return"]}

    def step(self, action: torch.Tensor):
        obs, reward, terminated, truncated, info = self.step_once(action)
        if self.repeat > 1:
            final_obs, hearts = info["final_obs"].clone(), info["hearts"]
            for _ in range(self.repeat - 1):
                over = terminated | truncated
                obs, more, ends, cut, info = self.step_once(action.masked_fill(over, self.noop))
                reward = reward + more * ~over
                terminated, truncated = terminated | (ends & ~over), truncated | (cut & ~over)
                final_obs = torch.where(over[:, None, None], final_obs, info["final_obs"])
                hearts = torch.where(over, hearts, info["hearts"])
            info = info | {"final_obs": final_obs, "hearts": hearts}
        return obs, reward, terminated, truncated, info

    def send(self, group: int, action: torch.Tensor) -> None:
        obs, reward, terminated, truncated, info = self.step(action.to(self.obs.device))
        self.result = obs, reward, terminated, truncated, info["final_obs"]

    def recv(self, group: int) -> tuple[torch.Tensor, ...]:
        """What the last `send` led to: obs, reward, terminated, truncated and final_obs."""
        return self.result

    def read_finished(self) -> torch.Tensor:
        """Episodes ended since the last call, and sums of their hearts, length and return."""
        sums = self.finished.clone()
        self.finished.zero_()
        return sums

    def close(self) -> None:
        pass


def map_tensors(result: tuple) -> tuple:
    """NumPy arrays as tensors that share their memory."""
    *arrays, info = result
    return *map(torch.from_numpy, arrays), {name: torch.from_numpy(array) for name, array in info.items()}


class WorkerLost(RuntimeError):
    """A worker has died or does not answer."""


class Workers:
    """Games in `num_workers` processes over shared memory, in `async_factor` groups that play independently.

    Lanes are ordered by group, then worker. A worker is told the number of a group whose actions are there, steps that
    group's games, and answers with the number.
    """

    PATIENCE = 10.0  # seconds

    def __init__(self, args: Args, example: Games, seed: int, device: torch.device) -> None:
        self.groups, workers = args.async_factor, args.num_workers
        games = args.num_envs // (workers * self.groups)
        agents, *tokens = example.obs.shape  # of one game
        shape = self.groups, workers, games * agents

        def shared(dtype: torch.dtype, *more: int) -> torch.Tensor:
            tensor = torch.zeros(*shape, *more, dtype=dtype).share_memory_()
            if device.type == "cuda":  # pinned, so that copies to the device wait for nothing
                torch.cuda.cudart().cudaHostRegister(tensor.data_ptr(), tensor.nbytes, 0)
            return tensor

        obs, final_obs = shared(torch.uint8, *tokens), shared(torch.uint8, *tokens)
        self.results = obs, shared(torch.float32), shared(torch.bool), shared(torch.bool), final_obs
        self.action, self.finished = shared(torch.int64), torch.zeros(self.groups, workers, 4).share_memory_()
        context = mp.get_context("spawn")  # a fork would inherit threads, and CUDA, in no usable state
        self.pipes, self.processes = [], []
        for worker in range(workers):
            pipe, theirs = context.Pipe()
            mine = [tensor[:, worker] for tensor in (*self.results, self.action, self.finished)]
            seeds = [seed + worker * self.groups + group for group in range(self.groups)]
            process = context.Process(target=work, args=(args, games, seeds, theirs, mine), daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(pipe)
            self.processes.append(process)
        for _ in range(self.groups):
            self.wait(120)  # a worker imports PyTorch first
        self.obs = obs.flatten(0, 2)

    def wait(self, patience: float) -> None:
        deadline = time.monotonic() + patience
        for number, (pipe, process) in enumerate(zip(self.pipes, self.processes)):
            try:
                if not pipe.poll(max(deadline - time.monotonic(), 0)):
                    raise WorkerLost(f"worker {number} (process {process.pid}) has not answered for {patience:g} s")
                pipe.recv()
            except (EOFError, ConnectionError):
                process.join(1)
                code = process.exitcode
                raise WorkerLost(f"worker {number} (process {process.pid}) died with exit code {code}") from None

    def send(self, group: int, action: torch.Tensor) -> None:
        self.action[group].view(-1).copy_(action)
        for pipe in self.pipes:
            with suppress(OSError):  # a worker that is gone is named when its answer is missed
                pipe.send(group)

    def recv(self, group: int) -> tuple[torch.Tensor, ...]:
        self.wait(self.PATIENCE)  # groups are answered in the order they were sent in
        return tuple(part[group].flatten(0, 1) for part in self.results)

    def read_finished(self) -> torch.Tensor:
        sums = self.finished.sum((0, 1))
        self.finished.zero_()
        return sums

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()


def work(args: Args, num_games: int, seeds: list[int], pipe: Any, shared: list[torch.Tensor]) -> None:
    """Body of a worker: a `Games` for each group."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the trainer decides
    torch.set_num_threads(1)
    *results, action, finished = shared
    groups = [Games(args, num_games, torch.device("cpu"), seed) for seed in seeds]
    for group, games in enumerate(groups):
        results[0][group] = games.obs
        pipe.send(group)
    with suppress(EOFError, ConnectionError):  # the trainer is gone
        while True:
            group = pipe.recv()
            obs, reward, terminated, truncated, info = groups[group].step(action[group])
            for shared, result in zip(results, (obs, reward, terminated, truncated, info["final_obs"])):
                shared[group] = result
            finished[group] += groups[group].read_finished()
            pipe.send(group)


def make_envs(args: Args, device: torch.device, example: Games) -> Games | Workers:
    """`num_envs` games as the flags want them; every rank of a torchrun plays games of its own."""
    seed = args.seed + 1_000_003 * RANK
    if args.vec_env == "subproc" and args.num_workers:
        return Workers(args, example, seed, device)
    return Games(args, args.num_envs, device if args.vec_env == "device" else torch.device("cpu"), seed)


# ---------------------------------------------------------------------------------------------------- networks


class Tokens(nn.Module):
    """Tokens (B, tokens, 3) uint8 of place, feature and value -> channel, cell and weight of each, (B, tokens).

    A channel is a feature, or one of 16 values of a feature that has no order. The weight is 1 there, and half the
    logarithm of 1 + value elsewhere: the first ore matters more than the fiftieth. Cells number the window row by row;
    two more take tokens of no place (254), and those of the cell an agent faces, whichever it is: what to do with what
    is in front does not depend on the heading. Empty tokens (255) weigh nothing.
    """

    FACED = 253
    KINDS = {"type", "orientation", "last_action", "tag", "vibe"}

    def __init__(self, features: dict[int, str], window: tuple[int, int], device: torch.device) -> None:
        super().__init__()
        value, self.channels, self.cells = torch.arange(256), 0, window[0] * window[1] + 2
        self.heading = next((feature for feature, name in features.items() if name == "orientation"), None)
        self.centre = window[0] // 2 << 4 | window[1] // 2
        channel, weight = torch.zeros(256, 256, dtype=torch.int32), torch.zeros(256, 256)
        for feature, name in features.items():
            kind = name in self.KINDS
            channel[feature] = self.channels + (value % 16 if kind else 0)
            weight[feature] = 1 if kind else (1 + value).log2() / 2
            self.channels += 16 if kind else 1
        place = torch.arange(256)
        cell = ((place >> 4) * window[1] + (place & 15)).clamp(max=self.cells - 3)
        cell[self.FACED :] = torch.tensor([self.cells - 1, self.cells - 2, self.cells - 2])
        ahead = torch.tensor([(row << 4) + column for row, column in MOVES] + [0] * 252) + self.centre
        tables = {"channel": channel.view(-1), "weight": weight.view(-1), "cell": cell.int(), "ahead": ahead.byte()}
        for name, table in tables.items():
            self.register_buffer(name, table.to(device), persistent=False)

    def face(self, tokens: torch.Tensor) -> torch.Tensor:
        """`tokens` (B, tokens, 3), with a place of its own for what is in front of an agent that has a heading."""
        if self.heading is None:
            return tokens
        place, feature, value = tokens.unbind(2)
        own = (place == self.centre) & (feature == self.heading)
        ahead = self.ahead.index_select(0, (value * own).amax(1).int())
        return torch.stack([place.masked_fill(place == ahead[:, None], self.FACED), feature, value], 2)

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        shape, (place, feature, value) = tokens.shape[:-1], tokens.reshape(-1, 3).int().unbind(1)
        key = feature << 8 | value
        weight = self.weight.index_select(0, key) * (place < 255)
        parts = self.channel.index_select(0, key), self.cell.index_select(0, place), weight
        return tuple(part.view(shape) for part in parts)


class SparseLinear(torch.autograd.Function):
    """Sum of `weight` times the rows of `table` that each bag names: a linear layer on inputs that are nearly all 0.

    Forward and backward are the same operation: a row of the gradient is a bag of rows of the output's gradient.
    PyTorch's own backward of embedding_bag takes twice as long on a CPU.
    """

    @staticmethod
    def forward(ctx, table, row, start, weight):  # (R, width), (tokens,), (B,) first token of a bag, (tokens,)
        ctx.save_for_backward(row, start, weight)
        ctx.rows = len(table)
        return F.embedding_bag(row, table, start, mode="sum", per_sample_weights=weight)

    @staticmethod
    def backward(ctx, grad):
        row, start, weight = ctx.saved_tensors
        row, order = row.sort()
        length = torch.diff(start, append=start.new_tensor([len(row)]))
        bag = torch.arange(len(start), dtype=row.dtype).repeat_interleave(length).index_select(0, order)
        first = torch.searchsorted(row, torch.arange(ctx.rows, dtype=row.dtype), out_int32=True)
        weight = weight.index_select(0, order)
        return F.embedding_bag(bag, grad.contiguous(), first, mode="sum", per_sample_weights=weight), None, None, None


class TokenBag(nn.Module):
    """A linear layer over all channels in all cells, then another one.

    On a CPU only tokens that are there are looked at, a hundredth of the inputs; a GPU multiplies all.
    """

    def __init__(self, see: Tokens, width: int, device: torch.device) -> None:
        super().__init__()
        self.see = see
        # As for a layer with as many inputs as an agent sees tokens.
        self.table = nn.Parameter(torch.randn(see.channels * see.cells, width, device=device) * 60**-0.5)
        self.bias = nn.Parameter(torch.zeros(width, device=device))
        self.hidden = nn.Linear(width, width, device=device)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return F.relu(self.hidden(F.relu((self.sparse if tokens.device.type == "cpu" else self.dense)(tokens))))

    @torch.compiler.disable
    def sparse(self, tokens: torch.Tensor) -> torch.Tensor:
        there = tokens[:, :, 0] < 255
        number = there.sum(1)
        most = int(number.max())  # they stand in front
        there, tokens, end = there[:, :most], self.see.face(tokens[:, :most]), number.cumsum(0)
        channel, cell, weight = self.see(tokens[there])
        start = F.pad(end[:-1], (1, 0)).int()
        return SparseLinear.apply(self.table, channel * self.see.cells + cell, start, weight) + self.bias

    def dense(self, tokens: torch.Tensor) -> torch.Tensor:
        return F.linear(box_of(self.see, tokens), self.table.T, self.bias)


def box_of(see: Tokens, tokens: torch.Tensor) -> torch.Tensor:
    """(B, channels * cells) float32: weights of the tokens, each where it belongs."""
    channel, cell, weight = see(see.face(tokens))
    box = torch.zeros(len(tokens), see.channels * see.cells, device=tokens.device)
    return box.scatter_add_(1, (channel * see.cells + cell).long(), weight)


class BoxCNN(nn.Module):
    """Two convolutions over a box with a plane for each channel, as Metta's own policy has them."""

    def __init__(self, see: Tokens, window: tuple[int, int], width: int, device: torch.device) -> None:
        super().__init__()
        self.see, self.window = see, window
        self.convs = nn.Sequential(
            nn.Conv2d(see.channels, 64, 5, 3, padding=1, device=device), nn.ReLU(),
            nn.Conv2d(64, 64, 3, padding=1, device=device), nn.ReLU(), nn.Flatten(),
        )  # fmt: skip
        inputs = 64 * math.prod((side - 3) // 3 + 1 for side in window) + 2 * see.channels
        self.hidden = nn.Linear(inputs, width, device=device)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        box = box_of(self.see, tokens).unflatten(1, (self.see.channels, -1))
        planes = self.convs(box[:, :, :-2].unflatten(2, self.window))
        return F.relu(self.hidden(torch.cat([planes, box[:, :, -2:].flatten(1)], 1)))


class TokenAttention(nn.Module):
    """A token is what it says plus where it lies; a pre-norm transformer layer between them, then one query reads."""

    HEADS = 4

    def __init__(self, see: Tokens, width: int, sdpa: list[SDPBackend], device: torch.device) -> None:
        super().__init__()
        self.see, self.sdpa = see, sdpa
        self.what, self.where = (nn.Embedding(number, width, device=device) for number in (see.channels, see.cells))
        self.query = nn.Parameter(torch.randn(width, device=device))
        self.layers = nn.ModuleList(
            nn.ModuleDict({
                "norm": nn.LayerNorm(width, device=device), "q": nn.Linear(width, width, device=device),
                "kv": nn.Linear(width, 2 * width, device=device), "out": nn.Linear(width, width, device=device),
                "mlp": nn.Sequential(nn.LayerNorm(width, device=device), nn.Linear(width, 2 * width, device=device),
                                     nn.ReLU(), nn.Linear(2 * width, width, device=device)),
            }) for _ in range(2)
        )  # fmt: skip
        self.norm = nn.LayerNorm(width, device=device)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        if tokens.device.type == "cpu":  # as many as any agent has: they stand in front
            tokens = tokens[:, : int((tokens[:, :, 0] < 255).sum(1).max())]
        channel, cell, weight = self.see(self.see.face(tokens))
        there = tokens[:, None, None, :, 0] < 255  # (B, heads, asking, tokens)
        x = self.what(channel) * weight[..., None] + self.where(cell)
        x = self.attend(self.layers[0], x, x, there)
        return self.norm(self.attend(self.layers[1], x, self.query.expand(len(x), 1, -1), there)).squeeze(1)

    def attend(self, layer: nn.ModuleDict, x: torch.Tensor, asking: torch.Tensor, there: torch.Tensor) -> torch.Tensor:
        q = layer["q"](layer["norm"](asking)).unflatten(2, (self.HEADS, -1)).transpose(1, 2)
        k, v = layer["kv"](layer["norm"](x)).unflatten(2, (2, self.HEADS, -1)).permute(2, 0, 3, 1, 4)
        if self.sdpa == [SDPBackend.MATH]:  # what the kernels compute, written out
            mixed = (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(~there, -math.inf).softmax(-1) @ v
        else:
            with sdpa_kernel(self.sdpa):
                mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=there)
        asking = asking + layer["out"](mixed.transpose(1, 2).flatten(2))
        return asking + layer["mlp"](asking)


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


class Agent(nn.Module):
    """Policy and value of agents that remember.

    tokens (T, B, tokens, 3) uint8, state (B, state_size) before them, reset (T, B) bool: does an episode begin there
    -> logits (T, B, actions) and value (T, B), both fp32, and state (B, state_size) after them.
    """

    def __init__(self, args: Args, games: Games, sdpa: list[SDPBackend] | None, device: torch.device) -> None:
        super().__init__()
        see, width = Tokens(games.features, games.window, device), args.hidden_size
        self.encoder = (
            TokenBag(see, width, device) if args.network == "token-bag"
            else BoxCNN(see, games.window, width, device) if args.network == "box-cnn"
            else TokenAttention(see, width, sdpa, device)
        )  # fmt: skip
        kinds = {"lstm": nn.LSTM, "gru": nn.GRU}
        self.rnn = kinds[args.rnn](width, width, device=device) if args.rnn in kinds else None
        self.state_size = width * {"lstm": 2, "gru": 1, "none": 0}[args.rnn]
        self.heads = nn.Linear(width, games.num_actions + 1, device=device)  # the policy's logits, then the value
        for name, weight in self.named_parameters():
            if name.startswith("rnn.weight"):
                nn.init.orthogonal_(weight)
        nn.init.orthogonal_(self.heads.weight[:-1], 0.01)
        nn.init.orthogonal_(self.heads.weight[-1:], 1.0)
        nn.init.zeros_(self.heads.bias)

    def forward(self, tokens: torch.Tensor, state: torch.Tensor, reset: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x = self.encoder(tokens.flatten(0, 1)).unflatten(0, tokens.shape[:2])
        if self.rnn is not None:
            # The layer takes many steps in one call, but not over a reset. A CPU looks for those, which more than
            # halves the time; asking a GPU would be a sync, so there it is one step a call.
            cuts = range(1, len(x)) if x.is_cuda else (reset[1:].any(1).nonzero().flatten() + 1).tolist()
            parts = []
            for start, end in pairwise([0, *cuts, len(x)]):
                state = (state * ~reset[start, :, None])[None]
                if isinstance(self.rnn, nn.LSTM):
                    hidden, cell = state.chunk(2, 2)
                    part, state = self.rnn(x[start:end], (hidden.contiguous(), cell.contiguous()))
                    state = torch.cat(state, 2)
                else:
                    part, state = self.rnn(x[start:end], state)
                state = state[0]
                parts.append(part)
            x = torch.cat(parts)
        *logits, value = self.heads(x).float().split([self.heads.out_features - 1, 1], 2)
        return logits[0], value.squeeze(2), state.float()


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
    at most once to a lane of a rollout. `next_value` (N,) is of what follows the rollout.
    """
    following = torch.where(truncated, final_value, torch.cat([value[1:], next_value[None]])) * ~terminated
    delta = ratio.clamp(max=rho_clip) * (reward + gamma * following - value)
    decay = gamma * gae_lambda * ratio.clamp(max=c_clip) * ~(terminated | truncated)
    advantage, after = torch.empty_like(delta), torch.zeros_like(next_value)
    for t in range(len(delta) - 1, -1, -1):
        after = advantage[t] = delta[t] + decay[t] * after
    return advantage


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
    pg_loss = -torch.min(advantage * ratio, advantage * ratio.clamp(1 - clip_coef, 1 + clip_coef)).mean()
    clipped = old_value + (value - old_value).clamp(-vf_clip_coef, vf_clip_coef)
    v_loss = 0.5 * torch.max((value - returns) ** 2, (clipped - returns) ** 2).mean()
    loss = pg_loss - ent_coef * entropy.mean() + vf_coef * v_loss
    approx_kl, clipfrac = (ratio - 1 - logratio).mean(), ((ratio - 1).abs() > clip_coef).float().mean()
    return loss, torch.stack([pg_loss, v_loss, entropy.mean(), approx_kl, clipfrac]).detach()


def sample(logits: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """An action for each row of logits (B, actions), by the Gumbel trick: no CUDA synchronisation."""
    noise = torch.empty_like(logits).exponential_(generator=generator)
    return (logits - noise.log()).argmax(1)


def across_ranks(tensor: torch.Tensor, op: str = "AVG") -> torch.Tensor:
    """Mean (or MAX, SUM) of `tensor` over all ranks of a torchrun, in place; without one it costs nothing."""
    if RANKS > 1:
        dist.all_reduce(tensor, dist.ReduceOp.SUM if op == "AVG" else getattr(dist.ReduceOp, op))
        if op == "AVG":
            tensor /= RANKS
    return tensor


class Rollout:
    """What `num_steps` steps of N lanes showed, time first, and the memory that each segment began with."""

    def __init__(self, args: Args, obs: torch.Tensor, state_size: int, device: torch.device) -> None:
        lanes = len(obs)
        steps, self.bptt = args.batch_size // lanes, args.bptt_horizon
        each, fixed, segment = obs[0].numel() + 40, 8 * obs.numel(), lanes * args.bptt_horizon
        refuse_if_too_large("--batch-size", args.batch_size, each, device, fixed, segment)

        def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        self.obs = zeros(steps, *obs.shape, dtype=torch.uint8)
        self.action = zeros(steps, lanes, dtype=torch.int64)
        self.logprob, self.reward, self.value, self.ratio = (zeros(steps, lanes) for _ in range(4))
        self.terminated, self.truncated, self.reset = (zeros(steps, lanes, dtype=torch.bool) for _ in range(3))
        self.state = zeros(steps // self.bptt, lanes, state_size)
        self.final_obs, self.final_state = torch.zeros_like(obs, device=device), zeros(lanes, state_size)

    def index(self, segments: torch.Tensor) -> torch.Tensor:
        """(bptt, B): where the steps of `segments` (B,) are, time and lanes flattened."""
        lanes = self.obs.shape[1]
        row = segments // lanes * self.bptt + torch.arange(self.bptt, device=segments.device)[:, None]
        return row * lanes + segments % lanes


@torch.no_grad()
def evaluate(agent: Agent, args: Args, episodes: int, device: torch.device) -> dict[str, float]:
    """Hearts of `episodes` agents in games no training seed has seen, whole episodes; actions are drawn, as in
    training: a policy that always takes its likeliest action gets stuck in front of its own kind."""
    where = torch.device("cpu") if args.env_id == "mettagrid" else device
    agents = len(Games(args, 1, where, EVAL_SEED).obs)
    games = Games(args, -(-episodes // agents), where, EVAL_SEED, evaluation=True)
    obs, generator = games.obs, torch.Generator(device).manual_seed(EVAL_SEED)
    lanes = len(obs)
    state = torch.zeros(lanes, agent.state_size, device=device)
    playing = torch.ones(lanes, dtype=torch.bool, device=device)
    never, hearts = torch.zeros(1, lanes, dtype=torch.bool, device=device), torch.zeros(lanes, device=device)
    while playing.any():  # sync: evaluation is not on the clock
        logits, _, state = agent(obs.to(device)[None], state, never)
        obs, _, terminated, truncated, info = games.step(sample(logits[0], generator).to(obs.device))
        ends = (terminated | truncated).to(device) & playing
        hearts, playing = torch.where(ends, info["hearts"].to(device).float(), hearts), playing & ~ends
        state = state * playing[:, None]
    return {
        "eval_score_mean": hearts.mean().item(),
        "eval_score_median": hearts.median().item(),
        "eval_score_max": hearts.max().item(),
        "eval_episodes": lanes,
    }


@torch.no_grad()
def play(agent: Agent, args: Args, device: torch.device, render_mode: str) -> Iterator[np.ndarray | str]:
    """Frames of one game, played by the rule book."""
    arena = MettaArena(render_mode, **rules_of(args), random_first_length=False)
    observations, generator = arena.reset(seed=EVAL_SEED)[0], torch.Generator(device).manual_seed(EVAL_SEED)
    state = torch.zeros(len(arena.agents), agent.state_size, device=device)
    never = torch.zeros(1, len(arena.agents), dtype=torch.bool, device=device)
    while arena.agents:
        yield arena.render()
        obs = torch.as_tensor(np.stack(list(observations.values())), device=device)
        logits, _, state = agent(obs[None], state, never)
        observations = arena.step(dict(zip(arena.agents, sample(logits[0], generator).tolist())))[0]


def write_gif(agent: Agent, args: Args, device: torch.device, folder: Path) -> Path | str:
    if args.env_id == "mettagrid":
        return "--video: the real MettaGrid is not drawn here; no GIF was written"
    folder.mkdir(exist_ok=True)
    frames = (frame for _, frame in zip(range(300), play(agent, args, device, "rgb_array")))
    first, *others = (Image.fromarray(frame) for frame in frames)
    first.save(folder / "metta.gif", save_all=True, append_images=others, duration=80, loop=0)
    return folder / "metta.gif"


def show(agent: Agent, args: Args, device: torch.device) -> dict[str, float]:
    """--evaluate: one game in the terminal (--render), or the hearts of many agents and a GIF (--video)."""
    path, saved = load_checkpoint("--evaluate", args.evaluate, args.run_dir)
    try:
        agent.load_state_dict(saved["agent"])
    except (KeyError, RuntimeError):
        refuse(f"--evaluate {args.evaluate}: --network, --rnn, --hidden-size and --env-id must be as they were")
    if args.render:
        for frame in play(agent, args, device, "ansi"):
            print(f"\033[H\033[J{frame}", flush=True)
            time.sleep(1 / MettaArena.metadata["render_fps"])
        return {}
    scores = evaluate(agent, args, args.eval_episodes, device)
    print("  ".join(f"{name} {value:g}" for name, value in scores.items()))
    if args.video:
        print(write_gif(agent, args, device, path.parent / "videos"))
    return scores


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
    if RANKS > 1 and args.device != "cpu" and torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    device = pick_device(args.device)
    args = resolve(args, device)
    torch.set_num_threads(args.threads)
    torch.set_flush_denormal(True)  # denormal numbers were seen to cost a run two thirds of its updates/s
    torch.manual_seed(args.seed)
    dtype = pick_precision(args.bf16, args.fp16, args.tf32, device)
    sdpa, wanted = None, args.sdpa
    if args.network == "token-attention":
        if device.type == "cuda" and wanted in ("auto", "flash"):
            print("on CUDA the flash kernel takes no padding mask; efficient is tried first")
            wanted = "efficient"
        sdpa = pick_sdpa(wanted, dtype, device)
    example = Games(args, 1, torch.device("cpu"), EVAL_SEED)
    agent = Agent(args, example, sdpa, device)
    if args.evaluate:
        return show(agent, args, device)
    args = with_sizes(args, len(example.obs) * args.num_envs, example.max_steps)
    if RANKS > 1:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")

    # --- what a run is made of ------------------------------------------------------------------------------------
    envs = make_envs(args, device, example)
    obs = envs.obs.to(device, copy=True)  # what each lane acts on next
    lanes, group_size = len(obs), len(obs) // envs.groups
    weights = list(agent.parameters())
    graphs = args.cudagraph and device.type == "cuda" and args.vec_env == "device" and RANKS == 1
    learning_rate = torch.tensor(args.learning_rate, device=device)
    optimizer = torch.optim.Adam(weights, lr=learning_rate, eps=1e-5, fused=True, capturable=graphs)
    scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)
    generator = torch.Generator(device).manual_seed(args.seed + 1_000_003 * RANK)
    b = Rollout(args, obs, agent.state_size, device)
    num_steps, num_segments = len(b.obs), len(b.state) * lanes
    num_minibatches, mb_segments = args.batch_size // args.minibatch_size, args.minibatch_size // args.bptt_horizon
    state = torch.zeros(lanes, agent.state_size, device=device)
    begins = torch.zeros(lanes, dtype=torch.bool, device=device)  # does an episode begin with `obs`
    next_value, final_value = torch.zeros(lanes, device=device), torch.zeros(lanes, device=device)
    rows = torch.zeros(envs.groups, 1, dtype=torch.int64, device=device)  # of the rollout, that each group is at
    segments = torch.zeros(mb_segments, dtype=torch.int64, device=device)
    ent_coef, prio_beta = torch.tensor(args.ent_coef, device=device), torch.tensor(args.prio_beta0, device=device)
    # Since the last log, sums over updates: pg_loss, v_loss, entropy, approx_kl, clipfrac, updates skipped; then
    # updates skipped in a row.
    learned = torch.zeros(7, device=device)
    mb_parts = torch.zeros(args.grad_accumulation, 5, device=device)  # the first five, of a minibatch
    approx_kl = torch.zeros((), device=device)
    watch = Stopwatch(device)

    # --- run folder: of rank 0, the only one that writes ----------------------------------------------------------
    lead = RANK == 0
    folder = Path(args.run_dir) / (args.run_name or f"{SCRIPT}__{args.seed}__{time.strftime('%Y%m%d-%H%M%S')}")
    if args.resume:
        path, saved = load_checkpoint("--resume", args.resume, args.run_dir)
        folder = path.parent
    if lead:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "args.json").write_text(json.dumps({"script": SCRIPT, **vars(args)}, indent=2))
        except OSError as error:
            refuse(f"--run-dir {args.run_dir}: cannot be written ({error.strerror}); another folder works")
    else:
        sys.stdout = open(os.devnull, "w")

    if args.wandb and lead:
        try:
            import wandb
        except ImportError:
            refuse("--wandb: its package is missing; pip install wandb")
        wandb.init(project=SCRIPT, name=folder.name, config=vars(args), sync_tensorboard=True)
    profiler = None
    if args.profile:
        profiler = torch.profiler.profile(schedule=torch.profiler.schedule(wait=1, warmup=1, active=1, repeat=1))
        profiler.start()

    interrupts = []
    for number in (signal.SIGINT, signal.SIGTERM):  # the second one ends the program at once
        signal.signal(number, lambda number, _: (interrupts.append(number), signal.signal(number, signal.SIG_DFL)))

    # --- a new run, or the rest of one ----------------------------------------------------------------------------
    stateful = {"agent": agent, "optimizer": optimizer, "scaler": scaler}
    carried = {"obs": obs, "state": state, "begins": begins}  # from one rollout to the next
    whole = args.env_id != "mettagrid" and isinstance(envs, Games)  # can the games themselves be saved
    global_step, updates, seconds_before = 0, 0, 0.0
    if args.resume:
        try:
            for name, part in stateful.items():
                part.load_state_dict(saved[name])
            if whole and lead:
                envs.games.load_state_dict(saved["games"])
                for name, tensor in carried.items():
                    tensor.copy_(saved[name])
        except (KeyError, RuntimeError, ValueError):
            flags = "--network, --rnn, --hidden-size, --env-id, --vec-env and --num-envs"
            refuse(f"--resume {args.resume}: {flags} must be as they were")
        optimizer.param_groups[0].update(lr=learning_rate, capturable=graphs)  # loading put in the other run's
        if lead:
            generator.set_state(saved["generator"])
        global_step, updates, seconds_before = saved["counters"]
        if not whole:
            print("the games start anew: only those of the embedded arena in this process are in a checkpoint")
    first_step, first_update = logged_step, logged_update = global_step, updates
    scores: dict[str, float] = {}
    precision = str(dtype).removeprefix("torch.")
    if lead:
        writer = SummaryWriter(folder, purge_step=global_step)
        writer.add_text("args", "  \n".join(f"{name}: {value}" for name, value in vars(args).items()))
    replay_ratio = args.update_epochs / args.action_repeat
    where = f"in {args.num_workers} workers, {envs.groups} parts in flight" if isinstance(envs, Workers) else "here"
    print(f"{folder} on {machine(device)['device']} in {precision}{f', {RANKS} ranks' * (RANKS > 1)}")
    print(f"{lanes} agents {where}; rollouts of {num_steps} steps, {args.update_epochs} x {num_minibatches} updates on "
          f"{mb_segments} segments of {args.bptt_horizon} (replay ratio {replay_ratio:g}); "
          f"{sum(weight.numel() for weight in weights):,} weights")  # fmt: skip

    def elapsed() -> float:
        return seconds_before + time.perf_counter() - started

    def progress() -> float:
        return max(global_step / (args.total_timesteps or math.inf), now / (args.max_seconds or math.inf))

    def due(what: str) -> bool:
        every = getattr(args, f"{what}_every")
        if every == 0 or now < last[what] + every:
            return False
        last[what] = now
        return True

    def save() -> None:
        if not all(weight.isfinite().all() for weight in weights):
            return print(f"{folder}: the weights are not finite and were not saved", file=sys.stderr)
        state = {name: part.state_dict() for name, part in stateful.items()} | {"generator": generator.get_state()}
        state |= carried | {"games": envs.games.state_dict()} if whole else {}
        state |= {"script": SCRIPT, "args": vars(args), "counters": [global_step, updates, elapsed()]}
        if lead:
            save_checkpoint(folder / "checkpoint.pt", state)

    def log() -> None:
        seconds = watch.read()
        steps, learns, wall = global_step - logged_step, updates - logged_update, sum(seconds.values())
        episodes, hearts, length, returned = across_ranks(envs.read_finished().to(device), "SUM").tolist()
        *parts, skipped, in_a_row = learned.tolist()
        learned[:-1] = 0
        advantage = advantages()
        scalars = {
            "charts/SPS": steps / wall,
            "charts/updates_per_second": learns / wall,
            "charts/samples_per_second": learns * args.minibatch_size * RANKS / wall,
            "charts/replay_ratio": learns * args.minibatch_size * RANKS / steps,
            "losses/learning_rate": learning_rate.item(),
            "losses/ent_coef": ent_coef.item(),
            "losses/skipped_updates": skipped,
            "losses/explained_variance": 1 - (advantage.var() / (advantage + b.value).var()).item(),
            "perf/rollout_fraction": 1 - seconds["learn"] / wall,
        }
        scalars |= {f"perf/{phase}_ms": 1000 * spent * lanes * RANKS / steps for phase, spent in seconds.items()}
        if episodes:
            means = (hearts / episodes, length / episodes, returned / episodes)
            scalars |= dict(zip(("charts/score", "charts/episodic_length", "charts/episodic_return"), means))
        if learns:
            names = "pg_loss", "v_loss", "entropy", "approx_kl", "clipfrac"
            scalars |= {f"losses/{name}": part / max(learns - skipped, 1) for name, part in zip(names, parts)}
        if device.type == "cuda":
            scalars["perf/gpu_mem_gib"] = torch.cuda.memory_allocated(device) / 2**30
            with suppress(ImportError, RuntimeError):  # without NVML
                scalars["perf/gpu_util"] = torch.cuda.utilization(device)
        if lead:
            for tag, value in scalars.items():
                writer.add_scalar(tag, value, global_step)
        line = f"{progress():4.0%}  step {global_step:>11,}  SPS {steps / wall:>9,.0f}  updates/s {learns / wall:>5.1f}"
        line += f"  entropy {scalars.get('losses/entropy', math.nan):4.2f}  kl {scalars.get('losses/approx_kl', 0):.4f}"
        line += f"  return {scalars.get('charts/episodic_return', math.nan):6.2f}"
        line += f"  hearts {scalars.get('charts/score', math.nan):5.2f}"
        print(line, end="\r" if sys.stdout.isatty() else "\n", flush=True)
        if in_a_row >= 10:
            first = f"every update from number {updates - in_a_row + 1:.0f} on was not finite and was skipped"
            refuse(f"--learning-rate {args.learning_rate:g}: {first}; a lower one works")

    def test(episodes: int) -> dict[str, float]:
        scores = evaluate(agent, args, episodes, device)
        for name, value in scores.items():
            writer.add_scalar(name.replace("_", "/", 1), value, global_step)
        return scores

    # --- acting and learning --------------------------------------------------------------------------------------
    def autocast() -> torch.autocast:
        # Fresh for each forward: one that lives longer goes on using the weights as they were cast at its start.
        return torch.autocast(device.type, dtype, enabled=dtype != torch.float32, cache_enabled=False)

    @torch.no_grad()
    def policy(obs: torch.Tensor, state: torch.Tensor, reset: torch.Tensor) -> tuple[torch.Tensor, ...]:
        with autocast():
            logits, value, state = agent(obs[None], state, reset[None])
        return logits[0], value[0], state

    def loss_of(obs, state, reset, action, logprob, value, advantage, returns) -> tuple[torch.Tensor, ...]:
        """Loss, what it consists of, and the values and policy ratios of now."""
        with autocast():
            logits, new_value, _ = agent(obs, state, reset)
        logp = logits.log_softmax(2)
        new_logprob, entropy = logp.gather(2, action[..., None]).squeeze(2), -(logp.exp() * logp).sum(2)
        coefs = args.clip_coef, args.vf_clip_coef, ent_coef, args.vf_coef
        loss, parts = ppo_loss(new_logprob, logprob, advantage, entropy, new_value, value, returns, *coefs)
        return loss, parts, new_value.detach(), (new_logprob - logprob).detach().exp()

    def act(group: int) -> None:
        # 1 act and step
        part, row = slice(group * group_size, (group + 1) * group_size), rows[group]
        segment = row // args.bptt_horizon
        b.state[segment, part] = torch.where(row % args.bptt_horizon == 0, state[part], b.state[segment, part])
        logits, value, after = policy_step(obs[part], state[part], begins[part])
        action = sample(logits, generator)
        b.obs[row, part], b.reset[row, part], b.action[row, part] = obs[part], begins[part], action
        b.value[row, part], b.logprob[row, part] = value, logits.log_softmax(1).gather(1, action[:, None]).squeeze(1)
        state[part] = after
        watch.mark("act")
        envs.send(group, action)
        watch.mark("env")

    def receive(group: int) -> None:
        part, row = slice(group * group_size, (group + 1) * group_size), rows[group]
        results = (result.to(device, non_blocking=True) for result in envs.recv(group))
        obs[part], reward, terminated, truncated, final_obs = results
        watch.mark("env")
        # 2 store
        b.reward[row, part] = reward * args.reward_scale
        b.terminated[row, part], b.truncated[row, part] = terminated, truncated
        b.final_obs[part] = torch.where(truncated[:, None, None], final_obs, b.final_obs[part])
        b.final_state[part] = torch.where(truncated[:, None], state[part], b.final_state[part])
        begins[part] = terminated | truncated
        rows[group] = (row + 1) % num_steps
        watch.mark("store")

    def bootstrap() -> None:
        """Values of what the lanes see next, and of what those whose episode was cut saw last."""
        next_value.copy_(policy_step(obs, state, begins)[1])
        final_value.copy_(policy_step(b.final_obs, b.final_state, torch.zeros_like(begins))[1])
        b.ratio.fill_(1)

    def advantages() -> torch.Tensor:
        ends = b.terminated, b.truncated, b.ratio
        coefs = args.gamma, args.gae_lambda, args.rho_clip, args.c_clip
        return gae(b.reward, b.value, next_value, final_value, *ends, *coefs)

    def update() -> None:
        advantage = advantages()  # with the values and ratios that the updates before have left
        if args.prio_alpha:
            priority = advantage.unflatten(0, (-1, args.bptt_horizon)).abs().sum(1).flatten() ** args.prio_alpha
            share = priority / priority.sum()
            noise = torch.empty_like(share).exponential_(generator=generator)
            segments.copy_((share / noise).topk(mb_segments).indices)  # drawn without replacement
        index = b.index(segments)
        mb_advantage, mb_value = advantage.flatten()[index], b.value.flatten()[index]
        mb_returns = mb_advantage + mb_value
        if args.norm_adv:
            mb_advantage = mb_advantage - across_ranks(mb_advantage.mean())
            mb_advantage = mb_advantage / (across_ranks(mb_advantage.square().mean()).sqrt() + 1e-8)
        if args.prio_alpha:
            mb_advantage = mb_advantage * (num_segments * share[segments]) ** -prio_beta
        optimizer.zero_grad()
        for i in range(args.grad_accumulation):
            columns = slice(i, None, args.grad_accumulation)
            some = index[:, columns]
            mb_obs, mb_reset, mb_action, mb_logprob = (
                stored.flatten(0, 1)[some] for stored in (b.obs, b.reset, b.action, b.logprob)
            )
            loss, parts, value, ratio = loss_step(
                mb_obs, b.state.flatten(0, 1)[segments[columns]], mb_reset, mb_action, mb_logprob,
                mb_value[:, columns], mb_advantage[:, columns], mb_returns[:, columns],
            )  # fmt: skip
            scaler.scale(loss / args.grad_accumulation).backward()
            b.value.view(-1)[some], b.ratio.view(-1)[some] = value, ratio
            mb_parts[i] = parts
        scaler.unscale_(optimizer)
        if RANKS > 1:
            flat = across_ranks(torch.cat([weight.grad.flatten() for weight in weights]))
            for weight, grad in zip(weights, flat.split([weight.numel() for weight in weights])):
                weight.grad.copy_(grad.view_as(weight))
        finite = nn.utils.clip_grad_norm_(weights, args.max_grad_norm).isfinite()
        optimizer.found_inf = skipped = 1 - finite.float()  # at 1, fused Adam leaves weights and moments as they are
        scaler.step(optimizer)
        scaler.update()
        parts = across_ranks(mb_parts.mean(0))
        approx_kl.copy_(parts[3])
        learned[:5] += torch.where(finite, parts, 0)
        learned[5] += skipped
        learned[6] = torch.where(finite & (learned[6] < 10), 0, learned[6] + 1)  # from ten on it only grows

    # --- switches: they wrap `policy`, `loss_of`, `act`, `receive`, `bootstrap` and `update` ----------------------
    policy_step, loss_step = policy, loss_of
    acts, receives = ([partial(part, group) for group in range(envs.groups)] for part in (act, receive))
    if args.compile:
        shape = args.bptt_horizon, mb_segments // args.grad_accumulation
        zeros, nothing = torch.zeros(shape, device=device), torch.zeros(shape[1], agent.state_size, device=device)
        seen = obs[torch.arange(math.prod(shape)) % lanes].view(*shape, *obs.shape[1:])
        first = slice(group_size)
        policy_step = compiled(policy, args.compile_mode, obs[first], state[first], begins[first])
        example = seen, nothing, zeros.bool(), zeros.long(), zeros, zeros, zeros, zeros
        loss_step = compiled(loss_of, args.compile_mode, *example)
    if graphs:
        acts, receives = ([Graphed(part, generator, watch) for part in parts] for parts in (acts, receives))
        bootstrap, update = Graphed(bootstrap, generator, watch), Graphed(update, generator, watch)
    elif args.cudagraph:
        print("--cudagraph: needs CUDA, --vec-env device and one rank; the loop runs without graphs")

    # --- the loop -------------------------------------------------------------------------------------------------
    now = elapsed()
    last = dict.fromkeys(("log", "eval", "checkpoint"), now)
    if lead:
        writer.add_scalar("perf/warmup_s", time.perf_counter() - started, global_step)
    watch.mark()
    try:
        while progress() < 1 and not interrupts:
            # 1 act and step, 2 store: what a part of the games does meanwhile is received when its turn comes again
            for step in range(num_steps + 1):
                for group in range(envs.groups):
                    if step > 0:
                        receives[group]()
                    if step < num_steps:
                        acts[group]()
            global_step += args.batch_size * args.action_repeat * RANKS
            bootstrap()
            watch.mark("act")

            # 3 learn
            done = min(progress(), 1)
            if args.anneal_lr:
                learning_rate.fill_(args.learning_rate * 0.5 * (1 + math.cos(math.pi * done)))
            ent_coef.fill_(args.ent_coef + (args.end_ent_coef - args.ent_coef) * done)
            prio_beta.fill_(args.prio_beta0 + (1 - args.prio_beta0) * done)
            for minibatch in range(args.update_epochs * num_minibatches):
                at = minibatch % num_minibatches * mb_segments
                if at == 0:
                    order = torch.rand(num_segments, generator=generator, device=device).argsort()
                segments.copy_(order[at : at + mb_segments])
                update()
                updates += 1
                if args.target_kl and approx_kl.item() > args.target_kl:  # sync: of this flag
                    break
            watch.mark("learn")

            # 4 log, evaluate, save: at the same time on all ranks
            pulse = torch.tensor([elapsed(), len(interrupts)], device=device if RANKS > 1 else "cpu")
            now, stop = across_ranks(pulse, "MAX").tolist()
            interrupts += [signal.SIGTERM] * (stop > len(interrupts))
            if due("log"):
                log()
                logged_step, logged_update = global_step, updates
                watch.mark("log")
            if due("eval") and lead:
                scores = test(max(args.eval_episodes // 10, 1))
                watch.mark()
            if due("checkpoint"):
                save()
                watch.mark()
            if profiler:
                profiler.step()
    except WorkerLost as error:
        print(f"{error}; the rest is ended", file=sys.stderr)
        save()
        raise SystemExit(1) from None
    finally:
        envs.close()

    # --- the end --------------------------------------------------------------------------------------------------
    if global_step > logged_step:
        log()
    wall_seconds, busy = elapsed(), sum(watch.total.values()) or math.inf
    save()
    print()
    if interrupts:
        print(f"stopped; {folder / 'checkpoint.pt'} goes on with python {SCRIPT}.py --resume {folder}")
    elif lead:
        scores = test(args.eval_episodes)
        print("  ".join(f"{name} {value:g}" for name, value in scores.items()))
        if args.video:
            print(write_gif(agent, args, device, folder / "videos"))
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
        "compiled": loss_step is not loss_of,
        "cudagraph": graphs,
        "sdpa": sdpa[0].name.lower() if sdpa else None,
        "env_steps": global_step,
        "wall_seconds": wall_seconds,
        "env_steps_per_second": steps / busy,
        "updates_per_second": learns / busy,
        "samples_per_second": learns * args.minibatch_size * RANKS / busy,
        "replay_ratio": learns * args.minibatch_size * RANKS / max(steps, 1),
        "rollout_fraction": 1 - watch.total["learn"] / busy,
        "train_fraction": watch.total["learn"] / busy,
        **scores,
    }
    if lead:
        (folder / "summary.json").write_text(json.dumps(summary, indent=2))
        writer.close()
    if RANKS > 1:
        dist.destroy_process_group()
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
        refuse("out of memory: a smaller --minibatch-size, --batch-size, --num-envs or more --grad-accumulation works")

"""Recurrent PPO for many agents in a MettaGrid arena: games, acting and learning on one device, or games in workers.

    python ppo_metta.py                                        # ten minutes, then an evaluation and a GIF
    python ppo_metta.py --bf16 --cudagraph                     # made for a GPU
    python ppo_metta.py --env-id mettagrid                     # the real MettaGrid, in worker processes
    torchrun --nproc-per-node 2 ppo_metta.py                   # two learners, one policy
    python ppo_metta.py --evaluate latest --render             # watch the last agents play

To read it: `Tokens` and `Agent` are what learns, `gae` and `ppo_loss` are what it learns, `act` and `receive` in `run`
are what from, and `update` in `run` is how. The rest is switches and bookkeeping.
"""

import argparse
import atexit
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
import torch.multiprocessing as mp
import torch.nn as nn
import torch.nn.functional as F
import tyro
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.tensorboard import SummaryWriter

from envs.metta import MettaArena
from envs.metta_batch import MettaBatch
from envs.metta_rules import ACTIONS, FEATURES, MOVES, VARIANTS, VIEW, Rules
from envs.playing import show_in_terminal, write_gif

SCRIPT = Path(__file__).stem
EVAL_SEED = 2**31  # above every --seed
CHECKPOINT_VERSION = 2
GIF_FRAMES = 300
RANK = int(os.environ.get("RANK", 0))  # these three are set by torchrun
RANKS = int(os.environ.get("WORLD_SIZE", 1))
LOCAL_RANKS = int(os.environ.get("LOCAL_WORLD_SIZE", 1))  # on this machine
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
    """arena or navigation of envs/metta.py, or the real MettaGrid"""
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
    """games played side by side, each of several agents (None: 128 on CPU, 8192 on CUDA, 32 of the real MettaGrid)"""
    vec_env: Literal["auto", "device", "subproc"] = "auto"
    """games on the training device, or in worker processes; auto takes workers for the real MettaGrid only"""
    num_workers: int | None = None
    """processes of subproc; 0 plays in this one (None: at most one for each core, on a CPU for every second one, and as
    many as the games can be dealt out to)"""
    async_factor: int = 2
    """parts of the games in flight: workers play some while the policy looks at another"""

    # Algorithm
    network: Literal["token-bag", "box-cnn", "token-attention"] = "token-bag"
    """one layer over all tokens, two convolutions over a box of them, or attention between them"""
    rnn: Literal["lstm", "gru", "none"] = "lstm"
    """memory of an agent"""
    hidden_size: int = 128
    """width of the layers and of the memory"""
    learning_rate: float = 3e-3
    """Adam's step size"""
    anneal_lr: bool = True
    """let the step size fall to nothing over the run, as half a cosine"""
    num_steps: int = 32
    """steps of every agent in a rollout"""
    num_minibatches: int | None = None
    """parts of a rollout, of whole segments; each is an update (None: 16, or 32 of the many games on CUDA)"""
    grad_accumulation: int = 1
    """parts of a minibatch that go through the network one after another; the gradient is that of all"""
    bptt_horizon: int = 32
    """steps of a segment, the unit of learning that gradients flow through"""
    update_epochs: int | None = None
    """times that a rollout is learned from; 0: the agents only play (None: 2 in the real MettaGrid, else 1)"""
    reward_scale: float = 10.0
    """rewards are learned from times this: Adam's steps leave a noise in the values that small ones drown in"""
    gamma: float | None = None
    """discount (None: 0.97 in the arena, 0.95 in navigation, 0.9 in the real MettaGrid)"""
    gae_lambda: float = 0.95
    """how far advantages look ahead"""
    rho_clip: float = 1.0
    """V-trace: most that a policy ratio counts in a TD error"""
    c_clip: float = 1.0
    """V-trace: most that it counts in what follows"""
    norm_adv: bool = True
    """normalise the advantages of each minibatch"""
    clip_coef: float = 0.2
    """policy ratios are clipped this far from 1"""
    vf_clip_coef: float = 10.0
    """values are clipped this far from what they were"""
    ent_coef: float | None = None
    """weight of the entropy bonus (None: 0.001 in the real MettaGrid, else 0.005)"""
    end_ent_coef: float | None = None
    """weight it falls to, linearly, by the end of the run (None: 0.0001 in the real MettaGrid, else 0.001)"""
    vf_coef: float = 0.5
    """weight of the value loss"""
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


COMMAND_LINE_ONLY = {  # never from a checkpoint: they name files or code, or say what to do
    "run_dir",
    "run_name",
    "env_config",
    "resume",
    "evaluate",
    "render",
    "video",
    "wandb",
}
METTA = Args(
    env_id="MettaNavigation-v0",
    vec_env="subproc",
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
GAME_DEFAULTS = {  # of flags that are None
    "MettaArena-v0": {"gamma": 0.97},
    # An altar is near, where the arena's hearts take several errands; in the real game a mine is at hand as well.
    "MettaNavigation-v0": {"gamma": 0.95},
    "mettagrid": {
        "num_envs": 32,
        "num_minibatches": 16,
        "update_epochs": 2,
        "gamma": 0.9,
        "ent_coef": 0.001,
        "end_ent_coef": 0.0001,
    },
}


def fill_defaults(args: Args, device: torch.device) -> Args:
    """`args` with nothing a run needs left None. Values that cannot work are refused here, before anything starts."""
    defaults = {"num_envs": 128, "num_minibatches": 16, "update_epochs": 1, "ent_coef": 0.005, "end_ent_coef": 0.001}
    if device.type == "cuda":  # where a step of a thousand games takes about as long
        defaults["num_envs"] = 8192
        defaults["num_minibatches"] = 32
    defaults |= GAME_DEFAULTS[args.env_id]
    if args.total_timesteps is None:
        defaults["max_seconds"] = 600.0
    args = replace(args, **{name: value for name, value in defaults.items() if getattr(args, name) is None})
    if args.vec_env == "auto":
        args = replace(args, vec_env="subproc" if args.env_id == "mettagrid" else "device")

    shares = {"gamma", "gae_lambda", "prio_beta0"}
    may_be_0 = shares | {"seed", "num_workers", "update_epochs", "ent_coef", "end_ent_coef", "prio_alpha"}
    may_be_0 |= {"eval_every", "checkpoint_every"}
    limits = dict.fromkeys(shares, 1) | {"seed": EVAL_SEED - 1, "threads": 256, "num_workers": 1024}
    limits["eval_episodes"] = 100_000
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
    if args.network == "token-attention" and args.hidden_size % AttentionLayer.HEADS:
        fail(f"--hidden-size {args.hidden_size}: attention needs a multiple of {AttentionLayer.HEADS}")
    if args.render and (args.evaluate is None or args.env_id == "mettagrid"):
        fail("--render: shows trained agents in the embedded arena, so it needs --evaluate PATH of such a run")
    if args.resume is not None and args.evaluate is not None:
        fail("--resume --evaluate: choose one of them")
    if args.vec_env == "device" and args.env_id == "mettagrid":
        fail("--vec-env device: the real MettaGrid plays on the CPU; subproc works, with --num-workers 0 too")
    if args.env_config is not None and args.env_id != "mettagrid":
        fail(f"--env-config {args.env_config}: is of --env-id mettagrid, not {args.env_id}")
    rules_of(args)

    cores = max(CORES // LOCAL_RANKS, 1)
    if args.num_workers is None:  # as many as the games can be dealt out to evenly, whatever number of cores there is
        most = max(cores // 2, 1) if device.type == "cpu" else cores
        counts = range(min(most, args.num_envs), 0, -1)
        workers = next((n for n in counts if args.num_envs % (n * args.async_factor) == 0), 1)
        args = replace(args, num_workers=workers)
    if args.threads is None:  # all threads wait for one whose core a worker has
        busy = args.num_workers if args.vec_env == "subproc" else 0
        args = replace(args, threads=pick_threads(max(cores - busy, 1)))
    parts = args.num_workers * args.async_factor
    if args.vec_env == "subproc" and parts:
        if args.num_workers > args.num_envs:
            fail(f"--num-workers {args.num_workers}: more than games; at most --num-envs {args.num_envs} works")
        if args.num_envs % parts:
            works = f"--num-envs {nearest(args.num_envs, parts)} or --async-factor 1 --num-workers 1 works"
            fail(f"--num-envs {args.num_envs}: --num-workers x --async-factor, {parts}, must divide it; {works}")
    return args


def check_sizes(args: Args, num_agents: int, max_steps: int) -> None:
    """Refuse sizes that do not divide, now that the games are known: `num_agents` in all, episodes of `max_steps`."""
    num_steps, horizon, parts = args.num_steps, args.bptt_horizon, args.grad_accumulation
    if num_steps > max_steps:
        works = f"--num-steps {max_steps // horizon * horizon}"
        if horizon > max_steps:
            works = f"--num-steps {max_steps} --bptt-horizon {max_steps}"
        fail(f"--num-steps {num_steps}: a rollout would be longer than an episode, {max_steps}; {works} works")
    if num_steps % horizon:
        works = f"--num-steps {nearest(num_steps, horizon)}"
        fail(f"--bptt-horizon {horizon}: must divide --num-steps {num_steps}; {works} works")
    segments = num_steps // horizon * num_agents
    made = f"the {segments} segments of a rollout (--num-envs {args.num_envs}: {num_agents} agents, "
    made += f"{num_steps // horizon} of each)"
    if segments % parts:
        fail(f"--grad-accumulation {parts}: must divide {made}; 1 works")
    if segments % (args.num_minibatches * parts):
        counts = [n for n in range(1, segments // parts + 1) if segments % (n * parts) == 0]
        closest = min(counts, key=lambda n: abs(n - args.num_minibatches))
        need = f"must divide {made}"
        if parts > 1:
            need += f" into multiples of --grad-accumulation {parts}"
        fail(f"--num-minibatches {args.num_minibatches}: {need}; --num-minibatches {closest} works")


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
        fail(f"{flags}: {error}")
    return rules


class Games:
    """Games of one process: those of the arena on `device`, or real ones on the CPU. Agents are lanes."""

    def __init__(self, args: Args, num_games: int, device: torch.device, seed: int, evaluation: bool = False) -> None:
        self.groups = 1
        random_first_length = not evaluation
        if args.env_id == "mettagrid":
            flag = "--env-id mettagrid" if args.env_config is None else f"--env-config {args.env_config}"
            try:
                from envs.real_mettagrid import RealMettaGrid

                self.games = RealMettaGrid(num_games, args.env_config, seed, random_first_length)
            except Exception as error:  # a configuration is a user's own code: anything may happen in it
                if is_out_of_memory(error):
                    raise
                reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
                fail(f"{flag}: {reason}")
            self.max_steps = self.games.config.game.max_steps
            if not self.max_steps:
                fail(f"{flag}: has no step limit, so evaluations would not end; one with game.max_steps works")
            self.finished = torch.zeros(4)
            self.length = torch.zeros(self.games.num_agents)
            self.features = {id: name for id, (name, _) in self.games.features.items()}
            self.num_actions, self.window = self.games.num_actions, self.games.window
            self.cells = 0
            self.step = self.step_real
            self.obs = torch.from_numpy(self.games.obs)
        else:
            rules = rules_of(args)
            self.games = MettaBatch(num_games, device, seed, **rules, random_first_length=random_first_length)
            self.max_steps = self.games.rules.max_steps
            self.finished, self.features = self.games.finished, dict(enumerate(FEATURES))
            self.num_actions, self.window = len(ACTIONS), (2 * VIEW + 1, 2 * VIEW + 1)
            self.cells = self.games.cells
            self.step = self.games.step
            self.obs = self.games.reset()

    def step_real(self, action: torch.Tensor):
        """The real games with tensors around; a heart is a reward of 1 there."""
        *arrays, info = self.games.step(action.numpy())
        obs, reward, terminated, truncated = map(torch.from_numpy, arrays)
        info = {name: torch.from_numpy(array) for name, array in info.items()}
        self.length += 1
        done = terminated | truncated
        sums = [done, info["return"] * done, self.length * done, info["return"] * done]
        self.finished += torch.stack(sums).sum(1)
        self.length *= ~done
        return obs, reward, terminated, truncated, info | {"hearts": info["return"]}

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


class WorkerLost(RuntimeError):
    """A worker has died or does not answer."""


class Workers:
    """Games in `num_workers` processes over shared memory, in `async_factor` groups that play independently.

    Lanes are ordered by group, then worker. A worker is told the number of a group whose actions are there, steps that
    group's games, and answers with the number.
    """

    PATIENCE = 10.0  # seconds

    def __init__(self, args: Args, example: Games, device: torch.device, starts: int) -> None:
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
        self.action = shared(torch.int64)
        self.finished = torch.zeros(self.groups, workers, 4).share_memory_()
        context = mp.get_context("spawn")  # a fork would inherit threads, and CUDA, in no usable state
        self.pipes, self.processes = [], []
        atexit.register(self.close)  # before multiprocessing would wait for them, whatever ends the program
        # Ctrl-C and SIGTERM reach all processes of a job, and the trainer decides: workers ignore them from birth.
        handlers = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
        for worker in range(workers):
            pipe, child_pipe = context.Pipe()
            memory = [tensor[:, worker] for tensor in (*self.results, self.action, self.finished)]
            seeds = [games_seed(args.seed, starts, worker, group) for group in range(self.groups)]
            process = context.Process(target=work, args=(args, games, seeds, child_pipe, memory), daemon=True)
            process.start()
            child_pipe.close()
            self.pipes.append(pipe)
            self.processes.append(process)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        try:
            for _ in range(self.groups):
                self.wait(120)  # a worker imports PyTorch first
        except BaseException:
            self.close()
            raise
        self.obs = obs.flatten(0, 2)

    def wait(self, patience: float) -> None:
        deadline = time.monotonic() + patience
        for number, (pipe, process) in enumerate(zip(self.pipes, self.processes)):
            name = f"worker {number} (process {process.pid})"
            try:
                if not pipe.poll(max(deadline - time.monotonic(), 0)):
                    raise WorkerLost(f"{name} has not answered for {patience:g} s")
                answer = pipe.recv()
            except (EOFError, ConnectionError):
                process.join(1)
                raise WorkerLost(f"{name} died with exit code {process.exitcode}") from None
            if isinstance(answer, str):
                raise WorkerLost(f"{name} failed: {answer}")

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
        atexit.unregister(self.close)
        for process in self.processes:
            process.kill()
            process.join()


def work(args: Args, num_games: int, seeds: list[int], pipe: Any, shared: list[torch.Tensor]) -> None:
    """Body of a worker: a `Games` for each group. It ends when the trainer is gone."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    torch.set_num_threads(1)
    *results, action, finished = shared
    try:
        groups = [Games(args, num_games, torch.device("cpu"), seed) for seed in seeds]
        for group, games in enumerate(groups):
            results[0][group] = games.obs
            pipe.send(group)
        while True:
            group = pipe.recv()
            obs, reward, terminated, truncated, info = groups[group].step(action[group])
            for shared, result in zip(results, (obs, reward, terminated, truncated, info["final_obs"])):
                shared[group] = result
            finished[group] += groups[group].read_finished()
            pipe.send(group)
    except (EOFError, ConnectionError):  # the trainer is gone
        pass
    except Exception as error:
        reason = (str(error).strip().splitlines() or [""])[0]
        with suppress(OSError):
            pipe.send(f"{type(error).__name__} {reason}")


def games_seed(seed: int, starts: int, worker: int = 0, group: int = 0) -> int:
    """Seed of the games of this rank, or of one group of a worker, after so many starts of the run.

    None plays the games of another, nor its own again after a resume. Games of a lone process begin with --seed.
    """
    stream = [RANK, starts, worker, group]
    if not any(stream):
        return seed
    return int(np.random.SeedSequence([seed, *stream]).generate_state(1)[0]) % EVAL_SEED


def make_envs(args: Args, device: torch.device, example: Games, starts: int) -> Games | Workers:
    """`num_envs` games as the flags want them; every rank of a torchrun plays games of its own."""
    if args.vec_env == "subproc" and args.num_workers:
        return Workers(args, example, device, starts)
    where = device if args.vec_env == "device" else torch.device("cpu")
    return Games(args, args.num_envs, where, games_seed(args.seed, starts))


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


FLASH, EFFICIENT, CUDNN = SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION
SDPA = {  # kernels to try, in this order
    "auto": [FLASH, EFFICIENT, CUDNN],
    "flash": [FLASH],
    "efficient": [EFFICIENT],
    "cudnn": [CUDNN],
    "math": [],
}


class AttentionLayer(nn.Module):
    """Pre-norm transformer layer: `asking` (B, some, width) look at x (B, tokens, width) where `there` (B, tokens)."""

    HEADS = 4

    def __init__(self, width: int, sdpa: str, device: torch.device) -> None:
        super().__init__()
        self.backends = [*SDPA[sdpa], SDPBackend.MATH]  # the last always runs
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
        there = torch.ones(1, 1, 1, 16, dtype=torch.bool, device=device)
        with sdpa_kernel(self.backends, set_priority=True):
            return SDPBackend(torch._fused_sdp_choice(q, q, q, attn_mask=there)).name.lower()

    def forward(self, x: torch.Tensor, asking: torch.Tensor, there: torch.Tensor) -> torch.Tensor:
        q = self.q(self.norm1(asking)).unflatten(2, (self.HEADS, -1)).transpose(1, 2)
        k, v = self.kv(self.norm1(x)).unflatten(2, (2, self.HEADS, -1)).permute(2, 0, 3, 1, 4)
        with sdpa_kernel(self.backends, set_priority=True):
            mixed = F.scaled_dot_product_attention(
                q, k, v, attn_mask=there[:, None, None]
            )  # (B, heads, asking, tokens)
        asking = asking + self.out(mixed.transpose(1, 2).flatten(2))
        return asking + self.down(F.relu(self.up(self.norm2(asking))))


class TokenAttention(nn.Module):
    """A token is what it says plus where it lies; a transformer layer between all of them, then one query reads."""

    def __init__(self, see: Tokens, width: int, sdpa: str, device: torch.device) -> None:
        super().__init__()
        self.see = see
        self.what = nn.Embedding(see.channels, width, device=device)
        self.where = nn.Embedding(see.cells, width, device=device)
        self.query = nn.Parameter(torch.randn(width, device=device))
        self.layer1 = AttentionLayer(width, sdpa, device)
        self.layer2 = AttentionLayer(width, sdpa, device)
        self.norm = nn.LayerNorm(width, device=device)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        if tokens.device.type == "cpu":  # as many as any agent has: they stand in front
            tokens = tokens[:, : int((tokens[:, :, 0] < 255).sum(1).max())]
        channel, cell, weight = self.see(self.see.face(tokens))
        there = tokens[:, :, 0] < 255
        x = self.what(channel) * weight[..., None] + self.where(cell)
        x = self.layer1(x, x, there)
        return self.norm(self.layer2(x, self.query.expand(len(x), 1, -1), there)).squeeze(1)


def lstm_steps(layer: nn.LSTM, x: torch.Tensor, state: torch.Tensor, keep: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """nn.LSTM as its documentation has it: one matmul for the inputs of all steps, then one a step.

    x (T, B, width), state (B, 2 * width) of hidden and cell, keep (T, B, 1) bool -> hidden (T, B, width), state.
    Under autocast the matmuls are in half precision, what is remembered stays in float32.
    """
    x = F.linear(x, layer.weight_ih_l0, layer.bias_ih_l0 + layer.bias_hh_l0).float()
    hidden, cell = state.chunk(2, 1)
    outputs = []
    for x_t, keep_t in zip(x.unbind(), keep.unbind()):
        hidden = hidden * keep_t
        cell = cell * keep_t
        i, f, g, o = (x_t + F.linear(hidden, layer.weight_hh_l0)).chunk(4, 1)
        cell = f.sigmoid() * cell + i.sigmoid() * g.tanh()
        hidden = o.sigmoid() * cell.tanh()
        outputs.append(hidden)
    return torch.stack(outputs), torch.cat([hidden, cell], 1)


def gru_steps(layer: nn.GRU, x: torch.Tensor, state: torch.Tensor, keep: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The same of nn.GRU, with state (B, width)."""
    x = F.linear(x, layer.weight_ih_l0, layer.bias_ih_l0).float()
    hidden = state
    outputs = []
    for x_t, keep_t in zip(x.unbind(), keep.unbind()):
        hidden = hidden * keep_t
        x_r, x_z, x_n = x_t.chunk(3, 1)
        h_r, h_z, h_n = F.linear(hidden, layer.weight_hh_l0, layer.bias_hh_l0).chunk(3, 1)
        r = (x_r + h_r).sigmoid()
        z = (x_z + h_z).sigmoid()
        n = (x_n + r * h_n).tanh()
        hidden = (1 - z) * n + z * hidden
        outputs.append(hidden)
    return torch.stack(outputs), hidden


SHAPES = "--env-id, --env-config, --network, --rnn, --hidden-size"  # what the shapes of its weights follow from


class Agent(nn.Module):
    """Policy and value of agents that remember.

    tokens (T, B, tokens, 3) uint8, state (B, state_size) before them, reset (T, B) bool: does an episode begin there
    -> logits (T, B, actions) and value (T, B), both fp32, and state (B, state_size) after them.
    """

    def __init__(self, args: Args, games: Games, device: torch.device) -> None:
        super().__init__()
        see, width = Tokens(games.features, games.window, device), args.hidden_size
        if args.network == "token-bag":
            self.encoder = TokenBag(see, width, device)
        elif args.network == "box-cnn":
            self.encoder = BoxCNN(see, games.window, width, device)
        else:
            self.encoder = TokenAttention(see, width, args.sdpa, device)
        kinds = {"lstm": nn.LSTM, "gru": nn.GRU}
        self.rnn = kinds[args.rnn](width, width, device=device) if args.rnn in kinds else None
        self.fixed_shapes = device.type != "cpu"  # whatever values there are: to look at them, a GPU would have to wait
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
            x, state = self.remember(x, state, reset)
        *logits, value = self.heads(x).float().split([self.heads.out_features - 1, 1], 2)
        return logits[0], value.squeeze(2), state.float()

    def remember(self, x: torch.Tensor, state: torch.Tensor, reset: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x (T, B, width) and state -> what the memory makes of each step, and state; it is emptied at resets."""
        # The layer itself would compute in float16 on CUDA, under autocast in bfloat16 too, and gradients vanish there.
        if self.fixed_shapes:
            steps = lstm_steps if isinstance(self.rnn, nn.LSTM) else gru_steps
            return steps(self.rnn, x, state, ~reset[:, :, None])
        return self.remember_between_resets(x, state, reset)

    @torch.compiler.disable  # it would compile again for each pattern of resets
    def remember_between_resets(self, x, state, reset) -> tuple[torch.Tensor, torch.Tensor]:
        # The layer takes many steps in one call, but not over a reset. On a CPU an LSTM learns 1.6 times as fast so.
        cuts = (reset[1:].any(1).nonzero().flatten() + 1).tolist()
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
        return torch.cat(parts), state


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
    next_values = torch.where(truncated, final_value, torch.cat([value[1:], next_value[None]])) * ~terminated
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
    pg_loss = -torch.min(advantage * ratio, advantage * ratio.clamp(1 - clip_coef, 1 + clip_coef)).mean()
    clipped = old_value + (value - old_value).clamp(-vf_clip_coef, vf_clip_coef)
    v_loss = 0.5 * torch.max((value - returns) ** 2, (clipped - returns) ** 2).mean()
    loss = pg_loss - ent_coef * entropy.mean() + vf_coef * v_loss
    approx_kl = (ratio - 1 - logratio).mean()
    clipfrac = ((ratio - 1).abs() > clip_coef).float().mean()
    return loss, torch.stack([pg_loss, v_loss, entropy.mean(), approx_kl, clipfrac]).detach()


def sample(logits: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """An action for each row of logits (B, actions), by the Gumbel trick: no CUDA synchronisation."""
    noise = torch.empty_like(logits).exponential_(generator=generator)
    return (logits - noise.log()).argmax(1)


class RankLost(RuntimeError):
    """Another rank of a torchrun is gone."""


def across_ranks(tensor: torch.Tensor, op: str = "AVG") -> torch.Tensor:
    """Mean (or MAX, SUM) of `tensor` over all ranks of a torchrun, in place; without one it costs nothing."""
    if RANKS > 1:
        try:
            dist.all_reduce(tensor, dist.ReduceOp.SUM if op == "AVG" else getattr(dist.ReduceOp, op))
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise
            raise RankLost(f"rank {RANK} has lost another one ({str(error).strip().splitlines()[0][:120]})") from None
        if op == "AVG":
            tensor /= RANKS
    return tensor


class Rollout:
    """What `num_steps` steps of N lanes showed, time first, and the memory that each segment began with."""

    def __init__(self, args: Args, obs: torch.Tensor, state_size: int, device: torch.device) -> None:
        lanes, steps, self.bptt = len(obs), args.num_steps, args.bptt_horizon
        step_bytes = obs.numel() + (40 + 4 * state_size // self.bptt) * lanes
        check_memory("--num-steps", steps, step_bytes, device, 8 * obs.numel(), self.bptt)

        def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        self.obs = zeros(steps, *obs.shape, dtype=torch.uint8)
        self.action = zeros(steps, lanes, dtype=torch.int64)
        self.logprob = zeros(steps, lanes)
        self.reward = zeros(steps, lanes)
        self.value = zeros(steps, lanes)
        self.ratio = zeros(steps, lanes)
        self.terminated = zeros(steps, lanes, dtype=torch.bool)
        self.truncated = zeros(steps, lanes, dtype=torch.bool)
        self.reset = zeros(steps, lanes, dtype=torch.bool)
        self.state = zeros(steps // self.bptt, lanes, state_size)
        self.final_obs = torch.zeros_like(obs, device=device)
        self.final_state = zeros(lanes, state_size)

    def index(self, segments: torch.Tensor) -> torch.Tensor:
        """(bptt, B): where the steps of `segments` (B,) are, time and lanes flattened."""
        lanes = self.obs.shape[1]
        row = segments // lanes * self.bptt + torch.arange(self.bptt, device=segments.device)[:, None]
        return row * lanes + segments % lanes


@torch.no_grad()
def evaluate(agent: Agent, args: Args, episodes: int, device: torch.device) -> dict[str, float]:
    """Hearts of `episodes` agents in games no training seed has seen, whole episodes; actions are drawn, as in
    training: a policy that always takes its likeliest action gets stuck in front of its own kind."""
    where = torch.device("cpu")  # of few games a step is over sooner there than a GPU has launched it
    agents = len(Games(args, 1, where, EVAL_SEED).obs)
    games = Games(args, -(-episodes // agents), where, EVAL_SEED, evaluation=True)
    obs, generator = games.obs, torch.Generator(device).manual_seed(EVAL_SEED)
    lanes = len(obs)
    state = torch.zeros(lanes, agent.state_size, device=device)
    playing = torch.ones(lanes, dtype=torch.bool, device=device)
    never = torch.zeros(1, lanes, dtype=torch.bool, device=device)
    hearts = torch.zeros(lanes, device=device)
    while playing.any():  # sync: evaluation is not on the clock
        logits, _, state = agent(obs.to(device)[None], state, never)
        obs, _, terminated, truncated, info = games.step(sample(logits[0], generator).to(obs.device))
        ends = (terminated | truncated).to(device) & playing
        hearts = torch.where(ends, info["hearts"].to(device).float(), hearts)
        playing = playing & ~ends
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
    observations, _ = arena.reset(seed=EVAL_SEED)
    generator = torch.Generator(device).manual_seed(EVAL_SEED)
    state = torch.zeros(len(arena.agents), agent.state_size, device=device)
    no_reset = torch.zeros(1, len(arena.agents), dtype=torch.bool, device=device)
    while arena.agents:
        yield arena.render()
        obs = torch.as_tensor(np.stack(list(observations.values())), device=device)
        logits, _, state = agent(obs[None], state, no_reset)
        actions = sample(logits[0], generator).tolist()
        observations, *_ = arena.step(dict(zip(arena.agents, actions)))


def save_gif(agent: Agent, args: Args, device: torch.device, folder: Path) -> None:
    if args.env_id == "mettagrid":
        say("--video: the real MettaGrid is not drawn here; no GIF was written")
        return
    path = folder / "videos" / "metta.gif"
    try:
        write_gif(islice(play(agent, args, device, "rgb_array"), GIF_FRAMES), path)
        say(str(path))
    except OSError as error:
        say(f"--video: {path} cannot be written ({error})")


def evaluate_run(agent: Agent, args: Args, device: torch.device) -> dict[str, float]:
    """--evaluate: one game in the terminal (--render), or the hearts of many agents and a GIF (--video)."""
    path, checkpoint = load_checkpoint("--evaluate", args.evaluate, args.run_dir)
    check_layout(f"--evaluate {args.evaluate}", checkpoint, {"agent": agent.state_dict()}, SHAPES)
    agent.load_state_dict(checkpoint["agent"])
    if args.render:
        show_in_terminal(play(agent, args, device, "ansi"), MettaArena.metadata["render_fps"])
        return {}
    scores = evaluate(agent, args, args.eval_episodes, device)
    say("  ".join(f"{name} {value:g}" for name, value in scores.items()))
    if args.video:
        save_gif(agent, args, device, path.parent)
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
    """Train, or --evaluate. However it ends, no worker lives on; of several ranks only the first one speaks."""
    with ExitStack() as cleanup:
        if RANK > 0:
            silence = cleanup.enter_context(open(os.devnull, "w"))
            cleanup.enter_context(redirect_stdout(silence))
        try:
            return run(args, cleanup)
        except (WorkerLost, RankLost) as error:
            print(f"{SCRIPT}.py: {error}; the rest is ended", file=sys.stderr)
            raise SystemExit(1) from None


def run(args: Args, cleanup: ExitStack) -> dict:
    started = time.perf_counter()
    interrupts = Interrupts()
    if RANKS > 1 and args.device != "cpu" and torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    device = pick_device(args.device)
    args = fill_defaults(args, device)
    torch.set_num_threads(args.threads)
    torch.set_flush_denormal(True)  # denormal numbers were seen to cost a run two thirds of its updates/s
    torch.manual_seed(args.seed)
    dtype = pick_precision(args.bf16, args.fp16, args.tf32, device)
    example = Games(args, 1, torch.device("cpu"), EVAL_SEED)
    agents = len(example.obs)  # of a game
    game_bytes = 4_000 * agents + 35 * example.cells  # about; measured in the arena and in navigation
    check_memory("--eval-episodes", args.eval_episodes, game_bytes // agents, torch.device("cpu"))
    agent = Agent(args, example, device)
    is_main = RANK == 0
    if args.evaluate is not None:
        with interrupts.at_once():
            return evaluate_run(agent, args, device) if is_main else {}
        return {}
    check_memory("--num-envs", args.num_envs, game_bytes, device)
    check_sizes(args, agents * args.num_envs, example.max_steps)

    sdpa = None
    if args.network == "token-attention":
        sdpa = agent.encoder.layer1.kernel(dtype, device)
        asked = "" if args.sdpa in ("auto", sdpa.split("_")[0]) else f"--sdpa {args.sdpa}: does not run here; "
        say(f"{asked}attention runs in {sdpa}")
    starts = 0  # of the run so far
    if args.resume is not None:
        path, saved = load_checkpoint("--resume", args.resume, args.run_dir)
        check_layout(f"--resume {args.resume}", saved, {"starts": 0}, SHAPES)
        starts = saved["starts"] + 1
    if RANKS > 1:
        try:
            dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        except RuntimeError as error:
            raise RankLost(f"rank {RANK} does not find the others ({str(error).splitlines()[0][:120]})") from None

    # --- what a run is made of ------------------------------------------------------------------------------------
    envs = cleanup.enter_context(closing(make_envs(args, device, example, starts)))
    obs = envs.obs.to(device, copy=True)  # what each lane acts on next
    lanes, group_size = len(obs), len(obs) // envs.groups
    weights = list(agent.parameters())
    graphs = args.cudagraph and device.type == "cuda" and args.vec_env == "device" and RANKS == 1
    learning_rate = torch.tensor(args.learning_rate, device=device)
    optimizer = torch.optim.Adam(weights, lr=learning_rate, eps=1e-5, fused=True, capturable=graphs)
    init_adam(optimizer)
    scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)
    generator = torch.Generator(device).manual_seed(games_seed(args.seed, starts))
    b = Rollout(args, obs, agent.state_size, device)
    num_steps, num_segments = args.num_steps, len(b.state) * lanes
    # An update leaves new values and ratios in its segments, so new advantages in their lanes. The rest of the epoch
    # learns from none of these where a segment is all of a lane and has one turn.
    gae_each_update = args.bptt_horizon < num_steps or args.prio_alpha > 0
    batch_size = num_steps * lanes
    minibatch_size = batch_size // args.num_minibatches
    mb_segments = num_segments // args.num_minibatches
    state = torch.zeros(lanes, agent.state_size, device=device)
    begins = torch.zeros(lanes, dtype=torch.bool, device=device)  # does an episode begin with `obs`
    advantage = torch.zeros(num_steps, lanes, device=device)
    next_value = torch.zeros(lanes, device=device)
    final_value = torch.zeros(lanes, device=device)
    rows = torch.zeros(envs.groups, 1, dtype=torch.int64, device=device)  # of the rollout, that each group is at
    segments = torch.zeros(mb_segments, dtype=torch.int64, device=device)
    gae_coefs = args.gamma, args.gae_lambda, args.rho_clip, args.c_clip
    ent_coef = torch.tensor(args.ent_coef, device=device)
    prio_beta = torch.tensor(args.prio_beta0, device=device)
    # Sums over the updates since the last log: pg_loss, v_loss, entropy, approx_kl, clipfrac.
    learned = torch.zeros(5, device=device)
    mb_parts = torch.zeros(args.grad_accumulation, 5, device=device)  # the same, of a minibatch
    approx_kl = torch.zeros((), device=device)
    timer = PhaseTimer(device)

    # --- a new run, or the rest of one ----------------------------------------------------------------------------
    can_save_envs = args.env_id != "mettagrid" and isinstance(envs, Games)
    global_step, updates, seconds_before = 0, 0, 0.0

    def elapsed() -> float:
        return seconds_before + time.perf_counter() - started

    def run_state() -> dict[str, Any]:
        """All there is to a run, as tensors and plain values. Of several ranks it holds the games of the first."""
        now_state = {
            "agent": agent.state_dict(),
            "optimizer": optimizer.state_dict()["state"],
            "scaler": scaler.state_dict(),
            "device": device.type,
            "generator": generator.get_state(),
            "starts": starts,
            "global_step": global_step,
            "updates": updates,
            "elapsed": elapsed(),
        }
        if can_save_envs:
            now_state["games"] = envs.games.state_dict()
            now_state["obs"] = obs
            now_state["state"] = state
            now_state["begins"] = begins
        return now_state

    def load_run_state(saved: dict[str, Any]) -> None:
        """Checks everything first: what does not fit is refused before anything is changed."""
        nonlocal global_step, updates, seconds_before
        asked, expected = f"--resume {args.resume}", run_state()
        load_envs = can_save_envs and "games" in saved
        if can_save_envs and not load_envs:
            for name in ("games", "obs", "state", "begins"):
                del expected[name]
        if not (saved.get("scaler") and expected["scaler"]):  # only float16 has something there
            del expected["scaler"]
        same_device = saved.get("device") == device.type
        if not same_device:
            del expected["device"], expected["generator"]
        check_layout(asked, saved, expected, f"{SHAPES}, --instances, --size, --agents and --num-envs")
        try:
            if same_device:
                torch.Generator(device).set_state(saved["generator"])
            if load_envs and is_main:
                envs.games.load_state_dict(saved["games"])
        except (RuntimeError, ValueError) as error:
            fail(f"{asked}: not a whole checkpoint of {SCRIPT}.py ({error})")
        global_step = saved["global_step"]
        updates = saved["updates"]
        seconds_before = saved["elapsed"]
        if max(global_step / (args.total_timesteps or math.inf), seconds_before / (args.max_seconds or math.inf)) >= 1:
            over = f"its run is over after {global_step:,} steps and {seconds_before:.0f} s"
            fail(f"{asked}: {over}; a larger --total-timesteps or --max-seconds works")
        if load_envs and is_main:
            obs.copy_(saved["obs"])
            state.copy_(saved["state"])
            begins.copy_(saved["begins"])
        copy_tensors(expected["agent"], saved["agent"])
        copy_tensors(expected["optimizer"], saved["optimizer"])
        if "scaler" in expected:
            scaler.load_state_dict(saved["scaler"])
        if same_device and is_main:
            generator.set_state(saved["generator"])
        if not same_device:
            say("the random numbers begin anew: those of the checkpoint are of another kind of device")
        if not load_envs:
            say("the games start anew: only those of the embedded arena in this process are in a checkpoint")

    folder = writer = None  # of the first rank, the only one that writes
    if args.resume is not None:
        load_run_state(saved)
        folder = path.parent
        if is_main:
            write_json(folder / "args.json", {"script": SCRIPT, **vars(args)})
            for unfinished in folder.glob("checkpoint.*.tmp"):  # of a run that was killed while it saved
                unfinished.unlink(missing_ok=True)
    if is_main:
        if args.wandb:
            try:
                import wandb
            except ImportError:
                fail("--wandb: its package is missing; pip install wandb")
        folder = folder or make_run_folder(args)
        if args.wandb:
            wandb.init(project=SCRIPT, name=folder.name, config=vars(args), sync_tensorboard=True)
        writer = SummaryWriter(folder, purge_step=global_step)
        writer.add_text("args", "  \n".join(f"{name}: {value}" for name, value in vars(args).items()))

    first_step = logged_step = global_step
    first_update = logged_update = updates
    scores: dict[str, float] = {}
    precision = str(dtype).removeprefix("torch.")
    threads = f"cpu, {torch.get_num_threads()} threads"
    device_name = torch.cuda.get_device_name(device) if device.type == "cuda" else threads
    in_ranks = f", {RANKS} ranks" if RANKS > 1 else ""
    where = f"in {args.num_workers} workers, {envs.groups} parts in flight" if isinstance(envs, Workers) else "here"
    learns = f"{args.update_epochs} x {args.num_minibatches} updates on {mb_segments} segments of {args.bptt_horizon}"
    say(f"{folder} on {device_name} in {precision}{in_ranks}")
    if not args.bf16 and args.rnn != "none" and device.type == "cpu" and bf16_speedup() > 1.2:
        say("this CPU multiplies matrices faster in bf16: --bf16 learns faster here (benchmarks.md)")
    if device.type == "cuda" and not ((args.bf16 or args.fp16) and args.cudagraph and args.compile):
        say("on CUDA --bf16, --cudagraph and --compile should make it faster; no GPU has measured it yet")
    say(f"{lanes} agents {where}; rollouts of {num_steps} steps, {learns} (replay ratio {args.update_epochs}); "
        f"{sum(weight.numel() for weight in weights):,} weights")  # fmt: skip

    def pulse() -> tuple[float, bool]:
        """Seconds of the run, and whether to stop. Ranks decide together only by this: it is the same on all."""
        here = [elapsed(), interrupts.count]
        everywhere = torch.tensor(here, dtype=torch.float64, device=device if RANKS > 1 else "cpu")
        seconds, signals = across_ranks(everywhere, "MAX").tolist()
        return seconds, signals > 0

    def progress() -> float:
        return max(global_step / (args.total_timesteps or math.inf), now / (args.max_seconds or math.inf))

    def due(what: str) -> bool:
        every = getattr(args, f"{what}_every")
        if every == 0 or now < last[what] + every:
            return False
        last[what] = now
        return True

    def save() -> None:
        if not is_main:
            return None
        if not all(weight.isfinite().all() for weight in weights):
            return print(f"{folder}: the weights are not finite and were not saved", file=sys.stderr)
        header = {"script": SCRIPT, "version": CHECKPOINT_VERSION, "args": vars(args)}
        save_checkpoint(folder / "checkpoint.pt", header | run_state())

    def log() -> None:
        """On all ranks: they add up what they have seen."""
        seconds = timer.read()
        steps, learns, wall = global_step - logged_step, updates - logged_update, sum(seconds.values())
        episodes, hearts, length, returned = across_ranks(envs.read_finished().to(device), "SUM").tolist()
        pg_loss, v_loss, entropy, kl, clipfrac = (learned / max(learns, 1)).tolist()
        learned.zero_()
        estimate_advantages()
        scalars = {
            "charts/SPS": steps / wall,
            "charts/updates_per_second": learns / wall,
            "charts/samples_per_second": learns * minibatch_size * RANKS / wall,
            "charts/replay_ratio": learns * minibatch_size * RANKS / steps,
            "losses/learning_rate": learning_rate.item(),
            "losses/ent_coef": ent_coef.item(),
            "losses/explained_variance": 1 - (advantage.var() / (advantage + b.value).var()).item(),
            "perf/rollout_fraction": 1 - seconds["learn"] / wall,
        }
        scalars |= {f"perf/{phase}_ms": 1000 * spent * lanes * RANKS / steps for phase, spent in seconds.items()}
        if episodes:
            scalars["charts/score"] = hearts / episodes
            scalars["charts/episodic_length"] = length / episodes
            scalars["charts/episodic_return"] = returned / episodes
        if learns:
            scalars["losses/pg_loss"] = pg_loss
            scalars["losses/v_loss"] = v_loss
            scalars["losses/entropy"] = entropy
            scalars["losses/approx_kl"] = kl
            scalars["losses/clipfrac"] = clipfrac
        if device.type == "cuda":
            scalars["perf/gpu_mem_gib"] = torch.cuda.memory_allocated(device) / 2**30
            with suppress(ImportError, RuntimeError):  # without NVML
                scalars["perf/gpu_util"] = torch.cuda.utilization(device)
        if is_main:
            write_scalars(writer, scalars, global_step)
        line = f"{min(progress(), 1):4.0%}  step {global_step:>11,}"
        line += f"  SPS {steps / wall:>9,.0f}  updates/s {learns / wall:>5.1f}"
        line += f"  entropy {scalars.get('losses/entropy', math.nan):4.2f}  kl {scalars.get('losses/approx_kl', 0):.4f}"
        line += f"  return {scalars.get('charts/episodic_return', math.nan):6.2f}"
        line += f"  hearts {scalars.get('charts/score', math.nan):5.2f}"
        say(line, end="\r" if sys.stdout.isatty() else "\n")
        loss = pg_loss + v_loss - entropy
        if not math.isfinite(loss):
            fail(f"--learning-rate {args.learning_rate:g}: the loss is {loss} since the last log; a lower one works")

    def test(episodes: int) -> dict[str, float]:
        scores = evaluate(agent, args, episodes, device)
        write_scalars(writer, {name.replace("_", "/", 1): value for name, value in scores.items()}, global_step)
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
        new_logprob = logp.gather(2, action[..., None]).squeeze(2)
        entropy = -(logp.exp() * logp).sum(2)
        coefs = args.clip_coef, args.vf_clip_coef, ent_coef, args.vf_coef
        loss, parts = ppo_loss(new_logprob, logprob, advantage, entropy, new_value, value, returns, *coefs)
        return loss, parts, new_value.detach(), (new_logprob - logprob).detach().exp()

    def act(group: int) -> None:
        # 1 act and step
        part = slice(group * group_size, (group + 1) * group_size)
        row = rows[group]
        segment = row // args.bptt_horizon
        b.state[segment, part] = torch.where(row % args.bptt_horizon == 0, state[part], b.state[segment, part])
        logits, value, next_state = policy_step(obs[part], state[part], begins[part])
        action = sample(logits, generator)
        b.obs[row, part] = obs[part]
        b.reset[row, part] = begins[part]
        b.action[row, part] = action
        b.value[row, part] = value
        b.logprob[row, part] = logits.log_softmax(1).gather(1, action[:, None]).squeeze(1)
        state[part] = next_state
        timer.lap("act")
        envs.send(group, action)
        timer.lap("env")

    def receive(group: int) -> None:
        part = slice(group * group_size, (group + 1) * group_size)
        row = rows[group]
        results = (result.to(device, non_blocking=True) for result in envs.recv(group))
        obs[part], reward, terminated, truncated, final_obs = results
        timer.lap("env")
        # 2 store
        b.reward[row, part] = reward * args.reward_scale
        b.terminated[row, part] = terminated
        b.truncated[row, part] = truncated
        b.final_obs[part] = torch.where(truncated[:, None, None], final_obs, b.final_obs[part])
        b.final_state[part] = torch.where(truncated[:, None], state[part], b.final_state[part])
        begins[part] = terminated | truncated
        rows[group] = (row + 1) % num_steps
        timer.lap("store")

    def act_and_receive() -> None:
        """A step of games that are here, where `act` leaves nothing in flight."""
        act(0)
        receive(0)

    def bootstrap() -> None:
        """Values of what the lanes see next, and of what those whose episode was cut saw last."""
        next_value.copy_(policy_step(obs, state, begins)[1])
        final_value.copy_(policy_step(b.final_obs, b.final_state, torch.zeros_like(begins))[1])
        b.ratio.fill_(1)

    def estimate_advantages() -> None:
        """With the values and ratios that the updates before have left."""
        ends = b.terminated, b.truncated, b.ratio
        advantage.copy_(gae_step(b.reward, b.value, next_value, final_value, *ends, *gae_coefs))

    def minibatch(index: torch.Tensor, segments: torch.Tensor) -> list[torch.Tensor]:
        """obs, memory before them, reset, action and logprob of the steps `index` of `segments`."""
        obs, reset, action, logprob = (x.flatten(0, 1)[index] for x in (b.obs, b.reset, b.action, b.logprob))
        return [obs, b.state.flatten(0, 1)[segments], reset, action, logprob]

    def update() -> None:
        if args.prio_alpha:
            priority = advantage.unflatten(0, (-1, args.bptt_horizon)).abs().sum(1).flatten() ** args.prio_alpha
            share = priority / priority.sum()
            noise = torch.empty_like(share).exponential_(generator=generator)
            segments.copy_((share / noise).topk(mb_segments).indices)  # drawn without replacement
        index = b.index(segments)
        mb_advantage = advantage.flatten()[index]
        mb_value = b.value.flatten()[index]
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
            targets = mb_value[:, columns], mb_advantage[:, columns], mb_returns[:, columns]
            loss, parts, value, ratio = loss_step(*minibatch(some, segments[columns]), *targets)
            scaler.scale(loss / args.grad_accumulation).backward()
            finite = value.isfinite() & ratio.isfinite()  # others would reach all advantages of this rollout
            b.value.view(-1)[some] = torch.where(finite, value, mb_value[:, columns])
            b.ratio.view(-1)[some] = torch.where(finite, ratio, b.ratio.view(-1)[some])
            mb_parts[i] = parts
        if RANKS > 1:  # before `unscale_`, so that all of them skip an update that overflows in float16
            flat = across_ranks(torch.cat([weight.grad.flatten() for weight in weights]))
            for weight, grad in zip(weights, flat.split([weight.numel() for weight in weights])):
                weight.grad.copy_(grad.view_as(weight))
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(weights, args.max_grad_norm)
        scaler.step(optimizer)
        scaler.update()
        parts = across_ranks(mb_parts.mean(0))
        approx_kl.copy_(parts[3])
        learned.add_(parts)

    # --- switches: they wrap what is above and the games ----------------------------------------------------------
    policy_step, loss_step, gae_step = policy, loss_of, gae
    acts = [partial(act, group) for group in range(envs.groups)]
    receives = [partial(receive, group) for group in range(envs.groups)]
    if args.compile:  # with tensors of the shapes and strides that the loop has, and none twice: else it compiles again
        first = slice(group_size)
        policy_step = try_compile(policy, args.compile_mode, obs[first], state[first], begins[first])
        bootstrap()
        b.obs[:] = obs
        ends = b.terminated, b.truncated, b.ratio
        gae_step = try_compile(gae, args.compile_mode, b.reward, b.value, next_value, final_value, *ends, *gae_coefs)
        columns = slice(None, None, args.grad_accumulation)
        index = b.index(segments)
        targets = [torch.zeros_like(index, dtype=torch.float32)[:, columns] for _ in range(3)]
        example = *minibatch(index[:, columns], segments[columns]), *targets
        loss_step = try_compile(loss_of, args.compile_mode, *example)
        loss_step(*example)[0].backward()
        optimizer.zero_grad()
        if can_save_envs and envs.games.fixed_shapes:  # on a CPU the games do less than what fixed shapes ask for
            games = {name: tensor.clone() for name, tensor in envs.games.state_dict().items()}
            envs.step = try_compile(envs.step, args.compile_mode, torch.zeros(lanes, dtype=torch.int64, device=device))
            envs.games.load_state_dict(games)  # as they were before that step
    if graphs:
        acts = [CUDAGraphStep(act_and_receive, generator, timer)]
        receives = [lambda: None]
        bootstrap = CUDAGraphStep(bootstrap, generator, timer)
        estimate_advantages = CUDAGraphStep(estimate_advantages, generator, timer)
        update = CUDAGraphStep(update, generator, timer, scaler)
    elif args.cudagraph:
        say("--cudagraph: needs CUDA, --vec-env device and one rank; the loop runs without graphs")

    # --- the loop -------------------------------------------------------------------------------------------------
    try:
        now, stopped = pulse()
        last = dict.fromkeys(("log", "eval", "checkpoint"), now)
        if is_main:
            write_scalars(writer, {"perf/warmup_s": time.perf_counter() - started}, global_step)
        timer.lap()
        while progress() < 1 and not stopped:
            # 1 act and step, 2 store: what a part of the games does meanwhile is received when its turn comes again
            for step in range(num_steps + 1):
                for group in range(envs.groups):
                    if step > 0:
                        receives[group]()
                    if step < num_steps:
                        acts[group]()
            global_step += batch_size * RANKS
            bootstrap()
            timer.lap("act")

            # 3 learn
            done = min(progress(), 1)
            if args.anneal_lr:
                learning_rate.fill_(args.learning_rate * 0.5 * (1 + math.cos(math.pi * done)))
            ent_coef.fill_(args.ent_coef + (args.end_ent_coef - args.ent_coef) * done)
            prio_beta.fill_(args.prio_beta0 + (1 - args.prio_beta0) * done)
            for number in range(args.update_epochs * args.num_minibatches):
                at = number % args.num_minibatches * mb_segments
                if at == 0:
                    order = torch.rand(num_segments, generator=generator, device=device).argsort()
                segments.copy_(order[at : at + mb_segments])
                if at == 0 or gae_each_update:
                    estimate_advantages()
                update()
                updates += 1
                if args.target_kl and approx_kl.item() > args.target_kl:  # sync: of this flag
                    break
            timer.lap("learn")

            # 4 log, evaluate, save: at the same time on all ranks
            now, stopped = pulse()
            if due("log"):
                log()
                logged_step, logged_update = global_step, updates
                timer.lap("log")
            if due("eval"):
                if is_main:
                    with interrupts.at_once():
                        scores = test(max(args.eval_episodes // 10, 1))
                now, stopped = pulse()
                last["eval"] = now  # what it took is no part of the next interval
                timer.lap()
            if due("checkpoint"):
                save()
                timer.lap()
        if global_step > logged_step:
            log()
    except (WorkerLost, RankLost):
        save()
        raise

    # --- the end: what must not be lost first ---------------------------------------------------------------------
    wall_seconds, busy = elapsed(), sum(timer.total.values()) or math.inf
    save()
    envs.close()
    if RANKS > 1:
        dist.destroy_process_group()
    steps, learns = global_step - first_step, updates - first_update
    summary = {
        "script": SCRIPT,
        "device": device_name,
        "peak_memory_gib": peak_memory_gib(device),
        "precision": precision,
        "compiled": loss_step is not loss_of,
        "cudagraph": graphs and all(part.graph for part in (*acts, bootstrap, estimate_advantages, update)),
        "sdpa": sdpa,
        "env_steps": global_step,
        "wall_seconds": wall_seconds,
        "env_steps_per_second": steps / busy,
        "updates_per_second": learns / busy,
        "samples_per_second": learns * minibatch_size * RANKS / busy,
        "replay_ratio": learns * minibatch_size * RANKS / max(steps, 1),
        "rollout_fraction": 1 - timer.total["learn"] / busy,
        "train_fraction": timer.total["learn"] / busy,
        **scores,
    }
    if not is_main:
        return summary
    write_json(folder / "summary.json", summary)
    say("")
    if not (stopped or interrupts):
        with interrupts.at_once():
            summary |= test(args.eval_episodes)
            write_json(folder / "summary.json", summary)
            say("  ".join(f"{name} {value:g}" for name, value in summary.items() if name.startswith("eval")))
            if args.video:
                save_gif(agent, args, device, folder)
            say(f"watch it play: python {SCRIPT}.py --evaluate {folder} --render")
    if stopped or interrupts:
        say(f"stopped; {folder / 'checkpoint.pt'} goes on with python {SCRIPT}.py --resume {folder}")
    with suppress(OSError):  # on a full disk
        writer.close()
    return summary


def parse_args(command_line: list[str] | None = None) -> Args:
    """The command line (None: that of this process), on top of --preset, or of the flags of --resume or --evaluate."""
    if command_line is None:
        command_line = sys.argv[1:]
    first_look = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first_look.add_argument("--preset", nargs="?")
    preset = first_look.parse_known_args(command_line)[0].preset
    args = tyro.cli(Args, args=command_line, default=PRESETS.get(preset, Args()), description=__doc__)
    option = "resume" if args.resume is not None else "evaluate"
    name = getattr(args, option)
    if name is None:
        return args
    path, saved = load_checkpoint(f"--{option}", name, args.run_dir)
    saved_args = saved["args"]
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
        main(parse_args())
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except (OSError, MemoryError, RuntimeError) as error:
        if is_out_of_memory(error):
            flags = "--num-envs, --num-steps or --eval-episodes, or more --num-minibatches or --grad-accumulation"
            fail(f"out of memory: a smaller {flags} works")
        if not isinstance(error, OSError):
            raise
        fail(str(error))

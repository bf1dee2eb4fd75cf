"""Parts of ppo_metta.py, each measured alone."""

import math
import shlex
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import tyro
from torch.utils.flop_counter import FlopCounterMode

import ppo_metta
from benchmarks.harness import measure_rate
from envs.metta.arena import MettaArena

ARENAS = {"arena, easy": "", "arena": "--no-easy", "navigation": "--env-id MettaNavigation-v0"}  # flags by name
REAL_METTAGRID = "--env-id mettagrid --vec-env subproc"


def metta_args(flags: str, device: str) -> ppo_metta.Args:
    """All arguments of a run. The number of threads of this process stays."""
    threads = torch.get_num_threads()
    words = shlex.split(flags)
    preset = tyro.cli(ppo_metta.Args, args=words).preset
    args = tyro.cli(ppo_metta.Args, args=words, default=ppo_metta.PRESETS[preset])
    args = ppo_metta.fill_defaults(args, torch.device(device))
    torch.set_num_threads(threads)
    return args


def metta_envs(args: ppo_metta.Args, num_envs: int, device: torch.device, seed: int, **settings: Any) -> Any:
    """Games of a run, in this process."""
    return ppo_metta.make_games(args, num_envs, device, seed, **settings)


def metta_network(args: ppo_metta.Args, envs: Any, device: torch.device) -> ppo_metta.Agent:
    """The network of a run, untrained."""
    return ppo_metta.Agent(args, envs, device)


def rollout_sizes(args: ppo_metta.Args, num_agents: int) -> tuple[int, int]:
    """Steps per rollout and agent steps per minibatch of a run."""
    batch_size = args.num_steps * num_agents
    minibatch_size = batch_size // args.num_minibatches
    return args.num_steps, minibatch_size


def uses_workers(args: ppo_metta.Args) -> bool:
    return args.vec_env == "subproc" and args.num_workers > 0


def env_device(args: ppo_metta.Args, device: torch.device) -> torch.device:
    if args.vec_env == "device":
        return device
    return torch.device("cpu")


def metta_agent(args: ppo_metta.Args, device: torch.device) -> tuple[ppo_metta.Agent, torch.Tensor]:
    """Untrained network of a run, and the observations of a batch of agents after some random steps."""
    torch.set_num_threads(args.threads)
    torch.manual_seed(1)
    groups = args.async_factor if uses_workers(args) else 1
    envs = metta_envs(args, args.num_envs // groups, env_device(args, device), 1)
    for _ in range(20):
        action = torch.randint(envs.num_actions, (len(envs.obs),), device=envs.obs.device)
        envs.step(action)
    agent = metta_network(args, envs, device)
    return agent, envs.obs.to(device)


def metta_env_rate(flags: str, seconds: float, device: str) -> float:
    """Agent steps per second, with random actions, of the games that one process of a run plays."""
    args = metta_args(flags, device)
    groups = 1
    num_envs = args.num_envs
    torch.set_num_threads(args.threads)
    if uses_workers(args):  # measure one worker
        groups = args.async_factor
        num_envs //= groups * args.num_workers
        torch.set_num_threads(1)
    where = env_device(args, torch.device(device))
    all_envs = []
    for seed in range(groups):
        envs = metta_envs(args, num_envs, where, seed)
        all_envs.append(envs)
    num_agents = len(envs.obs)
    actions = torch.randint(envs.num_actions, (16, num_agents), device=where)

    def work() -> None:
        for action in actions:
            for envs in all_envs:
                envs.step(action)

    return measure_rate(work, groups * actions.numel(), seconds, device)


def metta_mflops(variants: list[str], device: str) -> list[float]:
    """MFLOP of one forward pass per agent: matmuls, convolutions and embedding bags."""

    def bag(table, rows, *_, **__) -> int:  # called with the shapes of the arguments
        width = table[1]
        return 2 * math.prod(rows) * width

    aten = torch.ops.aten
    uncounted = {  # not counted by PyTorch
        aten._embedding_bag: bag,
        aten._embedding_bag_forward_only: bag,
    }
    mflops = []
    for flags in variants:
        args = metta_args(flags, device)
        agent, obs = metta_agent(args, torch.device(device))
        num_agents = len(obs)
        state = torch.zeros(num_agents, agent.state_size, device=device)
        reset = torch.zeros(1, num_agents, dtype=torch.bool, device=device)
        counter = FlopCounterMode(display=False, custom_mapping=uncounted)
        agent.requires_grad_(False)  # under no_grad the counter fails on views of weights
        with counter:
            agent(obs[None], state, reset)
        flops = counter.get_total_flops()
        mflops.append(flops / num_agents / 1e6)
    return mflops


def latency_percentiles(work: Callable[[], Any], seconds: float, device: str) -> list[float]:
    """[mean, 95th, 99th percentile] of a call in milliseconds; the first ten are not counted."""
    latencies = []
    while len(latencies) < 60 or sum(latencies) < seconds:
        start = time.perf_counter()
        work()
        if device == "cuda":
            torch.cuda.synchronize()
        end = time.perf_counter()
        latencies.append(end - start)
    milliseconds = 1000 * np.array(latencies[10:])
    mean = milliseconds.mean()
    percentiles = np.percentile(milliseconds, (95, 99))
    return [float(mean), *percentiles.tolist()]


def metta_latency(flags: str, seconds: float, device: str) -> dict[str, Any]:
    """Latency of network and action sampling, for one agent and for a whole batch."""
    args = metta_args(flags, device)
    where = torch.device(device)
    agent, obs = metta_agent(args, where)
    dtype = ppo_metta.pick_precision(args, where)
    generator = torch.Generator(where).manual_seed(1)

    @torch.no_grad()
    def policy(obs, state, reset) -> torch.Tensor:
        is_enabled = dtype != torch.float32
        with torch.autocast(where.type, dtype, enabled=is_enabled, cache_enabled=False):
            logits = agent(obs[None], state, reset[None])[0]
            return logits[0]

    found = {"agents": len(obs)}
    batches = {"one": 1, "all": len(obs)}
    for name, batch in batches.items():
        state = torch.zeros(batch, agent.state_size, device=where)
        reset = torch.zeros(batch, dtype=torch.bool, device=where)
        example = (obs[:batch].clone(), state, reset)
        policy_step = policy
        if args.compile:
            torch.compiler.reset()  # else the second shape is compiled as dynamic
            policy_step = torch.compile(policy, mode=args.compile_mode)

        def act() -> None:
            logits = policy_step(*example)
            ppo_metta.sample(logits, generator)

        if args.cudagraph and device == "cuda":
            act = ppo_metta.CUDAGraphStep(act, generator)
        found[name] = latency_percentiles(act, seconds, device)
    return found


def metta_parts(flags: str, seconds: float, device: str) -> dict[str, Any]:
    """Speed of the games alone and of acting alone."""
    parts = metta_latency(flags, seconds, device)
    parts["env_steps_per_second"] = metta_env_rate(flags, seconds, device)
    return parts


class RuleBooks:
    """Arenas of the rule book, one after another, with the interface of a batch."""

    def __init__(self, args: ppo_metta.Args) -> None:
        rules = ppo_metta.rules_of(args)
        self.arenas = []
        for lane in range(args.num_envs):
            arena = MettaArena(lane=lane, **rules)
            self.arenas.append(arena)
        self.num_actions = 25
        observations = [arena.reset(seed=1)[0] for arena in self.arenas]
        self.obs = self.stack(observations)

    def stack(self, parts: list[dict]) -> torch.Tensor:
        """Values of all agents of all arenas as one tensor."""
        values = []
        for part in parts:
            values += part.values()
        return torch.as_tensor(np.stack(values))

    def step(self, action: torch.Tensor):
        actions = action.view(len(self.arenas), -1).tolist()
        results = []
        next_obs = []
        for arena, arena_actions in zip(self.arenas, actions):
            by_agent = dict(zip(arena.agents, arena_actions))
            result = arena.step(by_agent)
            results.append(result[:4])
            obs = result[0]
            if not arena.agents:  # the episode is over
                obs = arena.reset()[0]
            next_obs.append(obs)
        final_obs, reward, terminated, truncated = map(self.stack, zip(*results))
        info = {"final_obs": final_obs}
        return self.stack(next_obs), reward.float(), terminated, truncated, info

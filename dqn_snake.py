"""Double DQN on Snake. Games, replay buffer and learning are on one device.

    python dqn_snake.py                             # two minutes, then an evaluation and a GIF
    python dqn_snake.py --bf16 --cudagraph          # on a GPU
    python dqn_snake.py --batch-size 8192 --bf16    # large batches
    python dqn_snake.py --evaluate latest --render  # watch the last agent play
    torchrun --nproc-per-node 2 dqn_snake.py        # two processes train one policy

On two CPU cores the agent eats 58 of 97 food per game after two minutes (benchmarks.md).

How to read it: `QNetwork` is the network, `td_target` is the algorithm, `ReplayBuffer` is the storage, and `train` runs
it from top to bottom.
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
from dataclasses import dataclass, fields
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Literal, NoReturn, get_args

# How long an idle thread spins. While another process keeps one of two cores busy, two threads are 1.4 times as fast
# with this. On a quiet machine it costs nothing to 7 %, by machine (benchmarks/pages/trials.md).
os.environ.setdefault("GOMP_SPINCOUNT", "4000")

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
import tyro
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.tensorboard import SummaryWriter

from envs.playing import play, show_in_terminal, write_gif
from envs.snake.batch import SnakeBatch
from envs.snake.rules import VARIANTS, Rules, SnakeEnv, parse_board
from envs.snake.view import EgocentricView
from envs.streams import lane_key

SCRIPT = Path(__file__).stem
CHECKPOINT_VERSION = 6
EVAL_SEED = 2**31  # above every --seed
RANK = int(os.environ.get("RANK", 0))  # torchrun sets these four
RANKS = int(os.environ.get("WORLD_SIZE", 1))
LOCAL_RANKS = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
RESTARTS = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))


@dataclass
class Args:
    # Run
    max_seconds: float | None = None
    """training time in seconds, with evaluations, without warm-up (None: 120, or no limit with --total-timesteps)"""
    total_timesteps: int | None = None
    """environment steps to train for (None: no limit)"""
    seed: int = 1
    """seed of weights, games, exploration and replay samples"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto uses CUDA if there is one"""
    run_name: str | None = None
    """name of this run's folder (None: script, seed and time)"""
    run_dir: str = "runs"
    """folder of all runs"""

    # Environment
    env_id: Literal["Snake-v0", "SnakeBlocks-v0"] = "Snake-v0"
    """rules of the game (envs/snake/rules.py)"""
    board: str = "10x10"
    """rows x columns, 4 to 64 each"""
    num_envs: int | None = None
    """parallel games, over all processes (None: 128 on a CPU, 16384 on CUDA)"""

    # Algorithm
    network: Literal["mlp", "attention"] = "mlp"
    """an MLP over the egocentric view, or a transformer with one token per cell of the board"""
    learning_rate: float | None = None
    """Adam's learning rate (None: 1e-3 * sqrt(batch size / 256))"""
    batch_size: int | None = None
    """transitions per update (None: 256 on a CPU, 8192 on CUDA)"""
    hidden_size: int | None = None
    """width of the network's layers (None: 256 for mlp, 64 for attention)"""
    anneal_lr: bool = True
    """decay the learning rate exponentially to a tenth over the run"""
    buffer_size: int | None = None
    """transitions in the replay buffer (None: 500,000 on a CPU, 2,000,000 on CUDA)"""
    gamma: float = 0.98
    """discount factor"""
    double: bool = True
    """double DQN: the online network picks the next action, the target network values it"""
    replay_ratio: float = 2.0
    """samples learned per environment step, which sets how often an update is made"""
    learning_starts: int = 5_000
    """transitions in the replay buffer before learning starts"""
    start_e: float = 1.0
    """initial epsilon"""
    end_e: float = 0.002
    """final epsilon"""
    exploration_fraction: float = 0.1
    """fraction of the run over which epsilon falls, linearly"""
    tau: float | None = None
    """target network update rate, 1 copies (None: 1 - 0.99 ** (batch size / 256))"""
    max_grad_norm: float = 10.0
    """maximum norm of the gradient"""

    # Speed
    bf16: bool = False
    """forward passes in bfloat16 (fp32 where the hardware has no bf16 units)"""
    fp16: bool = False
    """forward passes in float16 with gradient scaling (CUDA)"""
    tf32: bool = False
    """fp32 matmuls on tensor cores (CUDA)"""
    compile: bool = False
    """torch.compile the policy and the loss"""
    compile_mode: Literal["default", "reduce-overhead", "max-autotune"] = "default"
    """mode of torch.compile"""
    cudagraph: bool = False
    """capture rollout steps and updates as CUDA graphs (one process)"""
    sdpa: Literal["auto", "flash", "efficient", "cudnn", "math"] = "auto"
    """attention backend (--network attention); auto lets PyTorch choose"""
    threads: int | None = None
    """CPU threads (None: all cores, 8 at most; OMP_NUM_THREADS, which torchrun sets to 1, is obeyed)"""

    # Input and output
    resume: str | None = None
    """continue a run, with its flags: a checkpoint, a run folder, or "latest" """
    evaluate: str | None = None
    """no training, play --eval-episodes games: with a checkpoint, a run folder, or "latest" """
    render: bool = False
    """with --evaluate: play one game in the terminal"""
    eval_every: float = 30.0
    """seconds between evaluations on a tenth of --eval-episodes (0: none)"""
    eval_episodes: int = 1_000
    """games of the final evaluation"""
    log_every: float = 2.0
    """seconds between log lines"""
    checkpoint_every: float = 60.0
    """seconds between checkpoints (0: only at the end)"""
    checkpoint_replay: bool = False
    """save the replay buffer in checkpoints"""
    video: bool = True
    """write a GIF of one game after the final evaluation"""
    wandb: bool = False
    """mirror TensorBoard to Weights & Biases (pip install wandb)"""


NOT_RESUMED = ["run_dir", "run_name", "resume", "evaluate", "render", "video", "wandb"]
FRACTIONS = ["gamma", "start_e", "end_e", "exploration_fraction"]
MAY_BE_0 = ["seed", "learning_starts", "eval_every", "checkpoint_every", *FRACTIONS]
HIGHEST = dict.fromkeys(["tau", *FRACTIONS], 1) | {
    "seed": EVAL_SEED - 1,
    "threads": 256,
    "eval_episodes": 100_000,
}


def fill_defaults(args: Args, device: torch.device) -> Args:
    """Fills in the defaults of `args`. Ends the program if a flag cannot work."""
    on_cuda = device.type == "cuda"
    if args.num_envs is None:
        args.num_envs = 16_384 if on_cuda else 128
    if args.batch_size is None:
        args.batch_size = 8192 if on_cuda else 256
    if args.buffer_size is None:
        args.buffer_size = 2_000_000 if on_cuda else 500_000
    if args.hidden_size is None:
        args.hidden_size = 64 if args.network == "attention" else 256
    if args.threads is None:
        args.threads = min(torch.get_num_threads(), 8)
    if args.max_seconds is None and args.total_timesteps is None:
        args.max_seconds = 120.0

    for name, value in vars(args).items():
        if type(value) not in (int, float):
            continue
        highest = HIGHEST.get(name, sys.maxsize)
        lowest = "0 or more" if name in MAY_BE_0 else "above 0"
        if not 0 <= value <= highest or (value == 0 and name not in MAY_BE_0):  # NaN fails, too
            fail(f"--{name.replace('_', '-')} {value}: must be {lowest} and at most {highest:,}")
    scale = args.batch_size / 256  # larger batches make fewer updates, so each goes farther
    if args.learning_rate is None:
        args.learning_rate = 1e-3 * math.sqrt(scale)
    if args.tau is None:
        args.tau = 1 - 0.99**scale
    for name in ("num_envs", "batch_size"):
        if getattr(args, name) % RANKS:
            fail(f"--{name.replace('_', '-')} {getattr(args, name)}: must be a multiple of the {RANKS} processes")
    if args.num_envs > args.buffer_size:
        fail(f"--num-envs {args.num_envs}: one step of every game must fit in --buffer-size {args.buffer_size}")
    if args.network == "attention" and args.hidden_size % AttentionLayer.HEADS:
        fail(f"--hidden-size {args.hidden_size}: attention needs a multiple of {AttentionLayer.HEADS}")
    if args.sdpa != "auto" and args.network != "attention":
        fail(f"--sdpa {args.sdpa}: needs --network attention")
    if args.checkpoint_replay and RANKS > 1:
        fail("--checkpoint-replay: works with one process only; --no-checkpoint-replay works")
    if args.bf16 and args.fp16:
        fail("--bf16 --fp16: choose one of them")
    for name in ("fp16", "tf32", "cudagraph"):
        if getattr(args, name) and not on_cuda:
            fail(f"--{name}: needs CUDA; --no-{name} works")
    if args.cudagraph and RANKS > 1:
        fail("--cudagraph: works with one process only; --no-cudagraph works")
    if args.cudagraph and args.compile and args.compile_mode != "default":
        fail(f"--compile-mode {args.compile_mode}: captures graphs by itself; with --cudagraph only default works")
    if "/" in (args.run_name or ""):
        fail(f"--run-name {args.run_name}: must be a name without /")
    if args.render and args.evaluate is None:
        fail("--render: needs --evaluate PATH")
    if args.resume is not None and args.evaluate is not None:
        fail("--resume --evaluate: choose one of them")
    return args


def rules_of(args: Args) -> Rules:
    try:
        return Rules(**VARIANTS[args.env_id] | {"board": parse_board(args.board), "observation": "codes"})
    except ValueError:
        fail(f"--board {args.board}: must be rows x columns, 4 to 64 each; 10x10 works")


def make_envs(args: Args, num_envs: int, device: torch.device, seed: int) -> SnakeBatch:
    """`num_envs` games on `device`. A finished game restarts within the same step."""
    return SnakeBatch(num_envs, device, seed, **vars(rules_of(args)))


# ---------------------------------------------------------------------------------------------------- networks


class MLP(nn.Module):
    """Two layers over the features of the view."""

    def __init__(self, view: EgocentricView, width: int) -> None:
        super().__init__()
        num_inputs = 3 * view.num_features
        bound = num_inputs**-0.5
        self.features = nn.Linear(num_inputs, width)
        self.food = nn.Embedding(view.side**2, width)  # a one-hot input, without the zeros
        nn.init.uniform_(self.food.weight, -bound, bound)  # as nn.Linear does
        self.norm1 = nn.LayerNorm(width)
        self.norm2 = nn.LayerNorm(width)
        self.hidden = nn.Linear(width, width)

    def forward(self, features: Tensor, food_position: Tensor) -> Tensor:
        x = self.features(features.flatten(1))
        x = x.add_(self.food(food_position))  # in place here and below: 7 % less time at batch 8,192 (benchmarks.md)
        x = F.relu_(self.norm1(x))
        return F.relu_(self.norm2(self.hidden(x)))


SDPA_BACKENDS = {
    "auto": [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH],
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}


class AttentionLayer(nn.Module):
    """Pre-norm transformer layer: `query` (B, queries, width) attends to x (B, tokens, width)."""

    HEADS = 4

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.norm2 = nn.LayerNorm(width)
        self.q = nn.Linear(width, width)
        self.kv = nn.Linear(width, 2 * width)
        self.out = nn.Linear(width, width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor, query: Tensor) -> Tensor:
        q = self.q(self.norm1(query)).unflatten(2, (self.HEADS, -1)).transpose(1, 2)
        k, v = self.kv(self.norm1(x)).unflatten(2, (2, self.HEADS, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v)
        query = query + self.out(attended.transpose(1, 2).flatten(2))
        return query + self.down(F.relu_(self.up(self.norm2(query))))


class Transformer(nn.Module):
    """A token for every cell of the board. In the second layer only the head's token queries, which halves the time."""

    def __init__(self, view: EgocentricView, width: int) -> None:
        super().__init__()
        self.code = nn.Embedding(10, width)
        self.position = nn.Embedding(view.side**2, width)
        self.food = nn.Embedding(view.side**2, width)
        self.layer1 = AttentionLayer(width)
        self.layer2 = AttentionLayer(width)
        self.norm = nn.LayerNorm(width)

    def forward(self, codes: Tensor, positions: Tensor, head: Tensor, food_position: Tensor) -> Tensor:
        x = self.code(codes) + self.position(positions)
        x = self.layer1(x, x)
        head_index = head[:, None, None].expand(-1, 1, x.shape[2])
        query = x.gather(1, head_index) + self.food(food_position)[:, None]
        return self.norm(self.layer2(x, query)).squeeze(1)


class QNetwork(nn.Module):
    """Q-values of the four actions (B, 4), fp32, from observations (B, rows, columns).

    `preprocess` has no parameters, so the online and the target network share its result. The trunk sees the board
    relative to the snake: turned so that it heads up, and mirrored if its food is on the left. Its outputs are left,
    ahead and right there. A reversal means to go ahead, so it has the same value.
    """

    def __init__(self, args: Args, device: torch.device) -> None:
        super().__init__()
        view = EgocentricView(rules_of(args).board, device)
        if args.network == "attention":
            self.preprocess = view.tokens
            self.trunk = Transformer(view, args.hidden_size)
        else:
            self.preprocess = view.features
            self.trunk = MLP(view, args.hidden_size)
        self.head = nn.Linear(args.hidden_size, 3)
        output_of_turn = torch.tensor([1, 2, 1, 0])  # ahead, to the right, back, to the left
        self.output_index = output_of_turn[view.turn].to(device)
        self.to(device)

    def q_values(self, orientation: Tensor, *features: Tensor) -> Tensor:
        outputs = self.head(self.trunk(*features)).float()
        return outputs.gather(1, self.output_index[orientation])

    def forward(self, obs: Tensor) -> Tensor:
        return self.q_values(*self.preprocess(obs))

    @torch.no_grad()
    def greedy_move(self, obs: Tensor) -> Tensor:
        """Direction of the highest Q-value (B,): up, right, down or left."""
        return self(obs).argmax(1)


# ------------------------------------------------------------------------------------------------ the algorithm


def linear_schedule(start_e: float, end_e: float, fraction: float, progress: float) -> float:
    """Epsilon at `progress` (0 to 1): it falls over the first `fraction` of the run."""
    if progress >= fraction:
        return end_e
    return start_e + (end_e - start_e) * progress / fraction


def td_target(reward: Tensor, discount: Tensor, next_q_target: Tensor, next_q_online: Tensor) -> Tensor:
    """r + discount * Q_target(s', argmax_a Q_online(s', a)), all (B,) or (B, actions), fp32.

    `discount` is gamma, or 0 where the game terminated (van Hasselt et al. 2016, equation 4). Plain DQN passes the
    target's values twice.
    """
    next_action = next_q_online.argmax(1, keepdim=True)
    return reward + discount * next_q_target.gather(1, next_action).squeeze(1)


def progress_of(args: Args, global_step: int, seconds: float) -> float:
    """Fraction of the run that is done; 1 or more ends it."""
    by_steps = global_step / (args.total_timesteps or math.inf)
    by_seconds = seconds / (args.max_seconds or math.inf)
    return max(by_steps, by_seconds)


LOSSES = ["losses/td_loss", "losses/q_values"]


class ReplayBuffer:
    """The last `buffer_size` transitions of all games, sampled uniformly.

    `discount` is gamma, or 0 where the game terminated; a truncated game has a future, that of its last observation.
    Position and size are tensors on the device, where a CUDA graph can change them.
    """

    def __init__(self, args: Args, device: torch.device) -> None:
        zeros = partial(torch.zeros, device=device)
        board = rules_of(args).board
        self.capacity = args.buffer_size // args.num_envs
        self.num_envs = args.num_envs // RANKS
        self.gamma = args.gamma
        shape = (self.capacity, self.num_envs)
        self.obs = zeros(*shape, *board, dtype=torch.uint8)
        self.next_obs = zeros(*shape, *board, dtype=torch.uint8)
        self.action = zeros(shape, dtype=torch.int8)
        self.reward = zeros(shape)
        self.discount = zeros(shape)
        self.position = zeros(1, dtype=torch.int64)
        self.size = zeros(1, dtype=torch.int64)

    def state_dict(self) -> dict[str, Tensor]:
        return {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}

    def load_state_dict(self, saved: dict[str, Tensor]) -> None:
        for name, tensor in self.state_dict().items():
            tensor.copy_(saved[name])

    def add(self, obs, action, reward, terminated, next_obs) -> None:
        """One step of every game."""
        self.obs[self.position] = obs
        self.next_obs[self.position] = next_obs
        self.action[self.position] = action.to(torch.int8)
        self.reward[self.position] = reward
        self.discount[self.position] = self.gamma * ~terminated
        self.position.add_(1).remainder_(self.capacity)
        self.size.add_(1).clamp_(max=self.capacity)

    def sample(self, batch_size: int, generator: torch.Generator) -> list[Tensor]:
        """obs, action, reward, discount and next_obs of `batch_size` transitions."""
        index = torch.randint(2**62, (batch_size,), generator=generator, device=self.position.device)
        index %= self.size * self.num_envs
        fields = [self.obs, self.action, self.reward, self.discount, self.next_obs]
        return [field.flatten(0, 1)[index] for field in fields]


# --------------------------------------------------------------------------------------------------- evaluation


def evaluate(q_network: QNetwork, args: Args, episodes: int, device: torch.device) -> dict:
    """Scores of `episodes` greedy games, the first of each environment, with seeds that training never uses."""
    envs = make_envs(args, episodes, device, EVAL_SEED)
    obs = envs.reset()
    playing = torch.arange(episodes, device=device)  # games that have not ended
    action = torch.zeros_like(playing)
    score = torch.zeros_like(playing)
    while len(playing):
        action[playing] = q_network.greedy_move(obs[playing])
        obs, _, terminated, truncated, info = envs.step(action)
        score[playing] = info["score"][playing]
        ended = terminated | truncated
        playing = playing[~ended[playing]]
    score = score.double()
    return {
        "eval_score_mean": score.mean().item(),
        "eval_score_max": score.max().item(),
        "eval_full_boards": (score == rules_of(args).max_score).double().mean().item(),
        "eval_episodes": episodes,
    }


def watch_game(q_network: QNetwork, args: Args, device: torch.device, render_mode: str):
    """Frames of one greedy game."""
    env = SnakeEnv(render_mode, **vars(rules_of(args)))
    return play(env, lambda obs: q_network.greedy_move(torch.as_tensor(obs, device=device)[None]).item(), EVAL_SEED)


def report(q_network: QNetwork, args: Args, device: torch.device, scores: dict, folder: Path) -> None:
    """Print the scores and write the GIF."""
    print("  ".join(f"{name} {value:g}" for name, value in scores.items()))
    if args.video:
        write_gif(watch_game(q_network, args, device, "rgb_array"), folder / "videos" / "snake.gif")


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
        if min(checkpoint["global_step"], checkpoint["samples_due"], checkpoint["elapsed"]) < 0:
            raise ValueError("its counters are negative")
    except Exception as error:
        problem = f"{path} cannot be loaded ({type(error).__name__}: {error})"
        fail(f"--{flag} {name}: {problem}; a checkpoint, a run folder or latest works")
    return path, checkpoint


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
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high" if args.tf32 else "highest")
    dtype = pick_precision(args, device)
    if args.evaluate is None:
        return train(args, device, dtype)

    path, checkpoint = load_checkpoint(args)
    q_network = QNetwork(args, device)
    try:
        q_network.load_state_dict(checkpoint["q_network"])
    except Exception as error:
        fail(f"--evaluate {args.evaluate}: {type(error).__name__}: {error}")
    if RANK > 0:
        return {}
    if args.render:
        show_in_terminal(watch_game(q_network, args, device, "ansi"), SnakeEnv.metadata["render_fps"])
        return {}
    print(f"evaluation: {args.eval_episodes:,} episodes")
    scores = evaluate(q_network, args, args.eval_episodes, device)
    report(q_network, args, device, scores, path.parent)
    return scores


def train(args: Args, device: torch.device, dtype: torch.dtype) -> dict:
    start_time = time.perf_counter()
    join_ranks()
    signals = catch_signals()

    # --- network and games, new or from a checkpoint --------------------------------------------------------------
    global_step = 0
    samples_due = 0.0  # by the replay ratio, and not yet learned
    seconds_before = 0.0  # of the run that is resumed
    same_games = False
    folder = Path(args.run_dir) / (args.run_name or f"{SCRIPT}__{args.seed}__{time.strftime('%Y%m%d-%H%M%S')}")
    if args.resume is not None:
        path, checkpoint = load_checkpoint(args)
        folder = path.parent
        global_step = checkpoint["global_step"]
        samples_due = checkpoint["samples_due"]
        seconds_before = checkpoint["elapsed"]
        same_games = RANKS == 1 and checkpoint.get("games_of") == [device.type, args.num_envs, 1]
        if not same_games:
            print("new games: those of the checkpoint need one process, the same --device and --num-envs")
    progress = progress_of(args, global_step, seconds_before)
    if progress >= 1:
        fail(f"--resume {args.resume}: the run is over; a larger --total-timesteps or --max-seconds works")

    seed = args.seed
    if not same_games and global_step + RANK > 0:
        seed = lane_key(seed, global_step + RANK) % EVAL_SEED  # games and noise that no process has had
    num_envs = args.num_envs // RANKS
    envs = make_envs(args, num_envs, device, seed)
    obs = envs.reset()  # the environment's own buffer: every step overwrites it
    generator = torch.Generator(device).manual_seed(seed)
    q_network = QNetwork(args, device)
    target_network = QNetwork(args, device).requires_grad_(False)
    target_network.load_state_dict(q_network.state_dict())
    weights = list(q_network.parameters())
    target_weights = list(target_network.parameters())
    learning_rate = torch.tensor(args.learning_rate, device=device)  # a tensor, as all that changes in a CUDA graph
    optimizer = torch.optim.Adam(weights, lr=learning_rate, fused=True, capturable=args.cudagraph)
    scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)
    replay = ReplayBuffer(args, device)
    if args.resume is not None:
        try:
            q_network.load_state_dict(checkpoint["q_network"])
            target_network.load_state_dict(checkpoint["target_network"])
            optimizer.load_state_dict(checkpoint["optimizer"])
            optimizer.param_groups[0].update(lr=learning_rate, capturable=args.cudagraph)
            for weight, moments in optimizer.state.items():  # fused Adam would read past the end of a smaller one
                if not moments["exp_avg"].shape == moments["exp_avg_sq"].shape == weight.shape:
                    raise ValueError("Adam's moments have other shapes than the weights")
            scaler.load_state_dict(checkpoint["scaler"])
            if same_games:
                envs.load_state_dict(checkpoint["envs"])
                generator.set_state(checkpoint["generator"])
            if "replay" in checkpoint and same_games:
                replay.load_state_dict(checkpoint["replay"])
            else:
                print("the replay starts empty: --checkpoint-replay saves it, for the same games")
        except Exception as error:
            fail(f"--resume {args.resume}: {type(error).__name__}: {error}")

    # A fresh context for each forward pass: a longer one keeps using the weights as they were cast at its start.
    autocast = partial(torch.autocast, device.type, dtype, enabled=dtype != torch.float32, cache_enabled=False)

    attention = SDPA_BACKENDS[args.sdpa]
    if args.network == "attention":
        try:
            with autocast(), sdpa_kernel(attention):
                q_network(obs[:1])
        except RuntimeError as error:
            fail(f"--sdpa {args.sdpa}: does not run here in {dtype} ({error}); auto works")
    epsilon = torch.tensor(args.start_e, device=device)
    loss_sum = torch.zeros(len(LOSSES), device=device)  # since the last log

    # --- the run folder -------------------------------------------------------------------------------------------
    writer = open_run_folder(args, folder, global_step) if RANK == 0 else None
    device_name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu, {args.threads} threads"
    precision = str(dtype).removeprefix("torch.")
    print(f"{folder}: {args.num_envs} games on {RANKS} x {device_name} in {precision}")

    # --- collecting -----------------------------------------------------------------------------------------------
    timer = PhaseTimer(device)

    @torch.no_grad()
    def policy(obs):
        with autocast(), sdpa_kernel(attention):
            return q_network(obs).argmax(1)

    def act_step_and_store():
        explore = torch.rand(num_envs, generator=generator, device=device) < epsilon  # drawn for each game
        random_action = torch.randint(4, (num_envs,), generator=generator, device=device)
        action = torch.where(explore, random_action, policy(obs))
        last_obs = obs.clone()
        timer.lap("act")
        _, reward, terminated, _, info = envs.step(action)
        timer.lap("env")
        replay.add(last_obs, action, reward, terminated, info["final_obs"])
        timer.lap("store")

    # --- learning -------------------------------------------------------------------------------------------------
    def td_loss(obs, action, reward, discount, next_obs):
        """The loss, and the means that LOSSES names."""
        with torch.no_grad():
            features = q_network.preprocess(obs)
            next_features = q_network.preprocess(next_obs)
            with autocast(), sdpa_kernel(attention):
                next_q_target = target_network.q_values(*next_features)
                next_q_online = q_network.q_values(*next_features) if args.double else next_q_target
            target = td_target(reward, discount, next_q_target, next_q_online)
        with autocast(), sdpa_kernel(attention):
            q = q_network.q_values(*features)
        q = q.gather(1, action.long()[:, None]).squeeze(1)
        loss = F.smooth_l1_loss(q, target)
        return loss, torch.stack([loss, q.mean()]).detach()

    def update():
        loss, means = td_loss(*replay.sample(args.batch_size // RANKS, generator))
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        average_gradients(weights)  # before `unscale_`: all ranks skip an update that overflows in float16
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(weights, args.max_grad_norm)
        scaler.step(optimizer)
        scaler.update()
        with torch.no_grad():
            torch._foreach_lerp_(target_weights, weights, args.tau)
        loss_sum.add_(means)

    # --- switches -------------------------------------------------------------------------------------------------
    if args.compile:
        policy = torch.compile(policy, mode=args.compile_mode)
        td_loss = torch.compile(td_loss, mode=args.compile_mode)
        policy(obs)  # compiles here rather than in the timed loop
        zeros = torch.zeros(args.batch_size // RANKS, device=device)
        boards = obs[zeros.long()]
        td_loss(boards, zeros.to(torch.int8), zeros, zeros.clone(), boards.clone())[0].backward()
    if args.cudagraph:
        act_step_and_store = CUDAGraphStep(act_step_and_store, generator)
        update = CUDAGraphStep(update, generator)

    # --- the loop -------------------------------------------------------------------------------------------------
    def clock():
        """Seconds and signals, as means over all ranks. Ranks decide from these alone, so they agree."""
        elapsed = seconds_before + time.perf_counter() - start_time
        return mean_over_ranks(torch.tensor([elapsed, len(signals)], dtype=torch.float64)).tolist()

    def save():
        if not all(weight.isfinite().all() for weight in weights):
            fail(f"--learning-rate {args.learning_rate:g}: the weights are not finite and not saved; a lower one works")
        state = {
            "script": SCRIPT,
            "version": CHECKPOINT_VERSION,
            "args": vars(args),
            "q_network": q_network.state_dict(),
            "target_network": target_network.state_dict(),
            "optimizer": optimizer.state_dict(),
            "scaler": scaler.state_dict(),
            "global_step": global_step,
            "samples_due": samples_due,
            "elapsed": seconds,
            "games_of": [device.type, args.num_envs, RANKS],
            "envs": envs.state_dict(),
            "generator": generator.get_state(),
        }
        if args.checkpoint_replay:
            state["replay"] = replay.state_dict()
        if RANK == 0:
            save_checkpoint(folder / "checkpoint.pt", state)

    def log(scalars):
        if RANK == 0:
            for name, value in scalars.items():
                writer.add_scalar(name.replace("eval_", "eval/"), value, global_step)

    first_step = logged_step = global_step
    updates = logged_updates = 0
    transitions_stored = replay.size.item() * args.num_envs
    scores = {}
    log({"perf/warmup_s": time.perf_counter() - start_time})
    start_time = time.perf_counter()  # the warm-up does not count
    seconds = last_log = last_eval = last_checkpoint = seconds_before
    if RANKS > 1:
        save()  # torchrun --max-restarts can resume from the start
    while True:
        timer.lap()  # setup, evaluations and checkpoints do not count
        # 1 act and step, 2 store
        epsilon.fill_(linear_schedule(args.start_e, args.end_e, args.exploration_fraction, progress))
        act_step_and_store()
        global_step += args.num_envs
        transitions_stored += args.num_envs
        timer.lap("rollout")

        # 3 learn
        seconds, stop = clock()
        progress = progress_of(args, global_step, seconds)
        if args.anneal_lr:
            learning_rate.fill_(args.learning_rate * 0.1 ** min(progress, 1))
        if transitions_stored >= args.learning_starts:
            samples_due += args.replay_ratio * args.num_envs
        while samples_due >= args.batch_size:
            update()
            updates += 1
            samples_due -= args.batch_size
        timer.lap("learn")

        # 4 log, evaluate, save
        is_last = progress >= 1 or stop
        if is_last or seconds >= last_log + args.log_every:
            last_log = seconds
            phases = timer.read()
            new_steps = global_step - logged_step
            new_updates = updates - logged_updates
            logged_step = global_step
            logged_updates = updates
            rates = throughput(new_steps, new_updates, args.batch_size, phases)
            finished = mean_over_ranks(envs.finished)  # games, and sums of their score, length and return
            games, score, length, episodic_return = (finished / finished[0].clamp(min=1e-9)).tolist()
            losses = (mean_over_ranks(loss_sum) / max(new_updates, 1)).tolist()
            envs.finished.zero_()
            loss_sum.zero_()
            scalars = {
                "charts/SPS": rates["env_steps_per_second"],
                "charts/updates_per_second": rates["updates_per_second"],
                "charts/samples_per_second": rates["samples_per_second"],
                "charts/replay_ratio": rates["replay_ratio"],
                "charts/epsilon": epsilon.item(),
                "losses/learning_rate": learning_rate.item(),
                "perf/rollout_fraction": rates["rollout_fraction"],
            }
            if games:
                scalars["charts/score"] = score
                scalars["charts/episodic_length"] = length
                scalars["charts/episodic_return"] = episodic_return
            if new_updates:
                scalars.update(zip(LOSSES, losses))
            for phase, phase_seconds in phases.items():
                scalars[f"perf/{phase}_ms"] = 1000 * phase_seconds * args.num_envs / new_steps
            log(scalars)
            print(
                f"{min(progress, 1):4.0%}  step {global_step:>11,}  SPS {rates['env_steps_per_second']:>9,.0f}  "
                f"updates/s {rates['updates_per_second']:>5.0f}  epsilon {epsilon:.3f}  score {score:5.1f}  "
                f"greedy {scores.get('eval_score_mean', math.nan):5.1f}"
            )
            timer.lap("log")
        if is_last:
            break
        if args.eval_every and seconds >= last_eval + args.eval_every:
            if RANK == 0:
                scores = evaluate(q_network, args, max(args.eval_episodes // 10, 1), device)
                log(scores)
            seconds, stop = clock()
            last_eval = seconds  # the interval is from the end of one to the start of the next
        if args.checkpoint_every and seconds >= last_checkpoint + args.checkpoint_every:
            last_checkpoint = seconds
            save()

    # --- the end: first what must not be lost ---------------------------------------------------------------------
    if updates == 0:
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
        "sdpa": args.sdpa if args.network == "attention" else None,
        "env_steps": global_step,
        "wall_seconds": seconds,
        **throughput(global_step - first_step, updates, args.batch_size, timer.total),
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
        scores = evaluate(q_network, args, args.eval_episodes, device)
        log(scores)
        summary.update(scores)
        summary_file.write_text(json.dumps(summary, indent=2))
        report(q_network, args, device, scores, folder)
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
            fail("out of memory: a smaller --batch-size, --buffer-size, --num-envs or --hidden-size works")
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

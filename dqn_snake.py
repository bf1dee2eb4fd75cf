"""Double DQN on Snake: games, replay, acting and learning in one loop on one device.

    python dqn_snake.py                             # two minutes, then an evaluation and a GIF
    python dqn_snake.py --batch-size 8192 --bf16    # large batches, made for a GPU
    python dqn_snake.py --evaluate latest --render  # watch the last agent play
    torchrun --nproc-per-node 2 dqn_snake.py        # two learners, one policy

On two CPU cores the agent eats about 38 food a game after one minute and 58 after ten (benchmarks.md).

What to read: `QNetwork` is the network, `td_target` what it learns, `ReplayBuffer` what it learns from, and the loop
at the end of `main` says when. The rest is switches and bookkeeping.
"""

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
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass, replace
from itertools import count, pairwise
from pathlib import Path
from typing import Any, Literal, NoReturn

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
import tyro
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.tensorboard import SummaryWriter

from envs.playing import play, show_in_terminal, write_gif
from envs.snake.batch import SnakeBatch
from envs.snake.rules import HEAD, VARIANTS, Rules, SnakeEnv
from envs.snake.view import EgocentricView
from envs.streams import lane_key

SCRIPT = Path(__file__).stem
EVAL_SEED = 2**31  # above every --seed
CHECKPOINT_VERSION = 3
RANK = int(os.environ.get("RANK", 0))  # these four are set by torchrun
RANKS = int(os.environ.get("WORLD_SIZE", 1))
LOCAL_RANKS = int(os.environ.get("LOCAL_WORLD_SIZE", 1))  # on this machine
RESTARTS = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))


@dataclass
class Args:
    # Run
    seed: int = 1
    """seed of weights, games, exploration and sampling"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto takes CUDA where there is one"""
    total_timesteps: int | None = None
    """environment transitions to train for (None: no limit)"""
    max_seconds: float | None = None
    """wall-clock budget, warm-up and evaluations on the way included (None: 120, or no limit with --total-timesteps)"""
    run_dir: str = "runs"
    """folder of all runs"""
    run_name: str | None = None
    """folder of this run inside it (None: script, seed and time)"""

    # Environment
    env_id: Literal["Snake-v0", "SnakeBlocks-v0"] = "Snake-v0"
    """rules of the game (envs/snake/rules.py)"""
    board: str = "10x10"
    """rows x columns, 4 to 64 each"""
    num_envs: int | None = None
    """parallel games (None: 128 on CPU, 16384 on CUDA)"""

    # Algorithm
    network: Literal["mlp", "attention"] = "mlp"
    """an MLP over the egocentric view, or a transformer with a token for every cell of it"""
    hidden_size: int | None = None
    """width of its layers (None: 512 for mlp, 64 for attention)"""
    learning_rate: float | None = None
    """Adam's learning rate (None: 1e-3 at batch size 256, growing with the square root of the batch size)"""
    anneal_lr: bool = True
    """let the learning rate fall tenfold over the run, exponentially"""
    buffer_size: int | None = None
    """transitions in the replay buffer (None: 500,000 on CPU, 2,000,000 on CUDA)"""
    gamma: float = 0.98
    """discount factor"""
    double: bool = True
    """double DQN: the online network picks the next action, the target network values it"""
    batch_size: int | None = None
    """transitions per update (None: 256 on CPU, 8192 on CUDA)"""
    replay_ratio: float = 2.0
    """transitions learned from per environment step, which says how often an update is made"""
    learning_starts: int = 5_000
    """transitions in the replay buffer before learning starts"""
    start_e: float = 1.0
    """initial epsilon"""
    end_e: float = 0.002
    """final epsilon"""
    exploration_fraction: float = 0.1
    """fraction of the run over which epsilon falls, linearly"""
    tau: float | None = None
    """target network update rate; 1 copies (None: 0.01 per 256 samples learned from)"""
    max_grad_norm: float = 10.0
    """maximum norm of the gradient"""

    # Speed
    bf16: bool = False
    """forward passes in bfloat16, where the hardware has it"""
    fp16: bool = False
    """forward passes in float16 with gradient scaling (CUDA)"""
    tf32: bool = False
    """fp32 matmuls on tensor cores (CUDA)"""
    compile: bool = False
    """torch.compile acting and the loss, on CUDA the games too"""
    compile_mode: Literal["default", "reduce-overhead", "max-autotune"] = "default"
    """torch.compile's mode"""
    cudagraph: bool = False
    """capture acting, stepping, storing and learning as CUDA graphs"""
    sdpa: Literal["auto", "flash", "efficient", "cudnn", "math"] = "auto"
    """attention kernel to try first (--network attention)"""
    threads: int | None = None
    """CPU threads (None: all cores, 8 at most; fewer where other programs keep them busy)"""

    # Input and output
    log_every: float = 2.0
    """seconds between log lines"""
    eval_every: float = 30.0
    """seconds between evaluations on the way, of a tenth of --eval-episodes (0: none)"""
    eval_episodes: int = 1_000
    """games of the final evaluation"""
    checkpoint_every: float = 60.0
    """seconds between checkpoints (0: only the last)"""
    checkpoint_replay: bool = False
    """save the replay buffer in checkpoints too"""
    resume: str | None = None
    """continue the run of this checkpoint, run folder, or "latest", with its flags"""
    evaluate: str | None = None
    """no training: play --eval-episodes games with this checkpoint, run folder, or "latest" """
    render: bool = False
    """with --evaluate: play one game in the terminal"""
    video: bool = True
    """write a GIF of a game at the end, or with --evaluate"""
    wandb: bool = False
    """mirror TensorBoard to Weights & Biases (pip install wandb)"""


CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
COMMAND_LINE_ONLY = ["run_dir", "run_name", "resume", "evaluate", "render", "video", "wandb"]  # never from a checkpoint
FRACTIONS = ["gamma", "tau", "start_e", "end_e", "exploration_fraction"]
ZERO_WORKS = ["seed", "learning_starts", "eval_every", "checkpoint_every", "gamma", "start_e", "end_e"]
ZERO_WORKS += ["exploration_fraction"]
HIGHEST = dict.fromkeys(FRACTIONS, 1) | {"seed": EVAL_SEED - 1, "threads": 256, "eval_episodes": 100_000}


def fill_defaults(args: Args, device: torch.device) -> Args:
    """A copy of `args` without None where a run needs a value. Flags that cannot work end the program here."""
    args = replace(args)
    on_cuda = device.type == "cuda"
    if args.num_envs is None:
        args.num_envs = 16_384 if on_cuda else 128
    if args.batch_size is None:
        args.batch_size = 8192 if on_cuda else 256
    if args.buffer_size is None:
        args.buffer_size = 2_000_000 if on_cuda else 500_000
    if args.hidden_size is None:
        args.hidden_size = 64 if args.network == "attention" else 512
    if args.threads is None:
        args.threads = pick_threads(max(CORES // LOCAL_RANKS, 1))
    if args.max_seconds is None and args.total_timesteps is None:
        args.max_seconds = 120.0
    check_ranges(args)
    scale = args.batch_size / 256  # larger batches make fewer updates, so each goes farther
    if args.learning_rate is None:
        args.learning_rate = 1e-3 * math.sqrt(scale)
    if args.tau is None:
        args.tau = 1 - 0.99**scale

    rules_of(args)
    if args.bf16 and args.fp16:
        fail("--bf16 --fp16: choose one of them")
    if args.cudagraph and args.compile and args.compile_mode != "default":
        fail(f"--compile-mode {args.compile_mode}: captures graphs by itself; with --cudagraph only default works")
    if args.network == "attention" and args.hidden_size % AttentionLayer.HEADS:
        fail(f"--hidden-size {args.hidden_size}: attention needs a multiple of {AttentionLayer.HEADS}")
    if args.render and args.evaluate is None:
        fail("--render: shows a trained agent, so it needs --evaluate PATH")
    if args.resume is not None and args.evaluate is not None:
        fail("--resume --evaluate: choose one of them")
    if args.num_envs > args.buffer_size:
        fail(f"--num-envs {args.num_envs}: one step of every game has to fit in --buffer-size {args.buffer_size}")
    if args.checkpoint_replay and RANKS > 1:
        fail("--checkpoint-replay: a checkpoint cannot hold the replay of several ranks; without it it works")
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


def rules_of(args: Args) -> Rules:
    sides = args.board.split("x")
    try:
        if not all(side.isdecimal() for side in sides):
            raise ValueError("must be rows x columns")
        board = tuple(int(side) for side in sides)
        return Rules(**VARIANTS[args.env_id] | {"board": board, "observation": "codes"})
    except ValueError as error:
        fail(f"--board {args.board}: {error}; 10x10 works")


def make_envs(args: Args, num_envs: int, device: torch.device, seed: int) -> SnakeBatch:
    """`num_envs` games on `device`. A game that ends starts anew within the same step."""
    return SnakeBatch(num_envs, device, seed, **vars(rules_of(args)))


# ---------------------------------------------------------------------------------------------------- networks


class MLP(nn.Module):
    """Two layers over the features of the view."""

    def __init__(self, view: EgocentricView, width: int, device: torch.device) -> None:
        super().__init__()
        num_inputs = 3 * view.num_features
        bound = num_inputs**-0.5
        self.features = nn.Linear(num_inputs, width, device=device)
        self.food = nn.Embedding(view.side**2, width, device=device)  # a one-hot input, without the zeros
        nn.init.uniform_(self.food.weight, -bound, bound)  # as a Linear layer starts
        self.norm1 = nn.LayerNorm(width, device=device)
        self.norm2 = nn.LayerNorm(width, device=device)
        self.hidden = nn.Linear(width, width, device=device)

    def forward(self, features: torch.Tensor, food_position: torch.Tensor) -> torch.Tensor:
        x = self.features(features.flatten(1))
        x = x.add_(self.food(food_position))  # in place here and below: 7 % less time at batch 8,192 (benchmarks.md)
        x = F.relu_(self.norm1(x))
        return F.relu_(self.norm2(self.hidden(x)))


SDPA_KERNELS = {  # by --sdpa, in the order in which PyTorch tries them; MATH always runs
    "auto": [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH],
    "flash": [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH],
    "efficient": [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH],
    "cudnn": [SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH],
    "math": [SDPBackend.MATH],
}


class AttentionLayer(nn.Module):
    """Pre-norm transformer layer: `query` (B, queries, width) attends to x (B, tokens, width)."""

    HEADS = 4

    def __init__(self, width: int, sdpa: str, device: torch.device) -> None:
        super().__init__()
        self.kernels = SDPA_KERNELS[sdpa]
        self.norm1 = nn.LayerNorm(width, device=device)
        self.norm2 = nn.LayerNorm(width, device=device)
        self.q = nn.Linear(width, width, device=device)
        self.kv = nn.Linear(width, 2 * width, device=device)
        self.out = nn.Linear(width, width, device=device)
        self.up = nn.Linear(width, 2 * width, device=device)
        self.down = nn.Linear(2 * width, width, device=device)

    def kernel(self, dtype: torch.dtype, device: torch.device) -> str:
        """Name of the kernel that PyTorch picks here."""
        q = torch.empty(1, self.HEADS, 16, 16, dtype=dtype, device=device)
        with sdpa_kernel(self.kernels, set_priority=True):
            return SDPBackend(torch._fused_sdp_choice(q, q, q)).name.lower()

    def forward(self, x: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
        q = self.q(self.norm1(query)).unflatten(2, (self.HEADS, -1)).transpose(1, 2)
        k, v = self.kv(self.norm1(x)).unflatten(2, (2, self.HEADS, -1)).permute(2, 0, 3, 1, 4)
        with sdpa_kernel(self.kernels, set_priority=True):
            attended = F.scaled_dot_product_attention(q, k, v)
        query = query + self.out(attended.transpose(1, 2).flatten(2))
        return query + self.down(F.relu_(self.up(self.norm2(query))))


class Transformer(nn.Module):
    """A token for every cell of the board. In the second layer only the head's token queries: half the time."""

    def __init__(self, view: EgocentricView, width: int, sdpa: str, device: torch.device) -> None:
        super().__init__()
        self.code = nn.Embedding(10, width, device=device)
        self.position = nn.Embedding(view.side**2, width, device=device)
        self.food = nn.Embedding(view.side**2, width, device=device)
        self.layer1 = AttentionLayer(width, sdpa, device)
        self.layer2 = AttentionLayer(width, sdpa, device)
        self.norm = nn.LayerNorm(width, device=device)

    def forward(
        self, codes: torch.Tensor, positions: torch.Tensor, head: torch.Tensor, food_position: torch.Tensor
    ) -> torch.Tensor:
        x = self.code(codes) + self.position(positions)
        x = self.layer1(x, x)
        head_index = head[:, None, None].expand(-1, 1, x.shape[2])
        query = x.gather(1, head_index) + self.food(food_position)[:, None]
        return self.norm(self.layer2(x, query)).squeeze(1)


SHAPE_FLAGS = "--network, --hidden-size, --board"  # those that the shapes of the weights follow from


class QNetwork(nn.Module):
    """Q-values of the four actions (B, 4), fp32, from observations (B, rows, columns).

    `preprocess` has no parameters, so the online and the target network share its result. The trunk sees the board
    turned with the snake, and mirrored if its food is on the left: its outputs are left, ahead and right there. A
    reversal means keep going, so it is worth what ahead is worth.
    """

    LEFT, AHEAD, RIGHT = 0, 1, 2

    def __init__(self, args: Args, device: torch.device) -> None:
        super().__init__()
        view = EgocentricView(rules_of(args).board, device)
        if args.network == "attention":
            self.preprocess = view.tokens
            self.trunk = Transformer(view, args.hidden_size, args.sdpa, device)
        else:
            self.preprocess = view.features
            self.trunk = MLP(view, args.hidden_size, device)
        self.head = nn.Linear(args.hidden_size, 3, device=device)
        output_of_turn = torch.tensor([self.AHEAD, self.RIGHT, self.AHEAD, self.LEFT])
        self.output_index = output_of_turn[view.turn].to(device)

    def q_values(self, orientation: torch.Tensor, *features: torch.Tensor) -> torch.Tensor:
        outputs = self.head(self.trunk(*features)).float()
        return outputs.gather(1, self.output_index[orientation])

    def forward(self, obs: torch.Tensor) -> torch.Tensor:
        return self.q_values(*self.preprocess(obs))


# ------------------------------------------------------------------------------------------------ the algorithm


def linear_schedule(start_e: float, end_e: float, fraction: float, progress: float) -> float:
    """Epsilon when `progress` (0 to 1) of the run is over: it falls over the first `fraction` of the run."""
    if progress >= fraction:
        return end_e
    return start_e + (end_e - start_e) * progress / fraction


def td_target(
    reward: torch.Tensor, discount: torch.Tensor, next_q_target: torch.Tensor, next_q_online: torch.Tensor
) -> torch.Tensor:
    """r + discount * Q_target(s', argmax_a Q_online(s', a)), all (B,) or (B, actions), fp32.

    `discount` is gamma, or 0 where the game terminated (van Hasselt et al. 2016, equation 4). Plain DQN passes the
    target's values twice.
    """
    next_action = next_q_online.argmax(1, keepdim=True)
    return reward + discount * next_q_target.gather(1, next_action).squeeze(1)


class ReplayBuffer:
    """The last `buffer_size` transitions of all games, sampled uniformly.

    `discount` is gamma, or 0 where the game terminated; a truncated game still has a future. Position and size are
    tensors on the device, where a CUDA graph can move them.
    """

    def __init__(self, args: Args, device: torch.device) -> None:
        board = rules_of(args).board
        check_memory("--buffer-size", args.buffer_size, 2 * math.prod(board) + 9, device)
        self.capacity = args.buffer_size // args.num_envs
        self.num_envs = args.num_envs
        self.gamma = args.gamma
        shape = (self.capacity, self.num_envs)
        self.obs = torch.zeros(*shape, *board, dtype=torch.uint8, device=device)
        self.next_obs = torch.zeros(*shape, *board, dtype=torch.uint8, device=device)
        self.action = torch.zeros(shape, dtype=torch.int8, device=device)
        self.reward = torch.zeros(shape, device=device)
        self.discount = torch.zeros(shape, device=device)
        self.position = torch.zeros(1, dtype=torch.int64, device=device)
        self.size = torch.zeros(1, dtype=torch.int64, device=device)

    def state_dict(self) -> dict[str, torch.Tensor]:
        names = ["obs", "next_obs", "action", "reward", "discount", "position", "size"]
        return {name: getattr(self, name) for name in names}

    def load_state_dict(self, saved: dict[str, torch.Tensor]) -> None:
        """Raises ValueError, before anything is changed, for values that no replay buffer has."""
        position = saved["position"].item()
        size = saved["size"].item()
        if not (0 <= position < self.capacity and position <= size <= self.capacity):
            raise ValueError(f"position {position} and size {size} of {self.capacity} rows")
        if saved["obs"].max() > HEAD + 3 or saved["next_obs"].max() > HEAD + 3:
            raise ValueError(f"observations must be 0 to {HEAD + 3}")
        if saved["action"].min() < 0 or saved["action"].max() > 3:
            raise ValueError("actions must be 0 to 3")
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

    def sample(self, batch_size: int, generator: torch.Generator) -> list[torch.Tensor]:
        """obs, action, reward, discount and next_obs of `batch_size` transitions."""
        index = torch.randint(2**62, (batch_size,), generator=generator, device=self.position.device)
        index %= self.size * self.num_envs
        fields = [self.obs, self.action, self.reward, self.discount, self.next_obs]
        return [field.flatten(0, 1)[index] for field in fields]


@torch.no_grad()
def evaluate(q_network: QNetwork, args: Args, episodes: int, device: torch.device) -> dict[str, float]:
    """Play `episodes` greedy games, one in each environment, to its end, with food that no training seed has."""
    envs = make_envs(args, episodes, device, EVAL_SEED)
    obs = envs.reset()
    action = torch.zeros(episodes, dtype=torch.int64, device=device)
    score = torch.zeros(episodes, dtype=torch.int64, device=device)
    won = torch.zeros(episodes, dtype=torch.bool, device=device)
    done = torch.zeros(episodes, dtype=torch.bool, device=device)
    playing = torch.arange(episodes, device=device)
    steps = 0
    while len(playing):
        action[playing] = q_network(obs[playing]).argmax(1)
        obs, _, terminated, truncated, info = envs.step(action)
        first_end = (terminated | truncated) & ~done
        score = torch.where(first_end, info["score"], score)
        won |= first_end & info["won"]
        done |= first_end
        steps += 1
        if steps % 16 == 0:  # sync: only first games need another forward pass
            playing = (~done).nonzero().squeeze(1)
    score = score.double()
    full_boards = won.double().mean().item()
    lowest, highest = wilson_interval(full_boards, episodes)
    return {
        "eval_score_mean": score.mean().item(),
        "eval_score_median": score.median().item(),
        "eval_score_max": score.max().item(),
        "eval_full_boards": full_boards,
        "eval_full_boards_lowest": lowest,
        "eval_full_boards_highest": highest,
        "eval_episodes": episodes,
    }


def wilson_interval(share: float, trials: int) -> tuple[float, float]:
    """95 % confidence interval of a share of so many trials (Wilson 1927)."""
    z = 1.96
    scale = 1 + z**2 / trials
    middle = (share + z**2 / (2 * trials)) / scale
    margin = z * math.sqrt(share * (1 - share) / trials + (z / (2 * trials)) ** 2) / scale
    return max(middle - margin, 0.0), min(middle + margin, 1.0)


def watch_game(q_network: QNetwork, args: Args, device: torch.device, render_mode: str) -> Iterator:
    """Frames of one greedy game."""
    env = SnakeEnv(render_mode, **vars(rules_of(args)))

    @torch.no_grad()
    def policy(obs) -> int:
        return q_network(torch.as_tensor(obs, device=device)[None]).argmax().item()

    return play(env, policy, EVAL_SEED)


def save_gif(q_network: QNetwork, args: Args, device: torch.device, folder: Path) -> None:
    path = folder / "videos" / "snake.gif"
    try:
        write_gif(watch_game(q_network, args, device, "rgb_array"), path)
        say(str(path))
    except OSError as error:
        say(f"--video: {path} cannot be written ({error})")


def evaluate_run(q_network: QNetwork, args: Args, device: torch.device) -> dict[str, float]:
    """--evaluate: one game in the terminal (--render), or the scores of many games and a GIF (--video)."""
    path, checkpoint = load_checkpoint("--evaluate", args.evaluate, args.run_dir)
    expected = {"q_network": q_network.state_dict()}
    check_layout(f"--evaluate {args.evaluate}", checkpoint, expected, SHAPE_FLAGS)
    q_network.load_state_dict(checkpoint["q_network"])
    if args.render:
        show_in_terminal(watch_game(q_network, args, device, "ansi"), SnakeEnv.metadata["render_fps"])
        return {}
    scores = evaluate(q_network, args, args.eval_episodes, device)
    say("  ".join(f"{name} {value:g}" for name, value in scores.items()))
    if args.video:
        save_gif(q_network, args, device, path.parent)
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


def rank_share(args: Args, *names: str) -> Args:
    """`args` with this rank's part of what these flags say of all ranks."""
    share = replace(args)
    for name in names:
        value = getattr(args, name)
        if value % RANKS:
            advice = f"must be a multiple of the {RANKS} ranks; {max(value // RANKS, 1) * RANKS} works"
            fail(f"--{name.replace('_', '-')} {value}: {advice}")
        setattr(share, name, value // RANKS)
    return share


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
    start_time = time.perf_counter()
    interrupts = Interrupts()
    device = pick_device(args.device)
    args = fill_defaults(args, device)
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    dtype = pick_precision(args.bf16, args.fp16, args.tf32, device)
    check_memory("--num-envs", args.num_envs, 12 * math.prod(rules_of(args).board) + 100, device)
    q_network = QNetwork(args, device)
    if args.evaluate is not None:
        with interrupts.at_once():
            return evaluate_run(q_network, args, device) if RANK == 0 else {}
        return {}

    sdpa = None
    if args.network == "attention":
        sdpa = q_network.trunk.layer1.kernel(dtype, device)
        if args.sdpa != "auto" and args.sdpa != sdpa.split("_")[0]:
            say(f"--sdpa {args.sdpa}: does not run here")
        say(f"attention runs in {sdpa}")

    # --- networks, games and replay -------------------------------------------------------------------------------
    share = rank_share(args, "num_envs", "batch_size")
    share.buffer_size //= RANKS
    target_network = QNetwork(args, device).requires_grad_(False)
    target_network.load_state_dict(q_network.state_dict())
    weights = list(q_network.parameters())
    target_weights = list(target_network.parameters())
    use_graphs = args.cudagraph and device.type == "cuda" and RANKS == 1
    learning_rate = torch.tensor(args.learning_rate, device=device)
    optimizer = torch.optim.Adam(weights, lr=learning_rate, fused=True, capturable=use_graphs)
    init_adam(optimizer)
    scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)
    generator = torch.Generator(device).manual_seed(args.seed)
    envs = make_envs(args, share.num_envs, device, args.seed)
    obs = envs.reset()  # the environment's own buffer: every step overwrites it
    replay = ReplayBuffer(share, device)
    epsilon = torch.tensor(args.start_e, device=device)
    loss_and_q_sum = torch.zeros(2, device=device)  # since the last log
    timer = PhaseTimer(device)
    global_step = 0
    updates = 0
    samples_due = 0.0  # that the replay ratio asks for and no update has used
    seconds_before = 0.0  # of the run that is resumed
    run_seconds = 0.0  # at the last `sync`
    begins_anew = True  # with its games, rather than go on with those of a checkpoint

    def elapsed() -> float:
        return seconds_before + time.perf_counter() - start_time

    def progress() -> float:
        by_steps = global_step / args.total_timesteps if args.total_timesteps else 0
        by_seconds = run_seconds / args.max_seconds if args.max_seconds else 0
        return max(by_steps, by_seconds)

    # --- checkpoints ----------------------------------------------------------------------------------------------
    def run_state() -> dict[str, Any]:
        """All there is to a run, as tensors and plain values; of several ranks without games."""
        state = {
            "q_network": q_network.state_dict(),
            "target_network": target_network.state_dict(),
            "optimizer": optimizer.state_dict()["state"],
            "scaler": scaler.state_dict(),
            "global_step": global_step,
            "updates": updates,
            "samples_due": samples_due,
            "elapsed": elapsed(),
        }
        if RANKS == 1:
            state["device"] = device.type
            state["generator"] = generator.get_state()
            state["envs"] = envs.state_dict()
        if args.checkpoint_replay:
            state["replay"] = replay.state_dict()
        return state

    def load_run_state(checkpoint: dict[str, Any]) -> None:
        """Checks everything first: what does not fit is refused before anything is changed."""
        nonlocal global_step, updates, samples_due, seconds_before, run_seconds, begins_anew
        asked = f"--resume {args.resume}"
        saved_board = checkpoint["args"].get("board")
        if saved_board != args.board:  # 9x4 and 4x9 have tensors of the same shapes
            fail(f"--board {args.board}: must be {saved_board}, as it was")
        begins_anew = RANKS > 1 or "envs" not in checkpoint
        same_device = checkpoint.get("device") == device.type and not begins_anew
        expected = run_state()
        if begins_anew:
            expected.pop("envs", None)
        if not expected["scaler"] or checkpoint.get("scaler") == {}:  # only float16 has something there
            del expected["scaler"]
        if not same_device:  # random numbers are of another kind there
            expected.pop("device", None)
            expected.pop("generator", None)
        if "replay" not in checkpoint:
            expected.pop("replay", None)
        check_layout(asked, checkpoint, expected, f"{SHAPE_FLAGS} and --num-envs")
        try:
            if same_device:
                torch.Generator(device).set_state(checkpoint["generator"])
            if not begins_anew:
                envs.load_state_dict(checkpoint["envs"])
            if "replay" in expected:
                replay.load_state_dict(checkpoint["replay"])
        except (RuntimeError, ValueError) as error:
            fail(f"{asked}: not a whole checkpoint of {SCRIPT}.py ({error})")

        global_step = checkpoint["global_step"]
        updates = checkpoint["updates"]
        samples_due = checkpoint["samples_due"]
        seconds_before = run_seconds = checkpoint["elapsed"]
        if progress() >= 1:
            advice = "a larger --total-timesteps or --max-seconds works"
            fail(f"{asked}: its run is over after {global_step:,} steps and {seconds_before:.0f} s; {advice}")
        for name in ("q_network", "target_network", "optimizer"):
            copy_tensors(expected[name], checkpoint[name])
        if "scaler" in expected:
            scaler.load_state_dict(checkpoint["scaler"])
        if same_device:
            generator.set_state(checkpoint["generator"])
        elif begins_anew:
            say("the games start anew: a checkpoint has those of a run of one process only")
        else:
            say("the random numbers begin anew: those of the checkpoint are of another kind of device")
        if "replay" not in expected:
            say("the replay starts empty: without --checkpoint-replay a checkpoint does not hold it")

    folder = None
    writer = None  # of the first rank, the only one that writes
    if args.resume is not None:
        path, checkpoint = load_checkpoint("--resume", args.resume, args.run_dir)
        load_run_state(checkpoint)
        folder = path.parent
    if begins_anew and global_step + RANK > 0:  # with games and random numbers that no rank has had
        seed = lane_key(args.seed, global_step + RANK) % EVAL_SEED
        envs = make_envs(args, share.num_envs, device, seed)
        obs = envs.reset()
        generator.manual_seed(seed)
    if RANK == 0:
        if args.wandb:
            try:
                import wandb
            except ImportError:
                fail("--wandb: its package is missing; pip install wandb")
        if folder is None:
            folder = make_run_folder(args)
        else:
            write_json(folder / "args.json", {"script": SCRIPT, **vars(args)})
            for unfinished in folder.glob("checkpoint.*.tmp"):  # of a run that was killed while it saved
                unfinished.unlink(missing_ok=True)
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
    if device.type == "cuda" and not (args.bf16 and args.cudagraph):
        say("on CUDA --bf16 and --cudagraph should make it faster; no GPU has measured it yet")
    if device.type == "cpu" and not args.bf16 and bf16_speedup() > 1.2:
        say("this CPU multiplies matrices faster in bf16: --bf16 learns faster here (benchmarks.md)")
    steps_per_update = args.batch_size / args.replay_ratio
    say(
        f"{args.num_envs} games; every {steps_per_update:g} steps (replay ratio {args.replay_ratio:g}) an update on "
        f"{args.batch_size} of the last {replay.capacity * args.num_envs:,} transitions; learning rate "
        f"{args.learning_rate:.2g}, tau {args.tau:.2g}"
    )

    # --- what the loop does, in its order -------------------------------------------------------------------------
    def autocast() -> torch.autocast:
        # Fresh for each forward: one that lives longer goes on using the weights as they were cast at its start.
        return torch.autocast(device.type, dtype, enabled=dtype != torch.float32, cache_enabled=False)

    @torch.no_grad()
    def policy(obs: torch.Tensor) -> torch.Tensor:
        with autocast():
            return q_network(obs).argmax(1)

    def act_step_and_store() -> None:
        explore = torch.rand(share.num_envs, generator=generator, device=device) < epsilon  # drawn for each game
        random_action = torch.randint(4, (share.num_envs,), generator=generator, device=device)
        action = torch.where(explore, random_action, policy_step(obs))
        last_obs = obs.clone()
        timer.lap("act")
        _, reward, terminated, _, info = env_step(action)
        timer.lap("env")
        replay.add(last_obs, action, reward, terminated, info["final_obs"])
        timer.lap("store")

    def td_loss(obs, action, reward, discount, next_obs) -> tuple[torch.Tensor, torch.Tensor]:
        """Loss, and the mean of the Q-values that it is about."""
        with torch.no_grad():
            features = q_network.preprocess(obs)
            next_features = q_network.preprocess(next_obs)
            with autocast():
                next_q_target = target_network.q_values(*next_features)
                next_q_online = q_network.q_values(*next_features) if args.double else next_q_target
            target = td_target(reward, discount, next_q_target, next_q_online)
        with autocast():
            q = q_network.q_values(*features)
        q = q.gather(1, action.long()[:, None]).squeeze(1)
        return F.smooth_l1_loss(q, target), q.detach().mean()

    def update() -> None:
        loss, q = loss_step(*replay.sample(share.batch_size, generator))
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        average_gradients(weights)  # before `unscale_`, so that all ranks skip an update that overflows in float16
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(weights, args.max_grad_norm)
        scaler.step(optimizer)
        scaler.update()
        with torch.no_grad():  # else each update would lengthen a graph that nobody needs, for ever
            torch._foreach_lerp_(target_weights, weights, args.tau)
        loss_and_q_sum.add_(torch.stack([loss.detach(), q]))

    def log() -> None:
        seconds = timer.read()
        wall_seconds = sum(seconds.values())
        new_steps = global_step - logged_step
        new_updates = updates - logged_updates
        finished = mean_over_ranks(envs.finished) * RANKS
        games, score, length, episodic_return = (finished / finished[0].clamp(min=1)).tolist()
        loss_sum, q_sum = mean_over_ranks(loss_and_q_sum).tolist()
        envs.finished.zero_()
        loss_and_q_sum.zero_()
        scalars = {
            "charts/SPS": new_steps / wall_seconds,
            "charts/updates_per_second": new_updates / wall_seconds,
            "charts/samples_per_second": new_updates * args.batch_size / wall_seconds,
            "charts/replay_ratio": new_updates * args.batch_size / new_steps,
            "charts/epsilon": epsilon.item(),
            "losses/learning_rate": learning_rate.item(),
            "perf/rollout_fraction": 1 - seconds["learn"] / wall_seconds,
        }
        for phase in seconds:
            scalars[f"perf/{phase}_ms"] = 1000 * seconds[phase] * args.num_envs / new_steps
        if games:
            scalars["charts/score"] = score
            scalars["charts/episodic_length"] = length
            scalars["charts/episodic_return"] = episodic_return
        if new_updates:
            scalars["losses/td_loss"] = loss_sum / new_updates
            scalars["losses/q_values"] = q_sum / new_updates
        if device.type == "cuda":
            scalars["perf/gpu_mem_gib"] = torch.cuda.memory_allocated(device) / 2**30
            with suppress(Exception):  # NVML is missing, or has an error of its own
                scalars["perf/gpu_util"] = torch.cuda.utilization(device)
        if RANK == 0:
            write_scalars(writer, scalars, global_step)
        line = f"{min(progress(), 1):4.0%}  step {global_step:>11,}"
        line += f"  SPS {new_steps / wall_seconds:>9,.0f}  updates/s {new_updates / wall_seconds:>5.0f}"
        line += f"  epsilon {epsilon:.3f}  score {score:5.1f}  greedy {scores.get('eval_score_mean', math.nan):5.1f}"
        say(line, end="\r" if sys.stdout.isatty() else "\n")
        if not math.isfinite(loss_sum):
            fail(
                f"--learning-rate {args.learning_rate:g}: the loss is {loss_sum} since the last log; a lower one works"
            )

    def evaluate_and_log(episodes: int) -> dict[str, float]:
        scores = evaluate(q_network, args, episodes, device)
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
    env_step = envs.step
    loss_step = td_loss
    if args.compile:
        some_obs = obs[torch.arange(share.batch_size) % share.num_envs]
        zeros = torch.zeros(share.batch_size, device=device)
        policy_step = try_compile(policy, args.compile_mode, obs)
        example = [some_obs, zeros.to(torch.int8), zeros, zeros.clone(), some_obs.clone()]  # no tensor twice
        loss_step = try_compile(td_loss, args.compile_mode, *example)
        if envs.fixed_shapes:  # eager, a step of the games is some 240 kernels
            before = {name: tensor.clone() for name, tensor in envs.state_dict().items()}
            env_step = try_compile(envs.step, args.compile_mode, torch.zeros_like(envs.head))
            envs.load_state_dict(before)  # that was a trial
    is_compiled = loss_step is not td_loss
    if use_graphs:
        act_step_and_store = CUDAGraphStep(act_step_and_store, generator, timer)
        update = CUDAGraphStep(update, generator, timer, scaler)
    elif args.cudagraph:
        say("--cudagraph: needs CUDA and one rank; the loop runs without graphs")

    # --- the loop -------------------------------------------------------------------------------------------------
    first_step = logged_step = global_step
    first_update = logged_updates = updates
    transitions_stored = replay.size.item() * args.num_envs
    scores = {}
    run_seconds, stop = sync(elapsed(), bool(interrupts))
    last_log = last_eval = last_checkpoint = run_seconds
    if RANK == 0:
        write_scalars(writer, {"perf/warmup_s": time.perf_counter() - start_time}, global_step)
    if RANKS > 1:
        save()  # from the start torchrun can go on with it
    timer.lap()
    while progress() < 1 and not stop:
        # 1 act and step, 2 store
        epsilon.fill_(linear_schedule(args.start_e, args.end_e, args.exploration_fraction, progress()))
        act_step_and_store()
        global_step += args.num_envs
        transitions_stored += args.num_envs
        timer.lap("rollout")

        # 3 learn
        if args.anneal_lr:
            learning_rate.fill_(args.learning_rate * 0.1 ** min(progress(), 1))
        if transitions_stored >= args.learning_starts:
            samples_due += args.replay_ratio * args.num_envs
        while samples_due >= args.batch_size:
            update()
            updates += 1
            samples_due -= args.batch_size
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

    # --- the end: what must not be lost comes first ---------------------------------------------------------------
    if global_step > logged_step:
        log()
    if RANKS > 1:
        dist.destroy_process_group()
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
        "cudagraph": use_graphs and act_step_and_store.graph is not None and update.graph is not None,
        "sdpa": sdpa,
        "env_steps": global_step,
        "wall_seconds": wall_seconds,
        "env_steps_per_second": new_steps / busy_seconds,
        "updates_per_second": new_updates / busy_seconds,
        "samples_per_second": new_updates * args.batch_size / busy_seconds,
        "replay_ratio": new_updates * args.batch_size / max(new_steps, 1),
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
                save_gif(q_network, args, device, folder)
            say(f"watch it play: python {SCRIPT}.py --evaluate {folder} --render")
    if stop or interrupts:
        say(f"stopped; {folder / 'checkpoint.pt'} goes on with python {SCRIPT}.py --resume {folder}")
    with suppress(OSError):  # on a full disk
        writer.close()
    return summary


def parse_args() -> Args:
    """The command line. With --resume and --evaluate it stands on top of the flags of that run."""
    args = tyro.cli(Args, description=__doc__)
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
    args = tyro.cli(Args, args=flags + sys.argv[1:], description=__doc__)
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
            fail("out of memory: a smaller --batch-size, --buffer-size, --num-envs or --eval-episodes works")
        if not isinstance(error, OSError):
            raise
        fail(str(error))

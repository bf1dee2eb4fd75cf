"""Double DQN on Snake: games, replay, acting and learning in one loop on one device.

    python dqn_snake.py                             # two minutes, then an evaluation and a GIF
    python dqn_snake.py --batch-size 8192 --bf16    # large batches, made for a GPU
    python dqn_snake.py --evaluate latest --render  # watch the last agent play

On two CPU cores the agent eats about 38 food a game after one minute and 58 after ten (benchmarks.md).

To read it: `EgocentricView` and `QNetwork` are what learns, `td_target` is what it learns, `Replay` is what from, and
the loop in `main` is when. The rest is switches and bookkeeping.
"""

import json
import math
import os
import signal
import sys
import threading
import time
import timeit
import types
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import count, islice, pairwise
from pathlib import Path
from typing import Any, Literal, NoReturn, Union, get_args, get_origin, get_type_hints

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
import tyro
from PIL import Image
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.tensorboard import SummaryWriter

from envs.snake import BODY, FOOD, HEAD, MOVES, VARIANTS, Rules, SnakeBatch, SnakeEnv

SCRIPT = Path(__file__).stem
EVAL_SEED = 2**31  # above every --seed
GIF_FRAMES = 1_000


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
    """rules of the game (envs/snake.py); seen as `Snake-v0` shows it either way"""
    board: str = "10x10"
    """rows x columns, 4 to 64 each"""
    num_envs: int | None = None
    """games played side by side (None: 128 on CPU, 16384 on CUDA)"""

    # Algorithm
    network: Literal["mlp", "attention"] = "mlp"
    """an MLP over the egocentric view, or a transformer with a token for every cell of it"""
    hidden_size: int | None = None
    """width of its layers (None: 512 for mlp, 64 for attention)"""
    learning_rate: float | None = None
    """Adam's step size (None: 1e-3 at batch 256, growing with the square root of the batch size)"""
    anneal_lr: bool = True
    """let the step size fall tenfold over the run, exponentially"""
    buffer_size: int | None = None
    """transitions the replay holds (None: 500,000 on CPU, 2,000,000 on CUDA)"""
    gamma: float = 0.98
    """discount"""
    double: bool = True
    """the online network picks the action the target network judges (van Hasselt et al. 2016)"""
    batch_size: int | None = None
    """transitions per update (None: 256 on CPU, 8192 on CUDA)"""
    replay_ratio: float = 2.0
    """transitions learned from per environment step; the time between updates follows"""
    learning_starts: int = 5_000
    """transitions in the replay before learning begins"""
    start_e: float = 1.0
    """share of random actions at the start"""
    end_e: float = 0.002
    """share of random actions at the end"""
    exploration_fraction: float = 0.1
    """part of the run over which it falls, linearly"""
    tau: float | None = None
    """how far the target network moves at an update; 1 copies (None: 0.01 per 256 samples learned)"""
    max_grad_norm: float = 10.0
    """gradients are clipped to this norm"""

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
    """checkpoints hold the replay too"""
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
COMMAND_LINE_ONLY = {"run_dir", "run_name", "resume", "evaluate", "render", "video", "wandb"}  # never from a checkpoint
DEFAULTS = {  # of flags that are None
    "cpu": {"num_envs": 128, "batch_size": 256, "buffer_size": 500_000},
    "cuda": {"num_envs": 16_384, "batch_size": 8192, "buffer_size": 2_000_000},
}


def resolve(args: Args, device: torch.device) -> Args:
    """`args` with nothing a run needs left None. Values that cannot work are refused here, before anything starts."""
    defaults = DEFAULTS[device.type] | {"hidden_size": 512}
    if args.threads is None:
        defaults["threads"] = pick_threads(CORES)
    if args.network == "attention":
        defaults["hidden_size"] = 64
    if args.total_timesteps is None:
        defaults["max_seconds"] = 120.0
    args = replace(args, **{name: value for name, value in defaults.items() if getattr(args, name) is None})

    shares = {"gamma", "tau", "start_e", "end_e", "exploration_fraction"}
    may_be_0 = {"seed", "learning_starts", "eval_every", "checkpoint_every", *shares} - {"tau"}
    limits = dict.fromkeys(shares, 1) | {"seed": EVAL_SEED - 1, "threads": 256, "eval_episodes": 100_000}
    for name, value in vars(args).items():
        if type(value) in (int, float):
            highest = limits.get(name, sys.maxsize)
            if not 0 <= value <= highest or (value == 0 and name not in may_be_0):
                lowest = "0 or more" if name in may_be_0 else "above 0"
                refuse(f"--{name.replace('_', '-')} {value}: must be {lowest} and at most {highest:g}")
    if args.bf16 and args.fp16:
        refuse("--bf16 --fp16: choose one of them")
    if args.cudagraph and args.compile and args.compile_mode != "default":
        refuse(f"--compile-mode {args.compile_mode}: captures graphs by itself; with --cudagraph only default works")
    if args.network == "attention" and args.hidden_size % AttentionLayer.HEADS:
        refuse(f"--hidden-size {args.hidden_size}: attention needs a multiple of {AttentionLayer.HEADS}")
    if args.render and args.evaluate is None:
        refuse("--render: shows a trained agent, so it needs --evaluate PATH")
    if args.resume is not None and args.evaluate is not None:
        refuse("--resume --evaluate: choose one of them")
    if args.num_envs > args.buffer_size:
        refuse(f"--num-envs {args.num_envs}: one step of every game has to fit in --buffer-size {args.buffer_size}")
    rules_of(args)

    batches = args.batch_size / 256  # fewer updates for the same samples: each goes farther
    rate, tau = 1e-3 * math.sqrt(batches), 1 - 0.99**batches
    return replace(args, learning_rate=args.learning_rate or rate, tau=args.tau or tau)


def rules_of(args: Args) -> Rules:
    sides = args.board.split("x")
    try:
        if not all(side.isdecimal() for side in sides):
            raise ValueError("must be rows x columns")
        return Rules(**VARIANTS[args.env_id] | {"board": tuple(int(side) for side in sides)})
    except ValueError as error:
        refuse(f"--board {args.board}: {error}; 10x10 works")


def make_envs(args: Args, num_envs: int, device: torch.device, seed: int) -> SnakeBatch:
    """`num_envs` games on `device`. A game that ends starts anew within the same step."""
    return SnakeBatch(num_envs, device, seed, **vars(rules_of(args)))


# ---------------------------------------------------------------------------------------------------- networks


class EgocentricView:
    """The board as the snake sees it: turned so that it heads up, moved so that its head is in the middle.

    It has no parameters, only tables by heading and cell of the head. From codes (B, rows, columns)
    - `spots` makes heading, seen (B, 3, spots) and food. A spot is a cell near the head, or a block of cells; blocks
      cover the whole board. Seen is what PLANES says of a cell, or the sum over the cells / BLOCK of a block;
    - `cells` makes heading, code (B, cells) with directions turned, place (B, cells), head and food.
    Heading, head (a cell) and food are (B,). Food and place number the S x S cells around the head, row by row, where
    S = 2 * longest side - 1.
    """

    NEAR, BLOCK = 4, 3  # cells in each direction that are seen one by one; side of the blocks
    PLANES = 2 * [[1, 0, 0]] + [[0, 1, 0], [0, 0, 1], [0, -1, 0], [0, 0, -1]] + 4 * [[0, 0, 0]]
    # by turned code: is a cell free; does the way from a body cell to the head go ahead (1) or back, right (1) or left

    def __init__(self, board: tuple[int, int], device: torch.device) -> None:
        def grid(start: int, *ends: int) -> torch.Tensor:
            return torch.cartesian_prod(*(torch.arange(start, end) for end in ends))

        (rows, columns), self.side = board, 2 * max(board) - 1
        self.middle = self.side**2 // 2
        cells, ringed = grid(0, rows, columns), grid(-1, rows + 1, columns + 1)  # middles of blocks may be one off it
        around = grid(1 - max(board), max(board), max(board))
        near, far = around[around.abs().amax(1) <= self.NEAR], around[(around % self.BLOCK == 0).all(1)]
        moves = torch.tensor(MOVES)
        turn = torch.stack([-moves, moves.roll(-1, 0)], 1)  # (heading, back and right, row and column)

        block = (cells[:, None] - ringed).abs().amax(2) <= self.BLOCK // 2
        views = torch.cat([torch.eye(len(cells)), block / self.BLOCK, torch.zeros(len(cells), 1)], 1)

        def look(spots: torch.Tensor, ring: int) -> torch.Tensor:
            """(heading, head, spot) -> its column of `views`; the last is off the board."""
            row, column = (cells[:, None] + (spots @ turn)[:, None] + ring).unbind(3)
            inside = (row >= 0) & (row < rows + 2 * ring) & (column >= 0) & (column < columns + 2 * ring)
            return torch.where(inside, row * (columns + 2 * ring) + column + ring * len(cells), views.shape[1] - 1)

        code, heading = torch.arange(10), torch.arange(4)[:, None]
        turned = torch.where(code < BODY, code, code - (code - BODY) % 4 + (code - BODY - heading) % 4)
        self.num_spots = len(near) + len(far)
        self.views, self.look = views.to(device), torch.cat([look(near, 0), look(far, 1)], 2).short().to(device)
        self.turned, self.planes = turned.to(device), torch.tensor(self.PLANES).float()[turned].view(40, 3).to(device)
        self.number = ((self.side * turn[:, 0] + turn[:, 1]) @ cells.T).to(device)  # (heading, cell)

    def locate(self, obs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        codes = obs.flatten(1)
        head, food = (codes >= HEAD).byte().argmax(1), (codes == FOOD).byte().argmax(1)
        heading = codes.gather(1, head[:, None]).squeeze(1).int() - HEAD
        start = self.middle - self.number[heading, head]
        return codes, heading, head, start, start + self.number[heading, food]

    def spots(self, obs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        codes, heading, head, _, food = self.locate(obs)
        views = F.embedding(codes + 10 * heading[:, None], self.planes).mT @ self.views
        return heading, views.gather(2, self.look[heading, head].long()[:, None].expand(-1, 3, -1)), food

    def cells(self, obs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        codes, heading, head, start, food = self.locate(obs)
        return heading, self.turned[heading[:, None], codes.int()], start[:, None] + self.number[heading], head, food


class MLP(nn.Module):
    """Two layers over the view; the food's place enters the first as a row of an embedding, not as one more plane."""

    def __init__(self, view: EgocentricView, width: int, device: torch.device) -> None:
        super().__init__()
        inputs = 3 * view.num_spots
        self.view = nn.Linear(inputs, width, device=device)
        self.food = nn.Embedding(view.side**2, width, device=device)
        nn.init.uniform_(self.food.weight, -(inputs**-0.5), inputs**-0.5)  # as a Linear would start such a plane
        self.norm1, self.norm2 = (nn.LayerNorm(width, device=device) for _ in range(2))
        self.hidden = nn.Linear(width, width, device=device)

    def forward(self, seen: torch.Tensor, food: torch.Tensor) -> torch.Tensor:
        x = F.relu_(self.norm1(self.view(seen.flatten(1)).add_(self.food(food))))  # in place: see benchmarks.md
        return F.relu_(self.norm2(self.hidden(x)))


FLASH, EFFICIENT, CUDNN = SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION
SDPA = {  # kernels to try, in this order
    "auto": [FLASH, EFFICIENT, CUDNN],
    "flash": [FLASH],
    "efficient": [EFFICIENT],
    "cudnn": [CUDNN],
    "math": [],
}


class AttentionLayer(nn.Module):
    """Pre-norm transformer layer: `asking` (B, some, width) look at all of x (B, tokens, width)."""

    HEADS = 4

    def __init__(self, width: int, sdpa: str, device: torch.device) -> None:
        super().__init__()
        self.backends = [*SDPA[sdpa], SDPBackend.MATH]  # the last always runs
        self.norm1, self.norm2 = (nn.LayerNorm(width, device=device) for _ in range(2))
        self.q, self.kv, self.out, self.up, self.down = (
            nn.Linear(*sizes, device=device)
            for sizes in ((width, width), (width, 2 * width), (width, width), (width, 2 * width), (2 * width, width))
        )

    def kernel(self, dtype: torch.dtype, device: torch.device) -> str:
        """Name of the kernel that PyTorch picks here."""
        q = torch.empty(1, self.HEADS, 16, 16, dtype=dtype, device=device)
        with sdpa_kernel(self.backends, set_priority=True):
            return SDPBackend(torch._fused_sdp_choice(q, q, q)).name.lower()

    def forward(self, x: torch.Tensor, asking: torch.Tensor) -> torch.Tensor:
        q = self.q(self.norm1(asking)).unflatten(2, (self.HEADS, -1)).transpose(1, 2)
        k, v = self.kv(self.norm1(x)).unflatten(2, (2, self.HEADS, -1)).permute(2, 0, 3, 1, 4)
        with sdpa_kernel(self.backends, set_priority=True):
            mixed = F.scaled_dot_product_attention(q, k, v)
        asking = asking + self.out(mixed.transpose(1, 2).flatten(2))
        return asking + self.down(F.relu_(self.up(self.norm2(asking))))


class Attention(nn.Module):
    """Transformer with a token for every cell of the board: what it holds and where it lies, seen from the head.

    In the second layer only the head asks, told where the food is: nothing else is read out, which takes half the time.
    """

    def __init__(self, view: EgocentricView, width: int, sdpa: str, device: torch.device) -> None:
        super().__init__()
        self.code = nn.Embedding(10, width, device=device)
        self.place, self.food = (nn.Embedding(view.side**2, width, device=device) for _ in range(2))
        self.layer1, self.layer2 = (AttentionLayer(width, sdpa, device) for _ in range(2))
        self.norm = nn.LayerNorm(width, device=device)

    def forward(self, code: torch.Tensor, place: torch.Tensor, head: torch.Tensor, food: torch.Tensor) -> torch.Tensor:
        x = self.code(code) + self.place(place)
        x = self.layer1(x, x)
        asking = x.gather(1, head[:, None, None].expand(-1, 1, x.shape[2])) + self.food(food)[:, None]
        return self.norm(self.layer2(x, asking)).squeeze(1)


SHAPES = "--network, --hidden-size, --board"  # what the shapes of its weights follow from


class QNetwork(nn.Module):
    """Values of the four actions (B, 4), fp32, from codes (B, rows, columns): `judge(*see(obs))`.

    `see` has no parameters, so online and target network share what it makes of the next observations. Inside, the
    actions are left, ahead and right; a reversal means keep going, so it is worth what ahead is worth.
    """

    def __init__(self, args: Args, device: torch.device) -> None:
        super().__init__()
        view, width = EgocentricView(rules_of(args).board, device), args.hidden_size
        if args.network == "attention":
            self.see, self.trunk = view.cells, Attention(view, width, args.sdpa, device)
        else:
            self.see, self.trunk = view.spots, MLP(view, width, device)
        self.head = nn.Linear(width, 3, device=device)
        direction, inside = torch.arange(4, device=device), torch.tensor([1, 2, 1, 0], device=device)
        self.inside = inside[(direction - direction[:, None]) % 4]  # (heading, action) -> output of `head`

    def judge(self, heading: torch.Tensor, *seen: torch.Tensor) -> torch.Tensor:
        return self.head(self.trunk(*seen)).float().gather(1, self.inside[heading])

    def forward(self, obs: torch.Tensor) -> torch.Tensor:
        return self.judge(*self.see(obs))


# ------------------------------------------------------------------------------------------------ the algorithm


def epsilon_at(progress: float, start_e: float, end_e: float, exploration_fraction: float) -> float:
    """Share of random actions when `progress` (0 to 1) of the run is over."""
    if progress >= exploration_fraction:
        return end_e
    return start_e + (end_e - start_e) * progress / exploration_fraction


def td_target(
    reward: torch.Tensor, discount: torch.Tensor, next_q_target: torch.Tensor, next_q_online: torch.Tensor
) -> torch.Tensor:
    """r + discount * Q_target(s', argmax_a Q_online(s', a)), all (B,) or (B, actions), fp32.

    `discount` is gamma, 0 where the game was over (van Hasselt et al. 2016, equation 4). Plain DQN passes the target's
    values twice.
    """
    return reward + discount * next_q_target.gather(1, next_q_online.argmax(1, keepdim=True)).squeeze(1)


class Replay:
    """The last `buffer_size` transitions of all lanes, drawn uniformly.

    `discount` is what the value of `next_obs` counts: gamma, or 0 once the game terminated; a truncated game goes on
    counting. The write position lives on the device, where a CUDA graph can move it.
    """

    def __init__(self, args: Args, envs: SnakeBatch, device: torch.device) -> None:
        self.rows, self.num_envs = args.buffer_size // args.num_envs, args.num_envs
        self.gamma, board = args.gamma, envs.rules.board
        refuse_if_too_large("--buffer-size", args.buffer_size, 2 * envs.rules.cells + 9, device)

        def ring(dtype: torch.dtype, *shape: int) -> torch.Tensor:
            return torch.zeros(self.rows, self.num_envs, *shape, dtype=dtype, device=device)

        self.obs, self.next_obs, self.action = ring(torch.uint8, *board), ring(torch.uint8, *board), ring(torch.int8)
        self.reward, self.discount = ring(torch.float32), ring(torch.float32)
        self.row, self.size = (torch.zeros(1, dtype=torch.int64, device=device) for _ in range(2))

    def state_dict(self) -> dict[str, torch.Tensor]:
        names = "obs next_obs action reward discount row size".split()
        return {name: getattr(self, name) for name in names}

    def load_state_dict(self, saved: dict[str, torch.Tensor]) -> None:
        """Raises ValueError, before anything is changed, for values that no replay has."""
        row, size = saved["row"].item(), saved["size"].item()
        if not (0 <= row < self.rows and row <= size <= self.rows):
            raise ValueError(f"row {row} and size {size} of {self.rows} rows")
        for name, highest in (("obs", HEAD + 3), ("next_obs", HEAD + 3), ("action", 3)):
            if not 0 <= int(saved[name].min()) <= int(saved[name].max()) <= highest:
                raise ValueError(f"{name} must be 0 to {highest}")
        for name, tensor in self.state_dict().items():
            tensor.copy_(saved[name])

    def store(self, obs, action, reward, terminated, final_obs) -> None:
        """One step of every lane."""
        row = self.row
        self.obs[row], self.action[row], self.reward[row] = obs, action.to(torch.int8), reward
        self.next_obs[row], self.discount[row] = final_obs, self.gamma * ~terminated
        self.row.add_(1).remainder_(self.rows)
        self.size.add_(1).clamp_(max=self.rows)

    def sample(self, batch_size: int, generator: torch.Generator) -> list[torch.Tensor]:
        """obs, action, reward, discount and next_obs of `batch_size` transitions."""
        index = torch.randint(2**62, (batch_size,), generator=generator, device=self.row.device)
        index %= self.size * self.num_envs
        rings = self.obs, self.action, self.reward, self.discount, self.next_obs
        return [ring.flatten(0, 1)[index] for ring in rings]


@torch.no_grad()
def evaluate(q_network: QNetwork, args: Args, episodes: int, device: torch.device) -> dict[str, float]:
    """Play `episodes` greedy games, one per lane, each to its end, with food that no training seed has seen."""
    envs = make_envs(args, episodes, device, EVAL_SEED)
    obs, step = envs.reset(), 0
    action, score = (torch.zeros(episodes, dtype=torch.int64, device=device) for _ in range(2))
    won, done = (torch.zeros(episodes, dtype=torch.bool, device=device) for _ in range(2))
    playing = torch.arange(episodes, device=device)
    while len(playing):
        action[playing] = q_network(obs[playing]).argmax(1)
        obs, _, terminated, truncated, info = envs.step(action)
        ends = (terminated | truncated) & ~done
        score = torch.where(ends, info["score"], score)
        won, done, step = won | (ends & info["won"]), done | ends, step + 1
        if step % 16 == 0:  # sync: only lanes still in their first game need another forward pass
            playing = (~done).nonzero().squeeze(1)
    score = score.double()
    return {
        "eval_score_mean": score.mean().item(),
        "eval_score_median": score.median().item(),
        "eval_score_max": score.max().item(),
        "eval_full_boards": won.double().mean().item(),
        "eval_episodes": episodes,
    }


@torch.no_grad()
def play(q_network: QNetwork, args: Args, device: torch.device, render_mode: str) -> Iterator[np.ndarray | str]:
    """Frames of one greedy game, played by the rule book."""
    env, done = SnakeEnv(render_mode, **vars(rules_of(args))), False
    env.reset(seed=EVAL_SEED)
    yield env.render()
    while not done:
        action = q_network(torch.as_tensor(env.codes(), device=device)[None]).argmax().item()
        _, _, terminated, truncated, _ = env.step(action)
        done = terminated or truncated
        yield env.render()


def write_gif(q_network: QNetwork, args: Args, device: torch.device, folder: Path) -> None:
    frames = (Image.fromarray(frame) for frame in play(q_network, args, device, "rgb_array"))
    more = islice(frames, GIF_FRAMES - 1)  # a snake that goes in circles would have tens of thousands
    try:
        folder.mkdir(exist_ok=True)
        next(frames).save(folder / "snake.gif", save_all=True, append_images=more, duration=80, loop=0)
        say(str(folder / "snake.gif"))
    except OSError as error:
        say(f"--video: {folder} cannot be written ({error})")


def show(q_network: QNetwork, args: Args, device: torch.device) -> dict[str, float]:
    """--evaluate: one game in the terminal (--render), or the scores of many and a GIF (--video)."""
    path, saved = load_checkpoint("--evaluate", args.evaluate, args.run_dir)
    expected = {"q_network": q_network.state_dict()}
    refuse_if_different(f"--evaluate {args.evaluate}", saved, expected, SHAPES)
    q_network.load_state_dict(saved["q_network"])
    if args.render:
        for frame in play(q_network, args, device, "ansi"):
            say(f"\033[H\033[J{frame}")
            time.sleep(1 / SnakeEnv.metadata["render_fps"])
        return {}
    scores = evaluate(q_network, args, args.eval_episodes, device)
    say("  ".join(f"{name} {value:g}" for name, value in scores.items()))
    if args.video:
        write_gif(q_network, args, device, path.parent / "videos")
    return scores


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
        self.watch.mark()  # capturing counts nowhere


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


def load_optimizer(optimizer: torch.optim.Optimizer, state: dict) -> None:
    """Put the moments of a checkpoint into `optimizer`, which keeps its own options."""
    (options,) = optimizer.param_groups
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
    optimizer.param_groups[0].update(lr=options["lr"])  # the tensor that the loop writes to, not a copy


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
def main(args: Args) -> dict:
    started = time.perf_counter()
    interrupts = Interrupts()
    device = pick_device(args.device)
    args = resolve(args, device)
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    dtype = pick_precision(args.bf16, args.fp16, args.tf32, device)
    refuse_if_too_large("--num-envs", args.num_envs, 12 * math.prod(rules_of(args).board) + 100, device)
    q_network = QNetwork(args, device)
    if args.evaluate is not None:
        with interrupts.at_once():
            return show(q_network, args, device)
        return {}

    sdpa = None
    if args.network == "attention":
        sdpa = q_network.trunk.layer1.kernel(dtype, device)
        asked = "" if args.sdpa in ("auto", sdpa.split("_")[0]) else f"--sdpa {args.sdpa}: does not run here; "
        say(f"{asked}attention runs in {sdpa}")

    # --- what a run is made of ------------------------------------------------------------------------------------
    target_network = QNetwork(args, device).requires_grad_(False)
    target_network.load_state_dict(q_network.state_dict())
    weights, target_weights = list(q_network.parameters()), list(target_network.parameters())
    graphs = args.cudagraph and device.type == "cuda"
    learning_rate = torch.tensor(args.learning_rate, device=device)
    optimizer = torch.optim.Adam(weights, lr=learning_rate, fused=True, capturable=graphs)
    scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)
    generator = torch.Generator(device).manual_seed(args.seed)
    envs = make_envs(args, args.num_envs, device, args.seed)
    obs = envs.reset()  # the environment's own buffer: every step overwrites it
    replay = Replay(args, envs, device)
    epsilon = torch.tensor(args.start_e, device=device)
    learned = torch.zeros(2, device=device)  # sums of loss and q since the last log
    watch = Stopwatch(device)

    # --- a new run, or the rest of one ----------------------------------------------------------------------------
    global_step, updates, owed, seconds_before = 0, 0, 0.0, 0.0

    def elapsed() -> float:
        return seconds_before + time.perf_counter() - started

    def progress() -> float:
        return max(global_step / (args.total_timesteps or math.inf), elapsed() / (args.max_seconds or math.inf))

    def run_state() -> dict[str, Any]:
        """All there is to a run, as tensors and plain values."""
        state = {
            "q_network": q_network.state_dict(),
            "target_network": target_network.state_dict(),
            "optimizer": optimizer.state_dict()["state"],
            "scaler": scaler.state_dict(),
            "device": device.type,
            "generator": generator.get_state(),
            "envs": envs.state_dict(),
            "global_step": global_step,
            "updates": updates,
            "owed": owed,
            "elapsed": elapsed(),
        }
        return state | ({"replay": replay.state_dict()} if args.checkpoint_replay else {})

    def load_run_state(saved: dict[str, Any]) -> None:
        """Checks everything first: what does not fit is refused before anything is changed."""
        nonlocal global_step, updates, owed, seconds_before
        asked, expected = f"--resume {args.resume}", run_state()
        if saved["args"].get("board") != args.board:  # 9x4 and 4x9 have tensors of the same shapes
            refuse(f"--board {args.board}: must be {saved['args'].get('board')}, as it was")
        if args.checkpoint_replay and "replay" not in saved:
            del expected["replay"]
        if saved.get("optimizer"):  # empty before the first update
            expected["optimizer"] = adam_state(weights)
        if not (saved.get("scaler") and expected["scaler"]):  # only float16 has something there
            del expected["scaler"]
        same_device = saved.get("device") == device.type
        if not same_device:
            del expected["device"], expected["generator"]
        refuse_if_different(asked, saved, expected, f"{SHAPES} and --num-envs")
        try:
            if same_device:
                torch.Generator(device).set_state(saved["generator"])
            envs.load_state_dict(saved["envs"])
            if "replay" in expected:
                replay.load_state_dict(saved["replay"])
        except (RuntimeError, ValueError) as error:
            refuse(f"{asked}: not a whole checkpoint of {SCRIPT}.py ({error})")
        global_step, updates, owed, seconds_before = (saved[k] for k in ("global_step", "updates", "owed", "elapsed"))
        if progress() >= 1:
            over = f"its run is over after {global_step:,} steps and {elapsed():.0f} s"
            refuse(f"{asked}: {over}; a larger --total-timesteps or --max-seconds works")
        q_network.load_state_dict(saved["q_network"])
        target_network.load_state_dict(saved["target_network"])
        load_optimizer(optimizer, saved["optimizer"])
        if "scaler" in expected:
            scaler.load_state_dict(saved["scaler"])
        if same_device:
            generator.set_state(saved["generator"])
        else:
            say("the random numbers begin anew: those of the checkpoint are of another kind of device")
        if "replay" not in expected:
            say("the replay starts empty: without --checkpoint-replay a checkpoint does not hold it")

    folder = None
    if args.resume is not None:
        path, saved = load_checkpoint("--resume", args.resume, args.run_dir)
        load_run_state(saved)
        folder = path.parent
        write_json(folder / "args.json", {"script": SCRIPT, **vars(args)})
        for unfinished in folder.glob("checkpoint.*.tmp"):  # of a run that was killed while it saved
            unfinished.unlink(missing_ok=True)
    if args.wandb:
        try:
            import wandb
        except ImportError:
            refuse("--wandb: its package is missing; pip install wandb")
    folder = folder or make_run_folder(args)
    if args.wandb:
        wandb.init(project=SCRIPT, name=folder.name, config=vars(args), sync_tensorboard=True)

    first_step, first_update = logged_step, logged_update = global_step, updates
    held, scores = replay.size.item() * args.num_envs, {}
    writer = SummaryWriter(folder, purge_step=global_step)
    writer.add_text("args", "  \n".join(f"{name}: {value}" for name, value in vars(args).items()))
    precision = str(dtype).removeprefix("torch.")
    threads = f"cpu, {torch.get_num_threads()} threads"
    device_name = torch.cuda.get_device_name(device) if device.type == "cuda" else threads
    say(f"{folder} on {device_name} in {precision}")
    if device.type == "cuda" and not (args.bf16 and args.cudagraph):
        say("on CUDA --bf16 and --cudagraph should make it faster; no GPU has measured it yet")
    if not args.bf16 and device.type == "cpu" and bf16_speedup() > 1.2:
        say("this CPU multiplies matrices faster in bf16: --bf16 learns faster here (benchmarks.md)")
    every = f"every {args.batch_size / args.replay_ratio:g} steps (replay ratio {args.replay_ratio:g})"
    learns = f"an update on {args.batch_size} of the last {replay.rows * args.num_envs:,} transitions"
    say(f"{args.num_envs} games; {every} {learns}; learning rate {args.learning_rate:.2g}, tau {args.tau:.2g}")

    def due(what: str) -> bool:
        every = getattr(args, f"{what}_every")
        if every == 0 or elapsed() < last[what] + every:
            return False
        last[what] = elapsed()
        return True

    def save() -> None:
        if not all(weight.isfinite().all() for weight in weights):
            return print(f"{folder}: the weights are not finite and were not saved", file=sys.stderr)
        save_checkpoint(folder / "checkpoint.pt", {"script": SCRIPT, "args": vars(args), **run_state()})

    def log() -> None:
        seconds = watch.read()
        steps, learns, wall = global_step - logged_step, updates - logged_update, sum(seconds.values())
        games, score, length, returned = (envs.finished / envs.finished[0].clamp(min=1)).tolist()
        loss, q = learned.tolist()
        envs.finished.zero_()
        learned.zero_()
        scalars = {
            "charts/SPS": steps / wall,
            "charts/updates_per_second": learns / wall,
            "charts/samples_per_second": learns * args.batch_size / wall,
            "charts/replay_ratio": learns * args.batch_size / steps,
            "charts/epsilon": epsilon.item(),
            "losses/learning_rate": learning_rate.item(),
            "perf/rollout_fraction": 1 - seconds["learn"] / wall,
        }
        scalars |= {f"perf/{phase}_ms": 1000 * spent * args.num_envs / steps for phase, spent in seconds.items()}
        if games:
            scalars |= {"charts/score": score, "charts/episodic_length": length, "charts/episodic_return": returned}
        if learns:
            scalars |= {"losses/td_loss": loss / learns, "losses/q_values": q / learns}
        if device.type == "cuda":
            scalars["perf/gpu_mem_gib"] = torch.cuda.memory_allocated(device) / 2**30
            with suppress(Exception):  # NVML missing, or an error of its own
                scalars["perf/gpu_util"] = torch.cuda.utilization(device)
        write_scalars(writer, scalars, global_step)
        line = f"{min(progress(), 1):4.0%}  step {global_step:>11,}"
        line += f"  SPS {steps / wall:>9,.0f}  updates/s {learns / wall:>5.0f}"
        line += f"  epsilon {epsilon:.3f}  score {score:5.1f}  greedy {scores.get('eval_score_mean', math.nan):5.1f}"
        say(line, end="\r" if sys.stdout.isatty() else "\n")
        if not math.isfinite(loss):
            refuse(f"--learning-rate {args.learning_rate:g}: the loss is {loss} since the last log; a lower one works")

    def test(episodes: int) -> dict[str, float]:
        scores = evaluate(q_network, args, episodes, device)
        write_scalars(writer, {name.replace("_", "/", 1): value for name, value in scores.items()}, global_step)
        return scores

    # --- acting and learning --------------------------------------------------------------------------------------
    def autocast() -> torch.autocast:
        # Fresh for each forward: one that lives longer goes on using the weights as they were cast at its start.
        return torch.autocast(device.type, dtype, enabled=dtype != torch.float32, cache_enabled=False)

    @torch.no_grad()
    def policy(obs: torch.Tensor) -> torch.Tensor:
        with autocast():
            return q_network(obs).argmax(1)

    def loss_of(obs, action, reward, discount, next_obs) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.no_grad():
            seen, next_seen = q_network.see(obs), q_network.see(next_obs)
            with autocast():
                next_q_target = target_network.judge(*next_seen)
                next_q_online = q_network.judge(*next_seen) if args.double else next_q_target
            target = td_target(reward, discount, next_q_target, next_q_online)
        with autocast():
            q = q_network.judge(*seen)
        q = q.gather(1, action.long()[:, None]).squeeze(1)
        return F.smooth_l1_loss(q, target), q.detach().mean()

    def rollout() -> None:
        # 1 act and step: every lane draws for itself whether it explores
        explores = torch.rand(args.num_envs, generator=generator, device=device) < epsilon
        random = torch.randint(4, (args.num_envs,), generator=generator, device=device)
        action = torch.where(explores, random, policy_step(obs))
        before = obs.clone()
        watch.mark("act")
        _, reward, terminated, _, info = env_step(action)
        watch.mark("env")
        # 2 store
        replay.store(before, action, reward, terminated, info["final_obs"])
        watch.mark("store")

    def update() -> None:
        loss, q = loss_step(*replay.sample(args.batch_size, generator))
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(weights, args.max_grad_norm)
        scaler.step(optimizer)
        scaler.update()
        torch._foreach_lerp_(target_weights, weights, args.tau)
        learned.add_(torch.stack([loss.detach(), q]))

    # --- switches: they wrap `policy`, `envs.step`, `loss_of`, `rollout` and `update` -----------------------------
    policy_step, env_step, loss_step = policy, envs.step, loss_of
    if args.compile:
        some, zeros = obs[torch.arange(args.batch_size) % args.num_envs], torch.zeros(args.batch_size, device=device)
        policy_step = compiled(policy, args.compile_mode, obs)
        loss_step = compiled(loss_of, args.compile_mode, some, zeros.to(torch.int8), zeros, zeros, some)
        if envs.fixed_shapes:  # 240 launches a step become some tens
            games = {name: tensor.clone() for name, tensor in envs.state_dict().items()}
            env_step = compiled(envs.step, args.compile_mode, torch.zeros_like(envs.head))
            envs.load_state_dict(games)  # that was a trial
    if graphs:
        rollout, update = Graphed(rollout, generator, watch), Graphed(update, generator, watch)
    elif args.cudagraph:
        say("--cudagraph: needs CUDA; the loop runs without graphs")

    # --- the loop -------------------------------------------------------------------------------------------------
    last = dict.fromkeys(("log", "eval", "checkpoint"), elapsed())
    write_scalars(writer, {"perf/warmup_s": time.perf_counter() - started}, global_step)
    watch.mark()
    while progress() < 1 and not interrupts:
        # 1 act and step, 2 store
        epsilon.fill_(epsilon_at(progress(), args.start_e, args.end_e, args.exploration_fraction))
        rollout()
        global_step += args.num_envs
        held += args.num_envs
        watch.mark("rollout")

        # 3 learn
        if args.anneal_lr:
            learning_rate.fill_(args.learning_rate * 0.1 ** min(progress(), 1))
        if held >= args.learning_starts:
            owed += args.replay_ratio * args.num_envs
        while owed >= args.batch_size:
            update()
            owed -= args.batch_size
            updates += 1
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
        "compiled": loss_step is not loss_of,
        "cudagraph": graphs and rollout.graph is not None and update.graph is not None,
        "sdpa": sdpa,
        "env_steps": global_step,
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
    if not interrupts:
        with interrupts.at_once():
            summary |= test(args.eval_episodes)
            write_json(folder / "summary.json", summary)
            say("  ".join(f"{name} {value:g}" for name, value in summary.items() if name.startswith("eval")))
            if args.video:
                write_gif(q_network, args, device, folder / "videos")
            say(f"watch it play: python {SCRIPT}.py --evaluate {folder} --render")
    if interrupts:
        say(f"stopped; {folder / 'checkpoint.pt'} goes on with python {SCRIPT}.py --resume {folder}")
    with suppress(OSError):  # on a full disk
        writer.close()
    return summary


def parse() -> Args:
    """The command line, with --resume and --evaluate on top of the flags of that run."""
    args = tyro.cli(Args, description=__doc__)
    flag = "resume" if args.resume is not None else "evaluate"
    name = getattr(args, flag)
    if name is None:
        return args
    path, saved = load_checkpoint(f"--{flag}", name, args.run_dir)
    flags = saved_flags(f"--{flag}", name, saved["args"])
    if args.total_timesteps is not None or args.max_seconds is not None:
        flags |= {"total_timesteps": None, "max_seconds": None}  # a new limit takes the place of the old ones
    args = tyro.cli(Args, default=Args(**flags), description=__doc__)
    return replace(args, **{flag: str(path)})  # looked up once: the latest may soon be another one


if __name__ == "__main__":
    try:
        main(parse())
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except (OSError, MemoryError, RuntimeError) as error:
        if is_out_of_memory(error):
            refuse("out of memory: a smaller --batch-size, --buffer-size, --num-envs or --eval-episodes works")
        if not isinstance(error, OSError):
            raise
        refuse(str(error))

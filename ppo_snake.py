"""PPO on Snake. The shortest of the scripts, and the one that fills the board: read it first.

    python ppo_snake.py                             # two minutes, then an evaluation and a GIF
    python ppo_snake.py --bf16 --cudagraph          # on a GPU
    python ppo_snake.py --evaluate latest --render  # watch the last agent play
    torchrun --nproc-per-node 2 ppo_snake.py        # two processes train one policy

On two CPU cores the agent eats more than 90 of 97 food per game after two minutes (benchmarks.md).

How to read it: `Agent` is the network, `gae` and `ppo_loss` are the algorithm, and `train` runs it from top to bottom.
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

# How long an idle thread spins. While another process keeps one of two cores busy, two threads make 2,900 env steps/s
# with this and 2,300 without; on a quiet machine 7,200 and 7,700 (benchmarks/pages/trials.md).
os.environ.setdefault("GOMP_SPINCOUNT", "4000")

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
import tyro
from torch import Tensor
from torch.utils.tensorboard import SummaryWriter

from envs.playing import play, show_in_terminal, write_gif
from envs.snake.batch import SnakeBatch
from envs.snake.rules import Rules, SnakeEnv, parse_board
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
    """seed of weights, games, exploration and minibatches"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto uses CUDA if there is one"""
    run_name: str | None = None
    """name of this run's folder (None: script, seed and time)"""
    run_dir: str = "runs"
    """folder of all runs"""

    # Environment
    board: str = "10x10"
    """rows x columns, 4 to 64 each"""
    num_envs: int | None = None
    """parallel games, over all processes (None: 256 on a CPU, 16384 on CUDA)"""

    # Algorithm
    learning_rate: float = 2e-3
    """Adam's learning rate"""
    num_steps: int = 32
    """steps per game in a rollout"""
    hidden_size: int = 128
    """width of the network's layers"""
    anneal_lr: bool = True
    """decay the learning rate linearly to 0 over the run"""
    num_minibatches: int = 16
    """minibatches per epoch"""
    update_epochs: int = 2
    """epochs over each rollout"""
    gamma: float = 0.998
    """discount factor"""
    gae_lambda: float = 0.95
    """lambda of generalized advantage estimation"""
    clip_coef: float = 0.2
    """clipping range of the probability ratio"""
    ent_coef: float = 0.01
    """entropy coefficient, decayed linearly to 0 over the run"""
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
    """torch.compile the policy and the loss"""
    compile_mode: Literal["default", "reduce-overhead", "max-autotune"] = "default"
    """mode of torch.compile"""
    cudagraph: bool = False
    """capture rollout steps and updates as CUDA graphs (one process)"""
    threads: int | None = None
    """CPU threads (None: all cores, 8 at most; OMP_NUM_THREADS, which torchrun sets to 1, is obeyed)"""

    # Input and output
    resume: str | None = None
    """continue a run, with its flags: a checkpoint, a run folder, or "latest" """
    evaluate: str | None = None
    """no training, play --eval-episodes games: with a checkpoint, a run folder, or "latest" """
    render: bool = False
    """with --evaluate: play one game in the terminal"""
    eval_every: float = 60.0
    """seconds between evaluations on a tenth of --eval-episodes, or more if they are slow (0: none)"""
    eval_episodes: int = 1_000
    """games of the final evaluation"""
    log_every: float = 2.0
    """seconds between log lines"""
    checkpoint_every: float = 60.0
    """seconds between checkpoints (0: only at the end)"""
    video: bool = True
    """write a GIF of one game after the final evaluation"""
    wandb: bool = False
    """mirror TensorBoard to Weights & Biases (pip install wandb)"""


NOT_RESUMED = ["run_dir", "run_name", "resume", "evaluate", "render", "video", "wandb"]
MAY_BE_0 = ["seed", "eval_every", "checkpoint_every", "ent_coef", "vf_coef", "gamma", "gae_lambda"]
HIGHEST = {
    "gamma": 1,
    "gae_lambda": 1,
    "seed": EVAL_SEED - 1,
    "threads": 256,
    "eval_episodes": 100_000,
}


def fill_defaults(args: Args, device: torch.device) -> Args:
    """Fills in the defaults of `args`. Ends the program if a flag cannot work."""
    if args.num_envs is None:
        args.num_envs = 16_384 if device.type == "cuda" else 256
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
    if args.num_envs % RANKS:
        fail(f"--num-envs {args.num_envs}: must be a multiple of the {RANKS} processes")
    batch_size = args.num_envs // RANKS * args.num_steps
    if batch_size % args.num_minibatches or batch_size == args.num_minibatches:
        fail(
            f"--num-minibatches {args.num_minibatches}: must divide the {batch_size} steps of a rollout "
            "(--num-envs x --num-steps) into 2 or more each"
        )
    if args.bf16 and args.fp16:
        fail("--bf16 --fp16: choose one of them")
    for name in ("fp16", "tf32", "cudagraph"):
        if getattr(args, name) and device.type != "cuda":
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
        return Rules(parse_board(args.board))
    except ValueError:
        fail(f"--board {args.board}: must be rows x columns, 4 to 64 each; 10x10 works")


def make_envs(args: Args, num_envs: int, device: torch.device, seed: int) -> SnakeBatch:
    """`num_envs` games on `device`. A finished game restarts within the same step."""
    return SnakeBatch(num_envs, device, seed, **vars(rules_of(args)))


# ---------------------------------------------------------------------------------------------------- the network


class Agent(nn.Module):
    """Policy and value function of observations (B, rows, columns).

    The layers see the board relative to the snake: turned so that it heads up, and mirrored if its food is on the left.
    There an action is to turn left (0), go ahead (1) or turn right (2); `move` translates it to the board's directions.
    """

    def __init__(self, args: Args, device: torch.device) -> None:
        super().__init__()
        view = EgocentricView(rules_of(args).board, device)
        width = args.hidden_size
        self.num_inputs = 3 * view.num_features
        bound = self.num_inputs**-0.5
        self.preprocess = view.features  # has no parameters
        self.features = nn.Linear(self.num_inputs, width)
        self.food = nn.Embedding(view.side**2, width)  # a one-hot input, without the zeros
        nn.init.uniform_(self.food.weight, -bound, bound)  # as nn.Linear does
        self.hidden = nn.Linear(width, width)
        self.actor = nn.Linear(width, 3)
        self.critic = nn.Linear(width, 1)
        self.move = view.move  # (orientation, action)
        self.to(device)

    def forward(self, features: Tensor, food_position: Tensor) -> tuple[Tensor, Tensor]:
        """Logits of the three actions (B, 3) and values (B,), fp32."""
        x = self.features(features.flatten(1))
        x = F.relu_(x.add_(self.food(food_position)))
        x = F.relu_(self.hidden(x))
        return self.actor(x).float(), self.critic(x).squeeze(1).float()

    @torch.no_grad()
    def greedy_move(self, obs: Tensor) -> Tensor:
        """Direction of the most likely action (B,): up, right, down or left."""
        orientation, features, food_position = self.preprocess(obs)
        logits, _ = self(features, food_position)
        return self.move[orientation, logits.argmax(1)]


# ------------------------------------------------------------------------------------------------ the algorithm


def gae(reward: Tensor, value: Tensor, done: Tensor, gamma: float, gae_lambda: float) -> Tensor:
    """Advantages (steps, games), fp32 (Schulman et al. 2016, equation 16).

    `reward` and `done` are (steps, games), `value` is (steps + 1, games). Nothing is passed back over the end of
    a game. If it was truncated, its last reward includes gamma times the value of its last observation.
    """
    lastgaelam = torch.zeros_like(reward[0])
    advantages = torch.empty_like(reward)
    for step in reversed(range(len(reward))):
        discount = gamma * ~done[step]
        delta = reward[step] + discount * value[step + 1] - value[step]
        lastgaelam = delta + discount * gae_lambda * lastgaelam
        advantages[step] = lastgaelam
    return advantages


LOSSES = ["losses/loss", "losses/pg_loss", "losses/v_loss", "losses/entropy", "losses/approx_kl"]


def ppo_loss(
    logits: Tensor,
    value: Tensor,
    action: Tensor,
    old_logprob: Tensor,
    advantage: Tensor,
    returns: Tensor,
    clip_coef: float,
    vf_coef: float,
    ent_coef: Tensor,
) -> tuple[Tensor, Tensor]:
    """PPO's loss (Schulman et al. 2017, equation 9) of `logits` (B, actions); the other tensors are (B,).

    Also returns the means that LOSSES names; `approx_kl` is "k3" of Schulman 2020.
    """
    logprobs = F.log_softmax(logits, 1)
    logprob = logprobs.gather(1, action[:, None]).squeeze(1)
    logratio = logprob - old_logprob
    ratio = logratio.exp()
    clipped_ratio = ratio.clamp(1 - clip_coef, 1 + clip_coef)
    pg_loss = -torch.min(advantage * ratio, advantage * clipped_ratio)
    v_loss = (value - returns).square()
    entropy = -(logprobs.exp() * logprobs).sum(1)
    approx_kl = ratio - 1 - logratio
    loss = pg_loss + vf_coef * v_loss - ent_coef * entropy
    means = torch.stack([loss, pg_loss, v_loss, entropy, approx_kl]).detach().mean(1)
    return loss.mean(), means


def progress_of(args: Args, global_step: int, seconds: float) -> float:
    """Fraction of the run that is done; 1 or more ends it."""
    by_steps = global_step / (args.total_timesteps or math.inf)
    by_seconds = seconds / (args.max_seconds or math.inf)
    return max(by_steps, by_seconds)


# --------------------------------------------------------------------------------------------------- evaluation


def evaluate(agent: Agent, args: Args, episodes: int, device: torch.device) -> dict:
    """Scores of `episodes` greedy games, the first of each environment, with seeds that training never uses."""
    envs = make_envs(args, episodes, device, EVAL_SEED)
    obs = envs.reset()
    playing = torch.arange(episodes, device=device)  # games that have not ended
    action = torch.zeros_like(playing)
    score = torch.zeros_like(playing)
    while len(playing):
        action[playing] = agent.greedy_move(obs[playing])
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


def watch_game(agent: Agent, args: Args, device: torch.device, render_mode: str):
    """Frames of one greedy game."""
    env = SnakeEnv(render_mode, **vars(rules_of(args)))
    return play(env, lambda obs: agent.greedy_move(torch.as_tensor(obs, device=device)[None]).item(), EVAL_SEED)


def report(agent: Agent, args: Args, device: torch.device, scores: dict, folder: Path) -> None:
    """Print the scores and write the GIF."""
    print("  ".join(f"{name} {value:g}" for name, value in scores.items()))
    if args.video:
        write_gif(watch_game(agent, args, device, "rgb_array"), folder / "videos" / "snake.gif")


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
        if min(checkpoint["global_step"], checkpoint["elapsed"]) < 0:
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
    agent = Agent(args, device)
    try:
        agent.load_state_dict(checkpoint["agent"])
    except Exception as error:
        fail(f"--evaluate {args.evaluate}: {type(error).__name__}: {error}")
    if RANK > 0:
        return {}
    if args.render:
        show_in_terminal(watch_game(agent, args, device, "ansi"), SnakeEnv.metadata["render_fps"])
        return {}
    print(f"evaluation: {args.eval_episodes:,} episodes")
    scores = evaluate(agent, args, args.eval_episodes, device)
    report(agent, args, device, scores, path.parent)
    return scores


def train(args: Args, device: torch.device, dtype: torch.dtype) -> dict:
    start_time = time.perf_counter()
    join_ranks()
    signals = catch_signals()

    # --- network and games, new or from a checkpoint --------------------------------------------------------------
    global_step = 0
    seconds_before = 0.0  # of the run that is resumed
    same_games = False
    folder = Path(args.run_dir) / (args.run_name or f"{SCRIPT}__{args.seed}__{time.strftime('%Y%m%d-%H%M%S')}")
    if args.resume is not None:
        path, checkpoint = load_checkpoint(args)
        folder = path.parent
        global_step = checkpoint["global_step"]
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
    agent = Agent(args, device)
    weights = list(agent.parameters())
    learning_rate = torch.tensor(args.learning_rate, device=device)  # a tensor, as all that changes in a CUDA graph
    optimizer = torch.optim.Adam(weights, lr=learning_rate, eps=1e-4, fused=True, capturable=args.cudagraph)
    scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)
    if args.resume is not None:
        try:
            agent.load_state_dict(checkpoint["agent"])
            optimizer.load_state_dict(checkpoint["optimizer"])
            optimizer.param_groups[0].update(lr=learning_rate, capturable=args.cudagraph)
            for weight, moments in optimizer.state.items():  # fused Adam would read past the end of a smaller one
                if not moments["exp_avg"].shape == moments["exp_avg_sq"].shape == weight.shape:
                    raise ValueError("Adam's moments have other shapes than the weights")
            scaler.load_state_dict(checkpoint["scaler"])
            if same_games:
                envs.load_state_dict(checkpoint["envs"])
                generator.set_state(checkpoint["generator"])
        except Exception as error:
            fail(f"--resume {args.resume}: {type(error).__name__}: {error}")

    # --- the rollout: `num_steps` steps of every game -------------------------------------------------------------
    zeros = partial(torch.zeros, device=device)
    shape = (args.num_steps, num_envs)
    features = zeros(*shape, agent.num_inputs, dtype=dtype)
    food_positions = zeros(shape, dtype=torch.int64)
    actions = zeros(shape, dtype=torch.int64)
    logprobs = zeros(shape)
    rewards = zeros(shape)
    dones = zeros(shape, dtype=torch.bool)
    values = zeros(args.num_steps + 1, num_envs)
    advantages = zeros(shape)
    batch_size = num_envs * args.num_steps
    minibatch_size = batch_size // args.num_minibatches
    samples_per_update = minibatch_size * RANKS
    step = zeros(1, dtype=torch.int64)
    index = zeros(minibatch_size, dtype=torch.int64)  # of the minibatch, in the flat rollout
    ent_coef = torch.tensor(args.ent_coef, device=device)
    loss_sum = zeros(len(LOSSES))  # since the last log

    writer = open_run_folder(args, folder, global_step) if RANK == 0 else None
    device_name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu, {args.threads} threads"
    precision = str(dtype).removeprefix("torch.")
    print(f"{folder}: {args.num_envs} games on {RANKS} x {device_name} in {precision}")

    # --- collecting -----------------------------------------------------------------------------------------------
    timer = PhaseTimer(device)

    # A fresh context for each forward pass: a longer one keeps using the weights as they were cast at its start.
    autocast = partial(torch.autocast, device.type, dtype, enabled=dtype != torch.float32, cache_enabled=False)

    @torch.no_grad()
    def policy(obs):
        """Orientation (B,), features, food position (B,), log-probabilities (B, 3) and values (B,)."""
        orientation, features, food_position = agent.preprocess(obs)
        with autocast():
            logits, value = agent(features, food_position)
        return orientation, features, food_position, F.log_softmax(logits, 1), value

    def act_step_and_store():
        orientation, feature, food_position, all_logprobs, value = policy(obs)
        # Divided by exponential noise, the largest probability is a draw from the softmax, without a sync.
        noise = torch.empty_like(all_logprobs).exponential_(generator=generator)
        action = (all_logprobs.exp() / noise).argmax(1)
        timer.lap("act")
        _, reward, terminated, truncated, info = envs.step(agent.move[orientation, action])
        timer.lap("env")
        features[step] = feature.flatten(1).to(dtype)
        food_positions[step] = food_position
        actions[step] = action
        logprobs[step] = all_logprobs.gather(1, action[:, None]).squeeze(1)
        values[step] = value
        rewards[step] = reward
        dones[step] = terminated | truncated
        if device.type == "cuda" or truncated.any():  # on CUDA to ask is a sync
            rewards[step] += args.gamma * truncated * policy(info["final_obs"])[-1]
        timer.lap("store")

    def finish_rollout():
        values[-1] = policy(obs)[-1]
        advantages.copy_(gae(rewards, values, dones, args.gamma, args.gae_lambda))

    # --- learning -------------------------------------------------------------------------------------------------
    def minibatch_loss(advantage):
        with autocast():
            logits, value = agent(features.flatten(0, 1)[index], food_positions.flatten()[index])
        action = actions.flatten()[index]
        old_logprob = logprobs.flatten()[index]
        returns = advantages.flatten()[index] + values.flatten()[index]
        return ppo_loss(logits, value, action, old_logprob, advantage, returns, args.clip_coef, args.vf_coef, ent_coef)

    def update():
        advantage = advantages.flatten()[index]
        advantage = advantage - mean_over_ranks(advantage.mean())
        variance = mean_over_ranks(advantage.square().sum()) * RANKS / (samples_per_update - 1)
        advantage = advantage / (variance.sqrt() + 1e-8)
        loss, means = minibatch_loss(advantage)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        average_gradients(weights)  # before `unscale_`: all ranks skip an update that overflows in float16
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(weights, args.max_grad_norm)
        scaler.step(optimizer)
        scaler.update()
        loss_sum.add_(means)

    # --- switches -------------------------------------------------------------------------------------------------
    if args.compile:
        policy = torch.compile(policy, mode=args.compile_mode)
        minibatch_loss = torch.compile(minibatch_loss, mode=args.compile_mode)
        policy(obs)  # compiles here rather than in the timed loop
        minibatch_loss(zeros(minibatch_size))[0].backward()
    if args.cudagraph:
        act_step_and_store = CUDAGraphStep(act_step_and_store, generator)
        finish_rollout = CUDAGraphStep(finish_rollout, generator)
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
            "agent": agent.state_dict(),
            "optimizer": optimizer.state_dict(),
            "scaler": scaler.state_dict(),
            "global_step": global_step,
            "elapsed": seconds,
            "games_of": [device.type, args.num_envs, RANKS],
            "envs": envs.state_dict(),
            "generator": generator.get_state(),
        }
        if RANK == 0:
            save_checkpoint(folder / "checkpoint.pt", state)

    def log(scalars):
        if RANK == 0:
            for name, value in scalars.items():
                writer.add_scalar(name.replace("eval_", "eval/"), value, global_step)

    first_step = logged_step = global_step
    updates = logged_updates = 0
    scores = {}
    log({"perf/warmup_s": time.perf_counter() - start_time})
    start_time = time.perf_counter()  # the warm-up does not count
    seconds = last_log = last_checkpoint = seconds_before
    next_eval = seconds_before + args.eval_every
    if RANKS > 1:
        save()  # torchrun --max-restarts can resume from the start
    while True:
        timer.lap()  # setup, evaluations and checkpoints do not count
        if args.anneal_lr:
            learning_rate.fill_(args.learning_rate * (1 - progress))
        ent_coef.fill_(args.ent_coef * (1 - progress))
        # 1 act and step, 2 store
        for number in range(args.num_steps):
            step.fill_(number)
            act_step_and_store()
        global_step += args.num_steps * args.num_envs
        finish_rollout()
        timer.lap("rollout")

        # 3 learn
        for _ in range(args.update_epochs):
            for minibatch in torch.randperm(batch_size, generator=generator, device=device).split(minibatch_size):
                index.copy_(minibatch)
                update()
                updates += 1
        timer.lap("learn")

        # 4 log, evaluate, save
        seconds, stop = clock()
        progress = progress_of(args, global_step, seconds)
        is_last = progress >= 1 or stop
        if is_last or seconds >= last_log + args.log_every:
            last_log = seconds
            phases = timer.read()
            new_steps = global_step - logged_step
            new_updates = updates - logged_updates
            logged_step = global_step
            logged_updates = updates
            rates = throughput(new_steps, new_updates, samples_per_update, phases)
            finished = mean_over_ranks(envs.finished)  # games, and sums of their score, length and return
            games, score, length, episodic_return = (finished / finished[0].clamp(min=1e-9)).tolist()
            losses = (mean_over_ranks(loss_sum) / new_updates).tolist()
            envs.finished.zero_()
            loss_sum.zero_()
            scalars = {
                "charts/SPS": rates["env_steps_per_second"],
                "charts/updates_per_second": rates["updates_per_second"],
                "charts/samples_per_second": rates["samples_per_second"],
                "charts/replay_ratio": rates["replay_ratio"],
                "losses/learning_rate": learning_rate.item(),
                "perf/rollout_fraction": rates["rollout_fraction"],
            }
            if games:
                scalars["charts/score"] = score
                scalars["charts/episodic_length"] = length
                scalars["charts/episodic_return"] = episodic_return
            scalars.update(zip(LOSSES, losses))
            for phase, phase_seconds in phases.items():
                scalars[f"perf/{phase}_ms"] = 1000 * phase_seconds * args.num_envs / new_steps
            log(scalars)
            print(
                f"{min(progress, 1):4.0%}  step {global_step:>11,}  SPS {rates['env_steps_per_second']:>9,.0f}  "
                f"updates/s {rates['updates_per_second']:>5.0f}  score {score:5.1f}  "
                f"greedy {scores.get('eval_score_mean', math.nan):5.1f}"
            )
            timer.lap("log")
        if is_last:
            break
        if args.eval_every and seconds >= next_eval:
            eval_start = seconds
            if RANK == 0:
                scores = evaluate(agent, args, max(args.eval_episodes // 10, 1), device)
                log(scores)
            seconds, stop = clock()
            # From the end of one to the start of the next. Evaluations take a tenth of the time at most.
            next_eval = seconds + max(args.eval_every, 9 * (seconds - eval_start))
        if args.checkpoint_every and seconds >= last_checkpoint + args.checkpoint_every:
            last_checkpoint = seconds
            save()

    # --- the end: first what must not be lost ---------------------------------------------------------------------
    save()
    if RANKS > 1:
        dist.destroy_process_group()
    summary = {
        "script": SCRIPT,
        "device": device_name,
        "precision": precision,
        "compiled": args.compile,
        "cudagraph": args.cudagraph,
        "env_steps": global_step,
        "wall_seconds": seconds,
        **throughput(global_step - first_step, updates, samples_per_update, timer.total),
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
            fail("out of memory: a smaller --num-envs, --num-steps, --hidden-size or --eval-episodes works")
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

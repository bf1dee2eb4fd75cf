"""The table of one GPU: one short run per row, each in its own process."""

import importlib
import io
import json
import multiprocessing
import resource
import shlex
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import tyro

from benchmarks import harness, report
from benchmarks.games import snake_rates
from benchmarks.harness import Options, measure_rate
from benchmarks.metta_parts import metta_env_rate
from benchmarks.report import active_switches, code, markdown_table, peak_gib, table
from benchmarks.sb3_peers import FOREVER
from benchmarks.snake import least_work, saved_weights


@dataclass
class GpuSizes:
    """Sizes of --suite gpu."""

    total_seconds: float = 565.0
    """all rows together; importing PyTorch takes 15 s more"""
    alone_seconds: float = 1.0
    """a matmul, and a game alone"""
    run_seconds: float = 4.0
    """a run, from the start of its training loop"""
    matmul_side: int = 8192
    snake_widths: tuple[int, ...] = (1024, 4096, 16384, 65536)
    """games"""
    arena_widths: tuple[int, ...] = (128, 1024, 4096)
    """arenas"""
    snake: str = "--batch-size 8192"
    learn: str = "--max-seconds 300 --eval-every 60"
    arena: str = ""
    transformer: str = "--policy transformer --buffer-size 20000 --exploration-initial-eps 0.05"
    batches: tuple[int, ...] = (8192, 16384)
    """batch sizes of the transformer"""


GPU_SIZES = GpuSizes()
GPU_TRIAL = GpuSizes(  # --fast: the same rows in 90 seconds
    total_seconds=75.0,
    alone_seconds=0.1,
    run_seconds=0.5,
    matmul_side=256,
    snake_widths=(16, 64),
    arena_widths=(1, 2),
    snake="--board 5x5 --num-envs 64 --batch-size 64 --hidden-size 32 --buffer-size 2000 --learning-starts 200",
    learn="--max-seconds 4 --eval-every 1.5 --eval-episodes 20 --log-every 0.5",
    arena="--num-envs 2 --hidden-size 16 --num-steps 8 --bptt-horizon 8 --num-minibatches 2",
    transformer="--policy transformer --board 5x5 --buffer-size 500 --exploration-initial-eps 0.05",
    batches=(8, 16),
)
GPU_SWITCHES = {
    "snake": ["", "--bf16", "--fp16", "--tf32", "--cudagraph", "--bf16 --cudagraph"],
    "arena": ["", "--bf16", "--cudagraph", "--bf16 --cudagraph"],
    "transformer": ["", "--bf16"],
}
GPU_COMPILED = {"snake": ["--compile", "--bf16 --compile --cudagraph"], "arena": ["--bf16 --compile --cudagraph"]}
RUN_COLUMNS = "peak GiB | active"  # the last two columns of a table of runs
PRELOADED = ["torch", "torch._dynamo", "torch.utils.flop_counter", "torch.utils.tensorboard", "gymnasium.vector"]
PRELOADED += ["tyro", "tensorboard.backend.event_processing.event_accumulator"]  # imported once, before the fork


def in_fork(call: Callable[[], Any], limit: float) -> dict:
    """Run `call` in a new process: its result as "found", or the reason of a failure as "note".

    The process is forked from one that has imported PyTorch and never touched a GPU, so it starts at once.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=fork_main, args=(sender, call))
    process.start()
    sender.close()  # else the end of the process goes unnoticed
    try:
        if receiver.poll(limit):
            return receiver.recv()
        return {"note": f"failed: not done after {limit:.0f} s"}
    except EOFError:
        process.join()
        return {"note": f"failed: exit code {process.exitcode}"}
    finally:
        process.kill()
        process.join()


def fork_main(sender: Connection, call: Callable[[], Any]) -> None:
    """Process of `in_fork`; the output of scripts is dropped."""
    errors = io.StringIO()
    try:
        with redirect_stdout(io.StringIO()), redirect_stderr(errors):
            result = {"found": call()}
    except ModuleNotFoundError as error:
        result = {"note": f"not measured: {error.name} is not installed"}
    except (Exception, SystemExit) as error:
        traceback.print_exc()
        reason = f"{type(error).__name__}: {error}"
        if isinstance(error, SystemExit):
            reason = errors.getvalue()
        if isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "can't allocate memory" in reason:
            reason = "out of memory"
        line = " ".join(reason.split()).replace("|", "/")
        result = {"note": f"failed: {line[:150]}"}
    sender.send(result)


def peak_memory_gib(device: torch.device) -> float:
    """Peak memory of this process: of the GPU, or of the machine without one."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def bf16_matmul_rate(side: int, seconds: float, device: str) -> float:
    """FLOP/s of a large bfloat16 matmul."""
    x = torch.randn(side, side, device=device).bfloat16()
    y = torch.randn(side, side, device=device).bfloat16()

    def work() -> None:
        for _ in range(8):
            torch.mm(x, y)

    return measure_rate(work, 8 * 2 * side**3, seconds, device)


def run_here(script: str, flags: str, folder: str) -> dict:
    """Summary of a run of a script in this process, without .env."""
    module = importlib.import_module(script.removesuffix(".py"))
    command = [*shlex.split(flags), "--no-video", "--run-dir", folder, "--run-name", "run"]
    return module.main(tyro.cli(module.Args, args=command))


def speed_run(script: str, flags: str, seconds: float) -> dict:
    """Summary of a run that stops `seconds` after its training loop starts; compiling is not counted.

    "steady" has the median of every scalar over the log intervals, without the first, in which a GPU warms up.
    """
    from torch.utils.tensorboard import SummaryWriter

    add_scalar = SummaryWriter.add_scalar

    def log_and_start_clock(writer: SummaryWriter, tag: str, *values: Any, **settings: Any) -> None:
        add_scalar(writer, tag, *values, **settings)
        if tag == "perf/warmup_s":  # logged right before the loop
            signal.signal(signal.SIGALRM, signal.getsignal(signal.SIGTERM))
            signal.setitimer(signal.ITIMER_REAL, seconds)

    SummaryWriter.add_scalar = log_and_start_clock
    with tempfile.TemporaryDirectory() as folder:
        summary = run_here(script, flags, folder)
        run_folder = Path(folder) / "run"
        summary["peak_memory_gib"] = peak_memory_gib(torch.device("cuda" if "--device cuda" in flags else "cpu"))
        summary["steady"] = harness.median_scalars(run_folder)
        summary["args"] = json.loads((run_folder / "args.json").read_text())
        if script == "dqn_snake.py":
            weights = saved_weights(run_folder, "q_network")
            summary["update_flops"] = least_work(summary["args"]["batch_size"], weights)[0]
    return summary


def learning_run(flags: str) -> dict:
    """Summary of a run of dqn_snake.py with its learning curve."""
    with tempfile.TemporaryDirectory() as folder:
        summary = run_here("dqn_snake.py", flags, folder)
        return summary | {"curve": harness.eval_curve(Path(folder) / "run")}


def sb3_transformer(flags: str, seconds: float) -> dict:
    """As `speed_run`, for SB3's DQN with flags of dqn_snake_sb3_compat.py; the first update is not counted."""
    from stable_baselines3 import DQN

    compat = importlib.import_module("dqn_snake_sb3_compat")
    args = tyro.cli(compat.Args, args=shlex.split(flags))
    torch.set_num_threads(args.threads)
    settings = {name: getattr(args, name) for name in compat.SAME_NAMES}
    network = {
        "features_extractor_class": compat.Transformer,
        "features_extractor_kwargs": {"dropout": args.dropout},
        "net_arch": [128],
    }
    game = compat.make_envs(args, 1)[0]
    model = DQN("MlpPolicy", game, policy_kwargs=network, device=args.device, **settings)
    update_ends = []

    def keep_training(*_: Any) -> bool:
        if model._n_updates > len(update_ends):
            update_ends.append(time.perf_counter())
        return len(update_ends) < 3 or update_ends[-1] - update_ends[1] < seconds

    model.learn(FOREVER, callback=keep_training)
    updates_per_second = (len(update_ends) - 2) / (update_ends[-1] - update_ends[1])
    rates = {
        "charts/updates_per_second": updates_per_second,
        "charts/samples_per_second": updates_per_second * args.batch_size,
    }
    memory = peak_memory_gib(torch.device(args.device))
    active = {"precision": "float32", "sdpa": None, "compiled": False, "cudagraph": False}
    active["steady"] = rates
    active["peak_memory_gib"] = memory
    return active


def gpu_plan(sizes: GpuSizes, device: torch.device) -> list[tuple]:
    """(part, name, time limit, function) of every row, most important first.

    Estimated seconds on a GPU: matmul 4, switches of Snake 6 x 7, food 313, Snake alone 4 x 4, switches of the arena
    4 x 9, arena alone 3 x 6, transformer 6 x 9. That is 483 of `total_seconds`, 565, and leaves 82 for the rows with
    --compile, 3 x 27, which come last because their time is the least certain.
    """
    plan = []
    where = f"--device {device.type} --threads 1"
    base = f"{where} --eval-every 0 --checkpoint-every 0 --log-every 1 --max-seconds 600"
    scripts = {"snake": "dqn_snake.py", "arena": "ppo_metta.py"}
    flags = {"snake": f"{base} {sizes.snake}", "arena": f"{base} {sizes.arena}"}

    def add(part: str, name: Any, limit: float, function: Callable, **arguments: Any) -> None:
        plan.append((part, str(name), limit, partial(function, **arguments)))

    def add_run(part: str, switch: str, limit: float) -> None:
        command = f"{flags[part]} {switch}".strip()
        add(part, switch, limit, speed_run, script=scripts[part], flags=command, seconds=sizes.run_seconds)

    alone = {"seconds": sizes.alone_seconds, "device": device.type}
    add("matmul", sizes.matmul_side, 20, bf16_matmul_rate, side=sizes.matmul_side, **alone)
    for switch in GPU_SWITCHES["snake"]:
        add_run("snake", switch, 25)
    learn = f"{sizes.snake} {sizes.learn} --bf16"
    if device.type == "cuda":
        learn += " --cudagraph"
    add("food", learn, 345, learning_run, flags=f"{where} {learn}")
    for width in sizes.snake_widths:
        add("snake alone", width, 20, snake_rates, widths=(width,), **alone)
    for switch in GPU_SWITCHES["arena"]:
        add_run("arena", switch, 35)
    for width in sizes.arena_widths:
        add("arena alone", width, 30, metta_env_rate, flags=f"--num-envs {width} --threads 1", **alone)
    for batch in sizes.batches:
        sized = f"{base} {sizes.transformer} --batch-size {batch}"
        add("transformer", f"{batch}, SB3", 35, sb3_transformer, flags=sized, seconds=sizes.run_seconds)
        for switch in GPU_SWITCHES["transformer"]:
            name = f"{batch}, ours {switch}".strip()
            command = {"script": "dqn_snake_sb3_compat.py", "flags": f"{sized} {switch}".strip()}
            add("transformer", name, 35, speed_run, seconds=sizes.run_seconds, **command)
    for part, switches in GPU_COMPILED.items():
        for switch in switches:
            add_run(part, switch, 90)
    return plan


def gpu_tables(raw: dict) -> str:
    """Tables of the rows so far. A row without a result gives the reason."""
    tables = {
        "matmul": matmul_table,
        "snake": snake_table,
        "food": food_table,
        "snake alone": snake_alone_table,
        "arena": arena_table,
        "arena alone": arena_alone_table,
        "transformer": transformer_table,
    }
    return "\n\n".join(make_table(raw) for part, make_table in tables.items() if part in raw["rows"])


def matmul_table(raw: dict) -> str:
    def cells(name: str, rate: float) -> list[str]:
        return [f"{rate / 1e12:,.1f}"]

    return gpu_table("side of a bf16 matmul | TFLOP/s", raw["rows"]["matmul"], cells)


def snake_table(raw: dict) -> str:
    rows = raw["rows"]["snake"]
    peak = raw["rows"]["matmul"][str(raw["sizes"]["matmul_side"])].get("found")

    def cells(name: str, one: dict) -> list[str]:
        steady = one["steady"]
        learning = steady["charts/samples_per_second"] / max(1 - steady["perf/rollout_fraction"], 1e-9)
        flops = learning / one["args"]["batch_size"] * one["update_flops"]
        return [
            f"{steady['charts/SPS']:,.0f}",
            ratio_to_row(one, "charts/SPS", rows, ""),
            f"{steady['charts/samples_per_second']:,.0f}",
            f"{learning:,.0f}",
            f"{flops / 1e12:,.1f}",
            f"{flops / peak:.1%}" if peak else "–",
            f"{steady['charts/replay_ratio']:.2f}",
            *memory_and_switches(one),
        ]

    header = f"`dqn_snake.py {raw['sizes']['snake']}` | env steps/s | × | samples/s | samples/s while learning"
    header += f" | TFLOP/s while learning | of the matmul | replay ratio | {RUN_COLUMNS}"
    return gpu_table(header, rows, cells)


def food_table(raw: dict) -> str:
    def cells(name: str, one: dict) -> list[str]:
        readings = [f"{score:.1f} after {seconds:.0f} s" for seconds, score in one["curve"]]
        return [" · ".join(readings), f"{one['eval_score_max']:.0f}", f"{one['env_steps_per_second']:,.0f}"]

    header = "`dqn_snake.py` | mean food by seconds of training | best game | env steps/s"
    return gpu_table(header, raw["rows"]["food"], cells)


def snake_alone_table(raw: dict) -> str:
    def cells(name: str, rates: list[float]) -> list[str]:
        return [f"{rates[0]:,.0f}"]

    return gpu_table("games of Snake alone | env steps/s", raw["rows"]["snake alone"], cells)


def arena_table(raw: dict) -> str:
    rows = raw["rows"]["arena"]

    def cells(name: str, one: dict) -> list[str]:
        steady = one["steady"]
        return [
            f"{steady['charts/SPS']:,.0f}",
            ratio_to_row(one, "charts/SPS", rows, ""),
            f"{steady['perf/rollout_fraction']:.0%}",
            f"{steady['charts/replay_ratio']:.2f}",
            *memory_and_switches(one),
        ]

    header = f"`ppo_metta.py` | agent steps/s | × | in rollouts | replay ratio | {RUN_COLUMNS}"
    return gpu_table(header, rows, cells)


def arena_alone_table(raw: dict) -> str:
    def cells(name: str, rate: float) -> list[str]:
        return [f"{rate:,.0f}"]

    return gpu_table("arenas alone | agent steps/s", raw["rows"]["arena alone"], cells)


def transformer_table(raw: dict) -> str:
    rows = raw["rows"]["transformer"]

    def cells(name: str, one: dict) -> list[str]:
        batch = name.split(",")[0]
        return [
            f"{one['steady']['charts/samples_per_second']:,.0f}",
            ratio_to_row(one, "charts/samples_per_second", rows, f"{batch}, SB3"),
            f"{one['steady']['charts/updates_per_second']:.2f}",
            *memory_and_switches(one),
        ]

    return gpu_table(f"batch of the transformer | samples/s | × | updates/s | {RUN_COLUMNS}", rows, cells)


def gpu_table(header: str, rows: dict[str, dict], cells: Callable[[str, Any], list[str]]) -> str:
    lines = []
    for name, row in rows.items():
        label = code(name) if name.startswith("--") else name or "default"
        if "found" in row:
            others = cells(name, row["found"])
        else:
            others = [row["note"], *[""] * (header.count(" | ") - 1)]
        lines.append([label, *others])
    return markdown_table(header, lines)


def ratio_to_row(one: dict, scalar: str, rows: dict[str, dict], name: str) -> str:
    """`scalar` of a run divided by that of the row `name`."""
    other = rows.get(name, {}).get("found")
    if other is None or not other["steady"][scalar]:
        return "–"
    return f"{one['steady'][scalar] / other['steady'][scalar]:.2f}"


def memory_and_switches(one: dict) -> list[str]:
    """Cells of RUN_COLUMNS."""
    return [peak_gib([one]), active_switches(one)]


@table(
    "gpu",
    caption="""
    One GPU in ten minutes: one run of a few seconds per row, each in its own process.

    Rates are medians over a run, without warm-up and compilation. TFLOP/s counts the matmuls of an update while
    learning, compared with one large bf16 matmul on the same card. Food is the mean over 100 greedy games, 1,000 at the
    end; evaluation stops the clock. Games alone play random actions in eager mode. The transformer is that of
    `dqn_snake_sb3_compat.py`; "SB3" is Stable-Baselines3's DQN with the same network. "×" is relative to the default,
    or to SB3.
    """,
)
def gpu(options: Options, device: torch.device) -> tuple[str, dict]:
    sizes = GPU_TRIAL if options.fast else GPU_SIZES
    about = harness.machine(device)
    raw = {"sizes": asdict(sizes), "rows": {}}
    begin = time.perf_counter()
    for part, name, limit, call in gpu_plan(sizes, device):
        row_begin = time.perf_counter()
        left = begin + sizes.total_seconds - row_begin
        row = {"note": "not measured: no time left"}
        if left > 5:
            row = in_fork(call, min(limit, left))
        row["seconds"] = round(time.perf_counter() - row_begin, 1)
        raw["rows"].setdefault(part, {})[name] = row
        print(f"  {part} {name}: {row.get('note', 'done')}, {row['seconds']} s", flush=True)
        # written after every row, so that an interrupted suite keeps them
        record = report.make_record("gpu", options, device, about | raw)
        report.write_table(options, device, record, gpu_tables(raw))
        if options.json is not None:
            report.write_results(Path(options.json), json.dumps([record]))
    return gpu_tables(raw), raw

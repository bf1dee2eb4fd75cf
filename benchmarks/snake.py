"""Tables of dqn_snake.py: learning, game, network, learner and switches."""

import re
import statistics
import time
from functools import partial
from pathlib import Path

import torch

import dqn_snake
from benchmarks import harness
from benchmarks.games import gymnasium_rates, jumanji_rates, snake_rates
from benchmarks.harness import SPEED_RUN, Options, column, measure_rate, median, million_steps, ratios
from benchmarks.report import active_switches, code, markdown_table, median_min_max, table
from benchmarks.sb3_peers import sb3_act_rate, sb3_rate
from envs.snake.batch import SnakeBatch


@table(
    "learn",
    caption="""
    Mean food over 1,000 greedy games after a wall-clock budget, per seed.
    """,
)
def learn(options: Options, device: torch.device) -> tuple[str, dict]:
    rows = []
    raw = []
    for budget in [60] if options.fast else [120, 600]:
        flags = f"--max-seconds {budget}"
        runs = [harness.run(f"{flags} --seed {seed}", options) for seed in options.seeds]
        for one in runs:
            raw.append(one | {"curve": harness.eval_curve(harness.run_folder(one["run"]))})
        scores = column(runs, "eval_score_mean")
        row = [
            f"`{flags}`",
            " · ".join(f"{score:.1f}" for score in scores),
            f"{statistics.mean(scores):.1f}",
            f"{max(column(runs, 'eval_score_max')):.0f}",
            million_steps(runs),
            median_min_max(column(runs, "env_steps_per_second")),
        ]
        rows.append(row)
    text = markdown_table(
        "flags | mean food, seeds 1 · 2 · 3 | mean | best game | million env steps | env steps/s", rows
    )
    return text, {"runs": raw}


@table(
    "env",
    caption="""
    Env steps per second of the game alone (10x10, random actions, auto-reset), by number of parallel games.

    jumanji's Snake-v1 has the same board and is jitted, on JAX's default device. Columns marked G use Gymnasium's
    `benchmark_vector_step`, which also samples the actions: `SnakeVectorEnv` uses NumPy arrays, the rule book runs in
    `SyncVectorEnv`. "×" is ours / peer, per round.
    """,
)
def env(options: Options, device: torch.device) -> tuple[str, dict]:
    widths = (128, 4096) if options.fast else (1, 128, 1024, 4096, 16384, 65536)
    book_widths = tuple(width for width in widths if width <= 1024)
    seconds = 0.2 if options.fast else 0.5
    alone = {"widths": widths, "seconds": seconds}
    vector = {"game": "SnakeVectorEnv", "widths": widths, "seconds": seconds}
    book = {"game": "SnakeEnv", "widths": book_widths, "seconds": seconds}
    calls = {
        "SnakeBatch": lambda: harness.in_subprocess(snake_rates, device=device.type, **alone),
        "jumanji": lambda: harness.in_subprocess(jumanji_rates, **alone),
        "SnakeVectorEnv, G": lambda: harness.in_subprocess(gymnasium_rates, **vector),
        "rule book, G": lambda: harness.in_subprocess(gymnasium_rates, **book),
    }
    measured = harness.alternate(options, calls)
    by_width = {name: list(zip(*rounds)) for name, rounds in measured.items()}
    ours = by_width["SnakeBatch"]
    jumanji = by_width["jumanji"]
    vector = by_width["SnakeVectorEnv, G"]
    book = by_width["rule book, G"]
    best = ratios(list(map(max, zip(*ours))), list(map(max, zip(*jumanji))))
    compared = {"jumanji, best width of each": best}
    rows = []
    for i, width in enumerate(widths):
        to_jumanji = ratios(ours[i], jumanji[i])
        compared[f"jumanji, {width:,} games"] = to_jumanji
        row = [f"{width:,}", median_min_max(ours[i]), median_min_max(jumanji[i]), median_min_max(to_jumanji, 2)]
        row += [median_min_max(vector[i]), "", ""]
        if width in book_widths:
            to_book = ratios(vector[i], book[i])
            compared[f"rule book, {width:,} games"] = to_book
            row[5] = median_min_max(book[i])
            row[6] = median_min_max(to_book, 2)
        rows.append(row)
    text = markdown_table("games | `SnakeBatch` | jumanji | × | `SnakeVectorEnv`, G | rule book, G | ×", rows)
    text += f"\n\nEach at its best width: {median_min_max(best, 1)} times jumanji."
    return text, {"widths": widths, "rates": measured, "ratios": compared}


def act_rates(widths: tuple[int, ...], seconds: float, device: str) -> list[float]:
    """Steps per second of `SnakeBatch` with greedy actions of dqn_snake.py's network, by number of games."""
    args = dqn_snake.fill_defaults(dqn_snake.Args(), torch.device(device))
    torch.manual_seed(1)
    q_network = dqn_snake.QNetwork(args, torch.device(device)).requires_grad_(False)
    rates = []
    for width in widths:
        envs = SnakeBatch(width, device, seed=1)
        obs = envs.reset()  # a buffer overwritten by every step
        rates.append(measure_rate(lambda: envs.step(q_network(obs).argmax(1)), width, seconds, device))
    return rates


@table(
    "act",
    caption="""
    Env steps per second of the game with the network (untrained, greedy), by number of parallel games.

    SB3 has the same game and network: `DummyVecEnv`, `model.predict`. "×" is ours / SB3, per round.
    """,
)
def act(options: Options, device: torch.device) -> tuple[str, dict]:
    widths = (128,) if options.fast else (1, 128, 1024, 4096, 16384)
    sb3_widths = [width for width in widths if width <= 128]
    settings = {"seconds": 0.5 if options.fast else 1.0, "device": device.type}
    calls = {"ours": lambda: harness.in_subprocess(act_rates, widths=widths, **settings)}
    for width in sb3_widths:
        calls[width] = partial(harness.in_subprocess, sb3_act_rate, num_envs=width, **settings)
    measured = harness.alternate(options, calls)
    compared = {}
    rows = []
    for width, ours in zip(widths, zip(*measured["ours"])):
        row = [f"{width:,}", median_min_max(ours), "", ""]
        if width in sb3_widths:
            times = ratios(ours, measured[width])
            compared[f"SB3, {width:,} games"] = times
            row[2] = median_min_max(measured[width])
            row[3] = median_min_max(times, 1)
        rows.append(row)
    text = markdown_table("games | ours | SB3, same network | ×", rows)
    return text, {"widths": widths, "rates": measured, "ratios": compared}


@table(
    "train",
    caption="""
    Training speed compared with SB3's DQN, same game, same replay ratio.

    "Our recipe" is SB3's DQN with our view, network, batch, number of games and target network; "defaults" has a 64-64
    MLP on the board's codes, batch 32 and one game. "×" is ours (the row above) / SB3, per round.
    """,
)
def train(options: Options, device: torch.device) -> tuple[str, dict]:
    seconds = 5 if options.fast else 6
    base = f"{SPEED_RUN} --max-seconds {seconds} --learning-starts 1000"
    pairs = {"": "SB3's DQN, our recipe", "--replay-ratio 8": "SB3's DQN, defaults"}
    settings = {"device": device.type, "threads": torch.get_num_threads(), "learning_starts": 1000}
    calls = {}
    for flags, peer in pairs.items():
        calls[flags] = partial(harness.run, f"{base} {flags}".strip(), options)
        calls[peer] = partial(harness.in_subprocess, sb3_rate, seconds=seconds, name=peer, **settings)
    measured = harness.alternate(options, calls)
    rates = {name: column(results, "env_steps_per_second") for name, results in measured.items()}
    compared = {peer: ratios(rates[flags], rates[peer]) for flags, peer in pairs.items()}
    rows = []
    for name, results in measured.items():
        samples = [one["env_steps_per_second"] * one["replay_ratio"] for one in results]
        row = [name, median_min_max(rates[name]), f"{median(results, 'replay_ratio'):.2f}", median_min_max(samples), ""]
        if name in compared:
            row[4] = median_min_max(compared[name], 1)
        else:
            row[0] = code(f"dqn_snake.py {name}".strip())
        rows.append(row)
    text = markdown_table("agent | env steps/s | replay ratio | samples/s | ×", rows)
    return text, {"runs": measured, "ratios": compared}


# ------------------------------------------------------------------------------------------------ the learner


def ceiling(device: str, seconds: float) -> list[float]:
    """FLOP/s of a large fp32 matmul, and bytes per second of a large copy."""
    side = 8192 if device == "cuda" else 2048
    x, y = torch.randn(2, side, side, device=device)
    source, target = torch.ones(2, 2**26, device=device)
    flops = measure_rate(lambda: torch.mm(x, y), 2 * side**3, seconds, device)
    bandwidth = measure_rate(lambda: target.copy_(source), 2 * 4 * 2**26, seconds, device)
    return [flops, bandwidth]


def saved_weights(folder: Path, network: str) -> dict[str, torch.Tensor]:
    """State dict of a network in the checkpoint of a run."""
    return torch.load(folder / "checkpoint.pt", weights_only=True)[network]


def layer_shapes(weights: dict[str, torch.Tensor]) -> list[torch.Size]:
    """(outputs, inputs) of the layers with a matmul."""
    shapes = []
    for name, tensor in weights.items():
        if name.endswith(".weight") and tensor.ndim == 2 and "food." not in name:
            shapes.append(tensor.shape)
    return shapes


def matmul_seconds(
    batch: int, weights: dict[str, torch.Tensor], device: torch.device, forward_passes: int = 3
) -> float:
    """Seconds of the matmuls of one update alone: all forward passes and one backward pass."""
    layers = []
    for outputs, inputs in layer_shapes(weights):
        x = torch.randn(batch, inputs, device=device)
        weight = torch.randn(outputs, inputs, device=device)
        y = torch.randn(batch, outputs, device=device)
        layers.append((x, weight, y))
    timings = []
    for _ in range(22):
        start = time.perf_counter()
        for i, (x, weight, y) in enumerate(layers):
            for _ in range(forward_passes):
                x @ weight.T
            y.T @ x
            if i:  # no gradient below the first layer
                y @ weight
        if device.type == "cuda":
            torch.cuda.synchronize()
        timings.append(time.perf_counter() - start)
    return statistics.median(timings[2:])


def least_work(batch: int, weights: dict[str, torch.Tensor], forward_passes: int = 3) -> tuple[float, float]:
    """FLOP of the matmuls of one update, and a lower bound of its memory traffic in bytes, in fp32.

    Bytes: operands and results of each matmul, and ten passes over all weights: gradient, weight, Adam's two moments
    and target weight, each read and written once.
    """
    flops = 0
    numbers = 10 * sum(tensor.numel() for tensor in weights.values())
    for i, (outputs, inputs) in enumerate(layer_shapes(weights)):
        passes = forward_passes + (2 if i else 1)  # no gradient below the first layer
        flops += 2 * passes * batch * outputs * inputs
        numbers += passes * (batch * inputs + outputs * inputs + batch * outputs)
    return flops, 4 * numbers


@table(
    "update",
    caption="""
    Samples per second of the learner by batch size, compared with the peak of this machine.

    "matmuls" is the time of the update's matmuls alone, as a share of the update. GFLOP/s and GB/s (a lower bound of
    the memory traffic) are compared with one large matmul and one large copy.
    """,
)
def update(options: Options, device: torch.device) -> tuple[str, dict]:
    batches = (256, 8192) if options.fast else (32, 256, 2048, 8192)
    budget = 5 if options.fast else 6
    base = f"{SPEED_RUN} --replay-ratio 64 --learning-starts 2000 --log-every 1 --max-seconds {budget}"
    calls = {batch: partial(harness.run, f"{base} --batch-size {batch}", options) for batch in batches}
    seconds = 0.3 if options.fast else 1
    calls["ceiling"] = lambda: harness.in_subprocess(ceiling, device=device.type, seconds=seconds)
    measured = harness.alternate(options, calls)
    most_flops, most_bandwidth = [statistics.median(values) for values in zip(*measured["ceiling"])]
    rows = []
    raw = {}
    for batch in batches:
        runs = measured[batch]
        if not all(column(runs, "updates_per_second")):
            rows.append([f"{batch:,}", "no update in time", "", "", "", ""])
            continue
        weights = saved_weights(harness.run_folder(runs[0]["run"]), "q_network")
        seconds = statistics.median(one["train_fraction"] / one["updates_per_second"] for one in runs)
        floor = matmul_seconds(batch, weights, device)
        flops, moved = least_work(batch, weights)
        samples = [one["updates_per_second"] * batch / one["train_fraction"] for one in runs]
        raw[batch] = {
            "runs": runs,
            "update_seconds": seconds,
            "matmul_seconds": floor,
            "flops_and_bytes": (flops, moved),
        }
        row = [f"{batch:,}", median_min_max(samples), f"{1000 * seconds:.2f}", f"{floor / seconds:.0%}"]
        row.append(f"{flops / seconds / 1e9:,.0f} ({flops / seconds / most_flops:.0%})")
        row.append(f"{moved / seconds / 1e9:,.0f} ({moved / seconds / most_bandwidth:.0%})")
        rows.append(row)
    header = "batch | samples/s while learning | ms per update | matmuls | GFLOP/s | GB/s at least"
    text = markdown_table(header, rows)
    text += f"\n\nCeiling: {most_flops / 1e9:,.0f} GFLOP/s (fp32 matmul), {most_bandwidth / 1e9:,.1f} GB/s (copy)."
    return text, {"batches": raw, "ceiling": measured["ceiling"]}


# ------------------------------------------------------------------------------------------------ the switches


def snake_switches(device: torch.device) -> list[str]:
    larger = "--num-envs 512 --batch-size 1024"
    compiled = "--compile --max-seconds 60"
    attention = "--network attention"
    switches = [""]
    threads = 1
    while 2 * threads <= min(torch.get_num_threads(), 8):
        switches.append(f"--threads {threads}")
        threads *= 2
    switches += ["--bf16", *re.findall(r"--\S+ \d+", larger), larger, compiled, f"{compiled} {larger}"]
    switches += [f"{compiled} --compile-mode {mode}" for mode in ("reduce-overhead", "max-autotune")]
    kernels = ["math", "flash"]
    if device.type == "cuda":
        kernels += ["efficient", "cudnn"]
        switches += ["--tf32", "--fp16", "--cudagraph", "--cudagraph --bf16", "--cudagraph --compile --bf16"]
    return [*switches, attention, *(f"{attention} --sdpa {kernel}" for kernel in kernels)]


@table(
    "switches",
    caption="""
    End-to-end steps per second of each switch and of the default, in turn, at the same replay ratio.
    """,
)
def switches(options: Options, device: torch.device) -> tuple[str, dict]:
    attention = "--network attention"
    flags = ["", "--threads 1", "--num-envs 512 --batch-size 1024"] if options.fast else snake_switches(device)
    base = f"{SPEED_RUN} --max-seconds {5 if options.fast else 8}"
    calls = {switch: partial(harness.run, f"{base} {switch}".strip(), options) for switch in flags}
    measured = harness.alternate(options, calls)
    rates = {switch: column(runs, "env_steps_per_second") for switch, runs in measured.items()}
    rows = []
    for switch, runs in measured.items():
        reference = attention if switch.startswith(f"{attention} ") else ""
        row = [
            code(switch),
            median_min_max(rates[switch]),
            median_min_max(ratios(rates[switch], rates[reference]), 2),
            f"{median(runs, 'replay_ratio'):.2f}",
            active_switches(runs[0]),
        ]
        rows.append(row)
    text = markdown_table("flags | env steps/s end to end | × | replay ratio | active", rows)
    text += f"\n\n× is relative to the default (rows with `--sdpa`: to `{attention}`), per round."
    return text, {"runs": measured}

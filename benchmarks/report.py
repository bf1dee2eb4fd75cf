"""Markdown tables, the pages and result files, and the comparison with earlier results."""

import inspect
import json
import math
import re
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks import harness
from benchmarks.harness import Options, column, fail


@dataclass
class Table:
    page: str
    """name of its page in benchmarks/pages, without .md"""
    caption: str
    measure: Callable[[Options, torch.device], tuple[str, dict]]
    """returns the text of the table and its raw results"""


TABLES: dict[str, Table] = {}


def table(name: str, caption: str) -> Callable:
    """Register the function that measures table `name`. Its page is named after its module."""

    def register(measure: Callable) -> Callable:
        page = measure.__module__.rpartition(".")[2].replace("_", "-")
        TABLES[name] = Table(page, inspect.cleandoc(caption), measure)
        return measure

    return register


def markdown_table(header: str, rows: list[list]) -> str:
    columns = header.split(" | ")
    lines = [f"| {header} |", "|" + " --- |" * len(columns)]
    for row in rows:
        lines.append("| " + " | ".join(map(str, row)) + " |")
    return "\n".join(lines)


def median_min_max(values: list[float], digits: int = 0) -> str:
    return f"{statistics.median(values):,.{digits}f} ({min(values):,.{digits}f}–{max(values):,.{digits}f})"


def percent_min_max(shares: list[float]) -> str:
    return f"{statistics.median(shares):.0%} ({min(shares):.0%}–{max(shares):.0%})"


def code(flags: str) -> str:
    """First cell of a row: its flags."""
    return f"`{flags}`" if flags else "default"


def active_switches(summary: dict) -> str:
    """Precision, attention kernel, compile and CUDA graphs of a run."""
    names = [summary["precision"], summary.get("sdpa")]
    for switch in ("compiled", "cudagraph"):
        if summary[switch]:
            names.append(switch)
    return ", ".join(filter(None, names))


def peak_gib(runs: list[dict], pick: Callable = max, digits: int = 2) -> str:
    """Cell with the peak memory of runs in GiB; "–" if it was not measured, as on a GPU."""
    peaks = column(runs, "peak_memory_gib")
    if None in peaks:
        return "–"
    return f"{pick(peaks):.{digits}f}"


# ------------------------------------------------------------------------------------------------ files


def results_file(name: str, device: torch.device) -> Path:
    suffix = "" if device.type == "cpu" else f"-{device.type}"
    return harness.ROOT / "benchmarks" / "results" / f"{name}{suffix}.json"


def image_file(name: str, device: torch.device) -> Path:
    file_name = results_file(name, device).with_suffix(".png").name
    return harness.ROOT / "benchmarks" / "images" / file_name


def page_file(name: str) -> Path:
    """The page of a table."""
    return harness.ROOT / "benchmarks" / "pages" / f"{TABLES[name].page}.md"


def section(record: dict, text: str) -> str:
    """Section of a page: caption, table, and how it was measured."""
    versions = ", ".join(f"{package} {version}" for package, version in record["versions"].items())
    measured = f"`{record['command']}` on {record['hardware']}; {versions}; {record['date']}, commit {record['commit']}"
    return f"{TABLES[record['table']].caption}\n\n{text}\n\n{measured}"


def write_section(name: str, device: torch.device, text: str) -> None:
    """Replace the section of a table on its page."""
    page = page_file(name)
    mark = f"<!-- {name} {device.type} -->"
    content = page.read_text() if page.exists() else ""
    if mark not in content:
        new_section = f"\n{mark}\n<!-- end -->\n"
        of_cpu = rf"<!-- {name} cpu -->.*?\n<!-- end -->\n"
        content, found = re.subn(of_cpu, lambda old: old[0] + new_section, content, count=1, flags=re.DOTALL)
        if not found:
            content += f"\n## {name}\n{new_section}"
    own_section = re.compile(rf"{mark}.*?(?=\n<!-- end -->)", re.DOTALL)
    write_results(page, own_section.sub(lambda _: f"{mark}\n{text}", content))


def make_record(name: str, options: Options, device: torch.device, raw: dict) -> dict:
    """Result file of a table: its command and its raw results."""
    command = f"python benchmark.py --suite {name}"
    if options.fast:
        command += " --fast"
    if options.repeats:
        command += f" --repeats {options.repeats}"
    if options.seconds and name == "metta-presets":
        command += f" --seconds {options.seconds}"
    return {"table": name, "device": device.type, "command": command} | raw


def is_gpu_trial(options: Options) -> bool:
    """--suite gpu --fast is a smoke test; it writes no results."""
    return options.suite == "gpu" and options.fast


def write_table(options: Options, device: torch.device, record: dict, text: str) -> None:
    """Write the result file and the page. --compare writes neither, so that it can be repeated."""
    if options.compare is not None or is_gpu_trial(options):
        return
    write_results(results_file(record["table"], device), json.dumps(record))
    write_section(record["table"], device, section(record, text))


def write_results(path: Path, text: str) -> None:
    """Write a file; if that fails, print the text, so that no result is lost."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    except OSError as error:
        print(f"benchmark.py: {path} cannot be written ({error.strerror}); its text:\n{text}", flush=True)


# ------------------------------------------------------------------------------------------------ comparison

MIN_ROUNDS = 3  # a single lucky round decides nothing
LOWEST = 0.9  # of the old median; on a quiet machine medians vary by a few percent


def read_reference(options: Options, names: list[str], device: torch.device) -> dict[str, dict]:
    """Reference records of --compare, by table; fails before measuring if nothing can be compared."""
    path = options.compare
    if path is None:
        return {}
    if options.rounds < MIN_ROUNDS:
        fail(f"--compare: {options.rounds} rounds are too few; use --repeats {MIN_ROUNDS} or more")
    reference = {}
    try:
        found = json.loads(Path(path).read_text())
        records = found if isinstance(found, list) else [found]
        for record in records:
            if record.get("ratios") and record["table"] in names and record["device"] == device.type:
                reference[record["table"]] = record
                check_reference(path, record, options.fast)
    except (OSError, ValueError, LookupError, AttributeError, TypeError) as error:
        reason = f"not a result file ({type(error).__name__}: {error})"
        fail(f"--compare {path}: {reason}; use a file written by --json")
    if not reference:
        reason = f"no ratios of {', '.join(names)} on {device.type}"
        fail(f"--compare {path}: {reason}; use a file written by --json")
    return reference


def check_reference(path: str, record: dict, fast: bool) -> None:
    name = record["table"]
    if ("--fast" in record["command"]) != fast:
        reason = f"{name} was measured by {record['command']}"
        fail(f"--compare {path}: {reason}; use --fast in both or in neither")
    for label, values in record["ratios"].items():
        if len(values) < MIN_ROUNDS or not all(0 < value < math.inf for value in values):
            reason = f"{name}, {label} has {len(values)} rounds, {values}"
            fail(f"--compare {path}: {reason}; {MIN_ROUNDS} or more positive numbers are needed")


def verdict(before: list[float], now: list[float]) -> str:
    """Result of one comparison; only "holds" passes."""
    if not now:
        return "missing"
    if len(now) < MIN_ROUNDS:
        return f"{len(now)} rounds, {MIN_ROUNDS} needed"
    if not all(math.isfinite(value) for value in now):
        return "not a number"
    return "holds" if statistics.median(now) >= LOWEST * statistics.median(before) else "fell"


def compare(reference: dict[str, dict], records: list[dict]) -> bool:
    """Print all ratios, old and new. True if none is missing or below LOWEST times its old median."""
    rows = []
    for record in records:
        name = record["table"]
        if name not in reference:
            print(f"not compared: {name} (no ratios in the reference)")
            continue
        for when, about in (("old", reference[name]), ("new", record)):
            print(f"{name}, {when}: {about.get('hardware')}, {about.get('date')}, commit {about.get('commit')}")
        for label, before in reference[name]["ratios"].items():
            now = record.get("ratios", {}).get(label, [])
            row = [f"{name}, {label}", median_min_max(before, 2), "", ""]
            if now:
                row[2] = median_min_max(now, 2)
                row[3] = f"{statistics.median(now) / statistics.median(before) - 1:+.0%}"
            rows.append([*row, verdict(before, now)])
    regressions = [row for row in rows if row[-1] != "holds"]
    print(markdown_table("ratio to | old | new | median | ", rows))
    held = f"{len(rows) - len(regressions)} of {len(rows)} ratios hold"
    print(f"{held}: at least {LOWEST:.0%} of the old median, in {MIN_ROUNDS} or more rounds")
    return bool(rows) and not regressions

"""Tables, the pages and files they are written into, and the comparison with an earlier measurement."""

import inspect
import json
import math
import re
import statistics
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks import harness
from benchmarks.harness import Options, fail


@dataclass
class Table:
    page: str
    """name of its page in benchmarks/pages, without .md"""
    caption: str
    measure: Callable[[Options, torch.device], tuple[str, dict]]
    """gives its text, and what --json and benchmarks/results say of it"""


TABLES: dict[str, Table] = {}


def table(name: str, caption: str) -> Callable:
    """Register a function as what measures the table `name`. Its page has the name of the file it stands in."""

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
    """The flags of a row as its first cell."""
    return f"`{flags}`" if flags else "default"


def active_switches(summary: dict) -> str:
    """What was active in a run."""
    names = [summary["precision"], summary.get("sdpa")]
    for switch in ("compiled", "cudagraph"):
        if summary[switch]:
            names.append(switch)
    return ", ".join(filter(None, names))


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
    """What stands on the page between a table's marks: what it is, the table, and how it was measured."""
    versions = ", ".join(f"{package} {version}" for package, version in record["versions"].items())
    measured = f"`{record['command']}` on {record['hardware']}; {versions}; {record['date']}, commit {record['commit']}"
    return f"{TABLES[record['table']].caption}\n\n{text}\n\n{measured}"


def write_section(name: str, device: torch.device, text: str) -> None:
    """Put `text` between the marks of its table on its page."""
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
    """What a table found, and how it was asked."""
    command = f"python benchmark.py --suite {name}"
    if options.fast:
        command += " --fast"
    if options.repeats:
        command += f" --repeats {options.repeats}"
    if options.seconds and name == "metta-presets":
        command += f" --seconds {options.seconds}"
    return {"table": name, "device": device.type, "command": command} | raw


def is_gpu_trial(options: Options) -> bool:
    """Whether this only tries the code of --suite gpu out: nothing that it finds is a result."""
    return options.suite == "gpu" and options.fast


def write_table(options: Options, device: torch.device, record: dict, text: str) -> None:
    """Into results and onto the page. A comparison changes nothing that the next one compares with."""
    if options.compare is not None or is_gpu_trial(options):
        return
    write_results(results_file(record["table"], device), json.dumps(record))
    write_section(record["table"], device, section(record, text))


def write_results(path: Path, text: str) -> None:
    """Write a file; where that fails print what would stand there, so that nothing measured is lost."""
    try:
        path.write_text(text)
    except OSError as error:
        print(f"benchmark.py: {path} cannot be written ({error.strerror}); it would be:\n{text}", flush=True)


def check_files(options: Options, names: list[str], device: torch.device) -> None:
    """Refuse before anything is measured what could not be written at the end."""
    if options.json is not None:
        if options.compare is not None and Path(options.json).resolve() == Path(options.compare).resolve():
            fail(f"--json {options.json}: is what --compare compares with; another file works")
        check_writable(f"--json {options.json}", Path(options.json))
    if options.compare is not None or is_gpu_trial(options):
        return
    for name in names:
        for path in (page_file(name), results_file(name, device)):
            with suppress(OSError):  # what is wrong is said of the file in it
                path.parent.mkdir(parents=True, exist_ok=True)
            check_writable(str(path), path)


def check_writable(what: str, path: Path) -> None:
    try:
        is_new = not path.exists()
        with path.open("a"):
            pass
        if is_new:
            path.unlink()
    except OSError as error:
        fail(f"{what}: cannot be written ({error.strerror}); a file in a folder that can be written works")


# ------------------------------------------------------------------------------------------------ comparison

MIN_ROUNDS = 3  # of a ratio, then and now: no single lucky round decides
LOWEST = 0.9  # a median below this part of the one before has fallen; on a quiet machine medians vary by a few percent


def read_reference(options: Options, names: list[str], device: torch.device) -> dict[str, dict]:
    """What --compare compares with, by table; refused before anything is measured where that could not be compared."""
    path = options.compare
    if path is None:
        return {}
    if options.rounds < MIN_ROUNDS:
        fail(f"--compare: {options.rounds} rounds say too little; --repeats {MIN_ROUNDS} or more works")
    reference = {}
    try:
        found = json.loads(Path(path).read_text())
        records = found if isinstance(found, list) else [found]
        for record in records:
            if record.get("ratios") and record["table"] in names and record["device"] == device.type:
                reference[record["table"]] = record
                check_reference(path, record, options.fast)
    except (OSError, ValueError, LookupError, AttributeError, TypeError) as error:
        reason = f"not a file of results ({type(error).__name__}: {error})"
        fail(f"--compare {path}: {reason}; one that --json wrote works")
    if not reference:
        reason = f"it has no ratios of {', '.join(names)} on {device.type}"
        fail(f"--compare {path}: {reason}; a file that --json wrote works")
    return reference


def check_reference(path: str, record: dict, fast: bool) -> None:
    name = record["table"]
    if ("--fast" in record["command"]) != fast:
        reason = f"{name} was measured by {record['command']}"
        fail(f"--compare {path}: {reason}; with --fast in both or in neither it works")
    for label, values in record["ratios"].items():
        if len(values) < MIN_ROUNDS or not all(0 < value < math.inf for value in values):
            reason = f"{name}, {label} has {len(values)} rounds, {values}"
            fail(f"--compare {path}: {reason}; {MIN_ROUNDS} or more positive numbers work")


def verdict(before: list[float], now: list[float]) -> str:
    """What became of a ratio: "holds" is the only word that passes."""
    if not now:
        return "missing"
    if len(now) < MIN_ROUNDS:
        return f"{len(now)} rounds, {MIN_ROUNDS} needed"
    if not all(math.isfinite(value) for value in now):
        return "not a number"
    return "holds" if statistics.median(now) >= LOWEST * statistics.median(before) else "fell"


def compare(reference: dict[str, dict], records: list[dict]) -> bool:
    """Print every ratio then and now. Whether all that there were then are there, and none fell below LOWEST of it."""
    rows = []
    for record in records:
        name = record["table"]
        if name not in reference:
            print(f"not compared: {name}, of which there are no ratios there")
            continue
        for when, about in (("then", reference[name]), ("now", record)):
            print(f"{name}, {when}: {about.get('hardware')}, {about.get('date')}, commit {about.get('commit')}")
        for label, before in reference[name]["ratios"].items():
            now = record.get("ratios", {}).get(label, [])
            row = [f"{name}, {label}", median_min_max(before, 2), "", ""]
            if now:
                row[2] = median_min_max(now, 2)
                row[3] = f"{statistics.median(now) / statistics.median(before) - 1:+.0%}"
            rows.append([*row, verdict(before, now)])
    regressions = [row for row in rows if row[-1] != "holds"]
    print(markdown_table("ratio to | then | now | median | ", rows))
    held = f"{len(rows) - len(regressions)} of {len(rows)} ratios hold"
    print(f"{held}: at least {LOWEST:.0%} of the median then, in {MIN_ROUNDS} or more rounds")
    return bool(rows) and not regressions

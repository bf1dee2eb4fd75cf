"""What is written where, what is compared, and what is refused."""

import json
import re
from pathlib import Path

import pytest
import torch
import tyro
from benchmark_helpers import ABOUT, CPU, fake_table, page_of

import benchmark
from benchmark import main
from benchmarks import harness, plots, report
from benchmarks.harness import Options


def test_a_device_that_was_never_measured_gets_a_section_below_the_cpu_s(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(harness, "machine", lambda device: ABOUT)
    fake_table(monkeypatch, "sweep", lambda options, device: ("the table", {}))
    before = page_of("sweep")
    main(Options("sweep", "cuda"))
    after = page_of("sweep")
    new = re.search(r"\n<!-- sweep cuda -->.*?the table.*?\n<!-- end -->\n", after, re.S)[0]
    assert after.replace(new, "", 1) == before
    assert after.index("<!-- sweep cpu -->") < after.index(new)


def test_suite_sb3_has_the_side_by_side_first_and_the_sweep_last(monkeypatch) -> None:
    ran = []
    for name in harness.SUITES["all"]:
        fake_table(monkeypatch, name, lambda options, device, name=name: (ran.append(name), ("", {}))[1])
    main(Options("sb3", "cpu"))
    assert ran == ["sb3-speed", "sb3-learn", "sweep"]


@pytest.fixture
def measures(monkeypatch):
    """Lets --suite train find these ratios to a peer."""

    def start(**ratios: list[float]) -> None:
        fake_table(monkeypatch, "train", lambda options, device: ("the table", {"ratios": ratios}))

    return start


def then(tmp_path, **ratios: list[float]) -> str:
    """A file to compare with: what --suite train measured before."""
    about = {"table": "train", "device": "cpu", "command": "python benchmark.py --suite train"}
    (tmp_path / "then.json").write_text(json.dumps(about | {"commit": "abc", "hardware": "a laptop", "ratios": ratios}))
    return "then.json"


@pytest.mark.parametrize(
    "now, says",
    [
        ([5.0, 6.0, 7.0], "holds"),
        ([6.9, 5.5, 5.4], "holds"),
        ([5.1, 5.1, 9.9], "fell"),  # 15 % lower, whatever its rounds are apart
        ([3.9, 4.0, 4.1], "fell"),
        ([5.3, 5.3, 9.0, 9.0, 5.3], "fell"),
        ([9.0], "1 rounds, 3 needed"),
        ([9.0, 9.0], "2 rounds, 3 needed"),
        ([6.0, 6.0, float("nan")], "not a number"),
        ([9.0, 9.0, float("inf")], "not a number"),
        ([], "missing"),
        (None, "missing"),
    ],
)
def test_compare_fails_where_a_median_fell_or_cannot_be_compared(tmp_path, capsys, measures, now, says) -> None:
    old = then(tmp_path, peer=[5.0, 6.0, 7.0], other=[1.0, 1.0, 1.0])
    measures(**{"other": [1.0, 1.1, 1.2], "new": [0.1]} | ({} if now is None else {"peer": now}))
    if says == "holds":
        main(Options("train", "cpu", compare=old))
    else:
        with pytest.raises(SystemExit) as stop:
            main(Options("train", "cpu", compare=old))
        assert stop.value.code == 1
    out = capsys.readouterr().out
    row = re.search(r"\| train, peer \| 6.00 \(5.00–7.00\) \| (.*) \|", out)[1]
    assert row.split(" | ")[-1] == says
    assert "| train, other | 1.00 (1.00–1.00) | 1.10 (1.00–1.20) | +10% | holds |" in out
    assert "train, then: a laptop" in out and f"{1 + (says == 'holds')} of 2 ratios hold" in out


def test_a_comparison_that_fails_fails_again(tmp_path, measures) -> None:
    """It writes nothing that the next one compares with."""
    measures(peer=[6.0, 6.0, 6.0])
    main(Options("train", "cpu"))
    results = tmp_path / "benchmarks" / "results" / "train.json"
    page = page_of("train")
    measures(peer=[4.0, 4.0, 4.0])
    for _ in range(2):
        with pytest.raises(SystemExit) as stop:
            main(Options("train", "cpu", compare="benchmarks/results/train.json", json="now.json"))
        assert stop.value.code == 1
        assert json.loads(results.read_text())["ratios"] == {"peer": [6.0, 6.0, 6.0]}
        assert json.loads((tmp_path / "now.json").read_text())[0]["ratios"] == {"peer": [4.0, 4.0, 4.0]}
    assert page_of("train") == page and "| peer" not in page


def test_compare_reads_one_table_or_a_list_and_says_what_was_not_compared(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(plots, "draw_all", lambda device: None)
    for name in ("env", "act", "train", "update"):
        raw = {"ratios": {"peer": [2.0, 2.0, 2.0]}} if name in ("env", "train") else {}
        fake_table(monkeypatch, name, lambda options, device, raw=raw: ("the table", raw))
    main(Options("snake", "cpu", json="all.json"))
    for file, compared, not_compared in (("all.json", 2, 2), ("benchmarks/results/train.json", 1, 3)):
        capsys.readouterr()
        main(Options("snake", "cpu", compare=file))
        out = capsys.readouterr().out
        assert f"{compared} of {compared} ratios hold" in out and out.count("not compared: ") == not_compared


ONE = '{"table": "train", "device": "cpu", "command": "b", "ratios": {"peer": [1, 1, 1]}}'


@pytest.mark.parametrize(
    "flags, file, named",
    [
        (dict(compare="then.json"), None, "--compare then.json: not a file of results (FileNotFoundError"),
        (dict(compare="then.json"), "{", "--compare then.json: not a file of results (JSONDecodeError"),
        (dict(compare="then.json"), "[1]", "--compare then.json: not a file of results (AttributeError"),
        (dict(compare="then.json"), '{"command": "x"}', "--compare then.json: it has no ratios of train on cpu"),
        (dict(compare="then.json"), '{"table": "env", "device": "cpu", "ratios": {"a": [1]}}', "no ratios of train"),
        (dict(compare=""), None, "--compare : not a file of results"),
        (dict(compare="then.json"), ONE.replace("[1, 1, 1]", "[1, 1]"), "peer has 2 rounds, [1, 1]; 3 or more"),
        (dict(compare="then.json"), ONE.replace("[1, 1, 1]", "[1, 0, 1]"), "peer has 3 rounds, [1, 0, 1]; 3 or more"),
        (dict(compare="then.json"), ONE.replace("[1, 1, 1]", "1"), "not a file of results (TypeError"),
        (dict(compare="then.json"), ONE.replace('"command"', '"x"'), "not a file of results (KeyError: 'command'"),
        (dict(compare="then.json", fast=True, repeats=3), ONE, "train was measured by b; with --fast in both or"),
        (dict(compare="then.json"), ONE.replace('"b"', '"b --fast"'), "train was measured by b --fast; with --fast"),
        (dict(compare="then.json", repeats=2), ONE, "--compare: 2 rounds say too little; --repeats 3 or more works"),
        (dict(compare="then.json", json="./then.json"), ONE, "--json ./then.json: is what --compare compares with"),
        (dict(json="nowhere/file.json"), None, "--json nowhere/file.json: cannot be written (No such file"),
        (dict(json="."), None, "--json .: cannot be written (Is a directory)"),
        (dict(json=""), None, "--json : cannot be written"),
        (dict(repeats=0), None, "--repeats 0: must be at least 1"),
        (dict(suite="metta", seconds=0), None, "--seconds 0: must be at least 1"),
        (dict(seconds=60), None, "--seconds 60: is of the runs of metta-presets"),
        (dict(device="cuda"), None, "--device cuda: "),
        (dict(suite="gpu"), None, "--suite gpu: needs CUDA; with --device cpu --fast its code is tried out"),
        (dict(suite="gpu", device="auto"), None, "--suite gpu: needs CUDA; with --device cpu --fast its code"),
    ],
)  # fmt: skip
def test_what_cannot_work_is_refused_in_one_line_before_anything_runs(
    tmp_path, capsys, monkeypatch, flags, file, named
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    fake_table(monkeypatch, "train", None)
    if file:
        (tmp_path / "then.json").write_text(file)
    with pytest.raises(SystemExit) as stop:
        main(Options(**{"suite": "train", "device": "cpu"} | flags))
    error = capsys.readouterr().err
    assert stop.value.code == 2 and error.count("\n") == 1 and named in error


@pytest.mark.parametrize("where", ["benchmarks/results", "benchmarks/results/train.json"])
def test_a_place_for_results_that_cannot_be_written_is_refused_before_anything_runs(
    tmp_path, capsys, monkeypatch, where
) -> None:
    fake_table(monkeypatch, "train", None)
    if where == "benchmarks/results":
        (tmp_path / where).write_text("a file where a folder should be")
    else:
        (tmp_path / where).mkdir(parents=True)
    with pytest.raises(SystemExit) as stop:
        main(Options("train", "cpu"))
    error = capsys.readouterr().err
    assert (
        stop.value.code == 2 and error.count("\n") == 1 and "benchmarks/results/train.json: cannot be written" in error
    )


def test_what_could_not_be_written_after_all_is_printed(tmp_path, capsys, monkeypatch) -> None:
    """As on a full disk: the next table is still measured, and the numbers are not lost."""

    def table_train(options: Options, device: torch.device) -> tuple[str, dict]:
        monkeypatch.setattr(Path, "write_text", full)
        return "the table", {"ratios": {"peer": [1.25]}}

    def full(self, text: str) -> None:
        raise OSError(28, "No space left on device")

    fake_table(monkeypatch, "train", table_train)
    main(Options("train", "cpu", json="all.json"))
    out = capsys.readouterr().out
    assert out.count("cannot be written (No space left on device)") == 3  # --json, the results and the page
    assert "the table" in out and out.count('"ratios": {"peer": [1.25]}') == 2


def test_json_says_how_and_where_it_was_measured(tmp_path, measures) -> None:
    measures(peer=[1.0])
    main(Options("train", "cpu", repeats=3, json=str(tmp_path / "all.json")))
    single = json.loads((tmp_path / "benchmarks" / "results" / "train.json").read_text())
    assert json.loads((tmp_path / "all.json").read_text()) == [single]
    assert single["command"] == "python benchmark.py --suite train --repeats 3"
    assert single["table"] == "train" and single["device"] == "cpu" and single["ratios"] == {"peer": [1.0]}
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", single["date"]) and "commit" in single and "cores of" in single["hardware"]
    assert single["versions"]["torch"] == torch.__version__ and single["versions"]["stable-baselines3"]


def test_every_table_has_its_section_and_replaces_nothing_else(tmp_path, monkeypatch) -> None:
    def sections() -> dict[str, str]:
        pages = "".join(path.read_text() for path in sorted((tmp_path / "benchmarks" / "pages").glob("*.md")))
        parts = re.split(r"(<!-- [\w-]+ cpu -->|<!-- end -->)", pages)
        return {f"{i} {part}": behind for i, (part, behind) in enumerate(zip(["", *parts[1::2]], parts[::2]))}

    before = sections()
    monkeypatch.setattr(plots, "draw_all", lambda device: None)
    for name in harness.SUITES["all"]:
        fake_table(monkeypatch, name, lambda options, device: ("the table", {}))
        main(Options(name, "cpu"))
        after = sections()
        changed = [part for part, behind in after.items() if before[part] != behind]
        assert [part.split(maxsplit=1)[1] for part in changed] == [f"<!-- {name} cpu -->"]
        assert "the table" in after[changed[0]] and f"--suite {name}`" in after[changed[0]]
        before = after


def test_a_table_without_a_section_gets_one_at_the_end_of_the_page_of_its_file(monkeypatch) -> None:
    monkeypatch.setattr(report, "TABLES", dict(report.TABLES))

    @report.table("other", caption="What it is.")
    def other(options: Options, device: torch.device) -> tuple[str, dict]:
        return "the table", {}

    assert report.TABLES["other"] == report.Table("test-report", "What it is.", other)
    for page, before in (("test-report", ""), ("snake", page_of("env"))):
        report.TABLES["other"].page = page
        for text in ("first", "second"):
            report.write_section("other", CPU, text)
            assert page_of("other") == f"{before}\n## other\n\n<!-- other cpu -->\n{text}\n<!-- end -->\n"


def test_every_table_is_registered_with_what_stands_on_its_page() -> None:
    names = [*harness.SUITES["all"], "gpu"]
    assert names == sorted(report.TABLES, key=names.index)
    for name, table in report.TABLES.items():
        assert table.caption and table.caption == table.caption.strip()
        assert page_of(name).count(f"<!-- {name} {'cuda' if name == 'gpu' else 'cpu'} -->") == 1


def test_help_names_every_suite_and_table() -> None:
    with pytest.raises(SystemExit):
        tyro.cli(Options, args=["--suite", "nonsense"])
    for name in (*harness.SUITES, *harness.SUITES["all"]):
        assert tyro.cli(Options, args=["--suite", name]).suite == name
        assert re.search(rf"\b{name}\b", benchmark.__doc__), name
    assert Options().suite == "snake"

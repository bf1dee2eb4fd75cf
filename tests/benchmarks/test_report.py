"""Pages, result files, comparison and refused options."""

import json
import re
from pathlib import Path

import pytest
import torch
from benchmark_helpers import fake_table, page_of

from benchmark import main
from benchmarks.harness import Options


@pytest.fixture
def measures(monkeypatch):
    """Sets the ratios that --suite train finds."""

    def start(**ratios: list[float]) -> None:
        fake_table(monkeypatch, "train", lambda options, device: ("the table", {"ratios": ratios}))

    return start


@pytest.mark.parametrize(
    "ratios, word",
    [
        ([6.9, 5.5, 5.4], "holds"),
        ([5.1, 5.1, 9.9], "fell"),
        ([9.0, 9.0], "2 rounds, 3 needed"),
        ([9.0, 9.0, float("inf")], "not a number"),
        ([], "missing"),
    ],
)
def test_compare_fails_on_a_lower_or_missing_ratio_and_writes_nothing(tmp_path, capsys, measures, ratios, word) -> None:
    measures(peer=[5.0, 6.0, 7.0], other=[1.0, 1.0, 1.0])
    main(Options("train", "cpu"))
    reference = "benchmarks/results/train.json"
    before = (tmp_path / reference).read_text()
    page = page_of("train")
    measures(peer=ratios, other=[1.0, 1.1, 1.2], new=[0.1])
    options = Options("train", "cpu", compare=reference)
    if word == "holds":
        main(options)
    else:
        with pytest.raises(SystemExit) as stop:
            main(options)
        assert stop.value.code == 1
    out = capsys.readouterr().out
    row = re.search(r"\| train, peer \| 6.00 \(5.00–7.00\) \| (.*) \|", out)[1]
    assert row.split(" | ")[-1] == word
    assert "| train, other | 1.00 (1.00–1.00) | 1.10 (1.00–1.20) | +10% | holds |" in out
    assert f"{1 + (word == 'holds')} of 2 ratios hold" in out
    assert (tmp_path / reference).read_text() == before and page_of("train") == page


ONE = '{"table": "train", "device": "cpu", "command": "b", "ratios": {"peer": [1, 1, 1]}}'


@pytest.mark.parametrize(
    "flags, file, flag",
    [
        (dict(compare="old.json"), None, "--compare old.json"),
        (dict(compare="old.json"), "{", "--compare old.json"),
        (dict(compare="old.json"), '{"table": "env", "device": "cpu", "ratios": {"a": [1]}}', "--compare old.json"),
        (dict(compare="old.json"), ONE.replace("[1, 1, 1]", "[1, 0, 1]"), "--compare old.json"),
        (dict(compare="old.json"), ONE.replace("[1, 1, 1]", "[1, 1]"), "--compare old.json"),
        (dict(compare="old.json", fast=True, repeats=3), ONE, "--compare old.json"),
        (dict(compare="old.json", repeats=2), ONE, "--compare"),
        (dict(repeats=0), None, "--repeats 0"),
        (dict(suite="metta", seconds=0), None, "--seconds 0"),
        (dict(seconds=60), None, "--seconds 60"),
        (dict(device="cuda"), None, "--device cuda"),
        (dict(suite="gpu"), None, "--suite gpu"),
        (dict(write_env=True), None, "--write-env"),
    ],
)
def test_bad_options_fail_in_one_line_before_measuring(tmp_path, capsys, monkeypatch, flags, file, flag) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    fake_table(monkeypatch, "train", None)
    if file:
        (tmp_path / "old.json").write_text(file)
    with pytest.raises(SystemExit) as stop:
        main(Options(**{"suite": "train", "device": "cpu"} | flags))
    error = capsys.readouterr().err
    assert stop.value.code == 2 and error.count("\n") == 1 and f"{flag}: " in error


def test_results_are_printed_if_the_disk_is_full(capsys, monkeypatch, measures) -> None:
    def full(self, text: str) -> None:
        raise OSError(28, "No space left on device")

    measures(peer=[1.25])
    monkeypatch.setattr(Path, "write_text", full)
    main(Options("train", "cpu"))
    out = capsys.readouterr().out
    assert "the table" in out and '"ratios": {"peer": [1.25]}' in out


def test_a_table_replaces_its_own_section_and_results(tmp_path, measures) -> None:
    before = page_of("train")
    measures(peer=[1.0])
    main(Options("train", "cpu", repeats=3, json=str(tmp_path / "all.json")))
    single = json.loads((tmp_path / "benchmarks" / "results" / "train.json").read_text())
    assert json.loads((tmp_path / "all.json").read_text()) == [single]
    assert single["command"] == "python benchmark.py --suite train --repeats 3"
    assert single["ratios"] == {"peer": [1.0]} and single["versions"]["torch"] in torch.__version__
    section = r"<!-- train cpu -->\n(.*?)\n<!-- end -->"
    after = page_of("train")
    assert "the table" in re.search(section, after, re.DOTALL)[1]
    assert re.sub(section, "", after, flags=re.DOTALL) == re.sub(section, "", before, flags=re.DOTALL)

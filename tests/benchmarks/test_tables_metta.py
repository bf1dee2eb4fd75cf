"""The tables of ppo_metta.py."""

import dataclasses
import functools
import importlib.util
import json
import re
import threading
import time

import pytest
import torch
from benchmark_helpers import CPU, CUDA, cells, page_of

import ppo_metta
from benchmark import main
from benchmarks import games, harness, metta, metta_parts, metta_speed, players, report, sb3_peers
from benchmarks.harness import Options

REAL = pytest.mark.skipif(importlib.util.find_spec("mettagrid") is None, reason="needs mettagrid")


@pytest.fixture
def arena(monkeypatch):
    """A made-up machine of two cores: what runs of ppo_metta.py and parts of it would give. The flags it was asked for.

    Games make 50,000 steps/s in a process and the network 40,000 on a thread, rollouts 30,000, both together 12,000.
    """
    asked = []

    def run(flags: str, options: Options, script: str) -> dict:
        asked.append(flags)
        rate = 30_000.0 if "--update-epochs 0" in flags else 12_000.0
        one = {"env_steps_per_second": rate, "rollout_fraction": 0.5, "train_fraction": 0.5, "env_steps": 10**6}
        one |= {"updates_per_second": 2.0, "samples_per_second": rate, "replay_ratio": 1.0, "peak_memory_gib": 1.5}
        one |= {"precision": "float32", "sdpa": None, "compiled": "--compile" in flags, "cudagraph": False}
        return one | {"eval_score_mean": float(len(asked)), "run": "none"}

    def apart(function, **arguments):
        asked.extend(arguments.get("variants", [arguments.get("flags", "")]))
        if function is metta_parts.metta_mflops:
            return [int((re.findall("--hidden-size (.*)", flags) or [128])[0]) / 320 for flags in arguments["variants"]]
        if function in (metta_parts.metta_env_rate, games.rule_book_rate):
            return 50_000.0
        if function is games.gymnasium_rates:
            return [40_000.0] * len(arguments["widths"])
        if function is sb3_peers.sb3_arena_rate:
            rate = (2000.0 if arguments["rule_book"] else 4000.0) / arguments["threads"]
            return {"env_steps_per_second": rate, "games": 100.0, "rollouts": 60.0, "learning": 90.0}
        acting = metta_parts.metta_args(arguments["flags"], arguments["device"]).threads * 40_000
        times = {"agents": 384, "one": [0.2, 0.3, 0.4], "all": [384_000 / acting, 10.0, 11.0]}
        return times | {"env_steps_per_second": 50_000.0}

    parsed = functools.cache(lambda words: parse_args(list(words)))  # tyro takes a tenth of a second
    parse_args = ppo_metta.parse_args
    tyro_is_free = threading.Lock()  # its cache breaks when two threads parse at once

    def parse_one_by_one(words: list[str]) -> ppo_metta.Args:
        with tyro_is_free:
            return dataclasses.replace(parsed(tuple(words)))

    monkeypatch.setattr(ppo_metta, "parse_args", parse_one_by_one)
    monkeypatch.setattr(harness, "run", run)
    monkeypatch.setattr(harness, "in_subprocess", apart)
    monkeypatch.setattr(harness, "mean_scalars", lambda folder: dict.fromkeys(PHASES, 2.0) | {"perf/gpu_util": 70.0})
    monkeypatch.setattr(ppo_metta, "CORES", 2)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    return asked


PHASES = [f"perf/{phase}_ms" for phase in ("act", "env", "store", "learn", "log")]

METTA = ["metta-env", "metta-speed", "metta-peer", "metta-presets", "diagnose"]


@pytest.mark.parametrize("device", [CPU, CUDA], ids=str)
@pytest.mark.parametrize("name", [*METTA, pytest.param("metta-subproc", marks=REAL)])
def test_every_command_of_the_arena_is_understood(arena, name, device) -> None:
    for fast in (True, False):
        text, raw = report.TABLES[name].measure(Options(name, fast=fast, repeats=1), device)
        json.dumps(raw)
    assert text.count("\n|") > 2 and len({line.count(" | ") for line in text.splitlines() if line[:1] == "|"}) == 1
    for flags in set(arena):
        metta_parts.metta_args(flags, device.type)


def test_the_width_of_half_a_megaflop_is_found(arena) -> None:
    text, _ = metta_speed.metta_speed(Options(fast=True), CPU)
    assert cells(text)["default"][0] == "0.40" and cells(text)["`--rnn mingru --hidden-size 160`"][0] == "0.50"
    assert cells(text)["default"][1:4] == ["24,000 (24,000–24,000)", "24,000 (24,000–24,000)", "12,000 (12,000–12,000)"]


def test_sb3_s_ppo_runs_with_its_faster_threads(arena) -> None:
    text, raw = metta_speed.metta_peer(Options(fast=True), CPU)
    rows = cells(text)
    assert rows["SB3's PPO, our batched arena"][:2] == ["4,000 (4,000–4,000)", "3.0 (3.0–3.0)"]
    assert rows["SB3's PPO, the rule book"][1:] == ["6.0 (6.0–6.0)", "100.0", "60.0", "90.0"]
    assert rows["`ppo_metta.py`"][1:] == ["", "16.7", "50.0", "16.7"]
    assert text.endswith("Threads of SB3: 1.") and raw["ratios"]["SB3's PPO, the rule book"] == [6.0, 6.0]


@REAL
@pytest.mark.parametrize("cores, most", [(2, 40_000), (1, 1 / (1 / 50_000 + 1 / 40_000))])
def test_what_a_worker_and_a_thread_could_reach_at_most(arena, monkeypatch, cores, most) -> None:
    """On two cores what the slower of them makes alone, on one core what they make in turn."""
    monkeypatch.setattr(ppo_metta, "CORES", cores)
    text, raw = metta_speed.metta_subproc(Options(repeats=1), CPU)
    found = raw["settings"][""]
    assert found["possible"] == [pytest.approx(most)] and found["shares"]["rollouts"] == [pytest.approx(30_000 / most)]
    assert found["shares"]["end to end"] == [pytest.approx(12_000 * (1 / 30_000 + 1 / 24_000))]
    assert cells(text)["default"][:2] == ["1", "1"] and cells(text)["default"][-1] == "90% (90%–90%)"


def test_presets_run_for_as_long_as_was_asked(arena, tmp_path) -> None:
    main(Options("metta-presets", "cpu", repeats=2, seconds=60))
    assert all("--max-seconds 60 " in flags for flags in arena) and len(arena) == 4
    section = page_of("metta-presets").split("<!-- metta-presets cpu -->")[1].split("<!-- end -->")[0]
    assert cells(section)["`--preset ultra-fast`"][0] == "1" and "3.00 · 4.00 | 3.50" in section
    assert "`python benchmark.py --suite metta-presets --repeats 2 --seconds 60` on" in section


def test_diagnosis_has_every_switch_and_what_a_gpu_does(arena) -> None:
    text, _ = metta_speed.diagnose(Options(repeats=1), CPU)
    assert cells(text)["`--threads 1`"][3:5] == ["0.20 / 0.30 / 0.40", "9.60 / 10.00 / 11.00"]
    assert "not measured without a GPU" in text and "GPU busy" not in text
    text, raw = metta_speed.diagnose(Options(repeats=1), CUDA)
    assert cells(text)["`--cudagraph`"][5] == "70%" and raw["switches"][""]["gpu_util"] == [70.0]


def test_percentiles_are_of_the_calls_that_count() -> None:
    calls = []
    mean, p95, p99 = metta_parts.latency_percentiles(
        lambda: time.sleep(0.1 if len(calls) < 3 else 0.001) or calls.append(0), 0, "cpu"
    )
    assert len(calls) == 60 and 1 <= mean <= p99 and p95 <= p99 < 50


def test_operations_are_those_of_the_layers() -> None:
    others = [f"--num-envs 2 --network {network}" for network in ("box-cnn", "token-attention")]
    assert min(metta_parts.metta_mflops(others, "cpu")) > 1
    mingru, none, wide = metta_parts.metta_mflops(
        [f"--num-envs 2 {flags}" for flags in ("--hidden-size 32 --rnn mingru", "--hidden-size 32", "")], "cpu"
    )
    assert 1e6 * (mingru - none) == pytest.approx(2 * 32 * 32)
    tokens = (1e6 * none - 2 * 32 * (32 + 26)) / (2 * 32)  # what is left is the bag's
    assert 10 < tokens < 200 and 1e6 * wide == pytest.approx(2 * 128 * (tokens + 128 + 26))


def test_the_rule_book_is_measured() -> None:
    assert games.rule_book_rate(2, 0.1) > 100


def test_parts_of_the_trainer_run_alone() -> None:
    flags = "--num-envs 4 --hidden-size 16 --threads 1"
    found = metta_parts.metta_parts(flags, 0.1, "cpu")
    assert found["agents"] == 24 and found["env_steps_per_second"] > 0 and 0 < found["one"][0] < found["all"][2]
    workers = f"{flags} --vec-env subproc --num-workers 2 --async-factor 2"
    assert metta_parts.metta_latency(workers, 0.1, "cpu")["agents"] == 12
    assert metta_parts.metta_env_rate(workers, 0.1, "cpu") > 0


def test_a_scripted_player_gets_more_hearts_than_chance(monkeypatch) -> None:
    monkeypatch.setitem(ppo_metta.VARIANTS["MettaArena-v0"], "max_steps", 200)
    easy = metta_parts.ARENAS["arena, easy"]
    assert players.scripted_hearts(easy, 6) > 5 * players.random_hearts(easy, 24) + 1


@pytest.mark.games
@REAL
def test_chance_gets_some_hearts_of_the_real_mettagrid() -> None:
    assert 0.5 < players.random_hearts(metta_parts.REAL_METTAGRID, 32) < 5


def test_hearts_of_all_players_stand_side_by_side(monkeypatch) -> None:
    monkeypatch.setattr(
        harness, "in_subprocess", lambda function, **_: 3.0 if function is players.scripted_hearts else 0.5
    )
    monkeypatch.setattr(metta.util, "find_spec", lambda name: True)
    text, raw = metta.metta_hearts(Options(), CPU)
    assert cells(text)["arena, easy"] == ["0.500", "3.00"] and cells(text)["MettaGrid"] == ["0.500", "–"]
    json.dumps(raw)


def test_what_ppo_learns_stands_beside_players_that_do_not(arena, monkeypatch) -> None:
    hearts = {players.random_hearts: 0.5, players.scripted_hearts: 12.0}
    monkeypatch.setattr(harness, "in_subprocess", lambda function, **_: hearts[function])
    monkeypatch.setattr(metta.util, "find_spec", lambda name: True)
    both = threading.Barrier(2, timeout=20)
    summary_of = harness.run

    def run(flags: str, options: Options, script: str) -> dict:
        args = ppo_metta.parse_args(flags.split())
        if args.threads == 1:
            both.wait()  # nobody gets here alone: the two play beside each other
        return summary_of(flags, options, script) | {"eval_score_mean": args.seed + 10.0 * (args.rnn == "mingru")}

    monkeypatch.setattr(harness, "run", run)
    text, raw = metta.metta_learn_arena(Options(repeats=2), CPU)
    assert cells(text)["`--rnn none`"][:5] == ["1.00 · 2.00", "1.50", "0.50", "12.0", "12%"]
    assert cells(text)["`--rnn mingru`"][:5] == ["11.00 · 12.00", "11.50", "0.50", "12.0", "96%"]
    assert sum("--threads 1" in flags for flags in arena) == 4
    text, raw = metta.metta_learn_real(Options(repeats=2), CPU)
    game = f"{metta_parts.REAL_METTAGRID} --num-workers 0"
    assert cells(text)[f"`{game} --rnn none`"][1:5] == ["1.50", "0.50", "–", "–"]
    assert sum("--threads 1" in flags for flags in arena) == 8
    json.dumps(raw)

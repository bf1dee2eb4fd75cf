"""A run from its start to its end, over all scripts: its folder, signals, full disks, evaluation, pictures, copies."""

import json
import re
import runpy
import shutil
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch
from PIL import Image
from small_runs import ROOT, load, refusal, scalars

SUMMARY = "script device precision compiled cudagraph sdpa env_steps wall_seconds env_steps_per_second "
SUMMARY += "updates_per_second samples_per_second replay_ratio rollout_fraction train_fraction peak_memory_gib "
SUMMARY += "eval_score_mean eval_score_median eval_score_max eval_episodes"
TAGS = "charts/SPS charts/score charts/episodic_return charts/episodic_length charts/updates_per_second "
TAGS += "charts/samples_per_second charts/replay_ratio eval/score_mean "
TAGS += "perf/act_ms perf/learn_ms perf/log_ms perf/rollout_fraction perf/warmup_s"
MORE_SUMMARY = {
    "dqn_snake": "eval_full_boards eval_full_boards_lowest eval_full_boards_highest",
    "ppo_snake": "eval_full_boards eval_full_boards_lowest eval_full_boards_highest",
    "dqn_snake_sb3_compat": "updates episodes",
    "ppo_metta": "",
    "dqn_mario_async": "produced stored in_flight lost by_collector experience_rate producer_wait_ms_mean "
    "wait_fraction ring_fill weight_age restarts replay_kib_per_transition eval_flags eval_distance_mean",
}
MORE_TAGS = {
    "dqn_snake": "losses/td_loss losses/q_values charts/epsilon perf/env_ms perf/store_ms",
    "ppo_snake": "losses/loss losses/pg_loss losses/v_loss losses/entropy losses/approx_kl perf/env_ms perf/store_ms",
    "dqn_snake_sb3_compat": "rollout/ep_rew_mean rollout/ep_len_mean rollout/exploration_rate time/fps train/loss "
    "train/learning_rate",
    "ppo_metta": "losses/pg_loss losses/v_loss losses/entropy losses/approx_kl perf/env_ms perf/store_ms",
    "dqn_mario_async": "charts/distance charts/flags charts/epsilon losses/td_loss losses/q_values perf/env_ms "
    "perf/store_ms collect/produced collect/stored collect/lost collect/wait_fraction "
    "collect/weight_age collect/ring_fill",
}
SUMMARY_FLAGS = {
    "dqn_snake": dict(),
    "ppo_snake": dict(),
    "dqn_snake_sb3_compat": dict(),
    "ppo_metta": dict(total_timesteps=10 * 384),
    "dqn_mario_async": dict(num_collectors=1, total_timesteps=4000),
}


def test_summary_and_tensorboard(script) -> None:
    summary, folder = script.run(eval_every=0.1, log_every=0.02, **SUMMARY_FLAGS[script.name])
    assert json.loads((folder / "summary.json").read_text()) == summary
    assert set(SUMMARY.split()) <= set(summary)
    assert set(MORE_SUMMARY[script.name].split()) <= set(summary)
    assert summary["script"] == script.name
    assert summary["rollout_fraction"] + summary["train_fraction"] == pytest.approx(1)
    args = json.loads((folder / "args.json").read_text())
    assert args["script"] == script.name
    assert args["eval_episodes"] == script.flags["eval_episodes"]
    logged = scalars(folder)
    assert set(TAGS.split()) <= set(logged)
    assert set(MORE_TAGS[script.name].split()) <= set(logged)
    assert all(torch.tensor(values).isfinite().all() for values in logged.values())


def test_evaluation_does_not_count_into_speed(script, monkeypatch) -> None:
    fast = script.run(run_name="fast")[0]["env_steps_per_second"]
    pauses = iter([0.3, 0.3, 0.3, 0.3])

    def evaluate(*arguments) -> dict:
        time.sleep(next(pauses, 0))
        return {}

    monkeypatch.setattr(script.module, "evaluate", evaluate)
    summary, _ = script.run(eval_every=1e-6)
    assert summary["env_steps_per_second"] > fast / 3
    assert summary["wall_seconds"] > 1


def test_an_evaluation_that_takes_long_leaves_time_to_learn(script, monkeypatch) -> None:
    """--eval-every is the time from the end of one to the start of the next."""
    times = []

    def slow(*arguments) -> dict:
        times.append(time.perf_counter())
        time.sleep(0.3)
        times.append(time.perf_counter())
        return {}

    monkeypatch.setattr(script.module, "evaluate", slow)
    script.run(eval_every=0.2, total_timesteps=None, max_seconds=3.0)
    pauses = [start - end for end, start in zip(times[1:-2:2], times[2:-2:2])]  # without the final one
    assert pauses and min(pauses) > 0.19


def test_two_runs_of_the_same_second_have_folders_of_their_own(script, monkeypatch, capsys) -> None:
    monkeypatch.setattr(time, "strftime", lambda _: "20000101-000000")
    few = script.flags["total_timesteps"] // 4
    for _ in range(2):
        script.main(total_timesteps=few)
    first, second = re.findall(r"^(\S+) on cpu", capsys.readouterr().out, re.MULTILINE)
    assert first == str(script.folder / f"{script.name}__1__20000101-000000")
    assert second == f"{first}-2"
    for folder in (first, second):
        assert (script.folder / folder / "summary.json").exists()


def test_a_run_folder_belongs_to_one_run(script, trained, capsys) -> None:
    before = {path: path.read_bytes() for path in trained.iterdir()}
    assert "--run-name run: " in refusal(capsys, script.run, seed=5)
    assert {path: path.read_bytes() for path in trained.iterdir()} == before


# ------------------------------------------------------------------------------------------------ process


def process() -> list:
    """What a run may not leave changed."""
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    denormal = torch.full((1,), 1e-310, dtype=torch.float64) * 1
    numbers = [torch.get_num_threads(), torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32]
    children = torch.multiprocessing.active_children()
    return [*handlers, denormal.item(), *numbers, threading.excepthook, sys.stdout, children]


def test_main_puts_the_process_back(script) -> None:
    in_workers = dict(vec_env="subproc", num_workers=1) if script.name == "ppo_metta" else {}
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    before = process()
    script.run(threads=1, **in_workers)
    assert process() == before
    with pytest.raises(SystemExit):
        script.main(threads=1, resume="nowhere")
    assert process() == before
    torch.set_num_threads(threads)


@pytest.mark.parametrize("script", ["ppo_metta", "dqn_mario_async"], indirect=True)
def test_denormal_numbers_are_flushed_while_it_runs(script, monkeypatch) -> None:
    products = []
    write_scalars = script.module.write_scalars

    def multiply(*arguments) -> None:
        products.append((torch.tensor([1e-39]) * 0.5).item())
        write_scalars(*arguments)

    monkeypatch.setattr(script.module, "write_scalars", multiply)
    script.run()
    assert len(products) > 2
    assert set(products) == {0}
    assert (torch.tensor([1e-39]) * 0.5).item() > 0


# ------------------------------------------------------------------------------------------------ signals


def at_second_log(script, monkeypatch, *numbers: int) -> None:
    """Send the process these signals in the middle of its loop."""
    calls = []
    write_scalars = script.module.write_scalars

    def interrupt(*arguments) -> None:
        calls.append(arguments)
        if len(calls) == 3:  # the first is the warm-up's
            for number in numbers:
                signal.raise_signal(number)
        write_scalars(*arguments)

    monkeypatch.setattr(script.module, "write_scalars", interrupt)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_saves_and_goes_on(script, monkeypatch, capsys, number) -> None:
    with monkeypatch.context() as patch:
        at_second_log(script, patch, number)
        summary, folder = script.run(log_every=1e-9, video=True)
    steps = script.flags["total_timesteps"]
    assert summary["env_steps"] < steps
    assert "eval_score_mean" not in summary
    assert json.loads((folder / "summary.json").read_text()) == summary
    assert load(folder)["global_step"] == summary["env_steps"]
    assert not (folder / "videos").exists()
    assert f"goes on with python {script.name}.py --resume {folder}" in capsys.readouterr().out
    assert script.main(resume=str(folder))["env_steps"] >= steps


def test_a_second_interrupt_ends_the_program(script, monkeypatch) -> None:
    before = process()
    at_second_log(script, monkeypatch, signal.SIGINT, signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        script.run(log_every=1e-9)
    assert process() == before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("when", ["on the way", "at the end"])
def test_an_interrupt_ends_an_evaluation_at_once(script, monkeypatch, capsys, number, when) -> None:
    evaluate = script.module.evaluate
    final = script.flags["eval_episodes"]

    def interrupted(network, args, episodes, device) -> dict:
        if (episodes == final) == (when == "at the end"):
            signal.raise_signal(number)
            raise AssertionError("it went on")
        return evaluate(network, args, episodes, device)

    monkeypatch.setattr(script.module, "evaluate", interrupted)
    summary, folder = script.run(eval_every=1e-6 if when == "on the way" else 0.0)
    steps = script.flags["total_timesteps"]
    assert (summary["env_steps"] >= steps) == (when == "at the end")
    assert summary["env_steps"] > 0
    assert "eval_score_mean" not in summary
    assert json.loads((folder / "summary.json").read_text()) == summary
    assert load(folder)["global_step"] == summary["env_steps"]
    assert f"--resume {folder}" in capsys.readouterr().out


def test_an_interrupt_ends_evaluate_and_render(script, trained, monkeypatch, capsys) -> None:
    def interrupted(*arguments) -> None:
        signal.raise_signal(signal.SIGINT)
        raise AssertionError("it went on")

    monkeypatch.setattr(script.module, "evaluate", interrupted)
    assert script.main(evaluate=str(trained)) == {}
    monkeypatch.setattr(time, "sleep", interrupted)  # between two pictures
    assert script.main(evaluate=str(trained), render=True) == {}
    assert capsys.readouterr().out.count("\033[H") == 1


@pytest.mark.parametrize("script", ["dqn_snake", "ppo_snake", "dqn_snake_sb3_compat"], indirect=True)
def test_control_c_exits_0(script) -> None:
    """From outside. The other two get it together with their workers and collectors, in their own tests."""
    words = script.words(total_timesteps=10**9, log_every=0.2, run_name="run")
    command = [sys.executable, "-u", f"{script.name}.py", *words]
    streams = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    with subprocess.Popen(command, cwd=ROOT, **streams) as run:
        while "SPS" not in run.stdout.readline():
            pass
        run.send_signal(signal.SIGINT)
        out, said = run.communicate(timeout=60)
    assert run.returncode == 0
    assert said == ""
    assert f"--resume {script.folder / 'run'}" in out
    assert (script.folder / "run" / "checkpoint.pt").exists()


# ------------------------------------------------------------------------------------------------ failures


@pytest.mark.parametrize("method", ["add_scalar", "close"])
def test_a_disk_too_full_to_log_ends_no_run(script, monkeypatch, capsys, method) -> None:
    def fill(*arguments) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(script.module.SummaryWriter, method, fill)
    summary, folder = script.run()
    said = capsys.readouterr().err
    assert summary["env_steps"] >= script.flags["total_timesteps"]
    assert (folder / "checkpoint.pt").exists()
    assert json.loads((folder / "summary.json").read_text()) == summary
    assert ("the run goes on" in said) == (method == "add_scalar")
    assert "Traceback" not in said


class Failure(BaseException):
    """Nothing catches it."""


@pytest.mark.parametrize("what", ["evaluation", "picture"])
def test_what_fails_after_the_training_loses_nothing(script, monkeypatch, what) -> None:
    def fail(*arguments, **options) -> None:
        raise Failure

    if what == "evaluation":
        monkeypatch.setattr(script.module, "evaluate", fail)
    else:
        monkeypatch.setattr(Image.Image, "save", fail)
    with pytest.raises(Failure):
        script.run(video=True)
    folder = script.folder / "run"
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["env_steps"] >= script.flags["total_timesteps"]
    assert load(folder)["global_step"] == summary["env_steps"]
    assert ("eval_score_mean" in summary) == (what == "picture")


def run_program(script, *words: str) -> None:
    """The script from its first line to its last, in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [f"{script.name}.py", *words])
        runpy.run_path(str(ROOT / f"{script.name}.py"), run_name="__main__")


OUT_OF_MEMORY = [
    MemoryError(),
    torch.OutOfMemoryError("CUDA out of memory"),
    RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4 bytes"),
]


@pytest.mark.parametrize("error", OUT_OF_MEMORY, ids=lambda error: type(error).__name__)
def test_out_of_memory_is_one_line_with_flags_that_exist(script, monkeypatch, capsys, error) -> None:
    def fail(*arguments) -> None:
        raise error

    monkeypatch.setattr(torch, "manual_seed", fail)
    said = refusal(capsys, run_program, script, *script.words())
    assert said.startswith(f"{script.name}.py: out of memory: a smaller --")
    flags = re.findall(r"--([\w-]+)", said)
    assert len(flags) > 2
    for flag in flags:
        assert hasattr(script.module.Args, flag.replace("-", "_"))


def test_other_errors_end_the_program_as_they_should(script, monkeypatch, capsys) -> None:
    def fail(*arguments) -> None:
        raise error

    monkeypatch.setattr(torch, "manual_seed", fail)
    error = OSError(28, "No space left on device")
    assert "No space left on device" in refusal(capsys, run_program, script, *script.words())
    error = RuntimeError("something else")
    with pytest.raises(RuntimeError, match="something else"):
        run_program(script, *script.words())
    error = KeyboardInterrupt()
    with pytest.raises(BaseException) as ended:  # noqa: B017 (KeyboardInterrupt would end pytest)
        run_program(script, *script.words())
    assert isinstance(ended.value, SystemExit)
    assert ended.value.code == 130


# ------------------------------------------------------------------------------------------------ evaluation


def test_evaluate_and_render_play_the_checkpoint(script, trained, monkeypatch, capsys) -> None:
    summary = json.loads((trained / "summary.json").read_text())
    flags = dict(evaluate=str(trained))
    scores = script.main(**flags)
    assert scores == {name: value for name, value in summary.items() if name.startswith("eval_")}
    assert not (trained / "videos").exists()
    monkeypatch.setattr("envs.playing.MAX_GIF_FRAMES", 5)
    assert script.main(**flags, video=True) == scores
    with Image.open(next(trained.glob("videos/*.gif"))) as gif:
        assert 1 < gif.n_frames <= 5
    capsys.readouterr()
    monkeypatch.setattr(time, "sleep", lambda _: None)
    assert script.main(**flags, render=True) == {}
    assert capsys.readouterr().out.count("\033[H") > 1


def test_a_folder_that_cannot_be_written_is_no_reason_not_to_evaluate(script, trained, capsys) -> None:
    (trained / "videos").write_text("a file where the folder should be")
    assert "eval_score_mean" in script.main(evaluate=str(trained), video=True)
    assert "--video: " in capsys.readouterr().out.splitlines()[-1]


# ------------------------------------------------------------------------------------------------ on its own


def test_a_copied_script_runs_alone(script) -> None:
    shutil.copytree(ROOT / "envs", script.folder / "envs")
    shutil.copy(ROOT / f"{script.name}.py", script.folder / "mine.py")
    words = script.words(run_dir="runs")
    if script.name == "dqn_snake_sb3_compat":
        words += ["--export-sb3", "mine.zip"]
    if script.name == "dqn_mario_async":
        words += ["--num-collectors", "1"]
    command = [sys.executable, "mine.py", *words]
    done = subprocess.run(command, cwd=script.folder, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    (folder,) = script.folder.glob("runs/mine__1__*")
    assert json.loads((folder / "summary.json").read_text())["script"] == "mine"
    assert f"python mine.py --evaluate runs/{folder.name}" in done.stdout
    assert (script.folder / "mine.zip").exists() == (script.name == "dqn_snake_sb3_compat")


HIDDEN = """
import os, runpy, signal, sys
sys.modules |= dict.fromkeys(("fcntl", "grp", "pwd", "pty", "resource", "syslog", "termios"))
for name in ("fork", "sched_getaffinity", "sysconf"):
    delattr(os, name)
for name in ("SIGALRM", "pthread_sigmask"):
    delattr(signal, name)
if sys.argv[1] != "dqn_mario_async.py":  # whose processes are ended by it on this machine
    del signal.SIGKILL
sys.argv = sys.argv[1:]
sys.path.insert(0, "")
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_nothing_that_only_unix_has_is_needed(script) -> None:
    """As on Windows: modules and functions that are not there are taken away before the script begins."""
    words = script.words(run_name="run", video=True)
    if script.name == "dqn_mario_async":
        words += ["--num-collectors", "1"]
    command = [sys.executable, "-c", HIDDEN, f"{script.name}.py", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert list(script.folder.glob("run/videos/*.gif"))
    assert json.loads((script.folder / "run" / "summary.json").read_text())["peak_memory_gib"] is None


# ------------------------------------------------------------------------------------------------ CUDA


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("script", ["dqn_snake", "ppo_snake", "ppo_metta"], indirect=True)
@pytest.mark.parametrize("mode", ["default", "reduce-overhead", "max-autotune"])
def test_compile_modes_on_cuda(script, mode) -> None:
    assert script.run(device="cuda", compile=True, compile_mode=mode)[0]["compiled"]

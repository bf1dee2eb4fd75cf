"""What a user of any script can rely on: mistakes, checkpoints, signals, switches, numbers, evaluation."""

import dataclasses
import io
import json
import logging
import os
import pickle
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from rank_runs import WHOLE_SCRIPT, descendants, start_ranks, wait_until_gone, wait_until_removed
from small_runs import ONE_FAST, OTHER_SHAPE, ROOT, checkpoint, files_of, load, network_of, refusal, scalars, weights_of

STREAMS = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
HAS_COMPILER = shutil.which("g++") or shutil.which("clang++")
COMPILER = pytest.mark.skipif(not HAS_COMPILER, reason="needs a C++ compiler")


def longer(script, folder: Path) -> list[str]:
    """A command line that continues a run which is over."""
    steps = load(folder)["global_step"] + script.flags["total_timesteps"] // 2
    words = [f"--resume={folder}", f"--total-timesteps={steps}", f"--run-dir={script.folder}", "--no-video"]
    return words + (["--checkpoint-replay"] if script.has_replay else [])


def one_line(script, capsys, *words: str) -> str:
    """The line with which the program refuses a command line. The flags that it names exist."""
    line = refusal(capsys, script.program, *words)
    assert line.startswith(f"{script.name}.py: ")
    for flag in re.findall(r"(?<![\w-])--([a-z][\w-]*)", line):
        name = flag.replace("-", "_")
        assert hasattr(script.module.Args, name) or hasattr(script.module.Args, name.removeprefix("no_")), line
    return line


# ------------------------------------------------------------------------------------------------ mistakes

BAD = """
threads=0 threads=257 total_timesteps=0 max_seconds=0 log_every=0 eval_episodes=0 learning_rate=0 learning_rate=nan
learning_rate=inf learning_rate=-1e-3 max_grad_norm=0 max_grad_norm=-1 seed=-1 seed=2147483648 total_timesteps=-1
eval_every=-1 checkpoint_every=-1 gamma=-0.1 gamma=1.5 eval_episodes=100001 resume= evaluate= resume=nowhere
run_name=a/b run_name=../x evaluate=nowhere resume=latest evaluate=latest
"""
BAD_OF = {
    "dqn_snake": """
num_envs=0 batch_size=0 buffer_size=0 hidden_size=0 replay_ratio=0 tau=0 num_envs=-1 learning_starts=-1 tau=1.5
start_e=1.5 exploration_fraction=1.5 replay_ratio=inf board=3x3 board=65x10 board=10 board=axb board=10x-10
num_envs=2001
""",
    "ppo_snake": """
num_envs=0 hidden_size=0 num_steps=0 num_minibatches=0 update_epochs=0 clip_coef=0 num_envs=-1 gae_lambda=-1 ent_coef=-1
vf_coef=-1 gae_lambda=1.5 ent_coef=inf num_minibatches=7 num_minibatches=240 num_minibatches=120 board=3x3 board=axb
board=6x6x6 board=65x10
""",
    "dqn_snake_sb3_compat": """
num_envs=0 batch_size=0 buffer_size=0 train_freq=0 gradient_steps=0 tau=0 learning_starts=-1 gradient_steps=-2
exploration_initial_eps=1.5 num_envs=2001 board= board=6 board=3x3 board=axb env_id= env_id=nowhere:X-v0
env_id=Nothing-v0 policy=CnnPolicy policy=transformer import_sb3= export_sb3= export_sb3=/proc/nowhere/a.zip
""",
    "ppo_metta": """
num_envs=0 num_steps=0 num_minibatches=0 hidden_size=0 bptt_horizon=0 async_factor=0
num_envs=-1 num_workers=-1 gae_lambda=1.5 ent_coef=inf num_steps=104 bptt_horizon=5
num_minibatches=5 size=5 instances=5 agents=900 env_config=
""",
    "dqn_mario_async": """
envs_per_collector=0 batch_size=0 accumulate=0 buffer_size=0 n_step=0 ring_blocks=0 channels=0 hidden_size=0 stack=0
skip=0 replay_ratio=0 tau=0 num_collectors=-1 learning_starts=-1 tau=1.5 start_e=1.5 exploration_fraction=1.5 alpha=1.5
beta=1.5 replay_ratio=inf difficulty=99 size=24 size=50 stack=300 skip=1001 noop_max=10001
""",
}
ALL_BAD = [
    pytest.param(name, word, marks=[] if name == "ppo_snake" else pytest.mark.slow)
    for name, words in BAD_OF.items()
    for word in (BAD + words).split()
]


@pytest.mark.parametrize("script, word", ALL_BAD, indirect=["script"])
def test_a_flag_that_cannot_work_is_refused(script, capsys, word) -> None:
    name, value = word.split("=")
    flag = f"--{name.replace('_', '-')}"
    assert flag in one_line(script, capsys, *script.words(), f"{flag}={value}")
    assert not list(script.folder.iterdir())


@ONE_FAST
def test_a_combination_that_cannot_work_is_refused(script, capsys) -> None:
    for words in (["--render"], ["--bf16", "--fp16"], ["--resume=nowhere", "--evaluate=nowhere"]):
        assert words[-1].split("=")[0] in one_line(script, capsys, *script.words(), *words)
    assert not list(script.folder.iterdir())


@ONE_FAST
def test_what_is_missing_is_refused(script, capsys, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for flag in ("--device=cuda", "--fp16", "--tf32", "--cudagraph"):
        assert flag.split("=")[0] in one_line(script, capsys, *script.words(), flag)
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert "pip install wandb" in one_line(script, capsys, *script.words(), "--wandb")
    assert not list(script.folder.iterdir())
    assert "/proc/nowhere" in one_line(script, capsys, *script.words(run_dir="/proc/nowhere"))


def test_a_run_folder_belongs_to_one_run(script, trained, monkeypatch, capsys) -> None:
    monkeypatch.setattr(time, "strftime", lambda _: trained.name)
    before = files_of(trained)
    assert "--run-name run: " in one_line(script, capsys, *script.words(run_name="run"))
    trained.rename(script.folder / f"{script.name}__1__run")  # as if made within the same second
    assert "--resume" in one_line(script, capsys, *script.words())
    assert files_of(script.folder / f"{script.name}__1__run") == before


@ONE_FAST
def test_out_of_memory_is_one_line(script, monkeypatch, capsys) -> None:
    for error in [MemoryError(), torch.OutOfMemoryError("CUDA out of memory")]:

        def fail(*arguments, error=error) -> None:
            raise error

        monkeypatch.setattr(torch, "manual_seed", fail)
        assert "out of memory: a smaller --" in one_line(script, capsys, *script.words())
    monkeypatch.undo()
    flag = {"ppo_snake": "num_envs", "ppo_metta": "hidden_size"}.get(script.name, "buffer_size")
    for number in (10**6 if flag == "hidden_size" else 10**13, 2**61):  # bytes that nobody has, bytes that overflow
        assert "out of memory: a smaller --" in one_line(script, capsys, *script.words(**{flag: number}))


@ONE_FAST
def test_other_errors_keep_their_traceback(script, monkeypatch) -> None:
    def fail(*arguments) -> None:
        raise RuntimeError("something else")

    monkeypatch.setattr(torch, "manual_seed", fail)
    with pytest.raises(RuntimeError, match="something else"):
        script.program(*script.words())


# No file may grow beyond so many KiB: args.json, TensorBoard's events or the checkpoint.
FULL_AT = {"dqn_snake": 0, "ppo_snake": 8, "dqn_snake_sb3_compat": 1, "ppo_metta": 0, "dqn_mario_async": 8}


@ONE_FAST
@pytest.mark.skipif(sys.platform != "linux", reason="limits files as Linux does")
def test_a_full_disk_is_one_line_and_the_checkpoint_before_is_whole(script, trained) -> None:
    before = (trained / "checkpoint.pt").read_bytes()
    words = " ".join(longer(script, trained))
    command = ["bash", "-c", f"ulimit -f {FULL_AT[script.name]}; exec {sys.executable} {script.name}.py {words}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    assert (trained / "checkpoint.pt").read_bytes() == before
    assert not list(trained.glob("*.tmp"))


@ONE_FAST
def test_a_disk_that_fills_up_while_it_trains_is_one_line(script, monkeypatch, capsys) -> None:
    def fill(content, file) -> None:
        file.write(b"half")
        raise RuntimeError("PytorchStreamWriter failed writing file")  # as PyTorch calls it

    monkeypatch.setattr(torch, "save", fill)
    assert "not saved" in one_line(script, capsys, *script.words(run_name="run"))
    assert not list((script.folder / "run").glob("checkpoint.*"))


def test_weights_that_are_not_finite_are_not_saved(script, capsys) -> None:
    flags = dict(learning_rate=1e18, log_every=1e9, checkpoint_every=1e-9)
    line = one_line(script, capsys, *script.words(run_name="run", **flags))
    assert "--learning-rate 1e+18: " in line and "a lower one works" in line
    if (script.folder / "run" / "checkpoint.pt").exists():  # of an update before
        assert weights_of(script.folder / "run").isfinite().all()


# ------------------------------------------------------------------------------------------------ checkpoints


class Hostile:
    def __reduce__(self):
        return Path.touch, (Path("executed"),)


def weights(change) -> Any:
    return lambda saved: change(network_of(saved))


def last_weight(network: dict, new) -> None:
    name = list(network)[-1]
    network[name] = new(network[name])


def moments(saved: dict) -> dict:
    """Adam's, of one weight."""
    state = saved["optimizer"]
    while "exp_avg" not in state:
        state = next(value for value in state.values() if isinstance(value, dict) and value)
    return state


DAMAGED = {  # for --resume and --evaluate
    "of another script": lambda saved: saved.update(script="another"),
    "of an older version": lambda saved: saved.update(version=1),
    "of no version": lambda saved: saved.pop("version"),
    "without flags": lambda saved: saved.pop("args"),
    "flags as a list": lambda saved: saved.update(args=[1, 2]),
    "a flag missing": lambda saved: saved["args"].pop("seed"),
    "a flag too many": lambda saved: saved["args"].update(more=1),
    "a flag of another type": lambda saved: saved["args"].update(gamma=[1]),
    "a flag of another choice": lambda saved: saved["args"].update(device="gpu"),
    "steps below 0": lambda saved: saved.update(global_step=-5),
    "steps as text": lambda saved: saved.update(global_step="many"),
    "seconds missing": lambda saved: saved.update(elapsed=None),
    "weights of another shape": weights(lambda net: last_weight(net, lambda x: torch.cat([x, x]))),
    "weights as a list": weights(lambda net: last_weight(net, lambda x: x.tolist())),
    "a weight missing": weights(lambda net: net.popitem()),
    "a weight too many": weights(lambda net: net.update(more=torch.zeros(1))),
}
DAMAGED_FOR_RESUME = {
    "an optimizer as a list": lambda saved: saved.update(optimizer=[1]),
    "moments of another shape": lambda saved: moments(saved).update(exp_avg=torch.zeros(2, 3)),
    "moments missing": lambda saved: moments(saved).pop("exp_avg_sq"),
}


def is_refused(script, folder: Path, capsys, *words: str) -> None:
    before = files_of(folder)
    line = one_line(script, capsys, *words)
    assert re.search(rf"--(resume|evaluate) \S*{folder.name}", line), line
    assert files_of(folder) == before
    assert not Path("executed").exists()


@ONE_FAST
def test_a_damaged_checkpoint_is_refused(script, trained, monkeypatch, capsys) -> None:
    monkeypatch.chdir(script.folder)
    whole = load(trained)
    words = longer(script, trained)
    for name, damage in (DAMAGED | DAMAGED_FOR_RESUME).items():
        saved = pickle.loads(pickle.dumps(whole))
        damage(saved)
        torch.save(saved, trained / "checkpoint.pt")
        is_refused(script, trained, capsys, *words)
        if name in DAMAGED:
            is_refused(script, trained, capsys, f"--evaluate={trained}")


@ONE_FAST
def test_a_checkpoint_without_a_part_is_refused_or_loads(script, trained, monkeypatch, capsys) -> None:
    class Started(BaseException):
        """Nothing catches it."""

    def start(*arguments, **options) -> None:
        raise Started

    monkeypatch.setattr("torch.utils.tensorboard.SummaryWriter", start)
    whole = load(trained)
    words = longer(script, trained)
    for name in whole:
        torch.save({other: value for other, value in whole.items() if other != name}, trained / "checkpoint.pt")
        with suppress(Started):
            assert f"--resume {trained}" in one_line(script, capsys, *words)


@ONE_FAST
def test_a_foreign_or_hostile_file_is_refused_and_not_executed(script, trained, monkeypatch, capsys) -> None:
    monkeypatch.chdir(script.folder)
    file = trained / "checkpoint.pt"
    whole = file.read_bytes()
    words = longer(script, trained)

    def hostile() -> None:
        torch.save({"script": script.name, "args": Hostile()}, file)

    contents = [b"", b"hello", whole[: len(whole) // 2], pickle.dumps(Hostile())]
    for write in (hostile, file.unlink, *(lambda content=content: file.write_bytes(content) for content in contents)):
        write()
        is_refused(script, trained, capsys, *words)
        is_refused(script, trained, capsys, f"--evaluate={trained}")


@ONE_FAST
def test_another_network_than_that_of_the_checkpoint_is_refused(script, trained, capsys) -> None:
    words = [f"--{name.replace('_', '-')}={value}" for name, value in OTHER_SHAPE[script.name].items()]
    is_refused(script, trained, capsys, *longer(script, trained), *words)
    is_refused(script, trained, capsys, f"--evaluate={trained}", *words)


KILL = """
whole = torch.save

def die(content, file):
    file.write(b"half")
    file.flush()
    os.kill(os.getpid(), 9)

torch.save = die
"""


@ONE_FAST
def test_a_run_that_is_killed_while_it_saves_leaves_the_checkpoint_before(script, trained, tmp_path) -> None:
    before = (trained / "checkpoint.pt").read_bytes()
    steps = load(trained)["global_step"]
    argv = [str(ROOT / f"{script.name}.py"), *longer(script, trained)]
    (run,) = start_ranks(tmp_path, script.name, {}, before=KILL + WHOLE_SCRIPT.format(argv=argv), ranks=1)
    run.communicate(timeout=120)
    assert run.returncode == -signal.SIGKILL
    assert (trained / "checkpoint.pt").read_bytes() == before
    assert script.cli(*longer(script, trained))["env_steps"] > steps
    assert not list(trained.glob("*.tmp"))


def interrupt_at_log(monkeypatch, number: int, *signals: int) -> list[int]:
    """Signals in the middle of the loop. Gives a list of the steps of all logs."""
    logs = []
    add_scalar = torch.utils.tensorboard.SummaryWriter.add_scalar

    def interrupt(self, tag, value, step, *arguments) -> None:
        if tag == "charts/SPS":
            logs.append(step)
            if len(logs) == number:
                for each in signals:
                    signal.raise_signal(each)
        add_scalar(self, tag, value, step, *arguments)

    monkeypatch.setattr(torch.utils.tensorboard.SummaryWriter, "add_scalar", interrupt)
    return logs


def test_an_interrupted_and_resumed_run_equals_an_uninterrupted_one(script, monkeypatch, capsys) -> None:
    """To the bit."""
    flags = {"log_every": 1e-9} | ({"checkpoint_replay": True} if script.has_replay else {})
    with monkeypatch.context() as patch:
        logs = interrupt_at_log(patch, 0)
        _, whole = script.run(run_name="whole", **flags)
    with monkeypatch.context() as patch:
        interrupt_at_log(patch, len(logs) // 2, signal.SIGTERM)
        summary, halves = script.run(run_name="halves", **flags)
    assert 0 < summary["env_steps"] < script.flags["total_timesteps"]
    assert load(halves)["global_step"] == summary["env_steps"]
    assert "eval_score_mean" not in summary and json.loads((halves / "summary.json").read_text()) == summary
    assert f"--resume {halves}" in capsys.readouterr().out
    script.cli("--resume", halves, "--run-dir", script.folder, "--no-video")
    expected, got = checkpoint(whole), checkpoint(halves)
    assert set(expected) == set(got)
    different = {name for name, value in expected.items() if not is_same(value, got[name])}
    assert {name for name in different if not re.match(r"args\.|elapsed|.*finished|collected", name)} == set()
    assert json.loads((halves / "summary.json").read_text())["env_steps"] == logs[-1]


def is_same(one: Any, other: Any) -> bool:
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


@ONE_FAST
def test_the_command_line_overrides_the_flags_of_a_checkpoint(script, trained) -> None:
    small = script.module.Args(**script.flags)
    saved = load(trained)
    saved["args"] |= dict(run_dir="/etc", run_name="x", evaluate="y", resume="z", wandb=True, render=True)
    saved["args"] |= dict(total_timesteps=1200, max_seconds=900.0)
    torch.save(saved, trained / "checkpoint.pt")
    args = script.parse("--resume", trained, "--seed", 7)
    for name in script.flags.keys() - {"run_dir", "video", "total_timesteps"}:
        assert getattr(args, name) == getattr(small, name), name
    assert args.seed == 7
    assert args.resume == str(trained / "checkpoint.pt")
    assert (args.run_dir, args.run_name, args.evaluate, args.wandb, args.render) == ("runs", None, None, False, False)
    limits = {"": (1200, 900), "--total-timesteps=5": (5, None), "--max-seconds=7": (None, 7)}
    for word, expected in limits.items():
        args = script.parse("--resume", trained, *word.split())
        assert (args.total_timesteps, args.max_seconds) == expected


@ONE_FAST
def test_a_run_that_is_over_says_so(script, trained, capsys) -> None:
    steps = load(trained)["global_step"]
    is_refused(script, trained, capsys, *longer(script, trained), f"--total-timesteps={steps}")
    is_refused(script, trained, capsys, f"--resume={trained}", "--max-seconds=1e-3")


def test_latest_is_the_last_run_of_this_script(script, trained) -> None:
    for name in ("older", "foreign"):
        shutil.copytree(trained, script.folder / name)
    os.utime(script.folder / "older" / "checkpoint.pt", (1, 1))
    (script.folder / "foreign" / "args.json").write_text('{"script": "another"}')
    os.utime(script.folder / "foreign" / "checkpoint.pt")
    args = script.parse("--resume", "latest", "--run-dir", script.folder)
    assert args.resume == str(trained / "checkpoint.pt")


@ONE_FAST
def test_checkpoints_are_saved_at_their_interval(script, monkeypatch) -> None:
    saves, save_checkpoint = [], script.module.save_checkpoint

    def count(*arguments) -> None:
        saves.append(arguments)
        save_checkpoint(*arguments)

    monkeypatch.setattr(script.module, "save_checkpoint", count)
    script.run(checkpoint_every=0.0)
    assert len(saves) == 1
    script.run(checkpoint_every=1e-6, run_name="often")
    assert len(saves) > 4


# ------------------------------------------------------------------------------------------------ signals

WITH_PROCESSES = {
    "ppo_metta": dict(vec_env="subproc", num_workers=2),
    "dqn_mario_async": dict(num_collectors=2, buffer_size=4000),
}


@ONE_FAST
@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes as Linux shows them")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_exits_0_and_leaves_nothing_behind(script, number) -> None:
    shared_before = set(os.listdir("/dev/shm"))
    flags = dict(total_timesteps=10**9, log_every=0.2, run_name="run") | WITH_PROCESSES.get(script.name, {})
    command = [sys.executable, "-u", f"{script.name}.py", *script.words(**flags)]
    with subprocess.Popen(command, cwd=ROOT, **STREAMS) as run:
        while not re.search(r"SPS|updates/s", line := run.stdout.readline()):
            assert line, run.stderr.read()
        processes = descendants(run.pid)
        run.send_signal(number)
        out, err = run.communicate(timeout=60)
    assert (run.returncode, err) == (0, "")
    assert f"--resume {script.folder / 'run'}" in out
    assert load(script.folder / "run")["global_step"] > 0
    wait_until_gone(processes)
    wait_until_removed(shared_before)


@ONE_FAST
def test_a_second_signal_ends_the_program_at_once(script, monkeypatch) -> None:
    interrupt_at_log(monkeypatch, 2, signal.SIGINT, signal.SIGINT)
    with pytest.raises(BaseException) as ended:  # noqa: B017 (KeyboardInterrupt would end pytest)
        script.program(*script.words(log_every=1e-9, run_name="run"))
    assert isinstance(ended.value, SystemExit) and ended.value.code == 130
    assert not (script.folder / "run" / "checkpoint.pt").exists()


@ONE_FAST
def test_what_ends_the_final_evaluation_loses_nothing(script, monkeypatch) -> None:
    """A signal there ends it at once: all is saved."""

    def interrupted(*arguments) -> None:
        signal.raise_signal(signal.SIGTERM)
        raise AssertionError("the evaluation continued")

    monkeypatch.setattr(script.module, "evaluate", interrupted)
    with pytest.raises(KeyboardInterrupt):
        script.run()
    summary = json.loads((script.folder / "run" / "summary.json").read_text())
    assert summary["env_steps"] == load(script.folder / "run")["global_step"] >= script.flags["total_timesteps"]


@pytest.mark.slow
@ONE_FAST
def test_output_that_nobody_reads_leaves_no_traceback(script) -> None:
    words = " ".join(script.words(run_name="run", log_every=1e-9))
    for flags in (words, "--help"):
        command = f"{sys.executable} {script.name}.py {flags} | head -n 1"
        done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, timeout=100)
        assert done.stderr == ""
        assert done.stdout.count("\n") == 1


@ONE_FAST
def test_output_that_the_terminal_cannot_show_is_a_question_mark(script, monkeypatch) -> None:
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    with suppress(SystemExit):
        script.program(*script.words(run_name="ä"))
    assert b"/?" in sys.stdout.buffer.getvalue()


# ------------------------------------------------------------------------------------------------ switches


@ONE_FAST
@pytest.mark.parametrize("capabilities", [{}, {"avx512_bf16": True}, {"amx_bf16": True}], ids=str)
def test_bf16_falls_back_where_there_are_no_units(script, monkeypatch, capsys, capabilities) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    summary, _ = script.run(bf16=True)
    assert summary["precision"] == ("bfloat16" if capabilities else "float32")
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("--bf16")]
    assert len(lines) == (0 if capabilities else 1)


@ONE_FAST
def test_bf16_is_close_to_fp32_and_learns_otherwise(script, monkeypatch) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"amx_bf16": True})
    fp32 = weights_of(script.run(run_name="fp32")[1])
    bf16 = weights_of(script.run(run_name="bf16", bf16=True)[1])
    assert 0 < (bf16 - fp32).norm() < 0.5 * fp32.norm()


COMPILED = {"ppo_metta": dict(bptt_horizon=4, total_timesteps=2 * 384), "dqn_mario_async": dict(total_timesteps=500)}


@ONE_FAST
@COMPILER
def test_compiled_learns_what_eager_learns(script) -> None:
    flags = COMPILED.get(script.name, {})
    _, eager = script.run(run_name="eager", **flags)
    summary, compiled = script.run(run_name="compiled", compile=True, **flags)
    assert summary["compiled"]
    assert set(network_of(load(compiled))) == set(network_of(load(eager)))  # no `_orig_mod.`
    torch.testing.assert_close(weights_of(compiled), weights_of(eager), atol=2e-3, rtol=2e-3)


@ONE_FAST
def test_a_compiler_that_fails_ends_the_run(script, monkeypatch, capsys) -> None:
    monkeypatch.setattr(logging.root.manager, "disable", logging.CRITICAL)  # PyTorch 2.15 adds lines
    broken = {"cpp.cxx": ("/nowhere/g++",), "force_disable_caches": True}
    torch._dynamo.reset()
    with torch._inductor.config.patch(broken):
        assert "--compile: " in one_line(script, capsys, *script.words(compile=True, run_name="run"))
    torch._dynamo.reset()


# ------------------------------------------------------------------------------------------------ numbers

SUMMARY = "script device precision compiled cudagraph env_steps wall_seconds env_steps_per_second "
SUMMARY += "updates_per_second samples_per_second replay_ratio rollout_fraction "
SUMMARY += "eval_score_mean eval_score_max eval_episodes"
TAGS = "charts/SPS charts/score charts/episodic_return charts/episodic_length charts/updates_per_second "
TAGS += "charts/samples_per_second charts/replay_ratio eval/score_mean losses/learning_rate "
TAGS += "perf/act_ms perf/learn_ms perf/rollout_fraction perf/warmup_s"
MORE_SUMMARY = {
    "dqn_snake": "eval_full_boards",
    "ppo_snake": "eval_full_boards",
    "dqn_snake_sb3_compat": "",
    "ppo_metta": "",
    "dqn_mario_async": "produced stored producer_wait_ms_mean weight_age eval_flags eval_distance_mean",
}
MORE_TAGS = {
    "dqn_snake": "losses/td_loss losses/q_values charts/epsilon perf/env_ms perf/store_ms",
    "ppo_snake": "losses/loss losses/pg_loss losses/v_loss losses/entropy losses/approx_kl perf/env_ms perf/store_ms",
    "dqn_snake_sb3_compat": "rollout/ep_rew_mean rollout/ep_len_mean rollout/exploration_rate time/fps train/loss "
    "train/learning_rate",
    "ppo_metta": "losses/pg_loss losses/v_loss losses/entropy losses/approx_kl perf/env_ms perf/store_ms",
    "dqn_mario_async": "charts/distance charts/flags losses/td_loss losses/q_values perf/env_ms perf/store_ms",
}
SUMMARY_FLAGS = {
    "ppo_metta": dict(total_timesteps=10 * 384),
    "dqn_mario_async": dict(num_collectors=1, total_timesteps=4000),
}


@ONE_FAST
def test_summary_and_tensorboard(script) -> None:
    summary, folder = script.run(eval_every=0.1, log_every=0.02, **SUMMARY_FLAGS.get(script.name, {}))
    assert json.loads((folder / "summary.json").read_text()) == summary
    assert set((SUMMARY + " " + MORE_SUMMARY[script.name]).split()) <= set(summary)
    assert summary["script"] == script.name
    assert 0 < summary["rollout_fraction"] < 1
    assert summary["samples_per_second"] / summary["env_steps_per_second"] == pytest.approx(summary["replay_ratio"])
    args = json.loads((folder / "args.json").read_text())
    assert args["script"] == script.name and args["eval_episodes"] == script.flags["eval_episodes"]
    logged = scalars(folder)
    tags = TAGS.replace("losses/learning_rate ", "") if script.name == "dqn_snake_sb3_compat" else TAGS
    assert set((tags + " " + MORE_TAGS[script.name]).split()) <= set(logged)
    assert all(torch.tensor(values).isfinite().all() for values in logged.values())


def test_help_shows_every_flag(script, capsys) -> None:
    with pytest.raises(SystemExit) as error:
        script.parse("--help")
    assert error.value.code == 0
    said = capsys.readouterr().out
    for field in dataclasses.fields(script.module.Args):
        assert f"--{field.name.replace('_', '-')}" in said


@ONE_FAST
def test_evaluation_does_not_count_into_speed(script, monkeypatch) -> None:
    """And --eval-every is the time from the end of one to the start of the next; in ppo_snake.py it may be longer."""
    now = 0.0
    times = []

    def clock() -> float:  # a millisecond a call, so that the outcome does not depend on the machine
        nonlocal now
        now += 0.001
        return now

    def slow(*arguments) -> dict:
        nonlocal now
        times.append(now)
        now += 0.3
        times.append(now)
        return {}

    monkeypatch.setattr(time, "perf_counter", clock)
    fast = script.run(run_name="fast")[0]["env_steps_per_second"]
    monkeypatch.setattr(script.module, "evaluate", slow)
    summary, _ = script.run(eval_every=0.2, total_timesteps=None, max_seconds=8.0)
    assert summary["env_steps_per_second"] > fast / 1.5
    assert 8 <= summary["wall_seconds"] < 10
    pauses = [start - end for end, start in zip(times[1:-2:2], times[2:-2:2])]  # without the final one
    assert pauses and min(pauses) > (2.69 if script.name == "ppo_snake" else 0.19)  # nine times an evaluation


@ONE_FAST
def test_speed_after_a_resume_counts_only_new_steps(script, trained) -> None:
    saved = load(trained)
    saved["global_step"] = 10**9  # as if very many steps had been made
    torch.save(saved, trained / "checkpoint.pt")
    summary = script.cli(*longer(script, trained))
    assert summary["env_steps"] > 10**9
    assert summary["env_steps_per_second"] < 10**6
    assert max(scalars(trained)["charts/SPS"]) < 10**6


def test_a_resumed_run_keeps_what_tensorboard_had(script, trained) -> None:
    """Its last log and final evaluation too."""
    before = scalars(trained)
    script.cli(*longer(script, trained))
    after = scalars(trained)
    for tag, values in before.items():
        assert after[tag][: len(values)] == values, tag
    assert len(after["eval/score_mean"]) == 2


# ------------------------------------------------------------------------------------------------ evaluation


def test_evaluate_and_render_play_the_checkpoint(script, trained, monkeypatch, capsys) -> None:
    summary = json.loads((trained / "summary.json").read_text())
    words = ["--evaluate", trained, "--run-dir", script.folder]
    played = []
    evaluate = script.module.evaluate
    monkeypatch.setattr(script.module, "evaluate", lambda agent, *more: played.append(agent) or evaluate(agent, *more))
    scores = script.cli(*words, "--no-video")
    for name, weight in network_of(load(trained)).items():
        assert torch.equal(weight, played[0].state_dict()[name])
    assert scores == {name: value for name, value in summary.items() if name.startswith("eval_")}
    assert not (trained / "videos").exists()
    monkeypatch.setattr("envs.playing.MAX_GIF_FRAMES", 5)
    assert script.cli(*words) == scores
    with Image.open(next(trained.glob("videos/*.gif"))) as gif:
        assert 1 < gif.n_frames <= 5
    assert {"evaluation:", "writing"} <= set(capsys.readouterr().out.split())
    monkeypatch.setattr(time, "sleep", lambda _: None)
    script.cli(*words, "--render")
    assert capsys.readouterr().out.count("\033[H") > 1


@ONE_FAST
def test_a_gif_that_cannot_be_written_is_one_line_and_no_failure(script, trained, capsys) -> None:
    (trained / "videos").write_text("a file where the folder should be")
    assert "eval_score_mean" in script.cli("--evaluate", trained)
    assert "--video: " in capsys.readouterr().out.splitlines()[-1]


@ONE_FAST
def test_a_copied_script_runs_alone(script) -> None:
    shutil.copytree(ROOT / "envs", script.folder / "envs")
    shutil.copy(ROOT / f"{script.name}.py", script.folder / "mine.py")
    command = [sys.executable, "mine.py", *script.words(run_dir="runs")]
    done = subprocess.run(command, cwd=script.folder, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    (folder,) = script.folder.glob("runs/mine__1__*")
    assert json.loads((folder / "summary.json").read_text())["script"] == "mine"
    assert f"python mine.py --evaluate runs/{folder.name}" in done.stdout


@ONE_FAST
def test_a_printed_command_can_be_pasted(script, trained, capsys) -> None:
    """With a space in the path, from a shell in the same folder, and on a terminal that knows only ASCII."""
    spaced = trained.rename(script.folder / "a run")
    with suppress(SystemExit):
        script.program(*longer(script, spaced))
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("watch it play: ")]
    words = shlex.split(line.removeprefix("watch it play: "))
    assert words[:4] == ["python", str(ROOT / f"{script.name}.py"), "--evaluate", str(spaced)]
    assert sys.stdout.errors == "replace"

"""Flags, over all scripts: help, values that cannot work, and those that a checkpoint brings along."""

import dataclasses
import math
import subprocess
import sys

import pytest
import torch
from small_runs import ROOT, load, refusal


def test_help_shows_every_flag(script, capsys) -> None:
    with pytest.raises(SystemExit) as error:
        script.parse("--help")
    assert error.value.code == 0
    said = capsys.readouterr().out
    for field in dataclasses.fields(script.module.Args):
        assert f"--{field.name.replace('_', '-')}" in said


WRITTEN_AT_EXIT = """
import runpy, sys
sys.stdout = open(1, "w", buffering=2**20)
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.parametrize("options", [[], ["-c", WRITTEN_AT_EXIT]], ids=["at once", "at exit"])
def test_help_that_nobody_reads_is_no_error(script, options) -> None:
    """`--help | head -1`: what is left of it is written at once, or from a buffer when the program ends."""
    command = [sys.executable, *options, f"{script.name}.py", "--help"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as run:
        run.stdout.close()
        said = run.stderr.read()
    assert said == ""
    assert run.returncode == 141


def each(value: float, names: str) -> list[dict]:
    return [{name: value} for name in names.split()]


BAD = [
    *each(0, "threads total_timesteps max_seconds log_every eval_episodes learning_rate max_grad_norm"),
    *each(-1, "seed total_timesteps max_seconds eval_every checkpoint_every"),
    dict(threads=257),
    dict(seed=2**31),
    dict(eval_episodes=100_001),
    dict(learning_rate=-1e-3),
    dict(learning_rate=math.nan),
    dict(learning_rate=math.inf),
    dict(gamma=-0.1),
    dict(gamma=1.5),
    dict(bf16=True, fp16=True),
    dict(compile_mode="max-autotune", cudagraph=True, compile=True),
    dict(render=True),
    dict(resume=""),
    dict(evaluate=""),
    dict(resume="nowhere"),
    dict(evaluate="nowhere"),
    dict(resume="latest"),
    dict(evaluate="latest"),
    dict(resume="nowhere", evaluate="nowhere"),
    dict(run_dir="/proc/nowhere"),
]
BAD_OF = {
    "dqn_snake": [
        *each(0, "num_envs batch_size buffer_size hidden_size replay_ratio tau"),
        *each(-1, "num_envs batch_size learning_starts"),
        *each(1.5, "tau start_e end_e exploration_fraction"),
        dict(replay_ratio=math.inf),
        dict(board="3x3"),
        dict(board="65x10"),
        dict(board="10"),
        dict(board="axb"),
        dict(board="10xfoox10"),
        dict(board="10x10x10"),
        dict(board="10x-10"),
        dict(num_envs=2001),
        dict(num_envs=10**10, buffer_size=10**11),
        dict(buffer_size=10**12),
        dict(hidden_size=30, network="attention"),
    ],
    "ppo_snake": [
        *each(0, "num_envs hidden_size num_steps num_minibatches update_epochs clip_coef"),
        *each(-1, "num_envs num_steps gae_lambda ent_coef vf_coef"),
        *each(1.5, "gae_lambda"),
        dict(ent_coef=math.inf),
        dict(num_minibatches=7),
        dict(num_minibatches=240),
        dict(num_minibatches=120),
        dict(board="3x3"),
        dict(board="axb"),
        dict(num_envs=10**10),
        dict(num_steps=10**10),
    ],
    "dqn_snake_sb3_compat": [
        *each(0, "num_envs batch_size buffer_size train_freq gradient_steps episodes tau"),
        dict(learning_starts=-1),
        dict(gradient_steps=-2),
        dict(exploration_initial_eps=1.5),
        dict(seed=2**31 - 10_000),
        dict(eval_episodes=10_001),
        dict(num_envs=2001),
        dict(num_envs=10**10),
        dict(buffer_size=10**13),
        dict(board=""),
        dict(board="6"),
        dict(board="3x3"),
        dict(board="axb"),
        dict(board="6xfoox6"),
        dict(board="6x6x6"),
        dict(board="9" * 5000 + "x6"),
        dict(env_id=""),
        dict(env_id="nowhere:X-v0"),
        dict(env_id="Nothing-v0"),
        dict(env_id="Pendulum-v1", board=None),
        dict(env_id="FrozenLake-v1", board=None),
        dict(env_id="CartPole-v1", board="6x6"),
        dict(policy="CnnPolicy"),
        dict(policy="transformer"),
        dict(import_sb3=""),
        dict(import_sb3="a.zip", evaluate="latest"),
        dict(import_sb3="a.zip", resume="latest"),
        dict(export_sb3=""),
        dict(export_sb3="a.zip", evaluate="latest"),
        dict(export_sb3="/proc/nowhere/a.zip"),
    ],
    "ppo_metta": [
        *each(0, "num_envs num_steps num_minibatches hidden_size bptt_horizon async_factor"),
        *each(0, "vf_coef"),
        *each(-1, "num_envs num_steps num_workers"),
        *each(1.5, "gae_lambda prio_alpha prio_beta0"),
        dict(ent_coef=math.inf),
        dict(num_envs=10**9),
        dict(num_steps=104),
        dict(bptt_horizon=5),
        dict(num_minibatches=5),
        dict(num_minibatches=96),
        dict(num_workers=1025),
        dict(num_workers=5, vec_env="subproc"),
        dict(num_envs=4, num_workers=3, vec_env="subproc"),
        dict(vec_env="device", env_id="mettagrid"),
        dict(size=5),
        dict(instances=5),
        dict(agents=900),
        dict(env_config=""),
        dict(env_config="a:b"),
        dict(hidden_size=30, network="token-attention"),
    ],
    "dqn_mario_async": [
        *each(0, "envs_per_collector batch_size accumulate buffer_size n_step ring_blocks sync_every"),
        *each(0, "channels hidden_size stack skip world stage replay_ratio tau"),
        *each(-1, "num_collectors learning_starts"),
        *each(1.5, "tau start_e end_e exploration_fraction alpha beta"),
        dict(replay_ratio=math.inf),
        dict(difficulty=99),
        dict(size=24),
        dict(size=50),
        dict(size=12 * 10**6),
        dict(stack=300),
        dict(skip=10**8),
        dict(noop_max=10**8),
        dict(num_collectors=10**4),
        dict(buffer_size=300),
        dict(buffer_size=10**12),
        dict(ring_blocks=10**7, buffer_size=10**9),
        dict(rom="/nowhere.nes", env_id="SuperMarioBros", num_collectors=1, envs_per_collector=1),
        dict(num_collectors=0, env_id="SuperMarioBros", envs_per_collector=1),
        dict(envs_per_collector=2, env_id="SuperMarioBros", num_collectors=1),
    ],
}
ALL_BAD = [(name, flags) for name in BAD_OF for flags in BAD + BAD_OF[name]]


@pytest.mark.parametrize("script, flags", ALL_BAD, indirect=["script"], ids=str)
def test_bad_values_are_refused_in_one_line(script, capsys, flags) -> None:
    said = refusal(capsys, script.main, **flags)
    flag = next(iter(flags)).replace("_", "-")
    assert f"--{flag}" in said
    assert not list(script.folder.iterdir())


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs no CUDA")
def test_cuda_is_refused_where_there_is_none(script, capsys) -> None:
    assert "--device cuda: " in refusal(capsys, script.main, device="cuda")


def test_wandb_missing_is_one_line(script, monkeypatch, capsys) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert "pip install wandb" in refusal(capsys, script.main, wandb=True)
    assert not list(script.folder.iterdir())


# ------------------------------------------------------------------------------------------------ of a checkpoint


def change_args(folder, **values) -> None:
    saved = load(folder)
    saved["args"].update(values)
    torch.save(saved, folder / "checkpoint.pt")


def test_the_command_line_stands_on_top_of_the_flags_of_a_checkpoint(script, trained) -> None:
    learning_rate = script.flags.get("learning_rate", script.module.Args.learning_rate)
    small = script.module.Args(**script.flags)
    for flag in ("--resume", "--evaluate"):
        args = script.parse(flag, trained, "--seed", "7")
        assert args.seed == 7
        assert getattr(args, flag[2:]) == str(trained / "checkpoint.pt")
        assert args.total_timesteps == small.total_timesteps
        for name in script.flags.keys() - {"run_dir", "video"}:
            assert getattr(args, name) == getattr(small, name), name
    args = script.parse("--resume", trained, "--learning-rate", "0.5")
    assert args.learning_rate == 0.5 != learning_rate


def test_a_new_limit_replaces_the_old_ones(script, trained) -> None:
    """A run of 900 seconds goes on to a number of steps, and the other way round."""

    def limits(*words: str) -> tuple[int | None, float | None]:
        args = script.parse("--resume", trained, *words)
        return args.total_timesteps, args.max_seconds

    change_args(trained, total_timesteps=1200, max_seconds=900.0)
    assert limits() == (1200, 900)
    assert limits("--seed", "2") == (1200, 900)
    assert limits("--total-timesteps", "5000") == (5000, None)
    assert limits("--max-seconds", "1200") == (None, 1200)
    assert limits("--max-seconds", "7", "--total-timesteps", "8") == (8, 7)


def test_a_flag_of_a_checkpoint_may_be_none_as_on_the_command_line(script, trained) -> None:
    change_args(trained, threads=None)
    assert script.parse("--resume", trained).threads is None


WRONG = [("threads", "many"), ("gamma", [1]), ("device", "gpu"), ("device", True), ("bf16", 1), ("more", 1), (7, 1)]


@pytest.mark.parametrize("flag", ["--resume", "--evaluate"])
@pytest.mark.parametrize("name, value", WRONG)
def test_flags_of_a_checkpoint_are_checked(script, trained, capsys, flag, name, value) -> None:
    saved = load(trained)
    saved["args"][name] = value
    torch.save(saved, trained / "checkpoint.pt")
    assert f"{flag} {trained}" in refusal(capsys, script.parse, flag, trained)


def test_a_checkpoint_names_no_files(script, trained) -> None:
    names = dict(run_dir="/etc", run_name="x", evaluate="y", resume="z")
    change_args(trained, **names, wandb=True, render=True)
    args = script.parse("--resume", trained)
    assert args.run_dir == "runs"
    assert args.run_name is None
    assert args.evaluate is None
    assert args.resume == str(trained / "checkpoint.pt")
    assert not args.wandb
    assert not args.render

"""Checkpoints, over all scripts: what is refused, what a resumed run goes on with, and where a checkpoint is found."""

import json
import math
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import OTHER_SHAPE, files_of, load, network_of, refusal, scalars


class Malicious:
    def __reduce__(self):
        return Path.touch, (Path("executed"),)


@pytest.mark.parametrize("flag", ["resume", "evaluate"])
def test_broken_and_hostile_files_are_refused(script, trained, monkeypatch, capsys, flag) -> None:
    monkeypatch.chdir(script.folder)
    whole = (trained / "checkpoint.pt").read_bytes()
    torch.save({"script": "another"}, "foreign.pt")
    torch.save({"script": script.name, "args": Malicious()}, "hostile.pt")
    Path("pickle.pt").write_bytes(pickle.dumps(Malicious()))
    Path("truncated.pt").write_bytes(whole[: len(whole) // 2])
    Path("empty.pt").write_bytes(b"")
    Path("text.pt").write_text("hello")
    for name in ("foreign.pt", "hostile.pt", "pickle.pt", "truncated.pt", "empty.pt", "text.pt"):
        assert f"--{flag} {name}" in refusal(capsys, script.main, **{flag: name})
    assert not Path("executed").exists()


@pytest.mark.parametrize("flag", ["resume", "evaluate"])
def test_a_network_of_another_shape_is_refused(script, trained, capsys, flag) -> None:
    before = files_of(trained)
    flags = {flag: str(trained), "total_timesteps": script.longer} | OTHER_SHAPE[script.name]
    said = refusal(capsys, script.main, **flags)
    assert f"--{flag} {trained}" in said
    assert "must be as they were" in said
    assert files_of(trained) == before


OTHER_GAMES = [
    ("dqn_snake", dict(num_envs=1)),
    ("ppo_snake", dict(num_envs=64)),
    ("dqn_snake", dict(num_envs=64)),
    ("dqn_snake", dict(network="attention")),
    ("dqn_snake_sb3_compat", dict(num_envs=64)),
    ("dqn_snake_sb3_compat", dict(board="9x4")),
    ("ppo_metta", dict(num_envs=8)),
    ("ppo_metta", dict(agents=7)),
    ("ppo_metta", dict(env_id="MettaNavigation-v0")),
    ("ppo_metta", dict(rnn="none")),
    ("ppo_metta", dict(muon_learning_rate=0.0)),
    ("dqn_mario_async", dict(stack=3)),
]


@pytest.mark.parametrize("script, flags", OTHER_GAMES, indirect=["script"], ids=str)
def test_a_run_of_other_games_is_refused(script, trained, capsys, flags) -> None:
    before = files_of(trained)
    if script.name == "ppo_metta":
        flags = flags | {"num_minibatches": 1}
    said = refusal(capsys, script.main, resume=str(trained), total_timesteps=script.longer, **flags)
    assert "must be as they were" in said
    assert files_of(trained) == before


def part(name: str, value: Any) -> Callable[[dict], None]:
    """Another value of a part of the checkpoint."""

    def change(saved: dict) -> None:
        saved[name] = value

    return change


def weight(new: Callable[[torch.Tensor], Any]) -> Callable[[dict], None]:
    """Another last weight of the network."""

    def change(saved: dict) -> None:
        network = network_of(saved)
        last = list(network)[-1]
        network[last] = new(network[last])

    return change


MALFORMED = {
    "weights of another dtype": weight(lambda tensor: tensor.half()),
    "weights in double precision": weight(lambda tensor: tensor.double()),
    "weights of another shape": weight(lambda tensor: torch.cat([tensor, tensor])),
    "weights not finite": weight(lambda tensor: tensor * math.nan),
    "sparse weights": weight(lambda tensor: tensor.to_sparse()),
    "weights as a list": weight(lambda tensor: tensor.tolist()),
    "a weight missing": lambda saved: network_of(saved).popitem(),
    "a weight too many": lambda saved: network_of(saved).update(more=torch.zeros(1)),
    "an optimizer that is a list": part("optimizer", [1]),
    "an optimizer that is empty": part("optimizer", {}),
    "steps below 0": part("global_step", -5),
    "steps as text": part("global_step", "many"),
    "half an update": part("updates", 1.5),
    "seconds not a number": part("elapsed", math.nan),
    "seconds without end": part("elapsed", math.inf),
    "seconds that are none": part("elapsed", None),
    "args as a list": part("args", [1, 2]),
    "a script of another name": part("script", "another"),
    "another version": part("version", 99),
    "no version": lambda saved: saved.pop("version"),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_checkpoints_are_refused_before_anything_changes(script, trained, capsys, name) -> None:
    saved = load(trained)
    MALFORMED[name](saved)
    torch.save(saved, trained / "checkpoint.pt")
    refused_and_unchanged(script, trained, capsys)


def refused_and_unchanged(script, folder: Path, capsys) -> None:
    before = files_of(folder)
    replay = {"checkpoint_replay": True} if script.has_replay else {}
    said = refusal(capsys, script.main, resume=str(folder), total_timesteps=script.longer, **replay)
    assert f"--resume {folder}: " in said
    assert files_of(folder) == before


MAY_BE_MISSING = {"device", "scaler", "replay", "collected", "games", "envs", "rollout"}


def test_a_checkpoint_without_a_part_is_refused(script, trained, capsys) -> None:
    """Parts that may be missing: another device's numbers, games and replay, which then begin anew."""
    whole = load(trained)
    for name in whole.keys() - MAY_BE_MISSING:
        torch.save({other: value for other, value in whole.items() if other != name}, trained / "checkpoint.pt")
        refused_and_unchanged(script, trained, capsys)


# ------------------------------------------------------------------------------------------------ going on


def test_a_run_that_is_over_says_so_and_changes_nothing(script, trained, capsys) -> None:
    saved = load(trained)
    saved["elapsed"] = 1000.0
    torch.save(saved, trained / "checkpoint.pt")
    before = files_of(trained)
    flags = {"resume": str(trained / "checkpoint.pt")}
    if script.has_replay:
        flags["checkpoint_replay"] = True
    steps = saved["global_step"]
    for limits in (dict(total_timesteps=steps), dict(max_seconds=1000.0), dict(total_timesteps=None, max_seconds=99.0)):
        with pytest.raises(SystemExit) as error:
            script.main(**flags | limits)
        out, said = capsys.readouterr()
        assert error.value.code == 2
        assert said.count("\n") == 1
        assert f"its run is over after {steps:,} steps" in said
        assert out == ""
    assert files_of(trained) == before
    summary = script.main(**flags, total_timesteps=None, max_seconds=1000.5)
    assert summary["wall_seconds"] > 1000.4
    assert summary["env_steps"] > steps


def test_speed_after_a_resume_counts_only_new_steps(script, trained, capsys) -> None:
    saved = load(trained)
    saved["global_step"] = 10**9  # as if very many steps had been made
    torch.save(saved, trained / "checkpoint.pt")
    summary = script.main(resume="latest", total_timesteps=10**9 + 480)
    assert summary["env_steps"] >= 10**9 + 480
    assert summary["env_steps_per_second"] < 10**6
    assert max(scalars(trained)["charts/SPS"]) < 10**6
    assert ("the replay starts empty" in capsys.readouterr().out) == script.has_replay


def test_random_numbers_of_another_device_begin_anew(script, trained, capsys) -> None:
    if script.name == "dqn_snake_sb3_compat":
        pytest.skip("it draws all its numbers on the CPU")
    saved = load(trained)
    saved |= {"device": "cuda", "generator": torch.zeros(16, dtype=torch.uint8)}
    torch.save(saved, trained / "checkpoint.pt")
    steps = saved["global_step"] + 400
    assert script.main(resume=str(trained), total_timesteps=steps)["env_steps"] >= steps
    assert "the random numbers begin anew" in capsys.readouterr().out


def test_the_next_start_clears_what_a_killed_run_left(script, trained) -> None:
    (trained / "checkpoint.12345.tmp").write_bytes(b"half")
    script.main(resume=str(trained), total_timesteps=load(trained)["global_step"] + 100)
    assert not list(trained.glob("*.tmp"))


def test_a_full_disk_leaves_the_old_checkpoint_whole(script, trained, monkeypatch, capsys) -> None:
    before = (trained / "checkpoint.pt").read_bytes()
    steps = load(trained)["global_step"] + 100

    def fill(checkpoint, file) -> None:
        file.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", fill)
    script.main(resume=str(trained), total_timesteps=steps)
    assert "No space left" in capsys.readouterr().err
    assert (trained / "checkpoint.pt").read_bytes() == before
    assert not list(trained.glob("*.tmp"))


def test_checkpoints_on_the_way(script, monkeypatch) -> None:
    saves = []
    save_checkpoint = script.module.save_checkpoint

    def count(*arguments) -> None:
        saves.append(arguments)
        save_checkpoint(*arguments)

    monkeypatch.setattr(script.module, "save_checkpoint", count)
    script.run(checkpoint_every=0.0)
    assert len(saves) == 1
    script.run(checkpoint_every=1e-6, run_name="often")
    assert len(saves) > 4


def test_latest_is_looked_up_once_and_only_among_runs_of_the_script(script, trained) -> None:
    """Also in a folder that was moved."""
    not_ours = dict(foreign='{"script": "another"}', broken="{", array="[1]", binary="\xff")
    for name, text in not_ours.items():
        folder = script.folder / name
        folder.mkdir()
        (folder / "args.json").write_bytes(text.encode("latin-1"))
        shutil.copy(trained / "checkpoint.pt", folder)
    (script.folder / "empty").mkdir()
    shutil.copy(trained / "checkpoint.pt", script.folder / "empty")
    found, _ = script.module.load_checkpoint("--resume", "latest", str(script.folder))
    assert found == trained / "checkpoint.pt"

    moved = script.folder / "elsewhere"
    shutil.copytree(trained, moved / "first")
    assert json.loads((moved / "first" / "args.json").read_text())["run_dir"] != str(moved)
    args = script.parse("--resume", "latest", "--run-dir", moved)
    assert args.resume == str(moved / "first" / "checkpoint.pt")
    assert args.run_dir == str(moved)

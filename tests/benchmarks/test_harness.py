"""How scripts and peers are run, and how their logs are read."""

import subprocess

import pytest

from benchmarks import harness
from benchmarks.harness import Options


@pytest.mark.parametrize(
    "code, stderr, failure",
    [
        (2, "out of memory: a smaller --batch-size works", MemoryError),
        (137, "", MemoryError),
        (2, "--batch-size 0: must be above 0", SystemExit),
        (1, "CUDA out of memory", SystemExit),
    ],
)
def test_only_out_of_memory_is_no_failure(monkeypatch, code, stderr, failure) -> None:
    def run(command, env, **_) -> subprocess.CompletedProcess:
        assert {name: env[name] for name in harness.PLAIN_SETTINGS} == harness.PLAIN_SETTINGS
        return subprocess.CompletedProcess(command, code, "", stderr)

    monkeypatch.setenv("USE_BF16", "1")
    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(failure):
        harness.run("--bf16", Options(), "dqn_snake_sb3_compat.py")


def test_runs_have_names_of_their_own_and_their_peak_memory(monkeypatch, tmp_path) -> None:
    names = []

    def run(command, **_) -> subprocess.CompletedProcess:
        names.append(command[command.index("--run-name") + 1])
        folder = tmp_path / "runs" / names[-1]
        folder.mkdir(parents=True)
        (folder / "summary.json").write_text('{"rollout_fraction": 0.25}')
        return subprocess.CompletedProcess(command, 0, "a line of the script\n1.5\n", "")

    monkeypatch.setattr(subprocess, "run", run)
    found = [harness.run("", Options(device="cpu")) for _ in range(3)]
    assert len(set(names)) == 3 and {one["peak_memory_gib"] for one in found} == {1.5}
    assert found[0]["train_fraction"] == 0.75

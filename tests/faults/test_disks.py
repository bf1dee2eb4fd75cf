"""Disks that are full, and folders that are gone."""

import shutil

import pytest
from rank_runs import small_flags, start_ranks
from small_runs import REWRITTEN, SMALL, load

pytestmark = pytest.mark.slow
LIMIT = """
import resource

write_scalars = script.write_scalars
logs = []

def fill_the_disk(*given):
    logs.append(0)
    if len(logs) == 3:
        resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))
    write_scalars(*given)

script.write_scalars = fill_the_disk
"""


OLD = [name for name in SMALL if name not in REWRITTEN]
FULL = """
import resource

add_scalar = script.SummaryWriter.add_scalar
logs = []

def fill_the_disk(*given):
    logs.append(0)
    if len(logs) == 40:
        resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))
    add_scalar(*given)

script.SummaryWriter.add_scalar = fill_the_disk
"""


@pytest.mark.parametrize("limit", [0, 2000, 50_000])
@pytest.mark.parametrize("name", REWRITTEN)
def test_a_disk_that_fills_up_ends_the_run_and_tears_no_checkpoint(tmp_path, name, limit) -> None:
    flags = small_flags(name, log_every=0.01, checkpoint_every=0.02, max_seconds=20.0, eval_every=0.1)
    (run,) = start_ranks(tmp_path, name, flags, before=FULL.format(limit=limit), ranks=1)
    _, err = run.communicate(timeout=120)
    assert run.returncode != 0 and ("File too large" in err or "not saved" in err), err
    if (tmp_path / "runs/run/checkpoint.pt").exists():
        load(tmp_path / "runs/run")
    assert not list((tmp_path / "runs/run").glob("*.tmp"))


@pytest.mark.parametrize("name, limit", [*((name, 2000) for name in OLD)])
def test_a_disk_that_fills_up_ends_no_run_and_tears_no_checkpoint(tmp_path, name, limit) -> None:
    """No file may grow beyond so many bytes any more: checkpoints, logs and the picture fail one after the other."""
    steps = SMALL[name]["total_timesteps"]
    flags = small_flags(name, total_timesteps=steps, log_every=0.01, checkpoint_every=0.02, video=True)
    (run,) = start_ranks(tmp_path, name, flags, before=LIMIT.format(limit=limit), ranks=1)
    _, err = run.communicate(timeout=120)
    assert run.returncode == 0, err
    assert "Traceback" not in err
    assert "could not be saved" in err or limit == 50_000
    if (tmp_path / "runs/run/checkpoint.pt").exists():
        load(tmp_path / "runs/run")
    assert not list((tmp_path / "runs/run").glob("*.tmp"))


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_run_folder_that_is_removed_ends_no_run(script, monkeypatch, capsys) -> None:
    if script.name in REWRITTEN:
        pytest.skip("ends with one line")
    write_scalars, logs = script.module.write_scalars, []

    def remove_the_folder(*given) -> None:
        logs.append(0)
        if len(logs) == 3:
            shutil.rmtree(script.folder / "run")
        write_scalars(*given)

    monkeypatch.setattr(script.module, "write_scalars", remove_the_folder)
    script.run(log_every=0.01, checkpoint_every=0.02, video=True)
    assert len(logs) > 3 and "Traceback" not in capsys.readouterr().err

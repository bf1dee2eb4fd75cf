"""Disks that are full, and folders that are gone."""

import shutil

import pytest
from rank_runs import small_flags, start_ranks
from small_runs import SMALL, load

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
REMOVE = """
import shutil

write_scalars = script.write_scalars
logs = []

def remove_the_folder(*given):
    logs.append(0)
    if len(logs) == 3:
        shutil.rmtree("runs/run")
    write_scalars(*given)

script.write_scalars = remove_the_folder
"""


def run_once(folder, name: str, before: str, **flags: object) -> tuple[int, str, str]:
    flags = small_flags(name, total_timesteps=SMALL[name]["total_timesteps"], log_every=0.01, video=True) | flags
    (run,) = start_ranks(folder, name, flags, before, ranks=1)
    out, err = run.communicate(timeout=120)
    return run.returncode, out, err


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("limit", [0, 2000, 50_000])
def test_a_disk_that_fills_up_ends_no_run_and_tears_no_checkpoint(tmp_path, name, limit) -> None:
    """No file may grow beyond so many bytes any more: checkpoints, logs and the picture fail one after the other."""
    code, _, err = run_once(tmp_path, name, LIMIT.format(limit=limit), checkpoint_every=0.02)
    assert code == 0, err
    assert "Traceback" not in err
    assert "could not be saved" in err or limit == 50_000
    if (tmp_path / "runs/run/checkpoint.pt").exists():
        load(tmp_path / "runs/run")
    assert not list((tmp_path / "runs/run").glob("*.tmp"))


@pytest.mark.parametrize("name", SMALL)
def test_a_run_folder_that_is_removed_ends_no_run(tmp_path, name) -> None:
    code, _, err = run_once(tmp_path, name, REMOVE, checkpoint_every=0.02)
    assert code == 0, err
    assert "Traceback" not in err
    shutil.rmtree(tmp_path / "runs", ignore_errors=True)

"""Disks that are full, and folders that are gone."""

import pytest
from rank_runs import small_flags, start_ranks
from small_runs import SMALL, load

pytestmark = pytest.mark.slow
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
@pytest.mark.parametrize("name", SMALL)
def test_a_disk_that_fills_up_ends_the_run_and_tears_no_checkpoint(tmp_path, name, limit) -> None:
    flags = small_flags(name, log_every=0.01, checkpoint_every=0.02, max_seconds=20.0, eval_every=0.1)
    (run,) = start_ranks(tmp_path, name, flags, before=FULL.format(limit=limit), ranks=1)
    _, err = run.communicate(timeout=120)
    assert run.returncode != 0 and ("File too large" in err or "not saved" in err), err
    if (tmp_path / "runs/run/checkpoint.pt").exists():
        load(tmp_path / "runs/run")
    assert not list((tmp_path / "runs/run").glob("*.tmp"))

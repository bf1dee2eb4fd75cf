"""The sweep of dqn_snake_sb3_compat.py, and what it writes into .env."""

import re

import pytest
from benchmark_helpers import page_of

import dqn_snake_sb3_compat
from benchmark import main
from benchmarks import harness
from benchmarks.harness import Options


@pytest.fixture(autouse=True)
def machine(monkeypatch) -> None:
    """A made-up machine: no half precision, memory for a batch of 32."""

    def run(flags: str, options: Options, script: str) -> dict:
        batch = int(re.search(r"--batch-size (\d+)", flags)[1])
        if batch > 32:
            raise MemoryError
        is_compiled = "--compile" in flags
        speed = 50 * batch**0.5 * (1 + is_compiled)
        rates = {"samples_per_second": speed, "updates_per_second": speed / batch, "env_steps_per_second": 1.0}
        active = {"precision": "float32", "compiled": is_compiled, "sdpa": "math"}
        return rates | active | {"replay_ratio": 1.0, "peak_memory_gib": 1.0, "run": "none"}

    monkeypatch.setattr(harness, "run", run)


@pytest.mark.parametrize("old", ["", "export USE_BF16='yes'\nFOO=1\n"])
def test_the_script_reads_the_env_of_the_sweep(tmp_path, old) -> None:
    (tmp_path / ".env").write_text(old)
    main(Options("sweep", "cpu", write_env=True))
    assert dqn_snake_sb3_compat.settings()["compile"]
    assert not dqn_snake_sb3_compat.settings()["bf16"]
    assert ("FOO=1" in old) == ("FOO=1" in (tmp_path / ".env").read_text())
    assert "| OOM |" in page_of("sweep") and "bf16 not active, float32 instead" in page_of("sweep")

"""Every test begins with the same random numbers and ends with the process as it was, whatever order they run in."""

import random
import signal
import sys
import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch
import tyro

# Under pytest tyro checks its cache at random, and fails if the key was just pushed out (1.0.17).
sys.modules.get("tyro._unsafe_cache", tyro).sys = type("NoPytest", (), {"modules": {}})


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="also tests marked slow or games")
    parser.addoption("--long", action="store_true", help="ten to a hundred times as many tries in tests/faults")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--all"):
        return
    marked = [item for item in items if item.get_closest_marker("slow") or item.get_closest_marker("games")]
    items[:] = [item for item in items if item not in marked]
    config.hook.pytest_deselected(items=marked)


@pytest.fixture(autouse=True)
def process() -> Iterator[None]:
    """A run may change signal handlers, threads and precision."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    threads = torch.get_num_threads()
    excepthook = threading.excepthook
    stdout = sys.stdout
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)
    torch.set_num_threads(threads)
    torch.set_float32_matmul_precision("highest")
    torch.set_flush_denormal(False)
    threading.excepthook = excepthook
    sys.stdout = stdout

"""Every test begins with the same random numbers and ends with the process as it was, whatever order they run in."""

import random
import signal
import sys
import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="ten to a hundred times as many tries in tests/faults")


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

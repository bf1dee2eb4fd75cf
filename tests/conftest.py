"""Every test begins with the same random numbers, in whatever order and on whichever process it runs."""

import random

import numpy as np
import pytest
import torch


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="ten to a hundred times as many tries in tests/faults")


@pytest.fixture(autouse=True)
def seeded() -> None:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)

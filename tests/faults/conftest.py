"""What the tests of faults share: `script`, each in turn, and how often they try."""

from collections.abc import Callable

import pytest
from small_runs import SMALL, Script


class Started(BaseException):
    """A run has passed all that can refuse it. Nothing catches it."""


@pytest.fixture
def started() -> type[Started]:
    return Started


@pytest.fixture(params=SMALL)
def script(request, tmp_path, monkeypatch) -> Script:
    return Script(request.param, tmp_path)


@pytest.fixture
def tries(request) -> Callable[[int, int], int]:
    """`tries(few, many)`: how often, without and with --long."""
    return lambda few, many: many if request.config.getoption("--long") else few


@pytest.fixture
def stops_at_start(script, monkeypatch) -> Script:
    """Its runs end with Started where they would begin to write."""

    def start(*arguments, **options) -> None:
        raise Started

    monkeypatch.setattr(script.module, "SummaryWriter", start)
    return script

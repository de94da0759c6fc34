"""Shared fixtures: the engines, and a check that nothing is left behind."""

from __future__ import annotations

import gc
import signal
import time
from collections.abc import Iterator

import pytest
from process_tools import own_descendants


def pytest_configure() -> None:
    # A shell ignores Ctrl-C for what it runs in the background, and children inherit that; tests send it to themselves.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(params=["local", "inline"])
def engine(request: pytest.FixtureRequest) -> str:
    """Each engine that runs with no more than this machine."""
    return str(request.param)


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Each test ends every process that the library started for it."""
    before = set(own_descendants())
    yield
    if not set(own_descendants()) - before:
        return
    # Only now, since it takes long where torch is loaded.
    gc.collect()
    deadline = time.monotonic() + 20
    while set(own_descendants()) - before:
        if time.monotonic() > deadline:
            left = {pid: line for pid, line in own_descendants().items() if pid not in before}
            pytest.fail(f"left running: {left}")
        time.sleep(0.02)

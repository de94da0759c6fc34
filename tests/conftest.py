"""Shared fixtures: the engines, and a check that nothing is left behind."""

from __future__ import annotations

import contextlib
import gc
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(params=["local", "inline"])
def engine(request: pytest.FixtureRequest) -> str:
    """Each engine that runs with no more than this machine."""
    return str(request.param)


def descendants() -> dict[int, str]:
    """The processes below this one, with their command lines."""
    found: dict[int, str] = {}
    queue = [os.getpid()]
    while queue:
        pid = queue.pop()
        with contextlib.suppress(OSError):
            for task in os.listdir(f"/proc/{pid}/task"):
                with contextlib.suppress(OSError):
                    for child in Path(f"/proc/{pid}/task/{task}/children").read_text().split():
                        with contextlib.suppress(OSError):
                            line = Path(f"/proc/{child}/cmdline").read_bytes().replace(b"\0", b" ").decode()
                            found[int(child)] = line
                            queue.append(int(child))
    return found


def own_descendants() -> dict[int, str]:
    """Those of them that this library made."""
    return {pid: line for pid, line in descendants().items() if "prized_gym" in line}


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Each test ends every process that the library started for it."""
    before = set(own_descendants())
    yield
    gc.collect()
    deadline = time.monotonic() + 10
    while set(own_descendants()) - before:
        if time.monotonic() > deadline:
            left = {pid: line for pid, line in own_descendants().items() if pid not in before}
            pytest.fail(f"left running: {left}")
        time.sleep(0.02)

"""Progress bars for long waits: tqdm's, in a terminal or a notebook, off by a keyword."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

_PATIENCE = 2.0
"""Seconds before a wait counts as long."""


@contextmanager
def waiting(what: str, enabled: bool) -> Iterator[Callable[[], None]]:
    """Show how long something has been going on, once that is more than two seconds.

    Yields:
        A function to call now and then.
    """
    started = time.monotonic()
    bars: list[Any] = []

    def tick() -> None:
        if not enabled or time.monotonic() - started < _PATIENCE:
            return
        if not bars:
            from tqdm.auto import tqdm

            bars.append(tqdm(desc=what, bar_format="{desc}: {elapsed}", leave=False))
            bars[0].start_t -= time.monotonic() - started
        bars[0].refresh()

    try:
        yield tick
    finally:
        for bar in bars:
            bar.close()

"""Progress of long waits: a bar in a terminal or a notebook, a line now and then in a log file."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

_PATIENCE = 2.0
"""Seconds before a wait counts as long."""
_APART = 10.0
"""Seconds between two lines of a log at least; each comes after twice the time of the one before."""


class Bar(Protocol):
    """How far something of many parts has come, as shown to the user; used as a context manager."""

    def update(self, n: float = 1) -> Any:
        """Count ``n`` more parts as done."""

    def set_postfix_str(self, text: str, refresh: bool = True) -> None:
        """Set what is shown at the end of the line."""

    def close(self) -> None:
        """Show the last state and let go of the line."""

    def __enter__(self) -> Bar:
        """Return itself."""

    def __exit__(self, *error: object) -> None:
        """Close it."""


@contextmanager
def waiting(what: str, enabled: bool) -> Iterator[Callable[[], None]]:
    """Show how long something has been going on, once that is more than two seconds.

    Args:
        what: what is waited for, as shown.
        enabled: whether anything is shown.

    Yields:
        A function to call now and then.
    """
    started = time.monotonic()
    bars: list[Any] = []
    schedule = _Schedule()

    def tick() -> None:
        waited = time.monotonic() - started
        if not enabled or waited < _PATIENCE:
            return
        if not bars and _shows_bars():
            bars.append(_tqdm()(desc=what, bar_format="{desc}: {elapsed}", leave=False))
            bars[0].start_t -= waited
        if bars:
            bars[0].refresh()
        elif schedule.due():
            _write(f"{what}: {_duration(waited)}")

    try:
        yield tick
    finally:
        for each in bars:
            each.close()


def bar(total: int | None, desc: str, unit: str, enabled: bool) -> Bar:
    """Return a bar that is advanced part by part: tqdm's in a terminal or a notebook, else lines on stderr.

    Args:
        total: the number of parts; None where it is not known.
        desc: what it is, as shown.
        unit: what one part is called.
        enabled: whether anything is shown.
    """
    if enabled and not _shows_bars():
        return _Lines(total, desc, unit)
    shown: Bar = _tqdm()(total=total, desc=desc, unit=unit, disable=not enabled, miniters=1)
    return shown


def _tqdm() -> Any:
    """The class of bars, without the thread that watches over slow ones: these are refreshed in time by who updates them.

    It would outlast the bar, and a process with threads is not to be forked.
    """
    from tqdm.auto import tqdm

    return type("tqdm", (tqdm,), {"monitor_interval": 0})


class _Schedule:
    """When a line is due in a log: after two seconds, then each time the time doubles, ten seconds apart at least."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._next = self._started + _PATIENCE

    def due(self) -> bool:
        """Whether a line is due; if so, the next one is scheduled."""
        now = time.monotonic()
        if now < self._next:
            return False
        self._next = now + max(_APART, now - self._started)
        return True


class _Lines:
    """A bar for a log: a line now and then, and one at the end."""

    def __init__(self, total: int | None, desc: str, unit: str) -> None:
        self._total, self._desc, self._unit = total, desc, unit
        self._started = time.monotonic()
        self._schedule = _Schedule()
        self._done = 0.0
        self._written = 0.0
        self._postfix = ""
        self._closed = False

    def update(self, n: float = 1) -> None:
        self._done += n
        if self._schedule.due():
            self._show()

    def set_postfix_str(self, text: str, refresh: bool = True) -> None:
        self._postfix = text

    def close(self) -> None:
        if not self._closed and self._done != self._written:
            self._show()
        self._closed = True

    def __enter__(self) -> _Lines:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _show(self) -> None:
        self._written = self._done
        waited = time.monotonic() - self._started
        of = "" if self._total is None else f"/{self._total}"
        pace = f"{self._done / max(waited, 1e-9):.3g} {self._unit}/s"
        parts = [f"{self._done:g}{of} in {_duration(waited)}", pace, *filter(None, [self._postfix])]
        _write(f"{self._desc}: {', '.join(parts)}")


def _shows_bars() -> bool:
    """Whether a line can be redrawn where stderr goes: a terminal, or a notebook's cell."""
    try:
        if sys.stderr.isatty():
            return True
    except (AttributeError, ValueError):  # none, or closed
        return False
    shell = sys.modules.get("IPython")
    kernel = shell.get_ipython() if shell is not None else None
    return kernel is not None and "IPKernelApp" in kernel.config


def _write(line: str) -> None:
    """Write a line to stderr as a whole, unless there is nowhere to write it."""
    try:
        sys.stderr.write(line + "\n")
        sys.stderr.flush()
    except (AttributeError, ValueError, OSError):
        pass


def _duration(seconds: float) -> str:
    """Write a duration as tqdm does: ``mm:ss`` or ``h:mm:ss``."""
    minutes, rest = divmod(math.floor(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes:02d}:{rest:02d}"

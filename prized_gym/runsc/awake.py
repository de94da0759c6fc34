"""Stopping a sandbox while nobody uses it, and continuing it at its next use.

A sandbox without work still polls (2 or 3% of a core); with its process tree stopped it uses nothing, and answers some
4 ms after it is continued.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

from .errors import SandboxStateError


class Awake:
    """The state of one sandbox: running, stopped for idleness, or paused.

    Args:
        stop: has the supervisor stop the process tree; quick, in order, and never raises.
        resume: has the supervisor continue it; likewise.
        poke: has the hub look at its ticks again.
        idle_after: seconds without use after which the sandbox is stopped; None for never.

    Attributes:
        awaiting: the numbers of streams that sent something and have received no answer yet.
        stopped: whether the process tree is stopped.
        paused: whether it stays stopped until :meth:`resume`.
    """

    def __init__(
        self, stop: Callable[[], None], resume: Callable[[], None], poke: Callable[[], None], idle_after: float | None
    ) -> None:
        self._stop, self._resume, self._poke = stop, resume, poke
        self.idle_after = idle_after
        self.awaiting: set[int] = set()
        self.stopped = False
        self.paused = False
        self._holds = 0
        self._last = time.monotonic()
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def hold(self, *, even_paused: bool = False) -> Iterator[None]:
        """Keep the sandbox running while inside.

        Args:
            even_paused: run a sandbox that is paused, which is stopped again at the end.

        Raises:
            SandboxStateError: it is paused.
        """
        with self._lock:
            if self.paused and not even_paused:
                raise SandboxStateError("the sandbox is paused; resume() it first, or fork it")
            self._holds += 1
            self._continue()
        try:
            yield
        finally:
            with self._lock:
                self._holds -= 1
                self._last = time.monotonic()
                if self.paused and self._holds == 0 and not self.stopped:
                    self.stopped = True
                    self._stop()

    def touch(self) -> None:
        """Continue the sandbox if it was stopped for idleness, and count its idle time from here; cheap."""
        self._last = time.monotonic()
        if self.stopped and not self.paused:
            with self._lock:
                if not self.paused:
                    self._continue()

    def pause(self) -> None:
        """Stop the sandbox until :meth:`resume`, as soon as nobody holds it."""
        with self._lock:
            self.paused = True
            if self._holds == 0 and not self.stopped:
                self.stopped = True
                self._stop()

    def resume(self) -> None:
        """Let a paused sandbox go on."""
        with self._lock:
            self.paused = False
            self._last = time.monotonic()
            self._continue()

    def tick(self, now: float) -> float | None:
        """Stop the sandbox if it has been idle. Called in the hub's thread.

        Args:
            now: ``time.monotonic()``.

        Returns:
            Seconds after which to call again; None where nothing is to be watched.
        """
        if self.stopped or self.idle_after is None:
            return None
        if self._holds or self.awaiting or now - self._last < self.idle_after:
            return max(0.02, self.idle_after / 4)
        return max(0.02, self.idle_after / 4) if not self.idle() else None

    def idle(self) -> bool:
        """Stop the sandbox until its next use, unless it is in use; return whether it is stopped."""
        with self._lock:
            if self.stopped:
                return True
            self.stopped = True  # before looking: a stream marks itself first and looks at this second
            if self._holds or self.awaiting:
                self.stopped = False
                return False
            self._stop()
            return True

    def _continue(self) -> None:
        if self.stopped:
            self.stopped = False
            self._resume()
            self._poke()

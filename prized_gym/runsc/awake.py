"""Stopping a sandbox that nobody uses, and continuing it for whoever does.

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
    """Whether one sandbox runs, is stopped for idleness, or is paused.

    stop, resume: have the supervisor stop and continue the tree; quick, in order, and never raise
    poke: tell the hub that there is something to watch again
    """

    def __init__(
        self, stop: Callable[[], None], resume: Callable[[], None], poke: Callable[[], None], idle_after: float | None
    ) -> None:
        self._stop, self._resume, self._poke = stop, resume, poke
        self.idle_after = idle_after
        self.awaiting: set[int] = set()  # streams that sent and got no answer yet
        self.stopped = False
        self.paused = False
        self._holds = 0
        self._last = time.monotonic()
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def hold(self, *, even_paused: bool = False) -> Iterator[None]:
        """Keep the sandbox running while inside. SandboxStateError when it is paused, unless `even_paused`."""
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
        """Stop, and stay so until `resume`; as soon as nobody holds it."""
        with self._lock:
            self.paused = True
            if self._holds == 0 and not self.stopped:
                self.stopped = True
                self._stop()

    def resume(self) -> None:
        """Undo `pause`."""
        with self._lock:
            self.paused = False
            self._last = time.monotonic()
            self._continue()

    def tick(self, now: float) -> float | None:
        """Stop the sandbox if it has been idle; after how many seconds to ask again. In the hub's thread."""
        if self.stopped or self.idle_after is None:
            return None
        if self._holds or self.awaiting or now - self._last < self.idle_after:
            return max(0.02, self.idle_after / 4)
        return max(0.02, self.idle_after / 4) if not self.idle() else None

    def idle(self) -> bool:
        """Stop the sandbox until its next use, unless it is in use; whether it is stopped."""
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

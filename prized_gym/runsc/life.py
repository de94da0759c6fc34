"""The life of one sandbox on this machine: its state, its connections and its end."""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from .awake import Awake
from .connection import Link
from .errors import RunscError, SandboxDied, SandboxStateError
from .runtime import Runtime

State = Literal["running", "paused", "kept", "dead", "closed"]


class Life:
    """One sandbox from before its start to after its end. Thread-safe.

    It holds a reference of the runtime until :meth:`close`.

    Args:
        runtime: what it belongs to.
        id: unique.
        idle_after: seconds without use after which it is stopped until the next use; None for never.
        state: ``"running"`` for one that is to be started, ``"kept"`` for one that has ended and is on disk.

    Attributes:
        created_at: in seconds since the epoch.
        directory: of the sandbox alone; removed at its end.
        state: running (maybe paused; ``awake`` knows), kept, dead or closed.
        groups: its cgroups, by controller; empty before its start.
        link: the connections to its agent.
        awake: what stops it for idleness and pauses it.
    """

    def __init__(self, runtime: Runtime, id: str, idle_after: float | None, state: State = "running") -> None:
        self.runtime = runtime.enter()
        self.id = id
        self.directory = runtime.directory / "sandboxes" / id
        self.created_at = time.time()
        self.state: State = state
        self.groups: dict[str, Path] = {}
        self.link = Link(runtime.hub, self.directory / "c" / "a.sock", lambda reason: self._end_soon(reason))
        self.awake = Awake(
            lambda: runtime.notify("stop", id=id),
            lambda: runtime.notify("continue", id=id),
            runtime.hub.poke,
            idle_after,
        )
        self._callbacks: list[Callable[[str], None]] = []
        self._leaving = threading.Lock()  # taken once, and never given back

    def must_be(self, state: State) -> None:
        """Check the state, in the process that the sandbox belongs to.

        Raises:
            SandboxDied: it ended by itself. SandboxStateError: it is in another state, or belongs to another process.
        """
        if os.getpid() != self.runtime.pid:
            raise SandboxStateError(f"sandbox {self.id} belongs to the process that made it, not to a forked child")
        if self.state == state:
            return
        if self.state == "dead":
            raise SandboxDied(f"sandbox {self.id} ended: {self.link.death}")
        raise SandboxStateError(f"sandbox {self.id} is {self.state}")

    def on_death(self, callback: Callable[[str], None]) -> None:
        """Have ``callback(reason)`` called once, in a background thread, when it ends by itself; at once if it has."""
        self._callbacks.append(callback)
        if self.state == "dead" and callback in self._callbacks:
            self._call_back(self.link.death or "ended")

    def died(self, reason: str) -> None:
        """Clean up after a sandbox that ended by itself. Called in the hub's thread."""
        if self.state == "running":
            self.state = "dead"
        self.runtime.hub.ticks.pop(self.awake, None)
        self.link.died(reason)
        shutil.rmtree(self.directory / "c", ignore_errors=True)
        self._call_back(reason)

    def end(self, state: Literal["kept", "closed"]) -> None:
        """End the sandbox and wait for that, unless it has been; its directory goes.

        Args:
            state: what it is from here on.
        """
        if self.state in ("closed", "kept"):
            return
        was, self.state = self.state, state
        self.runtime.hub.ticks.pop(self.awake, None)
        if os.getpid() != self.runtime.pid or self.runtime.over:
            return
        if was != "dead":
            known = self.runtime.sandboxes.pop(self.id, None) is not None
            if known:
                with contextlib.suppress(RunscError, TimeoutError):
                    self.runtime.request("kill", id=self.id, reason=state).result(10)
            self.link.died(state)
        shutil.rmtree(self.directory, ignore_errors=True)

    def close(self) -> None:
        """End the sandbox unless it is kept, and release the runtime."""
        self.end("closed")
        if self._leaving.acquire(blocking=False):
            self.runtime.leave()

    def _end_soon(self, reason: str) -> None:
        """End the sandbox from the hub's thread, which must not wait."""
        self.runtime.request("kill", id=self.id, reason=reason)

    def _call_back(self, reason: str) -> None:
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            with contextlib.suppress(Exception):
                callback(reason)

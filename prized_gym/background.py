"""One event loop in one background thread for all channels of this process, and threads for calls that block."""

from __future__ import annotations

import asyncio
import os
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

_T = TypeVar("_T")

MOST_THREADS = 256
MOST_URGENT = 32
_IDLE_SECONDS = 10.0


class Threads:
    """Daemon threads for calls that block: a call that never returns does not keep the interpreter from ending.

    Args:
        most: how many may run at once; further calls wait their turn.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._waiting: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._changed = threading.Condition()
        self._idle = 0
        self._count = 0

    def submit(self, function: Callable[[], _T]) -> Future[_T]:
        """Have ``function`` called soon by one of the threads."""
        future: Future[_T] = Future()
        with self._changed:
            self._waiting.append((future, function))
            if self._idle >= len(self._waiting):
                self._changed.notify()
            elif self._count < self._most:
                self._count += 1
                threading.Thread(target=self._run, name="prized_gym-call", daemon=True).start()
        return future

    def _run(self) -> None:
        while True:
            with self._changed:
                self._idle += 1
                self._changed.wait_for(lambda: self._waiting, _IDLE_SECONDS)
                self._idle -= 1
                if not self._waiting:
                    self._count -= 1
                    return
                future, function = self._waiting.popleft()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)
            # Not kept until the next call: it may hold a whole sandbox.
            del future, function


class _Background:
    """The loop and the threads of one process."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.loop = asyncio.new_event_loop()
        self.threads = Threads(MOST_THREADS)
        # Apart, so that ending what hangs does not wait for what hangs.
        self.urgent = Threads(MOST_URGENT)
        self.thread = threading.Thread(target=self._serve, name="prized_gym-channels", daemon=True)
        self.thread.start()

    def _serve(self) -> None:
        while True:
            try:
                self.loop.run_forever()
            except (SystemExit, KeyboardInterrupt):
                # Raised by a user's own code, such as a protocol's. Its task has it; all others go on.
                continue
            return


_lock = threading.Lock()
_all: list[_Background] = []
"""The last is this process's; those before it came through a fork, and are not to be closed by garbage collection."""


def _background() -> _Background:
    if not _all or _all[-1].pid != os.getpid():
        with _lock:
            if not _all or _all[-1].pid != os.getpid():
                _all.append(_Background())
    return _all[-1]


def loop() -> asyncio.AbstractEventLoop:
    """The background loop, started on first use."""
    return _background().loop


def submit(function: Callable[[], _T], *, urgent: bool = False) -> Future[_T]:
    """Call ``function``, which may block, in a background thread; an ``urgent`` one must not block for long."""
    background = _background()
    return (background.urgent if urgent else background.threads).submit(function)


async def in_thread(function: Callable[[], _T], *, urgent: bool = False) -> _T:
    """Await the result of :func:`submit`, for coroutines of the background loop."""
    return await asyncio.wrap_future(submit(function, urgent=urgent))


def start(coroutine: Coroutine[Any, Any, _T]) -> Future[_T]:
    """Run a coroutine in the background loop."""
    return asyncio.run_coroutine_threadsafe(coroutine, loop())


def run(coroutine: Coroutine[Any, Any, _T], timeout: float | None = None) -> _T:
    """Run a coroutine in the background loop and wait for its result. An interrupt or a time-out cancels it.

    Raises:
        TimeoutError: it took longer than ``timeout`` seconds.
    """
    if threading.current_thread() is _background().thread:
        coroutine.close()
        raise RuntimeError("this would wait for the thread it runs in")
    future = start(coroutine)
    try:
        return future.result(timeout)
    except BaseException:
        future.cancel()
        raise


def _renew_lock() -> None:
    global _lock
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_lock)

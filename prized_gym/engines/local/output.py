"""What base processes and copies print: passed on to the trainer's own stdout and stderr, the tail of each kept."""

from __future__ import annotations

import codecs
import contextlib
import ctypes
import functools
import os
import selectors
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

TAIL_BYTES = 4096


class Stream:
    """One pipe that a base or a copy writes to.

    Args:
        name: ``"stdout"`` or ``"stderr"``: where what is read is passed on to.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.fd, self.write_fd = os.pipe()
        os.set_blocking(self.fd, False)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._tail: deque[bytes] = deque()
        self._kept = 0
        PUMP.add(self)

    def give_away(self) -> None:
        """Close this process's write end, once another process has it."""
        if self.write_fd >= 0:
            os.close(self.write_fd)
            self.write_fd = -1

    def tail(self) -> str:
        """The last few kilobytes written so far."""
        PUMP.drain(self)
        return b"".join(self._tail)[-TAIL_BYTES:].decode("utf-8", "replace")

    def close(self) -> None:
        """Pass on what is left and close."""
        PUMP.remove(self)
        self.give_away()

    def decode(self, data: bytes) -> str:
        """The text of what was read, a character cut in two kept for the next time."""
        return self._decoder.decode(data)

    def keep(self, data: bytes) -> None:
        """Add what was read to the tail, which drops its oldest parts once it is long enough without them."""
        self._tail.append(data)
        self._kept += len(data)
        while self._kept - len(self._tail[0]) >= TAIL_BYTES:
            self._kept -= len(self._tail.popleft())


class Pump:
    """One daemon thread that reads all streams; it sleeps while nothing is written.

    There is none while this process forks (a DataLoader, a pool): a fork of a process with threads may deadlock, which Python
    warns of from 3.12 on. It is started again straight after.
    """

    def __init__(self) -> None:
        self.resume = _pending_call(self._start)
        """Have the thread started again as soon as a fork is complete, in this process."""
        self.forget_all()

    def forget_all(self) -> None:
        """Begin anew: in a fork of this process, whose streams are not the fork's."""
        self._lock = threading.RLock()
        self._streams: dict[int, Stream] = {}
        self._selector: selectors.BaseSelector | None = None
        self._thread: threading.Thread | None = None
        self._wake_read = self._wake_write = -1
        self._pid = os.getpid()

    def pause(self) -> None:
        """End the thread, until :meth:`resume`: this process is about to fork."""
        thread = self._thread
        if thread is None or thread is threading.current_thread():
            return
        os.write(self._wake_write, b"x")
        # Not for ever: it may be writing to a stdout of the user's own that waits for the thread which forks.
        thread.join(1.0)
        if not thread.is_alive():
            self._thread = None
            _await_end(thread)

    def _start(self) -> None:
        with self._lock:
            if self._thread is not None or self._selector is None or not self._streams:
                return
            thread = threading.Thread(target=self._run, args=(self._selector,), name="prized_gym-output", daemon=True)
            # Where the system refuses one, the next stream tries again; until then reading is left to :meth:`drain`.
            with contextlib.suppress(RuntimeError):
                thread.start()
                self._thread = thread

    def add(self, stream: Stream) -> None:
        """Show what comes from a stream, until it ends."""
        with self._lock:
            if self._pid != os.getpid():
                # A fork that Python knows nothing of.
                self.forget_all()
            if self._selector is None:
                self._selector = selectors.DefaultSelector()
                self._wake_read, self._wake_write = os.pipe()
                os.set_blocking(self._wake_read, False)
                self._selector.register(self._wake_read, selectors.EVENT_READ)
            self._streams[stream.fd] = stream
            self._selector.register(stream.fd, selectors.EVENT_READ)
            self._start()

    def remove(self, stream: Stream) -> None:
        """Read what a stream still holds, and close it."""
        with self._lock:
            if self._streams.get(stream.fd) is not stream:
                return
            if self._read(stream):
                self._forget(stream.fd)
            del self._streams[stream.fd]
            os.close(stream.fd)
            stream.fd = -1

    def drain(self, stream: Stream) -> None:
        """Read what has been written so far."""
        with self._lock:
            if self._streams.get(stream.fd) is stream:
                self._read(stream)
                self._start()

    def _run(self, selector: selectors.BaseSelector) -> None:
        while True:
            for key, _ in selector.select():
                if key.fd == self._wake_read:
                    os.read(key.fd, 1)
                    return
                with self._lock:
                    stream = self._streams.get(key.fd)
                    if stream is not None:
                        self._read(stream)

    def _forget(self, fd: int) -> None:
        if self._selector is not None:
            with contextlib.suppress(KeyError):
                self._selector.unregister(fd)

    def _read(self, stream: Stream) -> bool:
        """Read and pass on all there is; False at the end of the stream, which is then watched no more."""
        while True:
            try:
                data = os.read(stream.fd, 65536)
            except BlockingIOError:
                return True
            except OSError:
                data = b""
            if not data:
                self._forget(stream.fd)
                return False
            stream.keep(data)
            _emit(stream.name, stream.decode(data))


def _emit(name: str, text: str) -> None:
    target = getattr(sys, name, None)
    if target is None:
        return
    # Whatever the user has put in the place of stdout must not end the thread that empties the pipes.
    with contextlib.suppress(Exception):
        try:
            target.write(text)
        except UnicodeEncodeError:
            # Under another PYTHONIOENCODING or locale: better a few escapes than nothing.
            encoding = getattr(target, "encoding", None) or "ascii"
            target.write(text.encode(encoding, "backslashreplace").decode(encoding))
        flush = getattr(target, "flush", None)
        if callable(flush):
            flush()


def _await_end(thread: threading.Thread) -> None:
    """Python lets go of a thread a moment before the system does, which counts them too."""
    place, deadline = f"/proc/self/task/{thread.native_id}", time.monotonic() + 1.0
    while os.path.exists(place) and time.monotonic() < deadline:
        time.sleep(1e-4)


def _pending_call(function: Callable[[], None]) -> Callable[[], None]:
    """A callable that has ``function`` called by the interpreter, once what it is doing at the time is complete.

    The hook that Python runs after a fork is a part of that fork: a thread that it starts is still warned of. No part of the
    callable is written in Python, whose interpreter would take the occasion at once.
    """
    try:
        schedule = ctypes.pythonapi.Py_AddPendingCall
    except AttributeError:
        return function

    def call(_: Any) -> int:
        with contextlib.suppress(Exception):
            function()
        return 0

    return functools.partial(schedule, ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(call), None)


PUMP = Pump()
if hasattr(os, "register_at_fork"):
    # A fork of the trainer may find the lock taken by a thread it does not have.
    os.register_at_fork(before=PUMP.pause, after_in_parent=PUMP.resume, after_in_child=PUMP.forget_all)

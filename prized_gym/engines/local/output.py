"""What base processes and copies print: passed on to the trainer's own stdout and stderr, the tail of each kept."""

from __future__ import annotations

import codecs
import contextlib
import os
import selectors
import sys
import threading
from collections import deque

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
    """One daemon thread that reads all streams; it sleeps while nothing is written."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._streams: dict[int, Stream] = {}
        self._selector: selectors.BaseSelector | None = None
        self._pid = -1

    def forget_all(self) -> None:
        """Begin anew, in a fork of this process."""
        self._lock = threading.RLock()
        self._streams = {}

    def add(self, stream: Stream) -> None:
        """Read a stream from now on, until it ends or is removed."""
        with self._lock:
            if self._pid != os.getpid():
                # The first stream of this process, or of a fork of one that had streams: those are not this process's.
                self._streams = {}
                self._selector = selectors.DefaultSelector()
                self._pid = os.getpid()
                threading.Thread(
                    target=self._run, args=(self._selector,), name="prized_gym-output", daemon=True
                ).start()
            assert self._selector is not None
            self._streams[stream.fd] = stream
            self._selector.register(stream.fd, selectors.EVENT_READ)

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

    def _run(self, selector: selectors.BaseSelector) -> None:
        while True:
            for key, _ in selector.select():
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
        target.write(text)
        flush = getattr(target, "flush", None)
        if callable(flush):
            flush()


PUMP = Pump()
if hasattr(os, "register_at_fork"):
    # A fork of the trainer may find the lock taken by a thread it does not have.
    os.register_at_fork(after_in_child=PUMP.forget_all)

"""Waking copies and counting their answers, with eventfds.

Measured on two cores with 64 copies: a broadcast through one semaphore eventfd beats an eventfd per copy, futexes,
pipes and spinning. Two such semaphores are used in turn, so that a fast copy cannot take a slow one's token.
"""

from __future__ import annotations

import contextlib
import os
import select
from collections.abc import Callable


class Semaphore:
    """A counting semaphore shared between processes.

    Args:
        fd: the eventfd that another process handed over; None makes one.
    """

    def __init__(self, fd: int | None = None) -> None:
        self.fd = os.eventfd(0, os.EFD_SEMAPHORE | os.EFD_CLOEXEC) if fd is None else fd

    def post(self, count: int) -> None:
        """Let ``count`` waiters through."""
        os.eventfd_write(self.fd, count)

    def taker(self) -> Callable[[], object]:
        """A function that waits for one token."""
        fd, read = self.fd, os.read
        return lambda: read(fd, 8)

    def drain(self) -> None:
        """Take whatever tokens are left. Only while nobody else waits."""
        poller = select.poll()
        poller.register(self.fd, select.POLLIN)
        while poller.poll(0):
            os.read(self.fd, 8)

    def close(self) -> None:
        """Close the descriptor. Calling it again does nothing."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)


class CompletionCounter:
    """Counts answers: many writers add, one reader collects.

    Args:
        fd: the eventfd that another process handed over; None makes one.
    """

    def __init__(self, fd: int | None = None) -> None:
        self.fd = os.eventfd(0, os.EFD_CLOEXEC) if fd is None else fd

    def adder(self) -> Callable[[], object]:
        """A function that adds one."""
        fd, write, one = self.fd, os.write, (1).to_bytes(8, "little")
        return lambda: write(fd, one)

    def collect(self) -> None:
        """Set the count back to zero; only when it is readable."""
        os.read(self.fd, 8)

    def close(self) -> None:
        """Close the descriptor. Calling it again does nothing."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)


class Signals:
    """What a fleet's copies are woken and counted with: two semaphores and one counter.

    Args:
        fds: the descriptors that another process handed over, in the order of :attr:`fds`; None makes them.
    """

    def __init__(self, fds: list[int] | None = None) -> None:
        first, second, counter = fds if fds is not None else (None, None, None)
        with contextlib.ExitStack() as undo:
            made = [undo.enter_context(contextlib.closing(Semaphore(fd))) for fd in (first, second)]
            self.semaphores = (made[0], made[1])
            self.counter = CompletionCounter(counter)
            undo.pop_all()

    @property
    def fds(self) -> list[int]:
        """The descriptors, to be handed to another process."""
        return [*(each.fd for each in self.semaphores), self.counter.fd]

    def close(self) -> None:
        """Close every descriptor."""
        for each in (*self.semaphores, self.counter):
            each.close()

"""Waking processes and counting their answers: eventfds where there are any, pipes elsewhere.

Measured on two cores with 64 copies: a broadcast through one semaphore eventfd beats an eventfd per copy, futexes,
pipes and spinning. Two such bells are used in turn, so that a fast copy cannot take a slow one's token.
"""

from __future__ import annotations

import os
import select
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TypeAlias


class Bell(ABC):
    """A counting semaphore shared between processes."""

    @abstractmethod
    def fds(self) -> list[int]:
        """The descriptors to hand to another process, which passes them to :func:`bell_from`."""

    @abstractmethod
    def ring(self, count: int) -> None:
        """Let ``count`` waiters through."""

    @abstractmethod
    def drain(self) -> None:
        """Take whatever tokens are left. Only while nobody else waits."""

    def close(self) -> None:
        """Close the descriptors."""
        for fd in self.fds():
            os.close(fd)


class EventfdBell(Bell):
    """A semaphore eventfd (Linux, Python 3.10)."""

    def __init__(self, fd: int | None = None) -> None:
        self.fd = os.eventfd(0, os.EFD_SEMAPHORE | os.EFD_CLOEXEC) if fd is None else fd

    def fds(self) -> list[int]:
        return [self.fd]

    def ring(self, count: int) -> None:
        os.eventfd_write(self.fd, count)

    def taker(self) -> Callable[[], object]:
        """A function that waits for one token."""
        fd, read = self.fd, os.read
        return lambda: read(fd, 8)

    def drain(self) -> None:
        _drain(self.fd, 8)


class PipeBell(Bell):
    """A pipe with one byte per token."""

    def __init__(self, fds: tuple[int, int] | None = None) -> None:
        self.read_fd, self.write_fd = os.pipe() if fds is None else fds

    def fds(self) -> list[int]:
        return [self.read_fd, self.write_fd]

    def ring(self, count: int) -> None:
        data = b"\1" * count
        while data:
            data = data[os.write(self.write_fd, data) :]

    def taker(self) -> Callable[[], object]:
        """A function that waits for one token."""
        fd, read = self.read_fd, os.read
        return lambda: read(fd, 1)

    def drain(self) -> None:
        _drain(self.read_fd, 65536)


class EventfdTally:
    """Counts answers: many writers add, one reader collects."""

    def __init__(self, fd: int | None = None) -> None:
        self.fd = os.eventfd(0, os.EFD_CLOEXEC) if fd is None else fd

    def fds(self) -> list[int]:
        return [self.fd]

    def adder(self) -> Callable[[], object]:
        """A function that adds one."""
        fd, write, one = self.fd, os.write, (1).to_bytes(8, "little")
        return lambda: write(fd, one)

    def collect(self) -> None:
        """Set the count back to zero; only when it is readable."""
        os.read(self.fd, 8)

    def close(self) -> None:
        os.close(self.fd)


class PipeTally:
    """Counts answers through a pipe."""

    def __init__(self, fds: tuple[int, int] | None = None) -> None:
        self.fd, self.write_fd = os.pipe() if fds is None else fds

    def fds(self) -> list[int]:
        return [self.fd, self.write_fd]

    def adder(self) -> Callable[[], object]:
        """A function that adds one."""
        fd, write = self.write_fd, os.write
        return lambda: write(fd, b"\1")

    def collect(self) -> None:
        """Set the count back to zero; only when it is readable."""
        os.read(self.fd, 65536)

    def close(self) -> None:
        for fd in self.fds():
            os.close(fd)


AnyBell: TypeAlias = EventfdBell | PipeBell
AnyTally: TypeAlias = EventfdTally | PipeTally


def have_eventfd() -> bool:
    """Whether this system has eventfds; setting ``PRIZED_GYM_NO_EVENTFD`` says it has none."""
    return hasattr(os, "eventfd") and not os.environ.get("PRIZED_GYM_NO_EVENTFD")


def make() -> tuple[list[AnyBell], AnyTally]:
    """Two bells and a tally."""
    if have_eventfd():
        return [EventfdBell(), EventfdBell()], EventfdTally()
    return [PipeBell(), PipeBell()], PipeTally()


def adopt(fds: list[int]) -> tuple[list[AnyBell], AnyTally]:
    """The bells and the tally whose descriptors (in the order of :func:`all_fds`) another process handed over."""
    if len(fds) == 3:
        return [EventfdBell(fds[0]), EventfdBell(fds[1])], EventfdTally(fds[2])
    a, b, c, d, e, f = fds
    return [PipeBell((a, b)), PipeBell((c, d))], PipeTally((e, f))


def all_fds(bells: list[AnyBell], tally: AnyTally) -> list[int]:
    """The descriptors of two bells and a tally."""
    return [*bells[0].fds(), *bells[1].fds(), *tally.fds()]


def _drain(fd: int, size: int) -> None:
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    while poller.poll(0):
        os.read(fd, size)

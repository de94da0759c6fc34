"""A fleet's connection to the base process it forks: requests go there, answers and deaths come back."""

from __future__ import annotations

import contextlib
import pickle
import socket
from collections.abc import Callable
from typing import Protocol

from prized_gym.engines.local import framing
from prized_gym.engines.local.semaphores import Signals
from prized_gym.engines.local.shared_memory import Block
from prized_gym.errors import BaseDiedError


class BaseLink:
    """One fleet's socket to one base process.

    Args:
        sock: the socket; the base has the other end.
        died: the error that says how the base process ended.

    Attributes:
        error: why the base is not to be reached any more; None while it is.
    """

    def __init__(self, sock: socket.socket, died: Callable[[], BaseDiedError]) -> None:
        self.sock = sock
        self.error: BaseDiedError | None = None
        self._died = died

    def send(self, message: object, fds: list[int] | None = None) -> None:
        """Send a message.

        Raises:
            BaseDiedError: the base is gone.
        """
        if self.error is not None:
            raise self.error
        try:
            framing.send(self.sock, pickle.dumps(message), fds)
        except (framing.Hangup, OSError):
            raise self.lose() from None

    def receive(self) -> object:
        """Receive a message.

        Raises:
            BaseDiedError: the base is gone.
        """
        if self.error is not None:
            raise self.error
        try:
            return pickle.loads(framing.receive(self.sock))
        except (framing.Hangup, OSError):
            raise self.lose() from None

    def readable(self, deadline: float | None) -> bool:
        """Wait until there is something to receive; False if ``deadline`` (``time.monotonic()``) passed first."""
        return self.error is None and framing.wait_readable(self.sock, deadline)

    def lose(self, error: BaseDiedError | None = None) -> BaseDiedError:
        """Give the base up, for the reason given or because it ended; returns why."""
        if self.error is None:
            self.error = error or self._died()
        return self.error

    def shut_down(self) -> None:
        """Have the base let this fleet go. The descriptor stays, since another thread may be waiting on it."""
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)

    def hang_up(self, deadline: float) -> None:
        """Have the base kill this fleet's copies, and wait until they have ended, or ``deadline`` has passed.

        Nothing is asked, and nothing that is on its way is read as a message: an interrupt may have cut one in two.
        """
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_WR)
            # The base closes its end when the last copy has ended.
            while framing.wait_readable(self.sock, deadline) and self.sock.recv(65536):
                pass
        self.close()

    def close(self) -> None:
        """Close the socket."""
        self.sock.close()


class Joinable(Protocol):
    """A base, as its fleets see it.

    Attributes:
        known: the keys of the definitions by value that its copies have from it, as :mod:`prized_gym.by_value` gives them.
    """

    known: set[str]

    def revive(self) -> None:
        """Build the base process anew if it has died."""

    def join(self, size: int, block: Block, signals: Signals) -> BaseLink:
        """Have the base process take part in a fleet.

        Raises:
            BaseDiedError: it is gone.
        """

"""Waking copies and learning who has finished: who is at work, who waits where, and on what this process waits."""

from __future__ import annotations

import select
import socket
import threading
import time

from prized_gym.engines.local import processes
from prized_gym.engines.local.semaphores import Signals
from prized_gym.engines.local.shared_memory import LISTEN_SOCKET, Block

_SETTLED = 4
"""After so many full batches in a row the copies are woken by semaphore, which one partial batch undoes."""
_PIN_BELOW = 400e-6
_UNPIN_ABOVE = 2e-3
"""Seconds of one core per copy-step. Cheap copies are bound by the scheduler, and gain when each stays on its core (measured:
a quarter with 8 copies on 2 cores, a half with 64); dear ones are better off where there is room."""


class Signalling:
    """How the copies of one fleet are woken, and how they say that they are done.

    A batch of all copies posts a semaphore once per copy; the copies wait on one of two semaphores in turn. For anything
    that concerns some copies only, all are first told to wait on their own sockets.

    Attributes:
        alive: a byte per copy, 1 while it exists.
        begun: a byte per copy, 1 from when something is begun until the fleet has returned it.
        ops, busy, flags: a byte per copy, as in :class:`~prized_gym.engines.local.shared_memory.Block`.
        none: what a byte per copy looks like when none is set.
        counter: what copies add one to when they are done.
        poller: watches the counter, and the base's socket.
        timed: when the batch that is being timed began; 0.0 for none.
    """

    def __init__(self, size: int, block: Block, signals: Signals, pin: bool | None) -> None:
        self.alive = bytearray(size)
        self.begun = bytearray(size)
        self.none = bytes(size)
        self.ops = block.ops.data
        self.busy = block.busy.data
        self.flags = block.flags.data
        self.counter = signals.counter
        self.nudge = signals.counter.adder()
        self.poller = select.poll()
        self.poller.register(self.counter.fd, select.POLLIN)
        self.timed = 0.0
        self._semaphores = signals.semaphores
        self._ones = b"\1" * size
        self._each_view = block.each.data
        self._each = False
        self._fence = threading.Lock()
        self._listen_view = block.listen.data
        self._listen = LISTEN_SOCKET
        self._full_batches = 0
        self._strays = False
        self._pinning = Pinning(size, block, pin)

    def watch(self, sock: socket.socket) -> None:
        """Wake up for what comes on ``sock`` too."""
        self.poller.register(sock, select.POLLIN)

    def ignore(self, sock: socket.socket) -> None:
        """Wake up for what comes on ``sock`` no more."""
        self.poller.unregister(sock)

    # Copies that come and go

    def admit(self, index: int) -> None:
        """Copy ``index`` exists from here on, and waits on its socket."""
        self.alive[index] = 1

    def drop(self, index: int) -> None:
        """Copy ``index`` does not exist any more."""
        self.alive[index] = 0
        self.busy[index] = 0
        # An answer that came too late belongs to nobody.
        self.flags[index] = 0
        self._strays = True
        # The last copy to finish wakes this process; that one may have finished just before.
        self.nudge()

    def forget(self, index: int) -> None:
        """What copy ``index`` had begun is not waited for any more."""
        self.begun[index] = 0
        self.busy[index] = 0
        self.flags[index] = 0

    def start_over(self) -> None:
        """Nobody is left: whoever comes next waits on a socket, and finds no token of those before."""
        self._listen_view[0] = self._listen = LISTEN_SOCKET
        self._full_batches = 0
        self._drain()

    # Who waits where

    def post(self) -> bool:
        """Wake every copy for the next batch; False if they wait on their sockets and must be sent something."""
        if self._strays:
            self._drain()
        listen = self._listen
        if not listen:
            return False
        self.begun[:] = self._ones
        self.busy[:] = self.alive
        if self._each:
            self._each_view[0] = self._each = False
        self._listen_view[0] = self._listen = 3 - listen
        self.timed = time.perf_counter()
        self._semaphores[listen - 1].post(self.alive.count(1))
        return True

    def note_full_batch(self) -> None:
        """Another batch of all copies went by socket: after a few they move to the semaphores."""
        self._full_batches += 1
        if self._full_batches > _SETTLED:
            self._listen_view[0] = self._listen = 1

    @property
    def by_socket(self) -> bool:
        """Whether every copy waits on its socket, or will when it has finished."""
        return not self._listen

    def call_in(self, noop: int) -> bool:
        """Send every copy, all of which are idle, to its socket: they are busy with ``noop`` until they are there.

        Returns:
            False if they wait there already.
        """
        self._full_batches = 0
        listen = self._listen
        if not listen:
            return False
        if self._strays:
            self._drain()
        self.ops[:] = bytes([noop]) * len(self.none)
        self.busy[:] = self.alive
        self._listen_view[0] = self._listen = LISTEN_SOCKET
        self._semaphores[listen - 1].post(self.alive.count(1))
        return True

    def called_in(self) -> None:
        """Every copy waits on its socket: what tokens are left are for nobody."""
        self._drain()

    def _drain(self) -> None:
        """Take the tokens that dead copies left. Only while every copy is idle."""
        self._strays = False
        for number, semaphore in enumerate(self._semaphores):
            if self._listen != number + 1:
                semaphore.drain()

    # Who has finished

    def one_by_one(self) -> None:
        """Have each copy of the batch at work say that it is done: not all of them are waited for together."""
        if self._listen and not self._each:
            self._each_view[0] = self._each = True
            # A copy sees this before it looks whether to say so, or is seen to have finished: it does the same in reverse.
            self._fence.acquire(False)
            self._fence.release()

    def finished(self) -> list[int]:
        """The copies whose work is done and has not been returned."""
        busy = self.busy
        return [index for index, begun in enumerate(self.begun) if begun and not busy[index]]

    def note_time(self) -> None:
        """A timed batch is over."""
        self._pinning.note(time.perf_counter() - self.timed)
        self.timed = 0.0


class Pinning:
    """Decides from what full batches cost whether each copy should stay on one core.

    Args:
        size: how many copies.
        block: where they read the decision.
        pin: the decision, if the user made it.
    """

    def __init__(self, size: int, block: Block, pin: bool | None) -> None:
        self._view = block.pinned.data
        self._view[0] = bool(pin)
        self._size = size
        self._cores = max(1, len(processes.cores()))
        self._open = pin is None and size >= 2 * self._cores > 2
        self._seconds = 0.0

    def note(self, seconds: float) -> None:
        """A full batch took so long."""
        self._seconds = seconds if not self._seconds else 0.9 * self._seconds + 0.1 * seconds
        if self._open:
            each = self._seconds * self._cores / self._size
            if self._view[0]:
                if each > _UNPIN_ABOVE:
                    self._view[0] = 0
            elif each < _PIN_BELOW:
                self._view[0] = 1

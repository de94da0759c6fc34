"""Which processes the copies of a fleet are: those that live, those on their way out, and why the others are gone."""

from __future__ import annotations

import socket
import time
from dataclasses import dataclass, field

from prized_gym.engines.local import processes
from prized_gym.engines.local.output import Stream
from prized_gym.interface.failure import Failure, not_forked

GRACE = 5.0
"""Seconds a copy may take over ``env.close()`` when it is replaced or its fleet is closed."""


@dataclass
class LocalCopy:
    """One copy, as the trainer holds it.

    Attributes:
        sock: what it is sent commands on; it ends when this closes.
        stderr: what it writes there.
        known: the keys of the definitions by value that it has, as :mod:`prized_gym.by_value` gives them.
        pid: 0 until it is known.
        made: when it was begun to be made (``time.monotonic()``).
    """

    sock: socket.socket
    stderr: Stream
    known: set[str] = field(default_factory=set)
    pid: int = 0
    made: float = field(default_factory=time.monotonic)

    def kill(self) -> None:
        """Kill its process, if that is known."""
        if self.pid:
            processes.kill(self.pid)

    def close(self) -> None:
        """Close what the trainer holds of it."""
        self.sock.close()
        self.stderr.close()


class Roster:
    """The copies of one fleet.

    Attributes:
        live: by index, the copies that exist.
        gone: by index, why there is no such copy.
    """

    def __init__(self, size: int) -> None:
        self.live: dict[int, LocalCopy] = {}
        self.gone: dict[int, Failure] = {index: not_forked(index) for index in range(size)}
        self._parting: list[LocalCopy] = []
        self._leaving: dict[int, tuple[LocalCopy, float]] = {}
        self._unclaimed: dict[int, int] = {}

    def admit(self, index: int, copy: LocalCopy) -> None:
        """Copy ``index`` exists from here on."""
        self.live[index] = copy
        self.gone.pop(index, None)

    def expect(self) -> None:
        """Copies whose pids are not known yet may die from here on; what is known of unknown pids is out of date."""
        self._unclaimed.clear()

    def note_pid(self, index: int, pid: int) -> int | None:
        """Copy ``index`` is the process ``pid``; the status it ended with, if that came before."""
        self.live[index].pid = pid
        return self._unclaimed.pop(pid, None)

    def ended(self, pid: int, status: int) -> int | None:
        """Process ``pid`` has ended; which live copy it was, None if it is none or one that was let go."""
        for index, copy in self.live.items():
            if copy.pid == pid:
                return index
        if pid in self._leaving:
            self._leaving.pop(pid)[0].close()
            return None
        for copy in self._parting:
            if copy.pid == pid:
                self._parting.remove(copy)
                copy.close()
                return None
        # Perhaps a copy whose pid is not known here yet.
        self._unclaimed[pid] = status
        return None

    def remove(self, index: int, why: Failure) -> None:
        """Copy ``index`` does not exist any more."""
        copy = self.live.pop(index, None)
        if copy is not None:
            copy.close()
        self.gone[index] = why

    def where(self, index: int) -> str:
        """The pid of copy ``index``, for messages."""
        copy = self.live.get(index)
        return self.gone[index].where if copy is None else f"pid {copy.pid}"

    # Copies that are let go

    def part(self, index: int) -> None:
        """Let the idle copy ``index`` go, at the next :meth:`dismiss`."""
        copy = self.live.pop(index, None)
        if copy is not None:
            self._parting.append(copy)
        self.gone[index] = not_forked(index)

    def dismiss(self) -> None:
        """Let the copies that were replaced end: after the new ones have answered, which a caller waits for."""
        for copy in self._parting:
            # The copy sees its socket close, closes its environment and ends.
            copy.sock.close()
            if copy.pid:
                self._leaving[copy.pid] = (copy, time.monotonic() + GRACE)
            else:
                copy.stderr.close()
        self._parting.clear()

    @property
    def parting(self) -> bool:
        """Whether there is somebody to :meth:`dismiss`."""
        return bool(self._parting)

    @property
    def leaving(self) -> bool:
        """Whether some that were dismissed have not ended yet."""
        return bool(self._leaving)

    def hurry(self, at_once: bool = False) -> None:
        """Kill those that were dismissed and take too long to end; all of them if ``at_once``."""
        now = time.monotonic()
        for pid, (_, deadline) in self._leaving.items():
            if at_once or now > deadline:
                processes.kill(pid)

    def forget_leavers(self) -> None:
        """Nobody will tell when those that were let go have ended."""
        for copy in (*self._parting, *(leaver for leaver, _ in self._leaving.values())):
            copy.close()
        self._parting.clear()
        self._leaving.clear()

    def kill_all(self) -> bool:
        """Kill everybody whose pid is known, once; whether there is anybody."""
        everybody = [*self.live.values(), *self._parting, *(leaver for leaver, _ in self._leaving.values())]
        for copy in everybody:
            copy.kill()
            # It may be another process's by the time this is called again.
            copy.pid = 0
        return bool(everybody)

    def close(self) -> None:
        """Kill and forget everybody."""
        self.kill_all()
        self.forget_leavers()
        for index in list(self.live):
            self.remove(index, not_forked(index))

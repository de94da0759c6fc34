"""Which processes the copies of a fleet are: those that live, those on their way out, and why the others are gone."""

from __future__ import annotations

import socket
import time
from collections.abc import Container
from dataclasses import dataclass, field

from prized_gym.engines.local import processes
from prized_gym.engines.local.output import Stream
from prized_gym.interface.failure import Failure, not_forked

GRACE = 5.0
"""Seconds that anything but the environment's own code may take."""

CLOSE_TIMEOUT = 30.0
"""Seconds that ``env.close()`` may take, in the copies and in the base, unless the user says."""


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
        self._leaving: dict[int, tuple[int, LocalCopy]] = {}
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
            self._leaving.pop(pid)[1].close()
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

    def dismiss(self, index: int) -> None:
        """Let the idle copy ``index`` go: it sees its socket close, closes its environment and ends."""
        copy = self.live.pop(index, None)
        if copy is not None:
            copy.sock.close()
            if copy.pid:
                self._leaving[copy.pid] = (index, copy)
            else:
                copy.stderr.close()
        self.gone[index] = not_forked(index)

    def leaving(self, indices: Container[int]) -> dict[int, int]:
        """Those of the copies ``indices`` that were dismissed and have not ended yet: their pids, and which they were."""
        return {pid: index for pid, (index, _) in self._leaving.items() if index in indices}

    def forget_leavers(self) -> None:
        """Nobody will tell when those that were let go have ended."""
        for _, leaver in self._leaving.values():
            leaver.close()
        self._leaving.clear()

    def kill_all(self) -> bool:
        """Kill everybody whose pid is known, once; whether there is anybody."""
        everybody = [*self.live.values(), *(leaver for _, leaver in self._leaving.values())]
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

"""What the processes of a sandbox have used."""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass

from . import cgroups
from .errors import RunscError
from .life import Life


@dataclass(frozen=True)
class Used:
    """What a sandbox has used; nan where that is not known.

    Attributes:
        cpu_seconds: CPU time of all its processes on this machine, gVisor's own included.
        memory: bytes held at present.
    """

    cpu_seconds: float = math.nan
    memory: float = math.nan


class Meter:
    """Measures one sandbox, and remembers what it read last.

    Args:
        life: the sandbox's.
    """

    def __init__(self, life: Life) -> None:
        self._life = life
        self._last = Used()

    def read(self) -> Used:
        """Measure without waking the sandbox; of one that does not run, return what was last seen."""
        if self._life.state == "running":
            seconds, memory = cgroups.used(self._life.groups)
            if seconds is None or memory is None:
                with contextlib.suppress(RunscError, TimeoutError):
                    counted = self._life.runtime.request("usage", id=self._life.id).result(2)
                    seconds = counted["seconds"] if seconds is None else seconds
                    memory = counted["memory"] if memory is None else memory
            if seconds is not None and memory is not None:
                self._last = Used(seconds, memory)
        return self._last

"""Who has used up the time that a fleet's limits give, by what each copy was asked to do."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from prized_gym.calls import RANDOM_STATE
from prized_gym.engines.local.shared_memory import KEPT, RESETTING
from prized_gym.interface import commands
from prized_gym.interface.commands import Call, Command, Reset
from prized_gym.interface.deadlines import Deadlines
from prized_gym.interface.fleet import TimeLimits


class Watch:
    """The time limits of one fleet at work.

    Args:
        limits: what it enforces.

    Attributes:
        limits: those.
        deadlines: who must be done by when.
    """

    def __init__(self, limits: TimeLimits) -> None:
        self.limits = limits
        self.deadlines = Deadlines()
        self.limited = limits.step is not None or limits.reset is not None

    def batch(self, indices: Sequence[int], ops: bytes) -> None:
        """A batch has begun: ``ops`` has an operation for each of ``indices``."""
        if not self.limited:
            return
        since = time.monotonic()
        if commands.RESET not in ops:
            self.deadlines.begin_all(indices, self.limits.step, since)
            return
        for index, op in zip(indices, ops, strict=True):
            self.deadlines.begin(index, self.limits.reset if op == commands.RESET else self.limits.step, since)

    def commands(self, commands: Mapping[int, Command]) -> None:
        """Commands have begun. Only resets have a limit, with what an unseeded one asks the copy before."""
        if not self.limited:
            return
        since = time.monotonic()
        for index, command in commands.items():
            resets = isinstance(command, Reset) or (isinstance(command, Call) and command.name == RANDOM_STATE)
            self.deadlines.begin(index, self.limits.reset if resets else None, since)

    def first_command(self, index: int, since: float) -> None:
        """The first command of a new fork begins; its fork began at ``since``."""
        if self.limited:
            self.deadlines.begin(index, self.limits.reset, since)

    def overdue(self, busy: memoryview, ops: memoryview) -> dict[int, float]:
        """The copies that are still ``busy`` past their limit, each with that limit in seconds.

        A step that has gone on to its reset is given the time of both.
        """
        found: dict[int, float] = {}
        step, reset = self.limits.step, self.limits.reset
        for index, limit in self.deadlines.overdue(time.monotonic()).items():
            if not busy[index]:
                self.deadlines.done(index)
            elif busy[index] in (RESETTING, KEPT) and ops[index] == commands.STEP_RESET and limit == step:
                self.deadlines.extend(index, None if reset is None else limit + reset)
            else:
                found[index] = limit
                self.deadlines.done(index)
        return found

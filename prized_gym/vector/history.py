"""What the recent episodes of a vector environment did and cost."""

from __future__ import annotations

import math
import time
from collections import deque
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from prized_gym.html import table
from prized_gym.interface.fleet import Usage

KEPT = 1000

_NOTHING = Usage(0.0, 0.0, 0.0)


class Episode(NamedTuple):
    """One episode in one copy, as ``ForkedVectorEnv.history()`` gives it.

    Attributes:
        copy: the copy's index.
        seed: the seed it was reset with; None for an episode that carried on with its copy's random state.
        length: in steps.
        reward: the sum of its rewards.
        seconds: wall-clock time from its reset to its last step.
        vcpu_seconds: CPU time of the copy, in seconds; nan where the engine cannot tell.
        gb_seconds: memory held by the copy (1e9 bytes) times ``seconds``; nan where the engine cannot tell.
        cost_usd: what the engine's provider bills for it, in US dollars; nan where nobody bills.
        failure: why it was cut short, or None.
    """

    copy: int
    seed: int | None
    length: int
    reward: float
    seconds: float
    vcpu_seconds: float
    gb_seconds: float
    cost_usd: float
    failure: str | None = None

    def _repr_html_(self) -> str:
        return table("Episode", self._asdict())


class EpisodeLog:
    """Keeps count of the episodes under way, and the latest finished ones.

    Args:
        count: how many copies.

    Attributes:
        returns, lengths: of the episodes under way, float64 and int64 of shape ``(count,)``.
        finished: the latest ones, oldest first.
    """

    def __init__(self, count: int) -> None:
        self.returns: npt.NDArray[np.float64] = np.zeros(count, dtype=np.float64)
        self.lengths: npt.NDArray[np.int64] = np.zeros(count, dtype=np.int64)
        self.finished: deque[Episode] = deque(maxlen=KEPT)
        self._seeds: list[int | None] = [None] * count
        self._started = [0.0] * count
        # What the copy had used when its episode before ended.
        self._used = [_NOTHING] * count
        self._failures: dict[int, str] = {}

    def add(self, rewards: npt.NDArray[np.float64], chosen: npt.NDArray[Any] | None = None) -> None:
        """Count one step of all copies, or of the ``chosen``."""
        if chosen is None:
            self.returns += rewards
            self.lengths += 1
        else:
            self.returns[chosen] += rewards
            self.lengths[chosen] += 1

    def begin(self, index: int, seed: int | None) -> None:
        """The episode of copy ``index`` begins."""
        self.returns[index] = 0.0
        self.lengths[index] = 0
        self._seeds[index] = seed
        self._failures.pop(index, None)
        self._started[index] = time.monotonic()

    def forked(self, index: int) -> None:
        """Copy ``index`` is a new process or sandbox, which has used nothing yet."""
        self._used[index] = _NOTHING

    def fail(self, index: int, reason: str) -> None:
        """The episode of copy ``index`` is cut short."""
        self._failures[index] = reason

    def end(self, index: int, usage: Usage) -> bool:
        """The episode of copy ``index`` is over; whether it ended by itself."""
        seconds = time.monotonic() - self._started[index]
        failure = self._failures.pop(index, None) if self._failures else None
        before, self._used[index] = self._used[index], usage
        self.finished.append(
            Episode(
                index,
                self._seeds[index],
                int(self.lengths[index]),
                float(self.returns[index]),
                seconds,
                _since(before.cpu_seconds, usage.cpu_seconds),
                usage.memory_gb * seconds,
                _since(before.cost_usd, usage.cost_usd),
                failure,
            )
        )
        return failure is None

    def branch(self, source: int, target: int) -> None:
        """Copy ``target`` goes on with the episode of copy ``source``."""
        self.returns[target] = self.returns[source]
        self.lengths[target] = self.lengths[source]
        self._seeds[target] = self._seeds[source]
        self._started[target] = self._started[source]
        self._used[target] = _NOTHING


def _since(before: float, now: float) -> float:
    """How much more it is; nan where that is not known."""
    # What was not known before counts from nothing.
    more = now - (0.0 if math.isnan(before) else before)
    return more if math.isnan(more) else max(0.0, more)

"""Which copies may work until when: the bookkeeping of a fleet that enforces time limits."""

from __future__ import annotations

import time
from collections.abc import Iterable


class Deadlines:
    """A time limit for each of some copies, counted from when it began. Times are those of ``time.monotonic()``."""

    def __init__(self) -> None:
        self._entries: dict[int, tuple[float, float]] = {}
        self._next: float | None = None
        self._stale = False

    def begin(self, index: int, limit: float | None, since: float | None = None) -> None:
        """Give copy ``index`` a limit in place of the one it has.

        Args:
            index: the copy.
            limit: seconds; None for no limit.
            since: when they began to count; None: at this moment.
        """
        self.begin_all((index,), limit, since)

    def begin_all(self, indices: Iterable[int], limit: float | None, since: float | None = None) -> None:
        """Give each of several copies a limit, as :meth:`begin` does."""
        if limit is None:
            for index in indices:
                self.done(index)
            return
        if since is None:
            since = time.monotonic()
        entries = dict.fromkeys(indices, (since, limit))
        if self._entries or self._stale:
            # One of those that are replaced may have been the first.
            self._stale = True
        elif entries:
            self._next = since + limit
        self._entries.update(entries)

    def extend(self, index: int, limit: float | None) -> None:
        """Give a copy that has a limit another, counted from the same moment; None for no limit."""
        entry = self._entries.get(index)
        if entry is not None:
            self.begin(index, limit, entry[0])

    def limit(self, index: int) -> float | None:
        """The limit that copy ``index`` has, in seconds; None for no limit."""
        entry = self._entries.get(index)
        return None if entry is None else entry[1]

    def done(self, index: int) -> None:
        """Forget the limit of copy ``index``, if it has one."""
        if self._entries.pop(index, None) is not None:
            self._stale = True

    def clear(self) -> None:
        """Forget every limit."""
        self._entries.clear()
        self._next = None
        self._stale = False

    def overdue(self, now: float) -> dict[int, float]:
        """The copies whose limit has passed at ``now``, each with that limit in seconds."""
        return {index: limit for index, (since, limit) in self._entries.items() if now >= since + limit}

    def next(self) -> float | None:
        """When the first limit passes; None if there is no limit."""
        if self._stale:
            self._stale = False
            self._next = min((since + limit for since, limit in self._entries.values()), default=None)
        return self._next

"""What copies have finished, kept until somebody asks for it."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any, TypeVar

from prized_gym.interface.failure import Failure
from prized_gym.interface.fleet import Finished

_Entry = TypeVar("_Entry")


class Inbox:
    """What a fleet's ``wait`` has returned and nobody has taken yet.

    Attributes:
        copies: those that have finished.
    """

    def __init__(self) -> None:
        self.copies: set[int] = set()
        self._infos: dict[int, dict[str, Any]] = {}
        self._finals: dict[int, tuple[Any, dict[str, Any]]] = {}
        self._results: dict[int, Any] = {}
        self._failures: dict[int, Failure] = {}

    def add(self, finished: Finished) -> None:
        """Keep what some copies have finished."""
        self.copies.update(finished.copies)
        self._infos.update(finished.infos)
        self._finals.update(finished.finals)
        self._results.update(finished.results)
        self._failures.update(finished.failures)

    def take(self, indices: Collection[int]) -> Finished:
        """Everything there is of the copies ``indices``, which is then no longer here."""
        chosen = sorted(self.copies.intersection(indices))
        self.copies.difference_update(chosen)
        return Finished(
            chosen,
            _take(self._infos, indices),
            _take(self._finals, indices),
            _take(self._results, indices),
            _take(self._failures, indices),
        )

    def clear(self) -> None:
        """Forget everything."""
        self.copies.clear()
        for entries in (self._infos, self._finals, self._results, self._failures):
            entries.clear()


def _take(entries: dict[int, _Entry], indices: Iterable[int]) -> dict[int, _Entry]:
    return {index: entries.pop(index) for index in sorted(indices) if index in entries} if entries else {}

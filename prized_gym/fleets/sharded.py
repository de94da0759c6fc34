"""Several fleets that look like one: copies of several bases, parents or machines."""

from __future__ import annotations

import math
import select
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from prized_gym.batch import Array, ObservationBuffer
from prized_gym.fleets.inbox import Inbox
from prized_gym.interface.commands import Command
from prized_gym.interface.failure import Failure
from prized_gym.interface.fleet import Finished, Fleet, Usage


@dataclass(frozen=True)
class _Shard:
    """One of the fleets; its copy i is copy ``first + i`` of all."""

    fleet: Fleet
    first: int

    @property
    def rows(self) -> slice:
        return slice(self.first, self.first + self.fleet.size)


class ShardedFleet(Fleet):
    """The copies of several fleets, numbered through: those of the first, then those of the second, and so on.

    What becomes of one fleet (its base dies and cannot be built anew) is a matter of its copies only. The arrays are this
    fleet's own: rows are filled as copies finish.

    Args:
        fleets: of equal spaces; closed with this one.

    Raises:
        ValueError: there is none.
    """

    def __init__(self, fleets: Sequence[Fleet]) -> None:
        if not fleets:
            raise ValueError("a sharded fleet needs at least one fleet")
        self._shards: list[_Shard] = []
        self._of: list[_Shard] = []
        for fleet in fleets:
            self._shards.append(_Shard(fleet, len(self._of)))
            self._of.extend([self._shards[-1]] * fleet.size)
        self.size = len(self._of)
        self.carries_random_state = all(fleet.carries_random_state for fleet in fleets)  # type: ignore[misc]
        self.observations = ObservationBuffer(fleets[0].observations.space, self.size)
        self.rewards = np.zeros(self.size, dtype=np.float64)
        self.terminations = np.zeros(self.size, dtype=np.bool_)
        self.truncations = np.zeros(self.size, dtype=np.bool_)
        # Copies that could not be made here, and what of it is still to be returned.
        self._unmade: dict[int, Failure] = {}
        self._inbox = Inbox()

    @property
    def whole(self) -> bool:
        return all(shard.fleet.whole for shard in self._shards)

    # Making copies

    def fork(self, first: Mapping[int, Command]) -> None:
        for index in first:
            self._unmade.pop(index, None)
        self._inbox.take(first)
        for shard, indices in self._by_shard(list(first)):
            try:
                shard.fleet.fork({index - shard.first: first[index] for index in indices})
            except Exception as error:
                for index in indices:
                    reason = f"could not be forked: {error}"
                    self._fail(Failure(index, shard.fleet.where(index - shard.first), "base", reason, exception=error))

    def branch(self, source: int, targets: Sequence[int]) -> None:
        shard = self._of[source]
        near = [index for index in targets if self._of[index] is shard]
        if near:
            shard.fleet.branch(source - shard.first, [index - shard.first for index in near])
        self._inbox.take(targets)
        for index in targets:
            self._unmade.pop(index, None)
            if self._of[index] is not shard:
                reason = f"could not be made a branch of copy {source}, which lives on another base"
                self._fail(Failure(index, self.where(index), "fork", reason))
        if not near and source in self._unmade:
            self._begin_unmade([source])
        elif not near:
            self._inbox.add(Finished([source]))

    def _fail(self, failure: Failure) -> None:
        """A copy could not be made; the one it was to replace is gone."""
        index = failure.copy
        self._of[index].fleet.end(index - self._of[index].first)
        self._unmade[index] = failure
        self._begin_unmade([index])

    def _begin_unmade(self, indices: Sequence[int]) -> None:
        self._inbox.add(Finished(indices, failures={index: self._unmade[index] for index in indices}))

    # One batch

    def step(self, arrays: Sequence[Array], objects: Sequence[Sequence[Any]], ops: bytes) -> None:
        if self._unmade:
            self.step_some(range(self.size), arrays, objects, ops)
            return
        for shard in self._shards:
            rows = shard.rows
            shard.fleet.step([array[rows] for array in arrays], [column[rows] for column in objects], ops[rows])

    def step_some(
        self, indices: Sequence[int], arrays: Sequence[Array], objects: Sequence[Sequence[Any]], ops: bytes
    ) -> None:
        row_of = {index: row for row, index in enumerate(indices)}
        for shard, chosen in self._by_shard(self._made(indices)):
            rows = [row_of[index] for index in chosen]
            shard.fleet.step_some(
                [index - shard.first for index in chosen],
                [array[rows] for array in arrays],
                [[column[row] for row in rows] for column in objects],
                bytes(ops[row] for row in rows),
            )

    def command(self, commands: Mapping[int, Command]) -> None:
        for shard, indices in self._by_shard(self._made(list(commands))):
            shard.fleet.command({index - shard.first: commands[index] for index in indices})

    def check_command(self, command: Command) -> None:
        for shard in self._shards:
            shard.fleet.check_command(command)

    def _made(self, indices: Sequence[int]) -> list[int]:
        """Those of ``indices`` that can begin something; the others have failed at it at once."""
        self._begin_unmade([index for index in indices if index in self._unmade])
        return [index for index in indices if index not in self._unmade]

    def _by_shard(self, indices: Sequence[int]) -> Iterator[tuple[_Shard, list[int]]]:
        for shard in self._shards:
            chosen = [index for index in indices if self._of[index] is shard]
            if chosen:
                yield shard, chosen

    # Waiting

    def wait(self, count: int | None = None, timeout: float | None = None) -> Finished:
        deadline = None if timeout is None else time.monotonic() + timeout
        inbox = self._inbox
        busy = len(self.busy)
        wanted = busy if count is None else min(count, busy)
        while len(inbox.copies) < wanted:
            shards = [shard for shard in self._shards if shard.fleet.busy]
            if len(shards) == 1 or (count is None and all(shard.fleet.next_deadline is None for shard in shards)):
                # Nobody else's deadline can pass meanwhile.
                missing = None if count is None else wanted - len(inbox.copies)
                self._receive(shards[0], missing, _left(deadline))
            else:
                for shard in shards:
                    self._receive(shard, 1, 0.0)
                if len(inbox.copies) < wanted:
                    _poll([shard.fleet for shard in shards], deadline)
            if deadline is not None and time.monotonic() >= deadline:
                for shard in shards:
                    self._receive(shard, 1, 0.0)
                break
        return inbox.take(inbox.copies.copy())

    def _receive(self, shard: _Shard, count: int | None, timeout: float | None) -> None:
        """Wait for one of the fleets, and make what it returns this fleet's own."""
        finished, first = shard.fleet.wait(count, timeout), shard.first
        good = [index for index in finished.copies if index not in finished.failures]
        if good:
            self._copy_rows(shard, good)
        self._inbox.add(
            Finished(
                [first + index for index in finished.copies],
                {first + index: info for index, info in finished.infos.items()},
                {first + index: final for index, final in finished.finals.items()},
                {first + index: result for index, result in finished.results.items()},
                {first + index: _renumber(failure, first) for index, failure in finished.failures.items()},
            )
        )

    def _copy_rows(self, shard: _Shard, local: list[int]) -> None:
        fleet = shard.fleet
        theirs: Any = slice(None) if len(local) == fleet.size else local
        ours: Any = shard.rows if len(local) == fleet.size else [shard.first + index for index in local]
        for mine, its in zip(self.observations.arrays, fleet.observations.arrays, strict=True):
            mine[ours] = its[theirs]
        for index in local:
            self.observations.store_objects(
                shard.first + index, [column[index] for column in fleet.observations.objects]
            )
        self.rewards[ours] = fleet.rewards[theirs]
        self.terminations[ours] = fleet.terminations[theirs]
        self.truncations[ours] = fleet.truncations[theirs]

    @property
    def busy(self) -> list[int]:
        begun = {shard.first + index for shard in self._shards for index in shard.fleet.busy}
        return sorted(begun | self._inbox.copies)

    def fds(self) -> list[int]:
        return [fd for shard in self._shards for fd in shard.fleet.fds()]

    @property
    def next_deadline(self) -> float | None:
        return _earliest([shard.fleet for shard in self._shards])

    # Failure and end

    def alive(self, index: int) -> bool:
        shard = self._of[index]
        return index not in self._unmade and shard.fleet.alive(index - shard.first)

    def end(self, index: int, timed_out: float | None = None) -> Failure:
        shard = self._of[index]
        self._inbox.take([index])
        failure = _renumber(shard.fleet.end(index - shard.first, timed_out), shard.first)
        return self._unmade.get(index, failure)

    def where(self, index: int) -> str:
        shard = self._of[index]
        return shard.fleet.where(index - shard.first)

    def usage(self, index: int) -> Usage:
        shard = self._of[index]
        return shard.fleet.usage(index - shard.first)

    def age(self, index: int) -> float:
        shard = self._of[index]
        return shard.fleet.age(index - shard.first)

    def release(self, indices: Sequence[int]) -> None:
        for shard, chosen in self._by_shard(indices):
            shard.fleet.release([index - shard.first for index in chosen])

    def close(self, timeout: float | None = None) -> None:
        deadline = None if timeout is None else time.monotonic() + timeout
        for shard in self._shards:
            shard.fleet.close(_left(deadline))


def _renumber(failure: Failure, first: int) -> Failure:
    return replace(failure, copy=first + failure.copy)


def _left(deadline: float | None) -> float | None:
    return None if deadline is None else max(0.0, deadline - time.monotonic())


def _earliest(fleets: Sequence[Fleet]) -> float | None:
    deadlines = [fleet.next_deadline for fleet in fleets]
    return min((deadline for deadline in deadlines if deadline is not None), default=None)


def _poll(fleets: Sequence[Fleet], deadline: float | None) -> None:
    """Sleep until one of the fleets may have something to return, or a deadline passes."""
    poller = select.poll()
    for fleet in fleets:
        fds = fleet.fds()
        if not fds:
            # It does its work while it is waited for.
            return
        for fd in fds:
            poller.register(fd, select.POLLIN)
    limits = [limit for limit in (deadline, _earliest(fleets)) if limit is not None]
    left = _left(min(limits)) if limits else None
    # Rounded up: to wake a moment too early would be to do so again and again.
    poller.poll(None if left is None else math.ceil(left * 1000))

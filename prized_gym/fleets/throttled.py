"""A fleet of which only so many copies work at the same time."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from prized_gym.batch import Array
from prized_gym.fleets.inbox import Inbox
from prized_gym.interface.commands import Command
from prized_gym.interface.failure import Failure
from prized_gym.interface.fleet import Finished, Fleet, Usage


@dataclass(frozen=True)
class _Batch:
    """What the caller gave for one step of some copies; arrays and lists of our own."""

    arrays: list[Array]
    objects: list[list[Any]]
    ops: bytes


@dataclass(frozen=True)
class _Queued:
    """What a copy is to begin when it is its turn: a row of a batch, a command, or a fork and its first command."""

    index: int
    batch: _Batch | None = None
    row: int = 0
    command: Command | None = None
    fork: bool = False


class ThrottledFleet(Fleet):
    """Begins in another fleet at most so much at a time, and keeps the rest in a queue.

    A copy's time limit counts from when it really begins. A branch is no work of an environment: it does not queue.

    Args:
        fleet: whose copies these are; closed with this one.
        limit: how many copies may be busy in it.
    """

    def __init__(self, fleet: Fleet, limit: int) -> None:
        self._fleet, self._limit = fleet, limit
        self._queue: deque[_Queued] = deque()
        self._inbox = Inbox()
        self.carries_random_state = fleet.carries_random_state  # type: ignore[misc]
        self.size = fleet.size
        self.observations = fleet.observations
        self.rewards, self.terminations, self.truncations = fleet.rewards, fleet.terminations, fleet.truncations

    @property
    def whole(self) -> bool:
        return self._fleet.whole

    # Making copies

    def fork(self, first: Mapping[int, Command]) -> None:
        self._check_commands(first)
        for index in set(first).intersection(self.busy):
            # Whatever it is doing, nobody waits for it any more.
            self.end(index)
        self._queue.extend(_Queued(index, command=command, fork=True) for index, command in first.items())
        self._feed()

    def branch(self, source: int, targets: Sequence[int]) -> None:
        self._fleet.branch(source, targets)
        replaced = set(targets)
        self._queue = deque(queued for queued in self._queue if queued.index not in replaced)
        self._inbox.take(replaced)

    # One batch

    def step(self, arrays: Sequence[Array], objects: Sequence[Sequence[Any]], ops: bytes) -> None:
        self.step_some(range(self.size), arrays, objects, ops)

    def step_some(
        self, indices: Sequence[int], arrays: Sequence[Array], objects: Sequence[Sequence[Any]], ops: bytes
    ) -> None:
        # The caller may reuse its arrays as soon as this returns.
        batch = _Batch([array.copy() for array in arrays], [list(column) for column in objects], bytes(ops))
        self._queue.extend(_Queued(index, batch, row) for row, index in enumerate(indices))
        self._feed()

    def command(self, commands: Mapping[int, Command]) -> None:
        self._check_commands(commands)
        self._queue.extend(_Queued(index, command=command) for index, command in commands.items())
        self._feed()

    def _check_commands(self, commands: Mapping[int, Command]) -> None:
        # Refused before anything has begun: a queue has no way back.
        for command in commands.values():
            self.check_command(command)

    def check_command(self, command: Command) -> None:
        self._fleet.check_command(command)

    def wait(self, count: int | None = None, timeout: float | None = None) -> Finished:
        deadline = None if timeout is None else time.monotonic() + timeout
        inbox, fleet = self._inbox, self._fleet
        self._feed()
        busy = len(self.busy)
        wanted = busy if count is None else min(count, busy)
        while len(inbox.copies) < wanted:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            inbox.add(fleet.wait(1 if self._queue else wanted - len(inbox.copies), left))
            self._feed()
            if deadline is not None and time.monotonic() >= deadline:
                break
        return inbox.take(inbox.copies.copy())

    def _feed(self) -> None:
        """Begin what is next, as far as there is room."""
        while self._queue:
            room = self._limit - len(self._fleet.busy)
            if room < 1:
                return
            self._begin([self._queue.popleft() for _ in range(min(room, len(self._queue)))])

    def _begin(self, chosen: Sequence[_Queued]) -> None:
        batches: dict[int, list[_Queued]] = {}
        forks: dict[int, Command] = {}
        commands: dict[int, Command] = {}
        for queued in chosen:
            if queued.batch is not None:
                batches.setdefault(id(queued.batch), []).append(queued)
            elif queued.command is not None:
                (forks if queued.fork else commands)[queued.index] = queued.command
        for rows in batches.values():
            self._begin_rows(rows)
        if commands:
            self._fleet.command(commands)
        if forks:
            try:
                self._fleet.fork(forks)
            except Exception as error:
                # What was begun at another time has nothing to do with it.
                for index in forks:
                    self._fleet.end(index)
                self._inbox.add(Finished(list(forks), failures={index: _unmade(index, error) for index in forks}))

    def _begin_rows(self, rows: Sequence[_Queued]) -> None:
        batch = rows[0].batch
        assert batch is not None
        chosen = np.asarray([queued.row for queued in rows], dtype=np.intp)
        self._fleet.step_some(
            [queued.index for queued in rows],
            [array[chosen] for array in batch.arrays],
            [[column[row] for row in chosen] for column in batch.objects],
            bytes(batch.ops[row] for row in chosen),
        )

    @property
    def busy(self) -> list[int]:
        queued = (queued.index for queued in self._queue)
        return sorted({*self._fleet.busy, *queued, *self._inbox.copies})

    def fds(self) -> list[int]:
        return self._fleet.fds()

    @property
    def next_deadline(self) -> float | None:
        return self._fleet.next_deadline

    # Failure and end

    def alive(self, index: int) -> bool:
        return self._fleet.alive(index)

    def end(self, index: int, timed_out: float | None = None) -> Failure:
        self._queue = deque(queued for queued in self._queue if queued.index != index)
        self._inbox.take([index])
        return self._fleet.end(index, timed_out)

    def where(self, index: int) -> str:
        return self._fleet.where(index)

    def usage(self, index: int) -> Usage:
        return self._fleet.usage(index)

    def age(self, index: int) -> float:
        return self._fleet.age(index)

    def release(self, indices: Sequence[int]) -> None:
        self._fleet.release(indices)

    def close(self, timeout: float | None = None) -> None:
        self._queue.clear()
        self._fleet.close(timeout)


def _unmade(index: int, error: Exception) -> Failure:
    return Failure(index, "not forked", "base", f"could not be forked: {error}", exception=error)

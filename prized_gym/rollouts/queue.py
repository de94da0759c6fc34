"""What is to be played: seeds and tasks in their order, and those that failed once more."""

from __future__ import annotations

import itertools
import math
import operator
from collections import deque
from collections.abc import Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass, replace
from typing import Any

from prized_gym.pricing import known_total


@dataclass(frozen=True)
class Work:
    """One rollout to be made.

    Attributes:
        seed: its own.
        task: what it was given, and ``number``, the task's.
        start: in a group of several, the seed that all of the group start from; else None.
        attempt: 1 at first.
        spent: US dollars that the attempts before cost, as far as that is known; nan if it is of none.
    """

    seed: int
    task: Any = None
    number: int = 0
    start: int | None = None
    attempt: int = 1
    spent: float = math.nan


class RolloutQueue:
    """Gives out work. Used by one thread at a time.

    Args:
        seeds: one per rollout, as many as there are; None: 0, 1, 2, … for the tasks.
        tasks: None, or the tasks, each to be played ``per_task`` times.
        per_task: how often.
        retries: how many times a rollout that failed is tried again.

    Raises:
        TypeError, ValueError: they do not fit each other.
    """

    def __init__(self, seeds: Iterable[int] | None, tasks: Sequence[Any] | None, per_task: int, retries: int) -> None:
        if seeds is not None and (isinstance(seeds, (str, bytes)) or not isinstance(seeds, Iterable)):
            raise TypeError(f"seeds must be an iterable of ints, such as range(100), got {seeds!r}")
        if operator.index(per_task) < 1:
            raise ValueError(f"per_task must be at least 1, got {per_task!r}")
        if operator.index(retries) < 0:
            raise ValueError(f"retries must be at least 0, got {retries!r}")
        self.retries = retries
        self._fresh: Iterator[Work]
        self._back: deque[Work] = deque()
        self._again: deque[Work] = deque()
        if tasks is None:
            if seeds is None:
                raise TypeError("rollouts() needs seeds=, one per rollout, or tasks=")
            if per_task != 1:
                raise ValueError(f"per_task={per_task} is the number of rollouts of each task: pass tasks= too")
            self.total = len(seeds) if isinstance(seeds, Sized) else None
            self._fresh = map(_plain, seeds)
            return
        if isinstance(tasks, (str, bytes)) or not isinstance(tasks, Sequence):
            raise TypeError(f"tasks must be a list, got {tasks!r}")
        self.total = len(tasks) * per_task
        if isinstance(seeds, Sized) and len(seeds) != self.total:
            raise ValueError(
                f"{len(seeds)} seeds for {len(tasks)} tasks x per_task={per_task}: there must be {self.total}, one per "
                "rollout, or None"
            )
        self._fresh = _of_tasks(itertools.count() if seeds is None else seeds, tasks, per_task)

    def take(self, most: int) -> list[Work]:
        """The next rollouts to be made, at most that many; empty if none is left."""
        taken: list[Work] = []
        for waiting in (self._back, self._again):
            while len(taken) < most and waiting:
                taken.append(waiting.popleft())
        taken += itertools.islice(self._fresh, most - len(taken))
        return taken

    def put_back(self, work: Work) -> None:
        """Take back a rollout that could not begin; it comes up before all others, and this was no attempt."""
        self._back.append(work)

    def put_again(self, work: Work, cost: float) -> bool:
        """Whether a rollout that failed, at that cost in US dollars (nan if unknown), is tried once more; then it is next."""
        if work.attempt > self.retries:
            return False
        self._again.append(replace(work, attempt=work.attempt + 1, spent=known_total((work.spent, cost))))
        return True


def _plain(seed: int) -> Work:
    return Work(_seed(seed))


def _of_tasks(seeds: Iterable[int], tasks: Sequence[Any], per_task: int) -> Iterator[Work]:
    source = iter(seeds)
    for number, task in enumerate(tasks):
        group = [_seed(seed) for seed in itertools.islice(source, per_task)]
        if len(group) < per_task:
            raise ValueError(f"seeds ended at task {number}: there must be {len(tasks) * per_task}, one per rollout")
        for seed in group:
            yield Work(seed, task, number, group[0] if per_task > 1 else None)


def _seed(seed: Any) -> int:
    number = operator.index(seed)
    if number < 0:
        raise ValueError(f"a seed must be a non-negative integer, got {number}")
    return number

"""What the copies of a fleet are doing: begun by the caller, run in the background loop, waited for by the caller."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any, Generic, TypeVar

from prized_gym import background

_T = TypeVar("_T")


class Job(Generic[_T]):
    """One thing a copy is doing.

    Args:
        index: the copy.
        work: does it, in the loop, and never raises; its result is what the job is waited for.
        dropped: called where nobody will wait for it any more, in the thread that drops it.
    """

    def __init__(
        self, index: int, work: Callable[[], Coroutine[Any, Any, _T]], dropped: Callable[[], None] | None = None
    ) -> None:
        self.index = index
        self.work = work
        self.on_drop = dropped
        self.task: asyncio.Task[None] | None = None
        self.dropped = False


class Jobs(Generic[_T]):
    """The jobs of one fleet, at most one per copy.

    Attributes:
        lock: held while jobs begin, end and are dropped.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._changed = threading.Condition(self.lock)
        self._begun: dict[int, Job[_T]] = {}
        self._finished: dict[int, _T] = {}
        self._needed = 0
        self._pipe: tuple[int, int] | None = None
        self._readable = False
        self._closed = False

    def begin(self, jobs: Sequence[Job[_T]]) -> None:
        """Have jobs run."""
        if not jobs:
            return
        with self.lock:
            for job in jobs:
                self._begun[job.index] = job
        background.loop().call_soon_threadsafe(self._launch, jobs)

    def _launch(self, jobs: Sequence[Job[_T]]) -> None:
        for job in jobs:
            if not job.dropped:
                job.task = asyncio.get_running_loop().create_task(self._run(job))

    async def _run(self, job: Job[_T]) -> None:
        outcome = await job.work()
        with self.lock:
            if self._begun.get(job.index) is job:
                self._finished[job.index] = outcome
                self._show()
                if len(self._finished) >= self._needed:
                    self._changed.notify_all()

    def wait(self, count: int | None, timeout: float | None) -> dict[int, _T]:
        """Wait until ``count`` jobs (None: all) are done, or ``timeout`` seconds are over; what those done gave, by copy."""
        with self.lock:
            self._needed = len(self._begun) if count is None else min(count, len(self._begun))
            self._changed.wait_for(lambda: len(self._finished) >= self._needed, timeout)
            finished, self._finished = self._finished, {}
            for index in finished:
                del self._begun[index]
            self._show()
        return {index: finished[index] for index in sorted(finished)}

    def drop(self, indices: Iterable[int]) -> None:
        """Forget what copies are doing."""
        with self.lock:
            jobs = [self._begun.pop(index) for index in indices if index in self._begun]
            for job in jobs:
                job.dropped = True
                self._finished.pop(job.index, None)
                if job.on_drop is not None:
                    job.on_drop()
            self._show()
        if jobs:
            background.loop().call_soon_threadsafe(_cancel, jobs)

    @property
    def busy(self) -> list[int]:
        """The copies that have a job."""
        with self.lock:
            return sorted(self._begun)

    # To be waited for with others

    def fds(self) -> list[int]:
        """A descriptor that is readable while a job is done that has not been waited for."""
        with self.lock:
            if self._closed:
                return []
            if self._pipe is None:
                self._pipe = os.pipe()
                for fd in self._pipe:
                    os.set_blocking(fd, False)
                self._show()
            return [self._pipe[0]]

    def _show(self) -> None:
        """Have the descriptor say whether a job is done."""
        if self._pipe is None or self._readable == bool(self._finished):
            return
        self._readable = bool(self._finished)
        if self._readable:
            os.write(self._pipe[1], b"\0")
        else:
            with contextlib.suppress(BlockingIOError):
                os.read(self._pipe[0], 16)

    def close(self) -> None:
        """Drop everything."""
        with self.lock:
            self._closed = True
            self.drop(list(self._begun))
            pipe, self._pipe = self._pipe, None
        for fd in pipe or ():
            os.close(fd)


def _cancel(jobs: Sequence[Job[Any]]) -> None:
    for job in jobs:
        if job.task is not None:
            job.task.cancel()

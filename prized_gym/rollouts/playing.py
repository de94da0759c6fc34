"""Episodes played in sandboxes: forked in batches, played all at once, deleted as each ends."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from prized_gym import background
from prized_gym.errors import BaseDiedError, SandboxError
from prized_gym.interface.failure import Failure
from prized_gym.pricing import Prices
from prized_gym.rollouts.policy import UserError, raised
from prized_gym.rollouts.queue import RolloutQueue, Work
from prized_gym.rollouts.record import Rollout
from prized_gym.rollouts.ways import EpisodeError, Outcome, Place, Way
from prized_gym.sandbox.copy import Copy
from prized_gym.sandbox.driver import Sandbox
from prized_gym.sandbox.failures import explain, look
from prized_gym.sandbox.fleet import FORK_TIMEOUT

if TYPE_CHECKING:
    from prized_gym.sandbox.base import SandboxBase

_T = TypeVar("_T")

_DEATH = 0.5
_GATHER = 0.2
"""Of the time that the last fork took: how long a free place waits for others to be forked with."""


class PlayedRollouts:
    """Plays an queue in sandboxes, each rollout in a fresh fork. Lives in the background loop.

    Args:
        handle: the base.
        copies: the most alive at once.
        way: how an episode is played.
        queue: what is played.
        report: called with each rollout as it ends.
        timeout: seconds a rollout may take; None for no limit.
        prices: of a sandbox.
        labels: of the copies; None: the base's.
    """

    def __init__(
        self,
        handle: SandboxBase,
        copies: int,
        way: Way,
        queue: RolloutQueue,
        report: Callable[[Work, Rollout], None],
        *,
        timeout: float | None,
        prices: Prices,
        labels: Mapping[str, str] | None,
    ) -> None:
        self._handle, self._way, self._queue, self._report = handle, way, queue, report
        self._timeout, self._prices, self._labels = timeout, prices, labels
        self._free = list(range(copies))
        self._sandboxes: set[Sandbox] = set()
        self._gather_until = self._fork_seconds = 0.0
        self._tasks: set[asyncio.Task[None]] = set()
        self._forking: asyncio.Task[None] | None = None
        self._lost: BaseDiedError | None = None

    async def run(self) -> None:
        """Play everything. Cancelled, it first deletes what it made.

        Raises:
            BaseDiedError: the base is gone.
        """
        try:
            while True:
                works: list[Work] = []
                gathering = self._gather_until - time.monotonic() if self._tasks else 0.0
                if self._free and self._forking is None and self._lost is None and gathering <= 0.0:
                    # In a thread: seeds may be a generator of the user's that waits for something.
                    works = await background.in_thread(partial(self._queue.take, len(self._free)))
                if works:
                    self._forking = asyncio.create_task(self._fork(works))
                waited = {*self._tasks, *([self._forking] if self._forking else [])}
                if not waited:
                    return
                patience = gathering if gathering > 0.0 else None
                done, _ = await asyncio.wait(waited, timeout=patience, return_when=asyncio.FIRST_COMPLETED)
                self._tasks -= done
                if self._forking in done:
                    self._forking = None
                if self._lost is None:
                    for task in done:
                        task.result()
                elif not self._tasks:
                    raise self._lost
        finally:
            await self._end_all()

    async def _end_all(self) -> None:
        left = {*self._tasks, *([self._forking] if self._forking else [])}
        for task in left:
            task.cancel()
        if left:
            await asyncio.wait(left)
            for task in left:
                # Read, so that no one complains that it was not.
                if not task.cancelled():
                    task.exception()
        # Those whose task had not begun.
        await asyncio.gather(*(self._forget(sandbox) for sandbox in self._sandboxes))
        self._way.close()

    async def _fork(self, works: list[Work]) -> None:
        slots = [self._free.pop(0) for _ in works]
        labels = None if self._labels is None else dict(self._labels)
        forking = background.submit(partial(self._handle.fork_sandboxes, len(works), FORK_TIMEOUT, labels))
        started = time.monotonic()
        try:
            sandboxes = await _to_its_end(forking)
            self._fork_seconds = time.monotonic() - started
        except asyncio.CancelledError:
            if forking.done() and forking.exception() is None:
                await asyncio.gather(*(self._forget(sandbox) for sandbox in forking.result()))
            raise
        except BaseDiedError as error:
            # Those under way are in live copies: they may end first.
            self._lost = error
            if not self._tasks:
                raise
            return
        except Exception as error:
            for slot, work in zip(slots, works, strict=True):
                failure = f"copy {slot} could not be forked: {error}"
                self._settle(work, Outcome(math.nan, 0, None), 0.0, "", failure)
                self._free.append(slot)
            return
        self._sandboxes.update(sandboxes)
        for slot, work, sandbox in zip(slots, works, sandboxes, strict=True):
            self._tasks.add(asyncio.create_task(self._one(slot, work, sandbox)))

    async def _forget(self, sandbox: Sandbox) -> None:
        await background.in_thread(partial(self._handle.forget, sandbox), urgent=True)

    async def _one(self, slot: int, work: Work, sandbox: Sandbox) -> None:
        place, started = Place(slot, Copy(self._handle, sandbox), sandbox), time.monotonic()
        try:
            playing = asyncio.create_task(self._way.play(place, work, self._timeout))
            try:
                await asyncio.wait([playing], timeout=self._timeout)
                seconds = time.monotonic() - started
                failure = None
                if not playing.done():
                    failure = await self._overdue(place)
                elif playing.cancelled():
                    failure = f"copy {slot} (sandbox {sandbox.id}): the episode was cancelled"
                elif (error := playing.exception()) is not None:
                    failure = await self._why(place, error)
                outcome = Outcome(math.nan, place.length, place.so_far) if failure else playing.result()
            finally:
                playing.cancel()
            self._settle(work, outcome, seconds, sandbox.id, failure)
        finally:
            await _to_its_end(background.submit(place.copy.close, urgent=True))
            self._sandboxes.discard(sandbox)
            if not self._free:
                # Places that become free at about the same time are forked in one call.
                self._gather_until = time.monotonic() + _GATHER * self._fork_seconds
            self._free.append(slot)

    async def _overdue(self, place: Place) -> str:
        inside = await background.in_thread(partial(look, place.sandbox, timeout=2.0), urgent=True)
        reason = f"did not end within {self._timeout:g} s and was ended"
        return Failure(place.slot, f"sandbox {place.sandbox.id}", "timeout", reason, stderr=inside.log).describe()

    async def _why(self, place: Place, error: BaseException) -> str:
        """Why an episode failed, in several lines."""
        where = f"copy {place.slot} (sandbox {place.sandbox.id})"
        if not isinstance(error, (EpisodeError, UserError)):
            return (await explain(place.slot, place.sandbox, error)).describe()
        text = str(error) if isinstance(error, EpisodeError) else raised(error.what, error.error)
        death = place.sandbox.death
        if isinstance(error, UserError) and isinstance(error.error, SandboxError):
            # It may have met the end of the sandbox, whose news comes a moment later.
            death = await background.in_thread(partial(place.sandbox.wait_dead, _DEATH), urgent=True)
        return f"{where} ended: {death}\n{text}" if death is not None else f"{where}: {text}"

    def _settle(self, work: Work, outcome: Outcome, seconds: float, copy_id: str, failure: str | None) -> None:
        shape = self._handle.plan.shape
        cost = self._prices.cost(seconds=seconds, vcpu=shape.vcpu or 1.0, memory_gb=shape.memory_gb or 1.0)
        if failure is not None and self._queue.put_again(work, cost):
            return
        self._report(
            work,
            Rollout(
                work.task,
                work.seed,
                outcome.reward,
                outcome.length,
                outcome.output,
                seconds,
                work.spent + cost,
                copy_id,
                failure,
                work.attempt,
            ),
        )


async def _to_its_end(future: Future[_T]) -> _T:
    """The result of a call in a thread; cancelled, still not before the call has ended."""
    waiting = asyncio.wrap_future(future)
    try:
        return await asyncio.shield(waiting)
    except asyncio.CancelledError:
        await asyncio.wait([waiting])
        raise

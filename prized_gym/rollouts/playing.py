"""Episodes played in sandboxes: forked in batches, played all at once, deleted as each ends."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import TypeVar

from prized_gym import background
from prized_gym.errors import BaseDiedError, SandboxCapacityError, SandboxError, SandboxQuotaError, SetupError
from prized_gym.interface.failure import Failure
from prized_gym.interface.sandbox import FORK_TIMEOUT, Copy
from prized_gym.pricing import known_total
from prized_gym.rollouts.plan import RolloutPlan
from prized_gym.rollouts.policy import UserError, raised
from prized_gym.rollouts.queue import RolloutQueue, Work
from prized_gym.rollouts.record import Rollout
from prized_gym.rollouts.ways import EpisodeError, Outcome, Place, Way

_T = TypeVar("_T")

_DEATH = 0.5
_GATHER = 0.2
"""Of the time that the last fork took: how long a free place waits for others to be forked with."""


class EpisodeRunner:
    """Plays a queue in sandboxes, each rollout in a fresh fork. Lives in the background loop.

    Args:
        plan: what is asked for.
        way: how an episode is played.
        queue: what is played.
        report: called with each rollout as it ends.
    """

    def __init__(
        self, plan: RolloutPlan, way: Way, queue: RolloutQueue, report: Callable[[Work, Rollout], None]
    ) -> None:
        self._base, self._prices, self._labels, self._timeout = plan.base, plan.prices, plan.labels, plan.timeout
        self._way, self._queue, self._report = way, queue, report
        self._free = list(range(plan.copies))
        self._copies: set[Copy] = set()
        self._gather_until = self._fork_seconds = 0.0
        self._tasks: set[asyncio.Task[None]] = set()
        self._forking: asyncio.Task[None] | None = None
        self._ends = 0
        self._full = False
        self._lost: Exception | None = None

    async def run(self) -> None:
        """Play everything. Cancelled, it first deletes what it made.

        Raises:
            BaseDiedError: the base is closed, or gone without a recipe. Whatever else keeps it from being forked is raised
                as it is; in either case once the rollouts under way have ended.
        """
        try:
            while True:
                works: list[Work] = []
                gathering = self._gather_until - time.monotonic() if self._tasks else 0.0
                may_fork = self._forking is None and self._lost is None and not (self._full and self._tasks)
                if self._free and may_fork and gathering <= 0.0:
                    # In a thread: seeds may be a generator of the user's that waits for something.
                    works = await background.in_thread(partial(self._queue.take, len(self._free)))
                if works:
                    self._forking = asyncio.create_task(self._fork(works))
                waited = {*self._tasks, *([self._forking] if self._forking else [])}
                if not waited:
                    if self._lost is not None:
                        raise self._lost
                    return
                patience = gathering if gathering > 0.0 else None
                done, _ = await asyncio.wait(waited, timeout=patience, return_when=asyncio.FIRST_COMPLETED)
                self._tasks -= done
                if self._forking in done:
                    self._forking = None
                for task in done:
                    task.result()
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
        await asyncio.gather(*(_close(copy) for copy in self._copies))
        self._way.close()

    async def _fork(self, works: list[Work]) -> None:
        slots = [self._free.pop(0) for _ in works]
        labels = None if self._labels is None else dict(self._labels)
        handle = self._base.sandbox_handle()
        forking = background.submit(partial(handle.fork_some, len(works), labels, FORK_TIMEOUT))
        started, ended_before = time.monotonic(), self._ends
        copies: list[Copy] = []
        error: Exception | None = None
        try:
            copies, error = await _to_its_end(forking)
            self._fork_seconds = time.monotonic() - started
        except asyncio.CancelledError:
            if forking.done() and forking.exception() is None:
                await asyncio.gather(*(_close(copy) for copy in forking.result()[0]))
            raise
        except Exception as raised_there:
            error = raised_there
        self._copies.update(copies)
        for slot, work, copy in zip(slots, works, copies, strict=False):
            self._tasks.add(asyncio.create_task(self._one(slot, work, copy)))
        for slot, work in zip(slots[len(copies) :], works[len(copies) :], strict=True):
            self._free.append(slot)
            self._could_not_begin(slot, work, error, ended_before)

    def _could_not_begin(self, slot: int, work: Work, error: Exception | None, ended_before: int) -> None:
        if isinstance(error, BaseDiedError) or (isinstance(error, SetupError) and not self._base.alive):
            self._lost = error
        elif isinstance(error, (SandboxCapacityError, SandboxQuotaError)) and (
            self._tasks or self._ends > ended_before
        ):
            # Again at once if there may be room by now, else as soon as one of those under way has ended.
            self._full = bool(self._tasks)
            self._queue.put_back(work)
        else:
            self._settle(
                work, Outcome(math.nan, 0, None), 0.0, math.nan, "", f"copy {slot} could not be forked: {error}"
            )

    async def _one(self, slot: int, work: Work, copy: Copy) -> None:
        place, started = Place(slot, copy), time.monotonic()
        try:
            playing = asyncio.create_task(self._way.play(place, work, self._timeout))
            try:
                await asyncio.wait([playing], timeout=self._timeout)
                seconds = time.monotonic() - started
                failure = None
                if not playing.done():
                    failure = await self._overdue(place)
                elif playing.cancelled():
                    failure = f"copy {slot} (sandbox {copy.id}): the episode was cancelled"
                elif (error := playing.exception()) is not None:
                    failure = await _why(place, error)
                outcome = Outcome(math.nan, place.length, place.so_far) if failure else playing.result()
            finally:
                playing.cancel()
            cost = await self._cost(copy, seconds)
            self._settle(work, outcome, seconds, cost, copy.id, failure)
        finally:
            await _to_its_end(background.submit(copy.close, urgent=True))
            self._copies.discard(copy)
            self._ends += 1
            self._full = False
            if not self._free:
                # Places that become free at about the same time are forked in one call.
                self._gather_until = time.monotonic() + _GATHER * self._fork_seconds
            self._free.append(slot)

    async def _overdue(self, place: Place) -> str:
        log = await place.copy.server_log(2.0)
        reason = f"did not end within {self._timeout:g} s and was ended"
        return Failure(place.slot, f"sandbox {place.copy.id}", "timeout", reason, stderr=log).describe()

    async def _cost(self, copy: Copy, seconds: float) -> float:
        """US dollars that a copy has cost: what its provider bills, or what the prices given come to."""
        if self._prices is None:
            if not self._base.tells_cost:
                return math.nan
            # In a thread: a provider may have to be asked.
            return (await background.in_thread(copy.usage, urgent=True)).cost_usd
        vcpu, memory_gb = self._base.copy_size or (math.nan, math.nan)
        return self._prices.cost(seconds=seconds, vcpu=vcpu, memory_gb=memory_gb)

    def _settle(
        self, work: Work, outcome: Outcome, seconds: float, cost: float, copy_id: str, failure: str | None
    ) -> None:
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
                known_total((work.spent, cost)),
                copy_id,
                failure,
                work.attempt,
            ),
        )


async def _why(place: Place, error: BaseException) -> str:
    """Why an episode failed, in several lines."""
    copy = place.copy
    where = f"copy {place.slot} (sandbox {copy.id})"
    if not isinstance(error, (EpisodeError, UserError)):
        return (await copy.explain(place.slot, error)).describe()
    text = str(error) if isinstance(error, EpisodeError) else raised(error.what, error.error)
    death = copy.death
    if isinstance(error, UserError) and isinstance(error.error, SandboxError):
        # It may have met the end of the sandbox, whose news comes a moment later.
        death = await background.in_thread(partial(copy.wait_dead, _DEATH), urgent=True)
    return f"{where} ended: {death}\n{text}" if death is not None else f"{where}: {text}"


async def _close(copy: Copy) -> None:
    await background.in_thread(copy.close, urgent=True)


async def _to_its_end(future: Future[_T]) -> _T:
    """Wait for the result of a call in a thread; cancelled, still not before the call has ended."""
    waiting = asyncio.wrap_future(future)
    try:
        return await asyncio.shield(waiting)
    except asyncio.CancelledError:
        await asyncio.wait([waiting])
        raise

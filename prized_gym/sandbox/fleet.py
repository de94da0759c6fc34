"""The copies of one vector environment, each a sandbox with a server in it."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for_futures
from dataclasses import replace
from functools import partial
from typing import Any, Protocol, TypeAlias

import numpy as np

from prized_gym import background
from prized_gym.batch import ActionBuffer, Array
from prized_gym.interface import commands as ops
from prized_gym.interface.commands import Command, Reset, Start
from prized_gym.interface.engine import Description
from prized_gym.interface.failure import Failure
from prized_gym.interface.fleet import UNLIMITED, Finished, Fleet, TimeLimits, Usage
from prized_gym.protocols import Protocol as ServerProtocol
from prized_gym.protocols import ProtocolError
from prized_gym.sandbox.account import Guarded
from prized_gym.sandbox.channels.channel import ChannelError
from prized_gym.sandbox.client import Client
from prized_gym.sandbox.failures import Watch, explain, last_words
from prized_gym.sandbox.jobs import Job, Jobs
from prized_gym.sandbox.making import Making, not_made
from prized_gym.sandbox.pool import Forked, SandboxPool
from prized_gym.sandbox.roster import Member, Roster
from prized_gym.sandbox.rows import Began, Branched, Outcome, Result, Rows

FORK_TIMEOUT = 120.0
_LAST_WORDS = 1.5
_ANSWERING = 30.0
_CLOSING = 10.0

_LEFT_ALIVE = ("raised", "exited")
"""Failures of something that a copy was asked, not of the copy."""


Work: TypeAlias = Callable[[], Coroutine[Any, Any, Outcome]]


class Source(Protocol):
    """The base of a fleet, as the fleet needs it.

    Attributes:
        pool: of its sandboxes.
    """

    pool: SandboxPool

    @property
    def description(self) -> Description:
        """Of its environments."""

    @property
    def alive(self) -> bool:
        """Whether it can be forked as it is, as far as is known."""

    def check_open(self) -> None:
        """Raise a BaseDiedError if it has been closed."""

    def revive(self) -> None:
        """Build it anew if it has died."""

    def fork_what_fits(self, count: int, timeout: float, labels: Mapping[str, str] | None) -> Forked:
        """Fork it as often as can be, at most ``count`` times."""

    def client(self, sandbox: Guarded, protocol: ServerProtocol | None = None) -> Client:
        """Make a client of the server in a fork of it, or of the copy whose protocol is given."""


class SandboxFleet(Fleet):
    """Copies asked over their channels, all of a batch in flight at once in the background loop.

    The loop's thread never touches the arrays: what the copies answer is stored when it is waited for.

    Args:
        size: how many copies.
        base: what they are forks of.
        limits: how long they may take.
        labels: of the copies, beside the base's.
    """

    def __init__(
        self, size: int, base: Source, limits: TimeLimits = UNLIMITED, labels: Mapping[str, str] | None = None
    ) -> None:
        self.size = size
        self._base = base
        self._limits = limits
        self._labels = labels
        description = base.description
        self._rows = rows = Rows(description.observation_space, size)
        self.observations, self.rewards = rows.observations, rows.rewards
        self.terminations, self.truncations = rows.terminations, rows.truncations
        # Only for the structure of an action.
        self._actions = ActionBuffer(description.action_space, 0)
        self._roster = Roster(base.pool.submit_ending)
        self._makings: list[Making] = []
        self._jobs: Jobs[Outcome] = Jobs()
        self._closed = False

    # Making copies

    def fork(self, first: Mapping[int, Command]) -> None:
        self._base.check_open()
        if not self._base.alive:
            self._base.revive()
        indices = list(first)
        fork = partial(self._base.fork_what_fits, len(indices), FORK_TIMEOUT, self._labels)
        making, after = self._make(indices, fork, None)

        async def begin(index: int, command: Command) -> Outcome:
            missing = making.why_not(index, await making.forked(after))
            return await self._first(index, command) if missing is None else missing

        jobs = []
        for index, command in first.items():
            limit = self._limits.reset if isinstance(command, (Reset, Start)) else None
            jobs.append(self._job(index, partial(begin, index, command), limit, making))
        self._jobs.begin(jobs)

    async def _first(self, index: int, command: Command) -> Outcome:
        """The first command of a copy, whose server may need a moment to be reached."""
        member = self._roster[index]
        client, ends = member.client, time.monotonic() + _ANSWERING
        # Not the user's own ready URL: that may play an episode.
        if not await client.wait_ready(None, ends, Watch(member.sandbox)):
            raise ChannelError("refused", "its server does not answer")
        return await self._command(member, command)

    def branch(self, source: int, targets: Sequence[int]) -> None:
        self._base.check_open()
        self._base.pool.check_forks()
        member = self._roster.get(source)
        if member is None:
            self._branch_nothing(source, targets)
            return
        fork = partial(self._base.pool.fork_copy, member.sandbox, len(targets), FORK_TIMEOUT, None, None)
        making, after = self._make(targets, fork, member.client.protocol)

        async def be_forked() -> Outcome:
            forked = await making.forked(after)
            # The fork has ended the connections of its source.
            member.client.channel.close()
            if forked.error is not None and member.sandbox.death is not None:
                raise forked.error
            return Result(None)

        async def be_made(row: Branched, index: int) -> Outcome:
            return making.why_not(index, await making.forked(after)) or row

        jobs = [self._job(index, partial(be_made, self._rows.row(source), index), None, making) for index in targets]
        self._jobs.begin([self._job(source, be_forked, None), *jobs])

    def _branch_nothing(self, source: int, targets: Sequence[int]) -> None:
        gone = self._roster.missing(source)
        self.release(targets)

        async def fail(failure: Failure) -> Outcome:
            return failure

        failures = [gone, *(not_made(index, gone.error()) for index in targets)]
        self._jobs.begin([Job(failure.copy, partial(fail, failure)) for failure in failures])

    def _make(
        self, indices: Sequence[int], fork: Callable[[], Forked], protocol: ServerProtocol | None
    ) -> tuple[Making, list[Future[None]]]:
        """Replace copies: what will make the new ones, and what is to be over before, since its memory is needed."""

        def take(making: Making, index: int, sandbox: Guarded) -> bool:
            with self._jobs.lock:
                wanted = index not in making.given_up
                if wanted:
                    self._roster.add(index, sandbox, self._base.client(sandbox, protocol))
            return wanted

        self.release(indices)
        after = self._leaving()
        self._makings.append(Making(self._base.pool, indices, fork, take))
        return self._makings[-1], after

    def _leaving(self) -> list[Future[None]]:
        """What is done once nothing is left of copies that were let go, or given up on their way."""
        under_way = {making: making.under_way for making in self._makings}
        self._makings = [making for making in self._makings if under_way[making] is not None]
        return [*self._roster.leaving, *(future for future in under_way.values() if future is not None)]

    # One batch

    def step(self, arrays: Sequence[Array], objects: Sequence[Sequence[Any]], batch: bytes) -> None:
        self.step_some(range(self.size), arrays, objects, batch)

    def step_some(
        self, indices: Sequence[int], arrays: Sequence[Array], objects: Sequence[Sequence[Any]], batch: bytes
    ) -> None:
        jobs = []
        for number, index in enumerate(indices):
            op = batch[number]
            if op == ops.NOOP:
                jobs.append(Job(index, _nothing))
                continue
            if op == ops.RESET:
                jobs.append(self._command_job(index, Reset()))
                continue
            # Copies: the caller may write into its arrays before these are sent.
            parts = [np.array(array[number])[()] for array in arrays]
            action = self._actions.join(parts, [column[number] for column in objects])
            jobs.append(self._step_job(index, action, op == ops.STEP_RESET))
        self._jobs.begin(jobs)

    def command(self, commands: Mapping[int, Command]) -> None:
        self._jobs.begin([self._command_job(index, command) for index, command in commands.items()])

    def _step_job(self, index: int, action: Any, then_reset: bool) -> Job[Outcome]:
        limit = self._limits.step
        if then_reset and limit is not None:
            # One request may do both, and where the step ends cannot be seen.
            limit += self._limits.reset or 0.0

        async def work() -> Outcome:
            return await self._roster[index].client.step(action, then_reset, _beyond(limit))

        return self._job(index, work, limit)

    def _command_job(self, index: int, command: Command) -> Job[Outcome]:
        async def work() -> Outcome:
            return await self._command(self._roster[index], command)

        return self._job(index, work, self._limits.reset if isinstance(command, Reset) else None)

    async def _command(self, member: Member, command: Command) -> Outcome:
        limit = self._limits.reset if isinstance(command, Reset) else None
        value = await member.client.command(command, _beyond(limit))
        return Began(*value) if isinstance(command, Reset) else Result(value)

    def _job(self, index: int, work: Work, limit: float | None, making: Making | None = None) -> Job[Outcome]:
        dropped = None if making is None else partial(making.given_up.add, index)
        return Job(index, partial(self._attempt, index, work, limit, making), dropped)

    # In the loop's thread

    async def _attempt(self, index: int, work: Work, limit: float | None, making: Making | None) -> Outcome:
        """Do what a copy is asked, within its time limit; what goes wrong is told by a failure."""
        if making is None and self._roster.get(index) is None:
            return self._roster.missing(index)
        task = asyncio.get_running_loop().create_task(work())
        try:
            await self._within(limit, task, index)
            if task.cancelled():
                # By itself: what a protocol raised.
                raise ProtocolError("the operation was cancelled")
            if task.done():
                return task.result()
            task.cancel()
            return await self._overdue(index, limit or 0.0, making)
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            return await self._explained(index, error)
        finally:
            task.cancel()

    async def _within(self, limit: float | None, task: asyncio.Task[Outcome], index: int) -> None:
        """Wait until a task is done or has taken so long, without what its requests have waited for their turn."""
        left, started = limit, time.monotonic() - self._waited(index)
        while left is None or left > 0.0:
            await asyncio.wait({task}, timeout=left)
            if task.done() or limit is None:
                return
            left = started + limit + self._waited(index) - time.monotonic()

    def _waited(self, index: int) -> float:
        member = self._roster.get(index)
        return 0.0 if member is None else member.client.channel.waited

    async def _overdue(self, index: int, limit: float, making: Making | None) -> Failure:
        failure = _timed_out(index, self._roster.where(index), limit)
        with self._jobs.lock:
            if making is not None:
                making.given_up.add(index)
            member = self._roster.get(index)
        if member is not None:
            stack, log = await last_words(member.sandbox, member.client, _LAST_WORDS)
            failure = replace(failure, stack=stack, stderr=log)
            if self._roster.get(index) is member:
                self._roster.let_go(index)
        return failure

    async def _explained(self, index: int, error: BaseException) -> Failure:
        member = self._roster.get(index)
        if member is None:
            return not_made(index, error)
        try:
            return await explain(index, member.sandbox, error)
        except Exception as failed:
            return Failure(index, self._roster.where(index), "unreachable", f"cannot be looked into: {failed!r}")

    # In the caller's thread

    def wait(self, count: int | None = None, timeout: float | None = None) -> Finished:
        outcomes = self._jobs.wait(count, timeout)
        finished = Finished(list(outcomes))
        for index, outcome in outcomes.items():
            try:
                self._rows.take(finished, index, outcome)
            except Exception as error:
                reason = f"gave an answer that does not fit its spaces: {error}"
                finished.failures[index] = Failure(index, self._roster.where(index), "raised", reason)
            if isinstance(outcome, Failure) and outcome.kind not in _LEFT_ALIVE:
                self._roster.bury(index, outcome)
        return finished

    @property
    def busy(self) -> list[int]:
        return self._jobs.busy

    def fds(self) -> list[int]:
        return self._jobs.fds()

    @property
    def next_deadline(self) -> float | None:
        # The loop sees to the limits: what has failed is shown by the descriptor.
        return None

    # Failure and end

    def alive(self, index: int) -> bool:
        member = self._roster.get(index)
        return member is not None and member.sandbox.death is None

    def where(self, index: int) -> str:
        return self._roster.where(index)

    def usage(self, index: int) -> Usage:
        return self._roster.usage(index)

    def age(self, index: int) -> float:
        return self._roster.age(index)

    def end(self, index: int, timed_out: float | None = None) -> Failure:
        self._jobs.drop([index])
        member = self._roster.get(index)
        if member is None:
            return self._roster.missing(index)
        failure = Failure(index, self._roster.where(index), "died", "was ended")
        if timed_out is not None:
            failure = _timed_out(index, self._roster.where(index), timed_out)
            with contextlib.suppress(Exception):
                words = last_words(member.sandbox, member.client, _LAST_WORDS)
                stack, log = background.run(words, 2 * _LAST_WORDS)
                failure = replace(failure, stack=stack, stderr=log)
        self._roster.bury(index, failure)
        return failure

    def release(self, indices: Sequence[int]) -> None:
        self._jobs.drop(indices)
        self._roster.forget(indices)

    def close(self, timeout: float | None = None) -> None:
        if self._closed:
            return
        self._closed = True
        if sys.is_finalizing():
            return
        self._jobs.close()
        self._roster.forget(self._roster.indices)
        wait_for_futures(self._leaving(), _CLOSING)


async def _nothing() -> Outcome:
    return Result(None)


def _timed_out(index: int, where: str, limit: float) -> Failure:
    return Failure(index, where, "timeout", f"did not answer within {limit:g} s and was ended")


def _beyond(limit: float | None) -> float | None:
    """What is enforced by the fleet needs no shorter limit in a channel."""
    return None if limit is None else 2.0 * limit + 10.0

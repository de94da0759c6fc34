"""The copies of one vector environment, each a sandbox with a server in it."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import wait as wait_for_futures
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from prized_gym import background
from prized_gym.batch import Array
from prized_gym.errors import SandboxError
from prized_gym.interface import commands as ops
from prized_gym.interface.commands import Command, Reset
from prized_gym.interface.failure import Failure, not_forked
from prized_gym.interface.fleet import Fleet, Usage
from prized_gym.protocols import StepAnswer
from prized_gym.sandbox.channels.channel import ChannelError
from prized_gym.sandbox.client import Client
from prized_gym.sandbox.driver import Sandbox
from prized_gym.sandbox.failures import Watch, explain, look

if TYPE_CHECKING:
    from prized_gym.sandbox.base import SandboxBase

FORK_TIMEOUT = 120.0
_STACK_TIMEOUT = 1.5
_ANSWERING = 30.0


@dataclass
class Member:
    """One copy."""

    sandbox: Sandbox
    client: Client


@dataclass
class Began:
    """What a reset gave."""

    obs: Any
    info: dict[str, Any]


@dataclass
class Result:
    """What a command gave."""

    value: Any


class Job:
    """One thing a copy is doing."""

    def __init__(self, index: int, work: Callable[[], Coroutine[Any, Any, Any]]) -> None:
        self.index = index
        self.work = work
        self.task: asyncio.Task[None] | None = None
        self.dropped = False


class SandboxFleet(Fleet):
    """Copies asked over their channels, all of a batch in flight at once in the background loop.

    The loop's thread never touches the buffers: what the copies answer is stored when it is waited for.
    """

    def __init__(self, size: int, base: SandboxBase) -> None:
        super().__init__(size)
        self._base = base
        description = base.description
        self.allocate(description.observation_space, description.action_space)
        self._members: dict[int, Member] = {}
        self._begun: dict[int, Job] = {}
        self._finished: dict[int, Any] = {}
        self._changed = threading.Condition()
        self._needed = 0
        self._step_limit: float | None = None
        self._reset_limit: float | None = None
        self._closed = False

    def set_time_limits(self, step: float | None, reset: float | None) -> None:
        # What is enforced from outside needs no shorter limit here.
        self._step_limit = None if step is None else _beyond(step + (reset or 0.0))
        self._reset_limit = None if reset is None else _beyond(reset)

    # Making copies

    def fork(self, first: Mapping[int, Command], timeout: float | None = None) -> None:
        self._base.check_alive()
        self._retire(list(first))
        sandboxes = self._base.fork_sandboxes(len(first), timeout or FORK_TIMEOUT)
        jobs = []
        for (index, command), sandbox in zip(first.items(), sandboxes, strict=True):
            member = Member(sandbox, self._base.client(sandbox))
            self._members[index] = member
            jobs.append(Job(index, partial(self._first, index, member, command)))
        self._begin(jobs)

    async def _first(self, index: int, member: Member, command: Command) -> Any:
        """The first command of a copy, whose server may need a moment to be reached."""
        client, ends = member.client, time.monotonic() + _ANSWERING
        # Not the user's own ready URL: that may play an episode.
        if not await client.wait_ready(None, ends, Watch(member.sandbox)):
            raise ChannelError("refused", "its server does not answer")
        return await self._command(index, member, command)

    def branch(self, source: int, targets: Sequence[int]) -> None:
        self._base.check_alive()
        targets = list(targets)
        self._retire(targets)
        member = self._members.get(source)
        if member is None:
            self.failures[source] = self._dead.get(source) or not_forked(source)
            return
        try:
            sandboxes = self._base.fork_copy(member.sandbox, len(targets), FORK_TIMEOUT)
        except SandboxError as error:
            self.failures[source] = background.run(explain(source, member.sandbox, error))
            return
        # The fork has ended the connections of its source.
        background.loop().call_soon_threadsafe(member.client.channel.close)
        for index, sandbox in zip(targets, sandboxes, strict=True):
            self._members[index] = Member(sandbox, self._base.client(sandbox, member.client.protocol))
            self.observations.move(source, index)
            self.rewards[index] = self.rewards[source]
            self.terminations[index] = self.terminations[source]
            self.truncations[index] = self.truncations[source]

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
                continue
            action = None
            if op != ops.RESET:
                # Copies: the caller may write into its arrays before these are sent.
                parts = [np.array(array[number])[()] for array in arrays]
                action = self.actions.join(parts, [column[number] for column in objects])
            jobs.append(self._job(index, op, action))
        self._begin(jobs)

    def command(self, commands: Mapping[int, Command]) -> None:
        self._begin([self._job(index, ops.COMMAND, command) for index, command in commands.items()])

    def _job(self, index: int, op: int, argument: Any) -> Job:
        member = self._members.get(index)
        if member is None:
            return Job(index, partial(self._missing, index))
        if op == ops.COMMAND:
            return Job(index, partial(self._command, index, member, argument))
        if op == ops.RESET:
            return Job(index, partial(self._command, index, member, Reset()))
        return Job(index, partial(member.client.step, argument, op == ops.STEP_RESET, self._step_limit))

    async def _missing(self, index: int) -> Failure:
        return self._dead.get(index) or not_forked(index)

    async def _command(self, index: int, member: Member, command: Command) -> Any:
        limit = self._reset_limit if isinstance(command, Reset) else None
        value = await member.client.command(command, limit)
        return Began(*value) if isinstance(command, Reset) else Result(value)

    def _begin(self, jobs: list[Job]) -> None:
        if not jobs:
            return
        with self._changed:
            for job in jobs:
                self._begun[job.index] = job
        background.loop().call_soon_threadsafe(self._launch, jobs)

    # In the loop's thread

    def _launch(self, jobs: list[Job]) -> None:
        for job in jobs:
            if not job.dropped:
                job.task = asyncio.get_running_loop().create_task(self._run(job))

    async def _run(self, job: Job) -> None:
        member = self._members.get(job.index)
        try:
            outcome = await job.work()
        except asyncio.CancelledError:
            return
        except BaseException as error:
            try:
                assert member is not None
                outcome = await explain(job.index, member.sandbox, error)
            except asyncio.CancelledError:
                return
            except Exception as failed:
                outcome = Failure(job.index, self.where(job.index), "unreachable", f"cannot be looked into: {failed!r}")
        with self._changed:
            if self._begun.get(job.index) is job:
                self._finished[job.index] = outcome
                if len(self._finished) >= self._needed:
                    self._changed.notify_all()

    # In the caller's thread

    def wait(self, count: int | None = None, timeout: float | None = None) -> list[int]:
        with self._changed:
            self._needed = len(self._begun) if count is None else min(count, len(self._begun))
            self._changed.wait_for(lambda: len(self._finished) >= self._needed, timeout)
            finished, self._finished = self._finished, {}
            for index in finished:
                del self._begun[index]
        order = sorted(finished)
        for index in order:
            self._take(index, finished[index])
        return order

    def _take(self, index: int, outcome: Any) -> None:
        if isinstance(outcome, Failure):
            self.failures[index] = outcome
            if outcome.kind in ("died", "unreachable", "timeout"):
                self._bury(index, outcome)
        elif isinstance(outcome, Result):
            if outcome.value is not None:
                self.results[index] = outcome.value
        else:
            try:
                if isinstance(outcome, Began):
                    self._take_reset(index, outcome)
                else:
                    self._take_step(index, outcome)
            except (ValueError, TypeError, KeyError, IndexError) as error:
                reason = f"gave an answer that does not fit its spaces: {error}"
                self.failures[index] = Failure(index, self.where(index), "raised", reason)

    def _take_reset(self, index: int, began: Began) -> None:
        self._observe(index, began.obs)
        self.rewards[index] = 0.0
        self.terminations[index] = False
        self.truncations[index] = False
        if began.info:
            self.infos[index] = began.info

    def _take_step(self, index: int, answer: StepAnswer) -> None:
        observation, info = answer.obs, answer.info
        if answer.reset is not None:
            self.finals[index] = (observation, info)
            observation, info = answer.reset
        self._observe(index, observation)
        self.rewards[index] = answer.reward
        self.terminations[index] = answer.terminated
        self.truncations[index] = answer.truncated
        if info:
            self.infos[index] = info

    def _observe(self, index: int, observation: Any) -> None:
        self.observations.store_objects(index, self.observations.write(index, observation))

    @property
    def busy(self) -> list[int]:
        with self._changed:
            return sorted(self._begun)

    # Failure and end

    def alive(self, index: int) -> bool:
        member = self._members.get(index)
        return member is not None and member.sandbox.death is None

    def where(self, index: int) -> str:
        member = self._members.get(index)
        if member is None:
            return self._dead[index].where if index in self._dead else "not forked"
        return f"sandbox {member.sandbox.id}"

    def usage(self, index: int) -> Usage:
        member = self._members.get(index)
        return Usage() if member is None else member.sandbox.usage()

    def end(self, index: int, timed_out: float | None = None) -> Failure:
        self._drop([index])
        member = self._members.get(index)
        if member is None:
            return self._dead.get(index) or not_forked(index)
        failure = Failure(index, self.where(index), "died", "was ended")
        if timed_out is not None:
            reason = f"did not answer within {timed_out:g} s and was ended"
            failure = replace(failure, kind="timeout", reason=reason)
            with contextlib.suppress(Exception):
                stack, log = background.run(_last_words(member), 2 * _STACK_TIMEOUT)
                failure = replace(failure, stack=stack, stderr=log)
        self._bury(index, failure)
        return failure

    def _bury(self, index: int, failure: Failure) -> None:
        """Remember why a copy is no more, and end what is left of it."""
        self._dead[index] = failure
        self._close_members([index])

    def _drop(self, indices: Sequence[int]) -> None:
        """Forget what copies are doing."""
        with self._changed:
            jobs = [self._begun.pop(index) for index in indices if index in self._begun]
            for index in indices:
                self._finished.pop(index, None)
        for job in jobs:
            job.dropped = True
        if jobs:
            background.loop().call_soon_threadsafe(_cancel, jobs)

    def _retire(self, indices: list[int]) -> None:
        """Make room for other copies."""
        self._drop(indices)
        self._close_members(indices)
        for index in indices:
            self._dead.pop(index, None)
            self.failures.pop(index, None)

    def _close_members(self, indices: Sequence[int], timeout: float = 10.0) -> None:
        """End sandboxes, all at once, and wait until they are gone: their memory is needed for those that follow."""
        members = [self._members.pop(index) for index in indices if index in self._members]
        if not members:
            return
        for member in members:
            background.loop().call_soon_threadsafe(member.client.channel.close)
        wait_for_futures(
            [background.submit(partial(self._base.forget, each.sandbox), urgent=True) for each in members], timeout
        )

    def close(self, timeout: float | None = None) -> None:
        if self._closed:
            return
        self._closed = True
        if sys.is_finalizing():
            return
        self._drop(list(range(self.size)))
        self._close_members(list(self._members))


def _beyond(limit: float) -> float:
    return 2.0 * limit + 10.0


def _cancel(jobs: list[Job]) -> None:
    for job in jobs:
        if job.task is not None:
            job.task.cancel()


async def _last_words(member: Member) -> tuple[str, str]:
    """The stack in which a copy hangs, and the end of its server's log."""

    async def stack() -> str:
        try:
            return await member.client.stack(_STACK_TIMEOUT)
        except Exception:
            return ""

    async def log() -> str:
        return (await background.in_thread(lambda: look(member.sandbox, timeout=_STACK_TIMEOUT), urgent=True)).log

    text, tail = await asyncio.gather(stack(), log())
    return text, tail

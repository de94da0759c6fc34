"""The copies of one vector environment, seen from the trainer."""

from __future__ import annotations

import contextlib
import os
import pickle
import time
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from prized_gym.batch import Array, read_only
from prized_gym.engines.local.copies import LocalCopies, Packed
from prized_gym.engines.local.link import Joinable
from prized_gym.engines.local.messages import Answer, load_exception
from prized_gym.engines.local.roster import CLOSE_TIMEOUT
from prized_gym.engines.local.semaphores import Signals
from prized_gym.engines.local.shared_memory import Block
from prized_gym.engines.local.spawning import FOR_EVER, Spawning
from prized_gym.engines.local.watch import Watch
from prized_gym.errors import BaseDiedError, InterruptedStepError, PrizedGymError
from prized_gym.interface.commands import Command
from prized_gym.interface.engine import Description
from prized_gym.interface.failure import Failure
from prized_gym.interface.fleet import UNLIMITED, Finished, Fleet, TimeLimits, Usage


class LocalFleet(Fleet):
    """Copies that share a block of memory with this process.

    After a :meth:`step` of all copies, those of :meth:`fds` that were asked for before it become readable only when the last
    copy is done.
    """

    carries_random_state: ClassVar[bool] = True

    def __init__(
        self,
        size: int,
        base: Joinable,
        description: Description,
        limits: TimeLimits = UNLIMITED,
        pin: bool | None = None,
        close_timeout: float | None = CLOSE_TIMEOUT,
    ) -> None:
        self.size = size
        block = Block(description.observation_space, description.action_space, size)
        try:
            signals = Signals()
        except BaseException:
            block.close()
            raise
        self._watch = Watch(limits)
        try:
            self._copies = copies = LocalCopies(size, block, signals, base, self._watch, pin)
        except BaseException:
            block.close()
            signals.close()
            raise
        self._signalling = copies.signalling
        self._spawning = Spawning(copies, limits, close_timeout)
        self._close_timeout = close_timeout
        self.observations = block.observations
        self._actions = block.actions
        self._by_message = bool(block.actions.object_leaves)
        self.rewards = read_only(block.rewards)
        self.terminations = read_only(block.terminations)
        self.truncations = read_only(block.truncations)
        self._everyone = tuple(range(size))
        self._closed = False
        self._pid = os.getpid()
        _OPEN.add(self)

    # Making copies

    def fork(self, first: Mapping[int, Command]) -> None:
        self._check_open()
        copies, planned = self._copies, self._spawning.plan(first)
        copies.torn = True
        self._spawning.fork(planned)
        copies.torn = False

    def branch(self, source: int, targets: Sequence[int]) -> None:
        self._check_idle([source])
        copies = self._copies
        copies.torn = True
        refusal = self._spawning.refusal(source)
        if refusal is None:
            self._spawning.branch(source, targets)
        copies.torn = False
        if refusal is not None:
            raise refusal

    # One batch

    def step(self, arrays: Sequence[Array], objects: Sequence[Sequence[Any]], ops: bytes) -> None:
        copies, signalling = self._copies, self._signalling
        if self._closed or copies.torn or 1 in signalling.begun:
            self._check_idle(self._everyone)
        packed = self._pack(self._everyone, objects) if objects else ()
        self._actions.write(arrays)
        copies.torn = True
        signalling.ops[:] = ops
        if signalling.post():
            if copies.roster.gone:
                # Those are finished already, and perhaps there is nobody else.
                signalling.nudge()
        else:
            if not self._by_message:
                signalling.note_full_batch()
            for index in self._everyone:
                copies.begin(index, packed[index] if packed else None)
        if self._watch.limited:
            # Last: one that cannot be sent a long message must not use up the others' time.
            self._watch.batch(self._everyone, ops)
        copies.torn = False

    def step_some(
        self, indices: Sequence[int], arrays: Sequence[Array], objects: Sequence[Sequence[Any]], ops: bytes
    ) -> None:
        self._check_idle(indices)
        copies = self._copies
        packed = self._pack(indices, objects) if objects else ()
        copies.torn = True
        copies.listen_to_sockets()
        self._actions.write_some(arrays, np.asarray(indices, dtype=np.intp))
        for number, index in enumerate(indices):
            self._signalling.ops[index] = ops[number]
            copies.begin(index, packed[number] if packed else None)
        self._watch.batch(indices, ops)
        copies.torn = False

    def _pack(self, indices: Sequence[int], objects: Sequence[Sequence[Any]]) -> list[Packed]:
        """The object leaves of each copy's action, as they are sent."""
        pack = self._copies.pack
        return [pack(index, [column[number] for column in objects]) for number, index in enumerate(indices)]

    def command(self, commands: Mapping[int, Command]) -> None:
        self._check_idle(list(commands))
        copies = self._copies
        packed = {index: copies.pack(index, command) for index, command in commands.items()}
        copies.torn = True
        copies.listen_to_sockets()
        for index, message in packed.items():
            copies.begin_command(index, message)
        self._watch.commands(commands)
        copies.torn = False

    def check_command(self, command: Command) -> None:
        self._copies.pack_first(command)

    def wait(self, count: int | None = None, timeout: float | None = None) -> Finished:
        copies, signalling = self._copies, self._signalling
        if self._closed or copies.torn:
            self._check_open()
        # Longer than any poll() takes: for ever.
        give_up = None if timeout is None or timeout > FOR_EVER else time.monotonic() + timeout
        busy, begun, none, next_limit = signalling.busy, signalling.begun, signalling.none, self._watch.deadlines.next
        finished: Sequence[int]
        if count is not None:
            signalling.one_by_one()
        while True:
            if busy.tobytes() == none:
                finished = signalling.finished() if 0 in begun else self._everyone
                if not finished:
                    # Whatever woke the caller is nothing to come back for.
                    copies.poll(0)
                break
            due = next_limit()
            if due is not None and time.monotonic() >= due:
                copies.end_overdue()
                continue
            if count is not None:
                finished = signalling.finished()
                if len(finished) >= count:
                    break
            if give_up is not None and (due is None or give_up < due):
                due = give_up
            if due is None:
                copies.poll(None)
            elif not copies.poll(max(0.0, due - time.monotonic()) * 1000) and due is give_up:
                finished = signalling.finished()
                break
        if signalling.timed:
            signalling.note_time()
        return self._take(finished)

    def _take(self, finished: Sequence[int]) -> Finished:
        """What the copies ``finished`` gave, which are idle from here on."""
        copies, signalling, deadlines = self._copies, self._signalling, self._watch.deadlines
        copies.torn = True
        if finished is self._everyone:
            signalling.begun[:] = signalling.none
            deadlines.clear()
        else:
            for index in finished:
                signalling.begun[index] = 0
                deadlines.done(index)
        result = Finished(finished)
        if copies.roster.gone or signalling.flags.tobytes() != signalling.none:
            for index in finished:
                answer = copies.read_answer(index)
                if answer is not None:
                    self._tell(index, answer, result)
        copies.torn = False
        return result

    def _tell(self, index: int, answer: Answer | Failure, result: Finished) -> None:
        if isinstance(answer, Failure):
            result.failures[index] = answer
            return
        if answer.info is not None:
            result.infos[index] = answer.info
        if answer.objects is not None:
            self.observations.store_objects(index, answer.objects)
        if answer.final is not None:
            result.finals[index] = pickle.loads(answer.final)
        if answer.result is not None:
            result.results[index] = answer.result
        raised = answer.raised
        if raised is not None:
            copy = self._copies.roster.live.get(index)
            if copy is not None:
                # Perhaps it could not read what it was sent, definitions included.
                copy.known = set(self._copies.known)
            result.failures[index] = Failure(
                index,
                self._copies.roster.where(index),
                "exited" if raised.exited else "raised",
                raised.summary,
                stderr="" if copy is None else copy.stderr.tail(),
                traceback=raised.traceback,
                exception=load_exception(raised.exception),
            )

    @property
    def busy(self) -> list[int]:
        return [index for index, begun in enumerate(self._signalling.begun) if begun]

    def fds(self) -> list[int]:
        link, signalling = self._copies.link, self._signalling
        signalling.one_by_one()
        if signalling.finished():
            signalling.nudge()
        return [self._signalling.counter.fd, *([] if link.error is not None else [link.sock.fileno()])]

    @property
    def next_deadline(self) -> float | None:
        return self._watch.deadlines.next()

    # Failure and end

    def alive(self, index: int) -> bool:
        return bool(self._signalling.alive[index])

    def end(self, index: int, timed_out: float | None = None) -> Failure:
        self._check_open()
        copies = self._copies
        copies.torn = True
        failure = copies.kill(index, timed_out)
        copies.forget(index)
        copies.torn = False
        return failure

    def where(self, index: int) -> str:
        return self._copies.roster.where(index)

    def usage(self, index: int) -> Usage:
        block, copy = self._copies.block, self._copies.roster.live.get(index)
        usage = Usage(float(block.cpu[index]), float(block.memory[index]) / 1e9)
        if copy is not None:
            usage.seconds = time.monotonic() - copy.made
        return usage

    def release(self, indices: Sequence[int]) -> None:
        self._check_open()
        copies = self._copies
        copies.torn = True
        copies.retire(indices)
        copies.torn = False

    def abandon(self) -> None:
        """The base is being closed: end every copy, and fail whatever is asked of them from here on.

        The descriptors stay until :meth:`close`, since another thread may be waiting on them.
        """
        if self._closed or self._copies.link.error is not None:
            return
        with contextlib.suppress(PrizedGymError):
            self._copies.leave(self._close_timeout)
        self._copies.lose_base(BaseDiedError("the base was closed"))
        self._copies.link.shut_down()

    def close(self, timeout: float | None = None) -> None:
        if self._pid != os.getpid():
            return
        self._closed = True
        try:
            if timeout is None or timeout > 0.0:
                self._copies.leave(self._close_timeout if timeout is None else timeout)
        finally:
            self._copies.close()
            _OPEN.discard(self)

    def release_after_fork(self) -> None:
        """In a fork of the trainer: close the sockets, without a word to the copies."""
        self._closed = True
        self._copies.link.close()
        for copy in self._copies.roster.live.values():
            copy.sock.close()

    @property
    def whole(self) -> bool:
        return not self._copies.torn

    def _check_idle(self, indices: Sequence[int]) -> None:
        self._check_open()
        begun = [index for index in indices if self._signalling.begun[index]]
        if begun:
            raise RuntimeError(f"copies {begun} have begun something that has not been waited for")

    def _check_open(self) -> None:
        if self._copies.torn and not self._closed:
            raise InterruptedStepError(
                "an earlier call was interrupted while it changed something: these copies can only be closed"
            )
        if self._closed:
            raise BaseDiedError(
                "these copies have been closed"
                if self._pid == os.getpid()
                else f"these copies belong to process {self._pid}, of which this one is a fork"
            )


_OPEN: weakref.WeakSet[LocalFleet] = weakref.WeakSet()


def _release_all() -> None:
    for fleet in list(_OPEN):
        with contextlib.suppress(Exception):
            fleet.release_after_fork()
    _OPEN.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_release_all)

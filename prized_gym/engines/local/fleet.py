"""The copies of one vector environment, seen from the trainer."""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import socket
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import cloudpickle
import numpy as np

from prized_gym.batch import Array
from prized_gym.engines.local import framing, processes
from prized_gym.engines.local.base_process import Adopted, Adopting, Died, Forked, ForkRequest
from prized_gym.engines.local.copy_process import STACK_SIGNAL, Answer, Branch, Raised, load_exception
from prized_gym.engines.local.output import Stream
from prized_gym.engines.local.semaphores import Signals
from prized_gym.engines.local.shared_memory import IN_SLOT, LISTEN_SOCKET, ON_SOCKET, RESETTING, Block
from prized_gym.errors import BaseDiedError, ForkUnsafeError, PrizedGymError
from prized_gym.interface import commands as ops
from prized_gym.interface.commands import Command
from prized_gym.interface.failure import Failure, not_forked
from prized_gym.interface.fleet import Fleet, Usage

_FORK_TIMEOUT = 60.0
_GRACE = 5.0
"""Seconds a copy may take over ``env.close()`` when it is replaced or its fleet is closed."""
_AT_ONCE = framing.MAX_FDS // 2
_PIN_BELOW = 400e-6
_UNPIN_ABOVE = 2e-3
"""Seconds of one core per copy-step. Cheap copies are bound by the scheduler, and gain when each stays on its core (measured:
a quarter with 8 copies on 2 cores, a half with 64); dear ones are better off where there is room."""
_FOR_EVER = 1e6
_SETTLED = 4
"""After so many full batches in a row the copies are woken by semaphore, which one partial batch undoes."""


@dataclass
class _Copy:
    """One copy, live or on its way out."""

    sock: socket.socket
    stderr: Stream
    pid: int = 0

    def close(self) -> None:
        self.sock.close()
        self.stderr.close()


class LocalFleet(Fleet):
    """Copies that share a block of memory with this process.

    A full batch posts a semaphore once per copy; the copies wait on one of two semaphores in turn. For anything that
    concerns some copies only, all are first told to wait on their own sockets.
    """

    carries_random_state: ClassVar[bool] = True

    def __init__(
        self,
        size: int,
        block: Block,
        signals: Signals,
        sock: socket.socket,
        base_died: Callable[[], BaseDiedError],
        pin: bool | None = None,
    ) -> None:
        super().__init__(size)
        self._block = block
        self._signals = signals
        self._semaphores = signals.semaphores
        self._counter = counter = signals.counter
        self._add = counter.adder()
        self._sock = sock
        self._base_died = base_died
        self.observations = block.observations
        self.actions = block.actions
        self.rewards = block.rewards
        self.terminations = block.terminations
        self.truncations = block.truncations
        self._copies: dict[int, _Copy] = {}
        self._parting: list[_Copy] = []
        self._leaving: dict[int, tuple[_Copy, float]] = {}
        self._spared: set[int] = set()
        self._unclaimed: dict[int, int] = {}
        self._dead = {index: not_forked(index) for index in range(size)}
        self._begun = bytearray(size)
        self._none = bytes(size)
        self._everyone = list(range(size))
        self._alive_mask = bytearray(size)
        self._listen = LISTEN_SOCKET
        self._full_batches = 0
        self._strays = False
        self._closed = False
        self._pid = os.getpid()
        self._base_error: BaseDiedError | None = None
        self._ops_view = block.ops.data
        self._busy_view = block.busy.data
        self._flags_view = block.flags.data
        self._listen_view = block.listen.data
        self._poller = select.poll()
        self._poller.register(counter.fd, select.POLLIN)
        self._poller.register(sock, select.POLLIN)
        self._counter_fd = counter.fd
        self._pin = pin
        self._pinned_view = block.pinned.data
        self._pinned_view[0] = bool(pin)
        self._cores = max(1, len(processes.cores()))
        self._crowded = size >= 2 * self._cores > 2
        self._begun_at = 0.0
        self._seconds = 0.0
        self._send_limit: float | None = None
        self._objects = bool(block.actions.object_leaves)

    def set_time_limits(self, step: float | None, reset: float | None) -> None:
        limits = [limit for limit in (step, reset) if limit is not None]
        self._send_limit = min(max(limits), _FOR_EVER) if limits else None

    def _limit_sending(self, sock: socket.socket) -> None:
        """A copy that is stopped must not hold this process up in the middle of a long message."""
        if self._send_limit is not None:
            limit = struct.pack("@ll", int(self._send_limit), int(self._send_limit % 1 * 1e6))
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)

    # Making copies

    def fork(self, first: Mapping[int, Command], timeout: float | None = None) -> None:
        self._check_base()
        self._drain_base()
        self._retire([index for index in first if index in self._copies])
        self._hurry_leavers()
        self._unclaimed.clear()
        deadline = time.monotonic() + (timeout or _FORK_TIMEOUT)
        indices = list(first)
        for start in range(0, len(indices), _AT_ONCE):
            self._fork_some({index: first[index] for index in indices[start : start + _AT_ONCE]}, deadline)

    def _fork_some(self, first: Mapping[int, Command], deadline: float) -> None:
        fresh: dict[int, _Copy] = {}
        theirs: list[socket.socket] = []
        fds: list[int] = []
        try:
            for index in first:
                ours, remote = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
                self._limit_sending(ours)
                theirs.append(remote)
                fresh[index] = _Copy(ours, Stream("stderr"))
                fds += [remote.fileno(), fresh[index].stderr.write_fd]
            self._send_base(ForkRequest(list(first)), fds)
        except BaseException:
            for copy in fresh.values():
                copy.close()
            raise
        finally:
            for remote in theirs:
                remote.close()
            for copy in fresh.values():
                copy.stderr.give_away()
        self._copies.update(fresh)
        for index, command in first.items():
            self._dead.pop(index, None)
            self._alive_mask[index] = 1
            self._block.cpu[index] = self._block.memory[index] = 0.0
            self._begin_command(index, command)
        try:
            answer = self._await_forked(deadline)
        except BaseException:
            for index in first:
                self._discard(index)
            raise
        for index, pid in answer.pids.items():
            self._set_pid(index, pid)
        missing = [index for index in first if index not in answer.pids]
        for index in missing:
            self._discard(index)
        if answer.unsafe is not None:
            raise ForkUnsafeError(answer.unsafe)
        if answer.error is not None:
            raise PrizedGymError(f"copies {missing} could not be forked: {answer.error}")

    def _await_forked(self, deadline: float) -> Forked:
        while True:
            if not framing.wait_readable(self._sock, deadline):
                raise PrizedGymError(f"the base has not forked its copies within {_FORK_TIMEOUT:g} s")
            message = self._receive_base()
            if isinstance(message, Forked):
                return message
            if isinstance(message, Died):
                self._note_deaths(message)

    def _set_pid(self, index: int, pid: int) -> None:
        self._copies[index].pid = pid
        if pid in self._unclaimed:
            self._note_death(pid, self._unclaimed.pop(pid))

    def _begin_command(self, index: int, command: Command) -> None:
        self._ops_view[index] = ops.COMMAND
        self._begin_one(index, framing.dumps(command))

    def _begin_one(self, index: int, payload: bytes) -> None:
        copy = self._copies.get(index)
        self._begun[index] = 1
        if copy is None or not self._alive_mask[index]:
            # Fails at once, in wait().
            return
        self._busy_view[index] = 1
        try:
            framing.send(copy.sock, payload)
        except (framing.Hangup, OSError):
            # Its death is on its way from the base.
            pass

    def branch(self, source: int, targets: Sequence[int]) -> None:
        self._check_base()
        self._listen_to_sockets()
        if not self._alive_mask[source]:
            self.failures[source] = self._dead[source]
            return
        self._retire([index for index in targets if index in self._copies])
        self._unclaimed.clear()
        for start in range(0, len(targets), _AT_ONCE):
            self._branch_some(source, list(targets[start : start + _AT_ONCE]))

    def _branch_some(self, source: int, targets: list[int]) -> None:
        self._send_base(Adopting())
        fresh: dict[int, _Copy] = {}
        theirs: list[socket.socket] = []
        pids: list[int] = []
        try:
            fds: list[int] = []
            for index in targets:
                ours, remote = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
                self._limit_sending(ours)
                theirs.append(remote)
                fresh[index] = _Copy(ours, Stream("stderr"))
                fds += [remote.fileno(), fresh[index].stderr.write_fd]
            self._copies.update(fresh)
            for index in targets:
                self._dead.pop(index, None)
                self._alive_mask[index] = 1
                self._begun[index] = 1
                self._busy_view[index] = 1
                self._ops_view[index] = ops.COMMAND
            self._begin_command(source, Branch(targets))
            try:
                framing.send(self._copies[source].sock, b"", fds)
            except (framing.Hangup, OSError):
                # A source that died is reported by wait(), below.
                pass
            for remote in theirs:
                remote.close()
            for copy in fresh.values():
                copy.stderr.give_away()
            self._wait_for([source, *targets], _FORK_TIMEOUT, fresh)
            for index in targets:
                pid = self.results.pop(index, 0)
                if pid:
                    pids.append(pid)
                    self._set_pid(index, pid)
                else:
                    unborn = Failure(index, f"branch of copy {source}", "died", "was never forked off its source")
                    self._dead.setdefault(index, unborn)
                    self._discard(index)
                    self.failures.setdefault(index, self._dead[index])
        finally:
            for remote in theirs:
                remote.close()
            self._send_base(Adopted(pids))
        for index in targets:
            self.observations.move(source, index)
            self.rewards[index] = self.rewards[source]
            self.terminations[index] = self.terminations[source]
            self.truncations[index] = self.truncations[source]

    def _wait_for(self, indices: Sequence[int], timeout: float, fresh: Mapping[int, _Copy]) -> None:
        """Wait for certain copies; a new one counts as failed once its socket is closed without an answer."""
        deadline = time.monotonic() + timeout
        while any(self._begun[index] for index in indices):
            self.wait(1, 0.2)
            for index, copy in fresh.items():
                if self._begun[index] and copy.pid == 0 and not self._begun[indices[0]] and _hung_up(copy.sock):
                    self._busy_view[index] = 0
                    self._begun[index] = 0
            if time.monotonic() > deadline:
                for index in indices:
                    if self._begun[index]:
                        self.failures[index] = self.end(index, timed_out=timeout)
                        self._begun[index] = 0

    # One batch

    def step(self, arrays: Sequence[Array], objects: Sequence[Sequence[Any]], batch: bytes) -> None:
        self._check_open()
        if self._strays:
            self._drain_strays()
        self._block.actions.write(arrays)
        self._ops_view[:] = batch
        listen = self._listen
        if listen:
            self._begun[:] = b"\1" * self.size
            self._busy_view[:] = self._alive_mask
            following = 3 - listen
            self._listen_view[0] = self._listen = following
            self._begun_at = time.perf_counter()
            self._semaphores[listen - 1].post(self._alive_mask.count(1))
            return
        self._full_batches += 1
        if self._full_batches > _SETTLED and not self._objects:
            self._listen_view[0] = self._listen = 1
        for index in self._everyone:
            self._begin_one(index, pickle.dumps([column[index] for column in objects]) if objects else b"")

    def step_some(
        self, indices: Sequence[int], arrays: Sequence[Array], objects: Sequence[Sequence[Any]], batch: bytes
    ) -> None:
        self._check_open()
        self._listen_to_sockets()
        self._block.actions.write_some(arrays, np.asarray(indices, dtype=np.intp))
        for number, index in enumerate(indices):
            self._ops_view[index] = batch[number]
            self._begin_one(index, pickle.dumps([column[number] for column in objects]) if objects else b"")

    def command(self, commands: Mapping[int, Command]) -> None:
        self._check_open()
        self._listen_to_sockets()
        for index, command in commands.items():
            self._begin_command(index, command)

    def wait(self, count: int | None = None, timeout: float | None = None) -> list[int]:
        self._check_open()
        # Longer than any poll() takes: for ever.
        deadline = None if timeout is None or timeout > _FOR_EVER else time.monotonic() + timeout
        poll = self._poller.poll
        busy, begun = self._busy_view, self._begun
        while True:
            if busy.tobytes() == self._none:
                finished = [index for index in self._everyone if begun[index]] if 0 in begun else self._everyone
                break
            if count is not None:
                finished = [index for index in self._everyone if begun[index] and not busy[index]]
                if len(finished) >= count:
                    break
            if deadline is None:
                events = poll()
            else:
                events = poll(max(0.0, deadline - time.monotonic()) * 1000)
                if not events:
                    finished = [index for index in self._everyone if begun[index] and not busy[index]]
                    break
            for fd, _ in events:
                if fd == self._counter_fd:
                    self._counter.collect()
                else:
                    self._drain_base()
        if self._begun_at:
            self._note_time()
        if self._parting:
            self._dismiss()
        if finished is self._everyone:
            begun[:] = self._none
        else:
            for index in finished:
                begun[index] = 0
        if self._flags_view.tobytes() != self._none:
            self._take_answers(finished)
        if self._dead:
            for index in finished:
                if index in self._spared:
                    self._spared.discard(index)
                elif index in self._dead:
                    self.failures[index] = self._dead[index]
        return list(finished)

    def _note_time(self) -> None:
        """Decide from what full batches cost whether each copy should stay on its core."""
        seconds, self._begun_at = time.perf_counter() - self._begun_at, 0.0
        self._seconds = seconds if not self._seconds else 0.9 * self._seconds + 0.1 * seconds
        if self._pin is None and self._crowded:
            each = self._seconds * self._cores / self.size
            if self._pinned_view[0]:
                if each > _UNPIN_ABOVE:
                    self._pinned_view[0] = 0
            elif each < _PIN_BELOW:
                self._pinned_view[0] = 1

    @property
    def busy(self) -> list[int]:
        return [index for index in self._everyone if self._begun[index]]

    def _take_answers(self, finished: Sequence[int]) -> None:
        flags = self._flags_view
        for index in finished:
            flag = flags[index]
            if not flag:
                continue
            flags[index] = 0
            try:
                if flag == IN_SLOT:
                    data: Any = self._block.slots[index, : int(self._block.lengths[index])].data
                else:
                    data = framing.receive(self._copies[index].sock)
            except (framing.Hangup, OSError, KeyError):
                self._await_death(index)
                continue
            try:
                answer = pickle.loads(data)
            except Exception as error:
                self.failures[index] = Failure(
                    index, self.where(index), "raised", f"gave an answer that cannot be read here: {error!r}"
                )
                continue
            self._take_answer(index, answer)

    def _take_answer(self, index: int, answer: Answer) -> None:
        if answer.info is not None:
            self.infos[index] = answer.info
        if answer.objects is not None:
            self.observations.store_objects(index, answer.objects)
        if answer.final is not None:
            try:
                self.finals[index] = pickle.loads(answer.final)
            except Exception:
                self.finals[index] = cloudpickle.loads(answer.final)
        if answer.result is not None:
            self.results[index] = answer.result
        if answer.raised is not None:
            self.failures[index] = self._failure_of(index, answer.raised)

    def _failure_of(self, index: int, raised: Raised) -> Failure:
        return Failure(
            index,
            self.where(index),
            "exited" if raised.exited else "raised",
            raised.summary,
            stderr=self._copies[index].stderr.tail() if index in self._copies else "",
            traceback=raised.traceback,
            exception=load_exception(raised.exception),
        )

    def _check_open(self) -> None:
        if self._closed:
            raise BaseDiedError(
                "these copies have been closed"
                if self._pid == os.getpid()
                else f"these copies belong to process {self._pid}, of which this one is a fork"
            )
        if self._base_error is not None:
            reason = f"was lost with its base: {str(self._base_error).splitlines()[0]}"
            for index in self._everyone:
                if self._dead.get(index, not_forked(index)) == not_forked(index):
                    self._dead[index] = Failure(index, "gone", "base", reason)

    # Who waits where

    def _listen_to_sockets(self) -> None:
        """Have every copy wait on its own socket. All must be idle, or waiting there already."""
        self._full_batches = 0
        if not self._listen:
            return
        if self._strays:
            self._drain_strays()
        listen = self._listen
        self._ops_view[:] = self._none
        self._busy_view[:] = self._alive_mask
        self._listen_view[0] = self._listen = LISTEN_SOCKET
        self._semaphores[listen - 1].post(self._alive_mask.count(1))
        deadline = time.monotonic() + _GRACE
        while self._busy_view.tobytes() != self._none:
            for fd, _ in self._poller.poll(max(0.0, deadline - time.monotonic()) * 1000):
                if fd == self._counter_fd:
                    self._counter.collect()
                else:
                    self._drain_base()
            if time.monotonic() > deadline:
                # Stopped from outside (SIGSTOP, a debugger): it cannot be left behind at the old semaphore.
                for index in self._everyone:
                    if self._busy_view[index]:
                        self.end(index, timed_out=_GRACE)
        self._strays = True
        self._drain_strays()

    def _drain_strays(self) -> None:
        """Take the tokens that dead copies left. Only while every copy is idle."""
        self._strays = False
        for number, semaphore in enumerate(self._semaphores):
            if self._listen != number + 1:
                semaphore.drain()

    # News from the base

    def _send_base(self, message: object, fds: list[int] | None = None) -> None:
        try:
            framing.send(self._sock, cloudpickle.dumps(message), fds)
        except (framing.Hangup, OSError):
            self._lose_base()
            assert self._base_error is not None
            raise self._base_error from None

    def _receive_base(self) -> object:
        try:
            return cloudpickle.loads(framing.receive(self._sock))
        except (framing.Hangup, OSError):
            self._lose_base()
            assert self._base_error is not None
            raise self._base_error from None

    def _drain_base(self) -> None:
        """Take note of which copies have ended."""
        while self._base_error is None and framing.wait_readable(self._sock, 0.0):
            try:
                message = self._receive_base()
            except BaseDiedError:
                return
            if isinstance(message, Died):
                self._note_deaths(message)

    def _note_deaths(self, died: Died) -> None:
        for pid, status in died.statuses.items():
            self._note_death(pid, status)

    def _note_death(self, pid: int, status: int) -> None:
        if pid in self._leaving:
            self._leaving.pop(pid)[0].close()
            return
        if any(copy.pid == pid for copy in self._parting):
            gone = next(copy for copy in self._parting if copy.pid == pid)
            self._parting.remove(gone)
            gone.close()
            return
        for index, copy in list(self._copies.items()):
            if copy.pid == pid:
                self._bury(index, "died", processes.describe_status(status))
                return
        # Perhaps a copy whose pid is not known here yet.
        self._unclaimed[pid] = status

    def _bury(self, index: int, kind: Any, reason: str) -> None:
        copy = self._copies[index]
        self._dead[index] = Failure(index, f"pid {copy.pid}", kind, reason, stderr=copy.stderr.tail(), traceback="")
        if self._begun[index] and not self._busy_view[index] and self._flags_view[index] != ON_SOCKET:
            # It had finished before it died: this batch counts, the next fails.
            self._spared.add(index)
            if self._flags_view[index]:
                self._take_answers([index])
        self._discard(index)

    def _discard(self, index: int) -> None:
        copy = self._copies.pop(index, None)
        if copy is not None:
            copy.close()
        self._dead.setdefault(index, not_forked(index))
        self._alive_mask[index] = 0
        self._busy_view[index] = 0
        # An answer that came too late belongs to nobody.
        self._flags_view[index] = 0
        self._strays = True
        # The last copy to finish wakes this process; that one may have finished just before.
        self._add()

    def _lose_base(self, error: BaseDiedError | None = None) -> None:
        """The base is gone, and its copies with it."""
        if self._base_error is not None:
            return
        self._base_error = error or self._base_died()
        with contextlib.suppress(KeyError):
            self._poller.unregister(self._sock)
        reason = f"was lost with its base: {str(self._base_error).splitlines()[0]}"
        for index in list(self._copies):
            self._bury(index, "base", reason)
        for copy in (*self._parting, *(leaver for leaver, _ in self._leaving.values())):
            copy.close()
        self._parting.clear()
        self._leaving.clear()

    def _check_base(self) -> None:
        if self._base_error is not None:
            raise self._base_error

    def abandon(self) -> None:
        """The base is being closed: end every copy, and fail whatever is asked of them from here on.

        The descriptors stay until :meth:`close`, since another thread may be waiting on them.
        """
        if self._closed or self._base_error is not None:
            return
        with contextlib.suppress(PrizedGymError):
            self._leave_gently(time.monotonic() + 1.0)
        self._lose_base(BaseDiedError("the base was closed"))
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    # Failure and end

    def resetting(self, index: int) -> bool:
        return self._busy_view[index] == RESETTING

    def alive(self, index: int) -> bool:
        return bool(self._alive_mask[index])

    def where(self, index: int) -> str:
        copy = self._copies.get(index)
        if copy is None:
            return self._dead[index].where if index in self._dead else "not forked"
        return f"pid {copy.pid}"

    def end(self, index: int, timed_out: float | None = None) -> Failure:
        copy = self._copies.get(index)
        if copy is None:
            return self._dead.get(index) or not_forked(index)
        stack = ""
        if timed_out is not None:
            stack = _stack_of(copy.pid)
        if copy.pid:
            processes.kill(copy.pid)
        self._await_death(index)
        failure = self._dead.get(index)
        if failure is None:
            failure = Failure(index, f"pid {copy.pid}", "died", "was ended")
        if timed_out is not None and failure.kind == "died":
            failure = Failure(
                index,
                failure.where,
                "timeout",
                f"did not answer within {timed_out:g} s and was ended",
                stderr=failure.stderr,
                stack=stack,
            )
        self._dead[index] = failure
        self._begun[index] = 0
        return failure

    def _await_death(self, index: int) -> None:
        """Wait until the base confirms that a copy is dead."""
        deadline = time.monotonic() + _GRACE
        while index in self._copies and self._base_error is None and time.monotonic() < deadline:
            if framing.wait_readable(self._sock, deadline):
                self._drain_base()
        if index in self._copies:
            if self._copies[index].pid:
                processes.kill(self._copies[index].pid)
            self._bury(index, "died", "closed its connection")

    def usage(self, index: int) -> Usage:
        return Usage(float(self._block.cpu[index]), float(self._block.memory[index]) / 1e9)

    def _retire(self, indices: Sequence[int]) -> None:
        """Let copies go: idle ones close their environments in their own time, busy ones are killed."""
        if not indices:
            return
        at_work = [index for index in indices if self._begun[index] and index in self._copies]
        for index in at_work:
            if self._copies[index].pid:
                processes.kill(self._copies[index].pid)
            else:
                # A branch that was interrupted before it could say who it is: it ends with its socket.
                self._discard(index)
        for index in at_work:
            self._await_death(index)
        idle = [index for index in indices if index in self._copies]
        if idle:
            self._listen_to_sockets()
        for index in idle:
            copy = self._copies.pop(index, None)
            if copy is None:
                continue
            self._parting.append(copy)
        for index in indices:
            self._alive_mask[index] = 0
            self._busy_view[index] = 0
            self._begun[index] = 0
            self._flags_view[index] = 0
            self._dead[index] = not_forked(index)
            self.failures.pop(index, None)

    def release(self, indices: Sequence[int]) -> None:
        self._retire(indices)
        self._dismiss()

    def _dismiss(self) -> None:
        """Let the copies that were replaced end: after the new ones have answered, which a caller waits for."""
        for copy in self._parting:
            # The copy sees its socket close, closes its environment and ends.
            copy.sock.close()
            if copy.pid:
                self._leaving[copy.pid] = (copy, time.monotonic() + _GRACE)
            else:
                copy.stderr.close()
        self._parting.clear()

    def _hurry_leavers(self) -> None:
        for pid, (_, deadline) in list(self._leaving.items()):
            if time.monotonic() > deadline:
                processes.kill(pid)

    def close(self, timeout: float | None = None) -> None:
        if self._closed:
            return
        self._closed = True
        deadline = time.monotonic() + (_GRACE if timeout is None else timeout)
        try:
            if self._base_error is None:
                self._leave_gently(deadline)
        finally:
            self._sock.close()
            for copy in self._copies.values():
                if copy.pid:
                    processes.kill(copy.pid)
                copy.close()
            for copy in (*self._parting, *(leaver for leaver, _ in self._leaving.values())):
                if copy.pid:
                    processes.kill(copy.pid)
                copy.close()
            self._copies.clear()
            self._parting.clear()
            self._leaving.clear()
            self._alive_mask[:] = self._none
            self._signals.close()
            self._block.close()

    def _leave_gently(self, deadline: float) -> None:
        with contextlib.suppress(PrizedGymError):
            self._drain_base()
            self._retire(list(self._copies))
            self._dismiss()
            while self._leaving and self._base_error is None and framing.wait_readable(self._sock, deadline):
                self._drain_base()
            for pid in self._leaving:
                processes.kill(pid)
            final = time.monotonic() + _GRACE
            while self._leaving and self._base_error is None and framing.wait_readable(self._sock, final):
                self._drain_base()

    def release_after_fork(self) -> None:
        """In a fork of the trainer: close the sockets, without a word to the copies."""
        self._closed = True
        self._sock.close()
        for copy in self._copies.values():
            copy.sock.close()


def _stack_of(pid: int) -> str:
    """The Python stack of a process that hangs, as its fault handler writes it."""
    state = _state_of(pid)
    if state.startswith(("T", "t")):
        return f"(the process is stopped: state {state})"
    folder = f"/proc/{pid}/fd"
    try:
        path = next(
            os.path.join(folder, name)
            for name in os.listdir(folder)
            if "prized_gym-stack" in os.readlink(os.path.join(folder, name))
        )
    except (OSError, StopIteration):
        return ""
    processes.kill(pid, STACK_SIGNAL)
    text, deadline = "", time.monotonic() + 1.0
    while time.monotonic() < deadline:
        time.sleep(0.02)
        try:
            with open(path) as file:
                longer = file.read()
        except OSError:
            break
        if longer and longer == text:
            break
        text = longer
    return text


def _state_of(pid: int) -> str:
    with contextlib.suppress(OSError), open(f"/proc/{pid}/status") as file:
        for line in file:
            if line.startswith("State:"):
                return line.split(":", 1)[1].strip()
    return ""


def _hung_up(sock: socket.socket) -> bool:
    poller = select.poll()
    poller.register(sock, select.POLLIN)
    return any(event & (select.POLLHUP | select.POLLERR) for _, event in poller.poll(0))

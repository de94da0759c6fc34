"""Making copies: forks of the base, and branches of a copy."""

from __future__ import annotations

import select
import socket
import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from prized_gym.engines.local import framing, processes
from prized_gym.engines.local.copies import LocalCopies, Packed
from prized_gym.engines.local.messages import (
    Adopted,
    Adopting,
    Answer,
    Branch,
    CheckBranch,
    Forked,
    ForkRequest,
    load_exception,
)
from prized_gym.engines.local.output import Stream
from prized_gym.engines.local.roster import LocalCopy
from prized_gym.errors import BaseDiedError, ForkUnsafeError, PrizedGymError
from prized_gym.interface import commands
from prized_gym.interface.commands import Command
from prized_gym.interface.failure import Failure, not_forked
from prized_gym.interface.fleet import TimeLimits
from prized_gym.interface.performing import copy_number

_T = TypeVar("_T")

FORK_TIMEOUT = 60.0
"""Seconds the base may take to fork, and a copy to branch, unless a reset may take longer."""
FOR_EVER = 1e6
_AT_ONCE = framing.MAX_FDS // 2


@dataclass(frozen=True)
class Planned:
    """A copy to be forked: which one of its vector environment it is, and its first command."""

    number: int
    command: Packed


class Spawning:
    """Makes the copies of one fleet. What a new copy replaces has closed its environment, and ended, before.

    Args:
        copies: the copies.
        limits: those of the fleet; a socket waits no longer than the longer one.
        close_timeout: seconds that a copy which is replaced may take over ``env.close()``; None for ever.
    """

    def __init__(self, copies: LocalCopies, limits: TimeLimits, close_timeout: float | None) -> None:
        self._copies = copies
        self._close_timeout = close_timeout
        self._requests = 0
        self._timeout = max(FORK_TIMEOUT, limits.reset or 0.0)
        given = [limit for limit in (limits.step, limits.reset) if limit is not None]
        self._send_limit = min(max(given), FOR_EVER) if given else None

    # Forks of the base

    def plan(self, first: Mapping[int, Command]) -> dict[int, Planned]:
        """What :meth:`fork` is to do, before anything changes.

        Raises:
            Exception: a command cannot be pickled.
        """
        pack = self._copies.pack_first
        return {index: Planned(copy_number(index, command), pack(command)) for index, command in first.items()}

    def fork(self, planned: Mapping[int, Planned]) -> None:
        """Make copies forks of the base, and send each its first command; what cannot be made is left failed.

        Raises:
            BaseDiedError: the base is closed.
            Exception: what building the base anew raised.
        """
        copies = self._copies
        copies.drain_base()
        if copies.link.error is not None:
            copies.rejoin()
        copies.retire(list(planned))
        copies.see_off(planned, self._close_timeout)
        if self._fork_all(planned):
            return
        # It died before it had forked them all, or while it was idle and nobody noticed.
        for index in planned:
            copies.forget(index)
        copies.rejoin()
        if not self._fork_all(planned):
            for index in planned:
                copies.begin(index)

    def _fork_all(self, first: Mapping[int, Planned]) -> bool:
        """Fork all there is to fork; False if the base has died."""
        since = time.monotonic()
        indices = list(first)
        for start in range(0, len(indices), _AT_ONCE):
            if not self._fork_some({index: first[index] for index in indices[start : start + _AT_ONCE]}, since):
                return False
        return True

    def _fork_some(self, first: Mapping[int, Planned], since: float) -> bool:
        copies = self._copies
        copies.roster.expect()
        self._requests += 1
        number = self._requests
        try:
            with self._ends(list(first)) as (fresh, fds):
                copies.link.send(ForkRequest(number, {i: planned.number for i, planned in first.items()}), fds)
                self._admit(fresh)
        except BaseDiedError:
            copies.lose_base()
            return False
        except OSError as error:
            self._fail(list(first), _refused(list(first), processes.explain(error)))
            return True
        try:
            for index, planned in first.items():
                copies.begin_command(index, planned.command)
                copies.watch.first_command(index, since)
            answer = self._await_forked(number, since + self._timeout)
        except BaseDiedError:
            copies.lose_base()
            return False
        except BaseException:
            copies.block.given_up[0] = number
            for index in first:
                copies.discard(index, not_forked(index))
                copies.forget(index)
            raise
        for index, pid in answer.pids.items():
            self._note_pid(index, pid)
        missing = [index for index in first if index not in answer.pids]
        if answer.unsafe is not None:
            self._fail(missing, ForkUnsafeError(answer.unsafe))
        elif missing:
            self._fail(missing, _refused(missing, answer.error))
        return True

    def _await_forked(self, number: int, deadline: float) -> Forked:
        link = self._copies.link
        while link.readable(deadline):
            message = link.receive()
            if isinstance(message, Forked) and message.number == number:
                return message
            self._copies.note(message)
        if link.error is not None:
            raise link.error
        self._copies.block.given_up[0] = number
        return Forked(number, error=f"the base has not forked them within {self._timeout:g} s")

    def _fail(self, indices: Sequence[int], error: PrizedGymError) -> None:
        """These could not be made, which the next wait is to say."""
        reason = f"could not be forked: {str(error).splitlines()[0]}"
        for index in indices:
            self._copies.discard(index, Failure(index, "not forked", "fork", reason, exception=error))
            self._copies.begin(index)

    # Branches of a copy

    def branch(self, source: int, targets: Sequence[int]) -> None:
        """Make the copies ``targets`` forks of the idle copy ``source``; all are left finished, or failed."""
        copies = self._copies
        copies.drain_base()
        copies.retire(targets)
        copies.see_off(targets, self._close_timeout)
        copies.listen_to_sockets()
        for start in range(0, len(targets), _AT_ONCE):
            some = list(targets[start : start + _AT_ONCE])
            reason = self._branch_some(source, some)
            for index in some:
                if copies.signalling.alive[index]:
                    self._copy_rows(source, index)
                elif copies.roster.gone[index] == not_forked(index):
                    copies.roster.gone[index] = self._unborn(source, index, reason)
        for index in (source, *targets):
            copies.signalling.begun[index] = 1
        # Wakings meant for other copies may have been taken meanwhile.
        copies.signalling.nudge()

    def _branch_some(self, source: int, targets: list[int]) -> str:
        """Have ``source`` fork; why there are not all of ``targets`` now."""
        copies, busy = self._copies, self._copies.signalling.busy
        pids: list[int] = []
        answer: Answer | Failure | None = None
        if not copies.signalling.alive[source]:
            return ""
        copies.roster.expect()
        try:
            copies.link.send(Adopting())
        except BaseDiedError:
            copies.lose_base()
            return ""
        try:
            with self._ends(targets) as (fresh, fds):
                self._admit(fresh)
                for index in targets:
                    copies.signalling.ops[index] = commands.COMMAND
                    busy[index] = copies.signalling.begun[index] = 1
                copies.begin_command(source, copies.pack(source, Branch(targets)))
                try:
                    framing.send(copies.roster.live[source].sock, b"", fds)
                except (framing.Hangup, OSError):
                    # It has died, which the base will tell.
                    pass
            self._await_branch(source, targets)
            answer = copies.read_answer(source)
            for index in targets:
                born = copies.read_answer(index)
                if isinstance(born, Answer) and born.result and index in copies.roster.live:
                    pids.append(born.result)
                    self._note_pid(index, born.result)
                elif index in copies.roster.live:
                    copies.discard(index, not_forked(index))
        except OSError as error:
            return processes.explain(error)
        finally:
            try:
                copies.link.send(Adopted(pids))
            except BaseDiedError:
                copies.lose_base()
        return answer.raised.summary if isinstance(answer, Answer) and answer.raised is not None else ""

    def _await_branch(self, source: int, targets: Sequence[int]) -> None:
        """Wait for the source and its forks; a fork whose socket is closed without an answer was never born."""
        copies, busy = self._copies, self._copies.signalling.busy
        deadline = time.monotonic() + FORK_TIMEOUT
        while busy[source] or any(busy[index] for index in targets):
            copies.poll(200)
            for index in targets:
                if busy[index] and not busy[source] and _hung_up(copies.roster.live[index].sock):
                    busy[index] = 0
            if time.monotonic() > deadline:
                for index in (source, *targets):
                    if busy[index]:
                        copies.kill(index, timed_out=FORK_TIMEOUT)

    def refusal(self, source: int) -> PrizedGymError | None:
        """Ask the idle copy ``source`` whether it can be forked, before anything is ended for that; why it cannot."""
        copies = self._copies
        copies.drain_base()
        if not copies.signalling.alive[source]:
            return None
        copies.listen_to_sockets()
        copies.begin_command(source, copies.pack(source, CheckBranch()))
        deadline = time.monotonic() + FORK_TIMEOUT
        while copies.signalling.busy[source]:
            copies.poll(max(0.0, deadline - time.monotonic()) * 1000)
            if time.monotonic() > deadline:
                copies.kill(source, timed_out=FORK_TIMEOUT)
        answer = copies.read_answer(source)
        copies.forget(source)
        if isinstance(answer, Answer) and answer.raised is not None:
            error = load_exception(answer.raised.exception)
            return error if isinstance(error, PrizedGymError) else PrizedGymError(answer.raised.summary)
        return None

    def _copy_rows(self, source: int, target: int) -> None:
        block = self._copies.block
        block.observations.move(source, target)
        for array in (block.rewards, block.terminations, block.truncations):
            array[target] = array[source]

    def _unborn(self, source: int, index: int, reason: str) -> Failure:
        gone = self._copies.roster.gone.get(source)
        words = f"{gone.where} {gone.reason}" if gone is not None else reason or "it ended at once"
        return Failure(
            index,
            "not forked",
            "fork",
            f"could not be forked off copy {source}: {words}",
            exception=None if gone is None else gone.error(),
        )

    # Both

    @contextmanager
    def _ends(self, indices: Sequence[int]) -> Iterator[tuple[dict[int, LocalCopy], list[int]]]:
        """Our ends of new copies, and the descriptors of theirs, two for each, which are closed at the end.

        Copies that are not admitted within the block are closed too.
        """
        fresh: dict[int, LocalCopy] = {}
        theirs: list[socket.socket] = []
        fds: list[int] = []
        try:
            for index in indices:
                ours, remote = _pair()
                theirs.append(remote)
                try:
                    self._limit_sending(ours)
                    fresh[index] = LocalCopy(ours, _stream(), set(self._copies.known))
                except BaseException:
                    ours.close()
                    raise
                fds += [remote.fileno(), fresh[index].stderr.write_fd]
            yield fresh, fds
        finally:
            for remote in theirs:
                remote.close()
            for index, copy in fresh.items():
                copy.stderr.give_away()
                if self._copies.roster.live.get(index) is not copy:
                    copy.close()

    def _limit_sending(self, sock: socket.socket) -> None:
        """A copy that is stopped must not hold this process up in the middle of a long message."""
        if self._send_limit is not None:
            limit = struct.pack("@ll", int(self._send_limit), int(self._send_limit % 1 * 1e6))
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)

    def _admit(self, fresh: Mapping[int, LocalCopy]) -> None:
        copies = self._copies
        for index, copy in fresh.items():
            copies.roster.admit(index, copy)
            copies.signalling.admit(index)
            copies.block.cpu[index] = copies.block.memory[index] = 0.0

    def _note_pid(self, index: int, pid: int) -> None:
        status = self._copies.roster.note_pid(index, pid)
        if status is not None:
            self._copies.bury(index, "died", processes.describe_status(status))


def _pair() -> tuple[socket.socket, socket.socket]:
    return processes.with_enough_files(lambda: socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM))


def _stream() -> Stream:
    return processes.with_enough_files(lambda: Stream("stderr"))


def _refused(indices: Sequence[int], reason: str | None) -> PrizedGymError:
    return PrizedGymError(f"copies {list(indices)} could not be forked: {reason}")


def _hung_up(sock: socket.socket) -> bool:
    poller = select.poll()
    poller.register(sock, select.POLLIN)
    return any(event & (select.POLLHUP | select.POLLERR) for _, event in poller.poll(0))

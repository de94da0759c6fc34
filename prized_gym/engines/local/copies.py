"""The copies of one fleet and what becomes of them: what they are sent, what they answer, how they end."""

from __future__ import annotations

import contextlib
import pickle
import time
import warnings
from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Any

from prized_gym.engines.local import framing, processes
from prized_gym.engines.local.link import BaseLink, Joinable
from prized_gym.engines.local.messages import Answer, Died, Forked
from prized_gym.engines.local.roster import GRACE, Roster
from prized_gym.engines.local.semaphores import Signals
from prized_gym.engines.local.shared_memory import IN_SLOT, ON_SOCKET, Block
from prized_gym.engines.local.signalling import Signalling
from prized_gym.engines.local.stacks import read_stack
from prized_gym.engines.local.watch import Watch
from prized_gym.errors import BaseDiedError, PrizedGymError
from prized_gym.interface import commands
from prized_gym.interface.failure import Failure, FailureKind, not_forked


@dataclass(frozen=True)
class Packed:
    """A message to a copy.

    Attributes:
        data: pickled.
        known: the keys of the definitions by value that the copy has once it has read it.
    """

    data: bytes
    known: set[str]


class LocalCopies:
    """The processes of one fleet.

    Args:
        size: how many copies.
        block: the memory they share with this process.
        signals: what they are woken and counted with.
        base: where they are forked.
        watch: how long they may take.
        pin: whether each is to stay on one core; None: as it is found best.

    Attributes:
        block: as given.
        watch: as given.
        roster: which processes they are.
        signalling: who is at work.
        link: the connection to the base process.
        torn: whether something is being changed, so that an interrupt leaves nothing to rely on: what is left can only be
            closed.
        known: the keys of the definitions by value that new copies have from the base.
    """

    def __init__(
        self, size: int, block: Block, signals: Signals, base: Joinable, watch: Watch, pin: bool | None
    ) -> None:
        self.block = block
        self.watch = watch
        self.roster = Roster(size)
        self.signalling = Signalling(size, block, signals, pin)
        self._signals = signals
        self._base = base
        self.known = base.known
        self._spared: dict[int, Answer | Failure | None] = {}
        self._joined = True
        self._closed = False
        self.torn = False
        self.link: BaseLink = base.join(size, block, signals)
        self.signalling.watch(self.link.sock)

    # What they are sent

    def pack(self, index: int, message: object) -> Packed:
        """Pickle a message to copy ``index``, before anything changes: what cannot be pickled costs nothing.

        Raises:
            Exception: it cannot be pickled.
        """
        copy = self.roster.live.get(index)
        known = set(self.known if copy is None else copy.known)
        return Packed(framing.dumps(message, known), known)

    def pack_first(self, command: commands.Command) -> Packed:
        """Pickle the first command of a copy that is yet to be forked, as :meth:`pack` does."""
        known = set(self.known)
        return Packed(framing.dumps(command, known), known)

    def begin(self, index: int, packed: Packed | None = None) -> None:
        """Send copy ``index``, which waits on its socket, what it is to do; one that does not exist fails at once."""
        signalling = self.signalling
        signalling.begun[index] = 1
        if not signalling.alive[index]:
            # Finished with the failure it is gone for.
            signalling.nudge()
            return
        signalling.busy[index] = 1
        copy = self.roster.live[index]
        try:
            framing.send(copy.sock, b"" if packed is None else packed.data)
        except (framing.Hangup, OSError):
            # Its death is on its way from the base.
            return
        if packed is not None:
            copy.known = packed.known

    def begin_command(self, index: int, packed: Packed) -> None:
        """Send copy ``index`` a command."""
        self.signalling.ops[index] = commands.COMMAND
        self.begin(index, packed)

    def listen_to_sockets(self) -> None:
        """Have every copy wait on its own socket."""
        signalling = self.signalling
        while signalling.busy.tobytes() != signalling.none and not signalling.by_socket:
            # In the middle of a batch of all: they are not to be sent anything else before it is over.
            due = self.watch.deadlines.next()
            self.poll(None if due is None else max(0.0, due - time.monotonic()) * 1000)
            self.end_overdue()
        if not signalling.call_in(commands.NOOP):
            return
        deadline = time.monotonic() + GRACE
        while signalling.busy.tobytes() != signalling.none:
            self.poll(max(0.0, deadline - time.monotonic()) * 1000)
            if time.monotonic() > deadline:
                # Stopped from outside (SIGSTOP, a debugger): it cannot be left behind at the old semaphore.
                for index in list(self.roster.live):
                    if signalling.busy[index]:
                        self.kill(index, timed_out=GRACE)
        signalling.called_in()

    # What comes back

    def poll(self, milliseconds: float | None) -> bool:
        """Wait until a copy has finished or the base has news, and take note of that; False if nothing came in time."""
        signalling = self.signalling
        events = signalling.poller.poll(milliseconds)
        for fd, _ in events:
            if fd == signalling.counter.fd:
                signalling.counter.collect()
            else:
                self.drain_base()
        return bool(events)

    def read_answer(self, index: int) -> Answer | Failure | None:
        """What copy ``index`` said about what it has finished; the failure it is gone for if it could not."""
        if index in self._spared:
            return self._spared.pop(index)
        flags = self.signalling.flags
        flag = flags[index]
        if not flag:
            return self.roster.gone.get(index)
        flags[index] = 0
        try:
            if flag == IN_SLOT:
                data: Any = self.block.slots[index, : int(self.block.lengths[index])].data
            else:
                data = framing.receive(self.roster.live[index].sock)
        except (framing.Hangup, OSError, KeyError):
            self.await_death(index)
            return self.roster.gone.get(index)
        try:
            answer: Answer = pickle.loads(data)
        except Exception as error:
            reason = f"gave an answer that cannot be read here: {error!r}"
            return Failure(index, self.roster.where(index), "raised", reason)
        return answer

    def drain_base(self) -> None:
        """Take note of what the base has told so far: who has ended, or that it is gone itself."""
        while self._joined and self.link.readable(0.0):
            torn, self.torn = self.torn, True
            try:
                self.note(self.link.receive())
            except BaseDiedError:
                self.lose_base()
            self.torn = torn

    def note(self, message: object) -> None:
        """Take note of a message of the base that nobody waits for."""
        if isinstance(message, Died):
            for pid, status in message.statuses.items():
                index = self.roster.ended(pid, status)
                if index is not None:
                    self.bury(index, "died", processes.describe_status(status))
        elif isinstance(message, Forked):
            # Of a request that was given up.
            for pid in message.pids.values():
                processes.kill(pid)

    # How they end

    def bury(self, index: int, kind: FailureKind, reason: str) -> None:
        """Copy ``index`` has ended."""
        signalling = self.signalling
        copy = self.roster.live[index]
        failure = Failure(index, f"pid {copy.pid}", kind, reason, stderr=copy.stderr.tail())
        if signalling.begun[index] and not signalling.busy[index] and signalling.flags[index] != ON_SOCKET:
            # It had finished before it died: this batch counts, the next fails.
            self._spared[index] = self.read_answer(index)
        self.discard(index, failure)

    def discard(self, index: int, why: Failure) -> None:
        """Copy ``index`` does not exist any more; what it has begun finishes with a failure."""
        self.roster.remove(index, why)
        self.block.restore(index)
        self.signalling.drop(index)

    def kill(self, index: int, timed_out: float | None = None) -> Failure:
        """Kill copy ``index``, and say what is known of it: with its stack, if it exceeded a time limit of ``timed_out`` s."""
        copy = self.roster.live.get(index)
        if copy is None:
            return self.roster.gone[index]
        stack = read_stack(copy.pid) if timed_out is not None and copy.pid else ""
        copy.kill()
        self.await_death(index)
        failure = self.roster.gone[index]
        if timed_out is not None and failure.kind == "died":
            reason = f"did not answer within {timed_out:g} s and was ended"
            failure = Failure(index, failure.where, "timeout", reason, stderr=failure.stderr, stack=stack)
            self.roster.gone[index] = failure
        return failure

    def end_overdue(self) -> None:
        """Kill the copies that have used up their time."""
        torn, self.torn = self.torn, True
        block = self.block
        results = [block.rewards, block.terminations, block.truncations]
        for index, limit in self.watch.overdue(self.signalling.busy, self.signalling.ops).items():
            # Being asked for its stack may wake a copy from a call into C: what it finishes then is too late.
            rows = [*(array[index].copy() for array in results), *block.before(index)]
            self.kill(index, timed_out=limit)
            self._spared.pop(index, None)
            for array, row in zip([*results, *block.observations.arrays], rows, strict=True):
                array[index] = row
        self.torn = torn

    def await_death(self, index: int) -> None:
        """Wait until the base confirms that a copy is dead."""
        live = self.roster.live
        deadline = time.monotonic() + GRACE
        while index in live and live[index].pid and self._joined and time.monotonic() < deadline:
            if self.link.readable(deadline):
                self.drain_base()
        if index in live:
            live[index].kill()
            self.bury(index, "died", "closed its connection")

    def forget(self, index: int) -> None:
        """What copy ``index`` had begun is not waited for any more."""
        self._spared.pop(index, None)
        self.signalling.forget(index)
        self.watch.deadlines.done(index)

    def retire(self, indices: Sequence[int]) -> None:
        """Let copies go: busy ones are killed, idle ones close their environments, which :meth:`see_off` waits for."""
        live, signalling = self.roster.live, self.signalling
        at_work = [index for index in indices if index in live and signalling.begun[index]]
        for index in at_work:
            live[index].kill()
        for index in at_work:
            self.await_death(index)
        if any(index in live for index in indices):
            self.listen_to_sockets()
        for index in indices:
            self.roster.dismiss(index)
            signalling.alive[index] = 0
            self.forget(index)

    def see_off(self, indices: Container[int], timeout: float | None) -> None:
        """Wait until those of the copies ``indices`` that were let go have ended: gently, after ``timeout`` s by force.

        So a copy finds free what the one that it replaces had taken, and there are never more than two per index.
        """
        roster = self.roster
        self._await_leavers(indices, None if timeout is None else time.monotonic() + timeout)
        late = roster.leaving(indices)
        if late:
            stack = read_stack(next(iter(late))) if timeout else ""
            for pid in late:
                processes.kill(pid)
            self._await_leavers(indices, time.monotonic() + GRACE)
            if timeout:
                warn_cut(f"copies {sorted(late.values())} ({', '.join(f'pid {pid}' for pid in late)})", timeout, stack)

    def _await_leavers(self, indices: Container[int], deadline: float | None) -> None:
        while self.roster.leaving(indices) and self._joined and self.link.readable(deadline):
            self.drain_base()

    def leave(self, timeout: float | None) -> None:
        """Let every copy go, and wait until they have ended: gently for ``timeout`` seconds, then by force."""
        if self.torn:
            # Nobody knows what they are doing: they are killed.
            return
        with contextlib.suppress(PrizedGymError):
            self.drain_base()
            self.retire(list(self.roster.live))
            self.see_off(range(len(self.signalling.none)), timeout)

    # The base

    def lose_base(self, error: BaseDiedError | None = None) -> None:
        """The base is gone, for the reason given or by itself, and its copies with it."""
        if not self._joined:
            return
        self._joined = False
        error = self.link.lose(error)
        with contextlib.suppress(KeyError):
            self.signalling.ignore(self.link.sock)
        reason = f"was lost with its base: {str(error).splitlines()[0]}"
        roster = self.roster
        for index in list(roster.live):
            self.bury(index, "base", reason)
        for index, failure in roster.gone.items():
            if failure == not_forked(index):
                roster.gone[index] = Failure(index, "gone", "base", reason)
        roster.forget_leavers()

    def rejoin(self) -> None:
        """Go on with a base that is built anew, if that has not been done.

        Raises:
            BaseDiedError: it is closed.
            Exception: what building it raised.
        """
        # Whatever ends this here, the copies are gone as they were.
        self.torn = False
        self._base.revive()
        link = self._base.join(len(self.signalling.none), self.block, self._signals)
        self.torn = True
        self.link.close()
        self.link = link
        self._joined = True
        self.signalling.start_over()
        self.signalling.watch(link.sock)

    def close(self) -> None:
        """Kill whoever is left, and close everything; asks nobody anything. One that was interrupted can be called again."""
        if self._closed:
            return
        self._joined = False
        if self.roster.kill_all() or self.torn:
            self.link.hang_up(time.monotonic() + GRACE)
        self.link.close()
        self.roster.close()
        self.signalling.alive[:] = self.signalling.none
        self._signals.close()
        self.block.close()
        self._closed = True


def warn_cut(who: str, timeout: float, stack: str = "") -> None:
    """Say that somebody was ended within ``env.close()``."""
    where = f" It was here:\n{stack.rstrip()}" if stack.strip() else ""
    warnings.warn(
        f"{who} had not finished env.close() after close_timeout={timeout:g} s and {'were' if who[0] == 'c' else 'was'} ended: "
        f"pass a longer close_timeout if it needs that long.{where}",
        stacklevel=2,
    )

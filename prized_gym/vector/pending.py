"""What a vector environment has begun and not finished, and the gate that every operation passes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

from gymnasium.error import AlreadyPendingCallError, ClosedEnvironmentError, NoAsyncCallError

from prized_gym.errors import InterruptedStepError
from prized_gym.vector.live_fleet import StillPendingError


@dataclass(frozen=True)
class Pending:
    """An operation between its ``_async`` and its ``_wait``.

    Attributes:
        name: of the operation, as in ``"reset"``.
    """

    name: ClassVar[str]


@dataclass(frozen=True)
class PendingReset(Pending):
    """A reset of some copies.

    Attributes:
        seeds: by copy, the seed its episode begins with; None for one that goes on with its random state.
        options: of every copy of the vector environment.
    """

    name: ClassVar[str] = "reset"
    seeds: dict[int, int | None]
    options: Sequence[dict[str, Any] | None]


@dataclass(frozen=True)
class PendingStep(Pending):
    """A step of every copy.

    Attributes:
        starting: by copy, the seed of an episode that begins with this step, an autoreset.
    """

    name: ClassVar[str] = "step"
    starting: Mapping[int, int | None]


@dataclass(frozen=True)
class PendingCall(Pending):
    """A call in some copies.

    Attributes:
        targets: the copies, in the order of the results.
    """

    name: ClassVar[str] = "call"
    targets: Sequence[int]


@dataclass
class Sent:
    """The copies that were sent actions and have not been received.

    Attributes:
        copies: their indices.
        starting: as for :class:`PendingStep`.
    """

    copies: set[int] = field(default_factory=set)
    starting: dict[int, int | None] = field(default_factory=dict)

    def take_starting(self, indices: Sequence[int]) -> dict[int, int | None]:
        """Of the copies ``indices``, those whose episode begins: they are received."""
        self.copies.difference_update(indices)
        return {index: self.starting.pop(index) for index in indices if index in self.starting}


_Kind = TypeVar("_Kind", bound=Pending)


class Gate:
    """What every operation passes: is the vector environment open, idle (or rightly pending), and of one piece?

    Args:
        owner: the class of the vector environment, for messages.

    Attributes:
        closed: whether it was closed.
        pending: what has begun and is to be waited for.
        broken: why the copies are at different points, or None; a reset brings them back.
        sent: the copies that are to be received.
    """

    def __init__(self, owner: str) -> None:
        self._owner = owner
        self.closed = False
        self.pending: Pending | None = None
        self.broken: str | None = None
        self.sent = Sent()

    def check_open(self) -> None:
        """Refuse an operation after ``close()``."""
        if self.closed:
            raise ClosedEnvironmentError(f"Trying to operate on `{self._owner}`, after a call to `close()`.")

    def check_whole(self) -> None:
        """Refuse an operation while the copies are at different points."""
        if self.broken is not None:
            raise InterruptedStepError(self.broken)

    def check_idle(self, name: str, mends: bool = False) -> None:
        """Let an operation begin, or refuse it.

        Args:
            name: of the operation.
            mends: it is a reset, which brings copies at different points back.
        """
        self.check_open()
        if self.pending is not None:
            raise AlreadyPendingCallError(
                f"Calling `{name}` while waiting for a pending call to `{self.pending.name}` to complete",
                self.pending.name,
            )
        if self.broken is not None and mends:
            return
        self.check_whole()
        if self.sent.copies:
            raise AlreadyPendingCallError(
                f"Calling `{name}` while copies {sorted(self.sent.copies)} have been sent actions: recv() them first",
                "send",
            )

    def check_sending(self) -> None:
        """Let ``send`` begin, or refuse it; other copies may have been sent actions."""
        self.check_open()
        if self.pending is not None:
            raise AlreadyPendingCallError(
                f"Calling `send` while waiting for a pending call to `{self.pending.name}`", "send"
            )
        self.check_whole()

    def check_receiving(self, min_ready: int) -> None:
        """Let ``recv`` go on, or refuse it."""
        self.check_open()
        self.check_whole()
        if not 1 <= min_ready <= len(self.sent.copies):
            raise NoAsyncCallError(f"recv(min_ready={min_ready}) with {len(self.sent.copies)} copies pending", "recv")

    def check_pending(self, kind: type[_Kind]) -> _Kind:
        """What has begun, if it is of this kind; else the wait for it is refused."""
        self.check_open()
        pending = self.pending
        if type(pending) is not kind:
            self.check_whole()
            raise NoAsyncCallError(
                f"Calling `{kind.name}_wait` without any prior call to `{kind.name}_async`.", kind.name
            )
        return pending

    def fail(self, error: BaseException) -> None:
        """After an error in the middle of an operation: remember that the copies are at different points."""
        if isinstance(error, StillPendingError):
            # It can be waited for again.
            return
        self.pending = None
        what = "interrupted" if isinstance(error, KeyboardInterrupt) else f"ended by {type(error).__name__}"
        self.broken = f"an earlier call was {what}, and the copies are at different points: call reset() first"

    def leave(self, error: BaseException, before: Pending | None, sent: int | None = None) -> None:
        """An interrupt may have come between the two halves of an operation, with nobody left to wait for the second.

        Args:
            error: what the operation ended with.
            before: what was pending when it began.
            sent: for one that sends actions, how many copies were to be received then.
        """
        half = self.pending is not None and self.pending is not before
        if (half or (sent is not None and len(self.sent.copies) > sent)) and not self.closed:
            self.fail(error)

    def drop(self) -> None:
        """What is pending is not waited for any more."""
        self.pending = None
        self.sent = Sent()

    def mend(self) -> None:
        """The copies are gone, and with them whatever was between them."""
        self.broken = None
        self.drop()

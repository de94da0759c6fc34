"""The seam between what steps copies as a batch and the engines that hold them.

A fleet forks, steps, commands, waits and ends the N copies of one base. It knows nothing of autoreset modes, seeds or
episodes, and nothing of the machine its caller runs on: whatever is begun is waited for, and ``wait`` returns what came of it.
So a fleet can live elsewhere, and a fleet made of fleets is a fleet.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from prized_gym.batch import Array, ObservationBuffer
from prized_gym.interface.commands import Command
from prized_gym.interface.failure import Failure


@dataclass(frozen=True)
class TimeLimits:
    """How many seconds a copy may take, which its fleet enforces; None for ever.

    A copy that takes longer is ended, and fails with kind ``timeout``. What a request waits for its turn, where a provider
    takes only so many at once, counts toward neither.

    Attributes:
        step: for a step.
        reset: for a reset, from the moment its fork was begun if it is the first of a new fork. A step that goes on with a
            reset (``STEP_RESET``) may take ``step``, then ``reset``; a fleet that cannot see where one ends and the other
            begins gives both together the sum.
    """

    step: float | None = None
    reset: float | None = None


UNLIMITED = TimeLimits()


@dataclass
class Usage:
    """What a copy has used since it was made.

    Attributes:
        cpu_seconds: CPU time, in seconds; nan where the engine cannot tell.
        memory_gb: memory held, in GB (1e9 bytes); nan where the engine cannot tell.
        cost_usd: what its provider bills for it so far, in US dollars; nan where nobody bills.
        seconds: wall-clock seconds since it was made; nan while it does not exist, or where the engine cannot tell.
    """

    cpu_seconds: float = float("nan")
    memory_gb: float = float("nan")
    cost_usd: float = float("nan")
    seconds: float = float("nan")


@dataclass
class Finished:
    """What :meth:`Fleet.wait` returns; the caller's to keep.

    Attributes:
        copies: the indices of the copies that have finished or failed, in ascending order.
        infos: by index, the info of each that gave one that is not empty.
        finals: by index, the last observation and info of an episode that a ``STEP_RESET`` ended.
        results: by index, what a :class:`~prized_gym.interface.commands.Call` returned, if that is not None.
        failures: by index, why a copy failed. What it held before (its rows of the fleet's arrays) is unchanged.
    """

    copies: Sequence[int]
    infos: dict[int, dict[str, Any]] = field(default_factory=dict)
    finals: dict[int, tuple[Any, dict[str, Any]]] = field(default_factory=dict)
    results: dict[int, Any] = field(default_factory=dict)
    failures: dict[int, Failure] = field(default_factory=dict)


class Fleet(ABC):
    """N copies of one base. Used by one thread at a time.

    What is begun (:meth:`fork`, :meth:`branch`, :meth:`step`, :meth:`command`) makes its copies busy until :meth:`wait` has
    returned them. What fails is told there too, copy by copy: a copy that does not exist or has failed finishes anything it
    is asked for with that failure, until it is forked again.

    Attributes:
        size: N.
        observations: the latest observation of each copy; row i is written by the fleet only while copy i is busy.
        rewards, terminations, truncations: what the latest step of each copy gave: float64, bool and bool, of shape ``(N,)``.
            A reset sets them to 0 and False. Callers write none of these.
    """

    carries_random_state: ClassVar[bool] = False
    """Whether a new fork can go on with the ``np_random`` of the copy it replaces (``Fresh.random_state``)."""

    size: int
    observations: ObservationBuffer
    rewards: npt.NDArray[np.float64]
    terminations: npt.NDArray[np.bool_]
    truncations: npt.NDArray[np.bool_]

    @property
    def whole(self) -> bool:
        """False once an interrupt has come while the fleet was changing something: then it can only be closed."""
        return True

    # Making copies

    @abstractmethod
    def fork(self, first: Mapping[int, Command]) -> None:
        """Begin to make each copy in ``first`` a fresh fork of the base, and then that command in it.

        The copies that are replaced end, whatever they are doing. A base that has died is built anew from its recipe first.
        The fork may finish in part: each copy that could not be made fails, with kind ``fork`` or ``base``.

        Raises:
            BaseDiedError: the base is closed.
            Exception: what building the base anew raised.
        """

    @abstractmethod
    def branch(self, source: int, targets: Sequence[int]) -> None:
        """Begin to make the copies ``targets`` forks of the idle copy ``source`` as it stands, its rows included.

        The copies that are replaced end. ``source`` and ``targets`` are busy until waited for; a target that could not be
        made fails, and so does the source if it is gone.

        Raises:
            EngineUnavailableError: the engine cannot fork a copy; nothing was ended.
        """

    # One batch

    @abstractmethod
    def step(self, arrays: Sequence[Array], objects: Sequence[Sequence[Any]], ops: bytes) -> None:
        """Begin a batch in every copy, all of which must be idle; to be waited for as a whole.

        A ``wait`` for some of it may return only when all have finished; :meth:`step_some` is for those that come as they are.

        Args:
            arrays: one action array ``(N, *shape)`` per array leaf of the action space; the caller may reuse it at once.
            objects: one sequence of N values per object leaf.
            ops: a byte per copy: ``STEP``, ``STEP_RESET``, ``RESET`` or ``NOOP``, which does nothing, and finishes too.
        """

    @abstractmethod
    def step_some(
        self, indices: Sequence[int], arrays: Sequence[Array], objects: Sequence[Sequence[Any]], ops: bytes
    ) -> None:
        """Begin a batch in the copies ``indices``, which must be idle; arguments as for :meth:`step`, in their order."""

    @abstractmethod
    def command(self, commands: Mapping[int, Command]) -> None:
        """Begin a command in each of the copies named, which must be idle."""

    def check_command(self, command: Command) -> None:  # noqa: B027
        """Refuse a command that cannot be sent to a copy, with what sending it would raise."""

    @abstractmethod
    def wait(self, count: int | None = None, timeout: float | None = None) -> Finished:
        """Wait until ``count`` busy copies have finished or failed (None: all of them), and return those that have.

        Copies that exceed a time limit of the fleet are ended meanwhile, and fail.

        Args:
            count: how many; more that have finished are returned too.
            timeout: seconds after which the wait is given up: then fewer are returned, perhaps none, and the rest stay busy.
        """

    @property
    @abstractmethod
    def busy(self) -> list[int]:
        """The copies that have begun something :meth:`wait` has not returned yet."""

    @abstractmethod
    def fds(self) -> list[int]:
        """Descriptors of which one becomes readable once ``wait(1, 0.0)`` may have something to return.

        A fleet whose copies do their work within ``wait`` gives none. For waiting for several fleets at a time.
        """

    @property
    @abstractmethod
    def next_deadline(self) -> float | None:
        """The ``time.monotonic()`` at which the first busy copy exceeds a time limit and ``wait`` is due; None for never."""

    # Failure and end

    @abstractmethod
    def alive(self, index: int) -> bool:
        """Whether copy ``index`` exists and has not failed, as far as is known."""

    @abstractmethod
    def end(self, index: int, timed_out: float | None = None) -> Failure:
        """End copy ``index`` at once, whatever it is doing, and say what is known of it. It is idle afterwards.

        Args:
            index: the copy.
            timed_out: the time limit in seconds that it exceeded, if that is why.
        """

    @abstractmethod
    def where(self, index: int) -> str:
        """The copy's pid or sandbox id, for messages: ``"pid 4711"``."""

    @abstractmethod
    def usage(self, index: int) -> Usage:
        """What copy ``index`` has used so far."""

    def age(self, index: int) -> float:
        """Wall-clock seconds since copy ``index`` was made, found without asking anybody; nan as ``Usage.seconds`` is."""
        return self.usage(index).seconds

    @abstractmethod
    def release(self, indices: Sequence[int]) -> None:
        """Let idle copies go, their environments closed. Copies that do not exist may be among them."""

    @abstractmethod
    def close(self, timeout: float | None = None) -> None:
        """End every copy: gently within ``timeout`` seconds, then by force. Can be called again, never raises."""

"""The seam between the vector environment and the engines: N copies stepped as a batch.

A fleet knows how to fork its base, how to bring one batch of work to its copies and the answers back, and why a copy
failed. It knows nothing of autoreset modes, seeds or episodes: that is the vector environment's.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from prized_gym.batch import ActionBuffer, AnySpace, Array, ObservationBuffer
from prized_gym.errors import Failure

# What a copy does in a batch; a byte per copy.
NOOP = 0
STEP = 1
"""``env.step(action)``."""
RESET = 2
"""``env.reset()`` without seed or options: an autoreset in place."""
STEP_RESET = 3
"""``env.step(action)``, and if that ended the episode, ``env.reset()`` too; the terminal observation goes to ``finals``."""
COMMAND = 4
"""A :class:`Command` sent along."""


class Command:
    """Something a copy is asked to do that is not part of a plain step."""


@dataclass
class Fresh:
    """What a new fork is given before anything else: its own random state, ``on_fork``, the attributes set so far.

    Attributes:
        seed: the seed every generator of the copy is given, also passed to ``on_fork``.
        attributes: replayed through ``env.set_wrapper_attr``.
        random_state: where the ``np_random`` of the copy it replaces stood, to go on from there.
    """

    seed: int
    attributes: dict[str, Any] = field(default_factory=dict)
    random_state: dict[str, Any] | None = None


@dataclass
class Start(Command):
    """The first command of a copy that is not to be reset yet."""

    fresh: Fresh


@dataclass
class Reset(Command):
    """``env.reset(seed=seed, options=options)``.

    Attributes:
        seed: passed on.
        options: passed on.
        fresh: in a new fork, what comes before the reset.
        reseed: in a copy that has begun with :class:`Start`, the seed its generators are given before the reset.
        from_base: do not reset, but start in the state the base was reset to, with the observation it gave.
    """

    seed: int | None = None
    options: dict[str, Any] | None = None
    fresh: Fresh | None = None
    reseed: int | None = None
    from_base: bool = False


@dataclass
class Call(Command):
    """The attribute ``name`` of the environment or of the wrapper that has it: called if it can be, else returned."""

    name: str
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] | None = None


@dataclass
class SetAttr(Command):
    """``env.set_wrapper_attr(name, value)`` for each pair."""

    values: dict[str, Any]


@dataclass
class Reseed(Command):
    """Give every generator of the copy a stream of its own, set by ``seed``."""

    seed: int


@dataclass
class Usage:
    """What a copy has used since it was made.

    Attributes:
        cpu_seconds: CPU time of its process, in seconds; nan where the engine cannot tell.
        memory_gb: memory held, in GB (1e9 bytes); nan where the engine cannot tell.
    """

    cpu_seconds: float = float("nan")
    memory_gb: float = float("nan")


def not_forked(index: int) -> Failure:
    """What there is to say of a copy that was never made."""
    return Failure(index, "not forked", "died", "does not exist")


class Fleet(ABC):
    """N copies of one base.

    After :meth:`wait`, the buffers hold what the copies that finished gave: ``observations``, ``rewards``,
    ``terminations`` and ``truncations`` (float64 and bool, shape ``(size,)``), and for those that have one, an entry by
    index in ``infos``, ``finals``, ``results`` and ``failures``. The caller empties these.
    """

    can_branch: ClassVar[bool] = True
    carries_random_state: ClassVar[bool] = False
    """Whether a new fork can go on with the ``np_random`` of the copy it replaces."""

    observations: ObservationBuffer
    actions: ActionBuffer
    rewards: npt.NDArray[np.float64]
    terminations: npt.NDArray[np.bool_]
    truncations: npt.NDArray[np.bool_]

    def __init__(self, size: int) -> None:
        self.size = size
        self.infos: dict[int, dict[str, Any]] = {}
        self.finals: dict[int, tuple[Any, dict[str, Any]]] = {}
        self.results: dict[int, Any] = {}
        self.failures: dict[int, Failure] = {}
        self._dead: dict[int, Failure] = {}

    def allocate(self, observation_space: AnySpace, action_space: AnySpace) -> None:
        """Make the buffers in this process's own memory."""
        self.observations = ObservationBuffer(observation_space, self.size)
        self.actions = ActionBuffer(action_space, self.size)
        self.rewards = np.zeros(self.size, dtype=np.float64)
        self.terminations = np.zeros(self.size, dtype=np.bool_)
        self.truncations = np.zeros(self.size, dtype=np.bool_)

    def set_time_limits(self, step: float | None, reset: float | None) -> None:  # noqa: B027
        """Tell what time limits, in seconds, the caller enforces through :meth:`end`.

        An engine may have limits of its own for those that are None.
        """

    # Making copies

    @abstractmethod
    def fork(self, first: Mapping[int, Command], timeout: float | None = None) -> None:
        """Make each copy in ``first`` a fresh fork of the base, ending the one it replaces, and begin that command in it.

        Raises:
            BaseDiedError: the base is gone.
            ForkUnsafeError: the base cannot be forked as it stands.
        """

    @abstractmethod
    def branch(self, source: int, targets: Sequence[int]) -> None:
        """Make the copies ``targets`` forks of copy ``source`` as it stands, observations and flags included."""

    # One batch

    @abstractmethod
    def step(self, arrays: Sequence[Array], objects: Sequence[Sequence[Any]], ops: bytes) -> None:
        """Begin a batch in every copy.

        Args:
            arrays: one action array ``(size, *shape)`` per array leaf of the action space.
            objects: one sequence of ``size`` values per object leaf.
            ops: a byte per copy: ``STEP``, ``STEP_RESET``, ``RESET`` or ``NOOP``.
        """

    @abstractmethod
    def step_some(
        self, indices: Sequence[int], arrays: Sequence[Array], objects: Sequence[Sequence[Any]], ops: bytes
    ) -> None:
        """Begin a batch in the copies ``indices``, which must be idle; arguments as for :meth:`step`, in their order."""

    @abstractmethod
    def command(self, commands: Mapping[int, Command]) -> None:
        """Begin a command in each of the copies named, which must be idle."""

    @abstractmethod
    def wait(self, count: int | None = None, timeout: float | None = None) -> list[int]:
        """Wait until ``count`` busy copies have finished or failed (None: all of them).

        Returns:
            The copies that have finished or failed, fewer than ``count`` if ``timeout`` seconds passed first.
        """

    @property
    @abstractmethod
    def busy(self) -> list[int]:
        """The copies that have begun something :meth:`wait` has not returned yet."""

    def resetting(self, index: int) -> bool | None:
        """Whether copy ``index``, busy with ``STEP_RESET``, has come to the reset; None where the engine cannot see that."""
        return None

    # Failure and end

    @abstractmethod
    def alive(self, index: int) -> bool:
        """Whether copy ``index`` exists and has not failed, as far as is known."""

    @abstractmethod
    def end(self, index: int, timed_out: float | None = None) -> Failure:
        """End copy ``index`` at once, whatever it is doing, and say what is known of it.

        Args:
            timed_out: the time limit in seconds it exceeded, if that is why.
        """

    def lose(self, index: int, failure: Failure) -> None:
        """Take over copy ``index`` as lost: whoever asks something of it before it is forked gets ``failure``."""
        self._dead[index] = failure

    @abstractmethod
    def where(self, index: int) -> str:
        """The copy's pid or sandbox id, for messages: ``"pid 4711"``."""

    def usage(self, index: int) -> Usage:
        """What copy ``index`` has used so far."""
        return Usage()

    def release(self, indices: Sequence[int]) -> None:
        """Let idle copies go, their environments closed. Copies that do not exist may be among them."""
        for index in indices:
            if self.alive(index):
                self.end(index)

    @abstractmethod
    def close(self, timeout: float | None = None) -> None:
        """End every copy: gently within ``timeout`` seconds, then by force. Can be called again, never raises."""

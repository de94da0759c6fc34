"""What the trainer, the base process and the copies say to each other; each message travels pickled (``framing``)."""

from __future__ import annotations

import pickle
import traceback
from dataclasses import dataclass, field
from typing import Any

from prized_gym.engines.local import framing
from prized_gym.interface.commands import Command

# The trainer and the base process, on the base's control socket


@dataclass
class Setup:
    """The first message to a base process, minus ``sys.path``, which has to be in place before this can be unpickled.

    Attributes:
        recipe: :meth:`prized_gym.recipe.Recipe.dumps`.
        allow_threads: fork although there are live threads.
        workdir: the directory the base runs in, of which each copy gets its own view.
        scratch: where those views are kept.
        close_copies: ``"own"``, True or False, as in :class:`prized_gym.Base`.
    """

    recipe: bytes
    allow_threads: bool = False
    workdir: str | None = None
    scratch: str | None = None
    close_copies: str | bool = "own"


@dataclass
class Ready:
    """Answer to :class:`Setup`: the base is warm. ``description`` is a pickled :class:`Description`."""

    description: bytes


@dataclass
class Failed:
    """Answer to :class:`Setup`: the exception (pickled, if it can be carried over) and its traceback."""

    exception: bytes | None
    traceback: str


@dataclass
class FleetRequest:
    """Join a fleet of ``count`` copies; its socket, its memory and its semaphores travel along."""

    count: int


@dataclass
class ResetRequest:
    """Reset the environments in the base, once, for copies to start from. Answered by :class:`Failed` or None."""

    seed: int | None


# A fleet and the base process, on the fleet's socket


@dataclass
class ForkRequest:
    """Fork some copies; two descriptors each travel along: the copy's socket and its stderr.

    Attributes:
        number: comes back in the answer.
        copies: by index in the fleet, the number of the copy in its vector environment.
    """

    number: int
    copies: dict[int, int]


@dataclass
class Forked:
    """Answer to :class:`ForkRequest`: the pid of each copy, and why there are not more of them.

    Attributes:
        number: of the request.
        pids: by index in the fleet.
        unsafe: the message of a ``ForkUnsafeError``.
        error: anything else that stood in the way.
    """

    number: int
    pids: dict[int, int] = field(default_factory=dict)
    unsafe: str | None = None
    error: str | None = None


@dataclass
class Adopting:
    """A copy of this fleet is about to branch: processes that nobody has announced will arrive."""


@dataclass
class Adopted:
    """The branching is over; these processes are copies of this fleet."""

    pids: list[int]


@dataclass
class Died:
    """Processes below the base ended: the status of ``os.waitpid`` of each pid."""

    statuses: dict[int, int]


# A fleet and a copy, on the copy's socket and in its slot of shared memory


@dataclass
class CheckBranch(Command):
    """Say whether this copy can be forked: an error if it holds what a fork cannot carry over."""


@dataclass
class Branch(Command):
    """Fork this copy into the copies ``targets``; two descriptors each follow in a second message."""

    targets: list[int]


@dataclass
class Answer:
    """What a copy says about a batch, apart from what shared memory holds. Only what is there is filled in."""

    info: dict[str, Any] | None = None
    final: bytes | None = None
    objects: list[Any] | None = None
    result: Any = None
    raised: Raised | None = None


@dataclass
class Raised:
    """An exception on its way to the trainer: pickled if it can be carried over, else its text alone."""

    exception: bytes | None
    summary: str
    traceback: str
    exited: bool = False


def describe_exception(error: BaseException) -> Raised:
    """What there is to say of an exception that the environment raised, ``SystemExit`` included."""
    # The outermost frame is the copy's run loop.
    inner = error.__traceback__.tb_next if error.__traceback__ is not None else None
    text = "".join(traceback.format_exception(type(error), error, inner or error.__traceback__))
    if isinstance(error, SystemExit):
        return Raised(None, f"called sys.exit({error.code!r})"[:2000], text, exited=True)
    summary = "raised " + traceback.format_exception_only(type(error), error)[-1].strip()
    return Raised(dump_exception(error), summary[:2000], text)


def dump_exception(error: BaseException) -> bytes | None:
    """Pickle an exception if it comes back whole, else None."""
    try:
        data = framing.dumps(error)
        return data if type(pickle.loads(data)).__name__ == type(error).__name__ else None
    except Exception:
        return None


def load_exception(data: bytes | None) -> BaseException | None:
    """The exception that :func:`dump_exception` pickled, or None."""
    if data is None:
        return None
    try:
        error = pickle.loads(data)
    except Exception:
        return None
    return error if isinstance(error, BaseException) else None

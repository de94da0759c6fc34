"""What the trainer, the base process and the copies say to each other; each message travels pickled (``framing``)."""

from __future__ import annotations

import contextlib
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
    """Reset the environments in the base, once, for copies to start from.

    Answered by :class:`Failed` or None, on a socket that travels along.
    """

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
    """Pickle an exception so that it comes back whole: of its class, with its arguments and attributes; None if it cannot.

    Pickle rebuilds an exception by calling its class with its ``args``, which many classes do not take back: one whose
    ``__init__`` makes a message of what it is given. Such a one is rebuilt without that call.
    """
    with contextlib.suppress(Exception):
        data = framing.dumps(error)
        back = pickle.loads(data)
        if _same_class(back, error) and str(back) == str(error):
            return data
    with contextlib.suppress(Exception):
        data = framing.dumps(_parts(error))
        if _same_class(pickle.loads(data), error):
            return data
    return None


def _same_class(back: Any, error: BaseException) -> bool:
    return type(back).__name__ == type(error).__name__


def _parts(error: BaseException) -> _Parts:
    reduced: Any = BaseException.__reduce__(error)
    with contextlib.suppress(Exception):
        # Some classes add what is no attribute of the instance.
        reduced = error.__reduce__()
    given = reduced[2] if isinstance(reduced, tuple) and len(reduced) > 2 and isinstance(reduced[2], dict) else {}
    attributes = {name: value for name, value in {**vars(error), **given}.items() if _can_be_pickled(value)}
    return _Parts(type(error), tuple(_portable(each) for each in error.args), attributes)


def _portable(value: Any) -> Any:
    if isinstance(value, BaseException):
        return _parts(value)
    if isinstance(value, (list, tuple)) and any(isinstance(each, BaseException) for each in value):
        # The exceptions of a group.
        return [_portable(each) for each in value]
    return value if _can_be_pickled(value) else repr(value)


def _can_be_pickled(value: Any) -> bool:
    try:
        pickle.loads(framing.dumps(value))
    except Exception:
        return False
    return True


_HEAP_TYPE = 1 << 9
"""Flag of a class: made while the program runs, as those written in Python are."""


class _Parts:
    """What an exception consists of; pickled in its place, it comes back as that exception."""

    def __init__(self, kind: type[BaseException], args: tuple[Any, ...], attributes: dict[str, Any]) -> None:
        self._given = (kind, args, attributes)

    def __reduce__(self) -> tuple[Any, ...]:
        return _assemble, self._given


def _assemble(kind: type[BaseException], args: tuple[Any, ...], attributes: dict[str, Any]) -> BaseException:
    # Those of a class written in C: one written in Python may want other arguments.
    base: Any = next(each for each in kind.__mro__ if not each.__flags__ & _HEAP_TYPE)
    error: BaseException = base.__new__(kind, *args)
    with contextlib.suppress(TypeError):
        base.__init__(error, *args)
    error.args = args
    error.__setstate__(attributes)
    return error


def load_exception(data: bytes | None) -> BaseException | None:
    """The exception that :func:`dump_exception` pickled, or None."""
    if data is None:
        return None
    try:
        error = pickle.loads(data)
    except Exception:
        return None
    return error if isinstance(error, BaseException) else None

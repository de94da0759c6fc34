"""What a protocol is: the operations of one server, each a generator of requests, and what drives them."""

from __future__ import annotations

import contextlib
import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn, TypeAlias, TypeVar

import gymnasium as gym
import numpy as np

from prized_gym.errors import PrizedGymError
from prized_gym.interface.commands import Fresh
from prized_gym.wire.errors import ProtocolError

_Self = TypeVar("_Self", bound="Protocol")
_T = TypeVar("_T")

Options: TypeAlias = "dict[str, Any] | None"

MAX_REQUESTS = 100
"""Requests that one operation may make."""


class UnsupportedError(PrizedGymError, NotImplementedError):
    """A protocol has no way to ask its server for this; nothing was asked."""


@dataclass(frozen=True)
class Request:
    """What a channel brings to the server.

    Attributes:
        method: as in HTTP.
        path: the target, with its query, below the server's address.
        headers: beyond ``Host``, ``Content-Length`` and ``Connection``, which are the channel's.
        body: empty if there is none.
        timeout: seconds the answer may take, or None for what is left of the time that the operation has.
    """

    method: str
    path: str
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    timeout: float | None = None


@dataclass(frozen=True)
class Response:
    """What a channel brings back: at most ``Protocol.max_answer_bytes`` of body, never more of it read than that.

    Attributes:
        status: as in HTTP.
        headers: by lower-case name.
        body: whole, any transfer or content encoding undone.
        url: how errors name what was asked.
    """

    status: int
    headers: Mapping[str, str]
    body: bytes
    url: str = ""


Exchange: TypeAlias = Generator[Request, Response, _T]
"""An operation under way: yields requests, is sent the answers, returns a ``T``."""


@dataclass(frozen=True)
class ServerDescription:
    """What a server tells of its environment. All of it is plain data; nothing in it names code to run.

    Attributes:
        observation_space, action_space: of one copy.
        metadata: the environment's, without what could not be sent.
        render_mode: the environment's.
        spec: the fields of its ``EnvSpec``, or None.
        seconds: how long building the environment took.
    """

    observation_space: gym.Space[Any]
    action_space: gym.Space[Any]
    metadata: dict[str, Any] = field(default_factory=dict)
    render_mode: str | None = None
    spec: dict[str, Any] | None = None
    seconds: float = 0.0


@dataclass(frozen=True)
class StepAnswer:
    """One step as Gymnasium returns it, and what the reset after it gave, if there was one.

    Attributes:
        obs, reward, terminated, truncated, info: the step's; the observation is the last of its episode where it ended.
        reset: observation and info of the reset, or None.
    """

    obs: Any
    reward: float
    terminated: bool
    truncated: bool
    info: dict[str, Any]
    reset: tuple[Any, dict[str, Any]] | None = None


class Protocol(ABC):
    """How to ask one server for what an environment does.

    Each operation is a generator: it yields a :class:`Request`, is sent the :class:`Response`, yields further ones where it
    needs them, and returns what the operation gave. One that asks nothing is a generator too (``yield from ()``). What
    fails on the way (no answer within the time limit, a connection that is lost) ends the operation: the generator is closed.

    One object belongs to one copy, since a protocol may remember things of its episode (its seed, say): a base's protocol is
    forked for each copy, and a copy's for each branch. :meth:`reset` and :meth:`step` must be written; what else a server
    cannot do is refused with an :class:`UnsupportedError`.

    Every operation that reads an answer may raise:
        RemoteError: the environment raised.
        ProtocolError: the answer is not one that this protocol allows.

    Attributes:
        max_answer_bytes: the most a channel may read of an answer's body.
        description: spaces and metadata, known from the start or after :meth:`describe`.
    """

    max_answer_bytes: int = 256 << 20
    description: ServerDescription | None = None

    def fork(self: _Self) -> _Self:
        """Return a protocol for a fork of the server this one speaks to, as it stands."""
        return copy.copy(self)

    # The server

    def ready(self) -> Exchange[bool | None]:
        """Ask once whether the server is ready; None: any connection that it accepts is sign enough.

        Raises:
            ProtocolError: it never will be.
        """
        yield from ()
        return None

    def describe(self) -> Exchange[ServerDescription]:
        """Find out spaces and metadata, which are kept as ``description`` too."""
        yield from ()
        if self.description is None:
            raise ProtocolError(f"{type(self).__name__} has no description of its server's spaces")
        return self.description

    def reset_base(self, seed: int | None) -> Exchange[None]:
        """Reset the environments of a base once, for copies to start from with ``reset(…, base=True)``."""
        self._cannot("reset its environment in the base")

    # Episodes

    @abstractmethod
    def reset(
        self, seed: int | None, options: Options, *, fresh: Fresh | None = None, base: bool = False
    ) -> Exchange[tuple[Any, dict[str, Any]]]:
        """Begin an episode and return observation and info, checked.

        Args:
            seed: for the episode, or None to go on with the environment's own stream.
            options: as ``gymnasium.Env.reset`` takes them.
            fresh: in a new fork, what comes before the reset.
            base: start where the base's own reset left off, with the observation it gave.

        Raises:
            UnsupportedError: the server has no way to do what is asked.
        """

    @abstractmethod
    def step(self, action: Any, *, then_reset: bool = False) -> Exchange[StepAnswer]:
        """Take a step and return it, checked.

        Args:
            action: as the action space has it.
            then_reset: a step that ends the episode may go on with a reset, without seed or options, which saves a request;
                where its answer has none, :meth:`reset` follows.
        """

    # What a server need not have

    def start(self, fresh: Fresh) -> Exchange[None]:
        """Give a new fork its random state and attributes, without a reset."""
        self._cannot("start a copy without a reset")

    def call(self, name: str, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Exchange[Any]:
        """Call the method ``name`` of the environment or of the wrapper that has it, or read the attribute.

        Returns:
            Plain values, arrays or a space.
        """
        self._cannot("call a method")

    def set_attr(self, values: Mapping[str, Any]) -> Exchange[None]:
        """Set attributes, as ``gymnasium.Env.set_wrapper_attr`` does."""
        self._cannot("set an attribute")

    def render(self) -> Exchange[Any]:
        """Return a frame: an array, text, or a list of either."""
        self._cannot("render")

    def reseed(self, seed: int) -> Exchange[None]:
        """Give every generator of the copy a stream of its own."""
        self._cannot("reseed")

    def stack(self) -> Exchange[str]:
        """Return where the environment hangs, asked in a way that is answered while it does; empty if there is none."""
        yield from ()
        return ""

    def _cannot(self, what: str) -> NoReturn:
        raise UnsupportedError(f"the server that {type(self).__name__} speaks to cannot {what}")


def checked(operation: Exchange[_T]) -> Exchange[_T]:
    """Pass an operation on, what it yields checked and counted, and close it at the end, however that comes.

    Raises:
        ProtocolError: it is no generator, yields what is no request, or makes more than ``MAX_REQUESTS``.
    """
    if not isinstance(operation, Generator):
        raise ProtocolError(
            f"a protocol's operation gave {_short(operation)}: write it as a generator, with `response = yield Request(…)` "
            "and a `return` of what it gives"
        )
    response: Any = None
    try:
        for made in range(MAX_REQUESTS + 1):
            try:
                request = operation.send(response)
            except StopIteration as ended:
                value: _T = ended.value
                return value
            if not isinstance(request, Request):
                raise ProtocolError(f"{_name(operation)} yielded {_short(request)}, which is no Request")
            if (why := _malformed(request)) is not None:
                raise ProtocolError(f"{_name(operation)} yielded a Request whose {why}")
            if made < MAX_REQUESTS:
                response = yield request
        raise ProtocolError(f"{_name(operation)} made more than {MAX_REQUESTS} requests")
    finally:
        operation.close()


def drive(operation: Exchange[_T], ask: Callable[[Request], Response]) -> _T:
    """Run one operation of a protocol to its end.

    Args:
        operation: what a method of a :class:`Protocol` gave.
        ask: brings a request to the server and its answer back. What it raises ends the operation.

    Returns:
        What the operation returned.

    Raises:
        ProtocolError: as :func:`checked`, or the operation's own.
    """
    exchange = checked(operation)
    response: Any = None
    try:
        while True:
            try:
                request = exchange.send(response)
            except StopIteration as ended:
                value: _T = ended.value
                return value
            response = ask(request)
    finally:
        exchange.close()


def _malformed(request: Request) -> str | None:
    """Which field of a request is not of its type, and what it is; None if all are."""
    for name in ("method", "path"):
        if not isinstance(value := getattr(request, name), str):
            return f"{name} is {_short(value)}, not text"
    if not isinstance(request.headers, Mapping):
        return f"headers are {_short(request.headers)}, not a map"
    for item in request.headers.items():
        if not all(isinstance(each, str) for each in item):
            return f"headers have {_short(item)}, and names and values are text"
    if not isinstance(request.body, (bytes, bytearray, memoryview)):
        return f"body is {_short(request.body)}, not bytes"
    limit = request.timeout
    if limit is not None and (not isinstance(limit, (int, float)) or not limit > 0):
        return f"timeout is {_short(limit)}, not seconds"
    return None


def began(value: Any) -> tuple[Any, dict[str, Any]]:
    """Check what a protocol's reset returned.

    Returns:
        The observation, whose fit to its space is not checked here, and the info.

    Raises:
        ProtocolError: it is no such pair.
    """
    if not isinstance(value, tuple) or len(value) != 2:
        raise ProtocolError(f"a protocol's reset returned {_short(value)}, which is no pair of observation and info")
    return value[0], _info(value[1], "reset")


def stepped(answer: Any) -> StepAnswer:
    """Check what a protocol's step returned, but for the fit of the observation to its space.

    Raises:
        ProtocolError: it is no StepAnswer, or a field of it has not its type.
    """
    if not isinstance(answer, StepAnswer):
        raise ProtocolError(f"a protocol's step returned {_short(answer)}, which is no StepAnswer")
    _info(answer.info, "step")
    for name in ("terminated", "truncated"):
        if not isinstance(value := getattr(answer, name), (bool, np.bool_)):
            raise ProtocolError(f"a protocol's step returned {name}={_short(value)}, which is neither True nor False")
    if answer.reset is not None:
        began(answer.reset)
        if not (answer.terminated or answer.truncated):
            raise ProtocolError("a protocol's step returned a reset after a step that does not end its episode")
    if type(answer.reward) is float:
        return answer
    reward = answer.reward
    if isinstance(reward, np.ndarray) and reward.shape == ():
        reward = reward[()]
    if isinstance(reward, (bool, int, float, np.bool_, np.integer, np.floating)):
        with contextlib.suppress(OverflowError):
            return replace(answer, reward=float(reward))
    raise ProtocolError(f"a protocol's step returned the reward {_short(answer.reward)}, which is no number")


def _info(info: Any, what: str) -> dict[str, Any]:
    if not isinstance(info, dict) or not all(isinstance(key, str) for key in info):
        raise ProtocolError(
            f"a protocol's {what} returned the info {_short(info)}, which is no dict with names as keys"
        )
    return info


def refusal(response: Response, message: str) -> ProtocolError:
    """Return an error about an answer, which shows its beginning."""
    return ProtocolError(message, url=response.url, status=response.status, body=response.body)


def _name(operation: Exchange[Any]) -> str:
    return str(getattr(operation, "__qualname__", type(operation).__qualname__))


def _short(value: Any) -> str:
    try:
        return f"{value!r:.100} ({type(value).__name__})"
    except Exception:  # a repr that fails
        return f"a {type(value).__name__}"

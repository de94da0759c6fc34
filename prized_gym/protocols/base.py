"""What a server in a base speaks, without any I/O: requests are built here and answers are read here.

How a request travels, over HTTP or through a command inside the sandbox, is the channel's affair. A server of your own
is described by a subclass of `Protocol`; only `reset`, `read_reset`, `step` and `read_step` must be written. Answers
come from a sandbox, so each is bounded and checked before anything of it is used.

    >>> protocol = EpisodeProtocol("/rollout?seed={seed}", reward="reward")
    >>> protocol.reset(7, None) is None                     # nothing to ask: the episode is played by the step
    True
    >>> request = protocol.step(0)
    >>> request.method, request.path
    ('GET', '/rollout?seed=7')
    >>> answer = Response(200, {}, b'{"reward": 0.5, "text": "fine"}')
    >>> step = protocol.read_step(answer)
    >>> step.reward, step.terminated, step.info["text"]
    (0.5, True, 'fine')
"""

from __future__ import annotations

import copy
import json
import math
import urllib.parse
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeAlias, TypeVar

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from prized_gym.wire.codec import Limits, decode, encode
from prized_gym.wire.errors import ProtocolError, RemoteError, WireError
from prized_gym.wire.spaces import check, default_value, space_from_data

__all__ = [
    "EpisodeProtocol",
    "Fresh",
    "GymProtocol",
    "Protocol",
    "ProtocolError",
    "RemoteError",
    "Request",
    "Response",
    "ServerDescription",
    "StepAnswer",
]

_Self = TypeVar("_Self", bound="Protocol")
_Read = TypeVar("_Read")
_Options: TypeAlias = "dict[str, Any] | None"


@dataclass(frozen=True)
class Request:
    """What a channel brings to the server.

    Attributes:
        method: As in HTTP.
        path: The target, with its query, below the server's address.
        headers: Beyond `Host`, `Content-Length` and `Connection`, which are the channel's.
        body: Empty if there is none.
        timeout: Seconds the answer may take, or None for what the channel was given.
    """

    method: str
    path: str
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    timeout: float | None = None


@dataclass(frozen=True)
class Response:
    """What a channel brings back: at most `Protocol.max_answer_bytes` of body, never more of it read than that.

    Attributes:
        status: As in HTTP.
        headers: By lower-case name.
        body: Whole, any transfer or content encoding undone.
        url: How errors name what was asked.
    """

    status: int
    headers: Mapping[str, str]
    body: bytes
    url: str = ""


@dataclass(frozen=True)
class ServerDescription:
    """What a server tells of its environment. All of it is plain data; nothing in it names code to run.

    Attributes:
        observation_space, action_space: Of one copy.
        metadata: The environment's, without what could not be sent.
        render_mode: The environment's.
        spec: The fields of its `EnvSpec`, or None.
        seconds: How long building the environment took.
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
        obs, reward, terminated, truncated, info: The step's; the observation is the last of its episode where it ended.
        reset: Observation and info of the reset, or None.
    """

    obs: Any
    reward: float
    terminated: bool
    truncated: bool
    info: dict[str, Any]
    reset: tuple[Any, dict[str, Any]] | None = None


@dataclass(frozen=True)
class Fresh:
    """What a new fork is given before anything else.

    Attributes:
        seed: The seed every generator of the copy gets.
        copy: The copy's index in its vector env.
        attributes: Set on the environment, as `set_wrapper_attr` does.
    """

    seed: int
    copy: int = 0
    attributes: Mapping[str, Any] = field(default_factory=dict)


class Protocol(ABC):
    """Requests and answers of one server.

    One object belongs to one copy, since a protocol may remember what it asked (a seed, say): a channel takes `fork()`
    of the base's protocol for each copy, and of a copy's for each branch. Every method that builds a request may return
    None if there is nothing to ask; the matching `read_…` is then called with None.

    Attributes:
        max_answer_bytes: The most a channel may read of an answer's body.
        description: Spaces and metadata, known from the start or after `read_describe`.
    """

    max_answer_bytes: int = 256 << 20
    description: ServerDescription | None = None

    def fork(self: _Self) -> _Self:
        """A protocol for a fork of the server this one speaks to, as it stands."""
        return copy.copy(self)

    # The server

    def ready(self) -> Request | None:
        """Asks whether the server is ready; None if any connection it accepts is sign enough."""
        return None

    def read_ready(self, response: Response | None) -> bool:
        """Whether it is: by default, whether the status is below 300.

        Raises:
            ProtocolError: If it never will be.
        """
        return response is None or response.status < 300

    def describe(self) -> Request | None:
        """Asks for spaces and metadata; None if they are known without."""
        return None

    def read_describe(self, response: Response | None) -> ServerDescription:
        """The description, which is kept as `description` too.

        Raises:
            ProtocolError: If the answer is none.
        """
        if self.description is None:
            raise ProtocolError(f"{type(self).__name__} has no description of its server's spaces")
        return self.description

    def reset_base(self, seed: int | None) -> Request:
        """In a base: resets its environments once, for copies to start from with `reset(…, base=True)`."""
        self._cannot("reset its environment in the base")

    def read_reset_base(self, response: Response) -> None:
        """Raises as `read_reset`."""
        self._accepted(response)

    # Episodes

    @abstractmethod
    def reset(
        self, seed: int | None, options: _Options, *, fresh: Fresh | None = None, base: bool = False
    ) -> Request | None:
        """Begins an episode.

        Args:
            seed: For the episode, or None to go on with the environment's own stream.
            options: As `gymnasium.Env.reset` takes them.
            fresh: In a new fork, what comes before the reset.
            base: Start where the base's own reset left off, with the observation it gave.

        Raises:
            ProtocolError: If the server has no way to do what is asked.
        """

    @abstractmethod
    def read_reset(self, response: Response | None) -> tuple[Any, dict[str, Any]]:
        """Observation and info, checked.

        Raises:
            RemoteError: If the environment raised.
            ProtocolError: If the answer is none.
        """

    @abstractmethod
    def step(self, action: Any, *, then_reset: bool = False) -> Request | None:
        """Takes a step; with `then_reset`, a step that ends the episode also resets, without seed or options."""

    @abstractmethod
    def read_step(self, response: Response | None) -> StepAnswer:
        """The step, checked. Raises as `read_reset`."""

    # What a server need not have

    def start(self, fresh: Fresh) -> Request | None:
        """Gives a new fork its random state and attributes, without a reset."""
        self._cannot("start a copy without a reset")

    def read_start(self, response: Response | None) -> None:
        """Raises as `read_reset`."""
        self._accepted(response)

    def call(self, name: str, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Request:
        """Calls the method `name` of the environment or of the wrapper that has it, or reads the attribute."""
        self._cannot("call a method")

    def read_call(self, response: Response) -> Any:
        """What it returned: plain values, arrays or a space. Raises as `read_reset`."""
        self._cannot("call a method")

    def set_attr(self, values: Mapping[str, Any]) -> Request:
        """Sets attributes, as `gymnasium.Env.set_wrapper_attr` does."""
        self._cannot("set an attribute")

    def read_set_attr(self, response: Response) -> None:
        """Raises as `read_reset`."""
        self._accepted(response)

    def render(self) -> Request:
        """Asks for a frame."""
        self._cannot("render")

    def read_render(self, response: Response) -> Any:
        """The frame: an array, text, or a list of either. Raises as `read_reset`."""
        self._cannot("render")

    def reseed(self, seed: int) -> Request | None:
        """Gives every generator of the copy a stream of its own."""
        self._cannot("reseed")

    def read_reseed(self, response: Response | None) -> None:
        """Raises as `read_reset`."""
        self._accepted(response)

    def stack(self) -> Request | None:
        """Asks where the environment hangs, in a way that is answered while it does; None if there is none."""
        return None

    def read_stack(self, response: Response | None) -> str:
        """The stack as text, at most 20,000 characters; empty if there is none."""
        return "" if response is None else response.body[-20_000:].decode("utf-8", "backslashreplace")

    # For subclasses

    def _accepted(self, response: Response | None) -> None:
        if response is not None and response.status >= 300:
            raise _refusal(response, "the server refused")

    def _cannot(self, what: str) -> NoReturn:
        raise ProtocolError(f"the server that {type(self).__name__} speaks to cannot {what}")


class GymProtocol(Protocol):
    """Our own server's protocol, `python -m prized_gym.server`: all of a Gymnasium environment.

    Args:
        max_answer_bytes: The most an answer may have.
        copy: Whether arrays in observations and infos get memory of their own. Otherwise they are read-only views of
            the answer they came in: quicker for large ones that are copied into a batch anyway.
    """

    def __init__(self, *, max_answer_bytes: int = 256 << 20, copy: bool = True) -> None:
        self.max_answer_bytes = max_answer_bytes
        self.copy = copy

    def ready(self) -> Request:
        return Request("GET", "/health")

    def read_ready(self, response: Response | None) -> bool:
        return response is not None and response.status == 200

    def describe(self) -> Request:
        return Request("GET", "/spaces")

    def read_describe(self, response: Response | None) -> ServerDescription:
        fields = self._read(response)
        url = response.url if response is not None else ""
        try:
            self.description = ServerDescription(
                observation_space=space_from_data(fields.get("observation_space"), "observation_space"),
                action_space=space_from_data(fields.get("action_space"), "action_space"),
                metadata=_named(fields.get("metadata"), "metadata"),
                render_mode=_optional_text(fields.get("render_mode"), "render_mode"),
                spec=None if fields.get("spec") is None else _named(fields["spec"], "spec"),
                seconds=_number(fields.get("seconds"), "seconds"),
            )
        except WireError as error:
            raise ProtocolError(str(error), url=url) from error
        return self.description

    def reset(self, seed: int | None, options: _Options, *, fresh: Fresh | None = None, base: bool = False) -> Request:
        return _post("/reset", seed=seed, options=options, fresh=_fresh(fresh), base=base or None)

    def read_reset(self, response: Response | None) -> tuple[Any, dict[str, Any]]:
        return self._checked(response, self._observed, self._read(response))

    def reset_base(self, seed: int | None) -> Request:
        return _post("/reset_base", seed=seed)

    def step(self, action: Any, *, then_reset: bool = False) -> Request:
        return self.steps((action,), then_reset=then_reset)

    def steps(self, actions: Sequence[Any], *, then_reset: bool = False) -> Request:
        """Takes several steps in one request, as many as the episode lasts."""
        if not len(actions):
            raise ValueError("there are no actions")
        # An action of None would be lost among the fields that are left out.
        body = encode({"actions": list(actions), "then_reset": then_reset}, what="step")
        return Request("POST", "/step", _MSGPACK, body)

    def read_step(self, response: Response | None) -> StepAnswer:
        steps = self.read_steps(response)
        if len(steps) != 1:
            raise ProtocolError(f"{len(steps)} steps came for one action", url=response.url if response else "")
        return steps[0]

    def read_steps(self, response: Response | None) -> list[StepAnswer]:
        """The steps that were taken, at least one; only the last can have ended the episode, or have a reset."""
        return self._checked(response, self._taken, self._read(response))

    def start(self, fresh: Fresh) -> Request:
        return _post("/start", fresh=_fresh(fresh))

    def call(self, name: str, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Request:
        return _post("/call", name=name, args=list(args), kwargs=None if kwargs is None else dict(kwargs))

    def read_call(self, response: Response) -> Any:
        fields = self._read(response)
        if "space" in fields:
            return self._checked(response, space_from_data, fields["space"])
        return fields.get("result")

    def set_attr(self, values: Mapping[str, Any]) -> Request:
        return _post("/set_attr", values=dict(values))

    def render(self) -> Request:
        return _post("/render")

    def read_render(self, response: Response) -> Any:
        return self._read(response).get("frame")

    def reseed(self, seed: int) -> Request:
        return _post("/reseed", seed=seed)

    def stack(self) -> Request:
        return Request("GET", "/stack")

    def close(self) -> Request:
        """Closes the environment and ends the server."""
        return _post("/close")

    def _accepted(self, response: Response | None) -> None:
        self._read(response)

    def _read(self, response: Response | None) -> dict[str, Any]:
        if response is None:
            raise ProtocolError("there is no answer")
        if response.headers.get("content-type", "application/msgpack") != "application/msgpack":
            refused = response.status >= 400
            raise _refusal(response, "refused" if refused else "this is no answer of prized_gym's server")
        try:
            # Arrays of a description are copied when its spaces are built.
            fields = decode(response.body, limits=Limits(max_bytes=self.max_answer_bytes), copy=self.copy)
        except WireError as error:
            raise _refusal(response, str(error)) from error
        if not isinstance(fields, dict):
            raise _refusal(response, f"the answer is {type(fields).__name__}, not a map")
        if response.status != 200:
            raise _remote(response, fields)
        return fields

    def _checked(self, response: Response | None, read: Callable[[Any], _Read], value: Any) -> _Read:
        try:
            return read(value)
        except WireError as error:
            raise ProtocolError(str(error), url="" if response is None else response.url) from error

    def _observed(self, fields: Any) -> tuple[Any, dict[str, Any]]:
        if self.description is None:
            raise ProtocolError("the server must be described before its observations can be checked")
        if not isinstance(fields, dict) or "obs" not in fields:
            raise WireError("there is no observation in the answer")
        return check(self.description.observation_space, fields["obs"]), _named(fields.get("info"), "info")

    def _taken(self, fields: dict[str, Any]) -> list[StepAnswer]:
        steps, reset = fields.get("steps"), fields.get("reset")
        if not isinstance(steps, list) or not steps:
            raise WireError("there are no steps in the answer")
        answers = []
        for number, step in enumerate(steps, start=1):
            obs, info = self._observed(step)
            reward = _number(step.get("reward"), "reward")
            terminated, truncated = (_flag(step.get(name), name) for name in ("terminated", "truncated"))
            last = number == len(steps)
            if not last and (terminated or truncated):
                raise WireError("a step follows the end of its episode")
            if last and reset is not None and not (terminated or truncated):
                raise WireError("a reset follows a step that does not end its episode")
            after = self._observed(reset) if last and reset is not None else None
            answers.append(StepAnswer(obs, reward, terminated, truncated, info, after))
        return answers


class EpisodeProtocol(Protocol):
    """A server that plays a whole episode per request: an environment of one step.

    A reset asks nothing and shows the observation space's default value. The step sends the request, and its answer, a
    JSON object, ends the episode: it becomes the info, with the reward taken out of it by `reward`.

    Args:
        path: The request's target. `{seed}` is replaced by the reset's seed, or without one by the next of a stream
            that the last seed began (in either case it is in the reset's info), and `{action}` by the action as JSON,
            both escaped for a URL.
        reward: The key of the answer's reward, or a function from the decoded answer to it.
        observation_space: What a reset and the last observation come from; by default `Discrete(1)`.
        action_space: By default `Discrete(1)`: the only action plays the episode.
        method: The request's method; by default GET, or POST with a body.
        body: A JSON value, in which the strings `"{seed}"` and `"{action}"` stand for these values and, within longer
            strings, for their text; or a function from seed, action and the reset's options to a JSON value.
        headers: Sent along.
        ready: A target that answers with a status below 300 once the server is ready, or None.
        timeout: Seconds an episode may take, or None for what the channel was given.
        max_answer_bytes: The most an answer may have.

    Attributes:
        answer: The last answer read, decoded.
    """

    answer: Any = None

    def __init__(
        self,
        path: str = "/rollout?seed={seed}",
        reward: str | Callable[[Any], float] = "reward",
        *,
        observation_space: gym.Space[Any] | None = None,
        action_space: gym.Space[Any] | None = None,
        method: str | None = None,
        body: Any = None,
        headers: Mapping[str, str] | None = None,
        ready: str | None = None,
        timeout: float | None = None,
        max_answer_bytes: int = 16 << 20,
    ) -> None:
        self.path, self.reward, self.body = path, reward, body
        self.method = method or ("GET" if body is None else "POST")
        self.headers = dict(headers or {})
        self.ready_path, self.timeout, self.max_answer_bytes = ready, timeout, max_answer_bytes
        self.description = ServerDescription(
            spaces.Discrete(1) if observation_space is None else observation_space,
            spaces.Discrete(1) if action_space is None else action_space,
        )
        self._seed = 0
        self._options: _Options = None
        self._then_reset = False
        self._seeds = np.random.default_rng()

    def fork(self) -> EpisodeProtocol:
        other = copy.copy(self)
        other._seeds = copy.deepcopy(self._seeds)
        return other

    def ready(self) -> Request | None:
        return None if self.ready_path is None else Request("GET", self.ready_path, self.headers)

    def reset(
        self, seed: int | None, options: _Options, *, fresh: Fresh | None = None, base: bool = False
    ) -> Request | None:
        if base:
            self._cannot("start from a reset made in the base")
        if fresh is not None:
            self.start(fresh)
        if seed is None:
            seed = int(self._seeds.integers(1 << 31))
        else:
            self.reseed(seed)
        self._seed = int(seed)
        self._options = options
        return None

    def read_reset(self, response: Response | None) -> tuple[Any, dict[str, Any]]:
        assert self.description is not None
        return default_value(self.description.observation_space), {"seed": self._seed}

    def step(self, action: Any, *, then_reset: bool = False) -> Request:
        plain = _as_json(action)
        path = self.path
        for name, value in (("{seed}", self._seed), ("{action}", plain)):
            text = value if isinstance(value, str) else json.dumps(value)
            path = path.replace(name, urllib.parse.quote(text, safe=""))
        headers, body = self.headers, b""
        if self.body is not None:
            if callable(self.body):
                made = _as_json(self.body(self._seed, action, self._options))
            else:
                made = _filled(self.body, self._seed, plain)
            body = json.dumps(made).encode()
            headers = {"Content-Type": "application/json", **headers}
        self._then_reset = then_reset
        return Request(self.method, path, headers, body, self.timeout)

    def read_step(self, response: Response | None) -> StepAnswer:
        if response is None:
            raise ProtocolError("there is no answer")
        assert self.description is not None
        if not 200 <= response.status < 300:
            raise _refusal(response, "the server failed to play the episode")
        self.answer = answer = self._json(response)
        try:
            given = self.reward(answer) if callable(self.reward) else answer[self.reward]
        except Exception as error:
            why = f"{type(error).__name__}: {error!s:.200}"
            raise _refusal(response, f"no reward is in the answer ({why})") from error
        reward = _finite(given)
        if reward is None:
            raise _refusal(response, f"the reward {given!r:.100} is no finite number")
        obs = default_value(self.description.observation_space)
        info = answer if isinstance(answer, dict) else {"answer": answer}
        after = None
        if self._then_reset:
            self.reset(None, None)
            after = self.read_reset(None)
        return StepAnswer(obs, reward, True, False, info, after)

    def start(self, fresh: Fresh) -> None:
        if fresh.attributes:
            self._cannot("set an attribute")
        self.reseed(fresh.seed)

    def reseed(self, seed: int) -> None:
        self._seeds = np.random.default_rng(seed)

    def _json(self, response: Response) -> Any:
        if len(response.body) > self.max_answer_bytes:
            raise _refusal(response, f"an answer of {len(response.body)} bytes is over the limit")
        try:
            return json.loads(response.body, parse_int=_json_integer)
        except (ValueError, RecursionError) as error:
            raise _refusal(response, f"the answer is no JSON: {error!s:.200}") from error


_MSGPACK = {"Content-Type": "application/msgpack"}


def _post(path: str, **fields: Any) -> Request:
    body = encode({name: value for name, value in fields.items() if value is not None}, what=path)
    return Request("POST", path, _MSGPACK, body)


def _fresh(fresh: Fresh | None) -> dict[str, Any] | None:
    if fresh is None:
        return None
    return {"seed": fresh.seed, "copy": fresh.copy, "attributes": dict(fresh.attributes)}


def _refusal(response: Response, message: str) -> ProtocolError:
    return ProtocolError(message, url=response.url, status=response.status, body=response.body)


def _remote(response: Response, fields: dict[str, Any]) -> ProtocolError:
    error = fields.get("error")
    if not isinstance(error, dict):
        return _refusal(response, "the server refused")
    kind, message, traceback = (error.get(name) for name in ("type", "message", "traceback"))
    if not (isinstance(kind, str) and isinstance(message, str) and isinstance(traceback, str)):
        return _refusal(response, "the server refused")
    if response.status != 500:
        return ProtocolError(message[: RemoteError.SHOWN], url=response.url, status=response.status)
    args = error.get("args")
    plain = isinstance(args, list) and all(isinstance(each, (str, int, float, type(None))) for each in args)
    arguments = tuple(args) if plain and args is not None else None
    return RemoteError(kind, message, traceback, arguments=arguments, url=response.url, status=response.status)


def _named(value: Any, what: str) -> dict[str, Any]:
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise WireError(f"{what}: expected a map with names as keys, got {type(value).__name__}")
    return value


def _optional_text(value: Any, what: str) -> str | None:
    if value is not None and not isinstance(value, str):
        raise WireError(f"{what}: expected text or nothing, got {type(value).__name__}")
    return value


def _number(value: Any, what: str) -> float:
    if not isinstance(value, float):
        raise WireError(f"{what}: expected a number, got {type(value).__name__}")
    return value


def _flag(value: Any, what: str) -> bool:
    if not isinstance(value, bool):
        raise WireError(f"{what}: expected true or false, got {type(value).__name__}")
    return value


def _finite(value: Any) -> float | None:
    if not isinstance(value, (bool, int, float, np.bool_, np.integer, np.floating)):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def _json_integer(digits: str) -> int:
    # Reading a number of a million digits takes minutes in a Python that has no bound of its own.
    if len(digits) > 4000:
        raise ValueError(f"an integer of {len(digits)} digits")
    return int(digits)


def _as_json(value: Any) -> Any:
    """An action as plain JSON values."""
    if isinstance(value, (np.ndarray, np.generic)):
        return value.tolist()
    if isinstance(value, Mapping):
        return {str(key): _as_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_as_json(item) for item in value]
    return value


def _filled(template: Any, seed: int, action: Any) -> Any:
    if isinstance(template, str):
        if template == "{seed}":
            return seed
        if template == "{action}":
            return action
        text = action if isinstance(action, str) else json.dumps(action)
        # Split first, so that an action that contains "{seed}" is left as it is.
        return text.join(part.replace("{seed}", str(seed)) for part in template.split("{action}"))
    if isinstance(template, Mapping):
        return {key: _filled(item, seed, action) for key, item in template.items()}
    if isinstance(template, (list, tuple)):
        return [_filled(item, seed, action) for item in template]
    return _as_json(template)

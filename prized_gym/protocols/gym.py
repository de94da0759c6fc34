"""The protocol of this library's own server: all of a Gymnasium environment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from prized_gym.batch import leaves
from prized_gym.interface.commands import Fresh
from prized_gym.protocols.base import (
    Exchange,
    Options,
    Protocol,
    Request,
    Response,
    ServerDescription,
    StepAnswer,
    refusal,
)
from prized_gym.wire.codec import Limits, decode, encode
from prized_gym.wire.errors import ProtocolError, RemoteError, WireError
from prized_gym.wire.spaces import check, space_from_data

_MSGPACK = {"Content-Type": "application/msgpack"}


class GymProtocol(Protocol):
    """What ``python -m prized_gym.server`` speaks.

    Args:
        max_answer_bytes: the most an answer may have.
        copy: whether the arrays of an observation get memory of their own. Otherwise, where the observation space is made of
            arrays, those of a step or reset are read-only views of the answer they came in, perhaps not aligned, which spares
            a copy where they are copied into a batch at once. Infos, and a last observation that is followed by a reset's,
            always have their own.
    """

    def __init__(self, *, max_answer_bytes: int = 256 << 20, copy: bool = True) -> None:
        self.max_answer_bytes = max_answer_bytes
        self.copy = copy

    def ready(self) -> Exchange[bool | None]:
        response = yield Request("GET", "/health")
        return response.status == 200

    def describe(self) -> Exchange[ServerDescription]:
        response = yield Request("GET", "/spaces")
        fields = self._read(response)
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
            raise ProtocolError(str(error), url=response.url) from error
        return self.description

    def reset_base(self, seed: int | None) -> Exchange[None]:
        yield from self._post("/reset_base", seed=seed)

    def reset(
        self, seed: int | None, options: Options, *, fresh: Fresh | None = None, base: bool = False
    ) -> Exchange[tuple[Any, dict[str, Any]]]:
        response = yield _request("/reset", seed=seed, options=options, fresh=_fresh(fresh), base=base or None)
        copy = self._copies()
        fields = self._read(response, copy)
        try:
            return self._observed(fields, copy)
        except WireError as error:
            raise ProtocolError(str(error), url=response.url) from error

    def step(self, action: Any, *, then_reset: bool = False) -> Exchange[StepAnswer]:
        response = yield _request("/step", actions=[action], then_reset=then_reset)
        steps = self._taken(response)
        if len(steps) != 1:
            raise ProtocolError(f"{len(steps)} steps came for one action", url=response.url)
        return steps[0]

    def steps(self, actions: Sequence[Any], *, then_reset: bool = False) -> Exchange[list[StepAnswer]]:
        """Take several steps in one request, as many as the episode lasts.

        Returns:
            The steps that were taken, at least one; only the last can have ended the episode, or have a reset.

        Raises:
            ValueError: there are no actions.
        """
        if not len(actions):
            raise ValueError("there are no actions")
        response = yield _request("/step", actions=list(actions), then_reset=then_reset)
        return self._taken(response)

    def start(self, fresh: Fresh) -> Exchange[None]:
        yield from self._post("/start", fresh=_fresh(fresh))

    def call(self, name: str, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Exchange[Any]:
        response = yield _request("/call", name=name, args=list(args), kwargs=None if kwargs is None else dict(kwargs))
        fields = self._read(response)
        if "space" not in fields:
            return fields.get("result")
        try:
            return space_from_data(fields["space"])
        except WireError as error:
            raise ProtocolError(str(error), url=response.url) from error

    def set_attr(self, values: Mapping[str, Any]) -> Exchange[None]:
        yield from self._post("/set_attr", values=dict(values))

    def render(self) -> Exchange[Any]:
        fields = yield from self._post("/render")
        return fields.get("frame")

    def reseed(self, seed: int) -> Exchange[None]:
        yield from self._post("/reseed", seed=seed)

    def stack(self) -> Exchange[str]:
        response = yield Request("GET", "/stack")
        return response.body[-20_000:].decode("utf-8", "backslashreplace")

    def close(self) -> Exchange[None]:
        """Close the environment and end the server."""
        yield from self._post("/close")

    # Reading

    def _post(self, path: str, **fields: Any) -> Exchange[dict[str, Any]]:
        response = yield _request(path, **fields)
        return self._read(response)

    def _read(self, response: Response, copy: bool = True) -> dict[str, Any]:
        if response.headers.get("content-type", "application/msgpack") != "application/msgpack":
            refused = response.status >= 400
            raise refusal(response, "refused" if refused else "this is no answer of prized_gym's server")
        try:
            fields = decode(response.body, limits=Limits(max_bytes=self.max_answer_bytes), copy=copy)
        except WireError as error:
            raise refusal(response, str(error)) from error
        if not isinstance(fields, dict):
            raise refusal(response, f"the answer is {type(fields).__name__}, not a map")
        if response.status != 200:
            raise remote_error(response, fields)
        return fields

    def _copies(self) -> bool:
        # What is no array stays in a batch as the object that it is.
        return self.copy or (
            self.description is not None
            and not all(leaf.is_array for leaf in leaves(self.description.observation_space))
        )

    def _observed(self, fields: Any, copied: bool) -> tuple[Any, dict[str, Any]]:
        if self.description is None:
            raise ProtocolError("the server must be described before its observations can be checked")
        if not isinstance(fields, dict) or "obs" not in fields:
            raise WireError("there is no observation in the answer")
        info = _named(fields.get("info"), "info")
        return check(self.description.observation_space, fields["obs"]), info if copied else _owned(info)

    def _taken(self, response: Response) -> list[StepAnswer]:
        copy = self._copies()
        fields = self._read(response, copy)
        try:
            return self._answers(fields.get("steps"), fields.get("reset"), copy)
        except WireError as error:
            raise ProtocolError(str(error), url=response.url) from error

    def _answers(self, steps: Any, reset: Any, copied: bool) -> list[StepAnswer]:
        if not isinstance(steps, list) or not steps:
            raise WireError("there are no steps in the answer")
        answers = []
        for number, step in enumerate(steps, start=1):
            obs, info = self._observed(step, copied)
            reward = _number(step.get("reward"), "reward")
            terminated, truncated = (_flag(step.get(name), name) for name in ("terminated", "truncated"))
            over, last = terminated or truncated, number == len(steps)
            if over and not last:
                raise WireError("a step follows the end of its episode")
            after = None
            if last and reset is not None:
                if not over:
                    raise WireError("a reset follows a step that does not end its episode")
                obs, after = obs if copied else _owned(obs), self._observed(reset, copied)
            answers.append(StepAnswer(obs, reward, terminated, truncated, info, after))
        return answers


def remote_error(response: Response, fields: Mapping[str, Any]) -> ProtocolError:
    """Return the error that the fields of our server's answer tell of, as far as they can be understood."""
    error = fields.get("error")
    if not isinstance(error, dict):
        return refusal(response, "the server refused")
    kind, message, traceback = (error.get(name) for name in ("type", "message", "traceback"))
    if not (isinstance(kind, str) and isinstance(message, str) and isinstance(traceback, str)):
        return refusal(response, "the server refused")
    if response.status != 500:
        return ProtocolError(message[: RemoteError.SHOWN], url=response.url, status=response.status)
    args = error.get("args")
    plain = isinstance(args, list) and all(isinstance(each, (str, int, float, type(None))) for each in args)
    arguments = tuple(args) if plain and args is not None else None
    return RemoteError(kind, message, traceback, arguments=arguments, url=response.url, status=response.status)


def _request(path: str, /, **fields: Any) -> Request:
    # What is None is left out; an action of None is within a list.
    body = encode({name: value for name, value in fields.items() if value is not None}, what=path)
    return Request("POST", path, _MSGPACK, body)


def _fresh(fresh: Fresh | None) -> dict[str, Any] | None:
    if fresh is None:
        return None
    return {"seed": fresh.seed, "copy": fresh.copy, "attributes": dict(fresh.attributes)}


def _owned(value: Any) -> Any:
    """A decoded value, its arrays copied: views of an answer keep all of it alive."""
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, dict):
        return {key: _owned(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_owned(item) for item in value]
    if type(value) is tuple:
        return tuple([_owned(item) for item in value])
    return value


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

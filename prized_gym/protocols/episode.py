"""The protocol of a server that plays a whole episode per request."""

from __future__ import annotations

import copy
import json
import math
import urllib.parse
from collections.abc import Callable, Mapping
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

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
from prized_gym.wire.spaces import default_value


class EpisodeProtocol(Protocol):
    """A server that plays a whole episode per request: an environment of one step.

    A reset asks nothing and shows the observation space's default value. The step sends the request, and its answer, a
    JSON object, ends the episode: it becomes the info, with the reward taken out of it by ``reward``.

    Args:
        path: the request's target. ``{seed}`` is replaced by the reset's seed, or without one by the next of a stream
            that the last seed began (in either case it is in the reset's info), and ``{action}`` by the action as JSON,
            both escaped for a URL.
        reward: the key of the answer's reward, or a function from the decoded answer to it.
        observation_space: what a reset and the last observation come from; by default ``Discrete(1)``.
        action_space: by default ``Discrete(1)``: the only action plays the episode.
        method: the request's method; by default GET, or POST with a body.
        body: a JSON value, in which the strings ``"{seed}"`` and ``"{action}"`` stand for these values and, within longer
            strings, for their text; or a function from seed, action and the reset's options to a JSON value.
        headers: sent along.
        ready: a target that answers with a status below 300 once the server is ready, or None.
        timeout: seconds an episode may take, or None for what the channel was given.
        max_answer_bytes: the most an answer may have.

    Attributes:
        answer: the last answer read, decoded.
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
        self.description: ServerDescription = ServerDescription(
            spaces.Discrete(1) if observation_space is None else observation_space,
            spaces.Discrete(1) if action_space is None else action_space,
        )
        self._seeds = np.random.default_rng()
        self._seed = 0
        self._options: Options = None

    def fork(self) -> EpisodeProtocol:
        other = copy.copy(self)
        other._seeds = copy.deepcopy(self._seeds)
        return other

    def ready(self) -> Exchange[bool | None]:
        if self.ready_path is None:
            return None
        response = yield Request("GET", self.ready_path, self.headers)
        return response.status < 300

    def reset(
        self, seed: int | None, options: Options, *, fresh: Fresh | None = None, base: bool = False
    ) -> Exchange[tuple[Any, dict[str, Any]]]:
        if base:
            self._cannot("start from a reset made in the base")
        if fresh is not None:
            yield from self.start(fresh)
        if seed is not None:
            yield from self.reseed(seed)
        return self._begin(seed, options)

    def step(self, action: Any, *, then_reset: bool = False) -> Exchange[StepAnswer]:
        response = yield self._episode(action)
        if not 200 <= response.status < 300:
            raise refusal(response, "the server failed to play the episode")
        self.answer = answer = self._json(response)
        try:
            given = self.reward(answer) if callable(self.reward) else answer[self.reward]
        except Exception as error:
            why = f"{type(error).__name__}: {error!s:.200}"
            raise refusal(response, f"no reward is in the answer ({why})") from error
        reward = _finite(given)
        if reward is None:
            raise refusal(response, f"the reward {given!r:.100} is no finite number")
        obs = default_value(self.description.observation_space)
        info = answer if isinstance(answer, dict) else {"answer": answer}
        return StepAnswer(obs, reward, True, False, info, self._begin(None, None) if then_reset else None)

    def start(self, fresh: Fresh) -> Exchange[None]:
        if fresh.attributes:
            self._cannot("set an attribute")
        yield from self.reseed(fresh.seed)

    def reseed(self, seed: int) -> Exchange[None]:
        yield from ()
        self._seeds = np.random.default_rng(seed)

    def _begin(self, seed: int | None, options: Options) -> tuple[Any, dict[str, Any]]:
        self._seed = int(self._seeds.integers(1 << 31)) if seed is None else int(seed)
        self._options = options
        return default_value(self.description.observation_space), {"seed": self._seed}

    def _episode(self, action: Any) -> Request:
        plain = _as_json(action)
        path = self.path
        for name, value in (("{seed}", self._seed), ("{action}", plain)):
            if name in self.path:
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
        return Request(self.method, path, headers, body, self.timeout)

    def _json(self, response: Response) -> Any:
        if len(response.body) > self.max_answer_bytes:
            raise refusal(response, f"an answer of {len(response.body)} bytes is over the limit")
        try:
            return json.loads(response.body, parse_int=_json_integer)
        except (ValueError, RecursionError) as error:
            raise refusal(response, f"the answer is no JSON: {error!s:.200}") from error


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

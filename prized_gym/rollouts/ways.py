"""The ways an episode can be played in a sandbox: a policy, a request, a command, a function of the user's."""

from __future__ import annotations

import inspect
import json
import math
import shlex
import urllib.parse
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from prized_gym import background
from prized_gym.errors import PrizedGymError
from prized_gym.interface.sandbox import Copy
from prized_gym.protocols import EpisodeProtocol
from prized_gym.rollouts.policy import UserLoop, takes
from prized_gym.rollouts.queue import Work

_TAIL = 2000
_MOST_THREADS = 4096
_FOR_EVER = 30 * 86400.0
_LONGEST_LINE = 1 << 20

Reward = str | Callable[[Any], float] | None


class EpisodeError(PrizedGymError):
    """An episode gave no reward; the message says why."""


@dataclass(frozen=True)
class Outcome:
    """What an episode gave: see :class:`prized_gym.Rollout`."""

    reward: float
    length: int
    output: Any


@dataclass
class Place:
    """Where an episode is played.

    Attributes:
        slot: which of the copies alive at once this is.
        copy: the fresh fork.
        length: steps so far, of an episode that fails.
        so_far: what there is to report of an episode that fails.
    """

    slot: int
    copy: Copy
    length: int = 0
    so_far: Any = None


class Way(ABC):
    """How an episode is played in a copy."""

    @abstractmethod
    async def play(self, place: Place, work: Work, timeout: float | None) -> Outcome:
        """Play one, in the background loop.

        Raises:
            EpisodeError: it gave no reward. Anything else that goes wrong is looked into by the caller.
        """

    def close(self) -> None:  # noqa: B027
        """Let go of what it keeps."""


class RequestWay(Way):
    """One HTTP request plays the episode.

    Args:
        request: a target in which ``{seed}`` and ``{task}`` are replaced, escaped for a URL; or an ``EpisodeProtocol``,
            whose body can be a function of seed, action and ``{"task": task}``.
        reward: where the reward is in the answer.
        loop: where ``reward`` is called.
    """

    def __init__(self, request: str | EpisodeProtocol, reward: Reward, loop: UserLoop) -> None:
        if isinstance(request, EpisodeProtocol):
            if reward is not None:
                raise TypeError(
                    "reward= and an EpisodeProtocol, which says itself where the reward is: pass one of them"
                )
        elif not isinstance(request, str) or not request.startswith("/"):
            raise TypeError(f"request must be a target such as '/rollout?seed={{seed}}', got {request!r}")
        self._request = request
        self._own_reward = OwnReward(reward, loop) if callable(reward) else None
        # What the loop calls must not block, as a function of the user's may.
        self._reward: str | Callable[[Any], float] = reward if isinstance(reward, str) else _number_or_key
        if self._own_reward is not None:
            self._reward = _later

    async def play(self, place: Place, work: Work, timeout: float | None) -> Outcome:
        options = None if work.task is None else {"task": work.task}
        if isinstance(self._request, EpisodeProtocol):
            protocol = self._request.fork()
        else:
            path = _with_task(self._request, work.task, partial(urllib.parse.quote, safe=""))
            protocol = EpisodeProtocol(path, self._reward)
        limit = beyond(timeout)
        await place.copy.run(protocol.reset(work.seed, options), limit)
        answer = await place.copy.run(protocol.step(0), limit, protocol.max_answer_bytes)
        place.so_far = protocol.answer
        reward = answer.reward if self._own_reward is None else await self._own_reward.of(protocol.answer)
        return Outcome(reward, _length(protocol.answer), protocol.answer)


class CommandWay(Way):
    """A command plays the episode; the last line of its output is the reward, or JSON with it.

    Args:
        command: for the sandbox's shell. ``{seed}`` and ``{task}`` are replaced, quoted for it; nothing else in braces is.
        reward: the key of the last line's JSON, or a function of the whole output.
        loop: where ``reward`` is called.
    """

    def __init__(self, command: str, reward: Reward, loop: UserLoop) -> None:
        if not isinstance(command, str) or not command.strip():
            raise TypeError(f"command must be a shell command, got {command!r}")
        self._command = command
        self._own_reward = OwnReward(reward, loop) if callable(reward) else None
        self._key = reward if isinstance(reward, str) and reward else "reward"

    async def play(self, place: Place, work: Work, timeout: float | None) -> Outcome:
        command = self._command.replace("{seed}", str(work.seed))
        command = _with_task(command, work.task, shlex.quote)
        result = await place.copy.exec_async(command, timeout=timeout)
        place.so_far = result.stdout
        if result.timed_out:
            raise EpisodeError(f"the command did not end within {timeout:g} s{_tail(result.stderr)}")
        if result.exit_code != 0:
            raise EpisodeError(f"the command exited with code {result.exit_code}{_tail(result.stderr)}")
        if self._own_reward is not None:
            return Outcome(await self._own_reward.of(result.stdout), 1, result.stdout)
        reward, length = self._read(result.stdout)
        return Outcome(reward, length, result.stdout)

    def _read(self, output: str) -> tuple[float, int]:
        line = next((line.strip() for line in reversed(output.split("\n")) if line.strip()), "")
        try:
            value = json.loads(line[:_LONGEST_LINE], parse_constant=float)
        except (ValueError, RecursionError):
            raise EpisodeError(
                f"the last line the command wrote must be the reward, or JSON with it, got {line[:200]!r}"
            ) from None
        return finite(_number_or_key(value, self._key)), _length(value)


class EpisodeWay(Way):
    """A function of the user's plays the episode, plain (in a thread) or a coroutine function (in their event loop).

    Args:
        episode: ``episode(copy, seed)``, or ``episode(copy, seed, task)`` if it takes one. Returns the reward or a dict
            with it.
        reward: the key of the dict, or a function of what was returned.
        loop: where it runs.
        with_task: there are tasks to give it.
    """

    def __init__(self, episode: Callable[..., Any], reward: Reward, loop: UserLoop, with_task: bool) -> None:
        if not callable(episode):
            raise TypeError(f"episode must be a callable, got {episode!r}")
        if not takes(episode, 2) and not takes(episode, 3):
            raise TypeError(f"episode must take (copy, seed), or (copy, seed, task), and {episode!r} does not")
        self._episode = episode
        self._own_reward = OwnReward(reward, loop) if callable(reward) else None
        self._key = reward if isinstance(reward, str) and reward else "reward"
        self._loop = loop
        self._takes_task = with_task and _takes_task(episode)
        # Threads of their own, since what an episode waits for may need the background's; more than copies, since one that
        # ran out of time may never give its thread back.
        self._threads = background.Threads(_MOST_THREADS)

    async def play(self, place: Place, work: Work, timeout: float | None) -> Outcome:
        arguments: tuple[Any, ...] = (place.copy, work.seed)
        if self._takes_task:
            arguments = (*arguments, work.task)
        given = await self._loop.ask("the episode", self._threads, self._episode, *arguments)
        place.so_far = given
        if self._own_reward is not None:
            return Outcome(await self._own_reward.of(given), _length(given), given)
        return Outcome(finite(_number_or_key(given, self._key)), _length(given), given)


class OwnReward:
    """A function of the user's that finds the reward, called in a thread: it may take long, hang, or exit.

    Args:
        function: from an answer, an output, or what an episode returned, to the reward.
        loop: where it is waited for, if it is a coroutine function.
    """

    def __init__(self, function: Callable[[Any], Any], loop: UserLoop) -> None:
        self._function = function
        self._loop = loop
        # One that ran out of time may never give its thread back.
        self._threads = background.Threads(_MOST_THREADS)

    async def of(self, value: Any) -> float:
        """Find the reward.

        Raises:
            UserError: the function raised.
            EpisodeError: it gave no finite number.
        """
        return finite(await self._loop.ask("reward=", self._threads, self._function, value))


def _later(answer: Any) -> float:
    return 0.0


def beyond(timeout: float | None) -> float:
    """A limit for one answer that the limit of the whole rollout comes before."""
    return _FOR_EVER if timeout is None else 2.0 * timeout + 10.0


def finite(value: Any) -> float:
    """A reward as a float.

    Raises:
        EpisodeError: it is no finite number.
    """
    if isinstance(value, np.ndarray) and value.shape == ():
        value = value[()]
    if isinstance(value, (bool, int, float, np.bool_, np.integer, np.floating)):
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if math.isfinite(number):
            return number
    raise EpisodeError(f"the reward {value!r:.200} is no finite number")


def _number_or_key(value: Any, key: str = "reward") -> Any:
    """The reward in an answer: the number that it is, or what it has under a key."""
    if isinstance(value, Mapping):
        if key not in value:
            raise EpisodeError(f"no reward: there is no {key!r} among the keys {list(value)!r:.200}")
        return value[key]
    return value


def _length(value: Any) -> int:
    length = value.get("length") if isinstance(value, Mapping) else None
    if isinstance(length, int) and not isinstance(length, bool) and 0 <= length < 1 << 53:
        return length
    return 1


def _with_task(template: str, task: Any, quote: Callable[[str], str]) -> str:
    return template.replace("{task}", quote(_text(task))) if "{task}" in template else template


def _text(task: Any) -> str:
    if task is None:
        return ""
    try:
        return task if isinstance(task, str) else json.dumps(task, default=_plain)
    except (TypeError, ValueError, RecursionError) as error:
        raise EpisodeError(f"the task {task!r:.200} is neither a string nor JSON: {error}") from None


def _plain(value: Any) -> Any:
    if isinstance(value, (np.generic, np.ndarray)):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is no JSON")


def _tail(stderr: str) -> str:
    return f"; the end of its stderr:\n{stderr[-_TAIL:].rstrip()}" if stderr.strip() else ""


def _takes_task(episode: Callable[..., Any]) -> bool:
    """Whether a task is its third argument, and not an option of its own that has a default."""
    if not takes(episode, 3):
        return False
    try:
        parameters = list(inspect.signature(episode).parameters.values())
    except ValueError:
        return True
    third = parameters[2] if len(parameters) > 2 else parameters[-1]
    return third.name == "task" or third.default is third.empty

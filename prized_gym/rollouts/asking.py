"""Asking a policy for the actions of copies: at once, in a thread, or in an event loop."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from prized_gym.background import Threads
from prized_gym.batch import ObservationBuffer
from prized_gym.rollouts.policy import Answer, Policy, UserLoop, call
from prized_gym.rollouts.queue import Work


@dataclass(eq=False)
class Fork:
    """One call that made copies.

    Attributes:
        ended_before: how many rollouts had ended when it began.
    """

    ended_before: int


@dataclass(eq=False)
class Playing:
    """One rollout under way in a copy.

    Attributes:
        work: what is played.
        started: the ``time.monotonic()`` its time counts from.
        fork: what made its copy.
        phase: ``"forking"`` until its first answer, ``"reseeding"``, then in turn ``"observed"``, ``"deciding"`` and
            ``"stepping"``.
        policy_seconds: what the policy has taken of its time.
        reward: the sum so far.
        length: steps so far.
        info: the latest one.
    """

    work: Work
    started: float
    fork: Fork
    phase: str = "forking"
    policy_seconds: float = 0.0
    reward: float = 0.0
    length: int = 0
    info: dict[str, Any] = field(default_factory=dict)


@dataclass(eq=False)
class PolicyCall:
    """One call of a policy for some copies, answered or under way.

    Attributes:
        asked: the copies, and what was played there: it may have ended when the answer comes.
        asked_at: in ``time.monotonic()`` seconds.
        future: of the answer; None where the policy answered at once.
        answer: what it returned or raised, where ``future`` is None.
    """

    asked: list[tuple[int, Playing]]
    asked_at: float
    future: Future[Answer] | None = None
    answer: Answer = field(default_factory=Answer)

    @property
    def done(self) -> bool:
        """Whether the answer is there."""
        return self.future is None or self.future.done()

    def result(self) -> Any:
        """What the policy returned.

        Raises:
            BaseException: what it raised.
        """
        answer = self.answer if self.future is None else self.future.result()
        if answer.error is not None:
            raise answer.error
        return answer.value


class PolicyCalls:
    """The calls of one policy, and those that are not answered yet.

    Args:
        policy: what is asked.
        loop: where coroutines run.
        thread: where plain functions are called, one at a time; None for the caller's own thread.
        wake: called, from whichever thread, as an answer comes.
    """

    def __init__(self, policy: Policy, loop: UserLoop, thread: Threads | None, wake: Callable[[], None]) -> None:
        self._policy = policy
        self._loop = loop
        self._thread = thread
        self._wake = wake
        self._pending: list[PolicyCall] = []

    @property
    def pending(self) -> bool:
        """Whether an answer is still to come."""
        return bool(self._pending)

    def ask(self, asked: Sequence[tuple[int, Playing]], observations: ObservationBuffer) -> None:
        """Ask the policy for some copies, all in one call if it is batched."""
        if not asked:
            return
        if self._policy.batched:
            indices = [index for index, _ in asked]
            self._call(list(asked), observations.rows(indices), [playing.info for _, playing in asked])
            return
        for index, playing in asked:
            self._call([(index, playing)], observations.one(index), playing.info)

    def _call(self, asked: list[tuple[int, Playing]], observed: Any, info: Any) -> None:
        function = partial(self._policy.function, observed, info)
        made = PolicyCall(asked, time.monotonic())
        if self._policy.is_async:
            made.future = self._loop.submit(function)
        elif self._thread is not None:
            made.future = self._loop.submit_in(self._thread, function)
        else:
            made.answer = _call_here(function)
            if inspect.isawaitable(made.answer.value):
                value = made.answer.value
                made.future = self._loop.submit(lambda: value)
            for _, playing in asked:
                playing.policy_seconds += time.monotonic() - made.asked_at
        if made.future is not None:
            made.future.add_done_callback(lambda _: self._wake())
        self._pending.append(made)

    def take_answered(self) -> list[PolicyCall]:
        """The calls whose answers are there; each is given once."""
        answered = [each for each in self._pending if each.done]
        if answered:
            self._pending = [each for each in self._pending if each not in answered]
        return answered

    def seconds(self, index: int, playing: Playing) -> float:
        """How long the call that a rollout waits for has taken so far; 0.0 if there is none."""
        waiting = (each for each in self._pending if (index, playing) in each.asked)
        return next((time.monotonic() - each.asked_at for each in waiting), 0.0)

    def drop(self, wanted: Callable[[int, Playing], bool]) -> None:
        """Cancel the calls of which no copy is ``wanted``."""
        for each in list(self._pending):
            if each.future is not None and not any(wanted(*one) for one in each.asked):
                each.future.cancel()
                self._pending.remove(each)

    def close(self) -> None:
        """Cancel every call."""
        self.drop(lambda index, playing: False)


def _call_here(function: Callable[[], Any]) -> Answer:
    """Call a plain policy in this thread, whose interrupts are its caller's."""
    answer = call(function)
    if answer.error is not None and not isinstance(answer.error, Exception):
        raise answer.error
    return answer

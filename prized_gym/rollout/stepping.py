"""A policy acting in environments: rollouts over a fleet, driven by whoever iterates."""

from __future__ import annotations

import concurrent.futures
import itertools
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from prized_gym import fleet as ops
from prized_gym.base import Base
from prized_gym.errors import BaseDiedError, Failure
from prized_gym.fleet import Command, Fresh, Reseed, Reset
from prized_gym.pricing import Prices
from prized_gym.rollout.agenda import Agenda, Work
from prized_gym.rollout.policy import Policy, UserLoop, raised
from prized_gym.rollout.record import Rollout

_FORK_TIMEOUT = 120.0
_LOOK_UP = 0.2
"""Seconds after which a driver in a thread of its own looks whether it is to stop."""

_BOTH = 0.005
"""Seconds waited for copies before looking whether a policy has answered, where there is something of both to wait for."""


@dataclass
class _Playing:
    """One rollout under way in a copy."""

    work: Work
    started: float
    phase: str = "reset"
    reward: float = 0.0
    length: int = 0
    info: dict[str, Any] = field(default_factory=dict)


@dataclass
class _Thought:
    """A policy's answer for some copies, on its way or there.

    Attributes:
        asked: the copies and what was played there: it may have ended when the answer comes.
        answer: gives what the policy returned, or raises what it raised.
        future: None where the policy answers at once.
    """

    asked: list[tuple[int, _Playing]]
    answer: Callable[[], Any]
    future: Future[Any] | None = None


class SteppedRollouts:
    """Plays an agenda with a policy, each rollout in a fresh fork.

    Args:
        base: what is forked.
        copies: the most alive at once.
        policy: acts.
        agenda: what is played.
        timeout: seconds a rollout may take; None for no limit.
        reset_in: as for ``ForkedVectorEnv``.
        prices: of a copy.
        loop: where an asynchronous policy runs.
        stop: once set, :meth:`run` ends; None where closing the generator ends it.
    """

    def __init__(
        self,
        base: Base,
        copies: int,
        policy: Policy,
        agenda: Agenda,
        *,
        timeout: float | None,
        reset_in: str,
        prices: Prices,
        loop: UserLoop,
        stop: threading.Event | None = None,
    ) -> None:
        self._base, self._size, self._policy, self._agenda = base, copies, policy, agenda
        self._timeout, self._from_base, self._prices, self._loop, self._stop = (
            timeout,
            reset_in == "base",
            prices,
            loop,
            stop,
        )
        self._playing: dict[int, _Playing] = {}
        self._thoughts: list[_Thought] = []
        self._ended: list[tuple[Work, Rollout]] = []
        self._everyone = list(range(copies))

    def run(self) -> Iterator[tuple[Work, Rollout]]:
        """Play everything; each rollout as it ends.

        Raises:
            BaseDiedError: the base is closed, or dies again and again.
        """
        self._fleet = self._base.fleet(self._size, self._from_base)
        try:
            while self._refill():
                yield from self._take_ended()
                if self._stop is not None and self._stop.is_set():
                    return
                self._act()
                self._wait()
            yield from self._take_ended()
        finally:
            for thought in self._thoughts:
                if thought.future is not None:
                    thought.future.cancel()
            self._fleet.close(timeout=1.0)

    def _take_ended(self) -> Iterator[tuple[Work, Rollout]]:
        while self._ended:
            yield self._ended.pop(0)

    # New copies

    def _refill(self) -> bool:
        """Fork a copy for each free place; False once nothing is left to play."""
        free = [index for index in self._everyone if index not in self._playing]
        works = self._agenda.take(len(free))
        if len(works) < len(free):
            self._fleet.release(free[len(works) :])
        if works:
            chosen = dict(zip(free, works, strict=False))
            self._fork(chosen)
        return bool(self._playing or self._ended or works)

    def _fork(self, chosen: dict[int, Work]) -> None:
        first: dict[int, Command] = {index: self._reset_of(work) for index, work in chosen.items()}
        try:
            self._fleet.fork(first, _FORK_TIMEOUT)
        except BaseDiedError as error:
            for index in list(self._playing):
                self._fail(index, Failure(index, self._fleet.where(index), "base", f"was lost with its base: {error}"))
            self._fleet.close(timeout=0.0)
            # Built anew from its recipe, or what that raises is raised.
            self._fleet = self._base.fleet(self._size, self._from_base)
            self._fleet.fork(first, _FORK_TIMEOUT)
        now = time.monotonic()
        self._playing.update({index: _Playing(work, now) for index, work in chosen.items()})

    def _reset_of(self, work: Work) -> Reset:
        seed = work.seed if work.start is None else work.start
        return Reset(seed, options_of(work.task), fresh=Fresh(seed), from_base=self._from_base)

    # The policy

    def _act(self) -> None:
        """Ask the policy for the copies that have an observation for it, and send what it has answered."""
        asking = [index for index, playing in self._playing.items() if playing.phase == "observed"]
        answered: list[_Thought] = []
        if asking:
            for index in asking:
                self._playing[index].phase = "thinking"
            answered = self._ask(sorted(asking))
        if self._thoughts:
            answered += [thought for thought in self._thoughts if thought.future is None or thought.future.done()]
            self._thoughts = [thought for thought in self._thoughts if thought not in answered]
        if answered:
            self._send(answered)

    def _ask(self, asking: list[int]) -> list[_Thought]:
        """Have the policy think about some copies; what it will say of them, if it answers at once."""
        function, observations = self._policy.function, self._fleet.observations
        asked = [(index, self._playing[index]) for index in asking]
        questions: list[tuple[list[tuple[int, _Playing]], Any, Any]]
        if self._policy.batched:
            questions = [(asked, observations.rows(asking), [playing.info for _, playing in asked])]
        else:
            questions = [([one], observations.one(one[0]), one[1].info) for one in asked]
        if not self._policy.is_async:
            return [_Thought(whose, partial(function, seen, info)) for whose, seen, info in questions]
        for whose, seen, info in questions:
            future = self._loop.submit(function(seen, info))
            self._thoughts.append(_Thought(whose, future.result, future))
        return []

    def _send(self, answered: Sequence[_Thought]) -> None:
        indices: list[int] = []
        parts: list[tuple[list[Any], list[list[Any]]]] = []
        for thought in answered:
            count = len(thought.asked)
            valid = [
                number
                for number in range(count)
                if self._playing.get(thought.asked[number][0]) is thought.asked[number][1]
            ]
            try:
                arrays, objects = self._policy.split(thought.answer(), count)
            except (Exception, concurrent.futures.CancelledError) as error:
                for number in valid:
                    self._end(thought.asked[number][0], failure=raised("the policy", error))
                continue
            if len(valid) < count:
                arrays = [array[valid] for array in arrays]
                objects = [[column[number] for number in valid] for column in objects]
            indices += [thought.asked[number][0] for number in valid]
            parts.append((arrays, objects))
        if not indices:
            return
        arrays, objects = parts[0]
        if len(parts) > 1:
            arrays = [np.concatenate(columns) for columns in zip(*(part[0] for part in parts), strict=True)]
            objects = [list(itertools.chain(*columns)) for columns in zip(*(part[1] for part in parts), strict=True)]
        for index in indices:
            self._playing[index].phase = "stepping"
        self._fleet.step_some(indices, arrays, objects, bytes([ops.STEP]) * len(indices))

    # Waiting

    def _wait(self) -> None:
        busy = len(self._fleet.busy)
        limit = self._time_left()
        if busy and self._thoughts:
            limit = _BOTH
        elif self._thoughts:
            futures = [thought.future for thought in self._thoughts if thought.future is not None]
            concurrent.futures.wait(futures, limit, return_when=concurrent.futures.FIRST_COMPLETED)
        if busy:
            # A batched policy gets all copies at once, so that its batches are full.
            self._take_answers(self._fleet.wait(None if self._policy.batched else 1, limit))
        self._end_overdue()

    def _time_left(self) -> float | None:
        limits = [] if self._stop is None else [_LOOK_UP]
        if self._timeout is not None and self._playing:
            first = min(playing.started for playing in self._playing.values())
            limits.append(max(0.0, first + self._timeout - time.monotonic()))
        return min(limits) if limits else None

    def _take_answers(self, finished: Sequence[int]) -> None:
        fleet = self._fleet
        seeds: dict[int, Command] = {}
        for index in finished:
            if index not in self._playing:
                continue
            playing = self._playing[index]
            failure = fleet.failures.pop(index, None)
            if failure is not None:
                self._fail(index, failure)
                continue
            if playing.phase == "reset":
                playing.info = fleet.infos.pop(index, {})
                playing.phase = "observed"
                if playing.work.start is not None:
                    seeds[index] = Reseed(playing.work.seed)
                    playing.phase = "reseeding"
            elif playing.phase == "reseeding":
                playing.phase = "observed"
            elif playing.phase == "stepping":
                playing.info = fleet.infos.pop(index, {})
                playing.reward += float(fleet.rewards[index])
                playing.length += 1
                playing.phase = "observed"
                if fleet.terminations[index] or fleet.truncations[index]:
                    self._end(index, output=playing.info)
        if seeds:
            fleet.command(seeds)

    def _end_overdue(self) -> None:
        if self._timeout is None:
            return
        now = time.monotonic()
        for index, playing in list(self._playing.items()):
            if now - playing.started < self._timeout:
                continue
            if playing.phase != "thinking":
                self._fail(index, self._fleet.end(index, timed_out=self._timeout))
                continue
            self._end(index, failure=f"the policy had not answered when {self._timeout:g} s had passed")
        for thought in list(self._thoughts):
            if thought.future is not None and not any(self._playing.get(index) is one for index, one in thought.asked):
                # Nobody waits for it any more.
                thought.future.cancel()
                self._thoughts.remove(thought)

    # The end of one

    def _fail(self, index: int, failure: Failure) -> None:
        self._end(index, failure=failure.describe())

    def _end(self, index: int, output: Any = None, failure: str | None = None) -> None:
        playing = self._playing.pop(index)
        work, seconds = playing.work, time.monotonic() - playing.started
        reward = playing.reward
        if failure is None and not math.isfinite(reward):
            failure = f"copy {index} ({self._fleet.where(index)}) had a reward that is no finite number: {reward}"
        usage = self._fleet.usage(index)
        vcpu = usage.cpu_seconds / seconds if seconds else 0.0
        cost = self._prices.cost(seconds=seconds, vcpu=vcpu, memory_gb=usage.memory_gb)
        if failure is not None:
            if self._agenda.put_again(work, cost):
                return
            reward, output = math.nan, playing.info or None
        self._ended.append(
            (
                work,
                Rollout(
                    work.task,
                    work.seed,
                    reward,
                    playing.length,
                    output,
                    seconds,
                    work.spent + cost,
                    self._fleet.where(index),
                    failure,
                    work.attempt,
                ),
            )
        )


def options_of(task: Any) -> dict[str, Any] | None:
    """A task as options of ``env.reset``."""
    return None if task is None else dict(task) if isinstance(task, dict) else {"task": task}

"""A policy acting in environments: rollouts over a fleet, driven by whoever iterates."""

from __future__ import annotations

import concurrent.futures
import inspect
import itertools
import math
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from prized_gym.base import Base
from prized_gym.errors import BaseDiedError, ForkUnsafeError, PrizedGymError
from prized_gym.interface import commands as ops
from prized_gym.interface.commands import Command, Fresh, Reseed, Reset
from prized_gym.interface.failure import Failure
from prized_gym.interface.fleet import Fleet
from prized_gym.pricing import Prices
from prized_gym.rollouts.policy import Answer, Policy, UserLoop, raised
from prized_gym.rollouts.queue import RolloutQueue, Work
from prized_gym.rollouts.record import Rollout

_FORK_TIMEOUT = 120.0
_LOOK_UP = 0.2
"""Seconds after which a run looks whether it is to stop."""

_PATIENCE = 0.005
"""Seconds at least that a batched policy's next batch is waited for once its first copy has answered."""

_BOTH = 0.005
"""Seconds waited for copies before looking whether a policy has answered, where there is something of both to wait for."""


@dataclass
class _Playing:
    """One rollout under way in a copy; ``thought`` is what the policy has taken of its time, in seconds."""

    work: Work
    started: float
    phase: str = "reset"
    thought: float = 0.0
    reward: float = 0.0
    length: int = 0
    info: dict[str, Any] = field(default_factory=dict)


@dataclass
class _Thought:
    """A policy's answer for some copies, on its way or there.

    Attributes:
        asked: the copies and what was played there: it may have ended when the answer comes.
        asked_at: monotonic seconds.
        future: of the answer; None where the policy answers at once.
        answer: what it said.
    """

    asked: list[tuple[int, _Playing]]
    asked_at: float
    future: Future[Answer] | None = None
    answer: Answer = field(default_factory=Answer)


class SteppedRollouts:
    """Plays an queue with a policy, each rollout in a fresh fork.

    Args:
        base: what is forked.
        copies: the most alive at once.
        policy: acts.
        queue: what is played.
        timeout: seconds a rollout may take; None for no limit.
        reset_in: as for ``ForkedVectorEnv``.
        prices: of a copy.
        loop: where an asynchronous policy runs.
    """

    def __init__(
        self,
        base: Base,
        copies: int,
        policy: Policy,
        queue: RolloutQueue,
        *,
        timeout: float | None,
        reset_in: str,
        prices: Prices,
        loop: UserLoop,
    ) -> None:
        self._base, self._size, self._policy, self._queue = base, copies, policy, queue
        self._timeout, self._from_base, self._prices, self._loop = timeout, reset_in == "base", prices, loop
        self._fleet: Fleet | None = None
        self._stopped = threading.Event()
        self._at_work = False
        self._playing: dict[int, _Playing] = {}
        self._thoughts: list[_Thought] = []
        self._ended: list[tuple[Work, Rollout]] = []
        self._everyone = list(range(copies))

    def run(self) -> Iterator[tuple[Work, Rollout]]:
        """Play everything; each rollout as it ends.

        Raises:
            BaseDiedError: the base is closed, or dies again and again.
        """
        if self._stopped.is_set():
            return
        self._at_work = True
        self._fleet = self._base.fleet(self._size, self._from_base)
        try:
            while not self._stopped.is_set():
                # Before anything can be raised for those that follow.
                yield from self._take_ended()
                if self._stopped.is_set() or not self._refill():
                    return
                self._act()
                self._wait()
        finally:
            for thought in self._thoughts:
                if thought.future is not None:
                    thought.future.cancel()
            self._fleet.close(timeout=1.0)
            self._at_work = False

    def stop(self) -> None:
        """Have the run end soon, from whichever thread."""
        self._stopped.set()

    def end(self) -> None:
        """Have the run end, in the thread that iterates: its copies are gone at once."""
        self.stop()
        if not self._at_work and self._fleet is not None:
            self._fleet.close(timeout=1.0)

    def _take_ended(self) -> Iterator[tuple[Work, Rollout]]:
        while self._ended and not self._stopped.is_set():
            ended, left = self._ended.pop(0), time.monotonic()
            self._at_work = False
            yield ended
            self._at_work = True
            # What the caller does meanwhile is none of the copies' time.
            for playing in self._playing.values():
                playing.started += time.monotonic() - left

    # New copies

    @property
    def _live(self) -> Fleet:
        assert self._fleet is not None
        return self._fleet

    def _refill(self) -> bool:
        """Fork a copy for each free place; False once nothing is left to play."""
        free = [index for index in self._everyone if index not in self._playing]
        works = self._queue.take(len(free))
        if len(works) < len(free):
            self._live.release(free[len(works) :])
        if works:
            chosen = dict(zip(free, works, strict=False))
            self._fork(chosen)
        return bool(self._playing or self._ended or works)

    def _fork(self, chosen: dict[int, Work]) -> None:
        first: dict[int, Command] = {index: reset_of(work, self._from_base, index) for index, work in chosen.items()}
        failure = None
        try:
            try:
                self._live.fork(first, _FORK_TIMEOUT)
            except BaseDiedError as error:
                for index in list(self._playing):
                    self._fail(
                        index, Failure(index, self._live.where(index), "base", f"was lost with its base: {error}")
                    )
                self._live.close(timeout=0.0)
                # Built anew from its recipe, or what that raises is raised.
                self._fleet = self._base.fleet(self._size, self._from_base)
                self._live.fork(first, _FORK_TIMEOUT)
        except (BaseDiedError, ForkUnsafeError):
            raise
        except PrizedGymError as error:
            failure = str(error)
        now = time.monotonic()
        self._playing.update({index: _Playing(work, now) for index, work in chosen.items()})
        if failure is not None:
            for index in chosen:
                self._end(index, failure=failure)

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
        function, observations = self._policy.function, self._live.observations
        asked = [(index, self._playing[index]) for index in asking]
        questions: list[tuple[list[tuple[int, _Playing]], Any, Any]]
        if self._policy.batched:
            questions = [(asked, observations.rows(asking), [playing.info for _, playing in asked])]
        else:
            questions = [([one], observations.one(one[0]), one[1].info) for one in asked]
        answered: list[_Thought] = []
        for whose, seen, info in questions:
            asked_at = time.monotonic()
            if self._policy.is_async:
                self._thoughts.append(_Thought(whose, asked_at, self._loop.submit(partial(function, seen, info))))
                continue
            try:
                thought = _Thought(whose, asked_at, None, Answer(function(seen, info)))
            except Exception as error:
                thought = _Thought(whose, asked_at, None, Answer(error=error))
            if inspect.isawaitable(thought.answer.value):
                value = thought.answer.value
                self._thoughts.append(_Thought(whose, asked_at, self._loop.submit(partial(_itself, value))))
            else:
                answered.append(thought)
            for _, one in whose:
                one.thought += time.monotonic() - asked_at
        return answered

    def _send(self, answered: Sequence[_Thought]) -> None:
        indices: list[int] = []
        parts: list[tuple[list[Any], list[list[Any]]]] = []
        for thought in answered:
            count = len(thought.asked)
            valid = [number for number, (index, one) in enumerate(thought.asked) if self._playing.get(index) is one]
            try:
                answer = thought.answer if thought.future is None else thought.future.result()
                if answer.error is not None:
                    raise answer.error
                arrays, objects = self._policy.split(answer.value, count)
            except KeyboardInterrupt:
                raise
            except BaseException as error:
                why = raised("the policy", error)
                for number in valid:
                    index = thought.asked[number][0]
                    self._end(index, failure=f"copy {index} ({self._live.where(index)}): {why}")
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
        self._live.step_some(indices, arrays, objects, bytes([ops.STEP]) * len(indices))

    # Waiting

    def _wait(self) -> None:
        busy = len(self._live.busy)
        limit = self._time_left()
        if busy and self._thoughts:
            limit = _BOTH
        elif self._thoughts:
            futures = [thought.future for thought in self._thoughts if thought.future is not None]
            concurrent.futures.wait(futures, limit, return_when=concurrent.futures.FIRST_COMPLETED)
        if busy:
            started = time.monotonic()
            finished = self._live.wait(1, limit)
            left = len(self._live.busy)
            if self._policy.batched and finished and left:
                # For full batches: as long again as the first took, so that no one waits for one that hangs.
                patience = max(_PATIENCE, time.monotonic() - started)
                finished += self._live.wait(None, patience)
            self._take_answers(finished)
        self._end_overdue()

    def _time_left(self) -> float:
        limit = _LOOK_UP
        if self._timeout is not None and self._playing:
            first = min(playing.started for playing in self._playing.values())
            limit = min(limit, max(0.0, first + self._timeout - time.monotonic()))
        return limit

    def _take_answers(self, finished: Sequence[int]) -> None:
        fleet = self._live
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
            thinking = next((each for each in self._thoughts if (index, playing) in each.asked), None)
            spent = playing.thought + (0.0 if thinking is None else now - thinking.asked_at)
            if spent < self._timeout / 2 and playing.phase in ("reset", "reseeding", "stepping"):
                self._fail(index, self._live.end(index, timed_out=self._timeout))
                continue
            reason = f"did not end within {self._timeout:g} s, of which the policy took {spent:.3g} s, and was ended"
            self._fail(index, Failure(index, self._live.where(index), "timeout", reason))
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
            failure = f"copy {index} ({self._live.where(index)}) had a reward that is no finite number: {reward}"
        usage = self._live.usage(index)
        vcpu = usage.cpu_seconds / seconds if seconds else 0.0
        cost = self._prices.cost(seconds=seconds, vcpu=vcpu, memory_gb=usage.memory_gb)
        if failure is not None:
            if self._queue.put_again(work, cost):
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
                    self._live.where(index),
                    failure,
                    work.attempt,
                ),
            )
        )


def reset_of(work: Work, from_base: bool, copy: int) -> Reset:
    """How the episode of a rollout begins, in a fresh fork: its task as options, from the start that its group shares."""
    seed, task = work.seed if work.start is None else work.start, work.task
    options = None if task is None else dict(task) if isinstance(task, dict) else {"task": task}
    return Reset(seed, options, fresh=Fresh(seed, copy), from_base=from_base)


def _itself(value: Any) -> Any:
    return value

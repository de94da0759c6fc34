"""A policy acting in the copies of a fleet, each rollout in a fresh fork, whatever the engine."""

from __future__ import annotations

import contextlib
import itertools
import math
import selectors
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from prized_gym.background import Threads
from prized_gym.base import Base
from prized_gym.errors import (
    BaseDiedError,
    ForkUnsafeError,
    PrizedGymError,
    SandboxCapacityError,
    SandboxQuotaError,
    SetupError,
)
from prized_gym.interface import commands as ops
from prized_gym.interface.commands import Command, Fresh, Reseed, Reset
from prized_gym.interface.failure import Failure
from prized_gym.interface.fleet import Finished, Fleet
from prized_gym.pricing import Prices, known_total
from prized_gym.rollouts.asking import Fork, Playing, PolicyCall, PolicyCalls
from prized_gym.rollouts.policy import Policy, UserLoop, raised
from prized_gym.rollouts.queue import RolloutQueue, Work
from prized_gym.rollouts.record import Rollout

_LOOK_UP = 0.2
"""Seconds after which a run looks whether it is to stop."""

_PATIENCE = 0.005
"""Seconds at least that a batched policy's next batch is waited for once its first copy has answered."""


class Waker:
    """Ends a wait for a fleet, from whichever thread."""

    def __init__(self) -> None:
        self._read, self._write = socket.socketpair()
        self._read.setblocking(False)
        self._write.setblocking(False)

    def wake(self) -> None:
        """End the wait under way, or the next one."""
        # Full of what ends the wait as well, or closed with nobody waiting.
        with contextlib.suppress(BlockingIOError, OSError):
            self._write.send(b"\1")

    def wait(self, fds: Sequence[int], timeout: float) -> None:
        """Wait at most ``timeout`` seconds for :meth:`wake`, or until one of ``fds`` is readable."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._read, selectors.EVENT_READ)
            for fd in fds:
                selector.register(fd, selectors.EVENT_READ)
            selector.select(timeout)
        with contextlib.suppress(BlockingIOError):
            self._read.recv(4096)

    def close(self) -> None:
        """Close the sockets."""
        self._read.close()
        self._write.close()


class PolicyRunner:
    """Plays a queue with a policy, each rollout in a fresh fork.

    Args:
        base: what is forked.
        copies: the most alive at once.
        policy: acts.
        queue: what is played.
        timeout: seconds a rollout may take; None for no limit.
        reset_in: as for ``ForkedVectorEnv``.
        prices: of a copy; None for what its provider bills.
        labels: of the copies, where copies have labels; None: the base's.
        loop: where an asynchronous policy runs.
        thread: where a plain policy is called; None for the thread that iterates.
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
        prices: Prices | None,
        labels: Mapping[str, str] | None,
        loop: UserLoop,
        thread: Threads | None,
    ) -> None:
        self._base, self._size, self._policy, self._queue = base, copies, policy, queue
        self._timeout, self._from_base, self._prices, self._labels = timeout, reset_in == "base", prices, labels
        self._fleet: Fleet | None = None
        self._waker = Waker()
        self._calls = PolicyCalls(policy, loop, thread, self._waker.wake)
        self._stopped = threading.Event()
        self._at_work = False
        self._playing: dict[int, Playing] = {}
        self._ended: list[tuple[Work, Rollout]] = []
        self._ends = 0
        self._full = False
        self._lost: BaseException | None = None

    def run(self) -> Iterator[tuple[Work, Rollout]]:
        """Play everything; each rollout as it ends.

        Raises:
            BaseDiedError: the base is closed. Whatever else keeps it from being forked is raised as it is; in either case
                once the rollouts under way have ended.
        """
        self._at_work = True
        try:
            if self._stopped.is_set():
                return
            self._fleet = self._base.fleet(self._size, self._from_base, labels=self._labels)
            while not self._stopped.is_set():
                # Before anything can be raised for those that follow.
                yield from self._take_ended()
                if self._stopped.is_set() or not self._refill():
                    return
                self._act()
                self._wait()
        finally:
            self._calls.close()
            if self._fleet is not None:
                self._fleet.close(timeout=1.0)
            self._waker.close()
            self._at_work = False

    def stop(self) -> None:
        """Have the run end soon, from whichever thread."""
        self._stopped.set()
        self._waker.wake()

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
            self._do_not_count(time.monotonic() - left)

    # Making copies

    @property
    def _live(self) -> Fleet:
        assert self._fleet is not None
        return self._fleet

    def _refill(self) -> bool:
        """Fork a copy for each free place; False once nothing is left to play.

        Raises:
            BaseException: what keeps the base from being forked, once nothing is under way any more.
        """
        if self._lost is not None:
            if not self._playing and not self._ended:
                raise self._lost
            return True
        if self._full and self._playing:
            return True
        free = [index for index in range(self._size) if index not in self._playing]
        works = self._take_works(len(free))
        if self._stopped.is_set():
            return False
        if len(works) < len(free):
            self._live.release(free[len(works) :])
        if works:
            self._fork(dict(zip(free, works, strict=False)))
        return bool(self._playing or self._ended or works)

    def _take_works(self, most: int) -> list[Work]:
        began = time.monotonic()
        works = self._queue.take(most)
        self._do_not_count(time.monotonic() - began)
        return works

    def _do_not_count(self, seconds: float) -> None:
        """What the caller's code, the generator of seeds included, has just taken is none of the copies' time."""
        for playing in self._playing.values():
            playing.started += seconds

    def _fork(self, chosen: dict[int, Work]) -> None:
        first: dict[int, Command] = {i: first_command(work, i, self._from_base) for i, work in chosen.items()}
        failure = None
        try:
            self._live.fork(first)
        except (BaseDiedError, ForkUnsafeError, SetupError) as error:
            self._lost = error
            return
        except PrizedGymError as error:
            failure = str(error)
        except Exception as error:
            # What the recipe of a base that is built anew raised.
            self._lost = error
            return
        now = time.monotonic()
        fork = Fork(self._ends)
        self._playing.update({index: Playing(work, now, fork) for index, work in chosen.items()})
        if failure is not None:
            for index in chosen:
                self._end(index, failure=f"copy {index} could not be forked: {failure}", made=False)

    # The policy

    def _act(self) -> None:
        """Ask the policy for the copies that have an observation for it, and send what it has answered."""
        observed = [(index, one) for index, one in sorted(self._playing.items()) if one.phase == "observed"]
        for _, playing in observed:
            playing.phase = "deciding"
        self._calls.ask(observed, self._live.observations)
        self._send(self._calls.take_answered())

    def _send(self, answered: Sequence[PolicyCall]) -> None:
        """Step the copies whose actions are there."""
        indices: list[int] = []
        parts: list[tuple[list[Any], list[list[Any]]]] = []
        for each in answered:
            try:
                given = self._policy.split(each.result(), [index for index, _ in each.asked])
            except KeyboardInterrupt:
                raise
            except BaseException as error:
                for one in each.asked:
                    self._refuse(*one, error)
                continue
            for number, refusal in given.refused.items():
                self._refuse(*each.asked[number], refusal)
            asked = [each.asked[row] for row in given.rows]
            valid = [number for number, (index, one) in enumerate(asked) if self._playing.get(index) is one]
            arrays, objects = given.arrays, given.objects
            if len(valid) < len(asked):
                arrays = [array[valid] for array in arrays]
                objects = [[column[number] for number in valid] for column in objects]
            indices += [asked[number][0] for number in valid]
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

    def _refuse(self, index: int, playing: Playing, error: BaseException) -> None:
        """The policy has no action for a copy; if that rollout is still played, it has failed."""
        if self._playing.get(index) is playing:
            self._end(index, failure=f"copy {index} ({self._live.where(index)}): {raised('the policy', error)}")

    # Waiting

    def _wait(self) -> None:
        fleet, limit, started = self._live, self._time_left(), time.monotonic()
        if not fleet.busy:
            if self._calls.pending:
                self._waker.wait([], limit)
        elif self._calls.pending and (fds := fleet.fds()):
            self._waker.wait(fds, limit)
            self._take(fleet.wait(1, 0.0))
        else:
            finished = fleet.wait(1, 0.0 if self._calls.pending else limit)
            self._take(finished)
            if self._policy.batched and finished.copies and fleet.busy:
                # For full batches: as long again as the first took, so that no one waits for one that hangs.
                self._take(fleet.wait(None, max(_PATIENCE, time.monotonic() - started)))
        self._end_overdue()

    def _time_left(self) -> float:
        """How long to wait at most, in seconds."""
        if self._timeout is None or not self._playing:
            return _LOOK_UP
        first = min(playing.started for playing in self._playing.values())
        return min(_LOOK_UP, max(0.0, first + self._timeout - time.monotonic()))

    def _take(self, finished: Finished) -> None:
        """Go on with the copies that have finished something."""
        fleet = self._live
        seeds: dict[int, Command] = {}
        for index in finished.copies:
            playing = self._playing.get(index)
            if playing is None:
                continue
            failure = finished.failures.get(index)
            if failure is not None:
                self._failed(index, playing, failure)
                continue
            if playing.phase != "reseeding":
                playing.info = finished.infos.get(index, {})
            if playing.phase == "stepping":
                playing.reward += float(fleet.rewards[index])
                playing.length += 1
                playing.phase = "observed"
                if fleet.terminations[index] or fleet.truncations[index]:
                    self._end(index, output=playing.info)
            elif playing.phase == "forking" and playing.work.start is not None:
                self._count_from_its_making(index, playing)
                seeds[index] = Reseed(playing.work.seed)
                playing.phase = "reseeding"
            else:
                if playing.phase == "forking":
                    self._count_from_its_making(index, playing)
                playing.phase = "observed"
        if seeds:
            fleet.command(seeds)

    def _failed(self, index: int, playing: Playing, failure: Failure) -> None:
        """Deal with a copy that has failed, or could not be made."""
        if failure.kind == "fork":
            if isinstance(failure.exception, ForkUnsafeError):
                self._lost = failure.exception
            elif isinstance(failure.exception, (SandboxCapacityError, SandboxQuotaError)):
                others_play = self._others_play(playing)
                if others_play or self._ends > playing.fork.ended_before:
                    # Again at once if there may be room by now, else as soon as one of those under way has ended.
                    self._full = others_play
                    del self._playing[index]
                    self._queue.put_back(playing.work)
                    return
        made = playing.phase != "forking" or failure.kind not in ("fork", "base")
        self._end(index, failure=failure.describe(), made=made)

    def _others_play(self, playing: Playing) -> bool:
        """Whether a copy is there, or on its way, that makes room when it ends."""
        return any(
            one.fork is not playing.fork or one.phase != "forking" or self._live.alive(index)
            for index, one in self._playing.items()
        )

    def _count_from_its_making(self, index: int, playing: Playing) -> None:
        """Let a rollout's time count from when its copy was there, where that is later than when its fork was begun."""
        age = self._live.age(index)
        if not math.isnan(age):
            playing.started = max(playing.started, time.monotonic() - age)

    def _end_overdue(self) -> None:
        if self._timeout is None:
            return
        for index, playing in list(self._playing.items()):
            if time.monotonic() - playing.started < self._timeout:
                continue
            if playing.phase == "forking":
                if math.isnan(self._live.age(index)):
                    # It is not there yet: forking has a limit of its own.
                    continue
                self._count_from_its_making(index, playing)
                if time.monotonic() - playing.started < self._timeout:
                    continue
            spent = playing.policy_seconds + self._calls.seconds(index, playing)
            if spent < self._timeout / 2 and playing.phase in ("forking", "reseeding", "stepping"):
                self._end(index, failure=self._live.end(index, timed_out=self._timeout).describe())
                continue
            reason = f"did not end within {self._timeout:g} s, of which the policy took {spent:.3g} s, and was ended"
            self._end(index, failure=Failure(index, self._live.where(index), "timeout", reason).describe())
        # Those that nobody waits for any more.
        self._calls.drop(lambda index, playing: self._playing.get(index) is playing)

    # The end of one

    def _end(self, index: int, output: Any = None, failure: str | None = None, made: bool = True) -> None:
        playing, fleet = self._playing.pop(index), self._live
        self._full = False
        self._ends += 1
        work, seconds = playing.work, time.monotonic() - playing.started if made else 0.0
        reward = playing.reward
        if failure is None and not math.isfinite(reward):
            failure = f"copy {index} ({fleet.where(index)}) had a reward that is no finite number: {reward}"
        cost = self._cost(index, seconds) if made else math.nan
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
                    known_total((work.spent, cost)),
                    fleet.where(index),
                    failure,
                    work.attempt,
                ),
            )
        )

    def _cost(self, index: int, seconds: float) -> float:
        """US dollars that copy ``index`` has cost: what its provider bills, or what the prices given come to."""
        if self._prices is None:
            return self._live.usage(index).cost_usd if self._base.tells_cost else math.nan
        if (size := self._base.copy_size) is None:
            usage = self._live.usage(index)
            size = usage.cpu_seconds / seconds if seconds else 0.0, usage.memory_gb
        return self._prices.cost(seconds=seconds, vcpu=size[0], memory_gb=size[1])


def first_command(work: Work, index: int, from_base: bool) -> Reset:
    """How the episode of a rollout begins, in a fresh fork: its task as options, from the start that its group shares."""
    seed, task = work.seed if work.start is None else work.start, work.task
    options = None if task is None else dict(task) if isinstance(task, dict) else {"task": task}
    return Reset(seed, options, fresh=Fresh(seed, index), from_base=from_base)

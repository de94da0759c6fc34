"""What is under every vector environment and adapter: copies stepped, reset and asked, with one info per copy."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import gymnasium as gym
import numpy as np
import numpy.typing as npt
from gymnasium.error import AlreadyPendingCallError, ResetNeeded

from prized_gym.actions import ActionCheck
from prized_gym.arguments import Seed, seed_list, take_mask
from prized_gym.base import Base
from prized_gym.fleets.throttled import ThrottledFleet
from prized_gym.interface.commands import Call, Reseed, SetAttr
from prized_gym.interface.fleet import Fleet
from prized_gym.vector.batches import Batches, Infos, Outcome
from prized_gym.vector.copies import Copies
from prized_gym.vector.live_fleet import LiveFleet
from prized_gym.vector.pending import Gate, PendingCall, PendingReset, PendingStep
from prized_gym.vector.resets import Options, Resets
from prized_gym.vector.settings import Settings

Received: TypeAlias = (
    "tuple[Any, npt.NDArray[np.float64], npt.NDArray[np.bool_], npt.NDArray[np.bool_], Infos, npt.NDArray[np.int64]]"
)

_CLOSE_TIMEOUT = 5.0
_PATIENCE = 1.0
"""Seconds that what a reset abandons may take to finish before its copies are ended."""

_PLAIN_STEP = PendingStep({})
"""One that no episode begins with."""


class VectorCore:
    """Steps the copies of a base as :class:`~prized_gym.ForkedVectorEnv` says, but leaves their infos unmerged.

    Infos are a dict: by copy, the info that its environment gave, where that is not empty. For adapters to libraries whose
    infos are lists, or that reset and ask copies one by one.

    Args:
        base: what is forked; not closed.
        num_envs: how many copies.
        settings: how they are stepped.
        owner: the class of the vector environment, for messages.

    Attributes:
        everyone: the indices of all copies.
        copies: what is known of them.
    """

    def __init__(self, base: Base, num_envs: int, settings: Settings, owner: str) -> None:
        self._base, self._settings = base, settings
        self.num_envs = num_envs
        self.copies = Copies(num_envs)
        self._check = ActionCheck(base.description.action_space)
        self._disabled = settings.disabled
        self._gate = Gate(owner)
        self._live = LiveFleet(self._make_fleet)
        self._resets = Resets(settings, self.copies, self._live)
        self._batches = Batches(settings, self.copies, self._live, self._resets)
        self.everyone = self._batches.everyone

    def _make_fleet(self) -> Fleet:
        fleet = self._base.fleet(self.num_envs, self._settings.from_base, self._settings.limits)
        limit = self._settings.max_concurrent
        return fleet if limit is None else ThrottledFleet(fleet, limit)

    @property
    def fleet(self) -> Fleet:
        """The copies themselves."""
        return self._live.get()

    # Reset

    def reset(self, seed: Seed = None, options: dict[str, Any] | None = None) -> tuple[Any, Infos]:
        """Reset copies, as ``ForkedVectorEnv.reset`` does; observations of all, infos of those that were reset.

        A reset of all abandons whatever is pending: an interrupt may have come between its two halves.
        """
        before = self._gate.pending
        try:
            seeds = seed_list(seed, self.num_envs)
            options, mask = take_mask(options, self.num_envs)
            if mask is None:
                self._begin_whole_reset(seeds, [options] * self.num_envs)
            else:
                self._begin_masked_reset(mask, seeds, options)
            return self.reset_wait()
        except BaseException as error:
            self._gate.leave(error, before)
            raise

    def reset_each(self, seeds: Sequence[int | None], options: Options) -> tuple[Any, Infos]:
        """Reset every copy with a seed and options of its own; the observations, and each copy's info.

        Whatever is pending is abandoned.
        """
        before = self._gate.pending
        try:
            self._begin_whole_reset(seed_list(seeds, self.num_envs), options)
            return self.reset_wait()
        except BaseException as error:
            self._gate.leave(error, before)
            raise

    def _begin_whole_reset(self, seeds: Sequence[int | None], options: Options) -> None:
        gate = self._gate
        gate.check_open()
        self._resets.check_options(options)
        if gate.pending is not None or gate.sent.copies:
            self._abandon()
        self._begin_reset(self.everyone, seeds, options)

    def _begin_masked_reset(
        self, mask: npt.NDArray[np.bool_], seeds: Sequence[int | None], options: dict[str, Any] | None
    ) -> None:
        gate = self._gate
        gate.check_idle("reset", mends=True)
        # The others are to stay as they are.
        gate.check_whole()
        self._begin_reset(np.flatnonzero(mask).tolist(), seeds, [options] * self.num_envs)

    def _abandon(self) -> None:
        """Drop what is pending: nobody will wait for it. A copy that does not finish it soon is ended, to be forked anew."""
        gate, live = self._gate, self._live
        try:
            if gate.broken is None and live.fleet is not None and live.whole:
                # One whose step failed is in no state to be reset in place.
                for index in live.abandon(_PATIENCE):
                    self.copies[index].must_fork = True
            gate.drop()
        except BaseException as error:
            gate.fail(error)
            raise

    def reset_async(self, seed: Seed = None, options: dict[str, Any] | None = None) -> None:
        """Begin a :meth:`reset`."""
        self._gate.check_idle("reset_async", mends=True)
        seeds = seed_list(seed, self.num_envs)
        options, mask = take_mask(options, self.num_envs)
        if mask is None:
            self._begin_reset(self.everyone, seeds, [options] * self.num_envs)
        else:
            self._begin_masked_reset(mask, seeds, options)

    def _begin_reset(self, targets: Sequence[int], seeds: Sequence[int | None], options: Options) -> None:
        self._resets.check_options(options)
        gate, live = self._gate, self._live
        if gate.broken is not None or not live.whole:
            live.drop()
            self.copies.dropped()
            gate.mend()
        try:
            gate.pending = self._resets.begin(targets, seeds, options)
        except BaseException as error:
            self._give_up(error)
            raise

    def reset_wait(self, timeout: float | None = None) -> tuple[Any, Infos]:
        """Finish what :meth:`reset_async` began."""
        gate = self._gate
        pending = gate.check_pending(PendingReset)
        try:
            self._live.wait_all(timeout, "reset_wait")
            infos = self._resets.finish(pending)
            observations = self._observations()
            gate.pending = None
            return observations, infos
        except BaseException as error:
            gate.fail(error)
            raise

    # Step

    def step(self, actions: Any) -> Outcome:
        """Step every copy, as ``ForkedVectorEnv.step`` does."""
        before = self._gate.pending
        try:
            self.step_async(actions)
            return self.step_wait()
        except BaseException as error:
            self._gate.leave(error, before)
            raise

    def step_async(self, actions: Any) -> None:
        """Begin a :meth:`step`."""
        gate, copies = self._gate, self.copies
        if gate.pending is not None or gate.broken is not None or gate.sent.copies or gate.closed:
            gate.check_idle("step_async")
        if not copies.all_reset:
            copies.check_reset(self.everyone)
        over = copies.over
        arrays, objects = self._check.split(actions, self.num_envs, copies.done if over else None)
        if over and self._disabled:
            copies.refuse_over(self.everyone)
        try:
            starting = self._batches.begin(self.everyone, arrays, objects)
            gate.pending = PendingStep(starting) if starting else _PLAIN_STEP
        except BaseException as error:
            self._give_up(error)
            raise

    def step_wait(self, timeout: float | None = None) -> Outcome:
        """Finish what :meth:`step_async` began."""
        gate, live = self._gate, self._live
        pending = gate.pending
        if type(pending) is not PendingStep or gate.closed:
            pending = gate.check_pending(PendingStep)
        try:
            if timeout is None and not live.inbox.copies:
                finished = (live.fleet or live.get()).wait()
            else:
                live.wait_all(timeout, "step_wait")
                finished = live.inbox.take(self.everyone)
            outcome = self._batches.finish(self.everyone, finished, pending.starting)
            gate.pending = None
            return outcome
        except BaseException as error:
            gate.fail(error)
            raise

    # Stepping whoever is ready

    def send(self, actions: Any, indices: Sequence[int] | None = None) -> None:
        """Begin a step of some copies, as ``ForkedVectorEnv.send`` does."""
        gate, copies = self._gate, self.copies
        gate.check_sending()
        sent = gate.sent
        # Never the list of everyone itself: that is a batch which is waited for as a whole.
        chosen = [operator.index(index) for index in (self.everyone if indices is None else indices)]
        for index in chosen:
            self._check_index(index)
            if index in sent.copies:
                raise AlreadyPendingCallError(f"copy {index} was sent an action that has not been received", "send")
        if len(set(chosen)) != len(chosen):
            raise ValueError(f"indices={chosen} names a copy twice")
        copies.check_reset(chosen)
        ignored = copies.done[np.asarray(chosen, dtype=np.intp)] if copies.over else None
        arrays, objects = self._check.split(actions, len(chosen), ignored, chosen)
        if self._disabled and copies.over:
            copies.refuse_over(chosen)
        try:
            sent.starting.update(self._batches.begin(chosen, arrays, objects))
            sent.copies.update(chosen)
        except BaseException as error:
            self._give_up(error)
            raise

    def recv(self, min_ready: int = 1) -> Received:
        """What at least ``min_ready`` of the copies that were sent actions gave, and which they are."""
        gate, live = self._gate, self._live
        gate.check_receiving(min_ready)
        try:
            sent, inbox, fleet = gate.sent, live.inbox, live.get()
            while len(ready := sorted(inbox.copies & sent.copies)) < min_ready:
                inbox.add(fleet.wait(min_ready - len(ready)))
            outcome = self._batches.finish(ready, inbox.take(ready), sent.take_starting(ready))
            return *outcome, np.asarray(ready, dtype=np.int64)
        except BaseException as error:
            gate.fail(error)
            raise

    def step_some(self, actions: Any, indices: Sequence[int]) -> Received:
        """Step some copies, and wait for all of them; what they gave is in ascending order, which is returned last."""
        before, sent = self._gate.pending, len(self._gate.sent.copies)
        try:
            self.send(actions, indices)
            return self.recv(len(indices))
        except BaseException as error:
            self._gate.leave(error, before, sent)
            raise

    # Branching

    def branch(self, source: int, targets: Sequence[int], reseed: bool = False) -> Any:
        """Make the copies ``targets`` forks of copy ``source``, as ``ForkedVectorEnv.branch`` does."""
        gate, copies, live = self._gate, self.copies, self._live
        gate.check_idle("branch")
        source = operator.index(source)
        chosen = [operator.index(index) for index in targets]
        for index in (source, *chosen):
            self._check_index(index)
        if source in chosen or len(set(chosen)) != len(chosen):
            raise ValueError(f"branch({source}, {chosen}): the targets must be distinct and not the source")
        copies.check_reset([source])
        if copies[source].must_fork:
            raise ResetNeeded(f"copy {source} has failed and waits for its next episode: it cannot be branched")
        if not chosen:
            return self._observations()
        try:
            live.get().branch(source, chosen)
        except BaseException as error:
            self._give_up(error)
            raise
        try:
            failures = live.wait_for([source, *chosen]).failures
            if reseed and not failures:
                live.get().command({index: Reseed(copies[index].seeds.next()) for index in chosen})
                failures = live.wait_for(chosen).failures
            if failures:
                raise next(iter(failures.values())).error()
            for index in chosen:
                copies.branched(source, index)
            copies.note_done()
            return self._observations()
        except BaseException as error:
            gate.fail(error)
            raise

    # Attributes and methods of the environments

    def call(
        self, indices: Sequence[int], name: str, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> tuple[Any, ...]:
        """Call a method of some copies, or get an attribute; one result for each, in the order of ``indices``."""
        before = self._gate.pending
        try:
            self.call_async(indices, name, args, kwargs)
            return self.call_wait()
        except BaseException as error:
            self._gate.leave(error, before)
            raise

    def call_async(
        self, indices: Sequence[int], name: str, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> None:
        """Begin a :meth:`call`."""
        gate = self._gate
        gate.check_idle("call_async")
        targets = list(indices)
        try:
            self._resets.ensure(targets)
            self._live.get().command({index: Call(name, args, dict(kwargs or {})) for index in targets})
            gate.pending = PendingCall(targets)
        except BaseException as error:
            self._give_up(error)
            raise

    def call_wait(self, timeout: float | None = None) -> tuple[Any, ...]:
        """Finish what :meth:`call_async` began."""
        gate = self._gate
        targets = gate.check_pending(PendingCall).targets
        try:
            self._live.wait_all(timeout, "call_wait")
            finished = self._live.inbox.take(targets)
        except BaseException as error:
            gate.fail(error)
            raise
        # The copies themselves are as they were: a failed call needs no reset.
        gate.pending = None
        if finished.failures:
            raise next(iter(finished.failures.values())).error()
        return tuple(finished.results.get(index) for index in targets)

    def set_attr(self, indices: Sequence[int], name: str, values: Sequence[Any]) -> None:
        """Set an attribute of the environments of some copies, one value for each; new forks will have it too."""
        self._gate.check_idle("set_attr")
        given = dict(zip(indices, values, strict=True))
        commands = {index: SetAttr({name: value}) for index, value in given.items()}
        fleet = self._live.get()
        for command in commands.values():
            # What is sent with the next fork only is refused at once too.
            fleet.check_command(command)
        live = {
            index: command
            for index, command in commands.items()
            if fleet.alive(index) and not self.copies[index].must_fork
        }
        if live:
            try:
                fleet.command(live)
            except BaseException as error:
                self._give_up(error)
                raise
            try:
                failures = self._live.wait_for(live).failures
            except BaseException as error:
                self._gate.fail(error)
                raise
            if failures:
                raise next(iter(failures.values())).error()
        for index, value in given.items():
            self.copies[index].set_attribute(name, value, index in live)

    # Beside episodes

    def start(self) -> None:
        """Fork the copies that were never reset, to be stepped as they stand: what comes of it is the environment's affair."""
        self._gate.check_idle("start")
        fresh = [index for index in self.everyone if not self.copies[index].was_reset]
        try:
            self._resets.ensure(fresh)
        except BaseException as error:
            self._give_up(error)
            raise
        for index in fresh:
            self.copies.begin(index, None)
        self.copies.note_done()

    def observation(self, index: int) -> Any:
        """The latest observation of one copy, unbatched."""
        return self.fleet.observations.one(index)

    def _observations(self) -> Any:
        return self.fleet.observations.batch(self._settings.copy)

    def close(self, timeout: float | None = None, terminate: bool = False) -> None:
        """End the copies: after what is pending, or with ``terminate`` at once."""
        gate = self._gate
        gate.closed = True
        if self._live.fleet is not None and self._live.whole and gate.pending is not None:
            gym.logger.warn(f"Calling `close` while waiting for a pending call to `{gate.pending.name}` to complete.")
            if not terminate:
                self._live.finish_within(_CLOSE_TIMEOUT if timeout is None else timeout)
        self._live.drop(0.0 if terminate else timeout)

    # Checks

    def _give_up(self, error: BaseException) -> None:
        """After an error in beginning something: where nothing has begun, nothing is lost."""
        fleet, gate = self._live.fleet, self._gate
        if not isinstance(error, Exception) or not self._live.whole:
            gate.fail(error)
        elif fleet is None or gate.sent.copies.issuperset(fleet.busy):
            self._gate.pending = None
        else:
            self._gate.fail(error)

    def _check_index(self, index: int) -> None:
        if not 0 <= index < self.num_envs:
            raise ValueError(f"there is no copy {index}: num_envs={self.num_envs}")

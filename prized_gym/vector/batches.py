"""One step of some copies or of all: begun, and finished."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from prized_gym.batch import Array
from prized_gym.interface import commands as ops
from prized_gym.interface.commands import Command
from prized_gym.interface.fleet import Finished
from prized_gym.vector.copies import Copies
from prized_gym.vector.live_fleet import LiveFleet
from prized_gym.vector.resets import Resets
from prized_gym.vector.settings import Settings

Infos: TypeAlias = "dict[int, dict[str, Any]]"
"""By copy, its info, where that is not empty."""

Outcome: TypeAlias = "tuple[Any, npt.NDArray[np.float64], npt.NDArray[np.bool_], npt.NDArray[np.bool_], Infos]"
"""Observations, rewards, terminations, truncations, in the order of the copies stepped, and infos by copy."""

_NONE_STARTING: Mapping[int, int | None] = {}


class Batches:
    """Steps copies: what is sent to whom, and what is made of what comes back.

    Args:
        settings: autoreset, forks and failures.
        copies: what is known of the copies.
        live: their fleet.
        resets: begins episodes.

    Attributes:
        everyone: the indices of all copies; a step of this very list is quick, and waited for as a whole.
    """

    def __init__(self, settings: Settings, copies: Copies, live: LiveFleet, resets: Resets) -> None:
        self._settings, self._copies, self._live, self._resets = settings, copies, live, resets
        self._log = copies.log
        self._same_step = settings.same_step
        self._episodes_fork = settings.fork_on == "episode"
        self._op = bytes([ops.STEP_RESET if self._same_step and not self._episodes_fork else ops.STEP])
        self._all_step = self._op * copies.count
        self.everyone = list(range(copies.count))

    def begin(
        self, indices: Sequence[int], arrays: Sequence[Array], objects: Sequence[Sequence[Any]]
    ) -> Mapping[int, int | None]:
        """Begin a step: autoresets for those whose episode is over, steps for the others.

        Returns:
            By copy, the seed of each episode that begins.
        """
        fleet = self._live.fleet or self._live.get()
        if not self._copies.over:
            if indices is self.everyone:
                fleet.step(arrays, objects, self._all_step)
            else:
                fleet.step_some(indices, arrays, objects, self._op * len(indices))
            return _NONE_STARTING
        batch = bytearray(self._op * len(indices))
        starting: dict[int, int | None] = {}
        forks: dict[int, Command] = {}
        place = {index: number for number, index in enumerate(indices)}
        for index in self._copies.over:
            if index not in place:
                continue
            state = self._copies[index]
            batch[place[index]] = ops.NOOP
            if state.early is not None and fleet.alive(index):
                starting[index] = state.early.seed
            elif self._episodes_fork or state.must_fork or not fleet.alive(index):
                reset = self._resets.fresh(index, None)
                forks[index], starting[index] = reset, reset.seed
            else:
                batch[place[index]] = ops.RESET
                starting[index] = None
        if not forks and indices is self.everyone:
            fleet.step(arrays, objects, bytes(batch))
            return starting
        rest = [number for number, index in enumerate(indices) if index not in forks]
        if rest:
            chosen = np.asarray(rest, dtype=np.intp)
            fleet.step_some(
                [indices[number] for number in rest],
                [array[chosen] for array in arrays],
                [[column[number] for number in rest] for column in objects],
                bytes(batch[number] for number in rest),
            )
        if forks:
            self._resets.fork(forks)
        return starting

    def finish(self, indices: Sequence[int], finished: Finished, starting: Mapping[int, int | None]) -> Outcome:
        """Make a step's result of what its copies gave, deal with failures, and let episodes end and begin.

        Args:
            indices: the copies that were stepped.
            finished: what they gave; nothing of it is left to the caller.
            starting: by copy, the seed of each episode that began with this step.
        """
        fleet, copies = self._live.fleet or self._live.get(), self._copies
        chosen = None if indices is self.everyone else np.asarray(indices, dtype=np.int64)
        if chosen is None:
            rewards, terminations = fleet.rewards.copy(), fleet.terminations.copy()
            truncations = fleet.truncations.copy()
        else:
            rewards, terminations = fleet.rewards[chosen], fleet.terminations[chosen]
            truncations = fleet.truncations[chosen]
        failed: Collection[int] = ()
        if finished.failures:
            failed, retried = self._settle(finished, starting)
            starting = {**starting, **retried}
            for number, index in enumerate(indices):
                if index in failed:
                    rewards[number], terminations[number], truncations[number] = 0.0, False, True
                elif index in retried:
                    rewards[number], terminations[number] = fleet.rewards[index], fleet.terminations[index]
                    truncations[number] = fleet.truncations[index]
        self._log.add(rewards, chosen)
        if starting:
            self._note_begun(starting, finished)
        done = terminations | truncations
        over: list[int] = []
        if b"\1" in done.tobytes():
            over = np.flatnonzero(done).tolist() if chosen is None else chosen[done].tolist()
            for index in over:
                copies.end(index, fleet.usage(index))
        if self._same_step:
            if over:
                self._begin_next(over, failed, finished)
        elif chosen is None:
            copies.done, copies.over = done, over
        else:
            copies.done[chosen] = done
            copies.note_done()
        if chosen is None:
            observations = fleet.observations.batch(self._settings.copy)
        else:
            observations = fleet.observations.rows(indices)
        return observations, rewards, terminations, truncations, finished.infos

    def _note_begun(self, starting: Mapping[int, int | None], finished: Finished) -> None:
        for index, seed in starting.items():
            early = self._copies[index].early
            if early is not None and early.info:
                finished.infos[index] = early.info
            self._copies.begin(index, seed)

    def _settle(
        self, finished: Finished, starting: Mapping[int, int | None]
    ) -> tuple[Collection[int], Mapping[int, int | None]]:
        """Deal with failures: raise one, or truncate the episodes of those that failed in a step and retry the autoresets.

        Returns:
            The copies whose episodes are truncated, and the seeds of those that began in a second attempt.
        """
        in_reset = {index: failure for index, failure in finished.failures.items() if index in starting}
        in_step = {index: failure for index, failure in finished.failures.items() if index not in in_reset}
        if not self._settings.truncates:
            raise next(iter((*in_step.values(), *in_reset.values()))).error()
        for index, failure in in_step.items():
            if self._copies.failed(index, failure) >= self._settings.max_failures:
                raise failure.error()
            self._copies[index].must_fork = True
            finished.infos[index] = {"failure": failure.headline()}
        if not in_reset:
            return in_step, {}
        again = self._resets.retry(in_reset, starting)
        finished.infos.update(again.infos)
        return in_step, again.seeds

    def _begin_next(self, over: Sequence[int], failed: Collection[int], finished: Finished) -> None:
        """Within the step that ended them, follow episodes by the next ones: in new forks where the copies have not."""
        infos, ended, seeds = finished.infos, finished.finals, dict[int, "int | None"]()
        forking = over if self._episodes_fork else [index for index in over if index in failed]
        if forking:
            observations = self._live.get().observations
            for index in forking:
                ended[index] = (observations.one(index), infos.pop(index, {}))
            begun = self._resets.begin_now(forking)
            seeds = begun.seeds
            infos.update(begun.infos)
        for index in over:
            self._copies.begin(index, seeds.get(index))
        for index, (observation, info) in ended.items():
            infos[index] = {"final_obs": observation, "final_info": info, **infos.get(index, {})}

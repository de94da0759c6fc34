"""What a vector environment knows of its copies: seeds, attributes, episodes, failures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from gymnasium.error import ResetNeeded

from prized_gym.errors import EpisodeOverError
from prized_gym.interface.failure import Failure
from prized_gym.interface.fleet import Usage
from prized_gym.seeding import SeedStream, fresh_entropy
from prized_gym.vector.history import EpisodeLog

RANDOM_ATTRIBUTES = frozenset(("np_random", "_np_random", "np_random_seed", "_np_random_seed"))
"""Attributes that are a random state."""

_PROVEN = 1000
"""Steps an episode must run for its failure not to count as one in a row with the failure before it."""


@dataclass(frozen=True)
class EarlyEpisode:
    """An episode that has begun before the step that is to begin it.

    Attributes:
        seed: it began with.
        info: of its reset.
    """

    seed: int | None
    info: dict[str, Any]


@dataclass
class CopyState:
    """What is known of one copy.

    Attributes:
        seeds: the seeds of its unseeded episodes.
        attributes: what was set in it, for new forks.
        failures_in_row: since an episode of it last ended by itself.
        untouched: it exists but was never reset.
        was_reset: it was reset at least once.
        must_fork: it has failed, so its next episode begins in a new fork.
        early: its next episode, where that has begun already.
    """

    seeds: SeedStream
    attributes: dict[str, Any] = field(default_factory=dict)
    failures_in_row: int = 0
    untouched: bool = False
    was_reset: bool = False
    must_fork: bool = False
    early: EarlyEpisode | None = None

    def set_attribute(self, name: str, value: Any, live: bool) -> None:
        """An attribute was set in the copy if it is ``live``, and is to be set in new forks.

        A random state is no attribute in this: it is given to one episode, which then draws from it, and the next goes on
        where that one stopped.
        """
        if name not in RANDOM_ATTRIBUTES or not live or self.untouched:
            self.attributes[name] = value

    @property
    def has_random_state(self) -> bool:
        """Whether the next episode was given a random state."""
        return not RANDOM_ATTRIBUTES.isdisjoint(self.attributes)

    def begin(self) -> None:
        """An episode has begun."""
        self.was_reset = True
        self.untouched = False
        self.early = None
        for name in RANDOM_ATTRIBUTES.intersection(self.attributes):
            del self.attributes[name]


class Copies:
    """The copies of one vector environment, and their episodes.

    Args:
        count: how many.

    Attributes:
        states: of each copy.
        done: whose episode is over and has not begun anew, a bool array of shape ``(count,)``.
        over: their indices.
        all_reset: whether each was reset at least once.
        log: their episodes.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        entropy = fresh_entropy()
        self.states = [CopyState(SeedStream(entropy, index, count)) for index in range(count)]
        self.done: npt.NDArray[np.bool_] = np.zeros(count, dtype=np.bool_)
        self.over: list[int] = []
        self.all_reset = False
        self.log = EpisodeLog(count)

    def __getitem__(self, index: int) -> CopyState:
        return self.states[index]

    def check_reset(self, indices: Sequence[int]) -> None:
        """Refuse to step copies of which one was never reset."""
        for index in indices:
            if not self.states[index].was_reset:
                raise ResetNeeded(f"Cannot step copy {index} before resetting it: call reset() first")

    def refuse_over(self, indices: Sequence[int]) -> None:
        """Refuse to step copies of which one waits for a reset by the caller."""
        over = [index for index in indices if self.done[index]]
        if over:
            raise EpisodeOverError(
                f"the episodes of copies {over} are over and autoreset is disabled: reset them with "
                "reset(options={'reset_mask': mask}) before stepping them"
            )

    def reseed(self, index: int, seed: int) -> None:
        """Let the unseeded episodes of a copy follow from ``seed``."""
        self.states[index].seeds = SeedStream(seed, index, self.count)

    def begin(self, index: int, seed: int | None) -> None:
        """An episode of a copy begins."""
        self.states[index].begin()
        self.done[index] = False
        self.log.begin(index, seed)

    def end(self, index: int, usage: Usage) -> None:
        """The episode of a copy is over."""
        if self.log.end(index, usage):
            self.states[index].failures_in_row = 0

    def note_done(self) -> None:
        """Work out :attr:`over` and :attr:`all_reset`, after changes copy by copy."""
        self.over = np.flatnonzero(self.done).tolist()
        self.all_reset = all(state.was_reset for state in self.states)

    def forked(self, index: int) -> None:
        """A copy is a new fork."""
        self.states[index].must_fork = False
        self.states[index].early = None
        self.log.forked(index)

    def branched(self, source: int, target: int) -> None:
        """Copy ``target`` is a fork of copy ``source``, in the middle of its episode."""
        state = self.states[target]
        state.was_reset = True
        state.untouched = state.must_fork = False
        state.early = None
        state.attributes = dict(self.states[source].attributes)
        self.done[target] = self.done[source]
        self.log.branch(source, target)

    def failed(self, index: int, failure: Failure) -> int:
        """Count a failure of a copy; how many it is in a row."""
        state = self.states[index]
        if self.log.lengths[index] >= _PROVEN:
            state.failures_in_row = 0
        state.failures_in_row += 1
        self.log.fail(index, failure.headline())
        return state.failures_in_row

    def dropped(self) -> None:
        """All copies are gone."""
        for state in self.states:
            state.untouched = state.must_fork = False
            state.early = None
            state.failures_in_row = 0

"""What the copies of a fleet have answered, and the arrays that it is stored in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from prized_gym.batch import AnySpace, ObservationBuffer
from prized_gym.interface.failure import Failure
from prized_gym.interface.fleet import Finished
from prized_gym.protocols import StepAnswer


@dataclass
class Began:
    """What a reset gave."""

    obs: Any
    info: dict[str, Any]


@dataclass
class Result:
    """What a command gave."""

    value: Any


@dataclass
class Branched:
    """The copy is a fork of another, whose row it takes over."""

    obs: Any
    reward: float
    terminated: bool
    truncated: bool


Outcome: TypeAlias = Began | Result | Branched | StepAnswer | Failure
"""What comes of something that a copy was asked."""


class Rows:
    """The arrays of a fleet, a row per copy; written by the thread that waits.

    Args:
        observation_space: of one copy.
        size: how many copies.

    Attributes:
        observations, rewards, terminations, truncations: as those of the fleet.
    """

    def __init__(self, observation_space: AnySpace, size: int) -> None:
        self.observations = ObservationBuffer(observation_space, size)
        self.rewards = np.zeros(size, dtype=np.float64)
        self.terminations = np.zeros(size, dtype=np.bool_)
        self.truncations = np.zeros(size, dtype=np.bool_)

    def row(self, index: int) -> Branched:
        """A row as it stands, for a fork of its copy."""
        return Branched(
            self.observations.one(index),
            float(self.rewards[index]),
            bool(self.terminations[index]),
            bool(self.truncations[index]),
        )

    def take(self, finished: Finished, index: int, outcome: Outcome) -> None:
        """Store an outcome.

        Raises:
            Exception: an observation does not fit its space; the row is as it was.
        """
        if isinstance(outcome, Failure):
            finished.failures[index] = outcome
        elif isinstance(outcome, Result):
            if outcome.value is not None:
                finished.results[index] = outcome.value
        elif isinstance(outcome, Branched):
            self._store(index, outcome.obs, outcome.reward, outcome.terminated, outcome.truncated)
        elif isinstance(outcome, Began):
            self._store(index, outcome.obs, 0.0, False, False)
            if outcome.info:
                finished.infos[index] = outcome.info
        else:
            self._step(finished, index, outcome)

    def _step(self, finished: Finished, index: int, answer: StepAnswer) -> None:
        observation, info = (answer.obs, answer.info) if answer.reset is None else answer.reset
        self._store(index, observation, answer.reward, answer.terminated, answer.truncated)
        if answer.reset is not None:
            finished.finals[index] = (answer.obs, answer.info)
        if info:
            finished.infos[index] = info

    def _store(self, index: int, observation: Any, reward: float, terminated: bool, truncated: bool) -> None:
        self.observations.store_objects(index, self.observations.write(index, observation))
        self.rewards[index] = reward
        self.terminations[index] = terminated
        self.truncations[index] = truncated

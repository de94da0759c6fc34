"""What a rollout gave, and what many of them gave together."""

from __future__ import annotations

import math
import time
from typing import Any, NamedTuple

import numpy as np

from prized_gym.html import table
from prized_gym.pricing import known_total


class Rollout(NamedTuple):
    """An episode played in a fresh copy, and what came of it.

    Attributes:
        task: the task it was given, None where there are no tasks.
        seed: its seed.
        reward: the sum of its rewards; nan if it failed, never 0.
        length: in steps; 1 for an episode that is one request, one command or one call, unless its dict has a ``length``.
        output: with a policy the info of the last step; with ``request`` the answer; with ``command`` what it wrote to
            stdout; with ``episode`` what it returned. Of a rollout that failed: what there was, or None.
        seconds: wall-clock time from when its copy was there to its end.
        cost_usd: of its copies, those of failed attempts included, in US dollars: under the prices given, else what the
            provider bills as far as it tells; nan where nobody bills.
        copy_id: of the sandbox it ran in, or ``"pid 4711"``.
        failure: None, or why it failed: what happened to the copy, with the end of its output.
        attempts: how many times it was tried, the last one included.
    """

    task: Any
    seed: int
    reward: float
    length: int
    output: Any
    seconds: float
    cost_usd: float
    copy_id: str
    failure: str | None = None
    attempts: int = 1

    def _repr_html_(self) -> str:
        return table("Rollout", self._asdict())


class Summary(NamedTuple):
    """What the rollouts so far came to. Those that failed count in ``failed`` and ``cost_usd`` only.

    Attributes:
        rollouts: how many have ended.
        failed: how many of them failed.
        mean_reward, std_reward, min_reward, max_reward: over those that did not; nan if there are none.
        mean_length: in steps.
        seconds: wall-clock time from the first fork to the latest end.
        rollouts_per_second: ended ones, by ``seconds``.
        cost_usd: the sum of the rollouts' as far as they are known; nan if none is.
        rewards: by the number of its task, the rewards of those that did not fail, in the order they ended; without tasks
            there is one list, under 0.
    """

    rollouts: int
    failed: int
    mean_reward: float
    std_reward: float
    min_reward: float
    max_reward: float
    mean_length: float
    seconds: float
    rollouts_per_second: float
    cost_usd: float
    rewards: dict[int, list[float]]

    def pass_at(self, k: int, threshold: float = 1.0) -> float:
        """Estimate the chance that at least one of ``k`` rollouts of a task reaches ``threshold``, averaged over tasks.

        The unbiased estimator of Chen et al., "Evaluating Large Language Models Trained on Code" (2021). A rollout that
        failed is no sample, so a task with fewer than ``k`` others is an error.

        Args:
            k: the number of rollouts of a task.
            threshold: the reward from which on a rollout passes.

        Returns:
            The chance, between 0 and 1.

        Raises:
            ValueError: there are fewer than ``k`` rewards of a task.
        """
        if k < 1 or not self.rewards:
            raise ValueError(f"pass_at({k}): k must be at least 1, and there must be rewards")
        chances = []
        for task, rewards in self.rewards.items():
            count, passed = len(rewards), sum(reward >= threshold for reward in rewards)
            if count < k:
                raise ValueError(f"pass_at({k}): task {task} has {count} rewards only")
            chances.append(1.0 - math.comb(count - passed, k) / math.comb(count, k))
        return float(np.mean(chances))

    def _repr_html_(self) -> str:
        shown = {name: value for name, value in self._asdict().items() if name != "rewards"}
        return table("Rollouts", shown)


class Totals:
    """The running totals of rollouts."""

    def __init__(self) -> None:
        self.count = 0
        self.failed = 0
        self._cost = math.nan
        self.total = 0.0
        self._lengths = 0
        self._rewards: dict[int, list[float]] = {}
        self._started: float | None = None
        self._ended = 0.0

    def start(self) -> None:
        """Start the clock: the first fork is about to be made."""
        self._started = time.monotonic()

    def add(self, number: int, rollout: Rollout) -> None:
        """Count a rollout of the task with that number."""
        self.count += 1
        self._cost = known_total((self._cost, rollout.cost_usd))
        self._ended = time.monotonic()
        rewards = self._rewards.setdefault(number, [])
        if rollout.failure is not None:
            self.failed += 1
            return
        self.total += rollout.reward
        self._lengths += rollout.length
        rewards.append(rollout.reward)

    @property
    def mean(self) -> float:
        """The mean of the rewards so far; nan if there are none."""
        good = self.count - self.failed
        return self.total / good if good else math.nan

    def summary(self) -> Summary:
        """Return what the rollouts so far came to."""
        rewards = np.array([reward for some in self._rewards.values() for reward in some], dtype=np.float64)
        seconds = 0.0 if self._started is None or not self.count else self._ended - self._started
        none = math.nan
        return Summary(
            self.count,
            self.failed,
            float(rewards.mean()) if rewards.size else none,
            float(rewards.std()) if rewards.size else none,
            float(rewards.min()) if rewards.size else none,
            float(rewards.max()) if rewards.size else none,
            self._lengths / rewards.size if rewards.size else none,
            seconds,
            self.count / seconds if seconds else none,
            self._cost,
            {number: list(some) for number, some in self._rewards.items()},
        )

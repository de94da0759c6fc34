"""The record of what episodes did and cost."""

from __future__ import annotations

import math

import numpy as np

from prized_gym.interface.fleet import Usage
from prized_gym.vector.history import KEPT, EpisodeLog


def test_returns_lengths_and_seeds() -> None:
    log = EpisodeLog(2)
    log.begin(0, 3)
    log.begin(1, None)
    log.add(np.array([1.0, 2.0]))
    log.add(np.array([0.5]), np.array([1]))
    assert log.end(1, Usage())
    assert log.end(0, Usage())
    assert [(e.copy, e.seed, e.length, e.reward) for e in log.finished] == [(1, None, 2, 2.5), (0, 3, 1, 1.0)]


def test_what_an_episode_used_is_a_difference_and_nan_stays_nan() -> None:
    log = EpisodeLog(1)
    for cpu, cost in ((1.0, 0.25), (3.5, 0.75)):
        log.begin(0, None)
        log.end(0, Usage(cpu, 2.0, cost))
    log.forked(0)
    log.end(0, Usage(0.5, 1.0, 0.1))
    log.end(0, Usage())
    assert [(e.vcpu_seconds, e.cost_usd) for e in list(log.finished)[:3]] == [(1.0, 0.25), (2.5, 0.5), (0.5, 0.1)]
    last = log.finished[-1]
    assert math.isnan(last.vcpu_seconds) and math.isnan(last.cost_usd) and math.isnan(last.gb_seconds)


def test_a_failure_belongs_to_the_episode_it_cut_short() -> None:
    log = EpisodeLog(1)
    log.begin(0, None)
    log.fail(0, "copy 0 died")
    assert not log.end(0, Usage())
    log.fail(0, "copy 0 died in its reset")
    log.begin(0, None)
    assert log.end(0, Usage())
    assert [e.failure for e in log.finished] == ["copy 0 died", None]


def test_a_branch_goes_on_with_its_sources_episode() -> None:
    log = EpisodeLog(2)
    log.begin(0, 5)
    log.add(np.array([2.0, 0.0]))
    log.branch(0, 1)
    log.end(1, Usage(0.5))
    assert log.finished[0][:4] == (1, 5, 1, 2.0) and log.finished[0].vcpu_seconds == 0.5


def test_it_forgets_the_oldest() -> None:
    log = EpisodeLog(1)
    for number in range(KEPT + 5):
        log.begin(0, number)
        log.end(0, Usage())
    assert len(log.finished) == KEPT and log.finished[0].seed == 5

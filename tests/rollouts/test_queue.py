"""Which rollout is given out next: seeds and tasks in their order, failures once more and first."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from prized_gym.rollouts.queue import RolloutQueue, Work


def everything(queue: RolloutQueue) -> list[Work]:
    return list(itertools.chain.from_iterable(iter(lambda: queue.take(2), [])))


def test_seeds_in_their_order() -> None:
    queue = RolloutQueue(range(5), None, 1, 0)
    assert queue.total == 5
    assert queue.take(0) == []
    assert [work.seed for work in queue.take(2)] == [0, 1]
    assert [work.seed for work in queue.take(10)] == [2, 3, 4]
    assert queue.take(10) == []


def test_a_work_of_a_seed_alone() -> None:
    assert everything(RolloutQueue([7], None, 1, 0)) == [Work(7, None, 0, None, 1, math.nan)]
    [work] = everything(RolloutQueue(np.array([7], np.uint8), None, 1, 0))
    assert type(work.seed) is int


def test_seeds_are_drawn_no_sooner_than_they_are_asked_for() -> None:
    drawn = []

    def endless() -> Iterator[int]:
        for seed in itertools.count():
            drawn.append(seed)
            yield seed

    queue = RolloutQueue(endless(), None, 1, 0)
    assert queue.total is None and drawn == []
    assert [work.seed for work in queue.take(3)] == drawn == [0, 1, 2]


def test_tasks_without_seeds_count_from_zero() -> None:
    queue = RolloutQueue(None, ["a", "b"], 1, 0)
    assert queue.total == 2
    assert everything(queue) == [Work(0, "a", 0, None), Work(1, "b", 1, None)]


def test_a_group_starts_from_its_first_seed() -> None:
    queue = RolloutQueue([10, 11, 20, 21], ["a", "b"], 2, 0)
    assert queue.total == 4
    assert everything(queue) == [Work(10, "a", 0, 10), Work(11, "a", 0, 10), Work(20, "b", 1, 20), Work(21, "b", 1, 20)]


def test_seeds_of_unknown_number_may_be_more_than_the_tasks_need_but_not_fewer() -> None:
    assert len(everything(RolloutQueue(itertools.count(), ["a"], 3, 0))) == 3
    queue = RolloutQueue(iter([1, 2, 3]), ["a", "b"], 2, 0)
    assert [work.seed for work in queue.take(2)] == [1, 2]
    with pytest.raises(ValueError, match=r"^seeds ended at task 1: there must be 4, one per rollout$"):
        queue.take(2)


def test_no_tasks_are_nothing_to_do() -> None:
    queue = RolloutQueue(None, [], 1, 3)
    assert queue.total == 0 and queue.take(5) == []


def test_what_failed_comes_next_with_what_it_cost() -> None:
    queue = RolloutQueue(range(4), None, 1, 2)
    first, second = queue.take(2)
    assert queue.put_again(second, 0.25) and queue.put_again(first, 0.5)
    assert queue.take(3) == [
        Work(1, attempt=2, spent=0.25),
        Work(0, attempt=2, spent=0.5),
        Work(2),
    ]
    assert queue.put_again(Work(1, attempt=2, spent=0.25), 1.0)
    assert queue.take(1) == [Work(1, attempt=3, spent=1.25)]
    assert not queue.put_again(Work(1, attempt=3, spent=1.25), 1.0)
    assert [work.seed for work in everything(queue)] == [3]


def test_a_cost_that_is_not_known_hides_no_other() -> None:
    queue = RolloutQueue(range(1), None, 1, 3)
    for cost, spent in ((math.nan, math.nan), (0.5, 0.5), (math.nan, 0.5)):
        [work] = queue.take(1)
        assert queue.put_again(work, cost)
        [work] = queue.take(1)
        assert work.spent == pytest.approx(spent, nan_ok=True)
        queue.put_back(work)


def test_what_could_not_begin_comes_before_all_others_in_its_order() -> None:
    queue = RolloutQueue(range(6), None, 1, 1)
    first, *others = queue.take(4)
    assert queue.put_again(first, math.nan)
    for work in others:
        queue.put_back(work)
    taken = queue.take(2)
    for work in taken[1:]:
        queue.put_back(work)
    assert [work.seed for work in taken] == [1, 2]
    assert [(work.seed, work.attempt) for work in everything(queue)] == [(3, 1), (2, 1), (0, 2), (4, 1), (5, 1)]


def test_without_retries_nothing_comes_again() -> None:
    queue = RolloutQueue([1], None, 1, 0)
    [work] = queue.take(1)
    assert not queue.put_again(work, 0.0)
    assert queue.take(1) == []


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((None, None, 1, 0), TypeError, r"needs seeds=, one per rollout, or tasks="),
        (("123", None, 1, 0), TypeError, "seeds must be an iterable of ints, .*got '123'"),
        ((5, None, 1, 0), TypeError, "seeds must be an iterable of ints, .*got 5"),
        ((range(2), None, 2, 0), ValueError, "per_task=2 is the number of rollouts of each task: pass tasks="),
        ((range(2), None, 0, 0), ValueError, "per_task must be at least 1, got 0"),
        ((range(2), None, 1.5, 0), TypeError, "float"),
        ((range(2), None, 1, -1), ValueError, "retries must be at least 0, got -1"),
        ((range(2), "ab", 1, 0), TypeError, "tasks must be a list, got 'ab'"),
        ((range(2), {"a": 1}, 1, 0), TypeError, "tasks must be a list"),
        ((range(3), ["a", "b"], 2, 0), ValueError, "^3 seeds for 2 tasks x per_task=2: there must be 4"),
    ],
)
def test_what_does_not_fit_is_refused_at_once(arguments: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        RolloutQueue(*arguments)


@pytest.mark.parametrize(
    ("seed", "error", "message"), [(-1, ValueError, "non-negative integer, got -1"), (1.0, TypeError, "float")]
)
def test_a_bad_seed_is_refused_when_its_turn_comes(seed: Any, error: type[Exception], message: str) -> None:
    queue = RolloutQueue([3, seed], None, 1, 0)
    assert queue.take(1) == [Work(3)]
    with pytest.raises(error, match=message):
        queue.take(1)

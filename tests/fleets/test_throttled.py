"""At most so many copies at work, over the real engines."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prized_gym import engines
from prized_gym.errors import BaseDiedError
from prized_gym.fleets.throttled import ThrottledFleet
from prized_gym.interface import commands as ops
from prized_gym.interface.commands import Call, Command, Fresh, Reset
from prized_gym.interface.engine import BaseHandle
from prized_gym.interface.fleet import TimeLimits
from prized_gym.recipe import Recipe
from tools.twin_bases import counting

pytestmark = pytest.mark.timeout(120)


def build(engine: str, source: Any) -> BaseHandle:
    kind = engines.load(engine)
    return kind.build(Recipe((source,)), kind.options, 60.0, False)


@pytest.fixture
def base(engine: str) -> Iterator[BaseHandle]:
    base = build(engine, counting())
    yield base
    base.close()


def resets(count: int) -> dict[int, Command]:
    return {index: Reset(index, None, Fresh(index, index)) for index in range(count)}


def test_what_is_begun_is_finished_in_turn(base: BaseHandle) -> None:
    inner = base.fleet(5)
    fleet = ThrottledFleet(inner, 2)
    fleet.fork(resets(5))
    assert fleet.busy == [0, 1, 2, 3, 4] and inner.busy == [0, 1]
    finished = fleet.wait()
    assert finished.copies == [0, 1, 2, 3, 4] and fleet.busy == []
    assert {index: info["seed"] for index, info in finished.infos.items()} == {i: i for i in range(5)}
    actions = np.array([0, 1, 0, 1, 0])
    fleet.step([actions], [], bytes([ops.STEP]) * 5)
    assert inner.busy == [0, 1]
    # The caller may reuse its arrays at once: a copy that hung would fail this test.
    actions[:] = 99
    seen: list[int] = []
    while len(seen) < 5:
        assert len(inner.busy) <= 2
        seen += fleet.wait(1).copies
    assert sorted(seen) == [0, 1, 2, 3, 4]
    assert fleet.rewards.tolist() == [1.0] * 5
    fleet.command({index: Call("count") for index in (4, 1, 3)})
    assert fleet.wait().results == {4: 1, 1: 1, 3: 1}
    fleet.close()


def test_noops_and_resets_queue_too(base: BaseHandle) -> None:
    fleet = ThrottledFleet(base.fleet(3), 1)
    fleet.fork(resets(3))
    fleet.wait()
    fleet.step([np.zeros(3, np.int64)], [], bytes([ops.STEP, ops.NOOP, ops.STEP]))
    fleet.wait()
    fleet.step_some([2, 0], [np.zeros(2, np.int64)], [], bytes([ops.RESET, ops.STEP]))
    assert fleet.wait().copies == [0, 2]
    assert fleet.observations.arrays[0][:, 0].tolist() == [2, 0, 0]
    fleet.close()


def test_a_fork_replaces_what_is_queued(base: BaseHandle) -> None:
    fleet = ThrottledFleet(base.fleet(3), 1)
    fleet.fork(resets(3))
    fleet.wait()
    fleet.step([np.zeros(3, np.int64)], [], bytes([ops.STEP]) * 3)
    fleet.fork({2: Reset(7, None, Fresh(7, 2))})
    finished = fleet.wait()
    assert finished.copies == [0, 1, 2] and finished.infos[2]["seed"] == 7
    assert fleet.observations.arrays[0][:, 0].tolist() == [1, 1, 0]
    fleet.close()


def test_a_fork_that_fails_when_it_is_its_turn_fails_its_copies(base: BaseHandle) -> None:
    fleet = ThrottledFleet(base.fleet(2), 1)
    fleet.fork(resets(2))
    fleet.wait()
    base.close()
    fleet.fork(resets(2))
    failures = fleet.wait().failures
    assert sorted(failures) == [0, 1]
    assert all(failure.kind == "base" and isinstance(failure.error(), BaseDiedError) for failure in failures.values())
    fleet.close()


def test_a_wait_that_is_given_up_keeps_the_rest(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    inside = counting()

    class Gated(inside):  # type: ignore[misc,valid-type]
        def step(self, action: Any) -> Any:
            while action and not gate.exists():
                time.sleep(0.01)
            return super().step(0)

    base = build("local", Gated)
    fleet = ThrottledFleet(base.fleet(3), 1)
    fleet.fork(resets(3))
    fleet.wait()
    fleet.step([np.array([0, 1, 1])], [], bytes([ops.STEP]) * 3)
    seen = list(fleet.wait(1).copies)
    assert seen == [0]
    assert fleet.wait(None, 0.05).copies == [] and fleet.busy == [1, 2]
    gate.touch()
    assert fleet.wait().copies == [1, 2]
    fleet.close()
    base.close()


def test_a_time_limit_counts_from_when_a_copy_begins() -> None:
    base = build("local", counting())
    fleet = ThrottledFleet(base.fleet(4, TimeLimits(step=1.5)), 1)
    fleet.fork(resets(4))
    fleet.wait()
    fleet.step([np.full(4, 50)], [], bytes([ops.STEP]) * 4)
    assert not fleet.wait().failures
    fleet.step([np.array([0, 99, 0, 0])], [], bytes([ops.STEP]) * 4)
    finished = fleet.wait()
    assert finished.copies == [0, 1, 2, 3] and [f.kind for f in finished.failures.values()] == ["timeout"]
    assert fleet.rewards.tolist() == [2, 1, 2, 2]
    assert not fleet.alive(1) and fleet.alive(0)
    fleet.close()
    base.close()


def test_a_branch_does_not_queue() -> None:
    base = build("local", counting())
    fleet = ThrottledFleet(base.fleet(4), 1)
    fleet.fork(resets(4))
    fleet.wait()
    fleet.step_some([0], [np.zeros(1, np.int64)], [], bytes([ops.STEP]))
    fleet.wait()
    fleet.branch(0, [1, 3])
    assert fleet.busy == [0, 1, 3]
    assert fleet.wait().copies == [0, 1, 3]
    assert fleet.observations.arrays[0][:, 0].tolist() == [1, 1, 0, 1]
    fleet.close()
    base.close()


def test_ended_it_is_out_of_the_queue() -> None:
    base = build("local", counting())
    fleet = ThrottledFleet(base.fleet(2), 1)
    fleet.fork(resets(2))
    fleet.wait()
    pid = int(fleet.where(1).split()[1])
    fleet.step([np.zeros(2, np.int64)], [], bytes([ops.STEP]) * 2)
    assert fleet.end(1).copy == 1
    assert fleet.busy == [0] and fleet.wait().copies == [0]
    assert not os.path.exists(f"/proc/{pid}")
    fleet.close()
    base.close()

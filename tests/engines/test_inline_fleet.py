"""The inline engine's fleet, without a vector environment over it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from prized_gym.errors import BaseDiedError, EngineUnavailableError
from prized_gym.interface import commands as ops
from prized_gym.interface.commands import Call, Reseed, Reset, SetAttr
from prized_gym.interface.engine import BaseHandle
from prized_gym.recipe import AnyEnv
from tools.fleets import ask, begin_some, first, forked, make_base, step
from zoo.envs import Loaded
from zoo.faulty import Faulty


@pytest.fixture
def base() -> Iterator[BaseHandle]:
    base = make_base("inline", Faulty)
    yield base
    base.close()


def test_what_is_begun_is_waited_for(base: BaseHandle) -> None:
    fleet = base.fleet(3)
    fleet.fork(first(range(3), seed=7))
    assert fleet.busy == [0, 1, 2] and not fleet.alive(0)
    assert fleet.wait(1).copies == [0]
    assert fleet.busy == [1, 2]
    assert fleet.wait().copies == [1, 2]
    assert np.array_equal(fleet.observations.arrays[0][:, 1], [7, 8, 9])
    begin_some(fleet, {2: Faulty.STEP, 0: Faulty.END})
    assert fleet.wait().copies == [0, 2]
    assert list(fleet.terminations) == [True, False, False]
    assert list(fleet.rewards) == [1, 0, 1]
    assert fleet.wait().copies == [] and fleet.fds() == [] and fleet.next_deadline is None


def test_a_caller_cannot_write_what_a_step_gave(base: BaseHandle) -> None:
    fleet = base.fleet(1)
    for array in (fleet.rewards, fleet.terminations, fleet.truncations):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1


def test_a_failure_changes_nothing_and_concerns_one_copy(base: BaseHandle) -> None:
    fleet = base.fleet(3)
    forked(fleet)
    step(fleet, [0, 0, 0])
    before = fleet.observations.arrays[0][0].copy(), fleet.rewards[0]
    finished = step(fleet, [Faulty.BAD_SHAPE, 0, Faulty.EXIT])
    assert sorted(finished.failures) == [0, 2]
    assert [finished.failures[0].kind, finished.failures[2].kind] == ["raised", "exited"]
    assert isinstance(finished.failures[0].exception, ValueError)
    assert np.array_equal(fleet.observations.arrays[0][0], before[0]) and fleet.rewards[0] == before[1]
    assert fleet.observations.arrays[0][1][0] == 2


def test_a_copy_that_does_not_exist_fails_whatever_it_is_asked(base: BaseHandle) -> None:
    fleet = base.fleet(2)
    forked(fleet, [1])
    assert "does not exist" in step(fleet, [0, 0]).failures[0].reason
    fleet.end(1)
    fleet.command({0: Call("count"), 1: Call("count")})
    finished = fleet.wait()
    assert sorted(finished.failures) == [0, 1] and not finished.results
    assert not forked(fleet).failures


def test_a_factory_that_raises_fails_its_copy_alone() -> None:
    built = [0]

    def now_and_then() -> AnyEnv:
        built[0] += 1
        if built[0] == 3:
            raise OSError("no licence left")
        return Faulty()

    base = make_base("inline", now_and_then)
    fleet = base.fleet(3)
    finished = forked(fleet)
    assert list(finished.failures) == [1] and [fleet.alive(index) for index in range(3)] == [True, False, True]
    assert "no licence left" in str(finished.failures[1].error())
    assert step(fleet, [0, 0, 0]).failures == finished.failures
    assert not forked(fleet, [1]).failures
    base.close()


def test_commands_and_results() -> None:
    base = make_base("inline", Loaded)
    fleet = base.fleet(2)
    forked(fleet)
    fleet.command({0: SetAttr({"value": 5}), 1: Reseed(3)})
    assert fleet.wait().results == {}
    assert ask(fleet, "value") == {0: 5, 1: 0}
    assert ask(fleet, "add", 2) == {0: 7, 1: 2}
    fleet.command({0: Reset()})
    assert fleet.wait().copies == [0] and fleet.observations.arrays[0][0, 0] == 7
    base.close()


def test_a_step_that_goes_on_with_a_reset_gives_both(base: BaseHandle) -> None:
    fleet = base.fleet(2)
    forked(fleet, seed=1)
    finished = step(fleet, [Faulty.END, Faulty.STEP], ops.STEP_RESET)
    assert list(finished.finals) == [0] and finished.finals[0][0][0] == 1
    assert list(fleet.observations.arrays[0][:, 0]) == [0, 1] and list(fleet.terminations) == [True, False]


def test_on_fork_hears_which_copy_it_is() -> None:
    heard: list[tuple[int, int]] = []
    base = make_base("inline", Faulty, on_fork=lambda env, index, seed: heard.append((index, seed)))
    forked(base.fleet(2), seed=4)
    assert heard == [(0, 4), (1, 5)]
    base.close()


def test_branching_is_refused_and_nothing_ended(base: BaseHandle) -> None:
    fleet = base.fleet(2)
    forked(fleet)
    with pytest.raises(EngineUnavailableError, match="local"):
        fleet.branch(0, [1])
    assert fleet.alive(1) and fleet.busy == []


def test_a_closed_base() -> None:
    base = make_base("inline", Faulty)
    fleet = base.fleet(1)
    forked(fleet)
    base.close()
    base.close()
    assert not base.alive and not fleet.alive(0)
    failure = step(fleet, [0]).failures[0]
    assert failure.kind == "base" and isinstance(failure.error(), BaseDiedError)
    for refused in (lambda: forked(fleet), lambda: base.fleet(1), base.revive):
        with pytest.raises(BaseDiedError, match="closed"):
            refused()

"""The fleet of sandboxes as the seam says it: what is begun is waited for, limits are enforced, forks may finish in part."""

from __future__ import annotations

import select
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import prized_gym
from prized_gym.engines import ENGINES
from prized_gym.fleets.throttled import ThrottledFleet
from prized_gym.interface import commands as ops
from prized_gym.interface.commands import Fresh, Reset, Start
from prized_gym.interface.engine import BaseHandle
from prized_gym.interface.fleet import TimeLimits
from prized_gym.recipe import Recipe
from tools.fleets import ask, begin, begin_some, first, forked, make_base, step
from zoo import plain_driver
from zoo import plain_variants as variants
from zoo.envs import Loaded
from zoo.faulty import Faulty
from zoo.plain_driver import engine_of

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def base() -> Iterator[BaseHandle]:
    assert "plain" in ENGINES
    handle = make_base("plain", Faulty)
    yield handle
    handle.close()


def sandbox_of(where: str) -> plain_driver.PlainSandbox:
    return next(each for each in plain_driver.ALIVE if where == f"sandbox {each.id}")


def test_wait_returns_what_finished_and_no_more(base: BaseHandle) -> None:
    fleet = base.fleet(3)
    assert fleet.busy == [] and not fleet.alive(0) and fleet.where(0) == "not forked"
    fleet.fork(first([0, 1]))
    assert fleet.busy == [0, 1]
    finished = fleet.wait()
    assert list(finished.copies) == [0, 1] and not finished.failures and fleet.busy == []
    assert fleet.alive(0) and not fleet.alive(2) and fleet.where(1).startswith("sandbox plain_")
    fleet.rewards[:] = -1
    finished = step(fleet, [Faulty.STEP] * 3)
    assert list(finished.copies) == [0, 1, 2] and set(finished.failures) == {2}
    assert finished.failures[2].reason == "does not exist" and fleet.rewards[2] == -1 != fleet.rewards[0]
    begin_some(
        fleet, {0: Faulty.SLEEP, 1: Faulty.STEP} if hasattr(Faulty, "SLEEP") else {0: Faulty.HANG, 1: Faulty.STEP}
    )
    assert list(fleet.wait(1).copies) == [1] and fleet.busy == [0]
    assert list(fleet.wait(None, 0.05).copies) == []
    assert fleet.end(0).reason == "was ended" and fleet.busy == []
    assert step(fleet, [Faulty.STEP] * 3).failures[0].reason == "was ended"
    fleet.close()
    fleet.close()


@pytest.mark.parametrize("engine", ["inline", "local", "plain"])
@pytest.mark.parametrize("limit", [None, 1])
def test_a_copy_that_is_to_do_nothing_finishes_too(engine: str, limit: int | None) -> None:
    handle = make_base(engine, Faulty)
    try:
        fleet = handle.fleet(3)
        if limit is not None:
            fleet = ThrottledFleet(fleet, limit)
        forked(fleet)
        actions = [np.full(2, Faulty.STEP)]
        fleet.step_some([1, 2], actions, [], bytes([ops.NOOP, ops.STEP]))
        finished = []
        while fleet.busy:
            finished += fleet.wait(1).copies
        assert sorted(finished) == [1, 2]
        fleet.close()
    finally:
        handle.close()


def test_an_episode_begun_early_is_received() -> None:
    with prized_gym.Base(Faulty, engine=engine_of(plain_driver.PlainDriver()), progress=False) as base:
        envs = prized_gym.ForkedVectorEnv(base, num_envs=2, on_failure="truncate")
        envs.reset(seed=0)
        sandbox_of(envs.core.fleet.where(1)).kill("killed")
        assert envs.step([Faulty.STEP] * 2)[3].tolist() == [False, True]
        # Its next episode begins with this call, and the step that was to begin it does nothing.
        assert envs.call("render_mode") == (None, None)
        envs.send([Faulty.STEP] * 2)
        *_, indices = envs.recv(2)
        assert indices.tolist() == [0, 1]
        envs.close()


def test_a_descriptor_says_when_there_is_something_to_wait_for(base: BaseHandle) -> None:
    fleet = base.fleet(2)
    (fd,) = fleet.fds()

    def readable(timeout: float) -> bool:
        return bool(select.select([fd], [], [], timeout)[0])

    assert not readable(0)
    fleet.fork(first([0, 1]))
    assert readable(60)
    finished: list[int] = []
    while len(finished) < 2:
        assert readable(60)
        finished += fleet.wait(1, 0.0).copies
    assert not readable(0) and fleet.next_deadline is None
    begin(fleet, [Faulty.HANG, Faulty.STEP])
    assert readable(60) and list(fleet.wait(1, 0.0).copies) == [1] and not readable(0)
    fleet.end(0)
    assert not readable(0)
    fleet.close()
    assert fleet.fds() == []


def test_limits_are_enforced_by_the_fleet(base: BaseHandle) -> None:
    fleet = base.fleet(3, TimeLimits(step=1.0, reset=30.0))
    forked(fleet)
    started = time.monotonic()
    finished = step(fleet, [Faulty.HANG, Faulty.STEP, Faulty.STEP])
    assert time.monotonic() - started < 20
    failure = finished.failures.pop(0)
    assert not finished.failures
    assert failure.kind == "timeout" and failure.reason == "did not answer within 1 s and was ended"
    assert "hang_here" in failure.stack and not fleet.alive(0)
    assert step(fleet, [Faulty.STEP] * 3).failures[0] == failure
    # Both a step and a reset.
    begin(fleet, [Faulty.STEP] * 3, ops.STEP_RESET)
    assert set(fleet.wait().failures) == {0}
    fleet.close()
    late = base.fleet(1, TimeLimits(reset=0.001))
    late.fork({0: Start(Fresh(0))})
    failure = late.wait().failures[0]
    assert failure.kind == "timeout" and "within 0.001 s" in failure.reason
    late.close()


def test_copies_that_are_forked_again_or_ended_on_the_way_are_not_left(base: BaseHandle) -> None:
    fleet = base.fleet(2)
    before = set(plain_driver.ALIVE)
    fleet.fork(first([0, 1]))
    fleet.fork(first([0], seed=5))
    assert list(fleet.wait().copies) == [0, 1] and not step(fleet, [Faulty.STEP] * 2).failures
    fleet.fork(first([0, 1]))
    fleet.end(0)
    assert list(fleet.wait().copies) == [1]
    fleet.fork(first([0]))
    fleet.release([0, 1])
    assert fleet.busy == [] and not fleet.alive(0) and not fleet.alive(1)
    fleet.fork(first([1]))
    fleet.close()
    ends = time.monotonic() + 30
    while set(plain_driver.ALIVE) - before:
        assert time.monotonic() < ends
        time.sleep(0.02)


def test_a_branch_is_begun_and_waited_for() -> None:
    base = make_base("plain", Loaded)
    fleet = base.fleet(3)
    forked(fleet, [0])
    fleet.branch(0, [1, 2])
    assert fleet.busy == [0, 1, 2]
    row = fleet.observations.one(0)
    assert not fleet.wait().failures and (fleet.observations.one(2) == row).all()
    assert fleet.alive(1) and fleet.alive(2) and fleet.where(1) != fleet.where(2)
    fleet.end(0)
    fleet.branch(0, [1])
    finished = fleet.wait()
    assert finished.failures[0].reason == "was ended" and finished.failures[1].kind == "fork"
    assert fleet.alive(2) and not fleet.alive(1)
    fleet.close()
    base.close()


def test_a_fork_finishes_in_part_where_not_all_fit() -> None:
    kind = engine_of(variants.Cramped(room=3))
    # A second base has no room for a single copy.
    handle = kind.build(Recipe((Loaded,)), kind.options, 60.0, False)
    fleet = handle.fleet(5)
    fleet.fork(first(range(3)))
    assert not fleet.wait().failures
    kind.provider.room = 0  # type: ignore[attr-defined]
    fleet.fork(first([3, 4]))
    finished = fleet.wait()
    assert set(finished.failures) == {3, 4}
    assert {failure.kind for failure in finished.failures.values()} == {"fork"}
    error = finished.failures[3].error()
    assert isinstance(error, prized_gym.SandboxError) and "room for 0 of 2" in str(error)
    assert set(ask(fleet, "value", indices=[0, 1, 2])) == {0, 1, 2}
    fleet.close()
    handle.close()


def test_a_base_that_died_is_built_anew_from_its_recipe() -> None:
    handle = make_base("plain", Loaded)
    fleet = handle.fleet(2)
    first_one = handle.where
    sandbox_of(first_one).kill("evicted")
    assert not handle.alive
    assert not forked(fleet, [0]).failures and handle.alive and handle.where != first_one
    fleet.close()
    handle.close()
    with pytest.raises(prized_gym.BaseDiedError, match="closed"):
        handle.fleet(1)
    with pytest.raises(prized_gym.BaseDiedError, match="closed"):
        handle.revive()


def test_a_base_that_is_found_dead_by_forking_it_is_built_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    handle = make_base("plain", Loaded)
    fleet = handle.fleet(2)
    first_one = sandbox_of(handle.where)
    real = plain_driver.PlainSandbox.copies

    def copies(self: plain_driver.PlainSandbox, *arguments: Any) -> Any:
        if self is first_one:
            self.kill("evicted")
            raise prized_gym.SandboxDiedError(f"{self.id} ended: evicted")
        return real(self, *arguments)

    monkeypatch.setattr(plain_driver.PlainSandbox, "copies", copies)
    assert not forked(fleet).failures and handle.alive
    fleet.close()
    handle.close()


def test_a_base_that_died_is_reset_as_before() -> None:
    kind = engine_of(variants.Forkless())
    handle = kind.build(Recipe((Loaded,)), kind.options, 60.0, False)
    handle.reset_environment(None)
    fleet = handle.fleet(1)
    from_base = {0: Reset(0, None, Fresh(0), from_base=True)}
    fleet.fork(from_base)
    assert not fleet.wait().failures
    sandbox_of(handle.where).kill("evicted")
    fleet.fork(from_base)
    assert not fleet.wait().failures
    fleet.close()
    handle.close()


def test_a_connected_base_that_died_says_that_it_cannot_be_had_again() -> None:
    provider = variants.Cramped(room=5)
    kind = engine_of(provider)
    with prized_gym.Base(Loaded, engine=kind, progress=False) as made:
        kept = made.keep()
    base = prized_gym.Base.connect(kept, engine=kind, progress=False)
    envs = prized_gym.ForkedVectorEnv(base, num_envs=1)
    envs.reset(seed=0)
    sandbox_of(f"sandbox {kept}").close()
    with pytest.raises(prized_gym.BaseDiedError, match="cannot be connected to again"):
        envs.reset(seed=0)
    envs.close()
    base.close()

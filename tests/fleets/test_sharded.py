"""Two bases that look like one, by themselves and under a vector environment."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from prized_gym import Base, BaseDiedError, CopyTimeoutError, ForkedVectorEnv, engines
from prized_gym.fleets.sharded import ShardedFleet
from prized_gym.interface import commands as ops
from prized_gym.interface.commands import Call, Command, Fresh, Reset
from prized_gym.interface.engine import BaseHandle
from prized_gym.interface.fleet import TimeLimits
from prized_gym.recipe import Recipe
from tools.twin_bases import TwinBase, counting

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(autouse=True)
def twin_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine "twin"."""
    monkeypatch.setitem(engines.ENGINES, "twin", "tools.twin_bases:TwinEngine")


@pytest.fixture(params=["local", "inline"])
def halves(request: pytest.FixtureRequest) -> Iterator[list[BaseHandle]]:
    kind = engines.load(request.param)
    halves = [kind.build(Recipe((counting(),)), kind.options, 60.0, False) for _ in range(2)]
    yield halves
    for half in halves:
        half.close()


def resets(indices: Any) -> dict[int, Command]:
    return {index: Reset(index, None, Fresh(index, index)) for index in indices}


def test_copies_are_numbered_through(halves: list[BaseHandle]) -> None:
    fleet = ShardedFleet([halves[0].fleet(2), halves[1].fleet(3)])
    assert fleet.size == 5
    fleet.fork(resets(range(5)))
    assert fleet.busy == [0, 1, 2, 3, 4]
    finished = fleet.wait()
    assert finished.copies == [0, 1, 2, 3, 4]
    assert {index: info["seed"] for index, info in finished.infos.items()} == {i: i for i in range(5)}
    fleet.step_some([4, 0, 2], [np.array([1, 0, 0])], [], bytes([ops.STEP]) * 3)
    seen: list[int] = []
    while len(seen) < 3:
        seen += fleet.wait(1).copies
    assert sorted(seen) == [0, 2, 4]
    fleet.step([np.zeros(5, np.int64)], [], bytes([ops.STEP, ops.STEP, ops.NOOP, ops.RESET, ops.STEP]))
    assert fleet.wait().infos.keys() == {0, 1, 3, 4}
    assert fleet.observations.arrays[0][:, 0].tolist() == [2, 1, 1, 0, 2]
    assert fleet.observations.objects[0] == ["xx", "x", "x", "", "xx"]
    assert fleet.rewards.tolist() == [2, 1, 1, 0, 2]
    fleet.command({3: Call("count"), 1: Call("count")})
    assert fleet.wait().results == {3: 0, 1: 1}
    assert fleet.wait().copies == [] and fleet.wait(3, 0.0).copies == []
    fleet.release([0, 4])
    assert [fleet.alive(index) for index in range(5)] == [False, True, True, True, False]
    fleet.close()
    fleet.close()


def test_failures_name_the_copy(halves: list[BaseHandle]) -> None:
    fleet = ShardedFleet([half.fleet(2) for half in halves])
    fleet.fork(resets([0, 1, 2]))
    fleet.wait()
    fleet.step([np.zeros(4, np.int64)], [], bytes([ops.STEP]) * 4)
    finished = fleet.wait()
    assert list(finished.failures) == [3] and finished.failures[3].copy == 3
    assert fleet.end(2).copy == 2 and not fleet.alive(2) and fleet.alive(0)
    fleet.close()


def test_a_base_that_cannot_be_built_anew_fails_its_copies_only(halves: list[BaseHandle]) -> None:
    fleet = ShardedFleet([half.fleet(2) for half in halves])
    fleet.fork(resets(range(4)))
    fleet.wait()
    halves[1].close()
    fleet.fork(resets(range(4)))
    finished = fleet.wait()
    assert finished.copies == [0, 1, 2, 3] and sorted(finished.failures) == [2, 3]
    for index, failure in finished.failures.items():
        assert failure.copy == index and failure.kind == "base" and isinstance(failure.error(), BaseDiedError)
    # And so does whatever else they are asked for.
    fleet.step([np.zeros(4, np.int64)], [], bytes([ops.STEP]) * 4)
    finished = fleet.wait()
    assert finished.copies == [0, 1, 2, 3] and sorted(finished.failures) == [2, 3]
    fleet.command({1: Call("count"), 2: Call("count")})
    finished = fleet.wait()
    assert finished.results == {1: 1} and list(finished.failures) == [2]
    fleet.close()


def test_waiting_for_several_bases_does_not_spin() -> None:
    with Base(counting(), engine="twin") as base:
        fleet = base.fleet(4)
        fleet.fork(resets(range(4)))
        fleet.wait()
        fleet.step_some(range(4), [np.array([60, 60, 60, 60])], [], bytes([ops.STEP]) * 4)
        used = time.process_time()
        assert len(fleet.wait(1).copies) >= 1
        while fleet.busy:
            fleet.wait(1)
        assert time.process_time() - used < 0.3
        fleet.step_some(range(4), [np.array([90, 0, 0, 90])], [], bytes([ops.STEP]) * 4)
        seen = list(fleet.wait(2).copies)
        assert seen == [1, 2] and fleet.busy == [0, 3]
        assert fleet.wait(2, 0.01).copies == []
        assert fleet.wait().copies == [0, 3]
        fleet.close()


def test_each_base_enforces_its_limits() -> None:
    with Base(counting(), engine="twin") as base:
        fleet = base.fleet(4, limits=TimeLimits(step=0.7))
        fleet.fork(resets(range(4)))
        fleet.wait()
        fleet.step([np.array([99, 0, 0, 99])], [], bytes([ops.STEP]) * 4)
        assert fleet.next_deadline is not None
        finished = fleet.wait()
        assert finished.copies == [0, 1, 2, 3]
        assert {index: failure.kind for index, failure in finished.failures.items()} == {0: "timeout", 3: "timeout"}
        assert fleet.rewards.tolist() == [0, 1, 1, 0] and fleet.next_deadline is None
        fleet.close()
    envs = ForkedVectorEnv(counting(), 3, engine="twin", step_timeout=0.7)
    envs.reset(seed=0)
    with pytest.raises(CopyTimeoutError, match="copy 2"):
        envs.step([0, 0, 99])
    envs.reset(seed=0)
    envs.close()


def test_branches_stay_on_their_base() -> None:
    with Base(counting(), engine="twin") as base:
        fleet = base.fleet(4)
        fleet.fork(resets(range(4)))
        fleet.wait()
        fleet.step([np.zeros(4, np.int64)], [], bytes([ops.STEP, ops.STEP, ops.STEP, ops.NOOP]))
        fleet.wait()
        fleet.branch(2, [3])
        assert fleet.wait().copies == [2, 3]
        assert fleet.observations.arrays[0][:, 0].tolist() == [1, 1, 1, 1]
        fleet.branch(0, [1, 3])
        finished = fleet.wait()
        assert finished.copies == [0, 1, 3] and list(finished.failures) == [3]
        assert finished.failures[3].kind == "fork" and "another base" in finished.failures[3].reason
        fleet.branch(0, [2])
        assert fleet.busy == [0, 2]
        assert list(fleet.wait().failures) == [2]
        assert [fleet.alive(index) for index in range(4)] == [True, True, False, False]
        fleet.fork(resets([2, 3]))
        assert not fleet.wait().failures
        fleet.close()


@pytest.mark.parametrize("mode", list(AutoresetMode), ids=lambda mode: mode.value)
def test_the_same_as_sync_vector_env(mode: AutoresetMode) -> None:
    ours = ForkedVectorEnv("CartPole-v1", num_envs=5, engine="twin", autoreset_mode=mode)
    reference = SyncVectorEnv([lambda: gym.make("CartPole-v1")] * 5, autoreset_mode=mode)
    rng = np.random.default_rng(0)
    try:
        for seed in (3, 4):
            assert ours.reset(seed=seed)[0].tobytes() == reference.reset(seed=seed)[0].tobytes()
            for _ in range(120):
                actions = rng.integers(0, 2, 5)
                mine, theirs = ours.step(actions), reference.step(actions)
                for a, b in zip(mine[:4], theirs[:4], strict=True):
                    assert a.dtype == b.dtype and a.tobytes() == b.tobytes()
                assert mine[4].keys() == theirs[4].keys()
                done = theirs[2] | theirs[3]
                if mode is AutoresetMode.DISABLED and done.any():
                    mask = {"reset_mask": done}
                    again = ours.reset(options=mask)[0], reference.reset(options=dict(mask))[0]
                    assert again[0].tobytes() == again[1].tobytes()
    finally:
        ours.close()
        reference.close()


def test_partial_steps_over_two_bases() -> None:
    envs = ForkedVectorEnv(counting(), num_envs=4, engine="twin", max_concurrent=3)
    try:
        envs.reset(seed=0)
        steps = np.zeros(4, np.int64)
        envs.send([0, 1, 2, 0])
        for _ in range(40):
            *_, indices = envs.recv(1)
            steps[indices] += 1
            envs.send([0] * len(indices), indices)
        left = 4
        while left:
            observations, *_, infos, indices = envs.recv(1)
            steps[indices] += 1
            assert observations["count"][:, 0].tolist() == steps[indices].tolist() == infos["count"].tolist()
            left -= len(indices)
    finally:
        envs.close()


@pytest.mark.parametrize("on_failure", ["raise", "truncate"])
def test_a_base_that_is_killed_loses_its_copies_only(on_failure: Any) -> None:
    envs = ForkedVectorEnv(counting(), num_envs=4, engine="twin", on_failure=on_failure)
    try:
        envs.reset(seed=0)
        envs.step([0] * 4)
        handle: Any = envs.base._handle
        assert isinstance(handle, TwinBase)
        second = handle.halves[1]
        os.kill(int(second.where.split()[1]), signal.SIGKILL)
        deadline = time.monotonic() + 20
        while second.alive:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        if on_failure == "raise":
            with pytest.raises(BaseDiedError):
                for _ in range(20):
                    envs.step([0] * 4)
                    time.sleep(0.05)
            observations, _ = envs.reset(seed=0)
            assert observations["count"][:, 0].tolist() == [0] * 4
        else:
            truncations = np.zeros(4, np.bool_)
            while not truncations.any():
                observations, _, _, truncations, infos = envs.step([0] * 4)
                assert time.monotonic() < deadline
            assert truncations.tolist() == [False, False, True, True]
            assert infos["failure"][2].startswith("copy 2 ") and infos["failure"][3].startswith("copy 3 ")
            steps = observations["count"][0, 0]
            observations, _, _, truncations, _ = envs.step([0] * 4)
            assert not truncations.any()
            assert observations["count"][:, 0].tolist() == [steps + 1, steps + 1, 0, 0]
        assert handle.halves[0].alive and handle.halves[1].alive
        for _ in range(3):
            envs.step([0] * 4)
    finally:
        envs.close()

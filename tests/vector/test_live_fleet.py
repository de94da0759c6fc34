"""The fleet of a vector environment: made when needed, waited for, given up."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from prized_gym import Base
from prized_gym.interface import commands as ops
from prized_gym.interface.commands import Command, Fresh, Reset
from prized_gym.vector.live_fleet import LiveFleet


class Still(gym.Env[Any, Any]):
    """Does nothing."""

    observation_space = gym.spaces.Box(0, 1, (1,), np.float64)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return np.zeros(1), {"seed": seed}

    def step(self, action: Any) -> Any:
        return np.zeros(1), float(action), False, False, {}


@pytest.fixture
def live() -> Iterator[LiveFleet]:
    with Base(Still, engine="inline") as base:
        live = LiveFleet(lambda: base.fleet(3))
        yield live
        live.drop()


def resets(*indices: int) -> dict[int, Command]:
    return {index: Reset(index, None, Fresh(index, index)) for index in indices}


def test_it_is_made_once_and_anew_after_it_was_dropped(live: LiveFleet) -> None:
    assert live.fleet is None
    first = live.get()
    assert live.get() is first is live.fleet
    first.fork(resets(0, 1))
    live.wait_all(None, "reset_wait")
    live.drop()
    assert live.fleet is None and not live.inbox.copies and not first.alive(0)
    assert live.get() is not first


def test_what_others_finish_meanwhile_is_kept(live: LiveFleet) -> None:
    fleet = live.get()
    fleet.fork(resets(0, 1, 2))
    finished = live.wait_for([2])
    assert finished.copies == [2] and finished.infos == {2: {"seed": 2}}
    assert live.inbox.copies == {0, 1} and live.inbox.take([1]).infos == {1: {"seed": 1}}
    fleet.step_some([2], [np.zeros(1, np.int64)], [], bytes([ops.STEP]))
    live.wait_all(1.0, "step_wait")
    assert live.inbox.take([0, 2]).copies == [0, 2]


def test_a_copy_that_has_begun_nothing_is_not_waited_for_for_ever(live: LiveFleet) -> None:
    live.get().fork(resets(0))
    with pytest.raises(RuntimeError, match=r"\[1\]"):
        live.wait_for([0, 1])
    assert live.wait_for([0]).copies == [0]

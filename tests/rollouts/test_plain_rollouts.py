"""Rollouts in sandboxes of the plain provider: with room for some copies only, and where forks or set-ups fail."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

import prized_gym
from prized_gym import Prices, rollouts
from prized_gym.errors import SandboxError
from prized_gym.sandbox.driver import Sandbox, Shape
from zoo import plain_driver
from zoo import plain_variants as variants
from zoo.plain_driver import engine_of

pytestmark = pytest.mark.timeout(120)

WAYS: dict[str, dict[str, Any]] = {
    "policy": {"policy": lambda observation, info: 0},
    "command": {"command": "echo {seed}"},
    "request": {"request": "/health?{seed}", "reward": lambda answer: 1.0},
    "episode": {"episode": lambda copy, seed: float(copy.exec(f"echo {seed}").stdout)},
}


@contextmanager
def kept(provider: variants.Cramped) -> Iterator[prized_gym.Base]:
    """A base that cannot be set up a second time: its one machine has the room there is."""
    engine = engine_of(provider)
    id = prized_gym.Base("CartPole-v1", engine=engine, progress=False).keep()
    with prized_gym.Base.connect(id, engine=engine, progress=False) as base:
        yield base


@pytest.mark.parametrize("way", ["policy", "command", "episode"])
@pytest.mark.parametrize("room", [1, 2, 3])
def test_rollouts_go_on_with_the_copies_there_is_room_for(way: str, room: int) -> None:
    with kept(variants.Cramped(room)) as base:
        before = set(plain_driver.ALIVE)
        found = list(rollouts(base, range(9), copies=5, timeout=60, progress=False, **WAYS[way]))
        assert sorted(one.seed for one in found) == list(range(9))
        assert [one.failure for one in found] == [None] * 9
        assert {one.attempts for one in found} == {1}
        assert set(plain_driver.ALIVE) == before


@pytest.mark.parametrize("way", ["policy", "command"])
def test_without_any_room_every_rollout_says_so(way: str) -> None:
    with kept(variants.Cramped(0)) as base:
        found = list(rollouts(base, range(4), copies=2, timeout=60, progress=False, **WAYS[way]))
        assert sorted(one.seed for one in found) == list(range(4))
        for one in found:
            assert math.isnan(one.reward) and "room for 0 of" in (one.failure or "")


class Flaky(variants.Forkless):
    """Cannot fork, and cannot make the sandboxes of these numbers."""

    def __init__(self, *fails: int) -> None:
        super().__init__()
        self.fails = fails

    def create(self, shape: Shape, timeout: float) -> Sandbox:
        if self.created + 1 in self.fails:
            self.created += 1
            raise SandboxError("no such luck", happened="never ran")
        return super().create(shape, timeout)


@pytest.mark.parametrize("way", ["policy", "command"])
def test_one_copy_that_cannot_be_set_up_is_tried_again_and_its_cost_is_what_the_others_cost(way: str) -> None:
    # What never ran is asked once more, so two in a row.
    engine = engine_of(Flaky(3, 4))
    with prized_gym.Base("CartPole-v1", engine=engine, vcpu=1, memory_gb=1, progress=False) as base:
        prices = Prices(sandbox_hour=3600.0)
        options: dict[str, Any] = {"retries": 1, "prices": prices, "timeout": 60, "progress": False, **WAYS[way]}
        found = list(rollouts(base, range(4), copies=1, **options))
        assert [one.failure for one in found] == [None] * 4
        assert sorted(one.attempts for one in found) == [1, 1, 1, 2]
        for one in found:
            assert one.cost_usd == pytest.approx(one.seconds)


@pytest.mark.parametrize("way", ["policy", "command"])
def test_what_the_provider_bills_is_each_rollouts_cost(way: str) -> None:
    with prized_gym.Base("CartPole-v1", engine=engine_of(variants.Billing()), progress=False) as base:
        found = list(rollouts(base, range(3), copies=2, progress=False, **WAYS[way]))
        assert [one.cost_usd for one in found] == [1.0] * 3
    with prized_gym.Base("CartPole-v1", engine=engine_of(plain_driver.PlainDriver()), progress=False) as base:
        found = list(rollouts(base, range(3), copies=2, progress=False, **WAYS[way]))
        assert all(math.isnan(one.cost_usd) for one in found)

"""The user's own code around rollouts, reward functions and generators of seeds: slow, hanging, exiting."""

from __future__ import annotations

import asyncio
import math
import re
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

import prized_gym
from prized_gym import rollouts
from tools.sandboxes import ZOO
from zoo.plain_driver import engine_of
from zoo.plain_variants import Forkless

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(scope="module")
def base() -> Iterator[prized_gym.Base]:
    with prized_gym.Base(
        # Copies whose server is waited for.
        engine=engine_of(Forkless()),
        start=f"set -- --port 8000; {sys.executable} {ZOO / 'episode_server.py'} $2 threaded",
        ready="http://127.0.0.1:8000/health",
        progress=False,
    ) as base:
        yield base


WAYS: list[dict[str, Any]] = [
    {"command": "echo 1"},
    {"episode": lambda copy, seed: 1},
    {"request": "/rollout?seed={seed}"},
]


def hang(given: Any) -> float:
    time.sleep(50)
    return 1.0


def leave(given: Any) -> float:
    sys.exit(3)


def cancel(given: Any) -> float:
    raise asyncio.CancelledError


async def later(given: Any) -> float:
    await asyncio.sleep(0.01)
    return 2.5


@pytest.mark.parametrize("way", WAYS, ids=lambda way: next(iter(way)))
def test_a_reward_function_hangs_and_exits_by_itself(base: prized_gym.Base, way: Any) -> None:
    for reward, words in ((leave, "SystemExit: 3"), (cancel, "CancelledError"), (hang, "did not end within 2 s")):
        (one,) = rollouts(base, [1], 1, reward=reward, timeout=2.0, progress=False, **way)
        assert one.failure is not None and re.search(words, one.failure), one.failure
        assert math.isnan(one.reward)
    (one,) = rollouts(base, [1], 1, reward=later, timeout=20.0, progress=False, **way)
    assert (one.reward, one.failure) == (2.5, None)


def test_the_time_of_a_generator_of_seeds_is_none_of_the_copies() -> None:
    def seeds() -> Iterator[int]:
        yield from (0, 1)
        for seed in (2, 3):
            time.sleep(1.5)
            yield seed

    def policy(observation: Any, info: Any) -> int:
        # Of those that begin together one ends first: the other is under way while the next seed is waited for.
        return int(observation[2] > 0)

    with prized_gym.Base("CartPole-v1", engine="inline", progress=False) as base:
        found = list(rollouts(base, seeds(), 2, policy=policy, timeout=1.0, progress=False))
    assert sorted(each.seed for each in found) == [0, 1, 2, 3]
    assert [each.failure for each in found] == [None] * 4

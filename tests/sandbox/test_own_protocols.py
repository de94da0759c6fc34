"""Protocols of a user's own that do what none should: told as a copy's failure, and nothing else stops or hangs."""

from __future__ import annotations

import asyncio
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

import prized_gym
from prized_gym.interface.commands import STEP, Reset
from prized_gym.protocols import Protocol, Request, ServerDescription, StepAnswer
from tools.sandboxes import ZOO

pytestmark = pytest.mark.timeout(60)

SEEN = np.zeros(2, np.float32)


class Own(Protocol):
    """Does what the action says."""

    description = ServerDescription(spaces.Box(-1, 1, (2,), np.float32), spaces.Discrete(100))

    def reset(self, seed, options, *, fresh=None, base=False):
        yield from ()
        return SEEN, {}

    def step(self, action, *, then_reset=False):
        chosen = ACTS[int(action)]
        return self._given(chosen) if callable(chosen) else self._asked(chosen)

    def _given(self, act):
        yield from ()
        return act()

    def _asked(self, request):
        yield request
        return answer()


class Stubborn(Own):
    """Swallows the end of an operation, or exits in it."""

    def step(self, action, *, then_reset=False):
        try:
            yield Request("GET", "/hang")
        except GeneratorExit:
            if action:
                sys.exit(4)
            yield Request("GET", "/health")


class Blunt(Own):
    """Does not even begin."""

    def step(self, action, *, then_reset=False):
        raise asyncio.CancelledError if action else SystemExit(5)


def answer(**fields: Any) -> StepAnswer:
    return StepAnswer(**{"obs": SEEN, "reward": 1.0, "terminated": False, "truncated": False, "info": {}, **fields})


def throw(error: BaseException) -> Any:
    raise error


CASES: list[tuple[Any, str]] = [
    (lambda: throw(SystemExit(3)), "SystemExit: 3"),
    (lambda: throw(KeyboardInterrupt()), "KeyboardInterrupt"),
    (lambda: throw(asyncio.CancelledError()), "the operation was cancelled"),
    (lambda: throw(GeneratorExit()), "GeneratorExit"),
    (lambda: None, "returned None .*no StepAnswer"),
    (lambda: (SEEN, 1.0, False, False, {}), "no StepAnswer"),
    (lambda: answer(reward=None), "the reward None"),
    (lambda: answer(reward="1"), "the reward '1'"),
    (lambda: answer(reward=10**400), "the reward 1000"),
    (lambda: answer(reward=np.zeros(3)), "the reward array"),
    (lambda: answer(info=5), "the info 5"),
    (lambda: answer(info={5: 1}), "the info {5: 1}"),
    (lambda: answer(terminated="yes"), "terminated='yes'"),
    (lambda: answer(truncated=np.zeros(2, bool)), "truncated=array"),
    (lambda: answer(terminated=True, reset=5), "no pair of observation and info"),
    (lambda: answer(reset=(SEEN, {})), "does not end its episode"),
    (lambda: answer(obs=10**400), "does not fit its spaces"),
    (Request("GET", "/", body="text"), "body is 'text'"),  # type: ignore[arg-type]
    (Request("GET", None), "path is None"),  # type: ignore[arg-type]
    (Request("GET", "/", headers={"a": [1]}), "headers have"),  # type: ignore[dict-item]
    (Request("GET", "/", timeout=float("nan")), "timeout is nan"),
]
ACTS = [act for act, _ in CASES]


def made(protocol: Protocol) -> prized_gym.Base:
    return prized_gym.Base(
        engine="plain",
        start=f"{sys.executable} {ZOO / 'bad_server.py'} --port 8000",
        ready="http://127.0.0.1:8000/health",
        protocol=protocol,
        progress=False,
    )


def test_whatever_a_step_does_is_the_failure_of_its_copy() -> None:
    with made(Own()) as base:
        fleet = base.fleet(1)
        fleet.fork({0: Reset(0)})
        assert not fleet.wait().failures
        for number, (_, words) in enumerate(CASES):
            fleet.step([np.array([number])], [], bytes([STEP]))
            finished = fleet.wait(timeout=20.0)
            assert finished.copies == [0], words
            assert re.search(words, finished.failures[0].describe()), words
        fleet.command({0: Reset(1)})
        assert not fleet.wait().failures


@pytest.mark.parametrize("protocol", [Stubborn, Blunt])
def test_ends_that_are_swallowed_and_beginnings_that_fail(protocol: type[Protocol], tmp_path: Path) -> None:
    with made(protocol()) as base:
        envs = prized_gym.ForkedVectorEnv(base, num_envs=2, step_timeout=1.0, progress=False)
        try:
            for actions in ([0, 0], [1, 1]):
                envs.reset(seed=0)
                with pytest.raises(prized_gym.PrizedGymError, match="copy 0"):
                    envs.step(actions)
            assert envs.reset(seed=0)[0].shape == (2, 2)
        finally:
            envs.close()

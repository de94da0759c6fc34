"""Who closes a base: the last who leased it, once, and never one who was only shown it."""

from __future__ import annotations

import contextlib

import gymnasium as gym
import numpy as np
import pytest

from prized_gym import Base, ForkedVectorEnv
from prized_gym.sharing import SharedBases, find_base


def test_a_lease_is_given_back_once() -> None:
    shared, spec = SharedBases(), gym.spec("CartPole-v1")
    options = {"engine": "inline"}
    first, second = shared.acquire(spec, options, False), shared.acquire(spec, options, False)
    assert first.base is second.base
    for _ in range(3):
        first.release()
    assert second.base.alive
    second.release()
    assert second.base.closed
    second.release()
    third = shared.acquire(spec, options, False)
    assert third.base is not first.base and third.base.alive
    first.release()
    second.release()
    assert third.base.alive
    third.release()
    assert third.base.closed


def test_a_base_that_was_passed_is_never_closed_whoever_shares_it() -> None:
    train = ForkedVectorEnv("CartPole-v1", num_envs=1, engine="inline")
    test = ForkedVectorEnv(train.base, num_envs=1)
    test.close()
    assert train.base.alive and train.reset(seed=0)[0].shape == (1, 4)
    own = Base("CartPole-v1", engine="inline")
    lease = find_base(own, None, False, {})
    lease.release()
    assert lease.base is own and own.alive
    own.close()
    train.close()
    assert train.base.closed


def test_an_interrupted_release_is_completed_and_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    shared, spec = SharedBases(), gym.spec("CartPole-v1")
    options = {"engine": "inline"}
    one, other = (shared.acquire(spec, options, False) for _ in range(2))
    real = Base.close

    def interrupted(self: Base) -> None:
        monkeypatch.setattr(Base, "close", real)
        raise KeyboardInterrupt

    monkeypatch.setattr(Base, "close", interrupted)
    one.release()
    one.release()
    assert other.base.alive
    with pytest.raises(KeyboardInterrupt):
        other.release()
    assert not other.base.closed
    other.release()
    assert other.base.closed


def test_closing_twice_after_an_interrupt_releases_once(monkeypatch: pytest.MonkeyPatch) -> None:
    a = ForkedVectorEnv("CartPole-v1", num_envs=1, engine="inline")
    b = ForkedVectorEnv("CartPole-v1", num_envs=1, engine="inline")
    assert a.base is b.base
    for _ in range(2):
        with contextlib.suppress(Exception):
            a.close_extras()
    a.close()
    assert b.base.alive and b.reset(seed=0)[0].shape == (1, 4)
    b.close()
    assert b.base.closed


def test_a_lease_that_nobody_holds_is_given_back() -> None:
    shared, spec = SharedBases(), gym.spec("CartPole-v1")
    base = shared.acquire(spec, {"engine": "inline"}, False).base
    assert base.closed
    held = shared.acquire(spec, {"engine": "inline"}, False)
    shared.acquire(spec, {"engine": "inline"}, False)
    assert held.base.alive
    held.release()


class Counting(gym.Env):  # type: ignore[type-arg]
    """Tells how often it was reset."""

    observation_space = gym.spaces.Box(0, 9, (1,))
    action_space = gym.spaces.Discrete(2)
    resets = 0

    def reset(self, *, seed=None, options=None):  # type: ignore[no-untyped-def]
        super().reset(seed=seed)
        self.resets += 1
        return np.array([self.resets], np.float32), {}


@pytest.mark.parametrize("engine", ["local", "inline"])
def test_a_base_that_is_reset_is_not_shared_with_those_that_want_it_as_it_was(engine: str) -> None:
    gym.register("Counting-v0", Counting)
    try:
        plain = ForkedVectorEnv("Counting-v0", 1, engine=engine, progress=False)
        from_base = ForkedVectorEnv("Counting-v0", 1, engine=engine, reset_in="base", progress=False)
        for _ in range(2):
            assert from_base.reset()[0].tolist() == [[1.0]]
            assert plain.reset(seed=0)[0].tolist() == [[1.0]]
        plain.close()
        from_base.close()
    finally:
        del gym.registry["Counting-v0"]

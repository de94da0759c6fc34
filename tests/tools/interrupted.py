"""A program whose calls are interrupted at random moments; after each, a reset must bring the right values back.

Run as ``python interrupted.py KIND COUNT SEED``: a process of its own, since an interrupt may come while the interpreter can
only print it, in a destructor. Prints "back" if all went well; ends with every stack if something takes for ever.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

import prized_gym
from tools.comparing import assert_same

PATIENCE = 60.0
"""Seconds after which a call that comes back after some milliseconds hangs."""


class Drawing(gym.Env[Any, Any]):
    """Draws every observation, counts its steps, and gives infos large enough to travel by socket now and then."""

    observation_space = gym.spaces.Dict(
        {"drawn": gym.spaces.Box(0, 1, (300,), np.float64), "count": gym.spaces.Box(-1, 99, (), np.int64)}
    )
    action_space = gym.spaces.Discrete(2)
    weight = 1

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.count = 0
        return self.observe()

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.count += 1
        observation, info = self.observe()
        return observation, float(action), self.count == 7, False, info

    def observe(self) -> tuple[Any, dict[str, Any]]:
        observation = {"count": np.array(self.count, np.int64), "drawn": self.np_random.random(300)}
        return observation, {"large": np.zeros(4000)} if self.count % 3 == 1 else {"small": self.count}

    def large(self, argument: Any = None) -> np.ndarray[Any, Any]:
        return np.ones(40_000)


class Late(Exception):
    """What a handler of the user's own may raise: no KeyboardInterrupt."""


def vector(**options: Any) -> gym.vector.VectorEnv[Any, Any, Any]:
    return prized_gym.ForkedVectorEnv(Drawing, num_envs=3, progress=False, **options)


def use(envs: Any) -> None:
    """What is interrupted: every operation, over and over."""
    while True:
        envs.reset(seed=0)
        for _ in range(8):
            envs.step([0, 1, 0])
        envs.send([1, 0], [0, 2])
        if len(envs.recv()[-1]) == 1:
            envs.recv()
        envs.call("large", np.zeros(30_000))
        envs.set_attr("weight", [np.zeros(30_000), 2, 3])
        envs.get_attr("weight")
        envs.reset(options={"reset_mask": np.array([True, False, True])})
        envs.call_async("large")
        envs.call_wait()
        if envs.core.fleet.carries_random_state and envs.base.engine == "local":
            envs.branch(0, [1])
        envs.step_async([0, 0, 0])
        envs.step_wait()
        envs.reset()


def check(envs: Any, seed: int) -> None:
    """A seeded reset is what it is anywhere else, whatever came before."""
    reference = gym.vector.SyncVectorEnv([Drawing] * 3)
    assert_same(envs.reset(seed=seed), reference.reset(seed=seed))
    for number in range(3):
        actions = np.array([number % 2, 1, 0])
        assert_same(envs.step(actions), reference.step(actions))
    assert list(envs.call("large")[2][:2]) == [1, 1]


def use_sb3(envs: Any) -> None:
    while True:
        envs.seed(0)
        envs.reset()
        for _ in range(8):
            envs.step(np.array([0, 1, 0]))
        envs.env_method("large", np.zeros(30_000))
        envs.set_attr("weight", np.zeros(30_000))
        envs.get_attr("weight")
        envs.env_is_wrapped(gym.Wrapper)
        envs.step_async(np.array([0, 1, 0]))
        envs.step_wait()
        envs.reset()


def check_sb3(envs: Any, seed: int) -> None:
    reference = gym.vector.SyncVectorEnv([Drawing] * 3)
    expected, _ = reference.reset(seed=seed)
    envs.seed(seed)
    assert_same(dict(envs.reset()), dict(expected))
    for _ in range(3):
        observations, rewards, _, _ = envs.step(np.array([1, 1, 0]))
        expected, paid, *_ = reference.step(np.array([1, 1, 0]))
        assert_same(dict(observations), dict(expected))
        assert rewards.tolist() == paid.tolist()


def use_one(env: Any) -> None:
    while True:
        env.reset(seed=0)
        for _ in range(7):
            env.step(0)
        env.call("large", np.zeros(30_000))
        env.get_wrapper_attr("weight")
        env.reset()


def check_one(env: Any, seed: int) -> None:
    reference = Drawing()
    assert_same(env.reset(seed=seed)[0]["drawn"], reference.reset(seed=seed)[0]["drawn"])
    assert_same(env.step(1)[0]["drawn"], reference.step(1)[0]["drawn"])


def make_sb3() -> Any:
    from prized_gym.integrations.sb3 import ForkedVecEnv

    return ForkedVecEnv(Drawing, 3, progress=False)


Kind = tuple[Callable[[], Any], Callable[[Any], None], Callable[[Any, int], None], type[BaseException]]

KINDS: dict[str, Kind] = {
    "local": (vector, use, check, KeyboardInterrupt),
    "late": (vector, use, check, Late),
    "start": (lambda: vector(fork_on="start"), use, check, KeyboardInterrupt),
    "throttled": (lambda: vector(max_concurrent=2), use, check, KeyboardInterrupt),
    "truncate": (
        lambda: vector(on_failure="truncate", autoreset_mode="SameStep", fork_on="episode", step_timeout=30.0),
        use,
        lambda envs, seed: None,
        KeyboardInterrupt,
    ),
    "inline": (lambda: vector(engine="inline"), use, check, KeyboardInterrupt),
    "sb3": (make_sb3, use_sb3, check_sb3, KeyboardInterrupt),
    "one": (lambda: prized_gym.ForkedEnv(Drawing, progress=False), use_one, check_one, KeyboardInterrupt),
}


def main(name: str, count: int, seed: int) -> None:
    make, work, right, error = KINDS[name]

    def interrupt(*_: Any) -> None:
        raise error

    def interrupted(function: Callable[..., object], *arguments: Any, within: float) -> None:
        try:
            signal.setitimer(signal.ITIMER_REAL, float(rng.uniform(0.0002, within)))
            function(*arguments)
        except error:
            pass
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)

    signal.signal(signal.SIGALRM, interrupt)
    rng = np.random.default_rng(seed)
    envs = make()
    right(envs, 1)
    open_before = len(os.listdir("/proc/self/fd"))
    for number in range(count):
        faulthandler.dump_traceback_later(PATIENCE, exit=True)
        interrupted(work, envs, within=0.06)
        right(envs, number)
        if number % 10 == 9:
            interrupted(work, envs, within=0.03)
            # In the middle of close() too, and closed again.
            interrupted(envs.close, within=0.01)
            envs.close()
            envs = make()
            right(envs, number)
    right(envs, 5)
    left = len(os.listdir("/proc/self/fd")) - open_before
    assert left < 10 + count // 5, f"{left} descriptors were left open"
    envs.close()
    faulthandler.cancel_dump_traceback_later()
    print("back")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))

"""Forking and stepping whole sandboxes under gVisor: time to the first answer of 8 copies, and the cost of a step.

The base holds 50 MB. A reset is timed from the call to the last copy's first observation, fork included; a step of one copy
is timed over both channels, with an environment that does nothing, and an observation of 32 bytes or of 1 MB.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import gymnasium as gym
import numpy as np

from bench.machine import describe, table
from prized_gym.base import Base
from prized_gym.vector.forked_vector_env import ForkedVectorEnv


class Held(gym.Env[Any, Any]):
    """Holds ``megabytes`` of numbers, shows the first ``shown`` and does nothing."""

    action_space = gym.spaces.Discrete(2)

    def __init__(self, megabytes: int = 50, shown: int = 4) -> None:
        self.observation_space = gym.spaces.Box(-np.inf, np.inf, (shown,), np.float64)
        self._table = np.random.default_rng(0).random(megabytes * 125_000)
        self._shown = self._table[:shown]

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        return self._shown, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return self._shown, 0.0, False, False, {}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark."""
    parser.add_argument("--copies", type=int, default=8, help="number of copies (default: 8)")
    parser.add_argument("--megabytes", type=int, default=50, help="size of the base (default: 50)")
    parser.add_argument("--repeats", type=int, default=5, help="resets (default: 5)")
    parser.add_argument("--steps", type=int, default=200, help="steps per channel (default: 200)")


def run(options: argparse.Namespace) -> None:
    """Measure and print."""
    print(describe())
    rows = []
    started = time.perf_counter()
    with Base(Held, engine="gvisor", env_kwargs={"megabytes": options.megabytes}) as base:
        rows.append(["setting the base up", f"{time.perf_counter() - started:.2f} s"])
        resets = _resets(base, options.copies, options.repeats)
        rows.append([f"{options.copies} copies, fork to first observation", _spread(resets, 1.0, "s")])
        rows.append(["one copy, fork to first observation", _spread(_resets(base, 1, options.repeats), 1.0, "s")])
    for channel in ("http", "exec"):
        for size, shown in (("32 bytes", 4), ("1 MB", 125_000)):
            kwargs = {"megabytes": 1, "shown": shown}
            with Base(Held, engine="gvisor", env_kwargs=kwargs, channel=channel) as base:
                steps = _spread(_steps(base, options.steps), 1000.0, "ms")
            rows.append([f"a step of one copy that shows {size}, {channel}", steps])
    print(table(["what", "median (least-greatest)"], rows))


def _resets(base: Base, copies: int, repeats: int) -> list[float]:
    times = []
    envs = ForkedVectorEnv(base, num_envs=copies)
    try:
        for seed in range(repeats):
            started = time.perf_counter()
            envs.reset(seed=seed)
            times.append(time.perf_counter() - started)
    finally:
        envs.close()
    return times


def _steps(base: Base, count: int) -> list[float]:
    times = []
    envs = ForkedVectorEnv(base, num_envs=1)
    try:
        envs.reset(seed=0)
        for _ in range(count):
            started = time.perf_counter()
            envs.step([0])
            times.append(time.perf_counter() - started)
    finally:
        envs.close()
    return times


def _spread(times: list[float], factor: float, unit: str) -> str:
    return f"{np.median(times) * factor:.2f} {unit} ({min(times) * factor:.2f}-{max(times) * factor:.2f})"

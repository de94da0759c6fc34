"""Forking a base: the first and later resets of 8 copies of a base that holds gigabytes.

A reset is timed from the call to the last copy's first observation, so it holds the forks, the random state and
``env.reset``. Building the environment anew is timed beside it.
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


class Large(gym.Env[Any, Any]):
    """Holds a table of ``gigabytes`` of numbers."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (4,), np.float64)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, gigabytes: float = 2.0) -> None:
        self._table = np.ones(round(gigabytes * 1e9 / 8))

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        return np.zeros(4), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return np.zeros(4), 0.0, False, False, {}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark."""
    parser.add_argument("--copies", type=int, default=8, help="number of copies (default: 8)")
    parser.add_argument(
        "--gigabytes", type=float, nargs="+", default=[0.0, 2.0], help="sizes of the base (default: 0 2)"
    )
    parser.add_argument("--repeats", type=int, default=20, help="later resets (default: 20)")


def run(options: argparse.Namespace) -> None:
    """Measure and print."""
    print(describe())
    rows = []
    for gigabytes in options.gigabytes:
        build, first, later = measure(gigabytes, options.copies, options.repeats)
        rows.append(
            [
                f"{gigabytes:g} GB",
                str(options.copies),
                f"{build:.2f} s",
                f"{first * 1000:.1f} ms",
                f"{np.median(later) * 1000:.1f} ms ({min(later) * 1000:.1f}-{max(later) * 1000:.1f})",
                f"{options.copies * build / np.median(later):.0f}x",
            ]
        )
    header = ["base", "copies", "building it once", "first reset", "each later reset", "building it per copy takes"]
    print(table(header, rows))
    print(f"Later resets: median of {options.repeats} (least-greatest). The first one also settles the base's pages.")


def measure(gigabytes: float, copies: int, repeats: int) -> tuple[float, float, list[float]]:
    """Seconds for building the base, for the first reset, and for each later one."""
    with Base(Large, env_kwargs={"gigabytes": gigabytes}) as base:
        envs = ForkedVectorEnv(base, num_envs=copies)
        times = []
        try:
            for seed in range(repeats + 1):
                started = time.perf_counter()
                envs.reset(seed=seed)
                times.append(time.perf_counter() - started)
                envs.step(np.zeros(copies, np.int64))
        finally:
            envs.close()
        return base.setup_seconds, times[0], times[1:]

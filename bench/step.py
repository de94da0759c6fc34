"""Stepping a batch: ForkedVectorEnv against Gymnasium's AsyncVectorEnv and SyncVectorEnv.

CartPole-v1, whose step costs a few microseconds, and an environment that returns 84x84x4 frames; in each repeat every
vector environment takes its turn, and the ratios are taken repeat by repeat.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv

from bench.machine import describe, table
from prized_gym.vector.forked_vector_env import ForkedVectorEnv


class Frames(gym.Env[Any, Any]):
    """Returns a frame of 84x84x4 bytes and does nothing else."""

    observation_space = gym.spaces.Box(0, 255, (84, 84, 4), np.uint8)
    action_space = gym.spaces.Discrete(4)

    def __init__(self) -> None:
        self._frame = np.random.default_rng(0).integers(0, 256, (84, 84, 4), np.uint8)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        return self._frame, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return self._frame, 0.0, False, False, {}


def _cartpole() -> gym.Env[Any, Any]:
    return gym.make("CartPole-v1")


ENVIRONMENTS: dict[str, Callable[[], gym.Env[Any, Any]]] = {"CartPole-v1": _cartpole, "84x84x4 frames": Frames}
KINDS: dict[str, Callable[[list[Callable[[], Any]]], gym.vector.VectorEnv[Any, Any, Any]]] = {
    "Forked": ForkedVectorEnv,
    "Async": AsyncVectorEnv,
    "Sync": SyncVectorEnv,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark."""
    parser.add_argument("--copies", type=int, nargs="+", default=[8, 64], help="numbers of copies (default: 8 64)")
    parser.add_argument("--repeats", type=int, default=7, help="interleaved repeats (default: 7)")
    parser.add_argument("--seconds", type=float, default=0.5, help="seconds per turn (default: 0.5)")


def run(options: argparse.Namespace) -> None:
    """Measure and print."""
    print(describe())
    rows = []
    for name, make in ENVIRONMENTS.items():
        for copies in options.copies:
            rates = measure(make, copies, options.repeats, options.seconds)
            rows.append(
                [
                    name,
                    str(copies),
                    *(f"{np.median(rates[kind]) / 1000:.1f}" for kind in KINDS),
                    *(_ratio(rates["Forked"], rates[other]) for other in ("Async", "Sync")),
                ]
            )
    header = ["environment", "copies", *(f"{kind}, k steps/s" for kind in KINDS), "x Async", "x Sync"]
    print(table(header, rows))
    print(
        f"Medians of {options.repeats} interleaved repeats; in brackets the least and the greatest ratio of a repeat."
    )


def measure(make: Callable[[], gym.Env[Any, Any]], copies: int, repeats: int, seconds: float) -> dict[str, list[float]]:
    """Environment steps per second of each kind of vector environment, one figure per repeat."""
    actions = np.random.default_rng(0).integers(0, 2, (64, copies))
    made = {kind: build([make] * copies) for kind, build in KINDS.items()}
    rates: dict[str, list[float]] = {kind: [] for kind in KINDS}
    try:
        for envs in made.values():
            envs.reset(seed=0)
            _steps(envs, actions, seconds / 5)
        for repeat in range(repeats):
            # Whoever goes first meets another state of the machine than whoever goes last.
            order = list(made) if repeat % 2 else list(reversed(made))
            for kind in order:
                rates[kind].append(copies * _steps(made[kind], actions, seconds))
    finally:
        for envs in made.values():
            envs.close()
    return rates


def _steps(envs: gym.vector.VectorEnv[Any, Any, Any], actions: Any, seconds: float) -> float:
    """Batch steps per second."""
    count, started = 0, time.perf_counter()
    while (passed := time.perf_counter() - started) < seconds:
        envs.step(actions[count % len(actions)])
        count += 1
    return count / passed


def _ratio(ours: list[float], theirs: list[float]) -> str:
    ratios = np.array(ours) / np.array(theirs)
    return f"{np.median(ratios):.2f} ({ratios.min():.2f}-{ratios.max():.2f})"

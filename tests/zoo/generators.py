"""Environments whose every answer is drawn from random state that a fork carries over."""

from __future__ import annotations

import collections
import functools
import random
from collections.abc import Iterator
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces


class ManyGenerators(gym.Env[Any, Any]):
    """One draw of every generator that an environment can hold, as its observation."""

    observation_space = spaces.Box(0, 1, (8,), np.float64)
    action_space = spaces.Discrete(2)

    def __init__(self) -> None:
        self.generator = np.random.default_rng(0)
        self.legacy = np.random.RandomState(0)
        self.python = random.Random(0)
        self.listed = [np.random.default_rng(1)]
        self.box = spaces.Box(0, 1, (), np.float64, seed=0)

    def draws(self) -> list[float]:
        return [
            random.random(),
            float(np.random.random()),
            float(self.np_random.random()),
            float(self.generator.random()),
            float(self.legacy.random_sample()),
            self.python.random(),
            float(self.listed[0].random()),
            float(self.box.sample()),
        ]

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        return np.array(self.draws()), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return np.array(self.draws()), 0.0, False, False, {}


class Draws(gym.Env[Any, Any]):
    """Rewards drawn from Python's, NumPy's and torch's global generators."""

    observation_space = spaces.Box(0, 1, (3,), np.float64)
    action_space = spaces.Discrete(2)

    def __init__(self) -> None:
        import torch

        self.torch = torch
        self.model = torch.nn.Linear(3, 1)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        return self._draw(), {}

    def _draw(self) -> Any:
        return np.array([random.random(), np.random.random(), float(self.torch.rand(()))])

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        observation = self._draw()
        return observation, float(observation.sum() + self.np_random.random()), False, False, {}


IN_MODULE = np.random.default_rng(11)


class _Slotted:
    __slots__ = ("rng",)

    def __init__(self) -> None:
        self.rng = np.random.default_rng(0)


def _draw_for_ever(rng: random.Random) -> Iterator[float]:
    while True:
        yield rng.random()


class HiddenGenerators(gym.Env[Any, Any]):
    """One draw of each of many equal generators, none of which is an attribute of the environment or in a list of it.

    Those of a class and of a module come last; what is made in the first reset comes before them.
    """

    in_class = np.random.default_rng(10)
    observation_space = spaces.Box(0, 1, (16,), np.float64)
    action_space = spaces.Discrete(2)

    def __init__(self) -> None:
        self.slotted = _Slotted()
        self.queue = collections.deque([np.random.default_rng(1)])
        self.method = np.random.default_rng(2).random
        self.partial = functools.partial(np.random.RandomState(3).random_sample)
        hidden = random.Random(4)
        self.closure = lambda: hidden.random()
        self.running = _draw_for_ever(random.Random(5))
        next(self.running)
        self.agents = np.array([_Slotted(), None], object)
        self.philox = {"a": {"b": np.random.Generator(np.random.Philox(6))}}
        self.legacy = ((np.random.RandomState(np.random.Philox(7)),),)
        self.parent = _Slotted()
        self.sequence = {"s": [np.random.SeedSequence(8)]}
        self.bits = {"s": [np.random.SFC64(9)]}
        self.deep = [[[[[[random.Random(9)]]]]]]
        self.late: Any = None

    def draws(self) -> list[float]:
        if self.late is None:
            self.late = [_Slotted(), {"x": {"y": random.Random(12)}}]
        return [
            self.slotted.rng.random(),
            self.queue[0].random(),
            self.method(),
            float(self.partial()),
            self.closure(),
            next(self.running),
            self.agents[0].rng.random(),
            self.philox["a"]["b"].random(),
            float(self.legacy[0][0].random_sample()),
            self.parent.rng.spawn(1)[0].random(),
            np.random.default_rng(self.sequence["s"][0].spawn(1)[0]).random(),
            float(self.bits["s"][0].random_raw() / 2**64),
            self.deep[0][0][0][0][0][0].random(),
            *self.late_draws(),
            self.in_class.random() / 2 + IN_MODULE.random() / 2,
        ]

    def late_draws(self) -> list[float]:
        return [self.late[0].rng.random(), self.late[1]["x"]["y"].random()]

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        return np.array(self.draws()), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return np.array(self.draws()), 0.0, False, False, {}

"""Environments whose every answer is drawn from random state that a fork carries over."""

from __future__ import annotations

import random
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

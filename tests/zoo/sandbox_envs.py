"""Environments and servers that hold what a fork must carry over."""

from __future__ import annotations

import random
from typing import Any

import gymnasium as gym
import helper_of_envs
import numpy as np
from gymnasium import spaces


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


class Neighbour(gym.Env[Any, Any]):
    """Needs a module that lies beside this one."""

    observation_space = spaces.Discrete(100)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        return helper_of_envs.ANSWER, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return helper_of_envs.ANSWER, 1.0, False, False, {}


def make_neighbour() -> gym.Env[Any, Any]:
    """For ``"sandbox_envs:make_neighbour"``."""
    return Neighbour()

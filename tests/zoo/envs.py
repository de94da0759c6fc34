"""Environments that hold still to be looked at."""

from __future__ import annotations

import copy
import os
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from zoo.spaces import SPACES


class SpaceEnv(gym.Env[Any, Any]):
    """Draws observations, rewards, ends and infos from ``np_random``; echoes the action in its info."""

    metadata = {"render_modes": ["rgb_array"], "kind": "space"}

    def __init__(self, space: str = "box", action: str | None = None, render_mode: str | None = None) -> None:
        self.observation_space = copy.deepcopy(SPACES[space])
        self.action_space = copy.deepcopy(SPACES[action or space])
        self.render_mode = render_mode
        self.steps = 0

    def _observe(self) -> Any:
        self.observation_space.seed(int(self.np_random.integers(2**31)))
        return self.observation_space.sample()

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.steps = 0
        info: dict[str, Any] = {"options": str(options)}
        if self.np_random.random() < 0.5:
            info["start"] = float(self.np_random.random())
        return self._observe(), info

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.steps += 1
        draw = self.np_random.random()
        info: dict[str, Any] = {}
        if draw < 0.7:
            info = {
                "steps": self.steps,
                "draw": draw,
                "action": repr(action),
                "vector": self.np_random.random(2),
                "nested": {"flag": bool(draw < 0.3), "name": "x" * self.steps},
            }
        return self._observe(), float(draw - 0.5), bool(draw > 0.9), bool(self.steps >= 12), info

    def render(self) -> Any:
        return np.full((2, 2, 3), self.steps, np.uint8)


class Loaded(gym.Env[Any, Any]):
    """An environment with something loaded: a table, and a count of how often it was built in this process tree."""

    observation_space = spaces.Box(-np.inf, np.inf, (4,), np.float64)
    action_space = spaces.Discrete(2)

    def __init__(self, log: str | None = None, size: int = 1000) -> None:
        self.table = np.arange(size, dtype=np.float64)
        self.secret = os.urandom(8).hex()
        self.log = log
        self.value = 0
        self.warm = False
        if log is not None:
            with open(log, "a") as file:
                file.write("built\n")

    def load(self) -> None:
        self.warm = True

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        return np.array([self.value, self.table[-1], 0.0, 0.0]), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.value += int(action)
        self.table[0] += int(action)
        return np.array([self.value, self.table[0], 0.0, 0.0]), 1.0, False, False, {}

    def pid(self) -> int:
        return os.getpid()

    def add(self, amount: int) -> int:
        self.value += amount
        return self.value


def make_loaded() -> gym.Env[Any, Any]:
    """For ``"zoo.envs:make_loaded"``."""
    return Loaded()

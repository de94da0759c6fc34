"""Environments to train on. Nothing heavy is imported here: every base imports this module."""

from __future__ import annotations

import os
import threading
import time
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.envs.classic_control.cartpole import CartPoleEnv


class Walk(gym.Env[Any, Any]):
    """A walk on a line: ends at the edge, or is cut short after ``limit`` steps; draws only from ``np_random``."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}

    def __init__(
        self,
        kind: str = "box",
        action: str = "discrete",
        limit: int = 12,
        edge: int = 6,
        thrifty: bool = False,
        render_mode: str | None = None,
    ) -> None:
        position = spaces.Box(-9, 9, (2,), np.float32)
        image = spaces.Box(0, 255, (36, 36, 1), np.uint8)
        self.observation_space = {
            "box": position,
            "discrete": spaces.Discrete(19),
            "image": image,
            "dict": spaces.Dict({"position": position, "image": image}),
            "tuple": spaces.Tuple([position, spaces.Discrete(19)]),
        }[kind]
        self.action_space = {
            "discrete": spaces.Discrete(2),
            "box": spaces.Box(-1, 1, (1,), np.float32),
            "multibinary": spaces.MultiBinary(2),
            "multidiscrete": spaces.MultiDiscrete([2, 3]),
            "dict": spaces.Dict({"a": spaces.Discrete(2), "b": spaces.Box(-1, 1, (2,), np.float32)}),
            "tuple": spaces.Tuple([spaces.Discrete(2), spaces.Box(-1, 1, (2,), np.float32)]),
        }[action]
        self.kind, self.limit, self.edge, self.render_mode = kind, limit, edge, render_mode
        self.options: dict[str, Any] | None = None
        self.lock = threading.Lock()
        self.weight = 1.0
        # A thrifty environment has one buffer for every observation.
        self._buffer = np.zeros(2, dtype=np.float32) if thrifty else None

    def scale(self, factor: float = 1.0, *, plus: float = 0.0) -> float:
        return self.weight * factor + plus

    def pid(self) -> int:
        return os.getpid()

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.options = options
        self.place, self.steps, self.action = int(self.np_random.integers(-2, 3)), 0, None
        return self._observe(), {"start": self.place}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.action = action
        self.steps += 1
        first = (
            action["a"] if isinstance(action, dict) else np.asarray(action[0] if isinstance(action, tuple) else action)
        )
        push = 1 if float(np.asarray(first).ravel()[0]) > 0.5 else -1
        self.place = int(np.clip(self.place + push + self.np_random.integers(-1, 2), -9, 9))
        return (
            self._observe(),
            -abs(self.place) * 0.1 + 1 / 3,
            abs(self.place) >= self.edge,
            self.steps >= self.limit,
            {"place": self.place, "trail": np.array([self.place, self.steps])},
        )

    def _observe(self) -> Any:
        position = np.zeros(2, dtype=np.float32) if self._buffer is None else self._buffer
        position[:] = self.place, self.steps / 100
        if self.kind == "box":
            return position
        if self.kind == "discrete":
            return self.place + 9
        if self.kind == "tuple":
            return position, self.place + 9
        image = np.zeros((36, 36, 1), np.uint8)
        image[:, 18 + self.place] = 255
        return image if self.kind == "image" else {"position": position, "image": image}

    def render(self) -> Any:
        frame = np.zeros((16, 32, 3), np.uint8)
        frame[:, 16 + getattr(self, "place", 0)] = 255
        return frame


class Cart(CartPoleEnv):
    """CartPole that can be asked which process it lives in."""

    def pid(self) -> int:
        return os.getpid()


class Slow(Walk):
    """A walk whose steps take a while."""

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        time.sleep(0.02)
        return super().step(action)


class Loud(gym.Wrapper[Any, Any, Any, Any]):
    """A wrapper to ask for."""

    volume = 3


class Louder(Loud):
    """A subclass of it."""


def cart() -> gym.Env[Any, Any]:
    return gym.wrappers.TimeLimit(Cart(), 500)


def bare_walk() -> gym.Env[Any, Any]:
    return Walk()


def loud_walk() -> gym.Env[Any, Any]:
    return Loud(Walk())


def louder_walk() -> gym.Env[Any, Any]:
    return Louder(Walk())

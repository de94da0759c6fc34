"""Every way to misbehave, in an environment."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces


class Faulty(gym.Env[Any, Any]):
    """Does what its action says, in the copy: 0 is an ordinary step."""

    observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float64)
    action_space = spaces.Discrete(12)
    STEP, KILL, SEGFAULT, RAISE, EXIT, HANG, BAD_SHAPE, END, OS_EXIT, PRINT, HANG_IN_C, BAD_DTYPE = range(12)

    def __init__(self, bad_reset: str | None = None, episode: int = 1000) -> None:
        self.bad_reset = bad_reset
        self.episode = episode
        self.count = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.count = 0
        bad = (options or {}).get("bad", self.bad_reset)
        if bad == "raise":
            raise RuntimeError("no reset today")
        if bad == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if bad == "hang":
            time.sleep(1000)
        return np.array([0.0, float(seed or 0)]), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.count += 1
        observation = np.array([float(self.count), 1.0])
        if action == self.KILL:
            os.kill(os.getpid(), signal.SIGKILL)
        elif action == self.SEGFAULT:
            ctypes.string_at(0)
        elif action == self.RAISE:
            raise ZeroDivisionError("the env divided by zero")
        elif action == self.EXIT:
            sys.exit(3)
        elif action == self.HANG:
            self.hang_here()
        elif action == self.BAD_SHAPE:
            observation = np.zeros(3)
        elif action == self.BAD_DTYPE:
            observation = np.array([1j, 2j])  # type: ignore[assignment]
        elif action == self.OS_EXIT:
            print("last words", file=sys.stderr, flush=True)
            os._exit(7)
        elif action == self.PRINT:
            print("hello from the copy", flush=True)
        elif action == self.HANG_IN_C:
            ctypes.PyDLL(None).sleep(1000)
        return observation, 1.0, action == self.END, self.count >= self.episode, {}

    def hang_here(self) -> None:
        time.sleep(1000)


def not_an_env() -> object:
    return object()

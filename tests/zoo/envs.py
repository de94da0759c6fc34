"""Environments for the tests: every space, and every way to misbehave."""

from __future__ import annotations

import ctypes
import os
import random
import signal
import sys
import time
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

SPACES: dict[str, gym.Space[Any]] = {
    "box": spaces.Box(-1, 1, (3,), np.float32),
    "box_scalar": spaces.Box(-1, 1, (), np.float64),
    "box_image": spaces.Box(0, 255, (8, 8, 3), np.uint8),
    "box_int64": spaces.Box(-5, 5, (2, 2), np.int64),
    "box_float16": spaces.Box(-1, 1, (2,), np.float16),
    "box_bool": spaces.Box(0, 1, (4,), np.bool_),
    "box_unbounded": spaces.Box(-np.inf, np.inf, (2,), np.float64),
    "box_empty": spaces.Box(-1, 1, (0,), np.float32),
    "discrete": spaces.Discrete(5),
    "discrete_start": spaces.Discrete(4, start=-2),
    "multidiscrete": spaces.MultiDiscrete([3, 4, 2]),
    "multidiscrete_2d": spaces.MultiDiscrete(np.array([[2, 3], [4, 5]]), start=np.array([[1, 0], [-1, 2]])),
    "multibinary": spaces.MultiBinary(4),
    "multibinary_2d": spaces.MultiBinary((2, 3)),
    "text": spaces.Text(6),
    "oneof": spaces.OneOf([spaces.Discrete(3), spaces.Box(-1, 1, (2,), np.float32)]),
    "graph": spaces.Graph(spaces.Box(-1, 1, (2,), np.float32), spaces.Discrete(3)),
    "sequence": spaces.Sequence(spaces.Discrete(4)),
    "sequence_stacked": spaces.Sequence(spaces.Box(-1, 1, (2,), np.float32), stack=True),
    "dict": spaces.Dict({"b": spaces.Box(-1, 1, (2,), np.float32), "a": spaces.Discrete(3)}),
    "tuple": spaces.Tuple([spaces.Discrete(3), spaces.Box(-1, 1, (2,), np.float32)]),
    "dict_of_one": spaces.Dict({"x": spaces.Box(-1, 1, (2,), np.float32)}),
    "tuple_of_one": spaces.Tuple((spaces.Discrete(3),)),
    "nested": spaces.Dict(
        {
            "position": spaces.Tuple([spaces.Box(-1, 1, (2,), np.float32), spaces.MultiBinary(3)]),
            "inner": spaces.Dict({"word": spaces.Text(4), "level": spaces.Discrete(7, start=1)}),
            "image": spaces.Box(0, 255, (4, 4), np.uint8),
        }
    ),
}


class SpaceEnv(gym.Env[Any, Any]):
    """Draws observations, rewards, ends and infos from ``np_random``; echoes the action in its info."""

    metadata = {"render_modes": ["rgb_array"], "kind": "space"}

    def __init__(self, space: str = "box", action: str | None = None, render_mode: str | None = None) -> None:
        self.observation_space = _with_seed(SPACES[space])
        self.action_space = _with_seed(SPACES[action or space])
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


def _with_seed(space: gym.Space[Any]) -> gym.Space[Any]:
    import copy

    return copy.deepcopy(space)


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


def make_loaded() -> gym.Env[Any, Any]:
    """For ``"envs:make_loaded"``."""
    return Loaded()


def not_an_env() -> object:
    return object()

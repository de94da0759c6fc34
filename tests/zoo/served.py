"""Environments for the server to serve, each with something that must come across."""

from __future__ import annotations

import random
import threading
import time

import gymnasium as gym
import numpy as np
from gymnasium import spaces

GATE = threading.Event()


class Counter(gym.Env):
    """Counts its steps in one buffer that it reuses; an episode lasts `length` steps."""

    metadata = {"render_modes": ["rgb_array", "ansi"], "render_fps": 5, "odd": {1, 2}}
    observation_space = spaces.Box(-1, 1000, (3,), np.float32)
    action_space = spaces.Discrete(4)

    def __init__(self, length: int = 3, render_mode: str | None = None) -> None:
        self.length, self.render_mode = length, render_mode
        self.buffer = np.zeros(3, np.float32)
        self.closed_with = None
        self.level = 1
        self.episodes = 0
        self.warm = False

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.episodes += 1
        self.buffer[:] = (0, -1 if options is None else options["level"], self.np_random.integers(1000))
        return self.buffer, {"seed": seed, "big": 2**100, "odd": {1, 2}, "warm": self.warm, "episodes": self.episodes}

    def step(self, action):
        self.buffer[0] += 1
        self.buffer[1] = action
        draws = (random.random(), float(np.random.random()), float(self.np_random.random()))
        over = bool(self.buffer[0] >= self.length)
        return self.buffer, np.float32(1.5), over, False, {"draws": draws, "image": np.full((2, 2), action, np.uint8)}

    def render(self):
        return np.full((4, 5, 3), 7, np.uint8) if self.render_mode == "rgb_array" else "a frame"

    def add(self, a, b=1):
        return {"sum": a + b, "level": self.level}

    def fail(self, kind="value"):
        if kind == "key":
            raise KeyError("missing")
        if kind == "exit":
            raise SystemExit(3)
        if kind == "own":
            raise OwnError("mine")
        raise ValueError("the env says no")

    def opaque(self):
        return {"deep": [object()]}

    def huge(self, megabytes):
        return np.zeros(megabytes << 20, np.uint8)

    def hold(self):
        """Runs until `release` is called from another thread, or a minute has passed."""
        return GATE.wait(60)

    def spin(self, seconds):
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            pass

    def recurse(self):
        return self.recurse()

    def close(self):
        print("closed the env", flush=True)


class OwnError(Exception):
    pass


class Everything(gym.Env):
    """Observations and actions with every kind of space."""

    observation_space = spaces.Dict(
        {
            "box": spaces.Box(-np.inf, np.inf, (2, 2), np.float64),
            "text": spaces.Text(5),
            "one": spaces.OneOf((spaces.Discrete(3, start=-1), spaces.MultiBinary(2))),
            "graph": spaces.Graph(spaces.Box(-1, 1, (2,)), spaces.Discrete(3)),
            "sequence": spaces.Sequence(spaces.Discrete(9)),
            "stack": spaces.Sequence(spaces.Box(0, 1, (2,)), stack=True),
            "tuple": spaces.Tuple((spaces.MultiDiscrete([2, 3]), spaces.Discrete(5, dtype=np.int8))),
        }
    )
    action_space = observation_space

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.observation_space.seed(seed)
        return self.observation_space.sample(), {}

    def step(self, action):
        # The action comes back, so that the test sees what arrived.
        return (
            action,
            0.0,
            False,
            False,
            {"type": str(type(action["graph"])), "tuple": isinstance(action["one"], tuple)},
        )


class Liar(Counter):
    """Observes something else than it says."""

    def step(self, action):
        lies = [np.zeros(4, np.float32), np.zeros(3, complex), "text", None, {"a": 1}]
        return lies[action], 0.0, False, False, {}

    def reset(self, *, seed=None, options=None):
        return self.buffer, {}


class Unsendable(Counter):
    def reset(self, *, seed=None, options=None):
        return {"a": [object()]}, {}


def make(length: int = 3, render_mode: str | None = None) -> gym.Env:
    return Counter(length, render_mode)


def warm_up(env: gym.Env) -> None:
    env.unwrapped.warm = True


def broken() -> gym.Env:
    raise RuntimeError("cannot be built")


def slow_to_build() -> gym.Env:
    """Takes as long as the file named by the environment variable is missing."""
    import os
    from pathlib import Path

    while not Path(os.environ["SERVED_ENVS_GATE"]).exists():
        time.sleep(0.01)
    return Counter()

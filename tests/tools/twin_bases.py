"""An engine for tests: each base is two bases of the local engine, and a fleet of it is half of each."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np

from prized_gym import engines
from prized_gym.fleets.sharded import ShardedFleet
from prized_gym.interface.engine import BaseHandle, Engine
from prized_gym.interface.fleet import UNLIMITED, Fleet, TimeLimits
from prized_gym.recipe import Recipe


class TwinEngine(Engine):
    """Two local bases for one."""

    name: ClassVar[str] = "twin"
    options: ClassVar[Mapping[str, Any]] = engines.load("local").options

    @classmethod
    def check(cls) -> None:
        engines.load("local").check()

    @classmethod
    def build(cls, recipe: Recipe, options: Mapping[str, Any], timeout: float | None, progress: bool) -> BaseHandle:
        local = engines.load("local")
        return TwinBase([local.build(recipe, options, timeout, progress) for _ in range(2)])


class TwinBase(BaseHandle):
    """Two bases; copies go to the first while there is room for half of them."""

    def __init__(self, halves: list[BaseHandle]) -> None:
        self.halves = halves
        self.description = halves[0].description

    @property
    def alive(self) -> bool:
        return all(half.alive for half in self.halves)

    @property
    def where(self) -> str:
        return " and ".join(half.where for half in self.halves)

    def revive(self) -> None:
        for half in self.halves:
            half.revive()

    def fleet(self, size: int, limits: TimeLimits = UNLIMITED, labels: Mapping[str, str] | None = None) -> Fleet:
        sizes = (size - size // 2, size // 2)
        return ShardedFleet([half.fleet(n, limits, labels) for half, n in zip(self.halves, sizes, strict=True) if n])

    def reset_environment(self, seed: int | None) -> None:
        for half in self.halves:
            half.reset_environment(seed)

    def close(self) -> None:
        for half in self.halves:
            half.close()


def counting() -> type[gym.Env[Any, Any]]:
    """An environment that counts its steps; an action is how many hundredths of a second a step takes, 99: for ever."""

    class Counting(gym.Env[Any, Any]):
        observation_space = gym.spaces.Dict(
            {"count": gym.spaces.Box(-1, 10_000, (1,), np.float64), "word": gym.spaces.Text(10)}
        )
        action_space = gym.spaces.Discrete(100)

        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            super().reset(seed=seed)
            self.count = 0
            return self.see(), {"seed": seed}

        def step(self, action: Any) -> Any:
            time.sleep(1000 if action == 99 else action / 100)
            self.count += 1
            return self.see(), float(self.count), False, False, {"count": self.count}

        def see(self) -> Any:
            return {"count": np.array([float(self.count)]), "word": "x" * (self.count % 10)}

    return Counting

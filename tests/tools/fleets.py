"""What the tests of single fleets share: bases without a vector environment over them, and batches of actions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from prized_gym import engines
from prized_gym.interface import commands as ops
from prized_gym.interface.commands import Call, Command, Fresh, Reset
from prized_gym.interface.engine import BaseHandle
from prized_gym.interface.fleet import Finished, Fleet
from prized_gym.recipe import Recipe


def make_base(engine: str, *sources: Callable[..., Any], timeout: float | None = 60.0, **options: Any) -> BaseHandle:
    """A base of ``sources`` in ``engine``, as it is below :class:`prized_gym.Base`."""
    kind = engines.load(engine)
    recipe = Recipe(
        tuple(sources), **{name: options.pop(name) for name in ("warm_up", "on_fork", "env_kwargs") if name in options}
    )
    return kind.build(recipe, {**kind.options, **options}, timeout, False)


def first(indices: Sequence[int], seed: int = 0, **options: Any) -> dict[int, Command]:
    """For each of some copies the first command of a new fork: a seeded reset."""
    return {index: Reset(seed + index, options or None, Fresh(seed + index, index)) for index in indices}


def forked(fleet: Fleet, indices: Sequence[int] | None = None, seed: int = 0) -> Finished:
    """Fork copies of a fleet, all if none are named, and wait for them."""
    fleet.fork(first(range(fleet.size) if indices is None else indices, seed))
    return fleet.wait()


def step(fleet: Fleet, actions: Sequence[int], op: int = ops.STEP) -> Finished:
    """Step every copy of a fleet over a discrete action space, and wait for them."""
    begin(fleet, actions, op)
    return fleet.wait()


def begin(fleet: Fleet, actions: Sequence[int], op: int = ops.STEP) -> None:
    """Begin a step of every copy."""
    fleet.step([np.asarray(actions)], [], bytes([op]) * fleet.size)


def begin_some(fleet: Fleet, actions: Mapping[int, int], op: int = ops.STEP) -> None:
    """Begin a step of the copies named, each with its action."""
    fleet.step_some(list(actions), [np.asarray(list(actions.values()))], [], bytes([op]) * len(actions))


def ask(fleet: Fleet, name: str, *args: Any, indices: Sequence[int] | None = None) -> dict[int, Any]:
    """Call a method of the environments, or get an attribute; results by index."""
    asked = range(fleet.size) if indices is None else indices
    fleet.command({index: Call(name, args) for index in asked})
    return fleet.wait().results

"""What a copy does when it is asked for an attribute or a method of its environment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium as gym

from prized_gym.seeding import random_state

CLASSES = "prized_gym:classes"
"""In place of an attribute's name: the classes of the environment and of its wrappers, as :func:`classes` gives them."""

RANDOM_STATE = "prized_gym:random_state"
"""In place of an attribute's name: where ``np_random`` stands, as :func:`prized_gym.seeding.random_state` gives it."""


def perform(
    env: gym.Env[Any, Any], name: str, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
) -> Any:
    """Get the attribute ``name`` of the environment or of the wrapper that has it, called if it can be."""
    if name == CLASSES:
        return classes(env)
    if name == RANDOM_STATE:
        return random_state(env)
    target = env.get_wrapper_attr(name)
    return target(*args, **(kwargs or {})) if callable(target) else target


def classes(env: gym.Env[Any, Any]) -> list[list[str]]:
    """List, for each wrapper from the outermost in, and last for the environment itself: the names of its class and bases.

    Names, because a class cannot be carried into every engine, and what comes out of a sandbox is data.
    """
    found = [[class_name(base) for base in type(env).__mro__]]
    while isinstance(env, gym.Wrapper):
        env = env.env
        found.append([class_name(base) for base in type(env).__mro__])
    return found


def class_name(cls: type) -> str:
    """Return the name that a class has on both sides, ``"module:name"``: one sent by value comes without its qualified name."""
    return f"{cls.__module__}:{cls.__name__}"

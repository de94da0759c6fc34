"""The checks of a vector environment's arguments."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import gymnasium as gym
import numpy as np
import numpy.typing as npt

Seed: TypeAlias = "int | Sequence[int | None] | None"


def one_of(name: str, value: str, allowed: tuple[str, ...]) -> str:
    """Return ``value`` if it is one of ``allowed``; else raise ValueError."""
    if value not in allowed:
        raise ValueError(f"{name}={value!r}: must be one of {', '.join(map(repr, allowed))}")
    return value


def at_least_one(name: str, value: int) -> int:
    """Return ``value`` as an int of at least 1; else raise TypeError or ValueError."""
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an int, got {value!r}") from None
    if number < 1:
        raise ValueError(f"{name} must be at least 1, got {value!r}")
    return number


def seconds(name: str, value: float | None) -> float | None:
    """Return ``value`` if it is None or a positive number; else raise ValueError."""
    if value is not None and (not isinstance(value, (int, float, np.number)) or not value > 0):
        raise ValueError(f"{name} must be a positive number of seconds or None, got {value!r}")
    return value


def label_map(labels: Mapping[Any, Any] | None) -> dict[str, str] | None:
    """Return ``labels`` with names and values as text; None for None; else raise TypeError."""
    if labels is None:
        return None
    if not isinstance(labels, Mapping):
        raise TypeError(f"labels must be a dict of strings or None, got {labels!r}")
    return {str(name): str(value) for name, value in labels.items()}


def check_fork(
    n: int, labels: Mapping[Any, Any] | None, network: str | None, timeout: float
) -> tuple[int, dict[str, str] | None]:
    """Return the number and the labels of a fork, whose arguments are those of ``Copy.fork``.

    Raises:
        TypeError, ValueError: one of them makes no sense; the message names it.
    """
    if network is not None:
        one_of("network", network, ("none", "outbound"))
    if timeout is None:
        raise ValueError("timeout must be a positive number of seconds, got None")
    seconds("timeout", timeout)
    return at_least_one("n", n), label_map(labels)


def identifier(id: Any) -> str:
    """Return ``id`` if it can be the id of a kept base; else raise TypeError."""
    if not isinstance(id, str):
        raise TypeError(f"id must be the string that keep() returned, got {id!r}")
    return id


def seed_list(seed: Seed, count: int) -> list[int | None]:
    """Return one seed or None per copy.

    Args:
        seed: one for the first copy, from which the others count up; or one per copy; or None for none.
        count: the number of copies.

    Raises:
        ValueError: there are not as many seeds as copies.
        gymnasium.error.Error: one is negative.
    """
    if seed is None:
        return [None] * count
    seeds: list[int | None]
    if hasattr(seed, "__index__") and not isinstance(seed, np.ndarray):
        seeds = [operator.index(seed) + index for index in range(count)]
    else:
        items = list(seed)
        if len(items) != count:
            raise ValueError(
                f"If seeds are passed as a list the length must match num_envs={count} but got length={len(items)}."
            )
        seeds = [None if item is None else operator.index(item) for item in items]
    for one in seeds:
        if one is not None and one < 0:
            raise gym.error.Error(f"Seed must be a non-negative integer, got {one}")
    return seeds


def take_mask(
    options: Mapping[str, Any] | None, count: int
) -> tuple[dict[str, Any] | None, npt.NDArray[np.bool_] | None]:
    """Return the options without ``reset_mask``, and the mask, checked as Gymnasium does."""
    if options is None or "reset_mask" not in options:
        return None if options is None else dict(options), None
    rest = {key: value for key, value in options.items() if key != "reset_mask"}
    mask = options["reset_mask"]
    if not isinstance(mask, np.ndarray):
        raise TypeError(f"`options['reset_mask']` must be a numpy array, got {type(mask)}")
    if mask.shape != (count,):
        raise ValueError(f"`options['reset_mask']` must have shape `({count},)`, got {mask.shape}")
    if mask.dtype != np.bool_:
        raise TypeError(f"`options['reset_mask']` must have `dtype=np.bool_`, got {mask.dtype}")
    if not np.any(mask):
        raise ValueError(
            f"`options['reset_mask']` must contain a boolean array with at least one True value, got reset_mask={mask}"
        )
    return rest, mask

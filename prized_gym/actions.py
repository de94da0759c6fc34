"""The check of a batch of actions before anything is sent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium import spaces

from prized_gym.batch import AnySpace, Array, Leaf, is_bare_array, leaves

_FEW = 32


class ActionCheck:
    """Splits a batch of actions into its leaves and refuses one that does not fit.

    Structure, length, shape and kind of number must fit every space, and the values of Discrete, MultiDiscrete,
    MultiBinary and object spaces must lie in them. The bounds of a Box are left to the environment, as Gymnasium's own
    vector environments leave them: policies with Gaussian noise step outside them and environments clip.

    Args:
        space: the action space of one copy.
    """

    def __init__(self, space: AnySpace) -> None:
        self.space = space
        self.leaves = leaves(space)
        self._limits = [_limits(leaf) for leaf in self.leaves]
        self._single = self.leaves[0] if is_bare_array(self.leaves) else None

    def split(
        self, actions: Any, count: int, ignored: Array | None = None, copies: Sequence[int] | None = None
    ) -> tuple[list[Array], list[list[Any]]]:
        """Split a batch into its array leaves, each ``(count, *shape)``, and its object leaves, lists of ``count`` values.

        Args:
            actions: ``count`` actions, batched as ``gymnasium.vector.utils.batch_space`` describes.
            count: how many actions there must be.
            ignored: a bool array of shape ``(count,)``: copies whose action will not be used, so any value does.
            copies: whose actions they are, for messages; None: those of copies 0, 1, 2, …

        Raises:
            ValueError: a wrong structure, length, shape or value; the message names the copy.
            TypeError: a single value, or numbers of the wrong kind.
        """
        if self._single is not None:
            return [self._array(0, self._single, actions, count, ignored, copies)], []
        arrays: list[Array] = []
        objects: list[list[Any]] = []
        for number, leaf in enumerate(self.leaves):
            part = self.pick(leaf, actions)
            if leaf.is_array:
                arrays.append(self._array(number, leaf, part, count, ignored, copies))
            else:
                objects.append(_objects(leaf, part, count, ignored, copies))
        return arrays, objects

    def pick(self, leaf: Leaf, actions: Any) -> Any:
        """The part of a batch that has the values of one leaf.

        Raises:
            ValueError: the batch does not have the structure of the space.
        """
        space: Any = self.space
        for key in leaf.keys:
            if isinstance(space, spaces.Dict):
                if not isinstance(actions, Mapping) or key not in actions:
                    raise ValueError(
                        f"actions{leaf.path} is missing: the batch must be a dict with the keys "
                        f"{list(space.spaces)}, got {_short(actions)}"
                    )
            elif not isinstance(actions, Sequence) or len(actions) != len(space.spaces):
                raise ValueError(
                    f"actions{leaf.path}: the batch must be a tuple of {len(space.spaces)} parts, got {_short(actions)}"
                )
            actions = actions[key]
            space = space.spaces[key]
        return actions

    def _array(
        self, number: int, leaf: Leaf, part: Any, count: int, ignored: Array | None, copies: Sequence[int] | None
    ) -> Array:
        if type(part) is np.ndarray:
            array: Array = part
        else:
            try:
                array = np.asarray(part)
            except ValueError as error:
                raise ValueError(f"actions{leaf.path} is not a batch of arrays of one shape: {error}") from error
        shape = array.shape
        if shape != (count, *leaf.shape):
            if not shape:
                raise TypeError(
                    f"actions{leaf.path} must hold {count} actions, one per copy, got a single value: {_short(part)}"
                )
            if shape[:1] != (count,):
                raise ValueError(
                    f"actions{leaf.path} must hold {count} actions, one per copy, got {shape[0]} (shape {shape})"
                )
            raise ValueError(
                f"actions{leaf.path} has shape {shape}, but {count} actions of {leaf.space} have shape "
                f"{(count, *leaf.shape)}"
            )
        limits = self._limits[number]
        kind = array.dtype.kind
        if limits is None:
            if kind not in "fiub" and not (kind == "c" and leaf.dtype.kind == "c"):
                raise TypeError(f"actions{leaf.path} has dtype {array.dtype}, but {leaf.space} takes numbers")
            return array
        if kind not in "iub":
            raise TypeError(f"actions{leaf.path} has dtype {array.dtype}, but {leaf.space} takes integers")
        if array.size == 0:
            return array
        low, high = limits
        if isinstance(low, int):
            if array.size <= _FEW:
                # For a few values Python is quicker than two reductions.
                values = array.ravel().tolist()
                if low <= min(values) and max(values) <= high:
                    return array
            elif low <= np.minimum.reduce(array, None) and np.maximum.reduce(array, None) <= high:
                return array
            outside = (array < low) | (array > high)
        else:
            outside = (array < low) | (array > high)
            if not outside.any():
                return array
        bad = np.flatnonzero(outside.reshape(count, -1).any(axis=1))
        if ignored is not None:
            bad = bad[~ignored[bad]]
            if not bad.size:
                # A value that will not be used may still not fit the room of its row.
                return np.where(outside, np.asarray(low, dtype=array.dtype), array)
        raise ValueError(
            f"actions{leaf.path}[{bad[0]}] = {array[bad[0]]!r}, for copy {_copy(bad[0], copies)}, is not in {leaf.space}; "
            "nothing was sent"
        )


def _limits(leaf: Leaf) -> tuple[Any, Any] | None:
    """Return the least and greatest values of a leaf of whole numbers, or None for a Box."""
    space: Any = leaf.space
    if isinstance(space, spaces.Discrete):
        return int(space.start), int(space.start) + int(space.n) - 1
    if isinstance(space, spaces.MultiBinary):
        return 0, 1
    if isinstance(space, spaces.MultiDiscrete):
        start = getattr(space, "start", np.zeros_like(space.nvec))
        return np.asarray(start), np.asarray(start) + np.asarray(space.nvec) - 1
    return None


def _copy(row: int, copies: Sequence[int] | None) -> int:
    return row if copies is None else copies[row]


def _objects(leaf: Leaf, part: Any, count: int, ignored: Array | None, copies: Sequence[int] | None) -> list[Any]:
    if isinstance(part, (str, bytes)) or not hasattr(part, "__len__") or not hasattr(part, "__iter__"):
        raise ValueError(f"actions{leaf.path} must be a tuple of {count} values of {leaf.space}, got {_short(part)}")
    values = list(part)
    if len(values) != count:
        raise ValueError(f"actions{leaf.path} must hold {count} actions, one per copy, got {len(values)}")
    # What belongs to a space of the user's own is for the environment to say.
    known = isinstance(leaf.space, (spaces.Text, spaces.OneOf, spaces.Graph, spaces.Sequence))
    for index, value in enumerate(values if known else ()):
        if (ignored is None or not ignored[index]) and not leaf.space.contains(value):
            raise ValueError(
                f"actions{leaf.path}[{index}] = {_short(value)}, for copy {_copy(index, copies)}, is not in {leaf.space}; "
                "nothing was sent"
            )
    return values


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}…"

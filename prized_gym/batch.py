"""The layout of a batch of observations or actions: a space flattened to leaves, each an array or a list of objects.

Box, Discrete, MultiDiscrete and MultiBinary are array leaves of shape ``(n, *shape)``, as
``gymnasium.vector.utils.concatenate`` makes them; Dict and Tuple are walked; every other space (Text, Graph, Sequence,
OneOf, custom ones) is an object leaf, batched as a tuple of n values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import deepcopy
from typing import Any, TypeAlias

import gymnasium as gym
import numpy as np
import numpy.typing as npt
from gymnasium import spaces

Array: TypeAlias = npt.NDArray[Any]
AnySpace: TypeAlias = "gym.Space[Any]"

ARRAY_SPACES = (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)


class Leaf:
    """One array or object leaf of a space.

    Attributes:
        path: where it stands in the space, such as ``.position[0]``; empty for a space that is itself a leaf.
        space: the leaf space.
        is_array: whether its values are arrays of a fixed shape.
    """

    def __init__(self, path: str, keys: tuple[Any, ...], space: AnySpace) -> None:
        self.path = path
        self.keys = keys
        self.space = space
        self.is_array = isinstance(space, ARRAY_SPACES)
        # Read once: some training scripts assign to a space's dtype after the environment was made.
        self.shape: tuple[int, ...] = tuple(space.shape or ()) if self.is_array else ()
        self.dtype: np.dtype[Any] = np.dtype(space.dtype) if self.is_array else np.dtype(object)

    def pick(self, value: Any) -> Any:
        """Take this leaf's part of a value of the whole space."""
        for key in self.keys:
            value = value[key]
        return value


def leaves(space: AnySpace) -> list[Leaf]:
    """List the leaves of ``space``, depth first, in the order of its keys."""
    return list(_walk("", (), space))


def _walk(path: str, keys: tuple[Any, ...], space: AnySpace) -> Iterator[Leaf]:
    if isinstance(space, spaces.Dict):
        for key, inner in space.spaces.items():
            yield from _walk(f"{path}.{key}", (*keys, key), inner)
    elif isinstance(space, spaces.Tuple):
        for index, inner in enumerate(space.spaces):
            yield from _walk(f"{path}[{index}]", (*keys, index), inner)
    else:
        yield Leaf(path, keys, space)


def is_bare_array(found: Sequence[Leaf]) -> bool:
    """Return whether a space is one array and nothing around it."""
    return len(found) == 1 and found[0].is_array and not found[0].keys


def assemble(space: AnySpace, values: Sequence[Any]) -> Any:
    """Put one value per leaf (in the order of :func:`leaves`) back into the structure of ``space``."""
    return _fill(space, iter(values))


def _fill(space: AnySpace, values: Iterator[Any]) -> Any:
    if isinstance(space, spaces.Dict):
        return {key: _fill(inner, values) for key, inner in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(_fill(inner, values) for inner in space.spaces)
    return next(values)


class ObservationBuffer:
    """The latest observation of each of n copies.

    Args:
        space: the observation space of one copy.
        count: n.
        allocate: makes the array of one leaf from its shape ``(n, *leaf.shape)`` and dtype; shared memory or numpy's own.
    """

    def __init__(
        self, space: AnySpace, count: int, allocate: Callable[[tuple[int, ...], np.dtype[Any]], Array] = np.zeros
    ) -> None:
        self.space = space
        self.count = count
        self.leaves = leaves(space)
        self.arrays: list[Array] = [allocate((count, *leaf.shape), leaf.dtype) for leaf in self.leaves if leaf.is_array]
        self.array_leaves = [leaf for leaf in self.leaves if leaf.is_array]
        self.object_leaves = [leaf for leaf in self.leaves if not leaf.is_array]
        self.objects: list[list[Any]] = [[_empty(leaf.space) for _ in range(count)] for leaf in self.object_leaves]
        self._single = self.arrays[0] if is_bare_array(self.leaves) else None

    def write(self, index: int, observation: Any) -> list[Any]:
        """Store the array leaves of copy ``index``'s observation and return its object leaves.

        The casts that ``numpy.stack(..., out=)`` makes are made (``same_kind``: float64 into float32).

        Raises:
            ValueError: a leaf has another shape than its space.
            TypeError: a leaf's dtype cannot be cast to its space's.
            KeyError, IndexError: the observation lacks a part of the space.
        """
        # Everything is checked before anything is stored: a faulty observation leaves the last valid one whole.
        values = [_fitting(leaf, leaf.pick(observation)) for leaf in self.array_leaves]
        rest = [leaf.pick(observation) for leaf in self.object_leaves]
        for array, value in zip(self.arrays, values, strict=True):
            array[index] = value
        return rest

    def writer(self, index: int) -> Callable[[Any], list[Any]]:
        """Return a function that does ``write(index, observation)``, quick for a space that is one array."""
        single = self._single
        if single is None:
            return lambda observation: self.write(index, observation)
        leaf, row = self.array_leaves[0], single[index : index + 1].reshape(self.array_leaves[0].shape)
        dtype, shape, nothing = leaf.dtype, leaf.shape, list[Any]()
        if shape == ():
            return lambda observation: self.write(index, observation)

        def write(observation: Any) -> list[Any]:
            if type(observation) is np.ndarray and observation.dtype == dtype and observation.shape == shape:
                row[...] = observation
            else:
                row[...] = _fitting(leaf, observation)
            return nothing

        return write

    def store_objects(self, index: int, values: Iterable[Any]) -> None:
        """Store the object leaves of copy ``index``, in the order :meth:`write` returned them."""
        for column, value in zip(self.objects, values, strict=True):
            column[index] = value

    def batch(self, copy: bool) -> Any:
        """Return all observations in the structure of ``space``: copies, or with ``copy=False`` views of the buffer."""
        if self._single is not None:
            return self._single.copy() if copy else self._single
        arrays, objects = iter(self.arrays), iter(self.objects)
        values: list[Any] = []
        for leaf in self.leaves:
            if leaf.is_array:
                array = next(arrays)
                values.append(array.copy() if copy else array)
            else:
                column = tuple(next(objects))
                values.append(deepcopy(column) if copy else column)
        return assemble(self.space, values)

    def rows(self, indices: Sequence[int]) -> Any:
        """Return the observations of some copies, as a batch of ``len(indices)``, always copies."""
        arrays, objects = iter(self.arrays), iter(self.objects)
        chosen = np.asarray(indices, dtype=np.intp)
        values: list[Any] = []
        for leaf in self.leaves:
            if leaf.is_array:
                values.append(next(arrays)[chosen])
            else:
                column = next(objects)
                values.append(tuple(deepcopy(column[i]) for i in indices))
        return assemble(self.space, values)

    def one(self, index: int) -> Any:
        """Return the observation of one copy, unbatched, as a copy of its own; scalars as numpy scalars."""
        arrays, objects = iter(self.arrays), iter(self.objects)
        values: list[Any] = []
        for leaf in self.leaves:
            if leaf.is_array:
                row = next(arrays)[index]
                values.append(row.copy() if isinstance(row, np.ndarray) else row)
            else:
                values.append(deepcopy(next(objects)[index]))
        return assemble(self.space, values)

    def move(self, source: int, target: int) -> None:
        """Overwrite copy ``target``'s observation with that of copy ``source``."""
        for array in self.arrays:
            array[target] = array[source]
        for column in self.objects:
            column[target] = deepcopy(column[source])


class ActionBuffer:
    """Actions on their way to n copies, in the dtype the caller gave them in, as ``SyncVectorEnv`` passes them on.

    Each copy has a row of its own in each array leaf, with room for any numeric dtype; a code per row says which one is
    in use (``np.dtype.num``), so that copies can be sent actions while others still read theirs.
    """

    ITEM = 16

    def __init__(
        self, space: AnySpace, count: int, allocate: Callable[[tuple[int, ...], np.dtype[Any]], Array] = np.zeros
    ) -> None:
        self.space = space
        self.count = count
        self.leaves = leaves(space)
        self.array_leaves = [leaf for leaf in self.leaves if leaf.is_array]
        self.object_leaves = [leaf for leaf in self.leaves if not leaf.is_array]
        byte = np.dtype(np.uint8)
        self._elements = [max(1, int(np.prod(leaf.shape))) for leaf in self.array_leaves]
        self._rooms = [allocate((count, elements * self.ITEM), byte) for elements in self._elements]
        self._codes = [allocate((count,), byte) for _ in self.array_leaves]
        self._code_bytes = [codes.data for codes in self._codes]
        self._uniform: list[int | None] = [None for _ in self.array_leaves]
        self._views: list[dict[int, Array]] = [{} for _ in self.array_leaves]

    def view(self, number: int, code: int) -> Array:
        """Return array leaf ``number`` as an array ``(n, *shape)`` of the dtype with number ``code``."""
        view = self._views[number].get(code)
        if view is None:
            dtype, shape = _DTYPES[code], self.array_leaves[number].shape
            room = self._rooms[number][:, : int(np.prod(shape)) * dtype.itemsize]
            view = room.view(dtype).reshape((self.count, *shape))
            self._views[number][code] = view
        return view

    def write(self, arrays: Sequence[Array]) -> None:
        """Store the actions of all copies: one array ``(n, *shape)`` per array leaf."""
        for number, array in enumerate(arrays):
            code = array.dtype.num
            if self._uniform[number] != code:
                self._codes[number][:] = code
                self._uniform[number] = code
            self.view(number, code)[...] = array

    def write_some(self, arrays: Sequence[Array], indices: Array) -> None:
        """Store the actions of the copies in ``indices``: one array ``(len(indices), *shape)`` per array leaf."""
        for number, array in enumerate(arrays):
            code = array.dtype.num
            if self._uniform[number] != code:
                self._codes[number][indices] = code
                self._uniform[number] = None
            self.view(number, code)[indices] = array

    def read(self, index: int) -> list[Any]:
        """Read the array leaves of copy ``index``'s action, each a private copy; scalars as numpy scalars."""
        result: list[Any] = []
        for number, codes in enumerate(self._code_bytes):
            row = self.view(number, codes[index])[index]
            result.append(row.copy() if isinstance(row, np.ndarray) else row)
        return result

    def reader(self, index: int) -> Callable[[Sequence[Any]], Any]:
        """Return a function that gives copy ``index``'s action from its object leaves, quick for a space that is one array."""
        if not is_bare_array(self.leaves):
            return lambda objects: self.join(self.read(index), objects)
        codes, views, view = self._code_bytes[0], self._views[0], self.view
        if self.leaves[0].shape == ():

            def read(objects: Sequence[Any]) -> Any:
                code = codes[index]
                return (views[code] if code in views else view(0, code))[index]

            return read
        return lambda objects: view(0, codes[index])[index].copy()

    def join(self, arrays: Sequence[Any], objects: Sequence[Any]) -> Any:
        """Build one action in the structure of the space, from its array leaves and its object leaves."""
        if is_bare_array(self.leaves):
            return arrays[0]
        from_arrays, from_objects = iter(arrays), iter(objects)
        values = [next(from_arrays) if leaf.is_array else next(from_objects) for leaf in self.leaves]
        return assemble(self.space, values)


def read_only(array: Array) -> Array:
    """A view of ``array`` that cannot be written through."""
    view = array.view()
    view.flags.writeable = False
    return view


_DTYPES: dict[int, np.dtype[Any]] = {np.dtype(kind).num: np.dtype(kind) for kind in "?bBhHiIlLqQefdgFD"}


def _fitting(leaf: Leaf, value: Any) -> Array:
    value = np.asanyarray(value)
    if value.shape != leaf.shape:
        raise ValueError(
            f"observation{leaf.path} has shape {value.shape}, but its space {leaf.space} has shape {leaf.shape}"
        )
    if value.dtype != leaf.dtype and not np.can_cast(value.dtype, leaf.dtype, casting="same_kind"):
        raise TypeError(f"observation{leaf.path} has dtype {value.dtype}, which does not fit its space {leaf.space}")
    fitting: Array = value
    return fitting


def _empty(space: AnySpace) -> Any:
    """Make what a batch holds for a copy that has not been reset yet, as Gymnasium's ``create_empty_array`` makes it."""
    made = gym.vector.utils.create_empty_array(space, n=1)
    return made[0] if isinstance(made, tuple) and made else made

"""The check of an untrusted value against the space that it should come from."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt
from gymnasium import spaces

from prized_gym.wire.errors import WireError

__all__ = ["check"]

_ARRAYS = (spaces.Box, spaces.MultiDiscrete, spaces.MultiBinary)


def check(space: gym.Space[Any], value: Any, what: str = "observation") -> Any:
    """``value`` as ``space`` would hold it, or an error that says what is wrong and where.

    Structure, shape, dtype and size are required; bounds are not, as Gymnasium does not require them of an environment.
    A dtype may be another of the same kind (float64 for float32), as where NumPy writes into a batch; what is returned
    has the space's. Numbers come back as ``space.dtype``, named tuples lost on the wire as ``GraphInstance``.

    Args:
        space: one of Gymnasium's spaces.
        value: what ``decode`` gave.
        what: how errors name it.

    Raises:
        WireError: as in ``observation['camera'][0]: expected float32 of shape (3,), got int64 of shape (2,)``.
    """
    if isinstance(space, _ARRAYS):
        return _array(space, value, tuple(space.shape), what)
    if isinstance(space, spaces.Discrete):
        return _integer(space, value, what)
    if isinstance(space, spaces.Text):
        if not isinstance(value, str) or len(value) > space.max_length:
            raise WireError(f"{what}: expected text of at most {space.max_length} characters, got {_describe(value)}")
        return str(value)
    if isinstance(space, spaces.Dict):
        keys = _keys(space, value, what)
        return {key: check(item, value[key], f"{what}[{key!r}]") for key, item in keys.items()}
    if isinstance(space, spaces.Tuple):
        values = _sequence(value, len(space.spaces), what)
        return tuple([check(item, values[index], f"{what}[{index}]") for index, item in enumerate(space.spaces)])
    if isinstance(space, spaces.OneOf):
        index, item = _sequence(value, 2, what)
        if not _is_integer(index) or not 0 <= int(index) < len(space.spaces):
            raise WireError(f"{what}[0]: expected an index below {len(space.spaces)}, got {_describe(index)}")
        return np.int64(index), check(space.spaces[int(index)], item, f"{what}[1]")
    if isinstance(space, spaces.Sequence):
        if space.stack:
            return _batch(space.feature_space, value, _length(space.feature_space, value, what), what)
        return tuple([check(space.feature_space, item, f"{what}[{index}]") for index, item in _listed(value, what)])
    if isinstance(space, spaces.Graph):
        return _graph(space, value, what)
    raise WireError(f"{what}: a space of type {type(space).__qualname__} cannot be checked")


def _array(space: gym.Space[Any], value: Any, shape: tuple[int, ...], what: str) -> npt.NDArray[Any] | np.generic[Any]:
    dtype = space.dtype
    assert dtype is not None
    if isinstance(value, (np.ndarray, np.generic)) and value.dtype == dtype and value.shape == shape:
        return value  # a scalar stays one: a Box without dimensions may give either
    array = value
    if not isinstance(value, np.ndarray):
        if not isinstance(value, (list, tuple, int, float, np.generic)):
            raise WireError(f"{what}: expected {dtype} of shape {shape}, got {_describe(value)}")
        try:
            array = np.asarray(value)
        except (ValueError, OverflowError):  # ragged
            raise WireError(f"{what}: expected {dtype} of shape {shape}, got a ragged {_describe(value)}") from None
        if not array.size:
            array = array.astype(dtype)  # an empty list has no dtype of its own
    if array.shape != shape or array.dtype.kind not in "biuf" or not np.can_cast(array.dtype, dtype, "same_kind"):
        raise WireError(f"{what}: expected {dtype} of shape {shape}, got {_describe(array)}")
    with np.errstate(all="ignore"):  # a float64 beyond float32 becomes infinite, as it does in a batch
        return array.astype(dtype)  # type: ignore[no-any-return]


def _is_integer(value: Any) -> bool:
    if isinstance(value, np.ndarray):
        return value.shape == () and value.dtype.kind in "iu"
    return isinstance(value, (int, np.integer)) and not isinstance(value, np.timedelta64)


def _integer(space: spaces.Discrete[Any], value: Any, what: str) -> np.integer[Any]:
    limits = np.iinfo(space.dtype)
    if not _is_integer(value) or not limits.min <= int(value) <= limits.max:
        raise WireError(f"{what}: expected an integer of {space.dtype}, got {_describe(value)}")
    integer: np.integer[Any] = space.dtype.type(int(value))
    return integer


def _keys(space: spaces.Dict[Any], value: Any, what: str) -> dict[Any, gym.Space[Any]]:
    if not isinstance(value, dict):
        raise WireError(f"{what}: expected a dict with {len(space.spaces)} keys, got {_describe(value)}")
    if value.keys() != space.spaces.keys():
        missing, extra = ([*a.keys() - b.keys()][:5] for a, b in ((space.spaces, value), (value, space.spaces)))
        raise WireError(f"{what}: missing keys {missing!s:.200}, keys not in the space {extra!s:.200}")
    return space.spaces


def _sequence(value: Any, length: int, what: str) -> list[Any] | tuple[Any, ...]:
    if not isinstance(value, (list, tuple)) or len(value) != length:
        raise WireError(f"{what}: expected a tuple of {length}, got {_describe(value)}")
    return value


def _listed(value: Any, what: str) -> enumerate[Any]:
    if not isinstance(value, (list, tuple)):
        raise WireError(f"{what}: expected a tuple, got {_describe(value)}")
    return enumerate(value)


def _graph(space: spaces.Graph, value: Any, what: str) -> spaces.GraphInstance:
    nodes, edges, links = _sequence(value, 3, what)
    number = _length(space.node_space, nodes, f"{what}.nodes")
    nodes = _batch(space.node_space, nodes, number, f"{what}.nodes")
    if edges is None and links is None:
        return spaces.GraphInstance(nodes, None, None)
    if space.edge_space is None:
        raise WireError(f"{what}.edges: the space has no edges, got {_describe(edges)}")
    count = _length(space.edge_space, edges, f"{what}.edges")
    edges = _batch(space.edge_space, edges, count, f"{what}.edges")
    if not isinstance(links, np.ndarray) or links.dtype.kind not in "iu" or links.shape != (count, 2):
        raise WireError(f"{what}.edge_links: expected integers of shape {(count, 2)}, got {_describe(links)}")
    if count and not (int(links.min()) >= 0 and int(links.max()) < number):
        raise WireError(f"{what}.edge_links: an edge ends at a node that is not among the {number}")
    return spaces.GraphInstance(nodes, edges, links)


def _length(space: gym.Space[Any], value: Any, what: str) -> int:
    """How many values of ``space`` are batched in ``value``, read off its first leaf."""
    if isinstance(space, (*_ARRAYS, spaces.Discrete)):
        if isinstance(value, np.ndarray) and value.ndim:
            return len(value)
    elif isinstance(space, spaces.Dict) and space.spaces:
        key, item = next(iter(space.spaces.items()))
        if isinstance(value, dict) and key in value:
            return _length(item, value[key], f"{what}[{key!r}]")
    elif isinstance(space, spaces.Tuple) and space.spaces:
        if isinstance(value, (list, tuple)) and value:
            return _length(space.spaces[0], value[0], f"{what}[0]")
    elif isinstance(value, (list, tuple)):
        return len(value)
    raise WireError(f"{what}: expected a batch of {type(space).__name__}, got {_describe(value)}")


def _batch(space: gym.Space[Any], value: Any, length: int, what: str) -> Any:
    """Checks ``length`` values of ``space`` batched as ``gymnasium.vector.utils.batch_space`` would batch them."""
    if isinstance(space, (*_ARRAYS, spaces.Discrete)):
        return _array(space, value, (length, *(space.shape or ())), what)
    if isinstance(space, spaces.Dict):
        keys = _keys(space, value, what)
        return {key: _batch(item, value[key], length, f"{what}[{key!r}]") for key, item in keys.items()}
    if isinstance(space, spaces.Tuple):
        values = _sequence(value, len(space.spaces), what)
        return tuple([_batch(item, values[i], length, f"{what}[{i}]") for i, item in enumerate(space.spaces)])
    return tuple([check(space, item, f"{what}[{index}]") for index, item in enumerate(_sequence(value, length, what))])


def _describe(value: Any) -> str:
    if isinstance(value, (np.ndarray, np.generic)):
        return f"{value.dtype} of shape {value.shape}"
    if isinstance(value, (str, bytes, list, tuple, dict)):
        return f"{type(value).__name__} of length {len(value)}"
    return f"{type(value).__name__} {value!r:.100}" if isinstance(value, float) else type(value).__name__

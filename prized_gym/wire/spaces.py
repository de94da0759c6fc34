"""Gymnasium's spaces as data, their rebuilding from an untrusted sender's data, and the check of a value against one.

A space is a dict with a ``"type"`` and what its constructor takes, its arrays as arrays. What is rebuilt is equal to the
original and, seeded alike, draws the same samples.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from prized_gym.wire.arrays import safe_dtype
from prized_gym.wire.check import check
from prized_gym.wire.defaults import default_value
from prized_gym.wire.errors import WireError

__all__ = ["check", "default_value", "space_from_data", "space_to_data"]

AnySpace: TypeAlias = "gym.Space[Any]"
Data: TypeAlias = dict[str, Any]

MAX_DEPTH = 32
MAX_SPACES = 10_000
MAX_BYTES = 64 << 20

# Gymnasium gained these keywords one release after another.
_DISCRETE_HAS_DTYPE = "dtype" in inspect.signature(spaces.Discrete.__init__).parameters
_DICT_HAS_SORT_KEYS = "sort_keys" in inspect.signature(spaces.Dict.__init__).parameters


def space_to_data(space: AnySpace, what: str = "space") -> Data:
    """``space`` as a dict that ``encode`` takes.

    A subclass of one of Gymnasium's spaces travels as that one.

    Args:
        space: any of Gymnasium's spaces, nested as deep as ``MAX_DEPTH``.
        what: how errors name it.

    Raises:
        WireError: it, or one inside it, is of another kind; the message names the path to it.
    """
    return _to_data(space, what, 0)


def space_from_data(data: Any, what: str = "space", *, max_bytes: int = MAX_BYTES) -> AnySpace:
    """The space that an untrusted sender's ``data`` describes.

    Args:
        data: what ``space_to_data`` gave, decoded.
        what: how errors name it.
        max_bytes: the most that one value of the space may take, in bytes, which bounds what building it takes.

    Raises:
        WireError: the data is malformed, or describes a space that is impossible, too large or nested too deeply.
    """
    return _Builder(max_bytes).space(data, what, 0)


def _to_data(space: AnySpace, what: str, depth: int) -> Data:
    if depth >= MAX_DEPTH:
        raise WireError(f"{what}: spaces are nested deeper than {MAX_DEPTH}")
    if isinstance(space, spaces.Box):
        return {
            "type": "Box",
            "dtype": space.dtype.str,
            "shape": list(space.shape),
            "low": _uniform(space.low),
            "high": _uniform(space.high),
            "bounded_below": _uniform(space.bounded_below),
            "bounded_above": _uniform(space.bounded_above),
        }
    if isinstance(space, spaces.Discrete):
        dtype = np.dtype(space.dtype).str
        return {"type": "Discrete", "n": int(space.n), "start": int(space.start), "dtype": dtype}
    if isinstance(space, spaces.MultiDiscrete):
        return {"type": "MultiDiscrete", "nvec": space.nvec, "start": space.start}
    if isinstance(space, spaces.MultiBinary):
        n = space.n
        return {"type": "MultiBinary", "n": int(n) if isinstance(n, (int, np.integer)) else [int(size) for size in n]}
    if isinstance(space, spaces.Text):
        characters = space.character_list
        if any(len(character) != 1 for character in characters):
            raise WireError(f"{what}: a Text space's charset holds more than single characters")
        return {
            "type": "Text",
            "min_length": int(space.min_length),
            "max_length": int(space.max_length),
            "charset": "".join(characters),
        }
    if isinstance(space, spaces.Dict):
        return {
            "type": "Dict",
            "spaces": [[key, _to_data(item, f"{what}[{key!r}]", depth + 1)] for key, item in space.spaces.items()],
            "sort_keys": bool(getattr(space, "sort_keys", True)),
        }
    if isinstance(space, (spaces.Tuple, spaces.OneOf)):
        items = [_to_data(item, f"{what}[{index}]", depth + 1) for index, item in enumerate(space.spaces)]
        return {"type": "Tuple" if isinstance(space, spaces.Tuple) else "OneOf", "spaces": items}
    if isinstance(space, spaces.Sequence):
        feature = _to_data(space.feature_space, f"{what}.feature_space", depth + 1)
        return {"type": "Sequence", "space": feature, "stack": bool(space.stack)}
    if isinstance(space, spaces.Graph):
        edge = space.edge_space
        return {
            "type": "Graph",
            "node": _to_data(space.node_space, f"{what}.node_space", depth + 1),
            "edge": None if edge is None else _to_data(edge, f"{what}.edge_space", depth + 1),
        }
    kind = f"{type(space).__module__}.{type(space).__qualname__}"
    raise WireError(f"{what}: a space of type {kind} cannot be sent: wrap the environment to have one of Gymnasium's")


def _uniform(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any] | np.generic[Any]:
    """An array whose elements are all equal as that one element: the bounds of an image are two numbers."""
    if array.size and np.all(array == array.flat[0]):
        first = array.flat[0]
        assert isinstance(first, np.generic)
        return first
    return array


class _Builder:
    """Builds one space, counting what it has built against the bounds."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.bytes = 0
        self.spaces = 0

    def space(self, data: Any, what: str, depth: int) -> AnySpace:
        if depth >= MAX_DEPTH:
            raise WireError(f"{what}: spaces are nested deeper than {MAX_DEPTH}")
        self.spaces += 1
        if self.spaces > MAX_SPACES:
            raise WireError(f"{what}: more than {MAX_SPACES} spaces in one")
        fields = _Fields(data, what)
        kind = fields.get("type", str)
        build = _BUILDERS.get(kind)
        if build is None:
            raise WireError(f"{what}: unknown type of space {kind[:40]!r}")
        try:
            return build(self, fields, depth)
        except WireError:
            raise
        except Exception as error:  # whatever Gymnasium or NumPy object to
            raise WireError(f"{what}: no {kind} can be built: {str(error)[:300]}") from error

    def charge(self, what: str, shape: tuple[int, ...], itemsize: int) -> None:
        self.bytes += max(1, math.prod(shape)) * itemsize
        if len(shape) > 32 or self.bytes > self.max_bytes:
            raise WireError(f"{what}: a space of shape {str(shape)[:100]} is over the limit of {self.max_bytes} bytes")

    def box(self, fields: _Fields, depth: int) -> AnySpace:
        dtype = safe_dtype(fields.get("dtype", str))
        if dtype.kind not in "biuf":
            raise WireError(f"{fields.what}: a Box cannot have the dtype {dtype}")
        shape = fields.shape("shape")
        self.charge(fields.what, shape, dtype.itemsize)
        low, high = (fields.spread(name, dtype, shape) for name in ("low", "high"))
        if np.isnan(low).any() or np.isnan(high).any():
            raise WireError(f"{fields.what}: a bound of a Box is NaN")
        if not (low <= high).all():
            raise WireError(f"{fields.what}: a Box's low is above its high")
        below, above = (fields.spread(name, np.dtype(bool), shape) for name in ("bounded_below", "bounded_above"))
        if dtype.kind == "b":  # Gymnasium cannot ask an array of bools for its infinities
            low, high = low.astype(np.uint8), high.astype(np.uint8)
        box: spaces.Box[Any] = spaces.Box(low, high, shape, dtype=dtype.type if dtype.isnative else dtype)
        # An integer bound given as infinite is stored as the dtype's least or greatest: only these flags tell.
        box.bounded_below, box.bounded_above = below.copy(), above.copy()
        return box

    def discrete(self, fields: _Fields, depth: int) -> AnySpace:
        dtype = fields.integer_dtype("dtype")
        n, start = fields.get("n", int), fields.get("start", int)
        limits = np.iinfo(dtype)
        if not 0 < n <= limits.max or not limits.min <= start <= limits.max:
            raise WireError(f"{fields.what}: a Discrete of {n} values from {start} does not fit {dtype}")
        if _DISCRETE_HAS_DTYPE:
            return spaces.Discrete(n, start=start, dtype=dtype.type)
        if dtype != np.int64:
            raise WireError(f"{fields.what}: this Gymnasium has no Discrete of dtype {dtype}")
        return spaces.Discrete(n, start=start)

    def multi_discrete(self, fields: _Fields, depth: int) -> AnySpace:
        nvec, start = fields.get("nvec", np.ndarray), fields.get("start", np.ndarray)
        if nvec.dtype.kind not in "iu" or nvec.dtype != start.dtype or nvec.shape != start.shape:
            raise WireError(f"{fields.what}: a MultiDiscrete's nvec and start are not two integer arrays of one shape")
        self.charge(fields.what, nvec.shape, nvec.dtype.itemsize)
        return spaces.MultiDiscrete(nvec, dtype=nvec.dtype.type, start=start)

    def multi_binary(self, fields: _Fields, depth: int) -> AnySpace:
        if isinstance(fields.data.get("n"), list):
            shape = fields.shape("n")
            self.charge(fields.what, shape, 1)
            return spaces.MultiBinary(shape)
        n = fields.get("n", int)
        self.charge(fields.what, (max(0, n),), 1)
        return spaces.MultiBinary(n)

    def text(self, fields: _Fields, depth: int) -> AnySpace:
        least, most = fields.get("min_length", int), fields.get("max_length", int)
        if most >= 1 << 63:
            raise WireError(f"{fields.what}: a Text of {most} characters is too long")
        return spaces.Text(most, min_length=least, charset=fields.get("charset", str))

    def dict(self, fields: _Fields, depth: int) -> AnySpace:
        items: list[tuple[Any, AnySpace]] = []
        for pair in fields.get("spaces", list):
            if not isinstance(pair, list) or len(pair) != 2 or not isinstance(pair[0], (str, int)):
                raise WireError(f"{fields.what}: a Dict's spaces are not pairs of a key and a space")
            items.append((pair[0], self.space(pair[1], f"{fields.what}[{str(pair[0])[:80]!r}]", depth + 1)))
        if len({key for key, _ in items}) != len(items):
            raise WireError(f"{fields.what}: a Dict has the same key twice")
        sort_keys = fields.get("sort_keys", bool)
        # A sequence keeps its order, whatever sort_keys says.
        return spaces.Dict(items, sort_keys=sort_keys) if _DICT_HAS_SORT_KEYS else spaces.Dict(items)

    def several(self, fields: _Fields, depth: int) -> list[AnySpace]:
        listed = fields.get("spaces", list)
        return [self.space(item, f"{fields.what}[{index}]", depth + 1) for index, item in enumerate(listed)]

    def tuple(self, fields: _Fields, depth: int) -> AnySpace:
        return spaces.Tuple(self.several(fields, depth))

    def one_of(self, fields: _Fields, depth: int) -> AnySpace:
        return spaces.OneOf(self.several(fields, depth))

    def sequence(self, fields: _Fields, depth: int) -> AnySpace:
        feature = self.space(fields.get("space", dict), f"{fields.what}.feature_space", depth + 1)
        return spaces.Sequence(feature, stack=fields.get("stack", bool))

    def graph(self, fields: _Fields, depth: int) -> AnySpace:
        node = self.space(fields.get("node", dict), f"{fields.what}.node_space", depth + 1)
        edge = fields.data.get("edge")
        if edge is not None:
            edge = self.space(edge, f"{fields.what}.edge_space", depth + 1)
        return spaces.Graph(node, edge)


class _Fields:
    """The fields of one untrusted dict, each taken only if it has the right type."""

    def __init__(self, data: Any, what: str) -> None:
        if not isinstance(data, dict):
            raise WireError(f"{what}: a space is described by a dict, not by {type(data).__name__}")
        self.data, self.what = data, what

    def get(self, name: str, kind: type[Any]) -> Any:
        value = self.data.get(name)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise WireError(f"{self.what}: the field {name!r} is {type(value).__name__}, not {kind.__name__}")
        return value

    def shape(self, name: str) -> tuple[int, ...]:
        shape = tuple(self.get(name, list))
        if len(shape) > 32 or not all(type(size) is int and 0 <= size < 1 << 40 for size in shape):
            raise WireError(f"{self.what}: the field {name!r} is no shape")
        return shape

    def integer_dtype(self, name: str) -> np.dtype[Any]:
        dtype = safe_dtype(self.get(name, str))
        if dtype.kind not in "iu":
            raise WireError(f"{self.what}: the dtype {dtype} is not an integer one")
        return dtype

    def spread(self, name: str, dtype: np.dtype[Any], shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
        """An array of exactly this dtype and shape, or one element that stands for all."""
        value = self.data.get(name)
        if not isinstance(value, (np.ndarray, np.generic)) or value.dtype != dtype or value.shape not in ((), shape):
            raise WireError(f"{self.what}: the field {name!r} is not an array of {dtype} and shape {shape}")
        return np.broadcast_to(value, shape)


_BUILDERS: Mapping[str, Callable[[_Builder, _Fields, int], AnySpace]] = {
    "Box": _Builder.box,
    "Discrete": _Builder.discrete,
    "MultiDiscrete": _Builder.multi_discrete,
    "MultiBinary": _Builder.multi_binary,
    "Text": _Builder.text,
    "Dict": _Builder.dict,
    "Tuple": _Builder.tuple,
    "OneOf": _Builder.one_of,
    "Sequence": _Builder.sequence,
    "Graph": _Builder.graph,
}

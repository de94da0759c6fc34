"""The infos of N copies merged into Gymnasium's dictionary of arrays."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

_PLAIN = (bool, int, float)


def merge(infos: Mapping[int, Mapping[str, Any]], count: int) -> dict[str, Any]:
    """Merge the infos of some copies as ``gymnasium.vector.VectorEnv._add_info`` does, with its faults mended.

    Each key gets an array of length ``count`` and a mask ``_key``. Numbers become a numeric array, equally shaped arrays
    one array of shape ``(count, *shape)``, dictionaries are merged recursively, and ``final_obs`` and everything else
    becomes an object array with None where absent. Where Gymnasium takes the type of the first value it meets (so that
    2.7 after an int is cut to 2, and ragged arrays raise), the type here is one that holds every value: integers and
    floats promote, and arrays of different shapes become an object array.

    Args:
        infos: the info of each copy that has one, by index.
        count: how many copies there are.

    Returns:
        The merged dictionary; empty if every info is empty.
    """
    merged: dict[str, Any] = {}
    columns: dict[str, dict[int, Any]] = {}
    for index in sorted(infos):
        for key, value in infos[index].items():
            columns.setdefault(key, {})[index] = value
    for key, column in columns.items():
        mask = np.zeros(count, dtype=np.bool_)
        mask[list(column)] = True
        merged[key] = _column(key, column, count)
        merged[f"_{key}"] = mask
    return merged


def split(infos: Mapping[str, Any], count: int) -> list[dict[str, Any]]:
    """Undo :func:`merge`: return one info dictionary per copy, of the keys whose mask is set for it."""
    result: list[dict[str, Any]] = [{} for _ in range(count)]
    for key, value in infos.items():
        mask = infos.get(f"_{key}")
        if mask is None:
            continue
        parts = split(value, count) if isinstance(value, dict) else value
        for index in np.flatnonzero(mask):
            result[index][key] = parts[index]
    return result


def _column(key: str, column: dict[int, Any], count: int) -> Any:
    values = list(column.values())
    if key != "final_obs":
        if all(isinstance(value, dict) for value in values):
            return merge(column, count)
        numeric = _numeric(column, count)
        if numeric is not None:
            return numeric
    array = np.full(count, fill_value=None, dtype=object)
    for index, value in column.items():
        array[index] = value
    return array


def _numeric(column: dict[int, Any], count: int) -> npt.NDArray[Any] | None:
    """Make one array that holds every value of the column, or None if there is no such array."""
    values = list(column.values())
    if not all(_is_number(value) or isinstance(value, np.ndarray) for value in values):
        return None
    if type(values[0]) is np.bool_:
        # Gymnasium does not count numpy's bool among the numbers.
        return None
    arrays = [np.asarray(value) for value in values]
    shape = arrays[0].shape
    if any(array.shape != shape for array in arrays):
        return None
    dtype = arrays[0].dtype
    for array in arrays[1:]:
        if array.dtype != dtype:
            try:
                dtype = np.promote_types(dtype, array.dtype)
            except TypeError:
                return None
    if dtype.kind == "f" and all(array.dtype.kind in "iu" for array in arrays):
        # int64 and uint64 meet in float64, which holds neither exactly.
        return None
    if dtype.kind == "O" and not isinstance(values[0], np.ndarray):
        return None
    merged = np.zeros((count, *shape), dtype=dtype)
    for index, array in zip(column, arrays, strict=True):
        merged[index] = array
    return merged


def _is_number(value: Any) -> bool:
    return type(value) in _PLAIN or isinstance(value, (np.number, np.bool_))

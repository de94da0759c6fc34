"""NumPy arrays and scalars as bytes: a short header, then the buffer as it lies in memory.

The header is ``len(dtype) dtype ndim dim…``: one byte, ASCII, one byte, eight little-endian bytes per dimension. A buffer
is accepted only if its length is exactly what the header announces, so nothing is allocated on the word of a header.
"""

from __future__ import annotations

import functools
import math
import re
import struct
from typing import Any

import numpy as np
import numpy.typing as npt

from prized_gym.wire.errors import WireError

__all__ = ["array_parts", "read_array", "read_scalar", "safe_dtype"]

MAX_DIMENSIONS = 32

_SAFE = re.compile(
    r"[<>|=]?(?:b1|[iu][1248]|f(?:2|4|8|12|16)|c(?:8|16|24|32)|[SU][1-9][0-9]{0,6}"
    r"|[mM]8(?:\[[0-9]{0,6}(?:Y|M|W|D|h|m|s|ms|us|ns|ps|fs|as|generic)\])?)"
)
_SAFE_KINDS = frozenset("biufcSUmM")


@functools.lru_cache(maxsize=256)
def safe_dtype(name: str) -> np.dtype[Any]:
    """The dtype that ``name`` (as in ``dtype.str``) describes, if it is one whose buffer holds plain values.

    Raises:
        WireError: for object, structured and sub-array dtypes, and for anything else not listed above.
    """
    if len(name) > 32 or not _SAFE.fullmatch(name):
        raise WireError(f"dtype {name[:32]!r} is not allowed: only bool, numbers, times and fixed-width text are")
    try:
        return np.dtype(name)
    except (TypeError, ValueError) as error:  # a 12-byte float on a machine without one
        raise WireError(f"dtype {name!r} does not exist on this machine") from error


def array_parts(value: npt.NDArray[Any] | np.generic[Any]) -> tuple[bytes, memoryview]:
    """The header and the buffer of an array, or of a scalar taken as an array without dimensions.

    The buffer is the array's own memory where that is contiguous. Zero-width text travels one character wide.

    Raises:
        WireError: the dtype is not one of the safe ones, or the array is masked.
    """
    if isinstance(value, np.ma.MaskedArray):
        raise WireError("a masked array cannot be sent: fill it first")
    array = np.asarray(value)
    if array.dtype.kind not in _SAFE_KINDS or array.dtype.metadata is not None:
        raise WireError(f"an array of dtype {array.dtype} cannot be sent")
    if array.dtype.itemsize == 0:
        array = array.astype(f"{array.dtype.kind}1")
    if array.ndim > MAX_DIMENSIONS:
        raise WireError(f"an array of {array.ndim} dimensions cannot be sent: at most {MAX_DIMENSIONS}")
    name = array.dtype.str.encode("ascii")
    header = struct.pack(f"<B{len(name)}sB{array.ndim}Q", len(name), name, array.ndim, *array.shape)
    return header, np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def read_array(payload: memoryview, *, copy: bool) -> npt.NDArray[Any]:
    """The array in ``payload``: with ``copy`` its own and writable, else a read-only view of the payload's memory.

    Raises:
        WireError: the header is malformed, the dtype unsafe, or the buffer not as long as the header says.
    """
    try:
        width = payload[0]
        dtype = safe_dtype(str(payload[1 : 1 + width], "ascii"))
        ndim = payload[1 + width]
        if ndim > MAX_DIMENSIONS:
            raise WireError(f"an array of {ndim} dimensions was announced: at most {MAX_DIMENSIONS} are allowed")
        shape = struct.unpack_from(f"<{ndim}Q", payload, 2 + width)
    except (IndexError, UnicodeDecodeError, struct.error) as error:
        raise WireError("the header of an array is truncated") from error
    buffer = payload[2 + width + 8 * ndim :]
    announced = math.prod(shape) * dtype.itemsize
    if announced != len(buffer):
        raise WireError(f"an array of shape {_shown(shape)} and dtype {dtype} was announced, {len(buffer)} bytes came")
    try:
        if not announced:
            return np.empty(shape, dtype)
        flat = np.frombuffer(buffer, dtype)
        if copy:
            return flat.copy().reshape(shape)
        flat.flags.writeable = False
        return flat.reshape(shape)
    except (ValueError, OverflowError, MemoryError) as error:  # an empty array with one dimension beyond any address
        raise WireError(f"no array can have the shape {_shown(shape)}") from error


def read_scalar(payload: memoryview) -> np.generic[Any]:
    """The scalar in ``payload``: an array without dimensions.

    Raises:
        WireError: as ``read_array``, and if there are dimensions.
    """
    array = read_array(payload, copy=False)
    if array.ndim:
        raise WireError(f"a scalar was announced with the shape {_shown(array.shape)}")
    scalar = array[()]
    assert isinstance(scalar, np.generic)
    return scalar


def _shown(shape: tuple[int, ...]) -> str:
    return str(shape) if len(shape) <= 8 else f"({', '.join(map(str, shape[:8]))}, … {len(shape)} dimensions)"

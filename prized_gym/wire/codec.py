"""Plain Python values and NumPy arrays as msgpack, both ways, without ever unpickling or evaluating.

| value | on the wire |
|---|---|
| None, bool, int of 64 bits, float, str, bytes, list, dict | msgpack's own types |
| NumPy array, NumPy scalar | ext 1, ext 2: see ``arrays`` |
| any other int, up to 4 KiB | ext 3: two's complement, little-endian |
| tuple, named tuples included | an array whose first element is ext 4 |
| complex | ext 5: two little-endian doubles |

Reading is done here rather than by msgpack's unpacker, which allocates what a header announces before the elements have
come, has no bound on the number of values, and copies every buffer.
"""

from __future__ import annotations

import enum
import reprlib
import struct
from collections.abc import Callable
from typing import Any, NamedTuple

import msgpack
import numpy as np

from prized_gym.wire.arrays import array_parts, read_array, read_scalar
from prized_gym.wire.errors import WireError

__all__ = ["DEFAULT_LIMITS", "Encoded", "Limits", "decode", "encodable", "encode", "encode_info", "encode_parts"]

ARRAY, SCALAR, BIG_INT, TUPLE, COMPLEX = 1, 2, 3, 4, 5

_BIG_INT_BYTES = 4096
_INLINE_BYTES = 4096  # below this, copying an array into the packer's buffer is cheaper than a part of its own
_LEAVES = frozenset((type(None), bool, float, str, bytes))
_KEYS = (str, bytes, int, float, bool, type(None))


class Limits(NamedTuple):
    """What one message may hold. A value beyond a limit raises ``WireError`` on the side that meets it first."""

    max_bytes: int = 256 << 20
    max_depth: int = 64
    max_items: int = 1_000_000
    """How many values in all, an array counting as one: bounds the memory that many tiny values would take."""


DEFAULT_LIMITS = Limits()


class Encoded:
    """A value as the pieces of its message. Within another value it is sent as that value, its pieces as they are.

    Attributes:
        parts: one after another, they are the message. Large arrays are views of their own memory, unless ``owned``.
        size: bytes in all.
    """

    __slots__ = ("parts", "size")

    def __init__(self, parts: list[bytes | memoryview], size: int) -> None:
        self.parts, self.size = parts, size

    def __bytes__(self) -> bytes:
        return b"".join(self.parts)

    def owned(self) -> Encoded:
        """The same, whatever happens to the arrays that it was made of."""
        return Encoded([bytes(part) for part in self.parts], self.size)


def encode_parts(value: Any, *, limits: Limits = DEFAULT_LIMITS, what: str = "value", lossy: bool = False) -> Encoded:
    """``value`` as one message that is not put together: as ``encode``, or with ``lossy`` as ``encode_info``."""
    return _Writer(limits, lossy=lossy).message(value, what)


def encode(value: Any, *, limits: Limits = DEFAULT_LIMITS, what: str = "value") -> bytes:
    """``value`` as one message.

    Named tuples become tuples; a subclass of dict, list, str, int or float its base class; bytearray becomes bytes.

    Args:
        value: what to send.
        limits: the bounds to keep to.
        what: how errors name the value, as in ``observation['camera']``.

    Raises:
        WireError: something in it cannot be sent (a set, an enum, an object array, …) or a limit is exceeded; the
            message names the path to it.
    """
    return bytes(_Writer(limits, lossy=False).message(value, what))


def encode_info(info: Any, *, limits: Limits = DEFAULT_LIMITS, what: str = "info") -> bytes:
    """As ``encode``, but what cannot be sent becomes a string that says so: ``"<not sent: set {1, 2}>"``.

    A step must not fail because of what an environment leaves in its info. Keys that cannot be sent become their repr.

    Raises:
        WireError: the whole is beyond ``limits``.
    """
    return bytes(_Writer(limits, lossy=True).message(info, what))


def encodable(info: Any, *, limits: Limits = DEFAULT_LIMITS) -> Any:
    """A copy of ``info`` as the other side of ``encode_info`` would see it."""
    return decode(encode_info(info, limits=limits), limits=limits, copy=True)


def decode(data: bytes | bytearray | memoryview, *, limits: Limits = DEFAULT_LIMITS, copy: bool = False) -> Any:
    """The value in one message from an untrusted sender.

    Args:
        data: the message, whole.
        limits: the bounds it must keep to.
        copy: whether arrays get memory of their own and are writable. Otherwise they are read-only views of ``data``,
            perhaps not aligned, and keep all of it alive.

    Raises:
        WireError: the message is truncated, malformed, followed by anything, or beyond a limit.
    """
    view = memoryview(data).cast("B")
    if len(view) > limits.max_bytes:
        raise WireError(f"a message of {len(view)} bytes is over the limit of {limits.max_bytes}")
    reader = _Reader(view, limits, copy)
    try:
        value = reader.value(0)
    except (IndexError, struct.error) as error:
        raise WireError(f"the message of {len(view)} bytes is truncated") from error
    except RecursionError as error:
        raise WireError("the message is nested too deeply") from error
    if reader.position != len(view):
        raise WireError(f"{len(view) - reader.position} bytes follow the end of the message")
    return value


class _Refused(Exception):
    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.path: list[str] = []


class _Writer:
    """Writes one value as msgpack, large buffers as parts of their own so that each is copied once."""

    def __init__(self, limits: Limits, *, lossy: bool) -> None:
        self.limits, self.lossy = limits, lossy
        self.packer = msgpack.Packer(autoreset=False, use_bin_type=True, unicode_errors="surrogatepass")
        self.parts: list[bytes | memoryview] = []
        self.part_bytes = 0
        self.items = 0

    def message(self, value: Any, what: str) -> Encoded:
        try:
            self.value(value, 0)
        except _Refused as refused:
            raise WireError(f"{what}{''.join(reversed(refused.path))}: {refused}") from refused.__cause__
        self.flush()
        self.room(0, what)
        return Encoded(self.parts, self.part_bytes)

    def flush(self) -> None:
        self.add(self.packer.bytes())
        self.packer.reset()

    def add(self, part: bytes | memoryview) -> None:
        self.parts.append(part)
        self.part_bytes += len(part)

    def room(self, size: int, what: str = "") -> None:
        if self.part_bytes + size > self.limits.max_bytes:
            raise WireError(f"{what or 'the message'} is over the limit of {self.limits.max_bytes} bytes")

    def count(self, number: int) -> None:
        self.items += number
        if self.items > self.limits.max_items:
            raise WireError(f"more than {self.limits.max_items} values in one message: send an array instead")

    def value(self, value: Any, depth: int) -> None:
        kind = type(value)
        if kind in _LEAVES:
            self.packer.pack(value)
        elif kind is int:
            self.integer(value)
        elif kind is dict or kind is list or kind is tuple:
            self.container(value, depth)
        else:
            try:
                self.other(value, depth)
            except _Refused as refused:
                # The reason belongs to this very value: one inside it has been replaced already.
                if not self.lossy or refused.path:
                    raise
                self.packer.pack(_not_sent(value))

    def integer(self, value: int) -> None:
        if -(1 << 63) <= value < 1 << 64:
            self.packer.pack(value)
            return
        size = value.bit_length() // 8 + 1
        if size <= _BIG_INT_BYTES:
            self.packer.pack_ext_type(BIG_INT, value.to_bytes(size, "little", signed=True))
        elif self.lossy:
            self.packer.pack(f"<not sent: int of {size} bytes>")
        else:
            raise _Refused(f"an integer of {size} bytes cannot be sent: at most {_BIG_INT_BYTES}")

    def container(self, value: dict[Any, Any] | list[Any] | tuple[Any, ...], depth: int) -> None:
        if depth >= self.limits.max_depth:
            if self.lossy:
                self.packer.pack(f"<not sent: nested deeper than {self.limits.max_depth}>")
                return
            raise _Refused(f"nested deeper than {self.limits.max_depth}")
        self.count(len(value))
        key: Any = None
        try:
            if isinstance(value, dict):
                self.packer.pack_map_header(len(value))
                for key, item in value.items():
                    self.key(key)
                    self.value(item, depth + 1)
            else:
                if isinstance(value, tuple):
                    self.packer.pack_array_header(len(value) + 1)
                    self.packer.pack_ext_type(TUPLE, b"\0")
                elif _all_plain(value):
                    self.packer.pack(value)
                    return
                else:
                    self.packer.pack_array_header(len(value))
                for key, item in enumerate(value):  # noqa: B007 (the except clause reads it)
                    self.value(item, depth + 1)
        except _Refused as refused:
            refused.path.append(f"[{_short(key)}]")
            raise

    def key(self, key: Any) -> None:
        if isinstance(key, _KEYS) and not isinstance(key, (enum.Enum, np.generic)):
            if not isinstance(key, int) or -(1 << 63) <= key < 1 << 64:
                self.value(key, 0)
                return
        elif isinstance(key, np.str_):
            self.packer.pack(str(key))
            return
        if not self.lossy:
            raise _Refused(f"a key of type {_type_name(key)} cannot be sent")
        self.packer.pack(_short(key))

    def other(self, value: Any, depth: int) -> None:
        if isinstance(value, Encoded):
            self.flush()
            self.parts += value.parts
            self.part_bytes += value.size
        elif isinstance(value, (np.ndarray, np.generic)):
            self.array(value)
        elif isinstance(value, enum.Enum):
            raise _Refused(f"{_short(value)} is an enum: send its value")
        elif isinstance(value, dict):
            self.container(dict(value), depth)
        elif isinstance(value, list):
            self.container(list(value), depth)
        elif isinstance(value, tuple):
            self.container(tuple(value), depth)
        elif isinstance(value, (bytes, bytearray, memoryview)):
            self.packer.pack(bytes(value))
        elif isinstance(value, complex):
            self.packer.pack_ext_type(COMPLEX, struct.pack("<dd", value.real, value.imag))
        elif isinstance(value, str):
            self.packer.pack(str.__str__(value))
        elif isinstance(value, int):
            self.integer(int.__index__(value))
        elif isinstance(value, float):
            self.packer.pack(float.__float__(value))
        else:
            raise _Refused(f"a value of type {_type_name(value)} cannot be sent")

    def array(self, value: np.ndarray[Any, Any] | np.generic[Any]) -> None:
        try:
            header, buffer = array_parts(value)
        except WireError as error:
            raise _Refused(str(error)) from None
        code = ARRAY if isinstance(value, np.ndarray) else SCALAR
        size = len(header) + len(buffer)
        if size <= _INLINE_BYTES:
            self.packer.pack_ext_type(code, b"".join((header, buffer)))
            return
        self.flush()
        self.room(size)
        self.add(struct.pack(">BIb", 0xC9, size, code) + header)
        self.add(buffer)


class _Reader:
    """Reads one value, never past the end, never more than the limits allow."""

    def __init__(self, view: memoryview, limits: Limits, copy: bool) -> None:
        self.view, self.limits, self.copy = view, limits, copy
        self.position = 0
        self.items = 0

    def take(self, size: int) -> memoryview:
        start = self.position
        end = start + size
        if end > len(self.view):
            raise WireError(f"{size} bytes were announced at byte {start}, {len(self.view) - start} came")
        self.position = end
        return self.view[start:end]

    def number(self, form: struct.Struct) -> Any:
        (number,) = form.unpack_from(self.view, self.position)
        self.position += form.size
        return number

    def value(self, depth: int) -> Any:
        tag = self.view[self.position]
        self.position += 1
        if tag <= 0x7F:
            return tag
        if tag >= 0xE0:
            return tag - 0x100
        if tag >= 0xC0:
            return _TAGS[tag](self, depth)
        if tag >= 0xA0:
            return self.text(tag & 0x1F)
        if tag >= 0x90:
            return self.array(tag & 0x0F, depth)
        return self.map(tag & 0x0F, depth)

    def text(self, size: int) -> str:
        try:
            return str(self.take(size), "utf-8", "surrogatepass")
        except UnicodeDecodeError as error:
            raise WireError(f"a string that ends at byte {self.position} is not UTF-8") from error

    def enter(self, count: int, least: int, depth: int) -> None:
        """Refuses ``count`` announced elements of at least ``least`` bytes before anything is made for them."""
        if depth >= self.limits.max_depth:
            raise WireError(f"the message is nested deeper than {self.limits.max_depth}")
        if count * least > len(self.view) - self.position:
            raise WireError(f"{count} elements were announced at byte {self.position}, the message is too short")
        self.items += count
        if self.items > self.limits.max_items:
            raise WireError(f"the message holds more than {self.limits.max_items} values")

    def array(self, count: int, depth: int) -> list[Any] | tuple[Any, ...]:
        self.enter(count, 1, depth)
        start = self.position
        if count and self.view[start : start + 2] == _TUPLE_MARK:
            self.position += len(_TUPLE_MARK) + 1
            return tuple([self.value(depth + 1) for _ in range(count - 1)])
        return [self.value(depth + 1) for _ in range(count)]

    def map(self, count: int, depth: int) -> dict[Any, Any]:
        self.enter(count, 2, depth)
        made: dict[Any, Any] = {}
        for _ in range(count):
            key = self.value(depth + 1)
            item = self.value(depth + 1)
            # Other hashable values would let a sender choose keys that all collide.
            if type(key) not in _KEY_TYPES or (type(key) is int and key.bit_length() > 64):
                raise WireError(f"a key of type {_type_name(key)} is not allowed")
            made[key] = item
        if len(made) != count:
            raise WireError("a map holds the same key twice")
        return made

    def extension(self, size: int) -> Any:
        code = self.number(_I8)
        payload = self.take(size)
        if code == ARRAY:
            return read_array(payload, copy=self.copy)
        if code == SCALAR:
            return read_scalar(payload)
        if code == BIG_INT:
            if size > _BIG_INT_BYTES:
                raise WireError(f"an integer of {size} bytes is not allowed: at most {_BIG_INT_BYTES}")
            return int.from_bytes(payload, "little", signed=True)
        if code == COMPLEX and size == 16:
            return complex(*struct.unpack("<dd", payload))
        raise WireError(f"a message may not hold an extension of type {code} and {size} bytes")

    def unknown(self, depth: int) -> Any:
        raise WireError(f"byte {self.position - 1} is no msgpack type")


_U8, _U16, _U32, _U64 = (struct.Struct(form) for form in (">B", ">H", ">I", ">Q"))
_I8, _I16, _I32, _I64 = (struct.Struct(form) for form in (">b", ">h", ">i", ">q"))
_F32, _F64 = struct.Struct(">f"), struct.Struct(">d")
_KEY_TYPES = frozenset(_KEYS)
_TUPLE_MARK = bytes((0xD4, TUPLE))  # then one byte of padding: ext types hold at least one

_TAGS: dict[int, Callable[[_Reader, int], Any]] = {
    0xC0: lambda reader, depth: None,
    0xC1: _Reader.unknown,
    0xC2: lambda reader, depth: False,
    0xC3: lambda reader, depth: True,
    0xC4: lambda reader, depth: bytes(reader.take(reader.number(_U8))),
    0xC5: lambda reader, depth: bytes(reader.take(reader.number(_U16))),
    0xC6: lambda reader, depth: bytes(reader.take(reader.number(_U32))),
    0xC7: lambda reader, depth: reader.extension(reader.number(_U8)),
    0xC8: lambda reader, depth: reader.extension(reader.number(_U16)),
    0xC9: lambda reader, depth: reader.extension(reader.number(_U32)),
    0xCA: lambda reader, depth: reader.number(_F32),
    0xCB: lambda reader, depth: reader.number(_F64),
    0xCC: lambda reader, depth: reader.number(_U8),
    0xCD: lambda reader, depth: reader.number(_U16),
    0xCE: lambda reader, depth: reader.number(_U32),
    0xCF: lambda reader, depth: reader.number(_U64),
    0xD0: lambda reader, depth: reader.number(_I8),
    0xD1: lambda reader, depth: reader.number(_I16),
    0xD2: lambda reader, depth: reader.number(_I32),
    0xD3: lambda reader, depth: reader.number(_I64),
    0xD4: lambda reader, depth: reader.extension(1),
    0xD5: lambda reader, depth: reader.extension(2),
    0xD6: lambda reader, depth: reader.extension(4),
    0xD7: lambda reader, depth: reader.extension(8),
    0xD8: lambda reader, depth: reader.extension(16),
    0xD9: lambda reader, depth: reader.text(reader.number(_U8)),
    0xDA: lambda reader, depth: reader.text(reader.number(_U16)),
    0xDB: lambda reader, depth: reader.text(reader.number(_U32)),
    0xDC: lambda reader, depth: reader.array(reader.number(_U16), depth),
    0xDD: lambda reader, depth: reader.array(reader.number(_U32), depth),
    0xDE: lambda reader, depth: reader.map(reader.number(_U16), depth),
    0xDF: lambda reader, depth: reader.map(reader.number(_U32), depth),
}


def _all_plain(value: list[Any]) -> bool:
    """Whether msgpack's own loop can be trusted with a list: it must not fail half-way, having written some of it."""
    kinds = set(map(type, value))
    return kinds <= _LEAVES or (kinds == {int} and min(value) >= -(1 << 63) and max(value) < 1 << 64)


def _type_name(value: Any) -> str:
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


class _Brief(reprlib.Repr):
    def __init__(self) -> None:
        super().__init__()
        self.maxother = self.maxstring = 200


def _short(value: Any) -> str:
    try:
        return _Brief().repr(value)[:200]
    except Exception:  # a repr that fails is no reason for a step to fail
        return f"<{_type_name(value)}>"


def _not_sent(value: Any) -> str:
    return f"<not sent: {_type_name(value)} {_short(value)}>"

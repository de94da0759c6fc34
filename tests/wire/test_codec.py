"""Values keep their type and every bit; what is hostile is refused before it costs anything."""

from __future__ import annotations

import collections
import enum
import math
import pickle
import random
import struct
import time
import tracemalloc

import msgpack
import numpy as np
import pytest

from prized_gym.wire import Encoded, Limits, WireError, decode, encodable, encode, encode_info, encode_parts
from tools.comparing import same

PLAIN = [
    None,
    True,
    False,
    0,
    1,
    -1,
    127,
    128,
    -32,
    -33,
    -128,
    -129,
    255,
    256,
    2**16,
    -(2**15) - 1,
    2**31,
    2**32,
    2**63,
    -(2**63),
    2**64 - 1,
    2**64,
    -(2**63) - 1,
    2**128 + 5,
    -(3**200),
    0.0,
    -0.0,
    1.5,
    math.inf,
    -math.inf,
    math.nan,
    5e-324,
    "",
    "a",
    "é漢\U0001f600",
    "\ud800 alone",
    "x" * 40,
    "x" * 300,
    "x" * 70_000,
    b"",
    b"\0\xff",
    b"x" * 300,
    b"x" * 70_000,
    1 + 2j,
    complex(math.inf, -0.0),
    (),
    (1,),
    (1, (2, [3, ()])),
    [],
    [()],
    [[], {}],
    list(range(20)),
    list(range(70_000)),
    [2**64, 1],
    [True, 1],
    {},
    {"a": 1, "b": [None]},
    {1: "x", None: 2, b"k": 3, 1.5: 4},
    {str(i): i for i in range(20)},
    dict.fromkeys(range(66_000)),
    tuple(range(20)),
]


@pytest.mark.parametrize("value", PLAIN, ids=lambda value: f"{type(value).__name__} {value!r:.30}")
def test_plain_values_come_back_with_their_type(value) -> None:
    assert same(decode(encode(value)), value)


def arrays() -> list[np.ndarray]:
    rng = np.random.default_rng(5)
    dtypes = [
        "?",
        "b",
        "h",
        "i",
        "q",
        "B",
        "H",
        "I",
        "Q",
        "e",
        "f",
        "d",
        "g",
        "F",
        "D",
        ">f4",
        ">i8",
        "S3",
        "U4",
        "M8[ns]",
        "m8[D]",
        "M8",
    ]
    made = []
    for name in dtypes:
        dtype = np.dtype(name)
        for shape in [(), (1,), (3, 2), (0,), (2, 0, 3), (5, 700)]:
            raw = rng.bytes(math.prod(shape) * dtype.itemsize)
            if dtype.kind in "bU" or name == "g":  # not every pattern of bits is a value
                made.append(np.zeros(shape, dtype))
            else:
                made.append(np.frombuffer(raw, dtype).reshape(shape) if raw else np.zeros(shape, dtype))
    big = np.arange(24, dtype=np.int32).reshape(2, 3, 4)
    return [
        *made,
        big.T,
        big[:, ::2],
        big[::-1],
        np.asfortranarray(big),
        np.array(["a", "bcd"]),
        np.array([b"a\0b", b"c"]),
    ]


@pytest.mark.parametrize("copy", [False, True])
def test_arrays_come_back_with_every_bit(copy: bool) -> None:
    values = arrays()
    back = decode(encode(values), copy=copy)
    for before, after in zip(values, back, strict=True):
        assert same(np.ascontiguousarray(before).reshape(before.shape), after), before.dtype
        assert after.flags.writeable == copy or after.size == 0


def test_large_arrays_are_views_of_the_message() -> None:
    message = encode({"a": np.arange(10_000)})
    array = decode(message)["a"]
    assert not array.flags.owndata
    assert not array.flags.writeable
    tracemalloc.start()
    decode(message)
    assert tracemalloc.get_traced_memory()[1] < 20_000
    tracemalloc.stop()


def test_scalars_come_back_with_their_type() -> None:
    values = [array.reshape(-1)[0] for array in arrays() if array.size and array.dtype.isnative]
    values += [np.float64(0.1), np.int64(-1), np.bool_(True), np.str_("é"), np.bytes_(b"a"), np.str_("")]
    back = decode(encode(values))
    for before, after in zip(values, back, strict=True):
        # Two types share one dtype where a long is a long long; a long double has padding, an empty string no width.
        assert before.dtype == after.dtype or before.dtype.itemsize == 0
        assert before.tobytes() == after.tobytes() or before == after


def test_subclasses_travel_as_their_base() -> None:
    Point = collections.namedtuple("Point", "x y")

    class Reward(float):
        pass

    class Name(str):
        pass

    class Count(int):
        pass

    value = {
        "p": Point(1, 2),
        "o": collections.OrderedDict(b=1),
        "d": collections.defaultdict(list, a=[1]),
        "r": Reward(1.5),
        "n": Name("x"),
        "c": Count(3),
        "b": bytearray(b"x"),
    }
    expected = {"p": (1, 2), "o": {"b": 1}, "d": {"a": [1]}, "r": 1.5, "n": "x", "c": 3, "b": b"x"}
    assert same(decode(encode(value)), expected)


class Colour(enum.Enum):
    RED = 1


class Number(enum.IntEnum):
    ONE = 1


class Opaque:
    def __repr__(self) -> str:
        return "<opaque>"


class Rude:
    def __repr__(self) -> str:
        raise RuntimeError("no repr")


REFUSED = [
    {1, 2},
    frozenset("a"),
    Colour.RED,
    Number.ONE,
    Opaque(),
    Rude(),
    object,
    lambda: 0,
    range(3),
    np.array([None]),
    np.zeros(2, [("a", "i4")]),
    np.void(b"abc"),
    np.ma.masked_array([1, 2], [True, False]),
    1 << 40_000,
    iter([]),
]


@pytest.mark.parametrize("value", REFUSED, ids=lambda value: type(value).__name__)
def test_what_cannot_be_sent_is_named_with_its_path(value) -> None:
    with pytest.raises(WireError, match=r"^obs\['a'\]\[2\]\['deep'\]: "):
        encode({"a": [0, 1, {"deep": value}]}, what="obs")
    with pytest.raises(WireError, match=r"^value\[1\]: "):
        encode((0, value))


@pytest.mark.parametrize("value", REFUSED, ids=lambda value: type(value).__name__)
def test_an_info_says_what_was_not_sent(value) -> None:
    info = {"a": [0, {"deep": value}, collections.OrderedDict(x=value)], "kept": (1, np.arange(3))}
    back = encodable(info)
    assert back["a"][1]["deep"].startswith("<not sent: ")
    assert back["a"][2]["x"].startswith("<not sent: ")
    assert len(back["a"][1]["deep"]) < 300
    assert same(back["kept"], (1, np.arange(3)))


def test_an_info_with_odd_keys_is_sent() -> None:
    assert encodable({(1, 2): 3, Colour.RED: 4, np.str_("s"): 5}) == {"(1, 2)": 3, "<Colour.RED: 1>": 4, "s": 5}
    with pytest.raises(WireError, match="a key of type tuple"):
        encode({(1, 2): 3})


def test_a_cycle_is_an_error_in_a_value_and_cut_in_an_info() -> None:
    for cycle in ([], {}):
        cycle.append(cycle) if isinstance(cycle, list) else cycle.update(me=cycle)
        with pytest.raises(WireError, match="nested deeper than 64"):
            encode(cycle)
        assert b"nested deeper" in encode_info({"cycle": cycle})
    broad: list = []
    broad.extend([broad] * 50)
    with pytest.raises(WireError, match="values in one message"):
        encode_info(broad)


def test_encoded_values_nest() -> None:
    array = np.arange(5000)
    inner = encode_parts({"x": array, "t": (1, 2)})
    assert isinstance(inner, Encoded) and inner.size == len(bytes(inner))
    outer = encode_parts({"steps": [inner, inner], "reset": inner.owned()})
    assert outer.size == len(bytes(outer))
    back = decode(bytes(outer))
    assert same(back["steps"][1], decode(bytes(inner)))
    assert same(back["reset"]["t"], (1, 2))
    array[0] = 7  # sent as it is when it is sent, but for what is owned
    later = decode(bytes(outer))
    assert (later["steps"][0]["x"][0], later["reset"]["x"][0]) == (7, 0)


def test_the_parts_of_a_lossy_message() -> None:
    assert bytes(encode_parts({"a": {1}}, lossy=True)) == encode_info({"a": {1}})
    with pytest.raises(WireError, match=r"^obs\['a'\]: "):
        encode_parts({"a": {1}}, what="obs")
    with pytest.raises(WireError, match="over the limit of 100 bytes"):
        encode_parts([encode_parts(b"x" * 99)] * 2, limits=Limits(max_bytes=100))


def test_the_size_limit_holds_while_writing() -> None:
    with pytest.raises(WireError, match="over the limit of 1000 bytes"):
        encode({"a": np.zeros(10_000)}, limits=Limits(max_bytes=1000))
    with pytest.raises(WireError, match="over the limit of 1000 bytes"):
        encode("x" * 2000, limits=Limits(max_bytes=1000))
    with pytest.raises(WireError, match="message of 2003 bytes"):
        decode(encode("x" * 2000), limits=Limits(max_bytes=1000))


def random_value(rng: random.Random, depth: int = 4):
    kinds = ["leaf"] * 4 + (["list", "tuple", "dict"] if depth else [])
    kind = rng.choice(kinds)
    if kind == "leaf":
        return rng.choice(
            [rng.choice(PLAIN[:45]), np.arange(rng.randrange(6)), np.float32(rng.random()), rng.getrandbits(100)]
        )
    items = [random_value(rng, depth - 1) for _ in range(rng.randrange(5))]
    if kind == "dict":
        return {f"k{i}": item for i, item in enumerate(items)}
    return items if kind == "list" else tuple(items)


def test_random_values() -> None:
    rng = random.Random(1)
    for _ in range(500):
        value = random_value(rng)
        assert same(decode(encode(value)), value)
        assert same(decode(encode_info(value), copy=True), value)


def test_other_msgpack_writers_are_understood() -> None:
    value = {"a": [1, -5, 2**40, 1.5, None, True, "x" * 500, b"y" * 500], "b": {"c": list(range(1000))}}
    assert decode(msgpack.packb(value)) == value
    assert decode(msgpack.packb(1.5, use_single_float=True)) == 1.5
    assert msgpack.unpackb(encode(value)) == value


# Hostile input


def test_every_truncation_and_any_trailing_byte_is_refused() -> None:
    message = encode(
        {"a": [1, 1.5, "text", b"bytes", (1, 2), 2**70, None], "n": np.arange(4), "s": np.float32(1), "c": 1j}
    )
    for end in range(len(message)):
        with pytest.raises(WireError):
            decode(message[:end])
    with pytest.raises(WireError, match="1 bytes follow"):
        decode(message + b"\0")


def test_random_bytes_and_bit_flips_give_a_value_or_a_wire_error() -> None:
    rng = random.Random(2)
    message = encode(
        {"a": [1, 1.5, "text", (1, 2)], "n": np.arange(40.0), "t": np.array(["a"]), "s": np.datetime64(5, "s")}
    )
    for _ in range(5000):
        raw = bytearray(message if rng.random() < 0.7 else rng.randbytes(rng.randrange(1, 60)))
        for _ in range(rng.randrange(1, 5)):
            raw[rng.randrange(len(raw))] = rng.randrange(256)
        try:
            decode(bytes(raw))
        except WireError:
            pass


def array_message(dtype: bytes, shape: tuple[int, ...], payload: bytes = b"", code: int = 1) -> bytes:
    data = bytes([len(dtype)]) + dtype + bytes([len(shape)]) + struct.pack(f"<{len(shape)}Q", *shape) + payload
    return msgpack.packb(msgpack.ExtType(code, data))


HOSTILE = {
    "a list of four billion": b"\xdd\xff\xff\xff\xff",
    "a map of four billion": b"\xdf\xff\xff\xff\xff",
    "a string of four gigabytes": b"\xdb\xff\xff\xff\xff",
    "bytes of four gigabytes": b"\xc6\xff\xff\xff\xff",
    "an extension of four gigabytes": b"\xc9\xff\xff\xff\xff\x01",
    "lists in lists": b"\x91" * 100_000 + b"\xc0",
    "maps in maps": b"\x81\xa1a" * 100_000 + b"\xc0",
    "tuples in tuples": b"\x92\xd4\x04\x00" * 100_000 + b"\xc0",
    "nested lists that each announce all the rest": b"".join(
        b"\xdd" + struct.pack(">I", 90_000 - 5 * i) for i in range(60)
    )
    + b"\xc0" * 90_000,
    "millions of empty lists": b"\xdd\x00\x20\x00\x00" + b"\x90" * 0x200000,
    "millions of empty maps": b"\xdd\x00\x20\x00\x00" + b"\x80" * 0x200000,
    "a huge shape without a buffer": array_message(b"<f8", (2**40, 2**20)),
    "a shape that overflows to nothing": array_message(b"<f8", (2**32, 2**32)),
    "a shape of 2**64 - 1": array_message(b"|u1", (2**64 - 1,)),
    "an empty array beyond any address": array_message(b"<f8", (0, 2**63)),
    "a shape larger than its buffer": array_message(b"<f4", (3,), b"\0" * 8),
    "a shape smaller than its buffer": array_message(b"<f4", (1,), b"\0" * 8),
    "two hundred dimensions": array_message(b"<f4", (1,) * 200, b"\0" * 4),
    "forty dimensions": array_message(b"<f4", (1,) * 40, b"\0" * 4),
    "a scalar with dimensions": array_message(b"<f4", (1,), b"\0" * 4, code=2),
    "objects": array_message(b"|O", (1,), b"\0" * 8),
    "objects, plainly": array_message(b"object", (1,), b"\0" * 8),
    "structures": array_message(b"i4,O", (1,), b"\0" * 12),
    "sub-arrays": array_message(b"(100000,100000)f4", (1,), b"\0" * 4),
    "void": array_message(b"|V8", (1,), b"\0" * 8),
    "strings without width": array_message(b"<U0", (2**62,)),
    "a dtype that is none": array_message(b"f4; import os", (1,), b"\0" * 4),
    "a dtype that is not ASCII": array_message(b"\xff\xfe", (1,), b"\0" * 4),
    "a time in odd units": array_message(b"<M8[999999999s]", (1,), b"\0" * 8),
    "an empty extension": b"\xc7\x00\x01",
    "an unknown extension": msgpack.packb(msgpack.ExtType(99, b"abc")),
    "msgpack's time": msgpack.packb(msgpack.Timestamp(1)),
    "a tuple's mark alone": b"\xd4\x04\x00",
    "a tuple's mark in the middle": b"\x92\x01\xd4\x04\x00",
    "a tuple's mark as a key": b"\x81\xd4\x04\x00\x01",
    "an integer of a megabyte": msgpack.packb(msgpack.ExtType(3, b"\x7f" * (1 << 20))),
    "half a complex": msgpack.packb(msgpack.ExtType(5, b"\0" * 8)),
    "a list as a key": b"\x81\x90\x01",
    "an array as a key": b"\x81" + array_message(b"<f4", (1,), b"\0" * 4) + b"\x01",
    "a huge integer as a key": b"\x81" + msgpack.packb(msgpack.ExtType(3, b"\x7f" * 100)) + b"\x01",
    "the same key twice": b"\x82\xa1a\x01\xa1a\x02",
    "not UTF-8": b"\xa2\xff\xfe",
    "the byte that is no type": b"\xc1",
    "nothing": b"",
    "a pickle": pickle.dumps({"obs": 1}),
    "a pickle that runs": b"cos\nsystem\n(S'exit 1'\ntR.",
    "JSON": b'{"obs": 1}',
    "HTML": b"<html>502 Bad Gateway</html>",
}


@pytest.mark.parametrize("message", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_messages_are_refused_at_once(message: bytes) -> None:
    started = time.process_time()
    tracemalloc.start()
    try:
        with pytest.raises(WireError):
            decode(message)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 4 << 20
    assert time.process_time() - started < 2

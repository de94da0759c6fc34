"""A space comes back equal and draws the same samples; a sample comes back with every bit; hostile data is refused."""

from __future__ import annotations

import random
import re
import time
import tracemalloc

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

from prized_gym.wire import WireError, check, decode, default_value, encode, space_from_data, space_to_data
from tools.comparing import same
from zoo.spaces import SPACES, random_space


def rebuilt(space: gym.Space) -> gym.Space:
    return space_from_data(decode(encode(space_to_data(space))))


def same_space(a: gym.Space, b: gym.Space) -> None:
    """Equal, and equal where Gymnasium's == does not look."""
    assert a == b
    assert type(a) is type(b)
    assert a.dtype == b.dtype
    assert repr(a) == repr(b)
    if isinstance(a, spaces.Box):
        for name in ("low", "high", "bounded_below", "bounded_above"):
            assert same(getattr(a, name), getattr(b, name))
    for name in ("spaces", "node_space", "edge_space", "feature_space"):
        inner, other = getattr(a, name, None), getattr(b, name, None)
        if isinstance(inner, dict):
            assert list(inner) == list(other)
            assert a.sort_keys == b.sort_keys
            inner, other = inner.values(), other.values()
        if isinstance(inner, gym.Space):
            inner, other = [inner], [other]
        for one, another in zip(inner or (), other or (), strict=True):
            same_space(one, another)


def same_samples(space: gym.Space, other: gym.Space, count: int = 5) -> None:
    space.seed(7)
    other.seed(7)
    for _ in range(count):
        sample = space.sample()
        assert same(sample, other.sample())
        back = check(space, decode(encode(sample), copy=True), "sample")
        if sample is not None and not isinstance(sample, spaces.GraphInstance):
            assert type(back) is type(sample)
        assert same(back, sample), sample


@pytest.mark.filterwarnings("ignore:.*Box (low|high)'s precision lowered:UserWarning")
@pytest.mark.parametrize("space", SPACES.values(), ids=SPACES.keys())
def test_every_kind_of_space(space: gym.Space) -> None:
    other = rebuilt(space)
    same_space(space, other)
    same_samples(space, other)


def test_random_nested_spaces() -> None:
    rng = random.Random(3)
    for _ in range(60):
        space = random_space(rng)
        other = rebuilt(space)
        same_space(space, other)
        same_samples(space, other, 2)


@pytest.mark.parametrize("space", SPACES.values(), ids=SPACES.keys())
def test_the_default_value_is_in_the_space(space: gym.Space) -> None:
    value = default_value(space)
    if not (
        isinstance(space, spaces.Sequence) and space.stack
    ):  # Gymnasium cannot iterate over an empty stack of dicts
        assert space.contains(value)
    assert same(value, default_value(space))
    assert same(check(space, value), value)


def test_an_image_space_is_small_on_the_wire() -> None:
    assert len(encode(space_to_data(spaces.Box(0, 255, (210, 160, 3), np.uint8)))) < 300


def test_a_space_of_another_kind_is_named_with_its_path() -> None:
    class Mission(spaces.Space):
        pass

    with pytest.raises(WireError, match=r"^space\['a'\]\[1\]: a space of type .*Mission cannot be sent"):
        space_to_data(spaces.Dict({"a": spaces.Tuple((spaces.Discrete(2), Mission()))}))


def test_a_subclass_travels_as_its_base() -> None:
    class Angle(spaces.Box):
        pass

    assert rebuilt(Angle(-1, 1, (2,))) == spaces.Box(-1, 1, (2,))


BOX = space_to_data(spaces.Box(-1, 1, (3,)))
DISCRETE = space_to_data(spaces.Discrete(4))


def nested(data: dict, times: int) -> dict:
    for _ in range(times):
        data = {"type": "Tuple", "spaces": [data]}
    return data


BOX_TYPES = {"type": "Box", "bounded_below": np.True_, "bounded_above": np.True_}
HOSTILE = {
    "no dict": [1, 2],
    "nothing": None,
    "no type": {},
    "an unknown type": {"type": "Hyperspace"},
    "a type that is an attribute": {"type": "__class__"},
    "a huge box": BOX | {"shape": [2**39, 2**39], "low": np.float32(0), "high": np.float32(1)},
    "a box of a gigabyte": BOX | {"shape": [2**28], "low": np.float32(0), "high": np.float32(1)},
    "many boxes": {
        "type": "Tuple",
        "spaces": [BOX | {"shape": [2**22], "low": np.float32(0), "high": np.float32(1)}] * 50,
    },
    "a negative shape": BOX | {"shape": [-3]},
    "a shape of floats": BOX | {"shape": [3.0]},
    "a shape of many dimensions": BOX | {"shape": [1] * 100},
    "bounds of another shape": BOX | {"shape": [4], "low": np.full(3, -1, np.float32)},
    "bounds of another dtype": BOX | {"low": np.zeros(3)},
    "NaN bounds": BOX | {"low": np.float32(np.nan)},
    "a NaN among the bounds": BOX | {"high": np.array([1, np.nan, 1], np.float32)},
    "low above high": BOX | {"low": np.float32(2)},
    "a box of objects": BOX | {"dtype": "|O"},
    "a box of strings": BOX | {"dtype": "<U5"},
    "a box of complex": BOX | {"dtype": "<c8"},
    "bounds that are text": BOX | {"low": "0"},
    "flags that are floats": BOX | {"bounded_below": np.float32(1)},
    "a negative n": DISCRETE | {"n": -1},
    "no n": DISCRETE | {"n": 0},
    "a huge n": DISCRETE | {"n": 2**80},
    "an n that is true": DISCRETE | {"n": True},
    "an n of NaN": DISCRETE | {"n": float("nan")},
    "a start out of range": DISCRETE | {"start": -(2**70)},
    "a discrete of floats": DISCRETE | {"dtype": "<f4"},
    "an n beyond its dtype": DISCRETE | {"n": 300, "dtype": "|i1"},
    "an nvec of floats": {"type": "MultiDiscrete", "nvec": np.ones(2), "start": np.zeros(2)},
    "an nvec of zeros": {"type": "MultiDiscrete", "nvec": np.zeros(2, int), "start": np.zeros(2, int)},
    "a start of another shape": {"type": "MultiDiscrete", "nvec": np.ones(2, int), "start": np.zeros(3, int)},
    "an nvec that is a list": {"type": "MultiDiscrete", "nvec": [1, 2], "start": [0, 0]},
    "a huge multi-binary": {"type": "MultiBinary", "n": 2**40},
    "a huge multi-binary shape": {"type": "MultiBinary", "n": [2**30, 2**30]},
    "a negative multi-binary": {"type": "MultiBinary", "n": -5},
    "text without end": {"type": "Text", "min_length": 0, "max_length": 2**70, "charset": "a"},
    "text of negative length": {"type": "Text", "min_length": -1, "max_length": 5, "charset": "a"},
    "text that ends before it begins": {"type": "Text", "min_length": 9, "max_length": 5, "charset": "a"},
    "a charset of numbers": {"type": "Text", "min_length": 0, "max_length": 5, "charset": [1, 2]},
    "a dict without pairs": {"type": "Dict", "spaces": {"a": BOX}, "sort_keys": True},
    "a dict of triples": {"type": "Dict", "spaces": [["a", BOX, 1]], "sort_keys": True},
    "a dict of odd keys": {"type": "Dict", "spaces": [[[1], BOX]], "sort_keys": True},
    "a dict of equal keys": {"type": "Dict", "spaces": [["a", BOX], ["a", BOX]], "sort_keys": True},
    "one of none": {"type": "OneOf", "spaces": []},
    "a sequence of nothing": {"type": "Sequence", "space": None, "stack": True},
    "a graph of nothing": {"type": "Graph", "node": None, "edge": None},
    "a graph of half": {"type": "Graph", "node": DISCRETE, "edge": 5},
    "a graph of graphs": {"type": "Graph", "node": {"type": "Graph", "node": 1, "edge": None}, "edge": None},
    "deep nesting": nested(BOX, 40),
    "very many spaces": {"type": "Tuple", "spaces": [DISCRETE] * 20_000},
}


@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_spaces_are_refused_at_once(data) -> None:
    started = time.process_time()
    tracemalloc.start()
    try:
        with pytest.raises(WireError):
            space_from_data(data)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 512 << 20
    assert time.process_time() - started < 5


def test_garbled_spaces_give_a_space_or_a_wire_error() -> None:
    rng = random.Random(4)
    junk = [None, -1, 2**70, 1.5, "x", [], {}, np.zeros(3), np.float32(np.nan), True, ["a", "b"], "<f4"]

    def garble(data):
        if isinstance(data, dict) and data:
            key = rng.choice(list(data))
            return data | {key: garble(data[key]) if rng.random() < 0.5 else rng.choice(junk)}
        if isinstance(data, list) and data:
            index = rng.randrange(len(data))
            return [*data[:index], garble(data[index]), *data[index + 1 :]]
        return rng.choice(junk)

    for _ in range(1500):
        space = rng.choice(list(SPACES.values())) if rng.random() < 0.5 else random_space(rng)
        try:
            assert isinstance(space_from_data(garble(space_to_data(space))), gym.Space)
        except WireError:
            pass


# The check of a value


def test_a_dtype_of_the_same_kind_is_converted() -> None:
    back = check(spaces.Box(-1, 1, (2,)), np.array([0.5, 1e300]))
    assert same(back, np.array([0.5, np.inf], np.float32))
    assert same(check(spaces.Box(-1, 1, (2,)), [0.5, 1]), np.array([0.5, 1], np.float32))
    assert same(check(spaces.Box(-1, 1, ()), 0.5), np.array(0.5, np.float32))
    assert same(check(spaces.MultiBinary(2), np.array([True, False])), np.array([1, 0], np.int8))
    assert same(check(spaces.Discrete(3), 2), np.int64(2))
    assert same(check(spaces.Discrete(3, dtype=np.int8), np.array(2)), np.int8(2))
    assert same(check(spaces.Tuple((spaces.Discrete(2),)), [1]), (np.int64(1),))
    assert check(spaces.Box(-1, 1, (1,)), np.array([5.0], np.float32)) == 5  # bounds are the environment's affair


def test_a_dict_comes_back_in_the_order_of_its_space() -> None:
    space = spaces.Dict({"b": spaces.Discrete(2), "a": spaces.Discrete(2)}, sort_keys=False)
    assert list(check(space, {"a": 0, "b": 1})) == ["b", "a"]


NESTED = spaces.Dict({"cam": spaces.Tuple((spaces.Discrete(2), spaces.Box(0, 1, (3,))))})
GRAPH = spaces.Graph(spaces.Box(0, 1, (2,)), spaces.Discrete(3))
LINKS = np.zeros((1, 2), np.int32)
WRONG = [
    (
        NESTED,
        {"cam": (0, np.zeros(2, np.int64))},
        "obs['cam'][1]: expected float32 of shape (3,), got int64 of shape (2,)",
    ),
    (NESTED, {"cam": (0,)}, "obs['cam']: expected a tuple of 2, got tuple of length 1"),
    (NESTED, {}, "obs: missing keys ['cam']"),
    (NESTED, {"cam": (0, np.zeros(3)), "x": 1}, "obs: missing keys [], keys not in the space ['x']"),
    (NESTED, [1], "obs: expected a dict with 1 keys, got list of length 1"),
    (NESTED, {"cam": (1.5, np.zeros(3))}, "obs['cam'][0]: expected an integer of int64, got float 1.5"),
    (spaces.Box(0, 255, (2,), np.uint8), np.zeros(2), "obs: expected uint8 of shape (2,), got float64 of shape (2,)"),
    (spaces.Box(0, 255, (2,), np.uint8), np.zeros(2, np.int8), "obs: expected uint8 of shape (2,), got int8"),
    (spaces.Box(0, 1, (2,)), np.array(["a", "b"]), "obs: expected float32 of shape (2,), got <U1"),
    (spaces.Box(0, 1, (2,)), [[1], 2], "obs: expected float32 of shape (2,), got a ragged list"),
    (spaces.Box(0, 1, (2,)), [10**400, 2], "obs: expected float32 of shape (2,), got "),
    (spaces.Box(0, 1, (2,)), "ab", "obs: expected float32 of shape (2,), got str of length 2"),
    (spaces.Box(0, 1, (2,)), None, "obs: expected float32 of shape (2,), got NoneType"),
    (spaces.Box(0, 1, (2,)), {"x": 1}, "obs: expected float32 of shape (2,), got dict of length 1"),
    (spaces.Box(0, 1, (2,)), np.array(["NaT", "NaT"], "M8[s]"), "obs: expected float32"),
    (spaces.Discrete(3), 2**70, "obs: expected an integer of int64, got int"),
    (spaces.Discrete(3), np.array([1]), "obs: expected an integer of int64, got int64 of shape (1,)"),
    (spaces.Discrete(3), np.timedelta64(1), "obs: expected an integer of int64"),
    (spaces.MultiDiscrete([2, 2]), np.zeros(2), "obs: expected int64 of shape (2,), got float64"),
    (spaces.Text(3), "long text", "obs: expected text of at most 3 characters, got str of length 9"),
    (spaces.Text(3), b"ab", "obs: expected text of at most 3 characters, got bytes of length 2"),
    (spaces.OneOf((spaces.Discrete(2),)), (1, 0), "obs[0]: expected an index below 1"),
    (spaces.OneOf((spaces.Discrete(2),)), (0, "a"), "obs[1]: expected an integer of int64, got str"),
    (spaces.Sequence(spaces.Discrete(2)), 5, "obs: expected a tuple, got int"),
    (spaces.Sequence(spaces.Discrete(2)), (0, 1, "x"), "obs[2]: expected an integer"),
    (
        spaces.Sequence(spaces.Box(0, 1, (2,)), stack=True),
        np.zeros((4, 3), np.float32),
        "obs: expected float32 of shape (4, 2)",
    ),
    (
        spaces.Sequence(NESTED, stack=True),
        {"cam": (np.zeros(3, int), np.zeros((2, 3), np.float32))},
        "obs['cam'][1]: expected",
    ),
    (spaces.Sequence(spaces.Discrete(2), stack=True), np.array(1), "obs: expected a batch of Discrete"),
    (GRAPH, (np.zeros((3, 2)), None), "obs: expected a tuple of 3"),
    (GRAPH, (np.zeros((3, 1)), None, None), "obs.nodes: expected float32 of shape (3, 2)"),
    (GRAPH, (np.zeros((3, 2)), np.zeros(1, int), None), "obs.edge_links: expected integers of shape (1, 2)"),
    (GRAPH, (np.zeros((3, 2)), np.zeros(1, int), LINKS + 3), "obs.edge_links: an edge ends at a node"),
    (GRAPH, (np.zeros((3, 2)), np.zeros(1, int), LINKS - 1), "obs.edge_links: an edge ends at a node"),
    (
        spaces.Graph(spaces.Discrete(2), None),
        (np.zeros(2, int), np.zeros(1, int), LINKS),
        "obs.edges: the space has no edges",
    ),
]


@pytest.mark.parametrize(("space", "value", "message"), WRONG, ids=[message[:60] for *_, message in WRONG])
def test_a_wrong_value_is_named_with_what_was_expected_and_got(space: gym.Space, value, message: str) -> None:
    with pytest.raises(WireError, match="^" + re.escape(message)):
        check(space, value, "obs")

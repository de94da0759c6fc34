"""How observations and actions lie in memory: the same values, dtypes and structure as Gymnasium batches them in."""

from __future__ import annotations

import copy
import random
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector.utils import batch_space, concatenate, create_empty_array, iterate

from prized_gym.batch import ActionBuffer, ObservationBuffer, assemble, is_bare_array, leaves
from tools.comparing import same
from zoo.spaces import SPACES, random_space

EVERY = pytest.mark.parametrize("space", SPACES.values(), ids=SPACES.keys())
NESTED = spaces.Dict(
    {"b": spaces.Tuple([spaces.Box(-1, 1, (2,), np.float32), spaces.Text(4)]), "a": spaces.Discrete(5)}
)


def samples(space: gym.Space[Any], count: int, seed: int = 0) -> list[Any]:
    space = copy.deepcopy(space)
    space.seed(seed)
    return [space.sample() for _ in range(count)]


def parts(space: gym.Space[Any], value: Any) -> list[Any]:
    return [leaf.pick(value) for leaf in leaves(space)]


def stored(space: gym.Space[Any], values: list[Any]) -> ObservationBuffer:
    buffer = ObservationBuffer(space, len(values))
    for index, value in enumerate(values):
        buffer.store_objects(index, buffer.write(index, value))
    return buffer


def batched(space: gym.Space[Any], values: list[Any]) -> Any:
    """What Gymnasium makes of these values."""
    return concatenate(space, values, create_empty_array(space, len(values)))


# Leaves


def test_leaves_are_found_depth_first_in_the_order_of_the_space() -> None:
    found = leaves(NESTED)
    assert [(leaf.path, leaf.keys, leaf.is_array) for leaf in found] == [
        (".a", ("a",), True),
        (".b[0]", ("b", 0), True),
        (".b[1]", ("b", 1), False),
    ]
    assert [(leaf.shape, leaf.dtype) for leaf in found] == [((), np.int64), ((2,), np.float32), ((), np.dtype(object))]


def test_a_leaf_keeps_the_dtype_its_space_had() -> None:
    space = spaces.Box(-1, 1, (2,), np.float64)
    [leaf] = leaves(space)
    space.dtype = np.dtype(np.float32)
    assert leaf.dtype == np.float64


@pytest.mark.parametrize(
    ("space", "bare"),
    [
        (spaces.Box(-1, 1, (2,)), True),
        (spaces.Discrete(3), True),
        (spaces.Text(3), False),
        (spaces.Tuple((spaces.Discrete(3),)), False),
        (spaces.Dict({}), False),
    ],
)
def test_a_space_is_one_array_only_with_nothing_around_it(space: gym.Space[Any], bare: bool) -> None:
    assert is_bare_array(leaves(space)) is bare


@EVERY
def test_a_value_taken_apart_is_put_together_again(space: gym.Space[Any]) -> None:
    [value] = samples(space, 1)
    assert same(assemble(space, parts(space, value)), value)


# Observations


@EVERY
def test_a_batch_is_what_gymnasium_makes_of_it(space: gym.Space[Any]) -> None:
    values = samples(space, 3)
    buffer = stored(space, values)
    expected = batched(space, values)
    assert same(buffer.batch(copy=True), expected)
    assert same(buffer.batch(copy=False), expected)
    assert same(buffer.rows([2, 0]), batched(space, [values[2], values[0]]))
    for index, value in enumerate(values):
        # A 0-d array comes out as the scalar it is.
        assert same(
            parts(space, buffer.one(index)), [v[()] if isinstance(v, np.ndarray) else v for v in parts(space, value)]
        )


@EVERY
def test_a_writer_stores_what_write_stores(space: gym.Space[Any]) -> None:
    values = samples(space, 2)
    buffer = ObservationBuffer(space, 2)
    for index, value in enumerate(values):
        buffer.store_objects(index, buffer.writer(index)(value))
    assert same(buffer.batch(copy=True), batched(space, values))


def test_random_nested_spaces_batch_as_gymnasium_batches_them() -> None:
    rng = random.Random(1)
    for number in range(40):
        space = random_space(rng)
        values = samples(space, 2, number)
        buffer = stored(space, values)
        assert same(buffer.batch(copy=True), batched(space, values)), space
        buffer.move(0, 1)
        assert same(buffer.batch(copy=True), batched(space, [values[0], values[0]])), space


def test_before_any_observation_a_batch_holds_what_gymnasium_starts_from() -> None:
    for name in ("box", "discrete_start", "multibinary", "text", "nested"):
        space = SPACES[name]
        expected = create_empty_array(space, 2)
        assert same(ObservationBuffer(space, 2).batch(copy=True), expected), name


def test_only_a_view_follows_what_is_stored_later() -> None:
    buffer = stored(NESTED, samples(NESTED, 2))
    mine, view, rows, one = buffer.batch(copy=True), buffer.batch(copy=False), buffer.rows([0]), buffer.one(0)
    before = copy.deepcopy((mine, rows, one))
    buffer.write(0, {"a": 4, "b": (np.full(2, 9, np.float32), "x")})
    assert view["a"][0] == 4 and view["b"][0][0].tolist() == [9, 9]
    assert same((mine, rows, one), before)


def test_object_leaves_are_copied_on_the_way_out() -> None:
    space = spaces.Graph(spaces.Box(-1, 1, (2,)), None)
    buffer = stored(space, samples(space, 2))
    first = buffer.one(0).nodes.copy()
    for taken in (buffer.batch(copy=True)[0], buffer.rows([0])[0], buffer.one(0)):
        taken.nodes[:] = 7
    buffer.move(0, 1)
    buffer.objects[0][1].nodes[:] = 8
    assert buffer.one(0).nodes.tobytes() == first.tobytes()


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (np.array([0.1, 0.2, 0.3]), np.array([0.1, 0.2, 0.3], np.float32)),
        (np.array([1, 0, 1], np.int8), np.array([1, 0, 1], np.float32)),
        ([1, 2.5, 3], np.array([1, 2.5, 3], np.float32)),
        (np.array([True, False, True]), np.array([1, 0, 1], np.float32)),
    ],
)
def test_what_numpy_casts_by_same_kind_is_cast(given: Any, kept: np.ndarray[Any, Any], fast: bool) -> None:
    buffer = ObservationBuffer(spaces.Box(-5, 5, (3,), np.float32), 2)
    write = buffer.writer(1) if fast else lambda value: buffer.write(1, value)
    assert write(given) == []
    assert same(buffer.batch(copy=True)[1], kept)
    assert not buffer.batch(copy=True)[0].any()


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize(
    ("space", "bad", "error", "message"),
    [
        (
            spaces.Box(-1, 1, (3,)),
            np.zeros(2, np.float32),
            ValueError,
            r"^observation has shape \(2,\), .*shape \(3,\)$",
        ),
        (spaces.Box(-1, 1, (3,)), np.zeros((1, 3), np.float32), ValueError, r"has shape \(1, 3\)"),
        (spaces.Box(-1, 1, (3,)), np.zeros(3, np.complex64), TypeError, "dtype complex64, which does not fit"),
        (spaces.Box(0, 9, (3,), np.uint8), np.zeros(3, np.float32), TypeError, "dtype float32, which does not fit"),
        (spaces.Box(-1, 1, (3,)), None, ValueError, r"has shape \(\)"),
        (spaces.Discrete(3), np.zeros(1, np.int64), ValueError, r"has shape \(1,\), .*has shape \(\)"),
    ],
)
def test_an_observation_that_does_not_fit_is_named_and_not_stored(
    space: gym.Space[Any], bad: Any, error: type[Exception], message: str, fast: bool
) -> None:
    buffer = stored(space, samples(space, 2))
    before = buffer.batch(copy=True)
    with pytest.raises(error, match=message):
        (buffer.writer(1) if fast else lambda value: buffer.write(1, value))(bad)
    assert same(buffer.batch(copy=True), before)


def test_a_faulty_part_leaves_the_whole_last_observation() -> None:
    buffer = stored(NESTED, samples(NESTED, 1))
    before = buffer.one(0)
    with pytest.raises(ValueError, match=r"^observation\.b\[0\] has shape \(3,\)"):
        buffer.write(0, {"a": 1, "b": (np.zeros(3, np.float32), "x")})
    with pytest.raises(KeyError):
        buffer.write(0, {"a": 1})
    with pytest.raises(IndexError):
        buffer.write(0, {"a": 1, "b": (np.zeros(2, np.float32),)})
    assert same(buffer.one(0), before)


def test_memory_is_asked_for_once_per_array_leaf() -> None:
    asked = []

    def allocate(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
        asked.append((shape, dtype))
        return np.zeros(shape, dtype)

    ObservationBuffer(NESTED, 5, allocate)
    assert asked == [((5,), np.int64), ((5, 2), np.float32)]
    asked.clear()
    ActionBuffer(NESTED, 5, allocate)
    # Room for any numeric dtype, and a code per copy that says which.
    assert asked == [((5, 16), np.uint8), ((5, 32), np.uint8), ((5,), np.uint8), ((5,), np.uint8)]


# Actions


@pytest.mark.parametrize("dtype", ["?", "b", "B", "h", "H", "i", "I", "l", "q", "e", "f", "d", "g", "F", "D"])
def test_an_action_arrives_in_the_dtype_it_was_given_in(dtype: str) -> None:
    buffer = ActionBuffer(spaces.Box(-1, 1, (2, 3), np.float32), 4)
    given = (np.arange(24).reshape(4, 2, 3) % 2).astype(dtype)
    buffer.write([given])
    for index in range(4):
        assert same(buffer.read(index), [given[index]])
        assert same(buffer.reader(index)([]), given[index])


def test_a_scalar_action_is_a_numpy_scalar() -> None:
    buffer = ActionBuffer(spaces.Discrete(5), 2)
    buffer.write([np.array([3, 4], np.int32)])
    assert same(buffer.reader(1)([]), np.int32(4))
    assert same(buffer.read(0), [np.int32(3)])


def test_copies_can_be_sent_actions_of_different_dtypes() -> None:
    buffer = ActionBuffer(spaces.Box(-1, 1, (2,)), 4)
    readers = [buffer.reader(index) for index in range(4)]
    buffer.write([np.ones((4, 2), np.float32)])
    buffer.write_some([np.full((2, 2), 2.5)], np.array([1, 3]))
    assert [reader([]).dtype for reader in readers] == [np.float32, np.float64, np.float32, np.float64]
    assert [reader([]).tolist() for reader in readers] == [[1, 1], [2.5, 2.5], [1, 1], [2.5, 2.5]]
    # The whole batch once more in the dtype of the first: no row keeps the code of the second.
    buffer.write([np.zeros((4, 2), np.float32)])
    assert {reader([]).dtype for reader in readers} == {np.dtype(np.float32)}


def test_what_was_read_stays_when_the_next_action_is_written() -> None:
    buffer = ActionBuffer(spaces.MultiDiscrete([5, 5]), 1)
    buffer.write([np.array([[1, 2]])])
    [read], quick = buffer.read(0), buffer.reader(0)([])
    buffer.write([np.array([[3, 4]])])
    assert read.tolist() == quick.tolist() == [1, 2]


@EVERY
def test_actions_of_every_space_arrive_as_gymnasium_would_pass_them(space: gym.Space[Any]) -> None:
    values = samples(space, 3)
    # Gymnasium cannot iterate over the batch of an empty space.
    passed = values if parts(space, values[0]) == [] else iterate(batch_space(space, 3), batched(space, values))
    expected = [parts(space, value) for value in passed]
    buffer = ActionBuffer(space, 3)
    arrays = [
        np.stack([np.asarray(leaf.pick(value)) for value in values]).astype(leaf.dtype) for leaf in buffer.array_leaves
    ]
    buffer.write(arrays)
    for index, value in enumerate(values):
        objects = [leaf.pick(value) for leaf in buffer.object_leaves]
        assert same(parts(space, buffer.reader(index)(objects)), expected[index])
        assert same(parts(space, buffer.join(buffer.read(index), objects)), expected[index])

"""What is refused before anything is sent, in which words, and that all else arrives as it was given."""

from __future__ import annotations

import copy
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector.utils import batch_space

from prized_gym.actions import ActionCheck
from prized_gym.batch import leaves
from tools.comparing import same
from zoo.spaces import SPACES

COUNT = 3


def split(space: gym.Space[Any], actions: Any, ignored: list[int] | None = None) -> Any:
    mask = None if ignored is None else np.isin(np.arange(COUNT), ignored)
    return ActionCheck(space).split(actions, COUNT, mask)


@pytest.mark.parametrize("name", [name for name in SPACES if name not in ("dict_empty", "tuple_empty")])
def test_a_sampled_batch_of_every_space_is_taken_apart(name: str) -> None:
    space = copy.deepcopy(SPACES[name])
    batch = batch_space(space, COUNT)
    batch.seed(0)
    actions = batch.sample()
    arrays, objects = split(space, actions)
    found = leaves(space)
    expected = [leaf.pick(actions) for leaf in found]
    assert same(arrays, [part for leaf, part in zip(found, expected, strict=True) if leaf.is_array])
    assert same(objects, [list(part) for leaf, part in zip(found, expected, strict=True) if not leaf.is_array])


def test_an_array_is_passed_on_as_it_is() -> None:
    given = np.array([0, 1, 2], np.int16)
    [array], objects = split(spaces.Discrete(3), given)
    assert array is given and objects == []
    [array], _ = split(spaces.Discrete(3), [0, 1, 2])
    assert same(array, np.array([0, 1, 2]))
    [array], _ = split(spaces.Discrete(2), np.array([True, False, True]))
    assert array.dtype == np.bool_


@pytest.mark.parametrize(
    ("space", "least", "greatest"),
    [
        (spaces.Discrete(4), 0, 3),
        (spaces.Discrete(4, start=-2), -2, 1),
        (spaces.MultiBinary(2), [0, 0], [1, 1]),
        (spaces.MultiDiscrete([3, 5]), [0, 0], [2, 4]),
        (spaces.MultiDiscrete([3, 5], start=[-1, 10]), [-1, 10], [1, 14]),
    ],
    ids=str,
)
@pytest.mark.parametrize("count", [COUNT, 100], ids=["few", "many"])
def test_whole_numbers_are_held_to_their_limits(space: gym.Space[Any], least: Any, greatest: Any, count: int) -> None:
    checked = ActionCheck(space)
    least, greatest = np.asarray(least), np.asarray(greatest)
    for value in (least, greatest):
        checked.split(np.stack([value] * count), count)
    for outside in (least - 1, greatest + 1):
        actions = np.stack([least] * count)
        actions[count - 2] = outside
        with pytest.raises(
            ValueError, match=rf"^actions\[{count - 2}\] = .*, for copy {count - 2}, is not in .*nothing"
        ):
            checked.split(actions, count)


def test_one_number_of_many_outside_is_enough() -> None:
    with pytest.raises(ValueError, match=r"^actions\[1\] = array\(\[2, 5\]\), for copy 1, is not in MultiDiscrete"):
        split(spaces.MultiDiscrete([3, 5]), [[2, 4], [2, 5], [0, 0]])


def test_a_box_is_not_held_to_its_bounds() -> None:
    space = spaces.Box(-1, 1, (2,), np.float32)
    given = np.array([[5.0, -5.0], [np.nan, np.inf], [0, 0]])
    [array], _ = split(space, given)
    assert array is given
    for dtype in (np.float16, np.int64, np.uint8, np.bool_):
        split(space, np.zeros((COUNT, 2), dtype))


@pytest.mark.parametrize(
    ("space", "actions", "error", "message"),
    [
        (spaces.Discrete(3), 1, TypeError, r"^actions must hold 3 actions, one per copy, got a single value: 1$"),
        (
            spaces.Discrete(3),
            [0, 1],
            ValueError,
            r"^actions must hold 3 actions, one per copy, got 2 \(shape \(2,\)\)$",
        ),
        (
            spaces.Discrete(3),
            [[0], [1], [2]],
            ValueError,
            r"has shape \(3, 1\), but 3 actions of Discrete\(3\) have shape",
        ),
        (spaces.Discrete(3), [0.0, 1.0, 2.0], TypeError, r"has dtype float64, but Discrete\(3\) takes integers"),
        (spaces.Discrete(3), ["a", "b", "c"], TypeError, "takes integers"),
        (spaces.Box(-1, 1, (2,)), [[1, 2], [3], [4, 5]], ValueError, "not a batch of arrays of one shape"),
        (spaces.Box(-1, 1, (2,)), np.zeros((2, 3)), ValueError, r"must hold 3 actions, one per copy, got 2"),
        (spaces.Box(-1, 1, (2,)), np.zeros((3, 3)), ValueError, r"has shape \(3, 3\), but 3 actions of .* \(3, 2\)$"),
        (spaces.Box(-1, 1, (2,)), np.zeros((3, 2), complex), TypeError, "has dtype complex128, .* takes numbers"),
        (spaces.Box(-1, 1, (2,)), np.full((3, 2), "a"), TypeError, "takes numbers"),
        (spaces.Box(-1, 1, ()), None, TypeError, "got a single value: None"),
        (spaces.Text(3), "abc", ValueError, r"^actions must be a tuple of 3 values of Text.*, got 'abc'$"),
        (spaces.Text(3), 5, ValueError, "must be a tuple of 3 values"),
        (spaces.Text(3), ("a", "b"), ValueError, "must hold 3 actions, one per copy, got 2"),
        (spaces.Text(3), ("a", "toolong", "b"), ValueError, r"^actions\[1\] = 'toolong', for copy 1, is not in Text"),
        (spaces.Dict({"x": spaces.Discrete(2)}), [0, 1, 1], ValueError, r"^actions\.x is missing: .*the keys \['x'\]"),
        (spaces.Dict({"x": spaces.Discrete(2)}), {"y": [0, 1, 1]}, ValueError, r"^actions\.x is missing"),
        (spaces.Dict({"x": spaces.Discrete(2)}), {"x": [0, 2, 1]}, ValueError, r"^actions\.x\[1\] = .*, for copy 1"),
        (
            spaces.Tuple((spaces.Discrete(2),)),
            {"x": 1},
            ValueError,
            r"^actions\[0\]: the batch must be a tuple of 1 parts",
        ),
        (spaces.Tuple((spaces.Discrete(2),)), ([0, 1, 1], 3), ValueError, "must be a tuple of 1 parts"),
    ],
)
def test_what_does_not_fit_is_named(space: gym.Space[Any], actions: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        split(space, actions)


def test_a_long_value_is_cut_in_the_message() -> None:
    with pytest.raises(ValueError) as caught:
        split(spaces.Text(3), ("a", "x" * 5000, "b"))
    assert "…" in str(caught.value) and len(str(caught.value)) < 400


@pytest.mark.parametrize("count", [COUNT, 100], ids=["few", "many"])
def test_the_action_of_a_copy_that_will_not_use_it_may_be_anything_that_has_its_shape(count: int) -> None:
    check = ActionCheck(spaces.Discrete(4, start=-2))
    actions = np.zeros(count, np.int64)
    actions[1] = 99
    [array], _ = check.split(actions, count, np.arange(count) == 1)
    assert array[1] == -2 and not array[0] and not array[2:].any()
    assert actions[1] == 99  # the caller's own stays as it is
    actions[2] = 98
    with pytest.raises(ValueError, match="for copy 2,"):
        check.split(actions, count, np.arange(count) == 1)


def test_ignored_values_of_object_spaces_are_not_looked_at() -> None:
    _, [values] = split(spaces.Text(3), ("a", None, "b"), ignored=[1])
    assert values == ["a", None, "b"]
    with pytest.raises(ValueError, match="for copy 1,"):
        split(spaces.Text(3), ("a", None, "b"), ignored=[0])


def test_values_of_a_space_of_the_users_own_are_the_environments_affair() -> None:
    class Own(gym.Space[Any]):
        def contains(self, x: Any) -> bool:
            return False

    _, [values] = split(Own(), ("anything", 3, None))
    assert values == ["anything", 3, None]


def test_a_message_names_the_copy_not_the_row() -> None:
    for space, actions in ((spaces.Discrete(2), [0, 5]), (spaces.Text(3), ["a", "long one"])):
        with pytest.raises(ValueError, match=r"actions\[1\] = .*, for copy 7, is not in"):
            ActionCheck(space).split(actions, 2, copies=[4, 7])


def test_an_empty_array_has_nothing_to_check() -> None:
    [array], _ = split(spaces.MultiDiscrete(np.zeros(0, np.int64)), np.zeros((COUNT, 0), np.int64))
    assert array.shape == (COUNT, 0)

"""Arguments are checked where they are given, and named when they are refused."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from prized_gym.arguments import at_least_one, one_of, seconds, seed_list, take_mask


def test_one_of() -> None:
    assert one_of("mode", "b", ("a", "b")) == "b"
    with pytest.raises(ValueError, match=r"^mode='c': must be one of 'a', 'b'$"):
        one_of("mode", "c", ("a", "b"))


def test_at_least_one() -> None:
    assert at_least_one("n", 1) == 1
    number = at_least_one("n", np.int64(7))  # type: ignore[arg-type]
    assert number == 7 and type(number) is int
    for bad in (0, -1, False):
        with pytest.raises(ValueError, match=f"^n must be at least 1, got {bad}$"):
            at_least_one("n", bad)
    for wrong in (1.0, "1", None, [1]):
        with pytest.raises(TypeError, match="^n must be an int, got "):
            at_least_one("n", wrong)  # type: ignore[arg-type]


def test_seconds() -> None:
    for good in (None, 1, 0.5, np.float32(2), float("inf")):
        assert seconds("step_timeout", good) is good
    for bad in (0, -1.0, float("nan"), "5", [1]):
        with pytest.raises(ValueError, match=r"^step_timeout must be a positive number of seconds or None, got "):
            seconds("step_timeout", bad)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("seed", "seeds"),
    [
        (None, [None, None, None]),
        (0, [0, 1, 2]),
        (5, [5, 6, 7]),
        (np.int64(5), [5, 6, 7]),
        (2**70, [2**70, 2**70 + 1, 2**70 + 2]),
        ([3, 1, 2], [3, 1, 2]),
        ((3, None, 2), [3, None, 2]),
        ([None, None, None], [None, None, None]),
        (range(3), [0, 1, 2]),
        (np.array([4, 5, 6], np.uint8), [4, 5, 6]),
    ],
)
def test_seeds_in_every_form(seed: Any, seeds: list[int | None]) -> None:
    found = seed_list(seed, 3)
    assert found == seeds
    assert {type(one) for one in found} <= {int, type(None)}


@pytest.mark.parametrize(
    ("seed", "error", "message"),
    [
        ([1, 2], ValueError, r"must match num_envs=3 but got length=2\.$"),
        ([], ValueError, "got length=0"),
        (-1, gym.error.Error, "must be a non-negative integer, got -1$"),
        ([1, -2, 3], gym.error.Error, "got -2$"),
        ([1, 2.0, 3], TypeError, "float"),
        (1.5, TypeError, "float"),
        ("abc", TypeError, "str"),
        (np.array(7), TypeError, "0-d"),
    ],
)
def test_seeds_that_are_refused(seed: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        seed_list(seed, 3)


def test_a_mask_is_taken_out_of_the_options_which_stay_as_they_are() -> None:
    mask = np.array([True, False])
    options = {"reset_mask": mask, "level": 3}
    rest, found = take_mask(options, 2)
    assert rest == {"level": 3} and found is mask
    assert list(options) == ["reset_mask", "level"]


def test_options_without_a_mask_are_copied() -> None:
    assert take_mask(None, 2) == (None, None)
    options = {"level": 3}
    rest, mask = take_mask(options, 2)
    assert rest == options and rest is not options and mask is None
    assert take_mask({}, 2) == ({}, None)


@pytest.mark.parametrize(
    ("mask", "error", "message"),
    [
        ([True, False], TypeError, "must be a numpy array, got <class 'list'>"),
        (None, TypeError, "must be a numpy array, got <class 'NoneType'>"),
        (np.array([True]), ValueError, r"must have shape `\(2,\)`, got \(1,\)"),
        (np.array(True), ValueError, r"must have shape `\(2,\)`, got \(\)"),
        (np.array([1, 0]), TypeError, "must have `dtype=np.bool_`, got int64"),
        (np.array([False, False]), ValueError, r"at least one True value, got reset_mask=\[False False\]"),
    ],
)
def test_masks_that_are_refused(mask: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        take_mask({"reset_mask": mask}, 2)

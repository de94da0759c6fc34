"""Merging infos: as Gymnasium where it is right, and right where it is not."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from prized_gym.infos import merge, split
from tools.comparing import assert_same


def by_gymnasium(infos: dict[int, dict[str, Any]], count: int) -> dict[str, Any]:
    class Bare(gym.vector.VectorEnv[Any, Any, Any]):
        num_envs = count

    merged: dict[str, Any] = {}
    for index, info in infos.items():
        merged = Bare()._add_info(merged, info, index)
    return merged


@pytest.mark.parametrize(
    "infos",
    [
        {},
        {0: {}, 2: {}},
        {0: {"a": 1}, 1: {"a": 2}, 2: {"b": 0.5}},
        {1: {"a": True, "b": None, "c": "text", "d": [1, 2]}},
        {0: {"a": np.float32(1.5)}, 1: {"a": np.float32(2.5)}},
        {0: {"a": np.bool_(True)}, 2: {"a": np.bool_(False)}},
        {0: {"a": np.arange(3)}, 2: {"a": np.arange(3) * 2}},
        {0: {"a": np.array(1.5)}},
        {0: {"a": {"b": 1, "c": {"d": "x"}}}, 1: {"a": {"b": 2}}},
        {0: {"a": {}}, 1: {"a": {}}},
        {2: {"final_obs": np.arange(2), "final_info": {"x": 1, "episode": {"r": 1.0}}, "y": 2}},
        {0: {"a": "s"}, 1: {"a": "longer"}},
    ],
)
def test_as_gymnasium_merges(infos: dict[int, dict[str, Any]]) -> None:
    assert_same(merge(infos, 3), by_gymnasium(infos, 3))


def test_a_float_after_an_int_is_kept() -> None:
    merged = merge({0: {"a": 1}, 1: {"a": 2.7}}, 2)
    assert merged["a"].dtype == np.float64 and merged["a"].tolist() == [1.0, 2.7]


def test_a_number_after_a_bool_is_kept() -> None:
    assert merge({0: {"a": True}, 1: {"a": 5}}, 2)["a"].tolist() == [1, 5]


def test_ragged_arrays_become_objects() -> None:
    merged = merge({0: {"a": np.arange(2)}, 1: {"a": np.arange(3)}}, 3)
    assert merged["a"].dtype == object
    assert merged["a"][0].tolist() == [0, 1] and merged["a"][1].tolist() == [0, 1, 2] and merged["a"][2] is None


def test_longer_strings_and_wider_numbers_are_not_cut() -> None:
    merged = merge({0: {"a": np.array(["x"])}, 1: {"a": np.array(["longer"])}}, 2)
    assert merged["a"].tolist() == [["x"], ["longer"]]
    assert merge({0: {"a": np.float32(1)}, 1: {"a": 0.1}}, 2)["a"][1] == 0.1
    huge = 2**70
    assert merge({0: {"a": 1}, 1: {"a": huge}}, 2)["a"].tolist() == [1, huge]
    big = np.uint64(2**63 + 1)
    assert merge({0: {"a": -1}, 1: {"a": big}}, 2)["a"].tolist() == [-1, big]


def test_mixed_kinds_become_objects() -> None:
    assert merge({0: {"a": 1}, 1: {"a": "x"}, 2: {"a": {"b": 1}}}, 3)["a"].tolist() == [1, "x", {"b": 1}]


def test_split_is_the_inverse() -> None:
    infos = {0: {"a": 1, "n": {"x": 2}}, 1: {}, 2: {"b": "t", "n": {"x": 3, "y": [1]}}}
    assert split(merge(infos, 3), 3) == [infos[0], infos[1], infos[2]]

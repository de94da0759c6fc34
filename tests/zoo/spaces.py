"""Spaces: one of each kind with its edges, and random nested ones."""

from __future__ import annotations

import copy
import random
from collections import OrderedDict
from typing import Any

import numpy as np
from gymnasium import spaces

INT_MIN = np.iinfo(np.int32).min

SPACES: dict[str, spaces.Space[Any]] = {
    "box": spaces.Box(-1, 1, (3,), np.float32),
    "box_scalar": spaces.Box(-1, 1, (), np.float64),
    "box_image": spaces.Box(0, 255, (8, 5, 3), np.uint8),
    "box_int64": spaces.Box(-5, 5, (2, 2), np.int64),
    "box_uint64": spaces.Box(0, 2**60, (2,), np.uint64),
    "box_float16": spaces.Box(-1, 1, (2,), np.float16),
    "box_bool": spaces.Box(0, 1, (4,), np.bool_),
    "box_bool_mixed": spaces.Box(np.array([False, True]), np.array([True, True]), dtype=np.bool_),
    "box_unbounded": spaces.Box(-np.inf, np.inf, (2, 2), np.float64),
    "box_half_bounded": spaces.Box(np.array([-np.inf, 0, -1], np.float32), np.array([0, np.inf, 1], np.float32)),
    "box_int32_unbounded": spaces.Box(-np.inf, np.inf, (3,), np.int32),
    "box_int32_half_bounded": spaces.Box(np.array([-np.inf, 2.0]), np.array([3.0, np.inf]), dtype=np.int32),
    "box_int32_at_its_limit": spaces.Box(INT_MIN, 5, (2,), np.int32),
    "box_empty": spaces.Box(-1, 1, (0,), np.float32),
    "box_empty_dimension": spaces.Box(0, 1, (0, 3)),
    "box_exact_bounds": spaces.Box(np.array([0.1, 1e-300, -np.pi]), np.array([0.2, 1e300, np.e]), dtype=np.float64),
    "discrete": spaces.Discrete(5),
    "discrete_start": spaces.Discrete(4, start=-2),
    "discrete_int8": spaces.Discrete(100, start=-50, dtype=np.int8),
    "discrete_huge": spaces.Discrete(2**62),
    "multidiscrete": spaces.MultiDiscrete([3, 4, 2]),
    "multidiscrete_2d": spaces.MultiDiscrete(np.array([[2, 3], [4, 5]]), start=np.array([[1, 0], [-1, 2]])),
    "multidiscrete_int32": spaces.MultiDiscrete(np.array([[3, 5], [2, 9]]), np.int32, start=[[1, -2], [0, 4]]),
    "multibinary": spaces.MultiBinary(4),
    "multibinary_2d": spaces.MultiBinary((2, 3)),
    "text": spaces.Text(6),
    "text_charset": spaces.Text(9, min_length=0, charset="zyxé漢\U0001f600"),
    "text_one_length": spaces.Text(4, min_length=4, charset=frozenset("ab")),
    "oneof": spaces.OneOf([spaces.Discrete(3), spaces.Box(-1, 1, (2,), np.float32), spaces.Text(4)]),
    "graph": spaces.Graph(spaces.Box(-1, 1, (2,), np.float32), spaces.Discrete(3)),
    "graph_without_edges": spaces.Graph(spaces.Discrete(5), None),
    "graph_of_dicts": spaces.Graph(
        spaces.Dict({"x": spaces.Discrete(3), "y": spaces.Box(0, 1, (2,))}), spaces.Box(0, 1)
    ),
    "sequence": spaces.Sequence(spaces.Discrete(4)),
    "sequence_stacked": spaces.Sequence(spaces.Box(-1, 1, (2,), np.float32), stack=True),
    "sequence_of_discretes_stacked": spaces.Sequence(spaces.Discrete(9), stack=True),
    "sequence_of_dicts_stacked": spaces.Sequence(
        spaces.Dict({"t": spaces.Text(3), "p": spaces.Tuple((spaces.Discrete(2), spaces.Box(0, 1, (3,))))}), stack=True
    ),
    "sequence_of_sequences": spaces.Sequence(spaces.Sequence(spaces.Discrete(3))),
    "dict": spaces.Dict({"b": spaces.Box(-1, 1, (2,), np.float32), "a": spaces.Discrete(3)}),
    "dict_in_its_own_order": spaces.Dict(OrderedDict([("b", spaces.Discrete(2)), ("a", spaces.Discrete(3))])),
    "dict_unsorted": spaces.Dict({"b": spaces.Discrete(2), "a": spaces.Discrete(3)}, sort_keys=False),
    "dict_of_int_keys": spaces.Dict({2: spaces.Discrete(2), 1: spaces.Discrete(3)}),
    "dict_of_one": spaces.Dict({"x": spaces.Box(-1, 1, (2,), np.float32)}),
    "dict_empty": spaces.Dict({}),
    "tuple": spaces.Tuple([spaces.Discrete(3), spaces.Box(-1, 1, (2,), np.float32), spaces.Text(3)]),
    "tuple_of_one": spaces.Tuple((spaces.Discrete(3),)),
    "tuple_empty": spaces.Tuple(()),
    "nested": spaces.Dict(
        {
            "position": spaces.Tuple([spaces.Box(-1, 1, (2,), np.float32), spaces.MultiBinary(3)]),
            "inner": spaces.Dict({"word": spaces.Text(4), "level": spaces.Discrete(7, start=1)}),
            "image": spaces.Box(0, 255, (4, 4), np.uint8),
        }
    ),
}


def random_space(rng: random.Random, depth: int = 3) -> spaces.Space[Any]:
    """A random space, nested at most ``depth`` times."""
    leaves = [name for name in SPACES if name.startswith(("box", "discrete", "multi", "text"))]
    kind = rng.choice(["leaf", "leaf", "dict", "tuple", "one of", "sequence", "graph"]) if depth else "leaf"
    if kind == "leaf":
        if rng.random() < 0.5:
            dtype = rng.choice([np.float32, np.float64, np.int16, np.uint8])
            return spaces.Box(
                rng.randrange(5), 5 + rng.randrange(5), [rng.randrange(1, 4) for _ in range(rng.randrange(4))], dtype
            )
        return copy.deepcopy(SPACES[rng.choice(leaves)])
    children = [random_space(rng, depth - 1) for _ in range(rng.randrange(1, 4))]
    if kind == "dict":
        pairs = {f"key {rng.random()}": child for child in children}
        return spaces.Dict(pairs, sort_keys=rng.random() < 0.5)
    if kind == "tuple":
        return spaces.Tuple(children)
    if kind == "one of":
        return spaces.OneOf(children)
    if kind == "sequence":
        return spaces.Sequence(children[0])
    return spaces.Graph(spaces.Box(-1, 1, (rng.randrange(1, 4),)), rng.choice([None, spaces.Discrete(3)]))

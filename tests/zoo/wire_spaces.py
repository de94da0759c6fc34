"""Spaces to try the wire with: one of each kind, and random nested ones."""

from __future__ import annotations

import copy
import random
from collections import OrderedDict

import numpy as np
from gymnasium import spaces

INT_MIN = np.iinfo(np.int32).min

EVERY_KIND = {
    "box": spaces.Box(-1.0, 1.0, (3,)),
    "box without dimensions": spaces.Box(0.0, 1.0, ()),
    "box of images": spaces.Box(0, 255, (7, 5, 3), np.uint8),
    "box unbounded": spaces.Box(-np.inf, np.inf, (2, 2), np.float64),
    "box half bounded": spaces.Box(np.array([-np.inf, 0, -1], np.float32), np.array([0, np.inf, 1], np.float32)),
    "box of int, unbounded": spaces.Box(-np.inf, np.inf, (3,), np.int32),
    "box of int32, half bounded": spaces.Box(np.array([-np.inf, 2.0]), np.array([3.0, np.inf]), dtype=np.int32),
    "box of int at its limit": spaces.Box(INT_MIN, 5, (2,), np.int32),
    "box of float16": spaces.Box(-2, 3, (4,), np.float16),
    "box of bool": spaces.Box(0, 1, (4,), np.bool_),
    "box of bool, mixed": spaces.Box(np.array([False, True]), np.array([True, True]), dtype=np.bool_),
    "box of uint64": spaces.Box(0, 2**60, (2,), np.uint64),
    "box with an empty dimension": spaces.Box(0, 1, (0, 3)),
    "box of exact bounds": spaces.Box(np.array([0.1, 1e-300, -np.pi]), np.array([0.2, 1e300, np.e]), dtype=np.float64),
    "discrete": spaces.Discrete(5),
    "discrete from -3": spaces.Discrete(7, start=-3),
    "discrete of int8": spaces.Discrete(100, start=-50, dtype=np.int8),
    "discrete, huge": spaces.Discrete(2**62),
    "multi-discrete": spaces.MultiDiscrete([3, 5, 2]),
    "multi-discrete, started": spaces.MultiDiscrete(np.array([[3, 5], [2, 9]]), np.int32, start=[[1, -2], [0, 4]]),
    "multi-binary": spaces.MultiBinary(6),
    "multi-binary of two dimensions": spaces.MultiBinary((3, 2)),
    "text": spaces.Text(12),
    "text with a charset": spaces.Text(9, min_length=0, charset="zyxé漢\U0001f600"),
    "text of one length": spaces.Text(4, min_length=4, charset=frozenset("ab")),
    "dict": spaces.Dict({"b": spaces.Discrete(2), "a": spaces.Box(0, 1, (2,))}),
    "dict in its own order": spaces.Dict(OrderedDict([("b", spaces.Discrete(2)), ("a", spaces.Discrete(3))])),
    "dict unsorted": spaces.Dict({"b": spaces.Discrete(2), "a": spaces.Discrete(3)}, sort_keys=False),
    "dict of int keys": spaces.Dict({2: spaces.Discrete(2), 1: spaces.Discrete(3)}),
    "dict, empty": spaces.Dict({}),
    "tuple": spaces.Tuple((spaces.Discrete(2), spaces.Text(3), spaces.MultiBinary(2))),
    "tuple, empty": spaces.Tuple(()),
    "one of": spaces.OneOf((spaces.Discrete(3), spaces.Box(-1, 1, (2,)), spaces.Text(4))),
    "graph": spaces.Graph(spaces.Box(-1, 1, (3,)), spaces.Discrete(4)),
    "graph without edges": spaces.Graph(spaces.Discrete(5), None),
    "graph of dicts": spaces.Graph(
        spaces.Dict({"x": spaces.Discrete(3), "y": spaces.Box(0, 1, (2,))}), spaces.Box(0, 1)
    ),
    "sequence": spaces.Sequence(spaces.Box(0, 1, (2,))),
    "sequence, stacked": spaces.Sequence(spaces.Box(0, 1, (2,)), stack=True),
    "sequence of discretes, stacked": spaces.Sequence(spaces.Discrete(9), stack=True),
    "sequence of dicts, stacked": spaces.Sequence(
        spaces.Dict({"t": spaces.Text(3), "p": spaces.Tuple((spaces.Discrete(2), spaces.Box(0, 1, (3,))))}), stack=True
    ),
    "sequence of sequences": spaces.Sequence(spaces.Sequence(spaces.Discrete(3))),
}


def random_space(rng: random.Random, depth: int = 3) -> spaces.Space:
    """A random space, nested at most `depth` times."""
    leaves = [name for name in EVERY_KIND if name.startswith(("box", "discrete", "multi", "text"))]
    kind = rng.choice(["leaf", "leaf", "dict", "tuple", "one of", "sequence", "graph"]) if depth else "leaf"
    if kind == "leaf":
        if rng.random() < 0.5:
            dtype = rng.choice([np.float32, np.float64, np.int16, np.uint8])
            return spaces.Box(
                rng.randrange(5), 5 + rng.randrange(5), [rng.randrange(1, 4) for _ in range(rng.randrange(4))], dtype
            )
        return copy.deepcopy(EVERY_KIND[rng.choice(leaves)])
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

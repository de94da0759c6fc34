"""Whether two values are the same to the last bit, and two vector environments the same in every answer."""

from __future__ import annotations

import copy
import struct
from typing import Any

import gymnasium as gym
import numpy as np


def same(a: Any, b: Any) -> bool:
    """Whether two values are of the same types and bits throughout."""
    if type(a) is not type(b):
        return False
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, np.generic):
        return a.dtype == b.dtype and a.tobytes() == b.tobytes()
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, float):
        return struct.pack("d", a) == struct.pack("d", b)
    return a == b


def assert_same(a: Any, b: Any, path: str = "") -> None:
    """Equal in type, structure, dtype and every bit."""
    assert type(a) is type(b), (path, type(a), type(b))
    if isinstance(a, dict):
        assert list(a) == list(b), (path, list(a), list(b))
        for key in a:
            assert_same(a[key], b[key], f"{path}.{key}")
    elif isinstance(a, (tuple, list)):
        assert len(a) == len(b), path
        for index, (x, y) in enumerate(zip(a, b, strict=True)):
            assert_same(x, y, f"{path}[{index}]")
    elif isinstance(a, np.ndarray):
        assert a.dtype == b.dtype and a.shape == b.shape, (path, a.dtype, b.dtype, a.shape, b.shape)
        if a.dtype == object:
            for index, (x, y) in enumerate(zip(a.ravel(), b.ravel(), strict=True)):
                assert_same(x, y, f"{path}[{index}]")
        else:
            assert a.tobytes() == b.tobytes(), (path, a, b)
    else:
        assert a == b, (path, a, b)


def compare(
    forked: gym.vector.VectorEnv[Any, Any, Any],
    reference: gym.vector.VectorEnv[Any, Any, Any],
    steps: int,
    disabled: bool,
    masked: bool,
) -> None:
    rng = np.random.default_rng(0)
    count = forked.num_envs
    assert forked.observation_space == reference.observation_space
    assert forked.action_space == reference.action_space
    assert_same(forked.reset(seed=7), reference.reset(seed=7))
    reference.action_space.seed(3)
    for step in range(steps):
        actions = reference.action_space.sample()
        ours = forked.step(copy.deepcopy(actions))
        theirs = reference.step(actions)
        assert_same(ours, theirs, f"step {step}")
        done = theirs[2] | theirs[3]
        mask = done if disabled else np.zeros(count, np.bool_)
        if masked and step % 7 == 3:
            mask = mask | (rng.random(count) < 0.4)
        if mask.any():
            seeds = [None if rng.random() < 0.5 else int(rng.integers(1000)) for _ in range(count)]
            options = {"reset_mask": mask, "difficulty": step}
            # SyncVectorEnv takes the mask out of the caller's dict; ours must not.
            ours_reset = forked.reset(seed=seeds, options=options)
            assert options["reset_mask"] is mask
            assert_same(ours_reset, reference.reset(seed=seeds, options=dict(options)), f"reset {step}")
    assert_same(forked.reset(seed=11, options={"x": 1}), reference.reset(seed=11, options={"x": 1}))

"""A value of a space that needs no random number: what an environment shows before there is anything to see."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.vector.utils import concatenate, create_empty_array

__all__ = ["default_value"]


def default_value(space: gym.Space[Any]) -> Any:
    """The value of ``space`` nearest to zero, always the same: zeros within the bounds, the first choice, the least text.

    Raises:
        TypeError: the space is none of Gymnasium's.
    """
    if isinstance(space, spaces.Box):
        return np.asarray(np.clip(np.zeros(space.shape, space.dtype), space.low, space.high))
    if isinstance(space, spaces.Discrete):
        return space.start
    if isinstance(space, spaces.MultiDiscrete):
        return space.start.copy()
    if isinstance(space, spaces.MultiBinary):
        return np.zeros(space.shape, space.dtype)
    if isinstance(space, spaces.Text):
        return "".join(space.character_list[:1]) * space.min_length
    if isinstance(space, spaces.Dict):
        return {key: default_value(item) for key, item in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(default_value(item) for item in space.spaces)
    if isinstance(space, spaces.OneOf):
        return np.int64(0), default_value(space.spaces[0])
    if isinstance(space, spaces.Sequence):
        return create_empty_array(space.feature_space, 0) if space.stack else ()
    if isinstance(space, spaces.Graph):
        node = default_value(space.node_space)
        empty: Any = create_empty_array(space.node_space, 1)
        return spaces.GraphInstance(concatenate(space.node_space, [node], empty), None, None)
    raise TypeError(f"no default value is known for a {type(space).__qualname__}")

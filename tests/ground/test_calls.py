"""What a copy answers when it is asked for an attribute or a method of its environment."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from prized_gym.calls import CLASSES, RANDOM_STATE, class_name, classes, perform
from zoo.envs import Loaded


class Named(gym.Wrapper[Any, Any, Any, Any]):
    """A wrapper with an attribute and a method that the environment has not."""

    volume = 3

    def louder(self, by: int = 1, *, times: int = 1) -> int:
        return self.volume + by * times


def test_an_attribute_is_returned_and_a_method_called() -> None:
    env = Named(Loaded())
    assert perform(env, "volume") == 3
    assert perform(env, "louder") == 4
    assert perform(env, "louder", (2,), {"times": 5}) == 13


def test_the_outermost_that_has_it_answers() -> None:
    env = Named(gym.wrappers.TimeLimit(Loaded(), 5))
    assert perform(env, "add", (2,)) == 2
    assert perform(env, "value") == 2
    env.value = 7  # type: ignore[attr-defined]
    assert perform(env, "value") == 7
    with pytest.raises(AttributeError, match="missing"):
        perform(env, "missing")


def test_classes_from_the_outermost_in() -> None:
    env = Named(gym.wrappers.TimeLimit(Loaded(), 5))
    assert perform(env, CLASSES) == classes(env)
    names = classes(env)
    assert [layer[0] for layer in names] == [
        f"{__name__}:Named",
        "gymnasium.wrappers.common:TimeLimit",
        "zoo.envs:Loaded",
    ]
    for layer, kind in zip(names, (gym.Wrapper, gym.Wrapper, gym.Env), strict=True):
        assert class_name(kind) in layer and layer[-1] == "builtins:object"


def test_the_random_state_as_data() -> None:
    env = Named(Loaded())
    assert perform(env, RANDOM_STATE) is None
    env.reset(seed=3)
    state = perform(env, RANDOM_STATE)
    assert state["seed"] == 3
    assert state["state"] == np.random.default_rng(3).bit_generator.state

"""What a user may pass as an environment, how it travels, and what is built from it."""

from __future__ import annotations

import sys
import threading
import types
from collections.abc import Iterator
from functools import partial
from typing import Any

import cloudpickle
import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec

from prized_gym.errors import SetupError
from prized_gym.recipe import Built, Recipe, build, build_env, resolve
from zoo.envs import Loaded


class Small(gym.Env[Any, Any]):
    """Remembers how it was built."""

    metadata = {"render_modes": ["rgb_array", "ansi"]}
    action_space = spaces.Discrete(2)

    def __init__(self, size: int = 2, render_mode: str | None = None) -> None:
        self.observation_space = spaces.Box(0, 1, (size,), np.float32)
        self.render_mode = render_mode
        self.warmed = 0

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return np.zeros(self.observation_space.shape or (), np.float32), 0.0, False, False, {}

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        return np.zeros(self.observation_space.shape or (), np.float32), {}


@pytest.fixture
def registered() -> Iterator[str]:
    """An id that the trainer has registered."""
    gym.register("test_recipe/Small-v0", Small, max_episode_steps=7)
    yield "test_recipe/Small-v0"
    del gym.registry["test_recipe/Small-v0"]


@pytest.fixture
def module() -> Iterator[types.ModuleType]:
    """A module of the user's, as "envs_of_test_recipe:…" finds it."""
    made = types.ModuleType("envs_of_test_recipe")
    made.make = lambda: Small(3)  # type: ignore[attr-defined]
    made.number = 3  # type: ignore[attr-defined]
    sys.modules[made.__name__] = made
    yield made
    del sys.modules[made.__name__]


# What may be passed


def test_ids_and_specs_become_specs(registered: str) -> None:
    spec = resolve("CartPole-v1")
    assert isinstance(spec, EnvSpec) and spec.id == "CartPole-v1"
    assert resolve(spec) is spec
    own = resolve(registered)
    assert isinstance(own, EnvSpec) and own.entry_point is Small


def test_a_module_and_function_stay_a_string_until_they_are_built() -> None:
    assert resolve("not_there_yet:make") == "not_there_yet:make"


def test_gymnasiums_own_notation_for_an_id_and_the_module_that_registers_it(module: types.ModuleType) -> None:
    spec = resolve("gymnasium:CartPole-v1")
    assert isinstance(spec, EnvSpec) and spec.id == "CartPole-v1"
    # What this process has not imported is for the base to import.
    source = "envs_of_test_recipe:of_test_recipe/Late-v3"
    assert resolve(source) == source
    with pytest.raises(SetupError, match="no callable 'of_test_recipe/Late-v3', and no such env id is registered"):
        build_env(Recipe(()), source)
    gym.register("of_test_recipe/Late-v3", Small)
    try:
        assert isinstance(build_env(Recipe(()), source).unwrapped, Small)
    finally:
        del gym.registry["of_test_recipe/Late-v3"]


def test_callables_are_kept() -> None:
    for source in (Small, lambda: Small(), partial(Small, 3)):
        assert resolve(source) is source
    assert resolve((Small, Loaded)) == [Small, Loaded]


@pytest.mark.parametrize(
    ("source", "error", "message"),
    [
        (Small(), TypeError, "got the environment instance .*pass a callable that builds it"),
        ([], ValueError, "env is an empty sequence"),
        ([Small, "CartPole-v1"], TypeError, r"^env\[1\] is 'CartPole-v1', not a callable"),
        (3, TypeError, r"must be an env id, .*, got 3$"),
        (None, TypeError, "got None$"),
        ("CartPol-v1", gym.error.NameNotFound, "CartPole"),
        ("CartPole-v99", gym.error.VersionNotFound, "`v1`"),
        (":make", gym.error.Error, "doesn't exist"),
        ("make:", gym.error.Error, "doesn't exist"),
    ],
)
def test_what_is_refused(source: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        resolve(source)


# How it travels


def test_a_recipe_survives_the_journey() -> None:
    size = 5
    recipe = Recipe((lambda **given: Small(size, **given),), env_kwargs={"render_mode": "ansi"}, max_episode_steps=3)
    there = cloudpickle.loads(recipe.dumps())
    assert there.env_kwargs == {"render_mode": "ansi"} and there.max_episode_steps == 3
    env = build(there).envs[0]
    assert env.observation_space.shape == (5,) and env.render_mode == "ansi"


def test_equal_sources_stay_one_on_the_journey() -> None:
    factory = lambda: Small()  # noqa: E731
    there = cloudpickle.loads(Recipe((factory, Small, factory)).dumps())
    assert there.sources[0] is there.sources[2] is not there.sources[1]


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ("sources", r"^environment factory 1 \(.*\) cannot be sent to the base process: TypeError: cannot pickle"),
        ("warm_up", r"^warm_up \(.*\) cannot be sent"),
        ("on_fork", r"^on_fork \(.*\) cannot be sent"),
        ("env_kwargs", r"^env_kwargs \(\{'lock': .*\) cannot be sent .*inside the function instead of closing over it"),
    ],
)
def test_what_cannot_travel_is_named(field: str, message: str) -> None:
    lock = threading.Lock()
    held = lambda *_: lock  # noqa: E731
    values: dict[str, Any] = {"sources": (Small, held), "env_kwargs": {"lock": lock}}
    with pytest.raises(SetupError, match=message):
        Recipe(**{"sources": (Small,), field: values.get(field, held)}).dumps()


def test_what_the_trainer_registered_travels(registered: str) -> None:
    there = cloudpickle.loads(Recipe((Small,)).dumps())
    assert cloudpickle.loads(there.registered[registered]).max_episode_steps == 7


def test_a_registration_that_cannot_travel_says_why() -> None:
    lock = threading.Lock()
    gym.register("test_recipe/Locked-v0", lambda: lock)
    try:
        registered = cloudpickle.loads(Recipe((Small,)).dumps()).registered
        assert registered["test_recipe/Locked-v0"].startswith("TypeError: cannot pickle")
    finally:
        del gym.registry["test_recipe/Locked-v0"]


# What is built


def test_one_environment_serves_all_copies() -> None:
    built = build(Recipe((Small,)))
    assert len(built.envs) == 1 and built.order is None
    assert [built.which(copy) for copy in (0, 5)] == [0, 0]
    assert not built.sole(0)


def test_equal_sources_are_built_once_and_warmed_up_once() -> None:
    def warm_up(env: Any) -> None:
        env.unwrapped.warmed += 1

    other = partial(Small, 2)
    built = build(Recipe((Small, other, Small), warm_up=warm_up))
    assert len(built.envs) == 2 and built.order == [0, 1, 0]
    assert [env.unwrapped.warmed for env in built.envs] == [1, 1]  # type: ignore[attr-defined]
    assert [built.which(copy) for copy in range(3)] == [0, 1, 0]
    assert [built.sole(copy) for copy in range(3)] == [False, True, False]


def test_nothing_is_warmed_up_before_everything_is_built() -> None:
    done = []

    def second() -> gym.Env[Any, Any]:
        done.append("built")
        return Small()

    build(Recipe((Small, second), warm_up=lambda env: done.append("warm")))
    assert done == ["built", "warm", "warm"]


def test_copies_with_other_spaces_are_refused() -> None:
    with pytest.raises(SetupError, match=r"^copy 2 has another observation_space than copy 0: .*\(3,\).* instead of"):
        build(Recipe((Small, Small, partial(Small, 3))))


@pytest.mark.parametrize("source", ["CartPole-v1", Small], ids=["spec", "factory"])
def test_the_time_limit_and_render_mode_that_were_asked_for(source: Any) -> None:
    env = build_env(Recipe((), max_episode_steps=2, render_mode="rgb_array"), resolve(source))
    assert env.render_mode == "rgb_array"
    env.reset(seed=0)
    assert [env.step(0)[3] for _ in range(2)] == [False, True]


def test_the_limit_of_the_spec_holds_where_none_was_asked_for(registered: str) -> None:
    env = build_env(Recipe(()), gym.spec(registered))
    env.reset()
    assert [env.step(0)[3] for _ in range(7)] == [False] * 6 + [True]


def test_a_render_mode_that_a_factory_does_not_take_is_an_error() -> None:
    recipe = Recipe((), render_mode="rgb_array")
    assert build_env(recipe, lambda: Small(render_mode="rgb_array")).render_mode == "rgb_array"
    with pytest.raises(
        SetupError, match="render_mode='rgb_array' was asked for, .* with render_mode=None: let its factory"
    ):
        build_env(recipe, lambda: Small())


def test_arguments_reach_the_factory() -> None:
    assert build_env(Recipe((), env_kwargs={"size": 4}), Small).observation_space.shape == (4,)
    assert build_env(
        Recipe((), env_kwargs={"sutton_barto_reward": True}), gym.spec("CartPole-v1")
    ).unwrapped.spec.kwargs["sutton_barto_reward"]  # type: ignore[union-attr]


def test_what_is_not_an_environment_is_named() -> None:
    with pytest.raises(SetupError, match=r"returned builtins\.dict, not a gymnasium\.Env"):
        build_env(Recipe(()), dict)  # type: ignore[arg-type]


def test_a_factory_of_a_module(module: types.ModuleType, registered: str) -> None:
    assert build_env(Recipe(()), "envs_of_test_recipe:make").observation_space.shape == (3,)
    assert build_env(Recipe(()), f"envs_of_test_recipe:{registered}").unwrapped.observation_space.shape == (2,)
    for name in ("number", "missing"):
        with pytest.raises(
            SetupError, match=f"module 'envs_of_test_recipe' has no callable '{name}', and no such env id"
        ):
            build_env(Recipe(()), f"envs_of_test_recipe:{name}")
    with pytest.raises(ModuleNotFoundError, match="not_there_at_all"):
        build_env(Recipe(()), "not_there_at_all:make")


def test_a_factory_may_make_what_only_the_trainer_had_registered(registered: str) -> None:
    recipe = cloudpickle.loads(Recipe((lambda: gym.make(registered),)).dumps())
    spec = gym.registry.pop(registered)  # as in another process
    try:
        built = build(recipe)
        assert isinstance(built, Built) and isinstance(built.envs[0].unwrapped, Small)
    finally:
        gym.registry[registered] = spec
    with pytest.raises(gym.error.UnregisteredEnv):
        build(Recipe((lambda: gym.make("test_recipe/Nobody-v0"),)))

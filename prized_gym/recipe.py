"""How a base is made: what the trainer sends, and how the environments are built from it, wherever that happens."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import gymnasium as gym
from gymnasium.envs.registration import EnvSpec

from prized_gym import by_value, registrations
from prized_gym.errors import SetupError
from prized_gym.registrations import Registrations

AnyEnv: TypeAlias = "gym.Env[Any, Any]"
EnvFactory: TypeAlias = Callable[..., AnyEnv]
EnvSource: TypeAlias = str | EnvSpec | EnvFactory


@dataclass
class Recipe:
    """Everything needed to build the environments of a base.

    Attributes:
        sources: what to build; one entry for a base of a single environment, else one per copy. Equal entries are
            built once.
        warm_up: called with each environment after it is built.
        on_fork: called in each copy after the fork as ``on_fork(env, index, seed)``.
        env_kwargs: keyword arguments of ``gym.make`` or of the factory.
        max_episode_steps: a ``TimeLimit`` put around each environment.
        render_mode: the render mode asked of each environment.
        registered: the environments the trainer has registered beside Gymnasium's own; filled in on the way to a base.
    """

    sources: tuple[EnvSource, ...]
    warm_up: Callable[[AnyEnv], Any] | None = None
    on_fork: Callable[[AnyEnv, int, int], Any] | None = None
    env_kwargs: dict[str, Any] = field(default_factory=dict)
    max_episode_steps: int | None = None
    render_mode: str | None = None
    registered: Registrations = field(default_factory=dict)

    def dumps(self, known: set[str] | None = None) -> bytes:
        """Pickle this recipe as bytes, with functions and classes of ``__main__`` and notebooks by value.

        Args:
            known: takes the keys of what is sent by value, as :func:`prized_gym.by_value.dumps` does.

        Raises:
            SetupError: something in it cannot be pickled; the message names it.
        """
        try:
            return by_value.dumps(replace(self, registered=registrations.collect()), known)
        except Exception as error:
            culprit = "the environment's factory, warm_up or on_fork"
            for name, value in (
                *((f"environment factory {i}", source) for i, source in enumerate(self.sources)),
                ("warm_up", self.warm_up),
                ("on_fork", self.on_fork),
                ("env_kwargs", self.env_kwargs),
            ):
                try:
                    by_value.dumps(value)
                except Exception:
                    culprit = f"{name} ({value!r})"
                    break
            raise SetupError(
                f"{culprit} cannot be sent to the base process: {type(error).__name__}: {error}. "
                "Create what cannot be pickled (locks, sockets, open files) inside the function instead of closing over it."
            ) from error


@dataclass
class Built:
    """The environments of a base.

    Attributes:
        envs: the distinct environments, warmed up.
        order: for each copy, the index of its environment; None if there is a single one.
    """

    envs: list[AnyEnv]
    order: list[int] | None

    def which(self, copy: int) -> int:
        """Return the index into ``envs`` of the environment that copy number ``copy`` is a fork of."""
        return 0 if self.order is None else self.order[copy]

    def sole(self, copy: int) -> bool:
        """Return whether copy number ``copy`` is the only one of its environment, as one built by a callable of its own is."""
        return self.order is not None and self.order.count(self.order[copy]) == 1


def resolve(env: Any) -> EnvSource | list[EnvFactory]:
    """Check what a user passed as ``env``, and find the spec of an env id.

    Args:
        env: an env id, an ``EnvSpec``, ``"module:function"``, a callable, or a sequence of callables.

    Raises:
        gymnasium.error.Error: an unknown env id, with Gymnasium's own suggestion.
        TypeError: ``env`` is none of these.
        ValueError: an empty sequence.
    """
    if isinstance(env, EnvSpec):
        return env
    if isinstance(env, str):
        module, _, name = env.partition(":")
        if not module or not name:
            return gym.spec(env)
        # For what is not registered here the base imports the module, as gym.make("module:id") would.
        return gym.spec(name) if name in gym.registry else env
    if isinstance(env, gym.Env):
        raise TypeError(
            f"got the environment instance {env!r}: pass a callable that builds it (such as `lambda: ...`), "
            "so that it can be built in the base process"
        )
    if callable(env):
        return env  # type: ignore[no-any-return]
    if isinstance(env, Sequence):
        factories = list(env)
        if not factories:
            raise ValueError("env is an empty sequence: pass at least one callable")
        for index, factory in enumerate(factories):
            if not callable(factory):
                raise TypeError(f"env[{index}] is {factory!r}, not a callable that builds an environment")
        return factories
    raise TypeError(
        f"env must be an env id, an EnvSpec, 'module:function', a callable or a sequence of callables, got {env!r}"
    )


def build(recipe: Recipe) -> Built:
    """Build, check and warm up the environments of a recipe.

    Raises:
        SetupError: an environment is not a ``gymnasium.Env``, or the environments' spaces differ.
        Exception: whatever the factory or ``warm_up`` raised.
    """
    registrations.install(recipe.registered)
    envs: list[AnyEnv] = []
    order: list[int] = []
    seen: dict[int, int] = {}
    for copy, source in enumerate(recipe.sources):
        if id(source) not in seen:
            seen[id(source)] = len(envs)
            envs.append(build_env(recipe, source))
            _check_same_spaces(envs[0], envs[-1], copy)
        order.append(seen[id(source)])
    for env in envs:
        if recipe.warm_up is not None:
            recipe.warm_up(env)
    return Built(envs, order if len(recipe.sources) > 1 else None)


def build_env(recipe: Recipe, source: EnvSource) -> AnyEnv:
    """Build one environment from its source, with the recipe's render mode and time limit."""
    if isinstance(source, str):
        source = _import(source)
    kwargs = dict(recipe.env_kwargs)
    if isinstance(source, EnvSpec):
        if recipe.render_mode is not None:
            kwargs["render_mode"] = recipe.render_mode
        if recipe.max_episode_steps is not None:
            kwargs["max_episode_steps"] = recipe.max_episode_steps
        env: AnyEnv = gym.make(source, **kwargs)
    else:
        if recipe.render_mode is not None and _accepts(source, "render_mode"):
            kwargs["render_mode"] = recipe.render_mode
        env = source(**kwargs)
        if not isinstance(env, gym.Env):
            raise SetupError(
                f"the environment factory {source!r} returned {type(env).__module__}.{type(env).__qualname__}, "
                "not a gymnasium.Env"
            )
        if recipe.max_episode_steps is not None:
            env = gym.wrappers.TimeLimit(env, recipe.max_episode_steps)
    if recipe.render_mode is not None and env.render_mode != recipe.render_mode:
        raise SetupError(
            f"render_mode={recipe.render_mode!r} was asked for, but the environment {env} was built with "
            f"render_mode={env.render_mode!r}: let its factory take a `render_mode` argument, or set it there"
        )
    return env


def _import(source: str) -> EnvSpec | EnvFactory:
    module_name, _, name = source.partition(":")
    module = importlib.import_module(module_name)
    found = getattr(module, name, None)
    if callable(found):
        return found  # type: ignore[no-any-return]
    if name in gym.registry:
        return gym.spec(name)
    raise SetupError(f"{source!r}: module {module_name!r} has no callable {name!r}, and no such env id is registered")


def _accepts(function: Callable[..., Any], name: str) -> bool:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return False
    return any(p.name == name or p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)


def _check_same_spaces(first: AnyEnv, env: AnyEnv, copy: int) -> None:
    for name in ("observation_space", "action_space"):
        expected, got = getattr(first, name), getattr(env, name)
        if expected != got:
            raise SetupError(
                f"copy {copy} has another {name} than copy 0: {got} instead of {expected}; "
                "all copies of one vector environment must have equal spaces"
            )

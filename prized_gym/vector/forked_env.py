"""``ForkedEnv``: one copy, as an ordinary ``gymnasium.Env``."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AutoresetMode

from prized_gym.base import Base
from prized_gym.batch import ARRAY_SPACES
from prized_gym.recipe import EnvFactory
from prized_gym.vector.forked_vector_env import ForkedVectorEnv


class ForkedEnv(gym.Env[Any, Any]):
    """One live fork of a warm base, stepped like any environment; each ``reset`` makes a new fork.

    Example:
        >>> import gymnasium as gym, prized_gym
        >>> env = gym.make("prized_gym/Forked-v0", env="CartPole-v1")
        >>> observation, info = env.reset(seed=0)
        >>> env.observation_space.contains(observation)
        True
        >>> env.close()

    Args:
        env: as for :class:`~prized_gym.ForkedVectorEnv`.
        render_mode: as for :class:`~prized_gym.ForkedVectorEnv`.
        **options: any option of :class:`~prized_gym.ForkedVectorEnv` but ``num_envs``, ``autoreset_mode`` and ``copy``.
    """

    # gym.make compares the render mode it is asked for with these, before an instance exists.
    metadata: dict[str, Any] = {"render_modes": ["human", "rgb_array", "ansi", "rgb_array_list", "ansi_list"]}

    def __init__(
        self, env: Base | str | EnvSpec | EnvFactory, *, render_mode: str | None = None, **options: Any
    ) -> None:
        for name in ("num_envs", "autoreset_mode", "copy", "per_process", "max_concurrent"):
            if name in options:
                raise TypeError(
                    f"ForkedEnv() got an unexpected keyword argument {name!r}: it is one copy, stepped alone"
                )
        self._envs = ForkedVectorEnv(
            env, num_envs=1, autoreset_mode=AutoresetMode.DISABLED, render_mode=render_mode, **options
        )
        self._core = self._envs.core
        self.observation_space = self._envs.single_observation_space
        self.action_space = self._envs.single_action_space
        self.metadata = {name: value for name, value in self._envs.metadata.items() if name != "autoreset_mode"}
        self.render_mode = self._envs.render_mode
        self.spec = self._envs.spec

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """A new fork of the base, reset; the observation and info of its ``env.reset``."""
        _, infos = self._core.reset(seed, options)
        return self._core.observation(0), infos.get(0, {})

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """One step of the copy."""
        _, rewards, terminations, truncations, infos = self._core.step(
            _batch_of_one(self._envs.single_action_space, action)
        )
        return (
            self._core.observation(0),
            float(rewards[0]),
            bool(terminations[0]),
            bool(truncations[0]),
            infos.get(0, {}),
        )

    def render(self) -> Any:
        """What the copy's ``render`` gives."""
        return self._envs.render()[0]

    def get_wrapper_attr(self, name: str) -> Any:
        """An attribute of this environment, else of the one in the copy, carried over from there."""
        try:
            return super().get_wrapper_attr(name)
        except AttributeError:
            return self._envs.get_attr(name)[0]

    def set_wrapper_attr(self, name: str, value: Any, *, force: bool = True) -> bool:
        """Set an attribute of the environment in the copy, and in each new fork."""
        self._envs.set_attr(name, [value])
        return True

    def call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the environment in the copy."""
        return self._envs.call(name, *args, **kwargs)[0]

    # What gymnasium.Env's np_random and np_random_seed are made of: those of the environment in the copy.

    @property
    def _np_random(self) -> np.random.Generator | None:
        """A copy of the generator of the environment in the copy; to set it gives that one another."""
        generator: np.random.Generator = self._envs.np_random[0]
        return generator

    @_np_random.setter
    def _np_random(self, value: np.random.Generator | None) -> None:
        if value is not None:
            self._envs.set_attr("np_random", [value])

    @property
    def _np_random_seed(self) -> int | None:
        """The seed of that generator, -1 where it is not known."""
        return self._envs.np_random_seed[0]

    @_np_random_seed.setter
    def _np_random_seed(self, value: int | None) -> None:
        # Set with the generator, which forgets the seed.
        pass

    @property
    def base(self) -> Base:
        """The base that is forked."""
        return self._envs.base

    def close(self) -> None:
        """End the copy, and the base if nobody else uses it."""
        self._envs.close()

    def __repr__(self) -> str:
        return f"<ForkedEnv of {self.spec.id if self.spec is not None else self.base!r}>"


def _batch_of_one(space: gym.Space[Any], action: Any) -> Any:
    """An action as a batch of one, in the structure of the batched action space."""
    if isinstance(space, gym.spaces.Dict):
        return {key: _batch_of_one(inner, action[key]) for key, inner in space.spaces.items()}
    if isinstance(space, gym.spaces.Tuple):
        return tuple(_batch_of_one(inner, part) for inner, part in zip(space.spaces, action, strict=True))
    return np.asarray(action)[None] if isinstance(space, ARRAY_SPACES) else (action,)

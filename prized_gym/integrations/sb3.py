"""``ForkedVecEnv``: forked copies for Stable-Baselines3 (``pip install prized-gym[sb3]``)."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import concatenate, create_empty_array

from prized_gym.base import Base
from prized_gym.calls import CLASSES, class_name
from prized_gym.errors import MissingExtraError
from prized_gym.recipe import EnvFactory
from prized_gym.vector.forked_vector_env import ForkedVectorEnv

try:
    from stable_baselines3.common.vec_env import VecEnv
except ImportError as error:
    raise MissingExtraError(
        "prized_gym.integrations.sb3 needs Stable-Baselines3: pip install prized-gym[sb3]"
    ) from error

__all__ = ["ForkedVecEnv"]

Indices = int | Iterable[int] | None


class ForkedVecEnv(VecEnv):
    """N copies of one environment, forked live from a warm base, as a Stable-Baselines3 ``VecEnv``.

    Example:
        >>> from stable_baselines3 import PPO
        >>> from prized_gym.integrations.sb3 import ForkedVecEnv
        >>> envs = ForkedVecEnv("CartPole-v1", num_envs=8)
        >>> model = PPO("MlpPolicy", envs, n_steps=64, seed=0).learn(2_000)
        >>> envs.close()

    It stands where ``DummyVecEnv`` and ``SubprocVecEnv`` do, ``make_vec_env(..., vec_env_cls=ForkedVecEnv,
    vec_env_kwargs={...})`` included, and with equal seeds gives what ``DummyVecEnv`` gives, step for step. (As
    ``make_vec_env`` passes one callable per copy, the base then builds that many environments; to build one and fork it,
    pass the callable itself with ``num_envs``.)

    A ``reset`` makes new forks of the base (``fork_on="reset"``): algorithms reset once per ``learn``, evaluations once each.
    ``fork_on="start"`` keeps the copies of the first reset, with everything their wrappers have counted or written since:
    ask for it where ``Monitor`` writes to a file over several calls of ``learn``.

    Args:
        env: a :class:`~prized_gym.Base` (which training and evaluation can share), an env id, an ``EnvSpec``, a callable, or
            a list of callables, one per copy.
        num_envs: how many copies; the length of the list if ``env`` is one, else 1 by default.
        **options: any other option of :class:`~prized_gym.ForkedVectorEnv`, but ``autoreset_mode`` and ``copy``.

    Attributes:
        vector_env: the vector environment underneath, for its ``history()`` and ``base``.
        observation_space, action_space: of one copy.
        reset_infos: the info of each copy's latest reset, autoresets included.

    Raises:
        TypeError: an unknown option, or one that Stable-Baselines3 leaves no choice in.
    """

    def __init__(
        self,
        env: Base | str | EnvSpec | EnvFactory | Sequence[EnvFactory],
        num_envs: int | None = None,
        **options: Any,
    ) -> None:
        for name, why in (
            ("autoreset_mode", "Stable-Baselines3 needs same-step autoreset"),
            ("copy", "Stable-Baselines3 keeps observations over the next step, so they are always copied"),
        ):
            if name in options:
                raise TypeError(f"ForkedVecEnv() got an unexpected keyword argument {name!r}: {why}")
        self.vector_env = ForkedVectorEnv(env, num_envs, autoreset_mode=AutoresetMode.SAME_STEP, **options)
        self._core = self.vector_env.core
        self._started = False
        try:
            super().__init__(
                self.vector_env.num_envs, self.vector_env.single_observation_space, self.vector_env.single_action_space
            )
        except BaseException:
            self.vector_env.close()
            raise

    @property
    def base(self) -> Base:
        """The base that is forked."""
        return self.vector_env.base

    # Reset and step

    def reset(self) -> Any:
        """Reset every copy, with the seeds and options set since the last reset; a pending step is dropped.

        Returns:
            The observations: an array of shape ``(num_envs, *shape)``, or a dict or tuple of such.
        """
        if len(self._options) != self.num_envs:
            raise ValueError(f"set_options() was given {len(self._options)} dictionaries for {self.num_envs} copies")
        observations, infos = self._core.reset_each(self._seeds, [options or None for options in self._options])
        self.reset_infos = self._list(infos)
        self._started = True
        self._reset_seeds()
        self._reset_options()
        return observations

    def step_async(self, actions: Any) -> None:
        """Begin a step.

        Args:
            actions: ``actions[i]`` is the action of copy i.

        Raises:
            ValueError, TypeError: actions of the wrong form or outside their space; nothing was sent.
        """
        if not self._started:
            # Before the first reset Stable-Baselines3 leaves it to the environment whether it can be stepped.
            self._core.start()
            self._started = True
        self._core.step_async(self._batch(actions))

    def _list(self, infos: Mapping[int, dict[str, Any]]) -> list[dict[str, Any]]:
        return [infos.get(index, {}) for index in range(self.num_envs)]

    def _batch(self, actions: Any) -> Any:
        space = self.vector_env.single_action_space
        if isinstance(space, spaces.Box):
            array = np.asarray(actions)
            # A row of numbers does for actions of one number each.
            return array.reshape(-1, *space.shape) if array.ndim == 1 and space.shape == (1,) else array
        if isinstance(space, (spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)):
            array = np.asarray(actions)
            if array.dtype.kind == "f":
                # A policy over a MultiBinary space gives whole numbers as floats.
                whole = array.astype(space.dtype)
                return whole if np.array_equal(whole, array) else array
            return array
        if len(actions) != self.num_envs:
            raise ValueError(f"actions must hold {self.num_envs} actions, one per copy, got {len(actions)}")
        out: Any = create_empty_array(space, self.num_envs)
        return concatenate(space, actions, out)

    def step_wait(self) -> tuple[Any, npt.NDArray[np.float32], npt.NDArray[np.bool_], list[dict[str, Any]]]:
        """Finish the step that :meth:`step_async` began; copies whose episode ended are reset in it.

        Returns:
            The observations, rewards (float32) and dones (bool), each of length ``num_envs``, and a list of infos. The info
            of a copy whose episode ended is that of its last step, with ``terminal_observation``, the observation of that
            step; ``TimeLimit.truncated`` says whether it was cut short. With ``on_failure="truncate"`` the info of a copy
            that failed says why in ``failure``.
        """
        observations, rewards, terminations, truncations, given = self._core.step_wait()
        infos = self._list(given)
        dones = terminations | truncations
        for index in np.flatnonzero(dones):
            info = infos[index]
            final: dict[str, Any] = dict(info.pop("final_info"))
            final["terminal_observation"] = info.pop("final_obs")
            self.reset_infos[index] = info
            infos[index] = final
        for info, terminated, truncated in zip(infos, terminations.tolist(), truncations.tolist(), strict=True):
            info["TimeLimit.truncated"] = truncated and not terminated
        return observations, rewards.astype(np.float32), dones, infos

    def close(self) -> None:
        """End the copies, and the base unless it was given. Calling it again does nothing."""
        self.vector_env.close()

    # Attributes and methods of the environments

    def get_attr(self, attr_name: str, indices: Indices = None) -> list[Any]:
        """The attribute of each environment, or of the wrapper of it that has one.

        Args:
            attr_name: the attribute.
            indices: which copies: None for all, an int, or an iterable of ints; negative ones count from the end.

        Raises:
            AttributeError: there is no such attribute.
            IndexError: there is no such copy.
        """
        return self._call(indices, "get_wrapper_attr", (attr_name,))

    def has_attr(self, attr_name: str) -> bool:
        """Whether every environment, or a wrapper of it, has the attribute. Its value need not be picklable."""
        return all(self._call(None, "has_wrapper_attr", (attr_name,)))

    def set_attr(self, attr_name: str, value: Any, indices: Indices = None) -> None:
        """Set an attribute of the environments, on the wrapper that has it if one does; new forks will have it too."""
        targets = self._targets(indices)
        self._core.set_attr(targets, attr_name, [value] * len(targets))

    def env_method(
        self, method_name: str, *method_args: Any, indices: Indices = None, **method_kwargs: Any
    ) -> list[Any]:
        """Call a method of the environments; what it changes lasts until the copy is forked anew.

        Args:
            method_name: the method.
            *method_args: passed on.
            indices: which copies: None for all, an int, or an iterable of ints; negative ones count from the end.
            **method_kwargs: passed on.

        Returns:
            The results, in the order of ``indices``.
        """
        return self._call(indices, method_name, method_args, method_kwargs)

    def env_is_wrapped(
        self, wrapper_class: type[gym.Wrapper[Any, Any, Any, Any]], indices: Indices = None
    ) -> list[bool]:
        """Whether each environment is wrapped in ``wrapper_class`` or a subclass of it."""
        name = class_name(wrapper_class)
        chains = self._call(indices, CLASSES)
        # The last entry is the environment itself, not a wrapper.
        return [any(name in bases for bases in chain[:-1]) for chain in chains]

    def get_images(self) -> Sequence[npt.NDArray[Any] | None]:
        """One frame per copy, ``(height, width, 3)`` uint8; None where the render mode is not ``rgb_array``."""
        if self.render_mode != "rgb_array":
            warnings.warn(f"the render mode is {self.render_mode!r}: images are to be had with 'rgb_array' only")
            return [None] * self.num_envs
        return self.env_method("render")

    def _targets(self, indices: Indices) -> list[int]:
        if indices is None:
            return list(range(self.num_envs))
        if hasattr(indices, "__index__") and not (isinstance(indices, np.ndarray) and indices.ndim):
            indices = [operator.index(indices)]  # type: ignore[arg-type]
        targets: list[int] = []
        for item in indices:
            index = operator.index(item)
            if not -self.num_envs <= index < self.num_envs:
                raise IndexError(f"there is no copy {index}: num_envs={self.num_envs}")
            targets.append(index % self.num_envs)
        return targets

    def _call(
        self, indices: Indices, name: str, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> list[Any]:
        targets = self._targets(indices)
        # A copy named twice is asked twice, as a loop over environments would.
        rounds = [targets] if len(set(targets)) == len(targets) else [[target] for target in targets]
        results: list[Any] = []
        for some in rounds:
            results += self._core.call(some, name, args, kwargs)
        return results

    def __repr__(self) -> str:
        return f"<ForkedVecEnv of {self.vector_env!r}>"

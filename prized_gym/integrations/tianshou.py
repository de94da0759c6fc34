"""``ForkedVenv``: forked copies for Tianshou's collectors (``pip install tianshou``)."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from copy import deepcopy
from typing import Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space, concatenate, create_empty_array, iterate

from prized_gym.base import Base
from prized_gym.errors import MissingExtraError
from prized_gym.recipe import EnvFactory
from prized_gym.vector.forked_vector_env import ForkedVectorEnv

try:
    from tianshou.env import BaseVectorEnv
except ImportError as error:
    raise MissingExtraError("prized_gym.integrations.tianshou needs Tianshou: pip install tianshou") from error

__all__ = ["ForkedVenv"]

Ids = int | Iterable[int] | None


class ForkedVenv(BaseVectorEnv):
    """N copies of one environment, forked live from a warm base, as one of Tianshou's vector environments.

    Example:
        >>> from tianshou.data import Collector
        >>> from prized_gym.integrations.tianshou import ForkedVenv
        >>> envs = ForkedVenv("CartPole-v1", num_envs=4)
        >>> len(envs)
        4
        >>> envs.close()

    It steps and resets any subset of its copies, which are not reset on their own: collectors do that. Each ``reset`` makes new
    forks of the base unless ``fork_on="start"``. For Tianshou's ``Collector``, not for its ``AsyncCollector``.

    Args:
        env: what :class:`~prized_gym.ForkedVectorEnv` takes: a :class:`~prized_gym.Base`, an env id, an ``EnvSpec``, a
            callable, or a list of callables, one per copy.
        num_envs: how many copies; the length of the list if ``env`` is one, else 1 by default.
        **options: any other option of :class:`~prized_gym.ForkedVectorEnv`, but ``autoreset_mode``.

    Attributes:
        vector_env: the vector environment underneath, for its ``history()`` and ``base``.

    Raises:
        TypeError: an unknown option.
    """

    def __init__(
        self,
        env: Base | str | EnvSpec | EnvFactory | Sequence[EnvFactory],
        num_envs: int | None = None,
        **options: Any,
    ) -> None:
        if "autoreset_mode" in options:
            raise TypeError(
                "ForkedVenv() got an unexpected keyword argument 'autoreset_mode': Tianshou's collectors reset episodes "
                "themselves, so it is always disabled"
            )
        # Not BaseVectorEnv.__init__, which makes one worker per callable: here all copies are stepped as one batch.
        self.vector_env = ForkedVectorEnv(env, num_envs, autoreset_mode=AutoresetMode.DISABLED, **options)
        self._core = self.vector_env.core
        self.env_num = self.wait_num = self.vector_env.num_envs
        self.timeout = None
        self.is_async = False
        self.is_closed = False
        self.waiting_id: list[int] = []
        self.ready_id = list(range(self.env_num))
        self._action_spaces = [deepcopy(self.vector_env.single_action_space) for _ in range(self.env_num)]

    def reset(self, env_id: Ids = None, **kwargs: Any) -> tuple[npt.NDArray[Any], npt.NDArray[np.object_]]:
        """Reset some copies.

        Args:
            env_id: which: None for all, an int, or ints.
            **kwargs: ``seed``: an int s (copy i gets ``s + i``) or one seed per copy of ``env_id``; ``options``: a dict for
                all of them.

        Returns:
            The observations of these copies, in the order of ``env_id`` (an object array of dicts for a Dict space), and an
            object array of their infos.
        """
        self._assert_is_not_closed()
        ids = self._ids(env_id)
        seed, options = kwargs.pop("seed", None), kwargs.pop("options", None)
        if kwargs:
            raise TypeError(f"reset() got unexpected keyword arguments {', '.join(kwargs)}")
        given = list(seed) if isinstance(seed, Iterable) else None
        if given is not None and len(given) != len(ids):
            raise ValueError(f"got {len(given)} seeds for {len(ids)} copies")
        seeds: list[int | None] = [None] * self.env_num
        for number, index in enumerate(ids):
            if seed is not None:
                seeds[index] = given[number] if given is not None else operator.index(seed) + index
        if len(ids) < self.env_num:
            mask = np.zeros(self.env_num, dtype=np.bool_)
            mask[ids] = True
            options = {**(options or {}), "reset_mask": mask}
        observations, infos = self._core.reset(seeds, options)
        every = self._split(observations, self.env_num)
        return self._stack([every[index] for index in ids]), _objects([infos.get(index, {}) for index in ids])

    def step(self, action: Any, id: Ids = None) -> tuple[Any, Any, Any, Any, Any]:
        """Step some copies.

        Args:
            action: one action per copy of ``id``.
            id: which: None for all, an int, or ints.

        Returns:
            Observations, rewards (float64), terminations and truncations (bool) and infos of these copies, in the order of
            ``id``; each info has ``env_id``.
        """
        self._assert_is_not_closed()
        ids = self._ids(id)
        if action is None or len(action) != len(ids):
            raise ValueError(f"step() needs {len(ids)} actions, one per copy of {ids}, got {action!r}")
        observations, rewards, terminations, truncations, infos, order = self._core.step_some(self._batch(action), ids)
        place = {int(index): number for number, index in enumerate(order)}
        rows = [place[index] for index in ids]
        every = self._split(observations, len(ids))
        return (
            self._stack([every[row] for row in rows]),
            rewards[rows],
            terminations[rows],
            truncations[rows],
            _objects([{**infos.get(index, {}), "env_id": index} for index in ids]),
        )

    def _batch(self, actions: Any) -> Any:
        space = self.vector_env.single_action_space
        if isinstance(space, (gym.spaces.Dict, gym.spaces.Tuple)):
            out: Any = create_empty_array(space, len(actions))
            return concatenate(space, list(actions), out)
        return actions

    def _split(self, observations: Any, count: int) -> list[Any]:
        return list(iterate(batch_space(self.vector_env.single_observation_space, count), observations))

    def _stack(self, observations: list[Any]) -> npt.NDArray[Any]:
        return _objects(observations) if isinstance(observations[0], dict) else np.stack(observations)

    def seed(self, seed: int | list[int] | None = None) -> list[list[int] | None]:
        """Seed the action spaces, and the copies, which are reset for that, as Tianshou's own are.

        Args:
            seed: an int s (copy i gets ``s + i``), one per copy, or None, which changes nothing.

        Returns:
            The seeds, each a list of one, or None.
        """
        self._assert_is_not_closed()
        if seed is None:
            return [None] * self.env_num
        seeds = list(seed) if isinstance(seed, Iterable) else [seed + index for index in range(self.env_num)]
        self.reset(seed=seeds)
        for space, one in zip(self._action_spaces, seeds, strict=True):
            space.seed(one)
        return [[one] for one in seeds]

    def get_env_attr(self, key: str, id: Ids = None) -> list[Any]:
        """The attribute of each environment, or of the wrapper of it that has one."""
        self._assert_is_not_closed()
        ids = self._ids(id)
        if key == "action_space":
            return [self._action_spaces[index] for index in ids]
        return list(self._core.call(ids, "get_wrapper_attr", (key,)))

    def set_env_attr(self, key: str, value: Any, id: Ids = None) -> None:
        """Set an attribute of the environments, on the wrapper that has it if one does; new forks will have it too."""
        self._assert_is_not_closed()
        ids = self._ids(id)
        self._core.set_attr(ids, key, [value] * len(ids))

    def render(self, **kwargs: Any) -> list[Any]:
        """What each environment's ``render`` gives."""
        self._assert_is_not_closed()
        return list(self.vector_env.call("render", **kwargs))

    def close(self) -> None:
        """End the copies, and the base unless it was given."""
        if not self.is_closed:
            self.vector_env.close()
            self.is_closed = True

    def _ids(self, ids: Ids) -> list[int]:
        if ids is None:
            return list(range(self.env_num))
        chosen = [operator.index(ids)] if np.isscalar(ids) else [operator.index(one) for one in ids]  # type: ignore
        for index in chosen:
            if not 0 <= index < self.env_num:
                raise IndexError(f"there is no copy {index}: {self.env_num=}")
        return chosen


def _objects(values: list[Any]) -> npt.NDArray[np.object_]:
    array = np.empty(len(values), dtype=object)
    for number, value in enumerate(values):
        array[number] = value
    return array

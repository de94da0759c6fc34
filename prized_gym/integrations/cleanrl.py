"""``LegacyInfo``: the infos that CleanRL's scripts read, from any same-step vector environment."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AutoresetMode

from prized_gym.base import Base
from prized_gym.infos import split
from prized_gym.recipe import EnvFactory
from prized_gym.vector.forked_vector_env import ForkedVectorEnv

__all__ = ["LegacyInfo"]


class LegacyInfo(gym.vector.VectorWrapper[Any, Any, Any]):
    """Adds ``final_info`` and ``final_observation`` as Gymnasium had them before 1.0 and CleanRL's scripts read them.

    Whenever an episode ends, the infos hold

    - ``final_info``: an object array of length ``num_envs``: the last info of each episode that ended, a dict; else None;
    - ``final_observation``: an object array of length ``num_envs``: the last observation of each episode that ended; else
      None;
    - the masks ``_final_info`` and ``_final_observation``.

    In a script, ``envs = gym.vector.SyncVectorEnv(`` becomes ``envs = LegacyInfo(``, with the list of callables as it is.

        >>> from prized_gym.integrations.cleanrl import LegacyInfo
        >>> envs = LegacyInfo("CartPole-v1", num_envs=4)
        >>> observations, infos = envs.reset(seed=1)
        >>> while "final_info" not in infos:
        ...     observations, rewards, terminations, truncations, infos = envs.step(envs.action_space.sample())
        >>> [type(info).__name__ for info in infos["final_info"]].count("dict") >= 1
        True
        >>> envs.close()

    Methods and attributes that Gymnasium's ``VectorWrapper`` does not pass on (``call``, ``get_attr``, ``set_attr``,
    ``history`` and the like) are those of the vector environment inside.

    Args:
        env: what :class:`~prized_gym.ForkedVectorEnv` takes, to be forked with same-step autoreset; or a vector environment
            made with ``autoreset_mode="SameStep"``, ours or Gymnasium's.
        num_envs: how many copies.
        **options: any other option of :class:`~prized_gym.ForkedVectorEnv`, but ``autoreset_mode``.

    Raises:
        ValueError: ``env`` is a vector environment that resets its episodes in another mode.
        TypeError: an unknown option, or options for a vector environment that exists already.
    """

    def __init__(
        self,
        env: gym.vector.VectorEnv[Any, Any, Any] | Base | str | EnvSpec | EnvFactory | Sequence[EnvFactory],
        num_envs: int | None = None,
        **options: Any,
    ) -> None:
        if not isinstance(env, gym.vector.VectorEnv):
            if "autoreset_mode" in options:
                raise TypeError(
                    "LegacyInfo() got an unexpected keyword argument 'autoreset_mode': it is always same-step"
                )
            env = ForkedVectorEnv(env, num_envs, autoreset_mode=AutoresetMode.SAME_STEP, **options)
        elif num_envs is not None or options:
            raise TypeError(
                "num_envs and options belong to a vector environment that LegacyInfo makes, not to one given"
            )
        super().__init__(env)
        mode = env.metadata.get("autoreset_mode")
        if mode != AutoresetMode.SAME_STEP:
            raise ValueError(
                f"LegacyInfo needs an environment with autoreset_mode='SameStep', as vector environments reset before "
                f"Gymnasium 1.0, but {env} has {(mode.value if isinstance(mode, AutoresetMode) else mode)!r}"
            )

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Step every copy; the infos are as the class says."""
        observations, rewards, terminations, truncations, infos = self.env.step(actions)
        if "final_obs" in infos:
            ended = infos["_final_obs"]
            infos["final_observation"], infos["_final_observation"] = infos["final_obs"], ended.copy()
            # An episode that ended without an info still has one, an empty dict.
            merged = infos.get("final_info", {})
            finals = np.full(self.num_envs, None, dtype=object)
            for index, info in enumerate(split(merged, self.num_envs) if isinstance(merged, dict) else merged):
                if ended[index]:
                    finals[index] = info
            infos["final_info"], infos["_final_info"] = finals, ended.copy()
        return observations, rewards, terminations, truncations, infos

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "env":
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.env, name)

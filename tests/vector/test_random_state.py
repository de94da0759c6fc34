"""``np_random`` from outside: set for one episode, which the next go on from, and seen where it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from prized_gym import ForkedEnv, ForkedVectorEnv


class Drawing(gym.Env[Any, Any]):
    """Every observation is drawn from ``np_random``."""

    observation_space = gym.spaces.Box(0, 1, (1,), np.float64)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        return self.np_random.random(1), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return self.np_random.random(1), 0.0, False, False, {}


@pytest.mark.parametrize("options", [{}, {"fork_on": "start"}, {"engine": "inline"}])
@pytest.mark.parametrize(
    "before",
    [
        lambda envs: None,
        lambda envs: envs.get_attr("spec"),
        lambda envs: envs.reset(seed=0),
        lambda envs: [envs.reset(seed=0), envs.step([0, 0]), envs.reset()],
    ],
)
def test_a_random_state_that_is_set_is_gone_on_from(before: Callable[[Any], Any], options: dict[str, Any]) -> None:
    found = []
    for envs in (ForkedVectorEnv(Drawing, 2, progress=False, **options), gym.vector.SyncVectorEnv([Drawing] * 2)):
        before(envs)
        envs.set_attr("np_random", [np.random.default_rng(5), np.random.default_rng(6)])
        drawn = [envs.reset()[0] for _ in range(3)]
        drawn += [envs.step(np.zeros(2, int))[0] for _ in range(2)]
        drawn += [envs.reset()[0], envs.reset(seed=3)[0], envs.reset()[0]]
        found.append((np.concatenate(drawn).tolist(), envs.get_attr("np_random_seed")))
        envs.close()
    assert found[0] == found[1]


def test_the_generator_of_a_forked_env_is_the_copys() -> None:
    env, reference = ForkedEnv(Drawing, progress=False), Drawing()
    for each in (env, reference):
        each.reset(seed=7)
        each.step(0)
    assert env.np_random.random() == reference.np_random.random()
    assert env.np_random_seed == reference.np_random_seed == 7
    # Looking takes nothing from it.
    reference.reset(seed=7)
    env.reset(seed=7)
    assert env.step(0)[0].tolist() == reference.step(0)[0].tolist()
    for each in (env, reference):
        each.np_random = np.random.default_rng(9)
    for _ in range(3):
        assert env.reset()[0].tolist() == reference.reset()[0].tolist()
    assert env.np_random_seed == reference.np_random_seed == -1
    env.close()


@pytest.mark.filterwarnings("ignore")
def test_gymnasiums_checker_is_content() -> None:
    env = ForkedEnv(Drawing, progress=False)
    check_env(env, skip_render_check=True)
    env.close()


class Driving(Drawing):
    """One whose ``unwrapped`` is no environment, but what it drives."""

    @property
    def unwrapped(self) -> Any:
        return object()


@pytest.mark.parametrize("options", [{}, {"engine": "inline"}, {"fork_on": "episode"}])
def test_an_environment_whose_unwrapped_is_something_else(options: dict[str, Any]) -> None:
    envs = ForkedVectorEnv([lambda: Driving() for _ in range(2)], progress=False, **options)
    reference = gym.vector.SyncVectorEnv([Drawing] * 2)
    for seed in (3, None, None):
        assert envs.reset(seed=seed)[0].tolist() == reference.reset(seed=seed)[0].tolist()
        assert envs.step([0, 0])[0].tolist() == reference.step([0, 0])[0].tolist()
    envs.close()

"""``LegacyInfo``: infos as CleanRL's scripts read them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

import prized_gym
from prized_gym.integrations.cleanrl import LegacyInfo
from zoo.walk import Walk, bare_walk


def recorded() -> gym.Env[Any, Any]:
    return gym.wrappers.RecordEpisodeStatistics(Walk(limit=5))


def gymnasiums(count: int) -> gym.vector.VectorEnv[Any, Any, Any]:
    return gym.vector.SyncVectorEnv([recorded] * count, autoreset_mode="SameStep")


def ours(count: int) -> gym.vector.VectorEnv[Any, Any, Any]:
    return prized_gym.ForkedVectorEnv(recorded, count, autoreset_mode="SameStep")


@pytest.mark.parametrize("inner", [ours, gymnasiums, lambda count: [recorded] * count])
def test_infos_are_what_the_scripts_read(inner: Callable[[int], Any]) -> None:
    envs = LegacyInfo(inner(3))
    observations, infos = envs.reset(seed=1)
    assert "final_info" not in infos
    ended = 0
    for step in range(40):
        actions = np.array([step % 2, 1, 0])
        following, _, terminations, truncations, infos = envs.step(actions)
        over = terminations | truncations
        assert ("final_info" in infos) == bool(over.any())
        if "final_info" in infos:
            assert len(infos["final_info"]) == len(infos["final_observation"]) == 3
            np.testing.assert_array_equal(infos["_final_info"], over)
            np.testing.assert_array_equal(infos["_final_observation"], over)
            for index, info in enumerate(infos["final_info"]):
                assert (info is not None) == over[index]
                if info and "episode" in info:
                    assert 0 < info["episode"]["l"] <= 5
                    assert isinstance(float(info["episode"]["r"]), float)
                    assert info["trail"][1] == info["episode"]["l"]
                    ended += 1
            real = following.copy()
            for index in np.flatnonzero(over):
                real[index] = infos["final_observation"][index]
                assert real[index][1] > 0
                assert following[index][1] == 0
        observations = following
    assert observations.shape == (3, 2)
    assert ended > 10
    envs.close()


def test_an_end_without_an_info_still_counts() -> None:
    # CartPole gives no infos.
    envs = LegacyInfo("CartPole-v1", num_envs=2)
    envs.reset(seed=0)
    infos: dict[str, Any] = {}
    while "final_info" not in infos:
        *_, infos = envs.step(np.array([0, 1]))
    assert {type(info) for info in infos["final_info"]} <= {dict, type(None)}
    assert sum(info is not None for info in infos["final_info"]) == infos["_final_info"].sum() >= 1
    envs.close()


def test_what_gymnasiums_wrapper_does_not_pass_on() -> None:
    envs = LegacyInfo(bare_walk, 2, fork_on="start")
    assert envs.call("scale", 3.0) == (3.0, 3.0)
    envs.set_attr("weight", [1, 2])
    assert envs.get_attr("weight") == (1, 2)
    assert envs.history() == []
    assert envs.num_envs == 2
    # Some scripts do this before they allocate their replay buffer.
    envs.single_observation_space.dtype = np.float64
    assert envs.reset(seed=1)[0].dtype == np.float32
    with pytest.raises(AttributeError):
        envs._nonsense
    envs.close()


@pytest.mark.parametrize("mode", ["NextStep", "Disabled"])
def test_another_mode_is_refused_and_the_right_one_named(mode: str) -> None:
    envs = prized_gym.ForkedVectorEnv(bare_walk, 2, autoreset_mode=mode)
    with pytest.raises(ValueError, match=f"autoreset_mode='SameStep'.*'{mode}'"):
        LegacyInfo(envs)
    envs.close()
    with pytest.raises(TypeError, match="autoreset_mode"):
        LegacyInfo(bare_walk, 2, autoreset_mode=mode)


def test_options_for_an_existing_vector_env_are_refused() -> None:
    envs = ours(1)
    with pytest.raises(TypeError, match="num_envs"):
        LegacyInfo(envs, 2)
    envs.close()

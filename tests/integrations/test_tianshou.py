"""``ForkedVenv`` where Tianshou expects a ``BaseVectorEnv``."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from tools.libraries import need
from zoo.walk import Walk, bare_walk

# Compiling takes longer than these small runs.
os.environ.setdefault("NUMBA_DISABLE_JIT", "1")

torch = need("torch", "torch")
need("tianshou", "tianshou")

from tianshou.algorithm.modelfree.dqn import DQN, DiscreteQLearningPolicy  # noqa: E402
from tianshou.algorithm.optim import AdamOptimizerFactory  # noqa: E402
from tianshou.data import Collector, VectorReplayBuffer  # noqa: E402
from tianshou.env import BaseVectorEnv, DummyVectorEnv  # noqa: E402
from tianshou.trainer import OffPolicyTrainerParams  # noqa: E402
from tianshou.utils.net.common import Net  # noqa: E402

import prized_gym  # noqa: E402
from prized_gym.integrations.tianshou import ForkedVenv  # noqa: E402


@pytest.fixture
def envs() -> Iterator[ForkedVenv]:
    made = ForkedVenv(bare_walk, 4)
    yield made
    made.close()


def test_steps_and_resets_subsets(envs: ForkedVenv) -> None:
    assert isinstance(envs, BaseVectorEnv)
    assert len(envs) == 4
    observations, infos = envs.reset(seed=3)
    assert observations.shape == (4, 2)
    assert [info["start"] for info in infos] == list(observations[:, 0])
    stepped = envs.step(np.array([0, 1]), [3, 1])
    assert stepped[0].shape == (2, 2)
    assert [info["env_id"] for info in stepped[4]] == [3, 1]
    assert [info["place"] for info in stepped[4]] == list(stepped[0][:, 0])
    again, _ = envs.reset([3, 0], seed=3)
    np.testing.assert_array_equal(again, observations[[3, 0]])
    assert envs.get_env_attr("steps") == [0, 1, 0, 0]
    assert envs.step(np.array([1]), 2)[1].shape == (1,)


def test_seeds(envs: ForkedVenv) -> None:
    assert envs.seed() == [None] * 4
    assert envs.seed(3) == [[3], [4], [5], [6]]
    first = [envs.reset()[0] for _ in range(3)]
    assert envs.seed([3, 4, 5, 6]) == [[3], [4], [5], [6]]
    np.testing.assert_array_equal([envs.reset()[0] for _ in range(3)], first)
    assert len({tuple(observations.ravel()) for observations in first}) > 1
    with pytest.raises(ValueError, match="4 copies"):
        envs.seed([1])


def test_attributes(envs: ForkedVenv) -> None:
    envs.set_env_attr("weight", 4.0, [0, 2])
    assert envs.get_env_attr("weight") == [4.0, 1.0, 4.0, 1.0]
    assert envs.action_space == [gym.spaces.Discrete(2)] * 4
    assert envs.observation_space[0] == Walk().observation_space
    with pytest.raises(IndexError, match="copy 4"):
        envs.step(np.array([0]), [4])
    with pytest.raises(ValueError, match="2 actions"):
        envs.step(np.array([0]), [0, 1])


def test_dict_observations() -> None:
    envs = ForkedVenv(lambda: Walk("dict"), 2)
    observations, _ = envs.reset(seed=1)
    assert observations.dtype == object
    assert observations[1]["position"].shape == (2,)
    assert envs.step(np.array([0, 1]))[0][0]["image"].shape == (36, 36, 1)
    envs.close()
    envs.close()


@pytest.mark.parametrize("option", ["autoreset_mode", "nonsense"])
def test_options_that_make_no_sense_are_refused(option: str) -> None:
    with pytest.raises(TypeError, match=option):
        ForkedVenv(bare_walk, 2, **{option: "NextStep"})


def train(training: Any, testing: Any) -> tuple[Any, VectorReplayBuffer]:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    np.random.seed(0)
    env = gym.make("CartPole-v1")
    policy = DiscreteQLearningPolicy(
        model=Net(state_shape=(4,), action_shape=2, hidden_sizes=[32]),
        action_space=env.action_space,
        observation_space=env.observation_space,
        eps_training=0.1,
    )
    algorithm = DQN(policy=policy, optim=AdamOptimizerFactory(lr=1e-3), gamma=0.95, target_update_freq=50)
    buffer = VectorReplayBuffer(2000, len(training))
    collectors = Collector(algorithm, training, buffer), Collector(algorithm, testing)
    for collector, seed in zip(collectors, (1, 2), strict=True):
        collector.env.seed(seed)
        collector.reset()
    result = algorithm.run_training(
        OffPolicyTrainerParams(
            training_collector=collectors[0],
            test_collector=collectors[1],
            max_epochs=2,
            epoch_num_steps=200,
            collection_step_num_env_steps=8,
            update_step_num_gradient_steps_per_sample=0.125,
            batch_size=32,
            test_step_num_episodes=2,
            show_progress=False,
            verbose=False,
        )
    )
    return result, buffer


def test_trains_as_on_dummy_vector_env() -> None:
    runs = []
    with prized_gym.Base("CartPole-v1") as base:
        for training, testing in (
            (ForkedVenv(base, 4, fork_on="start"), ForkedVenv(base, 2, fork_on="start")),
            tuple(DummyVectorEnv([lambda: gym.make("CartPole-v1")] * count) for count in (4, 2)),
        ):
            result, buffer = train(training, testing)
            training.close()
            testing.close()
            assert result.train_step == 400
            assert buffer.terminated.sum() > 4
            runs.append(buffer)
    np.testing.assert_array_equal(runs[0].obs, runs[1].obs)
    np.testing.assert_array_equal(runs[0].obs_next, runs[1].obs_next)
    np.testing.assert_array_equal(runs[0].rew, runs[1].rew)

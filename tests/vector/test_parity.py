"""Everything from a seeded reset on is bit-identical to SyncVectorEnv, for every space, mode and engine."""

from __future__ import annotations

from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv

import prized_gym
from tools.comparing import assert_same, compare
from zoo.envs import SpaceEnv
from zoo.spaces import SPACES

MODES = [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP, AutoresetMode.DISABLED]


# What SyncVectorEnv itself cannot step, and a dict whose keys it puts into an order of its own.
NO_REFERENCE = {"dict_empty", "tuple_empty", "dict_in_its_own_order"}


@pytest.mark.parametrize("space", [name for name in SPACES if name not in NO_REFERENCE])
def test_every_space_and_mode(space: str, engine: str) -> None:
    make = partial(SpaceEnv, space)
    with prized_gym.Base(make, engine=engine) as base:
        for mode in MODES:
            forked = prized_gym.ForkedVectorEnv(base, num_envs=3, autoreset_mode=mode, fork_on="start")
            reference = SyncVectorEnv([make] * 3, autoreset_mode=mode)
            try:
                compare(forked, reference, 60, mode is AutoresetMode.DISABLED, masked=True)
            finally:
                forked.close()
                reference.close()


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.value)
@pytest.mark.parametrize("env", ["CartPole-v1", "Pendulum-v1", "Acrobot-v1"])
def test_gymnasium_environments(env: str, mode: AutoresetMode, engine: str) -> None:
    forked = prized_gym.ForkedVectorEnv(env, num_envs=4, engine=engine, autoreset_mode=mode)
    reference = SyncVectorEnv([lambda: gym.make(env)] * 4, autoreset_mode=mode)
    try:
        # With fork_on="reset" an unseeded masked reset forks anew, so only done copies are reset, with seeds.
        rng = np.random.default_rng(1)
        assert_same(forked.reset(seed=5), reference.reset(seed=5))
        reference.action_space.seed(5)
        for _ in range(300):
            actions = reference.action_space.sample()
            ours, theirs = forked.step(actions), reference.step(actions)
            assert_same(ours, theirs)
            done = theirs[2] | theirs[3]
            if mode is AutoresetMode.DISABLED and done.any():
                seeds = [int(seed) for seed in rng.integers(0, 10_000, 4)]
                mask = {"reset_mask": done}
                assert_same(forked.reset(seed=seeds, options=mask), reference.reset(seed=seeds, options=dict(mask)))
    finally:
        forked.close()
        reference.close()


@pytest.mark.parametrize("dtype", ["int32", "int64", "uint8", "float32", "float64", "bool"])
def test_actions_arrive_in_the_dtype_they_were_given_in(dtype: str, engine: str) -> None:
    make = partial(SpaceEnv, "box", "multibinary" if dtype in ("int32", "uint8", "bool") else "box")
    if dtype == "int64":
        make = partial(SpaceEnv, "box", "discrete")
    forked = prized_gym.ForkedVectorEnv(make, num_envs=2, engine=engine)
    reference = SyncVectorEnv([make] * 2)
    try:
        assert_same(forked.reset(seed=1), reference.reset(seed=1))
        for _ in range(10):
            actions = np.asarray(reference.action_space.sample()).astype(dtype)
            assert_same(forked.step(actions), reference.step(actions))
    finally:
        forked.close()
        reference.close()


def test_casts_that_numpy_makes(engine: str) -> None:
    class Doubles(SpaceEnv):
        def _observe(self) -> Any:
            return self.np_random.random(3)

    forked = prized_gym.ForkedVectorEnv(Doubles, num_envs=2, engine=engine)
    reference = SyncVectorEnv([Doubles] * 2)
    try:
        assert_same(forked.reset(seed=1)[0], reference.reset(seed=1)[0])
        for _ in range(20):
            assert_same(forked.step(np.zeros((2, 3), np.float32))[0], reference.step(np.zeros((2, 3), np.float32))[0])
    finally:
        forked.close()
        reference.close()


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.value)
def test_partial_steps_are_the_same_as_whole_ones(mode: AutoresetMode, engine: str) -> None:
    make = partial(SpaceEnv, "box")
    count = 4
    ours = prized_gym.ForkedVectorEnv(make, num_envs=count, engine=engine, autoreset_mode=mode, fork_on="start")
    whole = prized_gym.ForkedVectorEnv(make, num_envs=count, engine=engine, autoreset_mode=mode, fork_on="start")
    rng = np.random.default_rng(0)
    try:
        assert_same(ours.reset(seed=3), whole.reset(seed=3))
        for _ in range(40):
            actions = rng.uniform(-1, 1, (count, 3)).astype(np.float32)
            expected = whole.step(actions)
            order = rng.permutation(count)
            ours.send(actions[order[:2]], order[:2])
            ours.send(actions[order[2:]], order[2:])
            seen: list[int] = []
            while len(seen) < count:
                obs, rewards, terminations, truncations, _, indices = ours.recv(1)
                for position, index in enumerate(indices):
                    seen.append(int(index))
                    assert_same(obs[position], expected[0][index])
                    assert rewards[position] == expected[1][index]
                    assert terminations[position] == expected[2][index]
                    assert truncations[position] == expected[3][index]
            assert sorted(seen) == list(range(count))
            done = expected[2] | expected[3]
            if mode is AutoresetMode.DISABLED and done.any():
                mask = {"reset_mask": done}
                assert_same(ours.reset(options=mask), whole.reset(options=mask))
    finally:
        ours.close()
        whole.close()


def test_fork_on_episode_gives_each_episode_the_state_of_the_base(engine: str) -> None:
    class Counting(SpaceEnv):
        episodes = 0

        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            self.episodes += 1
            observation, _ = super().reset(seed=seed)
            return observation, {"episodes": self.episodes, "seed": seed}

    for mode in (AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP):
        with prized_gym.Base(Counting, engine=engine) as base:
            envs = prized_gym.ForkedVectorEnv(base, num_envs=2, autoreset_mode=mode, fork_on="episode")
            _, infos = envs.reset(seed=0)
            seeds = [[], []]
            for _ in range(100):
                *_, infos = envs.step(np.zeros((2, 3), np.float32))
                if "episodes" in infos:
                    for index in np.flatnonzero(infos["_episodes"]):
                        assert infos["episodes"][index] == 1
                        seeds[index].append(infos["seed"][index])
            assert all(len(set(column)) == len(column) > 3 for column in seeds)
            assert not set(seeds[0]) & set(seeds[1])
            envs.close()

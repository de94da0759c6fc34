"""Everything from a seeded reset on is bit-identical to SyncVectorEnv, for every space, mode and engine."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from envs import SPACES, SpaceEnv
from gymnasium.vector import AutoresetMode, SyncVectorEnv

import prized_gym

MODES = [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP, AutoresetMode.DISABLED]


def assert_same(a: Any, b: Any, path: str = "") -> None:
    """Equal in type, structure, dtype and every bit."""
    assert type(a) is type(b), (path, type(a), type(b))
    if isinstance(a, dict):
        assert list(a) == list(b), (path, list(a), list(b))
        for key in a:
            assert_same(a[key], b[key], f"{path}.{key}")
    elif isinstance(a, (tuple, list)):
        assert len(a) == len(b), path
        for index, (x, y) in enumerate(zip(a, b, strict=True)):
            assert_same(x, y, f"{path}[{index}]")
    elif isinstance(a, np.ndarray):
        assert a.dtype == b.dtype and a.shape == b.shape, (path, a.dtype, b.dtype, a.shape, b.shape)
        if a.dtype == object:
            for index, (x, y) in enumerate(zip(a.ravel(), b.ravel(), strict=True)):
                assert_same(x, y, f"{path}[{index}]")
        else:
            assert a.tobytes() == b.tobytes(), (path, a, b)
    else:
        assert a == b, (path, a, b)


def compare(
    forked: gym.vector.VectorEnv[Any, Any, Any],
    reference: gym.vector.VectorEnv[Any, Any, Any],
    steps: int,
    disabled: bool,
    masked: bool,
) -> None:
    rng = np.random.default_rng(0)
    count = forked.num_envs
    assert forked.observation_space == reference.observation_space
    assert forked.action_space == reference.action_space
    assert_same(forked.reset(seed=7), reference.reset(seed=7))
    reference.action_space.seed(3)
    for step in range(steps):
        actions = reference.action_space.sample()
        ours = forked.step(copy.deepcopy(actions))
        theirs = reference.step(actions)
        assert_same(ours, theirs, f"step {step}")
        done = theirs[2] | theirs[3]
        mask = done if disabled else np.zeros(count, np.bool_)
        if masked and step % 7 == 3:
            mask = mask | (rng.random(count) < 0.4)
        if mask.any():
            seeds = [None if rng.random() < 0.5 else int(rng.integers(1000)) for _ in range(count)]
            options = {"reset_mask": mask, "difficulty": step}
            # SyncVectorEnv takes the mask out of the caller's dict; ours must not.
            ours_reset = forked.reset(seed=seeds, options=options)
            assert options["reset_mask"] is mask
            assert_same(ours_reset, reference.reset(seed=seeds, options=dict(options)), f"reset {step}")
    assert_same(forked.reset(seed=11, options={"x": 1}), reference.reset(seed=11, options={"x": 1}))


@pytest.mark.parametrize("space", list(SPACES))
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

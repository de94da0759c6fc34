"""The rest of the vector environment: attributes, calls, rendering, masks, partial steps, history, registration."""

from __future__ import annotations

import math
import multiprocessing
import os
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.error import AlreadyPendingCallError, NoAsyncCallError
from gymnasium.utils.env_checker import check_env
from gymnasium.vector import AutoresetMode, SyncVectorEnv

import prized_gym
from prized_gym import Base, ForkedVectorEnv
from zoo.envs import Loaded, SpaceEnv
from zoo.faulty import Faulty

pytestmark = pytest.mark.timeout(180)


def test_attributes(engine: str) -> None:
    envs = ForkedVectorEnv(SpaceEnv, num_envs=2, engine=engine, autoreset_mode="SameStep", render_mode="rgb_array")
    assert envs.metadata == {"render_modes": ["rgb_array"], "kind": "space", "autoreset_mode": AutoresetMode.SAME_STEP}
    assert SpaceEnv.metadata == {"render_modes": ["rgb_array"], "kind": "space"}
    assert envs.autoreset_mode is AutoresetMode.SAME_STEP
    assert isinstance(envs, gym.vector.VectorEnv) and gym.vector.VectorEnv in ForkedVectorEnv.__bases__
    assert envs.render_mode == "rgb_array" and envs.num_envs == 2 and not envs.closed
    assert envs.unwrapped is envs and envs.spec is None
    assert repr(envs) == "ForkedVectorEnv(num_envs=2)"
    envs.reset(seed=0)
    frames = envs.render()
    assert len(frames) == 2 and frames[0].shape == (2, 2, 3) and frames[0].max() == 0
    envs.step(np.zeros((2, 3), np.float32))
    assert envs.render()[1].max() == 1
    envs.close()


def test_calls(engine: str) -> None:
    envs = ForkedVectorEnv(Loaded, num_envs=3, engine=engine)
    assert envs.call("add", 2) == (2, 2, 2)
    assert envs.call("add", amount=1) == (3, 3, 3)
    assert envs.get_attr("value") == (3, 3, 3)
    envs.set_attr("value", [1, 2, 3])
    envs.set_attr("flag", "all")
    assert envs.get_attr("value") == (1, 2, 3) and envs.get_attr("flag") == ("all",) * 3
    with pytest.raises(AttributeError, match="nothing_here"):
        envs.get_attr("nothing_here")
    with pytest.raises(ValueError, match=r"Got `2` values for 3"):
        envs.set_attr("value", [1, 2])
    assert envs.call("add", 1) == (2, 3, 4)
    envs.call_some_async([2, 0], "add", 10)
    assert envs.call_wait() == (14, 12)
    envs.reset(seed=0)
    envs.close()


def test_set_attr_lands_on_the_environment_that_has_it(engine: str) -> None:
    envs = ForkedVectorEnv("CartPole-v1", num_envs=2, engine=engine)
    envs.set_attr("gravity", [1.0, 2.0])
    envs.reset(seed=0)
    assert envs.call("get_wrapper_attr", "gravity") == (1.0, 2.0)
    assert [env.gravity for env in envs.get_attr("unwrapped")] == [1.0, 2.0]
    envs.close()


def test_call_wait_times_out_and_can_be_waited_for_again(tmp_path: Path) -> None:
    gate = tmp_path / "gate"

    class Slow(Loaded):
        def nap(self) -> str:
            while not gate.exists():
                time.sleep(0.01)
            return "rested"

    envs = ForkedVectorEnv(Slow, num_envs=2)
    envs.reset()
    envs.call_async("nap")
    with pytest.raises(multiprocessing.TimeoutError):
        envs.call_wait(timeout=0.05)
    gate.touch()
    assert envs.call_wait() == ("rested",) * 2
    envs.close()


def test_a_result_larger_than_a_slot(engine: str) -> None:
    class Large(Loaded):
        def large(self) -> bytes:
            return os.urandom(1) * 3_000_000

        def step(self, action: Any) -> Any:
            observation, reward, terminated, truncated, _ = super().step(action)
            return observation, reward, terminated, truncated, {"blob": b"x" * 100_000, "action": int(action)}

    envs = ForkedVectorEnv(Large, num_envs=3, engine=engine)
    envs.reset()
    assert [len(blob) for blob in envs.call("large")] == [3_000_000] * 3
    for _ in range(20):
        *_, infos = envs.step([0, 1, 0])
        assert infos["action"].tolist() == [0, 1, 0] and all(len(blob) == 100_000 for blob in infos["blob"])
    envs.close()


def test_an_info_that_cannot_be_sent_is_an_error_of_that_copy() -> None:
    class Locked(Loaded):
        def step(self, action: Any) -> Any:
            return *super().step(action)[:4], {"lock": threading.Lock()} if action else {}

    envs = ForkedVectorEnv(Locked, num_envs=2)
    envs.reset()
    with pytest.raises(TypeError, match=r"cannot be sent.*lock"):
        envs.step([0, 1])
    envs.close()


@pytest.mark.parametrize("copy", [True, False])
def test_copy(copy: bool, engine: str) -> None:
    envs = ForkedVectorEnv(Loaded, num_envs=2, engine=engine, copy=copy)
    first, _ = envs.reset(seed=0)
    kept = first.copy()
    second, rewards, terminations, *_ = envs.step([1, 1])
    assert (first.tobytes() == kept.tobytes()) == copy
    assert (first is second) == (not copy)
    rewards[:] = 9
    terminations[:] = True
    _, rewards, terminations, *_ = envs.step([1, 1])
    assert rewards.tolist() == [1, 1] and not terminations.any()
    envs.close()


@pytest.mark.parametrize(
    ("mask", "error", "words"),
    [
        ([True, False], TypeError, "must be a numpy array"),
        (np.array([True]), ValueError, r"must have shape `\(2,\)`"),
        (np.array([1, 0]), TypeError, "dtype=np.bool_"),
        (np.array([False, False]), ValueError, "at least one True"),
    ],
)
def test_masks_that_do_not_fit(mask: Any, error: type[Exception], words: str, engine: str) -> None:
    envs = ForkedVectorEnv(Loaded, num_envs=2, engine=engine)
    envs.reset(seed=0)
    with pytest.raises(error, match=words):
        envs.reset(options={"reset_mask": mask})
    envs.step([0, 1])
    envs.close()


def test_a_reset_while_an_autoreset_is_pending_resets_once(engine: str) -> None:
    class Counts(Faulty):
        resets = 0

        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            self.resets += 1
            return super().reset(seed=seed)[0], {"resets": self.resets}

    envs = ForkedVectorEnv(Counts, num_envs=2, engine=engine, fork_on="start")
    envs.reset(seed=0)
    *_, terminations, _, _ = envs.step([Faulty.END, 0])
    assert terminations.tolist() == [True, False]
    _, infos = envs.reset(seed=1)
    assert infos["resets"].tolist() == [2, 2]
    observations, *_ = envs.step([0, 0])
    assert observations[:, 0].tolist() == [1, 1]
    envs.close()


def test_partial_steps_come_as_they_are_ready(tmp_path: Path) -> None:
    gate = tmp_path / "gate"

    class Uneven(Loaded):
        def step(self, action: Any) -> Any:
            while action and not gate.exists():
                time.sleep(0.01)
            return super().step(action)

    envs = ForkedVectorEnv(Uneven, num_envs=4, step_timeout=30)
    envs.reset(seed=0)
    for _ in range(12):
        envs.step([0] * 4)
    envs.send(np.array([1, 0, 0, 1]))
    *_, indices = envs.recv(2)
    assert indices.tolist() == [1, 2] and indices.dtype == np.int64
    with pytest.raises(AlreadyPendingCallError, match="copy 0"):
        envs.send([0], [0])
    with pytest.raises(AlreadyPendingCallError, match=r"\[0, 3\]"):
        envs.step([0] * 4)
    envs.send([0, 0], [2, 1])
    gate.touch()
    *_, infos, indices = envs.recv(1)
    seen = list(indices)
    while len(seen) < 4:
        *_, indices = envs.recv()
        seen += list(indices)
    assert sorted(seen) == [0, 1, 2, 3]
    with pytest.raises(NoAsyncCallError):
        envs.recv()
    with pytest.raises(ValueError, match="no copy 7"):
        envs.send([0], [7])
    with pytest.raises(ValueError, match="twice"):
        envs.send([0, 0], [1, 1])
    with pytest.raises(ValueError, match="2 actions"):
        envs.send([0], [1, 2])
    envs.step([0] * 4)
    envs.close()


@pytest.mark.parametrize("mode", ["NextStep", "SameStep"])
def test_a_failure_among_partial_steps(mode: str) -> None:
    envs = ForkedVectorEnv(
        Faulty, num_envs=3, on_failure="truncate", step_timeout=2.0, reset_timeout=20, autoreset_mode=mode
    )
    envs.reset(seed=0)
    envs.send([0, Faulty.HANG, Faulty.KILL])
    truncated = np.zeros(3, bool)
    seen: list[int] = []
    while len(seen) < 3:
        *_, truncations, infos, indices = envs.recv()
        truncated[indices] = truncations
        seen += list(indices)
        for position, index in enumerate(indices):
            if truncations[position] and mode == "NextStep":
                assert f"copy {index}" in infos["failure"][position]
    assert truncated.tolist() == [False, True, True]
    for _ in range(3):
        envs.send([0, 0, 0])
        received = 0
        while received < 3:
            received += len(envs.recv()[-1])
    envs.step([0, 0, 0])
    envs.close()


@pytest.mark.parametrize("mode", ["NextStep", "SameStep", "Disabled"])
def test_max_concurrent(mode: str) -> None:
    class Gate(Faulty):
        def __init__(self) -> None:
            super().__init__(episode=5)
            self.path = path

        def step(self, action: Any) -> Any:
            with open(self.path, "ab", buffering=0) as file:
                file.write(b"+")
                time.sleep(0.01)
                file.write(b"-")
            return super().step(action)

    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "log")
        envs = ForkedVectorEnv(Gate, num_envs=5, max_concurrent=2, autoreset_mode=mode)
        envs.reset(seed=0)
        for _ in range(8):
            *_, truncations, _ = envs.step([0] * 5)
            if mode == "Disabled" and truncations.any():
                envs.reset(options={"reset_mask": truncations})
        envs.close()
        running = most = 0
        with open(path) as file:
            for character in file.read():
                running += 1 if character == "+" else -1
                most = max(most, running)
        assert most <= 2 and running == 0


def test_history(engine: str) -> None:
    envs = ForkedVectorEnv(Faulty, num_envs=2, engine=engine, env_kwargs={"episode": 3})
    assert envs.history() == []
    envs.reset(seed=10)
    for _ in range(7):
        envs.step([0, 0])
    episodes = envs.history()
    assert [(e.copy, e.seed, e.length, e.reward) for e in episodes] == [
        (0, 10, 3, 3.0),
        (1, 11, 3, 3.0),
        (0, None, 3, 3.0),
        (1, None, 3, 3.0),
    ]
    assert all(e.seconds > 0 and e.vcpu_seconds >= 0 and math.isnan(e.cost_usd) and e.failure is None for e in episodes)
    envs.close()
    envs = ForkedVectorEnv(Faulty, num_envs=1, engine=engine, env_kwargs={"episode": 2}, fork_on="episode")
    envs.reset(seed=0)
    for _ in range(9):
        envs.step([0])
    seeds = [e.seed for e in envs.history()]
    assert seeds[0] == 0 and len(set(seeds)) == len(seeds) and None not in seeds
    envs.close()


def test_make_vec_and_make() -> None:
    envs = gym.make_vec("prized_gym/Forked-v0", num_envs=3, env="CartPole-v1", autoreset_mode="SameStep")
    assert isinstance(envs, ForkedVectorEnv) and envs.num_envs == 3
    assert envs.spec is not None and envs.spec.id == "prized_gym/Forked-v0"
    assert envs.spec.to_json()
    envs.reset(seed=0)
    envs.step([0, 1, 0])
    envs.close()
    env = gym.make("prized_gym/Forked-v0", env="CartPole-v1")
    reference = gym.make("CartPole-v1")
    for seed in (0, 1):
        ours, theirs = env.reset(seed=seed), reference.reset(seed=seed)
        assert ours[0].tobytes() == theirs[0].tobytes() and ours[1] == theirs[1]
        for step in range(30):
            ours_step, theirs_step = env.step(step % 2), reference.step(step % 2)
            assert ours_step[0].tobytes() == theirs_step[0].tobytes()
            assert ours_step[1:] == theirs_step[1:]
            assert [type(part) for part in ours_step[1:]] == [type(part) for part in theirs_step[1:]]
            if theirs_step[2]:
                break
    assert env.get_wrapper_attr("gravity") == 9.8
    env.close()
    reference.close()
    with pytest.raises(TypeError, match="num_envs"):
        gym.make("prized_gym/Forked-v0", env="CartPole-v1", num_envs=2)


@pytest.mark.parametrize("inner", ["CartPole-v1", "Pendulum-v1"])
def test_forked_env_passes_the_checker(inner: str, engine: str) -> None:
    def said(env: gym.Env[Any, Any]) -> list[str]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            check_env(env)
        env.close()
        return [str(warning.message) for warning in caught]

    forked = gym.make("prized_gym/Forked-v0", env=inner, engine=engine, render_mode="rgb_array").unwrapped
    # What it has to say of the spaces, it says of the environment inside too.
    assert said(forked) == said(gym.make(inner, render_mode="rgb_array").unwrapped)


@pytest.mark.parametrize("space", ["nested", "text", "oneof", "graph", "discrete_start", "tuple"])
def test_forked_env_of_any_space(space: str, engine: str) -> None:
    env = prized_gym.ForkedEnv(lambda: SpaceEnv(space), engine=engine)
    observation, info = env.reset(seed=3)
    assert env.observation_space.contains(observation) and "options" in info
    env.action_space.seed(0)
    for _ in range(5):
        observation, reward, terminated, truncated, info = env.step(env.action_space.sample())
        assert env.observation_space.contains(observation)
        assert type(reward) is float and type(terminated) is bool and type(truncated) is bool
        if terminated or truncated:
            break
    env.close()


def test_an_external_time_limit_of_make() -> None:
    env = gym.make("prized_gym/Forked-v0", env=Loaded, max_episode_steps=3)
    env.reset(seed=0)
    assert [env.step(0)[3] for _ in range(3)] == [False, False, True]
    env.close()


def test_observations_of_a_dataset_env_are_views_only_on_request(engine: str) -> None:
    class Reuses(Loaded):
        """Gives the same array again and again, as many simulators do."""

        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            self.buffer = getattr(self, "buffer", np.zeros(4))
            self.buffer[:] = 0
            return self.buffer, {"buffer": self.buffer}

        def step(self, action: Any) -> Any:
            self.buffer += 1
            return self.buffer, 1.0, bool(self.buffer[0] == 3), False, {"buffer": self.buffer}

    envs = ForkedVectorEnv(Reuses, num_envs=2, engine=engine, autoreset_mode="SameStep")
    envs.reset(seed=0)
    for _ in range(3):
        observations, _, terminations, _, infos = envs.step([0, 0])
    assert terminations.all() and not observations.any()
    assert [final.tolist() for final in infos["final_obs"]] == [[3.0] * 4] * 2
    assert infos["final_info"]["buffer"].tolist() == [[3.0] * 4] * 2
    envs.close()


def test_evaluation_beside_training_on_one_base() -> None:
    with Base("CartPole-v1") as base:
        train, evaluate = ForkedVectorEnv(base, num_envs=4), ForkedVectorEnv(base, num_envs=2)
        a, _ = train.reset(seed=0)
        b, _ = evaluate.reset(seed=0)
        assert a[:2].tobytes() == b.tobytes()
        for _ in range(20):
            train.step([0, 1, 0, 1])
            evaluate.step([1, 0])
        evaluate.close()
        train.step([0, 1, 0, 1])
        train.close()


def test_bounds_of_a_box_are_the_environments_affair() -> None:
    ours, reference = ForkedVectorEnv("Pendulum-v1", num_envs=2), SyncVectorEnv([lambda: gym.make("Pendulum-v1")] * 2)
    ours.reset(seed=0)
    reference.reset(seed=0)
    far = np.array([[100.0], [-7.5]], np.float32)
    assert ours.step(far)[0].tobytes() == reference.step(far)[0].tobytes()
    ours.close()
    reference.close()


def test_actions_sent_in_another_order_reach_their_copies(engine: str) -> None:
    class Echo(Faulty):
        action_space = gym.spaces.Discrete(100)

        def step(self, action: Any) -> Any:
            return np.array([0.0, 0.0]), float(action), bool(action == 99), False, {}

    for options in ({}, {"max_concurrent": 2}):
        envs = ForkedVectorEnv(Echo, num_envs=3, engine=engine, **options)
        envs.reset()
        envs.send([99, 1, 2], [0, 1, 2])
        envs.recv(3)
        envs.send([10, 20, 0], [2, 1, 0])
        *_, indices = result = envs.recv(3)
        assert indices.tolist() == [0, 1, 2] and result[1].tolist() == [0, 20, 10]
        actions = np.array([5, 6, 7])
        envs.step_async(actions)
        actions[:] = 0
        assert envs.step_wait()[1].tolist() == [5, 6, 7]
        envs.close()


def test_queued_copies_have_their_time_from_when_they_begin() -> None:
    class Slow(Faulty):
        def step(self, action: Any) -> Any:
            time.sleep(0.5)
            return super().step(action)

    envs = ForkedVectorEnv(Slow, num_envs=5, max_concurrent=1, step_timeout=2.3)
    envs.reset(seed=0)
    envs.send([0] * 5)
    assert envs.recv(5)[0][:, 0].tolist() == [1] * 5
    assert envs.step([0] * 5)[0][:, 0].tolist() == [2] * 5
    envs.close()


def test_unseeded_masked_resets_go_on_with_np_random(engine: str) -> None:
    ours = ForkedVectorEnv(SpaceEnv, num_envs=4, engine=engine, autoreset_mode="Disabled")
    reference = SyncVectorEnv([SpaceEnv] * 4, autoreset_mode="Disabled")
    first, second = ours.reset(seed=1)[0], reference.reset(seed=1)[0]
    assert first.tobytes() == second.tobytes()
    for _ in range(200):
        actions = np.zeros((4, 3), np.float32)
        mine, theirs = ours.step(actions), reference.step(actions)
        assert mine[0].tobytes() == theirs[0].tobytes() and mine[1].tobytes() == theirs[1].tobytes()
        done = theirs[2] | theirs[3]
        if done.any():
            again, other = ours.reset(options={"reset_mask": done}), reference.reset(options={"reset_mask": done})
            assert again[0].tobytes() == other[0].tobytes()
    assert ours.reset()[0].tobytes() == reference.reset()[0].tobytes()
    ours.close()
    reference.close()

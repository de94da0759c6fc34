"""The core that adapters use: infos by copy, resets and calls of some copies, and what an error in between leaves."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from prized_gym import Base, CopyDiedError, EngineUnavailableError, ForkedVectorEnv, InterruptedStepError
from prized_gym.vector.core import VectorCore

pytestmark = pytest.mark.timeout(120)


def counting() -> type[gym.Env[Any, Any]]:
    """Counts its steps; actions: 1 ends the episode, 2 takes for ever, 3 dies."""

    class Counting(gym.Env[Any, Any]):
        observation_space = gym.spaces.Box(-10, 1e6, (1,), np.float64)
        action_space = gym.spaces.Discrete(4)
        count = -1

        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            super().reset(seed=seed)
            self.count = 0
            return np.array([0.0]), {"seed": seed, "options": options}

        def step(self, action: Any) -> Any:
            if action == 2:
                threading.Event().wait()
            if action == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            self.count += 1
            return np.array([float(self.count)]), 1.0, bool(action == 1), False, {"count": self.count} if action else {}

        def render(self) -> Any:
            assert self.count >= 0, "rendered before its reset"
            return self.count

        def pid(self) -> int:
            return os.getpid()

    return Counting


@pytest.fixture(scope="module")
def base() -> Iterator[Base]:
    with Base(counting(), engine="local") as base:
        yield base


Make = Callable[..., ForkedVectorEnv]


@pytest.fixture
def make(base: Base) -> Iterator[Make]:
    made: list[ForkedVectorEnv] = []

    def build(num_envs: int = 2, **options: Any) -> ForkedVectorEnv:
        made.append(ForkedVectorEnv(base, num_envs, **options))
        return made[-1]

    yield build
    for envs in made:
        envs.close()


@pytest.fixture
def interrupted(make: Make) -> ForkedVectorEnv:
    """One whose step was interrupted."""
    envs = make()
    envs.reset(seed=0)
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        envs.step([0, 2])
    timer.join()
    return envs


def test_infos_are_by_copy(make: Make) -> None:
    core = make(3, autoreset_mode="Disabled").core
    assert isinstance(core, VectorCore)
    _, infos = core.reset_each([5, None, 7], [{"a": 1}, None, None])
    assert infos[0] == {"seed": 5, "options": {"a": 1}} and infos[2]["seed"] == 7
    assert core.step([0, 1, 0])[4] == {1: {"count": 1}}
    mask = np.array([False, True, False])
    assert list(core.reset(options={"reset_mask": mask})[1]) == [1]
    *_, infos, indices = core.step_some([1, 0], [2, 0])
    assert infos == {2: {"count": 2}} and indices.tolist() == [0, 2]
    assert core.observation(2).tolist() == [2.0]
    assert core.call([2, 1], "get_wrapper_attr", ("count",)) == (2, 0)


def test_copies_started_without_a_reset(make: Make) -> None:
    core = make(2).core
    core.start()
    assert core.step([0, 0])[0].tolist() == [[0.0], [0.0]]
    core.step_async([0, 0])
    core.step_wait()


@pytest.mark.parametrize(
    "operation",
    [
        lambda envs: envs.get_attr("count"),
        lambda envs: envs.call("pid"),
        lambda envs: envs.render(),
        lambda envs: envs.set_attr("count", 7),
        lambda envs: envs.branch(0, [1]),
        lambda envs: envs.send([0], [0]),
        lambda envs: envs.recv(),
        lambda envs: envs.step([0, 0]),
        lambda envs: envs.step_wait(),
        lambda envs: envs.call_wait(),
        lambda envs: envs.reset(options={"reset_mask": np.array([True, False])}),
        lambda envs: envs.core.start(),
    ],
)
def test_an_interrupted_step_refuses_everything_but_a_reset(
    interrupted: ForkedVectorEnv, operation: Callable[[ForkedVectorEnv], Any]
) -> None:
    with pytest.raises(InterruptedStepError, match="reset"):
        operation(interrupted)
    assert interrupted.reset(seed=0)[0].tolist() == [[0.0], [0.0]]
    assert interrupted.get_attr("count") == (0, 0)
    interrupted.step([0, 0])


@pytest.mark.parametrize("mode", ["NextStep", "SameStep", "Disabled"])
@pytest.mark.parametrize("on_failure", ["raise", "truncate"])
def test_the_death_of_a_copy_reaches_the_next_step(make: Make, mode: str, on_failure: Any) -> None:
    envs = make(autoreset_mode=mode, on_failure=on_failure)
    envs.reset(seed=0)
    envs.step([0, 0])
    os.kill(envs.call("pid")[1], signal.SIGKILL)
    for _ in range(3):
        # It is not forked anew because somebody asks: that would be stepped without a reset.
        with pytest.raises(CopyDiedError, match="copy 1"):
            envs.get_attr("count")
    if on_failure == "raise":
        with pytest.raises(CopyDiedError, match="copy 1"):
            envs.step([0, 0])
        return
    observations, rewards, _, truncations, infos = envs.step([0, 0])
    assert truncations.tolist() == [False, True] and rewards.tolist() == [1, 0]
    if mode == "SameStep":
        assert observations.tolist() == [[2.0], [0.0]] and infos["final_obs"][1].tolist() == [1.0]
        assert envs.render() == (2, 0)
    else:
        assert observations.tolist() == [[2.0], [1.0]] and "copy 1" in infos["failure"][1]


def test_what_is_rendered_after_a_failure_has_begun_properly(make: Make) -> None:
    envs = make(on_failure="truncate")
    envs.reset(seed=0)
    envs.step([0, 0])
    assert envs.step([0, 3])[3].tolist() == [False, True]
    # The next episode of copy 1 has begun; the step that is to begin it gives what its reset gave.
    assert envs.render() == (2, 0) and envs.render() == (2, 0)
    pid = envs.call("pid")[1]
    envs.set_attr("colour", ["red", "blue"])
    observations, rewards, terminations, truncations, infos = envs.step([0, 0])
    assert observations.tolist() == [[3.0], [0.0]] and rewards.tolist() == [1.0, 0.0]
    assert not terminations.any() and not truncations.any()
    assert infos["seed"][1] is not None and infos["_seed"].tolist() == [False, True]
    assert envs.call("pid")[1] == pid
    assert envs.step([0, 1])[2].tolist() == [False, True]
    assert [(e.copy, e.seed is None, e.length) for e in envs.history()] == [(1, False, 2), (1, False, 1)]


def test_an_early_episode_that_dies_begins_again(make: Make) -> None:
    envs = make(on_failure="truncate")
    envs.reset(seed=0)
    assert envs.step([0, 3])[3].tolist() == [False, True]
    os.kill(envs.call("pid")[1], signal.SIGKILL)
    with pytest.raises(CopyDiedError):
        envs.get_attr("count")
    observations, _, _, truncations, _ = envs.step([0, 0])
    assert observations.tolist() == [[2.0], [0.0]] and not truncations.any()
    envs.step([0, 3])
    envs.render()
    assert envs.reset(seed=3)[1]["seed"].tolist() == [3, 4]
    assert envs.step([0, 0])[4] == {}


@pytest.mark.parametrize("ask", [lambda e, lock: e.call("pid", lock), lambda e, lock: e.set_attr("x", lock)])
def test_an_argument_that_cannot_be_sent_costs_nothing(make: Make, ask: Callable[..., Any]) -> None:
    envs = make()
    envs.reset(seed=0)
    envs.step([0, 0])
    with pytest.raises(TypeError, match="pickle"):
        ask(envs, threading.Lock())
    assert envs.step([0, 0])[0].tolist() == [[2.0], [2.0]]


def test_a_branch_that_the_engine_cannot_make_costs_nothing() -> None:
    envs = ForkedVectorEnv(counting(), 2, engine="inline")
    envs.reset(seed=0)
    with pytest.raises(EngineUnavailableError, match="branch"):
        envs.branch(0, [1])
    assert envs.step([0, 0])[0].tolist() == [[1.0], [1.0]]
    envs.close()


def test_closing_a_vector_env_leaves_another_ones_base_alone() -> None:
    train = ForkedVectorEnv("CartPole-v1", 2)
    evaluate = ForkedVectorEnv(train.base, 2)
    train.reset(seed=0)
    evaluate.reset(seed=0)
    evaluate.close()
    assert train.step([0, 1])[1].tolist() == [1, 1]
    assert train.reset(seed=1)[0].shape == (2, 4)
    base = train.base
    train.close()
    assert base.closed

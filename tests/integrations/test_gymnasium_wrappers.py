"""Gymnasium's own vector wrappers around ``ForkedVectorEnv``, in every autoreset mode each of them allows."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import gymnasium.wrappers.vector as wrappers
import numpy as np
import pytest

import prized_gym
from tools.libraries import need_here
from zoo.walk import Walk

# What Gymnasium's own wrappers warn of when they make spaces.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*Box (low|high)'s precision lowered"),
    pytest.mark.filterwarnings("ignore:overflow encountered in cast:RuntimeWarning"),
]

Wrap = Callable[[Any], Any]
Bases = dict[Callable[[], Any], prized_gym.Base]
MODES = ["NextStep", "SameStep", "Disabled"]


def discrete() -> gym.Env[Any, Any]:
    return Walk(limit=6, render_mode="rgb_array")


def continuous() -> gym.Env[Any, Any]:
    return Walk(action="box", limit=6)


def image() -> gym.Env[Any, Any]:
    return Walk("image", limit=6)


def as_dict() -> gym.Env[Any, Any]:
    return Walk("dict", limit=6)


@pytest.fixture(scope="module")
def bases() -> Iterator[Bases]:
    """One base for each of the environments above."""
    with contextlib.ExitStack() as stack:
        yield {env: stack.enter_context(prized_gym.Base(env)) for env in (discrete, continuous, image, as_dict)}


small = gym.spaces.Box(-1, 1, (2,), np.float32)
cases: dict[str, tuple[Callable[[], Any], Wrap, list[str]]] = {
    "RecordEpisodeStatistics": (discrete, wrappers.RecordEpisodeStatistics, MODES),
    "NormalizeReward": (discrete, wrappers.NormalizeReward, MODES),
    "TransformReward": (discrete, lambda envs: wrappers.TransformReward(envs, lambda reward: 2 * reward), MODES),
    "ClipReward": (discrete, lambda envs: wrappers.ClipReward(envs, -0.1, 0.1), MODES),
    "TransformAction": (discrete, lambda envs: wrappers.TransformAction(envs, lambda action: 1 - action), MODES),
    "ClipAction": (continuous, wrappers.ClipAction, MODES),
    "RescaleAction": (continuous, lambda envs: wrappers.RescaleAction(envs, 0.0, 1.0), MODES),
    "VectorizeTransformAction": (
        continuous,
        lambda envs: wrappers.VectorizeTransformAction(
            envs, gym.wrappers.RescaleAction, min_action=0.0, max_action=1.0
        ),
        MODES,
    ),
    "VectorizeTransformReward": (
        discrete,
        lambda envs: wrappers.VectorizeTransformReward(envs, gym.wrappers.TransformReward, func=lambda reward: -reward),
        MODES,
    ),
    "NormalizeObservation": (discrete, wrappers.NormalizeObservation, ["NextStep"]),
    "TransformObservation": (
        discrete,
        lambda envs: wrappers.TransformObservation(envs, lambda batch: batch / 9, None, small),
        ["NextStep", "Disabled"],
    ),
    "RescaleObservation": (
        discrete,
        lambda envs: wrappers.RescaleObservation(envs, np.float32(0), np.float32(1)),
        ["NextStep", "Disabled"],
    ),
    "DtypeObservation": (discrete, lambda envs: wrappers.DtypeObservation(envs, np.float64), ["NextStep", "Disabled"]),
    "FlattenObservation": (as_dict, wrappers.FlattenObservation, ["NextStep", "Disabled"]),
    "ReshapeObservation": (image, lambda envs: wrappers.ReshapeObservation(envs, (36 * 36,)), ["NextStep", "Disabled"]),
    "FilterObservation": (
        as_dict,
        lambda envs: wrappers.FilterObservation(envs, ["position"]),
        ["NextStep", "Disabled"],
    ),
    "VectorizeTransformObservation": (
        discrete,
        lambda envs: wrappers.VectorizeTransformObservation(
            envs, gym.wrappers.TransformObservation, func=lambda one: one / 9, observation_space=small
        ),
        ["NextStep", "Disabled"],
    ),
    "DictInfoToList": (discrete, wrappers.DictInfoToList, MODES),
}


@pytest.mark.parametrize(("name", "mode"), [(name, mode) for name, (_, _, modes) in cases.items() for mode in modes])
def test_the_same_as_around_sync_vector_env(bases: Bases, name: str, mode: str) -> None:
    env, wrap, _ = cases[name]
    pair = [
        wrap(prized_gym.ForkedVectorEnv(bases[env], 3, autoreset_mode=mode)),
        wrap(gym.vector.SyncVectorEnv([env] * 3, autoreset_mode=mode)),
    ]
    equal(*(envs.reset(seed=4) for envs in pair))
    pair[0].action_space.seed(2)
    ended = 0
    for _ in range(25):
        actions = pair[0].action_space.sample()
        results = [envs.step(actions) for envs in pair]
        equal(*results)
        done = results[0][2] | results[0][3]
        ended += int(done.sum())
        if mode == "Disabled" and done.any():
            # Each gets a dictionary of its own: Gymnasium takes the mask out of it.
            equal(*(envs.reset(options={"reset_mask": done.copy()}) for envs in pair))
    assert ended >= 9
    for envs in pair:
        envs.close()


@pytest.mark.parametrize("mode", MODES)
def test_record_episode_statistics_with_masks(mode: str) -> None:
    envs = wrappers.RecordEpisodeStatistics(prized_gym.ForkedVectorEnv(discrete, 3, autoreset_mode=mode))
    envs.reset(seed=0)
    for _ in range(2):
        envs.step(np.array([0, 1, 0]))
    envs.reset(options={"reset_mask": np.array([True, False, False])})
    np.testing.assert_array_equal(envs.episode_lengths, [0, 2, 2])
    envs.step(np.array([0, 1, 0]))
    np.testing.assert_array_equal(envs.episode_lengths, [1, 3, 3])
    envs.close()


@pytest.mark.parametrize("mode", ["NextStep", "Disabled"])
def test_record_video(tmp_path: Path, mode: str) -> None:
    need_here("moviepy", "moviepy")
    envs = wrappers.RecordVideo(
        prized_gym.ForkedVectorEnv(discrete, 2, autoreset_mode=mode),
        str(tmp_path / "videos"),
        episode_trigger=lambda episode: episode == 0,
        video_length=4,
    )
    envs.reset(seed=0)
    for _ in range(5):
        envs.step(np.array([0, 1]))
    envs.close()
    videos = list(tmp_path.glob("videos/*.mp4"))
    assert len(videos) == 1
    assert videos[0].stat().st_size > 0


def equal(a: Any, b: Any) -> None:
    """Assert that two structures are equal, apart from the time an episode took."""
    if isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a.keys() - {"t"}:
            equal(a[key], b[key])
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b)
        for one, other in zip(a, b, strict=True):
            equal(one, other)
    elif isinstance(a, np.ndarray) and a.dtype == object:
        equal(list(a), list(b))
    else:
        np.testing.assert_array_equal(a, b)

"""What a protocol has no way to ask is a refusal of ours, and the copy that was not asked goes on."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

import prized_gym
from prized_gym.protocols import EpisodeProtocol, UnsupportedError
from tools.sandboxes import ZOO

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(scope="module")
def base() -> Iterator[prized_gym.Base]:
    with (
        prized_gym.Base(
            engine="plain",
            start=f"set -- --port 8000; exec {sys.executable} {ZOO / 'episode_server.py'} $2",  # the provider replaces the port
            ready="http://127.0.0.1:8000/rollout",
            protocol=EpisodeProtocol("/rollout?seed={seed}"),
            progress=False,
        ) as made
    ):
        yield made


def test_it_is_raised_without_a_word_of_an_answer(base: prized_gym.Base) -> None:
    envs = prized_gym.ForkedVectorEnv(base, num_envs=2)
    try:
        envs.reset(seed=0)
        for ask in (lambda: envs.call("render"), lambda: envs.call("level"), lambda: envs.set_attr("level", 3)):
            with pytest.raises(UnsupportedError, match="the server that EpisodeProtocol speaks to cannot") as caught:
                ask()
            assert isinstance(caught.value, prized_gym.PrizedGymError) and caught.value.__cause__ is None
            assert not getattr(caught.value, "__notes__", [])
        assert envs.step([0, 0])[2].all()
    finally:
        envs.close()


def test_a_reset_in_the_base_is_refused(base: prized_gym.Base) -> None:
    with pytest.raises(UnsupportedError, match="cannot reset its environment in the base"):
        prized_gym.ForkedVectorEnv(base, num_envs=1, reset_in="base").reset(seed=1)

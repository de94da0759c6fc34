"""What notebooks show."""

from __future__ import annotations

import numpy as np

import prized_gym
from zoo.walk import bare_walk


def test_bases_vector_environments_and_episodes_show_themselves() -> None:
    base = prized_gym.Base(bare_walk)
    envs = prized_gym.ForkedVectorEnv(base, 2)
    assert "Base of bare_walk" in base._repr_html_()
    assert "2 copies" in envs._repr_html_()
    assert "mean reward" not in envs._repr_html_()
    envs.reset(seed=0)
    while not envs.history():
        envs.step(np.array([0, 1]))
    assert "mean reward" in envs._repr_html_()
    assert "reward" in envs.history()[0]._repr_html_()
    envs.close()
    base.close()
    assert "closed" in envs._repr_html_()
    assert "closed" in base._repr_html_()

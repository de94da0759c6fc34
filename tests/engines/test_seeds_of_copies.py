"""Random state: repeatable from an explicit seed, never shared between copies."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from prized_gym import Base, ForkedVectorEnv
from prized_gym.seeding import reseed
from tools.libraries import need_here
from zoo.generators import ManyGenerators

pytestmark = pytest.mark.timeout(300)


def play(envs: ForkedVectorEnv, steps: int = 3) -> np.ndarray[Any, Any]:
    return np.stack([envs.step(np.zeros(envs.num_envs, np.int64))[0] for _ in range(steps)])


def test_equal_seeds_repeat_every_generator_and_different_ones_do_not(engine: str) -> None:
    envs = ForkedVectorEnv(ManyGenerators, num_envs=3, engine=engine)
    first = np.concatenate([envs.reset(seed=5)[0][None], play(envs)])
    second = np.concatenate([envs.reset(seed=5)[0][None], play(envs)])
    if engine == "local":
        assert first.tobytes() == second.tobytes()
        assert len(np.unique(first)) == first.size
    other = np.concatenate([envs.reset(seed=50)[0][None], play(envs)])
    own = slice(0, 3) if engine == "inline" else slice(None)
    assert not np.intersect1d(first[..., 2], other[..., 2]).size
    assert not np.intersect1d(first[:, :, own], other[:, :, own]).size
    envs.close()


def test_a_seed_means_the_same_in_any_copy_and_on_both_engines() -> None:
    seen = {}
    for engine in ("local", "inline"):
        # One copy at a time: inline copies share Python's and NumPy's global state with their process.
        envs = ForkedVectorEnv(ManyGenerators, num_envs=1, engine=engine)
        seen[engine] = [np.concatenate([envs.reset(seed=7)[0], play(envs)[:, 0]]).tobytes() for _ in range(2)]
        envs.close()
    assert len({run for runs in seen.values() for run in runs}) == 1
    envs = ForkedVectorEnv(ManyGenerators, num_envs=3)
    shifted = envs.reset(seed=5)[0][2]
    assert shifted.tobytes() == np.frombuffer(seen["local"][0])[:8].tobytes()
    envs.close()


SCRIPT = """
import sys; sys.path.insert(0, {tests!r})
import numpy as np, prized_gym
from zoo.generators import ManyGenerators
envs = prized_gym.ForkedVectorEnv(ManyGenerators, num_envs=3, fork_on={fork_on!r})
out = [envs.reset(seed=3)[0]]
for _ in range(2):
    out.append(envs.step([0, 0, 0])[0])
    out.append(envs.reset()[0])
envs.close()
print(np.stack(out).tobytes().hex())
"""


@pytest.mark.parametrize("fork_on", ["reset", "start", "episode"])
def test_runs_repeat_unseeded_resets_included(fork_on: str) -> None:
    script = SCRIPT.format(tests=str(Path(__file__).parents[1]), fork_on=fork_on)
    runs = {
        subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
        for _ in range(2)
    }
    assert len(runs) == 1
    values = np.frombuffer(bytes.fromhex(runs.pop().strip()))
    assert len(np.unique(values)) == values.size


def test_unseeded_copies_differ_from_each_other_and_from_run_to_run() -> None:
    with Base(ManyGenerators) as base:
        draws = []
        for _ in range(3):
            envs = ForkedVectorEnv(base, num_envs=4)
            draws += [envs.reset()[0], *play(envs), envs.reset()[0], *play(envs)]
            envs.close()
    assert len(np.unique(draws)) == np.size(draws)


@pytest.mark.timeout(400)
def test_no_two_of_10_000_forks_share_a_stream() -> None:
    count, rounds = 100, 100
    envs = ForkedVectorEnv(ManyGenerators, num_envs=count)
    seen = [envs.reset(seed=0)[0]]
    seen += [envs.reset()[0] for _ in range(rounds - 1)]
    draws = np.stack(seen).reshape(-1, 8)
    assert draws.shape == (10_000, 8)
    for column in range(8):
        assert len(np.unique(draws[:, column])) == 10_000
    envs.close()


@pytest.mark.parametrize("seed", [np.int64(4), 4, [4, 5, 6], (4, 5, 6), np.array([4, 5, 6]), [4, None, np.int32(6)]])
def test_forms_of_seeds(seed: Any, engine: str) -> None:
    envs = ForkedVectorEnv("CartPole-v1", num_envs=3, engine=engine)
    envs.reset(seed=seed)
    got = envs.np_random_seed
    assert got[0] == 4 and got[2] == 6 and (got[1] == 5 or seed[1] is None)
    assert all(isinstance(generator, np.random.Generator) for generator in envs.np_random)
    envs.close()


@pytest.mark.parametrize(
    ("seed", "error"),
    [([1, 2], ValueError), ([1, 2, 3, 4], ValueError), (-1, gym.error.Error), ("abc", TypeError), (1.5, TypeError)],
)
def test_bad_seeds_are_refused(seed: Any, error: type[Exception], engine: str) -> None:
    envs = ForkedVectorEnv("CartPole-v1", num_envs=3, engine=engine)
    with pytest.raises(error):
        envs.reset(seed=seed)
    envs.reset(seed=1)
    envs.close()


def test_huge_seeds(engine: str) -> None:
    envs = ForkedVectorEnv("CartPole-v1", num_envs=2, engine=engine)
    envs.reset(seed=2**100)
    assert envs.np_random_seed == (2**100, 2**100 + 1)
    envs.close()


def test_torch_is_reseeded() -> None:
    torch = need_here("torch", "torch")

    class Env(ManyGenerators):
        def __init__(self) -> None:
            super().__init__()
            self.torch_generator = torch.Generator()

        def draw(self) -> tuple[float, float]:
            return float(torch.rand(1)), float(torch.rand(1, generator=self.torch_generator))

    envs = ForkedVectorEnv(Env, num_envs=3)
    envs.reset(seed=0)
    first = envs.call("draw")
    assert len({value for pair in first for value in pair}) == 6
    envs.reset(seed=0)
    assert envs.call("draw") == first
    envs.close()


def test_reseed_goes_through_wrappers_and_containers() -> None:
    class Wrapper(gym.Wrapper[Any, Any, Any, Any]):
        def __init__(self, env: Any) -> None:
            super().__init__(env)
            self.noise = np.random.default_rng(0)
            self.table = {"a": np.random.default_rng(0)}

    env = Wrapper(ManyGenerators())
    reseed(env, 1)
    a = (env.noise.random(), env.table["a"].random(), *env.unwrapped.draws())  # type: ignore[attr-defined]
    reseed(env, 1)
    b = (env.noise.random(), env.table["a"].random(), *env.unwrapped.draws())  # type: ignore[attr-defined]
    reseed(env, 2)
    c = (env.noise.random(), env.table["a"].random(), *env.unwrapped.draws())  # type: ignore[attr-defined]
    assert a == b and not set(a) & set(c) and len(set(a)) == len(a)

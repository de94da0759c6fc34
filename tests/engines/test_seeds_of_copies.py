"""Random state: repeatable from an explicit seed, never shared between copies."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from prized_gym import Base, ForkedVectorEnv, rollouts
from prized_gym.seeding import reseed
from tools.libraries import need_here
from zoo.generators import HiddenGenerators, ManyGenerators

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
from zoo.generators import HiddenGenerators, ManyGenerators
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


# Generators that no attribute holds

LATE = slice(13, 15)
"""The columns of those that are made in the first reset, with a constant seed: those of a fresh copy are equal anywhere."""


def without_late(observations: Any) -> np.ndarray[Any, Any]:
    return np.delete(np.asarray(observations), LATE, axis=-1)


@pytest.mark.parametrize("fork_on", ["reset", "start", "episode"])
@pytest.mark.parametrize("seed", [None, 5])
def test_hidden_generators_differ_from_copy_to_copy(fork_on: Any, seed: int | None) -> None:
    envs = ForkedVectorEnv(HiddenGenerators, num_envs=3, fork_on=fork_on)
    seen = [envs.reset(seed=seed)[0], *play(envs)]
    seen += [envs.reset()[0], *play(envs)]
    draws = without_late(seen)
    for column in range(draws.shape[-1]):
        assert len(np.unique(draws[..., column])) == draws[..., column].size, column
    envs.close()


def test_hidden_generators_follow_from_the_seed_of_the_episode() -> None:
    envs = ForkedVectorEnv(HiddenGenerators, num_envs=3)
    first = np.stack([envs.reset(seed=5)[0], *play(envs)])
    again = np.stack([envs.reset(seed=5)[0], *play(envs)])
    shifted = np.stack([envs.reset(seed=6)[0], *play(envs)])
    envs.close()
    assert again.tobytes() == first.tobytes()
    assert shifted[:, 0].tobytes() == first[:, 1].tobytes()
    assert not np.intersect1d(without_late(first[:, 0]), without_late(first[:, 1])).size


def test_every_rollout_has_hidden_generators_of_its_own() -> None:
    seen: list[Any] = []

    def policy(observation: Any, info: Any) -> int:
        seen.append(without_late(observation))
        return 0

    runs = rollouts(HiddenGenerators, seeds=range(4), copies=2, policy=policy, max_episode_steps=1, progress=False)
    assert len(list(runs)) == 4
    assert len(seen) == 4 and len(np.unique(seen)) == np.size(seen)


def test_a_branch_goes_on_with_hidden_generators_unless_it_is_reseeded() -> None:
    envs = ForkedVectorEnv(HiddenGenerators, num_envs=4)
    envs.reset(seed=5)
    envs.branch(0, [1])
    envs.branch(0, [2, 3], reseed=True)
    first, second, *reseeded = envs.step([0] * 4)[0]
    envs.close()
    assert first.tobytes() == second.tobytes()
    # Those that were made after the fork too.
    assert len(np.unique([first, *reseeded])) == np.size([first, *reseeded])


def test_hidden_generators_of_the_environment_are_seeded_alike_by_both_engines() -> None:
    seen = {}
    for engine in ("local", "inline"):
        envs = ForkedVectorEnv(HiddenGenerators, num_envs=1, engine=engine)
        # In one process those of a class or a module are everybody's.
        seen[engine] = np.stack([envs.reset(seed=7)[0][0, :15], *play(envs)[:, 0, :15]])
        envs.close()
    assert seen["local"].tobytes() == seen["inline"].tobytes()


@pytest.mark.parametrize("fork_on", ["reset", "start"])
def test_what_is_asked_of_a_copy_before_its_first_reset_leaves_it_its_own_generators(fork_on: Any) -> None:
    envs = ForkedVectorEnv(HiddenGenerators, num_envs=2, fork_on=fork_on)
    envs.call("draws")
    first = without_late(envs.reset(seed=3)[0])
    envs.close()
    assert len(np.unique(first)) == first.size


def test_runs_repeat_with_hidden_generators() -> None:
    script = SCRIPT.replace("ManyGenerators", "HiddenGenerators").format(
        tests=str(Path(__file__).parents[1]), fork_on="reset"
    )
    runs = [
        subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
        for _ in range(2)
    ]
    assert runs[0] == runs[1]


def test_hidden_torch_generators_are_reseeded() -> None:
    torch = need_here("torch", "torch")

    class Env(ManyGenerators):
        def __init__(self) -> None:
            super().__init__()
            self.deep = {"a": [{"g": torch.Generator()}]}
            self.late: Any = None

        def draw(self) -> tuple[float, float]:
            self.late = self.late or {"b": ({"g": torch.Generator()},)}
            held = (self.deep["a"][0]["g"], self.late["b"][0]["g"])
            return tuple(float(torch.rand(1, generator=generator)) for generator in held)  # type: ignore[return-value]

    envs = ForkedVectorEnv(Env, num_envs=3)
    envs.reset(seed=0)
    first = envs.call("draw")
    assert len({pair[0] for pair in first}) == 3
    envs.branch(0, [1, 2], reseed=True)
    assert len({value for pair in envs.call("draw") for value in pair}) == 6
    envs.close()


def test_a_generator_that_cannot_be_reseeded_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    class Stubborn(random.Random):
        def seed(self, *args: Any, **kwargs: Any) -> None:
            if hasattr(self, "closed"):
                raise RuntimeError("seeded once and for all")
            super().seed(1)

    class Env(ManyGenerators):
        def __init__(self) -> None:
            super().__init__()
            stubborn = Stubborn()
            stubborn.closed = True  # type: ignore[attr-defined]
            self.hidden = {"a": {"b": stubborn}}

    envs = ForkedVectorEnv(Env, num_envs=1)
    envs.reset()
    envs.close()
    told = capfd.readouterr().err
    assert "Stubborn cannot be reseeded" in told and "on_fork" in told

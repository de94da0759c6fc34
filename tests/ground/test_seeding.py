"""Seeds that repeat and never meet, and every generator of an environment given a stream of its own."""

from __future__ import annotations

import random
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

from prized_gym.seeding import SeedStream, fresh_entropy, random_state, reseed, set_random_state
from zoo.generators import ManyGenerators


def drawn(root: int, index: int, count: int, number: int) -> list[int]:
    stream = SeedStream(root, index, count)
    return [stream.next() for _ in range(number)]


# Streams of seeds


def test_the_seeds_of_a_root_are_these_for_ever() -> None:
    # What a user recorded under an explicit seed must come again under every later release.
    assert [drawn(0, index, 2, 3) for index in range(2)] == [
        [745650761, 240823239, 1883479365],
        [1566978824, 1062151302, 557323780],
    ]
    assert drawn(2**128 - 1, 7, 10, 2) == [582633730, 192609628]


@pytest.mark.parametrize("count", [1, 3, 64])
@pytest.mark.parametrize("root", [0, 1, 2**31, 2**127 + 5])
def test_no_two_seeds_of_a_root_are_equal(root: int, count: int) -> None:
    seeds = [seed for index in range(count) for seed in drawn(root, index, count, 1000)]
    assert len(set(seeds)) == len(seeds)
    assert min(seeds) >= 0 and max(seeds) < 2**31


def test_another_root_or_number_of_copies_gives_other_seeds() -> None:
    assert drawn(1, 0, 2, 20) != drawn(2, 0, 2, 20)
    assert drawn(1, 0, 2, 20) != drawn(1, 0, 3, 20)
    assert len({fresh_entropy() for _ in range(100)}) == 100
    assert all(0 <= fresh_entropy() < 2**128 for _ in range(100))


# Reseeding


class Shared(gym.Wrapper[Any, Any, Any, Any]):
    """A wrapper with generators of its own, one of which its environment holds too."""

    def __init__(self, env: gym.Env[Any, Any]) -> None:
        super().__init__(env)
        self.own = np.random.default_rng(3)
        self.named = {"a": np.random.default_rng(3), "b": [np.random.default_rng(3)]}
        self.shared = env.generator  # type: ignore[attr-defined]
        self.system = random.SystemRandom()


def draws(env: gym.Env[Any, Any]) -> list[float]:
    inner: Any = env.unwrapped
    outer: Any = env
    own = [outer.own.random(), outer.named["a"].random()] if isinstance(env, Shared) else []
    return [*inner.draws(), *own]


def test_equal_seeds_set_every_generator_and_different_ones_set_it_differently() -> None:
    env = Shared(ManyGenerators())
    seen = []
    for seed in (5, 5, 6):
        reseed(env, seed)
        seen.append(draws(env))
    assert seen[0] == seen[1]
    assert not set(seen[0]) & set(seen[2])
    assert len(set(seen[0])) == len(seen[0])  # and no two of them alike


def test_a_seed_means_the_same_in_an_environment_with_another_past() -> None:
    first, second = ManyGenerators(), ManyGenerators()
    draws(second)
    second.reset(seed=99)
    reseed(first, 5)
    expected = draws(first)
    reseed(second, 5)
    assert draws(second) == expected


def test_np_random_says_which_seed_it_has() -> None:
    env = ManyGenerators()
    env.reset(seed=1)
    reseed(env, 1234)
    assert env.np_random_seed == 1234
    first = env.np_random.random()
    reseed(env, 1234)
    assert env.np_random.random() == first


def test_a_seeded_np_random_can_be_kept() -> None:
    env = ManyGenerators()
    env.reset(seed=1)
    state = env.np_random.bit_generator.state
    reseed(env, 5, keep_seeded=True)
    assert env.np_random.bit_generator.state == state and env.np_random_seed == 1
    kept = draws(env)
    env.reset(seed=1)
    reseed(env, 5)
    fresh = draws(env)
    assert [a == b for a, b in zip(kept, fresh, strict=True)] == [True, True, False, True, True, True, True, True]


def test_a_generator_is_seeded_once_however_many_hold_it() -> None:
    seen = []
    for shared in (False, True):
        env = ManyGenerators()
        if shared:
            env.again, env.listed = env.generator, [env.generator, *env.listed]  # type: ignore[attr-defined]
        reseed(env, 5)
        env.listed = env.listed[-1:]
        seen.append(env.draws())
    assert seen[0] == seen[1]


def test_generators_keep_their_kind() -> None:
    env = ManyGenerators()
    env.generator = np.random.Generator(np.random.MT19937(0))
    generator = env.generator
    reseed(env, 5)
    first = generator.random()
    reseed(env, 5)
    assert env.generator is generator and type(generator.bit_generator) is np.random.MT19937
    assert generator.random() == first


def test_a_game_that_takes_its_seed_when_it_is_loaded_is_loaded_again() -> None:
    class Game(ManyGenerators):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[Any] = []

        def seed_game(self, seed: int) -> None:
            self.seen.append(seed)

        def load_game(self) -> None:
            self.seen.append("loaded")

    first, second, other = Game(), Game(), Game()
    reseed(first, 5)
    reseed(second, 5)
    reseed(other, 6)
    assert first.seen == second.seen != other.seen
    assert first.seen[1:] == ["loaded"] and 0 <= first.seen[0] < 2**31


def test_spaces_are_seeded_even_where_a_class_holds_them() -> None:
    class Plain(gym.Env[Any, Any]):
        observation_space = spaces.Box(0, 1, (), np.float64)
        action_space = spaces.Discrete(10**6)

    seen = []
    for _ in range(2):
        env = Plain()
        reseed(env, 5)
        seen.append((env.observation_space.sample(), env.action_space.sample()))
    assert seen[0] == seen[1]


# The state as data


@pytest.mark.parametrize("kind", [np.random.PCG64, np.random.MT19937, np.random.Philox, np.random.SFC64])
def test_np_random_goes_on_where_anothers_stood(kind: Any) -> None:
    one, other = gym.wrappers.TimeLimit(ManyGenerators(), 5), ManyGenerators()
    one.unwrapped.np_random = np.random.Generator(kind(7))
    one.unwrapped.np_random.random(3)
    set_random_state(other, random_state(one))  # type: ignore[arg-type]
    assert other.np_random.random(5).tolist() == one.unwrapped.np_random.random(5).tolist()
    assert other.np_random_seed == one.unwrapped.np_random_seed == -1


def test_what_was_never_used_has_no_state() -> None:
    assert random_state(ManyGenerators()) is None


def test_a_kind_of_generator_that_numpy_does_not_know_has_none_either() -> None:
    class Own(np.random.PCG64):
        pass

    env = ManyGenerators()
    env.np_random = np.random.Generator(Own(7))
    assert random_state(env) is None

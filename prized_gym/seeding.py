"""Random state after a fork: every generator of a copy reseeded, and each copy's own stream of seeds.

A fork copies its base's random state, so without care all copies would draw the same numbers. What is shared and
what is not was measured: NumPy's global state, every ``Generator`` and ``RandomState``, ``env.np_random``, the spaces,
``random.Random`` objects, and torch's generators are; ``os.urandom`` and fresh ``default_rng()`` are not.
"""

from __future__ import annotations

import random
import secrets
import sys
from collections.abc import Callable, Iterator
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.utils import seeding

_TAG = 0x70726A64
_SEED_BITS = 31
"""Derived seeds fit a signed 32-bit integer, which ``np.random.seed``, ``RandomState`` and most simulators require."""


def fresh_entropy() -> int:
    """Draw 128 random bits from the operating system."""
    return secrets.randbits(128)


class SeedStream:
    """The seeds that one copy's unseeded episodes take, one after another.

    Seed ``k`` of copy ``index`` out of ``count`` is a bijection, keyed by ``root`` through numpy's ``SeedSequence``, of
    the number ``k * count + index``: repeatable from ``root``, and no two of the first ``2**31 / count`` seeds of the
    copies of one root are equal.

    Args:
        root: the last explicit seed, or fresh entropy (any non-negative int).
        index: the copy's index.
        count: how many copies there are.
    """

    def __init__(self, root: int, index: int, count: int) -> None:
        key = np.random.SeedSequence(root).generate_state(2, np.uint64)
        self._multiplier = int(key[0]) | 1
        self._offset = int(key[1])
        self._index = index
        self._count = count
        self._drawn = 0

    def next(self) -> int:
        """Draw the next seed, ``0 <= seed < 2**31``."""
        number = self._drawn * self._count + self._index
        self._drawn += 1
        return (self._multiplier * number + self._offset) % (1 << _SEED_BITS)


def reseed(env: gym.Env[Any, Any], seed: int, keep_seeded: bool = False) -> None:
    """Give every generator that ``env`` can draw from a stream of its own, set by ``seed`` alone.

    Python's global ``random``, NumPy's global state and torch (where it is imported) are seeded; then, through the chain
    of wrappers, ``np_random``, the spaces, and each ``Generator``, ``RandomState``, ``random.Random`` and
    ``torch.Generator`` found in an attribute, or in a list, tuple or dict in an attribute.

    Args:
        env: the environment of this copy.
        seed: a non-negative int; equal seeds give equal streams.
        keep_seeded: leave an ``np_random`` that was seeded explicitly as it is.
    """
    kept = random_state(env) if keep_seeded else None
    # A root of its own: np_random is seeded with the plain seed, as env.reset(seed=seed) would.
    source = np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, _TAG])))

    def draw() -> int:
        return int.from_bytes(source.bytes(16), "little")

    random.seed(draw())
    np.random.seed(np.frombuffer(source.bytes(16), np.uint32))
    torch: Any = sys.modules.get("torch")
    torch_seed = draw() % (1 << 63)
    if torch is not None and hasattr(torch, "manual_seed"):
        torch.manual_seed(torch_seed)
    seen: set[int] = set()
    for layer in _layers(env):
        if layer is env.unwrapped:
            # The private pair is set, not the property: the property would forget the seed and report -1.
            layer._np_random, layer._np_random_seed = seeding.np_random(seed)
            _reseed_native(layer, draw() % (1 << _SEED_BITS))
        for value in _values(layer):
            _reseed_value(value, draw, torch, seen)
    if kept is not None:
        set_random_state(env, kept)


def _layers(env: gym.Env[Any, Any]) -> Iterator[gym.Env[Any, Any]]:
    layer: gym.Env[Any, Any] = env
    while isinstance(layer, gym.Wrapper):
        yield layer
        layer = layer.env
    yield layer


def _reseed_native(env: gym.Env[Any, Any], seed: int) -> None:
    """Seed a generator outside Python that only the environment can reach: the Arcade Learning Environment's."""
    seed_game, load_game = getattr(env, "seed_game", None), getattr(env, "load_game", None)
    if callable(seed_game) and callable(load_game):
        # The emulator takes its seed when it loads the game.
        seed_game(seed)
        load_game()


def random_state(env: gym.Env[Any, Any]) -> dict[str, Any] | None:
    """Return where ``np_random`` stands, as data, for :func:`set_random_state`; None if it was never used."""
    inner = env.unwrapped
    if inner._np_random is None or not hasattr(np.random, type(inner._np_random.bit_generator).__name__):
        return None
    return {"state": inner._np_random.bit_generator.state, "seed": inner._np_random_seed}


def set_random_state(env: gym.Env[Any, Any], state: dict[str, Any]) -> None:
    """Let ``np_random`` go on where another environment's stood."""
    generator = np.random.Generator(getattr(np.random, state["state"]["bit_generator"])())
    generator.bit_generator.state = state["state"]
    env.unwrapped._np_random, env.unwrapped._np_random_seed = generator, state["seed"]


def _values(layer: gym.Env[Any, Any]) -> Iterator[Any]:
    for name, value in list(vars(layer).items()):
        if name == "env":
            continue
        yield value
        if isinstance(value, (list, tuple)):
            yield from value[:1000]
        elif isinstance(value, dict):
            yield from list(value.values())[:1000]
    for name in ("action_space", "observation_space"):
        yield getattr(layer, name, None)


def _reseed_value(value: Any, draw: Callable[[], int], torch: Any, seen: set[int]) -> None:
    if not isinstance(
        value, (gym.Space, np.random.Generator, np.random.RandomState, random.Random)
    ) and not _is_torch_generator(value, torch):
        return
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, gym.Space):
        value.seed(draw() % (1 << _SEED_BITS))
    elif isinstance(value, np.random.Generator):
        fresh = type(value.bit_generator)(draw())
        value.bit_generator.state = fresh.state
    elif isinstance(value, np.random.RandomState):
        value.seed(draw() % (1 << 32))
    elif isinstance(value, random.Random):
        if not isinstance(value, random.SystemRandom):
            value.seed(draw())
    else:
        value.manual_seed(draw() % (1 << 63))


def _is_torch_generator(value: Any, torch: Any) -> bool:
    return torch is not None and hasattr(torch, "Generator") and isinstance(value, torch.Generator)

"""Random state after a fork: every generator of a copy reseeded, and each copy's own stream of seeds.

A fork copies its base's random state, so without care all copies would draw the same numbers. What is shared and
what is not was measured: NumPy's global state, every ``Generator`` and ``RandomState``, ``env.np_random``, the spaces,
``random.Random`` objects, and torch's generators are; ``os.urandom`` and fresh ``default_rng()`` are not.
"""

from __future__ import annotations

import random
import secrets
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.utils import seeding

from prized_gym.generators import parts, reachable

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


def reseed(
    env: gym.Env[Any, Any], seed: int, keep_seeded: bool = False, generators: Sequence[Any] | None = None
) -> None:
    """Give every generator that ``env`` can draw from a stream of its own, set by ``seed`` alone.

    Python's global ``random``, NumPy's global state and torch (where it is imported) are seeded; then, through the chain
    of wrappers, ``np_random``, the spaces, and each ``Generator``, ``RandomState``, ``random.Random`` and
    ``torch.Generator`` found in an attribute, or in a list, tuple or dict in an attribute; and those of ``generators``.

    Args:
        env: the environment of this copy.
        seed: a non-negative int; equal seeds give equal streams.
        keep_seeded: leave an ``np_random`` that was seeded explicitly as it is.
        generators: what else to seed, as :class:`prized_gym.generators.Generators` finds it; None: what ``env`` leads to.
    """
    inner = _innermost(env)
    kept = (inner._np_random, inner._np_random_seed) if keep_seeded and inner._np_random is not None else None
    left_alone = set() if kept is None else {id(part) for part in parts(kept[0])}
    _reseed_each(reachable(env) if generators is None else generators, seed, left_alone)
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
    seen: set[int] = {id(kept[0])} if kept is not None else set()
    for layer in _layers(env):
        if layer is inner:
            if kept is None:
                # The private pair is set, not the property: the property would forget the seed and report -1.
                layer._np_random, layer._np_random_seed = seeding.np_random(seed)
            _reseed_native(layer, draw() % (1 << _SEED_BITS))
        for value in _values(layer):
            _reseed_value(value, draw, torch, seen)


def _reseed_each(generators: Sequence[Any], seed: int, left_alone: set[int]) -> None:
    """Seed generators wherever they are held, each with its own part of a stream that nothing else is drawn from."""
    if not generators:
        return
    stream = np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, _TAG, 1]))).bytes(32 * len(generators))
    for number, value in enumerate(generators):
        own = stream[32 * number : 32 * number + 32]
        if id(value) not in left_alone:
            try:
                _reseed_by_type(value, own)
            except Exception as error:
                _warn_of(value, error)


def _reseed_by_type(value: Any, own: bytes) -> None:
    """Seed one generator with 32 random bytes."""
    number = int.from_bytes(own[:16], "little")
    if isinstance(value, np.random.SeedSequence):
        value.__init__(number, pool_size=value.pool_size)  # type: ignore[misc]
    elif type(value) in (np.random.PCG64, np.random.PCG64DXSM):
        # What its seed would be hashed to, which takes ten times as long.
        state = {"state": number, "inc": int.from_bytes(own[16:], "little") | 1}
        value.state = {"bit_generator": type(value).__name__, "state": state, "has_uint32": 0, "uinteger": 0}
    elif isinstance(value, np.random.BitGenerator):
        value.state = type(value)(number).state
    elif isinstance(value, np.random.RandomState):
        _reseed_legacy(value, number % (1 << 32))
    elif isinstance(value, random.Random):
        value.seed(number)
    else:
        value.manual_seed(number % (1 << 63))


def _reseed_legacy(value: np.random.RandomState, seed: int) -> None:
    kind = type(value._bit_generator)
    if kind is np.random.MT19937:
        value.seed(seed)
    else:
        # Its seed() is for the Mersenne Twister alone.
        value._bit_generator.state = kind(seed).state
        value.set_state({**value.get_state(legacy=False), "has_gauss": 0, "gauss": 0.0})


_warned_of: set[type] = set()


def _warn_of(value: Any, error: Exception) -> None:
    kind = type(value)
    if kind not in _warned_of:
        _warned_of.add(kind)
        warnings.warn(
            f"a random generator of type {kind.__module__}.{kind.__qualname__} cannot be reseeded "
            f"({type(error).__name__}: {error}): every copy draws the same from it. Seed it in "
            "`on_fork=lambda env, index, seed: ...`, which runs in each copy.",
            stacklevel=2,
        )


def _layers(env: gym.Env[Any, Any]) -> Iterator[gym.Env[Any, Any]]:
    layer: gym.Env[Any, Any] = env
    while isinstance(layer, gym.Wrapper):
        yield layer
        layer = layer.env
    yield layer


def _innermost(env: gym.Env[Any, Any]) -> gym.Env[Any, Any]:
    """The environment within all wrappers: its ``unwrapped`` may be anything, such as the simulator that it drives."""
    *_, innermost = _layers(env)
    return innermost


def _reseed_native(env: gym.Env[Any, Any], seed: int) -> None:
    """Seed a generator outside Python that only the environment can reach: the Arcade Learning Environment's."""
    seed_game, load_game = getattr(env, "seed_game", None), getattr(env, "load_game", None)
    if callable(seed_game) and callable(load_game):
        # The emulator takes its seed when it loads the game.
        seed_game(seed)
        load_game()


def random_state(env: gym.Env[Any, Any]) -> dict[str, Any] | None:
    """Return where ``np_random`` stands, as data, for :func:`set_random_state`; None if it was never used."""
    inner = _innermost(env)
    if inner._np_random is None or not hasattr(np.random, type(inner._np_random.bit_generator).__name__):
        return None
    return {"state": inner._np_random.bit_generator.state, "seed": inner._np_random_seed}


def set_random_state(env: gym.Env[Any, Any], state: dict[str, Any]) -> None:
    """Let ``np_random`` go on where another environment's stood."""
    generator = np.random.Generator(getattr(np.random, state["state"]["bit_generator"])())
    generator.bit_generator.state = state["state"]
    inner = _innermost(env)
    inner._np_random, inner._np_random_seed = generator, state["seed"]


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
        kind = type(value.bit_generator)
        try:
            value.bit_generator.state = kind(draw()).state
        except Exception as error:
            _warn_of(value.bit_generator, error)
    elif isinstance(value, np.random.RandomState):
        _reseed_legacy(value, draw() % (1 << 32))
    elif isinstance(value, random.Random):
        if not isinstance(value, random.SystemRandom):
            value.seed(draw())
    else:
        value.manual_seed(draw() % (1 << 63))


def _is_torch_generator(value: Any, torch: Any) -> bool:
    return torch is not None and hasattr(torch, "Generator") and isinstance(value, torch.Generator)

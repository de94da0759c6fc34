"""Finds the random generators of a process by their types, wherever its objects hold them.

A fork copies every generator of its base. Those that an environment can draw from are often not its attributes but those of
a simulator, entries of a queue, or held by a method that was kept: so they are looked for among all objects of the process,
once, before it is forked, and each fork reseeds exactly those.
"""

from __future__ import annotations

import gc
import random
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import islice
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any

import numpy as np

_KINDS = (random.Random, np.random.Generator, np.random.RandomState, np.random.BitGenerator, np.random.SeedSequence)
_ATOMS = (type, ModuleType, CodeType, str, bytes, bytearray, int, float, complex, bool, type(None), random.SystemRandom)
_MOST_ENTRIES = 1000
_MOST_OBJECTS = 100_000
_CHUNK = 10_000


class Generators:
    """The random generators of this process, as they were found before it was forked.

    What of them an environment leads to comes first, in an order that is the same in every process which builds that
    environment, so that equal seeds mean the same there; then whatever else the process holds.
    """

    def __init__(self) -> None:
        self._everything: dict[int, Any] = {}
        self._of: dict[int, list[Any]] = {}

    def collect(self, envs: Iterable[Any]) -> None:
        """Look through the whole process. What was found before is kept: objects that were frozen are not seen again."""
        # What user code has frozen would be overlooked; the caller freezes everything again.
        gc.unfreeze()
        self._note(found_everywhere())
        self._of = {id(env): self._ordered(env) for env in envs}

    def of(self, env: Any) -> list[Any]:
        """List what a fork is to reseed whose environment is ``env``."""
        return self._of.get(id(env)) or list(self._everything.values())

    def fresh(self, env: Any) -> list[Any]:
        """List that, and what this fork has made since, which costs little: all else is frozen."""
        known = {id(value): value for value in self.of(env)}
        # What the collector does not track may be held by what is frozen, and nothing else.
        beyond = [] if _torch_kind() is None else reachable(env)
        for value in [*found_everywhere(), *beyond]:
            known.setdefault(id(value), value)
        return list(known.values())

    def _note(self, found: Iterable[Any]) -> None:
        for value in found:
            self._everything.setdefault(id(value), value)

    def _ordered(self, env: Any) -> list[Any]:
        own = {id(value): value for value in reachable(env)}
        self._note(own.values())
        return [*own.values(), *(value for key, value in self._everything.items() if key not in own)]


def found_everywhere() -> list[Any]:
    """List the generators among all objects of this process that the garbage collector sees, in the order it has them."""
    found: list[Any] = []
    torch_kind = _torch_kind()
    objects = gc.get_objects()
    for start in range(0, len(objects), _CHUNK):
        chunk = objects[start : start + _CHUNK]
        found += _picked(chunk, _KINDS)
        if torch_kind is not None:
            # The collector does not track those: they are found by who holds them.
            found += _picked(_held_by(chunk), (torch_kind,))
    return list(_distinct(found))


def reachable(env: Any) -> list[Any]:
    """List the generators that ``env`` leads to, nearest first, without what modules, classes and global names hold.

    The search ends after 100,000 objects, and takes the first 1000 entries of any container.
    """
    torch_kind = _torch_kind()
    kinds = _KINDS if torch_kind is None else (*_KINDS, torch_kind)
    globals_of_modules = {id(vars(module)) for module in list(sys.modules.values()) if isinstance(module, ModuleType)}
    queue: deque[Any] = deque([env])
    seen = {id(env)}
    found: list[Any] = []
    while queue and len(seen) < _MOST_OBJECTS:
        for value in _inside(queue.popleft()):
            kind = type(value)
            if issubclass(kind, _ATOMS) or id(value) in seen or id(value) in globals_of_modules:
                continue
            seen.add(id(value))
            queue.append(value)
            if issubclass(kind, kinds):
                found.append(value)
    return list(_distinct(found))


def _torch_kind() -> Any:
    kind = getattr(sys.modules.get("torch"), "Generator", None)
    return kind if isinstance(kind, type) else None


def _picked(objects: list[Any], kinds: tuple[type, ...]) -> list[Any]:
    # By the type, not by isinstance: a proxy would say what it stands for, and perhaps load it for that.
    wanted = {kind for kind in set(map(type, objects)) if issubclass(kind, kinds) and kind is not random.SystemRandom}
    return [value for value in objects if type(value) in wanted] if wanted else []


def _held_by(objects: list[Any]) -> list[Any]:
    held = gc.get_referents(*objects)
    # Nor does it track a dict or a tuple that holds nothing tracked.
    plain = [value for value in held if type(value) in (dict, tuple) and not gc.is_tracked(value)]
    while plain:
        below = gc.get_referents(*plain)
        held += below
        plain = [value for value in below if type(value) in (dict, tuple) and not gc.is_tracked(value)]
    return held


def _inside(value: Any) -> Iterable[Any]:
    """What an object holds."""
    kind = type(value)
    if kind in (list, tuple, set, frozenset, deque):
        return list(islice(value, _MOST_ENTRIES))
    if kind is dict:
        return list(islice(value.values(), _MOST_ENTRIES))
    if kind is FunctionType:
        return [value.__closure__, value.__defaults__, value.__kwdefaults__, value.__dict__]
    if kind is BuiltinFunctionType:
        return [value.__self__]
    if kind is np.ndarray:
        return value.flat[:_MOST_ENTRIES].tolist() if value.dtype == object else []
    return gc.get_referents(value)[: 2 * _MOST_ENTRIES]


def _distinct(found: Iterable[Any]) -> Iterator[Any]:
    """What is to be seeded: of a ``Generator`` its bit generator, of a bit generator its seed sequence too; each once."""
    found = list(found)
    # The ones that are seeded as a whole come with a bit generator that is not to be seeded beside them.
    seen = {id(part) for value in found if isinstance(value, np.random.RandomState) for part in parts(value)[1:]}
    for value in found:
        for part in parts(value):
            if id(part) not in seen:
                seen.add(id(part))
                yield part


def parts(value: Any) -> list[Any]:
    """List a generator and the objects behind it: what has to be left alone if it is."""
    if isinstance(value, np.random.Generator):
        return parts(value.bit_generator)
    if isinstance(value, np.random.RandomState):
        return [value, value._bit_generator]
    if isinstance(value, np.random.BitGenerator):
        sequence = value.seed_seq
        return [value, sequence] if isinstance(sequence, np.random.SeedSequence) else [value]
    return [value]

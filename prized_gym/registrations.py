"""The environments that a script has registered, made known where its environments run."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

import gymnasium as gym
from gymnasium.envs import registration
from gymnasium.envs.registration import EnvSpec

from prized_gym import by_value

Registrations: TypeAlias = "dict[str, bytes | str]"
"""By id, the spec, pickled; in its place the reason, where it cannot be."""


def collect() -> Registrations:
    """What is registered here, Gymnasium's own environments included: a script may have put others in their place."""
    found: Registrations = {}
    for name, spec in gym.registry.items():
        try:
            found[name] = _dumps(spec)
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


def _dumps(spec: EnvSpec) -> bytes:
    try:
        data = pickle.dumps(spec, protocol=5)
    except Exception:
        return by_value.dumps(spec)
    return by_value.dumps(spec) if by_value.concerns(data) else data


def install(registered: Mapping[str, bytes | str]) -> None:
    """Make known in this process what another one has registered: to factories, wrappers, ``warm_up`` and resets alike.

    Each spec is read when it is first asked for, since reading it may import what it is made of. Until then its id does not
    count as registered, so that a module which registers it, and is imported here too, is not warned of doing so twice.
    """
    if not registered:
        return
    registry = gym.registry if isinstance(gym.registry, _Registry) else _Registry(gym.registry)
    registry.add(registered)
    for module in (gym, gym.envs, registration):
        module.registry = registry  # type: ignore[attr-defined]


class _Registry(dict[str, EnvSpec]):
    """Gymnasium's registry, with specs that are read when they are asked for."""

    def __init__(self, specs: Mapping[str, EnvSpec]) -> None:
        super().__init__(specs)
        self._late: Registrations = {}

    def add(self, registered: Mapping[str, bytes | str]) -> None:
        for name, pickled in registered.items():
            if name not in self:
                self._late[name] = pickled
            elif isinstance(pickled, bytes):
                # Gymnasium's own, unless the script has put another in its place.
                spec = pickle.loads(pickled)
                if spec != self[name]:
                    self[name] = spec

    def __missing__(self, name: str) -> EnvSpec:
        if name not in self._late:
            raise KeyError(name)
        pickled = self._late[name]
        if isinstance(pickled, str):
            raise gym.error.Error(f"the environment {name!r}, registered in the script, cannot be sent here: {pickled}")
        spec: EnvSpec = pickle.loads(pickled)
        self[name] = spec
        return spec

    def get(self, name: str, default: Any = None) -> Any:
        try:
            return self[name]
        except KeyError:
            return default

    def values(self) -> Iterable[EnvSpec]:  # type: ignore[override]
        """The specs, with stand-ins for those not read yet: for finding the latest version of a name, or a similar one."""
        late = [EnvSpec(name) for name in self._late if name not in self]
        return [*super().values(), *late]

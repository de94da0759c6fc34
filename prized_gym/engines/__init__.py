"""The engines: where bases and copies live."""

from __future__ import annotations

import importlib
import os
from importlib.metadata import EntryPoint, entry_points

from prized_gym.interface.engine import Engine

ENGINES = {
    "inline": "prized_gym.engines.inline:InlineEngine",
    "local": "prized_gym.engines.local:LocalEngine",
    "gvisor": "prized_gym.engines.gvisor:GvisorEngine",
}
"""The engines of this library by name; those of other packages are entry points of the group :data:`GROUP`."""

GROUP = "prized_gym.engines"
"""An entry point of this group names an engine and points to its class, a subclass of :class:`Engine`."""

DEFAULT = "local"


def load(engine: str | type[Engine] | None) -> type[Engine]:
    """Find an engine.

    Args:
        engine: its name, or itself; None for the one that ``PRIZED_GYM_ENGINE`` names, else ``local``.

    Raises:
        ValueError: there is none of that name; the message lists all.
        TypeError: it is no subclass of ``Engine``.
    """
    if isinstance(engine, type):
        return _checked(engine, f"engine={engine!r}")
    chosen = engine or os.environ.get("PRIZED_GYM_ENGINE") or DEFAULT
    if not isinstance(chosen, str):
        raise TypeError(f"engine must be the name of an engine or a subclass of Engine, got {engine!r}")
    target = ENGINES.get(chosen)
    if target is not None:
        module, _, attribute = target.partition(":")
        return _checked(getattr(importlib.import_module(module), attribute), f"the engine {chosen!r}")
    registered = _registered().get(chosen)
    if registered is None:
        origin = "" if engine else " (from PRIZED_GYM_ENGINE)"
        raise ValueError(f"unknown engine {chosen!r}{origin}: the engines are {', '.join(names())}")
    return _checked(registered.load(), f"the entry point {registered.name} = {registered.value} of the group {GROUP}")


def names() -> list[str]:
    """List the names of all engines, those that other packages register included."""
    return list(dict.fromkeys((*ENGINES, *sorted(_registered()))))


def _registered() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=GROUP)}


def _checked(found: object, what: str) -> type[Engine]:
    if not isinstance(found, type) or not issubclass(found, Engine):
        raise TypeError(f"{what} must be a subclass of prized_gym.interface.engine.Engine, and {found!r} is none")
    return found

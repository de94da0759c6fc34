"""The engines: where bases and copies live."""

from __future__ import annotations

import importlib
import os

from prized_gym.interface.engine import Engine

ENGINES = {
    "inline": "prized_gym.engines.inline:InlineEngine",
    "local": "prized_gym.engines.local:LocalEngine",
    "gvisor": "prized_gym.engines.gvisor:GvisorEngine",
}
"""Each engine by name; a new one is a line here."""

DEFAULT = "local"


def load(name: str | None) -> type[Engine]:
    """The engine called ``name``; for None the one ``PRIZED_GYM_ENGINE`` names, else ``local``.

    Raises:
        ValueError: there is no such engine.
    """
    chosen = name or os.environ.get("PRIZED_GYM_ENGINE") or DEFAULT
    try:
        target = ENGINES[chosen]
    except (KeyError, TypeError):
        origin = "" if name else " (from PRIZED_GYM_ENGINE)"
        raise ValueError(f"unknown engine {chosen!r}{origin}: the engines are {', '.join(ENGINES)}") from None
    module, _, attribute = target.partition(":")
    engine: type[Engine] = getattr(importlib.import_module(module), attribute)
    return engine

"""Which modules of the user's own a sandbox on this machine must see, beside what is installed."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterable, Sequence
from types import ModuleType


def visible(payload: bytes, shown: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """The files and packages that a pickled recipe refers to, and those that these import in turn.

    Only modules that lie outside of ``shown`` and can be imported here are meant: a script's neighbours, say. They are
    shown one by one, not with their directory, which may be a home. What a module imports only later, in a function,
    cannot be foreseen.

    Args:
        payload: the pickle; a module counts as referred to if its name is in it.
        shown: directories that the sandbox sees anyway.

    Returns:
        What to bind, from path inside to path here, and the directories to import from.
    """
    own = _own(shown)
    wanted = [name for name in own if name.encode() in payload]
    for word in _names(payload):
        if word not in own and (found := _found(word, shown)) is not None:
            own[word] = found
            wanted.append(word)
    for name in wanted:
        module = sys.modules.get(name)
        if module is not None:
            wanted += [other for other in own if other not in wanted and _uses(module, other)]
    binds = {own[name]: own[name] for name in wanted}
    return binds, list(dict.fromkeys(os.path.dirname(path) for path in binds))


def _own(shown: Sequence[str]) -> dict[str, str]:
    """The top-level modules loaded from elsewhere than ``shown``: their file, or the directory of their package."""
    found: dict[str, str] = {}
    for name, module in list(sys.modules.items()):
        if "." in name or name == "__main__":
            continue
        path = _place(module)
        if path is not None and not _within(path, shown):
            found[name] = path
    return found


def _place(module: ModuleType) -> str | None:
    file = getattr(module, "__file__", None)
    if not isinstance(file, str) or not os.path.isfile(file):
        return None
    path = os.path.abspath(file)
    return os.path.dirname(path) if os.path.basename(path).startswith("__init__.") else path


def _names(payload: bytes) -> Iterable[str]:
    """Top-level names of what looks like ``module:function`` in a pickle."""
    import re

    return {
        match.decode() for match in re.findall(rb"([A-Za-z_][A-Za-z0-9_]*)(?:\.[A-Za-z0-9_.]+)?:[A-Za-z_]", payload)
    }


def _found(name: str, shown: Sequence[str]) -> str | None:
    """Where a module that is not loaded would come from."""
    if name in sys.modules or name in sys.stdlib_module_names:
        return None
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError, AttributeError):
        return None
    if spec is None or spec.origin is None or not os.path.isfile(spec.origin):
        return None
    path = os.path.abspath(spec.origin)
    path = os.path.dirname(path) if os.path.basename(path).startswith("__init__.") else path
    return None if _within(path, shown) else path


def _uses(module: ModuleType, other: str) -> bool:
    """Whether a module holds another, or something of it, in a global variable."""
    for value in list(vars(module).values()):
        name = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
        if isinstance(name, str) and name.partition(".")[0] == other:
            return True
    return False


def _within(path: str, shown: Sequence[str]) -> bool:
    real = os.path.realpath(path)
    outer = [*shown, "/usr", "/lib"]
    return any(each == path or path.startswith(each + "/") or real.startswith(each + "/") for each in outer)

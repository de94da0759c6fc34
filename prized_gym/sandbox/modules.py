"""Which modules of the user's own a sandbox on this machine must see, beside what is installed."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import site
import sys
from collections.abc import Sequence
from pathlib import Path

_NAME = re.compile(rb"[A-Za-z_][A-Za-z0-9_]*")
_MOST_FILES = 500
_MOST_BYTES = 8 << 20


def visible(payload: bytes, shown: Sequence[str], search: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """The modules and packages that a pickled recipe refers to, and those that they import in turn.

    Only those are meant that are not installed and can be imported here: a script and its neighbours, say. They are shown
    one by one, not with their directory, which may be a home.

    Args:
        payload: the pickle. Whatever word of it names such a module counts.
        shown: directories that the sandbox sees anyway.
        search: directories that it imports from anyway, beside those of installed packages.

    Returns:
        What to bind, from path inside to path here, and the directories to import from.
    """
    places: dict[str, str] = {}
    known: set[str] = set()
    # A payload may hold megabytes of arrays; names that a pickle refers to are found in it nonetheless.
    words = {word.decode() for word in _NAME.findall(payload[:_MOST_BYTES])}
    waiting = [word for word in words if word in _importable()]
    while waiting:
        name = waiting.pop()
        if name in known or name in sys.stdlib_module_names:
            continue
        known.add(name)
        place = _place(name)
        if place is None or _within(place, _installed()):
            continue
        # One that is seen anyway may lie deeper than where modules are looked for.
        if not _within(place, shown) or os.path.dirname(place) not in search:
            places[name] = place
            waiting += _imports(Path(place))
    directories = dict.fromkeys(os.path.dirname(place) for place in places.values())
    return {place: place for place in places.values() if not _within(place, shown)}, list(directories)


def _installed() -> list[str]:
    return [sys.prefix, sys.base_prefix, *site.getsitepackages(), site.getusersitepackages()]


def _importable() -> set[str]:
    """The top-level names that are loaded, or lie in a directory that modules are imported from."""
    names = {name for name in sys.modules if "." not in name}
    for directory in sys.path:
        try:
            names |= {entry.partition(".")[0] for entry in os.listdir(directory or ".")}
        except OSError:
            continue
    return names - {"__main__"}


def _place(name: str) -> str | None:
    """The file of a top-level module, or the directory of its package; None if it has neither."""
    file = getattr(sys.modules.get(name), "__file__", None)
    if name not in sys.modules:
        try:
            spec = importlib.util.find_spec(name)
        except (ImportError, ValueError, AttributeError):
            spec = None
        file = None if spec is None else spec.origin
    if not isinstance(file, str) or not os.path.isfile(file):
        return None
    path = os.path.abspath(file)
    return os.path.dirname(path) if os.path.basename(path).startswith("__init__.") else path


def _imports(place: Path) -> set[str]:
    """The top-level names that a module, or any module of a package, imports anywhere in it."""
    found: set[str] = set()
    files = [place] if place.is_file() else sorted(place.rglob("*.py"))[:_MOST_FILES]
    for file in files:
        try:
            tree = ast.parse(file.read_bytes())
        except (OSError, SyntaxError, ValueError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                found.add(node.module.partition(".")[0])
    return found


def _within(path: str, shown: Sequence[str]) -> bool:
    outer = [*shown, "/usr", "/lib", "/lib64", "/bin", "/sbin"]
    return any(real.startswith(each.rstrip("/") + "/") for each in outer for real in (path, os.path.realpath(path)))

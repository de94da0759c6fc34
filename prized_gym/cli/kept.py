"""``prized-gym ls``, ``rm`` and ``sweep``: the bases that ``Base.keep`` left behind, and what dead programs did."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

from prized_gym import engines
from prized_gym.errors import EngineUnavailableError, MissingExtraError, PrizedGymError
from prized_gym.interface.engine import Engine
from prized_gym.interface.sandbox import KeptBase

_HEAD = ("ID", "ENGINE", "SIZE", "AGE", "EXPIRES", "LABELS")


def add_parsers(commands: argparse._SubParsersAction[Any]) -> None:
    """Add the three commands."""
    ls = commands.add_parser("ls", help="list the bases that were kept, with their sizes and ages")
    ls.set_defaults(run=list_kept)
    rm = commands.add_parser("rm", help="delete bases that were kept; exit with 1 if there is none of an id")
    rm.add_argument("id", nargs="+", help="as `prized-gym ls` shows them")
    rm.set_defaults(run=remove)
    sweep = commands.add_parser(
        "sweep", help="delete kept bases that have expired, and what programs left behind that were killed"
    )
    sweep.set_defaults(run=delete_leftovers)
    for parser in (ls, rm, sweep):
        parser.add_argument("--engine", help="only of this engine; by default of all that can run here")
        parser.add_argument("--json", action="store_true", help="print JSON: bytes, and seconds since the epoch")


def list_kept(arguments: argparse.Namespace) -> int:
    """Print the kept bases of all engines, oldest first."""
    asked = _Engines(arguments.engine)
    found = asked.kept()
    if arguments.json:
        print(json.dumps([_fields(base) for base in found], indent=2))
    elif found:
        print(_table([_HEAD, *map(_row, found)]))
        print(f"{len(found)} kept, {_size(sum(base.size or 0 for base in found))}")
    else:
        print("nothing is kept")
    return asked.status


def remove(arguments: argparse.Namespace) -> int:
    """Delete kept bases by id: all are tried, and one that is not there makes the exit code 1."""
    asked = _Engines(arguments.engine)
    before = {base.id: base for base in asked.kept()}
    removed: list[KeptBase] = []
    for id in dict.fromkeys(arguments.id):
        deleted = [
            before.get(id, KeptBase(id, engine.name))
            for engine in asked.loaded
            if id not in before or before[id].engine == engine.name
            if asked.attempt(engine.name, lambda engine=engine, id=id: engine.remove(id))
        ]
        removed += deleted
        if not deleted:
            asked.complain(f"no base {id} is kept; `prized-gym ls` lists those that are")
    _report(removed, arguments.json)
    return asked.status


def delete_leftovers(arguments: argparse.Namespace) -> int:
    """Delete what has expired, and what programs left behind that are no more."""
    asked = _Engines(arguments.engine)
    before = {(base.engine, base.id): base for base in asked.kept()}
    removed = [
        before.get((engine.name, name), KeptBase(name, engine.name))
        for engine in asked.loaded
        for name in asked.attempt(engine.name, engine.sweep) or ()
    ]
    _report(removed, arguments.json)
    return asked.status


class _Engines:
    """The engines that a command is about, and whether all went well with them.

    Args:
        name: the one that was asked for; None for all.
    """

    def __init__(self, name: str | None) -> None:
        self.status = 0
        self._named = name is not None
        self.loaded: list[type[Engine]] = []
        for each in engines.names() if name is None else [name]:
            found = self.attempt(each, lambda each=each: engines.load(each))
            if found is not None:
                self.loaded.append(found)

    def kept(self) -> list[KeptBase]:
        """List what they keep, oldest first."""
        told = [(engine, base) for engine in self.loaded for base in self.attempt(engine.name, engine.kept) or ()]
        # One that cannot even be shown is complained of, and hides none of the others.
        found = [base for engine, base in told if self.attempt(engine.name, lambda base=base: _row(base))]
        return sorted(found, key=lambda base: 0.0 if math.isnan(base.created) else base.created)

    def attempt(self, name: str, action: Any) -> Any:
        """Do something with an engine; None, and a complaint, where it fails."""
        with self._complaining(name):
            return action()
        return None

    def complain(self, message: str, *, failed: bool = True) -> None:
        """Print what is wrong."""
        print(f"prized-gym: {message}", file=sys.stderr)
        if failed:
            self.status = 1

    @contextlib.contextmanager
    def _complaining(self, name: str) -> Iterator[None]:
        try:
            yield
        except (EngineUnavailableError, MissingExtraError) as error:
            # Of several engines, one that cannot run here is passed over, but not in silence: it may keep something.
            self.complain(f"{name} is passed over: {str(error).splitlines()[0]}", failed=self._named)
        except (PrizedGymError, OSError, ValueError) as error:
            self.complain(f"{name}: {error}")
        except Exception as error:
            # The engine of another package may be broken in any way: the others are still asked.
            self.complain(f"{name}: {type(error).__name__}: {error}")


def _report(removed: Sequence[KeptBase], as_json: bool) -> None:
    """Print what was deleted."""
    if as_json:
        print(json.dumps([_fields(base) for base in removed], indent=2))
        return
    for base in removed:
        known = [
            text for text in (_size(base.size), "" if math.isnan(base.created) else f"{_age(base.age)} old") if text
        ]
        print(f"deleted {base.id}" + (f" ({', '.join(known)})" if known else ""))
    if not removed:
        print("nothing was deleted")


def _fields(base: KeptBase) -> dict[str, Any]:
    """Describe a kept base as JSON can hold it."""
    return {
        "id": base.id,
        "engine": base.engine,
        "labels": dict(base.labels),
        "size": base.size,
        "created": None if math.isnan(base.created) else base.created,
        "expires": base.expires,
    }


def _row(base: KeptBase) -> tuple[str, ...]:
    labels = " ".join(f"{key}={value}" for key, value in sorted(base.labels.items()))
    age = "?" if math.isnan(base.created) else _age(base.age)
    return base.id, base.engine, _size(base.size) or "?", age, _remaining(base.expires), _printable(labels)


def _printable(text: str) -> str:
    """Write what would move the cursor, or begin a line, as an escape."""
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)


def _table(rows: Sequence[Sequence[str]]) -> str:
    """Lay rows out in columns, each as wide as its widest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def _size(count: int | None) -> str:
    """Write a number of bytes for people, as in ``"120 MB"``; nothing where it is not known."""
    if count is None:
        return ""
    size = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 999.5:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} TB"


def _age(seconds: float) -> str:
    """Write a duration for people, as in ``"3 h"``."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


def _remaining(expires: float | None) -> str:
    """Write when something expires, as seen from this moment."""
    if expires is None:
        return "never"
    remaining = expires - time.time()
    return f"in {_age(remaining)}" if remaining > 0 else "expired"

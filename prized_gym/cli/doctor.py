"""``prized-gym doctor``: which engines can run here, and what the others miss."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from prized_gym import engines
from prized_gym.errors import PrizedGymError


def add_parser(commands: argparse._SubParsersAction[Any]) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "doctor", help="say for each engine whether it can run here, and if not, what is missing"
    )
    parser.add_argument("engine", nargs="*", help="only these; exit with 1 if one of them cannot run")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print for each engine whether it can run here.

    Returns:
        The exit code: 1 if an engine that was asked for cannot run, 2 if there is none of that name.
    """
    asked: list[str] = arguments.engine
    known = engines.names()
    unknown = [name for name in asked if name not in known]
    if unknown:
        print(f"prized-gym: unknown engine {unknown[0]!r}: the engines are {', '.join(known)}", file=sys.stderr)
        return 2
    healthy = True
    for name in asked or known:
        problem = _problem(name)
        healthy = healthy and problem is None
        print(f"{name}: {'can run here' if problem is None else 'cannot run here'}")
        if name != "gvisor" or not _print_gvisor():
            print(_indented(problem or ""), end="\n" if problem else "")
    return 0 if healthy or not asked else 1


def _problem(name: str) -> str | None:
    """Say why an engine cannot run here; None if it can."""
    try:
        engines.load(name).check()
    except PrizedGymError as error:
        return str(error)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def _print_gvisor() -> bool:
    """Print each thing that the sandboxes of this machine need; False where they are out of the question."""
    try:
        from prized_gym.runsc import diagnose
    except PrizedGymError:
        return False
    for check in diagnose():
        mark = "ok" if check.ok else "MISSING" if check.needed else "without"
        print(f"  {mark:7}  {check.name}: {check.detail}")
        if not check.ok and check.remedy:
            print(_indented(check.remedy, 11))
    return True


def _indented(text: str, columns: int = 2) -> str:
    return "\n".join(" " * columns + line for line in text.splitlines())

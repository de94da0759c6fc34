"""The command line: `prized-gym doctor` says which engines run here, `prized-gym bench` measures them."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

from prized_gym import engines
from prized_gym.errors import PrizedGymError


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: the words after the program's name; None: the process's own.

    Returns:
        The exit code: 0, 1 where something asked for does not work, 2 for a wrong command line.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["bench"]:
        # Its options are its own.
        return _bench(words[1:])
    parser = argparse.ArgumentParser(prog="prized-gym", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    doctor = commands.add_parser(
        "doctor", help="say for each engine whether it can run here, and if not, what is missing"
    )
    doctor.add_argument("engine", nargs="*", help="only these; exit with 1 if one of them cannot run")
    commands.add_parser("bench", help="measure forks and steps; `prized-gym bench --help` says what", add_help=False)
    arguments = parser.parse_args(words)
    return _doctor(arguments.engine)


def _bench(words: list[str]) -> int:
    """Run the benchmarks of the checkout that this package is imported from."""
    checkout = Path(__file__).resolve().parents[2]
    if not (checkout / "bench" / "__main__.py").is_file():
        print("prized-gym: the benchmarks are in a checkout of the repository, not in an installation", file=sys.stderr)
        return 1
    sys.path.insert(0, str(checkout))
    return int(importlib.import_module("bench.__main__").main(words) or 0)


def _doctor(asked: Sequence[str]) -> int:
    unknown = [name for name in asked if name not in engines.ENGINES]
    if unknown:
        print(
            f"prized-gym: unknown engine {unknown[0]!r}: the engines are {', '.join(engines.ENGINES)}", file=sys.stderr
        )
        return 2
    healthy = True
    for name in asked or engines.ENGINES:
        problem = _problem(name)
        healthy = healthy and problem is None
        print(f"{name}: {'can run here' if problem is None else 'cannot run here'}")
        if name == "gvisor":
            _gvisor()
        elif problem is not None:
            print(_indented(problem))
    return 0 if healthy or not asked else 1


def _problem(name: str) -> str | None:
    """Why an engine cannot run here, None if it can."""
    try:
        engines.load(name).check()
    except PrizedGymError as error:
        return str(error)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def _gvisor() -> None:
    """Every single thing that the sandboxes of this machine need."""
    from prized_gym.runsc import diagnose

    for check in diagnose():
        mark = "ok" if check.ok else "MISSING" if check.needed else "without"
        print(f"  {mark:7}  {check.name}: {check.detail}")
        if not check.ok and check.remedy:
            print(_indented(check.remedy, 11))


def _indented(text: str, columns: int = 2) -> str:
    return "\n".join(" " * columns + line for line in text.splitlines())

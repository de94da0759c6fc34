"""The command line: what runs here, what was kept, and the benchmarks of a checkout."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from prized_gym.cli import bench, doctor, kept


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
        return bench.run(words[1:])
    parser = argparse.ArgumentParser(prog="prized-gym", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    doctor.add_parser(commands)
    kept.add_parsers(commands)
    commands.add_parser(
        "bench", help="measure forks, steps and rollouts; `prized-gym bench --help` says what", add_help=False
    )
    arguments = parser.parse_args(words)
    return int(arguments.run(arguments))

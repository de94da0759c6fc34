"""The command line of the benchmarks."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from bench import fork, rollouts, sandbox, step

BENCHMARKS = {"step": step, "fork": fork, "sandbox": sandbox, "rollouts": rollouts}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one benchmark and print its table."""
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    commands = parser.add_subparsers(dest="benchmark", required=True)
    for name, module in BENCHMARKS.items():
        command = commands.add_parser(name, help=(module.__doc__ or "").splitlines()[0], description=module.__doc__)
        module.add_arguments(command)
    options = parser.parse_args(arguments)
    BENCHMARKS[options.benchmark].run(options)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""``prized-gym bench``: the benchmarks of the checkout that this package is imported from."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from pathlib import Path


def run(words: Sequence[str]) -> int:
    """Run a benchmark.

    Args:
        words: the command line of the benchmarks.

    Returns:
        The exit code: 1 where this package was installed without a checkout.
    """
    checkout = Path(__file__).resolve().parents[2]
    if not (checkout / "bench" / "__main__.py").is_file():
        print("prized-gym: the benchmarks are in a checkout of the repository, not in an installation", file=sys.stderr)
        return 1
    sys.path.insert(0, str(checkout))
    return int(importlib.import_module("bench.__main__").main(list(words)) or 0)

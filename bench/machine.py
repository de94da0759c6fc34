"""What the numbers were measured on."""

from __future__ import annotations

import datetime
import os
import platform
from collections.abc import Sequence

import gymnasium
import numpy as np


def describe() -> str:
    """One line: date, processor count, memory, system and versions."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return (
        f"{datetime.date.today():%Y-%m-%d}, {cores} cores, {memory:.0f} GiB, {platform.system()} {platform.release()} "
        f"{platform.machine()}, Python {platform.python_version()}, gymnasium {gymnasium.__version__}, "
        f"numpy {np.__version__}"
    )


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table, its columns aligned."""
    widths = [max(len(line[column]) for line in (header, *rows)) for column in range(len(header))]
    lines = [
        " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in (header, *rows)
    ]
    rule = " | ".join("-" * width for width in widths)
    return "\n".join(f"| {line} |" for line in (lines[0], rule, *lines[1:]))

"""Which processes are below this one."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def descendants() -> dict[int, str]:
    """The processes below this one, with their command lines."""
    found: dict[int, str] = {}
    queue = [os.getpid()]
    while queue:
        pid = queue.pop()
        with contextlib.suppress(OSError):
            for task in os.listdir(f"/proc/{pid}/task"):
                with contextlib.suppress(OSError):
                    for child in Path(f"/proc/{pid}/task/{task}/children").read_text().split():
                        with contextlib.suppress(OSError):
                            line = Path(f"/proc/{child}/cmdline").read_bytes().replace(b"\0", b" ").decode()
                            found[int(child)] = line
                            queue.append(int(child))
    return found


def own_descendants() -> dict[int, str]:
    """Those of them that this library made."""
    return {pid: line for pid, line in descendants().items() if "prized_gym" in line}

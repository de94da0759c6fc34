"""Processes: which are below this one or belong to a sandbox, what they use, and waiting for them."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
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


def eventually(condition: Callable[[], object], seconds: float = 30.0) -> bool:
    """Whether the condition becomes true in time."""
    ends = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > ends:
            return False
        time.sleep(0.02)
    return True


def running(pid: int) -> bool:
    """Whether a process is there and has not ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def command_lines() -> dict[int, list[str]]:
    """The words of the command line of every process that this one can see."""
    found: dict[int, list[str]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                found[int(entry.name)] = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
    return found


def processes_of(store: Path) -> list[str]:
    """Command lines of all processes that have a path below ``store`` among their arguments."""
    lines = {pid: " ".join(words) for pid, words in command_lines().items()}
    return [f"{pid} {line[:400]}" for pid, line in lines.items() if str(store) in line]


def left_of(store: Path) -> list[str]:
    """Files in a store, processes that name it, and mounts below it."""
    found = [
        os.path.join(directory, name)
        for directory, directories, files in os.walk(store)  # which does not mind what vanishes meanwhile
        for name in (*directories, *files)
        if name not in ("lock", "kept")
    ]
    mounts = Path("/proc/self/mountinfo").read_text()
    return found + processes_of(store) + ([mounts] if str(store) in mounts else [])


def sentry_of(id: str) -> int:
    """The pid of a sandbox's sentry as this process sees it."""
    for pid, words in command_lines().items():
        if id in words and "boot" in words:
            return pid
    raise AssertionError(f"no sentry of {id}")


def cpu_seconds(pids: list[int]) -> float:
    """CPU time of live processes so far."""
    total = 0
    for pid in pids:
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        total += int(fields[11]) + int(fields[12])
    return total / os.sysconf("SC_CLK_TCK")

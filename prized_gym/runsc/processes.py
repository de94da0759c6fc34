"""Process trees by ``/proc``: who descends from whom, stopping all of them, and what they use."""

from __future__ import annotations

import os
import signal
from pathlib import Path


def children(pid: int) -> list[int]:
    """List the direct children of a process, whichever of its threads made them."""
    found: list[int] = []
    try:
        for task in os.listdir(f"/proc/{pid}/task"):
            try:
                found += map(int, Path(f"/proc/{pid}/task/{task}/children").read_text().split())
            except OSError:
                continue
    except OSError:
        pass
    return found


def tree(pid: int) -> list[int]:
    """List a process and all that descend from it, parents before children."""
    found = [pid]
    for parent in found:
        found += children(parent)
    return found


def _signal(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except OSError:
        pass


def stop(pid: int) -> list[int]:
    """Stop a whole process tree, the root first, and return it in that order.

    The sentry alone is not enough: its children run guest code by themselves.
    """
    stopped: list[int] = []
    while fresh := [
        process for process in tree(pid) if process not in stopped
    ]:  # once more: one may have forked meanwhile
        for process in fresh:
            _signal(process, signal.SIGSTOP)
        stopped += fresh
    return stopped


def resume(stopped: list[int]) -> None:
    """Continue the processes that :func:`stop` stopped, the root last."""
    for process in reversed(stopped):
        _signal(process, signal.SIGCONT)


def used(sentry: int) -> tuple[float, float]:
    """Measure what a sandbox uses.

    Args:
        sentry: the pid of its sentry, whose tree is the sandbox.

    Returns:
        CPU time in seconds, that of children which have ended included, and memory in bytes.
    """
    ticks = size = 0
    for process in tree(sentry):
        try:
            ticks += sum(map(int, Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[11:15]))
            for line in Path(f"/proc/{process}/status").read_text().splitlines():
                if line.startswith("RssAnon:"):
                    size += int(line.split()[1]) * 1024
        except (OSError, ValueError):
            continue
    try:
        for entry in os.scandir(f"/proc/{sentry}/fd"):
            # The guest's memory is a file that the sentry holds, and that nobody need have mapped.
            if os.readlink(entry.path).startswith("/memfd:runsc-memory"):
                size += os.stat(entry.path).st_blocks * 512
                break
    except OSError:
        pass
    return ticks / os.sysconf("SC_CLK_TCK"), float(size)


def mentioning(words: set[str]) -> list[int]:
    """List the processes that have one of ``words`` among their arguments."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                arguments = Path(f"/proc/{name}/cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if words & {argument.decode(errors="replace") for argument in arguments}:
                found.append(int(name))
    return found

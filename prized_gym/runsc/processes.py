"""Processes: started in sessions of their own, and their trees by ``/proc``: stopped, continued, measured."""

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


def kill(pid: int) -> None:
    """Kill a process, or with a negative number a process group, if it is still there."""
    _signal(pid, signal.SIGKILL)


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


def spawn(argv: list[str], log: str, joins: list[Path], keep: int | None = None) -> int:
    """Start a process in a session of its own, with its output in a file.

    Args:
        argv: its command line.
        log: the file.
        joins: process lists of the cgroups it enters.
        keep: a descriptor it inherits.

    Returns:
        Its pid.
    """
    pid = os.fork()
    if pid:
        return pid
    try:
        os.setsid()
        for join in joins:
            try:
                join.write_text(str(os.getpid()))
            except OSError:
                pass
        null = os.open(os.devnull, os.O_RDONLY)
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(null, 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        if keep is not None:
            os.set_inheritable(keep, True)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.execv(argv[0], argv)
    finally:
        os._exit(127)

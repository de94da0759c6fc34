"""A few facts of Unix processes that Python's standard library does not wrap."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import resource
import signal
import sys
from collections import deque
from collections.abc import Container

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36

_libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


def libc() -> ctypes.CDLL | None:
    """The C library, on Linux."""
    return _libc


def die_with_parent(parent: int) -> None:
    """Be killed when the process ``parent``, whose child this is, ends; at once if it has ended already."""
    if _libc is not None:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    # The parent may have died before the call above took effect.
    if os.getppid() != parent:
        os._exit(1)


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent ends."""
    if _libc is not None:
        _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def children(pid: int) -> list[int]:
    """The children of a process, from all its threads; empty where there is no /proc."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{task}/children") as file:
                found.extend(int(word) for word in file.read().split())
    return found


def descendants(pid: int, but: Container[int] = ()) -> list[int]:
    """All descendants of a process, parents before their children, without those in ``but`` and what is below them."""
    found: list[int] = []
    queue = deque([pid])
    while queue:
        below = [child for child in children(queue.popleft()) if child not in but and child not in found]
        found += below
        queue.extend(below)
    return found


def cores() -> list[int]:
    """The cores this process may run on, in order; empty where the system does not say."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


def run_on(chosen: list[int]) -> None:
    """Run on the ``chosen`` cores only, if the system permits."""
    if chosen and hasattr(os, "sched_setaffinity"):
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, chosen)


def kill(pid: int, signum: int = signal.SIGKILL) -> None:
    """Send a signal to a process that may be gone."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signum)


def kill_group(pgid: int) -> None:
    """Kill a process group that may be gone."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pgid, signal.SIGKILL)


def describe_status(status: int) -> str:
    """What a status of ``os.waitpid`` means, in words."""
    return describe_exit(os.waitstatus_to_exitcode(status))


def describe_exit(code: int) -> str:
    """What an exit code means, negative for a signal, in words."""
    if code >= 0:
        return f"exited with code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"was killed by {name}"


def explain(error: OSError) -> str:
    """What a system call failed of, in words, with what can be done about it."""
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return f"{error} (this process may have {resource.getrlimit(resource.RLIMIT_NOFILE)[0]} files open: see `ulimit -n`)"
    return str(error)


def flush_output() -> None:
    """Write out what Python still buffers of this process's output."""
    for stream in (sys.stdout, sys.stderr):
        # Closed by the user's code, or nobody reads any more.
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()

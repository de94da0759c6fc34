"""A few facts of Unix processes that Python's standard library does not wrap."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import signal
import sys
from collections import deque
from collections.abc import Callable, Container
from typing import TypeVar

_T = TypeVar("_T")
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_MOST_FILES = 1 << 16

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


def started(pid: int) -> int | None:
    """When a process began, in ticks since the system did; None if there is none, or no /proc."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # Its name comes second and may hold anything.
            return int(file.read().rpartition(b")")[2].split()[19])
    except (OSError, IndexError, ValueError):
        return None


def mark() -> None:
    """Mark this process, and whatever descends from it from here on, as one to end rather than the one it is a fork of.

    That is what its ``oom_score_adj`` means, which no change of session, program or environment takes away.
    """
    with contextlib.suppress(OSError, ValueError):
        own = mark_of(os.getpid())
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write(str(own + 1))


def mark_of(pid: int) -> int:
    """What :func:`mark` adds one to.

    Raises:
        OSError: there is no such process, or no /proc.
    """
    with open(f"/proc/{pid}/oom_score_adj") as file:
        return int(file.read())


def raise_file_limit() -> bool:
    """Let this process have as many files open as the system permits; False if it may already."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return False
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    except (OSError, ValueError):
        return False
    return True


def with_enough_files(make: Callable[[], _T]) -> _T:
    """What ``make`` returns, called once more with a higher limit where this process may not have that many files open."""
    try:
        return make()
    except OSError as error:
        if error.errno != errno.EMFILE or not raise_file_limit():
            raise
        return make()


def file_limit() -> str:
    """How many files this process may have open, in words that say whose limit that is."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return f"may have {soft} files open, and its hard limit is {hard}: raise it (`ulimit -Hn`), or have fewer copies"


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
    return f"{error} (this process {file_limit()})" if error.errno == errno.EMFILE else str(error)


def flush_output() -> None:
    """Write out what Python still buffers of this process's output."""
    for stream in (sys.stdout, sys.stderr):
        # Closed by the user's code, or nobody reads any more.
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()

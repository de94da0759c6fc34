"""What was there before a fork belongs to the process that was forked: a copy's ``env.close()`` must not destroy it.

A copy holds everything that its base held: the path of its temporary directory, the pid of its server, the name of its shared
memory, its open connections. An environment that closes itself would remove, kill and sign off what every other copy and
every future fork still needs. While a copy closes its environment, calls that would do so are therefore passed over; what the
copy itself made is closed as it would be anywhere.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import shutil
import signal
import socket
import stat
import struct
import sys
import time
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from prized_gym.engines.local.processes import descendants, libc, started

_AT_FDCWD = -100
_AT_SYMLINK_NOFOLLOW = 0x100
_STATX_BTIME = 0x800
_CLOCK_REALTIME_COARSE = 5

Pipe = tuple[int, int]
"""A descriptor of a pipe or socket, and its inode."""


def let_clock_tick() -> None:
    """Return when a file that is made is seen to be younger than all there are: after a few milliseconds at most."""
    before = _file_clock()
    while _file_clock() == before:
        time.sleep(0.0005)


def open_pipes(but: Iterable[int]) -> list[Pipe]:
    """List the pipes and sockets open in this process, apart from standard streams and the descriptors in ``but``."""
    skip = {0, 1, 2, *but}
    found: list[Pipe] = []
    with contextlib.suppress(OSError):
        for name in os.listdir("/proc/self/fd"):
            if int(name) not in skip:
                with contextlib.suppress(OSError):
                    status = os.fstat(int(name))
                    if stat.S_ISSOCK(status.st_mode) or stat.S_ISFIFO(status.st_mode):
                        found.append((int(name), status.st_ino))
    return found


class Ownership:
    """What a new fork has not made itself.

    Made in the fork, as soon as it is one.

    Args:
        pipes: what :func:`open_pipes` found in the process that was forked.
        in_doubt: whether a file as old as this fork, to the tick of the clock, was there before: so it is unless
            :func:`let_clock_tick` came before.
    """

    def __init__(self, pipes: Iterable[Pipe], in_doubt: bool) -> None:
        self._since = _file_clock() + in_doubt
        self._started = started(os.getpid())
        self._pipes = list(pipes)
        # Objects of the process before may be collected here: that must not clean up after them.
        for finalizer in list(getattr(weakref.finalize, "_registry", ())):
            finalizer.detach()

    def inherited_file(self, path: Any, dir_fd: int | None = None) -> bool:
        """Whether a file or directory was there before this fork."""
        try:
            status = os.stat(path, dir_fd=dir_fd, follow_symlinks=False)
        except (OSError, TypeError, ValueError):
            return False
        made = _birth(path, dir_fd)
        return (status.st_ctime_ns if made is None else made) < self._since

    def inherited_process(self, pid: int) -> bool:
        """Whether a process was there before this fork, and is not this one."""
        began = started(pid)
        if pid == os.getpid() or began is None or self._started is None or began > self._started:
            return False
        return began < self._started or pid not in descendants(os.getpid())

    def inherited_group(self, group: int) -> bool:
        """Whether any process of a group was there before this fork, apart from this one."""
        return any(self.inherited_process(pid) for pid in _members(group))

    def protect(self) -> None:
        """From here on leave alone, in this process, what was there before it: for a process that is about to end."""
        self._cut_off()
        _Guard(self).install()

    def _cut_off(self) -> None:
        """Put something that nobody listens to in the place of inherited connections."""
        ours, theirs = socket.socketpair()
        theirs.shutdown(socket.SHUT_WR)
        ours.setblocking(False)
        # Kept open: without it a write would fail.
        theirs.detach()
        null = os.open(os.devnull, os.O_RDWR)
        for fd, inode in self._pipes:
            with contextlib.suppress(OSError):
                status = os.fstat(fd)
                if status.st_ino == inode and fd != _tracker_fd():
                    os.dup2(ours.fileno() if stat.S_ISSOCK(status.st_mode) else null, fd)


class _Guard:
    """Passes over calls that would destroy what is not this process's own."""

    def __init__(self, owner: Ownership) -> None:
        self._owner = owner

    def install(self) -> None:
        owner = self._owner
        for name in ("unlink", "remove", "rmdir"):
            self._replace(os, name, lambda path, *, dir_fd=None: owner.inherited_file(path, dir_fd))
        for name in ("rename", "replace"):
            self._replace(os, name, lambda source, *_, src_dir_fd=None, **__: owner.inherited_file(source, src_dir_fd))
        self._replace(shutil, "rmtree", lambda path, *_, dir_fd=None, **__: owner.inherited_file(path, dir_fd))
        self._replace(os, "kill", self._spares)
        self._replace(os, "killpg", lambda group, sent: sent != 0 and owner.inherited_group(group))
        if hasattr(signal, "pidfd_send_signal"):
            self._replace(signal, "pidfd_send_signal", lambda fd, *_: owner.inherited_process(_pid_of(fd)))
        self._guard_multiprocessing()
        # For those who hold the functions themselves.
        sys.addaudithook(self._audit)

    def _replace(self, holder: Any, name: str, spares: Callable[..., bool], instead: Any = None) -> None:
        plain = getattr(holder, name)

        def guarded(*args: Any, **kwargs: Any) -> Any:
            return instead if spares(*args, **kwargs) else plain(*args, **kwargs)

        # Such as rmtree.avoids_symlink_attacks.
        guarded.__dict__.update(getattr(plain, "__dict__", {}))
        for functions in (os.supports_dir_fd, os.supports_fd, os.supports_follow_symlinks):
            if plain in functions:
                functions.add(guarded)
        setattr(holder, name, guarded)

    def _spares(self, pid: int, sent: int) -> bool:
        if sent == 0:
            return False
        if pid > 0:
            return self._owner.inherited_process(pid)
        return pid == -1 or (pid < -1 and self._owner.inherited_group(-pid))

    def _guard_multiprocessing(self) -> None:
        processes: Any = sys.modules.get("multiprocessing.process")
        if processes is not None:
            # A process that another one started: multiprocessing refuses to say anything of it.
            def foreign(process: Any, *_: Any, **__: Any) -> bool:
                return bool(process._parent_pid != os.getpid())

            for name, instead in (("join", None), ("close", None), ("is_alive", False)):
                self._replace(processes.BaseProcess, name, foreign, instead)
        memory: Any = sys.modules.get("multiprocessing.shared_memory")
        if memory is not None:

            def inherited(segment: Any) -> bool:
                return self._owner.inherited_file("/dev/shm/" + segment._name.lstrip("/"))

            self._replace(memory.SharedMemory, "unlink", inherited)

    def _audit(self, event: str, args: tuple[Any, ...]) -> None:
        owner = self._owner
        if event in ("os.remove", "os.rmdir"):
            refused = owner.inherited_file(args[0], _dir_fd(args[1]))
        elif event == "os.rename":
            refused = owner.inherited_file(args[0], _dir_fd(args[2]))
        elif event == "os.kill":
            refused = self._spares(args[0], args[1])
        elif event == "os.killpg":
            refused = args[1] != 0 and owner.inherited_group(args[0])
        else:
            return
        if refused:
            raise PermissionError(
                errno.EPERM, f"{args[0]!r} was there before this copy was forked: it belongs to its base"
            )


def _dir_fd(fd: int) -> int | None:
    return None if fd == -1 else fd


def _file_clock() -> int:
    """The time, in nanoseconds since the epoch, that a file made at this moment would have."""
    return time.clock_gettime_ns(_CLOCK_REALTIME_COARSE)


def _birth(path: Any, dir_fd: int | None) -> int | None:
    """When a file was made, in nanoseconds since the epoch; None where that cannot be told."""
    statx = getattr(libc(), "statx", None)
    if statx is None or not isinstance(path, (str, bytes, os.PathLike)):
        return None
    buffer = ctypes.create_string_buffer(256)
    at = _AT_FDCWD if dir_fd is None else dir_fd
    if statx(at, os.fsencode(path), _AT_SYMLINK_NOFOLLOW, _STATX_BTIME, buffer) != 0:
        return None
    mask, seconds, nanoseconds = struct.unpack_from("I76xqI", buffer)
    return int(seconds * 10**9 + nanoseconds) if mask & _STATX_BTIME else None


def _members(group: int) -> list[int]:
    if group == 0:
        group = os.getpgrp()
    found: list[int] = []
    with contextlib.suppress(OSError):
        for name in os.listdir("/proc"):
            if name.isdigit():
                with contextlib.suppress(OSError):
                    if os.getpgid(int(name)) == group:
                        found.append(int(name))
    return found


def _pid_of(pidfd: int) -> int:
    with contextlib.suppress(OSError, ValueError):
        for line in Path(f"/proc/self/fdinfo/{pidfd}").read_text().splitlines():
            if line.startswith("Pid:"):
                return int(line.split()[1])
    return -1


def _tracker_fd() -> int | None:
    """The pipe to the process in which multiprocessing counts shared memory: what a copy made is to be counted off."""
    tracker: Any = getattr(sys.modules.get("multiprocessing.resource_tracker"), "_resource_tracker", None)
    return getattr(tracker, "_fd", None)

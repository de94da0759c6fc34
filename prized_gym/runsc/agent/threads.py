"""Threads of the agent: an error ends none of the others, and one can become the user."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable

from .inside import UID

_libc = ctypes.CDLL(None, use_errno=True)


def start(target: Callable[[], None], begin: bool = True) -> threading.Thread:
    """Make a daemon thread that swallows every error of its target.

    Args:
        target: what it runs.
        begin: whether it is started at once.
    """

    def run() -> None:
        try:
            target()
        except BaseException:
            pass

    thread = threading.Thread(target=run, daemon=True)
    if begin:
        thread.start()
    return thread


def become_user() -> None:
    """Give this thread, and nothing else of the process, the user's identity: what it opens and starts has the user's rights.

    The C library's functions change every thread, so these are the bare system calls. A child with another user than
    its parent's would have to be made by fork, which costs 30 ms in gVisor; with the right one it is made by vfork.
    """
    numbers = {"x86_64": (116, 119, 117), "aarch64": (159, 149, 147)}[os.uname().machine]
    setgroups, setresgid, setresuid = (ctypes.c_long(number) for number in numbers)
    identity = [ctypes.c_long(UID)] * 3
    none = ctypes.c_long(0)
    if (
        _libc.syscall(setgroups, none, none)
        or _libc.syscall(setresgid, *identity)
        or _libc.syscall(setresuid, *identity)
    ):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))

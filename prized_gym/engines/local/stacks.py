"""The Python stack of a copy that hangs: its fault handler writes it to a file that the trainer reads."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import time

from prized_gym.engines.local import processes

STACK_SIGNAL = getattr(signal, "SIGRTMIN", signal.SIGUSR1) + 9
"""Asks a copy for its stack; handled in C, so that a copy stuck in C answers too."""

_FILE = "prized_gym-stack"


def watch_stack(previous: int) -> int:
    """Have this process answer ``STACK_SIGNAL``.

    Args:
        previous: what this gave in the process this one is a fork of; -1 if nothing.

    Returns:
        The descriptor of the file the stack is written to; -1 where there can be none.
    """
    if previous >= 0:
        os.close(previous)
    if not hasattr(os, "memfd_create"):
        return -1
    fd = os.memfd_create(_FILE, os.MFD_CLOEXEC)
    faulthandler.register(STACK_SIGNAL, file=fd, all_threads=True)
    return fd


def read_stack(pid: int) -> str:
    """The Python stack of the process ``pid``, which has called :func:`watch_stack`; empty if it cannot be had."""
    state = _state_of(pid)
    if state.startswith(("T", "t")):
        return f"(the process is stopped: state {state})"
    folder = f"/proc/{pid}/fd"
    try:
        path = next(
            os.path.join(folder, name)
            for name in os.listdir(folder)
            if _FILE in os.readlink(os.path.join(folder, name))
        )
    except (OSError, StopIteration):
        return ""
    processes.kill(pid, STACK_SIGNAL)
    text, deadline = "", time.monotonic() + 1.0
    while time.monotonic() < deadline:
        time.sleep(0.02)
        try:
            with open(path) as file:
                longer = file.read()
        except OSError:
            break
        if longer and longer == text:
            break
        text = longer
    return text


def _state_of(pid: int) -> str:
    with contextlib.suppress(OSError), open(f"/proc/{pid}/status") as file:
        for line in file:
            if line.startswith("State:"):
                return line.split(":", 1)[1].strip()
    return ""

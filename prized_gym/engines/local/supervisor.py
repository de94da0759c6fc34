"""The process above a base process: whatever happens to the trainer, nothing below it is left running.

Run as a script in a fresh interpreter, with two descriptors as arguments: a *lifeline*, whose other end the trainer
holds and never writes to, and the base's control socket; a third, optional argument is a scratch directory. It forks the
base before anything large is imported, adopts every orphan below it, and when the base ends or the lifeline closes it
kills all its descendants, removes the scratch directory and ends too. The base may be inside the user's code, deaf to
everything; this process never is.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import os
import select
import signal
import socket
import sys
import traceback
from types import ModuleType


def main(lifeline: int, control: int, scratch: str | None = None) -> int:
    """Fork the base, wait for its end or the trainer's, and end everything that is left below.

    Args:
        lifeline: a file descriptor that can be read once the trainer is gone.
        control: the base's end of its connection to the trainer.
        scratch: a directory to remove at the end, if any.

    Returns:
        The base's exit status; 0 where the trainer ended first. Where a signal ended the base, it ends this process too.
    """
    processes = _neighbour("processes")
    processes.adopt_orphans()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    supervisor = os.getpid()
    base = os.fork()
    if base == 0:
        processes.die_with_parent(supervisor)
        os.close(lifeline)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os._exit(_run_base(control))
    os.close(control)
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    status = _watch(lifeline, base)
    _kill_all(processes)
    if scratch is not None:
        import shutil

        shutil.rmtree(scratch, ignore_errors=True)
    if status is None:
        return 0
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        # End as the base did, so that the trainer sees the same signal; without a second core file.
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.signal(-code, signal.SIG_DFL) if -code not in (signal.SIGKILL, signal.SIGSTOP) else None
        os.kill(os.getpid(), -code)
    return code


def _neighbour(name: str) -> ModuleType:
    """A module beside this one, by its name alone: the package imports NumPy and Gymnasium."""
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    try:
        importlib.import_module(name)
        # The user may have one of that name.
        return sys.modules.pop(name)
    finally:
        sys.path.pop(0)


def _run_base(control: int) -> int:
    """Be the base; the exit code."""
    code = 0
    try:
        sock = socket.socket(fileno=control)
        context = _neighbour("bootstrap").begin(sock)
        if context is not None:
            from prized_gym.engines.local import base_process

            base_process.main(sock, context)
    except BaseException:
        traceback.print_exc()
        code = 1
    # What the user's set-up has registered. Copies, which are forks, do not come here.
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    return code


def _watch(lifeline: int, base: int) -> int | None:
    """Wait for the end of the base (its status) or of the trainer (None), reaping orphans meanwhile."""
    read, write = os.pipe()
    os.set_blocking(write, False)
    os.set_blocking(read, False)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
    signal.signal(signal.SIGCHLD, lambda *_: None)
    poller = select.poll()
    poller.register(lifeline, select.POLLIN)
    poller.register(read, select.POLLIN)
    while True:
        status = _reap(base)
        if status is not None:
            return status
        for fd, _ in poller.poll():
            if fd == lifeline:
                return None
            try:
                os.read(read, 4096)
            except BlockingIOError:
                pass


def _reap(base: int) -> int | None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return None
        if pid == 0:
            return None
        if pid == base:
            return status


def _kill_all(processes: ModuleType) -> None:
    if sys.platform != "linux":
        # No /proc to find descendants by: the session this process leads is the best there is.
        os.killpg(os.getpgid(0), signal.SIGKILL)
    me = os.getpid()
    while True:
        for pid in processes.descendants(me):
            processes.kill(pid)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:4]))

"""The children of PID 1: started for a request, and collected at their end."""

from __future__ import annotations

import errno
import os
import subprocess
import threading
import time
from typing import Any

from .inside import HOME
from .jobs import Child, Job


class Processes:
    """Every process that PID 1 started or inherited.

    Attributes:
        lock: guards what follows, and a spawn against the reaper.
        spawned: notified after a spawn.
        children: the processes whose end somebody waits for, by pid.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.spawned = threading.Condition(self.lock)
        self.children: dict[int, Child] = {}

    def reap(self) -> None:
        """Collect every child that ends, for ever: commands, and orphans that became ours."""
        while True:
            try:
                found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
                with self.lock:
                    if found is None:
                        continue
                    pid, status = os.waitpid(found.si_pid, os.WNOHANG)
                    child = self.children.pop(pid, None)
                    if child is not None:
                        child.ended(os.waitstatus_to_exitcode(status))
            except ChildProcessError:
                with self.spawned:
                    self.spawned.wait(5)
            except Exception:
                time.sleep(0.02)

    def spawn(self, request: dict[str, Any]) -> tuple[subprocess.Popen[bytes], Job | None]:
        """Start the command a request names, as this thread's user, in a session of its own."""
        background = bool(request["background"])
        where = subprocess.DEVNULL if background else subprocess.PIPE
        environment = {str(key): str(value) for key, value in request["env"].items()}
        timeout = request["timeout"]
        cwd = os.path.join(HOME, request["cwd"])
        if not os.path.isdir(cwd):  # checked here: Popen's own message blames the command
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), cwd)
        with self.spawned:
            process = subprocess.Popen(
                [str(word) for word in request["argv"]],
                stdin=where,
                stdout=where,
                stderr=where,
                env=environment,
                cwd=cwd,
                start_new_session=True,
                close_fds=False,  # Python opens them all to close on exec; looking for others takes long in here
            )
            job = None
            if not background:
                job = Job(process, None if timeout is None else time.monotonic() + timeout)
                self.children[process.pid] = job
            process.returncode = 0  # the reaper waits for it; Popen never does
            self.spawned.notify()
        return process, job

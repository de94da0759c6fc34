"""Requests about commands: run one, and come back for one after a checkpoint."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Container
from typing import Any

from .frames import describe, send_json
from .jobs import Job
from .processes import Processes
from .threads import start


class Commands:
    """The commands in the foreground, by the number the host gave them.

    Args:
        processes: what starts them.
        quiet: whether all connections to the host are to close, for a checkpoint.
    """

    def __init__(self, processes: Processes, quiet: Callable[[], bool]) -> None:
        self._processes = processes
        self._quiet = quiet
        self._lock = threading.Lock()
        self._jobs: dict[str, Job] = {}

    def execute(self, connection: socket.socket, request: dict[str, Any]) -> None:
        """Serve a request to run a command."""
        try:
            process, job = self._processes.spawn(request)
        except Exception as error:
            send_json(connection, describe(error))
            return
        send_json(connection, {"pid": process.pid})
        if job is not None:
            number = str(request["job"])
            with self._lock:
                self._jobs[number] = job
            self.follow(connection, number)

    def follow(self, connection: socket.socket, number: str) -> None:
        """Carry input and output of the command of that number; kill it when its caller goes away."""
        with self._lock:
            job = self._jobs.get(number)
        if job is None:
            send_json(connection, {"error": "LookupError", "errno": None, "message": f"no command {number}"})
            return
        try:
            if not job.follow(connection, self._quiet):
                return  # the host comes back for it
        except Exception:  # the caller has gone, so the command goes too
            job.kill()
        with self._lock:
            self._jobs.pop(number, None)
        start(job.drain)

    def let_go(self) -> None:
        """Have every follower look whether its connection is to close."""
        with self._lock:
            for job in self._jobs.values():
                os.eventfd_write(job.wake, 1)

    def forget_others(self, followed: Container[str]) -> None:
        """Leave the commands that the host does not follow to themselves.

        A restored copy has a host of its own, which follows nothing.

        Args:
            followed: the numbers of those that it follows.
        """
        with self._lock:
            orphans = [self._jobs.pop(number) for number in list(self._jobs) if number not in followed]
        for job in orphans:
            start(job.drain)

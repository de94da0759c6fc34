"""One command in the foreground: its pipes, its exit status, and what its caller sent."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import time
from collections.abc import Callable

from .frames import CHUNK, BadFrame, receive, send, send_json
from .threads import start


class Child:
    """A child process whose end somebody waits for.

    Attributes:
        wake: an eventfd that becomes readable at its end.
        status: its exit status, 128 + N when signal N ended it; None until then.
    """

    def __init__(self) -> None:
        self.wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.status: int | None = None

    def ended(self, code: int) -> None:
        """Record its end, with the exit code or the negative number of the signal."""
        self.status = code if code >= 0 else 128 - code
        os.eventfd_write(self.wake, 1)

    def join(self) -> None:
        """Wait for its end. Called once."""
        while self.status is None:
            select.select([self.wake], [], [])
        os.close(self.wake)


class Job(Child):
    """A command in the foreground: its pipes, its exit status, and what its caller sent.

    Args:
        process: of the command.
        deadline: the ``time.monotonic()`` at which it is killed; None for never.
    """

    def __init__(self, process: subprocess.Popen[bytes], deadline: float | None) -> None:
        super().__init__()
        self.process = process
        self.deadline = deadline
        self.timed_out = False
        self.stdin_received = 0
        self.stdin_pending = bytearray()
        self.stdin_ended = False
        self.outputs: dict[int, bytes] = {}
        for pipe, kind in ((process.stdout, b"O"), (process.stderr, b"R")):
            assert pipe is not None
            os.set_blocking(pipe.fileno(), False)
            self.outputs[pipe.fileno()] = kind
        assert process.stdin is not None
        os.set_blocking(process.stdin.fileno(), False)

    def kill(self) -> None:
        """Kill the command's process group, again and again until nobody is left who forked meanwhile."""

        def again() -> None:
            ends, pause = time.monotonic() + 10.0, 0.002
            while time.monotonic() < ends:
                time.sleep(pause)
                os.killpg(self.process.pid, signal.SIGKILL)  # its end is the error that says that there is none
                pause = min(0.1, pause * 2)

        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except OSError:
            return
        start(again)

    def follow(self, connection: socket.socket, detaching: Callable[[], bool]) -> bool:
        """Carry input and output until the command has ended or the connection is to close.

        Args:
            connection: to the host, the command's alone.
            detaching: whether the connection is to close, for a checkpoint.

        Returns:
            Whether the command has ended.
        """
        assert self.process.stdin is not None
        stdin = self.process.stdin
        while True:
            if self.status is not None and not self._pump_outputs(connection):
                send_json(connection, {"exit": self.status, "timed_out": self.timed_out})
                return True
            if detaching():
                send(connection, b"D", json.dumps({"stdin": self.stdin_received}).encode())
                return False
            poll = select.poll()
            poll.register(self.wake, select.POLLIN)
            if len(self.stdin_pending) < CHUNK:
                poll.register(connection, select.POLLIN)
            for output in self.outputs:
                poll.register(output, select.POLLIN)
            if not stdin.closed and self.stdin_pending:
                poll.register(stdin.fileno(), select.POLLOUT)
            wait = None if self.deadline is None else max(0.0, self.deadline - time.monotonic()) * 1000 + 1
            for fd, event in poll.poll(wait):
                if fd == self.wake:
                    os.eventfd_read(self.wake)
                elif fd == connection.fileno():
                    self._receive_input(connection)
                elif not stdin.closed and fd == stdin.fileno() and event:
                    self._feed()
            self._pump_outputs(connection)
            if self.deadline is not None and time.monotonic() >= self.deadline:
                self.deadline, self.timed_out = None, True
                self.kill()

    def _receive_input(self, connection: socket.socket) -> None:
        kind, payload = receive(connection)  # EOFError here means that the caller has gone
        if kind == b"B":
            self.stdin_received += len(payload)
            self.stdin_pending += payload
        elif kind == b"Z":
            self.stdin_ended = True
        else:
            raise BadFrame(f"a command's input is no frame of kind {kind!r}")
        self._feed()

    def _feed(self) -> None:
        stdin = self.process.stdin
        assert stdin is not None
        if stdin.closed:
            self.stdin_pending.clear()
            return
        try:
            while self.stdin_pending:
                del self.stdin_pending[: os.write(stdin.fileno(), self.stdin_pending[:CHUNK])]
        except BlockingIOError:
            return
        except OSError:  # the command closed its input
            self.stdin_pending.clear()
            self.stdin_ended = True
        if self.stdin_ended:
            stdin.close()

    def _pump_outputs(self, connection: socket.socket) -> bool:
        """Send what the command wrote; return whether there was anything."""
        any_output = False
        for fd, kind in list(self.outputs.items()):
            try:
                data = os.read(fd, CHUNK)
            except BlockingIOError:
                continue
            if data:
                send(connection, kind, data)
                any_output = True
            else:
                del self.outputs[fd]
        return any_output

    def drain(self) -> None:
        """Discard what is still written, so that whoever inherited the pipes does not block or die of SIGPIPE."""
        while self.outputs:
            poll = select.poll()
            for fd in self.outputs:
                poll.register(fd, select.POLLIN)
            for fd, _ in poll.poll():
                try:
                    if not os.read(fd, CHUNK):
                        del self.outputs[fd]
                except BlockingIOError:
                    pass
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            assert pipe is not None
            try:
                pipe.close()
            except OSError:
                pass
        self.join()

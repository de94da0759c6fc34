"""A plain client of the env server, and the server as a process that never outlives the tests."""

from __future__ import annotations

import contextlib
import ctypes
import http.client
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

from prized_gym.protocols import GymProtocol, Protocol, Request, Response, drive

ROOT = Path(__file__).parents[2]
TESTS = ROOT / "tests"


class Client:
    """One connection; `ask` runs one operation of the protocol over it."""

    def __init__(self, port: int, protocol: Protocol | None = None, timeout: float = 30) -> None:
        self.connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout)
        self.protocol = protocol or GymProtocol()

    def send(self, request: Request) -> Response:
        self.connection.request(request.method, request.path, request.body or None, dict(request.headers))
        answer = self.connection.getresponse()
        body = answer.read(self.protocol.max_answer_bytes + 1)
        headers = {name.lower(): value for name, value in answer.getheaders()}
        return Response(answer.status, headers, body, f"http://127.0.0.1:{self.connection.port}{request.path}")

    def ask(self, name: str, *args, **kwargs):
        return drive(getattr(self.protocol, name)(*args, **kwargs), self.send)

    def close(self) -> None:
        self.connection.close()


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


class Server:
    """`python -m prized_gym.server` with these arguments, from when it is ready."""

    def __init__(self, *args: str, wait: bool = True, env: dict[str, str] | None = None, port: int = 0) -> None:
        path = os.pathsep.join([str(ROOT), str(TESTS)])
        self.process = subprocess.Popen(
            [sys.executable, "-W", "error", "-m", "prized_gym.server", "--port", str(port), *args],
            env={**os.environ, "PYTHONPATH": path, **(env or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=_die_with_parent,
        )
        self.port = port
        self.clients: list[Client] = []
        self.stderr = ""
        self.drain: threading.Thread | None = None
        if wait:
            self.await_ready()

    def await_ready(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.stderr += line
            ready = re.search(r"ready on http://[^ ]*:(\d+) ", line)
            if ready:
                self.port = int(ready[1])
                return
        raise AssertionError(f"the server ended with {self.process.wait()}: {self.stderr}")

    def client(self, described: bool = True, **kwargs) -> Client:
        client = Client(self.port, **kwargs)
        self.clients.append(client)
        if described:
            client.ask("describe")
        return client

    def connect(self) -> socket.socket:
        sock = socket.create_connection(("127.0.0.1", self.port), timeout=30)
        self.clients.append(sock)  # type: ignore[arg-type]
        return sock

    def end(self) -> tuple[int, str, str]:
        """The exit code, stdout and stderr once it has ended by itself."""
        out, err = self.process.communicate(timeout=60)
        return self.process.returncode, out, self.stderr + err

    def close(self) -> None:
        for client in self.clients:
            client.close()
        self.process.kill()
        with contextlib.suppress(ValueError):  # communicate has closed them
            self.process.communicate()


@contextlib.contextmanager
def server(*args: str, **kwargs) -> Iterator[Server]:
    """A server that is killed at the end."""
    running = Server(*args, **kwargs)
    try:
        yield running
    finally:
        running.close()


@contextlib.contextmanager
def free_port() -> Iterator[int]:
    """A port that nobody else is given meanwhile; a server may listen on it."""
    with socket.socket() as reserved:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind(("127.0.0.1", 0))
        yield reserved.getsockname()[1]

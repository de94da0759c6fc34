"""A provider for tests: a sandbox is a directory and some processes of this machine, its forks fresh starts of the same.

Real servers and real sockets, but no isolation and no memory carried over: what it shows is the fleet, not the fork.
"""

from __future__ import annotations

import itertools
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, ClassVar

from prized_gym.errors import SandboxDiedError, SandboxError
from prized_gym.sandbox.driver import Dialed, Driver, ExecResult, FileInfo, Sandbox, Shape
from prized_gym.sandbox.engine import SandboxEngine

_numbers = itertools.count(1)
ALIVE: set[PlainSandbox] = set()
FORKS: list[int] = []
"""How many forks each call of `fork` was asked for."""


class PlainDriver(Driver):
    """Makes sandboxes; what a variant cannot do, or does differently, is in a subclass."""

    def __init__(self) -> None:
        self.account = f"account {next(_numbers)}"

    def request(self) -> AbstractContextManager[None]:
        """Entered around each request that a real provider would be sent."""
        return nullcontext()

    def make(self, labels: Mapping[str, str], env: Mapping[str, str], port: int) -> PlainSandbox:
        """Make a sandbox, new or a fork."""
        return PlainSandbox(self, dict(labels), dict(env), port)

    def create(self, shape: Shape, timeout: float) -> Sandbox:
        with self.request():
            return self.make(shape.labels, shape.env_vars, shape.port)

    def connect(self, id: str) -> Sandbox:
        raise SandboxError(f"no sandbox {id} is kept")


class PlainEngine(SandboxEngine):
    """Sandboxes of one provider for all bases: ``provider``."""

    name: ClassVar[str] = "plain"
    provider: ClassVar[PlainDriver] = PlainDriver()

    @classmethod
    def check(cls) -> None:
        """Always available."""

    @classmethod
    def driver(cls, options: Mapping[str, Any]) -> Driver:
        return cls.provider


def engine_of(provider: PlainDriver) -> type[PlainEngine]:
    """An engine whose bases are sandboxes of ``provider``."""

    class Engine(PlainEngine):
        name: ClassVar[str] = type(provider).__name__

    Engine.provider = provider
    return Engine


class PlainFiles:
    def __init__(self, sandbox: PlainSandbox) -> None:
        self.root = sandbox.root
        self.request = sandbox.driver.request

    def upload(self, local: Any, remote: str | None = None) -> None:
        with self.request():
            shutil.copy(local, self.root / (remote or Path(local).name))

    def download(self, remote: str, local: Any = None) -> None:
        with self.request():
            shutil.copy(self.root / remote, local or Path(remote).name)

    def read(self, remote: str, *, max_bytes: int = 64 << 20) -> bytes:
        with self.request():
            data = (self.root / remote).read_bytes()
        if len(data) > max_bytes:
            raise SandboxError("too long")
        return data

    def write(self, remote: str, data: bytes | str) -> None:
        with self.request():
            path = self.root / remote
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data if isinstance(data, bytes) else data.encode())

    def list(self, remote: str = ".") -> list[FileInfo]:
        with self.request():
            return [FileInfo(path.name, "file", 0, 0.0) for path in sorted((self.root / remote).iterdir())]

    def remove(self, remote: str) -> None:
        with self.request():
            (self.root / remote).unlink()


class PlainSandbox(Sandbox):
    def __init__(self, driver: PlainDriver, labels: dict[str, str], env: dict[str, str], port: int) -> None:
        self.driver = driver
        self.id = f"plain_{next(_numbers)}"
        self.root = Path(tempfile.mkdtemp(prefix="pg-plain-"))
        self.scratch = str(self.root / "scratch")
        self.files = PlainFiles(self)
        self.labels = labels
        self.env = env
        self.port = port
        # Bound until the end, so that nobody else is given the port; a server may still listen on it.
        self._reserved = socket.socket()
        self._reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._reserved.bind(("127.0.0.1", 0))
        self.own_port = self._reserved.getsockname()[1]
        self.started: list[str] = []
        self.processes: list[subprocess.Popen[bytes]] = []
        self.connections = 0
        self._death: str | None = None
        self._lock = threading.Lock()
        ALIVE.add(self)

    def _own(self, cmd: str) -> str:
        return cmd.replace(f"--port {self.port}", f"--port {self.own_port}")

    def environment(self) -> dict[str, str]:
        """The variables that its commands have beside their own."""
        return {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}

    def exec(
        self,
        cmd: str | Sequence[str],
        *,
        timeout: float | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        background: bool = False,
        on_output: Callable[[str, bytes], None] | None = None,
        max_output: int = 4 << 20,
    ) -> ExecResult:
        with self.driver.request():
            return self.run(cmd, timeout, env, background, on_output)

    def run(
        self,
        cmd: str | Sequence[str],
        timeout: float | None = None,
        env: Mapping[str, str] | None = None,
        background: bool = False,
        on_output: Callable[[str, bytes], None] | None = None,
    ) -> ExecResult:
        """Run a command, as :meth:`exec` does once its request has come."""
        if self.death is not None:
            raise SandboxDiedError(f"{self.id} ended: {self.death}")
        # the exec proxy takes its port as a word of its own.
        text = cmd if isinstance(cmd, str) else shlex.join(cmd)
        text = self._own(text).replace(f" {self.port} 2 ", f" {self.own_port} 2 ")
        process = subprocess.Popen(
            ["/bin/sh", "-c", text],
            cwd=self.root,
            env={**self.environment(), **self.env, **(env or {})},
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL if background else subprocess.PIPE,
            stderr=subprocess.DEVNULL if background else subprocess.PIPE,
        )
        self.processes.append(process)
        if background:
            self.started.append(text)
            return ExecResult(0, "", "")
        try:
            out, err = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            out, err = process.communicate()
            self.processes.remove(process)
            return ExecResult(137, out.decode(), err.decode(), timed_out=True)
        if on_output is not None:
            on_output("stdout", out)
            on_output("stderr", err)
        self.processes.remove(process)
        code = process.returncode
        return ExecResult(code if code >= 0 else 128 - code, out.decode(errors="replace"), err.decode(errors="replace"))

    def connect(self, port: int, timeout: float = 10.0) -> Dialed:
        self.connections += 1
        return Dialed(socket.create_connection(("127.0.0.1", self.own_port), timeout))

    def fork(
        self, n: int, *, labels: Mapping[str, str] | None = None, network: str | None = None, timeout: float = 120.0
    ) -> list[PlainSandbox]:
        with self.driver.request():
            if self.death is not None:
                raise SandboxDiedError(f"{self.id} ended: {self.death}")
            FORKS.append(n)
            return self.copies(n, self.labels if labels is None else labels)

    def copies(self, n: int, labels: Mapping[str, str]) -> list[PlainSandbox]:
        """Make copies of its directory, and start in each what was started here."""
        made: list[PlainSandbox] = []
        for _ in range(n):
            copy = self.driver.make(labels, self.env, self.port)
            shutil.copytree(
                self.root, copy.root, dirs_exist_ok=True, ignore=lambda _, names: [n for n in names if n == "exec"]
            )
            for text in self.started:
                own = text.replace(str(self.root), str(copy.root)).replace(str(self.own_port), str(copy.own_port))
                copy.run(own, background=True)
            made.append(copy)
        if any("exec_proxy.py" in text for text in self.started):
            for copy in made:
                while not (copy.root / "scratch/exec/ready").exists():
                    time.sleep(0.01)
        return made

    def pause(self) -> None:
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: int) -> None:
        for process in list(self.processes):
            try:
                os.killpg(process.pid, number)
            except ProcessLookupError:
                pass

    def kill(self, reason: str) -> None:
        """End it as its provider would."""
        self._death = self._death or reason
        self._signal(signal.SIGKILL)

    @property
    def death(self) -> str | None:
        return self._death

    def wait_dead(self, timeout: float) -> str | None:
        ends = time.monotonic() + timeout
        while self._death is None and time.monotonic() < ends:
            time.sleep(0.01)
        return self._death

    def close(self) -> None:
        with self._lock:
            self.kill("closed")
            for process in list(self.processes):
                process.wait()
            self._reserved.close()
            shutil.rmtree(self.root, ignore_errors=True)
            ALIVE.discard(self)

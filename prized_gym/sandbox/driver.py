"""What a provider of sandboxes must be able to do: the interface between the sandbox engines and a provider's own SDK."""

from __future__ import annotations

import contextlib
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

from prized_gym.errors import SandboxError
from prized_gym.interface.fleet import Usage
from prized_gym.sandbox.channels.http import Dialed

OUTPUT_KEPT = 4 << 20


@dataclass(frozen=True)
class Shape:
    """What a sandbox is made with; None leaves it to the provider.

    Attributes:
        vcpu: CPUs.
        memory_gb, disk_gb: in GiB.
        max_runtime_min: minutes after which the provider ends it by itself.
        env_vars: for every command in it.
        labels: strings by which it is found again.
        network: ``"none"``, or ``"outbound"``: it can connect out.
    """

    vcpu: float | None = None
    memory_gb: float | None = None
    disk_gb: float | None = None
    max_runtime_min: float | None = None
    env_vars: Mapping[str, str] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    network: str = "none"


@dataclass(frozen=True)
class ExecResult:
    """How a command ended.

    Attributes:
        exit_code: 128 + N where signal N ended it; 0 for one started in the background.
        stdout, stderr: what it wrote, as text; where it is long, the end of it.
        timed_out: whether it was ended because it took longer than its ``timeout``.
    """

    exit_code: int
    stdout: str
    stderr: str
    timed_out: bool = False

    def check(self) -> ExecResult:
        """This result, if the command succeeded.

        Raises:
            SandboxError: it did not; the message has the exit code and the end of what it wrote.
        """
        if self.timed_out or self.exit_code != 0:
            how = "was ended at its time-out" if self.timed_out else f"exited with code {self.exit_code}"
            output = "\n".join(text.strip() for text in (self.stdout, self.stderr) if text.strip())
            raise SandboxError(f"the command {how}" + (f"\n--- end of its output:\n{output[-2000:]}" if output else ""))
        return self


@dataclass(frozen=True)
class FileInfo:
    """One entry of a directory in a sandbox.

    Attributes:
        name: without the directory.
        kind: ``"file"``, ``"dir"``, ``"link"`` or ``"other"``.
        size: bytes.
        modified: seconds since the epoch.
    """

    name: str
    kind: str
    size: int
    modified: float


class Files(Protocol):
    """Files of a sandbox; a relative remote path is relative to the home of its user.

    The OSError that the sandbox met is raised here (FileNotFoundError, PermissionError, …).
    """

    def upload(self, local: str | os.PathLike[str], remote: str | None = None) -> None:
        """Copy a local file, or a directory with all below it, to ``remote``; None: under its own name."""

    def download(self, remote: str, local: str | os.PathLike[str] | None = None) -> None:
        """Copy a remote file or directory to ``local``; None: under its own name into the current directory."""

    def read(self, remote: str, *, max_bytes: int = 64 << 20) -> bytes:
        """The content of a file; SandboxError if it is longer than ``max_bytes``."""

    def write(self, remote: str, data: bytes | str) -> None:
        """Write a file, making the directories above it."""

    def list(self, remote: str = ".") -> Sequence[FileInfo]:
        """The entries of a directory, by name."""

    def remove(self, remote: str) -> None:
        """Remove a file, or a directory with all below it."""


class Sandbox(ABC):
    """One sandbox. Thread-safe; everything but the properties may block.

    Attributes:
        id: the provider's.
        labels: by which it is found again.
        files: its files.
    """

    scratch: ClassVar[str]
    """An absolute path inside, of a directory for the library's own files; need not exist."""

    reachable: ClassVar[bool] = True
    """Whether :meth:`connect` can reach a server inside; if not, requests travel through :meth:`exec`."""

    id: str
    labels: Mapping[str, str]
    files: Files

    @abstractmethod
    def exec(
        self,
        cmd: str | Sequence[str],
        *,
        timeout: float | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        background: bool = False,
        on_output: Callable[[str, bytes], None] | None = None,
        max_output: int = OUTPUT_KEPT,
    ) -> ExecResult:
        """Run a shell command, or a list of words, to its end.

        Args:
            cmd: what to run.
            timeout: seconds until it is ended; None for no limit but the provider's.
            env: variables beyond the sandbox's own.
            cwd: a directory; relative to the home.
            background: start it and return at once.
            on_output: called with ``"stdout"`` or ``"stderr"`` and bytes as they come.
            max_output: bytes of each output that are kept, from its end.

        Raises:
            SandboxDiedError, SandboxTimeoutError, SandboxError: it could not be run to its end.
        """

    @abstractmethod
    def fork(
        self, n: int, *, labels: Mapping[str, str] | None = None, network: str | None = None, timeout: float = 120.0
    ) -> Sequence[Sandbox]:
        """``n`` live copies, or none at all. ``labels`` and ``network`` None are its own.

        Raises:
            SandboxError: it could not be forked; SandboxDiedError: it is gone.
        """

    def prepare(self) -> None:  # noqa: B027
        """Do ahead of time what the next fork would have to wait for. It has no effect that can be seen.

        Raises:
            SandboxError: it could not be done.
        """

    def connect(self, port: int, timeout: float = 10.0) -> Dialed:
        """A connection to a server on 127.0.0.1 inside.

        Raises:
            ConnectionRefusedError: nobody listens there.
            SandboxError: the sandbox is gone or not to be reached.
        """
        raise SandboxError(f"no server in a sandbox of {type(self).__name__} can be reached from outside")

    @property
    def asleep(self) -> bool:
        """Whether :meth:`wake` has something to do that takes time."""
        return False

    def wake(self) -> None:  # noqa: B027
        """Make it ready to be used."""

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        """Keep it from being stopped for idleness while inside. Does not block where it is not ``asleep``."""
        yield

    @abstractmethod
    def pause(self) -> None:
        """Stop all its processes until :meth:`resume`; it can be forked meanwhile."""

    @abstractmethod
    def resume(self) -> None:
        """Let it go on."""

    def keep(self) -> str:
        """Leave it paused under the id returned, for another process; this object is closed.

        Raises:
            SandboxError: the provider cannot.
        """
        raise SandboxError(f"a sandbox of {type(self).__name__} cannot be kept")

    @property
    @abstractmethod
    def death(self) -> str | None:
        """Why it ended, None while it has not, as far as is known."""

    def wait_dead(self, timeout: float) -> str | None:
        """Why it ended; None if it has not within ``timeout`` seconds."""
        return self.death

    def usage(self) -> Usage:
        """What it has used so far."""
        return Usage()

    @abstractmethod
    def close(self) -> None:
        """End it at once; can be called again, never raises."""


class Driver(ABC):
    """Makes sandboxes of one provider."""

    @abstractmethod
    def create(self, shape: Shape, timeout: float) -> Sandbox:
        """Start a sandbox and wait until it can be used.

        Raises:
            EngineUnavailableError: not here; SandboxError: it did not start.
        """

    @abstractmethod
    def connect(self, id: str) -> Sandbox:
        """A live sandbox that continues, or is a copy of, the kept one with that id.

        Raises:
            SandboxError: there is none.
        """

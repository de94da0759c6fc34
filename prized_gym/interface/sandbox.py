"""What a base that is a whole sandbox offers beyond its fleets: commands, files, servers, forks held by the user."""

from __future__ import annotations

import json as json_module
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Protocol, TypeVar

from prized_gym.errors import SandboxError
from prized_gym.interface.failure import Failure
from prized_gym.interface.fleet import Usage

_T = TypeVar("_T")

EXEC_TIMEOUT = 300.0
HTTP_TIMEOUT = 300.0
FORK_TIMEOUT = 120.0
MAX_ANSWER = 64 << 20

KEPT_HOURS = 24.0 * 7
"""How long a kept base lives unless something else is asked for."""


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
        """Return this result, if the command succeeded.

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
        """Read the content of a file; SandboxError if it is longer than ``max_bytes``."""

    def write(self, remote: str, data: bytes | str) -> None:
        """Write a file, making the directories above it."""

    def list(self, remote: str = ".") -> Sequence[FileInfo]:
        """List the entries of a directory, by name."""

    def remove(self, remote: str) -> None:
        """Remove a file, or a directory with all below it."""


@dataclass(frozen=True)
class Answer:
    """What a server in a copy answered.

    Attributes:
        status: as in HTTP.
        headers: by lower-case name.
        body: whole.
    """

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def text(self) -> str:
        """The body as text; what is no UTF-8 is replaced."""
        return self.body.decode("utf-8", "replace")

    def json(self) -> Any:
        """Read the body as JSON.

        Raises:
            ValueError: it is none.
        """
        return json_module.loads(self.body)

    def check(self) -> Answer:
        """Return this answer, if its status is below 400.

        Raises:
            SandboxError: it is not; the message has the beginning of the body.
        """
        if self.status >= 400:
            raise SandboxError(f"the server answered with status {self.status}: {self.text[:1000]}")
        return self


class Copy(ABC):
    """A live fork of a base or of another copy, as :meth:`prized_gym.Base.fork` makes them.

    Thread-safe. It ends with :meth:`close`, with its base's ``close``, and with this process.

    Attributes:
        id: the sandbox's.
        files: ``upload``, ``download``, ``read``, ``write``, ``list``, ``remove``; relative paths inside are relative to
            the home of the sandbox's user.
    """

    id: str
    files: Files

    @property
    @abstractmethod
    def labels(self) -> dict[str, str]:
        """The labels of the sandbox."""

    @property
    @abstractmethod
    def death(self) -> str | None:
        """Why the sandbox ended, None while it has not."""

    @property
    def alive(self) -> bool:
        """Whether the sandbox has not ended, as far as is known."""
        return self.death is None

    @abstractmethod
    def usage(self) -> Usage:
        """Measure what it has used so far, and what it has cost where its provider tells."""

    @abstractmethod
    def wait_dead(self, timeout: float) -> str | None:
        """Wait for the news of the sandbox's end; why it ended, or None if it has not within ``timeout`` seconds."""

    @abstractmethod
    async def explain(self, index: int, error: BaseException) -> Failure:
        """Find out what an error is a sign of that something asked of this copy has met.

        Args:
            index: how the copy is called in the failure.
            error: what was raised.
        """

    @abstractmethod
    async def server_log(self, timeout: float) -> str:
        """Read the end of what the copy's server wrote; empty where that cannot be had within ``timeout`` seconds."""

    @abstractmethod
    async def run(self, operation: Generator[Any, Any, _T], timeout: float, max_bytes: int = MAX_ANSWER) -> _T:
        """Run an operation of a protocol with the server in this copy: what it yields is asked, and sent back answered.

        Args:
            operation: what a method of a :class:`prized_gym.protocols.Protocol` gave.
            timeout: seconds it may take in all, unless a request has a limit of its own.
            max_bytes: an answer of more is an error, and not read.

        Raises:
            PrizedGymError: there was no answer, or one that the protocol refuses.
        """

    # Commands

    @abstractmethod
    def exec(
        self,
        cmd: str | Sequence[str],
        *,
        timeout: float | None = EXEC_TIMEOUT,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        background: bool = False,
        on_output: Callable[[str, bytes], None] | None = None,
    ) -> ExecResult:
        """Run a shell command, or a list of words, and wait for its end.

        Args:
            cmd: what to run. A string is run by the sandbox's shell.
            timeout: seconds until it is ended, with its whole process group; None for no limit.
            env: variables beyond the sandbox's own.
            cwd: a directory; relative to the home.
            background: start it and return at once; its output goes where the command sends it. It stands still while
                the whole sandbox does: in ``pause``, and where nothing has been asked of the sandbox for a moment.
            on_output: called with ``"stdout"`` or ``"stderr"`` and bytes, as they come.

        Returns:
            A result with ``exit_code``, ``stdout``, ``stderr`` and ``timed_out``. A command that fails is a result too:
            ``.check()`` raises for it.

        Raises:
            SandboxDiedError: the sandbox ended first. SandboxTimeoutError: the sandbox is too busy to start or to end it.
            SandboxError: it is paused, or the command cannot be started.
        """

    @abstractmethod
    async def exec_async(self, cmd: str | Sequence[str], **options: Any) -> ExecResult:
        """Run a command as :meth:`exec` does, for an event loop."""

    # Servers

    @abstractmethod
    def http(
        self,
        path: str,
        *,
        method: str | None = None,
        json: Any = None,
        body: bytes = b"",
        headers: Mapping[str, str] | None = None,
        port: int | None = None,
        timeout: float = HTTP_TIMEOUT,
        max_bytes: int = MAX_ANSWER,
    ) -> Answer:
        """Ask the server in this copy.

        Args:
            path: with its query, as in ``"/rollout?seed=3"``.
            method: by default GET, or POST with a body.
            json: a body, as JSON.
            body: a body, as bytes.
            headers: sent along.
            port: of the server on 127.0.0.1 inside; None: the one its base was set up with.
            timeout: seconds until the whole answer must be there.
            max_bytes: more than that is an error, and not read.

        Raises:
            SandboxTimeoutError: no answer in time.
            SandboxError: no answer; nobody listens, the server ended, what it sent is no HTTP, or too much.
        """

    @abstractmethod
    async def http_async(
        self,
        path: str,
        *,
        method: str | None = None,
        json: Any = None,
        body: bytes = b"",
        headers: Mapping[str, str] | None = None,
        port: int | None = None,
        timeout: float = HTTP_TIMEOUT,
        max_bytes: int = MAX_ANSWER,
    ) -> Answer:
        """Ask the server as :meth:`http` does, for an event loop."""

    # Forks

    @abstractmethod
    def fork(
        self,
        n: int = 1,
        *,
        labels: Mapping[str, str] | None = None,
        network: str | None = None,
        timeout: float = FORK_TIMEOUT,
    ) -> Sequence[Copy]:
        """Make ``n`` live forks of this copy as it stands: memory, processes, disk. All of them or none.

        Args:
            n: how many.
            labels: in place of its own.
            network: ``"none"`` or ``"outbound"``; None: as its own.
            timeout: seconds it may take.

        Raises:
            SandboxDiedError: it is gone. SandboxError: it could not be forked.
            EngineUnavailableError: its provider cannot fork.
        """

    @abstractmethod
    def pause(self) -> None:
        """Stop all its processes until :meth:`resume`. It can be forked meanwhile."""

    @abstractmethod
    def resume(self) -> None:
        """Let it go on."""

    @abstractmethod
    def close(self) -> None:
        """End it at once; nothing of it is left. Calling it again does nothing."""

    def __enter__(self) -> Copy:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "alive" if self.alive else f"ended: {self.death}"
        return f"<Copy {self.id}, {state}>"


class SandboxHandle(ABC):
    """A base that is a whole sandbox, as its engine holds it."""

    @property
    @abstractmethod
    def own(self) -> Copy:
        """The base's own sandbox, used as its copies are. Not to be closed.

        Raises:
            BaseDiedError: it is gone.
        """

    @abstractmethod
    def fork(self, n: int, labels: Mapping[str, str] | None, network: str | None, timeout: float) -> list[Copy]:
        """Make ``n`` copies to be held by the user. All of them or none.

        Args:
            n: how many.
            labels: beside the base's; None: the base's.
            network: ``"none"`` or ``"outbound"``; None: that of the base's copies.
            timeout: seconds it may take.

        Raises:
            ValueError: less than one.
            BaseDiedError: the base is gone. SandboxError: it could not be forked.
        """

    @abstractmethod
    def fork_some(
        self, n: int, labels: Mapping[str, str] | None, timeout: float
    ) -> tuple[list[Copy], Exception | None]:
        """Make as many as can be had of ``n`` copies; a base that has died is first built anew from its recipe.

        Args:
            n: how many.
            labels: beside the base's; None: the base's.
            timeout: seconds it may take.

        Returns:
            The copies, and why there are no more of them; None if all were made.
        """

    @abstractmethod
    def keep(self, lifetime_hours: float | None) -> str:
        """Leave the sandbox behind under the id returned; this handle is closed, and copies made from it live on.

        Args:
            lifetime_hours: after which it is deleted; None for never.

        Raises:
            SandboxError: the provider cannot.
        """


@dataclass(frozen=True)
class KeptBase:
    """A base that :meth:`prized_gym.Base.keep` left behind.

    Attributes:
        id: what ``Base.connect`` takes.
        engine: the name of its engine.
        labels: of its sandbox.
        size: bytes that are stored for it; None where the engine cannot tell.
        created: when it was kept, in seconds since the epoch.
        expires: when it will be deleted, in seconds since the epoch; None for never, or where the engine cannot tell.
    """

    id: str
    engine: str
    labels: Mapping[str, str] = field(default_factory=dict)
    size: int | None = None
    created: float = float("nan")
    expires: float | None = None

    @property
    def age(self) -> float:
        """Seconds since it was kept."""
        return time.time() - self.created

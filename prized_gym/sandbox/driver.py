"""What a provider of sandboxes must be able to do: the interface between this library and a provider's own SDK.

The next provider is one file with three classes: an engine that names it, a :class:`Driver` and a :class:`Sandbox`. They say
what the provider can do (:class:`Capabilities`), and the pool does the rest.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from prized_gym.errors import SandboxError
from prized_gym.interface.fleet import Usage
from prized_gym.interface.sandbox import ExecResult, FileInfo, Files
from prized_gym.sandbox.channels.http import Dialed

__all__ = [
    "OUTPUT_KEPT",
    "Capabilities",
    "Dialed",
    "Driver",
    "ExecResult",
    "FileInfo",
    "Files",
    "Listed",
    "Sandbox",
    "Shape",
]

OUTPUT_KEPT = 4 << 20


@dataclass(frozen=True)
class Capabilities:
    """What a provider can do; the pool makes up for what it cannot.

    Attributes:
        forks: a sandbox can be forked live, memory and processes included. Otherwise each copy is created and set up anew,
            and none can be branched.
        most_copies: the most that one call of :meth:`Sandbox.fork` may ask for.
        most_requests: how many calls of the driver, its sandboxes and their files may be under way at once, on one account;
            None for as many as come. Connections (:meth:`Sandbox.connect`) do not count.
        reachable: a server inside can be reached from outside, by :meth:`Sandbox.connect`. Otherwise requests travel
            through :meth:`Sandbox.exec`.
        python: ``"host"``: this machine's Python and what is installed for it are seen inside. ``"bare"``: the image has a
            ``python3`` of its own, perhaps with nothing but the standard library; what an environment's server needs is
            brought along.
        keeps: a sandbox can outlive its program, see :meth:`Sandbox.keep`.
        lists: the driver finds sandboxes by label and deletes them by id, see :meth:`Driver.list`.
        tells_cost: :meth:`Sandbox.usage` has ``cost_usd``.
        tells_expiry: :attr:`Sandbox.expires` is known.
        counts_deleted: a deleted sandbox counts toward the quota for a while, see :meth:`Sandbox.wait_gone`.
    """

    forks: bool = True
    most_copies: int = 256
    most_requests: int | None = None
    reachable: bool = True
    python: Literal["host", "bare"] = "host"
    keeps: bool = False
    lists: bool = False
    tells_cost: bool = False
    tells_expiry: bool = False
    counts_deleted: bool = False


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
        port: where a server will listen, on 127.0.0.1 inside.
        payload: the pickled recipe that will be served, for a driver that shows files of this machine; empty for none.
    """

    vcpu: float | None = None
    memory_gb: float | None = None
    disk_gb: float | None = None
    max_runtime_min: float | None = None
    env_vars: Mapping[str, str] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    network: str = "none"
    port: int = 8000
    payload: bytes = b""


class Sandbox(ABC):
    """One sandbox. Thread-safe; everything but the properties may block.

    An error says by ``happened`` whether what was asked for was done all the same; what never ran is asked once more.

    Attributes:
        id: the provider's.
        labels: by which it is found again.
        files: its files.
        scratch: an absolute path inside, of a directory for the library's own files; need not exist.
    """

    id: str
    labels: Mapping[str, str]
    files: Files
    scratch: str

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
        """Make ``n`` live copies, or none at all. ``labels`` and ``network`` None are its own.

        Raises:
            SandboxCapacityError: there is room for ``fits`` only.
            SandboxQuotaError: the account may have no more.
            SandboxDiedError: it is gone.
            SandboxError: it could not be forked.
        """

    def prepare(self) -> None:  # noqa: B027
        """Do ahead of time what the next fork would have to wait for. It has no effect that can be seen.

        Raises:
            SandboxError: it could not be done.
        """

    def connect(self, port: int, timeout: float = 10.0) -> Dialed:
        """Connect to a server on 127.0.0.1 inside.

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

    def keep(self, lifetime_hours: float | None) -> str:
        """Leave it paused under the id returned, for another process; this object is closed.

        Where the provider lists by label, a kept one must be told apart there (``Listed.kept``), or a sweep takes it for
        what a dead program left.

        Args:
            lifetime_hours: after which it is deleted; None for never.

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

    @property
    def expires(self) -> float | None:
        """When its provider ends it by itself, in seconds since the epoch; None for never, or where that is not known."""
        return None

    def usage(self) -> Usage:
        """What it has used so far."""
        return Usage()

    @property
    def urgent(self) -> Sandbox:
        """The same sandbox, for what must not wait until others have been answered."""
        return self

    @abstractmethod
    def close(self) -> None:
        """End it at once; can be called again, never raises."""

    def wait_gone(self, timeout: float) -> bool:
        """Wait until a closed sandbox no longer counts toward any quota; False if it still does after ``timeout`` seconds."""
        return True


@dataclass(frozen=True)
class Listed:
    """A sandbox as its provider lists it.

    Attributes:
        id: the provider's.
        labels: by which it was found.
        created: seconds since the epoch; nan where that is not known.
        kept: it was left behind on purpose.
    """

    id: str
    labels: Mapping[str, str] = field(default_factory=dict)
    created: float = float("nan")
    kept: bool = False


class Driver(ABC):
    """Makes sandboxes of one provider."""

    capabilities: Capabilities = Capabilities()
    """What the provider can do."""

    account: str = ""
    """Whose limits it shares: drivers of one class and account keep to the most requests together."""

    @abstractmethod
    def create(self, shape: Shape, timeout: float) -> Sandbox:
        """Start a sandbox and wait until it can be used.

        Raises:
            EngineUnavailableError: not here.
            SandboxQuotaError: the account may have no more.
            SandboxError: it did not start; what ``happened`` says whether it may exist all the same.
        """

    @abstractmethod
    def connect(self, id: str) -> Sandbox:
        """Find a kept sandbox: a live one that continues, or is a copy of, the one with that id.

        Raises:
            SandboxError: there is none.
        """

    def list(self, labels: Mapping[str, str]) -> Sequence[Listed]:
        """List the sandboxes that have all of ``labels``, where the provider can.

        Raises:
            SandboxError: it cannot.
        """
        raise SandboxError(f"{type(self).__name__} cannot list sandboxes")

    def delete(self, id: str) -> bool:
        """Delete a sandbox by its id; whether there was one.

        Raises:
            SandboxError: the provider cannot, or it could not be deleted.
        """
        raise SandboxError(f"{type(self).__name__} cannot delete a sandbox by its id")

"""What a base that is a whole sandbox offers: commands, files, servers, forks, being kept."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from prized_gym import engines
from prized_gym.arguments import check_fork, identifier
from prized_gym.errors import BaseDiedError, EngineUnavailableError
from prized_gym.interface.engine import BaseHandle, Engine
from prized_gym.interface.sandbox import KEPT_HOURS, Answer, Copy, ExecResult, Files, KeptBase, SandboxHandle


class SandboxMethods:
    """The part of :class:`prized_gym.Base` that is for bases which are sandboxes; on others these methods raise."""

    closed: bool
    _engine: type[Engine]
    _handle: BaseHandle
    _kept: str | None

    @property
    def is_sandbox(self) -> bool:
        """Whether it is a whole sandbox, with commands, files and servers."""
        return self._engine.sandboxes

    @property
    def id(self) -> str:
        """The id of the sandbox; that of the kept one for a base that was connected to."""
        return self._kept or self.sandbox_handle().own.id

    @property
    def files(self) -> Files:
        """Files in the sandbox: ``upload``, ``download``, ``read``, ``write``, ``list``, ``remove``."""
        return self.sandbox_handle().own.files

    def exec(self, cmd: str | Sequence[str], **options: Any) -> ExecResult:
        """Run a command in the sandbox, as :meth:`prized_gym.Copy.exec` does.

        Copies forked later have what it changed, where the provider forks live. A base that is built anew, because it died
        or because its machine is full, has only what its set-up made.
        """
        return self.sandbox_handle().own.exec(cmd, **options)

    def http(self, path: str, **options: Any) -> Answer:
        """Ask the server in the sandbox, as :meth:`prized_gym.Copy.http` does."""
        return self.sandbox_handle().own.http(path, **options)

    def fork(
        self, n: int = 1, *, labels: Mapping[str, str] | None = None, network: str | None = None, timeout: float = 120.0
    ) -> list[Copy]:
        """Make ``n`` live copies of the sandbox as it stands: memory, processes, disk. All of them or none.

        Args:
            n: how many.
            labels: in place of the base's.
            network: ``"none"`` or ``"outbound"``; None: ``copy_network``.
            timeout: seconds it may take.

        Raises:
            BaseDiedError: the base is gone. SandboxError: it could not be forked.
            EngineUnavailableError: the base is no sandbox.
        """
        n, labels = check_fork(n, labels, network, timeout)
        return self.sandbox_handle().fork(n, labels, network, timeout)

    def pause(self) -> None:
        """Stop all processes of the sandbox until :meth:`resume`. It can be forked meanwhile."""
        self.sandbox_handle().own.pause()

    def resume(self) -> None:
        """Let the sandbox go on."""
        self.sandbox_handle().own.resume()

    def keep(self, lifetime_hours: float | None = KEPT_HOURS) -> str:
        """Leave the sandbox behind, paused, under the id returned: :meth:`connect` forks it from any process of yours.

        This base is closed; copies made from it with :meth:`fork` live on. What is kept takes as much disk as the sandbox
        has memory: :meth:`kept` and ``prized-gym ls`` list it, :meth:`remove` and ``prized-gym rm`` delete it.

        Args:
            lifetime_hours: after which it is deleted, by the provider or the next ``prized-gym sweep``; None for never.

        Raises:
            ValueError: ``lifetime_hours`` is not positive.
            SandboxError: the provider keeps no sandboxes.
        """
        if lifetime_hours is not None and (not isinstance(lifetime_hours, (int, float)) or not lifetime_hours > 0):
            raise ValueError(f"lifetime_hours must be positive or None, got {lifetime_hours!r}")
        kept = self.sandbox_handle().keep(lifetime_hours)
        self.closed = True
        return kept

    @classmethod
    def kept(cls, engine: str | type[Engine] | None = None) -> list[KeptBase]:
        """List the bases that :meth:`keep` left behind, oldest first: id, engine, labels, size, when made, when deleted.

        Args:
            engine: of which engine; None: of all that can run here.

        Raises:
            EngineUnavailableError: the engine that is named cannot run here.
        """
        found: list[KeptBase] = []
        for one in _asked(engine):
            with _able(engine):
                found += one.kept()
        return found

    @classmethod
    def remove(cls, id: str, engine: str | type[Engine] | None = None) -> bool:
        """Delete a kept base. Copies forked from it are not touched.

        Args:
            id: what :meth:`keep` returned.
            engine: the engine it lives in; None: all that can run here are asked.

        Returns:
            Whether there was one.
        """
        identifier(id)
        found = False
        for one in _asked(engine):
            with _able(engine):
                found |= one.remove(id)
        return found

    def sandbox_handle(self) -> SandboxHandle:
        """The base as its engine holds it, if it is a sandbox.

        Raises:
            EngineUnavailableError: it is none. BaseDiedError: it is closed.
        """
        if self.is_sandbox and self.closed:
            raise BaseDiedError(f"{self!r} is closed")
        return self._handle.sandbox()


def _asked(engine: str | type[Engine] | None) -> list[type[Engine]]:
    return [engines.load(name) for name in engines.names()] if engine is None else [engines.load(engine)]


@contextlib.contextmanager
def _able(engine: str | type[Engine] | None) -> Iterator[None]:
    """Pass over an engine that cannot run here, unless it was named."""
    try:
        yield
    except EngineUnavailableError:
        if engine is not None:
            raise

"""A fork in own_copy: a sandbox with everything its base had, to run commands in, to ask, to fork again."""

from __future__ import annotations

import asyncio
import json as json_module
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from prized_gym import background
from prized_gym.errors import SandboxError, SandboxTimeoutError
from prized_gym.protocols import Request
from prized_gym.sandbox.channels.channel import Channel, ChannelError
from prized_gym.sandbox.driver import ExecResult, Files, Sandbox

if TYPE_CHECKING:
    from prized_gym.sandbox.base import SandboxBase

_T = TypeVar("_T")

EXEC_TIMEOUT = 300.0
HTTP_TIMEOUT = 300.0
MAX_ANSWER = 64 << 20


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
        """The body as JSON.

        Raises:
            ValueError: it is none.
        """
        return json_module.loads(self.body)

    def check(self) -> Answer:
        """This answer, if its status is below 400.

        Raises:
            SandboxError: it is not; the message has the beginning of the body.
        """
        if self.status >= 400:
            raise SandboxError(f"the server answered with status {self.status}: {self.text[:1000]}")
        return self


class Copy:
    """A live fork of a base or of another copy, as :meth:`prized_gym.Base.fork` makes them.

    Thread-safe. It ends with :meth:`close`, with its base's ``close``, and with this process.

    Attributes:
        id: the sandbox's.
        files: ``upload``, ``download``, ``read``, ``write``, ``list``, ``remove``; relative paths inside are relative to
            the home of the sandbox's user.
    """

    def __init__(self, base: SandboxBase, sandbox: Sandbox) -> None:
        self._base = base
        self._sandbox = sandbox
        self._channels: dict[int, Channel] = {}
        self.id: str = sandbox.id
        self.files: Files = sandbox.files

    @property
    def labels(self) -> dict[str, str]:
        """The labels of the sandbox."""
        return dict(self._sandbox.labels)

    @property
    def death(self) -> str | None:
        """Why the sandbox ended, None while it has not."""
        return self._sandbox.death

    @property
    def alive(self) -> bool:
        """Whether the sandbox has not ended, as far as is known."""
        return self._sandbox.death is None

    # Commands

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
        return self._sandbox.exec(cmd, timeout=timeout, env=env, cwd=cwd, background=background, on_output=on_output)

    async def exec_async(self, cmd: str | Sequence[str], **options: Any) -> ExecResult:
        """:meth:`exec` for an event loop."""
        return await _awaited(background.submit(lambda: self.exec(cmd, **options)))

    # Servers

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
        return background.run(self._http(path, method, json, body, headers, port, timeout, max_bytes))

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
        """:meth:`http` for an event loop."""
        asking = self._http(path, method, json, body, headers, port, timeout, max_bytes)
        return await _awaited(background.start(asking))

    def _http(
        self,
        path: str,
        method: str | None,
        json: Any,
        body: bytes,
        headers: Mapping[str, str] | None,
        port: int | None,
        timeout: float,
        max_bytes: int,
    ) -> Coroutine[Any, Any, Answer]:
        sent = dict(headers or {})
        if json is not None:
            body = json_module.dumps(json).encode()
            sent.setdefault("Content-Type", "application/json")
        return self._ask(Request(method or ("POST" if body else "GET"), path, sent, body), port, timeout, max_bytes)

    async def _ask(self, request: Request, port: int | None, timeout: float, max_bytes: int) -> Answer:
        chosen = self._base.plan.port if port is None else port
        if chosen not in self._channels:
            self._channels[chosen] = self._base.channel(self._sandbox, chosen)
        try:
            response = await self._channels[chosen].ask(request, limit=max_bytes, timeout=timeout)
        except ChannelError as error:
            if error.kind == "timeout":
                raise SandboxTimeoutError(f"sandbox {self.id}: {error}") from error
            # The connection ends a moment before the news of the sandbox's death comes.
            death = None
            if error.kind == "closed":
                death = await background.in_thread(lambda: self._sandbox.wait_dead(0.25), urgent=True)
            because = f"; the sandbox ended: {death}" if death else ""
            raise SandboxError(f"sandbox {self.id}: {error}{because}") from error
        return Answer(response.status, response.headers, response.body)

    # Forks

    def fork(
        self, n: int = 1, *, labels: Mapping[str, str] | None = None, network: str | None = None, timeout: float = 120.0
    ) -> list[Copy]:
        """Make ``n`` live forks of this copy as it stands: memory, processes, disk. All of them or none.

        Args:
            n: how many.
            labels: in place of its own.
            network: ``"none"`` or ``"outbound"``; None: as its own.
            timeout: seconds it may take.

        Raises:
            SandboxDiedError: it is gone. SandboxError: it could not be forked.
        """
        sandboxes = self._base.fork_copy(self._sandbox, _at_least_one(n), timeout, labels, network)
        return [Copy(self._base, sandbox) for sandbox in sandboxes]

    def pause(self) -> None:
        """Stop all its processes until :meth:`resume`. It can be forked meanwhile."""
        self._sandbox.pause()

    def resume(self) -> None:
        """Let it go on."""
        self._sandbox.resume()

    def close(self) -> None:
        """End it at once; nothing of it is left. Calling it again does nothing."""
        for channel in self._channels.values():
            background.loop().call_soon_threadsafe(channel.close)
        self._base.forget(self._sandbox)

    def __enter__(self) -> Copy:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "alive" if self.alive else f"ended: {self.death}"
        return f"<{type(self).__name__} {self.id}, {state}>"


def _at_least_one(n: int) -> int:
    if n < 1:
        raise ValueError(f"n must be at least 1, got {n}")
    return n


async def _awaited(future: Future[_T]) -> _T:
    return await asyncio.wrap_future(future)

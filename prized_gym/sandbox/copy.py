"""A fork held by the user: a sandbox with everything its base had, to run commands in, to ask, to fork again."""

from __future__ import annotations

import asyncio
import json as json_module
from collections.abc import Callable, Coroutine, Generator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from prized_gym import background
from prized_gym.arguments import check_fork
from prized_gym.errors import SandboxError, SandboxTimeoutError
from prized_gym.interface.failure import Failure
from prized_gym.interface.fleet import Usage
from prized_gym.interface.sandbox import (
    EXEC_TIMEOUT,
    FORK_TIMEOUT,
    HTTP_TIMEOUT,
    MAX_ANSWER,
    Answer,
    Copy,
    ExecResult,
)
from prized_gym.protocols import Request
from prized_gym.sandbox.account import Guarded
from prized_gym.sandbox.channels.channel import Channel, ChannelError
from prized_gym.sandbox.client import run
from prized_gym.sandbox.dialer import Dialer
from prized_gym.sandbox.failures import explain, look
from prized_gym.sandbox.pool import SandboxPool

_T = TypeVar("_T")


class SandboxCopy(Copy):
    """A sandbox of a pool, as the user holds it.

    Args:
        pool: whose it is.
        dialer: reaches the servers in it.
        sandbox: the sandbox.
        port: of the server it was set up with.
    """

    def __init__(self, pool: SandboxPool, dialer: Dialer, sandbox: Guarded, port: int) -> None:
        self._pool = pool
        self._dialer = dialer
        self._port = port
        self._channels: dict[int, Channel] = {}
        self.sandbox = sandbox
        self.id = sandbox.id
        self.files = sandbox.files

    @property
    def labels(self) -> dict[str, str]:
        return dict(self.sandbox.labels)

    @property
    def death(self) -> str | None:
        return self.sandbox.death

    def usage(self) -> Usage:
        return self.sandbox.usage()

    def wait_dead(self, timeout: float) -> str | None:
        return self.sandbox.wait_dead(timeout)

    async def explain(self, index: int, error: BaseException) -> Failure:
        return await explain(index, self.sandbox, error)

    async def server_log(self, timeout: float) -> str:
        return (await background.in_thread(lambda: look(self.sandbox, timeout=timeout), urgent=True)).log

    async def run(self, operation: Generator[Any, Any, _T], timeout: float, max_bytes: int = MAX_ANSWER) -> _T:
        return await run(self._channel(self._port), operation, timeout, max_bytes)

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
        return self.sandbox.exec(cmd, timeout=timeout, env=env, cwd=cwd, background=background, on_output=on_output)

    async def exec_async(self, cmd: str | Sequence[str], **options: Any) -> ExecResult:
        return await _awaited(self.sandbox.account.submit(lambda: self.exec(cmd, **options)))

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
        channel = self._channel(self._port if port is None else port)
        try:
            response = await channel.ask(request, limit=max_bytes, timeout=timeout)
        except ChannelError as error:
            if error.kind == "timeout":
                raise SandboxTimeoutError(f"sandbox {self.id}: {error}") from error
            # The connection ends a moment before the news of the sandbox's death comes.
            death = None
            if error.kind == "closed":
                death = await background.in_thread(lambda: self.sandbox.wait_dead(0.25), urgent=True)
            because = f"; the sandbox ended: {death}" if death else ""
            raise SandboxError(f"sandbox {self.id}: {error}{because}") from error
        return Answer(response.status, response.headers, response.body)

    def _channel(self, port: int) -> Channel:
        if port not in self._channels:
            self._channels[port] = self._dialer.channel(self.sandbox, port)
        return self._channels[port]

    # Forks

    def fork(
        self,
        n: int = 1,
        *,
        labels: Mapping[str, str] | None = None,
        network: str | None = None,
        timeout: float = FORK_TIMEOUT,
    ) -> list[SandboxCopy]:
        n, labels = check_fork(n, labels, network, timeout)
        forked = self._pool.fork_copy(self.sandbox, n, timeout, labels, network)
        sandboxes = self._pool.all_or_none(forked)
        return [SandboxCopy(self._pool, self._dialer, sandbox, self._port) for sandbox in sandboxes]

    def pause(self) -> None:
        self.sandbox.pause()

    def resume(self) -> None:
        self.sandbox.resume()

    def close(self) -> None:
        for channel in self._channels.values():
            background.loop().call_soon_threadsafe(channel.close)
        self._pool.forget(self.sandbox)


async def _awaited(future: Future[_T]) -> _T:
    return await asyncio.wrap_future(future)

"""Channels and clients to the servers in the sandboxes of one base."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import Future
from functools import partial

from prized_gym import background
from prized_gym.errors import SandboxError
from prized_gym.protocols import EpisodeProtocol, GymProtocol, Protocol
from prized_gym.sandbox.account import Account
from prized_gym.sandbox.channels.channel import Channel
from prized_gym.sandbox.channels.exec import ExecChannel
from prized_gym.sandbox.channels.http import Dialed, HttpChannel
from prized_gym.sandbox.client import Client
from prized_gym.sandbox.driver import ExecResult, Sandbox
from prized_gym.sandbox.plan import Plan


class Dialer:
    """Knows how a base's servers are reached, and what they speak.

    Args:
        plan: of the base.
        reachable: whether a server can be reached by HTTP.
        account: of the provider.

    Attributes:
        protocol: of the base's server; once that has been described, it knows the spaces.
    """

    def __init__(self, plan: Plan, reachable: bool, account: Account) -> None:
        self._plan = plan
        self._account = account
        self._reachable = reachable
        self.protocol: Protocol | None = plan.protocol

    def client(self, sandbox: Sandbox, protocol: Protocol | None = None) -> Client:
        """Make a client of the server in ``sandbox``, a fork of the base or of the copy whose protocol is given."""
        spoken = protocol or self.protocol
        # Without a protocol there is nothing to ask but whether the server is ready.
        own = EpisodeProtocol() if spoken is None else spoken.fork()
        return Client(own, self.channel(sandbox), self._plan.request_timeout)

    def channel(self, sandbox: Sandbox, port: int | None = None) -> Channel:
        """Make a channel to the server in ``sandbox`` that listens on ``port``; None: the base's own.

        Raises:
            SandboxError: it cannot be reached.
        """
        port = self._plan.port if port is None else port
        if self._plan.channel == "exec" and port == self._plan.port:
            return ExecChannel(_Commands(sandbox), f"{sandbox.scratch}/exec", self._account.submit_in_turn)
        if not self._reachable:
            raise SandboxError(
                f"port {port} of {sandbox.id} cannot be reached: only port {self._plan.port} can, by commands"
            )

        async def dial() -> Dialed:
            dialing = self._account.submit(lambda: sandbox.connect(port))
            try:
                return await asyncio.wrap_future(dialing)
            except asyncio.CancelledError:
                # The thread goes on, and its connection would be nobody's.
                dialing.add_done_callback(_hang_up)
                raise

        # Other servers than ours may close a connection that is idle for some seconds.
        ours = isinstance(self._plan.protocol, GymProtocol)
        return HttpChannel(
            dial, f"127.0.0.1:{port}", awake=partial(_awake, sandbox), reuse_within=None if ours else 1.0
        )


def _hang_up(dialing: Future[Dialed]) -> None:
    if not dialing.cancelled() and dialing.exception() is None:
        dialing.result().sock.close()


class _Commands:
    """A sandbox as the exec channel sees it."""

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox

    def run(self, argv: Sequence[str], timeout: float, max_output: int) -> ExecResult:
        return self._sandbox.exec(argv, timeout=timeout, max_output=max_output)

    def write(self, path: str, data: bytes) -> None:
        self._sandbox.files.write(path, data)

    def read(self, path: str, max_bytes: int) -> bytes:
        return self._sandbox.files.read(path, max_bytes=max_bytes)


@contextlib.asynccontextmanager
async def _awake(sandbox: Sandbox) -> AsyncIterator[None]:
    while sandbox.asleep:
        await background.in_thread(sandbox.wake, urgent=True)
    with sandbox.hold():
        yield

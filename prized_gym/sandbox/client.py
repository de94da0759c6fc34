"""One server in a sandbox: the operations of its protocol, run over a channel in the background loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

from prized_gym.interface.commands import Call, Command, Fresh, Reseed, Reset, SetAttr, Start
from prized_gym.protocols import Exchange, Protocol, Request, Response, ServerDescription, StepAnswer
from prized_gym.protocols.base import began, checked, stepped
from prized_gym.sandbox.channels.channel import Channel, ChannelError

_T = TypeVar("_T")

_READY_TIMEOUT = 5.0
_BASE_RESET_TIMEOUT = 600.0
_READY_EVERY = 0.02


async def run(channel: Channel, operation: Exchange[_T], timeout: float, max_bytes: int) -> _T:
    """Run one operation of a protocol over a channel, as :meth:`Client.run` does; answers have at most ``max_bytes``."""
    left, ends = timeout, time.monotonic() + timeout - channel.waited
    exchange = checked(operation)
    response: Response | None = None
    try:
        while True:
            try:
                request = exchange.send(response)  # type: ignore[arg-type]
            except StopIteration as ended:
                value: _T = ended.value
                return value
            limit = left if request.timeout is None else request.timeout
            response = await channel.ask(request, limit=max_bytes, timeout=limit)
            left = max(0.001, ends + channel.waited - time.monotonic())
    finally:
        exchange.close()


class Client:
    """One server, as its protocol speaks to it.

    Args:
        protocol: belongs to this client alone.
        channel: brings its requests.
        timeout: seconds an operation may take unless something else limits it.
    """

    def __init__(self, protocol: Protocol, channel: Channel, timeout: float) -> None:
        self.protocol = protocol
        self.channel = channel
        self.timeout = timeout

    async def run(self, operation: Exchange[_T], timeout: float | None = None) -> _T:
        """Run one operation of the protocol to its end.

        Args:
            operation: what a method of the protocol gave. What ends it early, such as an answer that does not come, closes it.
            timeout: seconds that it may take in all; None: as the client was given. A request's own limit goes before it.

        Returns:
            What the operation returned.

        Raises:
            ChannelError: there was no answer.
            ProtocolError, RemoteError: as the protocol says.
        """
        limit = self.timeout if timeout is None else timeout
        return await run(self.channel, operation, limit, self.protocol.max_answer_bytes)

    async def wait_ready(self, ready: Request | None, ends: float, given_up: Callable[[], Any]) -> bool:
        """Wait until the server is ready.

        Args:
            ready: what is asked, and answered with a status below 300 by a server that is; None: as the protocol says.
            ends: the ``time.monotonic()`` at which the wait is given up.
            given_up: true once it is in vain.

        Returns:
            Whether it is.

        Raises:
            ProtocolError: it never will be.
        """
        pause = _READY_EVERY
        while time.monotonic() < ends:
            try:
                if await self._is_ready(ready):
                    return True
            except ChannelError:
                pass
            if given_up():
                return False
            await asyncio.sleep(pause)
            pause = min(0.1, pause * 1.3)
        return False

    async def _is_ready(self, request: Request | None) -> bool:
        if request is not None:
            limit = self.protocol.max_answer_bytes
            return (await self.channel.ask(request, limit=limit, timeout=_READY_TIMEOUT)).status < 300
        ready = await self.run(self.protocol.ready(), _READY_TIMEOUT)
        if ready is None:
            await self.channel.reach(_READY_TIMEOUT)
        return ready is None or bool(ready)

    async def describe(self) -> ServerDescription:
        """Find out what the server's environment is like."""
        return await self.run(self.protocol.describe())

    async def reset_base(self, seed: int | None) -> None:
        """Reset the environment in a base."""
        # What takes long is done in the base so that it is done once.
        await self.run(self.protocol.reset_base(seed), max(self.timeout, _BASE_RESET_TIMEOUT))

    async def step(self, action: Any, then_reset: bool, timeout: float | None) -> StepAnswer:
        """Take a step, and where it ends the episode and ``then_reset`` is set, reset too."""
        answer = stepped(await self.run(self.protocol.step(action, then_reset=then_reset), timeout))
        if then_reset and (answer.terminated or answer.truncated) and answer.reset is None:
            return replace(answer, reset=await self.reset(None, None, timeout))
        return answer

    async def reset(
        self,
        seed: int | None,
        options: dict[str, Any] | None,
        timeout: float | None,
        *,
        fresh: Fresh | None = None,
        base: bool = False,
    ) -> tuple[Any, dict[str, Any]]:
        """Begin an episode."""
        return began(await self.run(self.protocol.reset(seed, options, fresh=fresh, base=base), timeout))

    async def command(self, command: Command, timeout: float | None) -> Any:
        """Do what a command of the fleet says.

        Returns:
            For a :class:`Reset` the observation and the info, for a :class:`Call` its result, else None.
        """
        protocol = self.protocol
        if isinstance(command, Reset):
            if command.fresh is None and command.reseed is not None:
                await self.run(protocol.reseed(command.reseed), timeout)
            return await self.reset(command.seed, command.options, timeout, fresh=command.fresh, base=command.from_base)
        if isinstance(command, Call):
            if command.name == "render" and not command.args and not command.kwargs:
                return await self.run(protocol.render(), timeout)
            return await self.run(protocol.call(command.name, command.args, command.kwargs), timeout)
        if isinstance(command, SetAttr):
            await self.run(protocol.set_attr(command.values), timeout)
        elif isinstance(command, Reseed):
            await self.run(protocol.reseed(command.seed), timeout)
        elif isinstance(command, Start):
            await self.run(protocol.start(command.fresh), timeout)
        return None

    async def stack(self, timeout: float) -> str:
        """Where the environment hangs, as text; empty if that cannot be told."""
        return await self.run(self.protocol.stack(), timeout)

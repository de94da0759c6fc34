"""Talking to one server: a protocol over a channel, in the background loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from prized_gym import protocols
from prized_gym.interface.commands import Call, Command, Fresh, Reseed, Reset, SetAttr, Start
from prized_gym.protocols import Protocol, Request, Response, ServerDescription, StepAnswer
from prized_gym.sandbox.channels.channel import Channel, ChannelError

_READY_TIMEOUT = 5.0
_BASE_RESET_TIMEOUT = 600.0
_READY_EVERY = 0.02


class Client:
    """One server, as its protocol speaks to it.

    Args:
        protocol: belongs to this client alone.
        channel: brings its requests.
        timeout: seconds an answer may take unless the request has a limit of its own.
    """

    def __init__(self, protocol: Protocol, channel: Channel, timeout: float) -> None:
        self.protocol = protocol
        self.channel = channel
        self.timeout = timeout

    async def ask(self, request: Request, timeout: float | None = None) -> Response:
        limit = request.timeout if request.timeout is not None else timeout if timeout is not None else self.timeout
        return await self.channel.ask(request, limit=self.protocol.max_answer_bytes, timeout=limit)

    async def _maybe(self, request: Request | None, timeout: float | None = None) -> Any:
        # Protocols are declared to read an answer where they made a request, and None where they made none.
        return None if request is None else await self.ask(request, timeout)

    async def wait_ready(self, ready: Request | None, ends: float, given_up: Callable[[], Any]) -> bool:
        """Wait until the server is ready; False once ``ends`` (monotonic) has passed or ``given_up()`` is true."""
        pause = _READY_EVERY
        while time.monotonic() < ends:
            try:
                if ready is not None:
                    response = await self.ask(ready, _READY_TIMEOUT)
                    if self.protocol.read_ready(response):
                        return True
                else:
                    await self.channel.reach(_READY_TIMEOUT)
                    return True
            except ChannelError:
                pass
            if given_up():
                return False
            await asyncio.sleep(pause)
            pause = min(0.1, pause * 1.3)
        return False

    async def describe(self) -> ServerDescription:
        return self.protocol.read_describe(await self._maybe(self.protocol.describe()))

    async def reset_base(self, seed: int | None) -> None:
        request = self.protocol.reset_base(seed)
        # What takes long is done in the base so that it is done once.
        self.protocol.read_reset_base(await self.ask(request, max(self.timeout, _BASE_RESET_TIMEOUT)))

    async def step(self, action: Any, then_reset: bool, timeout: float | None) -> StepAnswer:
        """A step, and where it ends the episode and ``then_reset`` is set, a reset too."""
        answer = self.protocol.read_step(await self._maybe(self.protocol.step(action, then_reset=then_reset), timeout))
        if then_reset and (answer.terminated or answer.truncated) and answer.reset is None:
            first = await self.reset(None, None, timeout)
            return StepAnswer(answer.obs, answer.reward, answer.terminated, answer.truncated, answer.info, first)
        return answer

    async def reset(
        self, seed: int | None, options: dict[str, Any] | None, timeout: float | None, **how: Any
    ) -> tuple[Any, dict[str, Any]]:
        return self.protocol.read_reset(await self._maybe(self.protocol.reset(seed, options, **how), timeout))

    async def command(self, index: int, command: Command, timeout: float | None) -> Any:
        """Do what a command of the fleet says in copy ``index``.

        Returns:
            For a :class:`Reset` the observation and the info, for a :class:`Call` its result, else None.
        """
        protocol = self.protocol
        if isinstance(command, Reset):
            if command.fresh is None and command.reseed is not None:
                protocol.read_reseed(await self._maybe(protocol.reseed(command.reseed)))
            fresh = None if command.fresh is None else _on_the_wire(command.fresh, index)
            return await self.reset(command.seed, command.options, timeout, fresh=fresh, base=command.from_base)
        if isinstance(command, Call):
            if command.name == "render" and not command.args and not command.kwargs:
                return protocol.read_render(await self.ask(protocol.render(), timeout))
            request = protocol.call(command.name, command.args, command.kwargs)
            return protocol.read_call(await self.ask(request, timeout))
        if isinstance(command, SetAttr):
            protocol.read_set_attr(await self.ask(protocol.set_attr(command.values), timeout))
        elif isinstance(command, Reseed):
            protocol.read_reseed(await self._maybe(protocol.reseed(command.seed), timeout))
        elif isinstance(command, Start):
            protocol.read_start(await self._maybe(protocol.start(_on_the_wire(command.fresh, index)), timeout))
        return None

    async def stack(self, timeout: float) -> str:
        """Where the environment hangs, as text; empty if that cannot be told."""
        request = self.protocol.stack()
        return "" if request is None else self.protocol.read_stack(await self.ask(request, timeout))


def _on_the_wire(fresh: Fresh, index: int) -> protocols.Fresh:
    return protocols.Fresh(fresh.seed, index, fresh.attributes)

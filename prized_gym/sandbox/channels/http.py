"""HTTP/1.1 with keep-alive over sockets that are connected already, in the background loop."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import socket
import ssl
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import h11

from prized_gym.protocols import Request, Response
from prized_gym.sandbox.channels.channel import Channel, ChannelError, name_of

_MAX_HEAD = 64 << 10
_MAX_INTERIM = 10
_KEPT = 4
"""Connections kept open for the next request; more than one is in use only where requests overlap."""


@dataclass
class Dialed:
    """A connected stream socket, and how to speak over it.

    Attributes:
        sock: connected.
        tls: encrypt with this context, for ``server_name``.
        server_name: the name the certificate must have.
    """

    sock: socket.socket
    tls: ssl.SSLContext | None = None
    server_name: str | None = None


class HttpChannel(Channel):
    """A server reached by HTTP.

    Args:
        dial: connects to the server; ``ConnectionRefusedError`` if nobody listens.
        host: the value of the ``Host`` header.
        awake: entered around each request, such as to keep a sandbox from being stopped meanwhile.
        reuse_within: seconds a connection may have been idle to be used again: some servers close idle ones, and a
            request that meets the close cannot be told from one that was lost half-way. None for no limit.
    """

    def __init__(
        self,
        dial: Callable[[], Awaitable[Dialed]],
        host: str,
        *,
        awake: Callable[[], contextlib.AbstractAsyncContextManager[None]] | None = None,
        reuse_within: float | None = 1.0,
    ) -> None:
        self._dial = dial
        self._host = host
        self._awake = awake
        self._reuse_within = reuse_within
        self._idle: list[_Connection] = []
        self._all: set[_Connection] = set()

    async def ask(self, request: Request, *, limit: int, timeout: float) -> Response:
        if self._awake is None:
            return await self._ask(request, limit, timeout)
        async with self._awake():
            return await self._ask(request, limit, timeout)

    async def _ask(self, request: Request, limit: int, timeout: float) -> Response:
        ends = time.monotonic() + timeout
        connection = self._take()
        if connection is not None:
            try:
                return await self._exchange(connection, request, limit, timeout)
            except ChannelError as error:
                # Closed by the server while it was idle: asking again is safe only where asking twice is.
                if error.kind != "closed" or error.answered or request.method not in ("GET", "HEAD"):
                    raise
        connection = await self._connect(name_of(request), timeout)
        return await self._exchange(connection, request, limit, max(0.001, ends - time.monotonic()))

    def _take(self) -> _Connection | None:
        while self._idle:
            connection = self._idle.pop()
            fresh = self._reuse_within is None or time.monotonic() - connection.idle_since < self._reuse_within
            if connection.usable and fresh:
                return connection
            connection.abort()
        return None

    async def reach(self, timeout: float) -> None:
        async with contextlib.nullcontext() if self._awake is None else self._awake():
            # Not kept: a server that serves one connection at a time would wait on it.
            (await self._connect("connecting", timeout)).abort()

    async def _connect(self, what: str, timeout: float) -> _Connection:
        try:
            dialed = await asyncio.wait_for(self._dial(), timeout)
        except ConnectionRefusedError as error:
            raise ChannelError("refused", f"{what}: nobody listens ({error})") from None
        except (TimeoutError, asyncio.TimeoutError):
            raise ChannelError("timeout", f"{what}: no connection within {timeout:g} s") from None
        except OSError as error:
            raise ChannelError("closed", f"{what}: no connection ({error})") from None
        try:
            _, connection = await asyncio.wait_for(
                asyncio.get_running_loop().create_connection(
                    lambda: _Connection(self._all),
                    sock=dialed.sock,
                    ssl=dialed.tls,
                    server_hostname=dialed.server_name,
                ),
                timeout,
            )
        except (TimeoutError, asyncio.TimeoutError):
            dialed.sock.close()
            raise ChannelError("timeout", f"{what}: no connection within {timeout:g} s") from None
        except OSError as error:
            dialed.sock.close()
            raise ChannelError("closed", f"{what}: no connection ({error})") from None
        except BaseException:
            dialed.sock.close()
            raise
        return connection

    async def _exchange(self, connection: _Connection, request: Request, limit: int, timeout: float) -> Response:
        try:
            response = await connection.exchange(request, self._host, limit, timeout)
        except BaseException:
            connection.abort()
            raise
        if connection.usable and len(self._idle) < _KEPT:
            connection.idle_since = time.monotonic()
            self._idle.append(connection)
        else:
            connection.abort()
        return response

    def close(self) -> None:
        self._idle.clear()
        for connection in list(self._all):
            connection.abort()


@functools.lru_cache(maxsize=256)
def _head(method: str, target: str, headers: tuple[tuple[str, str], ...]) -> h11.Request:
    """A request's head, checked: steps have the same one again and again."""
    return h11.Request(method=method, target=target, headers=list(headers))


class _Connection(asyncio.Protocol):
    """One connection; one request at a time."""

    def __init__(self, everyone: set[_Connection]) -> None:
        self._everyone = everyone
        self._transport: asyncio.Transport | None = None
        self._http = h11.Connection(h11.CLIENT, max_incomplete_event_size=_MAX_HEAD)
        self._waiter: asyncio.Future[Response] | None = None
        self._head: h11.Response | None = None
        self._body: list[bytes] = []
        self._size = 0
        self._what = ""
        self._limit = 0
        self._interim = 0
        self._answered = False
        self._ended = False
        self.idle_since = 0.0

    @property
    def usable(self) -> bool:
        """Whether another request can be sent."""
        return self._transport is not None and not self._transport.is_closing() and self._http.our_state is h11.IDLE

    async def exchange(self, request: Request, host: str, limit: int, timeout: float) -> Response:
        assert self._transport is not None
        loop = asyncio.get_running_loop()
        self._what, self._limit = name_of(request), limit
        self._head, self._interim, self._answered = None, 0, False
        self._body, self._size = [], 0
        headers = [("Host", host), *request.headers.items()]
        if request.body or request.method not in ("GET", "HEAD"):
            headers.append(("Content-Length", str(len(request.body))))
        try:
            data = self._http.send(_head(request.method, request.path, tuple(headers))) or b""
            if request.body:
                data += self._http.send(h11.Data(data=request.body)) or b""
            data += self._http.send(h11.EndOfMessage()) or b""
        except h11.LocalProtocolError as error:
            raise ChannelError("garbage", f"{self._what} cannot be sent: {error}") from None
        self._waiter = loop.create_future()
        timer = loop.call_later(timeout, self._expire, timeout)
        try:
            self._transport.write(data)
            return await self._waiter
        finally:
            timer.cancel()
            self._waiter = None

    # What asyncio calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._everyone.add(self)

    def data_received(self, data: bytes) -> None:
        if self._waiter is None or self._waiter.done():
            # Nobody asked. Whatever it is, it must not be taken for the next answer.
            self.abort()
            return
        self._answered = True
        self._http.receive_data(data)
        self._advance()

    def eof_received(self) -> bool:
        if self._waiter is not None and not self._waiter.done() and self._head is not None:
            # An answer without a length ends with its connection.
            self._ended = True
            self._http.receive_data(b"")
            self._advance()
        return False

    def connection_lost(self, error: Exception | None) -> None:
        self._everyone.discard(self)
        self._fail("closed", f"{self._what}: the connection was closed before the answer was complete")

    # Reading

    def _advance(self) -> None:
        try:
            while self._next(self._http.next_event()):
                pass
        except h11.RemoteProtocolError as error:
            if self._ended:
                self._fail("closed", f"{self._what}: the connection was closed before the answer was complete")
            else:
                self._fail("garbage", f"{self._what}: the answer is no HTTP ({error})")

    def _next(self, event: Any) -> bool:
        if event is h11.NEED_DATA or event is h11.PAUSED:
            return False
        if isinstance(event, h11.Data):
            self._body.append(event.data)
            self._size += len(event.data)
            if self._size > self._limit:
                self._fail("large", f"{self._what}: the answer has more than the {self._limit} bytes that may be read")
                return False
        elif isinstance(event, h11.InformationalResponse):
            self._interim += 1
            if self._interim > _MAX_INTERIM:
                self._fail("garbage", f"{self._what}: one interim answer after another")
                return False
        elif isinstance(event, h11.Response):
            return self._take_head(event)
        elif isinstance(event, h11.EndOfMessage):
            self._complete()
            return False
        else:
            return False
        return True

    def _take_head(self, head: h11.Response) -> bool:
        self._head = head
        for name, value in head.headers:
            if name == b"content-length" and int(value) > self._limit:
                self._fail(
                    "large",
                    f"{self._what}: the answer announces {int(value)} bytes, and {self._limit} may be read",
                )
                return False
            if name == b"content-encoding" and value.lower() != b"identity":
                self._fail("garbage", f"{self._what}: the answer is encoded as {value[:40]!r}, which was not asked for")
                return False
        return True

    def _complete(self) -> None:
        assert self._head is not None
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in self._head.headers}
        response = Response(self._head.status_code, headers, b"".join(self._body), self._what)
        self._body = []
        # What came after the answer must not be taken for the next one.
        trailing = bool(self._http.trailing_data[0])
        if self._http.our_state is h11.DONE and self._http.their_state is h11.DONE and not trailing:
            self._http.start_next_cycle()
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(response)

    # The end

    def _expire(self, timeout: float) -> None:
        self._fail("timeout", f"{self._what}: no answer within {timeout:g} s")

    def _fail(self, kind: Any, message: str) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(ChannelError(kind, message, answered=self._answered))
        self.abort()

    def abort(self) -> None:
        """Close at once; a request in flight fails."""
        if self._transport is not None:
            self._transport.abort()

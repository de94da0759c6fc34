"""Byte streams to servers inside a sandbox."""

from __future__ import annotations

import contextlib
import itertools
import socket
from typing import TYPE_CHECKING, Any

from . import agent
from .awake import Awake
from .errors import RunscError
from .remote import remote_error

if TYPE_CHECKING:
    from .connection import Link

_numbers = itertools.count()


class Stream(socket.socket):
    """A connected socket whose other end is ``127.0.0.1:port`` inside a sandbox; a raw byte pipe both ways.

    A real socket (of the host's Unix family), so it goes wherever one does: ``asyncio.open_connection(sock=stream)``,
    ``http.client``, ``httpcore``. Sending on it wakes a sandbox that was stopped for idleness, and from a send to the next
    byte received the sandbox is not stopped. Code that uses its descriptor without these methods (uvloop does), or waits
    for more than the first bytes of an answer, calls ``Sandbox.touch()`` or stays inside ``Sandbox.hold()`` instead. A fork
    of the sandbox ends its streams.

    Args:
        connection: a connection of the sandbox's agent, which this one replaces.
        awake: what stops the sandbox for idleness.
    """

    def __init__(self, connection: socket.socket, awake: Awake) -> None:
        self._number = next(_numbers)
        self._awake = awake
        super().__init__(connection.family, connection.type, connection.proto, connection.detach())

    def _sent(self) -> None:
        self._awake.awaiting.add(self._number)
        self._awake.touch()

    def _received(self) -> None:
        self._awake.awaiting.discard(self._number)

    def send(self, data: Any, flags: int = 0, /) -> int:
        """Send as a socket does, waking the sandbox."""
        self._sent()
        return super().send(data, flags | socket.MSG_NOSIGNAL)

    def sendall(self, data: Any, flags: int = 0, /) -> None:
        """Send all as a socket does, waking the sandbox."""
        self._sent()
        super().sendall(data, flags | socket.MSG_NOSIGNAL)

    def sendmsg(self, buffers: Any, *arguments: Any) -> int:
        """Send buffers as a socket does, waking the sandbox."""
        self._sent()
        return super().sendmsg(buffers, *arguments)

    def recv(self, size: int, flags: int = 0, /) -> bytes:
        """Receive as a socket does."""
        data = super().recv(size, flags)
        self._received()
        return data

    def recv_into(self, buffer: Any, nbytes: int = 0, flags: int = 0) -> int:
        """Receive into a buffer as a socket does."""
        count = super().recv_into(buffer, nbytes, flags)
        self._received()
        return count

    def close(self) -> None:
        """Close the stream."""
        self._received()
        super().close()

    def detach(self) -> int:
        """Detach the descriptor, which no longer wakes the sandbox."""
        self._received()
        return super().detach()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self._received()


def open_stream(link: Link, awake: Awake, port: int, timeout: float) -> Stream:
    """Open a stream to a port inside.

    Args:
        link: the sandbox's.
        awake: what stops the sandbox for idleness.
        port: on 127.0.0.1 inside.
        timeout: seconds to wait for the sandbox's agent.

    Raises:
        ConnectionRefusedError: nobody listens there.
        SandboxDied: the sandbox ended. SandboxTimeout: its agent did not answer in time.
    """
    if not 0 < port < 65536:
        raise ValueError(f"port {port} is not between 1 and 65535")
    with awake.hold(), link.undisturbed():
        connection = link.dial({"op": "tcp", "port": port}, timeout, inside=True)
        try:
            answer = agent.receive_json(connection)
            if answer.get("ok") is not True:
                raise remote_error(answer, f"127.0.0.1:{port} in the sandbox")
            connection.settimeout(None)
            return Stream(connection, awake)
        except EOFError:
            raise link.lost("while a stream was opened") from None
        except agent.BadFrame as error:
            raise RunscError(f"the sandbox's agent answered nonsense: {error}") from None
        finally:
            connection.close()

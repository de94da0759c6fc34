"""The sockets of the env server: HTTP/1.1 with keep-alive, read by one thread and answered by another.

A thread of its own accepts, reads and parses. What ``quick`` knows is answered right there; everything else goes to a
queue that the main thread works off, which writes the answer to the socket itself: one hand-over per request.
"""

from __future__ import annotations

import functools
import json
import math
import queue
import selectors
import socket
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import NamedTuple

import h11

from prized_gym.wire.codec import Encoded

__all__ = ["Answer", "Job", "Listener"]

_REASONS = {
    200: "OK",
    400: "Bad Request",
    404: "Not Found",
    405: "Method Not Allowed",
    411: "Length Required",
    413: "Content Too Large",
    415: "Unsupported Media Type",
    429: "Too Many Requests",
    431: "Request Header Fields Too Large",
    500: "Internal Server Error",
    501: "Not Implemented",
    503: "Service Unavailable",
}
_MAX_HEAD = 64 << 10
_MAX_CONNECTIONS = 256
_MAX_WAITING = 8
_SEND_SECONDS = 60.0
_LINGER_SECONDS = 10.0
_JOINED = 1 << 16  # bytes up to which an answer is put together: cheaper than pieces of its own
_PIECES = 512  # a system call takes 1024


class Answer(NamedTuple):
    """What a request is answered with."""

    status: int
    body: bytes | Encoded
    content_type: str = "application/msgpack"


class Job(NamedTuple):
    """A request, whole, and the way to answer it, which must be taken exactly once."""

    method: str
    path: str
    content_type: str
    body: bytes
    reply: Callable[[Answer], None]


def plain_error(status: int, message: str) -> Answer:
    """An error in the sockets' own words, for whoever reads it without a decoder."""
    return Answer(status, json.dumps({"error": message}).encode(), "application/json")


class _Refused(Exception):
    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class _Head(NamedTuple):
    """What the head of a request says."""

    method: str
    path: str
    content_type: str
    size: int
    last: bool  # the client wants the connection closed afterwards
    expects: bool  # the client waits for a word before it sends the body


@functools.lru_cache(maxsize=64)
def _head(data: bytes) -> _Head:
    """The head in ``data``, which ends with its empty line. One client's steps have the same again and again.

    h11 is given no body: it would take up the next request only once the answer has gone through it, and another thread
    sends that.

    Raises:
        _Refused: it is none.
    """
    parser = h11.Connection(h11.SERVER, max_incomplete_event_size=len(data))
    try:
        parser.receive_data(data)
        head = parser.next_event()
    except h11.RemoteProtocolError as error:
        raise _Refused(error.error_status_hint, f"this is no HTTP/1.1 request: {error}") from None
    if not isinstance(head, h11.Request) or parser.trailing_data[0] or head.http_version not in (b"1.0", b"1.1"):
        raise _Refused(400, "this is no HTTP/1.1 request")
    headers = {name: value.decode("latin-1") for name, value in head.headers}
    if b"transfer-encoding" in headers:
        raise _Refused(411, "send a Content-Length: chunked bodies are not read")
    wish = headers.get(b"connection", "").lower()
    return _Head(
        head.method.decode("ascii"),
        head.target.decode("latin-1").partition("?")[0],
        headers.get(b"content-type", "").partition(";")[0].strip().lower(),
        int(headers.get(b"content-length", "0")),
        "close" in wish or (head.http_version == b"1.0" and "keep-alive" not in wish),
        parser.they_are_waiting_for_100_continue,
    )


class _Connection:
    """One client. Only the listener's thread reads, and only it closes a socket that it still watches."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.buffer = bytearray()
        self.lock = threading.Lock()
        self.waiting = 0
        self.gone = False  # the client ended its side while an answer was owed
        self.discard_until: float | None = None  # refused: what still comes is thrown away until then
        self.continued = False

    def send(self, answer: Answer, last: bool) -> None:
        body = answer.body
        pieces: Sequence[bytes | memoryview] = body.parts if isinstance(body, Encoded) else (body,)
        size = body.size if isinstance(body, Encoded) else len(body)
        head = (
            f"HTTP/1.1 {answer.status} {_REASONS.get(answer.status, 'Unknown')}\r\n"
            f"Content-Type: {answer.content_type}\r\nContent-Length: {size}\r\n"
            f"Connection: {'close' if last else 'keep-alive'}\r\n\r\n"
        ).encode("ascii")
        if size < _JOINED:
            self.sock.sendall(b"".join((head, *pieces)))
        else:
            self.send_pieces([memoryview(piece) for piece in (head, *pieces) if len(piece)])

    def send_pieces(self, pieces: list[memoryview]) -> None:
        ends = time.monotonic() + _SEND_SECONDS
        first = 0
        while first < len(pieces):
            if time.monotonic() > ends:
                raise TimeoutError("the client does not read")
            sent = self.sock.sendmsg(pieces[first : first + _PIECES])
            while first < len(pieces) and sent >= len(pieces[first]):
                sent -= len(pieces[first])
                first += 1
            if sent:
                pieces[first] = pieces[first][sent:]

    def reply(self, answer: Answer, last: bool) -> None:
        """Answer from the main thread."""
        try:
            self.send(answer, last)
        except OSError:  # the client has gone away, or has not read for a minute
            last = True
        with self.lock:
            self.waiting -= 1
            if self.gone and not self.waiting:
                self.sock.close()
            elif last and not self.gone:
                self.shutdown()

    def shutdown(self) -> None:
        # Only this wakes the listener's thread, which then closes: closing here could free the number of a socket that
        # it still watches.
        try:
            self.sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass


class Listener(threading.Thread):
    """Listens at an address and puts each request into ``jobs``.

    Args:
        address: host and port; port 0 takes a free one.
        quick: asked on this thread with a method and a path; None sends the request to ``jobs``.
        max_body: the most bytes a request's body may have.

    Raises:
        OSError: the address cannot be listened at.
    """

    def __init__(self, address: tuple[str, int], quick: Callable[[str, str], Answer | None], max_body: int) -> None:
        super().__init__(name="prized_gym-listener", daemon=True)
        family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self.server = socket.create_server(address, family=family, backlog=128)
        self.server.setblocking(False)
        self.port: int = self.server.getsockname()[1]
        self.jobs: queue.SimpleQueue[Job] = queue.SimpleQueue()
        self.quick, self.max_body = quick, max_body
        self.selector = selectors.DefaultSelector()
        self.selector.register(self.server, selectors.EVENT_READ)
        self.connections: set[_Connection] = set()
        self.discarding: set[_Connection] = set()

    def run(self) -> None:
        """Serve until the process ends."""
        while True:
            for key, _ in self.selector.select(1.0 if self.discarding else None):
                if key.data is None:
                    self.accept()
                else:
                    self.readable(key.data)
            for connection in [each for each in self.discarding if (each.discard_until or 0.0) < time.monotonic()]:
                self.drop(connection)

    def accept(self) -> None:
        """Take a new connection."""
        try:
            sock, _ = self.server.accept()
        except OSError:  # it has gone again
            return
        if len(self.connections) >= _MAX_CONNECTIONS:
            sock.close()
            return
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.settimeout(_SEND_SECONDS)
        connection = _Connection(sock)
        self.connections.add(connection)
        self.selector.register(sock, selectors.EVENT_READ, connection)

    def readable(self, connection: _Connection) -> None:
        """Read what a client has sent."""
        try:
            data = connection.sock.recv(1 << 18)
        except OSError:
            data = b""
        if not data:
            self.drop(connection)
        elif connection.discard_until is None:
            connection.buffer += data
            try:
                while self.request(connection):
                    pass
            except _Refused as refused:
                self.refuse(connection, plain_error(refused.status, str(refused)))
            except OSError:
                self.drop(connection)
            except Exception:  # out of memory, say: this thread must outlive whatever one client sends
                traceback.print_exc()
                self.drop(connection)

    def drop(self, connection: _Connection) -> None:
        """Stop watching a connection, and close it unless an answer is owed."""
        self.selector.unregister(connection.sock)
        self.connections.discard(connection)
        self.discarding.discard(connection)
        with connection.lock:
            connection.gone = True
            if not connection.waiting:
                connection.sock.close()

    def refuse(self, connection: _Connection, answer: Answer) -> None:
        """Answer, and read on for a while: closing on a client that still sends would cost it the answer."""
        connection.buffer.clear()
        with connection.lock:
            owed = connection.waiting
        try:
            if not owed:
                connection.send(answer, last=True)
                connection.sock.shutdown(socket.SHUT_WR)
        except OSError:
            owed = 1
        if owed:
            self.drop(connection)
            return
        connection.discard_until = time.monotonic() + _LINGER_SECONDS
        self.discarding.add(connection)

    def request(self, connection: _Connection) -> bool:
        """Take one request off the buffer; False if it has not come whole."""
        buffer = connection.buffer
        start = buffer.find(b"\r\n\r\n", 0, _MAX_HEAD + 4) + 4
        if start < 4:
            if len(buffer) > _MAX_HEAD:
                raise _Refused(431, f"the head of a request may have {_MAX_HEAD} bytes")
            return False
        head = _head(bytes(buffer[:start]))
        if head.size > self.max_body:
            raise _Refused(413, f"a body of {head.size} bytes is over the limit of {self.max_body}")
        end = start + head.size
        with connection.lock:
            waiting = connection.waiting
        if len(buffer) < end:
            # Not into the midst of an answer that is owed: a client that waits for the word does not do so for ever.
            if head.expects and not connection.continued and not waiting:
                connection.continued = True
                connection.sock.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
            return False
        body = bytes(memoryview(buffer)[start:end])
        del buffer[:end]
        connection.continued = False
        if waiting >= _MAX_WAITING:
            raise _Refused(429, f"at most {_MAX_WAITING} requests may wait on one connection")
        answer = None if waiting else self.quick(head.method, head.path)
        if answer is not None:
            if head.last:
                self.refuse(connection, answer)
                return False
            connection.send(answer, last=False)
            return True
        with connection.lock:
            connection.waiting += 1
        if head.last:
            # What comes after it is no request.
            buffer.clear()
            connection.discard_until = math.inf
        self.jobs.put(
            Job(head.method, head.path, head.content_type, body, lambda answer: connection.reply(answer, head.last))
        )
        return not head.last

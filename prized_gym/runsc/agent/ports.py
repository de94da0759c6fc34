"""Requests for a TCP stream to a port inside."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterable

from .frames import CHUNK, describe, send_json
from .threads import start


class Ports:
    """The TCP streams between the host and ports inside."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ends: set[socket.socket] = set()  # both of every stream

    def pipe(self, connection: socket.socket, port: int) -> None:
        """Serve a request for a stream to a port on 127.0.0.1."""
        try:
            inner = socket.create_connection(("127.0.0.1", port), timeout=10)
        except OSError as error:
            send_json(connection, describe(error))
            return
        inner.settimeout(None)
        inner.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with self._lock:
            self._ends |= {inner, connection}
        try:
            send_json(connection, {"ok": True})
            other = start(lambda: pump(inner, connection))
            pump(connection, inner)
            other.join()
        finally:
            with self._lock:
                self._ends -= {inner, connection}
            inner.close()

    def cut(self) -> None:
        """End every stream."""
        with self._lock:
            shut_down(self._ends)


def pump(source: socket.socket, target: socket.socket) -> None:
    """Copy bytes one way; an end is passed on, an error ends both ways."""
    try:
        while data := source.recv(CHUNK):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)
    except OSError:
        shut_down((source, target))


def shut_down(connections: Iterable[socket.socket]) -> None:
    """End connections both ways; whoever waits on one notices."""
    for connection in connections:
        try:
            connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass

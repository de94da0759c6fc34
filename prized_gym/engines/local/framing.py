"""Pickled messages, and file descriptors, over a Unix stream socket between processes of one user on one machine.

Both ends run the user's own code, so pickle is as safe here as it is in multiprocessing. Nothing that comes out of a
sandbox travels this way.
"""

from __future__ import annotations

import pickle
import select
import socket
import struct
import time
from typing import Any

from prized_gym import by_value
from prized_gym.engines.local import processes
from prized_gym.errors import PrizedGymError

HEADER = struct.Struct("<Q")
_QUIETLY = getattr(socket, "MSG_NOSIGNAL", 0)
"""A program that has given SIGPIPE its default back is not ended by a copy that has died."""
MAX_FDS = 240
"""Linux carries at most 253 descriptors in one message."""


class Hangup(PrizedGymError, EOFError):
    """The other end closed its socket."""


def dumps(obj: Any, known: set[str] | None = None) -> bytes:
    """Pickle ``obj``: quickly if it can be pickled by reference, by value if not.

    Args:
        obj: what to pickle.
        known: for a reader below this process, which has of this process's ``__main__`` only what it was sent: the keys of
            that, to which those sent with this pickle are added. None: the reader is the process that runs the script.
    """
    try:
        data = pickle.dumps(obj, protocol=5)
    except Exception:
        return by_value.dumps(obj, known)
    return data if known is None or not by_value.concerns(data) else by_value.dumps(obj, known)


def pair() -> tuple[socket.socket, socket.socket]:
    """Two connected sockets.

    Raises:
        PrizedGymError: this process may not have that many files open.
    """
    try:
        return processes.with_enough_files(lambda: socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM))
    except OSError as error:
        raise PrizedGymError(f"no socket to the base process could be made: {processes.explain(error)}") from error


def send(sock: socket.socket, payload: bytes, fds: list[int] | None = None) -> None:
    """Send one message and up to ``MAX_FDS`` descriptors with it.

    Raises:
        Hangup: the other end is closed.
        TimeoutError: the socket's time-out passed.
    """
    data = HEADER.pack(len(payload)) + payload
    try:
        if fds:
            # In one call: an interrupt must not leave the receiver with descriptors and half a message.
            sent = socket.send_fds(sock, [data], fds, _QUIETLY)
            if sent < len(data):
                sock.sendall(data[sent:], _QUIETLY)
        else:
            sock.sendall(data, _QUIETLY)
    except (BrokenPipeError, ConnectionResetError) as error:
        raise Hangup(str(error)) from error


def receive(sock: socket.socket, fds: list[int] | None = None) -> bytes:
    """Receive one message; descriptors that came with it are appended to ``fds``.

    Raises:
        Hangup: the other end is closed.
        TimeoutError: the socket's time-out passed.
    """
    try:
        if fds is None:
            header = sock.recv(HEADER.size)
        else:
            header, got, _, _ = socket.recv_fds(sock, HEADER.size, MAX_FDS)
            fds.extend(got)
        if len(header) < HEADER.size:
            if not header:
                raise Hangup("the other end closed the connection")
            header += _exactly(sock, HEADER.size - len(header))
        (length,) = HEADER.unpack(header)
        return bytes(_exactly(sock, length)) if length else b""
    except ConnectionResetError as error:
        raise Hangup(str(error)) from error


def wait_readable(sock: socket.socket, deadline: float | None) -> bool:
    """Wait until ``sock`` has something to read; False if ``deadline`` (``time.monotonic()``) passed first."""
    poller = select.poll()
    poller.register(sock, select.POLLIN)
    if deadline is None:
        poller.poll()
        return True
    return bool(poller.poll(min(max(0.0, deadline - time.monotonic()), 1e6) * 1000))


def _exactly(sock: socket.socket, length: int) -> bytearray:
    data = bytearray(length)
    view, have = memoryview(data), 0
    while have < length:
        got = sock.recv_into(view[have:])
        if not got:
            raise Hangup("the other end closed the connection in the middle of a message")
        have += got
    return data

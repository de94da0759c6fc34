"""The frames that the agent of a sandbox and the host exchange.

A frame is one byte of kind, four bytes of big-endian length, and the payload:

    J  a JSON object      B  bytes of a file or of a command's input      Z  end of those bytes
    O  output             R  error output                                 D  detached: the rest follows elsewhere
"""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Iterator
from typing import Any, Final

MAX_JSON: Final = 4 << 20
"""Bytes of one JSON frame."""
MAX_DATA: Final = 1 << 20
"""Bytes of one data frame."""
CHUNK: Final = 256 << 10
_HEADER: Final = struct.Struct("!cI")
_KINDS: Final = b"JBZORD"


class BadFrame(Exception):
    """The peer broke the protocol: unknown kind, oversized frame, JSON that is no object."""


def send(connection: socket.socket, kind: bytes, payload: bytes = b"") -> None:
    """Send one frame."""
    if len(payload) < 4096:
        connection.sendall(_HEADER.pack(kind, len(payload)) + payload)
    else:
        connection.sendall(_HEADER.pack(kind, len(payload)))
        connection.sendall(payload)


def send_json(connection: socket.socket, message: dict[str, Any]) -> None:
    """Send one JSON frame."""
    send(connection, b"J", json.dumps(message).encode())


def parse_header(header: bytes) -> tuple[bytes, int]:
    """Read kind and payload length from a five-byte header.

    Raises:
        BadFrame: either is not allowed.
    """
    kind, length = _HEADER.unpack(header)
    if kind not in _KINDS or length > (MAX_JSON if kind == b"J" else MAX_DATA):
        raise BadFrame(f"frame of kind {kind!r} and {length} bytes")
    return kind, length


def parse_json(payload: bytes) -> dict[str, Any]:
    """Read the object in a JSON frame.

    Raises:
        BadFrame: it is none.
    """
    try:
        message = json.loads(payload)
    except (ValueError, RecursionError) as error:
        raise BadFrame(f"JSON frame: {error}") from None
    if not isinstance(message, dict):
        raise BadFrame("JSON frame holds no object")
    return message


def receive_exactly(connection: socket.socket, length: int) -> bytes:
    """Receive ``length`` bytes.

    Raises:
        EOFError: the connection ended before.
    """
    first = connection.recv(length)
    if len(first) == length:
        return first
    data = bytearray(first)
    while len(data) < length:
        piece = connection.recv(min(length - len(data), CHUNK))
        if not piece:
            raise EOFError("the connection ended inside a frame" if data else "the connection ended")
        data += piece
    return bytes(data)


def receive(connection: socket.socket) -> tuple[bytes, bytes]:
    """Receive the next frame: its kind and its payload.

    Raises:
        EOFError: the connection ended. BadFrame: the peer broke the protocol.
    """
    kind, length = parse_header(receive_exactly(connection, _HEADER.size))
    return kind, receive_exactly(connection, length) if length else b""


def receive_json(connection: socket.socket) -> dict[str, Any]:
    """Receive the next frame, which must be JSON.

    Raises:
        EOFError: the connection ended. BadFrame: it is something else.
    """
    kind, payload = receive(connection)
    if kind != b"J":
        raise BadFrame(f"expected JSON, got a frame of kind {kind!r}")
    return parse_json(payload)


def send_bytes(connection: socket.socket, file: Any) -> int:
    """Send what ``file`` (opened in binary) holds as B frames and a Z; return the number of bytes."""
    total = 0
    while piece := file.read(CHUNK):
        send(connection, b"B", piece)
        total += len(piece)
    send(connection, b"Z")
    return total


def receive_bytes(connection: socket.socket) -> Iterator[bytes]:
    """Receive the payloads of B frames up to the Z.

    Raises:
        EOFError: the connection ended. BadFrame: there is a frame of another kind.
    """
    while True:
        kind, payload = receive(connection)
        if kind == b"Z":
            return
        if kind != b"B":
            raise BadFrame(f"expected bytes, got a frame of kind {kind!r}")
        yield payload


def describe(error: BaseException) -> dict[str, Any]:
    """Describe an error as data."""
    number = error.errno if isinstance(error, OSError) else None
    return {"error": type(error).__name__, "errno": number, "message": str(error)[:2000]}

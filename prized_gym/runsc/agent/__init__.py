"""The agent, PID 1 of a sandbox; and the frames it exchanges with the host.

A package of plain standard-library Python. Its files are copied into the root directory of a sandbox, where the bound host
Python runs :func:`~prized_gym.runsc.agent.main.main` with ``-I -S``; the host imports the same files for the frames, so both
ends share one definition. The names below are those of both ends; the other modules are for the inside.

The agent dials out: it connects to the socket the host listens on and sends ``control``; when the host asks for a connection
over it, the agent dials another one for that request. An uncaught error inside would end the sandbox, so every thread
catches everything.
"""

from .frames import (
    CHUNK,
    MAX_DATA,
    MAX_JSON,
    BadFrame,
    parse_header,
    parse_json,
    receive,
    receive_bytes,
    receive_exactly,
    receive_json,
    send,
    send_bytes,
    send_json,
)
from .inside import HOME, MAX_PROCESSES, SOCKET, UID
from .trees import put_tree, send_tree

__all__ = [
    "CHUNK",
    "HOME",
    "MAX_DATA",
    "MAX_JSON",
    "MAX_PROCESSES",
    "SOCKET",
    "UID",
    "BadFrame",
    "parse_header",
    "parse_json",
    "put_tree",
    "receive",
    "receive_bytes",
    "receive_exactly",
    "receive_json",
    "send",
    "send_bytes",
    "send_json",
    "send_tree",
]

"""Commands in a sandbox, followed across the connections that forks cut."""

from __future__ import annotations

import math
import secrets
import select
import socket
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from . import agent
from .agent import BadFrame
from .connection import FrameReader, Link
from .errors import RunscError, SandboxTimeout
from .remote import remote_error

GRACE = 15.0
"""Seconds that the agent gets beyond a command's own time-out."""
MAX_COMMAND = 1 << 20
"""Bytes of arguments and environment."""


@dataclass(frozen=True)
class ExecResult:
    """How a command ended, or that it was started in the background.

    Attributes:
        exit_code: its exit status; 128 + N when signal N ended it, as in a shell; 0 for the background.
        stdout, stderr: what it wrote.
        timed_out: whether it was ended at its time-out.
        truncated: whether ``stdout`` or ``stderr`` was longer than ``max_output``; the end is kept.
        pid: inside the sandbox.
    """

    exit_code: int
    stdout: bytes
    stderr: bytes
    timed_out: bool = False
    truncated: bool = False
    pid: int = 0


class Tail:
    """The last ``limit`` bytes of what is added.

    Attributes:
        truncated: whether more was added.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.pieces: deque[bytes] = deque()
        self.size = 0
        self.truncated = False

    def add(self, data: bytes) -> None:
        """Add bytes at the end."""
        self.pieces.append(data)
        self.size += len(data)
        while self.size > self.limit:
            self.truncated = True
            first = self.pieces.popleft()
            over = self.size - self.limit
            self.size -= min(over, len(first))
            if over < len(first):
                self.pieces.appendleft(first[over:])

    def value(self) -> bytes:
        """Return what is left of it all."""
        return b"".join(self.pieces)


class Command:
    """One command in the foreground, followed across the connections that forks of its sandbox cut.

    Args:
        link: the sandbox's.
        stdin: its input.
        max_output: bytes kept of each output, from its end.
        on_output: called with ``"stdout"`` or ``"stderr"`` and bytes as they come.

    Attributes:
        exit: the agent's message about its end, None until then.
        detached: whether the agent let go of the connection, for a fork.
    """

    def __init__(
        self, link: Link, stdin: bytes, max_output: int, on_output: Callable[[str, bytes], None] | None
    ) -> None:
        self.link = link
        self.number = secrets.token_hex(8)
        self.stdin = memoryview(stdin)
        self.sent = 0
        self.input_ended = False
        self.outputs = {b"O": Tail(max_output), b"R": Tail(max_output)}
        self.on_output = on_output
        self.exit: dict[str, Any] | None = None
        self.detached = False

    def follow(self, connection: socket.socket, reader: FrameReader, ends: Callable[[], float | None]) -> None:
        """Send input and receive output until the command has ended or the agent lets go of the connection.

        Args:
            connection: to the agent, the command's alone.
            reader: of the frames on it.
            ends: gives the ``time.monotonic()`` at which the agent must have ended the command; None for never.

        Raises:
            SandboxTimeout: it has not. BadFrame: the agent broke the protocol. RunscError: the connection was lost.
        """
        connection.setblocking(False)
        pending = memoryview(b"")
        self.detached = False
        while self.exit is None and not self.detached:
            if not pending and not self.input_ended:
                pending = self._next_input()
            poll = select.poll()
            poll.register(connection, select.POLLIN | (select.POLLOUT if pending else 0))
            limit = ends()
            wait = None if limit is None else max(0.0, limit - time.monotonic())
            events = poll.poll(None if wait is None else math.ceil(wait * 1000))
            if not events:
                raise SandboxTimeout("the sandbox's agent did not end the command at its time-out")
            if events[0][1] & select.POLLOUT:
                try:
                    pending = pending[connection.send(pending, socket.MSG_NOSIGNAL) :]
                except BlockingIOError:
                    pass
                except OSError:
                    pending = memoryview(b"")  # the end of the connection is read below
            if events[0][1] & (select.POLLIN | select.POLLHUP | select.POLLERR):
                try:
                    data = connection.recv(agent.CHUNK)
                except BlockingIOError:
                    continue
                except OSError:
                    data = b""
                if not data:
                    raise self.link.lost("during a command")
                for kind, payload in reader.feed(data):
                    self._frame(kind, payload)

    def _next_input(self) -> memoryview:
        """Take the next frame of the command's input.

        Its bytes count as sent; an agent that lets go of the connection reports how many it received.
        """
        piece = self.stdin[self.sent : self.sent + agent.CHUNK]
        self.sent += len(piece)
        if piece:
            return memoryview(b"B" + len(piece).to_bytes(4, "big") + piece)
        self.input_ended = True
        return memoryview(b"Z\0\0\0\0")

    def _frame(self, kind: bytes, payload: bytes) -> None:
        if kind in self.outputs:
            self.outputs[kind].add(payload)
            if self.on_output is not None:
                self.on_output("stdout" if kind == b"O" else "stderr", payload)
        elif kind == b"D":
            received = agent.parse_json(payload).get("stdin")
            if not isinstance(received, int) or not 0 <= received <= len(self.stdin):
                raise BadFrame(f"received {received!r} bytes of input")
            self.sent, self.input_ended, self.detached = received, False, True
        elif kind == b"J":
            message = agent.parse_json(payload)
            if "exit" not in message:
                raise remote_error(message, "the command")
            self.exit = message
        else:
            raise BadFrame(f"frame of kind {kind!r} from a command")


def execute(
    link: Link,
    request: dict[str, Any],
    *,
    stdin: bytes,
    on_output: Callable[[str, bytes], None] | None,
    max_output: int,
    stopped: Callable[[], bool],
) -> ExecResult:
    """Run the command of a request and wait for its end.

    Args:
        link: the sandbox's.
        request: for the agent: ``argv``, ``env``, ``cwd``, ``user``, ``background`` and ``timeout``.
        stdin: the command's input.
        on_output: called with ``"stdout"`` or ``"stderr"`` and bytes as they come, in this thread.
        max_output: bytes kept of each output, from its end.
        stopped: whether the sandbox is paused, when no time-out applies.

    Raises:
        ValueError: arguments and environment are too long.
        OSError: the command cannot be started.
        SandboxDied: the sandbox ended. SandboxTimeout: its agent did not end the command at its time-out.
        RunscError: the agent broke the protocol, or the connection was lost.
    """
    if (
        sum(len(word) for word in request["argv"]) + sum(len(key) + len(value) for key, value in request["env"].items())
        > MAX_COMMAND
    ):
        raise ValueError(
            f"a command's arguments and environment may hold {MAX_COMMAND} characters; give more through stdin or a file"
        )
    command = Command(link, stdin, max_output, on_output)
    request = {**request, "op": "exec", "job": command.number}
    timeout: float | None = request["timeout"]
    limit = None if timeout is None else time.monotonic() + timeout + GRACE
    pid = 0
    link.jobs.add(command.number)
    try:
        with link.undisturbed():
            connection = link.dial(request, inside=True)
            try:
                answer = agent.receive_json(connection)
            except BaseException:
                connection.close()
                raise
        try:
            given = answer.get("pid")
            if not isinstance(given, int):
                raise remote_error(answer, f"cannot run {request['argv'][0]!r}")
            pid = given
            if request["background"]:
                return ExecResult(0, b"", b"", pid=pid)
            command.follow(connection, FrameReader(), lambda: None if limit is None or stopped() else limit)
        finally:
            connection.close()
        while command.exit is None:  # a fork cut the connection; the command went on
            connection = link.dial({"op": "attach", "job": command.number})
            try:
                command.follow(connection, FrameReader(), lambda: None if limit is None or stopped() else limit)
            finally:
                connection.close()
    except (EOFError, ConnectionError):
        raise link.lost("during a command") from None
    except BadFrame as error:
        raise RunscError(f"the sandbox's agent answered nonsense: {error}") from None
    finally:
        link.jobs.discard(command.number)
    code = command.exit["exit"]
    if not isinstance(code, int) or not 0 <= code < 256:
        raise RunscError(f"the sandbox's agent answered nonsense: exit {code!r}")
    out, err = command.outputs[b"O"], command.outputs[b"R"]
    return ExecResult(
        code, out.value(), err.value(), command.exit.get("timed_out") is True, out.truncated or err.truncated, pid
    )

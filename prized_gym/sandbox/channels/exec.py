"""Requests through commands inside a sandbox, to the exec proxy there (``prized_gym.server.exec_proxy``)."""

from __future__ import annotations

import asyncio
import base64
import binascii
import json
import secrets
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Protocol, get_args

from prized_gym import background
from prized_gym.protocols import Request, Response
from prized_gym.sandbox.channels.channel import Channel, ChannelError, ErrorKind, name_of
from prized_gym.server.exec_proxy import PRINTED

LANES = 2
_ARGUMENT = 90_000
"""Characters of a request that fit into an argument (Linux takes 128 KiB); a longer one goes through a file."""
_GRACE = 5.0


class CommandResult(Protocol):
    """How a command ended."""

    @property
    def exit_code(self) -> int:
        """Its exit status; 128 and the signal's number where one ended it."""

    @property
    def stdout(self) -> str:
        """What it wrote to standard output."""

    @property
    def stderr(self) -> str:
        """What it wrote to standard error."""

    @property
    def timed_out(self) -> bool:
        """Whether it was ended because it took too long."""


class Commands(Protocol):
    """What the channel needs of a sandbox. All of it may block."""

    def run(self, argv: Sequence[str], timeout: float, max_output: int) -> CommandResult:
        """Run a command of a few words to its end."""

    def write(self, path: str, data: bytes) -> None:
        """Write a file."""

    def read(self, path: str, max_bytes: int) -> bytes:
        """Read a file; an error beyond ``max_bytes``."""


class ExecChannel(Channel):
    """A server reached by commands.

    Args:
        commands: runs them.
        directory: where the exec proxy was told to work.
        submit: has a function called in a thread, once it is its turn.
    """

    def __init__(
        self,
        commands: Commands,
        directory: str,
        submit: Callable[[Callable[[], Response]], Future[Response]] = background.submit,
    ) -> None:
        self._submit = submit
        self._commands = commands
        self._directory = directory
        self._free: asyncio.LifoQueue[int] = asyncio.LifoQueue()
        for lane in reversed(range(LANES)):
            self._free.put_nowait(lane)
        self._waited = [0.0] * LANES
        self._waiting: dict[int, float] = {}

    @property
    def waited(self) -> float:
        now = time.monotonic()
        return sum(self._waited) + sum(now - since for since in list(self._waiting.values()))

    async def ask(self, request: Request, *, limit: int, timeout: float) -> Response:
        try:
            lane = await asyncio.wait_for(self._free.get(), timeout)
        except (TimeoutError, asyncio.TimeoutError):
            raise ChannelError("timeout", f"{name_of(request)}: no lane was free within {timeout:g} s") from None
        loop = asyncio.get_running_loop()
        self._waiting[lane] = time.monotonic()

        def in_turn() -> Response:
            self._waited[lane] += time.monotonic() - self._waiting.pop(lane)
            return self._ask(lane, request, limit, timeout)

        call = self._submit(in_turn)
        # Not before the command has ended, even where nobody waits for it any more.
        call.add_done_callback(lambda _: loop.call_soon_threadsafe(self._release, lane))
        return await asyncio.wrap_future(call)

    def _release(self, lane: int) -> None:
        # Given up before it was its turn.
        self._waiting.pop(lane, None)
        self._free.put_nowait(lane)

    async def reach(self, timeout: float) -> None:
        # the exec proxy knows this one: it only connects.
        await self.ask(Request("CONNECT", "/"), limit=0, timeout=timeout)

    def _ask(self, lane: int, request: Request, limit: int, timeout: float) -> Response:
        what = name_of(request)
        number = secrets.token_hex(4)
        path = f"{self._directory}/{lane}"
        head = {
            "method": request.method,
            "path": request.path,
            "headers": dict(request.headers),
            "timeout": timeout,
            "limit": limit,
            "again": request.method in ("GET", "HEAD"),
        }
        data = json.dumps(head).encode() + b"\n" + request.body
        if len(data) * 4 // 3 > _ARGUMENT:
            self._commands.write(f"{path}.request", data)
            payload = f"@{path}.request"
        else:
            payload = base64.b64encode(data).decode()
        result = self._commands.run(
            [f"{self._directory}/call", f"{path}.in", f"{path}.out", f"{path}.answer", f"{number} {payload}\n"],
            timeout + _GRACE,
            2 * PRINTED + 1000,
        )
        if result.timed_out:
            raise ChannelError("timeout", f"{what}: no answer within {timeout:g} s")
        if result.exit_code != 0:
            raise ChannelError(
                "closed", f"{what}: the command ended with {result.exit_code}: {result.stderr[-500:].strip()}"
            )
        answered, _, text = result.stdout.strip().partition(" ")
        if answered != number:
            raise ChannelError("garbage", f"{what}: the command printed {result.stdout[:100]!r}")
        if text.startswith("@"):
            # The file's name is known; what the sandbox says of it is not needed.
            raw = self._commands.read(f"{path}.body", limit + (64 << 10))
        else:
            try:
                raw = base64.b64decode(text, validate=True)
            except binascii.Error as error:
                raise ChannelError("garbage", f"{what}: the command printed no base64 ({error})") from None
        return _response(raw, what, limit, timeout)

    def close(self) -> None:
        """Nothing is held between requests."""


def _response(raw: bytes, what: str, limit: int, timeout: float) -> Response:
    head, _, body = raw.partition(b"\n")
    if len(head) > 64 << 10:
        raise ChannelError("garbage", f"{what}: the head of the answer has {len(head)} bytes")
    try:
        fields: Any = json.loads(head)
        if "kind" in fields:
            kind: ErrorKind = fields["kind"] if fields["kind"] in get_args(ErrorKind) else "garbage"
            meaning = _MEANING[kind].format(limit=limit, timeout=timeout)
            raise ChannelError(kind, f"{what}: {meaning}. {str(fields.get('message', ''))[:500]}".rstrip())
        status = fields["status"]
        headers = {str(name).lower(): str(value) for name, value in fields["headers"]}
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ChannelError("garbage", f"{what}: the head of the answer cannot be read ({error!r:.200})") from None
    if not isinstance(status, int) or not 100 <= status < 1000:
        raise ChannelError("garbage", f"{what}: the answer has the status {status!r:.100}")
    if len(body) > limit:
        raise ChannelError("large", f"{what}: the answer has more than the {limit} bytes that may be read")
    return Response(status, headers, body, what)


_MEANING: dict[ErrorKind, str] = {
    "refused": "nobody listens",
    "closed": "the connection was closed before the answer was complete",
    "timeout": "no answer within {timeout:g} s",
    "garbage": "the answer is no HTTP",
    "large": "the answer has more than the {limit} bytes that may be read",
}

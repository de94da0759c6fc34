"""Why a copy in a sandbox failed: from what went wrong on the way to a `Failure` that says what happened inside."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
import traceback
from dataclasses import dataclass

from prized_gym import background
from prized_gym.errors import SandboxDiedError, SandboxError
from prized_gym.interface.failure import Failure, FailureKind
from prized_gym.protocols import ProtocolError, RemoteError, UnsupportedError
from prized_gym.sandbox.channels.channel import ChannelError
from prized_gym.sandbox.client import Client
from prized_gym.sandbox.driver import Sandbox
from prized_gym.wire.errors import WireError

TAIL = 4096
_LOOK = 5.0
_DEATH = 2.0
_WATCH_EVERY = 0.5

_LOOK_SCRIPT = (
    'if [ "$1" = wait ]; then for i in 1 2 3 4 5 6 7 8; do [ -e "$0/exit" ] && break; sleep 0.05; done; fi; '
    '{ cat "$0/exit" 2>/dev/null || echo; } | head -n 1; tail -c 4096 "$0/server.log" 2>/dev/null'
)


@dataclass(frozen=True)
class Inside:
    """What a look into a sandbox found.

    Attributes:
        exit_code: of its server; None while it runs, or where that cannot be told.
        log: the tail of what the server wrote.
    """

    exit_code: int | None = None
    log: str = ""


def look(sandbox: Sandbox, ended: bool = False, timeout: float = _LOOK) -> Inside:
    """Look into a sandbox; what cannot be found out is left empty. Blocks.

    Args:
        sandbox: to look into.
        timeout: seconds it may take.
        ended: the server is believed to have ended: give its exit code a moment to be written.
    """
    try:
        result = sandbox.urgent.exec(
            ["/bin/sh", "-c", _LOOK_SCRIPT, sandbox.scratch, "wait" if ended else "-"],
            timeout=timeout,
            max_output=2 * TAIL,
        )
    except (SandboxError, OSError):
        return Inside()
    first, _, log = result.stdout.partition("\n")
    return Inside(int(first) if first.isdecimal() and len(first) < 5 else None, log[-TAIL:])


def describe_code(code: int) -> str:
    """Put an exit code as a shell gives it in words: ``"exited with code 7"``, ``"was killed by SIGKILL"``."""
    if code > 128:
        with contextlib.suppress(ValueError):
            return f"was killed by {signal.Signals(code - 128).name}"
    return f"exited with code {code}"


class Watch:
    """Whether waiting for a server is in vain, looked at now and then. Called in the loop's thread, so never blocks."""

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox
        self._looked_at = time.monotonic()
        self._ended = False

    def __call__(self) -> bool:
        if self._sandbox.death is not None:
            return True
        if time.monotonic() - self._looked_at > _WATCH_EVERY:
            self._looked_at = time.monotonic()
            background.submit(self._look, urgent=True)
        return self._ended

    def _look(self) -> None:
        if look(self._sandbox).exit_code is not None:
            self._ended = True


def said_by(error: BaseException) -> str:
    """What an error says, and whether what was asked of a provider was done all the same."""
    happened = error.happened if isinstance(error, SandboxError) else None
    return str(error) if happened is None else f"{error} (it {happened})"


async def explain(index: int, sandbox: Sandbox, error: BaseException) -> Failure:
    """Find the failure of copy ``index`` that ``error`` is a sign of."""
    where = f"sandbox {sandbox.id}"
    if isinstance(error, RemoteError):
        return await _raised(index, where, sandbox, error)
    kind: FailureKind = "raised"
    if isinstance(error, ChannelError) and error.kind == "timeout":
        stacked = await background.in_thread(lambda: look(sandbox, timeout=2.0), urgent=True)
        return Failure(index, where, "timeout", f"gave no answer in time: {error}", stderr=stacked.log)
    if isinstance(error, (ChannelError, SandboxError)):
        lost = not isinstance(error, ChannelError) or error.kind in ("refused", "closed")
        # A connection ends a moment before the news of the sandbox's death comes.
        death = await _death(sandbox, _DEATH if isinstance(error, SandboxDiedError) else 0.25 if lost else 0.0)
        if death is None and sandbox.expires is not None and sandbox.expires <= time.time():
            death = "its lifetime at the provider is over"
        if death is not None:
            return Failure(index, where, "died", f"ended: {death}")
        inside = await background.in_thread(lambda: look(sandbox, ended=lost), urgent=True)
        if lost and inside.exit_code is not None:
            reason = f"lost its server, which {describe_code(inside.exit_code)}"
            return Failure(index, where, "died", reason, stderr=inside.log)
        if lost:
            return Failure(index, where, "unreachable", f"cannot be reached: {said_by(error)}", stderr=inside.log)
        return Failure(index, where, kind, f"gave an answer that is not allowed: {error}", stderr=inside.log)
    if isinstance(error, UnsupportedError):
        return Failure(index, where, kind, f"was not asked: {error}", exception=error)
    if isinstance(error, (ProtocolError, WireError)):
        inside = await background.in_thread(lambda: look(sandbox), urgent=True)
        return Failure(index, where, kind, f"gave an answer that is not allowed: {error}", stderr=inside.log)
    # What was asked of it could not be sent, or a protocol of the user's own raised.
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    summary = traceback.format_exception_only(type(error), error)[-1].strip()
    exception = error if isinstance(error, Exception) else None
    return Failure(index, where, kind, f"met {summary}", traceback=text, exception=exception)


async def _raised(index: int, where: str, sandbox: Sandbox, error: RemoteError) -> Failure:
    log = (await background.in_thread(lambda: look(sandbox), urgent=True)).log
    if error.type_name == "SystemExit":
        code = error.arguments[0] if error.arguments else None
        reason = f"called sys.exit({code!r:.200})"
        return Failure(index, where, "exited", reason, stderr=log, traceback=error.traceback)
    original = error.original()
    name = error.type_name.rpartition(".")[2] if original is not error else error.type_name
    reason = f"raised {name}: {error.message}".partition("\n")[0][:2000]
    return Failure(
        index,
        where,
        "raised",
        reason,
        stderr=log,
        traceback=error.traceback,
        exception=None if original is error else original,
    )


async def _death(sandbox: Sandbox, patience: float) -> str | None:
    if sandbox.death is not None or patience <= 0:
        return sandbox.death
    return await asyncio.shield(background.in_thread(lambda: sandbox.wait_dead(patience), urgent=True))


async def last_words(sandbox: Sandbox, client: Client, timeout: float) -> tuple[str, str]:
    """Find the stack in which a copy hangs, and the end of its server's log; empty where they cannot be had in time."""

    async def stack() -> str:
        try:
            # It may have to wait for a thread, or for a turn.
            return await asyncio.wait_for(client.stack(timeout), 1.5 * timeout)
        except Exception:
            return ""

    async def log() -> str:
        return (await background.in_thread(lambda: look(sandbox, timeout=timeout), urgent=True)).log

    text, tail = await asyncio.gather(stack(), log())
    return text, tail

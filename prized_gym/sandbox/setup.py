"""Setting a base up: files, commands, its server."""

from __future__ import annotations

import codecs
import contextlib
import shlex
import sys
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import TimeoutError as FutureTimeout
from pathlib import Path
from typing import TypeVar

from prized_gym import background
from prized_gym.errors import RemoteTraceback, SandboxError, SetupError, SetupTimeoutError
from prized_gym.progress import waiting
from prized_gym.protocols import GymProtocol, ProtocolError, RemoteError, Response, drive
from prized_gym.sandbox import bundle
from prized_gym.sandbox.channels.exec import LANES
from prized_gym.sandbox.client import Client
from prized_gym.sandbox.driver import Sandbox
from prized_gym.sandbox.failures import Watch, describe_code, look
from prized_gym.sandbox.plan import Plan, start_command
from prized_gym.server import exec_proxy

_T = TypeVar("_T")
_TAIL = 4000
_FOREVER = 7 * 24 * 3600.0


class Setup:
    """Sets one base up, within a time limit.

    Args:
        timeout: seconds it may take in all; None for no limit.
        progress: show a progress bar.
    """

    def __init__(self, timeout: float | None, progress: bool) -> None:
        self._timeout = timeout
        self._ends = time.monotonic() + (_FOREVER if timeout is None else timeout)
        self._progress = progress

    @property
    def left(self) -> float:
        """Seconds that are left."""
        return max(0.0, self._ends - time.monotonic())

    def wait_for(self, what: str, function: Callable[[], _T], said: Callable[[], str] = str) -> _T:
        """Have a blocking function called in the background, and wait for it with a progress bar.

        Args:
            what: it does, for the progress bar and messages.
            function: to call.
            said: what is added to the message of a time-out.

        Raises:
            SetupTimeoutError: it is not done in time; it goes on until its sandbox is closed.
        """
        future = background.submit(function)
        with waiting(what, self._progress) as tick:
            while True:
                try:
                    return future.result(min(0.2, self.left + 0.001))
                except (TimeoutError, FutureTimeout):
                    if future.done():
                        raise
                    tick()
                    if not self.left:
                        raise SetupTimeoutError(
                            f"the base was not set up within setup_timeout={self._timeout:g} s and has been stopped "
                            f"while {what}{said()}"
                        ) from None

    def prepare(self, sandbox: Sandbox, plan: Plan) -> None:
        """Upload the files, run the commands.

        Raises:
            SetupError: one of them failed.
        """
        for local, remote in plan.upload.items():
            if not Path(local).exists():
                raise SetupError(f"upload: there is no {local!r}")
            try:
                self.wait_for(f"uploading {local}", lambda one=local, other=remote: sandbox.files.upload(one, other))  # type: ignore[misc]
            except (OSError, SandboxError) as error:
                if isinstance(error, SetupTimeoutError):
                    raise
                raise SetupError(f"{local!r} could not be uploaded to {remote!r}: {error}") from error
        for command in plan.setup:
            self._run(sandbox, command)
        if plan.bare and plan.payload is not None:
            # After the commands, which may have installed some of it.
            try:
                self.wait_for("bringing what the server needs", lambda: bundle.bring(sandbox, plan.payload or b""))
            except (OSError, SandboxError) as error:
                if isinstance(error, SetupTimeoutError):
                    raise
                raise SetupError(f"what the server needs could not be brought: {error}") from error

    def _run(self, sandbox: Sandbox, command: str) -> None:
        output = Output()
        what = f"running {_short(command)}"
        try:
            result = self.wait_for(
                what, lambda: sandbox.exec(command, timeout=self.left + 5.0, on_output=output.take), output.end_of_it
            )
        except (OSError, SandboxError) as error:
            if isinstance(error, SetupTimeoutError):
                raise
            raise SetupError(f"setup command {command!r} could not be run: {error}{output.end_of_it()}") from error
        if result.exit_code != 0:
            raise SetupError(f"setup command {command!r} {describe_code(result.exit_code)}{output.end_of_it()}")

    def start(self, sandbox: Sandbox, plan: Plan, client: Client) -> None:
        """Start the server, and the client beside it where requests travel by commands; wait until it is ready.

        Raises:
            SetupError: it ended first; the message has its exit code and the end of its log.
            SetupTimeoutError: it was not ready in time.
        """
        try:
            if plan.payload is not None:
                sandbox.files.write(f"{sandbox.scratch}/payload", plan.payload)
            sandbox.exec(start_command(plan, sandbox.scratch), background=True, timeout=60.0)
            if plan.channel == "exec":
                self._start_exec_proxy(sandbox, plan)
            watch = Watch(sandbox)
            try:
                done = self.wait_for(
                    "waiting for the server to be ready",
                    lambda: background.run(client.wait_ready(plan.ready, self._ends, watch)),
                )
            except SetupTimeoutError:
                done = False
            if done:
                return
            if sandbox.death is not None:
                raise SetupError(f"the sandbox ended while its server started: {sandbox.death}")
            inside = look(sandbox)
            if inside.exit_code is not None:
                if plan.payload is not None:
                    _raise_original(sandbox)
                raise SetupError(f"the server {describe_code(inside.exit_code)} before it was ready{_log(inside.log)}")
            raise SetupTimeoutError(
                f"the server was not ready within setup_timeout={self._timeout:g} s and has been stopped"
                f"{_log(inside.log)}"
            )
        except (OSError, SandboxError) as error:
            if isinstance(error, SetupError):
                raise
            raise SetupError(f"the server could not be started: {error}") from error

    def _start_exec_proxy(self, sandbox: Sandbox, plan: Plan) -> None:
        directory = f"{sandbox.scratch}/exec"
        sandbox.files.write(f"{sandbox.scratch}/exec_proxy.py", Path(exec_proxy.__file__).read_bytes())
        program, log = shlex.quote(f"{sandbox.scratch}/exec_proxy.py"), shlex.quote(f"{sandbox.scratch}/exec_proxy.log")
        sandbox.exec(
            f"exec python3 -S {program} {shlex.quote(directory)} {plan.port} {LANES} >{log} 2>&1 </dev/null",
            background=True,
        )
        ready = shlex.quote(f"{directory}/ready")
        result = sandbox.exec(
            f"for i in $(seq 200); do [ -e {ready} ] && exit 0; sleep 0.05; done; tail -c 2000 {log} >&2; exit 1",
            timeout=30.0,
        )
        if result.exit_code != 0:
            raise SetupError(f"the client inside the sandbox, a python3 program, did not start:\n{result.stderr}")


def _raise_original(sandbox: Sandbox) -> None:
    """Raise what the environment's factory or ``warm_up`` raised, if the server has left word of it and it is known here."""
    try:
        body = sandbox.files.read(f"{sandbox.scratch}/failure", max_bytes=1 << 20)
        drive(GymProtocol().describe(), lambda request: Response(500, {}, body))
    except RemoteError as error:
        original = error.original()
        if original is not error:
            raise original from RemoteTraceback(error.traceback)
    except (OSError, SandboxError, ProtocolError):
        pass


class Output:
    """What a set-up command prints: passed on as it comes, the end of it kept."""

    def __init__(self) -> None:
        self._decoders = {name: codecs.getincrementaldecoder("utf-8")("replace") for name in ("stdout", "stderr")}
        self._tail: deque[str] = deque()
        self._kept = 0

    def take(self, name: str, data: bytes) -> None:
        """Pass on bytes of ``"stdout"`` or ``"stderr"``."""
        text = self._decoders[name].decode(data)
        self._tail.append(text)
        self._kept += len(text)
        while self._kept - len(self._tail[0]) >= _TAIL:
            self._kept -= len(self._tail.popleft())
        _show(name, text)

    def end_of_it(self) -> str:
        """The end of what was printed, for a message; empty if nothing was."""
        return _log("".join(self._tail), "output")


def _show(name: str, text: str) -> None:
    from tqdm import tqdm

    target = sys.stdout if name == "stdout" else sys.stderr
    # A closed or replaced stream, in a notebook or under a test runner, must not end a set-up.
    with contextlib.suppress(OSError, ValueError, AttributeError), tqdm.external_write_mode(file=target):
        target.write(text)
        target.flush()


def _log(text: str, what: str = "log") -> str:
    return f"\n--- end of its {what}:\n{text[-_TAIL:].strip()}" if text.strip() else ""


def _short(command: str) -> str:
    line = command.strip().splitlines()[0] if command.strip() else command
    return line if len(line) <= 60 else line[:57] + "..."

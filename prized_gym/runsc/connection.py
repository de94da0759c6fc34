"""Connections from the agent of a sandbox, which dials our socket: once to be controlled, and once for every request.

One background thread, the hub, accepts connections for all sandboxes of this process and reads their first frames, all of
which are untrusted: bounded, checked, and never more than data.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from pathlib import Path
from typing import Any

from . import agent
from .agent import BadFrame
from .errors import RunscError, SandboxDied, SandboxTimeout

MAX_HALF_OPEN = 128
"""Connections of one sandbox that have not said yet what they are."""
MAX_FAULTS = 20
"""Breaches of the protocol before a sandbox is ended."""
LOST_AFTER = 10.0
"""Seconds without an agent before a sandbox is ended."""
_HELLO_LIMIT = 512
"""Bytes of a first frame."""


class FrameReader:
    """Frames out of bytes that arrive in pieces.

    Args:
        limit: bytes that the payload of one frame may have.
    """

    def __init__(self, limit: int = agent.MAX_JSON) -> None:
        self.buffer = bytearray()
        self.limit = limit

    def feed(self, data: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Yield the frames that are complete after ``data``.

        Raises:
            BadFrame: a header is not allowed.
        """
        self.buffer += data
        while len(self.buffer) >= 5:
            kind, length = agent.parse_header(bytes(self.buffer[:5]))
            if length > self.limit:
                raise BadFrame(f"frame of {length} bytes where {self.limit} are allowed")
            if len(self.buffer) < 5 + length:
                return
            payload = bytes(self.buffer[5 : 5 + length])
            del self.buffer[: 5 + length]
            yield kind, payload


class Hub:
    """The one thread that waits for messages of all sandboxes and of the supervisor.

    Attributes:
        selector: what it waits for; used in its thread only.
        ticks: functions called regularly with ``time.monotonic()``; each gives the seconds after which to call it again, or
            None where there is nothing to watch.
    """

    def __init__(self) -> None:
        self.selector = selectors.DefaultSelector()
        self.calls: deque[Callable[[], None]] = deque()
        self.ticks: dict[Any, Callable[[float], float | None]] = {}
        self._wake_read, self._wake_write = socket.socketpair()
        for end in (self._wake_read, self._wake_write):
            end.setblocking(False)
        self.selector.register(self._wake_read, selectors.EVENT_READ, self._awoken)
        self.over = False
        self.thread = threading.Thread(target=self._run, name="prized_gym-runsc", daemon=True)
        self.thread.start()

    def call(self, function: Callable[[], None]) -> None:
        """Run a function in the hub's thread, soon."""
        self.calls.append(function)
        self.poke()

    def call_and_wait(self, function: Callable[[], None]) -> None:
        """Run a function in the hub's thread and wait for it."""
        if threading.current_thread() is self.thread:
            function()
            return
        done: Future[None] = Future()

        def run() -> None:
            try:
                function()
                done.set_result(None)
            except BaseException as error:
                done.set_exception(error)

        self.call(run)
        done.result(30)

    def poke(self) -> None:
        """Wake the hub up, to call its ticks again."""
        with contextlib.suppress(OSError):
            self._wake_write.send(b"\0")

    def stop(self) -> None:
        """End the thread and wait for its end."""
        self.over = True
        self.poke()
        if threading.current_thread() is not self.thread:
            self.thread.join(5)

    def forget(self, connection: socket.socket) -> None:
        """Stop watching a connection; in the hub's thread."""
        with contextlib.suppress(KeyError, ValueError):
            self.selector.unregister(connection)

    def _awoken(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._wake_read.recv(4096)

    def _run(self) -> None:
        while not self.over:
            now = time.monotonic()
            waits = [wait for tick in list(self.ticks.values()) if (wait := tick(now)) is not None]
            try:
                ready = self.selector.select(min(waits) if waits else None)
            except OSError:
                continue
            for key, _ in ready:
                with contextlib.suppress(Exception):  # one sandbox's trouble is not another's
                    key.data()
            while self.calls:
                with contextlib.suppress(Exception):
                    self.calls.popleft()()
        self.selector.close()
        self._wake_read.close()
        self._wake_write.close()


class Link:
    """The connections of one sandbox.

    Args:
        hub: what accepts them.
        path: host path of the socket that its agent dials.
        give_up: called in the hub's thread with a reason when the sandbox must be ended.

    Attributes:
        death: why the sandbox ended; None while it has not.
        jobs: the numbers of commands that somebody follows.
    """

    def __init__(self, hub: Hub, path: Path, give_up: Callable[[str], None]) -> None:
        self.hub = hub
        self.path = path
        self.give_up = give_up
        self.death: str | None = None
        self.jobs: set[str] = set()
        self._listener: socket.socket | None = None
        self._control: socket.socket | None = None
        self._reader = FrameReader(_HELLO_LIMIT)
        self._half_open: dict[socket.socket, float] = {}
        self._waiting: dict[str, Future[socket.socket]] = {}
        self._changed = threading.Condition()
        self._sending = threading.Lock()
        self._quiet = False
        self._faults = 0
        self._lost_at: float | None = None
        self._gate = Gate()

    # -- in the hub's thread

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return
        if len(self._half_open) >= MAX_HALF_OPEN:
            connection.close()
            self._fault()
            return
        connection.setblocking(False)
        self._half_open[connection] = time.monotonic()
        reader = FrameReader(_HELLO_LIMIT)
        self.hub.selector.register(connection, selectors.EVENT_READ, lambda: self._hello(connection, reader))

    def _hello(self, connection: socket.socket, reader: FrameReader) -> None:
        try:
            data = connection.recv(_HELLO_LIMIT)
            if not data:
                raise EOFError
            for kind, payload in reader.feed(data):
                hello = agent.parse_json(payload) if kind == b"J" else {}
                if reader.buffer:
                    raise BadFrame("more than a hello, before anything was asked")
                self._half_open.pop(connection, None)
                self.hub.forget(connection)
                if hello.get("hello") == "control":
                    self._take_control(connection)
                else:
                    self._take_stream(connection, str(hello.get("number")))
                return
        except BlockingIOError:
            return
        except (OSError, EOFError, BadFrame) as error:
            self._half_open.pop(connection, None)
            self.hub.forget(connection)
            connection.close()
            if isinstance(error, BadFrame):
                self._fault()

    def _take_control(self, connection: socket.socket) -> None:
        self._drop_control()
        try:
            agent.send_json(connection, {"jobs": sorted(self.jobs)})
        except OSError:
            connection.close()
            return
        self._reader = FrameReader(_HELLO_LIMIT)
        self.hub.selector.register(connection, selectors.EVENT_READ, lambda: self._listen_to_control(connection))
        with self._changed:
            self._control, self._quiet, self._lost_at = connection, False, None
            self._changed.notify_all()

    def _take_stream(self, connection: socket.socket, number: str) -> None:
        waiting = self._waiting.pop(number, None)
        if waiting is None or not waiting.set_running_or_notify_cancel():
            connection.close()
            if waiting is None:
                self._fault()
            return
        waiting.set_result(connection)

    def _listen_to_control(self, connection: socket.socket) -> None:
        try:
            data = connection.recv(_HELLO_LIMIT)
            if not data:
                raise EOFError
            for kind, payload in self._reader.feed(data):
                if kind == b"J" and agent.parse_json(payload).get("quiet") is True:
                    self._quiet = True
                else:
                    raise BadFrame("unexpected word from the agent")
        except BlockingIOError:
            return
        except (OSError, EOFError, BadFrame) as error:
            self._drop_control()
            if isinstance(error, BadFrame):
                self._fault()

    def _drop_control(self) -> None:
        connection = self._control
        if connection is None:
            return
        self.hub.forget(connection)
        connection.close()
        with self._changed:
            self._control = None
            if self._listener is not None:
                self._lost_at = time.monotonic()
            self._changed.notify_all()

    def _fault(self) -> None:
        self._faults += 1
        if self._faults == MAX_FAULTS:
            self.give_up("its agent broke the protocol again and again")

    def _tick(self, now: float) -> float | None:
        for connection, since in list(self._half_open.items()):
            if now - since > LOST_AFTER:
                del self._half_open[connection]
                self.hub.forget(connection)
                connection.close()
        if self._lost_at is not None and now - self._lost_at > LOST_AFTER:
            self._lost_at = None
            self.give_up("its agent went away")
        return 1.0 if self._half_open or self._lost_at is not None else None

    def _listen(self) -> None:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self.path.unlink(missing_ok=True)
            listener.bind(str(self.path))
            os.chmod(self.path, 0o600)
            listener.listen(128)
            listener.setblocking(False)
        except BaseException:
            listener.close()
            raise
        self._listener = listener
        self.hub.selector.register(listener, selectors.EVENT_READ, self._accept)
        self.hub.ticks[self] = self._tick

    def _unlisten(self) -> None:
        listener, self._listener = self._listener, None
        self._lost_at = None
        self.hub.ticks.pop(self, None)
        if listener is not None:
            self.hub.forget(listener)
            listener.close()
        self.path.unlink(missing_ok=True)
        for connection in self._half_open:
            self.hub.forget(connection)
            connection.close()
        self._half_open.clear()

    # -- in anybody's thread

    def listen(self) -> None:
        """Open the socket that the agent dials."""
        self.hub.call_and_wait(self._listen)

    def died(self, reason: str) -> None:
        """Close all connections and fail all that waits, since the sandbox is gone."""

        def bury() -> None:
            self._unlisten()
            with self._changed:
                self.death = self.death or reason
                self._changed.notify_all()
            self._drop_control()
            for number in list(self._waiting):
                waiting = self._waiting.pop(number)
                if waiting.set_running_or_notify_cancel():
                    waiting.set_exception(SandboxDied(f"the sandbox ended: {reason}"))

        self.hub.call_and_wait(bury)

    def wait_death(self, timeout: float | None) -> str | None:
        """Wait until the sandbox has ended; return why, or None if it has not within ``timeout`` seconds."""
        with self._changed:
            self._changed.wait_for(lambda: self.death is not None, timeout)
            return self.death

    def lost(self, what: str) -> RunscError:
        """Return the error for a connection that ended early, after a moment's wait for the reason."""
        death = self.wait_death(2.0)
        if death is not None:
            return SandboxDied(f"the sandbox ended {what}: {death}")
        return RunscError(f"the sandbox's agent dropped the connection {what}")

    def connected(self, timeout: float) -> socket.socket:
        """Wait for the control connection and return it.

        Raises:
            SandboxDied: the sandbox ended. SandboxTimeout: there is none within ``timeout`` seconds.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._control is not None or self.death is not None, timeout):
                raise SandboxTimeout(f"the sandbox's agent did not answer within {timeout:g} s")
            if self.death is not None:
                raise SandboxDied(f"the sandbox ended: {self.death}")
            assert self._control is not None
            return self._control

    @contextlib.contextmanager
    def undisturbed(self) -> Iterator[None]:
        """Keep forks from cutting connections while inside."""
        with self._gate.shared():
            yield

    def dial(self, request: dict[str, Any], timeout: float = 30.0, *, inside: bool = False) -> socket.socket:
        """Get a connection from the agent and send a request on it.

        Args:
            request: what is sent.
            timeout: seconds to wait for the agent; set on the connection too.
            inside: whether the caller is inside :meth:`undisturbed`.

        Returns:
            The connection, blocking, for this request alone.

        Raises:
            SandboxDied: the sandbox ended. SandboxTimeout: no connection in time. RunscError: the agent dropped it.
        """
        ends = time.monotonic() + timeout
        number = secrets.token_hex(8)
        for attempt in range(3):
            waiting: Future[socket.socket] = Future()
            self._waiting[number] = waiting
            try:
                with contextlib.nullcontext() if inside else self._gate.shared():
                    control = self.connected(max(0.01, ends - time.monotonic()))
                    with self._sending:
                        agent.send_json(control, {"dial": number})
                    connection = waiting.result(max(0.01, ends - time.monotonic()))
                    connection.setblocking(True)
                    connection.settimeout(timeout)
                    agent.send_json(connection, request)  # before a fork can come between
                return connection
            except (TimeoutError, FutureTimeout):
                raise SandboxTimeout(f"the sandbox's agent did not answer within {timeout:g} s") from None
            except OSError:  # the control connection had just ended; the agent dials again
                if attempt == 2:
                    raise self.lost("before a request") from None
                time.sleep(0.03)
            finally:
                if self._waiting.pop(number, None) is not None:
                    waiting.cancel()
        raise AssertionError("unreachable")

    @contextlib.contextmanager
    def silent(self, timeout: float) -> Iterator[None]:
        """Keep the sandbox without any connection to the host while inside, so that it can be checkpointed.

        TCP streams end; commands go on.

        Args:
            timeout: seconds for transfers to end, and again for the agent to let go of its connections.

        Raises:
            SandboxDied: the sandbox ended. SandboxTimeout: not in time. RunscError: the agent went away.
        """
        with self._gate.exclusive(timeout):
            control = self.connected(timeout)
            self.hub.call_and_wait(self._unlisten)
            try:
                agent.send_json(control, {"quiet": True})
                with self._changed:
                    if not self._changed.wait_for(lambda: self._control is None or self.death is not None, timeout):
                        raise SandboxTimeout("the sandbox's agent did not let go of its connections")
                if self.death is not None:
                    raise SandboxDied(f"the sandbox ended: {self.death}")
                if not self._quiet:
                    raise RunscError("the sandbox's agent went away before the checkpoint")
                yield
            finally:
                if self.death is None:
                    self.hub.call_and_wait(self._listen)


class Gate:
    """A readers-writer lock that prefers the writer."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._inside = 0
        self._alone = False

    @contextlib.contextmanager
    def shared(self) -> Iterator[None]:
        """Hold the lock together with others."""
        with self._condition:
            self._condition.wait_for(lambda: not self._alone)
            self._inside += 1
        try:
            yield
        finally:
            with self._condition:
                self._inside -= 1
                self._condition.notify_all()

    @contextlib.contextmanager
    def exclusive(self, timeout: float) -> Iterator[None]:
        """Hold the lock alone.

        Raises:
            SandboxTimeout: others have not let go of it within ``timeout`` seconds.
        """
        ends = time.monotonic() + timeout
        with self._condition:
            if not self._condition.wait_for(lambda: not self._alone, timeout):
                raise SandboxTimeout("another fork of this sandbox takes too long")
            self._alone = True
            try:
                if not self._condition.wait_for(lambda: self._inside == 0, max(0.0, ends - time.monotonic())):
                    raise SandboxTimeout("a transfer of files keeps the sandbox from being forked")
            except BaseException:
                self._alone = False
                self._condition.notify_all()
                raise
        try:
            yield
        finally:
            with self._condition:
                self._alone = False
                self._condition.notify_all()

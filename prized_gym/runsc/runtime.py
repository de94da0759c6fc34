"""The runtime of a process: the supervisor, the hub and the directory of the sandboxes it makes."""

from __future__ import annotations

import atexit
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

from . import cgroups, supervisor
from .bundle import make_root
from .connection import Hub
from .errors import RunscError, RunscUnavailable, SandboxStateError
from .find import Runsc
from .store import make_runtime_directory, sweep

START_TIMEOUT = 20.0
_T = TypeVar("_T")
_runtimes: dict[str, Runtime] = {}
_lock = threading.RLock()


def namespaces_command() -> list[str]:
    """Build the beginning of a command that is to run as PID 1 of its own namespaces, as this user.

    Raises:
        RunscUnavailable: ``unshare`` is missing.
    """
    unshare = shutil.which("unshare")
    if unshare is None:
        raise RunscUnavailable("unshare is not on PATH", "It is part of util-linux; install that.")
    command = [unshare, "--pid", "--fork", "--kill-child", "--mount", "--mount-proc", "--propagation", "private"]
    return command if os.geteuid() == 0 else [*command, "--user", "--map-root-user", "--net"]


class Runtime:
    """The sandboxes that one process makes with one runsc, all of which end with that process.

    Obtained by :meth:`get`. Counts its references: every sandbox that is not closed holds one.

    Attributes:
        runsc: what it uses.
        pid: of the process it belongs to.
        directory: its own, removed at its end.
        sandboxes: what to call with the reason when a sandbox ends by itself, by id.
        over: whether it has ended.
    """

    def __init__(self, runsc: Runsc) -> None:
        self.runsc = runsc
        self.pid = os.getpid()
        self.sandboxes: dict[str, Callable[[str], None]] = {}
        self.over = False
        self._users = 0
        self._numbers = 0
        self._pending: dict[int, Future[dict[str, Any]]] = {}
        self._sending = threading.Lock()
        self._closing = threading.Lock()
        self._incoming = b""
        self._roots: dict[str, Path] = {}
        self._ready: Future[None] = Future()
        sweep()
        self.directory, self._lock_fd = make_runtime_directory()
        self._control, theirs = socket.socketpair()
        runtime_fd = -1
        try:
            runtime_fd = os.pidfd_open(self.pid) if hasattr(os, "pidfd_open") else -1
        except OSError:
            pass  # the end of the control socket shows it as well
        config = {
            "directory": str(self.directory),
            "slirp4netns": runsc.slirp4netns,
            "control_fd": theirs.fileno(),
            "runtime_fd": runtime_fd if runtime_fd >= 0 else None,
        }
        python = sys.executable or shutil.which("python3") or "python3"
        package = str(Path(supervisor.__file__).resolve().parent.parent)
        command = [*namespaces_command(), python, "-I", "-S", "-c", supervisor.BOOT, package, json.dumps(config)]
        inherited = [fd for fd in (theirs.fileno(), runtime_fd, self._lock_fd) if fd >= 0]
        self._log = self.directory / "supervisor.log"
        try:
            with open(self._log, "wb") as log:
                self.process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    pass_fds=inherited,
                    start_new_session=True,
                    cwd="/",
                )
        except BaseException:
            self._control.close()
            os.close(self._lock_fd)
            shutil.rmtree(self.directory, ignore_errors=True)
            raise
        finally:
            theirs.close()
            if runtime_fd >= 0:
                os.close(runtime_fd)
        self.hub = Hub()
        self._control.setblocking(True)
        self.hub.call(lambda: self._watch())
        try:
            self._ready.result(START_TIMEOUT)
        except BaseException as error:
            log_text = self._log.read_text(errors="replace")[-1000:] if self._log.exists() else ""
            self.close()
            if not isinstance(error, Exception):
                raise
            raise RunscUnavailable(
                f"the namespaces for sandboxes cannot be made: {log_text.strip() or error}",
                "Run as root, or allow unprivileged user namespaces (sysctl kernel.unprivileged_userns_clone, "
                "user.max_user_namespaces, kernel.apparmor_restrict_unprivileged_userns); in a container, allow unshare "
                "and mount.",
            ) from None

    @classmethod
    def get(cls, runsc: Runsc) -> Runtime:
        """Return this process's runtime for ``runsc``, started if need be, with a reference for the caller.

        Raises:
            RunscUnavailable: the namespaces for sandboxes cannot be made.
        """
        with _lock:
            runtime = _runtimes.get(runsc.path)
            if runtime is not None and runtime.over:  # its supervisor was killed
                runtime.close()
            if runtime is None or runtime.over:
                runtime = _runtimes[runsc.path] = cls(runsc)
            return runtime.enter()

    def enter(self) -> Runtime:
        """Take one more reference and return the runtime."""
        with _lock:
            self._users += 1
            return self

    def leave(self) -> None:
        """Release one reference; the last release closes the runtime."""
        with _lock:
            self._users -= 1
            if self._users == 0 and os.getpid() == self.pid and _runtimes.get(self.runsc.path) is self:
                self.close()

    def root(self, source: Path | None = None, mounts: Iterable[str] = ()) -> Path:
        """Return a root directory for sandboxes, made or copied if need be.

        runsc makes mount points in it, and what is bound in one sandbox must leave no trace in another.

        Args:
            source: the root directory of a kept sandbox, to be copied; None for one made here.
            mounts: of the sandboxes that use it.
        """
        with _lock:
            key = str(source or sorted(mounts))
            if key not in self._roots:
                root = self.directory / "roots" / str(len(self._roots))
                if source is None:
                    make_root(root)
                else:
                    shutil.copytree(source, root, symlinks=True)
                self._roots[key] = root
            return self._roots[key]

    # -- requests

    def request(self, operation: str, **values: Any) -> Future[dict[str, Any]]:
        """Send a request to the supervisor.

        Args:
            operation: the name of one of its ``do_`` methods.
            **values: the fields of the request.

        Returns:
            A future of its answer, which may fail with RunscError.

        Raises:
            SandboxStateError: the runtime belongs to another process.
        """
        answer: Future[dict[str, Any]] = Future()
        with self._sending:
            self._numbers += 1
            number = self._numbers
            self._pending[number] = answer
        self._send({"n": number, "op": operation, **values})
        if self.over:
            self._fail(number)
        return answer

    def notify(self, operation: str, **values: Any) -> None:
        """Send a request that is not answered; the supervisor serves requests in order.

        Raises:
            SandboxStateError: the runtime belongs to another process.
        """
        self._send({"op": operation, **values})

    def _send(self, message: dict[str, Any]) -> None:
        if os.getpid() != self.pid:
            raise SandboxStateError("this sandbox belongs to another process; a forked child makes its own")
        data = json.dumps(message).encode() + b"\n"
        with self._sending:
            try:
                self._control.sendall(data, socket.MSG_NOSIGNAL)
            except OSError:
                pass  # the hub notices

    # -- in the hub's thread

    def _watch(self) -> None:
        import selectors

        self.hub.selector.register(self._control, selectors.EVENT_READ, self._read)

    def _read(self) -> None:
        try:
            data = self._control.recv(1 << 20)
        except OSError:
            data = b""
        if not data:
            self._ended()
            return
        *lines, self._incoming = (self._incoming + data).split(b"\n")
        for line in lines:
            message = json.loads(line)
            event = message.get("event")
            if event == "ready":
                self._ready.set_result(None)
            elif event == "dead":
                on_death = self.sandboxes.pop(message["id"], None)
                if on_death is not None:
                    on_death(message["reason"])
            else:
                answer = self._pending.pop(message["n"], None)
                if answer is not None and answer.set_running_or_notify_cancel():
                    if "error" in message:
                        answer.set_exception(RunscError(message["error"]))
                    else:
                        answer.set_result(message)

    def _ended(self) -> None:
        self.over = True
        self.hub.forget(self._control)
        if not self._ready.done():
            self._ready.set_exception(RunscError("the supervisor did not start"))
        for number in list(self._pending):
            self._fail(number)
        for name in list(self.sandboxes):
            on_death = self.sandboxes.pop(name, None)
            if on_death is not None:
                on_death("the supervisor of this process's sandboxes ended")

    def _fail(self, number: int) -> None:
        answer = self._pending.pop(number, None)
        if answer is not None and answer.set_running_or_notify_cancel():
            answer.set_exception(RunscError("the supervisor of this process's sandboxes ended"))

    # -- the end

    def close(self) -> None:
        """End every sandbox of this process and wait until nothing of them is left."""
        if os.getpid() != self.pid:
            return
        # One at a time: an exit may come while another thread is at it.
        with self._closing:
            if self._lock_fd < 0:
                return
            try:
                self._control.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
            try:
                self.process.wait(8)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
            self.hub.call_and_wait(self._ended)
            self.hub.stop()
            self._control.close()
            os.close(self._lock_fd)
            self._lock_fd = -1
            cgroups.remove_all(self.directory)
            shutil.rmtree(self.directory, ignore_errors=True)
            with _lock:
                if _runtimes.get(self.runsc.path) is self:
                    del _runtimes[self.runsc.path]

    def disown(self) -> None:
        """Close the parent's descriptors in a forked child, since their end must mean the parent's end."""
        self._control.close()
        os.close(self._lock_fd)


def uninterrupted(work: Callable[[], _T], undo: Callable[[], None], discard: Callable[[_T], None]) -> _T:
    """Run something in a thread, where no KeyboardInterrupt reaches it, and return what it returned.

    Args:
        work: what is run.
        undo: called when the waiting caller is interrupted; then the end of ``work`` is waited for.
        discard: called after that with what ``work`` returned.
    """
    outcome: Future[_T] = Future()

    def run() -> None:
        try:
            outcome.set_result(work())
        except BaseException as error:
            outcome.set_exception(error)

    thread = threading.Thread(target=run, name="prized_gym-runsc-work", daemon=True)
    thread.start()
    try:
        return outcome.result()
    except BaseException:
        if not outcome.done() or outcome.exception() is None:
            undo()
            thread.join()
            if outcome.exception() is None:
                discard(outcome.result())
        raise


def close_all() -> None:
    """End every sandbox this process made."""
    for runtime in list(_runtimes.values()):
        runtime.close()


def _after_fork() -> None:
    global _lock
    _lock = threading.RLock()
    for runtime in _runtimes.values():
        runtime.disown()
    _runtimes.clear()


atexit.register(close_all)
os.register_at_fork(after_in_child=_after_fork)

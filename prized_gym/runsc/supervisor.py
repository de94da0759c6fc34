"""The supervisor: a small process that owns every sandbox of one runtime, so that none outlives the runtime.

It is PID 1 of a PID namespace with a mount namespace of its own (and, without root, a user and a network namespace).
When the runtime ends, however it ends, its end of the control socket closes and its pidfd becomes readable; then the
supervisor kills everything and removes the runtime's directory. When the supervisor itself is killed, the kernel kills
all of its namespace.

The runtime sends one JSON object per line and gets one back for each that carries ``n``; events carry ``event``. One
thread, one loop.
"""

from __future__ import annotations

import json
import os
import selectors
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import cgroups, network, processes

BOOT = (  # runs this module without importing the packages above it, which need more than the standard library
    "import sys, types\n"
    "for name, path in (('prized_gym', sys.argv[1]), ('prized_gym.runsc', sys.argv[1] + '/runsc')):\n"
    "    module = sys.modules[name] = types.ModuleType(name)\n"
    "    module.__path__ = [path]\n"
    "from prized_gym.runsc.supervisor import main\n"
    "main(sys.argv[2])\n"
)


@dataclass(eq=False)
class Timer:
    """An action that is due at a time.

    Attributes:
        when: ``time.monotonic()`` from which on it is due.
        action: what is called.
    """

    when: float
    action: Callable[[], None]


class ManagedSandbox:
    """What the supervisor knows of one sandbox, from the request to start it to its end.

    Attributes:
        name: its id.
        pid: of its sentry; None before it runs.
        group: its cgroups.
        namespace: its network namespace; None without a network.
        slirp: the pid of its slirp4netns.
        stopped: the processes that are stopped; None while it runs.
        commands: what to call with the exit code of each running runsc command about it, by pid.
        run_time: the end of its longest life.
        reason: why it was ended, where the supervisor ended it.
        killers: the numbers of the requests that wait for its end.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.pid: int | None = None
        self.group = cgroups.Group()
        self.namespace: Path | None = None
        self.slirp: int | None = None
        self.stopped: list[int] | None = None
        self.commands: dict[int, Callable[[int], None]] = {}
        self.run_time: Timer | None = None
        self.reason = ""
        self.killers: list[int] = []


class Supervisor:
    """The sandboxes of one runtime, and the loop that serves its requests.

    Args:
        config: ``directory`` of the runtime, ``slirp4netns``, and the descriptors ``control_fd`` and ``runtime_fd``.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        self.directory = Path(config["directory"])
        self.name = self.directory.name
        self.slirp4netns: str | None = config["slirp4netns"]
        self.control = socket.socket(fileno=config["control_fd"])
        self.runtime_fd: int | None = config["runtime_fd"]
        self.parents = cgroups.parents()
        self.sandboxes: dict[str, ManagedSandbox] = {}
        self.timers: list[Timer] = []
        self.incoming = b""
        self.sysctls_hidden = False
        self.over = False
        self.selector = selectors.DefaultSelector()

    # -- the loop

    def run(self) -> None:
        """Serve requests until the runtime ends."""
        wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self.selector.register(wake_read, selectors.EVENT_READ, lambda: self.reap(wake_read))
        self.selector.register(self.control, selectors.EVENT_READ, self.read)
        if self.runtime_fd is not None:
            self.selector.register(self.runtime_fd, selectors.EVENT_READ, self.end)
        cgroups.note(self.directory, self.parents)
        self.send({"event": "ready"})
        while not self.over:
            wait = max(0.0, min(timer.when for timer in self.timers) - time.monotonic()) if self.timers else None
            for key, _ in self.selector.select(wait):
                try:
                    key.data()
                except Exception as error:
                    sys.stderr.write(f"supervisor: {error!r}\n")
            now = time.monotonic()
            for timer in [timer for timer in self.timers if timer.when <= now]:
                self.cancel(timer)
                timer.action()

    def end(self) -> None:
        """End the loop."""
        self.over = True

    def after(self, seconds: float, action: Callable[[], None]) -> Timer:
        """Have something called after some seconds."""
        timer = Timer(time.monotonic() + seconds, action)
        self.timers.append(timer)
        return timer

    def cancel(self, timer: Timer | None) -> None:
        """Keep a timer from being called, if it has not been yet."""
        if timer in self.timers:
            self.timers.remove(timer)

    def send(self, message: dict[str, Any]) -> None:
        """Send the runtime a message."""
        try:
            self.control.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            self.over = True

    def read(self) -> None:
        """Receive requests of the runtime and serve them."""
        data = self.control.recv(1 << 20)
        if not data:
            self.over = True
            return
        *lines, self.incoming = (self.incoming + data).split(b"\n")
        for line in lines:
            request = json.loads(line)
            try:
                getattr(self, "do_" + request["op"])(request)
            except Exception as error:
                self.answer(request, error=f"{type(error).__name__}: {error}")

    def answer(self, request: dict[str, Any], **values: Any) -> None:
        """Answer a request, if it wants an answer."""
        if "n" in request:
            self.send({"n": request["n"], **values})

    # -- requests

    def do_start(self, request: dict[str, Any]) -> None:
        """Run or restore a sandbox: make its cgroup and its network, then run ``argv``; answered when that has ended."""
        name = request["id"]
        sandbox = self.sandboxes[name] = ManagedSandbox(name)
        limits = request["limits"]
        sandbox.group = cgroups.make(
            f"prized-gym-{self.name}-{name}",
            self.parents,
            memory=limits["memory"],
            processes=limits["processes"],
        )
        if sandbox.group.out_of_memory is not None:
            self.selector.register(
                sandbox.group.out_of_memory, selectors.EVENT_READ, lambda: self.out_of_memory(sandbox)
            )
        if request["seconds"] is not None:
            sandbox.run_time = self.after(request["seconds"], lambda: self.kill(sandbox, "max_runtime_min is over"))
        if request["network"]:
            self.connect(sandbox, Path(request["network"]), lambda error: self.start(sandbox, request, error))
        else:
            self.start(sandbox, request, None)

    def start(self, sandbox: ManagedSandbox, request: dict[str, Any], error: str | None) -> None:
        """Run the command that starts a sandbox, unless its network failed or it has been ended meanwhile."""
        if error is None and not sandbox.reason:
            self.command(sandbox, request, sandbox.group.joins, lambda status: self.started(sandbox, request, status))
        else:
            self.answer(request, error=error or sandbox.reason)
            self.finish(sandbox)

    def started(self, sandbox: ManagedSandbox, request: dict[str, Any], status: int) -> None:
        """Answer the request to start a sandbox, once the command has ended."""
        try:
            sandbox.pid = self.sentry(sandbox.name)
        except (OSError, ValueError, KeyError):
            sandbox.pid = None
        if status == 0 and sandbox.pid is not None and not sandbox.reason and os.path.exists(f"/proc/{sandbox.pid}"):
            sandbox.group.limit_cpus(request["limits"]["cpus"])
            self.answer(
                request, pid=sandbox.pid, groups={name: str(path) for name, path in sandbox.group.paths.items()}
            )
            return
        reason = sandbox.reason or f"runsc ended with {status}:\n{_tail(request['log'])}"
        self.answer(request, error=reason)
        if not sandbox.reason:
            self.kill(sandbox, reason)

    def do_command(self, request: dict[str, Any]) -> None:
        """Run another runsc command about a sandbox, such as a checkpoint."""
        sandbox = self.sandboxes[request["id"]]

        def ended(status: int) -> None:
            if status == 0:
                self.answer(request)
            else:
                self.answer(request, error=sandbox.reason or f"runsc ended with {status}:\n{_tail(request['log'])}")

        self.command(sandbox, request, [], ended)

    def do_stop(self, request: dict[str, Any]) -> None:
        """Stop all processes of a sandbox."""
        sandbox = self.sandboxes.get(request["id"])
        if sandbox is not None and sandbox.pid is not None and sandbox.stopped is None:
            sandbox.stopped = processes.stop(sandbox.pid)
        self.answer(request)

    def do_continue(self, request: dict[str, Any]) -> None:
        """Continue the processes of a sandbox that were stopped."""
        sandbox = self.sandboxes.get(request["id"])
        if sandbox is not None and sandbox.stopped is not None:
            stopped, sandbox.stopped = sandbox.stopped, None
            processes.resume(stopped)
        self.answer(request)

    def do_usage(self, request: dict[str, Any]) -> None:
        """Measure what a sandbox uses."""
        sandbox = self.sandboxes.get(request["id"])
        if sandbox is None or sandbox.pid is None:
            self.answer(request, error="it has ended")
            return
        seconds, memory = processes.used(sandbox.pid)
        self.answer(request, seconds=seconds, memory=memory)

    def do_kill(self, request: dict[str, Any]) -> None:
        """End a sandbox; answered when nothing of it is left."""
        sandbox = self.sandboxes.get(request["id"])
        if sandbox is None:
            self.answer(request)
            return
        sandbox.killers.append(request["n"])
        self.kill(sandbox, request.get("reason") or "closed")

    # -- processes

    def command(
        self, sandbox: ManagedSandbox, request: dict[str, Any], joins: list[Path], ended: Callable[[int], None]
    ) -> None:
        """Run a runsc command about a sandbox; one that takes longer than its ``timeout`` ends the sandbox.

        Args:
            sandbox: which.
            request: has ``argv``, ``log``, ``timeout``, and ``what`` for messages.
            joins: process lists of the cgroups it enters.
            ended: called with its exit code.
        """
        pid = processes.spawn(request["argv"], request["log"], joins)

        def done(status: int) -> None:
            self.cancel(timer)
            ended(status)

        sandbox.commands[pid] = done

        def overdue() -> None:
            if pid in sandbox.commands:
                self.kill(sandbox, f"{request['what']} took longer than {request['timeout']:g} s")

        timer = self.after(request["timeout"], overdue)

    def reap(self, wake: int) -> None:
        """Collect the processes that have ended, and act on each.

        Args:
            wake: the descriptor that SIGCHLD writes to.
        """
        try:
            os.read(wake, 4096)
        except BlockingIOError:
            pass
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            code = os.waitstatus_to_exitcode(status)
            for sandbox in list(self.sandboxes.values()):
                if pid in sandbox.commands:
                    sandbox.commands.pop(pid)(code)
                    if sandbox.reason and not sandbox.commands:
                        self.kill(sandbox, sandbox.reason)
                elif pid == sandbox.pid:
                    sandbox.pid = None
                    if not sandbox.reason:
                        sandbox.reason = "out of memory" if sandbox.group.killed() else f"its sentry ended with {code}"
                    self.finish(sandbox)
                elif pid == sandbox.slirp:
                    sandbox.slirp = None

    def out_of_memory(self, sandbox: ManagedSandbox) -> None:
        """End a sandbox that has run out of memory."""
        assert sandbox.group.out_of_memory is not None
        try:
            os.eventfd_read(sandbox.group.out_of_memory)
        except BlockingIOError:
            return
        self.kill(sandbox, "out of memory")

    def kill(self, sandbox: ManagedSandbox, reason: str) -> None:
        """End a sandbox at once; its gofer and its children end by themselves when the sentry is gone."""
        if self.sandboxes.get(sandbox.name) is not sandbox:
            return
        sandbox.reason = sandbox.reason or reason
        for pid in sandbox.commands:  # they end first: one may be about to make the sandbox
            processes.kill(-pid)
        if sandbox.commands:
            return
        if sandbox.pid is not None:
            processes.kill(sandbox.pid)
            return
        for pid in processes.mentioning({sandbox.name}):  # a command killed half-way left them unrecorded
            processes.kill(pid)
        self.finish(sandbox)

    def finish(self, sandbox: ManagedSandbox) -> None:
        """Forget a sandbox whose sentry is gone, remove all it had, and report its end."""
        if self.sandboxes.get(sandbox.name) is not sandbox:
            return
        for pid in sandbox.commands:
            processes.kill(-pid)
        del self.sandboxes[sandbox.name]
        self.cancel(sandbox.run_time)
        if sandbox.slirp is not None:
            processes.kill(sandbox.slirp)
        if sandbox.namespace is not None:
            network.remove_namespace(sandbox.namespace)
        for path in (self.directory / "state").glob(f"*{sandbox.name}*"):
            path.unlink(missing_ok=True)
        if sandbox.group.out_of_memory is not None:
            self.selector.unregister(sandbox.group.out_of_memory)
        self.remove_group(sandbox.group, 40)
        for number in sandbox.killers:
            self.send({"n": number})
        self.send({"event": "dead", "id": sandbox.name, "reason": sandbox.reason})

    def remove_group(self, group: cgroups.Group, tries: int) -> None:
        """Remove a cgroup, again and again while processes of it are still ending."""
        if not group.remove() and tries:
            self.after(0.05, lambda: self.remove_group(group, tries - 1))

    def sentry(self, name: str) -> int:
        """Read the pid of a sandbox's sentry, as runsc recorded it."""
        for path in (self.directory / "state").glob(f"*{name}*.state"):
            return int(json.loads(path.read_text())["sandbox"]["pid"])
        raise KeyError(name)

    # -- network

    def connect(self, sandbox: ManagedSandbox, namespace: Path, done: Callable[[str | None], None]) -> None:
        """Make the namespace, start slirp4netns on it, and call ``done`` with None, or with what went wrong."""
        if self.slirp4netns is None:
            done("network='outbound' needs slirp4netns")
            return
        try:
            if not self.sysctls_hidden:
                network.hide_sysctls()
                self.sysctls_hidden = True
            sandbox.namespace = namespace
            network.make_namespace(namespace)
        except Exception as error:
            done(f"no network namespace could be made: {error} {getattr(error, 'stderr', b'')!r}")
            return
        log = str(namespace.parent / "slirp.log")
        ready_read, ready_write = os.pipe2(os.O_CLOEXEC)
        sandbox.slirp = processes.spawn(
            network.slirp_command(self.slirp4netns, namespace, ready_write), log, [], keep=ready_write
        )
        os.close(ready_write)
        pending = True

        def outcome(timed_out: bool = False) -> None:
            nonlocal pending
            if not pending:
                return
            pending = False
            self.cancel(patience)
            ready = b"" if timed_out else os.read(ready_read, 1)
            self.selector.unregister(ready_read)
            os.close(ready_read)
            done(None if ready else f"slirp4netns gave no network: {_tail(log)}")

        self.selector.register(ready_read, selectors.EVENT_READ, outcome)
        patience = self.after(10, lambda: outcome(True))

    # -- the end

    def clear(self) -> None:
        """Kill everything in the namespace and remove what the runtime had on disk."""
        deadline = time.monotonic() + 5
        while time.monotonic() < deadline:
            try:
                os.kill(-1, signal.SIGKILL)
            except OSError:
                pass
            try:
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
                time.sleep(0.005)
            except ChildProcessError:
                break
        while not cgroups.remove_all(self.directory) and time.monotonic() < deadline:
            time.sleep(0.01)
        for sandbox in self.sandboxes.values():
            if sandbox.namespace is not None:
                network.remove_namespace(sandbox.namespace)
        shutil.rmtree(self.directory, ignore_errors=True)


def _tail(log: str) -> str:
    """Read the end of a log, for messages."""
    try:
        return Path(log).read_text(errors="replace")[-2000:]
    except OSError:
        return ""


def main(config: str) -> None:
    """Run as PID 1 of a fresh PID namespace; returns when the runtime is gone and everything is removed."""
    if os.getpid() != 1:
        raise SystemExit("the supervisor kills everything in its PID namespace, so it must be PID 1 of its own")
    supervisor = Supervisor(json.loads(config))
    try:
        supervisor.run()
    finally:
        supervisor.clear()

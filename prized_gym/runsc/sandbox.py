"""A sandbox from its making to its end: used, forked, kept, closed."""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

from . import bundle, cgroups, store
from .agent import HOME, MAX_PROCESSES
from .awake import Awake
from .connection import Link
from .errors import RunscError, SandboxDied, SandboxStateError
from .execute import ExecResult, execute
from .files import Files
from .find import Runsc
from .python import PythonPaths, python_paths, write_environment
from .runtime import Runtime, uninterrupted
from .stream import Stream, open_stream

Network = Literal["none", "outbound"]
State = Literal["running", "paused", "kept", "dead", "closed"]

RESTORES_AT_ONCE = 4
"""Restores that run at the same time; more are no faster."""
SENTRY_MEMORY = 192 << 20
"""Bytes that the sentry itself may need beyond what it gives the guest."""
_HOST_THREADS = 4 * MAX_PROCESSES
"""Threads of sentry, gofer and guest, where a cgroup counts them."""


@dataclass(frozen=True)
class Spec:
    """What a sandbox was made with; copies inherit it.

    Attributes:
        vcpu: most CPUs at a time.
        memory, disk: bytes.
        env_vars: for every command.
        network: ``"none"`` or ``"outbound"``.
        max_runtime_min: minutes after which it is ended; None for no limit.
        python: the interpreter and packages inside.
        mounts: more paths shown read-only, from path inside to path here.
    """

    vcpu: float
    memory: int
    disk: int
    env_vars: dict[str, str]
    network: Network
    max_runtime_min: float | None
    python: PythonPaths
    mounts: dict[str, str]


@dataclass(frozen=True)
class Used:
    """What a sandbox has used; nan where that is not known.

    Attributes:
        cpu_seconds: CPU time of all its processes on this machine, gVisor's own included.
        memory: bytes held at present.
    """

    cpu_seconds: float = math.nan
    memory: float = math.nan


class Sandbox:
    """A sandbox of gVisor on this machine. Thread-safe. It ends with this process, unless it is kept.

    Made by :meth:`create`, :meth:`fork` and :meth:`connect`. Commands run as an ordinary user, ``user``, whose home is
    ``/home/user``: the agent, root inside, thereby stays out of their reach, and limits on processes bind. ``python`` is
    this interpreter with what is installed here, in a virtual environment of the sandbox's own, so ``pip install`` adds to
    it; installing system packages does not work.

    Attributes:
        id: unique.
        labels: the user's own.
        created_at: in seconds since the epoch.
        spec: what it was made with.
        files: for reading and writing inside.
    """

    def __init__(
        self, runtime: Runtime, id: str, spec: Spec, labels: Mapping[str, str], root: Path, idle_after: float | None
    ) -> None:
        self.id = id
        self.labels = dict(labels)
        self.created_at = time.time()
        self.spec = spec
        self._runtime = runtime.enter()
        self._leaving = threading.Lock()  # taken once, and never given back
        self._root = root
        self._directory = runtime.directory / "sandboxes" / id
        self._state: State = "running"
        self._image: Path | None = None  # of the paused state
        self._groups: dict[str, Path] = {}
        self._used = Used()
        self._forking = threading.Lock()
        self._callbacks: list[Callable[[str], None]] = []
        self._link = Link(runtime.hub, self._directory / "c" / "a.sock", lambda reason: self._end_soon(reason))
        self._awake = Awake(
            lambda: runtime.notify("stop", id=id),
            lambda: runtime.notify("continue", id=id),
            runtime.hub.poke,
            idle_after,
        )
        self.files = Files(self._link, self._awake, lambda: self._must_be("running"))

    # -- making

    @classmethod
    def create(
        cls,
        *,
        runsc: Runsc | None = None,
        vcpu: float = 1,
        memory_gb: float = 2,
        disk_gb: float = 4,
        env_vars: Mapping[str, str] | None = None,
        labels: Mapping[str, str] | None = None,
        network: Network = "none",
        max_runtime_min: float | None = 60,
        python: PythonPaths | None = None,
        mounts: Mapping[str, str] | None = None,
        idle_after: float | None = 1.0,
        start_timeout: float = 60,
    ) -> Sandbox:
        """Start a sandbox and wait for its agent.

        Args:
            runsc: what runs it; None: what :meth:`Runsc.find` finds.
            vcpu: most CPUs at a time.
            memory_gb: of memory, in GiB.
            disk_gb: of disk (``/home``), in GiB. The disk is memory too: a cgroup bounds memory plus disk, its own size the
                disk. :func:`~prized_gym.runsc.diagnose` says which of the three limits this machine enforces.
            env_vars: for every command.
            labels: the user's own.
            network: ``"outbound"`` lets it connect out (needs root and slirp4netns); nothing connects in but
                :meth:`connect_port`.
            max_runtime_min: minutes after which it is ended, even if this process hangs; None for no limit. Each copy has
                its own.
            python: what ``python_paths()`` gives, by default of this process.
            mounts: more directories and files to show read-only, from absolute path inside to path here.
            idle_after: seconds without use after which it is stopped until the next use; None for never. Use is a command
                in the foreground, a transfer, an answer awaited on a stream, or :meth:`hold`; work in the background is
                none.
            start_timeout: seconds that the start may take.

        Raises:
            ValueError: a size, the network or a mount makes no sense.
            RunscUnavailable: there is no runsc that works here. SandboxTimeout: the agent did not answer in time.
            RunscError: it could not be started.
        """
        _check(network, vcpu, memory_gb, disk_gb)
        if max_runtime_min is not None and not max_runtime_min > 0:
            raise ValueError("max_runtime_min must be positive, or None")
        binds = {_inside(path): os.path.abspath(host) for path, host in (mounts or {}).items()}
        for host in binds.values():
            os.stat(host)
        spec = Spec(
            vcpu,
            int(memory_gb * (1 << 30)),
            int(disk_gb * (1 << 30)),
            _strings(env_vars),
            network,
            max_runtime_min,
            python or python_paths(),
            binds,
        )
        found = runsc or Runsc.find()
        _check_outbound(network, found)
        runtime = Runtime.get(found)
        try:
            [sandbox] = cls._bring(
                runtime, spec, _strings(labels), runtime.root(mounts=binds), None, 1, idle_after, start_timeout
            )
        finally:
            runtime.leave()
        try:
            environment = sandbox._directory / "python"
            write_environment(environment, bundle.ENVIRONMENT, spec.python)
            sandbox.files.upload(environment, bundle.ENVIRONMENT)
            shutil.rmtree(environment)
        except BaseException:
            sandbox.close()
            raise
        return sandbox

    @classmethod
    def connect(cls, id: str, *, runsc: Runsc | None = None) -> Sandbox:
        """Return a kept sandbox by its id, from any process of this user. It can be forked, and nothing else.

        Raises:
            SandboxStateError: there is none, or it has expired.
        """
        directory, description = store.read_kept(id)
        found = runsc or Runsc.find()
        if description["runsc"] != found.version:
            raise SandboxStateError(
                f"sandbox {id} was kept by runsc {description['runsc']}, and this one is {found.version}"
            )
        values = description["spec"]
        python = values["python"]
        spec = Spec(
            **{
                **values,
                "python": PythonPaths(
                    python["executable"],
                    python["base"],
                    tuple(python["binds"]),
                    tuple(python["search"]),
                    tuple(python["sites"]),
                ),
            }
        )
        runtime = Runtime.get(found)
        try:
            root = runtime.root(directory / "root")
            sandbox = cls(runtime, id, spec, description["labels"], root, description["idle_after"])
        finally:
            runtime.leave()
        sandbox.created_at = description["created_at"]
        sandbox._state = "kept"
        sandbox._image = directory / "image"
        return sandbox

    @classmethod
    def _bring(
        cls,
        runtime: Runtime,
        spec: Spec,
        labels: dict[str, str],
        root: Path,
        image: Path | None,
        n: int,
        idle_after: float | None,
        timeout: float,
    ) -> list[Sandbox]:
        """Start ``n`` sandboxes, afresh or from an image; all of them or none."""
        sandboxes = [cls(runtime, store.new_id(), spec, labels, root, idle_after) for _ in range(n)]

        def close() -> None:
            for sandbox in sandboxes:
                sandbox.close()

        def bring() -> list[Sandbox]:
            try:
                with ThreadPoolExecutor(min(n, RESTORES_AT_ONCE), thread_name_prefix="prized_gym-restore") as pool:
                    started = [pool.submit(sandbox._start, image, timeout) for sandbox in sandboxes]
                    for future in started:
                        try:
                            future.result()
                        except BaseException:
                            close()  # the others end at once instead of starting
                            raise
            except BaseException:
                close()
                raise
            return sandboxes

        return uninterrupted(bring, close, lambda _: close())

    def _start(self, image: Path | None, timeout: float) -> None:
        """Have the supervisor run or restore it, and wait for the agent to dial."""
        ends = time.monotonic() + timeout
        runtime, spec = self._runtime, self.spec
        outbound = spec.network == "outbound"
        namespace = self._directory / "netns" if outbound else None
        try:
            self._lay_out(namespace)
        except BaseException:
            if self._state != "running":  # closed meanwhile, when close() found nothing of what was made after
                runtime.sandboxes.pop(self.id, None)
                self._link.died("closed")
                shutil.rmtree(self._directory, ignore_errors=True)
            raise
        how = ["run", "--detach"] if image is None else ["restore", "--detach", f"--image-path={image}"]
        started = runtime.request(
            "start",
            id=self.id,
            argv=runtime.runsc.command(
                runtime.directory / "state", outbound, [*how, "--bundle", str(self._directory), self.id]
            ),
            log=str(self._directory / "runsc.log"),
            what="start" if image is None else "restore",
            timeout=timeout,
            seconds=None if spec.max_runtime_min is None else spec.max_runtime_min * 60,
            network=str(namespace) if namespace else None,
            limits={"memory": spec.memory + spec.disk + SENTRY_MEMORY, "cpus": spec.vcpu, "processes": _HOST_THREADS},
        )
        if self._state != "running":  # closed meanwhile, maybe before the supervisor knew of it
            runtime.request("kill", id=self.id)
        try:
            groups = started.result(timeout + 10)["groups"]
        except RunscError as error:
            raise RunscError(
                f"sandbox {self.id} could not be {'started' if image is None else 'restored'}: {error}"
            ) from None
        self._groups = {name: Path(path) for name, path in groups.items()}
        self._link.connected(max(1.0, ends - time.monotonic()))
        runtime.hub.ticks[self._awake] = self._awake.tick
        if self._state != "running":
            runtime.hub.ticks.pop(self._awake, None)
        self._awake.touch()
        runtime.hub.poke()

    def _lay_out(self, namespace: Path | None) -> None:
        """Write the directory that runsc takes it from, listen for its agent, and let the runtime know of it."""
        self._must_be("running")
        (self._directory / "c").mkdir(parents=True, mode=0o700)
        config = bundle.configuration(
            self._root,
            self._directory / "c",
            python=self.spec.python,
            mounts=self.spec.mounts,
            disk=self.spec.disk,
            memory=self.spec.memory,
            namespace=namespace,
        )
        bundle.write_bundle(self._directory, config)
        self._link.listen()
        self._runtime.sandboxes[self.id] = self._died
        self._must_be("running")

    # -- state

    @property
    def state(self) -> State:
        """Its state: running, paused, kept, dead (it ended by itself), or closed; stopped for idleness is running."""
        if self._state == "running" and self._awake.paused:
            return "paused"
        return self._state

    @property
    def stopped(self) -> bool:
        """Whether its processes are stopped at present, for idleness or by :meth:`pause`."""
        return self._awake.stopped

    @property
    def death(self) -> str | None:
        """Why the sandbox ended, None while it has not."""
        return self._link.death

    def wait_dead(self, timeout: float | None = None) -> str | None:
        """Wait until the sandbox has ended; return why, or None if it has not within ``timeout`` seconds."""
        return self._link.wait_death(timeout)

    def on_death(self, callback: Callable[[str], None]) -> None:
        """Have ``callback(reason)`` called once, in a background thread, when it ends by itself; at once if it has."""
        self._callbacks.append(callback)
        if self._state == "dead" and callback in self._callbacks:
            self._call_back(self.death or "ended")

    def hold(self) -> contextlib.AbstractContextManager[None]:
        """Keep the sandbox from being stopped for idleness inside ``with sandbox.hold():``."""
        return self._awake.hold()

    def touch(self) -> None:
        """Wake the sandbox if it was stopped for idleness, and count its idle time from here; next to free if it was not."""
        self._awake.touch()

    def idle(self) -> bool:
        """Stop the sandbox until its next use, as ``idle_after`` would; return False when it is in use."""
        self._must_be("running")
        return self._awake.idle()

    @property
    def idle_after(self) -> float | None:
        """Seconds without use after which it is stopped until the next use; None for never."""
        return self._awake.idle_after

    @idle_after.setter
    def idle_after(self, seconds: float | None) -> None:
        self._awake.idle_after = seconds
        self._runtime.hub.poke()

    def pause(self) -> None:
        """Stop all its processes until :meth:`resume`. It goes on taking its memory; forks of it share one checkpoint."""
        self._must_be("running")
        self._awake.pause()

    def resume(self) -> None:
        """Let the sandbox go on after :meth:`pause`."""
        self._must_be("running")
        with self._forking:
            self._drop_image()
            self._awake.resume()

    def usage(self) -> Used:
        """Measure what its processes on this machine have used so far, without waking it.

        Of a sandbox that has ended it is what was last seen.
        """
        if self._state == "running":
            seconds, memory = cgroups.used(self._groups)
            if seconds is None or memory is None:
                with contextlib.suppress(RunscError, TimeoutError):
                    counted = self._runtime.request("usage", id=self.id).result(2)
                    seconds = counted["seconds"] if seconds is None else seconds
                    memory = counted["memory"] if memory is None else memory
            if seconds is not None and memory is not None:
                self._used = Used(seconds, memory)
        return self._used

    # -- use

    def exec(
        self,
        cmd: str | Sequence[str],
        *,
        timeout: float | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        background: bool = False,
        user: Literal["user", "root"] = "user",
        stdin: bytes = b"",
        on_output: Callable[[str, bytes], None] | None = None,
        max_output: int = 16 << 20,
    ) -> ExecResult:
        """Run a command and wait for its end. A fork of the sandbox meanwhile does not disturb it.

        Args:
            cmd: a shell command (bash where there is one), or a list of words.
            timeout: seconds until its whole process group is killed, which is a result with ``timed_out``, not an error.
            env: variables beyond the sandbox's own.
            cwd: relative to the home.
            background: return at once, with its pid; input and output are ``/dev/null`` unless the command redirects them.
            user: ``"root"`` is root inside the sandbox with few rights; it can break the sandbox's own agent, and nothing
                outside.
            stdin: its input.
            on_output: called with ``"stdout"`` or ``"stderr"`` and bytes as they come, in this thread.
            max_output: bytes kept of each output, from its end.

        Raises:
            OSError: the command cannot be started.
            SandboxDied: the sandbox ended. SandboxTimeout: its agent did not answer. SandboxStateError: it is not running.
        """
        self._must_be("running")
        if user not in ("user", "root"):
            raise ValueError(f"user must be 'user' or 'root', not {user!r}")
        shell = "/bin/bash" if os.path.exists("/bin/bash") else "/bin/sh"
        argv = [shell, "-c", cmd] if isinstance(cmd, str) else [os.fspath(word) for word in cmd]
        request = {
            "argv": argv,
            "env": {**bundle.environment(self.spec.python), **self.spec.env_vars, **_strings(env)},
            "cwd": cwd or HOME,
            "user": user,
            "background": background,
            "timeout": timeout,
        }
        with self._awake.hold():
            return execute(
                self._link,
                request,
                stdin=stdin,
                on_output=on_output,
                max_output=max_output,
                stopped=lambda: self._awake.paused,
            )

    def connect_port(self, port: int, timeout: float = 10) -> Stream:
        """Open a byte stream to a port on 127.0.0.1 inside, as a socket; see :class:`Stream`.

        Raises:
            ConnectionRefusedError: nobody listens there.
            SandboxDied: the sandbox ended. SandboxTimeout: its agent did not answer within ``timeout`` seconds.
        """
        self._must_be("running")
        return open_stream(self._link, self._awake, port, timeout)

    # -- forks

    def fork(
        self,
        n: int = 1,
        *,
        labels: Mapping[str, str] | None = None,
        network: Network | None = None,
        timeout: float = 120,
    ) -> list[Sandbox]:
        """Make ``n`` live copies: memory, processes, disk. All of them or none.

        The sandbox may be running, paused (and stays so; unchanged, it is checkpointed once for all its forks), kept, or a
        fork itself. Commands in it go on, TCP streams to it end.

        Args:
            n: how many.
            labels: in place of its own.
            network: None: its own.
            timeout: seconds for the checkpoint, and again for the restores.

        Raises:
            SandboxDied: the sandbox ended. SandboxStateError: it is closed, or no longer kept.
            SandboxTimeout: not in time. RunscError: it could not be checkpointed or restored.
        """
        if n < 1:
            raise ValueError(f"n must be at least 1, not {n}")
        spec = self.spec if network is None else replace(self.spec, network=network)
        _check(spec.network)
        _check_outbound(spec.network, self._runtime.runsc)
        names = self.labels if labels is None else _strings(labels)
        with self._forking:
            image, temporary = self._checkpoint(timeout)
            try:
                return self._bring(self._runtime, spec, names, self._root, image, n, self.idle_after, timeout)
            finally:
                if temporary:
                    shutil.rmtree(image, ignore_errors=True)

    def prepare(self, timeout: float = 120) -> None:
        """Checkpoint the sandbox now if it is paused, so that the next fork need not; else do nothing."""
        with self._forking:
            if self._awake.paused and self._awake.stopped:
                self._checkpoint(timeout)

    def _checkpoint(self, timeout: float) -> tuple[Path, bool]:
        """Make an image of its present state; return it and whether it is to be removed after use."""
        if self._state == "kept":
            store.read_kept(self.id)  # it may have expired, or been removed
        if self._image is not None:
            return self._image, False
        self._must_be("running")
        image = self._runtime.directory / "images" / uuid.uuid4().hex[:12]

        def save() -> None:
            arguments = ["checkpoint", "--compression=none", "--leave-running", f"--image-path={image}", self.id]
            try:
                image.mkdir()
                with self._awake.hold(even_paused=True), self._link.silent(timeout):
                    saved = self._runtime.request(
                        "command",
                        id=self.id,
                        argv=self._runtime.runsc.command(
                            self._runtime.directory / "state", self.spec.network == "outbound", arguments
                        ),
                        log=str(self._directory / "runsc.log"),
                        what="checkpoint",
                        timeout=timeout,
                    )
                    saved.result(timeout + 10)
            except BaseException as error:
                shutil.rmtree(image, ignore_errors=True)
                if isinstance(error, RunscError) and self.death is None:
                    raise type(error)(f"sandbox {self.id} could not be checkpointed: {error}") from None
                if isinstance(error, RunscError):
                    raise SandboxDied(f"sandbox {self.id} ended during its checkpoint: {self.death}") from None
                raise

        at_rest = self._awake.paused and self._awake.stopped
        uninterrupted(save, lambda: None, lambda _: shutil.rmtree(image, ignore_errors=True))
        if at_rest:  # and so it stays: `resume` waits for us
            self._image = image
            return image, False
        return image, True

    def keep(self, seconds: float | None = store.KEPT_SECONDS) -> str:
        """Put the sandbox's present state on disk under its id, and end it here.

        :meth:`connect` finds it by its id, from any process of this user, until it expires or is removed by
        :func:`~prized_gym.runsc.store.delete_kept`.

        Args:
            seconds: its lifetime on disk, after which it cannot be connected to and a sweep removes it; None for no end.

        Returns:
            Its id.
        """
        if seconds is not None and not seconds > 0:
            raise ValueError(f"the lifetime of a kept sandbox must be more than 0 seconds or None, not {seconds!r}")
        if self._state == "kept":
            return self.id
        with self._forking:
            image, _ = self._checkpoint(120)
            self._image = None
            kept_at = time.time()
            description = {
                "labels": self.labels,
                "created_at": self.created_at,
                "kept_at": kept_at,
                "idle_after": self.idle_after,
                "runsc": self._runtime.runsc.version,
                "spec": asdict(self.spec),
            }
            try:
                expires_at = None if seconds is None else kept_at + seconds
                store.write_kept(self.id, image, self._root, description, expires_at)
            finally:
                shutil.rmtree(image, ignore_errors=True)
            self._end("kept")
            self._state = "kept"
            self._image = store.kept_image(self.id)
        return self.id

    # -- the end

    def close(self) -> None:
        """End the sandbox at once; nothing of it is left. Of a kept one only this handle ends."""
        if self._state != "kept":
            self._end("closed")
            self._drop_image()
        if self._leaving.acquire(blocking=False):
            self._runtime.leave()

    def _end(self, reason: str) -> None:
        if self._state in ("closed", "kept"):
            return
        was, self._state = self._state, "closed"
        self._runtime.hub.ticks.pop(self._awake, None)
        if os.getpid() != self._runtime.pid or self._runtime.over:
            return
        if was != "dead":
            known = self._runtime.sandboxes.pop(self.id, None) is not None
            if known:
                with contextlib.suppress(RunscError, TimeoutError):
                    self._runtime.request("kill", id=self.id, reason=reason).result(10)
            self._link.died(reason)
        shutil.rmtree(self._directory, ignore_errors=True)

    def _end_soon(self, reason: str) -> None:
        """End the sandbox from the hub's thread, which must not wait."""
        self._runtime.request("kill", id=self.id, reason=reason)

    def _died(self, reason: str) -> None:
        """Clean up after a sandbox that ended by itself. Called in the hub's thread."""
        if self._state == "running":
            self._state = "dead"
        self._runtime.hub.ticks.pop(self._awake, None)
        self._link.died(reason)
        shutil.rmtree(self._directory / "c", ignore_errors=True)
        self._call_back(reason)

    def _call_back(self, reason: str) -> None:
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            with contextlib.suppress(Exception):
                callback(reason)

    def _drop_image(self) -> None:
        image, self._image = self._image, None
        if image is not None:
            shutil.rmtree(image, ignore_errors=True)

    def _must_be(self, state: State) -> None:
        if os.getpid() != self._runtime.pid:
            raise SandboxStateError(f"sandbox {self.id} belongs to the process that made it, not to a forked child")
        if self._state == state:
            return
        if self._state == "dead":
            raise SandboxDied(f"sandbox {self.id} ended: {self.death}")
        raise SandboxStateError(f"sandbox {self.id} is {self._state}")

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Sandbox {self.id} {self.state}>"


def _check(network: str, *positive: float) -> None:
    if network not in ("none", "outbound"):
        raise ValueError(f"network must be 'none' or 'outbound', not {network!r}")
    for value in positive:
        if not value > 0:
            raise ValueError(f"vcpu, memory_gb and disk_gb must be positive, not {value!r}")


def _check_outbound(network: str, runsc: Runsc) -> None:
    if network == "outbound" and os.geteuid() != 0:
        raise RunscError("network='outbound' needs root, for /dev/net/tun; network='none' does not")
    if network == "outbound" and runsc.slirp4netns is None:
        raise RunscError(
            "network='outbound' needs slirp4netns: apt install slirp4netns, or scripts/get_runsc.py, or set SLIRP4NETNS"
        )


def _strings(values: Mapping[str, str] | None) -> dict[str, str]:
    return {str(key): str(value) for key, value in (values or {}).items()}


def _inside(path: str) -> str:
    normal = os.path.normpath(path)
    if (
        not normal.startswith("/")
        or normal in ("/", "/ctl", "/proc", "/sys", "/dev", bundle.AGENT)
        or normal.startswith(("/ctl/", "/proc/", "/sys/", f"{bundle.AGENT}/"))
    ):
        raise ValueError(f"{path!r} is no place to mount something in a sandbox")
    return normal

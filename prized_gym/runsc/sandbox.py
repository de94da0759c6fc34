"""A sandbox from its making to its end: used, forked, kept, closed."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal

from . import bundle, store
from .agent import HOME
from .errors import SandboxStateError
from .execute import ExecResult, execute
from .files import Files
from .find import Runsc
from .images import Images
from .life import Life, State
from .python import PythonPaths, write_environment
from .runtime import Runtime
from .spec import Network, Spec, strings
from .start import start_all
from .stream import Stream, open_stream
from .usage import Meter, Used


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
        self,
        life: Life,
        spec: Spec,
        labels: Mapping[str, str],
        root: Path,
        image: Path | None = None,
    ) -> None:
        self.id = life.id
        self.labels = dict(labels)
        self.created_at = life.created_at
        self.spec = spec
        self._root = root
        self._life = life
        self._images = Images(life, spec.outbound, image)
        self._meter = Meter(life)
        self.files = Files(life.link, life.awake, lambda: life.must_be("running"))

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
        spec = Spec.from_arguments(vcpu, memory_gb, disk_gb, env_vars, network, max_runtime_min, python, mounts)
        names = strings(labels)
        found = runsc or Runsc.find()
        spec.check_network(found)
        runtime = Runtime.get(found)
        try:
            root = runtime.root(mounts=spec.mounts)
            [life] = start_all(runtime, spec, root, None, 1, idle_after, start_timeout)
        finally:
            runtime.leave()
        sandbox = cls(life, spec, names, root)
        try:
            environment = life.directory / "python"
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
        spec = Spec.from_dict(description["spec"])
        runtime = Runtime.get(found)
        try:
            root = runtime.root(directory / "root")
            life = Life(runtime, id, description["idle_after"], "kept")
            life.created_at = description["created_at"]
        finally:
            runtime.leave()
        return cls(life, spec, description["labels"], root, directory / "image")

    # -- state

    @property
    def state(self) -> State:
        """Its state: running, paused, kept, dead (it ended by itself), or closed; stopped for idleness is running."""
        if self._life.state == "running" and self._life.awake.paused:
            return "paused"
        return self._life.state

    @property
    def stopped(self) -> bool:
        """Whether its processes are stopped at present, for idleness or by :meth:`pause`."""
        return self._life.awake.stopped

    @property
    def death(self) -> str | None:
        """Why the sandbox ended, None while it has not."""
        return self._life.link.death

    def wait_dead(self, timeout: float | None = None) -> str | None:
        """Wait until the sandbox has ended; return why, or None if it has not within ``timeout`` seconds."""
        return self._life.link.wait_death(timeout)

    def on_death(self, callback: Callable[[str], None]) -> None:
        """Have ``callback(reason)`` called once, in a background thread, when it ends by itself; at once if it has."""
        self._life.on_death(callback)

    def hold(self) -> contextlib.AbstractContextManager[None]:
        """Keep the sandbox from being stopped for idleness inside ``with sandbox.hold():``."""
        return self._life.awake.hold()

    def touch(self) -> None:
        """Wake the sandbox if it was stopped for idleness, and count its idle time from here; next to free if it was not."""
        self._life.awake.touch()

    def idle(self) -> bool:
        """Stop the sandbox until its next use, as ``idle_after`` would; return False when it is in use."""
        self._life.must_be("running")
        return self._life.awake.idle()

    @property
    def idle_after(self) -> float | None:
        """Seconds without use after which it is stopped until the next use; None for never."""
        return self._life.awake.idle_after

    @idle_after.setter
    def idle_after(self, seconds: float | None) -> None:
        self._life.awake.idle_after = seconds
        self._life.runtime.hub.poke()

    def pause(self) -> None:
        """Stop all its processes until :meth:`resume`. It goes on taking its memory; forks of it share one checkpoint."""
        self._life.must_be("running")
        self._life.awake.pause()

    def resume(self) -> None:
        """Let the sandbox go on after :meth:`pause`."""
        self._life.must_be("running")
        self._images.resume()

    def usage(self) -> Used:
        """Measure what its processes on this machine have used so far, without waking it.

        Of a sandbox that has ended it is what was last seen.
        """
        return self._meter.read()

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
        self._life.must_be("running")
        if user not in ("user", "root"):
            raise ValueError(f"user must be 'user' or 'root', not {user!r}")
        shell = "/bin/bash" if os.path.exists("/bin/bash") else "/bin/sh"
        argv = [shell, "-c", cmd] if isinstance(cmd, str) else [os.fspath(word) for word in cmd]
        request = {
            "argv": argv,
            "env": {**bundle.environment(self.spec.python), **self.spec.env_vars, **strings(env)},
            "cwd": cwd or HOME,
            "user": user,
            "background": background,
            "timeout": timeout,
        }
        with self._life.awake.hold():
            return execute(
                self._life.link,
                request,
                stdin=stdin,
                on_output=on_output,
                max_output=max_output,
                stopped=lambda: self._life.awake.paused,
            )

    def connect_port(self, port: int, timeout: float = 10) -> Stream:
        """Open a byte stream to a port on 127.0.0.1 inside, as a socket; see :class:`Stream`.

        Raises:
            ConnectionRefusedError: nobody listens there.
            SandboxDied: the sandbox ended. SandboxTimeout: its agent did not answer within ``timeout`` seconds.
        """
        self._life.must_be("running")
        return open_stream(self._life.link, self._life.awake, port, timeout)

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
        spec = self.spec.with_network(network)
        spec.check_network(self._life.runtime.runsc)
        names = self.labels if labels is None else strings(labels)
        with self._images.present(timeout) as image:
            lives = start_all(self._life.runtime, spec, self._root, image, n, self.idle_after, timeout)
        return [type(self)(life, spec, names, self._root) for life in lives]

    def prepare(self, timeout: float = 120) -> None:
        """Checkpoint the sandbox now if it is paused, so that the next fork need not; else do nothing."""
        self._images.prepare(timeout)

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
        with self._images.released(120) as image:
            if image is None:
                return self.id
            kept_at = time.time()
            description = {
                "labels": self.labels,
                "created_at": self.created_at,
                "kept_at": kept_at,
                "idle_after": self.idle_after,
                "runsc": self._life.runtime.runsc.version,
                "spec": self.spec.to_dict(),
            }
            store.write_kept(self.id, image, self._root, description, None if seconds is None else kept_at + seconds)
            self._life.end("kept")
            self._life.state = "kept"  # also where it was closed meanwhile
            self._images.hold(store.kept_image(self.id))
        return self.id

    # -- the end

    def close(self) -> None:
        """End the sandbox at once; nothing of it is left. Of a kept one only this handle ends."""
        self._life.close()
        self._images.drop()

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Sandbox {self.id} {self.state}>"

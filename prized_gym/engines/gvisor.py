"""The gvisor engine: bases and copies are sandboxes of gVisor's runsc on this machine, forked whole."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

from prized_gym import runsc
from prized_gym.errors import EngineUnavailableError, SandboxDiedError, SandboxError, SandboxTimeoutError
from prized_gym.interface.fleet import Usage
from prized_gym.interface.sandbox import KeptBase
from prized_gym.sandbox.driver import (
    OUTPUT_KEPT,
    Capabilities,
    Dialed,
    Driver,
    ExecResult,
    FileInfo,
    Sandbox,
    Shape,
)
from prized_gym.sandbox.engine import OPTIONS, SandboxEngine
from prized_gym.sandbox.modules import visible

_ID = re.compile(r"sbx_[0-9a-f]{12}")
_DEFAULTS: dict[str, float] = {"vcpu": 1.0, "memory_gb": 2.0, "disk_gb": 4.0}


class GvisorEngine(SandboxEngine):
    """Sandboxes on this machine.

    Options beyond those of every sandbox engine: ``python_path`` (directories to show read-only and to import from, beside
    what this process has imported) and ``runsc`` (the path of the runsc to use; None: ``RUNSC``, else ``PATH``).

    A copy that is replaced, by ``fork_on`` or at the end, is deleted as it stands: ``env.close()`` is not called in it. All
    that it could let go of ends with its sandbox, and nothing outside was its own.
    """

    name: ClassVar[str] = "gvisor"
    options: ClassVar[Mapping[str, Any]] = {**OPTIONS, "python_path": (), "runsc": None}

    @classmethod
    def check(cls) -> None:
        with _translated():
            runsc.Runsc.find()

    @classmethod
    def driver(cls, options: Mapping[str, Any]) -> Driver:
        with _translated():
            found = runsc.Runsc.find(options["runsc"])
        extra = [options["python_path"]] if isinstance(options["python_path"], str) else list(options["python_path"])
        return GvisorDriver(found, extra)

    @classmethod
    def is_id(cls, text: str) -> bool:
        return _ID.fullmatch(text) is not None

    @classmethod
    def kept(cls) -> list[KeptBase]:
        with _translated():
            return [
                KeptBase(kept.id, cls.name, kept.labels, kept.size, kept.kept_at, kept.expires_at)
                for kept in runsc.list_kept()
            ]

    @classmethod
    def remove(cls, id: str) -> bool:
        with _translated():
            return cls.is_id(id) and runsc.delete_kept(id)

    @classmethod
    def sweep(cls) -> list[str]:
        with _translated():
            return runsc.sweep()


class GvisorDriver(Driver):
    """Makes sandboxes with one runsc.

    Args:
        found: the runsc.
        python_path: directories to show and to import from.
    """

    capabilities = Capabilities(keeps=True)

    def __init__(self, found: runsc.Runsc, python_path: Sequence[str]) -> None:
        self._runsc = found
        self._python_path = python_path

    def create(self, shape: Shape, timeout: float) -> Sandbox:
        paths = runsc.python_paths(self._python_path)
        # The modules that what will be served refers to are shown too.
        mounts, search = visible(shape.payload, paths.binds, paths.search)
        paths = dataclasses.replace(paths, search=tuple(dict.fromkeys((*paths.search, *search))))
        network: Any = shape.network
        with _translated():
            sandbox = runsc.Sandbox.create(
                runsc=self._runsc,
                vcpu=shape.vcpu or _DEFAULTS["vcpu"],
                memory_gb=shape.memory_gb or _DEFAULTS["memory_gb"],
                disk_gb=shape.disk_gb or _DEFAULTS["disk_gb"],
                env_vars=shape.env_vars,
                labels=shape.labels,
                network=network,
                max_runtime_min=shape.max_runtime_min,
                python=paths,
                mounts=mounts,
                start_timeout=timeout,
            )
        return GvisorSandbox(sandbox)

    def connect(self, id: str) -> Sandbox:
        # A kept sandbox can only be forked, so the base is a fork of it, which can be used too.
        with _translated(), runsc.Sandbox.connect(id, runsc=self._runsc) as kept:
            return GvisorSandbox(kept.fork(1)[0])


class GvisorSandbox(Sandbox):
    """One sandbox.

    A fork, and `prepare`, leave it parked: stopped, with its checkpoint kept for the next fork, until it is next used.
    Whatever stops for idleness anyway need not be checkpointed anew for every fork.
    """

    scratch = "/home/user/.prized_gym"

    def __init__(self, sandbox: runsc.Sandbox) -> None:
        self._sandbox = sandbox
        self._lock = threading.Lock()
        self._forking = threading.Lock()
        self._uses = 0
        self._parked = False
        self._waking = threading.Lock()
        self.id = sandbox.id
        self.labels = sandbox.labels
        self.files = _Files(self)

    def __repr__(self) -> str:
        return f"<sandbox {self.id}, {self._sandbox.state}>"

    # Parking

    @property
    def asleep(self) -> bool:
        return self._parked

    def wake(self) -> None:
        # One at a time, and not in the middle of a fork.
        with self._waking, _translated():
            with self._lock:
                if not self._parked:
                    return
            self._sandbox.resume()
            with self._lock:
                self._parked = False

    @contextlib.contextmanager
    def use(self) -> Iterator[runsc.Sandbox]:
        """Awake, and not to be parked while inside. May block."""
        while True:
            with self._lock:
                if not self._parked:
                    self._uses += 1
                    break
            self.wake()
        try:
            with _translated():
                yield self._sandbox
        finally:
            with self._lock:
                self._uses -= 1

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        with self.use() as sandbox, sandbox.hold():
            yield

    # Use

    def exec(
        self,
        cmd: str | Sequence[str],
        *,
        timeout: float | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        background: bool = False,
        on_output: Callable[[str, bytes], None] | None = None,
        max_output: int = OUTPUT_KEPT,
    ) -> ExecResult:
        with self.use() as sandbox:
            try:
                result = sandbox.exec(
                    cmd,
                    timeout=timeout,
                    env=env,
                    cwd=cwd,
                    background=background,
                    on_output=on_output,
                    max_output=max_output,
                )
            except runsc.RunscError:
                raise
            except TimeoutError as error:
                raise SandboxTimeoutError(f"the sandbox was too busy to start the command: {error}") from error
            except OSError as error:
                raise SandboxError(f"the command cannot be started: {error}") from error
        return ExecResult(
            result.exit_code,
            result.stdout.decode("utf-8", "replace"),
            result.stderr.decode("utf-8", "replace"),
            result.timed_out,
        )

    def connect(self, port: int, timeout: float = 10.0) -> Dialed:
        with self.use() as sandbox:
            return Dialed(sandbox.connect_port(port, timeout))

    def fork(
        self, n: int, *, labels: Mapping[str, str] | None = None, network: str | None = None, timeout: float = 120.0
    ) -> list[Sandbox]:
        chosen: Any = network
        with self._forking, self._waking, _translated():
            self._park()
            return [
                GvisorSandbox(sandbox)
                for sandbox in self._sandbox.fork(n, labels=labels, network=chosen, timeout=timeout)
            ]

    def prepare(self) -> None:
        with self._forking, self._waking, _translated():
            if self._park():
                self._sandbox.prepare()

    def _park(self) -> bool:
        with self._lock:
            if not self._uses and not self._parked and self._sandbox.state == "running":
                self._sandbox.pause()
                self._parked = True
            return self._parked

    def pause(self) -> None:
        with self.use() as sandbox:
            sandbox.pause()

    def resume(self) -> None:
        with _translated():
            self._sandbox.resume()
        with self._lock:
            self._parked = False

    def keep(self, lifetime_hours: float | None) -> str:
        with _translated():
            kept = self._sandbox.keep(None if lifetime_hours is None else lifetime_hours * 3600.0)
            # Ends this handle only, with what it holds of this process's runtime.
            self._sandbox.close()
            return kept

    # Life

    @property
    def death(self) -> str | None:
        return self._sandbox.death

    def wait_dead(self, timeout: float) -> str | None:
        return self._sandbox.wait_dead(timeout)

    def usage(self) -> Usage:
        used = self._sandbox.usage()
        return Usage(used.cpu_seconds, used.memory / 1e9)

    def close(self) -> None:
        with contextlib.suppress(Exception):
            self._sandbox.close()


class _Files:
    """The files of a sandbox."""

    def __init__(self, sandbox: GvisorSandbox) -> None:
        self._sandbox = sandbox

    def upload(self, local: str | os.PathLike[str], remote: str | None = None) -> None:
        with self._sandbox.use() as sandbox:
            sandbox.files.upload(local, remote)

    def download(self, remote: str, local: str | os.PathLike[str] | None = None) -> None:
        with self._sandbox.use() as sandbox:
            sandbox.files.download(remote, local)

    def read(self, remote: str, *, max_bytes: int = 64 << 20) -> bytes:
        with self._sandbox.use() as sandbox:
            return sandbox.files.read(remote, max_bytes=max_bytes)

    def write(self, remote: str, data: bytes | str) -> None:
        with self._sandbox.use() as sandbox:
            sandbox.files.write(remote, data)

    def list(self, remote: str = ".") -> list[FileInfo]:
        with self._sandbox.use() as sandbox:
            return [FileInfo(each.name, each.kind, each.size, each.modified) for each in sandbox.files.list(remote)]

    def remove(self, remote: str) -> None:
        with self._sandbox.use() as sandbox:
            sandbox.files.remove(remote)


@contextlib.contextmanager
def _translated() -> Iterator[None]:
    """The errors of the runsc layer as this library's."""
    try:
        yield
    except runsc.RunscUnavailable as error:
        instead = "\nengine='local' forks processes instead of sandboxes." if sys.platform.startswith("linux") else ""
        raise EngineUnavailableError(f"engine='gvisor' cannot run here: {error}{instead}") from error
    except runsc.SandboxDied as error:
        raise SandboxDiedError(str(error)) from error
    except runsc.SandboxTimeout as error:
        raise SandboxTimeoutError(str(error)) from error
    except runsc.RunscError as error:
        raise SandboxError(str(error)) from error

"""Finding a runsc that can run, checkpoint and restore sandboxes here, or why it cannot."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import network
from .errors import OTHER_SYSTEMS, RunscError, RunscUnavailable

HOW = (
    "On Debian, `python scripts/get_runsc.py DIR` of the prized_gym repository brings one that works; set RUNSC to the "
    "path it prints. Elsewhere install gVisor, and set RUNSC or put runsc on PATH. `prized-gym doctor` says more."
)
_probed: dict[str, Runsc | RunscUnavailable] = {}
_lock = threading.RLock()


@dataclass(frozen=True)
class Runsc:
    """A runsc binary that ran, checkpointed and restored a sandbox on this machine.

    Attributes:
        path: absolute.
        version: as the binary names it.
    """

    path: str
    version: str

    @classmethod
    def find(cls, path: str | os.PathLike[str] | None = None) -> Runsc:
        """Find a runsc and try it.

        Each is tried once per process: a small sandbox is run, checkpointed and restored, which takes about a second.

        Args:
            path: of the binary; None: ``RUNSC`` in the environment, else ``PATH``.

        Raises:
            RunscUnavailable: there is none, or it cannot run, checkpoint or restore a sandbox here.
        """
        found = cls.locate(path)
        with _lock:
            if found not in _probed:
                try:
                    _probed[found] = _probe(found)
                except RunscUnavailable as error:
                    _probed[found] = error
            result = _probed[found]
        if isinstance(result, RunscUnavailable):
            raise RunscUnavailable(result.reason, result.remedy)
        return result

    @staticmethod
    def locate(path: str | os.PathLike[str] | None = None) -> str:
        """Return the absolute path of the runsc that :meth:`find` would try.

        Raises:
            RunscUnavailable: there is none.
        """
        if not sys.platform.startswith("linux"):
            raise RunscUnavailable(f"gVisor runs on Linux only, not on {platform.system()}", OTHER_SYSTEMS)
        asked = os.fspath(path) if path is not None else os.environ.get("RUNSC") or None
        found = shutil.which(asked or "runsc")
        if found is None:
            where = "the argument" if path is not None else "RUNSC" if asked else "PATH"
            reason = (
                f"no executable runsc at {asked} (from {where})" if asked else "no runsc on PATH, and RUNSC is not set"
            )
            raise RunscUnavailable(reason, HOW)
        return os.path.realpath(found)

    @property
    def slirp4netns(self) -> str | None:
        """The path of the slirp4netns for sandboxes with a network, or None."""
        return network.find_slirp4netns(self.path)

    def command(self, state: Path, outbound: bool, arguments: Sequence[str]) -> list[str]:
        """Build a whole command line.

        Args:
            state: runsc's directory of state files.
            outbound: whether sandboxes have a network.
            arguments: runsc's command and what follows it.
        """
        net = ["--network=sandbox", "--net-disconnect-ok"] if outbound else ["--network=none"]
        fixed = ["--platform=systrap", "--ignore-cgroups", "--overlay2=root:memory", "--host-uds=open"]
        return [self.path, *fixed, f"--root={state}", *net, *arguments]


def version(path: str) -> str:
    """Ask a runsc for its version.

    Raises:
        RunscUnavailable: it does not run, or is something else.
    """
    try:
        done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=20, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.SubprocessError) as error:
        raise RunscUnavailable(f"{path} does not run: {error}", HOW) from None
    first, _, rest = (done.stdout or done.stderr).strip().partition("\n")
    if done.returncode or not first.startswith("runsc version "):
        raise RunscUnavailable(f"{path} does not run as runsc: {(first + rest)[:500]}", HOW)
    return first.removeprefix("runsc version ")


def _probe(path: str) -> Runsc:
    from .sandbox import Sandbox  # it needs this module

    runsc = Runsc(path, version(path))
    sandboxes: list[Any] = []
    step = "run"
    try:
        sandboxes.append(
            Sandbox.create(runsc=runsc, vcpu=1, memory_gb=0.5, disk_gb=0.01, max_runtime_min=2, start_timeout=20)
        )
        step = "checkpoint and restore"
        sandboxes += sandboxes[0].fork(1, timeout=20)
        if sandboxes[1].exec(["/bin/true"], timeout=10).exit_code != 0:
            raise RunscError("a restored sandbox does not run /bin/true")
    except (RunscError, OSError) as error:
        raise RunscUnavailable(
            f"{path} ({runsc.version}) cannot {step} a sandbox on this machine: {error}", HOW
        ) from error
    finally:
        for sandbox in sandboxes:
            sandbox.close()
    return runsc

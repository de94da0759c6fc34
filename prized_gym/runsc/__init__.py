r"""Whole sandboxes with gVisor's runsc: run, checkpointed and forked on this machine.

Synchronous and thread-safe, and of the standard library only.

Example:
    >>> runsc = Runsc.find()
    >>> with Sandbox.create(runsc=runsc) as base:
    ...     server = base.exec("python -m http.server 8000 --bind 127.0.0.1", background=True)
    ...     listening = base.exec("bash -c 'until : </dev/tcp/127.0.0.1/8000; do sleep 0.1; done' 2>/dev/null")
    ...     for copy in base.fork(8):
    ...         with copy, copy.connect_port(8000) as stream:
    ...             stream.sendall(b"GET / HTTP/1.0\r\n\r\n")
"""

from .doctor import Check, diagnose
from .errors import RunscError, RunscUnavailable, SandboxDied, SandboxStateError, SandboxTimeout
from .execute import ExecResult
from .files import FileInfo, Files
from .find import Runsc
from .python import PythonPaths, python_paths
from .runtime import close_all
from .sandbox import Sandbox
from .store import Kept, delete_kept, list_kept, sweep
from .stream import Stream
from .usage import Used

__all__ = [
    "Check",
    "ExecResult",
    "FileInfo",
    "Files",
    "Kept",
    "PythonPaths",
    "Runsc",
    "RunscError",
    "RunscUnavailable",
    "Sandbox",
    "SandboxDied",
    "SandboxStateError",
    "SandboxTimeout",
    "Stream",
    "Used",
    "close_all",
    "delete_kept",
    "diagnose",
    "list_kept",
    "python_paths",
    "sweep",
]

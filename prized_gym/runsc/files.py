"""Files of a sandbox: whole trees in and out, read, written, listed and removed.

What comes out is checked before a byte is written: names stay below the target, and links that lead out are left out.
"""

from __future__ import annotations

import io
import os
import posixpath
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from socket import socket
from typing import Any

from . import agent
from .agent import BadFrame
from .awake import Awake
from .connection import Link
from .errors import RunscError, SandboxTimeout
from .remote import remote_error

MAX_ENTRIES = 1_000_000
DEFAULT_LIMIT = 16 << 30


@dataclass(frozen=True)
class FileInfo:
    """One entry of a directory in a sandbox.

    Attributes:
        name: without the directory.
        kind: ``"file"``, ``"dir"``, ``"link"`` or ``"other"``.
        size: bytes.
        mode: permission bits.
        modified: seconds since the epoch.
    """

    name: str
    kind: str
    size: int
    mode: int
    modified: float


class Files:
    """Files of one sandbox, read and written as its user; relative remote paths are relative to its home.

    Every method raises the OSError the sandbox met (FileNotFoundError, PermissionError …, naming the remote path),
    SandboxDied, SandboxTimeout when nothing moved for ``timeout`` seconds, and SandboxStateError in a paused sandbox.
    Forks wait for a transfer's end.

    Args:
        link: the sandbox's.
        awake: what stops it for idleness.
        check: raises when the sandbox is not one to use.
        timeout: seconds.
    """

    def __init__(self, link: Link, awake: Awake, check: Callable[[], None], timeout: float = 60.0) -> None:
        self._check = check
        self._link = link
        self._awake = awake
        self.timeout = timeout

    def upload(self, local: str | os.PathLike[str], remote: str | None = None) -> None:
        """Copy a local file, or a directory with all below it, to ``remote`` (its own name if None).

        Links in a directory are copied as links.
        """
        path = Path(local)
        path.stat()  # a missing one is an error before the sandbox is asked
        with self._request("put", path.name if remote is None else remote) as (connection, remote):
            agent.send_tree(connection, path)
            self._done(connection, remote)

    def write(self, remote: str, data: bytes | str) -> None:
        """Write a file, making the directories above it. Text is written as UTF-8."""
        content = data.encode() if isinstance(data, str) else data
        with self._request("put", remote) as (connection, remote):
            agent.send_json(connection, {"path": "", "type": "file", "mode": 0o644})
            agent.send_bytes(connection, io.BytesIO(content))
            agent.send_json(connection, {})
            self._done(connection, remote)

    def download(
        self, remote: str, local: str | os.PathLike[str] | None = None, *, max_bytes: int = DEFAULT_LIMIT
    ) -> None:
        """Copy a remote file, or a directory with all below it, to ``local`` (its own name, here, if None).

        Links that lead out of the directory are left out, and nothing is written through a link.

        Raises:
            RunscError: there is more than ``max_bytes``.
        """
        target = Path(PurePosixPath(remote).name if local is None else local)
        with self._request("get", remote) as (connection, remote):
            self._done(connection, remote)
            _receive_tree(connection, target, max_bytes, remote)

    def read(self, remote: str, *, max_bytes: int = 64 << 20) -> bytes:
        """Read the content of a file.

        Raises:
            IsADirectoryError: it is a directory. RunscError: it is longer than ``max_bytes``.
        """
        with self._request("get", remote) as (connection, remote):
            self._done(connection, remote)
            entry = _entry(agent.receive_json(connection), remote)
            if entry.kind != "file":
                raise IsADirectoryError(21, "Is a directory (in the sandbox)", remote)
            pieces: list[bytes] = []
            for piece in agent.receive_bytes(connection):
                pieces.append(piece)
                if (max_bytes := max_bytes - len(piece)) < 0:
                    raise RunscError(f"{remote} in the sandbox is larger than max_bytes")
            return b"".join(pieces)

    def list(self, remote: str = ".") -> list[FileInfo]:
        """List the entries of a directory, by name."""
        found: list[FileInfo] = []
        with self._request("list", remote) as (connection, remote):
            while "entries" in (answer := agent.receive_json(connection)):
                found += [_info(entry) for entry in answer["entries"]]
                if len(found) > MAX_ENTRIES:
                    raise RunscError(f"{remote} in the sandbox holds more than {MAX_ENTRIES} entries")
            if answer.get("ok") is not True:
                raise remote_error(answer, remote)
        return sorted(found, key=lambda info: info.name)

    def remove(self, remote: str) -> None:
        """Remove a file, a link, or a directory with all below it."""
        with self._request("remove", remote) as (connection, remote):
            self._done(connection, remote)

    @contextmanager
    def _request(self, what: str, remote: str) -> Iterator[tuple[socket, str]]:
        if not remote or "\0" in remote:
            raise ValueError(f"{remote!r} is no path")
        self._check()
        try:
            with self._awake.hold(), self._link.undisturbed():
                connection = self._link.dial({"op": "files", "do": what, "path": remote}, self.timeout, inside=True)
                with connection:
                    yield connection, remote
        except (EOFError, ConnectionError):
            raise self._link.lost(f"during a transfer of {remote}") from None
        except SandboxTimeout:
            raise
        except TimeoutError:
            raise SandboxTimeout(f"nothing moved for {self.timeout:g} s in a transfer of {remote}") from None
        except BadFrame as error:
            raise RunscError(f"the sandbox's agent answered nonsense: {error}") from None

    @staticmethod
    def _done(connection: socket, remote: str) -> None:
        answer = agent.receive_json(connection)
        if answer.get("ok") is not True:
            raise remote_error(answer, remote)


@dataclass(frozen=True)
class _Entry:
    path: str
    kind: str
    mode: int
    target: str


def _entry(message: dict[str, Any], remote: str) -> _Entry:
    """Check an entry of a tree; a name that would leave the tree is a BadFrame, an error of the sandbox is raised as such."""
    if "error" in message:
        raise remote_error(message, remote)
    path, kind, mode, target = (
        message.get("path"),
        message.get("type"),
        message.get("mode", 0o644),
        message.get("target", ""),
    )
    if not (isinstance(path, str) and isinstance(kind, str) and isinstance(mode, int) and isinstance(target, str)):
        raise BadFrame("malformed entry")
    parts = path.split("/") if path else []
    if (
        kind not in ("file", "dir", "link")
        or len(path) > 4096
        or "\0" in path
        or any(part in ("", ".", "..") for part in parts)
    ):
        raise BadFrame(f"entry {path[:200]!r} of kind {kind[:20]!r}")
    return _Entry(path, kind, mode & 0o777, target)


def _info(entry: object) -> FileInfo:
    if not (isinstance(entry, list) and len(entry) == 5):
        raise BadFrame("malformed directory entry")
    name, form, size, mode, modified = entry
    if not (
        isinstance(name, str)
        and all(isinstance(value, int) for value in (form, size, mode))
        and isinstance(modified, (int, float))
    ):
        raise BadFrame("malformed directory entry")
    kind = {stat.S_IFREG: "file", stat.S_IFDIR: "dir", stat.S_IFLNK: "link"}.get(form, "other")
    return FileInfo(name[:4096], kind, size, mode & 0o7777, float(modified))


def _receive_tree(connection: socket, target: Path, max_bytes: int, remote: str) -> None:
    """Write what the agent sends of a tree to ``target``."""
    root = target.resolve()
    links: list[tuple[Path, str]] = []
    modes: list[tuple[Path, int]] = []
    count = 0
    while message := agent.receive_json(connection):
        entry = _entry(message, remote)
        count += 1
        if count > MAX_ENTRIES:
            raise RunscError(f"{remote} in the sandbox holds more than {MAX_ENTRIES} entries")
        path = root.joinpath(*entry.path.split("/")) if entry.path else root
        if entry.path and path.parent.resolve() != path.parent:
            raise RunscError(f"{path.parent} leads through a link; nothing of the sandbox is written through it")
        if entry.kind == "dir":
            path.mkdir(parents=True, exist_ok=True)
            modes.append((path, entry.mode | 0o700))
        elif entry.kind == "link":
            inside = posixpath.normpath(posixpath.join(posixpath.dirname(entry.path), entry.target))
            if not entry.target.startswith("/") and inside.split("/")[0] != ".." and "\0" not in entry.target:
                links.append((path, entry.target))
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
            with os.fdopen(os.open(path, flags, 0o600), "wb") as file:
                for piece in agent.receive_bytes(connection):
                    if (max_bytes := max_bytes - len(piece)) < 0:
                        raise RunscError(f"{remote} in the sandbox is larger than max_bytes")
                    file.write(piece)
                os.fchmod(file.fileno(), entry.mode | 0o600)
    for path, goal in links:  # last, so that nothing can be written through them
        if path.is_symlink():
            path.unlink()
        if not path.exists():
            path.symlink_to(goal)
    for path, mode in reversed(modes):
        path.chmod(mode)

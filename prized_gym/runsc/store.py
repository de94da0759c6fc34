"""Where sandboxes live on disk, who may remove what, and what is kept.

``STORE/lock``          held while a runtime appears and while a sweep looks
``STORE/m-xxxxxxxx/``   one runtime: its lock, its sandboxes, checkpoint images; removed by its supervisor, or by a sweep
``STORE/kept/sbx_…/``   a kept sandbox: its image, root directory and description; removed by hand, or by a sweep once expired
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import cgroups
from .errors import OTHER_SYSTEMS, RunscError, RunscUnavailable, SandboxStateError

try:
    import fcntl
except ImportError:  # Windows
    raise RunscUnavailable("gVisor runs on Linux only", OTHER_SYSTEMS) from None

KEPT_VERSION = 1
KEPT_SECONDS = 7 * 86400.0
"""How long a kept sandbox stays on disk unless its keeper says otherwise."""
_ID = re.compile(r"sbx_[0-9a-f]{12}")


def new_id() -> str:
    """Draw a sandbox id, of fixed width because runsc takes prefixes of ids for ids."""
    return "sbx_" + secrets.token_hex(6)


def store_path() -> Path:
    """Return the store: ``PRIZED_GYM_STORE``, or a directory of this user's in ``/var/tmp``, made if missing.

    It holds checkpoint images, which are as large as a sandbox's memory, and sockets, whose paths must be short.

    Raises:
        RunscError: other users can open it, or its path is too long.
    """
    path = Path(os.environ.get("PRIZED_GYM_STORE") or f"/var/tmp/prized-gym-{os.getuid()}").absolute()
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise RunscError(f"{path} must be a directory that only this user can open; remove it or set PRIZED_GYM_STORE")
    if len(str(path)) > 50:
        raise RunscError(f"{path} is too long for the sockets below it (50 characters at most); set PRIZED_GYM_STORE")
    return path


@contextlib.contextmanager
def _locked(store: Path) -> Iterator[None]:
    fd = os.open(store / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def make_runtime_directory() -> tuple[Path, int]:
    """Make a directory for this runtime; the lock whose descriptor comes with it keeps sweeps away while anybody holds it."""
    store = store_path()
    with _locked(store):
        directory = store / f"m-{secrets.token_hex(4)}"
        directory.mkdir(mode=0o700)
        lock = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)
    for name in ("state", "sandboxes", "images"):
        (directory / name).mkdir()
    return directory, lock


def sweep() -> list[str]:
    """Remove what dead runtimes left on disk and in cgroups, and kept sandboxes that have expired.

    A runtime's supervisor removes its own directory. A sweep is for those that were killed along with their runtime, or
    lost power. Every runtime sweeps when it starts.

    Returns:
        The names of what was removed: directories of runtimes, ids of kept sandboxes.
    """
    store = store_path()
    removed = []
    with _locked(store):
        for directory in sorted(store.glob("m-*")):
            try:
                fd = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            except OSError:
                continue
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                continue
            else:
                cgroups.remove_all(directory)
                shutil.rmtree(directory, ignore_errors=True)
                removed.append(directory.name)
            finally:
                os.close(fd)
        for leftover in (store / "kept").glob(".*"):  # a keep that was cut short
            shutil.rmtree(leftover, ignore_errors=True)
            removed.append(leftover.name)
        now = time.time()
        for directory in sorted((store / "kept").glob("sbx_*")):
            expires_at = _expiry(directory)
            if expires_at is not None and expires_at <= now and delete_kept(directory.name):
                removed.append(directory.name)
    return removed


@dataclass(frozen=True)
class Kept:
    """A kept sandbox: what is on disk under its id.

    Attributes:
        id: what it is connected to and deleted by.
        labels: its labels; empty where its description cannot be read.
        created_at: when the sandbox was made, in seconds since the epoch.
        kept_at: when it was kept, in seconds since the epoch.
        expires_at: when a sweep may remove it, in seconds since the epoch; None for never.
        size: bytes it takes on disk, its checkpoint image and its root directory included.
    """

    id: str
    labels: dict[str, str]
    created_at: float
    kept_at: float
    expires_at: float | None
    size: int


def _kept_directory(id: str) -> Path:
    if not _ID.fullmatch(id):
        raise ValueError(f"{id!r} is no sandbox id")
    return store_path() / "kept" / id


def write_kept(id: str, image: Path, root: Path, description: dict[str, Any], expires_at: float | None) -> None:
    """Put an image, a root directory and a description under an id: all of it, or nothing.

    Args:
        id: the sandbox's.
        image: the directory of its checkpoint, which is moved.
        root: its root directory, which is copied.
        description: what :func:`read_kept` gives back.
        expires_at: when a sweep may remove it, in seconds since the epoch; None for never.
    """
    final = _kept_directory(id)
    part = final.parent / f".{id}"
    stored = {"version": KEPT_VERSION, **description, "expires_at": expires_at}
    with _locked(store_path()):
        part.mkdir(mode=0o700, parents=True)
        try:
            image.rename(part / "image")
            shutil.copytree(root, part / "root", symlinks=True)
            (part / "description.json").write_text(json.dumps(stored))
            part.rename(final)
        except BaseException:
            shutil.rmtree(part, ignore_errors=True)
            raise


def read_kept(id: str) -> tuple[Path, dict[str, Any]]:
    """Return the directory and the description of a kept sandbox.

    Raises:
        SandboxStateError: there is none, it has expired, or another version of this library kept it.
        ValueError: ``id`` is no sandbox id.
    """
    directory = _kept_directory(id)
    try:
        description: dict[str, Any] = json.loads((directory / "description.json").read_text())
    except FileNotFoundError:
        raise SandboxStateError(
            f"no sandbox {id} is kept on this machine in {directory.parent}: it was removed, or its lifetime is over"
        ) from None
    except ValueError:
        raise SandboxStateError(
            f"the description of the kept sandbox {id} is damaged; `prized-gym rm {id}` removes it"
        ) from None
    if description.get("version") != KEPT_VERSION:
        raise SandboxStateError(
            f"sandbox {id} was kept by another version of prized_gym; `prized-gym rm {id}` removes it"
        )
    expires_at = description.get("expires_at")
    if expires_at is not None and expires_at <= time.time():
        raise SandboxStateError(
            f"sandbox {id} was kept until {_date(expires_at)} and has expired: keep one again, with a longer lifetime"
        )
    return directory, description


def kept_image(id: str) -> Path:
    """Return the directory of a kept sandbox's checkpoint image, whether or not it is there."""
    return _kept_directory(id) / "image"


def list_kept(labels: dict[str, str] | None = None) -> list[Kept]:
    """Return every kept sandbox of this user that has all of ``labels``, oldest first.

    Those that have expired and those whose description cannot be read are among them as long as they are on disk.
    """
    found = [_describe(path) for path in (store_path() / "kept").glob("sbx_*") if _ID.fullmatch(path.name)]
    wanted = (labels or {}).items()
    return sorted((kept for kept in found if wanted <= kept.labels.items()), key=lambda kept: kept.kept_at)


def delete_kept(id: str) -> bool:
    """Remove a kept sandbox. Copies forked from it are not touched.

    Returns:
        Whether there was one.

    Raises:
        ValueError: ``id`` is no sandbox id.
    """
    directory = _kept_directory(id)
    part = directory.parent / f".{id}-{secrets.token_hex(4)}"
    try:
        directory.rename(part)  # at once: nobody forks half of it
    except FileNotFoundError:
        return False
    shutil.rmtree(part, ignore_errors=True)
    return True


def _describe(directory: Path) -> Kept:
    """Describe a kept sandbox, with what can be found out of one whose description is damaged or not ours."""
    try:
        description = json.loads((directory / "description.json").read_text())
        labels = dict(description["labels"])
        created_at, kept_at = float(description["created_at"]), float(description["kept_at"])
    except (OSError, ValueError, KeyError, TypeError):
        labels = {}
        try:
            created_at = kept_at = directory.stat().st_mtime
        except OSError:
            created_at = kept_at = time.time()  # it has been removed meanwhile
    return Kept(directory.name, labels, created_at, kept_at, _expiry(directory), _size(directory))


def _expiry(directory: Path) -> float | None:
    """Read when a kept sandbox expires; None for never, or where that cannot be read."""
    try:
        expires_at = json.loads((directory / "description.json").read_text())["expires_at"]
        return None if expires_at is None else float(expires_at)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _size(directory: Path) -> int:
    """Count the bytes that a directory and all below it take on disk."""
    total = 0
    for parent, _, files in os.walk(directory):
        for path in (parent, *(os.path.join(parent, name) for name in files)):
            try:
                total += os.lstat(path).st_blocks * 512
            except OSError:
                continue
    return total


def _date(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))

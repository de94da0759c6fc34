"""Where sandboxes live on disk, who may remove what, and what is kept.

STORE/lock            held while a runtime appears and while a sweep looks
STORE/m-xxxxxxxx/     one runtime: its lock, its sandboxes, checkpoint images; removed by its supervisor, or by a sweep
STORE/kept/sbx_…/     a kept sandbox: its image, root directory and description
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import cgroups
from .errors import RunscError, SandboxStateError

KEPT_VERSION = 1
_ID = re.compile(r"sbx_[0-9a-f]{12}")


def new_id() -> str:
    """A sandbox id. Fixed width, because runsc takes prefixes of ids for ids."""
    return "sbx_" + secrets.token_hex(6)


def store_path() -> Path:
    """The store: PRIZED_GYM_STORE, or a directory of this user's in /var/tmp, made if missing.

    RunscError if it is not ours alone. It holds checkpoint images, which are as large as a sandbox's memory, and
    sockets, whose paths must be short.
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
    """A directory for this runtime and the descriptor of its lock, which keeps sweeps away while anybody holds it."""
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
    """Remove what dead runtimes left on disk and in cgroups; the names of what was removed.

    A runtime's supervisor does this itself. A sweep is for those that were killed along with their runtime, or lost power.
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
    return removed


@dataclass(frozen=True)
class Kept:
    """A kept sandbox: what is on disk under its id."""

    id: str
    labels: dict[str, str]
    created_at: float
    kept_at: float
    size: int
    """Bytes on disk."""


def _kept_directory(id: str) -> Path:
    if not _ID.fullmatch(id):
        raise ValueError(f"{id!r} is no sandbox id")
    return store_path() / "kept" / id


def write_kept(id: str, image: Path, root: Path, description: dict[str, Any]) -> None:
    """Put an image, a root directory and a description under `id`; the image is moved. All at once, or nothing."""
    final = _kept_directory(id)
    part = final.parent / f".{id}"
    with _locked(store_path()):
        part.mkdir(mode=0o700, parents=True)
        try:
            image.rename(part / "image")
            shutil.copytree(root, part / "root", symlinks=True)
            (part / "description.json").write_text(json.dumps({"version": KEPT_VERSION, **description}))
            part.rename(final)
        except BaseException:
            shutil.rmtree(part, ignore_errors=True)
            raise


def read_kept(id: str) -> tuple[Path, dict[str, Any]]:
    """The directory and the description of a kept sandbox.

    SandboxStateError if there is none, or one of another version.
    """
    directory = _kept_directory(id)
    try:
        description: dict[str, Any] = json.loads((directory / "description.json").read_text())
    except FileNotFoundError:
        raise SandboxStateError(f"no sandbox {id} is kept on this machine in {directory.parent}") from None
    if description.get("version") != KEPT_VERSION:
        raise SandboxStateError(
            f"sandbox {id} was kept by another version of prized_gym; delete_kept({id!r}) removes it"
        )
    return directory, description


def list_kept(labels: dict[str, str] | None = None) -> list[Kept]:
    """Every kept sandbox of this user that has all of `labels`, oldest first."""
    found = []
    for path in (store_path() / "kept").glob("sbx_*"):
        try:
            directory, description = read_kept(path.name)
            size = sum(file.stat().st_size for file in (directory / "image").iterdir())
        except (SandboxStateError, ValueError, OSError):
            continue
        if (labels or {}).items() <= description["labels"].items():
            found.append(
                Kept(path.name, description["labels"], description["created_at"], description["kept_at"], size)
            )
    return sorted(found, key=lambda kept: kept.kept_at)


def delete_kept(id: str) -> bool:
    """Remove a kept sandbox; False if there was none. Copies forked from it are not touched."""
    directory = _kept_directory(id)
    part = directory.parent / f".{id}-{secrets.token_hex(4)}"
    try:
        directory.rename(part)  # at once: nobody forks half of it
    except FileNotFoundError:
        return False
    shutil.rmtree(part, ignore_errors=True)
    return True

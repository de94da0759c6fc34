"""A copy's own view of the base's working directory: what it writes there nobody else sees.

Where the system permits (root, or unprivileged user namespaces), the copy moves into a mount namespace of its own and
lays an overlay over the directory, with its changes in a tmpfs that goes when the copy does; absolute and relative
paths both reach the view. Elsewhere the directory is copied and the copy's process moves into the duplicate: relative
paths reach the view, absolute ones still reach the base's directory.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
from pathlib import Path

from prized_gym.engines.local.processes import libc

_CLONE_NEWNS = 0x00020000
_CLONE_NEWUSER = 0x10000000
_MS_BIND = 4096
_MS_REC = 16384
_MS_PRIVATE = 1 << 18


class View:
    """The view of one copy; a branch of the copy inherits it and enters one of its own.

    Args:
        workdir: the base's directory, absolute and without symbolic links.
        scratch: an empty directory, private to this base: a place to mount on, or to put duplicates in.

    Attributes:
        root: where the view is: ``workdir`` itself under an overlay, else the duplicate.
        overlay: whether it is an overlay.
    """

    def __init__(self, workdir: str, scratch: str) -> None:
        self.root = workdir
        self.overlay = False
        self._workdir = workdir
        self._scratch = scratch
        self._layers: list[str] = []
        self._layer_count = 0

    def enter(self) -> None:
        """Move this process into a view of its own that starts as the current one is."""
        if not os.environ.get("PRIZED_GYM_NO_OVERLAY"):
            with contextlib.suppress(OSError):
                if not self.overlay:
                    self._first_namespace()
                else:
                    _unshare(_CLONE_NEWNS)
                self._lay_over()
                return
        duplicate = os.path.join(self._scratch, str(os.getpid()))
        shutil.copytree(self.root, duplicate, symlinks=True)
        self.root = duplicate
        os.chdir(duplicate)

    def freeze(self) -> None:
        """Let what this copy has written so far become a layer that nobody writes to, so that a branch can share it."""
        if self.overlay:
            self._layers.insert(0, self._upper)
            self._lay_over()

    def _first_namespace(self) -> None:
        if os.geteuid() == 0:
            _unshare(_CLONE_NEWNS)
        else:
            uid, gid = os.geteuid(), os.getegid()
            _unshare(_CLONE_NEWUSER | _CLONE_NEWNS)
            Path("/proc/self/setgroups").write_text("deny")
            Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
            Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")
        _mount("none", "/", None, _MS_REC | _MS_PRIVATE, None)
        _mount("tmpfs", self._scratch, "tmpfs", 0, "mode=700")
        lower = os.path.join(self._scratch, "lower")
        os.mkdir(lower)
        # The overlay will hide the directory itself, which its later layers still need.
        _mount(self._workdir, lower, None, _MS_BIND, None)
        self._layers = [lower]

    def _lay_over(self) -> None:
        self._layer_count += 1
        name = f"{os.getpid()}-{self._layer_count}"
        upper, work = (os.path.join(self._scratch, f"{kind}-{name}") for kind in ("upper", "work"))
        os.mkdir(upper)
        os.mkdir(work)
        shutil.copymode(self._workdir, upper)
        lower = ":".join(_escape(layer) for layer in self._layers)
        options = f"lowerdir={lower},upperdir={_escape(upper)},workdir={_escape(work)}"
        if os.geteuid() != 0:
            options += ",userxattr"
        _mount("overlay", self._workdir, "overlay", 0, options)
        self._upper = upper
        self.overlay = True
        os.chdir(self._workdir)


def remove_duplicate(scratch: str | None, pid: int) -> None:
    """Remove the duplicate that the ended process ``pid`` worked in, if it had one."""
    if scratch is not None:
        shutil.rmtree(os.path.join(scratch, str(pid)), ignore_errors=True)


def _escape(path: str) -> str:
    for character in "\\:,":
        path = path.replace(character, "\\" + character)
    return path


def _unshare(flags: int) -> None:
    library = libc()
    if library is None:
        raise OSError("namespaces need Linux")
    if library.unshare(flags) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), "unshare")


def _mount(source: str, target: str, kind: str | None, flags: int, options: str | None) -> None:
    library = libc()
    if library is None:
        raise OSError("mounting needs Linux")
    texts = [None if text is None else os.fsencode(text) for text in (source, target, kind, options)]
    if library.mount(texts[0], texts[1], texts[2], ctypes.c_ulong(flags), texts[3]) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), target)

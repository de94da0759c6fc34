"""Files and directories as frames: sent by one side, written by the other."""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path

from .frames import describe, receive_bytes, receive_json, send_bytes, send_json


def send_tree(connection: socket.socket, root: Path) -> None:
    """Send a file, or a directory with all below it.

    That is a JSON entry each, a file's bytes after its own, and an empty entry at the end.
    """
    stack = [(root, "")]
    while stack:
        path, name = stack.pop()
        status = path.stat() if not name else path.lstat()  # the root may be a link; links below it stay links
        mode = stat.S_IMODE(status.st_mode)
        if stat.S_ISDIR(status.st_mode):
            send_json(connection, {"path": name, "type": "dir", "mode": mode})
            stack += [
                (path / child, f"{name}/{child}" if name else child) for child in sorted(os.listdir(path), reverse=True)
            ]
        elif stat.S_ISLNK(status.st_mode):
            send_json(connection, {"path": name, "type": "link", "target": os.readlink(path)})
        elif stat.S_ISREG(status.st_mode):
            with open(path, "rb") as file:
                send_json(connection, {"path": name, "type": "file", "mode": mode})
                send_bytes(connection, file)
        # Sockets, pipes and devices have no content to carry.
    send_json(connection, {})


def put_tree(connection: socket.socket, root: Path) -> None:
    """Write what :func:`send_tree` sends below ``root``, then answer.

    After an error the rest is read and dropped, so that the host receives the error.
    """
    failure: Exception | None = None
    modes: list[tuple[Path, int]] = []
    try:
        root.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        failure = error
    while entry := receive_json(connection):
        path = root / entry["path"] if entry["path"] else root
        kind = entry["type"]
        pieces = receive_bytes(connection) if kind == "file" else iter(())
        try:
            if failure is None:
                if kind == "dir":
                    path.mkdir(parents=True, exist_ok=True)
                    modes.append((path, entry["mode"]))
                elif kind == "link":
                    if path.is_symlink():
                        path.unlink()
                    path.symlink_to(entry["target"])
                else:
                    with open(path, "wb") as file:
                        for piece in pieces:
                            file.write(piece)
                    path.chmod(entry["mode"])
        except OSError as error:
            failure = error
        for _ in pieces:
            pass
    for path, mode in reversed(modes):  # last: a directory may be read-only
        path.chmod(mode)
    send_json(connection, {"ok": True} if failure is None else describe(failure))

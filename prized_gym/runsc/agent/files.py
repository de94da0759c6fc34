"""Requests about files: get, put, list, remove."""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path
from typing import Any

from .frames import BadFrame, describe, send_json
from .inside import HOME
from .trees import put_tree, send_tree


def serve_files(connection: socket.socket, request: dict[str, Any]) -> None:
    """Serve one request about files."""
    path = Path(HOME, request["path"])
    try:
        what = request["do"]
        if what == "get":
            path.stat()
            send_json(connection, {"ok": True})
            send_tree(connection, path)
        elif what == "put":
            put_tree(connection, path)
        elif what == "list":
            entries = []
            with os.scandir(path) as found:
                for entry in found:
                    status = entry.stat(follow_symlinks=False)
                    entries.append(
                        [
                            entry.name,
                            stat.S_IFMT(status.st_mode),
                            status.st_size,
                            stat.S_IMODE(status.st_mode),
                            status.st_mtime,
                        ]
                    )
            for index in range(0, len(entries), 1000):
                send_json(connection, {"entries": entries[index : index + 1000]})
            send_json(connection, {"ok": True})
        elif what == "remove":
            remove(path)
            send_json(connection, {"ok": True})
        else:
            raise BadFrame(f"unknown request {what!r}")
    except Exception as error:
        send_json(connection, describe(error))


def remove(path: Path) -> None:
    """Remove a file, a link, or a directory with all below it."""
    if path.is_symlink() or not path.is_dir():
        path.unlink()
        return
    for directory, directories, files in os.walk(path, topdown=False):
        for name in files:
            os.unlink(os.path.join(directory, name))
        for name in directories:
            child = os.path.join(directory, name)
            if os.path.islink(child):
                os.unlink(child)
            else:
                os.rmdir(child)
    os.rmdir(path)

"""The first steps of a base process: the trainer's search path comes before anything that is found along it.

Imported as a neighbour, by its name alone, and imports the standard library only.
"""

from __future__ import annotations

import importlib.util
import os
import pickle
import socket
import struct
import sys
from types import ModuleType
from typing import Any

_HEADER = struct.Struct("<Q")


def begin(control: socket.socket) -> dict[str, Any] | None:
    """Take the trainer's ``sys.path`` and ``sys.argv`` from the first message, and find this package along that path.

    Returns:
        That message; None if the trainer has hung up.
    """
    header = _exactly(control, _HEADER.size)
    message = None if header is None else _exactly(control, _HEADER.unpack(header)[0])
    if message is None:
        return None
    context: dict[str, Any] = pickle.loads(message)
    sys.path[:] = context["path"]
    sys.argv[:] = context["argv"]
    _import_this_package()
    return context


def _exactly(sock: socket.socket, length: int) -> bytes | None:
    data = b""
    while len(data) < length:
        part = sock.recv(length - len(data))
        if not part:
            return None
        data += part
    return data


def _import_this_package() -> ModuleType:
    """Import the very package that this file is of, wherever the search path would find another or none."""
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    place = os.path.join(root, "__init__.py")
    spec = importlib.util.spec_from_file_location("prized_gym", place, submodule_search_locations=[root])
    if spec is None or spec.loader is None:
        raise ImportError(f"{place} cannot be imported")
    package = importlib.util.module_from_spec(spec)
    sys.modules["prized_gym"] = package
    spec.loader.exec_module(package)
    return package

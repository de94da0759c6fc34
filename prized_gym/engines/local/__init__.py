"""The local engine: a base process, forked copy-on-write into one process per copy."""

from __future__ import annotations

import multiprocessing
import os
import socket
import sys
from collections.abc import Mapping
from typing import Any, ClassVar

from prized_gym.arguments import seconds
from prized_gym.errors import EngineUnavailableError, SetupError
from prized_gym.interface.engine import BaseHandle, Engine
from prized_gym.recipe import Recipe


class LocalEngine(Engine):
    """Bases are processes of this machine, copies their forks."""

    name: ClassVar[str] = "local"
    options: ClassVar[Mapping[str, Any]] = {
        "allow_threads": False,
        "workdir": None,
        "close_copies": "own",
        "close_timeout": 30.0,
        "pin": None,
    }

    @classmethod
    def check(cls) -> None:
        needed = {"os.fork": (os, "fork"), "os.eventfd": (os, "eventfd"), "socket.send_fds": (socket, "send_fds")}
        missing = [name for name, (module, function) in needed.items() if not hasattr(module, function)]
        if missing:
            raise EngineUnavailableError(
                f"the local engine needs Linux, with fork and eventfd, and this system ({sys.platform}) has no "
                f"{', no '.join(missing)}. Use engine='inline': the copies live in this process, each built anew."
            )

    @classmethod
    def build(cls, recipe: Recipe, options: Mapping[str, Any], timeout: float | None, progress: bool) -> BaseHandle:
        cls.check()
        if getattr(multiprocessing.current_process(), "_inheriting", False):
            raise SetupError(
                "this process is a worker of multiprocessing that imports the script before it begins its work, and the "
                'script sets up a base: where workers are spawned, put what is not for them below `if __name__ == "__main__"`'
            )
        # Imported where it is known to work: not every system has what a base process needs.
        from prized_gym.engines.local.engine import LocalBase

        workdir = options["workdir"]
        if workdir is not None:
            given = os.fspath(workdir)
            try:
                workdir = os.path.realpath(given)
            except FileNotFoundError:
                raise SetupError(f"workdir {given!r} is relative, and the working directory was deleted") from None
            if not os.path.isdir(workdir):
                raise SetupError(f"workdir {workdir!r} is not a directory")
        close_copies = options["close_copies"]
        if close_copies not in ("own", True, False):
            raise ValueError(f"close_copies must be 'own', True or False, got {close_copies!r}")
        close_timeout = seconds("close_timeout", options["close_timeout"])
        threads = bool(options["allow_threads"])
        return LocalBase(recipe, threads, workdir, close_copies, close_timeout, options["pin"], timeout, progress)

"""One base process, seen from the trainer: starting it, asking it things, ending it."""

from __future__ import annotations

import atexit
import contextlib
import os
import pickle
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from dataclasses import replace
from pathlib import Path

from prized_gym import by_value
from prized_gym.engines.local import forking, framing, processes
from prized_gym.engines.local.copies import warn_cut
from prized_gym.engines.local.link import BaseLink
from prized_gym.engines.local.messages import Failed, FleetRequest, ResetRequest, Setup, load_exception
from prized_gym.engines.local.output import Stream
from prized_gym.engines.local.roster import GRACE
from prized_gym.engines.local.semaphores import Signals
from prized_gym.engines.local.shared_memory import Block
from prized_gym.errors import BaseDiedError, RemoteTraceback, SetupError, SetupTimeoutError
from prized_gym.interface.engine import Description
from prized_gym.progress import waiting

_SUPERVISOR = Path(__file__).with_name("supervisor.py")


class RunningBase:
    """A base process and its supervisor.

    Args:
        setup: what to build; its scratch directory is made here.
        timeout: seconds the set-up may take, and a reset of the environment in the base.
        progress: show a progress bar meanwhile.
        close_timeout: seconds that its environments may take to close; None for ever.

    Attributes:
        description: what the base told of its environments.

    Raises:
        SetupError: it could not be set up; SetupTimeoutError: not within ``timeout``.
        Exception: what the user's factory or ``warm_up`` raised.
    """

    def __init__(self, setup: Setup, timeout: float | None, progress: bool, close_timeout: float | None) -> None:
        # Reentrant: what closes the base may be called by the garbage collector, or in a signal handler.
        self._lock = threading.RLock()
        self._ended = False
        self._timeout = timeout
        self._close_timeout = close_timeout
        self._serving = False
        try:
            scratch = processes.with_enough_files(lambda: self._start(setup.workdir is not None))
        except OSError as error:
            raise SetupError(f"the base process could not be started: {processes.explain(error)}") from error
        _LIVE.add(self)
        try:
            self.description = self._set_up(replace(setup, scratch=scratch), progress)
        except BaseException:
            self.close()
            raise
        self._serving = True

    def _start(self, in_views: bool) -> str | None:
        """Start the process; its scratch directory, if its copies need one."""
        with contextlib.ExitStack() as undo:
            scratch = None
            if in_views:
                scratch = tempfile.mkdtemp(prefix="prized_gym-")
                undo.callback(shutil.rmtree, scratch, ignore_errors=True)
            self._start_supervisor(scratch, undo)
            undo.pop_all()
        return scratch

    def _start_supervisor(self, scratch: str | None, undo: contextlib.ExitStack) -> None:
        """Start the supervisor, which starts the base; ``undo`` closes what this process has of it."""
        self._stdout = Stream("stdout")
        undo.callback(self._stdout.close)
        self._stderr = Stream("stderr")
        undo.callback(self._stderr.close)
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        undo.callback(self._control.close)
        with theirs:
            lifeline_read, self._lifeline = os.pipe()
            undo.callback(os.close, self._lifeline)
            try:
                self._process = subprocess.Popen(
                    [
                        sys.executable,
                        str(_SUPERVISOR),
                        str(lifeline_read),
                        str(theirs.fileno()),
                        *([scratch] if scratch is not None else []),
                    ],
                    stdin=subprocess.DEVNULL,
                    stdout=self._stdout.write_fd,
                    stderr=self._stderr.write_fd,
                    pass_fds=(lifeline_read, theirs.fileno()),
                    # Ctrl-C at the terminal is the trainer's alone.
                    start_new_session=True,
                    env={**os.environ, **forking.SINGLE_THREADED},
                )
            finally:
                os.close(lifeline_read)
        self._stdout.give_away()
        self._stderr.give_away()

    def _set_up(self, setup: Setup, progress: bool) -> Description:
        deadline = None if self._timeout is None else time.monotonic() + self._timeout
        context = {
            "path": _search_path(),
            "argv": [str(word) for word in sys.argv],
            "main": by_value.describe_main(),
        }
        try:
            framing.send(self._control, pickle.dumps(context))
            framing.send(self._control, pickle.dumps(setup))
            with waiting("setting up the base", progress) as tick:
                while not framing.wait_readable(
                    self._control, min(deadline or time.monotonic() + 1, time.monotonic() + 0.2)
                ):
                    tick()
                    if deadline is not None and time.monotonic() >= deadline:
                        raise SetupTimeoutError(
                            f"the base was not set up within setup_timeout={self._timeout:g} s and has been stopped"
                            f"{self._last_words()}"
                        )
            answer = pickle.loads(framing.receive(self._control))
        except framing.Hangup:
            raise SetupError(f"the base process {self._status()} while it was set up{self._last_words()}") from None
        self._stdout.tail()
        self._stderr.tail()
        if isinstance(answer, Failed):
            raise _remote_error(answer, "the base could not be set up")
        description: Description = pickle.loads(answer.description)
        return description

    @property
    def alive(self) -> bool:
        """Whether it can be forked, as far as is known."""
        return self._lifeline >= 0 and self._process.poll() is None and not self._hung_up()

    def _hung_up(self) -> bool:
        poller = select.poll()
        try:
            poller.register(self._control, 0)
        except ValueError:
            # Closed by another thread.
            return True
        return bool(poller.poll(0))

    @property
    def where(self) -> str:
        """The pid of the base process, the supervisor's child."""
        below = processes.children(self._process.pid)
        return f"pid {below[0] if below else self._process.pid}"

    def join(self, size: int, block: Block, signals: Signals) -> BaseLink:
        """Have the base take part in a fleet.

        Args:
            size: how many copies.
            block: the memory of the fleet.
            signals: what its copies are woken with.

        Raises:
            BaseDiedError: the base is gone.
        """
        ours, theirs = framing.pair()
        try:
            with self._lock:
                fds = [theirs.fileno(), block.fd, *signals.fds]
                framing.send(self._control, pickle.dumps(FleetRequest(size)), fds)
        except (framing.Hangup, OSError) as error:
            ours.close()
            raise self.died() from error
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        return BaseLink(ours, self.died)

    def reset_environment(self, seed: int | None) -> None:
        """Reset the environments in the base, if that has not been done.

        Raises:
            BaseDiedError: the base is gone.
            SetupTimeoutError: it took too long; the base has been ended.
            Exception: what ``env.reset`` raised.
        """
        deadline = None if self._timeout is None else time.monotonic() + self._timeout
        # The answer comes on a socket of its own: one that an interrupt keeps from being read is nobody else's.
        ours, theirs = framing.pair()
        try:
            with ours:
                with theirs, self._lock:
                    framing.send(self._control, pickle.dumps(ResetRequest(seed)), [theirs.fileno()])
                in_time = framing.wait_readable(ours, deadline)
                answer = pickle.loads(framing.receive(ours)) if in_time else None
        except (framing.Hangup, OSError) as error:
            raise self.died() from error
        if not in_time:
            words = self._last_words()
            self._process.kill()
            self.close()
            raise SetupTimeoutError(
                f"the environment was not reset in the base within setup_timeout={self._timeout:g} s{words}"
            )
        if answer is not None:
            raise _remote_error(answer, "the environment could not be reset in the base")

    def died(self) -> BaseDiedError:
        """The error that says how the base process ended."""
        return BaseDiedError(f"the base process {self._status()}{self._last_words()}")

    def _status(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = self._process.wait(5)
            return processes.describe_exit(code)
        return "closed its connection"

    def _last_words(self) -> str:
        text = self._stderr.tail().strip()
        return f"\n--- end of its stderr:\n{text}" if text else ""

    def close(self) -> None:
        """End it and everything below it; returns when nothing of that is left. Can be called again."""
        with self._lock:
            if self._ended:
                return
            # The base sees its control socket close, closes its environments and ends; then so does the supervisor.
            where = self.where
            self._control.close()
            # While it is set up there is nothing to close.
            timeout, late = self._close_timeout if self._serving else GRACE, False
            try:
                self._process.wait(timeout)
            except subprocess.TimeoutExpired:
                late = True
            finally:
                self._end()
        if late and timeout and self._serving:
            warn_cut(f"the base ({where})", timeout)

    def _end(self) -> None:
        lifeline, self._lifeline = self._lifeline, -1
        if lifeline >= 0:
            os.close(lifeline)
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._forget()
        self._ended = True
        _LIVE.discard(self)

    def _forget(self) -> None:
        self._control.close()
        self._stdout.close()
        self._stderr.close()

    def release_after_fork(self) -> None:
        """In a fork of the trainer: let go of the descriptors, so that the base still notices the trainer's end."""
        self._ended = True
        lifeline, self._lifeline = self._lifeline, -1
        if lifeline >= 0:
            os.close(lifeline)
        self._control.close()


def _remote_error(failed: Failed, what: str) -> Exception:
    """The exception raised in the base, with its traceback there; what cannot be carried over as a SetupError."""
    error = load_exception(failed.exception)
    if not isinstance(error, Exception):
        return SetupError(f"{what}:\n{failed.traceback}")
    error.__cause__ = RemoteTraceback(failed.traceback)
    return error


def _search_path() -> list[str]:
    """``sys.path`` with relative entries spelled out: the base process may run in another directory.

    Where the working directory was deleted there is nothing to be found along them.
    """
    found: list[str] = []
    for path in map(os.fspath, sys.path):
        with contextlib.suppress(FileNotFoundError):
            found.append(path if os.path.isabs(path) else os.path.abspath(path))
    return found


_LIVE: weakref.WeakSet[RunningBase] = weakref.WeakSet()


def _close_all() -> None:
    for base in list(_LIVE):
        with contextlib.suppress(Exception):
            base.close()


def _release_all() -> None:
    for base in list(_LIVE):
        with contextlib.suppress(Exception):
            base.release_after_fork()
    _LIVE.clear()


atexit.register(_close_all)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_release_all)

"""The base process: builds and warms the environments, then forks copies on request. Never steps anything itself."""

from __future__ import annotations

import contextlib
import copy
import os
import pickle
import resource
import select
import signal
import socket
import sys
import time
import traceback
from dataclasses import dataclass, field
from typing import Any

from prized_gym import by_value
from prized_gym import recipe as recipes
from prized_gym.engines.local import copy_process, forking, framing, ownership, processes, workdirs
from prized_gym.engines.local.messages import (
    Adopted,
    Adopting,
    Died,
    Failed,
    FleetRequest,
    Forked,
    ForkRequest,
    Ready,
    ResetRequest,
    Setup,
    dump_exception,
)
from prized_gym.engines.local.semaphores import Signals
from prized_gym.engines.local.shared_memory import Block
from prized_gym.errors import ForkUnsafeError
from prized_gym.generators import Generators
from prized_gym.interface.engine import Description
from prized_gym.interface.performing import Origin

_SPARE_FILES = 64
"""Files that an environment is left beside those that come with requests."""


def main(control: socket.socket, context: dict[str, Any]) -> None:
    """Run a base process on its control socket, until the socket closes.

    Args:
        control: the socket.
        context: the trainer's first message, which ``bootstrap`` has read.
    """
    control.set_inheritable(False)
    by_value.install_main(context["main"])
    # A pipe is block-buffered; what a slow set-up prints should be seen while it runs.
    for stream in (sys.stdout, sys.stderr):
        # As the trainer reads it, whatever PYTHONIOENCODING says.
        stream.reconfigure(encoding="utf-8", errors="backslashreplace", line_buffering=True)  # type: ignore[union-attr]
    try:
        setup: Setup = pickle.loads(framing.receive(control))
        try:
            base = _build(control, setup)
        except framing.Hangup:
            raise
        except BaseException as error:
            processes.flush_output()
            framing.send(control, pickle.dumps(_failed(error)))
            return
    except framing.Hangup:
        # The trainer gave up waiting.
        return
    base.serve()


def _build(control: socket.socket, setup: Setup) -> BaseProcess:
    started = time.monotonic()
    if setup.workdir is not None:
        os.chdir(setup.workdir)
    recipe: recipes.Recipe = pickle.loads(setup.recipe)
    built = recipes.build(recipe)
    env = built.envs[0]
    description = Description(
        observation_space=env.observation_space,
        action_space=env.action_space,
        metadata=dict(env.metadata or {}),
        render_mode=env.render_mode,
        spec=env.spec,
        seconds=time.monotonic() - started,
    )
    processes.flush_output()
    base = BaseProcess(control, setup, recipe, built)
    framing.send(control, pickle.dumps(Ready(_dump_description(description))))
    return base


def _dump_description(description: Description) -> bytes:
    try:
        return framing.dumps(description)
    except Exception:
        # A spec may hold anything in its keyword arguments; the spaces must travel, it need not.
        description.spec = None
        return framing.dumps(description)


def _failed(error: BaseException) -> Failed:
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    return Failed(dump_exception(error), text)


def _too_many_files() -> str:
    return f"the base {processes.file_limit()}"


@dataclass
class _Fleet:
    """A fleet as its base sees it."""

    sock: socket.socket
    block: Block
    signals: Signals
    pids: set[int] = field(default_factory=set)
    adopting: int = 0

    def fds(self) -> list[int]:
        return [self.sock.fileno(), self.block.fd, *self.signals.fds]

    def close(self) -> None:
        self.sock.close()
        self.block.close()
        self.signals.close()


class BaseProcess:
    """The warm environments and the fleets forked from them."""

    def __init__(self, control: socket.socket, setup: Setup, recipe: recipes.Recipe, built: recipes.Built) -> None:
        self._control = control
        self._setup = setup
        self._recipe = recipe
        self._built = built
        self._pid = os.getpid()
        self._fleets: dict[int, _Fleet] = {}
        # Hung up, with copies that have been killed and not been reaped yet.
        self._parting: list[_Fleet] = []
        self._strays_left = False
        self._mark: int | None = None
        env = built.envs[0]
        # As they were described to the trainer: a reset may replace the environment's own.
        self._spaces = (copy.deepcopy(env.observation_space), copy.deepcopy(env.action_space))
        self._settled = False
        self._files_warned: set[str] = set()
        self._generators = Generators()
        self._first: list[tuple[Any, dict[str, Any]]] | None = None
        self._own_children: set[int] = set()
        self._wake_read, self._wake_write = os.pipe()

    def serve(self) -> None:
        """Serve until the control socket closes."""
        processes.adopt_orphans()
        with contextlib.suppress(OSError):
            self._mark = processes.mark_of(self._pid)
        for fd in (self._wake_read, self._wake_write):
            os.set_blocking(fd, False)
        self._watch_children()
        poller = select.poll()
        poller.register(self._control, select.POLLIN)
        poller.register(self._wake_read, select.POLLIN)
        while True:
            for fd, _ in poller.poll():
                if fd == self._control.fileno():
                    try:
                        fleet = self._serve_control()
                    except framing.Hangup:
                        self._close_environments()
                        return
                    if fleet is not None:
                        poller.register(fleet.sock, select.POLLIN)
                elif fd == self._wake_read:
                    os.read(self._wake_read, 4096)
                    self._reap()
                elif fd in self._fleets:
                    fleet = self._fleets[fd]
                    try:
                        self._serve_fleet(fleet)
                    except framing.Hangup:
                        poller.unregister(fd)
                        self._leave_fleet(fleet)
                    if self._strays_left and not any(fleet.adopting for fleet in self._fleets.values()):
                        self._kill_strays()

    def _watch_children(self) -> None:
        # The user's set-up may have left other processes running (a server, say): those belong to the base.
        # With what is below them, which is handed to the base when their parents end.
        copies = {pid for fleet in self._fleets.values() for pid in fleet.pids}
        self._own_children = set(processes.descendants(self._pid, copies))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)

    def _close_environments(self) -> None:
        for env in self._built.envs:
            try:
                env.close()
            except Exception:
                traceback.print_exc()
        processes.flush_output()

    def _serve_control(self) -> _Fleet | None:
        fds: list[int] = []
        request = pickle.loads(framing.receive(self._control, fds))
        if isinstance(request, ResetRequest):
            self._answer_reset(request.seed, fds)
            return None
        return self._join_fleet(request, fds)

    def _answer_reset(self, seed: int | None, fds: list[int]) -> None:
        if not fds:
            # The trainer finds its socket closed.
            sys.stderr.write(_too_many_files() + "\n")
            return
        with socket.socket(fileno=fds[0]) as sock:
            try:
                framing.send(sock, pickle.dumps(self._reset(seed)))
            except framing.Hangup:
                # It was interrupted, and does not wait any more.
                pass

    def _reset(self, seed: int | None) -> Failed | None:
        if self._first is None:
            try:
                self._first = [env.reset(seed=seed) for env in self._built.envs]
            except Exception as error:
                return _failed(error)
            processes.flush_output()
            self._settled = False
            self._watch_children()
        return None

    def _join_fleet(self, request: FleetRequest, fds: list[int]) -> _Fleet | None:
        self._make_room_for_files()
        if len(fds) != 5:
            # The trainer finds its socket closed.
            sys.stderr.write(_too_many_files() + "\n")
            for fd in fds:
                os.close(fd)
            return None
        try:
            block = Block(*self._spaces, request.count, fds[1])
        except ValueError:
            # A fleet of the base process before this one.
            sys.stderr.write("the base was built anew with other spaces than before: its fleets cannot go on\n")
            for fd in fds:
                os.close(fd)
            return None
        sock = socket.socket(fileno=fds[0])
        fleet = _Fleet(sock, block, Signals(fds[2:]))
        self._fleets[sock.fileno()] = fleet
        return fleet

    @staticmethod
    def _make_room_for_files() -> None:
        """See to it that the descriptors of a whole request of forks can arrive."""
        with contextlib.suppress(OSError):
            soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            if (
                soft != resource.RLIM_INFINITY
                and len(os.listdir("/proc/self/fd")) + framing.MAX_FDS + _SPARE_FILES > soft
            ):
                processes.raise_file_limit()

    def _leave_fleet(self, fleet: _Fleet) -> None:
        del self._fleets[fleet.sock.fileno()]
        for pid in fleet.pids:
            processes.kill_group(pid)
            processes.kill(pid)
        self._parting.append(fleet)
        self._part()

    def _part(self) -> None:
        """Close the sockets of fleets that are gone with their last copy: it tells the trainer that nothing is left."""
        for fleet in [fleet for fleet in self._parting if not fleet.pids]:
            self._parting.remove(fleet)
            fleet.close()

    def _serve_fleet(self, fleet: _Fleet) -> None:
        fds: list[int] = []
        request = pickle.loads(framing.receive(fleet.sock, fds))
        if isinstance(request, ForkRequest):
            self._send(fleet, self._fork(fleet, request, fds))
        elif isinstance(request, Adopting):
            fleet.adopting += 1
        elif isinstance(request, Adopted):
            fleet.adopting -= 1
            fleet.pids.update(request.pids)

    @staticmethod
    def _send(fleet: _Fleet, message: object) -> None:
        try:
            framing.send(fleet.sock, pickle.dumps(message))
        except framing.Hangup:
            # The fleet has been closed; the main loop will find out.
            pass

    def _fork(self, fleet: _Fleet, request: ForkRequest, fds: list[int]) -> Forked:
        answer = Forked(request.number)
        try:
            try:
                forking.check(self._setup.allow_threads)
            except ForkUnsafeError as error:
                answer.unsafe = str(error)
                return answer
            if len(fds) != 2 * len(request.copies):
                answer.error = _too_many_files()
                return answer
            forking.single_thread_torch()
            if not self._settled:
                self._settled = True
                forking.settle(lambda: self._generators.collect(self._built.envs))
                ownership.let_clock_tick()
            ours = self._private_fds()
            files = forking.regular_files({*ours, *fds})
            pipes = ownership.open_pipes({*ours, *fds}) if self._setup.close_copies == "own" else []
            forking.warn_of_shared_offsets(files, self._files_warned)
            processes.flush_output()
            for number, (index, copy_number) in enumerate(request.copies.items()):
                sock_fd, err_fd = fds[2 * number : 2 * number + 2]
                try:
                    pid = forking.fork()
                except OSError as error:
                    answer.error = f"the operating system refused a fork: {error}"
                    return answer
                if pid == 0:
                    if request.number <= fleet.block.given_up[0]:
                        # This base was stopped for long: another may be the copy by now.
                        os._exit(0)
                    unused = {*ours, *fds[2 * number + 2 :]} - {*fleet.signals.fds}
                    self._become_copy(fleet, index, copy_number, sock_fd, err_fd, unused, files, pipes)
                answer.pids[index] = pid
                fleet.pids.add(pid)
                # Closed one by one, so that a later copy does not hold an earlier one's socket.
                os.close(sock_fd)
                os.close(err_fd)
                fds[2 * number : 2 * number + 2] = [-1, -1]
            if request.number <= fleet.block.given_up[0]:
                # Before the next request is served: they must not write where their successors do.
                for pid in answer.pids.values():
                    processes.kill_group(pid)
                    processes.kill(pid)
            return answer
        finally:
            for fd in fds:
                if fd >= 0:
                    os.close(fd)

    def _private_fds(self) -> set[int]:
        private = {self._control.fileno(), self._wake_read, self._wake_write}
        for fleet in (*self._fleets.values(), *self._parting):
            private.update(fleet.fds())
        return private

    def _become_copy(
        self,
        fleet: _Fleet,
        index: int,
        number: int,
        sock_fd: int,
        err_fd: int,
        unused: set[int],
        files: list[forking.OpenFile],
        pipes: list[ownership.Pipe],
    ) -> None:
        try:
            processes.mark()
            processes.die_with_parent(self._pid)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for fd in unused:
                os.close(fd)
            setup = self._setup
            which = self._built.which(number)
            first = None if self._first is None else self._first[which]
            process = copy_process.CopyProcess(
                env=self._built.envs[which],
                origin=Origin(self._recipe.on_fork, first, self._built.sole(number), self._generators),
                block=fleet.block,
                signals=fleet.signals,
                base_pid=self._pid,
                view=workdirs.View(setup.workdir, setup.scratch) if setup.workdir and setup.scratch else None,
                close=setup.close_copies,
                allow_threads=setup.allow_threads,
            )
            process.own_from_here(pipes, in_doubt=False)
            process.begin(index, socket.socket(fileno=sock_fd), err_fd, files)
            process.run()
        except BaseException:
            traceback.print_exc()
            processes.flush_output()
            os._exit(1)
        os._exit(0)

    def _reap(self) -> None:
        """Tell the fleets which processes ended, with everything those had started."""
        ended: dict[int, int] = {}
        while True:
            try:
                found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                break
            if found is None:
                break
            pid = found.si_pid
            if any(pid in fleet.pids for fleet in (*self._fleets.values(), *self._parting)):
                # While the zombie is there its number cannot be taken by another process's group.
                processes.kill_group(pid)
            _, ended[pid] = os.waitpid(pid, 0)
            workdirs.remove_duplicate(self._setup.scratch, pid)
            self._own_children.discard(pid)
        for fleet in list(self._fleets.values()):
            # One message at most, and none to fleets it does not concern: an idle one does not read.
            its = {pid: status for pid, status in ended.items() if pid in fleet.pids or fleet.adopting}
            fleet.pids.difference_update(its)
            if its:
                self._send(fleet, Died(its))
        for fleet in self._parting:
            fleet.pids.difference_update(ended)
        self._part()
        if ended and not any(fleet.adopting for fleet in self._fleets.values()):
            self._kill_strays()

    def _kill_strays(self) -> None:
        """Kill what a dead copy had started in a session of its own, which has come down to the base.

        It bears the copy's mark. What does not is the base's: a launcher's server, detached after the set-up was over.
        """
        known = set(self._own_children)
        for fleet in (*self._fleets.values(), *self._parting):
            known |= fleet.pids
        strays = [pid for pid in processes.children(self._pid) if pid not in known]
        # A branch is announced before it is made: one that is among these has its announcement still unread.
        self._strays_left = bool(strays) and any(
            framing.wait_readable(fleet.sock, 0.0) for fleet in self._fleets.values()
        )
        if self._strays_left:
            return
        for pid in strays:
            if not self._is_marked(pid):
                self._own_children.add(pid)
                continue
            for below in processes.descendants(pid):
                processes.kill(below)
            processes.kill(pid)

    def _is_marked(self, pid: int) -> bool:
        if self._mark is None:
            return False
        with contextlib.suppress(OSError, ValueError):
            return processes.mark_of(pid) == self._mark + 1
        return False

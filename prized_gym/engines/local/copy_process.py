"""A copy: one forked process that steps one environment, woken through shared memory or its own socket."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import pickle
import platform
import random
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cloudpickle

from prized_gym.calls import perform
from prized_gym.engines.local import forking, framing, processes, workdirs
from prized_gym.engines.local.semaphores import Signals
from prized_gym.engines.local.shared_memory import IN_SLOT, LISTEN_SOCKET, ON_SOCKET, RESETTING, SLOT, Block
from prized_gym.interface import commands as ops
from prized_gym.interface.commands import Call, Command, Fresh, Reseed, Reset, SetAttr, Start
from prized_gym.recipe import AnyEnv
from prized_gym.seeding import reseed, set_random_state

STACK_SIGNAL = getattr(signal, "SIGRTMIN", signal.SIGUSR1) + 9
"""Asks a copy that hangs for its Python stack; handled in C, so that a copy stuck in C answers too."""

_ORDERED = platform.machine().lower() in ("x86_64", "amd64", "i686", "i386")
"""Whether taking a lock is a full memory fence, as every atomic instruction of x86 is."""

_MEMORY_EVERY = 0.25
_PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass
class Branch(Command):
    """Fork this copy into the copies ``targets``; two descriptors each follow in a second message."""

    targets: list[int]


@dataclass
class Answer:
    """What a copy says about a batch, apart from what shared memory holds. Only what is there is filled in."""

    info: dict[str, Any] | None = None
    final: bytes | None = None
    objects: list[Any] | None = None
    result: Any = None
    raised: Raised | None = None


@dataclass
class Raised:
    """An exception on its way to the trainer: pickled if it can be carried over, else its text alone."""

    exception: bytes | None
    summary: str
    traceback: str
    exited: bool = False


def dump_exception(error: BaseException) -> bytes | None:
    """Pickle an exception if it comes back whole, else None."""
    try:
        data = framing.dumps(error)
        return data if type(pickle.loads(data)).__name__ == type(error).__name__ else None
    except Exception:
        return None


class CopyProcess:
    """The state of one copy. Created in the base's child; :meth:`begin` makes it a certain copy, :meth:`run` runs it."""

    def __init__(
        self,
        env: AnyEnv,
        first: tuple[Any, dict[str, Any]] | None,
        on_fork: Callable[[AnyEnv, int, int], Any] | None,
        block: Block,
        signals: Signals,
        base_pid: int,
        view: workdirs.View | None,
        sole: bool,
    ) -> None:
        self._env = env
        self._first = first
        self._on_fork = on_fork
        self._block = block
        self._takers = [semaphore.taker() for semaphore in signals.semaphores]
        self._add = signals.counter.adder()
        self._base_pid = base_pid
        self._view = view
        self._sole = sole
        self._listen = block.listen.data
        self._busy = block.busy.data
        self._flags = block.flags.data
        self._ops = block.ops.data
        self._pinned_wanted = block.pinned.data
        self._pinned = 0
        self._cores = processes.cores()
        self._idle = bytes(len(self._busy))
        self._by_semaphore = False
        self._fence = threading.Lock()
        self._memory_read_at = 0.0
        self._stack_fd = -1

    def begin(self, index: int, sock: socket.socket, err_fd: int, files: list[forking.OpenFile]) -> None:
        """Become copy ``index``: own process group, stderr, file offsets, view of the working directory."""
        if sys.platform == "linux":
            # Elsewhere the supervisor has only the session's group to find it by.
            with contextlib.suppress(OSError):
                os.setpgid(0, 0)
        os.dup2(err_fd, 2)
        os.close(err_fd)
        self.index = index
        self._sock = sock
        self._write = self._block.observations.writer(index)
        self._read = self._block.actions.reader(index)
        moved = None
        if self._view is not None:
            before = self._view.root
            self._view.enter()
            moved = (before, self._view.root)
        forking.reopen(files, moved)
        forking.single_thread_torch()
        self._watch_stack()

    def _watch_stack(self) -> None:
        if self._stack_fd >= 0:
            os.close(self._stack_fd)
        if hasattr(os, "memfd_create"):
            self._stack_fd = os.memfd_create("prized_gym-stack", os.MFD_CLOEXEC)
            faulthandler.register(STACK_SIGNAL, file=self._stack_fd, all_threads=True)

    def run(self) -> None:
        """Do what the trainer asks, until it closes the copy's socket."""
        listen = LISTEN_SOCKET
        payload = b""
        while True:
            self._by_semaphore = bool(listen)
            if listen:
                self._takers[listen - 1]()
            else:
                try:
                    payload = framing.receive(self._sock)
                except framing.Hangup:
                    break
            if self._pinned_wanted[0] != self._pinned:
                self._pin(self._pinned_wanted[0])
            op = self._ops[self.index]
            answer = None
            try:
                if op == ops.STEP or op == ops.STEP_RESET:
                    answer = self._step(op == ops.STEP_RESET, payload)
                elif op == ops.RESET:
                    answer = self._reset()
                elif op == ops.COMMAND:
                    answer = self._command(pickle.loads(payload))
            except Exception as error:
                answer = Answer(raised=_raised(error))
            except SystemExit as error:
                answer = Answer(raised=_raised(error, exited=True))
            except BaseException as error:
                answer = Answer(raised=_raised(error))
            payload = b""
            # Read before this batch counts as finished: from then on the trainer may announce the next one.
            listen = self._listen[0]
            if answer is None:
                self._finish()
            else:
                self._reply(answer)
        self._leave()

    def _pin(self, pinned: int) -> None:
        self._pinned = pinned
        cores = self._cores
        processes.run_on([cores[self.index % len(cores)]] if pinned and cores else cores)

    def _finish(self) -> None:
        """This batch is finished: wake the trainer, unless others still work at a batch of all copies."""
        self._busy[self.index] = 0
        if self._by_semaphore and _ORDERED:
            # Without the fence two copies could each read the other's flag before their own is seen, and none would ring.
            self._fence.acquire(False)
            self._fence.release()
            if self._busy.tobytes() != self._idle:
                return
        self._add()

    def _step(self, then_reset: bool, payload: bytes) -> Answer | None:
        block, index = self._block, self.index
        action = self._read(pickle.loads(payload) if payload else ())
        observation, reward, terminated, truncated, info = self._env.step(action)
        block.rewards[index] = reward
        block.terminations[index] = terminated
        block.truncations[index] = truncated
        final = None
        if terminated or truncated:
            self._note_usage()
            if then_reset:
                # Pickled before the reset, which may overwrite a buffer that the environment reuses.
                final = framing.dumps((observation, info))
                self._busy[index] = RESETTING
                observation, info = self._env.reset()
        rest = self._write(observation)
        if info or rest or final is not None:
            return Answer(info=info or None, objects=rest or None, final=final)
        return None

    def _reset(self) -> Answer | None:
        return self._began(*self._env.reset())

    def _began(self, observation: Any, info: dict[str, Any]) -> Answer | None:
        block, index = self._block, self.index
        rest = self._write(observation)
        block.rewards[index] = 0.0
        block.terminations[index] = False
        block.truncations[index] = False
        if info or rest:
            return Answer(info=info or None, objects=rest or None)
        return None

    def _command(self, command: Command) -> Answer | None:
        env = self._env
        if isinstance(command, Reset):
            if command.fresh is not None:
                self._start(command.fresh)
            elif command.reseed is not None:
                reseed(env, command.reseed, keep_seeded=self._sole)
            if command.from_base:
                if self._first is None:
                    raise RuntimeError("the base was not set up with reset_in='base'")
                return self._began(*self._first)
            return self._began(*env.reset(seed=command.seed, options=command.options))
        if isinstance(command, Call):
            return Answer(result=perform(env, command.name, command.args, command.kwargs))
        if isinstance(command, SetAttr):
            for name, value in command.values.items():
                env.set_wrapper_attr(name, value)
        elif isinstance(command, Reseed):
            reseed(env, command.seed)
        elif isinstance(command, Start):
            self._start(command.fresh)
        elif isinstance(command, Branch):
            return self._branch(command.targets)
        return None

    def _start(self, fresh: Fresh) -> None:
        reseed(self._env, fresh.seed, keep_seeded=self._sole)
        if fresh.random_state is not None:
            set_random_state(self._env, fresh.random_state)
        if self._on_fork is not None:
            self._on_fork(self._env, self.index, fresh.seed)
        for name, value in fresh.attributes.items():
            self._env.set_wrapper_attr(name, value)

    def _branch(self, targets: list[int]) -> Answer | None:
        """Fork this copy. Returns in the source and in each new copy; the latter answers with its pid."""
        fds: list[int] = []
        framing.receive(self._sock, fds)
        sys.stdout.flush()
        sys.stderr.flush()
        files = forking.regular_files({*fds, self._sock.fileno(), self._stack_fd})
        if self._view is not None:
            self._view.freeze()
            forking.reopen(files, (self._view.root, self._view.root))
        # Python reseeds its global generator in every fork; a branch goes on where its source stands.
        python_state = random.getstate()
        for number, target in enumerate(targets):
            sock_fd, err_fd = fds[2 * number : 2 * number + 2]
            middle = forking.fork()
            if middle == 0:
                # Forked twice: a child of this copy would end with it. The base adopts what this process leaves.
                if forking.fork() != 0:
                    os._exit(0)
                while os.getppid() not in (self._base_pid, 1):
                    time.sleep(0.0002)
                processes.die_with_parent(self._base_pid)
                for fd in {*fds} - {sock_fd, err_fd}:
                    with contextlib.suppress(OSError):
                        os.close(fd)
                self._sock.close()
                random.setstate(python_state)
                self.begin(target, socket.socket(fileno=sock_fd), err_fd, files)
                return Answer(result=os.getpid())
            os.waitpid(middle, 0)
            os.close(sock_fd)
            os.close(err_fd)
        return None

    def _reply(self, answer: Answer) -> None:
        """Say where the answer is and that this batch is finished. May change ``answer`` into an error."""
        try:
            data = framing.dumps(answer)
        except Exception as error:
            answer = Answer(raised=_raised(TypeError(f"what the copy has to say cannot be sent: {error}")))
            data = framing.dumps(answer)
        index = self.index
        self._block.lengths[index] = len(data)
        if len(data) <= SLOT:
            self._block.slots[index, : len(data)] = memoryview(data)
            self._flags[index] = IN_SLOT
            self._finish()
        else:
            # First finished, then sent: the trainer reads it only once it knows.
            self._flags[index] = ON_SOCKET
            self._finish()
            framing.send(self._sock, data)

    def _note_usage(self) -> None:
        self._block.cpu[self.index] = time.process_time()
        if time.monotonic() - self._memory_read_at > _MEMORY_EVERY:
            self._memory_read_at = time.monotonic()
            with contextlib.suppress(OSError), open("/proc/self/statm") as statm:
                resident, shared = (int(word) for word in statm.read().split()[1:3])
                self._block.memory[self.index] = (resident - shared) * _PAGE

    def _leave(self) -> None:
        try:
            self._env.close()
        except Exception:
            traceback.print_exc()
        processes.flush_output()


def _raised(error: BaseException, exited: bool = False) -> Raised:
    # The outermost frame is this module's own.
    inner = error.__traceback__.tb_next if error.__traceback__ is not None else None
    text = "".join(traceback.format_exception(type(error), error, inner or error.__traceback__))
    if exited:
        summary = f"called sys.exit({getattr(error, 'code', None)!r})"
    else:
        summary = "raised " + traceback.format_exception_only(type(error), error)[-1].strip()
    return Raised(None if exited else dump_exception(error), summary[:2000], text, exited)


def load_exception(data: bytes | None) -> BaseException | None:
    """The exception that :func:`dump_exception` pickled, or None."""
    if data is None:
        return None
    try:
        error = cloudpickle.loads(data)
    except Exception:
        return None
    return error if isinstance(error, BaseException) else None

"""A copy: one forked process that steps one environment, woken through shared memory or its own socket."""

from __future__ import annotations

import contextlib
import os
import pickle
import platform
import random
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterable
from typing import Any

from prized_gym.engines.local import forking, framing, ownership, processes, workdirs
from prized_gym.engines.local.messages import Answer, Branch, CheckBranch, describe_exception
from prized_gym.engines.local.semaphores import Signals
from prized_gym.engines.local.shared_memory import IN_SLOT, LISTEN_SOCKET, ON_SOCKET, RESETTING, SLOT, Block
from prized_gym.engines.local.stacks import watch_stack
from prized_gym.interface import commands as ops
from prized_gym.interface.commands import Command
from prized_gym.interface.performing import Origin, perform_command
from prized_gym.recipe import AnyEnv

_ORDERED = platform.machine().lower() in ("x86_64", "amd64", "i686", "i386")
"""Whether taking a lock is a full memory fence, as every atomic instruction of x86 is."""

_MEMORY_EVERY = 0.25
_PAGE = os.sysconf("SC_PAGE_SIZE")


class CopyProcess:
    """The state of one copy. Created in the base's child; :meth:`begin` makes it a certain copy, :meth:`run` runs it."""

    def __init__(
        self,
        env: AnyEnv,
        origin: Origin,
        block: Block,
        signals: Signals,
        base_pid: int,
        view: workdirs.View | None,
        close: str | bool,
        allow_threads: bool,
    ) -> None:
        self._env = env
        self._origin = origin
        self._block = block
        self._takers = [semaphore.taker() for semaphore in signals.semaphores]
        self._add = signals.counter.adder()
        self._base_pid = base_pid
        self._view = view
        self._listen = block.listen.data
        self._busy = block.busy.data
        self._each = block.each.data
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
        self._close = close
        self._allow_threads = allow_threads
        self._ownership: ownership.Ownership | None = None

    def own_from_here(self, pipes: Iterable[ownership.Pipe], in_doubt: bool) -> None:
        """Take what there is in this new fork for that of the process it is a fork of; see :mod:`.ownership`."""
        if self._close == "own":
            self._ownership = ownership.Ownership(pipes, in_doubt)

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
        self._keep = self._block.keeper(index)
        self._write = self._block.observations.writer(index)
        self._read = self._block.actions.reader(index)
        moved = None
        if self._view is not None:
            before = self._view.root
            self._view.enter()
            moved = (before, self._view.root)
        forking.reopen(files, moved)
        forking.single_thread_torch()
        self._stack_fd = watch_stack(self._stack_fd)

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
            except BaseException as error:
                answer = Answer(raised=describe_exception(error))
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
        """This batch is finished: wake the trainer, unless it waits for all and others are still at work."""
        self._busy[self.index] = 0
        if self._by_semaphore and _ORDERED:
            # Without the fence two copies could each read the other's flag before their own is seen, and none would ring.
            self._fence.acquire(False)
            self._fence.release()
            if self._busy.tobytes() != self._idle and not self._each[0]:
                return
        self._add()

    def _step(self, then_reset: bool, payload: bytes) -> Answer | None:
        block, index = self._block, self.index
        action = self._read(pickle.loads(payload) if payload else ())
        observation, reward, terminated, truncated, info = self._env.step(action)
        final = None
        if terminated or truncated:
            self._note_usage()
            if then_reset:
                # Pickled before the reset, which may overwrite a buffer that the environment reuses.
                final = framing.dumps((observation, info))
                self._busy[index] = RESETTING
                observation, info = self._env.reset()
        if self._keep is not None:
            self._keep()
        rest = self._write(observation)
        block.rewards[index] = reward
        block.terminations[index] = terminated
        block.truncations[index] = truncated
        if info or rest or final is not None:
            return Answer(info=info or None, objects=rest or None, final=final)
        return None

    def _reset(self) -> Answer | None:
        return self._began(*self._env.reset())

    def _began(self, observation: Any, info: dict[str, Any]) -> Answer | None:
        block, index = self._block, self.index
        if self._keep is not None:
            self._keep()
        rest = self._write(observation)
        block.rewards[index] = 0.0
        block.terminations[index] = False
        block.truncations[index] = False
        if info or rest:
            return Answer(info=info or None, objects=rest or None)
        return None

    def _command(self, command: Command) -> Answer | None:
        if isinstance(command, CheckBranch):
            forking.check(self._allow_threads, f"copy {self.index}")
            return None
        if isinstance(command, Branch):
            return self._branch(command.targets)
        performed = perform_command(self._env, command, self._origin)
        if performed.began is not None:
            return self._began(*performed.began)
        return None if performed.result is None else Answer(result=performed.result)

    def _branch(self, targets: list[int]) -> Answer | None:
        """Fork this copy. Returns in the source and in each new copy; the latter answers with its pid."""
        fds: list[int] = []
        framing.receive(self._sock, fds)
        sys.stdout.flush()
        sys.stderr.flush()
        ours = {*fds, self._sock.fileno(), self._stack_fd}
        files = forking.regular_files(ours)
        pipes = ownership.open_pipes(ours) if self._ownership is not None else []
        if self._view is not None:
            self._view.freeze()
            forking.reopen(files, (self._view.root, self._view.root))
        # Python reseeds its global generator in every fork; a branch goes on where its source stands.
        python_state = random.getstate()
        try:
            for number, target in enumerate(targets):
                sock_fd, err_fd = theirs = fds[2 * number : 2 * number + 2]
                middle = forking.fork()
                if middle == 0:
                    self._leave_source()
                    fds = [fd for fd in fds if fd not in theirs]
                    self.own_from_here(pipes, in_doubt=True)
                    return self._become(target, sock_fd, err_fd, files, python_state)
                if os.waitpid(middle, 0)[1] != 0:
                    raise OSError(f"copy {target} could not be forked off")
            return None
        finally:
            for fd in fds:
                os.close(fd)

    def _leave_source(self) -> None:
        """In the first of two forks: leave a second one to the base, since a child of this copy would end with it."""
        try:
            if forking.fork() != 0:
                os._exit(0)
        except BaseException:
            # It must not go on in the name of its source.
            traceback.print_exc()
            os._exit(1)

    def _become(
        self, target: int, sock_fd: int, err_fd: int, files: list[forking.OpenFile], python_state: Any
    ) -> Answer:
        try:
            while os.getppid() not in (self._base_pid, 1):
                time.sleep(0.0002)
            processes.die_with_parent(self._base_pid)
            self._sock.close()
            random.setstate(python_state)
            self.begin(target, socket.socket(fileno=sock_fd), err_fd, files)
        except BaseException:
            # It must not answer in the name of its source.
            traceback.print_exc()
            os._exit(1)
        return Answer(result=os.getpid())

    def _reply(self, answer: Answer) -> None:
        """Say where the answer is and that this batch is finished. May change ``answer`` into an error."""
        try:
            data = framing.dumps(answer)
        except Exception as error:
            answer = Answer(raised=describe_exception(TypeError(f"what the copy has to say cannot be sent: {error}")))
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
            if self._ownership is not None:
                self._ownership.protect()
            if self._close:
                self._env.close()
        except Exception:
            traceback.print_exc()
        processes.flush_output()

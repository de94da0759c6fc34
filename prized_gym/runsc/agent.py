"""The agent: PID 1 of a sandbox, and the frames it exchanges with the host.

One file of plain standard-library Python. Inside, the bound host Python runs it with ``-I -S``; on the host the same file
is imported for its frames, so both ends share one definition. The agent dials out: it connects to the socket the host
listens on and sends ``control``; when the host asks for a connection over it, the agent dials another one for that
request. An uncaught error here would end the sandbox, so every thread catches everything.

A frame is one byte of kind, four bytes of big-endian length, and the payload:

    J  a JSON object      B  bytes of a file or of a command's input      Z  end of those bytes
    O  output             R  error output                                 D  detached: the rest follows elsewhere
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import resource
import select
import signal
import socket
import stat
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

SOCKET: Final = "/ctl/a.sock"
HOME: Final = "/home/user"
UID: Final = 1000
MAX_JSON: Final = 4 << 20
"""Bytes of one JSON frame."""
MAX_DATA: Final = 1 << 20
"""Bytes of one data frame."""
CHUNK: Final = 256 << 10
MAX_PROCESSES: Final = 1024
"""The user's processes, threads included: a fork bomb meets this limit before it meets the host."""
_HEADER: Final = struct.Struct("!cI")
_KINDS: Final = b"JBZORD"
_libc = ctypes.CDLL(None, use_errno=True)


class BadFrame(Exception):
    """The peer broke the protocol: unknown kind, oversized frame, JSON that is no object."""


def send(connection: socket.socket, kind: bytes, payload: bytes = b"") -> None:
    """Send one frame."""
    if len(payload) < 4096:
        connection.sendall(_HEADER.pack(kind, len(payload)) + payload, socket.MSG_NOSIGNAL)
    else:
        connection.sendall(_HEADER.pack(kind, len(payload)), socket.MSG_NOSIGNAL)
        connection.sendall(payload, socket.MSG_NOSIGNAL)


def send_json(connection: socket.socket, message: dict[str, Any]) -> None:
    """Send one JSON frame."""
    send(connection, b"J", json.dumps(message).encode())


def parse_header(header: bytes) -> tuple[bytes, int]:
    """Read kind and payload length from a five-byte header.

    Raises:
        BadFrame: either is not allowed.
    """
    kind, length = _HEADER.unpack(header)
    if kind not in _KINDS or length > (MAX_JSON if kind == b"J" else MAX_DATA):
        raise BadFrame(f"frame of kind {kind!r} and {length} bytes")
    return kind, length


def parse_json(payload: bytes) -> dict[str, Any]:
    """Read the object in a JSON frame.

    Raises:
        BadFrame: it is none.
    """
    try:
        message = json.loads(payload)
    except (ValueError, RecursionError) as error:
        raise BadFrame(f"JSON frame: {error}") from None
    if not isinstance(message, dict):
        raise BadFrame("JSON frame holds no object")
    return message


def receive_exactly(connection: socket.socket, length: int) -> bytes:
    """Receive ``length`` bytes.

    Raises:
        EOFError: the connection ended before.
    """
    first = connection.recv(length)
    if len(first) == length:
        return first
    data = bytearray(first)
    while len(data) < length:
        piece = connection.recv(min(length - len(data), CHUNK))
        if not piece:
            raise EOFError("the connection ended inside a frame" if data else "the connection ended")
        data += piece
    return bytes(data)


def receive(connection: socket.socket) -> tuple[bytes, bytes]:
    """Receive the next frame: its kind and its payload.

    Raises:
        EOFError: the connection ended. BadFrame: the peer broke the protocol.
    """
    kind, length = parse_header(receive_exactly(connection, _HEADER.size))
    return kind, receive_exactly(connection, length) if length else b""


def receive_json(connection: socket.socket) -> dict[str, Any]:
    """Receive the next frame, which must be JSON.

    Raises:
        EOFError: the connection ended. BadFrame: it is something else.
    """
    kind, payload = receive(connection)
    if kind != b"J":
        raise BadFrame(f"expected JSON, got a frame of kind {kind!r}")
    return parse_json(payload)


def send_bytes(connection: socket.socket, file: Any) -> int:
    """Send what ``file`` (opened in binary) holds as B frames and a Z; return the number of bytes."""
    total = 0
    while piece := file.read(CHUNK):
        send(connection, b"B", piece)
        total += len(piece)
    send(connection, b"Z")
    return total


def receive_bytes(connection: socket.socket) -> Iterator[bytes]:
    """Receive the payloads of B frames up to the Z.

    Raises:
        EOFError: the connection ended. BadFrame: there is a frame of another kind.
    """
    while True:
        kind, payload = receive(connection)
        if kind == b"Z":
            return
        if kind != b"B":
            raise BadFrame(f"expected bytes, got a frame of kind {kind!r}")
        yield payload


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


# ------------------------------------------------------------------------------------------------ inside the sandbox


class Child:
    """A child process whose end somebody waits for.

    Attributes:
        wake: an eventfd that becomes readable at its end.
        status: its exit status, 128 + N when signal N ended it; None until then.
    """

    def __init__(self) -> None:
        self.wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.status: int | None = None

    def ended(self, code: int) -> None:
        """Record its end, with the exit code or the negative number of the signal."""
        self.status = code if code >= 0 else 128 - code
        os.eventfd_write(self.wake, 1)

    def join(self) -> None:
        """Wait for its end. Called once."""
        while self.status is None:
            select.select([self.wake], [], [])
        os.close(self.wake)


class Job(Child):
    """A command in the foreground: its pipes, its exit status, and what its caller sent.

    Args:
        process: of the command.
        deadline: the ``time.monotonic()`` at which it is killed; None for never.
    """

    def __init__(self, process: subprocess.Popen[bytes], deadline: float | None) -> None:
        super().__init__()
        self.process = process
        self.deadline = deadline
        self.timed_out = False
        self.stdin_received = 0
        self.stdin_pending = bytearray()
        self.stdin_ended = False
        self.outputs: dict[int, bytes] = {}
        for pipe, kind in ((process.stdout, b"O"), (process.stderr, b"R")):
            assert pipe is not None
            os.set_blocking(pipe.fileno(), False)
            self.outputs[pipe.fileno()] = kind
        assert process.stdin is not None
        os.set_blocking(process.stdin.fileno(), False)

    def kill(self) -> None:
        """Kill the command's process group, again and again until nobody is left who forked meanwhile."""

        def again() -> None:
            ends, pause = time.monotonic() + 10.0, 0.002
            while time.monotonic() < ends:
                time.sleep(pause)
                os.killpg(self.process.pid, signal.SIGKILL)  # its end is the error that says that there is none
                pause = min(0.1, pause * 2)

        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except OSError:
            return
        start(again)

    def follow(self, connection: socket.socket, detaching: Callable[[], bool]) -> bool:
        """Carry input and output until the command has ended or the connection is to close.

        Args:
            connection: to the host, the command's alone.
            detaching: whether the connection is to close, for a checkpoint.

        Returns:
            Whether the command has ended.
        """
        assert self.process.stdin is not None
        stdin = self.process.stdin
        while True:
            if self.status is not None and not self._pump_outputs(connection):
                send_json(connection, {"exit": self.status, "timed_out": self.timed_out})
                return True
            if detaching():
                send(connection, b"D", json.dumps({"stdin": self.stdin_received}).encode())
                return False
            poll = select.poll()
            poll.register(self.wake, select.POLLIN)
            if len(self.stdin_pending) < CHUNK:
                poll.register(connection, select.POLLIN)
            for output in self.outputs:
                poll.register(output, select.POLLIN)
            if not stdin.closed and self.stdin_pending:
                poll.register(stdin.fileno(), select.POLLOUT)
            wait = None if self.deadline is None else max(0.0, self.deadline - time.monotonic()) * 1000 + 1
            for fd, event in poll.poll(wait):
                if fd == self.wake:
                    os.eventfd_read(self.wake)
                elif fd == connection.fileno():
                    self._receive_input(connection)
                elif not stdin.closed and fd == stdin.fileno() and event:
                    self._feed()
            self._pump_outputs(connection)
            if self.deadline is not None and time.monotonic() >= self.deadline:
                self.deadline, self.timed_out = None, True
                self.kill()

    def _receive_input(self, connection: socket.socket) -> None:
        kind, payload = receive(connection)  # EOFError here means that the caller has gone
        if kind == b"B":
            self.stdin_received += len(payload)
            self.stdin_pending += payload
        elif kind == b"Z":
            self.stdin_ended = True
        else:
            raise BadFrame(f"a command's input is no frame of kind {kind!r}")
        self._feed()

    def _feed(self) -> None:
        stdin = self.process.stdin
        assert stdin is not None
        if stdin.closed:
            self.stdin_pending.clear()
            return
        try:
            while self.stdin_pending:
                del self.stdin_pending[: os.write(stdin.fileno(), self.stdin_pending[:CHUNK])]
        except BlockingIOError:
            return
        except OSError:  # the command closed its input
            self.stdin_pending.clear()
            self.stdin_ended = True
        if self.stdin_ended:
            stdin.close()

    def _pump_outputs(self, connection: socket.socket) -> bool:
        """Send what the command wrote; return whether there was anything."""
        any_output = False
        for fd, kind in list(self.outputs.items()):
            try:
                data = os.read(fd, CHUNK)
            except BlockingIOError:
                continue
            if data:
                send(connection, kind, data)
                any_output = True
            else:
                del self.outputs[fd]
        return any_output

    def drain(self) -> None:
        """Discard what is still written, so that whoever inherited the pipes does not block or die of SIGPIPE."""
        while self.outputs:
            poll = select.poll()
            for fd in self.outputs:
                poll.register(fd, select.POLLIN)
            for fd, _ in poll.poll():
                try:
                    if not os.read(fd, CHUNK):
                        del self.outputs[fd]
                except BlockingIOError:
                    pass
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            assert pipe is not None
            try:
                pipe.close()
            except OSError:
                pass
        self.join()


class Agent:
    """PID 1: the commands and connections of one sandbox.

    Attributes:
        lock: guards what follows, and a spawn against the reaper.
        spawned: notified after a spawn.
        children: the processes whose end somebody waits for, by pid.
        numbered: the commands that can be attached to, by the host's number.
        connections: to the host.
        streams: both ends of every TCP stream.
        serving: the threads that serve requests.
        quiet: whether all connections are to close, for a checkpoint.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.spawned = threading.Condition(self.lock)
        self.children: dict[int, Child] = {}
        self.numbered: dict[str, Job] = {}
        self.connections: set[socket.socket] = set()
        self.streams: set[socket.socket] = set()
        self.serving: set[threading.Thread] = set()
        self.quiet = False

    # -- processes

    def reap(self) -> None:
        """Collect every child that ends, for ever: commands, and orphans that became ours."""
        while True:
            try:
                found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
                with self.lock:
                    if found is None:
                        continue
                    pid, status = os.waitpid(found.si_pid, os.WNOHANG)
                    child = self.children.pop(pid, None)
                    if child is not None:
                        child.ended(os.waitstatus_to_exitcode(status))
            except ChildProcessError:
                with self.spawned:
                    self.spawned.wait(5)
            except Exception:
                time.sleep(0.02)

    def spawn(self, request: dict[str, Any]) -> tuple[subprocess.Popen[bytes], Job | None]:
        """Start the command a request names, as this thread's user, in a session of its own."""
        background = bool(request["background"])
        where = subprocess.DEVNULL if background else subprocess.PIPE
        environment = {str(key): str(value) for key, value in request["env"].items()}
        timeout = request["timeout"]
        cwd = os.path.join(HOME, request["cwd"])
        if not os.path.isdir(cwd):  # checked here: Popen's own message blames the command
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), cwd)
        with self.spawned:
            process = subprocess.Popen(
                [str(word) for word in request["argv"]],
                stdin=where,
                stdout=where,
                stderr=where,
                env=environment,
                cwd=cwd,
                start_new_session=True,
                close_fds=False,  # Python opens them all to close on exec; looking for others takes long in here
            )
            job = None
            if not background:
                job = Job(process, None if timeout is None else time.monotonic() + timeout)
                self.children[process.pid] = job
            process.returncode = 0  # the reaper waits for it; Popen never does
            self.spawned.notify()
        return process, job

    # -- one connection, one request

    def dial(self, number: str) -> None:
        """Open a connection for the request of that number, and serve it."""
        connection = connect()
        with self.lock:
            self.connections.add(connection)
        try:
            send_json(connection, {"hello": "stream", "number": number})
            request = receive_json(connection)
            operation = request["op"]
            if operation == "exec":
                if request["user"] != "root":
                    become_user()
                self.execute(connection, request)
            elif operation == "attach":
                self.follow(connection, str(request["job"]))
            elif operation == "tcp":
                self.pipe(connection, int(request["port"]))
            elif operation == "files":
                become_user()
                serve_files(connection, request)
            else:
                raise BadFrame(f"unknown operation {operation!r}")
        finally:
            with self.lock:
                self.connections.discard(connection)
            connection.close()

    def execute(self, connection: socket.socket, request: dict[str, Any]) -> None:
        """Serve a request to run a command."""
        try:
            process, job = self.spawn(request)
        except Exception as error:
            send_json(connection, describe(error))
            return
        send_json(connection, {"pid": process.pid})
        if job is not None:
            number = str(request["job"])
            with self.lock:
                self.numbered[number] = job
            self.follow(connection, number)

    def follow(self, connection: socket.socket, number: str) -> None:
        """Carry input and output of the command of that number; kill it when its caller goes away."""
        with self.lock:
            job = self.numbered.get(number)
        if job is None:
            send_json(connection, {"error": "LookupError", "errno": None, "message": f"no command {number}"})
            return
        try:
            if not job.follow(connection, lambda: self.quiet):
                return  # the host comes back for it
        except Exception:  # the caller has gone, so the command goes too
            job.kill()
        with self.lock:
            self.numbered.pop(number, None)
        start(job.drain)

    def pipe(self, connection: socket.socket, port: int) -> None:
        """Serve a request for a TCP stream to a port inside."""
        try:
            inner = socket.create_connection(("127.0.0.1", port), timeout=10)
        except OSError as error:
            send_json(connection, describe(error))
            return
        inner.settimeout(None)
        inner.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with self.lock:
            self.streams |= {inner, connection}
        try:
            send_json(connection, {"ok": True})
            other = start(lambda: pump(inner, connection))
            pump(connection, inner)
            other.join()
        finally:
            with self.lock:
                self.streams -= {inner, connection}
            inner.close()

    # -- the control connection

    def control(self, connection: socket.socket) -> None:
        """Serve the host on the control connection, until it asks for quiet or the connection ends."""
        send_json(connection, {"hello": "control"})
        while True:
            message = receive_json(connection)
            if "dial" in message:
                self.serve(str(message["dial"]))
            elif "quiet" in message:
                self.quieten()
                send_json(connection, {"quiet": True})
                return
            elif "jobs" in message:
                # What the host still follows; a restored copy has a host of its own, which follows nothing.
                known = set(message["jobs"])
                with self.lock:
                    orphans = [self.numbered.pop(number) for number in list(self.numbered) if number not in known]
                for job in orphans:
                    start(job.drain)

    def serve(self, number: str) -> None:
        """Serve the request of that number in a thread."""

        def run() -> None:
            try:
                self.dial(number)
            finally:
                with self.lock:
                    self.serving.discard(threading.current_thread())

        with self.lock:
            thread = start(run, begin=False)
            self.serving.add(thread)
        thread.start()

    def quieten(self) -> None:
        """Close every connection to the host: a checkpoint fails while one is open."""
        with self.lock:
            self.quiet = True
            for job in self.numbered.values():
                os.eventfd_write(job.wake, 1)
            serving = list(self.serving)
        for connections in (
            self.streams,
            self.connections,
        ):  # streams have no end of their own; the rest is asked first
            with self.lock:
                for connection in connections:
                    try:
                        connection.shutdown(socket.SHUT_RDWR)
                    except OSError:
                        pass
            patience = time.monotonic() + 2
            for thread in serving:
                thread.join(max(0.0, patience - time.monotonic()))

    def run(self) -> None:
        """Keep a control connection to the host, for ever."""
        start(self.reap)
        while True:
            try:
                with connect() as connection:
                    self.quiet = False
                    self.control(connection)
            except Exception:
                pass
            time.sleep(0.02)


def become_user() -> None:
    """Give this thread, and nothing else of the process, the user's identity: what it opens and starts has the user's rights.

    The C library's functions change every thread, so these are the bare system calls. A child with another user than
    its parent's would have to be made by fork, which costs 30 ms in gVisor; with the right one it is made by vfork.
    """
    numbers = {"x86_64": (116, 119, 117), "aarch64": (159, 149, 147)}[os.uname().machine]
    setgroups, setresgid, setresuid = (ctypes.c_long(number) for number in numbers)
    identity = [ctypes.c_long(UID)] * 3
    none = ctypes.c_long(0)
    if (
        _libc.syscall(setgroups, none, none)
        or _libc.syscall(setresgid, *identity)
        or _libc.syscall(setresuid, *identity)
    ):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def start(target: Callable[[], None], begin: bool = True) -> threading.Thread:
    """Make a daemon thread that swallows every error of its target.

    Args:
        target: what it runs.
        begin: whether it is started at once.
    """

    def run() -> None:
        try:
            target()
        except BaseException:
            pass

    thread = threading.Thread(target=run, daemon=True)
    if begin:
        thread.start()
    return thread


def connect() -> socket.socket:
    """Open a connection to the host."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.connect(SOCKET)
    except BaseException:
        connection.close()
        raise
    return connection


def pump(source: socket.socket, target: socket.socket) -> None:
    """Copy bytes one way; an end is passed on, an error ends both ways."""
    try:
        while data := source.recv(CHUNK):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)
    except OSError:
        for end in (source, target):
            try:
                end.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass


def describe(error: BaseException) -> dict[str, Any]:
    """Describe an error as data."""
    number = error.errno if isinstance(error, OSError) else None
    return {"error": type(error).__name__, "errno": number, "message": str(error)[:2000]}


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


def main() -> None:
    """Run as PID 1; never returns."""
    os.environ.clear()
    null = os.open(os.devnull, os.O_RDWR)
    for fd in range(3):  # runsc's log on the host is not for what runs in here
        os.dup2(null, fd)
    threading.stack_size(512 << 10)
    resource.setrlimit(resource.RLIMIT_NPROC, (MAX_PROCESSES, MAX_PROCESSES))  # binds the user, not root
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGPIPE"):
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    os.umask(0o022)
    os.makedirs(HOME, exist_ok=True)
    os.chown(HOME, UID, UID)
    Agent().run()


if __name__ == "__main__":
    main()

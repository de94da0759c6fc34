"""PID 1 of a sandbox: keeps a control connection to the host, and serves one request on every other."""

from __future__ import annotations

import os
import resource
import signal
import socket
import threading
import time

from .commands import Commands
from .files import serve_files
from .frames import BadFrame, receive_json, send_json
from .inside import HOME, MAX_PROCESSES, SOCKET, UID
from .ports import Ports, shut_down
from .processes import Processes
from .threads import become_user, start


class Agent:
    """The requests of one sandbox, each served in a thread on a connection of its own.

    Attributes:
        lock: guards the connections and the threads.
        connections: to the host, but the control connection.
        serving: the threads that serve requests.
        quiet: set while all connections are to close, for a checkpoint.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.connections: set[socket.socket] = set()
        self.serving: set[threading.Thread] = set()
        self.quiet = threading.Event()
        self.processes = Processes()
        self.commands = Commands(self.processes, self.quiet.is_set)
        self.ports = Ports()

    def run(self) -> None:
        """Keep a control connection to the host, for ever."""
        start(self.processes.reap)
        while True:
            try:
                with connect() as connection:
                    self.quiet.clear()
                    self.control(connection)
            except Exception:
                pass
            time.sleep(0.02)

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
                self.commands.forget_others(set(message["jobs"]))

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
                self.commands.execute(connection, request)
            elif operation == "attach":
                self.commands.follow(connection, str(request["job"]))
            elif operation == "tcp":
                self.ports.pipe(connection, int(request["port"]))
            elif operation == "files":
                become_user()
                serve_files(connection, request)
            else:
                raise BadFrame(f"unknown operation {operation!r}")
        finally:
            with self.lock:
                self.connections.discard(connection)
            connection.close()

    def quieten(self) -> None:
        """Close every connection to the host: a checkpoint fails while one is open."""
        self.quiet.set()  # before the commands are asked: one that begins meanwhile sees it
        self.commands.let_go()
        with self.lock:
            serving = list(self.serving)
        self.ports.cut()  # streams have no end of their own; the rest is asked first
        _wait_for(serving, 2)
        with self.lock:
            shut_down(self.connections)
        _wait_for(serving, 2)


def connect() -> socket.socket:
    """Open a connection to the host."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.connect(SOCKET)
    except BaseException:
        connection.close()
        raise
    return connection


def _wait_for(threads: list[threading.Thread], seconds: float) -> None:
    """Wait for the end of threads, for so long in all."""
    patience = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(0.0, patience - time.monotonic()))


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

"""What several tests look at."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from http.client import HTTPConnection
from pathlib import Path

from prized_gym.runsc import Sandbox
from prized_gym.runsc.processes import tree

PACKAGE = str(Path(__file__).resolve().parents[2] / "prized_gym")
ROOT = Path(__file__).resolve().parents[2]

COUNTER = """
import http.server
count = 0
class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_GET(self):
        global count
        count += 1
        body = str(count).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *args):
        pass
http.server.ThreadingHTTPServer(("127.0.0.1", 8000), Handler).serve_forever()
"""


def eventually(condition: Callable[[], object], seconds: float = 10.0) -> bool:
    """Whether the condition becomes true in time."""
    ends = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > ends:
            return False
        time.sleep(0.02)
    return True


def http(sandbox: Sandbox, port: int = 8000) -> HTTPConnection:
    """A connection to a server in a sandbox, which may still be starting."""
    connection = HTTPConnection("sandbox")

    def connected() -> bool:
        try:
            connection.sock = sandbox.connect_port(port)
        except ConnectionRefusedError:
            return False
        return True

    assert eventually(connected, 20), sandbox.exec("cat *.log").stdout
    return connection


def get(connection: HTTPConnection, path: str = "/") -> str:
    connection.request("GET", path)
    return connection.getresponse().read().decode()


def processes_of(store: Path) -> list[str]:
    """Command lines of all processes that have a path below `store`, or an id of a sandbox, among their arguments."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            if str(store) in line:
                found.append(f"{entry.name} {line[:200]}")
    return found


def sentry_of(sandbox: Sandbox) -> int:
    """The sentry's pid as this process sees it."""
    for pid in tree(sandbox._runtime.process.pid):
        arguments = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
        if sandbox.id in arguments and "boot" in arguments:
            return pid
    raise AssertionError("no sentry")


def cpu_seconds(pids: list[int]) -> float:
    """CPU time of live processes so far."""
    total = 0
    for pid in pids:
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        total += int(fields[11]) + int(fields[12])
    return total / os.sysconf("SC_CLK_TCK")


def start_python(program: str, *arguments: str, **environment: str) -> "subprocess.Popen[str]":
    """Another process of this Python, as a runtime of its own; its standard output is a pipe.

    It finds `prized_gym.runsc` without what the package above imports.
    """
    program = (
        f"import sys, types; p = sys.modules['prized_gym'] = types.ModuleType('prized_gym'); p.__path__ = [{PACKAGE!r}]\n"
        + program
    )
    return subprocess.Popen(
        [sys.executable, "-c", program, *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
    )  # fmt: skip

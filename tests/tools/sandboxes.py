"""Sandboxes of runsc: what they are made with, a server to run in one, and runtimes in other processes."""

from __future__ import annotations

import os
import subprocess
import sys
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

from prized_gym.runsc import Sandbox
from tools.processes import eventually

ROOT = Path(__file__).resolve().parents[2]
ZOO = ROOT / "tests" / "zoo"

SMALL: dict[str, Any] = {"memory_gb": 1, "disk_gb": 0.05, "vcpu": 2, "max_runtime_min": 10, "progress": False}
"""Options of the gvisor bases of the tests."""

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


def start_python(program: str, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    """Another process of this Python, as a runtime of its own; its standard output is a pipe.

    It finds ``prized_gym.runsc`` without what the package above imports.
    """
    package = str(ROOT / "prized_gym")
    program = (
        f"import sys, types; p = sys.modules['prized_gym'] = types.ModuleType('prized_gym'); p.__path__ = [{package!r}]\n"
        + program
    )
    return subprocess.Popen(
        [sys.executable, "-c", program, *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
    )  # fmt: skip

"""The client inside: both commands it may make, and answers of every size, against a server on this machine."""

from __future__ import annotations

import base64
import http.server
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from prized_gym.server import exec_proxy

pytestmark = pytest.mark.timeout(30)
START = "import sys; sys.path.insert(0, sys.argv.pop(1)); import exec_proxy; {}; exec_proxy.main()"


class Echo(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: object) -> None: ...


@pytest.fixture
def port() -> Iterator[int]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Echo) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("change", ["pass", "exec_proxy.program = lambda: None"], ids=["machine", "shell"])
def test_answers_of_every_size(port: int, change: str, tmp_path: Path) -> None:
    here = str(Path(exec_proxy.__file__).parent)
    # Without site-packages, as in a sandbox; the directory comes last, because a neighbour has a library's name.
    start = START.format(change).replace("insert(0, ", "append(")
    command = [sys.executable, "-S", "-c", start, here, str(tmp_path), str(port), "1"]
    with subprocess.Popen(command) as process:
        try:
            while not (tmp_path / "ready").exists():
                assert process.poll() is None
                time.sleep(0.01)
            assert ((tmp_path / "call").read_bytes()[:4] == b"\x7fELF") == (
                change == "pass" and bool(exec_proxy.program())
            )
            for number, size in enumerate((0, 10, 40_000, 60_000, 700_000, 2_000_000)):
                # The second is an answer to a command that was killed before it took it.
                if number == 1:
                    with open(tmp_path / "0.in", "w") as pipe:
                        pipe.write(_request(7777, b"lost", tmp_path))
                body = b"\xff" * size
                line = _request(number, body, tmp_path)
                paths = [f"{tmp_path}/0.{end}" for end in ("in", "out", "answer")]
                done = subprocess.run([f"{tmp_path}/call", *paths, line], capture_output=True, timeout=60, check=True)
                answered, _, text = done.stdout.decode().partition(" ")
                assert int(answered) == number and text.endswith("\n") and not done.stderr
                large = size * 4 // 3 > exec_proxy.PRINTED
                assert (text == "@\n") == large
                raw = (tmp_path / "0.body").read_bytes() if large else base64.b64decode(text)
                head, _, content = raw.partition(b"\n")
                assert json.loads(head)["status"] == 200 and content == body
        finally:
            process.kill()


def _request(number: int, body: bytes, directory: Path) -> str:
    head = {"method": "POST", "path": "/", "headers": {}, "timeout": 5, "limit": 4_000_000, "again": False}
    data = json.dumps(head).encode() + b"\n" + body
    if len(body) < 60_000:
        return f"{number:08} {base64.b64encode(data).decode()}\n"
    (directory / "0.request").write_bytes(data)
    return f"{number:08} @{directory}/0.request\n"

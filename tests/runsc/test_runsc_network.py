"""network='outbound': out by user-mode NAT, in by nothing; copies with their own or none."""

import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from prized_gym.runsc import Runsc, RunscError, Sandbox, diagnose
from tools.processes import eventually
from tools.sandboxes import get, http, start_python

FETCH = (
    "import socket, sys\ns = socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=5)\n"
    "s.sendall(b'hello')\nprint(s.recv(100).decode())"
)


@pytest.fixture(scope="module")
def outside(runsc: Runsc) -> Iterator[tuple[str, int]]:
    """A server on an outside address of this machine; it echoes."""
    check = next(check for check in diagnose(runsc.path) if check.name == "outbound network")
    if not check.ok:
        pytest.skip(f"{check.detail}: {check.remedy}")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing; asks which address would
        except OSError:
            pytest.skip("this machine has no outside address")
        address = probe.getsockname()[0]
    program = (
        "import socket, sys, threading\nserver = socket.create_server(('0.0.0.0', 0))\n"
        "print(server.getsockname()[1], flush=True)\n"
        "def echo(c):\n    while d := c.recv(100): c.sendall(d)\n"
        "while True: threading.Thread(target=echo, args=(server.accept()[0],), daemon=True).start()"
    )
    with start_python(program) as process:
        assert process.stdout is not None
        yield address, int(process.stdout.readline())
        process.kill()


def fetch(sandbox: Sandbox, outside: tuple[str, int]) -> bytes:
    return sandbox.exec(["python3", "-I", "-S", "-c", FETCH, outside[0], str(outside[1])], timeout=30).stdout


def test_base_with_and_copies_with_or_without(create: Callable[..., Sandbox], outside: tuple[str, int]) -> None:
    base = create(network="outbound")
    assert fetch(base, outside) == b"hello\n"
    assert b"10.0.2.3" in base.exec("cat /etc/resolv.conf").stdout
    program = (  # a server that answers over loopback what it heard on a connection that went out
        "import http.server, socket, sys\nout = socket.create_connection((sys.argv[1], int(sys.argv[2])))\n"
        "class H(http.server.BaseHTTPRequestHandler):\n"
        "    def do_GET(self):\n"
        "        try: out.sendall(b'out'); body = out.recv(10) or b'closed'\n"
        "        except OSError as error: body = b'closed'\n"
        "        self.send_response(200); self.send_header('Content-Length', str(len(body)))\n"
        "        self.end_headers(); self.wfile.write(body)\n"
        "    def log_message(self, *a): pass\n"
        "http.server.HTTPServer(('127.0.0.1', 8000), H).serve_forever()"
    )
    base.exec(["python3", "-I", "-S", "-c", program, outside[0], str(outside[1])], background=True)
    assert get(http(base)) == "out"
    [with_own] = base.fork()
    [without] = base.fork(network="none")
    with with_own, without:
        assert (
            get(http(with_own)) == "closed" and get(http(without)) == "closed"
        )  # outside connections end at a fork, in the base too
        assert fetch(with_own, outside) == b"hello\n" and fetch(without, outside) == b""
        assert fetch(base, outside) == b"hello\n"
        assert without.exec("cat /proc/net/dev | tail -n +3 | cut -d: -f1").stdout.split() == [b"lo"]


def test_loopback_of_the_host_stays_closed(create: Callable[..., Sandbox], outside: tuple[str, int]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as local:
        sandbox = create(network="outbound")
        for address in ("10.0.2.2", "127.0.0.1"):
            assert fetch(sandbox, (address, local.getsockname()[1])) == b""


def test_nothing_of_the_network_is_left(create: Callable[..., Sandbox], outside: tuple[str, int]) -> None:
    sandbox = create(network="outbound")
    directory = sandbox._life.directory
    namespace = directory / "netns"
    assert namespace.exists()
    slirp = _slirp(namespace)
    assert slirp
    sandbox.close()
    assert not directory.exists()
    assert eventually(lambda: not _slirp(namespace))


def test_without_slirp4netns_it_says_so(create: Callable[..., Sandbox], tmp_path: Path) -> None:
    program = (
        "import os, sys\nfrom prized_gym.runsc import *\n"
        "try: Sandbox.create(runsc=Runsc(sys.argv[1], ''), network='outbound')\nexcept RunscError as error: print(error)"
    )
    with start_python(
        program, create(memory_gb=0.25)._life.runtime.runsc.path, SLIRP4NETNS=str(tmp_path / "none")
    ) as process:
        output = process.communicate(timeout=60)[0]
    assert "slirp4netns" in output and "needs" in output
    assert issubclass(RunscError, Exception)


def _slirp(namespace: Path) -> list[str]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                line = (entry / "cmdline").read_bytes().decode(errors="replace")
            except OSError:
                continue
            if str(namespace) in line and "slirp4netns" in line and int(entry.name) != os.getpid():
                found.append(entry.name)
    return found

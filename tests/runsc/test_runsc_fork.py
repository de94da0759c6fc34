"""Forks: what a copy carries, and that no copy sees another."""

from collections.abc import Callable
from pathlib import Path

import pytest

from prized_gym.runsc import Sandbox, SandboxStateError
from tools.libraries import need_here
from tools.sandboxes import COUNTER, get, http

STATEFUL = """
import http.server, json, sqlite3, subprocess, sys, threading, time
child = subprocess.Popen(["/bin/cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
log = open("kept.log", "a", buffering=1)
database = sqlite3.connect("state.db", check_same_thread=False)
mode = database.execute("pragma journal_mode=wal").fetchone()[0]
database.execute("create table events (name text)")
database.commit()
ticks = 0
memory = []
lock = threading.Lock()
def tick():
    global ticks
    while True:
        time.sleep(0.01)
        ticks += 1
threading.Thread(target=tick, daemon=True).start()
class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_GET(self):
        name = self.path[1:]
        with lock:
            memory.append(name)
            log.write(name + "\\n")
            database.execute("insert into events values (?)", (name,))
            database.commit()
            child.stdin.write((name + "\\n").encode())
            child.stdin.flush()
            answer = {
                "memory": memory, "log": open("kept.log").read().split(), "mode": mode,
                "child": child.stdout.readline().decode().strip(),
                "database": [row[0] for row in database.execute("select name from events")], "ticks": ticks, "pid": child.pid,
            }
        body = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *args):
        pass
http.server.ThreadingHTTPServer(("127.0.0.1", 8000), Handler).serve_forever()
"""


@pytest.fixture
def server(create: Callable[..., Sandbox]) -> Sandbox:
    sandbox = create(labels={"run": "a"})
    sandbox.files.write("server.py", COUNTER)
    sandbox.exec("python3 server.py > server.log 2>&1", background=True)
    assert get(http(sandbox)) == "1"
    return sandbox


def close(sandboxes: list[Sandbox]) -> None:
    for sandbox in sandboxes:
        sandbox.close()


def test_everything_is_carried_and_nothing_is_shared(create: Callable[..., Sandbox]) -> None:
    import json

    sandbox = create()
    sandbox.files.write("server.py", STATEFUL)
    sandbox.exec("python3 server.py > server.log 2>&1", background=True)
    before = json.loads(get(http(sandbox), "/base"))
    assert before["mode"] == "wal"
    copies = sandbox.fork(4)
    for round in ("one", "two"):
        for number, copy in enumerate(copies):
            name = f"{round}-{number}"
            after = json.loads(get(http(copy), "/" + name))
            expected = ["base"] + [f"{earlier}-{number}" for earlier in ("one", "two")[: 1 if round == "one" else 2]]
            assert after["memory"] == after["log"] == after["database"] == expected
            assert after["child"] == name and after["pid"] == before["pid"] and after["ticks"] > before["ticks"]
    after = json.loads(get(http(sandbox), "/again"))
    assert after["memory"] == after["log"] == after["database"] == ["base", "again"]
    close(copies)


def test_running_paused_and_forked(server: Sandbox) -> None:
    [copy] = server.fork(labels={"run": "b"})
    assert copy.labels == {"run": "b"} and copy.id != server.id and copy.created_at >= server.created_at
    assert get(http(copy)) == "2" and get(http(server)) == "2"
    [grandchild] = copy.fork()
    assert grandchild.labels == {"run": "b"}
    assert get(http(grandchild)) == "3" and get(http(copy)) == "3"

    server.pause()
    assert server.state == "paused" and server.stopped
    with pytest.raises(SandboxStateError, match="paused"):
        server.exec("true")
    images = server._life.runtime.directory / "images"
    first = server.fork(2)
    assert server.state == "paused" and server.stopped
    saved = list(images.iterdir())
    second = server.fork(1)
    assert list(images.iterdir()) == saved and len(saved) == 1  # one checkpoint serves all forks of an unchanged state
    assert [get(http(each)) for each in first + second] == ["3", "3", "3"]
    server.resume()
    assert not list(images.iterdir())
    assert get(http(server)) == "3"
    close([copy, grandchild, *first, *second])
    assert copy.state == "closed"


def test_streams_end_at_a_fork_and_can_be_opened_again(server: Sandbox) -> None:
    with server.connect_port(8000) as stream:
        close(server.fork())
        stream.settimeout(5)
        assert stream.recv(1) == b""
    assert get(http(server)) == "2"


def test_random_differs(server: Sandbox) -> None:
    copies = server.fork(2)
    assert len({sandbox.exec("head -c 16 /dev/urandom | od -x").stdout for sandbox in [server, *copies]}) == 3
    close(copies)


def test_files_of_copies_are_their_own(server: Sandbox) -> None:
    server.files.write("shared.txt", "base")
    copies = server.fork(2)
    for number, copy in enumerate(copies):
        copy.files.write("shared.txt", str(number))
        copy.exec(f"echo {number} > /tmp/scratch; echo {number} > /dev/shm/scratch")
    assert [sandbox.files.read("shared.txt") for sandbox in [server, *copies]] == [b"base", b"0", b"1"]
    assert server.exec("ls /tmp /dev/shm").stdout.count(b"scratch") == 0
    assert [copy.exec("cat /tmp/scratch /dev/shm/scratch").stdout for copy in copies] == [b"0\n0\n", b"1\n1\n"]
    close(copies)


def test_the_host_python_and_its_packages(shared: Sandbox) -> None:
    import numpy

    result = shared.exec("python -c 'import numpy, prized_gym.runsc, sys; print(numpy.__version__, sys.version)'")
    assert result.stdout.decode().startswith(numpy.__version__), result.stderr
    assert shared.exec("touch $(python -c 'import numpy; print(numpy.__path__[0])')/x").exit_code != 0


def test_pip_installs_on_top_of_it(shared: Sandbox, tmp_path: Path) -> None:
    """From a file, so without network."""
    import zipfile

    need_here("pip", "pip")
    wheel = tmp_path / "extra_thing-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("extra_thing.py", "import numpy\nvalue = int(numpy.arange(7).sum())\n")
        archive.writestr(
            "extra_thing-1.0.dist-info/METADATA",
            "Metadata-Version: 2.1\nName: extra-thing\nVersion: 1.0\nRequires-Dist: numpy\n",
        )
        archive.writestr(
            "extra_thing-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr("extra_thing-1.0.dist-info/RECORD", "")
    shared.files.upload(wheel)
    result = shared.exec(f"pip install --no-index {wheel.name}", timeout=100)
    assert result.exit_code == 0, result.stdout + result.stderr
    assert shared.exec("python -c 'import extra_thing; print(extra_thing.value)'").stdout == b"21\n"
    [copy] = shared.fork()
    with copy:
        assert copy.exec("python3 -c 'import extra_thing; print(extra_thing.value)'").stdout == b"21\n"


def test_a_virtual_environment_can_be_made(shared: Sandbox) -> None:
    result = shared.exec(
        "python -m venv --without-pip --system-site-packages ~/env && "
        "~/env/bin/python -c 'import numpy, sys; print(sys.prefix)'"
    )
    assert result.stdout == b"/home/user/env\n", result.stderr


def test_more_binds(create: Callable[..., Sandbox], tmp_path: Path) -> None:
    (tmp_path / "data").write_text("shown")
    tmp_path.chmod(0o755)  # what the host lets nobody else read, the sandbox's user cannot read either
    for path in ("relative", "/", "/proc/1", "/.agent", "/.agent/agent"):
        with pytest.raises(ValueError, match="no place to mount"):
            create(mounts={path: str(tmp_path)})
    sandbox = create(mounts={"/data": str(tmp_path)}, env_vars={"MINE": "1"})
    [copy] = sandbox.fork()
    with copy:
        assert copy.exec("cat /data/data; echo $MINE; touch /data/x || echo read-only").stdout == b"shown1\nread-only\n"

"""What hostile code inside can see, reach and break: nothing but its own copy."""

import json
import os
import socket
import socketserver
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from prized_gym.runsc import Sandbox, SandboxDied, agent
from tools.processes import eventually

SPY = r"""
import ctypes, errno, glob, json, os, socket, stat, sys
secret, unix, abstract, port, host_pid, addresses = json.loads(sys.argv[1])
found = {}
def attempt(name, action):
    try:
        found[name] = repr(action())[:500]
    except BaseException as error:
        found[name] = None
        found["why " + name] = repr(error)
def connect(family, address):
    with socket.socket(family) as s:
        s.settimeout(0.5)
        s.connect(address)
        return "connected"
attempt("secret", lambda: open(secret).read())
attempt("secret by root", lambda: open("/proc/1/root" + secret).read())
attempt("shadow", lambda: open("/etc/shadow").read())
attempt("keys", lambda: os.listdir("/etc/ssl/private"))
attempt("ssh", lambda: os.listdir("/etc/ssh"))
attempt("machine-id", lambda: open("/etc/machine-id").read())
attempt("roots", lambda: [f for f in os.listdir("/root") if not sys.base_prefix.startswith("/root/" + f)] or 1/0)
attempt("var", lambda: [f for f in os.listdir("/var") if f != "tmp"] or 1/0)
attempt("run", lambda: os.listdir("/run") or 1/0)
found["environment of 1"] = open("/proc/1/environ").read()
attempt("unix", lambda: connect(socket.AF_UNIX, unix))
attempt("abstract", lambda: connect(socket.AF_UNIX, "\0" + abstract))
attempt("control", lambda: connect(socket.AF_UNIX, "/ctl/a.sock"))
attempt("control directory", lambda: os.listdir("/ctl"))
for address in addresses:
    attempt("tcp " + address, lambda: connect(socket.AF_INET, (address, port)))
attempt("vsock", lambda: connect(socket.AF_VSOCK, (2, 1024)))
attempt("raw", lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW))
attempt("kill host", lambda: os.kill(host_pid, 9))
attempt("kill agent", lambda: os.kill(1, 9))
attempt("root", lambda: os.setuid(0))
attempt("mount", lambda: ctypes.CDLL(None, use_errno=True).mount(b"proc", b"/home", b"proc", 0, None) and 1/0 or "mounted")
attempt("ptrace", lambda: ctypes.CDLL(None).ptrace(16, 1, 0, 0) and 1/0 or "attached")
attempt("write usr", lambda: open("/usr/evil", "w"))
attempt("write etc", lambda: open("/etc/passwd", "a"))
attempt("write agent", lambda: open("/.agent/agent/main.py", "a"))
attempt("write agent's bytecode", lambda: open(glob.glob("/.agent/agent/__pycache__/main.*")[0], "a"))
attempt("write python", lambda: open(os.__file__, "a"))
attempt("raise limit", lambda: __import__("resource").setrlimit(6, (100000, 100000)))
found["pids"] = sorted(int(p) for p in os.listdir("/proc") if p.isdigit())
found["environment"] = dict(os.environ)
found["sockets"] = [p for p in glob.glob("/*") + glob.glob("/run/**", recursive=True) + glob.glob("/tmp/*")
                    if stat.S_ISSOCK(os.lstat(p).st_mode)]
found["home"] = os.listdir("/home")
found["no new privileges"] = ctypes.CDLL(None).prctl(39, 0, 0, 0, 0)
print(json.dumps(found))
"""


@pytest.fixture
def spied(create: Callable[..., Sandbox], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """What a spy finds in a copy, with things on the host that it looks for."""
    monkeypatch.setenv("A_SECRET_OF_THE_HOST", "hunter2")
    secret = tmp_path / "secret"
    secret.write_text("hunter2")
    os.chmod(tmp_path, 0o755)
    unix = str(tmp_path / "host.sock")
    abstract = f"prized-gym-test-{os.getpid()}"
    with (
        socketserver.ThreadingUnixStreamServer(unix, socketserver.BaseRequestHandler),
        socket.socket(socket.AF_UNIX) as named,
    ):
        os.chmod(unix, 0o777)
        named.bind("\0" + abstract)
        named.listen()
        with socket.create_server(("0.0.0.0", 0)) as tcp:
            addresses = ["127.0.0.1", "10.0.2.2"]
            sandbox = create()
            sandbox.files.write("spy.py", SPY)
            [copy] = sandbox.fork()
            with copy:
                arguments = json.dumps([str(secret), unix, abstract, tcp.getsockname()[1], os.getpid(), addresses])
                result = copy.exec(["python3", "spy.py", arguments], timeout=60)
                assert result.exit_code == 0, result.stderr.decode()
                found: dict[str, object] = json.loads(result.stdout)
                assert copy.exec("echo fine").stdout == b"fine\n"
    return found


def test_a_spy_finds_nothing(spied: dict[str, object]) -> None:
    reached = {
        name: value
        for name, value in spied.items()
        if value is not None
        and not name.startswith("why ")
        and name not in ("pids", "environment", "sockets", "home", "no new privileges", "environment of 1")
    }
    assert not reached, (reached, spied)
    assert all("PermissionError" in str(spied[f"why write agent{what}"]) for what in ("", "'s bytecode"))  # it is there
    assert max(spied["pids"]) < 100 and len(spied["pids"]) < 10  # type: ignore[call-overload, arg-type]
    assert "hunter2" not in json.dumps(spied)
    assert spied["sockets"] == [] and spied["home"] == ["user"]
    assert spied["no new privileges"] == 1  # so no setuid program helps


def test_more_threads_than_allowed_hurt_only_the_copy(create: Callable[..., Sandbox]) -> None:
    bomb, other = create(), create()
    program = (
        "import threading, time\nthreading.stack_size(65536)\nn = 0\n"
        "try:\n    while n < 5000:\n        threading.Thread(target=time.sleep, args=(600,), daemon=True).start(); n += 1\n"
        "except BaseException as error: print(n, type(error).__name__, flush=True)\nimport os; os._exit(0)"
    )
    result = bomb.exec(["python3", "-I", "-S", "-c", program], timeout=60)
    assert b"RuntimeError" in result.stdout and int(result.stdout.split()[0]) <= agent.MAX_PROCESSES
    assert other.exec("echo fine", timeout=30).stdout == b"fine\n"
    assert bomb.exec("echo fine", timeout=30).stdout == b"fine\n"


def test_memory_exhaustion_ends_only_that_copy(create: Callable[..., Sandbox]) -> None:
    from prized_gym.runsc import cgroups

    if "memory" not in cgroups.parents():
        pytest.skip("no memory limit by cgroup on this machine")
    base = create(memory_gb=0.25, disk_gb=0.01)
    hungry, other = base.fork(2)
    with hungry, other:
        with pytest.raises(SandboxDied, match="out of memory"):
            hungry.exec(
                ["python3", "-I", "-S", "-c", "b = [bytearray(b'x' * (1 << 20)) for _ in range(4000)]"], timeout=60
            )
        assert "out of memory" in (hungry.wait_dead(5) or "")
        assert other.exec("echo fine").stdout == b"fine\n"
        assert base.exec("echo fine").stdout == b"fine\n"


def test_the_cpu_is_limited(create: Callable[..., Sandbox]) -> None:
    from prized_gym.runsc import cgroups

    if "cpu" not in cgroups.parents():
        pytest.skip("no CPU limit by cgroup on this machine")
    sandbox = create(vcpu=0.3)
    [group] = cgroups.parents()["cpu"].glob(f"*{sandbox.id}")

    def throttled() -> bool:
        sandbox.exec("timeout 0.5 sh -c 'while true; do :; done'", timeout=60)
        counts = dict(line.split() for line in (group / "cpu.stat").read_text().splitlines())
        return int(counts["nr_throttled"]) > 0

    assert eventually(throttled, 20)  # a busy machine may give it less than its limit


def test_root_inside_cannot_fake_its_way_out(create: Callable[..., Sandbox]) -> None:
    """Root inside can speak to the host's socket: garbage ends its connections, and enough of it the sandbox."""
    sandbox, other = create(), create()
    program = r"""
import socket, sys
garbage = [b"\0" * 64, b"J\xff\xff\xff\xff", b"J\0\0\0\4null", b"J\0\0\0\2{}",
           b'J\0\0\0\x30{"hello": "stream", "number": "00000000000000"}  ']
for number in range(400):
    try:
        s = socket.socket(socket.AF_UNIX)
        s.connect("/ctl/a.sock")
        s.sendall(garbage[number % len(garbage)])
    except OSError:
        pass
"""
    with pytest.raises(SandboxDied, match="protocol"):
        sandbox.exec(["python3", "-I", "-S", "-c", program], user="root", timeout=30)
        sandbox.exec("sleep 10")
    assert other.exec("echo fine").stdout == b"fine\n"


def test_flooding_output_is_bounded(shared: Sandbox) -> None:
    result = shared.exec("timeout 0.5 cat /dev/zero", max_output=1 << 20, timeout=20)
    assert len(result.stdout) == 1 << 20 and result.truncated


def test_network_none_has_only_loopback(shared: Sandbox) -> None:
    assert shared.exec("cat /proc/net/dev | tail -n +3 | cut -d: -f1").stdout.split() == [b"lo"]


def test_concurrent_attacks_do_not_slow_the_neighbour(create: Callable[..., Sandbox]) -> None:
    noisy, quiet = create(vcpu=0.5), create()
    stop = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(noisy.exec, "while true; do :; done", timeout=2)
        results = [quiet.exec(["/bin/true"], timeout=30).exit_code for _ in range(20)]
        stop.set()
        assert results == [0] * 20 and running.result().timed_out

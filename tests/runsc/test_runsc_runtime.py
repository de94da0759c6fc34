"""The process that makes sandboxes: when it ends, however it ends, nothing of them stays."""

import gc
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from prized_gym.runsc import Runsc, Sandbox, cgroups, start, sweep
from prized_gym.runsc.life import Life
from prized_gym.runsc.processes import tree
from tools.processes import eventually, processes_of, sentry_of
from tools.sandboxes import ROOT, start_python

PRELUDE = (
    "import os, sys, threading, time, signal\nfrom prized_gym.runsc import *\nfrom prized_gym.runsc import runtime\n"
    "runsc = Runsc(os.environ['RUNSC_PATH'], '')\n"
    "options = dict(runsc=runsc, memory_gb=0.5, disk_gb=0.05, max_runtime_min=5)\n"
    "say = lambda word: print(word, flush=True)\n"
)


@pytest.fixture
def own_store(runsc: Runsc, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A store for runtimes that are killed; at the end it must be empty, and no process or cgroup may speak of it."""
    import shutil
    import tempfile

    store = Path(tempfile.mkdtemp(prefix="pg-", dir="/var/tmp"))
    monkeypatch.setenv("PRIZED_GYM_STORE", str(store))
    monkeypatch.setenv("RUNSC_PATH", runsc.path)
    yield store
    shutil.rmtree(store)


def namespaces(pids: Iterable[int]) -> set[str]:
    """The PID, network and mount namespaces that these processes are in."""
    found = set()
    for pid in pids:
        for kind in ("pid", "net", "mnt"):
            try:
                found.add(os.readlink(f"/proc/{pid}/ns/{kind}"))
            except OSError:
                continue
    return found


def everybody() -> Iterator[int]:
    """All processes."""
    return (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit())


def remains(store: Path) -> list[str]:
    """Whatever is left of a store's runtimes."""
    files = [os.path.join(top, name) for top, directories, names in os.walk(store) for name in (*directories, *names)]
    files = [path for path in files if path not in (f"{store}/lock", f"{store}/kept")]
    RUNTIMES.update(path.name for path in store.glob("m-*"))
    found = [str(group) for parent in set(cgroups.parents().values()) for group in parent.glob("prized-gym-m-*")]
    return [*files, *processes_of(store), *(group for group in found if any(name in group for name in RUNTIMES))]


RUNTIMES: set[str] = set()  # names of those that tests of this module made

STAGES = {
    "while it starts its supervisor": "say('go'); sandbox = Sandbox.create(**options); time.sleep(60)",
    "in set-up": "sandbox = Sandbox.create(**options); say('go'); sandbox.exec('sleep 60')",
    "in a fork": (
        "sandbox = Sandbox.create(**options)\nsandbox.exec('true')\nthreading.Timer(0.15, say, ['go']).start()\n"
        "while True: sandbox.fork(4)"
    ),
    "in a step": "[copy] = Sandbox.create(**options).fork()\nsay('go')\nwhile True: copy.exec(['/bin/true'])",
    "paused": "sandbox = Sandbox.create(**options); sandbox.pause(); sandbox.fork(); say('go'); time.sleep(60)",
    "with a network": "sandbox = Sandbox.create(**options, network='outbound'); say('go'); time.sleep(60)",
    "with a forked child that lives on": (
        "sandbox = Sandbox.create(**options)\n"
        "if os.fork() == 0:\n    os.closerange(0, 3)\n    time.sleep(20)\n    os._exit(0)\n"
        "say('go'); time.sleep(60)"
    ),
}


@pytest.mark.parametrize("stage", STAGES)
def test_killed(own_store: Path, runsc: Runsc, stage: str) -> None:
    if stage == "with a network" and (os.geteuid() or not runsc.slirp4netns or not os.path.exists("/dev/net/tun")):
        pytest.skip("no outbound network here: `prized-gym doctor` says why")
    with start_python(PRELUDE + STAGES[stage]) as runtime:
        assert runtime.stdout is not None
        assert runtime.stdout.readline() == "go\n", runtime.stdout.read()
        if stage == "while it starts its supervisor":
            assert eventually(lambda: list(own_store.glob("m-*")))
        RUNTIMES.update(path.name for path in own_store.glob("m-*"))
        made = namespaces(tree(runtime.pid)) - namespaces([os.getpid()])
        runtime.kill()
        runtime.wait()
        if stage == "while it starts its supervisor":
            # Before that runs there is nobody but the next runtime to remove a directory.
            assert eventually(lambda: not remains(own_store) or (sweep() and not remains(own_store)), 10)
        assert eventually(lambda: not remains(own_store), 10), remains(own_store)
        assert eventually(lambda: not made & namespaces(everybody()), 10)


def test_supervisor_killed_with_its_runtime_leaves_files_to_a_sweep(own_store: Path) -> None:
    with start_python(
        PRELUDE + "sandbox = Sandbox.create(**options); say(runtime.Runtime.get(runsc).process.pid); time.sleep(60)"
    ) as runtime:
        assert runtime.stdout is not None
        supervisor = int(runtime.stdout.readline())
        victims = tree(supervisor)
        assert len(victims) > 5
        assert sweep() == []  # the living are not swept
        os.kill(victims[1], signal.SIGKILL)  # PID 1 of the namespace
        runtime.kill()
        runtime.wait()
    assert eventually(lambda: not processes_of(own_store), 10)
    assert not any(os.path.exists(f"/proc/{pid}") for pid in victims[2:])
    RUNTIMES.update(path.name for path in own_store.glob("m-*"))
    sweep()
    assert eventually(lambda: not remains(own_store) or not sweep()) and not remains(own_store)


def test_supervisor_killed_is_news(own_store: Path) -> None:
    program = PRELUDE + (
        "sandbox = Sandbox.create(**options)\n"
        "process = runtime.Runtime.get(runsc).process\n"
        "threading.Timer(0.3, process.kill).start()\n"
        "try: sandbox.exec('sleep 60')\nexcept SandboxDied as error: say(error)\n"
        "sandbox = Sandbox.create(**options); say(sandbox.exec('echo again').stdout)"
    )
    with start_python(program) as runtime:
        output = runtime.communicate(timeout=60)[0]
    assert "supervisor" in output and "b'again\\n'" in output
    assert not remains(own_store)


def test_run_time_ends_even_if_its_runtime_hangs(own_store: Path) -> None:
    program = (
        PRELUDE
        + "options['max_runtime_min'] = 0.12\nsandbox = Sandbox.create(**options); say('go')\n"
        + "os.kill(os.getpid(), signal.SIGSTOP)"
    )
    with start_python(program) as runtime:
        assert runtime.stdout is not None and runtime.stdout.readline() == "go\n"
        assert eventually(lambda: not [line for line in processes_of(own_store) if " boot " in line], 30)
        runtime.kill()
        runtime.wait()
    assert eventually(lambda: not remains(own_store))


@pytest.mark.parametrize("how", ["pass", "raise SystemExit(3)", "1 / 0", "os.kill(os.getpid(), signal.SIGINT)"])
def test_ordinary_ends(own_store: Path, how: str) -> None:
    program = PRELUDE + (
        "sandbox = Sandbox.create(**options); sandbox.exec('sleep 30', background=True); sandbox.fork()[0].close()\n"
        "say(runtime.Runtime.get(runsc).directory.name)\n"
    )
    with start_python(program + how) as runtime:
        RUNTIMES.add(runtime.communicate(timeout=60)[0].split()[0])
    assert not remains(own_store)


@pytest.mark.parametrize("delay", [0.05, 0.2, 0.4, 0.7])
def test_interrupt_during_a_fork(create: Callable[..., Sandbox], delay: float) -> None:
    sandbox = create()
    sandbox.exec("true")
    supervisor = sandbox._life.runtime.process.pid
    sandboxes_before = set(sandbox._life.runtime.sandboxes)
    timer = threading.Timer(delay, lambda: os.kill(os.getpid(), signal.SIGINT))
    timer.start()
    try:
        copies = sandbox.fork(4)
        for _ in range(200):
            time.sleep(0.01)  # the interrupt comes here when the fork was quick
    except KeyboardInterrupt:
        pass
    else:
        pytest.fail("no interrupt came")
    finally:
        timer.join()
    if "copies" in locals():
        for copy in copies:
            copy.close()
    assert set(sandbox._life.runtime.sandboxes) == sandboxes_before
    assert sandbox.exec("echo fine").stdout == b"fine\n"
    assert eventually(lambda: len([pid for pid in tree(supervisor) if _is(pid, "boot")]) == len(sandboxes_before))
    assert not list((sandbox._life.runtime.directory / "images").iterdir())


def _is(pid: int, part: str) -> bool:
    """Whether a process is this part of runsc."""
    try:
        return b"\0%s\0" % part.encode() in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def test_fifty_rounds_leave_nothing(create: Callable[..., Sandbox]) -> None:
    base = create(vcpu=4)
    base.pause()
    supervisor, name = base._life.runtime.process.pid, base._life.runtime.directory.name

    def counts() -> dict[str, int]:
        inner = tree(supervisor)[1]
        return {
            "descriptors": len(os.listdir("/proc/self/fd")),
            "threads": threading.active_count(),
            "supervisor's descriptors": len(os.listdir(f"/proc/{inner}/fd")),
            "processes": len([pid for pid in tree(supervisor) if _is(pid, "boot") or _is(pid, "gofer")]),
            "mounts": Path(f"/proc/{inner}/mounts").read_text().count("\n"),
            "files": sum(
                len(directories) + len(names) for _, directories, names in os.walk(base._life.runtime.directory)
            ),
            "groups": sum(len(list(parent.glob(f"prized-gym-{name}-*"))) for parent in set(cgroups.parents().values())),
            "ticks": len(base._life.runtime.hub.ticks),
            "sandboxes": len(base._life.runtime.sandboxes),
        }

    base.fork()[0].close()
    kinds = len(set(cgroups.parents().values()))
    assert eventually(
        lambda: (now := counts())["processes"] == 2 * now["sandboxes"] and now["groups"] == kinds * now["sandboxes"]
    )
    gc.collect()  # what earlier tests left is not to go away meanwhile
    before = counts()
    for _ in range(25):
        for copy in base.fork(2):
            copy.close()
    eventually(lambda: counts() == before, 10)
    assert counts() == before


def test_a_copy_dies_alone(create: Callable[..., Sandbox]) -> None:
    base = create()
    copies = base.fork(3)
    os.kill(sentry_of(copies[1].id), signal.SIGKILL)
    assert copies[1].wait_dead(5)
    assert [copy.state for copy in copies] == ["running", "dead", "running"]
    assert all(sandbox.exec("echo fine").stdout == b"fine\n" for sandbox in (base, copies[0], copies[2]))
    for copy in copies:
        copy.close()


def test_a_fork_that_fails_leaves_no_copies(create: Callable[..., Sandbox], monkeypatch: pytest.MonkeyPatch) -> None:
    base = create()
    real: Callable[..., None] = start.start
    calls: list[Life] = []

    def failing(life: Life, *arguments: Any) -> None:
        calls.append(life)
        if len(calls) == 3:
            raise OSError("made to fail")
        real(life, *arguments)

    monkeypatch.setattr(start, "start", failing)
    sandboxes = set(base._life.runtime.sandboxes)
    with pytest.raises(OSError, match="made to fail"):
        base.fork(6)
    assert set(base._life.runtime.sandboxes) == sandboxes and all(life.state == "closed" for life in calls)
    assert base.exec("echo fine").stdout == b"fine\n"


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become somebody else")
def test_as_an_ordinary_user(runsc: Runsc, tmp_path: Path) -> None:
    python = "/usr/bin/python3"
    if (
        not os.access(python, os.X_OK)
        or subprocess.run([python, "-c", "import sys; assert sys.version_info >= (3, 10)"]).returncode
    ):
        pytest.skip("no Python for everybody on this machine")
    import shutil
    import tempfile

    place = Path(tempfile.mkdtemp(prefix="pg-", dir="/var/tmp"))
    try:
        shutil.copytree(ROOT / "prized_gym" / "runsc", place / "code" / "prized_gym" / "runsc")
        shutil.copy2(ROOT / "prized_gym" / "errors.py", place / "code" / "prized_gym")
        shutil.copy2(runsc.path, place / "runsc")
        for path in [place, *place.rglob("*")]:
            os.chmod(path, 0o755)
        os.chown(place, 65534, 65534)
        program = (
            "from prized_gym.runsc import *\n"
            "sandbox = Sandbox.create(memory_gb=0.5, disk_gb=0.05)\nsandbox.files.write('a', 'carried')\n"
            "[copy] = sandbox.fork()\nprint(copy.exec('cat a; id -un').stdout)\n"
            "print(copy.usage().cpu_seconds > 0 and copy.usage().memory > 1e6)\n"
            "print([check.name for check in diagnose() if check.needed and not check.ok])\n"
            "try: Sandbox.create(network='outbound')\nexcept RunscError as error: print(error)\n"
        )
        environment = {
            "PATH": "/usr/bin:/bin",
            "HOME": "/nonexistent",
            "RUNSC": str(place / "runsc"),
            "PRIZED_GYM_STORE": str(place / "store"),
            "PYTHONPATH": str(place / "code"),
        }
        nobody = {"user": 65534, "group": 65534, "extra_groups": []}
        done = subprocess.run(
            [python, "-c", program], cwd="/", capture_output=True, text=True, timeout=90, env=environment, **nobody
        )
        if "namespaces for sandboxes cannot be made" in done.stderr:
            pytest.skip("no user namespaces for ordinary users on this machine")
        assert "b'carrieduser\\n'" in done.stdout, done.stderr
        assert done.stdout.splitlines()[1:3] == ["True", "[]"], done.stdout + done.stderr
        assert re.search("needs root", done.stdout)
        assert not processes_of(place)
    finally:
        shutil.rmtree(place)


def test_importing_needs_the_standard_library_only() -> None:
    program = (
        "import sys, types; sys.path.insert(0, '.')\n"
        "package = sys.modules['prized_gym'] = types.ModuleType('prized_gym'); package.__path__ = ['prized_gym']\n"
        "import prized_gym.runsc"
    )
    subprocess.run([sys.executable, "-I", "-S", "-c", program], cwd=ROOT, check=True, timeout=20)


def test_it_can_be_closed_from_several_threads_at_once(own_store: Path, runsc: Runsc) -> None:
    program = (
        PRELUDE
        + """
import threading
from prized_gym.runsc.runtime import Runtime
sandbox = Sandbox.create(**options)
errors = []
def close():
    try:
        sandbox._life.runtime.close()
    except BaseException as error:
        errors.append(error)
threads = [threading.Thread(target=close) for _ in range(3)]
[thread.start() for thread in threads]
[thread.join(30) for thread in threads]
say((errors, sandbox.death is not None))
"""
    )
    with start_python(program) as runtime:
        output = runtime.communicate(timeout=60)[0]
    assert output == "([], True)\n"
    assert not remains(own_store)

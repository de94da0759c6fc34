"""From create to close, and every other end."""

import dataclasses
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from prized_gym.runsc import (
    Runsc,
    RunscError,
    RunscUnavailable,
    Sandbox,
    SandboxDied,
    SandboxStateError,
    bundle,
    delete_kept,
    diagnose,
    list_kept,
    python_paths,
    start,
    sweep,
)
from prized_gym.runsc.connection import Link
from prized_gym.runsc.life import Life
from prized_gym.runsc.processes import tree
from prized_gym.runsc.store import KEPT_SECONDS, new_id, write_kept
from tools.processes import cpu_seconds, eventually, sentry_of
from tools.sandboxes import COUNTER, get, http, start_python


def test_create_and_close(create: Callable[..., Sandbox], store: Path) -> None:
    sandbox = create(labels={"a": "b"})
    assert re.fullmatch("sbx_[0-9a-f]{12}", sandbox.id) and sandbox.labels == {"a": "b"} and sandbox.state == "running"
    assert abs(sandbox.created_at - time.time()) < 60
    sentry = sentry_of(sandbox.id)
    sandbox.close()
    sandbox.close()
    assert sandbox.state == "closed" and not os.path.exists(f"/proc/{sentry}")
    assert not list(store.rglob(f"*{sandbox.id}*"))
    for use in (
        lambda: sandbox.exec("true"),
        sandbox.fork,
        sandbox.pause,
        lambda: sandbox.connect_port(1),
        lambda: sandbox.files.read("x"),
    ):
        with pytest.raises(SandboxStateError, match=r"closed|ended"):
            use()


@pytest.mark.parametrize(
    "options", [{"network": "maybe"}, {"vcpu": 0}, {"memory_gb": -1}, {"max_runtime_min": 0}, {"mounts": {"/ctl": "/"}}]
)
def test_bad_arguments(create: Callable[..., Sandbox], options: dict[str, object]) -> None:
    with pytest.raises(ValueError):
        create(**options)


def test_a_killed_sandbox_is_news_at_once(create: Callable[..., Sandbox]) -> None:
    sandbox, other = create(), create()
    reasons: list[str] = []
    sandbox.on_death(reasons.append)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(sandbox.exec, "sleep 60")
        assert eventually(lambda: b"sleep" in sandbox.exec("ps ax").stdout)
        os.kill(sentry_of(sandbox.id), signal.SIGKILL)
        with pytest.raises(SandboxDied, match="sentry ended with -9"):
            running.result(30)  # the command takes 60
    assert sandbox.wait_dead(30) and eventually(lambda: reasons == [sandbox.death]) and sandbox.state == "dead"
    with pytest.raises(SandboxDied):
        sandbox.exec("true")
    with pytest.raises(SandboxDied):
        sandbox.fork()
    late: list[str] = []
    sandbox.on_death(late.append)
    assert late == [sandbox.death]
    assert other.exec("echo fine").stdout == b"fine\n"


def test_an_agent_that_is_gone_ends_its_sandbox(create: Callable[..., Sandbox]) -> None:
    sandbox = create()
    assert sandbox.exec("kill -9 1; kill -9 -1; echo alive").stdout == b"alive\n"  # the user cannot
    with pytest.raises(SandboxDied):
        sandbox.exec("kill -9 1", user="root", timeout=30)
    assert sandbox.wait_dead(30)


def test_run_time_is_bounded(create: Callable[..., Sandbox]) -> None:
    sandbox = create(max_runtime_min=0.12)
    assert "max_runtime_min" in (sandbox.wait_dead(60) or "")


def test_kept_and_forked_by_another_process(create: Callable[..., Sandbox]) -> None:
    sandbox = create(labels={"keep": "me"}, env_vars={"MINE": "1"})
    sandbox.files.write("server.py", COUNTER)
    sandbox.exec("python3 server.py > server.log 2>&1", background=True)
    get(http(sandbox))
    assert sandbox.keep() == sandbox.id and sandbox.state == "kept"
    [kept] = list_kept({"keep": "me"})
    assert kept.id == sandbox.id and kept.size > 1_000_000 and not list_kept({"keep": "other"})
    with pytest.raises(SandboxStateError, match="kept"):
        sandbox.exec("true")
    program = (
        "import sys; sys.path.insert(0, 'tests'); import tools.sandboxes as t; from prized_gym.runsc import Sandbox\n"
        "base = Sandbox.connect(sys.argv[1])\n"
        "a, b = base.fork(2)\n"
        "print(base.state, a.labels, t.get(t.http(a)), t.get(t.http(b)), b.exec('echo $MINE').stdout)"
    )
    with start_python(program, sandbox.id) as process:
        assert process.communicate(timeout=60)[0] == "kept {'keep': 'me'} 2 2 b'1\\n'\n"
    [copy] = sandbox.fork()  # and by the one that kept it
    with copy:
        assert get(http(copy)) == "2"
        assert delete_kept(sandbox.id) and not delete_kept(sandbox.id)
        assert copy.exec("cat server.py | wc -l").stdout != b"0\n"
    with pytest.raises(SandboxStateError, match="no sandbox"):
        Sandbox.connect(sandbox.id)
    with pytest.raises(ValueError):
        Sandbox.connect("../../etc")


def test_a_kept_sandbox_that_has_expired_is_refused_and_swept(create: Callable[..., Sandbox], store: Path) -> None:
    sandbox, other = create(), create()
    other.keep()
    sandbox.keep(seconds=0.5)
    try:
        kept = {each.id: each for each in list_kept()}
        assert kept.keys() == {sandbox.id, other.id}
        assert kept[sandbox.id].expires_at == pytest.approx(kept[sandbox.id].kept_at + 0.5)
        assert kept[other.id].expires_at == pytest.approx(kept[other.id].kept_at + KEPT_SECONDS)
        image = sum(file.stat().st_blocks * 512 for file in (store / "kept" / other.id / "image").iterdir())
        root = sum(file.lstat().st_blocks * 512 for file in (store / "kept" / other.id / "root").rglob("*"))
        assert kept[other.id].size >= image + root > root > 0
        assert eventually(lambda: time.time() > (kept[sandbox.id].expires_at or 0))
        with pytest.raises(SandboxStateError, match="has expired: keep one again"):
            Sandbox.connect(sandbox.id)
        with pytest.raises(SandboxStateError, match="has expired"):
            sandbox.fork()
        assert sweep() == [sandbox.id] and not (store / "kept" / sandbox.id).exists()
        with pytest.raises(SandboxStateError, match="no sandbox"):
            sandbox.fork()
        with Sandbox.connect(other.id) as again, again.fork()[0] as copy:
            assert copy.exec("echo fine").stdout == b"fine\n"
    finally:
        delete_kept(other.id)
        delete_kept(sandbox.id)


@pytest.mark.parametrize("seconds", [0, -1, float("nan")])
def test_a_lifetime_that_is_none(create: Callable[..., Sandbox], seconds: float) -> None:
    with create() as sandbox:
        with pytest.raises(ValueError, match="more than 0 seconds"):
            sandbox.keep(seconds)
        assert sandbox.state == "running"


def test_kept_for_good_and_damaged_ones(store: Path, tmp_path: Path) -> None:
    for name in ("image", "root"):
        (tmp_path / name).mkdir()
    (tmp_path / "image" / "pages").write_bytes(b"1" * 100_000)
    id = new_id()
    write_kept(id, tmp_path / "image", tmp_path / "root", {"labels": {}, "created_at": 1.0, "kept_at": 2.0}, None)
    assert sweep() == []
    [kept] = list_kept()
    assert (kept.id, kept.created_at, kept.kept_at, kept.expires_at) == (id, 1.0, 2.0, None) and kept.size >= 100_000
    (store / "kept" / id / "description.json").write_text("{")
    [kept] = list_kept()  # so that it can be removed
    assert kept.id == id and kept.labels == {} and kept.expires_at is None and sweep() == []
    with pytest.raises(SandboxStateError, match=f"damaged; `prized-gym rm {id}`"):
        Sandbox.connect(id)
    assert delete_kept(id) and not list_kept()


@pytest.mark.parametrize(
    "step", [(bundle, "configuration"), (bundle, "write_bundle"), (Link, "listen")], ids=lambda step: step[1]
)
def test_nothing_is_left_of_one_that_is_closed_while_it_starts(
    create: Callable[..., Sandbox], runsc: Runsc, monkeypatch: pytest.MonkeyPatch, step: tuple[Any, str]
) -> None:
    """As the rest of a fork that is interrupted: another thread closes it before it is known to the runtime."""
    runtime = create()._life.runtime
    known, files = set(runtime.sandboxes), set((runtime.directory / "sandboxes").iterdir())
    starting: list[Life] = []
    real_start, real = start.start, getattr(*step)

    def watched(life: Life, *arguments: Any) -> None:
        starting.append(life)
        real_start(life, *arguments)

    def close_meanwhile(*arguments: Any, **options: Any) -> Any:
        starting[-1].close()
        starting[-1].directory.mkdir(exist_ok=True)  # as if it had been made a moment later
        return real(*arguments, **options)

    monkeypatch.setattr(start, "start", watched)
    monkeypatch.setattr(*step, close_meanwhile)
    with pytest.raises((SandboxStateError, OSError)):
        Sandbox.create(runsc=runsc, memory_gb=0.5, disk_gb=0.05)
    assert len(starting) == 1
    assert set(runtime.sandboxes) == known
    assert set((runtime.directory / "sandboxes").iterdir()) == files


def test_fork_of_a_paused_one_can_be_kept(create: Callable[..., Sandbox]) -> None:
    sandbox = create()
    sandbox.pause()
    [copy] = sandbox.fork()
    copy.close()
    with ThreadPoolExecutor(2) as pool:
        assert set(pool.map(lambda _: sandbox.keep(), range(2))) == {sandbox.id}
    with Sandbox.connect(sandbox.id) as kept:
        [copy] = kept.fork()
        with copy:
            assert copy.exec("echo fine").stdout == b"fine\n"
    delete_kept(sandbox.id)


@pytest.mark.timeout(240)  # sixty-four restores on a machine that may do other things
def test_idle_copies_use_no_cpu(create: Callable[..., Sandbox]) -> None:
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") >> 30
    count = 64 if available >= 6 else 16
    sandbox = create(idle_after=0.2)
    sandbox.files.write("server.py", COUNTER)
    sandbox.exec("python3 server.py > server.log 2>&1", background=True)
    get(http(sandbox))
    copies = sandbox.fork(count)
    connections = [http(copy) for copy in copies]
    assert [get(connection) for connection in connections] == ["2"] * count
    assert eventually(lambda: all(copy.stopped for copy in [sandbox, *copies]))
    supervisor = tree(sandbox._life.runtime.process.pid)
    assert len(supervisor) > 2 * count

    def rest() -> bool:
        before = cpu_seconds(supervisor)
        time.sleep(1.5)
        return cpu_seconds(supervisor) - before <= 0.03  # of a core, all and their supervisor together: two clock ticks

    assert eventually(rest, 30)  # on a busy machine they take a while to come to rest
    assert all(copy.stopped for copy in copies)
    assert {get(connection) for connection in connections} == {"3"}  # over the streams that were open
    copies[0].touch()
    assert copies[0].exec("echo awake").stdout == b"awake\n"
    with copies[1].hold():
        assert not copies[1].idle() and not copies[1].stopped
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(Sandbox.close, copies))


def test_what_was_used(create: Callable[..., Sandbox]) -> None:
    [sandbox] = create().fork()
    with sandbox:
        first = sandbox.usage()
        assert 0 < first.cpu_seconds < 20 and 1e6 < first.memory < 0.3e9
        sandbox.exec(
            'python3 -c \'import time; held = b"1" * 150_000_000; open("held", "w"); time.sleep(60)\'', background=True
        )
        assert eventually(lambda: any(info.name == "held" for info in sandbox.files.list()))
        sandbox.exec("python3 -c 'import time\nwhile time.process_time() < 1: pass'")
        second = sandbox.usage()
        assert second.cpu_seconds > first.cpu_seconds + 0.3 and second.memory > first.memory + 140e6
        sandbox._life.groups = {}  # as where there are no cgroups
        third = sandbox.usage()
        assert abs(third.cpu_seconds - second.cpu_seconds) < 1 and third.memory > 140e6
        assert eventually(lambda: sandbox.idle()) and sandbox.usage().memory > 140e6 and sandbox.stopped
    assert sandbox.usage().cpu_seconds >= third.cpu_seconds


def test_pause_keeps_commands_waiting(create: Callable[..., Sandbox]) -> None:
    sandbox = create()
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(sandbox.exec, "sleep 0.3; echo done")
        assert eventually(lambda: b"sleep" in sandbox.exec("ps ax").stdout)
        sandbox.pause()
        assert running.result(10).stdout == b"done\n"  # held by the command, it stops at its end
    assert eventually(lambda: sandbox.stopped) and sandbox.state == "paused"
    sandbox.resume()
    assert sandbox.exec("echo up").stdout == b"up\n"


def test_without_runsc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RunscUnavailable, match=r"no executable runsc at .*argument") as caught:
        Runsc.find(tmp_path / "runsc")
    assert "get_runsc.py" in caught.value.remedy
    fake = tmp_path / "runsc"
    fake.write_text("#!/bin/sh\necho hello\n")
    fake.chmod(0o755)
    monkeypatch.setenv("RUNSC", str(fake))
    with pytest.raises(RunscUnavailable, match="does not run as runsc"):
        Runsc.find()
    fake.write_text('#!/bin/sh\necho runsc version 1\n[ "$1" = --version ]\n')
    with pytest.raises(RunscUnavailable, match="cannot run a sandbox"):
        Runsc.find(fake.rename(tmp_path / "other"))
    monkeypatch.delenv("RUNSC")
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    with pytest.raises(RunscUnavailable, match="PATH"):
        Runsc.find()


def test_doctor(runsc: Runsc) -> None:
    checks = {check.name: check for check in diagnose(runsc.path)}
    assert checks["runsc"].ok and runsc.version in checks["runsc"].detail
    assert all(check.ok or check.remedy for check in checks.values())
    missing = {check.name: check for check in diagnose("/no/runsc")}
    assert not missing["runsc"].ok and missing["runsc"].needed and "get_runsc.py" in missing["runsc"].remedy


def test_failed_start_says_why_and_leaves_nothing(create: Callable[..., Sandbox], store: Path) -> None:
    before = sorted(store.rglob("sbx_*"))
    python = dataclasses.replace(python_paths(), base="/no/such/python")
    with pytest.raises(RunscError, match=r"could not be started: runsc ended with"):
        create(python=python)
    assert sorted(store.rglob("sbx_*")) == before


def test_python_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "project"
    package.mkdir()
    monkeypatch.setenv("PYTHONPATH", f"{package}:/:/home:{Path.home()}:{Path.home().parent}:{tmp_path}/missing")
    paths = python_paths(extra=[tmp_path])
    assert str(tmp_path) in paths.binds and str(package) in paths.search
    assert not {"/", "/home", "/root", "/tmp", str(Path.home())} & set(paths.binds)
    assert any(sys.prefix == bind or sys.prefix.startswith(bind + "/") for bind in (*paths.binds, "/usr"))


def test_editable_installs_are_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import types

    for name in ("by_finder", "by_path"):
        (tmp_path / name).mkdir()
    finder = types.ModuleType("__editable___thing_finder")
    finder.MAPPING = {"thing": str(tmp_path / "by_finder"), "gone": "/no/such"}  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, finder.__name__, finder)
    site = tmp_path / "site"
    site.mkdir()
    (site / "thing.pth").write_text(f"# comment\nimport sys\n{tmp_path / 'by_path'}\n")
    monkeypatch.setattr("site.getsitepackages", lambda: [str(site)])
    paths = python_paths()
    assert {str(tmp_path / "by_finder"), str(tmp_path / "by_path"), str(site)} <= set(paths.binds)
    assert str(tmp_path / "by_path") in paths.search

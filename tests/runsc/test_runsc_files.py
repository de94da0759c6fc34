"""Files in and out."""

import contextlib
import errno
import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from prized_gym.runsc import RunscError, Sandbox, agent, files


def test_tree_there_and_back(shared: Sandbox, tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "deep" / "deeper").mkdir(parents=True)
    (source / "empty").mkdir()
    (source / "deep" / "data").write_bytes(os.urandom(700_000))
    (source / "run.sh").write_text("#!/bin/sh\necho ran\n")
    (source / "run.sh").chmod(0o755)
    (source / "näme\udcff").write_text("odd")
    (source / "link").symlink_to("deep/data")
    (source / "away").symlink_to("/etc/passwd")
    shared.files.upload(source, "tree")
    assert shared.exec("tree/run.sh").stdout == b"ran\n"
    shared.files.download("tree", tmp_path / "back")
    back = tmp_path / "back"
    assert (back / "deep" / "data").read_bytes() == (source / "deep" / "data").read_bytes()
    assert (
        os.access(back / "run.sh", os.X_OK) and (back / "empty").is_dir() and (back / "näme\udcff").read_text() == "odd"
    )
    assert os.readlink(back / "link") == "deep/data"
    assert not (back / "away").is_symlink()  # it led out of the tree
    shared.files.remove("tree")
    assert "tree" not in [info.name for info in shared.files.list()]


def test_single_files(shared: Sandbox, tmp_path: Path) -> None:
    shared.files.write("a/b.txt", "text")
    assert shared.files.read("a/b.txt") == b"text" and shared.files.read("/home/user/a/b.txt") == b"text"
    shared.files.download("a/b.txt", tmp_path / "c.txt")
    assert (tmp_path / "c.txt").read_text() == "text"
    [info] = shared.files.list("a")
    assert (info.name, info.kind, info.size) == ("b.txt", "file", 4)
    assert shared.exec("stat -c %U a/b.txt").stdout == b"user\n"
    shared.files.upload(tmp_path / "c.txt")
    assert shared.files.read("c.txt") == b"text"


def test_errors_are_the_sandboxs(shared: Sandbox, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nope"):
        shared.files.read("nope")
    with pytest.raises(FileNotFoundError):
        shared.files.download("nope", tmp_path / "x")
    with pytest.raises(FileNotFoundError):
        shared.files.upload(tmp_path / "missing", "x")
    with pytest.raises(IsADirectoryError):
        shared.files.read("/usr")
    with pytest.raises(OSError) as caught:
        shared.files.write("/usr/x", "x")
    assert caught.value.errno in (errno.EROFS, errno.EACCES)
    with pytest.raises(PermissionError):
        shared.files.list("/ctl")
    with pytest.raises(RunscError, match="max_bytes"):
        shared.files.write("big", b"x" * 3_000_000)
        shared.files.read("big", max_bytes=1_000_000)
    assert shared.exec("echo fine").stdout == b"fine\n"
    shared.files.remove("big")


def test_disk_is_limited_and_stays_so_in_copies(create: Callable[..., Sandbox]) -> None:
    sandbox = create(disk_gb=0.02)
    [copy] = sandbox.fork()
    with copy:
        for one in (sandbox, copy):
            with pytest.raises(OSError) as caught:
                one.files.write("big", b"x" * (40 << 20))
            assert caught.value.errno == errno.ENOSPC
            assert one.exec("head -c 60000000 /dev/zero > more; echo $?").stdout != b"0\n"
            assert one.exec("rm -f big more; echo fine").stdout == b"fine\n"


class Evil:
    """A connection whose far end sends whatever the test says."""

    def __init__(self, *messages: dict[str, object] | bytes) -> None:
        self.here, there = socket.socketpair()
        self.here.settimeout(5)

        def send() -> None:
            with contextlib.suppress(OSError), there:
                for message in messages:
                    if isinstance(message, bytes):
                        there.sendall(message)
                    else:
                        agent.send_json(there, message)

        threading.Thread(target=send, daemon=True).start()


@pytest.mark.parametrize("name", ["../evil", "/etc/evil", "a/../../evil", "a//b", "./a", "a/.", "nul\0"])
def test_names_that_leave_the_target_are_refused(tmp_path: Path, name: str) -> None:
    evil = Evil({"path": name, "type": "file", "mode": 0o644}, b"B\0\0\0\1x", b"Z\0\0\0\0", {})
    with evil.here, pytest.raises(agent.BadFrame):
        files._receive_tree(evil.here, tmp_path / "target", 1000, "remote")
    assert not list(tmp_path.rglob("*evil*"))


def test_nothing_is_written_through_a_link(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    target = tmp_path / "target"
    evil = Evil(
        {"path": "", "type": "dir"},
        {"path": "a", "type": "link", "target": str(outside)},
        {"path": "b", "type": "link", "target": "../outside"},
        {"path": "a", "type": "dir"},
        {"path": "a/evil", "type": "file"},
        b"Z\0\0\0\0",
        {},
    )
    with evil.here:
        files._receive_tree(evil.here, target, 1000, "remote")
    assert not list(outside.iterdir()) and (target / "a" / "evil").is_file()
    (target / "old").symlink_to(outside)
    evil = Evil({"path": "old/evil", "type": "file"}, b"Z\0\0\0\0", {})
    with evil.here, pytest.raises(RunscError, match="link"):
        files._receive_tree(evil.here, target, 1000, "remote")
    evil = Evil({"path": "old", "type": "file"}, b"Z\0\0\0\0", {})
    with evil.here, pytest.raises(OSError):
        files._receive_tree(evil.here, target, 1000, "remote")
    assert not list(outside.iterdir())


def test_more_than_asked_for_is_refused(tmp_path: Path) -> None:
    evil = Evil({"path": "", "type": "file"}, *[b"B\0\0\1\0" + b"x" * 256] * 10, b"Z\0\0\0\0", {})
    with evil.here, pytest.raises(RunscError, match="max_bytes"):
        files._receive_tree(evil.here, tmp_path / "f", 1000, "remote")

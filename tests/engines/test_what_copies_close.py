"""What ``env.close()`` of a copy closes: what the copy made, and never what was there before it."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing import shared_memory
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

from prized_gym import CopyTimeoutError, ForkedVectorEnv, ForkUnsafeError

pytestmark = pytest.mark.timeout(180)

SERVER = (
    "import sys\nfor line in sys.stdin:\n    print(line.strip()[::-1], flush=True)\n    if line == 'quit\\n': break"
)


class Plain(gym.Env[Any, Any]):
    """Episodes of one step, which ask :meth:`check` whether all is well."""

    observation_space = spaces.Box(-1, 1, (1,))
    action_space = spaces.Discrete(2)

    def check(self) -> None:
        """Raise if something that the environment needs is gone."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.check()
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.check()
        return np.zeros(1, np.float32), 0.0, True, False, {}


class Folder(Plain):
    """Removes its directory, in the way that is named."""

    def __init__(self, how: str, notes: str) -> None:
        self.how, self.notes = how, notes
        if how == "object":
            self.holder = tempfile.TemporaryDirectory(prefix="prized-test-")
            self.path = self.holder.name
        else:
            self.path = tempfile.mkdtemp(prefix="prized-test-")
        Path(self.path, "weights").write_text("w")
        Path(notes).write_text(self.path)

    def check(self) -> None:
        assert Path(self.path, "weights").read_text() == "w"

    def close(self) -> None:
        if self.how == "rmtree":
            shutil.rmtree(self.path)
        elif self.how == "object":
            self.holder.cleanup()
        elif self.how == "one by one":
            for name in os.listdir(self.path):
                os.unlink(os.path.join(self.path, name))
            os.rmdir(self.path)
        elif self.how == "pathlib":
            for path in Path(self.path).iterdir():
                path.unlink()
            Path(self.path).rmdir()
        else:
            os.rename(self.path, self.path + "-old")
            shutil.rmtree(self.path + "-old", ignore_errors=True)
        with open(self.notes + ".closed", "a") as file:
            file.write("closed\n")


class Server(Plain):
    """Ends a process in the way that is named, which answers a line with a line."""

    def __init__(self, how: str, notes: str) -> None:
        self.how, self.notes = how, notes
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            [sys.executable, "-u", "-c", SERVER], stdin=pipe, stdout=pipe, text=True, start_new_session=True
        )
        Path(notes).write_text(str(self.process.pid))

    def check(self) -> None:
        assert not Path(f"/proc/{self.process.pid}/status").read_text().count("State:\tZ")

    def close(self) -> None:
        if self.how == "quit":
            assert self.process.stdin is not None
            self.process.stdin.write("quit\n")
            self.process.stdin.flush()
        elif self.how == "terminate":
            self.process.terminate()
        elif self.how == "kill":
            os.kill(self.process.pid, signal.SIGKILL)
        else:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        with open(self.notes + ".closed", "a") as file:
            file.write("closed\n")


def _serve(connection: Any) -> None:
    while (asked := connection.recv()) != "quit":
        connection.send(asked + 1)


class Worker(Plain):
    """Holds a process of multiprocessing, a connection to it, and a segment of shared memory."""

    def __init__(self, how: str, notes: str) -> None:
        self.how, self.notes = how, notes
        self.connection, theirs = multiprocessing.Pipe()
        self.worker = multiprocessing.get_context("fork").Process(target=_serve, args=(theirs,), daemon=True)
        self.worker.start()
        theirs.close()
        self.segment = shared_memory.SharedMemory(create=True, size=16)
        self.segment.buf[0] = 7
        Path(notes).write_text(f"{self.worker.pid} {self.segment.name}")

    def check(self) -> None:
        again = shared_memory.SharedMemory(self.segment.name)
        assert again.buf[0] == 7
        again.close()
        os.kill(self.worker.pid or 0, 0)

    def close(self) -> None:
        if self.worker.is_alive() or self.how == "unasked":
            self.connection.send("quit")
            self.worker.terminate()
        self.worker.join()
        self.segment.close()
        self.segment.unlink()
        with open(self.notes + ".closed", "a") as file:
            file.write("closed\n")


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def closings(notes: Path) -> int:
    path = Path(f"{notes}.closed")
    return len(path.read_text().splitlines()) if path.exists() else 0


WAYS = [
    *((Folder, how) for how in ("rmtree", "object", "one by one", "pathlib", "rename")),
    *((Server, how) for how in ("quit", "terminate", "kill", "killpg")),
    *((Worker, how) for how in ("asked", "unasked")),
]


@pytest.mark.parametrize(("kind", "how"), WAYS)
def test_what_the_base_made_outlives_the_copies_and_ends_with_the_base(kind: Any, how: str, tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    envs = ForkedVectorEnv(lambda: kind(how, str(notes)), num_envs=2, fork_on="episode")
    for _ in range(3):
        envs.reset(seed=0)
        envs.step([0, 0])
        envs.step([0, 0])
    made = notes.read_text().split()
    before = closings(notes)
    assert before >= 6  # each copy that was replaced has closed its environment
    envs.close()
    assert closings(notes) == before + 3  # the last two copies, and the base
    for name in made:
        assert not Path("/dev/shm", name).exists()
        assert not Path(name).exists() or not name.startswith("/")
        if name.isdigit():
            until(lambda name=name: not Path("/proc", name).exists())  # type: ignore[misc]


class Own(Plain):
    """Makes all of that in the copy."""

    path = ""

    def start(self) -> None:
        self.path = tempfile.mkdtemp(prefix="prized-test-")
        Path(self.path, "log").write_text("")
        self.segment = shared_memory.SharedMemory(create=True, size=16)
        self.process = subprocess.Popen(["sleep", "100"], start_new_session=True)
        self.ours, theirs = socket.socketpair()
        self.theirs = theirs

    def made(self) -> tuple[str, str, int]:
        return self.path, self.segment.name, self.process.pid

    def close(self) -> None:
        if self.path:
            self.ours.sendall(b"bye")
            assert self.theirs.recv(3) == b"bye"
            shutil.rmtree(self.path)
            self.segment.close()
            self.segment.unlink()
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


@pytest.mark.parametrize("close_copies", ["own", True])
def test_what_a_copy_made_it_closes(close_copies: Any, capfd: pytest.CaptureFixture[str]) -> None:
    envs = ForkedVectorEnv(
        Own, num_envs=2, on_fork=lambda env, index, seed: env.unwrapped.start(), close_copies=close_copies
    )
    envs.reset(seed=0)
    made = envs.call("made")
    envs.reset(seed=0)
    for path, segment, pid in made:
        assert not Path(path).exists() and not Path("/dev/shm", segment).exists() and not Path(f"/proc/{pid}").exists()
    envs.close()
    assert "Traceback" not in capfd.readouterr().err


def test_copies_close_nothing_if_they_are_not_to(tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    envs = ForkedVectorEnv(lambda: Folder("rmtree", str(notes)), num_envs=2, close_copies=False)
    for _ in range(3):
        envs.reset(seed=0)
    assert closings(notes) == 0
    envs.close()
    assert closings(notes) == 1 and not Path(notes.read_text()).exists()


def test_copies_close_everything_if_they_are_to(tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    envs = ForkedVectorEnv(lambda: Folder("rmtree", str(notes)), num_envs=1, close_copies=True)
    envs.reset(seed=0)
    with pytest.raises(Exception, match="weights"):
        envs.reset(seed=0)
    assert closings(notes) >= 1 and not Path(notes.read_text()).exists()
    envs.close()


def test_an_object_of_the_base_that_a_copy_lets_go_leaves_its_directory() -> None:
    class Renews(Plain):
        def __init__(self) -> None:
            self.folder = tempfile.TemporaryDirectory(prefix="prized-test-")
            self.first = self.folder.name

        def check(self) -> None:
            assert os.path.isdir(self.first)
            self.folder = tempfile.TemporaryDirectory(prefix="prized-test-")

        def close(self) -> None:
            self.folder.cleanup()

    envs = ForkedVectorEnv(Renews, num_envs=2)
    for _ in range(3):
        envs.reset(seed=0)
    envs.close()


def test_a_branch_leaves_what_its_source_made() -> None:
    envs = ForkedVectorEnv(Own, num_envs=2, on_fork=lambda env, index, seed: env.unwrapped.start())
    envs.reset(seed=0)
    path, segment, pid = envs.call("made")[0]
    envs.branch(0, [1])
    # The branch is replaced, and closes.
    envs.reset(seed=0, options={"reset_mask": np.array([False, True])})
    assert Path(path).exists() and Path("/dev/shm", segment).exists() and Path(f"/proc/{pid}").exists()
    envs.reset(seed=0)
    assert not Path(path).exists() and not Path("/dev/shm", segment).exists()
    envs.close()


@pytest.mark.parametrize("close_copies", ["all", 2, None])
def test_a_wrong_switch_is_refused(close_copies: Any) -> None:
    with pytest.raises(ValueError, match="close_copies"):
        ForkedVectorEnv(Plain, num_envs=1, close_copies=close_copies)


# Which comes first


class Exclusive(Plain):
    """Takes a port in ``on_fork``."""

    def take(self, port: int) -> None:
        self.socket = socket.socket()
        self.socket.bind(("127.0.0.1", port))
        self.socket.listen()


@pytest.fixture
def ports() -> Iterator[list[int]]:
    sockets = [socket.socket() for _ in range(3)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    found = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    yield found


@pytest.mark.parametrize("fork_on", ["reset", "episode"])
def test_a_copy_finds_free_what_the_one_before_it_had_taken(fork_on: Any, ports: list[int]) -> None:
    envs = ForkedVectorEnv(
        Exclusive, num_envs=3, fork_on=fork_on, on_fork=lambda env, index, seed: env.unwrapped.take(ports[index])
    )
    for _ in range(3):
        envs.reset(seed=0)
        envs.step([0, 0, 0])
        envs.step([0, 0, 0])
    envs.reset(options={"reset_mask": np.array([True, False, True])})
    envs.close()


class Slow(Plain):
    """Takes its time to close."""

    def __init__(self, seconds: float, notes: str) -> None:
        self.seconds, self.notes = seconds, notes
        self.maker = os.getpid()

    def close(self) -> None:
        time.sleep(self.seconds)
        Path(self.notes, f"{'base' if os.getpid() == self.maker else 'copy'}-{os.getpid()}").touch()


def test_those_that_close_slowly_do_not_pile_up(tmp_path: Path) -> None:
    envs = ForkedVectorEnv(lambda: Slow(0.3, str(tmp_path)), num_envs=3, fork_on="episode", autoreset_mode="SameStep")
    envs.reset(seed=0)
    base = envs.base._handle.where.split()[1]
    for _ in range(3):
        envs.step([0, 0, 0])
        assert len(Path(f"/proc/{base}/task/{base}/children").read_text().split()) <= 6
    envs.close()
    assert len(list(tmp_path.glob("copy-*"))) == 12 and len(list(tmp_path.glob("base-*"))) == 1


# How long it may take


def test_what_closes_within_its_time_is_not_cut(tmp_path: Path) -> None:
    # Longer than anything else is waited for.
    envs = ForkedVectorEnv(lambda: Slow(6.0, str(tmp_path)), num_envs=2, close_timeout=60)
    envs.reset(seed=0)
    envs.close()
    assert len(list(tmp_path.iterdir())) == 3


def test_what_is_cut_is_said() -> None:
    envs = ForkedVectorEnv(lambda: Slow(100.0, "/"), num_envs=2, close_timeout=1)
    envs.reset(seed=0)
    with pytest.warns(UserWarning) as said:
        envs.close()
    texts = [str(each.message) for each in said]
    assert len(texts) == 2 and all("close_timeout=1 s" in text for text in texts)
    assert (
        texts[0].startswith("copies [0, 1] (pid ")
        and "time.sleep" not in texts[1]
        and texts[1].startswith("the base (pid ")
    )
    assert "in close" in texts[0]  # where it was


def test_a_replaced_copy_that_does_not_close_is_cut_and_that_is_said() -> None:
    envs = ForkedVectorEnv(lambda: Slow(100.0, "/"), num_envs=2, close_timeout=1)
    envs.reset(seed=0)
    with pytest.warns(UserWarning, match=r"copies \[1\]"):
        envs.reset(options={"reset_mask": np.array([False, True])})
    envs.step([0, 0])
    with pytest.warns(UserWarning):
        envs.close()


def test_nothing_is_waited_for_or_said_if_copies_are_to_end_at_once() -> None:
    envs = ForkedVectorEnv(lambda: Slow(100.0, "/"), num_envs=2, close_timeout=1)
    envs.reset(seed=0)
    with pytest.warns(UserWarning, match="the base") as said:
        envs.close(terminate=True)
    assert len(said) == 1


# Whose server it is

LAUNCHER = "sleep 0.5; setsid sh -c 'echo $$ > {pid}.part; mv {pid}.part {pid}; exec sleep 100' & sleep 0.1"


def test_a_server_that_a_launcher_detaches_after_the_set_up_is_the_bases(tmp_path: Path) -> None:
    class Launches(Plain):
        def __init__(self) -> None:
            self.launcher = subprocess.Popen(["sh", "-c", LAUNCHER.format(pid=tmp_path / "pid")])

        def end(self) -> None:
            os._exit(1)

    envs = ForkedVectorEnv(Launches, num_envs=2, on_failure="truncate")
    envs.reset(seed=0)
    until((tmp_path / "pid").exists)
    server = Path("/proc", (tmp_path / "pid").read_text().strip())
    base = envs.base._handle.where.split()[1]
    until(lambda: f"\nPPid:\t{base}\n" in (server / "status").read_text())
    for _ in range(3):
        envs.reset(seed=0)
        envs.step([0, 0])
    assert server.exists()
    envs.close()
    until(lambda: not server.exists())


@pytest.mark.parametrize("how", ["program", "cleared", "fork"])
def test_what_a_dead_copy_detached_goes_with_it(how: str, tmp_path: Path) -> None:
    class Detaches(Plain):
        def detach(self) -> None:
            if how == "fork":
                if os.fork() == 0:
                    os.setsid()
                    os.closerange(0, 1000)
                    time.sleep(100)
                    os._exit(0)
                return
            environment = {} if how == "cleared" else None
            subprocess.Popen(["/bin/sleep", "98.7"], start_new_session=True, env=environment)

        def step(self, action: Any) -> Any:
            os.kill(os.getpid(), signal.SIGKILL)

    envs = ForkedVectorEnv(Detaches, num_envs=1, on_failure="truncate")
    envs.reset(seed=0)
    envs.call("detach")
    base = int(envs.base._handle.where.split()[1])
    envs.step([0])
    until(lambda: len(Path(f"/proc/{base}/task/{base}/children").read_text().split()) <= 1)
    envs.close()


# Copies that cannot be branched


class Threaded(Plain):
    """Starts a thread in the copy."""

    def start(self) -> None:
        import threading

        self.over = threading.Event()
        self.thread = threading.Thread(target=self.over.wait, name="helper", daemon=True)
        self.thread.start()

    def stop(self) -> None:
        self.over.set()
        self.thread.join()

    def pid(self) -> int:
        return os.getpid()

    def break_second_fork(self) -> None:
        source, fork = os.getpid(), os.fork

        def fails() -> int:
            if os.getpid() != source:
                raise BlockingIOError(11, "no more processes")
            return fork()

        os.fork = fails


def test_a_copy_with_a_thread_is_not_branched() -> None:
    envs = ForkedVectorEnv(Threaded, num_envs=2, step_timeout=20)
    envs.reset(seed=0)
    envs.call("start")
    before = envs.call("pid")
    with pytest.raises(ForkUnsafeError, match="copy 0 has 1 live thread") as caught:
        envs.branch(0, [1])
    assert "'helper'" in str(caught.value) and "before branch()" in str(caught.value)
    # Nothing was ended for it, and all goes on.
    assert envs.call("pid") == before
    envs.step([0, 0])
    envs.reset(seed=0)
    envs.branch(0, [1])
    envs.step([0, 0])
    envs.close()


def test_a_copy_with_a_thread_is_branched_if_the_user_says_so() -> None:
    envs = ForkedVectorEnv(Threaded, num_envs=2, allow_threads=True)
    envs.reset(seed=0)
    envs.call("start")
    envs.branch(0, [1])
    envs.step([0, 0])
    envs.close()


def test_a_second_fork_that_is_refused_is_said_at_once() -> None:
    envs = ForkedVectorEnv(Threaded, num_envs=3)
    envs.reset(seed=0)
    envs.call("break_second_fork")
    began = time.monotonic()
    with pytest.raises(Exception, match="could not be forked off copy 0") as caught:
        envs.branch(0, [1, 2])
    # Far less than the minute after which a copy that says nothing would be given up.
    assert time.monotonic() - began < 40 and not isinstance(caught.value, CopyTimeoutError)
    envs.reset(seed=0)
    envs.step([0, 0, 0])
    envs.close()

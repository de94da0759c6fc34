"""The trainer's process around local copies: its forks, its output, its signals, its limits, its end."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import prized_gym
from prized_gym import ForkedVectorEnv
from prized_gym.engines.local.output import PUMP, Stream
from tools.processes import eventually
from zoo.envs import Loaded
from zoo.faulty import Faulty

pytestmark = pytest.mark.timeout(120)


def run(text: str, directory: Path, **environment: str) -> subprocess.CompletedProcess[bytes]:
    (directory / "trainer.py").write_text(textwrap.dedent(text))
    here = Path(__file__).parents[1]
    return subprocess.run(
        [sys.executable, "trainer.py"],
        cwd=directory,
        capture_output=True,
        timeout=100,
        env={**os.environ, "PYTHONPATH": f"{here.parent}{os.pathsep}{here}", **environment},
    )


# Forks of the trainer


def test_no_thread_of_ours_is_there_while_the_trainer_forks(tmp_path: Path) -> None:
    """From Python 3.12 on every fork of a process with threads warns; and a fork's output is still shown after it."""
    text = """
        import os, threading
        seen = []
        # Registered before ours, so called after it.
        os.register_at_fork(before=lambda: seen.append([thread.name for thread in threading.enumerate()]))
        import multiprocessing, warnings
        warnings.simplefilter("error")
        import prized_gym
        from zoo.faulty import Faulty

        envs = prized_gym.ForkedVectorEnv(Faulty, 2)
        envs.reset(seed=0)
        process = multiprocessing.get_context("fork").Process(target=print)
        process.start()
        process.join()
        for round in range(20):
            pid = os.fork()
            if not pid:
                os._exit(0)
            os.waitpid(pid, 0)
            envs.step([Faulty.PRINT] * 2)
        envs.branch(0, [1])
        envs.close()
        assert seen == [["MainThread"]] * 21, seen
        print("end")
    """
    result = run(text, tmp_path)
    assert result.returncode == 0, result.stderr.decode()
    assert result.stdout.count(b"hello from the copy") == 40 and b"end" in result.stdout
    assert b"multi-threaded" not in result.stderr


def test_output_goes_on_after_a_fork_and_between_calls(capsys: pytest.CaptureFixture[str]) -> None:
    envs = ForkedVectorEnv(Faulty, num_envs=1)
    envs.reset(seed=0)
    pid = os.fork()
    if not pid:
        os._exit(0)
    os.waitpid(pid, 0)
    envs.step_async([Faulty.PRINT])
    shown = ""

    def arrived() -> bool:
        nonlocal shown
        shown += capsys.readouterr().out
        return "hello from the copy" in shown

    assert eventually(arrived)
    envs.step_wait()
    envs.close()


def test_a_thread_that_the_system_refuses_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    PUMP.pause()
    refusals = []

    def refuse(self: threading.Thread) -> None:
        refusals.append(self.name)
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        stream = Stream("stderr")
    assert refusals == ["prized_gym-output"]
    os.write(stream.write_fd, b"written meanwhile")
    assert stream.tail() == "written meanwhile"
    other = Stream("stderr")
    os.write(stream.write_fd, b", and since")
    # Read without being asked.
    assert eventually(lambda: b"and since" in b"".join(stream._tail))
    stream.close()
    other.close()


# Its output


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8", "utf-16-le", "ascii:strict"])
def test_output_is_shown_whatever_the_encoding(encoding: str, tmp_path: Path) -> None:
    text = """
        import sys, prized_gym
        from zoo.envs import Loaded

        class Talking(Loaded):
            def reset(self, *, seed=None, options=None):
                print("blé ✓ end", flush=True)
                print("maïs ✓ end", file=sys.stderr, flush=True)
                return super().reset(seed=seed, options=options)

        envs = prized_gym.ForkedVectorEnv(Talking, 1)
        envs.reset(seed=0)
        envs.close()
    """
    result = run(text, tmp_path, PYTHONIOENCODING=encoding)
    assert result.returncode == 0, result.stderr
    plain = encoding.split(":")[0]
    for output, words in ((result.stdout, "blé ✓ end"), (result.stderr, "maïs ✓ end")):
        assert words.encode(plain, "backslashreplace") in output


# Its signals


def test_sigpipe_at_its_default_does_not_end_the_trainer(tmp_path: Path) -> None:
    text = """
        import os, signal, time
        import prized_gym
        from zoo.faulty import Faulty
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        envs = prized_gym.ForkedVectorEnv(Faulty, 2)
        for _ in range(3):
            envs.reset(seed=0)
            pid = int(envs.core.fleet.where(1).split()[1])
            os.kill(pid, signal.SIGKILL)
            while os.path.exists(f"/proc/{pid}"):
                time.sleep(0.01)
            try:
                envs.step([0, 0])
            except prized_gym.CopyDiedError as error:
                assert "copy 1" in str(error)
            envs.reset(seed=0)
            base = int(envs.base._handle.where.split()[1])
            os.kill(base, signal.SIGKILL)
            while os.path.exists(f"/proc/{base}"):
                time.sleep(0.01)
            envs.reset(seed=0)
        envs.close()
        print("end")
    """
    result = run(text, tmp_path)
    assert (result.returncode, result.stdout) == (0, b"end\n"), result.stderr.decode()


# Its limits


def test_a_deleted_working_directory_is_no_obstacle(tmp_path: Path) -> None:
    text = """
        import os, sys, prized_gym
        from zoo.envs import Loaded
        os.mkdir("gone")
        os.chdir("gone")
        os.rmdir(os.getcwd())
        sys.path.insert(0, "")
        envs = prized_gym.ForkedVectorEnv(Loaded, 1)
        envs.reset(seed=0)
        envs.close()
        try:
            prized_gym.Base(Loaded, workdir="relative")
        except prized_gym.SetupError as error:
            print(error)
    """
    result = run(text, tmp_path)
    assert result.returncode == 0, result.stderr.decode()
    assert b"workdir 'relative'" in result.stdout


@pytest.mark.parametrize("free", range(0, 14, 2))
def test_too_few_files_are_explained_and_leave_nothing(free: int, tmp_path: Path) -> None:
    """Under a hard limit there is nothing to be raised."""
    text = f"""
        import contextlib, os, resource, prized_gym
        from zoo.envs import Loaded

        @contextlib.contextmanager
        def few(free):
            filling = []
            resource.setrlimit(resource.RLIMIT_NOFILE, (400, 400))
            with contextlib.suppress(OSError):
                while True:
                    filling.append(os.open(os.devnull, os.O_RDONLY))
            for _ in range(free):
                os.close(filling.pop())
            try:
                yield
            except prized_gym.PrizedGymError as error:
                assert "ulimit" in str(error) and "Too many open files" in str(error), error
            else:
                raise AssertionError("there were enough")
            finally:
                for fd in filling:
                    os.close(fd)

        with prized_gym.Base(Loaded) as base:
            before = sorted(os.listdir("/proc/self/fd"))
            with few(min({free}, 8)):
                prized_gym.Base(Loaded)
            assert sorted(os.listdir("/proc/self/fd")) == before
            envs = prized_gym.ForkedVectorEnv(base, num_envs=4)
            with few({free}):
                envs.reset(seed=0)
            assert envs.reset(seed=0)[0].shape[0] == 4
            envs.close()
            assert sorted(os.listdir("/proc/self/fd")) == before
    """
    result = run(text, tmp_path)
    assert result.returncode == 0, result.stderr.decode()


# Its end


def test_what_the_set_up_registered_with_atexit_runs_once(tmp_path: Path) -> None:
    def make() -> Any:
        import atexit

        def leave() -> None:
            with open(tmp_path / "left", "a") as file:
                file.write(f"{os.getpid()}\n")

        atexit.register(leave)
        (tmp_path / "base").write_text(str(os.getpid()))
        return Loaded()

    envs = ForkedVectorEnv(make, num_envs=3)
    envs.reset(seed=0)
    envs.reset(seed=1)
    envs.close()
    assert (tmp_path / "left").read_text().split() == [(tmp_path / "base").read_text()]

    def broken() -> Any:
        make()
        raise ValueError("broken")

    (tmp_path / "left").unlink()
    with pytest.raises(ValueError, match="broken"):
        ForkedVectorEnv(broken, num_envs=1)
    assert eventually((tmp_path / "left").exists)


def test_an_answer_that_nobody_waits_for_is_not_the_next_ones(tmp_path: Path) -> None:
    """An interrupt while the environment is reset in the base: the next one waits for what the base does, and gets that."""

    class Slow(Loaded):
        def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
            (tmp_path / "begun").touch()
            while not (tmp_path / "go").exists():
                time.sleep(0.01)
            return super().reset(seed=seed, options=options)

    import signal

    with prized_gym.Base(Slow) as base:
        envs = ForkedVectorEnv(base, num_envs=2, reset_in="base")

        def interrupt() -> None:
            assert eventually((tmp_path / "begun").exists, 60)
            signal.pthread_kill(main, signal.SIGINT)

        main = threading.main_thread().ident or 0
        thread = threading.Thread(target=interrupt)
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            envs.reset()
        thread.join()
        (tmp_path / "go").touch()
        first = envs.reset()[0]
        other = ForkedVectorEnv(base, num_envs=2)
        assert other.reset(seed=0)[0].shape == first.shape and len(envs.reset()[0]) == 2
        other.close()
        envs.close()

"""What goes wrong with sandboxes of gVisor is the failure of one copy, is told within a deadline, and leaves nothing."""

from __future__ import annotations

import contextlib
import gc
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import prized_gym
from prized_gym.engines.gvisor import GvisorDriver
from prized_gym.protocols import GymProtocol
from prized_gym.sandbox.driver import Shape
from tools.processes import cpu_seconds, left_of, sentry_of
from tools.sandboxes import ROOT, SMALL, ZOO
from zoo import bad_server as bad

READY = "http://127.0.0.1:8000/health"
pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module")
def bad_base(gvisor: str) -> Iterator[prized_gym.Base]:
    with prized_gym.Base(
        engine=gvisor,
        upload={str(ZOO / "bad_server.py"): "bad_server.py"},
        start="exec python bad_server.py --port 8000",
        ready="http://127.0.0.1:8000/health",
        protocol=GymProtocol(max_answer_bytes=8 << 20),
        **SMALL,
    ) as base:
        yield base


@pytest.mark.parametrize("channel", ["http", "exec"])
def test_a_bad_server_hurts_only_its_copy(gvisor: str, channel: str, bad_base: prized_gym.Base) -> None:
    actions = [bad.FINE, bad.HUGE, bad.GARBAGE, bad.DIE, bad.HANG, bad.PICKLE, bad.SHAPE]
    reasons = {
        bad.HUGE: "8388608",
        bad.GARBAGE: "no HTTP",
        bad.DIE: "exited with code 7",
        bad.HANG: "did not answer within 5 s",
        bad.PICKLE: "not allowed",
        bad.SHAPE: r"expected float32 of shape",
    }
    with contextlib.ExitStack() as stack:
        base = bad_base
        if channel == "exec":
            base = stack.enter_context(
                prized_gym.Base(
                    engine=gvisor,
                    upload={str(ZOO / "bad_server.py"): "bad_server.py"},
                    start="exec python bad_server.py --port 8000",
                    ready="http://127.0.0.1:8000/health",
                    protocol=GymProtocol(max_answer_bytes=8 << 20),
                    channel="exec",
                    **SMALL,
                )
            )
        envs = prized_gym.ForkedVectorEnv(base, num_envs=len(actions), on_failure="truncate", step_timeout=5)
        stack.callback(envs.close)
        envs.reset(seed=0)
        _, rewards, _, truncations, infos = envs.step(np.array(actions))
        assert rewards[0] == 1 and not truncations[0] and truncations[1:].all()
        for index, action in enumerate(actions[1:], start=1):
            assert re.search(reasons[action], infos["failure"][index]), infos["failure"][index]
        envs.step(np.zeros(len(actions), np.int64))
        assert (envs.step(np.zeros(len(actions), np.int64))[1] == 1).all()


def test_a_sandbox_killed_in_mid_setup(gvisor: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    real = GvisorDriver.create

    def create(self: GvisorDriver, shape: Shape, timeout: float) -> Any:
        made.append(real(self, shape, timeout))
        return made[-1]

    monkeypatch.setattr(GvisorDriver, "create", create)
    killed: list[int] = []

    def kill() -> None:
        ends = time.monotonic() + 30
        while time.monotonic() < ends:
            with contextlib.suppress(OSError, prized_gym.SandboxError, IndexError):
                if made[0].files.read("begun") == b"yes\n":
                    killed.append(sentry_of(made[0].id))
                    os.kill(killed[0], signal.SIGKILL)
                    return
            time.sleep(0.05)

    for options in ({"setup": ["echo yes >begun; sleep 300"]}, {"start": "echo yes >begun; sleep 300", "ready": READY}):
        made.clear()
        killed.clear()
        killer = threading.Thread(target=kill)
        killer.start()
        with pytest.raises(prized_gym.SetupError, match=r"its sentry ended with -9"):
            prized_gym.Base(engine=gvisor, **options, **SMALL)
        killer.join()
        assert killed and made[0].death is not None


def ids_of(envs: prized_gym.ForkedVectorEnv) -> list[str]:
    """The ids of the sandboxes that the copies of a vector environment are."""
    fleet = envs.core._live.get()
    return [fleet.where(index).split()[1] for index in range(envs.num_envs)]


def test_a_sandbox_killed_in_mid_step(bad_base: prized_gym.Base) -> None:
    envs = prized_gym.ForkedVectorEnv(bad_base, num_envs=2, on_failure="truncate", step_timeout=20)
    try:
        envs.reset(seed=0)
        sandbox_id = ids_of(envs)[1]
        sentry = sentry_of(sandbox_id)
        threading.Timer(0.5, os.kill, [sentry, signal.SIGKILL]).start()
        *_, infos = envs.step([bad.FINE, bad.HANG])
        assert f"copy 1 (sandbox {sandbox_id}) ended: " in infos["failure"][1]
        envs.step([0, 0])
        assert (envs.step([0, 0])[1] == 1).all()
    finally:
        envs.close()


def test_disk_and_memory_run_out_in_one_copy_only(bad_base: prized_gym.Base) -> None:
    from prized_gym.runsc import diagnose

    first, second = bad_base.fork(2)
    with first, second:
        full = first.exec("head -c 200000000 /dev/zero > big; echo $?; rm big; echo again > small && cat small")
        assert full.stdout == "1\nagain\n" and "No space left" in full.stderr
        limited = next(check for check in diagnose() if check.name == "memory limit").ok
        if limited:
            with contextlib.suppress(prized_gym.SandboxError):
                first.exec(["python", "-c", "x = bytearray(3 << 30); x[::4096] = b'x' * len(x[::4096])"], timeout=30)
            ends = time.monotonic() + 10
            while first.alive and time.monotonic() < ends:
                time.sleep(0.05)
            assert first.death is not None and "memory" in first.death
        assert second.exec("echo fine").stdout == "fine\n"
        assert second.http("/health").status == 200


def test_a_fork_bomb_ends_with_its_copy(bad_base: prized_gym.Base) -> None:
    first, second = bad_base.fork(2)
    with first, second:
        first.exec("bomb() { bomb | bomb & }; bomb", background=True)
        time.sleep(1.0)
        assert second.exec("echo fine").stdout == "fine\n"
        first.close()


def test_a_fork_bomb_ends_with_its_time_out(bad_base: prized_gym.Base) -> None:
    bomb = "import os\nwhile True:\n  try: os.fork()\n  except OSError: pass"
    (copy,) = bad_base.fork(1)
    with copy:
        result = copy.exec(["python", "-I", "-S", "-c", bomb], timeout=1)
        assert result.timed_out
        # Nobody of it is left to be in the way.
        deadline = time.monotonic() + 15
        while "while True" in copy.exec("cat /proc/[0-9]*/cmdline 2>/dev/null | tr '\\0' ' '; true").stdout:
            assert time.monotonic() < deadline
        assert copy.exec("echo fine").stdout == "fine\n"
        with pytest.raises(prized_gym.SandboxError, match="cannot be started: .*'/no/such'"):
            copy.exec(["/no/such"])


def test_many_forks_leave_nothing(bad_base: prized_gym.Base) -> None:
    def everything() -> tuple[int, int, int]:
        descriptors = len(os.listdir("/proc/self/fd"))
        sandboxes = sum(1 for _ in Path(os.environ["PRIZED_GYM_STORE"]).glob("m-*/sandboxes/*"))
        return descriptors, sandboxes, threading.active_count()

    gc.collect()  # what earlier tests left is not to go away meanwhile
    envs = prized_gym.ForkedVectorEnv(bad_base, num_envs=1)
    for round in range(50):
        envs.reset(seed=round)
        if round == 4:
            before = everything()
    after = everything()
    envs.close()
    assert after[0] <= before[0] + 2 and after[1] == before[1] and after[2] <= before[2] + 4, (before, after)


def test_an_interrupt_anywhere(bad_base: prized_gym.Base) -> None:
    envs = prized_gym.ForkedVectorEnv(bad_base, num_envs=2)
    try:
        for delay in (0.05, 0.3, 0.6):  # in the fork, after it, or in the step
            threading.Timer(delay, os.kill, [os.getpid(), signal.SIGINT]).start()
            with pytest.raises(KeyboardInterrupt):
                envs.reset(seed=0)
                envs.step([0, bad.HANG])
        envs.reset(seed=0)
        assert (envs.step([0, 0])[1] == 1).all()
    finally:
        envs.close()
    before = _sandboxes()
    threading.Timer(1.0, os.kill, [os.getpid(), signal.SIGINT]).start()
    with pytest.raises(KeyboardInterrupt):
        prized_gym.Base(engine="gvisor", setup=["sleep 60"], **SMALL)
    assert _sandboxes() == before


def _sandboxes() -> set[str]:
    return {path.name for path in Path(os.environ["PRIZED_GYM_STORE"]).glob("m-*/sandboxes/*")}


TRAINER = """
import sys, threading
import prized_gym
when = sys.argv[1]
options = dict(engine="gvisor", memory_gb=1, disk_gb=0.05, progress=False)
if when == "setup":
    print("now", flush=True)
    prized_gym.Base(setup=["sleep 60"], **options)
base = prized_gym.Base("CartPole-v1", **options)
envs = prized_gym.ForkedVectorEnv(base, num_envs=2)
if when == "step":
    envs.reset(seed=0)
print("now", flush=True)
while True:
    envs.step([0, 0]) if when == "step" else envs.reset(seed=0)
"""


@pytest.mark.parametrize("when", ["setup", "fork", "step"])
def test_nothing_outlives_a_trainer_that_is_killed(gvisor: str, when: str, tmp_path: Path) -> None:
    store = Path(f"/var/tmp/pg-k{os.getpid()}-{when}")
    environment = {**os.environ, "PRIZED_GYM_STORE": str(store), "PYTHONPATH": str(ROOT)}
    trainer = subprocess.Popen(
        [sys.executable, "-c", TRAINER, when], stdout=subprocess.PIPE, env=environment, cwd=tmp_path
    )
    try:
        assert trainer.stdout is not None and trainer.stdout.readline() == b"now\n"
        ends = time.monotonic() + 30
        while not any(" boot " in line for line in left_of(store)):
            assert time.monotonic() < ends
            time.sleep(0.05)
        time.sleep(0.35)
        trainer.kill()
        trainer.wait()
        trainer.stdout.close()
        ends = time.monotonic() + 20
        while (left := left_of(store)) and time.monotonic() < ends:
            time.sleep(0.05)
        assert not left
    finally:
        trainer.kill()
        shutil.rmtree(store, ignore_errors=True)


def test_a_script_that_closes_nothing_ends_at_once(gvisor: str, tmp_path: Path) -> None:
    store = Path(f"/var/tmp/pg-f{os.getpid()}")
    program = """
import threading, time
import prized_gym
base = prized_gym.Base("CartPole-v1", engine="gvisor", memory_gb=1, disk_gb=0.05, progress=False)
envs = prized_gym.ForkedVectorEnv(base, num_envs=2)
envs.reset(seed=0)
(copy,) = base.fork()
def hang():
    try:
        copy.exec("sleep 1000")
    except prized_gym.SandboxDiedError:
        pass
threading.Thread(target=hang, daemon=True).start()
time.sleep(0.3)
print(time.time())
"""
    environment = {**os.environ, "PRIZED_GYM_STORE": str(store), "PYTHONPATH": str(ROOT)}
    try:
        done = subprocess.run(
            [sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, env=environment, timeout=60
        )
        assert done.returncode == 0 and not done.stderr, done.stderr
        assert time.time() - float(done.stdout) < 30  # and not as long as the command in the copy
        assert not left_of(store)
    finally:
        shutil.rmtree(store, ignore_errors=True)


def test_idle_copies_use_no_cpu(bad_base: prized_gym.Base) -> None:
    envs = prized_gym.ForkedVectorEnv(bad_base, num_envs=3)
    try:
        envs.reset(seed=0)
        sentries = [sentry_of(sandbox_id) for sandbox_id in ids_of(envs)]
        deadline = time.monotonic() + 30
        before = None
        while (used := [cpu_seconds([pid]) for pid in sentries]) != before:  # until they have come to rest
            assert time.monotonic() < deadline
            before = used
            time.sleep(1.0)
        assert (envs.step([0, 0, 0])[1] == 1).all()
    finally:
        envs.close()

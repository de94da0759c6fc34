"""Copies that die, hang, raise or leave; bases that die; trainers that are killed. Each under a deadline."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.error import AlreadyPendingCallError, ClosedEnvironmentError, NoAsyncCallError, ResetNeeded
from gymnasium.vector import AutoresetMode

import prized_gym
from prized_gym import (
    CopyDiedError,
    CopyTimeoutError,
    EngineUnavailableError,
    ForkedVectorEnv,
    InterruptedStepError,
)
from tools.processes import descendants, running
from zoo.faulty import Faulty

pytestmark = pytest.mark.timeout(180)

MODES = [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP, AutoresetMode.DISABLED]


@pytest.fixture(scope="module")
def faulty() -> Iterator[prized_gym.Base]:
    """One base for the tests that leave it alive."""
    with prized_gym.Base(Faulty) as base:
        yield base


def actions(count: int, bad: int | None = None, action: int = Faulty.STEP) -> np.ndarray[Any, Any]:
    result = np.zeros(count, np.int64)
    if bad is not None:
        result[bad] = action
    return result


@pytest.mark.parametrize(
    ("action", "words"),
    [
        (Faulty.KILL, "SIGKILL"),
        (Faulty.SEGFAULT, "SIGSEGV"),
        (Faulty.EXIT, "sys.exit(3)"),
        (Faulty.OS_EXIT, "exited with code 7"),
    ],
)
def test_a_copy_that_ends_is_named(faulty: prized_gym.Base, action: int, words: str) -> None:
    envs = ForkedVectorEnv(faulty, num_envs=3, fork_on="start")
    try:
        envs.reset(seed=0)
        envs.step(actions(3))
        pid = envs.call("get_wrapper_attr", "spec") and envs.core.fleet.where(1)
        with pytest.raises(CopyDiedError) as caught:
            envs.step(actions(3, 1, action))
        text = str(caught.value)
        assert "copy 1" in text and words in text and pid in text
        if action == Faulty.OS_EXIT:
            assert "last words" in text
        with pytest.raises(InterruptedStepError, match="reset"):
            envs.step(actions(3))
        observations, _ = envs.reset(seed=0)
        assert observations[:, 1].tolist() == [0, 1, 2]
        envs.step(actions(3))
    finally:
        envs.close()


def test_a_copy_killed_from_outside_while_idle() -> None:
    envs = ForkedVectorEnv(Faulty, num_envs=3)
    try:
        envs.reset(seed=0)
        for _ in range(10):
            envs.step(actions(3))
        os.kill(int(envs.core.fleet.where(2).split()[1]), signal.SIGKILL)
        with pytest.raises(CopyDiedError, match=r"copy 2 .*SIGKILL"):
            for _ in range(3):
                envs.step(actions(3))
        envs.reset()
        envs.step(actions(3))
    finally:
        envs.close()


def test_an_exception_keeps_its_type_and_traceback(engine: str) -> None:
    envs = ForkedVectorEnv(Faulty, num_envs=2, engine=engine)
    try:
        envs.reset(seed=0)
        with pytest.raises(ZeroDivisionError, match="divided by zero") as caught:
            envs.step(actions(2, 1, Faulty.RAISE))
        assert "the env divided by zero" in str(caught.value.__cause__) and "faulty.py" in str(caught.value.__cause__)
        if sys.version_info >= (3, 11):
            assert "copy 1" in caught.value.__notes__[0]
        envs.reset()
        envs.step(actions(2))
    finally:
        envs.close()


def test_an_exception_that_cannot_be_carried_over() -> None:
    class Odd(Exception):
        lock = None  # which makes the class one that cannot be pickled, once there is one

        def __init__(self, a: int, b: int) -> None:
            Odd.lock = threading.Lock()  # type: ignore[assignment]
            super().__init__("odd")

    class Env(Faulty):
        def step(self, action: Any) -> Any:
            raise Odd(1, 2)

    envs = ForkedVectorEnv(Env, num_envs=1)
    try:
        envs.reset()
        with pytest.raises(prized_gym.CopyError, match=r"copy 0 .*odd") as caught:
            envs.step(actions(1))
        assert "in step" in str(caught.value)
    finally:
        envs.close()


@pytest.mark.parametrize(("action", "place"), [(Faulty.HANG, "hang_here"), (Faulty.HANG_IN_C, "step")])
def test_a_hung_copy_shows_its_stack(action: int, place: str) -> None:
    envs = ForkedVectorEnv(Faulty, num_envs=3, step_timeout=1.0)
    try:
        envs.reset(seed=0)
        envs.step(actions(3))
        with pytest.raises(CopyTimeoutError, match=r"copy 2 .*1 s") as caught:
            envs.step(actions(3, 2, action))
        assert f"in {place}" in str(caught.value)
        assert isinstance(caught.value, TimeoutError)
        envs.reset()
        envs.step(actions(3))
    finally:
        envs.close()


def test_a_stopped_copy_is_ended() -> None:
    envs = ForkedVectorEnv(Faulty, num_envs=2, step_timeout=1.0)
    try:
        envs.reset(seed=0)
        os.kill(int(envs.core.fleet.where(0).split()[1]), signal.SIGSTOP)
        with pytest.raises(CopyTimeoutError, match=r"copy 0"):
            envs.step(actions(2))
        envs.reset()
    finally:
        envs.close()


@pytest.mark.parametrize(
    "action", [Faulty.KILL, Faulty.SEGFAULT, Faulty.RAISE, Faulty.EXIT, Faulty.HANG, Faulty.BAD_SHAPE]
)
@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.value)
@pytest.mark.parametrize("fork_on", ["reset", "episode"])
def test_truncate_goes_on(faulty: prized_gym.Base, action: int, mode: AutoresetMode, fork_on: Any) -> None:
    envs = ForkedVectorEnv(
        faulty,
        num_envs=3,
        on_failure="truncate",
        autoreset_mode=mode,
        step_timeout=1.0 if action == Faulty.HANG else 30.0,
        reset_timeout=30.0,
        fork_on=fork_on,
    )
    try:
        envs.reset(seed=10)
        for _ in range(8):
            before, *_ = envs.step(actions(3))
        observations, rewards, terminations, truncations, infos = envs.step(actions(3, 1, action))
        assert truncations.tolist() == [False, True, False] and not terminations.any()
        assert rewards.tolist() == [1, 0, 1]
        assert observations[[0, 2], 0].tolist() == [9, 9]
        if mode is AutoresetMode.SAME_STEP:
            assert infos["_final_obs"].tolist() == [False, True, False]
            assert infos["final_obs"][1].tolist() == before[1].tolist()
            assert "copy 1" in infos["final_info"]["failure"][1]
            assert observations[1, 0] == 0
        else:
            assert observations[1].tolist() == before[1].tolist()
            assert infos["_failure"].tolist() == [False, True, False] and "copy 1" in infos["failure"][1]
        if mode is AutoresetMode.DISABLED:
            with pytest.raises(prized_gym.EpisodeOverError, match=r"\[1\]"):
                envs.step(actions(3))
            observations, _ = envs.reset(options={"reset_mask": truncations})
            assert observations[:, 0].tolist() == [9, 0, 9]
        if mode is AutoresetMode.NEXT_STEP:
            observations, rewards, _, truncations, _ = envs.step(actions(3))
            assert observations[:, 0].tolist() == [10, 0, 10] and not truncations.any()
            assert rewards.tolist() == [1, 0, 1]
        for _ in range(20):
            observations, *_ = envs.step(actions(3))
        assert observations[1, 0] == 20
        failed = [episode for episode in envs.history() if episode.failure]
        assert len(failed) == 1 and failed[0].copy == 1 and failed[0].reward == 8
    finally:
        envs.close()


def test_truncate_gives_up_after_max_failures_in_a_row() -> None:
    envs = ForkedVectorEnv(Faulty, num_envs=2, on_failure="truncate", max_failures=3)
    try:
        envs.reset(seed=0)
        with pytest.raises(CopyDiedError, match="copy 0"):
            for _ in range(10):
                envs.step(actions(2, 0, Faulty.KILL))
        # Twice truncated and begun again; the third failure is raised.
        assert len(envs.history()) == 2
    finally:
        envs.close()


def test_a_reset_that_fails_once_is_tried_again_in_a_fresh_fork(tmp_path: Path) -> None:
    marker = tmp_path / "failed"

    class Once(Faulty):
        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            if not marker.exists():
                marker.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            return super().reset(seed=seed)

    envs = ForkedVectorEnv(Once, num_envs=2, on_failure="truncate")
    try:
        observations, _ = envs.reset(seed=4)
        assert observations[:, 1].tolist() == [4, 5]
    finally:
        envs.close()


@pytest.mark.parametrize("bad", ["raise", "kill", "hang"])
@pytest.mark.parametrize("on_failure", ["raise", "truncate"])
def test_a_reset_that_always_fails_is_raised(bad: str, on_failure: Any) -> None:
    limit = 0.7 if bad == "hang" else 30.0
    envs = ForkedVectorEnv(
        Faulty, num_envs=2, on_failure=on_failure, reset_timeout=limit, env_kwargs={"bad_reset": bad}
    )
    try:
        with pytest.raises({"raise": RuntimeError, "kill": CopyDiedError, "hang": CopyTimeoutError}[bad]):
            envs.reset(seed=0)
    finally:
        envs.close()


@pytest.mark.parametrize("on_failure", ["raise", "truncate"])
@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.value)
def test_a_killed_base_is_rebuilt(on_failure: Any, mode: AutoresetMode) -> None:
    envs = ForkedVectorEnv(Faulty, num_envs=2, on_failure=on_failure, autoreset_mode=mode)
    try:
        envs.reset(seed=0)
        envs.step(actions(2))
        os.kill(int(envs.base._handle.where.split()[1]), signal.SIGKILL)
        if on_failure == "raise":
            with pytest.raises(prized_gym.BaseDiedError, match="SIGKILL"):
                for _ in range(20):
                    envs.step(actions(2))
                    time.sleep(0.05)
            envs.reset(seed=0)
        else:
            lost = np.zeros(2, bool)
            for _ in range(100):
                *_, truncations, _infos = envs.step(actions(2))
                lost |= truncations
                if mode is AutoresetMode.DISABLED and truncations.any():
                    envs.reset(options={"reset_mask": truncations})
                if lost.all():
                    break
                time.sleep(0.02)
            assert lost.all()
        for _ in range(3):
            envs.step(actions(2))
    finally:
        envs.close()


@pytest.mark.parametrize("on_failure", ["raise", "truncate"])
def test_a_masked_reset_that_rebuilds_the_base_does_not_bring_back_the_others(on_failure: Any) -> None:
    envs = ForkedVectorEnv(Faulty, num_envs=2, on_failure=on_failure, autoreset_mode=AutoresetMode.DISABLED)
    try:
        envs.reset(seed=0)
        envs.step(actions(2))
        pid = int(envs.base._handle.where.split()[1])
        os.kill(pid, signal.SIGKILL)
        while envs.base._handle.alive:
            time.sleep(0.01)
        envs.reset(options={"reset_mask": np.array([True, False])})
        if on_failure == "raise":
            with pytest.raises(prized_gym.BaseDiedError, match="copy 1.*SIGKILL"):
                envs.step(actions(2))
        else:
            _, _, _, truncations, infos = envs.step(actions(2))
            assert truncations.tolist() == [False, True]
            assert "lost with its base" in infos["failure"][1]
            envs.reset(options={"reset_mask": truncations})
            assert not envs.step(actions(2))[3].any()
    finally:
        envs.close()


@pytest.mark.parametrize(
    ("batch", "error", "words"),
    [
        (np.zeros(2, np.int64), ValueError, "3 actions.*got 2"),
        (np.zeros(4, np.int64), ValueError, "3 actions.*got 4"),
        (np.array([0, 99, 0]), ValueError, "copy 1"),
        (np.array([0, -1, 0]), ValueError, "copy 1"),
        (np.zeros((3, 1), np.int64), ValueError, "shape"),
        (np.zeros(3), TypeError, "integers"),
        (np.array(["a", "b", "c"]), TypeError, "integers"),
        (0, TypeError, "a single value"),
        ([[0], [0, 1], [0]], ValueError, "one shape"),
        (None, TypeError, "a single value"),
    ],
)
def test_actions_that_do_not_fit_are_refused_before_anything_is_sent(
    faulty: prized_gym.Base, batch: Any, error: type[Exception], words: str
) -> None:
    envs = ForkedVectorEnv(faulty, num_envs=3)
    try:
        envs.reset(seed=0)
        with pytest.raises(error, match=words):
            envs.step(batch)
        observations, *_ = envs.step(actions(3))
        assert observations[:, 0].tolist() == [1, 1, 1]
    finally:
        envs.close()


def test_calls_out_of_order(engine: str) -> None:
    envs = ForkedVectorEnv(Faulty, num_envs=2, engine=engine)
    with pytest.raises(ResetNeeded):
        envs.step(actions(2))
    with pytest.raises(NoAsyncCallError):
        envs.step_wait()
    envs.reset(seed=0)
    envs.step_async(actions(2))
    for call in (lambda: envs.reset_async(), lambda: envs.step_async(actions(2)), lambda: envs.call("render")):
        with pytest.raises(AlreadyPendingCallError):
            call()
    with pytest.raises(NoAsyncCallError):
        envs.reset_wait()
    envs.step_wait()
    envs.close()
    envs.close()
    assert envs.closed
    for call in (
        lambda: envs.step(actions(2)),
        lambda: envs.reset(),
        lambda: envs.call("render"),
        lambda: envs.step_wait(),
    ):
        with pytest.raises(ClosedEnvironmentError):
            call()


def test_step_wait_times_out_and_can_be_waited_for_again(tmp_path: Path) -> None:
    gate = tmp_path / "gate"

    class Slow(Faulty):
        def step(self, action: Any) -> Any:
            while not gate.exists():
                time.sleep(0.01)
            return super().step(action)

    envs = ForkedVectorEnv(Slow, num_envs=2)
    try:
        envs.reset(seed=0)
        envs.step_async(actions(2))
        with pytest.raises(multiprocessing.TimeoutError):
            envs.step_wait(timeout=0.05)
        gate.touch()
        observations, *_ = envs.step_wait(timeout=30)
        assert observations[:, 0].tolist() == [1, 1]
    finally:
        envs.close()


@pytest.mark.parametrize("fork_on", ["reset", "start"])
@pytest.mark.parametrize("warm", [0, 20])
def test_an_interrupt_in_mid_step_leaves_an_env_that_reset_brings_back(fork_on: Any, warm: int) -> None:
    envs = ForkedVectorEnv(Faulty, num_envs=3, fork_on=fork_on)
    try:
        envs.reset(seed=0)
        for _ in range(warm):
            envs.step(actions(3))
        timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            envs.step(actions(3, 1, Faulty.HANG))
        with pytest.raises(InterruptedStepError, match="interrupted"):
            envs.step(actions(3))
        observations, _ = envs.reset(seed=5)
        assert observations[:, 1].tolist() == [5, 6, 7]
        for _ in range(20):
            observations, *_ = envs.step(actions(3))
        assert observations[:, 0].tolist() == [20, 20, 20]
    finally:
        envs.close()


SCRIPT = """
import os, sys, time, numpy as np
sys.path.insert(0, {tests!r})
from zoo.faulty import Faulty
import prized_gym
class Slow(Faulty):
    def __init__(self):
        super().__init__()
        if {stage!r} == "build":
            import subprocess
            subprocess.Popen(["sleep", "1234"], start_new_session=True)
            open({mark!r}, "w").close()
            time.sleep(1000)
    def reset(self, *, seed=None, options=None):
        if {stage!r} == "fork":
            open({mark!r}, "w").close()
            time.sleep(1000)
        return super().reset(seed=seed)
    def step(self, action):
        if {stage!r} == "step":
            open({mark!r}, "w").close()
            time.sleep(1000)
        return super().step(action)
envs = prized_gym.ForkedVectorEnv(Slow, num_envs=4)
envs.reset(seed=0)
envs.step(np.zeros(4, np.int64))
"""


@pytest.mark.parametrize("stage", ["build", "fork", "step"])
def test_nothing_outlives_a_killed_trainer(stage: str, tmp_path: Path) -> None:
    mark = tmp_path / "reached"
    script = SCRIPT.format(tests=str(Path(__file__).parents[1]), stage=stage, mark=str(mark))
    trainer = subprocess.Popen([sys.executable, "-c", script])
    try:
        deadline = time.monotonic() + 40
        while not mark.exists():
            assert time.monotonic() < deadline and trainer.poll() is None
            time.sleep(0.02)
        below = _below(trainer.pid)
        assert len(below) >= 2
        trainer.kill()
        trainer.wait()
        deadline = time.monotonic() + 20
        while any(running(pid) for pid in below):
            assert time.monotonic() < deadline, [pid for pid in below if running(pid)]
            time.sleep(0.02)
    finally:
        trainer.kill()
        trainer.wait()


def _below(pid: int) -> list[int]:
    from prized_gym.engines.local.processes import descendants as all_below

    return all_below(pid)


def test_a_base_outlives_the_thread_that_started_it() -> None:
    made: list[ForkedVectorEnv] = []
    thread = threading.Thread(target=lambda: made.append(ForkedVectorEnv(Faulty, num_envs=2)))
    thread.start()
    thread.join()
    envs = made[0]
    try:
        for _ in range(2):
            envs.reset(seed=0)
            envs.step(actions(2))
    finally:
        envs.close()


def test_what_a_copy_starts_ends_with_it(tmp_path: Path) -> None:
    class Starter(Faulty):
        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            self.child = subprocess.Popen(["sleep", "4321"], start_new_session=bool(seed))
            return super().reset(seed=seed)

        def pid(self) -> int:
            return self.child.pid

    envs = ForkedVectorEnv(Starter, num_envs=2)
    try:
        envs.reset(seed=0)
        children = envs.call("pid")
        assert all(running(pid) for pid in children)
        envs.reset(seed=0)
        deadline = time.monotonic() + 20
        while any(running(pid) for pid in children):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        children = envs.call("pid")
    finally:
        envs.close()
    deadline = time.monotonic() + 20
    while any(running(pid) for pid in children):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_200_reset_and_close_rounds_leave_nothing() -> None:
    def mapped() -> int:
        return Path("/proc/self/maps").read_text().count("/memfd:prized_gym")

    def one_round(base: prized_gym.Base, step: bool) -> None:
        envs = ForkedVectorEnv(base, num_envs=2)
        envs.reset(seed=0)
        if step:
            envs.step(actions(2))
        envs.close()

    gc.collect()  # what earlier tests left is not to go away meanwhile
    with prized_gym.Base(Faulty) as base:
        one_round(base, True)
        fds, processes, mounts = len(os.listdir("/proc/self/fd")), len(descendants()), Path("/proc/mounts").read_text()
        base_pid = int(base._handle.where.split()[1])
        base_fds, maps = len(os.listdir(f"/proc/{base_pid}/fd")), mapped()
        for number in range(200):
            one_round(base, number % 4 == 0)
        assert len(os.listdir("/proc/self/fd")) == fds
        assert len(descendants()) == processes
        assert mapped() <= maps
        assert Path("/proc/mounts").read_text() == mounts
        deadline = time.monotonic() + 20
        while len(os.listdir(f"/proc/{base_pid}/fd")) > base_fds:
            assert time.monotonic() < deadline
            time.sleep(0.02)


def test_200_resets_of_one_env_leave_nothing() -> None:
    gc.collect()  # what earlier tests left is not to go away meanwhile
    envs = ForkedVectorEnv(Faulty, num_envs=2)
    try:
        envs.reset(seed=0)
        envs.step(actions(2))
        fds, processes = len(os.listdir("/proc/self/fd")), len(descendants())
        for number in range(200):
            envs.reset(seed=number)
        deadline = time.monotonic() + 20
        while len(descendants()) > processes or len(os.listdir("/proc/self/fd")) > fds:
            assert time.monotonic() < deadline
            envs.call("get_wrapper_attr", "count")
            time.sleep(0.02)
    finally:
        envs.close()


def test_64_idle_copies_use_no_cpu() -> None:
    envs = ForkedVectorEnv(Faulty, num_envs=64)
    try:
        envs.reset(seed=0)
        for _ in range(10):
            envs.step(actions(64))
        pids = _below(os.getpid())

        def ticks() -> int:
            total = 0
            for pid in pids:
                fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
                total += int(fields[11]) + int(fields[12])
            return total

        # On a busy machine they take a while to come to rest.
        deadline = time.monotonic() + 30
        used = 2
        while used > 1:
            assert time.monotonic() < deadline, used
            before = ticks()
            time.sleep(1.0)
            used = ticks() - before
    finally:
        envs.close()


def test_a_machine_without_eventfd_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "eventfd")
    with pytest.raises(EngineUnavailableError, match="eventfd"):
        ForkedVectorEnv("CartPole-v1", num_envs=1)


def test_a_time_limit_holds_while_other_copies_autoreset() -> None:
    envs = ForkedVectorEnv(Faulty, num_envs=3, step_timeout=1.0)
    envs.reset(seed=0)
    envs.step([Faulty.END, 0, 0])
    with pytest.raises(CopyTimeoutError, match="copy 2"):
        envs.step([0, 0, Faulty.HANG])
    envs.close()


@pytest.mark.parametrize("mode", MODES[:2], ids=lambda mode: mode.value)
def test_a_slow_autoreset_is_no_hung_step(mode: AutoresetMode) -> None:
    class SlowReset(Faulty):
        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            time.sleep(0.0 if seed is not None else 1.5)
            return super().reset(seed=seed)

    envs = ForkedVectorEnv(SlowReset, num_envs=2, step_timeout=1.0, autoreset_mode=mode)
    envs.reset(seed=0)
    envs.step([Faulty.END, 0])
    observations, *_ = envs.step([0, 0])
    assert observations[1, 0] == 2
    envs.close()


def test_an_answer_that_comes_too_late_belongs_to_nobody() -> None:
    class Late(Faulty):
        def step(self, action: Any) -> Any:
            if action:
                time.sleep(0.52)
            return *super().step(0)[:4], {"stale": 1} if action else {}

    envs = ForkedVectorEnv(Late, num_envs=2, step_timeout=0.5, on_failure="truncate", max_failures=10)
    for _ in range(3):
        envs.reset(seed=0)
        *_, truncations, infos = envs.step([0, 1])
        if truncations[1]:
            assert "stale" not in infos
            *_, infos = envs.step([0, 0])
            assert not infos
    envs.close()


def test_a_time_out_that_the_environment_raises_is_an_error_like_others(engine: str) -> None:
    class Pool(Faulty):
        def step(self, action: Any) -> Any:
            raise multiprocessing.TimeoutError("the pool")

    envs = ForkedVectorEnv(Pool, num_envs=1, engine=engine)
    envs.reset()
    with pytest.raises(multiprocessing.TimeoutError, match="the pool"):
        envs.step([0])
    envs.reset()
    envs.close()


def test_a_closed_base_is_said_to_be_closed(tmp_path: Path) -> None:
    base = prized_gym.Base(Faulty)
    envs = [ForkedVectorEnv(base, num_envs=2, on_failure=mode) for mode in ("raise", "truncate")]  # type: ignore[arg-type]
    for one in envs:
        one.reset(seed=0)
        for _ in range(8):
            one.step([0, 0])
    base.close()
    # Numbers of closed descriptors are taken again at once: nobody may write to, or read, what is behind them.
    files = [open(tmp_path / str(number), "w+b", buffering=0) for number in range(40)]
    with pytest.raises(prized_gym.BaseDiedError, match="closed"):
        envs[0].step([0, 0])
    assert envs[1].step([0, 0])[3].all()
    for one in envs:
        with pytest.raises(prized_gym.BaseDiedError, match="closed"):
            one.reset()
        one.close()
    for file in files:
        assert file.seek(0, 2) == 0
        file.close()


@pytest.mark.parametrize("on_failure", ["raise", "truncate"])
def test_a_base_rebuilt_for_one_vector_env_serves_the_other(on_failure: Any, tmp_path: Path) -> None:
    with prized_gym.Base(Faulty) as base:
        train, evaluate = (ForkedVectorEnv(base, num_envs=2, on_failure=on_failure) for _ in range(2))
        for envs in (train, evaluate):
            envs.reset(seed=0)
            for _ in range(8):
                envs.step([0, 0])
        os.kill(int(base._handle.where.split()[1]), signal.SIGKILL)
        deadline = time.monotonic() + 20
        while base.alive:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        train.reset(seed=1)
        files = [open(tmp_path / str(number), "w+b", buffering=0) for number in range(40)]
        if on_failure == "raise":
            with pytest.raises(prized_gym.BaseDiedError, match="SIGKILL"):
                evaluate.step([0, 0])
            evaluate.reset(seed=2)
        else:
            assert evaluate.step([0, 0])[3].all()
            evaluate.step([0, 0])
        for envs in (train, evaluate):
            envs.step([0, 0])
            envs.close()
        for file in files:
            assert file.seek(0, 2) == 0
            file.close()


def test_a_set_attr_that_fails_is_not_replayed(engine: str) -> None:
    envs = ForkedVectorEnv("CartPole-v1", num_envs=2, engine=engine)
    envs.reset(seed=0)
    with pytest.raises(AttributeError):
        envs.set_attr("unwrapped", 3)
    envs.reset(seed=0)
    envs.close()


def test_a_blocked_sigchld_does_not_hide_deaths() -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    try:
        envs = ForkedVectorEnv(Faulty, num_envs=2)
        envs.reset(seed=0)
        with pytest.raises(CopyDiedError, match="copy 1"):
            envs.step([0, Faulty.KILL])
        envs.close()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def test_a_stopped_copy_and_a_long_message() -> None:
    class Talks(Faulty):
        action_space = gym.spaces.Text(5_000_000)  # type: ignore[assignment]

        def step(self, action: Any) -> Any:
            return super().step(0)

    envs = ForkedVectorEnv(Talks, num_envs=2, step_timeout=1.5)
    envs.reset(seed=0)
    os.kill(int(envs.core.fleet.where(0).split()[1]), signal.SIGSTOP)
    with pytest.raises(CopyTimeoutError, match="copy 0"):
        envs.step(("x" * 4_000_000, "y"))
    envs.reset()
    envs.close()


def test_a_base_reset_that_hangs_is_ended() -> None:
    envs = ForkedVectorEnv(Faulty, num_envs=2, reset_in="base", setup_timeout=6.0, env_kwargs={"bad_reset": "hang"})
    with pytest.raises(prized_gym.SetupTimeoutError, match="not reset in the base"):
        envs.reset()
    envs.close()


def test_a_server_of_the_base_outlives_its_launcher_and_the_copies() -> None:
    class Served(Faulty):
        def __init__(self) -> None:
            super().__init__()
            launcher = subprocess.Popen(
                ["sh", "-c", "sleep 777 & echo $!"], stdout=subprocess.PIPE, text=True, start_new_session=True
            )
            assert launcher.stdout is not None
            self.server = int(launcher.stdout.readline())

    envs = ForkedVectorEnv(Served, num_envs=2)
    envs.reset(seed=0)
    (server, _) = envs.get_attr("server")
    with pytest.raises(CopyDiedError):
        envs.step([0, Faulty.KILL])
    envs.reset(seed=0)
    assert running(server)
    envs.close()
    deadline = time.monotonic() + 20
    while running(server):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_stdout_of_the_users_own_does_not_stop_the_output(monkeypatch: pytest.MonkeyPatch) -> None:
    class Tee:
        written = 0

        def write(self, text: str) -> int:
            Tee.written += len(text)
            raise RuntimeError("no")

    monkeypatch.setattr(sys, "stdout", Tee())
    envs = ForkedVectorEnv(Faulty, num_envs=1)
    envs.reset()
    for _ in range(3):
        envs.step([Faulty.PRINT])
    envs.close()
    monkeypatch.undo()
    assert Tee.written


def test_branch_of_a_dead_copy_names_it() -> None:
    envs = ForkedVectorEnv(Faulty, num_envs=3)
    envs.reset(seed=0)
    for _ in range(8):
        envs.step([0, 0, 0])
    os.kill(int(envs.core.fleet.where(0).split()[1]), signal.SIGKILL)
    with pytest.raises(CopyDiedError, match="copy 0"):
        envs.branch(0, [1, 2])
    envs.reset()
    envs.close()


INTERRUPTS = """
import signal, sys, time
import numpy as np
sys.path.insert(0, {tests!r})
from zoo.faulty import Faulty
import prized_gym

def interrupt(*_):
    raise KeyboardInterrupt

envs = prized_gym.ForkedVectorEnv(Faulty, num_envs=2)
signal.signal(signal.SIGALRM, interrupt)
rng = np.random.default_rng(0)
for _ in range(60):
    try:
        signal.setitimer(signal.ITIMER_REAL, float(rng.uniform(0.0002, 0.02)))
        while True:
            envs.reset(seed=0)
            for _ in range(3):
                envs.step([0, 0])
            envs.call("get_wrapper_attr", "count")
            envs.branch(0, [1])
    except KeyboardInterrupt:
        pass
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
started = time.monotonic()
envs.reset(seed=3)
assert envs.step([0, 0])[0][:, 0].tolist() == [1, 1]
envs.close()
print("back")
"""


def test_interrupts_at_any_moment() -> None:
    # A process of its own: an interrupt may come while the interpreter can only print it, in a destructor.
    script = INTERRUPTS.format(tests=str(Path(__file__).parents[1]))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "back\n"

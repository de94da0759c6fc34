"""Interrupts: wherever they come, nothing hangs, nothing of another call is returned, and a reset brings everything back."""

from __future__ import annotations

import faulthandler
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.error import AlreadyPendingCallError

from prized_gym import Base, ForkedVectorEnv, InterruptedStepError
from prized_gym.engines.local import framing
from tools.processes import eventually, running
from zoo.faulty import Faulty

pytestmark = pytest.mark.timeout(120)

INTERRUPTED = Path(__file__).parents[1] / "tools" / "interrupted.py"


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", ["local", "start", "throttled", "truncate", "inline", "sb3", "one"])
def test_interrupts_at_any_moment(kind: str) -> None:
    if kind == "sb3":
        pytest.importorskip("stable_baselines3")
    command = [sys.executable, "-W", "ignore", str(INTERRUPTED), kind, "20", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("back\n")


class Large(gym.Env[Any, Any]):
    """Answers with more than fits its slot of shared memory."""

    observation_space = gym.spaces.Box(-1, 9, (1,), np.float64)
    action_space = gym.spaces.Discrete(2)
    weight = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.count = 0
        return np.zeros(1), self.large()

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.count += 1
        return np.array([self.count]), 1.0, False, False, self.large()

    def large(self) -> dict[str, Any]:
        return {"large": b"x" * 40_000}

    def pid(self) -> int:
        return os.getpid()


@pytest.fixture(autouse=True)
def deadline() -> Iterator[None]:
    """A hang is shown, and ended."""
    faulthandler.dump_traceback_later(100, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


@pytest.fixture(scope="module")
def base() -> Iterator[Base]:
    made = Base(Large, progress=False)
    yield made
    made.close()


@pytest.fixture
def envs(base: Base) -> Iterator[ForkedVectorEnv]:
    made = ForkedVectorEnv(base, 2, progress=False)
    made.reset(seed=0)
    yield made
    made.close()


def in_a_received_message(patch: pytest.MonkeyPatch) -> None:
    """A Ctrl-C between the header and the body of the next message that is received here."""
    real, armed = framing._exactly, [True]

    def exactly(sock: socket.socket, length: int) -> bytearray:
        if armed and threading.current_thread() is threading.main_thread():
            armed.clear()
            signal.raise_signal(signal.SIGINT)
        return real(sock, length)

    patch.setattr(framing, "_exactly", exactly)


def in_a_sent_message(patch: pytest.MonkeyPatch) -> None:
    """A Ctrl-C when a part of the next message that is sent has left."""
    real, armed = framing.send, [True]

    def send(sock: socket.socket, payload: bytes, fds: list[int] | None = None) -> None:
        if armed and not fds and threading.current_thread() is threading.main_thread():
            armed.clear()
            sock.send(framing.HEADER.pack(len(payload)) + payload[:3])
            signal.raise_signal(signal.SIGINT)
        real(sock, payload, fds)

    patch.setattr(framing, "send", send)


@pytest.mark.parametrize("then", ["reset", "close"])
@pytest.mark.parametrize(
    ("cut", "operation"),
    [
        (in_a_received_message, lambda envs: envs.reset(seed=1)),
        (in_a_received_message, lambda envs: envs.step([0, 0])),
        (in_a_received_message, lambda envs: envs.call("large")),
        (in_a_sent_message, lambda envs: envs.call("large")),
        (in_a_sent_message, lambda envs: envs.set_attr("weight", 1)),
        (in_a_sent_message, lambda envs: envs.send([0], [1])),
    ],
)
def test_a_message_cut_in_two_holds_nothing_up(
    envs: ForkedVectorEnv,
    cut: Callable[[pytest.MonkeyPatch], None],
    operation: Callable[[ForkedVectorEnv], Any],
    then: str,
) -> None:
    pids = envs.call("pid")
    with pytest.MonkeyPatch.context() as patch:
        cut(patch)
        with pytest.raises(KeyboardInterrupt):
            operation(envs)
    if then == "close":
        envs.close()
    else:
        assert envs.reset(seed=3)[0].tolist() == [[0.0], [0.0]]
        assert envs.step([0, 0])[0].tolist() == [[1.0], [1.0]]
    assert not any(running(pid) for pid in pids)


def test_an_interrupt_as_a_fleet_is_announced_leaves_the_base_and_its_other_copies(base: Base) -> None:
    other, envs = ForkedVectorEnv(base, 1, progress=False), ForkedVectorEnv(base, 2, progress=False)
    other.reset(seed=0)
    real = socket.send_fds

    def send_fds(*arguments: Any) -> int:
        sent = real(*arguments)
        socket.send_fds = real
        signal.raise_signal(signal.SIGINT)
        return sent

    socket.send_fds = send_fds
    try:
        with pytest.raises(KeyboardInterrupt):
            envs.reset(seed=0)
    finally:
        socket.send_fds = real
    assert other.step([0])[0].tolist() == [[1.0]]
    assert envs.reset(seed=0)[0].tolist() == [[0.0], [0.0]]
    assert ForkedVectorEnv(base, 1, progress=False).reset()[0].tolist() == [[0.0]]
    for each in (other, envs):
        each.close()


def test_an_interrupt_while_the_base_is_reset_leaves_its_answer_to_nobody() -> None:
    with Base(lambda: Faulty(), progress=False) as base:
        real = framing.wait_readable

        def wait_readable(*arguments: Any) -> bool:
            framing.wait_readable = real
            raise KeyboardInterrupt

        framing.wait_readable = wait_readable
        envs = ForkedVectorEnv(base, 2, reset_in="base", progress=False)
        try:
            with pytest.raises(KeyboardInterrupt):
                envs.reset()
        finally:
            framing.wait_readable = real
        for _ in range(2):
            assert envs.reset()[0].tolist() == [[0.0, 0.0], [0.0, 0.0]]
        plain = ForkedVectorEnv(base, 1, progress=False)
        assert plain.reset(seed=4)[0].tolist() == [[0.0, 4.0]]
        plain.close()
        envs.close()


# What a caller has begun and was interrupted before it could finish


@pytest.mark.parametrize("fork_on", ["reset", "start", "episode"])
@pytest.mark.parametrize(
    "begin",
    [
        lambda envs: envs.send([0, 0]),
        lambda envs: envs.send([0], [1]),
        lambda envs: envs.step_async([0, 0]),
        lambda envs: envs.reset_async(seed=9),
        lambda envs: envs.call_async("large"),
    ],
)
def test_a_reset_abandons_what_is_pending(base: Base, begin: Callable[[ForkedVectorEnv], Any], fork_on: Any) -> None:
    envs = ForkedVectorEnv(base, 2, fork_on=fork_on, progress=False)
    envs.reset(seed=0)
    pids = envs.call("pid")
    begin(envs)
    with pytest.raises(AlreadyPendingCallError):
        envs.reset(options={"reset_mask": np.array([True, False])})
    with pytest.raises(AlreadyPendingCallError):
        envs.reset_async()
    assert envs.reset(seed=1)[0].tolist() == [[0.0], [0.0]]
    assert (envs.call("pid") == pids) == (fork_on == "start")
    for count in range(3):
        assert envs.step([0, 0])[0].tolist() == [[count + 1.0]] * 2
    envs.send([0, 0])
    assert envs.recv(2)[0].tolist() == [[4.0], [4.0]]
    envs.close()


def test_a_reset_does_not_wait_for_what_never_ends() -> None:
    envs = ForkedVectorEnv(Faulty, 2, fork_on="start", progress=False)
    envs.reset(seed=0)
    kept = envs.get_attr("episode")
    envs.send([Faulty.HANG, Faulty.STEP])
    began = time.monotonic()
    assert envs.reset(seed=5)[0].tolist() == [[0.0, 5.0], [0.0, 6.0]]
    assert time.monotonic() - began < 60
    assert envs.step([0, 0])[0].tolist() == [[1.0, 1.0], [1.0, 1.0]]
    assert envs.get_attr("episode") == kept
    envs.close()


@pytest.mark.parametrize("engine", ["local", "inline"])
@pytest.mark.parametrize(
    "operation",
    [
        lambda envs: envs.get_attr("weight"),
        lambda envs: envs.call("large"),
        lambda envs: envs.render(),
        lambda envs: envs.set_attr("weight", 3),
        lambda envs: envs.step([0, 0]),
        lambda envs: envs.send([0, 0]),
    ],
)
def test_nothing_but_a_reset_follows_an_interrupted_call(
    engine: str, operation: Callable[[ForkedVectorEnv], Any]
) -> None:
    envs = ForkedVectorEnv(Interrupting, 2, engine=engine, progress=False)
    envs.reset(seed=0)
    if engine == "local":
        timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
    with pytest.raises(KeyboardInterrupt):
        envs.call("halt")
    with pytest.raises(InterruptedStepError, match="reset"):
        operation(envs)
    assert envs.reset(seed=0)[0].tolist() == [[0.0], [0.0]]
    assert envs.get_attr("weight") == (0, 0)
    envs.close()


class Interrupting(Large):
    """Is interrupted in a call: by itself where it lives in the test's own process."""

    owner = os.getpid()

    def halt(self) -> None:
        if os.getpid() == self.owner:
            raise KeyboardInterrupt
        time.sleep(1000)


def test_an_interrupted_close_can_be_called_again(base: Base) -> None:
    envs = ForkedVectorEnv(base, 2, progress=False)
    envs.reset(seed=0)
    pids = envs.call("pid")
    fleet = envs.core.fleet
    real = fleet.close

    def close(timeout: float | None = None) -> None:
        fleet.close = real
        raise KeyboardInterrupt

    fleet.close = close
    with pytest.raises(KeyboardInterrupt):
        envs.close()
    envs.close()
    assert eventually(lambda: not any(running(pid) for pid in pids))
    assert base.alive

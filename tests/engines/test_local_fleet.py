"""The local engine's fleet, without a vector environment over it: real bases, real processes, every way to fail."""

from __future__ import annotations

import contextlib
import os
import resource
import select
import signal
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

from prized_gym.batch import ObservationBuffer
from prized_gym.errors import BaseDiedError, ForkUnsafeError, PrizedGymError
from prized_gym.interface import commands as ops
from prized_gym.interface.commands import Call, Reseed, SetAttr
from prized_gym.interface.engine import BaseHandle
from prized_gym.interface.failure import CopyDiedError, CopyTimeoutError
from prized_gym.interface.fleet import Finished, Fleet, TimeLimits
from tools.fleets import ask, begin, begin_some, first, forked, make_base, step
from tools.processes import own_descendants, running
from zoo.envs import Loaded
from zoo.faulty import Faulty

pytestmark = pytest.mark.timeout(120)

WARM = 8
"""More steps of all copies than it takes until they are woken by semaphore."""


class Slow(Faulty):
    """Does what a file in ``folder`` says: ``step`` or ``reset`` present means that one waits until it is gone."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.folder = Path(folder)

    def held(self, what: str) -> None:
        while (self.folder / what).exists():
            time.sleep(0.005)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self.held("reset")
        return super().reset(seed=seed)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.held("step")
        return super().step(action)


Make = Callable[..., BaseHandle]


@pytest.fixture
def make() -> Iterator[Make]:
    """Makes bases, which are closed at the end with their fleets."""
    made: list[BaseHandle | Fleet] = []

    def make_one(*sources: Any, **options: Any) -> BaseHandle:
        base = make_base("local", *sources, **options)
        make_fleet = base.fleet

        def fleet(*args: Any) -> Fleet:
            made.insert(0, make_fleet(*args))
            return made[0]  # type: ignore[return-value]

        base.fleet = fleet  # type: ignore[method-assign, assignment]
        made.append(base)
        return base

    yield make_one
    for each in made:
        each.close()


@pytest.fixture(scope="module")
def base() -> Iterator[BaseHandle]:
    """One base for the tests that leave it alive."""
    base = make_base("local", Faulty)
    yield base
    base.close()


@pytest.fixture
def fleet(base: BaseHandle) -> Iterator[Fleet]:
    fleet = base.fleet(3)
    yield fleet
    fleet.close()


def pid_of(fleet: Fleet, index: int) -> int:
    return int(fleet.where(index).split()[1])


def kill_base(base: BaseHandle) -> None:
    os.kill(int(base.where.split()[1]), signal.SIGKILL)


def until(condition: Callable[[], object], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def warm(fleet: Fleet) -> None:
    for _ in range(WARM):
        assert not step(fleet, [0] * fleet.size).failures


# What is begun is waited for


def test_fork_step_and_wait(fleet: Fleet) -> None:
    fleet.fork(first(range(3), seed=7))
    assert fleet.busy == [0, 1, 2]
    finished = fleet.wait()
    assert list(finished.copies) == [0, 1, 2] and not finished.failures and fleet.busy == []
    assert np.array_equal(fleet.observations.arrays[0][:, 1], [7, 8, 9])
    for number in range(1, 2 * WARM):
        finished = step(fleet, [0, Faulty.END, 0])
        assert list(finished.copies) == [0, 1, 2] and not finished.failures
        assert fleet.observations.arrays[0][:, 0].tolist() == [number] * 3
        assert fleet.rewards.tolist() == [1, 1, 1] and fleet.terminations.tolist() == [False, True, False]
    begin_some(fleet, {2: 0, 0: 0})
    assert fleet.busy == [0, 2] and list(fleet.wait().copies) == [0, 2]
    assert list(fleet.wait().copies) == [] and list(fleet.wait(1, 0.0).copies) == []
    assert np.isnan(fleet.usage(0).cost_usd) and fleet.usage(1).cpu_seconds > 0


def test_a_caller_cannot_write_what_a_step_gave(fleet: Fleet) -> None:
    for array in (fleet.rewards, fleet.terminations, fleet.truncations):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1


def test_waiting_for_some_and_giving_up(make: Make, tmp_path: Path) -> None:
    base = make(Slow, env_kwargs={"folder": str(tmp_path)})
    fleet = base.fleet(3)
    forked(fleet)
    (tmp_path / "step").touch()
    begin_some(fleet, {0: 0, 2: 0})
    assert list(fleet.wait(None, 0.05).copies) == [] and fleet.busy == [0, 2]
    fleet.command({1: Call("count")})
    finished = fleet.wait(1)
    assert list(finished.copies) == [1] and finished.results == {1: 0}
    (tmp_path / "step").unlink()
    assert list(fleet.wait(2).copies) == [0, 2]


def test_descriptors_say_when_there_is_something_to_return(fleet: Fleet) -> None:
    def ready(seconds: float) -> bool:
        return bool(select.select(fleet.fds(), [], [], seconds)[0])

    def received() -> list[int]:
        # Woken now and then for nothing, which a wait takes along.
        assert ready(30)
        return list(fleet.wait(1, 0.0).copies)

    forked(fleet)
    begin_some(fleet, {1: 0})
    until(lambda: received() == [1])
    fleet.end(2)
    until(lambda: not fleet.wait(1, 0.0).copies and not ready(0.1))
    fleet.command({2: Call("count")})
    assert received() == [2]
    assert not forked(fleet, [2]).failures
    warm(fleet)
    begin(fleet, [0, 0, 0])
    seen: list[int] = []
    while len(seen) < 3:
        seen += received()
    assert sorted(seen) == [0, 1, 2]


def test_some_of_a_batch_of_all_can_be_waited_for(make: Make, tmp_path: Path) -> None:
    class Gated(Slow):
        def step(self, action: Any) -> Any:
            return super().step(0) if action else Faulty.step(self, 0)

    base = make(Gated, env_kwargs={"folder": str(tmp_path)})
    fleet = base.fleet(3)
    forked(fleet)
    for _ in range(3):
        warm(fleet)
        (tmp_path / "step").touch()
        begin(fleet, [0, 1, 0])
        assert list(fleet.wait(2).copies) == [0, 2] and fleet.busy == [1]
        assert not fleet.wait(1, 0.0).copies
        (tmp_path / "step").unlink()
        assert list(fleet.wait(1).copies) == [1]
        (tmp_path / "step").touch()
        begin(fleet, [1, 0, 1])
        until(lambda: list(fleet._copies.signalling.busy) == [1, 0, 1])  # type: ignore[attr-defined]
        assert select.select(fleet.fds(), [], [], 30)[0]
        assert list(fleet.wait(1, 0.0).copies) == [1] and fleet.busy == [0, 2]
        (tmp_path / "step").unlink()
        assert list(fleet.wait().copies) == [0, 2]


def test_commands_and_results(make: Make) -> None:
    base = make(Loaded)
    fleet = base.fleet(2)
    forked(fleet)
    fleet.command({0: SetAttr({"value": 5}), 1: Reseed(3)})
    assert fleet.wait().results == {}
    assert ask(fleet, "value") == {0: 5, 1: 0}
    assert ask(fleet, "add", 2) == {0: 7, 1: 2}


def test_a_step_that_goes_on_with_a_reset_gives_both(fleet: Fleet) -> None:
    forked(fleet, seed=1)
    for _ in range(WARM):
        finished = step(fleet, [Faulty.END, 0, 0], ops.STEP_RESET)
        assert list(finished.finals) == [0] and finished.finals[0][0][0] == 1
        assert fleet.observations.arrays[0][0, 0] == 0 and fleet.terminations.tolist() == [True, False, False]


def test_copies_of_several_environments_go_by_their_number(make: Make) -> None:
    base = make(*[lambda which=which: Loaded(size=which + 1) for which in range(4)])
    fleet = base.fleet(2)
    commands = first([2, 3])
    fleet.fork({0: commands[2], 1: commands[3]})
    fleet.wait()
    assert fleet.observations.arrays[0][:, 1].tolist() == [2, 3]


# Failures, copy by copy


def test_a_failure_changes_nothing_and_concerns_one_copy(fleet: Fleet) -> None:
    forked(fleet)
    warm(fleet)
    finished = step(fleet, [Faulty.BAD_SHAPE, 0, Faulty.KILL])
    assert {index: failure.kind for index, failure in finished.failures.items()} == {0: "raised", 2: "died"}
    assert fleet.observations.arrays[0][:, 0].tolist() == [WARM, WARM + 1, WARM]
    assert fleet.alive(0) and not fleet.alive(2)
    finished = step(fleet, [0, 0, 0])
    assert list(finished.failures) == [2] and "SIGKILL" in finished.failures[2].reason
    assert isinstance(finished.failures[2].error(), CopyDiedError)
    assert not forked(fleet, [2]).failures
    assert not step(fleet, [0, 0, 0]).failures


def test_a_copy_that_does_not_exist_fails_whatever_it_is_asked(fleet: Fleet) -> None:
    for _ in range(2):
        assert sorted(step(fleet, [0, 0, 0]).failures) == [0, 1, 2]
    forked(fleet, [1])
    for _ in range(WARM):
        finished = step(fleet, [0, 0, 0])
        assert sorted(finished.failures) == [0, 2] and "does not exist" in finished.failures[0].reason
    fleet.release([0, 1, 2])
    fleet.command({1: Call("count")})
    assert list(fleet.wait().failures) == [1]


def test_what_a_copy_finished_before_it_died_counts(fleet: Fleet) -> None:
    forked(fleet)
    warm(fleet)
    begin(fleet, [0, 0, 0])
    until(lambda: not any(fleet._copies.signalling.busy))  # type: ignore[attr-defined]
    pid = pid_of(fleet, 1)
    os.kill(pid, signal.SIGKILL)
    until(lambda: not Path(f"/proc/{pid}").exists())
    assert not fleet.wait().failures
    assert list(step(fleet, [0, 0, 0]).failures) == [1]


def test_ending_a_copy(fleet: Fleet) -> None:
    forked(fleet)
    begin_some(fleet, {0: Faulty.HANG, 1: 0})
    failure = fleet.end(0)
    assert failure.kind == "died" and fleet.busy in ([1], [])
    assert list(fleet.wait().copies) == [1] and not fleet.alive(0)
    assert fleet.end(0) == failure


def test_copies_are_replaced_whatever_they_are_doing(fleet: Fleet) -> None:
    forked(fleet)
    begin_some(fleet, {0: Faulty.HANG, 2: 0})
    before = [pid_of(fleet, index) for index in range(3)]
    fleet.fork(first([0, 1], seed=5))
    finished = fleet.wait()
    assert list(finished.copies) == [0, 1, 2] and not finished.failures
    assert fleet.observations.arrays[0].tolist() == [[0, 5], [0, 6], [1, 1]]
    assert pid_of(fleet, 0) != before[0] and pid_of(fleet, 2) == before[2]


# Time limits


@pytest.mark.parametrize(
    ("steps", "action", "place"), [(1, Faulty.HANG, "hang_here"), (WARM, Faulty.HANG_IN_C, "step")]
)
def test_a_step_has_its_limit(base: BaseHandle, steps: int, action: int, place: str) -> None:
    fleet = base.fleet(3, TimeLimits(step=0.5))
    forked(fleet)
    for _ in range(steps):
        step(fleet, [0, 0, 0])
        assert fleet.next_deadline is None
    started = time.monotonic()
    begin(fleet, [0, action, 0])
    deadline = fleet.next_deadline
    assert deadline is not None and started + 0.5 <= deadline <= time.monotonic() + 0.5
    finished = fleet.wait()
    assert time.monotonic() >= deadline
    failure = finished.failures[1]
    assert list(finished.failures) == [1] and failure.kind == "timeout" and "0.5 s" in failure.reason
    assert f"in {place}" in failure.stack and isinstance(failure.error(), CopyTimeoutError)
    assert fleet.next_deadline is None and not fleet.alive(1)
    assert fleet.observations.arrays[0][:, 0].tolist() == [steps + 1, steps, steps + 1]
    fleet.close()


def test_a_limit_holds_though_others_are_always_ready(base: BaseHandle) -> None:
    fleet = base.fleet(2, TimeLimits(step=0.5))
    forked(fleet)
    begin_some(fleet, {0: Faulty.HANG})
    finished = Finished([])
    while not finished.failures:
        begin_some(fleet, {1: 0})
        finished = fleet.wait(1)
    assert finished.failures[0].kind == "timeout"
    fleet.close()


def test_a_wait_that_is_given_up_ends_nobody_in_time(base: BaseHandle) -> None:
    fleet = base.fleet(1, TimeLimits(step=30.0))
    forked(fleet)
    begin(fleet, [Faulty.HANG])
    assert list(fleet.wait(None, 0.1).copies) == [] and fleet.alive(0) and fleet.busy == [0]
    fleet.close()


@pytest.mark.parametrize("when", ["fork", "reset", "command"])
def test_a_reset_has_its_own_limit(make: Make, tmp_path: Path, when: str) -> None:
    base = make(Slow, env_kwargs={"folder": str(tmp_path)})
    fleet = base.fleet(2, TimeLimits(step=30.0, reset=0.4))
    if when != "fork":
        forked(fleet)
    (tmp_path / "reset").touch()
    if when == "reset":
        begin(fleet, [0, 0], ops.RESET)
        finished = fleet.wait()
    elif when == "command":
        fleet.command({0: ops.Reset(1), 1: ops.Reset(2)})
        finished = fleet.wait()
    else:
        finished = forked(fleet)
    assert {failure.kind for failure in finished.failures.values()} == {"timeout"} and len(finished.failures) == 2
    assert "0.4 s" in finished.failures[1].reason
    (tmp_path / "reset").unlink()
    assert not forked(fleet).failures


@pytest.mark.parametrize("reset", [None, 1.0])
def test_a_step_that_goes_on_with_a_reset_has_the_time_of_both(make: Make, tmp_path: Path, reset: float | None) -> None:
    base = make(Slow, env_kwargs={"folder": str(tmp_path)})
    fleet = base.fleet(2, TimeLimits(step=1.5, reset=reset))
    forked(fleet)
    (tmp_path / "reset").touch()
    begin(fleet, [Faulty.END, 0], ops.STEP_RESET)
    if reset is None:
        assert list(fleet.wait(None, 3.0).copies) == [1] and fleet.next_deadline is None
        (tmp_path / "reset").unlink()
        finished = fleet.wait()
        assert list(finished.finals) == [0] and not finished.failures
    else:
        started = time.monotonic()
        finished = fleet.wait()
        assert time.monotonic() - started > 2.0
        assert "2.5 s" in finished.failures[0].reason and not finished.finals


def test_a_stopped_copy_is_ended(base: BaseHandle) -> None:
    fleet = base.fleet(2, TimeLimits(step=0.4))
    forked(fleet)
    warm(fleet)
    os.kill(pid_of(fleet, 0), signal.SIGSTOP)
    finished = step(fleet, [0, 0])
    assert list(finished.failures) == [0] and "stopped" in finished.failures[0].stack
    assert not forked(fleet).failures
    fleet.close()


def test_a_stopped_copy_does_not_hold_up_a_long_message(make: Make) -> None:
    class Talks(Faulty):
        action_space = gym.spaces.Text(5_000_000)  # type: ignore[assignment]

        def step(self, action: Any) -> Any:
            return super().step(0)

    base = make(Talks)
    fleet = base.fleet(2, TimeLimits(step=0.5))
    forked(fleet)
    os.kill(pid_of(fleet, 0), signal.SIGSTOP)
    fleet.step([], [["x" * 4_000_000, "y"]], bytes([ops.STEP]) * 2)
    finished = fleet.wait()
    assert {index: failure.kind for index, failure in finished.failures.items()} == {0: "timeout"}


# Forks that cannot be made


def test_a_base_that_cannot_be_forked_fails_its_copies(make: Make) -> None:
    class Threaded(Faulty):
        def __init__(self) -> None:
            super().__init__()
            threading.Thread(target=time.sleep, args=(1000,), daemon=True, name="the pump").start()

    base = make(Threaded)
    fleet = base.fleet(2)
    finished = forked(fleet, [1])
    assert list(finished.copies) == [1] and finished.failures[1].kind == "fork"
    assert isinstance(finished.failures[1].error(), ForkUnsafeError) and "the pump" in str(finished.failures[1].error())
    fleet.command({1: Call("count")})
    assert fleet.wait().failures == finished.failures


def test_a_fork_in_part(make: Make) -> None:
    class Crowded(Faulty):
        """The base may have only so many processes more, as a container's limit makes it."""

        def warm(self) -> None:
            import prized_gym.engines.local.forking as forking

            fork, left = forking.fork, [3]

            def limited() -> int:
                left[0] -= 1
                if left[0] < 0:
                    raise BlockingIOError(11, "Resource temporarily unavailable")
                return fork()

            forking.fork = limited

    base = make(Crowded, warm_up=lambda env: env.warm())
    fleet = base.fleet(4)
    finished = forked(fleet)
    assert list(finished.failures) == [3] and [fleet.alive(index) for index in range(4)] == [True] * 3 + [False]
    error = finished.failures[3].error()
    assert isinstance(error, PrizedGymError) and "operating system refused" in str(error) and "[3]" in str(error)
    for _ in range(WARM):
        assert list(step(fleet, [0] * 4).failures) == [3]
    finished = forked(fleet, [1, 3])
    assert sorted(finished.failures) == [1, 3] and fleet.alive(0) and not fleet.alive(1)


def test_a_soft_limit_of_descriptors_is_raised_when_it_is_met(base: BaseHandle) -> None:
    fleet = base.fleet(40)
    forked(fleet, [0])
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    low = len(os.listdir("/proc/self/fd")) + 20
    resource.setrlimit(resource.RLIMIT_NOFILE, (low, limits[1]))
    try:
        assert not forked(fleet, range(1, 40)).failures
        assert low < resource.getrlimit(resource.RLIMIT_NOFILE)[0] <= limits[1]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    fleet.close()


TOO_FEW = """
import os, resource, sys
sys.path.insert(0, {tests!r})
from prized_gym import Base
from tools.fleets import first
from zoo.faulty import Faulty
with Base(Faulty) as base:
    fleet = base.fleet(40)
    fleet.fork(first([0]))
    assert not fleet.wait().failures
    low = len(os.listdir("/proc/self/fd")) + 20
    resource.setrlimit(resource.RLIMIT_NOFILE, (low, low))
    fleet.fork(first(range(1, 40)))
    before = len(os.listdir("/proc/self/fd"))
    finished = fleet.wait()
    assert len(finished.failures) == 39 and fleet.alive(0)
    said = str(finished.failures[1].error())
    assert "ulimit -Hn" in said and str(low) in said, said
    assert len(os.listdir("/proc/self/fd")) == before
    fleet.fork(first(range(1, 4)))
    assert not fleet.wait().failures
    fleet.close()
"""


def test_too_few_descriptors_fail_the_copies() -> None:
    script = TOO_FEW.format(tests=str(Path(__file__).parents[1]))
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


def test_a_base_that_does_not_answer(base: BaseHandle, monkeypatch: pytest.MonkeyPatch) -> None:
    from prized_gym.engines.local import spawning

    monkeypatch.setattr(spawning, "FORK_TIMEOUT", 0.5)
    before = len(own_descendants())
    fleet = base.fleet(2)
    forked(fleet, [1])
    pid = int(base.where.split()[1])
    os.kill(pid, signal.SIGSTOP)
    try:
        finished = forked(fleet, [0])
    finally:
        os.kill(pid, signal.SIGCONT)
    assert finished.failures[0].kind == "fork" and "0.5 s" in finished.failures[0].reason
    assert not forked(fleet, [0], seed=9).failures and fleet.alive(1)
    # The forks that came late are ended, and nobody's rows are theirs.
    assert not step(fleet, [0, 0]).failures
    assert fleet.observations.arrays[0][0].tolist() == [1, 1]
    fleet.close()
    until(lambda: len(own_descendants()) <= before)


@pytest.mark.parametrize("end", ["killed", "overdue"])
def test_an_observation_that_is_cut_short_is_not_the_last(make: Make, end: str) -> None:
    """The writing is what is made to stop in the middle: nothing else can be relied on to do so."""
    base = make(lambda: Wide(end))
    fleet = base.fleet(2, TimeLimits(step=2.0))
    forked(fleet)
    for action in (3, 4):
        assert not step(fleet, [action, action]).failures
    finished = step(fleet, [5, Wide.CUT])
    assert finished.failures[1].kind == ("died" if end == "killed" else "timeout")
    assert [np.unique(row).tolist() for row in fleet.observations.arrays[0]] == [[5], [4]]


class Wide(gym.Env[Any, Any]):
    """Observes many times its action; writing ``CUT`` stops in the middle, which ``end`` says how."""

    CUT = 9
    observation_space = gym.spaces.Box(0, 9, (5000,), np.uint8)
    action_space = gym.spaces.Discrete(10)

    def __init__(self, end: str) -> None:
        real = ObservationBuffer.writer

        def writer(self: ObservationBuffer, index: int) -> Callable[[Any], list[Any]]:
            write = real(self, index)

            def cut(observation: Any) -> list[Any]:
                if observation[0] == Wide.CUT:
                    self.arrays[0][index, :2500] = Wide.CUT
                    os.kill(os.getpid(), signal.SIGKILL) if end == "killed" else time.sleep(1000)
                return write(observation)

            return cut

        ObservationBuffer.writer = writer  # type: ignore[method-assign]

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        return np.zeros(5000, np.uint8), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return np.full(5000, action, np.uint8), 0.0, False, False, {}


def test_what_is_busy_is_not_asked_for_more(fleet: Fleet) -> None:
    forked(fleet)
    begin_some(fleet, {1: 0})
    for begun in (
        lambda: begin(fleet, [0, 0, 0]),
        lambda: begin_some(fleet, {1: 0}),
        lambda: fleet.command({1: Call("count")}),
    ):
        with pytest.raises(RuntimeError, match=r"copies \[1\] have begun something"):
            begun()
    assert fleet.wait().copies == [1] and fleet.whole


# A base that dies


@pytest.mark.parametrize("steps", [0, WARM])
def test_a_base_is_built_anew_and_the_other_copies_stay_lost(make: Make, steps: int) -> None:
    base = make(Faulty)
    fleet = base.fleet(3)
    forked(fleet)
    for _ in range(steps):
        step(fleet, [0, 0, 0])
    pids = [pid_of(fleet, index) for index in range(3)]
    kill_base(base)
    # A copy that is not dead yet may still take a step.
    until(lambda: not base.alive and not any(running(pid) for pid in pids))
    finished = step(fleet, [0, 0, 0])
    assert {failure.kind for failure in finished.failures.values()} == {"base"} and len(finished.failures) == 3
    error = finished.failures[1].error()
    assert isinstance(error, BaseDiedError) and "copy 1" in str(error) and "SIGKILL" in str(error)
    fleet.fork(first([1], seed=4))
    assert not fleet.wait().failures and base.alive
    assert fleet.observations.arrays[0].tolist() == [[steps, int(steps > 0)], [0, 5], [steps, 2 - int(steps > 0)]]
    for number in range(WARM):
        finished = step(fleet, [0, 0, 0])
        assert sorted(finished.failures) == [0, 2] and "lost with its base" in finished.failures[0].reason
        assert fleet.observations.arrays[0][:, 0].tolist() == [steps, number + 1, steps]
    assert not forked(fleet).failures and not step(fleet, [0, 0, 0]).failures


def test_a_base_that_died_unnoticed_is_built_anew_within_the_fork(make: Make) -> None:
    base = make(Faulty)
    fleet = base.fleet(2)
    kill_base(base)
    assert not forked(fleet).failures
    kill_base(base)
    until(lambda: not base.alive)
    assert not forked(fleet, [0]).failures
    assert list(step(fleet, [0, 0]).failures) == [1]


def test_a_base_that_dies_in_mid_batch(make: Make) -> None:
    base = make(Faulty)
    fleet = base.fleet(2)
    forked(fleet)
    warm(fleet)
    begin(fleet, [Faulty.HANG, 0])
    kill_base(base)
    finished = fleet.wait()
    assert finished.failures[0].kind == "base"
    assert not forked(fleet).failures


def test_a_base_that_dies_of_every_fork_fails_its_copies(make: Make) -> None:
    class Brittle(Faulty):
        def warm(self) -> None:
            os.register_at_fork(before=lambda: os.kill(os.getpid(), signal.SIGSEGV))

    base = make(Brittle, warm_up=lambda env: env.warm())
    fleet = base.fleet(2)
    finished = forked(fleet)
    assert {failure.kind for failure in finished.failures.values()} == {"base"} and len(finished.failures) == 2
    assert isinstance(finished.failures[0].error(), BaseDiedError)


def test_a_rebuilt_base_serves_every_fleet(make: Make, tmp_path: Path) -> None:
    log = tmp_path / "log"
    base = make(Loaded, env_kwargs={"log": str(log)})
    one, other = base.fleet(2), base.fleet(3)
    for fleet in (one, other):
        forked(fleet)
        warm(fleet)
    kill_base(base)
    until(lambda: not base.alive)
    assert not forked(one).failures
    assert sorted(step(other, [0, 0, 0]).failures) == [0, 1, 2]
    assert not forked(other, [2]).failures
    for _ in range(WARM):
        assert not step(one, [0, 0]).failures
        assert sorted(step(other, [0, 0, 0]).failures) == [0, 1]
    assert log.read_text().count("built") == 2


def test_two_threads_that_find_the_base_dead_build_it_once(make: Make, tmp_path: Path) -> None:
    log = tmp_path / "log"
    base = make(Loaded, env_kwargs={"log": str(log)})
    fleets = [base.fleet(2) for _ in range(2)]
    kill_base(base)
    until(lambda: not base.alive)
    threads = [threading.Thread(target=forked, args=(fleet,)) for fleet in fleets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for fleet in fleets:
        assert not step(fleet, [0, 0]).failures
    assert log.read_text().count("built") == 2


def test_a_rebuilt_base_is_reset_as_before(make: Make) -> None:
    base = make(Faulty)
    base.reset_environment(11)
    fleet = base.fleet(1)
    start = {0: ops.Reset(5, None, ops.Fresh(5), from_base=True)}
    for _ in range(2):
        fleet.fork(start)
        assert not fleet.wait().failures
        assert fleet.observations.arrays[0].tolist() == [[0, 11]]
        kill_base(base)
        until(lambda: not base.alive)


def test_a_base_that_cannot_be_built_again(make: Make, tmp_path: Path) -> None:
    class Once(Faulty):
        def __init__(self) -> None:
            super().__init__()
            (tmp_path / "built").touch(exist_ok=False)

    base = make(Once)
    fleet = base.fleet(2)
    forked(fleet)
    kill_base(base)
    until(lambda: not base.alive)
    for _ in range(2):
        with pytest.raises(FileExistsError):
            fleet.fork(first([0]))
        assert fleet.busy == []
    assert sorted(step(fleet, [0, 0]).failures) == [0, 1]
    (tmp_path / "built").unlink()
    assert not forked(fleet).failures


def test_a_closed_base(make: Make, base: BaseHandle) -> None:
    closed = make(Faulty)
    fleet = closed.fleet(2)
    forked(fleet, [0])
    closed.close()
    closed.close()
    assert not closed.alive
    finished = step(fleet, [0, 0])
    assert {failure.kind for failure in finished.failures.values()} == {"base"}
    assert isinstance(finished.failures[0].error(), BaseDiedError) and "closed" in finished.failures[1].reason
    for refused in (lambda: forked(fleet), lambda: closed.fleet(1), closed.revive, lambda: closed.reset_environment(1)):
        with pytest.raises(BaseDiedError, match="closed"):
            refused()
    fleet.close()


# Branching


@pytest.mark.parametrize("steps", [1, WARM])
def test_a_branch_has_what_its_source_has(make: Make, steps: int) -> None:
    base = make(Loaded)
    fleet = base.fleet(4)
    forked(fleet, [0, 1, 2])
    for _ in range(steps):
        step(fleet, [1, 0, 0, 0])
    fleet.branch(0, [1, 3])
    assert fleet.busy == [0, 1, 3]
    finished = fleet.wait()
    assert list(finished.copies) == [0, 1, 3] and not finished.failures and not finished.results
    assert fleet.observations.arrays[0][:, 0].tolist() == [steps, steps, 0, steps]
    assert fleet.rewards.tolist() == [1, 1, 1, 1]
    pids = ask(fleet, "pid")
    assert pids == {index: pid_of(fleet, index) for index in range(4)} and len(set(pids.values())) == 4
    for _ in range(WARM):
        assert not step(fleet, [1, 1, 1, 0]).failures
    assert fleet.observations.arrays[0][:, 0].tolist() == [steps + WARM, steps + WARM, WARM, steps]
    fleet.branch(1, [])
    assert list(fleet.wait().copies) == [1]


def test_a_branch_of_a_dead_copy(fleet: Fleet) -> None:
    forked(fleet)
    warm(fleet)
    pid = pid_of(fleet, 1)
    os.kill(pid, signal.SIGKILL)
    fleet.branch(1, [0])
    finished = fleet.wait()
    assert list(finished.copies) == [0, 1] and sorted(finished.failures) == [0, 1]
    assert finished.failures[1].kind == "died" and "SIGKILL" in finished.failures[1].reason
    assert finished.failures[0].kind == "fork" and "copy 1" in str(finished.failures[0].error())
    assert not step(fleet, [0, 0, 0]).failures.keys() - {0, 1}
    assert not forked(fleet).failures


@pytest.mark.parametrize("refused", ["first", "second"])
def test_a_branch_that_is_refused_leaves_its_source(make: Make, refused: str) -> None:
    class Alone(Faulty):
        def forbid(self) -> int:
            """Of the two forks that a branch takes, let the first or the second fail for the second branch."""
            import prized_gym.engines.local.forking as forking

            fork, source, branches = forking.fork, os.getpid(), [0]

            def limited() -> int:
                branches[0] += os.getpid() == source
                if branches[0] == 2 and (os.getpid() == source) == (refused == "first"):
                    raise BlockingIOError(11, "Resource temporarily unavailable")
                return fork()

            forking.fork = limited
            return len(os.listdir("/proc/self/fd"))

        def fds(self) -> int:
            return len(os.listdir("/proc/self/fd"))

    base = make(Alone)
    fleet = base.fleet(4)
    forked(fleet)
    before = ask(fleet, "forbid", indices=[0])
    fleet.branch(0, [1, 2, 3])
    finished = fleet.wait()
    assert {index: failure.kind for index, failure in finished.failures.items()} == {2: "fork", 3: "fork"}
    assert ("temporarily unavailable" if refused == "first" else "could not be forked") in finished.failures[2].reason
    assert ask(fleet, "fds", indices=[0]) == before
    for _ in range(WARM):
        assert sorted(step(fleet, [0, 0, 0, 0]).failures) == [2, 3]


def test_a_branch_with_a_dead_base(make: Make) -> None:
    base = make(Faulty)
    fleet = base.fleet(2)
    forked(fleet)
    kill_base(base)
    fleet.branch(0, [1])
    finished = fleet.wait()
    assert sorted(finished.failures) == [0, 1] and finished.failures[0].kind == "base"
    assert not forked(fleet).failures


# The end


def test_close_leaves_nothing(make: Make) -> None:
    def open_files() -> list[str]:
        paths = []
        for fd in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                paths.append(os.readlink(f"/proc/self/fd/{fd}"))
        # Memory is let go with the last array over it, which the fleet itself still has.
        return sorted(path.split(":")[0] for path in paths if "memfd" not in path)

    before, files = own_descendants(), open_files()
    base = make(Faulty)
    for busy in (False, True):
        fleet = base.fleet(3)
        forked(fleet)
        fleet.branch(0, [1])
        fleet.wait()
        if busy:
            begin_some(fleet, {0: Faulty.HANG, 1: 0})
        below = [pid_of(fleet, index) for index in range(3)]
        fleet.close()
        fleet.close(0.0)
        until(lambda below=below: not any(Path(f"/proc/{pid}").exists() for pid in below))
        with pytest.raises(BaseDiedError, match="closed"):
            fleet.step([np.zeros(3, int)], [], bytes(3))
    kill_base(base)
    base.close()
    until(lambda: own_descendants() == before)
    assert open_files() == files


def test_a_fork_of_the_trainer_has_no_copies(base: BaseHandle) -> None:
    fleet = base.fleet(1)
    forked(fleet)
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(BaseException):
            fleet.wait(1, 0.0)
            os._exit(1)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    assert not step(fleet, [0]).failures
    fleet.close()

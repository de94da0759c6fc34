"""The gate: what may begin, and what may be waited for."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from gymnasium.error import AlreadyPendingCallError, ClosedEnvironmentError, NoAsyncCallError

from prized_gym.errors import InterruptedStepError
from prized_gym.vector.live_fleet import StillPendingError
from prized_gym.vector.pending import Gate, PendingCall, PendingReset, PendingStep

CHECKS: list[Callable[[Gate], object]] = [
    lambda gate: gate.check_idle("call"),
    lambda gate: gate.check_sending(),
    lambda gate: gate.check_receiving(1),
    lambda gate: gate.check_pending(PendingStep),
]


@pytest.fixture
def gate() -> Gate:
    return Gate("ForkedVectorEnv")


def test_an_idle_one_lets_operations_begin(gate: Gate) -> None:
    gate.check_idle("step_async")
    gate.check_idle("reset_async", mends=True)
    gate.check_sending()
    with pytest.raises(NoAsyncCallError, match=r"`step_wait` without any prior call to `step_async`"):
        gate.check_pending(PendingStep)
    with pytest.raises(NoAsyncCallError, match="0 copies pending"):
        gate.check_receiving(1)


@pytest.mark.parametrize("check", CHECKS)
def test_a_closed_one_refuses_everything(gate: Gate, check: Callable[[Gate], object]) -> None:
    gate.pending = PendingStep({})
    gate.closed = True
    with pytest.raises(ClosedEnvironmentError, match="`ForkedVectorEnv`, after a call to `close"):
        check(gate)


def test_what_is_pending_is_waited_for_and_nothing_else_begins(gate: Gate) -> None:
    gate.pending = pending = PendingReset({0: 1}, [None])
    assert gate.check_pending(PendingReset) is pending
    for kind in (PendingStep, PendingCall):
        with pytest.raises(NoAsyncCallError):
            gate.check_pending(kind)
    for mends in (True, False):
        with pytest.raises(AlreadyPendingCallError, match="`step_async` while waiting for a pending call to `reset`"):
            gate.check_idle("step_async", mends)
    with pytest.raises(AlreadyPendingCallError):
        gate.check_sending()


def test_sent_copies_are_to_be_received(gate: Gate) -> None:
    gate.sent.copies.update([3, 1])
    gate.sent.starting[3] = 7
    gate.check_sending()
    gate.check_receiving(2)
    with pytest.raises(NoAsyncCallError, match="2 copies pending"):
        gate.check_receiving(3)
    with pytest.raises(AlreadyPendingCallError, match=r"\[1, 3\]"):
        gate.check_idle("reset_async", mends=True)
    assert gate.sent.take_starting([1]) == {} and gate.sent.take_starting([3]) == {3: 7}
    gate.check_idle("reset_async")


@pytest.mark.parametrize("check", CHECKS)
def test_a_broken_one_refuses_all_but_a_reset(gate: Gate, check: Callable[[Gate], object]) -> None:
    gate.pending = PendingStep({})
    gate.sent.copies.add(0)
    gate.fail(KeyboardInterrupt())
    with pytest.raises(InterruptedStepError, match="interrupted, and the copies are at different points: call reset"):
        check(gate)
    gate.check_idle("reset_async", mends=True)
    gate.mend()
    gate.check_idle("step_async")


def test_only_an_interrupt_between_two_halves_breaks(gate: Gate) -> None:
    gate.leave(KeyboardInterrupt(), None)
    assert gate.broken is None
    gate.pending = pending = PendingCall([0])
    gate.leave(KeyboardInterrupt(), pending)
    assert gate.broken is None
    gate.leave(TimeoutError(), None)
    assert gate.broken is not None and gate.pending is None


def test_an_interrupt_between_send_and_recv_breaks(gate: Gate) -> None:
    gate.sent.copies.add(0)
    gate.leave(KeyboardInterrupt(), None, 1)
    assert gate.broken is None
    gate.leave(KeyboardInterrupt(), None, 0)
    assert gate.broken is not None


def test_a_wait_that_is_given_up_breaks_nothing(gate: Gate) -> None:
    gate.pending = PendingStep({})
    gate.fail(StillPendingError())
    assert gate.broken is None and gate.check_pending(PendingStep)
    gate.fail(ValueError())
    assert gate.broken is not None and "ended by ValueError" in gate.broken

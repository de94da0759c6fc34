"""Blocking calls in threads of their own, and one event loop behind them all."""

from __future__ import annotations

import asyncio
import threading

import pytest

from prized_gym import background
from prized_gym.background import Threads
from tools.processes import eventually

LONG = 30.0


def test_a_call_gives_its_result_or_its_error() -> None:
    threads = Threads(2)
    assert threads.submit(lambda: 1 + 1).result(LONG) == 2
    with pytest.raises(ZeroDivisionError):
        threads.submit(lambda: 1 // 0).result(LONG)
    # An interpreter that is told to end inside a call ends that call only.
    with pytest.raises(SystemExit):
        threads.submit(lambda: exec("raise SystemExit(3)")).result(LONG)
    assert threads.submit(lambda: "fine").result(LONG) == "fine"


def test_no_more_calls_at_once_than_there_may_be() -> None:
    threads, gate, most = Threads(3), threading.Event(), 3
    running = threading.Semaphore(0)

    def call() -> bool:
        running.release()
        return gate.wait(LONG)

    calls = [threads.submit(call) for _ in range(most)]
    for _ in range(most):
        assert running.acquire(timeout=LONG)
    waiting = [threads.submit(call) for _ in range(2)]
    assert not any(each.running() or each.done() for each in waiting)
    gate.set()
    assert all(each.result(LONG) for each in calls + waiting)


def test_a_thread_that_is_free_is_used_again() -> None:
    threads = Threads(8)
    names = set()
    for _ in range(5):
        names.add(threads.submit(threading.get_ident).result(LONG))
        assert eventually(lambda: threads._idle == 1, LONG)
    assert len(names) == 1


def test_a_call_that_waits_can_be_cancelled() -> None:
    threads, gate = Threads(1), threading.Event()
    first = threads.submit(lambda: gate.wait(LONG))
    second, third = threads.submit(lambda: 2), threads.submit(lambda: 3)
    assert second.cancel()
    gate.set()
    assert first.result(LONG) and third.result(LONG) == 3


def test_coroutines_run_in_the_one_loop() -> None:
    async def where() -> tuple[asyncio.AbstractEventLoop, int]:
        return asyncio.get_running_loop(), threading.get_ident()

    first, second = background.run(where(), LONG), background.start(where()).result(LONG)
    assert first == second and first[0] is background.loop() and first[1] != threading.get_ident()


def test_what_takes_too_long_is_cancelled() -> None:
    cancelled = threading.Event()

    async def endless() -> None:
        try:
            await asyncio.sleep(LONG)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    with pytest.raises(TimeoutError):
        background.run(endless(), 0.01)
    assert cancelled.wait(LONG)


def test_the_loop_does_not_wait_for_itself() -> None:
    async def inner() -> None:
        """Never begun."""

    async def outer() -> None:
        background.run(inner())

    with pytest.raises(RuntimeError, match="wait for the thread it runs in"):
        background.run(outer(), LONG)


def test_a_coroutine_may_wait_for_a_blocking_call() -> None:
    async def ask() -> tuple[int, int]:
        return await background.in_thread(threading.get_ident), await background.in_thread(lambda: 5, urgent=True)

    thread, answer = background.run(ask(), LONG)
    assert answer == 5 and thread not in (threading.get_ident(), background._background().thread.ident)


def test_urgent_calls_do_not_wait_behind_those_that_hang() -> None:
    gate = threading.Event()
    hanging = [background.submit(lambda: gate.wait(LONG)) for _ in range(background.MOST_THREADS + 1)]
    try:
        assert background.submit(lambda: "ended it", urgent=True).result(LONG) == "ended it"
        assert not hanging[-1].running()
    finally:
        gate.set()
    assert all(each.result(LONG) for each in hanging)


@pytest.mark.timeout(30)
@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt()])
def test_the_loop_outlives_what_exits_in_it(error: BaseException) -> None:
    async def leave() -> None:
        raise error

    async def stay() -> int:
        return 5

    with pytest.raises(type(error)):
        background.run(leave(), 20.0)
    assert background.run(stay(), 20.0) == 5

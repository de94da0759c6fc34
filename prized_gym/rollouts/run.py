"""``rollouts()``: what users call, and what they iterate over."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeAlias

from prized_gym import background, engines
from prized_gym.arguments import at_least_one, label_map, one_of
from prized_gym.arguments import seconds as check_seconds
from prized_gym.base import Base
from prized_gym.pricing import Prices
from prized_gym.progress import Bar, bar
from prized_gym.rollouts.plan import RolloutPlan
from prized_gym.rollouts.policy import UserLoop, takes
from prized_gym.rollouts.queue import RolloutQueue, Work
from prized_gym.rollouts.record import Rollout, Summary, Totals
from prized_gym.sharing import Lease, find_base

if TYPE_CHECKING:
    from prized_gym.protocols import EpisodeProtocol

DEFAULT_TIMEOUT = 600.0
_CLOSE_TIMEOUT = 30.0

_Event: TypeAlias = "tuple[Work, Rollout] | BaseException | None"
"""A rollout that ended, an error that ends the run, or its end."""


def rollouts(
    base: Any,
    seeds: Iterable[int] | None = None,
    copies: int = 8,
    *,
    policy: Callable[[Any, Any], Any] | None = None,
    batched: bool = False,
    request: str | EpisodeProtocol | None = None,
    command: str | None = None,
    episode: Callable[..., Any] | None = None,
    reward: str | Callable[[Any], float] | None = None,
    tasks: Sequence[Any] | None = None,
    per_task: int = 1,
    retries: int = 0,
    timeout: float | None = DEFAULT_TIMEOUT,
    reset_in: str = "copy",
    prices: Prices | None = None,
    labels: Mapping[str, str] | None = None,
    progress: bool = True,
    **base_options: Any,
) -> Rollouts:
    """Play many episodes, each in a fresh fork of ``base``, and give each one's reward as it ends.

    At most ``copies`` forks are alive at once. Places that are free are forked together, and a copy is deleted as its
    episode ends. Iterating drives the run, and its end, a ``break`` or an exception included, deletes what is left.

        >>> import prized_gym
        >>> base = prized_gym.Base("CartPole-v1")
        >>> runs = prized_gym.rollouts(base, seeds=range(3), policy=lambda observation, info: 0, progress=False)
        >>> sorted((one.seed, one.length) for one in runs)
        [(0, 11), (1, 10), (2, 9)]
        >>> runs.summary().failed
        0
        >>> base.close()

    In an event loop or a notebook cell, ``async for`` does the same; what it leaves early is gone as soon as the loop has run
    on, or with ``async with`` at its end.

    Args:
        base: a :class:`prized_gym.Base`, which stays open; or whatever ``Base`` takes, to be set up for this run with
            ``base_options`` (``engine`` and the options of ``Base``).
        seeds: one per rollout, such as ``range(100)``; a generator is read as places become free. With ``tasks``: one per
            rollout, task after task, or None for 0, 1, 2, …
        copies: the most alive at once.
        policy: acts in an environment, on every engine: ``policy(observation, info) -> action``, or a coroutine function,
            which is asked for several copies at once. One call at a time otherwise.
        batched: the policy takes a batch of observations and a list of infos, of the copies that wait for an action, and
            returns a batch of actions.
        request: plays an episode by one HTTP request to the server in a sandbox: a target in which ``{seed}`` and
            ``{task}`` are filled in, such as ``"/rollout?seed={seed}"``, or an ``EpisodeProtocol``. The answer is JSON.
        command: plays an episode by one shell command in a sandbox, ``{seed}`` and ``{task}`` filled in and quoted. The
            last line of its output is the reward, or a JSON object with it.
        episode: plays an episode: ``episode(copy, seed)``, or ``episode(copy, seed, task)``, with a
            :class:`prized_gym.Copy`. A plain one runs in a thread, ``copies`` of them at once; a coroutine function in
            the event loop of the ``async for``, else in one of its own. Returns the reward, or a dict with it.
        reward: where the reward is: the key in the answer, the JSON or the dict (``"reward"``), or a function from the
            answer, the whole output or what ``episode`` returned to it.
        tasks: played ``per_task`` times each, in groups: for GRPO or pass@k. Into ``request`` and ``command`` a task that
            is no string goes as JSON. With a policy it becomes the ``options`` of the reset (one that is no dict as
            ``{"task": task}``), and a group starts from one state: reset with its first seed, then given a random
            state by each rollout's own.
        per_task: G, the rollouts of each task.
        retries: how often a rollout that failed is tried again, in a fresh fork with the same seed.
        timeout: seconds a rollout may take, what the policy takes included, before its copy is ended. None for no limit.
        reset_in: with a policy, ``"base"`` starts every rollout in the state the base was reset to.
        prices: for ``cost_usd``: of a sandbox of the size its base was set up with (1 vCPU, 1 GB where that was left open),
            or of the CPU time and memory that a copy on this machine used.
        labels: of the sandboxes forked.
        progress: show a bar with the mean reward so far.
        **base_options: where ``base`` is no ``Base``.

    Returns:
        An iterable, and asynchronous iterable, of :class:`Rollout`, to be iterated once, with ``summary()`` and ``close()``.

    Raises:
        TypeError, ValueError: arguments that do not fit.
        EngineUnavailableError: ``request``, ``command`` or ``episode`` with a base that is no sandbox.
        BaseDiedError: while iterating: the base was closed, or it died, is a sandbox, and those under way have ended. On other
            engines, and by the next call, a base that died is built anew from its recipe.
    """
    ways = {"policy": policy, "request": request, "command": command, "episode": episode}
    given = [name for name, value in ways.items() if value is not None]
    if len(given) != 1:
        raise TypeError(
            f"rollouts() takes one of policy=, request=, command= and episode=, got {', '.join(given) or 'none'}"
        )
    if policy is None and batched:
        raise TypeError("batched=True says how policy= is called: there is no policy")
    if policy is not None and (not callable(policy) or not takes(policy, 2)):
        raise TypeError(f"policy must be a callable that takes (observation, info), got {policy!r}")
    if policy is not None and reward is not None:
        raise TypeError("reward= says where an answer has its reward; with policy= it is the environment's")
    if policy is None and reset_in != "copy":
        raise TypeError(f"reset_in={reset_in!r} concerns an environment: there is no policy that acts in one")
    if tasks is not None and reset_in == "base" and policy is not None:
        raise ValueError("tasks are options of the reset, and with reset_in='base' there is one reset, in the base")
    one_of("reset_in", reset_in, ("copy", "base"))
    at_least_one("copies", copies)
    check_seconds("timeout", timeout)
    labels = label_map(labels)
    queue = RolloutQueue(seeds, tasks, per_task, retries)
    lease = _find(base, progress, base_options)
    found = lease.base
    try:
        if found.num_envs not in (None, 1):
            raise ValueError(
                f"the base was set up for {found.num_envs} copies of their own kinds: rollouts need one kind"
            )
        plan = RolloutPlan(
            found,
            given[0],
            ways[given[0]],
            # Places for more than there is to play would only take memory.
            copies=copies if queue.total is None else min(copies, max(1, queue.total)),
            batched=batched,
            reward=reward,
            timeout=timeout,
            reset_in=reset_in,
            prices=prices,
            labels=labels,
            with_tasks=tasks is not None,
        )
        found.revive()
        plan.check()
        return Rollouts(plan, queue, lease, progress)
    except BaseException:
        lease.release()
        raise


def _find(base: Any, progress: bool, options: Mapping[str, Any]) -> Lease:
    """The base that a run forks. An env id is not shared here, so that the base is this run's alone."""
    is_kept = isinstance(base, str) and engines.load(options.get("engine")).is_id(base)
    if isinstance(base, Base) or is_kept:
        return find_base(base, None, progress, options)
    made = Base(base, progress=progress, **options)
    return Lease(made, made.close)


class Rollouts:
    """Rollouts under way, as :func:`rollouts` returns them: iterate over them once."""

    def __init__(self, plan: RolloutPlan, queue: RolloutQueue, lease: Lease, progress: bool) -> None:
        self._plan = plan
        self._queue = queue
        self._lease = lease
        self._progress = progress
        self._totals = Totals()
        self._begun = False
        self._closed = False
        self._end: Callable[[], None] | None = None
        plan.base.before_closing(self)

    # Iterating

    def __iter__(self) -> Iterator[Rollout]:
        self._begin()
        return self._counted(self._in_this_thread() if self._steps_here else self._from_elsewhere())

    def __aiter__(self) -> AsyncIterator[Rollout]:
        self._begin()
        return self._async()

    def __len__(self) -> int:
        if self._queue.total is None:
            raise TypeError("the number of rollouts is not known: seeds= has no length")
        return self._queue.total

    @property
    def _steps_here(self) -> bool:
        return self._plan.name == "policy" and not self._plan.base.is_sandbox

    def _begin(self) -> None:
        if self._begun or self._closed:
            raise RuntimeError("these rollouts have been iterated over already, or closed: call rollouts() again")
        self._begun = True

    def _counted(self, events: Iterator[tuple[Work, Rollout]]) -> Iterator[Rollout]:
        try:
            with self._bar() as shown, contextlib.closing(events) as source:  # type: ignore[type-var]
                self._totals.start()
                if self._closed:
                    return
                for work, rollout in source:
                    self._count(shown, work, rollout)
                    yield rollout
        finally:
            self._let_go()

    async def _async(self) -> AsyncIterator[Rollout]:
        loop = asyncio.get_running_loop()
        arrived: asyncio.Queue[_Event] = asyncio.Queue()

        def report(event: _Event) -> None:
            with contextlib.suppress(RuntimeError):
                # The loop may have been closed with the run under way.
                loop.call_soon_threadsafe(arrived.put_nowait, event)

        try:
            with self._bar() as shown:
                self._totals.start()
                self._start(report, UserLoop(loop))
                while (event := await arrived.get()) is not None:
                    if isinstance(event, BaseException):
                        raise event
                    self._count(shown, *event)
                    yield event[1]
        finally:
            await self.aclose()

    def _in_this_thread(self) -> Iterator[tuple[Work, Rollout]]:
        loop = UserLoop()
        try:
            runner = self._plan.runner(self._queue, loop, None)
            self._end = runner.end
            yield from runner.run()
        finally:
            self._end = None
            loop.close()

    def _from_elsewhere(self) -> Iterator[tuple[Work, Rollout]]:
        arrived: queue.SimpleQueue[_Event] = queue.SimpleQueue()
        loop = UserLoop()
        try:
            self._start(arrived.put, loop)
            while (event := arrived.get()) is not None:
                if isinstance(event, BaseException):
                    raise event
                yield event
        finally:
            self._stop()
            loop.close()

    # Running

    def _start(self, report: Callable[[_Event], None], loop: UserLoop) -> None:
        """Run in the background; ``self._end`` then ends it and waits until nothing of it is left."""
        if self._plan.name == "policy":
            self._start_stepping(report, loop)
        else:
            self._start_playing(report, loop)

    def _start_stepping(self, report: Callable[[_Event], None], loop: UserLoop) -> None:
        # A policy that never answers keeps its own thread, not the run.
        runner = self._plan.runner(self._queue, loop, background.Threads(1))

        def work() -> None:
            try:
                for event in runner.run():
                    report(event)
                report(None)
            except BaseException as error:
                report(error)

        thread = threading.Thread(target=work, name="prized_gym-stepping", daemon=True)

        def end() -> None:
            runner.stop()
            thread.join(_CLOSE_TIMEOUT)

        self._end = end
        thread.start()

    def _start_playing(self, report: Callable[[_Event], None], loop: UserLoop) -> None:
        from prized_gym.rollouts.playing import EpisodeRunner

        runner = EpisodeRunner(
            self._plan, self._plan.way(loop), self._queue, lambda work, rollout: report((work, rollout))
        )
        ended = threading.Event()

        async def run() -> None:
            try:
                await runner.run()
            except asyncio.CancelledError:
                # The end that was asked for; whoever still iterates is told below.
                pass
            except BaseException as error:
                report(error)
            finally:
                report(None)
                ended.set()

        running: Future[None] = background.start(run())

        def end() -> None:
            if not running.done():
                running.cancel()
                ended.wait(_CLOSE_TIMEOUT)
            with contextlib.suppress(CancelledError):
                running.result(0.0)

        self._end = end

    def _stop(self) -> None:
        end, self._end = self._end, None
        if end is not None:
            end()

    # The end

    def _let_go(self) -> None:
        self._closed = True
        try:
            self._stop()
        finally:
            self._lease.release()

    def close(self) -> None:
        """End the run and delete its copies. Calling it again does nothing; leaving the loop calls it."""
        if not self._closed:
            self._let_go()

    async def aclose(self) -> None:
        """:meth:`close`, for an event loop. A cancellation meanwhile is raised once nothing is left."""
        cancelled: asyncio.CancelledError | None = None
        # What is left may be in the middle of a coroutine of this very loop.
        end = asyncio.get_running_loop().run_in_executor(None, self.close)
        while not end.done():
            try:
                await asyncio.shield(end)
            except asyncio.CancelledError as error:
                cancelled = error
        end.result()
        if cancelled is not None:
            raise cancelled

    async def __aenter__(self) -> Rollouts:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def __bool__(self) -> bool:
        return True

    def __enter__(self) -> Rollouts:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # What came of it

    def _bar(self) -> Bar:
        return bar(self._queue.total, "rollouts", "rollout", self._progress)

    def _count(self, shown: Bar, work: Work, rollout: Rollout) -> None:
        self._totals.add(work.number, rollout)
        failed = f", failed {self._totals.failed}" if self._totals.failed else ""
        shown.set_postfix_str(f"mean reward {self._totals.mean:.4g}{failed}", refresh=False)
        shown.update()

    def summary(self) -> Summary:
        """What the rollouts that have ended came to; can be called at any time."""
        return self._totals.summary()

    def __repr__(self) -> str:
        total = "?" if self._queue.total is None else self._queue.total
        return f"<{type(self).__name__} of {self._plan.base!r}: {self._totals.count} of {total}, {self._totals.failed} failed>"

    def _repr_html_(self) -> str:
        return self.summary()._repr_html_()

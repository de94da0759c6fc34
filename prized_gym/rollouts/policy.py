"""Asking a policy: a plain function or a coroutine function, for one observation or for a batch."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import inspect
import itertools
import threading
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future, InvalidStateError
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from prized_gym import background
from prized_gym.actions import ActionCheck
from prized_gym.batch import AnySpace, assemble
from prized_gym.errors import PrizedGymError


@dataclass(frozen=True)
class Answer:
    """What a call of the user's code returned or raised, as a value.

    Not as an exception on its way through futures and tasks, where ``SystemExit`` ends an event loop, ``StopIteration`` is
    not allowed, and ``CancelledError`` means something else.
    """

    value: Any = None
    error: BaseException | None = None


class UserError(PrizedGymError):
    """What the user's own code raised, told from what was raised around it.

    Attributes:
        what: of the user's: ``"the episode"``.
        error: what it raised.
    """

    def __init__(self, what: str, error: BaseException) -> None:
        super().__init__(what)
        self.what = what
        self.error = error


def call(function: Callable[[], Any]) -> Answer:
    """Call it."""
    try:
        return Answer(function())
    except BaseException as error:
        return Answer(error=error)


async def _call(function: Callable[[], Any]) -> Answer:
    """Call it, and wait for what is to be waited for."""
    try:
        value = function()
        return Answer(await value if inspect.isawaitable(value) else value)
    except BaseException as error:
        return Answer(error=error)


class UserLoop:
    """Where the user's code runs: coroutines in their event loop, or in a thread's own; with their context variables.

    Args:
        theirs: the loop of whoever iterates with ``async for``; None if nobody does.
    """

    def __init__(self, theirs: asyncio.AbstractEventLoop | None = None) -> None:
        self._theirs = theirs
        self._context = contextvars.copy_context()
        self._own: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._closed = False

    def submit(self, function: Callable[[], Any]) -> Future[Answer]:
        """Call ``function`` in the loop, and wait there for what it returns if that is awaitable."""
        loop = self._theirs or self._started()
        return self._context.copy().run(asyncio.run_coroutine_threadsafe, _call(function), loop)

    def submit_in(self, threads: background.Threads, function: Callable[[], Any]) -> Future[Answer]:
        """Call a plain function in one of ``threads``; what it returns is waited for in the loop if it is awaitable."""
        outer: Future[Answer] = Future()
        inner: list[Future[Answer]] = [threads.submit(partial(self._context.copy().run, call, function))]

        def called(future: Future[Answer]) -> None:
            answer = Answer(error=CancelledError()) if future.cancelled() else future.result()
            if inspect.isawaitable(answer.value):
                value = answer.value
                inner.append(self.submit(lambda: value))
                inner[-1].add_done_callback(called)
                if outer.cancelled():
                    inner[-1].cancel()
            elif not outer.cancelled():
                with contextlib.suppress(InvalidStateError):
                    outer.set_result(answer)

        inner[0].add_done_callback(called)
        outer.add_done_callback(lambda future: inner[-1].cancel() if future.cancelled() else None)
        return outer

    async def ask(self, what: str, threads: background.Threads, function: Callable[..., Any], *arguments: Any) -> Any:
        """What a call returns: a coroutine function's in the loop, a plain one's in a thread. For the background loop.

        Raises:
            UserError: it raised.
        """
        asked = partial(function, *arguments)
        if is_async(function):
            answer = await asyncio.wrap_future(self.submit(asked))
        else:
            answer = await asyncio.wrap_future(threads.submit(partial(self._context.copy().run, call, asked)))
            if inspect.isawaitable(answer.value):
                value = answer.value
                answer = await asyncio.wrap_future(self.submit(lambda: value))
        if answer.error is not None:
            raise UserError(what, answer.error)
        return answer.value

    def _started(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._own is None:
                self._own = asyncio.new_event_loop()
                self._thread = threading.Thread(target=self._own.run_forever, name="prized_gym-rollouts", daemon=True)
                self._thread.start()
            return self._own

    def close(self) -> None:
        """Cancel what still runs in a loop of its own, and end it."""
        loop, thread = self._own, self._thread
        if loop is None or thread is None or self._closed:
            return
        self._closed = True
        asyncio.run_coroutine_threadsafe(_cancel_all(), loop)
        thread.join(5.0)
        # A coroutine that blocks its loop keeps it, in a daemon thread.
        if not thread.is_alive():
            loop.close()


async def _cancel_all() -> None:
    loop = asyncio.get_running_loop()
    others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in others:
        task.cancel()
    if others:
        await asyncio.wait(others, timeout=2.0)
    await loop.shutdown_asyncgens()
    loop.call_soon(loop.stop)


def is_async(function: Callable[..., Any]) -> bool:
    """Whether calling it gives a coroutine."""
    while isinstance(function, partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def takes(function: Callable[..., Any], count: int) -> bool:
    """Whether it can be called with ``count`` positional arguments, as far as can be told."""
    try:
        inspect.signature(function).bind(*range(count))
    except TypeError:
        return False
    except ValueError:
        # A builtin that does not tell.
        return True
    return True


class NoActionError(PrizedGymError, ValueError):
    """What a policy returned is no action."""


@dataclass
class Actions:
    """What a policy answered for some copies.

    Attributes:
        arrays, objects: the leaves of a batch of actions, as for :meth:`prized_gym.interface.fleet.Fleet.step_some`.
        rows: which copies' they are, as positions among those that were asked for.
        refused: by position, what is wrong with each of the others.
    """

    arrays: list[Any]
    objects: list[list[Any]]
    rows: list[int]
    refused: dict[int, NoActionError] = field(default_factory=dict)


class Policy:
    """A policy, and how one copy's action is read from what it returns.

    Args:
        function: ``policy(observation, info)``, or with ``batched`` ``policy(observations, infos)`` with a batch of the
            observation space and a list of dicts, which returns a batch of actions.
        batched: which of the two.
    """

    def __init__(self, function: Callable[..., Any], batched: bool, action_space: AnySpace) -> None:
        self.function = function
        self.batched = batched
        self.is_async = is_async(function)
        self._check = ActionCheck(action_space)

    def split(self, answer: Any, copies: Sequence[int]) -> Actions:
        """What the policy returned for the observations of ``copies``, as the leaves of a batch of actions.

        Raises:
            NoActionError: it is no such batch, or every action is outside its space.
        """
        count = len(copies)
        try:
            actions = answer if self.batched else self._batch_of(answer)
            return Actions(*self._check.split(actions, count, copies=copies), list(range(count)))
        except Exception as error:
            refusal = NoActionError(f"returned {answer!r:.200}: {error}")
            good = self._split_each(answer, copies) if self.batched and count > 1 else None
            if good is None or not good.rows:
                raise refusal from error
            return good

    def _split_each(self, answer: Any, copies: Sequence[int]) -> Actions | None:
        """The actions of a batch one by one, those that are none refused; None if it is no batch of ``len(copies)``."""
        found: list[tuple[list[Any], list[list[Any]]]] = []
        good = Actions([], [], [])
        try:
            parts = [self._check.pick(leaf, answer) for leaf in self._check.leaves]
            if any(len(part) != len(copies) for part in parts):
                return None
        except Exception:
            return None
        for row, copy in enumerate(copies):
            one = assemble(self._check.space, [part[row : row + 1] for part in parts])
            try:
                found.append(self._check.split(one, 1, copies=[copy]))
                good.rows.append(row)
            except Exception as error:
                good.refused[row] = NoActionError(f"returned {one!r:.200} for copy {copy}: {error}")
        if found:
            good.arrays = [np.concatenate(column) for column in zip(*(arrays for arrays, _ in found), strict=True)]
            columns = zip(*(objects for _, objects in found), strict=True)
            good.objects = [list(itertools.chain(*column)) for column in columns]
        return good

    def _batch_of(self, action: Any) -> Any:
        try:
            values = [[leaf.pick(action)] for leaf in self._check.leaves]
        except (KeyError, IndexError, TypeError) as error:
            raise ValueError(
                f"the action {action!r:.200} does not have the structure of {self._check.space}"
            ) from error
        return assemble(self._check.space, values)


def raised(what: str, error: BaseException) -> str:
    """How a rollout's failure says what the user's own code did."""
    if isinstance(error, NoActionError):
        return f"{what} {error}"
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    summary = traceback.format_exception_only(type(error), error)[-1].strip()
    return f"{what} raised {summary}\n--- traceback:\n{text.rstrip()}"

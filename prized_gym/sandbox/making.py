"""Copies on their way: one fork that makes the sandboxes of several copies, of which any may meanwhile be given up."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from prized_gym.errors import BaseDiedError, PrizedGymError
from prized_gym.interface.failure import Failure
from prized_gym.sandbox.account import Guarded
from prized_gym.sandbox.failures import said_by
from prized_gym.sandbox.pool import Forked, SandboxPool


class Making:
    """One fork. What it makes is given to ``take``, or ended if the copy was given up.

    Args:
        pool: makes and ends the sandboxes.
        copies: the indices of the copies to be made.
        fork: makes them; may block.
        take: called in the loop with a copy's index and its sandbox; False if nobody wants it any more.

    Attributes:
        given_up: the copies that nobody waits for any more.
    """

    def __init__(
        self,
        pool: SandboxPool,
        copies: Sequence[int],
        fork: Callable[[], Forked],
        take: Callable[[Making, int, Guarded], bool],
    ) -> None:
        self._pool = pool
        self._copies = list(copies)
        self._fork = fork
        self._take = take
        self._task: asyncio.Task[Forked] | None = None
        self._over: Future[None] = Future()
        self.given_up: set[int] = set()

    async def forked(self, after: Sequence[Future[Any]]) -> Forked:
        """What came of the fork, once it has been made; begun by the first who asks.

        Args:
            after: what is waited for before it begins.
        """
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._make(after))
        # Whoever is cancelled while waiting does not end it for the others.
        return await asyncio.shield(self._task)

    @property
    def under_way(self) -> Future[None] | None:
        """What is done once all that was made has been taken or ended; None if that is so, or nothing has been begun."""
        return None if self._task is None or self._over.done() else self._over

    async def _make(self, after: Sequence[Future[Any]]) -> Forked:
        await _all_over(after)
        try:
            forked = await asyncio.wrap_future(self._pool.submit(self._fork))
        except Exception as error:
            forked = Forked(error=error)
        unwanted = [
            sandbox
            for index, sandbox in zip(self._copies, forked.sandboxes, strict=False)
            if not self._take(self, index, sandbox)
        ]
        ending = asyncio.ensure_future(_all_over([self._pool.submit_ending(sandbox) for sandbox in unwanted]))
        ending.add_done_callback(lambda _: self._over.set_result(None))
        return forked

    def why_not(self, index: int, forked: Forked) -> Failure | None:
        """Why a copy was not made; None if it was."""
        if self._copies.index(index) < len(forked.sandboxes):
            return None
        return not_made(index, forked.error or PrizedGymError("its provider made fewer copies than were asked for"))


def not_made(index: int, error: BaseException) -> Failure:
    """The failure of a copy that could not be made."""
    if isinstance(error, BaseDiedError):
        return Failure(index, "not forked", "base", f"was not forked: {error}", exception=error)
    return Failure(index, "not forked", "fork", f"could not be forked: {said_by(error)}", exception=error)


async def _all_over(futures: Sequence[Future[Any]]) -> None:
    await asyncio.gather(*(asyncio.wrap_future(each) for each in futures), return_exceptions=True)

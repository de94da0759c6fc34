"""The local engine's bases, seen from the trainer: one recipe, and the base process that runs it at the time."""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import weakref
from collections.abc import Mapping

from prized_gym.engines.local import processes
from prized_gym.engines.local.fleet import LocalFleet
from prized_gym.engines.local.link import BaseLink
from prized_gym.engines.local.messages import ResetRequest, Setup
from prized_gym.engines.local.running import RunningBase
from prized_gym.engines.local.semaphores import Signals
from prized_gym.engines.local.shared_memory import Block
from prized_gym.errors import BaseDiedError, PrizedGymError
from prized_gym.interface.engine import BaseHandle
from prized_gym.interface.fleet import UNLIMITED, TimeLimits
from prized_gym.recipe import Recipe


class LocalBase(BaseHandle):
    """A base whose environments live in a process of this machine, which is started anew if it dies.

    Args:
        recipe: what to build.
        allow_threads: fork although there are live threads.
        workdir: the directory to run in, of which each copy gets its own view; absolute.
        close_copies: what a copy that ends closes, as in :class:`prized_gym.Base`.
        close_timeout: seconds that ``env.close()`` may take; None for ever.
        pin: whether each copy is to stay on one core; None: as it is found best.
        timeout: seconds a set-up may take.
        progress: show a progress bar meanwhile.
    """

    def __init__(
        self,
        recipe: Recipe,
        allow_threads: bool,
        workdir: str | None,
        close_copies: str | bool,
        close_timeout: float | None,
        pin: bool | None,
        timeout: float | None,
        progress: bool,
    ) -> None:
        self.known: set[str] = set()
        self._setup = Setup(recipe.dumps(self.known), allow_threads, workdir, close_copies=close_copies)
        self._close_timeout = close_timeout
        self._pin = pin
        self._timeout = timeout
        self._progress = progress
        # Held while the base is being built anew, by whichever of its fleets needs it first.
        self._lock = threading.RLock()
        self._closed = False
        self._first_reset: ResetRequest | None = None
        self._fleets: weakref.WeakSet[LocalFleet] = weakref.WeakSet()
        self._running = RunningBase(self._setup, timeout, progress, close_timeout)
        self.description = self._running.description
        _LIVE.add(self)

    @property
    def alive(self) -> bool:
        return not self._closed and self._running.alive

    @property
    def where(self) -> str:
        return self._running.where

    def revive(self) -> None:
        with self._lock:
            if self._closed:
                raise BaseDiedError("the base was closed")
            if self._running.alive:
                return
            # Returns when the copies of the old process are gone too: none of them can touch a fleet's memory any more.
            self._running.close()
            running = RunningBase(self._setup, self._timeout, self._progress, self._close_timeout)
            try:
                if self._first_reset is not None:
                    running.reset_environment(self._first_reset.seed)
            except BaseException:
                running.close()
                raise
            self._running = running
            self.description = running.description

    def fleet(self, size: int, limits: TimeLimits = UNLIMITED, labels: Mapping[str, str] | None = None) -> LocalFleet:
        self.revive()
        try:
            fleet = processes.with_enough_files(
                lambda: LocalFleet(size, self, self.description, limits, self._pin, self._close_timeout)
            )
        except OSError as error:
            raise PrizedGymError(f"a fleet of {size} copies could not be made: {processes.explain(error)}") from error
        self._fleets.add(fleet)
        return fleet

    def join(self, size: int, block: Block, signals: Signals) -> BaseLink:
        """Have the base process take part in a fleet.

        Args:
            size: how many copies.
            block: the memory of the fleet.
            signals: what its copies are woken with.

        Raises:
            BaseDiedError: the base is gone.
        """
        if self._closed:
            raise BaseDiedError("the base was closed")
        return self._running.join(size, block, signals)

    def reset_environment(self, seed: int | None) -> None:
        with self._lock:
            if self._closed:
                raise BaseDiedError("the base was closed")
            if self._first_reset is None:
                self._running.reset_environment(seed)
                self._first_reset = ResetRequest(seed)

    def close(self) -> None:
        with self._lock:
            self._closed = True
        for fleet in list(self._fleets):
            fleet.abandon()
        self._running.close()
        _LIVE.discard(self)


_LIVE: weakref.WeakSet[LocalBase] = weakref.WeakSet()


def _close_all() -> None:
    for base in list(_LIVE):
        with contextlib.suppress(Exception):
            base.close()


# Before the base processes are ended: the copies close their environments first.
atexit.register(_close_all)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_LIVE.clear)

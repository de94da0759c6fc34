"""The sandboxes of one base, over however many parents: makes up for what a provider cannot do."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future
from concurrent.futures import wait as wait_for_futures
from dataclasses import dataclass, field
from functools import partial

from prized_gym import background
from prized_gym.errors import (
    BaseDiedError,
    EngineUnavailableError,
    SandboxCapacityError,
    SandboxDiedError,
    SandboxError,
    SandboxQuotaError,
)
from prized_gym.sandbox.account import Account, Guarded
from prized_gym.sandbox.builder import Builder, Built
from prized_gym.sandbox.driver import Capabilities, Sandbox
from prized_gym.sandbox.parents import Parent, Parents
from prized_gym.sandbox.plan import Plan
from prized_gym.sandbox.setup import Setup

_BUILDERS = 32
_FORKERS = 32
_CLOSING = 15.0
"""Seconds that are waited for the end of one more sandbox; as many follow as there are."""


@dataclass
class Forked:
    """What came of a fork.

    Attributes:
        sandboxes: those that were made.
        error: why there are no more; None if all were made.
    """

    sandboxes: list[Guarded] = field(default_factory=list)
    error: Exception | None = None


class SandboxPool:
    """Makes, counts and ends the sandboxes of one base. Thread-safe; most of it blocks.

    Args:
        capabilities: of the provider.
        account: its limits.
        builder: makes parents, and copies where there are no forks.
        plan: of the base.
        new_setup: limits one set-up in time; called with whether to show a progress bar.

    Attributes:
        capabilities: of the provider.
        parents: what is forked.
    """

    def __init__(
        self,
        capabilities: Capabilities,
        account: Account,
        builder: Builder,
        plan: Plan,
        new_setup: Callable[[bool], Setup],
    ) -> None:
        self.capabilities = capabilities
        self._account = account
        self._builder = builder
        self._plan = plan
        self._lock = threading.Lock()
        self.parents = Parents(builder, new_setup, capabilities.tells_expiry, self._end)
        self._copies: dict[str, tuple[Guarded, Parent | None]] = {}
        self._builders = background.Threads(min(_BUILDERS, capabilities.most_requests or _BUILDERS))
        self._forkers = background.Threads(_FORKERS)
        self._kept: Parent | None = None

    @property
    def copies(self) -> list[Guarded]:
        """All copies that have not been ended."""
        with self._lock:
            return [sandbox for sandbox, _ in self._copies.values()]

    # Forks

    def fork(self, count: int, timeout: float, labels: Mapping[str, str] | None, network: str | None) -> Forked:
        """Make copies of the base, as many as can be had.

        Args:
            count: how many.
            timeout: seconds that each call may take.
            labels: beside those of the base.
            network: theirs; None: the plan's for copies.
        """
        self._builder.lost.look_again()
        labels = self._named(labels)
        if not self.capabilities.forks:
            return self._create(count, labels, network)
        network = network or self._plan.copy_network
        made = Forked()
        while len(made.sandboxes) < count and made.error is None:
            try:
                parent = self.parents.roomy()
                if parent is None:
                    raise self.parents.full(len(made.sandboxes), count)
                self._fork_some(made, parent, count - len(made.sandboxes), timeout, labels, network)
            except Exception as error:
                made.error = error
        return made

    def fork_copy(
        self, source: Guarded, count: int, timeout: float, labels: Mapping[str, str] | None, network: str | None
    ) -> Forked:
        """Make forks of a copy, as many as there is room for. Arguments as for :meth:`fork`.

        Raises:
            EngineUnavailableError: the provider cannot fork.
        """
        self.check_forks()
        labels = self._named(labels)
        made, fits = Forked(), count
        while len(made.sandboxes) < min(count, fits):
            left = min(count, fits) - len(made.sandboxes)
            try:
                made.sandboxes += self._batch(source, left, timeout, labels, network, None)
            except SandboxCapacityError as error:
                made.error = error
                fits = len(made.sandboxes) + min(error.fits or 0, left - 1)
            except Exception as error:
                made.error = error
                break
        return made

    def _named(self, labels: Mapping[str, str] | None) -> dict[str, str] | None:
        return None if labels is None else {**self._plan.shape.labels, **labels}

    def submit(self, fork: Callable[[], Forked]) -> Future[Forked]:
        """Have a fork made in a thread."""
        return self._forkers.submit(fork)

    def submit_ending(self, sandbox: Guarded) -> Future[None]:
        """End a copy in a thread."""
        return self._account.submit(lambda: self.forget(sandbox), urgent=True)

    def check_forks(self) -> None:
        """Find out whether copies can be forked.

        Raises:
            EngineUnavailableError: they cannot; the message says why.
        """
        if not self.capabilities.forks:
            raise EngineUnavailableError(
                "branch() and Copy.fork() make live forks of a copy, which this engine's provider cannot: each of its "
                "copies is a sandbox that was set up anew. Use engine='gvisor', or another that forks"
            )

    def all_or_none(self, forked: Forked) -> list[Guarded]:
        """The sandboxes of a fork, if all could be made.

        Raises:
            Exception: why they could not; those that were made are ended.
        """
        if forked.error is not None:
            for sandbox in forked.sandboxes:
                self.forget(sandbox)
            raise forked.error
        return forked.sandboxes

    def _fork_some(
        self, made: Forked, parent: Parent, count: int, timeout: float, labels: Mapping[str, str] | None, network: str
    ) -> None:
        """Fork a parent once, or learn that it has less room or is gone."""
        room = parent.room
        asked = min(count, self.capabilities.most_copies, count if room is None else room)
        if asked < 1:
            # Somebody else has filled it since.
            return
        try:
            made.sandboxes += self._batch(parent.sandbox, asked, timeout, labels, network, parent)
        except SandboxCapacityError as error:
            parent.note_room(min(error.fits or 0, asked - 1))
        except SandboxDiedError:
            if parent.sandbox.wait_dead(1.0) is None:
                raise
            if not self.parents.alive:
                raise self.parents.died() from None
            self.parents.drop(parent)

    def _batch(
        self,
        source: Guarded,
        count: int,
        timeout: float,
        labels: Mapping[str, str] | None,
        network: str | None,
        parent: Parent | None,
    ) -> list[Guarded]:
        """One call of the provider's fork."""
        asked = min(count, self.capabilities.most_copies)
        with self._builder.found_if_lost(source.labels if labels is None else labels) as chosen:
            named = labels if chosen is source.labels else chosen
            made = self._builder.within_quota(
                lambda: source.fork(asked, labels=named, network=network, timeout=timeout), timeout
            )
        return self._take(made, parent)

    def _create(self, count: int, labels: Mapping[str, str] | None, network: str | None) -> Forked:
        """Create each copy and set it up, where there are no forks."""
        if network not in (None, self._plan.shape.network):
            return Forked(
                error=ValueError(f"network={network!r}, but a copy is set up with {self._plan.shape.network!r}")
            )
        futures = [self._builders.submit(lambda: self.parents.build(False, labels)) for _ in range(count)]
        made = Forked()
        try:
            for future in futures:
                try:
                    built = future.result()
                    built.disconnect()
                    made.sandboxes += self._take([built.sandbox], None)
                except Exception as error:
                    room = isinstance(error.__cause__, (SandboxCapacityError, SandboxQuotaError))
                    made.error = error.__cause__ if room else error  # type: ignore[assignment]
        except BaseException:
            # An interrupt: nobody is there to have them.
            for future in futures:
                future.cancel()
                future.add_done_callback(self._discard)
            raise
        return made

    def _discard(self, built: Future[Built]) -> None:
        if not built.cancelled() and built.exception() is None:
            self.submit_ending(built.result().sandbox)

    def _take(self, made: list[Guarded], parent: Parent | None) -> list[Guarded]:
        with self._lock:
            closed = self.parents.closed
            if not closed:
                self._copies.update((one.id, (one, parent)) for one in made)
                if parent is not None:
                    parent.copies += len(made)
        if closed:
            for one in made:
                self._end(one)
            raise BaseDiedError("the base was closed while it was forked")
        return made

    # The end

    def forget(self, sandbox: Sandbox) -> None:
        """End a copy."""
        with self._lock:
            _, parent = self._copies.pop(sandbox.id, (None, None))
            if parent is not None:
                parent.copies -= 1
        self._end(sandbox)

    def _end(self, sandbox: Sandbox) -> None:
        sandbox.close()
        if self.capabilities.counts_deleted:
            self._account.note_leaving(sandbox)

    def keep(self, lifetime_hours: float | None) -> str:
        """Leave the first parent behind; all other parents end, and copies live on. The pool is closed to new ones.

        Raises:
            SandboxError: the provider keeps none, or could not; nothing has changed.
        """
        if not self.capabilities.keeps:
            raise SandboxError("the provider of this engine keeps no sandboxes: a base ends with its program")
        with self.parents.keeping() as parents:
            for parent in parents:
                parent.built.disconnect()
            kept = parents[0].sandbox.keep(lifetime_hours)
            self._kept = parents[0]
        for parent in parents[1:]:
            self._end(parent.sandbox)
        return kept

    def close(self) -> None:
        """End everything but what is kept."""
        parents = [parent for parent in self.parents.close() if parent is not self._kept]
        with self._lock:
            copies, self._copies = [sandbox for sandbox, _ in self._copies.values()], {}
        for parent in parents:
            parent.built.disconnect()
        ending = [*copies, *(parent.sandbox for parent in parents)]
        left = {self._account.submit(partial(self._end, one), urgent=True) for one in ending}
        while left:
            ended, left = wait_for_futures(left, _CLOSING, FIRST_COMPLETED)
            if not ended:
                break
        with contextlib.suppress(Exception):
            self._builder.lost.look_again()

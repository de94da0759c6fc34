"""The sandboxes of one base, over however many parents: makes up for what a provider cannot do."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from concurrent.futures import wait as wait_for_futures
from dataclasses import dataclass, field
from functools import partial

from prized_gym import background
from prized_gym.errors import (
    BaseDiedError,
    EngineUnavailableError,
    PrizedGymError,
    SandboxCapacityError,
    SandboxDiedError,
    SandboxError,
)
from prized_gym.sandbox.account import Account, Guarded
from prized_gym.sandbox.builder import Builder, Built
from prized_gym.sandbox.driver import Capabilities, Sandbox
from prized_gym.sandbox.plan import Plan
from prized_gym.sandbox.setup import Setup

EXPIRY_MARGIN = 60.0
"""A parent that expires within so many seconds is replaced before it is forked."""

_FULL_FOR = 60.0
"""Seconds for which a parent is believed to have no more room than it said."""

_BUILDERS = 32
_FORKERS = 32
_CLOSING = 15.0


@dataclass
class Forked:
    """What came of a fork.

    Attributes:
        sandboxes: those that were made.
        error: why there are no more; None if all were made.
    """

    sandboxes: list[Guarded] = field(default_factory=list)
    error: Exception | None = None


class Parent:
    """A sandbox that is set up, to be forked.

    Attributes:
        built: the sandbox, and a client of the server in it.
        copies: how many forks of it there are.
    """

    def __init__(self, built: Built) -> None:
        self.built = built
        self.copies = 0
        self._capacity: int | None = None
        self._until = 0.0

    @property
    def sandbox(self) -> Guarded:
        """The sandbox."""
        return self.built.sandbox

    @property
    def alive(self) -> bool:
        """Whether it can be forked, as far as is known."""
        return self.sandbox.death is None

    @property
    def room(self) -> int | None:
        """How many more forks of it there is room for; None where that is not known."""
        if self._capacity is None or time.monotonic() > self._until:
            return None
        return max(0, self._capacity - self.copies)

    def note_room(self, fits: int) -> None:
        """Remember how many more there is room for."""
        self._capacity = self.copies + fits
        self._until = time.monotonic() + _FULL_FOR

    @property
    def expiring(self) -> bool:
        """Whether its provider will soon end it."""
        return self.sandbox.expires is not None and self.sandbox.expires - time.time() < EXPIRY_MARGIN


class SandboxPool:
    """Makes, counts and ends the sandboxes of one base. Thread-safe; most of it blocks.

    Args:
        capabilities: of the provider.
        account: its limits.
        builder: makes parents, and copies where there are no forks.
        plan: of the base.
        new_setup: limits one set-up in time; called with whether to show a progress bar.
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
        self._new_setup = new_setup
        self._lock = threading.Lock()
        self._growing = threading.RLock()
        self._parents: list[Parent] = []
        self._copies: dict[str, tuple[Guarded, Parent | None]] = {}
        self._reset_seed: int | None = None
        self._builders = background.Threads(min(_BUILDERS, capabilities.most_requests or _BUILDERS))
        self._forkers = background.Threads(_FORKERS)
        self._kept: Parent | None = None
        self._keeping = False
        self._ended = False

    # Parents

    @property
    def first(self) -> Parent:
        """The parent that stands for the base."""
        return self._parents[0]

    @property
    def _closed(self) -> bool:
        """Whether nothing may come in any more."""
        return self._ended or self._keeping

    @property
    def alive(self) -> bool:
        """Whether there is something to fork, as far as is known."""
        return not self._closed and any(parent.alive for parent in list(self._parents))

    @property
    def copies(self) -> list[Guarded]:
        """All copies that have not been ended."""
        with self._lock:
            return [sandbox for sandbox, _ in self._copies.values()]

    def add(self, built: Built) -> Parent:
        """Take in a parent.

        Raises:
            BaseDiedError: the pool was closed meanwhile.
        """
        parent = Parent(built)
        with self._lock:
            closed = self._closed
            if not closed:
                self._parents.append(parent)
        if closed:
            built.sandbox.close()
            raise BaseDiedError(f"the base (sandbox {built.sandbox.id}) was closed while it was set up")
        return parent

    def revive(self, progress: bool = True) -> None:
        """Replace the parents if all of them have died.

        Raises:
            BaseDiedError: it is closed, or cannot be connected to any more.
            Exception: what setting it up raised.
        """
        with self._growing:
            if self.alive:
                return
            dead = list(self._parents)
            self._grow(progress)
            for parent in dead:
                self._drop(parent)

    def reset(self, seed: int) -> None:
        """Reset the environments of all parents, those to come included, for copies to start from.

        Raises:
            Exception: what that raised.
        """
        with self._growing:
            if self._reset_seed is None:
                for parent in list(self._parents):
                    background.run(parent.built.client.reset_base(seed))
                self._reset_seed = seed

    def _build(self, progress: bool, labels: Mapping[str, str] | None = None) -> Built:
        """Set one up, and bring it to where the base stands."""
        try:
            built = self._builder.build(self._new_setup(progress), labels)
        except SandboxError as error:
            # Only connecting to what is kept raises this.
            raise BaseDiedError(f"the base is gone, and cannot be connected to again: {error}") from error
        try:
            if self._reset_seed is not None:
                background.run(built.client.reset_base(self._reset_seed))
        except BaseException:
            built.sandbox.close()
            raise
        return built

    def _grow(self, progress: bool) -> Parent:
        parent = self.add(self._build(progress))
        with contextlib.suppress(SandboxError):
            parent.sandbox.prepare()
        return parent

    def _drop(self, parent: Parent) -> None:
        """Let go of a parent; its copies live on."""
        with self._lock:
            if parent in self._parents:
                self._parents.remove(parent)
        parent.built.disconnect()
        self._end(parent.sandbox)

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
                parent = self._roomy()
                if parent is None:
                    raise self._full(len(made.sandboxes), count)
                self._fork_some(made, parent, count - len(made.sandboxes), timeout, labels, network)
            except Exception as error:
                made.error = error
        return made

    def fork_copy(
        self, source: Sandbox, count: int, timeout: float, labels: Mapping[str, str] | None, network: str | None
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

    def _roomy(self) -> Parent | None:
        """A parent that may have room, set up if there is none; None if that cannot be done."""
        with self._growing:
            self._replace_expiring()
            living = [parent for parent in list(self._parents) if parent.alive]
            if not living:
                raise self._died()
            for parent in living:
                if parent.room != 0:
                    return parent
            # One that had no room for a single copy will not be helped by another.
            if not self._builder.has_recipe or living[-1].copies == 0:
                return None
            return self._grow(progress=False)

    def _replace_expiring(self) -> None:
        for parent in list(self._parents):
            if parent.expiring and parent.alive and self._builder.has_recipe:
                self._grow(progress=False)
                self._drop(parent)

    def _fork_some(
        self, made: Forked, parent: Parent, count: int, timeout: float, labels: Mapping[str, str] | None, network: str
    ) -> None:
        """Fork a parent once, or learn that it has less room or is gone."""
        room = parent.room
        asked = min(count, self.capabilities.most_copies, count if room is None else room)
        try:
            made.sandboxes += self._batch(parent.sandbox, asked, timeout, labels, network, parent)
        except SandboxCapacityError as error:
            parent.note_room(min(error.fits or 0, asked - 1))
        except SandboxDiedError:
            if parent.sandbox.wait_dead(1.0) is None:
                raise
            if not self.alive:
                raise self._died() from None
            self._drop(parent)

    def _batch(
        self,
        source: Sandbox,
        count: int,
        timeout: float,
        labels: Mapping[str, str] | None,
        network: str | None,
        parent: Parent | None,
    ) -> list[Guarded]:
        """One call of the provider's fork."""
        assert isinstance(source, Guarded)
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
        futures = [self._builders.submit(lambda: self._build(False, labels)) for _ in range(count)]
        made = Forked()
        for future in futures:
            try:
                built = future.result()
            except Exception as error:
                made.error = error
                continue
            built.disconnect()
            made.sandboxes += self._take([built.sandbox], None)
        return made

    def _take(self, made: list[Guarded], parent: Parent | None) -> list[Guarded]:
        with self._lock:
            closed = self._closed
            if not closed:
                self._copies.update((one.id, (one, parent)) for one in made)
                if parent is not None:
                    parent.copies += len(made)
        if closed:
            for one in made:
                self._end(one)
            raise BaseDiedError("the base was closed while it was forked")
        return made

    def _died(self) -> BaseDiedError:
        with self._lock:
            parent = self._parents[0]
        how = "is closed" if self._closed else f"ended: {parent.sandbox.death}"
        return BaseDiedError(f"the base (sandbox {parent.sandbox.id}) {how}")

    def _full(self, made: int, wanted: int) -> PrizedGymError:
        text = f"the machine of the base (sandbox {self.first.sandbox.id}) has room for {made} of {wanted} copies"
        if self._builder.has_recipe:
            text += ", and one more base that was set up has room for none: ask for fewer copies, or smaller ones"
        else:
            text += (
                ", and a base that was connected to cannot be set up a second time elsewhere: ask for fewer copies, or "
                "pass what the base is made of to Base()"
            )
        return SandboxCapacityError(text, fits=made)

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
            SandboxError: the provider keeps none, or cannot keep it; nothing has changed.
        """
        if not self.capabilities.keeps:
            raise SandboxError("the provider of this engine keeps no sandboxes: a base ends with its program")
        with self._lock:
            self._keeping = True
            parents = list(self._parents)
        try:
            for parent in parents:
                parent.built.disconnect()
            kept = parents[0].sandbox.keep(lifetime_hours)
            self._kept, self._ended = parents[0], True
        finally:
            self._keeping = False
        for parent in parents[1:]:
            self._end(parent.sandbox)
        return kept

    def close(self) -> None:
        """End everything but what is kept."""
        with self._lock:
            self._ended = True
            copies, self._copies = [sandbox for sandbox, _ in self._copies.values()], {}
            parents = [parent for parent in self._parents if parent is not self._kept]
        for parent in parents:
            parent.built.disconnect()
        ending = [*copies, *(parent.sandbox for parent in parents)]
        wait_for_futures([self._account.submit(partial(self._end, one), urgent=True) for one in ending], _CLOSING)
        with contextlib.suppress(Exception):
            self._builder.lost.look_again()

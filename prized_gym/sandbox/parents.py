"""The sandboxes that stand for one base: set up alike, to be forked."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping

from prized_gym import background
from prized_gym.errors import BaseDiedError, PrizedGymError, SandboxCapacityError, SandboxError
from prized_gym.sandbox.account import Guarded
from prized_gym.sandbox.builder import Builder, Built
from prized_gym.sandbox.setup import Setup

EXPIRY_MARGIN = 60.0
"""A parent that expires within so many seconds is replaced before it is forked."""

_FULL_FOR = 60.0
"""Seconds for which a parent is believed to have no more room than it said."""


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


class Parents:
    """The parents of one base: the first, more where that is full, new ones in place of the dead. Thread-safe; may block.

    Args:
        builder: sets them up.
        new_setup: limits one set-up in time; called with whether to show a progress bar.
        tells_expiry: whether it is known when a provider ends them.
        end: ends a sandbox.

    """

    def __init__(
        self,
        builder: Builder,
        new_setup: Callable[[bool], Setup],
        tells_expiry: bool,
        end: Callable[[Guarded], None],
    ) -> None:
        self._builder, self._new_setup, self._tells_expiry, self._end = builder, new_setup, tells_expiry, end
        self._lock = threading.Lock()
        self._growing = threading.RLock()
        self._parents: list[Parent] = []
        self._reset_seed: int | None = None
        self._not_grown: tuple[float, Exception] | None = None
        self._ended = self._keeping = False

    @property
    def closed(self) -> bool:
        """Whether there are to be no more."""
        return self._ended or self._keeping

    def close(self) -> list[Parent]:
        """Let there be no more; returns those there are."""
        with self._lock:
            self._ended = True
            return list(self._parents)

    @contextlib.contextmanager
    def keeping(self) -> Iterator[list[Parent]]:
        """Let there be no more while inside, and after it unless that failed; gives those there are."""
        with self._lock:
            self._keeping = True
            parents = list(self._parents)
        try:
            yield parents
            self._ended = True
        finally:
            self._keeping = False

    @property
    def first(self) -> Parent:
        """The parent that stands for the base."""
        return self._parents[0]

    @property
    def alive(self) -> bool:
        """Whether there is something to fork, as far as is known."""
        return not self.closed and any(parent.alive for parent in list(self._parents))

    def add(self, built: Built) -> Parent:
        """Take in a parent.

        Raises:
            BaseDiedError: the base was closed meanwhile.
        """
        parent = Parent(built)
        with self._lock:
            closed = self.closed
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
                self.drop(parent)

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

    def build(self, progress: bool, labels: Mapping[str, str] | None = None) -> Built:
        """Set one up, and bring it to where the base stands.

        Args:
            progress: show a progress bar.
            labels: in place of the plan's.

        Raises:
            SetupError, SetupTimeoutError: it could not be set up.
            BaseDiedError: what is kept cannot be connected to.
        """
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
        parent = self.add(self.build(progress))
        with contextlib.suppress(SandboxError):
            parent.sandbox.prepare()
        return parent

    def _grow_again(self) -> Parent | None:
        """Set up one more parent; None if that cannot be done, or could not be a moment ago."""
        if not self._builder.has_recipe:
            return None
        if self._not_grown is not None and time.monotonic() < self._not_grown[0]:
            return None
        self._not_grown = None
        try:
            return self._grow(progress=False)
        except BaseDiedError:
            raise
        except Exception as error:
            self._not_grown = time.monotonic() + _FULL_FOR, error
            return None

    def drop(self, parent: Parent) -> None:
        """Let go of a parent; its copies live on."""
        with self._lock:
            if parent in self._parents:
                self._parents.remove(parent)
        parent.built.disconnect()
        self._end(parent.sandbox)

    def roomy(self) -> Parent | None:
        """A parent that may have room, set up if there is none; None if that cannot be done."""
        with self._growing:
            self._replace_expiring()
            living = [parent for parent in list(self._parents) if parent.alive]
            if not living:
                raise self.died()
            for parent in living:
                if parent.room != 0:
                    return parent
            # One that had no room for a single copy will not be helped by another.
            return None if living[-1].copies == 0 else self._grow_again()

    def _replace_expiring(self) -> None:
        if not self._tells_expiry:
            return
        for parent in list(self._parents):
            if parent.expiring and parent.alive and self._grow_again() is not None:
                self.drop(parent)

    def died(self) -> BaseDiedError:
        """Return the error that says that all are gone."""
        with self._lock:
            parent = self._parents[0]
        how = "is closed" if self.closed else f"ended: {parent.sandbox.death}"
        return BaseDiedError(f"the base (sandbox {parent.sandbox.id}) {how}")

    def full(self, made: int, wanted: int) -> PrizedGymError:
        """Return the error that says that there is room for ``made`` of ``wanted`` copies only."""
        text = f"the machine of the base (sandbox {self.first.sandbox.id}) has room for {made} of {wanted} copies"
        if self._not_grown is not None:
            text += f", and one more base could not be set up: {self._not_grown[1]}"
        elif self._builder.has_recipe:
            text += ", and one more base that was set up has room for none: ask for fewer copies, or smaller ones"
        else:
            text += (
                ", and a base that was connected to cannot be set up a second time elsewhere: ask for fewer copies, or "
                "pass what the base is made of to Base()"
            )
        return SandboxCapacityError(text, fits=made)

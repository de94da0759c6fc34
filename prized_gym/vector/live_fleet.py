"""The fleet of a vector environment, made when it is first needed, and the waiting for it."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Collection

from prized_gym.errors import PrizedGymError
from prized_gym.fleets.inbox import Inbox
from prized_gym.interface.fleet import Finished, Fleet


class StillPendingError(PrizedGymError, multiprocessing.TimeoutError):
    """Waiting was given up, not the call; told apart from a time-out that an environment raises."""


class LiveFleet:
    """A fleet that is made when it is first needed, and given up when its copies are at different points.

    Args:
        make: makes one.

    Attributes:
        fleet: the fleet there is, or None.
        inbox: what copies have finished that was not asked for yet.
    """

    def __init__(self, make: Callable[[], Fleet]) -> None:
        self._make = make
        self.fleet: Fleet | None = None
        self.inbox = Inbox()

    def get(self) -> Fleet:
        """The fleet; made now if there is none."""
        if self.fleet is None:
            self.fleet = self._make()
        return self.fleet

    def wait_all(self, timeout: float | None, name: str) -> None:
        """Wait for every busy copy; what they finish goes to the inbox.

        Args:
            timeout: seconds to wait; None for ever.
            name: of the call that waits, for the message.

        Raises:
            StillPendingError: they have not finished within ``timeout``; they can be waited for again.
        """
        fleet = self.get()
        self.inbox.add(fleet.wait(None, timeout))
        if timeout is not None and fleet.busy:
            raise StillPendingError(
                f"The call to `{name}` has timed out after {timeout} second{'s' if timeout > 1 else ''}."
            )

    def wait_for(self, indices: Collection[int]) -> Finished:
        """Wait for the copies ``indices``; what others finish meanwhile goes to the inbox.

        Raises:
            RuntimeError: one of them has begun nothing: it would be waited for for ever.
        """
        fleet, inbox = self.get(), self.inbox
        while missing := set(indices) - inbox.copies:
            if missing.isdisjoint(fleet.busy):
                raise RuntimeError(f"copies {sorted(missing)} are waited for, but have begun nothing")
            inbox.add(fleet.wait(1))
        return inbox.take(indices)

    @property
    def whole(self) -> bool:
        """Whether the fleet can be gone on with; True where there is none."""
        return self.fleet is None or self.fleet.whole

    def abandon(self, patience: float) -> list[int]:
        """Forget what copies have begun; those that do not finish it within ``patience`` seconds are ended.

        Returns:
            The copies that failed.
        """
        fleet = self.get()
        self.inbox.add(fleet.wait(None, patience))
        for index in fleet.busy:
            fleet.end(index)
        failed = list(self.inbox.take(range(fleet.size)).failures)
        self.inbox.clear()
        return failed

    def drop(self, timeout: float | None = 0.0) -> None:
        """End the copies, and forget what they have finished. One that was interrupted can be called again."""
        self.inbox.clear()
        if self.fleet is not None:
            self.fleet.close(timeout)
            self.fleet = None

    def finish_within(self, timeout: float) -> None:
        """Give copies that are busy ``timeout`` seconds to finish, and forget what they give."""
        if self.fleet is not None:
            self.fleet.wait(None, timeout)

"""Which copies of a fleet exist, why others do not, and which are leaving."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace

from prized_gym import background
from prized_gym.interface.failure import Failure, not_forked
from prized_gym.interface.fleet import Usage
from prized_gym.sandbox.account import Guarded
from prized_gym.sandbox.client import Client


@dataclass
class Member:
    """One copy.

    Attributes:
        sandbox: the sandbox.
        client: of the server in it.
        since: when it was made, in monotonic seconds.
    """

    sandbox: Guarded
    client: Client
    since: float


class Roster:
    """The copies of a fleet. Used by the caller's thread and by the loop's.

    Args:
        end: begins to end a sandbox.
    """

    def __init__(self, end: Callable[[Guarded], Future[None]]) -> None:
        self._end = end
        self._members: dict[int, Member] = {}
        self._failed: dict[int, Failure] = {}
        self._leaving: list[Future[None]] = []
        self._lock = threading.Lock()

    def get(self, index: int) -> Member | None:
        """Copy ``index``, if it exists."""
        return self._members.get(index)

    def __getitem__(self, index: int) -> Member:
        return self._members[index]

    @property
    def indices(self) -> list[int]:
        """The copies that exist."""
        return list(self._members)

    def add(self, index: int, sandbox: Guarded, client: Client) -> None:
        """Take in a new copy."""
        self._members[index] = Member(sandbox, client, time.monotonic())

    def missing(self, index: int) -> Failure:
        """Why copy ``index`` does not exist."""
        return self._failed.get(index) or not_forked(index)

    def where(self, index: int) -> str:
        """How messages name copy ``index``."""
        member = self._members.get(index)
        return self.missing(index).where if member is None else f"sandbox {member.sandbox.id}"

    def usage(self, index: int) -> Usage:
        """What copy ``index`` has used."""
        member = self._members.get(index)
        if member is None:
            return Usage()
        return replace(member.sandbox.usage(), seconds=self.age(index))

    def age(self, index: int) -> float:
        """Seconds since copy ``index`` was made; nan if it does not exist."""
        member = self._members.get(index)
        return math.nan if member is None else time.monotonic() - member.since

    def bury(self, index: int, failure: Failure) -> None:
        """Remember why a copy is no more, and begin to end what is left of it."""
        self._failed[index] = failure
        self.let_go(index)

    def forget(self, indices: Sequence[int]) -> None:
        """Begin to make room for other copies."""
        for index in indices:
            self._failed.pop(index, None)
            self.let_go(index)

    def let_go(self, index: int) -> None:
        """Begin to end copy ``index``, if it exists."""
        with self._lock:
            member = self._members.pop(index, None)
            if member is None:
                return
            self._leaving = [future for future in self._leaving if not future.done()]
            self._leaving.append(self._end(member.sandbox))
        background.loop().call_soon_threadsafe(member.client.channel.close)

    @property
    def leaving(self) -> list[Future[None]]:
        """What is done once those that were let go are gone."""
        with self._lock:
            return list(self._leaving)

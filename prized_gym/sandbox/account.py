"""The limits that everything asked of one provider shares, and sandboxes asked within them."""

from __future__ import annotations

import contextlib
import os
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from prized_gym import background
from prized_gym.errors import SandboxCapacityError, SandboxDiedError, SandboxError, SandboxQuotaError
from prized_gym.interface.fleet import Usage
from prized_gym.interface.sandbox import ExecResult, FileInfo
from prized_gym.sandbox.driver import OUTPUT_KEPT, Dialed, Driver, Sandbox

_T = TypeVar("_T")

_THREADS = 256
"""For what is asked of a provider that has no limit of its own."""

_URGENT_THREADS = 32
_URGENT_SHARE = 8
"""One in so many requests at once is kept for what must not wait: ending what hangs does not wait for what hangs."""

_ASK_AGAIN = 0.2
_MOST_LEAVING = 1000
_TURN = 0.5
"""Seconds that something which waits may take of a turn."""

_BETWEEN_TURNS = 0.05

_TOLD_APART = (SandboxDiedError, SandboxCapacityError, SandboxQuotaError)


class Account:
    """At most so many requests at once, threads to make them in, and deleted sandboxes that still count.

    Args:
        most_requests: of :class:`~prized_gym.sandbox.driver.Capabilities`.
    """

    def __init__(self, most_requests: int | None) -> None:
        self.pid = os.getpid()
        self._lanes: dict[bool, threading.Semaphore] | None = None
        plain, urgent = _THREADS, _URGENT_THREADS
        if most_requests is not None:
            urgent = max(1, most_requests // _URGENT_SHARE)
            plain = max(1, most_requests - urgent)
            self._lanes = {False: threading.Semaphore(plain), True: threading.Semaphore(urgent)}
            if most_requests == 1:
                self._lanes[True] = self._lanes[False]
        self._threads = {False: background.Threads(plain), True: background.Threads(urgent)}
        self._holding = threading.local()
        self._leaving: list[Sandbox] = []
        self._lock = threading.Lock()

    def ask(self, call: Callable[[], _T], urgent: bool = False) -> _T:
        """Call something of the driver, in its turn; what never ran is called once more."""
        with self._slot(urgent):
            try:
                return call()
            except SandboxError as error:
                if error.happened != "never ran" or isinstance(error, _TOLD_APART):
                    raise
        time.sleep(_ASK_AGAIN)
        with self._slot(urgent):
            return call()

    def ask_until(self, call: Callable[[float], _T], timeout: float, urgent: bool = False) -> _T:
        """Call something that waits at most as long as it is passed, until it gives what is true, or ``timeout`` seconds.

        Where there are turns, each is short: others ask meanwhile.
        """
        ends = time.monotonic() + timeout
        while True:
            left = max(0.0, ends - time.monotonic())
            turn = left if self._lanes is None else min(left, _TURN)
            found = self.ask(lambda: call(turn), urgent)  # noqa: B023
            if found or turn == left:
                return found
            # A semaphore goes to whoever comes first, not to whoever has waited longest.
            time.sleep(_BETWEEN_TURNS)

    @contextlib.contextmanager
    def _slot(self, urgent: bool) -> Iterator[None]:
        """Wait for a turn, unless this thread has one."""
        if self._lanes is None or getattr(self._holding, "slot", False):
            yield
            return
        with self._lanes[urgent]:
            self._holding.slot = True
            try:
                yield
            finally:
                self._holding.slot = False

    def submit(self, call: Callable[[], _T], urgent: bool = False) -> Future[_T]:
        """Have ``call`` made in a thread, which it must leave without waiting for another of these threads."""
        return self._threads[urgent].submit(call)

    def submit_in_turn(self, call: Callable[[], _T]) -> Future[_T]:
        """Have ``call`` made in a thread once it is its turn, which it keeps for all that it asks one after another."""

        def work() -> _T:
            with self._slot(False):
                return call()

        return self.submit(work)

    def note_leaving(self, sandbox: Sandbox) -> None:
        """Remember a deleted sandbox that counts until it is gone."""
        with self._lock:
            self._leaving = [*self._leaving[-_MOST_LEAVING:], sandbox]

    def wait_gone(self, timeout: float) -> bool:
        """Wait until a deleted sandbox is really gone; False if there is none, or none goes within ``timeout`` seconds."""
        with self._lock:
            leaving = list(self._leaving)
        if not leaving:
            return False
        gone = [each for each in leaving if self._gone(each, 0.0)]
        if not gone and self._gone(leaving[0], timeout):
            gone = [leaving[0]]
        with self._lock:
            self._leaving = [each for each in self._leaving if each not in gone]
        return bool(gone)

    def _gone(self, sandbox: Sandbox, timeout: float) -> bool:
        return self.ask_until(sandbox.wait_gone, timeout)


_accounts: dict[tuple[type[Driver], str], Account] = {}
_lock = threading.Lock()


def account_of(driver: Driver) -> Account:
    """The account that a driver asks for."""
    key = (type(driver), driver.account)
    with _lock:
        account = _accounts.get(key)
        # Threads do not come along through a fork.
        if account is None or account.pid != os.getpid():
            account = _accounts[key] = Account(driver.capabilities.most_requests)
        return account


class Guarded(Sandbox):
    """A driver's sandbox, asked within the limits of its account.

    Attributes:
        inner: the driver's.
        account: the account.
    """

    def __init__(self, inner: Sandbox, account: Account, in_a_hurry: bool = False) -> None:
        self.inner = inner
        self.account = account
        self._urgent = in_a_hurry
        self.id, self.labels, self.scratch = inner.id, inner.labels, inner.scratch
        self.files = _GuardedFiles(inner, account)

    def __repr__(self) -> str:
        return repr(self.inner)

    @property
    def urgent(self) -> Guarded:
        return self if self._urgent else Guarded(self.inner, self.account, True)

    def _ask(self, call: Callable[[], _T], urgent: bool | None = None) -> _T:
        return self.account.ask(call, self._urgent if urgent is None else urgent)

    def exec(
        self,
        cmd: str | Sequence[str],
        *,
        timeout: float | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        background: bool = False,
        on_output: Callable[[str, bytes], None] | None = None,
        max_output: int = OUTPUT_KEPT,
    ) -> ExecResult:
        return self._ask(
            lambda: self.inner.exec(
                cmd,
                timeout=timeout,
                env=env,
                cwd=cwd,
                background=background,
                on_output=on_output,
                max_output=max_output,
            )
        )

    def fork(
        self, n: int, *, labels: Mapping[str, str] | None = None, network: str | None = None, timeout: float = 120.0
    ) -> list[Guarded]:
        forked = self._ask(lambda: self.inner.fork(n, labels=labels, network=network, timeout=timeout))
        made = [Guarded(each, self.account) for each in forked]
        if len(made) == n:
            return made
        # None at all would be asked for again and again, and nobody would end those nobody asked for.
        for each in made:
            each.close()
        raise SandboxError(f"sandbox {self.id} was to be forked {n} times, and its driver gave {len(made)} forks")

    def prepare(self) -> None:
        self._ask(self.inner.prepare)

    def connect(self, port: int, timeout: float = 10.0) -> Dialed:
        return self.inner.connect(port, timeout)

    @property
    def asleep(self) -> bool:
        return self.inner.asleep

    def wake(self) -> None:
        self._ask(self.inner.wake, True)

    def hold(self) -> contextlib.AbstractContextManager[None]:  # type: ignore[override]
        return self.inner.hold()

    def pause(self) -> None:
        self._ask(self.inner.pause)

    def resume(self) -> None:
        self._ask(self.inner.resume)

    def keep(self, lifetime_hours: float | None) -> str:
        return self._ask(lambda: self.inner.keep(lifetime_hours))

    @property
    def death(self) -> str | None:
        return self.inner.death

    def wait_dead(self, timeout: float) -> str | None:
        return self.account.ask_until(self.inner.wait_dead, timeout, True)

    @property
    def expires(self) -> float | None:
        return self.inner.expires

    def usage(self) -> Usage:
        try:
            return self._ask(self.inner.usage, True)
        except (SandboxError, OSError):
            # Not known at the moment, which ends nobody's episode.
            return Usage()

    def close(self) -> None:
        try:
            self._ask(self.inner.close, True)
        except Exception as error:
            # A driver should not raise here: whoever ends one has others to end.
            warnings.warn(f"sandbox {self.id} may not have been deleted: {error!r}", RuntimeWarning, stacklevel=2)

    def wait_gone(self, timeout: float) -> bool:
        return self.account.ask_until(self.inner.wait_gone, timeout, True)


class _GuardedFiles:
    """The files of a driver's sandbox, within the limits of its account."""

    def __init__(self, inner: Sandbox, account: Account) -> None:
        self._files = inner.files
        self._ask = account.ask

    def upload(self, local: Any, remote: str | None = None) -> None:
        self._ask(lambda: self._files.upload(local, remote))

    def download(self, remote: str, local: Any = None) -> None:
        self._ask(lambda: self._files.download(remote, local))

    def read(self, remote: str, *, max_bytes: int = 64 << 20) -> bytes:
        return self._ask(lambda: self._files.read(remote, max_bytes=max_bytes))

    def write(self, remote: str, data: bytes | str) -> None:
        self._ask(lambda: self._files.write(remote, data))

    def list(self, remote: str = ".") -> Sequence[FileInfo]:
        return self._ask(lambda: self._files.list(remote))

    def remove(self, remote: str) -> None:
        self._ask(lambda: self._files.remove(remote))

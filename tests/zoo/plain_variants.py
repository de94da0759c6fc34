"""The plain provider as others are: one that cannot fork, one whose machines are small, one with a bare Python, …"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from prized_gym.errors import SandboxCapacityError, SandboxError, SandboxQuotaError
from prized_gym.interface.fleet import Usage
from prized_gym.sandbox.driver import Capabilities, ExecResult, Listed, Sandbox, Shape
from zoo.plain_driver import ALIVE, PlainDriver, PlainSandbox


class Forkless(PlainDriver):
    """Cannot fork: each copy must be created."""

    capabilities = Capabilities(forks=False)

    def __init__(self) -> None:
        super().__init__()
        self.created = 0

    def create(self, shape: Shape, timeout: float) -> Sandbox:
        self.created += 1
        return super().create(shape, timeout)

    def make(self, labels: Mapping[str, str], env: Mapping[str, str], port: int) -> PlainSandbox:
        return ForklessSandbox(self, dict(labels), dict(env), port)


class ForklessSandbox(PlainSandbox):
    def fork(self, n: int, **options: object) -> list[PlainSandbox]:  # type: ignore[override]
        raise AssertionError("fork() was called of a provider that cannot fork")


class Cramped(PlainDriver):
    """The machine of a sandbox has room for so many forks of it."""

    def __init__(self, room: int) -> None:
        super().__init__()
        self.room = room
        self.capabilities = Capabilities(most_copies=4, keeps=True)
        self.parents: dict[str, list[PlainSandbox]] = {}

    def make(self, labels: Mapping[str, str], env: Mapping[str, str], port: int) -> PlainSandbox:
        return CrampedSandbox(self, dict(labels), dict(env), port)

    def connect(self, id: str) -> Sandbox:
        found = [sandbox for sandbox in ALIVE if sandbox.id == id]
        if not found:
            raise SandboxError(f"no sandbox {id} is kept")
        return found[0]


class CrampedSandbox(PlainSandbox):
    driver: Cramped

    def copies(self, n: int, labels: Mapping[str, str]) -> list[PlainSandbox]:
        assert n <= self.driver.capabilities.most_copies
        forks = self.driver.parents.setdefault(self.id, [])
        fits = self.driver.room - len([fork for fork in forks if fork in ALIVE])
        if n > fits:
            raise SandboxCapacityError(f"fork_capacity: {fits} fit", fits=fits)
        made = super().copies(n, labels)
        forks += made
        return made

    def keep(self, lifetime_hours: float | None) -> str:
        return self.id


class Bare(PlainDriver):
    """An image with a Python of its own that has nothing but the standard library."""

    capabilities = Capabilities(python="bare")

    def make(self, labels: Mapping[str, str], env: Mapping[str, str], port: int) -> PlainSandbox:
        return BareSandbox(self, dict(labels), dict(env), port)


class BareSandbox(PlainSandbox):
    def environment(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        return {**kept, "PATH": f"{empty_python()}/bin:{os.environ['PATH']}", "HOME": str(self.root)}


@functools.cache
def empty_python() -> Path:
    """A virtual environment with nothing installed in it."""
    path = Path(tempfile.mkdtemp(prefix="pg-empty-"))
    atexit.register(shutil.rmtree, path)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(path)], check=True)
    return path


class Busy(PlainDriver):
    """Answers at most so many requests at once; one more is an error, and counted."""

    def __init__(self, most: int, **more: bool) -> None:
        super().__init__()
        self.capabilities = Capabilities(most_requests=most, **more)  # type: ignore[arg-type]
        self.most = most
        self.under_way = self.highest = self.refused = self.answered = 0
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def request(self) -> Iterator[None]:
        with self._lock:
            self.under_way += 1
            self.highest = max(self.highest, self.under_way)
            self.refused += self.under_way > self.most
        try:
            yield
        finally:
            with self._lock:
                self.under_way -= 1
                self.answered += 1


class Listing(PlainDriver):
    """Lists by label and deletes by id; loses answers, or refuses what never ran, when told to.

    Attributes:
        lose: how many of the next creations, or forks, are made with their answer lost.
        refuse: how many of the next requests fail before anything happens.
        executed: the commands that ran.
    """

    capabilities = Capabilities(lists=True)

    def __init__(self) -> None:
        super().__init__()
        self.lose = self.refuse = 0
        self.executed: list[str] = []

    @contextlib.contextmanager
    def request(self) -> Iterator[None]:
        if self.refuse:
            self.refuse -= 1
            raise SandboxError("rate_limited", happened="never ran")
        yield

    def make(self, labels: Mapping[str, str], env: Mapping[str, str], port: int) -> PlainSandbox:
        return ListedSandbox(self, dict(labels), dict(env), port)

    def answer(self) -> None:
        """What was asked has been done; is the answer lost?"""
        if self.lose:
            self.lose -= 1
            raise SandboxError("the connection was lost before the answer came", happened="may have run")

    def create(self, shape: Shape, timeout: float) -> Sandbox:
        made = super().create(shape, timeout)
        self.answer()
        return made

    def list(self, labels: Mapping[str, str]) -> Sequence[Listed]:
        own = [each for each in self._own() if labels.items() <= each.labels.items()]
        return [Listed(each.id, each.labels, kept="kept" in each.labels) for each in own]

    def delete(self, id: str) -> bool:
        found = [each for each in self._own() if each.id == id]
        for each in found:
            each.close()
        return bool(found)

    def _own(self) -> list[PlainSandbox]:
        return [each for each in list(ALIVE) if each.driver is self]


class ListedSandbox(PlainSandbox):
    driver: Listing

    def copies(self, n: int, labels: Mapping[str, str]) -> list[PlainSandbox]:
        made = super().copies(n, labels)
        self.driver.answer()
        return made

    def run(self, cmd: str | Sequence[str], *args: object, **options: object) -> ExecResult:
        self.driver.executed.append(str(cmd))
        result = super().run(cmd, *args, **options)  # type: ignore[arg-type]
        if "never mind" in str(cmd):
            self.driver.answer()
        return result


class Counting(PlainDriver):
    """An account may have so many sandboxes, of which deleted ones are some until they are gone.

    Attributes:
        lingers: seconds that a deleted sandbox counts.
    """

    capabilities = Capabilities(counts_deleted=True)

    def __init__(self, limit: int, lingers: float) -> None:
        super().__init__()
        self.limit, self.lingers = limit, lingers
        self.counted: list[CountedSandbox] = []
        self.refused = 0

    def make(self, labels: Mapping[str, str], env: Mapping[str, str], port: int) -> PlainSandbox:
        made = CountedSandbox(self, dict(labels), dict(env), port)
        self.counted.append(made)
        return made

    def check(self, more: int) -> None:
        """Refuse more than there may be."""
        if len([each for each in self.counted if not each.gone]) + more > self.limit:
            self.refused += 1
            raise SandboxQuotaError(f"sandbox_quota_exceeded: {self.limit} at most", limit=self.limit)

    def create(self, shape: Shape, timeout: float) -> Sandbox:
        self.check(1)
        return super().create(shape, timeout)


class CountedSandbox(PlainSandbox):
    driver: Counting
    closed_at: float | None = None

    @property
    def gone(self) -> bool:
        return self.closed_at is not None and time.monotonic() - self.closed_at > self.driver.lingers

    def copies(self, n: int, labels: Mapping[str, str]) -> list[PlainSandbox]:
        self.driver.check(n)
        return super().copies(n, labels)

    def close(self) -> None:
        super().close()
        self.closed_at = self.closed_at or time.monotonic()

    def wait_gone(self, timeout: float) -> bool:
        ends = time.monotonic() + timeout
        while not self.gone and time.monotonic() < ends:
            time.sleep(0.01)
        return self.gone


class Expiring(PlainDriver):
    """Ends sandboxes by itself.

    Attributes:
        lifetimes: seconds of those made next; the last is that of all others.
    """

    capabilities = Capabilities(tells_expiry=True)

    def __init__(self, *lifetimes: float) -> None:
        super().__init__()
        self.lifetimes = list(lifetimes)

    def make(self, labels: Mapping[str, str], env: Mapping[str, str], port: int) -> PlainSandbox:
        made = ExpiringSandbox(self, dict(labels), dict(env), port)
        made.live(self.lifetimes.pop(0) if len(self.lifetimes) > 1 else self.lifetimes[0])
        return made


class ExpiringSandbox(PlainSandbox):
    def live(self, seconds: float) -> None:
        """Begin its lifetime, anew if it has one."""
        if hasattr(self, "timer"):
            self.timer.cancel()
        self.ends = time.time() + seconds
        self.timer = threading.Timer(seconds, self.kill, ["its lifetime is over"])
        self.timer.daemon = True
        self.timer.start()

    @property
    def expires(self) -> float | None:
        return self.ends

    def close(self) -> None:
        self.timer.cancel()
        super().close()


class Billing(PlainDriver):
    """Says what a sandbox has cost so far: a dollar each."""

    capabilities = Capabilities(tells_cost=True)

    def make(self, labels: Mapping[str, str], env: Mapping[str, str], port: int) -> PlainSandbox:
        return BilledSandbox(self, dict(labels), dict(env), port)


class BilledSandbox(PlainSandbox):
    def usage(self) -> Usage:
        return Usage(cpu_seconds=2.0, memory_gb=0.5, cost_usd=1.0)

"""What was left behind: labels that say whose a sandbox is, and the deletion of what nobody holds any more."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from prized_gym.errors import SandboxError
from prized_gym.sandbox.account import Account
from prized_gym.sandbox.driver import Driver

OWNER_LABEL = "prized_gym.owner"
"""Says by which process of which machine a sandbox was made, so that what a dead one left is known."""

REQUEST_LABEL = "prized_gym.request"
"""Of all that one call made, so that it is found where the answer was lost."""


def owner() -> str:
    """Name this process, so that its end can be told from another process's life."""
    return f"{_host()}/{os.getpid()}/{_started(os.getpid())}"


def is_orphan(label: str) -> bool:
    """Whether the process that a label of :func:`owner` names is known to be gone; one of another machine is not."""
    host, pid, started = (label.rsplit("/", 2) + ["", ""])[:3]
    return host == _host() and pid.isdecimal() and _started(int(pid)) != started


def _host() -> str:
    try:
        # Two machines of one name, or a machine that was started anew, are not the same.
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()[:8]
    except OSError:
        boot = "0"
    return f"{socket.gethostname()[:100]}:{boot}"


def _started(pid: int) -> str:
    """When a process was started, in a unit of its own; empty if there is none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return fields[19]
    except OSError:
        pass
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return ""
    except OSError:
        pass
    return "0"


def sweep(driver: Driver, account: Account) -> list[str]:
    """Delete the sandboxes that processes of this machine made which are no more.

    Returns:
        Their ids; none where the provider does not list by label.
    """
    if not driver.capabilities.lists:
        return []
    removed = []
    for found in account.ask(lambda: driver.list({})):
        if not found.kept and is_orphan(found.labels.get(OWNER_LABEL, "")):
            with contextlib.suppress(SandboxError):
                if account.ask(lambda id=found.id: driver.delete(id)):  # type: ignore[misc]
                    removed.append(found.id)
    return removed


_LOOKED_FOR = 600.0
"""Seconds for which what a lost request may have made is looked for."""


class LostRequests:
    """Deletes what calls made whose answers were lost, as soon as it is found.

    Args:
        driver: lists by label, or nothing can be done.
        account: of the provider.
    """

    def __init__(self, driver: Driver, account: Account) -> None:
        self._driver = driver
        self._account = account
        self._lost: dict[str, float] = {}
        self._lock = threading.Lock()

    def label(self, labels: Mapping[str, str]) -> tuple[str, dict[str, str]]:
        """Add a label of its own to those of a call; returns it, and all."""
        token = secrets.token_hex(8)
        return token, {**labels, REQUEST_LABEL: token}

    def lost(self, token: str) -> None:
        """Look for what the call with that label made, and again later: a provider may still be making it."""
        with self._lock:
            self._lost[token] = time.monotonic() + _LOOKED_FOR
        self.look_again()

    def look_again(self) -> None:
        """Look for all that has not been found."""
        with self._lock:
            now = time.monotonic()
            self._lost = {token: until for token, until in self._lost.items() if now < until}
            lost = list(self._lost)
        for token in lost:
            self._delete(token)

    def _delete(self, token: str) -> None:
        with contextlib.suppress(SandboxError):
            found = self._account.ask(lambda: self._driver.list({REQUEST_LABEL: token}), True)
            for each in found:
                self._account.ask(lambda id=each.id: self._driver.delete(id), True)  # type: ignore[misc]
            if found:
                with self._lock:
                    self._lost.pop(token, None)

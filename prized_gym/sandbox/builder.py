"""Sandboxes made and set up as a plan says: a base, a further parent of it, or a copy where there are no forks."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

from prized_gym import background
from prized_gym.errors import SandboxError, SandboxQuotaError, SetupError
from prized_gym.sandbox.account import Account, Guarded
from prized_gym.sandbox.client import Client
from prized_gym.sandbox.dialer import Dialer
from prized_gym.sandbox.driver import Driver
from prized_gym.sandbox.plan import Plan
from prized_gym.sandbox.setup import Setup
from prized_gym.sandbox.sweeping import LostRequests

_T = TypeVar("_T")

GONE_TIMEOUT = 120.0
"""Seconds that deleted sandboxes which still count may take to be gone."""

_CREATE_TIMEOUT = 60.0


@dataclass
class Built:
    """A sandbox that is set up, and a client of the server in it."""

    sandbox: Guarded
    client: Client

    def disconnect(self) -> None:
        """Let go of the connections to the server."""
        background.loop().call_soon_threadsafe(self.client.channel.close)


class Builder:
    """Makes sandboxes that are set up alike.

    Args:
        driver: of the provider.
        account: its limits.
        plan: what they are like.
        dialer: reaches the servers in them.
        kept_id: in place of being made, they are connected to by this id.
    """

    def __init__(
        self, driver: Driver, account: Account, plan: Plan, dialer: Dialer, kept_id: str | None = None
    ) -> None:
        self._driver = driver
        self._account = account
        self._plan = plan
        self._dialer = dialer
        self._kept_id = kept_id
        self.lost = LostRequests(driver, account)

    @property
    def has_recipe(self) -> bool:
        """Whether it can make as many as are wanted."""
        return self._kept_id is None

    def build(self, setup: Setup, labels: Mapping[str, str] | None = None) -> Built:
        """Make one and set it up.

        Args:
            setup: within whose time limit.
            labels: in place of the plan's.

        Raises:
            SetupError, SetupTimeoutError: it could not be set up; nothing is left of it.
            SandboxError: the kept one cannot be connected to.
        """
        if self._kept_id is not None:
            kept_id = self._kept_id
            return self.adopt(Guarded(self._account.ask(lambda: self._driver.connect(kept_id)), self._account))
        try:
            sandbox = self._create(setup, self._plan.shape.labels if labels is None else labels)
        except SandboxError as error:
            happened = "" if error.happened is None else f" (it {error.happened})"
            raise SetupError(f"no sandbox could be had for the base: {error}{happened}") from error
        try:
            setup.prepare(sandbox, self._plan)
            built = self.adopt(sandbox)
            if self._plan.has_server:
                setup.start(sandbox, self._plan, built.client)
        except BaseException:
            sandbox.close()
            raise
        return built

    def adopt(self, sandbox: Guarded) -> Built:
        """Take a sandbox that is set up."""
        return Built(sandbox, self._dialer.client(sandbox))

    def _create(self, setup: Setup, labels: Mapping[str, str]) -> Guarded:
        with self.found_if_lost(labels) as chosen:
            shape = replace(self._plan.shape, labels=chosen)

            def create() -> Guarded:
                timeout = min(_CREATE_TIMEOUT, setup.left)
                return Guarded(self._account.ask(lambda: self._driver.create(shape, timeout)), self._account)

            return self.within_quota(create, setup.left)

    def within_quota(self, make: Callable[[], _T], timeout: float) -> _T:
        """Make sandboxes, if need be once those deleted are gone, where these count.

        Args:
            make: makes them.
            timeout: seconds that may be waited, at most two minutes.

        Raises:
            SandboxQuotaError: there are too many all the same.
        """
        ends = time.monotonic() + min(timeout, GONE_TIMEOUT)
        while True:
            try:
                return make()
            except SandboxQuotaError:
                counts = self._driver.capabilities.counts_deleted
                if not counts or not self._account.wait_gone(max(0.0, ends - time.monotonic())):
                    raise

    @contextlib.contextmanager
    def found_if_lost(self, labels: Mapping[str, str]) -> Iterator[Mapping[str, str]]:
        """Have what is made inside deleted if its answer is lost, where the provider lists by label.

        Yields:
            The labels to make it with.
        """
        if not self._driver.capabilities.lists:
            yield labels
            return
        token, chosen = self.lost.label(labels)
        try:
            yield chosen
        except BaseException as error:
            # An interrupt may have come before the answer too.
            if not isinstance(error, SandboxError) or error.happened != "never ran":
                self.lost.lost(token)
            raise

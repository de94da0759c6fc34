"""A base in a sandbox: what a pool is forked from, as vector environments and users hold it."""

from __future__ import annotations

import atexit
import copy
import os
import sys
import threading
import weakref
from collections.abc import Mapping
from typing import Any

import gymnasium as gym
from gymnasium.envs.registration import EnvSpec

from prized_gym import background
from prized_gym.errors import BaseDiedError, PrizedGymError, RemoteTraceback, SandboxError, SetupError
from prized_gym.interface.engine import BaseHandle, Description
from prized_gym.interface.fleet import UNLIMITED, TimeLimits
from prized_gym.interface.sandbox import Copy, SandboxHandle
from prized_gym.protocols import Protocol, ProtocolError, RemoteError, ServerDescription
from prized_gym.recipe import Recipe
from prized_gym.sandbox.account import Guarded
from prized_gym.sandbox.channels.channel import ChannelError
from prized_gym.sandbox.client import Client
from prized_gym.sandbox.copy import SandboxCopy
from prized_gym.sandbox.dialer import Dialer
from prized_gym.sandbox.failures import look
from prized_gym.sandbox.fleet import SandboxFleet
from prized_gym.sandbox.plan import Plan
from prized_gym.sandbox.pool import Forked, SandboxPool
from prized_gym.seeding import fresh_entropy


class SandboxBase(BaseHandle, SandboxHandle):
    """A pool with at least one sandbox that is set up, and what its environment is like.

    Args:
        pool: has its first parent.
        dialer: reaches its servers.
        plan: how it was set up.
        recipe: of its environments.

    Attributes:
        pool, dialer, plan: as above.
    """

    def __init__(self, pool: SandboxPool, dialer: Dialer, plan: Plan, recipe: Recipe) -> None:
        self.pool = pool
        self.dialer = dialer
        self.plan = plan
        self._recipe = recipe
        self._fleets: weakref.WeakSet[SandboxFleet] = weakref.WeakSet()
        self._description: Description | None = None
        self._resetting = threading.Lock()
        self._was_reset = False
        self._open = True
        self._seconds = 0.0
        self._pid = os.getpid()
        _LIVE.add(self)

    def describe(self, seconds: float) -> None:
        """Find out what the environment is like, if there is one.

        Args:
            seconds: how long setting the base up has taken so far.

        Raises:
            SetupError: the server does not say.
        """
        self._seconds = seconds
        if self.plan.protocol is None:
            return
        built = self.pool.parents.first.built
        try:
            described = background.run(built.client.describe())
        except (ProtocolError, ChannelError) as error:
            raise SetupError(f"the server could not be asked for its spaces: {error}") from error
        # It knows the spaces, which the copies' protocols need.
        self.dialer.protocol = built.client.protocol
        self._description = _description(described, self._recipe, seconds)
        # Copies of it are to be stepped, so it will be forked; what then fails is told then. Connections end with it.
        built.disconnect()
        try:
            built.sandbox.prepare()
        except SandboxError:
            pass

    # What a base is

    @property
    def description(self) -> Description:  # type: ignore[override]
        if self._description is None:
            raise PrizedGymError(
                "this base has no environment: it was set up without env and without protocol=, so it can be forked, "
                "but not stepped"
            )
        return self._description

    @property
    def seconds(self) -> float:
        return self._seconds

    @property
    def alive(self) -> bool:
        return self._open and self.pool.parents.alive

    @property
    def where(self) -> str:
        return f"sandbox {self.pool.parents.first.sandbox.id}"

    @property
    def copy_size(self) -> tuple[float, float] | None:
        return self.plan.shape.vcpu or 1.0, self.plan.shape.memory_gb or 1.0

    @property
    def tells_cost(self) -> bool:
        return self.pool.capabilities.tells_cost

    def check_open(self) -> None:
        """Find out whether the base has been closed.

        Raises:
            BaseDiedError: it has.
        """
        if not self._open:
            raise BaseDiedError(f"the base ({self.where}) is closed")

    def check_alive(self) -> None:
        """Find out whether the base can be forked as it is.

        Raises:
            BaseDiedError: it is gone.
        """
        self.check_open()
        if not self.alive:
            raise self._died()

    def _died(self) -> BaseDiedError:
        return BaseDiedError(f"the base ({self.where}) ended: {self.pool.parents.first.sandbox.death}")

    def revive(self) -> None:
        self.check_open()
        self.pool.parents.revive()

    def fleet(self, size: int, limits: TimeLimits = UNLIMITED, labels: Mapping[str, str] | None = None) -> SandboxFleet:
        self.check_open()
        fleet = SandboxFleet(size, self, limits, labels)
        self._fleets.add(fleet)
        return fleet

    def reset_environment(self, seed: int | None) -> None:
        self.check_open()
        with self._resetting:
            if self._was_reset:
                return
            self.pool.parents.revive()
            try:
                # Parents that are set up later are reset to the same state.
                self.pool.parents.reset(fresh_entropy() if seed is None else seed)
            except RemoteError as error:
                original = error.original()
                if original is error:
                    raise SetupError(f"the environment could not be reset in the base: {error}") from error
                original.__cause__ = RemoteTraceback(error.traceback)
                raise original from original.__cause__
            except (ChannelError, SandboxError) as error:
                sandbox = self.pool.parents.first.sandbox
                if sandbox.wait_dead(0.5) is not None:
                    raise self._died() from error
                inside = look(sandbox, ended=True)
                raise BaseDiedError(f"the server of the base ({self.where}) failed: {error}\n{inside.log}") from error
            self._was_reset = True

    # Sandboxes

    def sandbox(self) -> SandboxHandle:
        self.check_open()
        return self

    @property
    def own(self) -> Copy:
        self.check_alive()
        return self.held(self.pool.parents.first.sandbox)

    def held(self, sandbox: Guarded) -> SandboxCopy:
        """A sandbox of the pool, as the user holds it."""
        return SandboxCopy(self.pool, self.dialer, sandbox, self.plan.port)

    def client(self, sandbox: Guarded, protocol: Protocol | None = None) -> Client:
        """A client with the server in ``sandbox``, a fork of the base or of the copy whose protocol is given."""
        return self.dialer.client(sandbox, protocol)

    def fork(self, n: int, labels: Mapping[str, str] | None, network: str | None, timeout: float) -> list[Copy]:
        if n < 1:
            raise ValueError(f"n must be at least 1, got {n}")
        return [self.held(sandbox) for sandbox in self.fork_sandboxes(n, timeout, labels, network)]

    def fork_sandboxes(
        self, count: int, timeout: float, labels: Mapping[str, str] | None = None, network: str | None = None
    ) -> list[Guarded]:
        """Fork the base ``count`` times, all or none.

        Raises:
            BaseDiedError: it is gone.
            SandboxError: it could not be forked.
        """
        # A provider may still fork what it has kept of a base that is gone.
        self.check_alive()
        return self.pool.all_or_none(self.pool.fork(count, timeout, labels, network))

    def fork_what_fits(self, count: int, timeout: float, labels: Mapping[str, str] | None) -> Forked:
        """Fork the base as often as can be, at most ``count`` times; one that is found dead is first built anew."""
        forked = self.pool.fork(count, timeout, labels, None)
        if not isinstance(forked.error, BaseDiedError) or not self._open:
            return forked
        try:
            self.pool.parents.revive()
        except Exception as error:
            return Forked(forked.sandboxes, error)
        again = self.pool.fork(count - len(forked.sandboxes), timeout, labels, None)
        return Forked([*forked.sandboxes, *again.sandboxes], again.error)

    def fork_some(
        self, n: int, labels: Mapping[str, str] | None, timeout: float
    ) -> tuple[list[Copy], Exception | None]:
        forked = self.fork_what_fits(n, timeout, labels)
        return [self.held(sandbox) for sandbox in forked.sandboxes], forked.error

    # The end

    def keep(self, lifetime_hours: float | None) -> str:
        kept = self.pool.keep(lifetime_hours)
        self._open = False
        return kept

    def close(self) -> None:
        self._open = False
        _LIVE.discard(self)
        if sys.is_finalizing() or os.getpid() != self._pid:
            # All was closed before the threads were stopped that this would wait for; or it is another process's.
            return
        for fleet in list(self._fleets):
            fleet.close(timeout=1.0)
        self.pool.close()


_LIVE: weakref.WeakSet[SandboxBase] = weakref.WeakSet()


def _close_all() -> None:
    for base in list(_LIVE):
        base.close()


# Threads of the background still run here, and a provider's own handler, registered before, comes after this one.
atexit.register(_close_all)


def _description(described: ServerDescription, recipe: Recipe, seconds: float) -> Description:
    return Description(
        described.observation_space,
        described.action_space,
        dict(described.metadata),
        described.render_mode,
        _spec(described.spec, recipe),
        described.seconds or seconds,
    )


def _spec(fields: Mapping[str, Any] | None, recipe: Recipe) -> EnvSpec | None:
    """The environment's spec: the one registered here under its id, never an entry point that a sandbox names."""
    if fields is None:
        return None
    source = recipe.sources[0] if recipe.sources else None
    known = source if isinstance(source, EnvSpec) else gym.registry.get(str(fields.get("id")))
    if known is None:
        return None
    spec = copy.deepcopy(known)
    steps, kwargs = fields.get("max_episode_steps"), fields.get("kwargs")
    if steps is None or (isinstance(steps, int) and not isinstance(steps, bool)):
        spec.max_episode_steps = steps
    if isinstance(kwargs, dict) and all(isinstance(name, str) for name in kwargs):
        spec.kwargs = kwargs
    return spec

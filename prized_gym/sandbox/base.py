"""A base in a sandbox, and the engine that makes such bases from a provider's `Driver`."""

from __future__ import annotations

import atexit
import contextlib
import copy
import os
import sys
import threading
import time
import weakref
from abc import abstractmethod
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import wait as wait_for_futures
from functools import partial
from typing import Any, ClassVar

import gymnasium as gym
from gymnasium.envs.registration import EnvSpec

from prized_gym import background
from prized_gym.errors import BaseDiedError, PrizedGymError, RemoteTraceback, SandboxDiedError, SandboxError, SetupError
from prized_gym.interface.engine import BaseHandle, Description, Engine
from prized_gym.protocols import (
    EpisodeProtocol,
    GymProtocol,
    Protocol,
    ProtocolError,
    RemoteError,
    ServerDescription,
)
from prized_gym.recipe import Recipe
from prized_gym.sandbox.channels.channel import Channel, ChannelError
from prized_gym.sandbox.channels.exec import ExecChannel
from prized_gym.sandbox.channels.http import Dialed, HttpChannel
from prized_gym.sandbox.client import Client
from prized_gym.sandbox.copy import Copy
from prized_gym.sandbox.driver import Driver, ExecResult, Sandbox
from prized_gym.sandbox.failures import look
from prized_gym.sandbox.fleet import SandboxFleet
from prized_gym.sandbox.plan import OPTIONS, Plan, make_plan, options_from_labels
from prized_gym.sandbox.setup import Setup

MOST_AT_ONCE = 256
"""Copies asked of a provider in one call."""


class SandboxBase(BaseHandle):
    """A sandbox with, as a rule, a server in it."""

    def __init__(self, sandbox: Sandbox, plan: Plan, recipe: Recipe, started: float) -> None:
        self.sandbox = sandbox
        self.plan = plan
        self._recipe = recipe
        self._lock = threading.Lock()
        self._copies: dict[str, Sandbox] = {}
        self._fleets: weakref.WeakSet[SandboxFleet] = weakref.WeakSet()
        self._protocol = plan.protocol
        self._client = self.client(sandbox)
        self._description: Description | None = None
        self._was_reset = False
        self._open = True
        self._own_copy: Copy | None = None
        self._started = started
        self._seconds = 0.0
        self._pid = os.getpid()
        _LIVE.add(self)

    def begin(self, setup: Setup, connecting: bool) -> None:
        """Set the sandbox up and find out what its environment is like.

        Raises:
            SetupError, SetupTimeoutError: it could not be set up.
        """
        if not connecting:
            setup.prepare(self.sandbox, self.plan)
            if self.plan.has_server:
                setup.start(self.sandbox, self.plan, self._client)
        if self.plan.protocol is not None:
            try:
                described = background.run(self._client.describe())
            except (ProtocolError, ChannelError) as error:
                raise SetupError(f"the server could not be asked for its spaces: {error}") from error
            # It knows the spaces, which the copies' protocols need.
            self._protocol = self._client.protocol
            self._description = _description(described, self._recipe, time.monotonic() - self._started)
            # Copies of it are to be stepped, so it will be forked; what then fails is told then. Connections end with it.
            background.loop().call_soon_threadsafe(self._client.channel.close)
            with contextlib.suppress(SandboxError):
                self.sandbox.prepare()
        self._seconds = time.monotonic() - self._started

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
        return self._open and self.sandbox.death is None

    @property
    def where(self) -> str:
        return f"sandbox {self.sandbox.id}"

    def check_alive(self) -> None:
        """
        Raises:
            BaseDiedError: the base is gone.
        """
        if not self.alive:
            raise self._died()

    def _died(self) -> BaseDiedError:
        how = f"ended: {self.sandbox.death}" if self.sandbox.death is not None else "is closed"
        return BaseDiedError(f"the base ({self.where}) {how}")

    def fleet(self, size: int) -> SandboxFleet:
        self.check_alive()
        fleet = SandboxFleet(size, self)
        self._fleets.add(fleet)
        return fleet

    def reset_environment(self, seed: int | None) -> None:
        with self._lock:
            if self._was_reset:
                return
            try:
                background.run(self._client.reset_base(seed))
            except RemoteError as error:
                original = error.original()
                if original is error:
                    raise SetupError(f"the environment could not be reset in the base: {error}") from error
                original.__cause__ = RemoteTraceback(error.traceback)
                raise original from original.__cause__
            except (ChannelError, SandboxError) as error:
                if self.sandbox.wait_dead(0.5) is not None:
                    raise self._died() from error
                inside = look(self.sandbox, ended=True)
                raise BaseDiedError(f"the server of the base ({self.where}) failed: {error}\n{inside.log}") from error
            self._was_reset = True

    # Copies

    @property
    def own_copy(self) -> Copy:
        """The base's own sandbox, as its copies are held."""
        if self._own_copy is None:
            self._own_copy = Copy(self, self.sandbox)
        return self._own_copy

    def fork(self, n: int, labels: Mapping[str, str] | None, network: str | None, timeout: float) -> list[Copy]:
        """Copies to be held by the user. Raises as :meth:`fork_sandboxes`, and ValueError for less than one."""
        if n < 1:
            raise ValueError(f"n must be at least 1, got {n}")
        return [Copy(self, sandbox) for sandbox in self.fork_sandboxes(n, timeout, labels, network)]

    def client(self, sandbox: Sandbox, protocol: Protocol | None = None) -> Client:
        """A client with the server in ``sandbox``, a fork of the base or of the copy whose protocol is given."""
        spoken = protocol or self._protocol
        # Without a protocol there is nothing to ask but whether the server is ready.
        own = EpisodeProtocol() if spoken is None else spoken.fork()
        return Client(own, self.channel(sandbox), self.plan.request_timeout)

    def channel(self, sandbox: Sandbox, port: int | None = None) -> Channel:
        """A channel to the server in ``sandbox`` that listens on ``port``; None: the base's own."""
        port = self.plan.port if port is None else port
        if self.plan.channel == "exec" and port == self.plan.port:
            return ExecChannel(_Commands(sandbox), f"{sandbox.scratch}/exec")
        if not sandbox.reachable:
            raise SandboxError(
                f"port {port} of {sandbox.id} cannot be reached: only port {self.plan.port} can, by commands"
            )

        async def dial() -> Dialed:
            return await background.in_thread(lambda: sandbox.connect(port))

        # Other servers than ours may close a connection that is idle for some seconds.
        ours = isinstance(self.plan.protocol, GymProtocol)
        return HttpChannel(
            dial, f"127.0.0.1:{port}", awake=partial(_awake, sandbox), reuse_within=None if ours else 1.0
        )

    def fork_sandboxes(
        self,
        count: int,
        timeout: float,
        labels: Mapping[str, str] | None = None,
        network: str | None = None,
    ) -> list[Sandbox]:
        """Fork the base ``count`` times, in one call.

        Raises:
            BaseDiedError: it is gone.
            SandboxError: it could not be forked.
        """
        # A provider may still fork what it has kept of a base that is gone.
        self.check_alive()
        try:
            return self.fork_copy(self.sandbox, count, timeout, labels, network or self.plan.copy_network)
        except SandboxDiedError as error:
            self.sandbox.wait_dead(1.0)
            if self.alive:
                raise
            raise self._died() from error

    def fork_copy(
        self,
        sandbox: Sandbox,
        count: int,
        timeout: float,
        labels: Mapping[str, str] | None = None,
        network: str | None = None,
    ) -> list[Sandbox]:
        """Fork the base or one of its copies."""
        named = None if labels is None else {**self.plan.shape.labels, **labels}
        made: list[Sandbox] = []
        try:
            while len(made) < count:
                some = min(MOST_AT_ONCE, count - len(made))
                sandboxes = sandbox.fork(some, labels=named, network=network, timeout=timeout)
                made += sandboxes
                with self._lock:
                    self._copies.update((one.id, one) for one in sandboxes)
        except BaseException:
            for one in made:
                self.forget(one)
            raise
        return made

    def forget(self, sandbox: Sandbox) -> None:
        """End a copy."""
        with self._lock:
            self._copies.pop(sandbox.id, None)
        sandbox.close()

    # The end

    def keep(self) -> str:
        """Leave the base behind under its id; this handle is closed, and copies made from it live on."""
        self._open = False
        background.loop().call_soon_threadsafe(self._client.channel.close)
        return self.sandbox.keep()

    def close(self) -> None:
        self._open = False
        _LIVE.discard(self)
        if sys.is_finalizing() or os.getpid() != self._pid:
            # All was closed before the threads were stopped that this would wait for; or it is another process's.
            return
        for fleet in list(self._fleets):
            fleet.close(timeout=1.0)
        background.loop().call_soon_threadsafe(self._client.channel.close)
        with self._lock:
            copies, self._copies = list(self._copies.values()), {}
        wait_for_futures([background.submit(sandbox.close, urgent=True) for sandbox in (*copies, self.sandbox)], 15.0)


_LIVE: weakref.WeakSet[SandboxBase] = weakref.WeakSet()


def _close_all() -> None:
    for base in list(_LIVE):
        base.close()


# Threads of the background still run here, and a provider's own handler, registered before, comes after this one.
atexit.register(_close_all)


class SandboxEngine(Engine):
    """Bases are sandboxes of one provider; a subclass names it and makes its driver."""

    options: ClassVar[Mapping[str, Any]] = OPTIONS
    sandboxes: ClassVar[bool] = True
    reachable: ClassVar[bool] = True
    """Whether a server in a sandbox can be reached by HTTP."""

    @classmethod
    @abstractmethod
    def driver(cls, options: Mapping[str, Any], plan: Plan | None) -> Driver:
        """What makes the sandboxes; without a plan it only has to connect.

        Raises:
            EngineUnavailableError: it cannot be used here.
        """

    @classmethod
    def build(cls, recipe: Recipe, options: Mapping[str, Any], timeout: float | None, progress: bool) -> SandboxBase:
        plan = make_plan(recipe, options, cls.reachable)
        driver = cls.driver(options, plan)
        setup, started = Setup(timeout, progress), time.monotonic()
        try:
            sandbox = driver.create(plan.shape, min(60.0, setup.left))
        except SandboxError as error:
            raise SetupError(f"no sandbox could be had for the base: {error}") from error
        return cls._begin(SandboxBase(sandbox, plan, recipe, started), setup, connecting=False)

    @classmethod
    def connect(cls, id: str, options: Mapping[str, Any], timeout: float | None, progress: bool) -> SandboxBase:
        started = time.monotonic()
        sandbox = cls.driver(options, None).connect(id)
        try:
            recipe = Recipe(())
            plan = make_plan(
                recipe, {**options, **options_from_labels(sandbox.labels, options)}, cls.reachable, connecting=True
            )
            base = SandboxBase(sandbox, plan, recipe, started)
        except BaseException:
            sandbox.close()
            raise
        return cls._begin(base, Setup(timeout, progress), connecting=True)

    @classmethod
    def _begin(cls, base: SandboxBase, setup: Setup, connecting: bool) -> SandboxBase:
        try:
            base.begin(setup, connecting)
        except BaseException:
            base.close()
            raise
        return base


class _Commands:
    """A sandbox as the exec channel sees it."""

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox

    def run(self, argv: Sequence[str], timeout: float, max_output: int) -> ExecResult:
        return self._sandbox.exec(argv, timeout=timeout, max_output=max_output)

    def write(self, path: str, data: bytes) -> None:
        self._sandbox.files.write(path, data)

    def read(self, path: str, max_bytes: int) -> bytes:
        return self._sandbox.files.read(path, max_bytes=max_bytes)


@contextlib.asynccontextmanager
async def _awake(sandbox: Sandbox) -> AsyncIterator[None]:
    while sandbox.asleep:
        await background.in_thread(sandbox.wake, urgent=True)
    with sandbox.hold():
        yield


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

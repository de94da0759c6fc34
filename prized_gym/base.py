"""A base: an environment set up once and kept warm, to be forked."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Protocol

import gymnasium as gym
from gymnasium.envs.registration import EnvSpec

from prized_gym import engines
from prized_gym.arguments import seconds
from prized_gym.base_sandbox import SandboxMethods
from prized_gym.errors import BaseDiedError
from prized_gym.html import table
from prized_gym.interface.engine import BaseHandle, Description, Engine
from prized_gym.interface.fleet import UNLIMITED, Fleet, TimeLimits
from prized_gym.recipe import AnyEnv, EnvFactory, Recipe, resolve

DEFAULT_SETUP_TIMEOUT = 600.0

BASE_OPTIONS = ("warm_up", "on_fork", "setup_timeout", "env_kwargs", "max_episode_steps", "render_mode", "reset_seed")
"""The options of a base that a vector environment takes for the base it sets up itself."""


class Closable(Protocol):
    """What can be closed."""

    def close(self) -> None:
        """End it; can be called again."""


class Base(SandboxMethods):
    """An environment set up once, in a process or sandbox of its own, and kept warm.

    The base itself is never stepped: a :class:`~prized_gym.ForkedVectorEnv` forks it into copies, and several can fork
    the same base at the same time (training and evaluation).

    Example:
        >>> import prized_gym
        >>> base = prized_gym.Base("CartPole-v1")
        >>> envs = prized_gym.ForkedVectorEnv(base, num_envs=2)
        >>> observations, infos = envs.reset(seed=0)
        >>> observations.shape
        (2, 4)
        >>> envs.close()
        >>> base.close()

    Args:
        env: what to set up: an env id, an ``EnvSpec``, a callable that builds a ``gymnasium.Env`` (a lambda, a closure
            or a class of ``__main__`` will do), ``"module:function"``, or a sequence of callables, one per copy. In a
            sequence the same object is built once and distinct ones once each, all in the one base. None, in a sandbox:
            a server of your own (``start``), or just what ``setup`` installs.
        engine: ``"local"`` (processes), ``"inline"`` (this process), ``"gvisor"`` (sandboxes of this machine), the name of
            one that an installed package registers as an entry point of the group ``prized_gym.engines``, or a subclass
            of ``prized_gym.interface.engine.Engine``; None: ``PRIZED_GYM_ENGINE``, else ``local``.
        warm_up: called in the base with each environment it built, before the first fork.
        on_fork: called in each copy right after its fork as ``on_fork(env, index, seed)``: the place to open what a
            fork cannot carry over, such as a CUDA context, a connection or a thread.
        setup_timeout: seconds that building and warming up may take; None for no limit.
        env_kwargs: keyword arguments for ``gym.make`` or for the callable.
        max_episode_steps: put a ``TimeLimit`` around the environment, inside the base.
        render_mode: the render mode to build the environment with.
        reset_seed: the seed with which the environment is reset in the base, for vector environments that ask for
            ``reset_in="base"``; None for a random one.
        progress: show a progress bar when setting up takes long.
        **engine_options: of the ``local`` engine: ``workdir`` (a directory the base runs in, of which each copy gets
            its own view: what it writes there neither the base nor another copy sees) ``allow_threads`` (fork although
            the base, or a copy that is branched, has live threads, which no fork will have), ``close_copies`` (what
            ``env.close()`` closes in a copy that ends: ``"own"``, what the copy made: files, directories, shared
            memory, processes and connections that were there before its fork are the base's, and calls that would
            remove or end them are passed over; True, everything; False, it is not called), ``close_timeout`` (seconds
            that ``env.close()`` may take before its process is ended, with a warning, 30; None for no limit) and
            ``pin`` (keep each copy on one core; None: while steps are cheap and there are at least two copies per
            core). Of engines whose bases are sandboxes: ``upload`` (``{local: remote}``, files and directories copied
            in first), ``setup`` (shell commands, run one after another), ``start`` (the command that runs a server of
            your own), ``ready`` (a URL in the sandbox that answers once it is up, such as
            ``"http://127.0.0.1:8000/health"``), ``protocol`` (what it speaks, see :mod:`prized_gym.protocols`; without
            one the base is forked, but not stepped), ``port`` (its port, if ``ready`` does not say; 8000),
            ``env_vars``, ``vcpu``, ``memory_gb``, ``disk_gb``, ``max_runtime_min``, ``labels``, ``network``
            (``"none"``, or ``"outbound"`` for set-up commands that download), ``copy_network`` (that of the copies,
            ``"none"``), ``channel`` (``"http"`` or ``"exec"``; None: the better one that works), ``request_timeout``
            (seconds an answer may take where ``step_timeout`` or ``reset_timeout`` do not say, 300). Of ``gvisor`` too:
            ``python_path`` (directories to import from) and ``runsc`` (its path).

    Attributes:
        num_envs: the length of the sequence of callables, else None.
        closed: whether :meth:`close` was called.

    Raises:
        TypeError: an unknown option, or an ``env`` that is none of the above.
        SetupError: the environment could not be set up. What the callable or ``warm_up`` raised is raised as it is,
            with the remote traceback as its cause.
        SetupTimeoutError: setting up took longer than ``setup_timeout``.
        EngineUnavailableError: the engine cannot run here.
    """

    def __init__(
        self,
        env: str | EnvSpec | EnvFactory | Sequence[EnvFactory] | None = None,
        *,
        engine: str | type[Engine] | None = None,
        warm_up: Callable[[AnyEnv], Any] | None = None,
        on_fork: Callable[[AnyEnv, int, int], Any] | None = None,
        setup_timeout: float | None = DEFAULT_SETUP_TIMEOUT,
        env_kwargs: Mapping[str, Any] | None = None,
        max_episode_steps: int | None = None,
        render_mode: str | None = None,
        reset_seed: int | None = 0,
        progress: bool = True,
        **engine_options: Any,
    ) -> None:
        self.closed = True
        self._engine = engines.load(engine)
        self._options = check_options(self._engine, engine_options, type(self).__name__)
        if env is None and not self._engine.sandboxes:
            raise TypeError(f"{type(self).__name__}() needs an env: a base of engine={self.engine!r} is nothing else")
        source = None if env is None else resolve(env)
        sources = tuple(source) if isinstance(source, list) else () if source is None else (source,)
        self.num_envs = len(sources) if isinstance(source, list) else None
        self._recipe = Recipe(
            sources=sources,
            warm_up=warm_up,
            on_fork=on_fork,
            env_kwargs=dict(env_kwargs or {}),
            max_episode_steps=max_episode_steps,
            render_mode=render_mode,
        )
        self._setup_timeout = seconds("setup_timeout", setup_timeout)
        self._reset_seed = reset_seed
        self._progress = progress
        self._lock = threading.Lock()
        self._users: weakref.WeakSet[Closable] = weakref.WeakSet()
        self._kept: str | None = None
        self._handle: BaseHandle = self._build()
        self.closed = False

    @classmethod
    def connect(
        cls,
        id: str,
        *,
        engine: str | type[Engine] | None = None,
        setup_timeout: float | None = DEFAULT_SETUP_TIMEOUT,
        reset_seed: int | None = 0,
        progress: bool = True,
        **engine_options: Any,
    ) -> Base:
        """A base that was left behind by :meth:`keep`, in this process or another.

        What is kept stays as it is, whatever is done with the base returned, and can be connected to again.

        Args:
            id: what ``keep`` returned.
            engine: the engine it lives in.
            setup_timeout: as for :class:`Base`.
            reset_seed: as for :class:`Base`.
            progress: as for :class:`Base`.
            **engine_options: as for :class:`Base`; ``protocol`` must be passed again for a server of your own.

        Raises:
            SandboxError: there is no such base.
            EngineUnavailableError: the engine cannot run here, or keeps no bases.
        """
        base = cls.__new__(cls)
        base.closed = True
        base._engine = engines.load(engine)
        base._options = check_options(base._engine, engine_options, f"{cls.__name__}.connect")
        base.num_envs = None
        base._recipe = Recipe(())
        base._setup_timeout, base._reset_seed, base._progress = setup_timeout, reset_seed, progress
        base._lock = threading.Lock()
        base._users = weakref.WeakSet()
        base._kept = id
        base._handle = base._build()
        base.closed = False
        return base

    def _build(self) -> BaseHandle:
        if self._kept is not None:
            return self._engine.connect(self._kept, self._options, self._setup_timeout, self._progress)
        return self._engine.build(self._recipe, self._options, self._setup_timeout, self._progress)

    @property
    def engine(self) -> str:
        """The name of the engine."""
        return self._engine.name

    @property
    def observation_space(self) -> gym.Space[Any]:
        """The observation space of one copy."""
        return self._handle.description.observation_space

    @property
    def action_space(self) -> gym.Space[Any]:
        """The action space of one copy."""
        return self._handle.description.action_space

    @property
    def metadata(self) -> dict[str, Any]:
        """The environment's metadata."""
        return self._handle.description.metadata

    @property
    def spec(self) -> EnvSpec | None:
        """The environment's spec, if it has one."""
        return self._handle.description.spec

    @property
    def render_mode(self) -> str | None:
        """The environment's render mode."""
        return self._handle.description.render_mode

    @property
    def setup_seconds(self) -> float:
        """How long building and warming up took, in seconds."""
        return self._handle.seconds

    @property
    def alive(self) -> bool:
        """Whether the base can be forked."""
        return not self.closed and self._handle.alive

    @property
    def copy_size(self) -> tuple[float, float] | None:
        """The vCPUs and the GB of memory that each copy is given and charged for; None where it takes what it uses."""
        return self._handle.copy_size

    @property
    def description(self) -> Description:
        """Everything the base tells of its environments."""
        return self._handle.description

    def fleet(
        self,
        size: int,
        reset_in_base: bool = False,
        limits: TimeLimits = UNLIMITED,
        labels: Mapping[str, str] | None = None,
    ) -> Fleet:
        """Make a fleet of ``size`` copies, none forked yet. A base that died is first rebuilt from its recipe.

        Args:
            size: how many copies.
            reset_in_base: reset the environment in the base, if that has not been done, for copies to start from.
            limits: how long a step or a reset may take, which the fleet enforces.
            labels: of its copies, where copies have labels; None: the base's.

        Raises:
            BaseDiedError: the base is closed, or has died and there is no recipe.
        """
        self.revive()
        if reset_in_base:
            self.reset_environment()
        return self._handle.fleet(size, limits, labels)

    def revive(self) -> None:
        """Build a base that died anew from its recipe, its environment reset as before.

        Raises:
            BaseDiedError: it is closed, or there is no recipe.
        """
        if self.closed:
            raise BaseDiedError(f"{self!r} is closed: it cannot be forked any more")
        self._handle.revive()

    def reset_environment(self) -> None:
        """Reset the environment in the base, if that has not been done, for copies to start from."""
        self._handle.reset_environment(self._reset_seed)

    # The end

    def before_closing(self, user: Closable) -> None:
        """Have ``user.close()`` called before the base is closed: it uses copies in threads of its own."""
        self._users.add(user)

    def close(self) -> None:
        """End the base and all its copies. Calling it again does nothing."""
        with self._lock:
            users, self.closed = [] if self.closed else list(self._users), True
        for user in users:
            user.close()
        # Called again, it goes on with what an interrupt has kept from being closed.
        self._handle.close()

    def __enter__(self) -> Base:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        # While the interpreter ends, the engines see to what is left.
        if not getattr(self, "closed", True) and not sys.is_finalizing():
            self.close()

    def __repr__(self) -> str:
        state = "closed" if self.closed else self._handle.where
        return f"<{type(self).__name__} of {self._name()}, engine={self.engine!r}, {state}>"

    def _repr_html_(self) -> str:
        rows = {"base": "closed" if self.closed else self._handle.where, "set up in": f"{self.setup_seconds:.3g} s"}
        spaces = {"observation space": self.observation_space, "action space": self.action_space}
        return table(f"{type(self).__name__} of {self._name()}", {"engine": self.engine, **rows, **spaces})

    def _name(self) -> str:
        if not self._recipe.sources:
            return "a sandbox" if self._kept is None else f"the kept sandbox {self._kept}"
        if self.spec is not None:
            return self.spec.id
        source = self._recipe.sources[0]
        name = source if isinstance(source, str) else getattr(source, "__name__", type(source).__name__)
        return f"{name} and {len(self._recipe.sources) - 1} more" if self.num_envs not in (None, 1) else str(name)


def check_options(engine: type[Engine], options: Mapping[str, Any], owner: str) -> dict[str, Any]:
    """The engine's options with their defaults filled in.

    Raises:
        TypeError: an option the engine does not have; the message names it.
    """
    for name in options:
        if name not in engine.options:
            known = ", ".join(engine.options) or "none"
            raise TypeError(
                f"{owner}() got an unexpected keyword argument {name!r}: the options of the {engine.name!r} engine are: {known}"
            )
    return {**engine.options, **options}

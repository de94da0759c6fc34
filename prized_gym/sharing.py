"""Who may close a base: vector environments lease what they fork, and what they share is closed with its last lease."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any

from gymnasium.envs.registration import EnvSpec

from prized_gym import engines
from prized_gym.base import BASE_OPTIONS, DEFAULT_SETUP_TIMEOUT, Base, check_options
from prized_gym.recipe import resolve

_DEFAULTS = {"setup_timeout": DEFAULT_SETUP_TIMEOUT, "reset_seed": 0}

_NONE_MEANS = ("setup_timeout", "reset_seed")
"""Options for which None is a value of its own, not the default."""


class Lease:
    """The right to fork a base until :meth:`release`, which closes the base where nobody else may use it.

    Thread-safe.

    Args:
        base: what is leased.
        release: what gives it back; called again by a second release, so that one that was interrupted can be completed.

    Attributes:
        base: what is leased.
    """

    def __init__(self, base: Base, release: Callable[[], None] | None = None) -> None:
        self.base = base
        self._release = release

    def release(self) -> None:
        """Give the base back. Calling it again does nothing."""
        if self._release is not None:
            self._release()

    def __del__(self) -> None:
        # An interrupt may have come before whoever asked for it had it.
        if not sys.is_finalizing():
            self.release()


class _Shared:
    """A shared base, which may still be being set up."""

    def __init__(self, spec: EnvSpec, options: dict[str, Any], reset: bool) -> None:
        self.spec = spec
        self.options = options
        self.reset = reset
        self.leases: set[object] = set()
        self.base: Base | None = None
        self.building = threading.Lock()

    def fits(self, spec: EnvSpec, options: dict[str, Any], reset: bool) -> bool:
        usable = self.base is None or self.base.alive
        return usable and reset == self.reset and _equal(spec, self.spec) and _equal(options, self.options)


class SharedBases:
    """Bases that vector environments of this process share: those of an equal ``EnvSpec`` and equal options."""

    def __init__(self) -> None:
        # Reentrant: the garbage collector may close a vector environment of this thread at any moment.
        self._lock = threading.RLock()
        self._shared: list[_Shared] = []

    def acquire(self, spec: EnvSpec, options: dict[str, Any], progress: bool, reset: bool = False) -> Lease:
        """Lease the shared base of ``spec``, set up if there is none yet; the release of the last lease closes it.

        One that is to be ``reset`` is shared only by those who want it so: the others' copies are forks of one that is not.
        """
        token, entry = object(), None
        try:
            with self._lock:
                entry = next((entry for entry in self._shared if entry.fits(spec, options, reset)), None)
                if entry is None:
                    entry = _Shared(spec, options, reset)
                    self._shared.append(entry)
                entry.leases.add(token)
            # Different bases are set up at the same time; of one, the second user waits for the first.
            with entry.building:
                if entry.base is None:
                    entry.base = Base(spec, progress=progress, **options)
                return Lease(entry.base, lambda: self._leave(entry, token))
        except BaseException:
            if entry is not None:
                self._leave(entry, token)
            raise

    def _leave(self, entry: _Shared, token: object) -> None:
        with self._lock:
            entry.leases.discard(token)
            last = not entry.leases
            if last and entry in self._shared:
                self._shared.remove(entry)
        if last and entry.base is not None:
            entry.base.close()


def _equal(a: Any, b: Any) -> bool:
    try:
        return bool(a == b)
    except Exception:
        # Arrays among the keyword arguments: not to be told apart cheaply, so not shared.
        return False


SHARED = SharedBases()


def find_base(env: Any, num_envs: int | None, progress: bool, given: Mapping[str, Any], reset: bool = False) -> Lease:
    """Lease the base that a vector environment forks.

    A base that the user passed is never closed by a release, one that is shared by the last, one of the vector
    environment's own by its only one.

    Args:
        env: what the vector environment was given.
        num_envs: how many copies it was asked for.
        progress: show a progress bar.
        given: options of :class:`Base` and of the engine; None for one that was not given.
        reset: the environment is to be reset in the base.

    Raises:
        TypeError, ValueError: an option that does not exist, or does not fit the others.
    """
    options = {name: given.get(name) for name in ("engine", *BASE_OPTIONS)}
    engine_options = {name: value for name, value in given.items() if name not in options}
    if isinstance(env, Base):
        _check_base(env, options, engine_options)
        return Lease(env)
    chosen = {
        name: value for name, value in options.items() if value is not None or (name in given and name in _NONE_MEANS)
    }
    # Checked before anything is set up.
    engine = engines.load(options["engine"])
    check_options(engine, engine_options, "ForkedVectorEnv")
    chosen["engine"] = engine
    if isinstance(env, str) and engine.is_id(env):
        unfit = [name for name in chosen if name not in ("engine", "setup_timeout", "reset_seed")]
        if unfit:
            raise TypeError(f"{', '.join(unfit)}: an option of a base that is set up, and {env} is a kept one")
        return _owned(Base.connect(env, progress=progress, **chosen, **engine_options))
    source = resolve(env)
    if isinstance(source, list) and num_envs not in (None, len(source)):
        raise ValueError(f"num_envs={num_envs}, but env is a sequence of {len(source)} callables")
    if isinstance(source, EnvSpec):
        filled = {**_DEFAULTS, **chosen, **check_options(engine, engine_options, "ForkedVectorEnv")}
        return SHARED.acquire(source, filled, progress, reset)
    return _owned(Base(env, progress=progress, **chosen, **engine_options))


def _owned(base: Base) -> Lease:
    return Lease(base, base.close)


def _check_base(base: Base, options: Mapping[str, Any], engine_options: Mapping[str, Any]) -> None:
    """Refuse options that a base given has been set up without."""
    asked = options["engine"]
    if asked is not None and engines.load(asked).name != base.engine:
        raise ValueError(f"engine={asked!r}, but the Base given lives in engine {base.engine!r}")
    misplaced = [name for name, value in options.items() if name != "engine" and value is not None]
    misplaced += list(engine_options)
    if misplaced:
        raise TypeError(
            f"{', '.join(misplaced)}: an option of the base, which is set up already; pass it to Base() instead"
        )


def count_copies(base: Base, num_envs: int | None) -> int:
    """How many copies a vector environment over ``base`` has, given what it was asked for.

    Raises:
        ValueError: the base was set up for another number.
    """
    if base.num_envs is not None:
        if num_envs not in (None, base.num_envs):
            raise ValueError(f"num_envs={num_envs}, but the base was set up for {base.num_envs} copies")
        return base.num_envs
    return 1 if num_envs is None else num_envs

"""``ForkedVectorEnv``: Gymnasium's vector environment over forks of a warm base."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any, Literal, TypeAlias

import gymnasium as gym
import numpy as np
import numpy.typing as npt
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space

from prized_gym.arguments import Seed, at_least_one, one_of, seconds
from prized_gym.base import Base
from prized_gym.html import table
from prized_gym.infos import merge
from prized_gym.interface.fleet import TimeLimits
from prized_gym.recipe import EnvFactory
from prized_gym.sharing import count_copies, find_base
from prized_gym.vector.core import VectorCore
from prized_gym.vector.history import Episode
from prized_gym.vector.settings import Settings

Batch: TypeAlias = Any
Infos: TypeAlias = "dict[str, Any]"
StepResult: TypeAlias = (
    "tuple[Batch, npt.NDArray[np.float64], npt.NDArray[np.bool_], npt.NDArray[np.bool_], dict[str, Any]]"
)


class ForkedVectorEnv(gym.vector.VectorEnv[Any, Any, Any]):
    """N copies of one environment, forked live from a warm base and stepped as a batch.

    The base is set up once. ``reset`` forks it; each copy starts with the base's memory, and what an environment took
    long to load is loaded once however many copies there are and however often they are reset.

    Example:
        >>> import prized_gym
        >>> envs = prized_gym.ForkedVectorEnv("CartPole-v1", num_envs=3)
        >>> envs
        ForkedVectorEnv(CartPole-v1, num_envs=3)
        >>> observations, infos = envs.reset(seed=1)
        >>> observations.shape
        (3, 4)
        >>> observations, rewards, terminations, truncations, infos = envs.step([0, 1, 0])
        >>> rewards
        array([1., 1., 1.])
        >>> envs.close()

    A new fork carries what :meth:`set_attr` set since construction: it is replayed. What :meth:`call` changed, and what the
    environment itself counted, is gone with the fork before it. Forking is lazy: nothing is forked before the first
    ``reset`` or attribute asked for, and an attribute asked for does not cost a second fork. A copy that is replaced has closed
    its environment and ended before the new one begins: ``on_fork`` finds free what the one before it had taken.

    Seeds: ``reset(seed=s)`` seeds copy i with ``s + i``. For an environment that draws only from ``np_random``, everything
    from a seeded reset on is then bit-identical to ``SyncVectorEnv`` (with ``reset_in="copy"`` and ``fork_on`` ``"reset"`` or
    ``"start"``). A ``reset`` without a seed goes on with each copy's ``np_random``, in a new fork too. An autoreset that
    forks takes the next seed of its copy's own stream, repeatable from the last explicit seed. After every fork Python's,
    NumPy's and torch's global generators are reseeded, and every generator of these kinds that the process holds, whoever
    holds it; one hidden in a C library is reached by ``env.reset(seed=...)`` or by ``on_fork`` only.

    Args:
        env: a :class:`~prized_gym.Base` (used, never closed), an env id, an ``EnvSpec``, a callable that builds the
            environment, ``"module:function"``, or a sequence of callables, one per copy. Vector environments of one process
            that name an equal ``EnvSpec`` with equal options share one base.
        num_envs: how many copies; the length of the sequence if ``env`` is one, else 1 by default.
        engine: where the base and its copies live; None: the Base's own, else ``PRIZED_GYM_ENGINE``, else ``local``.
        autoreset_mode: Gymnasium's ``AutoresetMode``, or its value: ``"NextStep"``, ``"SameStep"``, ``"Disabled"``.
        fork_on: ``"reset"``: an explicit ``reset`` (whole or masked) makes new forks, an autoreset calls ``env.reset()`` in
            the same copy. ``"episode"``: autoresets make new forks too, so that nothing one episode did can reach the next.
            ``"start"``: the copies of the first reset are kept.
        reset_in: ``"copy"``: each copy calls ``env.reset(seed, options)``. ``"base"``: the environment is reset once in the
            base and each fork starts in that very state with the observation it gave, with a random state of its own;
            options are refused. (An autoreset that does not fork is an ordinary ``env.reset()``.)
        on_failure: ``"raise"``: a copy that dies, hangs or raises is an error that says which and why; ``reset()`` brings the
            environment back. ``"truncate"``: that copy's episode ends with ``truncated=True``, reward 0, its last valid
            observation and the reason in ``infos["failure"]``, and its next episode runs in a fresh fork.
        max_failures: so many failures in a row on one copy are raised even then.
        step_timeout: seconds a copy may take for one step before it counts as hung; None: for ever. The inline engine
            cannot enforce it.
        reset_timeout: the same for a reset. In same-step mode a step that ends an episode may take both.
        max_concurrent: at most so many copies work at the same time; None: all.
        per_process: copies per process; only 1.
        max_episode_steps: put a ``TimeLimit`` around the environment, inside the base.
        render_mode: the render mode to build the environment with.
        copy: return copies of the observations; False returns views that the next step overwrites.
        progress: show a progress bar when setting up takes long.
        **options: ``warm_up``, ``on_fork``, ``setup_timeout``, ``env_kwargs`` and ``reset_seed`` as for
            :class:`~prized_gym.Base`, and the engine's own options.

    Attributes:
        num_envs: how many copies.
        single_observation_space, single_action_space: of one copy.
        observation_space, action_space: of the batch.
        metadata: a copy of the environment's, with ``autoreset_mode``.
        base: the base that is forked.

    Raises:
        TypeError: an unknown option.
        ValueError: a value out of range.
    """

    def __init__(
        self,
        env: Base | str | EnvSpec | EnvFactory | Sequence[EnvFactory],
        num_envs: int | None = None,
        *,
        engine: str | None = None,
        autoreset_mode: AutoresetMode | str = AutoresetMode.NEXT_STEP,
        fork_on: Literal["reset", "episode", "start"] = "reset",
        reset_in: Literal["copy", "base"] = "copy",
        on_failure: Literal["raise", "truncate"] = "raise",
        max_failures: int = 3,
        step_timeout: float | None = None,
        reset_timeout: float | None = None,
        max_concurrent: int | None = None,
        per_process: int = 1,
        max_episode_steps: int | None = None,
        render_mode: str | None = None,
        copy: bool = True,
        progress: bool = True,
        **options: Any,
    ) -> None:
        self.closed = True
        self.autoreset_mode = AutoresetMode(autoreset_mode)
        self.copy = copy
        self._settings = Settings(
            self.autoreset_mode,
            one_of("fork_on", fork_on, ("reset", "episode", "start")),
            one_of("reset_in", reset_in, ("copy", "base")),
            one_of("on_failure", on_failure, ("raise", "truncate")),
            at_least_one("max_failures", max_failures),
            TimeLimits(seconds("step_timeout", step_timeout), seconds("reset_timeout", reset_timeout)),
            None if max_concurrent is None else at_least_one("max_concurrent", max_concurrent),
            copy,
        )
        if at_least_one("per_process", per_process) != 1:
            raise ValueError(
                f"per_process={per_process}: each copy is a process of its own, only per_process=1 is possible"
            )
        if num_envs is not None:
            num_envs = at_least_one("num_envs", num_envs)
        options.update(engine=engine, max_episode_steps=max_episode_steps, render_mode=render_mode)
        self._lease = find_base(env, num_envs, progress, options, self._settings.from_base)
        self.base = self._lease.base
        self.closed = False
        try:
            self.num_envs = count_copies(self.base, num_envs)
            self._set_up()
        except BaseException:
            self.close()
            raise

    def _set_up(self) -> None:
        count, description = self.num_envs, self.base.description
        # Copies: training scripts assign to these, and the fleet's memory is laid out from the originals.
        self.single_observation_space = deepcopy(description.observation_space)
        self.single_action_space = deepcopy(description.action_space)
        self.observation_space = batch_space(self.single_observation_space, count)
        self.action_space = batch_space(self.single_action_space, count)
        self.metadata = {**description.metadata, "autoreset_mode": self.autoreset_mode}
        self.render_mode = description.render_mode
        self.spec = deepcopy(description.spec)
        # For adapters: what this class does, with an info per copy.
        self.core = VectorCore(self.base, count, self._settings, type(self).__name__)

    # Reset and step

    def reset(self, *, seed: Seed = None, options: dict[str, Any] | None = None) -> tuple[Batch, Infos]:
        """Reset all copies, or with ``options["reset_mask"]`` some.

        Args:
            seed: an int s (copy i gets ``s + i``), a sequence of ``num_envs`` ints or None, or None.
            options: passed to each ``env.reset``. A key ``reset_mask``, a bool array of shape ``(num_envs,)`` with at least
                one True, says which copies are reset; the others keep their last observation and give no info.

        Returns:
            The observations (a batch of ``observation_space``) and the merged infos.

        Raises:
            ClosedEnvironmentError: after :meth:`close`.
            AlreadyPendingCallError: a reset of some, while something is pending; a reset of all abandons that.
            ValueError, TypeError: a seed or mask of the wrong form; options with ``reset_in="base"``.
        """
        observations, infos = self.core.reset(seed, options)
        return observations, self._merge(infos)

    def reset_async(self, seed: Seed = None, options: dict[str, Any] | None = None) -> None:
        """Begin a :meth:`reset`; :meth:`reset_wait` finishes it."""
        self.core.reset_async(seed, options)

    def reset_wait(self, timeout: float | None = None) -> tuple[Batch, Infos]:
        """Finish what :meth:`reset_async` began.

        Args:
            timeout: seconds to wait.

        Raises:
            NoAsyncCallError: no reset is pending.
            multiprocessing.TimeoutError: not finished within ``timeout``; it can be waited for again.
        """
        observations, infos = self.core.reset_wait(timeout)
        return observations, self._merge(infos)

    def step(self, actions: Batch) -> StepResult:
        """Step every copy.

        Args:
            actions: one action per copy, batched as ``action_space``.

        Returns:
            Observations, rewards (float64), terminations and truncations (bool), each of length ``num_envs``, and infos.
            In next-step mode a copy whose episode ended in the step before is reset instead, as Gymnasium does.

        Raises:
            ClosedEnvironmentError: after :meth:`close`.
            AlreadyPendingCallError: an asynchronous call is pending.
            gymnasium.error.ResetNeeded: before the first reset.
            ValueError, TypeError: actions of the wrong form or outside their space; nothing was sent.
            EpisodeOverError: in disabled mode, a copy whose episode is over.
            InterruptedStepError: an earlier call was interrupted or failed; :meth:`reset` brings the copies back.
            CopyError: a copy failed, with ``on_failure="raise"``; what an environment raised is raised as it is.
        """
        observations, rewards, terminations, truncations, infos = self.core.step(actions)
        return observations, rewards, terminations, truncations, merge(infos, self.num_envs) if infos else {}

    def step_async(self, actions: Batch) -> None:
        """Begin a :meth:`step`; :meth:`step_wait` finishes it."""
        self.core.step_async(actions)

    def step_wait(self, timeout: float | None = None) -> StepResult:
        """Finish what :meth:`step_async` began.

        Args:
            timeout: seconds to wait.

        Raises:
            NoAsyncCallError: no step is pending.
            multiprocessing.TimeoutError: not finished within ``timeout``; it can be waited for again.
        """
        observations, rewards, terminations, truncations, infos = self.core.step_wait(timeout)
        return observations, rewards, terminations, truncations, self._merge(infos)

    def _merge(self, infos: Mapping[int, dict[str, Any]]) -> Infos:
        return merge(infos, self.num_envs) if infos else {}

    # Stepping whoever is ready

    def send(self, actions: Batch, indices: Sequence[int] | None = None) -> None:
        """Begin a step of some copies and return at once; :meth:`recv` gives what is ready.

        Args:
            actions: one action per index, batched as ``action_space`` of ``len(indices)`` copies.
            indices: which copies, none of them pending; None: all.

        Raises:
            AlreadyPendingCallError: one of the copies has not been received since it was sent.
            and what :meth:`step` raises.
        """
        self.core.send(actions, indices)

    def recv(self, min_ready: int = 1) -> tuple[Any, Any, Any, Any, dict[str, Any], npt.NDArray[np.int64]]:
        """Wait until at least ``min_ready`` of the copies that were sent actions have answered, and return those.

        Returns:
            Observations, rewards, terminations, truncations of the copies that are ready, each a batch of that many, in
            the order of the last item, ``indices`` (int64); infos are merged with the position in that order.

        Raises:
            NoAsyncCallError: fewer than ``min_ready`` copies are pending.
            and what :meth:`step` raises.
        """
        observations, rewards, terminations, truncations, infos, indices = self.core.recv(min_ready)
        placed = {number: infos[index] for number, index in enumerate(indices.tolist()) if index in infos}
        return observations, rewards, terminations, truncations, merge(placed, len(indices)), indices

    # Branching

    def branch(self, source: int, targets: Sequence[int], *, reseed: bool = False) -> Batch:
        """Make the copies ``targets`` live forks of copy ``source`` as it stands, in the middle of its episode.

        Each continues from the source's memory, files and flags: for tree search, Go-Explore, or estimating a value by
        resampling. What the targets were doing is dropped.

        Args:
            source: the copy to fork, left as it is.
            targets: the copies that become its forks.
            reseed: give each target random generators of its own; otherwise all continue with the source's random state,
                so that equal actions have equal results.

        Returns:
            The observations of all copies, a batch of ``observation_space``.

        Raises:
            ValueError: an index out of range, or ``source`` among ``targets``.
            EngineUnavailableError: the engine cannot fork a copy.
        """
        return self.core.branch(source, targets, reseed)

    # Attributes and methods of the environments

    def call(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Call the method ``name`` of each environment, or get the attribute of that name.

        Returns:
            One result per copy, carried over from the copies.
        """
        return self.core.call(self.core.everyone, name, args, kwargs)

    def call_async(self, name: str, *args: Any, **kwargs: Any) -> None:
        """Begin a :meth:`call`; :meth:`call_wait` finishes it."""
        self.core.call_async(self.core.everyone, name, args, kwargs)

    def call_some_async(self, indices: Sequence[int], name: str, /, *args: Any, **kwargs: Any) -> None:
        """Begin a :meth:`call` in the copies ``indices`` only; :meth:`call_wait` then returns one result for each."""
        self.core.call_async(indices, name, args, kwargs)

    def call_wait(self, timeout: float | None = None) -> tuple[Any, ...]:
        """Finish what :meth:`call_async` began.

        Raises:
            NoAsyncCallError: no call is pending.
            multiprocessing.TimeoutError: not finished within ``timeout`` seconds; it can be waited for again.
        """
        return self.core.call_wait(timeout)

    def get_attr(self, name: str) -> tuple[Any, ...]:
        """The attribute ``name`` of each environment, or of the wrapper of it that has one."""
        return self.call(name)

    def set_attr(self, name: str, values: list[Any] | tuple[Any, ...] | Any) -> None:
        """Set an attribute of each environment through ``env.set_wrapper_attr``; new forks will have it too.

        Args:
            name: the attribute.
            values: a list or tuple of ``num_envs`` values, or one value for all.

        Raises:
            ValueError: a list or tuple of another length.
        """
        if not isinstance(values, (list, tuple)):
            values = [values] * self.num_envs
        if len(values) != self.num_envs:
            raise ValueError(
                "Values must be a list or tuple with length equal to the number of environments. "
                f"Got `{len(values)}` values for {self.num_envs} environments."
            )
        self.core.set_attr(self.core.everyone, name, values)

    def set_attr_some(self, indices: Sequence[int], name: str, values: Sequence[Any]) -> None:
        """Set an attribute of the environments of the copies ``indices`` only, one value for each."""
        self.core.set_attr(indices, name, values)

    @property
    def np_random_seed(self) -> tuple[int, ...]:  # type: ignore[override]
        """The seed of each environment's ``np_random``, -1 where it is not known."""
        return self.get_attr("np_random_seed")

    @property  # type: ignore[misc]
    def np_random(self) -> tuple[np.random.Generator, ...]:  # type: ignore[override]
        """A copy of each environment's random number generator."""
        return self.get_attr("np_random")

    def render(self) -> tuple[Any, ...]:
        """What each environment's ``render`` gives: a tuple of ``num_envs`` frames."""
        return self.call("render")

    # Episodes

    def history(self) -> list[Episode]:
        """The latest finished episodes (at most 1000), oldest first: seed, length, reward, time and cost of each."""
        return list(self.core.copies.log.finished)

    # The end

    def close_extras(self, timeout: float | None = None, terminate: bool = False, **kwargs: Any) -> None:
        """End the copies, closing their environments, and the base if nobody else uses it.

        Args:
            timeout: seconds to wait for a pending call and for the copies to close; by default 5, and the base's
                ``close_timeout``.
            terminate: end them at once.
            **kwargs: ignored.
        """
        try:
            if hasattr(self, "core"):
                self.core.close(timeout, terminate)
        finally:
            if hasattr(self, "_lease"):
                self._lease.release()

    def __del__(self) -> None:
        if not getattr(self, "closed", True) and not sys.is_finalizing():
            self.close()

    def __repr__(self) -> str:
        if not hasattr(self, "num_envs"):
            return f"{type(self).__name__}(closed)"
        return super().__repr__()

    def _repr_html_(self) -> str:
        if not hasattr(self, "core"):
            return table(repr(self), {})
        rewards = [episode.reward for episode in self.history()]
        rows = {
            "base": "closed" if self.closed else repr(self.base),
            "autoreset": self.autoreset_mode.value,
            "fork on": self._settings.fork_on,
            "observation space": self.single_observation_space,
            "action space": self.single_action_space,
            "finished episodes": len(rewards),
            "their mean reward": float(np.mean(rewards)) if rewards else None,
        }
        return table(f"{type(self).__name__}: {self.num_envs} copies", rows)

"""``ForkedVectorEnv``: Gymnasium's vector environment over forks of a warm base."""

from __future__ import annotations

import multiprocessing
import operator
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from typing import Any, Literal, TypeAlias, TypeVar

import gymnasium as gym
import numpy as np
import numpy.typing as npt
from gymnasium.envs.registration import EnvSpec
from gymnasium.error import AlreadyPendingCallError, ClosedEnvironmentError, NoAsyncCallError, ResetNeeded
from gymnasium.vector import AutoresetMode
from gymnasium.vector.async_vector_env import AsyncState
from gymnasium.vector.utils import batch_space

from prized_gym.actions import ActionCheck
from prized_gym.arguments import Seed, at_least_one, earlier, one_of, seconds, seed_list, take_mask
from prized_gym.base import SHARED, Base, count_copies, find_base
from prized_gym.batch import Array
from prized_gym.calls import RANDOM_STATE
from prized_gym.errors import BaseDiedError, EpisodeOverError, InterruptedStepError
from prized_gym.html import table
from prized_gym.infos import merge
from prized_gym.interface import commands as ops
from prized_gym.interface.commands import Call, Command, Fresh, Reseed, Reset, SetAttr, Start
from prized_gym.interface.failure import Failure
from prized_gym.interface.fleet import Fleet
from prized_gym.recipe import EnvFactory
from prized_gym.seeding import SeedStream, fresh_entropy
from prized_gym.vector.history import Episode, EpisodeLog

_Entry = TypeVar("_Entry")
Batch: TypeAlias = Any
Infos: TypeAlias = "dict[str, Any]"
StepResult: TypeAlias = (
    "tuple[Batch, npt.NDArray[np.float64], npt.NDArray[np.bool_], npt.NDArray[np.bool_], dict[str, Any]]"
)

_CLOSE_TIMEOUT = 5.0
_PROVEN = 1000
"""Steps an episode must run for its failure not to count as one in a row with the failure before it."""


class _StillPendingError(multiprocessing.TimeoutError):
    """Waiting was given up, not the call; told apart from a time-out that an environment raises."""


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
    ``reset`` or attribute asked for, and an attribute asked for does not cost a second fork.

    Seeds: ``reset(seed=s)`` seeds copy i with ``s + i``. For an environment that draws only from ``np_random``, everything
    from a seeded reset on is then bit-identical to ``SyncVectorEnv`` (with ``reset_in="copy"`` and ``fork_on`` ``"reset"`` or
    ``"start"``). A ``reset`` without a seed goes on with each copy's ``np_random``, in a new fork too. An autoreset that
    forks takes the next seed of its copy's own stream, repeatable from the last explicit seed. After every fork Python's,
    NumPy's, torch's and the environment's own generators are reseeded; one hidden in a C library is reached by
    ``env.reset(seed=...)`` or by ``on_fork`` only.

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
        reset_timeout: the same for a reset. In same-step mode a step that ends an episode may take both; an engine that
            cannot see where one ends and the other begins (a sandbox) gives both together the sum of the two limits.
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
        self._fork_on = one_of("fork_on", fork_on, ("reset", "episode", "start"))
        self._reset_in = one_of("reset_in", reset_in, ("copy", "base"))
        self._on_failure = one_of("on_failure", on_failure, ("raise", "truncate"))
        self._max_failures = at_least_one("max_failures", max_failures)
        self._max_concurrent = None if max_concurrent is None else at_least_one("max_concurrent", max_concurrent)
        if at_least_one("per_process", per_process) != 1:
            raise ValueError(
                f"per_process={per_process}: each copy is a process of its own, only per_process=1 is possible"
            )
        self._step_timeout = seconds("step_timeout", step_timeout)
        self._reset_timeout = seconds("reset_timeout", reset_timeout)
        self.copy = copy
        if num_envs is not None:
            num_envs = at_least_one("num_envs", num_envs)
        options.update(engine=engine, max_episode_steps=max_episode_steps, render_mode=render_mode)
        self.base, self._owns_base = find_base(env, num_envs, progress, options)
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
        self._check = ActionCheck(description.action_space)
        self._fleet: Fleet | None = None
        self._state = AsyncState.DEFAULT
        self._broken: str | None = None
        self._same_step = self.autoreset_mode is AutoresetMode.SAME_STEP
        self._disabled = self.autoreset_mode is AutoresetMode.DISABLED
        entropy = fresh_entropy()
        self._streams = [SeedStream(entropy, index, count) for index in range(count)]
        self._attributes: list[dict[str, Any]] = [{} for _ in range(count)]
        self._failures_in_row = [0] * count
        # Per copy: exists but was never reset; was reset at least once; must be forked before its next episode.
        self._untouched = [False] * count
        self._was_reset = [False] * count
        self._must_fork = [False] * count
        self._all_reset = False
        self._done = np.zeros(count, dtype=np.bool_)
        self._any_done = False
        self._over: list[int] = []
        self._everyone = list(range(count))
        self._all_step = bytes([ops.STEP_RESET if self._same_step and self._fork_on != "episode" else ops.STEP]) * count
        self._resetting: dict[int, int | None] = {}
        self._reset_options: Sequence[dict[str, Any] | None] = ()
        self._queue: deque[Callable[[], None]] = deque()
        self._sent: dict[int, float] = {}
        self._begun_at: dict[int, float] = {}
        self._early: set[int] = set()
        self._call_targets: list[int] = []
        self._log = EpisodeLog(count)
        self._next_seeds: dict[int, int | None] = {}

    # Reset

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
            AlreadyPendingCallError: an asynchronous call is pending.
            ValueError, TypeError: a seed or mask of the wrong form; options with ``reset_in="base"``.
        """
        with self._whole_call():
            self.reset_async(seed=seed, options=options)
            return self.reset_wait()

    def reset_async(self, seed: Seed = None, options: dict[str, Any] | None = None) -> None:
        """Begin a :meth:`reset`; :meth:`reset_wait` finishes it."""
        self._check_idle("reset_async")
        seeds = seed_list(seed, self.num_envs)
        options, mask = take_mask(options, self.num_envs)
        targets = self._everyone if mask is None else [int(index) for index in np.flatnonzero(mask)]
        if self._broken is not None:
            if mask is not None:
                raise InterruptedStepError(self._broken)
            self._abandon_fleet()
        self._start_reset(targets, seeds, [options] * self.num_envs)

    def _start_reset(
        self, targets: Sequence[int], seeds: Sequence[int | None], options: Sequence[dict[str, Any] | None]
    ) -> None:
        """Begin to reset the copies ``targets``; ``seeds`` and ``options`` have an entry for every copy."""
        if self._reset_in == "base" and any(options):
            raise ValueError(
                f"options={next(filter(None, options))} with reset_in='base': "
                "the environment was reset once, in the base, without options"
            )
        self._state = AsyncState.WAITING_RESET
        self._reset_options = options
        try:
            self._begin_reset(targets, seeds)
        except BaseException as error:
            self._abort(error)
            raise

    def reset_wait(self, timeout: float | None = None) -> tuple[Batch, Infos]:
        """Finish what :meth:`reset_async` began.

        Args:
            timeout: seconds to wait.

        Raises:
            NoAsyncCallError: no reset is pending.
            multiprocessing.TimeoutError: not finished within ``timeout``; it can be waited for again.
        """
        self._check_pending(AsyncState.WAITING_RESET, "reset_wait", "reset_async")
        try:
            limit = earlier(timeout, self._reset_timeout)
            fleet = self._live_fleet()
            self._wait_all(fleet, timeout, self._reset_timeout, limit, "reset_wait")
            self._retry_resets(fleet, list(self._resetting), self._reset_options)
            fleet = self._live_fleet()
            infos = self._merge_infos(fleet.infos, self.num_envs)
            fleet.infos.clear()
            for index, seed in self._resetting.items():
                self._episode_begins(index, seed)
            self._resetting = {}
            self._note_over()
            self._all_reset = all(self._was_reset)
            observations = fleet.observations.batch(self.copy)
            self._state = AsyncState.DEFAULT
            return observations, infos
        except BaseException as error:
            self._abort(error)
            raise

    def _begin_reset(self, targets: Sequence[int], seeds: Sequence[int | None]) -> None:
        fleet = self._live_fleet()
        fork: dict[int, Reset] = {}
        in_place: dict[int, Command] = {}
        unseeded: list[int] = []
        self._resetting = {}
        for index in targets:
            seed, options = seeds[index], self._reset_options[index]
            if seed is not None:
                self._streams[index] = SeedStream(seed, index, self.num_envs)
            exists = fleet.alive(index) and not self._must_fork[index]
            if exists and self._untouched[index]:
                own = self._streams[index].next() if seed is None else seed
                in_place[index] = Reset(seed, options, reseed=own, from_base=self._reset_in == "base")
                self._resetting[index] = own
            elif exists and self._fork_on == "start" and self._reset_in == "copy":
                in_place[index] = Reset(seed, options)
                self._resetting[index] = seed
            else:
                fork[index] = self._fresh_reset(index, seed, options)
                if seed is None and self._was_reset[index]:
                    unseeded.append(index)
                elif seed is None:
                    # Its generators are fresh: the environment is reset as it would be anywhere else.
                    fork[index].seed = None
        self._carry_random_state(fleet, {index: fork[index] for index in unseeded})
        # The ones in place first: they work while the others are being forked.
        if in_place:
            fleet.command(in_place)
        if fork:
            self._fork(dict(fork))

    def _carry_random_state(self, fleet: Fleet, resets: Mapping[int, Reset]) -> None:
        """Where the caller gave no seed, let each new fork go on with the ``np_random`` of the copy it replaces.

        So an unseeded reset is what it is in ``SyncVectorEnv``. What cannot go on (a copy that died, or was never reset)
        keeps the seed its reset was given from its stream.
        """
        if self._reset_in == "base" or not fleet.carries_random_state:
            return
        going_on = [index for index in resets if fleet.alive(index) and self._was_reset[index]]
        fleet.command({index: Call(RANDOM_STATE) for index in going_on})
        self._wait_all(fleet, None, self._reset_timeout, self._reset_timeout, "reset_wait")
        for index in going_on:
            fleet.failures.pop(index, None)
            state = fleet.results.pop(index, None)
            fresh = resets[index].fresh
            if state is not None and fresh is not None:
                fresh.random_state = state
                resets[index].seed = None
                self._resetting[index] = None

    def _fresh_reset(self, index: int, seed: int | None, options: dict[str, Any] | None = None) -> Reset:
        """The first command of a new fork of copy ``index``, whose episode begins with it."""
        own = self._streams[index].next() if seed is None else seed
        self._resetting[index] = own
        fresh = Fresh(own, dict(self._attributes[index]))
        return Reset(own, options, fresh=fresh, from_base=self._reset_in == "base")

    def _fork(self, first: dict[int, Command]) -> None:
        """Make new forks; if the base has died, of a base rebuilt from its recipe."""
        fleet = self._live_fleet()
        timeout = None if self._reset_timeout is None else max(60.0, self._reset_timeout)
        try:
            fleet.fork(first, timeout)
        except BaseDiedError:
            fleet = self._replace_fleet()
            fleet.fork(first, timeout)
        for index in first:
            self._must_fork[index] = False
            self._log.forked(index)

    def _retry_resets(
        self, fleet: Fleet, indices: Sequence[int], options: Sequence[dict[str, Any] | None] | None = None
    ) -> None:
        """Try a reset of one of ``indices`` that failed once more in a fresh fork, or raise what it failed of."""
        for attempt in (1, 2):
            failures = _take(fleet.failures, indices)
            if not failures:
                return
            first = next(iter(failures.values()))
            for index, failure in failures.items():
                self._note_failure(index, failure)
            if self._on_failure == "raise" or attempt == 2:
                raise first.error()
            self._fork(
                {
                    index: self._fresh_reset(index, self._resetting.get(index), options[index] if options else None)
                    for index in failures
                }
            )
            fleet = self._live_fleet()
            self._wait_for(fleet, failures)

    # Step

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
        try:
            self.step_async(actions)
            return self.step_wait()
        except BaseException as error:
            self._left(error)
            raise

    def step_async(self, actions: Batch) -> None:
        """Begin a :meth:`step`; :meth:`step_wait` finishes it."""
        if self.closed or self._state is not AsyncState.DEFAULT or self._sent:
            self._check_idle("step_async")
        if not self._all_reset or self._broken is not None:
            self._check_reset(self._everyone)
        arrays, objects = self._check.split(actions, self.num_envs, self._done if self._any_done else None)
        if self._disabled and self._any_done:
            self._refuse_over(self._everyone)
        self._state = AsyncState.WAITING_STEP
        try:
            if self._any_done or self._max_concurrent is not None:
                self._begin_some(self._everyone, arrays, objects)
            else:
                self._live_fleet().step(arrays, objects, self._all_step)
        except BaseException as error:
            self._abort(error)
            raise

    def step_wait(self, timeout: float | None = None) -> StepResult:
        """Finish what :meth:`step_async` began.

        Args:
            timeout: seconds to wait.

        Raises:
            NoAsyncCallError: no step is pending.
            multiprocessing.TimeoutError: not finished within ``timeout``; it can be waited for again.
        """
        if self._state is not AsyncState.WAITING_STEP or self.closed:
            self._check_pending(AsyncState.WAITING_STEP, "step_wait", "step_async")
        try:
            fleet = self._live_fleet()
            if self._step_timeout is not None or self._queue or (self._resetting and self._reset_timeout is not None):
                self._await_steps(fleet, timeout)
            elif timeout is None:
                fleet.wait()
            else:
                self._wait_all(fleet, timeout, None, timeout, "step_wait")
            infos: dict[int, dict[str, Any]] | None = None
            if fleet.failures or self._same_step:
                infos = self._after_steps(fleet, self._everyone)
                fleet = self._live_fleet()
            rewards = fleet.rewards.copy()
            terminations = fleet.terminations.copy()
            truncations = fleet.truncations.copy()
            done = terminations | truncations
            self._account(rewards, done)
            if infos is None and fleet.infos:
                infos = fleet.infos
            merged = self._merge_infos(infos or {}, self.num_envs)
            fleet.infos.clear()
            observations = fleet.observations.batch(self.copy)
            self._state = AsyncState.DEFAULT
            return observations, rewards, terminations, truncations, merged
        except BaseException as error:
            self._abort(error)
            raise

    def _merge_infos(self, infos: Mapping[int, dict[str, Any]], count: int) -> Any:
        """The infos of some copies as one, the way :meth:`step` and :meth:`reset` return them."""
        return merge(infos, count) if infos else {}

    def _account(self, rewards: npt.NDArray[np.float64], done: npt.NDArray[np.bool_]) -> None:
        """Keep the episodes' returns and lengths; remember whose episode is over."""
        self._log.add(rewards)
        if self._resetting:
            for index, seed in self._resetting.items():
                self._episode_begins(index, seed)
            self._resetting = {}
        any_done = b"\1" in done.tobytes()
        over = np.flatnonzero(done).tolist() if any_done else []
        for index in over:
            self._episode_ends(index)
        if self._same_step:
            for index in over:
                self._episode_begins(index, self._next_seeds.pop(index, None))
        else:
            self._done, self._any_done, self._over = done, any_done, over

    def _note_over(self) -> None:
        self._over = np.flatnonzero(self._done).tolist()
        self._any_done = bool(self._over)

    def _begin_some(self, indices: Sequence[int], arrays: Sequence[Array], objects: Sequence[Sequence[Any]]) -> None:
        """Begin a step of the copies ``indices``: autoresets for those whose episode is over, steps for the others."""
        fleet = self._live_fleet()
        batch = bytearray(self._all_step[:1] * len(indices))
        forks: dict[int, Command] = {}
        whole = indices is self._everyone
        for index in self._over:
            if not whole and index not in indices:
                continue
            number = index if whole else indices.index(index)
            if self._fork_on == "episode" or self._must_fork[index] or not fleet.alive(index):
                forks[index] = self._fresh_reset(index, None)
                batch[number] = ops.NOOP
            else:
                batch[number] = ops.RESET
                self._resetting[index] = None
        if self._max_concurrent is not None:
            self._begin_queued(fleet, indices, arrays, objects, batch, forks)
            return
        if whole and not forks:
            fleet.step(arrays, objects, bytes(batch))
            return
        rest = [number for number, index in enumerate(indices) if index not in forks]
        if rest:
            chosen = np.asarray(rest, dtype=np.intp)
            fleet.step_some(
                [indices[number] for number in rest],
                [array[chosen] for array in arrays],
                [[column[number] for number in rest] for column in objects],
                bytes(batch[number] for number in rest),
            )
        if forks:
            self._fork(forks)

    def _begin_queued(
        self,
        fleet: Fleet,
        indices: Sequence[int],
        arrays: Sequence[Array],
        objects: Sequence[Sequence[Any]],
        batch: bytearray,
        forks: dict[int, Command],
    ) -> None:
        """Begin at most ``max_concurrent`` copies, and leave the others in the queue."""

        # The caller may reuse its arrays as soon as this call returns.
        arrays, objects = [array.copy() for array in arrays], [list(column) for column in objects]

        def one(number: int, index: int) -> Callable[[], None]:
            row = slice(number, number + 1)

            def begin() -> None:
                self._begun_at[index] = time.monotonic()
                if index in self._sent:
                    self._sent[index] = self._begun_at[index]
                if index in forks:
                    self._fork({index: forks[index]})
                    return
                self._live_fleet().step_some(
                    [index], [array[row] for array in arrays], [column[row] for column in objects], bytes(batch[row])
                )

            return begin

        self._queue.extend(one(number, index) for number, index in enumerate(indices))
        self._feed_queue(fleet)

    def _feed_queue(self, fleet: Fleet) -> None:
        limit = self._max_concurrent or self.num_envs
        while self._queue and len(fleet.busy) < limit:
            self._queue.popleft()()
            fleet = self._live_fleet()

    def _await_steps(self, fleet: Fleet, timeout: float | None) -> None:
        """Wait for a whole batch whose copies have a time limit, or of which only some may work at a time."""
        started = time.monotonic()
        give_up = None if timeout is None else started + timeout
        first = earlier(timeout, earlier(self._step_timeout, self._reset_timeout))
        fleet.wait(1 if self._queue else None, first)
        while fleet.busy or self._queue:
            now = time.monotonic()
            if give_up is not None and now >= give_up:
                raise _StillPendingError(
                    f"The call to `step_wait` has timed out after {timeout} second{'s' if (timeout or 0) > 1 else ''}."
                )
            self._end_overdue(fleet, now, started)
            self._feed_queue(fleet)
            fleet = self._live_fleet()
            if fleet.busy:
                left = earlier(self._next_deadline(fleet, started), give_up)
                fleet.wait(1 if self._queue else None, None if left is None else max(0.0, left - time.monotonic()))

    def _limit(self, fleet: Fleet, index: int) -> float | None:
        """How many seconds copy ``index`` may take for what it was sent: a step, a reset, or in same-step mode both."""
        if not self._same_step:
            return self._reset_timeout if index in self._resetting else self._step_timeout
        resetting = fleet.resetting(index)
        if self._step_timeout is None or resetting is False:
            return self._step_timeout
        if resetting is None:
            return self._step_timeout + (self._reset_timeout or 0.0)
        return None if self._reset_timeout is None else self._step_timeout + self._reset_timeout

    def _deadline(self, fleet: Fleet, index: int, started: float) -> float | None:
        limit = self._limit(fleet, index)
        return None if limit is None else self._sent.get(index, self._begun_at.get(index, started)) + limit

    def _next_deadline(self, fleet: Fleet, started: float) -> float | None:
        deadlines = (self._deadline(fleet, index, started) for index in fleet.busy)
        return min((deadline for deadline in deadlines if deadline is not None), default=None)

    def _end_overdue(self, fleet: Fleet, now: float, started: float) -> list[int]:
        """End the copies that have used up their time."""
        overdue = []
        for index in fleet.busy:
            deadline = self._deadline(fleet, index, started)
            if deadline is not None and now >= deadline:
                fleet.failures[index] = fleet.end(index, timed_out=self._limit(fleet, index))
                overdue.append(index)
        return overdue

    def _end_hung(self, fleet: Fleet, limit: float | None) -> None:
        for index in fleet.busy:
            fleet.failures[index] = fleet.end(index, timed_out=limit)

    def _wait_all(self, fleet: Fleet, timeout: float | None, own: float | None, limit: float | None, name: str) -> None:
        """Wait for every busy copy: at most ``timeout`` seconds, and end those that take longer than ``own``."""
        fleet.wait(None, limit)
        if not fleet.busy:
            return
        if timeout is not None and (own is None or timeout <= own):
            raise _StillPendingError(
                f"The call to `{name}` has timed out after {timeout} second{'s' if timeout > 1 else ''}."
            )
        self._end_hung(fleet, own)

    def _wait_for(self, fleet: Fleet, indices: Iterable[int]) -> None:
        """Wait until the resets of ``indices`` have finished; what others finish meanwhile is kept for :meth:`recv`."""
        waiting = set(indices)
        deadline = None if self._reset_timeout is None else time.monotonic() + self._reset_timeout
        while waiting:
            finished = fleet.wait(1, None if deadline is None else max(0.0, deadline - time.monotonic()))
            self._early.update(index for index in finished if index not in waiting)
            waiting.difference_update(finished)
            if not finished:
                for index in waiting:
                    fleet.failures[index] = fleet.end(index, timed_out=self._reset_timeout)
                return

    def _after_steps(self, fleet: Fleet, indices: Sequence[int]) -> dict[int, dict[str, Any]]:
        """Deal with the copies that failed, and in same-step mode with the episodes that ended.

        Returns:
            The info of each copy that has one.
        """
        failed = self._take_failures(fleet, indices)
        fleet = self._live_fleet()
        infos = _take(fleet.infos, indices)
        self._next_seeds = {}
        if not self._same_step:
            for index, reason in failed.items():
                infos[index] = {"failure": reason}
            return infos
        ended = _take(fleet.finals, indices)
        refork: list[int] = []
        for index in indices:
            if index in failed:
                ended[index] = (fleet.observations.one(index), {"failure": failed[index]})
                infos.pop(index, None)
                refork.append(index)
            elif self._fork_on == "episode" and (fleet.terminations[index] or fleet.truncations[index]):
                ended[index] = (fleet.observations.one(index), infos.pop(index, {}))
                refork.append(index)
        if refork:
            infos.update(self._refork_now(refork))
        for index, (observation, info) in ended.items():
            infos[index] = {"final_obs": observation, "final_info": info, **infos.get(index, {})}
        return infos

    def _refork_now(self, indices: Sequence[int]) -> dict[int, dict[str, Any]]:
        """Begin the next episode of some copies in fresh forks, within the step that ended the one before."""
        fleet = self._live_fleet()
        kept = {i: (fleet.rewards[i], fleet.terminations[i], fleet.truncations[i]) for i in indices}
        waiting, self._resetting = self._resetting, {}
        self._fork({index: self._fresh_reset(index, None) for index in indices})
        fleet = self._live_fleet()
        self._wait_for(fleet, indices)
        self._retry_resets(fleet, indices)
        fleet = self._live_fleet()
        # The resets have cleared what this step has to return.
        for index in indices:
            fleet.rewards[index], fleet.terminations[index], fleet.truncations[index] = kept[index]
        self._next_seeds, self._resetting = self._resetting, waiting
        return _take(fleet.infos, indices)

    def _take_failures(self, fleet: Fleet, indices: Sequence[int]) -> dict[int, str]:
        """The failures of a batch: raised, retried where an autoreset failed, or turned into truncated episodes."""
        if not fleet.failures:
            return {}
        failures = _take(fleet.failures, indices)
        in_reset = {index: failure for index, failure in failures.items() if index in self._resetting}
        in_step = {index: failure for index, failure in failures.items() if index not in in_reset}
        if not failures:
            return {}
        if self._on_failure == "raise":
            raise next(iter((*in_step.values(), *in_reset.values()))).error()
        reasons: dict[int, str] = {}
        for index, failure in in_step.items():
            self._note_failure(index, failure)
            if self._failures_in_row[index] >= self._max_failures:
                raise failure.error()
            fleet.rewards[index] = 0.0
            fleet.terminations[index] = False
            fleet.truncations[index] = True
            self._must_fork[index] = True
            reasons[index] = failure.headline()
        if in_reset:
            fleet.failures.update(in_reset)
            self._retry_resets(fleet, list(in_reset))
        return reasons

    def _note_failure(self, index: int, failure: Failure) -> None:
        if self._log.lengths[index] >= _PROVEN:
            self._failures_in_row[index] = 0
        self._failures_in_row[index] += 1
        self._log.fail(index, failure.headline())

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
        self._check_open()
        if self._state is not AsyncState.DEFAULT:
            raise AlreadyPendingCallError(
                f"Calling `send` while waiting for a pending call to `{self._state.value}`", "send"
            )
        chosen = self._everyone if indices is None else [operator.index(index) for index in indices]
        for index in chosen:
            if not 0 <= index < self.num_envs:
                raise ValueError(f"there is no copy {index}: num_envs={self.num_envs}")
            if index in self._sent:
                raise AlreadyPendingCallError(f"copy {index} was sent an action that has not been received", "send")
        if len(set(chosen)) != len(chosen):
            raise ValueError(f"indices={chosen} names a copy twice")
        self._check_reset(chosen)
        ignored = self._done[np.asarray(chosen, dtype=np.intp)] if self._any_done else None
        arrays, objects = self._check.split(actions, len(chosen), ignored)
        if self._disabled and self._any_done:
            self._refuse_over(chosen)
        try:
            if self._any_done or self._max_concurrent is not None:
                self._begin_some(chosen, arrays, objects)
            else:
                self._live_fleet().step_some(chosen, arrays, objects, self._all_step[:1] * len(chosen))
            now = time.monotonic()
            self._sent.update((index, now) for index in chosen)
        except BaseException as error:
            self._abort(error)
            raise

    def recv(self, min_ready: int = 1) -> tuple[Any, Any, Any, Any, dict[str, Any], npt.NDArray[np.int64]]:
        """Wait until at least ``min_ready`` of the copies that were sent actions have answered, and return those.

        Returns:
            Observations, rewards, terminations, truncations of the copies that are ready, each a batch of that many, in
            the order of the last item, ``indices`` (int64); infos are merged with the position in that order.

        Raises:
            NoAsyncCallError: fewer than ``min_ready`` copies are pending.
            and what :meth:`step` raises.
        """
        self._check_open()
        if not 1 <= min_ready <= len(self._sent):
            raise NoAsyncCallError(f"recv(min_ready={min_ready}) with {len(self._sent)} copies pending", "recv")
        try:
            return self._receive(min_ready)
        except BaseException as error:
            self._abort(error)
            raise

    def _receive(self, min_ready: int) -> tuple[Any, Any, Any, Any, dict[str, Any], npt.NDArray[np.int64]]:
        fleet = self._live_fleet()
        ready = [index for index in self._early if index in self._sent]
        self._early.clear()
        while len(ready) < min_ready:
            deadline = self._next_deadline(fleet, 0.0) if fleet.busy else None
            wait = None if deadline is None else max(0.0, deadline - time.monotonic())
            ready += fleet.wait(1 if self._queue else min_ready - len(ready), wait)
            if deadline is not None:
                ready += self._end_overdue(fleet, time.monotonic(), 0.0)
            self._feed_queue(fleet)
            fleet = self._live_fleet()
            ready += [index for index in self._early if index in self._sent]
            self._early.clear()
        ready.sort()
        starting = {index: self._resetting.pop(index) for index in ready if index in self._resetting}
        pending, self._resetting = self._resetting, starting
        infos = self._after_steps(fleet, ready)
        fleet = self._live_fleet()
        self._resetting = pending
        chosen = np.asarray(ready, dtype=np.int64)
        rewards, terminations = fleet.rewards[chosen], fleet.terminations[chosen]
        truncations = fleet.truncations[chosen]
        observations = fleet.observations.rows(ready)
        done = terminations | truncations
        self._log.add(rewards, chosen)
        for index, seed in starting.items():
            self._episode_begins(index, seed)
        for index in chosen[done]:
            self._episode_ends(int(index))
            if self._same_step:
                self._episode_begins(int(index), self._next_seeds.pop(int(index), None))
        if not self._same_step:
            self._done[chosen] = done
            self._note_over()
        for index in ready:
            self._sent.pop(index, None)
        merged = self._merge_infos({ready.index(index): info for index, info in infos.items()}, len(ready))
        return observations, rewards, terminations, truncations, merged, chosen

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
        self._check_idle("branch")
        source = operator.index(source)
        chosen = [operator.index(index) for index in targets]
        for index in (source, *chosen):
            if not 0 <= index < self.num_envs:
                raise ValueError(f"there is no copy {index}: num_envs={self.num_envs}")
        if source in chosen or len(set(chosen)) != len(chosen):
            raise ValueError(f"branch({source}, {chosen}): the targets must be distinct and not the source")
        self._check_reset([source])
        if self._must_fork[source]:
            raise ResetNeeded(f"copy {source} has failed and waits for its next episode: it cannot be branched")
        try:
            fleet = self._live_fleet()
            if chosen:
                fleet.branch(source, chosen)
                if not fleet.failures and reseed:
                    fleet.command({index: Reseed(self._streams[index].next()) for index in chosen})
                    fleet.wait()
            failures = dict(fleet.failures)
            fleet.failures.clear()
            fleet.results.clear()
            if failures:
                raise next(iter(failures.values())).error()
            for index in chosen:
                self._was_reset[index] = True
                self._untouched[index] = self._must_fork[index] = False
                self._done[index] = self._done[source]
                self._log.branch(source, index)
                self._attributes[index] = dict(self._attributes[source])
            self._all_reset = all(self._was_reset)
            self._note_over()
            return fleet.observations.batch(self.copy)
        except BaseException as error:
            self._abort(error)
            raise

    # Attributes and methods of the environments

    def call(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Call the method ``name`` of each environment, or get the attribute of that name.

        Returns:
            One result per copy, carried over from the copies.
        """
        with self._whole_call():
            self.call_async(name, *args, **kwargs)
            return self.call_wait()

    def call_async(self, name: str, *args: Any, **kwargs: Any) -> None:
        """Begin a :meth:`call`; :meth:`call_wait` finishes it."""
        self.call_some_async(self._everyone, name, *args, **kwargs)

    def call_some_async(self, indices: Sequence[int], name: str, /, *args: Any, **kwargs: Any) -> None:
        """Begin a :meth:`call` in the copies ``indices`` only; :meth:`call_wait` then returns one result for each."""
        self._check_idle("call_async")
        self._state = AsyncState.WAITING_CALL
        try:
            self._call_targets = list(indices)
            self._ensure_copies(indices)
            self._live_fleet().command({index: Call(name, args, kwargs) for index in indices})
        except BaseException as error:
            self._abort(error)
            raise

    def call_wait(self, timeout: float | None = None) -> tuple[Any, ...]:
        """Finish what :meth:`call_async` began.

        Raises:
            NoAsyncCallError: no call is pending.
            multiprocessing.TimeoutError: not finished within ``timeout`` seconds; it can be waited for again.
        """
        self._check_pending(AsyncState.WAITING_CALL, "call_wait", "call_async")
        try:
            fleet = self._live_fleet()
            self._wait_all(fleet, timeout, None, timeout, "call_wait")
            results = tuple(fleet.results.get(index) for index in self._call_targets)
            fleet.results.clear()
            failures = dict(fleet.failures)
            fleet.failures.clear()
        except BaseException as error:
            self._abort(error)
            raise
        # The copies themselves are as they were: a failed call needs no reset.
        self._state = AsyncState.DEFAULT
        if failures:
            raise next(iter(failures.values())).error()
        return results

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
        self._check_idle("set_attr")
        if not isinstance(values, (list, tuple)):
            values = [values] * self.num_envs
        if len(values) != self.num_envs:
            raise ValueError(
                "Values must be a list or tuple with length equal to the number of environments. "
                f"Got `{len(values)}` values for {self.num_envs} environments."
            )
        self.set_attr_some(self._everyone, name, values)

    def set_attr_some(self, indices: Sequence[int], name: str, values: Sequence[Any]) -> None:
        """Set an attribute of the environments of the copies ``indices`` only, one value for each."""
        self._check_idle("set_attr")
        fleet = self._fleet
        if fleet is None:
            self._note_attributes(indices, name, values)
            return
        live = {
            index: SetAttr({name: value})
            for index, value in zip(indices, values, strict=True)
            if fleet.alive(index) and not self._must_fork[index]
        }
        if not live:
            self._note_attributes(indices, name, values)
            return
        self._state = AsyncState.WAITING_CALL
        try:
            fleet.command(live)
            fleet.wait()
            failures = dict(fleet.failures)
            fleet.failures.clear()
        except BaseException as error:
            self._abort(error)
            raise
        self._state = AsyncState.DEFAULT
        if failures:
            raise next(iter(failures.values())).error()
        self._note_attributes(indices, name, values)

    def _note_attributes(self, indices: Sequence[int], name: str, values: Sequence[Any]) -> None:
        """Remember what was set, for new forks."""
        for index, value in zip(indices, values, strict=True):
            self._attributes[index][name] = value

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

    def _ensure_copies(self, indices: Sequence[int]) -> None:
        """Fork the copies that do not exist yet, so that they can be asked something before their first reset."""
        fleet = self._live_fleet()
        missing = [index for index in indices if not fleet.alive(index) or self._must_fork[index]]
        if not missing:
            return
        self._fork(
            {index: Start(Fresh(self._streams[index].next(), dict(self._attributes[index]))) for index in missing}
        )
        fleet = self._live_fleet()
        self._wait_all(fleet, None, self._reset_timeout, self._reset_timeout, "call_wait")
        if fleet.failures:
            failure = next(iter(fleet.failures.values()))
            fleet.failures.clear()
            raise failure.error()
        for index in missing:
            self._untouched[index] = True

    # Episodes

    def history(self) -> list[Episode]:
        """The latest finished episodes (at most 1000), oldest first: seed, length, reward, time and cost of each."""
        return list(self._log.finished)

    def _episode_begins(self, index: int, seed: int | None) -> None:
        self._was_reset[index] = True
        self._untouched[index] = False
        self._done[index] = False
        self._log.begin(index, seed)

    def _episode_ends(self, index: int) -> None:
        if self._log.end(index, self._live_fleet().usage(index)):
            self._failures_in_row[index] = 0

    # The fleet

    def _live_fleet(self) -> Fleet:
        if self._fleet is None:
            self._fleet = self.base.fleet(self.num_envs, self._reset_in == "base")
            self._fleet.set_time_limits(self._step_timeout, self._reset_timeout)
        return self._fleet

    def _replace_fleet(self) -> Fleet:
        """A fleet of a rebuilt base, with the observations of the old one."""
        old, self._fleet = self._fleet, None
        try:
            new = self._live_fleet()
        except BaseException:
            # There is no other: the old one is still to be closed.
            self._fleet = old
            raise
        if old is not None:
            for target, source in zip(new.observations.arrays, old.observations.arrays, strict=True):
                target[...] = source
            new.observations.objects = old.observations.objects
            for name in ("rewards", "terminations", "truncations"):
                getattr(new, name)[...] = getattr(old, name)
            # Whoever was still at work has failed with the base.
            self._early.update(old.wait(None, 0.0))
            new.infos, new.finals, new.results, new.failures = old.infos, old.finals, old.results, old.failures
            for index in range(self.num_envs):
                new.lose(index, old.end(index))
            old.close(timeout=0.0)
        return new

    def _abandon_fleet(self) -> None:
        """Drop every copy: after an interrupted call they are at different points."""
        fleet, self._fleet = self._fleet, None
        if fleet is not None:
            fleet.close(timeout=0.0)
        self._broken = None
        self._queue.clear()
        self._sent.clear()
        self._early.clear()
        self._resetting = {}
        self._untouched = [False] * self.num_envs
        self._must_fork = [False] * self.num_envs
        self._failures_in_row = [0] * self.num_envs

    @contextmanager
    def _whole_call(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self._left(error)
            raise

    def _left(self, error: BaseException) -> None:
        """An interrupt may have come between the two halves of a call, with nobody left to wait for the second."""
        if not isinstance(error, Exception) and not self.closed and self._state is not AsyncState.DEFAULT:
            self._abort(error)

    def _abort(self, error: BaseException) -> None:
        """After an error in the middle of a call: remember that the copies are out of step."""
        if isinstance(error, _StillPendingError):
            # Still pending: it can be waited for again.
            return
        self._state = AsyncState.DEFAULT
        self._queue.clear()
        what = "interrupted" if isinstance(error, KeyboardInterrupt) else f"ended by {type(error).__name__}"
        self._broken = f"an earlier call was {what}, and the copies are at different points: call reset() first"

    # Checks

    def _check_open(self) -> None:
        if self.closed:
            raise ClosedEnvironmentError(f"Trying to operate on `{type(self).__name__}`, after a call to `close()`.")

    def _check_idle(self, name: str) -> None:
        self._check_open()
        if self._state is not AsyncState.DEFAULT:
            raise AlreadyPendingCallError(
                f"Calling `{name}` while waiting for a pending call to `{self._state.value}` to complete",
                self._state.value,
            )
        if self._sent and self._broken is None:
            raise AlreadyPendingCallError(
                f"Calling `{name}` while copies {sorted(self._sent)} have been sent actions: recv() them first", "send"
            )

    def _check_pending(self, state: AsyncState, name: str, before: str) -> None:
        self._check_open()
        if self._state is not state:
            raise NoAsyncCallError(f"Calling `{name}` without any prior call to `{before}`.", state.value)

    def _check_reset(self, indices: Sequence[int]) -> None:
        if self._broken is not None:
            raise InterruptedStepError(self._broken)
        for index in indices:
            if not self._was_reset[index]:
                raise ResetNeeded(f"Cannot step copy {index} before resetting it: call reset() first")

    def _refuse_over(self, indices: Sequence[int]) -> None:
        over = [index for index in indices if self._done[index]]
        if over:
            raise EpisodeOverError(
                f"the episodes of copies {over} are over and autoreset is disabled: reset them with "
                "reset(options={'reset_mask': mask}) before stepping them"
            )

    # The end

    def close_extras(self, timeout: float | None = None, terminate: bool = False, **kwargs: Any) -> None:
        """End the copies, closing their environments, and the base if nobody else uses it.

        Args:
            timeout: seconds to wait for a pending call and for the copies to close; 5 by default.
            terminate: end them at once.
        """
        fleet, self._fleet = getattr(self, "_fleet", None), None
        try:
            if fleet is not None:
                state = getattr(self, "_state", AsyncState.DEFAULT)
                if state is not AsyncState.DEFAULT:
                    gym.logger.warn(f"Calling `close` while waiting for a pending call to `{state.value}` to complete.")
                    if not terminate:
                        fleet.wait(None, _CLOSE_TIMEOUT if timeout is None else timeout)
                fleet.close(timeout=0.0 if terminate else timeout)
        finally:
            base = getattr(self, "base", None)
            if base is not None:
                SHARED.release(base)
                if self._owns_base:
                    base.close()

    def __del__(self) -> None:
        if not getattr(self, "closed", True) and not sys.is_finalizing():
            self.close()

    def __repr__(self) -> str:
        if not hasattr(self, "num_envs"):
            return f"{type(self).__name__}(closed)"
        return super().__repr__()

    def _repr_html_(self) -> str:
        if not hasattr(self, "num_envs"):
            return table(repr(self), {})
        rewards = [episode.reward for episode in self._log.finished]
        rows = {
            "base": "closed" if self.closed else repr(self.base),
            "autoreset": self.autoreset_mode.value,
            "fork on": self._fork_on,
            "observation space": self.single_observation_space,
            "action space": self.single_action_space,
            "finished episodes": len(rewards),
            "their mean reward": float(np.mean(rewards)) if rewards else None,
        }
        return table(f"{type(self).__name__}: {self.num_envs} copies", rows)


def _take(entries: dict[int, _Entry], indices: Sequence[int]) -> dict[int, _Entry]:
    """Move the entries of ``indices`` out of a dictionary."""
    return {index: entries.pop(index) for index in list(entries) if index in indices}


class UnmergedVectorEnv(ForkedVectorEnv):
    """A :class:`ForkedVectorEnv` whose infos are a list with the info of each copy as the environment gave it.

    For adapters to libraries whose infos are lists. In same-step mode ``final_obs`` and ``final_info`` are keys of the
    copy's info.
    """

    def _merge_infos(self, infos: Mapping[int, dict[str, Any]], count: int) -> Any:
        return [dict(infos.get(index, {})) for index in range(count)]

    def reset_each(
        self, seeds: Sequence[int | None], options: Sequence[dict[str, Any] | None]
    ) -> tuple[Batch, list[dict[str, Any]]]:
        """Reset every copy with a seed and options of its own; returns the observations and each copy's info."""
        self._check_idle("reset_each")
        if self._broken is not None:
            self._abandon_fleet()
        self._start_reset(self._everyone, seed_list(seeds, self.num_envs), options)
        observations, infos = self.reset_wait()
        return observations, infos  # type: ignore[return-value]

    def start(self) -> None:
        """Fork the copies that were never reset, to be stepped as they stand: what comes of it is the environment's affair."""
        self._check_idle("start")
        fresh = [index for index in self._everyone if not self._was_reset[index]]
        self._ensure_copies(fresh)
        for index in fresh:
            self._episode_begins(index, None)
        self._all_reset = True

"""The inline engine: the same semantics in the trainer's own process, each copy built anew. For debuggers and Windows."""

from __future__ import annotations

import time
import traceback
import weakref
from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any, ClassVar

import numpy as np

from prized_gym.batch import ActionBuffer, Array, ObservationBuffer, read_only
from prized_gym.errors import BaseDiedError, EngineUnavailableError
from prized_gym.interface import commands as ops
from prized_gym.interface.commands import Command
from prized_gym.interface.engine import BaseHandle, Description, Engine
from prized_gym.interface.failure import Failure, not_forked
from prized_gym.interface.fleet import UNLIMITED, Finished, Fleet, TimeLimits, Usage
from prized_gym.interface.performing import Origin, copy_number, perform_command
from prized_gym.recipe import AnyEnv, Recipe, build, build_env
from prized_gym.seeding import fresh_entropy

_FORK = -1
"""In place of an operation: build the copy, then do the command."""


class InlineEngine(Engine):
    """Bases and copies are plain objects of this process; nothing is forked."""

    name: ClassVar[str] = "inline"

    @classmethod
    def check(cls) -> None:
        """Always available."""

    @classmethod
    def build(cls, recipe: Recipe, options: Mapping[str, Any], timeout: float | None, progress: bool) -> BaseHandle:
        return InlineBase(recipe)


class InlineBase(BaseHandle):
    """Builds the environment once, for its spaces, and once more for each copy."""

    def __init__(self, recipe: Recipe) -> None:
        started = time.monotonic()
        self.recipe = recipe
        self._open = True
        self._reset_wanted = False
        self._reset_seed = 0
        self._fleets: weakref.WeakSet[InlineFleet] = weakref.WeakSet()
        built = build(recipe)
        env = built.envs[0]
        self.description = Description(
            env.observation_space,
            env.action_space,
            dict(env.metadata or {}),
            env.render_mode,
            env.spec,
            time.monotonic() - started,
        )
        for one in built.envs:
            one.close()

    @property
    def alive(self) -> bool:
        return self._open

    @property
    def where(self) -> str:
        return "this process"

    def revive(self) -> None:
        if not self._open:
            raise BaseDiedError("the base was closed")

    def fleet(self, size: int, limits: TimeLimits = UNLIMITED, labels: Mapping[str, str] | None = None) -> Fleet:
        self.revive()
        fleet = InlineFleet(size, self)
        self._fleets.add(fleet)
        return fleet

    def close(self) -> None:
        if self._open:
            self._open = False
            for fleet in list(self._fleets):
                fleet.abandon()

    def copy(self, number: int) -> tuple[AnyEnv, Origin]:
        """A newly built environment for copy ``number``, and what it has from this base."""
        sources = self.recipe.sources
        source = sources[number if len(sources) > 1 else 0]
        env = build_env(self.recipe, source)
        if self.recipe.warm_up is not None:
            self.recipe.warm_up(env)
        first = env.reset(seed=self._reset_seed) if self._reset_wanted else None
        sole = len(sources) > 1 and sum(other is source for other in sources) == 1
        return env, Origin(self.recipe.on_fork, first, sole)

    def reset_environment(self, seed: int | None) -> None:
        self.revive()
        if not self._reset_wanted:
            # There is no live base: every copy is built and reset anew, with one seed.
            self._reset_wanted = True
            self._reset_seed = fresh_entropy() if seed is None else seed


class InlineFleet(Fleet):
    """Copies stepped one after another, when they are waited for.

    A copy cannot be interrupted: no time limit is enforced, and ``wait`` returns once the copies it does are done.
    """

    carries_random_state: ClassVar[bool] = True

    def __init__(self, size: int, base: InlineBase) -> None:
        self.size = size
        self._base = base
        self.observations = ObservationBuffer(base.description.observation_space, size)
        self._actions = ActionBuffer(base.description.action_space, size)
        self._rewards = np.zeros(size)
        self._terminations = np.zeros(size, np.bool_)
        self._truncations = np.zeros(size, np.bool_)
        self.rewards = read_only(self._rewards)
        self.terminations = read_only(self._terminations)
        self.truncations = read_only(self._truncations)
        self._envs: dict[int, tuple[AnyEnv, Origin]] = {}
        self._gone = {index: not_forked(index) for index in range(size)}
        self._todo: dict[int, tuple[int, Any]] = {}
        self._cpu: dict[int, float] = {}
        self._made: dict[int, float] = {}

    # Making copies

    def fork(self, first: Mapping[int, Command]) -> None:
        self._base.revive()
        for index, command in first.items():
            self._let_go(index, not_forked(index))
            self._cpu[index] = 0.0
            self._made[index] = time.monotonic()
            self._todo[index] = (_FORK, command)

    def branch(self, source: int, targets: Sequence[int]) -> None:
        raise EngineUnavailableError(
            "branch() makes live forks of a copy, which engine='inline' cannot: use engine='local', on Linux"
        )

    # One batch

    def step(self, arrays: Sequence[Array], objects: Sequence[Sequence[Any]], ops: bytes) -> None:
        self.step_some(range(self.size), arrays, objects, ops)

    def step_some(
        self, indices: Sequence[int], arrays: Sequence[Array], objects: Sequence[Sequence[Any]], ops: bytes
    ) -> None:
        for number, index in enumerate(indices):
            self._todo[index] = (ops[number], self._action(number, arrays, objects))

    def _action(self, number: int, arrays: Sequence[Array], objects: Sequence[Sequence[Any]]) -> Any:
        parts = [array[number] for array in arrays]
        own = [part.copy() if hasattr(part, "shape") and part.shape else part for part in parts]
        return self._actions.join(own, [column[number] for column in objects])

    def command(self, commands: Mapping[int, Command]) -> None:
        for index, command in commands.items():
            self._todo[index] = (ops.COMMAND, command)

    def wait(self, count: int | None = None, timeout: float | None = None) -> Finished:
        done: list[int] = []
        finished = Finished(done)
        for index in list(self._todo):
            if count is not None and len(done) >= count:
                break
            op, argument = self._todo[index]
            started = time.process_time()
            try:
                self._do(index, op, argument, finished)
            except (Exception, SystemExit) as error:
                finished.failures[index] = self._failed(index, error)
            self._cpu[index] = self._cpu.get(index, 0.0) + time.process_time() - started
            del self._todo[index]
            done.append(index)
        done.sort()
        return finished

    @property
    def busy(self) -> list[int]:
        return sorted(self._todo)

    def fds(self) -> list[int]:
        return []

    @property
    def next_deadline(self) -> float | None:
        return None

    # What one copy does

    def _do(self, index: int, op: int, argument: Any, finished: Finished) -> None:
        if op == _FORK:
            self._envs[index] = self._base.copy(copy_number(index, argument))
            del self._gone[index]
        if index not in self._envs:
            finished.failures[index] = self._gone[index]
            return
        env, origin = self._envs[index]
        if op in (ops.STEP, ops.STEP_RESET):
            self._step(index, env, op == ops.STEP_RESET, argument, finished)
        elif op == ops.RESET:
            self._began(index, *env.reset(), finished)
        elif op in (ops.COMMAND, _FORK):
            performed = perform_command(env, argument, origin)
            if performed.began is not None:
                self._began(index, *performed.began, finished)
            if performed.result is not None:
                finished.results[index] = performed.result

    def _step(self, index: int, env: AnyEnv, then_reset: bool, action: Any, finished: Finished) -> None:
        observation, reward, terminated, truncated, info = env.step(action)
        final = None
        if then_reset and (terminated or truncated):
            # Copied before the reset, which may overwrite a buffer that the environment reuses.
            final = deepcopy((observation, info))
            observation, info = env.reset()
        self._observe(index, observation, info, finished)
        self._rewards[index] = reward
        self._terminations[index] = terminated
        self._truncations[index] = truncated
        if final is not None:
            finished.finals[index] = final

    def _began(self, index: int, observation: Any, info: dict[str, Any], finished: Finished) -> None:
        self._observe(index, observation, info, finished)
        self._rewards[index] = 0.0
        self._terminations[index] = False
        self._truncations[index] = False

    def _observe(self, index: int, observation: Any, info: dict[str, Any], finished: Finished) -> None:
        self.observations.store_objects(index, self.observations.write(index, observation))
        if info:
            finished.infos[index] = info

    def _failed(self, index: int, error: BaseException) -> Failure:
        if isinstance(error, SystemExit):
            failure = Failure(index, self.where(index), "exited", f"called sys.exit({error.code!r})")
        else:
            text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
            summary = traceback.format_exception_only(type(error), error)[-1].strip()
            failure = Failure(index, self.where(index), "raised", f"raised {summary}", traceback=text, exception=error)
        if index not in self._envs:
            self._gone[index] = failure
        return failure

    # Failure and end

    def alive(self, index: int) -> bool:
        return index in self._envs

    def where(self, index: int) -> str:
        return "in this process"

    def end(self, index: int, timed_out: float | None = None) -> Failure:
        if index in self._envs:
            self._let_go(index, Failure(index, self.where(index), "died", "was ended"))
        self._todo.pop(index, None)
        return self._gone[index]

    def usage(self, index: int) -> Usage:
        usage = Usage(cpu_seconds=self._cpu.get(index, 0.0))
        if index in self._envs:
            usage.seconds = time.monotonic() - self._made[index]
        return usage

    def release(self, indices: Sequence[int]) -> None:
        for index in indices:
            self._let_go(index, not_forked(index))

    def abandon(self) -> None:
        """The base is being closed: end every copy, and fail whatever is asked of them from here on."""
        for index in range(self.size):
            self._let_go(
                index, Failure(index, self.where(index), "base", "was lost with its base: the base was closed")
            )

    def close(self, timeout: float | None = None) -> None:
        self._todo.clear()
        self.release(list(self._envs))

    def _let_go(self, index: int, why: Failure) -> None:
        """Close the environment of copy ``index``, which is gone for the reason given."""
        self._gone[index] = why
        env, _ = self._envs.pop(index, (None, None))
        if env is not None:
            try:
                env.close()
            except Exception:
                traceback.print_exc()

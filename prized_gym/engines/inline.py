"""The inline engine: the same semantics in the trainer's own process, each copy built anew. For debuggers and Windows."""

from __future__ import annotations

import time
import traceback
from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any, ClassVar

from prized_gym.batch import Array
from prized_gym.calls import perform
from prized_gym.errors import EngineUnavailableError
from prized_gym.interface import commands as ops
from prized_gym.interface.commands import Call, Command, Fresh, Reseed, Reset, SetAttr, Start
from prized_gym.interface.engine import BaseHandle, Description, Engine
from prized_gym.interface.failure import Failure, not_forked
from prized_gym.interface.fleet import Fleet, Usage
from prized_gym.recipe import AnyEnv, Recipe, build, build_env
from prized_gym.seeding import fresh_entropy, reseed, set_random_state


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

    def fleet(self, size: int) -> Fleet:
        return InlineFleet(size, self)

    def close(self) -> None:
        self._open = False

    def copy(self, index: int) -> tuple[AnyEnv, tuple[Any, dict[str, Any]] | None]:
        """A newly built environment for copy ``index``; with ``reset_in="base"`` also what its reset gave."""
        sources = self.recipe.sources
        env = build_env(self.recipe, sources[index if len(sources) > 1 else 0])
        if self.recipe.warm_up is not None:
            self.recipe.warm_up(env)
        return env, env.reset(seed=self._reset_seed) if self._reset_wanted else None

    def reset_environment(self, seed: int | None) -> None:
        if not self._reset_wanted:
            # There is no live base: every copy is built and reset anew, with one seed.
            self._reset_wanted = True
            self._reset_seed = fresh_entropy() if seed is None else seed


class InlineFleet(Fleet):
    """Copies stepped one after another, when they are waited for."""

    can_branch: ClassVar[bool] = False
    carries_random_state: ClassVar[bool] = True

    def __init__(self, size: int, base: InlineBase) -> None:
        super().__init__(size)
        self._base = base
        self.allocate(base.description.observation_space, base.description.action_space)
        self._envs: dict[int, AnyEnv] = {}
        self._first: dict[int, tuple[Any, dict[str, Any]] | None] = {}
        self._todo: dict[int, tuple[int, Any]] = {}
        self._cpu: dict[int, float] = {}

    def fork(self, first: Mapping[int, Command], timeout: float | None = None) -> None:
        for index, command in first.items():
            self._close_one(index)
            self._envs[index], self._first[index] = self._base.copy(index)
            self._cpu[index] = 0.0
            self._todo[index] = (ops.COMMAND, command)

    def branch(self, source: int, targets: Sequence[int]) -> None:
        raise EngineUnavailableError(
            "branch() makes live forks of a copy, which engine='inline' cannot: use engine='local', on Linux"
        )

    def step(self, arrays: Sequence[Array], objects: Sequence[Sequence[Any]], batch: bytes) -> None:
        self.step_some(range(self.size), arrays, objects, batch)

    def step_some(
        self, indices: Sequence[int], arrays: Sequence[Array], objects: Sequence[Sequence[Any]], batch: bytes
    ) -> None:
        for number, index in enumerate(indices):
            action = None
            if batch[number] in (ops.STEP, ops.STEP_RESET):
                parts = [array[number] for array in arrays]
                own = [part.copy() if hasattr(part, "shape") and part.shape else part for part in parts]
                action = self.actions.join(own, [column[number] for column in objects])
            self._todo[index] = (batch[number], action)

    def command(self, commands: Mapping[int, Command]) -> None:
        for index, command in commands.items():
            self._todo[index] = (ops.COMMAND, command)

    def wait(self, count: int | None = None, timeout: float | None = None) -> list[int]:
        finished: list[int] = []
        for index in list(self._todo):
            if count is not None and len(finished) >= count:
                break
            op, argument = self._todo[index]
            started = time.process_time()
            try:
                self._do(index, op, argument)
            except (Exception, SystemExit) as error:
                self.failures[index] = self._failure(index, error)
            self._cpu[index] = self._cpu.get(index, 0.0) + time.process_time() - started
            del self._todo[index]
            finished.append(index)
        return finished

    @property
    def busy(self) -> list[int]:
        return list(self._todo)

    def _do(self, index: int, op: int, argument: Any) -> None:
        if op == ops.NOOP:
            return
        env = self._envs.get(index)
        if env is None:
            self.failures[index] = self._dead.get(index) or not_forked(index)
        elif op == ops.RESET:
            self._began(index, *env.reset())
        elif op == ops.COMMAND:
            self._command(index, env, argument)
        else:
            self._step(index, env, op == ops.STEP_RESET, argument)

    def _step(self, index: int, env: AnyEnv, then_reset: bool, action: Any) -> None:
        observation, reward, terminated, truncated, info = env.step(action)
        self.rewards[index] = reward
        self.terminations[index] = terminated
        self.truncations[index] = truncated
        if then_reset and (terminated or truncated):
            # Copied before the reset, which may overwrite a buffer that the environment reuses.
            self.finals[index] = deepcopy((observation, info))
            observation, info = env.reset()
        self._observe(index, observation)
        if info:
            self.infos[index] = info

    def _began(self, index: int, observation: Any, info: dict[str, Any]) -> None:
        self._observe(index, observation)
        self.rewards[index] = 0.0
        self.terminations[index] = False
        self.truncations[index] = False
        if info:
            self.infos[index] = info

    def _observe(self, index: int, observation: Any) -> None:
        self.observations.store_objects(index, self.observations.write(index, observation))

    def _command(self, index: int, env: AnyEnv, command: Command) -> None:
        if isinstance(command, Reset):
            if command.fresh is not None:
                self._start(index, env, command.fresh)
            elif command.reseed is not None:
                reseed(env, command.reseed, keep_seeded=self._sole(index))
            first = self._first[index]
            if command.from_base:
                if first is None:
                    raise RuntimeError("the base was not set up with reset_in='base'")
                self._began(index, *first)
            else:
                self._began(index, *env.reset(seed=command.seed, options=command.options))
        elif isinstance(command, Call):
            self.results[index] = perform(env, command.name, command.args, command.kwargs)
        elif isinstance(command, SetAttr):
            for name, value in command.values.items():
                env.set_wrapper_attr(name, value)
        elif isinstance(command, Reseed):
            reseed(env, command.seed)
        elif isinstance(command, Start):
            self._start(index, env, command.fresh)

    def _sole(self, index: int) -> bool:
        sources = self._base.recipe.sources
        return len(sources) > 1 and sum(source is sources[index] for source in sources) == 1

    def _start(self, index: int, env: AnyEnv, fresh: Fresh) -> None:
        reseed(env, fresh.seed, keep_seeded=self._sole(index))
        if fresh.random_state is not None:
            set_random_state(env, fresh.random_state)
        if self._base.recipe.on_fork is not None:
            self._base.recipe.on_fork(env, index, fresh.seed)
        for name, value in fresh.attributes.items():
            env.set_wrapper_attr(name, value)

    def _failure(self, index: int, error: BaseException) -> Failure:
        if isinstance(error, SystemExit):
            return Failure(index, self.where(index), "exited", f"called sys.exit({error.code!r})")
        text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        summary = traceback.format_exception_only(type(error), error)[-1].strip()
        return Failure(index, self.where(index), "raised", f"raised {summary}", traceback=text, exception=error)

    def alive(self, index: int) -> bool:
        return index in self._envs

    def where(self, index: int) -> str:
        return "in this process"

    def end(self, index: int, timed_out: float | None = None) -> Failure:
        self._todo.pop(index, None)
        self._close_one(index)
        return Failure(index, self.where(index), "died", "was ended")

    def usage(self, index: int) -> Usage:
        return Usage(cpu_seconds=self._cpu.get(index, 0.0))

    def _close_one(self, index: int) -> None:
        env = self._envs.pop(index, None)
        if env is not None:
            try:
                env.close()
            except Exception:
                traceback.print_exc()

    def close(self, timeout: float | None = None) -> None:
        self._todo.clear()
        for index in list(self._envs):
            self._close_one(index)

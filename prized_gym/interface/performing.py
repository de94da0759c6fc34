"""What a command does to an environment, for the engines whose copies hold the environment itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from prized_gym.calls import perform
from prized_gym.generators import Generators
from prized_gym.interface.commands import Call, Command, Fresh, Reseed, Reset, SetAttr, Start
from prized_gym.recipe import AnyEnv
from prized_gym.seeding import reseed, set_random_state


@dataclass(frozen=True)
class Origin:
    """What a copy has from its base, apart from the environment.

    Attributes:
        on_fork: called as ``on_fork(env, index, seed)`` when it starts.
        first: the observation and info of the reset in the base, if there was one.
        sole: whether it is the only copy of its environment, whose explicit seed is then left alone.
        generators: those of the process, which a fork has inherited; None where it is no fork.
    """

    on_fork: Callable[[AnyEnv, int, int], Any] | None = None
    first: tuple[Any, dict[str, Any]] | None = None
    sole: bool = False
    generators: Generators | None = None

    def inherited(self, env: AnyEnv) -> list[Any] | None:
        """What a fork that has run nothing yet is to reseed."""
        return None if self.generators is None else self.generators.of(env)

    def found(self, env: AnyEnv) -> list[Any] | None:
        """What a fork is to reseed after it has run, and perhaps made generators of its own."""
        return None if self.generators is None else self.generators.fresh(env)


@dataclass
class Performed:
    """What came of a command.

    Attributes:
        began: the observation and info that an episode began with.
        result: what a call returned.
    """

    began: tuple[Any, dict[str, Any]] | None = None
    result: Any = None


def perform_command(env: AnyEnv, command: Command, origin: Origin) -> Performed:
    """Do what ``command`` says.

    Raises:
        RuntimeError: a copy was to start where the base was reset, and the base was not.
        Exception: whatever the environment raised.
    """
    if isinstance(command, Reset):
        return Performed(began=_reset(env, command, origin))
    if isinstance(command, Call):
        return Performed(result=perform(env, command.name, command.args, command.kwargs))
    if isinstance(command, SetAttr):
        for name, value in command.values.items():
            env.set_wrapper_attr(name, value)
    elif isinstance(command, Reseed):
        reseed(env, command.seed, generators=origin.found(env))
    elif isinstance(command, Start):
        _start(env, command.fresh, origin)
    else:
        raise TypeError(f"{command!r} is no command of an environment")
    return Performed()


def copy_number(index: int, first: Command) -> int:
    """Which copy of its vector environment a new fork is: copy ``index`` of its fleet, unless its first command says."""
    fresh = first.fresh if isinstance(first, (Reset, Start)) else None
    return index if fresh is None else fresh.copy


def _reset(env: AnyEnv, command: Reset, origin: Origin) -> tuple[Any, dict[str, Any]]:
    if command.fresh is not None:
        _start(env, command.fresh, origin)
    elif command.reseed is not None:
        reseed(env, command.reseed, origin.sole, origin.found(env))
    if not command.from_base:
        return env.reset(seed=command.seed, options=command.options)
    if origin.first is None:
        raise RuntimeError("the base was not set up with reset_in='base'")
    return origin.first


def _start(env: AnyEnv, fresh: Fresh, origin: Origin) -> None:
    reseed(env, fresh.seed, origin.sole, origin.inherited(env))
    if fresh.random_state is not None:
        set_random_state(env, fresh.random_state)
    if origin.on_fork is not None:
        origin.on_fork(env, fresh.copy, fresh.seed)
    for name, value in fresh.attributes.items():
        env.set_wrapper_attr(name, value)

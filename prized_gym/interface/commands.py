"""What a copy can be asked to do: the operations of a batch, and the commands beside them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

# What a copy does in a batch; a byte per copy.
NOOP = 0
STEP = 1
"""``env.step(action)``."""
RESET = 2
"""``env.reset()`` without seed or options: an autoreset in place."""
STEP_RESET = 3
"""``env.step(action)``, and if that ended the episode, ``env.reset()`` too; the terminal observation goes to ``finals``."""
COMMAND = 4
"""A :class:`Command` sent along."""


class Command:
    """Something a copy is asked to do that is not part of a plain step."""


@dataclass
class Fresh:
    """What a fork is given before anything else: a random state of its own, ``on_fork``, the attributes set so far.

    Attributes:
        seed: what every generator of the copy is seeded with, also passed to ``on_fork``.
        copy: the copy's index, passed to ``on_fork``.
        attributes: replayed through ``env.set_wrapper_attr``.
        random_state: where the ``np_random`` of the copy it replaces stood, to go on from there.
    """

    seed: int
    copy: int = 0
    attributes: dict[str, Any] = field(default_factory=dict)
    random_state: dict[str, Any] | None = None


@dataclass
class Start(Command):
    """The first command of a copy that is not to be reset yet."""

    fresh: Fresh


@dataclass
class Reset(Command):
    """``env.reset(seed=seed, options=options)``.

    Attributes:
        seed: passed on.
        options: passed on.
        fresh: in a new fork, what comes before the reset.
        reseed: in a copy that has begun with :class:`Start`, the seed its generators are given before the reset.
        from_base: do not reset, but start in the state the base was reset to, with the observation it gave.
    """

    seed: int | None = None
    options: dict[str, Any] | None = None
    fresh: Fresh | None = None
    reseed: int | None = None
    from_base: bool = False


@dataclass
class Call(Command):
    """The attribute ``name`` of the environment or of the wrapper that has it: called if it can be, else returned."""

    name: str
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] | None = None


@dataclass
class SetAttr(Command):
    """``env.set_wrapper_attr(name, value)`` for each pair."""

    values: dict[str, Any]


@dataclass
class Reseed(Command):
    """Give every generator of the copy a stream of its own, set by ``seed``."""

    seed: int

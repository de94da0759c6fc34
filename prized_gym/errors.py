"""The errors prized_gym raises. Those about one copy are in :mod:`prized_gym.interface.failure`."""

from __future__ import annotations

from typing import Literal

Happened = Literal["never ran", "may have run", "ran"]
"""What became of something that was asked of a provider and failed."""


class PrizedGymError(Exception):
    """Base class of every error this library defines."""


class EngineUnavailableError(PrizedGymError, RuntimeError):
    """The engine asked for cannot run on this machine; the message says what is missing and what can be used instead."""


class MissingExtraError(PrizedGymError, ImportError):
    """An optional dependency is not installed; the message names the extra that brings it."""


class SetupError(PrizedGymError, RuntimeError):
    """A base could not be set up."""


class SetupTimeoutError(SetupError, TimeoutError):
    """Setting up a base took longer than ``setup_timeout``."""


class BaseDiedError(PrizedGymError, RuntimeError):
    """The base went away while it was needed."""


class ForkUnsafeError(PrizedGymError, RuntimeError):
    """The base holds something that a fork cannot carry over: a live thread, an initialised CUDA context."""


class SandboxError(PrizedGymError, RuntimeError):
    """Something about a sandbox failed.

    Attributes:
        happened: whether what was asked for was done all the same: ``"never ran"``, ``"may have run"`` or ``"ran"``; None
            where the question makes no sense. What never ran is tried once more by whoever asked.
    """

    def __init__(self, *words: object, happened: Happened | None = None) -> None:
        super().__init__(*words)
        self.happened = happened


class SandboxDiedError(SandboxError):
    """The sandbox ended: killed, out of memory, out of time."""


class SandboxCapacityError(SandboxError):
    """The machine of a sandbox has no room for as many forks of it as were asked for; none was made.

    Attributes:
        fits: how many there is room for; None where that is not known.
    """

    def __init__(self, *words: object, fits: int | None = None, happened: Happened | None = "never ran") -> None:
        super().__init__(*words, happened=happened)
        self.fits = fits


class SandboxQuotaError(SandboxError):
    """The account may not have as many sandboxes as were asked for; none was made.

    Attributes:
        limit: how many it may have; None where that is not known, or where the limit is of another kind.
    """

    def __init__(self, *words: object, limit: int | None = None, happened: Happened | None = "never ran") -> None:
        super().__init__(*words, happened=happened)
        self.limit = limit


class SandboxTimeoutError(SandboxError, TimeoutError):
    """The sandbox did not answer in time."""


class EpisodeOverError(PrizedGymError, AssertionError):
    """With autoreset disabled, a copy whose episode has ended was stepped."""


class InterruptedStepError(PrizedGymError, RuntimeError):
    """An earlier call was interrupted half-way, so the copies are at different points: ``reset()`` brings them back."""


class RemoteTraceback(PrizedGymError):
    """The traceback of an exception raised in another process: the ``__cause__`` of that exception, never raised itself."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return f'\n"""\n{self.text}"""'

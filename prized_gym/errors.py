"""The errors prized_gym raises. Those about one copy are in :mod:`prized_gym.interface.failure`."""

from __future__ import annotations


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
    """Something about a sandbox failed."""


class SandboxDiedError(SandboxError):
    """The sandbox ended: killed, out of memory, out of time."""


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

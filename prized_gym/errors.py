"""The errors prized_gym raises, and the record of why a copy failed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


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


class CopyError(PrizedGymError, RuntimeError):
    """A copy failed.

    Attributes:
        failure: what is known of it.
    """

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.describe())
        self.failure = failure


class CopyDiedError(CopyError):
    """The process or sandbox of a copy ended: killed, crashed, or left through ``sys.exit``."""


class CopyTimeoutError(CopyError, TimeoutError):
    """A copy did not answer within ``step_timeout`` or ``reset_timeout`` and was ended."""


class RemoteTraceback(Exception):
    """Carries the traceback of an exception raised in another process, as the ``__cause__`` of that exception."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return f'\n"""\n{self.text}"""'


FailureKind = Literal["died", "timeout", "raised", "exited", "base", "unreachable"]


@dataclass(frozen=True)
class Failure:
    """Why a copy failed.

    Attributes:
        copy: the copy's index in its vector environment.
        where: its pid or sandbox id, as in ``"pid 4711"``.
        kind: ``died`` (a signal, a crash, ``os._exit``), ``timeout``, ``raised`` (the environment raised),
            ``exited`` (``sys.exit``), ``base`` (its base went away), ``unreachable``.
        reason: one line: the exit code or signal, or the exception.
        stderr: the tail of what it wrote to stderr.
        stack: for a time-out, the Python stack it hung in, when it could be read.
        traceback: for ``raised``, the traceback in the copy.
        exception: for ``raised``, the exception itself when it could be carried over.
    """

    copy: int
    where: str
    kind: FailureKind
    reason: str
    stderr: str = ""
    stack: str = ""
    traceback: str = ""
    exception: BaseException | None = None

    def headline(self) -> str:
        """One line: which copy, where, and what happened."""
        return f"copy {self.copy} ({self.where}) {self.reason}"

    def describe(self) -> str:
        """Everything known, in several lines."""
        parts = [self.headline()]
        for title, text in (
            ("Python stack of the copy", self.stack),
            ("traceback in the copy", self.traceback),
            ("end of its stderr", self.stderr),
        ):
            if text.strip():
                parts.append(f"--- {title}:\n{text.rstrip()}")
        return "\n".join(parts)

    def error(self) -> BaseException:
        """The exception to raise: the environment's own where it could be carried over, else a :class:`CopyError`."""
        if self.kind == "raised" and self.exception is not None:
            error = self.exception
            error.__cause__ = RemoteTraceback(self.traceback)
            note = f"raised in {self.headline().split(') ')[0]})"
            if hasattr(error, "add_note"):
                error.add_note(note)
            return error
        if self.kind == "timeout":
            return CopyTimeoutError(self)
        if self.kind in ("died", "exited"):
            return CopyDiedError(self)
        if self.kind == "base":
            return BaseDiedError(self.describe())
        return CopyError(self)

"""The record of why a copy failed, and the errors that carry one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from prized_gym.errors import BaseDiedError, PrizedGymError, RemoteTraceback


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


FailureKind = Literal["died", "timeout", "raised", "exited", "fork", "base", "unreachable"]


@dataclass(frozen=True)
class Failure:
    """Why a copy failed.

    Attributes:
        copy: the copy's index in its vector environment.
        where: its pid or sandbox id, as in ``"pid 4711"``.
        kind: ``died`` (a signal, a crash, ``os._exit``), ``timeout``, ``raised`` (the environment raised),
            ``exited`` (``sys.exit``), ``fork`` (it could not be made), ``base`` (its base went away), ``unreachable``.
        reason: one line: the exit code or signal, or the exception.
        stderr: the tail of what it wrote to stderr.
        stack: for a time-out, the Python stack it hung in, when it could be read.
        traceback: for ``raised``, the traceback in the copy.
        exception: for ``raised``, the exception itself when it could be carried over; for ``fork`` and ``base``, the error
            that says why.
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
            if self.traceback:  # without one it was raised here, before the copy was asked
                error.__cause__ = RemoteTraceback(self.traceback)
                if hasattr(error, "add_note"):
                    error.add_note(f"raised in {self.headline().split(') ')[0]})")
            return error
        if self.kind in ("fork", "base") and self.exception is not None:
            return self.exception
        if self.kind == "timeout":
            return CopyTimeoutError(self)
        if self.kind in ("died", "exited"):
            return CopyDiedError(self)
        if self.kind == "base":
            return BaseDiedError(self.describe())
        return CopyError(self)


def not_forked(index: int) -> Failure:
    """What there is to say of a copy that was never made."""
    return Failure(index, "not forked", "died", "does not exist")

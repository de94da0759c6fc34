"""Errors that come out of a sandbox, as errors here. Only a number and a bounded text are taken from it."""

from __future__ import annotations

import os
from typing import Any

from .errors import RunscError


def remote_error(answer: dict[str, Any], about: str) -> Exception:
    """The error an answer describes: an OSError of the right class where it has a number, else a RunscError."""
    message = str(answer.get("message", ""))[:2000]
    number = answer.get("errno")
    if isinstance(number, int) and not isinstance(number, bool) and 0 < number < 200:
        return OSError(number, f"{os.strerror(number)} (in the sandbox)", about)
    return RunscError(f"{about}: {str(answer.get('error', 'error'))[:100]}: {message}")

"""Errors of a sandbox's agent as exceptions of the host; only a number and a bounded text are taken from them."""

from __future__ import annotations

import os
from typing import Any

from .errors import RunscError


def remote_error(answer: dict[str, Any], about: str) -> Exception:
    """Return the exception an answer describes, to be raised.

    Args:
        answer: what the agent sent.
        about: the path or the command that it concerns, for the message.

    Returns:
        An OSError of the right class where the answer has an error number, else a RunscError.
    """
    message = str(answer.get("message", ""))[:2000]
    number = answer.get("errno")
    if isinstance(number, int) and not isinstance(number, bool) and 0 < number < 200:
        return OSError(number, f"{os.strerror(number)} (in the sandbox)", about)
    return RunscError(f"{about}: {str(answer.get('error', 'error'))[:100]}: {message}")

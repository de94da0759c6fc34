"""The errors of the sandboxes of this machine."""

from __future__ import annotations

from prized_gym.errors import PrizedGymError

OTHER_SYSTEMS = "engine='inline' runs anywhere: the copies live in this process, each built anew."
"""What can be used where there is no Linux."""


class RunscError(PrizedGymError):
    """Something about a sandbox failed; the base class of the errors here."""


class RunscUnavailable(RunscError):
    """gVisor cannot be used on this machine.

    Attributes:
        reason: what is missing.
        remedy: how to get it; may be empty.
    """

    def __init__(self, reason: str, remedy: str) -> None:
        super().__init__(f"{reason}\n{remedy}" if remedy else reason)
        self.reason = reason
        self.remedy = remedy


class SandboxDied(RunscError):
    """The sandbox ended: killed, out of memory or time, or its agent broke."""


class SandboxTimeout(RunscError, TimeoutError):
    """The sandbox did not answer in time."""


class SandboxStateError(RunscError):
    """The call does not fit the sandbox's state, such as a command in a paused one."""

"""What can go wrong on the ground."""

from __future__ import annotations


class RunscError(Exception):
    """Something about a sandbox failed; the base of the errors here."""


class RunscUnavailable(RunscError):
    """gVisor cannot be used on this machine.

    `reason` says what is missing, `remedy` how to get it.
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

"""What a vector environment was asked to be."""

from __future__ import annotations

from dataclasses import dataclass

from gymnasium.vector import AutoresetMode

from prized_gym.interface.fleet import UNLIMITED, TimeLimits


@dataclass(frozen=True)
class Settings:
    """The options of a vector environment that say how its copies are stepped and reset, checked.

    Attributes:
        autoreset_mode, fork_on, reset_in, on_failure, max_failures, max_concurrent, copy: as for ``ForkedVectorEnv``.
        limits: ``step_timeout`` and ``reset_timeout``.
    """

    autoreset_mode: AutoresetMode = AutoresetMode.NEXT_STEP
    fork_on: str = "reset"
    reset_in: str = "copy"
    on_failure: str = "raise"
    max_failures: int = 3
    limits: TimeLimits = UNLIMITED
    max_concurrent: int | None = None
    copy: bool = True

    @property
    def same_step(self) -> bool:
        """Whether an episode begins in the step that ended the one before."""
        return self.autoreset_mode is AutoresetMode.SAME_STEP

    @property
    def disabled(self) -> bool:
        """Whether only the caller resets."""
        return self.autoreset_mode is AutoresetMode.DISABLED

    @property
    def from_base(self) -> bool:
        """Whether forks start in the state the base was reset to."""
        return self.reset_in == "base"

    @property
    def truncates(self) -> bool:
        """Whether a failure is the end of an episode, not an error."""
        return self.on_failure == "truncate"

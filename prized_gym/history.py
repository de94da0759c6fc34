"""What the recent episodes of a vector environment did and cost."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Episode:
    """One episode in one copy, as ``ForkedVectorEnv.history()`` gives it.

    Attributes:
        copy: the copy's index.
        seed: the seed it was reset with; None for an episode that carried on with its copy's random state.
        length: in steps.
        reward: the sum of its rewards.
        seconds: wall-clock time from its reset to its last step.
        vcpu_seconds: CPU time of the copy, in seconds; nan where the engine cannot tell.
        gb_seconds: memory held by the copy (1e9 bytes) times ``seconds``; nan where the engine cannot tell.
        cost_usd: what the engine's provider bills for it; 0.0 on one's own machine.
        failure: why it was cut short, or None.
    """

    copy: int
    seed: int | None
    length: int
    reward: float
    seconds: float
    vcpu_seconds: float
    gb_seconds: float
    cost_usd: float
    failure: str | None = None

"""What a sandbox costs under a table of prices."""

from __future__ import annotations

from dataclasses import dataclass

HOUR = 3600.0


@dataclass(frozen=True)
class Prices:
    """A provider's prices, in US dollars; all zero on one's own machine.

    Attributes:
        sandbox_hour: for an hour of one sandbox, whatever its size.
        vcpu_hour: for an hour of one vCPU.
        gb_hour: for an hour of one GB of memory.

    Example:
        >>> Prices(vcpu_hour=0.05, gb_hour=0.01).cost(seconds=1800, vcpu=2, memory_gb=4)
        0.07
    """

    sandbox_hour: float = 0.0
    vcpu_hour: float = 0.0
    gb_hour: float = 0.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not value >= 0.0:
                raise ValueError(f"{name} must be at least 0, got {value!r}")

    def cost(self, *, seconds: float, vcpu: float, memory_gb: float) -> float:
        """US dollars for ``seconds`` of one sandbox of that size."""
        total = self.sandbox_hour
        # A size that is not known costs nothing where it has no price.
        if self.vcpu_hour:
            total += self.vcpu_hour * vcpu
        if self.gb_hour:
            total += self.gb_hour * memory_gb
        return total * seconds / HOUR


FREE = Prices()

PRIZED_2_VCPU_4_GB = Prices(sandbox_hour=0.131)
"""Prized's price of a running sandbox of 2 vCPU and 4 GB (its guide to evals and RL harnesses, November 2026)."""

"""What a sandbox costs under a table of prices, and sums of costs of which some are not known."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

HOUR = 3600.0


@dataclass(frozen=True)
class Prices:
    """A provider's prices, in US dollars; what has none is free.

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
        """Return what one sandbox of that size costs for that time, in US dollars.

        Args:
            seconds: how long it runs.
            vcpu: its vCPUs, or those it used on average.
            memory_gb: its memory in GB, or what it used.

        Returns:
            The cost; nan where a size that has a price is nan.
        """
        total = self.sandbox_hour
        # A size that is not known (nan) matters only where it has a price.
        if self.vcpu_hour:
            total += self.vcpu_hour * vcpu
        if self.gb_hour:
            total += self.gb_hour * memory_gb
        return total * seconds / HOUR


def known_total(costs: Iterable[float]) -> float:
    """Add up the costs that are known.

    Args:
        costs: in US dollars; nan where it is not known, or nobody bills.

    Returns:
        The sum of those that are not nan; nan if there are none.
    """
    known = [cost for cost in costs if not math.isnan(cost)]
    return math.fsum(known) if known else math.nan


PRIZED_2_VCPU_4_GB = Prices(sandbox_hour=0.131)
"""Prized's price of a running sandbox of 2 vCPU and 4 GB (its guide to evals and RL harnesses, November 2026)."""

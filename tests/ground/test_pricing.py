"""Prices, costs that are not known, and their sums."""

from __future__ import annotations

import math

import pytest

from prized_gym.pricing import Prices, known_total
from prized_gym.rollouts.record import Rollout, Totals


def test_what_a_sandbox_costs() -> None:
    prices = Prices(sandbox_hour=0.1, vcpu_hour=0.05, gb_hour=0.01)
    assert prices.cost(seconds=1800, vcpu=2, memory_gb=4) == pytest.approx(0.12)
    assert Prices().cost(seconds=1800, vcpu=2, memory_gb=4) == 0.0


def test_a_size_that_is_not_known_matters_where_it_has_a_price() -> None:
    assert Prices(vcpu_hour=1.0).cost(seconds=3600, vcpu=2, memory_gb=math.nan) == 2.0
    assert math.isnan(Prices(gb_hour=1.0).cost(seconds=3600, vcpu=2, memory_gb=math.nan))


@pytest.mark.parametrize("value", [-1.0, math.nan])
def test_a_price_that_is_none_is_refused_by_name(value: float) -> None:
    with pytest.raises(ValueError, match="gb_hour must be at least 0"):
        Prices(gb_hour=value)


def test_sums_are_of_what_is_known() -> None:
    assert known_total([0.25, math.nan, 0.5]) == 0.75
    assert math.isnan(known_total([math.nan])) and math.isnan(known_total([]))
    assert known_total([0.0, math.nan]) == 0.0


def rollout(cost_usd: float, failure: str | None = None) -> Rollout:
    return Rollout(None, 0, math.nan if failure else 1.0, 1, None, 1.0, cost_usd, "pid 1", failure)


def test_a_summary_adds_up_the_costs_that_are_known() -> None:
    totals = Totals()
    totals.start()
    assert math.isnan(totals.summary().cost_usd)
    totals.add(0, rollout(math.nan))
    assert math.isnan(totals.summary().cost_usd)
    totals.add(0, rollout(0.25))
    totals.add(0, rollout(0.5, failure="died"))
    totals.add(0, rollout(math.nan))
    assert totals.summary().cost_usd == 0.75

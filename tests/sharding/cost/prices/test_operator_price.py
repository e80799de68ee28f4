"""The price of one run of an operator."""

import pytest

from autoshard.sharding.cost.prices.canonical_layout import CanonicalLayout
from tests.sharding.cost.test_equivalence_classes import STRATEGIES, layout, problem


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_no_kernel_is_faster_than_its_least_time(strategy):
    cost, chosen = problem().cost, layout(strategy)
    canonical, devices = CanonicalLayout(chosen, cost.queries), cost.target.devices
    ratios = []
    for number, each in enumerate(cost.classes):
        specs = canonical(number)
        time_us = cost.prices(each, specs.sizes, specs.specs, specs.sequence).time_us
        least_us = cost.prices.least_us(each, devices)
        assert 0 <= least_us <= time_us * (1 + 1e-9), each.op.name
        ratios.append(least_us / time_us if time_us else 1.0)
    assert max(ratios) == pytest.approx(1.0), "some kernels divide their work over all devices"
    assert min(ratios) < 0.5, "others do not"

"""The weight of an all-to-all beside other collectives."""

import pytest

from autoshard.sharding.machines.link_prices import LinkPrices
from autoshard.sharding.machines.targets import find_target


@pytest.mark.parametrize(
    ("target", "devices", "weight"),
    [
        ("v5e:2x4", 8, 16 / 7),  # 1 link: the line of 4. Others: 2 links, 7/8 of the bytes
        ("v5e:16x16", 256, 4 / (255 / 256) * 2),  # 16/4 shards of a device on one ring. Others: both rings
        ("v5e:16x16", 16, 4 / (15 / 16)),
        ("h100:1x8", 8, 1.0),
        ("cpu:8", 8, 1.0),
    ],
)
def test_an_all_to_all_costs_its_time_over_that_of_a_reduce_scatter(target, devices, weight):
    prices = find_target(target).link_prices
    assert prices.weight("all-to-all", devices) == pytest.approx(weight, rel=1e-3)


@pytest.mark.parametrize("kind", ["all-gather", "reduce-scatter", "all-reduce"])
def test_other_kinds_have_weight_one(kind):
    assert find_target("v5e:2x4").link_prices.weight(kind, 8) == 1.0


def test_without_a_topology_all_kinds_cost_the_same():
    assert LinkPrices(1.0).weight("all-to-all", 8) == 1.0


def test_groups_that_do_not_divide_the_machine_have_weight_one():
    assert find_target("v5e:2x4").link_prices.weight("all-to-all", 3) == 1.0
    assert find_target("v5e:2x4").link_prices.weight("all-to-all", 1) == 1.0

"""The order of mesh axes that shard one factor, and the permutes that it needs."""

import pytest

from autoshard.sharding.layout.axis_order import order_axes

MESH = {"dp": 2, "fsdp": 4, "tp": 8, "one": 1}
ROWS = (("m",), ("k",))
WEIGHT = (("k",), ("n",))
RESULT = (("m",), ("n",))
FACTORS = {"dp": "m", "fsdp": "n", "tp": "n", "one": None}


def names(factors):
    return [axis for axis, factor in factors.items() if factor == "n"]


@pytest.mark.parametrize(
    ("arrays", "order"),
    [
        ([(1, WEIGHT, 64.0, ((), ("fsdp", "tp")))], ["fsdp", "tp"]),
        ([(1, WEIGHT, 64.0, ((), ("tp", "fsdp")))], ["tp", "fsdp"]),
        ([(1, WEIGHT, 64.0, (("fsdp",), ("tp",)))], ["tp", "fsdp"]),  # an all-to-all over fsdp
        ([(-1, RESULT, 64.0, (("dp", "fsdp"), ("tp",)))], ["tp", "fsdp"]),  # and back
        ([(0, ROWS, 64.0, (("dp",), ("fsdp",)))], ["fsdp", "tp"]),  # has no such factor
    ],
)
def test_axes_that_an_array_keeps_come_first(arrays, order):
    found, permutes = order_axes(FACTORS, arrays, MESH)
    assert names(found) == order and not permutes
    assert dict(found) == FACTORS


def test_arrays_that_disagree_need_a_permute_of_the_smaller_one():
    small, large = (0, WEIGHT, 32.0, ((), ("fsdp", "tp"))), (-1, RESULT, 640.0, ((), ("tp", "fsdp")))
    for arrays in ([small, large], [large, small]):
        found, permutes = order_axes(FACTORS, arrays, MESH)
        assert names(found) == ["tp", "fsdp"]
        assert permutes == [(0, ("fsdp", "tp"), 1.0)], "a shard of the 32 bytes on 32 devices"


@pytest.mark.parametrize(("stored", "sent"), [(("fsdp", "tp"), [(1, ("tp",), 2.0)]), (("tp", "fsdp"), [])])
def test_a_gather_over_the_major_axis_needs_a_permute(stored, sent):
    assert order_axes(FACTORS | {"fsdp": None}, [(1, WEIGHT, 64.0, ((), stored))], MESH)[1] == sent


def test_axes_of_size_one_have_no_place():
    factors = {"tp": "n", "one": "n", "dp": "n"}
    assert order_axes(factors, [(1, WEIGHT, 64.0, ((), ("one", "tp", "dp")))], MESH) == (factors, [])

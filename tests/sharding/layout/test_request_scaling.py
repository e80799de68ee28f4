"""Requested plans and meshes, scaled to other numbers of devices."""

import pytest

from autoshard.sharding.layout.plan_request import parse_request
from autoshard.sharding.layout.request_scaling import scaled_meshes, scaled_requests


@pytest.mark.parametrize(
    ("words", "devices", "rows", "scaled"),
    [
        ("fsdp:8", 4, 64, "fsdp:4"),
        ("fsdp:8", 16, 64, "fsdp:16"),
        ("fsdp:8", 1, 64, "fsdp:1"),
        ("fsdp:8", 6, 96, "fsdp:6"),
        ("ep:8", 4, 64, "ep:4"),
        # The innermost axis changes last.
        ("dp:2 fsdp:4", 4, 64, "fsdp:4"),
        ("dp:2 fsdp:4", 16, 64, "dp:4 fsdp:4"),
        ("dp:2 tp:4", 16, 64, "dp:4 tp:4"),
        ("dp:2 tp:4", 6, 96, "dp:3 tp:2"),  # not tp:3, because heads that 4 divides need not be divisible by 3
        ("cp:2 tp:4", 4, 64, "tp:4"),
        # Words stay as long as their axis does.
        ("dp:2 tp:4 seq", 4, 64, "tp:4 seq"),
        ("dp:2 tp:4 seq", 1, 64, "dp:1"),
        ("fsdp:4 tp:2 state tp-ffn", 4, 64, "fsdp:2 tp:2 state tp-ffn"),
        ("dp:4 tp:2 dp+parameter tp_1-ffn", 2, 64, "tp:2 tp_1-ffn"),
        ("data=fsdp:4 model=tp:2", 4, 64, "data=fsdp:2 model=tp:2"),
    ],
)
def test_the_scaling_that_changes_least_comes_first(words, devices, rows, scaled):
    found = scaled_requests(parse_request(words), devices, rows)
    assert str(found[0]) == scaled
    assert all(each.devices == devices for each in found)
    assert parse_request(scaled) == found[0]


@pytest.mark.parametrize(
    ("words", "devices", "rows"), [("fsdp:8", 6, 64), ("tp:8", 12, 64), ("ep:8", 16, 24), ("fsdp:4 tp:2", 3, 64)]
)
def test_there_is_none_that_divides(words, devices, rows):
    assert scaled_requests(parse_request(words), devices, rows) == []


def test_scalings_are_the_same_plan_where_the_number_is_the_same():
    assert str(scaled_requests(parse_request("dp:2 tp:4 seq"), 8, 64)[0]) == "dp:2 tp:4 seq"


@pytest.mark.parametrize(
    ("mesh", "devices", "scaled"),
    [
        ({"data": 8}, 4, {"data": 4}),
        ({"data": 4, "model": 2}, 4, {"data": 2, "model": 2}),
        ({"data": 2, "model": 4}, 2, {"model": 2}),
        ({"data": 2, "model": 4}, 6, {"data": 3, "model": 2}),
    ],
)
def test_the_first_axis_of_a_mesh_changes_first(mesh, devices, scaled):
    assert scaled_meshes(mesh, devices)[0] == scaled

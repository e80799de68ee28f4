"""The time of collectives on rings, lines, tori and switches, and the device assignment of mesh axes."""

import itertools

import numpy as np
import pytest

from autoshard.sharding.machines.device_assignments import DeviceAssignment, assign, assignments
from autoshard.sharding.machines.targets import find_target
from autoshard.sharding.machines.topology import Dim, Piece, Topology
from autoshard.spmdrules.core.placement import ReshardKind

RING = Dim("x", 16, "ring", 10.0, 1.0, wraps=True)
LINE = Dim("y", 4, "ring", 10.0, 1.0)
NETWORK = Dim("host", 4, "switch", 2.0, 7.0)
SWITCH = Dim("gpu", 8, "switch", 40.0, 3.0)


def collective_us(dims, kind, *pieces, local=160.0):
    return Topology(dims).time_us(kind, tuple(Piece(*p) for p in pieces), local)


def expected_us(size, bandwidth, latency=0.0):
    return pytest.approx(latency + size / bandwidth * 1e6)


@pytest.mark.parametrize(
    ("kind", "sent"),
    [("all-gather", 15 * 160), ("reduce-scatter", 15 / 16 * 160), ("all-reduce", 2 * 15 / 16 * 160)],
)
def test_a_closed_ring_sends_both_ways(kind, sent):
    rounds = 2 if kind == "all-reduce" else 1
    assert collective_us((RING,), kind, (0, 16, 1)) == expected_us(sent, 20, latency=8.0 * rounds)


def test_an_open_line_uses_one_link_per_device():
    assert collective_us((LINE,), "all-gather", (0, 4, 1)) == expected_us(3 * 160, 10, latency=3)


def test_dimensions_of_a_torus_work_in_parallel():
    assert collective_us((RING, LINE), "all-gather", (0, 16, 1), (1, 4, 1)) == expected_us(63 * 160, 30, latency=8)


def test_a_shift_to_the_next_device_uses_one_link_in_one_direction():
    """On a line, the message of the last device passes all others on its way back. A switch has one hop."""

    def shift_us(dims, *pieces):
        return Topology(dims).shift_us(tuple(Piece(*p) for p in pieces), 160.0)

    assert shift_us((RING,), (0, 16, 1)) == expected_us(160, 10, latency=1)
    assert shift_us((LINE,), (0, 4, 1)) == expected_us(160, 10, latency=3)
    assert shift_us((RING,), (0, 4, 4)) == expected_us(160, 10 / 4, latency=1)
    assert shift_us((SWITCH,), (0, 8, 1)) == expected_us(160, 40, latency=3)
    assert shift_us((RING,)) == 0.0


def test_part_of_a_ring_is_a_line_and_interleaved_groups_share_its_links():
    assert collective_us((RING,), "all-gather", (0, 4, 1)) == expected_us(3 * 160, 10, latency=3)
    assert collective_us((RING,), "all-gather", (0, 4, 4)) == expected_us(3 * 160, 20 / 4, latency=2 * 4)
    both = collective_us((RING,), "all-gather", (0, 4, 4), (0, 4, 1))
    assert both == collective_us((RING,), "all-gather", (0, 16, 1))


def test_groups_with_one_device_of_each_chip_share_the_links_of_the_chips():
    dims = (RING, Dim("core", 2, "switch", 40.0, 1.0))
    alone = collective_us(dims, "all-reduce", (0, 16, 1))
    assert alone == expected_us(2 * 15 / 16 * 160, 20 / 2, latency=16)
    both = collective_us(dims, "all-reduce", (0, 16, 1), (1, 2, 1))
    assert both == expected_us(2 * (1 / 2 * 160 / 40 + 15 / 16 * 80 / 20), 1, latency=18)
    exchanged = collective_us(dims, "all-to-all", (0, 16, 1))
    assert exchanged - 8 == 2 * (collective_us((RING,), "all-to-all", (0, 16, 1)) - 8)
    one, two = (Topology(d).shift_us((Piece(0, 16, 1),), 160.0) for d in ((RING,), dims))
    assert two - 1 == 2 * (one - 1)


def test_the_outer_network_carries_one_share_of_the_inner_group():
    """On 4 hosts of 8 GPUs, a device receives 3/4 of 1/8 over the network, then 7/8 of all bytes within its host."""
    whole = 32 * 160
    time_us = collective_us((NETWORK, SWITCH), "all-gather", (0, 4, 1), (1, 8, 1))
    assert time_us == expected_us(3 / 4 * whole / 8, 2, latency=7 + 3 + 7 / 8 * whole / 40 * 1e6)


def test_an_all_to_all_crosses_the_middle_of_the_longest_dimension():
    assert collective_us((RING, LINE), "all-to-all", (0, 16, 1), (1, 4, 1)) == expected_us(16 / 4 * 160, 20, latency=8)
    assert collective_us((SWITCH,), "all-to-all", (0, 8, 1)) == expected_us(7 / 8 * 160, 40, latency=3)


def test_an_all_to_all_over_a_square_uses_the_links_of_both_dimensions():
    """Half of all bytes cross the middle of a square over two links, and that of a line over one."""
    line = collective_us((LINE, LINE), "all-to-all", (0, 4, 1))
    square = collective_us((LINE, LINE), "all-to-all", (0, 2, 1), (1, 2, 1))
    assert line == expected_us(160, 10, latency=3) and square == expected_us(160 / 2, 10, latency=1)


def test_a_collective_of_no_bytes_takes_no_time():
    assert collective_us((RING,), "all-gather") == 0 == collective_us((RING,), "all-gather", (0, 1, 1))


@pytest.mark.parametrize(
    ("target", "mesh", "places"),
    [
        ("v5e:4x4", {"dp": 4, "tp": 4}, {"dp": "y:4", "tp": "x:4"}),
        ("v5e:16x16", {"fsdp": 64, "tp": 4}, {"fsdp": "y:16 x:4/4", "tp": "x:4"}),
        ("v5p:4x4x4", {"fsdp": 8, "tp": 8}, {"fsdp": "z:4 y:2/2", "tp": "y:2 x:4"}),
        ("h100:4x8", {"dp": 4, "tp": 8}, {"dp": "host:4", "tp": "gpu:8"}),
        ("h100:4x8", {"dp": 2, "tp": 16}, {"dp": "host:2/2", "tp": "host:2 gpu:8"}),
        ("v5p:4x4x4*2", {"dp": 2, "fsdp": 64}, {"dp": "slice:2", "fsdp": "z:4 y:4 x:4"}),
    ],
)
def test_the_last_mesh_axis_spans_the_nearest_devices(target, mesh, places):
    assert find_target(target).assign(mesh).text() == places


@pytest.mark.parametrize("mesh", [{"a": 4, "b": 4}, {"a": 2, "b": 8}, {"a": 8, "b": 2}, {"a": 2, "b": 2, "c": 4}])
def test_every_assignment_uses_each_device_once(mesh):
    topology = find_target("v5e:4x4").topology
    for first in itertools.permutations(mesh):
        every_assignment = list(assignments(topology, mesh, first))
        assert every_assignment
        assert all(sorted(one.order) == list(range(16)) for one in every_assignment)


def test_an_axis_can_span_a_square_of_a_torus():
    topology = find_target("v6e:16x16").topology
    texts = [each.text() for each in assignments(topology, {"fsdp": 64, "ep": 4}, ("ep", "fsdp"))]
    assert texts[0] == {"fsdp": "y:16 x:4/4", "ep": "x:4"}
    assert {"fsdp": "y:8/2 x:8/2", "ep": "y:2 x:2"} in texts


def test_the_order_of_devices_follows_the_pieces():
    topology = Topology((Dim("y", 4, "ring", 1, 1), Dim("x", 4, "ring", 1, 1)))
    assignment = DeviceAssignment(topology, {"a": (Piece(1, 4, 1),), "b": (Piece(0, 2, 2), Piece(0, 2, 1))})
    devices = np.arange(16).reshape(4, 4)  # [y, x]
    assert (np.array(assignment.order).reshape(4, 4) == devices.T).all()


def test_an_assignment_takes_the_time_of_its_pieces():
    target = find_target("v5p:4x4x4")
    assignment = target.assign({"fsdp": 16, "tp": 4})
    kinds: tuple[ReshardKind, ...] = ("all-gather", "all-to-all")
    for kind, axes in itertools.product(kinds, [("tp",), ("fsdp",), ("fsdp", "tp")]):
        pieces = tuple(p for a in axes for p in assignment.pieces[a])
        assert assignment.time_us(kind, axes, 12345.0) == pytest.approx(target.topology.time_us(kind, pieces, 12345.0))


def test_sizes_that_do_not_fit_the_dimensions_are_assigned_in_order():
    assignment = assign(Topology((LINE,)), (("a", 2), ("b", 1), ("c", 2)))
    assert sorted(assignment.order) == [0, 1, 2, 3]
    odd = assign(Topology((Dim("x", 6, "ring", 1, 1), Dim("y", 4, "ring", 2, 1))), (("a", 3), ("b", 8)))
    assert sorted(odd.order) == list(range(24)) and odd.time_us("all-gather", ["b"], 100.0) > 0


def test_latency_grows_with_the_devices_of_one_process():
    assignment = find_target("cpu:8").assign({"a": 4, "b": 2})
    near, far, both = (assignment.time_us("all-reduce", axes, 0.0) for axes in (("b",), ("a",), ("a", "b")))
    assert near < far < both < 7 * near
    gpus = find_target("h100:1x8").assign({"a": 4, "b": 2})
    assert gpus.time_us("all-reduce", ("b",), 0.0) == gpus.time_us("all-reduce", ("a",), 0.0)


@pytest.mark.parametrize(
    ("target", "mesh", "axes", "scatter", "gather"),
    [
        ("v5e:4x4", {"a": 16}, ("a",), "all-reduce", "all-gather"),  # two lines
        ("v6e:8x8", {"a": 64}, ("a",), "all-reduce", "all-gather"),
        ("v6e:4x8", {"a": 32}, ("a",), "reduce-scatter", "all-gather"),  # two lines that are not equally long
        ("v5e:16x16", {"a": 256}, ("a",), "all-reduce", "all-gather"),  # two rings
        ("v5e:16x16", {"b": 2, "a": 128}, ("a",), "reduce-scatter", "all-gather"),
        ("v5e:4x4*2", {"b": 2, "a": 16}, ("a",), "all-reduce", "all-gather"),  # a whole slice
        ("v5p:4x4x2", {"b": 2, "a": 16}, ("a",), "reduce-scatter", "all-gather"),  # a square that is half a slice
        ("v5p:4x4x2", {"a": 32}, ("a",), "all-reduce", "all-gather"),
        ("v5e:4x4", {"a": 4, "b": 4}, ("b",), "reduce-scatter", "all-gather"),
        ("v5e:2x2", {"a": 4}, ("a",), "reduce-scatter", "all-gather"),
        ("v5e:2x4", {"a": 8}, ("a",), "reduce-scatter", "all-gather"),
        ("v5p:4x4x4", {"a": 16, "b": 4}, ("a",), "reduce-scatter", "all-gather"),  # a plane
        ("v4:4x4x4", {"a": 64}, ("a",), "all-reduce", "all-reduce"),
        ("v5p:4x4x4", {"a": 64}, ("a",), "all-reduce", "all-gather"),  # by an option of every plan
        ("v5p:4x4x4", {"b": 2, "a": 32}, ("a",), "reduce-scatter", "all-gather"),  # two neighbours of a plane
        ("h100:4x8", {"a": 32}, ("a",), "reduce-scatter", "all-gather"),
        ("tpu7x:2x2x1", {"a": 8}, ("a",), "all-reduce", "all-gather"),  # reductions are not on the SparseCores
    ],
)
def test_collectives_have_the_form_that_xla_compiles(target, mesh, axes, scatter, gather):
    """The expected forms are those in programs that XLA compiled for these machines."""
    assignment = find_target(target).assign(mesh)
    n = mesh[axes[0]]
    assert assignment.topology.compiled("reduce-scatter", assignment.pieces_of(axes), 64.0) == (scatter, 64.0)
    whole = 64.0 if gather == "all-gather" else 64.0 * n
    assert assignment.topology.compiled("all-gather", assignment.pieces_of(axes), 64.0) == (gather, whole)


def test_axes_that_do_not_fit_the_dimensions_share_one_switch():
    """No piece of 4 x 4 devices has 3: the axes are in row-major order on all devices, at the slowest bandwidth."""
    grid = Topology((NETWORK, LINE))
    [found] = assignments(grid, {"a": 5, "b": 3}, ["b", "a"])
    assert found.pieces == {"a": (Piece(0, 5, 3),), "b": (Piece(0, 3, 1),)}
    [dim] = found.topology.dims
    assert (dim.kind, dim.size, dim.bandwidth, dim.latency_us) == ("switch", 16, NETWORK.bandwidth, NETWORK.latency_us)
    assert assign(grid, (("a", 5), ("b", 3))) == found


def test_a_group_of_one_device_takes_no_time():
    assert collective_us((RING, LINE), "all-reduce", (0, 1, 1), (1, 1, 1)) == 0


def test_a_permute_sends_each_shard_once():
    assert collective_us((LINE,), "collective-permute", (0, 2, 1)) == expected_us(160, 10, latency=1)
    assert collective_us((SWITCH,), "collective-permute", (0, 8, 1)) == expected_us(160, 40, latency=3)


def test_a_permute_over_several_dimensions_crosses_them_all():
    """From the last device of a host to the first of the next: both latencies, and the network limits the bandwidth."""
    time_us = collective_us((NETWORK, SWITCH), "collective-permute", (0, 4, 1), (1, 8, 1))
    assert time_us == expected_us(160, 2, latency=7 + 3)
    assert collective_us((RING, LINE), "collective-permute", (0, 16, 1), (1, 4, 1)) == expected_us(160, 10, latency=11)


def test_slices_are_the_major_part_of_a_mesh_axis():
    """XLA runs no all-gather within the slices if they are in the middle."""
    topology = find_target("v5e:4x4*2").topology
    found = [*assignments(topology, {"dp": 2, "fsdp": 16}, ["fsdp", "dp"])]
    spanning = [each.pieces["fsdp"] for each in found if any(p.dim == 0 for p in each.pieces["fsdp"])]
    assert spanning and all(pieces[0].dim == 0 for pieces in spanning)
    for each in found:
        assert sorted(each.order) == list(range(32))

"""The time of collectives over groups that are mesh axes, and over other groups."""

from itertools import product

import pytest

from autoshard.sharding.hlo.collectives import Collective
from autoshard.sharding.hlo.link_times import ProgramLinks
from autoshard.sharding.machines.targets import find_target

SIZE = 1 << 24


def links_of(name, order=None):
    target = find_target(name)
    return ProgramLinks(target.topology, tuple(order or range(target.devices)))


def groups_along(target, mesh, axis):
    """The groups of a mesh axis."""
    coordinates = list(product(*(range(n) for n in mesh.values())))
    dim = list(mesh).index(axis)
    groups = {}
    for number, place in enumerate(coordinates):
        groups.setdefault(place[:dim] + place[dim + 1 :], []).append(number)
    return tuple(map(tuple, groups.values()))


@pytest.mark.parametrize("kind", ["all-gather", "reduce-scatter", "all-reduce", "all-to-all"])
@pytest.mark.parametrize("target", ["v5e:4x4", "v5p:4x4x4", "h100:4x8", "tpu7x:2x2x4", "cpu:8"])
def test_groups_of_mesh_axes_take_the_time_that_plans_predict(target, kind):
    machine = find_target(target)
    mesh = {"fsdp": machine.devices // 2, "tp": 2}
    assignment = machine.assign(mesh)
    links = ProgramLinks(machine.topology, assignment.order)
    for axis, n in mesh.items():
        payload = SIZE * n if kind == "all-gather" else SIZE
        time_us = links.time_us(Collective(kind, groups_along(machine, mesh, axis), payload))
        assert time_us == pytest.approx(assignment.time_us(kind, [axis], SIZE))


def test_one_device_sends_nothing():
    assert links_of("v5e:4x4").time_us(Collective("all-reduce", ((0,), (1,)), SIZE)) == 0


def test_the_device_order_determines_the_links_of_a_group():
    machine = find_target("v5p:4x4x4")
    transposed = [z * 16 + y * 4 + x for x, y, z in product(range(4), repeat=3)]
    column = Collective("all-gather", ((0, 1, 2, 3),), SIZE)
    assert links_of("v5p:4x4x4", transposed).pieces((0, 1, 2, 3))[0].dim == 0
    assert links_of("v5p:4x4x4").pieces((0, 1, 2, 3))[0].dim == 2
    assert links_of("v5p:4x4x4", transposed).links(column) == {(0, 1), (0, -1)}
    assert machine.topology.dims[0].name == "z"


def test_a_group_that_is_not_a_box_counts_as_its_bounding_box():
    links = links_of("v5e:4x4")
    boxed = links.time_us(Collective("all-reduce", ((0, 1, 2, 3),), SIZE))
    assert links.time_us(Collective("all-reduce", ((0, 1, 3),), SIZE)) == pytest.approx(boxed)


LINK = 45e9  # bytes per second, v5e


@pytest.mark.parametrize(
    ("pairs", "on_a_link", "hops"),
    [
        (((0, 1), (1, 2), (2, 3)), 1, 1),
        (((0, 1), (1, 2), (2, 3), (3, 0)), 1, 3),  # the last message uses links of the opposite direction
        (((0, 2), (1, 3)), 2, 2),
        (((0, 5),), 1, 2),  # one dimension after the other
    ],
)
def test_permutes_on_a_line(pairs, on_a_link, hops):
    links = links_of("v5e:4x4")
    time_us = links.time_us(Collective("collective-permute", pairs, SIZE))
    latency = links.topology.dims[0].latency_us
    assert time_us == pytest.approx(hops * latency + on_a_link * SIZE / LINK * 1e6)


def test_permutes_around_a_ring_take_the_shorter_way():
    ring = tuple((x, (x + 1) % 4) for x in range(4))
    links = links_of("v5p:4x4x4")
    assert links.time_us(Collective("collective-permute", ring, SIZE)) == pytest.approx(1 + SIZE / 90e9 * 1e6)
    assert links.links(Collective("collective-permute", ring, SIZE)) == {(2, 1)}
    other = tuple((b, a) for a, b in ring)
    assert links.links(Collective("collective-permute", other, SIZE)) == {(2, -1)}


def test_permutes_between_hosts_go_over_the_network():
    links = links_of("h100:2x8")
    near = links.time_us(Collective("collective-permute", ((0, 1), (8, 9)), SIZE))
    far = links.time_us(Collective("collective-permute", ((0, 8), (1, 9)), SIZE))
    assert near == pytest.approx(5 + SIZE / 450e9 * 1e6)
    assert far == pytest.approx(15 + SIZE / 50e9 * 1e6)


def test_only_targets_of_several_slices_have_slices():
    machine = find_target("v5p:2x2x1*2")
    found = ProgramLinks(machine.topology, tuple(range(8))).slices
    assert found and (found.count, found.partitions) == (2, [[0, 1, 2, 3], [4, 5, 6, 7]])
    assert links_of("v5e:4x4").slices is None


def test_a_compiled_group_over_slices_is_a_send_of_all_its_bytes_between_them():
    """XLA writes what runs within the slices as collectives of their own."""
    machine = find_target("v5e:2x2*2")
    links, network = ProgramLinks(machine.topology, tuple(range(8))), machine.topology.dims[0]
    whole = Collective("all-gather", (tuple(range(8)),), SIZE)
    assert links.time_us(whole) == pytest.approx(network.latency_us + 7 / 8 * SIZE / network.bandwidth * 1e6)
    across = Collective("all-reduce", ((0, 4), (1, 5), (2, 6), (3, 7)), SIZE)
    assert links.time_us(across) == pytest.approx(2 * network.latency_us + SIZE / network.bandwidth * 1e6)


def test_permutes_between_slices_use_only_the_network():
    machine = find_target("v5e:4x4*2")
    links = ProgramLinks(machine.topology, tuple(range(32)))
    crossing = Collective("collective-permute", ((0, 21), (1, 16)), SIZE)
    assert links.links(crossing) == {(0, 1)}
    network = machine.topology.dims[0]
    assert links.time_us(crossing) == pytest.approx(network.latency_us + SIZE / network.bandwidth * 1e6)

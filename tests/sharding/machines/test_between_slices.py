"""The time of collectives whose devices are in several slices."""

import math
from dataclasses import replace

import pytest

from autoshard.sharding.machines.targets import find_target
from autoshard.sharding.machines.topology import Piece, Topology

SLICES, INNER, OUTER = Piece(0, 2, 1), Piece(1, 4, 1), Piece(2, 4, 1)
MACHINE = find_target("v5e:4x4*2").topology


@pytest.mark.parametrize(
    ("kind", "pieces", "flat"),
    [
        ("all-reduce", (OUTER, SLICES, INNER), False),
        ("reduce-scatter", (OUTER, SLICES, INNER), False),
        ("all-gather", (SLICES, OUTER, INNER), False),
        ("all-gather", (OUTER, INNER, SLICES), False),
        ("all-gather", (OUTER, SLICES, INNER), True),
        ("all-to-all", (SLICES, INNER), True),
        ("all-gather", (OUTER, INNER), False),
    ],
)
def test_what_xla_cannot_run_within_slices_crosses_the_network(kind, pieces, flat):
    """Compiled for v5e:4x4*4 (libtpu 0.0.42.1): the sends of flat collectives have the devices of all slices."""
    local, devices = 1e6, math.prod(p.size for p in pieces)
    whole = MACHINE.flat_us(kind, devices, local)
    found = MACHINE.time_us(kind, pieces, local)
    assert found == pytest.approx(whole) if flat else found < 0.7 * whole
    sent = {"all-gather": devices - 1, "all-reduce": 2 * (devices - 1) / devices}.get(kind, (devices - 1) / devices)
    assert whole > sent * local / MACHINE.dims[0].bandwidth * 1e6


@pytest.mark.parametrize("kind", ["all-gather", "all-to-all"])
def test_a_group_of_one_device_a_slice_has_nothing_within_them(kind):
    assert MACHINE.time_us(kind, (SLICES,), 1e6) == pytest.approx(MACHINE.flat_us(kind, 2, 1e6))


@pytest.mark.parametrize("pieces", [(SLICES, INNER), (INNER, SLICES)])
def test_a_reduce_scatter_over_slices_is_an_all_reduce(pieces):
    """As XLA:TPU partitions a sum whose result is sharded over devices of several slices (libtpu 0.0.42.1)."""
    local = 1e9
    found = MACHINE.time_us("reduce-scatter", pieces, local)
    within, between = (
        MACHINE.time_us("all-reduce", (INNER,), local),
        MACHINE.time_us("all-reduce", (SLICES,), local / 4),
    )
    assert found == MACHINE.time_us("all-reduce", pieces, local) == pytest.approx(within + between)
    alone = MACHINE.time_us("reduce-scatter", (SLICES,), local)
    assert alone == pytest.approx(MACHINE.time_us("all-reduce", (SLICES,), local) / 2)


def test_only_a_network_between_tori_has_slices():
    slices = MACHINE.dims[0]
    assert MACHINE.has_slices and find_target("v5e:1x1*2").topology.has_slices
    assert not Topology((slices, replace(slices, name="gpu"))).has_slices
    assert not find_target("v5e:4x4").topology.has_slices and not find_target("cpu:1").topology.has_slices

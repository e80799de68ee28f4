"""The time of collectives whose devices are in several slices."""

import pytest

from autoshard.sharding.machines.targets import find_target
from autoshard.sharding.machines.topology import Piece


@pytest.mark.parametrize(
    ("kind", "order", "flat"),
    [
        ("all-reduce", (1, 0), False),
        ("all-gather", (0, 1), False),
        ("all-gather", (1, 0), True),
        ("reduce-scatter", (1, 0), True),
        ("all-to-all", (0, 1), True),
        ("all-gather", (0,), False),
    ],
)
def test_what_xla_cannot_run_within_slices_crosses_the_network(kind, order, flat):
    """Compiled for v5e:4x4*4 (libtpu 0.0.42): the sends of all other collectives have the devices of all slices."""
    topology = find_target("v5e:4x4*2").topology
    pieces = tuple({0: Piece(0, 2, 1), 1: Piece(1, 4, 1)}[dim] for dim in order)
    devices, local = 2 * (4 if len(order) == 2 else 1), 1e6
    whole = topology.flat_us(kind, devices, local)
    found = topology.time_us(kind, pieces, local)
    assert found == pytest.approx(whole) if flat or len(order) == 1 else found < 0.7 * whole
    sent = {"all-gather": devices - 1, "all-reduce": 2 * (devices - 1) / devices}.get(kind, (devices - 1) / devices)
    assert whole > sent * local / topology.dims[0].bandwidth * 1e6


def test_a_reduce_scatter_over_slices_is_an_all_reduce_between_them():
    """As XLA:TPU partitions a sum whose result is sharded over devices of several slices (libtpu 0.0.42)."""
    topology = find_target("v5e:4x4*2").topology
    pieces, local = (Piece(0, 2, 1), Piece(1, 4, 1)), 1e9
    within = topology.time_us("reduce-scatter", pieces[1:], local)
    between = topology.time_us("all-reduce", pieces[:1], local / 4)
    assert topology.time_us("reduce-scatter", pieces, local) == pytest.approx(within + between)
    alone = topology.time_us("reduce-scatter", pieces[:1], local)
    assert alone == pytest.approx(topology.time_us("all-reduce", pieces[:1], local) / 2)

"""Over which axes an array is replicated, by what its devices hold."""

import itertools

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from autoshard.sharding.plan.replication import replicated_axes

MESH = ("data", "expert", "model")
NORM, ROUTER = PartitionSpec(), PartitionSpec(None, "expert")
SPECS = [
    NORM,
    ROUTER,
    PartitionSpec("expert", None, "model"),
    PartitionSpec(("data", "expert"), None, "model"),
    PartitionSpec(("expert", "data")),
    PartitionSpec("model", ("data", "expert")),
]


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_devices_along_a_replicated_axis_hold_the_same(spec: PartitionSpec) -> None:
    """Devices along any other axis hold different data."""
    mesh = Mesh(np.array(jax.devices()).reshape(2, 2, 2), MESH)
    array = jax.device_put(np.arange(512.0).reshape(8, 8, 8), NamedSharding(mesh, spec))
    shard_of = {shard.device: np.asarray(shard.data) for shard in array.addressable_shards}
    axes = replicated_axes(MESH, spec)
    for axis, name in enumerate(MESH):
        others = [range(2) if i != axis else (0,) for i in range(3)]
        pairs = [
            tuple(shard_of[mesh.devices[tuple(at if i == axis else where[i] for i in range(3))]] for at in (0, 1))
            for where in itertools.product(*others)
        ]
        same = all(np.array_equal(one, other) for one, other in pairs)
        assert same == (name in axes), name

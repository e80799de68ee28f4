"""The table of rules that the program itself specifies: `shard_map` and `custom_partitioning`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from autoshard import propagate
from tests.spmdrules.rows import Row, f32

MESH = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("i", "j"), axis_types=(AxisType.Auto,) * 2)
_COLLECTIVES = "its collectives need every shard"
_OTHER_MESH = "its own mesh differs from the oracle's, so shards move between devices"


def _mapped(fn, in_specs, out_specs, **options):
    return jax.shard_map(fn, mesh=MESH, in_specs=in_specs, out_specs=out_specs, **options)


def _partitioned(fn, **options):
    """A custom-partitioned function: it keeps the shardings of its operands, and sums over contracted dimensions."""
    partitioned = custom_partitioning(fn)

    def partition(mesh, operands, result):
        specs = jax.tree.map(lambda x: x.sharding, operands)
        summed = [a for x in specs for a in x.spec if a is not None and a not in result.sharding.spec]

        def on_shards(*xs):
            return lax.psum(fn(*xs), summed[0]) if summed else fn(*xs)

        return mesh, on_shards, result.sharding, specs

    partitioned.def_partition(partition, **options)
    return partitioned


def _square(x):
    return jnp.sin(x) * x


def _whole(x):
    """A function whose every element depends on the whole array."""
    return x / jnp.sum(jnp.exp(x))


_own = _partitioned(_square, sharding_rule="... d -> ... d")
_kept = _partitioned(lambda x: jax.nn.softmax(x), sharding_rule="b d -> b d", need_replication_factors=("d",))
_product = _partitioned(lambda x, y: (x * x) @ (y * y), sharding_rule="m k, k n -> m n", reduction_factors=("k",))
_unreadable = _partitioned(_whole, sharding_rule=lambda mesh, operands, results: "b d -> b d")
_merged = _partitioned(lambda x: jnp.sin(x).reshape(-1, x.shape[-1]), sharding_rule="a b d -> (a b) d")

ROWS = [
    Row("shard_map", _mapped(_whole, P("i"), P("i")), (f32(8, 6),), "(i w) w1 -> (i w2) w3; whole w w1 w2 w3; "
        "where i=2 w=4 w2=4"),
    Row("shard_map", _mapped(lambda x, y: jnp.exp(_whole(x) @ _whole(y)), (P("i"), P(None, "j")), P("i", "j")),
        (f32(8, 4), f32(4, 6)),
        "(i w) w1, w2 (j w3) -> (i w4) (j w5); whole w w1 w2 w3 w4 w5; where i=2 w=4 j=2 w3=3 w4=4 w5=3",
        "over two axes", unpartitioned=_OTHER_MESH),
    Row("shard_map", _mapped(_whole, P(("j", "i")), P(("j", "i"))), (f32(8),),
        "(j i w) -> (j i w1); whole w w1; where j=2 i=2 w=2 w1=2", "over two axes of one dimension",
        unpartitioned=_OTHER_MESH),
    Row("shard_map", _mapped(lambda x: lax.psum(_whole(x).sum(0), "i"), P("i"), P()), (f32(8, 6),),
        "(i w) w1 -> w2; whole w w1 w2; where i=2 w=4", "with a sum", unchecked=_COLLECTIVES),
    Row("custom_partitioning", _own, (f32(4, 8, 6),), "e0_0 e0_1 d -> e0_0 e0_1 d"),
    Row("custom_partitioning", _kept, (f32(4, 8),), "b d -> b d; whole d", "with a whole factor"),
    Row("custom_partitioning", _merged, (f32(4, 2, 6),), "a b d -> (a b) d; where a=4 b=2", "that merges"),
    Row("custom_partitioning", _product, (f32(4, 8), f32(8, 6)), "m k, k n -> m n; reduce k", "with a sum"),
    Row("custom_partitioning", _unreadable, (f32(4, 8),), "w0_0 w0_1 -> r0_0 r0_1; whole w0_0 w0_1 r0_0 r0_1",
        "made late"),
]  # fmt: skip


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)
def test_expected_map(row):
    assert row.rule().text == row.expected


def test_on_its_own_mesh_a_shard_map_has_the_placements_of_its_specs():
    def fn(x, y):
        return _mapped(lambda x, y: lax.psum(jnp.tanh(x @ y), "j"), (P("i", "j"), P("j")), P("i"))(x, y) * 2

    args = f32(8, 16), f32(16, 4)
    propagation = propagate(fn, *args, in_specs=(P(), P("i")), mesh=MESH)
    assert propagation.out_specs == P("i") and not propagation.unknown
    assert [(r.operand, r.kind, r.axis) for r in propagation.reshards if r.kind != "slice"] == [(1, "all-gather", "i")]
    assert propagate(fn, *args, in_specs=None, mesh=MESH).in_specs == (P("i", "j"), P("j"))
    other = propagate(fn, *args, in_specs=(P("data"), P()), mesh={"data": 2, "model": 4})
    assert other.out_specs == P("data") and not other.reshards  # `i` is not an axis of this mesh


def test_axes_that_a_shard_map_leaves_to_the_compiler_are_not_gathered():
    def fn(x):
        return _mapped(lambda x: lax.psum(x, "j"), P(None, "j"), P(), axis_names={"j"})(x)

    propagation = propagate(fn, f32(8, 16), in_specs=P("i", "j"), mesh=MESH)
    assert "all-to-all" not in {r.kind for r in propagation.reshards} and not propagation.unknown


def test_a_rule_that_cannot_be_read_is_replicated():
    assert all(f.kind == "whole" for f in ROWS[-1].rule().factors)

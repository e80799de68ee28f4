"""The table of operators on the stages of a pipeline."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autoshard import _compat
from autoshard.spmdrules.families.host_slots import host_slots
from autoshard.spmdrules.families.stacked.stages import (
    collect_layers,
    read_layer,
    read_slots,
    shift_stages,
    spread_layers,
    stack_layers,
    stage_sizes,
    unstack_layers,
    write_slots,
)
from tests.spmdrules.rows import Row, f32

X, SLOTS, INDEX = f32(4, 8), f32(3, 4, 8), np.array([2, 0, -1, 1], np.int32)
ON_SHARDS = "stages run on shards, because the partitioner gathers them"

ROWS = [
    Row("shift_stages", shift_stages, (X, f32(8)), "s a, a -> s a; linear 0 1", unpartitioned=ON_SHARDS),
    Row(
        "shift_stages",
        lambda x, y: shift_stages(x, y, backward=True),
        (X, f32(8)),
        "s a, a -> s a; linear 0 1",
        "backward",
        unpartitioned=ON_SHARDS,
    ),
    *(
        Row(
            "shift_stages",
            lambda x, backward=backward: shift_stages(x, backward=backward),
            (X,),
            "s a -> s a; linear 0",
            f"no edge {backward}",
            unpartitioned=ON_SHARDS,
        )
        for backward in (False, True)
    ),
    *(
        Row(
            "shift_stages",
            lambda x, y, enters, backward=backward: shift_stages(x, y, enters, backward=backward),
            (X, f32(8), np.array(enters)),
            "s a, a, [] -> s a; linear 0 1",
            f"ring {enters} {backward}",
            unpartitioned=ON_SHARDS,
        )
        for enters in (True, False)
        for backward in (True, False)
    ),
    Row("read_slots", read_slots, (SLOTS, INDEX), "n s a, s -> s a; whole n; linear 0"),
    Row("read_layer", read_layer, (SLOTS, INDEX), "n s a, s -> s a; whole n; linear 0"),
    Row("stack_layers", stack_layers, (X, X, X), "a b, a b, a b -> n a b; whole n; linear 0 1 2"),
    Row("unstack_layers", unstack_layers, (f32(2, 4, 8),), "n a b -> a b, a b; whole n; linear 0"),
    Row("spread_layers", lambda x: spread_layers(x, 3), (X,), "l a -> s k a; whole l s k; linear 0"),
    Row("collect_layers", lambda x: collect_layers(x, 4), (f32(3, 2, 8),), "s k a -> l a; whole s k l; linear 0"),
    Row("spread_layers", lambda x: spread_layers(x, 2, 2), (X,), "l a -> s v 1 a; whole l s v; linear 0", "chunks"),
    Row(
        "collect_layers",
        lambda x: collect_layers(x, 7, 2),
        (f32(2, 2, 2, 8),),
        "s v k a -> l a; whole s v k l; linear 0",
        "chunks",
    ),
    Row("write_slots", write_slots, (SLOTS, X, INDEX), "n s a, s a, s -> n s a; whole n; linear 0 1"),
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)
def test_expected_map(row):
    assert row.rule().text == row.expected


def test_values_move_to_the_next_stage():
    x, edge = jnp.arange(4.0), jnp.float32(9)
    assert shift_stages(x, edge).tolist() == [9, 0, 1, 2]
    assert shift_stages(x, edge, backward=True).tolist() == [1, 2, 3, 9]
    assert shift_stages(x).tolist() == [0, 0, 1, 2]
    assert shift_stages(x, backward=True).tolist() == [1, 2, 3, 0]


@pytest.mark.parametrize(("enters", "first"), [(True, 9), (False, 3)])
def test_values_move_in_a_ring(enters, first):
    x, edge = jnp.arange(4.0), jnp.float32(9)
    assert shift_stages(x, edge, enters).tolist() == [first, 0, 1, 2]
    assert shift_stages(x, edge, enters, backward=True).tolist() == [1, 2, 3, 9 if enters else 0]


@pytest.mark.parametrize("layers", [12, 7, 10])
def test_chunks_take_turns_on_the_stages(layers):
    x = jnp.arange(2 * layers).reshape(layers, 2)
    spread = spread_layers(x, 3, 2)
    np.testing.assert_array_equal(collect_layers(spread, layers, 2), x)
    ends = np.cumsum(stage_sizes(layers, 6)) - 1
    assert spread.shape[:2] == (3, 2)
    assert (spread[:, :, -1, 0] // 2).T.ravel().tolist() == ends.tolist()  # stage 0, 1, 2, and again


@pytest.mark.parametrize(("layers", "stages"), [(4, 3), (5, 4), (11, 4), (6, 3), (3, 3)])
def test_each_stage_has_its_own_layers_last(layers, stages):
    x = jnp.arange(2 * layers).reshape(layers, 2)
    spread = spread_layers(x, stages)
    np.testing.assert_array_equal(collect_layers(spread, layers), x)
    sizes = stage_sizes(layers, stages)
    assert sum(sizes) == layers and max(sizes) - min(sizes) <= 1 and spread.shape == (stages, max(sizes), 2)
    assert spread[:, -1, 0].tolist() == [2 * sum(sizes[: n + 1]) - 2 for n in range(stages)]


@pytest.mark.parametrize("stages", [1, 3])
def test_slots_in_host_memory_stay_there(stages):
    index, x = jnp.arange(stages) % 2, 1 + jnp.arange(2.0 * stages).reshape(stages, 2)

    def run(x):
        slots = write_slots(
            host_slots((2, stages, 2), x.dtype), jax.device_put(x, jax.memory.Space.Host), index, always=True
        )
        return read_slots(slots, index)

    assert _compat.is_on_host(jax.make_jaxpr(run)(x).out_avals[0])
    np.testing.assert_array_equal(jax.jit(lambda x: jax.device_put(run(x), jax.memory.Space.Device))(x), x)


@pytest.mark.parametrize("stages", [1, 3])
def test_each_stage_writes_and_reads_its_own_slot(stages):
    slots = jnp.zeros((2, stages, 2))
    index = jnp.arange(stages) % 2
    x = 1 + jnp.arange(2.0 * stages).reshape(stages, 2)
    written = jax.jit(write_slots)(slots, x, index)
    np.testing.assert_array_equal(read_slots(written, index), x)
    np.testing.assert_array_equal(read_slots(written, 1 - index), jnp.zeros_like(x))
    np.testing.assert_array_equal(write_slots(written, x + 1, jnp.full(stages, -1)), written)  # idle stages

"""Which shapes a plan shards, and which arrays a compiled program replicates."""

import jax
import jax.numpy as jnp
import pytest

from autoshard import plan
from autoshard.sharding.audit.replicated_arrays import local_shape, replicated, sharded_shapes
from autoshard.sharding.hlo.parser import parse_program
from autoshard.sharding.planner.bound_plan import bound_or_error
from tests.sharding.hlo.texts import text_of

ROWS, WIDTH, HIDDEN = 64, 24, 48


def two_layers(x, w, v):
    return jnp.tanh(x @ w) @ v


LINE = two_layers.__code__.co_firstlineno + 1


@pytest.fixture(scope="module")
def two_layer_plan():
    """Two layers on a mesh dp 2 x tp 4, which shard the batch and the hidden units."""
    shapes = [jax.ShapeDtypeStruct(s, "float32") for s in ((ROWS, WIDTH), (WIDTH, HIDDEN), (HIDDEN, WIDTH))]
    return plan(two_layers, *shapes, target="cpu:8", plan="dp:2 tp:4")


TABLES = f"""
FileNames
1 "{__file__}"

FileLocations
1 {{file_name_id=1 line=LINE}}

StackFrames
1 {{file_location_id=1}}
"""


def replicated_in(two_layer_plan, x=f"f32[{ROWS // 2},{WIDTH}]", out=f"f32[{ROWS // 2},{WIDTH}]", more="", line=LINE):
    """The arrays that a program with these inputs and temporaries replicates."""
    entry = f"""
        %x = {x} parameter(0)
        %w = f32[{WIDTH},{HIDDEN // 4}] parameter(1)
        %v = f32[{HIDDEN // 4},{WIDTH}] parameter(2)
        {more}
        %all = ({out}) tuple(%x)
        %r = {out} get-tuple-element(%all), index=0
        ROOT %o = ({out}) tuple(%r)
    """
    program = parse_program(text_of(entry, tables=TABLES.replace("LINE", str(line))))
    arrays = replicated(bound_or_error(two_layer_plan.bound).executable, program, 1e3)
    return [(a.what, a.name, a.shape, a.bytes, a.planned_bytes) for a in arrays]


def test_program_that_shards_as_planned(two_layer_plan):
    assert replicated_in(two_layer_plan) == []


def test_replicated_input(two_layer_plan):
    size = ROWS * WIDTH * 4
    assert replicated_in(two_layer_plan, x=f"f32[{ROWS},{WIDTH}]") == [
        ("input", "x", f"f32[{ROWS},{WIDTH}]", size, size / 2)
    ]


def test_replicated_result(two_layer_plan):
    size = ROWS * WIDTH * 4
    (one,) = [w for w in replicated_in(two_layer_plan, out=f"f32[{ROWS},{WIDTH}]") if w[0] == "result"]
    assert one[2:] == (f"f32[{ROWS},{WIDTH}]", size, size / 2)


META = 'metadata={op_name="jit(step)/tanh" stack_frame_id=1}'


def test_replicated_temporary(two_layer_plan):
    size = ROWS * HIDDEN * 4
    one = f"%t = f32[1,{ROWS},{HIDDEN}] all-gather(%x), {META}"
    assert replicated_in(two_layer_plan, more=one) == [("temporary", "tanh", f"f32[1,{ROWS},{HIDDEN}]", size, size / 8)]
    assert replicated_in(two_layer_plan, more=one, line=1) == []  # another line: the same shape by chance


def test_shards_and_views_are_not_reported(two_layer_plan):
    assert replicated_in(two_layer_plan, more=f"%t = f32[{ROWS // 2},{HIDDEN // 4}] tanh(%x), {META}") == []
    assert replicated_in(two_layer_plan, more=f"%t = f32[{ROWS},{HIDDEN}] bitcast(%x), {META}") == []


def test_shapes_that_a_plan_shards(two_layer_plan):
    shapes = sharded_shapes(bound_or_error(two_layer_plan.bound).executable, {"dp": 2, "tp": 4})
    assert {shape: entry.shard_count for shape, entry in shapes.items()} == {
        (ROWS, WIDTH): 2, (ROWS, HIDDEN): 8, (WIDTH, HIDDEN): 4, (HIDDEN, WIDTH): 4,
    }  # fmt: skip


def test_shape_of_one_shard():
    sizes = {"dp": 2, "tp": 4}
    assert local_shape((8, 12), (("dp", "tp"), ()), sizes) == (1, 12)
    assert local_shape((8, 10), ((), ("tp",)), sizes) == (8, 3)

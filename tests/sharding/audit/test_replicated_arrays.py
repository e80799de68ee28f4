"""Arrays that stay whole: which a plan cuts, and which a program has."""

import jax
import jax.numpy as jnp
import pytest

from autoshard import plan
from autoshard.sharding.audit.replicated_arrays import cut_shapes, local_shape, replicated
from autoshard.sharding.hlo.parser import read
from autoshard.sharding.planner.bound_plan import bound_or_error
from tests.sharding.hlo.texts import text_of

ROWS, WIDTH, HIDDEN = 64, 24, 48


def two_layers(x, w, v):
    return jnp.tanh(x @ w) @ v


LINE = two_layers.__code__.co_firstlineno + 1


@pytest.fixture(scope="module")
def made():
    """Two layers over a mesh of dp 2 x tp 4: the batch and the hidden units are cut."""
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


def found(made, x=f"f32[{ROWS // 2},{WIDTH}]", out=f"f32[{ROWS // 2},{WIDTH}]", more="", line=LINE):
    """What is whole in a program with these inputs and temporaries."""
    entry = f"""
        %x = {x} parameter(0)
        %w = f32[{WIDTH},{HIDDEN // 4}] parameter(1)
        %v = f32[{HIDDEN // 4},{WIDTH}] parameter(2)
        {more}
        %all = ({out}) tuple(%x)
        %r = {out} get-tuple-element(%all), index=0
        ROOT %o = ({out}) tuple(%r)
    """
    program = read(text_of(entry, tables=TABLES.replace("LINE", str(line))))
    return [(w.what, w.name, w.shape, w.bytes, w.planned_bytes) for w in replicated(made, program, 1e3)]


def test_nothing_is_whole_that_the_plan_cuts(made):
    assert found(made) == []


def test_an_input_that_is_whole(made):
    size = ROWS * WIDTH * 4
    assert found(made, x=f"f32[{ROWS},{WIDTH}]") == [("input", "0", f"f32[{ROWS},{WIDTH}]", size, size / 2)]


def test_a_result_that_is_whole(made):
    size = ROWS * WIDTH * 4
    (one,) = [w for w in found(made, out=f"f32[{ROWS},{WIDTH}]") if w[0] == "result"]
    assert one[2:] == (f"f32[{ROWS},{WIDTH}]", size, size / 2)


META = 'metadata={op_name="jit(step)/tanh" stack_frame_id=1}'


def test_a_temporary_that_is_whole(made):
    size = ROWS * HIDDEN * 4
    one = f"%t = f32[1,{ROWS},{HIDDEN}] all-gather(%x), {META}"
    assert found(made, more=one) == [("temporary", "tanh", f"f32[1,{ROWS},{HIDDEN}]", size, size / 8)]
    assert found(made, more=one, line=1) == []  # of the same sizes by chance


def test_pieces_and_views_are_not_whole(made):
    assert found(made, more=f"%t = f32[{ROWS // 2},{HIDDEN // 4}] tanh(%x), {META}") == []
    assert found(made, more=f"%t = f32[{ROWS},{HIDDEN}] bitcast(%x), {META}") == []


def test_which_shapes_a_plan_cuts(made):
    cuts = cut_shapes(bound_or_error(made.bound).executable, {"dp": 2, "tp": 4})
    assert {shape: cut.ways for shape, cut in cuts.items()} == {
        (ROWS, WIDTH): 2, (ROWS, HIDDEN): 8, (WIDTH, HIDDEN): 4, (HIDDEN, WIDTH): 4,
    }  # fmt: skip


def test_the_piece_of_a_device():
    sizes = {"dp": 2, "tp": 4}
    assert local_shape((8, 12), (("dp", "tp"), ()), sizes) == (1, 12)
    assert local_shape((8, 10), ((), ("tp",)), sizes) == (8, 3)

"""Sorts along a sharded dimension: the collectives of the estimate are those of the compiled program."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from autoshard import auto_shard, plan

MESH = {"x": 2, "y": 4}
ROWS = P("x", "y")


@pytest.mark.filterwarnings("ignore:.*devices")
@pytest.mark.parametrize(
    ("fn", "shape", "spec", "expected"),
    [
        # Eight rows can be sharded over both mesh axes, so the elements of a row are exchanged.
        pytest.param(lambda x: jnp.sort(x, -1), (8, 64), ROWS, {"all-to-all"}, id="rows"),
        pytest.param(lambda x: lax.approx_max_k(x, 4), (8, 64), ROWS, {"all-to-all"}, id="largest"),
        # Two rows cannot, so the rows are gathered.
        pytest.param(lambda x: jnp.sort(x, -1), (2, 64), ROWS, {"all-gather"}, id="few-rows"),
        pytest.param(lambda x: jnp.sort(x, -1), (8, 64), P(("x", "y")), set(), id="whole-rows"),
    ],
)
def test_a_sort_costs_the_collectives_of_the_compiled_program(fn, shape, spec, expected):
    made = plan(fn, jax.ShapeDtypeStruct(shape, jnp.float32), target="cpu:8", mesh=MESH, fixed={"0": spec})
    compiled = made.verify().collectives
    assert {kind for kind, *_ in made.traffic} == {each.kind for each in compiled} == expected
    planned_bytes = sum(sent for _, _, sent, *_ in made.traffic)
    assert planned_bytes == pytest.approx(sum(each.wire_bytes for each in compiled))
    assert (made.estimate.comm_us > 0) == bool(expected)


@pytest.mark.filterwarnings("ignore:.*devices")
@pytest.mark.parametrize("rows", [8, 2])
def test_a_sort_along_a_sharded_dimension_has_the_values_of_one_device(rows):
    x = np.random.default_rng(0).normal(size=(rows, 64)).astype(np.float32)
    fn = lambda x: (jnp.sort(x * 2, -1), jnp.argsort(x, -1))  # noqa: E731
    for actual, wanted in zip(auto_shard(fn, mesh=MESH, fixed={"0": ROWS})(x), fn(x), strict=True):
        np.testing.assert_array_equal(actual, wanted)

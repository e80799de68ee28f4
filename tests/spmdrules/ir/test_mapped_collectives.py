"""Collectives over an axis that `jax.vmap` names are reductions: same rules, same values, no warning."""

import jax
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from autoshard import auto_shard
from autoshard.spmdrules.ir.program import build
from tests.spmdrules.rows import numbers

X = numbers(8, 16, 4)


def _mapped(collective, *axes):
    """Applies a collective over `axes` of a function that is mapped over `rows`, and inside over `columns`."""
    fn = lambda x: collective(x, axes)  # noqa: E731
    return jax.vmap(jax.vmap(fn, axis_name="columns"), axis_name="rows")


@pytest.mark.parametrize(
    ("collective", "name"), [(lax.psum, "reduce_sum"), (lax.pmax, "reduce_max"), (lax.pmin, "reduce_min")]
)
def test_a_mapped_collective_is_a_reduction(collective, name):
    program = build(jax.make_jaxpr(_mapped(collective, "rows"))(X))
    assert program.unknown == {}
    assert [op.name for op in program.ops() if op.name.startswith(("p", "reduce"))] == [name]


def _normalized(w, x, axes):
    """Scales by statistics over the whole batch, as a batch norm under `vmap` does."""
    mean = _mapped(lax.pmean, *axes)(x)
    deviation = _mapped(lax.pmean, *axes)((x - mean) ** 2) ** 0.5
    largest = _mapped(lax.pmax, *axes)(lax.stop_gradient(x)) - _mapped(lax.pmin, *axes)(lax.stop_gradient(x))
    return (((x - mean) / deviation + largest) @ w) ** 2


@pytest.mark.few(1)
@pytest.mark.parametrize("axes", [("rows",), ("columns", "rows"), ("columns",)])
def test_values_and_gradients(axes):
    """The pass of a gradient back through `psum` has a `psum` over no dimension."""
    w = numbers(4, 8)

    def step(w, x):
        return jax.value_and_grad(lambda w, x: _normalized(w, x, axes).mean(), (0, 1))(w, x)

    for spec in (P("a", "b"), P(None, ("a", "b"))):
        sharded = auto_shard(step, mesh={"a": 2, "b": 4}, fixed={"1": spec})
        assert sharded.plan(w, X).in_specs[1] == spec
        for actual, expected in zip(jax.tree.leaves(sharded(w, X)), jax.tree.leaves(jax.jit(step)(w, X)), strict=True):
            np.testing.assert_allclose(actual, expected, 1e-4, 1e-5)

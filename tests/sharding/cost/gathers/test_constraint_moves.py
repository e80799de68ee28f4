"""The price of sharding constraints that a program contains."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from autoshard import plan

ROWS, WEIGHTS = jnp.zeros((64, 128)), jnp.zeros((128, 128))


def moves_of(mesh, spec):
    """The kinds and bytes of the collectives of a constraint on the rows of a product, under data parallelism."""

    def fn(x, w):
        return jnp.sum(jax.lax.with_sharding_constraint(x @ w, NamedSharding(mesh, spec)) @ w, axis=-1)

    made = plan(fn, ROWS, WEIGHTS, mesh=mesh, fixed={"x": P(("data", "model")), "w": P()})
    line = f"{moves_of.__code__.co_firstlineno + 4}"
    return sorted(row[:3] for row in made.traffic if f"test_constraint_moves.py:{line}" in row[3])


@pytest.mark.parametrize("spec", [P(("data", "model")), P(P.UNCONSTRAINED, None)], ids=["as planned", "free"])
def test_a_constraint_that_agrees_with_the_plan_costs_nothing(mesh8, spec):
    assert moves_of(mesh8, spec) == []


def test_an_axis_that_leaves_is_gathered_and_one_that_moves_is_exchanged(mesh8):
    nbytes = ROWS.nbytes
    # "model" moves to the other dimension and back. Each device has an eighth, and sends three quarters of it.
    assert moves_of(mesh8, P("data", "model")) == [("all-to-all", "model", pytest.approx(2 * 3 / 4 * nbytes / 8))]
    # "model" is gathered: each device receives three more eighths.
    assert moves_of(mesh8, P("data")) == [("all-gather", "model", pytest.approx(3 * nbytes / 8))]

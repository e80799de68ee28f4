"""Operators without a rule: their operands are gathered, in the plan and in the program."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Primitive
from jax.interpreters import mlir

from autoshard import auto_shard

pytestmark = pytest.mark.filterwarnings("ignore:.*no rule for 'unknown_sort'")

unknown_sort_p = Primitive("unknown_sort")
unknown_sort_p.def_abstract_eval(lambda x: x)
unknown_sort_p.def_impl(lambda x: jnp.asarray(np.sort(np.asarray(x), axis=0)))  # cannot be traced for a rule
mlir.register_lowering(unknown_sort_p, mlir.lower_fun(lambda x: jnp.sort(x, axis=0), multiple_results=False))


def step(w: jax.Array, x: jax.Array) -> jax.Array:
    """Sort the rows of a product, then multiply again."""
    return unknown_sort_p.bind(x @ w) @ w


def test_its_operands_are_gathered_and_counted() -> None:
    """The rows before it are sharded over all devices, so that each gathers 7 of 8 parts of 64 x 32 elements."""
    w = jax.random.normal(jax.random.key(0), (32, 32))
    x = jax.random.normal(jax.random.key(1), (64, 32))
    planned = auto_shard(step, plan="dp:8")
    plan = planned.plan(w, x)
    assert [(kind, axes) for kind, axes, *_ in plan.traffic] == [("all-gather", "dp")]
    assert plan.estimate.comm_bytes == 64 * 32 * 4 * 7 / 8
    np.testing.assert_allclose(planned(w, x), jnp.sort(x @ w, axis=0) @ w, rtol=1e-4, atol=1e-5)
    assert "all-gather" in planned.lower(w, x).compile().as_text()

"""Weights of layers are cast once, before the pipeline, not by each layer."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autoshard import _compat
from autoshard.sharding.pipeline.hoisted_casts import hoist_casts
from autoshard.sharding.rewrite.evaluation import rewritten

LAYERS, WIDTH = 4, 8


def program(dtype, remat):
    """A scan over layers that cast their weights, with its gradient; and its arguments."""

    def layer(y, w):
        return y + jnp.tanh(y.astype(dtype) @ w.astype(dtype)).astype(y.dtype), None

    def fn(weights, x):
        run = jax.checkpoint(layer) if remat else layer
        return jax.value_and_grad(lambda w: (jax.lax.scan(run, x, w)[0] ** 2).sum())(weights)

    keys = jax.random.split(jax.random.key(0))
    return fn, (jax.random.normal(keys[0], (LAYERS, WIDTH, WIDTH)), jax.random.normal(keys[1], (2, WIDTH)))


def casts(jaxpr, dtype):
    """The shapes that are cast to a type, in the program itself and in the bodies of its loops."""
    found = []
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "convert_element_type" and eqn.params["new_dtype"] == dtype:
            found.append(eqn.outvars[0].aval.shape)
        for inner in filter(_compat.is_jaxpr, eqn.params.values()):
            found += casts(_compat.open_jaxpr(inner), dtype)
    return found


@pytest.mark.whole
@pytest.mark.parametrize("remat", [False, True])
def test_a_stack_is_cast_once(remat):
    fn, args = program(jnp.bfloat16, remat)
    jaxpr = _compat.open_jaxpr(rewritten(jax.make_jaxpr(fn)(*args)))
    hoisted, constants = hoist_casts(jaxpr, 1)
    assert (WIDTH, WIDTH) in casts(jaxpr, jnp.bfloat16)
    found = casts(hoisted, jnp.bfloat16)
    assert found.count((LAYERS, WIDTH, WIDTH)) == 1 and (WIDTH, WIDTH) not in found
    results = _compat.jaxpr_as_function(_compat.close(hoisted, []))(*constants, *args)
    for one, other in zip(results, jax.tree.leaves(fn(*args)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-2, atol=1e-3)


def test_what_microbatches_do_not_share_stays():
    fn, args = program(jnp.bfloat16, False)
    jaxpr = _compat.open_jaxpr(rewritten(jax.make_jaxpr(fn)(*args)))
    assert hoist_casts(jaxpr, 0)[0] is jaxpr


def test_casts_to_wider_types_stay():
    fn, (weights, x) = program(jnp.float32, False)
    jaxpr = _compat.open_jaxpr(rewritten(jax.make_jaxpr(fn)(weights.astype(jnp.bfloat16), x)))
    assert hoist_casts(jaxpr, 1)[0] is jaxpr

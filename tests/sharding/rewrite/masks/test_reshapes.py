"""`lax.reshape` with `dimensions` reads its operand in another order, so a mask is not followed through it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from autoshard import _compat
from autoshard.sharding.rewrite.masks.array_masks import before_shape
from autoshard.sharding.rewrite.masks.static_masks import elements, used_dims
from autoshard.sharding.rewrite.numpy_operators import evaluate_operator
from autoshard.sharding.rewrite.slices import Refused
from autoshard.sharding.rewrite.values import Value

SQUARE = np.arange(9, dtype=np.int32).reshape(3, 3)


def reshaped() -> Value:
    (eqn,) = _compat.open_jaxpr(jax.make_jaxpr(lambda x: lax.reshape(x, (3, 3), dimensions=(1, 0)))(SQUARE)).eqns
    operand = Value("const", (), eqn.invars[0].aval, data=jnp.asarray(SQUARE))
    return Value("reshape", (operand,), eqn.outvars[0].aval, eqn)


def test_masks_do_not_follow_it() -> None:
    with pytest.raises(Refused):
        before_shape(reshaped(), ((0,), (1,)))


def test_its_elements_are_read_in_its_order() -> None:
    value = reshaped()
    assert used_dims(value) == {0, 1}
    np.testing.assert_array_equal(elements(value, [np.arange(3)[:, None], np.arange(3)[None]]), SQUARE.T)
    np.testing.assert_array_equal(evaluate_operator("reshape", value.eqn.params, SQUARE), SQUARE.T)

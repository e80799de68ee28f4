"""A program that was traced for a stack runs on one matrix. It is refused if the matrices depend on each other."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autoshard import _compat
from autoshard.sharding.rewrite.evaluation import rewritten
from autoshard.sharding.rewrite.slices import Refused
from autoshard.sharding.rewrite.updates.one_matrix import on_one_matrix
from tests.sharding.rewrite.updates.programs import orthogonal, weights

STACK = weights("stack", 5, 8, 12)


def one_of(update: Any, matrix: jax.Array, coefficients: jax.Array | None = None) -> tuple[jax.Array, int | None]:
    """Run a program for `STACK` on one matrix. Return the result, and its dimension that counts matrices."""
    closed = rewritten(jax.make_jaxpr(update)(STACK, *([] if coefficients is None else [coefficients])))
    jaxpr = _compat.open_jaxpr(closed)
    env: dict[Any, Any] = {
        x: (value, None) for x, value in zip(jaxpr.constvars, _compat.constants(closed), strict=True)
    }
    env[jaxpr.invars[0]] = matrix[None], 0
    if coefficients is not None:
        env[jaxpr.invars[1]] = coefficients, None
    return on_one_matrix(jaxpr.eqns, env, len(STACK))[jaxpr.outvars[0]]


def steps_in_loop(x: jax.Array, table: jax.Array) -> jax.Array:
    def body(x: jax.Array, c: jax.Array) -> tuple[jax.Array, jax.Array]:
        return c * x + jnp.einsum("lij,lkj,lkn->lin", x, x, x), x

    return jax.lax.scan(body, x, table)[1]


@pytest.mark.parametrize(
    ("update", "dim"),
    [
        (jax.vmap(orthogonal), 0),
        (lambda x: x.transpose(1, 2, 0), 2),
        (lambda x: jnp.broadcast_to(x.sum((1, 2), keepdims=True), x.shape) * x, 0),
        (lambda x: x.reshape(5, 4, 2, 12).sum(2), 0),
    ],
)
def test_one_matrix_has_its_part_of_the_result(update, dim):
    expected = update(STACK)
    for n in (0, 3):
        found, counting = one_of(update, STACK[n])
        assert counting == dim
        np.testing.assert_allclose(jnp.take(found, 0, dim), jnp.take(expected, n, dim), rtol=1e-5, atol=1e-6)


def test_a_loop_with_coefficients():
    table = jnp.asarray([1.5, 0.5, 2.0])
    found, dim = one_of(steps_in_loop, STACK[2], table)
    assert dim == 1  # the first one counts the iterations
    np.testing.assert_allclose(found[:, 0], steps_in_loop(STACK, table)[:, 2], rtol=1e-5)


@pytest.mark.parametrize(
    "update",
    [
        lambda x: x / jnp.linalg.norm(x),
        lambda x: x - x[:1],
        lambda x: x[::-1],
        lambda x: x.reshape(40, 12) @ jnp.ones((12, 12)),
        lambda x: jnp.cumsum(x, 0),
        lambda x: jnp.einsum("lij,mkj->likm", x, x),
        lambda x: jnp.sort(x, 0),
        lambda x: jnp.concatenate([x, jnp.ones((5, 1, 12))], 1),  # the other operand has 5 matrices, too
        lambda x: x * jnp.arange(5.0)[:, None, None],
        lambda x: jax.lax.map(orthogonal, x),
        lambda x: jax.lax.cond(x[0, 0, 0] > 0, jnp.sin, jnp.cos, x),
        lambda x: jax.lax.fori_loop(0, 3, lambda n, y: y.transpose(1, 0, 2).reshape(x.shape), x),
    ],
)
def test_matrices_that_depend_on_each_other_are_refused(update):
    with pytest.raises(Refused):
        found, dim = one_of(update, STACK[0])
        if dim is None:
            raise Refused("no dimension counts matrices")

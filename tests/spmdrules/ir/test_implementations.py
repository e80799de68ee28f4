"""A primitive that another library defines is planned as what its implementation computes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from autoshard import auto_shard, plan
from autoshard.errors import AutoshardWarning
from autoshard.spmdrules.ir.program import build
from tests.spmdrules.rows import numbers


def _primitive(name, implementation, batch_rule=None):
    primitive = Primitive(name)
    primitive.def_impl(implementation)
    primitive.def_abstract_eval(lambda x: ShapedArray(x.shape, x.dtype))
    mlir.register_lowering(primitive, mlir.lower_fun(lambda x: jnp.tanh(x) * 2, multiple_results=False))
    if batch_rule is not None:
        batching.primitive_batchers[primitive] = batch_rule
    return primitive


def _squash(x):
    return jnp.tanh(x) * 2


squash = _primitive("squash", _squash, lambda xs, dims: (jnp.zeros_like(xs[0]), dims[0]))
of_numbers = _primitive("of_numbers", lambda x: np.tanh(np.asarray(x)) * 2)
of_itself = _primitive("of_itself", lambda x: jax.jit(of_itself.bind)(x))


def _applied(primitive):
    return lambda x, w: (primitive.bind(x @ w) @ w.T).sum(0)


def test_its_axes_are_those_of_the_program():
    x, w = numbers(32, 16), numbers(16, 64)
    fn = _applied(squash)
    planned = plan(fn, x, w, plan="dp:2 fsdp:4")
    assert planned.unknown == {}
    expected = plan(lambda x, w: (_squash(x @ w) @ w.T).sum(0), x, w, plan="dp:2 fsdp:4")
    assert (planned.in_specs, planned.logical_axes) == (expected.in_specs, expected.logical_axes)
    np.testing.assert_allclose(planned.jit()(x, w), jax.jit(fn)(x, w), 1e-4, 1e-4)


@pytest.mark.parametrize("primitive", [of_numbers, of_itself])
def test_an_implementation_that_cannot_be_traced_leaves_it_unknown(primitive):
    x, w = numbers(32, 16), numbers(16, 64)
    with pytest.warns(AutoshardWarning, match=f"no rule for '{primitive.name}'"):
        result = auto_shard(_applied(primitive), plan="dp:8")(x, w)
    np.testing.assert_allclose(result, jax.jit(_applied(primitive))(x, w), 1e-4, 1e-4)


def test_its_own_batching_rule_is_kept():
    xs, w = numbers(4, 32, 16), numbers(16, 64)
    mapped = jax.vmap(auto_shard(_applied(squash), plan="dp:8"), (0, None))(xs, w)
    np.testing.assert_array_equal(mapped, jnp.zeros((4, 16)))


def test_callbacks_of_jax_are_not_called():
    def fail(_):
        raise AssertionError

    program = build(jax.make_jaxpr(lambda x: jax.pure_callback(fail, x, x))(numbers(4)))
    assert list(program.unknown) == ["pure_callback"]

"""HiJAX operators are planned by their expansion and keep their own derivatives."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import hijax
from jax.sharding import PartitionSpec as P

from autoshard import auto_shard, check_rule, propagate
from autoshard.spmdrules.ir.program import build
from autoshard.spmdrules.reference.derive import derive
from tests.arrays import array

BASE: Any = getattr(hijax, "HiPrim", None) or getattr(hijax, "VJPHiPrimitive")  # noqa: B009  its older name
EDGES = jnp.asarray(np.linspace(-2, 2, 9), jnp.float32)
X = array(np.random.default_rng(0).normal(size=(16, 8)), jnp.float32)
POWERS = jnp.asarray(np.arange(8) - 4, jnp.int32)


class Tripled(BASE):
    """Multiplies by three. Its derivative is 100, which differs from that of its expansion."""

    def __init__(self, aval):
        self.in_avals, self.out_aval, self.params = (aval,), aval, {}
        super().__init__()

    def expand(self, x):
        return jnp.sin(x) * 0 + x * 3

    def vjp_fwd(self, nzs_in, x):
        return self(x), None

    def vjp_bwd_retval(self, res, g):
        return (g * 100.0,)


class TripledForward(Tripled):
    """`Tripled` with a forward-mode derivative."""

    def jvp(self, primals, tangents):
        return self(*primals), tangents[0] * 100.0

    def lin(self, nzs_in, x):
        return self(x), None

    def linearized(self, res, g):
        return g * 100.0


class Silent(Tripled):
    """An operator without an expansion."""

    expand = BASE.expand


def tripled(kind):
    return lambda x: kind(jax.typeof(x))(x)


def searched(x):
    return jnp.searchsorted(EDGES, x), jnp.ldexp(jnp.sin(x), POWERS)


def total(x):
    return (jnp.ldexp(jnp.sin(x), POWERS) ** 2).sum()


def test_an_operator_is_expanded():
    program = build(jax.make_jaxpr(tripled(Tripled))(X))
    assert not program.unknown and "sin" in [op.name for op in program.ops()]
    assert derive(tripled(Tripled), X).text == "a b -> a b"
    assert check_rule(tripled(Tripled), X[:4], partitioner=False) == []
    propagation = propagate(lambda x: searched(x)[0], X, in_specs=P("a"), mesh={"a": 2})
    assert propagation.out_specs == P("a") and not propagation.reshards and not propagation.unknown


def test_an_operator_without_expansion_is_unknown():
    program = build(jax.make_jaxpr(tripled(Silent))(X))
    assert list(program.unknown) == ["call_hi_primitive"]


def test_values_and_gradients_of_planned_operators():
    step = auto_shard(searched, mesh={"data": 8})
    for actual, expected in zip(step(X), searched(X), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-6)
        assert not actual.sharding.is_fully_replicated
    np.testing.assert_allclose(auto_shard(jax.grad(total), mesh={"data": 8})(X), jax.grad(total)(X), rtol=1e-5)


def test_a_planned_function_can_be_differentiated():
    step = auto_shard(lambda x: searched(x)[1], mesh={"data": 8})
    loss = lambda x: (step(x) ** 2).sum()  # noqa: E731
    np.testing.assert_allclose(jax.grad(loss)(X), jax.grad(total)(X), rtol=1e-5)
    np.testing.assert_allclose(jax.jvp(loss, (X,), (X,))[1], jax.jvp(total, (X,), (X,))[1], rtol=1e-5)


@pytest.mark.parametrize("kind", [Tripled, TripledForward])
def test_a_custom_derivative_is_kept(kind):
    step = auto_shard(tripled(kind), mesh={"data": 8})
    np.testing.assert_allclose(step(X), X * 3, rtol=1e-6)
    np.testing.assert_allclose(jax.grad(lambda x: step(x).sum())(X), jnp.full_like(X, 100.0))

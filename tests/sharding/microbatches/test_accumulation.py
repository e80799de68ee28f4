"""A step in microbatches gives what the step gives, and keeps less at a time."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autoshard import _compat, operator
from autoshard.sharding.microbatches.accumulation import in_microbatches
from autoshard.sharding.microbatches.flow import find_flow, own_sums
from autoshard.sharding.microbatches.states import Cut, Split
from autoshard.sharding.rewrite.evaluation import rewritten
from autoshard.spmdrules.custom_ops.opaque_primitive import is_operator
from tests.sharding.microbatches.programs import make_step, state, tokens


def cut(step, args, count, rows):
    """The jaxpr of a step in microbatches."""
    closed = rewritten(_compat.dce(jax.make_jaxpr(step)(*args)))
    written = in_microbatches(closed, find_flow(closed, rows, count), Cut(count))
    return _compat.dce(jax.make_jaxpr(written)(*jax.tree.leaves(args)))


def rows_of(args):
    """The last argument is the batch."""
    return {len(jax.tree.leaves(args)) - 1: Split(0)}


def run(jaxpr, args):
    return jax.jit(_compat.jaxpr_as_function(jaxpr))(*jax.tree.leaves(args))


CASES = [
    ("plain", "full", False), ("masked", "none", False), ("dropout", "dots", False), ("auxiliary", "full", False),
    ("flat", "none", False), ("rows", "none", False), ("auxiliary", "full", True),
]  # fmt: skip


@pytest.mark.few(1)
@pytest.mark.parametrize(("kind", "remat", "unrolled"), CASES)
def test_results_are_those_of_the_step(kind, remat, unrolled):
    """In float64, where only the order of sums differs."""
    with jax.enable_x64(True):
        step, args = make_step(kind, remat, unrolled), (state(jnp.float64), tokens())
        made = run(cut(step, args, 4, rows_of(args)), args)
        for actual, expected in zip(made, jax.tree.leaves(jax.jit(step)(*args)), strict=True):
            np.testing.assert_allclose(actual, expected, rtol=1e-9, atol=1e-12)


def loop_of(jaxpr):
    """The scan over the microbatches."""
    [loop] = [e for e in jaxpr.jaxpr.eqns if e.primitive.name == "scan" and e.params["length"] == 4]
    return loop


def test_each_gradient_has_one_sum():
    """The optimizer reads a gradient twice. A tied weight has two gradients, which are added in the loop."""
    args = (state(), tokens())
    loop = loop_of(cut(make_step(), args, 4, rows_of(args)))
    n_carry = _compat.scan_arity(loop.params)[1]
    shapes = sorted(v.aval.shape for v in loop.outvars[:n_carry] if v.aval.ndim > 1)
    assert shapes == sorted(x.shape for x in jax.tree.leaves(args[0][0]))


def test_a_sum_that_is_used_twice_is_kept_once():
    """Its scale is applied after the loop, where its square needs the sum anyway."""

    def step(w, x):
        gradient = x.T @ jnp.tanh(x @ w)
        return gradient * 2, gradient * gradient

    loop = loop_of(cut(step, (jnp.ones((4, 3)), jnp.ones((8, 4))), 4, {1: Split(0)}))
    assert _compat.scan_arity(loop.params)[1] == 1


def test_narrow_floats_are_summed_in_float32():
    args = (state(jnp.bfloat16), tokens())
    loop = loop_of(cut(make_step(), args, 4, rows_of(args)))
    n_carry = _compat.scan_arity(loop.params)[1]
    assert {v.aval.dtype for v in loop.outvars[:n_carry]} == {jnp.dtype("float32")}


def test_maxima_and_conditions_over_the_batch():
    def step(w, x):
        y = x @ w
        return y.max(), y.min(), jnp.isfinite(y).all(), (y > 3).any(), (y > 0).sum()

    args = (jax.random.normal(jax.random.key(0), (4, 3)), jax.random.normal(jax.random.key(1), (8, 4)))
    made = run(cut(step, args, 4, {1: Split(0)}), args)
    for actual, expected in zip(made, step(*args), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-6)


def test_conditions_and_inner_functions():
    def step(w, x, flag):
        y = jax.lax.cond(flag > 0, lambda a: jax.nn.relu(a @ w), lambda a: jnp.zeros_like(a @ w), x)
        return y.sum(0), y

    args = (jnp.eye(4), jax.random.normal(jax.random.key(1), (8, 4)), jnp.int32(1))
    made = run(cut(step, args, 2, {1: Split(0)}), args)
    for actual, expected in zip(made, step(*args), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-6)


def test_opaque_operators_stay_operators():
    """Only so do they run on shards: XLA cannot partition a kernel."""

    @operator("b d -> b d; whole d")
    def doubled(x):
        return 2 * x

    args = (jnp.ones((4, 3)), jnp.ones((8, 4)))
    body = loop_of(cut(lambda w, x: doubled(x @ w).sum(0), args, 4, {1: Split(0)})).params["jaxpr"]
    [eqn] = [e for e in body.jaxpr.eqns if is_operator(e.primitive)]
    assert eqn.invars[0].aval.shape == (2, 3)


def test_prints_occur_once(capsys):
    def step(w, x):
        jax.debug.print("weights {}", w.sum())
        y = jnp.tanh(x @ w)
        jax.debug.print("rows {}", y.shape[0] * jnp.ones_like(y).sum())
        jax.debug.print("largest {}", y.max())
        return y.sum()

    args = (jnp.ones((4, 3)), jnp.ones((8, 4)))
    assert cut(step, args, 4, {1: Split(0)}).jaxpr.effects
    run(cut(step, args, 4, {1: Split(0)}), args)
    jax.effects_barrier()
    assert sorted(line.split()[0] for line in capsys.readouterr().out.splitlines()) == ["largest", "rows", "weights"]


def test_temporaries_are_smaller():
    def loss(w, x):
        for _ in range(6):
            x = jnp.tanh(x @ w)
        return x.sum()

    step = jax.grad(loss)

    args = (jax.ShapeDtypeStruct((64, 64), "float32"), jax.ShapeDtypeStruct((4096, 64), "float32"))
    made = _compat.jaxpr_as_function(cut(step, args, 4, {1: Split(0)}))
    analyses = [jax.jit(f).lower(*args).compile().memory_analysis() for f in (step, made)]
    whole, parted = (getattr(analysis, "temp_size_in_bytes") for analysis in analyses)  # noqa: B009
    assert parted < 0.6 * whole


@pytest.mark.parametrize("remat", [False, True])
@pytest.mark.parametrize("kind", ["stacked", "features"])
def test_the_loss_and_its_gradient_take_the_same_maxima(kind, remat):
    """Where numerics may change, both are those of the mean over separate batches. The note names the operation."""

    def loss(weights, rows, parts):
        def layer(x, w):
            x = x + jnp.tanh(x @ w)
            return x, jnp.max(x, 0 if kind == "features" else None)

        body = jax.checkpoint(layer) if remat else layer
        values = []
        for n in range(parts):
            x, largest = jax.lax.scan(body, rows[n::parts], weights)
            values.append((x**2).mean() + 0.1 * largest.sum())
        return sum(values) / parts

    with jax.enable_x64(True):
        args = jax.random.normal(jax.random.key(0), (2, 6, 6)) * 0.4, jax.random.normal(jax.random.key(1), (8, 6))
        closed = rewritten(_compat.dce(jax.make_jaxpr(jax.value_and_grad(lambda w, x: loss(w, x, 1)))(*args)))
        flow = find_flow(closed, {1: Split(0)}, 4, numerics=True)
        made = jax.make_jaxpr(in_microbatches(closed, flow, Cut(4)))(*args)
        want = jax.value_and_grad(lambda w, x: loss(w, x, 4))(*args)
        for one, other in zip(run(made, args), want, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-12)
    assert any(text.startswith("'eq' at") and text.endswith("takes the maximum") for text in own_sums(flow))
    assert any("reduce_sum" in text and "takes the maximum" in text for text in own_sums(flow))

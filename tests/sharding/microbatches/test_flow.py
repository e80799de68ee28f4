"""What a microbatch has of the values of a step, and what prevents a cut."""

import jax
import jax.numpy as jnp
import pytest

from autoshard import _compat
from autoshard.sharding.microbatches.flow import find_flow
from autoshard.sharding.microbatches.operator_steps import NotCut
from autoshard.sharding.microbatches.states import After, Partial, Split, Whole
from autoshard.sharding.rewrite.evaluation import rewritten
from tests.sharding.microbatches.programs import make_step, state, tokens


def flow_of(step, *args, count=4):
    closed = rewritten(_compat.dce(jax.make_jaxpr(step)(*args)))
    return find_flow(closed, {len(jax.tree.leaves(args)) - 1: Split(0)}, count)


def test_products_sums_and_rows():
    flow = flow_of(lambda w, x: (x @ w, x.sum(0), x.T @ x, w * 2), jnp.ones((4, 3)), jnp.ones((8, 4)))
    assert flow.results == [Split(0), Partial("sum"), Partial("sum"), Whole()]


def test_the_operands_of_a_barrier_need_not_have_the_same_rows():
    def step(w, x):
        early, late = jax.lax.optimization_barrier((x, x @ w))
        return early @ w, late.sum(0)

    assert flow_of(step, jnp.ones((4, 4)), jnp.ones((8, 4))).results == [Split(0), Partial("sum")]
    flow = flow_of(lambda w, x: jax.lax.optimization_barrier((x.sum(0), x.T))[0], jnp.ones(3), jnp.ones((8, 4)))
    assert flow.results == [Partial("sum")]


def test_effects_in_a_layer_prevent_the_cut():
    def step(w, x):
        def layer(c, _):
            jax.debug.print("layer")
            return jnp.tanh(c @ w), None

        return jax.lax.scan(layer, x, length=3)[0].sum()

    with pytest.raises(NotCut, match="has side effects, which each microbatch would repeat"):
        flow_of(step, jnp.ones((4, 4)), jnp.ones((8, 4)))


def test_what_takes_a_sum_runs_after_the_loop():
    flow = flow_of(lambda w, x: w - jnp.tanh(x.T @ x), jnp.ones((4, 4)), jnp.ones((8, 4)))
    assert flow.results == [After()]


def test_what_is_cheap_to_compute_from_the_batch_comes_before_the_loop():
    def step(w, x, mask):
        weight = mask / mask.sum()
        return (jnp.tanh(x @ w) * weight[:, None]).sum(0)

    closed = rewritten(_compat.dce(jax.make_jaxpr(step)(jnp.ones((4, 3)), jnp.ones((8, 4)), jnp.ones(8))))
    flow = find_flow(closed, {1: Split(0), 2: Split(0)}, 4)
    phases = {e.primitive.name: s.phase for e, s in zip(closed.jaxpr.eqns, flow.steps, strict=True)}
    assert flow.results == [Partial("sum")] and phases["tanh"] == "each" and phases["div"] == "each"
    assert [s.phase for e, s in zip(closed.jaxpr.eqns, flow.steps, strict=True)
            if e.primitive.name == "reduce_sum"] == ["whole", "each"]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("batch norm", r"'sub' at .*programs.py:\d+ \(make_step.<locals>.layer\) needs a sum over the whole batch"),
        ("load balance", r"'mul' at .*needs a sum over the whole batch, and 'scan' at .* needs the result"),
        ("head norm", r"'sub' at .*\(make_step.<locals>.loss\) needs a sum over the whole batch"),
        ("contrastive", "'dot_general' at .* compares each row of the batch with other rows"),
    ],
)
def test_what_prevents_the_cut_is_named(kind, message):
    with pytest.raises(NotCut, match=message):
        flow_of(make_step(kind), state(), tokens())


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (lambda w, x: jnp.cumsum(x @ w, 0) @ w.T, "'cumsum' .*needs all rows of the batch at once, and 'dot_general'"),
        (lambda w, x: jax.lax.scan(lambda c, r: (jnp.tanh(c + r), c), w[:, 0], x)[1] @ w, "runs over the rows"),
        (lambda w, x: jnp.tanh(jnp.flip(x @ w, 0)) @ w.T, "'rev' .*needs all rows"),
        (lambda w, x: x[jnp.argsort(x[:, 0])] @ w, r"^'sort' at \S+test_flow.py:\d+ \(<lambda>\) needs all rows"),
        (
            lambda w, x: jax.lax.while_loop(lambda s: s.sum() > 9, jnp.sin, x @ w),
            r"^'while' at \S+ \(<lambda>\) takes the batch, and the number",
        ),
    ],
)
def test_operators_that_need_all_rows(step, message):
    with pytest.raises(NotCut, match=message):
        flow_of(step, jnp.ones((4, 3)), jnp.ones((8, 4)))

"""Gradients of weights that are used several times: which terms are added before they are reduced."""

import itertools

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from autoshard import plan
from autoshard.sharding.axes.analysis import analyse
from autoshard.sharding.axes.weights.joined_gradients import joined_gradients
from autoshard.sharding.machines.device_mesh import find_machine
from autoshard.sharding.planner.planning import PlanningProblem
from autoshard.sharding.program.tracing import trace

WIDTH, ROWS = 256, 4096
WEIGHTS = [jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.bfloat16)] * 2
BATCH = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.bfloat16)


def network(weights, x):
    for w in weights:
        x = jnp.tanh(x @ w)
    return x


def step_of(loss):
    def step(weights, *batch):
        value, gradients = jax.value_and_grad(loss)(weights, *batch)
        return jax.tree.map(lambda w, g: w - 0.1 * g.astype(w.dtype), weights, gradients), value

    return step


def mean(x):
    return jnp.mean(x.astype(jnp.float32))


def twice(weights, a, b):
    return mean(network(weights, a) * network(weights, b))


def once(weights, a, b):
    return mean(network(weights, a)) + 0.0 * mean(b)


def rematerialized(weights, a, b):
    remat = jax.checkpoint(lambda x: network(weights, x))
    return mean(remat(a) * remat(b))


def cast_at_each_use(weights, a, b):
    def run(x):
        return network([w.astype(jnp.bfloat16) for w in weights], x)

    return mean(run(a) * run(b))


def groups(loss, weights=WEIGHTS, batch=(BATCH, BATCH)):
    found = analyse(trace(step_of(loss), (weights, *batch), {}))
    return sorted(len(group) for group in joined_gradients(found.axes, found.roles.rows))


@pytest.mark.parametrize(("loss", "expected"), [
    (twice, [2, 2]),
    (rematerialized, [2, 2]),
    (lambda weights, a, b: twice([weights[0]] * 4, a, b), [8]),
    (once, []),
    (lambda weights, a, b: mean(network(weights[:1], a)) + mean(network(weights[1:], b)), []),
])  # fmt: skip
def test_terms_of_one_weight_are_joined(loss, expected):
    assert groups(loss) == expected


def test_terms_that_are_cast_first_are_reduced_apart():
    wide = [jax.ShapeDtypeStruct(w.shape, jnp.float32) for w in WEIGHTS]
    assert groups(cast_at_each_use, wide) == []


def test_differences_are_reduced_apart():
    def step(weights, a, b):
        one, other = (jax.grad(lambda w, x: mean(network(w, x)))(weights, x) for x in (a, b))
        return jax.tree.map(lambda w, x, y: w - 0.1 * (x - y), weights, one, other)

    found = analyse(trace(step, (WEIGHTS, BATCH, BATCH), {}))
    assert joined_gradients(found.axes, found.roles.rows) == []


def test_a_product_and_a_scatter_are_apart():
    """A layout may reduce the product and gather the rows of the scatter."""

    def loss(weights, tokens):
        (table,) = weights
        return mean(jnp.tanh(table[tokens]) @ table.T)

    table, tokens = jax.ShapeDtypeStruct((512, WIDTH), jnp.bfloat16), jax.ShapeDtypeStruct((ROWS,), jnp.int32)
    assert groups(loss, [table], (tokens,)) == []


@pytest.mark.parametrize("subscripts", ["bi,io->bo", "bi,oi->bo"])  # JAX transposes the first gradient
def test_a_term_that_is_a_result_too_is_reduced_apart(subscripts):
    def step(weights, a, b):
        def product(w, x):
            return mean(jnp.tanh(jnp.einsum(subscripts, x, w[0])))

        one, other = (jax.grad(product)(weights, x) for x in (a, b))
        return jax.tree.map(lambda w, x, y: w - 0.1 * (x + y), weights, one, other), one

    found = analyse(trace(step, (WEIGHTS, BATCH, BATCH), {}))
    assert joined_gradients(found.axes, found.roles.rows) == []


def test_sums_of_activations_are_no_gradients_of_weights():
    """The gradient of the queries has a term from each of two products with rows of the batch."""

    def loss(weights, x):
        (w,) = weights
        queries = jnp.tanh(x @ w)
        scores = [jnp.einsum("bqd,bkd->bqk", queries, keys) for keys in (x, jnp.sin(x))]
        return mean(jnp.tanh(scores[0]) * scores[1])

    batch = jax.ShapeDtypeStruct((64, 32, WIDTH), jnp.bfloat16)
    assert groups(loss, WEIGHTS[:1], (batch,)) == []


def test_a_loop_over_layers_has_its_own_sums():
    def loss(weights, a, b):
        def layer(x, w):
            return jnp.tanh(jnp.tanh(x @ w) @ w), None

        return mean(lax.scan(layer, a, weights)[0] * b)

    stack = jax.ShapeDtypeStruct((4, WIDTH, WIDTH), jnp.bfloat16)
    assert groups(loss, stack) == [2]


@pytest.mark.parametrize("words", ["dp:8", "fsdp:8"])
def test_their_sum_is_reduced_once(words):
    both, alone = (plan(step_of(loss), WEIGHTS, BATCH, BATCH, target="v5e:2x4", plan=words) for loss in (twice, once))
    assert both.estimate.comm_bytes == pytest.approx(alone.estimate.comm_bytes, rel=1e-3)


def residual(weights, a, b):
    """Six blocks with the same two weights. Some gradients of one weight are alike, and the last one is reduced."""
    a = a @ weights[0]
    for _ in range(6):
        a = a + jnp.tanh(a @ weights[0]) @ weights[1]
    return mean(a * b)


@pytest.mark.parametrize(("loss", "uses"), [
    (lambda weights, a, b: twice([weights[0]] * 2, a, b), [4]),
    (residual, [6, 7]),
])  # fmt: skip
def test_each_partial_sum_waits_for_the_next_one(loss, uses):
    """The device holds one whole partial sum between two products, and the last one while it is scattered."""
    problem = PlanningProblem(trace(step_of(loss), (WEIGHTS, BATCH, BATCH), {}), find_machine(None, "v5e:2x4"), None)
    found = joined_gradients(problem.axes, problem.roles.rows)
    assert sorted(map(len, found)) == uses
    buffers = [some for some in problem.cost(problem._requested_layout("fsdp:8")).live_buffers if some.nbytes]
    spans = {span for some in buffers for span in zip(some.first.tolist(), some.last.tolist(), strict=True)}
    number = {id(op): n for n, op in enumerate(problem.program.ops())}
    for terms in found:
        products = [number[id(op)] for op in terms]
        assert {*itertools.pairwise(products), (products[-1], products[-1])} <= spans


@pytest.mark.slow
@pytest.mark.parametrize("words", ["dp:8", "fsdp:8"])
@pytest.mark.parametrize("loss", [twice, rematerialized])
def test_the_tpu_compiler_reduces_them_once(loss, words):
    made = plan(step_of(loss), WEIGHTS, BATCH, BATCH, target="v5e:2x4", plan=words)
    audit = made.verify()
    assert sum(c.wire_bytes for c in audit.collectives) == pytest.approx(made.estimate.comm_bytes, rel=0.02)

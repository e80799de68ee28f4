"""Batches of the data beside the batch, such as unlabelled rows or documents, are sharded like the batch."""

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import PartitionSpec as P

import autoshard
from autoshard.errors import AutoshardWarning
from autoshard.sharding.axes.analysis import analyse
from autoshard.sharding.program.tracing import trace
from tests.sharding.programs import assert_close, descent, matrices, perceptron, rows_of


@descent
def half_labelled(params, labelled, labels, unlabelled):
    """The loss of semi-supervised training: the rows of both batches go through the same weights."""
    known = optax.softmax_cross_entropy_with_integer_labels(perceptron(params, labelled), labels).mean()
    logits = perceptron(params, unlabelled)
    return known + jnp.mean(optax.softmax_cross_entropy(logits, jax.lax.stop_gradient(jax.nn.softmax(2 * logits))))


@descent
def retrieval(params, queries, documents):
    """Each query is compared with all documents. Each kind has weights of its own."""
    scores = perceptron(params["query"], queries) @ perceptron(params["document"], documents).T
    return optax.softmax_cross_entropy_with_integer_labels(scores, 3 * jnp.arange(len(queries))).mean()


PROGRAMS = {
    "half_labelled": (half_labelled, (matrices(16, 64, 64, 8), rows_of(16), jnp.arange(16) % 8, rows_of(56)), (1, 3)),
    "retrieval": (
        retrieval,
        ({"query": matrices(16, 64, 32), "document": matrices(16, 64, 32)}, rows_of(16), rows_of(48)),
        (1, 2),
    ),
}


def other_rows(fn, *args):
    found = analyse(trace(fn, args, {}))
    return [(found.axes.name(c), found.axes.sizes[c]) for c in found.roles.other_rows]


@pytest.mark.parametrize(("name", "sizes"), [("half_labelled", {16, 56}), ("retrieval", {16, 48})])
def test_the_other_batch_is_found(name, sizes):
    fn, args, _ = PROGRAMS[name]
    found = analyse(trace(fn, args, {}))
    batch = found.roles.batch
    assert batch is not None
    assert other_rows(fn, *args) == [("batch_1", *sizes - {found.axes.sizes[batch]})]
    roles = [found.roles.inputs[v] for v in found.axes.program.inputs]
    assert roles == ["parameter"] * len(jax.tree.leaves(args[0])) + ["data"] * (len(args) - 1)


@pytest.mark.whole
@pytest.mark.few(1)
@pytest.mark.parametrize("strategy", ["dp:8", "dp:2 fsdp:2 tp:2"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_both_batches_are_sharded_and_the_results_are_those_of_one_device(name, strategy):
    fn, args, data = PROGRAMS[name]
    step = autoshard.auto_shard(fn, plan=strategy)
    specs = step.plan(*args).in_specs
    rows = P("dp") if strategy == "dp:8" else P(("dp", "fsdp"))
    assert [specs[n] for n in data] == [rows, rows]
    assert_close(step(*args), jax.jit(fn)(*args))


def test_rows_without_a_gradient_are_found():
    @descent
    def fn(params, x, keys):
        memory = perceptron(jax.lax.stop_gradient(params), keys)
        return jnp.mean(jnp.square(jax.nn.softmax(perceptron(params, x) @ memory.T) @ memory))

    assert other_rows(fn, matrices(16, 64, 8), jnp.ones((48, 16)), jnp.ones((32, 16))) == [("batch_1", 32)]


def test_points_at_which_each_row_is_evaluated_are_not_a_batch():
    @descent
    def fn(params, x, places):
        seen = jnp.tanh((x @ params[0])[:, None] + places @ params[1])
        return jnp.mean(jnp.square(jnp.tanh(seen @ params[2])))

    assert other_rows(fn, [*matrices(16, 32), *matrices(4, 32), *matrices(32, 16)], rows_of(8), rows_of(24, 4)) == []


def test_rows_that_no_weight_multiplies_are_not_a_batch():
    @descent
    def fn(params, x, basis):
        return jnp.mean(jnp.square(perceptron(params, x) @ (basis.T @ basis)))

    assert other_rows(fn, matrices(16, 64, 8), rows_of(48), rows_of(32, 8)) == []


def test_the_axes_of_untrained_weights_are_not_batches():
    @descent
    def fn(params, frozen, x):
        low = [a @ b for a, b in zip(frozen["first"], params, strict=True)]
        return jnp.mean(jnp.square(perceptron([w + each for w, each in zip(frozen["base"], low, strict=True)], x)))

    frozen = {"base": matrices(16, 64, 32, 8), "first": [jnp.ones((n, 4)) for n in (16, 64, 32)]}
    assert other_rows(fn, [jnp.ones((4, n)) for n in (64, 32, 8)], frozen, jnp.ones((24, 16))) == []


def test_a_function_without_state_has_no_other_batch():
    """Its weights are inputs like the data, such as a table of words that is the product of two matrices."""

    def fn(table, wider, tokens):
        return jnp.tanh((table @ wider)[tokens] @ wider.T)

    assert other_rows(fn, jnp.ones((100, 8)), jnp.ones((8, 32)), jnp.ones((16, 12), int)) == []


@pytest.mark.parametrize(("rows", "size"), [(16, 10), (12, 56)])
def test_a_batch_that_the_devices_do_not_divide_is_reported(rows, size):
    """The devices divide the rows of one batch, and each of them computes all rows of the other."""
    step, (params, _, labels, _), _ = PROGRAMS["half_labelled"]
    args = params, rows_of(rows), labels[:rows], rows_of(size)
    whole = min(rows, size, key=lambda n: (n % 8 == 0, n))
    warned = rf"devices repeat the work on the rows of batch_1: batch_1 {whole} is not divisible by dp 8.* Pad batch_1"
    with pytest.warns(AutoshardWarning, match=warned):
        found = autoshard.auto_shard(step, plan="dp:8")(*args)
    assert_close(jax.jit(step)(*args), found)


def by_position(evaluate, batches):
    return jax.lax.fori_loop(0, len(batches), lambda i, total: total + evaluate(batches[i]), 0.0)


def by_scan(evaluate, batches):
    return jax.lax.scan(lambda total, x: (total + evaluate(x), None), 0.0, batches)[0]


@pytest.mark.parametrize("over", [by_position, by_scan])
def test_stacked_batches_of_an_evaluation_are_sharded(over):
    """A loop evaluates the trained weights on several batches of another size."""

    def step(params, x, held_out):
        grads = jax.grad(lambda p: jnp.mean(perceptron(p, x) ** 2))(params)
        params = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
        return params, over(lambda rows: jnp.mean(perceptron(params, rows) ** 2), held_out)

    args = matrices(16, 64, 8), rows_of(32), jnp.stack([rows_of(24)] * 2)
    assert other_rows(step, *args) == [("batch_1", 24)]
    assert not analyse(trace(step, args, {})).roles.sequence
    planned = autoshard.plan(step, *args, target="cpu:8", plan="dp:8")
    assert planned.in_specs[2] == P(None, "dp")
    assert_close(jax.jit(step)(*args), planned.jit()(*args))

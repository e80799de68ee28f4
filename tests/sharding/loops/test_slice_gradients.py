"""Gradients of one slice of a parameter are added before they are put into the gradient of the whole."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from autoshard import auto_shard, plan
from autoshard.sharding.loops.slice_gradients import with_added_slices
from autoshard.sharding.program.tracing import trace

TABLES, ROWS, FEATURES, IDS = 2, 1024, 8, 8192
ADDITIONS = ("add", "add_any")


def shape(*dims, dtype="float32"):
    return jax.ShapeDtypeStruct(dims, dtype)


STACK, KEYS = shape(TABLES, ROWS, FEATURES), shape(IDS, dtype="int32")


def lookups(tables, keys, count):
    """The loss of `count` lookups in each table, as of the corners of a hash grid."""
    found = [sum((i + 1.0) * tables[n][(keys * (7 * i + 3)) % ROWS] for i in range(count)) for n in range(TABLES)]
    return sum(jnp.mean(each**2) for each in found)


def step(count):
    def fn(tables, keys):
        loss, gradient = jax.value_and_grad(lambda t: lookups(t, keys, count))(tables)
        return tables - 0.1 * gradient, loss

    return fn


def operators(fn, *args, changes=True):
    """The names of the operators of a step, and the shapes of their results."""
    traced = trace(fn, args, {})
    changed = with_added_slices(traced)
    assert (changed is not traced) == changes
    return [(op.name, op.eqn.outvars[0].aval.shape) for op in changed.program.ops()]


def test_each_table_is_padded_once():
    found = operators(step(4), STACK, KEYS)
    assert found.count(("scatter-add", (ROWS, FEATURES))) == 4 * TABLES
    assert [name for name, dims in found if dims == STACK.shape and name in ("pad", *ADDITIONS)].count("pad") == TABLES
    assert sum(name in ADDITIONS and dims == (ROWS, FEATURES) for name, dims in found) == 3 * TABLES
    assert sum(name in ADDITIONS and dims == STACK.shape for name, dims in found) == TABLES - 1


def test_nothing_changes_with_one_use_of_each_slice():
    operators(step(1), STACK, KEYS, changes=False)


def test_products_with_one_slice_are_added_too_but_other_values_are_not():
    def fn(weights, x, scale):
        w, v = weights[0], weights[1]
        loss, gradient = jax.value_and_grad(lambda ws: jnp.mean(jnp.tanh(jnp.tanh(x @ ws[0]) @ ws[0]) @ ws[1]))(weights)
        return gradient + scale * (w @ v)[None], loss

    found = operators(fn, shape(2, 64, 64), shape(128, 64), shape())
    assert sum(name == "pad" for name, _ in found) == 2

    def doubled(weights, scale):
        """The sum of two padded values that are no gradients."""
        first, second = (lax.pad((c * weights)[None], 0.0, [(0, 1, 0), (0, 0, 0), (0, 0, 0)]) for c in (scale, 2.0))
        return first + second

    operators(doubled, shape(64, 64), shape(), changes=False)


def padded_sum(number=0.0, result_of=lambda first, second: ()):
    """A step that puts two sums of rows into the first table of an array."""

    def fn(tables, keys):
        def term(i):
            rows = jnp.zeros((ROWS, FEATURES)).at[keys].add(1.0 * i)
            return lax.pad(rows[None], number, [(0, TABLES - 1, 0), (0, 0, 0), (0, 0, 0)])

        first, second = term(1), term(2)
        return tables - (first + second), result_of(first, second)

    return fn


def test_two_sums_in_one_place_are_added_first():
    found = operators(padded_sum(), STACK, KEYS)
    assert sum(name == "pad" for name, _ in found) == 1


def test_a_padded_term_that_is_used_elsewhere_stays():
    operators(padded_sum(result_of=lambda first, _: jnp.max(first)), STACK, KEYS, changes=False)


def test_padding_with_another_number_than_zero_stays():
    operators(padded_sum(1.0), STACK, KEYS, changes=False)


def in_a_loop(tables, keys):
    """A step over two microbatches."""

    def part(total, some):
        return total + jax.grad(lambda t: lookups(t, some, 3))(tables), None

    return tables - 0.1 * lax.scan(part, jnp.zeros_like(tables), keys.reshape(2, -1))[0]


def gradient_of(loss):
    def fn(tables, keys):
        found = [sum(tables[n][(keys * (7 * i + 3)) % ROWS] for i in range(3)) for n in range(TABLES)]
        return loss(found[0] * found[1], keys)

    return lambda tables, keys: tables - 0.1 * jax.grad(fn)(tables, keys)


def of_labels(x, keys):
    """A loss with a gather that is planned as several operators: its index counts the rows."""
    return -jnp.mean(jax.nn.log_softmax(x)[jnp.arange(IDS), keys % FEATURES])


def of_sums(x, _):
    """A loss with a gradient whose padding is planned as a part of the sum after it."""
    return jnp.mean(lax.reduce_window(x, 0.0, lax.add, (2, 1), (2, 1), "VALID") ** 2)


# In the last two, the program has other operators than the jaxpr has equations.
STEPS = {
    "lookups": step(4),
    "in a loop": in_a_loop,
    "of labels": gradient_of(of_labels),
    "of sums": gradient_of(of_sums),
}


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("words", ["dp:8", "fsdp:8", "dp:2 fsdp:4", "dp:4 tp:2"])
def test_results_are_those_of_one_device(name, words):
    with jax.enable_x64(True):
        rng = np.random.default_rng(0)
        args = rng.normal(size=STACK.shape), rng.integers(0, ROWS, IDS).astype("int32")
        wanted = jax.jit(STEPS[name])(*args)
        found = auto_shard(STEPS[name], plan=words)(*args)
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-15)


def test_loops_are_changed_within():
    found = operators(in_a_loop, STACK, KEYS)
    assert sum(name == "pad" for name, _ in found) == TABLES


def test_the_carry_of_microbatches_stays_a_sum():
    """A loop whose carry is added to something in the middle of its body counts as a loop over time."""
    program = with_added_slices(trace(in_a_loop, (STACK, KEYS), {})).program
    (body,) = (op.blocks[0] for op in program.ops() if op.name == "scan")
    (last,) = (op for op in body.ops if op.results == body.outputs)
    assert last.name in ADDITIONS
    assert not {*last.operands}.isdisjoint(body.inputs)


def test_a_sum_without_gradients_of_one_slice_stays():
    def fn(tables, keys):
        pads = padded_sum(result_of=lambda first, second: (first, second))
        return *pads(tables, keys), tables + tables

    operators(fn, STACK, KEYS, changes=False)


@pytest.mark.parametrize("words", ["dp:8", "fsdp:8"])
def test_a_table_is_reduced_once_for_all_its_lookups(words):
    """The rows are many, so that it is cheaper to reduce a table than to gather rows."""

    def sent(count):
        return plan(step(count), STACK, shape(2**20, dtype="int32"), target="v5e:2x4", plan=words).estimate.comm_bytes

    assert sent(4) == pytest.approx(sent(1), rel=0.01)

"""Loops over time gather a weight once, and reduce its gradient once, if whole weights take little memory."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from autoshard import plan
from autoshard.sharding.axes.weights.loop_sums import is_loop_term
from autoshard.sharding.cost.prices.known_prices import KnownPrices
from autoshard.sharding.loops import loop_collectives
from autoshard.sharding.loops.loop_collectives import with_loop_collectives
from autoshard.sharding.program.tracing import trace
from autoshard.spmdrules.ir.program import Op

WIDTH, ROWS, STEPS = 512, 4096, 16
WEIGHT_BYTES = 4 * WIDTH * WIDTH
AMPLE = 1e12
GATHER, REDUCE = "gather_before_loop", "reduce_after_loop"


def recurrent_loss(w, x):
    """A recurrence over time, `[batch, seq, width]`, with a product before it."""
    inputs = (x @ w["in"]).swapaxes(0, 1)

    def cell(h, now):
        h = jnp.tanh(now + h @ w["cell"])
        return h, None

    return jnp.mean(lax.scan(cell, jnp.zeros_like(inputs[0]), inputs)[0] ** 2)


def step(w, x):
    loss, gradients = jax.value_and_grad(recurrent_loss)(w, x)
    return jax.tree.map(lambda p, g: p - 0.1 * g, w, gradients), loss


def accumulated(loss, w, x):
    """A step with a loop over microbatches."""

    def part(total, rows):
        gradients = jax.grad(loss)(w, rows)
        return jax.tree.map(jnp.add, total, gradients), None

    gradients, _ = lax.scan(part, jax.tree.map(jnp.zeros_like, w), x.reshape(4, -1, *x.shape[1:]))
    return jax.tree.map(lambda p, g: p - 0.1 * g, w, gradients)


def shape(*dims):
    return jax.ShapeDtypeStruct(dims, jnp.float32)


WEIGHTS, BATCH = {"in": shape(WIDTH, WIDTH), "cell": shape(WIDTH, WIDTH)}, shape(ROWS, STEPS, WIDTH)


def changed(fn, *args, memory_bytes=AMPLE) -> list[Op]:
    traced = with_loop_collectives(trace(fn, args, {}), memory_bytes)
    return [op for op in traced.program.ops() if op.name in (GATHER, REDUCE)]


def counts(ops: list[Op]) -> tuple[int, int]:
    return sum(op.name == GATHER for op in ops), sum(op.name == REDUCE for op in ops)


def test_the_forward_and_backward_loop_share_a_gathered_weight():
    assert counts(changed(step, WEIGHTS, BATCH)) == (1, 1)


def test_weights_that_take_much_memory_stay_in_shards():
    share = loop_collectives.WHOLE_WEIGHTS_SHARE
    least = 2 * WEIGHT_BYTES / share  # the weight and its gradient
    assert counts(changed(step, WEIGHTS, BATCH, memory_bytes=least)) == (1, 1)
    assert counts(changed(step, WEIGHTS, BATCH, memory_bytes=0.99 * least)) == (1, 0)
    assert counts(changed(step, WEIGHTS, BATCH, memory_bytes=0.49 * least)) == (0, 0)


def test_a_loop_over_microbatches_gathers_in_each_iteration(monkeypatch):
    def mlp_loss(w, x):
        return jnp.mean((jnp.tanh(x @ w["in"]) @ w["cell"]) ** 2)

    def own(w, x):
        return accumulated(mlp_loss, w, x)

    monkeypatch.setattr(loop_collectives, "analyse", None)  # such steps are not analysed for this
    assert not changed(own, WEIGHTS, BATCH)


@pytest.mark.parametrize(("at_zero", "reductions"), [(True, 1), (False, 0)])
def test_a_sum_that_does_not_start_at_zero_is_reduced_in_its_loop(at_zero, reductions):
    """A step that adds up products of the states that follow each other."""

    def own(w, x):
        def cell(carry, now):
            h, total = carry
            after = jnp.tanh(now + h)
            return (after, total + h.T @ after), None

        start = jnp.zeros((WIDTH, WIDTH)) if at_zero else w["cell"]
        inputs = (x @ w["in"]).swapaxes(0, 1)
        total = lax.scan(cell, (jnp.zeros_like(inputs[0]), start), inputs)[0][1]
        return w | {"cell": w["cell"] + total}

    assert counts(changed(own, WEIGHTS, BATCH))[1] == reductions


def test_a_loop_over_time_in_a_loop_over_microbatches():
    def own(w, x):
        return accumulated(recurrent_loss, w, x)

    ops = changed(own, WEIGHTS, BATCH)
    assert counts(ops) == (1, 1) and {op.trips for op in ops} == {4}


def test_a_weight_of_nested_loops_is_gathered_before_the_outer_one():
    def own(w, x):
        def loss(w):
            def outer(h, now):
                return lax.scan(lambda h, _: (jnp.tanh(h @ w["cell"]), None), h + now, length=2)[0], None

            return jnp.mean(lax.scan(outer, jnp.zeros_like(x[:, 0]), (x @ w["in"]).swapaxes(0, 1))[0] ** 2)

        return jax.tree.map(lambda p, g: p - 0.1 * g, w, jax.grad(loss)(w))

    gathers = [op for op in changed(own, WEIGHTS, BATCH) if op.name == GATHER]
    assert len(gathers) == 1 and gathers[0].trips == 1


def test_a_stack_of_which_the_loop_takes_slices_is_not_gathered():
    def own(w, x):
        def loss(w):
            layer = lambda n, h: jnp.tanh(h @ w["layers"][n])  # noqa: E731
            return jnp.mean(lax.fori_loop(0, 4, layer, x) ** 2)

        return jax.tree.map(lambda p, g: p - 0.1 * g, w, jax.grad(loss)(w))

    assert counts(changed(own, {"layers": shape(4, WIDTH, WIDTH)}, shape(ROWS, WIDTH)))[0] == 0


def test_scans_over_stacked_layers_do_not_change():
    def own(w, x):
        loss = lambda w: jnp.mean(lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, w)[0] ** 2)  # noqa: E731
        return w - 0.1 * jax.grad(loss)(w)

    traced = trace(own, (shape(4, WIDTH, WIDTH), shape(ROWS, WIDTH)), {})
    assert with_loop_collectives(traced, AMPLE) is traced


def test_pipelines_do_not_change():
    traced = replace(trace(step, (WEIGHTS, BATCH), {}), stages=2)
    assert with_loop_collectives(traced, AMPLE) is traced


def moves(words, batch=BATCH):
    made = plan(step, WEIGHTS, batch, target="v5e:2x4", plan=words)
    assert made.bound is not None
    found = made.bound.problem.cost(made.bound.layout).collectives
    return made.bound, [each for each in found if each.wire_bytes > 1e3]


@pytest.mark.parametrize("rows", [ROWS, 64], ids=["many rows", "few rows"])
@pytest.mark.parametrize("words", ["dp:8", "zero1:8", "fsdp:8", "dp:2 fsdp:4"])
def test_the_estimate_counts_collectives_once_for_each_weight(words, rows):
    _, found = moves(words, shape(rows, STEPS, WIDTH))
    assert found and {each.count for each in found} <= {1, 2}


def test_the_operators_around_loops_are_no_kernels():
    made, _ = moves("fsdp:8")
    kernels = made.problem.cost.fusion.kernels
    around = [op for op in made.problem.program.ops() if op.name in (GATHER, REDUCE)]
    assert around and kernels and not any(id(op) in kernels for op in around)


def test_prices_of_terms_are_not_those_of_products_that_are_reduced_in_the_loop():
    """A term is sharded like its operands at any price, because its reduction is not in the loop."""
    cost = moves("fsdp:8")[0].problem.cost
    term = next(each for each in cost.classes if is_loop_term(cost.roles.loop_sums, each.op))
    others = KnownPrices(cost.axes, replace(cost.roles, loop_sums={}), cost.fusion, cost.target)
    assert cost.known._number(term) not in (None, others._number(term))


@pytest.mark.parametrize("words", ["dp:8", "zero1:8", "fsdp:8"])
def test_bounds_of_the_time_count_reductions_after_the_loop(words):
    made, _ = moves(words, shape(64, STEPS, WIDTH))
    *_, least_us = made.problem.cost.least_us(made.layout)
    assert least_us <= made.problem.cost(made.layout).step_time_us


def test_the_peak_counts_the_whole_weight_and_gradient(monkeypatch):
    made, _ = moves("fsdp:8")
    monkeypatch.setattr(loop_collectives, "WHOLE_WEIGHTS_SHARE", 0.0)
    in_shards, _ = moves("fsdp:8")
    more = made.plan.estimate.peak_memory_bytes - in_shards.plan.estimate.peak_memory_bytes
    assert 0.8 * WEIGHT_BYTES < more < 2.2 * WEIGHT_BYTES


def test_the_gradient_of_a_loop_has_no_buffer_besides_its_sum():
    """The buffers are those of the weight before the loop: gathered twice, and its gradient before it is scattered."""
    with jax.default_matmul_precision("highest"):  # gathers move 32 bits
        made, _ = moves("fsdp:8")
    buffers = made.problem.cost(made.layout).live_buffers
    assert [(each.nbytes, len(each.first)) for each in buffers] == [(WEIGHT_BYTES, 1)] * 3


def test_the_gradient_is_whole_in_the_loop_and_stored_after_it():
    made, _ = moves("fsdp:8")
    executable = made.executable
    run = executable.constrained_program(executable.mesh_over(None))
    jaxpr = jax.make_jaxpr(run)(*jax.tree.leaves((WEIGHTS, BATCH))).jaxpr
    specs = {}
    backward = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "scan"][-1]
    body = backward.params["jaxpr"].jaxpr
    for eqn in (*body.eqns, *jaxpr.eqns):
        if eqn.primitive.name == "sharding_constraint":
            specs[eqn.outvars[0]] = eqn.params["sharding"].spec
    (total,) = [n for n, v in enumerate(backward.outvars) if v.aval.shape == (WIDTH, WIDTH)]
    assert not any(specs[body.outvars[total]])  # the carry: else XLA would shard it like the stored gradient
    first = next(eqn for eqn in jaxpr.eqns if backward.outvars[total] in eqn.invars)
    assert not any(specs[first.outvars[0]])
    second = next(eqn for eqn in jaxpr.eqns if first.outvars[0] in eqn.invars)
    assert any(specs[second.outvars[0]])
    assert any(v in specs and not any(specs[v]) for v in backward.invars if v.aval.shape == (WIDTH, WIDTH))

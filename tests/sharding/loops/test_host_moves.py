"""When loops move the slices of their stacks in host memory, and which slices stay on the device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autoshard import _compat
from autoshard.sharding.loops import host_moves as module
from autoshard.sharding.loops.host_moves import host_moves, kept_slices
from autoshard.sharding.machines.targets import find_target
from autoshard.sharding.planner.bound_plan import bound_or_error
from autoshard.spmdrules.ir.program import inlined
from tests.sharding.lower.tpu.scanned_layers import (
    BOTH,
    DEVICE,
    HOST,
    INPUT,
    LATE,
    LENGTH,
    ROWS,
    STACK,
    STACKS,
    WIDTH,
    layers_of_products,
    made,
    random,
    run,
    scans,
    step,
)


@pytest.fixture
def fast_link(monkeypatch):
    """Make transfers take no time. In these small layers, they would take much longer than compute."""
    monkeypatch.setattr(module, "HOST_BANDWIDTH_REACHED", 1e9)


def test_values_that_are_made_early_are_sent_in_their_iteration():
    moves = scans(made(step(BOTH), [BOTH]))[False]
    assert len(moves.sent) == 2 and not (moves.now or moves.ahead)  # the input and `early`, not `late`
    assert not scans(made(step(LATE), [LATE]))[False].sent


def test_values_that_are_used_first_are_fetched_one_iteration_ahead():
    moves = scans(made(step(INPUT), [INPUT]))[True]
    assert len(moves.ahead) == 1 and not (moves.now or moves.sent)


@pytest.mark.usefixtures("fast_link")
def test_the_second_layer_of_an_iteration_fetches_in_it():
    """The backward pass takes the second layer first."""
    moves = scans(made(step(INPUT, INPUT), [INPUT] * 2))[True]
    assert len(moves.ahead) == len(moves.now) == 1


@pytest.mark.usefixtures("fast_link")
def test_slices_are_fetched_in_the_order_of_their_use():
    """`late` is used by the last product of a layer, which the backward pass differentiates first."""
    kinds = [INPUT, (*INPUT, *LATE), INPUT]
    plan = made(step(*kinds), kinds)
    program = bound_or_error(plan.bound).executable.layout.axes.program
    (scan,) = [op for op in program.ops() if op.name == "scan" and op.eqn.params["reverse"]]
    moves, first = host_moves(program, find_target(plan.target).chip)[id(scan)], {}
    slices = scan.blocks[0].inputs[sum(_compat.scan_arity(scan.eqn.params)) :]
    for place, op in enumerate(inlined(scan.blocks[0])):
        for v in op.operands:
            first.setdefault(v, place)
    places = [first[slices[k]] for k in (*moves.ahead, *moves.now)]
    assert len(places) == 4 and places == sorted(places)


@pytest.mark.parametrize(
    ("before", "after", "count", "now"),
    [
        (lambda h, w: (h, jnp.sin(w[0])), lambda h, early: h @ early, 7, True),
        (lambda h, w: (h @ jnp.sin(w[0]), w[0]), lambda h, early: h @ early, 7, False),
        (lambda h, w: (h, w[0]), lambda h, early: jnp.sin(h + jnp.mean(early)), 7, True),
        (lambda h, w: (h + jnp.mean(w[0]), w[0]), lambda h, _: jnp.sin(jnp.cos(jnp.sin(jnp.cos(h)))), 0, False),
    ],
)
@pytest.mark.usefixtures("fast_link")
def test_a_slice_is_needed_by_the_first_product_that_takes_what_is_computed_from_it(before, after, count, now):
    """In the last two cases no product takes it in this iteration. Then the elementwise operators need it."""
    fn = layers_of_products(before, after, count)
    plan, found, expected = run(fn, [random(*STACK)], random(ROWS, WIDTH), shapes=[STACKS])
    moves = scans(plan)[False]
    assert (moves.now, moves.ahead) == (((0,), ()) if now else ((), (0,)))
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("fast_link")
def test_the_smallest_of_slices_that_are_needed_at_the_same_time_is_fetched_first():
    fn = layers_of_products(
        lambda h, w: (h, [jnp.sin(each) for each in w]),
        lambda h, early: h @ (early[0] + early[1][:, None] + early[2]),
    )
    stacks = [random(*STACK), random(*STACK[:2]), random(LENGTH, 1, 1)]
    plan, found, expected = run(fn, stacks, random(ROWS, WIDTH), shapes=stacks)
    assert scans(plan)[False].now == (2, 1, 0)
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("share", "now"), [(0.9, 1), (1.1, 0), (1.9, 0), (2.1, 1)])
def test_a_slice_that_compute_before_it_does_not_hide_is_fetched_one_iteration_ahead(share, now, monkeypatch):
    """The fetch takes a share of the compute before its use. That is half of the compute of an iteration.

    If all compute of an iteration is too short, the device waits for the link anyway.
    """
    fn, kinds = step(INPUT, ()), [INPUT, ()]
    plan = made(fn, kinds)
    chip = find_target(plan.target).chip
    compute_s = 24 * 2 * ROWS * WIDTH**2 / (chip.flops * chip.efficiency)  # of the second layer: its 24 products
    fetch_s = ROWS * WIDTH * 4 / chip.host_bandwidth
    monkeypatch.setattr(module, "HOST_BANDWIDTH_REACHED", fetch_s / (share * compute_s))
    program = bound_or_error(made(fn, kinds).bound).executable.layout.axes.program
    (moves,) = [found for found in host_moves(program, chip).values() if found.now or found.ahead]
    assert (len(moves.now), len(moves.ahead)) == (now, 1 - now)


def test_slices_that_are_fetched_ahead_are_kept():
    moves = scans(made(step(BOTH), [BOTH]))
    assert len(moves[False].kept) == 3 and sorted(moves[True].ready) == sorted(moves[True].ahead)
    assert not moves[False].ready and not moves[True].kept
    plan = made(step(BOTH), [BOTH])
    program = bound_or_error(plan.bound).executable.layout.axes.program
    forward, backward = (op for op in program.ops() if op.name == "scan")
    kept = kept_slices(program, host_moves(program, find_target(plan.target).chip))
    assert {*kept} < {*backward.blocks[0].inputs} and {each.maker for each in kept.values()} == {forward}
    assert {each.sent for each in kept.values()} < {*forward.blocks[0].outputs}


@pytest.mark.usefixtures("fast_link")
def test_slices_that_are_fetched_now_are_not_kept():
    moves = scans(made(step(INPUT, INPUT), [INPUT] * 2))
    assert len(moves[False].kept) == len(moves[True].ahead) == 1 and moves[True].ready == moves[True].ahead


def loops_of(use):
    """A loop that stacks the outputs of its layers in host memory, and what `use` makes of the stack and the output."""

    def fn(weights, x):
        def layer(h, w):
            h = jnp.tanh(h @ jax.device_put(w, DEVICE))
            return h, jax.device_put(h, HOST)

        return use(*jax.lax.scan(layer, x, weights))

    return fn


def taken(h, stack, **how):
    return jax.lax.scan(lambda h, s: (h @ (h.T @ jax.device_put(s, DEVICE)), None), h, stack, **how)[0]


def added(h, stack):
    return taken(h, stack, reverse=True) + taken(h, stack, reverse=True)


@pytest.mark.parametrize(
    ("use", "count"),
    [
        (lambda h, stack: taken(h, stack, reverse=True), 1),
        (lambda h, stack: taken(h, stack), 0),  # it takes the first slice first
        (added, 0),  # two loops take it
        (lambda h, stack: (taken(h, stack, reverse=True), jax.device_put(stack, DEVICE)), 0),  # it is a result, too
    ],
)
def test_only_a_loop_in_the_other_direction_that_alone_takes_a_stack_has_its_first_slice(use, count):
    plan, found, expected = run(loops_of(use), random(*STACK), random(ROWS, WIDTH))
    program = bound_or_error(plan.bound).executable.layout.axes.program
    moves = host_moves(program, find_target(plan.target).chip).values()
    assert sum(len(each.kept) for each in moves) == sum(len(each.ready) for each in moves) == count
    for result, want in zip(found, expected, strict=True):
        np.testing.assert_allclose(result, want, rtol=1e-5, atol=1e-6)

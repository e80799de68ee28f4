"""When loops move the slices of their stacks in host memory."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

import autoshard
from autoshard import _compat
from autoshard.sharding.loops.host_moves import host_moves
from autoshard.sharding.planner.bound_plan import bound_or_error
from autoshard.spmdrules.ir.program import inlined
from tests.sharding.lower.tpu.loops import loops

LENGTH, ROWS, WIDTH = 3, 16, 32
X = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)
HOST, DEVICE = jax.memory.Space.Host, jax.memory.Space.Device
BOTH, EARLY, LATE, INPUT = ("input", "early", "late"), ("early",), ("late",), ("input",)


def policy(host):
    return jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=host,
        offload_src="device",
        offload_dst="pinned_host",
    )


def layer(h, w):
    """A layer of 8 products. `early` is made by the first one, `late` by the last but one."""
    h = checkpoint_name(h, "input")
    x = checkpoint_name(jnp.tanh(h @ w), "early")
    for _ in range(5):
        x = jnp.sin(x @ w)
    return h + checkpoint_name(jnp.tanh(x @ w), "late") @ w


def step(*kinds, reverse=False):
    """A step of a scan whose iterations have one layer for each of `kinds`: the names that it offloads."""

    def block(h, ws):
        for k, host in enumerate(kinds):
            h = jax.checkpoint(layer, policy=policy(host))(h, ws[k])
        return h, h.sum()

    def loss(weights, x):
        h, sums = jax.lax.scan(block, x, weights, reverse=reverse)
        return (h**2).mean() + 1e-3 * sums.sum()

    def run(weights, x):
        value, gradient = jax.value_and_grad(loss)(weights, x)
        return weights - 0.1 * gradient, value

    return run


def weights_of(kinds, length=LENGTH):
    return jax.ShapeDtypeStruct((length, len(kinds), WIDTH, WIDTH), jnp.float32)


def made(fn, kinds, words="fsdp:8", target="v5e:2x4", length=LENGTH, **how):
    return autoshard.plan(fn, weights_of(kinds, length), X, plan=words, target=target, **how)


def mesh_of(plan):
    return jax.make_mesh(plan.mesh.axis_sizes, plan.mesh.axis_names, axis_types=plan.mesh.axis_types)


def scans(plan):
    """Whether a scan is reversed -> what it moves."""
    program = bound_or_error(plan.bound).executable.layout.axes.program
    found = [op for op in program.ops() if op.name == "scan"]
    return {op.eqn.params["reverse"]: host_moves(op, program.avals) for op in found}


def count(jaxpr, name):
    """How many equations of a name a jaxpr and all jaxprs in it have."""
    found = 0
    for eqn in jaxpr.eqns:
        found += eqn.primitive.name == name
        for value in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda v: hasattr(v, "eqns")):
            inner = getattr(value, "jaxpr", value)
            found += count(inner, name) if hasattr(inner, "eqns") else 0
    return found


def lowered(plan, length=LENGTH, kinds=(BOTH,)):
    program = bound_or_error(plan.bound).executable.constrained_program(plan.mesh)
    return jax.make_jaxpr(program)(weights_of(kinds, length), X).jaxpr


def test_values_that_are_made_early_are_sent_in_their_iteration():
    moves = scans(made(step(BOTH), [BOTH]))[False]
    assert len(moves.sent) == 2 and not (moves.now or moves.ahead)  # the input and `early`, not `late`
    assert not scans(made(step(LATE), [LATE]))[False].sent


def test_values_that_are_used_first_are_fetched_one_iteration_ahead():
    moves = scans(made(step(INPUT), [INPUT]))[True]
    assert len(moves.ahead) == 1 and not (moves.now or moves.sent)


def test_the_second_layer_of_an_iteration_fetches_in_it():
    """The backward pass takes the second layer first."""
    moves = scans(made(step(INPUT, INPUT), [INPUT] * 2))[True]
    assert len(moves.ahead) == len(moves.now) == 1


def test_slices_are_fetched_in_the_order_of_their_use():
    """`late` is used by the last product of a layer, which the backward pass differentiates first."""
    kinds = [INPUT, (*INPUT, *LATE), INPUT]
    plan = made(step(*kinds), kinds)
    program = bound_or_error(plan.bound).executable.layout.axes.program
    (scan,) = [op for op in program.ops() if op.name == "scan" and op.eqn.params["reverse"]]
    moves, first = host_moves(scan, program.avals), {}
    slices = scan.blocks[0].inputs[sum(_compat.scan_arity(scan.eqn.params)) :]
    for place, op in enumerate(inlined(scan.blocks[0])):
        for v in op.operands:
            first.setdefault(v, place)
    places = [first[slices[k]] for k in (*moves.ahead, *moves.now)]
    assert len(places) == 4 and places == sorted(places)


@pytest.mark.parametrize(
    ("kinds", "target", "length"),
    [([()], "v5e:2x4", LENGTH), ([BOTH], "h100:1x8", LENGTH), ([BOTH], "v5e:2x4", 1)],
)
def test_other_loops_stay_as_they_are(kinds, target, length):
    """Without a stack in host memory, on GPUs, and with one iteration, which is not compiled as a loop."""
    plan = made(step(*kinds), kinds, target=target, length=length)
    jaxpr = lowered(plan, length, kinds)
    found = [*loops(jaxpr)]
    assert found and not any(count(eqn.params["jaxpr"].jaxpr, "dynamic_update_slice") for eqn in found)
    assert not any(count(eqn.params["jaxpr"].jaxpr, "dynamic_slice") for eqn in found)


def test_the_program_says_when_slices_move():
    jaxpr = lowered(made(step(BOTH), [BOTH]))
    forward, backward = (eqn.params["jaxpr"].jaxpr for eqn in loops(jaxpr))
    assert count(forward, "dynamic_update_slice") == 2 and count(forward, "dynamic_slice") == 0
    assert count(backward, "dynamic_slice") == 3 and count(backward, "dynamic_update_slice") == 0
    assert count(backward, "optimization_barrier") == 4  # one for the carry, and one for each fetch
    assert count(backward, "select_n") == 3  # each copies a slice into the buffer of the carry


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("words", ["fsdp:8", "dp:2 fsdp:2 tp:2"])
@pytest.mark.parametrize("kinds", [[BOTH], [INPUT, BOTH], [EARLY, LATE, INPUT]])
def test_values_stay_the_same(kinds, words, reverse):
    fn = step(*kinds, reverse=reverse)
    plan = made(fn, kinds, words)
    program = bound_or_error(plan.bound).executable.constrained_program(plan.mesh)
    keys = jax.random.split(jax.random.key(0))
    shapes = (weights_of(kinds), X)
    args = [jax.random.normal(key, each.shape) / 8 for key, each in zip(keys, shapes, strict=True)]
    assert count(jax.make_jaxpr(program)(*args).jaxpr, "optimization_barrier") > 2
    with jax.set_mesh(mesh_of(plan)):
        results = jax.jit(program)(*args)
    for result, expected in zip(results, jax.tree.leaves(jax.jit(fn)(*args)), strict=True):
        np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-6)


def test_loops_that_gather_early_move_their_slices_too():
    width, rows = 2048, 512

    def fn(weights, x):
        def block(h, w):
            h = checkpoint_name(h, "input")
            return h + jnp.tanh(h @ w["up"]) @ w["down"], None

        def loss(weights):
            return (jax.lax.scan(jax.checkpoint(block, policy=policy(INPUT)), x, weights)[0] ** 2).mean()

        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(loss)(weights))

    sizes = {"up": (width, 2 * width), "down": (2 * width, width)}
    weights = {name: jax.ShapeDtypeStruct((4, *size), jnp.float32) for name, size in sizes.items()}
    x = jax.ShapeDtypeStruct((rows, width), jnp.float32)
    plan = autoshard.plan(fn, weights, x, plan="fsdp:8", target="v5e:2x4", gather="prefetch")
    program = bound_or_error(plan.bound).executable.constrained_program(plan.mesh)
    jaxpr = jax.make_jaxpr(program)(*jax.tree.leaves((weights, x))).jaxpr
    forward, backward = (eqn.params["jaxpr"].jaxpr for eqn in loops(jaxpr))
    assert count(forward, "dynamic_update_slice") == 1 and count(forward, "optimization_barrier")
    assert count(backward, "optimization_barrier")


def test_a_loop_without_a_carried_array_stays_as_it_is():
    """The moments of stacked parameters move in a loop over layers without a carry."""

    def fn(moments, x):
        host = jax.device_put(moments, HOST)

        def body(carry, m):
            return carry, jax.device_put(jax.device_put(m, DEVICE) * 2, HOST)

        return jax.device_put(jax.lax.scan(body, None, host)[1], DEVICE) + x

    shape = jax.ShapeDtypeStruct((LENGTH, ROWS, WIDTH), jnp.float32)
    plan = autoshard.plan(fn, shape, shape, plan="dp:8", target="v5e:2x4")
    program = bound_or_error(plan.bound).executable.constrained_program(plan.mesh)
    assert not count(jax.make_jaxpr(program)(shape, shape).jaxpr, "optimization_barrier")


def loss_from_host(weights, x):
    """A loss of three layers with weights in host memory. It also reads the outputs of all layers from there."""

    def layer(h, w):
        h = jnp.tanh(h @ jax.device_put(w, DEVICE))
        return h, jax.device_put(h, HOST)

    h, stack = jax.lax.scan(layer, x, weights)
    return (h**2).mean() + jax.lax.scan(lambda total, h: (total + jax.device_put(h, DEVICE), None), h, stack)[0].sum()


def on_host(mesh):
    return jax.NamedSharding(mesh, jax.P(), memory_kind="pinned_host")


STACK = (LENGTH, WIDTH, WIDTH)
STACKS = jax.ShapeDtypeStruct(STACK, jnp.float32)


def run(fn, weights, x, transformed=lambda program: program, shapes: Any = STACKS):
    """The results of a function planned for TPUs, and those of the function itself, both after a transformation."""
    place = on_host(jax.make_mesh((8,), ("fsdp",)))
    shapes = jax.tree.map(lambda each: jax.ShapeDtypeStruct(each.shape, each.dtype, sharding=place), shapes)
    plan = autoshard.plan(fn, shapes, X, plan="fsdp:8", target="v5e:2x4")
    program = bound_or_error(plan.bound).executable.constrained_program(plan.mesh)
    mesh = mesh_of(plan)
    with jax.set_mesh(mesh):
        found = jax.jit(transformed(program))(*jax.tree.leaves(jax.device_put(weights, on_host(mesh))), x)
    return plan, jax.tree.leaves(found), jax.tree.leaves(jax.jit(transformed(fn))(jax.device_put(weights, HOST), x))


def random(*shape):
    return jax.random.normal(jax.random.key(len(shape)), shape) / 8


def first(program):
    """The first result of a function that returns one array, or a list of arrays."""
    return lambda *args: jax.tree.leaves(program(*args))[0]


def test_a_slice_that_the_next_iteration_takes_in_host_memory_stays_there():
    def fn(weights, x):
        def body(carry, w):
            h, before = carry
            return (jnp.tanh(h @ jax.device_put(w, DEVICE) + h @ jax.device_put(before, DEVICE)), w), None

        zeros = jax.device_put(jnp.zeros(STACK[1:]), HOST)
        h, last = jax.lax.scan(body, (x, zeros), weights)[0]
        return h, jax.device_put(last, DEVICE)

    plan, found, expected = run(fn, random(*STACK), random(ROWS, WIDTH))
    assert not scans(plan)[False].now and not scans(plan)[False].ahead
    for result, want in zip(found, expected, strict=True):
        np.testing.assert_allclose(result, want, rtol=1e-5, atol=1e-6)


def layers_of_products(before, after, count=7):
    """A loop over layers of `count` products. `before` takes the slices at its start, `after` takes its result."""

    def fn(stacks, x):
        def body(h, slices):
            h, early = before(h, [jax.device_put(each, DEVICE) for each in slices])
            for _ in range(count):
                h = jnp.sin(h @ jnp.full((WIDTH, WIDTH), 1 / WIDTH))
            return after(h, early), None

        return jax.lax.scan(body, x, stacks)[0]

    return fn


@pytest.mark.parametrize(
    ("before", "after", "count", "now"),
    [
        (lambda h, w: (h, jnp.sin(w[0])), lambda h, early: h @ early, 7, True),
        (lambda h, w: (h @ jnp.sin(w[0]), w[0]), lambda h, early: h @ early, 7, False),
        (lambda h, w: (h, w[0]), lambda h, early: jnp.sin(h + jnp.mean(early)), 7, True),
        (lambda h, w: (h + jnp.mean(w[0]), w[0]), lambda h, _: jnp.sin(jnp.cos(jnp.sin(jnp.cos(h)))), 0, False),
    ],
)
def test_a_slice_is_needed_by_the_first_product_that_takes_what_is_computed_from_it(before, after, count, now):
    """In the last two cases no product takes it in this iteration. Then the elementwise operators need it."""
    fn = layers_of_products(before, after, count)
    plan, found, expected = run(fn, [random(*STACK)], random(ROWS, WIDTH), shapes=[STACKS])
    moves = scans(plan)[False]
    assert (moves.now, moves.ahead) == (((0,), ()) if now else ((), (0,)))
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-5, atol=1e-6)


def test_the_smallest_of_slices_that_are_needed_at_the_same_time_is_fetched_first():
    fn = layers_of_products(
        lambda h, w: (h, [jnp.sin(each) for each in w]),
        lambda h, early: h @ (early[0] + early[1][:, None] + early[2]),
    )
    stacks = [random(*STACK), random(*STACK[:2]), random(LENGTH, 1, 1)]
    plan, found, expected = run(fn, stacks, random(ROWS, WIDTH), shapes=stacks)
    assert scans(plan)[False].now == (2, 1, 0)
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-5, atol=1e-6)


def test_loops_are_differentiated_like_a_plain_scan():
    def fn(weights, x):
        def body(h, w):
            return jnp.tanh(h @ jax.device_put(w, DEVICE)), None

        return (jax.lax.scan(body, x, weights)[0] ** 2).mean()

    arguments = random(*STACK), random(ROWS, WIDTH)
    plan, found, expected = run(fn, *arguments, lambda program: jax.grad(jax.jit(first(program))))
    assert scans(plan)[False].ahead
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("axes", [(0, 0), (None, 0)])
def test_loops_are_mapped_like_a_plain_scan(axes):
    sizes = [(2,) if axis == 0 else () for axis in axes]
    weights, x = random(*sizes[0], *STACK), random(*sizes[1], ROWS, WIDTH)
    plan, found, expected = run(loss_from_host, weights, x, lambda program: jax.vmap(jax.jit(first(program)), axes))
    assert scans(plan)[False].now or scans(plan)[False].ahead
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-5, atol=1e-6)

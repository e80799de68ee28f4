"""How programs say when their loops move the slices of stacks in host memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

import autoshard
from autoshard.sharding.loops import host_moves
from autoshard.sharding.planner.bound_plan import bound_or_error
from tests.sharding.lower.tpu.loops import loops
from tests.sharding.lower.tpu.scanned_layers import (
    BOTH,
    DEVICE,
    EARLY,
    HOST,
    INPUT,
    LATE,
    LENGTH,
    ROWS,
    STACK,
    WIDTH,
    X,
    made,
    mesh_of,
    on_host,
    policy,
    random,
    run,
    scans,
    step,
    weights_of,
)


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
    loop, last = loops(jaxpr)
    forward, backward = loop.params["jaxpr"].jaxpr, last.params["jaxpr"].jaxpr
    assert count(backward, "dynamic_slice") == 3 and count(backward, "dynamic_update_slice") == 0
    assert count(backward, "optimization_barrier") == 4  # one for the carry, and one for each fetch
    assert count(backward, "select_n") == 3  # each copies a slice into the buffer of the carry
    assert count(forward, "optimization_barrier") == 1  # the carry waits for the two results that are sent now


def test_the_last_layer_of_the_forward_loop_runs_after_it_and_moves_nothing():
    jaxpr = lowered(made(step(BOTH), [BOTH]))
    forward, backward = loops(jaxpr)
    assert (forward.params["length"], backward.params["length"]) == (LENGTH - 1, LENGTH)
    moves = {
        name: [count(body, name) for body in (forward.params["jaxpr"].jaxpr, backward.params["jaxpr"].jaxpr, jaxpr)]
        for name in ("dynamic_slice", "dynamic_update_slice")
    }
    assert moves["dynamic_slice"] == [1, 3, 1 + 3 + 1]  # weights; slices on the host; in all, with the last layer's
    assert moves["dynamic_update_slice"] == [5, 0, 5 + 2]  # two of the stacks are in device memory


@pytest.mark.parametrize(("reverse", "length"), [(False, 2), (False, 4), (True, 2), (True, 3)])
@pytest.mark.parametrize("words", ["fsdp:8", "dp:2 fsdp:2 tp:2"])
@pytest.mark.parametrize("kinds", [[BOTH], [INPUT, BOTH], [EARLY, LATE, INPUT]])
def test_values_stay_the_same(kinds, words, reverse, length, monkeypatch):
    if length % 2:  # transfers take no time, so late slices are fetched now
        monkeypatch.setattr(host_moves, "HOST_BANDWIDTH_REACHED", 1e9)
    fn = step(*kinds, reverse=reverse)
    check_values(made(fn, kinds, words, length=length), fn, (weights_of(kinds, length), X))


def check_values(plan, fn, shapes):
    """Check the results of a planned function, on whole arrays of random numbers with these shapes."""
    program = bound_or_error(plan.bound).executable.constrained_program(plan.mesh)
    keys = jax.random.split(jax.random.key(0), len(shapes))
    args = [jax.random.normal(key, each.shape) / 8 for key, each in zip(keys, shapes, strict=True)]
    assert count(jax.make_jaxpr(program)(*args).jaxpr, "optimization_barrier") > 2
    with jax.set_mesh(mesh_of(plan)):
        results = jax.jit(program)(*args)
    for result, expected in zip(results, jax.tree.leaves(jax.jit(fn)(*args)), strict=True):
        np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("reverse", [False, True])
def test_other_stacks_of_a_loop_whose_last_layer_runs_after_it(reverse):
    """The loop slices and stacks random keys and numbers itself, is unrolled, and calls the host."""

    def fn(weights, x):
        def block(h, slices):
            w, key = slices
            jax.debug.callback(lambda value: None, h.sum())
            h = checkpoint_name(h, "input") * jax.random.bernoulli(key, 0.9, h.shape)
            return h + jnp.tanh(h @ w[0]) @ w[0].T, (jax.random.split(key)[0], h.sum())

        def loss(weights, x):
            block_of = jax.checkpoint(block, policy=policy(INPUT))
            keys = jax.random.split(jax.random.key(7), 5)
            h, (keys, sums) = jax.lax.scan(block_of, x, (weights, keys), reverse=reverse, unroll=2)
            return (h**2).mean() + 1e-3 * sums.sum(), jax.random.key_data(keys).astype(jnp.float32)

        (value, keys), gradient = jax.value_and_grad(loss, has_aux=True)(weights, x)
        return weights - 0.1 * gradient, value, keys

    plan = made(fn, [INPUT], length=5)
    assert scans(plan)[reverse].kept and scans(plan)[not reverse].ready
    check_values(plan, fn, (weights_of([INPUT], 5), X))


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


def from_last(weights, x, y):
    """A loop that takes what another one stacks in host memory, from its last slice on, and adds it to `y`."""

    def layer(h, w):
        h = jnp.tanh(h @ jax.device_put(w, DEVICE))
        return h, jax.device_put(h, HOST)

    stack = jax.lax.scan(layer, x, weights)[1]
    add = lambda total, h: (jnp.tanh(total + jax.device_put(h, DEVICE)), None)  # noqa: E731
    return (jax.lax.scan(add, y, stack, reverse=True)[0] ** 2).mean()


@pytest.mark.parametrize("transformed", [jax.grad, jax.vmap])
def test_a_loop_that_alone_is_transformed_has_the_first_slice_too(transformed):
    """The loop before it does not depend on `y`, and has not sent this slice."""
    weights, x, y = random(*STACK), random(ROWS, WIDTH), random(*((2,) if transformed is jax.vmap else ()), ROWS, WIDTH)
    mesh = jax.make_mesh((8,), ("fsdp",))
    shapes = jax.ShapeDtypeStruct(STACK, jnp.float32, sharding=on_host(mesh)), X, X
    plan = autoshard.plan(from_last, *shapes, plan="fsdp:8", target="v5e:2x4")
    assert scans(plan)[False].kept and scans(plan)[True].ready
    program = first(bound_or_error(plan.bound).executable.constrained_program(plan.mesh))

    def value(fn):
        return jax.jit(lambda w, x, y: transformed(lambda y: fn(w, x, y))(y))

    with jax.set_mesh(mesh_of(plan)):
        found = value(program)(jax.device_put(weights, on_host(mesh_of(plan))), x, y)
    expected = value(from_last)(jax.device_put(weights, HOST), x, y)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)

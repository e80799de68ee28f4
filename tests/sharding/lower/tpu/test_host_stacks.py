"""When loops move the slices of their stacks in host memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

import autoshard
from autoshard import _compat
from autoshard.sharding.lower.tpu.host_stacks import host_stacks
from autoshard.sharding.planner.bound_plan import bound_or_error
from autoshard.spmdrules.ir.program import inlined

LENGTH, ROWS, WIDTH = 3, 16, 32
X = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)
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


def scans(plan):
    """Whether a scan is reversed -> what it moves."""
    program = bound_or_error(plan.bound).executable.layout.axes.program
    found = [op for op in program.ops() if op.name == "scan"]
    return {op.eqn.params["reverse"]: host_stacks(op, program.avals) for op in found}


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
    moves, first = host_stacks(scan, program.avals), {}
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
    loops = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "scan"]
    assert loops and not any(count(eqn.params["jaxpr"].jaxpr, "dynamic_update_slice") for eqn in loops)
    assert not any(count(eqn.params["jaxpr"].jaxpr, "dynamic_slice") for eqn in loops)


def test_the_program_says_when_slices_move():
    jaxpr = lowered(made(step(BOTH), [BOTH]))
    forward, backward = (eqn.params["jaxpr"].jaxpr for eqn in jaxpr.eqns if eqn.primitive.name == "scan")
    assert count(forward, "dynamic_update_slice") == 2 and count(forward, "dynamic_slice") == 0
    assert count(backward, "dynamic_slice") == 3 and count(backward, "dynamic_update_slice") == 0
    assert count(backward, "optimization_barrier") == 4  # one for the carry, and one for each fetch


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
    mesh = jax.make_mesh(plan.mesh.axis_sizes, plan.mesh.axis_names, axis_types=plan.mesh.axis_types)
    assert count(jax.make_jaxpr(program)(*args).jaxpr, "optimization_barrier") > 2
    with jax.set_mesh(mesh):
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
    forward, backward = (eqn.params["jaxpr"].jaxpr for eqn in jaxpr.eqns if eqn.primitive.name == "scan")
    assert count(forward, "dynamic_update_slice") == 1 and count(forward, "optimization_barrier")
    assert count(backward, "optimization_barrier")


def test_a_loop_without_a_carried_array_stays_as_it_is():
    """The moments of stacked parameters move in a loop over layers without a carry."""

    def fn(moments, x):
        host = jax.device_put(moments, jax.memory.Space.Host)

        def body(carry, m):
            return carry, jax.device_put(jax.device_put(m, jax.memory.Space.Device) * 2, jax.memory.Space.Host)

        return jax.device_put(jax.lax.scan(body, None, host)[1], jax.memory.Space.Device) + x

    shape = jax.ShapeDtypeStruct((LENGTH, ROWS, WIDTH), jnp.float32)
    plan = autoshard.plan(fn, shape, shape, plan="dp:8", target="v5e:2x4")
    program = bound_or_error(plan.bound).executable.constrained_program(plan.mesh)
    assert not count(jax.make_jaxpr(program)(shape, shape).jaxpr, "optimization_barrier")

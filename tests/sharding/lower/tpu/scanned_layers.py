"""Steps of scanned layers with stacks in host memory, and their plans for TPUs."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

import autoshard
from autoshard.sharding.loops.host_moves import HostMoves, host_moves
from autoshard.sharding.machines.targets import find_target
from autoshard.sharding.planner.bound_plan import bound_or_error

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
    moves = host_moves(program, find_target(plan.target).chip)
    found = [op for op in program.ops() if op.name == "scan"]
    return {op.eqn.params["reverse"]: moves.get(id(op), HostMoves()) for op in found}


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

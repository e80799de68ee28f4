"""On tpu7x, the backward loop waits for the gradient of the model's head."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autoshard
from autoshard import _compat
from autoshard.sharding.planner.bound_plan import bound_or_error

LAYERS, WIDTH, CLASSES, ROWS = 3, 256, 1024, 512
TPU7X = "tpu7x:2x2x1"


def loss(params, rows, labels):
    layer = jax.checkpoint(lambda x, w: (jnp.tanh(x @ w), None))
    logits = params["head"](jax.lax.scan(layer, rows, params["layers"])[0], params["weight"])
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], axis=1))


def train_step(head, microbatches=1):
    def gradients(params, rows, labels):
        return jax.grad(lambda p: loss({**p, "head": head}, rows, labels))(params)

    def step(params, rows, labels):
        if microbatches == 1:
            total = gradients(params, rows, labels)
        else:
            batches = [x.reshape(microbatches, -1, *x.shape[1:]) for x in (rows, labels)]
            zeros = jax.tree.map(jnp.zeros_like, params)
            add = lambda total, batch: (jax.tree.map(jnp.add, total, gradients(params, *batch)), None)  # noqa: E731
            total, _ = jax.lax.scan(add, zeros, batches)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, total)

    return step


def plain(x, w):
    return x @ w


HEADS = {"plain": plain, "in a jitted function": jax.jit(plain), "rematerialized": jax.checkpoint(plain)}


def values():
    random = np.random.default_rng(0)
    params = {
        "layers": random.normal(size=(LAYERS, WIDTH, WIDTH)).astype("float32") / WIDTH**0.5,
        "weight": random.normal(size=(WIDTH, CLASSES)).astype("float32") / WIDTH**0.5,
    }
    return params, random.normal(size=(ROWS, WIDTH)).astype("float32"), np.arange(ROWS) % CLASSES


def planned(step, target, words="fsdp:8"):
    made = autoshard.plan(step, *values(), plan=words, target=target)
    return made, bound_or_error(made.bound).executable.constrained_program(made.mesh)


def loops_that_wait(jaxpr):
    """The loops that carry results of a barrier, with the shapes of the barrier's other results."""
    found = []
    maker = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "scan":
            start, count = _compat.scan_arity(eqn.params)
            carry = [v for v in eqn.invars[start : start + count] if v in maker]
            barriers = {id(b): b for v in carry if (b := maker[v]).primitive.name == "optimization_barrier"}
            found += [{v.aval.shape for v in b.outvars} for b in barriers.values()]
            found += loops_that_wait(eqn.params["jaxpr"].jaxpr)
    return found


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("microbatches", [1, 2])
def test_the_backward_loop_waits_for_the_gradient_of_the_head(head, microbatches):
    _, program = planned(train_step(HEADS[head], microbatches), TPU7X)
    (shapes,) = loops_that_wait(jax.make_jaxpr(program)(*jax.tree.leaves(values())).jaxpr)
    rows = ROWS // microbatches
    assert shapes in ({(WIDTH, CLASSES), (rows, WIDTH)}, {(CLASSES, WIDTH), (rows, WIDTH)})


@pytest.mark.parametrize("target", ["v6e:2x4", "v5p:2x2x2", "h100:1x8"])
def test_other_compilers_need_no_such_barrier(target):
    _, program = planned(train_step(plain), target)
    assert not loops_that_wait(jax.make_jaxpr(program)(*jax.tree.leaves(values())).jaxpr)


def test_reductions_on_the_sparse_cores_need_no_such_barrier():
    option = {"xla_tpu_enable_sparse_core_collective_offload_reduce_scatter": "true"}
    step = train_step(plain)
    made = autoshard.plan(step, *values(), plan="fsdp:8", target=TPU7X, compiler_options=option)
    program = bound_or_error(made.bound).executable.constrained_program(made.mesh)
    assert not loops_that_wait(jax.make_jaxpr(program)(*jax.tree.leaves(values())).jaxpr)


@pytest.mark.parametrize("head", HEADS)
def test_values_stay_the_same(head):
    step = train_step(HEADS[head])
    made, program = planned(step, TPU7X)
    mesh = jax.make_mesh(made.mesh.axis_sizes, made.mesh.axis_names, axis_types=made.mesh.axis_types)
    with jax.set_mesh(mesh):
        results = jax.jit(program)(*jax.tree.leaves(values()))
    for result, expected in zip(results, jax.tree.leaves(jax.jit(step)(*values())), strict=True):
        np.testing.assert_allclose(result, expected, rtol=2e-4, atol=1e-5)


def test_random_keys_in_the_carry_do_not_wait():
    """Here the loop is that of another pass, after the gradient."""

    def step(params, rows, keys):
        gradient = jax.grad(lambda w: jnp.mean(jax.nn.logsumexp(rows @ w, axis=1)))(params["weight"])

        def body(carry, w):
            x, keys = carry
            return (jnp.tanh(x @ w), jax.vmap(jax.random.fold_in, (0, None))(keys, 1)), None

        passed, keys = jax.lax.scan(body, (rows, keys), params["layers"])[0]
        return params["weight"] - gradient, jnp.mean(passed), keys

    params, rows, _ = values()
    args = params, rows, jax.random.split(jax.random.key(0), 2)
    made = autoshard.plan(step, *args, plan="fsdp:8", target=TPU7X)
    program = bound_or_error(made.bound).executable.constrained_program(made.mesh)
    (shapes,) = loops_that_wait(jax.make_jaxpr(program)(*jax.tree.leaves(args)).jaxpr)
    assert (2,) not in shapes and (ROWS, WIDTH) in shapes

"""The order of dimensions of values that wait on the device beside values on the host."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

import autoshard
from autoshard.sharding.planner.bound_plan import bound_or_error
from tests.sharding.lower.tpu.loops import loops

LAYERS, ROWS, WIDTH, HIDDEN = 3, 16, 32, 64
WEIGHTS = jax.ShapeDtypeStruct((LAYERS, WIDTH, HIDDEN), jnp.float32)
X = jax.ShapeDtypeStruct((ROWS, 8, WIDTH), jnp.float32)


def policy(host, kept):
    return jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=kept,
        names_which_can_be_offloaded=host,
        offload_src="device",
        offload_dst="pinned_host",
    )


def mlp(h, w):
    h = checkpoint_name(h, "input")
    return h + jnp.tanh(checkpoint_name(h @ w, "hidden")) @ w.T, None


def attention(h, w):
    h, w = checkpoint_name(h, "input"), w.reshape(WIDTH, 8, HIDDEN // 8)
    q = checkpoint_name(jnp.einsum("bsw,whd->bshd", h, w), "heads")
    scores = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, q))
    out = jnp.einsum("bhqk,bkhd->bqhd", scores, q)
    return h + jnp.einsum("bqhd,whd->bqw", out, w), None


def step(host, kept, layer=mlp):
    def loss(weights, x):
        layers = jax.checkpoint(layer, policy=policy(host, kept))
        return (jax.lax.scan(layers, x, weights)[0] ** 2).mean()

    def run(weights, x):
        value, gradient = jax.value_and_grad(loss)(weights, x)
        return weights - 0.1 * gradient, value

    return run


def lowered(fn, target="v5e:2x4", words="dp:2 fsdp:4", args=(WEIGHTS, X), **how):
    made = autoshard.plan(fn, *args, plan=words, target=target, **how)
    return bound_or_error(made.bound).executable.constrained_program(made.mesh)


def ordered(jaxpr):
    """The shapes of shards whose order of dimensions is given, in a jaxpr and all jaxprs in it."""
    found = [eqn.invars[0].aval.shape for eqn in jaxpr.eqns if eqn.primitive.name == "layout_constraint"]
    for eqn in jaxpr.eqns:
        for value in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda v: hasattr(v, "eqns")):
            inner = getattr(value, "jaxpr", value)
            found += ordered(inner) if hasattr(inner, "eqns") else []
    return found


@pytest.mark.parametrize(
    ("host", "kept", "target", "shapes"),
    [
        (["input"], ["hidden"], "v5e:2x4", [(ROWS // 8, 8, HIDDEN)]),  # the kept value, not the weights
        (["hidden"], ["input"], "v5e:2x4", [(ROWS // 8, 8, WIDTH)]),
        (["input", "hidden"], [], "v5e:2x4", []),  # nothing waits on the device
        ([], ["input", "hidden"], "v5e:2x4", []),  # nothing waits on the host
        (["input"], ["hidden"], "h100:1x8", []),
    ],
)
def test_the_order_of_kept_values_is_given_beside_values_on_the_host(host, kept, target, shapes):
    program = lowered(step(host, kept), target)
    assert ordered(jax.make_jaxpr(program)(WEIGHTS, X).jaxpr) == shapes


@pytest.mark.parametrize("words", ["dp:8", "tp:8", "dp:2 cp:4"])
def test_parameters_have_no_given_order_if_they_are_stored_as_they_are_used(words):
    program = lowered(step(["input"], ["hidden"]), words=words)
    (shape,) = ordered(jax.make_jaxpr(program)(WEIGHTS, X).jaxpr)
    assert np.prod(shape) == ROWS * HIDDEN  # 1 of 8 shards of the kept value


@pytest.mark.parametrize("words", ["dp:8", "fsdp:8", "dp:2 tp:4"])
def test_values_with_heads_keep_the_order_that_the_compiler_chooses(words):
    """Attention takes them with the heads before the positions."""
    program = lowered(step(["input"], ["heads"], attention), words=words)
    assert not ordered(jax.make_jaxpr(program)(WEIGHTS, X).jaxpr)


def test_the_order_is_given_in_loops_that_gather_early():
    """The loops of both passes gather the weights of the next layer."""

    def fn(weights, x):
        def layer(h, w):
            h = checkpoint_name(h, "input")
            h = h + jnp.tanh(checkpoint_name(h @ w["up"], "hidden")) @ w["down"]
            return h + jnp.tanh(h @ w["square"]), None

        def loss(weights):
            layers = jax.checkpoint(layer, policy=policy(["input"], ["hidden"]))
            return (jax.lax.scan(layers, x, weights)[0] ** 2).mean()

        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(loss)(weights))

    width, hidden, rows = 2048, 4096, 64
    sizes = {"up": (width, hidden), "down": (hidden, width), "square": (width, width)}
    weights = {name: jax.ShapeDtypeStruct((4, *size), jnp.float32) for name, size in sizes.items()}
    x = jax.ShapeDtypeStruct((rows, 64, width), jnp.float32)
    program = lowered(fn, words="fsdp:8", args=(weights, x), gather="prefetch")
    jaxpr = jax.make_jaxpr(program)(*jax.tree.leaves((weights, x))).jaxpr
    backward = [eqn for eqn in loops(jaxpr) if eqn.params["reverse"]]
    assert any(v.aval.shape == (width, hidden) for eqn in backward for v in eqn.invars)  # gathered for the first layer
    assert ordered(jaxpr) == [(rows // 8, 64, hidden)]


@pytest.mark.parametrize("words", ["dp:2 fsdp:4", "dp:8", "tp:8", "dp:2 cp:4", "fsdp:2 tp:2 cp:2"])
def test_values_stay_the_same(words):
    fn = step(["input"], ["hidden"])
    made = autoshard.plan(fn, WEIGHTS, X, plan=words, target="v5e:2x4")
    program = bound_or_error(made.bound).executable.constrained_program(made.mesh)
    mesh = jax.make_mesh(made.mesh.axis_sizes, made.mesh.axis_names, axis_types=made.mesh.axis_types)
    keys = jax.random.split(jax.random.key(0))
    args = [jax.random.normal(key, each.shape) / 4 for key, each in zip(keys, (WEIGHTS, X), strict=True)]
    assert ordered(jax.make_jaxpr(program)(*args).jaxpr)
    with jax.set_mesh(mesh):
        results = jax.jit(program)(*args)
    for result, expected in zip(results, jax.tree.leaves(jax.jit(fn)(*args)), strict=True):
        np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-6)

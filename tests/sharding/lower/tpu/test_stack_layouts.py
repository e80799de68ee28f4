"""The order of dimensions of slices of stacks, in device memory and in host memory."""

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


def orders(jaxpr):
    """The shapes of shards whose order of dimensions is given, with the order, in a jaxpr and all jaxprs in it."""
    found = [
        (eqn.invars[0].aval.shape, eqn.params["layout"].major_to_minor)
        for eqn in jaxpr.eqns
        if eqn.primitive.name == "layout_constraint"
    ]
    for eqn in jaxpr.eqns:
        for value in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda v: hasattr(v, "eqns")):
            inner = getattr(value, "jaxpr", value)
            found += orders(inner) if hasattr(inner, "eqns") else []
    return found


def ordered(jaxpr):
    """The shapes of `orders`."""
    return [shape for shape, _ in orders(jaxpr)]


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


def wide(host, layer, shape, target="v5e:2x4", words="dp:8", hidden=8 * 128):
    """Return the orders that a step gives. Its layers fill the lanes of a TPU, unless `shape` or `hidden` is small."""
    weights = jax.ShapeDtypeStruct((LAYERS, shape[-1], hidden), jnp.float32)
    x = jax.ShapeDtypeStruct(shape, jnp.float32)
    program = lowered(step(host, [], layer), target, words, args=(weights, x))
    return orders(jax.make_jaxpr(program)(weights, x).jaxpr)


def wide_attention(h, w):
    h, w = checkpoint_name(h, "input"), w.reshape(-1, 8, 128)
    q = checkpoint_name(jnp.einsum("bsw,whd->bshd", h, w), "heads")
    scores = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, q))
    return h + jnp.einsum("bqhd,whd->bqw", jnp.einsum("bhqk,bkhd->bqhd", scores, q), w), None


@pytest.mark.parametrize(("words", "shard"), [("dp:8", (2, 8, 256)), ("dp:2 cp:4", (8, 2, 256))])
def test_values_in_host_memory_are_row_major_in_both_loops(words, shard):
    """The last iteration of the forward loop, which runs after it, gives the order once more."""
    assert wide(["input"], mlp, (ROWS, 8, 256), words=words) == [(shard, (0, 1, 2))] * 3


def test_heads_are_in_front_of_positions_in_host_memory():
    shard = (2, 8, 8, 128)  # rows, positions, heads, features of a head
    given = wide(["heads"], wide_attention, (ROWS, 8, 256))
    assert sorted(given) == [(shard, (0, 2, 1, 3))] * 3 + [((2, 8, 256), (0, 1, 2))]  # and the kept input of the layers


def merged_heads(h, w):
    """Like `wide_attention`, but the queries are named before they are split into heads."""
    h = checkpoint_name(h, "input")
    q = checkpoint_name(h @ w, "heads").reshape(*h.shape[:2], 8, 128)
    scores = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, q))
    out = jnp.einsum("bhqk,bkhd->bqhd", scores, q).reshape(*h.shape[:2], 8 * 128)
    return h + out @ w.T, None


@pytest.mark.parametrize("words", ["dp:8", "dp:2 cp:4", "fsdp:4 tp:2"])
def test_heads_in_the_last_dimension_stay_there(words):
    """Otherwise the positions would be the minor dimension, and fill few lanes."""
    given = [order for shape, order in wide(["heads"], merged_heads, (ROWS, 8, 256), words=words) if shape[-1] > 256]
    assert given == [(0, 1, 2)] * 3


@pytest.mark.parametrize(
    ("host", "layer", "shape", "target"),
    [
        (["input"], mlp, (ROWS, 8, 192), "v5e:2x4"),  # 192 features would fill 256 lanes
        (["input"], mlp, (ROWS, 4, 8, 256), "v5e:2x4"),  # an image
        (["input"], mlp, (ROWS, 8, 256), "h100:1x8"),
    ],
)
def test_other_values_in_host_memory_keep_the_order_that_the_compiler_chooses(host, layer, shape, target):
    assert not wide(host, layer, shape, target)


@pytest.mark.parametrize(("hidden", "count"), [(8 * 128, 3), (8 * 64, 0)])
def test_features_of_a_shard_fill_the_lanes(hidden, count):
    """With `tp:8`, each device has an eighth of the hidden features."""
    given = wide(["hidden"], mlp, (ROWS, 8, 256), words="tp:8", hidden=hidden)
    assert [shape for shape, _ in given].count((ROWS, 8, hidden // 8)) == count


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
    on_host, kept = (rows // 8, 64, width), (rows // 8, 64, hidden)
    assert sorted(ordered(jaxpr)) == [on_host] * 3 + [kept]  # sent, of the last layer, and fetched; kept


@pytest.mark.parametrize("words", ["dp:2 fsdp:4", "dp:8", "tp:8", "dp:2 cp:4", "fsdp:2 tp:2 cp:2"])
def test_values_stay_the_same(words):
    fn = step(["input"], ["hidden"])
    check_values(fn, words, (WEIGHTS, X))


@pytest.mark.parametrize(("host", "layer"), [(["input"], mlp), (["heads"], wide_attention)])
@pytest.mark.parametrize("words", ["dp:8", "dp:2 cp:4", "fsdp:4 tp:2"])
def test_values_of_programs_with_orders_in_host_memory_stay_the_same(host, layer, words):
    weights = jax.ShapeDtypeStruct((LAYERS, 256, 8 * 128), jnp.float32)
    check_values(step(host, [], layer), words, (weights, jax.ShapeDtypeStruct((ROWS, 8, 256), jnp.float32)))


def check_values(fn, words, shapes):
    made = autoshard.plan(fn, *shapes, plan=words, target="v5e:2x4")
    program = bound_or_error(made.bound).executable.constrained_program(made.mesh)
    mesh = jax.make_mesh(made.mesh.axis_sizes, made.mesh.axis_names, axis_types=made.mesh.axis_types)
    keys = jax.random.split(jax.random.key(0))
    args = [
        jax.random.normal(key, each.shape) / shapes[0].shape[1] ** 0.5 for key, each in zip(keys, shapes, strict=True)
    ]
    assert ordered(jax.make_jaxpr(program)(*args).jaxpr)
    with jax.set_mesh(mesh):
        results = jax.jit(program)(*args)
    for result, expected in zip(results, jax.tree.leaves(jax.jit(fn)(*args)), strict=True):
        np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-6)

"""Operators that plans run on shards by their rules have the values of one device, under every placement."""

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from autoshard import auto_shard
from autoshard.spmdrules.core.rule import Rule
from autoshard.spmdrules.custom_ops.sharded_execution import run_on_shards

MESH = {"x": 2, "y": 4}
PLACES = [P("x"), P("y"), P(("x", "y"))]


def normal(*shape, seed=0):
    return jax.random.normal(jax.random.key(seed), shape)


def check(fn, *args, **options):
    results = auto_shard(fn, **options)(*args)
    for actual, expected in zip(jax.tree.leaves(results), jax.tree.leaves(jax.jit(fn)(*args)), strict=True):
        np.testing.assert_allclose(
            np.asarray(actual, np.float64), np.asarray(expected, np.float64), rtol=1e-5, atol=1e-5
        )


def scatters(jaxpr, found):
    """The shape, the dimension and the mesh axes of each reduce-scatter."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "reduce_scatter":
            params = eqn.params
            found.append((eqn.invars[0].aval.shape, params["scatter_dimension"], params["axis_name"]))
        for inner in jax.extend.core.jaxprs_in_params(eqn.params):
            scatters(inner, found)
    return found


def test_terms_on_several_mesh_axes_are_added_in_one_collective():
    rule = Rule.parse("n d -> d; reduce n; where n=16 d=4")
    mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    result = [jax.ShapeDtypeStruct((4,), "float32")]

    def run(x):
        return run_on_shards(rule, lambda _, x: x.sum(0), result, mesh, {"x": "n", "y": "n"}, [((),)], x)

    x = normal(16, 4)
    np.testing.assert_allclose(jax.jit(run)(x)[0], x.sum(0), rtol=1e-5)
    assert str(jax.make_jaxpr(run)(x)).count("psum") == 1


def test_messages_at_nodes_are_added_over_all_mesh_axes():
    """Edges are sharded over both mesh axes, and the nodes that they reach are not sharded."""

    def step(w, edges, ends):
        def loss(w):
            return jnp.sum(jnp.square(jax.ops.segment_sum(jnp.tanh(edges @ w), ends, num_segments=128)))

        value, gradient = jax.value_and_grad(loss)(w)
        return w - 0.01 * gradient, value

    args = normal(32, 32), normal(512, 32, seed=1), jax.random.randint(jax.random.key(2), (512,), 0, 128)
    check(step, *args, plan="dp:2 fsdp:4")
    text = auto_shard(step, plan="dp:2 fsdp:4").lower(*args).compile().as_text()
    assert text.count("f32[128,32]{1,0} all-reduce(") == 1
    assert "f32[128,32]{1,0} all-gather(" not in text and "collective-permute(" not in text  # no edge moves


def grouped(x, kernel, groups=2, stride=2):
    dims = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(
        x, kernel, (stride, stride), "VALID", dimension_numbers=dims, feature_group_count=groups
    )


@pytest.mark.few(2)
@pytest.mark.parametrize("mesh", [{"x": 8}, MESH], ids=str)
@pytest.mark.parametrize("spec", [P(None, None, "x"), P(None, None, None, "x")], ids=str)
def test_the_kernel_gradient_of_grouped_convolutions_under_each_sharding(mesh, spec):
    def gradient(kernel, x, cotangent):
        return jax.vjp(lambda kernel: grouped(x, kernel), kernel)[1](cotangent)[0] + kernel

    check(gradient, normal(2, 2, 8, 32), normal(8, 8, 8, 16), normal(8, 4, 4, 32), mesh=mesh, fixed={"0": spec})


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["tp:8", "dp:8", "dp:2 tp:4"])
def test_a_train_step_of_grouped_convolutions(plan):
    def loss(kernels, x):
        for kernel in kernels:
            x = jax.nn.relu(grouped(x, kernel, stride=1))
        return (x**2).mean()

    def step(kernels, x):
        value, gradients = jax.value_and_grad(loss)(kernels, x)
        return [k - 0.1 * g for k, g in zip(kernels, gradients, strict=True)], value

    kernels = [normal(3, 3, 8, 32) / 8, normal(1, 1, 16, 64) / 4, normal(3, 3, 32, 16) / 16]
    check(step, kernels, normal(8, 8, 8, 16), plan=plan)


def test_keys_at_dynamic_positions():
    def step(w, x, i):
        keys = jax.random.split(jax.random.key(0), 8)
        return (x @ w) * jax.random.bernoulli(keys[i], 0.5, (16,))

    check(step, normal(16, 16), normal(8, 16), jnp.int32(3), plan="dp:8")

    def looped(w, x):
        keys = jax.random.split(jax.random.key(0), 4)
        body = lambda i, x: jnp.tanh(x @ w) * jax.random.bernoulli(keys[i], 0.5, x.shape)  # noqa: E731
        return lax.fori_loop(0, 4, body, x)

    check(looped, normal(16, 16), normal(8, 16), plan="dp:8")


@pytest.mark.few(2)
@pytest.mark.filterwarnings("ignore:.*devices have work of their own")
@pytest.mark.parametrize("spec", PLACES, ids=str)
@pytest.mark.parametrize("fill", [None, -1, 7])
@pytest.mark.parametrize("dtype", [jnp.int8, jnp.float32])
def test_windows_past_the_end_are_filled_once(spec, fill, dtype):
    x = (8 * normal(64, 16)).astype(dtype)
    check(lambda x, i: x.at[2:7, i].get(mode="fill", fill_value=fill), x, jnp.array([5, 100]), mesh=MESH,
          fixed={"0": spec})  # fmt: skip


@pytest.mark.few(3)
@pytest.mark.parametrize("spec", PLACES, ids=str)
@pytest.mark.parametrize("position", [np.uint32(2**32 - 2), np.uint32(3), np.uint8(250), np.int8(-3), np.int32(-2)])
def test_positions_of_every_dtype_are_clamped_in_the_same_way(spec, position):
    x, update = normal(64, 16), normal(5, 16, seed=1)
    zero = np.zeros((), position.dtype)
    check(lambda x, i: lax.dynamic_slice(x, (i, zero), (5, 16)), x, position, mesh=MESH, fixed={"0": spec})
    check(lambda x, u, i: lax.dynamic_update_slice(x, u, (i, zero)), x, update, position, mesh=MESH, fixed={"0": spec})


@pytest.mark.parametrize("types", [(AxisType.Explicit,) * 2, (AxisType.Explicit, AxisType.Auto)], ids=str)
def test_under_an_explicit_mesh(types):
    mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=types)
    best = lambda w, x: lax.top_k(x @ w, 2)[0].sum()  # noqa: E731
    w, x = normal(16, 16), normal(8, 16)
    expected = best(w, x)
    with jax.set_mesh(mesh):
        np.testing.assert_allclose(auto_shard(best)(w, x), expected, rtol=1e-5)


@pytest.mark.parametrize("op", ["add", "mul", "max"])
def test_an_initial_value_counts_once(op):
    fold, first = {"add": (lax.add, 1.0), "mul": (lax.mul, 2.0), "max": (lax.max, 0.5)}[op]
    w, x = normal(8, 8), jnp.arange(512.0).reshape(64, 8) / 100
    check(lambda w, x: lax.reduce(jnp.tanh(x @ w), np.float32(first), fold, (0, 1)), w, x, plan="dp:8")


def test_an_initial_value_of_windows_counts_once():
    fold = lambda a, b: a * b + a + b  # noqa: E731
    w, x = normal(8, 8), jnp.arange(512.0).reshape(64, 8) / 1000
    slide = lambda x: lax.reduce_window(x, np.float32(0.1), fold, (3, 2), (2, 1), "SAME")  # noqa: E731
    check(lambda w, x: slide(jnp.tanh(x @ w)), w, x, plan="dp:8")


@pytest.mark.filterwarnings("ignore:.*devices have work of their own")
def test_a_sharded_cache_is_written_and_read_without_a_gather():
    """Decoding: each row writes at its own position into a cache that is sharded by position."""

    def decode(cache, new, positions):
        write = jax.vmap(
            lambda row, new, positions: lax.dynamic_update_slice(row, new[None], (positions, jnp.int32(0)))
        )
        cache = write(cache, new, positions)
        scores = jnp.einsum("bd,bsd->bs", new, cache)
        return cache, jnp.einsum("bs,bsd->bd", jax.nn.softmax(scores), cache)

    cache, new, positions = normal(4, 32, 16), normal(4, 16, seed=1), jnp.array([0, 7, 31, 8])
    check(decode, cache, new, positions, mesh=MESH, fixed={"0": P("x", "y")})
    options = {"plan": {"x": ["batch"], "y": ["seq"]}, "mesh": MESH}
    check(decode, cache, new, positions, **options)
    plan = auto_shard(decode, **options).plan(cache, new, positions)
    assert plan.inputs[0].spec == P("x", "y")
    text = plan.jit().lower(cache, new, positions).compile().as_text() or ""
    assert "all-reduce" in text
    assert not [whole for whole in ("f32[4,32,16]", "f32[2,32,16]", "f32[4,8,16]") if whole in text]  # of the cache


@pytest.mark.parametrize(
    ("stages", "want", "expected"),
    [
        (2, (("pp",), ("x", "y"), ()), ((16, 8), 0, ("x", "y"))),  # one stage on each device: its dimension is dropped
        (4, (("pp",), ("x", "y"), ()), ((2, 16, 8), 1, ("x", "y"))),
        (2, (("pp",), ("y",), ("x",)), ((16, 8), 0, ("y",))),
        (2, (("pp",), ("y", "x"), ()), ((16, 8), 0, ("y", "x"))),
    ],
)
def test_a_sum_is_scattered_over_all_its_axes_at_once_behind_no_dimension_of_size_1(mesh_of, stages, want, expected):
    rows, weights = normal(stages, 16, 32), normal(stages, 32, 8, seed=1)
    result = jax.ShapeDtypeStruct((stages, 16, 8), jnp.float32)
    rule = Rule.parse("s r h, s h e -> s r e; reduce h", rows, weights)
    factors = {"pp": "s", "x": "h", "y": "h"}

    def product(rows, weights):
        body = lambda _, rows, weights: [rows @ weights]  # noqa: E731
        return run_on_shards(rule, body, [result], mesh_of(pp=2, x=2, y=2), factors, [want], rows, weights)[0]

    assert scatters(jax.make_jaxpr(product)(rows, weights).jaxpr, [])[0] == expected
    np.testing.assert_allclose(jax.jit(product)(rows, weights), rows @ weights, rtol=1e-5, atol=1e-5)

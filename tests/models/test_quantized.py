"""Products in 8 bits against their formulas, under every kind of plan, and in every model."""

import dataclasses
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

import autoshard
from autoshard.errors import AutoshardError
from autoshard.models import GPTConfig
from autoshard.models.moe_config import MoEConfig
from autoshard.models.quantized import quantized_einsum
from autoshard.models.vit import ViTConfig
from autoshard.models.workloads import workload
from tests.arrays import array
from tests.models.small import TINY, equations, filled, quickly

SPECS = {
    "bse,ef->bsf": ((4, 8, 16), (16, 32)),
    "bse,ehd->bshd": ((4, 8, 16), (16, 8, 4)),
    "bshd,hde->bse": ((4, 8, 8, 4), (8, 4, 16)),
    "egci,eio->egco": ((8, 2, 4, 16), (8, 16, 8)),
}


def operands(spec, dtype=jnp.float32):
    """Makes operands, and a cotangent of their product."""
    rng = np.random.default_rng(0)
    x, w = (array(rng.normal(size=shape), dtype) for shape in SPECS[spec])
    out = jax.eval_shape(lambda x, w: jnp.einsum(spec, x, w), x, w).shape
    return x, w, array(rng.normal(size=out), dtype)


def product(spec, quantization):
    def run(x, w, cotangent):
        y, pullback = jax.vjp(lambda x, w: quantized_einsum(spec, x, w, quantization), x, w)
        return y, pullback(cotangent)

    return run


def rounded(x, dims, kept, largest, dtype):
    """Rounds to 8 bits with one scale for each row along the dimensions that are not kept."""
    summed = tuple(n for n, letter in enumerate(dims) if letter not in kept)
    scale = np.max(np.abs(np.asarray(x)), axis=summed, keepdims=True) / np.float32(largest)
    values = np.asarray(x) / scale
    values = np.rint(values).clip(-128, 127) if dtype == jnp.int8 else np.asarray(jnp.asarray(values).astype(dtype))
    return values.astype(np.float32), scale


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("quantization", "forward", "backward"),
    [
        ("int8", (127, jnp.int8), (127, jnp.int8)),
        ("fp8", (448, jnp.float8_e4m3fn), (57344, jnp.float8_e5m2)),
    ],
)
@pytest.mark.parametrize("spec", SPECS)
def test_a_product_and_its_gradients_follow_the_formulas(spec, quantization, forward, backward):
    x, w, cotangent = operands(spec)
    lhs, rhs, out = spec.replace("->", ",").split(",")
    x8, x_scale = rounded(x, lhs, out, *forward)
    w8, w_scale = rounded(w, rhs, out, *forward)
    of_w, of_x = (
        np.asarray(cotangent) * np.einsum(f"{dims}->{''.join(c for c in out if c in dims)}", scale)[
            tuple(slice(None) if c in dims else None for c in out)
        ]
        for dims, scale in ((rhs, w_scale), (lhs, x_scale))
    )  # fmt: skip
    dx8, dx_scale = rounded(of_w, out, lhs, *backward)
    dw8, dw_scale = rounded(of_x, out, rhs, *backward)
    expected = (
        np.einsum(spec, x8 * x_scale, w8 * w_scale),
        np.einsum(f"{out},{rhs}->{lhs}", dx8 * dx_scale, w8),
        np.einsum(f"{lhs},{out}->{rhs}", x8, dw8 * dw_scale),
    )
    y, (d_x, d_w) = quickly(product(spec, quantization), x, w, cotangent)
    for one, other in zip(expected, (y, d_x, d_w), strict=True):
        # If one value is rounded up instead of down, a sum changes by one step of its row's scale.
        error = np.linalg.norm(other - one) / np.linalg.norm(one)
        assert error < 2e-3


@pytest.mark.parametrize(("quantization", "most"), [("int8", 0.02), ("fp8", 0.08)])
def test_a_product_is_close_to_that_of_its_operands(quantization, most):
    x, w, cotangent = operands("bse,ef->bsf", jnp.bfloat16)
    quantized = quickly(product("bse,ef->bsf", quantization), x, w, cotangent)
    exact = quickly(product("bse,ef->bsf", "none"), x, w, cotangent)
    for one, other in zip(jax.tree.leaves(exact), jax.tree.leaves(quantized), strict=True):
        assert one.dtype == other.dtype == jnp.bfloat16
        one, other = np.asarray(one, np.float32), np.asarray(other, np.float32)
        assert 1e-3 < np.linalg.norm(other - one) / np.linalg.norm(one) < most


# The specs of x [batch, seq, embed], w [embed, ffn] and the cotangent under each plan.
SHARDINGS = {
    "dp": (("d", None, None), (None, None), ("d", None, None)),
    "fsdp": (("d", None, None), ("d", None), ("d", None, None)),
    "tp columns": ((None, None, None), (None, "d"), (None, None, "d")),
    "tp rows": ((None, None, "d"), ("d", None), (None, None, None)),
}


@pytest.mark.few(2)
@pytest.mark.parametrize("quantization", ["int8", "fp8"])
@pytest.mark.parametrize("name", SHARDINGS)
def test_scales_of_sharded_operands_are_those_of_whole_ones(name, quantization):
    """With equal inputs every maximum is exact, so all roundings agree; only float sums differ in their order."""
    arrays = operands("bse,ef->bsf")
    mesh = jax.make_mesh((4,), ("d",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:4])
    specs = [jax.sharding.PartitionSpec(*spec) for spec in SHARDINGS[name]]
    placed = [jax.device_put(x, jax.NamedSharding(mesh, spec)) for x, spec in zip(arrays, specs, strict=True)]
    run = product("bse,ef->bsf", quantization)
    for one, other in zip(jax.tree.leaves(jax.jit(run)(*arrays)), jax.tree.leaves(jax.jit(run)(*placed)), strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-5, atol=1e-5 * float(jnp.max(jnp.abs(one))))


def test_a_stored_shard_is_quantized_and_then_gathered():
    rng = np.random.default_rng(0)
    weights = [array(rng.normal(size=shape), jnp.bfloat16) for shape in ((64, 256), (256, 64))]
    x = array(rng.normal(size=(2048, 64)), jnp.bfloat16)

    def step(weights, x):
        def loss(weights):
            hidden = jax.nn.relu(quantized_einsum("be,ef->bf", x, weights[0], "fp8"))
            return jnp.sum(jnp.square(quantized_einsum("bf,fe->be", hidden, weights[1], "fp8").astype(jnp.float32)))

        return jax.tree.map(lambda w, g: (w - 1e-5 * g).astype(w.dtype), weights, jax.grad(loss)(weights))

    sharded = autoshard.auto_shard(step, plan="fsdp:8")
    with jax.numpy_dtype_promotion("standard"):
        for one, other in zip(jax.jit(step)(weights, x), sharded(weights, x), strict=True):
            one, other = np.asarray(one, np.float32), np.asarray(other, np.float32)
            assert np.linalg.norm(other - one) / np.linalg.norm(one) < 5e-3
        traffic = sharded.plan(weights, x).traffic
    # Each weight is gathered once, with one byte per element. The first weight is sharded along its outputs, so the
    # scales of its 256 outputs are gathered, too, in bfloat16.
    gathered = sum(sent for kind, _, sent, _ in traffic if kind == "all-gather")
    assert gathered == pytest.approx(7 / 8 * (sum(w.size for w in weights) + 2 * 256))


def loss_and_gradients(cfg):
    graph, params = nnx.split(filled(cfg))

    def run(params, batch):
        def mean(params):
            total, count = nnx.merge(graph, params).loss(batch)
            return total / count

        return jax.value_and_grad(mean)(params)

    rng = np.random.default_rng(0)
    tokens = array(rng.integers(0, cfg.vocab, (2, 8, cfg.context)), jnp.int32)
    return run, params, {"inputs": tokens[0], "targets": tokens[1]}


SMALL = dataclasses.replace(TINY, vocab=64, heads=8, kv_heads=4, width=32, ffn=64, context=8)
TOGETHER = {"remat": "host:residual+qkv keep:out_proj", "loss_chunks": 4, "tie_head": False}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("quantization", "words", "changes"),
    [
        pytest.param("fp8", "fsdp:4 tp:2", TOGETHER, marks=pytest.mark.whole),
        pytest.param("int8", "fsdp:8", {}, marks=pytest.mark.slow),
        pytest.param("fp8", "fsdp:8", {"remat": "full"}, marks=pytest.mark.slow),
        pytest.param("fp8", "dp:8", {}, marks=pytest.mark.slow),
        pytest.param("int8", "dp:2 tp:4", TOGETHER, marks=pytest.mark.slow),
    ],
)
def test_a_model_has_the_loss_and_gradients_of_one_device(quantization, words, changes):
    """Sums in another order move a few values over a rounding's boundary, each by one step of 8 bits.

    So the tolerance is not that of float32: it is a share of the error that quantization itself makes, 1 to 20 %. The
    test above shows that scales are exact.
    """
    run, params, rows = loss_and_gradients(dataclasses.replace(SMALL, quantization=quantization, **changes))
    loss, gradients = jax.jit(run)(params, rows)
    sharded_loss, sharded = autoshard.auto_shard(run, plan=words)(params, rows)
    assert float(sharded_loss) == pytest.approx(float(loss), rel=2e-4)
    for one, other in zip(jax.tree.leaves(gradients), jax.tree.leaves(sharded), strict=True):
        one, other = np.asarray(one), np.asarray(other)
        assert np.linalg.norm(one) > 0
        assert np.linalg.norm(other - one) / np.linalg.norm(one) < 0.04


def test_every_projection_of_a_layer_has_8_bit_operands_and_nothing_else():
    run, params, rows = loss_and_gradients(dataclasses.replace(SMALL, quantization="fp8", attention="plain"))
    traced = jax.make_jaxpr(run)(params, rows).jaxpr
    products = [each for each in equations(traced) if each.primitive is lax.dot_general_p]
    found = [tuple(v.aval.dtype.name for v in each.invars) for each in products]
    # Seven projections, forward and twice backward; attention's two products and the head, likewise.
    narrow = [each for each in found if any("float8" in name for name in each)]
    assert len(narrow) == 3 * 7 and len(found) - len(narrow) == 3 * 3
    assert all("float8" in name for each in narrow for name in each)


def test_an_unknown_quantization_lists_the_known_ones():
    with pytest.raises(ValueError, match="quantization is 'int9'; choose one of none, int8, fp8"):
        GPTConfig(quantization="int9")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="ViTConfig: quantization is 'fp9'; choose one of none, int8, fp8"):
        ViTConfig(quantization="fp9")  # pyright: ignore[reportArgumentType]
    with pytest.raises(AutoshardError, match="has no field 'quantization'"):
        workload("wide-resnet-tiny").with_(quantization="fp8")


def test_float16_and_dropless_experts_are_refused():
    with pytest.raises(ValueError, match="exceed the range of dtype float16"):
        GPTConfig(quantization="fp8", dtype="float16")
    with pytest.raises(ValueError, match="dispatch is 'dropless' and quantization is 'int8'.*set dispatch='capacity'"):
        MoEConfig(GPTConfig(quantization="int8"), dispatch="dropless")


@pytest.mark.parametrize(
    ("spec", "shapes", "dtype", "reason"),
    [
        ("bse,ef->bs", ((2, 3, 4), (4, 5)), jnp.float32, "it must sum over dimensions that both operands have"),
        ("be,bf->bef", ((2, 3), (2, 4)), jnp.float32, "it must sum over dimensions that both operands have"),
        ("b...e,ef->b...f", ((2, 3, 4), (4, 5)), jnp.float32, "each with distinct letters"),
        ("be,ef->bf", ((2, 3), (3, 4)), jnp.int32, "an operand has dtype int32"),
        ("be,ef->bf", ((0, 3), (3, 4)), jnp.float32, "an operand is empty"),
    ],
)
def test_a_product_that_cannot_be_quantized_says_why(spec, shapes, dtype, reason):
    x, w = (jnp.ones(shape, dtype) for shape in shapes)
    with pytest.raises(ValueError, match=f"cannot be quantized: .*{reason}.*; set quantization='none'"):
        quantized_einsum(spec, x, w, "int8")


def test_without_qwix_the_message_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "qwix", None)
    with pytest.raises(AutoshardError, match=r"needs the package qwix; install it with pip install 'autoshard\[quant"):
        quantized_einsum("be,ef->bf", jnp.ones((2, 3)), jnp.ones((3, 4)), "fp8")

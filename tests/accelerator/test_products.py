"""Products of experts, products in 8 bits, and random bits on the device, against the CPU."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autoshard import auto_shard
from autoshard.kernels.grouped.call import GroupedCall, grouped_call
from autoshard.kernels.grouped.matmul import grouped_matmul, grouped_product
from autoshard.models.dropless import experts
from autoshard.models.dropless.operators import swiglu_experts
from tests.accelerator.comparisons import FLOAT32_TOLERANCE, assert_no_worse, on_cpu, relative_error
from tests.sharding.programs import assert_close

pytestmark = pytest.mark.accelerator

EIGHT_BITS_TOLERANCE = 1e-3  # a tenth of what rounding to 8 bits changes


def arrays(*shapes: tuple[int, ...]) -> list[jax.Array]:
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes]


@pytest.mark.usefixtures("full_precision")
def test_a_grouped_product_equals_ragged_dot_on_the_cpu():
    rows, weights, cotangent = arrays((1500, 64), (7, 64, 96), (1500, 96))
    sizes = jnp.asarray([0, 300, 1, 899, 0, 200, 40], jnp.int32)  # 60 rows belong to no group

    def run(product: Any) -> Any:
        def with_gradients(rows: Any, weights: Any, sizes: Any, cotangent: Any) -> Any:
            out, pullback = jax.vjp(lambda rows, weights: product(rows, weights, sizes), rows, weights)
            return out, *pullback(cotangent)

        return with_gradients

    args = rows, weights, sizes, cotangent
    expected = on_cpu(run(jax.lax.ragged_dot), *args)
    for product in (grouped_matmul, jax.lax.ragged_dot):
        assert_close(expected, auto_shard(run(product))(*args), FLOAT32_TOLERANCE)


def test_grouped_products_in_bfloat16_are_as_exact_as_ragged_dot():
    rows, weights, cotangent = (x.astype(jnp.bfloat16) for x in arrays((1500, 64), (4, 64, 96), (1500, 96)))
    sizes = jnp.asarray([300, 300, 700, 200], jnp.int32)

    def run(product: Any, *args: Any) -> Any:
        out, pullback = jax.vjp(lambda rows, weights: product(rows, weights, sizes), *args[:2])
        return out, *pullback(args[2])

    args = rows, weights, cotangent
    expected = on_cpu(functools.partial(run, jax.lax.ragged_dot), *(x.astype(jnp.float32) for x in args))
    found, plain = (jax.jit(functools.partial(run, each))(*args) for each in (grouped_matmul, jax.lax.ragged_dot))
    assert_no_worse(found, plain, expected)


@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize(
    "shape, sizes",
    [
        ((1500, 64, 96), (0, 300, 1, 899, 0, 200, 40)),
        ((4096, 512, 384), (1000, 24, 0, 2944, 128)),
        ((96, 48, 16), (0, 0)),
    ],
    ids=["rows without a group", "all rows", "empty groups"],
)
def test_the_kernels_of_grouped_products_are_as_exact_as_plain_jax(shape, sizes):
    """Rows without a group are NaN, and neither their values nor their gradients reach another row."""
    count, inner, columns = shape
    rows, weights, cotangent = (
        x.astype(jnp.bfloat16) for x in arrays((count, inner), (len(sizes), inner, columns), (count, columns))
    )
    outside = jnp.arange(count)[:, None] >= sum(sizes)
    sizes, own = jnp.asarray(sizes, jnp.int32), jnp.arange(len(sizes), dtype=jnp.int32)

    def run(kernel: Any, rows: Any, weights: Any, cotangent: Any) -> Any:
        out, pullback = jax.vjp(
            lambda rows, weights: grouped_product(GroupedCall(kernel), rows, weights, sizes, own), rows, weights
        )
        return out, *pullback(cotangent)

    args = jnp.where(outside, jnp.nan, rows), weights, jnp.where(outside, jnp.nan, cotangent)
    expected = on_cpu(functools.partial(run, "tiled"), *(x.astype(jnp.float32) for x in args))
    kernel, plain = (jax.jit(functools.partial(run, each)).lower(*args) for each in ("triton", "tiled"))
    assert "triton" in kernel.as_text() and "triton" not in plain.as_text()
    assert_no_worse(kernel.compile()(*args), plain.compile()(*args), expected)


def routing(tokens: int, experts: int) -> tuple[jax.Array, jax.Array]:
    """Return two of the first experts for each token of four rows, `[4, tokens, 2]`, and their weights."""
    rng = np.random.default_rng(1)
    chosen = np.stack([rng.permutation(experts)[:2] for _ in range(4 * tokens)]).reshape(4, tokens, 2)
    return jnp.asarray(chosen, jnp.int32), jnp.asarray(rng.random((4, tokens, 2)), jnp.float32)


@pytest.mark.usefixtures("on_gpu")
def test_experts_in_bfloat16_take_the_kernels_and_are_as_exact_as_without():
    x, up, down, gate = arrays((4, 512, 256), (8, 256, 384), (8, 384, 256), (8, 256, 384))
    chosen, gates = routing(512, 8)
    own = jnp.arange(8, dtype=jnp.int32)

    def run(kernel: Any, x: Any, gates: Any, *weights: Any) -> Any:
        def total(x: Any, gates: Any, *weights: Any) -> Any:
            out = swiglu_experts(x, gates, chosen, own, *weights, count=8, call=GroupedCall(kernel))
            return jnp.sum(jnp.sin(out.astype(jnp.float32)))

        return jax.grad(total, (0, 1, 2, 3, 4))(x, gates, *weights)

    args = x, gates, gate, up, down
    expected = on_cpu(functools.partial(run, "tiled"), *args)
    narrow = [a if a is gates else a.astype(jnp.bfloat16) for a in args]
    planned = auto_shard(functools.partial(run, grouped_call(jnp.bfloat16).kernel))
    assert "triton" in planned.lower(*narrow).as_text()
    assert_no_worse(planned(*narrow), jax.jit(functools.partial(run, "tiled"))(*narrow), expected)


@pytest.mark.usefixtures("full_precision")
def test_experts_equal_those_of_the_cpu():
    x, up, down, gate = arrays((4, 96, 32), (8, 32, 48), (8, 48, 32), (8, 32, 48))
    chosen, gates = routing(96, 7)

    def run(x: Any, gates: Any, *weights: Any) -> Any:
        return jax.value_and_grad(lambda *x: jnp.sum(jnp.sin(experts(x[0], x[1], chosen, *x[2:]))), (0, 1, 2, 3, 4))(
            x, gates, *weights
        )

    args = x, gates, up, down, gate
    assert_close(on_cpu(run, *args), auto_shard(run)(*args), FLOAT32_TOLERANCE)


@pytest.mark.usefixtures("full_precision")
@pytest.mark.parametrize("quantization", ["int8", "fp8"])
def test_products_in_8_bits_equal_those_of_the_cpu(quantization):
    pytest.importorskip("qwix", reason="needs the extra quantized")
    from autoshard.models.quantized import quantized_einsum

    def run(x: Any, w: Any, cotangent: Any) -> Any:
        out, pullback = jax.vjp(lambda x, w: quantized_einsum("bse,ef->bsf", x, w, quantization), x, w)
        return out, *pullback(cotangent)

    args = arrays((4, 128, 256), (256, 192), (4, 128, 192))
    # Both round the same values to the same 8 bits, but for the few that division on a GPU leaves at the other side.
    assert_close(on_cpu(run, *args), auto_shard(run)(*args), EIGHT_BITS_TOLERANCE)
    exact = jnp.einsum("bse,ef->bsf", *args[:2])
    assert relative_error(auto_shard(run)(*args)[0], exact) > 2 * EIGHT_BITS_TOLERANCE  # it rounds


@pytest.mark.parametrize("draw", [jax.random.bits, jax.random.normal, jax.random.bernoulli])
def test_random_numbers_are_those_of_the_cpu(draw):
    def run(key: Any) -> Any:
        return draw(jax.random.wrap_key_data(key), shape=(64, 33))

    key = jax.random.key_data(jax.random.key(3))
    expected, found = on_cpu(run, key), auto_shard(run)(key)
    if draw is jax.random.normal:
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)  # its inverse error function differs
    else:
        np.testing.assert_array_equal(found, expected)

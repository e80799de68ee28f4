"""Frozen weights in few bits: their error, their bytes, and the gradient through them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autoshard.errors import AutoshardError, ConfigError
from autoshard.models.decoder.quantized_weight import NF4, QuantizedWeight, dequantized, quantized

# Largest error, in units of the largest magnitude that shares the scale: half a step of int8, and half the widest gap
# of nf4's values.
STEPS = {"int8": 0.5 / 127, "nf4": np.diff(NF4).max() / 2}


def made(form: str) -> tuple[jax.Array, QuantizedWeight, jax.Array]:
    """Return two stacked weights, the second of them quantized, and the values that its codes stand for."""
    weight = jax.random.normal(jax.random.key(0), (2, 4, 128, 6))
    codes, scale = quantized(weight, form, 1, 2)
    dense = jax.vmap(lambda codes, scale: dequantized(codes, scale, form, 2))(codes, scale)
    return weight, QuantizedWeight(codes[1], scale[1], form, 2, 1), dense


@pytest.mark.parametrize(("form", "bits"), [("int8", 8), ("nf4", 4)])
def test_values_are_within_half_a_step_and_take_few_bits(form: str, bits: int) -> None:
    weight, module, dense = made(form)
    assert module.codes[...].nbytes * 8 == weight[1].size * bits
    # Scales: one for each output, or for each 64 inputs of one.
    assert module.scale[...].size == (6 if form == "int8" else 4 * 2 * 6)
    shared = (1, 2) if form == "int8" else (3,)
    blocks = weight if form == "int8" else weight.reshape(2, 4, 2, 64, 6)
    largest = jnp.broadcast_to(jnp.max(jnp.abs(blocks), shared, keepdims=True), blocks.shape).reshape(weight.shape)
    error = jnp.max(jnp.abs(dense - weight) / largest)
    assert STEPS[form] * 0.9 < error < STEPS[form] * 1.01
    np.testing.assert_array_equal(module[...], dense[1])


@pytest.mark.parametrize("form", ["int8", "nf4"])
def test_a_product_and_its_gradient_are_those_of_the_dense_values_and_keep_only_codes(form: str) -> None:
    _, module, dense = made(form)
    x = jax.random.normal(jax.random.key(1), (2, 3, 4, 128))
    spec = "bshd,hde->bse"

    def value(weight, x):
        return jnp.sum(jnp.sin(weight.project(spec, x) if isinstance(weight, QuantizedWeight) else
                               jnp.einsum(spec, x, weight)))  # fmt: skip

    found, want = (jax.value_and_grad(value, 1)(weight, x) for weight in (module, dense[1]))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), found, want)
    # Beside the result, the backward pass keeps the codes and the scales.
    kept = jax.tree.leaves(jax.vjp(lambda x: module.project(spec, x), x)[1])
    assert sum(leaf.nbytes for leaf in kept) == module.codes[...].nbytes + module.scale[...].nbytes


def test_what_cannot_be_quantized_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"shape \[65, 4\] make blocks of 13, which is odd: use int8"):
        quantized(jnp.zeros((65, 4)), "nf4", 0, 1)
    monkeypatch.setitem(__import__("sys").modules, "qwix", None)
    with pytest.raises(AutoshardError, match="needs the package qwix: pip install 'autoshard"):
        quantized(jnp.zeros((64, 4)), "nf4", 0, 1)


def test_blocks_of_fp8_have_one_scale_each() -> None:
    codes = jax.random.normal(jax.random.key(0), (6, 4, 10)).astype(jnp.float8_e4m3fn)
    scale = jax.random.uniform(jax.random.key(1), (3, 1, 5))
    found = np.asarray(dequantized(codes, scale, "fp8", 1))
    for e, h, d in np.ndindex(*codes.shape):
        assert found[e, h, d] == np.float32(codes[e, h, d]) * np.float32(scale[e // 2, 0, d // 2])

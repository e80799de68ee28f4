"""Matrix products with operands in 8 bits, forward and backward, by the library qwix.

An operand is `values * scale`, with values in 8 bits and one scale for each row along the summed dimensions. So the
scales leave the sum:

    y[t, f]  = scale_x[t] * scale_w[f] * sum_e x8[t, e] w8[e, f]
    dx[t, e] = sum_f (dy[t, f] * scale_w[f])8 w8[e, f];      dw[e, f] = sum_t x8[t, e] (dy[t, f] * scale_x[t])8

A scale is the largest magnitude of its row over the largest number of the type. The gradient's product takes the values
of the forward pass again: the other operand's scale is multiplied into `dy`, which gets new scales. So only values in 8
bits and scales are saved for the backward pass. Quantization itself is differentiated as the identity.

`int8` uses int8 everywhere and sums exactly, in int32. `fp8` uses float8_e4m3fn, and float8_e5m2, which has more range,
for gradients (arXiv:2209.05433). Scales follow a row's maximum in each step; there are no running statistics.
"""

from __future__ import annotations

import dataclasses
import types
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from autoshard import _compat
from autoshard._shown import shown
from autoshard.errors import AutoshardError

_compat.exclude_from_user_code(__file__)  # plans name the product's caller, not this module

Quantization = Literal["none", "int8", "fp8"]

# quantization -> types of the operands of the forward pass, and of gradients.
_TYPES = {"int8": (jnp.int8, jnp.int8), "fp8": (jnp.float8_e4m3fn, jnp.float8_e5m2)}
# quantization -> how qwix computes scales. Its range of int8 ends at 127.5. A row's largest magnitude would lie there,
# on the boundary of two values, where the last bit decides. With this factor it is 127.
_CALIBRATION = {"int8": f"absmax,{127.5 / 127}", "fp8": "absmax"}


def quantized_einsum(spec: str, x: jax.Array, weight: jax.Array, quantization: Quantization) -> jax.Array:
    """Compute `einsum(spec, x, weight)` with operands in 8 bits, in the forward and in the backward pass.

    Args:
        spec: two operands and a result, such as `bse,ef->bsf`. A dimension of an operand is summed if the result does
            not have it. It is then a dimension of both operands.
        x: floating-point.
        weight: floating-point, in x's dtype.
        quantization: `int8` or `fp8`; with `none` the operands keep their dtype.

    Returns:
        The product in the dtype of `x`.

    Raises:
        AutoshardError: If qwix is not installed.
        ValueError: If the product cannot be quantized; the message says why.
    """
    if quantization == "none":
        return jnp.einsum(spec, x, weight)
    if reason := _refusal(spec, x, weight):
        raise ValueError(
            f"quantization is {quantization!r}, but the product {spec} of {jax.typeof(x)} and {jax.typeof(weight)} "
            f"cannot be quantized: {reason}; set quantization='none'"
        )
    _qwix(quantization)  # without it, raise here and not inside of a transformation
    lhs, rhs, out = _letters(spec)
    return _product(_Product(lhs, rhs, out, quantization), x, weight)


def project(
    spec: str,
    x: jax.Array,
    weight: nnx.Param,
    bias: nnx.Param | None = None,
    quantization: Quantization = "none",
) -> jax.Array:
    """Compute `einsum(spec, x, weight)` in x's dtype and add a bias, if given, to the trailing dimensions.

    The operands are quantized if `quantization` says so.
    """
    y = quantized_einsum(spec, x, weight[...].astype(x.dtype), quantization)
    return y if bias is None else y + align(bias[...].astype(x.dtype), y.ndim)


def align(x: jax.Array, ndim: int) -> jax.Array:
    """Add leading dimensions of size 1 up to `ndim`, so that no broadcast is implicit."""
    return x.reshape((1,) * (ndim - x.ndim) + x.shape)


def _letters(spec: str) -> list[str]:
    return spec.replace(" ", "").replace("->", ",").split(",")


def _refusal(spec: str, x: jax.Array, weight: jax.Array) -> str:
    """Return why a product cannot be quantized; empty if it can."""
    parts = _letters(spec)
    if len(parts) != 3 or not all(part.isalpha() and len({*part}) == len(part) for part in parts):
        return "it must have two operands and a result, each with distinct letters"
    lhs, rhs, out = (set(part) for part in parts)
    if lhs ^ rhs != (lhs ^ rhs) & out or not (lhs & rhs) - out:
        return "it must sum over dimensions that both operands have, and over no others"
    for each in (x, weight):
        if not jnp.issubdtype(each.dtype, jnp.floating) or each.dtype.itemsize > 4:
            return f"an operand has dtype {each.dtype}, and it must be bfloat16, float16 or float32"
        if not each.size:
            return "an operand is empty, so its rows have no largest magnitude"
    return ""


def _qwix(quantization: str) -> types.ModuleType:
    try:
        import qwix
    except ImportError as error:
        raise AutoshardError(
            f"quantization is {quantization!r}, which needs the package qwix; install it with "
            "pip install 'autoshard[quantized]'"
        ) from error
    return qwix


@shown
@dataclasses.dataclass(frozen=True)
class _Product:
    """The dimensions of the operands and of the result, one letter each, and the quantization."""

    lhs: str
    rhs: str
    out: str
    quantization: str

    def quantize(self, x: jax.Array, dims: str, summed_with: str, *, gradient: bool = False) -> Any:
        """Quantize an operand with the given dimensions. Those that the result `summed_with` lacks share a scale."""
        rows = [n for n, letter in enumerate(dims) if letter in summed_with]
        dtype, method = _TYPES[self.quantization][gradient], _CALIBRATION[self.quantization]
        with _standard_promotion():
            quantize = _qwix(self.quantization).quantize
            return quantize(x, dtype, channelwise_axes=rows, calibration_method=method)

    def multiply(self, spec: str, x: Any, y: Any, dtype: Any) -> jax.Array:
        """Multiply quantized operands."""
        with _standard_promotion():
            return _qwix(self.quantization).einsum(spec, x, y, preferred_element_type=dtype)

    def scaled(self, gradient: jax.Array, scale: jax.Array, dims: str) -> jax.Array:
        """Multiply the result's gradient by the scale of an operand with the given dimensions."""
        kept = [letter for letter in dims if letter in self.out]
        ordered = [letter for letter in self.out if letter in kept]
        rows = lax.squeeze(scale, [n for n, letter in enumerate(dims) if letter not in kept])
        rows = lax.transpose(rows, [kept.index(letter) for letter in ordered])
        others = [n for n, letter in enumerate(self.out) if letter not in kept]
        return gradient * lax.expand_dims(rows, others).astype(gradient.dtype)


def _standard_promotion() -> Any:
    """Qwix needs JAX's standard promotion of dtypes: it multiplies int32 sums by floating-point scales."""
    return jax.numpy_dtype_promotion("standard")


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(product: _Product, x: jax.Array, weight: jax.Array) -> jax.Array:
    return _forward(product, x, weight)[0]


def _forward(product: _Product, x: jax.Array, weight: jax.Array) -> tuple[jax.Array, Any]:
    x8 = product.quantize(x, product.lhs, product.out)
    w8 = product.quantize(weight, product.rhs, product.out)
    y = product.multiply(f"{product.lhs},{product.rhs}->{product.out}", x8, w8, x.dtype)
    return y, (x8.qvalue, x8.scale, w8.qvalue, w8.scale)


def _backward(product: _Product, saved: Any, gradient: jax.Array) -> tuple[jax.Array, jax.Array]:
    x8, x_scale, w8, w_scale = saved
    lhs, rhs, out = product.lhs, product.rhs, product.out
    for_x = product.quantize(product.scaled(gradient, w_scale, rhs), out, lhs, gradient=True)
    for_weight = product.quantize(product.scaled(gradient, x_scale, lhs), out, rhs, gradient=True)
    d_x = product.multiply(f"{out},{rhs}->{lhs}", for_x, w8, x_scale.dtype)
    return d_x, product.multiply(f"{lhs},{out}->{rhs}", x8, for_weight, w_scale.dtype)


_product.defvjp(_forward, _backward)

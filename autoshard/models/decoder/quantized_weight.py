r"""A frozen weight in 8 or 4 bits: quantized by the library qwix (QLoRA, arXiv:2305.14314), or as it is published.

.. math:: W \approx T[\text{codes}] \cdot \text{scale}

`int8` has one scale for each output. `nf4` has 16 values T that suit normally distributed weights, and one scale for
each block of 64 inputs of an output. On every machine and in every file, a byte has two codes: of input i of a block in
the low 4 bits, and of the input that is half a block later in the high ones. If a byte had the codes of two adjacent
outputs, TPUs would unpack them into an array whose last dimension is 2, and pad that dimension to 128.
`fp8` has a scale for each block of inputs and outputs, as published folders have (arXiv:2412.19437, section 3.3).
`mxfp4` has a power of two for each 32 inputs of an output (OCP Microscaling Formats, version 1.0), as gpt-oss has. Its
codes are a dtype of JAX: two share a byte on TPUs, and each takes a byte on CPUs.

A product computes the weight in the dtype of x, and its gradient computes it again: a saved copy would take the memory
that quantization saves. There is no gradient of the weight. With few tokens, a product with `fp8` or `mxfp4` does not
compute the weight: see `block_scales/product.py`.

`project` computes the product with any weight of a decoder: a plain one, a quantized one, or one with an adapter.
"""

from __future__ import annotations

from functools import partial
from types import EllipsisType
from typing import Any, Literal, Protocol

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from autoshard import _compat
from autoshard.errors import AutoshardError, ConfigError
from autoshard.models.block_scales import (
    ScaledCodes,
    StackedCodes,
    decoded,
    joined_inputs,
    scaled_product,
    split_inputs,
)
from autoshard.models.quantized import align
from autoshard.models.stack import WholeStack

_compat.exclude_from_user_code(__file__)  # plans name the product's caller, not this module

WeightFormat = Literal["none", "int8", "nf4"]
BLOCK = 64  # inputs that share a scale of nf4 (arXiv:2305.14314, section 3)
IN_BLOCKS = ("fp8", "mxfp4")  # the forms in which folders are published
# Appendix E of arXiv:2305.14314.
NF4 = (-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
       -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634,
       0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0)  # fmt: skip


class QuantizedWeight(nnx.Module):
    """A frozen weight `[*inputs, *outputs]` in few bits. In stacked layers its arrays have a leading dimension.

    Parameters, where `scale` is float32, or float8_e8m0fnu with `mxfp4`:

        form   codes                                                   scale
        int8   int8 [*inputs, *outputs]                                [*outputs]
        nf4    uint8 [*inputs, *outputs], half as many last inputs     [*inputs, *outputs], the last inputs in blocks
        fp8    float8_e4m3fn [*inputs, *outputs]                       [*inputs, *outputs], each dimension in blocks
        mxfp4  float4_e2m1fn [*inputs, *outputs]                       [*inputs, *outputs], the inputs in blocks

    Args:
        codes: the codes.
        scale: the scales.
        form: `int8`, `nf4`, `fp8` or `mxfp4`.
        inputs: number of dimensions of the inputs.
        outputs: number of dimensions of the outputs.
    """

    def __init__(self, codes: jax.Array, scale: jax.Array, form: str, inputs: int, outputs: int):
        self.codes: nnx.Variable[jax.Array] = nnx.Param(codes)
        self.scale = nnx.Param(scale)
        # The number of the layer, int32 `[1]`, where `with_readable_codes` made the codes those of all layers.
        self.layer: nnx.Variable[jax.Array] | None = None
        self.form, self.inputs, self.outputs = form, inputs, outputs

    def __getitem__(self, index: EllipsisType) -> jax.Array:
        """Return the weight of one layer, in float32."""
        return _values(self._codes(), self.scale[...], self.form, self.inputs, self.outputs)

    def scaled_codes(self) -> ScaledCodes | StackedCodes | None:
        """Return the weights of a layer's experts as codes; None unless they are matrices with scales of blocks."""
        codes, scale = self.codes[...], self.scale[...]
        if self.form not in IN_BLOCKS or (self.inputs, self.outputs, scale.ndim) != (1, 1, 3):
            return None
        if self.layer is not None:
            return StackedCodes(codes, scale, self.layer[...])
        if self.form == "mxfp4":
            return ScaledCodes(codes, scale).stacked
        return ScaledCodes(split_inputs(codes, scale, 1, 1), scale)

    def project(self, spec: str, x: jax.Array) -> jax.Array:
        """Compute `einsum(spec, x, weight)` in x's dtype. In `spec` the weight's input dimensions come first."""
        return _product((spec, self.form, self.inputs, self.outputs), x, self._codes(), self.scale[...])

    def _codes(self) -> jax.Array:
        """Return the codes of one layer."""
        codes = self.codes[...]
        return codes if self.layer is None else lax.dynamic_index_in_dim(codes, self.layer[0], keepdims=False)


def quantized(weight: jax.Array, form: str, stacked: int, inputs: int) -> tuple[jax.Array, jax.Array]:
    """Quantize a weight `[*stacked, *inputs, *outputs]`. Returns its codes and its scales.

    Raises:
        AutoshardError: qwix is not installed.
        ConfigError: the weight does not divide into blocks, or into pairs of codes.
    """
    try:
        import qwix
    except ImportError as error:
        raise AutoshardError(
            f"lora.quantize is {form!r}, which needs the package qwix: pip install 'autoshard[quantized]'"
        ) from error
    own = range(stacked, stacked + inputs)
    last = own[-1]
    if form == "int8":
        others, tiled = [n for n in range(weight.ndim) if n not in own], {}
    else:
        block = block_of(weight.shape[last])
        if block % 2:
            raise ConfigError(
                f"lora.quantize is {form!r}, but {weight.shape[last]} inputs of a weight of shape {list(weight.shape)} "
                f"make blocks of {block}, which is odd: use int8"
            )
        others, tiled = [n for n in range(weight.ndim) if n != last], {last: block}
    with jax.numpy_dtype_promotion("standard"):  # qwix needs it
        found = qwix.quantize(
            weight.astype(jnp.float32), jnp.int8 if form == "int8" else form, channelwise_axes=others, tiled_axes=tiled
        )
    if form == "int8":
        return found.qvalue, jnp.squeeze(found.scale, tuple(own))
    shape = weight.shape
    halves = found.qvalue.astype(jnp.uint8).reshape(*shape[:last], -1, 2, block // 2, *shape[last + 1 :])
    low, high = (jnp.take(halves, n, axis=last + 1) for n in range(2))
    return (low | (high << 4)).reshape(*shape[:last], -1, *shape[last + 1 :]), found.scale


def block_of(size: int) -> int:
    """Return the number of inputs that share a scale of nf4: 64, or the largest divisor of the size below.

    >>> block_of(4096), block_of(48)
    (64, 48)
    """
    return next(n for n in range(min(BLOCK, size), 0, -1) if size % n == 0)


def dequantized(codes: jax.Array, scale: jax.Array, form: str, inputs: int) -> jax.Array:
    """Return the weight of one layer `[*inputs, *outputs]`, in float32."""
    if form == "int8":
        return codes.astype(jnp.float32) * scale.reshape((1,) * inputs + scale.shape)
    if form in IN_BLOCKS:
        return decoded(codes, scale)
    last, shape = inputs - 1, codes.shape
    halves = codes.reshape(*shape[:last], scale.shape[last], -1, *shape[inputs:])
    blocks = _nf4_values(jnp.concatenate([halves & 15, halves >> 4], axis=inputs))
    return (blocks * jnp.expand_dims(scale, inputs)).reshape(*shape[:last], -1, *shape[inputs:])


def _nf4_values(codes: jax.Array) -> jax.Array:
    """Return T[codes], by one selection for each bit. A gather would need an index of 32 bits for each element."""
    values: list[Any] = [jnp.float32(value) for value in NF4]
    for bit in range(4):
        is_set = (codes & (1 << bit)) != 0
        values = [jnp.where(is_set, high, low) for low, high in zip(values[::2], values[1::2], strict=True)]
    return values[0]


def with_readable_codes(layers: nnx.Module) -> nnx.Module:
    """Return layers whose codes products with few tokens read in place, in a scan over the layers by `extend_layers`.

    The inputs of fp8 codes are split into blocks: see `block_scales/blocks.py`. Codes of 4 bits of stacked experts are
    whole stacks, which a kernel reads.
    """
    layers = nnx.merge(*nnx.split(layers))
    for one in [node for _, node in nnx.iter_graph(layers) if isinstance(node, QuantizedWeight)]:
        codes, scale = one.codes[...], one.scale[...]
        if one.form == "fp8":
            one.codes = nnx.Param(split_inputs(codes, scale, one.inputs, one.outputs))
        elif one.form == "mxfp4" and scale.ndim - one.inputs - one.outputs == 2:  # layers and experts
            one.codes = WholeStack(codes)
            one.layer = nnx.data(nnx.Variable(lax.broadcasted_iota(jnp.int32, (codes.shape[0], 1), 0)))
    return layers


_Static = tuple[str, str, int, int]  # spec, form, inputs, outputs


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(static: _Static, x: jax.Array, codes: jax.Array, scale: jax.Array) -> jax.Array:
    spec, form, inputs, outputs = static
    if form in IN_BLOCKS:
        return scaled_product(spec, x, split_inputs(codes, scale, inputs, outputs), scale, inputs)
    return jnp.einsum(spec, x, _values(codes, scale, form, inputs, outputs).astype(x.dtype))


def _forward(static: _Static, x: jax.Array, codes: jax.Array, scale: jax.Array) -> tuple[jax.Array, Any]:
    return _product(static, x, codes, scale), (codes, scale)


def _backward(static: _Static, saved: Any, gradient: jax.Array) -> tuple[jax.Array, None, None]:
    spec, form, inputs, outputs = static
    operands, of_result = spec.split("->")
    x_dims, weight = operands.split(",")
    codes, scale = saved
    dense = _values(codes, scale, form, inputs, outputs).astype(gradient.dtype)
    return jnp.einsum(f"{of_result},{weight}->{x_dims}", gradient, dense), None, None


_product.defvjp(_forward, _backward)


def _values(codes: jax.Array, scale: jax.Array, form: str, inputs: int, outputs: int) -> jax.Array:
    """Return the weight of one layer, in float32. Inputs of codes with scales of blocks may be split into these."""
    if form in IN_BLOCKS:
        codes = joined_inputs(codes, scale, inputs, outputs)
    return dequantized(codes, scale, form, inputs)


class Weight(Protocol):
    """A module in the place of a weight, which computes its own products: quantized, or with an adapter."""

    def project(self, spec: str, x: jax.Array) -> jax.Array: ...  # noqa: D102


def times(spec: str, x: jax.Array, weight: nnx.Param | Weight) -> jax.Array:
    """Compute `einsum(spec, x, weight)` in x's dtype."""
    if isinstance(weight, nnx.Variable):
        return jnp.einsum(spec, x, weight[...].astype(x.dtype))
    return weight.project(spec, x)


def project(spec: str, x: jax.Array, weight: nnx.Param | Weight, bias: nnx.Param | None = None) -> jax.Array:
    """Compute `einsum(spec, x, weight)` in x's dtype, and add a bias to the trailing dimensions."""
    y = times(spec, x, weight)
    return y if bias is None else y + align(bias[...].astype(x.dtype), y.ndim)

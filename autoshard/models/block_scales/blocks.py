"""The blocks of a weight `[*leading, *inputs, *outputs]`, and the values of its codes.

Scales are `[*leading, *inputs, *outputs]`, where each dimension counts the blocks of the weight's dimension. Products
read codes whose inputs are split into blocks: `[*leading, blocks, size, blocks, size, ..., *outputs]`, with the number
of blocks and the size of a block for each input. On TPUs, this reshape moves nothing if it is done before a scan over
layers. In the scan, XLA copies the layer's codes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from autoshard._shown import shown


@shown
class ScaledCodes(NamedTuple):
    """Matrices `[experts, inputs, outputs]` as codes and scales.

    Attributes:
        codes: `[experts, blocks, size, outputs]`, with the inputs split into blocks.
        scale: `[experts, blocks, blocks of outputs]`, float32 or powers of two in 8 bits.
    """

    codes: jax.Array
    scale: jax.Array

    @property
    def ndim(self) -> int:
        """Number of dimensions of the matrices."""
        return self.scale.ndim

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the matrices."""
        return joined_inputs(self.codes, self.scale, 1, 1).shape

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return int(jnp.finfo(self.codes.dtype).bits)

    def joined(self) -> ScaledCodes:
        """Return the same with inputs that are not split into blocks."""
        return ScaledCodes(joined_inputs(self.codes, self.scale, 1, 1), self.scale)

    @property
    def of_layer(self) -> ScaledCodes:
        """The same: the codes are those of one layer."""
        return self

    @property
    def stacked(self) -> StackedCodes:
        """The same as the only layer of a stack."""
        return StackedCodes(joined_inputs(self.codes, self.scale, 1, 1)[None], self.scale, jnp.zeros(1, jnp.int32))

    @property
    def values(self) -> jax.Array:
        """The matrices, in float32."""
        return decoded(joined_inputs(self.codes, self.scale, 1, 1), self.scale)

    def in_dtype(self, dtype: Any) -> jax.Array:
        """Return the matrices in this dtype.

        Codes of 4 bits with powers of two are exact in bfloat16, so they are decoded in it. In float32, XLA:TPU would
        write the repeated scales to memory, because they do not fit on the chip.
        """
        exact = self.bits < 8 and dtype == jnp.bfloat16
        codes = joined_inputs(self.codes, self.scale, 1, 1)
        return decoded(codes, self.scale, jnp.bfloat16 if exact else jnp.float32).astype(dtype)


@shown
class StackedCodes(NamedTuple):
    """Matrices `[experts, inputs, outputs]` of one layer as codes and scales, with the codes of all layers.

    A kernel reads the codes of the layer in place. XLA would copy a slice for it. Inputs are not split into blocks: XLA
    would copy a stack that is split outside of the loop over its layers.

    Attributes:
        codes: `[layers, experts, inputs, outputs]`.
        scale: of the layer, `[experts, blocks, blocks of outputs]`.
        layer: the number of the layer, int32 `[1]`.
    """

    codes: jax.Array
    scale: jax.Array
    layer: jax.Array

    @property
    def ndim(self) -> int:
        """Number of dimensions of the matrices."""
        return self.scale.ndim

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return int(jnp.finfo(self.codes.dtype).bits)

    @property
    def of_layer(self) -> ScaledCodes:
        """The same with the codes of the layer alone."""
        codes = lax.dynamic_index_in_dim(self.codes, self.layer[0], keepdims=False)
        return ScaledCodes(split_inputs(codes, self.scale, 1, 1), self.scale)

    @property
    def stacked(self) -> StackedCodes:
        """The same."""
        return self


def is_split(codes: jax.Array, scale: jax.Array) -> bool:
    """Return whether the inputs of codes are split into blocks."""
    return codes.ndim > scale.ndim


def split_inputs(codes: jax.Array, scale: jax.Array, inputs: int, outputs: int) -> jax.Array:
    """Split the inputs of codes into blocks.

    Args:
        codes: `[*leading, *inputs, *outputs]`.
        scale: the number of its blocks in each dimension.
        inputs: number of dimensions of the inputs.
        outputs: number of dimensions of the outputs.

    >>> codes, scale = jnp.zeros((5, 12, 6)), jnp.zeros((5, 3, 2))
    >>> split_inputs(codes, scale, inputs=1, outputs=1).shape
    (5, 3, 4, 6)
    """
    if is_split(codes, scale):
        return codes
    first, last = codes.ndim - inputs - outputs, codes.ndim - outputs
    pairs = zip(scale.shape[first:last], codes.shape[first:last], strict=True)
    split = [size for count, whole in pairs for size in (count, whole // count)]
    return codes.reshape(*codes.shape[:first], *split, *codes.shape[last:])


def joined_inputs(codes: jax.Array, scale: jax.Array, inputs: int, outputs: int) -> jax.Array:
    """Return codes with whole inputs: the inverse of `split_inputs`."""
    if not is_split(codes, scale):
        return codes
    last = codes.ndim - outputs
    first = last - 2 * inputs
    whole = [codes.shape[n] * codes.shape[n + 1] for n in range(first, last, 2)]
    return codes.reshape(*codes.shape[:first], *whole, *codes.shape[last:])


def decoded(codes: jax.Array, scale: jax.Array, dtype: Any = jnp.float32) -> jax.Array:
    """Return codes times the scales of their blocks, computed in a dtype. Inputs of the codes are not split.

    The size of each dimension is a multiple of its number of blocks. Scales are repeated along the last dimension,
    because on TPUs a reshape that splits the last dimension of the codes is a copy.
    """
    scale = repeated(scale.astype(dtype), codes.shape, first=scale.ndim - 1)
    elements: list[int] = []
    blocks: list[int] = []
    for size, count in zip(codes.shape, scale.shape, strict=True):
        whole = count in (1, size)
        elements += [size] if whole else [count, size // count]
        blocks += [count] if whole else [count, 1]
    return (codes.astype(dtype).reshape(elements) * scale.reshape(blocks)).reshape(codes.shape)


def repeated(scale: jax.Array, shape: tuple[int, ...], first: int) -> jax.Array:
    """Return scales that are repeated along their dimensions from `first` on, where there are several blocks.

    Args:
        scale: the scales.
        shape: the shape of the weight.
        first: number of the first of these dimensions.
    """
    for n in range(first, scale.ndim):
        if 1 < scale.shape[n] < shape[n]:
            scale = jnp.repeat(scale, shape[n] // scale.shape[n], axis=n)
    return scale

r"""A weight with a low-rank adapter (LoRA, arXiv:2106.09685): :math:`W + s A B`.

    y = x W + s (x A) B

The product A B is not computed, so the adapter costs little time and memory.
"""

from __future__ import annotations

import string
from types import EllipsisType

import jax
import jax.numpy as jnp
from flax import nnx


class Adapted(nnx.Module):
    """A weight and its adapter, which take the place of the weight.

    Parameters: `base [*inputs, *outputs]`, `lora_a [*inputs, rank]` and `lora_b [rank, *outputs]`. In stacked layers
    each has a leading dimension of layers.

    Args:
        base: the weight.
        lora_a: the first factor.
        lora_b: the second factor.
        scale: the factor of their product.
    """

    def __init__(self, base: nnx.Param, lora_a: jax.Array, lora_b: jax.Array, scale: float):
        self.base, self.lora_a, self.lora_b = base, nnx.Param(lora_a), nnx.Param(lora_b)
        self.scale = scale

    def __getitem__(self, index: EllipsisType) -> jax.Array:
        """Return the merged weight of one layer, in float32, in the place of the values of a weight."""
        product = jnp.tensordot(self.lora_a[...].astype(jnp.float32), self.lora_b[...].astype(jnp.float32), 1)
        return self.base[...].astype(jnp.float32) + self.scale * product

    def project(self, spec: str, x: jax.Array) -> jax.Array:
        """Compute `einsum(spec, x, weight)` in x's dtype. In `spec` the weight's input dimensions come first."""
        operands, outputs = spec.split("->")
        inputs, weight = operands.split(",")
        inner = "".join(name for name in weight if name not in outputs)
        outer = weight.removeprefix(inner)
        kept = "".join(name for name in inputs if name not in inner)
        rank = next(name for name in string.ascii_letters if name not in spec)
        small = jnp.einsum(f"{inputs},{inner}{rank}->{kept}{rank}", x, self.lora_a[...].astype(x.dtype))
        change = jnp.einsum(f"{kept}{rank},{rank}{outer}->{outputs}", small, self.lora_b[...].astype(x.dtype))
        return jnp.einsum(spec, x, self.base[...].astype(x.dtype)) + jnp.asarray(self.scale, x.dtype) * change

r"""A weight with a low-rank adapter: LoRA (arXiv:2106.09685) or DoRA (arXiv:2402.09353).

.. math:: V = W + s A B;\quad W' = V\ \text{(LoRA)},\quad W' = V \operatorname{diag}(m / \lVert V \rVert)\ \text{(DoRA)}

where the norms are those of the columns, over the inputs. The product A B is not computed, so the adapter costs little
time and memory:

    y = x W + s (x A) B                 DoRA multiplies it by m / norms
    norms^2 = sum W^2 + 2 s sum (A' W) B + s^2 sum B (A' A) B

As in section 4.3 of the DoRA paper, the norms are constants for the gradient.
"""

from __future__ import annotations

import string
from types import EllipsisType
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from autoshard.models.decoder.quantized_weight import QuantizedWeight, times


class Adapted(nnx.Module):
    """A weight and its adapter, which take the place of the weight.

    Parameters: `base [*inputs, *outputs]`, `lora_a [*inputs, rank]`, `lora_b [rank, *outputs]`, and with DoRA
    `lora_scale [*outputs]`, the magnitudes. In stacked layers each has a leading dimension of layers.

    Args:
        base: the weight, which may be quantized.
        lora_a: the first factor.
        lora_b: the second factor.
        scale: the factor of their product.
        lora_scale: the magnitudes of DoRA, or None for LoRA.
    """

    def __init__(
        self,
        base: nnx.Param | QuantizedWeight,
        lora_a: jax.Array,
        lora_b: jax.Array,
        scale: float,
        lora_scale: jax.Array | None = None,
    ):
        self.base, self.lora_a, self.lora_b = base, nnx.Param(lora_a), nnx.Param(lora_b)
        self.lora_scale = None if lora_scale is None else nnx.Param(lora_scale)
        self.scale = scale

    def __getitem__(self, index: EllipsisType) -> jax.Array:
        """Return the merged weight of one layer, in float32, in the place of the values of a weight."""
        product = jnp.tensordot(self.lora_a[...].astype(jnp.float32), self.lora_b[...].astype(jnp.float32), 1)
        merged = self.base[...].astype(jnp.float32) + self.scale * product
        factors = self._factors()
        return merged if factors is None else merged * jnp.broadcast_to(factors, merged.shape)

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
        y = times(spec, x, self.base) + jnp.asarray(self.scale, x.dtype) * change
        factors = self._factors()
        # The result's last dimensions are the weight's outputs.
        return y if factors is None else y * jnp.broadcast_to(factors.astype(x.dtype), y.shape)

    def _factors(self) -> jax.Array | None:
        """Return the magnitudes over the norms, float32 `[*outputs]`; None without magnitudes."""
        if self.lora_scale is None:
            return None
        weight, a, b = (
            lax.stop_gradient(each[...].astype(jnp.float32)) for each in (self.base, self.lora_a, self.lora_b)
        )
        inner, outer = string.ascii_lowercase[: a.ndim - 1], string.ascii_uppercase[: b.ndim - 1]
        precise: dict[str, Any] = {"precision": lax.Precision.HIGHEST}
        mixed = jnp.einsum(f"{inner}y,{inner}{outer}->y{outer}", a, weight, **precise)
        small = jnp.einsum(f"{inner}y,{inner}z->yz", a, a, **precise)
        cross = 2 * self.scale * mixed + self.scale**2 * jnp.einsum(f"yz,z{outer}->y{outer}", small, b, **precise)
        square = jnp.sum(jnp.square(weight), range(len(inner))) + jnp.sum(cross * b, axis=0)
        return self.lora_scale[...].astype(jnp.float32) * lax.rsqrt(square)


def column_norms(weight: jax.Array, stacked: int, inputs: int) -> jax.Array:
    """Return the norms of a weight over its inputs, float32: the magnitudes with which an adapter of DoRA starts.

    Args:
        weight: `[*stacked, *inputs, *outputs]`.
        stacked: number of leading dimensions.
        inputs: number of dimensions of the inputs.
    """
    square = jnp.square(weight.astype(jnp.float32))
    return jnp.sqrt(jnp.sum(square, range(stacked, stacked + inputs)))

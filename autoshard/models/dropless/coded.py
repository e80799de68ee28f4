"""Experts whose matrices are stored as codes and scales. Each kind of experts is one operator, as in `operators`.

The matrices are frozen: they have no gradient.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from autoshard.errors import AutoshardWarning
from autoshard.kernels.grouped.call import GroupedCall, grouped_call
from autoshard.kernels.grouped.codes.products import kernel_problem
from autoshard.models.block_scales import ScaledCodes, StackedCodes
from autoshard.models.dropless.forms import apply_experts, by_sorting
from autoshard.models.dropless.operators import chosen_biases, limited_of
from autoshard.models.dropless.units import swiglu
from autoshard.spmdrules.core.layer_stacks import taking_stacks
from autoshard.spmdrules.custom_ops.operator import operator

# The embedding is split into `n` blocks of size `d`, and the hidden units into `m` blocks of size `f`. Each matrix is a
# pair of operands: its codes, then its scales.
_TOKENS = "b s (n d), b s k, b s k, e"
_CODED = f"{_TOKENS}, e n d (m f), e n m, e n d (m f), e n m, e m f (n d), e m n"
# Each output has its own scales, and `gate` and `up` have biases. The operands with codes have the codes of all layers
# `l`. The last operand says which layer is used.
_LIMITED = (
    f"{_TOKENS}, l e (n d) (m f), e n (m f), l e (n d) (m f), e n (m f), e (m f), e (m f), "
    "l e (m f) (n d), e m (n d), 1"
)


Codes = ScaledCodes | StackedCodes


def experts_in_codes(
    x: jax.Array, gates: jax.Array, chosen: jax.Array, gate: Codes, up: Codes, down: Codes
) -> jax.Array:
    """Compute `experts` with a gate, whose matrices are codes and scales. The matrices have no gradient.

    Args:
        x: `[batch, seq, embed]`.
        gates: `[batch, seq, top_k]`.
        chosen: indices of the chosen experts, integers `[batch, seq, top_k]`.
        gate: `[experts, embed, ffn]`.
        up: `[experts, embed, ffn]`, in as many blocks as `gate`.
        down: `[experts, ffn, embed]`, in as many blocks of each dimension as `up`.

    Returns:
        `[batch, seq, embed]` in the dtype of `x`.
    """
    gate, up, down = gate.of_layer, up.of_layer, down.of_layer
    count = up.scale.shape[0]
    options = {"count": count, "call": _call(x.dtype, gate, up, down)}
    return coded_swiglu_experts(
        x, gates, chosen.astype(jnp.int32), lax.iota(jnp.int32, count), *gate, *up, *down, **options
    )


def same_blocks(gate: Codes, up: Codes, down: Codes) -> bool:
    """Return whether all matrices split each dimension into the same blocks. `experts_in_codes` requires it."""
    experts, embed, ffn = up.scale.shape
    return gate.scale.shape == up.scale.shape and down.scale.shape == (experts, ffn, embed)


def scale_of_each_output(*weights: Codes) -> bool:
    """Return whether each output of each matrix has its own scales. `limited_experts_in_codes` requires it."""
    return all(one.scale.shape[-1] == one.codes.shape[-1] for one in weights)


def limited_experts_in_codes(
    x: jax.Array,
    gates: jax.Array,
    chosen: jax.Array,
    weights: Sequence[Codes],
    biases: tuple[jax.Array, jax.Array, jax.Array],
    *,
    limit: float,
    alpha: float,
) -> jax.Array:
    """Compute `limited_experts`, whose matrices are codes and scales. The matrices have no gradient.

    Args:
        x: `[batch, seq, embed]`.
        gates: `[batch, seq, top_k]`.
        chosen: indices of the chosen experts, integers `[batch, seq, top_k]`.
        weights: gate and up `[experts, embed, ffn]`, down `[experts, ffn, embed]`, with scales of each output. If one
            of them is `StackedCodes`, all are, and of the same layer.
        biases: those of gate and up `[experts, ffn]`, and of down `[experts, embed]`.
        limit: as in `limited_experts`.
        alpha: the same.

    Returns:
        `[batch, seq, embed]` in the dtype of `x`.
    """
    gate, up, down = (one.stacked for one in weights)
    b_gate, b_up, b_down = biases
    count = up.scale.shape[0]
    tokens = x, gates, chosen.astype(jnp.int32), lax.iota(jnp.int32, count)
    options = {"count": count, "call": _call(x.dtype, gate, up, down), "limit": limit, "alpha": alpha}
    y = coded_limited_experts(*tokens, *gate[:2], *up[:2], b_gate, b_up, *down, **options)
    return y + chosen_biases(gates, chosen, b_down).astype(x.dtype)


def _call(dtype: Any, *weights: Codes) -> GroupedCall:
    """Return the implementation of grouped products. Warn if it decodes codes of 4 bits that a kernel could read."""
    call = grouped_call(dtype)
    stacks = [one.stacked for one in weights if one.bits < 8]
    problems = {kernel_problem(call, dtype, one.codes, one.scale) for one in stacks} - {""}
    if call.kernel == "megablox" and problems:
        warnings.warn(
            f"experts in codes: the kernel that reads codes of 4 bits cannot run: {'; '.join(sorted(problems))}. The "
            "matrices are decoded before each product.",
            AutoshardWarning,
            stacklevel=3,
        )
    return call


def _scaled_codes(operands: Sequence[jax.Array]) -> list[ScaledCodes]:
    return [ScaledCodes(*operands[n : n + 2]) for n in range(0, len(operands), 2)]


@operator(f"{_CODED}, b s (n d) -> b s (n d), b s k; reduce e m f; whole n d k")
def coded_swiglu_experts_gradients(*operands: jax.Array, **options: Any) -> tuple[jax.Array, jax.Array]:
    """Compute the cotangents of `coded_swiglu_experts`' tokens and gates."""
    x, gates, chosen, own_experts, *coded, cotangent = operands
    weights = _scaled_codes(coded)
    _, pullback = jax.vjp(
        lambda x, gates: by_sorting(swiglu, x, gates, chosen, own_experts, *weights, **options), x, gates
    )
    return pullback(cotangent)


def _backward_of_codes(operands: Sequence[jax.Array], cotangent: jax.Array, **options: Any) -> Any:
    return *coded_swiglu_experts_gradients(*operands, cotangent, **options), *(None for _ in operands[2:])


@operator(f"{_CODED} -> b s (n d); reduce e m f; whole n d k", vjp=(None, _backward_of_codes))
def coded_swiglu_experts(*operands: jax.Array, **options: Any) -> jax.Array:
    """Apply the experts with indices `own_experts`, whose `gate`, `up` and `down` are `ScaledCodes`."""
    return apply_experts(swiglu, *operands[:4], *_scaled_codes(operands[4:]), **options)


def _limited_weights(operands: Sequence[jax.Array]) -> list[Any]:
    """Return the matrices and the biases, in the order of `apply_experts`."""
    *gate_and_up, b_gate, b_up, codes, scale, layer = operands
    gate, up, down = (StackedCodes(*one, layer) for one in (*_scaled_codes(gate_and_up), (codes, scale)))
    return [gate, up, b_gate, b_up, down]


@operator(f"{_LIMITED}, b s (n d) -> b s (n d), b s k, e (m f), e (m f); reduce b s e m f; whole l n d k")
@taking_stacks("l", layer=12)
def coded_limited_experts_gradients(*operands: jax.Array, **options: Any) -> tuple[jax.Array, ...]:
    """Compute the cotangents of `coded_limited_experts`' tokens, gates and biases."""
    x, gates, chosen, own_experts, *coded, cotangent = operands
    gate, up, b_gate, b_up, down = _limited_weights(coded)
    unit = limited_of(options)
    _, pullback = jax.vjp(
        lambda x, gates, *b: by_sorting(unit, x, gates, chosen, own_experts, gate, up, *b, down, **options),
        x,
        gates,
        b_gate,
        b_up,
    )
    return pullback(cotangent)


def _backward_of_limited(operands: Sequence[jax.Array], cotangent: jax.Array, **options: Any) -> Any:
    x, gates, b_gate, b_up = coded_limited_experts_gradients(*operands, cotangent, **options)
    return x, gates, None, None, None, None, None, None, b_gate, b_up, None, None, None


@operator(f"{_LIMITED} -> b s (n d); reduce e m f; whole l n d k", vjp=(None, _backward_of_limited))
@taking_stacks("l", layer=12)
def coded_limited_experts(*operands: jax.Array, **options: Any) -> jax.Array:
    """Apply the experts with indices `own_experts`: matrices in codes, and the biases of `gate` and `up`."""
    return apply_experts(limited_of(options), *operands[:4], *_limited_weights(operands[4:]), **options)

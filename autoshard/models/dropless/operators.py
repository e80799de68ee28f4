"""The experts of all tokens as one operator, which a plan shards.

A sort over the whole batch may move every row to another device, so no plan could keep tokens local. Therefore all of
this is one operator: each shard computes its own tokens, for its own experts and its own part of their hidden size, and
so its term of the sum over experts and hidden units. The values do not depend on the order of rows. Like every function
with a `custom_vjp`, the operator has no forward-mode derivative.

Gates multiply the hidden units, not the output of an expert. The gates' gradients then need no matrix product of their
own. The backward pass recomputes the hidden units.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from autoshard.kernels.grouped.call import grouped_call
from autoshard.models.block_scales import ScaledCodes
from autoshard.models.dropless.forms import apply_experts, by_sorting
from autoshard.models.dropless.units import Unit, gelu, limited, swiglu
from autoshard.spmdrules.custom_ops.operator import operator

_TOKENS = "b s d, b s k, b s k, e"
_GELU, _SWIGLU = "e d f, e f d", "e d f, e d f, e f d"
_LIMITED = "e d f, e d f, e f, e f, e f d"
# Codes and scales: `n` blocks of `d` inputs, and `m` blocks of `f` hidden units.
_CODED = "b s (n d), b s k, b s k, e, e n d (m f), e n m, e n d (m f), e n m, e m f (n d), e m n"


def experts(
    x: jax.Array, gates: jax.Array, chosen: jax.Array, up: jax.Array, down: jax.Array, gate: jax.Array | None = None
) -> jax.Array:
    """Compute `sum over k of gates[k] * expert[chosen[k]](x)`.

    An expert is `gelu(x up) down`, or `(silu(x gate) * x up) down` with a gate.

    Args:
        x: `[batch, seq, embed]`.
        gates: `[batch, seq, top_k]`.
        chosen: indices of the chosen experts, integers `[batch, seq, top_k]`.
        up: `[experts, embed, ffn]`.
        down: `[experts, ffn, embed]`.
        gate: `[experts, embed, ffn]`, or None.

    Returns:
        `[batch, seq, embed]` in the dtype of `x`.
    """
    chosen = chosen.astype(jnp.int32)
    own_experts = lax.iota(jnp.int32, up.shape[0])  # sharded like the experts: the indices of a shard's experts
    options = {"count": up.shape[0], "call": grouped_call(x.dtype)}
    if gate is None:
        return gelu_experts(x, gates, chosen, own_experts, up, down, **options)
    return swiglu_experts(x, gates, chosen, own_experts, gate, up, down, **options)


def experts_in_codes(
    x: jax.Array, gates: jax.Array, chosen: jax.Array, gate: ScaledCodes, up: ScaledCodes, down: ScaledCodes
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
    count = up.scale.shape[0]
    options = {"count": count, "call": grouped_call(x.dtype)}
    return coded_swiglu_experts(
        x, gates, chosen.astype(jnp.int32), lax.iota(jnp.int32, count), *gate, *up, *down, **options
    )


def same_blocks(gate: ScaledCodes, up: ScaledCodes, down: ScaledCodes) -> bool:
    """Return whether all matrices divide each dimension into the same blocks. `experts_in_codes` needs this."""
    experts, embed, ffn = up.scale.shape
    return gate.scale.shape == up.scale.shape and down.scale.shape == (experts, ffn, embed)


def limited_experts(
    x: jax.Array,
    gates: jax.Array,
    chosen: jax.Array,
    weights: tuple[jax.Array, jax.Array, jax.Array],
    biases: tuple[jax.Array, jax.Array, jax.Array],
    *,
    limit: float,
    alpha: float,
) -> jax.Array:
    """Compute `sum over k of gates[k] * expert[chosen[k]](x)` for experts with biases and limited gated units.

    An expert is `((clip(u, -limit, limit) + 1) * g * sigmoid(alpha g)) down + b_down`, with `u = x up + b_up` and
    `g = min(x gate + b_gate, limit)` (gpt-oss, arXiv:2508.10925).

    Args:
        x: `[batch, seq, embed]`.
        gates: `[batch, seq, top_k]`.
        chosen: indices of the chosen experts, integers `[batch, seq, top_k]`.
        weights: gate and up `[experts, embed, ffn]`, down `[experts, ffn, embed]`.
        biases: those of gate and up `[experts, ffn]`, and of down `[experts, embed]`.
        limit: see above.
        alpha: see above.

    Returns:
        `[batch, seq, embed]` in the dtype of `x`.
    """
    (gate, up, down), (b_gate, b_up, b_down) = weights, biases
    count = up.shape[0]
    own_experts = lax.iota(jnp.int32, count)
    options = {"count": count, "call": grouped_call(x.dtype), "limit": limit, "alpha": alpha}
    y = limited_unit_experts(x, gates, chosen.astype(jnp.int32), own_experts, gate, up, b_gate, b_up, down, **options)
    # A token adds the bias of each of its experts, times its gate.
    picked = chosen[..., None] == jnp.arange(count)
    of_expert = jnp.sum(jnp.where(picked, gates[..., None], 0.0), axis=2).astype(x.dtype)
    return y + jnp.einsum("bse,ed->bsd", of_expert, b_down)


def _limited(options: dict[str, Any]) -> Unit:
    """Take the limited unit's constants out of an operator's options; return the unit."""
    return functools.partial(limited, limit=options.pop("limit"), alpha=options.pop("alpha"))


def _gradients(unit: Unit, *operands: jax.Array, **options: Any) -> tuple[jax.Array, ...]:
    """Compute the cotangents of tokens, gates and weights, from the form by sorting."""
    x, gates, chosen, own_experts, *weights, cotangent = operands
    _, pullback = jax.vjp(
        lambda x, gates, *w: by_sorting(unit, x, gates, chosen, own_experts, *w, **options),
        x,
        gates,
        *weights,
    )
    return pullback(cotangent)


@operator(f"{_TOKENS}, {_GELU}, b s d -> b s d, b s k, {_GELU}; reduce b s e f; whole d k")
def gelu_experts_gradients(*operands: jax.Array, **options: Any) -> tuple[jax.Array, ...]:
    """Compute the cotangents of `gelu_experts`' tokens, gates and weights."""
    return _gradients(gelu, *operands, **options)


@operator(f"{_TOKENS}, {_SWIGLU}, b s d -> b s d, b s k, {_SWIGLU}; reduce b s e f; whole d k")
def swiglu_experts_gradients(*operands: jax.Array, **options: Any) -> tuple[jax.Array, ...]:
    """Compute the cotangents of `swiglu_experts`' tokens, gates and weights."""
    return _gradients(swiglu, *operands, **options)


@operator(f"{_TOKENS}, {_LIMITED}, b s d -> b s d, b s k, {_LIMITED}; reduce b s e f; whole d k")
def limited_experts_gradients(*operands: jax.Array, **options: Any) -> tuple[jax.Array, ...]:
    """Compute the cotangents of `limited_unit_experts`' tokens, gates, weights and biases."""
    return _gradients(_limited(options), *operands, **options)


def _backward(gradients: Callable[..., Any]) -> Callable[..., Any]:
    def backward(operands: Sequence[jax.Array], cotangent: jax.Array, **options: Any) -> tuple[jax.Array | None, ...]:
        x, gates, *weights = gradients(*operands, cotangent, **options)
        return x, gates, None, None, *weights

    return backward


@operator(f"{_TOKENS}, {_GELU} -> b s d; reduce e f; whole d k", vjp=(None, _backward(gelu_experts_gradients)))
def gelu_experts(*operands: jax.Array, **options: Any) -> jax.Array:
    """Apply the experts with indices `own_experts`: `apply_experts` with the weights `up` and `down`."""
    return apply_experts(gelu, *operands, **options)


@operator(f"{_TOKENS}, {_SWIGLU} -> b s d; reduce e f; whole d k", vjp=(None, _backward(swiglu_experts_gradients)))
def swiglu_experts(*operands: jax.Array, **options: Any) -> jax.Array:
    """Apply the experts with indices `own_experts`: `apply_experts` with the weights `gate`, `up` and `down`."""
    return apply_experts(swiglu, *operands, **options)


@operator(f"{_TOKENS}, {_LIMITED} -> b s d; reduce e f; whole d k", vjp=(None, _backward(limited_experts_gradients)))
def limited_unit_experts(*operands: jax.Array, **options: Any) -> jax.Array:
    """Apply the experts with indices `own_experts`: weights `gate` and `up`, their biases, and the weights `down`."""
    return apply_experts(_limited(options), *operands, **options)


def _scaled_codes(operands: Sequence[jax.Array]) -> list[ScaledCodes]:
    return [ScaledCodes(*operands[n : n + 2]) for n in range(0, len(operands), 2)]


@operator(f"{_CODED}, b s (n d) -> b s (n d), b s k; reduce e m f; whole n d k")
def coded_swiglu_experts_gradients(*operands: jax.Array, **options: Any) -> tuple[jax.Array, jax.Array]:
    """Compute the cotangents of `coded_swiglu_experts`' tokens and gates."""
    x, gates, chosen, own_experts, *coded, cotangent = operands
    weights = [one.values.astype(x.dtype) for one in _scaled_codes(coded)]
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

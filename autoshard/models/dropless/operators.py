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
from autoshard.models.dropless.forms import apply_experts, by_sorting
from autoshard.models.dropless.units import Unit, gelu, limited, swiglu
from autoshard.spmdrules.custom_ops.operator import operator

_TOKENS = "b s d, b s k, b s k, e"
_GELU, _SWIGLU = "e d f, e f d", "e d f, e d f, e f d"
_LIMITED = "e d f, e d f, e f, e f, e f d"


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
    return y + chosen_biases(gates, chosen, b_down).astype(x.dtype)


def chosen_biases(gates: jax.Array, chosen: jax.Array, biases: jax.Array) -> jax.Array:
    """Return the sum of the biases `[experts, embed]` of each token's experts, times its gates."""
    picked = chosen[..., None] == jnp.arange(biases.shape[0])
    of_expert = jnp.sum(jnp.where(picked, gates[..., None], 0.0), axis=2).astype(biases.dtype)
    return jnp.einsum("bse,ed->bsd", of_expert, biases)


def limited_of(options: dict[str, Any]) -> Unit:
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
    return _gradients(limited_of(options), *operands, **options)


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
    return apply_experts(limited_of(options), *operands, **options)

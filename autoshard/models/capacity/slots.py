"""Slots of experts with a limited capacity.

The tokens of a group compete for the slots of each expert, all first choices before all second choices. So a first
choice of a later token can displace a second choice of an earlier one. Products with one-hot masks
`[groups, group_size, experts, capacity]` move tokens to slots and back. The size of these masks is linear in the batch
size.

Source: GShard (arXiv:2006.16668) for groups, capacity and the order of choices.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero

from autoshard.models.dropless.units import Unit
from autoshard.models.moe_config import MoEConfig

SLOTS = "egci,eio->egco"
"""The product of slots `[experts, groups, capacity, inputs]` with the weights `[experts, inputs, outputs]`."""


def one_hot(x: jax.Array, size: int, dtype: jax.typing.DTypeLike) -> jax.Array:
    """Encode `[...]` as `[..., size]`. An index outside of `size` gives a row of zeros."""
    return (x[..., None] == lax.broadcasted_iota(x.dtype, (*x.shape, size), x.ndim)).astype(dtype)


def dispatch_masks(cfg: MoEConfig, gates: jax.Array, chosen: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Assign tokens to the slots of their experts.

    Args:
        cfg: the model's config.
        gates: weights of the chosen experts, `[groups, group_size, top_k]`.
        chosen: indices of the chosen experts, int32 `[groups, group_size, top_k]`.

    Returns:
        The dispatch mask, 1 where a token has a slot, and the combine weights, which hold the token's gate in place of
        the 1. Both are `[groups, group_size, experts, capacity]` in the dtype of `gates`.
    """
    groups, size, top_k = chosen.shape
    choice = one_hot(chosen, cfg.experts, jnp.int32)
    # An expert's queue: all first choices in the order of tokens, then all second choices.
    queue = jnp.swapaxes(choice, 1, 2).reshape(groups, top_k * size, cfg.experts)
    before = (jnp.cumsum(queue, axis=1) - queue).reshape(groups, top_k, size, cfg.experts)
    # A token chooses an expert at most once, so a sum over choices has at most one nonzero term. Slots count from 1.
    slot = jnp.sum((jnp.swapaxes(before, 1, 2) + 1) * choice, axis=2)
    gate = jnp.sum(gates[..., None] * choice.astype(gates.dtype), axis=2)
    # A row is all zeros if the token does not choose the expert, or if its slot is beyond the capacity.
    taken = one_hot(slot - 1, cfg.capacity(size), gates.dtype)
    return taken, taken * gate[..., None]


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def gated_outputs(unit: Unit, products: tuple[jax.Array, ...], gates: jax.Array, down: jax.Array) -> jax.Array:
    """Multiply the hidden units of all slots by `down`, and the results by the gates of the slots.

    The gradient of the gates is a sum over hidden units, so the backward pass does not need the experts' outputs. This
    form is faster if the layers would recompute these outputs, and slower if they keep them
    (`benchmarks/expert_gates.py`).

    Args:
        unit: computes hidden units from products.
        products: the products of slots with the first matrices, each `[experts, groups, capacity, ffn]`.
        gates: `[experts, groups, capacity]`.
        down: `[experts, ffn, width]`.

    Returns:
        `[experts, groups, capacity, width]`.
    """
    return jnp.einsum(SLOTS, unit(products), down) * gates[..., None]


@partial(gated_outputs.defjvp, symbolic_zeros=True)
def _(unit: Unit, primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[jax.Array, Any]:
    """Gates multiply `[experts, groups, capacity, width]` where they can, because hidden units are larger."""
    (products, gates, down), (d_products, d_gates, d_down) = primals, tangents
    units, terms = list[jax.Array](), list[jax.Array]()
    if not all(map(_is_zero, d_products)):
        moved = tuple(jnp.zeros_like(x) if _is_zero(d) else d for x, d in zip(products, d_products, strict=True))
        d_hidden = jax.jvp(unit, (products,), (moved,))[1]
        units.append(d_hidden * gates[..., None])
    if not _is_zero(d_gates):
        units.append(unit(products) * d_gates[..., None])
    if units:
        terms.append(jnp.einsum(SLOTS, sum(units[1:], units[0]), down))
    if not _is_zero(d_down):
        terms.append(jnp.einsum(SLOTS, unit(products), d_down) * gates[..., None])
    result = gated_outputs(unit, *primals)
    return result, sum(terms[1:], terms[0]) if terms else jnp.zeros_like(result)


def _is_zero(tangent: Any) -> bool:
    return isinstance(tangent, SymbolicZero)

"""Slots of experts with a limited capacity.

The tokens of a group compete for the slots of each expert, all first choices before all second choices. So a first
choice of a later token can displace a second choice of an earlier one. Products with one-hot masks
`[groups, group_size, experts, capacity]` move tokens to slots and back. The size of these masks is linear in the batch
size.

Source: GShard (arXiv:2006.16668) for groups, capacity and the order of choices.
"""

from __future__ import annotations

from collections.abc import Sequence
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
    # A token chooses an expert at most once, so sums over the choices pick one of them: its slot, counted from 1.
    slot = jnp.sum((jnp.swapaxes(before, 1, 2) + 1) * choice, axis=2)
    gate = jnp.sum(gates[..., None] * choice.astype(gates.dtype), axis=2)
    # An expert that is not chosen, or a slot beyond the capacity, gives a row of zeros.
    taken = one_hot(slot - 1, cfg.capacity(size), gates.dtype)
    return taken, taken * gate[..., None]


def gated_outputs(unit: Unit, products: Sequence[jax.Array], gates: jax.Array, down: jax.Array) -> jax.Array:
    """Multiply the hidden units of all slots by `down`, and the results by the gates of the slots.

    The gates' gradient is a sum over hidden units, so the backward pass needs no output of an expert. That pays where
    it would have to compute the outputs again. Gates multiply the cotangent `[experts, groups, capacity, width]`, and
    not the hidden units, which are larger. Two barriers keep XLA from holding more arrays of that size.

    Compiled for v5e:4x4, a step of four layers of Mixtral 8x22B (`fsdp:4 ep:4`, 48 sequences of 4096, attention's
    inputs in host memory) takes 2.79 s and 13.3 GiB. It takes 3.15 s and 12.7 GiB with combine weights, and 14.1 GiB
    without the barriers. Where outputs are kept, combine weights are faster: 0.287 s instead of 0.306 s for a model of
    2.4B parameters under `dp:4 ep:4`.

    Args:
        unit: computes hidden units from products.
        products: the products of slots with the first matrices, each `[experts, groups, capacity, ffn]`.
        gates: `[experts, groups, capacity]`.
        down: `[experts, ffn, width]`.

    Returns:
        `[experts, groups, capacity, width]`.
    """

    # An inner function, because the rule is for arrays, and `unit` is none.
    @jax.custom_jvp
    def outputs(products: tuple[jax.Array, ...], gates: jax.Array, down: jax.Array) -> jax.Array:
        return jnp.einsum(SLOTS, unit(products), down) * gates[..., None]

    def change(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[jax.Array, Any]:
        (products, gates, down), (d_products, d_gates, d_down) = primals, tangents
        units, terms = list[jax.Array](), list[jax.Array]()
        if not all(map(_is_zero, d_products)):
            moved = [jnp.zeros_like(x) if _is_zero(d) else d for x, d in zip(products, d_products, strict=True)]
            d_hidden = jax.jvp(unit, (products,), (tuple(moved),))[1]
            units.append(lax.optimization_barrier(d_hidden) * gates[..., None])
        if not _is_zero(d_gates):
            units.append(unit(lax.optimization_barrier(products)) * d_gates[..., None])
        if units:
            terms.append(jnp.einsum(SLOTS, sum(units[1:], units[0]), down))
        if not _is_zero(d_down):
            terms.append(jnp.einsum(SLOTS, unit(products), d_down) * gates[..., None])
        result = outputs(*primals)
        return result, sum(terms[1:], terms[0]) if terms else jnp.zeros_like(result)

    outputs.defjvp(change, symbolic_zeros=True)
    return outputs(tuple(products), gates, down)


def _is_zero(tangent: Any) -> bool:
    return isinstance(tangent, SymbolicZero)

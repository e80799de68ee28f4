"""Four forms of a shard's experts, which give the same values.

    by sorting   tokens are sorted by expert; grouped products compute the rows of each expert
    densely      each expert computes all tokens; those that did not choose it are masked
    in turn      as densely, but one expert after another
    one by one   each choice of a token is computed alone, with the matrices of its expert

A grouped product on TPUs is a kernel, and XLA copies a layer of stacked weights for it. In the other forms, XLA reads
the weights from the stack in place. Generating text for few rows takes as long as reading the weights, so these forms
are faster there: dense experts read each expert once, and choices one by one read the chosen experts only.

Matrices may be `ScaledCodes`. XLA does not read codes of 4 bits inside a product. On TPUs, a kernel does
(`kernels/grouped/codes`), by sorting and densely. It reads `StackedCodes` of several layers in place. Where it cannot
run, the form in turn replaces the dense one: only the decoded matrices of one expert are in memory. The form by sorting
decodes codes that no kernel reads. Densely and one by one, codes of 8 bits are read as they are.

All arguments belong to one shard. The result is the sum over its own experts and hidden units.

Source: MegaBlocks (arXiv:2211.15841) for products by sorting.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from autoshard.kernels.grouped.call import GroupedCall
from autoshard.kernels.grouped.codes.products import coded_grouped_product, coded_product_of_all, reads_codes
from autoshard.kernels.grouped.matmul import grouped_product
from autoshard.models.block_scales import ScaledCodes, StackedCodes, scaled_product
from autoshard.models.dropless.constants import DENSE_TOKENS, LARGEST_UNROLLED, PIECE_ELEMENTS, TILE_ROWS
from autoshard.models.dropless.units import Unit

Weight = jax.Array | ScaledCodes
StackedWeight = Weight | StackedCodes


def apply_experts(
    unit: Unit, x: jax.Array, gates: jax.Array, chosen: jax.Array, own_experts: jax.Array, *weights: StackedWeight,
    count: int, call: GroupedCall,
) -> jax.Array:  # fmt: skip
    """Compute the sum of the experts `own_experts` for each token, in the fastest form.

    Args:
        unit: the hidden units.
        x: tokens, `[batch, seq, embed]`.
        gates: `[batch, seq, top_k]`.
        chosen: numbers of the chosen experts, int32 `[batch, seq, top_k]`.
        own_experts: consecutive numbers of experts, int32 `[own]`.
        *weights: matrices `[own, embed, ffn]`, their biases `[own, ffn]` if they have some, and finally the matrices
            `[own, ffn, embed]`.
        count: the number of all experts.
        call: the implementation of grouped products.

    Returns:
        `[batch, seq, embed]` in the dtype of `x`.
    """
    tokens, choices = x.shape[0] * x.shape[1], chosen.size
    if choices < own_experts.shape[0] and choices <= LARGEST_UNROLLED:
        return one_by_one(unit, x, gates, chosen, own_experts, *_of_layer(weights))
    if call.kernel == "megablox" and tokens <= DENSE_TOKENS:
        of_4_bits = [one for one in weights if isinstance(one, ScaledCodes | StackedCodes) and one.bits < 8]
        if any(isinstance(_for_kernel(call, x.dtype, one, rows=tokens), ScaledCodes) for one in of_4_bits):
            return in_turn(unit, x, gates, chosen, own_experts, *_of_layer(weights))
        return densely(unit, x, gates, chosen, own_experts, *weights, call=call)
    return by_sorting(unit, x, gates, chosen, own_experts, *weights, count=count, call=call)


def by_sorting(
    unit: Unit, x: jax.Array, gates: jax.Array, chosen: jax.Array, own_experts: jax.Array, *weights: StackedWeight,
    count: int, call: GroupedCall,
) -> jax.Array:  # fmt: skip
    """Compute `apply_experts` by sorting. Rows of other experts are zeros in all products and in their derivatives."""
    up_weights, biases, down = _parts(weights)
    top_k, width = chosen.shape[2], x.shape[2]
    choices = chosen.reshape(-1)
    order = jnp.argsort(choices)
    sizes = jnp.sum(choices[None, :] == jnp.arange(count)[:, None], axis=1, dtype=jnp.int32)

    def multiply(rows: jax.Array, weights: StackedWeight) -> jax.Array:
        weights = _for_kernel(call, rows.dtype, weights)
        if isinstance(weights, StackedCodes):
            return coded_grouped_product(call, rows, *weights, sizes, own_experts)
        matrices = weights.in_dtype(x.dtype) if isinstance(weights, ScaledCodes) else weights
        return grouped_product(call, rows, matrices, sizes, own_experts)

    rows = x.reshape(-1, width)[order // top_k]
    products = [multiply(rows, w) for w in up_weights]
    if biases:
        place, own = _places(choices[order], own_experts)
        products = [y + jnp.where(own[:, None], b[place], 0) for y, b in zip(products, biases, strict=True)]
    hidden = unit(products)
    hidden = hidden * gates.reshape(-1)[order].astype(hidden.dtype)[:, None]
    outputs = multiply(hidden, down)
    unsorted = jnp.zeros_like(outputs).at[order].set(outputs, unique_indices=True)
    return jnp.sum(unsorted.reshape(-1, top_k, width), axis=1).reshape(x.shape).astype(x.dtype)


def densely(
    unit: Unit, x: jax.Array, gates: jax.Array, chosen: jax.Array, own_experts: jax.Array, *weights: StackedWeight,
    call: GroupedCall,
) -> jax.Array:  # fmt: skip
    """Compute `apply_experts` with products of all tokens and all own experts."""
    up_weights, biases, down = _parts(weights)
    rows = x.reshape(-1, x.shape[2])
    picked = chosen.reshape(-1, 1, chosen.shape[2]) == own_experts[:, None]  # tokens, experts, choices
    of_expert = jnp.sum(jnp.where(picked, gates.reshape(-1, 1, gates.shape[2]), 0), axis=2)
    products = [_of_all(rows, w, call) for w in up_weights]
    if biases:
        products = [y + b[:, None] for y, b in zip(products, biases, strict=True)]
    # The products are masked, and not the hidden units: an overflow of an expert that was not chosen has no effect.
    mask = jnp.any(picked, axis=2).T[..., None]
    hidden = unit([jnp.where(mask, y, 0) for y in products])
    hidden = hidden * of_expert.T[..., None].astype(hidden.dtype)
    down = _for_kernel(call, hidden.dtype, down, rows=rows.shape[0])
    if isinstance(down, StackedCodes):
        outputs = coded_product_of_all(call, hidden, *down)
        return jnp.sum(outputs, axis=0, dtype=jnp.float32).reshape(x.shape).astype(x.dtype)
    return _product("etf,efd->td", hidden, down).reshape(x.shape).astype(x.dtype)


def in_turn(
    unit: Unit, x: jax.Array, gates: jax.Array, chosen: jax.Array, own_experts: jax.Array, *weights: Weight
) -> jax.Array:
    """Compute `apply_experts` with products of all tokens and one expert after another."""
    rows = x.reshape(-1, x.shape[2])
    choices, factors = (one.reshape(-1, one.shape[2]) for one in (chosen, gates))

    def add(total: jax.Array, expert: tuple[jax.Array, tuple[Any, ...]]) -> tuple[jax.Array, None]:
        number, own = expert
        *before, down = (w for w in own if w.ndim == 2)
        products = [_in_pieces(rows, w) for w in before]
        if biases := [w for w in own if w.ndim == 1]:
            products = [y + b for y, b in zip(products, biases, strict=True)]
        picked = choices == number
        hidden = unit([jnp.where(jnp.any(picked, axis=1)[:, None], y, 0) for y in products])
        factor = jnp.sum(jnp.where(picked, factors, 0), axis=1)[:, None]
        return total + _in_pieces(hidden * factor.astype(hidden.dtype), down), None

    whole = tuple(one.joined() if isinstance(one, ScaledCodes) else one for one in weights)
    total, _ = lax.scan(add, jnp.zeros_like(rows, shape=(rows.shape[0], weights[-1].shape[-1])), (own_experts, whole))
    return total.reshape(x.shape).astype(x.dtype)


def one_by_one(
    unit: Unit, x: jax.Array, gates: jax.Array, chosen: jax.Array, own_experts: jax.Array, *weights: Weight
) -> jax.Array:
    """Compute `apply_experts` with the matrices of one choice at a time. The program is linear in their number."""
    up_weights, biases, down = _parts(weights)
    top_k, rows = chosen.shape[2], x.reshape(-1, x.shape[2])
    place, own = _places(chosen.reshape(-1), own_experts)
    factors = gates.reshape(-1)
    outputs = []
    for choice in range(chosen.size):
        row = rows[choice // top_k][None]

        def of_expert(weights: Weight, choice: int = choice) -> Any:
            return jax.tree.map(lambda one: lax.dynamic_index_in_dim(one, place[choice], keepdims=False), weights)

        products = [_product("td,df->tf", row, of_expert(w)) for w in up_weights]
        if biases:
            products = [y + of_expert(b) for y, b in zip(products, biases, strict=True)]
        hidden = unit([jnp.where(own[choice], y, 0) for y in products])
        outputs.append(_product("tf,fd->td", hidden * factors[choice].astype(hidden.dtype), of_expert(down)))
    found = jnp.concatenate(outputs).reshape(-1, top_k, x.shape[2])
    return jnp.sum(found, axis=1).reshape(x.shape).astype(x.dtype)


def _of_layer(weights: Iterable[StackedWeight]) -> list[Weight]:
    """Return the weights with the codes of the layer alone."""
    return [one.of_layer if isinstance(one, StackedCodes) else one for one in weights]


def _for_kernel(call: GroupedCall, dtype: Any, weight: Any, *, rows: int | None = None) -> StackedWeight:
    """Return codes that a kernel reads as `StackedCodes`, and others as those of the layer alone; see `reads_codes`."""
    if not isinstance(weight, ScaledCodes | StackedCodes):
        return weight
    stack = weight.stacked if weight.bits < 8 else None
    if stack is not None and reads_codes(call, dtype, stack.codes, stack.scale, rows=rows):
        return stack
    return weight.of_layer


def _parts(weights: Sequence[Any]) -> tuple[list[Any], list[jax.Array], Any]:
    """Return the matrices before the hidden units, their biases, and the matrices behind them."""
    *before, down = weights
    biases = [w for w in before if w.ndim == 2 and not isinstance(w, ScaledCodes)]
    return [w for w in before if w.ndim == 3], biases, down


def _product(spec: str, x: jax.Array, weight: Weight) -> jax.Array:
    if isinstance(weight, ScaledCodes):
        return scaled_product(spec, x, *weight, inputs=1)
    return jnp.einsum(spec, x, weight)


def _in_pieces(rows: jax.Array, weight: Weight) -> jax.Array:
    """Multiply rows by a matrix whose decoded pieces are added up, so that each piece stays on the chip."""
    if not isinstance(weight, ScaledCodes):
        return jnp.einsum("td,df->tf", rows, weight)
    inputs, outputs = weight.shape
    count = _pieces(inputs, outputs, weight.scale.shape[0])
    codes, scale = (one.reshape(count, -1, one.shape[-1]) for one in weight)

    def add(total: jax.Array, piece: tuple[jax.Array, ScaledCodes]) -> tuple[jax.Array, None]:
        columns, own = piece
        product = jnp.einsum("td,df->tf", columns, own.in_dtype(rows.dtype), preferred_element_type=jnp.float32)
        return total + product, None

    columns = jnp.moveaxis(rows.reshape(rows.shape[0], count, -1), 1, 0)
    start = jnp.zeros((rows.shape[0], codes.shape[-1]), jnp.float32)
    return lax.scan(add, start, (columns, ScaledCodes(codes, scale)))[0].astype(rows.dtype)


def _pieces(inputs: int, outputs: int, blocks: int) -> int:
    """Return the number of pieces of whole blocks of a matrix: the smallest with at most `PIECE_ELEMENTS` elements.

    >>> _pieces(2880, 2880, 90), _pieces(64, 32, 2)
    (5, 1)
    """
    whole = [n for n in range(1, blocks + 1) if blocks % n == 0]
    tiled = [n for n in whole if inputs // n % TILE_ROWS == 0] or whole
    return next((n for n in tiled if inputs // n * outputs <= PIECE_ELEMENTS), tiled[-1])


def _of_all(rows: jax.Array, weight: StackedWeight, call: GroupedCall) -> jax.Array:
    """Multiply the rows by the matrices of all own experts: `[own, tokens, ffn]`."""
    weight = _for_kernel(call, rows.dtype, weight, rows=rows.shape[0])
    if isinstance(weight, StackedCodes):
        return coded_product_of_all(call, rows, *weight)
    if isinstance(weight, ScaledCodes):
        # Codes are read in place if the experts are a batch dimension. Else XLA transposes them.
        rows = jnp.broadcast_to(rows, (weight.scale.shape[0], *rows.shape))
        return _product("etd,edf->etf", rows, weight)
    return _product("td,edf->etf", rows, weight)


def _places(choices: jax.Array, own_experts: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the place of each choice among the own experts, which have consecutive numbers, and whether it is one."""
    place, last = choices - own_experts[0], own_experts.shape[0] - 1
    return jnp.clip(place, 0, last), (place >= 0) & (place <= last)

"""Mixture of experts: the gate, the dispatch of tokens to experts and back, and the experts.

Tokens come in groups `[groups, tokens, embed]`. Each group has its own capacity in every expert, so that groups can be
sharded like the batch. With the gate's weights g, and the slot c of a token among those that chose the expert e:

    dispatch[t, e, c] = 1 where token t has slot c < capacity in expert e, else 0
    combine[t, e, c]  = g[t, e] * dispatch[t, e, c]
    inputs[e, c]      = sum_t dispatch[t, e, c] x[t]
    out[t]            = sum_e,c combine[t, e, c] outputs[e, c]

If x and out are sharded over groups, and inputs and outputs over experts, each of the two sums is an all-to-all
(GShard, arXiv:2006.16668; Switch, arXiv:2101.03961). The dropless path sorts tokens by expert and has no capacity.
Gates are float32.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from autoshard.spmdrules.catalogue.entry import Operator, f32


def _one_hot(indices: jax.Array, size: int) -> jax.Array:
    """One-hot booleans `[..., size]` of indices `[...]`."""
    shape = (*indices.shape, size)
    return lax.broadcasted_iota(indices.dtype, shape, len(shape) - 1) == indices[..., None]


def load_balancing_loss(probabilities: jax.Array, experts: jax.Array) -> jax.Array:
    """`E sum_e f[e] p[e]` of each group: f is the fraction of choices of expert e, p its mean probability.

    Args:
        probabilities: `[groups, tokens, experts]`.
        experts: the chosen experts, integers `[groups, tokens, k]`. They have no gradient.

    Returns:
        `[groups]`, 1 if all experts are chosen equally often.
    """
    size = probabilities.shape[-1]
    chosen = jnp.mean(_one_hot(experts, size).astype(jnp.float32), (1, 2))
    return size * jnp.sum(chosen * jnp.mean(probabilities, 1), -1)


def router_z_loss(logits: jax.Array) -> jax.Array:
    """The mean of `log(sum_e exp(logits[e]))^2` of each group: `[groups, tokens, experts]` to `[groups]`.

    This loss keeps the gate's logits small (ST-MoE, arXiv:2202.08906).
    """
    return jnp.mean(jnp.square(jax.nn.logsumexp(logits.astype(jnp.float32), -1)), -1)


def top_k_gate(x: jax.Array, gate: jax.Array, *, k: int = 2) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """The k most probable experts of each token, and two auxiliary losses of the gate.

    Args:
        x: `[groups, tokens, embed]`.
        gate: `[embed, experts]`.
        k: experts per token.

    Returns:
        Weights that sum to 1 and expert numbers, `[groups, tokens, k]`; `load_balancing_loss` and
        `router_z_loss`, `[groups]`.
    """
    logits = jnp.einsum("gtm,me->gte", x, gate, preferred_element_type=jnp.float32)
    probabilities = jax.nn.softmax(logits, -1)
    weights, experts = lax.top_k(probabilities, k)
    weights = weights / jnp.sum(weights, -1, keepdims=True)
    return weights, experts, load_balancing_loss(probabilities, experts), router_z_loss(logits)


def switch_gate(x: jax.Array, gate: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The most probable expert of each token: its probability, its number, and `load_balancing_loss`.

    The arguments are those of `top_k_gate`. The first two results are `[groups, tokens, 1]` (arXiv:2101.03961).
    """
    probabilities = jax.nn.softmax(jnp.einsum("gtm,me->gte", x, gate, preferred_element_type=jnp.float32), -1)
    experts = jnp.argmax(probabilities, -1, keepdims=True).astype(jnp.int32)
    return jnp.max(probabilities, -1, keepdims=True), experts, load_balancing_loss(probabilities, experts)


def sigmoid_gate(x: jax.Array, gate: jax.Array, bias: jax.Array, *, k: int = 2) -> tuple[jax.Array, jax.Array]:
    """Chooses experts by sigmoid score plus a balancing bias `[experts]` (DeepSeek-V3, arXiv:2412.19437).

    The bias affects only the choice, not the weights, and has no gradient. The other arguments and the two
    results are those of `top_k_gate`.
    """
    scores = jax.nn.sigmoid(jnp.einsum("gtm,me->gte", x, gate, preferred_element_type=jnp.float32))
    _, experts = lax.top_k(lax.stop_gradient(scores) + bias.reshape(1, 1, -1), k)
    weights = jnp.sum(jnp.where(_one_hot(experts, gate.shape[1]), scores[:, :, None], 0.0), -1)
    return weights / jnp.sum(weights, -1, keepdims=True), experts


def expert_choice_gate(x: jax.Array, gate: jax.Array, *, capacity: int = 8) -> tuple[jax.Array, jax.Array]:
    """Each expert chooses its most probable tokens: weights and token numbers, `[groups, experts, capacity]`.

    The arguments are those of `top_k_gate` (arXiv:2202.09368).
    """
    probabilities = jax.nn.softmax(jnp.einsum("gtm,me->gte", x, gate, preferred_element_type=jnp.float32), -1)
    return lax.top_k(jnp.swapaxes(probabilities, 1, 2), capacity)  # pyright: ignore[reportReturnType]


def capacity_masks(
    weights: jax.Array, chosen: jax.Array, *, experts: int, capacity: int
) -> tuple[jax.Array, jax.Array]:
    """Builds the dispatch and combine masks, `[groups, tokens, experts, capacity]`, from the choices of a gate.

    First choices take slots before second choices, and earlier tokens before later tokens. A choice past the capacity
    is dropped.

    Args:
        weights: `[groups, tokens, k]`.
        chosen: integers `[groups, tokens, k]`.
        experts: the number of experts.
        capacity: slots per expert and group.
    """
    groups, tokens, k = chosen.shape
    picks = _one_hot(jnp.swapaxes(chosen, 1, 2), experts).astype(jnp.int32)
    slot = jnp.cumsum(picks.reshape(groups, k * tokens, experts), 1).reshape(picks.shape) - 1
    # A slot past the capacity, and the -1 of an expert that was not picked, give a row that is all false.
    taken = _one_hot(jnp.where(picks == 1, slot, -1), capacity)
    weighted = jnp.where(taken, jnp.swapaxes(weights, 1, 2)[..., None, None], 0.0)
    return jnp.any(taken, 1).astype(weights.dtype), jnp.sum(weighted, 1)


def moe_dispatch(x: jax.Array, dispatch: jax.Array) -> jax.Array:
    """Sends tokens `[groups, tokens, embed]` to the experts' slots, `[experts, groups, capacity, embed]`."""
    return jnp.einsum("gtm,gtec->egcm", x, dispatch.astype(x.dtype))


def moe_combine(outputs: jax.Array, combine: jax.Array) -> jax.Array:
    """Sends outputs `[experts, groups, capacity, embed]` back to their tokens, weighted: `[groups, tokens, embed]`."""
    return jnp.einsum("egcm,gtec->gtm", outputs, combine.astype(outputs.dtype))


def expert_feed_forward(x: jax.Array, gate: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    """Applies each expert's SwiGLU to the expert's own slots.

    Args:
        x: `[experts, groups, capacity, embed]`.
        gate: `[experts, embed, ffn]`.
        up: `[experts, embed, ffn]`.
        down: `[experts, ffn, embed]`.
    """
    hidden = jax.nn.silu(jnp.einsum("egcm,emf->egcf", x, gate)) * jnp.einsum("egcm,emf->egcf", x, up)
    return jnp.einsum("egcf,efm->egcm", hidden, down)


def moe_layer(
    x: jax.Array, router: jax.Array, gate: jax.Array, up: jax.Array, down: jax.Array, *, k: int = 2, capacity: int = 8
) -> tuple[jax.Array, jax.Array]:
    """Gate, dispatch, experts and combine: the new `[groups, tokens, embed]` and the balancing loss `[groups]`.

    Args:
        x: `[groups, tokens, embed]`.
        router: `[embed, experts]`.
        gate: `[experts, embed, ffn]`.
        up: `[experts, embed, ffn]`.
        down: `[experts, ffn, embed]`.
        k: experts for each token.
        capacity: slots in each expert for each group.
    """
    weights, chosen, balance, _ = top_k_gate(x, router, k=k)
    dispatch, combine = capacity_masks(weights, chosen, experts=router.shape[1], capacity=capacity)
    outputs = expert_feed_forward(moe_dispatch(x, dispatch), gate, up, down)
    return moe_combine(outputs, combine), balance


def moe_permute(x: jax.Array, chosen: jax.Array, *, experts: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Copies tokens to one row per choice, sorted by expert.

    Args:
        x: `[tokens, embed]`.
        chosen: integers `[tokens, k]`.
        experts: the number of experts.

    Returns:
        Rows `[tokens * k, embed]`, the number of rows of each expert `[experts]`, and the position of each row's choice
        in the flattened `chosen`, `[tokens * k]`.
    """
    flat = chosen.reshape(-1)
    order = jnp.argsort(flat)
    sizes = jnp.sum(_one_hot(flat, experts).astype(jnp.int32), 0)
    return x[lax.div(order, jnp.int32(chosen.shape[1]))], sizes, order


def moe_unpermute(rows: jax.Array, order: jax.Array, weights: jax.Array) -> jax.Array:
    """Undoes `moe_permute`: weights the rows by `[tokens, k]` and sums them per token, `[tokens, embed]`."""
    tokens, k = weights.shape
    back = jnp.zeros_like(rows).at[order].set(rows, unique_indices=True)
    return jnp.sum(back.reshape(tokens, k, -1) * weights[..., None].astype(rows.dtype), 1)


def grouped_matmul(rows: jax.Array, weights: jax.Array, sizes: jax.Array) -> jax.Array:
    """Multiplies each expert's rows by its weights: `[rows, in]`, `[experts, in, out]`, rows per expert `[experts]`.

    Rows are sorted by expert (MegaBlocks, arXiv:2211.15841).
    """
    return lax.ragged_dot(rows, weights, sizes)


def dropless_moe(
    x: jax.Array, weights: jax.Array, chosen: jax.Array, gate: jax.Array, up: jax.Array, down: jax.Array
) -> jax.Array:
    """Experts without a capacity limit: sorts tokens by expert, runs grouped products, and restores the order.

    Args:
        x: `[tokens, embed]`.
        weights: the gate's weights, `[tokens, k]`.
        chosen: integers `[tokens, k]`.
        gate: `[experts, embed, ffn]`.
        up: `[experts, embed, ffn]`.
        down: `[experts, ffn, embed]`.
    """
    rows, sizes, order = moe_permute(x, chosen, experts=gate.shape[0])
    hidden = jax.nn.silu(grouped_matmul(rows, gate, sizes)) * grouped_matmul(rows, up, sizes)
    return moe_unpermute(grouped_matmul(hidden, down, sizes), order, weights)


def expert_counts(chosen: jax.Array, *, experts: int = 16) -> jax.Array:
    """The number of choices of each expert: integers `[tokens, k]` to `[experts]`."""
    return jnp.sum(_one_hot(chosen, experts).astype(jnp.int32), (0, 1))


_X, _ROUTER = f32(8, 12, 20), f32(20, 16)
_CHOSEN = (np.arange(192, dtype=np.int32) * 5 % 16).reshape(8, 12, 2)
_WEIGHTS = f32(8, 12, 2)
_DISPATCH, _SLOTS = f32(8, 12, 16, 4), f32(16, 8, 4, 20)
_EXPERTS = (f32(16, 20, 24), f32(16, 20, 24), f32(16, 24, 20))
_FLAT = (np.arange(24, dtype=np.int32) * 5 % 16).reshape(12, 2)
_ORDER = np.argsort(_FLAT.reshape(-1), kind="stable").astype(np.int32)
_SIZES = np.bincount(_FLAT.reshape(-1), minlength=16).astype(np.int32)


def _capacity_masks(weights: jax.Array, chosen: jax.Array) -> tuple[jax.Array, jax.Array]:
    return capacity_masks(weights, chosen, experts=16, capacity=4)


def _permute(x: jax.Array, chosen: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    return moe_permute(x, chosen, experts=16)


OPERATORS: tuple[Operator, ...] = (
    Operator("moe_gate", top_k_gate, (_X, _ROUTER), (0, 1)),
    Operator("switch_gate", switch_gate, (_X, _ROUTER), (0, 1)),
    Operator("sigmoid_gate", sigmoid_gate, (_X, _ROUTER, f32(16)), (0, 1), "the bias has no gradient"),
    Operator("expert_choice_gate", expert_choice_gate, (_X, _ROUTER), (0, 1)),
    Operator("load_balancing_loss", load_balancing_loss, (f32(8, 12, 16), _CHOSEN)),
    Operator("router_z_loss", router_z_loss, (f32(8, 12, 16),)),
    Operator("capacity_masks", _capacity_masks, (_WEIGHTS, _CHOSEN)),
    Operator("moe_dispatch", moe_dispatch, (_X, _DISPATCH), (0, 1)),
    Operator("moe_combine", moe_combine, (_SLOTS, _DISPATCH), (0, 1)),
    Operator("expert_feed_forward", expert_feed_forward, (_SLOTS, *_EXPERTS), (0, 1, 2, 3)),
    Operator("moe_layer", moe_layer, (_X, _ROUTER, *_EXPERTS), (0, 1, 2, 3, 4)),
    Operator("moe_permute", _permute, (f32(12, 20), _FLAT)),
    Operator("moe_unpermute", moe_unpermute, (f32(24, 20), _ORDER, f32(12, 2)), (0, 2)),
    Operator("grouped_matmul", grouped_matmul, (f32(24, 20), f32(16, 20, 28), _SIZES), (0, 1)),
    Operator(
        "dropless_moe", dropless_moe,
        (f32(12, 20), f32(12, 2), _FLAT, f32(16, 20, 28), f32(16, 20, 28), f32(16, 28, 20)), (0, 1, 3, 4, 5),
    ),
    Operator("expert_counts", expert_counts, (_FLAT,), (), "no gradient: counts"),
)  # fmt: skip

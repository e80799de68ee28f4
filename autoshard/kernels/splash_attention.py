"""Splash attention, JAX's attention kernels for TPUs, as two operators: the forward pass and the gradients.

Each has a declared rule, so a plan shards it over the batch, the heads and the queries' sequence, and runs it per
shard. On platforms other than TPU the operators compute the same values with `blockwise_attention`, so a program that
was planned for a TPU runs anywhere.

    forward   b h g (n i) d, b h t d, b h t e -> b h g (n i) e, b h g (n i)
    backward  the same operands, results and cotangent -> b h g (n i) d, b h t d, b h t e; reduce g n

`h` are key heads, `g` the query heads of each, `n` blocks of `i` = 128 queries, `t` keys. Masks are computed from the
positions of the queries, an operand that is sharded like the queries.

Source: https://github.com/jax-ml/jax/tree/main/jax/experimental/pallas/ops/tpu/splash_attention
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from autoshard._compat import splash
from autoshard._compat.pallas_calls import with_costs
from autoshard._shown import shown
from autoshard.kernels.attention_cost import backward_cost, dkv_cost, dq_cost, forward_cost, stated
from autoshard.kernels.block_choice import choose_blocks
from autoshard.kernels.block_tables import visits_of_keys, visits_of_queries
from autoshard.kernels.blockwise_attention import Pairs, Softmax, blockwise_backward, blockwise_forward, sink_gradient
from autoshard.kernels.constants import CONTEXT, FALLBACK_BLOCK, LANES
from autoshard.kernels.splash_blocks import SplashBlocks
from autoshard.spmdrules.custom_ops.operator import operator


@shown
@dataclass(frozen=True)
class SplashCall:
    """The static part of a call.

    Attributes:
        softmax: the static part of attention; its scale is applied to the queries beforehand.
        blocks: the block sizes.
        interpret: whether Pallas interprets the kernels, on any platform; for tests.
    """

    softmax: Softmax
    blocks: SplashBlocks
    interpret: bool = False


def splash_attention(
    softmax: Softmax,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    segments: tuple[jax.Array, jax.Array] | None = None,
    sinks: jax.Array | None = None,
    blocks: SplashBlocks | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Return attention's result, `[batch, queries, kv_heads, group, head_dim]`.

    The scaled queries are rounded to their dtype. There is no second derivative. Over several devices, the program must
    be planned or run under `shard_map`: XLA does not partition the kernels.

    Args:
        softmax: the static part of attention.
        q: queries, `[batch, queries, kv_heads, group, head_dim]`; the number of queries is a multiple of 128.
        k: keys, `[batch, keys, kv_heads, head_dim]`; the number of keys is a multiple of 128.
        v: values, shaped like `k`; their number of features may differ.
        segments: segments of the queries `[batch, queries]` and of the keys `[batch, keys]`, or None.
        sinks: for each head the score of a key without a value, `[kv_heads, group]`, or None.
        blocks: the block sizes; chosen by shape and machine by default (`block_choice`).
        interpret: whether Pallas interprets the kernels, on any platform; for tests.
    """
    call, arrays, positions = _prepared(softmax, q, k, v, blocks, interpret)
    return jnp.einsum("bkgsd->bskgd", _attention(call, *arrays, (*positions, *(segments or ())), sinks))


def splash_forward(
    softmax: Softmax, q: jax.Array, k: jax.Array, v: jax.Array, *, interpret: bool = False
) -> tuple[jax.Array, jax.Array]:
    """Return attention's result, and the log-sum-exp of each row, `[batch, kv_heads, group, queries]`.

    The arguments are those of `splash_attention`.
    """
    call, arrays, positions = _prepared(softmax, q, k, v, None, interpret)
    out, (*_, log_sum) = _attention_forward(call, *arrays, positions, None)
    return jnp.einsum("bkgsd->bskgd", out), log_sum


def splash_backward(
    softmax: Softmax, q: jax.Array, k: jax.Array, v: jax.Array, out: jax.Array, log_sum: jax.Array, d_out: jax.Array,
    *, interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:  # fmt: skip
    """Return the gradients of `q`, `k` and `v` from the results of `splash_forward` and the cotangent of the first."""
    call, arrays, positions = _prepared(softmax, q, k, v, None, interpret)
    rows = [jnp.einsum("bskgd->bkgsd", x.astype(q.dtype)) for x in (out, d_out)]
    d_q, d_k, d_v, *_ = _attention_backward(call, (*arrays, positions, None, rows[0], log_sum), rows[1])
    d_q = (jnp.einsum("bkgsd->bskgd", d_q).astype(jnp.float32) * softmax.scale).astype(q.dtype)
    return d_q, jnp.einsum("bktd->btkd", d_k), jnp.einsum("bktd->btkd", d_v)


def _prepared(softmax: Softmax, q, k, v, blocks: SplashBlocks | None, interpret: bool):
    """Return the static part of a call, its scaled and transposed operands, and the positions of the queries."""
    # The kernels have no factor of the scores.
    q = (q.astype(jnp.float32) * softmax.scale).astype(q.dtype)
    q, k, v = jnp.einsum("bskgd->bkgsd", q), jnp.einsum("btkd->bktd", k), jnp.einsum("btkd->bktd", v)
    shape = (q.shape[3], k.shape[2], q.shape[4], v.shape[3], q.dtype.itemsize)
    blocks = blocks or choose_blocks(shape, softmax)
    call = SplashCall(Softmax(softmax.visibility, 1.0, softmax.soft_cap), blocks, interpret)
    positions = () if softmax.visibility.is_full else (jnp.arange(q.shape[3], dtype=jnp.int32),)
    return call, (q, k, v), positions


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(call: SplashCall, q, k, v, extras: tuple[jax.Array, ...], sinks) -> jax.Array:
    return _attention_forward(call, q, k, v, extras, sinks)[0]


def _attention_forward(call: SplashCall, q, k, v, extras, sinks):
    out, log_sum = _forward_operator(_has_positions(call), len(extras), sinks is not None)(
        q, k, v, *extras, *(() if sinks is None else (sinks,)), call=call
    )
    out, log_sum = checkpoint_name(out, CONTEXT), checkpoint_name(log_sum, CONTEXT)
    return out, (q, k, v, extras, sinks, out, log_sum)


def _attention_backward(call: SplashCall, saved, d_out):
    q, k, v, extras, sinks, out, log_sum = saved
    gradients = _backward_operator(_has_positions(call), len(extras))(q, k, v, out, log_sum, d_out, *extras, call=call)
    rows = [jnp.einsum("bkgsd->bskgd", x) for x in (out, d_out)]
    return *gradients, None, None if sinks is None else sink_gradient(sinks, rows[0], log_sum, rows[1])


_attention.defvjp(_attention_forward, _attention_backward)


def _has_positions(call: SplashCall) -> bool:
    return not call.softmax.visibility.is_full


def _extra_dims(positions: bool, extras: int) -> str:
    """Return the dimensions of positions and segments in a rule's text."""
    segments = ", b (n i), b t" if extras - positions else ""
    return (", (n i)" if positions else "") + segments


@functools.cache
def _forward_operator(positions: bool, extras: int, sinks: bool) -> Callable[..., Any]:
    text = (
        f"b h g (n i) d, b h t d, b h t e{_extra_dims(positions, extras)}{', h g' if sinks else ''} "
        f"-> b h g (n i) e, b h g (n i); where i={LANES}; whole i t d e"
    )

    @operator(text, name="splash_attention", cost=forward_cost)
    def splash_attention(q, k, v, *others, call: SplashCall):
        sink = others[-1] if sinks else None
        return _forward(call, q, k, v, _pairs(positions, others[:extras]), sink)

    return splash_attention


@functools.cache
def _backward_operator(positions: bool, extras: int) -> Callable[..., Any]:
    text = (
        f"b h g (n i) d, b h t d, b h t e, b h g (n i) e, b h g (n i), b h g (n i) e{_extra_dims(positions, extras)} "
        f"-> b h g (n i) d, b h t d, b h t e; where i={LANES}; reduce g n; whole i t d e"
    )

    @operator(text, name="splash_attention_gradient", cost=backward_cost)
    def splash_attention_gradient(q, k, v, out, log_sum, d_out, *others, call: SplashCall):
        return _backward(call, q, k, v, _pairs(positions, others), out, log_sum, d_out)

    return splash_attention_gradient


def _pairs(positions: bool, extras: tuple[jax.Array, ...]) -> Pairs:
    segments = extras[positions:] or (None, None)
    return Pairs(extras[0] if positions else None, None, *segments)


def _by_platform(call: SplashCall, kernel: Callable[..., Any], plain: Callable[..., Any], *args: Any) -> Any:
    """Run the kernel on TPUs, and the same computation in plain JAX elsewhere."""
    if call.interpret:
        return kernel(*args)
    return lax.platform_dependent(*args, tpu=kernel, default=plain)


@functools.partial(jax.jit, static_argnums=0)
def _forward(call: SplashCall, q, k, v, pairs: Pairs, sinks):
    def plain(q, k, v, pairs, sinks):
        out, log_sum = blockwise_forward(call.softmax, min(FALLBACK_BLOCK, k.shape[2]), *_rows(q, k, v), pairs, sinks)
        return jnp.einsum("bskgd->bkgsd", out), log_sum

    def kernel(q, k, v, pairs, sinks):
        blocks = call.blocks.fit(q.shape[3], k.shape[2])
        info = _mask(call, pairs.positions, k.shape[2], *blocks.forward[:2])

        def one(q, k, v, segments):
            out, log_sum = splash.forward(
                info, q.reshape(-1, *q.shape[2:]), k, v, segments and splash.segment_ids(*segments),
                None if sinks is None else sinks.reshape(-1), **_options(call, blocks),
            )  # fmt: skip
            return out.reshape(*q.shape[:3], -1), log_sum.reshape(q.shape[:3])

        costs = {"_fwd_": stated(forward_cost(q, k, v, call=call))}
        out, log_sum = with_costs(jax.vmap(one), costs, q, k, v, _segments(pairs))
        # The kernel takes the mean of all values in a row without a visible key. With a log-sum-exp of 0, the weights
        # of such a row are exp(MASKED) = 0 in the backward pass.
        unseen = ~(log_sum > splash.MASKED / 2)  # also NaN
        return jnp.where(unseen[..., None], 0, out), jnp.where(unseen, 0.0, log_sum)

    return _by_platform(call, kernel, plain, q, k, v, pairs, sinks)


@functools.partial(jax.jit, static_argnums=0)
def _backward(call: SplashCall, q, k, v, pairs: Pairs, out, log_sum, d_out):
    def plain(q, k, v, pairs, out, log_sum, d_out):
        block, d_out = min(FALLBACK_BLOCK, k.shape[2]), jnp.einsum("bkgsd->bskgd", d_out)
        rows = _rows(q, k, v)
        d_q, d_k, d_v = blockwise_backward(
            call.softmax, block, *rows, pairs, jnp.einsum("bkgsd->bskgd", out), log_sum, d_out
        )
        return jnp.einsum("bskgd->bkgsd", d_q), jnp.einsum("btkd->bktd", d_k), jnp.einsum("btkd->bktd", d_v)

    def kernel(q, k, v, pairs, out, log_sum, d_out):
        blocks = call.blocks.fit(q.shape[3], k.shape[2])
        keys = k.shape[2]
        dq_info = _mask(call, pairs.positions, keys, *blocks.dq)
        dkv_info = _mask(call, pairs.positions, keys, *blocks.dkv[:2], of_keys=True)

        def one(q, k, v, segments, out, log_sum, d_out):
            def flat(x):
                return x.reshape(-1, *x.shape[2:])

            d_q, d_k, d_v = splash.backward(
                dq_info, dkv_info, flat(q), k, v, segments and splash.segment_ids(*segments),
                flat(out), flat(log_sum), flat(d_out), **_options(call, blocks),
            )  # fmt: skip
            return d_q.reshape(q.shape), d_k, d_v

        costs = {f"_{name}_": stated(cost(q, k, v, call=call)) for name, cost in (("dkv", dkv_cost), ("dq", dq_cost))}
        return with_costs(jax.vmap(one), costs, q, k, v, _segments(pairs), out, log_sum, d_out)

    return _by_platform(call, kernel, plain, q, k, v, pairs, out, log_sum, d_out)


def _rows(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the operands in the order of dimensions of `blockwise_attention`."""
    return jnp.einsum("bkgsd->bskgd", q), jnp.einsum("bktd->btkd", k), jnp.einsum("bktd->btkd", v)


def _segments(pairs: Pairs) -> tuple[jax.Array, jax.Array] | None:
    if pairs.query_segments is None or pairs.key_segments is None:
        return None
    return pairs.query_segments, pairs.key_segments


def _options(call: SplashCall, blocks: SplashBlocks) -> dict[str, Any]:
    return {
        "blocks": splash.block_sizes(blocks.forward, blocks.dkv, blocks.dq),
        "mask_function": call.softmax.visibility if _has_positions(call) else None,
        "soft_cap": call.softmax.soft_cap,
        "interpret": call.interpret,
    }


def _mask(call: SplashCall, positions: Any, keys: int, block_q: int, block_k: int, *, of_keys: bool = False) -> Any:
    if positions is None:
        return splash.mask_info(None, None)
    visits = visits_of_keys if of_keys else visits_of_queries
    return splash.mask_info(visits(positions, keys, call.softmax.visibility, block_q, block_k), positions)

"""The two passes of splash attention on one device: JAX's kernels on TPUs, the same values in plain JAX elsewhere.

Source: https://github.com/jax-ml/jax/tree/main/jax/experimental/pallas/ops/tpu/splash_attention
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from autoshard._compat import splash
from autoshard._compat.pallas_calls import with_costs
from autoshard._shown import shown
from autoshard.kernels.attention_cost import dkv_cost, dq_cost, forward_cost, stated
from autoshard.kernels.block_tables import visits_of_keys, visits_of_queries
from autoshard.kernels.blockwise_attention import Pairs, Softmax, blockwise_backward, blockwise_forward
from autoshard.kernels.constants import FALLBACK_BLOCK, LANES
from autoshard.kernels.sequence.partial_results import UNSEEN, Partial
from autoshard.kernels.sequence.ring import Keys, Rows
from autoshard.kernels.splash_blocks import SplashBlocks


@shown
@dataclass(frozen=True)
class SplashCall:
    """The static part of a call.

    Attributes:
        softmax: the static part of attention; its scale is applied to the queries beforehand.
        blocks: the block sizes; None for plain JAX on every platform, which takes any number of positions.
        interpret: whether Pallas interprets the kernels, on any platform; for tests.
        vmem_bytes: bytes of vector memory that each kernel may use; None for the compiler's limit.
    """

    softmax: Softmax
    blocks: SplashBlocks | None
    interpret: bool = False
    vmem_bytes: int | None = None

    @property
    def has_positions(self) -> bool:
        """Whether the operators take the positions of the queries."""
        return not self.softmax.visibility.is_full

    @property
    def lanes(self) -> int:
        """The number of positions of which shards have multiples."""
        return 1 if self.blocks is None else LANES


def _by_platform(call: SplashCall, kernel: Callable[..., Any], plain: Callable[..., Any], *args: Any) -> Any:
    """Run the kernel on TPUs, and the same computation in plain JAX elsewhere."""
    if call.blocks is None:
        return plain(*args)
    if call.interpret:
        return kernel(*args)
    return lax.platform_dependent(*args, tpu=kernel, default=plain)


@shown
@dataclass(frozen=True)
class OnDevice:
    """What computes attention on one device of a ring (`sequence.ring.Kernel`)."""

    call: SplashCall

    @property
    def lanes(self) -> int:
        """The number of positions of which a kernel takes multiples."""
        return self.call.lanes

    def forward(self, softmax: Softmax, rows: Rows, keys: Keys, positions: jax.Array | None) -> Partial:
        """See `sequence.ring.Kernel`."""
        call, pairs = self._of(softmax, rows, keys, positions)
        out, log_sum = forward_on_device(call, rows.q, keys.k, keys.v, pairs, None)
        return Partial(out.astype(jnp.float32), log_sum)

    def backward(self, softmax: Softmax, rows: Rows, keys: Keys, positions: jax.Array | None) -> tuple[Any, ...]:
        """See `sequence.ring.Kernel`."""
        call, pairs = self._of(softmax, rows, keys, positions)
        found = backward_on_device(call, rows.q, keys.k, keys.v, pairs, rows.out, rows.log_sum, rows.d_out)
        return tuple(x.astype(jnp.float32) for x in found)

    def _of(self, softmax: Softmax, rows: Rows, keys: Keys, positions: jax.Array | None) -> tuple[SplashCall, Pairs]:
        call = replace(self.call, softmax=softmax)
        return call, Pairs(positions if call.has_positions else None, None, rows.segments, keys.segments)


@functools.partial(jax.jit, static_argnums=0)
def forward_on_device(call: SplashCall, q, k, v, pairs: Pairs, sinks):
    """Return attention's result, and the log-sum-exp of each row, `[batch, kv_heads, group, queries]`.

    The log-sum-exp of a row without a visible key is `UNSEEN`.

    Args:
        call: the static part.
        q: scaled queries, `[batch, kv_heads, group, queries, head_dim]`.
        k: keys, `[batch, kv_heads, keys, head_dim]`.
        v: values.
        pairs: positions of the queries, which count from the first key; and segments.
        sinks: for each head the score of a key without a value, or None.
    """

    def plain(q, k, v, pairs, sinks):
        out, log_sum = blockwise_forward(call.softmax, min(FALLBACK_BLOCK, k.shape[2]), *_rows(q, k, v), pairs, sinks)
        return jnp.einsum("bskgd->bkgsd", out), log_sum

    def kernel(q, k, v, pairs, sinks):
        assert call.blocks is not None
        blocks = call.blocks.fit(q.shape[3], k.shape[2])
        info = _mask(call, pairs.positions, k.shape[2], *blocks.forward[:2])

        def one(q, k, v, segments):
            out, log_sum = splash.forward(
                info, q.reshape(-1, *q.shape[2:]), k, v, segments and splash.segment_ids(*segments),
                None if sinks is None else sinks.reshape(-1), **_options(call, blocks),
            )  # fmt: skip
            return out.reshape(*q.shape[:3], -1), log_sum.reshape(q.shape[:3])

        costs = {"_fwd_": stated(forward_cost(q, k, v, call=call))}
        operands = (q, k, v, _segments(pairs))
        out, log_sum = with_costs(jax.vmap(one), costs, *operands, vector_memory_bytes=call.vmem_bytes)
        # The kernel takes the mean of all values in a row without a visible key. The score of each of its keys is
        # MASKED, so the weights are exp(MASKED - UNSEEN) = 0 in the backward pass.
        unseen = ~(log_sum > splash.MASKED / 2)  # also NaN
        return jnp.where(unseen[..., None], 0, out), jnp.where(unseen, UNSEEN, log_sum)

    return _by_platform(call, kernel, plain, q, k, v, pairs, sinks)


@functools.partial(jax.jit, static_argnums=0)
def backward_on_device(call: SplashCall, q, k, v, pairs: Pairs, out, log_sum, d_out):
    """Return the gradients of the scaled queries, of keys and of values.

    The first arguments are those of `forward_on_device`. `out` and `log_sum` are the results over all keys, of which
    `k` and `v` may be a part.
    """

    def plain(q, k, v, pairs, out, log_sum, d_out):
        block, d_out = min(FALLBACK_BLOCK, k.shape[2]), jnp.einsum("bkgsd->bskgd", d_out)
        rows = _rows(q, k, v)
        d_q, d_k, d_v = blockwise_backward(
            call.softmax, block, *rows, pairs, jnp.einsum("bkgsd->bskgd", out), log_sum, d_out
        )
        return jnp.einsum("bskgd->bkgsd", d_q), jnp.einsum("btkd->bktd", d_k), jnp.einsum("btkd->bktd", d_v)

    def kernel(q, k, v, pairs, out, log_sum, d_out):
        assert call.blocks is not None
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
        operands = (q, k, v, _segments(pairs), out, log_sum, d_out)
        return with_costs(jax.vmap(one), costs, *operands, vector_memory_bytes=call.vmem_bytes)

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
        "mask_function": call.softmax.visibility if call.has_positions else None,
        "soft_cap": call.softmax.soft_cap,
        "interpret": call.interpret,
    }


def _mask(call: SplashCall, positions: Any, keys: int, block_q: int, block_k: int, *, of_keys: bool = False) -> Any:
    if positions is None:
        return splash.mask_info(None, None)
    visits = visits_of_keys if of_keys else visits_of_queries
    return splash.mask_info(visits(positions, keys, call.softmax.visibility, block_q, block_k), positions)

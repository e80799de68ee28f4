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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from autoshard._shown import shown
from autoshard.kernels.attention_cost import backward_cost, forward_cost
from autoshard.kernels.block_choice import choose_blocks, stated_vmem_bytes
from autoshard.kernels.blockwise_attention import Pairs, Softmax, sink_gradient
from autoshard.kernels.constants import CONTEXT
from autoshard.kernels.sequence.gathered import gathered_backward, gathered_forward
from autoshard.kernels.sequence.ring import Keys, Ring, Rows, ring_backward, ring_forward
from autoshard.kernels.sequence.ring_cost import gathered_cost, ring_cost
from autoshard.kernels.splash_blocks import SplashBlocks
from autoshard.kernels.splash_passes import OnDevice, SplashCall, backward_on_device, forward_on_device
from autoshard.spmdrules.custom_ops.opaque_primitive import stating_results
from autoshard.spmdrules.custom_ops.operator import operator
from autoshard.spmdrules.custom_ops.sequence_forms import SequenceForm, SequenceForms, with_sequence_forms


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
    plain: bool = False,
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
        plain: whether the operators run in plain JAX on every platform, and take any number of queries and keys.
    """
    call, arrays, positions = _prepared(softmax, q, k, v, blocks, interpret, plain)
    return jnp.einsum("bkgsd->bskgd", _attention(call, *arrays, (*positions, *(segments or ())), sinks))


def splash_forward(
    softmax: Softmax, q: jax.Array, k: jax.Array, v: jax.Array, *, segments: tuple[jax.Array, jax.Array] | None = None,
    interpret: bool = False, plain: bool = False,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """Return attention's result, and the log-sum-exp of each row, `[batch, kv_heads, group, queries]`.

    The arguments are those of `splash_attention`. The log-sum-exp of a row without a visible key is `UNSEEN`.
    """
    call, arrays, positions = _prepared(softmax, q, k, v, None, interpret, plain)
    out, (*_, log_sum) = _attention_forward(call, *arrays, (*positions, *(segments or ())), None)
    return jnp.einsum("bkgsd->bskgd", out), log_sum


def splash_backward(
    softmax: Softmax, q: jax.Array, k: jax.Array, v: jax.Array, out: jax.Array, log_sum: jax.Array, d_out: jax.Array,
    *, segments: tuple[jax.Array, jax.Array] | None = None, interpret: bool = False, plain: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:  # fmt: skip
    """Return the gradients of `q`, `k` and `v` from the results of `splash_forward` and the cotangent of the first."""
    call, arrays, positions = _prepared(softmax, q, k, v, None, interpret, plain)
    rows = [jnp.einsum("bskgd->bkgsd", x.astype(q.dtype)) for x in (out, d_out)]
    extras = (*positions, *(segments or ()))
    d_q, d_k, d_v, *_ = _attention_backward(call, (*arrays, extras, None, rows[0], log_sum), rows[1])
    d_q = (jnp.einsum("bkgsd->bskgd", d_q).astype(jnp.float32) * softmax.scale).astype(q.dtype)
    return d_q, jnp.einsum("bktd->btkd", d_k), jnp.einsum("bktd->btkd", d_v)


def _prepared(softmax: Softmax, q, k, v, blocks: SplashBlocks | None, interpret: bool, plain: bool):
    """Return the static part of a call, its scaled and transposed operands, and the positions of the queries."""
    # The kernels have no factor of the scores.
    q = (q.astype(jnp.float32) * softmax.scale).astype(q.dtype)
    q, k, v = jnp.einsum("bskgd->bkgsd", q), jnp.einsum("btkd->bktd", k), jnp.einsum("btkd->bktd", v)
    shape = (q.shape[3], k.shape[2], q.shape[4], v.shape[3], q.dtype.itemsize)
    blocks = None if plain else blocks or choose_blocks(shape, softmax)
    limit = None if blocks is None else stated_vmem_bytes(blocks, shape)
    call = SplashCall(Softmax(softmax.visibility, 1.0, softmax.soft_cap), blocks, interpret, limit)
    positions = () if softmax.visibility.is_full else (jnp.arange(q.shape[3], dtype=jnp.int32),)
    return call, (q, k, v), positions


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(call: SplashCall, q, k, v, extras: tuple[jax.Array, ...], sinks) -> jax.Array:
    return _attention_forward(call, q, k, v, extras, sinks)[0]


def _attention_forward(call: SplashCall, q, k, v, extras, sinks):
    out, log_sum = _forward_operator(_operands(call, extras, sinks))(
        q, k, v, *extras, *(() if sinks is None else (sinks,)), call=call
    )
    out, log_sum = checkpoint_name(out, CONTEXT), checkpoint_name(log_sum, CONTEXT)
    return out, (q, k, v, extras, sinks, out, log_sum)


def _attention_backward(call: SplashCall, saved, d_out):
    q, k, v, extras, sinks, out, log_sum = saved
    operator = _backward_operator(_operands(call, extras, None))
    gradients = operator(q, k, v, out, log_sum, d_out, *extras, call=call)
    rows = [jnp.einsum("bkgsd->bskgd", x) for x in (out, d_out)]
    return *gradients, None, None if sinks is None else sink_gradient(sinks, rows[0], log_sum, rows[1])


_attention.defvjp(_attention_forward, _attention_backward)


def _operands(call: SplashCall, extras: Sequence[jax.Array], sinks: jax.Array | None) -> _Operands:
    return _Operands(call.has_positions, len(extras) > call.has_positions, sinks is not None, call.lanes)


@shown
@dataclass(frozen=True)
class _Operands:
    """Which operands a call has besides queries, keys and values, and in which blocks its sequence is sharded.

    Attributes:
        positions: whether it has the positions of the queries.
        segments: whether it has the segments of queries and of keys.
        sinks: whether it has sinks.
        lanes: positions in a block of the sequence.
    """

    positions: bool
    segments: bool
    sinks: bool
    lanes: int

    @property
    def queries(self) -> str:
        """The dimension of queries in a rule's text."""
        return "s" if self.lanes == 1 else "(n i)"

    @property
    def sequence(self) -> str:
        """The factor that shards the queries' sequence."""
        return "s" if self.lanes == 1 else "n"

    def rule(self, *, backward: bool, in_ring: bool = False) -> str:
        """The rule's text; `in_ring` has the keys' sequence sharded as the queries' is."""
        s = self.queries
        t = s if in_ring else "t"
        extras = (f", {s}" if self.positions else "") + (f", b {s}, b {t}" if self.segments else "")
        q, k, v, out, rows = f"b h g {s} d", f"b h {t} d", f"b h {t} e", f"b h g {s} e", f"b h g {s}"
        whole = [*(["i"] if self.lanes > 1 else []), *([] if in_ring else ["t"]), "d", "e"]
        ends = [*([f"where i={self.lanes}"] if self.lanes > 1 else []), f"whole {' '.join(whole)}"]
        if backward:
            ends.append(f"reduce g{'' if in_ring else f' {self.sequence}'}")
            return f"{q}, {k}, {v}, {out}, {rows}, {out}{extras} -> {q}, {k}, {v}; {'; '.join(ends)}"
        return f"{q}, {k}, {v}{extras}{', h g' if self.sinks else ''} -> {out}, {rows}; {'; '.join(ends)}"

    def forms(
        self, call: SplashCall, q: Any, k: Any, *, backward: bool, run: Callable[..., Any], cost: Callable[..., Any]
    ) -> SequenceForms:
        """The forms of a call besides its rule.

        Args:
            call: the static part of the call.
            q: the queries.
            k: the keys.
            backward: whether it is the backward pass.
            run: `run(is_ring, call, axes, *shards)` returns the results of a shard.
            cost: the cost of this pass on one device.
        """

        def form(is_ring: bool) -> SequenceForm:
            priced = functools.partial(ring_cost if is_ring else gathered_cost, cost, call)
            return SequenceForm(
                self.rule(backward=backward, in_ring=is_ring), functools.partial(run, is_ring, call), priced
            )

        first = 6 if backward else 3
        keys = (1, 2, *([first + self.positions + 1] if self.segments else []))
        visibility = call.softmax.visibility
        balances = visibility.causal and visibility.window is None
        forms = SequenceForms(self.sequence, ("h", "g"), keys, form(False) if balances else None)
        if q.shape[3] != k.shape[2]:
            return replace(
                forms, no_ring=f"it has {q.shape[3]} queries and {k.shape[2]} keys; a ring needs equally many"
            )
        return replace(forms, ring=form(True))


def _forward_types(q: Any, k: Any, v: Any, *others: Any, call: SplashCall) -> list[jax.ShapeDtypeStruct]:
    return [
        jax.ShapeDtypeStruct((*q.shape[:-1], v.shape[-1]), q.dtype),
        jax.ShapeDtypeStruct(q.shape[:-1], jnp.float32),
    ]


def _backward_types(q: Any, k: Any, v: Any, *others: Any, call: SplashCall) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (q, k, v)]


@functools.cache
def _forward_operator(given: _Operands) -> Callable[..., Any]:
    def run(is_ring: bool, call: SplashCall, axes: tuple[str, ...], q: Any, k: Any, v: Any, *others: Any) -> Any:
        segments = others[given.positions :][:2] if given.segments else (None, None)
        rows, keys = Rows(q, segments[0]), Keys(k, v, segments[1])
        forward = ring_forward if is_ring else gathered_forward
        return forward(_ring(call, axes), rows, keys, others[-1] if given.sinks else None)

    def forms(q: Any, k: Any, v: Any, *others: Any, call: SplashCall) -> SequenceForms:
        return given.forms(call, q, k, backward=False, run=run, cost=forward_cost)

    @operator(given.rule(backward=False), name=_name(given), cost=forward_cost)
    @with_sequence_forms(forms)
    @stating_results(_forward_types)
    def splash_attention(q, k, v, *others, call: SplashCall):
        extras = others[:-1] if given.sinks else others
        return forward_on_device(call, q, k, v, _pairs(given, extras), others[-1] if given.sinks else None)

    return splash_attention


@functools.cache
def _backward_operator(given: _Operands) -> Callable[..., Any]:
    def run(is_ring: bool, call: SplashCall, axes: tuple[str, ...], q, k, v, out, log_sum, d_out, *others: Any) -> Any:
        segments = others[given.positions :] if given.segments else (None, None)
        backward = ring_backward if is_ring else gathered_backward
        return backward(_ring(call, axes), Rows(q, segments[0], out, log_sum, d_out), Keys(k, v, segments[1]))

    def forms(q: Any, k: Any, v: Any, *others: Any, call: SplashCall) -> SequenceForms:
        return given.forms(call, q, k, backward=True, run=run, cost=backward_cost)

    @operator(given.rule(backward=True), name=f"{_name(given)}_gradient", cost=backward_cost)
    @with_sequence_forms(forms)
    @stating_results(_backward_types)
    def splash_attention_gradient(q, k, v, out, log_sum, d_out, *others, call: SplashCall):
        return backward_on_device(call, q, k, v, _pairs(given, others), out, log_sum, d_out)

    return splash_attention_gradient


def _name(given: _Operands) -> str:
    return "blockwise_attention" if given.lanes == 1 else "splash_attention"


def _ring(call: SplashCall, axes: tuple[str, ...]) -> Ring:
    return Ring(axes, call.softmax, OnDevice(call))


def _pairs(given: _Operands, extras: Sequence[jax.Array]) -> Pairs:
    segments = extras[given.positions :] or (None, None)
    return Pairs(extras[0] if given.positions else None, None, *segments)

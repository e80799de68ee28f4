"""What one device of a ring computes and sends, from the cost of attention over the keys of one device.

    full           the keys of one device, hops + 1 times
    balanced       first two chunks on the diagonal and one unmasked pair; then two unmasked pairs of chunks at each hop
    other masks    the keys that the last device sees: it sees the most, and the others wait for it

Combining results reads and writes the accumulators in float32 at each hop. If the work is balanced, each later hop also
selects the queries and keys of its second pair of chunks: XLA reads both chunks of each array and writes one (libtpu
0.0.42, v5p). Results are fused with the product that reads them, so they are not written.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax

from autoshard.kernels.constants import FLOAT32
from autoshard.kernels.sequence.schedule import schedule
from autoshard.kernels.visibility import Visibility
from autoshard.spmdrules.custom_ops.kernel_cost import KernelCost
from autoshard.spmdrules.custom_ops.sequence_forms import SequenceCost


def ring_cost(cost: Callable[..., Any], call: Any, devices: int, q: Any, k: Any, v: Any, *others: Any) -> SequenceCost:
    """Return the cost of the forward or the backward pass on a ring.

    Args:
        cost: the cost of this pass on one device, `attention_cost.forward_cost` or `backward_cost`.
        call: the static part of the call.
        devices: the devices of the ring.
        q: queries of one device, `[batch, kv_heads, group, queries, d]`; anything with a shape and a dtype.
        k: keys of one device, `[batch, kv_heads, keys, d]`.
        v: values of one device, `[batch, kv_heads, keys, e]`.
        others: further operands of one device; in the backward pass three of the queries' shape come first.
    """
    is_backward = len(others) >= 3 and len(others[0].shape) == len(q.shape)
    plan = schedule(call.softmax.visibility, devices, q.shape[3], call.lanes)
    whole = replace(call, softmax=replace(call.softmax, visibility=Visibility()))

    def of(call: Any, queries: int, keys: int) -> tuple[KernelCost, ...]:
        arrays = _resized(q, 3, queries), _resized(k, 2, keys), _resized(v, 2, keys)
        found = cost(*arrays, call=call)
        return found if isinstance(found, tuple) else (found,)

    half, length = plan.length // 2, plan.length
    if plan.balanced:
        found = _times(of(call, half, half), 2) + _times(of(whole, half, half), 1 + 2 * plan.hops)
    elif call.softmax.visibility.is_full:
        found = _times(of(call, length, length), 1 + plan.hops)
    else:
        found = of(call, length, (plan.hops + 1) * length)
    size = q.dtype.itemsize
    moving = _elements(k) + _elements(v)
    segments = sum(_bytes(x) for x in others if len(x.shape) == 2)
    hops = plan.hops + (is_backward and plan.hops > 0)  # gradients travel home
    sent = plan.hops * (moving * size + segments / 2) + hops * moving * FLOAT32 * is_backward
    hop_bytes = sent / max(hops, 1)
    accumulated = math.prod(q.shape[:4]) * (q.shape[4] if is_backward else v.shape[3]) + moving * is_backward
    held = 2 * hop_bytes + accumulated * FLOAT32
    combining = KernelCost(0.0, size, accumulated * (2 * FLOAT32 + size) * plan.hops, held_bytes=held)
    exchanged = [q, k, v, *others, *((q, k, v) if is_backward else (q,))] if plan.balanced else []
    chosen = [x for x in (q, k, v, *others[is_backward:]) if len(x.shape) > 1] if plan.balanced else []
    choosing = KernelCost(0.0, size, 3 / 2 * sum(map(_bytes, chosen)) * plan.hops)
    hidden = plan.hops / (plan.hops + 1)
    return SequenceCost((*found, combining, choosing), hops, hop_bytes, hidden, sum(map(_bytes, exchanged)))


def gathered_cost(
    cost: Callable[..., Any], call: Any, devices: int, q: Any, k: Any, v: Any, *others: Any
) -> SequenceCost:
    """Return the cost of a pass over gathered keys with balanced work (`gathered`).

    The arguments are those of `ring_cost`, but keys and values are whole. The first chunk of queries sees one chunk of
    keys, the last one all; the kernels step over all keys for both.
    """
    half = q.shape[3] // 2
    chunk = _resized(q, 3, half)

    def of(keys: int) -> tuple[KernelCost, ...]:
        found = cost(chunk, _resized(k, 2, keys), _resized(v, 2, keys), call=call)
        return found if isinstance(found, tuple) else (found,)

    late = of(k.shape[2])
    early = [replace(e, overhead_us=each.overhead_us) for e, each in zip(of(half), late, strict=True)]
    rows = [q, *(x for x in others if len(x.shape) >= 4 and x.shape[3] == q.shape[3])]
    exchanged = [*rows, q]  # the result, or the gradient of the queries
    return SequenceCost((*early, *late), 0, 0.0, 0.0, sum(map(_bytes, exchanged)))


def _resized(x: Any, dim: int, size: int) -> Any:
    return jax.ShapeDtypeStruct((*x.shape[:dim], size, *x.shape[dim + 1 :]), x.dtype)


def _times(costs: tuple[KernelCost, ...], runs: int) -> tuple[KernelCost, ...]:
    return tuple(replace(each.times(runs), held_bytes=each.held_bytes) for each in costs)


def _elements(x: Any) -> int:
    return math.prod(x.shape)


def _bytes(x: Any) -> float:
    return float(_elements(x) * x.dtype.itemsize)

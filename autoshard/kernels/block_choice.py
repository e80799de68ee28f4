"""Chooses the block sizes of splash attention by shape, vector memory and estimated time.

    bytes of a kernel = 2 x (blocks of operands and results) + its own values + blocks of scores
    blocks            = those of the default size, or larger ones that fit, if they take less time

Larger blocks need fewer steps of the grid and load keys and values less often. But at the boundary of a causal mask
they compute more masked pairs. They fit only if the compiler may use more vector memory than by default
(`xla_tpu_scoped_vmem_limit_kib`). A plan keeps the blocks of its kernels, and a bound plan gets them again.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import jax

from autoshard._shown import shown
from autoshard.kernels.attention_cost import dkv_cost, dq_cost, forward_cost
from autoshard.kernels.constants import (
    FLOAT32,
    LANES,
    LARGER_BLOCKS,
    RESULTS_HELD,
    SCOPED_VMEM_BYTES,
    SCORES_HELD,
    VMEM_SHARE,
)
from autoshard.kernels.splash_blocks import SplashBlocks
from autoshard.spmdrules.custom_ops.kernel_cost import KernelCost

Shape = tuple[int, int, int, int, int]  # queries, keys, features of a query and of a value, bytes of an element


@shown
@dataclass(frozen=True)
class BlockRules:
    """The figures that decide the block sizes on the machine that a program is traced for.

    Attributes:
        vmem_bytes: bytes of vector memory that one kernel may use.
        flops: FLOP/s of the matrix units at 16 bits; 0 if unknown.
        vector_ops: operations per second of the vector units; 0 if unknown.
        bandwidth: bytes per second of the device's memory; 0 if unknown.
        kept: the blocks of a plan that already exists, by shape.
    """

    vmem_bytes: float = SCOPED_VMEM_BYTES
    flops: float = 0.0
    vector_ops: float = 0.0
    bandwidth: float = 0.0
    kept: tuple[tuple[Shape, SplashBlocks], ...] = ()

    def time_us(self, cost: KernelCost) -> float:
        """The microseconds of a kernel."""
        times = ((cost.flops, self.flops), (cost.vector_ops, self.vector_ops), (cost.moved_bytes, self.bandwidth))
        return max(amount / rate if rate else 0.0 for amount, rate in times) * 1e6 + cost.overhead_us


_RULES = jax.make_user_context(None)


@contextmanager
def under_rules(rules: BlockRules | None) -> Iterator[None]:
    """Choose blocks by these rules inside this context; None is for the defaults."""
    with _RULES(rules):
        yield


def choose_blocks(shape: Shape, softmax: Any) -> SplashBlocks:
    """Return the blocks of a call under the rules of the context.

    Args:
        shape: the shape of the call.
        softmax: the static part of attention.
    """
    rules = _RULES.value or BlockRules()
    queries, keys, *_, itemsize = shape
    kept = dict(rules.kept).get(shape)
    if kept is not None:
        return kept
    default = SplashBlocks.for_shape(queries, keys, itemsize)
    if rules.vmem_bytes <= SCOPED_VMEM_BYTES:
        return default
    best = {}
    for kernel, cost in (("forward", forward_cost), ("dkv", dkv_cost), ("dq", dq_cost)):
        sizes = [getattr(default, kernel), *_larger(getattr(default, kernel), shape)]
        some = [replace(default, **{kernel: size}) for size in sizes]
        fitting = [each for each in some[1:] if vmem_bytes(each, shape)[kernel] <= VMEM_SHARE * rules.vmem_bytes]
        times = {each: rules.time_us(_price(cost, shape, softmax, each)) for each in (some[0], *fitting)}
        best[kernel] = getattr(min(times, key=lambda each, times=times: times[each]), kernel)
    return SplashBlocks(**best)


def vmem_bytes(blocks: SplashBlocks, shape: Shape) -> Mapping[str, float]:
    """Return the estimated bytes of vector memory of each kernel: `forward`, `dkv` and `dq`."""
    *_, itemsize = shape
    d, e = (-(-features // LANES) * LANES for features in shape[2:4])  # arrays fill whole lanes

    def held(q: int, k: int, computed: int, query_rows: int, key_rows: int, own: float) -> float:
        operands = (q * query_rows + k * key_rows) * itemsize
        return 2.0 * operands + own + SCORES_HELD * q * computed * FLOAT32

    forward, dkv, (dq_q, dq_k) = blocks.forward, blocks.dkv, blocks.dq
    return {
        # queries and results; keys and values; two statistics and the log-sum-exp (each fills all lanes); arrays in the
        # shape of the result
        "forward": held(*forward, d + e, d + e, forward[0] * (4 * LANES + RESULTS_HELD * e) * FLOAT32),
        # queries, results' gradients; keys, values and their gradients; the sums of the gradients
        "dkv": held(*dkv, d + e, 2 * (d + e), dkv[1] * (d + e) * FLOAT32),
        # queries, their gradients and results' gradients; keys and values; the sum of the gradient
        "dq": held(dq_q, dq_k, dq_k, 2 * d + e, d + e, dq_q * d * FLOAT32),
    }


def stated_vmem_bytes(blocks: SplashBlocks, shape: Shape) -> int | None:
    """Return the vector memory that the kernels of a call may use; None where the compiler's default limit is enough.

    It is that for which the rules of the context choose blocks. Kernels that state it also compile where the plan's
    compiler options do not apply, as in a call inside another `jit`.
    """
    rules = _RULES.value or BlockRules()
    enough = max(vmem_bytes(blocks, shape).values()) <= SCOPED_VMEM_BYTES
    return None if enough or rules.vmem_bytes <= SCOPED_VMEM_BYTES else int(rules.vmem_bytes)


def _larger(default: tuple[int, ...], shape: Shape) -> Iterator[tuple[int, ...]]:
    """Larger blocks of queries and keys that divide the sequences; keys computed at a time are unchanged."""
    queries, keys = shape[:2]
    for q, k in itertools.product((default[0], *LARGER_BLOCKS), (default[1], *LARGER_BLOCKS)):
        if queries % q == 0 and keys % k == 0 and (q, k) != default[:2]:
            yield (q, k, *default[2:])


def _price(cost: Any, shape: Shape, softmax: Any, blocks: SplashBlocks) -> KernelCost:
    """The cost of one head."""
    queries, keys, d, e, itemsize = shape
    dtype = SimpleNamespace(itemsize=itemsize)
    q = SimpleNamespace(shape=(1, 1, 1, queries, d), dtype=dtype)
    k, v = (SimpleNamespace(shape=(1, 1, keys, width), dtype=dtype) for width in (d, e))
    return cost(q, k, v, call=SimpleNamespace(softmax=softmax, blocks=blocks))


def blocks_of(fn: Any) -> SplashBlocks | None:
    """Return the blocks of an operator of splash attention; None for another function."""
    call = getattr(fn, "keywords", {}).get("call")
    blocks = getattr(call, "blocks", None)
    return blocks if isinstance(blocks, SplashBlocks) else None

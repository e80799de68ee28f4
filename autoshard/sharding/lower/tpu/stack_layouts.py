"""The memory layouts of stacks of activations in programs that offload activations.

The forward loop over layers stacks the activations that the backward loop needs, in device memory or in host memory.
XLA:TPU chooses the layout of such a stack: the order of its dimensions in memory. Its choice can be bad:

- If some of the stacks are in host memory, XLA peels the first iteration off the forward loop. It then chooses the
  layout of the kept stacks separately for each loop. If the two layouts differ, it copies whole stacks between them.
- A stack in host memory can get a layout in which the positions of the sequence are the minor dimension. Then both
  loops copy each slice to another layout, and the copy in the forward loop makes the transfer start late.

So slices are constrained to the layout in which the layers compute. That is the row-major layout, or for values whose
attention heads are a dimension of their own, the layout with the heads in front of the positions, which the attention
kernels take. Slices in host memory are constrained in both loops, and kept slices in the backward loop.

Compiled for v6e:2x4 up to the assignment of buffers (libtpu 0.0.42.1), Llama-3 8B under `fsdp:8`, 32 rows of 8192, with
`host:residual keep:mlp_in`, needs 78.2 GiB. Without the constraint it needs 100.7 GiB, and copies two stacks of 28 GiB.

Compiled for v6e:8x8, Llama-3.1 8B under `dp:2 fsdp:32`, with `host:qkv+context+out_proj`, takes 4.58 s by the joined
measure of `benchmarks/recipes.py --only llama3.1-8b-v6e-64`. Without the constraint of slices in host memory, it takes
4.89 s, because more transfers are exposed.

Kept values with attention heads have no constraint. Compiled for v5e:2x4, GPT 350M under `fsdp:8`, 64 rows of 1024,
with `host:residual keep:qkv+context`, needs 4.71 GiB. With the constraint it needs 6.27 GiB, and a step takes 5 %
longer. A value in host memory has no constraint if the constraint would pad the value. It also has none if it has four
or more dimensions but no heads, as images have.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import jax
from jax.experimental.layout import Layout as MemoryLayout
from jax.experimental.layout import with_layout_constraint

from autoshard import _compat
from autoshard.sharding.layout.layout import Layout
from autoshard.sharding.lower.activation_spread import has_rows
from autoshard.sharding.lower.body_lowering import BodyLowering
from autoshard.sharding.machines.constants import TPU_LANES
from autoshard.sharding.program.host_memory import is_host_transfer
from autoshard.spmdrules.core.placement import to_partition_spec
from autoshard.spmdrules.ir.program import Op, Program, inlined

_sent: WeakKeyDictionary[Program, frozenset[int]] = WeakKeyDictionary()


def pinned_slices(lowering: BodyLowering, op: Op, count: int, slices: list[Any]) -> list[Any]:
    """Return the slices of one iteration of a scan, with activations constrained to the layout of the layers.

    No slice is constrained if the scan takes no stack from host memory, or if the program is not compiled for TPUs.
    Parameters, their gradients and moments, slices that are still in host memory, and values that are not floats are
    never constrained.

    Args:
        lowering: lowers the scan.
        op: the scan.
        count: the number of its operands in front of the stacks.
        slices: one slice of each stack.
    """
    layout, avals = lowering.layout, lowering.layout.axes.program.avals
    weights = layout.axes.parameter_aliases, layout.roles.computed_weights
    if lowering.tpu is None or not any(_compat.is_on_host(avals[v]) for v in op.operands[count:] if v >= 0):
        return slices

    def pinned(value: int, x: Any) -> Any:
        if any(value in found for found in weights) or _compat.is_on_host(x) or not has_rows(layout, value):
            return x
        order = order_on_host(layout, value) if _compat.is_on_host(avals[value]) else _order_kept(layout, value)
        return _ordered(lowering, value, x, order)

    return list(map(pinned, op.blocks[0].inputs[count:], slices))


def pinned_results(lowering: BodyLowering, op: Op, args: list[Any]) -> list[Any]:
    """Return the operands of a transfer to host memory, constrained to the layout of the layers.

    Operands stay as they are if no scan stacks the result in host memory, if they are no activations, or if the program
    is not compiled for TPUs.

    Args:
        lowering: lowers the transfer.
        op: the transfer.
        args: its operands.
    """
    layout, program = lowering.layout, lowering.layout.axes.program
    if lowering.tpu is None:
        return args
    if program not in _sent:
        _sent[program] = frozenset(_stacked_on_host(program))
    return [
        _ordered(lowering, value, x, order_on_host(layout, value))
        if value in _sent[program] and has_rows(layout, value)
        else x
        for value, x in zip(op.operands, args, strict=True)
    ]


def _stacked_on_host(program: Program) -> list[int]:
    """Return the values in device memory that a scan transfers to host memory and stacks there."""
    found: list[int] = []
    for op in program.ops():
        if op.name == "scan":
            _, n_carry = _compat.scan_arity(op.eqn.params)
            stacked = {v for v in op.blocks[0].outputs[n_carry:] if v >= 0 and _compat.is_on_host(program.avals[v])}
            for each in filter(is_host_transfer, inlined(op.blocks[0])):
                found += [v for v, moved in zip(each.operands, each.results, strict=True) if moved in stacked]
    return found


def _order_kept(layout: Layout, value: int) -> Sequence[int]:
    """Return the order of the dimensions of a kept value, major to minor; empty if it has no constraint."""
    return () if any(_has_heads(layout, value)) else range(len(layout.axes.of_value[value]))


def order_on_host(layout: Layout, value: int) -> Sequence[int]:
    """Return the order of the dimensions of a value in host memory, major to minor; empty if it has no constraint.

    The first dimension, the batch, is always the major one, and the last dimension is always the minor one.
    """
    shape = layout.axes.program.avals[value].shape
    if not shape or shape[-1] // layout.shard_count(layout.spec(value)[-1]) % TPU_LANES:
        return ()
    has_heads = [*_has_heads(layout, value)[:-1], False]  # heads and their features can be one dimension
    if len(shape) > 3 and not any(has_heads):
        return ()
    return sorted(range(len(shape)), key=lambda d: (d != 0, not has_heads[d], d))


def _has_heads(layout: Layout, value: int) -> list[bool]:
    heads = {*layout.roles.heads}
    return [not heads.isdisjoint(dim) for dim in layout.axes.of_value[value]]


def _ordered(lowering: BodyLowering, value: int, x: Any, order: Sequence[int]) -> Any:
    """Return `x` with its dimensions in this order in memory, if there is an order for it."""
    if not order or x.ndim < 2 or not _compat.is_floating(x.dtype):
        return x
    memory, spec = MemoryLayout(major_to_minor=tuple(order)), to_partition_spec(lowering.layout.spec(value))

    def ordered(shard: jax.Array) -> jax.Array:
        return with_layout_constraint(shard, memory)

    return jax.shard_map(ordered, mesh=lowering.mesh, in_specs=spec, out_specs=spec, check_vma=False)(x)

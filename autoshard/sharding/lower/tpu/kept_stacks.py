"""The memory layout of kept activations in programs that also offload activations.

The forward loop over layers stacks the activations that the backward loop needs. If some of the stacks are in host
memory, XLA:TPU peels the first iteration off the forward loop. It then chooses the layout of the kept stacks (the order
of their dimensions in memory) separately for each loop. If the two layouts differ, it copies whole stacks between the
loops. The forward loop uses the row-major layout, so the slices in the backward loop are constrained to it.

Compiled for v6e:2x4 up to the assignment of buffers (libtpu 0.0.42.1), Llama-3 8B under `fsdp:8`, 32 rows of 8192, with
`host:residual keep:mlp_in`, needs 78.2 GiB. Without the constraint it needs 100.7 GiB, and copies two stacks of 28 GiB.

Values with attention heads have no constraint, because the forward loop does not store them in the row-major layout.
Compiled for v5e:2x4, GPT 350M under `fsdp:8`, 64 rows of 1024, with `host:residual keep:qkv+context`, needs 4.71 GiB.
With the constraint it needs 6.27 GiB, and a step takes 5 % longer.
"""

from __future__ import annotations

from typing import Any

import jax
from jax.experimental.layout import Layout as MemoryLayout
from jax.experimental.layout import with_layout_constraint

from autoshard import _compat
from autoshard.sharding.layout.layout import Layout
from autoshard.spmdrules.core.placement import to_partition_spec
from autoshard.spmdrules.ir.program import Op


def pinned_slices(layout: Layout, mesh: Any, op: Op, count: int, slices: list[Any]) -> list[Any]:
    """Return the slices of one iteration of a scan, with kept activations constrained to the row-major layout.

    If the scan takes no stack from host memory, all slices stay as they are. Slices of parameters, values with
    attention heads, and values that are not floats always stay as they are.

    Args:
        layout: the layout.
        mesh: the mesh of devices.
        op: the scan.
        count: the number of its operands in front of the stacks.
        slices: one slice of each stack.
    """
    avals, weights = layout.axes.program.avals, (layout.axes.parameter_aliases, layout.roles.computed_weights)
    if not any(_compat.is_on_host(avals[v]) for v in op.operands[count:] if v >= 0):
        return slices

    heads = {*layout.roles.heads}

    def pinned(value: int, x: Any) -> Any:
        waits = not any(value in found for found in weights) and not _compat.is_on_host(avals[value])
        has_heads = any(not heads.isdisjoint(dim) for dim in layout.axes.of_value[value])
        if not waits or has_heads or x.ndim < 2 or not _compat.is_floating(x.dtype):
            return x
        order, spec = MemoryLayout(major_to_minor=tuple(range(x.ndim))), to_partition_spec(layout.spec(value))

        def ordered(shard: jax.Array) -> jax.Array:
            return with_layout_constraint(shard, order)

        return jax.shard_map(ordered, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)(x)

    return list(map(pinned, op.blocks[0].inputs[count:], slices))

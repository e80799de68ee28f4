"""Collective matmul: products in parts, which run beside permutes in a ring.

With n devices in the ring, an operand arrives in n shards. Each shard is multiplied while the next one is on its way:

    gather   result[s] = shard[s] x other          if the sharded factor is in the result (slice s of the result)
             result   += shard[s] x other[s]       if it is summed, in the order in which the shards arrive
    sum      every device computes its part of slice s of the result and adds what its neighbour sent

The sums of `gather` are in float32 where the result has fewer bits. The order of the terms differs from device to
device, so results that are replicated over the ring may differ in their last bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from autoshard.sharding.overlap.marks import Ring
from autoshard.spmdrules.core.placement import Spec, to_partition_spec
from autoshard.spmdrules.ir.program import Op


def ring_product(op: Op, ring: Ring, mesh: Any, args: Sequence[Any], specs: Sequence[Spec], result: Spec) -> Any:
    """Return the result of a `dot_general`.

    Args:
        op: the operator.
        ring: the ring.
        mesh: the mesh of devices.
        args: both operands.
        specs: their shardings; the gathered operand is still sharded over the ring.
        result: the sharding of the result; a summed one is sharded over the ring.
    """
    body = _gathering(op, ring, mesh.shape[ring.axis]) if ring.array >= 0 else _summing(op, ring, mesh.shape[ring.axis])
    ins = tuple(map(to_partition_spec, specs))
    return jax.shard_map(body, mesh=mesh, in_specs=ins, out_specs=to_partition_spec(result), check_vma=False)(*args)


def _gathering(op: Op, ring: Ring, count: int) -> Any:
    assert op.rule is not None
    factor = op.rule.operands[ring.array][ring.dim][0]
    other_dim = _dim_of(factor, op.rule.operands[1 - ring.array])
    result_dim = _dim_of(factor, op.rule.results[0])
    dtype = op.eqn.outvars[0].aval.dtype
    wide = jnp.promote_types(dtype, jnp.float32) if jnp.issubdtype(dtype, jnp.floating) else dtype

    def body(*shards: jax.Array) -> jax.Array:
        piece, other, size = shards[ring.array], shards[1 - ring.array], shards[ring.array].shape[ring.dim]
        me, total = lax.axis_index(ring.axis), None
        for step in range(count):
            following = _sent(piece, ring.axis, count) if step + 1 < count else piece
            start = ((me - step) % count) * size
            part = other if other_dim is None else lax.dynamic_slice_in_dim(other, start, size, other_dim)
            operands = (piece, part) if ring.array == 0 else (part, piece)
            product = _dot(op, *operands, None if result_dim is not None else wide)
            if result_dim is None:
                total = product if total is None else total + product
            else:
                if total is None:
                    shape = [*product.shape]
                    shape[result_dim] *= count
                    total = jnp.zeros(shape, product.dtype)
                total = lax.dynamic_update_slice_in_dim(total, product, start, result_dim)
            piece = following
        assert total is not None
        return total.astype(dtype)

    return body


def _summing(op: Op, ring: Ring, count: int) -> Any:
    assert op.rule is not None
    factor = op.rule.results[0][ring.dim][0]
    dims = [_dim_of(factor, operand) for operand in op.rule.operands]

    def body(*shards: jax.Array) -> jax.Array:
        me, total = lax.axis_index(ring.axis), None
        for step in range(count):
            index = (me + count - 1 - step) % count  # after the last step each device has its own slice
            lhs, rhs = (
                x if d is None else lax.dynamic_slice_in_dim(x, index * (x.shape[d] // count), x.shape[d] // count, d)
                for x, d in zip(shards, dims, strict=True)
            )
            sent = None if total is None else _sent(total, ring.axis, count)
            product = _dot(op, lhs, rhs, None)
            total = product if sent is None else sent + product
        assert total is not None
        return total

    return body


def _dim_of(factor: str, dims: Sequence[Sequence[str]]) -> int | None:
    """The dimension that has a factor."""
    return next((d for d, names in enumerate(dims) if factor in names), None)


def _sent(x: jax.Array, axis: str, count: int) -> jax.Array:
    """The array of the previous device in the ring."""
    return lax.ppermute(x, axis, [(i, (i + 1) % count) for i in range(count)])


def _dot(op: Op, lhs: jax.Array, rhs: jax.Array, dtype: Any) -> jax.Array:
    params = op.eqn.params
    return lax.dot_general(
        lhs, rhs, params["dimension_numbers"], precision=params["precision"],
        preferred_element_type=params["preferred_element_type"] if dtype is None else dtype,
    )  # fmt: skip

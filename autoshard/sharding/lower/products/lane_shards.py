"""Gradients of weights whose shards have 128 columns, as many as a register of a TPU has lanes.

JAX computes the gradient of a weight `[in, out]` as `[out, in]` and transposes it. If `in` is sharded, and each shard
has 128 elements of it, XLA:TPU often all-reduces the product and slices it, instead of reduce-scattering it: 1024 over
8 devices on v5e:2x4, and 4096 over 32 on v5p:4x4x4, but not 2048 over 16 on v5p:4x4x2 (libtpu 0.0.42.1). Shards of 64,
144 and 256 elements were reduce-scattered. So such a product is computed as `[in, out]`: 128 rows in each shard are
reduce-scattered. `benchmarks/reductions.py` shows it for squares of 1024 and 2048.

The gradient of a weight `[in, heads, head_dim]` is computed in the same way: `[in, heads, head_dim]` instead of
`[heads, head_dim, in]`. With 128 features in a head it is then reduce-scattered (Llama-2 7B, v5p:4x4x4, `dp:2 fsdp:32`:
442 instead of 447 ms by the roofline). With 64 it is all-reduced as before, so such weights are stored along heads
(`axes.weights.storage_dims`). Weights `[heads, head_dim, out]` are computed as they are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from autoshard.sharding.machines.constants import TPU_LANES
from autoshard.spmdrules.core.placement import Spec
from autoshard.spmdrules.ir.program import Op


def is_lane_sharded(op: Op, computed: Spec, want: Spec, mesh: Mapping[str, int]) -> bool:
    """Whether a product is scattered along its last dimension, and each shard has `TPU_LANES` elements of it.

    The last dimension must be the only one of its operand that is not summed.

    Args:
        op: the operator.
        computed: the sharding in which it is computed.
        want: the sharding of its result.
        mesh: mesh axis -> number of devices.
    """
    if op.name != "dot_general" or len(want) < 2 or any(op.eqn.params["dimension_numbers"][1]):
        return False
    rhs, summed = op.eqn.invars[1], op.eqn.params["dimension_numbers"][0][1]
    if len(rhs.aval.shape) - len(summed) != 1:
        return False
    shards = math.prod(mesh[axis] for axis in want[-1])
    columns = op.eqn.outvars[0].aval.shape[-1]
    return computed[:-1] == want[:-1] and not computed[-1] and columns == TPU_LANES * shards


def columns_first(op: Op, args: Sequence[Any], want: Spec, constrain: Callable[[Any, Spec], Any]) -> Any:
    """Return a product that was computed with its last dimension first."""
    lhs, rhs = args
    (lhs_dims, rhs_dims), _ = op.eqn.params["dimension_numbers"]
    keywords = {name: op.eqn.params[name] for name in ("precision", "preferred_element_type")}
    product = lax.dot_general(rhs, lhs, ((rhs_dims, lhs_dims), ((), ())), **keywords)
    return jnp.moveaxis(constrain(product, (want[-1], *want[:-1])), 0, -1)

"""The facts of a plan that decide which option sets apply to it."""

from __future__ import annotations

import math

import jax.numpy as jnp

from autoshard.sharding.machines.chips import ALIASES, CHIPS
from autoshard.sharding.machines.options import ProgramFacts, set_names
from autoshard.sharding.plan.sharding_plan import ShardingPlan
from autoshard.sharding.plan.tensors import Leaf

_LAYERS = ("layers", "blocks")  # names of the axis of stacked layers (`axes.naming.axis_names`), without a number
_SLICE = "slice"
GATHER = "all-gather"


def program_facts(plan: ShardingPlan) -> ProgramFacts | None:
    """The facts of a plan; None if its target is not a named chip with option sets."""
    word = plan.target.strip().lower().partition(":")[0]
    chip = ALIASES.get(word, word)
    if plan.target.endswith(".toml") or not set_names(chip):
        return None
    return ProgramFacts(
        chip=chip,
        slices=dict(plan.topology).get(_SLICE, 1),
        host_traffic_bytes=plan.estimate.host_traffic_bytes,
        collectives=frozenset(kind for kind, *_ in plan.traffic),
        gather_dims=max((_torus_dims(plan, axes) for kind, axes, *_ in plan.traffic if kind == GATHER), default=0),
        layer_bytes=layer_bytes(plan),
        memory_share=plan.estimate.peak_memory_bytes / CHIPS[chip].memory_bytes,
    )


def _torus_dims(plan: ShardingPlan, axes: str) -> int:
    """The number of torus dimensions that mesh axes, separated by spaces, span."""
    return len(
        {dim for axis in axes.split() for dim, size, _ in plan.placing.get(axis, ()) if dim in "xyz" and size > 1}
    )


def layer_bytes(plan: ShardingPlan) -> int:
    """Bytes of the weights of one layer, in the types that they are stored in; 0 if no layers are stacked."""
    return sum(map(_bytes_of_one, plan.inputs))


def _bytes_of_one(leaf: Leaf) -> int:
    stacked = leaf.role == "parameter" and bool(leaf.axes) and leaf.axes[0].partition("_")[0] in _LAYERS
    return math.prod(leaf.shape[1:]) * jnp.dtype(leaf.dtype).itemsize if stacked else 0

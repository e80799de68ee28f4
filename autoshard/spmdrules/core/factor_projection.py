"""Reads from the spec of one array which mesh axis shards which factor of a rule."""

from __future__ import annotations

from collections.abc import Mapping

from autoshard.spmdrules.core.placement import Spec
from autoshard.spmdrules.core.rule import Dims, Rule


def project(rule: Rule, dims: Dims, spec: Spec, mesh: Mapping[str, int]) -> dict[str, str]:
    """Maps each mesh axis of a spec to the factor that it shards.

    An axis that cannot shard a factor evenly is left out, and so are the axes minor to it.
    """
    found: dict[str, str] = {}
    factors = rule.by_name
    for dim, axes in zip(dims, spec, strict=True):
        parts, count = list(dim), 1
        for axis in axes:
            while parts and count == factors[parts[0]].size and mesh[axis] > 1:
                parts, count = parts[1:], 1
            if not parts or not factors[parts[0]].shardable_into(count * mesh[axis]):
                break  # a shard of a minor factor is contiguous only if the major factors are fully sharded
            found[axis] = parts[0]
            count *= mesh[axis]
    return found

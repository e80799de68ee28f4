"""Which mesh axis shards which factor of a rule, read off the spec of one operand."""

from __future__ import annotations

from collections.abc import Mapping

from autoshard.spmdrules.core.placement import Spec
from autoshard.spmdrules.core.rule import Dims, Rule


def project(rule: Rule, dims: Dims, spec: Spec, mesh: Mapping[str, int]) -> dict[str, str]:
    """Which factor each mesh axis of a spec cuts; axes that cut none that can be cut evenly are left out."""
    found: dict[str, str] = {}
    factors = rule.by_name
    for dim, axes in zip(dims, spec, strict=True):
        parts, cut = list(dim), 1
        for axis in axes:
            while parts and cut == factors[parts[0]].size and mesh[axis] > 1:
                parts, cut = parts[1:], 1
            if not parts or not factors[parts[0]].cuts_into(cut * mesh[axis]):
                break  # what is minor to a part that is not cut to single elements is not contiguous
            found[axis] = parts[0]
            cut *= mesh[axis]
    return found

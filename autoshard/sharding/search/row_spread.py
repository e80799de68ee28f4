"""Over how many devices rows other than the batch are spread, such as the nodes of a graph whose edges are the batch.

    dp:2 fsdp:8                        edges and nodes over 16 devices
    dp:2 fsdp:8 dp-nodes               edges over 16 devices, nodes over 8
    dp:2 fsdp:8 dp-nodes fsdp-nodes    edges over 16 devices, nodes replicated

If nodes are sharded, they are gathered where edges read them, and sums of edges are reduce-scattered. The work on nodes
is divided. XLA:TPU may all-reduce instead of reduce-scattering over all devices (`machines.topology`). Then it can be
faster to reduce-scatter over one mesh axis, and to all-reduce the shards over the others.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from autoshard.sharding.axes.logical_axes import LogicalAxes
from autoshard.sharding.axes.roles import Roles
from autoshard.sharding.layout.plan_edits import Change
from autoshard.sharding.layout.plan_request import OF_BATCH, Request


def row_spreads(axes: LogicalAxes, roles: Roles, plan: Request) -> Iterator[Request]:
    """The plans that differ from a plan in that only one of its mesh axes shards the other rows, or none."""
    sharding = {
        axis: [c for c in roles.other_rows if axes.sizes[c] % n == 0]
        for axis, n in plan.sizes.items()
        if n > 1 and plan.kinds[axis] in OF_BATCH
    }
    kept = [*sharding] if len(sharding) > 1 else []
    for one in (*kept, None):
        changes = [Change(axis, False, axes.name(c)) for axis, rows in sharding.items() if axis != one for c in rows]
        if changes:
            yield replace(plan, changes=(*plan.changes, *changes))

"""Over how many devices rows other than the batch are spread, such as the nodes of a graph whose edges are the batch.

    dp:2 fsdp:8             edges and nodes over 16 devices
    dp:2 fsdp:8 dp-nodes    edges over 16 devices, nodes over 8
    dp:16 dp-nodes          edges over 16 devices, nodes replicated

If nodes are sharded, they are gathered where edges read them, and sums of edges are reduce-scattered. The work on nodes
is divided. XLA:TPU may all-reduce instead of reduce-scattering over all devices (`machines.topology`). Then it can be
faster to reduce-scatter over one mesh axis, and to all-reduce the shards over the others.

A mesh axis that stores state always shards the other rows. Otherwise XLA shards them over it by itself, with traffic
that no plan counts. `graph-messages` on v5e:4x4 under `dp:8 fsdp:2 state fsdp-nodes` is planned at 68.8 ms and takes
84.7 ms compiled (libtpu 0.0.42.1, joined measure); `dp:2 fsdp:8 dp-nodes` is planned at 69.0 ms and takes 76.5 ms.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from autoshard.sharding.axes.logical_axes import LogicalAxes
from autoshard.sharding.axes.roles import Roles
from autoshard.sharding.layout.plan_edits import Change
from autoshard.sharding.layout.plan_request import Request


def row_spreads(axes: LogicalAxes, roles: Roles, plan: Request) -> Iterator[Request]:
    """Yield the plan in which `dp` does not shard the other rows; nothing if `dp` stores state."""
    changes = [
        Change(axis, False, axes.name(c))
        for axis, n in plan.sizes.items()
        if plan.kinds[axis] == "dp" and n > 1 and "state" not in plan.flags
        for c in roles.other_rows
        if axes.sizes[c] % n == 0
    ]
    if changes:
        yield replace(plan, changes=(*plan.changes, *changes))

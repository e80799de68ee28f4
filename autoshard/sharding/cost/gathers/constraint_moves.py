"""The collectives that the program's own sharding constraints need.

A constraint moves its operand from the plan's sharding to that of the constraint, and from there to the plan's sharding
of the result. A mesh axis that stays on its dimension costs nothing, and neither does a mesh axis that is added.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from jax.sharding import NamedSharding, PartitionSpec

from autoshard.sharding.cost.collectives import Collective, collective
from autoshard.sharding.layout.layout import Layout
from autoshard.sharding.machines.targets import Target
from autoshard.sharding.program.array_sizes import nbytes
from autoshard.spmdrules.core.placement import ReshardKind, Spec, from_partition_spec, shard_count
from autoshard.spmdrules.ir.program import Op, Program


def constraints(program: Program) -> list[tuple[Op, PartitionSpec]]:
    """Return the sharding constraints of a program: the operators, and the specs that they request."""
    found = ((op, op.eqn.params["sharding"]) for op in program.ops() if op.name == "sharding_constraint")
    return [(op, sharding.spec) for op, sharding in found if isinstance(sharding, NamedSharding)]


def constraint_moves(requested: Sequence[tuple[Op, PartitionSpec]], layout: Layout, target: Target) -> list[Collective]:
    """Return the collectives of sharding constraints under a layout.

    Args:
        requested: the constraints (`constraints`).
        layout: the layout. Requested mesh axes that it lacks are ignored, because `check_constraints` rejects such a
            layout if it is chosen.
        target: the machine.
    """
    if not requested:
        return []
    assignment, found = target.assign(layout.mesh), []
    for op, spec in requested:
        aval = layout.axes.program.avals[op.results[0]]
        after = layout.spec(op.results[0])
        before = layout.spec(op.operands[0]) if op.operands[0] >= 0 else after
        wanted = tuple(
            tuple(axis for axis in axes if axis in layout.mesh) for axes in from_partition_spec(spec, aval.ndim)
        )
        free = {d for d, entry in enumerate(spec) if entry is PartitionSpec.UNCONSTRAINED}
        wanted = tuple(before[d] if d in free else axes for d, axes in enumerate(wanted))
        for source, goal in ((before, wanted), (wanted, after)):
            local = nbytes(aval) / shard_count(source, layout.mesh)
            for kind, axis in _moved_axes(source, goal):
                found.append(collective(assignment, kind, (axis,), local, op.trips, op.line))
                local *= layout.mesh[axis] if kind == "all-gather" else 1
    return found


def _moved_axes(source: Spec, goal: Spec) -> Iterator[tuple[ReshardKind, str]]:
    """Yield the kind of collective and the mesh axis of each move from one spec to another.

    >>> list(_moved_axes((("dp",), ("tp",)), (("tp",), ())))
    [('all-gather', 'dp'), ('all-to-all', 'tp')]
    """
    kept = {axis: d for d, axes in enumerate(goal) for axis in axes}
    for d, axes in enumerate(source):
        for axis in axes:
            if axis not in kept:
                yield "all-gather", axis
            elif kept[axis] != d:
                yield "all-to-all", axis

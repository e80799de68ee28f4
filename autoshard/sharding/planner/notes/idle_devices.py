"""Devices that a plan leaves without work of their own: they repeat the work of others, or are not in its mesh."""

from __future__ import annotations

import math
import warnings

import jax

from autoshard._tracebacks import users_stacklevel
from autoshard.errors import AutoshardWarning
from autoshard.sharding.layout.divisibility import undivided
from autoshard.sharding.layout.layout import Layout
from autoshard.sharding.planner.problem import PlanningProblem
from autoshard.spmdrules.core.placement import axes_of, from_partition_spec

IDLE_DEVICES = (
    r"auto_shard\(.*\): (nothing is|only \d+ of the \d+ devices|\d+ of the \d+ attached devices|devices repeat)"
)
"""The start of the warnings, for programs that are known to be too small for all devices."""


def idle_notes(problem: PlanningProblem, layout: Layout) -> list[str]:
    """What a plan reports about idle devices; empty if every device of the machine has work of its own."""
    repeated = _repeated_note(problem, layout)
    return [note for note in (repeated, *_rows_notes(problem, layout, repeated), _unused_note(problem)) if note]


def warn_of_idle_devices(problem: PlanningProblem, layout: Layout) -> None:
    """Warn of each kind of idle devices that a plan has."""
    for note in idle_notes(problem, layout):
        warnings.warn(f"auto_shard({problem.traced.name}): {note}", AutoshardWarning, stacklevel=users_stacklevel())


def _repeated_note(problem: PlanningProblem, layout: Layout) -> str:
    """Why several devices of the mesh do the same work."""
    devices, found = problem.machine.target.devices, undivided(layout)
    idle = [a for a in layout.idle_axes() if _should_shard(problem, layout, a)]
    if not idle or problem.is_empty(layout) or any(op.name == "shard_map" for op in problem.program.ops()):
        return ""  # a shard_map shards its own work
    why = "; ".join(map(problem.undivided_text, found))
    if not layout.sharded_classes():
        nothing = "sharded" if problem.shards_nothing(layout) else "computed in shards"
        why = why or "this plan can shard no logical axis of the program"
        text, useful = f"nothing is {nothing}: each of the {devices} devices does all of the work ({why})", 1
    else:
        useful = devices // layout.shard_count(idle)
        named = " and ".join(f"{a} ({layout.mesh[a]})" for a in idle)
        axes, verb = ("mesh axis", "shards") if len(idle) == 1 else ("mesh axes", "shard")
        text = (
            f"only {useful} of the {devices} devices have work of their own, and the others repeat it: "
            f"{why or f'{axes} {named} {verb} no work'}"
        )
    cut = problem.roles.batch if problem.traced.microbatches > 1 else None
    remedies = [
        f"use fewer microbatches (now {problem.traced.microbatches}, and each has {problem.axes.sizes[u.cls]} rows)"
        if u.cls == cut
        else f"pad {problem.axes.name(u.cls)} to {u.padded}"
        for u in found
    ]
    remedies += [] if problem.searched else ["request another plan"]
    remedy = ", or ".join([*remedies, f"use {useful} device{'s' * (useful > 1)}"])
    return f"{text}. {remedy[0].upper()}{remedy[1:]}"


def _rows_notes(problem: PlanningProblem, layout: Layout, repeated: str) -> list[str]:
    """Which rows are not divided although the same mesh axes shard other rows, such as those of another batch."""
    notes, found = [], [u for u in undivided(layout) if u.cls in problem.roles.rows]
    divided = problem.roles.rows - {u.cls for u in found}
    for one in found:
        why = problem.undivided_text(one)
        beside = any(set(one.over) <= set(layout.spec_of(((c,),))[0]) for c in divided)
        if not beside or why in repeated:
            continue
        name = problem.axes.name(one.cls)
        ways = f"sharded {one.shards} ways" if one.shards > 1 else "not sharded"
        notes.append(
            f"devices repeat the work on the rows of {name}: {why}, so it is {ways}. Pad {name} to {one.padded}"
        )
    return notes


def _should_shard(problem: PlanningProblem, layout: Layout, axis: str) -> bool:
    """Whether a mesh axis should shard work: the user's code does not use it, and what it would shard is not empty."""
    if any(problem.axes.sizes[c] == 0 for c in layout.table.get(axis, ())):
        return False
    by_user = [*layout.fixed.values(), *(from_partition_spec(s.spec, len(s.spec)) for _, s in problem.constraints)]
    return bool(undivided(layout)) or all(axis not in axes_of(spec) for spec in by_user)


def _unused_note(problem: PlanningProblem) -> str:
    """How many attached devices are not in a mesh that was given by its sizes."""
    machine, attached = problem.machine, jax.device_count()
    if problem.target_given or machine.sizes is None or machine.mesh is not None:
        return ""
    used = math.prod(machine.sizes.values())
    if used >= attached:
        return ""
    verb = "is" if attached - used == 1 else "are"
    return (
        f"{attached - used} of the {attached} attached devices {verb} idle: mesh {dict(machine.sizes)} has {used}. "
        f"Give a mesh of {attached} devices, or a jax.sharding.Mesh of the {used} that are to be used"
    )

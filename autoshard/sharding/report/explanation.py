"""Why an input is sharded as it is: `plan.explain(path)`.

The reasons follow `layout`. A mesh axis shards the first logical axis of its rule that the tensor has and whose size it
divides. Stored state is then sharded over further mesh axes. A fixed or existing sharding overrides both.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from typing import Any

from autoshard._columns import INDENT, WIDTH
from autoshard._typed import short_repr
from autoshard._units import bytes_text, spec_text
from autoshard.errors import PlanError
from autoshard.sharding.plan.gather_words import ONCE
from autoshard.sharding.plan.sharding_plan import ShardingPlan
from autoshard.sharding.plan.tensors import Leaf
from autoshard.sharding.planner.bound_plan import BoundPlan
from autoshard.sharding.program.argument_names import path_forms
from autoshard.sharding.program.path_patterns import (
    SHOWN,
    AmbiguousPathError,
    Forms,
    FoundPaths,
    find_paths,
    first_few,
    last_form,
    suggestions,
)
from autoshard.sharding.report.alternatives import alternative_lines, wish_lines
from autoshard.sharding.report.input_traffic import traffic_of
from autoshard.sharding.report.summary import (
    AxisNames,
    Group,
    compute_axes,
    groups,
    leaf_bytes,
    local_bytes,
    mesh_sizes,
    padding_text,
    path_text,
    spec_of,
)
from autoshard.spmdrules.core.placement import axes_of, to_partition_spec


def explain(plan: ShardingPlan, bound: BoundPlan | None, path: str, wish: Any = None) -> str:
    """Explain why the inputs or results at `path` are sharded as they are, and price other shardings.

    Args:
        plan: The plan.
        bound: The plan with its program. None for a plan from JSON, which has no traffic and no alternatives.
        path: A path, `0/params/wq` or `state/params/wq`, a glob, `*/mlp/*`, or the end of a path, `wq`, that fits one
            input.
        wish: A sharding to price instead: a `PartitionSpec`, or names of logical axes as in `fixed=`.

    Raises:
        PlanError: The path matches nothing, or its end fits several; the wish cannot be read, or the plan has no
            function to price it.
    """
    leaves = find_leaves(plan, path)
    if wish is not None:
        return "\n".join(map(_wrapped, wish_lines(plan, bound, leaves, wish)))
    names = AxisNames(plan)
    some = groups(plan, leaves)
    parts = [_explain_group(plan, bound, group, names) for group in some[:SHOWN]]
    if len(some) > SHOWN:
        parts.append([f"and {len(some) - SHOWN} other groups: {', '.join(g.label for g in some[SHOWN:])}"])
    return "\n\n".join("\n".join(_wrapped(line) for line in part) for part in parts)


def _wrapped(line: str) -> str:
    indent = line[: len(line) - len(line.lstrip())]
    return textwrap.fill(line, WIDTH, subsequent_indent=f"{indent}    ", break_long_words=False, break_on_hyphens=False)


def find_leaves(plan: ShardingPlan, path: str) -> list[Leaf]:
    """The inputs, or else the results, that a path, a glob or the end of a path names; see `path_patterns`."""
    inputs, outputs = ([_forms(plan, leaf) for leaf in leaves] for leaves in (plan.inputs, plan.outputs))
    found = checked_path(path, inputs, outputs)
    return [(plan.inputs, plan.outputs)[found.group][i] for i in found.indices]


def _forms(plan: ShardingPlan, leaf: Leaf) -> tuple[str, ...]:
    """The forms of a leaf's path: as in the plan, and as reports show it."""
    return path_forms(leaf.path, plan.arguments if leaf.role else ())


def checked_path(path: str, inputs: Sequence[Forms], outputs: Sequence[Forms]) -> FoundPaths:
    """Find the inputs (group 0) or results (group 1) that `explain` is to explain.

    Args:
        path: The path.
        inputs: The forms of the path of each input.
        outputs: The forms of the path of each result.

    Raises:
        PlanError: `path` names none, or is the end of several.
    """
    if not isinstance(path, str):
        raise PlanError(f"explain: {short_repr(path)} is not a path; give a string such as '0/params/wq'")
    try:
        found = find_paths(path, inputs, outputs)
    except AmbiguousPathError as error:
        raise AmbiguousPathError(f"explain: {error}") from None
    if found is None:
        paths = [last_form(forms) for forms in (*inputs, *outputs)]
        hint = suggestions(path.strip("/"), paths) if paths else "The plan has none"
        raise PlanError(f"explain: no input or result is called '{path.strip('/')}'. {hint}")
    return found


def group_reasons(plan: ShardingPlan, group: Group, names: AxisNames) -> list[str]:
    """What each mesh axis does for a group of inputs, and how they are used; without traffic."""
    lines = [f"{axis}: {reason}" for axis in mesh_sizes(plan) for reason in _reasons(plan, group.first, axis, names)]
    return [*lines, *_use(plan, group.first)] if group.first.shape and group.first.role else []


def _explain_group(plan: ShardingPlan, bound: BoundPlan | None, group: Group, names: AxisNames) -> list[str]:
    leaf, sizes = group.first, mesh_sizes(plan)
    lines = [path_text(plan, leaf)]
    if len(group.leaves) > 1:
        others = first_few(path_text(plan, x) for x in group.leaves[1:])
        lines.append(f"{INDENT}the same for {len(group.leaves) - 1} more: {others}")
    lines.append(f"{INDENT}{leaf.role or 'result'}, {leaf.dtype}{list(leaf.shape)}, {bytes_text(leaf_bytes(leaf))}; "
                 f"{bytes_text(local_bytes(leaf, sizes))} per device")  # fmt: skip
    lines.append(f"{INDENT}{names.list(leaf.axes)} -> {spec_text(leaf.spec)}")
    lines += [f"{INDENT}{axis}: {reason}" for axis in sizes for reason in _reasons(plan, leaf, axis, names)]
    lines += [INDENT + line for line in _use(plan, leaf)]
    own = {name for dim in leaf.axes for name in dim.split("*")}
    lines += [INDENT + padding_text(plan, p.axis) for p in plan.padding if p.axis in own]
    if leaf.role in ("parameter", "optimizer"):
        lines += [INDENT + line for line in _traffic_lines(plan, bound, group)]
    return lines + [INDENT + line for line in alternative_lines(plan, bound, group.leaves)]


def _reasons(plan: ShardingPlan, leaf: Leaf, axis: str, names: AxisNames) -> list[str]:
    """What a mesh axis does for a tensor, and why."""
    n = mesh_sizes(plan)[axis]
    spec = spec_of(leaf)
    ruled = plan.axis_rules.get(axis, ())
    own = [name for dim in leaf.axes for name in dim.split("*")]
    candidates = [name for name in ruled if name in own]
    place = next((d for d, dim in enumerate(spec) if axis in dim), None)
    order = ", ".join(map(names.short, ruled)) or "nothing"
    stored = leaf.role in plan.storage and axis in plan.storage[leaf.role]
    if place is None:
        if candidates:
            reason = "; ".join(_refusal(plan, leaf, axis, name, names) for name in candidates)
        elif len(ruled) > 1:
            reason = f"it shards {order}, none of which this tensor has"
        else:
            reason = f"it shards {order}{', which this tensor lacks' if ruled else ''}"
        if stored:
            reason += f"; for storage, it divides no remaining dimension of this {leaf.role}"
        return [f"not used: {reason}"]
    parts = leaf.axes[place].split("*") if place < len(leaf.axes) else []
    winner = next((name for name in candidates if name in parts), None)
    what = names.short(winner or (leaf.axes[place] if place < len(leaf.axes) else "?"))
    start = f"shards dimension {place} ({what}) {n} ways"
    if winner is None and stored:
        free = [size for size, dim in zip(leaf.shape, spec, strict=True) if not dim and size % n == 0]
        is_largest = max(free, default=0) <= leaf.shape[place]
        why = "the largest dimension that the mesh axis divides" if is_largest else "collectives cost less along it"
        return [f"{start} in storage only (ZeRO): {why}; in compute the mesh axis shards {order}"]
    if winner is None:
        return [f"{start}: fixed by the user, or as the array was already sharded; by its rule it shards {order}"]
    before = [_refusal(plan, leaf, axis, name, names) for name in candidates[: candidates.index(winner)]]
    after = [names.short(name) for name in candidates[candidates.index(winner) + 1 :]]
    if before:
        reason = f"of ({order}), {'; '.join(before)}"
    elif len(ruled) == 1:
        reason = f"it shards only {order}"
    else:
        reason = f"the first of ({order}) that this tensor has"
    if after:
        reason += f"; {' and '.join(after)} {'come' if len(after) > 1 else 'comes'} later"
    return [f"{start}: {reason}"]


def _refusal(plan: ShardingPlan, leaf: Leaf, axis: str, name: str, names: AxisNames) -> str:
    """Why a mesh axis does not shard a logical axis that the tensor has."""
    sizes = mesh_sizes(plan)
    n, spec = sizes[axis], spec_of(leaf)
    short, size = names.short(name), names.sizes.get(name, 0)
    place = next((d for d, dim in enumerate(leaf.axes) if name in dim.split("*")), None)
    if place is None:
        return f"{short} is not in this tensor"
    parts = leaf.axes[place].split("*")
    if len(parts) == 1 and place < len(leaf.shape):
        size = leaf.shape[place]
    if size % n:
        return f"{short} has size {size}, not divisible by {n}"
    others = [a for a in (spec[place] if place < len(spec) else ()) if a != axis]
    taken = math.prod(sizes.get(a, 1) for a in others)
    if taken > 1 and size % (taken * n):
        over = " and ".join(others)
        return f"{short} is sharded {taken} ways over {over}, and its size {size} is not divisible by {taken * n}"
    if parts.index(name):
        major = " and ".join(map(names.short, parts[: parts.index(name)]))
        return f"{short} comes after {major} in dimension {place}"
    return f"the sharding of {short} was fixed by the user, or the array was already sharded"


def _use(plan: ShardingPlan, leaf: Leaf) -> list[str]:
    """How a tensor is used if further mesh axes shard it in storage."""
    spec, ruled = spec_of(leaf), compute_axes(plan, leaf)
    extra = [a for a in plan.storage.get(leaf.role, ()) if a in axes_of(spec) and a not in ruled]
    if not extra:
        return []
    used = to_partition_spec(tuple(tuple(a for a in dim if a not in extra) for dim in spec))
    over = " and ".join(extra)
    if leaf.role == "optimizer":
        return [f"stored over {over}: the gradient is reduce-scattered, and each device updates its shard"]
    when = "once a step if it has layers of the stages, else for each use" if plan.gather == ONCE else "for each use"
    return [f"stored over {over}: cast to the compute dtype and gathered to {spec_text(used)} {when}"]


def _traffic_lines(plan: ShardingPlan, bound: BoundPlan | None, group: Group) -> list[str]:
    """The traffic that the tensors of a group cause."""
    if bound is None:
        return ["traffic: unknown; bind the plan to its function to see it"]
    moved: dict[tuple[str, str, str, str], float] = {}
    for leaf in group.leaves:
        for key, size in traffic_of(bound, plan.inputs.index(leaf)).items() if leaf in plan.inputs else ():
            moved[key] = moved.get(key, 0.0) + size
    count = len(group.leaves)
    if not moved:
        return ["traffic: none for this tensor" if count == 1 else "traffic: none for these tensors"]
    ranked = sorted(moved.items(), key=lambda item: (-item[1], item[0]))
    lines = [f"traffic per step, sent by each device{f' (for all {count})' if count > 1 else ''}:"]
    lines += [
        f"{INDENT}{kind} of {what} over {axis}, {bytes_text(size)}, {line}"
        for (kind, axis, what, line), size in ranked[:SHOWN]
    ]
    if rest := ranked[SHOWN:]:
        lines.append(f"{INDENT}and {len(rest)} smaller ones, {bytes_text(sum(size for _, size in rest))}")
    return lines

"""Why an input is sharded as it is: `plan.explain(path)`.

The reasons are those of `layout`: a mesh axis goes to the first logical axis of its list that the tensor has and that
it divides; state is then stored over further mesh axes; what is fixed or already placed overrides both.
"""

from __future__ import annotations

import fnmatch
import math
import textwrap
from collections.abc import Sequence
from typing import Any

from autoshard._columns import INDENT, WIDTH
from autoshard._typed import shortly
from autoshard._units import bytes_text, spec_text
from autoshard.errors import PlanError
from autoshard.sharding.plan.sharding_plan import ShardingPlan
from autoshard.sharding.plan.tensors import Leaf
from autoshard.sharding.planner.bound_plan import BoundPlan
from autoshard.sharding.program.path_patterns import SHOWN, first_few, matches_any, suggestions
from autoshard.sharding.report.alternatives import choice_lines, wish_lines
from autoshard.sharding.report.input_traffic import traffic_of
from autoshard.sharding.report.summary import (
    AxisNames,
    Group,
    groups,
    leaf_bytes,
    local_bytes,
    mesh_sizes,
    padding_text,
    ruled_axes,
    spec_of,
)
from autoshard.spmdrules.core.placement import axes_of, to_partition_spec


def explain(plan: ShardingPlan, bound: BoundPlan | None, path: str, wish: Any = None) -> str:
    """Why the inputs or results at `path` are sharded as they are, and what it would cost to shard them otherwise.

    Args:
        plan: the plan.
        bound: the plan with its program; None where it was read: it then has no traffic and no alternatives.
        path: a path, `0/params/wq`, the end of one, `wq`, or a glob, `*/mlp/*`. Of several inputs with one ending the
            parameter is meant.
        wish: how one would rather have them, a `PartitionSpec` or names of logical axes as in `fixed=`: it is priced.

    Raises:
        PlanError: nothing is there, or the ending fits several; a wish that cannot be read, or of a plan without its
            function.
    """
    found = find_leaves(plan, path)
    if wish is not None:
        return "\n".join(map(_wrapped, wish_lines(plan, bound, found, wish)))
    names = AxisNames(plan)
    some = groups(plan, found)
    parts = [_explain_group(plan, bound, group, names) for group in some[:SHOWN]]
    if len(some) > SHOWN:
        parts.append([f"and {len(some) - SHOWN} other kinds of input: {', '.join(g.label for g in some[SHOWN:])}"])
    return "\n\n".join("\n".join(_wrapped(line) for line in part) for part in parts)


def _wrapped(line: str) -> str:
    indent = line[: len(line) - len(line.lstrip())]
    return textwrap.fill(line, WIDTH, subsequent_indent=f"{indent}    ", break_long_words=False, break_on_hyphens=False)


def find_leaves(plan: ShardingPlan, path: str) -> list[Leaf]:
    """The inputs, else the results, that a path, its end or a glob means; see `explain`."""
    check_path(path, [leaf.path for leaf in (*plan.inputs, *plan.outputs)])
    path = path.strip("/")
    for leaves in (plan.inputs, plan.outputs):
        exact = [leaf for leaf in leaves if leaf.path == path]
        if exact:
            return exact
        if any(c in path for c in "*?["):
            matching = [leaf for leaf in leaves if fnmatch.fnmatchcase(leaf.path, path)]
            if matching:
                return matching
        ending = [leaf for leaf in leaves if path and leaf.path.endswith(f"/{path}")]
        chosen = [leaf for leaf in ending if leaf.role == "parameter"] or ending
        if len(chosen) > 1:
            raise PlanError(f"explain: '{path}' is the end of {len(chosen)} paths: "
                            f"{first_few(x.path for x in chosen)}. "
                            "Give more of it, or a glob for all of them")  # fmt: skip
        if chosen:
            return chosen
    raise AssertionError(path)


def check_path(path: str, paths: Sequence[str]) -> None:
    """Checks that one of `paths` is meant by a path, its end or a glob.

    Raises:
        PlanError: none is.
    """
    if not isinstance(path, str):
        raise PlanError(f"explain: {shortly(path)} is no path; give one as text, such as '0/params/wq'")
    if not matches_any(path, paths):
        hint = suggestions(path.strip("/"), paths) if paths else "The plan has none at all"
        raise PlanError(f"explain: no input or result is called '{path.strip('/')}'. {hint}")


def why(plan: ShardingPlan, group: Group, names: AxisNames) -> list[str]:
    """For inputs that are alike, what became of each mesh axis, and how they are used; traffic left out."""
    lines = [f"{axis}: {reason}" for axis in mesh_sizes(plan) for reason in _reasons(plan, group.first, axis, names)]
    return [*lines, *_use(plan, group.first)] if group.first.shape and group.first.role else []


def _explain_group(plan: ShardingPlan, bound: BoundPlan | None, group: Group, names: AxisNames) -> list[str]:
    leaf, sizes = group.first, mesh_sizes(plan)
    lines = [leaf.path]
    if len(group.leaves) > 1:
        others = first_few(x.path for x in group.leaves[1:])
        lines.append(f"{INDENT}and {len(group.leaves) - 1} like it: {others}")
    lines.append(f"{INDENT}{leaf.role or 'result'}, {leaf.dtype}{list(leaf.shape)}, {bytes_text(leaf_bytes(leaf))}; "
                 f"{bytes_text(local_bytes(leaf, sizes))} on each device")  # fmt: skip
    lines.append(f"{INDENT}{names.list(leaf.axes)} -> {spec_text(leaf.spec)}")
    lines += [f"{INDENT}{axis}: {reason}" for axis in sizes for reason in _reasons(plan, leaf, axis, names)]
    lines += [INDENT + line for line in _use(plan, leaf)]
    own = {name for dim in leaf.axes for name in dim.split("*")}
    lines += [INDENT + padding_text(plan, p.axis) for p in plan.padding if p.axis in own]
    if leaf.role in ("parameter", "optimizer"):
        lines += [INDENT + line for line in _traffic_lines(plan, bound, group)]
    return lines + [INDENT + line for line in choice_lines(plan, bound, group.leaves)]


def _reasons(plan: ShardingPlan, leaf: Leaf, axis: str, names: AxisNames) -> list[str]:
    """What became of one mesh axis in one tensor."""
    n = mesh_sizes(plan)[axis]
    spec = spec_of(leaf)
    ruled = plan.axis_rules.get(axis, ())
    mine = [name for dim in leaf.axes for name in dim.split("*")]
    here = [name for name in ruled if name in mine]
    place = next((d for d, dim in enumerate(spec) if axis in dim), None)
    order = ", ".join(map(names.short, ruled)) or "nothing"
    parts = leaf.axes[place].split("*") if place is not None and place < len(leaf.axes) else []
    winner = next((name for name in here if name in parts), None)
    stored = leaf.role in plan.storage and axis in plan.storage[leaf.role]
    if place is None:
        if not here:
            lacks = (
                ", none of which this tensor has" if len(ruled) > 1 else ", which this tensor lacks" if ruled else ""
            )
            reason = f"shards {order}{lacks}"
        else:
            reason = f"is not used: {'; '.join(_refusal(plan, leaf, axis, name, names) for name in here)}"
        if stored:
            reason += f"; it should store the {leaf.role} too, but divides no dimension that is left"
        return [reason]
    if winner is None:
        what = names.short(leaf.axes[place]) if place < len(leaf.axes) else "?"
        if stored:
            lead = f"between steps only (ZeRO), as the largest that it divides; in compute it shards {order}"
        else:
            lead = "as it was fixed, or as the array was already placed; by the rules it shards " + order
        return [f"cuts dimension {place}, {what}, into {n}: {lead}"]
    before = [_refusal(plan, leaf, axis, name, names) for name in here[: here.index(winner)]]
    after = [names.short(name) for name in here[here.index(winner) + 1 :]]
    rank = f"it shards {order}" if len(ruled) == 1 else f"the first of ({order}) that this tensor has"
    reason = f"cuts dimension {place}, {names.short(winner)}, into {n}: {rank}"
    if before:
        reason = f"cuts dimension {place}, {names.short(winner)}, into {n}: of ({order}), {'; '.join(before)}"
    if after:
        reason += f"; {' and '.join(after)}, which it has as well, {'come' if len(after) > 1 else 'comes'} later"
    return [reason]


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
        return f"{short} has {size}, not divisible by {n}"
    others = [a for a in (spec[place] if place < len(spec) else ()) if a != axis]
    taken = math.prod(sizes.get(a, 1) for a in others)
    if taken > 1 and size % (taken * n):
        return f"{short} has {size}, cut into {taken} by {' and '.join(others)} and no further by {n}"
    if parts.index(name):
        return (
            f"{short} stands behind {' and '.join(map(names.short, parts[: parts.index(name)]))} in dimension {place}"
        )
    return f"{short} would be next, but this array is fixed or was already placed"


def _use(plan: ShardingPlan, leaf: Leaf) -> list[str]:
    """How a tensor that is stored over more mesh axes than the rules say is used."""
    spec, ruled = spec_of(leaf), ruled_axes(plan, leaf)
    extra = [a for a in plan.storage.get(leaf.role, ()) if a in axes_of(spec) and a not in ruled]
    if not extra:
        return []
    used = to_partition_spec(tuple(tuple(a for a in dim if a not in extra) for dim in spec))
    over = " and ".join(extra)
    if leaf.role == "optimizer":
        return [f"stored over {over}: its gradient is scattered to it, and it is updated where it stands"]
    return [f"stored over {over}: gathered to {spec_text(used)} for each use, after the cast to the compute type"]


def _traffic_lines(plan: ShardingPlan, bound: BoundPlan | None, group: Group) -> list[str]:
    """What moves because of the tensors of a group."""
    if bound is None:
        return ["traffic: bind the plan to its function to see what each tensor causes"]
    moved: dict[tuple[str, str, str, str], float] = {}
    for leaf in group.leaves:
        for key, size in traffic_of(bound, plan.inputs.index(leaf)).items() if leaf in plan.inputs else ():
            moved[key] = moved.get(key, 0.0) + size
    if not moved:
        return ["traffic: none of its own"]
    ranked = sorted(moved.items(), key=lambda item: (-item[1], item[0]))
    lines = [f"traffic a step, bytes that leave each device{' (all of them)' if len(group.leaves) > 1 else ''}:"]
    lines += [
        f"{INDENT}{kind} of {what} over {axis}, {bytes_text(size)}, {line}"
        for (kind, axis, what, line), size in ranked[:SHOWN]
    ]
    if rest := ranked[SHOWN:]:
        lines.append(f"{INDENT}and {len(rest)} smaller ones, {bytes_text(sum(size for _, size in rest))}")
    return lines

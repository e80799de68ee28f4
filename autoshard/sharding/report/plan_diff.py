"""The differences between two plans: `plan.diff(other)`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from autoshard._columns import INDENT, columns
from autoshard._units import bytes_text, ratio_text, spec_text, time_text
from autoshard.sharding.plan.sharding_plan import ShardingPlan
from autoshard.sharding.plan.tensors import Leaf
from autoshard.sharding.program.argument_names import named_path
from autoshard.sharding.report.summary import AxisNames, mesh_text
from autoshard.sharding.report.tensor_labels import labels

PATHS_SHOWN = 4


def diff(plan: ShardingPlan, other: ShardingPlan) -> str:
    """List how `other` differs, one line per difference; 'the same plan' if it does not."""
    names, other_names = AxisNames(plan), AxisNames(other)
    rows: list[tuple[str, str, str, str]] = []

    def compare(what: str, a: str, b: str, remark: str = "") -> None:
        if a != b:
            rows.append((what, a or "-", f"-> {b or '-'}", remark))

    compare("function", plan.function, other.function)
    compare("target", plan.target, other.target)
    compare("mesh", mesh_text(plan), mesh_text(other))
    for axis in dict.fromkeys([*plan.axis_rules, *other.axis_rules]):
        first, second = plan.axis_rules.get(axis, ()), other.axis_rules.get(axis, ())
        compare(f"rule of {axis}", ", ".join(map(names.short, first)), ", ".join(map(other_names.short, second)))
    for role in dict.fromkeys([*plan.storage, *other.storage]):
        compare(f"storage of {role}", ", ".join(plan.storage.get(role, ())), ", ".join(other.storage.get(role, ())))
    lines = [
        *(columns(rows) if rows else []),
        *_leaf_differences("input", plan.inputs, other.inputs, (plan.arguments, other.arguments)),
    ]
    input_paths = {leaf.path for leaf in (*plan.inputs, *other.inputs)}  # returned state is sharded like its input
    results = [[leaf for leaf in some.outputs if leaf.path not in input_paths] for some in (plan, other)]
    lines += _leaf_differences("result", results[0], results[1], ((), ()))
    rows.clear()
    for what, a, b, text in _figures(plan, other):
        compare(what, text(a), text(b), ratio_text(b, a))
    lines += columns(rows, right=(3,)) if rows else []
    if not lines:
        return "the same plan"
    return "\n".join(
        [f"{plan.chosen or 'this plan'} -> {other.chosen or 'the other plan'}", *(INDENT + s for s in lines)]
    )


def _leaf_differences(
    noun: str, first: Sequence[Leaf], second: Sequence[Leaf], arguments: tuple[Sequence[str], Sequence[str]]
) -> list[str]:
    """The leaves whose shape, dtype, memory or spec differs, grouped by the change.

    `arguments` are the names of the parameters of both plans.
    """
    before, after = {x.path: x for x in first}, {x.path: x for x in second}
    lines = []
    changes: dict[tuple[str, str], list[str]] = {}
    for path in before.keys() & after.keys():
        a, b = before[path], after[path]
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            change = (f"{a.dtype}{list(a.shape)}", f"{b.dtype}{list(b.shape)}")
        elif a.memory_kind != b.memory_kind:
            change = (a.memory_kind, b.memory_kind)
        elif (change := (spec_text(a.spec), spec_text(b.spec)))[0] == change[1]:
            continue
        changes.setdefault(change, []).append(path)
    order = {x.path: n for n, x in enumerate(first)}
    ranked = [
        (change, sorted(paths, key=order.__getitem__))
        for change, paths in sorted(changes.items(), key=lambda item: min(order[p] for p in item[1]))
    ]
    named = labels([[named_path(path, arguments[0]) for path in paths] for _, paths in ranked])
    for text, ((a, b), paths) in zip(named, ranked, strict=True):
        lines.append(f"{noun} {text}{f' x{len(paths)}' if len(paths) > 1 else ''}: {a} -> {b}")
    for which, names, unshared in (
        ("only in the first", arguments[0], before.keys() - after.keys()),
        ("only in the second", arguments[1], after.keys() - before.keys()),
    ):
        if unshared:
            rest = f" and {len(unshared) - PATHS_SHOWN} more" if len(unshared) > PATHS_SHOWN else ""
            shown = ", ".join(named_path(path, names) for path in sorted(unshared)[:PATHS_SHOWN])
            lines.append(f"{noun}s {which}: {shown}{rest}")
    return lines


def _figures(plan: ShardingPlan, other: ShardingPlan) -> list[tuple[str, float, float, Any]]:
    a, b = plan.estimate, other.estimate
    kinds = dict.fromkeys([*a.memory_bytes, *b.memory_bytes])
    return [
        ("step", a.step_time_us, b.step_time_us, time_text),
        ("compute", a.compute_us, b.compute_us, time_text),
        ("communication", a.comm_us, b.comm_us, time_text),
        ("traffic per step", a.comm_bytes, b.comm_bytes, bytes_text),
        ("peak memory", a.peak_memory_bytes, b.peak_memory_bytes, bytes_text),
        *((f"memory, {k}", a.memory_bytes.get(k, 0.0), b.memory_bytes.get(k, 0.0), bytes_text) for k in kinds),
        ("host traffic per step", a.host_traffic_bytes, b.host_traffic_bytes, bytes_text),
        ("host traffic, not hidden", a.host_exposed_us, b.host_exposed_us, time_text),
        ("memory of the host", a.host_memory_bytes, b.host_memory_bytes, bytes_text),
    ]

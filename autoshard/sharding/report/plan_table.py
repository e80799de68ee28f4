"""A plan as plain text: `print(plan)`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from autoshard._columns import INDENT, WIDTH, columns, shorten, wrap
from autoshard._units import (
    bytes_text,
    line_text,
    percent_text,
    ratio_text,
    spec_text,
    time_text,
    variant_text,
)
from autoshard.sharding.overlap.module_times import module_lines
from autoshard.sharding.plan.gather_words import WORDS
from autoshard.sharding.plan.overlap_words import overlap_text
from autoshard.sharding.plan.sharding_plan import Estimate, ShardingPlan
from autoshard.sharding.report.compiler_options import option_texts
from autoshard.sharding.report.constants import LEAST_OTHER_BYTES
from autoshard.sharding.report.kernel_blocks import kernel_texts
from autoshard.sharding.report.kinds import kind_lines
from autoshard.sharding.report.pipeline_texts import pipeline_texts, waiting_lines
from autoshard.sharding.report.search_outcome import verdict
from autoshard.sharding.report.summary import (
    AxisNames,
    Group,
    axis_traffic,
    collectives,
    devices,
    exposed_us,
    groups_by_role,
    memory_rows,
    mesh_sizes,
    mesh_text,
    padding_texts,
    storage_roles,
    title,
    totals,
    unknown_text,
)
from autoshard.sharding.report.tensor_labels import shortened

GROUPS_SHOWN = 12
COLLECTIVES_SHOWN = 8
VARIANTS_SHOWN = 3
AXES_SHOWN = 12
GLOSSARY = "docs/glossary.md"  # explains every word of a report


def table(plan: ShardingPlan) -> str:
    """The plan as text: what was chosen and why, how state is sharded, memory, time, traffic."""
    names = AxisNames(plan)
    parts = [
        _head(plan),
        _axes(plan, names),
        _state(plan, names),
        _memory(plan),
        waiting_lines(plan),
        _time(plan),
        _traffic(plan),
        module_lines(plan.module_us, "estimated"),
        [f"kernel blocks: {text}" for text in kernel_texts(plan)],
        _options(plan),
        _notes(plan),
        [f"words and columns: {GLOSSARY}"],
    ]
    return "\n\n".join("\n".join(part) for part in parts if part)


def _head(plan: ShardingPlan) -> list[str]:
    reason = verdict(plan)
    lines = [f"{title(plan)}: {mesh_text(plan)}", f"plan: {reason.sentence}"]
    if reason.rivals:
        lines += wrap("next best by step time: ", [f"{name} {ratio}" for name, ratio, _ in reason.rivals])
    lines += kind_lines(plan)
    if plan.gather:
        lines.append(f"gather: {plan.gather}: {WORDS[plan.gather]}")
    if plan.stages > 1:
        lines += wrap("pipeline: ", pipeline_texts(plan))
    elif plan.microbatches > 1:
        lines.append(f"microbatches: {plan.microbatches}, one after the other; their sums are accumulated")
    if plan.overlap:
        lines.append(f"overlap: {overlap_text(plan.overlap)}")
    return [*lines, *_variants(plan)]


def _variants(plan: ShardingPlan) -> list[str]:
    """The chosen variant of the program, and the step times of the others."""
    if not plan.variant:
        return []
    limit, here = plan.limit_bytes or math.inf, plan.estimate.step_time_us
    others = sorted((v for v in plan.variants if dict(v[0]) != dict(plan.variant)), key=lambda v: v[2])
    fitting = [v for v in others if v[3] <= limit]
    compared = f"of {len(plan.variants)}" if len(plan.variants) > 1 else "the only one that was tried"
    lines = [f"variant: {variant_text(plan.variant)}, {compared}"]
    if too_large := len(others) - len(fitting):
        lines[0] += f" ({too_large} do{'es' if too_large == 1 else ''} not fit)"
    if fitting:
        named = [f"{variant_text(v)} ({words}) {ratio_text(us, here)}" for v, words, us, _ in fitting[:VARIANTS_SHOWN]]
        lines += wrap("next best variants: ", named)
    return lines


def _axes(plan: ShardingPlan, names: AxisNames) -> list[str]:
    """The axis table."""
    traffic = axis_traffic(plan)
    ordered = any(len(plan.axis_rules.get(axis, ())) > 1 for axis in mesh_sizes(plan))
    shards = "shards the first of these that a tensor has" if ordered else "shards"
    rows = [("mesh axis", "size", "traffic per step", "shards state of", shards)]
    for axis, size in mesh_sizes(plan).items():
        ruled = ", ".join(names.sized(c) for c in plan.axis_rules.get(axis, ())) or "-"
        stored = ", ".join(storage_roles(plan, axis)) or "-"
        rows.append((axis, str(size), bytes_text(traffic.get(axis, 0.0)), stored, ruled))
    lines = []
    for line in columns(rows, right=(1, 2)):
        start = line[: len(line) - len(line.rsplit("  ", 1)[-1])]
        lines += wrap(start, line[len(start) :].split(", ")) if len(line) > WIDTH else [line]
    if whole := names.all_sized(names.unsharded):
        if len(whole) > AXES_SHOWN:
            whole[AXES_SHOWN - 1 :] = [f"{len(whole) - AXES_SHOWN + 1} more"]
        lines += wrap("not sharded in compute: ", whole)
    return lines


def _state(plan: ShardingPlan, names: AxisNames) -> list[str]:
    """The inputs in groups, the largest first."""
    lines: list[str] = []
    like_parameters: set[Any] = set()
    for role, of_role in groups_by_role(plan):
        if role == "parameter":
            like_parameters = {_placing(g) for g in of_role}
        some = [g for g in of_role if g.first.shape]
        count, whole, local = totals(some)
        if not some or (role == "other" and whole == local < LEAST_OTHER_BYTES):
            continue
        arrays = f"{count} array{'s' * (count > 1)}"
        head = f"{role or 'inputs'}: {arrays}, {bytes_text(whole)} -> {bytes_text(local)} per device"
        if role == "optimizer" and all(_placing(g) in like_parameters for g in some):
            lines.append(f"{head}, sharded like the parameters")
            continue
        lines += [head, *_group_lines(some, names)]
    return lines


def _placing(group: Group) -> Any:
    """The axes, the sharding and the memory of a group."""
    return group.first.axes, spec_text(group.first.spec), group.first.memory_kind


def _group_lines(some: Sequence[Group], names: AxisNames) -> list[str]:
    shown = some if len(some) <= GROUPS_SHOWN else some[: GROUPS_SHOWN - 1]
    short = shortened([g.label for g in shown])
    rows = [
        (
            INDENT + text,
            f"x{len(g.leaves)}" if len(g.leaves) > 1 else "",
            bytes_text(g.whole_bytes),
            f"-> {bytes_text(g.local_bytes)}",
            f"{names.list(g.first.axes)} -> {spec_text(g.first.spec)}"
            + " in host memory" * (g.first.memory_kind != "device"),
        )
        for g, text in zip(shown, short, strict=True)
    ]
    lines: list[str] = []
    for line, row in zip(columns(rows, right=(2,)), rows, strict=True):
        if len(line) <= WIDTH:
            lines.append(line)
        else:  # the spec goes below the axes
            place = len(line) - len(row[-1])
            axes, _, spec = row[-1].partition(" -> ")
            lines += [line[:place] + axes, " " * place + f"-> {spec}"]
    if rest := some[len(shown) :]:
        count, whole, local = totals(rest)
        lines.append(f"{INDENT}and {count} smaller ones, {bytes_text(whole)} -> {bytes_text(local)}")
    return lines


def _memory(plan: ShardingPlan) -> list[str]:
    peak, alone = plan.estimate.peak_memory_bytes, plan.alone
    rows = [("memory per device", "this plan", "on one device" if alone else "")]
    for kind, here, there in memory_rows(plan):
        rows.append((INDENT + kind, bytes_text(here), "" if there is None else bytes_text(there)))
    rows.append((f"{INDENT}peak", bytes_text(peak), bytes_text(alone.peak_memory_bytes) if alone else ""))
    lines = columns(rows, right=(1, 2))
    if plan.limit_bytes:
        lines[-1] += f"   {percent_text(peak, plan.limit_bytes)} of the limit of {bytes_text(plan.limit_bytes)}"
    if host := plan.estimate.host_memory_bytes:
        lines.append(f"memory by kind: device {bytes_text(peak)}, host {bytes_text(host)} per device")
    return lines


def _time(plan: ShardingPlan) -> list[str]:
    estimate, alone = plan.estimate, plan.alone
    rows = [
        ("step time (estimated)", "this plan", "on one device" if alone else ""),
        (f"{INDENT}compute", time_text(estimate.compute_us), time_text(alone.compute_us) if alone else ""),
        (f"{INDENT}communication", time_text(estimate.comm_us), "0" if alone else ""),
        (f"{INDENT}step", time_text(estimate.step_time_us), time_text(alone.step_time_us) if alone else ""),
    ]
    if estimate.host_traffic_bytes:
        rows.insert(3, (f"{INDENT}host", _host_text(estimate), _host_text(alone) if alone else ""))
    lines = columns(rows, right=(1, 2))
    if estimate.comm_us:
        lines[2] += f"   {time_text(exposed_us(plan))} not hidden by compute"
    if estimate.host_traffic_bytes:
        hidden = f", {time_text(estimate.host_exposed_us)} not hidden by compute" if estimate.host_us else ""
        lines[3] += f"   {bytes_text(estimate.host_traffic_bytes)} to and from host memory{hidden}"
    if alone:
        speedup = ratio_text(alone.step_time_us, estimate.step_time_us)
        lines[-1] += f"   speedup {speedup} on {devices(plan)} device{'s' * (devices(plan) > 1)}"
    return lines


def _host_text(estimate: Estimate) -> str:
    """The time of transfers to and from host memory, if the machine's link to it is known."""
    return time_text(estimate.host_us) if estimate.host_us or not estimate.host_traffic_bytes else "unknown"


def _traffic(plan: ShardingPlan) -> list[str]:
    if not plan.traffic:
        return ["traffic: none"]
    moved = collectives(plan)
    total = sum(size for _, _, size, _ in moved)
    rows = [
        (INDENT + kind, axis, bytes_text(size), percent_text(size, total), line)
        for kind, axis, size, line in moved[:COLLECTIVES_SHOWN]
    ]
    lines = [f"traffic per step: each device sends {bytes_text(total)}", *columns(rows, right=(2, 3))]
    if rest := moved[COLLECTIVES_SHOWN:]:
        lines.append(f"{INDENT}and {len(rest)} smaller ones, {bytes_text(sum(t[2] for t in rest))}")
    return [shorten(line, WIDTH) for line in lines]


def _options(plan: ShardingPlan) -> list[str]:
    lines = []
    for text in option_texts(plan):
        head, _, listed = text.partition(": ")
        lines += wrap(f"{head}: ", listed.split(", "))
    return lines


def _notes(plan: ShardingPlan) -> list[str]:
    lines = [
        f"no rule for primitive '{name}', at {line_text(next(iter(places), ''))}: {unknown_text(name)}"
        for name, places in plan.unknown.items()
    ]
    lines += [f"kernels: {record}" for record in plan.kernels]
    notes = [*lines, *(f"note: {note}" for note in plan.notes)]
    return [*notes, *(f"padding: {text}" for text in padding_texts(plan))]

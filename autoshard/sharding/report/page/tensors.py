"""Tensors on a plan's page: parameters, activations, optimizer state, data, gradients, results."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape

from autoshard._html.parts import bar, bar_legend, folded, search_box, share, table
from autoshard._units import bytes_text, line_text, spec_text
from autoshard.sharding.plan.sharding_plan import ShardingPlan
from autoshard.sharding.plan.tensors import Activation
from autoshard.sharding.report.explanation import group_reasons
from autoshard.sharding.report.page.parts import AxisLabels
from autoshard.sharding.report.summary import Group, groups, groups_by_role, local_bytes, path_text, totals

ACTIVATIONS_SHOWN = 10
OPEN_ROWS = 60  # a longer table starts closed
NAMES = {"parameter": "Parameters", "optimizer": "Optimizer state", "data": "Data", "other": "Counters and keys"}


def table_id(role: str) -> str:
    """The target of links to the table of a role."""
    return "arrays-" + re.sub(r"[^a-z0-9]+", "-", role.lower())


def tensors_section(plan: ShardingPlan, paint: AxisLabels) -> str:
    """All tensors in groups, with a search field."""
    roles = groups_by_role(plan)
    most = max((g.whole_bytes for _, some in roles for g in some), default=1.0) or 1.0
    parts = [
        _table_of(plan, paint, role, NAMES.get(role, role) or "Inputs", some, most, role in ("parameter", "data"))
        for role, some in roles
    ]
    parts.insert(1, _activations(plan, paint))
    parts.append(_table_of(plan, paint, "results", "Results", groups(plan, plan.outputs), most, is_open=False))
    fold = '<button type="button" data-fold="tensors-list">open or close all</button>'
    filters = f'<div class="filters">{search_box("tensors", "tensors-list")}{fold}</div>'
    filters += bar_legend([("k-local", "bytes per device"), ("k-total", "total bytes of all devices' shards")],
                          "Bars of arrays, as a share of the largest:")  # fmt: skip
    if plan.activations:
        filters += bar_legend([("k-temporary", "bytes per device that are live at the peak")], "Bars of activations:")
    return f'{filters}<div id="tensors-list">{"".join(parts)}</div>'


def _table_of(
    plan: ShardingPlan, paint: AxisLabels, role: str, name: str, some: Sequence[Group], most: float, is_open: bool
) -> str:
    if not some:
        return ""
    count, whole, local = totals(some)
    head = (f"<b>{escape(name)}</b> {count} array{'s' * (count > 1)}, {bytes_text(whole)}; "
            f"{bytes_text(local)} per device")  # fmt: skip
    rows = [_row(plan, g, paint, most) for g in some]
    columns = ["name", "", "dimensions", "total", "per device", "share of the largest"]
    inner = f'<div id="{table_id(role)}">{table(columns, rows, right=(1, 3, 4))}</div>'
    return folded(head, inner, is_open and len(rows) <= OPEN_ROWS)


def _row(plan: ShardingPlan, group: Group, paint: AxisLabels, most: float) -> list[str]:
    leaf = group.first
    paths = "".join(f"<li>{escape(path_text(plan, x))}</li>" for x in group.leaves)
    reasons = "".join(f"<li>{escape(line)}</li>" for line in group_reasons(plan, group, paint.names))
    inner = f'<ul class="why">{reasons}</ul>' if reasons else ""
    spec = f'<p class="spec">{escape(leaf.dtype)} <code>{escape(spec_text(leaf.spec))}</code></p>'
    detail = f'{spec}{inner}<ul class="paths">{paths}</ul>'
    host = '<i class="stored">host memory</i>' if leaf.memory_kind != "device" else ""
    label = f"<code>{escape(group.label)}</code>{host}"
    return [
        folded(label, detail),
        f"\u00d7{len(group.leaves)}" if len(group.leaves) > 1 else "",
        paint.tensor(leaf),
        bytes_text(group.whole_bytes),
        bytes_text(group.local_bytes),
        _both(group.whole_bytes, group.local_bytes, most),
    ]


def _both(whole: float, local: float, most: float) -> str:
    """A bar of all bytes that contains a bar of the bytes per device."""
    return (f'<span class="bar thin"><span class="whole" style="width:{share(whole, most):.3f}%"></span>'
            f'<span class="local" style="width:{share(local, most):.3f}%"></span></span>')  # fmt: skip


def _activations(plan: ShardingPlan, paint: AxisLabels) -> str:
    """The largest activations and gradients, and how much of them is live at peak memory."""
    parts = []
    for role, name in (("activation", "Activations"), ("gradient", "Gradients")):
        some = [a for a in plan.activations if a.role == role]
        if not some:
            continue
        live = sum(a.held_bytes for a in some)
        most = max((a.held_bytes for a in some), default=1.0) or 1.0
        head = f"<b>{name}</b> {len(some)} groups{f', {bytes_text(live)} per device at peak memory' if live else ''}"
        rows = [_activation_row(a, paint, most) for a in some]
        columns = ["computed by", "per step", "dimensions", "each, per device", "live at the peak", ""]
        inner = table(columns, rows[:ACTIVATIONS_SHOWN], right=(1, 3, 4))
        if rest := rows[ACTIVATIONS_SHOWN:]:
            inner += folded(f"{len(rest)} smaller", table(columns, rest, right=(1, 3, 4)))
        parts.append(folded(head, inner, role == "activation"))
    return "".join(parts)


def _activation_row(one: Activation, paint: AxisLabels, most: float) -> list[str]:
    line = f'<code title="{escape(one.line)}">{escape(line_text(one.line))}</code>'
    return [
        f"{line}<br/><small>{escape(one.path)}, {escape(one.dtype)}</small>",
        f"\u00d7{one.count:g}",
        paint.tensor(one),
        bytes_text(local_bytes(one, paint.sizes)),
        bytes_text(one.held_bytes) if one.held_bytes else "-",
        bar("k-temporary", one.held_bytes, most),
    ]

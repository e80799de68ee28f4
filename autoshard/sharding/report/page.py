"""A plan as one self-contained page: `plan.to_html(path)`.

No scripts, no fonts and no images from anywhere: the page can be mailed, kept beside a run, or opened from a cluster.
"""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autoshard.sharding.report.drawing import Paint, grid, html_table, stack
from autoshard.sharding.report.style import STYLE
from autoshard.sharding.report.summary import (
    Group,
    axis_traffic,
    by_role,
    collectives,
    devices,
    exposed_us,
    local_bytes,
    memory_rows,
    mesh_sizes,
    mesh_text,
    padding_texts,
    storage_roles,
    title,
    totals,
    verdict,
)
from autoshard.sharding.report.units import bytes_text, line_text, percent_text, ratio_text, spec_text, time_text

if TYPE_CHECKING:
    from autoshard.sharding.plan import Plan

CANDIDATES_SHOWN = 16
COLLECTIVES_SHOWN = 12


def to_html(plan: Plan, path: Any) -> None:
    """Writes the plan as one self-contained page.

    Args:
        plan: the plan.
        path: file to write.
    """
    Path(path).write_text(page(plan), encoding="utf-8")


def page(plan: Plan) -> str:
    """The page's HTML."""
    paint = Paint(plan)
    body = [
        _head(plan),
        _section("Mesh", _mesh(plan, paint), "Which devices work together, and what each mesh axis shards."),
        _section(
            "State and data",
            _state(plan, paint),
            "Each dimension in the colour of its logical axis; filled where a "
            "mesh axis cuts it. Dashed: only in storage, gathered for use.",
        ),
        '<div class="pair">',
        _section("Memory of a device", _memory(plan)),
        _section("Time of a step", _time(plan), "Estimated."),
        "</div>",
        _section("Plans compared", _candidates(plan)) if len(plan.candidates) > 1 else "",
        _section("Traffic of a step", _traffic(plan)),
        _section("Notes", _notes(plan)) if plan.notes or plan.unknown or plan.padding else "",
        _section("Every input and result", _leaves(plan, paint)),
    ]
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>Plan: {escape(title(plan))}</title>\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<style>{STYLE}</style></head>\n'
        f"<body><main>\n{chr(10).join(part for part in body if part)}\n</main></body></html>\n"
    )


def _section(heading: str, inner: str, remark: str = "") -> str:
    note = f'<p class="remark">{escape(remark)}</p>' if remark else ""
    return f"<section><h2>{escape(heading)}</h2>{note}{inner}</section>"


def _head(plan: Plan) -> str:
    estimate, found = plan.estimate, verdict(plan)
    cards = [("a step", time_text(estimate.step_time_us), f"{time_text(exposed_us(plan))} of it waiting for traffic")]
    if plan.alone:
        cards.append(("against one device", ratio_text(plan.alone.step_time_us, estimate.step_time_us),
                      f"as fast, on {devices(plan)} devices"))  # fmt: skip
    limit = f"{percent_text(estimate.peak_memory_bytes, plan.limit_bytes)} of {bytes_text(plan.limit_bytes)}"
    peak = bytes_text(estimate.peak_memory_bytes)
    cards += [("memory of a device", peak, limit if plan.limit_bytes else "at its peak"),
              ("traffic of a step", bytes_text(estimate.comm_bytes), "leave each device")]  # fmt: skip
    drawn = "".join(
        f'<div class="card"><h3>{escape(a)}</h3><p>{escape(b)}</p><small>{escape(c)}</small></div>' for a, b, c in cards
    )
    rivals = "".join(
        f"<li>{escape(name)} <small>{escape(ratio)} the step time</small></li>" for name, ratio, _ in found.rivals
    )
    then = f'<p class="next">Next best:</p><ul class="next">{rivals}</ul>' if rivals else ""
    return (
        f"<header><h1>{escape(title(plan))}</h1><p class=mesh>{escape(mesh_text(plan))}</p>"
        f"<p>Plan: {escape(found.sentence)}.</p>{then}</header><div class=cards>{drawn}</div>"
    )


def _mesh(plan: Plan, paint: Paint) -> str:
    sizes, traffic = mesh_sizes(plan), axis_traffic(plan)
    rows = []
    for axis, size in sizes.items():
        ruled = "<span class=then>then</span>".join(paint.axis(c) for c in plan.axis_rules.get(axis, ())) or "nothing"
        stored = ", ".join(storage_roles(plan, axis))
        rows.append(
            [f"<b>{escape(axis)}</b>", str(size), ruled, escape(stored) or "-", bytes_text(traffic.get(axis, 0.0))]
        )
    head = ["mesh axis", "size", "shards the first of these that a tensor has", "stores between steps", "traffic"]
    rest = "".join(map(paint.axis, paint.names.whole))
    below = f'<p class="whole"><span>whole in compute:</span> {rest}</p>' if rest else ""
    return (
        f'<div class="meshes">{grid(sizes)}<div class="grow">{html_table(head, rows, right=(1, 4))}{below}</div></div>'
    )


def _state(plan: Plan, paint: Paint) -> str:
    found = by_role(plan)
    most = max((g.whole_bytes for _, some in found for g in some), default=1.0) or 1.0
    parts = []
    for role, some in found:
        count, whole, local = totals(some)
        head = (f"<b>{escape(role or 'input')}</b> {count} array{'s' * (count > 1)}, {bytes_text(whole)}; "
                f"{bytes_text(local)} on each device")  # fmt: skip
        rows = [_group_row(g, paint, most) for g in some]
        inner = html_table(["", "", "dimensions", "all", "a device", ""], rows, right=(1, 3, 4))
        parts.append(
            f"<details{' open' if role in ('parameter', 'data') else ''}><summary>{head}</summary>{inner}</details>"
        )
    return "".join(parts)


def _group_row(group: Group, paint: Paint, most: float) -> list[str]:
    paths = "\n".join(leaf.path for leaf in group.leaves)
    bar = (f'<span class="bar thin"><span class="whole" style="width:{100 * group.whole_bytes / most:.2f}%"></span>'
           f'<span class="local" style="width:{100 * group.local_bytes / most:.2f}%"></span></span>')  # fmt: skip
    return [
        f'<code title="{escape(paths)}">{escape(group.label)}</code>',
        f"\u00d7{len(group.leaves)}" if len(group.leaves) > 1 else "",
        f'<span title="{escape(spec_text(group.first.spec))}">{paint.tensor(group.first)}</span>',
        bytes_text(group.whole_bytes),
        bytes_text(group.local_bytes),
        bar,
    ]


def _memory(plan: Plan) -> str:
    rows, peak, limit = memory_rows(plan), plan.estimate.peak_memory_bytes, plan.limit_bytes
    scale = max(peak, limit) or 1.0
    bar = stack([(f"k-{kind}", f"{kind} {bytes_text(here)}", here) for kind, here, _ in rows], scale, limit or None,
                 f"limit {bytes_text(limit)}")  # fmt: skip
    words = f"{bytes_text(peak)} of {bytes_text(limit)}" if limit else bytes_text(peak)
    over = f' <span class="bad">{bytes_text(peak - limit)} too much</span>' if limit and peak > limit else ""
    cells = [
        [f'<span class="key k-{kind}"></span>{escape(kind)}', bytes_text(here), percent_text(here, peak),
         "-" if there is None else bytes_text(there)]
        for kind, here, there in rows
    ]  # fmt: skip
    alone = bytes_text(plan.alone.peak_memory_bytes) if plan.alone else "-"
    cells.append(["<b>peak</b>", f"<b>{bytes_text(peak)}</b>", "", alone])
    head = ["", "this plan", "share", "all on one device"]
    return f"<p class=figure>{words}{over}</p>{bar}{html_table(head, cells, (1, 2, 3))}"


def _time(plan: Plan) -> str:
    estimate, alone, exposed = plan.estimate, plan.alone, exposed_us(plan)
    hidden = max(estimate.comm_us - exposed, 0.0)
    rows = [("compute", "compute", estimate.compute_us), ("exposed", "communication, waited for", exposed),
            ("hidden", "communication, hidden behind compute", hidden)]  # fmt: skip
    bar = stack([(f"k-{k}", f"{name} {time_text(v)}", v) for k, name, v in rows[:2]], estimate.step_time_us or 1.0)
    theirs = ["-"] * 3 if alone is None else [time_text(alone.compute_us), "0", "0"]
    cells = [
        [
            f'<span class="key k-{k}"></span>{name}',
            time_text(v),
            percent_text(v, estimate.step_time_us) if k != "hidden" else "",
            t,
        ]
        for (k, name, v), t in zip(rows, theirs, strict=True)
    ]
    total = time_text(alone.step_time_us) if alone else "-"
    cells.append(["<b>step</b>", f"<b>{time_text(estimate.step_time_us)}</b>", "", total])
    head = ["", "this plan", "share", "all on one device"]
    return f"<p class=figure>{time_text(estimate.step_time_us)}</p>{bar}{html_table(head, cells, (1, 2, 3))}"


def _traffic(plan: Plan) -> str:
    moved = collectives(plan)
    if not moved:
        return "<p>None.</p>"
    total, most = sum(t[2] for t in moved) or 1.0, moved[0][2] or 1.0
    full = {(k, a, line_text(line)): line for k, a, _, line in plan.traffic}
    rows = [
        [escape(kind), f"<i class=cut>{escape(axis)}</i>", bytes_text(size), percent_text(size, total),
         f'<span class="bar thin"><span class="k-exposed" style="width:{100 * size / most:.2f}%"></span></span>',
         f'<code title="{escape(full[kind, axis, line])}">{escape(line)}</code>']
        for kind, axis, size, line in moved
    ]  # fmt: skip
    head, shown = ["collective", "mesh axis", "bytes", "share", "", "because of"], rows[:COLLECTIVES_SHOWN]
    rest = rows[len(shown) :]
    smaller = f"{len(rest)} smaller ones, {bytes_text(sum(t[2] for t in moved[len(shown) :]))}"
    more = f"<details><summary>{smaller}</summary>{html_table(head, rest, right=(2, 3))}</details>" if rest else ""
    return html_table(head, shown, right=(2, 3)) + more


def _candidates(plan: Plan) -> str:
    ranked = sorted(plan.candidates, key=lambda c: c[1])
    shown = ranked[:CANDIDATES_SHOWN]
    shown += [c for c in ranked[CANDIDATES_SHOWN:] if c[0] == plan.chosen][:1]
    most = max((c[1] for c in shown), default=1.0) or 1.0
    rows = []
    for name, us, peak in shown:
        fits = not plan.limit_bytes or peak <= plan.limit_bytes
        kind = "k-chosen" if name == plan.chosen else "k-rival" if fits else "k-unfit"
        bar = f'<span class="bar thin wide"><span class="{kind}" style="width:{100 * us / most:.2f}%"></span></span>'
        words = f"<b>{escape(name)}</b> <span class=tag>chosen</span>" if name == plan.chosen else escape(name)
        memory = bytes_text(peak) + ("" if fits else ' <span class="bad">too much</span>')
        rows.append([words, bar, time_text(us), ratio_text(us, plan.estimate.step_time_us), memory])
    rest = len(ranked) - len(shown)
    tail = f"<p class=remark>and {rest} slower ones</p>" if rest > 0 else ""
    return html_table(["plan", "step time", "", "", "memory of a device"], rows, right=(2, 3, 4)) + tail


def _notes(plan: Plan) -> str:
    notes = [
        f"No rule for primitive <code>{escape(name)}</code>, at {escape(', '.join(map(line_text, places)))}: "
        "its operands are gathered, and every device repeats the work."
        for name, places in plan.unknown.items()
    ]
    said = [*plan.notes, *padding_texts(plan)]
    return f"<ul>{''.join(f'<li>{n}</li>' for n in [*notes, *map(escape, said)])}</ul>"


def _leaves(plan: Plan, paint: Paint) -> str:
    parts = []
    for noun, leaves in (("inputs", plan.inputs), ("results", plan.outputs)):
        rows = [
            [
                f"<code>{escape(x.path)}</code>",
                escape(x.dtype),
                paint.tensor(x),
                f"<code>{escape(spec_text(x.spec))}</code>",
                bytes_text(local_bytes(x, paint.sizes)),
            ]
            for x in leaves
        ]
        inner = html_table(["path", "type", "dimensions", "spec", "a device"], rows, right=(4,))
        parts.append(f"<details><summary>{len(leaves)} {noun}</summary>{inner}</details>")
    return "".join(parts)

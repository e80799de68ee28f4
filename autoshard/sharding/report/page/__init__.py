"""A plan as one self-contained HTML page: `plan.to_html(path)`.

The page makes no external request, and its Content-Security-Policy forbids them, so it can be mailed or kept with a
run. The policy allows one script, by its digest: a name from a program can never run as a script.
"""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import Any

from autoshard._units import (
    bytes_text,
    line_text,
    percent_text,
    ratio_text,
    time_text,
    variant_text,
)
from autoshard.sharding.plan.sharding_plan import ShardingPlan
from autoshard.sharding.report.page.costs import collectives_section, memory_section, time_section
from autoshard.sharding.report.page.mesh import legend, mesh_section
from autoshard.sharding.report.page.parts import AxisLabels, folded, section
from autoshard.sharding.report.page.script import DIGEST, SCRIPT
from autoshard.sharding.report.page.search import search_section
from autoshard.sharding.report.page.style import STYLE
from autoshard.sharding.report.page.tensors import tensors_section
from autoshard.sharding.report.summary import (
    devices,
    exposed_us,
    mesh_text,
    padding_texts,
    title,
    unknown_text,
    verdict,
)

POLICY = f"default-src 'none'; style-src 'unsafe-inline'; script-src '{DIGEST}'; base-uri 'none'; form-action 'none'"


def to_html(plan: ShardingPlan, path: Any) -> None:
    """Write the plan as one self-contained HTML page.

    Args:
        plan: The plan.
        path: The file to write.
    """
    Path(path).write_text(page(plan), encoding="utf-8")


def page(plan: ShardingPlan) -> str:
    """Return the HTML of the page."""
    paint = AxisLabels(plan)
    parts = [
        ("mesh", "Mesh", mesh_section(plan, paint),
         "The devices of the machine, once for each mesh axis: one group along the axis is blue."),
        ("axes", "Logical axes", legend(paint) if paint.number else "",
         "Each tensor dimension is one of these. Click one to show the tensors that have it."),
        ("time", "Step time", time_section(plan), "Estimated. Exposed time is not hidden by compute."),
        ("memory", "Memory per device", memory_section(plan), "Estimated, at the peak of a step."),
        ("search", "Search", search_section(plan), ""),
        ("collectives", "Collectives per step", collectives_section(plan, paint),
         "Bytes that each device sends, and the source line that causes it."),
        ("tensors", "Tensors", tensors_section(plan, paint),
         "Each dimension has the colour of its logical axis. Filled: sharded by a mesh axis. Dashed: sharded in "
         "storage only, gathered for use. Click a name for the reasons and all paths."),
        ("notes", "Notes", _notes(plan), ""),
    ]  # fmt: skip
    shown = [part for part in parts if part[2]]
    links = "".join(f'<a href="#{name}">{escape(heading)}</a>' for name, heading, _, _ in shown)
    body = "\n".join(section(name, heading, inner, remark) for name, heading, inner, remark in shown)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"/><title>Plan: {escape(title(plan))}</title>\n'
        f'<meta http-equiv="Content-Security-Policy" content="{escape(POLICY)}"/>\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"/>\n<style>{STYLE}{paint.style}</style>'
        f'</head>\n<body><main>{_head(plan)}<nav aria-label="Sections">{links}</nav>\n{body}\n</main>'
        f"<script>{SCRIPT}</script></body></html>\n"
    )


def _head(plan: ShardingPlan) -> str:
    reason = verdict(plan)
    rivals = "".join(
        f"<li>{escape(name)} <small>{escape(ratio)} the step time</small></li>" for name, ratio, _ in reason.rivals
    )
    next_best = f'<p class="next">Next best:</p><ul class="next">{rivals}</ul>' if rivals else ""
    variant = f'<p class="variant">Variant: {escape(variant_text(plan.variant))}</p>' if plan.variant else ""
    return (
        f'<header><h1>{escape(title(plan))}</h1><p class="mesh">{escape(mesh_text(plan))}</p>'
        f"<p>Plan: {escape(reason.sentence)}.</p>{variant}{next_best}</header>"
        f'<div class="cards">{"".join(_card(*each) for each in _cards(plan))}</div>'
    )


def _cards(plan: ShardingPlan) -> list[tuple[str, str, str]]:
    estimate = plan.estimate
    cards = [("step time", time_text(estimate.step_time_us), f"{time_text(exposed_us(plan))} exposed communication")]
    if plan.alone:
        speedup = ratio_text(plan.alone.step_time_us, estimate.step_time_us)
        cards.append(("speedup", speedup, f"on {devices(plan)} devices, over one"))
    limit = f"{percent_text(estimate.peak_memory_bytes, plan.limit_bytes)} of {bytes_text(plan.limit_bytes)}"
    peak = bytes_text(estimate.peak_memory_bytes)
    cards.append(("memory per device", peak, limit if plan.limit_bytes else "at the peak"))
    cards.append(("traffic per step", bytes_text(estimate.comm_bytes), "sent by each device"))
    priced = sum(len(each.tried) for each in plan.history) or len(plan.candidates)
    if priced > 1:
        over = f"of {len(plan.history)} variants" if len(plan.history) > 1 else "compared"
        cards.append(("plans priced", str(priced), over))
    return cards


def _card(heading: str, figure: str, remark: str) -> str:
    return f'<div class="card"><h3>{escape(heading)}</h3><p>{escape(figure)}</p><small>{escape(remark)}</small></div>'


def _notes(plan: ShardingPlan) -> str:
    notes = [
        f"No rule for primitive <code>{escape(name)}</code>, at {escape(', '.join(map(line_text, places)))}: "
        f"{escape(unknown_text(name))}."
        for name, places in plan.unknown.items()
    ]
    notes += map(escape, [*plan.notes, *padding_texts(plan)])
    for platform, options in plan.compiler_options.items():
        listed = "".join(f"<li><code>{escape(k)}={escape(str(v))}</code></li>" for k, v in options.items())
        if listed:
            notes.append(folded(f"{len(options)} compiler options for {escape(platform)}", f"<ul>{listed}</ul>"))
    audits = [
        folded(
            f"Audit of {escape(plan.chosen or 'this plan')}",
            f"<pre>{escape(str(audit))}</pre>",
        )
        for audit in plan.audits
    ]
    listed = "".join(f"<li>{n}</li>" for n in [*notes, *audits])
    return f"<ul>{listed}</ul>" if listed else ""

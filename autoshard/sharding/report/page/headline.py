"""The top of a plan's page: what was chosen and why, the main figures, and counts that link to their tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from html import escape

from autoshard._html.card import Card
from autoshard._units import bytes_text, percent_text, ratio_text, time_text, variant_text
from autoshard.sharding.plan.sharding_plan import ShardingPlan
from autoshard.sharding.report.page.compiled import audit_of, compiled_audit, failure_text, measured_us, source_of
from autoshard.sharding.report.page.tensors import NAMES, table_id
from autoshard.sharding.report.search_outcome import plan_counts, ratio_or_tie, verdict
from autoshard.sharding.report.summary import (
    collectives,
    devices,
    exposed_us,
    groups_by_role,
    mesh_text,
    title,
    totals,
)


def headline(plan: ShardingPlan) -> str:
    """The title, the verdict, the main figures and the counts."""
    rivals = "".join(f"<li>{escape(name)} <small>{escape(ratio)}</small></li>" for name, ratio in _next_best(plan))
    next_best = f'<p class="next">Next best by the estimate:</p><ul class="next">{rivals}</ul>' if rivals else ""
    variant = f'<p class="variant">Variant: {escape(variant_text(plan.variant))}</p>' if plan.variant else ""
    audit = audit_of(plan)
    failed = f'<p class="bad">Compiled: {escape(failure_text(audit))}.</p>' if audit and not audit.ok else ""
    cards = "".join(card.html for card in _cards(plan))
    return (
        f'<header><h1>{escape(title(plan))}</h1><p class="mesh">{escape(mesh_text(plan))}</p>'
        f"<p>Plan: {escape(verdict(plan).sentence)}.</p>{failed}{variant}{next_best}</header>"
        f'<div class="cards">{cards}</div><p class="remark sources">{_sources(plan)}</p>'
        f'<ul class="counts" aria-label="Counts">{_counts(plan)}</ul>'
    )


def _next_best(plan: ShardingPlan) -> list[tuple[str, str]]:
    times = {name: us for name, us, _ in reversed(plan.candidates)}
    ratios = [(name, ratio_or_tie(plan, times[name])) for name, _, _ in verdict(plan).rivals]
    return [(name, "a tie in step time" if ratio == "tie" else f"{ratio} the step time") for name, ratio in ratios]


def _cards(plan: ShardingPlan) -> list[Card]:
    here, audit = plan.estimate, compiled_audit(plan)
    exposed = exposed_us(plan) if audit is None else audit.exposed_us or 0.0
    measured = measured_us(plan)
    source = audit and f"compiled, {source_of(audit)}" if measured is None else "measured, the median of its runs"
    known = audit and audit.step_time_us if measured is None else measured
    cards = [
        _card("step time", here.step_time_us, known, time_text, f"{time_text(exposed)} exposed communication", source),
        _memory_card(plan),
        _card("traffic per step", here.comm_bytes, audit and audit.wire_bytes, bytes_text, "sent by each device"),
    ]  # fmt: skip
    if here.host_memory_bytes or (audit and audit.host_bytes):
        words = "per device, in the memory of its host"
        host = _card("host memory", here.host_memory_bytes, audit and audit.host_bytes, bytes_text, words)
        cards.insert(2, host)
    if plan.alone:
        speedup = ratio_text(plan.alone.step_time_us, here.step_time_us)
        cards.insert(1, Card("speedup", speedup, "estimated", (f"on {devices(plan)} devices, over one",)))
    return cards


def _memory_card(plan: ShardingPlan) -> Card:
    audit, limit = compiled_audit(plan), plan.limit_bytes
    here = plan.estimate.peak_memory_bytes
    compiled = audit.peak_bytes if audit else None
    peak = here if compiled is None else compiled
    words = f"{percent_text(peak, limit)} of {bytes_text(limit)}" if limit else "at the peak"
    return _card("memory per device", here, compiled, bytes_text, words, is_bad=bool(limit) and peak > limit)


def _card(
    heading: str,
    estimated: float,
    compiled: float | None,
    text: Callable[[float], str],
    words: str,
    source: str | None = None,
    is_bad: bool = False,
) -> Card:
    """A card with the compiled value if it is known, and the estimate beside it."""
    if compiled is None:
        return Card(heading, text(estimated), "estimated", (words,), is_bad)
    return Card(heading, text(compiled), source or "compiled", (f"estimated {text(estimated)}", words), is_bad)


def _sources(plan: ShardingPlan) -> str:
    words = "Estimated: by the cost model of the search."
    if measured_us(plan) is not None:
        words += " Measured: on the attached devices, with synthetic inputs."
    if compiled_audit(plan):
        words += (' Compiled: read from the program that the target\'s compiler made, which was not run. '
                  '<a href="#compiled">Both side by side</a>.')  # fmt: skip
    return words


def _counts(plan: ShardingPlan) -> str:
    """Counts of arrays, collectives and plans. The parts of each sum to its total, and each links to its table."""
    roles = [(role, totals(some)[0]) for role, some in groups_by_role(plan)]
    items = []
    if roles:
        parts = [(count, _role_text(role, count), f"#{table_id(role)}") for role, count in roles]
        items.append(_count(len(plan.inputs), "array{s} as input", "#tensors", parts))
    if plan.outputs:
        items.append(_count(len(plan.outputs), "array{s} as result", f"#{table_id('results')}", []))
    moved = collectives(plan)
    if moved:
        kinds = Counter(kind for kind, *_ in moved).most_common()
        parts = [(count, kind, "") for kind, count in kinds]
        items.append(_count(len(moved), "collective{s} by kind, mesh axes and source line", "#collectives", parts))
    n = plan_counts(plan)
    if n.priced > 1:
        parts = [(n.known, "proposed", ""), (n.changed, "by local search", "")]
        items.append(_count(n.priced, "plan{s} priced", "#plans", [part for part in parts if part[0]]))
        if plan.limit_bytes:
            items[-1] += f"; {n.fitting} fit{'s' * (n.fitting == 1)} {bytes_text(plan.limit_bytes)}"
    return "".join(f"<li>{item}</li>" for item in items)


def _role_text(role: str, count: int) -> str:
    if count == 1 and role in ("parameter", "other"):
        return {"parameter": "parameter", "other": "counter or key"}[role]
    return NAMES.get(role, role or "inputs").lower()


def _count(total: int, words: str, link: str, parts: list[tuple[int, str, str]]) -> str:
    """`37 arrays: 8 parameters + 29 data`, linked."""
    text = f'<a href="{link}"><b>{total}</b> {words.format(s="s" * (total != 1))}</a>'
    listed = [
        f'<a href="{escape(at)}">{count} {escape(name)}</a>' if at else f"{count} {escape(name)}"
        for count, name, at in parts
    ]
    return f"{text}: {' + '.join(listed)}" if listed else text

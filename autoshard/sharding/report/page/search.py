"""The search on a plan's page: what was priced, time against memory, which plan won and why the others lost."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from autoshard._units import bytes_text, ratio_text, time_text, variant_text
from autoshard.sharding.plan.search_record import PricedPlan, SearchRecord
from autoshard.sharding.plan.sharding_plan import ShardingPlan
from autoshard.sharding.report.page.chart import Point, scatter
from autoshard.sharding.report.page.parts import bar, folded, search_box, table
from autoshard.sharding.report.summary import exposed_us

SHOWN = 12
LISTED = 400
TIE = 1e-4  # of a step: what is closer is no faster


@dataclass(frozen=True)
class Row:
    """A plan that was priced, and its fate."""

    tried: PricedPlan
    variant: int
    fits: bool
    chosen: bool


def search_section(plan: ShardingPlan) -> str:
    """The search: in words, as a chart, its variants, its plans."""
    history = _history(plan)
    rows = list(_rows(plan, history))
    if len(rows) < 2:
        return ""
    points = [Point(r.tried.peak_bytes, r.tried.step_time_us, _class(r), _title(plan, history, r)) for r in rows]
    pick = _variant_picker(history) if len(history) > 1 else ""
    chart = scatter(points, plan.limit_bytes, plan.estimate.step_time_us)
    tip = '<p class="tip" id="point" aria-live="polite">Point at a plan to see what it is.</p>'
    listed = (f'<h3>Plans</h3>{search_box("plans", "plans-list")}'
              f'<div id="plans-list">{_plans(plan, history, rows)}</div>')  # fmt: skip
    return f"<p>{_story(plan, history, rows)}</p>{pick}{chart}{tip}{_variants(plan, history)}{listed}"


def _history(plan: ShardingPlan) -> Sequence[SearchRecord]:
    """The plan's history; of one that keeps none, what its candidates and variants say."""
    if plan.history:
        return plan.history
    return [SearchRecord(plan.variant, len(plan.candidates), tried=tuple(PricedPlan(*c) for c in plan.candidates))]


def _rows(plan: ShardingPlan, history: Sequence[SearchRecord]) -> Iterator[Row]:
    """All plans that were priced, those that fit first and the fastest of them first."""
    limit = plan.limit_bytes or math.inf
    found, won = [], False
    for number, each in enumerate(history):
        for tried in each.tried:
            chosen = not won and tried.words == plan.chosen and dict(each.variant) == dict(plan.variant)
            won = won or chosen
            found.append(Row(tried, number, tried.peak_bytes <= limit, chosen))
    yield from sorted(found, key=lambda r: (not r.chosen, not r.fits, r.tried.step_time_us))


def _story(plan: ShardingPlan, history: Sequence[SearchRecord], rows: Sequence[Row]) -> str:
    proposed, alike, idle = (sum(getattr(h, name) for h in history) for name in ("proposed", "alike", "idle"))
    fit = sum(r.fits for r in rows)
    changed = sum(r.tried.changed for r in rows)
    words = f"{len(rows) - changed} plans were priced"
    words += f" over {len(history)} variants of the step" if len(history) > 1 else ""
    left = [f"{alike} that lay everything out as another does" if alike else "",
            f"{idle} that leave devices without work" if idle else ""]  # fmt: skip
    if any(left):
        words += f", of {proposed} proposed (without {' and '.join(filter(None, left))})"
    words += f". The best were changed word by word, {changed} times" if changed else ""
    words += f"; {fit} fit {bytes_text(plan.limit_bytes)}" if plan.limit_bytes else ""
    kind = "fastest of those" if plan.limit_bytes and fit else "smallest" if plan.limit_bytes else "fastest"
    if any(r.fits and r.tried.step_time_us < plan.estimate.step_time_us for r in rows):
        kind = "one that was chosen: each faster one says why it was not"
    variant = f", {variant_text(plan.variant)}," if plan.variant else ""
    return escape(f"{words}. {plan.chosen or 'This plan'}{variant} is the {kind}.")


def lost(plan: ShardingPlan, tried: PricedPlan) -> str:
    """Why a plan was not chosen."""
    here = plan.estimate
    if plan.limit_bytes and tried.peak_bytes > plan.limit_bytes:
        return f"does not fit: {bytes_text(tried.peak_bytes - plan.limit_bytes)} too much"
    if abs(tried.step_time_us - here.step_time_us) <= TIE * here.step_time_us:
        return f"as fast, to {100 * TIE:g} %"
    if tried.step_time_us < here.step_time_us and tried.changed:
        return "faster by repeating work, or by too little for a plan that has no name"
    if tried.step_time_us < here.step_time_us:
        return "faster by the estimate, not as compiled" if plan.audits else "faster by the estimate"
    if not tried.compute_us:
        return "slower"
    compute = tried.compute_us - here.compute_us
    waits = tried.step_time_us - tried.compute_us - exposed_us(plan)
    least = TIE * here.step_time_us
    kind = f", most of all for {tried.waits_for}" if tried.waits_for else ""
    parts = [(compute, f"{time_text(compute)} more compute"), (waits, f"waits {time_text(waits)} longer{kind}")]
    return " and ".join(text for size, text in sorted(parts, key=lambda p: -p[0]) if size > least) or "slower"


def _class(row: Row) -> str:
    return f"{'won' if row.chosen else 'fit' if row.fits else 'unfit'} v{row.variant}"


def _title(plan: ShardingPlan, history: Sequence[SearchRecord], row: Row) -> str:
    tried, variant = row.tried, history[row.variant].variant
    words = f"{tried.words}{f' ({variant_text(variant)})' if variant else ''}"
    fate = "chosen" if row.chosen else lost(plan, tried)
    return f"{words}: {time_text(tried.step_time_us)}, {bytes_text(tried.peak_bytes)}; {fate}"


def _variant_picker(history: Sequence[SearchRecord]) -> str:
    options = "".join(
        f'<option value="v{n}">{escape(variant_text(each.variant))}</option>' for n, each in enumerate(history)
    )
    everything = f'<option value="">all {len(history)}</option>'
    field = f'<select id="variant">{everything}{options}</select>'
    return f'<label class="search"><span>Variant</span>{field}</label>'


def _variants(plan: ShardingPlan, history: Sequence[SearchRecord]) -> str:
    """The best plan of each variant."""
    if len(plan.variants) < 2:
        return ""
    here, limit = plan.estimate.step_time_us, plan.limit_bytes or math.inf
    ranked = sorted(plan.variants, key=lambda v: (v[3] > limit, v[2]))
    most = max((v[2] for v in ranked), default=1.0)
    rows, classes = [], []
    for variant, words, us, peak in ranked:
        won = dict(variant) == dict(plan.variant)
        tried = _tried_of(history, variant, words) or PricedPlan(words, us, peak)
        kind = "k-chosen" if won else "k-rival" if peak <= limit else "k-unfit"
        rows.append([
            f"<b>{escape(variant_text(variant))}</b>", escape(words), bar(kind, us, most, "wide"), time_text(us),
            ratio_text(us, here), bytes_text(peak), _fate(plan, tried, won),
        ])  # fmt: skip
        classes.append("won" if won else "")
    head = ["variant", "its best plan", "step", "", "", "memory", "outcome"]
    return f"<h3>Variants of the step</h3>{table(head, rows, (3, 4, 5), classes)}"


def _tried_of(history: Sequence[SearchRecord], variant: Mapping[str, Any], words: str) -> PricedPlan | None:
    same = (each for each in history if dict(each.variant) == dict(variant))
    return next((t for each in same for t in each.tried if t.words == words), None)


def _fate(plan: ShardingPlan, tried: PricedPlan, won: bool) -> str:
    if won:
        return '<span class="tag">chosen</span>'
    words = lost(plan, tried)
    return f'<span class="bad">{escape(words)}</span>' if words.startswith("does not fit") else escape(words)


def _plans(plan: ShardingPlan, history: Sequence[SearchRecord], rows: Sequence[Row]) -> str:
    shown, here = rows[:LISTED], plan.estimate.step_time_us
    most = max((r.tried.step_time_us for r in shown[:SHOWN]), default=1.0)
    cells = []
    for r in shown:
        kind = "k-chosen" if r.chosen else "k-rival" if r.fits else "k-unfit"
        named = [escape(variant_text(history[r.variant].variant))] if len(history) > 1 else []
        cells.append([
            f"<b>{escape(r.tried.words)}</b>", *named, bar(kind, r.tried.step_time_us, most, "wide"),
            time_text(r.tried.step_time_us), ratio_text(r.tried.step_time_us, here), bytes_text(r.tried.peak_bytes),
            _fate(plan, r.tried, r.chosen),
        ])  # fmt: skip
    named = ["variant"] if len(history) > 1 else []
    head, at = ["plan", *named, "step", "", "", "memory", "outcome"], len(named)
    right, classes = (at + 2, at + 3, at + 4), [_class(r) for r in shown]
    first = table(head, cells[:SHOWN], right, classes[:SHOWN])
    rest = cells[SHOWN:]
    more = folded(f"{len(rest)} more", table(head, rest, right, classes[SHOWN:])) if rest else ""
    tail = (
        f'<p class="remark">and {len(rows) - len(shown)} more, which are not listed</p>'
        if len(rows) > len(shown)
        else ""
    )
    return f"{first}{more}{tail}"

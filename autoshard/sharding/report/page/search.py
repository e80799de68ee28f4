"""The search on a plan's page: the plans that were priced, and why each was chosen or not."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from autoshard._html.parts import bar, bar_legend, folded, search_box, table
from autoshard._shown import shown
from autoshard._units import bytes_text, ratio_text, time_text, variant_text
from autoshard.sharding.plan.memory_doubt import almost_fills, usable_bytes_of
from autoshard.sharding.plan.search_record import PricedPlan, SearchRecord
from autoshard.sharding.plan.sharding_plan import ShardingPlan
from autoshard.sharding.planner.constants import ALTERNATIVE_TIE
from autoshard.sharding.report.page.chart import Point, scatter
from autoshard.sharding.report.search_outcome import history_of, is_fastest, is_tie, plan_counts, ratio_or_tie

SHOWN = 12  # rows that are shown at first; the others are folded
LISTED = 400  # rows in the page, which bounds its size


@shown
@dataclass(frozen=True)
class Row:
    """A priced plan, the index of its variant, whether it fits, and whether it was chosen."""

    tried: PricedPlan
    variant: int
    fits: bool
    chosen: bool


def search_section(plan: ShardingPlan) -> str:
    """The search: a summary, a chart, the variants, the plans."""
    history = history_of(plan)
    rows = list(_rows(plan, history))
    if len(rows) < 2:
        return ""
    points = [Point(r.tried.peak_bytes, r.tried.step_time_us, _class(r), _title(plan, history, r)) for r in rows]
    pick = _variant_picker(history) if len(history) > 1 else ""
    chart = scatter(points, plan.limit_bytes, plan.estimate.step_time_us)
    tip = '<p class="tip" id="point" aria-live="polite">Hover over a plan for details.</p>'
    kinds = dict.fromkeys(map(_bar_class, rows))
    names = {"k-chosen": "chosen", "k-rival": "fits", "k-unfit": "does not fit"}
    key = bar_legend([(kind, names[kind]) for kind in names if kind in kinds], "Bars compare step times:")
    listed = (f'<h3 id="plans">Plans</h3>{_names_text(rows)}{search_box("plans", "plans-list")}{key}'
              f'<div id="plans-list">{_plans(plan, history, rows)}</div>')  # fmt: skip
    return f"<p>{_story(plan)}</p>{pick}{chart}{tip}{_variants(plan, history)}{listed}"


def _names_text(rows: Sequence[Row]) -> str:
    """How to read the names of plans."""
    words = "A plan is named by its strategy: kinds of mesh axes with their sizes."
    if any(r.tried.changed for r in rows):
        words += (" A word such as <code>tp-ffn</code> or <code>dp+vocab</code> is a change by local search: one "
                  "logical axis or kind of state removed (-) from that mesh axis, or added (+) to it.")  # fmt: skip
    return f'<p class="remark">{words}</p>'


def _rows(plan: ShardingPlan, history: Sequence[SearchRecord]) -> Iterator[Row]:
    """Yield all priced plans: the chosen one, those that fit, then the others, each by step time."""
    limit = plan.limit_bytes or math.inf
    rows, won = [], False
    for number, each in enumerate(history):
        for tried in each.tried:
            chosen = not won and tried.strategy == plan.chosen and dict(each.variant) == dict(plan.variant)
            won = won or chosen
            rows.append(Row(tried, number, tried.peak_bytes <= limit, chosen))
    yield from sorted(rows, key=lambda r: (not r.chosen, not r.fits, r.tried.step_time_us))


def _story(plan: ShardingPlan) -> str:
    """The counts of the search, which add up, and its outcome."""
    n = plan_counts(plan)
    dropped = [f"{n.alike} with the layout of another"] if n.alike else []
    dropped += [f"{n.idle} with an idle mesh axis"] if n.idle else []
    dropped += [f"{n.slow} that are slower in any case"] if n.slow else []
    words = f"{n.priced} plans were priced"
    words += f" for {n.variants} variants of the step" if n.variants > 1 else ""
    without = f" (without {' and '.join(dropped)})" if dropped else ""
    parts = [f"{n.known} of {n.proposed} proposed{without}"]
    parts += [f"{n.changed} that local search made by changing the best"] if n.changed else []
    words += f": {', and '.join(parts)}"
    if plan.limit_bytes:
        size, unfit = bytes_text(plan.limit_bytes), n.priced - n.fitting
        words += f". {n.fitting} of the {n.priced} fit {size}, {unfit} do not" if unfit else f". All fit {size}"
    if not is_fastest(plan):
        kind = "chosen, although others are faster by the estimate; the table says why"
    elif plan.limit_bytes:
        kind = "the fastest of those that fit" if n.fitting else "the smallest"
    else:
        kind = "the fastest"
    variant = f", {variant_text(plan.variant)}," if plan.variant else ""
    return escape(f"{words}. {plan.chosen or 'This plan'}{variant} is {kind}.")


def why_not_chosen(plan: ShardingPlan, tried: PricedPlan) -> str:
    """Why a priced plan was not chosen."""
    here = plan.estimate
    if plan.limit_bytes and tried.peak_bytes > plan.limit_bytes:
        return f"does not fit: {bytes_text(tried.peak_bytes - plan.limit_bytes)} over the limit"
    if is_tie(plan, tried.step_time_us):
        is_same = abs(tried.peak_bytes - here.peak_memory_bytes) <= ALTERNATIVE_TIE * here.peak_memory_bytes
        return f"a tie{'' if is_same else ' in time'}, within {100 * ALTERNATIVE_TIE:g} %"
    if tried.step_time_us < here.step_time_us and tried.changed:
        return "faster, but does more work than the known plan, or gains too little over it"
    if tried.step_time_us < here.step_time_us and almost_fills(tried.peak_bytes, usable_bytes_of(plan)):
        return "faster by the estimate, but almost fills the memory: the compiled program may be slow"
    if tried.step_time_us < here.step_time_us:
        outcome = ", but not as measured" if plan.measured else ", but not as compiled" if plan.audits else ""
        return f"faster by the estimate{outcome}"
    if not tried.compute_us:
        return "slower"
    compute = tried.compute_us - here.compute_us
    exposed = tried.step_time_us - tried.compute_us - (here.step_time_us - here.compute_us)
    least = ALTERNATIVE_TIE * here.step_time_us / 2  # the larger of two parts of more than a tie
    kind = f" (mostly {tried.most_exposed_kind})" if tried.most_exposed_kind else ""
    parts = [
        (compute, f"{time_text(compute)} more compute"),
        (exposed, f"{time_text(exposed)} more exposed communication{kind}"),
    ]
    return " and ".join(text for size, text in sorted(parts, key=lambda p: -p[0]) if size > least) or "slower"


def _bar_class(row: Row) -> str:
    return "k-chosen" if row.chosen else "k-rival" if row.fits else "k-unfit"


def _class(row: Row) -> str:
    return f"{'won' if row.chosen else 'fit' if row.fits else 'unfit'} v{row.variant}"


def _title(plan: ShardingPlan, history: Sequence[SearchRecord], row: Row) -> str:
    tried, variant = row.tried, history[row.variant].variant
    words = f"{tried.strategy}{f' ({variant_text(variant)})' if variant else ''}"
    outcome = "chosen" if row.chosen else why_not_chosen(plan, tried)
    return f"{words}: {time_text(tried.step_time_us)}, {bytes_text(tried.peak_bytes)}; {outcome}"


def _variant_picker(history: Sequence[SearchRecord]) -> str:
    options = "".join(
        f'<option value="v{n}">{escape(variant_text(each.variant))}</option>' for n, each in enumerate(history)
    )
    everything = f'<option value="">all {len(history)}</option>'
    field = f'<select id="variant">{everything}{options}</select>'
    return f'<label class="search"><span>Variant</span>{field}</label>'


def _variants(plan: ShardingPlan, history: Sequence[SearchRecord]) -> str:
    """The best plan of each variant, as a table."""
    if len(plan.variants) < 2:
        return ""
    limit = plan.limit_bytes or math.inf
    ranked = sorted(plan.variants, key=lambda v: (v[3] > limit, v[2]))
    most = max((v[2] for v in ranked), default=1.0)
    rows, classes = [], []
    for variant, words, us, peak in ranked:
        chosen = dict(variant) == dict(plan.variant)
        tried = _tried_of(history, variant, words) or PricedPlan(words, us, peak)
        kind = "k-chosen" if chosen else "k-rival" if peak <= limit else "k-unfit"
        rows.append([
            f"<b>{escape(variant_text(variant))}</b>", escape(words), bar(kind, us, most, "wide"), time_text(us),
            _ratio(plan, tried, chosen), bytes_text(peak), _outcome(plan, tried, chosen),
        ])  # fmt: skip
        classes.append("won" if chosen else "")
    head = ["variant", "best plan", "step time", "", "ratio", "memory", "outcome"]
    return f"<h3>Variants of the step</h3>{table(head, rows, (3, 4, 5), classes)}"


def _tried_of(history: Sequence[SearchRecord], variant: Mapping[str, Any], words: str) -> PricedPlan | None:
    same = (each for each in history if dict(each.variant) == dict(variant))
    return next((t for each in same for t in each.tried if t.strategy == words), None)


def _outcome(plan: ShardingPlan, tried: PricedPlan, chosen: bool) -> str:
    if chosen:
        return '<span class="tag">chosen</span>'
    words = why_not_chosen(plan, tried)
    return f'<span class="bad">{escape(words)}</span>' if words.startswith("does not fit") else escape(words)


def _ratio(plan: ShardingPlan, tried: PricedPlan, chosen: bool) -> str:
    here = plan.estimate.step_time_us
    return ratio_text(here, here) if chosen else ratio_or_tie(plan, tried.step_time_us)


def _plans(plan: ShardingPlan, history: Sequence[SearchRecord], rows: Sequence[Row]) -> str:
    listed = rows[:LISTED]
    most = max((r.tried.step_time_us for r in listed[:SHOWN]), default=1.0)
    cells = []
    for r in listed:
        variant = [escape(variant_text(history[r.variant].variant))] if len(history) > 1 else []
        cells.append([
            f"<b>{escape(r.tried.strategy)}</b>", *variant, bar(_bar_class(r), r.tried.step_time_us, most, "wide"),
            time_text(r.tried.step_time_us), _ratio(plan, r.tried, r.chosen), bytes_text(r.tried.peak_bytes),
            _outcome(plan, r.tried, r.chosen),
        ])  # fmt: skip
    variant = ["variant"] if len(history) > 1 else []
    head, at = ["plan", *variant, "step time", "", "ratio", "memory", "outcome"], len(variant)
    right, classes = (at + 2, at + 3, at + 4), [_class(r) for r in listed]
    first = table(head, cells[:SHOWN], right, classes[:SHOWN])
    rest = cells[SHOWN:]
    more = folded(f"{len(rest)} more", table(head, rest, right, classes[SHOWN:])) if rest else ""
    left = len(rows) - len(listed)
    tail = f'<p class="remark">{left} more of the {len(rows)} are not listed.</p>' if left else ""
    return f"{first}{more}{tail}"

"""What a step costs on a plan's page: memory by kind, time by kind, every collective."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from html import escape

from autoshard._units import bytes_text, line_text, percent_text, time_text
from autoshard.sharding.plan.sharding_plan import ShardingPlan
from autoshard.sharding.report.page.parts import Paint, bar, folded, key, kind_class, search_box, stack, table
from autoshard.sharding.report.summary import exposed_us, memory_rows

COLLECTIVES_SHOWN = 12
MEMORY_KINDS = ("parameter", "optimizer", "data", "temporary", "constant")


@dataclass
class Moved:
    """Traffic: bytes that leave a device in a step, its microseconds, and those that compute does not hide."""

    nbytes: float = 0.0
    time_us: float = 0.0
    waits_us: float = 0.0

    def add(self, nbytes: float, time_us: float, waits_us: float) -> None:
        """Counts more of it."""
        self.nbytes, self.time_us, self.waits_us = (
            self.nbytes + nbytes,
            self.time_us + time_us,
            self.waits_us + waits_us,
        )


def memory_section(plan: ShardingPlan) -> str:
    """Memory by kind against the limit."""
    rows, peak, limit = memory_rows(plan), plan.estimate.peak_memory_bytes, plan.limit_bytes
    scale = max(peak, limit) or 1.0
    words = f"{bytes_text(peak)} of {bytes_text(limit)}" if limit else bytes_text(peak)
    label = f"memory of a device: {words}; " + ", ".join(f"{kind} {bytes_text(here)}" for kind, here, _ in rows)
    parts = [(_memory_class(kind), f"{kind} {bytes_text(here)}", here) for kind, here, _ in rows]
    drawn = stack(parts, scale, label, limit or None)
    free = f"{bytes_text(limit - peak)} free" if limit and limit >= peak else ""
    over = f'<span class="bad">{bytes_text(peak - limit)} too much</span>' if limit and peak > limit else ""
    end = f"limit {bytes_text(limit)}" if limit >= peak else f"{bytes_text(peak)}; red: the limit, {bytes_text(limit)}"
    scale_text = f'<p class="ends"><span>0</span><span>{end if limit else ""}</span></p>'
    cells = [
        [key(_memory_class(kind)) + escape(kind), bytes_text(here), percent_text(here, peak),
         "-" if there is None else bytes_text(there)]
        for kind, here, there in rows
    ]  # fmt: skip
    alone = bytes_text(plan.alone.peak_memory_bytes) if plan.alone else "-"
    cells.append(["<b>at its peak</b>", f"<b>{bytes_text(peak)}</b>", percent_text(peak, peak), alone])
    listed = table(["kind", "this plan", "share", "all on one device"], cells, (1, 2, 3), wide=(3,))
    return f'<p class="figure">{words} <small>{free}</small>{over}</p>{drawn}{scale_text}{listed}'


def _memory_class(kind: str) -> str:
    return f"k-{kind}" if kind in MEMORY_KINDS else "k-other"


def by_kind(plan: ShardingPlan) -> dict[str, Moved]:
    """The traffic of each kind of collective, what is waited for longest first."""
    found: dict[str, Moved] = defaultdict(Moved)
    for (kind, _, size, _), (us, waits) in zip(plan.traffic, _times(plan), strict=True):
        found[kind].add(size, us, waits)
    return dict(sorted(found.items(), key=lambda item: (-item[1].waits_us, -item[1].time_us, item[0])))


def _times(plan: ShardingPlan) -> tuple[tuple[float, float], ...]:
    return plan.traffic_us if len(plan.traffic_us) == len(plan.traffic) else ((0.0, 0.0),) * len(plan.traffic)


def time_section(plan: ShardingPlan) -> str:
    """Time by kind: compute above, traffic below it, beside compute where it is hidden."""
    estimate, alone, exposed, moved = plan.estimate, plan.alone, exposed_us(plan), by_kind(plan)
    step = estimate.step_time_us
    hidden = max(estimate.comm_us - exposed, 0.0)
    words = f"{time_text(estimate.compute_us)} of compute, then {time_text(exposed)} waiting for traffic"
    above = stack([("k-compute", f"compute {time_text(estimate.compute_us)}", estimate.compute_us)], step,
                  f"compute: {time_text(estimate.compute_us)} of {time_text(step)}")  # fmt: skip
    parts = [
        (
            f"{kind_class(k)} hid",
            f"{k}, hidden behind compute: {time_text(m.time_us - m.waits_us)}",
            m.time_us - m.waits_us,
        )
        for k, m in moved.items()
    ]
    parts += [(kind_class(k), f"{k}, waited for: {time_text(m.waits_us)}", m.waits_us) for k, m in moved.items()]
    if not any(m.time_us for m in moved.values()):  # times by kind are not known
        parts = [("k-other hid", "hidden", hidden), ("k-other", "waited for", exposed)]
    below = stack(parts, step, f"traffic: {time_text(hidden)} hidden behind compute, {time_text(exposed)} waited for",
                  start=max(estimate.compute_us - hidden, 0.0))  # fmt: skip
    lanes = (
        f'<div class="lanes"><span>compute</span>{above}<span>traffic</span>{below}</div>'
        f'<p class="ends"><span>0</span><span>{time_text(step)}</span></p>'
    )
    rows = [[key("k-compute") + "compute", time_text(estimate.compute_us), "-", time_text(estimate.compute_us),
             percent_text(estimate.compute_us, step), time_text(alone.compute_us) if alone else "-"]]  # fmt: skip
    rows += [
        [
            key(kind_class(k)) + escape(k), time_text(m.time_us), time_text(m.time_us - m.waits_us),
            time_text(m.waits_us), percent_text(m.waits_us, step), "0" if alone else "-",
        ]
        for k, m in moved.items()
    ]  # fmt: skip
    total = time_text(alone.step_time_us) if alone else "-"
    spent = time_text(estimate.compute_us + estimate.comm_us)
    rows.append(["<b>step</b>", spent, time_text(hidden), f"<b>{time_text(step)}</b>", percent_text(step, step), total])
    head = ["kind", "takes", "hidden", "on the clock", "share", "all on one device"]
    listed = table(head, rows, (1, 2, 3, 4, 5), wide=(4, 5))
    return f'<p class="figure">{time_text(step)} <small>{words}</small></p>{lanes}{listed}'


def collectives_section(plan: ShardingPlan, paint: Paint) -> str:
    """Every collective with the line of code that causes it."""
    found: dict[tuple[str, str, str], Moved] = defaultdict(Moved)
    full: dict[tuple[str, str, str], str] = {}
    for (kind, axes, size, line), (us, waits) in zip(plan.traffic, _times(plan), strict=True):
        found[kind, axes, line_text(line)].add(size, us, waits)
        full.setdefault((kind, axes, line_text(line)), line)
    if not found:
        return "<p>None.</p>"
    ranked = sorted(found.items(), key=lambda item: -item[1].nbytes)
    total, most = sum(m.nbytes for _, m in ranked) or 1.0, ranked[0][1].nbytes or 1.0
    timed = bool(plan.traffic_us)
    rows = [
        [key(kind_class(kind)) + escape(kind), paint.tags(axes.split()), bytes_text(m.nbytes),
         bar(kind_class(kind), m.nbytes, most), percent_text(m.nbytes, total),
         time_text(m.time_us) if timed else "-", time_text(m.waits_us) if timed else "-",
         f'<code title="{escape(full[kind, axes, line])}">{escape(line)}</code>']
        for (kind, axes, line), m in ranked
    ]  # fmt: skip
    head = ["collective", "over", "bytes", "", "share", "takes", "waited for", "because of"]
    right = (2, 4, 5, 6)
    rest = rows[COLLECTIVES_SHOWN:]
    smaller = f"{len(rest)} smaller ones, {bytes_text(sum(m.nbytes for _, m in ranked[COLLECTIVES_SHOWN:]))}"
    more = folded(smaller, table(head, rest, right)) if rest else ""
    inner = table(head, rows[:COLLECTIVES_SHOWN], right) + more
    return f'{search_box("collectives", "moves-list")}<div id="moves-list">{inner}</div>'

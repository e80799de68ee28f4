"""The cost of a step on a plan's page: memory by kind, time by kind, every collective."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from html import escape

from autoshard._html.parts import bar, bar_legend, folded, key, search_box, stack, table
from autoshard._units import bytes_text, line_text, percent_text, time_text
from autoshard.sharding.plan.sharding_plan import ShardingPlan
from autoshard.sharding.report.page.compiled import compiled_audit, measured_us, source_of
from autoshard.sharding.report.page.parts import AxisLabels, kind_class
from autoshard.sharding.report.summary import exposed_us, local_bytes, memory_rows, mesh_sizes

COLLECTIVES_SHOWN = 12
ENLARGED = 0.1  # a peak below this fraction of the limit is also drawn enlarged
HOST_TRANSFERS = "host transfers"
MEMORY_KINDS = ("parameter", "optimizer", "data", "temporary", "constant")


@dataclass
class Traffic:
    """Traffic per step and device: bytes sent, their time, and the exposed part of that time, in microseconds."""

    nbytes: float = 0.0
    time_us: float = 0.0
    exposed_us: float = 0.0

    def add(self, nbytes: float, time_us: float, exposed_us: float) -> None:
        """Add more traffic."""
        self.nbytes += nbytes
        self.time_us += time_us
        self.exposed_us += exposed_us


def memory_section(plan: ShardingPlan) -> str:
    """Memory by kind, compared with the limit."""
    rows, peak, limit = memory_rows(plan), plan.estimate.peak_memory_bytes, plan.limit_bytes
    scale = max(peak, limit) or 1.0
    words = f"{bytes_text(peak)} of {bytes_text(limit)}" if limit else bytes_text(peak)
    label = f"memory per device: {words}; " + ", ".join(f"{kind} {bytes_text(here)}" for kind, here, _ in rows)
    parts = [(_memory_class(kind), f"{kind} {bytes_text(here)}", here) for kind, here, _ in rows]
    drawn = stack(parts, scale, label, limit or None)
    free = f"{bytes_text(limit - peak)} free" if limit and limit >= peak else ""
    over = f'<span class="bad">{bytes_text(peak - limit)} over the limit</span>' if limit and peak > limit else ""
    end = f"limit {bytes_text(limit)}" if limit >= peak else f"{bytes_text(peak)} (red: limit {bytes_text(limit)})"
    scale_text = f'<p class="ends"><span>0</span><span>{end if limit else ""}</span></p>'
    cells = [
        [key(_memory_class(kind)) + escape(kind), bytes_text(here), percent_text(here, peak),
         "-" if there is None else bytes_text(there)]
        for kind, here, there in rows
    ]  # fmt: skip
    alone = bytes_text(plan.alone.peak_memory_bytes) if plan.alone else "-"
    cells.append(["<b>peak</b>", f"<b>{bytes_text(peak)}</b>", percent_text(peak, peak), alone])
    listed = table(["kind", "this plan", "share", "on one device"], cells, (1, 2, 3), wide=(3,))
    if 0 < peak < ENLARGED * limit:
        enlarged = stack(parts, peak, f"the same, enlarged: {words}")
        scale_text += (f'<p class="remark">The same, enlarged:</p>{enlarged}'
                       f'<p class="ends"><span>0</span><span>{bytes_text(peak)}</span></p>')  # fmt: skip
    return (f'<p class="figure">{words} <small>{free}</small>{over}</p>{drawn}{scale_text}{listed}'
            f"{_compiled_peak(plan)}{_host_memory(plan)}")  # fmt: skip


def _compiled_peak(plan: ShardingPlan) -> str:
    audit = compiled_audit(plan)
    if audit is None or audit.peak_bytes is None:
        return ""
    here = bytes_text(plan.estimate.peak_memory_bytes)
    return (f'<p class="remark">Compiled, the peak is {bytes_text(audit.peak_bytes)} instead of {here}; see '
            f'<a href="#compiled">the compiled program</a>.</p>')  # fmt: skip


def _host_memory(plan: ShardingPlan) -> str:
    """Memory of the host by kind of input; empty if the plan uses none."""
    total, sizes = plan.estimate.host_memory_bytes, mesh_sizes(plan)
    if not total:
        return ""
    kinds: dict[str, float] = defaultdict(float)
    for leaf in plan.inputs:
        if leaf.memory_kind != "device":
            kinds[leaf.role if leaf.role in MEMORY_KINDS else "other"] += local_bytes(leaf, sizes)
    rest = total - sum(kinds.values())
    rows = [*kinds.items(), *([("temporary", rest)] if rest >= 1 else [])]
    parts = [(_memory_class(kind), f"{kind} {bytes_text(size)}", size) for kind, size in rows]
    label = "host memory per device: " + ", ".join(title for _, title, _ in parts)
    there = bytes_text(plan.alone.host_memory_bytes) if plan.alone else "-"
    cells = [[key(cls) + escape(kind), bytes_text(size), percent_text(size, total), "-"]
             for (kind, size), (cls, *_) in zip(rows, parts, strict=True)]  # fmt: skip
    cells.append(["<b>host peak</b>", f"<b>{bytes_text(total)}</b>", percent_text(total, total), there])
    listed = table(["kind", "this plan", "share", "on one device"], cells, (1, 2, 3), wide=(3,))
    words = ("In the memory of the host, not of the device, and not part of the limit. Each device's shards are copied "
             "to the device for use.")  # fmt: skip
    ends = f'<p class="ends"><span>0</span><span>{bytes_text(total)}</span></p>'
    return (f'<h3>Host memory per device</h3><p class="remark">{words}</p><p class="figure">{bytes_text(total)}</p>'
            f"{stack(parts, total, label)}{ends}{listed}")  # fmt: skip


def _memory_class(kind: str) -> str:
    return f"k-{kind}" if kind in MEMORY_KINDS else "k-other"


def by_kind(plan: ShardingPlan) -> dict[str, Traffic]:
    """The traffic of each kind of collective, the most exposed kind first."""
    kinds: dict[str, Traffic] = defaultdict(Traffic)
    for (kind, _, size, _), (us, exposed) in zip(plan.traffic, _times(plan), strict=True):
        kinds[kind].add(size, us, exposed)
    return dict(sorted(kinds.items(), key=lambda item: (-item[1].exposed_us, -item[1].time_us, item[0])))


def _times(plan: ShardingPlan) -> tuple[tuple[float, float], ...]:
    return plan.traffic_us if len(plan.traffic_us) == len(plan.traffic) else ((0.0, 0.0),) * len(plan.traffic)


def time_section(plan: ShardingPlan) -> str:
    """Time by kind: compute in one lane, traffic in a second; hidden traffic overlaps with compute."""
    estimate, alone, exposed, moved = plan.estimate, plan.alone, exposed_us(plan), by_kind(plan)
    step = estimate.step_time_us
    hidden = max(estimate.comm_us - exposed, 0.0)
    words = f"{time_text(estimate.compute_us)} compute and {time_text(exposed)} exposed communication"
    if waits := estimate.host_exposed_us:
        words += f", {time_text(waits)} exposed transfers of host memory"
    above = stack([("k-compute", f"compute {time_text(estimate.compute_us)}", estimate.compute_us)], step,
                  f"compute: {time_text(estimate.compute_us)} of {time_text(step)}")  # fmt: skip
    parts = [
        (
            f"{kind_class(k)} hid",
            f"{k}, hidden by compute: {time_text(m.time_us - m.exposed_us)}",
            m.time_us - m.exposed_us,
        )
        for k, m in moved.items()
    ]
    parts += [(kind_class(k), f"{k}, exposed: {time_text(m.exposed_us)}", m.exposed_us) for k, m in moved.items()]
    if not any(m.time_us for m in moved.values()):  # times by kind are unknown
        parts = [("k-other hid", "hidden", hidden), ("k-other", "exposed", exposed)]
    if waits:
        parts.append(("k-other", f"{HOST_TRANSFERS}, exposed: {time_text(waits)}", waits))
    below = stack(parts, step, f"traffic: {time_text(hidden)} hidden by compute, {time_text(exposed)} exposed",
                  start=max(estimate.compute_us - hidden, 0.0))  # fmt: skip
    lanes = (
        f'<div class="lanes"><span>compute</span>{above}<span>traffic</span>{below}</div>'
        f'<p class="ends"><span>0</span><span>{time_text(step)}</span></p>{_lane_legend(moved, hidden)}'
    )
    rows = [[key("k-compute") + "compute", time_text(estimate.compute_us), "-", time_text(estimate.compute_us),
             percent_text(estimate.compute_us, step), time_text(alone.compute_us) if alone else "-"]]  # fmt: skip
    rows += [
        [
            key(kind_class(k)) + escape(k), time_text(m.time_us), time_text(m.time_us - m.exposed_us),
            time_text(m.exposed_us), percent_text(m.exposed_us, step), "0" if alone else "-",
        ]
        for k, m in moved.items()
    ]  # fmt: skip
    if estimate.host_us:
        rows.append([
            key("k-other") + HOST_TRANSFERS, time_text(estimate.host_us), time_text(estimate.host_us - waits),
            time_text(waits), percent_text(waits, step), time_text(alone.host_us) if alone else "-",
        ])  # fmt: skip
    hidden += estimate.host_us - waits
    total = time_text(alone.step_time_us) if alone else "-"
    spent = time_text(estimate.compute_us + estimate.comm_us + estimate.host_us)
    rows.append(["<b>sum</b>", spent, time_text(hidden), f"<b>{time_text(step)}</b>", percent_text(step, step), total])
    head = ["kind", "time", "hidden", "in step time", "share", "on one device"]
    listed = table(head, rows, (1, 2, 3, 4, 5), wide=(4, 5))
    why, beside = "", "communication and transfers of host memory" if estimate.host_us else "communication"
    if hidden:
        why = (f'<p class="remark">All work takes {spent}. {time_text(hidden)} of it is {beside} during compute, '
               f"so the step takes {time_text(step)}.</p>")  # fmt: skip
    return (f'<p class="figure">{time_text(step)} <small>estimated: {words}</small></p>{lanes}{listed}{why}'
            f"{_known_step(plan)}")  # fmt: skip


def _known_step(plan: ShardingPlan) -> str:
    """The measured or compiled step time, if there is one."""
    step, audit, measured = time_text(plan.estimate.step_time_us), compiled_audit(plan), measured_us(plan)
    if measured is not None:
        return f'<p class="remark">Measured, the step takes {time_text(measured)} instead of {step}.</p>'
    if audit is None or audit.step_time_us is None:
        return ""
    return (f'<p class="remark">Compiled, the step takes {time_text(audit.step_time_us)} {source_of(audit)} instead '
            f'of {step}; see <a href="#compiled">the compiled program</a>.</p>')  # fmt: skip


def _lane_legend(moved: dict[str, Traffic], hidden: float) -> str:
    """What pale and full colours of traffic mean; the table has the colours of the kinds."""
    first = next(map(kind_class, moved), "k-other")
    pale = [(f"{first} hid", "pale: hidden by compute"), (first, "full: exposed")]
    return bar_legend(pale, "Traffic of any kind:") if hidden else ""


def collectives_section(plan: ShardingPlan, paint: AxisLabels) -> str:
    """Every collective with the source line that causes it."""
    traffic: dict[tuple[str, str, str], Traffic] = defaultdict(Traffic)
    full: dict[tuple[str, str, str], str] = {}
    for (kind, axes, size, line), (us, exposed) in zip(plan.traffic, _times(plan), strict=True):
        traffic[kind, axes, line_text(line)].add(size, us, exposed)
        full.setdefault((kind, axes, line_text(line)), line)
    if not traffic:
        return "<p>None.</p>"
    ranked = sorted(traffic.items(), key=lambda item: -item[1].nbytes)
    total, most = sum(m.nbytes for _, m in ranked) or 1.0, ranked[0][1].nbytes or 1.0
    timed = bool(plan.traffic_us)
    rows = [
        [key(kind_class(kind)) + escape(kind), paint.tags(axes.split()), bytes_text(m.nbytes),
         bar(kind_class(kind), m.nbytes, most), percent_text(m.nbytes, total),
         time_text(m.time_us) if timed else "-", time_text(m.exposed_us) if timed else "-",
         f'<code title="{escape(full[kind, axes, line])}">{escape(line)}</code>']
        for (kind, axes, line), m in ranked
    ]  # fmt: skip
    head = ["collective", "over", "bytes", "", "share", "time", "exposed", "source line"]
    right = (2, 4, 5, 6)
    rest = rows[COLLECTIVES_SHOWN:]
    smaller = f"{len(rest)} smaller, {bytes_text(sum(m.nbytes for _, m in ranked[COLLECTIVES_SHOWN:]))}"
    more = folded(smaller, table(head, rest, right)) if rest else ""
    inner = table(head, rows[:COLLECTIVES_SHOWN], right) + more
    key_line = bar_legend([], "Bars compare bytes; their colours are those of the kinds.")
    return f'{search_box("collectives", "moves-list")}{key_line}<div id="moves-list">{inner}</div>'

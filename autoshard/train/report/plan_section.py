"""The plan on a run's page: a summary, the figures beside what was measured, and the plan's own page, folded."""

from __future__ import annotations

from html import escape

import numpy as np

from autoshard._html.parts import folded, section, table
from autoshard._units import bytes_text, ratio_text, time_text
from autoshard.sharding.report.page import plan_parts
from autoshard.sharding.report.search_outcome import verdict
from autoshard.sharding.report.summary import mesh_text, title
from autoshard.train.report.run_files import Run, RunPlan


def plan_section(run: Run) -> tuple[str, str]:
    """Return the section of the plans, and the style sheet that it needs. The newest plan is shown in full."""
    if not run.plans:
        return "", ""
    last = run.plans[-1]
    if last.plan is None:
        return f"{_changes(run)}<pre>{escape(last.text)}</pre>", ""
    plan = last.plan
    style, parts = plan_parts(plan)
    inner = "".join(section(name, heading, html, remark) for name, heading, html, remark in parts if html)
    text = folded("The plan as text", f"<pre>{escape(last.text)}</pre>") if last.text else ""
    summary = f"<p>{escape(title(plan))}: {escape(mesh_text(plan))}. Plan: {escape(verdict(plan).sentence)}.</p>"
    return f"{summary}{_beside(run, last)}{_changes(run)}{text}{folded('The page of the plan', inner)}", style


def _beside(run: Run, last: RunPlan) -> str:
    """What the plan says beside what the run measured."""
    assert last.plan is not None
    estimate, rows = last.plan.estimate, []
    _, rates = run.metrics.get("tokens_per_second").finite
    measured = 1e6 * run.tokens_per_step / float(np.median(rates)) if len(rates) and run.tokens_per_step else None
    rows.append(["step time", time_text(estimate.step_time_us), "-" if measured is None else time_text(measured),
                 "-" if measured is None else ratio_text(measured, estimate.step_time_us)])  # fmt: skip
    _, peaks = run.metrics.get("memory_bytes").finite
    peak = float(peaks.max()) if len(peaks) else None
    rows.append(["peak memory", bytes_text(estimate.peak_memory_bytes),
                 "-" if peak is None else bytes_text(peak),
                 "-" if peak is None else ratio_text(peak, estimate.peak_memory_bytes)])  # fmt: skip
    return table(["", "planned", "measured", "ratio"], rows, (1, 2, 3), wide=())


def _changes(run: Run) -> str:
    """The plans of the run, if it has several; the newest first."""
    if len(run.plans) < 2:
        return ""
    rows = []
    for each in run.plans[::-1]:
        if each.plan is None:
            rows.append([f"{each.step:,}", "-", "-", "-", "-"])
            continue
        plan = each.plan
        rows.append([f"{each.step:,}", f"<code>{escape(plan.chosen)}</code>", escape(mesh_text(plan)),
                     time_text(plan.estimate.step_time_us), bytes_text(plan.estimate.peak_memory_bytes)])  # fmt: skip
    head = ["from step", "strategy", "mesh", "step time", "memory"]
    return f"<h3>{len(rows)} plans</h3>{table(head, rows, (0, 3, 4))}"

"""The compiled program on a plan's page: what the target's compiler made of the plan, beside the estimate."""

from __future__ import annotations

from collections.abc import Callable
from html import escape

from autoshard._html.parts import folded, table
from autoshard._units import bytes_text, ratio_text, time_text, variant_text
from autoshard.sharding.audit.audit import FAILURES, Audit
from autoshard.sharding.plan.sharding_plan import ShardingPlan
from autoshard.sharding.report.summary import exposed_us, mesh_sizes

PARTS = {
    "argument": "arguments",
    "temp": "temporaries, an upper bound",
    "output": "results",
    "alias": "results in the memory of donated arguments",
}


def audit_of(plan: ShardingPlan) -> Audit | None:
    """The audit of the plan itself, among those of all plans that were compiled; None if it was not compiled."""
    here = plan.estimate
    found = [
        audit
        for audit in plan.audits
        if dict(audit.mesh) == mesh_sizes(plan)
        and (audit.predicted_step_time_us, audit.predicted_peak_bytes) == (here.step_time_us, here.peak_memory_bytes)
    ]
    named = [audit for audit in found if audit.strategy.partition(" (")[0] == plan.chosen]
    return next(iter(named or found), None)


def measured_us(plan: ShardingPlan) -> float | None:
    """The measured time of a step of the plan; None if it was not run."""
    name = f"{plan.chosen} ({variant_text(plan.variant)})" if plan.variant else plan.chosen
    return dict(plan.measured).get(name)


def compiled_audit(plan: ShardingPlan) -> Audit | None:
    """The audit of the plan if its program compiles and its figures are known."""
    audit = audit_of(plan)
    return audit if audit is not None and audit.ok and audit.step_time_us is not None else None


def source_of(audit: Audit) -> str:
    """Where the compute time of a compiled program comes from."""
    return "by the compiler's cycles" if audit.compute_us_cycles is not None else "by a roofline"


def failure_text(audit: Audit) -> str:
    """What went wrong with a program that does not compile."""
    text = FAILURES.get(audit.kind, audit.kind)
    return f"{text}: it needs {bytes_text(audit.peak_bytes)}" if audit.kind == "oom" and audit.peak_bytes else text


def compiled_section(plan: ShardingPlan) -> str:
    """The figures of the compiled program beside the estimate, then the audits in full; empty without audits."""
    audit = audit_of(plan)
    audits = "".join(
        folded(f"Audit of {escape(each.strategy or ' x '.join(f'{a} {n}' for a, n in each.mesh.items()))} in full",
               f"<pre>{escape(str(each))}</pre>")
        for each in plan.audits
    )  # fmt: skip
    if audit is None:
        return audits
    if not audit.ok:
        return f'<p class="bad">{escape(failure_text(audit))}. The figures of this page are estimates.</p>{audits}'
    return f"{_figures(plan, audit)}{_memory(audit)}{audits}"


def _figures(plan: ShardingPlan, audit: Audit) -> str:
    here = plan.estimate
    runs = sum(c.trips for c in audit.collectives)
    is_cycles = audit.compute_us_cycles is not None
    roofline = audit.compute_us_roofline if is_cycles else None
    rows = [
        _row("<b>step time</b>", here.step_time_us, audit.step_time_us, time_text, "compute and exposed communication"),
        _row("compute", here.compute_us, audit.compute_us, time_text, source_of(audit)),
        _row("compute", None, roofline, time_text, "by a roofline of its FLOPs and memory traffic, for comparison"),
        _row("exposed communication", exposed_us(plan), audit.exposed_us, time_text, "not hidden by compute"),
        _row("all communication", here.comm_us, audit.comm_us, time_text, "on the machine's links"),
        _row("traffic", here.comm_bytes, audit.wire_bytes, bytes_text, "sent by each device"),
        ["collectives", "-", f"{runs:.0f}", "-", "runs in a step; in a loop, each iteration counts"],
        _row("<b>peak memory</b>", here.peak_memory_bytes, audit.peak_bytes, bytes_text, "of each device"),
    ]
    if here.host_memory_bytes or audit.host_bytes:
        words = "in the host's memory, of each device"
        rows.append(_row("host memory", here.host_memory_bytes, audit.host_bytes, bytes_text, words))
    head = ["figure", "estimated", "compiled", "ratio", "what it is"]
    return table(head, [row for row in rows if row[2] != "-" or row[1] != "-"], (1, 2, 3))


def _row(
    name: str, estimated: float | None, compiled: float | None, text: Callable[[float], str], words: str
) -> list[str]:
    cells = ["-" if x is None else text(x) for x in (estimated, compiled)]
    ratio = ratio_text(compiled, estimated) if compiled is not None and estimated else "-"
    return [name, *cells, ratio, escape(words)]


def _memory(audit: Audit) -> str:
    """The parts of the compiled program's memory, and why the peak can be less."""
    parts = [f"{bytes_text(audit.memory[kind])} {words}" for kind, words in PARTS.items() if audit.memory.get(kind)]
    if not parts or audit.peak_bytes is None:
        return ""
    why = ""
    if audit.temporaries_overlap:
        why = (" The peak is below arguments and temporaries together, because not all temporaries are alive at once: "
               "the compiler reuses their memory.")  # fmt: skip
    elif not audit.memory.get("peak"):
        why = (" The compiler reports no peak, so the peak is arguments, temporaries and results together, an upper "
               "bound.")  # fmt: skip
    return f'<p class="remark">Memory of the compiled program: {escape("; ".join(parts))}.{escape(why)}</p>'

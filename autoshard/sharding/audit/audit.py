"""An audit as plain text: `print(plan.verify())`."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from autoshard._columns import INDENT, WIDTH, columns, cut
from autoshard._units import bytes_text, line_text, percent_text, ratio_text, time_text

if TYPE_CHECKING:
    from autoshard.sharding.audit.traffic_diff import Found
    from autoshard.sharding.audit.verification import Audit

SHOWN = 8
HAPPENED = {
    "oom": "the program does not fit the device",
    "error": "the compiler refused the program",
    "crash": "the compiler crashed",
    "timeout": "the compiler took too long",
}


def report(audit: Audit) -> str:
    """The audit for people: what the compiler made of the plan beside what the plan says."""
    parts = [_head(audit), _failure(audit), _figures(audit), _traffic(audit), _unplanned(audit), _missing(audit)]
    parts += [_replicated(audit), _remarks(audit), _notes(audit)]
    return "\n\n".join("\n".join(part) for part in parts if part)


def _head(audit: Audit) -> list[str]:
    count = math.prod(audit.mesh.values())
    mesh = " x ".join(f"{axis} {size}" for axis, size in audit.mesh.items())
    lines = [f"audit of {audit.function or 'a function'} on {audit.target or '?'}: "
             + (f"{mesh} = {count} devices" if count > 1 else "one device")]  # fmt: skip
    packages = ", ".join(f"{name} {version}" for name, version in audit.versions.items())
    if packages:
        when = "compiled before, in" if audit.cached else "compiled in"
        lines.append(f"{when} {audit.seconds:.1f} s by {packages}")
    return lines


def _failure(audit: Audit) -> list[str]:
    if audit.ok:
        return []
    words = audit.message.strip().splitlines()
    lines = [HAPPENED.get(audit.kind, audit.kind) + ":", *(INDENT + cut(line, WIDTH) for line in words[:SHOWN])]
    return [*lines, "the plan stays as it is; its figures are its own estimates"]


def _figures(audit: Audit) -> list[str]:
    """What the plan says and what was compiled, side by side."""
    rows = [("", "by the plan", "compiled", "")]
    times = [
        ("step", audit.predicted_step_time_us, audit.step_time_us),
        (f"{INDENT}compute", audit.predicted_compute_us, audit.compute_us),
        (f"{INDENT}on the wire", audit.predicted_comm_us, audit.comm_us),
        (f"{INDENT}waited for", None, audit.exposed_us),
    ]
    rows += [_row(name, said, made, time_text) for name, said, made in times]
    rows.append(_row("traffic", audit.predicted_wire_bytes, audit.wire_bytes, bytes_text))
    rows.append(_row("peak memory", audit.predicted_peak_bytes, audit.peak_bytes, bytes_text))
    lines = columns([r for r in rows if r[1] or r[2]], right=(1, 2))
    if audit.compute_us_cycles is not None and audit.compute_us_roofline is not None:
        lines.append(
            f"compute by the compiler's cycles {time_text(audit.compute_us_cycles)}, by operations and bytes "
            f"{time_text(audit.compute_us_roofline)}"
        )
    if memory := {k: v for k, v in audit.memory.items() if v and k != "code"}:
        lines.append("memory: " + ", ".join(f"{k} {bytes_text(v)}" for k, v in memory.items()))
    return lines


def _row(name: str, said: float | None, made: float | None, text: Callable[[float], str]) -> tuple[str, str, str, str]:
    def shown(x: float | None) -> str:
        return "" if x is None else text(x)

    ratio = ratio_text(made, said) if made is not None and said else ""
    return name, shown(said), shown(made), "" if ratio == "-" else ratio


def _traffic(audit: Audit) -> list[str]:
    """The collectives, those of one kind, axes and line together."""
    if not audit.ok:
        return []
    if not audit.collectives:
        return ["collectives: none"]
    alike: dict[tuple[str, str, str], list[Found]] = defaultdict(list)
    for f in audit.collectives:
        alike[f.kind, " ".join(f.axes) or f.devices, line_text(f.line)].append(f)
    ranked = sorted(alike.items(), key=lambda item: -sum(f.step_bytes for f in item[1]))
    rows = [(f"{INDENT}collective", "over", "runs", "bytes", "on the wire", "waited for", "")]
    rows += [
        (
            INDENT + kind,
            cut(over, 24),
            f"{sum(f.trips for f in some):.0f}",
            bytes_text(sum(f.step_bytes for f in some)),
            time_text(sum(f.wire_us for f in some)),
            time_text(sum(f.exposed_us for f in some)),
            line,
        )
        for (kind, over, line), some in ranked[:SHOWN]
    ]
    count = sum(f.trips for f in audit.collectives)
    lines = [f"collectives: {count:.0f} a step, {bytes_text(audit.wire_bytes or 0.0)} leave each device"]
    lines += [cut(line, WIDTH) for line in columns(rows, right=(2, 3, 4, 5))]
    if rest := ranked[SHOWN:]:
        size = sum(f.step_bytes for _, some in rest for f in some)
        lines.append(f"{INDENT}and {len(rest)} smaller ones, {bytes_text(size)}")
    return lines


def _unplanned(audit: Audit) -> list[str]:
    if not audit.ok:
        return []
    if not audit.unplanned:
        return ["unplanned traffic: none"]
    share = percent_text(audit.unplanned_bytes, audit.wire_bytes or 0.0)
    lines = [f"unplanned traffic: {bytes_text(audit.unplanned_bytes)}, {share} of all"]
    for u in audit.unplanned[:SHOWN]:
        over = " ".join(u.axes) or "other groups"
        lines.append(f"{INDENT}{u.kind} over {over}, {bytes_text(u.bytes)}, {time_text(u.us)}, {line_text(u.line)}")
        lines.append(f"{INDENT * 2}{u.cause}")
    return [*lines, *_more(audit.unplanned)]


def _missing(audit: Audit) -> list[str]:
    if not audit.missing:
        return []
    lines = [f"planned, and not there: {bytes_text(sum(m.bytes for m in audit.missing))}"]
    rows = [(INDENT + m.kind, " ".join(m.axes), bytes_text(m.bytes), line_text(m.line)) for m in audit.missing[:SHOWN]]
    return [*lines, *columns(rows, right=(2,)), *_more(audit.missing)]


def _replicated(audit: Audit) -> list[str]:
    if not audit.replicated:
        return []
    lines = ["whole on every device, although the plan cuts it:"]
    rows = [
        (f"{INDENT}{w.what} {w.name}", w.shape, bytes_text(w.bytes), f"planned {bytes_text(w.planned_bytes)}",
         line_text(w.line) if w.line else "")
        for w in audit.replicated[:SHOWN]
    ]  # fmt: skip
    return [*lines, *(cut(line, WIDTH) for line in columns(rows, right=(2,))), *_more(audit.replicated)]


def _remarks(audit: Audit) -> list[str]:
    if not audit.remarks:
        return []
    lines = [f"involuntary full rematerializations: {len(audit.remarks)}"]
    for r in audit.remarks[:SHOWN]:
        cost = f"whole {bytes_text(r.bytes)}, {bytes_text(r.wire_bytes)} on the wire, {time_text(r.us)} each time"
        where = line_text(r.line) if r.line else r.op_name.rpartition("/")[2]
        lines += [f"{INDENT}{r.array or 'a tensor'}, {cost}, {where}", f"{INDENT * 2}{r.cause}"]
    return [*lines, *_more(audit.remarks)]


def _notes(audit: Audit) -> list[str]:
    lines = [f"note: {note}" for note in audit.notes]
    if audit.dropped:
        lines.append(f"options that this compiler does not know: {', '.join(audit.dropped)}")
    return lines


def _more(entries: Sequence[object]) -> list[str]:
    return [f"{INDENT}and {len(entries) - SHOWN} more"] if len(entries) > SHOWN else []

"""What a compiler made of a plan, beside what the plan says; and that as plain text: `print(plan.verify())`."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from autoshard._columns import INDENT, WIDTH, columns, cut
from autoshard._shown import shown
from autoshard._units import bytes_text, line_text, percent_text, ratio_text, time_text
from autoshard.errors import AutoshardError
from autoshard.sharding.audit.replicated_arrays import ReplicatedArray
from autoshard.sharding.audit.traffic_diff import Found, Missing, Unplanned
from autoshard.sharding.hlo.rematerializations import Rematerialization

SHOWN = 8
HAPPENED = {
    "oom": "the program does not fit the device",
    "error": "the compiler refused the program",
    "crash": "the compiler crashed",
    "timeout": "the compiler took too long",
}


class AuditError(AutoshardError):
    """A plan that cannot be verified: its target has no compiler, or that is not installed."""


@shown
@dataclass(frozen=True)
class Audit:
    """What a compiler made of a plan, beside what the plan says. Of one step on one device; times in microseconds.

    Attributes:
        kind: `ok`; `oom`: the program does not fit the device; `error`: the compiler refused it; `crash`, `timeout`: of
            the compiler. Where it is not `ok`, only `message`, `peak_bytes` and what the plan says is there.
        message: what happened, in the compiler's words.
        function: the planned function's name.
        target: the machine.
        mesh: mesh axis -> size.
        collectives: of the compiled program, in the order in which they run.
        unplanned: traffic beyond what the plan says, the largest first.
        missing: traffic that the plan says and the program does not have.
        replicated: arrays that the plan cuts and the program keeps whole.
        remarks: involuntary full rematerializations, with what they cost and why, the largest first.
        notes: what the figures leave out.
        memory: bytes of a device by kind: argument, output, temp, alias, code; the host's with `host_`.
        peak_bytes: what a device holds at most, by the compiler; of an `oom` what it would take.
        predicted_peak_bytes: the same by the plan.
        cycles: by the compiler; None where it gives none.
        compute_us: by cycles where there are any, else by a roofline.
        compute_us_cycles: cycles over the chip's clock; None where there are none.
        compute_us_roofline: by operations and bytes of memory alone.
        comm_us: time on the wire.
        exposed_us: the part of it that is waited for.
        step_time_us: compute_us + exposed_us.
        predicted_step_time_us: by the plan; compute and communication likewise.
        wire_bytes: bytes that leave each device.
        predicted_wire_bytes: the same by the plan.
        versions: of the compiler's packages.
        seconds: to compile.
        cached: whether it was compiled before.
        dropped: options that this compiler does not know.
    """

    kind: str
    message: str = ""
    function: str = ""
    target: str = ""
    mesh: Mapping[str, int] = field(default_factory=dict)
    collectives: tuple[Found, ...] = ()
    unplanned: tuple[Unplanned, ...] = ()
    missing: tuple[Missing, ...] = ()
    replicated: tuple[ReplicatedArray, ...] = ()
    remarks: tuple[Rematerialization, ...] = ()
    notes: tuple[str, ...] = ()
    memory: Mapping[str, int] = field(default_factory=dict)
    peak_bytes: float | None = None
    predicted_peak_bytes: float | None = None
    cycles: float | None = None
    compute_us: float | None = None
    compute_us_cycles: float | None = None
    compute_us_roofline: float | None = None
    comm_us: float | None = None
    exposed_us: float | None = None
    step_time_us: float | None = None
    predicted_compute_us: float | None = None
    predicted_comm_us: float | None = None
    predicted_step_time_us: float | None = None
    wire_bytes: float | None = None
    predicted_wire_bytes: float | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    cached: bool = False
    dropped: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether the program compiled and fits."""
        return self.kind == "ok"

    @property
    def unplanned_bytes(self) -> float:
        """Bytes that leave each device beyond what the plan says."""
        return sum(u.bytes for u in self.unplanned)

    def to_json(self) -> str:
        """The audit as text."""
        figures = {f.name: getattr(self, f.name) for f in fields(self)}
        return json.dumps(figures | {"unplanned_bytes": self.unplanned_bytes}, indent=1, default=_plain)

    def __repr__(self) -> str:
        return f"Audit({self.kind!r} for {self.function or '?'} on {self.target!r}, {len(self.unplanned)} unplanned)"

    def __str__(self) -> str:
        return report(self)


def _plain(thing: Any) -> Any:
    return dict(thing) if isinstance(thing, Mapping) else asdict(thing)


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

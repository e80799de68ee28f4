"""The comparison of a plan with its compiled program, and its plain text: `print(plan.verify())`."""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from autoshard._columns import INDENT, WIDTH, columns, shorten
from autoshard._shown import shown
from autoshard._units import bytes_text, line_text, percent_text, ratio_text, time_text
from autoshard.errors import AutoshardError
from autoshard.sharding.audit.aot_compile import Until
from autoshard.sharding.audit.constants import SHOWN_ENTRIES
from autoshard.sharding.audit.host_traffic import CompiledTransfer, transfer_lines
from autoshard.sharding.audit.replicated_arrays import ReplicatedArray
from autoshard.sharding.audit.traffic_diff import CompiledCollective, Missing, Unplanned
from autoshard.sharding.hlo.rematerializations import Rematerialization
from autoshard.sharding.machines.options import Options
from autoshard.sharding.overlap.module_times import module_lines

FAILURES = {
    "oom": "the program does not fit the device",
    "error": "the compiler rejected the program",
    "crash": "the compiler crashed",
    "timeout": "the compiler took too long",
}


class AuditError(AutoshardError):
    """A plan cannot be verified: no compiler supports its target, or the compiler is not installed."""


@shown
@dataclass(frozen=True)
class Audit:
    """A plan and its compiled program compared. All figures are of one step on one device, times in microseconds.

    Attributes:
        kind: `ok`, `oom` (the program does not fit the device), `error` (the compiler rejected it), `crash` or
            `timeout` (of the compiler). If not `ok`, only `message`, `peak_bytes` and the plan's figures are set.
        message: the compiler's error message.
        function: the planned function's name.
        target: the machine.
        mesh: mesh axis -> size.
        collectives: the collectives of the compiled program, in the order in which they run.
        unplanned: traffic that exceeds the plan's, in descending order of bytes.
        missing: planned traffic that the compiled program does not have.
        replicated: arrays that the plan shards and the compiled program replicates.
        remarks: involuntary full rematerializations with cost and cause, in descending order of bytes.
        modules: for a plan with `overlap=`: module -> kind of its collectives -> their microseconds, and the exposed
            part.
        kernels: kernel, such as an attention kernel -> its runs in a step, and their microseconds by the cost that it
            states.
        notes: what the figures do not include.
        memory: bytes by kind: argument, output, temp, alias, code; on the host with `host_`.
        peak_bytes: peak memory, as the compiler reports it; for an `oom`, the memory that the program needs.
        predicted_peak_bytes: the plan's estimate of peak memory.
        host_bytes: bytes in host memory per device, as the compiler reports them; None if it did not compile it.
        predicted_host_bytes: the plan's estimate of `host_bytes`.
        cycles: the compiler's estimate of cycles; None if it gives none.
        compute_us: compute time, from cycles if there are any, else from a roofline.
        compute_us_cycles: cycles divided by the chip's clock; None if there are none.
        compute_us_roofline: compute time from FLOPs and memory traffic alone.
        comm_us: time of all collectives.
        exposed_us: the part of `comm_us` that compute does not hide.
        transfers: the transfers of host memory, those for which the device waits longest first.
        host_us: time of all transfers of host memory on the link to the host.
        host_exposed_us: the part of `host_us` in which the device waits.
        host_traffic_bytes: bytes that each device exchanges with host memory, in both directions.
        step_time_us: compute_us + exposed_us + host_exposed_us.
        predicted_compute_us, predicted_comm_us, predicted_step_time_us: the plan's estimates.
        predicted_host_us, predicted_host_exposed_us, predicted_host_traffic_bytes: the plan's estimates.
        wire_bytes: bytes that each device sends.
        predicted_wire_bytes: the plan's estimate of `wire_bytes`.
        versions: versions of the compiler's packages.
        seconds: compile time.
        until: `code`, or `schedule` if the program was scheduled, but not compiled to machine code. Its times are then
            those of a roofline.
        cached: whether the compiled program comes from the cache.
        dropped: options that were left out because this compiler does not know them.
        options: the compiler options, `dropped` included.
        program: a digest of the compiled program without source lines; empty if it was not compiled. Two programs with
            the same digest run the same instructions in the same order.
        strategy: the plan's strategy, with its variant in parentheses.
    """

    kind: str
    message: str = ""
    function: str = ""
    target: str = ""
    mesh: Mapping[str, int] = field(default_factory=dict)
    collectives: tuple[CompiledCollective, ...] = ()
    unplanned: tuple[Unplanned, ...] = ()
    missing: tuple[Missing, ...] = ()
    replicated: tuple[ReplicatedArray, ...] = ()
    remarks: tuple[Rematerialization, ...] = ()
    modules: Mapping[str, Mapping[str, tuple[float, float]]] = field(default_factory=dict)
    kernels: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    memory: Mapping[str, int] = field(default_factory=dict)
    peak_bytes: float | None = None
    predicted_peak_bytes: float | None = None
    host_bytes: float | None = None
    predicted_host_bytes: float | None = None
    cycles: float | None = None
    compute_us: float | None = None
    compute_us_cycles: float | None = None
    compute_us_roofline: float | None = None
    comm_us: float | None = None
    exposed_us: float | None = None
    transfers: tuple[CompiledTransfer, ...] = ()
    host_us: float | None = None
    host_exposed_us: float | None = None
    host_traffic_bytes: float | None = None
    step_time_us: float | None = None
    predicted_compute_us: float | None = None
    predicted_comm_us: float | None = None
    predicted_step_time_us: float | None = None
    predicted_host_us: float | None = None
    predicted_host_exposed_us: float | None = None
    predicted_host_traffic_bytes: float | None = None
    wire_bytes: float | None = None
    predicted_wire_bytes: float | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    until: Until = "code"
    cached: bool = False
    dropped: tuple[str, ...] = ()
    options: Options = field(default_factory=dict)
    program: str = ""
    strategy: str = ""

    @property
    def ok(self) -> bool:
        """Whether the program compiles and fits the device."""
        return self.kind == "ok"

    @property
    def temporaries_overlap(self) -> bool:
        """Whether the peak is less than arguments, temporaries and results together: their memory is partly reused."""
        kinds = [self.memory.get(kind, 0) for kind in ("argument", "output", "temp")]
        return bool(self.memory.get("peak")) and self.memory["peak"] < sum(kinds) - self.memory.get("alias", 0)

    @property
    def unplanned_bytes(self) -> float:
        """Bytes that each device sends beyond the plan."""
        return sum(u.bytes for u in self.unplanned)

    def to_json(self) -> str:
        """The audit as JSON."""
        figures = {f.name: getattr(self, f.name) for f in fields(self)}
        return json.dumps(figures | {"unplanned_bytes": self.unplanned_bytes}, indent=1, default=_plain)

    def __repr__(self) -> str:
        return f"Audit({self.kind!r} for {self.function or '?'} on {self.target!r}, {len(self.unplanned)} unplanned)"

    def __str__(self) -> str:
        return report(self)


def _plain(value: Any) -> Any:
    return dict(value) if isinstance(value, Mapping) else asdict(value)


def report(audit: Audit) -> str:
    """The text of an audit: the plan's figures beside those of the compiled program, and the differences."""
    parts = [_head(audit), _failure(audit), _figures(audit), _kernels(audit), _traffic(audit)]
    parts.append(module_lines(audit.modules, "compiled"))
    parts += [transfer_lines(audit.transfers), _unplanned(audit), _missing(audit), _replicated(audit)]
    parts += [_remarks(audit), _notes(audit)]
    return "\n\n".join("\n".join(part) for part in parts if part)


def _head(audit: Audit) -> list[str]:
    count = math.prod(audit.mesh.values())
    mesh = " x ".join(f"{axis} {size}" for axis, size in audit.mesh.items())
    lines = [f"audit of {audit.function or 'a function'} on {audit.target or '?'}: "
             + (f"{mesh} = {count} devices" if count > 1 else "one device")]  # fmt: skip
    packages = ", ".join(f"{name} {version}" for name, version in audit.versions.items())
    if packages:
        cached = " (cached)" if audit.cached else ""
        verb = "compiled" if audit.until == "code" else "scheduled, without machine code,"
        lines.append(f"{verb} in {audit.seconds:.1f} s by {packages}{cached}")
    return lines


def _failure(audit: Audit) -> list[str]:
    if audit.ok:
        return []
    message = audit.message.strip().splitlines()[:SHOWN_ENTRIES]
    lines = [FAILURES.get(audit.kind, audit.kind) + ":", *(INDENT + shorten(line, WIDTH) for line in message)]
    named = [f"{name}={value}" for name, value in audit.options.items() if re.search(rf"\b{name}\b", audit.message)]
    if audit.kind == "error" and named:
        lines.append(f"{', '.join(named)} is one of its options: give it another value, or leave it out")
    return [*lines, "the plan is unchanged; the figures below are its estimates"]


def _figures(audit: Audit) -> list[str]:
    """The figures of the plan and of the compiled program, side by side."""
    rows = [("", "planned", "compiled", "")]
    times = [
        ("step", audit.predicted_step_time_us, audit.step_time_us),
        (f"{INDENT}compute", audit.predicted_compute_us, audit.compute_us),
        (f"{INDENT}collectives", audit.predicted_comm_us, audit.comm_us),
        (f"{INDENT}exposed", None, audit.exposed_us),
    ]
    if audit.predicted_host_traffic_bytes or audit.host_traffic_bytes:
        times += [
            (f"{INDENT}host transfers", audit.predicted_host_us, audit.host_us),
            (f"{INDENT}exposed", audit.predicted_host_exposed_us, audit.host_exposed_us),
        ]
    rows += [_row(name, planned, compiled, time_text) for name, planned, compiled in times]
    rows.append(_row("traffic", audit.predicted_wire_bytes, audit.wire_bytes, bytes_text))
    rows.append(_row("peak memory", audit.predicted_peak_bytes, audit.peak_bytes, bytes_text))
    if audit.predicted_host_traffic_bytes or audit.host_traffic_bytes:
        rows.append(_row("host traffic", audit.predicted_host_traffic_bytes, audit.host_traffic_bytes, bytes_text))
    if audit.predicted_host_bytes or audit.host_bytes:
        rows.append(_row("host memory", audit.predicted_host_bytes, audit.host_bytes, bytes_text))
    lines = columns([r for r in rows if r[1] or r[2]], right=(1, 2))
    if audit.compute_us_cycles is not None and audit.compute_us_roofline is not None:
        lines.append(
            f"compute: {time_text(audit.compute_us_cycles)} by the compiler's cycles, "
            f"{time_text(audit.compute_us_roofline)} by a roofline"
        )
    if memory := {k: v for k, v in audit.memory.items() if v and k != "code"}:
        lines.append("memory: " + ", ".join(f"{k} {bytes_text(v)}" for k, v in memory.items()))
    if audit.temporaries_overlap:
        lines.append("temp is an upper bound: not all temporaries are alive at the peak")
    return lines


def _row(
    name: str, planned: float | None, compiled: float | None, text: Callable[[float], str]
) -> tuple[str, str, str, str]:
    def cell(x: float | None) -> str:
        return "" if x is None else text(x)

    ratio = ratio_text(compiled, planned) if compiled is not None and planned else ""
    return name, cell(planned), cell(compiled), "" if ratio == "-" else ratio


def _kernels(audit: Audit) -> list[str]:
    """The kernels that the compiler does not price, with the time by the cost that each states."""
    if not audit.kernels:
        return []
    runs, us = (sum(each[n] for each in audit.kernels.values()) for n in (0, 1))
    rows = [(f"{INDENT}kernel", "runs", "time")]
    rows += [(INDENT + name, f"{n:.0f}", time_text(t)) for name, (n, t) in audit.kernels.items()]
    return [f"kernels: {runs:.0f} runs per step, {time_text(us)} by the costs that they state",
            *columns(rows, right=(1, 2))]  # fmt: skip


def _traffic(audit: Audit) -> list[str]:
    """The collectives, grouped by kind, axes and line."""
    if not audit.ok:
        return []
    if not audit.collectives:
        return ["collectives: none"]
    groups: dict[tuple[str, str, str], list[CompiledCollective]] = defaultdict(list)
    for c in audit.collectives:
        groups[c.kind, " ".join(c.axes) or c.devices, line_text(c.line)].append(c)
    ranked = sorted(groups.items(), key=lambda item: -sum(c.step_bytes for c in item[1]))
    rows = [(f"{INDENT}collective", "over", "runs", "bytes", "time", "exposed", "")]
    rows += [
        (
            INDENT + kind,
            shorten(over, 24),
            f"{sum(c.trips for c in group):.0f}",
            bytes_text(sum(c.step_bytes for c in group)),
            time_text(sum(c.wire_us for c in group)),
            time_text(sum(c.exposed_us for c in group)),
            line,
        )
        for (kind, over, line), group in ranked[:SHOWN_ENTRIES]
    ]
    count = sum(c.trips for c in audit.collectives)
    lines = [f"collectives: {count:.0f} per step, each device sends {bytes_text(audit.wire_bytes or 0.0)}"]
    lines += [shorten(line, WIDTH) for line in columns(rows, right=(2, 3, 4, 5))]
    if rest := ranked[SHOWN_ENTRIES:]:
        size = sum(c.step_bytes for _, group in rest for c in group)
        lines.append(f"{INDENT}and {len(rest)} smaller ones, {bytes_text(size)}")
    return lines


def _unplanned(audit: Audit) -> list[str]:
    if not audit.ok:
        return []
    if not audit.unplanned:
        return ["unplanned traffic: none"]
    share = percent_text(audit.unplanned_bytes, audit.wire_bytes or 0.0)
    lines = [f"unplanned traffic: {bytes_text(audit.unplanned_bytes)}, {share} of the traffic"]
    for u in audit.unplanned[:SHOWN_ENTRIES]:
        over = " ".join(u.axes) or "other groups"
        lines.append(f"{INDENT}{u.kind} over {over}, {bytes_text(u.bytes)}, {time_text(u.us)}, {line_text(u.line)}")
        lines.append(f"{INDENT * 2}{u.cause}")
    return [*lines, *_more(audit.unplanned)]


def _missing(audit: Audit) -> list[str]:
    if not audit.missing:
        return []
    lines = [f"planned traffic that is missing: {bytes_text(sum(m.bytes for m in audit.missing))}"]
    rows = [
        (INDENT + m.kind, " ".join(m.axes), bytes_text(m.bytes), line_text(m.line))
        for m in audit.missing[:SHOWN_ENTRIES]
    ]
    return [*lines, *columns(rows, right=(2,)), *_more(audit.missing)]


def _replicated(audit: Audit) -> list[str]:
    if not audit.replicated:
        return []
    lines = ["replicated, although the plan shards it:"]
    rows = [
        (f"{INDENT}{w.what} {w.name}", w.shape, bytes_text(w.bytes), f"planned {bytes_text(w.planned_bytes)}",
         line_text(w.line) if w.line else "")
        for w in audit.replicated[:SHOWN_ENTRIES]
    ]  # fmt: skip
    return [*lines, *(shorten(line, WIDTH) for line in columns(rows, right=(2,))), *_more(audit.replicated)]


def _remarks(audit: Audit) -> list[str]:
    if not audit.remarks:
        return []
    lines = [f"involuntary full rematerializations: {len(audit.remarks)}"]
    for r in audit.remarks[:SHOWN_ENTRIES]:
        cost = f"{bytes_text(r.bytes)} on every device, {bytes_text(r.wire_bytes)} sent, {time_text(r.us)} per run"
        where = line_text(r.line) if r.line else r.op_name.rpartition("/")[2]
        lines += [f"{INDENT}{r.array or 'a tensor'}, {cost}, {where}", f"{INDENT * 2}{r.cause}"]
    return [*lines, *_more(audit.remarks)]


def _notes(audit: Audit) -> list[str]:
    lines = [f"note: {note}" for note in audit.notes]
    if audit.dropped:
        lines.append(f"options that this compiler does not know: {', '.join(audit.dropped)}")
    return lines


def _more(entries: Sequence[object]) -> list[str]:
    return [f"{INDENT}and {len(entries) - SHOWN_ENTRIES} more"] if len(entries) > SHOWN_ENTRIES else []

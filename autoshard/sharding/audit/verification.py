"""Compiles a plan for its target and compares what the compiler made of it with what the plan says.

    step_time_us = compute_us + exposed_us
    compute_us   = cycles x trips / the chip's clock, and a roofline for what the compiler gives no cycles for
    exposed_us   = the time that collectives are waited for on the target's links (`schedule`)

`Plan.verify()` gives an `Audit`. A program that does not fit, one that the compiler refuses, a compiler that crashes or
takes too long are results: the audit says what happened.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

from autoshard._shown import shown
from autoshard._typed import finite, fit
from autoshard.errors import AutoshardError
from autoshard.sharding.audit.aot_compile import TIMEOUT_S, Compiled, build, missing_compiler, remarks
from autoshard.sharding.audit.export import export_plan
from autoshard.sharding.audit.replicated_arrays import ReplicatedArray, replicated
from autoshard.sharding.audit.traffic_diff import Context, Found, Missing, Unplanned, compare, place
from autoshard.sharding.hlo import parser
from autoshard.sharding.hlo.kernel_costs import Kernels
from autoshard.sharding.hlo.link_times import Wires
from autoshard.sharding.hlo.rematerializations import Rematerialization, read_remarks
from autoshard.sharding.hlo.replica_groups import axes_of
from autoshard.sharding.hlo.schedule import Runs, Schedule
from autoshard.sharding.machines.chips import Options
from autoshard.sharding.machines.targets import Target, TargetError, find_target

if TYPE_CHECKING:
    from autoshard.sharding.plan.sharding_plan import Plan

COMPILERS: Mapping[str, tuple[str, ...]] = {
    "tpu": ("jax", "jaxlib", "libtpu"),
    "cuda": ("jax", "jaxlib", "jax-cuda13-pjrt", "jax-cuda12-pjrt"),
    "cpu": ("jax", "jaxlib"),
}
DEVICES_SHOWN = 4  # groups of a collective that are no mesh axes'


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
        from autoshard.sharding.audit.audit import report

        return report(self)


def _plain(thing: Any) -> Any:
    return dict(thing) if isinstance(thing, Mapping) else asdict(thing)


def verify(plan: Plan, *, timeout_s: float = TIMEOUT_S, options: Options | None = None) -> Audit:
    """Compiles a plan's program for its target, in a process of its own, and compares it with the plan.

    Args:
        plan: a plan with its function.
        timeout_s: seconds after which the compiler is stopped.
        options: compiler options; default: the plan's own.

    Raises:
        AuditError: the target has no compiler (a TOML file, a topology that does not exist), or it is not installed;
            an option that cannot be used.
    """
    problems: list[str] = []
    finite(timeout_s, "timeout_s", problems)
    fit(options, Options | None, "options", problems)
    if problems or not timeout_s > 0:
        raise AuditError(f"verify: {'; '.join(problems) or f'timeout_s is {timeout_s}, it must be above 0'}")
    target = compile_target(plan.target)
    if missing := missing_compiler(target.platform):
        raise AuditError(f"{_subject(plan)} cannot be verified: {missing}")
    try:
        job = export_plan(plan, options)
    except AutoshardError:
        raise
    # JAX's refusals: an operator that the platform does not have, or that cannot be exported.
    except (RuntimeError, ValueError, TypeError) as error:
        return audit(plan, target, Compiled("error", f"not to be exported for {target.platform}: {error}"))
    compiled = build(job, timeout_s)
    if compiled.stage == "topology" and compiled.kind == "error":
        raise AuditError(
            f"{_subject(plan)} cannot be verified: the compiler has no machine '{plan.target}': "
            f"{_first_line(compiled.message)}"
        )
    return audit(plan, target, compiled)


def compile_target(name: str) -> Target:
    """The machine that a plan was made for, if a compiler knows it.

    Raises:
        AuditError: none does.
    """
    try:
        target = find_target(name)
    except TargetError as error:
        raise AuditError(f"a plan for '{name}' cannot be verified: {error}") from error
    if name.endswith(".toml"):
        raise AuditError(
            f"a plan for '{name}' cannot be verified: no compiler knows the machine of a file. Plan for a named target "
            f"of the same chip, such as v5e:4x4 or h100:8"
        )
    return target


def audit(plan: Plan, target: Target, compiled: Compiled) -> Audit:
    """What a compiled program is beside its plan."""
    predicted = Audit(
        kind=compiled.kind,
        message=compiled.message,
        function=plan.function,
        target=plan.target,
        mesh=dict(zip(plan.mesh.axis_names, plan.mesh.axis_sizes, strict=True)),
        remarks=read_remarks(remarks(compiled)),
        notes=tuple(f"this compiler needs {option} for this program" for option in compiled.added),
        memory=dict(compiled.memory),
        peak_bytes=compiled.peak_bytes,
        predicted_peak_bytes=plan.estimate.peak_memory_bytes,
        predicted_compute_us=plan.estimate.compute_us,
        predicted_comm_us=plan.estimate.comm_us,
        predicted_step_time_us=plan.estimate.step_time_us,
        predicted_wire_bytes=plan.estimate.comm_bytes,
        versions={k: v for k, v in compiled.versions.items() if k in COMPILERS[target.platform]},
        seconds=compiled.seconds,
        cached=compiled.cached,
        dropped=tuple(compiled.dropped),
    )
    if compiled.kind != "ok":
        return predicted
    try:
        return with_program(predicted, plan, target, parser.read(compiled.text))
    # Text that is spelt otherwise than any compiler so far: the audit keeps what is known without it.
    except (LookupError, ValueError, TypeError, AttributeError) as error:
        return replace(predicted, kind="error", message=f"compiled, but the program cannot be read: {error!r}")


def with_program(predicted: Audit, plan: Plan, target: Target, program: parser.Program) -> Audit:
    """The audit with what the compiled program says."""
    wires = Wires(target.topology, plan.device_order)
    schedule = Schedule(program, Kernels(program, target.chip), wires)
    found = tuple(_found(runs, predicted.mesh) for runs in schedule.run())
    said = read_remarks((r.text for r in predicted.remarks), program, wires)
    unknown = {place(line): name for name, lines in plan.unknown.items() for line in lines}
    context = Context(predicted.mesh, unknown, {r.op_name for r in said})
    unplanned, missing = compare(found, plan.traffic, context)
    totals, clock = schedule.totals, target.chip.clock_hz
    exposed = sum(f.exposed_us for f in found)
    return replace(
        predicted,
        collectives=found,
        unplanned=unplanned,
        missing=missing,
        replicated=replicated(plan, program, predicted.peak_bytes or 0.0),
        remarks=said,
        notes=(*predicted.notes, *_notes(program, schedule)),
        cycles=totals.cycles or None,
        compute_us=totals.compute_us,
        compute_us_cycles=totals.cycles / clock * 1e6 if clock and totals.cycles else None,
        compute_us_roofline=totals.roofline_us,
        comm_us=sum(f.wire_us for f in found),
        exposed_us=exposed,
        step_time_us=totals.compute_us + exposed,
        wire_bytes=sum(f.step_bytes for f in found),
    )


def _found(runs: Runs, mesh: Mapping[str, int]) -> Found:
    c = runs.collective
    axes = axes_of(c.groups, mesh, c.pairs)
    wire = runs.once_us * runs.trips
    some = "".join("{" + ",".join(map(str, group)) + "}" for group in c.groups[:DEVICES_SHOWN])
    return Found(
        kind=c.kind,
        axes=axes or (),
        payload_bytes=c.payload_bytes,
        wire_bytes=c.wire_bytes,
        trips=runs.trips,
        line=c.line,
        overlapped=runs.beside and runs.exposed_us < wire,
        wire_us=wire,
        exposed_us=runs.exposed_us,
        op_name=c.op_name,
        devices="" if axes else some + ("..." if len(c.groups) > DEVICES_SHOWN else ""),
        widened=c.widened,
    )


def _notes(program: parser.Program, schedule: Schedule) -> Sequence[str]:
    notes = [
        f"the trips of a loop cannot be told and count once: {program.line(loop) or loop.op_name or loop.name}"
        for loop in schedule.unknown_loops.values()
    ]
    if schedule.totals.to_host:
        notes.append("what moves to and from the host's memory is not in the times")
    return notes


def _subject(plan: Plan) -> str:
    return f"the plan of {plan.function or 'a function'} for {plan.target}"


def _first_line(text: str) -> str:
    return re.sub(r"\s+", " ", text.strip().split("\n")[0])

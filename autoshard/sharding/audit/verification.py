"""Compiles a plan for its target and compares the compiled program with the plan.

    step_time_us = compute_us + exposed_us + host_exposed_us
    compute_us   = cycles x trips / the chip's clock; a roofline for instructions without cycles, and for programs that
                   are scheduled but not compiled to machine code (`until="schedule"`)
    exposed_us   = the time of collectives on the target's links that compute does not hide (`schedule`)
    host_exposed_us = the same of transfers of host memory

`Plan.verify()` returns an `Audit`. A program that does not fit, a program that the compiler rejects, and a compiler
that crashes or takes too long are results, which the audit reports.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

from autoshard._typed import convert, finite
from autoshard._units import variant_text
from autoshard.errors import AutoshardError
from autoshard.sharding.audit.aot_compile import Compiled, Until, compile_job, missing_compiler, partitioner_remarks
from autoshard.sharding.audit.audit import Audit, AuditError
from autoshard.sharding.audit.constants import LEAST_TIMEOUT_S, SHOWN_GROUPS, TIMEOUT_S
from autoshard.sharding.audit.export import export_plan
from autoshard.sharding.audit.host_traffic import compiled_transfers
from autoshard.sharding.audit.idle_options import idle_options
from autoshard.sharding.audit.module_origins import origin_of
from autoshard.sharding.audit.replicated_arrays import replicated
from autoshard.sharding.audit.requested_options import requested_options
from autoshard.sharding.audit.traffic_diff import CompiledCollective, Context, compare, file_and_line
from autoshard.sharding.hlo import parser
from autoshard.sharding.hlo.kernel_costs import Kernels
from autoshard.sharding.hlo.link_times import ProgramLinks
from autoshard.sharding.hlo.program_digest import program_digest
from autoshard.sharding.hlo.rematerializations import read_remarks
from autoshard.sharding.hlo.replica_groups import axes_of
from autoshard.sharding.hlo.schedule import CollectiveRuns, Schedule
from autoshard.sharding.lower.executable import Executable
from autoshard.sharding.machines.chips import Options
from autoshard.sharding.machines.options import machine_code_options
from autoshard.sharding.machines.targets import Target, TargetError, find_target
from autoshard.sharding.overlap.module_times import ModuleTimes, compiled_times
from autoshard.sharding.plan.sharding_plan import ShardingPlan

# Platform -> the packages whose versions an audit reports.
COMPILERS: Mapping[str, tuple[str, ...]] = {
    "tpu": ("jax", "jaxlib", "libtpu"),
    "cuda": ("jax", "jaxlib", "jax-cuda13-pjrt", "jax-cuda12-pjrt"),
    "cpu": ("jax", "jaxlib"),
}


def verify(
    executable: Executable,
    *,
    timeout_s: float = TIMEOUT_S,
    options: Options | str | None = None,
    until: Until = "code",
) -> Audit:
    """Compile a plan's program for its target, in a separate process, and compare it with the plan.

    With `options`, or for a plan with requested options, the audit names those that change nothing in the compiled
    program. To find them, the program is also compiled without them, and without each of them if they are few, unless
    it is in the cache.

    Args:
        executable: a plan with its function.
        timeout_s: seconds for all compilations, after which the compiler is stopped.
        options: compiler options, or the name of an option set. Default: the plan's options.
        until: `schedule` stops the compiler of TPUs when the program is scheduled and its buffers are placed, after
            seconds instead of minutes. Then there are no cycles, so times are those of a roofline, and errors of code
            generation are not seen. Other compilers ignore it.

    Raises:
        AuditError: no compiler supports the target (a TOML file, a topology that does not exist), the compiler is not
            installed, or an argument is invalid.
    """
    problems: list[str] = []
    finite(timeout_s, "timeout_s", problems)
    convert(options, Options if isinstance(options, Mapping) else Options | str | None, "options", problems)
    convert(until, Until, "until", problems)
    if problems or not timeout_s > 0:
        raise AuditError(f"verify: {'; '.join(problems) or f'timeout_s is {timeout_s}; it must be above 0'}")
    compile_target(executable.plan.target)
    request, end = requested_options(executable.plan, options), time.monotonic() + timeout_s
    found = verify_under(executable, request.options, timeout_s, until)
    added = [f"compiled with {each}" for each in request.added]
    notes = [*added, *request.notes]
    tried = request.changed - set(found.dropped)
    if found.until == "schedule":
        tried -= machine_code_options()
    idle = idle_options(
        found,
        request,
        sorted(tried),
        lambda options, until: verify_under(executable, options, max(end - time.monotonic(), LEAST_TIMEOUT_S), until),
    )
    if idle:
        program = "schedule" if found.until == "schedule" else "compiled program"
        notes.append(f"these options change nothing in the {program}: {', '.join(idle)}")
    return replace(found, notes=(*notes, *found.notes))


def verify_under(
    executable: Executable, options: Options, timeout_s: float = TIMEOUT_S, until: Until = "code"
) -> Audit:
    """Compile a plan's program under exactly these options, and compare it with the plan (`verify`).

    Raises:
        AuditError: as `verify`.
    """
    plan = executable.plan
    target = compile_target(plan.target)
    if missing := missing_compiler(target.platform):
        raise AuditError(f"{_subject(plan)} cannot be verified: {missing}")
    try:
        job = export_plan(executable, options)
    except AutoshardError:
        raise
    # JAX rejects operators that the platform does not support and operators that cannot be exported.
    except (RuntimeError, ValueError, TypeError) as error:
        return audit(
            executable, target, Compiled("error", f"JAX cannot export the program for {target.platform}: {error}")
        )
    compiled = compile_job(job, timeout_s, until=until)
    if compiled.stage == "topology" and compiled.kind == "error":
        raise AuditError(
            f"{_subject(plan)} cannot be verified: the compiler does not support the topology '{plan.target}': "
            f"{_first_line(compiled.message)}"
        )
    return replace(audit(executable, target, compiled), options=dict(options))


def compile_target(name: str) -> Target:
    """Return the target of a plan.

    Raises:
        AuditError: no compiler supports it.
    """
    try:
        target = find_target(name)
    except TargetError as error:
        raise AuditError(f"a plan for '{name}' cannot be verified: {error}") from error
    if name.endswith(".toml"):
        raise AuditError(
            f"a plan for '{name}' cannot be verified: no compiler supports machines from files. Plan for a named "
            "target with the same chip, such as v5e:4x4 or h100:8."
        )
    return target


def audit(executable: Executable, target: Target, compiled: Compiled) -> Audit:
    """Compare the result of a compilation with the plan."""
    plan = executable.plan
    predicted = Audit(
        kind=compiled.kind,
        message=compiled.message,
        function=plan.function,
        target=plan.target,
        mesh=dict(zip(plan.mesh.axis_names, plan.mesh.axis_sizes, strict=True)),
        remarks=read_remarks(partitioner_remarks(compiled)),
        notes=tuple(f"compiled with {option}, without which this compiler fails" for option in compiled.added),
        memory=dict(compiled.memory),
        peak_bytes=compiled.peak_bytes,
        predicted_peak_bytes=plan.estimate.peak_memory_bytes,
        host_bytes=compiled.host_bytes,
        predicted_host_bytes=plan.estimate.host_memory_bytes,
        predicted_compute_us=plan.estimate.compute_us,
        predicted_comm_us=plan.estimate.comm_us,
        predicted_step_time_us=plan.estimate.step_time_us,
        predicted_wire_bytes=plan.estimate.comm_bytes,
        predicted_host_us=plan.estimate.host_us,
        predicted_host_exposed_us=plan.estimate.host_exposed_us,
        predicted_host_traffic_bytes=plan.estimate.host_traffic_bytes,
        versions={k: v for k, v in compiled.versions.items() if k in COMPILERS[target.platform]},
        seconds=compiled.seconds,
        until=compiled.until,
        cached=compiled.cached,
        dropped=tuple(compiled.dropped),
        strategy=f"{plan.chosen} ({variant_text(plan.variant)})" if plan.variant else plan.chosen,
    )
    if compiled.kind != "ok":
        return predicted
    predicted = replace(predicted, program=program_digest(compiled.text))
    try:
        return with_program(predicted, executable, target, parser.parse_program(compiled.text))
    # The text differs from that of all known compilers. The audit keeps the results that do not depend on it.
    except (LookupError, ValueError, TypeError, AttributeError) as error:
        return replace(
            predicted, kind="error", message=f"the program compiled, but its text cannot be parsed: {error!r}"
        )


def with_program(predicted: Audit, executable: Executable, target: Target, program: parser.Program) -> Audit:
    """Add to an audit the results that come from the text of the compiled program."""
    plan = executable.plan
    wires = ProgramLinks(target.topology, plan.device_order)
    schedule = Schedule(program, Kernels(program, target.chip), wires)
    collectives = tuple(_collective(runs, predicted.mesh) for runs in schedule.run())
    modules = _module_times(plan, program, schedule, predicted.mesh) if plan.overlap else {}
    remarks = read_remarks((r.text for r in predicted.remarks), program, wires)
    unknown = {file_and_line(line): name for name, lines in plan.unknown.items() for line in lines}
    context = Context(predicted.mesh, unknown, {r.op_name for r in remarks})
    unplanned, missing = compare(collectives, plan.traffic, context)
    totals, clock = schedule.totals, target.chip.clock_hz
    exposed = sum(c.exposed_us for c in collectives)
    transfers = compiled_transfers(schedule.transfers.values())
    waits = sum(t.exposed_us for t in transfers)
    cycles = totals.cycles if predicted.until == "code" else 0.0  # in a schedule, only kernels have any
    compute_us = totals.compute_us if predicted.until == "code" else totals.roofline_us
    return replace(
        predicted,
        collectives=collectives,
        unplanned=unplanned,
        missing=missing,
        replicated=replicated(executable, program, predicted.peak_bytes or 0.0),
        remarks=remarks,
        modules=modules,
        kernels=schedule.kernel_runs,
        notes=(*predicted.notes, *_notes(program, schedule)),
        cycles=cycles or None,
        compute_us=compute_us,
        compute_us_cycles=cycles / clock * 1e6 if clock and cycles else None,
        compute_us_roofline=totals.roofline_us,
        comm_us=sum(c.wire_us for c in collectives),
        exposed_us=exposed,
        transfers=transfers,
        host_us=sum(t.us for t in transfers),
        host_exposed_us=waits,
        host_traffic_bytes=sum(t.bytes * t.trips for t in transfers),
        step_time_us=compute_us + exposed + waits,
        wire_bytes=sum(c.step_bytes for c in collectives),
    )


def _module_times(
    plan: ShardingPlan, program: parser.Program, schedule: Schedule, mesh: Mapping[str, int]
) -> ModuleTimes:
    """The times of the collectives of each module."""
    stored, rows = plan.storage.get("parameter", ()), []
    for (computation, instruction, _), runs in schedule.runs.items():
        axes = axes_of(runs.collective.groups, mesh, runs.collective.is_permute) or ()
        origin = origin_of(program, (computation, instruction), runs.collective, axes, stored)
        rows.append((origin, runs.once_us * runs.trips, runs.exposed_us))
    return compiled_times(rows)


def _collective(runs: CollectiveRuns, mesh: Mapping[str, int]) -> CompiledCollective:
    c = runs.collective
    axes = axes_of(c.groups, mesh, c.is_permute)
    wire_us = runs.once_us * runs.trips
    groups = "".join("{" + ",".join(map(str, group)) + "}" for group in c.groups[:SHOWN_GROUPS])
    return CompiledCollective(
        kind=c.kind,
        axes=axes or (),
        payload_bytes=c.payload_bytes,
        wire_bytes=c.wire_bytes,
        trips=runs.trips,
        line=c.line,
        overlapped=runs.is_asynchronous and runs.exposed_us < wire_us,
        wire_us=wire_us,
        exposed_us=runs.exposed_us,
        op_name=c.op_name,
        devices="" if axes else groups + ("..." if len(c.groups) > SHOWN_GROUPS else ""),
        widened=c.widened,
    )


def _notes(program: parser.Program, schedule: Schedule) -> Sequence[str]:
    notes = [
        f"a loop with an unknown trip count is counted once: {program.line(loop) or loop.op_name or loop.name}"
        for loop in schedule.unknown_loops.values()
    ]
    if schedule.totals.to_host:
        notes.append("the times do not include all transfers to and from host memory")
    return notes


def _subject(plan: ShardingPlan) -> str:
    return f"the plan of {plan.function or 'a function'} for {plan.target}"


def _first_line(text: str) -> str:
    return re.sub(r"\s+", " ", text.strip().split("\n")[0])

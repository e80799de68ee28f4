"""Compiles a plan for its target and compares what the compiler made of it with what the plan says.

    step_time_us = compute_us + exposed_us
    compute_us   = cycles x trips / the chip's clock, and a roofline for what the compiler gives no cycles for
    exposed_us   = the time that collectives are waited for on the target's links (`schedule`)

`Plan.verify()` gives an `Audit`. A program that does not fit, one that the compiler refuses, a compiler that crashes or
takes too long are results: the audit says what happened.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from autoshard._typed import finite, fit
from autoshard.errors import AutoshardError
from autoshard.sharding.audit.aot_compile import TIMEOUT_S, Compiled, build, missing_compiler, remarks
from autoshard.sharding.audit.audit import Audit, AuditError
from autoshard.sharding.audit.export import export_plan
from autoshard.sharding.audit.replicated_arrays import replicated
from autoshard.sharding.audit.traffic_diff import Context, Found, compare, place
from autoshard.sharding.hlo import parser
from autoshard.sharding.hlo.kernel_costs import Kernels
from autoshard.sharding.hlo.link_times import Wires
from autoshard.sharding.hlo.rematerializations import read_remarks
from autoshard.sharding.hlo.replica_groups import axes_of
from autoshard.sharding.hlo.schedule import Runs, Schedule
from autoshard.sharding.lower.executable import Executable
from autoshard.sharding.machines.chips import Options
from autoshard.sharding.machines.targets import Target, TargetError, find_target
from autoshard.sharding.plan.sharding_plan import ShardingPlan

COMPILERS: Mapping[str, tuple[str, ...]] = {
    "tpu": ("jax", "jaxlib", "libtpu"),
    "cuda": ("jax", "jaxlib", "jax-cuda13-pjrt", "jax-cuda12-pjrt"),
    "cpu": ("jax", "jaxlib"),
}
DEVICES_SHOWN = 4  # groups of a collective that are no mesh axes'


def verify(executable: Executable, *, timeout_s: float = TIMEOUT_S, options: Options | None = None) -> Audit:
    """Compiles a plan's program for its target, in a process of its own, and compares it with the plan.

    Args:
        executable: a plan with its function.
        timeout_s: seconds after which the compiler is stopped.
        options: compiler options; default: the plan's own.

    Raises:
        AuditError: the target has no compiler (a TOML file, a topology that does not exist), or it is not installed;
            an option that cannot be used.
    """
    plan = executable.plan
    problems: list[str] = []
    finite(timeout_s, "timeout_s", problems)
    fit(options, Options | None, "options", problems)
    if problems or not timeout_s > 0:
        raise AuditError(f"verify: {'; '.join(problems) or f'timeout_s is {timeout_s}, it must be above 0'}")
    target = compile_target(plan.target)
    if missing := missing_compiler(target.platform):
        raise AuditError(f"{_subject(plan)} cannot be verified: {missing}")
    try:
        job = export_plan(executable, options)
    except AutoshardError:
        raise
    # JAX's refusals: an operator that the platform does not have, or that cannot be exported.
    except (RuntimeError, ValueError, TypeError) as error:
        return audit(executable, target, Compiled("error", f"not to be exported for {target.platform}: {error}"))
    compiled = build(job, timeout_s)
    if compiled.stage == "topology" and compiled.kind == "error":
        raise AuditError(
            f"{_subject(plan)} cannot be verified: the compiler has no machine '{plan.target}': "
            f"{_first_line(compiled.message)}"
        )
    return audit(executable, target, compiled)


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


def audit(executable: Executable, target: Target, compiled: Compiled) -> Audit:
    """What a compiled program is beside its plan."""
    plan = executable.plan
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
        return with_program(predicted, executable, target, parser.read(compiled.text))
    # Text that is spelt otherwise than any compiler so far: the audit keeps what is known without it.
    except (LookupError, ValueError, TypeError, AttributeError) as error:
        return replace(predicted, kind="error", message=f"compiled, but the program cannot be read: {error!r}")


def with_program(predicted: Audit, executable: Executable, target: Target, program: parser.Program) -> Audit:
    """The audit with what the compiled program says."""
    plan = executable.plan
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
        replicated=replicated(executable, program, predicted.peak_bytes or 0.0),
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


def _subject(plan: ShardingPlan) -> str:
    return f"the plan of {plan.function or 'a function'} for {plan.target}"


def _first_line(text: str) -> str:
    return re.sub(r"\s+", " ", text.strip().split("\n")[0])

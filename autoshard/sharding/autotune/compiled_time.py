"""The fastest of several plans, as compiled for the target."""

from __future__ import annotations

from collections.abc import Sequence

from autoshard._units import bytes_text, time_text
from autoshard.sharding.audit import Audit
from autoshard.sharding.autotune.compiled_options import compared_by, failure_text, fits
from autoshard.sharding.autotune.machine_code import scheduled, with_code
from autoshard.sharding.planner.bound_plan import BoundPlan
from autoshard.sharding.planner.variants import variant_name


def fastest_compiled(bounds: Sequence[BoundPlan], limit: float) -> BoundPlan:
    """Return the plan whose program is the fastest of those that compile and fit; the first plan if none does.

    All are compared under their chip's default options, by their schedules where the compiler stops there. The fastest
    is then compared under other option sets, and compiled to machine code (`machine_code`). If that fails, the next one
    takes its place.

    Args:
        bounds: plans with their functions, the best first.
        limit: bytes of one device.
    """
    plans = [bound.plan for bound in bounds]
    audits = [scheduled(bound.executable) for bound in bounds]
    while fitting := [n for n, audit in enumerate(audits) if fits(audit, limit)]:
        winner = min(fitting, key=lambda n: _step_us(audits[n]))
        best, notes = plans[winner], []
        if not best.fits:
            notes.append(
                f"{variant_name(best)} takes {bytes_text(best.estimate.peak_memory_bytes)} per device by the estimate "
                f"and {bytes_text(audits[winner].peak_bytes or 0)} compiled: XLA rematerializes what does not fit"
            )
        notes.append(
            f"the fastest of {len(fitting)} {compared_by(audits[winner].until)} for {best.target}: "
            + ", ".join(f"{variant_name(plans[n])} {time_text(_step_us(audits[n]))}" for n in fitting)
        )
        found, audit = with_code(bounds[winner].where(notes=(*best.notes, *notes)), audits[winner], limit)
        audits[winner] = audit
        if fits(audit, limit):
            # A plan that does not fit by its own estimate may fail to compile, so that failure is not reported.
            reported = [n for n in range(len(plans)) if n in fitting or plans[n].fits]
            return found.where(audits=tuple(audits[n] for n in reported))
    outcomes = "; ".join(
        f"{variant_name(plan)}: {failure_text(audit.kind, audit.message, audit.peak_bytes, limit)}"
        for plan, audit in zip(plans, audits, strict=True)
    )
    if len(plans) == 1:
        what = f"the best plan does not compile for {plans[0].target}, or it does not fit"
    else:
        what = f"none of the {len(plans)} best plans compiles for {plans[0].target} and fits"
    note = f"{what} ({outcomes})"
    return bounds[0].where(audits=tuple(audits), notes=(*plans[0].notes, note))


def _step_us(audit: Audit) -> float:
    return audit.step_time_us or 0.0

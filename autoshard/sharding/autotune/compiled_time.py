"""The fastest of several plans, by the target's compiler."""

from __future__ import annotations

from collections.abc import Sequence

from autoshard._units import bytes_text, time_text
from autoshard.sharding.audit import verify
from autoshard.sharding.planner.bound_plan import BoundPlan
from autoshard.sharding.planner.variants import variant_name


def fastest_compiled(bounds: Sequence[BoundPlan], limit: float) -> BoundPlan:
    """The plan of which the target's compiler makes the fastest program that fits; the first if it makes none.

    Args:
        bounds: plans with their functions, the best first.
        limit: bytes of one device.
    """
    plans = [bound.plan for bound in bounds]
    audits = [verify(bound.executable) for bound in bounds]
    able = [n for n, a in enumerate(audits) if a.ok and (a.peak_bytes or 0) <= limit]
    if not able:
        said = "; ".join(
            f"{variant_name(plan)}: {audit.kind}{': ' + audit.message[:120] if audit.message else ''}"
            for plan, audit in zip(plans, audits, strict=True)
        )
        note = f"none of {len(plans)} compiled for {plans[0].target} as it should ({said})"
        return bounds[0].where(audits=tuple(audits), notes=(*plans[0].notes, note))
    times = {n: audits[n].step_time_us or 0.0 for n in able}
    winner = min(able, key=lambda n: times[n])
    best, told = plans[winner], []
    if not best.fits:
        told.append(
            f"by the estimate {variant_name(best)} takes {bytes_text(best.estimate.peak_memory_bytes)} of a device, "
            f"compiled {bytes_text(audits[winner].peak_bytes or 0)}: XLA computes again what does not fit"
        )
    told.append(
        f"the fastest of {len(able)} compiled for {best.target}: "
        + ", ".join(f"{variant_name(plans[n])} {time_text(times[n])}" for n in able)
    )
    # That one does not compile of which the estimate says so is nothing to complain of.
    kept = tuple(audit for n, audit in enumerate(audits) if n in able or plans[n].fits)
    return bounds[winner].where(audits=kept, notes=(*best.notes, *told))

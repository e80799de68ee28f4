"""The fastest of several plans, measured over a few steps on the attached devices.

The cost model cannot rank plans that differ by a few percent; the attached machine can. Inputs are synthetic values of
the plan's shapes. They are made in their planned shardings and for one plan at a time, so that any plan that fits alone
can run. Plans run in turns, so that other load on the machine affects all of them. A plan that is slower than
`SLOWEST_RERUN` is not run again. If a plan spans several processes, all of them run the same plans, and the slowest
process counts. Programs with side effects, or with loops that synthetic values might never end, are not run.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from autoshard._processes import MissingProcessError, gather
from autoshard._shown import shown
from autoshard._units import time_text, variant_text
from autoshard.errors import PlanError
from autoshard.sharding.autotune.constants import (
    FINAL_TURNS,
    LEAST_STEPS,
    MOST_STEPS,
    RUN_ERROR_CHARS,
    SHOWN_PLANS,
    SLOWEST_FINAL,
    SLOWEST_RERUN,
    TURN_S,
    TURNS,
)
from autoshard.sharding.autotune.synthetic_inputs import input_maker, reason_not_to_run
from autoshard.sharding.lower.compiler_remarks import kept_remarks
from autoshard.sharding.lower.executable import lower_as_planned
from autoshard.sharding.plan.sharding_plan import ShardingPlan
from autoshard.sharding.planner.bound_plan import BoundPlan


@shown
@dataclass
class _Run:
    """A plan that is compiled and run, and the seconds of its steps."""

    bound: BoundPlan
    compiled: Any = None
    mesh: Any = None
    failed: str = ""
    seconds: list[float] = field(default_factory=list)

    @property
    def plan(self) -> ShardingPlan:
        return self.bound.plan

    @property
    def median(self) -> float:
        return float(np.median(self.seconds)) if self.seconds and not self.failed else math.inf


def check_attached(bound: BoundPlan) -> None:
    """Raise a `PlanError` if a plan needs other or more devices than are attached."""
    devices, plan, platform = jax.devices(), bound.plan, bound.problem.machine.target.platform
    attached = "cuda" if devices[0].platform in ("gpu", "cuda") else devices[0].platform
    if plan.mesh.size > len(devices) or platform != attached:
        raise PlanError(
            f"measure runs plans on the attached devices ({len(devices)} of {attached}), but this plan is for "
            f"{plan.target}. Use verify=k: it compiles the best k plans for {plan.target} instead"
        )


def fastest_measured(bounds: Sequence[BoundPlan], limit: float) -> BoundPlan:
    """Return the plan whose steps take the least time on the attached devices; the first plan if none can be run.

    Args:
        bounds: plans with their functions, the best first.
        limit: bytes of one device. Unused, because the caller leaves out plans that do not fit by the estimate.
    """
    del limit
    check_attached(bounds[0])
    first = bounds[0].plan
    for bound in bounds:
        if reason := reason_not_to_run(bound.traced):
            note = f"no plan was measured: {bound.plan.function} {reason}"
            return bounds[0].where(notes=(*first.notes, note))
    runs = [_Run(bound) for bound in bounds]
    with jax.debug_nans(False), jax.debug_infs(False):  # synthetic values may give either, and the checks take time
        _take_turns(runs)
    ranked = sorted((run for run in runs if run.median < math.inf), key=lambda run: run.median)
    failed = "".join(f"; {_name(run.plan)} does not run: {run.failed}" for run in runs if run.failed)
    if not ranked:
        return bounds[0].where(notes=(*first.notes, f"none of {len(bounds)} plans runs on {first.target}{failed}"))
    times = ", ".join(f"{_name(run.plan)} {time_text(1e6 * run.median)}" for run in ranked[:SHOWN_PLANS])
    more = ", ..." if len(ranked) > SHOWN_PLANS else ""
    note = f"the fastest of {len(ranked)} run on {first.target}: {times}{more}{failed}"
    measured = tuple((_name(run.plan), 1e6 * run.median) for run in ranked)
    return ranked[0].bound.where(measured=measured, notes=(*ranked[0].plan.notes, note))


def _take_turns(runs: Sequence[_Run]) -> None:
    for run in runs:
        _attempt(run, functools.partial(_compile, run))
    for turn in range(TURNS + FINAL_TURNS):
        slowest = (SLOWEST_RERUN if turn < TURNS else SLOWEST_FINAL) * min(run.median for run in runs)
        again = [run for run in runs if not run.failed and (not turn or run.median <= slowest)]
        if turn < TURNS or len(again) > 1:
            for run in again:
                _attempt(run, functools.partial(_turn, run))


def _attempt(run: _Run, action: Callable[[], Sequence[float]]) -> None:
    """Add the seconds that an action returns to a run, or note why it failed.

    Actions fail if the compiler refuses the program, or if the devices run out of memory.
    """
    seconds: Sequence[float] = ()
    try:
        seconds = action()
    except MissingProcessError:
        raise
    except Exception as error:  # of the compiler, a device or a user's callback: other plans may still run
        line = (str(error).strip().splitlines() or [""])[0]
        run.failed = " ".join(line.split())[:RUN_ERROR_CHARS] or type(error).__name__
    if _spans_processes(run.mesh):
        # Each process sends one number, because their clocks end a turn at different steps.
        own = np.array([bool(run.failed), float(np.median(seconds)) if len(seconds) else 0.0])
        all_processes = gather(f"measure '{run.plan.chosen}'", own)
        run.failed = run.failed or ("it failed in another process" if all_processes[:, 0].any() else "")
        seconds = [float(all_processes[:, 1].max())] if len(seconds) else []
    run.seconds += seconds


def _spans_processes(mesh: Any) -> bool:
    return mesh is not None and len({d.process_index for d in mesh.devices.flat}) > 1


def _compile(run: _Run) -> Sequence[float]:
    executable, traced = run.bound.executable, run.bound.traced
    run.mesh = executable.mesh_over(None)
    lowered = lower_as_planned(executable.jit(run.mesh), traced, run.plan.shardings(run.mesh)[0])
    with kept_remarks():  # the first call of the plan that is chosen compiles it again, and reports its remarks
        run.compiled = lowered.compile()
    return ()


def _turn(run: _Run) -> Sequence[float]:
    """Run some steps and return the seconds of each. The inputs are made here and freed at the end."""
    traced = run.bound.traced
    shardings, _ = run.plan.shardings(run.mesh)
    makers = [input_maker(aval.shape, aval.dtype, s) for aval, s in zip(traced.in_avals, shardings, strict=True)]
    updated_by = dict(traced.state)
    leaves = [make() for make in makers]
    seconds: list[float] = []
    begun = time.perf_counter()
    count = 0
    while len(seconds) < LEAST_STEPS or _has_another_step(run, len(seconds), begun):
        arguments = traced.jit_arguments(*jax.tree.unflatten(traced.in_tree, leaves))
        jax.block_until_ready(leaves)
        start = time.perf_counter()
        results = run.compiled(*arguments)
        jax.block_until_ready(results)
        if count:  # the first step also allocates memory
            seconds.append(time.perf_counter() - start)
        count += 1
        flat = jax.tree.leaves(results)
        # Updated state is the next input. Donated inputs that are not updated are made again.
        leaves = [
            flat[updated_by[i]] if i in updated_by else makers[i]() if i in traced.donated else leaf
            for i, leaf in enumerate(leaves)
        ]
        del results, flat, arguments
    return seconds


def _has_another_step(run: _Run, timed: int, begun: float) -> bool:
    """Whether a turn has another step. With several processes it never has, because their clocks disagree."""
    return timed < MOST_STEPS and not _spans_processes(run.mesh) and time.perf_counter() - begun < TURN_S


def _name(plan: ShardingPlan) -> str:
    return f"{plan.chosen} ({variant_text(plan.variant)})" if plan.variant else plan.chosen

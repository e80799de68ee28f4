"""Of several plans the fastest by running them: a few steps each on the attached devices.

A model of cost ranks plans that differ by some percent no better than it knows the machine; where the machine is
there, it can be asked. The values are made up: state and batch of the plan's shapes, born where the plan has them, for
one plan at a time, so that there is room for whatever fits by itself. Plans take turns, so that what else the machine
does meets all of them; what falls behind by more than `BEHIND` runs no further turn. Where the plan spans processes,
all of them run the same plans, and a plan is as slow as on the slowest. Programs that made-up values could keep running
for ever, or that would tell them to the world, are not run.
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

from autoshard._processes import MissingProcessError, gathered
from autoshard._units import time_text, variant_text
from autoshard.errors import PlanError
from autoshard.sharding.autotune.synthetic_inputs import input_maker, not_to_be_run
from autoshard.sharding.plan.sharding_plan import ShardingPlan
from autoshard.sharding.planner.bound_plan import BoundPlan

TURNS, FINAL = 3, 4
"""How many times each plan is run, and how many more times those that are close."""

STEPS, TURN_S = 10, 0.5
"""Steps of a turn at most, and seconds after which it has no further one; two are always timed."""

BEHIND, CLOSE = 1.4, 1.08
"""How many times as slow as the fastest a plan may be to be run again, and to be run in the final turns."""

SHOWN = 5
"""How many plans the note names."""


@dataclass
class _Run:
    """A plan that was compiled for the devices, and the seconds of its steps."""

    bound: BoundPlan
    compiled: Any = None
    devices: Any = None  # the mesh
    failed: str = ""
    seconds: list[float] = field(default_factory=list)

    @property
    def plan(self) -> ShardingPlan:
        return self.bound.plan

    @property
    def median(self) -> float:
        return float(np.median(self.seconds)) if self.seconds and not self.failed else math.inf


def check_attached(bound: BoundPlan) -> None:
    """Refuses to run a plan for a machine that is not there.

    Raises:
        PlanError: it has other or more devices than are attached.
    """
    devices, plan, wanted = jax.devices(), bound.plan, bound.problem.machine.target.platform
    there = "cuda" if devices[0].platform in ("gpu", "cuda") else devices[0].platform
    if plan.mesh.size > len(devices) or wanted != there:
        raise PlanError(
            f"measure runs plans on the attached devices ({len(devices)} of {there}), this plan is for {plan.target}: "
            "verify=k compiles the best k for it instead"
        )


def fastest_measured(bounds: Sequence[BoundPlan], limit: float) -> BoundPlan:
    """The plan whose steps take the least time on the attached devices; the first if none runs or none may.

    Args:
        bounds: plans with their functions, the best first.
        limit: bytes of one device; what does not fit by the estimate was left out before.
    """
    del limit
    check_attached(bounds[0])
    first = bounds[0].plan
    for bound in bounds:
        if why := not_to_be_run(bound.traced):
            note = f"no plan was measured: {bound.plan.function} {why}"
            return bounds[0].where(notes=(*first.notes, note))
    runs = [_Run(bound) for bound in bounds]
    with jax.debug_nans(False), jax.debug_infs(False):  # made-up values may give either, and a check takes time
        _take_turns(runs)
    ran = sorted((run for run in runs if run.median < math.inf), key=lambda run: run.median)
    failed = "".join(f"; {_name(run.plan)} does not run: {run.failed}" for run in runs if run.failed)
    if not ran:
        return bounds[0].where(notes=(*first.notes, f"none of {len(bounds)} runs here{failed}"))
    times = ", ".join(f"{_name(run.plan)} {time_text(1e6 * run.median)}" for run in ran[:SHOWN])
    note = f"the fastest of {len(ran)} run on {first.target}: {times}{', ...' if len(ran) > SHOWN else ''}{failed}"
    return ran[0].bound.where(notes=(*ran[0].plan.notes, note))


def _take_turns(runs: Sequence[_Run]) -> None:
    for run in runs:
        _attempt(run, functools.partial(_compile, run))
    for turn in range(TURNS + FINAL):
        most = (BEHIND if turn < TURNS else CLOSE) * min(run.median for run in runs)
        again = [run for run in runs if not run.failed and (not turn or run.median <= most)]
        if turn < TURNS or len(again) > 1:
            for run in again:
                _attempt(run, functools.partial(_turn, run))


def _attempt(run: _Run, action: Callable[[], Sequence[float]]) -> None:
    """Takes seconds from an action, or what went wrong: memory at run time, a program that the compiler refuses."""
    found: Sequence[float] = ()
    try:
        found = action()
    except MissingProcessError:
        raise
    except Exception as error:  # compiler, device or user's callback: the plan is out, with its words; others may run
        first = (str(error).strip().splitlines() or [""])[0]
        run.failed = " ".join(first.split())[:160] or type(error).__name__
    if _spans_processes(run.devices):
        # One number each: the processes' clocks stop at different steps.
        mine = np.array([bool(run.failed), float(np.median(found)) if len(found) else 0.0])
        told = gathered(f"measure '{run.plan.chosen}'", mine)
        run.failed = run.failed or ("it failed in another process" if told[:, 0].any() else "")
        found = [float(told[:, 1].max())] if len(found) else []
    run.seconds += found


def _spans_processes(mesh: Any) -> bool:
    return mesh is not None and len({d.process_index for d in mesh.devices.flat}) > 1


def _compile(run: _Run) -> Sequence[float]:
    executable, traced = run.bound.executable, run.bound.traced
    run.devices = executable.mesh_over(None)
    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype, weak_type=a.weak_type) for a in traced.in_avals]
    args, kwargs = jax.tree.unflatten(traced.in_tree, shapes)
    jitted = executable.jit(run.devices)
    run.compiled = (jitted.lower(*args, kwargs) if kwargs else jitted.lower(*args)).compile()
    return ()


def _turn(run: _Run) -> Sequence[float]:
    """Seconds of some steps, from values that are made for it and given up after it."""
    traced = run.bound.traced
    shardings, _ = run.plan.shardings(run.devices)
    makers = [input_maker(aval.shape, aval.dtype, s) for aval, s in zip(traced.in_avals, shardings, strict=True)]
    back = dict(traced.state)
    leaves = [make() for make in makers]
    seconds: list[float] = []
    begun = time.perf_counter()
    count = 0
    while len(seconds) < 2 or _goes_on(run, len(seconds), begun):
        args, kwargs = jax.tree.unflatten(traced.in_tree, leaves)
        jax.block_until_ready(leaves)
        start = time.perf_counter()
        results = run.compiled(*args, kwargs) if kwargs else run.compiled(*args)
        jax.block_until_ready(results)
        if count:  # the first finds its memory
            seconds.append(time.perf_counter() - start)
        count += 1
        made = jax.tree.leaves(results)
        # What came back goes on; what was donated and did not is made again.
        leaves = [
            made[back[i]] if i in back else makers[i]() if i in traced.donated else leaf
            for i, leaf in enumerate(leaves)
        ]
        del results, made, args, kwargs
    return seconds


def _goes_on(run: _Run, timed: int, begun: float) -> bool:
    """Whether a turn has a further step; where processes step together, the clock of one cannot say so."""
    return timed < STEPS and not _spans_processes(run.devices) and time.perf_counter() - begun < TURN_S


def _name(plan: ShardingPlan) -> str:
    return f"{plan.chosen} ({variant_text(plan.variant)})" if plan.variant else plan.chosen

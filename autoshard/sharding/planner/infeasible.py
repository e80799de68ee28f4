"""Reports a program that does not fit the machine: the least memory that a plan needs, and the smallest larger machine.

    peak on a device of M devices >= (N / M) * least peak on a device of N devices, for M > N

A lean plan shards all state over all devices. Larger machines are tried in order of size, from the first that this
bound allows. On each, the lean plans of the `LEANEST_VARIANTS` are priced until one fits, and then the best plan is
searched. If no lean plan fits, all plans of the leanest variant are priced (up to `MOST_SEARCHED_DEVICES` devices).
Machines with equally many devices and more memory are tried in the same way. There is no time limit, so the result is
the same in every run.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from autoshard._shown import shown
from autoshard._tracebacks import users_stacklevel
from autoshard._units import bytes_text, variant_text
from autoshard.errors import AutoshardWarning, PlanError
from autoshard.sharding.axes.roles import Roles
from autoshard.sharding.cost.step_time import CostModel
from autoshard.sharding.layout.fixed_shardings import FixedError
from autoshard.sharding.layout.plan_request import Request, layout_of, request
from autoshard.sharding.machines.machine_sizes import larger_machines, machines_with_more_memory
from autoshard.sharding.machines.targets import Target
from autoshard.sharding.plan.sharding_plan import ShardingPlan
from autoshard.sharding.planner.bound_plan import BoundPlan
from autoshard.sharding.planner.constants import (
    LEANEST_VARIANTS,
    LISTED_MEMORY_SHARE,
    MOST_LEAN_SHARDS,
    MOST_SEARCHED_DEVICES,
)
from autoshard.sharding.planner.problem import PlanningProblem
from autoshard.sharding.search.candidate import Candidate, price
from autoshard.sharding.search.layout_search import on_mesh, search

_WORDS = {"parameter": "parameters", "gradient": "gradients", "activation": "activations", "temporary": "temporaries"}


class DoesNotFitError(PlanError):
    """No plan, or not the requested one, keeps every device within its memory."""


@shown
@dataclass(frozen=True)
class FeasibleMachine:
    """A machine on which a program fits, with the best plan for it."""

    target: Target
    plan: Candidate
    variant: Mapping[str, Any]


def report_infeasible(plans: Sequence[tuple[Mapping[str, Any], BoundPlan]]) -> None:
    """Raises an error that no plan fits, or warns if the user gave neither a limit nor a target.

    Args:
        plans: the variants, each with the plan that needs the least memory.

    Raises:
        DoesNotFitError: a limit was given, or a plan was searched for a given target.
    """
    ranked = sorted(plans, key=lambda one: one[1].plan.estimate.peak_memory_bytes)
    problem = ranked[0][1].problem
    text = f"auto_shard({problem.traced.name}): {_shortage_text(*ranked[0])}. "
    if not problem.must_fit:
        more = "a larger machine" if problem.target_given else "more devices"
        ways = f"{more} or a smaller batch{_recompute_text(ranked[0][1])}"
        warnings.warn(f"{text}Use {ways}", AutoshardWarning, stacklevel=users_stacklevel())
        return
    raise DoesNotFitError(text + _remedies_text(ranked[:LEANEST_VARIANTS]))


def _shortage_text(variant: Mapping[str, Any], bound: BoundPlan) -> str:
    problem, plan = bound.problem, bound.plan
    peak = plan.estimate.peak_memory_bytes
    limit = plan.limit_bytes
    name = plan.chosen + (f", {variant_text(variant)}" if variant else "")
    head = "the requested plan does not fit" if not problem.searched else "no plan fits"
    which = "The plan" if not problem.searched else "The smallest"
    size_text = _exact_text if problem.limit_given else bytes_text
    return (
        f"{head} {'memory_limit_bytes=' * problem.limit_given}{size_text(limit)} a device on "
        f"{problem.machine.target.name}. {which} ({name}) needs {size_text(peak)}, {size_text(peak - limit)} too much: "
        f"{_memory_text(bound)}"
    )


def _exact_text(size: float) -> str:
    """A number of bytes in the unit of the limit: `4_740_000 bytes (4.52 MiB)`."""
    return f"{math.ceil(size):_} bytes" + (f" ({bytes_text(size)})" if size >= 1024 else "")


def _kinds_at_peak(bound: BoundPlan) -> list[tuple[str, float]]:
    """The kinds of values in memory at its peak with their bytes, the largest first."""
    kinds = dict(bound.plan.estimate.memory_bytes)
    live_buffers = bound.problem.cost(bound.layout).live_buffers
    kinds |= bound.problem.memory.kinds_at_peak(bound.layout, live_buffers)
    return sorted(kinds.items(), key=lambda item: -item[1])


def _memory_text(bound: BoundPlan) -> str:
    least = bound.plan.estimate.peak_memory_bytes * LISTED_MEMORY_SHARE
    kinds = _kinds_at_peak(bound)
    return ", ".join(f"{_WORDS.get(kind, kind)} {bytes_text(size)}" for kind, size in kinds if size > least)


def _recompute_text(bound: BoundPlan) -> str:
    """`, or recompute activations with jax.checkpoint`, if activations take most of the memory."""
    kind, size = _kinds_at_peak(bound)[0]
    most = kind == "activation" and 2 * size > bound.plan.estimate.peak_memory_bytes
    return ", or recompute activations with jax.checkpoint" if most else ""


def _remedies_text(ranked: Sequence[tuple[Mapping[str, Any], BoundPlan]]) -> str:
    """What the user can do: use a larger machine, another chip, a smaller batch, a higher limit."""
    problem, plan = ranked[0][1].problem, ranked[0][1].plan
    peak = plan.estimate.peak_memory_bytes
    if not problem.searched:
        return (
            f"Give {_limit_text(peak)} if each device has that much memory, or a smaller batch{_padding_text(plan)}"
            f"{_recompute_text(ranked[0][1])}"
        )
    target, parts = problem.machine.target, []
    if problem.machine.sizes is None:
        parts.append(_larger_machine_text(ranked, target, peak))
    if not problem.limit_given and (others := machines_with_more_memory(target)):
        found = smallest(ranked, others)
        of_size = f"of other machines with {target.devices} device{'s' * (target.devices > 1)}"
        parts.append(f"{of_size}, it fits {_machine_text(found)}" if found else f"it fits none {of_size}")
    text = "; ".join(parts)
    text = f"{text[:1].upper()}{text[1:]}. " if text else ""
    return (
        f"{text}Use a smaller batch{_padding_text(plan)}{_recompute_text(ranked[0][1])}. To plan as if each device had "
        f"enough memory, give {_limit_text(peak)}"
    )


def _padding_text(plan: ShardingPlan) -> str:
    """`, or vocab padded from 50257 to 50264`: padding with which the leanest plan would fit."""
    return "".join(f", or {p.axis} padded from {p.size} to {p.padded}" for p in plan.padding)


def _larger_machine_text(ranked: Sequence[tuple[Mapping[str, Any], BoundPlan]], target: Target, peak: float) -> str:
    """The smallest larger machine that the program fits, as text."""
    problem = ranked[0][1].problem
    chip, bigger = target.name.partition(":")[0], larger_machines(target)
    if not bigger:
        return f"there is no larger {chip}"
    large_enough = [t for t in bigger if t.devices * _limit(problem, t) >= peak * target.devices]
    found = smallest(ranked, large_enough)
    if found is None:
        return f"no {chip} machine is large enough, up to {bigger[-1].name}"
    return f"the smallest {chip} that it fits is {_machine_text(found)}"


def _machine_text(fit: FeasibleMachine) -> str:
    """`v5e:4x4 (fsdp:16, remat=full: 11.7 GiB a device)`."""
    name = fit.plan.name + (f", {variant_text(fit.variant)}" if fit.variant else "")
    return f"{fit.target.name} ({name}: {bytes_text(fit.plan.peak_bytes)} a device)"


def _limit_text(peak: float) -> str:
    """The limit with which a plan fits, rounded up to three digits: `memory_limit_bytes=4_740_000`."""
    unit = 10 ** max(int(math.log10(peak)) - 2, 0)
    return f"memory_limit_bytes={math.ceil(peak / unit) * unit:_}"


def smallest(
    ranked: Sequence[tuple[Mapping[str, Any], BoundPlan]], targets: Sequence[Target]
) -> FeasibleMachine | None:
    """The first of the machines on which one of the variants fits."""
    for target in targets:
        for variant, bound in ranked:
            found = _best_on(bound.problem, target)
            if found is not None:
                return FeasibleMachine(target, found, variant)
        variant, bound = ranked[0]
        found = _best_on(bound.problem, target, of_all=True) if target.devices <= MOST_SEARCHED_DEVICES else None
        if found is not None:
            return FeasibleMachine(target, found, variant)
    return None


def _best_on(problem: PlanningProblem, target: Target, of_all: bool = False) -> Candidate | None:
    """The best plan on another machine; None where none fits, or (unless `of_all`) where no lean plan fits."""
    cost = CostModel(problem.axes, problem.roles, target, problem.cost.fusion, problem.state,
                     gather=problem.cost.gather)  # fmt: skip
    limit, mesh = _limit(problem, target), problem.machine.sizes
    pin = partial(problem.with_fixed_shardings, existing=problem.existing, fixed=problem.fixed)
    try:
        lean = [] if of_all else pin(list(_lean(problem, target)))
        if not of_all and not any(price(name, layout, cost, problem.memory).fits(limit) for name, layout in lean):
            return None
        best, _ = search(problem.axes, problem.roles, cost, problem.memory, target.devices, limit, mesh, pin)
    except FixedError:  # fixed shardings are not possible there
        return None
    return best if best.fits(limit) else None


def _limit(problem: PlanningProblem, target: Target) -> float:
    return problem.limit if problem.limit_given else target.chip.memory_bytes


def _lean(problem: PlanningProblem, target: Target) -> Iterator[tuple[str, Any]]:
    """Lean plans with their layouts, the simplest first."""
    if problem.machine.sizes is not None:
        return iter(on_mesh(problem.axes, problem.roles, problem.machine.sizes))
    requests = _lean_requests(problem.roles, target.devices)
    return ((str(one), layout_of(problem.axes, problem.roles, one)) for one in requests)


def _lean_requests(roles: Roles, devices: int) -> Iterator[Request]:
    """Requests with state sharded over all devices; devices that tp, ep and cp do not use shard the batch."""
    powers = [
        n for n in (2**k for k in range(MOST_LEAN_SHARDS.bit_length())) if n <= MOST_LEAN_SHARDS and devices % n == 0
    ]
    combinations = [
        (tp, ep, cp)
        for tp in (powers if [c for c in roles.parallel if c not in roles.experts] else [1])
        for ep in (powers if roles.experts else [1])
        for cp in (powers if roles.context else [1])
        if tp * ep * cp <= MOST_LEAN_SHARDS and devices % (tp * ep * cp) == 0
    ]
    for tp, ep, cp in sorted(combinations, key=lambda each: (math.prod(each), each)):
        rest = devices // (tp * ep * cp)
        sizes = {k: n for k, n in (("dp", rest), ("cp", cp), ("ep", ep), ("tp", tp)) if n > 1} or {"dp": 1}
        for flags in [["seq"], []] if tp > 1 and roles.sequence else [[]]:
            yield request(sizes, *flags, "state")

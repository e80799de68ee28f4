"""A program that no plan fits: the least memory that was reached, what takes it, and the smallest machine that would.

    a device of M holds at least N / M of what the leanest plan leaves on a device of N (M > N)

So larger machines are tried in order of size, from the first that this bound allows. On each, lean plans are priced
(state in as many parts as there are devices; `LEANEST` of the variants) until one fits, then the best plan is searched;
where no lean one fits, all of the leanest variant are priced (up to `MOST_SEARCHED` devices). Machines of as many
devices with more memory are tried alike. Nothing depends on the clock.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from autoshard._shown import shown
from autoshard._units import bytes_text, variant_text
from autoshard.errors import AutoshardWarning, PlanError
from autoshard.sharding.axes.roles import Roles
from autoshard.sharding.cost.step_time import CostModel
from autoshard.sharding.layout.fixed_shardings import FixedError
from autoshard.sharding.layout.plan_request import Request, layout_of, request
from autoshard.sharding.machines.machine_sizes import larger_machines, machines_with_more_memory
from autoshard.sharding.machines.targets import Target
from autoshard.sharding.plan.sharding_plan import Plan
from autoshard.sharding.search.candidate import Candidate, price
from autoshard.sharding.search.layout_search import on_mesh, search

if TYPE_CHECKING:
    from autoshard.sharding.planner.planning import PlanningProblem

LEANEST = 3  # variants that are tried on other machines: those of the least memory on this one
MOST_SEARCHED = 512  # devices of a machine on which all plans are priced
WORTH_A_WORD = 1e-3  # of the memory
MOST_CUTS = 64  # devices that share what is not the batch, in a lean plan
_WORDS = {"parameter": "parameters", "gradient": "gradients", "activation": "activations", "temporary": "temporaries"}


class DoesNotFitError(PlanError):
    """No plan, or not the one that was asked for, leaves every device within its memory."""


@shown
@dataclass(frozen=True)
class FeasibleMachine:
    """A machine on which a program fits, and its best plan there."""

    target: Target
    plan: Candidate
    variant: Mapping[str, Any]


def report_infeasible(plans: Sequence[tuple[Mapping[str, Any], Plan]]) -> None:
    """Says that nothing fits: as an error, or as a warning where the memory was not asked about.

    Args:
        plans: the variants, each with its leanest plan.

    Raises:
        DoesNotFitError: a limit was given, or a target that was to be planned for.
    """
    ranked = sorted(plans, key=lambda one: one[1].estimate.peak_memory_bytes)
    planner: PlanningProblem = ranked[0][1].bound.planner
    text = f"auto_shard({planner.traced.name}): {_shortage(*ranked[0])}. "
    if not planner.refuses:
        more = "A larger machine, " if planner.target_given else "More devices, "
        warnings.warn(f"{text}{more}or a smaller batch, would do", AutoshardWarning, stacklevel=5)
        return
    raise DoesNotFitError(text + _ways_out(ranked[:LEANEST]))


def _shortage(variant: Mapping[str, Any], plan: Plan) -> str:
    planner, peak = plan.bound.planner, plan.estimate.peak_memory_bytes
    limit = plan.limit_bytes
    name = plan.chosen + (f", {variant_text(variant)}" if variant else "")
    head = "the plan asked for does not fit" if not planner.searched else "no plan fits"
    which = "the plan" if not planner.searched else "the smallest"
    return (
        f"{head} {bytes_text(limit)} a device on {planner.machine.target.name}: {which} ({name}) needs "
        f"{bytes_text(peak)}, {bytes_text(peak - limit)} too much ({_contents(plan)})"
    )


def _contents(plan: Plan) -> str:
    """What takes the memory at the worst moment, the most first."""
    bound = plan.bound
    kinds = dict(plan.estimate.memory_bytes)
    waiting = bound.planner.cost(bound.layout).waiting
    kinds |= bound.planner.memory.kinds_at_peak(bound.layout, waiting)
    ranked = sorted(kinds.items(), key=lambda item: -item[1])
    least = plan.estimate.peak_memory_bytes * WORTH_A_WORD
    return ", ".join(f"{_WORDS.get(kind, kind)} {bytes_text(size)}" for kind, size in ranked if size > least)


def _ways_out(ranked: Sequence[tuple[Mapping[str, Any], Plan]]) -> str:
    """What would do: a larger machine, another, a smaller batch, a higher limit."""
    planner: PlanningProblem = ranked[0][1].bound.planner
    peak = ranked[0][1].estimate.peak_memory_bytes
    if not planner.searched:
        return f"memory_limit_bytes={_rounded_up(peak)} would do, or a smaller batch{_padded(ranked[0][1])}"
    target, parts = planner.machine.target, []
    if planner.machine.sizes is None:
        parts.append(_larger(ranked, target, peak))
    if not planner.limit_given and (others := machines_with_more_memory(target)):
        found = smallest(ranked, others)
        of_size = f"of other machines with {target.devices} device{'s' * (target.devices > 1)}"
        parts.append(f"{of_size}, {_text(found)} would do" if found else f"{of_size} none would do")
    text = "; ".join(parts)
    text = f"{text[:1].upper()}{text[1:]}. " if text else ""
    return (
        f"{text}Or give it a smaller batch{_padded(ranked[0][1])}; memory_limit_bytes={_rounded_up(peak)} plans for "
        "this one all the same"
    )


def _padded(plan: Plan) -> str:
    """`, or vocab padded from 50257 to 50264`: with which the leanest plan would fit."""
    return "".join(f", or {p.axis} padded from {p.size} to {p.padded}" for p in plan.padding)


def _larger(ranked: Sequence[tuple[Mapping[str, Any], Plan]], target: Target, peak: float) -> str:
    """The smallest of the larger machines that would do, in words."""
    planner: PlanningProblem = ranked[0][1].bound.planner
    chip, bigger = target.name.partition(":")[0], larger_machines(target)
    if not bigger:
        return f"{chip} comes no larger"
    able = [t for t in bigger if t.devices * _limit(planner, t) >= peak * target.devices]
    found = smallest(ranked, able)
    return f"the smallest {chip} that would do is {_text(found)}" if found else f"not even {bigger[-1].name} would do"


def _text(fit: FeasibleMachine) -> str:
    """`v5e:4x4 (fsdp:16, remat=full: 11.7 GiB a device)`."""
    name = fit.plan.name + (f", {variant_text(fit.variant)}" if fit.variant else "")
    return f"{fit.target.name} ({name}: {bytes_text(fit.plan.peak_bytes)} a device)"


def _rounded_up(n: float) -> str:
    """A number of three digits that is not smaller, `4.95e10`."""
    power = max(int(math.log10(n)) - 2, 0)
    digits = math.ceil(n / 10**power)
    return f"{digits / 100:.2f}e{power + 2}" if power else str(digits)


def smallest(ranked: Sequence[tuple[Mapping[str, Any], Plan]], targets: Sequence[Target]) -> FeasibleMachine | None:
    """The first of the machines on which one of the variants fits."""
    for target in targets:
        for variant, plan in ranked:
            found = _best_on(plan.bound.planner, target)
            if found is not None:
                return FeasibleMachine(target, found, variant)
        variant, plan = ranked[0]
        found = _best_on(plan.bound.planner, target, of_all=True) if target.devices <= MOST_SEARCHED else None
        if found is not None:
            return FeasibleMachine(target, found, variant)
    return None


def _best_on(planner: PlanningProblem, target: Target, of_all: bool = False) -> Candidate | None:
    """The best plan on another machine, None where it does not fit, or (unless `of_all`) no lean one does."""
    cost = CostModel(planner.axes, planner.roles, target, planner.cost.fusion, planner.state)
    limit, mesh = _limit(planner, target), planner.machine.sizes
    pin = partial(planner.pinned, held=planner.held, fixed=planner.fixed)
    try:
        lean = [] if of_all else pin(list(_lean(planner, target)))
        if not of_all and not any(price(name, layout, cost, planner.memory).fits(limit) for name, layout in lean):
            return None
        best, _ = search(planner.axes, planner.roles, cost, planner.memory, target.devices, limit, mesh, pin)
    except FixedError:  # what is fixed cannot hold there
        return None
    return best if best.fits(limit) else None


def _limit(planner: PlanningProblem, target: Target) -> float:
    return planner.limit if planner.limit_given else target.chip.memory_bytes


def _lean(planner: PlanningProblem, target: Target) -> Iterator[tuple[str, Any]]:
    """Layouts that leave little on a device, the plainest first."""
    if planner.machine.sizes is not None:
        return iter(on_mesh(planner.axes, planner.roles, planner.machine.sizes))
    asked = _lean_requests(planner.roles, target.devices)
    return ((str(one), layout_of(planner.axes, planner.roles, one)) for one in asked)


def _lean_requests(roles: Roles, devices: int) -> Iterator[Request]:
    """State in as many parts as there are devices; the batch over those that cut nothing else."""
    cuts = [n for n in (2**k for k in range(MOST_CUTS.bit_length())) if n <= MOST_CUTS and devices % n == 0]
    some = [
        (tp, ep, cp)
        for tp in (cuts if [c for c in roles.parallel if c not in roles.experts] else [1])
        for ep in (cuts if roles.experts else [1])
        for cp in (cuts if roles.context else [1])
        if tp * ep * cp <= MOST_CUTS and devices % (tp * ep * cp) == 0
    ]
    for tp, ep, cp in sorted(some, key=lambda each: (math.prod(each), each)):
        rest = devices // (tp * ep * cp)
        cut = {k: n for k, n in (("dp", rest), ("cp", cp), ("ep", ep), ("tp", tp)) if n > 1} or {"dp": 1}
        for flags in [["seq"], []] if tp > 1 and roles.sequence else [[]]:
            yield request(cut, *flags, "state")

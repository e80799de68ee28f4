"""Prices other shardings of some inputs, with the models that priced the plan.

A wish is a sharding that the user passes to `explain`. It is priced twice: under the plan as it is (mesh, device
assignment, rules), compared with the plan; and by planning again with the wish fixed, compared with the best plan
without it. A wish for a parameter is priced alone, and together with the same sharding of its moments; the better of
the two counts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jax.sharding import PartitionSpec

from autoshard._shown import shown
from autoshard.sharding.cost.collectives import reassigned
from autoshard.sharding.layout.fixed_shardings import WISH, FixedError, fixed_specs
from autoshard.sharding.layout.layout import Layout
from autoshard.sharding.plan.sharding_plan import ShardingPlan
from autoshard.sharding.plan.tensors import Leaf
from autoshard.sharding.planner.bound_plan import BoundPlan
from autoshard.sharding.planner.constants import MOST_ALTERNATIVES
from autoshard.sharding.program.path_patterns import first_few
from autoshard.spmdrules.core.placement import Spec, axes_of, from_partition_spec, to_partition_spec


@shown
@dataclass(frozen=True)
class Alternative:
    """Another sharding of some inputs, and the cost of a step with it.

    Attributes:
        fixed: the argument `fixed=` that gives it: path -> spec or names of logical axes.
        step_time_us: time of a step; infinite if the sharding is not possible.
        peak_bytes: peak memory of a device.
        strategy: the strategy of the plan with this sharding.
        refusal: why the sharding is not possible; empty if it is.
        moments: how many of `fixed` are moments of the optimizer.
        spec_in_plan: the first of `fixed` as a spec on the plan's mesh; None if it was not priced under the plan.
    """

    fixed: Mapping[str, Any]
    step_time_us: float = math.inf
    peak_bytes: float = math.inf
    strategy: str = ""
    refusal: str = ""
    moments: int = 0
    spec_in_plan: PartitionSpec | None = None


def neighbouring_specs(bound: BoundPlan, leaves: Sequence[Leaf]) -> list[Alternative]:
    """Alternatives for inputs with equal shardings, priced under the plan: those that fit first, each by time.

    In each, one mesh axis shards another dimension or none. Moments with the sharding of their parameter follow it.
    """
    leaf = leaves[0]
    spec = from_partition_spec(leaf.spec, len(leaf.shape))
    plan, layout = bound.plan, bound.layout
    dims = layout.axes.of_value[layout.axes.program.inputs[plan.inputs.index(leaf)]]
    loops = {d for d, dim in enumerate(dims) if any(c in layout.axes.stacked for c in dim)}
    moments = [m for m in moments_of(plan, leaves) if m.spec == leaf.spec]
    found = []
    for other in list(dict.fromkeys(_neighbours(spec, leaf.shape, layout.mesh, loops)))[:MOST_ALTERNATIVES]:
        wish = to_partition_spec(other)
        found.append(_priced_in_plan(bound, {x.path: wish for x in (*leaves, *moments)}, len(moments)))
    limit = plan.limit_bytes or math.inf
    return sorted(found, key=lambda c: (c.peak_bytes > limit, round(c.step_time_us, 3), c.peak_bytes))


def price_in_plan(bound: BoundPlan, leaves: Sequence[Leaf], wish: Any) -> list[Alternative]:
    """A wish priced under the plan as it is: first with the moments of parameters, if there are any, then alone."""
    moments = moments_of(bound.plan, leaves)
    alone = {x.path: wish for x in leaves}
    found = [_priced_in_plan(bound, alone | {x.path: wish for x in moments}, len(moments))] if moments else []
    return [*found, _priced_in_plan(bound, alone)]


def price_replanned(bound: BoundPlan, leaves: Sequence[Leaf], wish: Any) -> list[Alternative]:
    """A wish priced by planning again with it fixed, as in `price_in_plan`. A mesh that the user gave is kept."""
    moments = moments_of(bound.plan, leaves)
    alone = {x.path: wish for x in leaves}
    found = [_priced_replanned(bound, alone | {x.path: wish for x in moments}, len(moments))] if moments else []
    return [*found, _priced_replanned(bound, alone)]


def best_without(bound: BoundPlan) -> Alternative:
    """The best plan without the wish. If the plan came from a search, it is the plan itself."""
    plan = bound.plan
    if bound.problem.searched:
        return Alternative({}, plan.estimate.step_time_us, plan.estimate.peak_memory_bytes, plan.chosen)
    return _priced_replanned(bound, {})


def moments_of(plan: ShardingPlan, leaves: Sequence[Leaf]) -> list[Leaf]:
    """The moments of the parameters among `leaves`.

    Candidates are the inputs of the optimizer that have the shape and the axes of the parameter. Its moments are those
    candidates whose paths end most like its own path.
    """
    found: dict[str, Leaf] = {}
    for leaf in leaves:
        if leaf.role != "parameter":
            continue
        like = [x for x in plan.inputs if x.role == "optimizer" and (x.shape, x.axes) == (leaf.shape, leaf.axes)]
        most = max((_shared_end(x.path, leaf.path) for x in like), default=0)
        found |= {x.path: x for x in like if most and _shared_end(x.path, leaf.path) == most}
    given = {x.path for x in leaves}
    return [x for path, x in found.items() if path not in given]


def _shared_end(one: str, other: str) -> int:
    pairs = zip(reversed(one.split("/")), reversed(other.split("/")), strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), min(one.count("/"), other.count("/")) + 1)


def _neighbours(spec: Spec, shape: Sequence[int], mesh: Mapping[str, int], loops: set[int]) -> Iterator[Spec]:
    """Neighbouring specs: replicated, one mesh axis moved or removed, all axes of one dimension moved to another."""
    if any(spec):
        yield ((),) * len(shape)
    groups = [(a,) for a, n in mesh.items() if n > 1] + [dim for dim in spec if len(dim) > 1]
    for group in groups:
        rest = [tuple(a for a in dim if a not in group) for dim in spec]
        for d in (None, *range(len(shape))):
            moved = tuple((*dim, *group) if i == d else dim for i, dim in enumerate(rest))
            shard_count = math.prod(mesh[a] for a in moved[d]) if d is not None else 1
            if moved != spec and d not in loops and (d is None or (shape[d] and shape[d] % shard_count == 0)):
                if d is not None or any(a in axes_of(spec) for a in group):
                    yield moved


def _priced_in_plan(bound: BoundPlan, fixed: Mapping[str, Any], moments: int = 0) -> Alternative:
    old, problem = bound.layout, bound.problem
    layout = Layout(old.axes, old.roles, old.mesh, old.table, old.storage, sequence=old.sequence)
    try:
        pins = fixed_specs(bound.traced, old.axes, layout, fixed, WISH)
    except FixedError as error:
        return Alternative(fixed, refusal=first_few(error.problems, "; "))
    layout.fixed = {**old.fixed, **pins}
    first = bound.traced.program.inputs[bound.traced.in_paths.index(next(iter(fixed)))]
    cost = reassigned(problem.cost(layout), bound.assignment, problem.machine.target.chip)
    peak, _ = problem.memory(layout, cost.live_buffers)
    spec = to_partition_spec(pins[first])
    return Alternative(fixed, cost.step_time_us, peak, bound.plan.chosen, moments=moments, spec_in_plan=spec)


def _priced_replanned(bound: BoundPlan, fixed: Mapping[str, Any], moments: int = 0) -> Alternative:
    problem = bound.problem
    try:
        best, _ = problem.search(problem.existing, {**problem.fixed, **fixed})
    except FixedError as error:
        return Alternative(fixed, refusal=first_few(error.problems, "; "))
    return Alternative(fixed, best.cost.step_time_us, best.peak_bytes, best.name, moments=moments)

"""Chooses into how many groups of rows (replicas) the batch is divided, so that gradients are reduced only once.

Under data parallelism each device has a term of every gradient. A loop over microbatches would reduce these terms in
each iteration. If the rows of each device along `dp` are a group of their own, the loop accumulates the terms of each
group, and they are reduced over `dp` after the loop. This takes no more memory, since a gradient has the size of its
parameter, which `dp` does not shard. If the mesh axis of the rows also shards stored parameters or state (`fsdp`,
`isp`, `zero1`, `state`), each device stores only a shard of a gradient. The loop then reduces gradients in each
microbatch. There are no groups along `ep` or along a sequence. Along `ep`, each device would need a term for every
expert. Along a sequence, attention mixes the positions of all groups.

If the stages of a pipeline gather their layers once a step, `fsdp` has groups of rows, too. Each device then holds the
gradients of a stage as it holds the weights: whole. They are reduced and scattered over `fsdp` after the loop.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from autoshard.errors import PlanError, PlanRequestError
from autoshard.sharding.layout.plan_request import STORING, parse_request
from autoshard.sharding.microbatches.constants import GAIN
from autoshard.sharding.microbatches.too_slow import TooSlow
from autoshard.sharding.plan.memory_doubt import plan_ranked_us
from autoshard.sharding.program.tracing import Traced

# With groups, XLA:TPU all-reduces gradients that it would else reduce-scatter to shards of the state. A step of a Llama
# of 16 layers under `dp:4 fsdp:4`, compiled for v5e:4x4, then takes 760 ms in place of 736.
_SHARDS_STATE = frozenset({"zero1", *STORING})


def requested_replicas(plan: Any, *, gathers_once: bool = False) -> int:
    """Return the number of groups of rows for a requested plan: N of `dp:N`; 1 if it reduces gradients in the loop.

    Args:
        plan: the requested plan.
        gathers_once: whether weights are gathered once a step. The number is then that of `dp:A fsdp:B`, A x B.

    Example:
        >>> requested_replicas("pp:2 dp:4"), requested_replicas("dp:2 fsdp:4")
        (4, 1)
        >>> requested_replicas("pp:2 dp:2 fsdp:4", gathers_once=True)
        8
    """
    return math.prod(axes_of_groups(plan, gathers_once=gathers_once).values())


def axes_of_groups(plan: Any, *, gathers_once: bool = False) -> dict[str, int]:
    """Return the mesh axes along which the rows of a plan can be groups, with their sizes; empty if they cannot.

    Args:
        plan: the plan, as text.
        gathers_once: whether weights are gathered once a step.

    Example:
        >>> axes_of_groups("pp:2 dp:4"), axes_of_groups("pp:2 fsdp:4")
        ({'dp': 4}, {})
    """
    kinds = ("dp", "fsdp") if gathers_once else ("dp",)
    try:
        request = parse_request(plan) if isinstance(plan, str) else None
    except PlanRequestError:  # such as a plan that local search has changed
        return {}
    if request is None or request.flags & {"state"} or request.changes:
        return {}
    if not _SHARDS_STATE.difference(kinds).isdisjoint(request.kinds.values()):
        return {}
    return {axis: n for axis, n in request.sizes.items() if request.kinds[axis] in kinds}


def with_replicas(traced: Traced, count: int, *, cut: Callable[..., Traced], replicas: int) -> Traced:
    """Cut a step into microbatches. Sum groups of rows apart if the rows divide into this number of groups.

    Args:
        traced: the step.
        count: the number of microbatches.
        cut: cuts a step into a number of microbatches, with `replicas=`.
        replicas: the number of groups.
    """
    if replicas > 1 and count > 1:
        try:
            return cut(traced, count, replicas=replicas)
        except PlanError:  # the rows of a microbatch do not divide into groups
            pass
    return cut(traced, count)


class GroupedRows:
    """Plans a searched step in microbatches, without groups of rows and with them.

    A step is searched without groups first. If its estimate says that groups are faster (`BoundPlan.groups`), it is
    searched with this number of groups, too. Once they were faster, further numbers of microbatches are searched with
    this number of groups only: groups save more time the more microbatches there are.

    Args:
        traced: the step.
        cut: see `with_replicas`.
        planned: makes the bound plan of a step that is cut. Its argument `most_us` is an upper bound of the step time
            in microseconds. A slower plan is not needed.
        most_us: the same bound for all plans.
        error: the relative error of estimates. Groups are also searched if they are estimated to be slower than
            `most_us` by this error at most.
    """

    def __init__(
        self,
        traced: Traced,
        cut: Callable[..., Traced],
        planned: Callable[..., Any],
        most_us: float = math.inf,
        error: float = 0.0,
    ):
        self._traced, self._cut, self._planned = traced, cut, planned
        self._most_us, self._error, self._replicas = most_us, error, 1

    def cut(self, traced: Traced, count: int) -> Traced:
        """Cut the step into microbatches, with the groups that were faster so far."""
        return with_replicas(traced, count, cut=self._cut, replicas=self._replicas)

    def planned(self, step: Traced) -> Any:
        """Return the better bound plan of a step that is cut: without groups or with them."""
        made = self._planned(step, most_us=self._most_us)
        if step.replicas > 1:
            return made
        fits, time, groups = made.plan.fits, plan_ranked_us(made.plan), made.groups
        if groups is None or groups.time_us >= min((1 - GAIN) * time, (1 + self._error) * self._most_us):
            return made
        grouped = with_replicas(self._traced, step.microbatches, cut=self._cut, replicas=groups.count)
        if grouped.replicas == 1:
            return made
        try:
            other = self._planned(grouped, most_us=min(self._most_us, time) if fits else math.inf)
        except TooSlow:
            return made
        if other.plan.fits < fits or plan_ranked_us(other.plan) >= time:
            return _with_candidates_of(other, made)
        if other.plan.fits:
            self._replicas = grouped.replicas
        return _with_candidates_of(made, other)


def _with_candidates_of(other: Any, best: Any) -> Any:
    """Return `best` with the candidates of both searches: each strategy at its lower time, and the chosen one as it is.

    A search with groups prices every strategy with these groups, also those that are slower with them.
    """
    found = {name: (name, time, size) for name, time, size in other.plan.candidates}
    for name, time, size in best.plan.candidates:
        if name == best.plan.chosen or name not in found or time <= found[name][1]:
            found[name] = name, time, size
    return best.where(candidates=tuple(sorted(found.values(), key=lambda each: each[1])))

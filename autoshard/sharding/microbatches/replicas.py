"""Chooses into how many groups of rows (replicas) the batch is divided, so that gradients are reduced only once.

Under data parallelism each device has a term of every gradient. A loop over microbatches would reduce these terms in
each iteration. If the rows of each device along `dp` are a group of their own, the loop accumulates the terms of each
group, and they are reduced over `dp` after the loop. This takes no more memory, since a gradient has the size of its
parameter, which `dp` does not shard. If the mesh axis of the rows also shards stored parameters or state (`fsdp`,
`zero1`, `state`), each device stores only a shard of a gradient. The loop then reduces gradients in each microbatch.

If the stages of a pipeline gather their layers once a step, `fsdp` has groups of rows, too. Each device then holds the
gradients of a stage as it holds the weights: whole. They are reduced and scattered over `fsdp` after the loop.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from autoshard.errors import PlanError, PlanRequestError
from autoshard.sharding.layout.plan_request import CONTEXT, parse_request
from autoshard.sharding.plan.gather_words import ONCE
from autoshard.sharding.program.tracing import Traced

# With groups, XLA:TPU all-reduces gradients that it would else reduce-scatter to shards of the state. A step of a Llama
# of 16 layers under `dp:4 fsdp:4`, compiled for v5e:4x4, then takes 760 ms in place of 736.
_SHARDS_STATE = ("zero1", "fsdp")
_WHOLE_ROWS = CONTEXT  # their operators take no further dimension


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
    kinds = ("dp", "fsdp") if gathers_once else ("dp",)
    try:
        request = parse_request(plan) if isinstance(plan, str) else None
    except PlanRequestError:  # such as a plan that local search has changed
        return 1
    if request is None or request.flags & {"state"} or request.changes:
        return 1
    if any(kind in {*_WHOLE_ROWS, *_SHARDS_STATE}.difference(kinds) for kind in request.kinds.values()):
        return 1
    return math.prod(n for axis, n in request.sizes.items() if request.kinds[axis] in kinds)


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


def plan_with_replicas(traced: Traced, made: Any, cut: Callable[..., Traced], planned: Callable[[Traced], Any]) -> Any:
    """Return a searched plan. If the step is faster with groups of rows that are summed apart, return its plan instead.

    Args:
        traced: the step.
        made: the bound plan that the search chose.
        cut: see `with_replicas`.
        planned: makes the bound plan of a step that is cut.
    """
    apart = requested_replicas(made.plan.chosen, gathers_once=made.plan.gather == ONCE)
    count = made.plan.microbatches
    if apart == 1 or count == 1:
        return made
    step = with_replicas(traced, count, cut=cut, replicas=apart)
    if step.replicas == 1:
        return made
    other = planned(step)
    faster = other.plan.estimate.step_time_us < made.plan.estimate.step_time_us
    return other.where(notes=made.plan.notes) if faster and other.plan.fits >= made.plan.fits else made

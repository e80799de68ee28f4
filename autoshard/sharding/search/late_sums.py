"""Estimates for which number of groups of rows (`microbatches/replicas.py`) a step is searched again.

A step in microbatches is first searched without groups. Its loop then reduces gradients in every tick, so plans with
`dp` seem slower than they are with groups. With groups, gradients are reduced once a step. The estimate changes the
prices of a plan accordingly, and assigns devices anew, because `dp` then sends less and may use slower links.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from autoshard._shown import shown
from autoshard.sharding.cost.collectives import Collective, StepCost, best_assignment
from autoshard.sharding.cost.step_time import CostModel
from autoshard.sharding.microbatches.replicas import axes_of_groups
from autoshard.sharding.search.candidate import Candidate


@shown
class Groups(NamedTuple):
    """Groups of rows that are worth a search.

    Attributes:
        count: the number of groups.
        time_us: the estimated step time with them, in microseconds.
    """

    count: int
    time_us: float


def promising_groups(
    candidates: Iterable[Candidate], cost: CostModel, ticks: int, *, gathers_once: bool = False
) -> Groups | None:
    """Return the groups with the least estimated time; None if no candidate can have groups.

    Args:
        candidates: plans of a step in microbatches, without groups.
        cost: the model that priced them.
        ticks: how often the loop over microbatches computes gradients.
        gathers_once: whether weights are gathered once a step.
    """
    summing = _sums_of_rows(cost)
    best: Groups | None = None
    for each in candidates:
        axes = axes_of_groups(each.name, gathers_once=gathers_once)
        count = math.prod(axes.values())
        if count == 1:
            continue
        late = _with_late_sums(each.cost, summing, frozenset(axes), ticks)
        time_us = best_assignment(cost.target, each.layout.mesh, late)[1].step_time_us
        if best is None or time_us < best.time_us:
            best = Groups(count, time_us)
    return best


def _sums_of_rows(cost: CostModel) -> np.ndarray:
    """Return a mask of the program's operators: those that sum over rows of the batch."""
    batch, axes = cost.roles.batch, cost.axes
    return np.array([
        op.rule is not None and any(f.kind == "reduce" and batch in factors.get(f.name, ()) for f in op.rule.factors)
        for op, factors in zip(axes.program.ops(), axes.of_op, strict=True)
    ], bool)  # fmt: skip


def _with_late_sums(cost: StepCost, summing: np.ndarray, axes: frozenset[str], ticks: int) -> StepCost:
    """Return a cost in which these operators reduce their results over the axes of groups once a step.

    These reductions follow the loop, where little compute is left, so none of them counts as hidden. An operator that
    gathers its operands instead of reducing its result keeps the gathers, because its price has no reduction.
    """

    def changed(one: Collective) -> Collective:
        if one.ops is None or one.array >= 0 or not axes.issuperset(one.axes) or not summing[one.ops].all():
            return one
        return replace(one, count=one.count / ticks, place=None)

    return replace(cost, collectives=tuple(map(changed, cost.collectives)))

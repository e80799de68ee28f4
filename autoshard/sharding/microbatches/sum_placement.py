"""Chooses where sums over the microbatches are completed: after the operators that keep them partial, or before.

An operator that only passes a sum on, such as a scale or a transpose of a gradient, runs once after the loop instead of
once in each microbatch, unless the sum of its operands takes more memory than that of its results. So two gradients of
one tied weight are added in the loop, and their scale is applied after it.
"""

from __future__ import annotations

from typing import Any

from autoshard import _compat
from autoshard.sharding.microbatches.states import After, Partial, Whole
from autoshard.sharding.program.array_sizes import nbytes


def sum_late(flow: Any) -> None:
    """Move a step's operators on sums from the loop to after it. Changes the flow in place."""
    users: dict[Any, list[Any]] = {}
    for eqn, step in zip(flow.jaxpr.eqns, flow.steps, strict=True):
        for atom in eqn.invars:
            if not isinstance(atom, _compat.Literal):
                users.setdefault(atom, []).append(step)
    totals = {atom for eqn, step in zip(flow.jaxpr.eqns, flow.steps, strict=True) if step.phase == "after"
              for atom in eqn.invars if isinstance(flow.of(atom), Partial)}  # fmt: skip
    for eqn, step in reversed([*zip(flow.jaxpr.eqns, flow.steps, strict=True)]):
        if not passes_sums(step) or any(u.phase != "after" for var in eqn.outvars for u in users.get(var, ())):
            continue
        sums = {atom for atom in eqn.invars if isinstance(flow.of(atom), Partial)}
        if sum(nbytes(v.aval) for v in sums - totals) <= sum(nbytes(v.aval) for v in eqn.outvars):
            totals = (totals | sums).difference(eqn.outvars)
            step.phase = "after"
            step.operands = [After()] * len(eqn.invars)
            step.results = [After()] * len(eqn.outvars)
            flow.states |= zip(eqn.outvars, step.results, strict=True)
    flow.results = [flow.of(atom) for atom in flow.jaxpr.outvars]


def passes_sums(step: Any) -> bool:
    """Whether a step only passes sums on: it takes no rows."""
    return (
        step.phase == "each"
        and not step.inner
        and step.factor is None
        and all(isinstance(state, (Partial, Whole)) for state in step.operands)
    )
